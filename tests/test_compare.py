"""docs/compare.py finds the best variant of a sweep, its lead, and the budget that was equal."""

from __future__ import annotations

import csv
import json
import math
import random
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from sweeping import put_job

from common.errors import SettingsError
from docs import measured
from docs.compare import Comparison, Pick, chosen, compare, variants
from docs.estimates import Estimate, holm
from docs.law import FAILED, Law, at_best_rate
from docs.recorded import recorded_jobs
from sweeps.leaderboard import read_jobs, write_leaderboard

TRUE = Law(floor=1.0, scale=1.5, power=0.3)
SEEDS, SIZES, RATES = ("1", "2", "3", "4", "5"), ("64", "96"), ("8e-3", "0.02", "0.05")
LENGTHS = (1.0, 0.5, 0.71, 1.4, 2.0)
GAINS = {"sdpa+gate": 1.5, "mla": 1 / 1.5, "softcap": 1.0}  # times the baseline's compute


def put_sweep(
    folder: Path,
    gains: dict[str, float],
    seeds: tuple[str, ...] = SEEDS,
) -> None:
    """A sweep whose variants have the baseline's loss at `gains` times the compute.

    The best rate is 0.02.
    """
    draw, number = random.Random(0), 0
    cases = [("sdpa", x, x) for x in LENGTHS] + [(name, 1.0, gain) for name, gain in gains.items()]
    for seed in seeds:
        common = draw.gauss(0, 0.05)  # which pairing takes out
        for size, rate in [(size, rate) for size in SIZES for rate in RATES]:
            for name, length, gain in cases:
                settings = [f"attention={name}", f"seed={seed}", f"optimizer.lr={rate}", f"model.n_embd={size}"]
                settings += [f"max_steps={length * 100:.0f}"] if length != 1 else []
                noise = draw.gauss(0, 0.002)
                worse = 0.1 * math.log(float(rate) / 0.02) ** 2
                bpb = TRUE.loss(gain) + common + noise + worse - 0.3 * (size == "96")
                times = 2 if name == "mla" else 1
                figures = dict(tokens=1000 * length, flops=times * 1e9 * length)
                figures["cache_bytes_per_token"] = 64.0 + len(name) + 9 * (seed == "5")  # of which the median is shown
                put_job(folder, number, *settings, val_bpb=bpb, **figures)
                number += 1


def table(folder: Path) -> dict[tuple[str, str], dict[str, str]]:
    with (folder / "comparison.csv").open() as file:
        return {(row["variant"], row["model.n_embd"]): row for row in csv.DictReader(file)}


def at(row: dict[str, str], name: str) -> tuple[float, float]:
    """A difference at equal `name` and its error."""
    mean, _, error, _ = row[f"± at equal {name} (p by Holm)"].split()
    return float(mean), float(error)


def change(folder: Path, chosen: dict[str, str], **figures: object) -> None:
    """Rewrite the summaries of the jobs that have these settings."""
    for job in read_jobs(folder):
        if chosen.items() <= job.settings.items():
            file = job.directory / "summary.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | figures))


@pytest.mark.long
@pytest.mark.slow
def test_the_law_is_recovered_and_inverted_and_knows_its_error():
    law = Law.fit(LENGTHS, [TRUE.loss(x) for x in LENGTHS])
    assert law.times_to(TRUE.loss(1.5)) == pytest.approx(1.5, rel=0.01)
    assert law.times_to(TRUE.loss(1 / 1.5)) == pytest.approx(1 / 1.5, rel=0.01)
    assert law.times_to(law.floor) == math.inf and max(map(abs, law.residuals)) < 1e-3 and law.freedom == 2
    assert Law.fit(LENGTHS, [2 - math.log(x) for x in LENGTHS]).floor == 0  # and never below

    draw, found, errors = np.random.default_rng(0), [], []
    lengths = (0.25, 0.5, 0.71, 1.0, 1.4, 2.0, 4.0)
    for _ in range(200):
        law = Law.fit(lengths, [TRUE.loss(x) + draw.normal(0, 0.003) for x in lengths])
        found.append(law.loss(1.2) - law.loss(1))
        errors.append(law.error(lambda law: law.loss(1.2) - law.loss(1)))
    assert np.mean(errors) == pytest.approx(np.std(found), rel=0.25) and law.error(lambda law: 1.0) == 0


