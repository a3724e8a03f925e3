"""The model on one page against the one that commands run."""

import torch
from conftest import close

from model.config import GPTConfig
from model.gpt import GPT
from model.plain import PlainGPT, train

SIZES = {"vocab_size": 61, "n_layer": 3, "n_head": 2, "n_embd": 96}
TOKENS = torch.randint(0, 61, (2, 40), generator=torch.Generator().manual_seed(0))


def both() -> tuple[PlainGPT, GPT]:
    torch.manual_seed(0)
    plain = PlainGPT(**SIZES)
    torch.manual_seed(0)
    return plain, GPT(GPTConfig(**SIZES, block_size=64))


def test_both_begin_with_the_same_weights():
    plain, gpt = both()
    ours = gpt.state_dict()
    assert list(plain.state_dict()) == list(ours)
    assert all(torch.equal(weight, ours[name]) for name, weight in plain.state_dict().items())


def test_logits_loss_and_gradients_are_the_same():
    plain, gpt = both()
    torch.manual_seed(1)
    for weight in gpt.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    plain.load_state_dict(gpt.state_dict())
    inputs, targets = TOKENS[:, :-1], TOKENS[:, 1:]
    close(plain(inputs), gpt(inputs), atol=1e-3)
    losses = plain.loss(inputs, targets), gpt.loss(inputs, targets) / targets.numel()
    close(*losses, atol=1e-5)
    for loss in losses:
        loss.backward()
    for one, other in zip(plain.parameters(), gpt.parameters(), strict=True):
        close(one.grad, other.grad, atol=1e-5 + 1e-4 * float(other.grad.abs().max()))


def test_a_context_beyond_the_block_is_cut_to_its_end():
    plain, gpt = both()
    torch.nn.init.normal_(plain.lm_head.weight)
    gpt.load_state_dict(plain.state_dict())
    text = plain.generate(TOKENS, 30, block_size=48, temperature=1e-4)  # so cold that the likeliest is drawn
    assert text.shape == (2, 70) and torch.equal(text[:, :40], TOKENS)
    for end in (41, 55, 70):
        assert torch.equal(text[:, end - 1], gpt(text[:, max(0, end - 49) : end - 1], last=True)[:, 0].argmax(-1))


def test_the_loop_learns_a_text_that_repeats():
    torch.manual_seed(0)
    text = torch.arange(7).repeat(60)
    plain = PlainGPT(7, n_layer=1, n_head=2, n_embd=32)
    losses = train(plain, text, steps=40, lr=1e-2, batch_size=8, block_size=16)
    assert len(losses) == 40 and losses[0] > 1.9 and losses[-1] < 0.1  # ln 7 = 1.95
    assert plain.generate(text[None, :3], 14, temperature=1e-4)[0].tolist() == [*range(7), *range(7), 0, 1, 2]
