"""The frame of the four commands: --help, the settings, and the end of a mistake.

cli/hydra_command.py adds train.py's groups of settings and its sweeps.
"""

import ast
import inspect
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise, takewhile
from pathlib import Path
from typing import TypeVar

from common.console import is_kernel
from common.errors import SettingsError
from common.mistakes import mistakes_explained
from common.settings import (
    COMMANDS,
    from_arguments,
    remedy_for_unknown,
    settings_in,
    tell_repeated,
    typed_default,
)
from common.threads import keep_all_threads, sleep_at_barriers
from generation.config import EvalConfig, SampleConfig
from interop.config import ExportConfig
from training.config import TrainConfig

Schema = TypeVar("Schema")
COMMANDS |= {"train.py": TrainConfig, "sample.py": SampleConfig, "eval.py": EvalConfig, "export.py": ExportConfig}

# The settings to know first, which --help shows under these headings; the commands without an entry show all.
FIRST = {
    "TrainConfig": {
        "Text": "data data.path tokenizer tokenizer.vocab_size",
        "Model": "attention model model.n_layer model.n_head model.n_embd model.block_size",
        "Training": "batch_size max_steps max_minutes optimizer.lr eval_interval device seed",
        "Runs": "experiment run_dir resume init_from dry_run wandb.mode",
    },
    "SampleConfig": {
        "Model": "checkpoint device",
        "Prompt": "prompt prompt_file prompts results interactive",
        "Sampling": "temperature top_k top_p max_new_tokens stop num_samples seed",
    },
}
COLUMN = 30  # where the meanings begin


def run_command(schema: type[Schema], function: Callable[[Schema], object], decodes: bool = False) -> None:
    """Answer what is typed after the script of `function`, which gets the checked settings.

    decodes: whether most of the work is small products, for which threads had better not sleep.
    """

    script = Path(inspect.getfile(function))

    def start(arguments: list[str]) -> None:
        config = from_arguments(schema, arguments)
        tell_repeated(arguments, is_sweep=False)
        refuse_torchrun(script.name)
        from training.device import limit_threads  # imports torch: mistakes in the settings do not wait for it

        limit_threads()
        function(config)

    answer(schema, script, start, sleeps=not decodes)


def refuse_torchrun(command: str) -> None:
    """Raise SettingsError if torchrun started several processes: each would do all the work."""
    size = os.environ.get("WORLD_SIZE", "1")
    if "TORCHELASTIC_RUN_ID" in os.environ and size != "1":
        problem = f"{command} works in one process, and torchrun has started {size}"
        raise SettingsError(problem, f"type python {command} in place of torchrun")


def answer(
    schema: type,
    script: Path,
    start: Callable[[list[str]], object],
    *,
    groups: Callable[[], dict[str, tuple[str, str]]] = dict,
    explain: Callable[[BaseException], str | None] = lambda error: None,
    sleeps: bool = True,
) -> None:
    """Answer what is typed after `script`: show --help, or call start(arguments).

    A person's mistake ends in one sentence on stderr and exit status 1. Nothing here imports torch.

    groups: returns the default and the options of each group of conf/; explain: returns the sentence for a library's
    exception; sleeps: whether idle threads of OpenMP sleep soon.
    """
    keep_all_threads()  # before torch is imported, as the next
    if sleeps:
        sleep_at_barriers()
    with mistakes_explained(explain):
        arguments = sys.argv[1:]
        refuse_removed_folder()
        if is_kernel():  # the code of a command, pasted into a cell
            remedy = f"type %run {script.name} NAME=VALUE, or call functions as docs/tour.ipynb does"
            raise SettingsError("a cell has the arguments of the notebook's kernel", remedy)
        if {"--help", "-h"} & {*arguments}:
            print(help_text(schema, script, arguments, groups()))
        else:
            start(arguments)
        sys.stdout.flush()  # a full disk is a mistake too


