"""The rules of data/encoding.py: a text in UTF-8 is read, any other named for what it is, with a step that works."""

import codecs
import gzip
import io
import pickle
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from conftest import some
from hypothesis import given
from hypothesis import strategies as st

from common.errors import DataError
from data.config import DataConfig
from data.encoding import NotText, check_text, decode_text, iconv_name, is_halved
from data.texts import CODED, LEFT_OUT, Source
from data.tokenizer import LONGEST

# A sentence of each language, written for these tests, and encodings in which such texts were stored.
SENTENCES = {
    "Le maître était très fâché : l'élève avait déjà mangé le gâteau, à côté du chat. ": "cp1252 latin-1 mac-roman",
    "Der große Bär wäscht schön früh seine Füße, während über den Bäumen die Vögel kreisen. ": "cp1252 latin-1",
    "El niño comió jamón después de soñar con la montaña; ¿qué pasó según él? ": "cp1252 latin-1",
    "Dziś rano żółty pies pobiegł za ćmą, a źrebię śniło o łące pełnej gąsek. ": "cp1250 iso8859-2",
    "Včera večer šel dědeček přes řeku, když uviděl čtyři žluté květy a šťastné děti. ": "cp1250 iso8859-2",
    "Старая лошадь медленно шла по дороге, и дети бежали за ней до самой реки. ": "cp1251 koi8-r cp866 iso8859-5",
    "Η γριά γάτα κοιμόταν δίπλα στο παράθυρο, ενώ έξω έβρεχε όλη τη νύχτα. ": "iso8859-7",
    "Küçük kız, bahçede ağaçların altında üç gün boyunca güneşi bekledi; şöyle dedi. ": "cp1254",
    "הכלב הזקן ישן ליד הדלת כל הלילה, והילדים שיחקו בגן עד הבוקר. ": "cp1255",
    "نام الكلب العجوز قرب الباب طوال الليل، ولعب الأطفال في الحديقة حتى الصباح. ": "cp1256",
    "老狗整夜睡在门边，孩子们在花园里一直玩到天亮，没有人叫他们回家。": "gb18030 gbk",
    "老狗整夜睡在門邊，孩子們在花園裡一直玩到天亮，沒有人叫他們回家。": "big5",
    "年老いた犬は一晩中ドアのそばで眠り、子供たちは朝まで庭で遊んでいました。": "cp932 euc-jp iso2022-jp",
    "늙은 개는 밤새 문 옆에서 잠을 잤고 아이들은 아침까지 마당에서 놀았습니다. ": "cp949",
    "หมาแก่นอนอยู่ข้างประตูทั้งคืน และเด็กๆ เล่นอยู่ในสวนจนถึงเช้า ": "cp874",
    "A dog slept beside the door all night, and nobody called it home. ": "utf-16 utf-16-le utf-16-be utf-32",
}
CASES = [(text, encoding) for text, encodings in SENTENCES.items() for encoding in encodings.split()]


def refused(path: Path) -> DataError:
    """The error of reading the text of a path."""
    with pytest.raises(DataError) as caught:
        for document in Source(DataConfig(path=str(path))).documents():
            "".join(document)
    assert "\n" not in str(caught.value)
    return caught.value


def command_of(error: DataError) -> str:
    """The shell's line in a remedy."""
    return re.sub(r",? (converts it|leaves it out|makes text of it|then give what is in it)$", "", error.remedy)


def run(command: str, folder: Path) -> None:
    subprocess.run(["bash", "-c", command], cwd=folder, check=True, capture_output=True)


@pytest.mark.skipif(not shutil.which("iconv"), reason="runs the command of the remedy")
@pytest.mark.parametrize(
    ("text", "encoding"), CASES, ids=lambda value: value if value in " ".join(SENTENCES.values()) else ""
)
@pytest.mark.parametrize("name", some(["it's.txt", "packed.txt.gz"], 2))
def test_a_text_in_another_encoding_is_refused_with_the_command_that_converts_it(tmp_path, text, encoding, name):
    whole = (text.strip() + "\n") * 20
    content = whole.encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    error = refused(tmp_path / name)
    assert "is not text in UTF-8, but in " in error.problem
    shown = re.search("“(.*)”", error.problem)[1]
    assert shown in " ".join(whole.split()), "words of the text itself"
    run(command_of(error), tmp_path)
    (made,) = tmp_path.glob("*.utf8.txt")
    assert made.read_bytes().decode("utf-8").removeprefix("\ufeff") == whole


