"""Programs that PyTorch's users write around a model: buffers, hooks, dtypes, weights.

Each has the factors of a dense float64 computation by hand, or an error with a name.
"""

from __future__ import annotations

import copy
import re
import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as fn  # noqa: E402

import kfac_core as kc  # noqa: E402
from kfac_core_shims.torch import KFAC, KFACOptimizer  # noqa: E402

from ..builders.torch_rows import (  # noqa: E402
    assert_factors,
    by_hand,
    dense,
    root_of_hessian,
)

EACH_STEP = {"kl_clip": None, "update_every": 1, "refresh_every": 1}
EXACT = {"fisher": "exact", **EACH_STEP}
NEWEST = {"decay": 1e-9, **EXACT}


pytestmark = pytest.mark.usefixtures("torch_float64")


def network():
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))


def batch(n=8):
    return torch.randn(n, 5), torch.randint(0, 4, (n,))


# Memory that is written to.


class Residual(nn.Module):
    """Adds a layer's output to its input: in place, or not."""

    def __init__(self, in_place):
        super().__init__()
        self.norm, self.mix, self.head = (
            nn.LayerNorm(5),
            nn.Linear(5, 5),
            nn.Linear(5, 4),
        )
        self.in_place = in_place

    def forward(self, x):
        h = self.norm(x)
        if self.in_place:
            h += self.mix(h)
            return self.head(h)
        return self.head(h + self.mix(h))


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_an_input_that_was_written_to_is_refused(fisher):
    """Under autocast, autograd keeps a cast of it, and so allows `x += layer(x)`."""
    torch.set_default_dtype(torch.float32)
    x, y = batch()

    def stepped(in_place):
        model = Residual(in_place)
        kfac = KFAC(model, **{**EXACT, "fisher": fisher})
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = fn.cross_entropy(model(x), y)
        loss.backward()
        kfac.step()
        return kfac

    rows = torch.cat([fn.layer_norm(x, (5,)), torch.ones(8, 1)], 1)
    A = stepped(in_place=False).factors("mix")[0]
    torch.testing.assert_close(A, rows.T @ rows / 8, rtol=1e-5, atol=1e-6)
    with pytest.raises(kc.UnsupportedError, match="'mix' was written to"):
        stepped(in_place=True)


# Checkpoints.


class Checkpointed(nn.Module):
    """Modules that read their weights themselves, whose activations are recomputed."""

    def __init__(self, kind):
        super().__init__()
        self.recomputes = True
        self.inner = nn.LSTM(4, 4, batch_first=True)
        if kind == "encoder":
            self.inner = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.head = nn.Linear(4, 4)

    def run(self, x):
        found = self.inner(x)
        return found[0] if isinstance(found, tuple) else found

    def forward(self, x):
        again = torch.utils.checkpoint.checkpoint
        h = again(self.run, x, use_reentrant=False) if self.recomputes else self.run(x)
        return self.head(h.sum(1))


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("kind", ["lstm", "encoder"])
def test_products_inside_of_a_checkpoint_are_read(kind, fisher):
    """A checkpoint gives what it recomputes to one reader of each backward pass."""
    model, x, y = Checkpointed(kind), torch.randn(4, 5, 4), torch.randint(0, 4, (4,))
    twin = copy.deepcopy(model)
    twin.recomputes = False
    for own in (model, twin):
        torch.manual_seed(1)
        kfac = KFAC(own, **{**EXACT, "fisher": fisher})
        fn.cross_entropy(own(x), y).backward()
        kfac.step()
        assert kfac.skipped == {}
        name = "inner.ih_l0" if kind == "lstm" else "inner.self_attn.q_proj"
        rows = torch.cat([x.reshape(-1, 4), torch.ones(20, 1)], 1)
        averages = kfac.estimator.state[name].statistics.averages
        A = averages["input"].value(debias=True).full()
        torch.testing.assert_close(A, rows.T @ rows / 20)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


# Losses and models that are not what they seem.


@pytest.mark.parametrize("kind", ["uninitialized", "on the meta device"])
def test_parameters_that_are_not_made_yet_are_refused(kind):
    """Their blocks would be of parameters that the model no longer has."""
    if kind == "uninitialized":
        model = nn.Sequential(nn.LazyLinear(6), nn.Linear(6, 4))
    else:
        model = network().to("meta")
    with pytest.raises(kc.UnsupportedError, match=kind):
        KFAC(model)


