"""How weights move: groups, Muon, AdamW, schedules."""

from dataclasses import asdict
from itertools import chain
from pathlib import Path

import pytest
import torch
import yaml
from conftest import random_gpt

from model.config import GPTConfig
from model.layers import Linear
from runs.checkpoint import Meta
from training.config import OptimizerConfig, ScheduleConfig, TrainConfig
from training.distributed import Ranks
from training.optimizer import (
    OPTIMIZERS,
    SCHEDULES,
    AdamW,
    Muon,
    load_optimizer_state,
    make_optimizers,
    optimizer_state,
    orthogonalize,
    schedule_factor,
    set_learning_rate,
)
from training.start import is_changed, tell_idle, tell_rates

ROOT = Path(__file__).parent.parent


def take(optimizer: Muon | AdamW, grad_scale: float = 1.0, found_inf: torch.Tensor | None = None) -> None:
    """Take a step of an optimizer."""
    optimizer.grad_scale = torch.tensor(grad_scale)
    optimizer.found_inf = torch.tensor(0.0) if found_inf is None else found_inf
    optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_parameter_is_in_one_group_and_muons_are_the_matrices_of_the_blocks(name):
    for settings in ({"attention": "sdpa+gate+sink+forget/delta/mla"}, {"tie_embeddings": True, "position": "learned"}):
        model = random_gpt(**settings, n_layer=3, bias=True)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        optimizers = make_optimizers(model, OptimizerConfig(name=name))
        moved = [[names[id(p)] for p in g["params"]] for optimizer in optimizers for g in optimizer.param_groups]
        assert sorted(chain(*moved)) == sorted(names.values())
        layers = [{name.removesuffix(".weight").split(".")[-1] for name in group} for group in moved[:3]]
        rows = {"qkv_proj", "gate_up_proj", *(("q_proj", "k_proj") if "attention" in settings else ())}
        whole = {"o_proj", *(("c_proj", "k_up", "v_up") if "attention" in settings else ())}
        assert layers == [rows, {"down_proj"}, whole]
        assert all(".weight" in name and name.startswith("blocks") for group in moved[:3] for name in group)
    assert [type(each) for each in optimizers] == [OPTIMIZERS[name], AdamW]


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


# By group, which axis has channels: the rows of each part of a weight, and its columns. 16 does not divide 40, 72 or 8.
ROWS = [(32,), (96,), (40,), (72,), (96, 32, 32), (40, 40), (72, 72), (8, 24), (32, 40)]
KINDS = {0: [(rows, 64) for rows in ROWS], 1: [((64,), 32), ((64,), 96), ((64,), 40)], None: [((64,), 64), ((64,), 16)]}


def polar(part, axis):
    """The step of a momentum: U Vᵀ of its singular values, by slices of 16 channels or whole."""
    m, n = part.shape
    sliced = axis is not None and part.shape[axis] % 16 == 0
    factor = min(1, part.shape[1 - axis] / part.shape[axis]) if sliced else max(1, m / n)
    slices = part.split(16, axis) if sliced else [part]
    svds = [torch.linalg.svd(each, full_matrices=False) for each in slices]
    return factor**0.5 * torch.cat([u @ vh for u, _, vh in svds], axis or 0)


