"""Several processes on one machine (gloo) learn what one process learns, DDP and FSDP2, and end as one."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_resume import ROOT, rows, wait_for

from runs.checkpoint import load_checkpoint, open_checkpoint, read_meta
from training.distributed import shutdown_timeout

# Runs jobs one after the other, each on ranks that are forked, which needs no second import of torch.
RANKS = """
import faulthandler, json, os, signal, socket, sys
from pathlib import Path
import numpy as np
import torch, torch._dynamo, torch.distributed.checkpoint, torch.distributed.fsdp  # a rank would import them
import generation.text, training.watch.watchers, training.run
from data.batches import Batches
from data.config import DataConfig, TokenizerConfig
from model.config import GPTConfig
from train import train
from training.config import OptimizerConfig, TrainConfig

folder, jobs = Path(sys.argv[1]), json.loads(sys.argv[2])
torch.set_num_threads(1)
training.watch.pictures.Drawing.draw = lambda self, path, how, now=False: None
training.watch.pictures.Plots.draw_heads = lambda self, run: None

def rank(job, number, size, port):
    faulthandler.dump_traceback_later(60, exit=True)
    if size:
        os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(size)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(job.get("machine", size))}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    seen = open(folder / f"{job['name']}.{number}.batches", "wb")
    batch = Batches.batch
    def record(self, *arguments):
        windows = batch(self, *arguments)
        seen.write(windows.tobytes())
        seen.flush()
        return windows
    Batches.batch = record
    exec(job.get("patch", ""), {"number": number})
    settings = dict(precision="fp32", distributed=job["how"], micro_batch_size=job["micro"], max_steps=20)
    settings |= job.get("more", {})
    train(TrainConfig(
        model=GPTConfig(**dict(n_layer=2, n_head=2, n_embd=32, block_size=16, zero_init=False) | job.get("model", {})),
        data=DataConfig(path=str(folder / "text.txt"), cache_dir=str(folder / "cache")),
        tokenizer=TokenizerConfig(name="byte"), optimizer=OptimizerConfig(name=job["optimizer"], lr=0.003),
        run_dir=str(folder / job["name"]), device="cpu", batch_size=8,
        eval_interval=10, eval_batch_size=5, checkpoint_interval=6, log_interval=1, sample_tokens=0, **settings,
    ))

for job in jobs:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for number in range(job["ranks"] or 1):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                rank(job, number, job["ranks"], port)
                status = 0
            except BaseException:
                import traceback
                traceback.print_exc()
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
        pids.append(pid)
    while pids:
        pid, status = os.wait()
        pids.remove(pid)
        if status:
            for other in pids:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"{job}: a rank ended with status {status}")
