"""Residuals that contain derivatives of the network: PINNs, penalties, forces.

Each use of a weight in the forward pass and in its derivatives counts, so that the block of
`Full` is ``J^T J / N``; or the parameters are named.
"""

from __future__ import annotations

import random
import warnings

import pytest

torch = pytest.importorskip("torch")

from torch import func, nn  # noqa: E402
from torch.nn import functional as fn  # noqa: E402

import kfac_core as kc  # noqa: E402
from kfac_core_shims.torch import KFAC, graph  # noqa: E402

from ..builders import torch_residuals as forms  # noqa: E402
from ..builders import torch_zoo  # noqa: E402
from ..builders.torch_residuals import gradient  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("torch_float64"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*"),
]


def network():
    return nn.Sequential(
        nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)
    )


def curvatures(u, x):
    """Second derivatives of all examples in one batched backward pass."""
    first = gradient(u, x)
    units = torch.eye(2)[:, None, :].expand(2, len(x), 2)
    second = torch.autograd.grad(
        first, x, units, is_grads_batched=True, create_graph=True
    )[0]
    return second[0, :, :1] * second[1, :, 1:] + u


def of_one_example(model):
    return lambda p: func.functional_call(
        model, dict(model.named_parameters()), (p[None],)
    )[0, 0]


RESIDUALS = {
    "value": forms.value,
    "first": forms.slopes,
    "forces": forms.forces,
    "penalty": forms.length_of_slope,
    "Laplacian": forms.laplacian,
    "Burgers": forms.burgers,
    "biharmonic": forms.biharmonic,
    "batched": lambda model, x: curvatures(model(x), x),
    "jvp": lambda model, x: func.jvp(model, (x,), (torch.ones_like(x),))[1],
    "jvp of jvp": forms.twice_directional,
    "vmap of grad": lambda model, x: func.vmap(func.grad(of_one_example(model)))(x),
    "vmap of hessian": forms.by_hessian,
    "vmap of jacrev of jacfwd": lambda model, x: func.vmap(
        lambda p: func.jacrev(func.jacfwd(of_one_example(model)))(p).reshape(-1)
    )(x),
    "gradient of jvp": lambda model, x: gradient(
        func.jvp(model, (x,), (torch.ones_like(x),))[1], x
    ),
    # Rows of several numbers of uses: inner points, and points of the boundary.
    "joined": lambda model, x: torch.cat(
        [forms.laplacian(model, x), model(x[:2].sin())[:, 0]]
    ),
    "twice": lambda model, x: gradient(model(x) + model(x.sin()), x),
}


def as_matrix(r):
    return r if r.ndim == 2 else r[:, None]


def observed(residual):
    """A loop in which the residual is observed by hand."""

    def loop(model, kfac):
        x = torch.randn(6, 2, requires_grad=True)
        r = as_matrix(residual(model, x))
        kfac.observe(r)
        (0.5 * (r - torch.randn_like(r)).square().sum(1).mean()).backward(
            retain_graph=True
        )
        return r

    return loop


class Residual(nn.Module):
    """A module whose outputs are the residual, so that nothing is observed by hand."""

    def __init__(self, residual):
        super().__init__()
        self.net, self.residual = network(), residual

    def forward(self, x):
        return as_matrix(self.residual(self.net, x))


def two_lines(model, kfac):
    x = torch.randn(6, 2, requires_grad=True)
    r = model(x)
    (0.5 * (r - torch.randn_like(r)).square().sum(1).mean()).backward(retain_graph=True)
    return r


@pytest.mark.parametrize("name", RESIDUALS)
def test_every_use_of_a_weight_counts(name):
    """Whatever derives it: reverse mode, forward mode, batched, or both in turn."""
    program = torch_zoo.Program(
        model=network, loop=observed(RESIDUALS[name]), options={"output": None}
    )
    torch_zoo.run(program)


@pytest.mark.parametrize("name", ["first", "Laplacian", "biharmonic"])
def test_a_module_that_returns_its_residual(name):
    """As above, in a loop of two lines."""
    model = lambda: Residual(RESIDUALS[name])  # noqa: E731
    torch_zoo.run(torch_zoo.Program(model=model, loop=two_lines))


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("name", [name for name in RESIDUALS if name != "value"])
def test_an_unobserved_residual_raises(name, share):
    """Beside values at points of the boundary, as the hook sees them, or alone."""
    model, x = network(), torch.randn(6, 2, requires_grad=True)
    kfac = torch_zoo.attached(model)
    residual = RESIDUALS[name](model, x)
    (share * model(x.sin()).square().mean() + residual.square().mean()).backward()
    names = r"\['0', '2', '4'\].*observe\(residuals\)"
    with pytest.raises(kc.UnsupportedError, match=names):
        kfac.step()


def test_derivatives_that_are_only_logged_do_not_count():
    """In any mode, as long as the loss does not read them."""

    def loop(model, kfac):
        x = torch.randn(6, 2, requires_grad=True)
        for name in RESIDUALS:
            RESIDUALS[name](model, x)
        return two_lines(model, kfac)

    torch_zoo.run(torch_zoo.Program(model=network, loop=loop))


