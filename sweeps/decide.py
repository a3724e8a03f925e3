"""Decide whether a change is better, by pairs of runs with the same seed and batches.

python train.py -m hydra/sweeper=decide 'hydra.sweeper.variants=["attention=sdpa","attention=sdpa+gate"]'

The test of sweeps/evidence.py may look after every pair. docs/sweeps.md has its error rates and its power.
"""

import json
import math
import os
import random
import shlex
import shutil
import statistics
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from hydra.core.utils import JobReturn
from omegaconf import DictConfig, OmegaConf

from common.errors import SettingsError, damage_named, format_value, one_of
from common.files import read_foreign, replace_text, replacing, user_path
from common.settings import build, read_value
from common.text import flat, visible
from data.config import DataConfig
from data.prepare import has_hash, prepare
from data.texts import Source
from runs.directory import settings_of_result
from runs.metrics import finite, is_number
from runs.origin import PROJECT_HASH, commit
from runs.summary import NUMBERS, Summary, read_summary, sentence_of
from sweeps.evidence import MOST_PAIRS, confidence_sequence, cuts, judge
from sweeps.grid import VARIANTS, Grid, error_of, other_settings, result_key
from sweeps.leaderboard import (
    COLUMNS,
    VERSIONS,
    learned_before,
    literal_markdown,
    markdown_lines,
    remedy_for_parts,
    shown,
)
from sweeps.ranges import combinations
from sweeps.sweep import kept_folder
from training.config import TrainConfig

RECORD = "decide.json"
ALPHA = 0.05
"""The chance of any false better or worse, divided among the variants."""
CONFIRM_ALPHA = 0.04
"""The level of a find's second test.

"Better" is one side of each test: 100 ideas · 0.025 · 0.02 = 5%.
"""
OPEN = "open"
FAILED = "undecided, because "
LARGER = ["val_accuracy", *(column.field for column in COLUMNS if column.larger)]
TIMED = [column.field for column in COLUMNS if column.timed]
NO_METRICS = ("seed", "threads", "step", "best_step", "tokens", "val_tokens", "learned")
METRICS = [name for name in NUMBERS if name not in NO_METRICS]
"""The figures of which more or less is better."""
OF_TOKENS = ("val_loss", "tokens_per_s", "decode_tokens_per_s", "cache_bytes_per_token")
"""Figures of a token: each tokenizer has its own."""


@dataclass
class Comparison:
    """A variant's pairs with the first variant, and their verdict."""

    variant: str
    verdict: str = OPEN
    pairs: int = 0
    mean: float = math.nan
    """The mean of the differences, own metric less first."""
    median: float = math.nan
    low: float = -math.inf
    """The lower end of the confidence sequence."""
    high: float = math.inf
    seeds: list[int] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    """The metric in the first variant's runs."""
    own: list[float] = field(default_factory=list)
    """The metric in the variant's runs."""
    seconds: float = 0
    """The duration of the variant's runs."""

    def row(self, earliest: int) -> list[str]:
        """Return the variant's cells in decide.md; better and worse come from pair `earliest` on."""
        verdict = self.verdict
        if verdict == OPEN and self.pairs < earliest:
            verdict += f", neither better nor worse before pair {earliest}"
        if self.mean < self.low or self.mean > self.high:
            verdict += " for the typical pair (the pairs are skewed)"
        figures = ["–", "–", "–"]
        if self.pairs:
            figures = [f"{self.mean:+.4g}", f"{self.median:+.4g}", f"{self.low:+.4g} to {self.high:+.4g}"]
        return [name_of(self.variant), verdict, f"{self.pairs}", *figures]


@dataclass
class Record:
    """The content of decide.json: the fixed conditions of the test, and its results so far."""

    metric: str
    delta: float | None
    max_pairs: int
    first: str
    """The first variant's overrides."""
    variants: list[str]
    """The overrides of each other variant."""
    settings: list[str]
    """The overrides that all runs share, without the seed."""
    seed: int
    """The seed of the first pair."""
    alpha: float
    """The level of each comparison."""
    commit: str | None
    """The commit of the code, with -dirty if files have changed; None outside git."""
    text: str | None
    """The fingerprint of the text; None if this machine does not have it."""
    project_hash: str | None = None
    """The hash of the project's code; None in a record of an earlier version."""
    code: dict[str, Any] = field(default_factory=dict)
    """The hash of each variant's file of code=, None without one."""
    comparisons: list[Any] = field(default_factory=list)