# Dtypes in mid-run.


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(6), nn.BatchNorm1d(6), nn.GroupNorm(2, 6)]
)
def test_a_model_becomes_double_in_mid_run(norm, steps):
    """Norms are computed with unit scale too, in the new dtype."""
    torch.set_default_dtype(torch.float32)
    model = nn.Sequential(nn.Linear(5, 6), norm, nn.Tanh(), nn.Linear(6, 4)).float()
    x, y = batch()
    kfac = KFAC(model, **NEWEST)
    for _ in range(steps):
        fn.cross_entropy(model(x), y).backward()
        kfac.step()
    model.double().zero_grad()
    x = x.double()
    fn.cross_entropy(model(x), y).backward()
    kfac.step()

    h = torch.tanh(model[1](model[0](x)))
    z = model[3](h)
    rtol = 1e-5 if steps else 1e-10
    assert_factors(kfac, {"3": by_hand([(h, z)], z)}, rtol=rtol)


# Weights of rows that come later.


def weighted(z, y, weight):
    return (fn.cross_entropy(z, y, reduction="none") * weight).sum() / weight.sum()


@pytest.mark.parametrize("first", ["one class", "uniform"])
@pytest.mark.parametrize("rows", [12, 1 << 15])
def test_weights_are_found_after_a_batch_of_equal_ones(first, rows):
    """Class weights after a batch of one class; importance weights that start at one."""
    model, (x, y) = network(), batch(12)
    by_class = torch.tensor([1.0, 5.0, 2.0, 0.5])
    kfac = KFAC(model, **NEWEST)
    ones = torch.ones_like(y)
    weight = torch.ones(12) if first == "uniform" else by_class[ones]
    weighted(model(x), ones, weight).backward()
    kfac.step()
    model.zero_grad()
    weight = by_class[y]
    times = -(-rows // 12)
    expected = dense(model, x, weight)
    weighted(
        model(x.repeat(times, 1)), y.repeat(times), weight.repeat(times)
    ).backward()
    kfac.step()

    assert_factors(kfac, expected, rtol=1e-8)


# Backward passes that train nothing, or more than one mean.


def test_the_quadratic_model_has_the_weight_of_each_pass():
    """Its minimum along one direction, by the Fisher matrix of all rows by hand."""
    model, (x, y) = network(), batch()
    weight = torch.tensor([1 / 3] * 3 + [1 / 5] * 5) / 2
    twin = copy.deepcopy(model)
    optimizer = KFACOptimizer(model, damping=1e-3, fisher="exact")

    def closure():
        parts = zip(x.split((3, 5)), y.split((3, 5)), strict=True)
        return sum(fn.cross_entropy(model(a), b) / 2 for a, b in parts)

    optimizer.step(closure)
    before, after = (list(m.parameters()) for m in (twin, model))
    change = [q.detach() - p.detach() for p, q in zip(before, after, strict=True)]
    loss = (fn.cross_entropy(twin(x), y, reduction="none") * weight).sum()
    slope = sum(
        (g * d).sum()
        for g, d in zip(torch.autograd.grad(loss, before), change, strict=True)
    )
    names = [name for name, _ in twin.named_parameters()]
    _, along = torch.func.jvp(
        lambda *p: torch.func.functional_call(
            twin, dict(zip(names, p, strict=True)), x
        ),
        tuple(p.detach() for p in before),
        tuple(change),
    )
    B = torch.stack([root_of_hessian(z) for z in twin(x)])
    bend = (weight[:, None] * torch.einsum("npc,np->nc", B, along) ** 2).sum()
    bend = bend + 1e-3 * sum(d.square().sum() for d in change)
    assert optimizer.metrics()["accepted"]
    torch.testing.assert_close(-slope, bend)


def test_a_learning_rate_of_zero_moves_nothing_and_clips_nothing():
    """The first step of a warmup, and the last of a decay."""
    model, (x, y) = network(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    for lr in (optimizer, lambda step: 0.0):
        kfac = KFAC(model, lr=lr, update_every=1)
        model.zero_grad()
        fn.cross_entropy(model(x), y).backward()
        kfac.step()
        assert kfac.metrics()["clip"] == 1
        kfac.remove()
    with pytest.raises(kc.ConventionError, match="> 0"):
        KFAC(model, lr=lambda step: -0.1)


@pytest.mark.parametrize("penalty", [0.0, 1e-2])
def test_a_penalty_on_parametrized_weights_warns(penalty):
    """Its gradient does not come through W, and so is no part of the direction."""
    model, (x, y) = network(), batch()
    nn.utils.parametrizations.weight_norm(model[0])
    kfac = KFAC(model, damping=0.04, **EXACT)
    originals = [*model[0].parametrizations.weight.parameters()]
    squares = sum(p.square().sum() for p in originals)
    (fn.cross_entropy(model(x), y) + penalty * squares).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        kfac.step()

    assert ["did not come through" in str(w.message) for w in seen] == [True] * (
        penalty > 0
    )


@pytest.mark.parametrize("kind", ["head", "weights", "parts", "clipped"])
def test_gradients_that_are_added_to_the_last_direction_are_refused(kind):
    """Of layers that the optimizer does not have, and of a step for each part."""
    model, (x, y) = network(), batch()
    own = {"head": model[2].parameters(), "weights": [model[0].weight, model[2].weight]}
    optimizer = torch.optim.SGD(own.get(kind, model.parameters()), lr=0.1)
    kfac = KFAC(model, **EACH_STEP)
    names = {"head": r"'0.weight', '0.bias'", "weights": r"'0.bias', '2.bias'"}
    for turn in range(2):
        if kind in own:
            optimizer.zero_grad()
        fn.cross_entropy(model(x), y).backward()
        if turn:
            with pytest.raises(kc.NotReadyError, match=names.get(kind, "last part")):
                kfac.step()
        else:
            kfac.step()
        if kind == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert kfac.steps == 1

    for clears in (True, False, True):
        model.zero_grad(set_to_none=clears)
        fn.cross_entropy(model(x), y).backward()
        kfac.step()
        # Cleared before the next loss, as what a generator's adds to a discriminator.
        fn.cross_entropy(model(torch.randn(8, 5)), y).backward()
    assert kfac.steps == 4


# Gradients that are read, and not trained by.


def logged(loss, model, *, retain_graph=True):
    return torch.autograd.grad(loss, [*model.parameters()], retain_graph=retain_graph)


@pytest.mark.parametrize("kind", ["before", "after", "cleared"])
def test_a_computed_weight_has_the_gradient_of_the_passes_that_train(kind):
    """The direction of weight norm's V and g, beside another batch that trains nothing."""
    torch.manual_seed(1)
    model, (x, y) = network(), batch()
    nn.utils.parametrizations.weight_norm(model[0])
    twin = copy.deepcopy(model)
    kfac, other = KFAC(model, **EXACT), KFAC(twin, **EXACT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other_loss = fn.cross_entropy(model(x[:3] ** 2), y[:3])
        if kind == "before":
            logged(other_loss, model)
        elif kind == "cleared":
            other_loss.backward()
            model.zero_grad()
        fn.cross_entropy(model(x), y).backward()
        if kind == "after":
            logged(other_loss, model)
        kfac.step()
    fn.cross_entropy(twin(x), y).backward()
    other.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_hooks_can_tell_sampled_from_loss_gradients(fisher):
    """A hook that clamps the loss's gradients, and lets K-FAC's own vectors through."""
    model, (x, y) = network(), batch()
    bound, seen = 0.01, []
    expected = (
        dense(model, x, labels=y) if fisher == "empirical" else dense(model, x)
    )["0"]
    kfac = KFAC(model, **{**EXACT, "fisher": fisher})

    def clamp(g):
        if kfac.is_drawing:
            return None
        seen.append(g)
        return g.clamp(-bound, bound)

    handle = model[0].register_forward_hook(
        lambda module, inputs, made: made.register_hook(clamp) and None
    )
    fn.cross_entropy(model(x), y).backward()
    assert not kfac.is_drawing
    handle.remove()
    (clamped,) = (g.clamp(-bound, bound) for g in seen)
    torch.testing.assert_close(model[0].weight.grad, clamped.T @ x)
    kfac.step()
    if fisher == "empirical":
        rows = 8 * clamped
        expected = expected[0], rows.T @ rows / 8
    assert_factors(kfac, {"0": expected})


def test_squares_that_overflow_are_named_and_change_nothing():
    model, (x, y) = network(), batch()
    kfac = KFAC(model, fisher="empirical", **EACH_STEP)
    fn.cross_entropy(model(x), y).backward()
    kfac.step()
    before = kfac.factors("2")
    model.zero_grad()
    fn.cross_entropy(model(x * 1e200), y).backward()
    with pytest.raises(kc.NotFiniteError, match=r"'0'.*overflow"):
        kfac.step()
    for now, then in zip(kfac.factors("2"), before, strict=True):
        assert torch.equal(torch.as_tensor(now), torch.as_tensor(then))


# Parameters that the model no longer has, or did not train.


REPLACED = {
    "assigned": lambda model: model[0].load_state_dict(
        {name: x.clone() for name, x in model[0].state_dict().items()}, assign=True
    ),
    "module": lambda model: model.__setitem__(0, nn.Linear(5, 6)),
}


@pytest.mark.parametrize("how", REPLACED)
def test_gradients_of_replaced_parameters_are_not_in_the_clip(how):
    """The old ones still have theirs, which no optimizer clears any more."""
    model, (x, y) = network(), batch()
    kfac = KFAC(model, lr=0.1, kl_clip=1e9, update_every=1, refresh_every=25)
    fn.cross_entropy(model(x), y).backward()
    kfac.step()
    old = [p.grad.clone() for p in model[0].parameters()]
    kept = [*model[0].parameters()]
    REPLACED[how](model)
    model.zero_grad()
    fn.cross_entropy(model(x), y).backward()
    before = [p.grad.clone() for p in model.parameters()]
    with pytest.warns(UserWarning, match=r"0\.weight.*replaced.*create KFAC"):
        kfac.step()

    after = [p.grad for p in model.parameters()]
    own = sum((v * d).sum() for v, d in zip(before[2:], after[2:], strict=True))
    torch.testing.assert_close(float(kfac.clip.size), 0.01 * float(own))
    assert all(torch.equal(p.grad, g) for p, g in zip(kept, old, strict=True))
    assert all(torch.equal(v, d) for v, d in zip(before[:2], after[:2], strict=True))


def test_a_layer_pruned_later_warns_and_keeps_its_gradient():
    """Its parameter stays the same, and is no longer what the layer multiplies by."""
    from torch.nn.utils import prune

    model, (x, y) = network(), batch()
    kfac = KFAC(model, kl_clip=None)
    for _ in range(2):
        model.zero_grad()
        fn.cross_entropy(model(x), y).backward()
        gradient = model[0]._parameters.get("weight_orig", model[0].weight).grad.clone()
        if kfac.steps:
            with pytest.warns(
                UserWarning, match=r"0\.bias.*weight_orig.*after pruning"
            ):
                kfac.step()
        else:
            kfac.step()
            prune.l1_unstructured(model[0], "weight", 0.5)
    assert torch.equal(model[0].weight_orig.grad, gradient)


def test_a_weight_that_has_another_size_is_named():
    """As after an output for a further class was added in place."""
    model, (x, y) = network(), batch()
    kfac = KFAC(model, **EACH_STEP)
    model[2].weight.data, model[2].bias.data = torch.randn(6, 6), torch.randn(6)
    fn.cross_entropy(model(x), y).backward()
    with pytest.raises(
        kc.UnsupportedError,
        match=r"weight of layer '2' had 24.*now has 36.*Create KFAC",
    ):
        kfac.step()
    assert kfac.steps == 0


def test_parameters_without_a_block_are_named_with_reason_and_remedy():
    """Of attention, of a layer that is trained later, and of one whose weight is frozen."""

    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(
                5, 1, add_bias_kv=True, batch_first=True
            )
            self.later, self.partly, self.head = (nn.Linear(5, 5) for _ in range(3))

        def forward(self, x):
            h, _ = self.attention(x[:, None], x[:, None], x[:, None])
            return self.head(self.partly(self.later(h[:, 0])))

    model, (x, y) = Attending(), batch()
    model.later.requires_grad_(False)
    model.partly.weight.requires_grad_(False)
    with pytest.warns(UserWarning, match=r"bias_k.*bias_v.*partly\.bias"):
        kfac = KFAC(model, **EACH_STEP)
    fn.cross_entropy(model(x), y).backward()
    kfac.step()
    model.zero_grad()
    model.later.requires_grad_(True)
    fn.cross_entropy(model(x), y).backward()
    with pytest.warns(UserWarning, match=r"later\.weight.*later\.bias.*frozen when"):
        kfac.step()
    expected = {
        "attention.bias_k": "add_bias_kv=False",
        "attention.bias_v": "add_bias_kv=False",
        "partly.bias": "the weight that it belongs to was frozen.*create KFAC again",
        "later.weight": "frozen when KFAC was created; create KFAC again",
        "later.bias": "frozen when KFAC was created; create KFAC again",
    }
    assert set(kfac.skipped) == set(expected)
    for name, why in expected.items():
        assert re.search(why, kfac.skipped[name])


def test_complex_layers_are_skipped():
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.wave = nn.Linear(5, 6, dtype=torch.complex128)
            self.head = nn.Linear(6, 4)

        def forward(self, x):
            return self.head(self.wave(x.to(torch.complex128)).abs())

    model, (x, y) = Complex(), batch()
    with pytest.warns(UserWarning, match=r"wave\.weight.*numbers are complex"):
        kfac = KFAC(model, **EXACT)
    fn.cross_entropy(model(x), y).backward()
    before = model.wave.weight.grad.clone()
    kfac.step()
    assert torch.equal(model.wave.weight.grad, before)
    h = model.wave(x.to(torch.complex128)).abs().detach()
    z = model.head(h)
    assert_factors(kfac, {"head": by_hand([(h, z)], z)})


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("module", [nn.MSELoss, nn.BCEWithLogitsLoss])
@pytest.mark.parametrize("by_hand", [False, True])
def test_outputs_of_one_number_each_are_rows(by_hand, module, fisher):
    """Of shape (N,), as of ``model(x).squeeze(-1)``."""
    model, (x, y) = nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)), batch()
    y = (y > 1).double()
    kfac = KFAC(model, likelihood=module(), **{**EXACT, "fisher": fisher})
    z = model(x)
    if by_hand:
        kfac.observe(z)
    module()(z, y).backward()
    kfac.step()
    rows, z = torch.cat([x, torch.ones(8, 1)], 1), z.detach()
    p = torch.sigmoid(z)
    G = {
        (nn.MSELoss, "exact"): torch.tensor(1.0),
        (nn.MSELoss, "empirical"): (z - y).square().mean(),
        (nn.BCEWithLogitsLoss, "exact"): (p * (1 - p)).mean(),
        (nn.BCEWithLogitsLoss, "empirical"): (p - y).square().mean(),
    }[module, fisher]
    assert_factors(kfac, {"0": (rows.T @ rows / 8, G.reshape(1, 1))})


def test_a_model_that_returns_its_loss_raises():
    class Scored(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, x, y):
            return fn.cross_entropy(self.net(x), y)

    model, (x, y) = Scored(), batch()
    kfac = KFAC(model, **EXACT)
    with pytest.raises(kc.ShapeError, match=r"returns its loss.*output=1"):
        model(x, y).backward()
    assert kfac.steps == 0


# Rows that depend on each other, and heads of unlike sizes.


@pytest.mark.parametrize("positions", ["signs", "separate"])
def test_examples_that_a_batch_norm_mixes_are_right_in_expectation(positions):
    """One source is of all rows, whose products have signs: without, they add up."""
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)
    )
    x = torch.randn(3, 3)
    kfac = KFAC(
        model, likelihood="categorical", fisher="exact", decay=1.0, positions=positions
    )
    made = model[0](x)
    _, expected = by_hand([(x, made)], model[1:](made))
    kfac.update(model(x) for _ in range(300))
    _, G, scale = kfac.factors("0")
    assert float((scale * G - expected).norm()) < 0.1 * float(expected.norm())


