"""decide's verdicts are right: its test, its interval, and the loop around them."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import random
import re
import shlex
import signal
import subprocess
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import permutations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sweeping
from conftest import first_of, some
from hydra.core.utils import JobReturn, JobStatus
from sweeping import ROOT, cells, command, in_memory, put_summary, refusal, run_here, swept, tiny

from common.errors import SettingsError
from data.config import DataConfig, TokenizerConfig
from data.prepare import prepare, tokens_hash
from docs import decide_worth as worth
from docs.estimates import Estimate, holm, p_value, t_quantile
from model.config import GPTConfig
from runs.origin import PROJECT_HASH, commit
from runs.summary import Summary, read_job
from sweeps.decide import ALPHA, Decide
from sweeps.evidence import MOST_PAIRS, confidence_sequence, cuts, judge
from training.config import OptimizerConfig, TrainConfig

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


@pytest.mark.parametrize("late", [False, True])
def test_the_critical_values_are_those_of_all_orders_and_signs(late):
    """Every order of six magnitudes with every choice of signs is equally likely if a difference is as likely as its
    negative."""
    alpha, pairs = 0.4, 6
    orders = np.array([*permutations(range(1, pairs + 1))])[:, None]
    differences = (orders * np.array([*product((1, -1), repeat=pairs)])).reshape(-1, pairs)
    is_open, found = np.ones(len(differences), bool), []
    for n in range(1, pairs + 1):
        positive = sum(differences[:, i] + differences[:, j] > 0 for i in range(n) for j in range(i, n))
        smaller = np.minimum(positive, n * (n + 1) // 2 - positive)
        allowed = alpha * (n / pairs) ** (3 if late else 1)
        spent = [(~is_open | (smaller <= k)).mean() for k in range(n * n)]
        found.append(sum(share <= allowed + 1e-9 for share in spent) - 1)
        is_open &= smaller > found[-1]
    assert cuts(alpha, pairs, late) == found and found[-1] > 0 > found[0]


@pytest.mark.long
def test_twenty_pairs_decide_from_the_seventh_on_and_two_may_be_followed_in_addition():
    known = cuts(ALPHA, 20)
    assert [k >= 0 for k in known] == [False] * 6 + [True] * 14 and known[6:] == sorted(known[6:])
    assert sum(k < 0 for k in cuts(ALPHA, 20, late=True)) == 8 and len(cuts(ALPHA, MOST_PAIRS)) == 22


def table_of_laws() -> dict[str, list[float]]:
    """The shares in the table of docs/sweeps.md that `docs/decide_worth.py laws` prints."""
    rows = cells((ROOT / "docs/sweeps.md").read_text(encoding="utf-8"))
    return {
        name: [float(cell.rstrip("%")) / 100 for cell in rest]
        for name, *rest in rows
        if name in worth.LAWS and len(rest) == 7
    }


@pytest.mark.slow
@pytest.mark.parametrize("law", first_of(*worth.LAWS))
def test_a_difference_is_found_as_often_as_the_page_says_and_falsely_in_one_of_twenty(law, capsys, monkeypatch):
    monkeypatch.setattr(worth, "LAWS", {law: worth.LAWS[law]})
    worth.print_laws(nulls=1500, finds=150)
    ((_, *found),) = cells(capsys.readouterr().out)[1:]
    recorded = table_of_laws()[law]
    assert recorded[0] <= 0.053 and len(found) == len(recorded) == 7
    if law == "normal":
        assert all(share >= least for share, least in zip(recorded[1:], (0.43, 0.95, 1, 0.22, 0.75, 0.96), strict=True))
    for text, share, count in zip(found, recorded, [1500] + 6 * [150], strict=True):
        noise = 4 * math.sqrt(max(share * (1 - share), 0.01) / count)
        assert float(text.rstrip("%")) / 100 == pytest.approx(share, abs=noise)


@pytest.mark.slow
def test_a_night_of_ideas_has_the_finds_that_the_page_says():
    draw, rule = np.random.default_rng(5), partial(judge, alpha=ALPHA, give_up=5)
    law = worth.RUNS["normal"]
    once = np.array([worth.night(draw, law, rule, confirms=False, real=10) for _ in range(12)])
    twice = np.array([worth.night(draw, law, rule, confirms=True, real=10) for _ in range(12)])
    assert once[:, 1].mean() > 8.7 and twice[:, 1].mean() > 8 and (once[:, 0] > 0).sum() > 2 >= (twice[:, 0] > 0).sum()
    rows = {tuple(row[:2]): row[2:] for row in cells((ROOT / "docs/sweeps.md").read_text(encoding="utf-8"))}
    for name in worth.RUNS:
        false, found, runs = rows[name, "`decide`, given up from pair 5 on, then confirmed"]
        assert float(false.rstrip("%")) <= 5 and float(found) >= 9 and float(runs) < 11


def test_the_confidence_sequence_holds_the_centre_after_every_pair_and_moves_with_the_differences():
    draw = np.random.default_rng(2).laplace(0.7, 2, (800, 12))
    ends = np.array([[confidence_sequence(row[:n], 0.2, 12) for n in range(1, 13)] for row in draw])
    missed = ((ends[..., 0] > 0.7) | (ends[..., 1] < 0.7)).any(1)
    assert 0.12 < missed.mean() <= 0.24
    low, high = confidence_sequence(values := draw[0].tolist(), 0.2, 12)
    moved = confidence_sequence([3 - 2 * value for value in values], 0.2, 12)
    assert moved == pytest.approx((3 - 2 * high, 3 - 2 * low)) and low < np.median(values) < high
    assert confidence_sequence([1.0] * 6, 0.05) == (-math.inf, math.inf) and confidence_sequence([2.0] * 7, 0.05) == (
        2,
        2,
    )


FEW = [-1.0, -1.1, -0.9, -1.0, -1.05, -0.95, -1.0, -1.02, -0.98]


@pytest.mark.parametrize(
    ("differences", "delta", "larger", "said"),
    [
        (FEW, None, False, "better"),
        (FEW, None, True, "worse"),
        ([-each for each in FEW], None, False, "worse"),
        ([-each for each in FEW], None, True, "better"),
        (FEW[:6], None, False, ""),
        (FEW, 2.0, False, "no difference beyond 2"),
        (FEW, 1.0, False, "better"),
        ([-each for each in FEW], 1.0, False, "worse"),
        (FEW[:8], 1.0, False, ""),
        ([0.1, -0.1] * 10, 0.5, False, "no difference beyond 0.5"),
        ([0.1, -0.1] * 10, None, False, ""),
        ([-1.0, -1.1], 5.0, False, ""),
        # It is refuted at one pair that the centre is -0.5 or less, at another that it is 0.5 or more.
        (
            [-0.1, 0.6, 0.1, 0.6, -0.6, 0.1, 0.6, -0.1, 0.1, -0.6, -0.6, -0.6, -0.6, -0.6],
            0.5,
            False,
            "no difference beyond 0.5",
        ),
        # Pairs that are equal to the last digit.
        ([0.0, 0.0, 0.0], None, False, "no difference: 3 pairs are equal"),
        ([0.0, 0.0, 0.0], 0.5, True, "no difference: 3 pairs are equal"),
        ([0.0, 0.0], None, False, ""),
        ([0.0, 0.0, 1e-9], None, False, ""),
        ([0.0] * 12 + [1.0] * 8, None, False, ""),
    ],
)
def test_a_verdict_needs_enough_pairs_of_one_side(differences, delta, larger, said):
    assert judge(differences, 0.05, delta, larger) == said


def test_of_skewed_pairs_the_typical_one_is_judged():
    differences = [-1.0, -1.1, -0.9, -1.2, -0.8, -1.3, 30.0, -1.0, -1.1, -0.9, -1.2, -0.8, -1.3, -1.0, -1.1, -0.9]
    assert np.mean(differences) > 0.5 and judge(differences, 0.05) == "better"


def test_the_page_says_what_the_recorded_pairs_do():
    losses = defaultdict[str, dict[int, float]](dict)
    with (ROOT / "docs/results/null_runs.csv").open() as file:
        for run in csv.DictReader(file):
            losses[run["attention"]][int(run["seed"])] = float(run["val_bpb"])
    differences = [losses["sdpa+forget"][seed] - losses["sdpa"][seed] for seed in range(1, 8)]
    page = (ROOT / "docs/sweeps.md").read_text(encoding="utf-8")
    for n in range(1, 8):
        low, high = confidence_sequence(known := differences[:n], ALPHA)
        middle = f"{np.mean(known):+.4g}, median {np.median(known):+.4g}"
        verdict = judge(known, ALPHA) or "open, neither better nor worse before pair 7"
        assert f"forget is {verdict}: val_bpb differs by {middle} ({low:+.4g} to {high:+.4g}), pair {n} of 20\n" in page


def test_the_pages_table_of_pairs_is_that_of_the_recorded_ones():
    pairs = defaultdict[str, list[float]](list)
    for name in ("new_forms_pairs.csv", "key_offset_pairs.csv"):
        with (ROOT / "docs/results" / name).open() as file:
            for row in csv.DictReader(file):
                pairs[row["variant"]].append(float(row["val_bpb"]) - float(row["val_bpb_of_first"]))
    page = (ROOT / "docs/which_attention.md").read_text(encoding="utf-8")
    offset = pairs.pop("attention=sdpa+key_offset")
    assert f"ends {-np.mean(offset):.3f} bits" in page
    assert f"in each of four pairs by {-max(offset):.3f} to {-min(offset):.3f}" in page and len(offset) == 4
    for variant, differences in pairs.items():
        ends = f"{min(differences):+.4f} to {max(differences):+.4f} | {len(differences)}"
        assert f"| `{variant.removeprefix('attention=')}` | {np.mean(differences):+.4f} | {ends} |" in page
        assert judge(differences, ALPHA / len(pairs)) == ""


def test_the_pages_claims_from_scratch_are_those_of_the_recorded_pairs():
    differences = defaultdict[str, list[float]](list)
    with (ROOT / "docs/results/claims_pairs.csv").open() as file:
        for row in csv.DictReader(file):
            differences[row["variant"]].append(float(row["val_bpb"]) - float(row["val_bpb_of_first"]))
    page = (ROOT / "docs/which_attention.md").read_text(encoding="utf-8").replace("−", "-")
    for known in differences.values():
        low, high = confidence_sequence(known, ALPHA / len(differences))
        verdict = judge(known, ALPHA / len(differences)) or f"open after {len(known)} pairs, then stopped"
        interval = f"{np.median(known):+.4f} ({low:+.4f} to {high:+.4f})"
        assert f"| {np.mean(known):+.4f} | {interval} | {verdict} |" in page


def decide(max_pairs: int = 12, variants: list[str] | None = VARIANTS, **others) -> Decide:
    asked = {"metric": "val_bpb", "delta": None, "give_up": None, "baseline": None, "confirm": None} | others
    return Decide(**asked, max_pairs=max_pairs, variants=variants)


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
    verdict, pairs, mean, median, between = standing(tmp_path)["attention=mla"]
    assert "is false with a chance of 0.025 at most" in (tmp_path / "decide.md").read_text()  # half of 5% for each
    assert (verdict, pairs) == ("better", str(len(ran["mla"]))) and float(mean) < -1
    assert float(between.split()[0]) < float(median) < float(between.split()[2]) < 0
    assert standing(tmp_path)["attention=delta"][:2] == ["undecided after 12 pairs", "12"]
    record = json.loads((tmp_path / "decide.json").read_text())
    (found,) = (each for each in record["comparisons"] if each["variant"] == "attention=mla")
    differences = np.subtract(found["own"], found["first"]).tolist()
    assert [*map(str, found["seeds"])] == ran["mla"] and f"{np.median(differences):+.4g}" == median
    assert [judge(differences[:n], 0.025, pairs=12) for n in (len(differences) - 1, len(differences))] == ["", "better"]
    said = capsys.readouterr().out
    assert said.count("seed 3: ") == 2 and "leaderboard.md" in said and (tmp_path / "decide.md").read_text() in said
    assert f"seed 3: attention=mla is open, neither better nor worse before pair {len(differences)}: val_bpb" in said
    assert f"is better: val_bpb differs by {mean}, median {median} ({between}), pair {pairs} of 12\n" in said


@pytest.mark.slow
def test_a_coin_says_which_run_of_a_pair_goes_first_and_the_same_when_it_is_typed_again(tmp_path):
    orders = []
    for folder in ("one", "two"):
        jobs = swept(decide(22, ["attention=sdpa", "attention=delta"]), tmp_path / folder, noisy)
        orders.append([(job["seed"], job["attention"]) for job in jobs])
    firsts = [attention for _, attention in orders[0][::2]]
    assert orders[0] == orders[1] and len(firsts) == 22 and 6 < firsts.count("sdpa") < 16
    assert sorted(orders[0], key=lambda job: int(job[0])) == orders[0] and len({*orders[0]}) == 44
    assert read_job(tmp_path / "one/1-0").number == 1


@pytest.mark.slow
def test_pairs_that_are_equal_or_skewed_are_called_so(tmp_path, capsys):
    swept(decide(variants=VARIANTS[:2]), tmp_path / "equal", lambda settings: float(settings["seed"]))
    assert standing(tmp_path / "equal")["attention=mla"][:2] == ["no difference: 3 pairs are equal", "3"]
    assert "seed 3: attention=mla is no difference: 3 pairs are equal: val_bpb differs by +0" in capsys.readouterr().out

    def skewed(settings: dict[str, str]) -> float:
        seed = int(settings["seed"])
        return (settings["attention"] == "mla") * (99.0 if seed == 2 else -1 - seed / 100)

    swept(decide(20, VARIANTS[:2]), tmp_path / "skewed", skewed)
    verdict, _, mean, median, _ = standing(tmp_path / "skewed")["attention=mla"]
    assert verdict == "better for the typical pair (the pairs are skewed)" and float(mean) > 1 > -1 > float(median)


@pytest.mark.slow
def test_a_comparison_that_goes_on_trains_nothing_twice_and_keeps_its_verdicts(tmp_path):
    def stopping(settings: dict[str, str]) -> float:
        if settings["seed"] == "9":
            raise KeyboardInterrupt
        return noisy(settings)

    with pytest.raises(KeyboardInterrupt):
        swept(decide(), tmp_path, stopping)
    before = standing(tmp_path)
    assert before["attention=delta"][:2] == ["open", "8"]
    jobs = swept(decide(), tmp_path, noisy)
    assert {job["seed"] for job in jobs} <= {"9", "10", "11", "12"} and standing(tmp_path)["attention=delta"][1] == "12"
    record, table = (tmp_path / "decide.json").read_text(), (tmp_path / "decide.md").read_text()
    assert swept(decide(), tmp_path, noisy) == [] and (tmp_path / "decide.json").read_text() == record
    # A comparison of an earlier version has no decide.json. Its runs are judged as new ones are.
    (tmp_path / "decide.json").unlink()
    assert swept(decide(), tmp_path, noisy) == [] and (tmp_path / "decide.md").read_text() == table


@pytest.mark.parametrize(
    ("asked", "arguments", "said"),
    some(
        [
            ({"max_pairs": 13}, [], "max_pairs=12, not 13"),
            ({"max_pairs": 11}, [], "max_pairs=12, not 11"),
            ({"delta": 0.5}, [], "delta=null, not 0.5"),
            ({"metric": "val_loss"}, [], "metric=val_bpb, not val_loss"),
            ({"variants": VARIANTS[:2]}, [], "variants=[attention=mla,attention=delta], not [attention=mla]"),
            ({"variants": ["", *VARIANTS[1:]]}, [], "first=attention=sdpa, not "),
            ({}, ["max_steps=9"], "settings=[], not [max_steps=9]"),
            ({}, ["seed=2"], "seed=1, not 2"),
        ],
        4,
    ),
)
def test_the_test_is_fixed_at_the_beginning(asked, arguments, said, tmp_path):
    swept(decide(), tmp_path, noisy)
    record = (tmp_path / "decide.json").read_text()
    with pytest.raises(SettingsError, match=re.escape(f"has {said}: type what it began with, or name another folder")):
        swept(decide(**asked), tmp_path, noisy, arguments)
    assert (tmp_path / "decide.json").read_text() == record
    (tmp_path / "decide.json").write_text(record[:-9])
    with pytest.raises(
        SettingsError, match=r"^hydra.sweep.dir=.* has no decide.json that can be read \(.*\): restore it"
    ):
        swept(decide(), tmp_path, noisy)


def record_of(folder: Path) -> dict:
    return json.loads((folder / "decide.json").read_text())


@pytest.mark.slow
def test_a_program_finds_everything_in_decide_json_after_every_pair(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(sweeping, "put_summary", lambda job, **figures: put_summary(job, **figures, seconds=2.0))
    sweeper = decide()
    in_memory(sweeper, tmp_path, noisy)
    launch = sweeper.launcher.launch
    sweeper.launcher.launch = lambda *jobs, **number: (
        seen.append((tmp_path / "decide.json").exists() and record_of(tmp_path)["comparisons"])
        or launch(*jobs, **number)
    )
    sweeper.sweep(["max_steps=5", "seed=3"])
    assert not seen[0] and [each[1]["pairs"] for each in seen[1:]] == [*range(1, 12)]
    assert {each["verdict"] for each in seen[1]} == {"open"} and seen[1][0]["low"] is None
    found = record_of(tmp_path)
    mla, delta = found.pop("comparisons")
    assert found == {
        **{"metric": "val_bpb", "delta": None, "max_pairs": 12, "alpha": 0.025, "seed": 3, "settings": ["max_steps=5"]},
        **{"first": "attention=sdpa", "variants": VARIANTS[1:], "text": "a text"},
        **{"commit": commit(), "project_hash": PROJECT_HASH},
        "code": dict.fromkeys(VARIANTS),
    }
    assert (mla["variant"], mla["verdict"], delta["verdict"]) == (VARIANTS[1], "better", "undecided after 12 pairs")
    assert mla["seeds"] == [*range(3, 3 + mla["pairs"])] and mla["seconds"] == 2.0 * mla["pairs"]
    differences = np.subtract(mla["own"], mla["first"])
    assert (mla["mean"], mla["median"]) == pytest.approx((differences.mean(), np.median(differences)))
    assert [mla["low"], mla["high"]] == [*confidence_sequence(differences.tolist(), 0.025, 12)]


@pytest.mark.slow
def test_a_variant_that_is_not_ahead_is_given_up(tmp_path):
    swept(decide(give_up=5), tmp_path, lambda settings: int(settings["seed"]) * (settings["attention"] == "delta"))
    found = {each["variant"]: each for each in record_of(tmp_path)["comparisons"]}
    assert found["attention=delta"]["verdict"] == "dropped: not ahead after 5 pairs"
    assert found["attention=mla"]["verdict"] == "no difference: 3 pairs are equal"
    behind = [0.1, 0.2, -0.1, 0.3, 0.1]
    assert judge(behind, 0.05, give_up=5) and not judge(behind[:4], 0.05, give_up=5) and not judge(behind, 0.05)
    assert not judge(behind, 0.05, larger=True, give_up=5) and judge(behind[::-1], 0.05, give_up=3)


@pytest.mark.slow
def test_the_runs_of_a_baseline_are_taken_and_a_variant_costs_its_own_alone(tmp_path):
    swept(decide(variants=VARIANTS[:2]), tmp_path / "one", noisy)
    (tmp_path / "one/1-0/checkpoints").mkdir()
    known = record_of(tmp_path / "one")["comparisons"][0]["seeds"]
    asked = {"variants": ["attention=sdpa", "attention=delta"], "baseline": str(tmp_path / "one")}
    jobs = swept(decide(**asked), tmp_path / "two", noisy)
    assert [job["seed"] for job in jobs if job["attention"] == "sdpa"] == [str(n) for n in range(len(known) + 1, 13)]
    assert sum(job["attention"] == "delta" for job in jobs) == 12 and not (tmp_path / "two/1-0/checkpoints").exists()
    whole = swept(decide(variants=asked["variants"]), tmp_path / "alone", noisy)
    assert len(whole) == 24 and (tmp_path / "alone/decide.md").read_text() == (tmp_path / "two/decide.md").read_text()
    # The second comparison has all runs of the first variant. A third one needs none of its own.
    asked = {"variants": ["attention=sdpa", "attention=linear"], "baseline": str(tmp_path / "two")}
    assert {job["attention"] for job in swept(decide(**asked), tmp_path / "three", noisy)} == {"linear"}
    # A run there that is not finished is not taken.
    put_summary(tmp_path / "two/2-0", status="running")
    ran = [(job["attention"], job["seed"]) for job in swept(decide(**asked), tmp_path / "four", noisy)]
    assert ("sdpa", "2") in ran and ("sdpa", "3") not in ran


@pytest.mark.parametrize("setting", ["sweep", "baseline", "confirm"])
def test_runs_of_other_code_or_another_text_are_not_taken(setting, tmp_path, monkeypatch):
    """By the hash of the code, whichever commit it is of, and whether git knows it at all."""
    monkeypatch.setattr("sweeps.decide.PROJECT_HASH", "0123")
    monkeypatch.setattr("sweeps.decide.commit", lambda: "abc-dirty")
    swept(decide(variants=VARIANTS[:2]), tmp_path / "one", noisy)
    others = {"sweep": {"variants": VARIANTS[:2]}, "confirm": {"variants": None, "confirm": str(tmp_path / "one")}}
    others["baseline"] = {"variants": VARIANTS[:2], "baseline": str(tmp_path / "one")}
    folder = tmp_path / ("one" if setting == "sweep" else "two")
    named = "hydra.sweep.dir" if setting == "sweep" else f"hydra.sweeper.{setting}"

    def refused(said: str, text: str = "a text") -> None:
        before = (tmp_path / "one/decide.json").read_text()
        launched = in_memory(sweeper := decide(**others[setting]), folder, noisy)
        sweeper.fingerprint = lambda settings: text
        with pytest.raises(SettingsError, match=rf"^{named}=.*/one {re.escape(said)}"):
            sweeper.sweep([])
        assert not launched and (tmp_path / "one/decide.json").read_text() == before
        assert folder.name == "one" or not (folder / "decide.json").exists()

    refused("has text=a text, not other: restore that text, or ", text="other")
    monkeypatch.setattr("sweeps.decide.PROJECT_HASH", "4567")
    remedy = {"sweep": "name another", "baseline": "leave it out", "confirm": "find it again"}[setting]
    refused(f"ran other code (commit=abc-dirty project_hash=0123) than this, 4567: restore that code, or {remedy}")
    record = record_of(tmp_path / "one")
    del record["project_hash"]  # as before 0.4
    (tmp_path / "one/decide.json").write_text(json.dumps(record))
    refused("ran other code (commit=abc-dirty project_hash=null) than this, 4567")
    (tmp_path / "one/decide.json").write_text(json.dumps(record | {"project_hash": "4567"}))
    monkeypatch.setattr("sweeps.decide.commit", lambda: None)
    swept(decide(**others[setting]), folder, noisy)
    assert record_of(folder)["commit"] == ("abc-dirty" if setting == "sweep" else None)


def test_a_comparison_goes_on_with_a_text_that_was_only_copied_or_touched(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 40)
    data = DataConfig(path=str(text), cache_dir=str(tmp_path / "cache"), separator=None)
    sweeper = decide()
    sweeper.base = TrainConfig(data=data, tokenizer=TokenizerConfig(name="byte"))
    before = prepare(data, sweeper.base.tokenizer)
    for seed in (1, 2):
        (tmp_path / f"one/{seed}-0").mkdir(parents=True)
        put_summary(tmp_path / f"one/{seed}-0", text_hash=tokens_hash(before.train, before.val))
    os.utime(text, ns=(0, 0))
    assert prepare(data, sweeper.base.tokenizer).fingerprint != before.fingerprint
    assert sweeper.has_text_of("hydra.sweep.dir", tmp_path / "one")
    # Not with another letter, with runs of two texts, or where no run tells its text.
    text.write_text("the cat sat on the hat. " * 40)
    assert not sweeper.has_text_of("hydra.sweep.dir", tmp_path / "one")
    text.write_text("the cat sat on the mat. " * 40)
    put_summary(tmp_path / "one/2-0", text_hash="another")
    assert not sweeper.has_text_of("hydra.sweep.dir", tmp_path / "one")
    assert not sweeper.has_text_of("hydra.sweep.dir", tmp_path / "none")


def test_a_run_of_other_code_is_no_part_of_a_pair(tmp_path):
    sweeper = decide(variants=VARIANTS[:2])
    in_memory(sweeper, tmp_path, noisy)
    outcome = sweeper.outcome

    def of_other_code(number: int, name: str, result: object) -> Summary | str:
        if name == "3-1":  # a parallel job that began after a file had changed
            put_summary(tmp_path / name, project_hash="0123")
        return outcome(number, name, result)

    sweeper.outcome = of_other_code
    with pytest.raises(SettingsError, match="1 of 1 variants stay undecided"):
        sweeper.sweep([])
    said = "undecided, because job 3-1 ran other code (project_hash=0123)"
    assert standing(tmp_path)["attention=mla"][:2] == [said, "2"]


def test_a_run_of_settings_whose_file_has_changed_is_no_part_of_a_pair(tmp_path):
    """As one of a baseline, or of a comparison that goes on."""
    sweeper = decide(variants=VARIANTS[:2])
    in_memory(sweeper, tmp_path, noisy)
    planned = TrainConfig(optimizer=OptimizerConfig(lr=0.01))
    sweeper.check_job = lambda job: replace(planned, model=GPTConfig(attention=job[-1].partition("=")[2]))
    outcome = sweeper.outcome

    def of_that_time(number: int, name: str, result: object) -> Summary | str:
        rate = 0.01 if name != "3-0" else 0.5
        (tmp_path / name / "config.yaml").write_text(f"seed: {name[0]}\nrun_dir: {name}\noptimizer: {{lr: {rate}}}\n")
        return outcome(number, name, result)

    sweeper.outcome = of_that_time
    with pytest.raises(SettingsError, match="1 of 1 variants stay undecided"):
        sweeper.sweep([])
    said = "undecided, because job 3-0 ran optimizer.lr=0.5, not 0.01"
    assert standing(tmp_path)["attention=mla"][:2] == [said, "2"]


def test_a_verdict_tells_of_runs_of_unlike_lengths_and_of_none_that_are_alike(tmp_path):
    """max_minutes ends each run at its own step, and decide.md had no word of it."""
    for folder, steps in {"alike": (10, 10), "unlike": (900, 1200)}.items():
        sweeper = decide(variants=VARIANTS[:2])
        in_memory(sweeper, tmp_path / folder, noisy)
        outcome = sweeper.outcome

        def of_length(number, name, result, folder=folder, steps=steps, outcome=outcome):
            found = json.loads((tmp_path / folder / name / "summary.json").read_text())
            put_summary(tmp_path / folder / name, **found | {"step": steps[number]})
            return outcome(number, name, result)

        sweeper.outcome = of_length
        sweeper.sweep([])
        said = "The runs took from 900 to 1,200 steps: a difference may be one of steps."
        assert (said in (tmp_path / folder / "decide.md").read_text()) == (folder == "unlike")


def test_a_verdict_tells_of_weights_that_had_learned_what_is_held_out(tmp_path):
    sweeper = decide(variants=VARIANTS[:2])
    in_memory(sweeper, tmp_path, noisy)
    outcome = sweeper.outcome

    def of_known(number: int, name: str, result: object) -> Summary | str:
        found = json.loads((tmp_path / name / "summary.json").read_text())
        put_summary(tmp_path / name, **found | {"learned": 0.42 if number else None})
        return outcome(number, name, result)

    sweeper.outcome = of_known
    sweeper.sweep([])
    assert standing(tmp_path)["attention=mla"][0] == "better"
    assert "some runs had learned up to 42% of what is held out" in (tmp_path / "decide.md").read_text()


@pytest.mark.parametrize(
    ("fact", "before", "now"),
    [
        ("text_hash", "aa", "bb"),
        ("weights_hash", "aa", "bb"),
        ("computed_in", "float32", "bfloat16"),
        ("earlier_settings", None, "seed=7 until step 1"),
    ],
)
def test_a_run_of_another_text_beginning_or_machine_is_no_part_of_a_pair(fact, before, now, tmp_path):
    """As after its validation text or the run of init_from has changed meanwhile."""

    def compared(asked: dict[str, Any], changed: str) -> list[str]:
        sweeper = decide(variants=VARIANTS[:2])
        folder = tmp_path / changed
        in_memory(sweeper, folder, noisy)
        configs = dict(zip(VARIANTS[:2], (TrainConfig(), TrainConfig(**asked)), strict=True))
        sweeper.check_job = lambda job: replace(configs[job[-1]], model=GPTConfig(attention=job[-1].partition("=")[2]))
        outcome = sweeper.outcome

        def of_that_time(number: int, name: str, result: object) -> Summary | str:
            known = json.loads((folder / name / "summary.json").read_text())
            put_summary(folder / name, **known | {fact: now if re.search(changed, name) else before})
            return outcome(number, name, result)

        sweeper.outcome = of_that_time
        with contextlib.suppress(SettingsError):
            sweeper.sweep([])
        return standing(folder)["attention=mla"][:2]

    verdict, pairs = compared({}, "^3-")
    assert f"{fact}={now}, and job 1-" in verdict and verdict.startswith("undecided, because job 3-") and pairs == "2"
    # Variants may ask for different ones, but for a change in the middle of a run.
    asked = dict(precision="bf16", data=DataConfig(source="tales"), init_from="RUN")
    assert ("undecided, because" in compared(asked, "-1$")[0]) == (fact == "earlier_settings")


@pytest.mark.slow
def test_a_baseline_of_other_settings_or_for_a_speed_is_refused(tmp_path):
    swept(decide(variants=VARIANTS[:2]), tmp_path / "one", noisy, ["max_steps=5"])
    asked = {"baseline": str(tmp_path / "one")}
    for others, arguments, said in (
        ({"variants": VARIANTS[1:]}, ["max_steps=5"], r"has first=attention=sdpa, not attention=mla: leave it out"),
        ({}, ["max_steps=6"], r"has settings=\[max_steps=5\], not \[max_steps=6\]: leave it out"),
        (
            {"metric": "tokens_per_s"},
            ["max_steps=5"],
            "metric=tokens_per_s depends on when a run takes place: leave out",
        ),
        ({"baseline": str(tmp_path)}, ["max_steps=5"], r"has no decide.json that can be read \(No such file"),
        (
            {"baseline": "~nobody_at_all/x"},
            ["max_steps=5"],
            "^hydra.sweeper.baseline=~nobody_at_all/x names no user of this machine",
        ),
    ):
        with pytest.raises(SettingsError, match=said):
            swept(decide(**asked | others), tmp_path / "two", noisy, arguments)


def test_a_baseline_serves_no_runs_that_end_by_the_clock():
    """One of a quiet machine takes more steps in its minutes, and its variant is worse for that."""
    configs = [TrainConfig(max_steps=5), TrainConfig(max_steps=5, max_minutes=1.0)]
    decide().refuse_timed(configs)
    decide(baseline="one").refuse_timed(configs[:1])
    with pytest.raises(SettingsError, match="^the end of a run with max_minutes depends on when .* leave out"):
        decide(baseline="one").refuse_timed(configs)


@pytest.mark.slow
def test_a_find_is_confirmed_on_fresh_seeds_against_a_fresh_baseline(tmp_path):
    swept(decide(), tmp_path / "one", noisy, ["max_steps=5"])
    for folder in ("two", "again"):
        asked = {"variants": None, "confirm": str(tmp_path / "one"), "metric": "val_loss"}
        jobs = swept(decide(**asked), tmp_path / folder, noisy)
        assert {job["attention"] for job in jobs} == {"sdpa", "mla"} and {job["max_steps"] for job in jobs} == {"5"}
    assert record_of(tmp_path / "two") == record_of(tmp_path / "again")
    found = record_of(tmp_path / "two")
    (mla,) = found["comparisons"]
    assert (found["alpha"], found["metric"], mla["verdict"]) == (0.04, "val_bpb", "confirmed")
    assert mla["seeds"][0] > 12 and mla["verdict"] in (tmp_path / "two/decide.md").read_text()
    # Luck is not confirmed, and other finds have other seeds.
    swept(decide(), tmp_path / "luck", lambda each: -int(each["seed"]) * (each["attention"] == "delta"))
    asked = {"variants": None, "confirm": str(tmp_path / "luck")}
    swept(decide(**asked), tmp_path / "no luck", noisy)
    (delta,) = record_of(tmp_path / "no luck")["comparisons"]
    assert delta["verdict"].startswith("undecided") and abs(delta["seeds"][0] - mla["seeds"][0]) > 22


@pytest.mark.slow
def test_a_confirmation_brings_all_it_needs(tmp_path):
    swept(decide(), tmp_path / "one", noisy)
    for others, arguments, said in (
        (
            {"variants": VARIANTS},
            [],
            "brings its variants and settings, and runs its own baseline: leave out all others.",
        ),
        ({}, ["seed=1"], "brings its variants and settings"),
        ({"params": {"seed": 1}}, [], "brings its variants and settings"),
        ({"baseline": str(tmp_path / "one")}, [], "brings its variants and settings"),
        ({"confirm": str(tmp_path / "none")}, [], "has no decide.json that can be read"),
    ):
        with pytest.raises(SettingsError, match=said):
            asked = {"variants": None, "confirm": str(tmp_path / "one")} | others
            swept(decide(**asked), tmp_path / "two", noisy, arguments)
    swept(decide(variants=VARIANTS[::2]), tmp_path / "nothing", noisy)
    with pytest.raises(SettingsError, match="nothing has found nothing better: there is nothing to confirm"):
        swept(decide(variants=None, confirm=str(tmp_path / "nothing")), tmp_path / "two", noisy)
    for damage in ("", "{", "[]", '{"metric": 5}', json.dumps(record_of(tmp_path / "one") | {"comparisons": [1]})):
        (tmp_path / "one/decide.json").write_text(damage)
        with pytest.raises(
            SettingsError, match=r"^hydra.sweeper.confirm=.* has no decide.json that can be read \(.+\)"
        ):
            swept(decide(variants=None, confirm=str(tmp_path / "one")), tmp_path / "two", noisy)


def test_settings_as_they_are_may_be_a_variant_and_torchrun_may_not_run_pairs(tmp_path, monkeypatch):
    asked = {"max_pairs": 6, "variants": ["", "attention=mla"]}
    jobs = swept(decide(**asked), tmp_path, lambda settings: noisy({"attention": "sdpa"} | settings), ["seed=0"])
    assert [job["seed"] for job in jobs] == [str(seed) for seed in range(6) for _ in "ab"]
    text = (tmp_path / "decide.md").read_text()
    assert "The differences are from the first, no change; less is better;" in text and "| better" in text
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SettingsError, match=r"^hydra/sweeper=decide starts runs of one process each: leave out torch"):
        swept(decide(**asked), tmp_path, noisy)


@pytest.mark.slow
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
        said = f"^{len(left)} of 2 variants stay undecided: the reasons are above and in "
        with pytest.raises(SettingsError, match=said):
            swept(decide(), folder, failing)
        found = standing(folder)
        assert [name for name in found if found[name][0] == f"undecided, because {reason}"] == left
        assert all(found[name][1] == "1" for name in left)
    failures = set()
    swept(decide(), folder, failing)
    assert standing(folder)["attention=mla"][0] == "better"


@pytest.mark.parametrize(
    ("metric", "first", "own", "other"),
    [
        ("val_bpb", (2.0, 1.0, 512.0), (2.0, 1.0, 100.0), True),
        ("val_bpb", (2.0, 1.0, 512.0), (4.0, 1.0, 512.0), True),  # a token of two bytes
        ("val_bpb", (2.0, 1.0, 512.0), (6.0, 1.5, 256.0), False),  # the same bytes in half as many tokens
        ("seconds", (2.0, 1.0, 512.0), (2.0, 1.0, 100.0), False),
        ("val_accuracy", (2.0, None, 512.0), (3.0, None, 512.0), False),
        ("val_accuracy", (2.0, None, 512.0), (2.0, None, 100.0), True),
    ],
)
def test_losses_on_different_parts_of_a_text_are_not_compared(metric, first, own, other, tmp_path):
    sweeper = decide(metric=metric, variants=VARIANTS[:2])
    in_memory(sweeper, tmp_path, noisy)
    outcome = sweeper.outcome

    def scored(number: int, name: str, result: object) -> Summary | str:
        loss, bpb, tokens = own if number else first
        figures = dict(val_loss=loss, val_bpb=bpb, val_tokens=tokens, seconds=5.0, val_accuracy=0.5)
        put_summary(tmp_path / name, **figures)
        return outcome(number, name, result)

    sweeper.outcome = scored
    if other:
        with pytest.raises(SettingsError, match="^1 of 1 variants stay undecided"):
            sweeper.sweep([])
        counts = f"{first[2]:.0f} and {own[2]:.0f} targets"
        fewer = f"eval_tokens={min(first[2], own[2]):.0f} scores as many targets in each"
        remedy = fewer if first[2] != own[2] else "eval_tokens=1e9 scores all of it"
        said = f"undecided, because seed 1 was scored on different texts ({counts}): {remedy}"
        assert standing(tmp_path)["attention=mla"][:2] == [said, "0"]
        assert f"{remedy}." in (tmp_path / "leaderboard.md").read_text()
    else:
        sweeper.sweep([])
        assert int(standing(tmp_path)["attention=mla"][1]) >= 3


def test_a_loss_of_other_tokens_is_not_compared_though_the_bytes_are_the_same(tmp_path):
    """A bpe of another text, for example: 512 tokens of 2 nats and 256 of 4 have the same bits per byte."""
    sweeper = decide(metric="val_loss", variants=VARIANTS[:2])
    in_memory(sweeper, tmp_path, noisy)
    outcome = sweeper.outcome

    def scored(number: int, name: str, result: object) -> Summary | str:
        put_summary(tmp_path / name, val_loss=2.0 + 2 * number, val_bpb=1.5, val_tokens=512.0 / (1 + number))
        return outcome(number, name, result)

    sweeper.outcome = scored
    with pytest.raises(SettingsError, match="^1 of 1 variants stay undecided"):
        sweeper.sweep([])
    said = "seed 1 was scored on different tokens of a text (512 and 256): choose hydra.sweeper.metric=val_bpb"
    assert standing(tmp_path)["attention=mla"][:2] == [f"undecided, because {said}", "0"]


def test_other_figures_have_their_own_better_side_and_one_that_is_missing_is_told(tmp_path):
    sweeper = decide(metric="tokens_per_s", variants=VARIANTS[:2])
    in_memory(sweeper, tmp_path, noisy)
    outcome, noise = sweeper.outcome, iter(range(100))

    def faster(number: int, name: str, result: object) -> Summary | str:
        put_summary(tmp_path / name, tokens_per_s=500.0 + 100 * number + next(noise) % 7)
        return outcome(number, name, result)

    sweeper.outcome = faster
    sweeper.sweep([])
    assert (
        standing(tmp_path)["attention=mla"][0] == "better" and "more is better" in (tmp_path / "decide.md").read_text()
    )
    with pytest.raises(SettingsError, match="2 of 2"):
        swept(decide(metric="val_accuracy"), tmp_path / "other", noisy)
    assert "job 1-0 has no val_accuracy" in (tmp_path / "other/decide.md").read_text()
    put_summary(tmp_path / "1-0", status="stopped", tokens_per_s=500.0)
    completed = JobReturn(_return_value=None, status=JobStatus.COMPLETED)
    assert outcome(0, "1-0", completed) == "job 1-0 has no tokens_per_s"


MISTAKES = {
    "": "hydra/sweeper=decide compares two or more variants that differ: write 'hydra.sweeper.variants=",
    "hydra.sweeper.variants=['attention=sdpa','model=huge']": "model=huge does not exist",
    "V dry_run=true": "dry_run=true trains nothing to compare: leave out hydra/sweeper=decide",
    "V seed=one": "seed=one is not a whole number",
    "+experiment=positions": "seed=1,2,3,4,5 is more than one setting to compare under",
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_in_one_sentence_before_any_run(mistake, tmp_path):
    variants = "hydra.sweeper.variants=['attention=sdpa','attention=mla']"
    typed = [variants if word == "V" else word for word in mistake.split()]
    assert MISTAKES[mistake] in refusal("hydra/sweeper=decide", *typed, cwd=tmp_path)
    if not mistake:
        assert "add -m" in run_here("hydra/sweeper=decide", variants, cwd=tmp_path).stderr


@pytest.mark.parametrize(
    ("asked", "arguments", "said"),
    [
        ({"variants": [*VARIANTS, "attention=sdpa"]}, [], "two or more variants that differ"),
        ({"variants": ["attention=sdpa", "seed=2"]}, [], "hydra.sweeper.variants give a seed, which a pair has in com"),
        ({}, ["seed=1,2"], "seed=1,2 is more than one setting to compare under: choose one"),
        ({"max_pairs": 1}, [], "hydra.sweeper.max_pairs=1 must be a whole number from 2"),
        ({"max_pairs": 6}, [], "hydra.sweeper.max_pairs=6 must be from 7 to 22: fewer decide nothing"),
        ({"max_pairs": 23}, [], "hydra.sweeper.max_pairs=23 must be from 7 to 22: fewer decide nothing"),
        ({"give_up": "soon"}, [], "hydra.sweeper.give_up=soon must be a whole number from 2"),
        ({"delta": 0}, [], "hydra.sweeper.delta=0 must be a number above 0, or null"),
        ({"delta": "little"}, [], "hydra.sweeper.delta=little must be a number above 0, or null"),
        ({"metric": "loss"}, [], "hydra.sweeper.metric=loss is not known: choose one of parameters, parameters_in_blo"),
        ({"metric": "best_step"}, [], "hydra.sweeper.metric=best_step is not known: choose one of parameters, parame"),
        ({"metric": "seed"}, [], "hydra.sweeper.metric=seed is not known: choose one of parameters, parameters_in_blo"),
        ({}, ["attention=mla"], "attention is what hydra.sweeper.variants compares: leave it out"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_any_run(asked, arguments, said, tmp_path):
    with pytest.raises(SettingsError, match=re.escape(said)):
        swept(decide(**asked), tmp_path / "sweep", noisy, arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("metric", "source", "sample_tokens", "remedy"),
    [
        ("val_bpb", "recall", 200, "choose val_accuracy or val_loss"),
        ("val_accuracy", "stdlib", 200, "choose val_bpb"),
        ("decode_tokens_per_s", "stdlib", 0, "leave sample_tokens out"),
        ("decode_tokens_per_s", "recall", 200, None),
        ("val_loss", "recall", 0, None),
    ],
)
def test_a_metric_that_the_runs_do_not_have_is_refused_before_them(metric, source, sample_tokens, remedy):
    config = TrainConfig(data=DataConfig(source=source), sample_tokens=sample_tokens)
    said = f"^hydra.sweeper.metric={metric} is .*: {remedy}"
    with pytest.raises(SettingsError, match=said) if remedy else nullcontext():
        decide(metric=metric).refuse_absent(config)


@pytest.mark.parametrize(
    ("metric", "source", "tokenizers", "is_refused"),
    [
        ("val_loss", "stdlib", ("bpe", "byte"), True),
        ("tokens_per_s", "stdlib", ("bpe", "bpe", "gpt2"), True),
        ("cache_bytes_per_token", "stdlib", ("byte", "gpt2"), True),
        ("val_bpb", "stdlib", ("bpe", "byte"), False),
        ("seconds", "stdlib", ("bpe", "byte"), False),
        ("val_loss", "stdlib", ("byte", "byte"), False),
        ("val_loss", "recall", ("bpe", "byte"), False),  # a task has no tokenizer
    ],
)
def test_a_figure_of_tokens_is_not_compared_between_tokenizers(metric, source, tokenizers, is_refused):
    configs = [TrainConfig(data=DataConfig(source=source), tokenizer=TokenizerConfig(name=name)) for name in tokenizers]
    said = f"^hydra.sweeper.metric={metric} is of tokens, .*: choose val_bpb, or variants of one tokenizer"
    with pytest.raises(SettingsError, match=said) if is_refused else nullcontext():
        decide(metric=metric).refuse_other_tokens(configs)


@pytest.mark.long
@pytest.mark.usefixtures("no_pictures")
def test_real_runs_that_are_equal_end_after_three_pairs_and_are_a_baseline_until_the_text_changes(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("sweeps.decide.commit", lambda: "abc")
    typed = ["-m", "hydra/sweeper=decide", *tiny(tmp_path, max_steps=1)]
    variants = "hydra.sweeper.variants=['log_interval=5','log_interval={}']"
    first = run_here(*typed, variants.format(6), "hydra.sweep.dir=one", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    state = "is open, neither better nor worse before pair 7: val_bpb differs by +0, median +0 (-inf to +inf)"
    assert f"seed 2: log_interval=6 {state}" in first.stdout
    found = record_of(tmp_path / "one")
    (pairs,) = found["comparisons"]
    assert pairs["verdict"] == "no difference: 3 pairs are equal" and pairs["own"] == pairs["first"]
    assert found["commit"] == "abc" and len(found["text"]) == 16 and pairs["seconds"] > 0
    asked = [*typed, variants.format(7), "hydra.sweeper.baseline=one", "hydra.sweep.dir=two"]
    second = run_here(*asked, cwd=tmp_path)
    assert second.returncode == 0 and second.stdout.count("is finished already") == 3
    assert record_of(tmp_path / "two")["comparisons"][0]["first"] == pairs["first"]
    os.utime(tmp_path / "text.txt", ns=(0, 0))
    touched = run_here(*asked, cwd=tmp_path)
    assert touched.returncode == 0 and touched.stdout.count("is finished already") == 6
    with (tmp_path / "text.txt").open("a") as text:
        text.write("one more sentence.\n")
    third = run_here(*asked[:-1], "hydra.sweep.dir=three", cwd=tmp_path)
    assert third.stderr.startswith("error: hydra.sweeper.baseline=one has text=") and third.stderr.count("\n") == 1
    assert not (tmp_path / "three").exists()


@pytest.mark.long
def test_a_comparison_that_was_killed_goes_on_to_the_same_verdict(tmp_path):
    variants = 'hydra.sweeper.variants=["model.n_head=1","model.n_head=2"]'
    typed = ["-m", "hydra/sweeper=decide", variants, *tiny(tmp_path, max_steps=10)]
    typed += ["hydra.sweeper.max_pairs=6", "hydra.sweeper.give_up=3"]
    whole = run_here(*typed, "hydra.sweep.dir=whole", cwd=tmp_path)
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
    again = run_here(*advice[2:], cwd=tmp_path)
    assert again.returncode == 0 and "is finished already" in again.stdout, again.stderr
    assert (tmp_path / "cut/decide.md").read_text() == (tmp_path / "whole/decide.md").read_text()
