"""How fast is tinygpt beside other programs, by how long torch's threads spin before they sleep?

    python benchmarks/busy.py [--busy 0 1 2] [--rounds 7]

Each figure is of a process of its own: tokens a second of training steps, or of decoding, after warm-up. A busy process
is a loop that does nothing, on one core. "as started" is the way in which the commands start (common/threads.py), the
number of threads included; "torch's own" sets nothing. libgomp's threads spin GOMP_SPINCOUNT times at a barrier before
they sleep, with OMP_WAIT_POLICY=passive not at all.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

WAYS = {
    "torch's own": {},
    "as started": None,
    "one thread": {"OMP_NUM_THREADS": "1"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    **{f"{spins} spins": {"GOMP_SPINCOUNT": spins} for spins in ("0", "1000", "2000", "5000", "10000", "100000")},
}
WORK = {
    "default": ["default settings"],
    "tales": ["data=tales"],
    "decoding": ["decoding, default model"],
}
SET = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
MEASURED = 4.0  # seconds of a process


def work(name: str, as_started: bool) -> float:
    """Return the tokens a second of a workload in this process."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    if as_started:
        from common.threads import sleep_at_barriers

        sleep_at_barriers()
    import torch

    from generation.speed import decode_rate
    from model.cpu import freed_memory_kept
    from train import train_step
    from training.config import TrainConfig
    from training.device import choose_precision, fast_products
    from training.plan import trial_run
    from training.threads import threads_of_run

    cpu = torch.device("cpu")
    config = TrainConfig()
    if name == "tales":
        config.model.n_layer = config.model.n_head = 2
        config.model.block_size = 256
        config.batch_size = 4
        config.data.document_mask = True
    config.model.vocab_size = 1024 if name == "tales" else 2048
    run = trial_run(config, cpu, choose_precision("auto", cpu))
    if name == "decoding":  # no command chooses its threads by the load: they decide a sample's last bits
        decode_rate(run.model, 8)
        return decode_rate(run.model)
    with fast_products(cpu, run.dtype), freed_memory_kept(), threads_of_run(None) if as_started else nullcontext():
        for step in range(3):
            train_step(run, step)
        started = time.perf_counter()
        steps = 0
        while time.perf_counter() < started + MEASURED:
            train_step(run, 3 + steps)
            steps += 1
        return steps * config.tokens_per_step / (time.perf_counter() - started)


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Run loops that do nothing beside the body."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        time.sleep(1)
        yield
    finally:
        for loop in loops:
            loop.kill()


def measure(name: str, way: str) -> float:
    """Return the tokens a second of a workload in a new process."""
    environment = {variable: value for variable, value in os.environ.items() if variable not in SET}
    started = ["--started"] if WAYS[way] is None else []
    done = subprocess.run(
        [sys.executable, __file__, "--work", name, *started],
        env=environment | (WAYS[way] or {}),
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of measurement (7)")
    parser.add_argument("--busy", type=int, nargs="*", default=[0, 1, 2], help="numbers of busy processes beside it")
    parser.add_argument("--ways", nargs="*", default=[*WAYS], help="only these rows")
    parser.add_argument("--work", choices=WORK, help=argparse.SUPPRESS)
    parser.add_argument("--started", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        print(work(arguments.work, arguments.started))
        return

    import paired

    paired.header()
    for name, (title,) in WORK.items():
        figures: dict[str, dict[int, list[float]]] = {way: {} for way in arguments.ways}
        for processes in arguments.busy:
            with busy(processes):
                programs = {way: partial(measure, name, way) for way in arguments.ways}
                for way, values in paired.interleave(programs, arguments.rounds, warm_ups=0).items():
                    figures[way][processes] = values
        heads = [f"{title}: tokens/s", *(f"beside {plural(number)}" for number in arguments.busy)]
        paired.table(
            heads, ([way, *(paired.spread(values, ",.0f") for values in row.values())] for way, row in figures.items())
        )


def plural(number: int) -> str:
    return "nothing" if number == 0 else f"{number} busy process{'es' * (number > 1)}"


if __name__ == "__main__":
    main()
