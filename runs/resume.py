"""Resuming: find a run, compare its settings, remove files newer than its checkpoint."""

import logging
import shlex
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from common.errors import CheckpointError, SettingsError, format_value, naming
from common.files import UNFINISHED, is_locked, keep_copies, pointed, reading, remove, replace_text, user_path
from common.text import flat, hydra_quoted, plural
from data.config import VOCABULARIES
from runs.checkpoint import (
    OPTIMIZER,
    TOKENIZER,
    WEIGHTS,
    Meta,
    checkpoints_by_step,
    checkpoints_to_try,
    code_to_type,
    first_intact,
    read_meta,
    readable,
    refuse_unknown,
    runs_by_age,
    set_aside,
    step_in_name,
    verify_checkpoint,
)
from runs.directory import LOGS, OF_THIS_INVOCATION, TABLE, in_order, open_log, plain_file
from runs.metrics import read_row
from runs.origin import PROJECT_HASH
from runs.summary import JOB, read_summary

T = TypeVar("T")
log = logging.getLogger("tinygpt")

# Settings that a resumed run may change: the run's end, its output and its hardware.
MAY_CHANGE_ON_RESUME = (
    *OF_THIS_INVOCATION,
    "code",
    "max_steps",
    "max_minutes",
    "max_flops",
    "max_skipped_steps",
    "log_interval",
    "eval_interval",
    "eval_tokens",
    "eval_batch_size",
    "checkpoint_interval",
    "keep_checkpoints",
    "sample_tokens",
    "sample_prompt",
    "patience",
    "wandb",
    "data.source",  # the fingerprint of the tokens tells whether the text is another one
    "data.path",
    "data.val_path",
    "data.cache_dir",
    "device",
    "compile",
    "deterministic",
    "recompute",
    "micro_batch_size",
)

# Settings by which a person knows a run, beside those that stay when it is resumed.
OF_A_RUN = ("data.path", "max_steps", "max_minutes", "max_flops")

# Settings of data that are paths of one machine.
PATHS = ("path", "val_path", "cache_dir")

# Settings of the model on which no weight depends. They may change with allow_changes.
WITHOUT_WEIGHTS = [
    "model.dropout",
    "model.attention_dropout",
    "model.attention_window",
    "model.score_softcap",
    "model.logit_softcap",
    "model.rope_theta",
    "model.rope_scaling",
    "model.rope_scaling_factor",
    "model.rope_trained_length",
]


class Saved(NamedTuple):
    """The checkpoint from which a run resumes, with its meta.json."""

    path: Path
    meta: Meta


def again(run: Path) -> str:
    """Return how a run is gone on with, as it is typed."""
    code = ""
    with suppress(CheckpointError):
        code = code_to_type(newest(run, read_meta), run)
    return f"{hydra_quoted('resume', run)}{code}"


def refuse_used(directory: Path) -> None:
    """Raise SettingsError if a run would replace a run, a table or other files of a directory."""
    if checkpoints_by_step(directory / "checkpoints"):
        try:
            newest(directory, read_meta)
        except CheckpointError as error:
            problem = f"run_dir={directory} already holds a run, whose checkpoints cannot be read"
            raise SettingsError(problem, "choose another, or remove it first") from error
        remedy = f"choose another, remove it first, or continue it by {again(directory)}"
        raise SettingsError(f"run_dir={directory} already holds a run", remedy)
    summary = read_summary(directory)
    if summary and summary.status == "finished":
        problem = f"run_dir={directory} holds the page of a finished run, whose checkpoints were removed"
        raise SettingsError(problem, "choose another, or remove it first")
    if not summary and not (directory / ".lock").exists():  # which a run has before its first file
        others = [name for name in ("config.yaml", "report.html") if (directory / name).exists()]
        if others:
            problem = f"run_dir={directory} has a {' and a '.join(others)} of no run, which this one would replace"
            raise SettingsError(problem, "choose another folder, or move them away")
    # A job's folder may hold other jobs, as by hydra.job.override_dirname with a / in a value.
    holds_runs = (directory / TABLE).exists() or any(directory.glob(f"*/{JOB}"))
    if holds_runs and not (directory / JOB).exists():
        problem = f"run_dir={directory} is the folder of a sweep or a table, whose page this run would replace"
        raise SettingsError(problem, "choose another")


NO_RUN = "give a run's directory, or auto; without it a run begins anew"


