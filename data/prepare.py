"""Documents to tokens, cached for each text and tokenizer.

A folder of the cache has train.bin and val.bin in nanoGPT's format, tokenizer.json and meta.json.
"""

import hashlib
import json
import math
import re
import shlex
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from itertools import chain, islice, repeat
from pathlib import Path

import numpy as np
from tiktoken import Encoding

from common.console import progress_bar
from common.errors import DataError, SettingsError, first_line
from common.files import (
    UNFINISHED,
    holder_of,
    is_locked,
    locked,
    make_shared_folder,
    os_errors_named,
    read_foreign,
    reading,
    remove,
    replacing,
    share,
    user_path,
)
from common.text import plural
from data.batches import TokenDataset
from data.config import MOST_HELD_OUT, DataConfig, TokenizerConfig
from data.overlap import overlap, passage_length
from data.texts import Source, fingerprint, in_real_folder, sizes_of, splits_apart
from data.tokenizer import (
    decode_documents,
    make_tokenizer,
    read_tokenizer,
    same_ids,
    same_tokens,
    save_tokenizer,
    special_names,
    tokenizer_content,
)

FORMAT = 6  # changes with the content of the cache: older folders are then prepared again
SPLITS = ("train", "val")
LLM_C = (b"\x88\xd8\x34\x01", b"\xa1\xd9\x34\x01")  # the first bytes of its files of ids of 2 and of 4 bytes
FOLDER = re.compile("[a-z]+-[0-9a-f]{16}")  # the name of a folder of the cache
# Characters of bpe's training sample for each token. All of the default text would give 0.03% fewer tokens.
BPE_CHARACTERS = 2_000
# Jobs in flight. They bound the memory: 33 million characters at most.
AT_ONCE = 100
# Characters of a job, enough that handing it to a thread takes little of its time.
JOB = 1 << 16
# Characters at the beginning of a text of which bpe's sample is drawn. A shorter text stays in memory.
HEAD = 32_000_000
# Counters of the characters of documents with the same hash. They bound the memory.
COUNTERS = 1 << 20
# The share of the held-out text that is worth a word if the training text has it too: the default text's is 2%.
TOLD_SHARE = 0.05
WORD_SEPARATOR = 0
# Bytes of a split's tokens by which texts are told apart, and those of a piece of them.
HASHED = 1 << 24
HASHED_AT_ONCE = 1 << 16
# Tokens of a text that is compared with one that a model has learned, which takes 3 s.
MOST_LEARNED = 1 << 24
# Tokens of the longest training text in which passages of its own held-out text are looked for, by some 30 bytes each.
MOST_COMPARED = 1 << 21
# The largest share of the validation text for one document and its copies, lest it decide the loss.
LONGEST_SHARE = 1 / 30
# Characters of a document that may take a quarter of it where the others do not suffice: its end would say little.
SHORT = 3_000
# Characters of an end that is held out below which most of its tokens lack the words before them.
SHORT_END = 500
# From how many documents on one with more than half of the text is told, where the end of each is held out.
MANY = 10

Log = Callable[[str], None]
Piece = tuple[str, bool, str]
"""(split, whether the piece begins a document of that split, text)."""


