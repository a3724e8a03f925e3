"""The work of export.py: write a checkpoint in Hugging Face's format, or the reverse."""

from pathlib import Path

from common.errors import SettingsError, naming
from common.files import user_path, writing
from common.text import visible
from interop.config import ExportConfig
from interop.huggingface import find_folder, from_huggingface, llama_cpp_losses, to_huggingface
from interop.tokenizer import read_tokenizer_json, save_tokenizer_json
from runs.checkpoint import open_checkpoint, save_checkpoint
from training.config import TrainConfig


def write_folder(config: ExportConfig) -> None:
    """Write `to`, completely or not at all."""
    folder = user_path("to", config.to)
    if folder.exists() or folder.is_symlink():
        raise SettingsError(f"to={config.to} is there already", "choose another folder, or remove it first")
    with writing("to", config.to) as unfinished:
        if config.import_from:
            lines = [f"{config.import_from} is now {folder}, a checkpoint."]
            import_model(config.import_from, unfinished)
        else:
            lines = export_checkpoint(config.checkpoint, unfinished, folder)
    for line in lines:
        print(visible(line))


def import_model(source: str, folder: Path) -> None:
    """Write a Hugging Face model as a checkpoint."""
    with naming(f"import_from={source}"):
        model = from_huggingface(source)
        tokenizer = read_tokenizer_json(find_folder(source), model.config.vocab_size)
    settings = TrainConfig(model=model.config, init_from=f"hf:{source}")
    save_checkpoint(folder, model=model, tokenizer=tokenizer, config=settings)


def export_checkpoint(where: str | None, unfinished: Path, folder: Path) -> list[str]:
    """Write a checkpoint in Hugging Face's format; return lines for the terminal.

    unfinished: where to write; `folder` is its final name, for the lines.
    """
    checkpoint = open_checkpoint(where)
    model = checkpoint.model
    kind = to_huggingface(model, unfinished, checkpoint.tokenizer.eot_token)
    save_tokenizer_json(checkpoint.tokenizer, unfinished, model.config.block_size)
    losses = llama_cpp_losses(model, checkpoint.tokenizer.name)
    return [f"{checkpoint.path} is now {folder}, a {kind}.", *(f"In llama.cpp {loss}." for loss in losses)]
