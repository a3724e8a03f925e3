"""Train, evaluate and decode on a fake CUDA device, and print the attention calls as JSON.

LD_PRELOAD=LIBRARY PYTHONPATH=. python tests/fake_cuda.py CASE ...

LIBRARY: fake_cuda.cpp, compiled. CASE: an attention, then settings of the model. Tensors have devices, dtypes, shapes
and strides, but no data: whatever reads a number of one raises.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from data.batches import TokenDataset
from data.config import TokenizerConfig
from data.tokenizer import make_tokenizer
from generation.config import SamplingParams
from generation.generate import Decoder, filter_logits, sample
from model.attention.chunked import OPERATORS
from model.cache import KVCache
from model.config import GPTConfig
from model.gpt import GPT
from model.size import without_weights
from train import train_step
from training.config import TrainConfig
from training.device import choose_precision, decoding_precision, to_device
from training.run import Run

GPU = torch.device("cuda", 0)
SHAPE = dict(n_layer=1, n_head=8, n_kv_head=2, n_embd=512, block_size=32, vocab_size=257)
BYTE = make_tokenizer(TokenizerConfig(name="byte"), [])
# What an A100 would answer.
ANSWERS: dict[str, Any] = {
    "torch.cuda.is_available": lambda: True,
    "torch.cuda.device_count": lambda: 1,
    "torch.cuda.current_device": lambda: 0,
    "torch.cuda.get_device_capability": lambda device=None: (8, 0),
    "torch.cuda.is_bf16_supported": lambda including_emulation=True: True,
    "torch.cuda.amp.common.amp_definitely_not_available": lambda: False,  # or autocast switches itself off
    "torch.Tensor.pin_memory": lambda tensor: tensor,
}


VIEWS = {
    "view", "t", "transpose", "expand", "slice", "select", "unsqueeze", "squeeze", "detach", "alias", "_unsafe_view",
    "permute", "split", "split_with_sizes", "unbind", "as_strided", "_reshape_alias", "diagonal", "empty", "new_empty",
    "empty_like", "empty_strided", "new_empty_strided", "lift_fresh", "view_as_complex", "view_as_real", "unfold",
    "device",
}  # fmt: skip


class NoReads(TorchDispatchMode):
    """Raises where the CPU waits for the GPU: where it reads numbers, or copies in a blocking way.

    Counts the operators that launch a kernel, and those of attention by chunks in place of the operator they are in.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in OPERATORS:
            with self:
                OPERATORS[function](*args)
            return result
        read, written = (
            {leaf.device.type for leaf in tree_leaves(given) if isinstance(leaf, Tensor)}
            for given in ((args, kwargs), result)
        )
        if "cuda" in read and "cpu" in written:
            raise RuntimeError(f"{function} waits for the GPU")
        if read == {"cpu"} and "cuda" in written and not is_asynchronous(args, kwargs):
            raise RuntimeError(f"{function} copies to the GPU and waits")
        name = function.overloadpacket.__name__
        if "cuda" in read | written and name not in VIEWS:
            self.launches[name] += 1
        return result


def is_asynchronous(args: Any, kwargs: Any) -> bool:
    """Return whether a copy is asked not to wait."""
    return bool((kwargs or {}).get("non_blocking")) or (len(args) > 2 and args[2] is True)


