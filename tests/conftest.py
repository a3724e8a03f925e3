"""Shared by the tests: a small text, a small model, and a run of the trainer on them."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import itertools
import logging
import os
import signal
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hypothesis import HealthCheck, settings
from jaxtyping import config as checks
from jaxtyping import install_import_hook
from omegaconf import OmegaConf

install_import_hook("model", "beartype.beartype")  # every annotation in model/ is checked while the tests run

from cli.composition import composing, register_schema, to_settings
from cli.hydra_command import run_train_command
from cli.overrides import CONF
from data.config import DataConfig, TokenizerConfig
from generation.generate import generate
from model.attention import MultiHeadAttention, make_attention
from model.attention.contract import attention_function
from model.config import AttentionConfig, GPTConfig
from model.gpt import GPT
from model.heads import for_each_layer
from training.config import ScheduleConfig, TrainConfig

register_schema({})
# No test asserts a clock: a busy machine has other times.
settings.register_profile(
    "any_machine", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
settings.load_profile("any_machine")
# These tests call all that model/ annotates.
CHECKED = {
    f"test_{name}.py" for name in ("cache", "chunked", "cpu", "families", "field", "field_2026", "functions", "fused")
}
CHECKED |= {
    f"test_{name}.py" for name in ("apart", "gpt", "heads", "layer", "ngrams", "recurrent", "rope", "types", "windows")
}
PRESETS = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))

# The tests run on all cores side by side, each on one: threads that wait for each other are slower.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
if not torch.cuda.is_available():
    torch.cuda.manual_seed_all = lambda seed: None  # it would note the whole stack at each torch.manual_seed()


def gpu() -> str | None:
    """The device of the tests that need one: CUDA's, Apple's, or what TINYGPT_GPU_TESTS names."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    return os.environ.get("TINYGPT_GPU_TESTS") or next((kind for kind, is_there in there.items() if is_there), None)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Spread the tests over all cores, if pytest-xdist is there and no -n says otherwise; a GPU's tests share one."""
    is_worker = hasattr(config, "workerinput")
    if getattr(config.option, "numprocesses", 0) is None and not is_worker and config.option.markexpr != "gpu":
        config.option.numprocesses = "auto"
        config.option.dist = "worksteal" if config.option.dist == "no" else config.option.dist


def pytest_collection_finish() -> None:
    # What is imported lives on, a million objects of torch; and a sweep collects garbage after each job.
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not gpu():
        pytest.skip("needs a GPU")


def some(values: Iterable[Any], each: int) -> list[Any]:
    """Values of a parameter, many of them alike: one in `each` is a default test, two of three others are long."""
    marks = itertools.cycle([pytest.mark.long, pytest.mark.long, pytest.mark.slow])
    return [marked(value, next(marks)) if number % each else value for number, value in enumerate(values)]


def first_of(first: Any, *others: Any) -> list[Any]:
    """Values of a parameter, all but the first of them long."""
    return [first, *(marked(value, pytest.mark.long) for value in others)]


def marked(value: Any, *marks: pytest.MarkDecorator) -> Any:
    """A value of a parameter, or several in a tuple, with these marks."""
    given = value if isinstance(value, tuple) else (value,)
    return pytest.param(*given, marks=marks)


@pytest.fixture(autouse=True)
def _repeatable():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _annotations(request):
    """Check the annotations of model/ in the tests of model/ alone: the checks take longer than a small model."""
    checks.update("jaxtyping_disable", request.path.name not in CHECKED)


@pytest.fixture
def unchecked() -> None:
    """Leave annotations unchecked, for wrong arguments on purpose and for torch.compile."""
    checks.update("jaxtyping_disable", True)


@pytest.fixture
def no_pictures() -> Iterator[None]:
    """Runs of this process draw no report.html."""
    with mock.patch("pages.report.Report.draw"):
        yield


@pytest.fixture
def device_reads(monkeypatch) -> list[str]:
    """The calls that read tensors back from their device, by name: each makes a GPU wait."""
    reads: list[str] = []
    for name in ("tolist", "item", "__bool__", "__int__", "__float__", "cpu", "numpy"):
        original = getattr(torch.Tensor, name)
        reading = lambda *given, name=name, original=original: reads.append(name) or original(*given)  # noqa: E731
        monkeypatch.setattr(torch.Tensor, name, reading)
    return reads


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """A file of 12,000 bytes that a model can learn: short sentences, some beyond ASCII."""
    sentences = ["the cat sat on the mat.\n", "the café is öpen.\n", "a dog ran far away → home.\n"]
    path = tmp_path / "text.txt"
    path.write_text("".join(sentences[i * i % 3] for i in range(600))[:12_000], encoding="utf-8")
    return path


@pytest.fixture
def train_config(tmp_path: Path, text_file: Path) -> TrainConfig:
    """A run of a few seconds: bytes, two small layers, 20 steps."""
    return TrainConfig(
        model=GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16),
        data=DataConfig(path=str(text_file), cache_dir=str(tmp_path / "cache")),
        tokenizer=TokenizerConfig(name="byte"),
        schedule=ScheduleConfig(warmup_steps=1),
        run_dir=str(tmp_path / "run"),
        device="cpu",
        precision="fp32",  # auto is bf16 on some processors
        batch_size=8,
        max_steps=20,
        eval_interval=10,
        checkpoint_interval=10,
        log_interval=1,
        sample_tokens=8,
    )


