"""Many prompts in, many samples out, as JSON lines."""

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from data.files import json_records
from errors import SettingsError
from generation.config import SampleConfig
from generation.decoder import Decoder
from generation.text import Chunk, complete, encode_prompt
from runs.checkpoint import Checkpoint

RESULT_FIELDS = ("text", "finish", "sample", "logprobs")


def read_input(name: str, where: str) -> bytes:
    """Return the content of the file that a setting names; - is standard input."""
    try:
        return sys.stdin.buffer.read() if where == "-" else Path(where).read_bytes()
    except OSError as error:
        raise SettingsError(f"{name}={where} cannot be read ({error.strerror}).") from None


def read_prompts(where: str) -> list[dict[str, Any]]:
    """Return the records of a JSON-lines file, each with a text under "prompt"."""
    records = []
    for place, record in json_records(read_input("prompts", where).splitlines(), f"prompts={where}"):
        if not isinstance(record.get("prompt"), str):
            raise SettingsError(f'{place} must look like {{"prompt": "some text"}}.')
        if taken := [name for name in RESULT_FIELDS if name in record]:
            raise SettingsError(f"{place} has a field {taken[0]}, which the result would overwrite.")
        records.append(record)
    if not records:
        raise SettingsError(f'prompts={where} has no prompts: write one {{"prompt": "some text"}} a line.')
    return records


def write_results(checkpoint: Checkpoint, config: SampleConfig, records: list[dict[str, Any]]) -> None:
    """Write each record, in order, with its text, why that ended, and if asked for its log-probabilities."""
    decoder, tokenizer, block_size = Decoder(checkpoint.model), checkpoint.tokenizer, checkpoint.model.config.block_size
    total = len(records) * config.num_samples
    decoder.refuse_more("batch_size", min(total, config.batch_size), config.max_new_tokens)
    jobs = ((record, number) for record in records for number in range(config.num_samples))
    with _results(config.results) as file, tqdm(total=total, unit="text", disable=None) as bar:
        while batch := list(islice(jobs, config.batch_size)):
            prompts = [encode_prompt(tokenizer, job["prompt"], config.special_tokens, block_size) for job, _ in batch]
            samples: list[list[Chunk]] = [[] for _ in batch]
            drawing = config.drawing() | {"seeds": [config.seed + number for _, number in batch]}
            for chunk in complete(decoder, tokenizer, prompts, logprobs=config.logprobs, **drawing):
                samples[chunk.sample].append(chunk)
                bar.update(chunk.finish is not None)
            for (record, number), chunks in zip(batch, samples, strict=True):
                result = {**record, "text": "".join(chunk.text for chunk in chunks), "finish": chunks[-1].finish}
                if config.num_samples > 1:
                    result["sample"] = number
                if config.logprobs:
                    drawn = [(tokenizer.decode([token]), nats) for chunk in chunks for token, nats in chunk.logprobs]
                    result["logprobs"] = [{"token": text, "logprob": round(nats, 6)} for text, nats in drawn]
                file.write(json.dumps(result, ensure_ascii=False) + "\n")
            file.flush()


def _results(where: str | None) -> AbstractContextManager[TextIO]:
    if where is None or where == "-":
        return nullcontext(sys.stdout)
    try:
        return Path(where).open("x", encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"results={where} cannot be written ({error.strerror}): give another new name.") from None
