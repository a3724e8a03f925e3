"""Sources of documents: the standard library, tales, Shakespeare, files, a dataset.

A document is an iterable of pieces of text of bounded length, so it may be larger than the memory.
"""

import glob
import hashlib
import os
import platform
import re
import shlex
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, TypeVar
from urllib.request import urlopen

from common.errors import DataError, first_line, format_value, library_fault, naming
from common.files import reading, replacing, user_path, without_dots
from common.text import escaped, plural, si, unescaped
from data.config import DIVISIBLE, DataConfig
from data.encoding import (
    MISREAD,
    NOT_UTF_8,
    PARTS,
    UNSEEN,
    Damage,
    NotText,
    check_text,
    has_letters_in_parts,
    has_unseen_signs,
    read_as,
)
from data.fields import Record, has_field, listed, text_fields, value_of
from data.formats import Format, format_of, records_of
from data.json_records import is_assigned
from data.opening import FORMATS, MARK, PACKINGS, is_named, opened_text, unpacking
from data.remedies import records_within, without_text
from data.tables import refuse_excels_line, refuse_lines_before, repeats_names
from data.tales import LISTS, RULES, tales
from data.tokenizer import LONGEST, pieces, replace_surrogates

SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

# Left out of the standard library: tests, near copies and generated tables.
SKIPPED = {"test", "tests", "idle_test", "lib2to3", "encodings", "stringprep.py", "_casefix.py"}
# The format of all files of a source that reads one format alone.
FORMAT_OF_SOURCE = {
    "text": "text",
    "stdlib": "text",
    "shakespeare": "text",
    "jsonl": "jsonl",
    "csv": "csv",
    "hf": "parquet",
}

LONGEST_NAME = 1 << 13
"""Letters of a line that may still name a file."""

OF_RUNS = (("config.yaml", "train.log"), ("leaderboard.csv", "leaderboard.md"))
"""The files by which the folder of a run is known, and that of a sweep."""

PACKAGES = {"site-packages", "dist-packages", "node_modules"}
"""The folders of packages that Python and Node.js have installed."""

OF_DATASETS = ("dataset_info.json", "dataset_dict.json", "state.json")
"""The files that save_to_disk() of the datasets library writes beside those of the records, which end in .arrow."""

OF_PARQUET = ("_metadata", "_common_metadata")
"""The files that Spark, Dask and others write beside those of the rows, which end in .parquet."""

PACKED = {".parquet", *(ending for ending, _, _ in PACKINGS.values())}
"""The endings of packed files, whose size is not that of their text."""

LEFT_OUT = "Files left out that are not text (given alone, each tells its remedy)"
CODED = "Texts left out that are not in UTF-8 (given alone, each tells its remedy; docs/data.md converts a folder)"

NAME_ON_HUB = re.compile(r"[\w-]+/[\w-]+")
DATASET = re.compile(
    r"(?:hf:(?://datasets/)?|https?://huggingface\.co/datasets/)(\w[\w.-]*(?:/[\w.-]+)?)/?(?:(?:tree|viewer)/.*)?"
)
"""The name of a data set of Hugging Face's without an ending, which a file has, and its addresses."""

REPOSITORY = re.compile(r"(https?://git(?:hub|lab)\.com/[\w.-]+/[\w.-]+)/?(?:tree/.*)?")
"""The address of a repository, or of the page that shows a folder of it."""

SPLIT_WORD = re.compile(r"(?i)(?<![a-z])(train(?:ing)?|val(?:id(?:ation)?)?|dev|test(?:ing)?|held_?out)(?![a-z])")
"""The words by which a name of a file or folder tells a split of a data set."""

ICONV = {"jsonl": "jq -c . FILE | iconv", "json": "jq -c '.[]' FILE | iconv", "csv": "iconv"}
"""{format: the command that converts its encoding}: iconv does not see JSON's escapes, and Parquet is no text."""

FOREIGN_MARK = re.compile(r"<\|(?:startoftext|begin_of_text|end_of_text|bos|eos)\|>|<(?:bos|eos|BOS|EOS)>")
"""The marks of the beginning and the end of a text for other models; here they are letters."""

SIGN_OF_HTML = re.compile(r"&(?:amp|lt|gt|quot|apos|nbsp|#\d{1,6}|#x[0-9A-Fa-f]{1,5});")
"""A sign as HTML writes it, such as &amp; for &."""

HEADERS = re.compile(
    r"(?im)\A(?:From .*\n)?(?=(?:(?:[a-z-]+:|[ \t]).*\n)+\r?\n)(?=(?:.+\n)*?from:)(?=(?:.+\n)*?subject:)"
)
"""The headers of a mail or of a post in a newsgroup, which an empty line ends, at the beginning of a text."""

ENCODED_MAIL = re.compile(r"(?ims)\A(?:From |[a-z-]+: ).*?^content-transfer-encoding:\s*(?:base64|quoted-printable)")
"""A mail, or a mailbox, whose letters are not written as themselves."""

COPY = re.compile(
    r"(.+?)(?:\.~\d+)?~|#(.+)#|(.+)\.(?:bak|old|orig)|Copy of (.+)"
    r"|(.+?)(?: \(.*conflicted copy.*\)|\.sync-conflict-[\w-]+| - Copy(?: \(\d+\))?| copy(?: \d+)?)((?:\.\w+)*)"
)
"""The name of a copy, as editors, desktops and programs that synchronise make one; its groups are its original's."""

LOST = "U+FFFD in place of letters that another program lost"
COMMAND = "docs/data.md has the command"
WITH_PROMPTS = "jq -c '{text: (.prompt + .text)}' FILE > whole.jsonl"
"""The command that writes samples of sample.py with their prompts."""

