"""Whatever a call has, each executor that declares itself able computes its definition; the chooser takes one of them.

The definition is written here once more, in float64, by the formulas of the papers and not by the project's code.
"""

import itertools
import math
import random
from typing import NamedTuple

import pytest
import torch
from conftest import some
from test_fused import Varlen

from model.attention import FORMS, executors
from model.attention.call import Call, Indexer, Relative, add_sink, contradiction
from model.attention.contract import of_weighting
from model.attention.executors import OF_SDPA, OF_WEIGHTING, Executor, choose, obstacle, run_call
from model.attention.weighting import PLAIN, Blockwise, Own, Sigmoid, Softcap, Softmax, Sparsemax, Stick, Unknown

B, H, HKV, D, DV = 2, 2, 1, 8, 12
CAP, BLOCK, BEST, P = 3.0, 5, 2, 0.3
FEATURES = tuple(name for name in Call._fields if name not in ("q", "k", "v", "weighting"))
WEIGHTINGS = (PLAIN, Softcap(CAP), Blockwise(BLOCK, BEST), Sigmoid(), Sparsemax(), Stick())
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (1, 7, 64, 256, 257, 320, 600)
SHORTER = (1, 7, 64, 64, 257)  # for the pairs, which are many: short texts and long ones
DEVICES = ("cpu", "cuda", "mps")
# How far a result may be from the definition on the same numbers, as a share of the largest: value, gradients. Half
# precision rounds weights and results, and gradients once more on their way.
TOLERANCE = {torch.float32: (2e-5, 5e-5), torch.bfloat16: (2e-2, 4e-2), torch.float16: (3e-3, 6e-3)}
MADE = {id(made): made for made in vars(executors).values() if isinstance(made, Executor)}
for form in FORMS.values():
    for executor in getattr(form, "executors", ()):
        MADE[id(executor)] = executor
MADE = [*MADE.values()]
STEPS = ("einsum", "loop", "head_by_head")  # which are there to be read, and slow


class Case(NamedTuple):
    """A call, and the tensors that have gradients."""

    call: Call
    leaves: list[torch.Tensor]


