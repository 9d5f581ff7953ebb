"""Three dense layers in a row, and dense matrices of their block-tridiagonal curvature.

In plain NumPy and without library code, except for what is fed.
"""

import itertools

import numpy as np

import kfac_core as kc

N, M = 30, 2
NAMES = ["first", "second", "third"]
# One shape for all keeps what JAX compiles short; other widths have a test of their own.
WIDTHS = [(3, 3, True), (3, 3, True), (4, 3, False)]
LAYERS = {
    name: kc.Dense(in_features=n, out_features=m, bias=bias, weight_layout="io")
    for name, (n, m, bias) in zip(NAMES, WIDTHS, strict=True)
}
SHAPES = [layer.matrix_shape for layer in LAYERS.values()]
EDGES = np.cumsum([0, *(n * m for n, m in SHAPES)])


def chain_of(layers):
    """Return the block that layers make together."""
    chain = kc.Chain(names=tuple(layers), layers=tuple(layers.values()))
    return kc.Block(chain, kc.BlockTridiagonal())


def draw(rng, examples=N, sources=M):
    """Return x and g of all layers, correlated between neighbors."""
    xs = [rng.normal(size=(examples, 3))]
    gs = [rng.normal(size=(sources, examples, 3))]
    for n, m, _ in WIDTHS[1:]:
        step = rng.normal(size=(xs[-1].shape[1], n))
        xs.append(np.tanh(xs[-1] @ step) + 0.4 * rng.normal(size=(examples, n)))
        step = rng.normal(size=(gs[-1].shape[2], m))
        gs.append(gs[-1] @ step + 0.4 * rng.normal(size=(sources, examples, m)))
    return xs, gs


def fed(backend, xs, gs, dtype="float64", masks=None):
    """Return what the layers saw on the backend."""
    masks = [None] * 3 if masks is None else masks
    return {
        name: kc.Batch(
            backend.asarray(x, dtype),
            backend.asarray(g, dtype),
            mask=None if mask is None else backend.asarray(mask),
            sources=len(g),
        )
        for name, x, g, mask in zip(NAMES, xs, gs, masks, strict=True)
    }


def moments_of(xs, gs, kept=None):
    """Return all A_ij, all G_ij and S by loops over examples."""
    kept = range(len(xs[0])) if kept is None else kept
    rows = [
        [np.append(x[i], 1.0) if bias else x[i] for i in kept]
        for x, (_, _, bias) in zip(xs, WIDTHS, strict=True)
    ]
    R = len(rows[0])
    A, G = {}, {}
    for i, j in itertools.product(range(3), range(3)):
        A[i, j] = sum(np.outer(a, b) for a, b in zip(rows[i], rows[j], strict=True)) / R
        G[i, j] = sum(
            np.outer(gs[i][s][e], gs[j][s][e]) for s in range(len(gs[i])) for e in kept
        )
        G[i, j] = G[i, j] / R
    return A, G, R / len(xs[0])


def damped_moments(A, G, S, damping, rule):
    """Return the same with the damped blocks on the diagonal."""
    A, G = dict(A), dict(G)
    for i in range(3):
        n, m = len(A[i, i]), len(G[i, i])
        means = np.trace(A[i, i]) / n, np.trace(G[i, i]) / m
        pi = np.sqrt(means[0] / means[1]) if rule == "factored" else 1.0
        root = np.sqrt(damping / S)
        A[i, i] = A[i, i] + pi * root * np.eye(n)
        G[i, i] = G[i, i] + root / pi * np.eye(m)
    return A, G


def full_matrix(A, G, S, names=range(3)):
    """Return F~ of some layers: all of its blocks are Kronecker products."""
    return S * np.block([[np.kron(A[i, j], G[i, j]) for j in names] for i in names])


def tridiagonal_matrix(A, G, S):
    """Return F of three layers: the corner of a chain is ``F_12 F_22^-1 F_23``."""
    F = full_matrix(A, G, S)
    first, second, third = (slice(a, b) for a, b in itertools.pairwise(EDGES))
    corner = F[first, second] @ np.linalg.solve(F[second, second], F[second, third])
    F[first, third], F[third, first] = corner, corner.T
    return F


def parameters_of(flat):
    """Return the layers' parameters, on the host, that make one long vector."""
    found = {}
    for (name, layer), (a, b) in zip(
        LAYERS.items(), itertools.pairwise(EDGES), strict=True
    ):
        rows = flat[a:b].reshape(layer.matrix_shape)
        found[name] = {"weight": rows[: layer.in_features]}
        if layer.bias:
            found[name]["bias"] = rows[-1]
    return found


def placed(backend, parameters, dtype="float64"):
    """Return parameters on the backend."""
    return {
        name: {key: backend.asarray(x, dtype) for key, x in own.items()}
        for name, own in parameters.items()
    }
