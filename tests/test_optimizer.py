"""How weights move: groups, Muon, schedules."""

import pytest
import torch
from conftest import random_gpt

from training.config import OptimizerConfig, ScheduleConfig
from training.optimizer import (
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


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1), (torch.float16, 0.02)])
@pytest.mark.parametrize(("shape", "columns"), [((16, 48), False), ((32, 48), False), ((48, 32), True)])
def test_orthogonalize_brings_each_slices_singular_values_near_one(shape, columns, dtype, error, monkeypatch):
    monkeypatch.setattr("training.optimizer.choose_precision", lambda name, device: dtype)
    torch.manual_seed(0)
    matrices = torch.randn(3, *shape)
    orthogonal = orthogonalize(matrices, 16, columns).float()
    for slice, result in zip(matrices.split(16, columns - 2), orthogonal.split(16, columns - 2), strict=True):
        u, values, vh = torch.linalg.svd(slice, full_matrices=False)
        kept = u.mT @ result @ vh.mT
        assert kept.diagonal(dim1=-2, dim2=-1).sub(1).abs().max() < 0.15
        assert (kept - torch.diag_embed(kept.diagonal(dim1=-2, dim2=-1))).abs().max() < error
        assert (values / values.norm(dim=1, keepdim=True)).min() > 0.004
    assert not orthogonalize(torch.zeros_like(matrices), 16, columns).any()


def test_muon_moves_weights_by_the_polar_factor_of_each_slices_momentum():
    torch.manual_seed(0)
    # (m, n), the slices' axis and width, the factor on the rate; 16 does not divide 40
    kinds = [
        [((32, 64), 0, 16, 1.0), ((96, 64), 0, 16, (64 / 96) ** 0.5), ((40, 64), 0, 40, 1.0)],
        [((64, 32), 1, 16, 1.0), ((64, 96), 1, 16, (64 / 96) ** 0.5)],
        [((64, 64), 0, 64, 1.0), ((64, 16), 0, 64, 2.0)],
    ]
    groups = [[torch.nn.Parameter(torch.randn(shape)) for shape, *_ in kind for _ in range(2)] for kind in kinds]
    rates = {"peak_lr": 0.02, "lr": 0.02, "weight_decay": 0.1}
    muon = Muon([{"params": group, **rates} for group in groups], momentum=0.9, width=16)
    weights, rules = (
        [weight for group in groups for weight in group],
        [rule for kind in kinds for rule in kind for _ in range(2)],
    )
    start = [weight.detach().clone() for weight in weights]
    expected, momenta = list(start), [torch.zeros_like(weight) for weight in start]
    for _ in range(5):
        for weight in weights:
            weight.grad = torch.randn(weight.shape)
        muon.step(skip=torch.tensor(False))
        for i, (weight, (_, axis, width, factor)) in enumerate(zip(weights, rules, strict=True)):
            momenta[i] = 0.9 * momenta[i] + 0.1 * weight.grad
            slices = (0.1 * weight.grad + 0.9 * momenta[i]).split(width, axis)
            polar = [u @ vh for u, _, vh in (torch.linalg.svd(slice, full_matrices=False) for slice in slices)]
            expected[i] = expected[i] * (1 - 0.02 * 0.1) - 0.02 * factor * torch.cat(polar, axis)
    for weight, wanted, first in zip(weights, expected, start, strict=True):
        assert (weight - wanted).norm() < 0.12 * (wanted - first).norm()


@pytest.mark.parametrize("scale", [1.0, 1e-9])  # the second makes eps matter
def test_adamw_moves_weights_as_torchs_own_does_to_the_bit(scale):
    shape = dict(bias=True, norm="layernorm", position="learned")
    ours, theirs = random_gpt(**shape), random_gpt(**shape)
    settings = dict(beta1=0.8, beta2=0.95, weight_decay=0.1)
    (adamw,) = make_optimizers(
        ours, OptimizerConfig(name="adamw", lr=0.02, embedding_lr=0.01, lm_head_lr=0.004, **settings)
    )
    groups = []
    for name, parameter in theirs.named_parameters():
        lr = 0.01 if parameter.ndim == 1 else {"blocks": 0.02, "lm_head": 0.004}.get(name.split(".")[0], 0.01)
        groups.append({"params": [parameter], "lr": lr, "weight_decay": 0.1 if parameter.ndim > 1 else 0.0})
    oracle = torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-10, fused=True)
    for step in range(3):
        torch.manual_seed(step)
        for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            if name != "blocks.0.mlp.up_proj.weight":  # which never has a gradient
                a.grad = scale * torch.randn(a.shape)
                b.grad = a.grad.clone()
        adamw.step(skip=torch.tensor(False))
        oracle.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


