"""train(config): a run's files, the settings that must not change its result, its messages."""

import itertools
import math
import re
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import run_here
from test_resume import rows
from torch.utils._python_dispatch import TorchDispatchMode

import training.run
import training.start as start_module
import training.terminal
from common.errors import SettingsError
from data.config import DataConfig
from generation.generate import generate_text
from model.config import GPTConfig
from model.gpt import GPT
from model.size import without_weights
from runs.checkpoint import open_checkpoint, read_meta
from runs.directory import written_settings
from runs.metrics import read_metrics
from runs.summary import read_summary
from train import train, train_step
from training.config import OptimizerConfig, ScheduleConfig, TrainConfig
from training.distributed import Ranks
from training.evaluation import evaluate, first_sequences
from training.log import Loggers
from training.optimizer import set_learning_rate
from training.plan import trial_run
from training.run import DEFAULT_STEPS, Run, rank_batch_size, steps_to_take
from training.start import open_run
from training.terminal import describe

CPU = torch.device("cpu")


def metrics(run_dir: str | Path) -> list[dict]:
    return read_metrics(Path(run_dir) / "metrics.jsonl")


def trial(config: TrainConfig, dtype: torch.dtype = torch.float32):
    """A run that trains on made-up text and writes nothing."""
    return trial_run(replace(config, model=replace(config.model, vocab_size=257)), CPU, dtype)


@pytest.mark.slow
def test_training_leaves_the_settings_it_is_given_as_they_are(train_config, tmp_path):
    config = replace(train_config, max_steps=1)
    other = replace(config, init_from=config.run_dir, run_dir=str(tmp_path / "other"))
    for given in (config, other):
        before = asdict(given)
        train(given)
        assert asdict(given) == before and given.model.vocab_size is None
        with open_run(replace(given, run_dir=f"{given.run_dir}_open")) as run:
            assert asdict(given) == before and run.config.model.vocab_size == 257


@pytest.mark.slow
def test_a_run_holds_nothing_that_its_class_does_not_declare(train_config, monkeypatch):
    held = set()
    after_step = Run.after_step
    monkeypatch.setattr(Run, "after_step", lambda run: held.update(vars(run)) or after_step(run))
    train(replace(train_config, max_steps=2))
    assert held - {field.name for field in fields(Run)} == {"checkpointer", "text_hash"}  # cached properties


def test_a_run_learns_and_leaves_all_that_is_needed_to_sample(train_config):
    best = train(train_config)
    found = metrics(train_config.run_dir)
    losses = [row["loss"] for row in found if "loss" in row]
    assert len(losses) == 20 and losses[-1] < losses[0] - 1
    evaluations = [row for row in found if "val_loss" in row]
    assert [row["step"] for row in evaluations] == [10, 20]
    assert best == min(row["val_loss"] for row in evaluations) < math.log(257) - 1
    assert evaluations[-1]["tokens"] == 20 * 8 * 16

    run = Path(train_config.run_dir)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["best", "last", "step_10", "step_20"]
    assert not list(run.glob(".*unfinished"))
    checkpoint = open_checkpoint(train_config.run_dir)
    text = "".join(generate_text(checkpoint.model, checkpoint.tokenizer, "the", max_new_tokens=20))
    assert 1 <= len(text) <= 20
    summary = read_summary(run)
    told = (summary.status, summary.device, summary.seed, summary.step, summary.reason)
    assert told == ("finished", "cpu", 1, 20, None)
    assert summary.val_loss == best and summary.tokens == 20 * 8 * 16 and summary.decode_tokens_per_s > 0
    assert summary.parameters == sum(weight.numel() for weight in checkpoint.model.parameters())
    assert summary.parameters_in_blocks == sum(weight.numel() for weight in checkpoint.model.blocks.parameters())
    for name in ("attention_entropy", "attention_relative_entropy", "attention_distance"):  # of every head
        assert [len(of_layer) for of_layer in evaluations[0][name]] == [2, 2], name
    assert len(evaluations[0]["head_similarity"]) == 2


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits_and_another_does_not(train_config, tmp_path):
    def weights(name: str, **settings) -> torch.Tensor:
        run_dir = str(tmp_path / name)
        train(replace(train_config, run_dir=run_dir, max_steps=5, sample_tokens=0, **settings))
        return open_checkpoint(run_dir).model.lm_head.weight

    first = weights("a")
    assert torch.equal(first, weights("b", eval_interval=2, eval_batch_size=3, log_interval=2, checkpoint_interval=2))
    assert not torch.equal(first, weights("c", seed=2))


