"""The encoding of a person's text: UTF-8, or the step that makes it UTF-8.

Every text of a person is checked here: to train, to validate, to be scored, as a prompt. An encoding is named only
after it was tried on all of the text.
"""

import codecs
import io
import re
import shlex
import unicodedata
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

from common.errors import DataError
from common.text import visible
from data.opening import beside, failures_named, open_bytes, stem_of, unpacking, unpacking_of
from data.tokenizer import LONGEST, replace_surrogates

Open = Callable[[], BinaryIO]
"""Opens the bytes of a text, unpacked; called again for each reading."""

PARTS = "letters in parts (NFD), e and a mark for é"
"""Letters as few texts have them, to which a tokenizer gives other tokens."""
UNSEEN = "soft hyphens, zero-width spaces, direction marks or no-break spaces, which look like nothing or a blank"
"""Signs of pages of the web, of which a reader sees nothing."""

SAVE = "save it as plain text in UTF-8 with the program that made it"
# {type by chardet or STARTS: (noun, the step that makes text of it)}. A type that begins as in OTHERS has its noun.
BINARY = {
    "application/pdf": ("a PDF", "pdftotext {file} {stem}.txt makes text of it"),
    "application/rtf": ("Rich Text", SAVE),
    "application/msword": ("a document of an office program", SAVE),
    "application/epub+zip": ("an e-book", "pandoc -t plain --wrap=none -o {stem}.txt {file} makes text of it"),
    "application/zip": ("a zip archive", "unzip {file} -d {stem}, then give what is in it"),
    "application/x-tar": ("a tar archive", "unpack it by tar xf {file}, then give what is in it"),
    "application/x-7z-compressed": ("a 7z archive", "unpack it by 7z x {file}, then give what is in it"),
    "application/vnd.rar": ("a rar archive", "unpack it by unrar x {file}, then give what is in it"),
    "application/vnd.apache.parquet": ("Parquet", "unpack it, or give a file of text"),
    "application/vnd.apache.arrow.file": (
        "an Arrow file",
        "data=hf data.name={folder} trains on the folder of a saved data set; save another one as Parquet",
    ),
    "git-lfs": ("a pointer of Git LFS in place of the file", "git -C {folder} lfs pull fetches the file"),
    "git-annex": ("a pointer of git-annex in place of the file", "git -C {folder} annex get {name} fetches the file"),
    "application/x-sqlite3": ("a SQLite database", "write its text to JSON lines or CSV"),
}
OTHERS = {
    "application/vnd.openxmlformats": BINARY["application/msword"],
    "application/vnd.oasis.opendocument": BINARY["application/msword"],
    "image/": ("an image", "give a file of text"),
    "audio/": ("a sound", "give a file of text"),
    "video/": ("a video", "give a file of text"),
}
# The first bytes of types that chardet does not know or takes for UTF-16, or whose bytes may all be ASCII.
STARTS = {
    b"\x89PNG": "image/png",
    b"GIF8": "image/gif",
    b"\x93NUMPY": "application/octet-stream",
    b"version https://git-lfs.github.com/spec/": "git-lfs",
    b"/annex/objects/": "git-annex",
    b"{\\rtf": "application/rtf",
    b"%PDF-": "application/pdf",
    b"\xff\xff\xff\xff": "application/vnd.apache.arrow.file",  # a stream, as the datasets library writes it
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": "application/msword",
}
ZIP = b"PK\x03\x04"  # also of documents and e-books, which chardet tells; not of an archive of plain text
# The first entries of archives, after a header of 30 bytes. chardet knows others, but not beyond 4 KB.
FIRST_ENTRIES = {
    b"mimetypeapplication/epub+zip": "application/epub+zip",
    b"[Content_Types].xml": "application/vnd.openxmlformats",
}
SHIFT_TO_KANJI = b"\x1b$"  # begins a word of ISO-2022-JP, whose bytes are all ASCII
# iconv's names of codecs that it calls by another word than Python.
ICONV = {
    "mac-roman": "MACINTOSH",
    "mac-cyrillic": "MAC-CYRILLIC",
    "mac-latin2": "MAC-CENTRALEUROPE",
    "euc_jis_2004": "EUC-JISX0213",
    "shift_jis_2004": "SHIFT_JISX0213",
    "iso2022_jp_2004": "ISO-2022-JP-3",
    "iso2022_jp_ext": "ISO-2022-JP-3",
    "kz1048": "RK1048",
    "ptcp154": "PT154",
}
NOT_IN_ICONV = {"cp720", "cp1006", "hz", "mac-greek", "mac-iceland", "mac-turkish"}  # no command could convert them
SAMPLE = 1 << 16  # bytes that chardet is given
BEGINNING = 64  # bytes in which a format of no text has numbers
# A file with fewer bytes that are not UTF-8, in all or in a thousand, is a damaged one, not one of another encoding.
FEWEST = 4
FEWEST_IN_1000 = 2
MISREAD = {  # encodings as which programs read UTF-8, by name: codec and errors; CP866 has Russian words that are UTF-8
    "ISO-8859-1": ("latin-1", "strict"),
    "CP1252": ("cp1252", "strict"),
    "windows-1252": ("cp1252", "unassigned in cp1252"),  # as browsers read it; iconv refuses
    "CP1251": ("cp1251", "strict"),
    "windows-1251": ("cp1251", "unassigned in cp1251"),
    "CP437": ("cp437", "strict"),
    "CP850": ("cp850", "strict"),
}
FEWEST_TWICE = 3  # letters that were UTF-8 of UTF-8; one may be meant, as É and a blank that does not break
MOST = 0.1  # share of broken bytes from which on a file is no text
# Most text that is not UTF-8 is Windows-1252. It is taken if chardet finds it this much as likely as its first guess.
ALMOST = 0.75
NOT_UTF_8 = "not text in UTF-8"  # begins the noun of a text in another encoding, or in none that is known
SURROGATE = re.compile("[\ud800-\udfff]")
PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
NO_NUL = "tr -d '\\000'"
# iconv does not know CESU-8, the UTF-8 of the halves that UTF-16 has: of Java, Oracle and MySQL.
JOIN_HALVES = (
    """python -c 'import sys; text = sys.stdin.buffer.read().decode("utf-8", "surrogatepass"); """
    """sys.stdout.buffer.write(text.encode("utf-16", "surrogatepass").decode("utf-16").encode())'"""
)


