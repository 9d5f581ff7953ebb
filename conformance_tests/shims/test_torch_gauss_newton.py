"""Gauss-Newton on PyTorch: programs as users write them, against dense Jacobians."""

import copy
import itertools

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import kfac_core as kc  # noqa: E402
from kfac_core.distributed import run_ranks  # noqa: E402
from kfac_core_shims.torch import GaussNewton  # noqa: E402

from ..builders import torch_residuals, torch_zoo  # noqa: E402
from ..builders.tolerances import assert_close  # noqa: E402
from ..builders.torch_residuals import laplacian  # noqa: E402

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


def of(form, N=5):
    """Return a program with a form of residuals at some points."""

    def make(net):
        x = points(N)
        return lambda: form(net, x)

    return make


def poisson(net):
    x, edge = points(6), points(3, seed=2)
    return lambda: (laplacian(net, x) - 1.0, 5.0 * net(edge)[:, 0])


def nothing_of_some_terms(net):
    """Conditions that hold of no point: of values, of slopes, and of no network."""
    x = points(6)
    slopes = torch_residuals.slopes
    return lambda: (net(x)[:0, 0], net(x)[:, 0] - 1.0, slopes(net, x)[x[:, 0] > 9.0])


def not_a_layer(net):
    net.register_parameter("shift", nn.Parameter(torch.ones(3, dtype=torch.float64)))
    x = points(5)
    return lambda: net(x)[:, 0] * net.shift.sum() + net.shift[0] ** 2


def mixes_examples(net):
    """Batch norm in training: each residual depends on all examples."""
    net[1] = nn.BatchNorm1d(5).double()
    x = points(6)
    return lambda: net(x)[:, 0]


def convolution(net):
    net.append(nn.Unflatten(1, (1, 6))).append(nn.Conv1d(1, 3, 3).double())
    net.append(nn.Flatten()).append(nn.Tanh()).append(nn.Linear(12, 2).double())
    x = points(5)
    return lambda: net(x)


def normalization(net):
    net.append(nn.LayerNorm(4).double()).append(nn.Tanh())
    x = points(5)
    return lambda: net(x)


def embedding(net):
    net.insert(0, nn.Embedding(4, 2).double())
    ids = torch.tensor([0, 3, 1, 3, 2])
    return lambda: net(ids)


def bags(net):
    """Sums of two ids and of three, which have no common form."""
    net.insert(0, nn.EmbeddingBag(4, 2, mode="sum").double())
    ids = torch.tensor([[0, 3, 1], [3, 2, 2]])
    return lambda: (net(ids), net(ids[:, :2]))


def tied_embedding(net):
    """A weight that makes the outputs too."""
    net.insert(0, nn.Embedding(4, 2).double())
    net.append(nn.Linear(2, 4, bias=False).double())
    net[-1].weight = net[0].weight
    ids = torch.tensor([0, 3, 1, 3, 2])
    return lambda: net(ids)


def weight_norm(net):
    nn.utils.parametrizations.weight_norm(net[0])
    x = points(5)
    return lambda: net(x)


class Attention(nn.Module):
    """Attention to tokens (N, 2, 3) made of (N, 6), with a weight for each part."""

    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, kdim=3, vdim=3, batch_first=True)

    def forward(self, x):
        tokens = x.reshape(-1, 2, 3)
        queries = x[:, None, :4]
        return self.inner(queries, tokens, tokens)[0][:, 0]


def attention(net):
    """The bias of the keys has the derivative zero."""
    net.append(Attention().double())
    x = points(5)
    return lambda: net(x)


def encoded(net):
    """Put a layer that has norms over tokens before a network of 8 inputs."""
    encoder = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
    layers = [nn.Linear(2, 8), nn.Unflatten(1, (2, 4)), encoder, nn.Flatten()]
    for i, layer in enumerate(layers):
        net.insert(i, layer.double())
    return net


NORMS = {f"2.norm{i}.{name}" for i in (1, 2) for name in ("weight", "bias")}


def transformer(net):
    encoded(net)
    x = points(5)
    return lambda: net(x)


def part_of_a_weight(net):
    """The weight of queries, keys and values, of which queries' has another use."""
    encoded(net)
    x, weight = points(5), net[2].self_attn.in_proj_weight
    return lambda: net(x) + weight[:4].square().sum()