T = TypeVar("T")
Files = dict[str, tuple[int, int]]
"""{path: (size, mtime_ns)}."""


class Source:
    """The documents of a data source.

    The constructor reads names, sizes, times and first lines of files, but downloads shakespeare. It raises DataError
    if there is nothing to read, and so may documents().
    """

    def __init__(self, config: DataConfig, setting: str = "data.path") -> None:
        """setting: the name of config.path in errors."""
        self.config = config
        self.setting, self.value = (setting, config.path) if config.path else ("data", config.source)
        self.place = str(user_path(setting, config.path).absolute()) if config.path else ""

        # Find the files, and name the text.
        self.files = Files()
        name = str(config.path)
        if config.source == "stdlib":
            name = f"stdlib of {platform.python_implementation()} {sys.version[:4]}"
            self.files = stdlib_files()
        elif config.source == "shakespeare":
            name = "tiny Shakespeare"
            self.files = find_files(str(download_shakespeare(config.cache_dir)))
        elif config.source == "tales":
            name = f"{config.tales.count:,} tales of seed {config.tales.seed}"
        elif config.path:
            self.files = find_files(config.path, FORMAT_OF_SOURCE.get(config.source, "text"), setting)
        else:
            # Do not look for a new revision on the hub: each start would need the network.
            name = f"dataset {config.name}, split {config.split}"
            local = user_path("data.name", str(config.name))
            if local.is_dir():
                self.files = find_files(str(local), setting="data.name")
        self.name = name

        # Hash all that may change its content. Shakespeare is the same in every folder.
        files = {} if config.source == "shakespeare" else self.files
        if config.path:
            files = in_real_folder(files)
        source = "text" if config.source == "files" else config.source  # the same, if all files are text
        asked = (source, config.text_field, config.name, config.subset, config.split)
        self.separator = unescaped(config.separator) if config.source in DIVISIBLE else None
        added: list[Any] = [name, LISTS, RULES] if config.source == "tales" else [self.separator]
        if config.source == "files" and {*self.formats.values()} != {"text"}:
            added.append(repr(in_real_folder(self.formats)))
        self.fingerprint = fingerprint(files, *asked, *filter(None, added))
        """A hash that changes if the text may have changed."""
        self.checked: dict[str, Damage | NotText | None] = {}
        self.special: list[str] = []
        """The names of the special tokens of a trained model, whose letters in the text are told."""
        self._begin_reading()

    def _begin_reading(self) -> None:
        self.count = 0
        """The number of documents of the latest reading; one without text does not count."""
        self.separators = 0
        """The number of separators that it found."""
        self.replaced = 0
        """The number of bytes that were not UTF-8."""
        self.left_out: set[str] = set()
        """The files that it left out."""
        self.notes: dict[str, tuple[int, list[str]]] = {}
        """Facts about it that its reader should know, {fact: (count, first places)}."""
        self.encodings: dict[str, list[str]] = {}
        """The encodings as which UTF-8 was read that fit all texts of a fact, {fact: iconv's names}."""
        self.other_fields: list[str] = []
        """The fields with text of the first record without text in `data.text_field` that has any."""

    @cached_property
    def found(self) -> dict[str, Format]:
        """The format of each file."""
        with naming(self.setting, self.value, self.place):
            return {file: format_of(file, *status) for file, status in self.files.items()}

    @cached_property
    def formats(self) -> dict[str, str]:
        """The format in which each file is read, one of FORMATS."""
        wanted = FORMAT_OF_SOURCE.get(self.config.source)
        if self.config.source == "hf" and not self.config.path:  # the datasets library reads them
            return {file: each.name for file, each in self.found.items()}
        if wanted == "jsonl":  # a JSON file may be an array of the same records
            return {file: "json" if each.name == "json" else wanted for file, each in self.found.items()}
        if wanted:
            return dict.fromkeys(self.files, wanted)
        # Records without the field are read as they are if a text lies beside them, or if only their content tells that
        # they are records. Otherwise reading them ends in an error that names the fields.
        field = self.config.text_field
        is_mixed = any(each.name == "text" for each in self.found.values())
        return {
            file: "text"
            if each.fields and not has_field(each.fields, field) and (is_mixed or not each.is_named)
            else each.name
            for file, each in self.found.items()
        }

    def describe(self) -> str:
        """Return the text in words: "stdlib of CPython 3.11: 532 files, 530 documents, 10.4 MB".

        Before it is read, neither its documents are known nor the files that will be left out.
        """
        parts = []
        read = {file: size for file, (size, _) in self.files.items() if file not in self.left_out}
        if read:
            formats = Counter(self.formats[file] if self.count else "text" for file in read)
            parts += [plural(count, FORMATS[format].noun) for format, count in formats.items()]
        if self.count:
            parts.append(plural(self.count, "document"))
        if read:
            is_packed = any(Path(file).suffix.lower() in PACKED for file in read)
            parts.append(f"{si(sum(read.values()), 3)}B{' on disk' * is_packed}")
        losses = []
        if self.left_out:
            losses.append(f"{plural(len(self.left_out), 'file')} left out")
        if self.replaced:
            losses.append(f"{plural(self.replaced, 'byte')} replaced by U+FFFD")
        text = f"{self.name}: {', '.join(parts)}" if parts else self.name
        return f"{text}; {', '.join(losses)}" if losses else text

    def documents(self) -> Iterator[Iterable[str]]:
        """Yield all documents that have text. Read each to its end before the next."""
        self._begin_reading()
        for document in self._documents():
            self.count += 1
            yield document

    def _documents(self) -> Iterator[Iterable[str]]:
        if self.config.source == "tales":
            yield from ([tale] for tale in tales(self.config.tales))
        elif self.config.source == "hf" and not self.config.path:
            yield from self._with_text(self._texts_of(_dataset_records(self.config)), self.name)
        else:
            with naming(self.setting, self.value, self.place):
                for folder in folders_of_glob(Path(self.place)):
                    fact = "Folders that the glob names, whose files are not read (/** after the glob reads them)"
                    self._note(fact, 1, str(folder))
                for file in self.files:
                    try:
                        yield from self._with_text(self._documents_of(file), file)
                    except DataError as error:
                        self._blame_source(file, error)
                        if self.setting == "data.val_path":
                            error.remedy = self._of_validation(error)
                        # A command writes a new file, and the old one would be refused again.
                        if len(self.files) > 1 and " > " in error.remedy:
                            error.remedy += "; then move the old file elsewhere"
                        raise

    def _blame_source(self, file: str, error: DataError) -> None:
        """Raise DataError if a file that cannot be read has another format than its source reads.

        An `error` that names the kind of the file, such as a pointer of Git LFS, says more.
        """
        name = self.found[file].name
        wanted = self.formats[file]
        asked = FORMAT_OF_SOURCE.get(self.config.source)  # as text all but Parquet can be read
        if name != wanted and (name == "parquet" or (name != "text" and asked not in (None, "text"))):
            fault = f"looks like a {FORMATS[name].noun}"
        elif asked == "parquet" and not is_named(file, "parquet") and not isinstance(error, NotText):
            fault = f"is no {FORMATS[asked].noun}"
        else:
            return
        fault += f", and data={self.config.source} reads another format"
        raise DataError(fault, "data=files reads each file in its own", value=file)

    def _of_validation(self, error: DataError) -> str:
        """Return the remedy for a text of data.val_path, whose format is its own whatever data= is."""
        remedy = re.sub(", or data=text|; data=text reads the list itself", "", error.remedy)
        if f"data.text_field={self.config.text_field}" in error.fault:
            remedy += "; data.path and data.val_path have the same field"
        return remedy

    def _documents_of(self, file: str) -> Iterator[Iterable[str]]:
        """Yield the documents of a file; none if it is left out, which the only file never is."""
        # Look at the file before it is read: leave out binary ones, and refuse one of other records.
        format = self.formats[file]
        if format != "text":
            self._refuse_without_field(file)
        if self.found[file].name != "parquet" or format != "parquet":
            try:
                damage = self._checked(file)
            except NotText as error:
                self.left_out.add(file)
                if len(self.left_out) == len(self.files):
                    raise
                self._note(CODED if error.noun.startswith(NOT_UTF_8) else LEFT_OUT, 1, f"{file} ({error.noun})")
                return
        self._note_format(file)
        name = COPY.fullmatch(Path(file).name)
        if name and str(Path(file).with_name("".join(filter(None, name.groups())))) in self.files:
            self._note("Files whose names tell copies of others, which the model learns too", 1, file)
        if PACKAGES & {*Path(file).parts} - {*Path(self.place).parts}:
            self._note("Files of installed packages, which the model learns too", 1, file)
        # Read it: a text by its separators, records by the field of the text.
        if format == "text":
            if self.config.source == "files":
                if len(self.files) == 1:
                    refuse_list(file, self.setting)
                elif folder_of_list(file, first_lines(file)) is not None:
                    self._note("Lists of files, which the model learns too", 1, file)
            if damage:
                self._note_replaced(damage.broken, f"{file} {damage.place}")
            has_text = False
            for document in self._divided(self._blocks(file)):
                has_text = True
                yield document
            if not has_text:
                self._note("Files without text", 1, file)
        else:
            yield from self._texts_of(records_of(file, format, self.config.text_field), format)

    def _refuse_without_field(self, file: str) -> None:
        """Raise DataError if a file of records lacks the field, and others have it, or may."""
        if not self._lacks_field(file):
            return
        refuse_excels_line(file, self.found[file].fields)
        if self.found[file].name == "csv":
            with opened_text(file, newline="") as lines:
                refuse_lines_before(lines, file, self.config.text_field)
        having = sorted(
            name for name, each in self.found.items() if each.name != "text" and not self._lacks_field(name)
        )
        if not having:
            return
        # Name the only one, or all by their ending, if no other file has that.
        endings = {Path(name).suffix for name in having}
        wanted = having[0] if len(having) == 1 else ""
        if Path(self.place).is_dir() and not wanted:
            is_apart = not endings & {Path(name).suffix for name in self.found.keys() - {*having}}
            wanted = str(Path(self.place, "**", f"*{endings.pop()}")) if len(endings) == 1 and is_apart else ""
        typed = shlex.quote(f"{self.setting}={wanted}")
        remedy = f"{typed} reads those that have it" if wanted else "leave it out, for others have it"
        raise DataError(f"has no field data.text_field={self.config.text_field}", remedy, value=file)

    def _lacks_field(self, file: str) -> bool:
        """Return whether a file is known to lack the field of the text.

        The fields of Parquet and of arrays are not known before they are read.
        """
        fields = self.found[file].fields
        return bool(fields) and not has_field(fields, self.config.text_field)

    def _checked(self, file: str) -> Damage | None:
        """Return check_text(file), which is asked once."""
        if file not in self.checked:
            try:
                self.checked[file] = check_text(file)
            except NotText as error:
                self.checked[file] = error
        result = self.checked[file]
        if isinstance(result, NotText):
            raise result
        return result

    def _note_format(self, file: str) -> None:
        """Note a file that could be read in another format."""
        if self.config.source not in ("files", "text"):
            return
        found = self.found[file]
        noun = FORMATS[found.name].noun
        if self.formats[file] != found.name:
            fields = f" with {listed(found.fields)}" if found.fields else ""
            if self.config.source == "text":
                remedy = "leave out data=text"
            elif {*self.formats.values()} == {"text"}:
                remedy = "data.text_field= names their text"
            else:  # another name would make the other files' records texts
                remedy = f"rename the field of their text to {self.config.text_field}, as of the other files"
            self._note(f"Files of records read as they are ({remedy})", 1, f"{file} (a {noun}{fields})")
        elif found.name != "text" and not found.is_named:
            is_own = self.setting == "data.val_path"  # whose format no data= changes
            fact = f"Files of records by their content alone{'' if is_own else ' (data=text reads all as text)'}"
            self._note(fact, 1, f"{file} (a {noun})")
        elif found.name == "text" and is_named(file, "json"):
            path = records_within(file, self.config.text_field) if len(self.files) == 1 else ""
            unpack = unpacking(file)
            command = f"jq -c {shlex.quote(path)}{' FILE' * (not unpack)} > LINES.jsonl" if path else "jq"
            command = f"{unpack} FILE | {command}" if unpack else command
            self._note(
                f"JSON files without a list of records, read as they are ({command} makes JSON lines of one)", 1, file
            )
        elif found.name == "text" and Path(file).suffix == ".js" and is_assigned(file):
            command = "sed '1s/^[^=]*=//; $s/; *$//' FILE > FILE.json"
            self._note(f"Files of JSON after an assignment, read as they are ({command} leaves it out)", 1, file)

    def _with_text(self, documents: Iterable[Iterable[str]], where: str) -> Iterator[Iterable[str]]:
        """Yield the documents that have text; note marks and names of tokens in them."""
        counts = Counter[str]()
        for document in documents:
            texts = iter(document)
            first = next(texts, None)
            if first is not None:  # it may be "", if line ends after a separator are longer than a piece
                marks = [*FOREIGN_MARK.findall(first), *(name for name in self.special if name in first)]
                counts.update(dict.fromkeys(marks, 1))
                yield chain([first], texts)
        for mark, number in counts.items():
            remedy = f"sed 's/{mark}//g' removes it"
            if not FOREIGN_MARK.fullmatch(mark):
                remedy = "docs/library.md writes the id of this special token in their place"
            elif re.match(r"(?i)<\|?e", mark):
                remedy = f"{shlex.quote(f'data.separator={mark}')} ends documents there"
            self._note(f"Documents with {mark}, whose letters the model learns ({remedy})", number, where)

    def _texts_of(self, records: Iterable[Record], format: str = "") -> Iterator[Iterable[str]]:
        """Yield the documents of records; one whose text is null has none.

        format: that of their file, "" for a dataset.
        """
        field = self.config.text_field
        for record in records:
            where = f"{record.source} {record.place}"
            if format == "csv" and repeats_names(record.fields):
                if len(record.fields) > 1:  # of one column it may be a word
                    self._note("Rows left out that repeat the names of the columns", 1, where)
                    continue
                self._note(f"Rows that repeat the name of the only column, {field}, which the model learns", 1, where)
            try:
                text = value_of(record.fields, field)
            except KeyError:
                raise without_text(record, field, format) from None
            is_null = text is None or text != text  # NaN, as pandas has it
            if not self.other_fields and (is_null or (isinstance(text, str) and not text.strip())):
                self._note_other_fields(record)
            if is_null:
                self._note(f"Records left out whose {field} is null", 1, where)
            elif isinstance(text, str):
                if not text.strip():
                    self._note(f"Records without text in {field}", 1, where)
                text, replaced = replace_surrogates(text)
                if replaced:
                    self._note_replaced(replaced, where)
                signs = {
                    f"\\r\\n at line ends in {field}, which the model learns": "\r\n" in text,
                    f"byte order marks in {field}, which the model learns": MARK in text,
                    f"NULs in {field}, which the model learns": "\0" in text,
                    f"{LOST} in {field}, which the model learns": "\ufffd" in text and not replaced,
                    f"\\n in two letters in {field}, which the model learns ({COMMAND})": has_escaped_ends(text),
                    f"headers of mail or news in {field}, which the model learns ({COMMAND})": HEADERS.match(text),
                    f"HTML's &amp; or its like in {field}, which the model learns ({COMMAND})": has_signs_of_html(text),
                    f"{PARTS} in {field}, which the model learns ({COMMAND})": has_letters_in_parts(text),
                    f"{UNSEEN}, in {field}, and which the model learns ({COMMAND})": has_unseen_signs(text),
                }
                for sign in filter(signs.get, signs):
                    self._note(f"Records with {sign}", 1, where)
                limit = limit_reached(text)
                if limit:
                    self._note(f"Records of {limit}, which may have cut them", 1, where)
                if is_continuation(record.fields, field):
                    self._note(f"Samples of prompts, which are left out ({WITH_PROMPTS} joins them)", 1, where)
                self._note_read_as(text, f"Records with {field}", where, ICONV.get(format, ""))
                yield from self._divided([text])
            else:
                raise without_text(record, field, format)

    def _blocks(self, file: str) -> Iterator[str]:
        """Yield the text of a file in blocks."""
        untold = dict(SIGNS)
        is_noted_as = False
        with opened_text(file) as stream:
            while block := stream.read(LONGEST):
                # They are read as they are, but rarely meant to be learned.
                for fact in [fact for fact, is_in in untold.items() if is_in(block)]:
                    del untold[fact]
                    unpack = unpacking(file)
                    self._note(f"Files {fact.replace('sed -i', f'{unpack} FILE | sed') if unpack else fact}", 1, file)
                if not is_noted_as:  # the last letter may go on in the next block
                    is_noted_as = self._note_read_as(block[: block.rfind(" ") + 1] or block, "Files", file)
                yield replace_surrogates(block)[0]

    def _note_read_as(self, text: str, noun: str, where: str, iconv: str = "iconv") -> bool:
        """Note a text in UTF-8 that was read in another encoding; return whether it was.

        iconv: the command that converts it, "" for none.
        """
        fitting = read_as(text)
        if not fitting:
            return False

        def fact_of(encoding: str) -> str:
            wrong = "é".encode().decode(MISREAD[encoding][0])
            fact = f"{noun} in UTF-8 that was read as {encoding}, such as {wrong} for é, which the model learns"
            if encoding.startswith("windows"):
                return f"{fact} ({COMMAND})"
            return fact + f" (to convert: {iconv} -f UTF-8 -t {encoding})" * bool(iconv)

        # Most texts fit several encodings. One that fits all of them converts the whole file.
        fact = fact_of(fitting[0])
        for told, others in [*self.encodings.items()]:
            common = [encoding for encoding in others if encoding in fitting]
            if common and told == fact_of(others[0]):
                fitting = common
                fact = fact_of(common[0])
                del self.encodings[told]
                self.notes[fact] = self.notes.pop(told)
                break
        self.encodings[fact] = fitting
        self._note(fact, 1, where)
        return True

    def _divided(self, blocks: Iterable[str]) -> Iterator[Iterable[str]]:
        """Yield the documents between the separators of a text, and count the separators."""

        def count() -> None:
            self.separators += 1

        return divided(blocks, self.separator, count)

    def _note_replaced(self, count: int, where: str) -> None:
        self.replaced += count
        self._note("Bytes that are not UTF-8 and became U+FFFD", count, where)

    def _note(self, fact: str, count: int, where: str) -> None:
        before, places = self.notes.get(fact, (0, []))
        self.notes[fact] = before + count, [*places, where][:10]

    def _note_other_fields(self, record: Record) -> None:
        for name in text_fields(record.fields):
            with suppress(KeyError):  # {"a.b": {"c": …}}, whose text no data.text_field= names
                if value_of(record.fields, name).strip():
                    self.other_fields.append(name)

    def note_lines(self, is_learned: bool = True) -> list[str]:
        """Return the notes of the latest reading as sentences.

        is_learned: whether the text is trained on; otherwise it is scored.
        """
        lines = [f"{fact}: {count:,}, first in {', '.join(places)}." for fact, (count, places) in self.notes.items()]
        return lines if is_learned else [line.replace("the model learns", "are scored", 1) for line in lines]

    def step_to_text(self, otherwise: str) -> str:
        """Return the remedy for a source without a text: another field, or `otherwise`.

        Another field is one of its records that has text.
        """
        if not self.other_fields:
            return otherwise
        choice = " or ".join(shlex.quote(f"data.text_field={name}") for name in self.other_fields[:3])
        return f"its records have text in another field: type {choice}"

    def refuse_idle_field(self) -> None:
        """Raise DataError if a field was asked for, and there are files without records alone."""
        field = self.config.text_field
        if field == DataConfig.text_field or self.config.source != "files" or {*self.formats.values()} != {"text"}:
            return
        # Files of records without the field are read as text beside others. That is not what was asked for.
        for file in self.formats:
            if self.found[file].fields:
                problem = f"{file} has no field data.text_field={field}"
                raise DataError(problem, f"choose one of {listed(self.found[file].fields)}")
        problem = f"data.text_field={field} names a field of records, and there are none ({self.describe()})"
        raise DataError(problem, "leave it out, or give JSON lines or a table whose name ends in .jsonl or .csv")

    def refuse_idle_separator(self) -> None:
        """Raise DataError if a separator was asked for that the text, now read, has nowhere."""
        typed = self.config.separator
        if self.separators or self.separator is None or typed in (None, DataConfig.separator):
            return
        # Try other readings of it: with other line ends, letter by letter, or without quotes.
        problem = f"data.separator={escaped(self.separator)} occurs nowhere in the text ({self.describe()})"
        unix = self.separator.replace("\r\n", "\n")
        for other in (unix, unix.replace("\n", "\r\n"), typed, unix.strip(), unix.strip("'\"")):
            if other and other != self.separator:
                source = Source(replace(self.config, separator=escaped(other)), self.setting)
                for document in source.documents():
                    for _ in document:
                        pass
                if source.separators:
                    remedy = (
                        f"{shlex.quote(f'data.separator={escaped(other)}')} occurs {plural(source.separators, 'time')}"
                    )
                    raise DataError(problem, remedy)
        raise DataError(problem, "correct it; with data.separator=null each file or record is a document")


