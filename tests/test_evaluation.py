"""Evaluations: their number of targets, their memory, and that a failed one loses nothing."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import random_gpt, some

from common.errors import SettingsError
from data.config import DataConfig, TaskConfig
from model.config import GPTConfig
from model.loss import IGNORE_INDEX, nats_of_each
from runs import checkpointer
from runs.checkpoint import Progress, load_checkpoint, open_checkpoint, read_meta
from runs.metrics import Evaluation, read_metrics
from runs.summary import read_summary
from train import train, train_step
from training.config import NEVER, OptimizerConfig, TrainConfig
from training.evaluation import FEWEST_TOKENS, MOST_TOKENS, evaluate, evaluation_tokens
from training.plan import predict_memory
from training.run import Run
from training.start import open_run

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nats_in_chunks_are_those_of_all_logits_at_once(softcap, dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(3, 7, 16), torch.randn(50, 16)
    targets = torch.randint(50, (3, 7))
    targets[0, :4] = IGNORE_INDEX
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        logits = F.linear(x, weight).float()
        nats, hits = nats_of_each(x, weight, targets, softcap, largest_chunk=4 * 50 * 2)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    wanted = F.cross_entropy(logits.mT, targets, ignore_index=IGNORE_INDEX, reduction="none")
    torch.testing.assert_close(nats, wanted)
    assert torch.equal(hits, logits.argmax(-1) == targets) and not nats[0, :4].any()


def test_a_model_gives_each_targets_nats_which_add_up_to_its_loss():
    model, tokens = random_gpt(logit_softcap=5.0), torch.randint(61, (2, 16))
    nats, hits = model.nats(tokens, tokens)
    torch.testing.assert_close(nats.sum(), model.loss(tokens, tokens).detach())
    assert torch.equal(hits, model(tokens).argmax(-1) == tokens) and not nats.requires_grad


def test_an_evaluation_scores_a_fifth_of_the_targets_that_the_steps_before_it_took():
    def scored(steps: int | None = None, **settings) -> int:
        return evaluation_tokens(TrainConfig(**settings), steps)  # of 2,048 tokens a step, evaluated every 150

    assert scored() == 150 * 2048 // 5
    assert scored(eval_interval=1) == FEWEST_TOKENS == 16_384
    assert scored(eval_interval=10**6) == scored(10**6) == MOST_TOKENS == 524_288
    assert scored(450) == 450 * 2048 // 5
    assert scored(2) == scored(2, eval_interval=1) == FEWEST_TOKENS
    assert scored(eval_tokens=100) == scored(450, eval_tokens=100) == 100
    # A forward pass takes a third of a step: by default all evaluations take about a tenth of the run.
    assert 0.09 < (2 * scored() + scored(450)) / 3 / (450 * 2048) < 0.12


@pytest.fixture
def counts(monkeypatch) -> list[int]:
    """The targets of evaluations: 256 between, 512 at the end, of a text of 1,199."""
    asked = []

    def scored(config: TrainConfig, steps: int | None = None) -> int:
        asked.append(256 if steps is None else 512)
        return asked[-1]

    monkeypatch.setattr("train.evaluation_tokens", scored)
    return asked


@pytest.mark.slow
@pytest.mark.usefixtures("counts")
def test_steps_are_compared_on_the_same_targets_and_the_result_rests_on_more(train_config, caplog):
    caplog.set_level("INFO", logger="tinygpt")
    result = train(train_config)
    run_dir = Path(train_config.run_dir)
    rows = [row for row in read_metrics(run_dir / "metrics.jsonl") if "val_loss" in row]
    assert [(row["step"], row["val_tokens"]) for row in rows] == [(10, 256), (20, 512)]
    summary, best = read_summary(run_dir), read_meta(run_dir / "checkpoints/best")
    assert (summary.val_loss, summary.val_tokens) == (result, 512) == (rows[1]["val_loss"], 512)
    checkpoint = load_checkpoint(run_dir / "checkpoints/best")
    with open_run(replace(train_config, run_dir=None)) as run:
        again = evaluate(checkpoint.model, run.data, 8, run.autocast, max_tokens=256)
    assert f"best validation loss {result:.4f} nats/token" in caplog.text
    assert best.progress.best_loss == pytest.approx(again.loss, rel=1e-6) and best.progress.best_loss != result
    assert (best.progress.best_step, best.progress.best_tokens) == (20, 256)


LOSSES = {1: 3.0, 2: 2.5, 3: 2.6, 4: 2.4, 5: 2.45, 6: 2.4, 7: 2.5, 8: 2.39, 9: 2.5, 10: float("nan"), 11: 2.7, 12: 2.0}


def losses_of(monkeypatch, losses: dict[int, float]) -> list[int]:
    """Let the evaluation of each step give these losses; the steps that were evaluated."""
    seen: list[int] = []

    def evaluate_run(run, max_tokens):
        seen.append(run.progress.step)
        return Evaluation(nats=losses[run.progress.step] * max_tokens, tokens=max_tokens, text_bytes=max_tokens)

    monkeypatch.setattr("train.evaluate_run", evaluate_run)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("patience", some([2, 1, 3, 4, None], 5))
def test_a_run_ends_after_as_many_evaluations_without_a_better_loss_as_patience(
    train_config, monkeypatch, caplog, patience
):
    caplog.set_level("INFO", logger="tinygpt")
    # By hand: after which step the last `patience` losses were all no better than the best before them.
    end = {1: 3, 2: 6, 3: 7, 4: 12, None: 12}[patience]
    seen = losses_of(monkeypatch, LOSSES)
    settings = dict(max_steps=12, eval_interval=1, patience=patience, eval_tokens=100, sample_tokens=1)
    config = replace(train_config, **settings)
    best = min((loss, step) for step, loss in LOSSES.items() if loss == loss and step <= end)
    assert (train(config), seen) == (best[0], [*range(1, end + 1)])
    run_dir = Path(config.run_dir)
    progress, summary = read_meta(run_dir / "checkpoints/last").progress, read_summary(run_dir)
    assert (progress.step, progress.finished, progress.best_step) == (end, True, best[1])
    assert (summary.status, summary.step) == ("finished", end) and (summary.val_loss, summary.best_step) == best
    assert summary.decode_tokens_per_s > 0, "as of any finished run"
    assert ("patience  " in caplog.text) == (end < 12)
    # It has ended: resumed it takes no step, and goes on with more patience.
    train(replace(config, resume=config.run_dir))
    assert seen == [*range(1, end + 1)]
    if end < 12:
        assert f"by patience={patience}: to train on, raise patience, or set patience=null." in caplog.text
        train(replace(config, resume=config.run_dir, patience=None))
        assert seen == [*range(1, 13)] and read_meta(run_dir / "checkpoints/best").progress.best_step == 12


@pytest.mark.slow
def test_what_is_told_in_place_of_0_does_what_it_says(train_config):
    for setting in NEVER:
        for value in (0, -1):
            with pytest.raises(SettingsError, match=rf"^{setting}={value} must be at least 1: {setting}=1"):
                replace(train_config, **{setting: value})

    def run(name, **settings) -> tuple[list[tuple[int, bool]], set[str]]:
        """The steps of metrics.jsonl, each with whether it has an evaluation, and the checkpoints."""
        directory = Path(train_config.run_dir).with_name(name)
        train(replace(train_config, run_dir=str(directory), max_steps=7, sample_tokens=0, **settings))
        rows = read_metrics(directory / "metrics.jsonl")
        return [(row["step"], "val_loss" in row) for row in rows], {
            folder.name for folder in (directory / "checkpoints").glob("step_*") if not folder.is_symlink()
        }

    never = dict.fromkeys(("log_interval", "eval_interval", "checkpoint_interval"), 1_000_000)
    assert run("never", **never, keep_checkpoints=1) == ([(1, False), (7, True)], {"step_7"})
    steps, kept = run("all", eval_interval=1_000_000, checkpoint_interval=2, keep_checkpoints=1_000_000)
    assert [step for step, is_evaluated in steps if is_evaluated] == [7]
    assert kept == {"step_2", "step_4", "step_6", "step_7"}
    _, kept = run("evaluated", eval_interval=3, checkpoint_interval=1_000_000, keep_checkpoints=1_000_000)
    assert kept == {"step_3", "step_6", "step_7"}


@pytest.mark.slow
def test_a_killed_run_has_the_patience_of_the_whole_one(train_config, monkeypatch):
    seen = losses_of(monkeypatch, LOSSES)
    config = replace(train_config, max_steps=12, eval_interval=1, checkpoint_interval=1, patience=3, eval_tokens=100)
    for step in (2, 5, 6):
        with monkeypatch.context() as patch:
            patch.setattr("train.train_step", dying_after(step))
            with pytest.raises(KeyError):
                train(replace(config, resume=config.run_dir if seen else None))
    train(replace(config, resume=config.run_dir))
    assert seen == [*range(1, 8)], "each step is evaluated once, and step 7 is the last"


@pytest.mark.slow
def test_a_resumed_run_that_scores_other_targets_scores_its_step_on_them_and_tells(train_config, caplog):
    """A worse model became the best step, and the better one was removed without a word."""
    config = replace(train_config, sample_tokens=0, eval_tokens=64, keep_checkpoints=1)
    train(config)
    run_dir = Path(config.run_dir)
    model = open_checkpoint(run_dir).model
    with open_run(replace(config, run_dir=None)) as run:
        tokens = torch.from_numpy(run.data.val[:].astype("int64"))
    with torch.no_grad():
        windows = [tokens[start : start + 17] for start in range(0, len(tokens) - 1, 16)]
        sums = [F.cross_entropy(model(each[None, :-1])[0], each[1:], reduction="sum") for each in windows]
    wanted = float(torch.stack(sums).sum()) / (len(tokens) - 1)
    # The run had finished, so that nothing would have scored it, and step 20 is no multiple of 15.
    more = replace(config, resume=config.run_dir, eval_tokens=10**9, eval_interval=15)
    assert train(more) == pytest.approx(wanted, rel=1e-5)
    progress = read_meta(run_dir / "checkpoints/last").progress
    assert (progress.best_step, progress.metrics["val_tokens"]) == (20, len(tokens) - 1)
    assert f"evaluations read {len(tokens) - 1:,} tokens, and 64 before" in caplog.text and "removed" not in caplog.text
    # Ruined afterwards, it keeps that step, and one whose best step is another says that it goes.
    ruined = replace(OptimizerConfig(), lr=9.0, embedding_lr=9.0)
    further = replace(more, max_steps=30, optimizer=ruined, allow_changes=True)
    caplog.clear()
    assert train(further) == pytest.approx(wanted, rel=1e-5) and "do not compare" not in caplog.text
    assert read_meta(run_dir / "checkpoints/last").progress.best_step == 20
    train(replace(further, eval_tokens=64))
    said = f"from step 30 on. step_20, the best so far, will be removed: copy it, or set eval_tokens={len(tokens) - 1}."
    assert said in caplog.text


def dying_after(last: int):
    """train_step() until step `last`, then an error."""

    def step(run, number):
        if number >= last:
            raise KeyError("killed")
        return train_step(run, number)

    return step


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["not finite", "not written"])
def test_a_step_without_a_checkpoint_is_never_the_best(train_config, monkeypatch, lost):
    losses_of(monkeypatch, {10: 2.5, 20: 2.6, 30: 3.0})
    config = replace(train_config, max_steps=30)
    if lost == "not finite":
        finite = Run.weights_are_finite
        monkeypatch.setattr(Run, "weights_are_finite", lambda run: run.progress.step != 10 and finite(run))
    else:

        def write(directory, *given, write=checkpointer.write_checkpoint):
            if directory.name == "step_10":
                raise OSError(28, "No space left on device")
            write(directory, *given)

        monkeypatch.setattr(checkpointer, "write_checkpoint", write)
    assert train(config) == 2.6
    checkpoints = Path(config.run_dir) / "checkpoints"
    assert (
        not (checkpoints / "step_10").exists()
        and (checkpoints / "best").resolve() == (checkpoints / "step_20").resolve()
    )
    assert read_meta(checkpoints / "last").progress.best_step == 20
    assert read_summary(Path(config.run_dir)).val_loss == 2.6


def test_losses_on_other_numbers_of_targets_are_not_compared():
    progress = Progress(step=10)
    progress.compare(2.0, 256)
    progress.step = 20
    progress.compare(3.0, 256)
    assert (progress.best_step, progress.best_loss) == (10, 2.0)
    progress.compare(float("nan"), 512)
    assert progress.best_step == 10
    progress.compare(3.0, 512)
    assert (progress.best_step, progress.best_loss, progress.best_tokens) == (20, 3.0, 512)


def test_the_result_stays_what_the_best_evaluation_reported_when_a_finished_run_goes_on():
    """Step 20 was the last one, whose evaluation reported the loss on 512 targets and was compared on 256."""
    progress = Progress(step=20, evaluated=20, metrics={"val_loss": 2.5})
    progress.compare(2.6, 256)
    assert progress.result == 2.5
    progress.step = progress.evaluated = 30
    progress.metrics = {"val_loss": 2.7}
    progress.compare(2.7, 256)
    assert (progress.best_step, progress.best_loss, progress.result) == (20, 2.6, 2.5)
    assert replace(progress, best_result=None).result == 2.6  # of an older checkpoint


def test_an_evaluation_of_a_short_task_scores_the_first_of_its_windows(train_config):
    data = DataConfig(source="recall", task=TaskConfig(items=2, vocab_size=16))
    train(replace(train_config, data=data, max_steps=4, eval_tokens=256, sample_tokens=0))
    (row,) = [row for row in read_metrics(Path(train_config.run_dir) / "metrics.jsonl") if "val_loss" in row]
    assert row["val_tokens"] == 256 // 16 * 2  # two answers in each window


ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    MemoryError("Unable to allocate 9 GiB"),
]
PLACES = {
    "train.evaluate": ("the evaluation", "set eval_batch_size=4"),
    "train.generate_text": ("the sample", "set sample_tokens=0"),
    "training.log.head_statistics": ("the measurement of the heads", "choose a smaller model or model.block_size"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "error"),
    some([*((place, ERRORS[0]) for place in PLACES), *((next(iter(PLACES)), one) for one in ERRORS[1:])], 3),
)
def test_memory_that_runs_out_in_an_evaluation_loses_nothing_and_says_what_to_type(
    train_config, monkeypatch, place, error
):
    def full(*arguments, **settings):
        raise error

    what, remedy = PLACES[place]
    with monkeypatch.context() as patch:
        patch.setattr(place, full)
        with pytest.raises(SettingsError) as raised:
            train(train_config)
    said = str(raised.value)
    assert said.startswith(f"{what} after step 10 needs more memory than there is ({str(error).splitlines()[0]}")
    assert said.endswith(f": {remedy}; resume={train_config.run_dir} goes on from step_10.")
    assert "\n" not in said and read_meta(Path(train_config.run_dir) / "checkpoints/last").progress.step == 10
    if error is ERRORS[0]:
        train(replace(train_config, run_dir=None, resume=train_config.run_dir))
        rows = [row["step"] for row in read_metrics(Path(train_config.run_dir) / "metrics.jsonl") if "val_loss" in row]
        assert rows == [10, 20]


@pytest.mark.slow
def test_a_step_whose_checkpoint_could_not_be_written_is_not_said_to_be_saved(train_config, monkeypatch, caplog):
    def full(*arguments, **settings):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def copies(tensor, *where, copy=False, **options):
        if copy:
            raise MemoryError("Unable to allocate 9 GiB")
        return original(tensor, *where, **options)

    original = torch.Tensor.to
    monkeypatch.setattr("train.evaluate", full)
    monkeypatch.setattr(torch.Tensor, "to", copies)
    with pytest.raises(SettingsError, match="set eval_batch_size=4; nothing has been saved yet"):
        train(train_config)
    assert "step 10 could not be saved" in caplog.text


@pytest.mark.slow
def test_a_run_that_fails_in_its_evaluation_ends_as_one_that_does_not(train_config, monkeypatch, tmp_path):
    whole = train(replace(train_config, run_dir=str(tmp_path / "whole")))
    with monkeypatch.context() as patch:
        patch.setattr("train.evaluate", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(train_config)
    assert train(replace(train_config, run_dir=None, resume=train_config.run_dir)) == whole
    for name in ("model", "optimizer"):
        file = f"checkpoints/best/{name}.safetensors"
        assert (tmp_path / "whole" / file).read_bytes() == (Path(train_config.run_dir) / file).read_bytes()


@pytest.mark.long
@pytest.mark.parametrize(("vocab_size", "on_gpu"), [(257, False), (50_257, True)])
@pytest.mark.slow
def test_an_evaluation_needs_no_more_memory_than_a_step(vocab_size, on_gpu):
    config = TrainConfig(model=GPTConfig(n_layer=2, n_embd=64, block_size=64, vocab_size=vocab_size), batch_size=4)
    for micro in (1, 4):
        memory = predict_memory(train_step, config, micro, torch.bfloat16, on_gpu=on_gpu)
        assert memory.weights + memory.optimizer < memory.evaluation < memory.peak
    more = predict_memory(train_step, replace(config, eval_batch_size=64), 4, on_gpu=on_gpu)
    assert more.evaluation > predict_memory(train_step, config, 4, on_gpu=on_gpu).evaluation
    assert str(more).endswith("B in an evaluation")


def test_no_logits_of_all_targets_exist_in_an_evaluation(train_config, monkeypatch):
    seen = []
    monkeypatch.setattr(F, "linear", lambda x, w, b=None, of=F.linear: seen.append((x, w)) or of(x, w, b))
    with open_run(train_config) as run:
        run.model.runtime.largest_chunk = 4 * 257 * 16
        evaluate(run.model, run.data, 8, run.autocast)
    rows = [len(x) for x, weight in seen if len(weight) >= 257]  # with padding
    assert rows and max(rows) <= 16


def test_a_loss_that_is_not_finite_is_never_the_best_and_tries_patience():
    progress = Progress()
    found = []
    for progress.step, loss in enumerate([math.nan, 3.0, math.nan, math.inf, 2.9, math.nan, 2.95], start=1):
        progress.compare(loss, 100)
        found.append((progress.best_step, progress.best_loss, progress.without_gain))
    assert found == [(0, None, 1), (2, 3.0, 0), (2, 3.0, 1), (2, 3.0, 2), (5, 2.9, 0), (5, 2.9, 1), (5, 2.9, 2)]
