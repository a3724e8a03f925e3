"""sweeps.compare finds what was put into a sweep's folder: which variant is ahead, by how much, at equal what."""

from __future__ import annotations

import csv
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_sweep import put_job

from errors import SettingsError
from sweeps.compare import Law, Paired, chosen, compare, p_value
from sweeps.leaderboard import read_jobs

ROOT = Path(__file__).parent.parent
TRUE = Law(floor=1.0, scale=1.5, power=0.3)
SEEDS, SIZES, RATES = ("1", "2", "3", "4", "5"), {"64": 1e5, "96": 4e5}, ("0.01", "0.02", "0.04")
GAINS_EQUAL = ("sdpa+gate", "mla")
GAINS = {"sdpa+gate": 1.5, "mla": 1 / 1.5, "softcap": 1.0}  # times the baseline's compute


@pytest.mark.parametrize(
    ("t", "freedom", "p"),  # tables of Student's t, two-sided
    [(12.706, 1, 0.05), (4.303, 2, 0.05), (2.776, 4, 0.05), (4.604, 4, 0.01), (2.262, 9, 0.05), (-1.812, 10, 0.1)],
)
def test_p_is_that_of_the_tables(t, freedom, p):
    assert p_value(t, freedom) == pytest.approx(p, rel=2e-3) and p_value(0.0, freedom) == 1


def test_differences_are_paired():
    found = Paired.of([0.1, 0.3, 0.2, 0.2])
    assert found.mean == pytest.approx(0.2) and found.error == pytest.approx(0.04082, rel=1e-3)
    assert found.p == pytest.approx(0.01625, rel=1e-2)
    assert Paired.of([0.0, 0.0]).p == 1 and Paired.of([0.1, 0.1]).p == 0


def test_the_law_is_recovered_and_inverted():
    times = (0.5, 1.0, 1.4, 2.0)
    law = Law.fit(times, [TRUE.loss(x) for x in times])
    assert law.times(TRUE.loss(1.5)) == pytest.approx(1.5, rel=0.01)
    assert law.times(TRUE.loss(1 / 1.5)) == pytest.approx(1 / 1.5, rel=0.01)
    assert law.times(law.floor) == float("inf")


def put_sweep(folder: Path, gains: dict[str, float], seeds: tuple[str, ...] = SEEDS, noise: float = 0.002) -> None:
    """A sweep whose variants' losses are the baseline's at `gains` times the compute; the middle rate is best."""
    draw, number = random.Random(0), 0
    cases = [("sdpa", x, x) for x in (1.0, 0.5, 1.4, 2.0)] + [(name, 1.0, gain) for name, gain in gains.items()]
    for seed in seeds:
        common = draw.gauss(0, 0.05)  # which pairing takes out
        for size, rate in [(size, rate) for size in SIZES for rate in RATES]:
            for name, length, gain in cases:
                settings = [f"attention={name}", f"seed={seed}", f"optimizer.lr={rate}", f"model.n_embd={size}"]
                settings += [f"max_steps={length * 100:.0f}"] if length != 1 else []
                bpb = TRUE.loss(gain) + common + draw.gauss(0, noise) + 0.1 * (rate != "0.02") - 0.3 * (size == "96")
                figures = {"tokens": 1000 * length, "flops": 1e9 * length, "tokens_per_s": 500.0}
                figures |= {"parameters_in_blocks": SIZES[size], "cache_bytes_per_token": 64.0 + len(name)}
                if name == "mla":
                    figures |= {"tokens_per_s": 250.0, "flops": 2e9}
                put_job(folder, number, *settings, bpb=bpb, seed=int(seed), **figures)
                number += 1


def read(folder: Path) -> dict[tuple[str, str], dict[str, str]]:
    with (folder / "comparison.csv").open() as file:
        return {(row["variant"], row["model.n_embd"]): row for row in csv.DictReader(file)}


def test_a_known_factor_of_compute_is_found_at_both_sizes(tmp_path):
    put_sweep(tmp_path, GAINS)
    text = compare(tmp_path)
    rows = read(tmp_path)
    for size in SIZES:
        gate, mla = rows["sdpa+gate", size], rows["mla", size]
        assert float(gate["effective compute"].split()[0]) == pytest.approx(1.5, rel=0.05)
        assert float(mla["effective compute"].split()[0]) == pytest.approx(1 / 3, rel=0.05)  # with twice the FLOPs
        assert float(mla["effective time"]) == pytest.approx(1 / 3, rel=0.05) and mla["× tokens/s"] == "0.50"
        assert gate["optimizer.lr"] == "0.02" and rows["softcap", size]["at all sizes"] == "undecided"
        difference = float(mla["± at equal FLOPs (p)"].split()[0])
        assert difference == pytest.approx(TRUE.loss(1 / 1.5) - TRUE.loss(2), abs=0.01)
    assert rows["sdpa+gate", "64"]["at all sizes"] == "wins at equal tokens, FLOPs, seconds, parameters"
    assert rows["mla", "96"]["at all sizes"] == "loses at equal tokens, FLOPs, seconds, parameters"
    assert rows["sdpa", "64"]["at all sizes"] == "the baseline" and (tmp_path / "front.png").stat().st_size > 5000
    assert text.startswith("| variant") and (tmp_path / "comparison.md").read_text() in text


