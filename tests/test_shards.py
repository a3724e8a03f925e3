"""data=llmc: shards of llm.c and modded-nanogpt read as one text, and damaged ones refused."""

from pathlib import Path

import numpy as np
import pytest
from conftest import settings_of
from hypothesis import given
from hypothesis import strategies as st
from test_prepare import large_encoding

from common.errors import DataError, SettingsError
from data import prepare
from data.batches import TokenDataset, evaluation_batches, sequences_at
from data.config import DataConfig, TokenizerConfig
from data.shards import HEADER, MAGIC, Shards, map_shard
from training.config import TrainConfig

EOT = 50_256


def write_shard(path: Path, ids: list[int], *, magic: int = MAGIC, version: int = 1, count: int | None = None) -> None:
    """A shard as llm.c's write_datafile() makes it."""
    header = np.zeros(HEADER, "<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + np.array(ids, "<u2").tobytes())


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Three shards to train on, of 300, 5 and 200 tokens, and one of 90 to validate on."""
    fake = large_encoding(50_257)
    monkeypatch.setattr(prepare, "make_tokenizer", lambda config, texts: fake if config.name == "gpt2" else None)
    for number, (first, last) in enumerate(((0, 300), (300, 305), (305, 505)), 1):
        write_shard(tmp_path / f"fineweb_train_{number:06}.bin", [EOT, *range(first + 1, last)])
    write_shard(tmp_path / "fineweb_val_000000.bin", [EOT, *range(1, 90)])
    (tmp_path / "readme_training.bin.txt").write_text("no shard")
    return tmp_path


def opened(folder: Path, **settings) -> TokenDataset:
    return prepare.prepare(DataConfig(source="llmc", path=str(folder)), TokenizerConfig(name="gpt2"), **settings)


# Several shards as one text


@given(st.lists(st.integers(1, 7), min_size=1, max_size=5), st.data())
def test_shards_have_the_length_and_the_slices_of_one_array(sizes, data):
    whole = np.arange(sum(sizes), dtype="<u2")
    shards = Shards(np.split(whole, np.cumsum(sizes)[:-1]))
    ends = st.one_of(st.none(), st.integers(-2 * len(whole), 2 * len(whole)))
    where = slice(data.draw(ends), data.draw(ends))
    assert len(shards) == len(whole) and shards[where].tolist() == whole[where].tolist()
    assert shards[where].dtype == whole.dtype and np.array_equal(np.asarray(shards[:]), whole)


def test_batches_and_evaluations_cross_the_borders_of_shards():
    whole = np.arange(1000, dtype="<u2")
    shards = Shards([whole[:301], whole[301:302], whole[302:]])
    first_tokens = np.array([0, 290, 301, 980])
    assert np.array_equal(sequences_at(shards, first_tokens, 20), first_tokens[:, None] + np.arange(20))
    for limit in (None, 300):
        of_shards, of_one = (
            [*evaluation_batches(tokens, block_size=48, batch_size=3, max_tokens=limit)] for tokens in (shards, whole)
        )
        assert all(map(np.array_equal, of_shards, of_one)) and len(of_shards) == len(of_one)
    one, other = (
        TokenDataset(large_encoding(1000), tokens, tokens, "", "").training(16, 4, 3)(5, 0, 4)
        for tokens in (whole, shards)
    )
    assert np.array_equal(one.inputs, other.inputs) and np.array_equal(one.targets, other.targets)


# A folder of shards


def test_a_folders_shards_are_mapped_in_the_order_of_their_names(folder):
    before, data = sorted(folder.iterdir()), opened(folder)
    assert (len(data.train), len(data.val), data.vocab_size) == (505, 90, 50_257)
    assert data.train[298:307].tolist() == [298, 299, EOT, 301, 302, 303, 304, EOT, 306]
    assert data.val[:3].tolist() == [EOT, 1, 2] and data.description == f"4 shards of {folder}"
    assert isinstance(map_shard(folder / "fineweb_val_000000.bin").base, np.memmap)
    assert data.training(8, 4, 1)(0, 0, 4).inputs.shape == (4, 8)
    assert sorted(folder.iterdir()) == before and opened(folder).fingerprint == data.fingerprint
    write_shard(folder / "fineweb_train_000004.bin", [EOT, 7])
    assert len(opened(folder).train) == 507 and opened(folder).fingerprint != data.fingerprint


def test_one_shard_of_each_split_as_llmc_names_small_texts(folder, tmp_path):
    own = tmp_path / "tiny"
    own.mkdir()
    write_shard(own / "tiny_shakespeare_train.bin", [EOT, 1, 2])
    write_shard(own / "tiny_shakespeare_val.bin", [EOT, 3])
    data = opened(own)
    assert data.train.tolist() == [EOT, 1, 2] and data.val.tolist() == [EOT, 3]


HEAD = np.array([MAGIC, 1, 2] + [0] * (HEADER - 3), "<i4").tobytes()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", r"it begins with \[\], and a shard with \[20240520, 1\]"),
        (HEAD[:100], r"it begins with \[20240520, 1\]"),
        (np.array([20240801, 7, 2] + [0] * 253, "<i4").tobytes() + bytes(8), r"it begins with \[20240801, 7\]"),
        (HEAD, "cannot be used"),
        (HEAD + bytes(2), "it has 1 tokens, and its header says 2"),
        (HEAD + bytes(8), "it has 4 tokens, and its header says 2"),
        (HEAD + bytes(5), "cannot be used"),
        (HEAD + np.array([1, 50_257], "<u2").tobytes(), "it has the id 50257, and the tokenizer ids below 50257"),
    ],
)
@pytest.mark.parametrize("name", ["fineweb_train_000002.bin", "fineweb_val_000000.bin"])
def test_a_damaged_shard_is_refused_in_a_sentence_that_names_it(folder, name, content, problem):
    (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=problem) as refused:
        opened(folder)
    assert name in str(refused.value) and "download it again" in str(refused.value) and "\n" not in str(refused.value)


def test_a_folder_without_shards_is_refused_before_a_tokenizer_is_fetched(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "make_tokenizer", lambda *_: pytest.fail("fetched"))
    (folder / "fineweb_val_000000.bin").unlink()
    for path in (folder, tmp_path / "nowhere"):
        with pytest.raises(DataError, match=f"data.path={path} has no shards for both splits"):
            opened(path)
    with pytest.raises(SettingsError, match="data=llmc has nothing to read"):
        DataConfig(source="llmc")


def test_the_experiment_takes_shards_as_its_comment_says(tmp_path):
    config = settings_of("experiment=gpt2_124m", "data=llmc", f"data.path={tmp_path}")
    assert (config.data.source, config.tokenizer.name, config.model.vocab_size) == ("llmc", "gpt2", 50_304)
    assert not config.idle().keys() & {"data.path", "tokenizer.name", "data.document_mask"}
    assert TrainConfig(data=DataConfig(source="llmc", path="a")).data.is_task is False