@pytest.mark.slow
def test_measurements_have_a_row_for_each_size_and_variant_and_speeds_relative_to_the_baseline(tmp_path, monkeypatch):
    put_sweep(tmp_path, {"mla": 1.0}, seeds=("1", "2"))
    model = SimpleNamespace(config=SimpleNamespace(position="learned"))
    monkeypatch.setattr(measured, "open_checkpoint", lambda where: SimpleNamespace(model=model))
    monkeypatch.setattr(
        measured, "times", lambda opened: {name: [2.0 if name == "mla" else 1.0] * 3 for name in opened}
    )
    monkeypatch.setattr(measured, "memory", lambda checkpoint: 5_000_000)
    measured.main(tmp_path, None)
    with (tmp_path / "measured.csv").open() as file:
        rows = {(row["variant"], row["model.n_embd"]): row for row in csv.DictReader(file)}
    assert rows.keys() == {(name, size) for name in ("sdpa", "mla") for size in SIZES}
    assert [rows[name, "96"]["× tokens/s"] for name in ("sdpa", "mla")] == ["1.0000", "0.5000"]
    assert rows["mla", "64"]["MB at T = 4,096"] == "5"
    compare(tmp_path)
    assert table(tmp_path)["mla", "96"]["× tokens/s"] == "0.50 ± 0.00"


def test_speeds_of_a_comparison_of_one_pair_are_relative_to_its_first_variant_whichever_ran_first(
    tmp_path, monkeypatch
):
    put_job(tmp_path, 0, "seed=1", "attention=sdpa+gate", val_bpb=1.0)
    put_job(tmp_path, 1, "seed=1", "attention=sdpa", val_bpb=2.0)
    for number, name in enumerate(("1-1", "1-0")):  # SEED-VARIANT: a coin has chosen the second variant
        (tmp_path / str(number)).rename(tmp_path / name)
    (tmp_path / "decide.json").touch()
    model = SimpleNamespace(config=SimpleNamespace(position="learned"))
    monkeypatch.setattr(measured, "open_checkpoint", lambda where: SimpleNamespace(model=model))
    monkeypatch.setattr(measured, "times", lambda opened: {name: [1.0 + ("gate" in name)] * 3 for name in opened})
    monkeypatch.setattr(measured, "memory", lambda checkpoint: 5_000_000)
    measured.main(tmp_path, None)
    with (tmp_path / "measured.csv").open() as file:
        assert {row["variant"]: row["× tokens/s"] for row in csv.DictReader(file)} == {
            "sdpa": "1.0000",
            "sdpa+gate": "0.5000",
        }


