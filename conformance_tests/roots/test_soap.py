"""Adam in an eigenbasis: every function against dense float64 matrices."""

import numpy as np
import pytest
from scipy.linalg import block_diag

from kfac_core.roots import (
    adapted_share,
    agreement,
    average_weights,
    averaged_factor,
    bounded_gradient,
    carried_moments,
    diagonal_blocks,
    from_basis,
    gradient_jump,
    in_basis,
    momentum_factor,
    normalized_gradient,
    renewed_basis,
    side_blocks,
    squared_sizes,
    width_factor,
)

from ..builders import reference
from ..builders.tolerances import assert_close


def orthogonal(rng, *shape):
    """Return a stack of orthogonal matrices."""
    return np.linalg.qr(rng.normal(size=shape))[0]


def dense(blocks):
    """Return each basis of a stack as one matrix."""
    return np.stack([block_diag(*Q) for Q in blocks])


@pytest.fixture
def sides(rng):
    """Return two bases of a side of 6 and two of a side of 8, of unlike blocks."""
    return orthogonal(rng, 2, 2, 2, 3, 3), orthogonal(rng, 2, 2, 4, 2, 2)


def test_a_gradient_in_the_basis_is_the_dense_product(backend, dtype, rng, sides):
    """``Q_L^T V Q_R`` with block-diagonal bases, and back."""
    (L, _), (R, _) = sides
    V = rng.normal(size=(2, 6, 8))
    left, right, array = (backend.asarray(x, dtype) for x in (L, R, V))

    rotated = in_basis(array, left, right)

    expected = np.swapaxes(dense(L), -1, -2) @ V @ dense(R)
    assert_close(backend.to_numpy(rotated), expected, "product", dtype)
    back = backend.to_numpy(from_basis(rotated, left, right))
    assert_close(back, V, "product", dtype)


def test_a_side_without_a_basis_stays(backend, rng, sides):
    """None is the identity, on either side."""
    (L, _), _ = sides
    V = rng.normal(size=(2, 6, 8))

    rotated = in_basis(backend.asarray(V), backend.asarray(L), None)

    expected = np.swapaxes(dense(L), -1, -2) @ V
    assert_close(backend.to_numpy(rotated), expected, "product", "float64")
    assert np.array_equal(backend.to_numpy(in_basis(backend.asarray(V), None, None)), V)


@pytest.mark.parametrize("has_old", [True, False])
def test_moments_follow_the_basis(backend, rng, sides, has_old):
    """The diagonal of the covariance, in the new basis."""
    (L, new_left), (R, new_right) = sides
    v = rng.random(size=(2, 6, 8))
    old = [backend.asarray(x) if has_old else None for x in (L, R)]

    second = carried_moments(
        backend.asarray(v),
        left=(old[0], backend.asarray(new_left)),
        right=(old[1], backend.asarray(new_right)),
    )

    for i in range(2):
        before = np.eye(48)
        if has_old:
            before = np.kron(block_diag(*L[i]), block_diag(*R[i]))
        after = np.kron(block_diag(*new_left[i]), block_diag(*new_right[i]))
        S = before.T @ after
        covariance = S.T @ np.diag(v[i].reshape(-1)) @ S
        got = backend.to_numpy(second)[i].reshape(-1)
        assert_close(got, np.diag(covariance), "product", "float64")


def test_blocks_of_a_gram_matrix(backend, dtype, rng):
    """The diagonal blocks of ``X^T X``."""
    X = rng.normal(size=(7, 6))
    array = backend.asarray(X, dtype)

    blocks = diagonal_blocks(array, 3)

    expected = np.stack(
        [(X.T @ X)[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] for i in range(3)]
    )
    assert_close(backend.to_numpy(blocks), expected, "gram", dtype)


def test_a_factor_averages_matrices_of_mean_diagonal_one(backend, dtype, rng):
    """Units drop out of each, before they are averaged."""
    B = np.stack([reference.spd(rng, 5), reference.spd(rng, 5)])
    units = np.asarray([1e-6, 1e6])[:, None, None]

    first = averaged_factor(None, backend.asarray(B * units, dtype), decay=0.9)
    second = averaged_factor(first, backend.asarray(B[::-1] * units, dtype), decay=0.9)

    scaled = B / (np.trace(B, axis1=1, axis2=2) / 5)[:, None, None]
    expected = 0.9 * scaled + 0.1 * scaled[::-1]
    assert_close(backend.to_numpy(second), expected, "gram", dtype)


