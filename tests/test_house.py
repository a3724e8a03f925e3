"""Who may import whom among the commands, which import-linter cannot see because they are no packages."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMMANDS = {"train", "sample", "eval", "export"}


def imported(file: Path) -> set[str]:
    """The modules that a file imports, inside functions and under TYPE_CHECKING too."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize(
    ("name", "forbidden"),
    [
        ("train", {"sweeps", "wandb", "optuna", "hydra"}),
        *((name, {"hydra", "sweeps"} | COMMANDS - {name}) for name in ("sample", "eval", "export")),
    ],
)
def test_a_command_imports_downwards_only(name, forbidden):
    assert {module.partition(".")[0] for module in imported(ROOT / f"{name}.py")} & forbidden == set()


def test_a_run_on_a_cpu_starts_without_torchs_compiler():
    """Whose import takes longer than all of torch's; counting the weights of some forms imported it."""
    code = """
import sys, training.start, generation.generate
from model.attention import FORMS, MODIFIERS, SETTINGS
from model.config import GPTConfig
from model.size import without_weights
for name in (*FORMS, *(f"sdpa+{modifier}" for modifier in (*SETTINGS, *MODIFIERS))):
    without_weights(GPTConfig(vocab_size=9, attention=name, attention_window=8 if "window" in name else None))
    assert "torch._dynamo" not in sys.modules, name
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