@pytest.mark.slow
def test_a_known_factor_of_compute_is_found_at_both_sizes(tmp_path):
    put_sweep(tmp_path, GAINS)
    speeds = [f"sdpa,{size},1.0000,0.0000" for size in SIZES]  # as docs/measured.py has it of the baseline
    speeds += [f"{name},{size},{0.5 if name == 'mla' else 1},0.05" for name in GAINS for size in SIZES]
    (tmp_path / "measured.csv").write_text("\n".join(["variant,model.n_embd,× tokens/s,± × tokens/s", *speeds]))
    text = compare(tmp_path)
    rows = table(tmp_path)
    for size in SIZES:
        gate, mla = rows["sdpa+gate", size], rows["mla", size]
        for row, factor in ((gate, 1.5), (mla, 1 / 3)):  # with twice the FLOPs
            found, _, seeds, _, law = row["effective compute ± seeds ± law"].split()[:5]
            assert float(found) == pytest.approx(factor, rel=0.05) and float(seeds) < 0.05 and float(law) < 0.1
        assert mla["× tokens/s"] == "0.50 ± 0.05" and float(mla["effective time"]) == pytest.approx(1 / 3, rel=0.06)
        assert float(gate["optimizer.lr"].split(" to ")[0]) == pytest.approx(0.02, rel=0.02)
        assert "(end)" not in text
        assert rows["softcap", size]["at all sizes"] == "undecided" and gate["cache B/token"] == "73"
        for name in ("FLOPs", "seconds"):
            assert at(mla, name)[0] == pytest.approx(TRUE.loss(1 / 1.5) - TRUE.loss(2), abs=0.01)
            assert at(mla, name)[1] >= at(mla, "tokens")[1]
        slope = TRUE.scale * TRUE.power * 0.5 ** (TRUE.power - 1)  # of the loss by the speed, whose error is 0.05
        assert at(mla, "seconds")[1] == pytest.approx(0.05 * slope, rel=0.1) and at(mla, "FLOPs")[1] < 0.02
        assert not mla["effective compute ± seeds ± law"].endswith("extrapolated")  # 2/3 of its length in the sweep
    assert rows["sdpa+gate", "64"]["at all sizes"] == "wins at equal tokens, FLOPs, seconds"
    assert rows["mla", "96"]["at all sizes"] == "loses at equal tokens, FLOPs, seconds"
    assert rows["sdpa", "64"]["at all sizes"] == "the baseline" and next(iter(rows))[0] == "sdpa+gate"
    assert text.startswith("| variant") and (tmp_path / "comparison.md").read_text() in text
    residuals = [float(rest.split()[0]) for rest in text.split("residuals ")[1].split(".\n")[0].split(", ")]
    assert len(residuals) == len(LENGTHS) and sum(residuals) == pytest.approx(0, abs=1e-3)
    half = 4.303 * (law := Comparison(tmp_path).laws["64"]).error(lambda law: law.power)  # t of two degrees of freedom
    assert f"times^-{law.power:.3f} (± {half:.3f}, 95% by t)" in text


@pytest.mark.slow
def test_p_is_by_holm_over_all_of_a_column_and_the_verdict_by_it(tmp_path):
    put_sweep(tmp_path, {"sdpa+gate": 1.5, "softcap": 1.004, **{f"form{i}": 1.0 for i in range(12)}})
    compare(tmp_path)
    found = [row for row in Comparison(tmp_path).rows() if row.variant != "sdpa"]
    ps = [row.differences["tokens"].p for row in found]
    assert [row.holm["tokens"] for row in found] == holm(ps) and len(ps) == 28
    assert sum(p < 0.05 for p in ps) > sum(row.holm["tokens"] < 0.05 for row in found) == 2
    won = {
        variant for (variant, _), row in table(tmp_path).items() if row["at all sizes"].startswith(("wins", "loses"))
    }
    assert won == {"sdpa+gate"}


@pytest.mark.slow
def test_what_is_ahead_at_one_size_only_is_undecided_and_further_columns_are_added(tmp_path):
    put_sweep(tmp_path, {"sdpa+gate": 1.5}, seeds=SEEDS[:3])
    change(tmp_path, {"model.n_embd": "96", "attention": "sdpa+gate"}, val_bpb=2.6)
    # The other seeds would choose this one's last rate, where it would not itself.
    lucky = {"model.n_embd": "64", "attention": "sdpa+gate", "seed": "1", "optimizer.lr": RATES[2]}
    change(tmp_path, lucky, val_bpb=0.5)
    (tmp_path / "measured.csv").write_text("variant,model.n_embd,recall\nsdpa+gate,96,0.75,more\nsdpa\n")
    compare(tmp_path)
    rows = table(tmp_path)
    assert rows["sdpa+gate", "64"]["at all sizes"] == "undecided" and next(iter(rows)) == ("sdpa", "64")
    assert rows["sdpa+gate", "64"]["optimizer.lr"].endswith(" to 0.05 (end)")
    assert rows["sdpa+gate", "96"]["recall"] == "0.75" and rows["sdpa", "96"]["recall"] == "–"
    assert "× tokens/s" not in rows["sdpa", "96"] and "± at equal seconds (p by Holm)" not in rows["sdpa", "96"]