def test_what_is_ahead_at_one_size_only_is_undecided_and_further_columns_are_added(tmp_path):
    put_sweep(tmp_path, {"sdpa+gate": 1.5}, seeds=SEEDS[:3])
    for job in read_jobs(tmp_path):
        if job.settings["model.n_embd"] == "96" and "gate" in job.settings["attention"]:
            file = job.directory / "summary.json"
            file.write_text(file.read_text().replace(f'"val_bpb": {job.summary["val_bpb"]}', '"val_bpb": 2.6'))
    (tmp_path / "measured.csv").write_text("variant,model.n_embd,recall\nsdpa+gate,96,0.75\n")
    compare(tmp_path)
    rows = read(tmp_path)
    assert rows["sdpa+gate", "64"]["at all sizes"] == "undecided"
    assert rows["sdpa+gate", "96"]["recall"] == "0.75" and rows["sdpa", "96"]["recall"] == "–"


def test_a_run_that_failed_counts_for_no_variant_and_not_for_the_baseline(tmp_path):
    """Whatever its last evaluation had found."""
    put_sweep(tmp_path, {"sdpa+gate": 1.5})
    for job in read_jobs(tmp_path):
        failed = ("sdpa+gate", "1") if job.settings["model.n_embd"] == "64" else ("sdpa", "2")
        if (job.settings["attention"], job.settings["seed"]) == failed:
            (job.directory / "summary.json").write_text(
                json.dumps(job.summary | {"status": "failed", "val_bpb": 9.0 if failed[1] == "1" else None})
            )
    assert "Not finished: sdpa+gate at model.n_embd=64 (4 of 5 seeds)." in compare(tmp_path)
    rows = read(tmp_path)
    for size in SIZES:
        assert float(rows["sdpa+gate", size]["effective compute"].split()[0]) == pytest.approx(1.5, rel=0.05)


def test_a_factor_is_extrapolated_beyond_the_lengths_of_its_own_size(tmp_path):
    put_sweep(tmp_path, {"sdpa+gate": 1.7})
    for job in read_jobs(tmp_path):
        if job.settings["model.n_embd"] == "64" and job.settings.get("max_steps") == "200":
            shutil.rmtree(job.directory)
    compare(tmp_path)
    rows = read(tmp_path)
    assert "extrapolated" in rows["sdpa+gate", "64"]["effective compute"]
    assert "extrapolated" not in rows["sdpa+gate", "96"]["effective compute"]


def test_no_seed_chooses_its_own_rate(tmp_path):
    losses = {"0.01": (0.1, 2.0, 2.0), "0.02": (1.5, 1.5, 1.5)}  # seed 0 would choose 0.01, as would the mean of all
    for number, (rate, seed) in enumerate((rate, seed) for rate in losses for seed in range(3)):
        put_job(tmp_path, number, f"optimizer.lr={rate}", f"seed={seed}", bpb=losses[rate][seed])
    runs: dict = {}
    for job in read_jobs(tmp_path):
        runs.setdefault(job.settings["optimizer.lr"], {})[job.settings["seed"]] = job
    assert {seed: job.settings["optimizer.lr"] for seed, job in chosen(runs).items()}["0"] == "0.02"


def test_at_equal_parameters_a_larger_variant_has_to_be_as_good_as_a_larger_baseline(tmp_path):
    put_sweep(tmp_path, {"sdpa+gate": 1.0, "mla": 1.0})
    for job in read_jobs(tmp_path):
        grown = {"sdpa+gate": 1.5, "mla": 1 / 1.5}.get(job.settings["attention"], 1)
        known = job.summary | {"parameters_in_blocks": job.summary["parameters_in_blocks"] * grown}
        (job.directory / "summary.json").write_text(json.dumps(known))
    compare(tmp_path)
    rows = read(tmp_path)
    for size in SIZES:
        larger, smaller = (float(rows[name, size]["± at equal parameters (p)"].split()[0]) for name in GAINS_EQUAL)
        assert larger > 0.02 and smaller < -0.02


def test_a_folder_that_lacks_what_is_needed_is_one_sentence(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "sweeps.compare", tmp_path], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 1 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    put_sweep(tmp_path / "one", {}, seeds=("1",))
    with pytest.raises(SettingsError, match="is finished for 1 seeds: let it finish two or more"):
        compare(tmp_path / "one")
    for number, seed in enumerate("12"):
        put_job(tmp_path / "short", number, "attention=sdpa", f"seed={seed}")
    with pytest.raises(SettingsError, match=r"is finished at 1 lengths .*needs 3"):
        compare(tmp_path / "short")


def test_runs_without_a_known_cache_have_no_front_and_other_rates_no_speed(tmp_path):
    lengths = [("sdpa", rate, steps) for rate in RATES for steps in (100, 50, 140)]
    for number, (name, rate, steps, seed) in enumerate(
        (*case, seed) for case in [*lengths, ("mla", "0.02", 100)] for seed in (1, 2)
    ):
        settings = [f"attention={name}", f"optimizer.lr={rate}", f"max_steps={steps}", f"seed={seed}"]
        put_job(tmp_path, number, *settings, bpb=TRUE.loss(steps / 100) + seed / 100, tokens=10 * steps)
    assert "front" not in compare(tmp_path) and not (tmp_path / "front.png").exists()
    for job in tmp_path.glob("[0-9]*/job.json"):
        if "mla" in (text := job.read_text()):
            job.write_text(text.replace("optimizer.lr=0.02", "optimizer.lr=0.08"))
    with pytest.raises(SettingsError, match=r"^mla shares no optimizer\.lr and seed with the baseline"):
        compare(tmp_path)
