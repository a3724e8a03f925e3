"""train.py's command line, with groups of settings and sweeps.

--help and mistakes in the arguments are answered at once, others after the import of Hydra (cli/composition.py), few
after torch's (cli/with_torch.py).
"""

import sys
from types import ModuleType

from cli.command import help_entry, help_text
from cli.overrides import CONF, GROUPS, SWEEP, check_typed
from common.mistakes import mistakes_explained
from common.settings import parse_overrides
from training.config import TrainConfig

SHOWN = (["job"], ["hydra"], ["all"])  # the settings that --cfg shows


def composition() -> ModuleType:
    """Return cli/composition.py, which imports Hydra."""
    from cli import composition

    return composition


def run_train_command() -> None:
    """Train with the settings that were typed: cli.command.run_command() with Hydra's groups and sweeps."""
    with mistakes_explained(lambda error: composition().explain(error)):
        arguments = sys.argv[1:]
        if {"--help", "-h"} & set(arguments):
            print(help_text(TrainConfig, CONF.parent / "train.py", groups_help()), flush=True)
        elif arguments[:1] == ["-sc"] or (arguments[:1] == ["--cfg"] and arguments[1:2] in SHOWN):
            composition().ask_hydra(arguments)
        else:
            is_sweep = bool(set(SWEEP) & set(arguments))
            overrides = [argument for argument in arguments if argument not in SWEEP]
            typed = parse_overrides(overrides)
            check_typed(typed, is_sweep)
            if is_sweep:
                composition().sweep(overrides, typed)
            else:
                composition().run_single(typed)


def groups_help() -> str:
    """Return the part of --help about the groups of conf/ and about sweeps."""
    options = {group: sorted(path.stem for path in (CONF / group).iterdir()) for group in GROUPS}
    groups = "\n".join(help_entry(group, " ".join(names), 15) for group, names in options.items())
    sweep = "Sweeps: -m tries every combination of values separated by commas, as in  "
    about = f"Choose a group's option with GROUP=OPTION; conf/GROUP/OPTION.yaml is what it sets:\n\n{groups}\n\n"
    return f"{about}{sweep}python train.py -m model.n_head=2,4 seed=1,2\n\n"
