"""python eval.py: the loss of a checkpoint, a comparison of two, and the tokens' surprise."""

import json
import logging
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import tiktoken
import torch
from conftest import random_gpt, run_here, some
from hypothesis import given, settings
from hypothesis import strategies as st

import generation.score
from cli.eval import score_checkpoints, scoring_params
from cli.export import write_export
from common.errors import CheckpointError, DataError, SettingsError
from data.config import DataConfig, TokenizerConfig
from data.prepare import prepare
from data.texts import LEFT_OUT
from data.tokenizer import END_OF_TEXT, gzip_bits, make_tokenizer, train_bpe
from generation.config import AS_TRAINED, EvalConfig, TextConfig
from generation.score import Scores, ScoringParams, compare, has_split, score, validation_split
from interop.config import ExportConfig
from runs.checkpoint import open_checkpoint, save_checkpoint
from runs.metrics import Evaluation
from train import train
from training.config import TrainConfig
from training.start import open_data

BYTE = make_tokenizer(TokenizerConfig(name="byte"), [])
PLAIN = torch.autocast("cpu", enabled=False)


def save(directory: Path, seed: int, tokenizer=BYTE, **sizes) -> Path:
    model = random_gpt(seed=seed, vocab_size=tokenizer.n_vocab, **sizes)
    config = TrainConfig(model=model.config, precision="fp32")
    save_checkpoint(directory, model=model, tokenizer=tokenizer, config=config)
    return directory


@pytest.fixture
def text_settings(text_file, tmp_path):
    return {"checkpoint": str(save(tmp_path / "one", 1)), "data": TextConfig(path=str(text_file)), "device": "cpu"}


@pytest.mark.slow
def test_figures_in_bf16_are_within_its_rounding_and_without_a_word_are_the_runs_own(text_settings):
    (own,), (exact,), (rounded,) = (
        score_checkpoints(EvalConfig(**text_settings, precision=name, stride=16)) for name in ("auto", "fp32", "bf16")
    )
    assert np.array_equal(own.nats, exact.nats) and not np.array_equal(own.nats, rounded.nats)
    assert rounded.total.loss == pytest.approx(exact.total.loss, rel=torch.finfo(torch.bfloat16).eps)


# The scores


@pytest.mark.parametrize("position", ["rope", "learned"])
@torch.inference_mode()
def test_with_stride_1_every_token_is_scored_after_all_the_context_there_is(position):
    model, tokens = random_gpt(position=position, vocab_size=257), np.random.default_rng(0).integers(256, size=45)
    scores = score(model, BYTE, tokens, ScoringParams(PLAIN, 1))
    for place in range(1, 45):
        context = torch.from_numpy(tokens[max(0, place - 16) : place])[None]
        expected = -model(context)[0, -1].log_softmax(-1)[tokens[place]]
        assert scores.nats[place - 1] == pytest.approx(expected.item(), abs=1e-4)


@pytest.mark.slow
@settings(max_examples=40)
@given(size=st.integers(2, 80), stride=st.integers(1, 40), batch=st.integers(1, 100))
def test_every_token_is_scored_once_after_at_least_the_context_that_the_stride_leaves(size, stride, batch):
    tokens = np.random.default_rng(size).integers(256, size=size)
    model = random_gpt(vocab_size=257)
    passes = list(generation.score.passes(size - 1, min(16, size - 1), stride, batch))
    seen, length = [], min(16, size - 1)
    for start, scored in [(start, scored) for doc_starts, scored in passes for start in doc_starts]:
        assert start == 0 or length - scored >= 16 - stride
        seen += range(start + length - scored, start + length)
    assert seen == list(range(size - 1)) and all(len(doc_starts) <= batch for doc_starts, _ in passes)
    eighths = [list(generation.score.passes(size - 1, 16, each, batch)) for each in (None, 2)]
    assert eighths[0] == eighths[1]
    scores = score(model, BYTE, tokens, ScoringParams(PLAIN, stride))
    assert np.isfinite(scores.nats).all() and len(scores.nats) == size - 1


@pytest.mark.parametrize("apart", [True, False])
def test_documents_are_apart_where_the_run_kept_them_so(apart, tmp_path):
    model, end = random_gpt(vocab_size=257), BYTE.eot_token
    config = TrainConfig(model=model.config, data=DataConfig(document_mask=apart))
    save_checkpoint(tmp_path / "one", model=model, tokenizer=BYTE, config=config)
    checkpoint = open_checkpoint(str(tmp_path / "one"))
    params = scoring_params(checkpoint, EvalConfig(stride=1, precision="fp32"))
    found = score(checkpoint.model, BYTE, np.array([*b"abc", end, *b"de"]), params).nats[-2:]
    assert np.allclose(found, score(model, BYTE, np.array([end, *b"de"]), params).nats, atol=1e-5) == apart


