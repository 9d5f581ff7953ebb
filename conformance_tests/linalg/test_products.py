"""Products of matrices, small and large, in either order of memory."""

import importlib

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.array import replaced
from kfac_core.execution.hosted import LARGE, Hosted
from kfac_core.linalg.products import multiply_matrices
from kfac_core.linalg.symmetric import (
    ScaledMatrix,
    SymmetricMatrix,
    multiply_symmetric,
)

from ..builders.tolerances import assert_close


@pytest.mark.parametrize("orders", ["CC", "CF", "FC", "FF"])
@pytest.mark.parametrize("n", [5, 230])
def test_products_are_those_of_dense_matrices(backend, dtype, rng, orders, n):
    """Whatever library multiplies, no argument is changed."""
    m, k = n + 3, n - 2
    a, b, s = (rng.normal(size=shape) for shape in ((m, k), (k, n), (k, k)))
    s = s + s.T

    def given(values, order):
        if order == "C":
            return backend.asarray(values, dtype)
        return backend.asarray(np.ascontiguousarray(values.T), dtype).mT

    A, B, S = given(a, orders[0]), given(b, orders[1]), given(s, orders[0])
    before = [backend.to_numpy(x).copy() for x in (A, B, S)]
    product = multiply_matrices(A, B, xp=backend.xp)
    symmetric = multiply_symmetric(SymmetricMatrix(S, True), B, xp=backend.xp)
    assert_close(backend.to_numpy(product), a @ b, "product", dtype)
    assert_close(backend.to_numpy(symmetric), s @ b, "product", dtype)
    for x, old in zip((A, B, S), before, strict=True):
        assert np.array_equal(backend.to_numpy(x), old)


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("factor", [0.5, 0.0])
def test_a_damped_matrix_multiplies_vectors(backend, dtype, rng, columns, factor):
    """``(c B + shift I) v`` reads B's lower triangle, also for a factor of zero."""
    b, v = rng.normal(size=(4, 4)), rng.normal(size=(4, columns))
    dense = np.tril(b) + np.tril(b, -1).T
    B, c, shift = (backend.asarray(np.asarray(x), dtype) for x in (b, factor, 0.25))
    V = backend.asarray(v, dtype)
    M = ScaledMatrix(SymmetricMatrix(B, False), c, shift)
    product = M.multiply(V, xp=backend.xp)
    expected = factor * dense @ v + 0.25 * v
    assert_close(backend.to_numpy(product), expected, "product", dtype)
    unshifted = M.multiply(V, shifted=False, xp=backend.xp)
    assert_close(backend.to_numpy(unshifted), factor * dense @ v, "product", dtype)
    assert np.array_equal(
        backend.to_numpy(V), backend.to_numpy(backend.asarray(v, dtype))
    )
    nan = replaced(M, matrix=SymmetricMatrix(B * np.nan, False))
    assert np.isnan(backend.to_numpy(nan.multiply(V, xp=backend.xp))).all()


@pytest.fixture
def onednn(requires_backend):
    """The module of PyTorch's large products, where oneDNN is there."""
    backend = requires_backend("torch", adapter=True)
    module = importlib.import_module("kfac_core_backends.torch_onednn")
    if backend.device is not None and backend.device.type != "cpu":
        pytest.skip("a test of the CPU")
    if not module.is_available():
        pytest.skip("PyTorch was built without oneDNN")
    return module


def test_only_large_products_of_float32_are_taken(onednn, monkeypatch):
    """And none where the program has asked for products of fewer digits."""
    import torch

    large, small = torch.ones(200, 200), torch.ones(20, 20)
    assert torch.equal(onednn.product(large, large), large @ large)
    assert onednn.product(small, small) is None
    assert onednn.product(large.double(), large.double()) is None
    torch.set_float32_matmul_precision("medium")
    try:
        assert onednn.product(large, large) is None
    finally:
        torch.set_float32_matmul_precision("highest")
    assert onednn.product(large, large) is not None
    monkeypatch.setattr(torch._C, "_get_mkldnn_enabled", lambda: False)
    assert onednn.product(large, large) is None


def test_rows_stay_in_their_order_when_a_basis_multiplies_them(onednn):
    """LAPACK's bases are column by column; rows in such an order are slow to cut."""
    import torch

    rows, basis = torch.ones(400, 200), torch.ones(200, 200)
    for Q in (basis, basis.clone().mT):
        assert onednn.product(rows, Q).is_contiguous()
        assert onednn.product(Q, rows.mT).mT.is_contiguous()


def test_large_products_stay_in_pytorch(onednn, monkeypatch, rng):
    """Where NumPy computes for PyTorch, it is not given what oneDNN multiplies faster."""
    import torch

    hosted = importlib.import_module("kfac_core.execution.hosted")
    adapter = importlib.import_module("kfac_core_backends.torch")
    monkeypatch.setattr(adapter.lapack, "on_one_thread", lambda: True)
    taken = []
    own = onednn.product
    monkeypatch.setattr(
        onednn, "product", lambda a, b: taken.append(a.shape) or own(a, b)
    )
    monkeypatch.setattr(hosted, "LARGE", LARGE // 8)
    sizes = {"large": 200, "small": 30}
    blocks, batches, gradients = {}, {}, {}
    for name, n in sizes.items():
        layer = kc.Dense(in_features=n, out_features=n, bias=False, weight_layout="io")
        blocks[name] = kc.Block(layer, kc.Kronecker())
        x, g = (rng.normal(size=(2 * n, n)).astype("float32") for _ in range(2))
        batches[name] = kc.Batch(torch.from_numpy(x), torch.from_numpy(g))
        V = rng.normal(size=(n, n)).astype("float32")
        gradients[name] = {"weight": torch.from_numpy(V)}
    estimator = kc.Estimator(
        blocks, reduction="sum", damping=1.0, damping_rule="exact", execution=Hosted()
    )
    estimator.update(batches)
    estimator.refresh()
    taken.clear()
    found = estimator.precondition(gradients)
    assert {tuple(shape) for shape in taken} == {(200, 200)}
    for name, n in sizes.items():
        x, g = (
            t.double().numpy()
            for t in (batches[name].inputs, batches[name].output_grads)
        )
        (a, Q), (c, P) = (np.linalg.eigh(r.T @ r / len(r)) for r in (x, g))
        V = gradients[name]["weight"].double().numpy()
        expected = Q @ ((Q.T @ V @ P) / (a[:, None] * c + 1.0)) @ P.T
        got = found[name]["weight"].numpy()
        assert_close(got, expected, "inverse", "float32")
        assert got.shape == (n, n)
