"""`KFACOptimizer` against dense quadratic models, whose Fisher matrix is made by rows."""

from __future__ import annotations

import copy
import itertools
import math

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as fn  # noqa: E402

import kfac_core as kc  # noqa: E402
from kfac_core_shims.torch import KFAC, KFACOptimizer  # noqa: E402

from ..builders import torch_zoo  # noqa: E402

DAMPING, DECAY = 0.03, 0.9
OPTIONS = {
    "damping": DAMPING,
    "decay": DECAY,
    "fisher": "exact",
    "min_damping": 1e-12,
    "refresh_every": 1,
}


@pytest.fixture(autouse=True)
def seeded():
    """Models and data are the same in every run."""
    torch.manual_seed(0)


def network():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch(n=7):
    return torch.randn(n, 4, dtype=torch.float64), torch.randint(3, (n,))


def parameters(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def dense(model, x, *, weight=None):
    """Return the exact Fisher matrix of a cross-entropy's mean, row by row."""
    parameters, likelihood = [*model.parameters()], kc.losses.Categorical()
    return torch_zoo.fisher(model(x), parameters, likelihood, weight=weight)


def gradient_of(model, loss):
    return torch.cat(
        [g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))]
    )


def natural_gradient(model, loss_of, **options):
    """Return the natural gradient of `KFAC` itself on a copy of the model."""
    twin = copy.deepcopy(model)
    options = {"likelihood": "categorical", "damping_rule": "factored", **options}
    kfac = KFAC(twin, kl_clip=None, **options)
    loss_of(twin).backward()
    kfac.step()
    return torch.cat([p.grad.reshape(-1) for p in twin.parameters()])


def optimizer_of(model, **options):
    return KFACOptimizer(model, likelihood="categorical", **{**OPTIONS, **options})


def assert_minimum(delta, gradient, matrix, directions):
    """Assert that no step along the directions makes the quadratic model smaller."""
    residual = gradient + matrix @ delta
    for d in directions:
        scale = gradient.norm() * d.norm()
        assert abs(float(residual @ d)) < 1e-10 * float(scale)


@pytest.mark.parametrize("eta", [0.0, 0.05])
def test_steps_minimize_the_dense_quadratic_model(eta):
    """The first along the natural gradient, the next along the last change as well."""
    model, (x, y) = network(), batch()
    optimizer = optimizer_of(model, weight_decay=eta, adapt_every=10)
    last = None
    for _ in range(3):
        theta = parameters(model)
        gradient = gradient_of(model, fn.cross_entropy(model(x), y)) + eta * theta
        F = dense(model, x) + (DAMPING + eta) * torch.eye(len(theta), dtype=theta.dtype)

        optimizer.step(lambda: fn.cross_entropy(model(x), y))

        delta = parameters(model) - theta
        natural = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        directions = [natural] if last is None else [natural, last]
        assert_minimum(delta, gradient, F, directions)
        basis = torch.stack(directions, 1)
        rest = delta - basis @ torch.linalg.lstsq(basis, delta[:, None]).solution[:, 0]
        assert float(rest.norm()) < 1e-10 * float(delta.norm())
        assert optimizer.metrics()["accepted"] == 1.0
        last = delta


def test_a_step_within_autocast_is_that_of_a_closure_within_it():
    """Of rounded features; its rate minimizes the model of exact derivatives."""
    torch.manual_seed(0)
    inside = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    outside, start = copy.deepcopy(inside), copy.deepcopy(inside)
    x, y = torch.randn(9, 4).bfloat16(), torch.randint(3, (9,))
    optimizers = [optimizer_of(m, weight_decay=0.05) for m in (inside, outside)]
    half = torch.autocast("cpu", torch.bfloat16)

    for step in range(3):
        loss = optimizers[0].step(half(lambda: fn.cross_entropy(inside(x), y)))
        with half:
            assert loss == optimizers[1].step(lambda: fn.cross_entropy(outside(x), y))
        assert optimizers[0].metrics()["accepted"] == 1.0
        assert optimizers[0].metrics() == optimizers[1].metrics()
        if step == 0:
            theta, natural = (
                parameters(start),
                -torch.cat([p.grad.reshape(-1) for p in inside.parameters()]),
            )
            with half:
                gradient = gradient_of(start, fn.cross_entropy(start(x), y))
            F = dense(start.double(), x.double()) + (DAMPING + 0.05) * torch.eye(51)
            g, d = (gradient + 0.05 * theta).double(), natural.double()
            rate = -(g @ d) / (d @ F @ d)
            change = (parameters(inside) - theta).double()
            torch.testing.assert_close(change, rate * d, rtol=1e-4, atol=1e-6)


