"""Sweeps: each combination of values is a job, and the jobs' folder has a leaderboard."""

import errno
import json
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException

from common.errors import SettingsError, format_value, mend
from common.text import flat, hydra_quoted, plural, quote, visible
from runs.directory import in_order, settings_of_result, trained_settings, written_settings
from runs.origin import PROJECT_HASH
from runs.summary import JOB, fail_job, has_run, jobs_of_sweep, key_of, read_job, read_summary, refuse_other_run
from sweeps.compositions import Compositions, writable
from sweeps.hydra_versions import read_once
from sweeps.leaderboard import DEFAULTS, shown, write_leaderboard
from sweeps.ranges import check_values, combinations, computed_in_job, expand_ranges, parse_values, range_text
from sweeps.sweep import (
    check_launcher,
    check_places,
    fix_folder,
    in_the_way,
    kept_folder,
    settings_asked,
    shared_folder,
)
from training.config import TrainConfig

LONGEST_NAME = 255  # bytes of a name in a folder, on nearly every disk
OF_A_JOB = ("seed", "device", "model.vocab_size", "init_from")
"""The settings that a job itself chooses, completes or, when it goes on, leaves out."""
VARIANTS = (
    """write 'hydra.sweeper.variants=["NAME=VALUE",…]', or on Windows "hydra.sweeper.variants=['NAME=VALUE',…]\""""
)