"""


def run_ranks(folder: Path, *jobs: dict, status: int = 0) -> str:
    """Each job: name, ranks (0: without torchrun's environment), how, micro, optimizer, more settings."""
    command = [sys.executable, "-c", RANKS, str(folder), json.dumps(jobs)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == status, done.stderr[-3000:]
    return done.stdout + done.stderr


def job(name: str, ranks: int, how: str, micro: int, optimizer: str = "adamw", **more) -> dict:
    """hsdp: on machines of two processes, one of them alone where there are two."""
    machine = {"machine": max(1, ranks // 2)} if how == "hsdp" else {}
    return dict(name=name, ranks=ranks, how=how, micro=micro, optimizer=optimizer, **machine, **more)


def figures(run_dir: Path, kind: str = "loss") -> list[float]:
    return [row[kind] for row in rows(run_dir) if kind in row]


def all_batches(folder: Path, name: str, ranks: int) -> set[bytes]:
    """The windows of each step, put together from what the ranks saw, as 20 pieces of bytes."""
    window = 17 * 8
    seen = [(folder / f"{name}.{rank}.batches").read_bytes() for rank in range(ranks)]
    share = 8 // ranks * window
    return [b"".join(s[step * share : (step + 1) * share] for s in seen) for step in range(20)]


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "tolerance"), [("adamw", 1e-5), ("muon", 1e-3)])
def test_one_process_and_several_learn_the_same_from_the_same_batches(text_file, tmp_path, optimizer, tolerance):
    ways = [("ddp", 0), ("ddp", 2), ("ddp", 4), ("fsdp", 2), ("fsdp", 4), ("hsdp", 4)]
    jobs = [job(f"{how}{ranks}" if ranks else "alone", ranks, how, 2, optimizer) for how, ranks in ways]
    run_ranks(tmp_path, *jobs)
    expected = figures(tmp_path / "alone")
    assert len(expected) == 20 and expected[-1] < expected[0] - 0.5
    for one in jobs[1:]:
        assert all_batches(tmp_path, one["name"], one["ranks"]) == all_batches(tmp_path, "alone", 1)
        assert figures(tmp_path / one["name"]) == pytest.approx(expected, rel=tolerance)
        found, alone = (figures(tmp_path / name, "val_bpb") for name in (one["name"], "alone"))
        assert len(found) == 2 and found == pytest.approx(alone, rel=tolerance), one["name"]


# A model is built without any rank ever holding more than its rows and, in pieces, one weight.
ROWS_ALONE = """
import torch, training.start
from training.plan import LiveBytes
class Live(LiveBytes):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        data = type(made) in (torch.Tensor, torch.nn.Parameter) and not made.is_meta
        return super().__torch_dispatch__(lambda: made, types) if data else made
live, new_model, spread = Live(), training.start.new_model, training.start.spread
def measured(*given):
    with live:
        return new_model(*given)
def limited(model, *given, **named):
    sizes = [4 * parameter.numel() for parameter in model.parameters()]
    with live:
        forward = spread(model, *given, **named)
    assert sum(sizes) / 2 <= live.most < sum(sizes) / 2 + 3 * max(sizes), (live.most, sum(sizes), max(sizes))
    return forward
training.start.new_model, training.start.spread = measured, limited
"""


@pytest.mark.slow
def test_sharded_runs_gather_in_bf16_and_begin_and_learn_as_one_process_does(text_file, tmp_path):
    """The losses differ by what rounding the norms' and the embedding's weights to bf16 changes: under 1%."""
    bf16 = {"precision": "bf16", "max_steps": 6}
    deep = {"model": {"dropout": 0.1, "tie_embeddings": True, "norm": "layernorm", "bias": True}}
    ways = {"alone": (0, "ddp"), "fsdp": (2, "fsdp"), "hsdp": (2, "hsdp")}
    jobs = [job(name, ranks, how, 2, more=bf16, **deep) for name, (ranks, how) in ways.items()]
    jobs[1]["more"] = bf16 | {"recompute": "block"}
    weights = job("weights", 2, "fsdp", 2, model={"n_layer": 8}, patch=ROWS_ALONE, more=bf16)
    run_ranks(tmp_path, *jobs, weights)
    expected = figures(tmp_path / "alone")
    for name in ("fsdp", "hsdp"):
        assert figures(tmp_path / name) == pytest.approx(expected, rel=1e-2)
        assert figures(tmp_path / name)[0] == pytest.approx(expected[0], rel=1e-3)


@pytest.mark.slow
def test_a_sharded_run_begins_with_the_weights_of_another(text_file, tmp_path):
    position = {"model": {"position": "learned"}}
    run_ranks(tmp_path, job("origin", 0, "ddp", 2, **position))
    first = {"init_from": str(tmp_path / "origin"), "max_steps": 3}
    jobs = [job("alone", 0, "ddp", 2, more=first, **position), job("fsdp", 2, "fsdp", 2, more=first, **position)]
    run_ranks(tmp_path, *jobs)
    assert figures(tmp_path / "fsdp") == pytest.approx(figures(tmp_path / "alone"), rel=1e-5)
    assert figures(tmp_path / "alone")[0] < figures(tmp_path / "origin")[0] - 0.5


ONE_COPY = """
import torch
clip = torch.nn.utils.clip_grad_norm_
def check(parameters, longest):
    parameters = list(parameters)
    assert len({parameter.grad.untyped_storage().data_ptr() for parameter in parameters}) == 1  # a bucket
    return clip(parameters, longest)
torch.nn.utils.clip_grad_norm_ = check
"""


@pytest.mark.slow
def test_gradients_are_kept_once_where_they_are_averaged(text_file, tmp_path):
    run_ranks(tmp_path, job("run", 2, "ddp", 2, patch=ONE_COPY, more={"max_steps": 3}))


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks_and_another_way(text_file, tmp_path):
    dropout = {"model": {"dropout": 0.1, "tie_embeddings": True}}
    # Each of alone, ddp, fsdp and hsdp after each other.
    chain = [("ddp", 0), ("hsdp", 4), ("fsdp", 2), ("ddp", 2), ("hsdp", 2), ("ddp", 0), ("ddp", 4), ("fsdp", 4)]
    chain += [("hsdp", 4), ("ddp", 2), ("ddp", 0), ("fsdp", 2), ("ddp", 0)]
    jobs = []
    for (how, ranks), steps in zip(chain, [*range(1, len(chain)), 20], strict=True):
        resume = {"resume": str(tmp_path / "chain")} if jobs else {}
        jobs.append(job("chain", ranks, how, 2, "muon", more={"max_steps": steps, **resume}, **dropout))
    run_ranks(tmp_path, *jobs)
    assert [row["step"] for row in rows(tmp_path / "chain") if "loss" in row] == list(range(1, 21))
    assert load_checkpoint(tmp_path / "chain/checkpoints/last").meta["step"] == 20


@pytest.mark.slow
def test_a_sharded_runs_checkpoint_is_whole_under_plain_names_and_a_damaged_shard_is_found(text_file, tmp_path):
    run_ranks(tmp_path, job("sharded", 2, "fsdp", 4), job("alone", 0, "ddp", 4))
    model = open_checkpoint(str(tmp_path / "sharded")).model
    assert model(torch.zeros(1, 4, dtype=torch.long)).isfinite().all()
    last = tmp_path / "sharded/checkpoints/last"
    sharded, alone = (
        load_file(tmp_path / name / "checkpoints/last/model.safetensors") for name in ("sharded", "alone")
    )
    assert sharded.keys() == alone.keys()
    for name, weight in sharded.items():
        torch.testing.assert_close(weight, alone[name], rtol=1e-3, atol=1e-4)
    for kind in ("loss", "val_bpb"):
        assert figures(tmp_path / "sharded", kind) == pytest.approx(figures(tmp_path / "alone", kind), rel=1e-4), kind
    assert sorted(p.name for p in last.iterdir()) == ["meta.json", "model.safetensors", "state", "tokenizer.json"]
    shards = sorted(f"state/{shard.name}" for shard in (last / "state").iterdir())
    assert len(shards) == 2 and set(shards) < read_meta(last)["files"].keys()

    content = (last / shards[1]).read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    damages = {"truncated": content[:-100], "flipped": bytes(flipped), "missing": None}
    for name, damaged in damages.items():
        shutil.copytree(tmp_path / "sharded", tmp_path / name, symlinks=True)
        shard = tmp_path / name / "checkpoints/step_20" / shards[1]
        shard.unlink() if damaged is None else shard.write_bytes(damaged)
    output = run_ranks(tmp_path, *(job(name, 2, "fsdp", 4, more={"resume": str(tmp_path / name)}) for name in damages))
    for name in damages:
        (said,) = [line for line in output.splitlines() if f"{name}/checkpoints/step_20 is damaged" in line]
        assert shards[1] in said and said.endswith("trying step_18.")
        found = load_file(tmp_path / name / "checkpoints/step_20/model.safetensors")
        assert found.keys() == sharded.keys() and all(torch.equal(found[key], sharded[key]) for key in found)


# The disk of one rank is full when it has to write the shards of one step.
FULL_DISK = """
import errno, os
from torch.distributed.checkpoint.filesystem import FileSystem
create_stream = FileSystem.create_stream
def full(self, path, mode):
    if number == {rank} and "step_{step}." in str(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return create_stream(self, path, mode)
FileSystem.create_stream = full
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_write_its_shards_keeps_the_old_checkpoint_on_all(text_file, tmp_path, rank):
    whole, failing = (job(name, 2, "fsdp", 4) for name in ("whole", "failing"))
    run_ranks(tmp_path, whole, failing | {"patch": FULL_DISK.format(rank=rank, step=12)})
    assert figures(tmp_path / "whole") == figures(tmp_path / "failing")
    told = (tmp_path / "failing/train.log").read_text().splitlines()
    (message,) = [line for line in told if "could not be written" in line]
    assert "step 12" in message and f"No space left on device, on rank {rank}" in message and "bytes" in message
    assert "training goes on" in message and message.endswith("step_10.")
    checkpoints = tmp_path / "failing/checkpoints"
    assert not list(checkpoints.glob(".*")) and not (checkpoints / "step_12").exists()
    assert load_checkpoint(checkpoints / "last").meta["step"] == 20

    # The last one of a run: all ranks end, and its resumption begins where the latest checkpoint is.
    last = job("last", 2, "fsdp", 4, patch=FULL_DISK.format(rank=rank, step=20))
    output = run_ranks(tmp_path, last, status=1)
    assert "step 20 could not be written" in output and "make room, then go on from" in output
    assert "Timeout" not in output  # no rank waited for the other
    run_ranks(tmp_path, job("last", 2, "fsdp", 4, more={"resume": str(tmp_path / "last")}))
    assert figures(tmp_path / "whole") == figures(tmp_path / "last")


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def start_torchrun(folder: Path, text: Path, *overrides: str, script: Path = ROOT / "train.py") -> subprocess.Popen:
    settings = f"""data.path={text} data.cache_dir={folder}/cache tokenizer=byte model.n_layer=1 model.n_embd=32
        model.block_size=16 sample_tokens=0 device=cpu log_interval=1 max_steps=1000000 eval_interval=1000000
        checkpoint_interval=20 run_dir=run"""
    command = [*TORCHRUN, str(script), *settings.split(), *overrides]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ranks_of(process: subprocess.Popen) -> list[int]:
    """The processes that a torchrun has started, the first rank first."""
    found = {}
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        if rank := re.search(rb"\0RANK=(\d+)", Path(f"/proc/{child}/environ").read_bytes()):
            found[int(rank[1])] = int(child)
    return [found[rank] for rank in sorted(found)]


def messages(process: subprocess.Popen) -> list[str]:
    """The errors that all ranks of a torchrun that failed have told."""
    output = "".join(process.communicate(timeout=60))
    assert process.returncode != 0
    return [line for line in output.splitlines() if line.startswith("error: ")]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds torchrun's processes in /proc")
def test_a_sigterm_on_any_rank_saves_on_all(text_file, tmp_path):
    process = start_torchrun(tmp_path, text_file, "distributed=fsdp")
    wait_for(tmp_path / "run/metrics.jsonl")
    os.kill(ranks_of(process)[1], signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    assert process.returncode != 0 and output.count("stopped after step") == 1, errors
    step = int(output.split("stopped after step ")[1].split(";")[0])
    assert load_checkpoint(tmp_path / "run/checkpoints/last").meta["step"] == step
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()].count("outputs") == 0  # one run directory
    assert [row["step"] for row in rows(tmp_path / "run") if "loss" in row] == list(range(1, step + 1))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds torchrun's processes in /proc")
@pytest.mark.parametrize("how", ["ddp", "hsdp"])
def test_a_killed_rank_ends_all_with_one_message_and_the_checkpoint_stays(text_file, tmp_path, how):
    process = start_torchrun(tmp_path, text_file, f"distributed={how}")
    wait_for(tmp_path / "run/checkpoints/last/meta.json")
    os.kill(ranks_of(process)[1], signal.SIGKILL)
    started = time.monotonic()
    (message,) = messages(process)
    assert time.monotonic() - started < 40 and "another process" in message and "resume=" in message
    assert load_checkpoint((tmp_path / "run/checkpoints/last").resolve()).meta["step"] % 20 == 0


def test_a_mistake_is_told_once_however_many_ranks_make_it(text_file, tmp_path):
    process = start_torchrun(tmp_path, text_file, "batch_size=7")
    assert messages(process) == ["error: batch_size=7 is not a multiple of the 2 processes: choose one that is."]


SLOW_SAVES = """
import time, train
from runs import checkpoint
original = checkpoint.save_file
def slow(weights, path):
    open("saving", "w").write("x")
    time.sleep(3)
    original(weights, path)
checkpoint.save_file = slow
train.main()
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="finds torchrun's processes in /proc")
@pytest.mark.parametrize("everybody", [False, True])
def test_a_slow_save_outlives_the_signal_of_one_rank_and_those_that_come_twice(
    text_file, tmp_path, monkeypatch, everybody
):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (script := tmp_path / "slow.py").write_text(SLOW_SAVES)
    process = start_torchrun(tmp_path, text_file, "checkpoint_interval=1000000", script=script)
    wait_for(tmp_path / "run/metrics.jsonl")
    ranks = ranks_of(process)
    os.kill(ranks[1], signal.SIGTERM)
    wait_for(tmp_path / "saving")
    if everybody:  # as Slurm does
        for pid in (*ranks, process.pid):
            os.kill(pid, signal.SIGTERM)
    output, errors = process.communicate(timeout=60)
    step = int(output.split("stopped after step ")[1].split(";")[0])
    assert load_checkpoint(tmp_path / "run/checkpoints/last").meta["step"] == step, errors


@pytest.mark.slow
def test_a_save_that_torchrun_would_cut_off_is_reported_once(text_file, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "2")
    (script := tmp_path / "slow.py").write_text(SLOW_SAVES)
    process = start_torchrun(tmp_path, text_file, "max_steps=40", "eval_interval=40", script=script)
    output, errors = process.communicate(timeout=100)
    (told,) = re.findall(r"saving took (.*) s, but torchrun leaves (.*) s for it .*_TIMEOUT=(\d+) in its", output)
    assert float(told[0]) >= 3 and float(told[1]) <= 2 and int(told[2]) > 60, errors
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "soon")  # is not a reason to fail
    assert shutdown_timeout() == 30


def test_the_time_that_torchrun_leaves_is_read_from_its_flag(tmp_path):
    child = "from training.distributed import shutdown_timeout; print(shutdown_timeout())"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    for flags in (["--shutdown-timeout=77"], ["--nnodes=1", "--shutdown_timeout", "77"]):
        command = [sys.executable, "-c", parent, *flags, "train.py"]
        assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout == "77.0\n"
