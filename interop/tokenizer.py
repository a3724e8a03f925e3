"""A tiktoken Encoding as Hugging Face's tokenizer.json, and back."""

import json
import logging
import re
import shlex
from contextlib import suppress
from itertools import chain, count, pairwise
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unicodedata import category

import tiktoken

from common.errors import HuggingFaceError
from common.files import read_foreign
from data.tokenizer import END_OF_TEXT, check_lossless
from interop import first_names, importing

log = logging.getLogger("tinygpt")  # without a handler its warnings go to stderr

# The regular expressions by which ByteLevel cuts: alone, and after a step Digits. Digits isolates each digit, so white
# space before a digit stays in one piece.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGITS_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}
# The patterns of Llama 3 and of Qwen2, which differ in the number of digits.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace("{1,3}", "")
# llama.cpp's names of pre-tokenizers, by the names of our encodings, and by the patterns of imported ones.
GGML_PRE = {"bpe": "llama-bpe", "gpt2": "gpt-2", "cl100k_base": "dbrx", "o200k_base": "gpt-4o"}
GGML_PRE |= {GPT2_PATTERN: "gpt-2", DIGITS_PATTERN: "smollm", LLAMA3_PATTERN: "llama-bpe", QWEN2_PATTERN: "qwen2"}
COUNTED = re.compile(r"(?<!\\x)(\{\d[\d,]*\}|\{,\d+\})\+")
"""A counted quantifier that gives nothing back: {1,3}+."""
SAMPLING = ("temperature", "top_k", "top_p", "min_p")  # names there and here
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}  # values that keep all tokens; sample.py refuses the first
CHOOSE = "choose a model with a byte-level BPE tokenizer, such as GPT-2's, Llama 3's or Qwen3's"
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
# Texts whose ids are compared if the tokenizers library is installed.
SAMPLES = (
    "The quick  brown fox,\n\njumps over\t12345 lazy dogs. ", "naïve café: 北京 2024 😀👍🏽 \u00a0x", " leading", "",
    "हिन्दी की किताब ❤️",
    "I'll we've IT'S don't", "def f(x):\n    return x[1:-1] != 3.14e10  # no\r\n\r\n", "½ Ⅷ ٣٤  5 6   7\n 8",
)  # fmt: skip


def save_tokenizer_json(encoding: tiktoken.Encoding, folder: Path, block_size: int) -> None:
    """Write tokenizer.json and tokenizer_config.json for AutoTokenizer.

    The saved tokenizer puts an <|endoftext|> before our ids. Unlike our encoding, it parses special tokens in a text.
    Raises HuggingFaceError if the tokenizers library is installed and gives other ids.
    """
    # The tokens in the order of their ids, with a visible letter for each byte.
    letters = _byte_letters()
    by_id = itemgetter(1)
    tokens = sorted(encoding._mergeable_ranks.items(), key=by_id)
    ranks = {"".join(letters[byte] for byte in token): rank for token, rank in tokens}

    # The merges. tiktoken joins any two neighbours that make a token, the lowest rank first. Theirs joins listed pairs,
    # the top of the list first. So list all pairs that make a token, by its rank.
    merges: list[tuple[str, str]] = []
    for token in ranks:
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in halves if ranks.keys() >= {*pair}]
        merges += sorted(known, key=lambda pair: [ranks[half] for half in pair])

    # The pattern, for their regex engine, Oniguruma, to which {1,3}+ is a repeated quantifier, not a possessive one.
    # {1,3} matches the same, because nothing after it matches a digit.
    pattern = COUNTED.sub(r"\1", encoding._pat_str).replace(r"(?s:.)", r"[\s\S]")

    # The special tokens, one name for each id, for theirs numbers a second name anew: an imported token that ends texts
    # keeps its own. It also numbers anew from the end of the vocabulary on, unless that has the names.
    ours_first = sorted(encoding._special_tokens.items(), key=lambda pair: pair[0] != END_OF_TEXT)
    name_of = {token: text for text, token in ours_first}
    end = name_of[encoding.eot_token]
    named = {text: token for token, text in sorted(name_of.items())}
    follow = [*named.values()] == [*range(len(ranks), len(ranks) + len(named))]
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = [{"id": token, "content": text, "special": True} | plain for text, token in named.items()]

    # Everything else of their file.
    byte_level = {**BYTE_LEVEL, "trim_offsets": True, "use_regex": False}
    split = {**SPLIT, "pattern": {"Regex": pattern}}
    begin = {"SpecialToken": {"id": end, "type_id": 0}}
    first, second = ([begin, {"Sequence": {"id": name, "type_id": 0}}] for name in "AB")
    end_of_text = {"id": end, "ids": [encoding.eot_token], "tokens": [end]}
    content = {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": first,
            "pair": first + second,
            "special_tokens": {end: end_of_text},
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "ignore_merges": True,  # as in tiktoken, a piece that is a token stays whole
            "vocab": ranks if follow else ranks | named,
            "merges": merges,
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": block_size,
        "bos_token": end,
        "eos_token": end,
        "unk_token": end,  # as GPT-2's own has: no text has an unknown token, but converters read its name
        "pad_token": end,
        "padding_side": "left",  # on the right, padding would part a prompt from its continuation
        "model_input_names": ["input_ids", "attention_mask"],  # transformers 4 would add token_type_ids
        "clean_up_tokenization_spaces": False,
        "ggml_pre": ggml_pre(encoding),
    }
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    _compare(encoding, file, "pip install -U tokenizers; if that does not help, choose another tokenizer", named)