def refuse_removed_folder() -> None:
    """Raise SettingsError if the folder in which the command is typed is not there any more."""
    try:
        Path.cwd()
    except FileNotFoundError:
        problem = "the folder in which this command is typed was removed"
        raise SettingsError(problem, 'type cd "$PWD" if there is a new one of its name, or go to another') from None


def help_text(
    schema: type,
    script: Path,
    arguments: list[str],
    groups: dict[str, tuple[str, str]],
) -> str:
    """Return the text of --help: the script's docstring, then settings with their meanings.

    --help shows the settings that FIRST names, --help all shows all, and --help WORD those with the word in their name
    or meaning; if there are none SettingsError is raised. groups: the default and the options of each group of conf/.
    """
    about = ast.get_docstring(parsed(script.read_text(encoding="utf-8"))) or ""  # python -OO drops __doc__
    entries = groups | {name: (f"{name}={default}", meaning) for name, default, meaning in described(schema)}
    arguments = [*takewhile(lambda argument: argument[:1] != "#", arguments)]  # zsh hands on a comment
    asked = " ".join(argument for argument in arguments if argument[:1] != "-" and "=" not in argument)
    first = FIRST.get(schema.__name__)

    # Choose the sections, {heading: names}.
    if asked and asked != "all":
        found = [name for name, texts in entries.items() if asked.lower() in " ".join(texts).lower()]
        if not found:
            remedy = remedy_for_unknown(asked, [*entries])
            raise SettingsError(f"--help {asked}: no setting has this in its name or meaning", remedy)
        sections = {f"Settings that mention {asked}": found}
    elif first and not asked:
        sections = {heading: names.split() for heading, names in first.items()}
        about += "\n\nThe settings to know first. --help all: all of them; --help WORD: those that mention a word."
    else:
        sections = {"Settings and their defaults": [*entries]}

    # Print them. Whoever asks for a word reads the whole meaning, others its first sentence.
    lines = [textwrap.fill(line, help_width()) for line in about.split("\n")]
    for heading, names in sections.items():
        lines += ["", heading]
        for name in names:
            typed, meaning = entries[name]
            lines.append(help_entry(typed, meaning if asked and asked != "all" else first_sentence(meaning)))
    return "\n".join(lines)


def help_width() -> int:
    """Return how many columns --help may use."""
    return max(20, min(shutil.get_terminal_size((120, 24)).columns, 120))


def help_entry(typed: str, meaning: str) -> str:
    """Return a setting with its meaning at its right, or below it if there is no room."""
    indent = " " * (COLUMN if help_width() >= 80 else 4)
    filled = textwrap.fill(meaning, help_width(), initial_indent=indent, subsequent_indent=indent)
    is_beside = len(typed) + 2 < len(indent)
    return f"  {typed:<{COLUMN - 2}}{filled[COLUMN:]}" if is_beside else f"  {typed}\n{filled}"


def first_sentence(text: str) -> str:
    """Return a text up to the first period that ends a sentence."""
    return re.split(r"(?<=\.) (?=[A-Z])", text, maxsplit=1)[0]


def described(schema: type) -> Iterator[tuple[str, str, str]]:
    """Yield the name, default and meaning of every setting."""
    for name, field, owner in settings_in(schema):
        yield name, typed_default(field), setting_docs(owner)[field.name]


def parsed(source: str) -> ast.Module:
    """Return the syntax tree of a module with its docstrings, which ast.parse() drops under -OO."""
    tree = compile(source, "<source>", "exec", ast.PyCF_ONLY_AST, optimize=0)
    assert isinstance(tree, ast.Module)
    return tree


@cache
def setting_docs(schema: type) -> dict[str, str]:
    """Return the docstring under each field of a dataclass and its bases, on one line each."""
    docs = {}
    for kind in reversed(schema.__mro__[:-1]):
        (body,) = parsed(textwrap.dedent(inspect.getsource(kind))).body
        assert isinstance(body, ast.ClassDef)
        for field, text in pairwise(body.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(field.target, ast.Name):
                docs[field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return docs
