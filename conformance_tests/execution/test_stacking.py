"""Operators and products of blocks of equal shape, against each block by itself."""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.array.structure import leaves, map_structure
from kfac_core.errors import (
    DampingError,
    FactorizationError,
    NotFiniteError,
    ShapeError,
)
from kfac_core.execution import stacked_inverses, stacking
from kfac_core.execution.stacked_inverses import inverse_stacks
from kfac_core.execution.stacking import operators_of_blocks
from kfac_core.linalg.factorizations import fallback_of
from kfac_core.operators.kronecker import FactoredKronecker

from ..builders.tolerances import assert_close

SUMMED = kc.Conventions(reduction="sum", sources="sum")
INVERSE = {"rule": "factored", "factorizations": ("inverse",)}
ALL = {"rule": "factored", "factorizations": ("inverse", "cholesky", "eigenbasis")}
PRODUCTS = {
    "multiply": "product",
    "multiply_inverse": "inverse",
    "multiply_cholesky": "cholesky",
    "multiply_cholesky_inverse": "inverse",
}
SHAPES = {"a": (2, 2), "b": (2, 2), "c": (2, 1), "d": (2, 2)}


def block(n, m, **approximation):
    """Return a dense block with bias."""
    layer = kc.Dense(in_features=n, out_features=m, bias=True, weight_layout="io")
    return kc.Block(layer, kc.Kronecker(**approximation))


@pytest.fixture
def fed(backend, dtype, rng):
    """Blocks by name, and their statistics after two updates of different weights."""
    blocks = {name: block(*shape) for name, shape in SHAPES.items()}
    statistics = {}
    for k, (name, (n, m)) in enumerate(SHAPES.items()):
        # The number of shared positions is that of the block's place in the list.
        x, g = rng.normal(size=(2, 9, k + 1, n)), rng.normal(size=(2, 9, k + 1, m))
        held = blocks[name].initial(backend.asarray(x[0], dtype))
        for i in range(2):
            batch = kc.Batch(backend.asarray(x[i], dtype), backend.asarray(g[i], dtype))
            held = blocks[name].update(
                held, batch, conventions=SUMMED, decay=0.5, weight=1.0 + k
            )
        statistics[name] = held
    return blocks, statistics


def alone(blocks, statistics, dampings, **options):
    """Return the operator of each block, made by itself."""
    return {
        name: blocks[name].operator(
            statistics[name], damping=dampings[name], name=name, **options
        )
        for name in blocks
    }


def forms(operator):
    """Return the names and shapes of an operator's arrays."""
    return [(path, tuple(x.shape)) for path, x in leaves(operator)]


def vectors_of(backend, dtype, rng):
    """Return a vector for each block."""
    return {
        name: backend.asarray(rng.normal(size=(n + 1, m)), dtype)
        for name, (n, m) in SHAPES.items()
    }


def replaced_entry(backend, statistics, value):
    """Return statistics with another first entry of the input factor."""

    def spoil(x):
        host = np.array(backend.adapter.to_numpy(x))
        if host.ndim == 2:
            host[0, 0] = value
        return backend.asarray(host, str(host.dtype))

    averages = dict(statistics.averages)
    averages["input"] = map_structure(spoil, averages["input"])
    return type(statistics)(averages, statistics.status)


@pytest.mark.parametrize("workers", [1, 2])
def test_each_operator_is_that_of_its_block(backend, dtype, rng, fed, workers):
    """Names, forms and products are those of blocks made one by one."""
    blocks, statistics = fed
    dampings = {name: 0.1 if name != "d" else 0.7 for name in blocks}
    vectors = vectors_of(backend, dtype, rng)
    # Eager JAX compiles each operation anew, which is nearly all of the time here.
    options = INVERSE if backend.name == "jax" else ALL

    got = operators_of_blocks(blocks, statistics, dampings, workers=workers, **options)

    expected = alone(blocks, statistics, dampings, **options)
    assert list(got) == list(blocks)
    for name, operator in got.items():
        other, V = expected[name], vectors[name]
        assert forms(operator) == forms(other)
        for product, kind in PRODUCTS.items():
            if options is ALL or product == "multiply_inverse":
                result = backend.to_numpy(getattr(operator, product)(V))
                right = backend.to_numpy(getattr(other, product)(V))
                assert_close(result, right, kind, dtype)
        if options is ALL:
            power = backend.to_numpy(operator.multiply_matpower(V, -0.5))
            right = backend.to_numpy(other.multiply_matpower(V, -0.5))
            assert_close(power, right, "power", dtype)


def test_without_debiasing_the_sums_are_taken(backend, dtype, rng, fed):
    """The option reaches the stack."""
    blocks, statistics = fed
    dampings = dict.fromkeys(blocks, 0.1)
    options = {"rule": "factored_unit_pi", "debias": False}

    got = operators_of_blocks(blocks, statistics, dampings, **options)

    expected = alone(blocks, statistics, dampings, **options)
    for name, V in vectors_of(backend, dtype, rng).items():
        product = backend.to_numpy(got[name].multiply(V))
        other = backend.to_numpy(expected[name].multiply(V))
        assert_close(product, other, "product", dtype)


def test_a_stack_leaves_nothing_behind(fed):
    """Averages made for a stack are not remembered beyond it."""
    blocks, statistics = fed
    memo = {}
    names = ("a", "b", "d")

    operators_of_blocks(
        {name: blocks[name] for name in names},
        statistics,
        dict.fromkeys(names, 0.1),
        rule="factored",
        factorizations=("eigenbasis",),
        memo=memo,
    )

    assert memo == {}