def ggml_pre(encoding: tiktoken.Encoding) -> str | None:
    """Return llama.cpp's name of the pre-tokenizer that cuts a text as an encoding does."""
    name = GGML_PRE.get(encoding._pat_str) or GGML_PRE.get(encoding.name)
    # Llama 3's cuts letters and their marks apart. A vocabulary that joins none has the same ids.
    tokens = (token.decode("utf-8", "ignore") for token in encoding._mergeable_ranks)
    pairs = chain.from_iterable(map(pairwise, tokens if encoding.name == "bpe" else ()))
    return None if any(category(one)[0] + category(other)[0] == "LM" for one, other in pairs) else name


def read_tokenizer_json(folder: Path, max_ids: int | None = None) -> tiktoken.Encoding:
    """Return the tiktoken Encoding with the ids of the folder's tokenizer.json.

    The token that ends their texts becomes <|endoftext|>. A normalizer NFC is left out: a text that is not in NFC gets
    other ids. Raises HuggingFaceError if tiktoken cannot give these ids: it has only byte-level BPE, cut by one
    regular expression, with merges in the order of their ids, and one for each token.

    max_ids: the size of the model's vocabulary.
    """
    file = folder / "tokenizer.json"
    if not file.exists():
        if (folder / "tokenizer.model").exists():
            raise HuggingFaceError("has a tokenizer.model, and no tokenizer.json", CHOOSE, value=folder)
        remedy = "copy it there too, or write it of vocab.json and merges.txt by transformers: "
        remedy += "AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER)"
        raise HuggingFaceError("has no tokenizer.json", remedy, value=folder)
    with importing(file):
        # Read the pattern, the ids of the special tokens, and each other token's bytes by its id.
        content = json.loads(read_foreign(file))
        pattern = _pattern(content, file)
        model = content["model"]
        byte_of = {letter: byte for byte, letter in enumerate(_byte_letters())}
        special = {token["content"]: token["id"] for token in content["added_tokens"]}
        vocabulary = {word: rank for word, rank in model["vocab"].items() if word not in special}
        ranks = {bytes(byte_of[letter] for letter in word): rank for word, rank in vocabulary.items()}

        # Find the token at the end of a text, which config.json names.
        if END_OF_TEXT not in special:
            ends = json.loads(read_foreign(folder / "config.json"))["eos_token_id"]
            special[END_OF_TEXT] = ends[0] if isinstance(ends, list) else ends
        ids = [*ranks.values(), *{*special.values()}]  # <|endoftext|> may share its id with their name for it
        if len({*ids}) < len(ids):
            raise ValueError("two of its tokens have the same id")

        # transformers finds these in a text; here a text has no such tokens.
        added = [
            token["content"]
            for token in content["added_tokens"]
            if not token.get("special", True) and token["content"] != END_OF_TEXT
        ]
        if added:
            told = "%s: its added tokens %s are read as ordinary text here, to other ids."
            log.warning(told, file, first_names(added))

        _tell_borders(content, special, file)
        _tell_lost(folder)

        # tiktoken joins the pair of the lowest id first, so their merges must have that order.
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        order = [vocabulary[left + right] for left, right in pairs]
        lost = sum(bytes([byte]) not in ranks for byte in range(256))
        if lost:
            raise HuggingFaceError(f"has no token of {lost} of the 256 bytes", CHOOSE, value=file)
        if order != sorted(order):
            raise HuggingFaceError("merges in another order than its ids, which tiktoken cannot", CHOOSE, value=file)

        # Make the Encoding, and compare it with their tokenizer.
        encoding = tiktoken.Encoding(folder.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        if max_ids is not None and encoding.n_vocab > max_ids:
            fault = f"has {encoding.n_vocab:,} ids, more than the {max_ids:,} of its model"
            remedy = "resize the model with transformers' resize_token_embeddings()"
            raise HuggingFaceError(fault, remedy, value=file)
        try:
            check_lossless(encoding)
        except ValueError as error:
            raise HuggingFaceError("has a pattern that leaves out parts of a text", CHOOSE, value=file) from error
        if unmerged := _unmerged(vocabulary, {*order}, is_whole=model.get("ignore_merges", False)):
            fault = f"has tokens that no merge makes, such as {unmerged[0]!r}, and tiktoken would make them"
            raise HuggingFaceError(fault, CHOOSE, value=file)
        _compare(encoding, file, CHOOSE)
    return encoding


def _tell_borders(content: dict[str, Any], special: dict[str, int], file: Path) -> None:
    """Warn of tokens that begin or end a text there, and not here."""
    end = special[END_OF_TEXT]

    # Their template may put another token before each text.
    steps = content.get("post_processor") or {}
    templates = [step for step in steps.get("processors", [steps]) if step.get("type") == "TemplateProcessing"]
    begins = [
        piece["SpecialToken"]["id"] for step in templates for piece in step["single"][:1] if "SpecialToken" in piece
    ]
    for name in begins:
        if special.get(name) != end:
            told = (
                "%s: its texts begin with %s, here with the token that ends them: docs/interop.md has the lines for it."
            )
            log.warning(told, file, name)

    # Their texts may end in several ways. generation_config.json goes before config.json.
    files = [file.with_name(name) for name in ("generation_config.json", "config.json")]
    named = [json.loads(read_foreign(each)).get("eos_token_id") for each in files if each.exists()]
    ends = next((token for token in named if token is not None), end)
    for name, token in special.items():
        if token != end and token in (ends if isinstance(ends, list) else [ends]):
            typed = shlex.quote(f"stop={json.dumps([name], ensure_ascii=False) if name[:1] == '[' else name}")
            log.warning("%s: its texts end at %s too, here a text as others: type %s for sample.py.", file, name, typed)


def _tell_lost(folder: Path) -> None:
    """Warn of what a checkpoint does not keep: a chat template, settings of sampling, code."""
    files = [folder / name for name in ("tokenizer_config.json", "generation_config.json")]
    of_tokenizer, of_text = (json.loads(read_foreign(each)) if each.exists() else {} for each in files)
    if of_tokenizer.get("chat_template") or any(folder.glob("chat_template.*")):
        log.warning("%s: its chat template is not kept: docs/interop.md puts it beside an export.", folder)
    if (of_tokenizer.get("auto_map") or {}).get("AutoTokenizer"):
        log.warning("%s: its tokenizer has code of its own, which is not run: its tokenizer.json is read.", folder)
    drawn = [f"{name}={of_text[name]}" for name in SAMPLING if of_text.get(name) not in (None, OFF.get(name))]
    if drawn and of_text.get("do_sample"):
        log.warning(
            "%s: its texts are drawn with %s, which is not kept: type it for sample.py.", folder, " ".join(drawn)
        )


def _unmerged(vocabulary: dict[str, int], made: set[int], is_whole: bool) -> list[str]:
    """Return the tokens that tiktoken makes and their merges do not.

    made: the ids that merges make. is_whole: a piece of text that is a token stays whole there, as in tiktoken; then a
    token without two known halves is made by neither.
    """
    unmerged = [word for word, rank in vocabulary.items() if len(word) > 1 and rank not in made]
    if not is_whole:
        return unmerged
    return [
        word
        for word in unmerged
        if any(word[:cut] in vocabulary and word[cut:] in vocabulary for cut in range(1, len(word)))
    ]


def _pattern(content: dict[str, Any], file: Path) -> str:
    """Return the pattern by which a tokenizer.json cuts text.

    Raises HuggingFaceError if the tokenizer is no byte-level BPE that cuts by one regular expression.
    """
    # Leave out the options that change no ids.
    normalizer = content.get("normalizer")
    model = content["model"]
    names = ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "dropout")
    marks = [name for name in names if model.get(name)]
    is_plain = model["type"] == "BPE" and not marks and normalizer in (None, {"type": "NFC"})
    steps = content["pre_tokenizer"].get("pretokenizers", [content["pre_tokenizer"]])
    steps = [{"use_regex": True} | step if step["type"] == "ByteLevel" else step for step in steps]
    known = [{name: step.get(name) for name in step.keys() - {"trim_offsets", "pattern"}} for step in steps]

    # Choose the pattern of the steps.
    pattern = ""
    if known in ([BYTE_LEVEL], [DIGITS, BYTE_LEVEL]):
        pattern = DIGITS_PATTERN if DIGITS in known else GPT2_PATTERN
    elif known == [SPLIT, BYTE_LEVEL | {"use_regex": False}]:
        pattern = steps[0]["pattern"].get("Regex", "")
    if not is_plain or not pattern:
        has = json.dumps({"model": [model["type"], *marks], "normalizer": normalizer, "pre_tokenizer": steps})
        ours = "byte-level BPE whose pre-tokenizer is ByteLevel, alone or after one regex Split or individual Digits"
        remedy = f"choose a model whose tokenizer tiktoken can express: {ours}"
        raise HuggingFaceError(f"has {has}", remedy, value=file)
    return pattern


