"""`python -m model.attention.check` passes here, and notices an attention that is wrong."""

import pytest
import torch
from conftest import leaky_attention

from model.attention import FUNCTIONS, check, forms
from model.attention.functional import ATTENTION_FUNCTIONS, matmul

CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_every_check_of_every_form_passes_and_says_so(capsys):
    assert check.main() == 0
    printed = capsys.readouterr().out
    assert "every check passed" in printed
    assert "FAIL" not in printed
    table = [line for line in printed.splitlines() if line.split("+")[0].split(" ")[0] in forms()]
    assert len(table) == 2 * len(forms()) + len([*check.combinations()])  # float32 and bfloat16, then modifiers
    assert len({len(line) for line in table}) == 1  # aligned


def broken(**changes):
    return lambda q, k, v, **arguments: matmul(q, k, v, **arguments | changes)


def top_left(q, k, v, **arguments):
    if arguments["is_causal"]:
        arguments |= {"mask": torch.ones(q.shape[-2], k.shape[-2]).tril(), "is_causal": False}
    return matmul(q, k, v, **arguments)


@pytest.mark.parametrize(
    ("attend", "noticed_by"),
    [
        (broken(scale=0.9 / 8**0.5), "value+grad"),
        (broken(is_causal=False), "future"),
        (broken(is_causal=True, mask=None), "padding"),
        (top_left, "cache"),
        (broken(is_causal=True, mask=None), "document"),
        (broken(dropout_p=0.1), "eval"),
        (lambda *args, **arguments: matmul(*args, **arguments) * torch.nan, "value+grad"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_broken_attention_is_noticed(monkeypatch, attend, noticed_by, dtype):
    monkeypatch.setitem(ATTENTION_FUNCTIONS, "sdpa", attend)
    monkeypatch.setitem(FUNCTIONS, "sdpa", attend)
    assert check.run(noticed_by, "sdpa", CPU, dtype).startswith("FAIL")


def test_absolute_positions_in_place_of_rope_are_noticed(monkeypatch):
    monkeypatch.setattr("model.attention.layer.rotate", lambda x, rotation: x + rotation[:, 0, 0].unsqueeze(-1))
    assert check.run("rope", "sdpa", CPU, torch.float32).startswith("FAIL")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_variant_with_a_kink_passes(monkeypatch, dtype):
    monkeypatch.setitem(FUNCTIONS, "softmax1", leaky_attention)
    assert all(check.run(name, "softmax1", CPU, dtype).startswith("ok") for name in check.CHECKS)


def test_a_failure_is_counted_and_becomes_the_exit_status(monkeypatch, capsys):
    monkeypatch.setitem(FUNCTIONS, "sdpa", broken(is_causal=False))
    monkeypatch.setattr(check, "forms", lambda: ("sdpa",))
    assert check.main() == 1
    assert "FAIL" in capsys.readouterr().out
