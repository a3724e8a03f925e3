"""Several processes on one machine (gloo) learn the same as one, by DDP."""

import copy
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import close, first_of
from safetensors.torch import load_file
from test_resume import ROOT, assert_same_run, rows, wait_for

from common.errors import DeviceError
from common.mistakes import sentence_for
from model.config import GPTConfig
from model.gpt import GPT
from runs.checkpoint import load_checkpoint, read_meta
from train import train_step
from training.config import TrainConfig
from training.distributed import Ranks, check_interface, parallelize
from training.plan import trial_run

# Runs jobs one after the other, each on ranks that are forked, which needs no second import of torch.
RANKS = """
import faulthandler, json, os, signal, socket, sys
from pathlib import Path
import numpy as np
import torch, torch._dynamo  # a rank would import them
import generation.generate, training.log, pages.report, training.start
from data.batches import TokenDataset
from data.config import DataConfig, TokenizerConfig
from model.config import GPTConfig
from train import train
from training.config import OptimizerConfig, TrainConfig

folder, jobs = Path(sys.argv[1]), json.loads(sys.argv[2])
torch.set_num_threads(1)
pages.report.Report.draw = lambda self: None

def rank(job, number, size, port):
    faulthandler.dump_traceback_later(60, exit=True)
    if size:
        os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(size)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    seen = open(folder / f"{job['name']}.{number}.batches", "wb")
    train_batch = TokenDataset.train_batch
    def record(self, *arguments):
        batch = train_batch(self, *arguments)
        seen.write(np.hstack([batch.inputs, batch.targets[:, -1:]]).tobytes())
        seen.flush()
        return batch
    TokenDataset.train_batch = record
    exec(job.get("patch", ""), {})
    settings = dict(precision="fp32", micro_batch_size=2, max_steps=20)
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
            except SystemExit as ended:
                status = ended.code != 128 + signal.SIGTERM
            except BaseException:
                import traceback
                traceback.print_exc()
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(int(status))
        pids.append(pid)
    while pids:
        pid, status = os.wait()
        pids.remove(pid)
        if status:
            for other in pids:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"{job}: a rank ended with status {status}")
"""


def run_ranks(folder: Path, *jobs: dict) -> None:
    command = [sys.executable, "-c", RANKS, str(folder), json.dumps(jobs)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]


def job(name: str, ranks: int, optimizer: str = "adamw", **more) -> dict:
    """ranks: 0 without torchrun's environment.

    more: settings, the model's, and code that runs first on every rank."""
    return dict(name=name, ranks=ranks, optimizer=optimizer, **more)


MEET = """
import datetime, os, sys, time
import torch.distributed as dist
from training.distributed import Ranks
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=1))
ranks = Ranks(rank, 2, rank, 2, launched=True)
started = time.monotonic()
for place in ("text", "weights"):
    time.sleep(3 * rank)
    ranks.wait_for_all(place, every=0.05)
print(round(time.monotonic() - started))
ranks.leave()
assert not dist.is_initialized()
"""


