"""A whole step inside ``jax.jit`` and ``jax.vmap``, and no gradient graph in any result."""

from __future__ import annotations

import numpy as np

import kfac_core as kc
from kfac_core.array.structure import leaves

from ..builders import reference
from ..builders.steps_reference import SIZE, put, tree
from ..builders.tolerances import assert_close
from ..builders.tracing import Traced


def step(theta, grad, direction, before, products, losses, damping):
    """Make a step with every part of the package, looking at no value.

    The model is tried at two dampings as if at two gammas; the step is taken back where
    its model was not finite or the loss grew.
    """
    clip = kc.steps.kl_clip(
        grad, direction, learning_rate=0.5, bound=0.2, check="status"
    )
    directions = [kc.steps.linear_combination([-clip.scale], [direction]), before]
    options = {"weight_decay": 0.01, "only": lambda block, name: name != "bias"}
    products = [
        kc.steps.add_l2(product, d, **options)
        for product, d in zip(products, directions, strict=True)
    ]
    curvature = kc.steps.curvature_of_products(directions, products)

    def attempt(lam):
        model = kc.steps.quadratic_model(
            kc.steps.add_l2(grad, theta, **options),
            directions,
            curvature=curvature,
            damping=lam,
        )
        found = model.minimize(check="status")
        return model.change(found.coefficients, damped=True), {
            "coefficients": found.coefficients,
            "status": found.status | clip.status,
        }

    best = kc.steps.search_gamma(attempt, damping, factor=0.5)
    delta = kc.steps.linear_combination(best.step["coefficients"], directions)
    delta = kc.steps.decay_decoupled(delta, theta, weight_decay=0.02, learning_rate=1.0)
    proposed = kc.steps.linear_combination([1.0, 1.0], [theta, delta])
    accepted = kc.steps.is_accepted(*losses) & (best.step["status"] == 0)
    after, velocity = kc.steps.select(accepted, (proposed, delta), (theta, before))
    return {
        "theta": after,
        "velocity": velocity,
        "gamma": best.gamma,
        "rho": kc.steps.reduction_ratio(*losses, predicted=best.change),
        "status": best.step["status"],
    }


def arguments(put_vector, put_scalar, rng, *, trouble=None, losses=(2.0, 1.5)):
    """Return what `step` takes, with one thing wrong on demand."""
    theta, grad, direction, before = rng.normal(size=(4, SIZE))
    F = reference.spd(rng, SIZE)
    if trouble == "first step":
        before = np.zeros(SIZE)
    if trouble == "parallel":
        before = -3.0 * direction
    if trouble == "not finite":
        grad = np.where(np.arange(SIZE) == 5, np.nan, grad)
    products = [put_vector(F @ d) for d in (direction, before)]
    vectors = [put_vector(x) for x in (theta, grad, direction, before)]
    return (*vectors, products, [put_scalar(x) for x in losses], put_scalar(0.3))


def host(nested, prefix=""):
    """Return the arrays of a nested dict on the host, by path."""
    found = {}
    for name, x in nested.items():
        if isinstance(x, dict):
            found |= host(x, f"{prefix}{name}.")
        else:
            found[prefix + name] = np.array(x)
    return found


TROUBLES = [
    # what is wrong, the losses, the status, whether the step stands
    (None, (2.0, 1.5), 0, True),
    (None, (2.0, 2.5), 0, False),
    (None, (2.0, np.nan), 0, False),
    ("first step", (2.0, 1.5), 0, True),
    ("parallel", (2.0, 1.5), kc.Status.NOT_POSITIVE, False),
    ("not finite", (2.0, 1.5), kc.Status.MATRIX_NOT_FINITE, False),
]


def test_a_traced_step_is_the_same_step(jax, requires_backend):
    """One compiled program agrees with NumPy, in good steps and in every fallback."""
    backend = requires_backend("jax")
    counted = Traced(step)
    traced = jax.jit(counted)

    for trouble, losses, status, stands in TROUBLES:

        def made(put_vector, put_scalar, trouble=trouble, losses=losses):
            rng = np.random.default_rng(5)
            return arguments(
                put_vector, put_scalar, rng, trouble=trouble, losses=losses
            )

        there = made(
            lambda x: put(backend, x, "float64"),
            lambda x: backend.asarray(x, "float64"),
        )
        here = made(tree, np.asarray)
        got, expected = host(traced(*there)), host(step(*here))

        assert int(got["status"]) == status
        for path, x in expected.items():
            if path == "rho" and np.isinf(x):
                assert got[path] == x
                continue
            assert_close(got[path], x, "identity", "float64")
        old = host(here[0])["fc1.weight"]
        assert np.array_equal(got["theta.fc1.weight"], old) is not stands
    assert counted.traces == 1


def test_the_derivative_of_a_traced_step_is_right(jax, requires_backend):
    """With respect to the gradient, beside a central difference along a direction."""
    backend = requires_backend("jax")
    rng = np.random.default_rng(6)
    theta, grad, *rest = arguments(
        lambda x: put(backend, x, "float64"),
        lambda x: backend.asarray(x, "float64"),
        np.random.default_rng(5),
    )

    def entry(grad):
        return step(theta, grad, *rest)["theta"]["fc1"]["weight"][0, 0]

    derivative = jax.jit(jax.grad(entry))(grad)

    along = jax.tree.map(lambda x: backend.asarray(rng.normal(size=x.shape)), grad)
    moved = [
        jax.tree.map(lambda g, d, h=h: g + h * d, grad, along) for h in (1e-6, -1e-6)
    ]
    plus, minus = (float(jax.jit(entry)(point)) for point in moved)
    terms = jax.tree.map(lambda a, b: float((a * b).sum()), derivative, along)
    np.testing.assert_allclose(
        sum(jax.tree.leaves(terms)), (plus - minus) / 2e-6, rtol=1e-5
    )


def test_no_graph_is_left(requires_backend):
    """Results of tensors that require gradients do not; the tensors still do."""
    backend = requires_backend("torch", adapter=True)
    given = []

    def wanting(x):
        given.append(x.requires_grad_())
        return x

    def vector(flat):
        return {
            block: {name: wanting(x) for name, x in parameters.items()}
            for block, parameters in put(backend, flat, "float64").items()
        }

    made = arguments(
        vector,
        lambda x: wanting(backend.asarray(x, "float64")),
        np.random.default_rng(5),
    )
    result = step(*made)
    theta, grad, direction, before, _, losses, damping = made
    model = kc.steps.quadratic_model(
        grad,
        [direction, before],
        curvature=wanting(backend.asarray(np.eye(2), "float64")),
        damping=damping,
    )
    trial = kc.steps.search_gamma(
        lambda gamma: (gamma * losses[0], theta), damping, factor=0.5
    )
    kept = kc.steps.select(wanting(backend.asarray(1.0, "float64")) > 0, theta, before)

    found = [x for _, x in leaves({**result, "model": model, "kept": kept})]
    found += [trial.gamma, model.change(losses, damped=True)]
    assert len(found) > 10
    assert not any(x.requires_grad for x in found)
    assert all(x.requires_grad for x in given)
