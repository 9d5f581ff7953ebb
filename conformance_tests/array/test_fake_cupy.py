"""The CuPy backend over a stand-in on NumPy: what is called, and what waits.

These tests prove dispatch and the form of the calls, and that ``check="status"`` waits
for nothing.  They prove nothing about CuPy's numbers, and no GPU runs: see `fake_cupy`.
"""

from __future__ import annotations

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.array.backend import get_backend, native_operations
from kfac_core.linalg.damped import damped_matrix
from kfac_core.linalg.symmetric import SymmetricMatrix

from ..builders import fake_cupy
from ..builders.every_product import (
    EVERYTHING,
    KINDS,
    N,
    block,
    every_product,
    m,
    n,
)
from ..builders.one_block import operator_for
from ..builders.tolerances import assert_close

RULES = ["factored", "exact"]


@pytest.fixture
def cupy(requires_adapters):
    """The stand-in, in the place of CuPy."""
    with fake_cupy.installed() as module:
        yield module


@pytest.fixture
def to_cupy(cupy):
    """Copy to the stand-in."""
    return lambda values: cupy.array(np.asarray(values))


def arrays(rng, dtype):
    """Return inputs and output gradients with a shared axis, a mask and a vector."""
    x = rng.normal(size=(N, 2, n)).astype(dtype)
    g = rng.normal(size=(N, 2, m)).astype(dtype)
    mask = rng.uniform(size=(N, 2)) > 0.2
    return x, g, mask, rng.normal(size=(n + 1, m)).astype(dtype)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("masked", [False, True])
def test_every_product_is_that_of_numpy(to_cupy, rng, dtype, kind, rule, masked):
    """The backend gives NumPy's results, in the dtype given, and never synchronizes."""
    x, g, mask, V = arrays(rng, dtype)
    given = (x, g, mask, V) if masked else (x, g, V)
    *rows, vector = map(to_cupy, given)

    got = every_product(kind, rule, kc.Batch(*rows), vector)

    assert fake_cupy.SYNCHRONIZATIONS == []
    expected = every_product(kind, rule, kc.Batch(*given[:-1]), V)
    assert int(got.pop("status")) == int(expected.pop("status")) == 0
    for product, value in expected.items():
        assert got[product].dtype == dtype, product
        assert_close(kc.to_numpy(got[product]), value, "inverse", dtype)


def estimator(rule):
    """Return an estimator of one block, which prepares what all products need."""
    return kc.Estimator(
        {"fc": block("full")},
        decay=0.9,
        damping=0.1,
        damping_rule=rule,
        reduction="mean",
        refreshing=kc.Refreshing(factorizations=EVERYTHING),
    )


@pytest.mark.parametrize("rule", RULES)
def test_the_estimator_waits_for_nothing(to_cupy, rng, rule):
    """Update, refresh with a status, precondition, Cholesky and power never wait."""
    given = arrays(rng, "float64")
    on_device, reference = estimator(rule), estimator(rule)
    results = []

    for kept, move in ((on_device, to_cupy), (reference, np.asarray)):
        x, g, _, V = map(move, given)
        vectors = {"fc": {"weight": V[:-1].T, "bias": V[-1]}}
        for _ in range(2):
            kept.update({"fc": kc.Batch(x, g)}, check="status")
            kept.refresh(check="status")
        results.append(
            [
                kept.precondition(vectors),
                kept.apply("multiply_cholesky", vectors),
                kept.apply("multiply_matpower", vectors, -0.5),
            ]
        )
        if kept is on_device:
            assert fake_cupy.SYNCHRONIZATIONS == []

    for got, expected in zip(*results, strict=True):
        for name, value in expected["fc"].items():
            assert_close(kc.to_numpy(got["fc"][name]), value, "inverse", "float64")


@pytest.mark.parametrize("call", ["update", "refresh"])
def test_raising_waits(to_cupy, rng, call):
    """The row that must differ: ``check="raise"`` waits, and the stand-in notices."""
    x, g, _, _ = map(to_cupy, arrays(rng, "float64"))
    kept = estimator("factored")

    kept.update({"fc": kc.Batch(x, g)}, check="raise" if call == "update" else "status")
    if call == "refresh":
        kept.refresh(check="raise")

    assert fake_cupy.SYNCHRONIZATIONS


NATIVE = {
    "inverse": {"cupy.linalg.cholesky", "cupyx.scipy.linalg.solve_triangular"},
    "cholesky": {"cupy.linalg.cholesky"},
    "eigenbasis": {"cupy.linalg.eigh"},
}


@pytest.mark.parametrize("factorization", NATIVE)
def test_factorizations_are_native(to_cupy, rng, factorization):
    """Each factorization calls CuPy's own functions and those of no other."""
    x, g, _, _ = map(to_cupy, arrays(rng, "float32"))
    statistics = kc.batch_moments(
        block("full"),
        kc.Batch(x, g),
        conventions=kc.Conventions(reduction="sum", sources="sum"),
        check="status",
    )
    fake_cupy.CALLS.clear()

    operator_for(
        block("full"),
        statistics,
        damping=0.1,
        factorizations=(factorization,),
        check="status",
    )

    every = set().union(*NATIVE.values())
    assert every & set(fake_cupy.CALLS) == NATIVE[factorization]


def test_a_failed_factorization_is_found_by_its_pivots(to_cupy):
    """A factorization that failed without a word is found by the sign of its pivots."""
    indefinite = SymmetricMatrix(to_cupy([[1.0, 2.0], [2.0, 1.0]]), full_storage=True)
    matrix = damped_matrix(indefinite, 0.0)
    wanted = ("inverse", "cholesky")
    V = to_cupy(np.ones((2, 1)))

    made = matrix.prepared(*wanted, check="status", name="fc/input")

    assert kc.Status.NOT_POSITIVE in kc.Status(int(made.status()))
    assert np.all(np.isnan(kc.to_numpy(made.solve(V))))
    with pytest.raises(kc.FactorizationError, match=r"fc/input.*damping"):
        matrix.prepared(*wanted, check="raise", name="fc/input")


def test_arrays_are_made_on_the_chosen_device(cupy, rng):
    """``cupy:1`` makes arrays there, and inside that device everything stays there."""
    given = arrays(rng, "float64")
    x, g, _, V = (kc.asarray(values, backend="cupy:1") for values in given)
    kept = estimator("factored")

    with cupy.cuda.Device(1):
        kept.update({"fc": kc.Batch(x, g)}, check="status")
        kept.refresh(check="status")
        got = kept.precondition({"fc": {"weight": V[:-1].T, "bias": V[-1]}})["fc"]

    assert x.device == cupy.cuda.Device(1) != cupy.cuda.Device()
    assert {value.device.id for value in got.values()} == {1}


@pytest.mark.parametrize("operation", ["count_indices", "sum_rows_at"])
def test_sums_at_indices(to_cupy, rng, operation):
    """Sums over equal indices add every repetition."""
    if operation not in native_operations("cupy"):
        pytest.skip(f"the backend does not bring {operation}")
    values = rng.normal(size=7 if operation == "count_indices" else (7, 2))
    indices = np.array([0, 3, 3, 1, 0, 3, 0])
    expected = np.zeros((5, *values.shape[1:]))
    for i, value in zip(indices, values, strict=True):
        expected[i] += value
    given = {"count_indices": (indices, values), "sum_rows_at": (values, indices)}
    function = getattr(get_backend("cupy"), operation)

    got = function(*map(to_cupy, given[operation]), size=5, xp=None)

    assert fake_cupy.SYNCHRONIZATIONS == []
    assert_close(kc.to_numpy(got), expected, "roundoff", "float64")
