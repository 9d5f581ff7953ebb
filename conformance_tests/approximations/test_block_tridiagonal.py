"""A27: the block-tridiagonal inverse over a chain of layers, against dense matrices.

The moments are loops over examples.  F is then known by what it must be: it has the given
blocks on the tridiagonal, and its inverse has none beyond.  There is one such matrix.
"""

import itertools

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.array.structure import replaced
from kfac_core.linalg import series_chain
from kfac_core.linalg.fallback import fallback_of

from ..builders import network, reference
from ..builders.chain_reference import (
    EDGES,
    LAYERS,
    NAMES,
    SHAPES,
    N,
    chain_of,
    damped_moments,
    draw,
    fed,
    full_matrix,
    moments_of,
    tridiagonal_matrix,
)
from ..builders.layers import dense_layer
from ..builders.one_block import SUM, learn, operator_for
from ..builders.tolerances import assert_close, assert_differs

RULES = ["factored", "factored_unit_pi"]
CHAIN = chain_of(LAYERS)


def statistics_of(chain, batches, **options):
    """Return the statistics after one update."""
    start = chain.initial(next(iter(batches.values())).inputs)
    settings = {"conventions": SUM, "decay": 0.9} | options
    return kc.update_block(chain, start, batches, kc.UpdateOptions(**settings))


def column(backend, flat, dtype="float64"):
    """Return one long vector as the chain has it."""
    return backend.asarray(np.reshape(flat, (-1, 1)), dtype)


def flattened(backend, found):
    """Return a vector of the chain on the host."""
    return backend.to_numpy(found).ravel()


def columns_of(backend, product, size, dtype="float64"):
    """Return the matrix of a product with vectors, on the host."""
    units = (column(backend, unit, dtype) for unit in np.eye(size))
    return np.stack([flattened(backend, product(unit)) for unit in units], axis=1)


def inverse_of(backend, operator, dtype="float64"):
    """Return ``F^-1`` as one matrix on the host."""
    inverse = operator.multiply_inverse
    return columns_of(backend, inverse, operator.vector_shape[0], dtype)


def block(F, i, j):
    """Return one block of a matrix of three layers."""
    return F[EDGES[i] : EDGES[i + 1], EDGES[j] : EDGES[j + 1]]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("masked", [False, True])
def test_it_has_the_given_blocks_and_no_others_in_its_inverse(
    backend, dtype, rng, rule, masked
):
    """A27: F~ on the tridiagonal, with damped blocks; the inverse is zero elsewhere."""
    xs, gs = draw(rng)
    kept, masks = np.ones(N, bool), None
    if masked:
        # What any mask leaves out is left out of all layers, whatever it holds there.
        masks = [rng.random(N) > 0.1, None, rng.random(N) > 0.1]
        kept = masks[0] & masks[2]
        xs[0][~masks[0]], gs[2][:, ~masks[2]] = np.nan, np.nan
    batches = fed(backend, xs, gs, dtype, masks)

    operator = operator_for(
        CHAIN, statistics_of(CHAIN, batches), damping=0.2, rule=rule
    )
    F = backend.to_numpy(operator.to_dense())
    inverse = inverse_of(backend, operator, dtype)

    A, G, S = moments_of(xs, gs, np.flatnonzero(kept))
    A, G = damped_moments(A, G, S, 0.2, rule)
    for i, j in [(0, 0), (0, 1), (1, 1), (1, 2), (2, 2)]:
        expected = S * np.kron(A[i, j], G[i, j])
        assert_close(block(F, i, j), expected, "product", dtype, condition=10)
    assert_close(F, tridiagonal_matrix(A, G, S), "inverse", dtype)
    assert_close(inverse, np.linalg.inv(F), "inverse", dtype)
    assert np.array_equal(block(inverse, 0, 2), np.zeros((12, 12)))
    assert np.linalg.norm(block(inverse, 0, 1)) > 0.05 * np.linalg.norm(inverse)
    assert_differs(F, full_matrix(A, G, S))


