"""Several texts at once: streams kept and left, in turns and in threads, on a model that trains."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import random_gpt, tokens_drawn
from torch import nn

import model.cpu
from data.config import TokenizerConfig
from data.tokenizer import make_tokenizer
from generation.config import SamplingParams
from generation.generate import generate
from generation.speed import decode_rate
from model.heads import head_statistics
from model.modes import eval_mode

BYTE = make_tokenizer(TokenizerConfig(name="byte"), [])
PROMPTS = [[1, 2, 3], [4, 5], [6]]


def stream(model, number=0, new=12):
    prompts = [PROMPTS[number]] if number < 3 else PROMPTS[:2]
    return generate(model, BYTE, prompts, seeds=[number, 7][: len(prompts)], params=SamplingParams(max_new_tokens=new))


def training_gpt(**settings):
    torch.manual_seed(3)
    return random_gpt(vocab_size=257, dropout=0.3, attention_dropout=0.3, **settings).train()


class Noisy(nn.Module):
    """A person's own module, which behaves otherwise in training."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.module(x))


def with_adapter(model):
    model.blocks[0].mlp = Noisy(model.blocks[0].mlp)


def with_hook(model):
    model.blocks[0].mlp.register_forward_hook(lambda module, given, y: 1.5 * y)


KINDS = {"plain": lambda model: None, "hook": with_hook, "adapter": with_adapter}


@pytest.fixture(params=KINDS)
def trained(request):
    """A model in training mode, but for a part, and the texts that it writes in eval mode."""
    model = training_gpt()
    KINDS[request.param](model)
    model.blocks[1].mlp.eval()
    wanted = [list(stream(copy.deepcopy(model).eval(), number)) for number in range(4)]
    modes = [part.training for part in model.modules()]
    yield model, wanted
    assert [part.training for part in model.modules()] == modes


def test_streams_in_turns_write_what_each_writes_alone_without_dropout(trained):
    model, wanted = trained
    streams = [stream(model, number) for number in range(4)]
    left = stream(model)  # kept, and not read to the end
    next(left)
    found = [[] for _ in streams]
    for step in range(100):
        for number, each in enumerate(streams):
            if step % (number + 1) == 0:
                found[number] += [chunk for chunk in [next(each, None)] if chunk]
        assert model.training and model.blocks[0].training and not model.blocks[1].mlp.training
    assert found == wanted
    left.close()


@pytest.mark.slow
def test_streams_in_threads_write_what_each_writes_alone_without_dropout(trained):
    model, wanted = trained
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert list(pool.map(lambda number: list(stream(model, number)), range(4))) == wanted


def test_an_owner_sees_no_change_of_a_models_mode_while_others_write(monkeypatch):
    model = training_gpt()
    modes = []
    hidden = type(model).hidden

    def note(self, *given, **named):
        modes.append([part.training for part in model.modules()])
        return hidden(self, *given, **named)

    monkeypatch.setattr(type(model), "hidden", note)
    list(stream(model))
    assert len(modes) == 12 and all(map(all, modes))


def test_a_model_is_trained_in_one_thread_as_alone_while_another_one_reads_it():
    """With dropout; the losses are those of training alone."""

    def losses(model, steps=6):
        generator = torch.Generator().manual_seed(0)
        found = []
        for _ in range(steps):
            tokens = torch.randint(257, (4, 17), generator=generator)
            torch.manual_seed(len(found))
            loss = model.loss(tokens[:, :-1], tokens[:, 1:])
            loss.backward()  # gradients add up; the weights stay, or the texts could not be compared
            found.append(loss.item())
        return found

    model = training_gpt()
    alone = losses(copy.deepcopy(model))
    texts = list(stream(copy.deepcopy(model).eval()))
    written, stop = [], threading.Event()

    def write():
        while not stop.is_set():
            written.append(list(stream(model)))

    thread = threading.Thread(target=write)
    thread.start()
    try:
        found = losses(model)
    finally:
        stop.set()
        thread.join()
    assert found == alone and written and all(text == texts for text in written)


def test_a_model_that_is_put_into_training_between_two_tokens_goes_on_without_dropout():
    model = training_gpt().eval()
    wanted = list(stream(model))
    parts = stream(model)
    found = [next(parts)]
    model.train()
    found += [next(parts), next(parts)]
    model.eval()
    model.blocks[0].train()
    assert [*found, *parts] == wanted and model.blocks[0].training and not model.training


def test_others_that_need_eval_mode_wait_for_each_other():
    model = training_gpt()
    tokens = torch.arange(8)[None]
    wanted = head_statistics(copy.deepcopy(model), tokens)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: head_statistics(model, tokens), range(12)))
        assert found == [wanted] * 12
        list(pool.map(lambda _: decode_rate(model, 2), range(4)))
    assert all(part.training for part in model.modules())
    with eval_mode(model), eval_mode(model):  # in one thread there is nothing to wait for
        assert not model.training


def test_threads_leave_the_way_of_products_as_it_was(monkeypatch):
    monkeypatch.setattr(model.cpu, "multiplies_bf16", lambda: True)
    monkeypatch.setattr(model.cpu, "onednn_keeps_float32", lambda: True)
    monkeypatch.setattr(model.cpu, "LARGE", 1)
    before = model.cpu.MATMUL.fp32_precision
    gpt = random_gpt(vocab_size=257)
    with ThreadPoolExecutor(4) as pool:
        list(
            pool.map(lambda _: tokens_drawn(gpt, BYTE, PROMPTS[:2], [1, 2], SamplingParams(max_new_tokens=9)), range(8))
        )
    assert model.cpu.MATMUL.fp32_precision == before
