"""On a real GPU, CUDA's or Apple's: pytest -m gpu.

Others skip them; TINYGPT_GPU_TESTS=cpu rehearses them on a CPU.
"""

import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import gpu, random_gpt
from test_generate import BYTE, texts_of
from test_resume import ROOT, rows
from torch.amp import GradScaler

from data.batches import TokenDataset
from model.attention import FORMS, MODIFIERS
from model.config import GPTConfig
from model.gpt import GPT
from train import train, train_step
from training.config import TrainConfig
from training.device import choose_precision, fast_products
from training.distributed import with_recompute
from training.run import Run

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("unchecked")]

DEVICE = torch.device(gpu() or "cpu")
ALONE = [*FORMS, "sdpa+window", *(f"sdpa+{name}" for name in MODIFIERS)]
# Compiling takes seconds: the modifiers together.
COMPILED = [*FORMS, "sdpa+" + "+".join(MODIFIERS), "delta+conv+gate_silu", "sdpa+window/sdpa"]
LONG = 320  # by chunks of queries
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-2}


def new_run(device: torch.device, precision: torch.dtype, **settings) -> Run:
    """A run on random text, with the same weights on every device."""
    shape = dict(n_layer=2, n_head=4, n_kv_head=2, n_embd=64, block_size=64, vocab_size=257, zero_init=False)
    window = {"attention_window": 16} if "window" in settings.get("attention", "") else {}
    recompute = settings.pop("recompute", "none")
    config = TrainConfig(model=GPTConfig(**shape | window | settings), batch_size=8, micro_batch_size=4)
    torch.manual_seed(0)
    model = with_recompute(GPT(config.model).to(device), replace(config, recompute=recompute))
    text = np.random.default_rng(0).integers(0, 256, 10_000, dtype=np.uint16)
    data = TokenDataset(BYTE, text, text, "random", "random", block_size=config.model.block_size, batch_size=8)
    return Run(config, device, precision, data, model, model.loss)


def two_steps(run: Run) -> list[float]:
    """The loss and the gradient's norm of each."""
    with fast_products(run.device, run.dtype):
        return [figure.item() for step in range(2) for figure in train_step(run, step)]


@pytest.mark.parametrize(("T", "precision"), [(64, "fp32"), (64, "auto"), (LONG, "auto")])
@pytest.mark.parametrize("attention", ALONE)
def test_two_steps_have_the_losses_and_gradients_of_the_cpu(attention, precision, T):
    expected = two_steps(new_run(torch.device("cpu"), torch.float32, attention=attention, block_size=T))
    dtype = choose_precision(precision, DEVICE)
    found = two_steps(new_run(DEVICE, dtype, attention=attention, block_size=T))
    if dtype != torch.float32:  # retention divides by lengths that chance makes small: its gradients then differ much
        expected, found = expected[::2], found[::2]
    assert found == pytest.approx(expected, rel=TOLERANCE[dtype])


@pytest.mark.parametrize("attention", ["sdpa", "matmul", "sigmoid", "sdpa+window", "index", "sdpa+value_residual"])
def test_blocks_that_are_computed_twice_have_the_losses_of_those_that_are_kept(attention):
    dtype = choose_precision("auto", DEVICE)
    kept, again = (
        two_steps(new_run(DEVICE, dtype, attention=attention, block_size=LONG, recompute=recompute))
        for recompute in ("none", "block")
    )
    assert again == pytest.approx(kept, rel=1e-3)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="torch tells of waits on CUDA alone")
