"""The classes that Hydra loads by name for a sweep: sweepers, and a callback between jobs.

conf/ has their names. Hydra makes a sweeper of a class only if it is in the namespace package hydra_plugins, which is
found because the checkout is on the path. At every start Hydra imports the modules there, but not those whose names
begin with an underscore. A single run does without sweeps, so this is one: conf/train.yaml's callback brings it for a
sweep.
"""

import gc
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

import sweeps.decide
import sweeps.grid
import sweeps.search
from common.threads import threads_asked
from sweeps.leaderboard import write_leaderboard


class Grid(sweeps.grid.Grid):
    """hydra/sweeper=grid."""


class Decide(sweeps.decide.Decide):
    """hydra/sweeper=decide."""


class Search(sweeps.search.Search):
    """hydra/sweeper=optuna, or that of another package."""


class AfterJob(Callback):
    """Frees a job's memory and rewrites the leaderboard.

    At the start of a sweep it puts Search around the sweeper of a package. A parallel launcher calls on_job_end() in
    the job's own process.
    """

    def __init__(self) -> None:
        # At the start of each sweep, before its sweeper is made: a job of joblib in this process makes a new registry.
        for sweeper in (Grid, Decide, Search):
            Plugins.instance().register(sweeper)

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        asked = threads_asked()
        if asked and config.hydra.runtime.choices["hydra/launcher"] == "joblib":
            # torch takes MKL's number before OpenMP's, and joblib gives its workers one of MKL's, unless there is one.
            os.environ.setdefault("MKL_NUM_THREADS", str(asked))
        sweeper = config.hydra.sweeper
        if not sweeper._target_.startswith(f"{__name__}."):
            with read_write(config.hydra), open_dict(config.hydra):  # 1.4 gives it flags of its own
                search = {"_target_": f"{__name__}.Search", "_recursive_": False}  # it makes the package's itself
                config.hydra.sweeper = search | {"of_package": OmegaConf.to_container(sweeper)}

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        if config.hydra.mode != RunMode.MULTIRUN:
            return
        # The frames of an exception hold the job's model. It may be its own cause.
        error = sweeps.grid.error_of(job_return)
        cleared: set[int] = set()
        while error is not None and id(error) not in cleared:
            cleared.add(id(error))
            traceback.clear_frames(error.__traceback__)
            error = error.__cause__ or error.__context__
        if "torch._dynamo" in sys.modules:  # compiled code
            sys.modules["torch._dynamo"].reset()
        gc.collect()
        torch = sys.modules.get("torch")
        if torch and torch.cuda.is_available():
            torch.cuda.empty_cache()
        if os.environ.get("RANK", "0") == "0":
            write_leaderboard(Path(config.hydra.sweep.dir))