def test_the_figures_are_what_their_names_say():
    scores = Scores(np.array([1.0, 3.0], dtype=np.float32), np.array([1, 4]))
    assert (scores.total.loss, scores.total.perplexity) == (2.0, math.exp(2))
    assert scores.total.bpb == pytest.approx(4 / math.log(2) / 5)
    assert Evaluation(nats=1e6, tokens=1, text_bytes=1).perplexity == math.inf


def test_the_standard_error_is_that_of_a_ratio_over_documents():
    # Documents of 2, 3 and 1 bytes; <|endoftext|> before the second and third.
    scores = Scores(np.array([1, 2, 0.5, 4, 2, 1, 9, 3], dtype=np.float32), np.array([1, 1, 0, 1, 1, 1, 0, 1]))
    nats, sizes = np.array([3, 7.5, 12]), np.array([2, 3, 1])
    rest = nats - nats.sum() / sizes.sum() * sizes
    assert scores.total.bpb_stderr == pytest.approx(math.sqrt(3 / 2 * (rest**2).sum()) / 6 / math.log(2))
    assert Scores(np.ones(3, dtype=np.float32), np.ones(3, dtype=int)).total.bpb_stderr is None


@pytest.mark.parametrize(("length", "has_error"), [(9, True), (28, True), (31, False), (900, False)])
def test_a_text_of_nearly_one_document_has_no_error_over_documents(length, has_error):
    """Documents of nats 2 and 3 a byte: the first alone would have an error of nearly 0, however long the text is."""
    sizes = np.ones(length + 11, dtype=int)
    sizes[length] = 0
    nats = np.where(np.arange(length + 11) < length, 2, 3) * sizes
    assert (Scores(nats.astype(np.float32), sizes).total.bpb_stderr is not None) == has_error


# A text of one's own


def by_hand(model, texts: list[str]) -> tuple[float, float]:
    """Bits per byte of documents and their standard error, each token predicted from all that the model sees."""
    ids, of_document = [], []
    for number, text in enumerate(texts):
        ids += [256, *text.encode()]
        of_document += [number] * (1 + len(text.encode()))
    bits, sizes = [0.0] * len(texts), [len(text.encode()) for text in texts]
    with torch.inference_mode():
        for place in range(1, len(ids)):
            logits = model(torch.tensor([ids[max(0, place - 16) : place]]))[0, -1]
            bits[of_document[place]] -= logits.log_softmax(-1)[ids[place]].item() / math.log(2)
    bpb, n = sum(bits) / sum(sizes), len(texts)
    rest = [b - bpb * size for b, size in zip(bits, sizes, strict=True)]
    return bpb, math.sqrt(n / (n - 1) * sum(r * r for r in rest)) / sum(sizes)


STORIES = [f"record {n * n % 37}: é{'x' * (n % 7)}" for n in range(20)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", some(["lines.jsonl", "lines.txt", "stories.txt", "table.csv", "folder", "text.parquet"], 3)
)
def test_a_text_is_scored_as_the_run_would_read_it_in_every_format(tmp_path, capsys, way):
    model = random_gpt(vocab_size=257)
    data = DataConfig(source="jsonl", path="x", text_field="body", separator="|")
    config = TrainConfig(model=model.config, data=data, precision="fp32")
    save_checkpoint(tmp_path / "one", model=model, tokenizer=BYTE, config=config)
    file = tmp_path / way
    if "lines" in way:
        file.write_text("".join(json.dumps({"id": 1, "body": story}) + "\n" for story in STORIES))
    elif way == "stories.txt":
        file.write_text("|\n".join(STORIES))
    elif way == "table.csv":
        file.write_text("id;body\n" + "".join(f"1;{story}\n" for story in STORIES))
    elif way == "folder":
        file.mkdir()
        for number, story in enumerate(STORIES):
            (file / f"{number:02}.txt").write_text(story)
    else:
        pa = pytest.importorskip("pyarrow")
        pa.parquet = pytest.importorskip("pyarrow.parquet")
        pa.parquet.write_table(pa.table({"body": STORIES, "id": range(20)}), file)
    asked = dict(checkpoint=str(tmp_path / "one"), stride=1, device="cpu")
    (found,) = score_checkpoints(EvalConfig(**asked, data=TextConfig(path=str(file))))
    bpb, stderr = by_hand(model, STORIES)
    assert (found.total.bpb, found.total.bpb_stderr) == pytest.approx((bpb, stderr), rel=1e-4)
    shown = capsys.readouterr().out
    assert ", 20 documents, " in shown and f"bits/byte   {bpb:.4f}\n± documents {stderr:.4f}\n" in shown
    if way == "lines.jsonl":  # typed settings come before the run's
        (raw,) = score_checkpoints(EvalConfig(**asked, data=TextConfig(path=str(file), source="text", separator=None)))
        assert raw.bytes.sum() == file.stat().st_size and (raw.bytes == 0).sum() == 0
        (ones,) = score_checkpoints(EvalConfig(**asked, data=TextConfig(path=str(file), separator="record ")))
        assert ones.bytes.sum() == sum(len(story.removeprefix("record ").encode()) for story in STORIES)
        with pytest.raises(DataError, match="data.separator=--- occurs nowhere in the text"):
            score_checkpoints(EvalConfig(**asked, data=TextConfig(path=str(file), separator="---")))
        with pytest.raises(DataError, match="has no field data.text_field=text: choose one of body, or data=text"):
            score_checkpoints(EvalConfig(**asked, data=TextConfig(path=str(file), text_field="text")))


