"""Setup of a run: checks against the machine and the text, data, model, directory."""

import logging
import math
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tiktoken import Encoding

from common.console import Signals, in_notebook, show_log
from common.errors import SettingsError, device_failed, first_line, format_value, lacks_memory
from common.files import is_locked, largest_file, os_errors_named, replace_text, user_path
from common.settings import from_arguments
from common.text import flat, hydra_quoted, si
from data.batches import Dataset, TokenDataset
from data.config import DIVISIBLE
from data.prepare import TOLD_SHARE, has_hash, learned_share, prepare, prepared, tokens_hash
from data.tasks import TaskData
from data.texts import Source
from data.tokenizer import read_tokenizer, same_tokens
from model.attention.check import refuse_leak, tried_layer, unreached
from model.attention.code import explained
from model.cpu import freed_memory_kept
from model.gpt import GPT
from model.loss import chunk_loss_and_gradient
from model.modes import eval_mode
from model.size import count_weights, flops_per_token, without_weights
from model.weights import load_weights, plain_weights
from runs.checkpoint import OPTIMIZER, TOKENIZER, WEIGHTS, Meta, readable
from runs.directory import (
    in_use,
    lock_run,
    log_to,
    make_run_directory,
    settings_of_result,
    settings_text,
    written_comments,
    written_settings,
)
from runs.metrics import read_metrics
from runs.origin import PROJECT_HASH
from runs.plugins import keep_code, run_code
from runs.resume import (
    Saved,
    check_settings,
    earlier_settings,
    find_run,
    is_copied,
    is_free,
    newest_intact,
    refuse_used,
    remove_leftovers,
    shapes_weights,
)
from runs.summary import read_summary
from training.config import SEARCHED, OptimizerConfig, TrainConfig
from training.device import (
    batch_to_device,
    can_compile,
    choose_device,
    choose_precision,
    fast_products,
    memory_errors,
    memory_of,
)
from training.distributed import Ranks, parallelize, uncompile, with_recompute
from training.evaluation import evaluation_tokens, first_sequences
from training.failures import explain_failures
from training.guest import WORKSPACE, generator_kept, initial_seed, process_kept, seed_generators
from training.optimizer import load_optimizer_state, optimizer_state, split_parameters
from training.pretrained import changes_from, open_pretrained, pretrained_meta, refuse_other_model
from training.run import Run, rank_batch_size, steps_to_take
from training.threads import is_fork, threads_of_run
from training.wandb import check_key

log = logging.getLogger("tinygpt")
COMPILE_MINUTES = 5
"""From how many minutes on a run on a CPU is compiled: that takes 20 to 40 s, and gains 5% to 25% of the speed."""
CORE_SPEED = 50e9
"""FLOP/s of a thread in training, of recent processors, by which the length of a run is estimated."""
PLACES = {"data.path", "data.val_path", "code", "init_from"}  # which may differ from machine to machine
LEFT_OUT = ("data.source", "data.separator", "data.document_mask", "optimizer.name")
"""Settings of a run, apart from its rates, on which the meaning of its weights depends, and which init_from leaves."""
RAISES = 2  # torch's mode in which an operation without a deterministic kernel raises; in 1 it warns
FEWEST_IDS = 257  # a tokenizer has at least the bytes and <|endoftext|>
WRITABLE = "choose a folder on a disk with room that you may write to"
COPY = "copy the run to a folder with room that you may write to, and resume the copy"


@contextmanager
def open_run(config: TrainConfig, threads: int | None = None) -> Iterator[Run]:
    """Build a new run, or resume one, after checks of the settings.

    The run's config also has the settings that data and pretrained weights decide, such as model.vocab_size; `config`
    stays as it is. While the run is open, its directory is locked, its log is written and signals are recorded. Closing
    waits for the last save, and gives back what the run has set for its whole process.

    threads: those of a new run on a CPU, instead of as many as other programs leave.
    """
    # Check the settings once more: a program may have changed some since they were made.
    if not isinstance(config, TrainConfig):
        problem = f"the settings of a run are a TrainConfig, not {type(config).__name__}"
        raise SettingsError(problem, "make one, as in TrainConfig(**settings) of a dict")
    config = from_arguments(TrainConfig, [], config)
    ranks = Ranks.of_torchrun()
    with process_kept(), ExitStack() as stack:
        # Set up the process: its log, device and ranks.
        log.disabled = not ranks.is_first
        if in_notebook() and not log.handlers:
            stack.callback(log.removeHandler, show_log())
        log_handler = MemoryHandler(1)  # keeps the log until the run has a directory
        log.addHandler(log_handler)
        stack.callback(log.removeHandler, log_handler)
        if not ranks.launched and Ranks.warning():
            log.warning("%s", Ranks.warning())
        device = choose_device(config.device, ranks.local_rank, ranks.local_size)
        stack.enter_context(generator_kept(device))
        ranks.join(device)
        if device.type == "cpu":
            stack.enter_context(freed_memory_kept())
        config = replace(config, code_hash=run_code(config.code))
        check_machine(config, device, ranks)
        asked = settings_of_result(flat(asdict(config)))
        facts = {name: format_value(asked[name]) for name in asked.keys() - PLACES}
        ranks.refuse_others(facts | {"project_hash": str(PROJECT_HASH)})

        # Build the run. Rank 0 chooses the checkpoint and the directory, as only it writes.
        saved = ranks.broadcast_object(checkpoint_to_resume(config, stack) if ranks.is_first else None)
        note = ""
        if device.type == "cpu" and (not ranks.launched or is_fork()):  # torchrun sets the threads of its processes
            kept = saved.meta.computed_on.get("threads") if saved else threads
            note = stack.enter_context(threads_of_run(kept))
        run = build_run(config, ranks, device, saved)
        run.threads_note = note
        tell_idle(config, run.model)
        if not saved or is_changed(config.optimizer, saved.meta):
            tell_rates(config.optimizer, has_head=not config.model.tie_embeddings)
        if ranks.is_first:
            prepare_directory(run, saved, log_handler, stack)
        run.directory = ranks.broadcast_object(run.directory)

        stack.callback(run.checkpointer.wait)
        with run.signals:
            with explain_failures(run):
                try_compiled(run)
            yield run
        run.training_loss = run.model.loss
        ranks.leave()