def divided(
    blocks: Iterable[str],
    separator: str | None,
    on_separator: Callable[[], None] = lambda: None,
) -> Iterator[Iterable[str]]:
    """Yield the documents between the separators of a text, each as pieces.

    The text comes in blocks of any size. Read each document to its end before the next. Line ends right after a
    separator belong to it, and white space alone is no document. If `separator` is None the text is one document.
    on_separator: called at each separator.
    """
    if separator is None:
        yield pieces(blocks)
        return
    parts = _parts(blocks, separator, on_separator)
    is_first = True
    for part in parts:
        # The parts up to the next separator, which is None.
        document = pieces(chain([part or ""], iter(parts.__next__, None)))
        begun = list(islice(document, 2))
        if begun and not is_first:
            begun[0] = begun[0].lstrip("\r\n")
        if len(begun) > 1 or "".join(begun).strip():
            yield chain(begun, document)
        is_first = False


def _parts(blocks: Iterable[str], separator: str, on_separator: Callable[[], None]) -> Iterator[str | None]:
    """Yield a text in parts, and None for each separator.

    Every separator has a part before and after it, which may be "".
    """
    # The last characters of a block may begin a separator that ends in the next block.
    straddling = len(separator) - 1
    pending = ""
    for block in blocks:
        *ended, pending = (pending + block).split(separator)
        for part in ended:
            yield part
            on_separator()
            yield None
        certain = max(0, len(pending) - straddling)
        yield pending[:certain]
        pending = pending[certain:]
    yield pending


