"""Identities that belong to no single concept: A25, A26, B18 and B19 by mode, C5.

Each test names the identity of the literature that it holds; `docs/identities.md` lists
all of them.
"""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.array.structure import replaced
from kfac_core.losses import Categorical, Gaussian, SquaredError, noise_spec, vectors

from ..builders import network
from ..builders.layers import dense_layer
from ..builders.one_block import SUM, learn, operator_for
from ..builders.tolerances import assert_close, assert_differs

N, IN, OUT = 12, 4, 3
LAYER = dense_layer(IN, OUT, bias=False)
EIGEN = kc.EKFAC()


def exact_block(x, g):
    """Return ``1/N sum vec(x g^T) vec(x g^T)^T``, row-major."""
    D = np.einsum("ni,no->nio", x, g).reshape(len(x), -1)
    return D.T @ D / len(x)


def update(backend, block, x, g, **options):
    """Return the statistics of one batch."""
    batch = kc.Batch(backend.asarray(x), backend.asarray(g))
    start = block.initial(batch.inputs)
    return learn(block, batch, start, **options)


def eigen_operator(backend, statistics, x, g):
    """Return EKFAC's operator with the moments of one batch in the bases as they are."""
    rows = LAYER.rows(kc.Batch(backend.asarray(x), backend.asarray(g)))
    fresh = EIGEN.corrected(statistics, rows, conventions=SUM, decay=0.0, weight=1.0)
    return operator_for(kc.Block(LAYER, EIGEN), fresh, damping=0.1, rule="exact")


def eigen_bases(backend, x, g):
    """Return EKFAC's statistics in the bases of one batch, without moments."""
    statistics = update(backend, kc.Block(LAYER, EIGEN), x, g)
    return kc.rebase_block(kc.Block(LAYER, EIGEN), statistics, "zero", "raise")


def correlated_rows(rng):
    """Return x and g of which the second moment is no Kronecker product."""
    x, g = rng.normal(size=(N, IN)), rng.normal(size=(N, OUT))
    return x, g * (1.0 + x[:, :1] ** 2)


def test_the_moments_of_ekfac_are_the_minimizer(backend, rng):
    """A25: any other diagonal is worse, by exactly the square of the difference."""
    x, g = correlated_rows(rng)
    F = exact_block(x, g)
    operator = eigen_operator(backend, eigen_bases(backend, x, g), x, g)
    E = backend.to_numpy(operator.spectrum)

    def error(moments):
        other = replaced(operator, spectrum=backend.asarray(moments))
        dense = backend.to_numpy(other.to_dense(damped=False))
        return np.linalg.norm(F - dense) ** 2

    least = error(E)
    for index in np.ndindex(IN, OUT):
        for step in (0.1, -0.1):
            moved = E.copy()
            moved[index] += step
            assert_close(error(moved) - least, step**2, "inverse", "float64")
    bases = (operator.input, operator.output)
    Q = np.kron(*(backend.to_numpy(basis.eigenvectors) for basis in bases))
    diagonal = np.diag(Q.T @ F @ Q)
    assert_close(E.ravel(), diagonal, "identity", "float64")
    assert_close(E.sum(), np.trace(F), "identity", "float64")
    kfac = np.linalg.norm(F - np.kron(x.T @ x, g.T @ g) / N**2) ** 2
    assert least < kfac * 0.99


def equal_eigenvalues(rng):
    """Return rows whose input moment is ``2 I`` on three directions of four."""
    x, g = correlated_rows(rng)
    U, _ = np.linalg.qr(x)
    Q, _ = np.linalg.qr(rng.normal(size=(IN, IN)))
    return np.sqrt(N) * (U * np.sqrt([2.0, 2.0, 2.0, 0.5])) @ Q.T, g


def rotated_basis(backend, basis, R):
    """Return a basis with its vectors rotated by R, columns to columns."""
    vectors = backend.to_numpy(basis.eigenvectors) @ R
    return replaced(basis, eigenvectors=backend.asarray(vectors))


