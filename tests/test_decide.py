"""A comparison that stops by itself is right about what it says: its test, its interval, and the loop around them."""

from __future__ import annotations

import csv
import math
import os
import random
import shlex
import signal
import subprocess
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hydra.core.utils import JobReturn, JobStatus
from sweeping import ROOT, cells, command, in_memory, put_summary, refusal, run_here, swept, tiny

from common.errors import SettingsError
from runs.summary import read_job
from sweeps.decide import ALPHA, Decide
from sweeps.evidence import WIDTH, Estimate, confidence_sequence, e_value, holm, judge, p_value, t_quantile

VARIANTS = ["attention=sdpa", "attention=mla", "attention=delta"]


@pytest.mark.parametrize(
    ("t", "freedom", "p"),  # tables of Student's t, two-sided
    [(12.706, 1, 0.05), (4.303, 2, 0.05), (2.776, 4, 0.05), (4.604, 4, 0.01), (2.262, 9, 0.05), (-1.812, 10, 0.1)],
)
def test_p_is_that_of_the_tables_and_the_quantile_its_inverse(t, freedom, p):
    assert p_value(t, freedom) == pytest.approx(p, rel=2e-3) and p_value(0.0, freedom) == pytest.approx(1)
    assert t_quantile(p, freedom) == pytest.approx(abs(t), rel=1e-3)
    assert p_value(t, freedom + 1) < p_value(t, freedom + 0.5) < p_value(t, freedom)  # Satterthwaite's are no integers


def test_holm_is_that_of_the_example_and_never_falls():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])  # 4, 3, 2 and 1 times, in order
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []


def test_a_shift_adds_its_error_and_its_degrees_of_freedom():
    found = Estimate.of([0.1, 0.3, 0.2, 0.2])
    assert (found.mean, found.error, found.freedom) == pytest.approx((0.2, 0.04082, 3), rel=1e-3)
    assert found.p == pytest.approx(0.01625, rel=1e-2)
    moved = found.less(0.05, (found.error, 3.0))
    assert (moved.mean, moved.error, moved.freedom) == pytest.approx((0.15, found.error * math.sqrt(2), 6))
    assert found.less(0.05).freedom == 3 and found.less(0.0, (1e-9, 1.0)).p == pytest.approx(found.p)
    assert Estimate.of([0.0, 0.0]).p == 1 and Estimate.of([0.1, 0.1]).p == 0


@pytest.mark.parametrize("values", [[0.3], [0.5, -0.2], [1.0, 2.0, 1.5], [0.1, -0.4, 0.3, 0.6, 0.2]])
def test_the_e_value_is_the_mixture_it_stands_for(values):
    """Of normal densities, over effects in deviations that are N(0, WIDTH²) and deviations with the density 1/σ."""
    log_sigma, effect = np.linspace(-12, 12, 1201)[:, None, None], np.linspace(-30, 30, 1201)[:, None]
    deviations = np.array(values) * np.exp(-log_sigma)  # those of each deviation σ that may be
    densities = np.exp(-((deviations - effect) ** 2).sum(-1) / 2 - len(values) * log_sigma[..., 0]).sum(0)
    prior = np.exp(-((effect[:, 0] / WIDTH) ** 2) / 2)
    assert e_value(values) == pytest.approx(densities @ prior / prior.sum() / densities[600], rel=1e-3)


def test_the_e_value_has_no_unit_and_no_side():
    values = [0.1, -0.4, 0.3, 0.6, 0.2]
    for scale in (1e-6, -1.0, 1e6):
        assert e_value([scale * value for value in values]) == pytest.approx(e_value(values))
    assert e_value([0.3]) == 1 and e_value([0.0, 0.0]) < 1 < e_value([1.0, 1.0, 1.0, 1.1])


def test_without_an_effect_the_e_value_is_one_on_average_and_rarely_ever_large():
    """A supermartingale of mean 1, so that it reaches 1/α with a chance of α at most (Ville)."""
    draw = np.random.default_rng(1).normal(0, 3, (4000, 12))
    found = np.array([[e_value(row[:n]) for n in range(1, 13)] for row in draw])
    assert found[:, 1:3].mean(0) == pytest.approx([1, 1], abs=0.05)
    for alpha in (0.2, 0.05):
        assert alpha / 5 < (found.max(1) >= 1 / alpha).mean() <= alpha