@pytest.mark.skipif(not shutil.which("iconv"), reason="asks iconv for its names")
def test_iconv_knows_the_names_of_the_encodings_that_are_named():
    known = set(subprocess.run(["iconv", "-l"], capture_output=True, text=True).stdout.replace("/", " ").split())
    names = [encoding for _, encoding in CASES] + [
        "mac-cyrillic",
        "mac-latin2",
        "koi8-u",
        "cp437",
        "cp852",
        "euc_kr",
        "cp1258",
    ]
    names += ["utf-16-be", "utf-32-le", "iso8859-15", "shift_jis_2004", "euc_jis_2004", "iso2022_kr"]
    names += ["iso2022_jp_2004", "iso2022_jp_ext", "kz1048", "ptcp154", "johab", "hp-roman8", "koi8-t"]
    assert {iconv_name(codecs.lookup(name).name) for name in names} <= known


def test_no_encoding_is_named_that_iconv_lacks(tmp_path):
    """These German words in Mac Roman were named as CP720, which glibc's iconv does not know."""
    (tmp_path / "a.txt").write_bytes("Die Straße führt über den Fluß.\n".encode("mac-roman"))
    assert "in MACINTOSH: “Die Straße führt über den" in str(refused(tmp_path / "a.txt"))


def test_in_a_folder_such_a_text_is_left_out_by_name_and_the_last_one_is_refused(tmp_path):
    russian = next(text for text, encodings in SENTENCES.items() if "koi8-r" in encodings) * 9
    (tmp_path / "a.txt").write_bytes(russian.encode("koi8-r"))
    (tmp_path / "b.txt").write_text("plain")
    source = Source(DataConfig(path=str(tmp_path)))
    assert ["".join(document) for document in source.documents()] == ["plain"]
    (note,) = source.note_lines()
    assert note.startswith(f"{CODED}: 1, first in {tmp_path}/a.txt (not text in UTF-8, but")
    assert "KOI8-R" in note and source.describe().endswith("1 document, 5 B; 1 file left out")
    (tmp_path / "b.txt").write_bytes(b"\0\1")
    refused(tmp_path)


def test_images_do_not_hide_the_names_of_the_texts_that_are_left_out(tmp_path):
    """A note named the first ten of both, so images whose names come first were all that a person saw."""
    for number in range(12):
        (tmp_path / f"a{number}.png").write_bytes(b"\x89PNG\r\n\x1a\n\0" + bytes([number]))
    (tmp_path / "note.md").write_bytes("Über die Brücke geht ein Mann.".encode("utf-16"))
    (tmp_path / "plain.md").write_text("plain")
    source = Source(DataConfig(path=str(tmp_path)))
    assert [*source.documents()] and len(source.left_out) == 13
    images, texts = source.note_lines()
    assert images.startswith(f"{LEFT_OUT}: 12, first in ") and images.count("(an image)") == 10
    assert texts.startswith(f"{CODED}: 1, first in {tmp_path}/note.md (not text in UTF-8, but in UTF-16: “Über die")


def in_halves(text: str) -> bytes:
    """CESU-8: the UTF-8 of each 16 bits of UTF-16."""
    units = text.encode("utf-16-be")
    codes = [int.from_bytes(units[place : place + 2], "big") for place in range(0, len(units), 2)]
    return "".join(map(chr, codes)).encode("utf-8", "surrogatepass")


@pytest.mark.parametrize("name", ["it's.txt", "packed.txt.gz"])
@pytest.mark.parametrize("text", ["plain 😀👍 words\n" * 9, "élèves déjà " * 99 + "🙂", "\ufeff𝄞"])
def test_emoji_in_two_halves_are_refused_with_the_command_that_joins_them(tmp_path, name, text):
    content = in_halves(text)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    error = refused(tmp_path / name)
    assert "not text in UTF-8, but in CESU-8, where an emoji is two halves" in error.problem
    run(command_of(error), tmp_path)
    (made,) = tmp_path.glob("*.utf8.txt")
    assert made.read_bytes() == text.encode()


def test_a_half_alone_is_a_damage_as_before_and_halves_join_across_blocks(monkeypatch):
    first, second = in_halves("😀")[:3], in_halves("😀")[3:]
    for content in (
        first,
        second,
        second + first,
        first + b"x" + second,
        first + second + first,
        b"\xff" + first + second,
    ):
        assert not is_halved(lambda content=content: io.BytesIO(content))
    for size in range(1, 20):
        monkeypatch.setattr("data.encoding.LONGEST", size)
        assert is_halved(lambda: io.BytesIO(in_halves("é a😀b👍 x𝄞")))