def test_data_parallel_on_one_device_is_its_module():
    model, (x, y) = network(), batch()
    wrapped = nn.DataParallel(copy.deepcopy(model))
    for one in (model, wrapped):
        optimizer_of(one).step(lambda one=one: fn.cross_entropy(one(x), y))
    assert torch.equal(parameters(model), parameters(wrapped))


def test_the_direction_is_that_of_kfac():
    """The first step is a multiple of K-FAC's own natural gradient."""
    model, (x, y) = network(), batch()
    theta = parameters(model)
    options = {"damping": DAMPING, "decay": DECAY, "fisher": "exact"}
    natural = natural_gradient(model, lambda m: fn.cross_entropy(m(x), y), **options)

    optimizer = optimizer_of(model)
    optimizer.step(lambda: fn.cross_entropy(model(x), y))

    rate = optimizer.metrics()["rate"]
    assert rate > 0
    torch.testing.assert_close(parameters(model) - theta, -rate * natural)


def test_least_squares_are_solved_in_one_step():
    """One linear layer: K-FAC is exact, and the best rate of the exact model is one."""
    model = nn.Linear(4, 3).double()
    x = torch.randn(20, 4, dtype=torch.float64)
    y = torch.randn(20, 3, dtype=torch.float64)
    ones = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    best = torch.linalg.lstsq(ones, y).solution.T
    optimizer = KFACOptimizer(
        model,
        likelihood=nn.MSELoss(),
        fisher="exact",
        damping=1e-12,
        min_damping=0.0,
        damping_rule="exact",
    )

    optimizer.step(lambda: fn.mse_loss(model(x), y))

    found = torch.cat([model.weight, model.bias[:, None]], 1).detach()
    torch.testing.assert_close(found, best, rtol=1e-6, atol=1e-8)
    assert optimizer.metrics()["rate"] == pytest.approx(1.0, rel=1e-6)


