"""Factors of bounded rank: exact while the rank suffices (A13), certified where not."""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.approximations.low_rank import LowRankKronecker
from kfac_core.array.structure import leaves

from ..builders import reference
from ..builders.estimators import make_estimator
from ..builders.tolerances import assert_close, assert_differs

SUM = kc.Conventions(reduction="sum", sources="sum")
RULES = ["factored", "factored_unit_pi", "exact"]
N, n, m = 8, 6, 5
DAMPING = 0.3
APPROXIMATION = LowRankKronecker(input_rank=3, output_rank=2)


def layer(bias=True):
    return kc.Dense(in_features=n, out_features=m, bias=bias, weight_layout="io")


def batches(rng, ranks=(2, 2), number=3, S=()):
    """Return batches whose inputs and output gradients lie in fixed subspaces."""
    left = rng.normal(size=(ranks[0], n))
    right = rng.normal(size=(ranks[1], m))
    return [
        (
            rng.normal(size=(N, *S, ranks[0])) @ left,
            rng.normal(size=(N, *S, ranks[1])) @ right,
        )
        for _ in range(number)
    ]


def fed(backend, dtype, approximation, given, *, decay=0.8, bias=True, mask=None):
    """Return a block and its statistics after several updates."""
    block = kc.Block(layer(bias), approximation)
    statistics = block.initial(backend.asarray(given[0][0], dtype))
    on = None if mask is None else backend.asarray(mask)
    for x, g in given:
        batch = kc.Batch(backend.asarray(x, dtype), backend.asarray(g, dtype), on)
        statistics = block.update(statistics, batch, conventions=SUM, decay=decay)
    return block, statistics


def averaged(given, *, decay=0.8, bias=True, mask=None, sharing="expand"):
    """Return the dense A, G and S of the same updates."""
    total, weight = [0.0, 0.0, 0.0], 0.0
    for x, g in given:
        new = reference.kronecker_factors(
            x, g[None], bias=bias, mask=mask, sharing=sharing
        )
        total = [decay * t + c for t, c in zip(total, new, strict=True)]
        weight = decay * weight + 1.0
    return [t / weight for t in total]


def root_of(backend, average):
    """Return the dense matrix that a low-rank average stands for, and what it lost."""
    value = average.value(debias=True)
    B = backend.to_numpy(value.root)
    return B @ B.T, float(value.truncated_trace)


@pytest.mark.parametrize("rule", RULES)
def test_products_are_dense_while_the_rank_suffices(backend, dtype, rng, rule):
    """A13: three updates of rank 2 + 1 are kept exactly by rank 3; every product."""
    given = batches(rng)
    A, G, S = averaged(given)
    F = reference.damped_block(A, G, S, damping=DAMPING, rule=rule)
    V = rng.normal(size=(n + 1, m))
    v = backend.asarray(V, dtype)

    block, statistics = fed(backend, dtype, APPROXIMATION, given)
    made = block.operator(statistics, damping=DAMPING, rule=rule)

    condition = 1e2  # That of the damped block, which is not low.
    for got, matrix, operation in (
        (made.multiply(v), F, "product"),
        (made.multiply(v, damped=False), S * np.kron(A, G), "product"),
        (made.multiply_inverse(v), np.linalg.inv(F), "inverse"),
        (made.multiply_matpower(v, -0.5), reference.matrix_power(F, -0.5), "power"),
        (made.multiply_matpower(v, 0.25), reference.matrix_power(F, 0.25), "power"),
        (made.sample(v), reference.matrix_power(F, -0.5), "power"),
    ):
        expected = (matrix @ V.ravel()).reshape(V.shape)
        got = backend.to_numpy(got)
        assert_close(got, expected, operation, dtype, condition=condition)
    host = backend.to_numpy
    assert_close(host(made.to_dense()), F, "product", dtype)
    assert_close(float(made.trace()), np.trace(F), "product", dtype)
    bare = float(made.trace(damped=False))
    assert_close(bare, S * np.trace(A) * np.trace(G), "product", dtype)
    assert_close(float(made.logdet()), np.linalg.slogdet(F)[1], "logdet", dtype)
    assert_close(host(made.eigenvalues()), np.linalg.eigvalsh(F), "eigenvalues", dtype)
    assert int(made.status()) == 0