def test_sequences_with_time_first_are_right_in_expectation():
    """Outputs (T, N, P): what is taken for examples are steps, which the layer mixes."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    model.forward = lambda x: model[2](model[1](model[0](x).cumsum(0)))
    x = torch.randn(3, 2, 3)
    kfac = KFAC(
        model, likelihood="categorical", positions="separate", **{**EXACT, "decay": 1.0}
    )
    made = model[0](x)
    z = model[2](model[1](made.cumsum(0)))
    _, expected = by_hand([(x, made)], z.reshape(-1, 3))
    kfac.update(model(x) for _ in range(300))
    _, G, scale = kfac.factors("0")
    assert float((scale * G - expected).norm()) < 0.1 * float(expected.norm())


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_heads_of_different_sizes_with_separate_batches(fisher):
    """The exact sources of the layer below are as many as each head has outputs."""

    class Headed(nn.Module):
        def __init__(self):
            super().__init__()
            self.below = nn.Linear(5, 6)
            self.heads = nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 3)])

        def forward(self, x, place):
            return self.heads[place](torch.tanh(self.below(x)))

    model, (x, y) = Headed(), batch()
    kfac = KFAC(model, **{**EXACT, "fisher": fisher})
    calls, G, rows = [], 0.0, (slice(0, 6), slice(6, 8))
    for place, own in enumerate(rows):
        made = model.below(x[own])
        z = model.heads[place](torch.tanh(made))
        calls.append(x[own])
        if fisher == "exact":
            _, part = by_hand([(x[own], made)], z)
            G = G + part * len(z)
        else:
            loss = fn.cross_entropy(z, y[own] % 3, reduction="sum")
            (g,) = torch.autograd.grad(loss, made)
            G = G + g.T @ g
    for place, own in enumerate(rows):
        loss = fn.cross_entropy(model(x[own], place), y[own] % 3, reduction="sum")
        (loss / 8).backward()
    kfac.step()
    assert kfac.outputs == 4
    joined = torch.cat([torch.cat(calls), torch.ones(8, 1)], 1)
    assert_factors(kfac, {"below": (joined.T @ joined / 8, G / 8)})


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("kind", ["cached", "rollout"])
def test_calls_that_several_passes_depend_on(kind, together):
    """Features that are computed once for two passes, and outputs that are inputs again."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.below, self.head = nn.Linear(5, 6), nn.Linear(6, 5)
            self.kept = None

        def forward(self, x):
            if self.kept is None or kind == "rollout":
                self.made = self.below(x)
                self.kept = torch.tanh(self.made)
            self.out = self.head(self.kept)
            return self.out

    model, (x, _) = Model(), batch()
    y = torch.randint(0, 5, (2, 8))

    def passes():
        model.kept, found = None, []
        for _ in range(2):
            z = model(found[-1][1] if found else x)
            found.append((model.made, z))
        return found

    # Rows of all passes, with the calls that each depends on.
    made = passes()
    xs = [x, x if kind == "cached" else made[0][1].detach()]
    G = 0.0
    for _, z in made:
        for row in z:
            for column in root_of_hessian(row).T:
                unique = {id(y): y for y, _ in made}.values()
                for g in torch.autograd.grad(
                    row, [*unique], column, retain_graph=True, allow_unused=True
                ):
                    G = G + (0.0 if g is None else g.T @ g)
    # As often as passes depend on them.
    xs = torch.cat([*xs, x] if kind == "rollout" else xs)
    xs = torch.cat([xs, torch.ones(len(xs), 1)], 1)
    expected = {"below": (xs.T @ xs / len(xs), G / 16)}

    kfac = KFAC(model, likelihood="categorical", **EXACT)
    losses = [fn.cross_entropy(z, y[i]) / 2 for i, (_, z) in enumerate(passes())]
    if together:
        sum(losses).backward()
    else:
        losses[0].backward(retain_graph=True)
        losses[1].backward()
    kfac.step()
    assert_factors(kfac, expected)

    kfac = KFAC(model, likelihood="categorical", **{**EXACT, "fisher": "empirical"})
    with pytest.raises(kc.UnsupportedError, match=r"several forward passes.*'below'"):
        sum(fn.cross_entropy(z, y[0]) for _, z in passes()).backward()