def test_muon_moves_each_part_of_a_weight_by_the_polar_factor_of_each_slices_momentum():
    torch.manual_seed(0)
    layers = {axis: [Linear(n, *rows, bias=False) for rows, n in 2 * kind] for axis, kind in KINDS.items()}
    parts = {layer.weight: layer.parts for layer in chain(*layers.values())}
    axes = {layer.weight: axis for axis in layers for layer in layers[axis]}
    for weight in parts:
        torch.nn.init.normal_(weight)
    model = torch.nn.ModuleList(chain(*layers.values()))
    model.config = GPTConfig(head_size=16)
    weights = [[layer.weight for layer in group] for group in layers.values()]
    groups = [{"params": group, "peak_lr": 0.02, "lr": 0.02, "weight_decay": 0.1} for group in weights]
    muon = Muon(groups, OptimizerConfig(momentum=0.9), model, Ranks())
    start = {weight: weight.detach().clone() for weight in parts}
    expected, momenta = dict(start), {weight: torch.zeros_like(weight) for weight in parts}
    for _ in range(5):
        for weight in parts:
            weight.grad = torch.randn(weight.shape)
        take(muon)
        for weight, rows in parts.items():
            momenta[weight] = 0.9 * momenta[weight] + 0.1 * weight.grad
            nesterov = (0.1 * weight.grad + 0.9 * momenta[weight]).split(rows)
            change = torch.cat([polar(part, axes[weight]) for part in nesterov])
            expected[weight] = expected[weight] * (1 - 0.02 * 0.1) - 0.02 * change
    for weight, wanted in expected.items():
        assert (weight - wanted).norm() < 0.12 * (wanted - start[weight]).norm(), weight.shape


# Queries have as many rows as columns, keys fewer; then more, and keys as many.
SHAPES = [({"n_kv_head": 2}, 8), ({"n_head": 3, "head_size": 16}, 16), ({"head_size": 16, "n_kv_head": 2}, 16)]


def test_a_step_of_muon_changes_an_entry_by_its_rate_over_the_root_of_the_longer_side():
    """As docs/training.md says, on average; of a weight that joins several matrices, the longer side of each."""
    model = random_gpt()
    torch.manual_seed(0)
    for weight in model.parameters():
        weight.grad = torch.randn_like(weight)
    before = {weight: weight.detach().clone() for weight in model.parameters()}
    muon = make_optimizers(model, OptimizerConfig(lr=0.02))[0]
    take(muon)
    for weight, parts in ((weight, muon.parts[weight]) for group in muon.param_groups for weight in group["params"]):
        for move in (weight.detach() - before[weight]).split(parts):
            size = move.square().mean().sqrt().item() * max(move.shape) ** 0.5
            assert size == pytest.approx(0.02, rel=0.15)


@pytest.mark.parametrize(("settings", "width"), SHAPES, ids=str)
def test_muon_knows_the_width_of_a_head_and_the_rows_of_each_matrix_in_a_joined_weight(settings, width):
    model = random_gpt(**settings, n_inner=40)
    muon, block = make_optimizers(model, OptimizerConfig())[0], model.blocks[0]
    heads, kv_heads = settings.get("n_head", 4), settings.get("n_kv_head", settings.get("n_head", 4))
    assert muon.width == width
    assert muon.parts[block.attention.qkv_proj.weight] == (heads * width, kv_heads * width, kv_heads * width)
    assert muon.parts[block.mlp.gate_up_proj.weight] == (40, 40) and muon.parts[block.mlp.down_proj.weight] == (32,)


def test_muon_takes_a_persons_own_nn_linear_as_one_matrix():
    model = random_gpt()
    own = model.blocks[0].own = torch.nn.Linear(32, 24)
    muon = make_optimizers(model, OptimizerConfig(lr=0.02, weight_decay=0.0, momentum=0.0))[0]
    for weight in model.parameters():
        weight.grad = torch.randn_like(weight)
    start, gradient = own.weight.detach().clone(), own.weight.grad.clone()
    take(muon)
    wanted = -0.02 * polar(gradient, None)
    assert (own.weight - start - wanted).norm() < 0.12 * wanted.norm()