def test_two_layers_are_the_full_matrix(backend, rng):
    """A27: for two layers the inverse is that of the whole F~."""
    xs, gs = draw(rng)
    names = NAMES[:2]
    pair = chain_of({name: LAYERS[name] for name in names})
    batches = fed(backend, xs, gs)
    batches.pop("third")

    operator = operator_for(pair, statistics_of(pair, batches), damping=0.2)

    A, G = damped_moments(*moments_of(xs, gs), 0.2, "factored")
    F = full_matrix(A, G, 1.0, names=range(2))
    assert_close(backend.to_numpy(operator.to_dense()), F, "product", "float64")
    got = inverse_of(backend, operator)
    assert_close(got, np.linalg.inv(F), "inverse", "float64")


def kronecker_blocks(backend, batches, damping):
    """Return the dense damped block of each layer as K-FAC has it."""
    found = []
    for name, layer in LAYERS.items():
        one = kc.Block(layer, kc.Kronecker())
        statistics = learn(one, batches[name], decay=0.9)
        made = operator_for(one, statistics, damping=damping)
        found.append(backend.to_numpy(made.to_dense()))
    return found


def test_without_crossed_moments_it_is_block_diagonal(backend, rng):
    """A27: if g of neighbors are uncorrelated it is K-FAC; else it is not."""
    xs, gs = draw(rng)
    # Each layer's gradients are of other sources than its neighbors'.
    apart = [np.zeros((6, N, g.shape[-1])) for g in gs]
    for i, g in enumerate(gs):
        apart[i][2 * i : 2 * i + 2] = g

    dense = []
    for some in (apart, gs):
        statistics = statistics_of(CHAIN, fed(backend, xs, some))
        operator = operator_for(CHAIN, statistics, damping=0.2)
        dense.append(backend.to_numpy(operator.to_dense()))

    blocks = kronecker_blocks(backend, fed(backend, xs, gs), 0.2)
    F = np.zeros_like(dense[0])
    for i, own in enumerate(blocks):
        block(F, i, i)[...] = own
    assert_close(dense[0], F, "product", "float64")
    assert_differs(dense[1], F)


def test_crossed_moments_are_the_ggn_of_a_linear_network(backend, rng):
    """B4 between layers: in a deep linear network the neighbors' blocks are exact."""
    net = network.random_network(rng, (3, 3, 3, 3), "identity")
    x = rng.normal(size=(N, 3))
    outputs = net.outputs(x)
    given = network.batches(backend, net, x, network.type2_vectors("mse", outputs))
    layers = (part.layer for part in network.blocks_of(net))
    chain = chain_of(dict(zip(NAMES, layers, strict=True)))
    statistics = statistics_of(chain, dict(zip(NAMES, given, strict=True)))

    F = backend.to_numpy(operator_for(chain, statistics, damping=1.0).to_dense())

    J = np.concatenate(network.jacobians(net, x), axis=-1)
    ggn = np.einsum("nci,ncj->ij", J, J) / len(x)
    edges = np.cumsum([0, *(W.size for W in net.weights)])
    first, second, third = (slice(a, b) for a, b in itertools.pairwise(edges))
    for i, j in ((first, second), (second, third)):
        assert_close(F[i, j], ggn[i, j], "identity", "float64")
    assert_differs(F[first, third], ggn[first, third])


def test_undamped_it_is_invariant(backend, rng):
    """A26: with ``x -> T x`` and ``g -> R g`` in every layer, steps transform likewise."""
    xs, gs = draw(rng)
    bare = chain_of(
        {
            name: dense_layer(n, m, bias=False)
            for name, (n, m) in zip(NAMES, SHAPES, strict=True)
        }
    )
    xs = [
        np.concatenate([x, np.ones((N, n - x.shape[1]))], axis=1)
        for x, (n, _) in zip(xs, SHAPES, strict=True)
    ]
    T = [np.eye(n) + 0.3 * rng.normal(size=(n, n)) for n, _ in SHAPES]
    R = [np.eye(m) + 0.3 * rng.normal(size=(m, m)) for _, m in SHAPES]
    V = [rng.normal(size=shape) for shape in SHAPES]
    rotated = (
        [x @ t.T for x, t in zip(xs, T, strict=True)],
        [g @ r.T for g, r in zip(gs, R, strict=True)],
    )

    steps = {}
    for damping in (0.0, 0.2):
        for which, rows in (("plain", (xs, gs)), ("rotated", rotated)):
            statistics = statistics_of(bare, fed(backend, *rows))
            operator = operator_for(bare, statistics, damping=damping)
            v = [t @ v @ r.T for t, v, r in zip(T, V, R, strict=True)]
            given = np.concatenate([u.ravel() for u in (V if which == "plain" else v)])
            made = operator.multiply_inverse(column(backend, given))
            parts = np.split(flattened(backend, made), EDGES[1:-1])
            host = [u.reshape(shape) for u, shape in zip(parts, SHAPES, strict=True)]
            if which == "rotated":
                host = [t.T @ u @ r for t, u, r in zip(T, host, R, strict=True)]
            steps[damping, which] = np.concatenate([u.ravel() for u in host])

    assert_close(steps[0.0, "rotated"], steps[0.0, "plain"], "inverse", "float64")
    assert_differs(steps[0.2, "rotated"], steps[0.2, "plain"])