@pytest.mark.slow
def test_a_run_that_failed_counts_for_no_variant_and_not_for_the_baseline(tmp_path):
    """Whatever its last evaluation had found."""
    put_sweep(tmp_path, {"sdpa+gate": 1.5, "softcap": 1.0})
    first = {"model.n_embd": "64", "attention": "sdpa", "seed": "1", "optimizer.lr": RATES[0]}
    change(tmp_path, first, status="failed", val_bpb=None, tokens=None, flops=None)
    change(tmp_path, {"model.n_embd": "64", "attention": "sdpa", "seed": "3", "max_steps": "200"}, status="failed")
    change(tmp_path, {"model.n_embd": "64", "attention": "sdpa+gate", "seed": "1"}, status="failed", val_bpb=9.0)
    change(tmp_path, {"model.n_embd": "96", "attention": "sdpa", "seed": "2"}, status="failed", val_bpb=None)
    for seed in SEEDS[1:]:
        change(tmp_path, {"model.n_embd": "96", "attention": "softcap", "seed": seed}, status="failed")
    text, rows = compare(tmp_path), table(tmp_path)
    left = "4 of 5 seeds have a pair of finished runs. It neither wins nor loses."
    assert f"Failed or not finished: sdpa+gate at model.n_embd=64; {left}" in text and ("softcap", "96") not in rows
    assert f"sdpa+gate at model.n_embd=96; {left}" in text and "Seeds of a variant: 5." in text  # a baseline failed
    for size in SIZES:
        found = rows["sdpa+gate", size]["effective compute ± seeds ± law"]
        assert float(found.split()[0]) == pytest.approx(1.5, rel=0.05)
        assert rows["sdpa+gate", size]["at all sizes"] == "undecided", "without a seed, whatever the p of the others"


@pytest.mark.long
def test_a_seed_that_failed_takes_the_win_from_a_variant_and_from_all_that_its_baseline_is_in(tmp_path):
    for name, failed in (("all", None), ("own", "sdpa+gate"), ("baseline", "sdpa")):
        put_sweep(folder := tmp_path / name, {"sdpa+gate": 1.5, "mla": 1 / 3})
        change(folder, {"attention": failed, "seed": "1"}, status="failed")
        compare(folder)
        found = {variant: row["at all sizes"].split()[0] for (variant, _), row in table(folder).items()}
        assert found["sdpa+gate"] == ("wins" if failed is None else "undecided")
        assert found["mla"] == ("undecided" if failed == "sdpa" else "loses")


@pytest.mark.slow
def test_a_factor_is_extrapolated_beyond_the_lengths_of_its_own_size_which_must_be_five(tmp_path):
    put_sweep(tmp_path, {"sdpa+gate": 3.0})
    compare(tmp_path)
    assert table(tmp_path)["sdpa+gate", "64"]["effective compute ± seeds ± law"].endswith("extrapolated")
    for job in read_jobs(tmp_path):
        if job.settings["model.n_embd"] == "64" and job.settings.get("max_steps") == "200":
            shutil.rmtree(job.directory)
    assert "The baseline at model.n_embd=64 is finished at 4 lengths with the same seeds; its law" in compare(tmp_path)
    row = table(tmp_path)["sdpa+gate", "64"]
    assert (
        row["effective compute ± seeds ± law"] == row["± at equal FLOPs (p by Holm)"] == "–"
        and at(row, "tokens")[0] < 0
    )


def test_a_best_rate_at_the_end_is_marked_and_what_one_size_lacks_is_undecided(tmp_path):
    put_sweep(tmp_path, {"sdpa+gate": 3.0}, seeds=SEEDS[:3])
    for job in read_jobs(tmp_path):
        lacks = job.settings["model.n_embd"] == "96" and job.settings["attention"] == "sdpa+gate"
        if job.settings["optimizer.lr"] == RATES[2] or lacks:
            shutil.rmtree(job.directory)
    assert "\n(end): the rates tried end there" in compare(tmp_path)
    row = table(tmp_path)["sdpa+gate", "64"]
    assert row["optimizer.lr"] == "0.02 (end)" and row["at all sizes"] == "undecided" and len(table(tmp_path)) == 3