def prepare(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    *,
    encoding: Encoding | None = None,
    log: Log = print,
    prepares: bool = True,
) -> TokenDataset:
    """Return a text's tokens from the cache; encode the text first if they are not there.

    encoding: replaces `tokenizer`, as the one of a model to fine-tune does.
    prepares: False waits for another process to encode, such as rank 0.
    Encoding takes all cores and bounded memory. If two runs start at once, one encodes and the other waits. Raises
    SettingsError if the text, the tokenizer or the cache folder cannot be used, or if the text changes meanwhile.
    """
    if data.source == "nanogpt":
        with reading("data.path", str(data.path)):
            return open_nanogpt(data, tokenizer, encoding)
    # Name the folder by a hash of everything that the tokens depend on.
    root = tokens_root(data)
    source = Source(data)
    validation = validation_source(data)
    tokenizer_key = tokenizer_content(encoding) if encoding else asdict(tokenizer)
    key = [FORMAT, source.fingerprint, data.validation_fraction, tokenizer_key]
    if validation:
        key.append(validation.fingerprint)
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    folder = root / f"{'text' if data.source == 'files' else data.source}-{digest}"
    with os_errors_named("data.cache_dir", data.cache_dir, "used", "give a writable folder on a disk with room"):
        # Fill the folder, or wait for the process that does.
        while (text := text_of(folder)) is None and not prepares:
            time.sleep(0.1)
        if text is not None and prepares:
            # An earlier run has prepared it, perhaps one without a log: repeat its notes.
            for line in json.loads(read_foreign(folder / "meta.json")).get("notes", ()):
                log(line)
        if text is None:
            make_shared_folder(root)
            if is_locked(root / ".lock"):
                other = f"Another run{holder_of(root / '.lock')}"
                log(f"{other} is preparing a text in {root}; waiting for it. If Ctrl-Z halted it, fg lets it go on.")
            with locked(root / ".lock", wait=math.inf) as is_alone:
                share(root / ".lock")
                # Remove the unfinished folders of killed runs, or of one that goes on on a disk without locks.
                for leftover in root.glob(f".*{UNFINISHED}") if is_alone else ():
                    remove(leftover)
                # Ask again: another run may have filled it while this one waited for the lock.
                try:
                    text = text_of(folder) or make_folder(folder, source, encoding or tokenizer, log, validation)
                except OSError:
                    text = text_of(folder)  # on a disk without locks another run may have been sooner
                    if is_alone or text is None:
                        raise
        more_tokens = ["more text"]
        if encoding is None and tokenizer.name != "byte":
            more_tokens.append("tokenizer=byte")
        more_tokens.append("a longer data.val_path" if validation else "another data.val_fraction")
        mapped = map_folder(folder, encoding, text, document_mask=data.document_mask)
        return replace(mapped, more_tokens=tuple(more_tokens))


def tokens_root(data: DataConfig) -> Path:
    """Return the folder of the cache that has a folder for each prepared text."""
    return user_path("data.cache_dir", data.cache_dir) / "tokens"


def prepared(data: DataConfig, name: str) -> TokenDataset | None:
    """Return the tokens in the folder `name` of the cache, None if they are not whole there.

    They are those of an earlier run, whose `fingerprint` is the name, whatever has become of its text.
    """
    if not FOLDER.fullmatch(name):
        return None
    folder = tokens_root(data) / name
    with os_errors_named("data.cache_dir", data.cache_dir, "read", "give a readable folder"):
        text = text_of(folder)
        return None if text is None else map_folder(folder, None, text, document_mask=data.document_mask)


def prepared_bytes(data: DataConfig, name: str) -> int:
    """Return the size of the training tokens in the folder `name` of the cache.

    Raises OSError if there are none.
    """
    return (tokens_root(data) / name / "train.bin").stat().st_size


def learned_share(data: DataConfig, names: Iterable[str], tokens: np.ndarray, tokenizer: Encoding) -> float:
    """Return the share of a text, tokens (N,), that training texts of the cache have too.

    By tokens, or by words if the texts have up to MOST_COMPARED. A text that is not there, has another tokenizer's
    tokens or more than MOST_LEARNED does not count. The share is 0 if `tokens` are more.
    """
    texts = []
    for name in names if len(tokens) <= MOST_LEARNED else ():
        with suppress(SettingsError, OSError):  # a note ends nothing
            learned = prepared(data, name) if prepared_bytes(data, name) <= 4 * MOST_LEARNED else None
            if learned and len(learned.train) <= MOST_LEARNED and same_ids(learned.tokenizer, tokenizer):
                texts.append(np.asarray(learned.train[:]))
    if not texts:
        return 0.0
    train = np.concatenate(texts)
    share = overlap(train, tokens, tokenizer.eot_token, passage_length(tokenizer))
    if len(train) + len(tokens) <= MOST_COMPARED:
        share = max(share, overlap(token_words(train, tokenizer), token_words(tokens, tokenizer), WORD_SEPARATOR))
    return share