def build_run(config: TrainConfig, ranks: Ranks, device: torch.device, saved: Saved | None) -> Run:
    """Return a new run, or the one that resumes from a checkpoint; it has no directory yet."""
    # Complete the settings from pretrained weights and the data. Check early: the settings before the text is read, the
    # memory again as soon as the vocabulary is known.
    if saved:
        check_settings(asdict(config), saved.meta, asdict(TrainConfig()))
    config, copy_pretrained, encoding = open_pretrained(config)
    own = None
    if saved and not config.data.is_task:  # rank 0 reads it: another machine may not have the checkpoint
        refuse_text_after_task(config, saved.meta)
        own = ranks.broadcast_object(read_tokenizer(saved.path / TOKENIZER) if ranks.is_first else None)
        encoding = own if saved.meta.own_tokenizer else encoding
    # A resumed run inherits the vocabulary of its own tokenizer. That of a changed text may have more ids.
    unsized = config if own is None or encoding else without_vocabulary(config)
    data = open_data(unsized, encoding, prepares=ranks.local_rank == 0)
    if saved and isinstance(data, TokenDataset) and has_hash(data, saved.meta.text_hash):
        saved = Saved(saved.path, replace(saved.meta, data=data.fingerprint))  # copied or touched: the same tokens
    if saved and saved.meta.data != data.fingerprint:
        check_settings(asdict(config), saved.meta, asdict(TrainConfig()), data.fingerprint)
    if saved and own and encoding is None and isinstance(data, TokenDataset):
        # The weights know the tokens of the checkpoint's tokenizer. The text may have changed, with allow_changes=true,
        # or another version has made its tokens anew, by a tokenizer of its own.
        is_same_text = saved.meta.data == data.fingerprint
        if not is_same_text or not same_tokens(own, data.tokenizer):
            encoding = own
            data = open_data(config, encoding, prepares=ranks.local_rank == 0)
        if is_same_text and encoding:
            log.warning("the tokens of the text are another tokenizer's by now: the run goes on with its own.")
            saved = Saved(saved.path, replace(saved.meta, data=data.fingerprint))
    if saved and ranks.is_first and isinstance(data, TokenDataset) and saved.meta.data != data.fingerprint:
        log.info("text      %s", data.description)  # of a new run the terminal tells it
    before = saved.meta if saved else pretrained_meta(config.init_from)
    texts = before.texts if before else []
    learned = None
    if ranks.is_first:
        learned = tell_learned(config, data, texts)
        if before and not saved:
            tell_left_out(config, before)
            tell_same_windows(config, data, before)
    config = with_vocabulary(config, data.vocab_size)
    refuse_too_large(config, device, ranks)

    # Build the model, with its weights. Rank 0 reads them; parallelize() gives them to the others.
    precision = choose_precision(config.precision, device)
    computed_in = str(precision).removeprefix("torch.")  # of two kinds of cards one may have bf16
    ranks.refuse_others({"precision": computed_in}, "type precision=fp16 or fp32, which all of them then have")
    seed_generators(initial_seed(config.seed), device)
    lower = f"lower model.n_embd={config.model.n_embd} or model.n_layer={config.model.n_layer}"
    with memory_errors(f"the model's weights are more than the memory of {device} holds", lower):
        model = with_recompute(GPT(config.model).to(device), config)
        begun_with = copy_pretrained(model) if ranks.is_first else None
        if config.init_from and not saved:
            step = f", step {before.progress.step:,}" if before and before.progress.step else ""
            log.info(
                "weights   begin as those of %s%s%s",
                config.init_from,
                step,
                changes_from(config.init_from, config.model),
            )
        if saved and ranks.is_first:
            with readable(saved.path):
                load_weights(model, load_file(saved.path / WEIGHTS))
        freeze(model, config.freeze or [])
        if config.freeze:
            count = sum(weight.numel() for weight in model.parameters() if not weight.requires_grad)
            is_tied = config.model.tie_embeddings and not model.lm_head.weight.requires_grad
            tied = "; token_embedding and lm_head are one weight" * is_tied
            log.info("freeze    %s parameters stay as they are: %s%s", f"{count:,}", ", ".join(config.freeze), tied)
        had_compiled = saved.meta.computed_on.get("compiled") if saved else None
        compiled = choose_compile(config, device, model, had_compiled)
        compiled_loss = compiled or choose_compiled_loss(config, device)
        ranks.wait_for_all("the weights")  # the machines may have prepared their text in turn
        if ranks.size > 1 and isinstance(data, TokenDataset):
            ranks.refuse_others({"text_hash": tokens_hash(data.train, data.val)})
        training_loss = parallelize(model, ranks, device, compiled, compiled_loss)

    # Build the run, with its progress.
    own_tokenizer = encoding is not None and not config.data.is_task
    signals = Signals(passed_on=ranks.launched)
    run = Run(config, device, precision, data, model, training_loss, ranks, compiled, own_tokenizer, signals)
    run.progress.begun_with = begun_with
    run.learned_share = learned
    run.begun_from = saved.meta.config.get("init_from") if saved else config.init_from
    run.progress.learned = texts
    if saved:
        restore(run, saved)
        check_end(run)
    return run


