"""The least that a run needs, counted before anything is built."""

from dataclasses import replace

from errors import SettingsError
from model.size import count_weights
from training.config import TrainConfig


def model_sizes(config: TrainConfig) -> str:
    """Return the settings that make a model large, as a person would type them."""
    sizes = {name: getattr(config.model, name) for name in ("n_layer", "n_embd", "vocab_size")}
    return " or ".join(f"model.{name}={value}" for name, value in sizes.items() if value)


def refuse_too_large(config: TrainConfig, device: str, memory: int, shards: int, windows: int) -> None:
    """Raise SettingsError for what cannot fit `memory` bytes, those of one `device`, however well it is done.

    shards: the devices over which the weights and what belongs to them is cut up.
    windows: those of a step that one device has.
    """
    model = config.model
    ids = model.vocab_size or 257  # the fewest, while the tokenizer is not known
    parameters = count_weights(replace(model, vocab_size=ids))[1]
    # Weights, gradients, and the one state that Muon keeps of each, all float32; AdamW keeps two.
    state = 12 * parameters // shards
    has = f"{device} has {memory / 1e9:,.1f} GB"
    if state > memory:
        needs = f"needs at least {state / 1e9:,.1f} GB to be trained"
        raise SettingsError(f"a model of {parameters:,} parameters {needs}, and {has}: lower {model_sizes(config)}.")
    micro = config.micro_batch_size or windows
    window = model.block_size * (8 + 2 * model.n_embd * model.n_layer)  # its tokens, and the input of every block
    if (fit := (memory - state) // window) < micro:
        name = "micro_batch_size" if config.micro_batch_size else "batch_size"
        needs = f"{name}={getattr(config, name)} is {micro:,} windows of model.block_size={model.block_size} at a time"
        smaller = next((number for number in range(fit, 0, -1) if windows % number == 0), None)
        remedy = f"set micro_batch_size={smaller} or less" if smaller else "lower model.block_size"
        raise SettingsError(f"{needs}, whose activations need {micro * window / 1e9:,.1f} GB, and {has}: {remedy}.")