@pytest.mark.slow
def test_watching_does_not_change_a_bit_of_the_run(train_config, tmp_path, monkeypatch):
    train_config.model = replace(train_config.model, dropout=0.2, attention_dropout=0.2)
    train(train_config)
    monkeypatch.setattr(Loggers, "_call", lambda *_: None)
    blind = replace(train_config, run_dir=str(tmp_path / "blind"), sample_tokens=0)
    train(blind)
    files = [Path(run.run_dir) / "checkpoints/last/model.safetensors" for run in (train_config, blind)]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_micro_batches_change_nothing_but_memory(train_config, optimizer):
    settings = OptimizerConfig(name=optimizer, lr=1e-3, embedding_lr=None, lm_head_lr=None)
    runs = [trial(replace(train_config, micro_batch_size=size, optimizer=settings)) for size in (2, 8)]
    runs[1].model.load_state_dict(runs[0].model.state_dict())
    losses = [[train_step(run, step)[0].item() for step in range(8)] for run in runs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and losses[0][-1] < losses[0][0]


@pytest.mark.slow
def test_nothing_in_a_step_reads_from_the_device(train_config, monkeypatch):
    class Reads(TorchDispatchMode):
        """Notes the operations that wait for a device, because Python needs their result."""

        seen: list[str] = []  # noqa: RUF012

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.name().removeprefix("aten::") in {"_local_scalar_dense", "nonzero", "equal", "is_nonzero"}:
                self.seen.append(function.name())
            return function(*args, **(kwargs or {}))

    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: pytest.fail("a tensor was read"))
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)  # muon reads on a CPU, where nothing waits
    for optimizer in ("muon", "adamw"):
        config = replace(train_config, optimizer=OptimizerConfig(name=optimizer), micro_batch_size=2)
        run = trial(config, torch.bfloat16)
        with Reads() as reads:
            train_step(run, 0)
            loss, _ = train_step(run, 1)
            assert not reads.seen
            loss.item()
        assert reads.seen.pop()  # so a read would have been noticed


def test_the_seed_of_every_micro_batchs_dropout_is_its_own_whichever_rank_takes_it(train_config):
    run = trial(replace(train_config, micro_batch_size=2))

    def seeds(seed: int, step: int, ranks: Ranks) -> list[int]:
        run.config.seed, run.ranks, seen = seed, ranks, []
        run.training_loss = lambda *both, **more: (seen.append(torch.initial_seed()), run.model.loss(*both, **more))[1]
        train_step(run, step)
        return seen

    whole = seeds(1, 0, Ranks())
    assert seeds(1, 0, Ranks(0, 2)) + seeds(1, 0, Ranks(1, 2)) == whole
    assert len({*whole, *seeds(1, 1, Ranks()), *seeds(2, 0, Ranks())}) == 3 * 4


@pytest.mark.slow
def test_dropout_differs_from_step_to_step_and_is_off_in_evaluation(train_config):
    train_config.model = replace(train_config.model, dropout=0.5, zero_init=False)
    with open_run(train_config) as run:
        data = run.data
        run.data = SimpleNamespace(train_batch=lambda _, first, last: data.train_batch(0, first, last))
        set_learning_rate(run.optimizers, 0.0)
        losses = [train_step(run, step)[0].item() for step in (0, 0, 1)]
        assert losses[0] == losses[1] != losses[2]
        first, second = (evaluate(run.model, data, 8, run.autocast) for _ in range(2))
        assert first == second and run.model.training


def test_a_grad_clip_of_0_clips_nothing(train_config):
    def moved(grad_clip: float) -> torch.Tensor:
        torch.manual_seed(0)
        run = trial(replace(train_config, grad_clip=grad_clip, optimizer=OptimizerConfig(lr=0.01)))
        train_step(run, 0)
        return run.model.lm_head.weight.detach()

    assert torch.equal(moved(0.0), moved(1e9)) and not torch.equal(moved(0.0), moved(1e-9))


# Evaluations