@pytest.mark.long
def test_ranks_that_prepare_for_longer_than_a_collective_waits_meet_all_the_same(tmp_path):
    environment = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "error::FutureWarning", "-c", MEET], cwd=ROOT, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env=environment | {"RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    ends = [rank.communicate(timeout=100) for rank in ranks]
    assert [out.strip() for out, _ in ends] == ["6", "6"], ends


SEVERAL = """
import os, sys, time
import torch
from training.distributed import Ranks
rank = int(os.environ["RANK"])
ranks = Ranks(rank, 2, rank, 2, launched=True)
for run in range(5):
    ranks.join(torch.device("cpu"))
    if not rank:
        time.sleep(0.1)
        open(f"{sys.argv[1]}/text {run}", "x").close()
    ranks.wait_for_all("text", every=0.01)
    assert os.path.exists(f"{sys.argv[1]}/text {run}")
    assert ranks.sum_(torch.tensor([run + rank])).item() == 2 * run + 1
    ranks.leave()
    time.sleep(0.03 * (run % 2 == rank))
"""


@pytest.mark.long
@pytest.mark.parametrize("shared", ["0", "1"])
def test_the_runs_of_a_sweep_meet_one_after_the_other(tmp_path, shared):
    """The ranks found the addresses of the run before, and waited for ever or failed; a text was awaited once."""
    (script := tmp_path / "several.py").write_text(SEVERAL)
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": shared, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*TORCHRUN, str(script), str(tmp_path)], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def figures(run_dir: Path, kind: str = "loss") -> list[float]:
    return [row[kind] for row in rows(run_dir) if kind in row]


def all_batches(folder: Path, name: str, ranks: int) -> list[bytes]:
    """The windows of each step, put together from what the ranks saw, as 20 pieces of bytes."""
    window = 17 * 8
    seen = [(folder / f"{name}.{rank}.batches").read_bytes() for rank in range(ranks)]
    share = 8 // ranks * window
    return [b"".join(s[step * share : (step + 1) * share] for s in seen) for step in range(20)]


STOP = """
import train
step = train.train_step
def stopping(run, number):
    if number == 12:
        run.signals.received = 15
    return step(run, number)
train.train_step = stopping
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "tolerance", "model", "ranks"),
    first_of(("adamw", 1e-5, {"ngrams": [2, 3], "ngram_rows": 51}, 2), ("muon", 1e-3, {}, 2)),
    ids=["adamw", "muon"],
)
def test_several_learn_what_one_process_does_from_the_same_batches_and_resume_to_the_same_bits(
    text_file, tmp_path, optimizer, tolerance, model, ranks
):
    made = partial(job, optimizer=optimizer, model=model)
    stopped = made("resumed", ranks)
    resumed = stopped | {"more": {"resume": str(tmp_path / "resumed")}}
    run_ranks(tmp_path, made("alone", 0), made("several", ranks), stopped | {"patch": STOP}, resumed)
    alone, several = tmp_path / "alone", tmp_path / "several"
    expected, kept = figures(alone), alone / "checkpoints/last"
    assert len(expected) == 20 and expected[-1] < expected[0] - 0.5
    assert all_batches(tmp_path, "several", ranks) == all_batches(tmp_path, "alone", 1)
    assert figures(several) == pytest.approx(expected, rel=tolerance)
    assert figures(several, "val_bpb") == pytest.approx(figures(alone, "val_bpb"), rel=tolerance)
    assert_same_run(several, tmp_path / "resumed")
    assert "resuming at step 13" in (tmp_path / "resumed/train.log").read_text()
    # A checkpoint is the same for all: under plain names.
    weights, saved = (load_file(run / "checkpoints/last/model.safetensors") for run in (alone, several))
    assert saved.keys() == weights.keys() and ("ngrams.tables.1.weight" in saved) == ("ngrams" in model)
    for name, weight in weights.items():
        close(saved[name], weight, rtol=10 * tolerance, atol=tolerance)
    assert read_meta(several / "checkpoints/last").files.keys() == read_meta(kept).files.keys()


@pytest.mark.long
def test_a_run_goes_on_with_another_number_of_ranks_and_begins_with_weights_of_one(text_file, tmp_path):
    dropout = {"model": {"dropout": 0.1, "tie_embeddings": True}}
    jobs = []
    for number, ranks in enumerate((0, 4, 2, 0), 1):
        resume = {"resume": str(tmp_path / "chain")} if jobs else {}
        jobs.append(job("chain", ranks, "muon", more={"max_steps": 5 * number, **resume}, **dropout))
    first = {"init_from": str(tmp_path / "chain"), "max_steps": 1, "recompute": "block"}
    jobs += [job("begun_alone", 0, more=first, **dropout), job("begun", 2, more=first, **dropout)]
    run_ranks(tmp_path, *jobs)
    losses = [row["loss"] for row in rows(tmp_path / "chain") if "loss" in row]
    assert [row["step"] for row in rows(tmp_path / "chain") if "loss" in row] == list(range(1, 21))
    assert load_checkpoint(tmp_path / "chain/checkpoints/last").meta.progress.step == 20
    assert figures(tmp_path / "begun") == pytest.approx(figures(tmp_path / "begun_alone"), rel=1e-5)
    assert figures(tmp_path / "begun")[0] < losses[0] - 0.05


@pytest.fixture
def alone(monkeypatch):
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Ranks(launched=True)
    Ranks(launched=True).leave()


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_gradients_of_all_micro_batches_are_kept_where_ddp_sends_them(alone):
    """Beside the buckets they would take as much memory again."""
    model = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=61, zero_init=False)
    config, cpu = TrainConfig(model=model, batch_size=8, micro_batch_size=2), torch.device("cpu")
    losses = []
    for ranks in (Ranks(), alone):
        torch.manual_seed(0)
        run = trial_run(config, cpu, torch.float32)
        run.ranks, run.training_loss = ranks, parallelize(run.model, ranks, cpu, False)
        places = []

        def note(module, arguments, run=run, places=places):
            gradients = [weight.grad for weight in run.model.parameters()]
            places.append({g if g is None else g.untyped_storage().data_ptr() for g in gradients})

        run.model.blocks[0].register_forward_pre_hook(note)
        losses.append([figure.item() for step in range(4) for figure in train_step(run, step)])
    assert len(places) == 16 and all(place == places[-1] for place in places[8:])  # torch orders the buckets anew once
    assert len(places[-1]) == 1 and None not in places[-1]
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked", "alone")
@pytest.mark.parametrize("attention", ["index", "dsa", "sdpa+value_residual"])
def test_a_sharded_block_leaves_for_others_what_a_whole_one_does(attention):
    """fully_shard() copies dataclasses among the arguments of a block, and casts the tensors in them."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    shape = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=61, zero_init=False)
    model = GPT(GPTConfig(attention=attention, **shape)).train()
    for layer in model.attentions:
        for modifier in layer.modifiers.values():
            torch.nn.init.constant_(modifier.mixture, 0.5)
    tokens, targets = torch.randint(61, (2, 2, 16))
    whole = copy.deepcopy(model)
    sharded = copy.deepcopy(model)
    in_half = copy.deepcopy(model)
    for each, policy in ((sharded, MixedPrecisionPolicy()), (in_half, MixedPrecisionPolicy(torch.bfloat16))):
        for part in (*each.blocks, each):
            fully_shard(part, mp_policy=policy)
    for each in (whole, sharded):
        each.loss(tokens, targets).backward()
    for one, other in zip(whole.parameters(), sharded.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.allclose(one.grad, other.grad.full_tensor(), atol=1e-5)
    with torch.no_grad():
        assert torch.equal(in_half(tokens), model.bfloat16()(tokens))


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_several_matrices_in_one_layer_are_not_divided_as_one():
    """torch divides the rows of a weight in the middle: a process would have those of the first matrices alone."""
    from torch.distributed.tensor import DeviceMesh, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = DeviceMesh("cpu", [0, 1])
        behind = RowwiseParallel(input_layouts=Replicate())
        whole = ColwiseParallel(output_layouts=Replicate())
        for name, layer, plan, fits in [
            ("swiglu", "mlp.gate_up_proj", ColwiseParallel(), False),
            ("swiglu", "attention.qkv_proj", ColwiseParallel(), False),
            ("swiglu", "mlp.gate_up_proj", whole, True),
            ("swiglu", "mlp.down_proj", behind, True),
            ("relu2", "attention.o_proj", behind, True),
            ("relu2", "mlp.up_proj", whole, True),
        ]:
            shape = dict(n_layer=1, n_head=2, n_embd=32, block_size=16, vocab_size=61, mlp=name)
            model = parallelize_module(GPT(GPTConfig(**shape)), mesh, {f"blocks.*.{layer}": plan})
            if fits:
                assert model(torch.zeros(1, 5).long()).shape == (1, 5, 61)
            else:
                with pytest.raises(ValueError, match="matrices in one layer are divided"):
                    model(torch.zeros(1, 5).long())
    finally:
        dist.destroy_process_group()


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@contextmanager
def torchrun(folder: Path, text: Path, *overrides: str, script: Path = ROOT / "train.py") -> Iterator[subprocess.Popen]:
    """A run of two processes, which end with the test."""
    settings = f"""data.path={text} data.cache_dir={folder}/cache tokenizer=byte model.n_layer=1 model.n_embd=32
        model.block_size=16 sample_tokens=0 device=cpu compile=off log_interval=1 max_steps=1000000
        eval_interval=1000000 checkpoint_interval=20 run_dir=run"""
    command = [*TORCHRUN, str(script), *settings.split(), *overrides]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()  # it passes the signal on
            process.communicate(timeout=60)


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
    print(output)  # pytest shows it if the test fails
    assert process.returncode != 0
    return [line for line in output.splitlines() if line.startswith("error: ")]


in_proc = pytest.mark.skipif(not Path("/proc").exists(), reason="finds torchrun's processes in /proc")


SLOW_TO_TELL = """
import time
from cli.hydra_command import run_train_command
from common.console import Signals
original = Signals.__exit__
def slow(self, *error):
    original(self, *error)
    time.sleep(2)
Signals.__exit__ = slow
run_train_command()
"""


@pytest.mark.long
@pytest.mark.slow
@in_proc
def test_a_killed_rank_ends_all_with_one_message_and_the_checkpoint_stays(text_file, tmp_path, monkeypatch):
    """Also where torchrun's SIGTERM arrives before the message is out."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (script := tmp_path / "slow.py").write_text(SLOW_TO_TELL)
    with torchrun(tmp_path, text_file, script=script) as process:
        wait_for(tmp_path / "run/checkpoints/last/meta.json")
        os.kill(ranks_of(process)[1], signal.SIGKILL)
        (message,) = messages(process)
    assert "another process" in message and "resume=" in message
    assert load_checkpoint((tmp_path / "run/checkpoints/last").resolve()).meta.progress.step % 20 == 0


@pytest.mark.long
def test_a_mistake_is_told_once_however_many_ranks_make_it(text_file, tmp_path):
    said = "batch_size=7 is no multiple of 2, the number of processes: choose one, such as 8."
    with torchrun(tmp_path, text_file, "batch_size=7") as process:
        assert messages(process) == [f"error: {said}"]


OF_ANOTHER_MACHINE = """
import os, sys
import torch
import training.start
from cli.hydra_command import run_train_command
if "precision=auto" in sys.argv:  # of the first card it is bf16, of the second, an older one, fp16
    types = torch.bfloat16, torch.float16
    training.start.choose_precision = lambda name, device: types[int(os.environ["RANK"])]
sys.argv[1:] = [argument.replace("RANK", os.environ["RANK"]) for argument in sys.argv[1:]]
os.environ["LOCAL_RANK"] = "0"  # each prepares its own text
run_train_command()
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("data.path=RANK.txt", r"has text_hash=\w{16}, and RANK=1 \w{16}: "),
        ("seed=RANK", "has seed=0, and RANK=1 1: "),
        ("precision=auto", "has precision=bfloat16, and RANK=1 float16: type precision=fp16 or fp32"),
    ],
)
def test_ranks_of_other_settings_or_another_text_train_no_model_together(given, said, text_file, tmp_path, monkeypatch):
    """As those of two machines may be."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (script := tmp_path / "other.py").write_text(OF_ANOTHER_MACHINE)
    text = text_file.read_text(encoding="utf-8")
    (tmp_path / "0.txt").write_text(text, encoding="utf-8")
    (tmp_path / "1.txt").write_text(text + "more", encoding="utf-8")
    with torchrun(tmp_path, text_file, given, script=script) as process:
        (told,) = messages(process)
    assert re.match(f"error: RANK=0 {said}", told)


@pytest.mark.parametrize("run_id", ["none", None])
def test_a_process_of_torchrun_and_no_other_ends_with_it(run_id, monkeypatch):
    ends = mock.Mock()
    monkeypatch.setattr("training.distributed.end_with_parent", ends)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if run_id:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
    Ranks().join(torch.device("cpu"))
    assert ends.called == bool(run_id)


@pytest.mark.parametrize("names", ["^lo,docker", "no_such_interface", "NAME,no_such_interface"])
def test_a_network_interface_that_is_not_there_is_told_before_gloo_looks_for_it(names, monkeypatch):
    present = [name for _, name in socket.if_nameindex()]
    names = names.replace("NAME", present[0])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", names)
    with pytest.raises(DeviceError, match=re.escape(f"GLOO_SOCKET_IFNAME={names} names no network interface here")):
        Ranks(size=2, launched=True).join(torch.device("cpu"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", ",".join(present))
    check_interface()


def test_a_rank_that_gloo_does_not_reach_is_told_in_a_sentence(monkeypatch):
    refused = RuntimeError("Gloo connectFullMesh failed with [pair.cc:152] Connection refused\nmore")
    monkeypatch.setattr("torch.distributed.init_process_group", mock.Mock(side_effect=refused))
    monkeypatch.setattr("training.distributed.torchrun_store", dist.HashStore)
    with pytest.raises(
        DeviceError, match=r"^RANK=0 reaches no other \(Gloo connectFullMesh failed .*: set GLOO_SOCKET"
    ):
        Ranks(size=2, launched=True).join(torch.device("cpu"))


def test_a_rank_whose_first_has_ended_before_the_run_says_so():
    said = "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [10.0.0.1]:1: Connection"
    for end in ("reset by peer. GLHF!", "closed by peer [10.0.0.1]:2"):
        sentence = sentence_for(RuntimeError(f"{said} {end}"))
        assert sentence == (
            "another process of this run has ended, so this one cannot go on: look for the message of that one."
        )
    assert sentence_for(RuntimeError("shapes cannot be multiplied")) is None


LATE_FIRST = """
import os, time
from cli.hydra_command import run_train_command
from training import start
original = start.open_data
def late(*args, **settings):
    time.sleep(2 * (os.environ["RANK"] == "0"))
    return original(*args, **settings)