PROGRAMS = {
    "attention": ((2, 6), attention),
    "transformer": ((8, 2), transformer),
    "a part of a weight": ((8, 2), part_of_a_weight),
    "weight norm": ((2, 5, 2), weight_norm),
    "tied embedding": ((2, 5, 2), tied_embedding),
    "more residuals than parameters": ((2, 4, 1), of(torch_residuals.value, 40)),
    "biharmonic": ((2, 5, 4, 1), of(torch_residuals.biharmonic)),
    "mixed vector": ((2, 5, 4, 2), of(torch_residuals.mixed_vector)),
    "Hessian by torch.func": ((2, 5, 4, 1), of(torch_residuals.by_hessian)),
    "Hessian without a batch": ((2, 5, 4, 1), of(torch_residuals.hessian_of_points)),
    "convolution": ((2, 6), convolution),
    "normalization": ((2, 4), normalization),
    "embedding": ((2, 5, 2), embedding),
    "batch norm in training": ((2, 5, 4, 1), mixes_examples),
    "value": ((2, 5, 4, 1), of(torch_residuals.value)),
    "terms of no example": ((2, 5, 4, 1), nothing_of_some_terms),
    "bags": ((2, 5, 1), bags),
    "two terms of several outputs": (
        (2, 4, 2),
        of(lambda net, x: (net(x), net(x[:2]))),
    ),
    "several outputs": ((2, 4, 2), of(torch_residuals.value)),
    "slopes": ((2, 5, 4, 1), of(torch_residuals.slopes)),
    "Poisson": ((2, 5, 4, 1), poisson),
    "forward mode": ((2, 5, 1), of(torch_residuals.directional)),
    "shared positions": ((2, 5, 3), of(torch_residuals.mean_over_points)),
    "a parameter outside of layers": ((2, 5, 1), not_a_layer),
}


def dense_jacobian(net, terms):
    """Return the derivatives of the scaled residuals by all parameters, and these."""
    N = sum(len(term) for term in terms)
    scaled = [(term * (N / max(1, len(term))) ** 0.5).reshape(-1) for term in terms]
    r = torch.cat(scaled)
    parameters = list(net.parameters())
    rows = [torch_zoo.gradient_of(one, parameters) for one in r]
    return torch.stack(rows).numpy(), r.detach().numpy(), N


def terms_of(residuals):
    returned = residuals()
    return [returned] if isinstance(returned, torch.Tensor) else [*returned]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_step_of_fixed_length_is_the_dense_solution(program):
    """By rows of layers, of derivatives of the network too, and formed for the rest."""
    sizes, make = PROGRAMS[program]
    net = mlp(*sizes)
    residuals = make(net)
    J, r, N = dense_jacobian(net, terms_of(residuals))
    before = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    P = J.shape[1]

    options = {"lr": 0.5, "damping": 0.01, "momentum": 0.0}
    optimizer = GaussNewton(net, **options)
    loss = optimizer.step(residuals)

    after = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    dense = J.T @ J / N + 0.01 * torch.eye(P, dtype=torch.float64).numpy()
    step = torch.linalg.solve(torch.from_numpy(dense), torch.from_numpy(J.T @ r / N))
    assert_close((before - after).numpy(), 0.5 * step.numpy(), "inverse", "float64")
    assert_close(loss.numpy(), (r @ r) / (2 * N), "roundoff", "float64")
    formed = {
        not_a_layer: {"shift"},
        mixes_examples: {"0.weight", "0.bias"},
        weight_norm: {"0.parametrizations.weight.original1", "0.bias"},
        tied_embedding: {"0.weight"},
        bags: {"0.weight"},
        transformer: NORMS,
        part_of_a_weight: {*NORMS, "2.self_attn.in_proj_weight"},
    }
    assert set(optimizer.formed) >= formed.get(make, set())
    assert make is not transformer or set(optimizer.formed) == NORMS
    assert bool(optimizer.formed) == (make in formed)


def cross_entropy(net, x):
    labels = torch.tensor([0, 2, 1, 1, 0, 2])
    return (net(x), labels), "categorical", nn.functional.cross_entropy


def ignored_labels(net, x):
    labels = torch.tensor([0, -100, 1, 1, -100, 2])
    return (net(x), labels), "categorical", nn.functional.cross_entropy


def labels_of_sigmoids(net, x):
    labels = (x.detach() > 0.5).double()[:, :1].expand(-1, 3)
    loss = nn.functional.binary_cross_entropy_with_logits
    return (net(x), labels), "bernoulli", lambda z, y: 3 * loss(z, y)


