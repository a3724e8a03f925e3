"""Generate text from a checkpoint:  python sample.py [NAME=VALUE ...]

python sample.py                               # the newest run, from the start of a document
python sample.py prompt="def read(self" temperature=0.5
python sample.py checkpoint=outputs/DATE/TIME-xxxx interactive=true
"""

import sys
from pathlib import Path

import console  # noqa: F401  (first: Ctrl-C from here on ends in one line)
from errors import CheckpointError, refuse_unwritable
from generation.config import SampleConfig
from runs.formatting import visible
from settings import run_command


def sample(config: SampleConfig) -> None:
    """Print the samples as they are drawn."""
    from generation.decoder import Decoder
    from generation.jsonl import read_input, read_prompts, write_results
    from generation.reading import read_prompt
    from generation.terminal import converse, print_samples
    from model.packed import to_int8
    from runs.checkpoint import open_checkpoint
    from training.device import choose_device, decoding_precision, refuse_int8

    if config.page:
        refuse_unwritable("page", config.page)
    device = choose_device(config.device)
    refuse_int8(config.precision, device)
    records, prompt = read_prompts(config.prompts) if config.prompts else None, config.prompt
    if config.prompt_file is not None:
        prompt = read_input("prompt_file", config.prompt_file).decode("utf-8", errors="replace")
    checkpoint = open_checkpoint(config.checkpoint, device)
    tokenizer = checkpoint.tokenizer
    checkpoint.model.to(decoding_precision(config.precision, device))
    if config.precision == "int8":
        to_int8(checkpoint.model)
    if sys.stderr.isatty():
        print(f"{visible(checkpoint.path)}, step {checkpoint.meta['step']}", file=sys.stderr)

    try:
        if config.page:
            print(visible(read_prompt(checkpoint, prompt, config.special_tokens, Path(config.page))))
        elif config.interactive:
            converse(checkpoint, config)
        elif records or config.results:
            write_results(checkpoint, config, records or [{"prompt": prompt}])
        else:
            print_samples(Decoder(checkpoint.model), tokenizer, config, prompt)
    except FloatingPointError as error:
        remedy = "set precision=bf16" if config.precision == "fp16" else "take an earlier one"
        raise CheckpointError(f"checkpoint={checkpoint.path} is unusable ({error}): {remedy}.") from None


def main() -> None:
    run_command(SampleConfig, __doc__, sample)


if __name__ == "__main__":
    main()
