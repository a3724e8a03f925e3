"""Weights & Biases beside our own files: when it fails, it says so once and the run goes on."""

from __future__ import annotations

import functools
import logging
import shlex
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from errors import SettingsError

if TYPE_CHECKING:
    from training.run import Run

log = logging.getLogger("tinygpt")

LONGEST_NAME = 128  # characters that wandb takes


def check_wandb_key() -> None:
    """SettingsError when wandb.mode=online has no API key; asks for none, because nobody may be there to answer."""
    import wandb

    try:
        if wandb.login(prompt=False, verify=False):
            return
        problem = "finds no API key"
    except wandb.Error as error:
        problem = f"cannot log in ({_first_line(error)})"
    raise SettingsError(
        f"wandb.mode=online {problem}: run `wandb login` once, set WANDB_API_KEY, or choose wandb.mode=offline."
    )


def _once(method: Callable[..., None]) -> Callable[..., None]:
    """Make a method of WandbLog end the log, and not the run, when wandb raises anything."""

    @functools.wraps(method)
    def guarded(self: WandbLog, *args: Any, **kwargs: Any) -> None:
        if not self.session:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.give_up(error)

    return guarded


class WandbLog:
    """A run at wandb.

    Every row has our own step, so that the parts of a run that was resumed meet. wandb takes steps that
    increase only: what is trained again, because a kill came after the last checkpoint, it has already.
    """

    def __init__(self, run: Run) -> None:
        """Start one, or go on with the one that `run.progress.wandb_id` names."""
        self.session = self.samples = None
        try:
            self._start(run)
        except Exception as error:
            self.give_up(error)

    def _start(self, run: Run) -> None:
        import wandb

        settings, progress = run.config.wandb, run.progress
        self.session = wandb.init(
            project=settings.project,
            name=_shortened(settings.name or run.directory.name),
            group=_shortened(settings.group) if settings.group else None,
            job_type="train",
            dir=str(run.directory),
            mode=settings.mode,
            config=asdict(run.config),
            id=progress.wandb_id,
            resume="allow",
            reinit="create_new",  # never a part of another run of this process
            settings=wandb.Settings(silent=True, console="off"),
        )
        progress.wandb_id = self.session.id
        self.samples = wandb.Table(columns=["step", "prompt", "text"], log_mode="INCREMENTAL")

    @_once
    def log(self, row: dict[str, Any]) -> None:
        """Log a row of metrics.jsonl; what is not a single number becomes one for each layer and head."""
        self.session.log(dict(_scalars(row)), step=row["step"])

    @_once
    def sample(self, step: int, prompt: str, text: str) -> None:
        """Add a row to the table of what the model wrote."""
        self.samples.add_data(step, prompt, text)
        self.session.log({"samples": self.samples}, step=step)

    @_once
    def picture(self, path: Path, step: int) -> None:
        """Log a picture, if it could be drawn."""
        import wandb

        if path.exists():
            self.session.log({f"pictures/{path.stem}": wandb.Image(str(path))}, step=step)

    @_once
    def finish(self, exit_code: int) -> None:
        """End the run, so that nothing is left running, and say where it is."""
        session, self.session = self.session, None
        try:
            where = sync_command(Path(session.settings.sync_dir), session.id) if session.offline else session.url
        finally:
            session.finish(exit_code=exit_code)
        log.info("wandb     %s", where)

    def give_up(self, error: Exception) -> None:
        """Say once that there is no more wandb, and end what is there of it."""
        log.error("wandb failed (%s); training goes on without it.", _first_line(error))
        session, self.session = self.session, None
        if session:
            try:
                session.finish(exit_code=1)
            except Exception as again:
                log.debug("nor could wandb be ended: %s", again)


def sync_command(folder: Path, wandb_id: str) -> str:
    """What uploads an offline run, with the parts that were written before it was resumed."""
    names = (f"offline-run-*-{wandb_id}", f"offline-run-*-{wandb_id}-*")  # the second of two in one second
    parts = sorted(part for name in names for part in folder.parent.glob(name))
    return "wandb sync " + shlex.join(map(str, parts or [folder]))


def _scalars(row: dict[str, Any]):
    for name, value in row.items():
        if name == "step":
            continue
        if not isinstance(value, list):
            yield name, value
            continue
        for layer, of_layer in enumerate(value):
            if not isinstance(of_layer, list):
                yield f"{name}/layer_{layer}", of_layer
                continue
            for head, number in enumerate(of_layer):
                yield f"{name}/layer_{layer}_head_{head}", number


def _shortened(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