@pytest.mark.parametrize("rows_at_once", [None, 3])
def test_what_is_cut_off_is_positive_and_measured(backend, dtype, rng, rows_at_once):
    """With C the moment: ``C - B B^T >= 0``, and its trace is what was lost."""
    given = batches(rng, ranks=(n, m))
    approximation = LowRankKronecker(
        input_rank=3, output_rank=2, rows_at_once=rows_at_once
    )
    A, G, _ = averaged(given)

    _, statistics = fed(backend, dtype, approximation, given)

    for side, C, r in (("input", A, 3), ("output", G, 2)):
        kept, lost = root_of(backend, statistics.averages[side])
        error = np.linalg.eigvalsh(C - kept)
        small = 1e-10 if dtype == "float64" else 1e-4
        assert error[0] > -small * np.trace(C)
        assert_close(lost, np.trace(C - kept), "inverse", dtype)
        best = np.linalg.eigvalsh(C)[:-r].sum()
        assert lost > (1 - small) * best
        assert lost > 0.05 * np.trace(C)
        assert np.linalg.matrix_rank(kept, tol=1e-5) == r


@pytest.mark.parametrize("rows", [2, N])
def test_one_update_is_the_best_approximation_of_its_rank(backend, dtype, rng, rows):
    """One update cuts off the smallest eigenvalues, with either Gram matrix."""
    x, g = rng.normal(size=(rows, n)), rng.normal(size=(rows, m))
    A, G, _ = averaged([(x, g)])

    _, statistics = fed(backend, dtype, APPROXIMATION, [(x, g)])

    for side, C, r in (("input", A, 3), ("output", G, 2)):
        w, Q = np.linalg.eigh(C)
        kept, lost = root_of(backend, statistics.averages[side])
        assert_close(kept, (Q[:, -r:] * w[-r:]) @ Q[:, -r:].T, "inverse", dtype)
        assert abs(lost - w[:-r].sum()) < 1e-4 * w.sum()


def test_a_rank_that_does_not_suffice_differs(backend, rng):
    """The row that must differ: rank 3 of a factor of rank 4 is another operator."""
    given = batches(rng, ranks=(3, 2))
    A, G, S = averaged(given)
    F = reference.damped_block(A, G, S, damping=DAMPING, rule="factored")
    V = rng.normal(size=(n + 1, m))
    block, statistics = fed(backend, "float64", APPROXIMATION, given)

    made = block.operator(statistics, damping=DAMPING, rule="factored")

    got = backend.to_numpy(made.multiply_inverse(backend.asarray(V)))
    assert_differs(got, np.linalg.solve(F, V.ravel()).reshape(V.shape))
    assert float(made.truncated_traces[0]) > 0


def test_the_statistics_hold_no_square_matrix(backend, rng):
    """Memory is ``n r + m q`` numbers, and the operator's too."""
    given = batches(rng)
    block, statistics = fed(backend, "float64", APPROXIMATION, given)
    made = block.operator(statistics, damping=DAMPING, rule="exact")

    kept = [int(np.prod(x.shape)) for _, x in leaves(statistics)]
    applied = [int(np.prod(x.shape)) for _, x in leaves(made)]
    assert sum(kept) == 3 * (n + 1) + 2 * m + 7
    assert max(applied) == 3 * (n + 1)


def test_a_full_rank_is_the_kronecker_block(backend, dtype, rng):
    """Ranks above the widths keep everything; no damping is then needed."""
    given = batches(rng, ranks=(n, m))
    A, G, S = averaged(given)
    V = rng.normal(size=(n + 1, m))
    block, statistics = fed(
        backend, dtype, LowRankKronecker(input_rank=99, output_rank=99), given
    )

    for rule, damping in (("factored", 0.0), ("exact", 0.0), ("factored", 0.1)):
        F = reference.damped_block(A, G, S, damping=damping, rule=rule)
        made = block.operator(statistics, damping=damping, rule=rule)
        got = backend.to_numpy(made.multiply_inverse(backend.asarray(V, dtype)))
        expected = np.linalg.solve(F, V.ravel()).reshape(V.shape)
        assert_close(got, expected, "inverse", dtype, condition=10)
        assert_close(float(made.logdet()), np.linalg.slogdet(F)[1], "logdet", dtype)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_shared_and_masked_positions_are_those_of_kronecker(backend, rng, sharing):
    """The rows are those of `Kronecker`, masked or not, with S in the block."""
    given = batches(rng, S=(3,))
    mask = rng.random((N, 3)) > 0.3
    V = rng.normal(size=(n + 1, m))
    A, G, S = averaged(given, mask=mask, sharing=sharing)

    block, statistics = fed(
        backend,
        "float64",
        LowRankKronecker(input_rank=3, output_rank=2, sharing=sharing),
        given,
        mask=mask,
    )
    made = block.operator(statistics, damping=DAMPING, rule="exact")

    expected = S * A @ V @ G
    got = backend.to_numpy(made.multiply(backend.asarray(V), damped=False))
    assert_close(got, expected, "inverse", "float64")