def refuse_text_after_task(config: TrainConfig, saved: Meta) -> None:
    """Raise SettingsError for a text in a run that has learned a task, and so has no tokenizer."""
    if saved.files and TOKENIZER not in saved.files:
        learned = flat(saved.config).get("data.source")
        given = f"and data={config.data.source} needs one"
        problem = f"resume={config.resume} has learned data={learned}, which has no tokenizer, {given}"
        raise SettingsError(problem, "leave the data out, or begin a new run")


def tell_learned(config: TrainConfig, data: Dataset, before: Sequence[str]) -> float | None:
    """Tell and return which share of what is held out the model has learned before.

    It was in other tokens. None if it is too small to be told.
    """
    others = [text for text in before if text != data.fingerprint]
    if isinstance(data, TokenDataset) and others:
        share = learned_share(config.data, others, np.asarray(data.val[:]), data.tokenizer)
        if share >= TOLD_SHARE:
            fact = f"{share:.0%} of what is held out is in the text that the model has learned before"
            other = "another val.bin" if config.data.source == "nanogpt" else "data.val_path="
            log.warning("%s: %s holds out another one.", fact, other)
            return round(share, 3)
    return None


def tell_left_out(config: TrainConfig, before: Meta) -> None:
    """Tell of settings that init_from's run had, and for which this run has the defaults."""
    its = flat(before.config)
    ours = flat(asdict(config))
    usual = flat(asdict(TrainConfig()))
    names = [name for name in LEFT_OUT if name in its and its[name] != ours[name] == usual[name]]
    if "data.source" in names:  # a text is another one as a whole
        names = ["data.source", *(name for name in names if not name.startswith("data."))]
    elif not {its.get("data.source"), ours["data.source"]} <= {*DIVISIBLE}:
        names = [name for name in names if name != "data.separator"]
    if names:
        its_words, our_words = (" ".join(as_typed(name, values) for name in names) for values in (its, ours))
        fact = f"init_from={config.init_from} brings its model and tokenizer alone"
        log.warning("%s: it was trained with %s, and this run has %s.", fact, its_words, our_words)


def as_typed(name: str, values: Mapping[str, Any]) -> str:
    """Return a setting as a person types it; for data.source the path or the name of the text."""
    if name == "data.source":
        name = next((each for each in ("data.path", "data.name") if values.get(each)), name)
    typed = {"data.source": "data", "optimizer.name": "optimizer"}.get(name, name)
    return shlex.quote(f"{typed}={format_value(values[name])}")


def tell_same_windows(config: TrainConfig, data: Dataset, before: Meta) -> None:
    """Tell if a run begins with the windows that init_from's run has learned.

    Not if that has read the whole text.
    """
    its = flat(before.config)
    ours = flat(asdict(config))
    alike = {name for name in ("seed", "batch_size", "model.block_size") if its.get(name) == ours[name]}
    read = before.progress.step * its.get("batch_size", 0) + before.progress.ahead
    if not read or not {"seed", "model.block_size"} <= alike:
        return
    if isinstance(data, TokenDataset):
        # The tokens of a text are prepared once more for the tokenizer of given weights.
        known = None
        with suppress(SettingsError, OSError):  # a note ends nothing
            known = prepared(config.data, before.data)
        is_whole = (read + 1) * config.model.block_size >= len(data.train)
        if is_whole or known is None or tokens_hash(known.train) != tokens_hash(data.train):
            return
    elif before.data != data.fingerprint or "batch_size" not in alike:
        return
    fact = f"seed={config.seed} draws the windows that {config.init_from} has learned, once more"
    log.warning("%s: resume= with a later end goes on to others, and another seed draws anew.", fact)


def tell_idle(config: TrainConfig, model: GPT) -> None:
    """Warn of settings of optimizer and schedule without effect, unless they are defaults."""
    values = flat(asdict(config))
    usual = flat(asdict(TrainConfig()))
    idle = config.lacking(SEARCHED)
    # A tied lm_head is the embedding, but matrices of the blocks may have its rate.
    if config.optimizer.lm_head_lr and not {"lm_head", "thin"} & split_parameters(model).keys():
        idle["optimizer.lm_head_lr"] = ("model.tie_embeddings", "true")
    for name, (reason, value) in idle.items():
        if values[name] != usual[name]:
            log.warning("%s=%s has no effect with %s=%s.", name, format_value(values[name]), reason, value)


