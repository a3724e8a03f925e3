"""Does a serving engine give an exported model's answers?

    python export.py to=mymodel
    vllm serve ./mymodel --dtype float32        # or llama-server -m mymodel.gguf, or another that takes token ids
    python benchmarks/engines.py http://localhost:8000

Compares the 64 most likely tokens after each of four prompts over HTTP, with OpenAI's protocol, and the ids that
the engine's /tokenize gives for the texts. The last figure is the largest difference between log-probabilities.
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from typing import Any

import paired

from errors import SettingsError
from generation.decoder import Decoder
from generation.sampling import Controls, generate
from generation.text import encode_prompt
from runs.checkpoint import open_checkpoint

PROMPTS = ("import os\n", "def read(self, n=1234567):", "naïve 😀 \t\r\n\n  x", "It's MIT's,\n    2026-11-21:")
TOKENS = 64
GREEDY = Controls(temperature=0)


def main() -> None:
    parser = paired.Parser(__doc__, rounds=None)
    parser.add_argument("url", help="where the engine listens, such as http://localhost:8000")
    parser.add_argument("checkpoint", nargs="?", help="what was exported: a run or checkpoint of ours (the newest run)")
    arguments = parser.parse_args()
    try:
        checkpoint = open_checkpoint(arguments.checkpoint)
    except SettingsError as error:
        sys.exit(f"error: {error}")
    decoder, url = Decoder(checkpoint.model), arguments.url.rstrip("/")
    prompts = [encode_prompt(checkpoint.tokenizer, prompt) for prompt in PROMPTS]
    longest = max(map(len, prompts))
    new = min(TOKENS, checkpoint.model.config.block_size - longest)
    if new < 1:
        sys.exit(f"error: the prompts have up to {longest} tokens, more than the model's block_size.")

    paired.header()
    same_ids = sum(ask_ids(url, text) == ids[1:] for text, ids in zip(PROMPTS, prompts, strict=True))
    same, apart = 0, 0.0
    for prompt in prompts:
        tokens, nats = ours(decoder, prompt, new)
        their_tokens, their_nats = ask(url, prompt, new)
        same += tokens == their_tokens
        apart = max([apart, *(abs(a - b) for a, b in zip(nats, their_nats, strict=False))])
    n = len(PROMPTS)
    heads = ["", "same token ids", f"same {new} tokens", "apart, nats"]
    paired.table(heads, [[arguments.url, f"{same_ids} of {n} texts", f"{same} of {n} prompts", f"{apart:.1e}"]])


def ours(decoder: Decoder, prompt: list[int], new: int) -> tuple[list[int], list[float]]:
    """The likeliest tokens and their log-probabilities."""
    steps = generate(decoder, [prompt], max_new_tokens=new, seeds=[0], controls=GREEDY, logprobs=True)
    drawn = [drawn for step in steps for drawn in step]
    return [each.token for each in drawn], [each.logprob for each in drawn]


def ask(url: str, prompt: list[int], new: int) -> tuple[list[int], list[float]]:
    """The same of the engine."""
    answer = post(
        f"{url}/v1/completions",
        {"prompt": prompt, "max_tokens": new, "temperature": 0, "logprobs": 1, "ignore_eos": True,
         "return_token_ids": True},
    )["choices"][0]  # fmt: skip
    logprobs = answer["logprobs"]
    if "content" in logprobs:  # llama.cpp
        return [token["id"] for token in logprobs["content"]], [token["logprob"] for token in logprobs["content"]]
    return answer["token_ids"], logprobs["token_logprobs"]  # vLLM


def ask_ids(url: str, text: str) -> list[int]:
    """The engine's token ids of a text; vLLM calls it prompt, llama.cpp content."""
    return post(f"{url}/tokenize", {"prompt": text, "content": text, "add_special_tokens": False})["tokens"]


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)
    except (urllib.error.URLError, ValueError) as error:
        sys.exit(f"error: {url} gave no answer ({error}): is an engine serving the model there?")


if __name__ == "__main__":
    main()
