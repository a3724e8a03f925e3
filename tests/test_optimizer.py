"""How weights move: groups, Muon, schedules."""

from __future__ import annotations

import pytest
import torch
from conftest import random_gpt

from training.config import OptimizerConfig, ScheduleConfig
from training.optimizer import (
    AdamW,
    Muon,
    load_optimizer_state,
    make_optimizers,
    optimizer_state,
    orthogonalize,
    schedule_factor,
    set_learning_rate,
)


@pytest.mark.parametrize("name", ["muon", "adamw"])
@pytest.mark.parametrize("settings", [{}, {"tie_embeddings": True, "position": "learned", "bias": True}], ids=str)
def test_every_parameter_is_in_one_group(name, settings):
    model = random_gpt(**settings)
    optimizers = make_optimizers(model, OptimizerConfig(name=name))
    moved = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert sorted(map(id, moved)) == sorted(map(id, model.parameters()))


def test_norms_and_biases_do_not_decay():
    model = random_gpt(bias=True, norm="layernorm")
    for optimizer in make_optimizers(model, OptimizerConfig(weight_decay=0.1)):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                assert group["weight_decay"] == (0.1 if parameter.ndim > 1 else 0.0)


@pytest.mark.parametrize(("in_bf16", "error"), [(False, 1e-4), (True, 0.1)])
@pytest.mark.parametrize("shape", [(16, 16), (48, 16), (16, 48)])
def test_orthogonalize_brings_singular_values_near_one_and_keeps_directions(shape, in_bf16, error, monkeypatch):
    monkeypatch.setattr("training.optimizer.multiplies_bf16", lambda device: in_bf16)
    torch.manual_seed(0)
    matrices = torch.randn(3, *shape)
    orthogonal = orthogonalize(matrices).float()
    values = torch.linalg.svdvals(orthogonal)
    assert values.min() > 0.5 and values.max() < 1.3
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    aligned = u.mT @ orthogonal @ vh.mT
    off_diagonal = aligned - torch.diag_embed(aligned.diagonal(dim1=-2, dim2=-1))
    assert off_diagonal.abs().max() < error


def test_muon_moves_weights_as_torchs_own_does():
    torch.manual_seed(0)
    shapes = [(32, 32), (32, 32), (96, 32), (32, 96)]
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    muon = Muon(ours, lr=0.02, momentum=0.9, weight_decay=0.1)
    oracle = torch.optim.Muon(theirs, lr=0.02, momentum=0.9, weight_decay=0.1)
    start = [p.detach().clone() for p in ours]
    for step in range(5):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=torch.Generator().manual_seed(step))
            b.grad = a.grad.clone()
        muon.step(skip=torch.tensor(False))
        oracle.step()
    for a, b, first in zip(ours, theirs, start, strict=True):
        # torch's runs Newton–Schulz in bf16: equal to its precision, relative to the distance moved.
        assert (a - b).norm() < 0.02 * (b - first).norm()


def test_adamw_moves_weights_as_torchs_own_does_to_the_bit():
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in ((32, 16), (5,), (7,))]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]

    def groups(parameters):  # the last parameter never has a gradient
        return [
            {"params": parameters[:1], "lr": 0.02, "weight_decay": 0.1},
            {"params": parameters[1:], "lr": 0.01, "weight_decay": 0.0},
        ]

    adamw = AdamW(groups(ours), betas=(0.9, 0.95), eps=1e-10)
    oracle = torch.optim.AdamW(groups(theirs), betas=(0.9, 0.95), eps=1e-10, fused=True)
    for step in range(5):
        for a, b in zip(ours[:2], theirs[:2], strict=True):
            a.grad = torch.randn(a.shape, generator=torch.Generator().manual_seed(step))
            b.grad = a.grad.clone()
        adamw.step(skip=torch.tensor(False))
        oracle.step()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_a_skipped_step_changes_neither_weights_nor_state(name):
    model = random_gpt()
    optimizers = make_optimizers(model, OptimizerConfig(name=name, weight_decay=0.1))

    def everything():
        return [*model.parameters(), *optimizer_state(model, optimizers).values()]

    for skip in (False, True):
        before = [tensor.detach().clone() for tensor in everything()]
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float("nan") if skip else 0.1)
        for optimizer in optimizers:
            optimizer.step(skip=torch.tensor(skip))
    assert len(before) > len(list(model.parameters()))
    assert all(torch.equal(was, now) for was, now in zip(before, everything(), strict=True))


def test_muon_and_adamw_resume_from_their_state():
    def train(model, optimizers, steps):
        for step in steps:
            tokens = torch.randint(61, (4, 9), generator=torch.Generator().manual_seed(step))
            model(tokens).logsumexp(-1).mean().backward()
            for optimizer in optimizers:
                optimizer.step(skip=torch.tensor(False))
            model.zero_grad()

    whole = random_gpt()
    train(whole, make_optimizers(whole, OptimizerConfig()), range(6))
    first = random_gpt()
    optimizers = make_optimizers(first, OptimizerConfig())
    train(first, optimizers, range(3))
    second = random_gpt(seed=1)
    second.load_state_dict(first.state_dict())
    resumed = make_optimizers(second, OptimizerConfig())
    load_optimizer_state(second, resumed, optimizer_state(first, optimizers))
    train(second, resumed, range(3, 6))
    for a, b in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_warmup_stable_decay_climbs_stays_and_falls_to_its_end():
    schedule = ScheduleConfig(warmup_steps=9, decay_fraction=0.5, final_factor=0.1)
    factors = [schedule_factor(schedule, step, step / 100) for step in range(101)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9:51] == pytest.approx([1.0] * 42)
    assert factors[75] == pytest.approx(0.55)
    assert factors[100] == pytest.approx(0.1)


def test_cosine_falls_to_its_end_and_constant_stays():
    cosine = ScheduleConfig(name="cosine", warmup_steps=0, final_factor=0.2)
    assert [schedule_factor(cosine, step, step / 10) for step in (0, 5, 10)] == pytest.approx([1.0, 0.6, 0.2])
    constant = ScheduleConfig(name="constant", warmup_steps=0)
    assert [schedule_factor(constant, step, step / 10) for step in (0, 10)] == [1.0, 1.0]


def test_the_factor_scales_each_groups_own_peak():
    optimizers = make_optimizers(random_gpt(), OptimizerConfig(lr=0.02, embedding_lr=0.01, lm_head_lr=0.004))
    set_learning_rate(optimizers, 0.5)
    set_learning_rate(optimizers, 0.25)
    rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    assert rates == pytest.approx([0.005, 0.0025, 0.001, 0.0025])


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"name": "sgd"}, "optimizer.name=sgd"),
        ({"lr": 0.0}, "optimizer.lr=0.0"),
        ({"lm_head_lr": -1.0}, "optimizer.lm_head_lr=-1.0"),
        ({"momentum": 1.0}, "optimizer.momentum=1.0"),
        ({"weight_decay": -0.1}, "optimizer.weight_decay=-0.1"),
    ],
    ids=str,
)
def test_optimizer_settings_out_of_range_are_named(settings, named):
    with pytest.raises(ValueError, match=named):
        OptimizerConfig(**settings)


@pytest.mark.parametrize(
    "settings",
    [{"name": "linear"}, {"warmup_steps": -1}, {"decay_fraction": 1.5}, {"final_factor": -0.1}],
    ids=str,
)
def test_schedule_settings_out_of_range_are_named(settings):
    name, value = next(iter(settings.items()))
    with pytest.raises(ValueError, match=f"schedule.{name}={value}"):
        ScheduleConfig(**settings)
