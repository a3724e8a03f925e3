"""train(config): what a run leaves behind, and what may not change its result."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import run_here
from hydra import compose, initialize_config_dir
from torch.utils._python_dispatch import TorchDispatchMode

import training.start as start_module
from errors import SettingsError
from generation.scoring import score
from generation.text import complete_text
from model.config import GPTConfig
from model.size import without_weights
from runs.checkpoint import open_checkpoint
from runs.directory import lock_run
from settings import CONF, to_settings
from train import train
from training.config import OptimizerConfig, TrainConfig
from training.device import choose_precision, decoding_precision, fast_products, to_device
from training.distributed import Ranks
from training.evaluation import evaluate
from training.optimizer import set_learning_rate
from training.plan import trial_run
from training.run import DEFAULT_STEPS, steps_to_take
from training.start import start_run
from training.step import take_step
from training.watch.terminal import describe

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("no_pictures")


def metrics(run_dir: str | Path) -> list[dict]:
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]


def test_a_run_learns_and_leaves_all_that_is_needed_to_sample(train_config):
    best = train(train_config)
    rows = metrics(train_config.run_dir)
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 20 and losses[-1] < losses[0] - 1
    evaluations = [row for row in rows if "val_loss" in row]
    assert [row["step"] for row in evaluations] == [10, 20]
    assert best == min(row["val_loss"] for row in evaluations) < math.log(257) - 1
    assert evaluations[-1]["tokens"] == 20 * 8 * 16

    run = Path(train_config.run_dir)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["best", "last", "step_10", "step_20"]
    checkpoint = open_checkpoint(train_config.run_dir)
    text = "".join(complete_text(checkpoint.model, checkpoint.tokenizer, "the", max_new_tokens=20))
    assert 1 <= len(text) <= 20


def test_the_checkpoint_scores_what_the_run_reported(train_config):
    best = train(train_config)
    run = start_run(replace(train_config, run_dir=None))
    checkpoint = open_checkpoint(train_config.run_dir)
    result = evaluate(checkpoint.model, run.data, block_size=16, batch_size=64, autocast=run.autocast)
    assert result.loss == pytest.approx(best, rel=1e-6)
    assert checkpoint.meta["metrics"]["val_loss"] == best
    # With bytes for tokens, a byte costs a token's nats; <|endoftext|> before the text is not predicted.
    assert result.bpb == pytest.approx(result.loss / math.log(2), rel=1e-9)


def test_a_long_validation_text_is_scored_in_part_and_the_error_is_over_its_documents(
    train_config, tmp_path, monkeypatch
):
    texts = ["".join(f"line {i} of text {n}\n" for i in range(5)) for n in range(600)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = replace(train_config.data, source="jsonl", path=str(tmp_path / "t.jsonl"), val_fraction=0.2)
    run = start_run(replace(train_config, data=data))
    whole = evaluate(run.model, run.data, 16, 8, run.autocast)
    scores = score(run.model, run.data.tokenizer, run.data.val[:], stride=16, autocast=run.autocast).total
    held_out = json.loads((run.data.directory / "meta.json").read_text())["val"]
    assert whole.tokens == len(run.data.val) - 1 and whole.text_bytes == held_out["bytes"]
    assert (whole.bpb, whole.bpb_stderr) == pytest.approx((scores.bpb, scores.bpb_stderr), rel=1e-3)
    monkeypatch.setattr("training.evaluation.SCORED_TOKENS", len(run.data.val) // 2)
    part = evaluate(run.model, run.data, 16, 8, run.autocast)
    assert len(run.data.val) // 2 - 16 < part.tokens <= len(run.data.val) // 2
    assert part.bpb == pytest.approx(whole.bpb, rel=0.02) and part.bpb_stderr > 0


def test_the_same_seed_gives_the_same_bits_and_another_does_not(train_config, tmp_path):
    def weights(name: str, seed: int) -> torch.Tensor:
        run_dir = str(tmp_path / name)
        train(replace(train_config, run_dir=run_dir, seed=seed, max_steps=5))
        return open_checkpoint(run_dir).model.lm_head.weight

    first = weights("a", 1)
    assert torch.equal(first, weights("b", 1))
    assert not torch.equal(first, weights("c", 2))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_micro_batches_change_nothing_but_memory(train_config, tmp_path, optimizer):
    def losses(micro_batch_size: int) -> list[float]:
        run_dir = str(tmp_path / f"micro{micro_batch_size}")
        settings = OptimizerConfig(name=optimizer, lr=1e-3, embedding_lr=None, lm_head_lr=None)
        train(replace(train_config, run_dir=run_dir, micro_batch_size=micro_batch_size, optimizer=settings))
        return [row["loss"] for row in metrics(run_dir) if "loss" in row]

    assert losses(2) == pytest.approx(losses(8), rel=1e-4)


def test_evaluation_counts_every_token_once_whatever_the_batch(train_config):
    run = start_run(train_config)
    model = run.model.eval()
    with torch.no_grad():
        model.lm_head.weight.normal_(std=0.1)
    results = [
        evaluate(model, run.data, block_size=16, batch_size=size, autocast=run.autocast).loss for size in (1, 7, 500)
    ]
    assert results == pytest.approx([results[0]] * 3, rel=1e-6)
    tokens = torch.from_numpy(run.data.val[:].astype("int64"))
    total = 0.0
    for start in range(0, len(tokens) - 1, 16):
        window = tokens[start : start + 17]
        logits = model(window[None, :-1])[0]
        total += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
    assert results[0] == pytest.approx(total / (len(tokens) - 1), rel=1e-5)


def test_ranks_score_every_token_once_between_them(train_config, monkeypatch):
    run = start_run(train_config)
    shares = []
    monkeypatch.setattr(Ranks, "sum_", lambda self, nats: shares.append(nats) or nats)
    for ranks in (Ranks(), *(Ranks(n, 4) for n in range(4))):  # of the batches there are two at most
        evaluate(run.model, run.data, 16, 500, run.autocast, ranks)
    whole, *parts = shares
    assert (torch.stack(parts) != 0).sum(0).eq(1).all()
    torch.testing.assert_close(sum(parts), whole)


@pytest.mark.parametrize("max_steps", [None, 10**9])
def test_max_minutes_ends_the_run_and_its_schedule(train_config, max_steps, caplog):
    caplog.set_level("INFO", "tinygpt")
    train(replace(train_config, max_steps=max_steps, max_minutes=0.02, eval_interval=10**9))
    if max_steps is None:
        assert "0.02 minutes in steps of 8 × 16 tokens" in caplog.text
    rows = [row for row in metrics(train_config.run_dir) if "lr" in row]
    assert rows[-1]["seconds"] < 10
    assert rows[-1]["lr"] < 0.1 * max(row["lr"] for row in rows)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, DEFAULT_STEPS),
        ({"max_steps": 7}, 7),
        ({"max_minutes": 1.0}, None),
        ({"max_steps": 7, "max_minutes": 1.0}, 7),
        ({"max_flops": 1.0}, 1),
        ({"max_flops": 1.0, "max_minutes": 1.0}, 1),
    ],
    ids=str,
)
def test_a_budget_alone_decides_how_many_steps_a_run_takes(settings, steps):
    model = GPTConfig(vocab_size=257)
    assert steps_to_take(TrainConfig(model=model, **settings), without_weights(model)) == steps


def test_the_seed_of_every_micro_batchs_dropout_is_its_own_whichever_rank_takes_it(train_config):
    run = start_run(replace(train_config, micro_batch_size=2))

    def seeds(seed: int, step: int, ranks: Ranks) -> list[int]:
        run.config.seed, run.ranks, seen = seed, ranks, []
        run.forward = lambda *both: (seen.append(torch.initial_seed()), run.model(*both))[1]
        take_step(run, step)
        return seen

    whole = seeds(1, 0, Ranks())
    assert seeds(1, 0, Ranks(0, 2)) + seeds(1, 0, Ranks(1, 2)) == whole
    assert len({*whole, *seeds(1, 1, Ranks()), *seeds(2, 0, Ranks())}) == 3 * 4


def test_dropout_differs_from_step_to_step_and_is_off_in_evaluation(train_config):
    train_config.model = replace(train_config.model, dropout=0.5, zero_init=False)
    run = start_run(train_config)

    def loss(step: int) -> float:
        """Of a step that moves nothing, on the batch of step 0."""
        run.batch = lambda _, first, last: batch(0, first, last)
        set_learning_rate(run.optimizers, 0.0)
        return take_step(run, step)[0].item()

    batch = run.batch
    assert loss(0) == loss(0) != loss(1)
    first, second = (evaluate(run.model, run.data, 16, 8, run.autocast) for _ in range(2))
    assert first == second and run.model.training


def test_a_grad_clip_of_0_clips_nothing(train_config):
    def moved(grad_clip: float) -> torch.Tensor:
        run = start_run(replace(train_config, grad_clip=grad_clip, run_dir=None, optimizer=OptimizerConfig(lr=0.01)))
        take_step(run, 0)
        return run.model.lm_head.weight.detach()

    assert torch.equal(moved(0.0), moved(1e9)) and not torch.equal(moved(0.0), moved(1e-9))


@pytest.mark.slow
def test_gpt2_takes_a_training_step_on_the_cpu(train_config):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        model = to_settings(compose("train", ["model=gpt2", "run_dir=null"]), TrainConfig).model
    model = replace(model, vocab_size=50257, block_size=32)  # a window short enough for a test
    config = replace(
        train_config, model=model, optimizer=OptimizerConfig(name="adamw"), batch_size=1, micro_batch_size=1
    )
    loss, grad_norm = take_step(start_run(config), 0)
    assert abs(loss.item() - math.log(50257)) < 0.8 and grad_norm.isfinite()


def test_mistakes_that_need_no_text_are_told_before_it_is_prepared_or_a_run_overwritten(train_config, monkeypatch):
    train(replace(train_config, max_steps=1))
    before = metrics(train_config.run_dir)
    monkeypatch.setattr(start_module, "prepare", lambda *arguments, **options: pytest.fail("prepared"))
    with pytest.raises(SettingsError, match="already holds a run"):
        train(train_config)
    assert metrics(train_config.run_dir) == before
    with lock_run(Path(train_config.run_dir)), pytest.raises(SettingsError, match="still going on"):
        start_run(replace(train_config, resume=train_config.run_dir))
    for processes in (3, 4):
        monkeypatch.setattr(start_module, "ranks_of_torchrun", lambda size=processes: Ranks(size=size))
        with pytest.raises(SettingsError, match=f"batch_size=8 .* the {processes} processes × micro_batch_size=4"):
            start_run(replace(train_config, run_dir=None, micro_batch_size=4))


@pytest.mark.parametrize(
    ("group", "setting", "value", "named"),
    [
        *((None, "device", name, f"device={name}") for name in ("cuda:99", "gpu", "meta")),
        ("model", "attention", "flex", "attention=flex trains on CUDA only"),
        ("model", "vocab_size", 100, r"model\.vocab_size=100 is less than the tokenizer's 257"),
        ("model", "block_size", 10_000, "block_size=10000"),  # more than the text's tokens
    ],
)
def test_what_cannot_train_is_refused_before_the_model_is_built(train_config, group, setting, value, named):
    setattr(getattr(train_config, group) if group else train_config, setting, value)
    with pytest.raises(SettingsError, match=named):
        train(train_config)
    assert not Path(train_config.run_dir).exists()


@pytest.mark.parametrize(("attention", "heads"), {"average": 1, "single_head": 1, "stacked": 2}.items())
def test_the_heads_of_the_form_are_told_and_those_it_ignores(train_config, caplog, attention, heads):
    model = replace(train_config.model, attention=attention)
    text = describe(start_run(replace(train_config, model=model)))
    assert f"2 blocks of {heads} head{'s' * (heads > 1)} ({attention})" in text
    sentence = f"attention={attention} has one head, of width n_embd: model.n_head=2 is ignored."
    assert (sentence in caplog.messages) == (heads == 1)


WRONG = dict(batch_size=0, max_steps=0, max_minutes=0.0, max_flops=-1.0, grad_clip=-1.0, eval_interval=0, seed=-1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *WRONG.items(),
        ("precision", "fp8"),
        ("compile", "yes"),
        ("recompute", "foo"),
        ("distributed", "zero"),
        ("micro_batch_size", 0),
    ],
)
def test_training_settings_out_of_range_are_named(name, value):
    with pytest.raises(SettingsError, match=f"{name}={value}"):
        TrainConfig(**{name: value})


@pytest.mark.parametrize(
    ("name", "instructions", "auto"),
    [
        ("AMD EPYC", {"avx512_bf16": True}, torch.bfloat16),
        ("AMD EPYC", {}, torch.float32),
        ("Intel Xeon", {"avx512_bf16": True, "amx_bf16": False}, torch.float32),  # at half the rate of float32
        ("Intel Xeon", {"avx512_bf16": True, "amx_bf16": True}, torch.bfloat16),
    ],
)
def test_auto_is_bf16_on_processors_that_multiply_it_faster_and_nowhere_else(monkeypatch, name, instructions, auto):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"cpu_name": name, **instructions})
    assert choose_precision("auto", CPU) == auto
    assert choose_precision("fp32", CPU) == torch.float32
    assert choose_precision("bf16", CPU) == torch.bfloat16


@pytest.mark.parametrize(("native", "auto"), [(True, torch.bfloat16), (False, torch.float16)])
def test_gpus_that_only_emulate_bf16_take_fp16(monkeypatch, native, auto):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native or including_emulation)
    assert choose_precision("auto", torch.device("cuda")) == auto


@pytest.mark.parametrize(("native", "auto"), [(True, torch.bfloat16), (False, torch.float32)])
def test_decoding_is_in_bf16_on_gpus_that_have_it_and_else_in_float32(monkeypatch, native, auto):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native or including_emulation)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    gpu = torch.device("cuda:1")
    assert [decoding_precision("auto", device) for device in (gpu, CPU)] == [auto, torch.float32]
    asked = [decoding_precision(name, device) for name in ("bf16", "fp16", "fp32") for device in (gpu, CPU)]
    assert asked == [torch.bfloat16] * 2 + [torch.float16] * 2 + [torch.float32] * 2


def test_batches_go_to_a_gpu_from_pinned_memory_without_waiting(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: calls.append("pinned") or tensor)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *where, **how: calls.append((*where, how)))
    to_device(np.zeros(3, dtype=np.int64), torch.device("cuda:1"))
    assert calls == ["pinned", (torch.device("cuda:1"), {"non_blocking": True})]


class Reads(TorchDispatchMode):
    """Notes the operations that wait for a device, because Python needs their result."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.name().removeprefix("aten::") in {"_local_scalar_dense", "nonzero", "equal", "is_nonzero"}:
            self.seen.append(function.name())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_nothing_in_a_step_reads_from_the_device(train_config, optimizer, monkeypatch):
    config = replace(train_config, optimizer=OptimizerConfig(name=optimizer), batch_size=4, micro_batch_size=2)
    config.model.vocab_size = 256
    run = trial_run(config, CPU, torch.bfloat16)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: pytest.fail("a tensor was read"))
    with Reads() as reads:
        take_step(run, 0)
        loss, _ = take_step(run, 1)
        assert not reads.seen
        loss.item()
    assert reads.seen  # so a read would have been noticed


