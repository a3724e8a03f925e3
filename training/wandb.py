"""Weights & Biases, beside our own files."""

import logging
import os
import shlex
from dataclasses import asdict
from typing import Literal, cast

from common.errors import SettingsError, first_line
from runs.metrics import Row, scalars
from training.config import IN_WANDB_SWEEP
from training.logger import Logger
from training.run import Run

log = logging.getLogger("tinygpt")


def check_key() -> None:
    """SettingsError when wandb.mode=online has no API key; asks for none, because nobody may be there to answer."""
    import wandb  # a second, and few runs ask for it

    try:
        if wandb.login(prompt=False, verify=False):
            return
        problem = "finds no API key"
    except wandb.Error as error:
        problem = f"cannot log in ({first_line(error)})"
    remedy = "run `wandb login` once, set WANDB_API_KEY, or choose wandb.mode=offline"
    raise SettingsError(f"wandb.mode=online {problem}", remedy)


class Wandb(Logger):
    """A run at wandb, the same one when the run is resumed.

    Every row is sent with our own step, so that the parts of a resumed run meet. wandb takes increasing steps
    only, so what is trained again, because a kill came after the last checkpoint, is not logged twice.
    """

    def __init__(self, run: Run) -> None:
        import wandb

        self.run, settings = run, run.config.wandb
        self.session = wandb.init(
            # A wandb sweep has a project; entity and tags wandb takes from the environment by itself.
            project=settings.project or os.environ.get("WANDB_PROJECT") or (None if IN_WANDB_SWEEP else "tinygpt"),
            entity=settings.entity,
            tags=settings.tags,
            name=(settings.name or os.environ.get("WANDB_NAME") or run.directory.name)[:128],  # the most it takes
            group=settings.group and settings.group[:128],
            job_type="train",
            dir=str(run.directory),
            mode=cast(Literal["offline", "online"], settings.active_mode),
            config=asdict(run.config),
            id=run.progress.wandb_id,
            resume="allow",
            reinit="create_new",  # never a part of another run of this process
            settings=wandb.Settings(silent=True, console="off"),
        )
        run.progress.wandb_id = self.session.id
        self.samples = wandb.Table(columns=["step", "prompt", "text"], log_mode="INCREMENTAL")

    def on_row(self, row: Row, sample: str) -> None:
        self.session.log(dict(scalars(row)), step=row["step"])
        if sample:
            self.samples.add_data(row["step"], self.run.config.sample_prompt, sample)
            self.session.log({"samples": self.samples}, step=row["step"])

    def on_end(self, error: BaseException | None) -> None:
        """End wandb's run, so that nothing is left running, and say where it is."""
        import wandb

        try:
            if (page := self.run.directory / "report.html").is_file():
                self.session.log({"report": wandb.Html(str(page), inject=False)}, step=self.run.progress.step)
        finally:
            code = error.code if isinstance(error, SystemExit) else error is not None
            self.session.finish(exit_code=int(code) if isinstance(code, int) else 1)
        offline = f"wandb sync {shlex.quote(str(self.run.directory / 'wandb'))}/offline-run-*-{self.session.id}*"
        log.info("wandb     %s", offline if self.session.offline else self.session.url)
