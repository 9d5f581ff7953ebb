"""PyTorch's large matrices through SciPy's routines, where both have one thread."""

import importlib.util

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.linalg.cholesky import cholesky_inverse, damped_cholesky
from kfac_core.linalg.gram import HomogeneousRows, updated_gram
from kfac_core.linalg.symmetric import SymmetricMatrix, multiply_symmetric
from kfac_core.linalg.triangular import solve_triangular

from ..builders.tolerances import assert_close

N = 150


@pytest.fixture
def on_one_thread(requires_backend, monkeypatch):
    """PyTorch, and every BLAS, on one thread each, so that NumPy computes for it."""
    backend = requires_backend("torch", adapter=True)
    if backend.device is not None and backend.device.type != "cpu":
        pytest.skip("a test of the CPU")
    for needed in ("scipy", "threadpoolctl"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    lapack = importlib.import_module("kfac_core_backends.torch_lapack")
    own = lapack.on_one_thread
    # What `conftest.py` put in its place.
    monkeypatch.setattr(lapack, "on_one_thread", getattr(own, "__wrapped__", own))
    release = backend.adapter.hold_threads(1)
    yield backend
    release()


@pytest.fixture
def calls(on_one_thread, monkeypatch):
    """The names of NumPy's functions that were called, in their order."""
    host, seen = kc.array.get_backend("numpy"), []
    module = importlib.import_module("kfac_core_backends.numpy")
    assert host is not None
    for name in (
        *("gram_update", "damped_cholesky", "cholesky_inverse"),
        *("multiply_symmetric", "scale_symmetric", "solve_triangular"),
    ):
        own = getattr(module, name)

        def told(*arguments, own=own, name=name, **options):
            seen.append(name)
            return own(*arguments, **options)

        monkeypatch.setattr(module, name, told)
    return seen


def spd(rng, n):
    rows = rng.normal(size=(2 * n, n))
    return rows.T @ rows / (2 * n)


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_matrix_from_statistics_to_solution(on_one_thread, calls, dtype, rng, order):
    """Every operation is that of the dense matrices, and no argument is changed."""
    backend, xp = on_one_thread, on_one_thread.xp
    x, old = rng.normal(size=(40, N - 1)), spd(rng, N)
    v, border = rng.normal(size=(N, 7)), rng.uniform(size=40)

    def given(values):
        made = backend.asarray(values, dtype)
        return made if order == "C" else made.mT.contiguous().mT

    rows, tail, total, V = (
        given(x),
        backend.asarray(border, dtype),
        given(old),
        given(v),
    )
    before = [t.clone() for t in (rows, tail, total, V)]
    held = SymmetricMatrix(total, full_storage=False)

    A = updated_gram(held, HomogeneousRows(rows, tail), 0.5, 0.1, xp=xp)
    S = A.scaled(2.0)
    L = damped_cholesky(A, 0.3, xp=xp)
    inverse = SymmetricMatrix(*cholesky_inverse(L, xp=xp))
    U = multiply_symmetric(inverse, V, xp=xp)
    P = multiply_symmetric(A, V, xp=xp)
    W = solve_triangular(L, V, transpose=False, xp=xp)
    W = solve_triangular(L, W, transpose=True, xp=xp)

    wide = np.column_stack([x, border])
    dense = 0.5 * old + 0.1 * wide.T @ wide
    expected = np.linalg.solve(dense + 0.3 * np.eye(N), v)
    tell = backend.to_numpy
    assert_close(tell(A.full()), dense, "gram", dtype)
    assert_close(tell(S.full()), 2.0 * dense, "gram", dtype)
    assert_close(tell(U), expected, "inverse", dtype)
    assert_close(tell(P), dense @ v, "product", dtype)
    assert_close(tell(W), expected, "inverse", dtype)
    assert {"gram_update", "damped_cholesky", "cholesky_inverse"} <= set(calls)
    assert {"multiply_symmetric", "solve_triangular", "scale_symmetric"} <= set(calls)
    for now, then in zip((rows, tail, total, V), before, strict=True):
        assert xp.all(now == then)


def test_nonpositive_matrices_give_nan(on_one_thread, calls, dtype, rng):
    """As everywhere: NaN, and no exception."""
    A = spd(rng, N)
    A[3, 3] = -1.0
    matrix = SymmetricMatrix(on_one_thread.asarray(A, dtype), full_storage=True)

    L = damped_cholesky(matrix, 0.1, xp=on_one_thread.xp)

    assert calls == ["damped_cholesky"]
    assert not np.isfinite(on_one_thread.to_numpy(L)).all()


def test_several_threads_or_a_gradient_keep_it_in_pytorch(on_one_thread, calls, rng):
    """Where PyTorch has two threads, or looks on, its own calls compute."""
    torch = pytest.importorskip("torch")
    xp = on_one_thread.xp
    A = on_one_thread.asarray(spd(rng, N), "float64")
    watched = A.clone().requires_grad_()
    damped_cholesky(
        SymmetricMatrix(watched, full_storage=True), 0.1, xp=xp
    ).sum().backward()
    assert watched.grad is not None
    torch.set_num_threads(2)
    damped_cholesky(SymmetricMatrix(A, full_storage=True), 0.1, xp=xp)
    damped_cholesky(
        SymmetricMatrix(A[:100, :100].clone(), full_storage=True), 0.1, xp=xp
    )

    assert calls == []


def test_inverses_of_a_stack_as_on_a_gpu(requires_backend, rng):
    """By one triangular solve and one product; a matrix that failed stays NaN."""
    backend = requires_backend("torch", adapter=True)
    S = np.stack([spd(rng, 7) for _ in range(3)])
    L = np.linalg.cholesky(S)
    L[1] = np.nan
    inverse = backend.adapter._stacked_cholesky_inverse(backend.asarray(L))
    inverse = backend.to_numpy(inverse)
    assert_close(inverse[[0, 2]], np.linalg.inv(S[[0, 2]]), "inverse", "float64")
    assert np.isnan(inverse[1]).all()
