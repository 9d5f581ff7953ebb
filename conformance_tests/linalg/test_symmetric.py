"""Symmetric matrices that are a number times another, multiplied out when read."""

import copy
import pickle

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.array.structure import combinable, leaves, map_structure
from kfac_core.factors.average import Average
from kfac_core.linalg.cholesky import damped_cholesky
from kfac_core.linalg.symmetric import SymmetricMatrix

from ..builders.tolerances import assert_close

n = 5


@pytest.fixture
def dense(rng):
    rows = rng.normal(size=(2 * n, n))
    return rows.T @ rows


def lower_of(backend, dense, dtype):
    """A matrix of which the lower triangle alone holds anything."""
    return SymmetricMatrix(backend.asarray(np.tril(dense), dtype), whole=False)


def test_a_multiple_is_the_product(backend, dtype, dense):
    """In every way in which it can be read, and the base is what it was."""
    base = lower_of(backend, dense, dtype)
    expected, tell = 0.3 * dense, backend.to_numpy

    def made():
        return SymmetricMatrix.multiple(base, 0.3)

    assert made().size == n
    assert_close(tell(made().full()), expected, "gram", dtype)
    assert_close(tell(made().trace()), np.trace(expected), "gram", dtype)
    assert_close(tell(made().diagonal()), np.diag(expected), "gram", dtype)
    L = tell(damped_cholesky(made(), 0.5, xp=backend.xp))
    damped = expected + 0.5 * np.eye(n)
    assert_close(L @ L.T, damped, "cholesky", dtype)
    assert (np.triu(L, 1) == 0.0).all()
    assert np.array_equal(tell(base.array), tell(lower_of(backend, dense, dtype).array))


@pytest.mark.parametrize("size", [3, 150, 600])
def test_a_multiple_is_factorized_as_it_is(backend, dtype, rng, size):
    """Alone and in a stack, at the sizes at which backends change their ways."""
    rows = rng.normal(size=(2 * size, size))
    A = rows.T @ rows / size
    damped = 0.3 * A + 0.5 * np.eye(size)

    for stacked in (False, True):
        given = np.stack([A, A]) if stacked else A
        base = SymmetricMatrix(backend.asarray(given, dtype), whole=True)
        made = SymmetricMatrix.multiple(base, 0.3)
        L = backend.to_numpy(damped_cholesky(made, 0.5, xp=backend.xp))
        one = L[0] if stacked else L
        assert_close(one @ one.T, damped, "cholesky", dtype)


def test_a_multiple_is_a_structure_like_any_other(backend, dense):
    """Walks, maps, copies and pickles see the product."""
    made = SymmetricMatrix.multiple(lower_of(backend, dense, "float64"), 0.3)
    plain = SymmetricMatrix(
        0.3 * lower_of(backend, dense, "float64").array, whole=False
    )
    assert combinable(made, plain)

    assert [path for path, _ in leaves(made)] == ["array"]
    doubled = map_structure(lambda x: 2.0 * x, made)
    assert_close(backend.to_numpy(doubled.full()), 0.6 * dense, "gram", "float64")
    if backend.name == "numpy":
        for again in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
            assert_close(again.full(), 0.3 * dense, "gram", "float64")
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        _ = made.missing


def test_parts_do_not_depend_on_who_has_read_it(backend, dense):
    """The same base and number before and after the array was read."""
    base = lower_of(backend, dense, "float64")
    made = SymmetricMatrix.multiple(base, 0.3)
    before = made.parts()

    read = made.array

    assert made.parts() == before == (base, 0.3)
    assert made.array is read
    assert base.parts() == (base, 1.0)
    assert SymmetricMatrix.multiple(base, 1.0) is base


def test_an_operator_holds_the_sum_and_no_copy_of_it(requires_backend, rng):
    """A refresh on NumPy adds factorizations to the memory, and nothing else."""
    requires_backend("numpy", adapter=True)
    layer = kc.Dense(in_features=4, out_features=3, bias=False, weight_layout="io")
    estimator = kc.Estimator(
        {"fc": kc.Block(layer, kc.Kronecker())},
        decay=0.9,
        damping=0.1,
        damping_rule="factored",
        loss="sum",
    )
    for _ in range(2):
        batch = kc.Batch(rng.normal(size=(8, 4)), rng.normal(size=(8, 3)))
        estimator.update({"fc": batch})
    estimator.refresh()

    held: Average = estimator.state("fc").statistics.averages["input"]
    A = estimator.operator("fc").input.matrix
    assert A.parts()[0] is held.sum
    assert_close(A.full(), held.value(debias=True).full(), "gram", "float64")
    assert_close(A.full(), held.sum.full() / float(held.weight), "gram", "float64")