def values_of_derivatives(net, x):
    """Slopes of the network, as the outputs of a squared error."""
    (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    loss = nn.functional.mse_loss
    return (slope, x.detach().sin()), "gaussian", lambda z, y: loss(z, y)


@pytest.mark.parametrize(
    ("make", "sizes"),
    [
        (cross_entropy, (2, 5, 3)),
        (ignored_labels, (2, 5, 3)),
        (labels_of_sigmoids, (2, 5, 3)),
        (values_of_derivatives, (2, 5, 3)),
        (cross_entropy, (8, 3)),
    ],
)
def test_a_likelihood_gives_the_dense_step_of_gauss_newton(make, sizes):
    """With the Hessian of PyTorch's own loss, and the Jacobian by autograd."""
    net, x = mlp(*sizes), points(6)
    if sizes[0] == 8:
        net = encoded(net)
    (z, y), likelihood, loss = make(net, x)
    J, _, N = dense_jacobian(net, [z])
    J = torch.from_numpy(J).reshape(N, z.shape[1], -1)
    of_all = torch.autograd.functional.hessian(lambda f: N * loss(f, y), z.detach())
    H = torch.stack([of_all[i, :, i] for i in range(N)])
    gradients = torch.autograd.grad(
        loss(z, y), list(net.parameters()), materialize_grads=True
    )
    gradient = torch.cat([g.reshape(-1) for g in gradients])
    P = J.shape[2]
    F = torch.einsum("ncp,ncd,ndq->pq", J, H, J) / N + 0.01 * torch.eye(P).double()
    before = torch.cat([p.detach().reshape(-1) for p in net.parameters()])

    optimizer = GaussNewton(net, likelihood=likelihood, lr=0.5, damping=0.01)
    optimizer.step(lambda: make(net, x)[0])

    after = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    step = torch.linalg.solve(F, gradient)
    assert_close((before - after).numpy(), 0.5 * step.numpy(), "inverse", "float64")
    assert set(optimizer.report().formed) == (NORMS if sizes[0] == 8 else set())


@pytest.mark.parametrize("options", [{}, {"lr": 0.3}], ids=["search", "rate"])
def test_conjugate_gradients_take_the_step_of_the_factorization(options):
    """Above `direct_up_to` residuals, where K is not formed."""
    x, edge = points(9), points(4, seed=2)
    steps = []
    for direct_up_to in (6000, 10):
        net = mlp(2, 5, 1)
        optimizer = GaussNewton(net, direct_up_to=direct_up_to, **options)
        optimizer.step(lambda net=net: (laplacian(net, x), net(edge)))
        steps.append(torch.cat([p.detach().reshape(-1) for p in net.parameters()]))
        assert options or optimizer.report().residual < 1e-8

    assert float((steps[1] - steps[0]).norm()) < 1e-7 * float(steps[0].norm())


def test_classes_are_learned_without_a_rate():
    torch.manual_seed(0)
    x = torch.randn(60, 2, dtype=torch.float64)
    labels = (x[:, 0] * x[:, 1] > 0).long() + (x[:, 0] > 0).long()
    net = mlp(2, 12, 3)
    optimizer = GaussNewton(net, likelihood="categorical")

    losses = [float(optimizer.step(lambda: (net(x), labels))) for _ in range(25)]

    assert losses[0] > 0.5
    assert losses[-1] < 1e-2
    assert all(later <= earlier for earlier, later in itertools.pairwise(losses))


SHARES = {
    "uneven": ((slice(0, 6), slice(6, 9)), (slice(0, 1), slice(1, 4))),
    "a term each": ((slice(0, 9), slice(9, 9)), (slice(0, 0), slice(0, 4))),
    "no points": ((slice(0, 0), slice(0, 9)), (slice(0, 0), slice(0, 4))),
}
"""For each of two processes, its points inside and at the edge."""


def on_processes(net, communicator, options, likelihood, shares=None):
    """Return parameters and losses after steps with a part of the examples."""
    net = copy.deepcopy(net)
    x, edge = points(9), points(4, seed=2)
    labels = torch.tensor([0, -100, 2, 2, 1, 0, 1, -100, -100])
    part, edges = slice(9), slice(4)
    if communicator is not None:
        part, edges = (of_ranks[communicator.rank] for of_ranks in shares)
        options = options | {"communicator": communicator}

    def terms():
        if likelihood:
            return net(x[part]), labels[part]
        return laplacian(net, x[part].detach().requires_grad_()), net(edge[edges])

    optimizer = GaussNewton(net, likelihood=likelihood, **options)
    losses = [float(optimizer.step(terms)) for _ in range(4)]
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()]), losses