def test_variants_are_named_alike_from_a_folder_and_from_its_table(tmp_path):
    cells = [("sdpa", 16), ("sdpa", None), ("sdpa+gate", 16), ("sdpa+gate", None)]
    for number, (attention, window) in enumerate(cells):
        job = put_job(tmp_path / "all", number, f"attention={attention}", f"model.attention_window={window}")
        model = {"attention": attention, "attention_window": window}
        (job / "config.yaml").write_text(yaml.safe_dump({"model": model, "seed": 1}))
    write_leaderboard(tmp_path / "all")
    (tmp_path / "kept").mkdir()
    shutil.copy(tmp_path / "all/leaderboard.csv", tmp_path / "kept")
    names = ["sdpa", "sdpa model.attention_window=null", "sdpa+gate", "sdpa+gate model.attention_window=null"]
    assert variants(recorded_jobs(tmp_path / "all")) == variants(recorded_jobs(tmp_path / "kept")) == names
    assert variants([]) == []


def test_a_table_that_another_program_has_saved_is_the_same_or_refused(tmp_path):
    """pandas puts an index before it, which told the seeds apart; after a cell that is no number the rest was lost."""
    for seed in (1, 2):
        put_job(tmp_path / "all", seed, "attention=sdpa", f"seed={seed}", val_bpb=seed + 0.5)
    write_leaderboard(tmp_path / "all")
    (tmp_path / "kept").mkdir()

    def read(*lines: str) -> list[tuple[dict, float | None]]:
        (tmp_path / "kept/leaderboard.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return [(job.settings, job.summary.val_bpb) for job in recorded_jobs(tmp_path / "kept")]

    names, first, second = (tmp_path / "all/leaderboard.csv").read_text().splitlines()
    assert read(names, first, second) == [({"seed": "1"}, 1.5), ({"seed": "2"}, 2.5)]
    assert read("," + names, "0," + first, "1," + second) == read(names, first, second)
    assert read("\ufeff" + names, first, second, "," * names.count(",")) == read(names, first, second)
    commas = [line.replace(",", ";").replace(".", ",") for line in (names, first, second)]
    for lines in (commas, [names, first, second.replace("2.5", "n/a")]):
        assert read(*lines) == []
        with pytest.raises(SettingsError, match="is no table that a sweep has written: give it as that wrote it"):
            compare(tmp_path / "kept")


def test_a_device_that_is_swept_tells_variants_apart_in_a_table_that_is_left_too(tmp_path):
    for number, (device, seed) in enumerate((device, seed) for device in ("cpu", "cuda") for seed in (1, 2, 3)):
        figures = {"device": device, "seed": seed, "val_bpb": 1 + 0.1 * (device == "cuda") + 0.01 * seed**2}
        put_job(tmp_path / "all", number, f"device={device}", f"seed={seed}", **figures)
    write_leaderboard(tmp_path / "all")
    (tmp_path / "kept").mkdir()
    shutil.copy(tmp_path / "all/leaderboard.csv", tmp_path / "kept")
    for folder in ("all", "kept"):
        compare(tmp_path / folder)
        assert at(table(tmp_path / folder)["device=cuda", ""], "tokens") == (0.1, 0.0)


def test_no_seed_chooses_its_own_rate(tmp_path):
    losses = {"0.01": (0.1, 2.0, 2.0), "0.02": (1.5, 1.5, 1.5)}  # seed 0 would choose 0.01, as would the mean of all
    for number, (rate, seed) in enumerate((rate, seed) for rate in losses for seed in range(3)):
        put_job(tmp_path, number, f"optimizer.lr={rate}", f"seed={seed}", val_bpb=losses[rate][seed])
    runs: dict = {}
    for job in read_jobs(tmp_path):
        runs.setdefault(job.settings["optimizer.lr"], {})[job.settings["seed"]] = job
    found = chosen(runs)
    assert found["0"] == Pick(runs["0.01"]["0"], 1.5, 0.02, at_end=True) and found["1"].rate == 0.01


def test_between_three_rates_the_best_is_interpolated_and_at_an_end_it_is_said():
    rates, ln = (0.01, 0.02, 0.04), np.log((0.01, 0.02, 0.04))
    bowl = [[2 + (x - math.log(0.025)) ** 2 + seed * x for seed in (0, 0.1, -0.1)] for x in ln]
    bpb, rate, is_inside = at_best_rate(rates, bowl, 0)
    assert is_inside and rate == pytest.approx(0.025) and bpb == pytest.approx(2)  # the other two's tilts cancel
    assert at_best_rate(rates, bowl, 1)[1] == pytest.approx(0.025 * math.exp(0.025), rel=1e-6)
    assert at_best_rate(rates, [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]], 0) == (1.0, 0.01, False)
    assert at_best_rate((0.0, 0.02, 0.04), [[2.0, 2.0], [1.0, 1.0], [3.0, 3.0]], 0) == (1.0, 0.02, True)  # ln 0
    assert at_best_rate(rates, [[3.0, 3.0], [1.0, 1.0], [FAILED, 2.0]], 1) == (1.0, 0.02, True)  # one of three failed
    # A rate at which another seed failed is worse than any without, and fewer failures are better than more.
    assert at_best_rate(rates[:2], [[1.0, FAILED], [9.0, 9.0]], 0) == (9.0, 0.02, False)
    assert at_best_rate(rates[:2], [[1.0, FAILED, FAILED], [9.0, FAILED, 9.0]], 0)[1] == 0.02
    assert at_best_rate([0.02], [[1.5, 2.5]], 1) == (2.5, 0.02, False)