def is_changed(optimizer: OptimizerConfig, saved: Meta) -> bool:
    """Return whether a run goes on with other rates: of the same it was told as it began."""
    before = flat(saved.config)
    return any(before.get(f"optimizer.{name}") != value for name, value in asdict(optimizer).items())


def tell_rates(optimizer: OptimizerConfig, *, has_head: bool = True) -> None:
    """Warn of rates for another optimizer, and of one that is low beside the others.

    That is the rate of the matrices, if it alone is a tenth of the usual one or less. has_head: whether lm_head is no
    other name of the embedding.
    """
    usual = OptimizerConfig()
    if optimizer.name != usual.name and optimizer.rates == usual.rates:
        kept = ", ".join(f"{name}={rate:g}" for name, rate in usual.rates.items())
        fact = f"optimizer.name={optimizer.name} alone keeps the rates for {usual.name} ({kept})"
        log.warning("%s: optimizer=%s sets those for %s.", fact, optimizer.name, optimizer.name)
    left = []
    for name, parts in (("embedding_lr", "embeddings, norms and biases"), ("lm_head_lr", "lm_head")):
        rate = getattr(optimizer, name)
        is_used = name != "lm_head_lr" or has_head
        if is_used and rate and rate / optimizer.lr >= 10 * getattr(usual, name) / usual.lr:
            left.append(f"optimizer.{name}={rate:g} ({parts})")
    if left:
        remedy = "for one rate of all set optimizer.embedding_lr=null optimizer.lm_head_lr=null"
        if optimizer.name != "adamw":
            remedy += f"; if {optimizer.lr:g} was tuned for AdamW, type optimizer=adamw too"
        log.warning("optimizer.lr=%g leaves %s: %s.", optimizer.lr, " and ".join(left), remedy)


def freeze(model: GPT, parts: Sequence[str]) -> None:
    """Let no gradient reach the weights of these parts, so that no step changes them.

    Raises SettingsError for a part that the model does not have, or if no weight is left to train.
    """
    named = dict(model.named_parameters(remove_duplicate=False))  # a tied weight has two names
    frozen = {part: [name for name in named if f"{name}.".startswith(f"{part}.")] for part in parts}
    for part, names in frozen.items():
        if not names:
            known = dict.fromkeys(re.sub(r"^(blocks\.\d+|[^.]+).*", r"\1", name) for name in named)
            remedy = f"choose of {', '.join(known)}, and of parts within them such as blocks.0.mlp"
            if "," in part:
                remedy = f"write freeze='[{part}]'"
            raise SettingsError(f"has {part}, which the model does not have", remedy, setting="freeze", value=[*parts])
        for name in names:
            named[name].requires_grad_(False)
    if not any(weight.requires_grad for weight in named.values()):
        raise SettingsError("leaves no weight to train", "leave a part out", setting="freeze", value=[*parts])


def with_vocabulary(config: TrainConfig, vocab_size: int) -> TrainConfig:
    """Return config with this model.vocab_size, unless it has one."""
    return replace(config, model=replace(config.model, vocab_size=config.model.vocab_size or vocab_size))


def without_vocabulary(config: TrainConfig) -> TrainConfig:
    """Return config without its model.vocab_size, for a text that does not decide it."""
    return replace(config, model=replace(config.model, vocab_size=None))


def restore(run: Run, saved: Saved) -> None:
    """Load a checkpoint's optimizers, scaler and progress; the model has its weights already."""
    meta = saved.meta
    with readable(saved.path):
        state = load_file(saved.path / OPTIMIZER) if run.ranks.is_first else {}
        load_optimizer_state(run.model, run.optimizers, state, run.ranks)
        if run.scaler.is_enabled() and meta.scaler:  # a scaler without fp16 has no state
            run.scaler.load_state_dict(meta.scaler)
    run.progress = replace(meta.progress, finished=False)  # max_steps may have grown
    if meta.progress.wandb_id and is_copied(saved):
        run.progress.wandb_id = None
        if run.config.wandb.active_mode != "disabled":
            log.warning("this run was copied from %s, which keeps its run of wandb: it has a new one.", meta.home)
    text = None if meta.data == run.data.fingerprint else run.data.fingerprint
    defaults = asdict(TrainConfig())
    run.progress.earlier_settings = earlier_settings(asdict(run.config), meta, defaults, text, run.precision)
    if run.progress.wandb_id and run.config.wandb.active_mode != "disabled":
        tell_lost_rows(saved)
        if run.progress.earlier_settings != meta.progress.earlier_settings:
            tell_first_values(saved)
    # With another batch_size the run goes on where it was in the text.
    before = meta.config.get("batch_size", run.config.batch_size)
    run.progress.ahead += run.progress.step * (before - run.config.batch_size)
    run.max_steps = steps_to_take(run.config, run.model, run.progress.ahead)
    if isinstance(run.data, TokenDataset):
        run.data = replace(run.data, ahead=run.progress.ahead)
    is_other_text = meta.data != run.data.fingerprint
    if is_other_text:
        run.progress.learned = meta.texts
    if is_other_text or scores_others(run, meta):
        # Figures of other targets do not compare, and a finished run has none of these.
        run.progress.metrics = {}
        run.progress.best_loss = None
        run.progress.without_gain = 0
    run.skipped = torch.tensor([run.progress.skipped, run.progress.skipped_in_a_row], device=run.device)