def make(names, weighting, dtype, T, S, seed) -> Case:
    """A call with some features."""
    torch.manual_seed(seed)

    def randn(*shape, dtype=torch.float32):
        """In the layout of a layer's tensors, where the heads of a token lie side by side."""
        drawn = torch.randn(shape)
        if len(shape) > 2:
            drawn = drawn.transpose(1, 2).contiguous().transpose(1, 2)
        return drawn.to(dtype).requires_grad_()

    wide = S if "dropout_p" in names else DV  # each result is a weight, where some are dropped
    q, k, v = randn(B, H, T, D, dtype=dtype), randn(B, HKV, S, D, dtype=dtype), randn(B, HKV, S, wide, dtype=dtype)
    leaves = [q, k, v]
    if "dropout_p" in names:
        v = torch.eye(S, dtype=dtype).expand(B, HKV, S, S)
        leaves = [q, k]
    given = {}
    if "mask" in names:
        given["mask"] = torch.rand(B, 1, T, S) > 0.3
    if "is_causal" in names:
        given["is_causal"] = False
    if "doc_starts" in names:
        position = torch.arange(S - T, S)
        given["doc_starts"] = torch.stack((position // 50 * 50, torch.full_like(position, S - T + 2)))
    if "window" in names:
        given["window"] = max(1, S // 3)
    if "row_column" in names:
        given["row_column"] = randn(B, H, T), randn(B, H, S)
        leaves += given["row_column"]
    if "matrix" in names:
        given["matrix"] = randn(H, T, S)
        leaves.append(given["matrix"])
    if "relative" in names:
        given["relative"] = Relative(randn(B, H, T, 3), randn(3, max(1, S // 2)))
        leaves += given["relative"]
    if "faded" in names:
        given["faded"] = (-torch.rand(B, HKV, S, D).double() / 4).cumsum(2).requires_grad_()
        leaves.append(given["faded"])
    if "tilt" in names:
        given["tilt"] = randn(B, H, T, D, dtype=dtype)
        leaves.append(given["tilt"])
    if "sink" in names:
        given["sink"] = randn(H)
        leaves.append(given["sink"])
    if "indexer" in names:
        index = randn(B, 2, T, D, dtype=dtype), randn(B, S, D, dtype=dtype), randn(B, T, 2, dtype=dtype)
        given["indexer"] = Indexer(*(t.detach() for t in index), best=max(1, S // 4), learns=False)
    if "dropout_p" in names:
        given["dropout_p"] = P
    if "scale" in names:
        given["scale"] = 0.2
    return Case(Call(q, k, v, weighting, **given), leaves)


def definition(call: Call) -> torch.Tensor:
    """The result of a call without dropout, in float64."""
    q, k, v = (t.double() for t in call[:3])
    H = q.shape[1]
    k, v = (t.repeat_interleave(H // k.shape[1], 1) for t in (k, v))
    T, S = q.shape[2], k.shape[2]
    key, query = torch.arange(S), torch.arange(S - T, S)[:, None]

    # The keys that each query sees, (B, H, T, S).
    seen = torch.ones(B, 1, T, S, dtype=torch.bool) if not call.is_causal else (key <= query).expand(B, 1, T, S)
    if call.mask is not None:
        seen = seen & call.mask
    if call.window is not None:
        seen = seen & (query - key < call.window)
    if call.doc_starts is not None:
        seen = seen & (key >= call.doc_starts[:, None, :, None])
    if call.indexer is not None:
        iq, ik, w = (t.double() for t in call.indexer[:3])
        index = (iq @ ik[:, None].mT).relu() * w.mT[..., None]
        index = index.sum(1, keepdim=True) / math.sqrt(iq.shape[1] * iq.shape[3])
        gap = 32 * torch.finfo(torch.float32).eps * index.masked_fill(~seen, 0).abs().amax(-1, keepdim=True)
        index = index.masked_fill(~seen, -math.inf).masked_fill(key == query, math.inf)
        seen = seen & best_keys(index, gap, call.indexer.best)
    seen = seen.expand(B, H, T, S)

    # Scores.
    if call.faded is None:
        products = q @ k.mT
    else:
        total = call.faded.double().repeat_interleave(H // call.faded.shape[1], 1)
        kept = (total[:, :, S - T :, None] - total[:, :, None]).clamp(max=0).exp()
        products = torch.einsum("bhtd,bhsd,bhtsd->bhts", q, k, kept)
    scores = products * (call.scale or 1 / math.sqrt(q.shape[-1]))
    name = call.weighting.name
    if name == "softcap":
        scores = CAP * torch.tanh(scores / CAP)
    if call.row_column is not None:
        scores = scores + call.row_column[0].double()[..., None] + call.row_column[1].double()[..., None, :]
    if call.matrix is not None:
        scores = scores + call.matrix.double()
    if call.relative is not None:
        by_distance = call.relative.r.double() @ call.relative.profiles.double()
        distance = (query - key).expand(B, H, T, S)
        extent = by_distance.shape[-1]
        near_ones = by_distance.gather(-1, distance.clamp(0, extent - 1))
        scores = scores + near_ones.masked_fill((distance < 0) | (distance >= extent), 0)
    sink = torch.full((H, 1, 1), -math.inf) if call.sink is None else call.sink[:, None, None]
    sink = sink.double()
    if name == "blockwise":
        seen = seen & chosen_blocks(scores.detach(), seen)

    # Weights, of the keys that are seen alone.
    hidden = scores.masked_fill(~seen, -math.inf)
    if name in ("softmax", "softcap", "blockwise"):
        top = torch.maximum(hidden.detach().amax(-1, keepdim=True), sink.detach()).clamp(min=-1e30)
        weights = (hidden - top).exp()
        weights = weights / (weights.sum(-1, keepdim=True) + (sink - top).exp()).clamp(min=1e-300)
    elif name == "sigmoid":
        weights = seen / (1 + seen.sum(-1, keepdim=True) * (-scores).exp())
    elif name == "sparsemax":
        weights = on_simplex(torch.cat((hidden, sink.expand(B, H, T, 1)), -1))[..., :S]
    else:
        share = torch.sigmoid(hidden.masked_fill(key >= query, -math.inf)).flip(-1)
        left = torch.cat((torch.ones_like(share[..., :1]), (1 - share).cumprod(-1)[..., :-1]), -1)
        weights = (share * left).flip(-1)
    weights = weights.masked_fill(~seen, 0)
    if call.tilt is None:
        return weights @ v
    along = call.tilt.double() @ k.mT
    mean = weights @ v
    covariance = (weights * along) @ v - (weights * along).sum(-1, keepdim=True) * mean
    return mean - covariance


def best_keys(index, gap, best):
    """The best keys of each query; of those that no gap separates in their order, the nearer."""
    S = index.shape[-1]
    ordered, keys = index.sort(-1, descending=True)
    rank = torch.cat((torch.zeros_like(keys[..., :1]), (ordered.diff(dim=-1) < -gap).cumsum(-1)), -1)
    rank = torch.empty_like(keys).scatter(-1, keys, rank)
    order = (rank * S + (S - 1 - torch.arange(S))).argsort(-1).argsort(-1)
    return order < best


def chosen_blocks(scores, seen):
    """The keys of each query's own block, and of the best before it by mean score."""
    S = scores.shape[-1]
    key = torch.arange(S)
    first = torch.where(seen, key, S).amin(-1, keepdim=True)
    last = torch.where(seen, key, -1).amax(-1, keepdim=True)
    number = (key - first).clamp(min=0) // BLOCK  # of each key's block, from the first key that the query sees
    own = (last - first) // BLOCK
    count = int(number.max()) + 1
    nothing = scores.new_zeros(*scores.shape[:-1], count)
    sums = nothing.scatter_add(-1, number, scores.masked_fill(~seen, 0))
    means = (sums / nothing.scatter_add(-1, number, seen.to(scores.dtype))).nan_to_num(nan=-math.inf)
    earlier = means.masked_fill(torch.arange(count) >= own, -math.inf)
    rank = earlier.argsort(-1, descending=True).argsort(-1)
    chosen = ((rank < BEST) & (earlier > -math.inf)) | (torch.arange(count) == own)
    return chosen.gather(-1, number)


def on_simplex(scores):
    """max(0, score - τ), with τ raised until the keys above it have one share to give (Michelot 1986)."""
    inside = scores.detach() > -math.inf
    while True:
        total = torch.where(inside, scores, 0).sum(-1, keepdim=True)
        threshold = (total - 1) / inside.sum(-1, keepdim=True).clamp(min=1)
        above = inside & (scores > threshold).detach()
        if above.equal(inside):
            return torch.where(inside, scores - threshold, 0)
        inside = above


def able(call):
    """The executors that declare themselves able somewhere, each once."""
    quick = [made for made in MADE if made.name not in STEPS or call.q.shape[2] <= 64]
    return [made for made in quick if any(obstacle(made, call, device) is None for device in DEVICES)]


def compute(executor, call):
    result = executor.run(call)
    return result[0] if isinstance(result, tuple) else result


def check(names, weighting, dtype, T, S, seed):
    """Let all that may compute a call compute its definition."""
    case = make(names, weighting, dtype, T, S, seed)
    call = case.call
    if contradiction(call) is not None:
        for device in DEVICES:
            with pytest.raises(
                ValueError, match="means nothing under|leave out window|leave out faded|later keys under"
            ):
                choose(call, OF_SDPA, device)
        return 0

    # The definition, on the same numbers.
    exact = [t.detach().double().requires_grad_() for t in case.leaves]
    of = dict(zip(map(id, case.leaves), exact, strict=True))
    wide = call._replace(
        q=of[id(call.q)], k=of[id(call.k)], v=of.get(id(call.v), call.v),
        row_column=call.row_column and tuple(of[id(part)] for part in call.row_column),
        matrix=None if call.matrix is None else of[id(call.matrix)],
        sink=None if call.sink is None else of[id(call.sink)],
        relative=call.relative and Relative(*(of[id(part)] for part in call.relative)),
        faded=None if call.faded is None else of[id(call.faded)],
        tilt=None if call.tilt is None else of[id(call.tilt)],
    )  # fmt: skip
    wanted = definition(wide)
    g = torch.randn(wanted.shape, dtype=torch.float64)
    gradients = torch.autograd.grad(wanted, exact, g, materialize_grads=True)
    executors_able = able(call)
    assert executors_able
    for executor in executors_able:
        what = f"{executor.name}: {names}, {weighting.name}, {dtype}, T={T}, S={S}"
        y = compute(executor, call)
        assert y.dtype == dtype and y.shape == wanted.shape, what
        of_value, of_gradient = TOLERANCE[dtype]
        if "dropout_p" in names:
            # Each weight is dropped, or divided by 1 - p.
            y, w = y.double(), wanted / (1 - P)
            kept = y != 0
            assert ((y - w)[kept].abs() <= 2 * of_value * max(1.0, w.abs().max().item())).all(), what
            clear = w.abs() > 1e-3
            share = (~kept & clear).sum() / clear.sum().clamp(min=1)
            assert abs(share - P) < 4 * math.sqrt(P * (1 - P) / max(1, int(clear.sum()))) + 1e-3, what
            continue
        near(y, wanted, of_value, what)
        if weighting.name == "sparsemax" and dtype != torch.float32:
            continue  # whose gradients jump where a rounding moves a key over its threshold
        found = torch.autograd.grad(y, case.leaves, g.to(dtype), allow_unused=True)
        for leaf, a, b in zip(case.leaves, found, gradients, strict=True):
            if a is None:  # rows of a bias, which change no weight where there is no sink
                assert b.abs().max() < 1e-8 and call.row_column is not None and leaf is call.row_column[0], what
                continue
            # A bias gets the sum of gradients that were rounded.
            room = 4 if a.dtype == torch.float32 != dtype else 1
            near(a, b, room * of_gradient, f"gradient of {tuple(leaf.shape)}, {what}")

    # The chooser's answer is among them.
    for ways in (OF_SDPA, OF_WEIGHTING) if weighting is PLAIN else (OF_WEIGHTING,):
        for device in DEVICES:
            assert any(choose(call, ways, device) is executor for executor in executors_able)
    return len(executors_able)


def near(found, wanted, share, what):
    scale = max(1.0, wanted.abs().max().item())
    error = (found.double() - wanted).abs().max().item() / scale
    assert error <= share, f"{error:.2g} > {share:.2g}: {what}"


def texts(generator, names, lengths):
    """A number of queries, and one of keys."""
    T = generator.choice(lengths)
    S = T + generator.choice((0, 0, 0, 1, 40))
    if "dropout_p" in names:
        T, S = generator.choice(((1, 64), (7, 40), (64, 64), (64, 90), (280, 280)))
    return T, S


SETS = [*((), *((name,) for name in FEATURES)), *itertools.combinations(FEATURES, 2)]


@pytest.fixture(autouse=True)
def varlen(monkeypatch, unchecked):
    """varlen_attn, which a CPU lacks."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", Varlen())


@pytest.mark.parametrize("names", SETS[::3], ids="+".join)
def test_every_third_pair_of_features_is_its_definition_by_every_executor(names):
    """In one weighting, type and length."""
    generator = random.Random("+".join(names))
    check(names, generator.choice(WEIGHTINGS), generator.choice(DTYPES), *texts(generator, names, SHORTER), 0)


HALF = [(names, each) for number, names in enumerate(SETS) for each in WEIGHTINGS[number % 2 :: 2]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "weighting"), some(HALF, 9), ids=[f"{'+'.join(names)}-{each.name}" for names, each in HALF]
)
def test_every_pair_of_features_is_its_definition_under_half_of_the_weightings(names, weighting):
    generator = random.Random(f"{names} {weighting.name}")
    check(names, weighting, generator.choice(DTYPES), *texts(generator, names, SHORTER), 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(40), *(pytest.param(n, marks=pytest.mark.long) for n in range(40, 150))])
def test_random_triples_of_features_are_their_definition_by_every_executor(seed):
    generator = random.Random(seed)
    names = tuple(generator.sample(FEATURES, 3))
    lengths = SHORTER if seed < 16 else LENGTHS
    check(names, generator.choice(WEIGHTINGS), generator.choice(DTYPES), *texts(generator, names, lengths), seed)


@pytest.mark.parametrize("weighting", [PLAIN, Softcap(CAP)], ids=lambda weighting: weighting.name)
def test_a_bias_of_a_long_text_may_have_a_tokens_heads_side_by_side(weighting):
    """The chunks refused the rows of token_sink where heads share a key."""
    check(("row_column",), weighting, torch.float32, 257, 257, 0)


def test_a_field_that_an_executor_has_not_declared_is_refused_by_it():
    assert {"folded", "varlen", "half", "bmm", "fused", "chunks", "fused_matrix", "weighted"} <= {e.name for e in MADE}
    for executor in MADE:
        for name in set(FEATURES) - executor.fields:
            for T in (64, 300):
                call = make((name,), PLAIN, torch.bfloat16, T, T, 0).call
                assert all(obstacle(executor, call, device) is not None for device in DEVICES), (executor.name, name)


def test_a_new_field_goes_to_nobody_until_an_executor_declares_it():
    class Wider(NamedTuple):
        """A call with one more field."""

        q: torch.Tensor
        k: torch.Tensor
        v: torch.Tensor
        weighting: object = PLAIN
        mask: object = None
        is_causal: bool = True
        doc_starts: object = None
        window: object = None
        row_column: object = None
        matrix: object = None
        relative: object = None
        sink: object = None
        indexer: object = None
        faded: object = None
        tilt: object = None
        dropout_p: float = 0.0
        scale: object = None
        noise: object = None

    assert Wider._fields[:-1] == Call._fields
    for T in (1, 64, 300):
        q, k, v = make((), PLAIN, torch.bfloat16, T, 300, 0).call[:3]
        plain, noisy = Wider(q, k, v), Wider(q, k, v, noise=torch.ones(()))
        for device in DEVICES:
            assert choose(plain, OF_SDPA, device)
            for executor in MADE:
                assert obstacle(executor, noisy, device) is not None
            with pytest.raises(ValueError, match=r"nothing computes this attention: folded .*weighted \(no noise\)"):
                choose(noisy, OF_SDPA, device)
        brave = OF_SDPA[-1]._replace(fields=OF_SDPA[-1].fields | {"noise"})
        assert choose(noisy, (*OF_SDPA, brave), "cpu") is brave


def test_a_weighting_of_ones_own_goes_to_no_executor_of_ours_whatever_its_name():
    class Softmaxed(Softmax):
        def weights(self, scores):
            return scores.softmax(-1) ** 2

    for weighting in (Own(lambda scores: scores.softmax(-1) ** 2), Unknown("softmax"), Softmaxed()):
        weighting.name = "softmax"
        for names, T in itertools.product(((), ("window",), ("row_column",)), (64, 300)):
            call = make(names, weighting, torch.bfloat16, T, T, 0).call
            for executor in MADE:
                if executor.weightings is not None:
                    assert all(obstacle(executor, call, device) is not None for device in DEVICES)
            names = {choose(call, OF_WEIGHTING, device).name for device in DEVICES}
            assert names == ({"half_weighted", "weighted"} if T == 64 else {"weighted"})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("T", "S"), [(9, 5), (300, 280)])
def test_more_queries_than_keys_go_to_code_that_has_causality_as_a_mask(T, S, dtype):
    q, k = torch.zeros(1, 2, T, 8, dtype=dtype), torch.zeros(1, 2, S, 8, dtype=dtype)
    names = {choose(Call(q, k, k), OF_SDPA, device).name for device in DEVICES}
    assert names <= {"half", "bmm", "fused_matrix"}


def test_softmax1_keeps_its_null_key_under_a_window_on_a_gpu():
    """It was lost once: the fast kernel knew windows, but of the key only the form knew."""
    call = make(("window",), PLAIN, torch.bfloat16, 70, 70, 0).call
    softmax1 = FORMS["softmax1"]
    plain, more = call, softmax1.new_call(*call[:3], window=call.window)
    found = run_call(more, softmax1.executors, "cuda")[0]
    near(found, definition(more), 2e-2, "softmax1")
    assert (found - run_call(plain, OF_WEIGHTING, "cuda")[0]).abs().max() > 0.1
    assert (
        choose(plain, OF_WEIGHTING, "cuda").name == "varlen" and choose(more, OF_WEIGHTING, "cuda").name == "weighted"
    )


def test_a_null_key_beside_a_sink_adds_1_and_the_sinks_exponential_to_the_denominator():
    q, k, v = torch.randn(3, B, H, 9, D, dtype=torch.float64).unbind()
    sink = torch.randn(H, dtype=torch.float64)
    softmax1 = FORMS["softmax1"]
    y, _ = run_call(add_sink(softmax1.new_call(q, k, v), sink), softmax1.executors)
    scores = (q @ k.mT / math.sqrt(D)).masked_fill(torch.ones(9, 9).triu(1) > 0, -math.inf).exp()
    near(y, scores / (scores.sum(-1, keepdim=True) + 1 + sink[:, None, None].exp()) @ v, 1e-12, "softmax1 with a sink")


def test_a_plan_for_a_gpu_chooses_as_there_and_drops_nothing():
    """A CPU's kernel would keep the scores."""
    call = make(("dropout_p",), PLAIN, torch.bfloat16, 300, 300, 0).call
    ran = []
    ways = tuple(e._replace(run=lambda call, e=e: ran.append((e.name, call.dropout_p)) or e.run(call)) for e in OF_SDPA)
    planned, here = run_call(call, ways, "cuda")[0], run_call(call, ways)[0]
    assert ran == [("folded", 0.0), ("fused", P)] and (planned != 0).sum() > (here != 0).sum()


def test_autocast_gives_the_type_of_the_products_and_rounds_no_score():
    q, k, v = (3 + torch.randn(3, 2, 4, 100, 64)).unbind()
    exact = definition(Call(*(t.bfloat16() for t in (q, k[:, :2], v[:, :2]))))
    for form in ("matmul", "einsum", "bmm", "loop", "sdpa"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = FORMS[form](q, k[:, :2], v[:, :2], is_causal=True)
        assert y.dtype == torch.bfloat16
        near(y, exact, 1e-2, form)


# Half precision. Large means make large scores, which half precision rounds; q, k ~ N(mean, 1), v ~ N(0, 1), D = 64.


@pytest.mark.slow
@pytest.mark.parametrize("T", some([257, 8, 64, 256], 4))
@pytest.mark.parametrize(("dtype", "mean", "most"), [(torch.bfloat16, 3, 0.02), (torch.float16, 100, 0.01)])
@pytest.mark.parametrize(
    "name", some(["matmul", "einsum", "bmm", "sdpa", "softmax1", "softcap", "sdpa+bias", "sdpa+sink"], 3)
)
def test_large_scores_in_half_precision_are_as_exact_as_in_float32(name, dtype, mean, most, T):
    torch.manual_seed(0)
    q, k = ((mean + torch.randn(1, H, T, 64)).to(dtype) for _ in range(2))
    v = torch.randn(1, H, T, 64).to(dtype)
    form, _, more = name.partition("+")
    function = of_weighting(Softcap(CAP)) if form == "softcap" else FORMS[form]
    given = {"row_column": (torch.randn(1, H, T), torch.randn(1, H, T))} if more == "row_column" else {}
    given |= {"sink": torch.randn(H)} if more == "sink" else {}
    call = function.new_call(q, k, v, **given)
    double = {name: tuple(t.double() for t in x) if name == "row_column" else x.double() for name, x in given.items()}
    exact = FORMS["loop"] if form in ("matmul", "einsum", "bmm", "sdpa") else function
    wanted = run_call(exact.new_call(q.double(), k.double(), v.double(), **double), exact.executors)[0]
    for executor in able(call):
        near(compute(executor, call), wanted, most, executor.name)