def map_folder(folder: Path, encoding: Encoding | None, text: str, *, document_mask: bool) -> TokenDataset:
    """Map the tokens of a whole folder of the cache into memory; text: its description."""
    encoding = encoding or read_tokenizer(folder / "tokenizer.json")
    train, val = open_folder(folder, encoding, str(folder), "delete this folder: the next run makes it again")
    return TokenDataset(encoding, train, val, folder.name, text, document_mask)


def validation_source(data: DataConfig) -> Source | None:
    """Return the text of data.val_path, None if it is not given."""
    if data.val_path is None:
        return None
    # Its format is its own. It may have one document, so a separator need not occur.
    text = DataConfig(source="files", path=data.val_path, separator=data.separator, text_field=data.text_field)
    return Source(text, "data.val_path")


def text_of(folder: Path) -> str | None:
    """Return the description of a cached text, None if it is not whole.

    It is whole if all files have the sizes that meta.json gives.
    """
    try:
        meta = json.loads(read_foreign(folder / "meta.json"))
        is_whole = all((folder / name).stat().st_size == size for name, size in meta["sizes"].items())
        return meta["text"] if is_whole else None
    except PermissionError:  # it may be whole
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def make_folder(
    folder: Path,
    source: Source,
    tokenizer: TokenizerConfig | Encoding,
    log: Log,
    validation: Source | None = None,
) -> str:
    """Write tokenizer.json, train.bin, val.bin and meta.json into a folder, atomically.

    validation: text that is held out besides, all of it. Returns the description of the text that was read.
    """
    config = source.config
    log(f"Preparing {source.describe()} with tokenizer={tokenizer.name}, once.")
    remove(folder)  # one that is not whole
    with replacing(folder, shared=True) as unfinished:
        # Split, train the tokenizer, encode.
        unfinished.mkdir()
        if isinstance(tokenizer, Encoding):  # that of a trained model
            for each in filter(None, (source, validation)):
                each.special = special_names(tokenizer)
        split = Split(source, config.validation_fraction)
        source.refuse_idle_separator()
        if not validation or {*validation.formats.values()} == {"text"}:
            source.refuse_idle_field()
        if isinstance(tokenizer, TokenizerConfig):
            tokenizer = make_tokenizer(tokenizer, split.sample(BPE_CHARACTERS * tokenizer.vocab_size))
        save_tokenizer(tokenizer, unfinished / "tokenizer.json")
        own = held_out(validation.documents()) if validation else ()
        notes = []
        write_tokens(chain(split.pieces(split.documents()), own), tokenizer, unfinished)
        # Check that nobody changed the text meanwhile, and that both splits have tokens.
        for each in filter(None, (source, validation)):
            if Source(each.config, each.setting).fingerprint != each.fingerprint:
                fault = f"changes while it is read ({each.describe()})"
                remedy = "wait until nothing writes to it, or read a copy"
                raise DataError(fault, remedy, setting=each.setting, value=each.value)
            notes += each.note_lines(is_learned=each is source)
        for line in notes:
            log(line)
        apart = splits_apart(source.files) if config.path else []
        if apart:
            more = f", or those of {plural(len(apart) - 3, 'other')}," if len(apart) > 3 else ""
            settings = f"{', or '.join(apart[:3])}{more}"
            log(f"Files whose names tell splits of a data set are one text here; {settings} keeps them apart.")
        if validation and not validation.count:
            fault = f"has no text ({validation.describe()})"
            raise DataError(fault, "give a text", setting=validation.setting, value=validation.value)
        sizes = {file.name: file.stat().st_size for file in unfinished.iterdir()}
        if not source.count:
            fault = f"data={config.source} has no text ({source.describe()})"
            # The field is that of data.val_path too, which may not have the other one.
            raise DataError(fault, "add text" if validation else source.step_to_text("add text"))
        if not all(sizes.values()):
            problem = f"data={config.source} has too little text to hold some out ({source.describe()})"
            share = config.validation_fraction
            raised = f"raise data.val_fraction={share:g}, " if share < MOST_HELD_OUT else ""
            raise DataError(problem, f"add text, {raised}or give data.val_path")
        text = (
            source.describe()
            + split.unheld_text(has_own=bool(validation))
            + shared_text(unfinished, tokenizer, split, validation)
        )
        (unfinished / "meta.json").write_text(json.dumps({"text": text, "notes": notes, "sizes": sizes}, indent=1))
    return text