def test_fast_products_are_as_exact_as_torchs_own_and_end_with_the_run():
    setting = torch.backends.mkldnn.matmul
    before = setting.fp32_precision
    x, y = torch.randn(2, 300, 300, generator=torch.Generator().manual_seed(0))
    with fast_products(CPU):
        product = x @ y
    assert setting.fp32_precision == before
    exact = x.double() @ y.double()
    assert (product - exact).abs().max() <= 2 * (x @ y - exact).abs().max()


@pytest.mark.parametrize(("fast", "exact", "chosen"), [(True, True, True), (True, False, False), (False, True, False)])
def test_products_that_are_rounded_or_emulated_are_not_taken(monkeypatch, fast, exact, chosen):
    monkeypatch.setattr("training.device.multiplies_bf16", lambda _: fast)
    monkeypatch.setattr("training.device.onednn_keeps_float32", lambda: exact)
    setting = torch.backends.mkldnn.matmul
    before = setting.fp32_precision
    with fast_products(CPU):
        assert setting.fp32_precision == ("bf16" if chosen else before)
    with fast_products(torch.device("meta")):
        assert setting.fp32_precision == before


@pytest.mark.slow
def test_the_recipe_for_a_cpu_reaches_nanogpts_loss(tmp_path):
    shakespeare = Path(__file__).parent.parent.parent / "shared/data/tinyshakespeare.txt"
    if not shakespeare.exists():
        pytest.skip("needs tiny Shakespeare beside the checkout")
    settings = ["+experiment=shakespeare_cpu", f"data.path={shakespeare}", f"data.cache_dir={tmp_path}", "device=cpu"]
    assert run_here("train.py", *settings, "run_dir=run", cwd=tmp_path).returncode == 0
    assert metrics(tmp_path / "run")[-1]["val_loss"] <= 1.90
