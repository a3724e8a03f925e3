"""The settings of export.py."""

from dataclasses import dataclass

from common.errors import SettingsError


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
