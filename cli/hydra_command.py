"""train.py's command line, with groups of settings and sweeps.

--help and mistakes in the arguments are answered at once, others after the import of Hydra (cli/composition.py), few
after torch's (cli/with_torch.py).
"""

from types import ModuleType

from cli.command import answer
from cli.overrides import CONF, GROUPS, SWEEP, check_options, check_typed, check_wandb_sweep, take_folder
from common.errors import SettingsError
from common.settings import parse_overrides, setting_hints, tell_repeated
from training.config import TrainConfig

SHOWN = (["job"], ["hydra"], ["all"])  # the settings that --cfg shows
COMPLETION = ("-sc", "--shell-completion")  # of a shell, by Hydra
COMPLETES = ("install=", "uninstall=", "query=")


def composition() -> ModuleType:
    """Return cli/composition.py, which imports Hydra."""
    from cli import composition

    return composition


def run_train_command() -> None:
    """Train with the typed settings: one run, or a sweep with -m."""
    script = CONF.parent / "train.py"
    answer(TrainConfig, script, start, groups=group_options, explain=lambda error: composition().explain(error))


def start(arguments: list[str]) -> None:
    """Run what is typed after train.py: a run, a sweep, or --cfg."""
    asked = arguments[arguments.index("--cfg") + 1 :] if "--cfg" in arguments else []
    completes = arguments[:1] and arguments[0] in COMPLETION
    if completes and not "".join(arguments[1:2]).startswith(COMPLETES):
        raise SettingsError(f"{' '.join(arguments[:2])} completes nothing", "type -sc install=bash, zsh or fish")
    if asked[:1] in SHOWN or completes:
        composition().show([argument for argument in arguments if argument not in SWEEP])
        return
    if "--cfg" in arguments:
        raise SettingsError(f"--cfg {' '.join(asked[:1])}".rstrip() + " shows nothing", "type --cfg job, hydra or all")
    arguments, searched = take_folder(arguments)
    is_sweep = bool(set(SWEEP) & set(arguments))
    overrides = [argument for argument in arguments if argument not in SWEEP]
    typed = parse_overrides(overrides, [*GROUPS, *setting_hints(TrainConfig)])
    tell_repeated(overrides)
    check_typed(typed, is_sweep)
    check_wandb_sweep(typed)
    check_options(typed)
    if is_sweep:
        composition().sweep(overrides, typed, searched)
    else:
        composition().run_single(typed, searched)


def group_options() -> dict[str, tuple[str, str]]:
    """Return each group of conf/, as GROUP=DEFAULT, and its options, separated by spaces.

    A group without a default has the word OPTION in its place. Hydra's groups have their meaning behind the options.
    """
    defaults = {
        "data": "stdlib",
        "model": "tiny",
        "tokenizer": "bpe",
        "optimizer": "muon",
        "schedule": "warmup_stable_decay",
        "hydra/sweeper": "grid",
    }
    meanings = {
        "hydra/sweeper": ". How -m, a sweep or multirun, chooses its jobs. --cfg hydra shows the settings of Hydra.",
        "hydra/launcher": ". How they run: one after the other without it. docs/sweeps.md explains both.",
    }
    found = {}
    for group in (*GROUPS, *meanings):
        options = " ".join(sorted(path.stem for path in (CONF / group).iterdir()))
        found[group] = f"{group}={defaults.get(group, 'OPTION')}", options + meanings.get(group, "")
    return found
