"""Settings of export.py."""

from dataclasses import dataclass

from common.errors import SettingsError


@dataclass(kw_only=True)
class ExportConfig:
    """The model to export or import, and its folder."""

    checkpoint: str | None = None
    """Directory of a run, for its best checkpoint, or of a checkpoint; the newest run when null."""
    import_from: str | None = None
    """Folder or hub name of a Hugging Face GPT-2, Llama or Qwen3, to import as a checkpoint.
    sample.py, eval.py and train.py's init_from read it."""
    to: str = ""
    """Folder to write, which must not exist yet."""

    def __post_init__(self) -> None:
        if not self.to:
            raise SettingsError("to=FOLDER is needed", "name the folder to write")
        if self.checkpoint and self.import_from:
            given = f"checkpoint={self.checkpoint} and import_from={self.import_from}"
            raise SettingsError(f"{given} are both given", "choose one")