def refuse_list(file: str, setting: str) -> None:
    """Raise DataError if each line of a text names a file."""
    lines = first_lines(file)
    folder = folder_of_list(file, lines)
    if folder is None:
        return
    new = unused_folder()
    tar = ["tar", "cf", "-", *(["-C", folder] if folder else []), "-T"]
    packed = shlex.join([*tar, file])
    if any(line.endswith("\r") for line in lines):
        packed = f"tr -d '\\r' < {shlex.quote(file)} | {shlex.join([*tar, '-'])}"
    remedy = f"mkdir {new} && {packed} | tar xf - -C {new} makes a folder of them: then set {setting}={new}"
    raise DataError("is a list of files", f"{remedy}; data=text reads the list itself", value=file)


def folder_of_list(file: str, lines: list[str]) -> str | None:
    """Return the folder of the files that the lines of a text name, None if one names none.

    They are seen from here, which is "", or from the folder of the text.
    """
    names = [line.removesuffix("\r") for line in lines]
    folders = ("", str(Path(file).parent))
    return next((folder for folder in folders if names and are_files(folder, names)), None)


def first_lines(file: str) -> list[str]:
    """Return the first hundred lines of a text; one that is longer than any name in parts."""
    with opened_text(file) as stream:
        return [line.rstrip("\n") for line in islice(iter(partial(stream.readline, LONGEST_NAME), ""), 100)]