class NotText(DataError):
    """A file without text in UTF-8: "FILE is an image", "… not text in UTF-8, but in BIG5"."""

    def __init__(self, file: str, noun: str, remedy: str) -> None:
        super().__init__(f"is {noun}", remedy, value=file)
        self.noun = noun


class Damage(NamedTuple):
    """The bytes of a text that are not UTF-8; each is read as U+FFFD."""

    broken: int
    """Their number."""
    place: str
    """Where the first one is: "line 3, byte offset 120"."""


def check_text(file: str, opened: Open | None = None) -> Damage | None:
    """Return the damage of a text in UTF-8, None if there is none; it reads all of it.

    opened: opens the bytes of `file`; by default open_bytes() does. Raises NotText if it is binary or of another
    encoding, with the command that makes text of it.
    """
    is_unpacked = opened is None
    opened = opened or (lambda: open_bytes(file))
    with failures_named(file):
        with opened() as stream:
            head = stream.read(LONGEST)
            refuse_packed(file, head, is_unpacked)
            refuse_binary(file, head, opened)
        with opened() as stream:
            found = letters_of(stream)
    if found.nul:
        remedy = f"{into_new(file, NO_NUL, 'new')} leaves it out"
        raise NotText(file, f"not text: it has a NUL, first in {found.nul}", remedy)
    if not found.broken:
        return None
    if is_halved(opened):
        noun = f"{NOT_UTF_8}, but in CESU-8, where an emoji is two halves"
        raise NotText(file, noun, f"{into_new(file, JOIN_HALVES, 'utf8')} converts it")
    # UTF-8 that is damaged has more whole letters than broken ones. A few broken bytes are no evidence of an encoding.
    if found.whole < found.broken and found.broken >= max(FEWEST, FEWEST_IN_1000 * found.size / 1000):
        refuse_encoding(file, found.sample, opened)
        if found.broken > MOST * found.size:
            noun = f"{NOT_UTF_8}, nor in an encoding that is known here"
            raise NotText(file, noun, "give a file of text")
    return Damage(found.broken, found.place)


@dataclass
class Letters:
    """The evidence for the encoding of a text."""

    size: int = 0
    """Its length in bytes."""
    whole: int = 0
    """Bytes of its letters in UTF-8 that have several bytes, but for each one's first."""
    broken: int = 0
    """Bytes that are not UTF-8."""
    place: str = ""
    """Where the first of these is."""
    nul: str = ""
    """Where the first NUL is."""
    sample: bytes = b""
    """Lines that have them."""


def letters_of(stream: BinaryIO) -> Letters:
    """Return the evidence for the encoding of a text, read in blocks."""
    found = Letters()
    lines = 1
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    block = stream.read(LONGEST)
    while True:
        # The decoder keeps the bytes of a letter that the next block ends.
        begin = found.size - len(decoder.getstate()[0])
        text = decoder.decode(block, final=not block)
        found.size += len(block)
        found.whole += len(to_bytes(text)) - len(text)
        if not found.nul and "\0" in text:
            found.nul = place_in(text, text.index("\0"), lines, begin)
        if replace_surrogates(text)[1]:
            places = [match.start() for match in SURROGATE.finditer(text)]
            found.place = found.place or place_in(text, places[0], lines, begin)
            found.broken += len(places)
            if len(found.sample) < SAMPLE:
                broken = filter(SURROGATE.search, text.split("\n"))
                found.sample = (found.sample + to_bytes("\n".join(broken)))[:SAMPLE]
        lines += text.count("\n")
        if not block:
            return found
        block = stream.read(LONGEST)


