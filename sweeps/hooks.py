"""What Hydra loads before a sweep (conf/train.yaml names it): our sweepers, and what is done between two jobs."""

import gc
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from sweeps.decide import Decide
from sweeps.grid import Grid
from sweeps.leaderboard import write_leaderboard
from sweeps.search import Search

# Hydra instantiates callbacks before sweepers, and sweepers only by a name under hydra_plugins. Plugins.register()
# would take the name from the class's __module__, which pickle needs to be true.
for sweeper in (Grid, Search, Decide):
    Plugins.instance().class_name_to_class[f"hydra_plugins.tinygpt.{sweeper.__name__}"] = sweeper


class AfterJob(Callback):
    """Frees what a job held and rewrites the leaderboard; a parallel launcher calls it in the job's own process."""

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        if config.hydra.mode != RunMode.MULTIRUN:
            return
        error = job_return._return_value if job_return.status == JobStatus.FAILED else None
        while error is not None:  # the frames of an exception hold the job's model
            traceback.clear_frames(error.__traceback__)
            error = error.__cause__ or error.__context__
        if "torch._dynamo" in sys.modules:  # compiled code
            sys.modules["torch._dynamo"].reset()
        gc.collect()
        if (torch := sys.modules.get("torch")) and torch.cuda.is_available():
            torch.cuda.empty_cache()
        if not config.dry_run and os.environ.get("RANK", "0") == "0":
            write_leaderboard(Path(config.hydra.sweep.dir))
