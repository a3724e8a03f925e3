"""A program that calls tinygpt finds everything that is not tinygpt's as it left it."""

from __future__ import annotations

import contextlib
import copy
import csv
import decimal
import faulthandler
import gc
import io
import locale
import logging
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import layer, random_gpt, some
from safetensors.torch import load_file
from test_resume import before_step

import model.attention.check as check
from cli.eval import score_checkpoints
from cli.export import write_export
from cli.sample import write_samples
from common.errors import SettingsError
from data.tokenizer import train_bpe
from generation.config import EvalConfig, SampleConfig, SamplingParams
from generation.generate import encode_prompt, generate, generate_text
from generation.score import ScoringParams, score
from generation.speed import decode_rate
from interop.config import ExportConfig
from interop.huggingface import from_huggingface
from model.heads import for_each_layer, head_statistics
from runs.checkpoint import open_checkpoint
from train import train, train_step
from training.config import DataConfig, TrainConfig
from training.distributed import Ranks
from training.evaluation import evaluate
from training.guest import defaults_of_torch, initial_seed, process_kept, seed_generators
from training.plan import plan_run

FLAGS: dict[str, Callable[[], Any]] = {
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "deterministic, warnings only": torch.is_deterministic_algorithms_warn_only_enabled,
    "memory that is not filled": lambda: torch.utils.deterministic.fill_uninitialized_memory,
    "cudnn": lambda: {
        name: getattr(torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic", "allow_tf32")
    },
    "matmul precision": torch.get_float32_matmul_precision,
    "products on CUDA": lambda: torch.backends.cuda.matmul.fp32_precision,
    "products on a CPU": lambda: torch.backends.mkldnn.matmul.fp32_precision,
    "products by oneDNN": lambda: torch.backends.mkldnn.flags and torch.backends.mkldnn.enabled,
    "attention's kernels": lambda: [
        getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in ("flash", "mem_efficient", "math", "cudnn")
    ],
    "threads": lambda: (torch.get_num_threads(), torch.get_num_interop_threads()),
    "default dtype": torch.get_default_dtype,
    "default device": torch.get_default_device,
    "gradients": lambda: (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
    "autocast": lambda: [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")],
    "anomalies": torch.is_anomaly_enabled,
    "environment": lambda: dict(os.environ),
    "folder": os.getcwd,
    "umask": lambda: [os.umask(mask := os.umask(0)), mask][1],
    "handlers of signals": lambda: {
        number: signal.getsignal(number) for number in signal.valid_signals() if number < signal.SIGRTMIN
    },
    "hooks": lambda: (
        sys.exit,
        sys.excepthook,
        sys.displayhook,
        sys.unraisablehook,
        threading.excepthook,
        sys.gettrace(),
    ),
    "streams": lambda: (sys.stdin, sys.stdout, sys.stderr, faulthandler.is_enabled()),
    "path and arguments": lambda: (sys.path[:], sys.argv[:]),
    "limits": lambda: (sys.getrecursionlimit(), sys.getswitchinterval(), csv.field_size_limit()),
    "garbage": lambda: (gc.isenabled(), gc.get_threshold()),
    "locale": lambda: locale.setlocale(locale.LC_ALL),
    "sockets": socket.getdefaulttimeout,
    "decimals": lambda: copy.copy(decimal.getcontext().prec),
    "processes": lambda: multiprocessing.get_start_method(allow_none=True),
    "numpy's errors": np.geterr,
    "numpy's and torch's printing": lambda: (np.get_printoptions(), vars(torch._tensor_str.PRINT_OPTS).copy()),
    "threads of Python": lambda: {thread.name for thread in threading.enumerate()},
    "numpy's generator": lambda: [str(part) for part in np.random.get_state()],
    "Python's generator": random.getstate,
    "torch's generator": lambda: torch.get_rng_state().tolist(),
    "filters of warnings": lambda: (warnings.filters[:], warnings.showwarning),
}


def of_loggers() -> dict[str, Any]:
    loggers = {name: logging.getLogger(name) for name in ("", "tinygpt", "torch", "a.program")}
    state: dict[str, Any] = {
        name: (one.level, one.handlers[:], one.filters[:], one.disabled, one.propagate) for name, one in loggers.items()
    }
    last = logging.lastResort
    return state | {"all": (logging.raiseExceptions, logging.root.manager.disable, last, last and last.formatter)}


FLAGS["loggers"] = of_loggers


def of_model(model: torch.nn.Module) -> dict[str, Any]:
    """The modes, gradients, hooks and values of a model."""
    return {
        "modes": {name: module.training for name, module in model.named_modules()},
        "gradients": {name: (weight.requires_grad, weight.grad) for name, weight in model.named_parameters()},
        "hooks": {name: len(module._forward_pre_hooks) for name, module in model.named_modules()},
        "values": {name: tensor.flatten().tolist() for name, tensor in model.state_dict().items()},
    }


def state() -> dict[str, Any]:
    return {name: look() for name, look in FLAGS.items()}


def assert_unchanged(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Compare two states, and show what differs alone."""
    changed = {}
    for name, value in before.items():
        now = after[name]
        if isinstance(value, dict):
            now = {key: now.get(key) for key in value.keys() | now.keys() if now.get(key) != value.get(key)}
            value = {key: value.get(key) for key in now}
        if value != now:
            changed[name] = (value, now)
    assert not changed, str(changed)[:2000]


class Reports(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        pass


@pytest.fixture(autouse=True)
def a_program(monkeypatch) -> Iterator[None]:
    """A program with settings of its own in all of these."""
    kept = {name: FLAGS[name]() for name in ("deterministic", "matmul precision", "threads")}
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "of a program")
        stack.callback(torch.use_deterministic_algorithms, kept["deterministic"])
        torch.use_deterministic_algorithms(True, warn_only=True)
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
        stack.callback(torch.set_num_threads, kept["threads"][0])
        torch.set_num_threads(2)
        stack.callback(torch.set_float32_matmul_precision, kept["matmul precision"])
        torch.set_float32_matmul_precision("high")
        for number, handler in ((signal.SIGTERM, lambda *_: None), (signal.SIGHUP, signal.SIG_IGN)):
            stack.callback(signal.signal, number, signal.signal(number, handler))
        for name in ("", "tinygpt", "a.program"):
            log, handler = logging.getLogger(name), Reports()
            stack.callback(log.setLevel, log.level)
            stack.callback(log.removeHandler, handler)
            log.setLevel(logging.ERROR)
            log.addHandler(handler)
        log.propagate = False
        stack.callback(setattr, log, "propagate", True)
        monkeypatch.setattr(logging.getLogger("tinygpt"), "disabled", True)
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
        yield


@contextlib.contextmanager
def torch_of_a_program() -> Iterator[None]:
    """Another type, device, autocast and no gradients by default."""
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode(), torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
            yield
    finally:
        torch.set_default_dtype(kept)


@pytest.mark.parametrize("enabled", [True, False])
def test_torch_is_within_a_run_as_in_a_new_process(enabled):
    weight = torch.full((4, 4), 1.001, requires_grad=True)
    with torch_of_a_program(), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        before = state()
        with defaults_of_torch():
            for _ in range(2):  # autocast would keep the first cast of a weight
                product = torch.ones(4, 4) @ weight
                product.sum().backward()
                assert (product.dtype, product.device.type) == (torch.float32, "cpu")
                with torch.autocast("cpu", torch.bfloat16):
                    half = torch.ones(4, 4) @ weight
                assert half.unique().tolist() == [4 * round(weight[0, 0].item(), 2)]
                with torch.no_grad():
                    weight += 1
        assert_unchanged(before, state())
    assert weight.grad is not None and weight.grad.unique().tolist() == [8]


@pytest.mark.long
def test_a_run_computes_the_same_where_a_program_has_changed_what_torch_does_by_default(train_config, tmp_path):
    def weights(name, **changes):
        directory = tmp_path / name
        train(replace(train_config, run_dir=str(directory), max_steps=3, **changes))
        return load_file(directory / "checkpoints/last/model.safetensors")

    outside = weights("outside"), weights("half", precision="bf16")
    with torch_of_a_program():
        before = state()
        inside = weights("inside"), weights("half_inside", precision="bf16")
        assert_unchanged(before, state())
    for one, two in zip(outside, inside, strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)


OWN = """
import random
import numpy
import torch
from model.attention.contract import from_weights
from model.attention.registry import form

random.seed(0)
numpy.random.seed(0)
torch.manual_seed(0)

@form("guest_{}")
@from_weights
def guest(scores):
    return scores.softmax(-1)
"""

RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "deterministic": {"deterministic": True},
    "dropout": {"recompute": "block", "precision": "bf16"},
    "task": {"data": DataConfig(source="recall")},
    "wandb": {"wandb": "offline"},
    "compiled": {"compile": "on"},
    "code": {"code": OWN},
}


@pytest.fixture
def config(train_config) -> TrainConfig:
    model = replace(train_config.model, dropout=0.1, attention_dropout=0.1)
    return replace(train_config, model=model, max_steps=2, eval_interval=1, checkpoint_interval=1)


def run_of(config: TrainConfig, name: str, folder: Path) -> TrainConfig:
    changes = dict(RUNS[name])
    if name == "task":
        changes["model"] = replace(config.model, block_size=32)
    if name == "wandb":
        changes["wandb"] = replace(config.wandb, mode="offline")
    if name == "code":
        (folder / "own.py").write_text(OWN.format(folder.name))
        changes = {"code": str(folder / "own.py"), "attention": f"guest_{folder.name}"}
    return replace(config, **changes)


LONG = ("compiled", "deterministic", "task", "wandb")
KINDS = [name if name not in LONG else pytest.param(name, marks=pytest.mark.long) for name in RUNS]


# What torch's compiler and wandb's service keep until the process ends, as docs/library.md says.
KEPT = {
    "compiled": ("environment", "path and arguments", "processes", "threads of Python", "limits"),
    "wandb": ("threads of Python",),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_train_leaves_everything_as_it_was(kind, config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = run_of(config, kind, tmp_path)
    as_asked = copy.deepcopy(asked)
    monkeypatch.delenv("WANDB_SERVICE", raising=False)  # of an earlier test's service
    before = state()
    train(asked)
    monkeypatch.delenv("WANDB_SERVICE", raising=False)
    assert_unchanged({name: value for name, value in before.items() if name not in KEPT.get(kind, ())}, state())
    assert asked == as_asked
    assert Path(config.run_dir, "checkpoints/step_2").is_dir()


# How a run may end before its end: where, and by what.
ENDS = {
    "a mistake": (SettingsError, dict(resume="nowhere")),
    "no text": (SettingsError, dict(data=DataConfig(path="nowhere"))),
    "an error in a step": (ZeroDivisionError, lambda run: 1 / 0),
    "Ctrl-C, as an exception": (KeyboardInterrupt, lambda run: (_ for _ in ()).throw(KeyboardInterrupt)),
    "Ctrl-C": (SystemExit, lambda run: signal.raise_signal(signal.SIGINT)),
    "SIGTERM": (SystemExit, lambda run: signal.raise_signal(signal.SIGTERM)),
}


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_a_run_that_ends_early_leaves_everything_as_it_was(end, config, monkeypatch):
    kind, cause = ENDS[end]
    config = replace(config, deterministic=True)
    if isinstance(cause, dict):
        config = replace(config, **cause)
    else:
        before_step(monkeypatch, 1, cause)
    before = state()
    with pytest.raises(kind):
        train(config)
    assert_unchanged(before, state())


PUTS = """
import torch
from model.attention.modifiers import Modifier
from model.attention.registry import modifier

@modifier("puts", changes="result")
class Puts(Modifier):
    def finish(self, y, v, x, ctx):
        torch.zeros(4).put_(torch.tensor([1]), torch.tensor([2.0]))  # which torch computes in no fixed order
        return y
"""


@pytest.mark.slow
def test_a_deterministic_run_refuses_what_its_program_wants_a_warning_of(config, tmp_path):
    (file := tmp_path / "puts.py").write_text(PUTS)
    config = replace(config, code=str(file), model=replace(config.model, attention="sdpa+puts"))
    before = state()
    said = "line 9: RuntimeError: put_ does not have a deterministic implementation: correct the file, or set determin"
    with pytest.raises(SettingsError, match=said):
        train(replace(config, deterministic=True))
    assert_unchanged(before, state())
    assert train(config) > 0


@pytest.mark.slow
def test_an_error_while_a_run_begins_or_ends_leaves_everything_as_it_was(config, monkeypatch):
    for where in ("training.start.build_run", "training.terminal.Terminal.__init__", "train.decode_rate"):
        with monkeypatch.context() as patched:
            patched.setattr(where, lambda *_, **__: 1 / 0)
            before = state()
            with pytest.raises(ZeroDivisionError):
                train(replace(config, run_dir=f"{config.run_dir}/{where}"))
            assert_unchanged(before, state())


@pytest.mark.long
def test_draws_around_train_are_those_without_it_and_the_runs_are_those_without_draws(config, tmp_path):
    """A random search, as a program may make it."""

    def search(trains: bool) -> list[list[float]]:
        random.seed(5)
        np.random.seed(6)
        torch.manual_seed(7)
        drawn = []
        for number in range(3):
            drawn.append([random.random(), np.random.rand(), torch.rand(()).item()])
            if trains:
                train(replace(config, run_dir=f"{tmp_path}/search/{number}"))
        return drawn

    assert search(True) == search(False)
    train(config)
    weights = [load_file(path) for path in tmp_path.glob("**/checkpoints/last/model.safetensors")]
    assert len(weights) == 4
    assert all(torch.equal(tensor, other[name]) for other in weights for name, tensor in weights[0].items())


@pytest.mark.slow
def test_a_handler_that_is_not_pythons_stays(config, monkeypatch):
    """signal.signal() returns None for it, and does not take it back."""
    setting = signal.signal

    def signal_of_a_library(number: int, handler: Any) -> Any:
        if handler is None:
            raise TypeError("signal handler must be signal.SIG_IGN, signal.SIG_DFL, or a callable object")
        before = setting(number, handler)
        return None if number == signal.SIGHUP else before

    monkeypatch.setattr(signal, "signal", signal_of_a_library)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    train(config)
    assert {number: signal.getsignal(number) for number in before} == before


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run's directory, for the functions that read one."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text("the cat sat on the mat.\n" * 400)
    from model.config import GPTConfig
    from training.config import TokenizerConfig

    model = GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=32)
    data = DataConfig(path=str(folder / "text.txt"), cache_dir=str(folder / "cache"))
    config = TrainConfig(model=model, data=data, tokenizer=TokenizerConfig(name="byte"), device="cpu", max_steps=1)
    train(replace(config, run_dir=str(folder / "run"), sample_tokens=0))
    exported = folder / "exported"
    write_export(ExportConfig(checkpoint=str(folder / "run"), to=str(exported)))
    return folder


def written(model: torch.nn.Module, **settings: Any) -> list[str]:
    tokenizer = train_bpe(["the cat sat"], 258)
    params = SamplingParams(max_new_tokens=4, **settings)
    prompts = [encode_prompt(tokenizer, "the"), encode_prompt(tokenizer, "the cat")]
    return [chunk.text for chunk in generate(model, tokenizer, prompts, seeds=[1, 2], params=params)]


def scored(model: torch.nn.Module) -> None:
    params = ScoringParams(torch.autocast("cpu", enabled=False))
    score(model, train_bpe(["the cat sat"], 258), np.arange(200) % 258, params)


def evaluated(model: torch.nn.Module, config: TrainConfig) -> None:
    from data.prepare import prepare

    data = prepare(config.data, config.tokenizer, log=lambda line: None)
    evaluate(model, data, 4, torch.autocast("cpu", enabled=False), max_tokens=64)


ON_A_MODEL: dict[str, Callable[[torch.nn.Module], Any]] = {
    "generate": written,
    "generate, sampled": lambda model: written(model, top_k=3, top_p=0.9, temperature=0.7),
    "generate_text": lambda model: list(generate_text(model, train_bpe(["ab"], 258), "a", max_new_tokens=20)),
    "score": scored,
    "decode_rate": lambda model: decode_rate(model, 3),
    "forward": lambda model: model.loss(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long)),
    "for_each_layer": lambda model: for_each_layer(model, torch.zeros(1, 4, dtype=torch.long), lambda weights: weights),
    "head_statistics": lambda model: head_statistics(model, torch.zeros(1, 4, dtype=torch.long)),
}


def partly_training() -> torch.nn.Module:
    """A model whose parts are in different modes, as one whose first block is frozen."""
    model = random_gpt(vocab_size=258, attention="sdpa+gate", dropout=0.0).train()
    model.blocks[0].eval()
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_A_MODEL)
@pytest.mark.parametrize("fails", [False, True])
def test_functions_of_a_model_leave_everything_as_it_was(name, fails):
    model = partly_training()
    draws = name == "forward"  # no dropout, so that it draws nothing either
    before = state() | of_model(model)
    if fails and not draws:
        handle = model.blocks[1].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ON_A_MODEL[name](model)
        handle.remove()
    else:
        ON_A_MODEL[name](model)
    assert_unchanged(before, state() | of_model(model))


@pytest.mark.slow
def test_evaluate_leaves_everything_as_it_was(train_config):
    model = partly_training()
    evaluated(model, train_config)  # prepares the text
    before = state() | of_model(model)
    evaluated(model, train_config)
    assert_unchanged(before, state() | of_model(model))


def test_a_text_that_nobody_reads_to_its_end_leaves_everything_as_it_was():
    model = partly_training()
    before = state() | of_model(model)
    tokenizer = train_bpe(["ab"], 258)
    for ends in (lambda text: text.close(), lambda text: None):
        text = generate_text(model, tokenizer, "a", max_new_tokens=9)
        next(text)
        ends(text)
        del text
        assert_unchanged(before, state() | of_model(model))


@pytest.mark.slow
def test_between_two_pieces_of_a_text_everything_is_as_it_was():
    """Whoever reads it piece by piece trains, writes another text, or draws meanwhile."""
    model = partly_training()
    before = state() | of_model(model)
    tokenizer = train_bpe(["ab"], 258)
    texts = [generate_text(model, tokenizer, prompt, max_new_tokens=9) for prompt in "ab"]
    for text in (texts[0], texts[1], texts[0], texts[1]):
        next(text)
        assert_unchanged(before, state() | of_model(model))
    alone = ["".join(generate_text(model.eval(), tokenizer, prompt, max_new_tokens=9)) for prompt in "ab"]
    model = partly_training()
    texts = [generate_text(model, tokenizer, prompt, max_new_tokens=9) for prompt in "ab"]
    pieces = [["", ""] for _ in range(20)]
    for row in pieces:
        row[:] = [next(text, "") for text in texts]
    assert ["".join(column) for column in zip(*pieces, strict=True)] == alone


COMMANDS: dict[str, Callable[[Path, Path], Any]] = {
    "open_checkpoint": lambda run, to: open_checkpoint(str(run)),
    "sample": lambda run, to: write_samples(SampleConfig(checkpoint=str(run), max_new_tokens=3, num_samples=2)),
    "eval": lambda run, to: score_checkpoints(EvalConfig(checkpoint=str(run))),
    "export": lambda run, to: write_export(ExportConfig(checkpoint=str(run), to=str(to / "hf"))),
    "page": lambda run, to: write_export(ExportConfig(checkpoint=str(run), to=str(to / "demo.html"))),
    "import": lambda run, to: write_export(ExportConfig(import_from=str(run.parent / "exported"), to=str(to / "x"))),
    "from_huggingface": lambda run, to: from_huggingface(str(run.parent / "exported")),
    "check": lambda run, to: check.main(["sdpa+gate"]),
    "check of a mistake": lambda run, to: check.main(["nope"]),
    "refused": lambda run, to: open_checkpoint(str(to)),
    "plan": lambda run, to: plan_run(train_step, TrainConfig(device="cpu", data=DataConfig(source="copy"))),
    "plan of a GPU": lambda run, to: plan_run(
        train_step, TrainConfig(data=DataConfig(source="copy"), plan=replace(TrainConfig().plan, device="h100"))
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", some(COMMANDS, 3))
def test_functions_of_a_run_leave_everything_as_it_was(name, trained, tmp_path):
    before = state()
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SettingsError):
        COMMANDS[name](trained / "run", tmp_path)
    assert_unchanged(before, state())


def test_an_attention_layer_leaves_everything_as_it_was():
    tried = layer("sdpa+gate")
    x = torch.randn(2, 6, 16, requires_grad=True)
    before = state() | of_model(tried)
    y = tried(x)
    torch.autograd.grad(y.sum(), x)
    tried.weights(x)
    assert_unchanged(before, state() | of_model(tried))


def test_a_second_run_at_once_in_a_process_is_refused_and_leaves_no_folder(config, monkeypatch):
    plan = replace(config, run_dir=None)
    with process_kept(), ThreadPoolExecutor(1) as pool:  # as Optuna's n_jobs=2 does
        for second in (pool.submit(train, config), pool.submit(plan_run, train_step, plan)):
            with pytest.raises(SettingsError, match="another thread of this process has a run open, .*: train one"):
                second.result()
        with monkeypatch.context() as patch:
            patch.setattr("os.getpid", lambda: -1)  # a fork of this process has a run of its own
            with process_kept():
                pass
        with pytest.raises(SettingsError, match="another thread"):
            pool.submit(train, config).result()
        with pytest.raises(SettingsError, match="^this thread has a run open, .*: leave the `with`"):
            train(config)
    assert not Path(config.run_dir).exists()
    with process_kept():
        pass


@pytest.mark.slow
def test_train_in_a_thread_of_a_program_leaves_everything_as_it_was(config):
    before = state()
    thread = threading.Thread(target=train, args=(config,))
    thread.start()
    thread.join()
    assert_unchanged(before, state())
    assert Path(config.run_dir, "checkpoints/step_2").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "index", "dsa"])
def test_a_loss_as_a_forward_pass_trains_every_weight_under_ddp(attention, tmp_path):
    """DDP refuses a weight without a gradient in its second step: that of an indexer has none from the logits."""
    from torch import distributed

    class Loss(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, tokens, targets):
            return self.model.loss(tokens, targets)

    model = random_gpt(attention=attention, block_size=32).train()
    alone = copy.deepcopy(model)
    tokens, targets = torch.randint(61, (2, 2, 24))
    alone.loss(tokens, targets).backward()
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        step = torch.nn.parallel.DistributedDataParallel(Loss(model))
        for _ in range(2):
            model.zero_grad()
            step(tokens, targets).backward()
    finally:
        step = None  # DDP holds the group, whose threads must end before: see Ranks.leave()
        Ranks(launched=True).leave()
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert mine.grad is not None and torch.allclose(mine.grad, other.grad, atol=1e-5)


@pytest.mark.long
def test_a_script_elsewhere_imports_the_clone_by_its_folder_and_nothing_that_is_installed(tmp_path):
    clone = Path(check.__file__).parents[2]
    script = tmp_path / "mine.py"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(lines: str) -> subprocess.CompletedProcess[str]:
        script.write_text(lines, encoding="utf-8")
        command = [sys.executable, str(script)]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    wanted = "import train\nfrom data.config import DataConfig\nprint(train.__file__)"
    assert "No module named 'train'" in run(wanted).stderr
    found = run(f"import sys; sys.path.append({str(clone)!r})\n{wanted}")
    assert found.stdout == f"{clone / 'train.py'}\n", found.stderr
    (tmp_path / "data.py").write_text("", encoding="utf-8")
    assert "'data' is not a package" in run(script.read_text(encoding="utf-8")).stderr


ALIKE = (0, 1, 2**32 - 1, 2**32, 2**32 + 1, 2**33, 2**40, 2**63 - 1)


def test_seeds_that_share_their_lowest_bits_begin_with_weights_of_their_own():
    """Seeds 0, 2^32 and 2^33 drew the same weights, for torch takes 32 bits."""

    def first_number(seed):
        with torch.random.fork_rng():
            seed_generators(initial_seed(seed), torch.device("cpu"))
            return torch.rand(1, dtype=torch.float64).item()

    assert len({first_number(seed) for seed in ALIKE}) == len(ALIKE)
    for seed in ALIKE[:3]:
        assert first_number(seed) == torch.rand(1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.slow
def test_runs_of_such_seeds_begin_with_other_weights(train_config, tmp_path):
    embeddings = []
    for seed in (1, 2**32 + 1):
        run = tmp_path / str(seed)
        train(replace(train_config, run_dir=str(run), max_steps=1, sample_tokens=0, seed=seed))
        embeddings.append(load_file(run / "checkpoints/last/model.safetensors")["token_embedding.weight"])
    assert (embeddings[0] - embeddings[1]).abs().mean() > 1e-3