def scores_others(run: Run, meta: Meta) -> bool:
    """Return whether a resumed run's evaluations score more or fewer targets; tell if so."""
    names = ("eval_tokens", "eval_interval", "batch_size")
    saved = replace(run.config, **{name: meta.config.get(name, getattr(run.config, name)) for name in names})
    before, now = (run.data.validation_tokens(evaluation_tokens(config)) for config in (saved, run.config))
    progress = meta.progress
    if before == now or progress.best_loss is None:
        return False
    fact = f"evaluations read {now:,} tokens, and {before:,} before: their losses do not compare"
    lost = ""
    if progress.best_step < progress.step:
        lost = f" step_{progress.best_step}, the best so far, will be removed: copy it, or set eval_tokens={before}."
    log.warning("%s. The best step is chosen anew, from step %d on.%s", fact, progress.step, lost)
    return True


def tell_lost_rows(saved: Saved) -> None:
    """Tell of a kill, before which wandb may not have written its last rows: it does every 15 s."""
    summary = read_summary(saved.path.parent.parent)
    if summary and summary.status == "running":
        log.warning("this run was killed: wandb may lack its last rows before that, which metrics.jsonl has.")


def tell_first_values(saved: Saved) -> None:
    """Tell of steps after a checkpoint that wandb has, and that are trained anew otherwise."""
    step = saved.meta.progress.step
    rows = read_metrics(saved.path.parent.parent / "metrics.jsonl")  # which have not been cut yet
    last = max((row["step"] for row in rows), default=step)
    if last > step:
        fact = f"wandb keeps the first values of a step, and steps {step + 1:,} to {last:,} are trained anew otherwise"
        log.warning("%s: a copy of the run, by cp -r, is a run of its own there.", fact)


def check_end(run: Run) -> None:
    """Raise SettingsError if a resumed run is past its last step; tell of one at its end."""
    resume = run.config.resume
    refuse_end_before(run.config, run.max_steps, run.progress.step)
    reached = limits_reached(run)
    if reached:
        ends = " and ".join(f"{name}={format_value(value)}" for name, value in reached.items())
        remedy = f"raise {' and '.join(reached)}"
        if "max_steps" not in reached and (run.config.max_steps or [*reached] == ["patience"]):
            remedy += f", or set {' '.join(f'{name}=null' for name in reached)}"
        log.info("resume=%s has finished, by %s: to train on, %s.", resume, ends, remedy)


def refuse_end_before(config: TrainConfig, steps: int | None, step: int) -> None:
    """Raise SettingsError if `step`, where a resumed run is, is past the last of its `steps`."""
    if not steps or step <= steps:
        return
    name = "max_flops" if config.max_flops is not None and steps != config.max_steps else "max_steps"
    value = getattr(config, name)
    end = f"{name}={format_value(value or steps)}{', the default,' * (value is None)}"
    problem = f"{end} ends before step {step}, where resume={config.resume} is"
    raise SettingsError(problem, "raise it" if value is None else "raise it, or leave it out")


def limits_reached(run: Run) -> dict[str, float]:
    """Return the limits that end a run now, by their names."""
    config = run.config
    reached: dict[str, float] = {}
    if config.max_minutes is not None and run.ranks.max(run.seconds / 60) >= config.max_minutes:
        reached["max_minutes"] = config.max_minutes
    if run.max_steps and run.progress.step >= run.max_steps:
        if config.max_flops is not None and run.max_steps != config.max_steps:
            reached["max_flops"] = config.max_flops
        else:
            reached["max_steps"] = run.max_steps
    if config.patience is not None and run.is_out_of_patience:
        reached["patience"] = config.patience
    return reached


def open_data(config: TrainConfig, encoding: Encoding | None, *, prepares: bool = True) -> Dataset:
    """Return the tokens of the text, or the task.

    encoding: the tokenizer of pretrained weights. prepares: whether this process may make the tokens; another waits
    for them. Raises SettingsError if the model does not fit the data.
    """
    data: Dataset
    block_size = config.model.block_size
    if config.data.is_task:
        data = TaskData(config.data.source, config.data.task, block_size, config.batch_size, config.seed)
    elif config.init_from and encoding is None:
        problem = f"init_from={config.init_from} has no tokenizer for data={config.data.source}"
        raise SettingsError(problem, "choose the data of a synthetic task, or another init_from")
    else:
        text = prepare(config.data, config.tokenizer, encoding=encoding, log=log.info, prepares=prepares)
        data = replace(text, block_size=block_size, batch_size=config.batch_size, seed=config.seed)
    data.check()
    size = config.model.vocab_size
    if size and size < data.vocab_size:
        owner = "task" if config.data.is_task else "tokenizer"
        remedy = "leave it null"
        if config.init_from and config.data.is_task:  # whose ids its weights do not have yet
            remedy = f"type model.vocab_size={data.vocab_size}, and new ids begin as the mean of the others"
        raise SettingsError(f"model.vocab_size={size} is less than the {owner}'s {data.vocab_size}", remedy)
    return data