@pytest.mark.parametrize("T", [64, LONG])
@pytest.mark.parametrize("attention", [name for name in ALONE if name != "loop"])
def test_no_step_waits_for_the_gpu(attention, T):
    run = new_run(DEVICE, choose_precision("auto", DEVICE), attention=attention, block_size=T)
    train_step(run, 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        train_step(run, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("attention", COMPILED)
def test_compiled_steps_have_the_losses_of_eager_ones(attention):
    dtype = choose_precision("auto", DEVICE)
    eager, compiled = (new_run(DEVICE, dtype, attention=attention, n_layer=1) for _ in range(2))
    for block in compiled.model.blocks:
        block.compile()
    compiled.model.runtime.loss_and_gradient = torch.compile(compiled.model.runtime.loss_and_gradient)
    assert two_steps(compiled)[::2] == pytest.approx(two_steps(eager)[::2], rel=TOLERANCE[dtype])
    torch._dynamo.reset()


def test_an_overflow_in_fp16_moves_nothing_and_lowers_the_scale():
    run = new_run(DEVICE, torch.float16)
    run.scaler = GradScaler(DEVICE.type, init_scale=2.0**60)
    before = [weight.detach().clone() for weight in run.model.parameters()]
    train_step(run, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))
    assert run.skipped.tolist() == [1, 1] and run.scaler.get_scale() < 2.0**60


@pytest.mark.parametrize("attention", ["sdpa", "sdpa+forget", "delta", "mla", "sdpa+window"])
def test_greedy_text_is_the_cpus_and_a_seed_draws_the_same_text_again(attention):
    window = {"attention_window": 8} if "window" in attention else {}
    model = random_gpt(vocab_size=257, attention=attention, **window)
    expected = texts_of(model, [[256, 5], [256, 7, 8]], [1, 2], temperature=0)
    model.to(DEVICE)
    assert texts_of(model, [[256, 5], [256, 7, 8]], [1, 2], temperature=0) == expected
    drawn = [texts_of(model, [[256, 5], [256, 7, 8]], [1, 2], top_p=0.9) for _ in range(2)]
    assert drawn[0] == drawn[1]


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("attention", ["sdpa", "sdpa+forget", "stick", "sparsemax", "linear", "delta", "kda"])
def test_deterministic_runs_evaluate_draw_save_and_end_in_the_same_bits(train_config, tmp_path, attention):
    losses = []
    for name in "ab":
        model = replace(train_config.model, attention=attention)
        settings = dict(device=str(DEVICE), deterministic=True, precision="auto", run_dir=str(tmp_path / name))
        losses.append(train(replace(train_config, model=model, **settings)))
    torch.use_deterministic_algorithms(False)
    assert losses[0] == losses[1]


def command(script: str, *words: str) -> list[str]:
    return [sys.executable, str(ROOT / script), *words]


def tiny(text_file: Path, run_dir: Path) -> list[str]:
    small = ["tokenizer=byte", "model.n_layer=1", "model.n_embd=32", "model.block_size=16", "eval_interval=40"]
    return [
        *small,
        f"data.path={text_file}",
        f"data.cache_dir={run_dir}-cache",
        f"run_dir={run_dir}",
        f"device={DEVICE}",
    ]


def test_an_epoch_of_train_and_a_sample_run_as_commands(text_file, tmp_path):
    steps = 12_000 * 9 // 10 // (16 * 16)  # one epoch
    train_words = [*tiny(text_file, tmp_path / "run"), f"max_steps={steps}", "batch_size=16"]
    done = subprocess.run(command("train.py", *train_words), capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and f"on {DEVICE.type}" in done.stdout, done.stderr
    sample = command("sample.py", f"checkpoint={tmp_path / 'run'}", f"device={DEVICE}", "max_new_tokens=20")
    done = subprocess.run(sample, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


def test_a_killed_run_resumes_and_learns_what_an_undisturbed_one_does(text_file, tmp_path):
    figures = {}
    for name in ("whole", "killed"):
        run_dir = tmp_path / name
        words = [*tiny(text_file, run_dir), "max_steps=400", "checkpoint_interval=20", "log_interval=10"]
        process = subprocess.Popen(command("train.py", *words), cwd=tmp_path, stdout=subprocess.DEVNULL)
        while name == "killed" and not [*run_dir.glob("checkpoints/step_*")] and process.poll() is None:
            time.sleep(0.01)
        if name == "killed":
            process.send_signal(signal.SIGKILL)
            process.wait()
            process = subprocess.Popen(command("train.py", f"resume={run_dir}"), cwd=tmp_path)
        assert process.wait() == 0
        figures[name] = [row["val_loss"] for row in rows(run_dir) if "val_loss" in row]
    assert figures["killed"] == pytest.approx(figures["whole"], rel=1e-2)


@pytest.mark.skipif(DEVICE.type != "cuda" or torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_cards_learn_what_one_does(text_file, tmp_path):
    losses = []
    for name, processes in (("one", 1), ("two", 2)):
        words = [*tiny(text_file, tmp_path / name)[:-1], "max_steps=80", "precision=fp32"]
        launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
        done = subprocess.run([*launch, str(ROOT / "train.py"), *words], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        losses.append([row["val_loss"] for row in rows(tmp_path / name) if "val_loss" in row])
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