def on_gpu(model: GPT, dtype: torch.dtype = torch.float32) -> GPT:
    """Give a model of the meta device fake weights on the GPU; Module.to() cannot."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None:
                new = nn.Parameter(torch.empty(old.shape, device=GPU, dtype=dtype))
                module._parameters[name] = made.setdefault(id(old), new)  # tied ones stay tied
    assert not [*model.buffers()]
    return model


def kernel(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, enable_gqa: bool
) -> str:  # fmt: skip
    """Return torch's first kernel for a call on an A100, and the reason if it is not flash.

    By the conditions of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp; both fused kernels take dropout.
    """
    (H, T, D), Dv = q.shape[-3:], v.shape[-1]
    low = q.dtype in (torch.bfloat16, torch.float16)
    both = {
        "dtypes": len({q.dtype, k.dtype, v.dtype}) > 1,
        "batch": len({q.shape[0], k.shape[0], v.shape[0]}) > 1,
        "stride": any(t.stride(-1) != 1 for t in (q, k, v, *([] if mask is None else [mask]))),
        "rank": q.ndim != 4,
    }
    flash = {
        "mask": mask is not None,
        "unequal widths": Dv != D,
        "wider than 256": D > 256,
        "alignment": is_causal and k.shape[-2] != T,
        "float32": not low,
        "heads": not enable_gqa and k.shape[-3] != H,
    }
    efficient = {
        "heads": k.shape[-3] != H,
        "no multiple of 8": bool(D % (8 if low else 4) or Dv % (8 if low else 4)),
    }
    unmet = [reason for reason, holds in (both | flash).items() if holds]
    if not unmet:
        return "flash" if D % 8 == 0 else "flash of padded copies"
    if not any((both | efficient).values()):
        return f"memory-efficient ({', '.join(unmet)})"
    return f"math ({', '.join(unmet + [reason for reason, holds in efficient.items() if holds])})"


class Watch:
    """What of a model's passes decides about the kernels."""

    def __init__(self, model: GPT) -> None:
        self.kernels: list[str] = []
        self.heads: set[str] = set()
        self.stream: set[str] = set()
        for block in model.blocks:
            block.register_forward_hook(lambda block, given, result: self.stream.add(name(result)))
            make_call = block.attention.make_call
            block.attention.make_call = lambda q, k, v, ctx, make_call=make_call: (  # type: ignore[method-assign]
                self.heads.add(" ".join(map(name, (q, k, v)))) or make_call(q, k, v, ctx)
            )

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Watch torch's two functions."""
        attend = mock.patch("torch.nn.functional.scaled_dot_product_attention", self.attend)
        with attend, mock.patch("torch.nn.attention.varlen.varlen_attn", self.attend_varlen):
            yield

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """Note the kernel of torch's function, and call it."""
        self.kernels.append(kernel(q, k, v, mask, dropout_p, is_causal, enable_gqa))
        return TORCHS(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    def attend_varlen(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **more: Any) -> Tensor:
        """Note FlashAttention with a window, if it takes the call, and call torch's function."""
        assert q.dtype in (torch.bfloat16, torch.float16)
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256 and q.shape[-1] % 8 == 0
        assert more["enable_gqa"] or q.shape[1] == k.shape[1]
        self.kernels.append("flash")
        return varlen_attn(q, k, v, *rest, **more)

    def found(self) -> dict[str, Any]:
        """Return what was seen since the last time."""
        kernels = sorted(set(self.kernels)) or ["own products"]
        seen = {"kernels": kernels, "heads": sorted(self.heads), "stream": sorted(self.stream)}
        for each in (self.kernels, self.heads, self.stream):
            each.clear()
        return seen


TORCHS = F.scaled_dot_product_attention


def name(tensor: Tensor) -> str:
    assert tensor.device == GPU
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}.get(tensor.dtype, str(tensor.dtype))


def rehearse(attention: str, **settings: Any) -> dict[str, Any]:
    """Return dtypes and kernels of a training step, an evaluation, a prompt and a decoded token."""
    documents = settings.pop("document_mask", False)
    model_config = GPTConfig(attention=attention, **SHAPE | settings)
    config = TrainConfig(model=model_config, batch_size=2)
    text = np.random.default_rng(0).integers(0, 256, 10_000, dtype=np.uint16)
    text[::50] = 256
    data = TokenDataset(BYTE, text, text, "random", "random", documents, model_config.block_size, 2)
    found = {}
    with NoReads() as mode:
        model = on_gpu(without_weights(model_config))
        run = Run(config, GPU, choose_precision("auto", GPU), data, model, model.loss)
        watch = Watch(model)
        with watch.patched():
            # A step, with its backward pass and both optimizers: Muon, and AdamW for what is no matrix of a block.
            model.train()
            mode.launches.clear()
            loss, norm = train_step(run, 0)
            found["training"] = watch.found() | {"loss": name(loss), "norm": name(norm)}
            found["launches"] = dict(mode.launches)
            assert run.skipped.device == GPU

            # The forward pass of an evaluation.
            batch = run.data.train_batch(0, 0, 2)
            tokens = to_device(batch.inputs, GPU)
            doc_starts = None if batch.doc_starts is None else to_device(batch.doc_starts, GPU)
            with torch.no_grad(), run.autocast:
                logits = model.eval()(tokens, doc_starts=doc_starts)
            found["evaluation"] = watch.found() | {"logits": name(logits)}

        # A prompt, two tokens, and how they are drawn, in the dtype that sample.py takes.
        model = on_gpu(without_weights(model_config), decoding_precision("auto", GPU)).eval()
        watch, decoder = Watch(model), Decoder(model)
        decoder.cache = KVCache(32)
        params = SamplingParams(top_p=0.9, top_k=5, min_p=0.1)
        uniform = torch.rand(2)
        with watch.patched(), torch.inference_mode():
            logits = decoder._forward(torch.zeros(2, 16, dtype=torch.int64))
            found["prompt"] = watch.found()
            for _ in range(2):
                drawn = sample(filter_logits(logits, params), uniform)
                logits = decoder.model.logits(decoder.model.hidden(drawn[:, None], cache=decoder.cache)[:, -1]).float()
            found["token"] = watch.found() | {"logits": name(logits)}
    return found


@contextmanager
def fake_gpu() -> Iterator[None]:
    """Let torch think that there is a GPU."""
    torch.autograd.set_multithreading_enabled(False)  # in other threads the modes would not hold
    with FakeTensorMode(allow_non_fake_inputs=True):  # made before torch is told of a GPU: it asks
        for target, answer in ANSWERS.items():
            mock.patch(target, answer).start()
        yield


def main() -> None:
    with fake_gpu():
        for case in sys.argv[1:]:
            attention, *settings = case.split()
            values = {key: yaml.safe_load(value) for key, _, value in (each.partition("=") for each in settings)}
            try:
                print(json.dumps({case: rehearse(attention, **values)}), flush=True)
            except Exception as error:
                error.add_note(f"in {case}")
                raise


if __name__ == "__main__":
    main()