@pytest.mark.parametrize("bad", [0.0, np.nan, np.inf])
def test_a_gram_matrix_without_a_scale_changes_nothing(backend, rng, bad):
    """Zero or infinite rows, as of a scaler's overflow, leave that block alone."""
    B = np.stack([reference.spd(rng, 3)] * 2)
    C = backend.asarray(B)
    B = B.copy()
    B[1] = bad

    factor = backend.to_numpy(averaged_factor(C, backend.asarray(B), decay=0.5))
    first = backend.to_numpy(averaged_factor(None, backend.asarray(B), decay=0.5))

    assert np.array_equal(factor[1], backend.to_numpy(C)[1])
    assert not np.array_equal(factor[0], backend.to_numpy(C)[0])
    assert np.array_equal(first[1], np.eye(3))


def test_the_first_basis_is_an_eigenbasis(backend, dtype, rng):
    """``Q^T C Q`` is diagonal and descending."""
    C = np.stack([reference.spd(rng, 6), reference.spd(rng, 6)])

    Q, residual = renewed_basis(None, backend.asarray(C, dtype))

    Q = backend.to_numpy(Q).astype(np.float64)
    B = np.swapaxes(Q, -1, -2) @ C @ Q
    w = np.linalg.eigvalsh(C)[:, ::-1]
    expected = np.stack([np.diag(x) for x in w])
    assert_close(B, expected, "eigenvalues", dtype, condition=10.0)
    assert np.all(backend.to_numpy(residual) < 1e-5)


def test_a_renewed_basis_is_a_sorted_step_of_orthogonal_iteration(backend, dtype, rng):
    """``qr(C Q)`` with columns by their quotients, and the residual of before."""
    C = np.stack([reference.spd(rng, 6), reference.spd(rng, 6)])
    Q = orthogonal(rng, 2, 6, 6)

    new, residual = renewed_basis(backend.asarray(Q, dtype), backend.asarray(C, dtype))

    for i in range(2):
        B = Q[i].T @ C[i] @ Q[i]
        order = np.argsort(-np.diag(B))
        expected, _ = np.linalg.qr(C[i] @ Q[i][:, order])
        overlap = np.abs(expected.T @ backend.to_numpy(new)[i])
        assert_close(overlap, np.eye(6), "eigenvalues", dtype, condition=100.0)
        outside = np.linalg.norm(B - np.diag(np.diag(B))) / np.linalg.norm(B)
        assert abs(backend.to_numpy(residual)[i] - outside) < 1e-4


@pytest.mark.parametrize(("steps", "bound"), [(4, 2.0), (5, 2.0), (9, 0.5), (9, None)])
def test_unusual_coordinates_are_bounded(backend, steps, bound):
    """Not those of few steps, those that were zero so far, and what is no number."""
    g = np.array([0.3, -7.0, 7.0, -2.0, np.nan])
    v = np.array([1.0, 4.0, 0.0, 9.0, 1.0])

    got = bounded_gradient(
        backend.asarray(g),
        backend.asarray(v * (1 - 0.9**steps)),
        steps=steps,
        decay=0.9,
        bound=bound,
    )

    expected = {
        (5, 2.0): [0.3, -4.0, 7.0, -2.0, np.nan],
        (9, 0.5): [0.3, -1.0, 7.0, -1.5, np.nan],
    }.get((steps, bound), g)
    np.testing.assert_allclose(backend.to_numpy(got), expected, rtol=1e-12)


def test_directions_are_adams_without_a_first_moment(backend, rng):
    """Three steps, with the sums of all gradients written out."""
    gradients = rng.normal(size=(3, 4, 2))
    v = backend.asarray(np.zeros((4, 2)))

    for t, g in enumerate(gradients, start=1):
        v, d = normalized_gradient(v, backend.asarray(g), step=t, decay=0.95, eps=1e-3)

    weights = 0.95 ** np.arange(2, -1, -1)[:, None, None]
    average = (weights * gradients**2).sum(0) / weights.sum()
    expected = gradients[-1] / (average**0.5 + 1e-3)
    assert_close(backend.to_numpy(d), expected, "product", "float64")


def test_the_momentum_is_an_average_over_a_tenth_of_the_steps():
    """Weights of all directions so far sum to one, and their mean age is a tenth."""
    shares = np.zeros(2000)
    for t in range(len(shares)):
        weight, _ = average_weights(steps=t, share=0.5)
        shares *= 1 - weight
        shares[t] = weight
    assert shares.sum() == pytest.approx(1.0)
    ages = np.arange(len(shares))[::-1]
    # Weights fall like a power of the time that has passed: t^9.
    assert shares @ ages == pytest.approx(len(shares) / 11, rel=0.01)


def test_steps_of_wide_layers_are_shorter():
    """Like one over the root of the inputs above 32, as weights are at first."""
    assert width_factor(1) == width_factor(32) == 1.0
    assert width_factor(128) == 0.5