# Damage


@pytest.mark.slow
@given(
    text=st.text(st.sampled_from("ab é日🙂\n"), min_size=1, max_size=400),
    broken=st.sampled_from([b"\xff", b"\xc3", b"\xe6\x97", b"\x80"]),
    place=st.integers(0, 10**6),
)
def test_a_broken_letter_is_named_by_line_and_byte_and_no_encoding_is_advised(text, broken, place):
    place %= len(text) + 1
    before, after = text[:place].encode(), (" " + text[place:]).encode()
    content = before + broken + after
    damage = check_text("a.txt", lambda: io.BytesIO(content))
    assert damage == (len(broken), f"line {before.count(10) + 1}, byte offset {len(before):,}")
    read, again = decode_text("a.txt", content)
    assert read == content.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape").translate(
        dict.fromkeys(range(0xDC80, 0xDD00), "\ufffd")
    )
    assert again == damage


def test_damage_is_found_across_the_blocks_in_which_a_file_is_read():
    for before in (LONGEST - 1, LONGEST, 3 * LONGEST - 2):
        content = b"a" * (before - 1) + b"\n" + "é".encode() + b"\xff" + "日".encode()[:2]
        damage = check_text("a.txt", lambda content=content: io.BytesIO(content))
        assert damage == (3, f"line 2, byte offset {before + 2:,}")
    assert check_text("a.txt", lambda: io.BytesIO("é".encode() * LONGEST)) is None


