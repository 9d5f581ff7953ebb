"""Heads of different likelihoods, against the Hessian of the user's loss in PyTorch.

A network of classes and a value trains by ``cross_entropy + c * mse_loss``.  Its blocks are
`Full`, and exact: each is that of ``J^T H J`` of its own parameters.
"""

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as fn  # noqa: E402

import kfac_core as kc  # noqa: E402
from kfac_core_shims.torch import (  # noqa: E402
    KFAC,
    SOAP,
    GaussNewton,
    KFACOptimizer,
    Posterior,
    collect,
    influence,
)

from ..builders.torch_rows import jacobians  # noqa: E402

pytestmark = pytest.mark.usefixtures("torch_float64")

CLASSES, N = 3, 7
FULL = {"dense": kc.Full()}
EXACT = {
    "fisher": "exact",
    "kl_clip": None,
    "approximations": FULL,
    "damping": 0.01,
    "damping_rule": "exact",
    "refreshing": kc.Refreshing(keep_matrices=True),
}


class ActorCritic(torch.nn.Module):
    """A shared layer, logits and a value, which may lack its axis."""

    def __init__(self, *, squeezed=False):
        super().__init__()
        self.body = torch.nn.Linear(4, 5)
        self.policy, self.value = torch.nn.Linear(5, CLASSES), torch.nn.Linear(5, 1)
        self.squeezed = squeezed

    def forward(self, x):
        h = torch.tanh(self.body(x))
        value = self.value(h)
        return self.policy(h), value[:, 0] if self.squeezed else value


def joint(weight=1.0):
    """Return the likelihood of ``cross_entropy + weight / 2 * mse_loss``."""
    return kc.losses.Joint(
        losses=(kc.losses.Categorical(), kc.losses.Gaussian(variance=1.0)),
        sizes=(CLASSES, 1),
        weights=(1.0, weight),
    )


def data(rows=N):
    x = torch.randn(rows, 4)
    return x, x[:, :CLASSES].argmax(1), x.sum(1, keepdim=True)


def loss_of(outputs, labels, values, weight=1.0):
    logits, value = outputs
    value = value.reshape(values.shape)
    return fn.cross_entropy(logits, labels) + weight / 2 * fn.mse_loss(value, values)


class SideBySide(torch.nn.Module):
    """A model whose outputs are those of another's heads, as one row each."""

    def __init__(self, model):
        super().__init__()
        self.heads = model

    def forward(self, x):
        logits, value = self.heads(x)
        return torch.cat([logits, value.reshape(len(x), 1)], 1)


def dense_blocks(model, x, weight):
    """Return the curvature of each layer, with matrices (in + 1, out) as vectors."""

    def loss(z):
        # Neither Hessian depends on its target.
        values = fn.mse_loss(z[CLASSES:], torch.zeros(1))
        return fn.cross_entropy(z[:CLASSES], torch.tensor(0)) + weight / 2 * values

    outputs = SideBySide(model)
    J = jacobians(outputs, x)
    rows = outputs(x).detach()
    H = torch.stack([torch.autograd.functional.hessian(loss, z) for z in rows])
    blocks = {}
    for name, _ in model.named_children():
        by_weight, by_bias = J[f"heads.{name}.weight"], J[f"heads.{name}.bias"]
        matrices = torch.cat([by_weight.mT, by_bias[:, :, None]], 2).flatten(2)
        blocks[name] = (matrices.mT @ H @ matrices).mean(0)
    return blocks


@pytest.mark.parametrize("weight", [1.0, 0.3])
@pytest.mark.parametrize("how", ["returned", "squeezed", "picked", "observed"])
def test_directions_are_those_of_the_hessian_of_both_losses(how, weight):
    """A model that returns both heads needs nothing but the likelihood."""
    model, (x, labels, values) = ActorCritic(squeezed=how == "squeezed"), data()
    output = {
        "picked": {"output": lambda heads: torch.cat(heads, -1)},
        "observed": {"output": None},
    }.get(how, {})
    kfac = KFAC(model, likelihood=joint(weight), **EXACT, **output)
    heads = model(x)
    if how == "observed":
        kfac.observe(torch.cat(heads, -1))
    loss_of(heads, labels, values, weight).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}

    kfac.step()

    for name, block in dense_blocks(model, x, weight).items():
        found = kfac.estimator.operator(name).to_dense(damped=False)
        torch.testing.assert_close(found, block)
        V = gradients[f"{name}.weight"].mT, gradients[f"{name}.bias"][None]
        damped = block + 0.01 * torch.eye(len(block))
        expected = torch.linalg.solve(damped, torch.cat(V).flatten()).reshape(
            -1, len(V[1][0])
        )
        layer = model.get_submodule(name)
        torch.testing.assert_close(layer.weight.grad.mT, expected[:-1])
        torch.testing.assert_close(layer.bias.grad, expected[-1])