def test_the_model_has_the_dropout_of_the_loss():
    """The minimum is that of the layer without the inputs that were dropped."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(30, 3, bias=False)).double()
    x, y = torch.randn(40, 30, dtype=torch.float64), torch.randint(3, (40,))
    torch.manual_seed(5)
    dropped = model[0](x)
    theta = parameters(model)
    gradient = gradient_of(model[1], fn.cross_entropy(model[1](dropped), y))
    F = dense(model[1], dropped) + DAMPING * torch.eye(len(theta), dtype=theta.dtype)
    other = dense(model[1], x) + DAMPING * torch.eye(len(theta), dtype=theta.dtype)

    torch.manual_seed(5)
    optimizer_of(model).step(lambda: fn.cross_entropy(model(x), y))

    delta = parameters(model) - theta
    natural = model[1].weight.grad.reshape(-1)
    assert_minimum(delta, gradient, F, [natural])
    with pytest.raises(AssertionError):
        assert_minimum(delta, gradient, other, [natural])


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_closures_and_reductions_give_one_step(own, reduction):
    """Whether the closure differentiates itself, and sum or mean, is no difference."""
    model, (x, y) = network(), batch()
    plain = copy.deepcopy(model)
    optimizer = optimizer_of(model, reduction=reduction, weight_decay=0.01)
    reference = optimizer_of(plain, weight_decay=0.01)

    def closure():
        optimizer.zero_grad()
        loss = fn.cross_entropy(model(x), y, reduction=reduction)
        if own:
            loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
        reference.step(lambda: fn.cross_entropy(plain(x), y))

    torch.testing.assert_close(parameters(model), parameters(plain))
    assert optimizer.damping == pytest.approx(reference.damping)


def test_parameters_in_no_group_are_cleared_too():
    """Their gradients are in the direction of a weight that has a bias."""
    model, (x, y) = network(), batch()
    plain = copy.deepcopy(model)

    def weights(of):
        return [p for name, p in of.named_parameters() if name.endswith("weight")]

    optimizer = optimizer_of(model, params=weights(model))
    reference = optimizer_of(plain, params=weights(plain))
    for _ in range(3):
        optimizer.step(lambda: fn.cross_entropy(model(x), y))
        plain.zero_grad()
        reference.step(lambda: fn.cross_entropy(plain(x), y))
    torch.testing.assert_close(parameters(model), parameters(plain), rtol=0, atol=0)


def test_a_closure_that_differentiates_may_return_a_number():
    """As ``loss.item()``; one that returns nothing is named."""
    model, (x, y) = network(), batch()
    plain = copy.deepcopy(model)
    optimizer, reference = optimizer_of(model), optimizer_of(plain)

    def closure():
        loss = fn.cross_entropy(model(x), y)
        loss.backward()
        return loss.item()

    for _ in range(3):
        found = optimizer.step(closure)
        expected = reference.step(lambda: fn.cross_entropy(plain(x), y))
        assert found.item() == expected.item()
    torch.testing.assert_close(parameters(model), parameters(plain))
    theta = parameters(model)
    with pytest.raises(kc.ArgumentError, match=r"to return the loss.*got a NoneType"):
        optimizer.step(lambda: closure() and None)
    assert torch.equal(parameters(model), theta)


def test_rows_that_the_loss_ignores_have_no_curvature():
    """``ignore_index``: the model is that of the rows that count."""
    model, (x, y) = network(), batch()
    y[2] = y[5] = -100
    counted = y != -100
    theta = parameters(model)
    gradient = gradient_of(model, fn.cross_entropy(model(x), y))
    F = dense(model, x, weight=counted) + DAMPING * torch.eye(
        len(theta), dtype=theta.dtype
    )
    every = dense(model, x) + DAMPING * torch.eye(len(theta), dtype=theta.dtype)

    optimizer_of(model).step(lambda: fn.cross_entropy(model(x), y))

    delta = parameters(model) - theta
    natural = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    assert_minimum(delta, gradient, F, [natural])
    with pytest.raises(AssertionError):
        assert_minimum(delta, gradient, every, [natural])


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_batch_in_which_no_row_counts_has_no_curvature(decay):
    """Its step minimizes the penalty, which is quadratic, as the first one and later."""
    model, (x, y) = network(), batch()
    optimizer = optimizer_of(model, weight_decay=decay, adapt_every=1000)
    ignored = torch.full_like(y, -100)
    for labels in (ignored, y, ignored, y):
        theta = parameters(model)
        loss = optimizer.step(
            lambda labels=labels: (
                fn.cross_entropy(model(x), labels, reduction="sum") / 7
            )
        )
        if labels is y:
            assert fn.cross_entropy(model(x), y) < loss
        elif optimizer.kfac.steps == 1 or not decay:
            torch.testing.assert_close(
                parameters(model), theta * DAMPING / (DAMPING + decay)
            )
        else:
            assert parameters(model).norm() < theta.norm()


def test_parameters_without_a_block_have_a_rate_of_their_own():
    """A scale that no module holds moves along its gradient."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.scale = network(), nn.Parameter(torch.ones(3).double())

        def forward(self, x):
            return self.inner(x) * self.scale

    model, (x, y) = Scaled(), batch()
    theta = parameters(model)
    gradient = gradient_of(model, fn.cross_entropy(model(x), y))
    F = dense(model, x) + DAMPING * torch.eye(len(theta), dtype=theta.dtype)
    with pytest.warns(UserWarning, match="scale"):
        optimizer = optimizer_of(model)

    optimizer.step(lambda: fn.cross_entropy(model(x), y))

    delta = parameters(model) - theta
    names = [n for n, p in model.named_parameters() for _ in range(p.numel())]
    alone = torch.tensor([n == "scale" for n in names])
    natural = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    zero = torch.zeros(())
    directions = [torch.where(alone, zero, natural), torch.where(alone, gradient, zero)]
    assert_minimum(delta, gradient, F, directions)
    assert optimizer.metrics()["rate_of_others"] > 0


def test_the_damping_falls_where_the_model_is_exact_and_rises_where_it_is_not():
    """On a linear Gaussian model the prediction is the change; on a steep one, not."""
    linear = nn.Linear(4, 2).double()
    x = torch.randn(9, 4, dtype=torch.float64)
    z = torch.randn(9, 2, dtype=torch.float64)
    optimizer = KFACOptimizer(
        linear, likelihood="gaussian", damping=0.1, fisher="exact", refresh_every=1
    )

    def half_squares():
        return 0.5 * (linear(x) - z).square().sum(-1).mean()

    for _ in range(5):
        optimizer.step(half_squares)
        assert optimizer.metrics()["reduction_ratio"] == pytest.approx(1.0, abs=1e-8)
    assert optimizer.damping == pytest.approx(0.1 * 0.95**5)

    class Steep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1, bias=False).double()

        def forward(self, x):
            return torch.atan(self.layer(x))

    steep, one = Steep(), torch.ones(1, 1, dtype=torch.float64)
    nn.init.constant_(steep.layer.weight, 3.0)
    optimizer = KFACOptimizer(
        steep, likelihood="gaussian", damping=1e-4, min_damping=1e-6, fisher="exact"
    )
    optimizer.step(lambda: 0.5 * steep(one).square().mean())

    # Newton's step for the root of an arc tangent diverges from 3.
    assert optimizer.metrics()["accepted"] == 0.0
    assert steep.layer.weight.item() == 3.0
    assert optimizer.damping == pytest.approx(4e-4)


