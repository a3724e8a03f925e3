"""torch.compile takes every attention down to a GPU's machine code, without a GPU: pytest -m lower."""

import importlib.util
import json
from pathlib import Path

import pytest
from test_fake_cuda import HERE, PAGE, library, on_fake_cuda  # noqa: F401
from test_fake_cuda import pytestmark as NEEDS

from model.attention import FORMS, MODIFIERS, SETTINGS

CARDS = {"7.5": "T4", "9.0": "H100"}
LEFT_OUT = ("loop", "stacked")
"""Loops over queries and heads, which are there to be read; the page says so."""
ON_H100_ALONE = ("kda", "gdn2", "wall")
"""Forms that take the compiler up to a minute for each card."""
LOWERED = [
    "loss",
    *(form for form in FORMS if form not in LEFT_OUT),
    *(f"sdpa+{name}" + " n_layer=2" * (name == "value_residual") for name in MODIFIERS),
    *("sdpa+nope", "sdpa+window attention_window=128", "sdpa position=alibi", "sdpa document_mask=true"),
]
OURS = {*FORMS, *MODIFIERS, *SETTINGS}  # before other tests register theirs
COMPILED = PAGE.partition("## Compiled without a card")[2]
CUBINS = 2
"""Kernels of each case that become machine code: all take ten times as long."""


def lowers(test):
    """Mark a test that compiles for a GPU."""
    needs_triton = pytest.mark.skipif(
        not importlib.util.find_spec("triton"), reason="needs Triton's wheel: pip install triton"
    )
    for mark in (*NEEDS, pytest.mark.lower, pytest.mark.slow, needs_triton):
        test = mark(test)
    return test


def row_of(case: str, found: dict[str, dict]) -> str:
    """A row of docs/hardware.md: for each card the kernels and products, forward + backward."""
    cells = [f"`{case}`"]
    for card in CARDS:
        sums = [" + ".join(map(str, found[card][name])) for name in ("kernels", "products") if card in found]
        cells.append(", ".join(sums) or "–")
    return f"| {' | '.join(cells)} |"


def test_every_form_and_modifier_has_a_row_of_compiled_kernels_or_is_named_as_left_out():
    rows = [line.split("`")[1] for line in COMPILED.splitlines() if line.startswith("| `")]
    assert rows == LOWERED, "docs/hardware.md should have a row for each of these, in this order"
    lowered = {name for case in rows for name in case.split()[0].split("+")}
    assert OURS - lowered == {*LEFT_OUT}
    assert all(f"`{name}`" in COMPILED.partition("| attention |")[0] for name in (*LEFT_OUT, *ON_H100_ALONE))


@lowers
@pytest.mark.parametrize("part", range(4))
def test_every_attention_compiles_to_the_kernels_of_the_page(library: Path, part: int):  # noqa: F811
    cases = LOWERED[part::4]  # parts that two processes share evenly
    found: dict[str, dict[str, dict]] = {case: {} for case in cases}
    for card, name in CARDS.items():
        on_card = [case for case in cases if name == "H100" or case not in ON_H100_ALONE]
        for line in on_fake_cuda(library, str(HERE / "lower.py"), card, str(CUBINS), *on_card):
            if line.startswith("{"):
                ((case, figures),) = json.loads(line).items()
                found[case][card] = figures
    rows = []
    for case, of in found.items():
        for card, figures in of.items():
            assert figures["breaks"] == 0 and figures["cubins"] == min(CUBINS, sum(figures["kernels"])), (case, card)
            assert figures["graphs"] == 1 + (case != "loss"), (case, card)  # forward, backward
            # A first length, a length that varies; with chunks in a loop each length anew.
            assert figures["of lengths"] == (0 if case == "loss" else 2 + figures["in chunks"]), (case, card)
        rows.append(row_of(case, of))
    missing = [row for row in rows if row not in COMPILED]
    assert not missing, "docs/hardware.md should have these rows:\n" + "\n".join(rows)


@lowers
@pytest.mark.parametrize("case", ["loss", "matmul", "matmul+gate+forget+sink+xsa", "matmul+conv+out_norm"])
def test_compiled_code_for_a_gpu_computes_its_graph_in_tritons_interpreter(library: Path, monkeypatch, case: str):  # noqa: F811
    """Forward and backward, against the graph in float64: a rounding of bf16 is 0.004 of a number."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    lines = on_fake_cuda(library, str(HERE / "interpret.py"), case)
    (found,) = [json.loads(line)[case] for line in lines if line.startswith("{")]
    assert len(found) == 1 + (case != "loss")
    assert all(0 < error < 0.03 for error in found), found