def check_start(config: TrainConfig, *, is_here: bool) -> None:
    """Raise SettingsError for settings that cannot train, without reading the text.

    is_here: whether the run is for this machine, with its devices and files.
    """
    # Check the model against the weights with which it begins, and against this machine. Of another one nothing is
    # known, but torch must be able to count the weights.
    refuse_other_model(config)
    sized = replace(config.model, vocab_size=config.model.vocab_size or FEWEST_IDS)
    if is_here:
        ranks = Ranks.of_torchrun()
        check_machine(config, choose_device(config.device, ranks.local_rank, ranks.local_size), ranks)
    else:
        count_weights(sized)

    # Check the length of the run, and the data without reading the text.
    if config.schedule.warmup_steps:
        steps_to_take(config, without_weights(sized))
    if config.data.is_task:
        open_data(config, None)
    elif config.data.path and is_here:
        Source(config.data)


def check_machine(config: TrainConfig, device: torch.device, ranks: Ranks) -> None:
    """Set determinism; SettingsError if the model is too large, fails, or wandb is not set up."""
    # Set determinism, under which a person's file is tried. Only if it changes: that imports torch's compiler, which
    # takes longer than torch itself.
    if config.deterministic:
        os.environ[WORKSPACE] = ":4096:8"  # cuBLAS is deterministic with this one
        torch.backends.cudnn.benchmark = False
    if torch.get_deterministic_debug_mode() != (RAISES if config.deterministic else 0):
        torch.use_deterministic_algorithms(config.deterministic)

    model = config.model
    sizes = f"model.n_embd={model.n_embd}, model.n_head={model.n_head}, model.block_size={model.block_size}"
    with explained(config.code, sizes):
        refuse_too_large(config, device, ranks)
        if config.code:
            try_code(config, ranks)
    if config.wandb.active_mode != "disabled":
        config.wandb.check_environment()
    if config.wandb.active_mode == "online" and ranks.is_first:
        check_key()


def try_code(config: TrainConfig, ranks: Ranks) -> None:
    """Raise SettingsError if layers with a person's file fail at a trial, or see later tokens.

    Under torchrun also for weights that no gradient reaches, unless they are frozen: ranks wait for each gradient.
    """
    length = min(config.model.block_size, 1024)  # a leak may need a long text
    pattern = config.model.attention.split("/")
    for layer, name in enumerate(pattern):
        settings = replace(config.model.at(layer), vocab_size=FEWEST_IDS)
        torch.default_generator.manual_seed(0)
        tried = tried_layer(settings)
        x = torch.randn(3, length, settings.n_embd)
        refuse_leak(name, tried, x)
        untrained = unreached(tried, x[:, :2])
        layers = range(layer, config.model.n_layer, len(pattern))
        weights = [f"blocks.{each}.attention.{weight}" for each in layers for weight in untrained]
        frozen = config.freeze or []
        moving = [weight for weight in weights if not f"{weight}.".startswith(tuple(f"{part}." for part in frozen))]
        if moving and ranks.launched:
            problem = f"attention={name}: no gradient reaches {', '.join(untrained)}, and torchrun waits for each"
            raise SettingsError(problem, f"leave these weights as they are: freeze='[{','.join([*frozen, *moving])}]'")
        if untrained:
            log.warning(
                "attention=%s: no gradient reaches %s, so training does not change it.", name, ", ".join(untrained)
            )


def refuse_learned_leak(run: Run) -> None:
    """Raise SettingsError if layers with a person's file have learned to see later tokens."""
    if run.config.code:
        texts, _ = first_sequences(run.model, run.data)
        with eval_mode(run.model):
            refuse_leak(run.config.model.attention, run.model.hidden, texts)


def refuse_too_large(config: TrainConfig, device: torch.device, ranks: Ranks) -> None:
    """Raise SettingsError if a run needs more than the memory of the device, before it is built."""
    # Estimate the least that the run needs. A parameter takes 4 bytes each for weight, gradient and Muon's momentum. A
    # token takes 8 for its id, and 2 for each number that its blocks get.
    model = config.model
    _, memory = memory_of(device)
    parameters = count_weights(replace(model, vocab_size=model.vocab_size or FEWEST_IDS))
    state = 12 * parameters
    share = rank_batch_size(config, ranks.size)
    micro = config.micro_batch_size or share
    sequence = model.block_size * (8 + 2 * model.n_embd * model.n_layer)
    needed = state + micro * sequence
    if needed <= memory:
        return
    smaller = [f"micro_batch_size={micro}"] * (micro > 1) + [f"model.block_size={model.block_size}"]
    if state > memory:
        smaller = [f"model.n_layer={model.n_layer}"] * (model.n_layer > 1) + [f"model.n_embd={model.n_embd}"]
        vocabulary = model.vocab_size or FEWEST_IDS
        smaller += [f"the {vocabulary:,} ids of the vocabulary"] * (vocabulary > FEWEST_IDS)
    remedy = f"lower {' or '.join(smaller)}"
    asked = f"{parameters:,} parameters and {micro:,} sequences of {model.block_size:,} tokens at a time"
    lack = f"need at least {needed / 1e9:,.1f} GB to be trained, and {device.type} has {memory / 1e9:,.1f} GB"
    raise SettingsError(f"{asked} {lack}", remedy)


