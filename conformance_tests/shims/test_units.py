"""One problem takes the same steps in each notation of its loss."""

from __future__ import annotations

import copy
import importlib
import inspect

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.integration import PerOutput, RowLoss
from kfac_core.losses import Gaussian, SquaredError
from kfac_core_shims import numpy as numpy_shim

N, D, P, STEPS = 12, 4, 3, 5


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_integrations_have_the_same_defaults(framework):
    """Those of `kfac_core.integration.defaults`, as far as a framework has the option."""
    pytest.importorskip(framework)
    module = importlib.import_module(f"kfac_core_shims.{framework}")
    parameters = inspect.signature(module.KFAC).parameters
    names = ["damping", "damping_rule", "decay", "kl_clip"]
    if framework != "jax":  # Statistics are the loop's own there.
        names += ["update_every", "refresh_every"]
    for name in names:
        expected = getattr(kc.integration.defaults, name.upper())
        assert parameters[name].default == expected, name


def _torch_notations(kind):
    """Return pairs of a likelihood for KFAC, and the loss that is differentiated."""
    torch = pytest.importorskip("torch")
    nn = torch.nn
    if kind == "gaussian":
        modules = [nn.MSELoss(), nn.MSELoss(reduction="sum")]

        def summed(z, y):
            return 0.5 * (z - y).square().sum() / len(z)

        tripled = SquaredError(scale=1.5), lambda z, y: 3 * summed(z, y)
        others = [(kind, summed), tripled]
    else:
        modules = [nn.BCEWithLogitsLoss(), nn.BCEWithLogitsLoss(reduction="sum")]

        def summed(z, y):
            return modules[1](z, y) / len(z)

        others = [(kind, summed), (kc.losses.Bernoulli(), summed)]
    return [*((m, m) for m in modules), *others]


def _assert_same(runs):
    """Compare parameters after a run with those of the first, in float32."""
    first = runs[0]
    for other in runs[1:]:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-6, atol=1e-6 * np.abs(a).max())


@pytest.mark.parametrize("fisher", ["gradients", "empirical"])
@pytest.mark.parametrize("rule", ["factored", "factored_unit_pi"])
@pytest.mark.parametrize("kind", ["gaussian", "bernoulli"])
def test_torch_steps_are_the_same_in_each_notation(kind, rule, fisher):
    """Also between statistics, and after a state that was saved there."""
    torch = pytest.importorskip("torch")
    from kfac_core_shims.torch import KFAC

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(D, 6), torch.nn.Tanh(), torch.nn.Linear(6, P)
    )
    x, y = torch.randn(STEPS, N, D), torch.rand(STEPS, N, P)
    # Steps that the clip shortens, by one number or one for each output, and steps that
    # it does not.
    shortened = []
    for clip in (1e-3, PerOutput(1e-3 / P), 1e3):
        options = {"fisher": fisher, "damping_rule": rule, "kl_clip": clip}
        runs = shortened if clip != 1e3 else []
        for likelihood, loss in _torch_notations(kind):
            own = copy.deepcopy(model)
            sgd = torch.optim.SGD(own.parameters(), lr=0.1)

            def attached(own=own, sgd=sgd, likelihood=likelihood, options=options):
                return KFAC(
                    own,
                    likelihood=likelihood,
                    lr=sgd,
                    update_every=2,
                    refresh_every=2,
                    **options,
                )

            kfac = attached()
            for step in range(STEPS):
                if step == 3:
                    state = kfac.state_dict()
                    kfac.remove()
                    kfac = attached()
                    kfac.load_state_dict(state)
                sgd.zero_grad()
                loss(own(x[step]), y[step]).backward()
                kfac.step()
                sgd.step()
            runs.append([p.detach().numpy() for p in own.parameters()])
        _assert_same(runs)


@pytest.mark.parametrize("kind", ["gaussian", "bernoulli"])
def test_the_quadratic_model_is_the_same_in_each_notation(kind):
    """With a penalty, and a damping that follows the loss."""
    torch = pytest.importorskip("torch")
    from kfac_core_shims.torch import KFACOptimizer

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(D, 6), torch.nn.Tanh(), torch.nn.Linear(6, P)
    ).double()
    x, y = torch.randn(N, D).double(), torch.rand(N, P).double()
    runs, dampings = [], []
    for likelihood, loss in _torch_notations(kind):
        own = copy.deepcopy(model)
        optimizer = KFACOptimizer(own, likelihood=likelihood, weight_decay=1e-2)
        for _ in range(STEPS + 1):
            optimizer.step(lambda own=own, loss=loss: loss(own(x), y))
        runs.append([p.detach().numpy() for p in own.parameters()])
        dampings.append(optimizer.damping)
    _assert_same(runs)
    np.testing.assert_allclose(dampings, dampings[0])


