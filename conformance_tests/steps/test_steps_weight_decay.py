"""Weight decay: a term of the objective, or beside the step."""

import numpy as np
import pytest

from kfac_core.errors import ShapeError
from kfac_core.steps import (
    add_l2,
    curvature_of_products,
    decay_decoupled,
    l2_curvature,
    l2_penalty,
    quadratic_model,
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


def test_the_term_is_in_the_loss_the_gradient_and_the_curvature(
    backend, dtype, vectors, decay
):
    """All are those of ``h + eta/2 theta . L theta``."""
    F, theta, grad, *directions = vectors
    L, only = decay
    options = {"weight_decay": ETA, "only": only}
    there = [put(backend, d, dtype) for d in directions]

    penalty = l2_penalty(put(backend, theta, dtype), **options)
    gradient = add_l2(put(backend, grad, dtype), put(backend, theta, dtype), **options)
    product = add_l2(put(backend, F @ directions[0], dtype), there[0], **options)
    small = l2_curvature(there, **options)

    assert_close(
        backend.to_numpy(penalty), 0.5 * ETA * theta @ (L * theta), "product", dtype
    )
    assert_close(flat(backend, gradient), grad + ETA * L * theta, "product", dtype)
    expected = (F + ETA * np.diag(L)) @ directions[0]
    assert_close(flat(backend, product), expected, "product", dtype)
    D = np.stack(directions, axis=1)
    assert_close(backend.to_numpy(small), ETA * D.T * L @ D, "product", dtype)


def test_both_ways_into_the_model_are_one(backend, dtype, vectors, decay):
    """``(F + eta L) d`` as products, or ``eta d . L d'`` added to ``d . F d'``."""
    F, _, grad, *directions = vectors
    _, only = decay
    options = {"weight_decay": ETA, "only": only}
    there = [put(backend, d, dtype) for d in directions]
    products = [put(backend, F @ d, dtype) for d in directions]
    gradient = put(backend, grad, dtype)

    bare = curvature_of_products(there, products)
    with_products = curvature_of_products(
        there, [add_l2(p, d, **options) for p, d in zip(products, there, strict=True)]
    )
    changes = [
        backend.to_numpy(
            quadratic_model(gradient, there, curvature=C, damping=0.1).change(
                [0.5, -0.2], damped=True
            )
        )
        for C in (with_products, bare + l2_curvature(there, **options), bare)
    ]

    assert_close(changes[0], changes[1], "identity", dtype)
    assert_differs(changes[2], changes[1])


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
    assert l2_penalty(vector, **options) == 0.0
    assert np.array_equal(l2_curvature([vector], **options), [[0.0]])
    with pytest.raises(ShapeError, match="at least one of `directions`"):
        l2_curvature([], weight_decay=ETA)
