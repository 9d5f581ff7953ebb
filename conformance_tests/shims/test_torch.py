"""The PyTorch integration in a training loop: sampled labels, resuming, autocast, NaN.

What a step computes is compared with dense matrices in `test_torch_zoo.py`.
"""

from __future__ import annotations

import copy
import gc
import math
import weakref

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as fn  # noqa: E402

import kfac_core as kc  # noqa: E402
from kfac_core.losses import Categorical, SquaredError  # noqa: E402
from kfac_core_shims.torch import KFAC  # noqa: E402

DAMPING = 0.1
OPTIONS = {
    "damping": DAMPING,
    "decay": 0.9,
    "damping_rule": "exact",
    "kl_clip": None,
    "update_every": 1,
    "refresh_every": 1,
}


@pytest.fixture(autouse=True)
def seeded():
    """Models and data are the same in every run."""
    torch.manual_seed(0)


def doubles(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def attached(model, *, likelihood=None, fisher="exact", loss="mean", **options):
    likelihood = likelihood or SquaredError(scale=0.5)
    options = {**OPTIONS, **options}
    return KFAC(model, likelihood=likelihood, fisher=fisher, reduction=loss, **options)


def step(model, kfac, inputs, targets, loss_of):
    """One forward, observed, and one backward pass, and the step of the shim."""
    model.zero_grad()
    outputs = model(inputs)
    kfac.observe(outputs)
    loss_of(outputs, targets).backward()
    before = {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }
    kfac.step()
    after = {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }
    return before, after


def half_squares(outputs, targets):
    """Half the sum of squares, over the mean of the rows."""
    return 0.5 * ((outputs - targets) ** 2).sum(-1).mean()


def close(actual, expected, rtol=1e-8):
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-10)


def kfac_by_hand(A, G, gradient):
    """``(A (x) G + damping I)^-1`` of a weight with its bias as last column, densely."""
    V = gradient.T.reshape(-1)
    dense = torch.kron(A, G) + DAMPING * torch.eye(len(V), dtype=V.dtype)
    return torch.linalg.solve(dense, V).reshape(gradient.T.shape).T


def joined(grads, name):
    return torch.cat([grads[f"{name}.weight"], grads[f"{name}.bias"][:, None]], 1)