@dataclass(eq=False)
class Grid(Sweeper):
    """Runs every combination of the values given, with every variant.

    A job that fails does not end the others.
    """

    params: Any = None
    """The ranges of an experiment by name: texts, such as 1,2 or range(1,4), or lists of values."""
    variants: Any = None
    """A list of groups of overrides, each as one text."""

    def setup(
        self,
        *,
        hydra_context: HydraContext,
        task_function: TaskFunction,
        config: DictConfig,
    ) -> None:
        """Check the sweep's own settings, and make its launcher.

        task_function: has an attribute `check`, which takes the overrides of a job and a function that composes them.
        """
        self.loader: ConfigLoader = hydra_context.config_loader
        read_once(self.loader)
        self.compositions = Compositions(self.loader, config)  # before the folder is fixed
        config = writable(config)

        check_launcher(config)
        # As they are written: a ${…} is of each job's own settings, and Hydra has computed it from the sweep's.
        written: Any = OmegaConf.to_container(config.hydra.sweeper)
        self.params = written["params"]
        self.variants = written["variants"]
        given = [""] if self.variants is None else self.variants
        if isinstance(given, str) or not isinstance(given, Sequence) or not given:
            raise SettingsError(f"hydra.sweeper.variants={given} is no list of overrides", VARIANTS)
        if not isinstance(self.params or {}, Mapping):
            remedy = "leave it out, or write an experiment's values as {seed: [1, 2, 3]}"
            raise SettingsError(f"hydra.sweeper.params={self.params} is no mapping", remedy)
        for variant in given:
            if not isinstance(variant, str):
                raise SettingsError(f"hydra.sweeper.variants: {format_value(variant)} is no override", VARIANTS)
        self.groups = [[computed_in_job(word) for word in variant.split()] for variant in given]
        for override in chain.from_iterable(self.parse(group).values() for group in self.groups):
            if override.is_sweep_override():
                problem = f"hydra.sweeper.variants: {override.input_line} is several values in one variant"
                raise SettingsError(problem, "write a variant for each value")

        self.folder = fix_folder(config)
        self.go_on = hydra_quoted("hydra.sweep.dir", self.folder)
        self.places: dict[str, Sequence[str]] = {}
        self.task_function: Any = task_function
        self.config: DictConfig = config
        if config.dry_run and "submitit_folder" in config.hydra.launcher:  # whose jobs print to files
            self.launcher: Launcher = BasicLauncher()
            self.launcher.setup(hydra_context=hydra_context, task_function=task_function, config=config)
        else:
            self.launcher = Plugins.instance().instantiate_launcher(hydra_context, task_function, config)

    def sweep(self, arguments: list[str]) -> None:
        """Check all jobs, then run those that are not finished; SettingsError if some failed."""
        given = self.read(arguments)
        jobs = [self.of_variant(job, variant) for job in combinations(given.values()) for variant in self.groups]
        configs = self.check_jobs(jobs)
        planned = dict(zip(map(tuple, jobs), configs, strict=True))
        jobs = self.distinct(jobs, configs)
        self.refuse_other_code(configs)
        numbered = self.numbered(jobs, planned)
        self.tell_other_settings(numbered, planned)
        if os.environ.get("RANK", "0") == "0":
            print(f"sweep     {plural(len(jobs), 'job')}", flush=True)
        # A launcher numbers its jobs one after the other: those between two gaps go together.
        parts = [[*part] for _, part in groupby(enumerate(numbered), key=lambda pair: pair[1] - pair[0])]
        results: list[JobReturn] = []
        begun = self.as_begun(numbered)
        with kept_folder(self.config, self.folder, self.report, self.go_on):
            for part in parts:
                numbers = [number for _, number in part]
                results += self.launch([begun[number] for number in numbers], numbers[0])
        failed = sum(result.status == JobStatus.FAILED for result in results)
        if failed:
            raise SettingsError(f"{failed} of {len(jobs)} jobs failed", "the reasons are above")

    def read(self, arguments: list[str]) -> dict[str, Override]:
        """Return the overrides by name; a typed one replaces the experiment's."""
        typed = self.parse(arguments)
        both = typed.keys() & self.parse(self.groups[0])
        if both:
            raise SettingsError(f"{min(both)} is what hydra.sweeper.variants compares", f"leave it out, or {VARIANTS}")
        ranges = self.parse([f"{name}={range_text(name, value)}" for name, value in self.ranges().items()])
        self.compositions.refuse_clash(typed.values())
        self.compositions.refuse_replaced(ranges, typed)
        given = ranges | typed
        for override in given.values():
            if override.is_sweep_override():
                expand_ranges(override)
                check_values(override)
        return given

    def of_variant(self, job: Sequence[str], variant: Sequence[str]) -> list[str]:
        """Return the overrides of a job with those of a variant.

        A variant's max_steps=${floordiv:${max_steps},2} takes half as many steps as the job has without it.
        """
        others = dict(override.split("=", 1) for override in job)
        words = []
        for word in variant:
            name, _, value = word.partition("=")
            itself = f"${{{name}}}"
            if itself in value:
                without = others.get(name) or format_value(OmegaConf.select(self.config, name))
                word = word.replace(itself, without.strip("\"'"))
            words.append(word)
        return [*job, *words]

    def ranges(self) -> dict[str, Any]:
        """Return the experiment's ranges by the dotted names of their settings."""
        return flat(self.params or {})

    def parse(self, arguments: list[str]) -> dict[str, Override]:
        return {override.get_key_element(): override for override in parse_values(self.loader, arguments)}

    def check_jobs(self, jobs: Sequence[Sequence[str]]) -> list[TrainConfig | None]:
        """Return the settings of each job, and print the mistakes of combinations that cannot run.

        None for a job that cannot run, or that alone knows a value. Raises the mistake of a value that works in no job.
        """
        # Check all jobs, and note the overrides that work in some job.
        working = set[str]()
        mistakes = []
        configs: list[TrainConfig | None] = []
        for job in jobs:
            try:
                configs.append(self.check_job(job))
                working.update(job)
            except SettingsError as error:
                configs.append(None)
                mistakes.append((job, error))
        # Hydra makes the folders, and a name that no disk takes would end the sweep.
        for name in {part for place in self.places for part in Path(place).parts}:
            size = len(os.fsencode(name))
            if size > LONGEST_NAME:
                problem = (
                    f"hydra.sweep.subdir makes a folder {name[:60]}… of {size} bytes, and disks take {LONGEST_NAME}"
                )
                raise SettingsError(problem, "leave it out, or name fewer settings in it")
        # An override that works nowhere is a mistake; others only fail together.
        for job, mistake in mistakes:
            if working.issuperset(job):
                continue
            typed = as_variants(jobs, working, job, mistake.setting)
            if typed:
                raise SettingsError(mistake.problem, typed)
            raise mistake
        for reason, count in Counter(str(mistake) for _, mistake in mistakes).items():
            print(visible(f"{count} of {len(jobs)} jobs cannot run: {reason}"), flush=True)
        return configs

    def check_job(self, job: Sequence[str]) -> TrainConfig | None:
        """Compose a job as Hydra will, and return its settings; None if only the job knows a value.

        Raises SettingsError if it cannot run, or brings settings of the sweep.
        """
        return self.task_function.check(job, lambda: self.compose(job))

    def compose(self, job: Sequence[str]) -> DictConfig:
        """Compose a job as Hydra will.

        Raises SettingsError if it brings settings of the sweep, or has the folder of another job.
        """
        cfg = self.compositions.of_job(job)
        with suppress(OmegaConfBaseException):  # of a folder with the job's number, which only the job has
            # A job resolves ${hydra:…} while it runs; here ${hydra.…} has the same value.
            written: Any = OmegaConf.to_container(cfg.hydra.sweep)
            with read_write(cfg.hydra.sweep):
                cfg.hydra.sweep.subdir = str(written["subdir"]).replace("${hydra:", "${hydra.")
            place = cfg.hydra.sweep.subdir
            check_places({"hydra.sweep.subdir": place})
            if self.places.setdefault(place, job) != job:
                raise shared_folder(place)
        return cfg

    def refuse_other_code(self, configs: Iterable[TrainConfig | None]) -> None:
        """Raise SettingsError if the folder has runs of other code, unless allow_changes=true.

        A file of code= may have changed since a job failed, and not since one was finished.
        """
        if self.config.get("allow_changes"):
            return
        present = {config.code: config.code_hash for config in configs if config and config.code}
        others = set[str]()
        for folder, _ in jobs_of_sweep(self.folder):
            summary = read_summary(folder)
            if summary and summary.project_hash not in (None, PROJECT_HASH):
                others.add(f"commit={summary.commit} project_hash={summary.project_hash}")
            if summary and summary.status == "finished" and present:
                file = written_settings(folder).get("code")
                if file in present and present[file] != summary.code_hash:
                    problem = f"{self.go_on} has runs of another version of code={file}, code_hash={summary.code_hash}"
                    raise SettingsError(problem, "restore that file, name another folder, or add allow_changes=true")
        if others:
            problem = f"{self.go_on} has runs of other code ({', '.join(sorted(others))}) than this, {PROJECT_HASH}"
            raise SettingsError(problem, "restore that code, name another folder, or add allow_changes=true")

    def numbered(
        self, jobs: Sequence[Sequence[str]], configs: Mapping[tuple[str, ...], TrainConfig | None]
    ) -> dict[int, Sequence[str]]:
        """Return the jobs by their numbers, in order.

        A job that the folder has, of this command or of an earlier one, keeps its number, which names its folder; a new
        one takes the first that is free. Raises SettingsError if the folder has runs, and none of these jobs.
        configs: the settings of each job, None where the job alone knows them.
        """
        for number, job in enumerate(jobs):
            if not (self.folder / str(number) / JOB).is_file():
                refuse_other_run(self.folder / str(number), job)  # of nobody knows which job
        # Find the runs of the folder by the words of their jobs, and those of other words by their settings.
        held = {number: folder for number, (folder, _) in self.attempts().items() if has_run(folder)}
        records = {number: read_job(folder) for number, folder in held.items()}
        known = {key_of(record.overrides): number for number, record in records.items() if record}
        typed_otherwise: dict[str, int] = {}
        keys = {*map(key_of, jobs)}
        if not known.keys() >= keys:  # settings are read where they are needed
            others = held.keys() - {number for key, number in known.items() if key in keys}
            typed_otherwise = {key: number for number in sorted(others) for key in keys_of_run(held[number])}
        # Give each job the number of its run.
        found: dict[int, Sequence[str]] = {}
        new: list[Sequence[str]] = []
        for job in jobs:
            own = known.get(key_of(job))
            config = configs[tuple(job)]
            if own is None and config:
                own = typed_otherwise.get(result_key(config))
            if own is not None:
                found[own] = job
            else:
                new.append(job)
        # Of a job that alone knows a value, as by its number, the other words say which run it is.
        for job in [job for job in new if "${hydra:" in "".join(job)]:
            of_job = {override.partition("=")[0] for override in job if "${hydra:" in override}
            wanted = key_without(job, of_job)
            same = (
                number
                for number, record in sorted(records.items())
                if record and number not in found and key_without(record.overrides, of_job) == wanted
            )
            own = next(same, None)
            if own is not None:
                found[own] = job
                new.remove(job)
        if held and not found:
            refuse_other_run(held[min(held)], jobs[0], len(held))
        # New jobs take the numbers that are free.
        left = sorted({*range(len(jobs) + len(held))} - {*held, *found})
        return dict(sorted([*found.items(), *zip(left, new, strict=False)]))

    def as_begun(self, numbered: Mapping[int, Sequence[str]]) -> dict[int, Sequence[str]]:
        """Return the overrides of each job as typed when its run began, and its folder.

        Hydra would compute another folder, of a hydra.sweep.subdir with ${now:…} or ${hydra:job.id}.
        """
        begun = dict(numbered)
        for number, (folder, _) in self.attempts().items():
            record = read_job(folder)
            job = begun.get(number)
            if not (job and record):
                continue
            if key_of(record.overrides) != key_of(job):
                if not has_run(folder):
                    continue
                allowed = [override for override in job if override.startswith("allow_changes=")]
                job = [*record.overrides, *allowed]
            place = folder.relative_to(self.folder).as_posix()
            begun[number] = [*job, f"hydra.sweep.subdir={quote(place)}"]
        return begun

    def tell_other_settings(
        self, numbered: Mapping[int, Sequence[str]], configs: Mapping[tuple[str, ...], TrainConfig | None]
    ) -> None:
        """Tell of a finished job whose experiment, or another file, has changed since."""
        begun = self.attempts()
        for number, job in numbered.items():
            folder, _ = begun.get(number, (self.folder, 0))
            summary = read_summary(folder)
            record = read_job(folder)
            config = configs[tuple(job)]
            is_same = record and key_of(record.overrides) == key_of(job)
            if summary and summary.status == "finished" and config and is_same:
                planned = settings_of_result(flat(asdict(config)))
                for setting, ran in other_settings(folder, planned).items():
                    fact = f"job {number} ran {setting}={ran}, and further jobs have {shown(planned[setting])}"
                    print(visible(f"{fact}: a file of settings, or the run, was changed since."), flush=True)
                    return

    def distinct(self, jobs: list[list[str]], configs: Sequence[TrainConfig | None]) -> list[list[str]]:
        """Return the jobs, but of those with equal settings the first alone; print the others.

        A run that is counted twice would pass for two seeds.
        """
        kept: dict[Any, list[str]] = {}
        repeated = []
        for number, (job, config) in enumerate(zip(jobs, configs, strict=True)):
            key = (result_key(config), config.dry_run and config.plan.device) if config else number
            if kept.setdefault(key, job) is not job:
                repeated.append(job)
        if repeated:
            shared = set.intersection(*map(set, jobs))
            shown = [" ".join(each for each in job if each not in shared) or " ".join(job) for job in repeated[:3]]
            more = ", …" * (len(repeated) > 3)
            counted = f"{len(repeated)} of {plural(len(jobs), 'job')}"
            print(visible(f"{counted} would repeat another, and run once ({', '.join(shown)}{more})"), flush=True)
        return [*kept.values()]

    def launch(self, jobs: Sequence[Sequence[str]], number: int) -> Sequence[JobReturn]:
        """Run jobs, numbered from `number` on.

        If a worker of joblib is killed, as by a system without memory, joblib ends the others too, and does not tell
        which one it was. So the jobs under way go on one at a time, and the rest again side by side. Raises
        SettingsError if a parallel launcher gives up.
        """
        results: list[JobReturn] = []
        while len(results) < len(jobs):
            before = self.attempts()
            try:
                return [*results, *self.launch_all(jobs[len(results) :], number + len(results))]
            except WorkerKilled as error:
                begun = [at for at, attempt in self.attempts().items() if before.get(at) != attempt and at >= number]
                if not begun:
                    raise error.mistake from error
                print(visible(f"{error}: the jobs that were under way go on one at a time"), flush=True)
                results += [
                    self.launch_alone(jobs[at - number], at) for at in range(number + len(results), max(begun) + 1)
                ]
        return results

    def attempts(self) -> dict[int, tuple[Path, int]]:
        """Return the folder of each job that has begun, and when it began, by its number."""
        jobs = jobs_of_sweep(self.folder)
        return {record.number: (folder, (folder / JOB).stat().st_mtime_ns) for folder, record in jobs}

    def launch_alone(self, job: Sequence[str], number: int) -> JobReturn:
        """Run a job that a killed worker left; one that is killed again has failed."""
        folder, _ = self.attempts().get(number, (None, 0))
        record = read_job(folder) if folder else None
        if record and record.reason:  # it had failed before
            return JobReturn(_return_value=SettingsError(record.reason), status=JobStatus.FAILED)
        try:
            (result,) = self.launch_all([job], number)
            return result
        except WorkerKilled as error:
            if folder:
                fail_job(folder, error.mistake)
            print(visible(f"job {number} failed: {error.mistake}"), flush=True)
            return JobReturn(_return_value=error.mistake, status=JobStatus.FAILED)

    def launch_all(self, jobs: Sequence[Sequence[str]], number: int) -> Sequence[JobReturn]:
        """Let the launcher run jobs.

        Raises WorkerKilled if joblib lost a worker, and SettingsError if a parallel launcher gives up otherwise, or a
        file is in the place of a job's folder.
        """
        launcher = self.config.hydra.runtime.choices["hydra/launcher"]
        try:
            results = self.launcher.launch(jobs, initial_job_idx=number)
        except Exception as error:
            if isinstance(error, FileExistsError) and Path(str(error.filename)).is_relative_to(self.folder):
                raise in_the_way(error) from error
            # The basic launcher has no settings that could be wrong: show its exception as it is.
            if launcher == "basic":
                raise
            if type(error).__name__ == "TerminatedWorkerError":  # of loky, a part of joblib
                raise WorkerKilled from error
            remedy = self.remedy_for(error)
            raise SettingsError(f"hydra/launcher={launcher} gave up ({reason_of(error)})", remedy) from error
        if len(results) < len(jobs):  # as by joblib's pre_dispatch=0
            counted = f"{len(results)} of {plural(len(jobs), 'job')}"
            raise SettingsError(f"hydra/launcher={launcher} began {counted}", self.remedy_for())
        return results

    def remedy_for(self, error: Exception | None = None) -> str:
        """Return the remedy for a launcher's error, or for jobs that it has not begun."""
        launcher = self.config.hydra.runtime.choices["hydra/launcher"]
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            return f"make room in /dev/shm, which its processes share, or leave out hydra/launcher={launcher}"
        if isinstance(error, ImportError):
            return mend(launcher.partition("_")[0])
        if 'Could not detect "srun"' in str(error):  # submitit's words where there is no Slurm
            return "start it on a machine of the cluster, or type hydra/launcher=submitit_local"
        go_on = f"the same command with {self.go_on} goes on"
        summaries = (read_summary(folder) for folder, _ in jobs_of_sweep(self.folder))
        if any(summary and summary.status == "stopped" for summary in summaries):  # by a signal, as at a time limit
            return go_on
        return f"change {settings_asked(self.config, 'hydra.launcher')}; {go_on}"

    def report(self) -> str:
        """Write the results so far; return the text to print at the end."""
        return write_leaderboard(self.folder)