def test_the_confidence_sequence_holds_the_true_mean_at_every_pair_and_is_the_e_values_inverse():
    draw = np.random.default_rng(2).normal(0.7, 2, (2000, 15))
    ends = np.array([[confidence_sequence(row[:n], 0.1) for n in range(1, 16)] for row in draw])
    missed = ((ends[..., 0] > 0.7) | (ends[..., 1] < 0.7)).any(1)
    assert 0.02 < missed.mean() <= 0.1
    low, high = confidence_sequence(values := draw[0], 0.1)
    for end in (low, high):
        assert e_value(values - end) == pytest.approx(10)
    assert confidence_sequence([1.0], 0.05) == (-math.inf, math.inf) and confidence_sequence([2.0] * 5, 0.05) == (2, 2)


@pytest.mark.parametrize(
    ("differences", "delta", "larger", "said"),
    [
        ([-1.0, -1.1, -0.9, -1.0, -1.05], None, False, "better"),
        ([-1.0, -1.1, -0.9, -1.0, -1.05], None, True, "worse"),
        ([1.0, 1.1, 0.9, 1.0, 1.05], None, False, "worse"),
        ([-1.0, -1.1, -0.9, -1.0, -1.05], 2.0, False, "no difference beyond 2"),
        ([-1.0, -1.1, -0.9, -1.0, -1.05], 1.0, False, "better"),
        ([1.0, 1.1, 0.9, 1.0, 1.05], 1.0, False, "worse"),
        ([0.1, -0.1] * 10, 0.5, False, "no difference beyond 0.5"),
        ([0.1, -0.1] * 10, None, False, ""),
        ([-1.0, -1.1], 5.0, False, ""),
    ],
)
def test_a_verdict_is_what_the_confidence_sequence_says(differences, delta, larger, said):
    assert judge(differences, 0.05, delta, larger) == said


def test_the_pages_say_what_the_recorded_pairs_do():
    results, losses = ROOT / "docs/results", defaultdict[str, dict[int, float]](dict)
    with (results / "null_runs.csv").open() as file:
        for run in csv.DictReader(file):
            losses[run["attention"]][int(run["seed"])] = float(run["val_bpb"])
    differences = [losses["sdpa+gate"][seed] - losses["sdpa"][seed] for seed in range(1, 8)]
    page = (ROOT / "docs/sweeps.md").read_text(encoding="utf-8")
    for n in range(1, 8):
        low, high = confidence_sequence(known := differences[:n], ALPHA)
        figures = f"{np.mean(known):+.4g} ({low:+.4g} to {high:+.4g}), pairs {n}, E {e_value(known):.3g}"
        assert f"gate is {judge(known, ALPHA) or 'open'}: val_bpb {figures}\n" in page
    with (results / "key_offset_pairs.csv").open() as file:
        differences = [float(pair["val_bpb"]) - float(pair["val_bpb_of_first"]) for pair in csv.DictReader(file)]
    low, high = confidence_sequence(differences, ALPHA)
    page = (ROOT / "docs/which_attention.md").read_text(encoding="utf-8")
    assert f"ends {-np.mean(differences):.3f} bits" in page and f"sequence {-high:.3f} to {-low:.3f})" in page


def decide(max_pairs: int = 12, variants: list[str] = VARIANTS, **others) -> Decide:
    return Decide(**{"metric": "val_bpb", "delta": None} | others, max_pairs=max_pairs, variants=variants)


def noisy(settings: dict[str, str]) -> float:
    """mla is better by 2, delta the same but for noise; seeds differ by more than either."""
    draw = random.Random(f"{settings['seed']} {settings['attention']}")
    return 10 * int(settings["seed"]) - 2 * (settings["attention"] == "mla") + draw.gauss(0, 0.5)


def standing(folder: Path) -> dict[str, list[str]]:
    return {name: rest for name, *rest in cells((folder / "decide.md").read_text())[1:]}


