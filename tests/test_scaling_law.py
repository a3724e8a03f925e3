"""docs/scaling_law.py finds the law of a sweep's figures; max_flops gives sizes one budget."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from common.errors import SettingsError
from docs.scaling_law import main, read_budgets
from model.config import GPTConfig
from model.size import flops_per_token, without_weights
from training.config import TrainConfig
from training.run import steps_to_take


def put_sweep(folder: Path, runs: list[dict]) -> None:
    """A sweep's table, with a failed and an unfinished job at each budget."""
    head = [
        "attention",
        "text_hash",
        "max_flops",
        "optimizer.lr",
        "status",
        "parameters",
        "parameters_in_blocks",
        "val_bpb",
    ]
    others = [{"max_flops": run["max_flops"], "status": "failed"} for run in runs]
    others += [run | {"status": "running", "parameters": 5, "val_bpb": 0.1} for run in runs]
    with (folder / "leaderboard.csv").open("w") as file:
        table = csv.DictWriter(file, head)
        table.writeheader()
        table.writerows([{"status": "finished"} | run for run in runs] + others)


def loss(flops: float, factor: float) -> float:
    """Of a model of `factor` times the best size for this budget."""
    return 3 - 0.05 * np.log10(flops) + 0.2 * np.log10(factor) ** 2


def test_a_rate_of_which_only_a_lucky_seed_is_finished_does_not_count_nor_does_a_loss_that_is_not_finite(tmp_path):
    losses = {"0.01": [2.0, 2.2], "0.02": [1.9, 2.1], "0.04": [1.5, ""]}
    runs = [
        {"max_flops": 1e12, "parameters": size, "optimizer.lr": rate, "val_bpb": bpb}
        for size in (10, 20, 30)
        for rate, seeds in losses.items()
        for bpb in seeds
    ]
    put_sweep(tmp_path, runs)
    assert read_budgets(tmp_path, "parameters") == {1e12: {10: 2.0, 20: 2.0, 30: 2.0}}


@pytest.mark.parametrize("name", ["attention", "text_hash"])
def test_sizes_of_several_attentions_or_texts_are_not_fitted_together(tmp_path, name):
    run = {"max_flops": 1e12, "parameters": 10, "val_bpb": 2.0}
    put_sweep(tmp_path, [run | {name: "a"}, run | {name: "b"}])
    with pytest.raises(SettingsError, match=f"has several values of {name}: give a sweep of sizes alone"):
        read_budgets(tmp_path, "parameters")


@pytest.mark.slow
@pytest.mark.parametrize("exponent", [0.4, 0.5])
def test_the_law_behind_the_figures_is_found(tmp_path, capsys, exponent):
    cases = [(flops, factor) for flops in (1e12, 1e13, 1e14) for factor in (0.25, 0.5, 1, 2, 4)]
    runs = [{"max_flops": c, "parameters": 2 * c**exponent * f, "val_bpb": loss(c, f)} for c, f in cases]
    put_sweep(tmp_path, runs)
    main(tmp_path, tmp_path / "law.png")
    law = f"Best parameters: N = 2 · C^{exponent:.2f}, exponent {exponent:.2f} to {exponent:.2f}.\n"  # without noise
    said = capsys.readouterr().out
    assert law in said and "without embeddings" not in said and (tmp_path / "law.png").stat().st_size > 5000


@pytest.mark.slow
def test_a_size_counts_with_its_best_rate_and_the_law_is_given_without_embeddings_too(tmp_path, capsys):
    runs, draw = [], np.random.default_rng(0)
    for flops in (1e12, 1e13, 1e14, 1e15):
        for factor in (0.25, 0.5, 1, 2, 4):
            n, bpb = factor * 2 * flops**0.5, loss(flops, factor) + draw.normal(0, 0.01)
            size = {"max_flops": flops, "parameters": 10 * n**0.8, "parameters_in_blocks": n}
            runs += [size | {"optimizer.lr": lr, "val_bpb": bpb + worse} for lr, worse in ((1, 0.3 * n), (2, 0))]
    put_sweep(tmp_path, runs)
    main(tmp_path, tmp_path / "law.png")
    found = re.search(r"without embeddings: N = \S+ · C\^(\S+), exponent (\S+) to (\S+)\.\n", capsys.readouterr().out)
    exponent, low, high = map(float, found.groups())
    assert low <= 0.5 <= high and 0 < high - low < 0.3 and exponent == pytest.approx(0.5, abs=0.05)


@pytest.mark.slow
def test_a_best_size_outside_those_tried_is_not_given(tmp_path, capsys):
    cases = [(flops, n) for flops in (1, 2) for n in (1, 2, 3)]
    put_sweep(tmp_path, [{"max_flops": c, "parameters": n, "val_bpb": 5 - np.log10(n)} for c, n in cases])
    main(tmp_path, tmp_path / "law.png")
    said = capsys.readouterr().out
    assert said.count("| outside the sizes tried | outside the sizes tried |") == 2 and "· C^" not in said
    assert "no law: add sizes" in said and (tmp_path / "law.png").stat().st_size > 5000


def test_a_folder_that_is_no_such_sweep_is_one_sentence(tmp_path):
    with pytest.raises(SettingsError, match="leaderboard.csv does not exist: name the file, or the folder"):
        main(tmp_path, tmp_path / "law.png")
    put_sweep(tmp_path, [{"max_flops": 1e9, "parameters": 5, "val_bpb": 2}])
    with pytest.raises(SettingsError, match="sweep both"):
        main(tmp_path, tmp_path / "law.png")


def test_max_flops_gives_every_size_the_same_arithmetic():
    for n_embd in (32, 64, 128):
        config = TrainConfig(model=GPTConfig(n_embd=n_embd, vocab_size=257), max_flops=1e12)
        model = without_weights(config.model)
        spent = steps_to_take(config, model) * config.tokens_per_step * flops_per_token(model)
        assert spent == pytest.approx(1e12, rel=0.01)
        assert steps_to_take(replace(config, max_steps=7), model) == 7
        assert steps_to_take(replace(config, max_flops=1.0), model) == 1