class WorkerKilled(Exception):
    """The process of a job was killed, not by the sweep."""

    mistake = SettingsError(
        "its process was killed, perhaps for a lack of memory",
        "lower hydra.launcher.n_jobs, or choose a smaller model or batch",
    )

    def __str__(self) -> str:
        return "a worker was killed, perhaps for a lack of memory"


def reason_of(error: BaseException) -> str:
    """Return a launcher's error in one line: the first and the last of its message.

    Between them submitit has the output of the job, a traceback or the system's words, and after them places of files.
    """
    said = [line.strip() for line in str(error).split("You can check full logs")[0].splitlines()]
    lines = [line for line in said if line.strip("-")] or [type(error).__name__]
    return ": ".join(line.strip(" .:") for line in dict.fromkeys((lines[0].removesuffix("with trace:"), lines[-1])))


def as_variants(
    jobs: Sequence[Sequence[str]],
    working: Set[str],
    refused: Sequence[str],
    setting: str,
) -> str:
    """Return the remedy for a setting that works beside some values alone: variants.

    "" if it works nowhere. working: the overrides that work in some job.
    """

    def named(job: Sequence[str], names: Set[str]) -> list[str]:
        return [override for override in job if override.partition("=")[0] in names]

    if not working & set(named(refused, {setting})):
        return ""
    barring = {override.partition("=")[0] for override in refused if override not in working}
    groups = []
    for job in jobs:
        values = named(job, barring)
        groups.append(" ".join(values + (named(job, {setting}) if working >= set(values) else [])))
    typed = f"hydra.sweeper.variants={json.dumps([*dict.fromkeys(groups)], ensure_ascii=False)}"
    return f"type {shlex.quote(typed)} in place of {' and '.join([*sorted(barring), setting])}"