def test_a_forward_pass_counts_once_in_buffers_and_random_numbers():
    """Running averages and dropout are those of one call of the closure."""
    model = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3)
    ).double()
    plain, (x, y) = copy.deepcopy(model), batch()
    optimizer = optimizer_of(model)
    torch.manual_seed(3)
    expected = fn.cross_entropy(plain(x), y)
    after = torch.get_rng_state()

    torch.manual_seed(3)
    loss = optimizer.step(lambda: fn.cross_entropy(model(x), y))

    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(model[1].running_mean, plain[1].running_mean)
    assert int(model[1].num_batches_tracked) == 1
    assert torch.equal(torch.get_rng_state(), after)


def test_a_resumed_run_is_the_same_to_the_bit():
    """Damping, last change, statistics and operators are all in the state."""
    data = [batch() for _ in range(6)]

    def made():
        torch.manual_seed(1)
        model = network()
        return model, optimizer_of(model, fisher="gradients", refresh_every=2)

    def train(model, optimizer, part):
        for x, y in part:
            optimizer.step(lambda x=x, y=y: fn.cross_entropy(model(x), y))

    model, optimizer = made()
    train(model, optimizer, data)
    first, begun = made()
    train(first, begun, data[:3])
    second, resumed = made()
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(begun.state_dict())
    train(second, resumed, data[3:])

    assert torch.equal(parameters(second), parameters(model))
    assert resumed.damping == optimizer.damping
    with pytest.raises(kc.StateError, match="curvature"):
        resumed.load_state_dict(torch.optim.SGD(second.parameters()).state_dict())


@pytest.mark.filterwarnings("ignore:.*assuming the intent is to:UserWarning")
def test_functions_of_distributed_checkpoint_have_the_curvature(tmp_path):
    """Without it a resumed run would begin with other factors; in memory, and in files."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import state_dict as functions

    def made():
        torch.manual_seed(1)
        model = network()
        return model, optimizer_of(model, refresh_every=2)

    model, optimizer = made()
    data = [batch() for _ in range(4)]
    for x, y in data[:3]:
        optimizer.step(lambda x=x, y=y: fn.cross_entropy(model(x), y))
    saved = {
        "model": copy.deepcopy(model.state_dict()),
        "optimizer": functions.get_optimizer_state_dict(model, optimizer),
    }
    checkpoint.save(saved, checkpoint_id=tmp_path / "files")
    reader = checkpoint.FileSystemReader(tmp_path / "files")
    entries = reader.read_metadata().state_dict_metadata
    for name, site in optimizer.kfac.sites.items():
        first = f"optimizer.state.{name}.weight.curvature.{name}"
        assert (first in entries) == bool(site.trained)
    x, y = data[3]
    optimizer.step(lambda: fn.cross_entropy(model(x), y))
    for read in (False, True):
        other, resumed = made()
        state = saved
        if read:
            state = {
                "model": other.state_dict(),
                "optimizer": functions.get_optimizer_state_dict(other, resumed),
            }
            checkpoint.load(state, checkpoint_id=tmp_path / "files")
        other.load_state_dict(state["model"])
        functions.set_optimizer_state_dict(other, resumed, state["optimizer"])
        resumed.step(lambda other=other: fn.cross_entropy(other(x), y))

        torch.testing.assert_close(parameters(other), parameters(model))
        assert math.isclose(resumed.damping, optimizer.damping)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("damping", [1e-6, 1e-2, 1.0])
def test_plausible_settings_lower_the_loss(scale, damping):
    """Of a small regression, from any damping and initial scale: never NaN, never up."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(scale)
    x = torch.randn(64, 3)
    z = torch.sin(3 * x[:, :1]) + x[:, 1:2] * x[:, 2:]
    optimizer = KFACOptimizer(model, likelihood=nn.MSELoss(), damping=damping)

    losses = [
        float(optimizer.step(lambda: fn.mse_loss(model(x), z))) for _ in range(30)
    ]

    assert all(map(math.isfinite, losses))
    assert all(b <= a * (1 + 1e-5) for a, b in itertools.pairwise(losses))
    assert losses[-1] < 0.9 * losses[0]


