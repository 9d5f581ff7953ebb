"""The Gram matrix of per-example gradients: SENG's solve is the dense one (A14)."""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.approximations.example_gram import ExampleGram
from kfac_core.linalg import example_gram as grams

from ..builders import reference
from ..builders.tolerances import assert_close, assert_differs

SUM = kc.Conventions(reduction="sum", sources="sum")
N, n, m = 6, 4, 3
DAMPING = 0.4


def block_of(approximation, inputs=n, outputs=m, bias=True):
    geometry = kc.Dense(
        in_features=inputs, out_features=outputs, bias=bias, weight_layout="io"
    )
    return kc.Block(geometry, approximation)


def gradients_of(x, g, mask=None):
    """Return each example's flattened gradient, of each source, by loops."""
    examples = reference.rows_of(x, g, bias=True, mask=mask)
    return np.stack(
        [
            sum(
                (np.outer(row, gs[j]) for row, gs in example), np.zeros((n + 1, m))
            ).ravel()
            for j in range(len(g))
            for example in examples
        ]
    )


def updated(backend, dtype, block, x, g, *, decay=0.0, start=None, mask=None):
    """Return the statistics after one update; g has a leading axis of sources."""
    on = None if mask is None else backend.asarray(mask)
    batch = kc.Batch(
        backend.asarray(x, dtype), backend.asarray(g, dtype), on, sources=len(g)
    )
    start = block.initial(batch.inputs) if start is None else start
    return block.update(start, batch, conventions=SUM, decay=decay)


@pytest.mark.parametrize(("S", "M"), [(1, 1), (3, 2)])
def test_every_product_is_that_of_the_dense_block(backend, dtype, rng, S, M):
    """A14: ``F_emp + lam I`` by its K x K Gram matrix, and every function of it."""
    x, g = rng.normal(size=(N, S, n)), rng.normal(size=(M, N, S, m))
    Y = gradients_of(x, g) / np.sqrt(N)
    F = Y.T @ Y + DAMPING * np.eye(Y.shape[1])
    V = rng.normal(size=(n + 1, m))
    v = backend.asarray(V, dtype)
    block = block_of(ExampleGram(gradients=M * N, positions=S))
    statistics = updated(backend, dtype, block, x, g)

    made = block.operator(statistics, damping=DAMPING, rule="factored")

    assert float(made.truncated_trace) == 0
    for got, matrix, operation in (
        (made.multiply(v), F, "product"),
        (made.multiply(v, damped=False), Y.T @ Y, "product"),
        (made.multiply_inverse(v), np.linalg.inv(F), "inverse"),
        (made.multiply_matpower(v, -0.5), reference.matrix_power(F, -0.5), "power"),
        (made.multiply_matpower(v, 2), F @ F, "power"),
        (made.sample(v), reference.matrix_power(F, -0.5), "power"),
    ):
        expected = (matrix @ V.ravel()).reshape(V.shape)
        assert_close(backend.to_numpy(got), expected, operation, dtype)
    assert_close(float(made.logdet()), np.linalg.slogdet(F)[1], "logdet", dtype)
    assert_close(float(made.trace()), np.trace(F), "product", dtype)
    for damped, matrix in ((True, F), (False, Y.T @ Y)):
        got = backend.to_numpy(made.eigenvalues(damped=damped))
        assert_close(got, np.linalg.eigvalsh(matrix), "eigenvalues", dtype)
        got = backend.to_numpy(made.to_dense(damped=damped))
        assert_close(got, matrix, "product", dtype)
    assert int(made.status()) == 0


def test_the_gram_matrix_is_the_same_either_way(backend, dtype, rng):
    """By rows where these are fewer numbers, by gradients where those are."""
    for S, a, b in ((1, n, m), (2, 6, 5), (3, 2, 2)):
        K = N
        x, g = rng.normal(size=(K, S, a)), rng.normal(size=(K, S, b))
        D = np.einsum("ksa,ksb->kab", x, g).reshape(K, -1)
        X, R = backend.asarray(x, dtype), backend.asarray(g, dtype)
        c, V = rng.normal(size=K), rng.normal(size=(a, b))
        xp, host = backend.xp, backend.to_numpy

        H = grams.gradient_gram(X, R, xp=xp).full()
        norms = grams.squared_norms(X, R, xp=xp)
        products = grams.gradient_products(X, R, backend.asarray(V, dtype), xp=xp)
        combined = grams.combined_gradients(X, R, backend.asarray(c, dtype), xp=xp)

        assert_close(host(H), D @ D.T, "gram", dtype, condition=10)
        assert_close(host(norms), (D * D).sum(1), "gram", dtype, condition=10)
        assert_close(host(products), D @ V.ravel(), "product", dtype)
        assert_close(host(combined).ravel(), c @ D, "product", dtype)