def test_merged_parts_are_the_whole(backend, rng):
    """Moments of shards merge and are absorbed to what the whole batch gives."""
    ((x, g),) = batches(rng, number=1)
    block = kc.Block(layer(), APPROXIMATION)
    start, whole = (
        fed(backend, "float64", block.approximation, [(x[::k], g[::k])])[1]
        for k in (2, 1)
    )
    parts = [
        block.moments(
            kc.Batch(backend.asarray(x[i]), backend.asarray(g[i])), conventions=SUM
        )
        for i in (slice(0, 3), slice(3, N))
    ]

    merged = block.merge(*parts)
    absorbed = block.absorb(start, merged, decay=0.5)
    direct = block.update(
        start,
        kc.Batch(backend.asarray(x), backend.asarray(g)),
        conventions=SUM,
        decay=0.5,
    )

    for side in ("input", "output"):
        one, two = (root_of(backend, s.averages[side])[0] for s in (merged, whole))
        assert_close(one, two, "inverse", "float64")
        one, two = (root_of(backend, s.averages[side])[0] for s in (absorbed, direct))
        assert_close(one, two, "inverse", "float64")


def test_an_estimator_takes_the_block(backend, rng):
    """Fed, refreshed and asked as any other; what it lacks is said beforehand."""
    given = batches(rng, number=1)
    F = reference.damped_block(*averaged(given), damping=DAMPING, rule="factored")
    V = rng.normal(size=(n + 1, m))
    options = {
        "decay": 0.9,
        "damping": DAMPING,
        "damping_rule": "factored",
        "reduction": "sum",
    }
    blocks = {"w": kc.Block(layer(), APPROXIMATION)}
    estimator = make_estimator(blocks, **options)

    estimator.update({"w": kc.Batch(*(backend.asarray(rows) for rows in given[0]))})
    estimator.refresh()
    parameters = {"weight": backend.asarray(V[:-1]), "bias": backend.asarray(V[-1])}
    done = estimator.precondition({"w": parameters})["w"]

    expected = np.linalg.solve(F, V.ravel()).reshape(V.shape)
    got = backend.to_numpy(done["weight"])
    assert_close(got, expected[:-1], "inverse", "float64")
    assert_close(backend.to_numpy(done["bias"]), expected[-1], "inverse", "float64")
    with pytest.raises(kc.UnsupportedError, match=r"Cholesky factor.*dense"):
        estimator.apply("multiply_cholesky", {"w": parameters})


@pytest.mark.parametrize("damping", [1e-12, 1e12])
def test_tiny_and_huge_dampings_are_ordinary(backend, dtype, rng, damping):
    """The inverse is right relative to its norm, which the complement decides."""
    given = batches(rng)
    A, G, S = averaged(given)
    F = reference.damped_block(A, G, S, damping=damping, rule="exact")
    V = rng.normal(size=(n + 1, m))
    block, statistics = fed(backend, dtype, APPROXIMATION, given)

    made = block.operator(statistics, damping=damping, rule="exact")
    got = backend.to_numpy(made.multiply_inverse(backend.asarray(V, dtype)))

    w, Q = np.linalg.eigh(S * np.kron(A, G))
    inverse = (Q / (np.where(w < 1e-9, 0.0, w) + damping)) @ Q.T
    assert_close(got, (inverse @ V.ravel()).reshape(V.shape), "inverse", dtype)
    assert np.linalg.eigvalsh(F)[-1] > 0