def place_in(text: str, index: int, line: int, byte: int) -> str:
    """Return the place of a letter of a block that begins at a line and byte of the file.

    The byte is counted from the beginning of the file, from 0, as `xxd -s` and Python's errors count.
    """
    byte += len(to_bytes(text[:index]))
    return f"line {line + text.count(chr(10), 0, index)}, byte offset {byte:,}"


def to_bytes(text: str) -> bytes:
    """Return the bytes of a text that was decoded with lone surrogates."""
    return text.encode("utf-8", "surrogateescape")


def refuse_packed(file: str, head: bytes, is_unpacked: bool) -> None:
    """Raise NotText for the first bytes of a packed file: a prompt, or one packed twice.

    is_unpacked: whether they were unpacked before.
    """
    unpack = unpacking_of(head)
    if unpack:
        step = f"{unpack} {shlex.quote(file)} > {beside(file, 'new')}"
        if is_unpacked or not Path(file).is_file():
            step = into_new(file, unpack, "new")
        raise NotText(file, "packed twice" if is_unpacked else "packed", f"{step} unpacks it")


def refuse_binary(file: str, head: bytes, opened: Open) -> None:
    """Raise NotText if the first bytes of a file are not those of a text in UTF-8."""
    kind = next((kind for start, kind in STARTS.items() if head.startswith(start)), None)
    if head.startswith(ZIP):
        kind = next((kind for entry, kind in FIRST_ENTRIES.items() if head[30:].startswith(entry)), None)
    if kind is None:
        if b"\0" not in head and SHIFT_TO_KANJI not in head:
            return
        import chardet  # it loads its models; few files need it

        guess = chardet.detect(head[:SAMPLE])
        if guess["encoding"] and not head.startswith(ZIP):
            # Of the encodings some have NUL bytes; in a text of the others one is a mistake.
            if codecs.lookup(guess["encoding"]).name.startswith(("utf-16", "utf-32", "iso2022")):
                refuse_encoding(file, head[:SAMPLE], opened)
            # A pickle, or the weights of a model, have other signs that no text has.
            if is_writing(head[:BEGINNING].replace(b"\0", b"").decode("utf-8", "ignore")):
                return
            kind = "application/octet-stream"
        else:
            kind = "application/zip" if guess["encoding"] else str(guess["mime_type"])
    others = (named for start, named in OTHERS.items() if kind.startswith(start))
    noun, step = BINARY.get(kind) or next(others, ("not text but binary", "give a file of text"))
    folder, name = (shlex.quote(str(part)) for part in (Path(file).parent, Path(file).name))
    step = step.format(file=shlex.quote(file), stem=stem_of(file), folder=folder, name=name)
    raise NotText(file, noun, step)


def refuse_encoding(file: str, sample: bytes, opened: Open) -> None:
    """Raise NotText if another encoding than UTF-8 makes sense of all of a file."""
    import chardet  # it loads its models; few files need it

    guesses = [guess for guess in chardet.detect_all(sample) if guess["encoding"]]
    likeliest = guesses[0]["confidence"] if guesses else 0
    # The likeliest first, but Windows-1252 before others that are almost as likely.
    guesses.sort(key=lambda guess: guess["encoding"] != "Windows-1252" or guess["confidence"] < ALMOST * likeliest)
    for guess in guesses:
        codec = codecs.lookup(str(guess["encoding"])).name
        text = sample.decode(codec, "ignore").lstrip("\ufeff")
        if codec not in {"utf-8", "ascii", *NOT_IN_ICONV} and is_writing(text) and can_decode(opened, codec):
            # Show some of its words: whoever knows the text sees whether they are right.
            first = re.search(r"[^\x00-\x7f]", text)
            middle = first.start() if first else 0
            words = visible(" ".join(text[max(0, middle - 20) : middle + 20].split()))
            convert = into_new(file, f"iconv -f {iconv_name(codec)} -t UTF-8", "utf8")
            noun = f"{NOT_UTF_8}, but in {iconv_name(codec)}: “{words}”"
            raise NotText(file, noun, f"{convert} converts it")


def is_writing(text: str) -> bool:
    """Return whether a text has letters alone: no control characters, none that is not assigned."""
    kinds = Counter(unicodedata.category(letter) for letter in text if letter not in "\t\n\r\f\v\x1b\x1a")
    return not (kinds["Cc"] or kinds["Cn"] or kinds["Co"])


