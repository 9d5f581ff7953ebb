"""Eva is the exact inverse of ``lam I + S a a^T (x) b b^T`` (A12)."""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.approximations.eva import Eva

from ..builders import reference
from ..builders.tolerances import assert_close, assert_differs

SUM = kc.Conventions(loss="sum", sources="sum")
N, n, m = 6, 4, 3
DAMPING = 0.2


def block_of(inputs=n, outputs=m, bias=True):
    geometry = kc.Dense(
        in_features=inputs, out_features=outputs, bias=bias, weight_layout="io"
    )
    return kc.Block(geometry, Eva())


def updated(backend, dtype, block, x, g, *, conventions=SUM, decay=0.0, start=None):
    """Return the statistics after one update."""
    batch = kc.Batch(backend.asarray(x, dtype), backend.asarray(g, dtype))
    start = block.initial(batch.inputs) if start is None else start
    return block.update(start, batch, conventions=conventions, decay=decay)


def means(x, g, mask=None):
    """Return the mean rows a (with its 1) and b, and S, by loops."""
    rows = reference.rows_of(x, g[None], bias=True, mask=mask)
    flat = [row for example in rows for row in example]
    a = sum(x for x, _ in flat) / len(flat)
    b = sum(gs[0] for _, gs in flat) / len(flat)
    return a, b, len(flat) / len(rows)


def dense(a, b, S, damping):
    u = np.outer(a, b).ravel()
    return S * np.outer(u, u) + damping * np.eye(u.size)


def test_every_product_is_that_of_the_dense_block(backend, dtype, rng):
    """A12, and every other function of the block, whatever the damping's rule."""
    x, g = rng.normal(size=(N, n)), rng.normal(size=(N, m))
    a, b, S = means(x, g)
    F, V = dense(a, b, S, DAMPING), rng.normal(size=(n + 1, m))
    v = backend.asarray(V, dtype)
    block = block_of()
    statistics = updated(backend, dtype, block, x, g)

    made = block.operator(statistics, damping=DAMPING, rule="factored")

    formula = V - (b @ V.T @ a) / (DAMPING + (a @ a) * (b @ b)) * np.outer(a, b)
    assert_close(
        np.linalg.solve(F, V.ravel()), formula.ravel() / DAMPING, "inverse", "float64"
    )
    for got, matrix in (
        (made.multiply(v), F),
        (made.multiply(v, damped=False), F - DAMPING * np.eye(len(F))),
        (made.multiply_inverse(v), np.linalg.inv(F)),
        (made.multiply_matpower(v, -0.25), reference.matrix_power(F, -0.25)),
        (made.sample(v), reference.matrix_power(F, -0.5)),
    ):
        expected = (matrix @ V.ravel()).reshape(V.shape)
        assert_close(backend.to_numpy(got), expected, "product", dtype, condition=10)
    assert_close(float(made.logdet()), np.linalg.slogdet(F)[1], "logdet", dtype)
    assert_close(float(made.trace()), np.trace(F), "product", dtype)
    got = backend.to_numpy(made.eigenvalues())
    assert_close(got, np.linalg.eigvalsh(F), "eigenvalues", dtype)
    assert_close(backend.to_numpy(made.to_dense()), F, "product", dtype)


def test_averages_are_of_the_means(backend, rng):
    """Two updates average the vectors, not the outer products; moments merge exactly."""
    draws = [(rng.normal(size=(N, n)), rng.normal(size=(N, m))) for _ in range(2)]
    block = block_of()
    first = updated(backend, "float64", block, *draws[0])
    statistics = updated(backend, "float64", block, *draws[1], decay=0.5, start=first)

    made = block.operator(statistics, damping=DAMPING, rule="exact")
    parts = [
        block.moments(
            kc.Batch(*(backend.asarray(v[i]) for v in draws[0])), conventions=SUM
        )
        for i in (slice(0, 2), slice(2, N))
    ]
    merged = block.operator(block.merge(*parts), damping=DAMPING, rule="exact")

    (a, b, S), (c, d, _) = (means(*draw) for draw in draws)
    expected = dense((a + 2 * c) / 3, (b + 2 * d) / 3, S, DAMPING)
    assert_close(backend.to_numpy(made.to_dense()), expected, "product", "float64")
    got = backend.to_numpy(merged.to_dense())
    assert_close(got, dense(a, b, S, DAMPING), "product", "float64")


def test_shared_and_masked_positions_count_in_the_means(backend, rng):
    """With positions the means are over all rows kept, and S is in the block."""
    x, g = rng.normal(size=(N, 3, n)), rng.normal(size=(N, 3, m))
    mask = rng.random((N, 3)) > 0.4
    a, b, S = means(x, g, mask)
    block = block_of()
    batch = kc.Batch(*(backend.asarray(v) for v in (x, g, mask)))
    statistics = block.update(
        block.initial(batch.inputs), batch, conventions=SUM, decay=0.0
    )

    made = block.operator(statistics, damping=DAMPING, rule="exact")

    got = backend.to_numpy(made.to_dense())
    assert_close(got, dense(a, b, S, DAMPING), "product", "float64")
    assert_differs(got, dense(a, b, 1.0, DAMPING))


