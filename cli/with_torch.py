"""The parts of train.py's command line that need torch.

cli/composition.py imports this module only where one is needed: --help and most mistakes in settings are answered
before torch, whose import takes a second.
"""

import logging
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from typing import Any

import torch

from cli.command import refuse_torchrun
from common.console import say
from common.errors import SettingsError
from common.settings import NULLS, build, setting_hints
from common.text import flat
from data.config import TokenizerConfig
from model.attention import unused_settings
from model.config import GPTConfig
from runs.plugins import run_code as run_code
from runs.resume import find_run, settings_to_go_on
from runs.resume import unlike as unlike
from training.config import TrainConfig
from training.device import limit_threads
from training.distributed import Ranks
from training.pretrained import pretrained_config, pretrained_meta
from training.start import check_start as check_start

log = logging.getLogger("tinygpt")


def inherited_settings(typed: dict[str, str], new: TrainConfig | None = None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings that resume brings, and those that are typed.

    Among the latter the run's directory takes the place of the path that was typed for it. new: the run that
    resume=auto would begin.
    """
    given = {name: value for name, value in typed.items() if value not in NULLS}
    run_dir = given.get("run_dir")
    resume = given.get("resume")
    if resume not in (None, "auto", run_dir) and run_dir:
        remedy = "leave out run_dir: a run goes on in its own"
        raise SettingsError(f"{resume=!s} and {run_dir=!s} are two folders", remedy)
    if not resume:
        return {}, typed
    say = log.info if Ranks.of_torchrun().is_first else log.debug
    values = flat(asdict(new)) if new else {}
    defaults = flat(asdict(TrainConfig()))
    wanted = {name: value for name, value in values.items() if name in typed or value != defaults[name]}
    run = find_run(resume, run_dir, say, given.get("init_from"), wanted)
    if not run:
        return {}, typed | {"resume": "null"}
    if resume == "auto" or "init_from" not in typed:  # the same command, or experiment, may have begun with init_from
        typed = typed | {"init_from": "null"}

    # A group's option that is typed, such as optimizer=adamw, replaces all inherited settings of the group.
    inherited = settings_to_go_on(run, setting_hints(TrainConfig), typed)
    inherited = {name: value for name, value in inherited.items() if name not in typed}
    if "attention" in typed and "model" in inherited:
        del inherited["model"]["attention"]
    return inherited, typed | {"resume": str(run), "run_dir": str(run)}


@cache
def settings_of_weights(where: str) -> dict[str, Any]:
    """Return the settings that come with init_from's weights.

    These are `model`, and `tokenizer` if it has a name here.
    """
    found: dict[str, Any] = {"model": asdict(pretrained_config(where))}
    meta = pretrained_meta(where)
    named = meta.config.get("tokenizer") if meta else None
    if isinstance(named, dict):
        with suppress(SettingsError):  # of another version, or written by somebody else
            found["tokenizer"] = asdict(build(TokenizerConfig, named))
    return found


def idle_model_settings(model: GPTConfig) -> dict[str, tuple[str, str]]:
    """Return the model's settings without effect, as TrainConfig.idle() does."""
    # A choice of model= may set n_head, and position=learned is the GPT's, not the attention's; none asks for nothing.
    used = {"n_head"} | ({"position"} if model.position in ("learned", "none") else set())
    idle = {f"model.{name}": ("attention", model.attention) for name in unused_settings(model) - used}
    return idle if model.ngrams else idle | {"model.ngram_rows": ("model.ngrams", "null")}


def device_of_job(device: str, number: int) -> str:
    """Return the device of job `number`: auto and cuda are dealt out in turn."""
    count = torch.cuda.device_count()
    return f"cuda:{number % count}" if device in ("auto", "cuda") and count > 1 else device


def train_or_plan(config: TrainConfig, threads: int | None = None) -> float | None:
    """Train one model and return its loss; with dry_run print the plan of the run instead.

    threads: those of a new run on a CPU, instead of as many as other programs leave.
    """
    # The rest of the script that started, imported by its name.
    from train import train, train_step
    from training.plan import plan_run

    limit_threads()
    if config.dry_run:
        refuse_torchrun("train.py dry_run=true")
        say(plan_run(train_step, config))
        return None
    return train(config, threads)