start.open_data = late
run_train_command()
"""


@pytest.mark.long
def test_the_first_rank_prepares_the_text_and_says_so_however_late_it_is(text_file, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (script := tmp_path / "late.py").write_text(LATE_FIRST)
    with torchrun(tmp_path, text_file, "max_steps=2", script=script) as process:
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert output.count("Preparing") == 1 and "waiting" not in output and "preparing tokens" not in errors


SLOW_SAVES = """
import time
from cli.hydra_command import run_train_command
from runs import checkpoint
original = checkpoint.save_file
def slow(weights, path):
    open("saving", "w").write("x")
    time.sleep(3)
    original(weights, path)
checkpoint.save_file = slow
run_train_command()
"""


@pytest.mark.long
@in_proc
def test_a_slow_save_outlives_the_signal_of_one_rank_and_those_that_come_twice(text_file, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (script := tmp_path / "slow.py").write_text(SLOW_SAVES)
    with torchrun(tmp_path, text_file, "checkpoint_interval=1000000", script=script) as process:
        wait_for(tmp_path / "run/metrics.jsonl")
        ranks = ranks_of(process)
        os.kill(ranks[1], signal.SIGTERM)
        wait_for(tmp_path / "saving")
        for pid in (*ranks, process.pid):  # as Slurm does
            os.kill(pid, signal.SIGTERM)
        output, errors = process.communicate(timeout=60)
    assert process.returncode != 0 and output.count("stopped after step") == 1, errors
    step = int(output.split("stopped after step ")[1].split(";")[0])
    assert load_checkpoint(tmp_path / "run/checkpoints/last").meta.progress.step == step, errors
    assert [row["step"] for row in rows(tmp_path / "run") if "loss" in row] == list(range(1, step + 1))


@pytest.mark.long
@in_proc
def test_torchrun_outlives_its_terminal_under_nohup_if_it_leaves_that_signal_alone(text_file, tmp_path, monkeypatch):
    """By default it ends all processes at SIGHUP, which nohup ignores."""
    monkeypatch.setattr(f"{__name__}.TORCHRUN", [*TORCHRUN, "--signals-to-handle=SIGTERM,SIGINT"])
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with torchrun(tmp_path, text_file) as process:
            wait_for(tmp_path / "run/metrics.jsonl")
            for pid in (*ranks_of(process), process.pid):
                os.kill(pid, signal.SIGHUP)
            wait_for(tmp_path / "run/checkpoints/step_40/meta.json")
            assert process.poll() is None
    finally:
        signal.signal(signal.SIGHUP, before)
