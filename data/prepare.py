"""Documents to tokens, once for each text and tokenizer: a folder with train.bin and val.bin, as nanoGPT has them."""

import hashlib
import json
import math
import sys
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from itertools import accumulate, chain, islice, repeat
from pathlib import Path

import numpy as np
from tiktoken import Encoding

from common.console import progress_bar
from common.errors import DataError, first_line, os_error_reason
from common.files import UNFINISHED, is_locked, lock, read_foreign, reading, remove, replacing, user_path
from data.batches import TokenDataset
from data.config import DataConfig, TokenizerConfig
from data.texts import Source, fingerprint, sizes_of
from data.tokenizer import make_tokenizer, read_tokenizer, same_tokens, save_tokenizer, tokenizer_content

FORMAT = 6
# bpe learns from so many characters for each token: the default text has 0.03% fewer tokens when it learns from all.
BPE_CHARACTERS = 2_000
AT_ONCE = 100  # jobs of encoding that are under way, 33 million characters at most
JOB = 1 << 16  # characters of the pieces that a thread encodes in one job, which handing it over costs little of
SPLITS = ("train", "val")
HEAD = 32_000_000  # characters of a large text that decide what is held out, and of a small one that stay in memory
LONGEST_SHARE = 1 / 30  # of the validation text that a document, with its copies, may be

Log = Callable[[str], None]
Piece = tuple[str, bool, str]
"""The split of a piece of text, whether the piece begins a document of that split, and the text."""


def prepare(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    *,
    encoding: Encoding | None = None,
    log: Log = print,
    prepares: bool = True,
) -> TokenDataset:
    """Return the tokens of a text from the cache, or make them now on all cores and in bounded memory.

    encoding: the tokenizer to use instead of the one that `tokenizer` names, e.g. that of the model to fine-tune.
    prepares: False waits for another process to make the tokens, e.g. the one with the terminal.
    If two runs start at once, one makes the tokens and the other waits. Raises DataError if the text, the tokenizer or
    the cache folder cannot be used, and if the text changes meanwhile.
    """
    if data.source == "nanogpt":
        with reading("data.path", str(data.path)):
            return open_nanogpt(data, tokenizer, encoding)
    # The folder's name is a hash of all that the tokens depend on.
    root = user_path("data.cache_dir", data.cache_dir) / "tokens"
    source = Source(data)
    tokenizer_key = tokenizer_content(encoding) if encoding else asdict(tokenizer)
    key = json.dumps([FORMAT, source.fingerprint, data.validation_fraction, tokenizer_key], sort_keys=True)
    folder = root / f"{data.source}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    try:
        # Make the folder, or wait for the process that does.
        while not prepares and not is_whole(folder):
            time.sleep(0.1)
        if not is_whole(folder):
            with cache_locked(root, log):
                if not is_whole(folder):  # another run may have made it meanwhile
                    make_folder(folder, source, encoding or tokenizer, log)
        # Open it.
        encoding = encoding or read_tokenizer(folder / "tokenizer.json")
        train, val = open_folder(folder, encoding, str(folder), "delete this folder: the next run makes it again")
        return TokenDataset(encoding, train, val, folder.name, source.description, data.document_mask)
    except OSError as error:
        problem = f"data.cache_dir={data.cache_dir} cannot be used ({os_error_reason(error)})"
        raise DataError(problem, "give a writable folder on a disk with room") from error