@pytest.mark.parametrize("scale", [1.0, 1e-9])  # the second makes eps matter
def test_adamw_moves_weights_as_torchs_own_does_to_the_bit(scale):
    shape = dict(bias=True, norm="layernorm", position="learned")
    ours, theirs = random_gpt(**shape), random_gpt(**shape)
    settings = dict(lr=0.02, embedding_lr=0.01, lm_head_lr=0.004, beta1=0.8, beta2=0.95, weight_decay=0.1)
    optimizers = make_optimizers(ours, OptimizerConfig(name="adamw", **settings))
    groups = []
    for name, parameter in theirs.named_parameters():
        lr = 0.01 if parameter.ndim == 1 else {"blocks": 0.02, "lm_head": 0.004}.get(name.split(".")[0], 0.01)
        groups.append({"params": [parameter], "lr": lr, "weight_decay": 0.1 if parameter.ndim > 1 else 0.0})
    oracle = torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-10, fused=True)
    for step in range(3):
        torch.manual_seed(step)
        for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            if name != "blocks.0.mlp.down_proj.weight":  # which never has a gradient
                a.grad = scale * torch.randn(a.shape)
                b.grad = a.grad.clone()
        for optimizer in optimizers:
            take(optimizer)
        oracle.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_ranks_divide_the_matrices_of_a_step_among_them(monkeypatch):
    rows, shares = torch.randn(4, 2, 3), []
    monkeypatch.setattr("training.distributed.all_gather", lambda whole, own: shares.append(own) or whole.zero_())
    for rank in range(3):
        result = Ranks(rank, 3, launched=True).divide(torch.neg, rows)
        assert result.shape == rows.shape
    assert [len(share) for share in shares] == [2, 2, 2]
    assert torch.equal(torch.cat(shares)[:4], -rows)


class OnAMac(torch.Tensor):
    """A tensor that says it lies on Apple's GPU."""

    device = property(lambda self: torch.device("mps"))


@pytest.mark.parametrize("gradient", [1.0, torch.nan])
def test_on_a_mac_adamw_honours_the_divisor_and_the_skip_that_its_fused_kernel_ignores(gradient, monkeypatch):
    def ignoring(*tensors, grad_scale, found_inf, of=torch._fused_adamw_, **numbers):
        of(*tensors, grad_scale=None, found_inf=None, **numbers)

    models = [random_gpt(), random_gpt()]
    adamw = OptimizerConfig(name="adamw", weight_decay=0.1)
    fused, on_mac = (make_optimizers(model, adamw) for model in models)
    for step in range(3):
        for model in models:
            torch.manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter) * (gradient if step == 2 else 1)
        skip = torch.tensor(float(step == 2 and gradient != gradient))
        for optimizer in fused:
            take(optimizer, 4.0, skip)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "_fused_adamw_", ignoring)
            for optimizer in on_mac:
                take(optimizer, 4.0, skip.as_subclass(OnAMac))
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_fp16_orthogonalizes_gradients_too_small_for_it(monkeypatch):
    torch.manual_seed(0)
    matrices = torch.randn(2, 32, 64)
    monkeypatch.setattr("training.optimizer.choose_precision", lambda name, device: torch.float32)
    exact = orthogonalize(matrices, 16)
    monkeypatch.setattr("training.optimizer.choose_precision", lambda name, device: torch.float16)
    for scale in (1e-9, 1e-4, 1e5):  # fp16 ends at 6e-8 and at 65,504
        update = orthogonalize(matrices * scale, 16).float()
        assert torch.cosine_similarity(update.flatten(), exact.flatten(), 0) > 0.999


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_are_divided_as_the_step_is_told(name):
    models = []
    for factor in (1.0, 4.0):
        models.append(model := random_gpt())
        optimizers = make_optimizers(model, OptimizerConfig(name=name))
        for step in range(2):
            torch.manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = (factor if step else 1.0) * torch.randn_like(parameter)
            for optimizer in optimizers:
                take(optimizer, factor if step else 1.0)
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


@pytest.mark.parametrize("skipped", [False, True])
def test_on_a_gpu_muon_moves_matrices_together_as_it_does_one_by_one(monkeypatch, skipped):
    models, momenta = [], []
    for stacks in (False, True):
        monkeypatch.setattr("training.optimizer.has_launches", lambda tensor, stacks=stacks: stacks)
        models.append(model := random_gpt(attention="sdpa+gate_element", mlp="swiglu"))
        optimizers = make_optimizers(model, OptimizerConfig(weight_decay=0.1))
        for step in range(3):
            torch.manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            if skipped and step == 2:
                before = [parameter.detach().clone() for parameter in model.parameters()]
                model.blocks[0].attention.qkv_proj.weight.grad.fill_(torch.nan)
                # The flag of a GPU is not read: so it is none of a CPU's either.
                monkeypatch.setattr("training.optimizer.is_skipped", lambda flag: False)
            for optimizer in optimizers:
                optimizer.grad_scale, optimizer.found_inf = (
                    torch.tensor(3.0),
                    torch.tensor(float(skipped and step == 2)),
                )
                if stacks or not (skipped and step == 2):
                    optimizer.step()
        if skipped and stacks:
            assert all(map(torch.equal, before, model.parameters()))
        momenta.append(optimizer_state(model, optimizers))
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, atol=5e-4, rtol=0)  # a rounding, orthogonalized in bf16
    for name, tensor in momenta[0].items():
        torch.testing.assert_close(momenta[1][name], tensor, atol=1e-6, rtol=1e-6)