def test_overlap_is_for_the_pass_that_makes_the_gradients():
    """Not one that a logger made before, nor one that was cleared; two are refused."""
    model, (x, y) = network(), batch()
    kfac = KFAC(model, overlap=True, **NEWEST)
    for kind in ("logged", "again", "cleared"):
        model.zero_grad()
        expected = dense(model, x)
        loss = fn.cross_entropy(model(x), y)
        if kind == "cleared":
            fn.cross_entropy(model(3 * x), y).backward()
            model.zero_grad()
        else:
            other = loss if kind == "again" else fn.cross_entropy(model(3 * x), y)
            logged(other, model)
        loss.backward()
        kfac.step()
        assert_factors(kfac, expected, rtol=1e-7)
    fn.cross_entropy(model(x), y).backward()
    with pytest.raises(kc.ConventionError, match="a step has one pass"):
        fn.cross_entropy(model(x), y).backward()


@pytest.mark.parametrize("kind", ["module", "smoothed", "nll", "name"])
def test_classes_on_the_second_axis_raise(kind):
    """As PyTorch's loss modules read them, also where both axes have one length."""
    model = nn.Conv2d(2, 4, 1)
    x, y = torch.randn(3, 2, 4, 4), torch.randint(0, 4, (3, 4, 4))
    module = nn.CrossEntropyLoss(label_smoothing=0.1 * (kind == "smoothed"))
    if kind == "nll":
        model, module = nn.Sequential(model, nn.LogSoftmax(1)), nn.NLLLoss()
    said = "categorical" if kind == "name" else module
    kfac = KFAC(model, likelihood=said, **EXACT)
    with pytest.raises(kc.ConventionError, match=r"movedim\(1, -1\)"):
        module(model(x), y).backward()
    kfac.remove()
    kfac = KFAC(model, likelihood=said, output=lambda z: z.movedim(1, -1), **EXACT)
    module(model(x), y).backward()
    kfac.step()
    G = 0.0
    for row in model(x).movedim(1, -1).reshape(-1, 4):
        B = root_of_hessian(row)
        G = G + B @ B.T / 48
    _, found, scale = kfac.factors("0" if kind == "nll" else "")
    torch.testing.assert_close(scale * found, G)

    # Tokens, whose classes are on the last axis, are flattened ahead of the loss.
    model, module = nn.Linear(2, 4), nn.CrossEntropyLoss()
    kfac = KFAC(model, likelihood=module, **EXACT)
    module(model(x.movedim(1, -1)).flatten(0, 2), y.flatten()).backward()
    kfac.step()