def read_record(setting: str, folder: object) -> Record:
    """Return the decide.json of SETTING=FOLDER; SettingsError if it is missing or damaged."""
    file = user_path(setting, str(folder)) / RECORD
    fault = f"has no {RECORD} that can be read"
    remedy = "restore it, or name another folder"
    with damage_named(SettingsError, fault, remedy, setting=setting, value=folder):
        record = Record(**json.loads(read_foreign(file)))
        record.comparisons = [Comparison(**each) for each in record.comparisons]
        return record


def name_of(variant: str) -> str:
    return variant or "no change"


@dataclass(eq=False, kw_only=True)
class Decide(Grid):
    """Runs the first variant and each undecided one, with up to max_pairs seeds."""

    metric: str
    delta: float | None
    """The smallest difference that matters."""
    max_pairs: int
    give_up: int | None
    """The pair from which on a variant that is not ahead is dropped."""
    baseline: str | None
    """The folder of an earlier comparison, for the runs of the first variant."""
    confirm: str | None
    """The folder of an earlier comparison, for its better variants."""
    versions: dict[tuple[str, str], tuple[str, Any]] = field(default_factory=dict)
    """Each of VERSIONS, with the settings that it follows from: the job that was met first, and what it had."""
    learned: float = 0
    """The largest share of what is held out that the weights of a run had learned before."""
    steps: set[float] = field(default_factory=set)
    """The numbers of steps that the runs took."""

    def sweep(self, arguments: list[str]) -> None:
        """Run the pairs that are not finished.

        Raises SettingsError if a failed job left a variant undecided.
        """
        self.check(arguments)
        comparisons = [Comparison(variant) for variant in self.record.variants]
        self.record.comparisons = comparisons

        # Run the pairs, seed after seed, until all have a verdict.
        with kept_folder(self.config, self.folder, self.report, self.go_on):
            for pair in range(self.max_pairs):
                # Number 0 is the first variant, with which the others are paired.
                undecided = {number: each for number, each in enumerate(comparisons, 1) if each.verdict == OPEN}
                if undecided:
                    self.run_pairs(pair, undecided)
        failed = sum(each.verdict.startswith(FAILED) for each in comparisons)
        if failed:
            problem = f"{failed} of {len(comparisons)} variants stay undecided"
            raise SettingsError(problem, f"the reasons are above and in {self.folder / 'decide.md'}")

    def check(self, arguments: list[str]) -> None:
        """Fix the conditions of the test in self.record; SettingsError if nothing can be compared."""
        # Check the settings of the sweeper. Its jobs follow from earlier results: nothing can be planned or shared.
        for name in ("max_pairs", "give_up"):
            value = getattr(self, name)
            if (type(value) is not int or value < 2) and (name, value) != ("give_up", None):
                raise SettingsError(f"hydra.sweeper.{name}={value} must be a whole number from 2")
        if self.config.dry_run:
            raise SettingsError("dry_run=true trains nothing to compare", "leave out hydra/sweeper=decide")
        if "RANK" in os.environ:
            raise SettingsError("hydra/sweeper=decide starts runs of one process each", "leave out torchrun")
        one_of("hydra.sweeper.metric", self.metric, METRICS)
        if self.delta is not None and not (is_number(self.delta) and self.delta > 0):
            raise SettingsError(f"hydra.sweeper.delta={self.delta} must be a number above 0, or null")

        # Read the variants and the settings of all jobs, and find the level of each comparison.
        settings, seed = self.read_find(arguments) if self.confirm else self.read_settings(arguments)
        alpha = CONFIRM_ALPHA if self.confirm else ALPHA / (len(self.groups) - 1)
        fewest = math.ceil(1 - math.log2(alpha))  # n differences of one sign have a chance of 2^(1 - n)
        if not fewest <= self.max_pairs <= MOST_PAIRS:
            problem = f"hydra.sweeper.max_pairs={self.max_pairs} must be from {fewest} to {MOST_PAIRS}"
            raise SettingsError(problem, "fewer decide nothing, and the test cannot follow more")
        configs = [self.check_job(self.of_variant([*settings, f"seed={seed}"], each)) for each in self.groups]
        for config in filter(None, configs):
            self.refuse_absent(config)
        self.refuse_other_tokens([*filter(None, configs)])
        self.refuse_timed([*filter(None, configs)])
        self.base = configs[0]
        self.planned = [settings_of_result(flat(asdict(config))) if config else {} for config in configs]
        names = [" ".join(each) for each in self.groups]
        self.refuse_equal(dict(zip(names, configs, strict=True)))
        code = {name: config and config.code_hash for name, config in zip(names, configs, strict=True)}

        # Find the first pair that can end in a verdict. With a delta that is "no difference": its one-sided tests at
        # alpha are a two-sided one at 2 alpha.
        self.late = self.delta is not None
        two_sided = 2 * alpha if self.late else alpha
        self.earliest = 1 + sum(k < 0 for k in cuts(two_sided, self.max_pairs, self.late))

        # Make the record. Earlier records must agree with it: of this sweep in all but the comparisons, of a baseline
        # or a find in their code and text.
        first, *others = code
        self.record = Record(
            metric=self.metric,
            delta=self.delta,
            max_pairs=self.max_pairs,
            first=first,
            variants=others,
            settings=settings,
            seed=seed,
            alpha=alpha,
            commit=commit(),
            project_hash=PROJECT_HASH,
            text=self.fingerprint(settings),
            code=code,
        )
        if (self.folder / RECORD).exists():
            fixed = ("metric", "delta", "max_pairs", "first", "variants", "settings", "seed", "alpha", "text")
            self.agree("hydra.sweep.dir", self.folder, fixed, "name another folder")
        if self.baseline:
            same = ("first", "settings", "text")
            self.agree("hydra.sweeper.baseline", self.baseline, same, "leave it out: the first variant runs again")
        if self.confirm:
            self.agree("hydra.sweeper.confirm", self.confirm, ("text",), "find it again, then confirm it")

    def refuse_absent(self, config: TrainConfig) -> None:
        """Raise SettingsError if a run with these settings does not measure the metric."""
        asked = f"hydra.sweeper.metric={self.metric}"
        if config.data.is_task and self.metric in ("val_bpb", "val_bpb_stderr"):
            raise SettingsError(f"{asked} is a figure of texts, not of tasks", "choose val_accuracy or val_loss")
        if not config.data.is_task and self.metric == "val_accuracy":
            raise SettingsError(f"{asked} is a figure of tasks, not of texts", "choose val_bpb")
        if self.metric == "decode_tokens_per_s" and not config.sample_tokens:
            raise SettingsError(f"{asked} is not measured with sample_tokens=0", "leave sample_tokens out")

    def refuse_other_tokens(self, configs: list[TrainConfig]) -> None:
        """Raise SettingsError if the metric is of tokens, and two variants have other ones."""
        tokenizers = [config.tokenizer for config in configs if not config.data.is_task]
        if self.metric in OF_TOKENS and any(each != tokenizers[0] for each in tokenizers):
            problem = f"hydra.sweeper.metric={self.metric} is of tokens, and each tokenizer has its own"
            raise SettingsError(problem, "choose val_bpb, or variants of one tokenizer")

    def refuse_timed(self, configs: list[TrainConfig]) -> None:
        """Raise SettingsError for a baseline if a result depends on when its run takes place."""
        timed = [f"hydra.sweeper.metric={self.metric}"] if self.metric in TIMED else []
        timed += ["the end of a run with max_minutes" for config in configs if config.max_minutes]
        if self.baseline and timed:
            raise SettingsError(f"{timed[0]} depends on when a run takes place", "leave out hydra.sweeper.baseline")

    def compose(self, job: Sequence[str]) -> DictConfig:
        """Compose a job; SettingsError if its variant brings a seed, as an experiment may."""
        seed = self.compositions.composed.seed
        unseeded = [override for override in job if not override.startswith("seed=")]
        own = self.compositions.load(unseeded).seed
        if own != seed:
            culprit = self.compositions.culprit(unseeded, lambda cfg: cfg.seed == seed)
            problem = f"{culprit} brings seed={own}, which a pair has in common"
            raise SettingsError(problem, "leave it out of hydra.sweeper.variants")
        return super().compose(job)

    def refuse_equal(self, variants: dict[str, TrainConfig | None]) -> None:
        """Raise SettingsError for two variants that are the same settings."""
        known = {name: config for name, config in variants.items() if config}
        names: dict[str, str] = {}
        for name, config in known.items():
            other = names.setdefault(result_key(config), name)
            if other != name:
                problem = f"hydra.sweeper.variants: {name_of(name)!r} has the settings of {name_of(other)!r}"
                raise SettingsError(problem, "leave one out: their runs would be the same")

    def read_settings(self, arguments: list[str]) -> tuple[list[str], int]:
        """Return the overrides that all jobs share, and the seed of the first pair."""
        # There must be two different variants or more, and one value for each other setting.
        if len({*map(tuple, self.groups)}) < max(2, len(self.groups)):
            raise SettingsError("hydra/sweeper=decide compares two or more variants that differ", VARIANTS)
        given = self.read(arguments)
        if any("seed" in self.parse(variant) for variant in self.groups):
            raise SettingsError("hydra.sweeper.variants give a seed, which a pair has in common", "leave it out")
        several = [override for override in given.values() if override.is_sweep_override()]
        if several:
            raise SettingsError(f"{several[0].input_line} is more than one setting to compare under", "choose one")
        seed = given.pop("seed").value() if "seed" in given else self.config.get("seed", 1)
        (settings,) = combinations(given.values())
        return settings, read_value("seed", seed, int)

    def read_find(self, arguments: list[str]) -> tuple[list[str], int]:
        """Return the settings of the comparison to confirm, and a fresh seed.

        Its better variants become the variants of this one.
        """
        setting = f"hydra.sweeper.confirm={self.confirm}"
        if arguments or self.params or self.groups != [[]] or self.baseline:
            problem = f"{setting} brings its variants and settings, and runs its own baseline"
            raise SettingsError(problem, "leave out all others")
        find = read_record("hydra.sweeper.confirm", self.confirm)
        names = [each.variant for each in find.comparisons if each.verdict == "better"]
        if not names:
            raise SettingsError(f"{setting} has found nothing better", "there is nothing to confirm")
        self.metric = find.metric
        self.groups = [name.split() for name in (find.first, *names)]
        # The fresh seeds are a function of the find: the same command has the same ones. They differ from find to find,
        # or all would share the luck of one baseline.
        unused = find.seed + max(each.pairs for each in find.comparisons)
        return find.settings, unused + zlib.crc32(repr(names).encode()) % 10**6

    def fingerprint(self, settings: list[str]) -> str | None:
        """Return the fingerprint of the text; None if this machine does not have it."""
        job = self.loader.load_sweep_config(self.config, self.of_variant(settings, self.groups[0]))
        data = build(DataConfig, flat(OmegaConf.to_container(job.data, resolve=True)))  # type: ignore[arg-type]
        with suppress(SettingsError):  # on a cluster the text may be on other machines
            return Source(data).fingerprint
        return None

    def has_text_of(self, setting: str, folder: object) -> bool:
        """Return whether the text has the tokens that the first variant's runs of a comparison had.

        A copy has, whose fingerprint is another.
        """
        jobs = user_path(setting, str(folder)).glob("*-0")
        hashes = {summary.text_hash for summary in map(read_summary, jobs) if summary} - {None}
        if len(hashes) == 1 and self.base and not self.base.init_from:
            with suppress(SettingsError):
                return has_hash(prepare(self.base.data, self.base.tokenizer), *hashes)
        return False

    def agree(
        self,
        setting: str,
        folder: object,
        names: Iterable[str],
        remedy: str,
    ) -> None:
        """Raise SettingsError unless an earlier record has the same values and code as this one."""
        earlier = read_record(setting, folder)
        for name in names:
            before = getattr(earlier, name)
            now = getattr(self.record, name)
            if before != now and not (name == "text" and self.has_text_of(setting, folder)):
                problem = f"{setting}={folder} has {name}={format_value(before)}, not {format_value(now)}"
                again = "type what it began with, or " if setting == "hydra.sweep.dir" else ""
                raise SettingsError(problem, f"{'restore that text, or ' if name == 'text' else again}{remedy}")
        # Compare the code: the project's by its hash, for a commit does not say what a changed file does; and that of
        # the variants that are in both records.
        if earlier.project_hash != self.record.project_hash:
            ran = f"commit={earlier.commit} project_hash={format_value(earlier.project_hash)}"
            problem = f"{setting}={folder} ran other code ({ran}) than this, {self.record.project_hash}"
            raise SettingsError(problem, f"restore that code, or {remedy}")
        if any(self.record.code.get(variant, code) != code for variant, code in earlier.code.items()):
            problem = f"{setting}={folder} ran another version of the file of code="
            raise SettingsError(problem, f"restore that version, or {remedy}")
        self.record.commit = earlier.commit if setting == "hydra.sweep.dir" else self.record.commit

    def run_pairs(self, pair: int, undecided: dict[int, Comparison]) -> None:
        """Run a pair of each undecided variant, counted from 0; judge, write and print them."""
        record = self.record
        seed = record.seed + pair
        if self.baseline:
            self.copy_baseline(f"{seed}-0")
        # Run a pair in random order: a machine that slows down meanwhile then favours neither.
        numbers = [0, *undecided]
        random.Random(seed).shuffle(numbers)
        # Name the folders by seed and variant: a continued sweep finds them, whichever variants are decided by then.
        jobs = {}
        for number in numbers:
            name = f"{seed}-{number}"
            jobs[name] = self.of_variant(
                [*record.settings, f"seed={seed}", f"hydra.sweep.subdir={name}"], self.groups[number]
            )
        results = self.launch([*jobs.values()], pair * len(self.groups))
        outcomes = dict(zip(numbers, map(self.outcome, numbers, jobs, results), strict=True))
        for number, comparison in undecided.items():
            self.add_pair(comparison, seed, outcomes[0], outcomes[number])
            name, verdict, count, mean, median, between = comparison.row(self.earliest)
            figure = f"{record.metric} differs by {mean}, median {median} ({between})"
            print(visible(f"seed {seed}: {name} is {verdict}: {figure}, pair {count} of {self.max_pairs}"), flush=True)
        self.write()

    def copy_baseline(self, name: str) -> None:
        """Copy a finished run of the baseline, without its checkpoints."""
        theirs = user_path("hydra.sweeper.baseline", str(self.baseline)) / name
        summary = read_summary(theirs)
        if summary and summary.status == "finished" and not (self.folder / name).exists():
            with replacing(self.folder / name) as unfinished:
                shutil.copytree(theirs, unfinished, ignore=shutil.ignore_patterns("checkpoints"))

    def outcome(self, number: int, name: str, result: JobReturn) -> Summary | str:
        """Return the summary of a job that has the metric, or the reason why there is none."""
        error = error_of(result)
        if error:
            return f"job {name} failed: {sentence_of(error)}"
        summary = read_summary(self.folder / name)
        variant = " ".join(self.groups[number])
        # A parallel worker may have read code after it changed, and a folder without a record may hold older runs.
        if summary and summary.project_hash not in (None, self.record.project_hash):
            return f"job {name} ran other code (project_hash={summary.project_hash})"
        if summary and summary.code_hash != self.record.code[variant]:
            return f"job {name} ran another version of its code"
        # A text, the run of init_from and the machine may change meanwhile, too.
        for fact, follows in VERSIONS.items() if summary and self.planned[number] else ():
            value = getattr(summary, fact)
            asked = repr(follows.asked(self.planned[number]))
            earlier, before = self.versions.setdefault((fact, asked), (name, value))
            if before != value:
                return f"job {name} ran {fact}={format_value(value)}, and job {earlier} {format_value(before)}"
        # So may have the files of its settings, since a run of a comparison that goes on, or of a baseline.
        for setting, ran in other_settings(self.folder / name, self.planned[number]).items():
            return f"job {name} ran {setting}={ran}, not {shown(self.planned[number][setting])}"
        if summary and summary.status == "finished" and getattr(summary, self.metric) is not None:
            self.learned = max(self.learned, summary.learned or 0)
            self.steps.add(summary.step or 0)
            return summary
        return f"job {name} has no {self.metric}"

    def add_pair(
        self,
        comparison: Comparison,
        seed: int,
        first: Summary | str,
        own: Summary | str,
    ) -> None:
        """Add the outcomes of two runs to a comparison, and judge it."""
        # A text in place of a summary is the reason of a failure.
        if isinstance(first, str) or isinstance(own, str):
            comparison.verdict = f"{FAILED}{first if isinstance(first, str) else own}"
            return

        # By default, runs of different lengths are scored on different parts of the validation text.
        if self.metric.startswith("val_") and first.scored != own.scored:
            counts = f"{first.val_tokens:,.0f} and {own.val_tokens:,.0f} targets"
            remedy = remedy_for_parts((first.val_tokens, own.val_tokens))
            comparison.verdict = f"{FAILED}seed {seed} was scored on different texts ({counts}): {remedy}"
            return
        # A bpe of another text divides the same bytes into other tokens.
        if self.metric == "val_loss" and first.val_tokens != own.val_tokens:
            counts = f"{first.val_tokens:,.0f} and {own.val_tokens:,.0f}"
            remedy = "choose hydra.sweeper.metric=val_bpb"
            comparison.verdict = f"{FAILED}seed {seed} was scored on different tokens of a text ({counts}): {remedy}"
            return

        # Add the pair, then judge all of them.
        comparison.pairs += 1
        comparison.seeds.append(seed)
        comparison.first.append(getattr(first, self.metric))
        comparison.own.append(getattr(own, self.metric))
        comparison.seconds += own.seconds or 0
        differences = [ours - theirs for ours, theirs in zip(comparison.own, comparison.first, strict=True)]
        comparison.mean = statistics.fmean(differences)
        comparison.median = statistics.median(differences)
        alpha = self.record.alpha
        comparison.low, comparison.high = confidence_sequence(differences, alpha, self.max_pairs, self.late)
        verdict = judge(differences, alpha, self.delta, self.metric in LARGER, self.max_pairs, self.give_up)
        if not verdict:
            verdict = OPEN if comparison.pairs < self.max_pairs else f"undecided after {self.max_pairs} pairs"
        comparison.verdict = "confirmed" if self.confirm and verdict == "better" else verdict

    def write(self) -> str:
        """Write decide.json and decide.md, each atomically; return the latter."""
        # The table of verdicts, with a note on how to read it.
        record = self.record
        head = ["variant", "verdict", "pairs", f"{record.metric}, mean difference", "median", "between"]
        rows = [each.row(self.earliest) for each in record.comparisons]
        better = "more" if record.metric in LARGER else "less"
        chance = f"better or worse is false with a chance of {record.alpha:.3g} at most"
        if record.delta is not None:
            chance += ", and so is no difference; its intervals are narrower than those in the column *between*"
        first = literal_markdown(name_of(record.first))
        note = f"The differences are from the first, {first}; {better} is better; {chance}."
        settings = " ".join(map(shlex.quote, record.settings)) or "the defaults"
        made = f"This holds for {literal_markdown(settings)}. "
        made += f"Commit {record.commit}, project_hash {record.project_hash}, text {record.text}."
        made += (
            f" Seeds from {record.seed} on; {RECORD} has each pair. An interval misses the centre with the same chance."
        )
        known = [learned_before(self.learned), ""] if self.learned else []
        if len(self.steps) > 1:  # by max_minutes or patience, or by a variant
            unequal = f"The runs took from {min(self.steps):,.0f} to {max(self.steps):,.0f} steps"
            known += [f"{unequal}: a difference may be one of steps.", ""]
        text = "\n".join([*markdown_lines([head, *rows]), "", *known, note, made, ""])

        replace_text(self.folder / RECORD, json.dumps(finite(asdict(record)), indent=2) + "\n")
        replace_text(self.folder / "decide.md", text)
        return text

    def report(self) -> str:
        return f"{super().report()}\n\n{self.write()}\nverdicts  {self.folder / 'decide.md'}"