def are_files(folder: str, names: Iterable[str]) -> bool:
    """Return whether all names are those of files in a folder, and none is like an option."""
    with suppress(OSError, ValueError):  # a line may be longer than a name may be
        return all(Path(folder, name).is_file() and not name.startswith("-") for name in names)
    return False


def unused_folder() -> str:
    """Return a name for a folder of texts that is not there yet: texts, texts2, texts3, ..."""
    return next(name for name in chain(["texts"], map("texts{}".format, count(2))) if not Path(name).exists())


def is_continuation(fields: dict[str, Any], field: str) -> bool:
    """Return whether a record is a result of sample.py, whose text goes on after a prompt."""
    return field == "text" and "made_by" in fields and bool(fields.get("prompt"))


def limit_reached(text: str) -> str:
    """Return the limit of a program, in words, that a text reaches; "" if it reaches none."""
    size = len(text)
    if size <= 32_767 <= 2 * size and len(text.encode("utf-16-le")) == 2 * 32_767:
        return "32,767 characters, the most in a cell of Excel"
    if size <= 65_535 <= 4 * size and 65_533 <= len(text.encode()) <= 65_535:  # no letter is cut
        return "65,535 bytes, the most in a column TEXT of MySQL"
    return ""


def has_signs_of_html(text: str) -> bool:
    """Return whether a text has HTML's &amp; or its like, and is neither HTML nor code of it."""
    return "<" not in text and SIGN_OF_HTML.search(text) is not None


