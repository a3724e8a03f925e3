"""The work of sample.py: samples in the terminal or a file, and an interactive session."""

import re
import sys
from contextlib import suppress
from dataclasses import fields

import tiktoken

from cli.prompts import (
    as_utf8,
    read_prompts,
    read_text,
    tell_equal,
    tell_joined,
    tell_line_ends,
    tell_literal,
    tell_parts,
    tell_stop,
    tell_tokens,
    write_results,
)
from common.console import print_error, say
from common.errors import CheckpointError, SettingsError, format_value
from common.settings import from_arguments
from common.text import plural, seen_from_here, visible
from generation.config import SampleConfig, SamplingParams
from generation.generate import encode_prompt, generate
from model.gpt import GPT
from runs.checkpoint import Checkpoint, open_checkpoint
from runs.plugins import run_code
from training.device import choose_device, decoding_precision, memory_errors

HELP = """Type a prompt and the model continues it, without what was before; an empty line continues the last text.
A line that ends in \\ continues in the next one.
Ctrl-C stops the text, Ctrl-D or /quit ends the session.
//text is a prompt that begins with a slash. /temperature 0.5 changes a setting for the next texts. The settings:"""
AT_ONCE = {"end": "the model ends the document after this prompt", "stop": "a text of stop comes first"}
"""Why a sample is empty, for the ends of generate()."""
CHANGEABLE = [*(field.name for field in fields(SamplingParams)), "seed", "num_samples"]


def write_samples(config: SampleConfig) -> None:
    """Print the samples as they are generated."""
    device = choose_device(config.device)
    # Read the prompt first: its mistakes need not wait for the model.
    prompt = read_text("prompt_file", config.prompt_file) if config.prompt_file else config.prompt
    prompts = as_utf8(read_prompts(config.prompts) if config.prompts else [{"prompt": prompt}])
    texts = [each["prompt"] for each in prompts]
    tell_literal(texts, config.prompt)
    tell_stop(config.stop or ())
    tell_line_ends(texts, config.prompt_file)
    tell_parts(texts)
    # Load the model, and convert its weights.
    run_code(config.code)
    checkpoint = open_checkpoint(config.checkpoint, device)
    model = checkpoint.model
    model.to(decoding_precision(config.precision, device))
    if config.checkpoint is None or sys.stderr.isatty():
        print(f"{visible(seen_from_here(checkpoint.path))}, step {checkpoint.meta.progress.step}", file=sys.stderr)
    # Begin the session, or write the texts.
    tell_joined(checkpoint.tokenizer, texts)
    tell_tokens(checkpoint.tokenizer, texts)
    try:
        batch = min(config.batch_size, config.num_samples * len(prompts))
        needs = f"batch_size={config.batch_size} needs"
        remedy = "lower it"
        if batch == 1:  # a lower one changes nothing
            needs = "the model needs"
            remedy = "end other programs" + ", or set device=cpu" * (device.type != "cpu")
        with memory_errors(f"{needs} more memory than there is", remedy):
            if config.interactive:
                converse(checkpoint, config)
            elif config.prompts or config.results:
                write_results(checkpoint, config, prompts)
            else:
                print_samples(model, checkpoint.tokenizer, config, texts[0])
    except FloatingPointError as error:
        remedy = "set precision=bf16" if config.precision == "fp16" else "take another one"
        raise CheckpointError(f"checkpoint={checkpoint.path} is unusable ({error})", remedy) from None


def print_samples(
    model: GPT,
    tokenizer: tiktoken.Encoding,
    config: SampleConfig,
    prompt: str,
) -> str:
    """Print each sample after its prompt; return the text of the first one.

    The first sample of a batch is streamed, the others follow when all are complete. In an interactive session, Ctrl-C
    stops only the text.
    """
    count = config.num_samples
    tokens = encode_prompt(tokenizer, prompt)
    limit = model.longest_context
    if limit and len(tokens) > limit:
        size = f"The prompt has {len(tokens):,} tokens, but the model sees {limit:,}"
        print(f"{size}: only its end is read.", file=sys.stderr)

    tell_equal(count, count, config)  # seeds differ

    def heading(number: int) -> str:
        if count == 1:
            return prompt
        return f"--- sample {number + 1} of {count}, seed={config.seed + number}\n{prompt}"

    first_text = ""
    empty: list[str] = []  # the reason of each empty sample
    try:
        for first in range(0, count, config.batch_size):
            numbers = range(count)[first : first + config.batch_size]
            seeds = [config.seed + number for number in numbers]
            # Stream the first sample of the batch: a terminal cannot show several at once.
            say(heading(first), end="")
            texts = [""] * len(seeds)
            for chunk in generate(model, tokenizer, [tokens] * len(seeds), seeds=seeds, params=config):
                texts[chunk.sample] += chunk.text
                if chunk.finish in AT_ONCE and not texts[chunk.sample]:
                    empty.append(AT_ONCE[chunk.finish])
                if chunk.sample == 0:
                    first_text += chunk.text * (first == 0)
                    say(chunk.text, end="")
            say("")
            # Print the others after it.
            for number, text in zip(numbers[1:], texts[1:], strict=True):
                say(heading(number) + text)
        if empty:
            print_error(f"{plural(len(empty), 'empty sample')}: {', or '.join(sorted({*empty}))}.")
    except KeyboardInterrupt:
        print()
        if not config.interactive:
            raise
    return first_text


def converse(checkpoint: Checkpoint, config: SampleConfig) -> None:
    """Read prompts from the terminal and continue each, until the input ends."""
    # The arrow keys recall earlier lines, unless this Python was built without readline.
    with suppress(ImportError):
        import readline  # noqa: F401
    text = ""
    print("/help explains the session.")
    while True:
        # Read a line, and the next one after each backslash.
        try:
            line = input("> ")
            while line.endswith("\\"):
                line = line[:-1] + "\n" + input("... ")
        except (EOFError, KeyboardInterrupt) as end:
            print()
            if isinstance(end, EOFError):
                return
            continue  # Ctrl-C drops the line
        if line.strip() == "/quit":
            return
        # Run its command, or continue its text.
        try:
            if line.startswith("/") and not line.startswith("//"):
                config = run_line(line[1:], config)
            else:
                prompt = as_utf8([{"prompt": line.removeprefix("/") if line else text}])[0]["prompt"]
                tell_literal([line])
                tell_joined(checkpoint.tokenizer, [line])
                tell_tokens(checkpoint.tokenizer, [line])
                tell_parts([line])
                text = prompt + print_samples(checkpoint.model, checkpoint.tokenizer, config, prompt)
        except SettingsError as error:
            say(error)


def run_line(line: str, config: SampleConfig) -> SampleConfig:
    """Change the setting that a line names, or print the help; return the settings."""
    name = re.split(r"\W", line, maxsplit=1)[0]
    value = line.removeprefix(name).strip().removeprefix("=").strip()  # of /stop a=b all after the name
    if name in CHANGEABLE and value:
        try:
            config = from_arguments(SampleConfig, [f"{name}={value}"], config)
            if name == "stop":
                tell_stop(config.stop or ())
            return config
        except SettingsError as error:  # with the remedy of a command
            remedy = f"the default is /{name} {format_value(getattr(SampleConfig(), name))}"
            raise SettingsError(error.problem, remedy) from None
    settings = [f"/{key} {format_value(getattr(config, key))}" for key in CHANGEABLE]
    say("\n".join([HELP, *settings]))
    return config
