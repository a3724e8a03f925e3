"""The documents keep their word: their code runs, their links lead somewhere, their commands exist."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

from evaluate import EvaluateConfig
from export import ExportConfig
from generation.config import SampleConfig
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
        exec(compile("\n" * line + block[1], str(page), "exec"), names)  # the blank lines make errors point at the page


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
