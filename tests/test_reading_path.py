"""The files that README names, in its order: what each needs is in it, or in a file before it."""

import ast
import re
from pathlib import Path

import pytest

import model.attention

ROOT = Path(__file__).parent.parent
ROOMS = {"common", "model", "data", "runs", "training", "generation", "interop", "pages", "sweeps", "cli"}
MOST = 5
ELSEWHERE = {  # the files that take more names from files that come later or are not on the path
    # The CPU's faster ways, which come to the same.
    "model/layers.py": "FusedRMSNorm Rows decodes multiply normalize trains_norm",
    # What a run is on disk.
    "training/run.py": """AsyncCheckpointer Meta PROJECT_HASH Progress SettingsError Signals TrainConfig __version__
        flops_per_token log_sizes memory_errors plain_weights plural processor_name seed_generators tokens_hash""",
    # The frame of the loop: a with statement opens and closes each.
    "train.py": """Evaluation Loggers Report TrainConfig decode_rate explain_failures fast_products open_run
        run_eagerly run_train_command batch_to_device refuse_learned_leak""",
}


def reading_path() -> list[str]:
    """Return the files of README's table in order: for each row those before its file, then the file."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d \| (\[.*?\)) \| .*? \| (.*?) ?\|$", page, re.MULTILINE)
    return [file for own, before in rows for file in re.findall(r"\]\(([\w/]+\.py)\)", before + own)]


PATH = reading_path()


def imports(tree: ast.Module) -> dict[str, str]:
    """Return the project's names that a file imports, and their modules; a module imported whole is one name."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ROOMS:
            found |= {alias.name: node.module for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name: "" for alias in node.names if alias.name.split(".")[0] in ROOMS}
    return found


def definitions(tree: ast.Module) -> set[str]:
    """Return the names that a file defines at its top."""
    found = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def elsewhere(file: str) -> set[str]:
    """Return the names that a file takes from files that do not stand before it on the path."""
    earlier = PATH[: PATH.index(file)]
    known = set()
    for other in earlier:
        tree = ast.parse((ROOT / other).read_text(encoding="utf-8"))
        known |= {(other.removesuffix(".py").replace("/", "."), name) for name in definitions(tree)}
    used = imports(ast.parse((ROOT / file).read_text(encoding="utf-8")))
    return {name for name, module in used.items() if (module, name) not in known}


def test_the_path_has_the_six_files_and_those_before_them():
    assert len(PATH) == len(set(PATH)) == 19 and PATH[-1] == "train.py"
    assert all((ROOT / file).is_file() for file in PATH)


@pytest.mark.parametrize("file", PATH)
def test_a_file_of_the_path_takes_few_names_from_elsewhere(file):
    found = elsewhere(file)
    if file in ELSEWHERE:
        assert found <= set(ELSEWHERE[file].split()) and len(found) > MOST, sorted(found)
    else:
        assert len(found) <= MOST, sorted(found)


def test_the_pages_name_the_files_of_attention_in_one_order():
    listed = re.findall(r"^(\w+\.py) ", model.attention.__doc__, re.MULTILINE)
    here = [Path(file).name for file in PATH if file.startswith("model/attention/")]
    assert listed[: len(here)] == here
    named = set(re.findall(r"\b\w+\.py\b", model.attention.__doc__))
    assert named >= {path.name for path in (ROOT / "model/attention").glob("*.py")} - {"__init__.py"}