def shared_text(folder: Path, tokenizer: Encoding, split: "Split", validation: Source | None) -> str:
    """Return the words on the share of the validation texts that the training text has too.

    By tokens, or by words, which another layout leaves as they are. No file stays open, or Windows could not rename the
    folder.
    """
    count = (folder / "train.bin").stat().st_size // token_dtype(tokenizer.n_vocab).itemsize
    compares_words = count <= MOST_COMPARED
    if not compares_words and not validation:
        return ""
    train, val = open_folder(folder, tokenizer, str(folder), "")
    separator = tokenizer.eot_token
    length = passage_length(tokenizer)
    begins = len(val)
    if validation:
        begins = np.flatnonzero(val == separator)[-validation.count]  # its documents are the last
    if compares_words:
        known = word_ids(piece for piece in split.pieces(split.head) if piece[0] == "train")

    # The share that is held out of the text.
    told = ""
    if begins and compares_words:
        own_words = word_ids(piece for piece in split.pieces(split.head) if piece[0] == "val")
        share = max(overlap(train, val[:begins], separator, length), overlap(known, own_words, WORD_SEPARATOR))
        if share >= TOLD_SHARE:
            told += f"; {share:.0%} of what is held out also in the training text"

    # The validation text of its own.
    if validation:
        share = overlap(train, val[begins:], separator, length)
        if compares_words:
            share = max(share, overlap(known, word_ids(held_out(validation.documents())), WORD_SEPARATOR))
        told += f"; validation {validation.describe()}, {share:.1%} of it also in the training text"
    return told


def word_ids(pieces: Iterable[Piece]) -> np.ndarray:
    """Return the words of a text as ids (N,); WORD_SEPARATOR begins a document.

    Case and white space make no difference.
    """

    def ids() -> Iterator[int]:
        for _, begins, text in pieces:
            if begins:
                yield WORD_SEPARATOR
            for word in text.lower().split():
                yield 1 + zlib.crc32(word.encode())

    return np.fromiter(ids(), np.uint64)


def token_words(tokens: np.ndarray, tokenizer: Encoding) -> np.ndarray:
    """Return the words of a text of tokens (N,) as ids, as word_ids() does."""
    return word_ids(held_out([text] for text in decode_documents(tokenizer, tokens)))


def held_out(documents: Iterable[Iterable[str]]) -> Iterator[Piece]:
    """Yield documents as pieces of the validation split."""
    for document in documents:
        for number, text in enumerate(document):
            yield "val", number == 0, text