def test_conditionals_are_differences_of_products(backend, rng):
    """A10: Sigma is ``A (x) G - C (x) D``, solved by one pair of bases."""
    xs, gs = draw(rng)
    statistics = statistics_of(CHAIN, fed(backend, xs, gs))
    operator = operator_for(CHAIN, statistics, damping=0.2)
    A, G = damped_moments(*moments_of(xs, gs), 0.2, "factored")
    C, D = (F[0, 1] @ np.linalg.solve(F[1, 1], F[1, 0]) for F in (A, G))
    V = rng.normal(size=SHAPES[0])

    dense = np.kron(A[0, 0], G[0, 0]) - np.kron(C, D)
    expected = np.linalg.solve(dense, V.ravel()).reshape(V.shape)
    part = operator.conditionals["0"]
    solution = part.solve(backend.asarray(V), xp=backend.xp)
    back = part.multiply(solution, xp=backend.xp)

    got = backend.to_numpy(solution)
    assert_close(got, expected, "inverse", "float64")
    assert_close(backend.to_numpy(back), V, "inverse", "float64")


@pytest.mark.parametrize("examples", [1, 3])
@pytest.mark.parametrize("damping", [1e-6, 1e-1, 1e6])
def test_rank_deficient_moments_and_any_damping(backend, rng, examples, damping):
    """Of one example all correlations are as large as they can be, below 1."""
    xs, gs = draw(rng, examples, 1)
    statistics = statistics_of(CHAIN, fed(backend, xs, gs))

    operator = operator_for(CHAIN, statistics, damping=damping)
    v = rng.normal(size=EDGES[-1])
    got = flattened(backend, operator.multiply_inverse(column(backend, v)))

    A, G = damped_moments(*moments_of(xs, gs), damping, "factored")
    F = tridiagonal_matrix(A, G, 1.0)
    expected = np.linalg.solve(F, v)
    condition = min(np.linalg.cond(F), 1e8) * 1e-4
    assert_close(got, expected, "inverse", "float64", condition=condition)
    spectra = [backend.to_numpy(c.weights) for c in operator.conditionals.values()]
    assert all(s.min() > 0 and s.max() <= 1 for s in spectra)
    assert all(float(c.clipped) == 0 for c in operator.conditionals.values())


def test_stale_moments_of_the_layers_are_refused(backend, rng):
    """Diagonal moments of other rows than the crossed ones: an error, or the flag."""
    xs, gs = draw(rng)
    small = [0.05 * x for x in xs]
    new = statistics_of(CHAIN, fed(backend, xs, gs))
    old = statistics_of(CHAIN, fed(backend, small, gs)).averages
    crossed = {k: new.averages[k] for k in new.averages if k[:3] in ("0-1", "1-2")}
    stale = replaced(new, averages=old | crossed)

    with pytest.raises(
        kc.FactorizationError, match=r"first: .*above 1.*different rows"
    ):
        operator_for(CHAIN, stale, damping=1e-6)
    operator = operator_for(CHAIN, stale, damping=1e-6, check="status")

    assert kc.Status.INACCURATE in kc.Status(int(operator.status()))
    assert float(operator.conditionals["0"].clipped) > 1.0
    assert np.all(backend.to_numpy(operator.conditionals["0"].weights) >= 0)
    V = column(backend, rng.normal(size=EDGES[-1]))
    assert np.all(np.isfinite(flattened(backend, operator.multiply(V))))