def test_what_a_text_loses_is_said_where_it_is_scored(text_settings, tmp_path, capsys):
    (folder := tmp_path / "texts").mkdir()
    (folder / "a.txt").write_bytes(b"a text with a broken letter \xff in it")
    (folder / "b.png").write_bytes(b"\x89PNG\r\n\x1a\n\0")
    score_checkpoints(EvalConfig(**text_settings | {"data": TextConfig(path=str(folder))}))
    shown = capsys.readouterr().out
    assert f"text        {folder}: 1 file, 1 document, 35 B; 1 file left out, 1 byte replaced by U+FFFD; " in shown
    assert f"note        {LEFT_OUT}: 1, first in {folder}/b.png (an image).\n" in shown
    assert (
        f"note        Bytes that are not UTF-8 and became U+FFFD: 1, first in {folder}/a.txt line 1, byte offset 28.\n"
        in shown
    )


@pytest.mark.slow
def test_a_source_can_be_typed_by_its_short_name_as_in_training(text_settings, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    for typed, said in {
        "data=text data.path=a.jsonl": "text        a.jsonl: 1 file, 1 document, 32 B; 32 bytes scored",
        "data=jsonl data.path=a.jsonl": "text        a.jsonl: 1 JSON lines file, 2 documents, 32 B; 6 bytes scored",
        "data=jsonl": "error: data=jsonl has nothing to score: give data.path=..., a file or folder",
        "data=hub": "error: data.source=hub is not known: choose one of files, text, jsonl, csv",
    }.items():
        done = run_here("eval.py", f"checkpoint={text_settings['checkpoint']}", *typed.split(), cwd=tmp_path)
        assert (done.stdout or done.stderr).startswith(said)
    checkpoint = open_checkpoint(text_settings["checkpoint"])
    assert generation.score.text_source(TextConfig(source="tales"), checkpoint).name == "7,000 tales of seed 1"


# Two models


def test_the_difference_and_its_standard_error_are_those_of_paired_blocks(monkeypatch):
    monkeypatch.setattr("generation.score.BLOCK_BYTES", 4)
    first = Scores(np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], dtype=np.float32), np.ones(12, dtype=int))
    second = Scores(np.array([7, 20, 8, 4, 38, 2], dtype=np.float32), np.array([2, 3, 0, 4, 3, 0]))
    # Its tokens begin at bytes 0 2 5 5 9 12; each counts in the block of its first one, or else in the last.
    blocks = [7 + 20 - (1 + 2 + 3 + 4), 8 + 4 - (5 + 6 + 7 + 8), 38 + 2 - (9 + 10 + 11 + 12)]
    bits = np.array(blocks) / math.log(2) / 4
    assert compare(first, second) == pytest.approx((bits.mean(), bits.std(ddof=1) / math.sqrt(3)))
    assert bits.mean() == pytest.approx(second.total.bpb - first.total.bpb) and compare(first, first) == (0, 0)


def scores_of(documents: np.ndarray) -> Scores:
    """Scores of documents (D, N) of one-byte tokens, each after an <|endoftext|>."""
    D = len(documents)
    nats = np.concatenate([np.zeros((D, 1)), documents], axis=1)
    sizes = np.concatenate([np.zeros((D, 1), dtype=int), np.ones(documents.shape, dtype=int)], axis=1)
    return Scores(nats.ravel().astype(np.float32), sizes.ravel())


