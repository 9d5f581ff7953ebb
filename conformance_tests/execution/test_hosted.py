"""Stages of PyTorch's tensors that NumPy computes, on one thread."""

import copy
import pickle

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.array import backend as backend_module
from kfac_core.array import replaced
from kfac_core.array.structure import leaves

from ..builders import reference
from ..builders.estimators import make_estimator
from ..builders.tolerances import assert_close
from ..linalg.test_torch_lapack import on_one_thread  # noqa: F401  (a fixture)

N, n, m = 12, 4, 3
DAMPING = 0.3


@pytest.fixture
def asked(on_one_thread, monkeypatch):  # noqa: F811
    """What PyTorch's adapter made of the arrays that it was asked for a view of."""
    by_namespace = backend_module.natives["host_view"]
    found, own = [], by_namespace["array_api_compat.torch"]

    def told(x, /, *, xp):
        found.append(own(x, xp=xp))
        return found[-1]

    monkeypatch.setitem(by_namespace, "array_api_compat.torch", told)
    return found


def estimator_of(blocks, **options):
    settings = {"decay": 0.9, "damping": DAMPING, "damping_rule": "factored"}
    return make_estimator(blocks, **(settings | {"reduction": "sum"} | options))


def dense_block():
    layer = kc.Dense(in_features=n, out_features=m, bias=True, weight_layout="io")
    return kc.Block(layer, kc.Kronecker())


@pytest.mark.parametrize("rule", ["factored", "factored_unit_pi", "exact"])
@pytest.mark.parametrize("wanted", ["inverse", "cholesky", "eigenbasis"])
def test_an_operator_is_that_of_the_dense_matrices(
    on_one_thread,  # noqa: F811
    asked,
    dtype,
    rng,
    rule,
    wanted,
):
    """Tensors come back, which are the operator's, and no statistic has changed."""
    x, g = rng.normal(size=(N, n)), rng.normal(size=(N, m))
    estimator = estimator_of(
        {"fc": dense_block()}, damping_rule=rule, factorizations=(wanted,)
    )
    fed = (on_one_thread.asarray(values, dtype) for values in (x, g))
    estimator.update({"fc": kc.Batch(*fed)})
    before = {p: t.clone() for p, t in leaves(estimator.state["fc"].statistics)}

    estimator.refresh()

    assert asked
    operator = estimator.operator("fc")
    A, G, S = reference.kronecker_factors(x, g[None], bias=True)
    F = reference.damped_block(A, G, S, damping=DAMPING, rule=rule)
    assert_close(on_one_thread.to_numpy(operator.to_dense()), F, "product", dtype)
    V = rng.normal(size=(n + 1, m))
    U = operator.multiply_inverse(on_one_thread.asarray(V, dtype))
    expected = np.linalg.solve(F, V.reshape(-1)).reshape(V.shape)
    assert_close(on_one_thread.to_numpy(U), expected, "inverse", dtype)
    kinds = {type(t).__module__ for _, t in leaves(operator)}
    assert kinds == {"torch"}
    for path, tensor in leaves(estimator.state["fc"].statistics):
        assert bool((tensor == before[path]).all())


def test_a_loop_of_stages_is_that_of_the_dense_matrices(
    on_one_thread,  # noqa: F811
    asked,
    dtype,
    rng,
):
    """Tensors come back, none is written to, and of a state only what is new is viewed."""
    estimator = estimator_of({"fc": dense_block()})
    decay, A, G, weight = 0.9, 0.0, 0.0, 0.0
    for step in range(4):
        x, g = rng.normal(size=(N, n)), rng.normal(size=(N, m))
        V = {"weight": rng.normal(size=(n, m)), "bias": rng.normal(size=m)}
        fed = [on_one_thread.asarray(values, dtype) for values in (x, g)]
        given = {k: on_one_thread.asarray(v, dtype) for k, v in V.items()}
        held = estimator.state["fc"].statistics
        before = {} if step == 0 else {p: t.clone() for p, t in leaves(held)}
        asked.clear()

        estimator.update({"fc": kc.Batch(*fed)})
        updated = len(asked)
        estimator.refresh()
        refreshed = len(asked)
        got = estimator.precondition({"fc": given})["fc"]

        if step:
            assert updated == len(fed)
        assert len(asked) == refreshed + len(given)
        for path, tensor in leaves(held) if step else ():
            assert bool((tensor == before[path]).all())
        one_A, one_G, S = reference.kronecker_factors(x, g[None], bias=True)
        A, G = decay * A + one_A, decay * G + one_G
        weight = decay * weight + 1.0
        F = reference.damped_block(
            A / weight, G / weight, S, damping=DAMPING, rule="factored"
        )
        matrix = np.vstack([V["weight"], V["bias"]])
        expected = np.linalg.solve(F, matrix.reshape(-1)).reshape(matrix.shape)
        rows = [on_one_thread.to_numpy(got[k]).reshape(-1, m) for k in V]
        assert {type(t).__module__ for t in got.values()} == {"torch"}
        assert_close(np.vstack(rows), expected, "inverse", dtype)


