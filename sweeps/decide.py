"""Decide whether a change is better: pairs of runs, of the same seed and batches, until it is known.

python train.py -m hydra/sweeper=decide 'hydra.sweeper.variants=["attention=sdpa","attention=sdpa+gate"]'

The test of sweeps/evidence.py may be looked at after every pair. docs/sweeps.md says what it is worth.
"""

import statistics
from typing import Any

from hydra.core.utils import JobReturn

from common.errors import SettingsError, one_of
from common.files import replace_text
from common.text import visible
from runs.metrics import is_number
from runs.summary import NUMBERS, read_summary, sentence_of
from sweeps.evidence import confidence_sequence, e_value, judge
from sweeps.grid import VARIANTS, Grid, combinations, error_of
from sweeps.leaderboard import csv_text, literal_markdown, markdown_lines

ALPHA = 0.05  # the chance that any variant without an effect ends in better or worse, divided among the variants
FAILED = "undecided, because "
LARGER = ("val_accuracy", "tokens_per_s", "decode_tokens_per_s")  # are better


class Decide(Grid):
    """Runs the first variant and each undecided one with seed after seed, until all are decided, or max_pairs times."""

    def __init__(self, metric: str, delta: float | None, max_pairs: int, **others: Any) -> None:
        super().__init__(**others)
        self.metric = metric
        self.delta = delta
        self.max_pairs = max_pairs

    def sweep(self, arguments: list[str]) -> None:
        """Run the pairs that are not finished; SettingsError if a failed job has left a variant undecided."""
        # What is compared. The first variant is number 0, which the others are paired with.
        fixed, first = self.check(arguments)
        self.names = [" ".join(variant) or "no change" for variant in self.variants]
        self.verdicts = dict.fromkeys(range(1, len(self.variants)), "")
        self.pairs: dict[int, list[tuple[int, float, float]]] = {place: [] for place in self.verdicts}
        self.alpha = ALPHA / len(self.verdicts)
        # The pairs, seed after seed.
        with self.keeping_folder():
            for number in range(self.max_pairs):
                undecided = [place for place, verdict in self.verdicts.items() if not verdict]
                if undecided:
                    self.run_pairs(fixed, first + number, number * len(self.variants), undecided)
            for place, verdict in self.verdicts.items():
                self.verdicts[place] = verdict or f"undecided after {self.max_pairs} pairs"
        failed = sum(verdict.startswith(FAILED) for verdict in self.verdicts.values())
        if failed:
            problem = f"{failed} of {len(self.verdicts)} variants stay undecided, because a job failed"
            raise SettingsError(problem, f"the reasons are above and in {self.folder / 'decide.md'}")

    def check(self, arguments: list[str]) -> tuple[list[str], int]:
        """Return the overrides that all jobs have, and the first seed; SettingsError for what cannot be compared."""
        # The settings of the sweeper.
        self.check_adaptive(max_pairs=2)
        one_of("hydra.sweeper.metric", self.metric, NUMBERS)
        if self.delta is not None and not (is_number(self.delta) and self.delta > 0):
            raise SettingsError(f"hydra.sweeper.delta={self.delta} must be a number above 0, or null")
        if len({*map(tuple, self.variants)}) < max(2, len(self.variants)):
            raise SettingsError("hydra/sweeper=decide compares two or more variants that differ", VARIANTS)
        # The other settings, all jobs' but for the seed, which counts up from pair to pair.
        given = self.read(arguments)
        if any("seed" in self.parse(variant) for variant in self.variants):
            raise SettingsError("hydra.sweeper.variants give a seed, which a pair has in common", "leave it out")
        several = [override for override in given.values() if override.is_sweep_override()]
        if several:
            raise SettingsError(f"{several[0].input_line} is more than one setting to compare under", "choose one")
        seed = given.pop("seed").value() if "seed" in given else 1
        if type(seed) is not int or seed < 0:
            raise SettingsError(f"seed={seed} must be a whole number from 0, that of the first pair")
        (fixed,) = combinations(given.values())
        # The jobs of the first pair.
        for variant in self.variants:
            self.check_job([*fixed, f"seed={seed}", *variant])
        return fixed, seed

    def run_pairs(self, fixed: list[str], seed: int, number: int, undecided: list[int]) -> None:
        """Run the first variant and the undecided ones with a seed; judge, write and print them."""
        # A folder is named by seed and variant, so that a sweep that goes on finds it, whatever was decided before.
        places = [0, *undecided]
        jobs = [
            [*fixed, f"seed={seed}", *self.variants[place], f"hydra.sweep.subdir={seed}-{place}"] for place in places
        ]
        results = self.launch(jobs, number)
        names = [f"{seed}-{place}" for place in places]
        first, *others = [self.figure(name, result) for name, result in zip(names, results, strict=True)]
        for place, own in zip(undecided, others, strict=True):
            if isinstance(first, str) or isinstance(own, str):
                self.verdicts[place] = f"{FAILED}{first if isinstance(first, str) else own}"
            else:
                self.pairs[place].append((seed, first, own))
                self.verdicts[place] = judge(self.differences(place), self.alpha, self.delta, self.metric in LARGER)
            name, verdict, count, mean, between, e = self.row(place)
            figures = f"{self.metric} {mean} ({between}), pairs {count}, E {e}"
            print(visible(f"seed {seed}: {name} is {verdict}: {figures}"), flush=True)
        self.write()

    def figure(self, name: str, result: JobReturn) -> float | str:
        """Return a job's figure that is compared, or the reason why there is none."""
        error = error_of(result)
        if error:
            return f"job {name} failed: {sentence_of(error)}"
        summary = read_summary(self.folder / name)
        reached = getattr(summary, self.metric) if summary and summary.status == "finished" else None
        return f"job {name} has no {self.metric}" if reached is None else reached

    def differences(self, place: int) -> list[float]:
        return [own - first for _, first, own in self.pairs[place]]

    def row(self, place: int) -> list[str]:
        """Return a variant's cells: name, verdict, pairs, mean difference, its confidence interval, e-value."""
        cells = [self.names[place], self.verdicts[place] or "open", str(len(self.pairs[place]))]
        differences = self.differences(place)
        if not differences:
            return [*cells, "–", "–", "–"]
        low, high = confidence_sequence(differences, self.alpha)
        between = f"{low:+.4g} to {high:+.4g}"
        return [*cells, f"{statistics.fmean(differences):+.4g}", between, f"{e_value(differences):.3g}"]

    def write(self) -> str:
        """Write decide.csv and decide.md; return the latter."""
        head = ["variant", "verdict", "pairs", f"{self.metric}, more than the first's", "between", "E"]
        better = "more" if self.metric in LARGER else "less"
        note = f"The first is {literal_markdown(self.names[0])}; {better} is better; E from {1 / self.alpha:g} decides."
        text = "\n".join([*markdown_lines([head, *map(self.row, self.verdicts)]), "", note, ""])
        pairs = [[self.names[place], *pair] for place, pairs in self.pairs.items() for pair in pairs]
        columns = ["variant", "seed", f"{self.metric}_of_first", self.metric]
        replace_text(self.folder / "decide.csv", csv_text([columns, *pairs]))
        replace_text(self.folder / "decide.md", text)
        return text

    def report(self) -> str:
        return f"{super().report()}\n\n{self.write()}\nverdicts  {self.folder / 'decide.md'}"