class Split:
    """Splits a text: holds out the share `fraction` of it for validation.

    The documents with the lowest hashes are held out. So names and order do not matter, and copies are on one side.
    Never held out is a document that, with its copies, is longer than 1/30 of the validation text: it would decide the
    loss. If the others are less than twice `fraction` of the text, a short document may be up to a quarter of it. If
    these are too few as well, the end of every document is held out instead.
    The constructor reads the text; of a longer one than HEAD it reads the beginning before.
    """

    def __init__(self, source: Source, fraction: float) -> None:
        self.source = source
        self.head, self.size = _beginning(source.documents())
        # Sum the lengths of documents and their copies.
        copies = np.zeros(COUNTERS, np.int64)
        for number, length in _hashes(self.documents()):
            copies[number] += length
        wanted = copies.sum() * fraction
        free = np.where(copies > wanted * LONGEST_SHARE, 0, copies)
        if free.sum() < 2 * wanted:
            free = np.where(copies > min(wanted / 4, SHORT), 0, copies)
        # Hold out documents in the order of their hashes until that is enough, otherwise the end of each.
        is_enough = free.sum() >= 2 * wanted
        total = copies.sum()
        self.is_whole = is_enough
        """Whether whole documents are held out."""
        is_one_of_many = is_enough or np.count_nonzero(copies) >= MANY
        self.longest = copies.max() / max(1, total) if is_one_of_many and fraction else 0.0
        """The share of the text of one document and its copies, beside many others or whole ones that are held out."""
        barred = (copies > 0) & (free == 0)
        others = free > 0
        is_unlike = is_enough and barred.any() and others.any() and copies[barred].mean() > 10 * copies[others].mean()
        self.unlike = copies[barred].sum() / total if is_unlike and fraction else 0.0
        """The share of the text of documents that are never held out and are of another kind: ten times as long."""
        self.held_out = is_enough & others & (free.cumsum() - free < wanted)
        lengths = [] if is_enough else [length for _, length in _hashes(self.documents())]
        self.kept = [length - int(length * fraction) for length in lengths]
        self.end = fraction * sum(lengths) / len(lengths) if len(lengths) > 1 else 0.0
        """The mean length of the ends that are held out of several documents; 0 if whole ones are."""

    def unheld_text(self, has_own: bool = False) -> str:
        """Return the words on what is held out badly, "" if nothing is.

        That is a document that is most of the text, a kind that is never held out, or short ends. has_own: whether
        there is a validation text of its own besides.
        """
        remedy = "leave out data.val_fraction" if has_own else "set data.val_path"
        if self.longest > 0.5 and not self.is_whole:
            share = f"{self.longest:.0%} of it is one document, and as much of what is held out is its end"
            return f"; {share}: divide it, move it away, or {remedy}"
        if self.longest > 0.5:
            share = f"{self.longest:.0%} of it is one document, of which nothing is held out"
            return f"; {share}: divide it, or {remedy}"
        if self.unlike > 0.2:
            share = f"{self.unlike:.0%} of it is in documents too long to be held out beside the short ones"
            return f"; {share}: divide them, or {remedy}"
        if 0 < self.end < SHORT_END:
            ends = f"the end of each document is held out, {self.end:.0f} characters on average"
            return f"; {ends}, and scored without its beginning: {remedy}"
        return ""

    def documents(self) -> Iterable[Iterable[str]]:
        """Return the documents of the whole text, from memory if it is small."""
        return self.head if self.size < HEAD else self.source.documents()

    def pieces(self, documents: Iterable[Iterable[str]]) -> Iterator[Piece]:
        """Yield the text of `documents`, the first ones or all, as pieces of a split."""
        for document, kept in zip(documents, self.kept or repeat(sys.maxsize), strict=False):
            texts = iter(document)
            first = next(texts, "")
            if self.held_out[_hash(first)]:
                kept = 0
            # Cut the document after the first `kept` characters, and the piece in which they end.
            position = 0
            for text in chain([first], texts):
                end = max(0, min(len(text), kept - position))
                if end > 0:
                    yield "train", position == 0, text[:end]
                if end < len(text):
                    yield "val", position <= kept, text[end:]
                position += len(text)

    def sample(self, most: int) -> Iterator[str]:
        """Yield about `most` characters of the training text, spread evenly over the head."""
        seen = taken = 0
        for split, _, text in self.pieces(self.head):
            if split == "train":
                # Take this piece if the share taken so far is behind most / size.
                seen += len(text)
                if taken * self.size < most * seen:
                    taken += len(text)
                    yield text


def _beginning(documents: Iterable[Iterable[str]]) -> tuple[list[list[str]], int]:
    """Return the pieces of the first documents, up to HEAD characters, and their length."""
    # Read no piece beyond: the text may be larger than the memory.
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


