"""Write a checkpoint in Hugging Face's format, or the reverse:  python export.py to=FOLDER [NAME=VALUE ...]

python export.py to=mymodel                    # the newest run
python export.py import_from=gpt2 to=ours      # a Hugging Face model becomes a checkpoint
"""

from dataclasses import dataclass

from cli.command import run_command
from common.errors import SettingsError, naming
from common.text import visible
from training.config import TrainConfig


@dataclass(kw_only=True)
class ExportConfig:
    """What to write where."""

    checkpoint: str | None = None
    """A run's directory, for its best checkpoint, or a checkpoint's; the newest run when null."""
    import_from: str | None = None
    """Folder or hub name of a GPT-2, Llama or Qwen3 of Hugging Face, of which `to` becomes a checkpoint. It is for
    sample.py, eval.py and train.py's init_from."""
    to: str = ""
    """The folder to write, which must not exist yet."""

    def __post_init__(self) -> None:
        if not self.to:
            raise SettingsError("to=FOLDER is needed", "name the folder to write")
        if self.checkpoint and self.import_from:
            given = f"checkpoint={self.checkpoint} and import_from={self.import_from}"
            raise SettingsError(f"{given} are both given", "choose one")


def export(config: ExportConfig) -> None:
    """Write `to`, completely or not at all."""
    from common.files import user_path, writing
    from interop.huggingface import find_folder, from_huggingface, llama_cpp_losses, to_huggingface
    from interop.tokenizer import read_tokenizer_json, save_tokenizer_json
    from runs.checkpoint import open_checkpoint, save_checkpoint

    folder = user_path("to", config.to)
    kind = "checkpoint"
    losses: list[str] = []
    if folder.exists() or folder.is_symlink():
        raise SettingsError(f"to={config.to} is there already", "choose another folder, or remove it first")
    with writing("to", config.to) as unfinished:
        if source := config.import_from:
            with naming(f"import_from={source}"):
                model = from_huggingface(source)
                tokenizer = read_tokenizer_json(find_folder(source), model.config.vocab_size)
            settings = TrainConfig(model=model.config, init_from=f"hf:{source}")
            save_checkpoint(unfinished, model=model, tokenizer=tokenizer, config=settings)
        else:
            checkpoint = open_checkpoint(config.checkpoint)
            source = str(checkpoint.path)
            kind = to_huggingface(checkpoint.model, unfinished, checkpoint.tokenizer.eot_token)
            save_tokenizer_json(checkpoint.tokenizer, unfinished, checkpoint.model.config.block_size)
            losses = llama_cpp_losses(checkpoint.model, checkpoint.tokenizer.name)
    print(visible(f"{source} is now {folder}, a {kind}."))
    for loss in losses:
        print(visible(f"In llama.cpp {loss}."))


def main() -> None:
    run_command(ExportConfig, export)


if __name__ == "__main__":
    main()
