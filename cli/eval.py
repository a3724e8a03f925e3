"""The work of eval.py: scores of a text or of a task, and tales."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from common.console import say
from common.errors import CheckpointError, SettingsError, naming
from common.text import for_stream, plural, seen_from_here
from data.tales import first_slip
from data.tasks import HELD_OUT
from data.tokenizer import gzip_bits
from generation.config import EvalConfig, SampleConfig
from generation.generate import encode_prompt, generate
from generation.score import BLOCK_BYTES, PASS_TOKENS, Scores, ScoringParams, compare, learned_task, load_text, score
from runs.checkpoint import Checkpoint, open_checkpoint, readable
from runs.metrics import Evaluation
from runs.plugins import has_run, run_code
from training.device import choose_device, choose_precision
from training.evaluation import evaluate

TALES = 64
TALE_TOKENS = 512  # no tale has as many: a sample that reaches them has not ended
ANOTHER = "take another one"

# The printed rows: title, attribute of Evaluation, format.
TEXT_FIGURES = {
    "tokens": ("tokens", ","),
    "nats/token": ("loss", ".4f"),
    "perplexity": ("perplexity", ",.2f"),
    "bits/byte": ("bpb", ".4f"),
    "± documents": ("bpb_stderr", ".4f"),
}
TASK_FIGURES = {
    "answers": ("tokens", ","),
    "nats/answer": ("loss", ".4f"),
    "accuracy": ("accuracy", ".4f"),
}


def score_checkpoints(config: EvalConfig) -> list[Scores] | list[Evaluation]:
    """Print and return the scores of one checkpoint, or of two; tales return none."""
    device = choose_device(config.device)
    run_code(config.code)
    checkpoints = [open_checkpoint(config.checkpoint, device)]
    if config.against is not None:
        with naming("against", config.against):
            checkpoints.append(open_checkpoint(config.against, device))
    if config.tales:
        check_tales(checkpoints[0])
        return []
    if not config.data.is_given and checkpoints[0].encoding is None:
        return score_task(config, checkpoints[0])
    return score_text(config, checkpoints)


def score_text(config: EvalConfig, checkpoints: list[Checkpoint]) -> list[Scores]:
    """Print and return the scores of checkpoints on one text."""
    # Score the text by each checkpoint, in the tokens of that checkpoint's tokenizer.
    text = load_text(config.data, checkpoints)
    params = [scoring_params(checkpoint, config) for checkpoint in checkpoints]
    scores = []
    for checkpoint, tokens, each in zip(checkpoints, text.tokens, params, strict=True):
        remedy = "set precision=fp32, or " * (compute_type(checkpoint, config) != torch.float32) + ANOTHER
        with refused_if_infinite(checkpoint, remedy):
            scores.append(score(checkpoint.model, checkpoint.tokenizer, tokens, each))
    # Print a column for each checkpoint, then the difference.
    totals = [each.total for each in scores]
    say(f"text        {text.description}; {plural(totals[0].text_bytes, 'byte')} scored")
    given = [*code_notes(checkpoints), *stride_notes(checkpoints, config.stride), *mask_notes(checkpoints, params)]
    for note in [*text.notes, *given]:
        say(f"note        {note}")
    print_columns(checkpoints, totals, TEXT_FIGURES)
    print(f"{'gzip':12}{gzip_bits(checkpoints[0].tokenizer, text.tokens[0]):.4f} bits/byte")
    if len(scores) > 1:
        difference, stderr = compare(*scores)
        figure = f"{difference:+.4f}"
        note = f"with a standard error from {2 * BLOCK_BYTES:,} bytes on"
        if stderr is not None:
            figure += f" ± {stderr:.4f}"
            note = "standard error over the text, not over seeds"
        print(f"difference  {figure} bits/byte, the second less the first ({note})")
    return scores


@contextmanager
def refused_if_infinite(checkpoint: Checkpoint, remedy: str) -> Iterator[None]:
    """Turn a FloatingPointError of logits into a CheckpointError."""
    try:
        yield
    except FloatingPointError as error:
        raise CheckpointError(f"checkpoint={checkpoint.path} is unusable ({error})", remedy) from None


def stride_notes(checkpoints: list[Checkpoint], stride: int | None) -> list[str]:
    """Return a note for each model whose block_size is taken in place of a larger stride."""
    sizes = {checkpoint.model.config.block_size for checkpoint in checkpoints}
    return [f"stride={stride} is read as block_size={size}, the largest" for size in sizes if (stride or 0) > size]


def code_notes(checkpoints: list[Checkpoint]) -> list[str]:
    """Return a note on checkpoints of different files of code=, of which not both have run here."""
    files = {checkpoint.meta.config.get("code_hash") for checkpoint in checkpoints} - {None}
    if len(files) < 2 or all(has_run(each.meta.config, each.path.parent.parent) for each in checkpoints):
        return []
    remedy = "where both define one name, score each alone with its own"
    return [f"the two have learned with different files of code=: {remedy}"]


def mask_notes(checkpoints: list[Checkpoint], params: list[ScoringParams]) -> list[str]:
    """Return a note on two checkpoints of which one alone keeps documents apart."""
    seeing = [each.path for each, own in zip(checkpoints, params, strict=True) if own.separator is None]
    if len(seeing) == len(checkpoints) or not seeing:
        return []
    return [f"{seeing[0]} alone predicts a token from the documents before its own too: it has no data.document_mask"]


def score_task(config: EvalConfig, checkpoint: Checkpoint) -> list[Evaluation]:
    """Print and return the score of a checkpoint on its task, on held-out sequences."""
    task = learned_task(checkpoint)
    block_size = checkpoint.model.config.block_size
    for name, value in (("against", config.against), ("stride", config.stride)):
        if value:
            raise SettingsError(f"{name}={value} needs a text, and data={task.name} has none", "leave it out")
    batch_size = max(1, PASS_TOKENS // block_size)
    result = evaluate(checkpoint.model, task, batch_size, scoring_params(checkpoint, config).autocast)
    print(f"task        {task.name}: {HELD_OUT:,} held-out windows of {block_size:,} tokens")
    print_columns([checkpoint], [result], TASK_FIGURES)
    return [result]


def write_tales(checkpoint: Checkpoint) -> list[str]:
    """Return the tales that sample.py num_samples=64 max_new_tokens=512 writes."""
    prompt = encode_prompt(checkpoint.tokenizer, "")
    # A sample depends on its seed, not on the batch.
    params = SampleConfig(max_new_tokens=TALE_TOKENS, num_samples=TALES)
    seeds = [params.seed + number for number in range(TALES)]
    tales = [""] * TALES
    with refused_if_infinite(checkpoint, ANOTHER):
        for chunk in generate(checkpoint.model, checkpoint.tokenizer, [prompt] * TALES, seeds=seeds, params=params):
            tales[chunk.sample] += chunk.text
    return tales


def check_tales(checkpoint: Checkpoint) -> None:
    """Print the share of a model's tales that are right, and the others' first mistakes."""
    tales = write_tales(checkpoint)
    slips = Counter(filter(None, map(first_slip, tales)))
    kept = TALES - slips.total()
    print_columns([checkpoint], [], {})
    settings = checkpoint.meta.config
    source = settings.get("data", {}).get("source", "tales")
    is_import = settings.get("init_from") and not checkpoint.meta.progress.step  # whose text nobody has told
    if source != "tales" and not is_import:
        print(f"note        the model has learned data={source}, not tales; checkpoint=RUN chooses another")
    print(f"tales       {kept} of {TALES} keep names, pronouns, things and who has them: {kept / TALES:.0%}")
    if slips:
        print("first slip  " + ", ".join(f"{slip} {count}" for slip, count in slips.most_common()))


def compute_type(checkpoint: Checkpoint, config: EvalConfig) -> torch.dtype:
    """Return the type of the matrix products; an automatic one is the run's."""
    name = checkpoint.meta.config.get("precision", "auto") if config.precision == "auto" else config.precision
    return choose_precision(name, checkpoint.model.device)


