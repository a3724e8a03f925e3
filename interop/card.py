"""The model card of an exported folder: README.md, which a hub shows."""

import re
from pathlib import Path

# Settings of a run that say nothing of its model, or of the machine that it ran on.
PRIVATE = ("run_dir", "resume", "data.path", "data.val_path", "data.cache_dir", "wandb.", "sample_", "allow_changes")
PLACES = ("init_from", "data.name")  # a name on the hub, or a folder of the machine
CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [tinygpt]
---

# {name}

A {kind} of {parameters:,} parameters for texts of up to {block_size:,} tokens, {origin}:

    {command}

{steps}{figures}

## Use

With transformers {needed} or later:

```python
from transformers import AutoModelForCausalLM, {loader}

model = AutoModelForCausalLM.from_pretrained("{name}")  # this folder, or its name on the hub
tokenizer = {loader}.from_pretrained("{name}")
tokens = model.generate(**tokenizer("", return_tensors="pt"), max_new_tokens={new}, do_sample=True, temperature=0.8)
print(tokenizer.decode(tokens[0], skip_special_tokens=True))
```

## A sample

{sample}
"""


def tokenizer_loader(kind: str) -> str:
    """Return the class of transformers that reads an exported tokenizer as it is.

    For a Qwen2 AutoTokenizer of transformers 5 takes Qwen's pattern and NFC, whatever tokenizer.json has.
    """
    return "PreTrainedTokenizerFast" if kind == "Qwen2ForCausalLM" else "AutoTokenizer"


def without_folders(name: str, value: str) -> str:
    """Return a setting's value for a card: of a folder the last name, a name on the hub whole."""
    if name not in PLACES:
        return value
    kind = "hf:" if value.startswith("hf:") else ""
    path = Path(value.removeprefix(kind)).expanduser()
    if (kind or name == "data.name") and not path.is_absolute() and not path.exists():
        return value
    return f"{kind}{path.name}"


def model_card(
    sample: str,
    figures: dict[str, float],
    block_size: int,
    kind: str,
    step: int = 0,
    earlier_settings: str | None = None,
    **values: object,
) -> str:
    """Return the model card.

    figures: the metrics of the latest evaluation. kind: the name of the model's class. step: that of the weights, 0 for
    those that no step of the command has trained, as of an import. earlier_settings: those of a resumed run.
    values: the other fields of CARD.
    """
    origin = "trained with tinygpt" if step else "with these settings of tinygpt, and no step of training by them"
    steps = f"Its weights are those of step {step:,}. " if step else ""
    if earlier_settings:  # the command alone would train another model
        steps += f"The run was resumed, and had before: {earlier_settings}. "
    measured = "It was not evaluated."
    if "val_bpb" in figures:
        error = f" ± {figures['val_bpb_stderr']:.4f}" if "val_bpb_stderr" in figures else ""
        measured = f"On held-out text: {figures['val_bpb']:.4f}{error} bits/byte, {figures['val_loss']:.4f} nats/token."
    # Indented after each line end of Markdown, so that it stays a block of code.
    block = "\n".join(f"    {line}" for line in re.split("\r\n|\r|\n", sample))
    new_tokens = min(200, block_size - 1)  # beside the <|endoftext|>
    texts = {"sample": block, "figures": measured, "kind": kind, "loader": tokenizer_loader(kind)}
    texts |= {"origin": origin, "steps": steps}
    return CARD.format(block_size=block_size, new=new_tokens, **texts, **values)
