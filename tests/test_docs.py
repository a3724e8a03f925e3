"""The documents are true: their code runs, their links resolve, their commands exist."""

import contextlib
import csv
import functools
import json
import math
import os
import re
import runpy
import shlex
import shutil
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from itertools import accumulate, islice
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml
from conftest import first_of, run_here, some
from hydra import compose

import model.attention as registered
from cli.composition import OF_OPTUNA, composing, register_schema, to_settings
from cli.overrides import GROUPS
from common.settings import from_arguments, setting_hints
from data import overlap, prepare
from docs.compare import Comparison
from docs.estimates import Estimate
from eval import EvalConfig
from export import ExportConfig
from generation.config import SampleConfig
from model.attention.code import RAN, run_code
from model.config import GPTConfig
from sweeps.evidence import MOST_PAIRS
from training.config import TrainConfig

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "benchmarks").glob("*.md"))]
SCHEMAS = {"train": TrainConfig, "sample": SampleConfig, "eval": EvalConfig, "export": ExportConfig}


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


LONGEST = ROOT / "docs" / "library.md"


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.slow) if page == LONGEST else page for page in PAGES], ids=_name
)
def test_every_block_of_python_runs_in_the_order_of_the_page(page, tmp_path, monkeypatch, no_pictures):
    torch.manual_seed(0)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    monkeypatch.chdir(tmp_path)  # for what a page writes
    names: dict[str, object] = {}
    text = page.read_text(encoding="utf-8")
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        line = text[: block.start()].count("\n") + 1
        with mock.patch.dict(registered.FORMS), mock.patch.dict(registered.MODIFIERS):  # pages add their own
            exec(compile("\n" * line + block[1], str(page), "exec"), names)  # blank lines make errors point at the page
    register_schema({})  # without what resume and init_from brought


def bash_of(page: str, having: str) -> str:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    (block,) = [
        block for block in re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE) if having in block
    ]
    return block


def test_runs_with_a_tag_are_linked_wherever_they_are(tmp_path):
    for run, tag in {
        "first": "base",
        "2026-01-01/12-00-00-aaaa": "base",
        "two words": "base",
        "other": "based",
    }.items():
        (tmp_path / "disk" / run).mkdir(parents=True)
        (tmp_path / "disk" / run / "config.yaml").write_text(f"wandb:\n  tags:\n  - {tag}\n")
    (tmp_path / "outputs").symlink_to(tmp_path / "disk")  # as training.md has it
    command = bash_of("sweeps.md", "mkdir base").splitlines()[0]
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    assert {link.name for link in (tmp_path / "base").iterdir()} == {"first", "12-00-00-aaaa", "two words"}
    assert all((link / "config.yaml").is_file() for link in (tmp_path / "base").iterdir())


@pytest.mark.skipif(shutil.which("find") is None, reason="needs find")
@pytest.mark.parametrize(("page", "having"), [("sweeps.md", "find multirun"), ("training.md", "find outputs")])
def test_lines_that_remove_files_find_those_of_a_folder_that_is_a_link(page, having, tmp_path):
    step = tmp_path / "disk" / "run" / "checkpoints" / "step_3"
    step.mkdir(parents=True)
    (step / "optimizer.safetensors").touch()
    for name in ("outputs", "multirun"):
        (tmp_path / name).symlink_to(tmp_path / "disk")
    os.utime(step, (0, 0))
    (command,) = [line for line in bash_of(page, having).splitlines() if "step_*" in line or "optimizer" in line]
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    assert not (step / "optimizer.safetensors").exists()