def test_a_layer_that_takes_part_later_has_its_operator_at_once():
    """As with stochastic depth: its gradient is not left as it is until a refresh."""

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.head = (nn.Linear(5, 5) for _ in range(3))
            self.drops = True

        def forward(self, x):
            h = torch.tanh(self.first(x))
            if not self.drops:
                self.made = self.second(h)
                h = h + self.made
            return self.head(h)

    model, (x, y) = Deep(), batch()
    options = {**EXACT, "refresh_every": 25, "damping": 0.03}
    kfac = KFAC(model, likelihood="categorical", **options)
    for drops in (True, False):
        model.zero_grad()
        model.drops = drops
        z = model(x)
        fn.cross_entropy(z, y).backward(retain_graph=True)
        gradient = model.second.weight.grad, model.second.bias.grad
        if not drops:
            h = torch.tanh(model.first(x)).detach()
            A, G = by_hand([(h, model.made)], z)
            V = torch.cat([gradient[0], gradient[1][:, None]], 1)
        kfac.step()
    root = 0.03**0.5
    A, G = A + root * torch.eye(6), G + root * torch.eye(5)
    expected = torch.linalg.solve(G, torch.linalg.solve(A, V.T).T)
    found = torch.cat([model.second.weight.grad, model.second.bias.grad[:, None]], 1)
    torch.testing.assert_close(found, expected)


