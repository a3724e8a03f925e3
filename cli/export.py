"""The work of export.py: a checkpoint in Hugging Face's format, a page, or an import."""

import shlex
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from common.console import say
from common.errors import SettingsError, format_value, naming
from common.files import user_path, writing
from common.text import flat, si
from data.config import DataConfig
from generation.generate import generate_text
from interop.card import PRIVATE, model_card, tokenizer_loader, without_folders
from interop.config import ExportConfig
from interop.huggingface import (
    find_folder,
    from_huggingface,
    note_training,
    noted_training,
    to_huggingface,
    version_needed,
)
from interop.tokenizer import read_tokenizer_json, save_tokenizer_json
from model.size import count_parameters
from pages.demo import demo_page
from runs.checkpoint import Checkpoint, Progress, open_checkpoint, save_checkpoint
from runs.plugins import run_code
from training.config import TrainConfig

IN_EACH_PAGE = b"globalThis.tinygpt = {"


def write_export(config: ExportConfig) -> None:
    """Write `to`, a page or a folder, completely or not at all."""
    run_code(config.code)
    write = write_page if config.is_page else write_folder
    for line in write(config):
        say(line)


def write_page(config: ExportConfig) -> list[str]:
    """Write the page of a checkpoint, in place of such a page alone; return lines to print."""
    checkpoint = open_checkpoint(config.checkpoint)
    with writing("to", config.to) as file:
        place = user_path("to", config.to)
        content = place.read_bytes() if place.exists() else b""
        if content and IN_EACH_PAGE not in content:
            problem = f"to={config.to} is there already, and is no page of a model"
            raise SettingsError(problem, "choose another name, or remove it first")
        file.write_text(demo_page(checkpoint, config.to, config.dtype or "float16"), encoding="utf-8")
        size = file.stat().st_size
    return [f"{checkpoint.path} is now {config.to}, a page of {si(size, 3)}B: open it in a browser."]


def write_folder(config: ExportConfig) -> list[str]:
    """Write a folder; return lines for the terminal."""
    folder = user_path("to", config.to)
    if folder.exists() or folder.is_symlink():
        raise SettingsError(f"to={config.to} is there already", "choose another folder, or remove it first")
    with writing("to", config.to) as unfinished:
        if config.import_from:
            lines = [f"{config.import_from} is now {folder}, a checkpoint."]
            import_model(config.import_from, unfinished)
        else:
            lines = export_checkpoint(config.checkpoint, unfinished, folder, config.dtype)
    return lines


def import_model(source: str, folder: Path) -> None:
    """Write a Hugging Face model as a checkpoint."""
    with naming("import_from", source):
        model = from_huggingface(source)
        tokenizer = read_tokenizer_json(find_folder(source), model.config.vocab_size)
        texts, data = noted_training(source)
    settings = TrainConfig(model=model.config, data=DataConfig(**data), init_from=f"hf:{source}")
    save_checkpoint(folder, model=model, tokenizer=tokenizer, config=settings, progress=Progress(learned=texts))


def export_checkpoint(where: str | None, unfinished: Path, folder: Path, dtype: str | None = None) -> list[str]:
    """Write a checkpoint in Hugging Face's format; return lines for the terminal.

    unfinished: the folder to write; folder: its final name, for the lines; dtype: of its weights, by default theirs.
    """
    # The weights, with the texts that they have learned, and the tokenizer.
    checkpoint = open_checkpoint(where)
    model = checkpoint.model
    kind = to_huggingface(model, unfinished, checkpoint.tokenizer.eot_token, getattr(torch, dtype) if dtype else None)
    note_training(unfinished, checkpoint.meta.texts, checkpoint.meta.config.get("data") or {})
    save_tokenizer_json(checkpoint.tokenizer, unfinished, model.config.block_size)
    # The card, with a sample.
    progress = checkpoint.meta.progress
    card = model_card(
        card_sample(checkpoint),
        progress.metrics,
        step=progress.step,
        earlier_settings=progress.earlier_settings,
        name=folder.name,
        kind=kind,
        needed=version_needed(model),
        parameters=count_parameters(model).total(),
        block_size=model.config.block_size,
        command=shlex.join(["python", "train.py", *changed_settings(checkpoint)]),
    )
    (unfinished / "README.md").write_text(card, encoding="utf-8")
    # The lines for the terminal.
    lines = [f"{checkpoint.path} is now {folder}, a {kind}."]
    loader = tokenizer_loader(kind)
    if loader != "AutoTokenizer":
        lines.append(f"AutoTokenizer of transformers 5 gives other ids for this class: {loader} gives ours.")
    return lines


def card_sample(checkpoint: Checkpoint) -> str:
    """Return a text that the model writes; a sentence if it cannot."""
    try:
        return "".join(generate_text(checkpoint.model, checkpoint.tokenizer, "", max_new_tokens=200))
    except FloatingPointError as error:
        return f"There is none: {error}."


def changed_settings(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the settings of a run that are not the defaults, as they are typed."""
    defaults = flat(asdict(TrainConfig()))
    for name, value in flat(checkpoint.meta.config).items():
        if value != defaults.get(name) and not name.startswith(PRIVATE):
            yield f"{name}={without_folders(name, format_value(value))}"
