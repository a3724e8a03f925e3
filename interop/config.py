"""Settings of export.py."""

from dataclasses import dataclass

from common.errors import SettingsError, check_types, one_of

PAPERS = (".htm", ".xhtml", ".pdf", ".txt", ".md", ".json")
MODELS = (".bin", ".ckpt", ".gguf", ".h5", ".npz", ".onnx", ".pkl", ".pt", ".pte", ".pth", ".safetensors", ".tflite")
APPLES = (".mlmodel", ".mlpackage")
ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".xz", ".7z")


@dataclass(kw_only=True)
class ExportConfig:
    """The model to export or import, and its folder."""

    checkpoint: str | None = None
    """Directory of a run, for its best checkpoint, or of a checkpoint; the newest run when null."""
    code: str | None = None
    """Your own Python file, run first: it registers forms and modifiers of the checkpoint."""
    import_from: str | None = None
    """Folder or hub name of a GPT-2, Llama, Mistral, Qwen2, Qwen3, SmolLM3 or Arcee of Hugging Face, to import.
    sample.py, eval.py and train.py's init_from read it."""
    to: str = ""
    """New folder to write; or FILE.html, a page in which the model writes."""
    dtype: str | None = None
    """Type of the weights: float32, bfloat16 or float16.
    If null float16 on a page, which has no bfloat16, and float32 in a folder, as in training."""

    @property
    def is_page(self) -> bool:
        return self.to.lower().endswith(".html")

    def __post_init__(self) -> None:
        check_types(self)
        if self.import_from:
            self.import_from = self.import_from.removeprefix("hf:")  # as init_from has it
        if self.dtype is not None:
            one_of("dtype", self.dtype, ("float16", "float32") if self.is_page else ("float32", "bfloat16", "float16"))
        if not self.to:
            raise SettingsError("to= is needed", "give to=FOLDER for Hugging Face, or to=demo.html for a page")
        if self.to.lower().endswith(PAPERS + MODELS + APPLES + ARCHIVES):
            remedy = "give its name the ending .html, or none"
            if self.to.lower().endswith(".onnx"):
                remedy += "; docs/library.md has the lines that make an ONNX file"
            if self.to.lower().endswith(".gguf"):
                remedy += "; docs/interop.md has the lines that make a GGUF file"
            raise SettingsError(f"to={self.to} is no page and no folder", remedy)
        if self.checkpoint and self.import_from:
            given = f"checkpoint={self.checkpoint} and import_from={self.import_from}"
            raise SettingsError(f"{given} are both given", "choose one")
        if self.import_from and self.is_page:
            problem = f"to={self.to} is a page, and import_from={self.import_from} makes a checkpoint"
            raise SettingsError(problem, "import to a folder, then export it with checkpoint=FOLDER")
        if self.dtype and self.import_from:
            problem = f"dtype={self.dtype} is for an export, and import_from={self.import_from} makes a checkpoint"
            raise SettingsError(problem, "leave dtype out: a checkpoint has float32")