def test_equal_cost_moves_the_baseline_along_its_law():
    law = Law(1.0, 1.5, 0.3, LENGTHS, (0.0,) * 5)
    found = law.at_equal_cost(Estimate(-0.1, 0.01, 4), 2.0, (0.02, math.inf))
    assert found.mean == pytest.approx(-0.1 - (law.loss(2) - law.loss(1)))
    assert found.error == pytest.approx(math.hypot(0.01, 0.02)) and found.freedom == pytest.approx(4 * 25)
    compute, seeds, _ = law.effective_compute(Estimate(-0.1, 0.001, 4), 2.0)
    slope = law.scale * law.power * (2 * compute) ** (-law.power - 1)  # of the loss there, by the length
    assert law.loss(2 * compute) == pytest.approx(law.loss(1) - 0.1) and seeds == pytest.approx(
        0.001 / slope / 2, rel=1e-3
    )


def test_a_variant_that_is_of_another_length_or_unfinished_is_named(tmp_path):
    """Runs that were trained longer one by one, resume=FOLDER/2 max_steps=20, took their row away without a word."""
    lengths = {"sdpa": 10, "average": 20, "linear": 10, "mla": 10}
    bits = {"sdpa": (5.0, 5.25), "average": (4.0, 4.5), "linear": (5.5, 5.25), "mla": (4.0, 4.0)}
    for number, (name, seed) in enumerate((name, seed) for name in lengths for seed in (0, 1)):
        settings = (f"attention={name}", f"seed={seed}", f"max_steps={lengths[name]}")
        status = "stopped" if name == "mla" else "finished"
        tokens = 256 * lengths[name]
        put_job(tmp_path, number, *settings, status=status, val_bpb=bits[name][seed], tokens=tokens, flops=1e9)
    text, rows = compare(tmp_path), table(tmp_path)
    assert "Left out: average, trained with max_steps=20 alone, and the baseline with 10." in text
    assert "Failed or not finished: mla; 0 of 2 seeds have a pair of finished runs." in text
    assert {variant for variant, _ in rows} == {"sdpa", "linear"}
    # By hand: the differences are 0.5 and 0, so their mean is 0.25 and its error 0.25.
    assert at(rows["linear", ""], "tokens") == (0.25, 0.25)