def test_blocks_that_share_a_factor_share_its_basis(on_one_thread, asked, rng):  # noqa: F811
    """What is remembered of a shared average is remembered of its view."""
    blocks = {"q": dense_block(), "k": dense_block()}
    estimator = estimator_of(
        blocks, damping_rule="exact", factors={"k/input": "q/input"}
    )
    x = on_one_thread.asarray(rng.normal(size=(N, n)), "float64")
    fed = {
        name: kc.Batch(x, on_one_thread.asarray(rng.normal(size=(N, m)), "float64"))
        for name in blocks
    }
    estimator.update(fed)

    estimator.refresh()

    assert asked
    bases = [estimator.operator(name).input for name in blocks]
    first, second = (basis.eigenvectors for basis in bases)
    assert first.data_ptr() == second.data_ptr()
    others = [estimator.operator(name).output for name in blocks]
    assert others[0] is not others[1]


def test_tracked_dampings_are_computed_by_pytorch(on_one_thread, asked, rng):  # noqa: F811
    """A damping that something looks on at; one that is only an array is seen."""
    torch = pytest.importorskip("torch")
    x, g = (on_one_thread.asarray(rng.normal(size=(N, k)), "float64") for k in (n, m))
    usual = estimator_of({"fc": dense_block()})
    usual.update({"fc": kc.Batch(x, g)})
    usual.refresh()
    for looked_on in (False, True):
        damping = torch.tensor(DAMPING, dtype=torch.float64, requires_grad=looked_on)
        traced = estimator_of({"fc": dense_block()}, damping=damping)
        traced.update({"fc": kc.Batch(x, g)})
        asked.clear()

        traced.refresh()

        assert any(view is None for view in asked) == looked_on
        assert traced.state["fc"].damping is damping
        dense = (e.operator("fc").to_dense() for e in (usual, traced))
        pair = (on_one_thread.to_numpy(matrix.detach()) for matrix in dense)
        assert_close(*pair, "product", "float64")


@pytest.mark.parametrize("large", [False, True])
def test_products_of_views_are_views(on_one_thread, monkeypatch, rng, large):  # noqa: F811
    """Also where the library computes large products itself."""
    x, g, V = (rng.normal(size=s) for s in ((N, n), (N, m), (n + 1, m)))
    estimator = estimator_of({"fc": dense_block()})
    fed = (on_one_thread.asarray(values, "float64") for values in (x, g))
    estimator.update({"fc": kc.Batch(*fed)})
    estimator.refresh()
    W, b = (on_one_thread.asarray(part, "float64") for part in (V[:n], V[n]))
    if large:
        monkeypatch.setattr(kc.execution.hosted, "LARGE", 0)
        by_namespace = backend_module.natives["host_computes"]
        monkeypatch.setitem(
            by_namespace, "array_api_compat.torch", lambda xp, flops=0, **_: not flops
        )

    views = estimator.viewed({"fc": {"weight": W, "bias": b}})
    U = estimator.precondition(views)["fc"]

    assert np.shares_memory(views["fc"]["weight"], W.numpy())
    assert {type(part) for part in U.values()} == {np.ndarray}
    A, G, S = reference.kronecker_factors(x, g[None], bias=True)
    F = reference.damped_block(A, G, S, damping=DAMPING, rule="factored")
    expected = np.linalg.solve(F, V.reshape(-1)).reshape(V.shape)
    assert_close(np.vstack([U["weight"], U["bias"]]), expected, "inverse", "float64")


@pytest.mark.parametrize("how", ["read", "copied", "pickled", "replaced"])
def test_statistics_that_nobody_has_read_are_tensors(on_one_thread, rng, how):  # noqa: F811
    x, g = rng.normal(size=(2, N, n)), rng.normal(size=(2, N, m))
    estimator = estimator_of({"fc": dense_block()}, decay=0.5)
    for inputs, output_grads in zip(x, g, strict=True):
        fed = (on_one_thread.asarray(v, "float64") for v in (inputs, output_grads))
        estimator.update({"fc": kc.Batch(*fed)})
    statistics = estimator.state["fc"].statistics
    if how == "copied":
        statistics = copy.deepcopy(statistics)
    elif how == "pickled":
        statistics = pickle.loads(pickle.dumps(statistics))
    elif how == "replaced":
        statistics = replaced(statistics, status=statistics.status + 0)
    kinds = {type(array).__module__ for _, array in leaves(statistics)}
    assert kinds == {"torch"}
    total = statistics.averages["output"].sum.full().numpy()
    expected = (0.5 * g[0].T @ g[0] + g[1].T @ g[1]) / N
    assert_close(total, expected, "gram", "float64")
    assert not hasattr(statistics, "absent")