def choose_compile(
    config: TrainConfig,
    device: torch.device,
    model: GPT,
    had_compiled: bool | None = None,
) -> bool:
    """Return whether torch compiles the model.

    auto does on Linux if the run is long enough to gain by it.

    had_compiled: whether the resumed run compiled, which auto keeps: it decides the last bits. Raises SettingsError
    for compile=on if torch cannot compile; auto then warns, but not on a CPU, which few expect to compile.
    """
    gains = sys.platform == "linux" and is_worth_compiling(config, device, model)
    if had_compiled is not None:
        gains = had_compiled
    if config.compile == "off" or (config.compile == "auto" and not gains):
        return False
    is_expected = device.type != "cpu" or bool(had_compiled)
    return can_compile(device, is_required=config.compile == "on", warns=is_expected)


def is_worth_compiling(config: TrainConfig, device: torch.device, model: GPT) -> bool:
    """Return whether a run is so long that it gains back the time of compiling.

    The answer depends on no clock: a run and its repetition compute the same bits.
    """
    steps = steps_to_take(config, model)
    minutes = config.max_minutes or math.inf
    if device.type == "cuda":  # compiling takes about a minute
        return minutes >= 10 and (steps is None or steps >= 2000)
    if steps is not None:
        flops = flops_per_token(model) * config.tokens_per_step * steps
        minutes = min(minutes, flops / (CORE_SPEED * torch.get_num_threads()) / 60)
    return device.type == "cpu" and minutes >= COMPILE_MINUTES


def choose_compiled_loss(config: TrainConfig, device: torch.device) -> bool:
    """Return whether torch compiles the loss of a run whose model it does not compile.

    Eager, it reads and writes the logits on a GPU ten times; compiled, once. It compiles in seconds.
    """
    gains = config.compile == "auto" and device.type == "cuda" and sys.platform == "linux"
    return gains and can_compile(device, is_required=False)


def try_compiled(run: Run) -> None:
    """Compile by the passes of a micro-batch; train uncompiled if that fails.

    Raises SettingsError instead for compile=on. Also tells what torch leaves uncompiled.
    """
    if run.model.runtime.loss_and_gradient is chunk_loss_and_gradient:
        return
    # With torch's compiler, which this run has loaded already.
    from torch._dynamo import config, reset
    from torch._dynamo.exc import FailOnRecompileLimitHit
    from torch._dynamo.utils import counters

    breaks = counters["graph_break"]
    before = breaks.copy()
    try:
        # torch keeps the code of eight models, and leaves a ninth uncompiled: forget those of earlier runs.
        tells = not config.suppress_errors  # torch takes one of the two
        with fast_products(run.device, run.dtype), config.patch(fail_on_recompile_limit_hit=tells):
            try:
                first_pass(run)
            except FailOnRecompileLimitHit:
                reset()
                first_pass(run)
    except Exception as error:  # torch's compiler, Triton and the C compiler document no types
        if lacks_memory(error) or device_failed(error):
            raise
        problem = f"torch cannot compile attention={run.config.model.attention} here ({first_line(error)})"
        if run.config.compile == "on":
            raise SettingsError(f"compile=on: {problem}", "set compile=off") from error
        log.warning("%s: training goes on uncompiled, which is slower.", problem)
        uncompile(run.model)
        run.compiled = False
    finally:
        run.model.zero_grad()
    for reason in breaks - before:
        log.warning("torch leaves a part of the model uncompiled, which is slower: %s", reason.partition("\n")[0])
    run.started = time.perf_counter()  # compiling takes minutes, which max_minutes and the schedule leave out


def first_pass(run: Run) -> None:
    """Take the forward and the backward pass of a micro-batch, and wait for the device."""
    batch = run.data.train_batch(run.progress.step, 0, run.micro_batch_size)
    inputs, targets, doc_starts = batch_to_device(batch, run.device)
    run.model.train()
    with run.autocast:
        loss = run.model.loss(inputs, targets, doc_starts=doc_starts)
    loss.backward()
    loss.item()


def checkpoint_to_resume(config: TrainConfig, stack: ExitStack) -> Saved | None:
    """Return the checkpoint to resume from, None for a new run.

    Raises SettingsError if another process trains the run, or if the directory of a new run has checkpoints.
    """
    run = find_run(config.resume, config.run_dir, wanted=flat(asdict(config))) if config.resume else None
    if run:
        with os_errors_named("resume", run, "written", COPY):
            # Lock the run first, so that no other process writes a later checkpoint.
            lock_run(run, stack, "resume")
            return newest_intact(run)
    if config.run_dir:
        with os_errors_named("run_dir", config.run_dir, "written", WRITABLE):
            directory = user_path("run_dir", config.run_dir)
            if is_locked(directory / ".lock"):  # its run must not be removed, as refuse_used() may advise
                raise in_use(directory, "run_dir")
            refuse_used(directory)
    return None