@pytest.mark.slow
def test_the_error_of_a_difference_is_over_documents_where_these_are_of_a_kind_each():
    """It is the spread of the difference between many texts of 30 documents."""
    random = np.random.default_rng(1)

    def draw(D: int, length: int) -> tuple[float, float]:
        first = random.normal(3, 1, (D, length))
        kind = random.normal(0, 0.3, (D, 1))
        return compare(scores_of(first), scores_of(first + kind + random.normal(0, 0.3, (D, length))))

    for D, length in ((30, 5000), (30, 50)):  # the documents are several blocks, or a fraction of one
        found = np.array([draw(D, length) for _ in range(40)])
        expected = 0.3 / math.sqrt(D) / math.log(2)
        assert found[:, 0].std(ddof=1) == pytest.approx(expected, rel=0.3)
        assert found[:, 1].mean() == pytest.approx(expected, rel=0.15)


def test_a_document_that_is_the_whole_text_but_for_a_word_leaves_the_error_to_the_blocks():
    random = np.random.default_rng(1)
    sizes = np.ones(20_004, dtype=int)
    sizes[[0, 20_001]] = 0
    first = random.normal(3, 1, len(sizes)) * sizes
    second = first + np.repeat(random.normal(0, 1, 21), 1000)[: len(sizes)]
    found = compare(*(Scores(nats.astype(np.float32), sizes) for nats in (first, second)))[1]
    assert found == pytest.approx(1 / math.sqrt(20) / math.log(2), rel=0.3)


