"""The documents keep their word: their code runs, their links lead somewhere, their commands exist."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from hydra import compose, initialize_config_dir

from evaluate import EvaluateConfig
from export import ExportConfig
from generation.config import SampleConfig
from model.attention import registry
from schema import from_arguments, to_settings
from settings import CONF
from training.config import TrainConfig

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_python_runs_in_the_order_of_the_page(page):
    torch.manual_seed(0)
    names: dict[str, object] = {}
    text = page.read_text(encoding="utf-8")
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        line = text[: block.start()].count("\n") + 1
        with mock.patch.dict(registry.FUNCTIONS), mock.patch.dict(registry.MODIFIERS):  # pages add their own
            exec(compile("\n" * line + block[1], str(page), "exec"), names)  # blank lines make errors point at the page


USE = """
import torch
from model.attention import check
from model.config import GPTConfig
from model.gpt import GPT

for form in ("relu", "relu+head_scale", "sdpa+head_scale", "relu+sink+head_scale"):
    for name in check.CHECKS:
        assert check.run(name, form, torch.device("cpu"), torch.float32).startswith("ok"), (form, name)
gpt = GPT(GPTConfig(attention="relu+head_scale/sdpa", vocab_size=9, n_layer=2))
assert gpt.state_dict()["blocks.0.attention.modifiers.head_scale.scale"].shape == (4,)
assert "relu+head_scale" in check.combinations()
"""


def test_a_form_and_a_modifier_appended_as_the_page_says_exist_and_keep_the_contract(tmp_path):
    text = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")
    text = text[text.index("## Try your own attention") :]
    for found in ("model", "errors.py"):
        (shutil.copytree if (ROOT / found).is_dir() else shutil.copy)(ROOT / found, tmp_path / found)
    places = re.findall(r"Append\s+this\s+to\s+\[`([\w/.]+)`\]", text)
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert places == ["model/attention/variants.py", "model/attention/modifiers.py"]
    for place, block in zip(places, blocks, strict=True):
        (tmp_path / place).write_text((tmp_path / place).read_text() + "\n\n" + block)
    done = subprocess.run([sys.executable, "-c", USE], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_inside_the_project_leads_somewhere(page):
    for target in re.findall(r"\]\((?!https?://)([^)]+)\)", _without_code(page)):
        file, _, anchor = target.partition("#")
        other = page.parent / file if file else page
        assert other.exists() and (not anchor or anchor in _anchors(other)), target


def _without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", _without_code(page), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_shown_has_settings_that_exist(page):
    schemas = {"sample": SampleConfig, "evaluate": EvaluateConfig, "export": ExportConfig}
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for name, rest in re.findall(r"^(?:.*&& )?(?:python|torchrun.*) (\w+)\.py(?!\w)(.*)$", text, re.M):
        words = shlex.split(rest, comments=True)
        first = [re.sub(r"=(?:tag\(log,)?(?:interval|range)\(([^,]+),.*", r"=\1", word) for word in words]
        overrides = [re.sub(r"^([^=]+)=([^\"'\[]*?),.*", r"\1=\2", word) for word in first if not word.startswith("-")]
        if name == "train":
            with initialize_config_dir(str(CONF), version_base="1.3"):
                to_settings(compose(name, overrides), TrainConfig)
        elif name in schemas:  # and no script of docs/ or benchmarks/
            from_arguments(schemas[name], words)