@pytest.mark.slow
def test_a_run_is_scored_in_every_token_once_whatever_the_batch_and_as_its_checkpoint(train_config, monkeypatch):
    best = train(train_config)
    model = open_checkpoint(train_config.run_dir).model
    with open_run(replace(train_config, run_dir=None)) as run:
        found = [evaluate(model, run.data, size, run.autocast) for size in (1, 7, 500)]
        assert [one.loss for one in found] == pytest.approx([best] * 3, rel=1e-6)
        # With bytes for tokens, a byte costs a token's nats; <|endoftext|> before the text is not predicted.
        assert found[0].bpb == pytest.approx(best / math.log(2), rel=1e-6)
        tokens = torch.from_numpy(run.data.val[:].astype("int64"))
        total = 0.0
        for start in range(0, len(tokens) - 1, 16):
            window = tokens[start : start + 17]
            logits = model(window[None, :-1])[0]
            total += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
        assert best == pytest.approx(total / (len(tokens) - 1), rel=1e-5)
        shares: list[torch.Tensor] = []
        monkeypatch.setattr(Ranks, "sum_", lambda self, nats: shares.append(nats) or nats)
        for ranks in (Ranks(), *(Ranks(n, 4) for n in range(4))):  # of the batches there are two at most
            evaluate(model, run.data, 500, run.autocast, ranks)
        windows, _ = first_sequences(run.model, run.data)
        assert windows.shape[1] == 16 and 0 < windows.numel() <= 512 and torch.equal(windows[0], tokens[:16])
    assert (torch.stack(shares[1:])[:, 0] != 0).sum(0).eq(1).all()  # nats; hits are 0 or 1
    torch.testing.assert_close(sum(shares[1:]), shares[0])


# Budgets


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, DEFAULT_STEPS),
        ({"max_steps": 7}, 7),
        ({"max_minutes": 1.0}, None),
        ({"max_steps": 7, "max_minutes": 1.0}, 7),
        ({"max_flops": 1.0}, 1),
        ({"max_flops": 1.0, "max_minutes": 1.0}, 1),
        ({"max_steps": 2}, 2),  # which a warm-up that nobody typed does not refuse
    ],
    ids=str,
)
def test_a_budget_alone_decides_how_many_steps_a_run_takes(settings, steps):
    model = GPTConfig(vocab_size=257)
    for schedule in ("warmup_stable_decay", "cosine"):
        config = TrainConfig(model=model, schedule=ScheduleConfig(name=schedule), **settings)
        assert steps_to_take(config, without_weights(model)) == steps


@pytest.mark.slow
def test_max_minutes_ends_the_run_and_its_schedule(train_config, caplog, monkeypatch):
    caplog.set_level("INFO", "tinygpt")
    ticks = itertools.count(step=0.01)  # seconds, each time that somebody looks
    monkeypatch.setattr(training.run, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    train(replace(train_config, max_steps=None, max_minutes=0.02, eval_interval=10**9))
    assert "0.02 min in steps of 8 × 16 tokens" in caplog.text
    found = [row for row in metrics(train_config.run_dir) if "lr" in row]
    assert found[-1]["lr"] < 0.1 * max(row["lr"] for row in found)


def test_a_budget_that_is_over_before_the_first_step_evaluates_saves_and_ends_well(train_config):
    best = train(replace(train_config, max_minutes=1e-9, sample_tokens=0))
    assert [row["step"] for row in rows(train_config.run_dir)] == [0] and best == pytest.approx(math.log(257), rel=0.01)
    assert read_meta(Path(train_config.run_dir) / "checkpoints/last").progress.finished
    assert read_summary(Path(train_config.run_dir)).status == "finished"


@pytest.mark.long
def test_the_recipe_for_a_cpu_reaches_nanogpts_loss(tmp_path):
    shakespeare = Path(__file__).parent.parent.parent / "shared/data/tinyshakespeare.txt"
    if not shakespeare.exists():
        pytest.skip("needs tiny Shakespeare beside the checkout")
    settings = ["+experiment=shakespeare_cpu", f"data.path={shakespeare}", f"data.cache_dir={tmp_path}", "device=cpu"]
    assert run_here("train.py", *settings, "run_dir=run", cwd=tmp_path).returncode == 0
    assert metrics(tmp_path / "run")[-1]["val_loss"] <= 1.90


# What cannot be


def test_mistakes_that_need_no_text_are_told_before_it_is_prepared_or_a_run_overwritten(train_config, monkeypatch):
    train(replace(train_config, max_steps=1, sample_tokens=0))
    before = metrics(train_config.run_dir)
    monkeypatch.setattr(start_module, "open_data", lambda *arguments, **options: pytest.fail("prepared"))
    said = "already holds a run: choose another, remove it first, or continue it by resume="
    with pytest.raises(SettingsError, match=said):
        train(train_config)
    assert metrics(train_config.run_dir) == before
    wrong = {3: "batch_size=8 is no multiple of 3, the number", 4: "micro_batch_size=4 × 4, the number of processes"}
    for processes, said in wrong.items():
        monkeypatch.setattr(Ranks, "of_torchrun", lambda size=processes: Ranks(size=size))
        with pytest.raises(SettingsError, match=said):
            train(replace(train_config, run_dir=None, micro_batch_size=4))


def test_the_batch_that_is_advised_for_the_processes_can_be_divided_among_them():
    for batch, processes, size in itertools.product(range(1, 10), range(2, 5), (None, 1, 2, 3)):
        config = TrainConfig(batch_size=batch, micro_batch_size=size)
        rows_each = [n for n in range(1, batch + 1) if n * processes == batch and n % (size or 1) == 0]
        if rows_each:
            assert [rank_batch_size(config, processes)] == rows_each
            continue
        with pytest.raises(SettingsError) as caught:
            rank_batch_size(config, processes)
        if batch % processes == 0:  # a smaller micro_batch_size divides it
            assert str(caught.value).startswith(f"micro_batch_size={size} × {processes}, ")
            continue
        advised = int(re.search(r"such as (\d+)", str(caught.value))[1])
        assert advised == next(n for n in range(batch, 99) if n % processes == 0 and n // processes % (size or 1) == 0)
        assert rank_batch_size(replace(config, batch_size=advised), processes) * processes == advised


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        *(({"device": name}, f"device={name}") for name in ("cuda:99", "gpu", "meta")),
        ({"model": {"vocab_size": 100}}, r"model\.vocab_size=100 is less than the tokenizer's 257: leave it null"),
        ({"model": {"block_size": 10_000}}, "block_size=10000"),  # more than the text's tokens
        ({"schedule": {"warmup_steps": 21}}, r"schedule\.warmup_steps=21 is longer than the run of 20 steps: lower it"),
        ({"run_dir": "/proc/x"}, r"run_dir=/proc/x cannot be written \(.*\): choose a folder on a disk with room"),
    ],
    ids=str,
)
def test_what_cannot_train_is_refused_and_leaves_no_directory(train_config, settings, named):
    parts = {key: replace(getattr(train_config, key), **v) if isinstance(v, dict) else v for key, v in settings.items()}
    with pytest.raises(SettingsError, match=named):
        train(replace(train_config, **parts))
    assert not Path(train_config.run_dir).exists()