def has_escaped_ends(text: str) -> bool:
    r"""Return whether a text has \n in two letters for its line ends; of TeX's \nu it is a part."""
    return "\n" not in text and re.search(r"\\n(?![a-z])", text) is not None


SIGNS: dict[str, Callable[[str], object]] = {
    r"with \r\n at line ends, which the model learns (to convert: sed -i 's/\r$//')": lambda text: "\r\n" in text,
    # Beside \n it is a sign of another kind, such as the progress bars in a log.
    r"with \r at line ends, which the model learns (to convert: sed -i 's/\r/\n/g')": lambda text: (
        "\r" in text and "\n" not in text
    ),
    # cat leaves that of a later file.
    r"with byte order marks within the text, which the model learns (to remove: sed -i 's/\xEF\xBB\xBF//g')": (
        lambda text: MARK in text
    ),
    f"with {LOST}, which the model learns": lambda text: "\ufffd" in text,
    f"with HTML's &amp; or its like, which the model learns ({COMMAND})": has_signs_of_html,
    f"with {PARTS}, which the model learns ({COMMAND})": has_letters_in_parts,
    f"with {UNSEEN}, and which the model learns ({COMMAND})": has_unseen_signs,
    f"of mail or news with headers, which the model learns ({COMMAND})": HEADERS.match,
    f"of mail in base64 or quoted-printable, which the model learns ({COMMAND})": ENCODED_MAIL.match,
}
"""{the words of a note on a file: whether a block of its text gives reason}."""


