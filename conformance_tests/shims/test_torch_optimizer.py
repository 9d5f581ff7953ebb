"""`KFACOptimizer`, against the quadratic model made densely."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as fn  # noqa: E402

import kfac_core as kc  # noqa: E402
from kfac_core_shims.torch import KFACOptimizer  # noqa: E402

from .test_torch import Network, close, doubles, flat, jacobian, seeded  # noqa: E402

__all__ = ["seeded"]  # used by itself, in every test


def closure_of(model, optimizer, x, y, loss_of):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        return loss

    return closure


def test_least_squares_are_solved_in_one_step():
    """One linear layer: K-FAC is exact, and the best rate of the exact model is one."""
    model = nn.Linear(4, 3).double()
    x, y = doubles(20, 4), doubles(20, 3)
    ones = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    best = torch.linalg.lstsq(ones, y).solution.T
    optimizer = KFACOptimizer(
        model,
        likelihood=nn.MSELoss(),
        fisher="exact",
        damping=1e-12,
        kl_clip=None,
        minimum_damping=0.0,
        damping_rule="exact",
    )
    optimizer.step(closure_of(model, optimizer, x, y, nn.MSELoss()))

    found = torch.cat([model.weight, model.bias[:, None]], 1).detach()
    close(found, best, rtol=1e-6)
    assert optimizer.metrics()["coefficient_0"] == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_steps_minimize_the_exact_quadratic_model(reduction):
    """Rate and momentum of three steps; with weight decay, and a scale without a block."""

    class Scaled(Network):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return super().forward(x) * self.scale

    lam, eta = 0.3, 0.05
    model = Scaled().double()
    x, y = doubles(12, 4), torch.randint(0, 3, (12,))
    names = [n for n, _ in model.named_parameters()]
    with pytest.warns(UserWarning, match="scale"):
        optimizer = KFACOptimizer(
            model,
            likelihood="categorical",
            reduction=reduction,
            fisher="exact",
            damping=lam,
            kl_clip=None,
            weight_decay=eta,
            adapt_every=100,
            refresh_every=2,
        )
    R = 12 if reduction == "sum" else 1
    last = None
    for _ in range(3):
        J = jacobian(copy.deepcopy(model), x, names)
        with torch.no_grad():
            p = torch.softmax(model(x), -1)
            H = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        F = torch.einsum("nop,nol,nlq->pq", J, H, J) / 12
        F = R * F + (R * lam + eta) * torch.eye(len(F), dtype=F.dtype)
        start = {n: q.detach().clone() for n, q in model.named_parameters()}
        closure = closure_of(
            model,
            optimizer,
            x,
            y,
            lambda z, y: fn.cross_entropy(z, y, reduction=reduction),
        )
        optimizer.step(closure)
        g = flat({n: q.grad for n, q in model.named_parameters()}, names)
        g = g + eta * flat(start, names)
        step = flat({n: q.detach() for n, q in model.named_parameters()}, names)
        step = step - flat(start, names)
        # The step is the minimum along what it is made of: the model's slope is zero there.
        slope = g + F @ step
        inside = torch.tensor([n != "scale" for n in names])
        sizes = [start[n].numel() for n in names]
        covered = torch.repeat_interleave(inside, torch.tensor(sizes))
        D = [torch.where(covered, torch.zeros_like(g), -g)]
        if last is not None:
            D.append(last)
        natural = step if last is None else None
        for d in D:
            assert abs(float(slope @ d)) < 1e-9 * float(slope.norm() * d.norm() + 1)
        assert abs(float(slope @ step)) < 1e-9 * float(g.norm() * step.norm())
        assert natural is None or float(natural[covered].norm()) > 0
        assert float(g @ step) < 0
        last = step


def test_the_damping_follows_the_reduction_ratio():
    """``rho`` of both losses and the model without damping, and the rule of the paper."""
    model = Network().double()
    x, y = doubles(12, 4), torch.randint(0, 3, (12,))
    optimizer = KFACOptimizer(
        model, fisher="exact", damping=5.0, kl_clip=None, adapt_every=1, adapt_decay=0.5
    )
    names = [n for n, _ in model.named_parameters()]
    J = jacobian(copy.deepcopy(model), x, names)
    with torch.no_grad():
        p = torch.softmax(model(x), -1)
        H = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        before = fn.cross_entropy(model(x), y)
    start = flat({n: q.detach().clone() for n, q in model.named_parameters()}, names)
    model.zero_grad()
    fn.cross_entropy(model(x), y).backward()
    g = flat({n: q.grad.clone() for n, q in model.named_parameters()}, names)
    optimizer.kfac.discard()
    optimizer.step(closure_of(model, optimizer, x, y, fn.cross_entropy))
    delta = flat({n: q.detach() for n, q in model.named_parameters()}, names) - start
    F = torch.einsum("nop,nol,nlq->pq", J, H, J) / 12
    predicted = g @ delta + 0.5 * delta @ F @ delta
    with torch.no_grad():
        rho = float((fn.cross_entropy(model(x), y) - before) / predicted)

    metrics = optimizer.metrics()
    assert metrics["reduction_ratio"] == pytest.approx(rho, rel=1e-9)
    assert metrics["damping"] == (2.5 if rho > 0.75 else 10.0 if rho < 0.25 else 5.0)
    assert rho > 0.75
    assert optimizer.kfac.damping == metrics["damping"]


def test_a_resumed_optimizer_goes_on_as_it_was():
    """Momentum, damping, statistics and drawn labels, through ``state_dict``."""
    x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))

    def made():
        torch.manual_seed(1)
        model = Network()
        return model, KFACOptimizer(model, adapt_every=2)

    model, optimizer = made()
    for _ in range(3):
        optimizer.step(closure_of(model, optimizer, x, y, fn.cross_entropy))
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    other, resumed = made()
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for _ in range(3):
        for m, o in ((model, optimizer), (other, resumed)):
            o.step(closure_of(m, o, x, y, fn.cross_entropy))

    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_dropout_is_the_same_in_the_model_of_a_step():
    """The outputs' changes are of the pass whose loss was differentiated."""
    model = nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.5), nn.Linear(50, 3)).double()
    x, y = doubles(6, 4), torch.randint(0, 3, (6,))
    optimizer = KFACOptimizer(model, fisher="exact", adapt_every=100)
    seen = []
    changes = optimizer._changes
    optimizer._changes = lambda *given: seen.append(changes(*given)) or seen[-1]
    outputs = []
    model.register_forward_hook(lambda m, a, z: outputs.append(z.detach()))
    before = torch.random.get_rng_state()
    optimizer.step(closure_of(model, optimizer, x, y, fn.cross_entropy))
    after = torch.random.get_rng_state()
    torch.random.set_rng_state(before)
    model(x)

    close(seen[0][0], outputs[0])
    assert torch.equal(torch.random.get_rng_state(), after)