def _hashes(documents: Iterable[Iterable[str]]) -> Iterator[tuple[int, int]]:
    """Yield the hash of each document's first piece, and the document's length."""
    for document in documents:
        texts = iter(document)
        first = next(texts, "")
        yield _hash(first), len(first) + sum(map(len, texts))


def _hash(text: str) -> int:
    """Return a hash below COUNTERS."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:5], 16)


def jobs(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Yield pieces in groups of at least JOB characters; the last group may have fewer or none."""
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


def write_tokens(pieces: Iterable[Piece], encoding: Encoding, folder: Path) -> None:
    """Write train.bin and val.bin, in the order of the pieces, encoded on all cores."""
    dtype = token_dtype(encoding.n_vocab)
    mark = np.array([encoding.eot_token], np.uint32)

    def encode(job: list[Piece]) -> list[tuple[str, bytes, int]]:
        """Return the split of each piece, its tokens, and its length."""
        encoded = []
        for name, begins, text in job:
            # <|endoftext|> within a piece is ordinary text. Only `mark` begins a document.
            ids = np.append(mark[:begins], encoding.encode_to_numpy(text, disallowed_special=()))
            encoded.append((name, ids.astype(dtype).tobytes(), len(text)))
        return encoded

    waiting = jobs(pieces)
    with ExitStack() as stack:
        files = {name: stack.enter_context((folder / f"{name}.bin").open("wb")) for name in SPLITS}
        pool = stack.enter_context(ThreadPoolExecutor())
        bar = stack.enter_context(progress_bar(desc="preparing tokens", unit=" characters", unit_scale=True))
        while batch := list(islice(waiting, AT_ONCE)):
            # Threads suffice, because tiktoken releases the GIL. map() keeps the order of the text.
            for name, tokens, characters in chain.from_iterable(pool.map(encode, batch)):
                files[name].write(tokens)
                bar.update(characters)


def open_nanogpt(data: DataConfig, tokenizer: TokenizerConfig, encoding: Encoding | None) -> TokenDataset:
    """Return the tokens of a folder in nanoGPT's format, memory-mapped.

    Their tokenizer is the folder's tokenizer.json, otherwise `encoding` or `tokenizer`. Raises DataError if files are
    missing, damaged or of another tokenizer than `encoding`.
    """
    folder = user_path("data.path", str(data.path))
    remedy = "give a folder with train.bin and val.bin, as nanoGPT's prepare.py writes"
    if not encoding and not (folder / "tokenizer.json").exists():
        remedy += ", and tokenizer=, which made it"
    # nanoGPT's prepare.py for characters writes meta.pkl.
    if (folder / "meta.pkl").exists():
        problem = f"data.path={data.path} has ids that only its meta.pkl explains, and a pickle can run code"
        text = folder / "input.txt"
        typed = shlex.quote(f"data.path={text if text.exists() else 'FILE'}")
        raise DataError(problem, f"give the text instead, as in data=text {typed}")
    files = sizes_of(folder / f"{split}.bin" for split in SPLITS)
    # Refuse a folder without tokens before a tokenizer is downloaded.
    if len(files) < len(SPLITS):
        raise DataError(f"data.path={data.path} cannot be used (No such files)", remedy)
    own = read_tokenizer(folder / "tokenizer.json") if (folder / "tokenizer.json").exists() else None
    if own and encoding and not same_tokens(own, encoding):
        raise DataError(f"data.path={data.path} has ids of another tokenizer than the model's", "give the text instead")
    for file in files:
        refuse_header(file, data)
    encoding = encoding or own or make_tokenizer(tokenizer, ())
    dtypes = [stored_dtype(file, encoding.n_vocab) for file in files]
    train, val = open_folder(folder, encoding, f"data.path={data.path}", remedy, dtypes)
    name = f"nanogpt-{fingerprint(in_real_folder(files))}"
    return TokenDataset(encoding, train, val, name, f"tokens of {data.path}", data.document_mask)


