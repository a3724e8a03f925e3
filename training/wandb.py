"""Logger for Weights & Biases."""

import logging
import os
import shlex
import sys
from pathlib import Path
from typing import Literal, cast

from common.errors import SettingsError, first_line
from common.settings import WANDB_SWEEP
from runs.metrics import Row, scalars
from training.logger import Logger
from training.run import Run

log = logging.getLogger("tinygpt")
FINISH_TIMEOUT = 120
"""Seconds for which the end of a run waits for wandb's server; wandb itself would wait for ever."""
TAKEN = set[str]()
"""The values of WANDB_RUN_ID that runs of this process have taken."""


def keep_messages(folder: Path) -> None:
    """Let wandb's server keep its messages in a folder if the home folder cannot have them.

    It would print them, as for the user of a container.
    """
    cache = Path(os.path.expanduser("~/.cache"))  # noqa: PTH111  # which does not fail where there is no home
    if not os.access(cache if cache.exists() else cache.parent, os.W_OK):
        os.environ.setdefault("WANDB_CACHE_DIR", str(folder.resolve()))


def check_key() -> None:
    """Raise SettingsError if wandb.mode=online has no API key."""
    import wandb  # takes a second, and few runs need it

    # Without a prompt, because nobody may be there to answer.
    try:
        if wandb.login(prompt=False, verify=False):
            return
        problem = "finds no API key"
    except wandb.Error as error:
        problem = f"cannot log in ({first_line(error)})"
    remedy = "run `wandb login` once, set WANDB_API_KEY, or choose wandb.mode=offline"
    raise SettingsError(f"wandb.mode=online {problem}", remedy)


class Wandb(Logger):
    """Sends a run to wandb; a resumed run continues the same one there.

    Rows are logged under the run's own step. wandb ignores a step that is not above the last one: so it has no step
    twice after a kill, although the run trains some again. If these have other values, tell_first_values() says so.
    """

    writes = "wandb"

    def __init__(self, run: Run) -> None:
        import wandb

        self.run = run
        settings = run.config.wandb
        # Leave the project to a wandb sweep, which sets it. wandb itself reads the others from the environment.
        project = settings.project or os.environ.get("WANDB_PROJECT") or (None if WANDB_SWEEP else "tinygpt")
        name = settings.name or os.environ.get("WANDB_NAME") or run.directory.name
        run_id = os.environ.get("WANDB_RUN_ID")
        if run_id and not run.progress.wandb_id:
            if run_id in TAKEN:  # as by an earlier cell of a notebook, whose run this one would overwrite
                raise SettingsError(f"WANDB_RUN_ID={run_id} is an earlier run of this process", "unset WANDB_RUN_ID")
            TAKEN.add(run_id)
        # wandb would take a temporary folder in place of one that is not there, or is closed.
        self.folder = Path(os.environ.get("WANDB_DIR") or run.directory).expanduser()
        self.folder.mkdir(parents=True, exist_ok=True)
        if not os.access(self.folder, os.R_OK | os.W_OK):
            raise SettingsError(f"WANDB_DIR={self.folder} may not be written to", "name another folder")
        keep_messages(self.folder)
        self.hooks = sys.exit, sys.excepthook  # wandb takes their place, and does not give it back
        self.session = wandb.init(
            project=project,
            entity=settings.entity,
            tags=settings.tags,
            notes=settings.notes,
            name=name[:128],  # wandb takes no more
            group=settings.group and settings.group[:128],
            job_type=os.environ.get("WANDB_JOB_TYPE") or "train",
            dir=str(self.folder),
            mode=cast(Literal["offline", "online"], settings.active_mode),
            config=run.settings,
            id=run.progress.wandb_id,
            resume="allow",
            reinit="create_new",  # not a part of an earlier run of this process
            settings=wandb.Settings(
                silent=True, console="off", finish_timeout=FINISH_TIMEOUT, finish_timeout_raises=True
            ),
        )
        run.progress.wandb_id = self.session.id
        self.samples = wandb.Table(columns=["step", "prompt", "text"], log_mode="INCREMENTAL")

    def on_row(self, row: Row, sample: str) -> None:
        self.session.log(dict(scalars(row)), step=row["step"])
        progress = self.run.progress
        if "val_loss" in row and row["step"] == progress.best_step:  # the summary has the last value of each name
            best = {f"best_{name}": value for name, value in scalars(row) if name.startswith("val_")}
            self.session.summary.update({"best_step": row["step"], **best})
        if sample:
            self.samples.add_data(row["step"], self.run.config.sample_prompt, sample)
            self.session.log({"samples": self.samples}, step=row["step"])

    def on_end(self, error: BaseException | None) -> None:
        """Upload the page, end wandb's run, and log its place."""
        import wandb

        page = self.run.directory / "report.html"
        try:
            if page.is_file():
                self.session.log({"report": wandb.Html(str(page), inject=False)}, step=self.run.progress.step)
        finally:
            # Without finish() the run would stay open.
            try:
                self.session.finish(exit_code=int(error is not None))
            except TimeoutError as timeout:
                uploads = f"wandb sync --include-online {self.files('run')}"
                reason = f"its server has not taken all within {FINISH_TIMEOUT} s: {uploads} uploads it later"
                raise TimeoutError(reason) from timeout
            finally:
                sys.exit, sys.excepthook = self.hooks
        offline = f"wandb sync {self.files('offline-run')}"
        log.info("wandb     %s", offline if self.session.offline else self.session.url)

    def files(self, kind: str) -> str:
        """Return the glob of wandb's folders of the run; kind: the beginning of their names."""
        return f"{shlex.quote(str(self.folder / 'wandb'))}/{kind}-*-{self.session.id}*"
