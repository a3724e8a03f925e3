"""docs/scaling_law.py finds the law that a sweep's figures follow, and max_flops gives every size one budget."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from model.config import GPTConfig
from model.size import flops_per_token, without_weights
from training.config import TrainConfig
from training.run import steps_to_take

SCRIPT = Path(__file__).resolve().parent.parent / "docs" / "scaling_law.py"


def run_script(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True)


def write_sweep(folder: Path, exponent: float) -> None:
    """Losses that are least at N = 2 · C^exponent, with a failed job and an unfinished one among them."""
    lines = ["rank,job,max_flops,model.n_embd,status,parameters,val_bpb"]
    for flops in (1e12, 1e13, 1e14):
        best = 2 * flops**exponent
        for factor in (0.25, 0.5, 1, 2, 4):
            bpb = 3 - 0.05 * np.log10(flops) + 0.2 * np.log10(factor) ** 2
            lines.append(f"1,0,{flops},1,finished,{best * factor},{bpb}")
        lines += [f"9,9,{flops},1,failed,,", f"9,9,{flops},1,running,5,0.1"]
    (folder / "leaderboard.csv").write_text("\n".join(lines))


@pytest.mark.parametrize("exponent", [0.4, 0.5])
def test_the_law_behind_the_figures_is_found(tmp_path, exponent):
    write_sweep(tmp_path, exponent)
    result = run_script(tmp_path)
    law = f"best parameters N = 2 · C^{exponent:.2f}, exponent {exponent:.2f} to {exponent:.2f}\n"  # without noise
    assert law in result.stdout, result.stderr
    assert (tmp_path / "scaling_law.png").stat().st_size > 5000


def test_a_size_counts_with_its_best_rate_and_the_law_is_given_without_embeddings_too(tmp_path):
    lines, draw = ["max_flops,optimizer.lr,status,parameters,parameters_in_blocks,val_bpb"], np.random.default_rng(0)
    for flops in (1e12, 1e13, 1e14, 1e15):
        for factor in (0.25, 0.5, 1, 2, 4):
            n = factor * 2 * flops**0.5
            best = 3 - 0.05 * np.log10(flops) + 0.2 * np.log10(factor) ** 2 + draw.normal(0, 0.01)
            lines += [f"{flops},{lr},finished,{10 * n**0.8},{n},{best + worse}" for lr, worse in ((1, 0.3 * n), (2, 0))]
    (tmp_path / "leaderboard.csv").write_text("\n".join(lines))
    result = run_script(tmp_path)
    found = re.search(r"without embeddings N = \S+ · C\^(\S+), exponent (\S+) to (\S+)\n", result.stdout)
    assert found, result.stdout + result.stderr
    exponent, low, high = map(float, found.groups())
    assert low <= 0.5 <= high and 0 < high - low < 0.3 and exponent == pytest.approx(0.5, abs=0.05)


def test_a_best_size_outside_those_tried_is_not_given(tmp_path):
    lines = ["max_flops,status,parameters,val_bpb"]
    lines += [
        f"{flops},finished,{n},{5 - np.log10(n) + 0.01 * np.log10(n) ** 2}" for flops in (1, 2) for n in (1, 2, 3)
    ]
    (tmp_path / "leaderboard.csv").write_text("\n".join(lines))
    result = run_script(tmp_path)
    assert result.stdout.count("outside the sizes tried |") == 2 and "· C^" not in result.stdout
    assert result.returncode == 0 and (tmp_path / "scaling_law.png").stat().st_size > 5000, result.stderr
    assert "fewer than two budgets have their best size within the sizes tried: add sizes\n" in result.stdout


def test_a_folder_that_is_no_such_sweep_is_one_sentence(tmp_path):
    for result in (run_script(tmp_path), run_script(tmp_path / "missing")):
        assert result.returncode == 1 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    (tmp_path / "leaderboard.csv").write_text("max_flops,status,parameters,val_bpb\n1e9,finished,5,2\n")
    assert "sweep both" in run_script(tmp_path).stderr


def test_max_flops_gives_every_size_the_same_arithmetic():
    for n_embd in (32, 64, 128):
        config = TrainConfig(model=GPTConfig(n_embd=n_embd, vocab_size=257), max_flops=1e12)
        model = without_weights(config.model)
        spent = steps_to_take(config, model) * config.tokens_per_step * flops_per_token(model)
        assert spent == pytest.approx(1e12, rel=0.01)
        assert steps_to_take(replace(config, max_steps=7), model) == 7
        assert steps_to_take(replace(config, max_flops=1.0), model) == 1