def _compare(encoding: tiktoken.Encoding, file: Path, remedy: str, named: dict[str, int] | None = None) -> None:
    """Raise HuggingFaceError if the tokenizers library gives other ids, also for these names."""
    with suppress(ImportError):
        from tokenizers import Tokenizer

        # transformers saves how texts were last cut and padded, as in fine-tuning; neither changes the ids of a text. A
        # copy leaves it out: the calls that turn it off are others since tokenizers 1.0.
        content = json.loads(read_foreign(file)) | {"truncation": None, "padding": None}
        with TemporaryDirectory() as folder:
            copy = Path(folder) / file.name
            copy.write_text(json.dumps(content), encoding="utf-8")
            theirs = Tokenizer.from_file(str(copy))
        for text in SAMPLES:
            if theirs.encode(text, add_special_tokens=False).ids != encoding.encode_ordinary(text):
                fault = f"gives {text!r} other ids than tiktoken does with its pattern and merges"
                raise HuggingFaceError(fault, remedy, value=file)
        for text, token in (named or {}).items():
            found = theirs.encode(text, add_special_tokens=False).ids
            if found != [token]:
                fault = f"gives {text} the ids {found} in place of {token}"
                raise HuggingFaceError(fault, remedy, value=file)


def _byte_letters() -> list[str]:
    """Return GPT-2's visible letter for each byte: its own, or the next one from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = count(0x100)
    return [chr(byte if byte in visible else next(substitutes)) for byte in range(256)]
