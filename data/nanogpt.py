"""nanoGPT's prepared data, read where it lies: train.bin and val.bin, raw uint16 ids of GPT-2's encoding."""

from pathlib import Path
from threading import Thread

import numpy as np
from tiktoken import Encoding

from data.files import Source, fingerprint
from data.prepared import PreparedData
from data.shards import VERIFIED_BYTES, Tokens
from data.split import SPLITS
from errors import DataError

GPT2_IDS = 50_257
_CHUNK = 1 << 24  # ids looked at together


def open_nanogpt(path: str, encoding: Encoding) -> PreparedData:
    """Return the splits in a folder that nanoGPT's prepare.py has filled, memory-mapped.

    Raises DataError when they are missing, damaged or of another encoding. The ids of a file beyond VERIFIED_BYTES are
    checked while they are used already.
    """
    folder = Path(path).expanduser()
    if (encoding.n_vocab, encoding.eot_token) != (GPT2_IDS, GPT2_IDS - 1):
        raise DataError(f"data=nanogpt has ids of GPT-2's encoding, not of {encoding.name}: set tokenizer=gpt2.")
    if (folder / "meta.pkl").exists():  # a pickle can run code
        problem = f"data.path={path} has ids of its own, as meta.pkl says, which is not opened"
        raise DataError(f"{problem}: give the text instead, as in data=text data.path={folder / 'input.txt'}.")
    found, splits = [], []
    for split in SPLITS:
        file = folder / f"{split}.bin"
        try:
            status = file.stat()
            if not (size := status.st_size) or size % 2:
                raise ValueError(f"it has {size:,} bytes, which are no ids of two bytes")
            ids = np.memmap(file, dtype="<u2", mode="r").view(np.ndarray)
        except (OSError, ValueError) as error:
            remedy = "give a folder that prepare.py of nanoGPT has filled"
            raise DataError(f"data.path={path}: {file} cannot be used ({error}): {remedy}.") from error
        tokens = Tokens([ids])
        if size > VERIFIED_BYTES:
            Thread(target=_verify, args=(tokens, ids, file), daemon=True).start()
        else:
            _verify(tokens, ids, file)
            if tokens.damage:
                raise DataError(tokens.damage)
        found.append(Source(str(file), size, status.st_mtime_ns))
        splits.append(tokens)
    train, val = splits
    place = folder / f"nanogpt-{fingerprint(found, 'nanogpt')}"
    return PreparedData(encoding, train, val, place, f"nanoGPT's tokens of {path}")


def _verify(tokens: Tokens, ids: np.ndarray, file: Path) -> None:
    """Note as damage an id that GPT-2's encoding does not have."""
    for start in range(0, len(ids), _CHUNK):
        if (most := ids[start : start + _CHUNK].max()) >= GPT2_IDS:
            problem = f"{file} has the id {most}, and GPT-2's encoding {GPT2_IDS:,} ids from 0 on"
            tokens.damage = f"{problem}: give the tokens of nanoGPT's prepare.py, or the text."
            return