def find_run(
    where: str,
    run_dir: str | None,
    say: Callable[..., None] = log.info,
    init_from: str | None = None,
    wanted: dict[str, Any] | None = None,
) -> Path | None:
    """Return the directory of resume=`where`; for auto an unfinished run, or None.

    That is the newest one that has the `wanted` settings (with dotted names), else the newest of all. In run_dir itself
    a finished run is that run too: the same command again has more steps to take, or none.
    say: logs that auto has found none. init_from: for auto, what the run began with.
    """
    if where == "auto":
        folder = user_path("run_dir", run_dir) if run_dir else None
        free = []
        held = []
        damaged = []
        for run in runs_by_age([folder]) if folder else runs_by_age():
            try:
                meta = newest(run, read_meta)
            except CheckpointError:
                damaged += [run] if checkpoints_by_step(run / "checkpoints") else []
                continue
            finished = meta.progress.finished and run != folder
            if finished or not (init_from is None or began_with(init_from, run, meta)):
                continue
            if is_locked(run / ".lock"):
                held.append(run)
            elif not unlike(flat(meta.config), wanted or {}):
                if damaged:
                    say("resume=auto passes over %s, whose checkpoints cannot be read.", damaged[0])
                return run
            else:
                free.append(run)
        if free:
            return free[0]
        if folder in [*held, *damaged]:  # which is refused then
            return None
        place = f"{run_dir or 'outputs/ and multirun/'}{f' that began with {init_from}' if init_from else ''}"
        if held:
            place += f" but {held[0]}, which is in use (if Ctrl-Z halted it, fg lets it go on)"
        elif damaged:
            place += f" but {damaged[0]}, whose checkpoints cannot be read"
        say("resume=auto finds no unfinished run with a checkpoint in %s: the settings are for a new run.", place)
        return None
    run = user_path("resume", where)
    with reading("resume", where):
        if not (run / "checkpoints").is_dir():
            problem = f"resume={where} holds no run (no folder checkpoints)"
            raise SettingsError(problem, way_back(run) or way_on(run) or way_of_sweep(run) or NO_RUN)
    return run


def began_with(init_from: str, run: Path, meta: Meta) -> bool:
    """Return whether a run began with what init_from names, as far as its checkpoint tells.

    An older one that has gone on tells only that it began with weights. A run does not begin with its own.
    """
    own = meta.config.get("init_from")
    place = Path(init_from).expanduser().resolve()
    if own is None:
        return meta.progress.begun_with is not None and run.resolve() not in (place, *place.parents)
    return Path(own).expanduser().resolve() == place


