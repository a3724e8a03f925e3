"""Who may import whom among the commands, which import-linter cannot see because they are no packages."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LONGEST_FIRST_LINE = 90
ROOMS = {file.parent.name for file in ROOT.glob("*/__init__.py")} - {"tests"}
COMMANDS = {"train", "sample", "eval", "export"}


def imported(file: Path) -> set[str]:
    """The modules that a file imports, inside functions and under TYPE_CHECKING too."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize(
    ("name", "forbidden"),
    [
        ("train", {"sweeps", "wandb", "hydra"}),
        *((name, {"hydra", "sweeps"} | COMMANDS - {name}) for name in ("sample", "eval", "export")),
    ],
)
def test_a_command_imports_downwards_only(name, forbidden):
    assert {module.partition(".")[0] for module in imported(ROOT / f"{name}.py")} & forbidden == set()


@pytest.mark.slow
def test_no_modules_import_each_other_in_a_circle():
    files = {file.relative_to(ROOT).with_suffix(""): file for room in ROOMS for file in (ROOT / room).rglob("*.py")}
    modules = {".".join(path.parts).removesuffix(".__init__"): file for path, file in files.items()}
    assert {"model", "model.attention.layer", "common.errors"} <= modules.keys()
    graph = {name: (imported(file) & modules.keys()) - {name} for name, file in modules.items()}
    assert [*TopologicalSorter(graph).static_order()]  # CycleError names the modules


def test_the_model_imports_no_other_room_but_errors_and_delays_no_import():
    for file in (ROOT / "model").rglob("*.py"):
        ours = {name for name in imported(file) if name.split(".")[0] in ROOMS - {"model"}}
        assert all(name.startswith("common.errors") for name in ours), file
        top = ast.parse(file.read_text(encoding="utf-8")).body
        delayed = [node for part in top for node in ast.walk(part) if isinstance(node, (ast.Import, ast.ImportFrom))]
        names = [alias.name for node in delayed if node not in top for alias in node.names]
        assert names in ([], ["varlen"]), file  # it imports torch's compiler
        assert "TYPE_CHECKING" not in file.read_text()


def nodes_of_the_product() -> list[tuple[Path, ast.AST]]:
    files = [ROOT / f"{name}.py" for name in sorted(COMMANDS)]
    for room in sorted(ROOMS):
        files += sorted((ROOT / room).rglob("*.py"))
    return [(file, node) for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]


def test_an_assignment_has_one_value_and_few_stand_inside_an_expression():
    assigned, packed, inside = [], [], []
    for file, node in nodes_of_the_product():
        if isinstance(node, ast.Assign):
            assigned.append(node)
            if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                packed.append(f"{file}:{node.lineno}")
        if isinstance(node, ast.NamedExpr):
            inside.append(f"{file}:{node.lineno}")
    assert len(assigned) > 2000
    assert len(packed) <= 0.02 * len(assigned), packed
    assert len(inside) <= 15, inside


def test_a_docstring_begins_with_a_short_line():
    long = []
    for file, node in nodes_of_the_product():
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            first = (ast.get_docstring(node) or "").partition("\n")[0]
            if len(first) > LONGEST_FIRST_LINE:
                long.append(f"{file}: {first}")
    assert long == []


@pytest.mark.long
@pytest.mark.slow
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


# Functions that read the weight of another module, by their file. They or their callers ask is_matrix() or
# is_untouched(), or compare their result with the module's, or make and tie weights.
READERS = {
    "apart.py": {"contributions"},
    "attention/ladder.py": {"project"},
    "attention/latent.py": {"of_queries"},
    "attention/local.py": {"make_projections"},
    "gpt.py": {"__init__", "loss", "nats_of", "initialize"},
    "layers.py": {"joined"},
    "row.py": {"norm_step", "linear_step", "attention_step", "step"},
    "size.py": {"flops_per_token"},
    "surgery.py": {"is_matrix", "tie_again"},
}


def test_a_weight_is_read_only_where_the_layer_is_known_to_be_it_alone():
    """A hook, an adapter or another module acts only when it is called, so all other code calls the layer."""
    found = {}
    for file in (ROOT / "model").rglob("*.py"):
        functions = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
        names = {
            function.name
            for function in functions
            for node in ast.walk(function)
            if isinstance(node, ast.Attribute) and node.attr == "weight" and ast.unparse(node.value) != "self"
        }
        if names and file.name != "plain.py":
            found[str(file.relative_to(ROOT / "model"))] = names
    assert found == READERS