def test_what_it_takes_and_what_not():
    """Attention and convolutions have forward derivatives; named errors for the rest."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.Conv1d(2, 4, 1), nn.Flatten(2), nn.Unflatten(2, (4, 1)))
    model = nn.Sequential(model, nn.Flatten(2), layer, nn.Linear(4, 3))
    x, y = torch.randn(5, 2, 4), torch.randint(0, 3, (5, 4))
    optimizer = KFACOptimizer(model)
    losses = [
        float(
            optimizer.step(
                closure_of(
                    model,
                    optimizer,
                    x,
                    y,
                    lambda z, y: fn.cross_entropy(z.flatten(0, 1), y.flatten()),
                )
            ).detach()
        )
        for _ in range(12)
    ]
    assert losses[-1] < losses[0]
    fn.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    assert optimizer.step() is None
    for options, name in (
        ({"lr": 0.1}, "lr"),
        ({"kl_clip": -1e-3}, "kl_clip"),
        ({"fisher": "empirical"}, "empirical"),
        ({"output": None}, "output"),
        ({"damping": -1.0}, "damping"),
        ({"adapt_every": 0}, "adapt_every"),
        ({"adapt_decay": 2.0}, "decay"),
        ({"weight_decay": -1.0}, "weight_decay"),
    ):
        with pytest.raises(kc.KFACError, match=name):
            KFACOptimizer(model, **options)
    with pytest.raises(kc.UnsupportedError, match="one group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(kc.UnsupportedError):
        copy.deepcopy(optimizer)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(kc.NotFiniteError, match="loss"):
        optimizer.step(
            closure_of(model, optimizer, x, y, lambda z, y: z.sum() * float("nan"))
        )
    after = model.state_dict()
    assert all(torch.equal(before[n], after[n]) for n in before)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_step_is_longer_than_the_bound(reduction):
    """``delta . F delta`` of the mean loss, F made densely."""
    model = Network().double()
    x, y = doubles(12, 4), torch.randint(0, 3, (12,))
    names = [n for n, _ in model.named_parameters()]
    J = jacobian(copy.deepcopy(model), x, names)
    with torch.no_grad():
        p = torch.softmax(model(x), -1)
        H = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    F = torch.einsum("nop,nol,nlq->pq", J, H, J) / 12
    start = flat({n: q.detach().clone() for n, q in model.named_parameters()}, names)
    optimizer = KFACOptimizer(
        model, fisher="exact", kl_clip=1e-4, damping=1e-3, reduction=reduction
    )
    optimizer.step(
        closure_of(
            model,
            optimizer,
            x,
            y,
            lambda z, y: fn.cross_entropy(z, y, reduction=reduction),
        )
    )
    delta = flat({n: q.detach() for n, q in model.named_parameters()}, names) - start

    assert float(delta @ F @ delta) == pytest.approx(1e-4, rel=1e-8)