@pytest.mark.skipif(shutil.which("shuf") is None, reason="needs shuf and split of GNU")
def test_the_folds_of_a_cross_validation_hold_out_each_document_once(tmp_path):
    documents = {f'{{"text": "document {number}"}}' for number in range(43)}
    (tmp_path / "notes.jsonl").write_text("".join(f"{each}\n" for each in [*documents, *documents]))
    (tmp_path / "fold_ax.txt").touch()
    subprocess.run(["bash", "-ec", f"python() {{ :; }}\n{bash_of('data.md', 'fold_')}"], cwd=tmp_path, check=True)
    held = {file.name: file.read_text().splitlines() for file in tmp_path.glob("fold_a?.jsonl")}
    assert sorted(map(len, held.values())) == [8, 8, 9, 9, 9]
    assert sorted(line for lines in held.values() for line in lines) == sorted(documents)
    for name, lines in held.items():
        assert sorted((tmp_path / f"rest_{name}").read_text().splitlines()) == sorted(documents - {*lines})


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
def test_lines_of_jq_write_one_template_or_none_and_count_samples_of_several_lines(tmp_path):
    (tmp_path / "THEIRS").mkdir()
    (tmp_path / "mymodel").mkdir()
    file = tmp_path / "mymodel" / "chat_template.jinja"
    for template, wanted in (("{{ a }}\n", "{{ a }}\n"), (None, None), ([{"name": "tool", "template": "b"}], None)):
        (tmp_path / "THEIRS" / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        subprocess.run(["bash", "-c", bash_of("interop.md", "chat_template")], cwd=tmp_path, check=True)
        assert (file.read_text() if file.exists() else None) == wanted
    texts = ["one\nline", "one\nmore", "one\nline"]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    _, count, _ = bash_of("generation.md", "known.txt").splitlines()
    assert subprocess.check_output(["bash", "-c", count], cwd=tmp_path).split() == [b"2"]
    texts = ['He said "No." And', "One.\nTwo! “Three.” ", "no end", "End."]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    _, whole = bash_of("generation.md", "num_samples=3 results").splitlines()
    assert subprocess.check_output(["bash", "-c", whole], cwd=tmp_path).decode() == (
        'He said "No."\nOne.\nTwo! “Three.”\n\nEnd.\n'
    )


USE = """
import torch
from model.attention import check
from model.config import GPTConfig
from model.gpt import GPT

for form in ("relu", "relu+head_scale", "sdpa+head_scale", "relu+sink+head_scale", "kerple", "kerple+sink"):
    for name in check.CHECKS:
        assert check.run(name, form, torch.device("cpu"), torch.float32).startswith("ok"), (form, name)
gpt = GPT(GPTConfig(attention="relu+head_scale/sdpa", vocab_size=9, n_layer=2))
assert gpt.state_dict()["blocks.0.attention.modifiers.head_scale.scale"].shape == (4,)
assert "relu+head_scale" in check.combinations()
"""


def own_attention() -> list[str]:
    """The form, the modifier and the layer of the page's section on an attention of one's own."""
    text = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")
    text = text[text.index("## Try your own attention") :]
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[:3]


@pytest.mark.long
def test_the_attentions_of_the_page_keep_the_contract_in_a_file(tmp_path):
    (tmp_path / "my_attention.py").write_text("".join(own_attention()))
    registries = (registered.FORMS, registered.MODIFIERS, RAN)
    with contextlib.ExitStack() as stack:
        for registry in registries:
            stack.enter_context(mock.patch.dict(registry))
        run_code(str(tmp_path / "my_attention.py"))
        exec(USE, {})


# What a project adds that has copied the attention module: all of model/, which trains in its own loop.
FOREIGN = f"""
import shutil
from pathlib import Path
for file in Path({str(ROOT / "model")!r}).glob("*.py"):
    shutil.copy(file, "model")

import torch
from model.config import GPTConfig
from model.gpt import GPT

model = GPT(GPTConfig(attention="sdpa+gate/delta", vocab_size=7, n_layer=2, n_embd=32, n_head=2, block_size=16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
tokens = torch.arange(4 * 17).view(4, 17) % 7
losses = []
for step in range(10):
    loss = model.loss(tokens[:, :-1], tokens[:, 1:]) / (4 * 16)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < 0.5 * losses[0], losses
"""


@pytest.mark.long
@pytest.mark.slow
def test_attention_and_then_the_model_work_where_the_page_says_to_take_them_with_ones_own_moved_in(tmp_path):
    text = (ROOT / "docs" / "interop.md").read_text(encoding="utf-8")
    text = text[text.index("## Attention in another project") :]
    bash, *blocks = re.findall(r"^```(?:bash|python)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    subprocess.run(["bash", "-ec", bash.replace("../mine", str(tmp_path))], cwd=ROOT, check=True)
    for name, block in zip(("forms", "modifiers", "latent"), own_attention(), strict=True):
        with (tmp_path / f"model/attention/{name}.py").open("a") as file:
            file.write("\n\n" + block)
    code = "".join(blocks) + FOREIGN + USE
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=_name)
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


def _commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield a page's commands, in blocks or in line: `python train.py seed=2` is train, [seed=2]."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    inline = re.findall(r"`([^`\n]+)`", _without_code(page))
    for line in [*re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE), *inline]:
        for found in re.finditer(r"(?<!\()\b(?:python|torchrun)(?: \S+)*? (\w+)\.py(?=\s|$)(.*)", line):
            if found[1] in SCHEMAS:  # and no script of docs/ or benchmarks/
                command, *_ = found[2].partition(" | ")  # without what reads its output
                yield found[1], shlex.split(command.rstrip(" &"), comments=True)