def _dataset_records(config: DataConfig) -> Iterator[Record]:
    """Yield the records of a dataset."""
    # Imported here because it is optional, and slow.
    try:
        import datasets  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except Exception as error:  # an import may fail by any
        install = 'pip install -e ".[hf]"'
        raise DataError(*library_fault("data=hf needs the datasets library", "datasets", install, error)) from error
    # Stream the records: a dataset may be larger than the disk.
    settings = f"data.name={config.name}, data.subset={format_value(config.subset)}, data.split={config.split}"
    place = user_path("data.name", str(config.name))
    try:
        if (place / "state.json").is_file():  # by save_to_disk(); load_dataset() reads a folder of such folders alone
            records = datasets.load_from_disk(str(place))
        else:
            records = datasets.load_dataset(str(place), name=config.subset, split=config.split, streaming=True)
        for number, record in enumerate(records, start=1):
            yield Record(f"{settings}:", f"record {number}", record)
    except Exception as error:  # the library raises errors of all layers below it
        remedy = "check its files" if place.is_dir() else "check it and the network"
        if "Bad split" in str(error):
            remedy = "name one of these, without a slice"
        raise DataError(f"{settings} cannot be read ({first_line(error)})", remedy) from error


def find_files(path: str, format: str = "text", setting: str = "data.path") -> Files:
    """Return the regular files that a setting names: a file, a folder's or a glob's.

    Leaves out a folder's hidden files, the runs and sweeps within it, and OF_DATASETS and OF_PARQUET beside others.
    format: one of FORMATS; if it is not text, of a folder the files whose endings name it, or if there are none, those
    whose content is of it. Raises SettingsError if there are no files.
    """

    def fail(error: OSError) -> None:  # os.walk() would pass over a closed folder
        raise OSError(error.errno, f"{error.strerror}: {error.filename}")

    root = without_dots(user_path(setting, path))
    found = [root]
    with reading(setting, path):
        if root.is_dir():
            walked: list[Path] = []
            for folder, inner, names in os.walk(root, onerror=fail):
                if is_of_runs(folder) and Path(folder) != root:
                    inner.clear()
                else:
                    walked += [Path(folder, name) for name in names]
            found = [file for file in walked if not any(part[0] == "." for part in file.relative_to(root).parts)]
        elif not root.exists():
            found = matches(root)
        if any(file.suffix == ".arrow" for file in found):
            found = [file for file in found if file.name not in OF_DATASETS]
        if any(file.suffix == ".parquet" for file in found):
            found = [file for file in found if file.name not in OF_PARQUET]
        files = sizes_of(found)
        if root.is_dir() and format != "text":
            named = {file: status for file, status in files.items() if is_named(file, format)}
            files = named or {file: each for file, each in files.items() if format_of(file, *each).name == format}
    if not files:
        noun = "regular file" if format == "text" else FORMATS[format].noun
        problem = f"{setting}={path} names no {noun} (seen from {Path.cwd()})"
        remedy = "give a file, a folder or a quoted glob that holds text"
        if found and format != "text":
            remedy = "data=files reads each file in its format"
        several = [part.strip(" '\"") for part in path.strip("[]").split(",")]
        folders = folders_of_glob(root)
        if folders:
            ending = "" if format == "text" else f"/*{FORMATS[format].endings[0]}"
            typed = shlex.quote(f"{setting}={path.rstrip('/')}/**{ending}")
            remedy = f"it names {plural(len(folders), 'folder')}, and {typed} the files in them"
        elif re.match("[a-z0-9+]+://|hf:", path):
            remedy = remedy_for_address(path)
        elif NAME_ON_HUB.fullmatch(path) and not user_path(setting, path).parent.exists():
            remedy += f", or {remedy_for_address(f'hf:{path}')}"
        elif len(several) > 1 and all(part and user_path(setting, part).exists() for part in several):
            folder = unused_folder()
            names = [Path(part).name for part in several]
            copied = f"mkdir {folder} && cp -r {shlex.join(several)} {folder}/"
            if len({*names}) < len(names):  # such as train.txt of two folders
                numbered = [f"{folder}/{number}" for number, _ in enumerate(several, start=1)]
                copies = [shlex.join(("cp", "-r", *pair)) for pair in zip(several, numbered, strict=True)]
                copied = f"mkdir -p {' '.join(numbered)} && {' && '.join(copies)}"
            remedy = f"{copied} makes a folder of them: then set {setting}={folder}"
        raise DataError(problem, remedy)
    return files


def remedy_for_address(address: str) -> str:
    """Return how a text on another machine is had.

    The page about a file, a repository or a data set is not its text.
    """
    dataset = DATASET.fullmatch(address)
    repository = REPOSITORY.fullmatch(address)
    if dataset:
        name = dataset[1]
        return f"train.py data=hf data.name={name} trains on that data set; docs/data.md writes one as JSON lines"
    if repository:
        return f"git clone {repository[1]} downloads it; then give its folder"
    if address.startswith("http"):
        file = address.replace("/blob/", "/resolve/" if "//huggingface.co/" in address else "/raw/", 1)
        return f"curl -LO {shlex.quote(file)} downloads it; then give the file"
    return "download it first, then give the file"


