"""Prompts from files, and their samples as JSON lines, which a killed run continues."""

import hashlib
import io
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import tiktoken

from common.console import print_error, progress_bar, say
from common.errors import DataError, SettingsError, format_value, naming
from common.files import holder_of, keep_copies, locked, os_errors_named, read_foreign, regular, remove, user_path
from common.text import plural, visible
from data.encoding import PARTS, UNSEEN, decode_text, has_letters_in_parts, has_unseen_signs
from data.fields import Record
from data.json_records import json_array, json_records, whole_number
from data.opening import is_named
from data.tables import csv_header, csv_records, refuse_excels_line, refuse_lines_before, repeats_names
from data.tokenizer import END_OF_TEXT, encode_text, replace_surrogates, special_names
from generation.config import SEEDS, SampleConfig, SamplingParams
from generation.generate import encode_prompt, generate
from runs.checkpoint import WEIGHTS, Checkpoint
from runs.plugins import run_code

Prompt = dict[str, Any]
"""A prompt, perhaps its seed, and fields that its results keep."""

OF_SAMPLES = ("text", "finish", "made_by")
"""The fields of a result that the sample gives it."""

OF_COMMAND = (*(field.name for field in fields(SamplingParams)), "num_samples")
"""The settings of sampling that all prompts have in common."""


class Job(NamedTuple):
    """A sample to write."""

    prompt: Prompt
    seed: int


def read_text(setting: str, where: str) -> str:
    """Return the text of SETTING=WHERE; - is standard input. Tell of bytes that are not UTF-8."""
    with os_errors_named(setting, where, "read", "give one that exists and that you may read, or - for standard input"):
        content = sys.stdin.buffer.read() if where == "-" else read_foreign(user_path(setting, where))
    with naming(setting, where):
        text, damage = decode_text("the standard input" if where == "-" else where, content)
    if damage:
        lost = f"{plural(damage.broken, 'byte')} outside UTF-8, first in {damage.place}"
        print_error(f"{setting}={visible(where)}: U+FFFD stands for {lost}.")
    return text