@pytest.mark.slow
def test_two_tokenizers_are_compared_byte_by_byte(text_settings, tmp_path, text_file, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bpe = train_bpe([text_file.read_text()], 300)
    scores = score_checkpoints(EvalConfig(**text_settings, against=str(save(tmp_path / "two", 2, bpe))))
    out = capsys.readouterr().out
    assert re.search(r"^checkpoint +one +two$", out, re.M)
    assert scores[0].bytes.sum() == scores[1].bytes.sum() == text_file.stat().st_size
    assert len(scores[1].nats) < len(scores[0].nats)
    difference = float(re.search(r"difference +([+-]\d+\.\d+) ± \d+\.\d+ bits/byte", out)[1])
    assert difference == pytest.approx(scores[1].total.bpb - scores[0].total.bpb, abs=1e-4)


def test_another_tokenizer_reads_the_documents_of_the_validation_split_and_no_other_ends(tmp_path, monkeypatch):
    tokens = np.array([256, *b"abab", 256, *b"c"])
    monkeypatch.setattr(generation.score, "validation_split", lambda checkpoint: ("a split", tokens, []))
    bpe = train_bpe(["abab"], 258)
    pair = [open_checkpoint(str(save(tmp_path / str(n), 1, each))) for n, each in enumerate((BYTE, bpe))]
    own, other = generation.score.load_text(TextConfig(), pair).tokens
    assert own is tokens and other.tolist() == [bpe.eot_token, *bpe.encode("abab"), bpe.eot_token, *bpe.encode("c")]


def test_names_of_special_tokens_in_a_scored_text_are_told_to_be_letters(tmp_path):
    special = {END_OF_TEXT: 256, "<|turn|>": 257}
    ranks = {bytes([byte]): byte for byte in range(256)}
    named = tiktoken.Encoding("named", pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens=special)
    file = tmp_path / "a.txt"
    file.write_text(f"<|turn|>one{END_OF_TEXT}two")
    checkpoint = open_checkpoint(str(save(tmp_path / "named", 1, named)))
    text = generation.score.load_text(TextConfig(path=str(file)), [checkpoint])
    assert text.tokens[0].tolist() == [256, *b"<|turn|>one", 256, *b"two"]
    remedy = "docs/library.md writes the id of this special token in their place"
    assert text.notes == [f"Documents with <|turn|>, whose letters are scored ({remedy}): 1, first in {file}."]


@pytest.mark.slow
def test_a_text_too_short_for_a_standard_error_is_compared_without_one(text_settings, tmp_path, text_file, capsys):
    text_file.write_text("a" * 1999)
    score_checkpoints(EvalConfig(**text_settings, against=str(save(tmp_path / "two", 2, BYTE))))
    shown = (
        r"^difference +[+-]\d\.\d+ bits/byte, the second less the first \(with a standard error from 2,000 bytes on\)$"
    )
    assert re.search(shown, capsys.readouterr().out, re.M)


# The command


def both_figures(config: TrainConfig) -> tuple[Evaluation, dict[str, float]]:
    """eval.py's figures of a best checkpoint with the trainer's windows, and the trainer's own."""
    out = score_checkpoints(EvalConfig(checkpoint=config.run_dir, stride=16, device="cpu"))[0].total
    return out, json.loads((Path(config.run_dir) / "checkpoints/best/meta.json").read_text())["progress"]["metrics"]


@pytest.mark.slow
def test_with_the_trainers_windows_it_reports_the_trainers_figures(train_config, capsys, caplog):
    caplog.set_level(logging.INFO, "tinygpt")
    train(train_config)
    out, trained = both_figures(train_config)
    assert (out.loss, out.bpb) == pytest.approx((trained["val_loss"], trained["val_bpb"]), rel=1e-5)
    assert out.bpb_stderr is None  # a single document
    shown = capsys.readouterr().out
    assert f"nats/token  {out.loss:.4f}" in shown and f"bits/byte   {out.bpb:.4f}" in shown
    by_gzip = f"{gzip_bits(BYTE, open_data(train_config, None).val):.4f} bits/byte"
    assert f"gzip        {by_gzip}" in shown and f"gzip      needs {by_gzip}" in caplog.text


@pytest.mark.slow
def test_a_run_that_began_with_anothers_tokenizer_is_scored_in_its_tokens(train_config, text_file, tmp_path):
    origin = save(tmp_path / "origin", 1, train_bpe([text_file.read_text()], 280))
    model = replace(train_config.model, n_head=4)
    train(replace(train_config, model=model, init_from=str(origin), max_steps=20))  # enough to score all of the split
    out, trained = both_figures(train_config)
    assert out.loss == pytest.approx(trained["val_loss"], rel=0.05)  # its last window begins earlier


@pytest.mark.slow
def test_a_validation_split_that_is_gone_changed_or_anothers_is_refused_in_a_sentence(
    train_config, text_file, tmp_path
):
    train_config.tokenizer.name, train_config.tokenizer.vocab_size = "bpe", 270
    train_config.max_steps = train_config.eval_interval = 1
    train(train_config)
    shutil.copytree(train_config.run_dir, tmp_path / "copy", symlinks=True)
    with pytest.raises(DataError, match="is not where it was trained"):
        score_checkpoints(EvalConfig(checkpoint=str(tmp_path / "copy")))
    changes = {"no validation split to score": lambda: text_file.write_text("another text. " * 900)}
    for message, change in (changes | {r"cannot be read .*give a text with data\.path": text_file.unlink}).items():
        change()
        shutil.rmtree(tmp_path / "cache")
        with pytest.raises(DataError, match=message):
            score_checkpoints(EvalConfig(checkpoint=train_config.run_dir))


def test_a_moved_run_with_a_cache_of_its_own_is_told_what_to_copy_where(text_file, tmp_path, monkeypatch):
    """It was not trained here, said the sentence, and had no validation split."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    alone = open_checkpoint(str(save(tmp_path / "alone", 1)))
    with pytest.raises(DataError, match="was not trained here and has no validation split: give a text"):
        validation_split(alone)
    source = DataConfig(source="files", path=str(text_file), cache_dir=str(tmp_path / "own"))
    data = prepare(source, TokenizerConfig(name="byte"))
    moved = replace(alone, meta=replace(alone.meta, data=data.fingerprint))
    with pytest.raises(DataError, match="is not where it was trained") as caught:
        validation_split(moved)
    there, name = re.search(r"split is not in (\S+): copy (\S+) there", str(caught.value)).groups()
    shutil.copytree(tmp_path / "own/tokens" / name, Path(there).expanduser() / name)
    assert validation_split(moved)[1].tolist() == data.val.tolist()


@pytest.mark.long
@pytest.mark.slow
def test_a_run_that_was_moved_and_a_copy_of_its_checkpoint_are_scored_on_what_it_held_out(
    train_config, text_file, tmp_path, monkeypatch, capsys
):
    """By the tokens in this machine's cache. They name no file of it, and where they are not, a text must be given."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    train_config.max_steps = train_config.eval_interval = 1
    train_config.data = replace(train_config.data, cache_dir=DataConfig.cache_dir)
    train(train_config)
    (wanted,) = score_checkpoints(EvalConfig(checkpoint=train_config.run_dir))
    shutil.copytree(Path(train_config.run_dir, "checkpoints", "last"), tmp_path / "alone")
    moved = Path(train_config.run_dir).rename(tmp_path / "moved")
    for place in (moved, tmp_path / "alone"):
        capsys.readouterr()
        (found,) = score_checkpoints(EvalConfig(checkpoint=str(place)))
        assert found.total == wanted.total and "note" not in capsys.readouterr().out
        # A text that is given is compared with the one that was learned.
        score_checkpoints(EvalConfig(checkpoint=str(place), data=TextConfig(path=str(text_file))))
        assert re.search(r"^note +\d+% of this text is in the text that .* has learned$", capsys.readouterr().out, re.M)
    alone = open_checkpoint(str(tmp_path / "alone"))
    for name in ("", "..", f"../{alone.meta.data}", "0" * len(alone.meta.data)):
        assert not has_split(replace(alone, meta=replace(alone.meta, data=name)))
    assert has_split(alone)


@pytest.mark.slow
def test_a_changed_model_is_scored_beside_its_own_run_on_what_that_one_held_out(train_config, tmp_path, capsys):
    train(train_config)
    checkpoint = open_checkpoint(train_config.run_dir)
    with torch.no_grad():
        checkpoint.model.blocks[1].attention.o_proj.weight[:, :16] = 0  # head 0
    changed = str(tmp_path / "changed")
    save_checkpoint(
        tmp_path / "changed", model=checkpoint.model, tokenizer=checkpoint.tokenizer, config=checkpoint.meta.config
    )
    (alone,) = score_checkpoints(EvalConfig(checkpoint=train_config.run_dir))
    mine, its = score_checkpoints(EvalConfig(checkpoint=changed, against=train_config.run_dir))
    assert its.total == alone.total and mine.bytes.sum() == its.bytes.sum() and mine.total.loss != its.total.loss
    said = capsys.readouterr().out
    assert re.search(r"^note +.*changed has no validation split: this one is of .*run", said, re.MULTILINE), said
    # The other way round nothing changes, and a text that is given is scored.
    its, mine_too = score_checkpoints(EvalConfig(checkpoint=train_config.run_dir, against=changed))
    assert its.total == alone.total and mine_too.total.loss == pytest.approx(mine.total.loss)


@pytest.mark.slow
def test_the_validation_split_of_a_changed_text_is_what_the_run_held_out_or_the_doubt_is_told(
    train_config, text_file, tmp_path, capsys
):
    def scored(*, against: str | None = None) -> tuple[list[int], str]:
        """Return the bytes that are scored, in their order, and what is printed."""
        scores = score_checkpoints(EvalConfig(checkpoint=str(tmp_path / "run"), against=against))
        return scores[0].bytes.tolist(), capsys.readouterr().out

    train_config.max_steps = train_config.eval_interval = 1
    train(train_config)
    text = text_file.read_text(encoding="utf-8")
    held_out = text[len(text) - len(text) // 10 :]
    # The text is cut, so that a tenth of the rest has been trained on; then it is away.
    for change in (lambda: text_file.write_text(text[:6_000], encoding="utf-8"), text_file.unlink):
        change()
        lengths, out = scored()
        assert sum(lengths) == len(held_out.encode()) and "note" not in out
    # Without the tokens of then nobody knows what the run has read, not even of a text that was only touched.
    shutil.rmtree(tmp_path / "cache")
    text_file.write_text(text[:6_000], encoding="utf-8")
    lengths, out = scored()
    assert sum(lengths) == len(text[5_400:6_000].encode())
    assert re.search(r"^note .*changed since training, .*may have trained on a part of this split$", out, re.M)
    # A run with another share of the same text may have trained on what the first one held out.
    shutil.rmtree(tmp_path / "run")
    train(train_config)
    other = replace(train_config, run_dir=str(tmp_path / "other"), data=replace(train_config.data, val_fraction=0.2))
    train(other)
    assert "has another data.val_fraction: it may have trained" in scored(against=other.run_dir)[1]
    assert "note" not in scored(against=train_config.run_dir)[1]


@pytest.mark.long
def test_a_text_that_a_run_has_learned_is_told_with_its_share(train_config, tmp_path, capsys):
    def words(seed: int, count: int) -> str:
        return " ".join(np.random.RandomState(seed).choice([*"abcdefghij"], (count, 7)).view("<U7").ravel())

    def learn(name: str, text: str) -> str:
        (tmp_path / f"{name}.txt").write_text(text)
        config = replace(train_config, run_dir=str(tmp_path / name), max_steps=1, eval_interval=1)
        train(replace(config, data=replace(train_config.data, path=str(tmp_path / f"{name}.txt"))))
        return config.run_dir

    def notes(**asked) -> list[str]:
        score_checkpoints(EvalConfig(**asked))
        return re.findall(r"^note +(.*)$", capsys.readouterr().out, re.M)

    # A quarter of a text is new, three are the beginning of what was learned.
    old = learn("old", words(1, 1000))
    (tmp_path / "mixed.txt").write_text(words(1, 300) + words(2, 100))
    (tmp_path / "new.txt").write_text(words(2, 100))
    of_path = {
        name: notes(checkpoint=old, data=TextConfig(path=str(tmp_path / f"{name}.txt"))) for name in ("mixed", "new")
    }
    assert of_path == {
        "mixed": [f"75% of this text is in the text that {old}/checkpoints/step_1 has learned"],
        "new": [],
    }

    # What a run held out is in the text of a later one, at its end or before it.
    assert notes(checkpoint=old) == []
    held = learn("held", words(3, 1000) + words(1, 1000))
    mixed = learn("mixture", words(1, 1000) + words(3, 1000))
    assert notes(checkpoint=old, against=held) == []
    assert notes(checkpoint=old, against=mixed) == [
        f"100% of this text is in the text that {mixed}/checkpoints/step_1 has learned"
    ]
    shutil.rmtree(tmp_path / "cache")  # without the tokens nobody knows
    assert notes(checkpoint=old, data=TextConfig(path=str(tmp_path / "mixed.txt"))) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": {"path": "/no/where"}}, "data.path=/no/where names no regular file"),
        ({"data": {"path": "{tmp}/empty"}}, "nothing to score: give a longer text"),
        ({"data": {"path": "{tmp}/empty.jsonl"}}, "records have text in another field: type data.text_field=body"),
        ({"data": {"path": "{tmp}/binary"}}, "is not text but binary"),
        ({"data": {}}, "not trained here and has no validation split: give a text with data.path=..., or with"),
        ({"against": "/no/where"}, "against=/no/where does not exist"),
    ],
    ids=str,
)
def test_what_cannot_be_scored_is_refused_in_a_sentence(change, message, text_settings, tmp_path):
    (tmp_path / "empty").write_text("")
    (tmp_path / "empty.jsonl").write_text('{"text": "", "body": "A text."}')
    (tmp_path / "binary").write_bytes(b"\0\1\2")
    change = json.loads(json.dumps(change).replace("{tmp}", str(tmp_path)))
    if "data" in change:
        change["data"] = TextConfig(**change["data"])
    with pytest.raises((SettingsError, ValueError), match=re.escape(message)) as refused:
        score_checkpoints(EvalConfig(**text_settings | change))
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_what_is_not_finite_is_refused_in_weights_and_in_logits(text_settings, tmp_path):
    model = random_gpt(vocab_size=257)
    for bad, message in ((math.nan, "down_proj.weight is not finite"), (1e38, "its logits are not finite")):
        model.blocks[0].mlp.down_proj.weight.data.fill_(bad)
        config = TrainConfig(model=model.config, precision="fp32")
        with mock.patch.object(
            torch.Tensor, "isfinite", lambda tensor: torch.ones_like(tensor)
        ):  # an earlier version wrote such weights
            save_checkpoint(tmp_path / str(bad), model=model, tokenizer=BYTE, config=config)
        with pytest.raises(CheckpointError, match=message):
            score_checkpoints(EvalConfig(**text_settings | {"checkpoint": str(tmp_path / str(bad))}))