def test_adamws_defaults_are_those_of_the_settings():
    for adamw in (make_optimizers(random_gpt(), OptimizerConfig(name=name))[-1] for name in ("muon", "adamw")):
        for group in adamw.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.full_like(parameter, 2.0)
        adamw.step(skip=torch.tensor(False))
        for state in adamw.state.values():
            means = {kind: tensor.mean().item() for kind, tensor in state.items()}
            assert means == pytest.approx({"step": 1, "exp_avg": 2 * (1 - 0.9), "exp_avg_sq": 4 * (1 - 0.95)})


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


@pytest.mark.parametrize(
    ("settings", "factors"),
    [
        (dict(warmup_steps=9, decay_fraction=0.5, final_factor=0.1), {0: 0.1, 9: 1, 30: 1, 50: 1, 75: 0.55, 100: 0.1}),
        (dict(warmup_steps=0, decay_fraction=0.0), {0: 1, 100: 1}),
        (dict(name="cosine", warmup_steps=0, final_factor=0.2), {0: 1, 50: 0.6, 100: 0.2}),
        # The decay begins where the warm-up has reached the peak.
        (dict(name="cosine", warmup_steps=20, final_factor=0.2), {9: 10 / 21, 20: 1, 60: 0.6, 100: 0.2}),
        (dict(warmup_steps=20, decay_fraction=1.0), {9: 10 / 21, 20: 1, 60: 0.5, 100: 0}),
        (dict(warmup_steps=20, decay_fraction=0.9), {19: 20 / 21, 20: 1, 60: 0.5, 100: 0}),
        (dict(name="constant", warmup_steps=3), {0: 0.25, 3: 1, 100: 1}),
    ],
    ids=str,
)
def test_a_schedule_climbs_stays_and_falls_to_its_end(settings, factors):
    schedule = ScheduleConfig(**settings)
    found = {step: schedule_factor(schedule, step, step / 100) for step in factors}
    assert found == pytest.approx(factors)


def test_a_decay_by_the_clock_begins_after_the_warm_up_and_never_climbs_again():
    schedule = ScheduleConfig(name="cosine", warmup_steps=20)
    paces = [step / 100 for step in range(20)] + [0.2 + (step - 20) ** 2 / 8_000 for step in range(20, 101)]
    factors = [schedule_factor(schedule, step, share) for step, share in enumerate(paces)]
    assert factors[20] == max(factors) == 1 and factors[100] == pytest.approx(0)
    assert factors[20:] == sorted(factors[20:], reverse=True)


@pytest.mark.parametrize(
    ("settings", "rates"),  # of matrices cut by rows, by columns, not at all; embeddings, lm_head, norms and biases
    [
        (dict(embedding_lr=0.01, lm_head_lr=0.004), [0.005, 0.005, 0.005, 0.0025, 0.001, 0.0025]),
        (dict(embedding_lr=0.01), [0.005, 0.005, 0.005, 0.0025, 0.005, 0.0025]),
        (dict(lm_head_lr=0.004), [0.005, 0.005, 0.005, 0.005, 0.001, 0.005]),
    ],
    ids=str,
)
def test_the_factor_scales_each_groups_own_peak_which_is_lr_unless_set(settings, rates):
    unset = dict(embedding_lr=None, lm_head_lr=None)
    optimizers = make_optimizers(random_gpt(), OptimizerConfig(**unset | settings, lr=0.02))
    set_learning_rate(optimizers, 0.5)
    set_learning_rate(optimizers, 0.25)
    assert [group["lr"] for optimizer in optimizers for group in optimizer.param_groups] == pytest.approx(rates)


@pytest.mark.parametrize(
    ("group", "setting", "value"),
    [
        *((OptimizerConfig, *wrong) for wrong in (("name", "sgd"), ("lr", 0.0), ("lm_head_lr", -1.0))),
        *((OptimizerConfig, *wrong) for wrong in (("momentum", 1.0), ("beta2", 1.0), ("weight_decay", -0.1))),
        *((ScheduleConfig, *wrong) for wrong in (("name", "linear"), ("warmup_steps", -1))),
        *((ScheduleConfig, *wrong) for wrong in (("decay_fraction", 1.5), ("final_factor", -0.1))),
    ],
)
def test_settings_out_of_range_are_named(group, setting, value):
    prefix = group.__name__.removesuffix("Config").lower()
    with pytest.raises(ValueError, match=rf"{prefix}\.{setting}={value}"):
        group(**{setting: value})