def splits_apart(files: Iterable[str]) -> list[str]:
    """Return for each kind of files the settings that keep the splits of a data set apart.

    The names of its files tell splits. They are files or folders whose names differ by a SPLIT_WORD, and perhaps by
    numbers: wiki.train.tokens and wiki.valid.tokens, train/ and test/. train.en and train.de are of two kinds.
    """
    paths = [Path(file) for file in files]
    root = Path(os.path.commonpath([path.parent for path in paths])) if paths else Path()
    # {the name without its word and numbers: {the word: its files or folders}}.
    named: dict[Path, dict[str, set[Path]]] = {}
    for path in paths:
        for place in (*reversed(path.relative_to(root).parents), path.relative_to(root)):
            words = SPLIT_WORD.findall(place.name)
            if words:
                same = place.with_name(re.sub(r"\d+", "0", SPLIT_WORD.sub("split", place.name)))
                named.setdefault(same, {}).setdefault(words[-1].lower(), set()).add(root / place)
                break
    found = []
    for by_word in named.values():
        learned = next((word for word in by_word if word.startswith("train")), None)
        held_out = sorted(by_word.keys() - {learned}, key=lambda word: (not word.startswith(("val", "dev")), word))
        if learned and held_out:
            typed = zip(("data.path", "data.val_path"), (learned, held_out[0]), strict=True)
            found.append(" ".join(shlex.quote(f"{setting}={one_path(by_word[word])}") for setting, word in typed))
    return found


def one_path(places: Collection[Path]) -> str:
    """Return a path, or for several that differ by numbers their glob."""
    first = min(places)
    return str(first if len(places) == 1 else first.with_name(re.sub(r"\d+", "*", first.name)))


def matches(pattern: Path) -> list[Path]:
    """Return the paths that match a glob.

    If none does, its folders that exist are taken as they are, such as `notes [2024]/*.txt`.
    """
    found = [*expanded(pattern)]
    if not found:
        folder = next(parent for parent in pattern.parents if parent.is_dir())
        found = [*expanded(Path(glob.escape(str(folder)), pattern.relative_to(folder)))]
    return [*map(Path, found)]


def folders_of_glob(pattern: Path) -> list[Path]:
    """Return the folders that match a glob without **, which names no file in them."""
    if pattern.exists() or "**" in pattern.parts:
        return []
    return sorted(path for path in matches(pattern) if path.is_dir())


def expanded(pattern: Path) -> Iterator[str]:
    """Yield the paths that match a glob.

    glob.glob() would follow a link to a folder above 40 times.
    """
    parts = pattern.parts
    if "**" not in parts:
        yield from glob.glob(str(pattern))  # noqa: PTH207 (Path.glob wants a relative one)
        return
    place = parts.index("**")
    rest = parts[place + 1 :] or ("*",)
    for root in glob.glob(str(Path(*parts[:place]))):  # noqa: PTH207
        for folder in folders_below(root):
            yield from expanded(Path(glob.escape(folder), *rest))


def folders_below(root: str, above: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield a folder and those below it, also by links, but none again within itself.

    Passes over hidden ones, those that may not be read, and runs. above: the folders that it is within.
    """
    real = os.path.realpath(root)
    if real in above or (above and is_of_runs(root)):
        return
    inner: list[str] = []
    with suppress(OSError), os.scandir(root) as entries:
        inner = [entry.path for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    yield root
    for folder in inner:
        yield from folders_below(folder, (*above, real))


def is_of_runs(folder: str) -> bool:
    """Return whether a folder is that of a run or of a sweep, whose files change with each run."""
    return any(all(Path(folder, name).is_file() for name in names) for names in OF_RUNS)


def stdlib_files() -> Files:
    """Return the modules of the standard library, without tests, tables and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [root / f"{name}.py" for name in sys.stdlib_module_names]
    files += [file for name in sys.stdlib_module_names for file in (root / name).rglob("*.py")]
    return sizes_of(file for file in files if not SKIPPED & {*file.relative_to(root).parts})


def sizes_of(files: Iterable[Path]) -> Files:
    """Return the regular files among `files`, sorted by name."""
    status = {str(file.absolute()): file.stat() for file in files if file.is_file()}
    return {name: (status[name].st_size, status[name].st_mtime_ns) for name in sorted(status)}


def in_real_folder(files: dict[str, T]) -> dict[str, T]:
    """Return files by their paths in the real place of the folder that holds all of them.

    A text is the same by each link to that folder, as in a home folder that is a link.
    """
    if not files:
        return files
    folder = os.path.commonpath([*map(os.path.dirname, files)])
    real = os.path.realpath(folder)
    if real == folder:
        return files
    return {str(Path(real, os.path.relpath(file, folder))): each for file, each in files.items()}


def fingerprint(files: Files, *settings: str | None) -> str:
    """Return a hash of settings and of files' paths, sizes and mtimes, without reading them."""
    return hashlib.sha256(repr((settings, files)).encode()).hexdigest()[:16]


def download_shakespeare(cache_dir: str) -> Path:
    """Return the cached file; download it first if it is missing.

    Raises DataError if that fails, and for a file with another content: a person may have put it there.
    """
    path = user_path("data.cache_dir", cache_dir) / "tinyshakespeare.txt"
    if path.is_file():
        with reading("data.cache_dir", cache_dir):
            content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != SHAKESPEARE_SHA256:
            problem = f"data=shakespeare: {path} has another sha256 than {SHAKESPEARE_URL}"
            raise DataError(problem, f"remove it, or learn it as a text of your own by data.path={path}")
        return path
    # Verify the content before it takes its name: the cache has the whole file or none.
    try:
        with urlopen(SHAKESPEARE_URL, timeout=20) as response:  # fails after 20 s without an answer
            content = response.read()
        if hashlib.sha256(content).hexdigest() != SHAKESPEARE_SHA256:
            raise ValueError("the downloaded file has another sha256 than the known one")
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, shared=True) as unfinished:
            unfinished.write_bytes(content)
    except Exception as error:  # of the network or the disk
        problem = f"data=shakespeare could not be downloaded from {SHAKESPEARE_URL} ({error})"
        raise DataError(problem, f"put a copy at {path}, or give data.path=FILE for one that you have") from error
    return path