def test_empirical_gradients_of_a_residual():
    """The loss's own backward pass comes to all uses."""
    model, x = network(), torch.randn(6, 2, requires_grad=True)
    options = {"output": None, "fisher": "empirical", "likelihood": "gaussian"}
    kfac = torch_zoo.attached(model, **options)
    r = forms.laplacian(model, x)[:, None]
    kfac.observe(r)
    losses = 0.5 * r.square().sum(1)
    middle = [*model[2].parameters()]
    rows = [
        torch.autograd.grad(loss, middle, retain_graph=True, materialize_grads=True)
        for loss in losses
    ]
    J = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    F = J.T @ J / 6 + torch_zoo.DAMPING * torch.eye(J.shape[1])
    expected = torch.linalg.solve(F, J.mean(0))
    losses.mean().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kfac.step()

    direction = torch.cat([p.grad.flatten() for p in middle])
    torch.testing.assert_close(direction, expected)


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_kronecker_factors_are_means_over_uses(fisher):
    """A use in reverse has what comes back as input, and what it multiplies as gradient."""
    model, x = nn.Linear(2, 3, bias=False), torch.randn(6, 2)
    kfac = KFAC(model, likelihood="gaussian", fisher=fisher, decay=1.0, output=None)
    v = torch.randn(6, 3)
    y, z = model(x), v @ model.weight
    r = (y.square().sum(1) + z.square().sum(1))[:, None]
    kfac.observe(r)
    scale = torch.ones(6, 1) if fisher == "exact" else r.detach()
    (0.5 * r.square().sum(1).mean()).backward()
    kfac.update()
    A, G, repeats = kfac.factors("")

    inputs = torch.cat([x, 2 * z.detach() * scale])
    outputs = torch.cat([2 * y.detach() * scale, v])
    torch.testing.assert_close(A, inputs.T @ inputs / 12)
    torch.testing.assert_close(repeats * G, outputs.T @ outputs / 6)


def test_a_weight_norm_in_a_derivative():
    """The block is of the weight that is computed, in all its uses."""
    model, x = network(), torch.randn(6, 2, requires_grad=True)
    nn.utils.parametrizations.weight_norm(model[2])
    kfac = torch_zoo.attached(model, output=None)
    r = forms.laplacian(model, x)[:, None]
    made = next(
        n for n in graph.Walk(r.grad_fn, 0).nodes if n.name().startswith("WeightNorm")
    )
    inputs = [torch.autograd.graph.GradientEdge(made, 0), model[2].bias]
    kfac.observe(r)
    loss = 0.5 * r.square().mean()
    F = torch_zoo.fisher(r, inputs, kfac.criterion.row.likelihood)
    V, b = torch.autograd.grad(loss, inputs, retain_graph=True)
    direction = torch.linalg.solve(
        F + torch_zoo.DAMPING * torch.eye(len(F)), torch.cat([V.flatten(), b])
    )
    originals = [*model[2].parametrizations.weight.parameters()]
    expected = torch.autograd.grad(
        model[2].weight, originals, direction[:20].reshape(4, 5)
    )
    loss.backward()
    kfac.step()

    torch.testing.assert_close([p.grad for p in originals], [*expected])
    torch.testing.assert_close(model[2].bias.grad, direction[20:])


class Bump(nn.Module):
    """Reads its weight itself, and not as a matrix product of examples."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, h):
        return torch.exp(-(h[:, None] - self.weight).square().sum(-1))


class Twice(nn.Module):
    """One weight in two layers, and read once more by itself."""

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, h):
        h = self.inner(torch.tanh(self.inner(h)))
        return h + fn.linear(h.sin(), self.inner.weight) + h @ self.inner.weight


class Convolved(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Conv1d(1, 2, 3, padding=1)

    def forward(self, h):
        return self.inner(h[:, None]).sum(1)


class Products(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Bilinear(width, width, width)

    def forward(self, h):
        return self.inner(h, h.cos())


class Cell(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.GRUCell(width, width)

    def forward(self, h):
        return self.inner(h, h.sin())


class Tokens(nn.Module):
    """Each entry is a token, and a layer reads them once in either order."""

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(2, 1)

    def forward(self, h):
        tokens = torch.stack([h, h.cos()], -1)
        time_first = self.inner(tokens.transpose(0, 1).sin())
        return (self.inner(tokens) + time_first.transpose(0, 1)).squeeze(-1)


LAYERS = (
    lambda n: nn.Linear(n, n),
    lambda n: nn.Linear(n, n, bias=False),
    nn.LayerNorm,
    nn.RMSNorm,
    nn.PReLU,
    Bump,
    Twice,
    Convolved,
    Products,
    Cell,
    Tokens,
)
ACTIVATIONS = nn.Tanh, nn.Sigmoid, nn.Softplus, nn.SiLU, nn.GELU, nn.Identity


def random_network(rng):
    width = rng.choice([2, 3])
    layers = [nn.Linear(2, width)]
    for _ in range(rng.randint(1, 2)):
        layers += [rng.choice(ACTIVATIONS)(), rng.choice(LAYERS)(width)]
    return nn.Sequential(*layers, rng.choice(ACTIVATIONS)(), nn.Linear(width, 1))


@pytest.mark.parametrize("seed", range(60))
def test_random_programs_are_right_or_name_skipped_layers(seed):
    """Networks and derivatives in random combinations.

    `check_step` has the direction of each block, or its gradient as it was and its name.
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = random_network(rng)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kfac = torch_zoo.attached(model, output=None)
    names = ["value", "first", "forces", "penalty", "Laplacian", "Burgers", "joined"]
    residual = RESIDUALS[rng.choice(names)]
    refused = "Layer"
    try:
        r = observed(residual)(model, kfac)
        diagonal = [
            name
            for name, _ in model.named_parameters()
            if isinstance(owner(model, name), nn.LayerNorm | nn.RMSNorm | nn.PReLU)
        ]
        torch_zoo.check_step(model, kfac, r, diagonal=diagonal)
    except kc.UnsupportedError as error:
        refused = str(error)

    assert "Layer" in refused


def owner(model, name):
    return model.get_submodule(name.rpartition(".")[0])