def test_a_file_cut_within_its_last_letter_is_read_and_nothing_is_advised(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes("日本語の文章\n".encode() * 100 + "日".encode()[:2])
    source = Source(DataConfig(path=str(file)))
    assert "".join("".join(document) for document in source.documents()) == "日本語の文章\n" * 100 + "\ufffd" * 2
    assert source.note_lines() == [
        f"Bytes that are not UTF-8 and became U+FFFD: 2, first in {file} line 101, byte offset {100 * 19:,}."
    ]
    assert source.describe() == f"{file}: 1 file, 1 document, 1.902 kB; 2 bytes replaced by U+FFFD".replace(
        "1.902", "1.9"
    )


def test_bytes_in_no_encoding_are_refused_without_advice_of_one(tmp_path):
    file = tmp_path / "noise.txt"
    file.write_bytes(bytes(1 + (n * n * 7919 + n * 31) % 255 for n in range(20_000)))
    assert "nor in an encoding that is known here: give a file of text" in str(refused(file))


# Not text


def zipped(**files: str) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, content in files.items():
            archive.writestr(name.replace("__", "/").replace("_dot_", "."), content)
    return packed.getvalue()


def tarred() -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        info = tarfile.TarInfo("a.txt")
        info.size = 5
        archive.addfile(info, io.BytesIO(b"words"))
    return packed.getvalue()


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d" * 32 + b"\nsize 123456789\n"
KINDS = {
    "letter.docx": (zipped(_dot_x="", word__document_dot_xml="<w/>"), "a document of an office program", "save it as"),
    "late.docx": (
        zipped(**{"[Content_Types]_dot_xml": "", "a_dot_jpeg": 9_000 * "\x7f", "word__document_dot_xml": "<w/>"}),
        "a document of an office program",
        "save it as",
    ),
    "table.xlsx": (zipped(a="", xl__workbook_dot_xml="<w/>"), "a document of an office program", "save it as"),
    "old.doc": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600), "a document of an office program", "save it as"),
    "notes.rtf": (rb"{\rtf1\ansi some words}", "Rich Text", "save it as"),
    "paper.pdf": (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n", "a PDF", "pdftotext "),
    "plain.pdf": (b"%PDF-1.4\nonly ASCII\n", "a PDF", "pdftotext "),
    # With the option by which data.md leaves the lines as the book has them.
    "book.epub": (zipped(mimetype="application/epub+zip"), "an e-book", "pandoc -t plain --wrap=none -o "),
    "texts.zip": (zipped(a="words"), "a zip archive", "unzip "),
    "texts.tar": (tarred(), "a tar archive", "tar xf "),
    "texts.tar.gz": (gzip.compress(tarred()), "a tar archive", "tar xf "),
    "texts.7z": (b"7z\xbc\xaf\x27\x1c\0\4" + bytes(60), "a 7z archive", "7z x "),
    "photo.png": (b"\x89PNG\r\n\x1a\n" + bytes(60), "an image", "give a file of text"),
    "pixel.png": (
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\1\0\0\0\1\x08\2\0\0\0\x90wS\xde",
        "an image",
        "give a file of text",
    ),
    "pixel.gif": (b"GIF89a\1\0\1\0\x80\0\0\xff\xff\xff\0\0\0;", "an image", "give a file of text"),
    "array.npy": (b"\x93NUMPY\1\0v\0{'descr': '<f4'}" + b" " * 30 + b"\n" + bytes(12), "not text but binary", "give a"),
    "module.pyc": (b"\xcb\r\r\n" + bytes(12) + b"\xe3" + bytes(50), "not text but binary", "give a file of text"),
    "shard.txt": (LFS, "a pointer of Git LFS in place of the file", "lfs pull fetches"),
    "shard.jsonl": (LFS, "a pointer of Git LFS in place of the file", "lfs pull fetches"),
    "shard.json": (LFS, "a pointer of Git LFS in place of the file", "lfs pull fetches"),
    "shard.parquet": (LFS, "a pointer of Git LFS in place of the file", "lfs pull fetches"),
    "my shard.csv": (
        b"/annex/objects/SHA256E-s12--4d.csv\n",
        "a pointer of git-annex in place of the file",
        "annex get ",
    ),
    "table.arrow": (b"ARROW1\0\0\xff\xff\xff\xff" + bytes(60), "an Arrow file", "data=hf data.name="),
    "stream.arrow": (b"\xff\xff\xff\xff\xa0\1\0\0" + bytes(60), "an Arrow file", "data=hf data.name="),
    "song.ogg": (b"OggS\0\2" + bytes(60), "a sound", "give a file of text"),
    "weights.pt": (b"\x80\4\x95" + bytes(600), "not text but binary", "give a file of text"),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("renamed", [False, True])
def test_a_file_that_is_no_text_is_called_by_its_kind_whatever_its_name(tmp_path, name, renamed):
    content, noun, step = KINDS[name]
    file = tmp_path / ("notes.txt" if renamed else name)
    file.write_bytes(content)
    error = refused(file)
    assert error.problem == f"data.path={file} is {noun}" and step in error.remedy
    if name == "texts.zip" and shutil.which("unzip"):
        run(command_of(error), tmp_path)
        assert [text.read_text() for text in tmp_path.rglob("a")] == ["words"]


def test_a_pointer_beside_texts_is_left_out_by_name(tmp_path):
    (tmp_path / "a.txt").write_text("a text")
    (tmp_path / "b.txt").write_bytes(LFS)
    (tmp_path / "c.md").write_bytes(b"An article about\n" + LFS)
    source = Source(DataConfig(path=str(tmp_path)))
    assert ["".join(document) for document in source.documents()] == ["a text", f"An article about\n{LFS.decode()}"]
    assert "1 file left out" in source.describe()


@pytest.mark.parametrize("source", ["jsonl", "csv", "hf"])
def test_a_pointer_is_named_whatever_format_is_asked_for(tmp_path, source):
    (tmp_path / "shard").write_bytes(LFS)
    with pytest.raises(DataError, match="is a pointer of Git LFS"):
        list(Source(DataConfig(path=str(tmp_path / "shard"), source=source)).documents())


def test_a_database_is_named(tmp_path):
    with sqlite3.connect(tmp_path / "chat.db") as database:
        database.execute("create table message (text)")
    assert "is a SQLite database" in refused(tmp_path / "chat.db").problem


def test_a_nul_is_named_by_line_and_byte_with_a_command_that_leaves_it_out(tmp_path):
    (tmp_path / "log.txt").write_bytes(b"first line\nsecond\0 line\n" * 3)
    error = refused(tmp_path / "log.txt")
    assert error.problem.endswith("log.txt is not text: it has a NUL, first in line 2, byte offset 17")
    run(command_of(error), tmp_path)
    assert (tmp_path / "log.new.txt").read_text() == "first line\nsecond line\n" * 3


def test_a_format_with_nuls_among_its_letters_is_no_text_with_a_nul(tmp_path):
    """tr would leave its other signs, which are no text either."""
    with zipfile.ZipFile(tmp_path / "stored.zip", "w") as archive:
        archive.writestr("a.txt", "a line of text\n" * 99)
    (tmp_path / "model.gguf").write_bytes(b"GGUF\x03\0\0\0\x01\0\0\0general.architecture" * 9)
    (tmp_path / "model.pkl").write_bytes(pickle.dumps({"text": "a line of text\n" * 99}))
    nouns = {"stored.zip": "a zip archive", "model.gguf": "not text but binary", "model.pkl": "not text but binary"}
    for name, noun in nouns.items():
        assert refused(tmp_path / name).problem.endswith(f"{name} is {noun}")


def test_the_command_for_the_standard_input_stands_between_pipes():
    for content, said in (
        (b"a line of text\n" * 9 + b"\0", "leaves it out"),
        ("Les élèves étaient déjà là.\n".encode("cp1252") * 9, "converts it"),
        (gzip.compress(b"a"), "unpacks it"),
    ):
        with pytest.raises(DataError) as caught:
            decode_text("the standard input", content)
        assert re.fullmatch(rf"\| [^>]+ \| {said}", caught.value.remedy)


def test_the_command_of_the_page_mends_a_file_in_two_encodings(tmp_path):
    german = "Über den Wäldern lag ein grauer Nebel – müde zogen die Vögel.\r\n"
    french = "Les élèves étaient déjà là.\n"
    mixed = french.encode() * 3 + german.encode("cp1252") * 3 + french.encode()
    (tmp_path / "mixed.txt").write_bytes(mixed)
    source = Source(DataConfig(path=str(tmp_path / "mixed.txt")))
    assert ["".join(each).count("\ufffd") for each in source.documents()] == [5 * 3] and source.replaced == 5 * 3
    page = (Path(__file__).parent.parent / "docs" / "data.md").read_text(encoding="utf-8")
    command = re.search(r"python (-c 'import codecs.*mixed\.utf8\.txt)\n", page, re.DOTALL)[1].replace("\n  ", "\n")
    run(f"{shlex.quote(sys.executable)} {command}", tmp_path)
    assert (tmp_path / "mixed.utf8.txt").read_bytes().decode() == french * 3 + german * 3 + french


@pytest.mark.parametrize("name", some(["log.txt", "log.txt.gz", "a.jsonl", "a.csv"], 2))
@pytest.mark.parametrize("lines", some([1, LONGEST // 30, LONGEST // 10], 3))
def test_a_nul_is_named_wherever_it_is_and_in_a_folder_its_file_is_left_out(tmp_path, name, lines):
    """Such as those that a crash leaves at the end of a log; one after 262,144 bytes was learned."""
    begin = "text,end\n" * (name == "a.csv")
    line = '{"text": "a lïne of it"}\n' if name == "a.jsonl" else "a lïne of it, which ends\n"
    before = (begin + line * lines).encode()
    content = before + b"\0" * 4096 + line.encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    error = refused(tmp_path / name)
    assert error.problem.endswith(
        f"not text: it has a NUL, first in line {before.count(10) + 1}, byte offset {len(before):,}"
    )
    run(command_of(error), tmp_path)
    (made,) = tmp_path.glob("*.new.*")
    assert made.read_bytes() == content.replace(b"\0", b"")
    source = Source(DataConfig(path=str(tmp_path)))
    assert [*map("".join, source.documents())] and source.left_out == {str(tmp_path / name)}


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_records_are_checked_as_text_is(tmp_path, name):
    chinese = next(text for text, encodings in SENTENCES.items() if "gbk" in encodings)
    lines = [f'{{"text": "{chinese}"}}'] if name == "a.jsonl" else ["text", *[chinese] * 20]
    (tmp_path / name).write_bytes("\n".join(lines * 3 if name == "a.jsonl" else lines).encode("gbk"))
    assert "is not text in UTF-8, but in GB18030: “" in refused(tmp_path / name).problem


@pytest.mark.parametrize(
    "name, made",
    {"a b.csv": "a b.utf8.csv", "x.JSONL": "x.utf8.jsonl", "n.md": "n.utf8.txt", "n": "n.utf8.txt"}.items(),
)
def test_a_converted_file_keeps_the_ending_that_tells_its_format(name, made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes("zehn Öfen glühen, übergroß; né à Évreux, déjà vu\n".encode("cp1252") * 3)
    with pytest.raises(NotText) as raised:
        check_text(name)
    target = raised.value.remedy.rpartition(" > ")[2].removesuffix(" converts it")
    assert shlex.split(target) == [made]