def test_drawn_targets_have_that_curvature_on_average():
    """Of both heads together, without terms between them."""
    model, (x, *_) = ActorCritic(), data()
    options = EXACT | {"fisher": "gradients", "samples": 3000}
    kfac = KFAC(model, likelihood=joint(0.3), **options)
    kfac.update([torch.cat(model(x), -1)])
    kfac.estimator.refresh()
    for name, block in dense_blocks(model, x, 0.3).items():
        found = kfac.estimator.operator(name).to_dense(damped=False)
        assert torch.linalg.norm(found - block) <= 0.08 * torch.linalg.norm(block)


def test_squares_of_weights_are_refused():
    """The empirical gradients of a weighted sum would have them; without weights not."""
    with pytest.raises(kc.UnsupportedError, match="weights"):
        KFAC(ActorCritic(), likelihood=joint(0.5), **EXACT | {"fisher": "empirical"})
    model, (x, labels, values) = ActorCritic(), data()
    kfac = KFAC(model, likelihood=joint(), **EXACT | {"fisher": "empirical"})
    loss_of(model(x), labels, values).backward()
    kfac.step()
    rows = []
    for n in range(N):
        loss = loss_of(model(x[n : n + 1]), labels[n : n + 1], values[n : n + 1])
        weight, bias = torch.autograd.grad(loss, [*model.body.parameters()])
        rows.append(torch.cat([weight.mT, bias[None]]).flatten())
    rows = torch.stack(rows)
    found = kfac.estimator.operator("body").to_dense(damped=False)
    torch.testing.assert_close(found, rows.mT @ rows / N)


def test_other_heads_than_those_of_the_likelihood_are_refused():
    """A tuple of another length shows no outputs, and one of other sizes is an error."""
    x, labels, values = data()

    class Recurrent(ActorCritic):
        def forward(self, x):
            return (*super().forward(x), None)

    model = Recurrent()
    kfac = KFAC(model, likelihood=joint(), lr=0.1)
    loss_of(model(x)[:2], labels, values).backward()
    with pytest.raises(kc.NotReadyError, match="`output`"):
        kfac.step()
    model = ActorCritic()
    wider = kc.losses.Joint(losses=joint().losses, sizes=(CLASSES, 2))
    kfac = KFAC(model, likelihood=wider, lr=0.1)
    with pytest.raises(kc.ShapeError, match="`natural`"):
        loss_of(model(x), labels, values).backward()


def test_the_quadratic_model_of_linear_heads_predicts_their_loss():
    """It is exact for heads of different variances and weights, and a linear network."""
    model = torch.nn.ModuleDict(
        {"a": torch.nn.Linear(4, 2), "b": torch.nn.Linear(4, 1)}
    )
    model.forward = lambda x: (model["a"](x), model["b"](x))
    gaussians = kc.losses.Gaussian(variance=0.5), kc.losses.SquaredError(scale=2.0)
    likelihood = kc.losses.Joint(losses=gaussians, sizes=(2, 1), weights=(1.0, 0.3))
    optimizer = KFACOptimizer(model, likelihood=likelihood, fisher="exact")
    x, y = torch.randn(N, 4), torch.randn(N, 3)

    def loss():
        a, b = model(x)
        squares = (a - y[:, :2]).square().sum(1) + 0.6 * (b - y[:, 2:]).square().sum(1)
        return squares.mean()

    for _ in range(3):
        optimizer.step(loss)
        assert abs(optimizer.metrics()["reduction_ratio"] - 1) < 1e-8


