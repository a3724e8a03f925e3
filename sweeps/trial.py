"""A run as a trial of a search: it tells the others its losses, and ends early when theirs are much better.

hydra_plugins/optuna_search.py begins the trials; each learns from two environment variables which one it is.
"""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optuna import Study

    from training.run import Run
    from training.watch.monitor import Monitor

log = logging.getLogger("tinygpt")

JOURNAL = "search.journal"


class RunPruned(Exception):
    """A run ended early because its losses are hopeless; loss: its best so far, in nats per token."""

    def __init__(self, reason: str, loss: float) -> None:
        super().__init__(reason, loss)
        self.reason, self.loss = reason, loss

    def __str__(self) -> str:
        return self.reason


def open_study(folder: Path, seed: int = 0) -> Study:
    """The study in a search's folder: a file to which any process on any machine that sees it may append.

    seed: of the settings asked for next. With the same history they are the same, in whatever process.
    """
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    journal = str(folder / JOURNAL)
    return optuna.create_study(
        study_name="search",
        storage=JournalStorage(JournalFileBackend(journal, lock_obj=JournalFileOpenLock(journal))),
        sampler=optuna.samplers.TPESampler(seed=seed, constant_liar=True),
        pruner=optuna.pruners.PercentilePruner(75.0),
        load_if_exists=True,
    )


def report_to_search(run: Run, monitor: Monitor) -> None:
    """Report the latest evaluation in bits per byte, if the run is a trial of a search.

    Raises RunPruned, everything saved, when the best so far is in the worst quarter of what the runs that have
    finished, five at least, had at this step, and 30% of the run or more is over. Of 17 runs with learning
    rates from 0.002 to 0.2 that rule ended only such as came 11th or later; the usual one, the worse half from
    the first evaluation on, also the third, fourth, fifth and sixth best: a good high rate is slow at first.
    """
    if "TINYGPT_TRIAL" not in os.environ:
        return
    from optuna import Trial
    from optuna.trial import TrialState

    study = open_study(Path(os.environ["TINYGPT_SEARCH"]))
    number = int(os.environ["TINYGPT_TRIAL"])
    earlier = study.trials[number]
    step, bpb = run.progress.step, run.progress.metrics["val_bpb"]
    trial = Trial(study, earlier._trial_id)
    if step not in earlier.intermediate_values:  # else the run was stopped since, and went back to a checkpoint
        trial.report(bpb if math.isfinite(bpb) else math.inf, step)
    if not 0.3 <= run.share_done() < 1 or not study.user_attrs["prune"] or not trial.should_prune():
        return
    run.save(finished=True)
    run.saver.finish()
    monitor.finish()
    study.tell(number, state=TrialState.PRUNED)
    best = min([bpb, *earlier.intermediate_values.values()])
    reason = f"pruned at step {step}: {best:.4f} bits/byte is in the worst quarter of the search's runs there"
    log.info("%s", reason)
    raise RunPruned(reason, run.progress.best_loss if run.progress.best_loss is not None else math.inf)