def as_utf8(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return prompts with U+FFFD for what is not UTF-8, and tell of it.

    A shell's bytes and JSON's escapes may be lone surrogates, which no text in UTF-8 has.
    """
    replaced = [replace_surrogates(join_bytes(each["prompt"])) for each in prompts]
    count = sum(lost for _, lost in replaced)
    if count:
        print_error(f"{plural(count, 'byte')} of prompts outside UTF-8, read as U+FFFD.")
    return [each | {"prompt": text} for each, (text, _) in zip(prompts, replaced, strict=True)]


def join_bytes(text: str) -> str:
    """Return a text with letters in place of the surrogates that are their bytes in UTF-8.

    Under an ASCII locale Python has each byte of a typed letter apart.
    """
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # with JSON's surrogates, which are no bytes
        return text


def tell_literal(prompts: Iterable[str], typed: str = "") -> None:
    """Tell of signs in prompts that are letters here, and a token or a line end elsewhere.

    typed: the prompt that was typed as an argument.
    """
    count = sum(END_OF_TEXT in prompt for prompt in prompts)
    if count:
        remedy = "leave it out, for each prompt begins a document"
        print_error(f"{plural(count, 'prompt')} with {END_OF_TEXT}, which is read as letters: {remedy}.")
    if "\\n" in typed:
        remedy = "$'first\\nsecond' in bash, or prompt_file=FILE, has a line end"
        print_error(f"prompt= has \\n, which is read as two letters: {remedy}.")


def tell_stop(stop: Iterable[str]) -> None:
    """Tell of a list of stops whose \\n without quotes is two letters."""
    if any("\\n" in text for text in stop):
        print_error("stop= has \\n as two letters: in a list '[\"\\n\"]' has a line end.")


def tell_tokens(tokenizer: tiktoken.Encoding, prompts: Iterable[str]) -> None:
    """Tell of an imported tokenizer's special tokens in prompts, which are letters here."""
    names = special_names(tokenizer)
    found = [[name for name in names if name in prompt] for prompt in prompts]
    count = sum(map(bool, found))
    if count:
        first = next(name for each in found for name in each)
        remedy = "docs/interop.md makes tokens of such names in Python"
        print_error(f"{plural(count, 'prompt')} with {first}, which is read as letters: {remedy}.")


def tell_parts(prompts: Sequence[str]) -> None:
    """Tell of prompts whose letters are in parts, or with signs that nobody sees."""
    count = sum(map(has_letters_in_parts, prompts))
    if count:
        print_error(f"{plural(count, 'prompt')} with {PARTS}, which few texts have: docs/data.md writes them whole.")
    count = sum(map(has_unseen_signs, prompts))
    if count:
        print_error(f"{plural(count, 'prompt')} with {UNSEEN}: docs/data.md has the command that removes them.")


def tell_line_ends(prompts: Sequence[str], prompt_file: str | None) -> None:
    """Tell of line ends that an editor leaves: Windows' \\r, and the last one of prompt_file=."""
    count = sum("\r" in prompt for prompt in prompts)
    if count and not prompt_file:
        print_error(f"{plural(count, 'prompt')} with \\r at line ends, which few texts have: write \\n alone.")
    if prompt_file:
        (text,) = prompts
        source = "" if prompt_file == "-" else f" < {shlex.quote(str(user_path('prompt_file', prompt_file)))}"
        if count:
            convert = r"tr -d '\r'" if "\r\n" in text else r"tr '\r' '\n'"
            fact = "has \\r at line ends, which few texts have"
            remedy = f'prompt="$({convert}{source})" has \\n alone'
        elif text.endswith("\n"):
            fact = "ends in a line end, so the sample begins a line"
            remedy = f'prompt="$(cat{source})" continues the last one'
        else:
            return
        print_error(f"prompt_file={visible(prompt_file)} {fact}: {remedy}.")


def tell_joined(tokenizer: tiktoken.Encoding, prompts: Iterable[str]) -> None:
    """Tell of prompts that end in white space which the tokenizer joins to the next word.

    In training the model saw the tokens "a" and " word", and hardly ever a word after "a" and " ".
    """
    count = sum(ends_within_token(tokenizer, prompt) for prompt in prompts)
    if count:
        fact = "with white space at the end, which the tokenizer joins to the next word"
        print_error(f"{plural(count, 'prompt')} {fact}: leave out the last character.")


def ends_within_token(tokenizer: tiktoken.Encoding, text: str) -> bool:
    """Return whether a text ends in white space whose token differs before a word."""
    last = text[-1:].encode(errors="replace")
    if not last.isspace():
        return False
    # A token begins with it, as " word" does, or the tokenizer divides it otherwise before a word, as GPT-2's "\n\n".
    begins_words = any(token.startswith(last) and not token.isspace() for token in tokenizer._mergeable_ranks)
    end = text[-64:]
    tokens = encode_text(tokenizer, end)
    return begins_words or [*encode_text(tokenizer, f"{end}a")][: len(tokens)] != [*tokens]


def tell_long(checkpoint: Checkpoint, prompts: Iterable[Prompt]) -> None:
    """Tell of prompts that are longer than the context of the model."""
    limit = checkpoint.model.longest_context
    if limit is None:
        return
    count = sum(len(encode_prompt(checkpoint.tokenizer, prompt["prompt"])) > limit for prompt in prompts)
    if count:
        fact = f"with more tokens than the {limit:,} that the model sees"
        print_error(f"{plural(count, 'prompt')} {fact}: only the end of each is read.")


def tell_replaced(prompts: Iterable[Prompt]) -> None:
    """Tell of fields of prompts that their results have for the sample."""
    replaced = [[name for name in OF_SAMPLES if name in prompt] for prompt in prompts]
    count = sum(map(bool, replaced))
    if count:
        names = ", ".join(name for name in OF_SAMPLES if any(name in each for each in replaced))
        remedy = "fields of other names are kept"
        print_error(f"{plural(count, 'prompt')} with {names}, in whose place a result has its sample's: {remedy}.")


def tell_settings(prompts: Iterable[Prompt], config: SampleConfig) -> None:
    """Tell of fields of prompts that are settings of sampling, with another value."""
    used = {name: format_value(getattr(config, name)) for name in OF_COMMAND}
    used["max_tokens"] = used["max_new_tokens"]  # the name of OpenAI's batches
    asked = [[name for name in used if name in each and format_value(each[name]) != used[name]] for each in prompts]
    count = sum(map(bool, asked))
    if count:
        names = ", ".join(name for name in used if any(name in each for each in asked))
        remedy = "type them, with a file of prompts for each value"
        print_error(f"{plural(count, 'prompt')} with {names} of their own, which are the command's alone: {remedy}.")


def read_prompts(where: str) -> list[Prompt]:
    """Return the prompts of prompts=WHERE: one a line, or records.

    A record has `prompt` and perhaps `seed`. Records are JSON lines or a JSON array, whose strings are prompts,
    or CSV by the name of the file.
    """
    text = read_text("prompts", where)
    # Line ends of Windows are white space of JSON. Other letters that end lines, such as U+2028, may stand in a prompt.
    lines = text.split("\n")
    written = [line.removesuffix("\r") for line in lines if line.strip()]
    if not written:
        is_table = any(is_named(where, kind) for kind in ("csv", "json", "jsonl"))
        raise DataError(f"prompts={where} has no prompts", "add a record with one" if is_table else "write one a line")
    with naming("prompts", where):
        if is_named(where, "csv"):
            records = prompt_rows(text, where)
        elif is_json(text, list) or (is_named(where, "json") and written[0].lstrip().startswith("[")):
            records = json_array(io.StringIO(text), where, "prompt")
        elif is_json(written[0], dict) or is_named(where, "json") or is_named(where, "jsonl"):
            records = json_records(lines, where, "prompt")
        else:
            return [{"prompt": line} for line in written]
        prompts = [*map(checked_prompt, records)]
        if not prompts:  # a header alone, or []
            raise DataError("has no prompts", "add a record with one", value=where)
        return prompts


def prompt_rows(text: str, where: str) -> Iterator[Record]:
    """Yield the rows of a table of prompts.

    An empty seed is none, others are numbers, as pandas' 3.0.
    """
    _, names = csv_header(io.StringIO(text, newline=""), where)
    refuse_excels_line(where, names)
    if "prompt" not in names:
        refuse_lines_before(io.StringIO(text, newline=""), where, "prompt")
        remedy = "call a column prompt, or name the file .txt to read its lines"
        raise DataError(f"has no column prompt, but {', '.join(names)}", remedy, value=where)
    for record in csv_records(io.StringIO(text, newline=""), where, "prompt"):
        if len(record.fields) > 1 and repeats_names(record.fields):
            continue
        seed = record.fields.pop("seed", "")
        if seed:
            number = re.fullmatch(r"(\d+)(?:\.0+)?", seed)
            record.fields["seed"] = int(number[1]) if number else seed
        yield record


def checked_prompt(record: Record) -> Prompt:
    """Return a record as a prompt; DataError if its prompt or seed cannot be used."""
    source, place, prompt = record
    if not isinstance(prompt.get("prompt"), str):
        remedy = 'write it as {"prompt": "Once upon a time"}'
        raise DataError(f"{place} has no text in the field prompt", remedy, value=source)
    if prompt.get("seed", 0) is None:  # as programs write an empty cell
        prompt = {name: value for name, value in prompt.items() if name != "seed"}
    seed = prompt.get("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < SEEDS:
        remedy = "choose a whole number from 0 to 2^32 - 1, or leave it out"
        if isinstance(seed, str) and seed.isdecimal():
            remedy = f"write it without quotes, or {remedy}"
        raise DataError(f"{place} has seed={json.dumps(seed):.40}", remedy, value=source)
    return prompt


def is_json(text: str, kind: type) -> bool:
    """Return whether a text is JSON of a kind, an object (dict) or an array (list)."""
    try:
        return isinstance(json.loads(text, parse_int=whole_number), kind)
    except ValueError:
        return False
    except RecursionError:  # it has many brackets, and no mistake in them
        return text.lstrip().startswith("[" if kind is list else "{")


def write_results(checkpoint: Checkpoint, config: SampleConfig, prompts: Sequence[Prompt]) -> None:
    """Write a line of JSON for each sample of each prompt to config.results; - is stdout.

    An object has the fields of its prompt, its `seed`, its `text`, why it ends (`finish`), and `made_by`, a hash of the
    weights and the sampling settings. A batch is written when all its samples are complete. A file that has the first
    results of the same command is continued.
    """
    jobs = [
        Job(prompt, prompt.get("seed", config.seed) + number)
        for prompt in prompts
        for number in range(config.num_samples)
    ]
    if max((job.seed for job in jobs), default=0) >= SEEDS:
        problem = f"num_samples={config.num_samples} leads a seed of the prompts beyond 2^32 - 1"
        raise SettingsError(problem, "lower one of them")
    pairs = {(job.prompt["prompt"], job.seed) for job in jobs}
    tell_equal(len(jobs), len(pairs), config, greedy=len({text for text, _ in pairs}))
    tell_long(checkpoint, prompts)
    tell_replaced(prompts)
    tell_settings(prompts, config)
    made_by = sampler_hash(checkpoint, config)
    with ExitStack() as stack:
        # Open the file, and skip what it has.
        done = 0
        write: Callable[[str], object] = partial(say, end="")
        if config.results not in (None, "-"):
            stack.enter_context(os_errors_named("results", config.results, "written", "name another place"))
            file = user_path("results", str(config.results))
            lock_results(file, config, stack)
            keep_copies(file)
            done = keep_whole_batches(file, jobs, made_by, config)
            out = stack.enter_context(file.open("a", encoding="utf-8", errors="replace", newline="\n", buffering=1))
            write = out.write
        # Write the others, batch by batch.
        bar = stack.enter_context(progress_bar(total=len(jobs), initial=done, desc="sampling", unit=" samples"))
        rest = iter(jobs[done:])
        while batch := list(islice(rest, config.batch_size)):
            results = [
                job.prompt | {"seed": job.seed, "text": "", "finish": "length", "made_by": made_by} for job in batch
            ]
            tokens = [encode_prompt(checkpoint.tokenizer, job.prompt["prompt"]) for job in batch]
            seeds = [job.seed for job in batch]
            for chunk in generate(checkpoint.model, checkpoint.tokenizer, tokens, seeds=seeds, params=config):
                results[chunk.sample]["text"] += chunk.text
                results[chunk.sample]["finish"] = chunk.finish or "length"
            for result in results:
                write(as_json(result) + "\n")
            bar.update(len(batch))


def as_json(result: dict[str, Any]) -> str:
    """Return a result as a line; one of whose fields UTF-8 lacks a letter has all in escapes."""
    line = json.dumps(result, ensure_ascii=False)
    return json.dumps(result) if replace_surrogates(line)[1] else line


def is_greedy(params: SamplingParams) -> bool:
    """Return whether each step takes the likeliest token, so that the seed makes no difference."""
    return params.temperature == 0 or params.top_k == 1


def tell_equal(samples: int, prompts_and_seeds: int, config: SampleConfig, greedy: int = 1) -> None:
    """Tell how many samples repeat another, if fewer are different.

    prompts_and_seeds: the number of different pairs; greedy: that of different prompts, whose likeliest text is one.
    """
    different = greedy if is_greedy(config) else prompts_and_seeds
    if different == samples:
        return
    cause = "the same prompt and seed"
    remedies = []
    if prompts_and_seeds < samples and config.num_samples > 1:
        apart = f"whose seeds are at least num_samples={config.num_samples} apart"
        remedies.append(f"write each prompt once, or records {apart}")
    elif prompts_and_seeds < samples:
        each = "num_samples=N writes N of each prompt with the seeds from its own on"
        remedies.append(f"{each}, or give each record a seed of its own")
    if is_greedy(config):
        cause = "the same prompt, with the likeliest token at each step"
        remedies += ["raise temperature"] * (config.temperature == 0) + ["leave out top_k=1"] * (config.top_k == 1)
    repeated = samples - different
    verb = "repeats" if repeated == 1 else "repeat"
    print_error(f"{plural(repeated, 'sample')} of {samples:,} {verb} another of {cause}: {'; and '.join(remedies)}.")


def sampler_hash(checkpoint: Checkpoint, config: SampleConfig) -> str:
    """Return a hash of what decides the text of a prompt and a seed, but for roundings."""
    names = [field.name for field in fields(SamplingParams)] + ["precision"]
    settings = {name: value for name, value in asdict(config).items() if name in names}
    key = [checkpoint.meta.files[WEIGHTS]["sha256"], settings]
    if config.code:  # the same weights may mean something else
        key.append(run_code(config.code))
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:8]


def lock_results(file: Path, config: SampleConfig, stack: ExitStack) -> None:
    """Lock a file of results until the stack is closed.

    The lock is a hidden file beside it: on Windows nobody could read a file that is locked itself. Raises SettingsError
    if another process writes the file, and OSError for a FIFO, a device or a folder.
    """
    real = Path(os.path.realpath(file))
    if file.exists():
        regular(file)
    beside = real.with_name(f".{real.name}.lock")
    try:
        stack.enter_context(locked(beside))
    except BlockingIOError:
        problem = f"results={config.results} is being written by another process, or by one that Ctrl-Z halted"
        problem += holder_of(beside)
        raise SettingsError(problem, "name a new file, or stop that one first, a halted one by fg and Ctrl-C") from None
    stack.callback(remove, beside)


def keep_whole_batches(file: Path, jobs: Sequence[Job], made_by: str, config: SampleConfig) -> int:
    """Return how many results a file has of these jobs, less those of an unfinished batch.

    So each batch has the samples that it has in a run that is not killed. Raises SettingsError for other results.
    """
    if not file.exists():
        return 0
    with file.open("rb+") as content:
        ends = [0]
        for number, line in enumerate(content):
            is_whole = line.endswith(b"\n")
            if not is_whole and number < len(jobs) and begins_result(line, jobs[number]):
                break  # the kill came while it was written
            if not is_whole or number >= len(jobs) or not is_result(line, jobs[number], made_by):
                problem = f"results={config.results} line {number + 1} is no result of these prompts and settings"
                raise SettingsError(problem, "name a new file, or repeat the command that began this one")
            ends.append(ends[-1] + len(line))
        done = len(ends) - 1
        if done < len(jobs):
            done -= done % config.batch_size
        content.truncate(ends[done])
    return done


def begins_result(line: bytes, job: Job) -> bool:
    """Return whether a line may be the beginning of a result.

    A person's text is none, and is kept.
    """
    begun = as_json(job.prompt).encode()[: len('{"prompt"')]
    return begun.startswith(line[: len(begun)])


def is_result(line: bytes, job: Job, made_by: str) -> bool:
    """Return whether a line is the result of a job, with all fields that its prompt has now."""
    try:
        result = json.loads(line, parse_int=whole_number)
    except (ValueError, RecursionError):
        return False
    if not isinstance(result, dict):
        return False
    wanted = job.prompt | {"seed": job.seed, "made_by": made_by}
    # As JSON, in which NaN is equal to itself.
    found, asked = (
        json.dumps({name: value for name, value in fields.items() if name not in ("text", "finish")}, sort_keys=True)
        for fields in (result, wanted)
    )
    return found == asked