@pytest.mark.parametrize(("inputs", "outputs", "rows"), [(1, 1, 1)])
def test_widths_and_batches_of_one_are_ordinary(backend, rng, inputs, outputs, rows):
    """One row, one input, one output: the dense block."""
    x, g = rng.normal(size=(rows, inputs)), rng.normal(size=(rows, outputs))
    A, G, S = reference.kronecker_factors(x, g[None], bias=False)
    F = reference.damped_block(A, G, S, damping=DAMPING, rule="factored")
    V = rng.normal(size=(inputs, outputs))
    geometry = kc.Dense(
        in_features=inputs, out_features=outputs, bias=False, weight_layout="io"
    )
    block = kc.Block(geometry, LowRankKronecker(input_rank=2, output_rank=2))
    batch = kc.Batch(backend.asarray(x), backend.asarray(g))
    start = block.initial(batch.inputs)

    made = block.operator(
        block.update(start, batch, conventions=SUM, decay=0.9),
        damping=DAMPING,
        rule="factored",
    )

    got = backend.to_numpy(made.multiply_inverse(backend.asarray(V)))
    assert_close(
        got, np.linalg.solve(F, V.ravel()).reshape(V.shape), "inverse", "float64"
    )
    empty = block.operator(start, damping=DAMPING, rule="exact")
    got = backend.to_numpy(empty.multiply_inverse(backend.asarray(V)))
    assert_close(got, V / DAMPING, "product", "float64")


def test_a_singular_block_is_refused(backend, rng):
    """Without damping the complement has no inverse: an error, or a flag."""
    given = batches(rng)
    block, statistics = fed(backend, "float64", APPROXIMATION, given)

    with pytest.raises(kc.FactorizationError, match="singular without damping"):
        block.operator(statistics, damping=0.0, rule="factored")
    made = block.operator(statistics, damping=0.0, rule="factored", check="status")
    bare = block.operator(statistics, damping=0.0, rule="exact", factorizations=())

    assert int(made.status()) == kc.Status.NOT_POSITIVE
    assert float(bare.trace()) > 0
    with pytest.raises(kc.FactorizationError, match="Increase `damping`"):
        bare.sample(backend.asarray(np.ones((n + 1, m))))
    with pytest.raises(kc.UnsupportedError, match="dense"):
        bare.multiply_cholesky(backend.asarray(np.ones((n + 1, m))))


def test_rows_that_are_not_finite_change_nothing(backend, rng):
    """NaN is a flag or an error; squares that overflow are found at the operator."""
    given = batches(rng)
    block, statistics = fed(backend, "float64", APPROXIMATION, given)
    x, g = given[0]
    bad = np.where(np.arange(n) == 1, np.nan, x)
    batch = kc.Batch(backend.asarray(bad, "float64"), backend.asarray(g, "float64"))
    options = {"conventions": SUM, "decay": 0.9}

    with pytest.raises(kc.NotFiniteError, match="`inputs`"):
        block.update(statistics, batch, **options)
    kept = block.update(statistics, batch, check="status", **options)

    assert int(kept.status) == kc.Status.INPUTS_NOT_FINITE
    for (_, one), (_, two) in zip(
        leaves(statistics.averages), leaves(kept.averages), strict=True
    ):
        assert np.array_equal(backend.to_numpy(one), backend.to_numpy(two))
    huge = kc.Batch(
        backend.asarray(np.full((N, n), 1e200), "float64"),
        backend.asarray(g, "float64"),
    )
    with np.errstate(over="ignore", invalid="ignore"):
        overflowed = block.update(statistics, huge, **options)
        with pytest.raises(kc.NotFiniteError, match="holds NaN or infinity"):
            block.operator(overflowed, damping=DAMPING, rule="factored")
        flagged = block.operator(
            overflowed, damping=DAMPING, rule="factored", check="status"
        )
        assert int(flagged.status()) & kc.Status.MATRIX_NOT_FINITE


def test_pairs_and_numbers_that_make_no_sense_are_refused():
    """Groups, embeddings and ranks below one."""
    grouped = kc.Conv(
        in_channels=2,
        out_channels=2,
        kernel_size=(1,),
        padding="same",
        bias=True,
        weight_layout="spatial_io",
        data_layout="channels_last",
        groups=2,
    )
    embedding = kc.Embedding(num_embeddings=3, features=2, weight_layout="io")
    for geometry in (grouped, embedding):
        with pytest.raises(kc.UnsupportedError, match="take"):
            kc.Block(geometry, LowRankKronecker(input_rank=1, output_rank=1))
    with pytest.raises(kc.ShapeError, match="`output_rank` to be an integer >= 1"):
        LowRankKronecker(input_rank=1, output_rank=0)
    with pytest.raises(kc.ConventionError, match="sharing"):
        LowRankKronecker(input_rank=1, output_rank=1, sharing="some")