@pytest.mark.parametrize("options", [{}, {"lr": 0.3}], ids=["search", "rate"])
@pytest.mark.parametrize("likelihood", [None, "categorical"])
@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
def test_two_processes_take_the_steps_of_one(options, likelihood, shares):
    # Threads share the generator of random numbers, so that ranks copy one network.
    net = mlp(2, 5, 3 if likelihood else 1)
    expected, losses = on_processes(net, None, options, likelihood)

    def run(communicator):
        return on_processes(net, communicator, options, likelihood, shares)

    for parameters, reached in run_ranks(2, run):
        error = (parameters - expected).norm() / expected.norm()
        assert float(error) < 1e-10
        assert reached == pytest.approx(losses, rel=1e-10)


def test_the_report_says_what_a_step_did_and_what_is_formed():
    net = mlp(2, 5, 1)
    residuals = not_a_layer(net)
    optimizer = GaussNewton(net)
    assert "no steps yet" in repr(optimizer)
    with pytest.raises(kc.NotReadyError):
        optimizer.report()

    loss = optimizer.step(residuals)

    report = optimizer.report()
    assert (report.steps, report.samples, report.accepted) == (1, 5, True)
    assert report.parameters == sum(p.numel() for p in net.parameters())
    assert report.loss == float(loss) > report.reached
    assert report.damping == optimizer.damping
    assert "shift, since it is in no layer" in repr(optimizer)


def test_the_report_says_that_points_changed():
    net = mlp(2, 5, 1)
    optimizer = GaussNewton(net)
    changed = []
    for seed in (3, 3, 4):
        x = points(5, seed=seed)
        optimizer.step(lambda x=x: net(x)[:, 0] - 1.0)
        changed.append("minibatch=True" in repr(optimizer))

    assert changed == [False, False, True]


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
        sgd = torch.optim.SGD(other.parameters())
        with pytest.raises(kc.StateError, match="another optimizer"):
            resumed.load_state_dict(sgd.state_dict())

        optimizer.step(lambda net=net, x=x: net(x)[:, 0] - 1.0)
        resumed.step(lambda net=other, x=x: net(x)[:, 0] - 1.0)

        assert resumed.damping == optimizer.damping
        for p, q in zip(net.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q)


def test_a_direction_that_is_written_to_is_the_last_one():
    x, nets = points(9).detach(), [mlp(2, 4, 1), mlp(2, 4, 1)]
    optimizers = [GaussNewton(net, minibatch=True) for net in nets]
    for net, optimizer in zip(nets, optimizers, strict=True):
        optimizer.step(lambda net=net: net(x)[:, 0] - 1.0)
    for state in optimizers[0].state.values():
        state["direction"].zero_()
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    for net, optimizer in zip(nets, optimizers, strict=True):
        optimizer.step(lambda net=net: net(x)[:, 0] - 1.0)
    written, loaded = nets
    for p, q in zip(written.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(p, q)


def test_residuals_in_bfloat16_are_fitted():
    x, directions = points(40, seed=3).detach().float(), []
    for narrow in (False, True):
        net = mlp(2, 4, 1, dtype=torch.float32)
        optimizer = GaussNewton(net, lr=1.0, damping=0.1)

        def residuals(net=net, narrow=narrow):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=narrow):
                return net(x) - 1.0

        optimizer.step(residuals)
        directions.append(optimizer.state[net[0].weight]["direction"])
    # Eight bits of residuals and of rows.
    assert (directions[1] - directions[0]).norm() < 0.05 * directions[0].norm()


@pytest.mark.parametrize("likelihood", [None, "categorical", "gaussian"])
def test_a_model_in_bfloat16_takes_the_step_of_float32(likelihood):
    directions = []
    for dtype in (torch.float32, torch.bfloat16):
        net, x = mlp(2, 4, 3, dtype=dtype), points(40, seed=3).detach().to(dtype)
        labels = torch.arange(40) % 3
        targets = labels if likelihood == "categorical" else torch.ones(40, 3).to(dtype)
        optimizer = GaussNewton(net, likelihood=likelihood, lr=1.0, damping=0.1)
        optimizer.step(lambda: (net(x), targets) if likelihood else net(x) - 1.0)  # noqa: B023
        directions.append(optimizer.state[net[0].weight]["direction"].float())
    assert (directions[1] - directions[0]).norm() < 0.05 * directions[0].norm()