def test_the_heaviest_gradients_are_kept(backend, dtype, rng):
    """What is left out is positive, measured, and the smallest that there was."""
    draws = [
        (rng.normal(size=(N, 1, n)), rng.normal(size=(1, N, 1, m))) for _ in range(2)
    ]
    block = block_of(ExampleGram(gradients=N))
    first = updated(backend, dtype, block, *draws[0])
    statistics = updated(backend, dtype, block, *draws[1], decay=0.5, start=first)

    made = block.operator(statistics, damping=DAMPING, rule="exact")

    old, new = (gradients_of(*draw) / np.sqrt(N) for draw in draws)
    every = np.concatenate([np.sqrt(0.5) * old, new]) / np.sqrt(1.5)
    dropped = np.sort((every**2).sum(1))[:-N].sum()
    assert_close(float(made.truncated_trace), dropped, "inverse", dtype)
    kept = backend.to_numpy(made.to_dense(damped=False))
    whole = (0.5 * old.T @ old + new.T @ new) / 1.5
    gap = whole - kept
    assert_close(np.trace(gap), dropped, "inverse", dtype)
    assert np.linalg.eigvalsh(gap)[0] > -1e-5 * np.trace(whole)
    assert_differs(kept, whole)


def test_masked_positions_and_merged_parts(backend, rng):
    """Masked rows are absent; shards merge to the whole batch, and are absorbed so."""
    x, g = rng.normal(size=(N, 3, n)), rng.normal(size=(1, N, 3, m))
    mask = rng.random((N, 3)) > 0.4
    Y = gradients_of(x, g, mask) / np.sqrt(N)
    block = block_of(ExampleGram(gradients=2 * N, positions=3))
    whole = updated(backend, "float64", block, x, g, mask=mask)
    parts = [
        block.moments(
            kc.Batch(*(backend.asarray(v[i]) for v in (x, g[0], mask))), conventions=SUM
        )
        for i in (slice(0, N // 2), slice(N // 2, N))
    ]
    merged = block.merge(*parts)
    absorbed = block.absorb(whole, merged, decay=0.5)

    for statistics in (whole, merged, absorbed):
        made = block.operator(
            statistics, damping=DAMPING, rule="exact", factorizations=()
        )
        got = backend.to_numpy(made.to_dense(damped=False))
        assert_close(got, Y.T @ Y, "product", "float64")
        assert float(made.truncated_trace) == 0


@pytest.mark.parametrize("damping", [1e-10, 1e10])
def test_tiny_and_huge_dampings_are_ordinary(backend, dtype, rng, damping):
    """Inverse and root are right relative to their norms; equal gradients too."""
    x, g = rng.normal(size=(N, 1, n)), rng.normal(size=(1, N, 1, m))
    if damping > 1:
        x[1], g[:, 1] = x[0], g[:, 0]
    Y = gradients_of(x, g) / np.sqrt(N)
    w, Q = np.linalg.eigh(Y.T @ Y)
    w = np.where(w < 1e-9, 0.0, w)
    V = rng.normal(size=(n + 1, m))
    block = block_of(ExampleGram(gradients=N))
    statistics = updated(backend, dtype, block, x, g)

    made = block.operator(
        statistics,
        damping=damping,
        rule="exact",
        factorizations=("inverse", "eigenbasis"),
    )

    for p, operation in ((-1, "inverse"), (-0.5, "power"), (0.5, "power")):
        got = made.multiply_matpower(backend.asarray(V, dtype), p)
        power = (Q * (w + damping) ** p) @ Q.T
        expected = (power @ V.ravel()).reshape(V.shape)
        assert_close(backend.to_numpy(got), expected, operation, dtype)


def test_more_gradients_than_numbers_and_widths_of_one(backend, rng):
    """K above ``n m`` is ordinary, and so is one example of one number."""
    for K, a, b in ((N, 2, 1), (1, 1, 1)):
        x, g = rng.normal(size=(K, a)), rng.normal(size=(K, b))
        D = np.einsum("ka,kb->kab", x, g).reshape(K, -1)
        F = D.T @ D / K + DAMPING * np.eye(a * b)
        V = rng.normal(size=(a, b))
        block = block_of(ExampleGram(gradients=K), a, b, bias=False)
        batch = kc.Batch(backend.asarray(x), backend.asarray(g))
        start = block.initial(batch.inputs)

        made = block.operator(
            block.update(start, batch, conventions=SUM, decay=0.9),
            damping=DAMPING,
            rule="exact",
        )

        got = backend.to_numpy(made.multiply_inverse(backend.asarray(V)))
        expected = np.linalg.solve(F, V.ravel()).reshape(V.shape)
        assert_close(got, expected, "inverse", "float64")
        assert_close(float(made.logdet()), np.linalg.slogdet(F)[1], "logdet", "float64")
        got = backend.to_numpy(made.eigenvalues())
        assert_close(got, np.linalg.eigvalsh(F), "eigenvalues", "float64")
        empty = block.operator(start, damping=DAMPING, rule="exact")
        got = backend.to_numpy(empty.multiply_inverse(backend.asarray(V)))
        assert_close(got, V / DAMPING, "product", "float64")


def test_what_makes_no_sense_is_refused(backend, rng):
    """No damping, other positions, triangular products, rows that are not finite."""
    x, g = rng.normal(size=(N, 1, n)), rng.normal(size=(1, N, 1, m))
    block = block_of(ExampleGram(gradients=N))
    statistics = updated(backend, "float64", block, x, g)
    v = backend.asarray(np.ones((n + 1, m)))

    with pytest.raises(kc.FactorizationError, match="Increase `damping`"):
        block.operator(statistics, damping=0.0, rule="exact")
    made = block.operator(statistics, damping=DAMPING, rule="exact", factorizations=())
    with pytest.raises(kc.UnsupportedError, match="dense"):
        made.multiply_cholesky(v)
    with pytest.raises(kc.ShapeError, match=r"positions=2"):
        updated(
            backend,
            "float64",
            block,
            rng.normal(size=(N, 2, n)),
            rng.normal(size=(1, N, 2, m)),
        )
    bad = kc.Batch(backend.asarray(x * np.nan), backend.asarray(g[0]))
    kept = block.update(statistics, bad, conventions=SUM, decay=0.5, check="status")
    assert int(kept.status) == kc.Status.INPUTS_NOT_FINITE
    one, two = (
        backend.to_numpy(s.averages["block"].sum.inputs) for s in (statistics, kept)
    )
    assert np.array_equal(one, two)
    with pytest.raises(kc.ShapeError, match="`gradients` to be an integer >= 1"):
        ExampleGram(gradients=0)


def test_an_estimator_takes_the_block(backend, rng):
    """Fed, refreshed and asked as any other block."""
    x, g = rng.normal(size=(N, 1, n)), rng.normal(size=(1, N, 1, m))
    Y = gradients_of(x, g) / np.sqrt(N)
    V = rng.normal(size=(n + 1, m))
    estimator = kc.Estimator(
        {"w": block_of(ExampleGram(gradients=N))},
        decay=0.0,
        damping=DAMPING,
        damping_rule="exact",
        reduction="sum",
    )
    estimator.update({"w": kc.Batch(backend.asarray(x), backend.asarray(g[0]))})
    estimator.refresh()

    parameters = {"weight": backend.asarray(V[:-1]), "bias": backend.asarray(V[-1])}
    done = estimator.precondition({"w": parameters})["w"]

    F = Y.T @ Y + DAMPING * np.eye(Y.shape[1])
    expected = np.linalg.solve(F, V.ravel()).reshape(V.shape)
    assert_close(backend.to_numpy(done["weight"]), expected[:-1], "inverse", "float64")