def attention_maps(model: GPT, tokens: torch.Tensor) -> torch.Tensor:
    """The weights (L, H, T, T) of every layer and head for one text (1, T), in float32."""
    return torch.stack(for_each_layer(model, tokens, lambda weights: weights[0])).float()


class Stdout(io.TextIOWrapper):
    """A standard output in memory, which may be a terminal."""

    is_terminal = False

    def isatty(self) -> bool:
        return self.is_terminal


def run_here(
    script: str, *arguments: str, cwd: Path, stdin: str = "", is_terminal: bool = False
) -> subprocess.CompletedProcess:
    """Run `python script arguments` in this process, which has imported torch already.

    is_terminal: whether stdout is a terminal; by default it is a pipe.
    """
    streams = [Stdout(io.BytesIO(text.encode()), encoding="utf-8") for text in (stdin, "", "")]
    streams[1].is_terminal = is_terminal
    before = [(log, log.handlers[:], log.level) for log in (logging.getLogger(), logging.getLogger("tinygpt"))]
    on_sigterm, status = signal.getsignal(signal.SIGTERM), 0
    with contextlib.ExitStack() as stack:
        for name, stream in zip(("stdin", "stdout", "stderr"), streams, strict=True):
            stack.enter_context(mock.patch(f"sys.{name}", stream))
        stack.enter_context(mock.patch("sys.argv", [script, *arguments]))
        stack.enter_context(mock.patch.dict(os.environ))
        stack.enter_context(contextlib.chdir(cwd))
        try:
            command = importlib.import_module(script.removesuffix(".py"))
            main = run_train_command if script == "train.py" else command.main
            main()
        except SystemExit as ended:
            status = ended.code or 0
        finally:
            for logger, handlers, level in before:
                logger.handlers[:] = handlers
                logger.setLevel(level)
            signal.signal(signal.SIGTERM, on_sigterm)
            register_schema({})  # without what resume and init_from brought
            HydraConfig.instance().cfg = None  # which --cfg leaves
    for stream in streams[1:]:
        stream.flush()
    stdout, stderr = (stream.buffer.getvalue().decode() for stream in streams[1:])
    return subprocess.CompletedProcess([script, *arguments], status, stdout, stderr)


def settings_of(*overrides: str) -> TrainConfig:
    """What train.py makes of these overrides."""
    with composing():
        return to_settings(compose("train", list(overrides)), [override.partition("=")[0] for override in overrides])


def preset_settings(name: str) -> dict:
    """What conf/model/NAME.yaml sets, itself or by the preset that it begins with."""
    with composing():
        return OmegaConf.to_container(compose(f"model/{name}").get("model", {}))


def random_gpt(seed: int = 0, **settings) -> GPT:
    """A small GPT in eval mode whose every weight is random, so that nothing cancels or is zero."""
    torch.manual_seed(seed)
    config = dict(n_layer=2, n_head=4, n_embd=32, block_size=16, vocab_size=61)
    model = GPT(GPTConfig(**(config | settings))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter) + (parameter.ndim == 1))
    return model


@contextlib.contextmanager
def started(command: list, **options) -> Iterator[subprocess.Popen]:
    """A process with pipes that hears every signal, also in the background or under nohup; killed at the end."""

    def hear() -> None:
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)

    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process = subprocess.Popen(command, preexec_fn=hear, **pipes, **options)
    try:
        yield process
    finally:
        process.kill()


def tokens_drawn(model: GPT, tokenizer, prompts: list[list[int]], seeds: list[int], params) -> list[list[int]]:
    """The tokens that generate() draws after each prompt."""
    drawn: list[list[int]] = [[] for _ in prompts]
    for chunk in generate(model, tokenizer, prompts, seeds=seeds, params=params):
        drawn[chunk.sample] += chunk.tokens
    return drawn


def layer(attention: str = "sdpa", **settings) -> MultiHeadAttention:
    """An attention layer in eval mode as it begins: 16 channels, 4 heads."""
    return make_attention(AttentionConfig(attention=attention, **{"n_embd": 16, "n_head": 4} | settings)).eval()


def close(got, wanted, **tolerance) -> None:
    torch.testing.assert_close(got, wanted, **{"rtol": 1e-4, "atol": 1e-5} | tolerance)


@attention_function
def leaky_attention(call):
    """A variant without softmax: weights of any sign and size, rows of any sum, and a kink."""
    weights = F.leaky_relu(call.q @ call.k.mT * call.scale + (0 if call.matrix is None else call.matrix), 0.1)
    weights = weights.to(call.v.dtype)
    weights = weights if call.mask is None else weights.masked_fill(~call.mask, 0)
    return F.dropout(weights, call.dropout_p) @ call.v


def split_patterns() -> dict[str, str]:
    """Our pattern of tokenizer=bpe, and those that OpenAI published with the encodings we offer."""
    from tiktoken_ext import openai_public

    from data.tokenizer import BPE_PATTERN

    patterns = {"bpe": BPE_PATTERN, "gpt2": openai_public.r50k_pat_str}
    with mock.patch.object(openai_public, "load_tiktoken_bpe", lambda *_, **__: {}):
        return patterns | {name: getattr(openai_public, name)()["pat_str"] for name in ("cl100k_base", "o200k_base")}