def is_whole(folder: Path) -> bool:
    """Return whether a folder of the cache has its files, in the sizes that its meta.json says."""
    try:
        sizes = json.loads(read_foreign(folder / "meta.json"))["sizes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False


@contextmanager
def cache_locked(root: Path, log: Log) -> Iterator[None]:
    """Hold the lock of the cache, and first remove what killed runs left unfinished."""
    root.mkdir(parents=True, exist_ok=True)
    if is_locked(root / ".lock"):
        log(f"Another run is preparing a text in {root}; waiting for it.")
    with lock(root / ".lock", wait=math.inf):
        for leftover in root.glob(f".*{UNFINISHED}"):
            remove(leftover)
        yield


def make_folder(folder: Path, source: Source, tokenizer: TokenizerConfig | Encoding, log: Log) -> None:
    """Write tokenizer.json, train.bin, val.bin and meta.json, and give their folder its name in one step."""
    log(f"Preparing {source.description} with tokenizer={tokenizer.name}, once.")
    remove(folder)  # it may be there, but not whole
    with replacing(folder) as unfinished:
        unfinished.mkdir()
        split = Split(source, source.config.validation_fraction)
        if isinstance(tokenizer, TokenizerConfig):
            tokenizer = make_tokenizer(tokenizer, split.sample(BPE_CHARACTERS * tokenizer.vocab_size))
        save_tokenizer(tokenizer, unfinished / "tokenizer.json")
        write_tokens(split, tokenizer, unfinished, log)
        if Source(source.config).fingerprint != source.fingerprint:
            problem = f"data={source.config.source} changes while it is read ({source.description})"
            raise DataError(problem, "wait until nothing writes to it, or read a copy")
        for loss, (count, first) in source.losses.items():
            log(f"{loss}: {count:,}, first in {first}.")
        sizes = {file.name: file.stat().st_size for file in unfinished.iterdir()}
        if not (sizes["train.bin"] and sizes["val.bin"]):
            problem = f"data={source.config.source} has no text, or too little to hold some out ({source.description})"
            validation = f"raise data.val_fraction={source.config.validation_fraction:g}"
            raise DataError(problem, f"choose another data.path or data source, or {validation}")
        meta = {"text": source.description, "sizes": sizes}
        (unfinished / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")


class Split:
    """A text with `fraction` of it held out; the constructor reads its first HEAD characters.

    The documents with the lowest hashes are held out, of those that are, with their copies, no longer than 1/30 of the
    validation text. So names and order do not matter, copies are on one side, and no document decides the loss. If
    such documents are less than twice `fraction` of the text, the last `fraction` of each document is held out.
    """

    def __init__(self, source: Source, fraction: float) -> None:
        self.source = source
        self.head, self.size = _beginning(source.documents())
        self.kept: list[int] = []  # characters of each document to train on, where the end of each is held out
        self.highest = -1  # hash of a document that is held out whole
        wanted = self.size * fraction
        self.longest = wanted * LONGEST_SHARE
        sizes: Counter[int] = Counter()  # of each document in one piece, with its copies
        for texts in self.head:
            if len(texts) == 1:
                sizes[_hash(texts[0])] += len(texts[0])
        self.frequent = {number for number, size in sizes.items() if size > self.longest}
        free = sorted(sizes.keys() - self.frequent)
        sums = list(accumulate(sizes[number] for number in free))
        if free and sums[-1] >= 2 * wanted:
            self.highest = free[bisect_left(sums, wanted)]
        else:
            lengths = (sum(map(len, document)) for document in self.documents())
            self.kept = [length - int(length * fraction) for length in lengths]

    def documents(self) -> Iterable[Iterable[str]]:
        """Return the documents of the whole text; a small one is not read again."""
        return self.head if self.size < HEAD else self.source.documents()

    def pieces(self, documents: Iterable[Iterable[str]]) -> Iterator[Piece]:
        """Yield all text of the first documents or of all, each character once, in pieces."""
        for document, kept in zip(documents, self.kept or repeat(sys.maxsize), strict=False):
            texts = iter(document)
            begun = list(islice(texts, 2))
            if self._is_held_out(begun):
                kept = 0
            position = 0  # in the document
            for text in chain(begun, texts):
                end = max(0, min(len(text), kept - position))
                if end > 0:
                    yield "train", position == 0, text[:end]
                if end < len(text):
                    yield "val", position <= kept, text[end:]
                position += len(text)

    def _is_held_out(self, begun: list[str]) -> bool:
        """Return whether a document is held out whole, by its first two pieces: such a one has a single piece."""
        if len(begun) != 1 or len(begun[0]) > self.longest:
            return False
        number = _hash(begun[0])
        return number <= self.highest and number not in self.frequent

    def sample(self, most: int) -> Iterator[str]:
        """Yield about `most` characters to train on, spread evenly over the text, of a large one its beginning."""
        seen = taken = 0
        for split, _, text in self.pieces(self.head):
            if split == "train":
                seen += len(text)
                if taken * self.size < most * seen:
                    taken += len(text)
                    yield text


def _beginning(documents: Iterable[Iterable[str]]) -> tuple[list[list[str]], int]:
    """Return the pieces of the first documents, and how many characters they have."""
    head: list[list[str]] = []
    size = 0
    for document in documents:
        head.append([])
        for text in document:
            head[-1].append(text)
            size += len(text)
            if size >= HEAD:
                return head, size
    return head, size


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def jobs(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Yield pieces in groups of JOB characters or more, but for the last, which may be empty."""
    job: list[Piece] = []
    size = 0
    for piece in pieces:
        job.append(piece)
        size += len(piece[2])
        if size >= JOB:
            yield job
            job = []
            size = 0
    yield job


def write_tokens(split: Split, encoding: Encoding, folder: Path, log: Log) -> None:
    """Encode text on all cores and write train.bin and val.bin, each in the order of the text."""
    dtype = token_dtype(encoding.n_vocab)
    logged = time.monotonic()
    mark = np.array([encoding.eot_token], np.uint32)

    def encode(job: list[Piece]) -> list[np.ndarray]:
        encode_piece = partial(encoding.encode_to_numpy, disallowed_special=())  # a literal <|endoftext|> is text
        return [np.append(mark[:begins], encode_piece(text)) for _, begins, text in job]

    waiting = jobs(split.pieces(split.documents()))
    with ExitStack() as stack:
        files = {name: stack.enter_context((folder / f"{name}.bin").open("wb")) for name in SPLITS}
        pool = stack.enter_context(ThreadPoolExecutor())
        bar = stack.enter_context(progress_bar(desc="preparing tokens", unit=" characters", unit_scale=True))
        while batch := list(islice(waiting, AT_ONCE)):
            for job, encoded in zip(batch, pool.map(encode, batch), strict=True):
                for (name, _, text), ids in zip(job, encoded, strict=True):
                    files[name].write(ids.astype(dtype).tobytes())
                    bar.update(len(text))
            if bar.disable and time.monotonic() > logged + 30:  # without a terminal
                log(f"{files['train'].tell():,} bytes of tokens are written.")
                logged = time.monotonic()


def open_nanogpt(data: DataConfig, tokenizer: TokenizerConfig, encoding: Encoding | None) -> TokenDataset:
    """Return the splits in a folder that nanoGPT's prepare.py or a run has filled, memory-mapped where they lie.

    Their ids are those of the folder's tokenizer.json, else of `encoding`, else of what `tokenizer` names. Raises
    DataError when they are missing, damaged or of another encoding.
    """
    folder = user_path("data.path", str(data.path))
    remedy = "give a folder with train.bin and val.bin, as nanoGPT's prepare.py writes, and tokenizer=, which made it"
    if (folder / "meta.pkl").exists():  # a pickle can run code
        problem = f"data.path={data.path} has ids of its own, as meta.pkl says, which is not opened"
        raise DataError(problem, f"give the text instead, as in data=text data.path={folder / 'input.txt'}")
    files = sizes_of(folder / f"{split}.bin" for split in SPLITS)
    if len(files) < len(SPLITS):  # before a tokenizer is downloaded for them
        raise DataError(f"data.path={data.path} cannot be used (No such files)", remedy)
    own = read_tokenizer(folder / "tokenizer.json") if (folder / "tokenizer.json").exists() else None
    if own and encoding and not same_tokens(own, encoding):
        raise DataError(f"data.path={data.path} has ids of another tokenizer than the model's", "give the text instead")
    encoding = encoding or own or make_tokenizer(tokenizer, ())
    train, val = open_folder(folder, encoding, f"data.path={data.path}", remedy)
    name = f"nanogpt-{fingerprint(files)}"
    return TokenDataset(encoding, train, val, name, f"tokens of {data.path}", data.document_mask)


def open_folder(folder: Path, encoding: Encoding, place: str, remedy: str) -> list[np.ndarray]:
    """Map train.bin and val.bin into memory. Raises DataError if they do not hold ids of `encoding`.

    All ids are read: 0.1 s for 300 MB that are in memory.
    """
    dtype = token_dtype(encoding.n_vocab)
    try:
        # A plain view: slicing the memmap class itself is several times slower.
        splits = [np.memmap(folder / f"{split}.bin", dtype, "r").view(np.ndarray) for split in SPLITS]
        highest = max(int(ids.max()) for ids in splits)
        if highest >= encoding.n_vocab:
            raise ValueError(f"it has the id {highest}, and tokenizer={encoding.name} ids below {encoding.n_vocab}")
    except ValueError as error:
        raise DataError(f"{place} cannot be used ({first_line(error)})", remedy) from error
    return splits


def token_dtype(n_vocab: int) -> np.dtype:
    """Return the smallest of uint16 and uint32, little-endian, that holds ids below `n_vocab`."""
    return np.dtype("<u2" if n_vocab <= 1 << 16 else "<u4")
