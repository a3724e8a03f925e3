"""Other projects' files: where they are, and errors in a sentence for what is wrong with them."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from common.errors import HuggingFaceError, cause


@contextmanager
def readable(where: object) -> Iterator[None]:
    """Turn whatever a damaged file raises into a HuggingFaceError."""
    try:
        yield
    except (HuggingFaceError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in tiktoken or tokenizers is no Exception
        remedy = "copy or download it again, or choose another model"
        raise HuggingFaceError(f"{where} cannot be read ({cause(error)})", remedy) from error


@lru_cache  # settings, weights and tokenizer are in one folder, for which the hub is asked once
def find_folder(where: str) -> Path:
    """Return a local folder, or that of the files of this name on the hub, which huggingface_hub downloads once."""
    try:
        if (folder := Path(where).expanduser()).is_dir():
            return folder
        from huggingface_hub import snapshot_download  # optional

        return Path(snapshot_download(where, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:  # whatever the network, the hub or the disk raises
        problem = f"{where} is not a local folder and could not be downloaded ({cause(error)})"
        remedy = "check the name and the network, try pip install huggingface_hub, or give a folder"
        raise HuggingFaceError(problem, remedy) from error
