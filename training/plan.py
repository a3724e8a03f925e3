"""The plan of a run: its parameters, arithmetic, memory and time, here or on another GPU."""

import itertools
import math
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any
from weakref import finalize

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from common.errors import SettingsError, one_of
from common.files import user_path
from common.text import command, duration, flat, plural, si
from data.batches import Dataset, TokenDataset
from data.config import TokenizerConfig
from data.tokenizer import make_tokenizer
from model.attention.chunked import OPERATORS
from model.cpu import freed_memory_kept
from model.gpt import GPT
from model.loss import LARGEST_CHUNK_ON_GPU
from model.size import cache_bytes_per_token, count_parameters, flops_per_token, without_weights
from runs.checkpoint import Meta, read_meta
from runs.plugins import run_code
from runs.resume import check_settings, newest
from training.config import TrainConfig
from training.device import DEVICES, choose_device, choose_precision, fast_products, memory_of
from training.distributed import Ranks, parallelize, with_recompute
from training.evaluation import evaluation_tokens, score_batch
from training.guest import generator_kept, process_kept
from training.optimizer import optimizer_state
from training.pretrained import open_pretrained
from training.run import Run, rank_batch_size, steps_to_take
from training.start import (
    check_machine,
    choose_compile,
    freeze,
    open_data,
    refuse_end_before,
    refuse_too_large,
    with_vocabulary,
    without_vocabulary,
)
from training.terminal import EPOCHS, MOST_EPOCHS, describe, epochs
from training.threads import threads_of_run

UTILISATION = 0.4  # share of the peak arithmetic that published runs of GPT-2 report
# The law of docs/which_attention.md, for text whose tokens are bytes: the best parameters without embeddings for C
# FLOP are SIZE · C^SIZE_POWER.
SIZE, SIZE_POWER = 0.00691, 0.59
OF_A_WIDTH = ("model.n_kv_head", "model.head_size", "model.n_inner", "freeze")
"""Settings that a model of another width has not: see with_width()."""
MARGIN = 0.9  # share of a GPU's memory for a run: the allocator's gaps and libraries take the rest
TrainStep = Callable[[Run, int], tuple[Tensor, Tensor]]
"""train_step(run, step) of train.py, an argument because no package imports a command."""