def test_invalid_options_and_closures_raise():
    """Options and closures; the parameters stay."""
    model, (x, y) = network(), batch()
    theta = parameters(model)
    for option, value in [
        ("damping", -1.0),
        ("damping", "x"),
        ("lr", math.nan),
        ("adapt_factor", 1.0),
        ("adapt_every", 0),
        ("weight_decay", -0.1),
        ("kl_clip", 1e-3),
        ("grad_scaler", None),
        ("fisher", "empirical"),
        ("output", None),
    ]:
        with pytest.raises(kc.KFACError, match=option):
            KFACOptimizer(model, **{option: value})
    with pytest.raises(kc.ConventionError, match="params"):
        KFACOptimizer(model, network().parameters())
    optimizer = optimizer_of(model)
    with pytest.raises(kc.UnsupportedError, match="state_dict"):
        copy.deepcopy(optimizer)
    with pytest.raises(kc.NotReadyError, match="closure"):
        optimizer.step(lambda: torch.zeros(()))
    with pytest.raises(kc.NotReadyError, match="closure"):
        optimizer.step(lambda: sum(p.sum() for p in model.parameters()))
    with pytest.raises(kc.NotFiniteError):
        optimizer.step(lambda: fn.cross_entropy(model(x * math.nan), y))

    assert torch.equal(parameters(model), theta)
    first, second = list(model.parameters())[:2], list(model.parameters())[2:]
    groups = [{"params": first, "lr": 0.5}, {"params": second}]
    with pytest.raises(kc.ConventionError, match="lr"):
        optimizer_of(model, params=groups).step(lambda: fn.cross_entropy(model(x), y))


def test_attention_has_forward_derivatives():
    """A transformer's layer is trained like any other."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(40, 3))
    x, y = torch.randn(6, 5, 8), torch.randint(3, (6,))
    optimizer = KFACOptimizer(model)

    losses = [
        float(optimizer.step(lambda: fn.cross_entropy(model(x), y))) for _ in range(8)
    ]

    assert losses[-1] < 0.2 * losses[0]


def test_a_step_without_forward_derivatives_changes_nothing():
    """Found out only when one is taken, after the curvature has seen the batch."""

    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx, z):
            return z.clone()

        @staticmethod
        def backward(ctx, g):
            return g

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.rounds = network(), False

        def forward(self, x):
            z = self.body(x)
            return Rounded.apply(z) if self.rounds else z

    model, (x, y) = Model(), batch()
    optimizer = KFACOptimizer(model, **OPTIONS)
    optimizer.step(lambda: fn.cross_entropy(model(x), y))
    kfac, before = optimizer.kfac, parameters(model)
    held, damping = kfac.estimator.state, kfac.damping

    model.rounds = True
    with pytest.raises(kc.UnsupportedError, match="no forward derivative"):
        optimizer.step(lambda: fn.cross_entropy(model(x), y))

    assert kfac.steps == 1
    assert kfac.estimator.state is held
    assert kfac.damping == damping
    assert torch.equal(parameters(model), before)
    model.rounds = False
    optimizer.step(lambda: fn.cross_entropy(model(x), y))
    assert kfac.steps == 2
    assert not torch.equal(parameters(model), before)


def test_gradients_of_the_second_call_are_not_added():
    """A closure that differentiates need not clear, and leaves what the other leaves."""
    x, y = batch()
    gradients = []
    for backward in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 3).double()

        def closure(model=model, backward=backward):
            loss = fn.cross_entropy(model(x), y)
            if backward:
                loss.backward()
            return loss

        optimizer_of(model).step(closure)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))

    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("backward", [False, True])
def test_an_error_at_the_new_parameters_changes_nothing(backward):
    """Not the numbers to come either: the next step is the same to the bit."""
    x, y = batch()
    others = []
    for fails in (False, True):
        torch.manual_seed(0)
        layers = [nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 3)]
        model = nn.Sequential(*layers).double()
        optimizer = optimizer_of(model)
        calls = []

        def closure(model=model, calls=calls):
            calls.append(1)
            if len(calls) == 4:
                raise KeyboardInterrupt
            loss = fn.cross_entropy(model(x), y)
            if backward:
                loss.backward()
            return loss

        optimizer.step(closure)
        if fails:
            before = copy.deepcopy((model.state_dict(), optimizer.metrics()))
            damping = optimizer.damping
            with pytest.raises(KeyboardInterrupt):
                optimizer.step(closure)
            after = model.state_dict(), optimizer.metrics()
            torch.testing.assert_close(after, before, rtol=0, atol=0)
            assert optimizer.damping == damping
            assert optimizer.kfac.steps == 1
            assert all(p.grad is None for p in model.parameters())
        calls += [1, 1]
        optimizer.step(closure)
        gradients = [p.grad.flatten() for p in model.parameters()]
        others.append(torch.cat([parameters(model), *gradients]))

    assert torch.equal(*others)