def result_key(config: TrainConfig) -> str:
    """Return a key that is equal for runs with the same settings and seed."""
    return settings_key(flat(asdict(config)))


def settings_key(settings: dict[str, Any]) -> str:
    """Return the result_key() of settings by dotted names."""
    own = settings_of_result(settings)
    return json.dumps({name: in_order(name, value) for name, value in own.items()}, sort_keys=True)


def key_without(overrides: Sequence[str], names: Set[str]) -> tuple[str, ...]:
    """Return a key that is equal for jobs of the same overrides but for those of some names."""
    return key_of([override for override in overrides if override.partition("=")[0] not in names])


def keys_of_run(folder: Path) -> list[str]:
    """Return the result_key() of each setting with which a run may have been planned.

    The run has completed model.vocab_size=null. Settings that came later than the run have their defaults.
    """
    settings = DEFAULTS | (trained_settings(folder) or written_settings(folder))
    return [settings_key(settings | completed) for completed in ({}, {"model.vocab_size": None})]


def other_settings(folder: Path, planned: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of a finished run's settings that are not as planned, {name: value}."""
    ran = trained_settings(folder) or written_settings(folder)
    alike = (name for name in planned if name not in OF_A_JOB and name in ran)
    return {name: shown(ran[name]) for name in alike if shown(ran[name]) != shown(planned[name])}


def error_of(result: JobReturn) -> BaseException | None:
    """Return the exception that ended a job, None if none did."""
    # The public property, return_value, would raise it, and print the job's overrides as well (Hydra 1.3.8).
    return result._return_value if result.status == JobStatus.FAILED else None
