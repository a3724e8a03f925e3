"""The command that prints which code computes an attention, and the table of docs/hardware.md, which it makes."""

import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from conftest import some

from common.errors import SettingsError
from model.attention import FORMS, MODIFIERS, SETTINGS, executors
from model.attention.choose import CASES, main, name_of, table

PAGE = (Path(__file__).parent.parent / "docs" / "hardware.md").read_text(encoding="utf-8")
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.long
@pytest.mark.slow
def test_the_table_of_the_page_is_the_commands():
    assert table() in PAGE, f"docs/hardware.md should have this table:\n{table()}"
    assert {*FORMS} <= {*CASES}


# A device, the type that precision=auto chooses there, and whether torch's varlen_attn serves it.
CARDS = {
    "T4, fp16": ("cuda", torch.float16, False),
    "H100, bf16": ("cuda", BF16, True),
    "AMD, bf16": ("cuda", BF16, False),
    "a Mac, float32": ("mps", FP32, False),
}


@pytest.mark.long
def test_the_pages_table_of_other_cards_is_what_their_layers_choose(monkeypatch):
    rows = defaultdict(list)
    for case in CASES:
        cells = []
        for device, dtype, has_varlen in CARDS.values():
            monkeypatch.setattr(executors, "has_varlen", lambda device, answer=has_varlen: answer)
            names = [name_of(case, device, dtype, T, T) for T in (128, 1024)]
            cells.append(", ".join(dict.fromkeys(names)))
        rows[" | ".join(cells)].append(f"`{case}`")
    lines = [f"| {', '.join(cases)} | {cells} |" for cells, cases in rows.items()]
    lines.insert(0, f"| {' | '.join(('attention', *CARDS))} |")
    missing = [line for line in lines if line not in PAGE]
    assert not missing, "docs/hardware.md should have these rows:\n" + "\n".join(missing)


@pytest.mark.slow
def test_each_line_names_a_place_what_runs_and_why_each_faster_one_does_not(capsys):
    main(["sdpa+forget+window/delta"])
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "layers of 8 query heads of 64 channels and 2 key heads; window: 64"
    assert lines[0] == "sdpa+forget+window" and lines[13] == "delta" and len(lines) == 26
    long = next(line for line in lines if re.match("  cpu +float32 +1,024 tokens", line))
    assert re.split(" {2,}", long.strip())[3:] == [
        "chunks",
        "folded and varlen: not on cpu; half: not in half precision; bmm: more than 256 tokens; "
        "fused: no window, row_column",
    ]
    token = next(line for line in lines if re.match("  cuda +bfloat16 +1 token, 1,024 keys", line))
    assert re.split(" {2,}", token.strip())[3:] == [
        "fused_matrix",
        "folded and varlen and chunks: one token; half and bmm: not on cuda; fused: no row_column; "
        "rows: for relative, faded and tilt",
    ]
    assert all(line.endswith("a state") for line in lines[14:])


@pytest.mark.parametrize("modifier", some([*SETTINGS, *MODIFIERS], 5))
@pytest.mark.slow
def test_every_modifier_has_an_answer_everywhere(modifier, capsys):
    main([f"sdpa+{modifier}"])
    assert len(capsys.readouterr().out.splitlines()) == 14


@pytest.mark.slow
def test_a_length_and_a_window_of_ones_own_are_asked(capsys):
    main(["attention=sdpa+window", "T=300", "window=128"])  # as a command of training has it
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("window: 128") and len(lines) == 2 + 2 * 4
    assert re.search(r"cpu +float32 +300 tokens +chunks ", lines[2]) and "1 token, 300 keys" in lines[3]
    main(["sdpa+window", "T=300", "window=300"])  # which hides nothing
    assert re.search(r"cpu +float32 +300 tokens +fused ", capsys.readouterr().out.splitlines()[2])
    with pytest.raises(SettingsError, match="T=many is no number of tokens: type T=256"):
        main(["sdpa", "T=many"])


@pytest.mark.parametrize(
    ("case", "place", "lengths", "name"),
    [
        ("sdpa", ("cpu", FP32), (256, 256), "bmm"),
        ("sdpa", ("cpu", FP32), (257, 257), "fused"),
        ("sdpa", ("cpu", BF16), (256, 256), "half"),
        ("sdpa", ("cuda", BF16), (257, 257), "folded"),
        ("sdpa", ("mps", FP32), (257, 257), "fused"),
        ("sigmoid", ("cpu", FP32), (256, 256), "weighted"),
        ("sigmoid", ("cuda", FP32), (257, 257), "chunks"),
        ("sigmoid", ("mps", FP32), (257, 257), "weighted"),
        ("softmax1+window", ("cuda", BF16), (257, 257), "chunks"),  # varlen would lose the null key
        ("sdpa+window", ("cuda", BF16), (257, 257), "varlen"),
        ("sdpa+window", ("cuda", BF16), (30, 257), "varlen"),
        ("sdpa+window dropout", ("cuda", BF16), (257, 257), "chunks"),
        ("sdpa+window", ("cpu", FP32), (30, 30), "bmm"),  # which all keys fit into
        ("index", ("cpu", FP32), (257, 257), "chunks"),
        ("index", ("cpu", FP32), (1, 257), "fused_matrix"),
    ],
)
def test_what_runs_at_the_borders_of_length_device_and_type(case, place, lengths, name):
    assert name_of(case, *place, *lengths) == name


@pytest.mark.slow
def test_a_form_of_ones_own_is_explained_too_and_a_mistake_is_a_sentence(tmp_path, capsys, monkeypatch):
    file = tmp_path / "own.py"
    file.write_text(
        "from model.attention.contract import from_weights\nfrom model.attention.registry import form\n"
        "@form('flat')\n@from_weights\ndef flat(scores):\n    return (scores / 2).softmax(-1)\n"
    )
    with monkeypatch.context() as patched:
        patched.setattr("model.attention.code.RAN", {})
        main(["flat+sink", f"code={file}"])
        FORMS.pop("flat")
    found = {re.split(" {2,}", line.strip())[3] for line in capsys.readouterr().out.splitlines()[2:]}
    assert found == {"weighted", "half_weighted"}
    with pytest.raises(SettingsError, match="'spda' is no form: did you mean sdpa"):
        main(["spda"])