class Lengths(nn.Module):
    """A layer that is called with rows of examples, and with their positions."""

    def __init__(self):
        super().__init__()
        self.below, self.head = nn.Linear(5, 6), nn.Linear(6, 4)

    def forward(self, *inputs):
        self.made = [self.below(x) for x in inputs]
        means = [torch.tanh(y).reshape(len(y), -1, 6).mean(1) for y in self.made]
        self.mixed = sum(means)
        return self.head(self.mixed)


@pytest.mark.parametrize("approximation", [kc.Kronecker(), kc.EKFAC()])
@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("when", ["one pass", "accumulated"])
def test_sequences_of_several_lengths_are_one_batch(when, fisher, approximation):
    """In accumulated batches that are padded to their own lengths, and in one pass."""
    model, y = Lengths(), torch.randint(0, 4, (8,))
    shapes = [(8, 3, 5), (8, 5), (8, 2, 5)]
    if when == "accumulated":
        shapes = [(3, 3, 5), (1, 5), (4, 2, 5)]
    inputs = [torch.randn(shape) for shape in shapes]
    passes = [inputs] if when == "one pass" else [[x] for x in inputs]
    labels = y.split([len(x[0]) for x in passes])
    kfac = KFAC(
        model, approximations={"dense": approximation}, **{**EXACT, "fisher": fisher}
    )
    rows, mixed, below, head = [], [], 0.0, 0.0
    for xs, own in zip(passes, labels, strict=True):
        z = model(*xs)
        rows += [x.reshape(-1, 5) for x in xs]
        mixed.append(model.mixed.detach())
        ys = [*model.made, z]
        for n, row in enumerate(z):
            columns = root_of_hessian(row).T
            if fisher == "empirical":
                columns = [(torch.softmax(row, 0) - fn.one_hot(own[n], 4)).detach()]
            for column in columns:
                *found, g = torch.autograd.grad(row, ys, column, retain_graph=True)
                found = torch.cat([f.reshape(-1, 6) for f in found])
                below = below + found.T @ found / 8
                head = head + g.T @ g / 8
    for xs, own in zip(passes, labels, strict=True):
        (fn.cross_entropy(model(*xs), own) * len(own) / 8).backward()
    kfac.step()
    x, h = torch.cat(rows), torch.cat(mixed)
    x, h = (torch.cat([r, torch.ones(len(r), 1)], 1) for r in (x, h))
    expected = {"below": (x.T @ x / len(x), below), "head": (h.T @ h / len(h), head)}
    if isinstance(approximation, kc.Kronecker):
        assert_factors(kfac, expected)
        return
    operator = kfac.estimator.operator("below")
    values = kfac.estimator.state["below"].statistics.averages
    assert operator.vector_shape == (6, 6)
    A = values["input"].value(debias=True).full()
    torch.testing.assert_close(A, expected["below"][0].detach())


