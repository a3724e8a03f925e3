"""Sources of other programs: Parquet files, nanoGPT's tokens, folders of the datasets library."""

import sys
from pathlib import Path

import numpy as np
import pytest
import tiktoken

from data import nanogpt, prepare
from data.config import DataConfig, TokenizerConfig
from data.corpus import open_corpus
from data.prepared import PreparedData
from data.tokenizer import BYTE_PATTERN, END_OF_TEXT
from errors import DataError


def texts(config: DataConfig) -> list[str]:
    return ["".join(document) for document in open_corpus(config).documents()]


# Parquet


def parquet_file(path: Path, **columns: list) -> Path:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), path, row_group_size=2)
    return path


def test_a_parquet_file_named_alone_and_a_folder_of_them_are_read(tmp_path):
    wanted = ["one", "zwei ö", "", "four", "five"]
    file = parquet_file(tmp_path / "b.parquet", text=wanted, number=[1, 2, 3, 4, 5])
    (tmp_path / "readme.md").write_text("not this")
    config = DataConfig(path=str(file))
    assert config.source == "parquet" and texts(config) == wanted
    assert texts(DataConfig(source="parquet", path=str(tmp_path))) == wanted
    other = parquet_file(tmp_path / "a.parquet", body=["first"])
    assert texts(DataConfig(path=f"{tmp_path}/a*.parquet", text_field="body")) == ["first"] and other.exists()


def test_what_is_no_text_in_a_parquet_file_is_refused_by_name(tmp_path):
    file = parquet_file(tmp_path / "a.parquet", text=["one", None], number=[1, 2])
    for field, problem in (
        ("body", "a.parquet has no field data.text_field=body: choose one of text, number"),
        ("number", "record 1: data.text_field=number is not text"),
        ("text", "record 2: data.text_field=text is not text"),
    ):
        with pytest.raises(DataError, match=problem):
            texts(DataConfig(path=str(file), text_field=field))
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DataError, match=r"a\.parquet cannot be read as Parquet \(.*\): mend it or leave it out"):
        texts(DataConfig(path=str(file)))


def test_without_pyarrow_one_sentence_says_how_to_get_it(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match="needs the pyarrow library: pip install pyarrow"):
        texts(DataConfig(path=str(tmp_path / "a.parquet")))
    with pytest.raises(DataError, match=r"holds no \.parquet files"):
        open_corpus(DataConfig(source="parquet", path=str(Path(__file__).parent)))


# nanoGPT


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """train.bin and val.bin of made-up ids, and an encoding of GPT-2's size in place of the one to download."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks |= {divmod(rank, 256)[0].to_bytes() + bytes([rank % 256]): rank for rank in range(256, 50_256)}
    fake = tiktoken.Encoding("gpt2", pat_str=BYTE_PATTERN, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 50_256})
    monkeypatch.setattr(prepare, "make_tokenizer", lambda config, texts: fake)
    for name, count in (("train", 1000), ("val", 100)):
        (np.arange(count) * 50 % 50_257).astype("<u2").tofile(tmp_path / f"{name}.bin")
    return tmp_path


def opened(folder: Path) -> PreparedData:
    return prepare.prepare(DataConfig(source="nanogpt", path=str(folder)), TokenizerConfig(name="gpt2"))


@pytest.mark.parametrize("background", [False, True])
def test_nanogpts_tokens_are_mapped_where_they_lie(folder, monkeypatch, background):
    monkeypatch.setattr(nanogpt, "VERIFIED_BYTES", 0 if background else 10**9)
    before, data = sorted(folder.iterdir()), opened(folder)
    assert (len(data.train), len(data.val)) == (1000, 100) and data.train[2:4].tolist() == [100, 150]
    assert data.training(8, 4, 1)(0, 0, 4).inputs.shape == (4, 8) and data.vocab_size == 50_257
    assert sorted(folder.iterdir()) == before and opened(folder).name == data.name
    np.arange(200).astype("<u2").tofile(folder / "val.bin")
    assert opened(folder).name != data.name


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("val.bin", b"odd", "3 bytes, which are no ids"),
        ("train.bin", b"", "0 bytes"),
        ("train.bin", np.array([1, 50_257], "<u2").tobytes(), "has the id 50257"),
        ("val.bin", None, r"val\.bin cannot be used \(.*No such file"),
        ("meta.pkl", b"", r"meta\.pkl says.*data=text data\.path=.*input\.txt"),
    ],
)
def test_what_are_no_tokens_of_gpt2_is_refused(folder, file, content, problem):
    (folder / file).unlink(missing_ok=True) if content is None else (folder / file).write_bytes(content)
    with pytest.raises(DataError, match=problem):
        opened(folder)


def test_nanogpts_tokens_take_no_other_tokenizer(tmp_path):
    with pytest.raises(DataError, match=r"not of byte: set tokenizer=gpt2"):
        prepare.prepare(DataConfig(source="nanogpt", path=str(tmp_path)), TokenizerConfig(name="byte"))


# datasets


def test_folders_of_save_to_disk_are_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    records = datasets.Dataset.from_dict({"text": ["one", "zwei ö"]})
    records.save_to_disk(tmp_path / "single")
    datasets.DatasetDict({"train": records, "test": records.select([1])}).save_to_disk(tmp_path / "splits")
    assert texts(DataConfig(source="hf", name=str(tmp_path / "single"))) == ["one", "zwei ö"]
    assert texts(DataConfig(source="hf", name=str(tmp_path / "splits"), split="test")) == ["zwei ö"]
    with pytest.raises(DataError, match=r"data\.split=dev cannot be read"):
        texts(DataConfig(source="hf", name=str(tmp_path / "splits"), split="dev"))
