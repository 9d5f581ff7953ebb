"""Gauss-Newton on PyTorch: programs as users write them, against dense Jacobians."""

import copy
import itertools

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import kfac_core as kc  # noqa: E402
from kfac_core.samples import sample_gram  # noqa: E402
from kfac_core_shims.torch import GaussNewton  # noqa: E402
from kfac_core_shims.torch.jacobians import JacobianFinder  # noqa: E402

from ..builders.tolerances import assert_close  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")


def mlp(*sizes, dtype=torch.float64):
    torch.manual_seed(0)
    layers = []
    for n, m in itertools.pairwise(sizes):
        layers += [nn.Linear(n, m), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(dtype)


def points(N, n=2, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(N, n, generator=generator, dtype=torch.float64)
    return x.requires_grad_()


def laplacian(net, x):
    u = net(x)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    total = 0.0
    for i in range(x.shape[1]):
        (second,) = torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)
        total = total + second[:, i]
    return total


def value(net):
    x = points(7)
    return lambda: net(x)[:, 0]


def several_outputs(net):
    x = points(6)
    return lambda: net(x) - x.detach()


def slopes(net):
    x = points(6)

    def residuals():
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        return slope[:, 0] + slope[:, 1]

    return residuals


def poisson(net):
    x, edge = points(6), points(3, seed=2)
    return lambda: (laplacian(net, x) - 1.0, 5.0 * net(edge)[:, 0])


def forward_mode(net):
    x, ones = points(5), torch.ones(5, 2, dtype=torch.float64)

    def residuals():
        u, slope = torch.func.jvp(net, (x,), (ones,))
        return u[:, 0] * slope[:, 0]

    return residuals


def shared_positions(net):
    x = points(10).reshape(5, 2, 2)
    return lambda: net(x).sum(dim=1)


def not_a_layer(net):
    net.register_parameter("shift", nn.Parameter(torch.ones(3, dtype=torch.float64)))
    x = points(5)
    return lambda: net(x)[:, 0] * net.shift.sum() + net.shift[0] ** 2


def mixes_examples(net):
    """Batch norm in training: each residual depends on all examples."""
    net[1] = nn.BatchNorm1d(5).double()
    x = points(6)
    return lambda: net(x)[:, 0]


PROGRAMS = {
    "batch norm in training": ((2, 5, 4, 1), mixes_examples),
    "value": ((2, 5, 4, 1), value),
    "several outputs": ((2, 4, 2), several_outputs),
    "slopes": ((2, 5, 4, 1), slopes),
    "Poisson": ((2, 5, 4, 1), poisson),
    "forward mode": ((2, 5, 1), forward_mode),
    "shared positions": ((2, 5, 3), shared_positions),
    "a parameter outside of layers": ((2, 5, 1), not_a_layer),
}


def dense_jacobian(net, terms):
    """Return the derivatives of the scaled residuals by all parameters, and these."""
    N = sum(len(term) for term in terms)
    scaled = [(term * (N / len(term)) ** 0.5).reshape(-1) for term in terms]
    r = torch.cat(scaled)
    parameters = list(net.parameters())
    rows = []
    for i in range(len(r)):
        gradients = torch.autograd.grad(
            r[i], parameters, retain_graph=True, materialize_grads=True
        )
        rows.append(torch.cat([g.reshape(-1) for g in gradients]))
    return torch.stack(rows).numpy(), r.detach().numpy(), N


def terms_of(residuals):
    returned = residuals()
    return [returned] if isinstance(returned, torch.Tensor) else [*returned]


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_gram_matrix_is_that_of_autograd(program):
    """By rows of layers, of derivatives of the network too, and formed for the rest."""
    sizes, make = PROGRAMS[program]
    net = mlp(*sizes)
    residuals = make(net)
    J, _, N = dense_jacobian(net, terms_of(residuals))

    finder = JacobianFinder(net)
    finder.wants_statistics = True
    terms = [t if t.ndim == 2 else t[:, None] for t in terms_of(residuals)]
    scales = [(N / len(term)) ** 0.5 for term in terms]
    K = sample_gram(finder.jacobian(terms, scales)).full()

    assert_close(K.numpy(), J @ J.T, "gram", "float64")
    formed = {not_a_layer: {"shift"}, mixes_examples: {"0.weight", "0.bias"}}
    assert set(finder.formed) >= formed.get(make, set())
    assert bool(finder.formed) == (make in formed)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_step_of_fixed_length_is_the_dense_solution(program):
    sizes, make = PROGRAMS[program]
    net = mlp(*sizes)
    residuals = make(net)
    J, r, N = dense_jacobian(net, terms_of(residuals))
    before = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    P = J.shape[1]

    loss = GaussNewton(net, lr=0.5, damping=0.01).step(residuals)

    after = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    dense = J.T @ J / N + 0.01 * torch.eye(P, dtype=torch.float64).numpy()
    step = torch.linalg.solve(torch.from_numpy(dense), torch.from_numpy(J.T @ r / N))
    assert_close((before - after).numpy(), 0.5 * step.numpy(), "inverse", "float64")
    assert_close(loss.numpy(), (r @ r) / (2 * N), "roundoff", "float64")


def test_momentum_is_that_of_spring():
    """Two steps on other points, the second with the first's direction in its model."""
    net = mlp(2, 4, 1)
    optimizer = GaussNewton(net, lr=0.1, damping=0.01, momentum=0.8)
    parameters = list(net.parameters())
    phi = None
    for seed in (3, 4):
        x = points(5, seed=seed)
        residuals = lambda x=x: net(x)[:, 0] - 1.0  # noqa: E731
        J, r, N = dense_jacobian(net, [residuals()])
        before = torch.cat([p.detach().reshape(-1) for p in parameters])
        optimizer.step(residuals)
        after = torch.cat([p.detach().reshape(-1) for p in parameters])
        step = ((before - after) / 0.1).numpy()
        dense = J.T @ J / N + 0.01 * torch.eye(J.shape[1], dtype=torch.float64).numpy()
        right = J.T @ r / N
        if phi is not None:
            right = right + 0.01 * 0.8 * phi
        expected = torch.linalg.solve(torch.from_numpy(dense), torch.from_numpy(right))
        assert_close(step, expected.numpy(), "inverse", "float64")
        phi = expected.numpy()


def test_a_small_poisson_problem_is_solved():
    """From plain autograd, with nothing chosen."""
    net = mlp(2, 12, 12, 1)
    axis = torch.linspace(0.1, 0.9, 9, dtype=torch.float64)
    inside = torch.cartesian_prod(axis, axis).requires_grad_()
    line = torch.linspace(0, 1, 11, dtype=torch.float64)[:, None]
    zero, one = torch.zeros_like(line), torch.ones_like(line)
    edge = torch.cat(
        [
            torch.cat(pair, 1)
            for pair in ((line, zero), (line, one), (zero, line), (one, line))
        ]
    )

    def solution(x):
        return torch.sin(torch.pi * x[:, 0]) * torch.sin(torch.pi * x[:, 1])

    source = -2 * torch.pi**2 * solution(inside.detach())
    optimizer = GaussNewton(net)

    for _ in range(40):
        loss = optimizer.step(
            lambda: (laplacian(net, inside) - source, 10 * net(edge)[:, 0])
        )

    error = (net(inside)[:, 0] - solution(inside)).detach()
    assert float(loss) < 1e-4
    assert float(error.norm() / solution(inside.detach()).norm()) < 1e-2
    assert optimizer.formed == {}


def test_float32_is_solved_with_a_gram_matrix_in_float64():
    net = mlp(1, 16, 1, dtype=torch.float32)
    x = torch.linspace(-1, 1, 40)[:, None]
    optimizer = GaussNewton(net)

    losses = [
        float(optimizer.step(lambda: net(x) - torch.sin(3 * x))) for _ in range(40)
    ]

    assert losses[-1] < 1e-5 * losses[0]
    assert all(later <= earlier for earlier, later in itertools.pairwise(losses))


def test_a_saved_optimizer_goes_on_as_it_would_have():
    """To the bit, with its damping and its momentum."""
    for options in ({}, {"lr": 0.2, "momentum": 0.5}):
        net = mlp(2, 4, 1)
        x = points(6)
        optimizer = GaussNewton(net, **options)
        for _ in range(2):
            optimizer.step(lambda net=net, x=x: net(x)[:, 0] - 1.0)
        other = copy.deepcopy(net)
        resumed = GaussNewton(other, **options)
        resumed.load_state_dict(optimizer.state_dict())

        optimizer.step(lambda net=net, x=x: net(x)[:, 0] - 1.0)
        resumed.step(lambda net=other, x=x: net(x)[:, 0] - 1.0)

        assert resumed.damping == optimizer.damping
        for p, q in zip(net.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q)


def test_what_raises_changes_nothing():
    net = mlp(2, 4, 1)
    x = points(6)
    optimizer = GaussNewton(net)
    before = copy.deepcopy(net.state_dict())
    calls = []

    def fails_at_a_trial():
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return net(x)[:, 0] - 1.0

    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step(fails_at_a_trial)
    with pytest.raises(kc.NotFiniteError, match="finite residuals"):
        optimizer.step(lambda: net(x)[:, 0] * torch.nan)
    with pytest.raises(kc.ShapeError, match=r"\(N,\) or \(N, C\)"):
        optimizer.step(lambda: net(x).sum())
    with pytest.raises(kc.ConventionError, match="damping"):
        GaussNewton(net, damping=0.0)

    assert optimizer.damping == 1.0
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])


def test_no_step_is_taken_at_a_minimum():
    net = mlp(2, 3, 1)
    x = points(4)
    target = net(x).detach()
    before = copy.deepcopy(net.state_dict())

    loss = GaussNewton(net).step(lambda: net(x) - target)

    assert float(loss) == 0.0
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])