def scoring_params(checkpoint: Checkpoint, config: EvalConfig) -> ScoringParams:
    """Return the scoring parameters; automatic precision and the document mask are the run's."""
    dtype = compute_type(checkpoint, config)
    autocast = torch.autocast(checkpoint.model.device.type, dtype=dtype, enabled=dtype != torch.float32)
    with readable(checkpoint.path):
        document_mask = checkpoint.meta.config.get("data", {}).get("document_mask")
    separator = checkpoint.encoding.eot_token if document_mask and checkpoint.encoding else None
    return ScoringParams(autocast, config.stride, separator)


def print_columns(
    checkpoints: list[Checkpoint], results: list[Evaluation], figures: dict[str, tuple[str, str]]
) -> None:
    """Print a column for each checkpoint, and a row for each figure that is not None."""
    rows = {"checkpoint": [for_stream(seen_from_here(checkpoint.path), sys.stdout) for checkpoint in checkpoints]}
    for title, (name, form) in figures.items():
        values = [getattr(result, name) for result in results]
        rows[title] = [format(value, form) for value in values if value is not None]
    width = max(len(cell) for cells in rows.values() for cell in cells) + 2
    for title, cells in rows.items():
        if cells:
            print(f"{title:12}" + "".join(f"{cell:{width}}" for cell in cells).rstrip())