@pytest.mark.parametrize(
    ("steps", "share", "own"),
    [(0, 1.0, 0.1), (1200, 0.5, 0.1), (1200, 1.0, 0.1), (1200, 0.25, 0.1 / 16)],
)
def test_a_direction_counts_less_below_the_bound_of_the_share(
    backend, steps, share, own
):
    """A tenth at the bound and above, where the share is not adapted."""
    for s, t in (
        (share, steps),
        (backend.asarray(share), backend.asarray(float(steps))),
    ):
        assert float(average_weights(steps=t, share=s)[1]) == pytest.approx(own)


@pytest.mark.parametrize(
    ("n", "other", "blocks"),
    [
        (1, 5, None),
        (64, 10, (1, 64)),
        (512, 128, (4, 128)),
        (128, 512, (1, 128)),
        (192, 64, (2, 96)),
        (2048, 2048, (2, 1024)),
        (509, 128, (1, 509)),
        (1031, 128, None),
        (50257, 768, None),
    ],
)
def test_blocks_of_sides(n, other, blocks):
    """Whole bases up to the other side and 128; a prime side whole, or without one."""
    assert side_blocks(n, other) == blocks


@pytest.mark.parametrize("gain", [0.05, 3.0])
def test_the_share_follows_the_cosine_of_all_coordinates(backend, dtype, rng, gain):
    """Two arrays as one dense vector."""
    d, m = rng.normal(size=(2, 9))
    parts = [slice(0, 3), slice(3, 9)]
    arrays = [[backend.asarray(x[part], dtype) for x in (d, m)] for part in parts]

    for sign in (1, -1):
        sums = [agreement(sign * x, y) for x, y in arrays]
        total = sums[0] + sums[1]
        got = adapted_share(0.9, total, jump=0.0, steps=4, gain=gain)

        cosine = sign * (d @ m) / np.linalg.norm(d) / np.linalg.norm(m)
        expected = 1 / max(1.01**0.5, 1 / 0.9 - gain * cosine)
        assert_close(backend.to_numpy(got), expected, "product", dtype)


@pytest.mark.parametrize(("size", "steps"), [(1.0, 9), (8.0, 9), (8.0, 4)])
def test_a_jump_is_a_gradient_above_the_usual(backend, dtype, rng, size, steps):
    """A jump is one number for all parameters, which lowers the share and momentum."""
    v = rng.random((2, 7)) + 0.1
    g = size * np.sqrt(v) * rng.choice([-1.0, 1.0], size=(2, 7))
    d, m = rng.normal(size=(2, 7))
    averages = v * (1 - 0.9**steps)
    g, d, m, averages = (backend.asarray(x, dtype) for x in (g, d, m, averages))
    sizes = [
        squared_sizes(g[i, :], averages[i, :], steps=steps, decay=0.9) for i in range(2)
    ]

    jump = gradient_jump(sizes[0] + sizes[1])
    got = [
        float(adapted_share(0.2, agreement(d, m), jump=x, steps=steps, gain=0.05))
        for x in (jump, 0.0)
    ]

    is_jump = size > 1.5 and steps >= 5
    assert float(jump) == pytest.approx(size**2 if is_jump else 0.0, rel=1e-5)
    assert float(momentum_factor(jump)) == pytest.approx(0.5 if is_jump else 1.0)
    excess = np.log(size / 1.5) if is_jump else 0.0
    bound = (25 + steps / 20) ** 0.5
    assert 1 / got[0] == pytest.approx(min(1 / got[1] + 0.05 * excess, bound), rel=1e-5)


@pytest.mark.parametrize("steps", [0, 7500, 10**6])
@pytest.mark.parametrize(("sign", "bound"), [(1, (1, 400)), (-1, (25, 20))])
def test_the_share_of_long_runs_falls_like_one_over_a_root(
    backend, dtype, steps, sign, bound
):
    """However often directions agree, or point back."""
    d = backend.asarray([1.0, 2.0], dtype)
    share, sums = 0.5, agreement(d, sign * d)
    for _ in range(1000):
        share = adapted_share(share, sums, jump=0.0, steps=steps, gain=0.5)
    expected = (bound[0] + steps / bound[1]) ** -0.5
    assert_close(backend.to_numpy(share), expected, "product", dtype)


@pytest.mark.parametrize("bad", [0.0, np.nan, np.inf])
def test_the_share_stays_without_a_cosine(backend, bad):
    """Before the first step, and after an overflow."""
    g = backend.asarray([1.0, bad, bad])
    m = backend.asarray([1.0, 1.0, 1.0] if bad else [0.0, 0.0, 0.0])
    v = backend.asarray([1.0, 1.0, 1.0])
    sums = agreement(g, m)
    assert float(adapted_share(0.2, sums, jump=0.0, steps=9, gain=0.05)) == 0.2
    assert float(gradient_jump(squared_sizes(g, v, steps=9, decay=0.9))) == 0.0