@pytest.mark.parametrize(
    "first, other, differ",
    [
        ("tokenizer=byte", "tokenizer=bpe", True),
        ("tokenizer=bpe tokenizer.vocab_size=512", "tokenizer=bpe tokenizer.vocab_size=1024", True),
        ("tokenizer.name=byte", "tokenizer=byte tokenizer.vocab_size=512", False),
        ("init_from=null", "init_from=other", False),
    ],
)
def test_equal_tokens_of_several_tokenizers_are_told_to_be_no_equal_text(tmp_path, first, other, differ):
    for number, settings in enumerate((first, other) * 2):
        put_job(tmp_path, number, *settings.split(), f"seed={number // 2}", val_bpb=5.0 + number)
    assert ("runs of equal tokens have learned unequal amounts of text." in compare(tmp_path)) == differ


@pytest.mark.slow
def test_a_variant_of_other_tokens_or_another_text_is_left_out(tmp_path):
    for name, figures in (("tokens", {"tokens": 5.0}), ("scored", {"val_tokens": 5.0, "val_loss": 1.0})):
        put_sweep(folder := tmp_path / name, {"sdpa+gate": 1.5, "mla": 1 / 3})
        change(folder, {"attention": "sdpa+gate", "model.n_embd": "64", "seed": "2"}, **figures)
        text, rows = compare(folder), table(folder)
        assert "Left out: sdpa+gate at model.n_embd=64, trained on other numbers of tokens than the baseline" in text
        assert ("sdpa+gate", "64") not in rows and rows["sdpa+gate", "96"]["at all sizes"] == "undecided"
        assert rows["mla", "64"]["at all sizes"].startswith("loses")


@pytest.mark.slow
def test_a_folder_that_lacks_what_is_needed_is_one_sentence(tmp_path):
    (tmp_path / "pairs").mkdir()
    (tmp_path / "pairs/decide.json").touch()
    with pytest.raises(SettingsError, match="is of hydra/sweeper=decide, and .* often wrong: read its decide.md"):
        compare(tmp_path / "pairs")
    put_sweep(tmp_path / "one", {}, seeds=("1",))
    with pytest.raises(SettingsError, match=r"is finished for 1 seeds at model.n_embd=64: let it finish two or more"):
        compare(tmp_path / "one")
    put_sweep(tmp_path / "two", {"mla": 1.0}, seeds=("1", "2"))
    for content, said in (
        ("name\n1\n", "measured.csv has no columns variant and model.n_embd: add them, or remove the file"),
        ("variant,model.n_embd,× tokens/s\nmla,64,fast\n", "mla's × tokens/s=0 must be finite and above 0"),
        ("variant,model.n_embd,× tokens/s\nmla,64,inf\n", "mla's × tokens/s=inf must be finite and above 0"),
    ):
        (tmp_path / "two/measured.csv").write_text(content)
        with pytest.raises(SettingsError, match=re.escape(said)):
            compare(tmp_path / "two")
    (tmp_path / "two/measured.csv").unlink()
    change(tmp_path / "two", {"model.n_embd": "64", "attention": "mla"}, flops=None)
    with pytest.raises(SettingsError, match="the summary of job .* has no flops: train that job again"):
        compare(tmp_path / "two")
    (tmp_path / "recorded").mkdir()
    (tmp_path / "recorded/leaderboard.csv").write_text('"' + "a" * 200_000)  # more than the csv module reads
    with pytest.raises(SettingsError, match="is no table that a sweep has written: give it as that wrote it"):
        compare(tmp_path / "recorded")
    with pytest.raises(SettingsError, match="holds no sweep"):
        compare(tmp_path / "nothing")


def test_runs_without_bits_per_byte_are_named(tmp_path):
    """As those of a task, of which there is no baseline either."""
    put_job(tmp_path, 0, "data.source=recall", "seed=1", val_bpb=None, val_accuracy=0.5)
    with pytest.raises(SettingsError, match=r"has no finished run with bits per byte: .* docs/recall.py tabulates"):
        compare(tmp_path)