def test_the_state_of_another_model_is_refused_naming_a_part():
    model = random_gpt()
    optimizers = make_optimizers(model, OptimizerConfig())
    state, name = optimizer_state(model, optimizers), "blocks.0.attention.qkv_proj.weight.momentum_buffer"
    load_optimizer_state(model, optimizers, state, Ranks())
    for wrong in (state | {name: torch.zeros(2, 2)}, {k: v for k, v in state.items() if k != name}, {}):
        with pytest.raises((KeyError, RuntimeError), match=r"blocks\.0\.|size"):
            load_optimizer_state(model, optimizers, wrong, Ranks())


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
    assert {step: schedule_factor(schedule, step, step / 100) for step in factors} == pytest.approx(factors)


@pytest.mark.parametrize(
    ("name", "steps", "warmup"),
    [
        ("warmup_stable_decay", 21, 3),
        ("cosine", 45, 5),
        ("cosine", 600, 60),
        ("constant", 5000, 100),
        ("cosine", None, 100),
    ],
)
def test_a_warm_up_that_nobody_typed_is_at_most_a_tenth_of_the_run_rounded_up(name, steps, warmup):
    factors = [schedule_factor(ScheduleConfig(name=name), step, 0.0, steps) for step in (0, warmup - 1, warmup)]
    assert factors == pytest.approx([1 / (warmup + 1), warmup / (warmup + 1), 1])


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_1_after_its_warm_up_and_never_climbs_or_leaves_its_bounds(name):
    for warmup in (0, 10):
        schedule = ScheduleConfig(name=name, warmup_steps=warmup, final_factor=0.1)
        factors = [schedule_factor(schedule, step, step / 100) for step in range(warmup, 101)]
        assert factors[0] == 1 and factors == sorted(factors, reverse=True) and factors[-1] >= 0.1 - 1e-9


def test_a_decay_by_the_clock_begins_after_the_warm_up_and_never_climbs_again():
    schedule = ScheduleConfig(name="cosine", warmup_steps=20)
    paces = [step / 100 for step in range(20)] + [0.2 + (step - 20) ** 2 / 8_000 for step in range(20, 101)]
    factors = [schedule_factor(schedule, step, share) for step, share in enumerate(paces)]
    assert factors[20] == max(factors) == 1 and factors[100] == pytest.approx(0)
    assert factors[20:] == sorted(factors[20:], reverse=True)


@pytest.mark.parametrize(
    ("settings", "is_told"),
    [
        ({"name": "adamw"}, True),
        ({"name": "adamw", "weight_decay": 0.1, "beta2": 0.99}, True),
        ({"name": "adamw", "lr": 1e-3, "embedding_lr": None, "lm_head_lr": None}, False),
        ({"name": "adamw", "embedding_lr": None}, False),
        ({"name": "muon"}, False),
    ],
)
def test_a_name_alone_keeps_muons_rates_which_is_told_with_the_option_that_sets_others(settings, is_told, caplog):
    """Which are 20 and 100 times those of conf/optimizer/adamw.yaml."""
    tell_rates(OptimizerConfig(**settings))
    fact = "optimizer.name=adamw alone keeps the rates for muon (lr=0.02, embedding_lr=0.1, lm_head_lr=0.008)"
    assert (caplog.messages == [f"{fact}: optimizer=adamw sets those for adamw."]) == is_told
    written = yaml.safe_load((ROOT / "conf" / "optimizer" / "adamw.yaml").read_text())
    assert float(written["lr"]) == 1e-3 and written["embedding_lr"] is None
    assert yaml.safe_load((ROOT / "conf" / "schedule" / "cosine.yaml").read_text())["final_factor"] == 0.1


