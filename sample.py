"""Generate text from a checkpoint:  python sample.py [NAME=VALUE ...]

python sample.py                               # the newest run, from the start of a document
python sample.py prompt="def read(self" temperature=0.5
python sample.py checkpoint=outputs/DATE/TIME-xxxx interactive=true
"""

import sys

from cli.command import run_command
from common.errors import CheckpointError
from common.text import visible
from generation.config import SampleConfig


def sample(config: SampleConfig) -> None:
    """Print the samples as they are drawn."""
    from generation.terminal import converse, print_samples
    from runs.checkpoint import open_checkpoint
    from training.device import check_compiler, choose_device, decoding_precision, memory_errors

    device = choose_device(config.device)
    prompt = config.prompt
    if config.prompt_file or config.prompts or config.results:
        from generation.jsonl import read_input, read_prompts, write_results

        prompt = read_input("prompt_file", config.prompt_file) if config.prompt_file else prompt
        records = read_prompts(config.prompts) if config.prompts else [{"prompt": prompt}]
    checkpoint = open_checkpoint(config.checkpoint, device)
    checkpoint.model.to(decoding_precision(config.precision, device))
    if config.compile == "on":
        import torch

        check_compiler(device)
        # Of any length and number of texts: it compiles again only where one text is left.
        checkpoint.model.runtime.compiled_hidden = torch.compile(checkpoint.model.hidden, dynamic=True)
    if sys.stderr.isatty():
        print(f"{visible(checkpoint.path)}, step {checkpoint.meta.progress.step}", file=sys.stderr)
    try:
        with memory_errors(f"batch_size={config.batch_size} needs more memory than there is", "lower it"):
            if config.page:
                from pages.reading import read_prompt

                print(visible(read_prompt(checkpoint, prompt, config.special_tokens, config.page)))
            elif config.interactive:
                converse(checkpoint, config)
            elif config.prompts or config.results:
                write_results(checkpoint, config, records)
            else:
                print_samples(checkpoint.model, checkpoint.tokenizer, config, prompt)
    except FloatingPointError as error:
        remedy = "set precision=bf16" if config.precision == "fp16" else "take an earlier one"
        raise CheckpointError(f"checkpoint={checkpoint.path} is unusable ({error})", remedy) from None


def main() -> None:
    run_command(SampleConfig, sample)


if __name__ == "__main__":
    main()