@pytest.mark.slow
@pytest.mark.parametrize("page", some(PAGES, 8), ids=_name)
def test_every_command_shown_has_settings_that_exist(page):
    for name, words in _commands(page):
        first = [re.sub(r"=(?:tag\(log,)?(?:interval|range)\(([^,]+),.*", r"=\1", word) for word in words]
        overrides = [
            re.sub(r"^([^=]+)=([^\"'\[]*?),.*", r"\1=\2", word) for word in first if not word.startswith(("-", "code="))
        ]
        if name != "train":
            from_arguments(SCHEMAS[name], words)
        else:
            # The command finds the run of resume=auto before it composes, which may then leave out init_from.
            compose_once(*(word.removeprefix("+") for word in overrides if word != "resume=auto"))


@functools.cache
def compose_once(*overrides: str) -> None:
    """Let train.py read a command; pages repeat theirs. The run of init_from= is any."""
    of_any = functools.cache(lambda where: {"model": asdict(GPTConfig())})
    of_weights = mock.patch("cli.with_torch.settings_of_weights", of_any)
    with of_weights, composing():
        to_settings(compose("train", [*overrides]))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_script_module_and_setting_that_a_page_names_exists(page):
    text = page.read_text(encoding="utf-8")
    for module in re.findall(r"\bpython -m ([\w.]+)", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module
    for script in re.findall(r"\bpython ((?:docs|benchmarks)/\w+\.py)", text):
        assert (ROOT / script).is_file(), script
    if page.stem == "CHANGELOG":  # which names settings that are gone
        return
    known = {name for schema in SCHEMAS.values() for name in setting_hints(schema)} | {*GROUPS}
    known |= {"hydra.sweep.dir", "hydra.sweep.subdir", "hydra.job.chdir", "hydra.sweeper.n_jobs"}  # the last of Optuna
    known |= {f"hydra.sweeper.{name}" for name in OF_OPTUNA}
    for group in ("sweeper", "launcher"):
        for file in (ROOT / "conf/hydra" / group).glob("*.yaml"):
            known |= {f"hydra.{group}.{name}" for name in yaml.safe_load(file.read_text())}
    groups = "data|model|tokenizer|optimizer|schedule|wandb|plan"
    dotted = rf"`((?:{groups})\.(?!json`|safetensors`)[a-z_]+(?:\.[a-z_]+)?)`"
    for name in re.findall(rf"{dotted}|`([a-z_.]+)=[^`\n]*`", _without_code(page)):
        assert "".join(name) in known, name


RECORDED = {  # runs of docs/results, by what makes a table of them
    "attention": ("docs.compare", "which_attention"),
    "attention_long": ("docs.compare", "which_attention"),
    "attention_prose": ("docs.compare", "which_attention"),
    "attention_2048_code": ("docs.compare", "which_attention"),
    "attention_2048_prose": ("docs.compare", "which_attention"),
    "recall_8192": ("docs.recall", "which_attention"),
    "scaling": ("docs.scaling_law", "which_attention"),
    "null_runs.csv": ("docs.decide_worth", "sweeps"),
    "tales.csv": ("docs.tales_kept", "attention"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", some(RECORDED, 9))
def test_a_pages_table_of_runs_is_what_its_command_makes_of_the_recorded_ones(name, tmp_path, monkeypatch, capsys):
    module, page = RECORDED[name]
    runs = ROOT / "docs/results" / name
    (shutil.copytree if runs.is_dir() else shutil.copy)(runs, tmp_path / name)
    monkeypatch.setattr(sys, "argv", [module, str(tmp_path / name)])
    monkeypatch.delitem(sys.modules, module, raising=False)
    runpy.run_module(module, run_name="__main__")
    table = re.findall(r"^\|.*\n", capsys.readouterr().out, re.MULTILINE)
    assert "".join(table) in (ROOT / f"docs/{page}.md").read_text(encoding="utf-8") and len(table) > 4
    assert name != "tales.csv" or "".join(table) in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_value_of_each_step_is_that_of_the_recorded_runs():
    page, found = (ROOT / "docs/attention.md").read_text(encoding="utf-8"), defaultdict(list)
    with (ROOT / "docs/results/ladder.csv").open(encoding="utf-8") as recorded:
        for row in csv.DictReader(recorded):
            found[row["attention"]].append(float(row["val_bpb"]))
    for attention, losses in found.items():
        mean, deviation = statistics.mean(losses), statistics.stdev(losses)
        assert re.search(rf"^\| {attention} +\| 1, 2, 3 .* {mean:.4f} ± {deviation:.4f} +\|$", page, re.MULTILINE)
    assert {*found} == {"average", "simple", "single_head", "stacked", "matmul", "sdpa"}


TABLE_ROW = r"^\| (.*) \| (.*) \| (.*) \| (.*) \| (.*) \|$"


def _rows_at_scale() -> list[list[str]]:
    """The rows of our results beside published ones: variant, difference here, what it rests on, theirs, same sign."""
    text = (ROOT / "docs/at_scale.md").read_text(encoding="utf-8").partition("## Ours and theirs")[2]
    return [list(row) for row in re.findall(TABLE_ROW, text.split("\n\n")[1], re.MULTILINE)[1:] if row[1] != "---"]


def _of_pairs(name: str) -> dict[str, list[float]]:
    """The differences of recorded pairs, by variant."""
    found = defaultdict(list)
    with (ROOT / f"docs/results/{name}.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found[row["variant"].removeprefix("attention=")].append(
                float(row["val_bpb"]) - float(row["val_bpb_of_first"])
            )
    return found


def _recorded_differences() -> dict[str, dict[str, str]]:
    """The difference of each variant from plain attention as the page writes it, by budget."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for budget, names in BUDGETS.items():
        for name in names:
            for row in Comparison(ROOT / "docs/results" / name).rows():
                if row.size == "48" or row.variant == "sdpa":
                    continue
                variant = row.variant.partition(" model.attention_window")[0]
                ours = row.differences["tokens"]
                before = f"{found[variant][budget]}; " if budget in found[variant] else ""
                found[variant][budget] = f"{before}{ours.mean:+.4f} ± {ours.error:.4f}"
    for variant, each in _of_pairs("new_forms_pairs").items():
        found[variant]["P"] = f"{statistics.mean(each):+.4f} ({min(each):+.4f} to {max(each):+.4f})"
    for variant, each in _of_pairs("claims_pairs").items():
        found[variant.partition(" model.attention_window")[0]]["D"] = f"{statistics.mean(each):+.4f} ({len(each)})"
    rows = {variant.strip("`") for variant, *_ in _rows_at_scale()}
    for text, _, *runs, variant in _losses_of_predictions():
        if [text, *runs] == ["prose", "2", "512", "800"] and variant in rows - {"sdpa"}:
            found[variant]["A"] = _predicted_difference(variant, "sdpa")
    for variant, each in _of_pairs("gate_pairs").items():
        error = statistics.stdev(each) / len(each) ** 0.5
        found[variant]["G"] = f"{statistics.mean(each):+.4f} ± {error:.4f} ({len(each)})"
    return found


def _losses_of_predictions() -> dict[tuple[str, ...], dict[str, float]]:
    """The losses of predictions.csv by seed: of (text, processor, n_layer, block_size, max_steps, attention)."""
    losses: dict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    with (ROOT / "docs/results/predictions.csv").open(encoding="utf-8") as file:
        for *runs, attention, seed, loss in islice(csv.reader(file), 1, None):
            losses[*runs, attention.removeprefix("attention=")][seed] = float(loss)
    return losses


def _pairs(
    text: str, n_layer: str, variant: str, other: str, *, window: str = "512", steps: str = "800"
) -> list[float]:
    """The differences of two variants by seed: a pair is of one processor, and most of a row's are of the same."""
    losses = _losses_of_predictions()
    of_processors = [
        [losses[text, processor, n_layer, window, steps, each] for each in (variant, other)]
        for processor in ("AVX-512", "AVX2")
    ]
    found: dict[str, float] = {}
    for own, others in sorted(of_processors, key=lambda both: -len(both[0].keys() & both[1].keys())):
        found = {seed: own[seed] - others[seed] for seed in own.keys() & others.keys()} | found
    return [found[seed] for seed in sorted(found)]


def _predicted_difference(variant: str, other: str) -> str:
    """The difference of two variants of experiment A as the page writes it, on code and on prose."""
    found = [Estimate.of(_pairs(text, "2", variant, other)) for text in ("code", "prose")]
    return "; ".join(f"{each.mean:+.4f} ± {each.error:.4f}" for each in found)


BUDGETS = {  # of docs/at_scale.md, by the folders of docs/results: on code and on prose
    "S": ["attention"],
    "L": ["attention_long", "attention_prose"],
    "W": ["attention_2048_code", "attention_2048_prose"],
}


def test_differences_beside_published_ones_are_those_of_the_recorded_runs():
    recorded, seen = _recorded_differences(), set()
    for variant, here, *_ in _rows_at_scale():
        name = variant.strip("`")
        if name in recorded:
            shown = dict(re.findall(r"(?:^|; )([SLAWPDG]) (.*?)(?=; [SLAWPDG] |$)", here.replace("−", "-")))
            assert shown == recorded[name], name
            seen.add(name)
    assert seen == recorded.keys()


def test_figures_beside_published_ones_that_no_pair_has_are_recorded_too():
    rows = {variant: here.replace("−", "-") for variant, here, *_ in _rows_at_scale()}

    def shown(variant: str) -> list[float]:
        return [float(figure) for figure in re.findall(r"[+-]?\d+\.\d+", rows[variant])]

    # Learned positions against none, by seed.
    picks = Comparison(ROOT / "docs/results/attention").picks
    learned, none = (picks["64", f"sdpa model.position={name}"] for name in ("learned", "none"))
    against = Estimate.of([learned[seed].bpb - none[seed].bpb for seed in none])
    longer = _predicted_difference("sdpa model.position=learned", "sdpa model.position=none")
    assert rows["learned positions against none"] == f"S {against.mean:+.4f} ± {against.error:.4f}; A {longer}"

    # The loss at four times the length, a head of the ladder, recall, and the night's ideas.
    with (ROOT / "docs/results/attention_long/measured.csv").open(encoding="utf-8") as file:
        longer = {row["variant"]: row["nats/token at 4 × T"] for row in csv.DictReader(file)}
    said = dict(re.findall(r"`([^`]+)` ([+-][\d.]+)", rows["loss at four times the length"]))
    assert len(said) == 4 and said.items() <= longer.items()
    ladder = defaultdict(list)
    with (ROOT / "docs/results/ladder.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            ladder[row["attention"]].append(float(row["val_bpb"]))
    heads = [round(statistics.mean(ladder[name]), 4) for name in ("single_head", "sdpa")]
    assert shown("one head for four, in [the ladder](attention.md)") == heads
    page = (ROOT / "docs/which_attention.md").read_text(encoding="utf-8")
    recall = dict(re.findall(r"^\| (\w+)\+key_offset +\|.* ([\d.]+) ± [\d.]+ \|$", page, re.MULTILINE))
    said = dict(re.findall(r"`(\w+)` ([\d.]+)", rows["order of recall, 32 pairs, with the key offset"]))
    assert len(said) == 4 and said.items() <= recall.items()
    night = (ROOT / "docs/search.md").read_text(encoding="utf-8").replace("−", "-")
    for variant, here in rows.items():
        if here.startswith("N "):
            for idea, figure in zip(re.findall(r"`(\w+)`", variant), here[2:].split(", "), strict=True):
                (line,) = re.findall(rf"^\| `{idea}` \|.*$", night, re.MULTILINE)
                assert re.findall(r"[+-]\d\.\d{4}", line)[-1] == figure, idea


def test_the_counts_of_rows_beside_published_ones_are_those_of_the_table():
    page = (ROOT / "docs/at_scale.md").read_text(encoding="utf-8")
    rows = [(rests, same) for _, _, rests, _, same in _rows_at_scale()]
    evidence, answers = ("L", "A", "W", "S", "pairs", "measured", "open"), ("yes", "no", "open here", "not found")
    counted = Counter(rows)
    for name in (*evidence, "all"):
        kinds = evidence if name == "all" else [name]
        counts = [sum(counted[kind, each] for kind in kinds) for each in answers]
        assert f"| {name} | {' | '.join(map(str, counts))} |" in page, (name, counts)
    assert {rests for rests, _ in rows} == {*evidence} and {same for _, same in rows} == {*answers}
    yes, no, *others = (sum(same == each for _, same in rows) for each in answers)
    summary = f"Of {len(rows)} rows {yes} have the sign of the published result and {no} the opposite one; "
    assert f"{summary}{sum(others)} cannot be compared." in " ".join(page.split())


@pytest.mark.long
@pytest.mark.slow
def test_the_evidence_of_a_sign_beside_published_ones_decides_it():
    """Holm's p on code for L, A, W and S, the first that decides; all pairs on one side for pairs; else open."""
    decided = defaultdict(set)
    page = (ROOT / "docs/at_scale.md").read_text(encoding="utf-8")
    table = page.partition("| variant on code (A) |")[2].partition("\n\n")[0]
    for variant, p in re.findall(r"^\| `(.*)` \|.*\| ([\d.]+) \| \S+ \| [^|]* \|$", table, re.MULTILINE):
        if float(p) < 0.05:
            decided[variant].add("A")
    assert len(decided) == 6
    for budget, (name, *_) in BUDGETS.items():
        comparison = Comparison(ROOT / "docs/results" / name)
        for row in comparison.rows():
            if row.size != "48" and row.holm.get("tokens", 1) < 0.05:
                decided[row.variant.partition(" model.attention_window")[0]].add(budget)
    pairs = _of_pairs("new_forms_pairs")
    for variant, _, rests, _, same in _rows_at_scale():
        name = variant.strip("`")
        one_sided = name in pairs and min(pairs[name]) * max(pairs[name]) > 0
        if name in _recorded_differences():
            otherwise = "pairs" if one_sided else "open"
            assert rests == next((each for each in "LAWS" if each in decided[name]), otherwise), name
        if rests == "open":
            assert same in ("open here", "not found"), name


def test_the_smallest_difference_that_the_page_says_can_be_seen_follows_from_the_errors():
    page = " ".join((ROOT / "docs/at_scale.md").read_text(encoding="utf-8").split())
    rows = Comparison(ROOT / "docs/results/attention").rows()
    errors = [row.differences["tokens"].error for row in rows if row.size == "64" and row.variant != "sdpa"]
    assert f"standard error of five seeds is {min(errors):.4f} to {max(errors):.4f}" in page
    (gate,) = _of_pairs("gate_pairs").values()
    pairs = ((1.960 + 0.842) * statistics.stdev(gate) / 0.003) ** 2  # two-sided 5%, power of 80%
    assert f"0.003 needs about {math.ceil(pairs)} pairs of 150 steps" in page


TINY = ["tokenizer=byte", "model.n_layer=1", "model.n_embd=32", "model.block_size=16", "data.path=notes.txt"]
TINY += ["sample_tokens=8", "data.cache_dir=cache"]
RUN = ("training", "generation", "data", "tasks", "interop", "scaling", "hardware")
# What needs a network, another project, a GPU, many processes, many runs or many minutes.
ELSEWHERE = r"^-m|--help|init_from=RUN|nanogpt|experiment=|wandb|hf:|=hf|parquet|gpt2|=shakespeare|max_(minutes|flops)"
ELSEWHERE += r"|\$file|\$held|path=TEXT|=IMPORT|=/shared"  # and what stands for a name or a place


@pytest.mark.slow
@pytest.mark.parametrize("page", first_of("README.md", *(f"docs/{name}.md" for name in RUN)))
def test_the_commands_of_a_page_run(page, text_file, tmp_path, no_pictures):
    text_file.rename(tmp_path / "notes.txt")
    for name in ("TinyStoriesV2-GPT4-train.txt", "log.txt", "held.txt", "part.txt"):
        shutil.copy(tmp_path / "notes.txt", tmp_path / name)
    for name, separator in (("notes.md", "---"), ("poems.txt", "\n\n\n")):
        (tmp_path / name).write_text((tmp_path / "notes.txt").read_text() + separator + "the cat sat on the mat")
    (tmp_path / "pages").mkdir()
    (tmp_path / "both").mkdir()
    (tmp_path / "notes").mkdir()
    for folder in ("both", "notes"):
        shutil.copy(tmp_path / "notes.txt", tmp_path / folder)
    (tmp_path / "pages/book.txt").write_text((tmp_path / "notes.txt").read_text() + "\fthe cat sat on the mat")
    for name in ("train.jsonl", "held.jsonl", "rest.jsonl", "test.jsonl"):
        (tmp_path / name).write_text('{"text": "the cat sat on the mat"}\n' * 20)
    (tmp_path / "beginnings.txt").write_text("the cat\nthe mat\n")
    (tmp_path / "prompt.txt").write_text("the cat")
    (tmp_path / "few.txt").write_text((tmp_path / "notes.txt").read_text()[:400])
    for name, separator in (("proteins.txt", "\n"), ("tunes.abc", "\n\n")):
        (tmp_path / name).write_text(separator.join(f"the cat sat on mat {number}" for number in range(400)))
    (tmp_path / "in.jsonl").write_text('{"prompt": "the cat"}\n' * 2)
    (tmp_path / "pages.jsonl").write_text(
        "".join(f'{{"body": "the cat sat on mat {n}", "text": "{n}"}}\n' for n in range(4000))
    )

    def run(name, *words):
        done = run_here(f"{name}.py", *words, cwd=tmp_path, stdin="the cat\n/help\n")
        assert done.returncode == 0, (name, words, done.stderr)

    run("train", *TINY, "max_steps=2", "run_dir=outputs/DATE/TIME-xxxx")
    run("train", *TINY, "max_steps=2", "run_dir=outputs/OTHER")
    commands = [(name, words) for name, words in _commands(ROOT / page) if not re.search(ELSEWHERE, " ".join(words))]
    for name, words in commands:
        if name == "train":
            typed = " ".join(words)
            few = [] if "data=recall" in typed else TINY[-2:] if re.search("init_from|resume=outputs", typed) else TINY
            words = [word for word in ["max_steps=1", *few] if f"{word.split('=')[0]}=" not in typed] + words
            words = [re.sub("^max_steps=.*", "max_steps=3", word) for word in words]
        run(name, *words)
    assert commands


def test_the_first_cell_of_the_tour_says_what_to_do_outside_a_clone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "docs" / "tour.ipynb").read_text(encoding="utf-8"))["cells"]
    first = next("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    with pytest.raises(SystemExit, match="clone it as above, %cd into it"):
        exec(first, {})


@pytest.mark.long
@pytest.mark.slow
def test_the_tour_runs_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    """Its commands with few steps in place of minutes; a kernel has `!` and a cell's last value."""
    (tmp_path / "train.py").symlink_to(ROOT / "train.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "IPython.display", mock.Mock())
    names: dict[str, object] = {}
    for cell in json.loads((ROOT / "docs" / "tour.ipynb").read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if source.startswith("!"):
            script, *words = shlex.split(source.removeprefix("!{sys.executable}"))
            small = (
                [*TINY[:4], "data.tales.count=300", "max_steps=2", f"data.cache_dir={tmp_path}/c"]
                if script == "train.py"
                else []
            )
            done = run_here(script, *words, *small, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
        elif cell["cell_type"] == "code":
            with mock.patch.dict(registered.FORMS):
                exec(source, names)
    printed = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines() if line.startswith("position=")]
    assert printed[1] < 0.1 < 1 < printed[0]


def test_the_lines_for_tensorboard_hand_it_every_finite_number_of_a_run(tmp_path, monkeypatch):
    rows = [{"step": 1, "loss": 5.5, "lr": None}, {"step": 2, "val_loss": 5.0, "attention_entropy": [[1.0, 2.0]]}]
    (tmp_path / "outputs/day/run").mkdir(parents=True)
    (tmp_path / "outputs/day/run/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "outputs/day/run/tensorboard").mkdir()
    (tmp_path / "outputs/day/run/tensorboard/earlier").write_text("the rows of a path that the run has left")
    monkeypatch.chdir(tmp_path)
    writer = mock.MagicMock()
    writer.return_value.__enter__.return_value = writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", mock.Mock(SummaryWriter=writer))
    text = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    (lines,) = [block for block in re.findall(r"```py\n(.*?)```", text, re.S) if "SummaryWriter" in block]
    exec(lines, {})
    writer.assert_called_once_with(Path("outputs/day/run/tensorboard"))
    assert not list(tmp_path.rglob("earlier"))  # which TensorBoard would draw too
    entropy = "attention_entropy/layer_0_head_"
    wanted = [("loss", 5.5, 1), ("val_loss", 5.0, 2), (f"{entropy}0", 1.0, 2), (f"{entropy}1", 2.0, 2)]
    assert [call.args for call in writer.add_scalar.mock_calls] == wanted


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_row_of_a_page_is_in_a_table(page):
    """A row that follows a paragraph, or begins a table without a line of dashes, is shown as its signs."""
    lines = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE).split("\n")
    for before, line, after in zip(["", *lines], lines, [*lines[1:], ""], strict=False):
        if line.startswith("|") and not before.startswith("|"):
            assert before == "" and re.fullmatch(r"\|[ :|-]+\|", after), line


# The runs of each table of predictions: text, layers, window, steps.
PREDICTED = {
    "variant on code (A)": ("code", "2", "512", "800"),
    "variant on prose (A)": ("prose", "2", "512", "800"),
    "variant on code (E)": ("code", "2", "512", "800"),
    "variant of four layers (C)": ("code", "4", "512", "800"),
    "variant of eight layers (C)": ("code", "8", "512", "800"),
    "variant of four layers (D)": ("code", "4", "512", "800"),
    "variant in windows of 2,048 (B)": ("code", "2", "2048", "3200"),
}


def _two_sided(t: float, pairs: int) -> tuple[float, float]:
    """The quantile of a 95% interval, and p of a paired t-test, by the closed forms for 3 and for 5 pairs."""
    angle = math.atan(abs(t) / math.sqrt(pairs - 1))
    sine, cosine = math.sin(angle), math.cos(angle)
    within = {3: sine, 5: sine * (1 + cosine**2 / 2)}
    return {3: 4.3027, 5: 2.7764}[pairs], 1 - within[pairs]


def test_the_rise_at_four_times_the_length_is_that_of_the_recorded_models():
    with (ROOT / "docs/results/predictions_at_four_times.csv").open(encoding="utf-8") as file:
        rises = {(name, seed): float(rise) for name, seed, rise in islice(csv.reader(file), 1, None)}
    page = (ROOT / "docs/at_scale.md").read_text(encoding="utf-8").replace("−", "-")
    said = page[page.index("At [four times the length]") :].partition("So the windows")[0]
    shown = [float(number) for number in re.findall(r"-?0\.\d{3}", said)]
    window = "sdpa+window/sdpa+window/sdpa+window/sdpa"
    sinks = window.replace("window", "window+sink") + "+sink"
    wanted = [rises[name, seed] for name in ("sdpa", window, f"{window}+nope", sinks) for seed in "56"]
    assert shown == pytest.approx(wanted, abs=0.00051)


def test_the_figures_of_half_the_rate_are_those_of_the_recorded_runs():
    with (ROOT / "docs/results/predictions_rates.csv").open(encoding="utf-8") as file:
        losses = {(name, rate): float(loss) for *_, name, _, rate, loss in islice(csv.reader(file), 1, None)}
    page = (ROOT / "docs/at_scale.md").read_text(encoding="utf-8").replace("−", "-")
    said = page[page.index("No rate was chosen for each variant.") :].partition("## Sources")[0]
    shown = [float(number) for number in re.findall(r"[+-]?0\.\d{4}", said)]
    sdpa, window, mla = (
        {rate: losses[f"attention={name}", rate] for rate in ("0.004", "0.008")}
        for name in ("sdpa", "sdpa+window/sdpa model.attention_window=256", "mla")
    )
    halved = [sdpa["0.008"] - sdpa["0.004"], window["0.004"] - window["0.008"], mla["0.004"] - mla["0.008"]]
    at_one = [each["0.008"] - sdpa["0.008"] for each in (window, mla)]
    at_best = [min(each.values()) - min(sdpa.values()) for each in (window, mla)]
    assert shown == pytest.approx([*halved, *at_one, *at_best], abs=0.00006)


def test_the_tables_of_the_predictions_follow_from_their_losses():
    """Differences by seed; a paired t-test; Holm's correction."""
    page = (ROOT / "docs/at_scale.md").read_text(encoding="utf-8").partition("## Results of the predictions")[2]
    tables = re.findall(r"\| (variant[^|]*) \|.*\n\|---.*\n((?:\|.*\n)+)", page)
    assert [head for head, _ in tables] == [*PREDICTED]
    for head, table in tables:
        text, n_layer, window, steps = PREDICTED[head]
        found, shown = [], []
        for line in table.splitlines():
            name, difference, interval, p, *_ = (cell.strip() for cell in line.strip("|").split("|"))
            pairs = _pairs(text, n_layer, name.strip("`"), "sdpa", window=window, steps=steps)
            mean, error = statistics.mean(pairs), statistics.stdev(pairs) / math.sqrt(len(pairs))
            quantile, p_of_t = _two_sided(mean / error, len(pairs))
            found.append((mean, mean - quantile * error, mean + quantile * error, p_of_t))
            shown.append([float(number.replace("−", "-")) for number in (difference, *interval.split(" to "), p)])
        ranks = sorted(number[3] for number in found)
        corrected = list(accumulate((min(1, p * (len(ranks) - i)) for i, p in enumerate(ranks)), max))
        for (*numbers, p), row in zip(found, shown, strict=True):
            assert row == pytest.approx([*numbers, corrected[ranks.index(p)]], abs=1e-4)


def test_a_curve_that_a_page_draws_shows_a_single_evaluation():
    drawn = [call for page in PAGES for call in re.findall(r"\.plot\((.*?)\)", page.read_text(encoding="utf-8"))]
    assert drawn and all("marker=" in call for call in drawn)  # a line through one point is none


def test_the_price_and_the_energy_of_a_run_are_its_hours_times_those_of_one():
    text = (ROOT / "docs/scaling.md").read_text(encoding="utf-8")
    figures = r"([\d.]+) h on a card of (\d+) W, at ([\d.]+) an hour, come to ([\d.]+) kWh and ([\d.]+),"
    (hours, watts, price, energy, whole) = (float(figure) for figure in re.findall(figures, text)[0])
    assert (round(hours * watts / 1000, 1), round(hours * price, 2)) == (energy, whole)


@pytest.mark.parametrize("name", ["texts", "attention", "sweeps"])
def test_each_case_of_the_log_has_a_verdict_and_a_fall_what_happens_now(name):
    with (ROOT / f"docs/results/cases/{name}.csv").open(encoding="utf-8", newline="") as file:
        cases = [*csv.DictReader(file, strict=True)]
    assert len(cases) > 400
    for case in cases:
        assert None not in {*case, *case.values()} and case["source"] and case["situation"], case
        assert case["verdict"] == "held" or (case["verdict"] in ("fell", "missing") and case["now"]), case


LIMITS = {
    "data.md": [
        f"passages of {overlap.PASSAGE} tokens or words",
        f"at most 1/{1 / prepare.LONGEST_SHARE:.0f} of the",
        f"at most {prepare.SHORT:,} characters",
        f"of more than {prepare.HEAD / 1e6:.0f} million characters is read once more",
        f"more than {prepare.MOST_COMPARED / 1e6:.0f} million tokens only `data.val_path` is compared",
        f"`train.bin` is larger than {prepare.HASHED / 2**20:.0f} MB",
    ],
    "generation.md": [
        f"up to {prepare.MOST_LEARNED >> 20} million tokens of each",
        f"(for words {prepare.MOST_COMPARED >> 20} million of both)",
    ],
    "sweeps.md": [f"`hydra.sweeper.max_pairs` is 20 by default and {MOST_PAIRS} at most"],
}


@pytest.mark.parametrize("page", LIMITS)
def test_a_limit_that_a_page_states_is_that_of_the_code(page):
    """Pages told 268 million tokens, where passages were looked for in 2."""
    text = " ".join((ROOT / "docs" / page).read_text(encoding="utf-8").split())
    assert not [limit for limit in LIMITS[page] if limit not in text]