def test_what_raises_changes_nothing():
    net = mlp(2, 4, 1)
    x = points(6)
    head = nn.Linear(1, 2).double()
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
    with pytest.raises(kc.ShapeError, match="Expected tensors"):
        optimizer.step(lambda: net(x).detach().numpy())
    with pytest.raises(kc.ShapeError, match=r"\(N,\) or \(N, C\)"):
        optimizer.step(lambda: net(x).sum())
    with pytest.raises(kc.DtypeError, match=r"real residuals.*complex128"):
        optimizer.step(lambda: net(x) * 1j)
    for log_psi, energies, error, message in (
        (net(x), torch.ones(5), kc.ShapeError, r"local energies.*\(6,\), got \(5,\)"),
        (net(x), x[:, 0] * 1j, kc.DtypeError, "real local energies, got.*complex128"),
        (net(x) * 1j, x[:, 0], kc.DtypeError, "real log psi, got.*complex128"),
        (net(x).expand(6, 2), x[:, 0], kc.ShapeError, r"log psi.*got \(6, 2\)"),
    ):
        wave_function = GaussNewton(net, centered=True)
        with pytest.raises(error, match=message):
            wave_function.step(lambda pair=(log_psi, energies): pair)
    with pytest.raises(kc.ShapeError, match="empty batch"):
        optimizer.step(lambda: net(x[:0]))
    with pytest.raises(kc.UnsupportedError, match="Term 1 of the loss"):
        optimizer.step(lambda: (net(x), torch.ones(3)))
    for likelihood, targets, message in (
        (
            "categorical",
            torch.tensor([0, 1, -100, 2, 0, -1]),
            "0 to 1.*got 2 of exampl",
        ),
        ("bernoulli", x.detach().round() - 1.0, r"from 0 to 1, got .* of example"),
        ("gaussian", x.detach() / 0.0 * 0.0, r"finite numbers, got .* of example 0"),
    ):
        fitted = GaussNewton(nn.Sequential(net, head), likelihood=likelihood)
        with pytest.raises(kc.ConventionError, match=f"`targets` to be .*{message}"):
            fitted.step(lambda y=targets: (head(net(x)), y))
    with pytest.raises(
        kc.DtypeError, match=r"real parameters, got weight of .*complex"
    ):
        GaussNewton(nn.Linear(2, 2, dtype=torch.complex128))
    with pytest.raises(kc.ConventionError, match="damping"):
        GaussNewton(net, damping=0.0)
    with pytest.raises(kc.ConventionError, match="minibatch=True"):
        GaussNewton(net, momentum=0.9)
    with pytest.raises(kc.ConventionError, match="and not its parameters"):
        GaussNewton(net.parameters())

    assert optimizer.damping == 1.0
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])


def test_parameters_frozen_later_are_refused():
    net = mlp(2, 3, 1)
    x = points(4)
    optimizer = GaussNewton(net)
    optimizer.step(lambda: net(x))
    net[0].weight.requires_grad_(False)
    with pytest.raises(kc.UnsupportedError, match="frozen after"):
        optimizer.step(lambda: net(x))


def test_no_step_is_taken_at_a_minimum():
    net = mlp(2, 3, 1)
    x = points(4)
    target = net(x).detach()
    before = copy.deepcopy(net.state_dict())

    optimizer = GaussNewton(net)

    # As many failures of 20 trials would overflow a damping.
    losses = [float(optimizer.step(lambda: net(x) - target)) for _ in range(40)]

    assert losses == [0.0] * 40
    assert optimizer.damping < 1e12
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])
    moved = float(optimizer.step(lambda: net(x) - target - 0.1))
    assert optimizer.report().reached < moved


def test_hooks_and_the_profiler_see_steps():
    net, seen = mlp(2, 3, 1), []
    optimizer, residuals = GaussNewton(net), of(lambda net, x: net(x))(net)
    with torch.profiler.profile() as profile:
        optimizer.step(residuals)
    assert "Optimizer.step#GaussNewton.step" in {e.key for e in profile.events()}
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.step(residuals)
    assert seen == ["before", "after"]


def test_a_term_without_examples_counts_nothing():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    other, x = copy.deepcopy(net), torch.randn(16, 2).double()
    GaussNewton(net).step(lambda: (net(x) - 1, net(x[:0])))
    GaussNewton(other).step(lambda: other(x) - 1)
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def test_a_step_within_autocast_is_that_of_residuals_within_it():
    torch.manual_seed(0)
    inside = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    outside, x = copy.deepcopy(inside), torch.randn(16, 2)
    optimizers = [GaussNewton(net) for net in (inside, outside)]

    def residuals(net):
        return (net(x) - torch.sin(x[:, :1])).float()

    def within():
        with torch.autocast("cpu", torch.bfloat16):
            return residuals(inside)

    for _ in range(3):
        loss = optimizers[0].step(within)
        with torch.autocast("cpu", torch.bfloat16):
            assert optimizers[1].step(lambda: residuals(outside)) == loss
    for p, q in zip(inside.parameters(), outside.parameters(), strict=True):
        assert torch.equal(p, q)