def test_correlations_above_one_by_rounding_are_clipped(backend, rng):
    """Undamped, with equal inputs in two layers: clipped at 1, and the dense answer."""
    xs, gs = draw(rng)
    layer = LAYERS["first"]
    pair = chain_of({"first": layer, "second": layer})
    g = gs[0] @ rng.normal(size=(3, 3)) + 0.5 * rng.normal(size=gs[0].shape)
    given = fed(backend, [xs[0], xs[0], xs[0]], [gs[0], g, g])
    given.pop("third")

    operator = operator_for(pair, statistics_of(pair, given), damping=0.0)

    x = np.concatenate([xs[0], np.ones((N, 1))], axis=1)
    both = np.concatenate([gs[0], g], axis=-1).reshape(-1, 6)
    G = (both.T @ both / N).reshape(2, 3, 2, 3)
    A = x.T @ x / N
    F = np.block([[np.kron(A, G[i, :, j]) for j in range(2)] for i in range(2)])
    got = inverse_of(backend, operator)
    assert_close(got, np.linalg.inv(F), "inverse", "float64")
    assert float(operator.conditionals["0"].clipped) < 1e-12


def test_float64_is_the_fallback_of_float32(backend, dtype, rng, monkeypatch):
    """The operator says by which fallback it was made, and is in the statistics' dtype."""
    xs, gs = draw(rng)
    statistics = statistics_of(CHAIN, fed(backend, xs, gs, dtype))
    options = {"damping": 0.2, "rule": "factored"}

    easy = operator_for(CHAIN, statistics, **options)
    # Between the residuals that the two precisions have, whatever the library.
    monkeypatch.setattr(series_chain, "RESIDUAL_LIMIT", 1e-10)
    operator = operator_for(CHAIN, statistics, **options)
    flagged = operator_for(CHAIN, statistics, check="status", **options)

    fallback = {"float64": "working", "float32": "float64"}[dtype]
    flags = {"float64": kc.Status.OK, "float32": kc.Status.INACCURATE}[dtype]
    found = [fallback_of(x).name.lower() for x in (easy, operator, flagged)]
    assert found == ["working", fallback, "working"]
    assert int(flagged.status()) == flags
    assert operator.scale.dtype == backend.dtype(dtype)
    V = column(backend, rng.normal(size=EDGES[-1]), dtype)
    got, value = (flattened(backend, o.multiply_inverse(V)) for o in (operator, easy))
    assert_close(got, value, "inverse", dtype)


@pytest.mark.usefixtures("compiles_long")
def test_chains_of_layers_of_width_one(backend, rng):
    """Neighbors of different shapes, of one input and of one output among them."""
    layers = {
        "wide": dense_layer(3, 1, bias=False),
        "thin": kc.Dense(in_features=1, out_features=2, bias=True, weight_layout="oi"),
    }
    pair = chain_of(layers)
    x = [rng.normal(size=(N, n)) for n in (3, 1)]
    g = [rng.normal(size=(N, m)) for m in (1, 2)]
    x[1][:, 0] += x[0][:, 0]
    g[1] += g[0]
    batches = {
        name: kc.Batch(backend.asarray(a), backend.asarray(b))
        for name, a, b in zip(layers, x, g, strict=True)
    }

    operator = operator_for(pair, statistics_of(pair, batches), damping=0.2)
    dense = backend.to_numpy(operator.to_dense())
    inverse = inverse_of(backend, operator)

    x[1] = np.concatenate([x[1], np.ones((N, 1))], axis=1)
    A, G = ([[a.T @ b / N for b in rows] for a in rows] for rows in (x, g))
    blocks = [[np.kron(A[i][j], G[i][j]) for j in range(2)] for i in range(2)]
    for i in range(2):
        blocks[i][i] = reference.damped_block(
            A[i][i], G[i][i], 1.0, damping=0.2, rule="factored"
        )
    F = np.block(blocks)
    assert_close(dense, F, "product", "float64")
    assert_close(inverse, np.linalg.inv(F), "inverse", "float64")