def can_decode(opened: Open, codec: str) -> bool:
    """Return whether a codec of Python can decode all of a text."""
    decoder = codecs.getincrementaldecoder(codec)("strict")
    with opened() as stream:
        try:
            for block in iter(lambda: stream.read(LONGEST), b""):
                decoder.decode(block)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return False
    return True


def is_halved(opened: Open) -> bool:
    """Return whether all that is not UTF-8 in a text are letters in two halves, each in UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogatepass")
    half = ""  # the first one, at the end of a block
    with opened() as stream, suppress(UnicodeDecodeError):
        for block in iter(lambda: stream.read(LONGEST), b""):
            text = half + decoder.decode(block)
            half = text[-1:] if "\ud800" <= text[-1:] <= "\udbff" else ""
            if replace_surrogates(PAIR.sub("", text[: len(text) - len(half)]))[1]:
                return False
        return not half and not decoder.decode(b"", final=True)
    return False


def iconv_name(codec: str) -> str:
    """Return the name of one of Python's codecs in iconv."""
    name = ICONV.get(codec, codec.upper().replace("_", "-"))
    for ours, theirs in (
        ("UTF-16-", "UTF-16"),
        ("UTF-32-", "UTF-32"),
        ("ISO2022", "ISO-2022"),
        ("ISO8859", "ISO-8859"),
    ):
        name = name.replace(ours, theirs)
    return name


def into_new(file: str, command: str, word: str) -> str:
    """Return a shell's line that writes a text, through a command, beside its file.

    For the standard input it is the command, as it stands between the pipes before ours.
    """
    return f"{piped(file, command)} > {beside(file, word)}" if Path(file).is_file() else f"| {command} |"


def piped(file: str, command: str) -> str:
    """Return a shell's line that gives a text, unpacked if it is a packed file, to a command."""
    if not Path(file).is_file():  # the standard input
        return command
    unpack = unpacking(file)
    return f"{unpack} {shlex.quote(file)} | {command}" if unpack else f"{command} < {shlex.quote(file)}"


def read_as(text: str) -> list[str]:
    """Return iconv's names of the encodings as which UTF-8 may have been read.

    So é became Ã©. They are those in which all letters of the text are bytes, and these are UTF-8 of some letters.
    """
    fitting: list[str] = []
    beginning = re.search(r"[^\x00-\x7f]{1,9}", text)
    if not beginning:
        return fitting
    for name, (codec, errors) in MISREAD.items():
        with suppress(UnicodeError):
            beginning[0].encode(codec, errors)  # a codec goes through all that it lacks before it fails
            meant = text.encode(codec, errors).decode()
            if len(re.findall(r"[^\x00-\x7f]", meant)) >= FEWEST_TWICE:
                fitting.append(name)
    return fitting


def keep_unassigned(codec: str, error: UnicodeError) -> tuple[bytes, int]:
    """Return the bytes that a codec does not assign, for which browsers take control characters."""
    assert isinstance(error, UnicodeEncodeError)
    code = error.object[error.start : error.end].encode("latin-1")
    if code.decode(codec, "ignore"):
        raise error
    return code, error.end


for codec in ("cp1252", "cp1251"):
    codecs.register_error(f"unassigned in {codec}", partial(keep_unassigned, codec))


def has_letters_in_parts(text: str) -> bool:
    """Return whether a text has letters in parts that Unicode has whole, as e and a mark."""
    return len(unicodedata.normalize("NFC", text)) < len(text)


def has_unseen_signs(text: str) -> bool:
    """Return whether a text has signs that look like nothing or a blank.

    Pages of the web and chats have them. Zero-width spaces divide the words of Thai and its neighbours, direction marks
    belong to Hebrew and Arabic, and a few no-break spaces are typography, but not the narrow one of 6:05 PM.
    """
    if "\xad" in text or "\u2060" in text:
        return True
    if "\u200b" in text and not re.search("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff]", text):
        return True
    if ("\u200e" in text or "\u200f" in text) and not re.search("[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefe]", text):
        return True
    if "\u202f" in text and re.search("[0-9]\u202f[AaPp]\\.?[Mm]", text):
        return True
    if "\xa0" not in text and "\u202f" not in text:
        return False
    return 10 * len(re.findall("\\w[\xa0\u202f]\\w", text)) > text.count(" ")


def decode_text(name: str, content: bytes) -> tuple[str, Damage | None]:
    """Return a text in one piece, such as a prompt, and its damage.

    Bytes that are not UTF-8 become U+FFFD. name: names it in the errors of check_text().
    """
    damage = check_text(name, lambda: io.BytesIO(content))
    return replace_surrogates(content.decode("utf-8-sig", "surrogateescape"))[0], damage
