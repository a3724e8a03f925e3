"""A tiktoken Encoding as Hugging Face's tokenizer.json, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tiktoken

from data.tokenizer import END_OF_TEXT
from errors import HuggingFaceError

# Their regex engine (Oniguruma) reads two things otherwise than tiktoken's: a + after {1,3} repeats
# instead of forbidding to give back, and $ is the end of any line. Nothing that follows {1,3}+ or ++
# in the patterns in use could take back what it matched, so the plain forms match the same.
REGEX_WORDS = (("}+", "}"), ("$", r"\z"), (r"(?s:.)", r"[\s\S]"))

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # ByteLevel's own


def save_tokenizer_json(encoding: tiktoken.Encoding, folder: Path, block_size: int) -> None:
    """Write tokenizer.json and tokenizer_config.json for AutoTokenizer: the same ids for any text without specials.

    Unlike our own encoding, theirs takes a special token in a text for itself.
    """
    ranks = encoding._mergeable_ranks
    letters = _byte_letters()
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    pattern = encoding._pat_str
    for theirs_differs, same in REGEX_WORDS:
        pattern = pattern.replace(theirs_differs, same)
    special = [
        {"id": token, "content": text, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for text, token in sorted(encoding._special_tokens.items(), key=lambda item: item[1])
    ]
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,  # as in tiktoken a piece that is a token is not taken apart
            "vocab": {spelled[token]: rank for token, rank in sorted(ranks.items(), key=lambda item: item[1])},
            "merges": [[spelled[left], spelled[right]] for left, right in _merges(ranks)],
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "model_max_length": block_size,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The pairs that may be joined, most urgent first.

    tiktoken joins any two neighbours that make a token, the one of lowest rank first; theirs joins
    listed pairs, the first in the list first. So each token's pairs are listed, in order of its rank.
    """
    merges = []
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in halves if pair[0] in ranks and pair[1] in ranks]
        merges += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return merges


def read_tokenizer_json(folder: Path) -> tiktoken.Encoding:
    """The tiktoken Encoding with the ids of the folder's tokenizer.json, but for a normalizer, which is left out.

    The token that ends a text there becomes our <|endoftext|>. Raises HuggingFaceError where tiktoken
    cannot give these ids: it has byte-level BPE only, whose merges are in the order of their ids.
    """
    try:
        content = json.loads((folder / "tokenizer.json").read_bytes())
        model = content["model"]
        pattern = _pattern(content["pre_tokenizer"])
        if model["type"] != "BPE" or pattern is None:
            raise HuggingFaceError(f"{folder}/tokenizer.json is no byte-level BPE, so tiktoken cannot stand for it.")
        byte_of = {letter: byte for byte, letter in enumerate(_byte_letters())}
        special = {token["content"]: token["id"] for token in content["added_tokens"]}
        vocabulary = {word: rank for word, rank in model["vocab"].items() if word not in special}
        ranks = {bytes(byte_of[letter] for letter in word): rank for word, rank in vocabulary.items()}
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        order = [vocabulary[left + right] for left, right in pairs]
        if END_OF_TEXT not in special:
            special[END_OF_TEXT] = _end_id(folder)
    except HuggingFaceError:
        raise
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise HuggingFaceError(f"{folder}/tokenizer.json cannot be read ({type(error).__name__}: {error}).") from error
    if order != sorted(order) or any(bytes([byte]) not in ranks for byte in range(256)):
        raise HuggingFaceError(f"{folder}/tokenizer.json merges in another order than its ids, as tiktoken cannot.")
    return tiktoken.Encoding(folder.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def _pattern(pre_tokenizer: dict[str, Any]) -> str | None:
    """The pattern that cuts text into pieces; None where the pieces are not bytes."""
    parts = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    byte_level = [part for part in parts if part["type"] == "ByteLevel"]
    if not byte_level:
        return None
    if byte_level[0].get("use_regex", True):
        return GPT2_PATTERN
    return "|".join(part["pattern"]["Regex"] for part in parts if part["type"] == "Split") or None


def _end_id(folder: Path) -> int:
    ends = json.loads((folder / "config.json").read_bytes())["eos_token_id"]
    return ends[0] if isinstance(ends, list) else int(ends)


def _byte_letters() -> list[str]:
    """A visible letter for each byte (Radford et al. 2019): its own where it has one, else the next from U+0100 on."""
    letters, next_free = [], 0x100
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE:
            letters.append(chr(byte))
        else:
            letters.append(chr(next_free))
            next_free += 1
    return letters