def test_each_variant_runs_with_the_seeds_of_the_first_until_it_is_decided(tmp_path, capsys):
    jobs = swept(decide(), tmp_path, noisy, ["max_steps=5", "seed=3"])
    ran = {name: [job["seed"] for job in jobs if job["attention"] == name] for name in ("sdpa", "mla", "delta")}
    assert ran["sdpa"] == ran["delta"] == [str(seed) for seed in range(3, 15)]
    assert 4 <= len(ran["mla"]) < 12 and ran["mla"] == ran["sdpa"][: len(ran["mla"])]
    assert all(job["max_steps"] == "5" for job in jobs) and read_job(tmp_path / "4-1").number == 4
    verdict, pairs, mean, between, e = standing(tmp_path)["attention=mla"]
    assert "E from 40 decides" in (tmp_path / "decide.md").read_text()  # two variants divide the chance of an error
    assert (verdict, pairs) == ("better", str(len(ran["mla"]))) and float(e) >= 2 / ALPHA and float(mean) < -1
    assert float(between.split()[0]) < float(mean) < float(between.split()[2]) < 0
    assert standing(tmp_path)["attention=delta"][:2] == ["undecided after 12 pairs", "12"]
    with (tmp_path / "decide.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["variant"] == "attention=mla"]
    differences = [float(row["val_bpb"]) - float(row["val_bpb_of_first"]) for row in rows]
    assert [row["seed"] for row in rows] == ran["mla"] and e_value(differences) == pytest.approx(float(e), rel=1e-2)
    assert e_value(differences[:-1]) < 2 / ALPHA
    said = capsys.readouterr().out
    assert said.count("seed 3: ") == 2 and "leaderboard.md" in said and (tmp_path / "decide.md").read_text() in said
    assert f"is better: val_bpb {mean} ({between}), pairs {pairs}, E {e}\n" in said


def test_what_was_decided_stays_so_when_it_is_typed_again_and_more_pairs_go_on(tmp_path):
    swept(decide(max_pairs=3), tmp_path, noisy)
    assert {row[0] for row in standing(tmp_path).values()} == {"undecided after 3 pairs"}
    for max_pairs, count in ((12, 20), (12, 0)):
        jobs = swept(decide(max_pairs), tmp_path, noisy)
        assert standing(tmp_path)["attention=mla"][0] == "better" and (len(jobs) > 15) == (count > 0)
        assert not any(job["seed"] in ("1", "2", "3") for job in jobs)
    # With a difference that matters mla's pairs are as they were, whatever else is decided.
    sweeper = decide(delta=1.0)
    assert in_memory(sweeper, tmp_path, noisy) == []
    sweeper.sweep([])
    assert standing(tmp_path)["attention=delta"][0] == "no difference beyond 1"


def test_settings_as_they_are_may_be_a_variant_and_torchrun_may_not_run_pairs(tmp_path, monkeypatch):
    asked = {"max_pairs": 2, "variants": ["", "attention=mla"]}
    jobs = swept(decide(**asked), tmp_path, lambda settings: noisy({"attention": "sdpa"} | settings), ["seed=0"])
    assert [job["seed"] for job in jobs] == ["0", "0", "1", "1"]
    assert (tmp_path / "decide.md").read_text().endswith("The first is no change; less is better; E from 20 decides.\n")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SettingsError, match=r"^hydra/sweeper=grid starts runs of one process each: leave out torchrun"):
        swept(decide(**asked), tmp_path, noisy)


def test_a_job_that_fails_leaves_its_variant_undecided_and_one_of_the_first_all_of_them(tmp_path):
    failures: set[tuple[str, str]] = set()

    def failing(settings: dict[str, str]) -> float:
        if (settings["attention"], settings["seed"]) in failures:
            raise SettingsError("diverged: lower optimizer.lr")
        return noisy(settings)

    for name, reason, left in (
        ("delta", "job 2-2 failed: diverged: lower optimizer.lr.", ["attention=delta"]),
        ("sdpa", "job 2-0 failed: diverged: lower optimizer.lr.", ["attention=mla", "attention=delta"]),
    ):
        folder, failures = tmp_path / name, {(name, "2")}
        with pytest.raises(SettingsError, match=f"^{len(left)} of 2 variants stay undecided, because a job failed"):
            swept(decide(), folder, failing)
        found = standing(folder)
        assert [name for name in found if found[name][0] == f"undecided, because {reason}"] == left
        assert all(found[name][1] == "1" for name in left)
    failures = set()
    swept(decide(), folder, failing)
    assert standing(folder)["attention=mla"][0] == "better"