@dataclass(frozen=True)
class Memory:
    """The memory of a device that holds the whole model, in bytes."""

    weights: int
    gradients: int
    optimizer: int
    """The optimizers' state between steps."""
    activations: int
    """Activations and temporary tensors at the peak of a step."""
    evaluation: int
    """All tensors at the peak of an evaluation, which has no gradients."""

    @property
    def peak(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations

    def __str__(self) -> str:
        parts = f"weights {si(self.weights)}B, gradients {si(self.gradients)}B, optimizer {si(self.optimizer)}B"
        step = f"{si(self.peak)}B in a training step: {parts}, activations {si(self.activations)}B"
        return f"memory    {step}; {si(self.evaluation)}B in an evaluation"


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the live tensors made within it, and their peak."""

    def __init__(self, *, on_gpu: bool = False) -> None:
        """on_gpu: count what attention by chunks takes inside as a GPU takes it."""
        super().__init__()
        self.on_gpu = on_gpu
        self.now = 0
        self.most = 0
        self.alive = WeakIdKeyDictionary()  # the storages as keys
        self.inside: dict[tuple, int] = {}  # the bytes of an operator's own tensors, by its arguments

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in OPERATORS:
            self.most = max(self.most, self.now + self.bytes_inside(function, *args))
        # Views share a storage, which counts once.
        for storage in (leaf.untyped_storage() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
            if storage not in self.alive:
                self.alive[storage] = None
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                finalize(storage, self.free, storage.nbytes())
        return result

    def free(self, size: int) -> None:
        """Take away the bytes of a storage that is gone."""
        self.now -= size

    def bytes_inside(self, operator: Any, tensors: list[Tensor], *settings: Any) -> int:
        """Return the peak of the tensors that an operator of chunks makes, its results included."""
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        key = operator, settings, *((tensor.shape, tensor.dtype) for tensor in tensors)
        if key not in self.inside:
            # Take its steps with tensors of shapes. What is on no CPU gets the chunks of a GPU.
            live = LiveBytes()
            with unset_fake_temporarily() if self.on_gpu else nullcontext():
                given = [torch.empty_like(tensor, device="meta") if self.on_gpu else tensor for tensor in tensors]
                live.alive.update({tensor.untyped_storage(): None for tensor in given})
                with live:
                    OPERATORS[operator](given, *settings)
            self.inside[key] = live.most
        return self.inside[key]


def predict_memory(
    train_step: TrainStep, config: TrainConfig, micro: int, dtype: torch.dtype = torch.float32, *, on_gpu: bool = False
) -> Memory:
    """Return the memory that a run of `config`, whose model.vocab_size is set, will need.

    It takes a step with tensors of shapes but no data, so the largest model takes seconds on the smallest machine. They
    are a CPU's tensors; with on_gpu the loss and the attention choose as on a GPU.
    """
    gettempdir()  # an error if there is none, by which an import of torch's compiler would stay half done
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes half a second, and most runs do not need it

    # Two micro-batches reach the peak: the second one finds the gradients of the first.
    few = replace(config, batch_size=min(config.batch_size, 2 * micro), micro_batch_size=micro)
    live = LiveBytes(on_gpu=on_gpu)
    with FakeTensorMode(allow_non_fake_inputs=True), live:
        run = trial_run(few, torch.device("cpu"), dtype)
        if on_gpu:
            run.model.runtime.largest_chunk = LARGEST_CHUNK_ON_GPU
            run.model.runtime.device = "cuda"
        weights = sum(parameter.nbytes for parameter in run.model.parameters())
        gradients = sum(parameter.nbytes for parameter in run.model.parameters() if parameter.requires_grad)
        state = sum(tensor.nbytes for tensor in optimizer_state(run.model, run.optimizers).values())

        # Take a step, and evaluate a batch.
        before = live.now
        live.most = before
        train_step(run, 1)
        activations = max(0, live.most - before - gradients)
        live.most = live.now
        batch = next(run.data.validation_batches(config.eval_batch_size or micro))
        score_batch(run.model.eval(), batch, torch.device("cpu"), run.autocast)
    return Memory(weights, gradients, state, activations, live.most)


def trial_run(config: TrainConfig, device: torch.device, precision: torch.dtype, compiled: bool = False) -> Run:
    """Return a run of one process on made-up text, whose only use is to take steps."""
    with device:
        model = with_recompute(GPT(config.model), config)
    freeze(model, config.freeze or [])
    text = np.broadcast_to(np.uint16(0), 1025 * config.model.block_size)
    tokenizer = make_tokenizer(TokenizerConfig(name="byte"), ())
    data = TokenDataset(
        tokenizer,
        text,
        text,
        "made up",
        "made up",
        config.data.document_mask,
        config.model.block_size,
        config.batch_size,
        config.seed,
    )
    training_loss = parallelize(model, Ranks(), device, compiled)
    return Run(config, device, precision, data, model, training_loss, compiled=compiled)


@process_kept()
def plan_run(train_step: TrainStep, config: TrainConfig) -> str:
    """Return the report of dry_run=true: the first lines of the run, and its price.

    Raises SettingsError for an unknown plan.device, and wherever the run would.
    """
    # Check the settings against the run that is resumed, and the machine: this one, or plan.device.
    saved = saved_before(config)
    check_resumed(config, saved)
    device = choose_device(config.device)
    if config.plan.device is None:
        check_machine(config, device, Ranks())
    else:
        one_of("plan.device", config.plan.device, DEVICES)
        rank_batch_size(config, 1)

    # Open the data, which decides the vocabulary, but of a run that is resumed.
    config, _, encoding = open_pretrained(config)
    data = open_data(without_vocabulary(config) if config.resume else config, encoding)
    config = with_vocabulary(config, data.vocab_size)
    model = without_weights(config.model)
    steps = steps_to_take(config, model)
    resumed = resumed_line(config, saved, steps)
    config = replace(config, max_steps=steps)

    # Describe the run, and its price here or on plan.device.
    flops = flops_per_token(model)
    size = config.tokens_per_step
    parts = ", ".join(f"{kind} {count:,}" for kind, count in count_parameters(model).items() if count)
    tied = "; lm_head is the embedding of the ids" if config.model.tie_embeddings else ""
    if config.plan.device:
        price = on_gpu(train_step, config, flops, data)
    else:
        with freed_memory_kept(), generator_kept(device), threads_of_run(None):  # as in a run
            price = here(train_step, config, device, flops, data)
    lines = [
        *describe(config, data, model),
        *resumed,
        f"weights   {parts}, for {config.model.vocab_size:,} ids{tied}",
        f"compute   {si(flops)}FLOP a token, {si(flops * size)}FLOP a step (forward and backward)",
        f"cache     {si(cache_bytes_per_token(model))}B a token in generation, of block_size tokens",
        *price,
    ]
    return "\n".join(lines)


def saved_before(config: TrainConfig) -> Meta | None:
    """Return the meta.json of the run that is resumed; None without one, which a plan may lack."""
    if not config.resume:
        return None
    try:
        return newest(user_path("resume", config.resume), read_meta)
    except SettingsError:
        return None


def check_resumed(config: TrainConfig, saved: Meta | None) -> None:
    """Raise SettingsError for settings that the resumed run would refuse, by its meta.json."""
    if saved:
        config = replace(config, code_hash=run_code(config.code))
        check_settings(asdict(config), saved, asdict(TrainConfig()))


def resumed_line(config: TrainConfig, saved: Meta | None, steps: int | None) -> list[str]:
    """Return the line that tells where a resumed run goes on, by its meta.json.

    Its plan is that of all its `steps`. Raises SettingsError if it is past them.
    """
    if saved is None:
        return []
    step = saved.progress.step
    refuse_end_before(config, steps, step)
    return [f"resume    goes on at step {step:,}; time and steps here are those of the whole run"]


def here(
    train_step: TrainStep,
    config: TrainConfig,
    device: torch.device,
    flops: float,
    data: Dataset,
) -> list[str]:
    """Return the lines about memory, time and the best size here, measured if a step fits."""
    # Predict the memory, and stop if there is too little.
    refuse_too_large(config, device, Ranks())
    precision = choose_precision(config.precision, device)
    micro = config.micro_batch_size or config.batch_size
    memory = predict_memory(train_step, config, micro, precision, on_gpu=device.type == "cuda")
    eval_size = config.eval_batch_size or micro
    free, _ = memory_of(device)
    lines = [str(memory)]
    if device.type == "cpu":
        # At most 1.74 times as much was measured, with glibc and freed_memory_kept().
        lines.append("          counts tensors alone; the allocator may keep 1.8 times as much")
    if max(memory.peak, memory.evaluation) > free:
        name, size = ("micro_batch_size", micro) if memory.peak > free else ("eval_batch_size", eval_size)
        lower = f"lower {name}={size} or the model" if size > 1 else "choose a smaller model or model.block_size"
        return [*lines, f"          too much for the {si(free)}B free on {device}: {lower}"]

    # Measure a step, which gives the time of the run.
    measure = partial(seconds_per_step, train_step, micro=micro, device=device, dtype=precision)
    seconds, sequences, _ = measure(config, compiled=False)
    way = "uncompiled"
    gain = 1.0
    if choose_compile(config, device, without_weights(config.model)):
        uncompiled = seconds
        seconds, sequences, first = measure(config, compiled=True)
        way = f"compiled, which took {duration(first)},"
        gain = uncompiled / seconds
    rate = config.tokens_per_step / seconds
    measured = f"measured {way} on {plural(sequences, 'sequence')} on {device}"
    speed = f"          {seconds:.3g} s a step: {si(rate)}tokens/s, {si(rate * flops)}FLOP/s, {measured}"
    lines += [time_line(config, seconds, data), speed]
    # Weights that exist already have their size.
    if isinstance(data, TokenDataset) and not (config.init_from or config.resume):
        lines += size_lines(config, data, rate * flops, lambda other: measure(other, compiled=False)[0] / gain)
    return lines


def size_lines(
    config: TrainConfig, data: TokenDataset, rate: float, measure: Callable[[TrainConfig], float]
) -> list[str]:
    """Return the lines that name the model for max_minutes and the text, as a command to copy.

    rate: the FLOP/s of the model in config. measure: returns the seconds of a step.
    """
    minutes = config.max_minutes
    if minutes is None:
        return ["size      set max_minutes=30, or another time, to learn which size the time and the text deserve"]

    # A sample tells how many bytes a token has.
    sample = data.train[:300_000].tolist()
    token_size = len(data.tokenizer.decode_bytes(sample)) / len(sample)

    def is_too_small(width: int) -> bool:
        """Return whether the law's model, at this speed, is larger than this width's."""
        parts = count_parameters(without_weights(with_width(config, width).model))
        # The law is for tokens of a byte, so a token counts as its bytes.
        compute = token_size * 60 * minutes * rate
        return parts["attention"] + parts["mlp"] + parts["norms"] <= SIZE * compute**SIZE_POWER

    # Round the law's size up: in runs of three minutes the next width above was best, or within 2%. Ask twice, because
    # another size has another speed.
    for _ in range(2):
        widths = itertools.dropwhile(is_too_small, itertools.count(32, 32))
        chosen = with_width(config, next(widths))
        model = without_weights(chosen.model)
        seconds = measure(chosen)
        rate = flops_per_token(model) * config.tokens_per_step / seconds

    # Write the run's command. A short text is read many times: dropout delays that it is learned by heart.
    steps = steps_in_time(chosen, seconds, data)
    passes = epochs(config, data, steps)
    values = {"max_minutes": f"{minutes:g}"}
    if passes > EPOCHS and not config.model.dropout:
        values["model.dropout"] = "0.2"
    told = ""
    if passes > MOST_EPOCHS:
        told = f" (beyond {MOST_EPOCHS} it may learn the text by heart: try a smaller model and fewer minutes too)"
    settings = flat(asdict(chosen))
    for name in ("model.n_layer", "model.n_embd", "model.n_head", "model.block_size", "batch_size"):
        values[name] = settings[name]
    # What would not fit that model, or end the run sooner, also if an experiment has it.
    asked = flat(asdict(config))
    ends = ("max_steps", "max_flops")
    values |= {name: "null" for name in (*OF_A_WIDTH, *ends) if asked[name] is not None}
    replaced = ("dry_run", "model", *ends, *OF_A_WIDTH, *values)
    typed = [argument for argument in sys.argv[1:] if argument.lstrip("+").partition("=")[0] not in replaced]
    named = [f"{name}={value}" for name, value in values.items()]
    line = f"{command('train.py')} {shlex.join([*typed, *named])}"
    if Path(sys.argv[0]).name != "train.py" or {"-m", "--multirun"} & {*typed}:  # of many jobs, or none's command
        line = f"{shlex.join(named)}, beside the other settings of this run"
    return [
        f"size      for {minutes:g} min and this text: {count_parameters(model).total():,} parameters, "
        f"about {plural(steps, 'step')}, {passes:,.1f} epochs{told}",
        f"          {line}",
    ]


def with_width(config: TrainConfig, width: int) -> TrainConfig:
    """Return config with a model of this width, in the proportions of the presets.

    It has other parts than those of config.freeze.
    """
    model = replace(
        config.model,
        n_layer=max(4, width // 64),
        n_embd=width,
        n_head=width // 32,
        n_kv_head=None,
        head_size=None,
        n_inner=None,
    )
    return replace(config, model=model, freeze=None)


def seconds_per_step(
    train_step: TrainStep,
    config: TrainConfig,
    *,
    compiled: bool,
    micro: int,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[float, int, float]:
    """Return the seconds of a step, the sequences that were timed, and the first step's seconds.

    The first step of a compiled run compiles.
    """
    # Time one sequence, then a micro-batch if that takes no more than 20 s. Other programs slow a step down, so the
    # fastest of three counts.
    for sequences in (micro,) if compiled else (1, micro):
        run = trial_run(replace(config, batch_size=sequences, micro_batch_size=None), device, dtype, compiled)
        with fast_products(device, dtype):
            started = time.perf_counter()
            train_step(run, 0)[0].item()  # warms up; item() waits for the device
            first = time.perf_counter() - started
            each = math.inf
            for step in range(1, 4):
                started = time.perf_counter()
                train_step(run, step)[0].item()
                each = min(each, (time.perf_counter() - started) / sequences)
        if each * micro > 20:
            break
    return each * config.batch_size, sequences, first


def on_gpu(
    train_step: TrainStep,
    config: TrainConfig,
    flops: float,
    data: Dataset,
) -> list[str]:
    """Return the lines about memory and time on plan.device."""
    half, single, room = DEVICES[config.plan.device or ""]
    micro = config.micro_batch_size or config.batch_size
    dtype, peak = (torch.float32, single) if config.precision == "fp32" else (torch.bfloat16, half)
    memory = predict_memory(train_step, config, micro, dtype, on_gpu=True)
    fits = "fits" if max(memory.peak, memory.evaluation) < MARGIN * room else f"does NOT fit {si(room)}B"
    # Time of the arithmetic.
    recomputed = 4 / 3 if config.recompute == "block" else 1
    seconds = recomputed * config.tokens_per_step * flops / (peak * UTILISATION)
    return [
        str(memory),
        f"plan      {config.plan.device}, {plural(micro, 'sequence')} at a time: {fits}",
        f"{time_line(config, seconds, data)}, at {UTILISATION:.0%} of {si(peak)}FLOP/s",
    ]


def steps_in_time(config: TrainConfig, seconds: float, data: Dataset) -> int:
    """Return how many steps of `seconds` max_minutes has time for, beside their evaluations."""
    pause = evaluation_seconds(config, seconds, data)
    return max(1, round(60 * (config.max_minutes or 0) / (seconds + pause / config.eval_interval)))


def evaluation_seconds(config: TrainConfig, seconds: float, data: Dataset, steps: int | None = None) -> float:
    """Return the time of an evaluation, of a run whose steps take `seconds`.

    steps: those of the run, if it is the last evaluation.
    """
    # It takes forward passes, a third of a step.
    return seconds / config.tokens_per_step / 3 * data.validation_tokens(evaluation_tokens(config, steps))


def time_line(config: TrainConfig, seconds: float, data: Dataset) -> str:
    """Return the line about the time of a run whose steps take `seconds`."""
    pause = evaluation_seconds(config, seconds, data)
    ends = [config.max_steps] if config.max_steps else []
    if config.max_minutes:
        ends.append(steps_in_time(config, seconds, data))
    steps = min(ends)
    evaluations = math.ceil(steps / config.eval_interval)
    last = evaluation_seconds(config, seconds, data, steps)
    # The last one is repeated on as many targets as the earlier ones, if it scores more.
    repeated = pause if evaluations > 1 and last > pause else 0.0
    pauses = (evaluations - 1) * pause + last + repeated
    counted = f"{plural(steps, 'step')} and {plural(evaluations, 'evaluation')} of {pauses / evaluations:.3g} s"
    return f"time      {duration(steps * seconds + pauses)} for {counted}"
