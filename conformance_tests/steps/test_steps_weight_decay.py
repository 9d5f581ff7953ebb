"""Weight decay: a term of the objective, or beside the step."""

import numpy as np
import pytest

from kfac_core.steps import (
    add_l2,
    curvature_of_products,
    decay_decoupled,
)

from ..builders import reference
from ..builders.steps_reference import BIAS, SIZE, flat, put, tree
from ..builders.tolerances import assert_close, assert_differs

ETA = 0.3


def not_biases(block, name):
    """Say which parameters decay in these tests."""
    return name != "bias"


@pytest.fixture(params=["all", "weights"])
def decay(request):
    """The diagonal of L, and the function that says the same."""
    if request.param == "all":
        return np.ones(SIZE), None
    L = np.ones(SIZE)
    L[BIAS] = 0.0
    return L, not_biases


@pytest.fixture
def vectors(rng):
    """A matrix, parameters, a gradient and two directions, dense."""
    return reference.spd(rng, SIZE), *rng.normal(size=(4, SIZE))


def test_the_term_is_in_the_gradient_and_the_curvature(backend, dtype, vectors, decay):
    """Both are those of ``h + eta/2 theta . L theta``."""
    F, theta, grad, *directions = vectors
    L, only = decay
    options = {"weight_decay": ETA, "only": only}
    there = [put(backend, d, dtype) for d in directions]

    gradient = add_l2(put(backend, grad, dtype), put(backend, theta, dtype), **options)
    products = [
        add_l2(put(backend, F @ d, dtype), there[i], **options)
        for i, d in enumerate(directions)
    ]
    C = curvature_of_products(there, products)

    assert_close(flat(backend, gradient), grad + ETA * L * theta, "product", dtype)
    D = np.stack(directions, axis=1)
    expected = D.T @ (F + ETA * np.diag(L)) @ D
    assert_close(backend.to_numpy(C), expected, "product", dtype)
    assert_differs(expected, D.T @ F @ D)


def test_decoupled_decay_shrinks_beside_the_step(backend, dtype, vectors, decay):
    """It is ``delta - lr eta L theta``; a zero gradient still decays."""
    _, theta, delta, *_ = vectors
    L, only = decay

    for step in (delta, np.zeros(SIZE)):
        got = decay_decoupled(
            put(backend, step, dtype),
            put(backend, theta, dtype),
            weight_decay=ETA,
            learning_rate=backend.asarray(0.5, dtype),
            only=only,
        )

        expected = step - 0.5 * ETA * L * theta
        assert_close(flat(backend, got), expected, "roundoff", dtype)


def test_parameters_without_decay_are_copied():
    """No result is an array of the caller's, and nothing at all may decay."""
    vector = tree(np.arange(1.0, SIZE + 1))
    options = {"weight_decay": ETA, "only": lambda block, name: False}

    got = add_l2(vector, vector, **options)

    np.testing.assert_array_equal(got["fc1"]["bias"], vector["fc1"]["bias"])
    assert not np.shares_memory(got["fc1"]["bias"], vector["fc1"]["bias"])