def test_a_bad_matrix_is_an_error_of_its_own_block(backend, dtype, rng, fed):
    """Its neighbors in the stack are what they would have been."""
    blocks, statistics = fed
    dampings = dict.fromkeys(blocks, 0.1)
    spoiled = statistics | {"b": replaced_entry(backend, statistics["b"], np.nan)}

    got = operators_of_blocks(blocks, spoiled, dampings, **INVERSE)

    assert isinstance(got["b"], NotFiniteError)
    assert "b/input" in str(got["b"])
    expected = alone(blocks, statistics, dampings, **INVERSE)
    V = vectors_of(backend, dtype, rng)["a"]
    for name in ("a", "d"):
        product = backend.to_numpy(got[name].multiply_inverse(V))
        other = backend.to_numpy(expected[name].multiply_inverse(V))
        assert_close(product, other, "inverse", dtype)


def test_a_block_that_has_to_climb_does_so_alone(backend, dtype, fed):
    """A negative eigenvalue is clipped for its block; the others stay on rung one."""
    blocks, statistics = fed
    dampings = dict.fromkeys(blocks, 0.1)
    indefinite = statistics | {"b": replaced_entry(backend, statistics["b"], -5.0)}
    options = {"rule": "factored_unit_pi", "factorizations": ("inverse",)}

    got = operators_of_blocks(blocks, indefinite, dampings, **options)

    rungs = {
        name: fallback_of(got[name].input.inverse).name for name in ("a", "b", "d")
    }
    assert rungs == {"a": "WORKING", "b": "EIGENDECOMPOSITION", "d": "WORKING"}


def test_a_singular_block_is_reported(backend, dtype, fed):
    """Where no rung holds, the block's result is the error that it would raise."""
    blocks, statistics = fed
    dampings = dict.fromkeys(blocks, 0.0)
    empty = statistics | {"b": blocks["b"].initial(statistics["b"].any_weight)}

    got = operators_of_blocks(
        blocks, empty, dampings, rule="factored", factorizations=("inverse",)
    )

    assert isinstance(got["b"], FactorizationError)
    assert isinstance(got["a"], FactoredKronecker)


def test_a_bad_damping_is_refused(fed):
    """It is the caller's mistake, and no failure of a block."""
    blocks, statistics = fed

    with pytest.raises(DampingError):
        operators_of_blocks(
            blocks, statistics, dict.fromkeys(blocks, -1.0), rule="factored"
        )


def test_products_of_a_stack_are_those_of_each(backend, dtype, rng, fed):
    """Of those blocks that are of one shape."""
    blocks, statistics = fed
    operators = alone(blocks, statistics, dict.fromkeys(blocks, 0.1), rule="factored")
    vectors = vectors_of(backend, dtype, rng)

    [stack] = inverse_stacks(operators)
    got = stack.products(vectors)

    assert stack.fits(vectors)
    assert (stack.names, list(got)) == (("a", "b", "d"), ["a", "b", "d"])
    for name in stack.names:
        expected = backend.to_numpy(operators[name].multiply_inverse(vectors[name]))
        assert_close(backend.to_numpy(got[name]), expected, "inverse", dtype)


def test_a_stack_without_a_vector_for_each_is_not_used(backend, dtype, rng, fed):
    """One is missing, or of another shape."""
    blocks, statistics = fed
    operators = alone(blocks, statistics, dict.fromkeys(blocks, 0.1), rule="factored")
    [stack] = inverse_stacks(operators)
    vectors = vectors_of(backend, dtype, rng)
    wide = backend.asarray(rng.normal(size=(2, 3)), dtype)

    assert not stack.fits({name: vectors[name] for name in ("c", "a")})
    assert not stack.fits(vectors | {"b": wide})


@pytest.mark.parametrize("shape", [(3, 2), (2, 3)])
def test_an_estimator_refuses_a_gradient_that_does_not_fit(
    backend, dtype, rng, fed, shape
):
    """Whether its block is in a stack or not."""
    blocks, _ = fed
    estimator = kc.Estimator(
        blocks, decay=0.9, damping=0.1, damping_rule="factored", loss="sum"
    )
    gradients = {}
    for name, held in blocks.items():
        n, m = held.layer.in_features, held.layer.out_features
        x, g = (backend.asarray(rng.normal(size=(3, k)), dtype) for k in (n, m))
        estimator.update({name: kc.Batch(x, g)})
        weight, bias = (
            backend.asarray(rng.normal(size=s), dtype) for s in ((n, m), (m,))
        )
        gradients[name] = {"weight": weight, "bias": bias}
    estimator.refresh()
    gradients["b"]["weight"] = backend.asarray(rng.normal(size=shape), dtype)

    with pytest.raises(ShapeError, match="weight"):
        estimator.precondition(gradients)


def test_large_and_other_blocks_are_no_stack(backend, rng, monkeypatch):
    """A wide layer, and one with a diagonal factor, are made one by one."""
    for module in (stacking, stacked_inverses):
        monkeypatch.setattr(module, "STACKED_UP_TO", 2)
    blocks = {
        "p": block(2, 1),
        "q": block(2, 1),
        "r": block(1, 1, output="diagonal"),
        "s": block(1, 1, output="diagonal"),
    }
    statistics = {}
    for name, held in blocks.items():
        n = held.layer.in_features
        x, g = rng.normal(size=(3, n)), rng.normal(size=(3, 1))
        start = held.initial(backend.asarray(x, "float64"))
        batch = kc.Batch(backend.asarray(x, "float64"), backend.asarray(g, "float64"))
        statistics[name] = held.update(start, batch, conventions=SUMMED, decay=0.0)

    got = operators_of_blocks(
        blocks, statistics, dict.fromkeys(blocks, 0.1), rule="factored"
    )

    assert list(got) == list(blocks)
    assert inverse_stacks(got) == []