@pytest.mark.parametrize(("precision", "remedy"), [("fp32", ""), ("auto", ""), ("bf16", "set precision=fp32, or ")])
def test_logits_that_are_not_finite_are_blamed_on_the_precision_where_there_is_a_wider_one(
    precision, remedy, text_settings, monkeypatch
):
    monkeypatch.setattr("cli.eval.score", mock.Mock(side_effect=FloatingPointError("its logits are not finite")))
    with pytest.raises(CheckpointError, match=rf"\(its logits are not finite\): {remedy}take another one\.$"):
        score_checkpoints(EvalConfig(**text_settings, precision=precision))
    monkeypatch.setattr("cli.eval.generate", mock.Mock(side_effect=FloatingPointError("its logits are not finite")))
    with pytest.raises(CheckpointError, match=r"\(its logits are not finite\): take another one\.$"):
        score_checkpoints(EvalConfig(checkpoint=text_settings["checkpoint"], device="cpu", tales=True))


def test_an_export_keeps_how_texts_were_read_and_a_mask_that_one_of_two_models_lacks_is_told(
    tmp_path, capsys, monkeypatch
):
    """So an export that is imported again has the figures of its run."""
    monkeypatch.setattr("cli.export.card_sample", lambda checkpoint: "")
    text = TextConfig(path=str(tmp_path / "two.txt"), separator="\\n")
    (tmp_path / "two.txt").write_text("one text\nanother one")
    model = random_gpt(vocab_size=BYTE.n_vocab, norm_eps=1e-6, n_layer=1)
    data = DataConfig(document_mask=True, separator="\\n")
    config = TrainConfig(model=model.config, data=data, precision="fp32")
    save_checkpoint(tmp_path / "run", model=model, tokenizer=BYTE, config=config)
    write_export(ExportConfig(checkpoint=str(tmp_path / "run"), to=str(tmp_path / "folder")))
    write_export(ExportConfig(import_from=str(tmp_path / "folder"), to=str(tmp_path / "again")))
    against, lacking = str(tmp_path / "run"), tmp_path / "folder/config.json"
    lacking.write_text(lacking.read_text().replace("tinygpt_data", "other"))  # as of an earlier version
    write_export(ExportConfig(import_from=str(tmp_path / "folder"), to=str(tmp_path / "without")))
    (alone,) = score_checkpoints(
        EvalConfig(checkpoint=str(tmp_path / "again"), data=replace(text, separator=AS_TRAINED))
    )
    assert alone.bytes.sum() == len("one text") + len("another one")
    for name, told in (("again", []), ("without", [str(tmp_path / "without")])):
        capsys.readouterr()
        asked = EvalConfig(checkpoint=str(tmp_path / name), against=against, data=text, precision="fp32", device="cpu")
        first, second = score_checkpoints(asked)
        notes = re.findall(
            r"^note +(.*) alone predicts a token from the documents before", capsys.readouterr().out, re.M
        )
        assert notes == told
        assert (np.abs(first.nats - second.nats).max() < 1e-5) == (not told)