def refuse_header(file: str, data: DataConfig) -> None:
    """Raise DataError if a file of ids begins with something else."""
    folder = Path(file).parent
    with Path(file).open("rb") as stream:
        start = stream.read(8)
    if start.startswith(b"\x93NUMPY"):
        noun = "an array saved by numpy.save()"
        remedy = "write the ids by their method tofile() instead"
    elif start[:4] in LLM_C:
        noun = "ids after the header of llm.c"
        cut = f'tail -c +1025 {shlex.quote(str(folder))}/"$split".bin > ids/"$split".bin'
        remedy = f"mkdir ids; for split in train val; do {cut}; done leaves it out: then set data.path=ids"
    elif start == b"version ":
        noun = "a pointer of Git LFS in place of the file"
        remedy = f"git -C {shlex.quote(str(folder))} lfs pull fetches the file"
    else:
        return
    fault = f"cannot be used ({Path(file).name} is {noun})"
    raise DataError(fault, remedy, setting="data.path", value=data.path)


def stored_dtype(file: str, n_vocab: int) -> np.dtype:
    """Return the type of the ids that another program wrote: token_dtype(), or a wider one.

    Read as half as wide, each second id of a wider type is 0, as no text has them.
    """
    dtype = token_dtype(n_vocab)
    with Path(file).open("rb") as stream:
        start = stream.read(1 << 16)
    for wider in ("<u4", "<u8"):
        halves = np.frombuffer(start[: len(start) // 8 * 8], dtype)
        is_wider = len(halves) >= 32 and halves[::2].any() and not halves[1::2].any()
        if is_wider and np.dtype(wider).itemsize == 2 * dtype.itemsize:
            dtype = np.dtype(wider)
    return dtype


def open_folder(
    folder: Path,
    encoding: Encoding,
    place: str,
    remedy: str,
    dtypes: Sequence[np.dtype] | None = None,
) -> list[np.ndarray]:
    """Return train.bin and val.bin, memory-mapped; DataError if an id is not `encoding`'s.

    Reads all ids for this check: 0.1 s for 300 MB that are in memory. dtypes: the types of their ids.
    """
    dtypes = dtypes or [token_dtype(encoding.n_vocab)] * len(SPLITS)
    try:
        # As plain arrays: slicing numpy's memmap class is several times slower.
        splits = [
            np.memmap(folder / f"{split}.bin", dtype, "r").view(np.ndarray)
            for split, dtype in zip(SPLITS, dtypes, strict=True)
        ]
        highest = max(ids.max() for ids in splits)
        if highest >= encoding.n_vocab:
            raise ValueError(f"it has the id {highest}, and tokenizer={encoding.name} ids below {encoding.n_vocab}")
    except ValueError as error:
        raise DataError(f"{place} cannot be used ({first_line(error)})", remedy) from error
    return splits


def token_dtype(n_vocab: int) -> np.dtype:
    """Return uint16 if it holds all ids below `n_vocab`, else uint32, little-endian."""
    return np.dtype("<u2" if n_vocab <= 1 << 16 else "<u4")


def has_hash(data: TokenDataset, text_hash: str | None) -> bool:
    """Return whether a text has all the tokens of an earlier one, by its tokens_hash().

    False for a text with a split larger than HASHED, of which the hash has a part.
    """
    is_whole = max(data.train.nbytes, data.val.nbytes) <= HASHED
    return is_whole and tokens_hash(data.train, data.val) == text_hash


def tokens_hash(*splits: np.ndarray) -> str:
    """Return a hash of the tokens of splits, the same for equal texts wherever their files are.

    Of a split larger than HASHED it has HASHED bytes, spread evenly.
    """
    digest = hashlib.sha256()
    for tokens in splits:
        digest.update(f"{tokens.dtype} {len(tokens)} ".encode())
        if tokens.nbytes <= HASHED:
            digest.update(tokens.tobytes())
            continue
        size = HASHED_AT_ONCE // tokens.itemsize
        for first in np.linspace(0, len(tokens) - size, HASHED // HASHED_AT_ONCE).astype(int):
            digest.update(tokens[first : first + size].tobytes())
    return digest.hexdigest()[:16]