def rotation(rng, values):
    """Return a rotation that mixes the three equal eigenvalues with each other only."""
    R = np.eye(IN)
    same = np.flatnonzero(np.abs(values - 2.0) < 1e-10)
    assert len(same) == 3
    R[np.ix_(same, same)] = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    return R


@pytest.mark.parametrize("eigenvalues", ["repeated", "distinct"])
def test_ekfac_does_not_depend_on_the_choice_of_eigenvectors(backend, rng, eigenvalues):
    """C5: rotations in an eigenspace, and signs and order of eigenvectors."""
    repeated = eigenvalues == "repeated"
    x, g = (equal_eigenvalues if repeated else correlated_rows)(rng)
    V = backend.asarray(rng.normal(size=(IN, OUT)))
    statistics = eigen_bases(backend, x, g)
    own, other = statistics.bases["input"], statistics.bases["output"]
    R = np.eye(IN)[:, [2, 0, 3, 1]] * np.array([1.0, -1.0, -1.0, 1.0])
    if repeated:
        R = rotation(rng, backend.to_numpy(own.eigenvalues))
    bases = {
        "input": rotated_basis(backend, own, R),
        "output": rotated_basis(backend, other, -np.eye(OUT)),
    }

    operators = [
        eigen_operator(backend, some, x, g)
        for some in (statistics, replaced(statistics, bases=statistics.bases | bases))
    ]

    first, second = (backend.to_numpy(F.multiply_inverse(V)) for F in operators)
    assert_close(second, first, "inverse", "float64")
    traces = [float(F.trace(damped=False)) for F in operators]
    assert_close(traces, [np.trace(exact_block(x, g))] * 2, "identity", "float64")


def reparametrized_rows(rng):
    """Return rows of a hidden layer with ``W = omega W' phi``, before and after.

    The framework that holds W' sees ``x omega`` and ``g phi^T``.
    """
    net = network.random_network(rng, (3, 3, 3), "tanh")
    data = rng.normal(size=(N, 3))
    inputs, outputs, out = net.forward(data, xp=np)
    targets = rng.normal(size=out.shape)
    g = net.backward(network.gradient("mse", out, targets), outputs, xp=np)[1]
    x = np.concatenate([inputs[1], np.ones((N, 1))], axis=1)
    omega = np.eye(IN) + 0.4 * rng.normal(size=(IN, IN))
    phi = np.eye(OUT) + 0.4 * rng.normal(size=(OUT, OUT))
    return x, g, omega, phi


@pytest.mark.parametrize("name", ["kronecker", "tnt"])
def test_the_curvature_is_invariant_under_reparametrization(backend, rng, name):
    """A26: ``F' = J^T F J`` for ``W = omega W' phi``; fits in a norm are not."""
    kind = {"kronecker": kc.Kronecker(), "tnt": kc.TNT()}
    x, g, omega, phi = reparametrized_rows(rng)
    block = kc.Block(LAYER, kind[name])

    blocks = []
    for rows in ((x, g), (x @ omega, g @ phi.T)):
        statistics = update(backend, block, *rows)
        made = operator_for(block, statistics, damping=0.0, factorizations=())
        blocks.append(backend.to_numpy(made.to_dense(damped=False)))

    # vec(omega W' phi) = (omega (x) phi^T) vec(W'), row-major.
    J = np.kron(omega, phi.T)
    expected = J.T @ blocks[0] @ J
    exact = exact_block(x @ omega, g @ phi.T)
    assert_close(J.T @ exact_block(x, g) @ J, exact, "identity", "float64")
    if name == "kronecker":
        assert_close(blocks[1], expected, "identity", "float64")
    else:
        assert_differs(blocks[1], expected)


