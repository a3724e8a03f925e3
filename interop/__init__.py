"""Files of other projects: finding them, and one sentence for damaged ones."""

from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path

from common.errors import PICKLED, HuggingFaceError, cause, damage_named, mend
from common.text import plural

WRITTEN = "that transformers' save_pretrained() wrote, with config.json and model.safetensors"
"""What a folder to import is."""


def first_names(names: list[str]) -> str:
    """Return up to three names, and the number of the others."""
    return ", ".join(names[:3]) + (f" and {plural(len(names) - 3, 'other')}" if len(names) > 3 else "")


def importing(where: object) -> AbstractContextManager[None]:
    """Turn any error that a damaged file raises within into a HuggingFaceError."""
    remedy = "copy or download it again, or choose another model"
    return damage_named(HuggingFaceError, "cannot be read", remedy, value=where)


@lru_cache  # settings, weights and tokenizer come from one folder: ask the hub once
def find_folder(where: str) -> Path:
    """Return a local folder, or one with the hub's model of this name, downloaded once."""
    try:
        folder = Path(where).expanduser()
        if folder.is_dir():
            return folder
        if folder.is_file():
            raise HuggingFaceError("is a file", remedy_for_file(folder), value=where)
        from huggingface_hub import snapshot_download  # optional

        return Path(snapshot_download(where, allow_patterns=["*.json", "*.safetensors"]))
    except HuggingFaceError:
        raise
    except Exception as error:  # of the network, the hub or the disk
        fault = f"is not a local folder and could not be downloaded ({cause(error)})"
        remedy = "check the name and the network"
        if isinstance(error, ImportError):
            absent = isinstance(error, ModuleNotFoundError)
            remedy = "pip install huggingface_hub" if absent else mend("huggingface_hub")
        raise HuggingFaceError(fault, f"{remedy}, or give a folder", value=where) from error


def remedy_for_file(file: Path) -> str:
    """Return the remedy for a file in place of a model's folder."""
    if (file.parent / "config.json").exists():
        return f"give its folder, {file.parent}"
    pickled = f"; {PICKLED}" if file.suffix in (".pt", ".pth", ".bin", ".ckpt", ".pkl") else ""
    return f"give the folder {WRITTEN}{pickled}"