def test_images_of_several_sizes_are_one_batch():
    """The filter's factors have the patches of all."""
    model = nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4)
    )
    images = [torch.randn(3, 2, 3, 3), torch.randn(5, 2, 4, 5)]
    y = torch.randint(0, 4, (8,))
    kfac = KFAC(model, **EXACT)
    patches, G = [], 0.0
    for x in images:
        made = model[0](x)
        patches.append(fn.unfold(x, 2).movedim(1, -1).reshape(-1, 8))
        for row in model[1:](made):
            for column in root_of_hessian(row).T:
                (g,) = torch.autograd.grad(row, made, column, retain_graph=True)
                g = g.movedim(1, -1).reshape(-1, 3)
                G = G + g.T @ g / 8
    for x, own in zip(images, y.split([3, 5]), strict=True):
        (fn.cross_entropy(model(x), own) * len(own) / 8).backward()
    kfac.step()
    x = torch.cat(patches)
    x = torch.cat([x, torch.ones(len(x), 1)], 1)
    assert_factors(kfac, {"0": (x.T @ x / len(x), G)})


def test_a_block_that_one_pass_uses_in_another_way_has_no_statistics_of_the_other():
    """Second-order meta-learning: an inner pass, and one with weights made of its own."""
    model, (x, y) = network(), batch()
    model.append(nn.Linear(4, 4))
    kfac = KFAC(model, likelihood="categorical", **EXACT)
    called = torch.func.functional_call
    below = dict(model[:3].named_parameters())
    own = {f"3.{name}": p for name, p in model[3].named_parameters()}

    def adapted():
        loss = fn.cross_entropy(called(model[:3], below, (x,)), y)
        grads = torch.autograd.grad(loss, [*below.values()], create_graph=True)
        pairs = zip(below.items(), grads, strict=True)
        moved = {name: p - 0.1 * g for (name, p), g in pairs}
        return called(model, {**moved, **own}, (x,))

    losses = [fn.cross_entropy(z, y) / 2 for z in (model(x), adapted())]
    sum(losses).backward()
    with pytest.warns(UserWarning, match=r"0\.weight.*2\.weight.*SubBackward0"):
        kfac.step()

    assert kfac.estimator.state["0"].statistics is None
    p = torch.softmax(torch.cat([model(x), adapted()]).detach(), 1)
    G = (torch.diag(p.sum(0)) - p.T @ p) / len(p)
    _, found, scale = kfac.factors("3")
    torch.testing.assert_close(scale * found, G)
