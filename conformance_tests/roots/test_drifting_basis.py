"""A basis that follows a matrix by one QR step for each change of it: 200 steps."""

import numpy as np

from kfac_core.roots import renewed_basis

N, STEPS = 64, 200
# Spectrum i^-a of the population, and the share of the average that a step replaces.
STREAMS = [(1, 0.01), (1, 0.1), (2, 0.01), (2, 0.1)]
DAMPING = 0.01  # times the largest eigenvalue


def drift():
    """Yield factors in float32, shape (streams, N, N): the first, and one a step.

    Moving averages of the second moments of 256 rows, drawn from a population whose
    eigenbasis turns by 0.05 radians a step.
    """
    rng = np.random.default_rng(5)
    spectra = np.arange(1.0, N + 1) ** -np.array([[a] for a, _ in STREAMS])
    shares = np.array([share for _, share in STREAMS])[:, None, None]
    Q, _ = np.linalg.qr(rng.normal(size=(len(STREAMS), N, N)))
    factors = (Q * spectra[:, None]) @ Q.mT
    yield factors.astype(np.float32)
    for _ in range(STEPS):
        turn = rng.normal(size=Q.shape)
        turn -= turn.mT
        angle = 0.05 / np.linalg.norm(turn, 2, axis=(-2, -1))[:, None, None]
        Q, _ = np.linalg.qr(Q + angle * Q @ turn)
        rows = rng.normal(size=(len(STREAMS), 256, N)) * np.sqrt(spectra)[:, None]
        rows = rows @ Q.mT
        factors = (1 - shares) * factors + shares * (rows.mT @ rows / 256)
        yield factors.astype(np.float32)


def ratio(A, Q):
    """Return what is off the diagonal of ``Q^T A Q``, relative to the whole, in float64."""
    B = Q.mT @ A.astype(np.float64) @ Q
    outside = B * (1 - np.eye(N))
    return np.linalg.norm(outside, axis=(-2, -1)) / np.linalg.norm(B, axis=(-2, -1))


def inverse_error(A, Q):
    """Return the relative error of the damped inverse in a basis."""
    A = A.astype(np.float64)
    shift = DAMPING * np.linalg.eigvalsh(A)[:, -1:]
    exact = np.linalg.inv(A + shift[..., None] * np.eye(N))
    w = np.sum(Q * (A @ Q), axis=-2) + shift
    error = np.linalg.norm(Q / w[:, None] @ Q.mT - exact, axis=(-2, -1))
    return error / np.linalg.norm(exact, axis=(-2, -1))


def test_a_step_never_raises_the_ratio(backend, request):
    """Four streams in float32, 5% in the inverse.

    JAX, whose programs the session compiles with no regard to their speed, makes 40.
    """
    renewed, steps = renewed_basis, STEPS
    if backend.name == "jax":
        import jax

        renewed = jax.jit(renewed_basis)
        steps = STEPS if request.config.getoption("--thorough") else 40
    factors = drift()
    basis, _ = renewed(None, backend.asarray(next(factors)))
    Q = backend.to_numpy(basis)
    for t, A in zip(range(1, steps + 1), factors, strict=False):
        before = ratio(A, Q)
        basis, _ = renewed(basis, backend.asarray(A))
        Q = backend.to_numpy(basis)
        assert np.all(ratio(A, Q) < before)
        if t % 10 == 0:
            assert np.all(inverse_error(A, Q) < 0.05)