@pytest.mark.parametrize(("attention", "heads"), {"average": 1, "single_head": 1, "stacked": 2}.items())
def test_a_run_is_described_with_the_heads_of_its_form(train_config, attention, heads):
    with open_run(replace(train_config, model=replace(train_config.model, attention=attention))) as run:
        text = "\n".join(describe(run.config, run.data, run.model))
    assert f"2 blocks of {heads} head{'s' * (heads > 1)} ({attention})" in text
    weights = [p.numel() for name, p in run.model.named_parameters() if name.startswith("blocks.")]
    assert f"{sum(weights):,} of them in 2 blocks" in text


@pytest.mark.slow
def test_a_python_program_may_give_paths_numpys_integers_and_dicts(train_config, text_file, tmp_path):
    data = DataConfig(path=text_file, cache_dir=tmp_path / "cache")
    model = {"n_layer": np.int64(1), "n_head": 2, "n_embd": 32, "block_size": np.int32(16)}
    config = replace(train_config, model=model, data=data, run_dir=tmp_path / "own", max_steps=np.int64(1))
    train(config)
    assert written_settings(tmp_path / "own")["model.n_layer"] == 1
    with pytest.raises(SettingsError, match="batch_size=1.5 is not a whole number"):
        train(replace(config, batch_size=1.5))


@pytest.mark.slow
def test_the_lines_of_the_page_give_the_windows_of_a_step(train_config, monkeypatch):
    """docs/library.md, beside what the loss is given, after the number of windows in a step has changed."""
    given = []
    loss = GPT.loss

    def record(model, tokens, *arguments, **options):
        given.extend(tokens.tolist() if model.training else [])
        return loss(model, tokens, *arguments, **options)

    monkeypatch.setattr(GPT, "loss", record)
    train(replace(train_config, micro_batch_size=4))
    directory = train_config.run_dir
    train(replace(train_config, resume=directory, run_dir=None, batch_size=4, max_steps=33, allow_changes=True))
    page = (Path(__file__).parent.parent / "docs/library.md").read_text(encoding="utf-8")
    lines = re.search(r"from dataclasses import replace\n\nfrom data.prepare.*?(?=print)", page, re.DOTALL)[0]
    names = {"checkpoint": open_checkpoint(f"{directory}/checkpoints/last"), "TrainConfig": TrainConfig}
    exec(lines, names)
    windows = names["data"].train_batch(29, 0, 4).inputs.tolist()
    assert windows == given[20 * 8 + 9 * 4 :][:4]