def test_each_optimizer_trains_both_heads():
    """As a user writes it: the model returns both heads, the loss is the sum of both."""
    x, labels, values = data(64)

    def trained(make, steps, output=None):
        torch.manual_seed(1)
        model = ActorCritic()
        sgd = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, nesterov=True)
        first = loss_of(model(x), labels, values).item()
        step = make(model, sgd)
        for _ in range(steps):
            step(model)
        return loss_of(model(x), labels, values).item() / first

    def beside(kfac, *others):
        def step(model):
            model.zero_grad()
            loss_of(model(x), labels, values).backward()
            for one in (kfac, *others):
                one.step()

        return step

    def by_kfac(model, sgd):
        return beside(KFAC(model, lr=sgd, likelihood=joint()), sgd)

    def by_model(model, sgd):
        optimizer = KFACOptimizer(model, likelihood=joint())
        return lambda model: optimizer.step(lambda: loss_of(model(x), labels, values))

    def by_residuals(model, sgd):
        optimizer = GaussNewton(model, likelihood=joint())
        targets = labels, values[:, 0]
        return lambda model: optimizer.step(lambda: (torch.cat(model(x), -1), targets))

    assert trained(by_kfac, 200) < 0.02
    assert trained(by_model, 40) < 0.02
    assert trained(by_residuals, 20) < 0.02
    assert trained(lambda model, sgd: beside(SOAP(model, lr=0.03)), 200) < 0.1


def test_gauss_newton_names_targets_that_a_head_cannot_have():
    """Targets are a tuple; a label out of range, or one array for all, is an error."""
    model, (x, labels, values) = ActorCritic(), data()
    optimizer = GaussNewton(model, likelihood=joint(0.3), damping=0.1)
    with pytest.raises(kc.ConventionError, match=r"`targets`.*each head.*-7"):
        optimizer.step(
            lambda: (torch.cat(model(x), -1), (torch.full_like(labels, -7), values))
        )
    with pytest.raises(kc.ShapeError, match="tuple of 2"):
        optimizer.step(lambda: (torch.cat(model(x), -1), labels))


def test_a_posterior_and_influence_read_both_heads():
    """`forward` puts them side by side; without it a tuple is refused."""
    model, (x, labels, values) = ActorCritic().eval(), data()
    batches = [(x, (labels, values))]

    def forward(model, batch):
        return torch.cat(model(batch[0]), -1)

    with pytest.raises(kc.ConventionError, match="`forward`"):
        collect(model, batches, likelihood=joint())
    options = {"fisher": "exact", "ekfac": False, "approximations": FULL}
    factors = collect(model, batches, likelihood=joint(), forward=forward, **options)
    posterior = Posterior(
        model, batches, likelihood=joint(), forward=forward, factors=factors
    )
    J = jacobians(SideBySide(model), x)
    blocks = dense_blocks(model, x, 1.0)
    covariance = 0.0
    for name, block in blocks.items():
        by_weight, by_bias = J[f"heads.{name}.weight"], J[f"heads.{name}.bias"]
        matrices = torch.cat([by_weight.mT, by_bias[:, :, None]], 2).flatten(2)
        precision = N * block + torch.eye(len(block))
        covariance = covariance + matrices @ torch.linalg.solve(precision, matrices.mT)
    torch.testing.assert_close(posterior.covariance(batches[0]), covariance)
    log_p = torch.log_softmax(model(x)[0], 1)[range(N), labels].sum()
    log_p = log_p + torch.distributions.Normal(model(x)[1], 1.0).log_prob(values).sum()
    determinants = sum(torch.logdet(torch.eye(len(b)) + N * b) for b in blocks.values())
    squares = sum(p.square().sum() for p in model.parameters())
    evidence = log_p - 0.5 * (squares + determinants)
    torch.testing.assert_close(
        posterior.log_marginal_likelihood(), evidence, check_dtype=False
    )

    def losses(model, batch):
        logits, value = model(batch[0])
        each = fn.cross_entropy(logits, batch[1][0], reduction="none")
        return each + 0.5 * (value - batch[1][1]).square().sum(1)

    scores = influence(model, losses, batches, batches, factors=factors, damping=0.1)
    expected = 0.0
    for name, block in blocks.items():
        rows = []
        for n in range(N):
            loss = losses(model, (x[n : n + 1], (labels[n : n + 1], values[n : n + 1])))
            layer = model.get_submodule(name)
            weight, bias = torch.autograd.grad(loss, [*layer.parameters()])
            rows.append(torch.cat([weight.mT, bias[None]]).flatten())
        rows = torch.stack(rows)
        damped = block + 0.1 * torch.eye(len(block))
        expected = expected + rows @ torch.linalg.solve(damped, rows.mT)
    torch.testing.assert_close(scores.scores, expected, check_dtype=False)