@pytest.mark.parametrize("likelihood", ["bernoulli", "categorical", "gaussian"])
def test_short_steps_of_classifiers_are_lengthened_in_torch_and_numpy(likelihood):
    """To the geometric mean of their squared length and a bound for each output."""
    torch = pytest.importorskip("torch")
    from kfac_core_shims.torch import KFAC

    rng = np.random.default_rng(0)
    x, dz = rng.normal(size=(N, D)), rng.normal(size=(N, P))
    g = x.T @ dz

    def direction_of(clip, rate=1.0):
        model = torch.nn.Linear(D, P, bias=False).double()
        kfac = KFAC(model, likelihood=likelihood, lr=rate, kl_clip=clip, fisher="exact")
        model.weight.data.zero_()
        model(torch.from_numpy(x)).backward(torch.from_numpy(dz))
        kfac.step()
        of_torch = model.weight.grad.numpy().T

        theta = {"fc": {"weight": np.zeros((D, P))}}
        options = {"likelihood": likelihood, "kl_clip": clip, "fisher": "exact"}
        kfac = numpy_shim.KFAC(theta, momentum=0.0, learning_rate=rate, **options)
        vectors = kfac.vectors(np.zeros((N, P)))
        kfac.observe("fc", kc.Batch(x, vectors, sources=len(vectors)))
        kfac.step({"fc": {"weight": g}})
        np.testing.assert_allclose(rate * of_torch, -theta["fc"]["weight"], rtol=1e-6)
        return of_torch

    plain = direction_of(None)
    scale = (1e6 * P / np.sum(g * plain)) ** 0.25 if likelihood != "gaussian" else 1.0
    # Also at a small rate, as at the start of a warmup: SGD's momentum keeps directions.
    for rate in (1.0, 1e-9):
        longer = direction_of(PerOutput(1e6), rate)
        np.testing.assert_allclose(longer, scale * plain, rtol=1e-9)
    np.testing.assert_allclose(direction_of(1e6), plain, rtol=1e-9)


@pytest.mark.parametrize("exact", [False, True])
def test_numpy_steps_are_the_same_in_each_notation(exact):
    """By the KL clip, or by the loss and its exact curvature."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(N, D)), rng.normal(size=(N, P))
    start = rng.normal(size=(D, P))
    mean = RowLoss(
        likelihood=Gaussian(variance=1.0), factor=2.0, mean_over_outputs=True
    )
    runs = []
    each = PerOutput(1e-4)
    for likelihood, c, clip in (("gaussian", 1.0, 1e-4 * P), (mean, 2.0 / P, each)):
        theta = {"fc": {"weight": start.copy()}}
        W = theta["fc"]["weight"]
        kfac = numpy_shim.KFAC(
            theta, likelihood=likelihood, kl_clip=clip, update_every=2
        )
        for _ in range(STEPS):
            if kfac.wants_statistics:
                g = kfac.vectors(x @ W)
                kfac.observe("fc", kc.Batch(x, g, sources=len(g)))
            given = {}
            if exact:

                def curvature(directions, c=c):
                    changes = [x @ d["fc"]["weight"] for d in directions]
                    return c * kc.steps.curvature_of_outputs(
                        changes, changes, examples=N
                    )

                def loss(c=c, W=W):
                    return c * 0.5 * np.square(x @ W - y).sum() / N

                given = {"curvature": curvature, "loss": loss}
            kfac.step({"fc": {"weight": c * x.T @ (x @ W - y) / N}}, **given)
        runs.append([W])
    _assert_same(runs)


def test_jax_steps_are_the_same_in_each_notation():
    jax = pytest.importorskip("jax")
    from kfac_core_shims.jax import KFACOptimizer

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(N, D)), rng.normal(size=(N, P))
    start = {"W": jax.numpy.asarray(rng.normal(size=(D, P)), "float32")}
    x, y = (jax.numpy.asarray(a, "float32") for a in (x, y))
    runs, losses = [], []
    for likelihood in ("gaussian", SquaredError(scale=1.0)):
        params = jax.tree.map(jax.numpy.copy, start)
        optimizer = KFACOptimizer(
            lambda params, x: jax.numpy.tanh(x @ params["W"]),
            params,
            x,
            likelihood=likelihood,
            l2=1e-2,
        )
        state = optimizer.init(params)
        for step in range(STEPS):
            key = jax.random.key(step)
            params, state, progress = optimizer.step(params, state, x, y, key)
        runs.append([np.asarray(params["W"])])
        losses.append(float(progress.loss))
    _assert_same(runs)
    np.testing.assert_allclose(losses[1], 2 * losses[0], rtol=1e-6)
