"""Take a checkpoint to Hugging Face's format:  python export.py to=folder

And back, from a folder or the hub:  python export.py import_from=gpt2 to=folder
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from errors import SettingsError
from settings import command
from training.config import TrainConfig


@dataclass(kw_only=True)
class ExportConfig:
    """What goes where."""

    checkpoint: str | None = None
    """A run's directory (its best checkpoint) or a checkpoint's own; the newest run when null."""
    import_from: str | None = None
    """Instead of a checkpoint, a GPT-2, Llama or Qwen3 of Hugging Face: its folder or its name on the
    hub. `to` becomes a checkpoint of ours, for sample.py, evaluate.py and train.py init_from."""
    to: str | None = None
    """The folder to write, which must not be there yet."""

    def __post_init__(self) -> None:
        if self.to is None:
            raise ValueError("to=FOLDER is needed: the folder to write.")
        if self.checkpoint and self.import_from:
            raise ValueError(
                f"checkpoint={self.checkpoint} and import_from={self.import_from} are both given: choose one."
            )


def export(config: ExportConfig) -> None:
    """Write `to`, whole or not at all."""
    folder = Path(config.to)
    if folder.exists():
        raise SettingsError(f"to={config.to} is there already: choose another folder, or remove it first.")
    try:
        if config.import_from:
            import_model(config.import_from, folder)
        else:
            export_model(config.checkpoint, folder)
    except OSError as error:
        raise SettingsError(f"to={config.to} cannot be written ({error.strerror}): choose another folder.") from None


def export_model(where: str | None, folder: Path) -> None:
    """A checkpoint to a folder that AutoModelForCausalLM and AutoTokenizer load."""
    import shutil

    from interop.huggingface import to_huggingface
    from interop.tokenizer import save_tokenizer_json
    from runs.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(where)
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    try:
        name = to_huggingface(checkpoint.model, unfinished, checkpoint.tokenizer.eot_token)
        save_tokenizer_json(checkpoint.tokenizer, unfinished, checkpoint.model.config.block_size)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    print(f"{checkpoint.path} is now {folder}, a {name}.")


def import_model(where: str, folder: Path) -> None:
    """A model of Hugging Face's to a checkpoint of ours."""
    from interop.huggingface import find_folder, from_huggingface
    from interop.tokenizer import read_tokenizer_json
    from runs.checkpoint import save_checkpoint

    model = from_huggingface(where)
    save_checkpoint(
        folder,
        model=model,
        tokenizer=read_tokenizer_json(find_folder(where)),
        config=TrainConfig(model=model.config, init_from=f"hf:{where}"),
        step=0,
        metrics={},
        state={},
    )
    print(f"{where} is now {folder}, a checkpoint.")


@command("export", ExportConfig)
def main(config: ExportConfig) -> None:
    export(config)


if __name__ == "__main__":
    main()
