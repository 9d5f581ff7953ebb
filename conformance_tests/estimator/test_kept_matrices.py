"""Operators that keep inverses alone: their products, their files, and what they refuse."""

import gc
import weakref

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.array.structure import leaves

from ..builders import reference
from ..builders.block_kinds import DENSE, PAIRS, fed
from ..builders.estimators import make_estimator
from ..builders.tolerances import assert_close

DAMPING = 0.3
N, M = 4, 3


def make(blocks, **options):
    """Return an estimator whose operators keep no matrices."""
    settings = {"reduction": "sum", "damping": DAMPING, "keep_matrices": False}
    return make_estimator(blocks, **(settings | options))


def moments(rng):
    """Return inputs, output gradients and the dense factors of them."""
    x, g = rng.normal(size=(12, N)), rng.normal(size=(12, M))
    A, G, _ = reference.kronecker_factors(x, g[None], bias=False)
    return x, g, A, G


def refreshed(backend, x, g, dtype="float64", approximation=None, **options):
    """Return an estimator of one dense layer after its first refresh."""
    block = kc.Block(DENSE, approximation or kc.Kronecker())
    estimator = make({"a": block}, **options)
    x, g = (backend.asarray(part.astype(dtype)) for part in (x, g))
    estimator.update({"a": kc.Batch(x, g)})
    estimator.refresh()
    return estimator


def product(backend, estimator, V, name="multiply_inverse", **options):
    """Return a product of block a with a vector, on the host."""
    operator = estimator.operator("a")
    return backend.to_numpy(getattr(operator, name)(backend.asarray(V), **options))


@pytest.mark.parametrize("solving", ["inverse", "triangular"])
@pytest.mark.parametrize("rule", ["factored", "factored_unit_pi"])
def test_directions_are_those_of_the_dense_block(backend, rng, dtype, solving, rule):
    """Also where an operator keeps triangular factors."""
    x, g, A, G = moments(rng)
    V = rng.normal(size=(N, M))
    estimator = refreshed(backend, x, g, dtype, damping_rule=rule, solving=solving)

    F = reference.damped_block(A, G, 1.0, damping=DAMPING, rule=rule)
    found = product(backend, estimator, V.astype(dtype))
    assert_close(found.ravel(), np.linalg.solve(F, V.ravel()), "inverse", dtype)
    sides = estimator.operator("a").parts().values()
    assert all(not side.keeps_matrix for side in sides)


def test_triangular_products_stay_where_they_were_prepared(backend, rng):
    """Samples and the log-determinant; with inverses beside them."""
    x, g, A, G = moments(rng)
    V = rng.normal(size=(N, M))
    estimator = refreshed(backend, x, g, factorizations=("inverse", "cholesky"))

    F = reference.damped_block(A, G, 1.0, damping=DAMPING, rule="factored")
    operator = estimator.operator("a")
    logdet = backend.to_numpy(operator.logdet())
    assert_close(logdet, np.linalg.slogdet(F)[1], "logdet", "float64")
    once = product(backend, estimator, V, "multiply_cholesky", transpose=True)
    twice = product(backend, estimator, once, "multiply_cholesky")
    assert_close(twice.ravel(), F @ V.ravel(), "cholesky", "float64")
    noise = product(backend, estimator, V, "sample")
    assert_close(
        np.sum(noise * noise),
        V.ravel() @ np.linalg.solve(_middle(A, G), V.ravel()),
        "inverse",
        "float64",
    )
    with pytest.raises(kc.UnsupportedError, match=r"no multiply: .*keep_matrices=True"):
        product(backend, estimator, V, "multiply")


def _middle(A, G):
    """Return ``L^T L`` of the damped block, whose inverse has the noise's squared norm."""
    F = reference.damped_block(A, G, 1.0, damping=DAMPING, rule="factored")
    L = np.linalg.cholesky(F)
    return L.T @ L


