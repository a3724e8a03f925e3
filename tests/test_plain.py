"""The model on one page against the one that commands run."""

import math

import pytest
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


@pytest.mark.slow
def test_a_context_beyond_the_block_is_cut_to_its_end():
    plain, gpt = both()
    torch.nn.init.normal_(plain.lm_head.weight)
    gpt.load_state_dict(plain.state_dict())
    text = plain.generate(TOKENS, 30, block_size=48, temperature=1e-4)  # so cold that the likeliest is drawn
    assert text.shape == (2, 70) and torch.equal(text[:, :40], TOKENS)
    for end in (41, 55, 70):
        assert torch.equal(text[:, end - 1], gpt(text[:, max(0, end - 49) : end - 1], last=True)[:, 0].argmax(-1))


@pytest.mark.slow
def test_top_k_draws_the_likeliest_tokens_alone_in_their_proportions():
    plain, _ = both()
    torch.nn.init.normal_(plain.lm_head.weight)
    start = TOKENS[:1, :5].expand(4000, 5)
    drawn = plain.generate(start, 1, top_k=3)[:, -1]
    p, best = plain(start[:1])[0, -1].softmax(-1).topk(3)
    shares = torch.stack([(drawn == token).float().mean() for token in best])
    assert {*drawn.tolist()} == {*best.tolist()}
    close(shares, p / p.sum(), atol=0.03)


@pytest.mark.slow
def test_the_loop_learns_a_text_that_repeats_and_keeps_what_it_scores(tmp_path):
    torch.manual_seed(0)
    text = torch.arange(7).repeat(60)
    plain = PlainGPT(7, n_layer=1, n_head=2, n_embd=32)
    sizes = {"batch_size": 8, "block_size": 16, "file": str(tmp_path / "model.pt")}
    losses = train(plain, text, text[:101], steps=50, eval_interval=20, lr=1e-2, **sizes)
    assert len(losses) == 4 and abs(losses[0] - math.log(7)) < 1e-5 and losses[-1] < 0.2  # after 0, 20, 40 and 50 steps
    kept = torch.load(tmp_path / "model.pt")
    assert all(torch.equal(weight, kept[name]) for name, weight in plain.state_dict().items())
    tokens, targets = text[:96].view(6, 16), text[1:97].view(6, 16)
    logits = torch.cat([plain(row[None]) for row in tokens])
    close(torch.tensor(losses[-1]), -logits.log_softmax(-1).gather(-1, targets[..., None]).mean(), atol=1e-5)
    assert plain.generate(text[None, :3], 14, temperature=1e-4)[0].tolist() == [*range(7), *range(7), 0, 1, 2]