def prepare_directory(run: Run, saved: Saved | None, log_handler: MemoryHandler, stack: ExitStack) -> None:
    """Give the run a new directory, or the checkpoint's without later files; write to it.

    It gets the settings, a copy of the file of code=, and the log, and stays locked until the stack is closed.
    """
    directory = saved.path.parent.parent if saved else Path(run.config.run_dir or "outputs")
    setting, remedy = ("resume", COPY) if saved else ("run_dir", WRITABLE)
    with os_errors_named(setting, directory, "written", remedy):
        refuse_full_disk(run, user_path("run_dir", str(directory)), setting)

        # Lock a new directory; that of a resumed run is locked already. Ask again if it is used: another run may have
        # begun and ended here meanwhile.
        if not saved:
            directory = make_run_directory(run.config.run_dir)
            lock_run(directory, stack)
            refuse_used(directory)

        # Go back to the checkpoint: later files go, and the links are its own again.
        run.directory = directory
        remove_leftovers(directory, saved)
        if saved:
            run.checkpointer.link(run.progress.step, run.progress.best_step)

        # Write the settings, and begin to log.
        if saved:
            tell_edited(directory, flat(saved.meta.config), flat(asdict(run.config)))
        comments = written_comments(directory) if saved else ""
        replace_text(directory / "config.yaml", comments + settings_text(run.settings))
        keep_code(run.config.code, directory)
        log_to(directory, log_handler, stack)

    # Tell where a resumed run goes on, and whether its results may differ.
    if saved:
        log.info("resuming at step %d of %s", run.progress.step, directory)
        before = flat(saved.meta.config)
        now = flat(asdict(run.config))
        is_other = {name: before.get(name, now[name]) != now[name] for name in ("seed", "batch_size")}
        has_same = saved.meta.data == run.data.fingerprint and not any(is_other.values())
        facts = run.computed_on()
        if is_other["batch_size"]:  # of which the micro-batch is a part
            del facts["micro_batch_size"]
        tell_changes(saved.meta.computed_on, facts, has_same)


def tell_edited(directory: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Tell of edits of config.yaml: a run goes on with the settings of its checkpoint."""
    edited = {
        name: format_value(value)
        for name, value in written_settings(directory).items()
        if name in before and format_value(value) not in (format_value(before[name]), format_value(now[name]))
    }
    if edited:
        typed = " ".join(shlex.quote(f"{name}={value}") for name, value in edited.items())
        remedy = f"type that after {hydra_quoted('resume', directory)}"
        if not all(map(is_free, edited)):
            remedy += " allow_changes=true"
        if any(map(shapes_weights, edited)):
            kept = " ".join(filter(shapes_weights, edited))
            remedy = f"the run keeps its {kept}, and a new one may have others"
        log.warning("config.yaml has %s, which changes nothing: %s.", typed, remedy)


def refuse_full_disk(run: Run, directory: Path, setting: str) -> None:
    """Raise SettingsError if a checkpoint is too large for the disk, or for ulimit -f.

    Warns if it has none for all that are kept at a time.
    """
    files = plain_weights(run.model), optimizer_state(run.model, run.optimizers)
    sizes = [sum(tensor.nbytes for tensor in tensors.values()) for tensors in files]
    if max(sizes) > largest_file():
        problem = f"a checkpoint has a file of {si(max(sizes))}B, and ulimit -f allows {si(largest_file())}B"
        raise SettingsError(problem, "raise that limit, as by `ulimit -f unlimited`")
    size = sum(sizes)
    place = next(folder for folder in (directory.absolute(), *directory.absolute().parents) if folder.is_dir())
    disk = shutil.disk_usage(place)
    if not disk.total:  # a disk that does not count
        return
    room = f"has {si(disk.free)}B free, and a checkpoint takes {si(size)}B"
    if disk.free < size:
        elsewhere = "name a folder" if setting == "run_dir" else "resume a copy of the run"
        raise SettingsError(room, f"make room, or {elsewhere} on another disk", setting=setting, value=directory)
    # The best one is kept besides the latest, and a new one is written before an old one goes.
    interval = min(run.config.checkpoint_interval, run.config.eval_interval)
    saves = math.ceil((run.max_steps - run.progress.step) / interval) if run.max_steps else math.inf
    number = min(run.config.keep_checkpoints + 2, saves)
    if disk.free < number * size and not run.progress.step:
        log.warning("%s=%s %s, of which up to %d are there at a time: make room.", setting, directory, room, number)


def tell_changes(before: dict[str, Any], now: dict[str, Any], has_same_batches: bool = True) -> None:
    """Log the facts, besides the settings, that have changed since a run was saved."""
    # An earlier version kept no name of the processor.
    now = {name: value for name, value in now.items() if name != "processor" or name in before}
    changes = [f"{name} {value} (was {before.get(name)})" for name, value in now.items() if value != before.get(name)]
    code = [change for change in changes if change.startswith("project_hash ")]
    machine = [change for change in changes if change not in code]
    if code:
        log.warning("the project's code has changed, so results may differ: %s", *code)
    if machine:
        batches = "the same batches in the same order, but " * has_same_batches
        log.info("with %s: %sresults differ by rounding, and dropout may", ", ".join(machine), batches)