@pytest.mark.parametrize("approximation", [kc.Kronecker(), kc.Full()])
def test_products_without_matrices_raise(backend, rng, approximation):
    """And is had again after a refresh that keeps them."""
    x, g, A, G = moments(rng)
    V = backend.asarray(rng.normal(size=(N, M)))
    estimator = refreshed(backend, x, g, approximation=approximation)
    operator = estimator.operator("a")

    for name, arguments in {
        "multiply": (),
        "multiply_matpower": (0.5,),
        "multiply_cholesky": (),
        "multiply_cholesky_inverse": (),
        "sample": (),
    }.items():
        message = rf"no {name}: of this operator only.*keep_matrices=True"
        with pytest.raises(kc.UnsupportedError, match=message):
            getattr(operator, name)(V, *arguments)
    for name in ("trace", "logdet", "eigenvalues", "to_dense", "spectral"):
        message = r"only the factorizations that were prepared.*keep_matrices=True"
        with pytest.raises(kc.NotReadyError, match=message):
            getattr(operator, name)()

    complete = refreshed(backend, x, g, approximation=approximation, keep_matrices=True)
    F = reference.damped_block(A, G, 1.0, damping=DAMPING, rule="factored")
    if approximation.name == "full":
        D = (x[:, :, None] * g[:, None, :]).reshape(len(x), -1)
        F = D.T @ D / len(x) + DAMPING * np.eye(N * M)
    dense = backend.to_numpy(complete.operator("a").to_dense())
    assert_close(dense, F, "gram", "float64")


@pytest.mark.parametrize("pair", PAIRS)
def test_every_block_takes_the_option(backend, rng, pair):
    """Directions are the same to the bit, and the report has what can be known."""
    layer, approximation = PAIRS[pair]
    rule = "exact" if approximation.name == "ekfac" else "factored"
    batch = fed(backend, rng, layer)
    found = {}
    for keep in (False, True):
        estimator = make(
            {"a": kc.Block(layer, approximation)}, keep_matrices=keep, damping_rule=rule
        )
        estimator.update({"a": batch})
        if approximation.has_bases:
            estimator.rebase(moments="kronecker")
        estimator.refresh()
        found[keep] = estimator
    V = np.random.default_rng(0).normal(size=found[True].operator("a").vector_shape)

    alone, complete = (product(backend, found[keep], V) for keep in (False, True))
    np.testing.assert_array_equal(alone, complete)
    lean, full = (found[keep].report()["a"] for keep in (False, True))
    assert lean.factors == full.factors
    if lean.condition is not None:
        # The whole block's is an estimate, from below by at most a third of each norm.
        assert full.condition <= lean.condition * (1 + 1e-6)
        assert lean.condition <= 9.0 * full.condition * (1 + 1e-6)
        assert lean.residual < 1e-10


def test_nothing_holds_the_matrices(backend, rng):
    """The sums that an operator was made of are let go of by the next update."""
    x, g, _, _ = moments(rng)
    for keep in (False, True):
        estimator = refreshed(backend, x, g, keep_matrices=keep)
        held = estimator.state["a"].statistics.averages["input"].sum
        old = weakref.ref(held)
        paths = dict(leaves(estimator.operator("a")))
        assert any("problem.matrix" in path for path in paths) == keep
        del held
        x_new, g_new = backend.asarray(x), backend.asarray(g)
        estimator.update({"a": kc.Batch(x_new, g_new)})
        gc.collect()
        if not keep:
            assert old() is None


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("read", [False, True])
def test_states_are_read_by_either(backend, rng, written, read):
    """With the operator that was written; the next refresh makes the reader's own."""
    x, g, _, _ = moments(rng)
    V = rng.normal(size=(N, M))
    writer = refreshed(backend, x, g, keep_matrices=written)
    reader = make({"a": kc.Block(DENSE, kc.Kronecker())}, keep_matrices=read)

    reader.load_state_dict(writer.state_dict())

    np.testing.assert_array_equal(
        product(backend, reader, V), product(backend, writer, V)
    )
    assert ("multiply" in reader.operator("a").unsupported_products) != written
    reader.refresh()
    assert ("multiply" in reader.operator("a").unsupported_products) != read
    np.testing.assert_array_equal(
        product(backend, reader, V), product(backend, writer, V)
    )
