"""Their tokenizer.json gives our ids, there and back, or is refused."""

import json
import random
import re
import shlex
import string
import unicodedata
from pathlib import Path

import pytest
import tiktoken
from conftest import first_of, some, split_patterns
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import HuggingFaceError
from common.settings import from_arguments
from data.config import TokenizerConfig
from data.tokenizer import BPE_PATTERN, END_OF_TEXT, make_tokenizer, train_bpe
from generation.config import SampleConfig
from interop.tokenizer import (
    DIGITS_PATTERN,
    GPT2_PATTERN,
    LLAMA3_PATTERN,
    QWEN2_PATTERN,
    read_tokenizer_json,
    save_tokenizer_json,
)

ODD = "ab Z9 \t\n\r'sſ.,_/é漢😀\u0301\u00a0\u2028\u0085"
TEXTS = st.text(st.sampled_from(ODD) | st.characters(codec="utf-8"), max_size=30)


def trained(pattern: str) -> tiktoken.Encoding:
    """A tokenizer with merges across each piece of the pattern, which a wrong cut would split."""
    text = Path(string.__file__).read_text() + "héllo wörld 漢字 123 4567 😀 " * 50
    return train_bpe([text, "".join(random.Random(0).choices(ODD, k=50_000))], 2000, pattern)


@pytest.fixture(scope="module")
def bpe() -> tiktoken.Encoding:
    return trained(BPE_PATTERN)