def test_it_is_at_most_the_kronecker_block(backend, rng):
    """``a a^T <= E[x x^T]``, so the blocks are ordered; they are equal for one row."""
    x, g = rng.normal(size=(N, n)), rng.normal(size=(N, m))
    for rows, equal in ((slice(0, N), False), (slice(0, 1), True)):
        A, G, S = reference.kronecker_factors(x[rows], g[None, rows], bias=True)
        block = block_of()
        statistics = updated(backend, "float64", block, x[rows], g[rows])
        made = block.operator(statistics, damping=0.0, rule="exact", factorizations=())
        gap = S * np.kron(A, G) - backend.to_numpy(made.to_dense(damped=False))
        assert np.linalg.eigvalsh(gap)[0] > -1e-12
        assert (np.linalg.norm(gap) < 1e-12) == equal


def test_a_mean_loss_is_scaled_back(backend, rng):
    """Gradients of a mean over N examples carry 1/N, once in b."""
    x, g = rng.normal(size=(N, n)), rng.normal(size=(N, m))
    mean = kc.Conventions(loss="mean", sources="sum")
    block = block_of()
    results = [
        block.operator(
            updated(backend, "float64", block, x, grads, conventions=conventions),
            damping=DAMPING,
            rule="exact",
        )
        for grads, conventions in ((g, SUM), (g / N, mean))
    ]

    one, two = (backend.to_numpy(made.to_dense()) for made in results)

    assert_close(one, two, "product", "float64")


@pytest.mark.parametrize("damping", [1e-14, 1e14])
def test_tiny_and_huge_dampings_are_ordinary(backend, dtype, rng, damping):
    """The inverse is right relative to its norm."""
    x, g = rng.normal(size=(N, n)), rng.normal(size=(N, m))
    a, b, S = means(x, g)
    V = rng.normal(size=(n + 1, m))
    block = block_of()
    statistics = updated(backend, dtype, block, x, g)

    made = block.operator(statistics, damping=damping, rule="exact")
    got = backend.to_numpy(made.multiply_inverse(backend.asarray(V, dtype)))

    gain = S * (a @ V @ b) / (damping + S * (a @ a) * (b @ b))
    assert_close(got, (V - gain * np.outer(a, b)) / damping, "inverse", dtype)


def test_zero_means_and_widths_of_one_are_ordinary(backend, rng):
    """Nothing but damping where a mean is zero, with and without a complement."""
    for inputs, outputs, rows in ((1, 1, 1), (3, 1, 2)):
        block = block_of(inputs, outputs, bias=False)
        x, g = rng.normal(size=(rows, inputs)), rng.normal(size=(rows, outputs))
        V = rng.normal(size=(inputs, outputs))
        for factor in (1.0, 0.0):
            statistics = updated(backend, "float64", block, factor * x, g)
            a, b = factor * x.mean(0), g.mean(0)

            made = block.operator(statistics, damping=DAMPING, rule="exact")

            F = dense(a, b, 1.0, DAMPING)
            got = backend.to_numpy(made.multiply_inverse(backend.asarray(V)))
            expected = np.linalg.solve(F, V.ravel()).reshape(V.shape)
            assert_close(got, expected, "inverse", "float64")
            assert_close(
                float(made.logdet()), np.linalg.slogdet(F)[1], "logdet", "float64"
            )


def test_what_makes_no_sense_is_refused(backend, rng):
    """Several sources, no damping, and layers that have no pairs of rows."""
    x, g = rng.normal(size=(N, n)), rng.normal(size=(2, N, m))
    block = block_of()
    batch = kc.Batch(backend.asarray(x), backend.asarray(g), sources=2)
    with pytest.raises(kc.UnsupportedError, match="2 sources"):
        block.update(block.initial(batch.inputs), batch, conventions=SUM, decay=0.0)
    statistics = updated(backend, "float64", block, x, g[0])
    with pytest.raises(kc.FactorizationError, match="Increase `damping`"):
        block.operator(statistics, damping=0.0, rule="exact")
    with pytest.raises(kc.DampingError, match="damping"):
        block.operator(statistics, damping=backend.asarray(-1.0), rule="exact")
    with pytest.raises(kc.UnsupportedError, match="take Diagonal"):
        kc.Block(kc.Parameters(shapes={"w": (2,)}), Eva())


def test_an_estimator_takes_the_block(backend, rng):
    """Fed, refreshed and asked as any other block."""
    x, g = rng.normal(size=(N, n)), rng.normal(size=(N, m))
    V = rng.normal(size=(n + 1, m))
    estimator = kc.Estimator(
        {"w": block_of()},
        decay=0.9,
        damping=DAMPING,
        damping_rule="factored",
        loss="sum",
    )
    estimator.update({"w": kc.Batch(backend.asarray(x), backend.asarray(g))})
    estimator.refresh()

    parameters = {"weight": backend.asarray(V[:-1]), "bias": backend.asarray(V[-1])}
    done = estimator.precondition({"w": parameters})["w"]

    a, b, S = means(x, g)
    expected = np.linalg.solve(dense(a, b, S, DAMPING), V.ravel()).reshape(V.shape)
    assert_close(backend.to_numpy(done["weight"]), expected[:-1], "inverse", "float64")
    assert_close(backend.to_numpy(done["bias"]), expected[-1], "inverse", "float64")