def test_a_stride_above_block_size_is_told_with_the_one_that_is_read(text_settings, tmp_path, capsys):
    (tmp_path / "short").write_text("a short text")
    score_checkpoints(EvalConfig(**text_settings | {"data": TextConfig(path=str(tmp_path / "short"))}, stride=999))
    assert re.search(r"\nnote        stride=999 is read as block_size=\d+, the largest\n", capsys.readouterr().out)


@pytest.mark.slow
def test_a_model_of_a_task_is_scored_on_its_windows_alone(tmp_path, capsys):
    model = random_gpt(vocab_size=1024, block_size=32)
    config = TrainConfig(model=model.config, data=DataConfig(source="recall"))
    save_checkpoint(tmp_path / "one", model=model, tokenizer=None, config=config)
    asked = {"checkpoint": str(tmp_path / "one"), "device": "cpu"}
    (found,) = score_checkpoints(EvalConfig(**asked))
    shown = capsys.readouterr().out
    assert shown.startswith("task        recall: ") and f"accuracy    {found.accuracy:.4f}" in shown
    assert re.search(rf"nats/answer +{found.loss:.4f}\n", shown)
    for name, value in (("against", asked["checkpoint"]), ("stride", 3)):
        with pytest.raises(SettingsError, match=f"^{name}=.* needs a text, and data=recall has none: leave it out"):
            score_checkpoints(EvalConfig(**asked, **{name: value}))


@pytest.mark.slow
def test_the_tokens_of_a_nanogpt_folder_are_those_of_the_checkpoints_tokenizer(
    train_config, text_file, tmp_path, monkeypatch
):
    folder = tmp_path / "tokens"
    folder.mkdir()
    ids = BYTE.encode_ordinary(text_file.read_text(encoding="utf-8"))
    for split in ("train", "val"):
        np.array(ids[:2000], np.uint16).tofile(folder / f"{split}.bin")
    config = replace(train_config, max_steps=1, data=DataConfig(source="nanogpt", path=str(folder)), sample_tokens=0)
    train(replace(config, tokenizer=TokenizerConfig(name="byte")))
    made = mock.Mock(side_effect=AssertionError("a published tokenizer would be downloaded"))
    monkeypatch.setattr("data.prepare.make_tokenizer", made)
    (found,) = score_checkpoints(EvalConfig(checkpoint=config.run_dir, device="cpu"))
    assert len(found.nats) == 1999