def test_rates_are_told_of_parts_that_there_are_and_once(caplog):
    """A resumed run was told again, with a remedy that it refuses, and a tied model of the rate of its lm_head."""
    low = OptimizerConfig(lr=1e-3)
    for has_head in (True, False):
        tell_rates(low, has_head=has_head)
        assert ("(lm_head)" in caplog.messages[-1]) == has_head and "(embeddings" in caplog.messages[-1]
    saved = Meta(asdict(TrainConfig(optimizer=low)))
    assert not is_changed(low, saved) and is_changed(OptimizerConfig(lr=1e-4), saved)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"schedule": ScheduleConfig(name="cosine", decay_fraction=0.2)}, "schedule.decay_fraction=0.2"),
        ({"schedule": ScheduleConfig(name="constant", final_factor=0.5)}, "schedule.final_factor=0.5"),
        ({"optimizer": OptimizerConfig(name="adamw", momentum=0.5)}, "optimizer.momentum=0.5"),
        ({"schedule": ScheduleConfig(name="cosine", final_factor=0.5)}, ""),
        ({"schedule": ScheduleConfig(decay_fraction=0.2, final_factor=0.5)}, ""),
        ({"optimizer": OptimizerConfig(momentum=0.5)}, ""),
        ({"optimizer": OptimizerConfig(name="adamw"), "schedule": ScheduleConfig(name="constant")}, ""),
    ],
)
def test_settings_that_leave_each_rate_and_update_as_they_are_are_told(settings, told, caplog):
    config = TrainConfig(**settings)
    tell_idle(config, random_gpt())
    assert [line.partition(" has no effect with ")[0] for line in caplog.messages] == [told][: bool(told)]
    if told.startswith("schedule."):
        plain = ScheduleConfig(name=config.schedule.name)
        same = [[schedule_factor(each, step, step / 20, 20) for step in range(21)] for each in (config.schedule, plain)]
        assert same[0] == same[1]


@pytest.mark.parametrize(
    ("rate", "model", "is_told"),
    [
        (0.004, dict(tie_embeddings=True), True),
        (0.004, dict(tie_embeddings=True, attention="sdpa+gate"), False),  # whose gate has a row for each head
        (0.004, dict(), False),
        (0.008, dict(tie_embeddings=True), False),  # the default
        (None, dict(tie_embeddings=True), False),
    ],
)
def test_a_rate_of_lm_head_that_moves_no_weight_is_told(rate, model, is_told, caplog):
    optimizer = OptimizerConfig(name="adamw", lr=1e-3, embedding_lr=1e-3, lm_head_lr=rate)
    gpt = random_gpt(**model)
    tell_idle(TrainConfig(optimizer=optimizer, model=gpt.config), gpt)
    line = "optimizer.lm_head_lr=0.004 has no effect with model.tie_embeddings=true."
    assert caplog.messages == [line] * is_told
    if rate == 0.004:  # a rate that no other kind of weights has
        groups = [group for each in make_optimizers(gpt, optimizer) for group in each.param_groups]
        assert (rate in {group["peak_lr"] for group in groups if group["params"]}) == (not is_told)


def test_the_factor_scales_each_groups_own_peak_which_is_lr_unless_set():
    for embedding, head, rates in ((0.01, 0.004, [0.0025, 0.001, 0.0025]), (0.01, None, [0.0025, 0.005, 0.0025])):
        config = OptimizerConfig(embedding_lr=embedding, lm_head_lr=head, lr=0.02)
        optimizers = make_optimizers(random_gpt(), config)
        for factor in (0.5, 0.25):
            set_learning_rate(optimizers, factor)
        found = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
        assert found == pytest.approx([0.005] * 3 + rates)  # of matrices; embeddings, lm_head, norms and biases
