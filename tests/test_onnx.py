"""A model in ONNX: its logits at lengths on both sides of windows and chunks, or a refusal when it is exported."""

import io
import logging

import pytest
import torch
from conftest import close, random_gpt

from model.attention import FORMS, MODIFIERS, SETTINGS

pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")
REFUSED = [name for name, form in FORMS.items() if not getattr(form, "has_onnx", True)]
POSITIONED = ("alibi", "learned", "pope")
SOME = ("sdpa", "softmax1+window", "mla", "pope")
EVERY = [*FORMS, *(f"sdpa+{name}" for name in (*SETTINGS, *MODIFIERS)), "softmax1+window", *POSITIONED]
# Around 40, the window; 256, up to which a text is short; and the example's 20.
LENGTHS = (2, 3, 20, 39, 40, 41, 255, 256, 257, 400)
# Sums of hundreds of logarithms: the model's own float32 is as far from float64.
SUMMED = ("sdpa+forget", "sdpa+fade")

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.filterwarnings("ignore")]


def exported(name, example=20):
    settings = {"position": name} if name in POSITIONED else {"attention": name}
    window = {"attention_window": 40} if "window" in name else {}
    model = random_gpt(**settings, **window, n_layer=1, n_kv_head=2, block_size=400).eval()
    T = torch.export.Dim("T", min=2, max=400)
    shapes = {"tokens": {0: torch.export.Dim("B"), 1: T}}
    logging.disable(logging.WARNING)
    try:
        example = (torch.randint(61, (2, example)),)
        program = torch.onnx.export(model, example, dynamo=True, dynamic_shapes=shapes, verbose=False)
    finally:
        logging.disable(logging.NOTSET)
    file = io.BytesIO()
    program.save(file)
    return model, onnxruntime.InferenceSession(file.getvalue())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in SOME else pytest.mark.slow)
        for name in EVERY
        if name.split("+")[0] not in REFUSED
    ],
)
@torch.no_grad()
def test_a_model_in_onnx_reads_texts_of_every_length(name):
    model, session = exported(name)
    for T in LENGTHS:
        tokens = torch.randint(61, (3, T))
        (found,) = session.run(None, {"tokens": tokens.numpy()})
        close(torch.from_numpy(found), model(tokens), atol=4e-4 if name in SUMMED else 1e-4)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("example", [2, 20])
@torch.no_grad()
def test_a_form_that_onnx_would_bind_to_a_length_is_refused_when_it_is_exported(name, example):
    """Also where torch exports a second time by its compiler, which an example of two tokens lets succeed."""
    with pytest.raises(Exception, match=f"attention={name} cannot be exported to ONNX for texts of every length"):
        exported(name, example)