@pytest.mark.parametrize("damping", [0.0, 0.1])
@pytest.mark.parametrize("rule", ["factored", "exact"])
def test_the_step_is_invariant_without_damping(backend, rng, rule, damping):
    """A26: the step in W' is that in W, through omega and phi; damping breaks it."""
    x, g, omega, phi = reparametrized_rows(rng)
    block = kc.Block(LAYER, kc.Kronecker())

    steps = []
    for rows in ((x, g), (x @ omega, g @ phi.T)):
        statistics = update(backend, block, *rows)
        operator = operator_for(block, statistics, damping=damping, rule=rule)
        batch = kc.Batch(*map(backend.asarray, rows))
        gradient = block.mean_gradient(batch, conventions=SUM)
        steps.append(backend.to_numpy(operator.multiply_inverse(gradient)))

    step = omega @ steps[1] @ phi
    if damping == 0.0:
        assert_close(step, steps[0], "inverse", "float64")
    else:
        assert_differs(step, steps[0])


def test_without_damping_kfac_is_descent_in_whitened_coordinates(backend, rng):
    """A26: where both factors are I, the step is the gradient itself."""
    x, g, *_ = reparametrized_rows(rng)
    omega, phi = (
        np.linalg.inv(np.linalg.cholesky(rows.T @ rows / N)).T for rows in (x, g)
    )
    rows = x @ omega, g @ phi
    block = kc.Block(LAYER, kc.Kronecker())
    batch = kc.Batch(*map(backend.asarray, rows))
    gradient = block.mean_gradient(batch, conventions=SUM)

    operator = operator_for(block, update(backend, block, *rows), damping=0.0)

    step = backend.to_numpy(operator.multiply_inverse(gradient))
    assert_close(step, backend.to_numpy(gradient), "inverse", "float64")


LOSSES = {
    "gaussian": (Gaussian(variance=0.25), 4.0),
    "squared error": (SquaredError(scale=0.5), 1.0),
}


@pytest.mark.parametrize("name", LOSSES)
def test_sigma_point_noise_gives_the_ggn_by_the_sampled_mode(backend, rng, name):
    """B19: noise ``+-sqrt(C) e_c`` in the mode "gradients" is the GGN to roundoff."""
    loss, curvature = LOSSES[name]
    net = network.random_network(rng, (3, 4, 2, 3), "identity")
    x = rng.normal(size=(3, 3))
    outputs = net.outputs(x)
    C = outputs.shape[-1]
    points = np.sqrt(C) * np.concatenate([np.eye(C), -np.eye(C)])
    noise = np.repeat(points[:, None, :], len(x), axis=1)
    natural = backend.asarray(outputs)
    spec = noise_spec(loss, natural, mode="gradients", samples=2 * C)

    def learned(noise):
        made = vectors(loss, natural, mode="gradients", noise=backend.asarray(noise))
        assert made.source_reduction == "mean"
        host = backend.to_numpy(made.vectors)
        return network.feed(
            backend, net, x, host, loss="sum", sources=made.source_reduction
        )

    assert spec.distribution == "normal"
    assert spec.shape == noise.shape
    exact = [curvature * F for F in network.ggn_blocks(net, x, "mse")]
    for block, dense in zip(learned(noise), exact, strict=True):
        assert_close(block.dense, dense, "identity", "float64")
    drawn = rng.normal(size=noise.shape)
    for block, dense in zip(learned(drawn), exact, strict=True):
        assert_differs(block.dense, dense)


def test_a_grid_of_noise_gives_the_fisher_by_the_sampled_mode(backend, rng):
    """B18: with probabilities of eighths, eight levels of noise are an enumeration."""
    p = np.array([1.0, 2.0, 5.0]) / 8.0
    x = rng.normal(size=(1, 3))
    net = network.random_network(rng, (3, 4, 3), "tanh")
    net.weights[-1][-1] += np.log(p) - net.outputs(x)[0]
    natural = backend.asarray(net.outputs(x))
    spec = noise_spec(Categorical(), natural, mode="gradients", samples=8)
    levels = (np.arange(8.0) + 0.5) / 8.0

    made = vectors(
        Categorical(),
        natural,
        mode="gradients",
        noise=backend.asarray(levels.reshape(spec.shape)),
    )
    host = backend.to_numpy(made.vectors)
    learned = network.feed(backend, net, x, host, loss="sum", sources="mean")

    for block, dense in zip(learned, network.ggn_blocks(net, x, "ce"), strict=True):
        assert_close(block.dense, dense, "identity", "float64")
