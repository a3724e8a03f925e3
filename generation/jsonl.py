"""Generation in batches: prompts from JSON lines, samples to JSON lines."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, TextIO

from common.console import progress_bar
from common.errors import SettingsError
from common.files import read_foreign, reading, user_path, writing
from common.text import PICTURES
from data.texts import json_records
from generation.config import SampleConfig
from generation.generate import Chunk, encode_prompt, generate
from runs.checkpoint import Checkpoint

# json.dumps escapes characters below a space only; the other invisible ones could steer a terminal.
ESCAPES = {code: f"\\u{code:04x}" for code in PICTURES if code > 0x1F}


def read_input(setting: str, where: str) -> str:
    """Return the text of a setting's file; - is standard input."""
    with reading(setting, where):
        content = sys.stdin.buffer.read() if where == "-" else read_foreign(user_path(setting, where))
    return content.decode("utf-8-sig", "replace")


def read_prompts(where: str) -> list[dict[str, Any]]:
    """Return the records of a JSON-lines file, each with a text under "prompt"."""
    records = []
    for place, record in json_records(read_input("prompts", where).split("\n"), f"prompts={where}"):
        if not isinstance(record.get("prompt"), str):
            raise SettingsError(f"{place} has no text under prompt", 'write it as {"prompt": "some text"}')
        records.append(record)
    if not records:
        raise SettingsError(f"prompts={where} has no prompts", 'write one {"prompt": "some text"} a line')
    return records


def write_results(checkpoint: Checkpoint, config: SampleConfig, records: list[dict[str, Any]]) -> None:
    """Write a JSON line for each sample of each record, in their order."""
    model = checkpoint.model
    tokenizer = checkpoint.tokenizer
    # Put the samples of all prompts in one row: a batch may hold samples of several prompts.
    jobs = ((record, number) for record in records for number in range(config.num_samples))
    bar = progress_bar(total=len(records) * config.num_samples, unit="text")
    with results_file(config.results) as file, bar:
        while batch := list(islice(jobs, config.batch_size)):
            # Generate the whole batch: its samples are written in the order of the prompts.
            prompts = [encode_prompt(tokenizer, record["prompt"], config.special_tokens) for record, _ in batch]
            for tokens in prompts:
                warn_if_cropped(tokens, model.config.block_size)
            seeds = [config.seed + number for _, number in batch]
            samples: list[list[Chunk]] = [[] for _ in batch]
            chunks = generate(
                model,
                tokenizer,
                prompts,
                seeds=seeds,
                params=config,
                logprobs=config.logprobs,
            )
            for chunk in chunks:
                samples[chunk.sample].append(chunk)
                bar.update(chunk.finish is not None)
            # Write a line for each sample.
            for (record, number), parts in zip(batch, samples, strict=True):
                result = record | {
                    "text": "".join(part.text for part in parts),
                    "finish": parts[-1].finish,
                }
                if config.num_samples > 1:
                    result["sample"] = number
                if config.logprobs:
                    result["logprobs"] = [
                        {
                            "token": tokenizer.decode([part.logprob[0]]),
                            "logprob": round(part.logprob[1], 6),
                        }
                        for part in parts
                        if part.logprob
                    ]
                line = json.dumps(result, ensure_ascii=False)
                file.write(line.translate(ESCAPES) + "\n")
            file.flush()


def warn_if_cropped(prompt: list[int], block_size: int) -> None:
    """Warn on stderr if the model reads only the end of a prompt."""
    if len(prompt) > block_size:
        size = f"The prompt has {len(prompt):,} tokens, but the model sees {block_size:,}"
        print(f"{size}: only its end is read.", file=sys.stderr)


@contextmanager
def results_file(where: str | None) -> Iterator[TextIO]:
    """Context manager: the new file of results=WHERE, or standard output for - and None."""
    if where is None or where == "-":
        yield sys.stdout
        return
    if user_path("results", where).is_file():
        raise SettingsError(f"results={where} is there already", "give a new name")
    with writing("results", where) as path, path.open("w", encoding="utf-8") as file:
        yield file