@pytest.mark.parametrize("name", ["byte", "bpe", *first_of("gpt2", "cl100k_base", "o200k_base")])
def test_their_tokenizer_gives_our_ids(name, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    byte = name == "byte"
    ours = make_tokenizer(TokenizerConfig(name=name), []) if byte else trained(split_patterns()[name])
    save_tokenizer_json(ours, tmp_path, 16)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    back = read_tokenizer_json(tmp_path)
    source = Path(string.__file__).read_text() + Path(tiktoken.__file__).read_text()
    source += "".join(random.Random(1).choices(ODD, k=20_000))
    ids = ours.encode_ordinary(source)
    assert theirs.encode(source, add_special_tokens=False).ids == ids == back.encode_ordinary(source)

    @settings(max_examples=150)
    @given(text=TEXTS.filter(lambda text: END_OF_TEXT not in text))  # which theirs takes for the token
    def the_same(text):
        ids = ours.encode_ordinary(text)
        assert theirs.encode(text).ids == [ours.eot_token, *ids] and back.encode_ordinary(text) == ids
        assert theirs.decode(ids) == text

    the_same()
    assert theirs.token_to_id(END_OF_TEXT) == ours.eot_token == back.eot_token


# Patterns as other people's files have them, with quantifiers after a class and after a count.
FOREIGN = {
    "gpt-2": GPT2_PATTERN,
    "smollm": DIGITS_PATTERN,
    "llama-bpe": LLAMA3_PATTERN,
    "qwen2": QWEN2_PATTERN,
    "hexadecimal": r"\p{L}{2,}+|\x{20}+|\p{N}{1,2}+|[^\p{L}\x{20}]|\p{L}|\s+",
}


@pytest.mark.parametrize(("text", "name"), [("a ❤️ word 北京", "llama-bpe"), ("हिन्दी", None), ("cafe\u0301", None)])
def test_llama_cpp_has_no_pattern_that_leaves_marks_at_their_letters(text, name, tmp_path):
    """Its converter asks then, in place of other ids."""
    save_tokenizer_json(train_bpe([f"{text} " * 50], 300), tmp_path, 16)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["ggml_pre"] == name


@pytest.mark.parametrize("name", some(FOREIGN, 2))
def test_an_imported_tokenizer_that_is_exported_again_gives_the_same_ids(name, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    ours = trained(FOREIGN[name])
    save_tokenizer_json(ours, tmp_path, 16)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = Path(string.__file__).read_text() + "".join(random.Random(2).choices(ODD, k=5_000))
    assert theirs.encode(text, add_special_tokens=False).ids == ours.encode_ordinary(text)
    assert len(ours.encode_ordinary("The attention is one setting")) < 25  # not letter by letter
    back = read_tokenizer_json(tmp_path)
    again = tmp_path / "again"
    again.mkdir()
    save_tokenizer_json(back, again, 16)
    assert read_tokenizer_json(again).encode_ordinary(text) == ours.encode_ordinary(text)
    # The name of the encoding, which is that of a folder, does not decide.
    for folder, unknown in ((tmp_path, "llama-bpe"), (again, None)):
        named = json.loads((folder / "tokenizer_config.json").read_text())["ggml_pre"]
        assert named == (unknown if name == "hexadecimal" else name)


def test_a_tokenizer_whose_file_gives_other_ids_is_refused_when_it_is_saved(bpe, tmp_path):
    """To Oniguruma $ is the end of any line, to tiktoken that of the text."""
    pytest.importorskip("tokenizers")
    tokens = dict(mergeable_ranks=bpe._mergeable_ranks, special_tokens=bpe._special_tokens)
    lines = tiktoken.Encoding("lines", pat_str=r"[^\n]+$|(?s:.)", **tokens)
    with pytest.raises(HuggingFaceError, match="other ids than tiktoken does"):
        save_tokenizer_json(lines, tmp_path, 16)


def test_each_name_of_a_token_is_a_text_that_has_an_id(bpe, tmp_path):
    """Converters copy the names, also that of an unknown token, which no text has; CTranslate2 reads no null."""
    save_tokenizer_json(bpe, tmp_path, 16)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (special,) = json.loads((tmp_path / "tokenizer.json").read_text())["added_tokens"]
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        assert settings[name] == special["content"] and special["id"] == bpe.eot_token, name


def test_where_no_token_is_called_as_ours_the_first_that_ends_a_text_of_theirs_does(bpe, tmp_path):
    save_tokenizer_json(bpe, tmp_path, 16)
    file, end = tmp_path / "tokenizer.json", bpe.eot_token
    file.write_text(file.read_text().replace(END_OF_TEXT, "</s>"))
    for ends in (end, [end, 5]):
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": ends}))
        assert read_tokenizer_json(tmp_path).eot_token == end


def steps(content: dict) -> list[dict]:
    return content["pre_tokenizer"]["pretokenizers"]


@pytest.mark.parametrize("before", [[], ["Digits"]], ids=str)
def test_byte_level_after_digits_or_alone_gives_their_ids(before, bpe, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    pattern = DIGITS_PATTERN if before else GPT2_PATTERN
    save_tokenizer_json(trained(pattern.replace(r"\p{N}|", r"\p{N}+|")), tmp_path, 16)  # with numbers to cut apart
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = [{"type": "Digits", "individual_digits": True}] * len(before)
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*digits, byte_level]}
    content["normalizer"] = {"type": "NFC"}
    file.write_text(json.dumps(content))
    theirs, ours = tokenizers.Tokenizer.from_file(str(file)), read_tokenizer_json(tmp_path)

    @settings(max_examples=200)
    @given(text=TEXTS.map(lambda text: unicodedata.normalize("NFC", text)).filter(lambda text: END_OF_TEXT not in text))
    def the_same(text):
        assert theirs.encode(text, add_special_tokens=False).ids == ours.encode_ordinary(text)

    the_same()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["model"].update(type="Unigram"), "Unigram"),
        (lambda t: t["model"].update(byte_fallback=True), "byte_fallback"),
        (lambda t: t["model"].update(dropout=0.1), "dropout"),
        (lambda t: t.update(normalizer={"type": "Lowercase"}), "Lowercase"),
        (lambda t: steps(t)[1].update(add_prefix_space=True), "add_prefix_space"),
        (lambda t: steps(t)[0].update(behavior="MergedWithNext"), "MergedWithNext"),
        (lambda t: steps(t).insert(0, {"type": "Digits", "individual_digits": True}), "Digits"),
        (lambda t: steps(t).pop(0), "tiktoken can express"),
        (lambda t: steps(t)[0].update(pattern={"Regex": "x"}), "leaves out parts of a text"),
        (lambda t: steps(t)[0].update(pattern={"String": " "}), "tiktoken can express"),
        (lambda t: t["added_tokens"].append(t["added_tokens"][0] | {"id": 9999, "content": "quick"}), "other ids"),
        (lambda t: t["model"]["merges"].reverse(), "another order"),
        (lambda t: t["model"]["vocab"].pop("\u0100"), "no token of 1 of the 256 bytes"),  # of 0
        (lambda t: t.pop("model"), "cannot be read"),
        (lambda t: t["model"]["vocab"].update({"the": 300}), "two of its tokens have the same id"),
        (lambda t: t["model"]["vocab"].update({"the": -5}), "cannot be read"),
        (lambda t: t["model"]["vocab"].update({"the": 10**12}), "cannot be read"),
        (lambda t: t["model"]["vocab"].update({"the": "x"}), "cannot be read"),
        (lambda t: t["added_tokens"][0].update(id=5), "two of its tokens have the same id"),
        (lambda t: t["added_tokens"][0].update(id=[5]), "cannot be read"),
        (lambda t: steps(t)[0].update(pattern={"Regex": 5}), "cannot be read ..int. object"),
        (lambda t: steps(t)[0].update(pattern={"Regex": "("}), "cannot be read"),
    ],
)
def test_a_tokenizer_that_tiktoken_cannot_stand_for_is_refused(change, message, bpe, tmp_path):
    save_tokenizer_json(bpe, tmp_path, 16)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    change(content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(HuggingFaceError, match=message) as refused:
        read_tokenizer_json(tmp_path)
    assert refused.value.remedy and "\n" not in str(refused.value)


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("change", ["a merge less", "a token more"])
def test_a_token_that_no_merge_makes_is_refused(change, is_whole, bpe, tmp_path):
    """tiktoken joins any two tokens that make one, and so gives other ids."""
    save_tokenizer_json(bpe, tmp_path, 16)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    model = content["model"]
    model["ignore_merges"] = is_whole
    if change == "a merge less":
        left, right = model["merges"][20]
        model["merges"] = [pair for pair in model["merges"] if "".join(pair) != left + right]
    else:
        model["vocab"]["".join(model["merges"][-1]) * 2] = bpe.n_vocab
    file.write_text(json.dumps(content))
    with pytest.raises(HuggingFaceError, match="has tokens that no merge makes, such as .*, and tiktoken would"):
        read_tokenizer_json(tmp_path)


def test_a_token_without_known_halves_comes_in_if_pieces_that_are_tokens_stay_whole(bpe, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    save_tokenizer_json(bpe, tmp_path, 16)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["xqz"] = bpe.n_vocab  # no two of its letters are a token
    file.write_text(json.dumps(content))
    theirs, ours = tokenizers.Tokenizer.from_file(str(file)), read_tokenizer_json(tmp_path)
    for text in ("xqz", "xqz!", "axqz xqz"):
        assert theirs.encode(text, add_special_tokens=False).ids == ours.encode_ordinary(text)


@pytest.mark.parametrize("cut", [{"max_length": 5}, {"max_length": 4, "stride": 1, "direction": "left"}], ids=str)
@pytest.mark.parametrize("fill", [{}, {"length": 60, "direction": "left"}, {"pad_to_multiple_of": 8}], ids=str)
def test_how_texts_were_last_cut_and_padded_changes_no_ids(cut, fill, bpe, tmp_path):
    """The library writes that too; Hugging Face's Trainer saves such a tokenizer."""
    tokenizers = pytest.importorskip("tokenizers")
    save_tokenizer_json(bpe, tmp_path, 16)
    file = str(tmp_path / "tokenizer.json")
    theirs = tokenizers.Tokenizer.from_file(file)
    theirs.enable_truncation(**cut)
    theirs.enable_padding(pad_id=bpe.eot_token, pad_token=END_OF_TEXT, **fill)
    theirs.save(file)
    back = read_tokenizer_json(tmp_path)
    text = "A mask hides keys, and hidden keys get no weight."
    assert len(tokenizers.Tokenizer.from_file(file).encode(text).ids) != len(back.encode_ordinary(text))
    assert back.encode_ordinary(text) == bpe.encode_ordinary(text) and back.eot_token == bpe.eot_token


def test_a_tokenizer_is_compared_by_the_calls_that_tokenizers_1_has_too(bpe, tmp_path, monkeypatch):
    """Its release candidate has no no_truncation(), no_padding() and token_to_id(): a traceback."""
    tokenizers = pytest.importorskip("tokenizers")
    older = tokenizers.Tokenizer

    class Newer:
        """The part of the older class that the newer one has."""

        def __init__(self, theirs):
            self.encode = theirs.encode

        @classmethod
        def from_file(cls, file: str):
            return cls(older.from_file(file))

    monkeypatch.setattr(tokenizers, "Tokenizer", Newer)
    save_tokenizer_json(bpe, tmp_path, 16)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    padding = {"strategy": {"Fixed": 60}, "direction": "Left", "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    cut = {"max_length": 5, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    file.write_text(json.dumps(content | {"padding": padding | {"pad_to_multiple_of": None}, "truncation": cut}))
    assert len(older.from_file(str(file)).encode("A mask").ids) == 60
    assert read_tokenizer_json(tmp_path).encode("A mask") == bpe.encode("A mask")
    content["model"]["merges"][40:42] = reversed(content["model"]["merges"][40:42])
    file.write_text(json.dumps(content))
    with pytest.raises(HuggingFaceError):
        read_tokenizer_json(tmp_path)


def test_a_folder_without_a_tokenizer_json_is_told_how_to_make_one(tmp_path):
    for name, message in (
        (None, "copy it there too"),
        ("vocab.json", "by transformers: "),
        ("tokenizer.model", "choose"),
    ):
        if name:
            (tmp_path / name).touch()
        with pytest.raises(HuggingFaceError, match=f"no tokenizer.json: .*{message}"):
            read_tokenizer_json(tmp_path)


@pytest.mark.slow
def test_the_line_for_vocab_json_and_merges_txt_makes_their_ids(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    theirs = tokenizers.ByteLevelBPETokenizer()
    text = Path(string.__file__).read_text()
    theirs.train_from_iterator([text], vocab_size=500, special_tokens=[END_OF_TEXT], show_progress=False)
    theirs.save_model(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "eos_token_id": 0}')
    transformers.AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
    ours = read_tokenizer_json(tmp_path)
    assert ours.encode(text) == theirs.encode(text).ids and ours.eot_token == 0


def test_a_tokenizer_with_more_ids_than_its_model_is_refused(bpe, tmp_path):
    save_tokenizer_json(bpe, tmp_path, 16)
    assert read_tokenizer_json(tmp_path, bpe.n_vocab).n_vocab == bpe.n_vocab
    with pytest.raises(HuggingFaceError, match=rf"has {bpe.n_vocab:,} ids, more than the 200 of its model: resize"):
        read_tokenizer_json(tmp_path, 200)


@pytest.mark.parametrize("ends", [-1, [], [[]], "x", None, 5, [5, 6]], ids=str)
def test_the_token_that_ends_a_text_must_be_a_special_one(ends, bpe, tmp_path):
    save_tokenizer_json(bpe, tmp_path, 16)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace(END_OF_TEXT, "</s>"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": ends}))
    with pytest.raises(HuggingFaceError, match="tokenizer.json cannot be read") as refused:
        read_tokenizer_json(tmp_path)
    assert refused.value.remedy and "\n" not in str(refused.value)


def test_added_tokens_that_a_text_would_have_there_are_told(tmp_path, caplog):
    """The file says which: those that are not special are found in every text."""
    save_tokenizer_json(make_tokenizer(TokenizerConfig(name="byte"), []), tmp_path, 16)
    read_tokenizer_json(tmp_path)
    assert not caplog.records
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    more = [{"id": 257 + i, "content": f"<{i}>", "special": i == 4} for i in range(5)]
    content["added_tokens"] += [content["added_tokens"][0] | token for token in more]
    file.write_text(json.dumps(content), encoding="utf-8")
    read_tokenizer_json(tmp_path)
    assert "its added tokens <0>, <1>, <2> and 1 other are read as ordinary text here" in caplog.text


@pytest.mark.parametrize(
    "before, places",
    [
        (0, {END_OF_TEXT: 1}),  # cl100k_base and o200k_base leave an id free
        (0, {END_OF_TEXT: 0, "<|prompt|>": 19}),
        (0, {"<|begin|>": 0, "<|end|>": 1, END_OF_TEXT: 1, "<|turn|>": 2}),  # of an import, whose own name ends a text
        (2, {END_OF_TEXT: -2, "<|turn|>": -1}),  # SmolLM's come first
    ],
)
def test_special_tokens_keep_their_ids_and_have_one_name(before, places, bpe, tmp_path):
    """The tokenizers library numbers them anew, unless they follow the other tokens with a name each."""
    tokenizers = pytest.importorskip("tokenizers")
    ranks = {token: rank + before for token, rank in bpe._mergeable_ranks.items()}
    special = {name: place + (before or len(ranks)) for name, place in places.items()}
    ours = tiktoken.Encoding("odd", pat_str=BPE_PATTERN, mergeable_ranks=ranks, special_tokens=special)
    save_tokenizer_json(ours, tmp_path, 16)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    names = special.keys() - ({END_OF_TEXT} if "<|end|>" in special else set())
    assert {name: theirs.token_to_id(name) for name in names} == {name: special[name] for name in names}
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        assert theirs.token_to_id(settings[name]) == ours.eot_token, name
    text = "A mask hides keys 1234."
    assert theirs.encode(text).ids == [ours.eot_token, *ours.encode_ordinary(text)]
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": ours.eot_token}))
    back = read_tokenizer_json(tmp_path)
    assert back._special_tokens == special and back.encode_ordinary(text) == ours.encode_ordinary(text)


def test_a_chat_template_and_settings_of_sampling_are_told_not_kept(bpe, tmp_path, caplog):
    save_tokenizer_json(bpe, tmp_path, 16)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": bpe.eot_token}))
    drawn = {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1, "top_k": None}
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps(drawn))  # without do_sample they act on nothing there
    read_tokenizer_json(tmp_path)
    assert not caplog.records
    file.write_text(json.dumps(drawn | {"do_sample": True}))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    read_tokenizer_json(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": "{{ messages }}"}))
    read_tokenizer_json(tmp_path)
    template, sampling = caplog.messages[:2]
    assert "its chat template is not kept: docs/interop.md" in template
    assert "its texts are drawn with temperature=0.6 top_p=0.9, which is not kept" in sampling
    assert caplog.messages[2:] == [template, sampling]


def test_code_of_a_tokenizer_is_not_run_and_told(bpe, tmp_path, caplog):
    save_tokenizer_json(bpe, tmp_path, 16)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": bpe.eot_token}))
    (tmp_path / "theirs.py").write_text("raise SystemExit")
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"auto_map": {"AutoTokenizer": ["theirs.T", None]}}))
    assert read_tokenizer_json(tmp_path).encode_ordinary("a b") == bpe.encode_ordinary("a b")
    (told,) = caplog.messages
    assert told.endswith("its tokenizer has code of its own, which is not run: its tokenizer.json is read.")


def test_tokens_that_begin_and_end_a_text_there_and_not_here_are_told(bpe, tmp_path, caplog):
    """As those of Llama 3: the first has no place here, and one of several ends a text."""
    special = {"<|begin|>": len(bpe._mergeable_ranks), "<|end|>": bpe.eot_token + 1, "<|turn|>": bpe.eot_token + 2}
    tokens = dict(mergeable_ranks=bpe._mergeable_ranks, special_tokens=special | {END_OF_TEXT: special["<|end|>"]})
    save_tokenizer_json(tiktoken.Encoding("odd", pat_str=BPE_PATTERN, **tokens), tmp_path, 16)
    ends = {"eos_token_id": special["<|end|>"]}
    (tmp_path / "config.json").write_text(json.dumps(ends))
    read_tokenizer_json(tmp_path)
    assert not caplog.records  # both borders are <|end|>, as here
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    content["post_processor"]["single"][0]["SpecialToken"]["id"] = "<|begin|>"
    content["post_processor"]["special_tokens"]["<|begin|>"] = {
        "id": "<|begin|>",
        "ids": [special["<|begin|>"]],
        "tokens": ["<|begin|>"],
    }
    content["post_processor"] = {"type": "Sequence", "processors": [content["post_processor"]]}
    file.write_text(json.dumps(content), encoding="utf-8")
    more = {"eos_token_id": [special["<|turn|>"], special["<|end|>"]]}
    (tmp_path / "generation_config.json").write_text(json.dumps(more))
    read_tokenizer_json(tmp_path)
    first, second = caplog.messages
    assert "its texts begin with <|begin|>, here with the token that ends them" in first
    assert "its texts end at <|turn|> too, here a text as others: type 'stop=<|turn|>' for sample.py" in second


def test_a_remedy_for_settings_of_sampling_is_what_sample_py_reads_so(bpe, tmp_path, caplog):
    special = {END_OF_TEXT: bpe.eot_token, "[END]": bpe.eot_token + 1}
    tokens = dict(mergeable_ranks=bpe._mergeable_ranks, special_tokens=special)
    save_tokenizer_json(tiktoken.Encoding("odd", pat_str=BPE_PATTERN, **tokens), tmp_path, 16)
    drawn = {"do_sample": True, "temperature": 0.6, "top_k": 0, "top_p": 1.0, "eos_token_id": [*special.values()]}
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_text(json.dumps(drawn))
    read_tokenizer_json(tmp_path)
    ends, sampled = caplog.messages
    (typed,) = re.findall("type (.*) for sample.py", ends)
    assert from_arguments(SampleConfig, shlex.split(typed)).stop == ["[END]"]
    assert "its texts are drawn with temperature=0.6, which is not kept" in sampled