def test_other_figures_have_their_own_better_side_and_one_that_is_missing_is_told(tmp_path):
    sweeper = decide(metric="tokens_per_s", variants=VARIANTS[:2])
    in_memory(sweeper, tmp_path, noisy)
    figure, number = sweeper.figure, iter(range(100))

    def faster(name: str, result: object) -> float | str:
        put_summary(tmp_path / name, tokens_per_s=500.0 + 100 * name.endswith("-1") + next(number) % 7)
        return figure(name, result)

    sweeper.figure = faster
    sweeper.sweep([])
    assert (
        standing(tmp_path)["attention=mla"][0] == "better" and "more is better" in (tmp_path / "decide.md").read_text()
    )
    with pytest.raises(SettingsError, match="2 of 2"):
        swept(decide(metric="val_accuracy"), tmp_path / "other", noisy)
    assert "job 1-0 has no val_accuracy" in (tmp_path / "other/decide.md").read_text()
    put_summary(tmp_path / "1-0", status="stopped", tokens_per_s=500.0)
    completed = JobReturn(_return_value=None, status=JobStatus.COMPLETED)
    assert figure("1-0", completed) == "job 1-0 has no tokens_per_s"


MISTAKES = {
    "": "hydra/sweeper=decide compares two or more variants that differ: write 'hydra.sweeper.variants=",
    "hydra.sweeper.variants=['attention=sdpa','attention=mla','attention=sdpa']": "two or more variants that differ",
    "hydra.sweeper.variants=['attention=sdpa','seed=2']": "hydra.sweeper.variants give a seed, which a pair has in com",
    "hydra.sweeper.variants=['attention=sdpa','model=huge']": "model=huge does not exist",
    "V seed=1,2": "seed=1,2 is more than one setting to compare under: choose one",
    "V seed=one": "seed=one must be a whole number from 0",
    "V hydra.sweeper.max_pairs=1": "hydra.sweeper.max_pairs=1 must be a whole number from 2",
    "V hydra.sweeper.delta=0": "hydra.sweeper.delta=0 must be a number above 0, or null",
    "V hydra.sweeper.delta=little": "hydra.sweeper.delta=little must be a number above 0, or null",
    "V hydra.sweeper.metric=loss": "hydra.sweeper.metric=loss is not known: choose one of seed, step",
    "V dry_run=true": "dry_run=true trains nothing to compare: leave out hydra/sweeper=decide",
    "V attention=mla": "attention is what hydra.sweeper.variants compares: leave it out",
    "+experiment=positions": "seed=1,2,3,4,5 is more than one setting to compare under",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_in_one_sentence_before_any_run(mistake, tmp_path):
    variants = "hydra.sweeper.variants=['attention=sdpa','attention=mla']"
    typed = [variants if word == "V" else word for word in mistake.split()]
    assert MISTAKES[mistake] in refusal("hydra/sweeper=decide", *typed, cwd=tmp_path)
    assert "add -m" in run_here("hydra/sweeper=decide", variants, cwd=tmp_path).stderr


@pytest.mark.slow
def test_a_comparison_that_was_killed_goes_on_to_the_same_verdict(tmp_path):
    variants = 'hydra.sweeper.variants=["model.n_head=1","model.n_head=2"]'
    typed = ["-m", "hydra/sweeper=decide", variants, "hydra.sweeper.max_pairs=3", *tiny(tmp_path, max_steps=30)]
    whole = subprocess.run(command(*typed, "hydra.sweep.dir=whole"), cwd=tmp_path, capture_output=True, text=True)
    assert whole.returncode == 0, whole.stderr
    stopped = [*typed, "hydra.sweep.dir=cut"]
    for number in (signal.SIGKILL, signal.SIGTERM):
        process = subprocess.Popen(command(*stopped), cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        text = ""
        for line in process.stdout:
            text += line
            if "job 3: " in line:
                os.kill(process.pid, number)
                break
        text += process.stdout.read()
        assert process.wait() == (-9 if number == signal.SIGKILL else 143)
    advice = shlex.split(text.split("to go on:  ")[1].splitlines()[0])
    assert advice[1:] == [str(ROOT / "train.py"), *stopped]
    again = subprocess.run(command(*advice[2:]), cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 0 and "is finished already" in again.stdout, again.stderr
    for name in ("decide.md", "decide.csv"):
        assert (tmp_path / "cut" / name).read_text() == (tmp_path / "whole" / name).read_text()
