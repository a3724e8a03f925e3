"""Which device a process takes and how its model runs there, with torch's answers about the machine replaced."""

import pytest
import torch
import torch.distributed as dist
from conftest import random_gpt
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import training.distributed
from errors import SettingsError
from model.config import GPTConfig
from training.config import TrainConfig
from training.device import choose_device
from training.distributed import Ranks, join_ranks, new_model, ranks_of_torchrun, spread
from training.plan import trial_run
from training.step import take_step


@pytest.fixture
def chosen(monkeypatch) -> list[torch.device]:
    """The devices made current on a machine of four GPUs."""
    found: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    return found


@pytest.mark.parametrize(
    ("name", "process", "processes", "expected"),
    [
        ("auto", 0, 1, "cuda:0"),  # alone
        ("cuda", 0, 1, "cuda:0"),
        ("cuda:1", 0, 1, "cuda:1"),  # a job of a sweep, or typed
        ("auto", 3, 4, "cuda:3"),  # under torchrun
        ("cuda", 2, 4, "cuda:2"),
        ("cuda:2", 0, 1, "cuda:2"),
        ("cpu", 3, 8, "cpu"),
    ],
)
def test_a_gpu_is_made_the_current_one_where_it_is_chosen(chosen, name, process, processes, expected):
    assert choose_device(name, process, processes) == torch.device(expected)
    assert chosen == [torch.device(expected)] * expected.startswith("cuda")


@pytest.mark.parametrize(
    ("name", "processes", "sentence"),
    [
        ("cuda:1", 2, "device=cuda:1 is no GPU for each of 2 processes on this machine: leave device=auto"),
        ("auto", 5, "device=auto is no GPU for each of 5 processes .* at most --nproc-per-node=4"),
        ("cuda:4", 1, "device=cuda:4 is not on this machine"),
    ],
)
def test_a_gpu_that_is_not_there_or_not_for_all_is_refused_on_every_rank(chosen, name, processes, sentence):
    for process in range(processes):
        with pytest.raises(SettingsError, match=sentence):
            choose_device(name, process, processes)
    assert not chosen


@pytest.mark.parametrize(
    ("device", "backend", "bound"),
    [("cuda:3", "cpu:gloo,cuda:nccl", torch.device("cuda:3")), ("cpu", "cpu:gloo", None)],
)
def test_nccl_is_bound_to_the_device_of_the_rank(monkeypatch, device, backend, bound):
    calls = []
    monkeypatch.setattr(dist, "init_process_group", lambda *given, **named: calls.append((given, named["device_id"])))
    for name, value in {"RANK": 11, "WORLD_SIZE": 16, "LOCAL_RANK": 3, "LOCAL_WORLD_SIZE": 8}.items():
        monkeypatch.setenv(name, str(value))
    ranks = ranks_of_torchrun()
    assert ranks == Ranks(11, 16, 3, 8, together=True)
    join_ranks(ranks, torch.device(device))
    assert calls == [((backend,), bound)]


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_blocks_are_compiled_in_place_before_the_root_is_wrapped(monkeypatch, how):
    """So DDP and FSDP exchange one block's gradients while another's are computed, and see the whole model at no time
    as one compiled function."""
    happened = []
    model = random_gpt()

    class Wrapped(nn.Module):
        def __init__(self, module, **_):
            super().__init__()
            self.module = module
            happened.append("wrapped")

    monkeypatch.setattr(type(model.blocks[0]), "compile", lambda block: happened.append("compiled"), raising=False)
    monkeypatch.setattr(training.distributed, "DistributedDataParallel", Wrapped)
    monkeypatch.setattr(training.distributed, "shard", lambda *given: happened.append("wrapped") or given[0])
    ranks = Ranks(0, 2, 0, 2, together=True)
    forward = spread(model, ranks, how, torch.device("cpu"), torch.float32, compiled=True)
    assert happened == ["compiled", "compiled", "wrapped"]
    assert getattr(forward, "module", forward) is model and isinstance(forward, Wrapped) == (how == "ddp")
    training.distributed._alive.clear()


def test_machines_of_unlike_size_do_not_share_copies():
    with pytest.raises(SettingsError, match=r"distributed=hsdp needs as many .* of 3 this one has 2: .*=fsdp"):
        new_model(GPTConfig(vocab_size=8), Ranks(0, 3, 0, 2, together=True), "hsdp", torch.device("cpu"))


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dropping", [{}, {"dropout": 0.2, "attention_dropout": 0.1, "attention": "matmul"}], ids=str)
def test_recomputing_blocks_changes_no_bit_dropout_included_and_compiles_once(unchecked, precision, dropping):
    found = []
    for recompute in ("none", "block"):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("eager")
        model = GPTConfig(n_layer=3, n_embd=32, block_size=16, vocab_size=61, zero_init=False, **dropping)
        config = TrainConfig(model=model, batch_size=2, recompute=recompute)
        for compiled in (False, True):
            torch.manual_seed(0)
            run = trial_run(config, torch.device("cpu"), precision)
            for block in run.model.blocks if compiled else ():
                block.compile(backend=counter, fullgraph=True)
            figures = [figure.item() for step in range(2) for figure in take_step(run, step)]
            if not compiled:
                found.append(figures)
        assert counter.frame_count == 1 and figures == pytest.approx(found[0], rel=1e-2)
    assert found[0] == found[1]
