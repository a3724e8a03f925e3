"""nanoGPT as the benchmarks measure it: a checkout, named on the command line."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import paired

# Its README's recipe for a CPU, but for the log of every iteration, from which training's own time is read.
RECIPE = [
    "config/train_shakespeare_char.py", "--device=cpu", "--compile=False", "--eval_iters=20", "--log_interval=1",
    "--block_size=64", "--batch_size=12", "--n_layer=4", "--n_head=4", "--n_embd=128", "--max_iters=2000",
    "--lr_decay_iters=2000", "--dropout=0.0",
]  # fmt: skip

# What of its settings an optimizer's recipe is: those of RECIPE, and others for a short run (README.md has the trials).
ADAMW = dict(
    learning_rate=1e-3, min_lr=1e-4, beta2=0.99, warmup_iters=100, batch_size=12, max_iters=2000, eval_interval=250
)
TUNED_ADAMW = dict(
    learning_rate=1.6e-2, min_lr=0.0, beta2=0.99, warmup_iters=100, batch_size=12, max_iters=1300, eval_interval=1300
)


def checkout(text: str) -> Path:
    """The folder of a checkout, from the command line."""
    path = Path(text)
    if not all((path / name).is_file() for name in ("model.py", "train.py", "data/shakespeare_char/prepare.py")):
        raise argparse.ArgumentTypeError(f"{text} is not a checkout of github.com/karpathy/nanoGPT: give its folder")
    return path.resolve()


def load(path: Path) -> ModuleType:
    """Its model.py. What it prints while a model is made is left out."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", path / "model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = module
    spec.loader.exec_module(module)
    module.print = lambda *words: None
    return module


def copy_with_data(path: Path, folder: Path, text: Path) -> Path:
    """A copy of the checkout in `folder` whose own prepare.py has made tokens of `text`."""
    copy = Path(shutil.copytree(path, folder / "nanoGPT", ignore=shutil.ignore_patterns(".git", "assets", "*.ipynb")))
    data = copy / "data" / "shakespeare_char"
    shutil.copyfile(text, data / "input.txt")
    paired.run([sys.executable, "prepare.py"], cwd=data)
    return copy