def unlike(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Return the settings by which a run is known that are not as wanted.

    Both have dotted names.
    """
    return [
        name
        for name in found
        if (name in OF_A_RUN or not is_free(name))
        and name != "model.vocab_size"  # which a new run has from its text
        and name in wanted
        and in_order(name, found[name]) != in_order(name, wanted[name])
    ]


def way_back(path: Path) -> str:
    """Return how a run goes on from one of its checkpoints, "" without any or a run."""
    path = pointed(path).resolve()
    folder = next((each for each in (path, *path.parents) if each.name == "checkpoints"), None)
    if folder is None:
        return ""
    run = folder.parent
    steps = [each.name for each in checkpoints_by_step(folder)]
    if not steps:
        return ""
    remedy = f"{again(run)} goes on from its latest checkpoint"
    for step in {*steps[1:]} & {*path.relative_to(folder).parts}:
        later = [f"checkpoints/{name}" for name in steps[: steps.index(step)]]
        away = f"(cd {shlex.quote(str(run))} && mkdir -p later && mv {' '.join(later)} later)"
        remedy += f", and from {step} after {away}"
    return remedy


def way_on(path: Path) -> str:
    """Return how a checkpoint that was taken out of its run goes on, "" if `path` is none."""
    path = path.resolve()
    if not (path / "meta.json").is_file():
        return ""
    if not (path / OPTIMIZER).is_file():
        return f"{hydra_quoted('init_from', path)} begins a new run with its weights"
    meta = read_meta(path)
    run = path.with_name(f"{path.name}-run")
    step = run / "checkpoints" / f"step_{meta.progress.step}"
    moved = f"mkdir -p {shlex.quote(str(step.parent))} && mv {shlex.quote(str(path))} {shlex.quote(str(step))}"
    data = meta.config.get("data")
    texts = "".join(f" data.{name}=TEXT" for name in ("path", "val_path") if isinstance(data, dict) and data.get(name))
    return f"{hydra_quoted('resume', run)}{code_to_type(meta, run)}{texts} goes on from it after {moved}"


def way_of_sweep(path: Path) -> str:
    """Return how a sweep goes on, or one of its runs, "" if `path` is no sweep's folder."""
    if not (path / TABLE).is_file():
        return ""
    folder = hydra_quoted("hydra.sweep.dir", path)
    return f"{folder} beside the command of this sweep goes on with it, and resume= with a run in it"


def newest(run: Path, read: Callable[[Path], T], say: Callable[[str], None] = log.debug) -> T:
    """Return read(path) of a run's latest readable checkpoint; CheckpointError if there is none.

    say: logs the problems of damaged ones.
    """
    with naming("resume", str(run)):
        return first_intact(checkpoints_to_try(run / "checkpoints"), read, say)


def read_whole(path: Path) -> Saved:
    """Return an intact checkpoint; CheckpointError also if it was saved without optimizers."""
    meta = verify_checkpoint(path)
    if OPTIMIZER not in meta.files:
        raise CheckpointError("has no optimizer's state", setting="checkpoint", value=path)
    return Saved(path, meta)


def newest_intact(run: Path) -> Saved:
    """Return a run's latest intact checkpoint; warn of damaged ones."""
    try:
        return newest(run, read_whole, log.warning)
    except CheckpointError as error:
        with suppress(CheckpointError):  # perhaps somebody removed the optimizers' states alone, to save room
            path = newest(run, lambda path: verify_checkpoint(path, WEIGHTS, TOKENIZER) and path)
            error.remedy = f"{hydra_quoted('init_from', path)} begins a new run with its weights"
        raise


def is_copied(saved: Saved) -> bool:
    """Return whether the folder of a run was copied from another one that is still that run's."""
    here = saved.path.parent.parent
    home = Path(saved.meta.home)
    with suppress(CheckpointError, OSError):  # there is no such folder any more, or no run in it
        return not home.samefile(here) and newest(home, read_meta).progress.wandb_id == saved.meta.progress.wandb_id
    return False


def settings_to_go_on(run: Path, known: Collection[str], typed: Collection[str] = ()) -> dict[str, Any]:
    """Return the settings that a resumed run inherits, nested, without its paths if it moved.

    known: the dotted names of all settings; CheckpointError if the run has others. typed: those that are typed.
    """
    meta = newest(run, read_meta)
    refuse_unknown("resume", run, [name for name in flat(meta.config) if name not in known], meta)
    # A checkpoint names a file of code, which nobody may have read: it runs only if it is typed.
    settings = {name: value for name, value in meta.config.items() if name not in ("code", *OF_THIS_INVOCATION)}
    # A moved run may come from another person or machine: its paths and its wandb settings stay behind.
    if meta.home != str(run.resolve()):
        with readable(run):
            data = settings["data"].items()
            settings |= {"data": {name: value for name, value in data if name not in PATHS}}
        mode = settings.pop("wandb", {}).get("mode")
        if mode not in (None, "disabled") and "wandb.mode" not in typed:
            log.warning("%s has moved, and goes on without wandb: add wandb.mode=%s to go on with it.", run, mode)
    return settings


def check_settings(settings: dict[str, Any], saved: Meta, defaults: dict[str, Any], data: str | None = None) -> None:
    """Raise SettingsError, with all changed settings that would change the run's result.

    defaults: those of all settings; a run from before a setting existed had its default.
    data: the fingerprint of the tokens, compared with the saved one.
    """
    # Find the changes that matter.
    found = changed_settings(settings, saved, defaults)
    bound = [name for name in found if not is_free(name)]
    changed = [f"{name}={format_value(found[name][1])} (was {format_value(found[name][0])})" for name in bound]
    has_other_text = data not in (None, saved.data)
    changed += [fact_of_other_data(settings, saved)] * has_other_text
    if not changed:
        return

    # Refuse them, or warn. Weights or optimizer would not fit some of them, so nothing allows these.
    sentence = f"resume={settings['resume']} would not be the same run: {', '.join(changed)}"
    shaped = [*filter(shapes_weights, bound)]
    if shaped:
        remedy = "leave these out, or begin a new run" + remedy_in_python(flat(settings), flat(defaults), shaped)
        raise SettingsError(f"{sentence}; {', '.join(shaped)} cannot change", remedy)
    if not settings["allow_changes"]:
        anew = "; in place of resume=, init_from= begins a run on the new data with its weights" * has_other_text
        raise SettingsError(sentence, f"restore these, or set allow_changes=true to continue with the new ones{anew}")
    log.warning("%s.", sentence)


def fact_of_other_data(settings: dict[str, Any], saved: Meta) -> str:
    """Return the change in the data of a run whose fingerprint is another."""
    before, now = (flat(each) for each in (saved.config, settings))
    sources = [each.get("data.source") for each in (before, now)]
    if {*sources} & VOCABULARIES.keys():
        return "the task has changed" if sources[0] == sources[1] else f"data={sources[1]} (was {sources[0]})"
    # A moved run leaves its paths behind, and without this one a part of data.path would be held out.
    held_out = [each.get("data.val_path") for each in (before, now)]
    if (held_out[0] is None) != (held_out[1] is None):
        return f"data.val_path={format_value(held_out[1])} (was {format_value(held_out[0])})"
    return "the text or its modification time has changed"


def shapes_weights(name: str) -> bool:
    """Return whether weights or optimizer of a run would not fit another value of this setting."""
    return name.startswith(("model.", "tokenizer.", "optimizer.name")) and name not in WITHOUT_WEIGHTS


def remedy_in_python(settings: dict[str, Any], defaults: dict[str, Any], names: Collection[str]) -> str:
    """Return the end of a remedy if one of these settings is its default, or "".

    A command inherits what is not typed; TrainConfig() has its defaults.
    """
    if any(settings[name] == defaults[name] for name in names):
        where = "in Python, where settings that are left out have their defaults"
        return f"; {where}, type those of the run, which docs/library.md takes from it"
    return ""


def changed_settings(settings: dict[str, Any], saved: Meta, defaults: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that a resumed run changes, {name: (before, now)}."""
    now = flat(settings)
    before = flat(defaults) | flat(saved.config)
    # Unless it is given, the tokenizer sets the vocabulary, and is compared itself.
    if now.get("model.vocab_size") is None:
        before.pop("model.vocab_size", None)
    both = {name: (before[name], now[name]) for name in sorted(before) if name in now}
    return {name: (old, new) for name, (old, new) in both.items() if in_order(name, old) != in_order(name, new)}


def is_free(name: str) -> bool:
    """Return whether a resumed run may change this setting."""
    return f"{name}.".startswith(tuple(f"{free}." for free in MAY_CHANGE_ON_RESUME))


def earlier_settings(
    settings: dict[str, Any], saved: Meta, defaults: dict[str, Any], data: str | None, computed_in: str
) -> str | None:
    """Return what the steps of a resumed run had that later ones have not, None for nothing.

    The end of a run counts, for the learning rate's schedule follows it, and so does its code. data: the fingerprint of
    another text. computed_in: the type of the later steps, which precision=auto chooses on each machine.
    """
    found = changed_settings(settings, saved, defaults)
    ends = ("max_steps", "max_minutes", "max_flops")
    had = [f"{name}={format_value(before)}" for name, (before, _) in found.items() if name in ends or not is_free(name)]
    had += ["another version of the text"] * (data is not None)
    computed = saved.computed_on.get("precision", computed_in)
    had += [f"computed_in={computed}"] * (computed != computed_in)
    code = saved.computed_on.get("project_hash")  # None before it was kept
    had += [f"project_hash={format_value(code)}"] * (code != PROJECT_HASH)
    earlier = saved.progress.earlier_settings
    if not had:
        return earlier
    return f"{f'{earlier}, ' if earlier else ''}{' '.join(had)} until step {saved.progress.step}"


def remove_leftovers(run: Path, saved: Saved | None) -> None:
    """Remove unfinished checkpoints and the logs after `saved`; rename later checkpoints."""
    for leftover in (run / "checkpoints").glob(f".*{UNFINISHED}"):
        remove(leftover)
    if not saved:
        return
    # Later checkpoints are damaged or of other steps, or the run would resume from one.
    for checkpoint in checkpoints_by_step(run / "checkpoints"):
        if step_in_name(checkpoint) > saved.meta.progress.step:
            set_aside(checkpoint)
    for name in LOGS:
        keep_copies(run / name)
        if name == "metrics.jsonl" and saved.meta.logs.get(name):
            (run / name).touch()  # one that is gone has lost its rows, which is told
        if (run / name).exists():
            cut_log(run / name, saved.meta)


def cut_log(file: Path, saved: Meta) -> None:
    """Cut a log to what it had at a checkpoint: its size of then tells where.

    If another program has written its rows anew, those up to the step of the checkpoint remain, each once.
    """
    # Do the steps of the rows before and after that place fit? train.log has none.
    content = plain_file(file).read_bytes()
    size = saved.logs.get(file.name, len(content))
    step = saved.progress.step
    rows = {}
    end = 0
    is_as_written = size <= len(content) or file.suffix != ".jsonl"
    for line in content.splitlines(keepends=True) if file.suffix == ".jsonl" else ():
        begin = end
        end += len(line)
        row = read_row(line)
        if row is not None:
            rows[line.strip()] = row
            is_as_written &= row["step"] <= step if end <= size else row["step"] >= step and begin >= size
    if is_as_written:
        if len(content) > size:
            with open_log(file, "a") as log_file:
                log_file.truncate(size)
        return

    # Choose the rows by their steps. The evaluation of the last one may have come after the checkpoint.
    last = step + (saved.progress.evaluated == step)
    kept = [
        line
        for line, row in rows.items()
        if row["step"] < last or (row["step"] == step and row.get("val_tokens", row.get("sample")) is None)
    ]
    log.warning("%s is not as this run wrote it: %s up to step %d remain.", file, plural(len(kept), "row"), step)
    replace_text(file, "".join(f"{line.decode()}\n" for line in kept))