class Network(nn.Module):
    """Two layers whose derivatives are simple: tanh between."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


def test_sampled_labels_are_right_in_expectation():
    """The mean of the sampled G over many draws is the exact G, within five errors."""
    model = Network().double()
    x = doubles(256, 4)

    def block(fisher, repeats):
        own = copy.deepcopy(model)
        options = {"fisher": fisher, "decay": 1.0, "refresh_every": repeats}
        kfac = attached(own, likelihood=Categorical(), **options)
        for _ in range(repeats):
            own.zero_grad()
            own(x).sum().backward()
            kfac.step()
        kfac.estimator.refresh()
        return kfac.estimator.operator("two").to_dense(damped=False)

    exact, sampled = block("exact", 1), block("gradients", 50)

    # 12,800 draws: the relative error of a mean of squares is about 0.01.
    error = torch.linalg.norm(sampled - exact) / torch.linalg.norm(exact)
    assert 0 < error < 0.05


# What is done in a training loop.


def test_a_resumed_run_is_the_same_to_the_bit(tmp_path):
    """Through torch.save with weights only: sampled labels and schedules go on."""
    x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))

    def steps(run, count):
        model, optimizer, scheduler, kfac = run
        for _ in range(count):
            step(model, kfac, x, y, fn.cross_entropy)
            optimizer.step()
            scheduler.step()

    def fresh():
        model = Network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        options = {"fisher": "gradients", "update_every": 2, "refresh_every": 3}
        options |= {"kl_clip": 1e-6, "lr": optimizer}
        kfac = attached(model, likelihood=Categorical(), **options)
        return model, optimizer, scheduler, kfac

    run = fresh()
    steps(run, 4)
    torch.save([part.state_dict() for part in run], tmp_path / "run.pt")
    age = run[-1].metrics()["operator_age"]
    steps(run, 5)
    again = fresh()
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    for part, state in zip(again, saved, strict=True):
        part.load_state_dict(state)
    assert again[-1].metrics()["operator_age"] == age == 1
    steps(again, 5)

    for p, q in zip(run[0].parameters(), again[0].parameters(), strict=True):
        assert torch.equal(p, q)
    resumed = again[-1]
    with pytest.raises(kc.StateError):
        resumed.load_state_dict({"steps": 3, "estimator": {}})
    with pytest.raises(kc.StateError):
        resumed.load_state_dict({})
    with pytest.raises(kc.StateError, match="`steps` >= 0 in the state, got -1"):
        resumed.load_state_dict({**resumed.state_dict(), "steps": -1})
    assert resumed.steps == 9


def test_autocast_gives_nearly_the_same_direction():
    """Rows in bfloat16, statistics and products in float32."""
    model = Network()
    x, y = torch.randn(64, 4), torch.randint(0, 3, (64,))

    def direction(enabled):
        own = copy.deepcopy(model)
        kfac = attached(own, likelihood=Categorical(), fisher="exact")
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            outputs = own(x)
            kfac.observe(outputs)
            loss = fn.cross_entropy(outputs, y)
            assert outputs.dtype == (torch.bfloat16 if enabled else torch.float32)
            loss.backward()
            kfac.step()
        factor = kfac.estimator.operator("two").to_dense(damped=False)
        assert factor.dtype == torch.float32
        return own.two.weight.grad, factor

    (low, low_factor), (full, full_factor) = direction(True), direction(False)

    torch.testing.assert_close(low_factor, full_factor, rtol=0.05, atol=0.005)
    assert torch.linalg.norm(low - full) < 0.05 * torch.linalg.norm(full)


# What is left alone.


def test_nan_raises_and_changes_nothing():
    """Neither in rows nor in gradients; the next good batch goes on as if it was not."""
    model = Network().double()
    kfac, x, y = attached(model), doubles(6, 4), doubles(6, 3)
    step(model, kfac, x, y, half_squares)
    before = copy.deepcopy(kfac.state_dict())
    bad = x.clone()
    bad[2, 1] = math.nan

    with pytest.raises(kc.NotFiniteError):
        step(model, kfac, bad, y, half_squares)
    model.zero_grad()
    outputs = model(bad)
    kfac.observe(outputs)
    (outputs.nan_to_num() * 0).sum().backward()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(kc.NotFiniteError):
        kfac.step()

    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    after = kfac.state_dict()
    assert after["steps"] == before["steps"] == 1
    assert same(after, before)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_not_taken_for_a_scaled_one(bad):
    """With all defaults, at a step with statistics and at one without."""
    model = torch.nn.Linear(4, 3)
    kfac, x = KFAC(model, lr=0.1), torch.randn(6, 4)
    labels = torch.arange(6) % 3
    for factor in (bad, 1.0, bad):
        model.zero_grad()
        (factor * fn.cross_entropy(model(x), labels)).backward()
        if factor == 1.0:
            kfac.step()
            continue
        with pytest.raises(kc.NotFiniteError):
            kfac.step()


def same(one, other):
    """Whether two states are equal, to the bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[n], other[n]) for n in one)
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return one == other


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_no_graph_is_held_after_a_step(fisher):
    """What a graph saved is freed with it, without the garbage collector."""
    model = Network()
    kfac = attached(model, fisher=fisher)

    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.kept = Token()
            tokens.append(weakref.ref(ctx.kept))
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g

    class Token:
        pass

    tokens = []
    gc.disable()
    try:
        outputs = Kept.apply(model(torch.randn(5, 4)))
        kfac.observe(outputs)
        half_squares(outputs, torch.randn(5, 3)).backward()
        kfac.step()
        del outputs
        assert [token() for token in tokens] == [None]
    finally:
        gc.enable()
