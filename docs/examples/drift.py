"""An eigenbasis that follows a drifting matrix by one QR step a refresh, in float32.

A population of spectrum i^-a, whose eigenbasis turns by 0.05 radians a step, is observed
through 256 rows a step and a moving average.  `kfac_core.roots.renewed_basis` takes the
columns in descending order; beside it stands the same step in ascending order, which
eigensolvers return.  Run it by

    python docs/examples/drift.py
"""

import numpy as np

from kfac_core.roots import renewed_basis

SIZE, STEPS, ROWS, ANGLE, LAST = 64, 200, 256, 0.05, 50
STREAMS = (("1", 1, 0.01), ("1", 1, 0.1), ("2", 2, 0.01), ("2", 2, 0.1))
DAMPINGS = (0.1, 0.01, 0.001)  # times the largest eigenvalue


def averages(power, share, seed=5):
    """Yield the moving averages, the first from before any step."""
    rng = np.random.default_rng(seed)
    spectrum = np.arange(1.0, SIZE + 1) ** -power
    Q = np.linalg.qr(rng.normal(size=(SIZE, SIZE)))[0]
    average = (Q * spectrum) @ Q.T
    yield average.astype(np.float32)
    for _ in range(STEPS):
        turn = rng.normal(size=(SIZE, SIZE))
        turn -= turn.T
        Q = np.linalg.qr(Q + ANGLE * Q @ turn / np.linalg.norm(turn, 2))[0]
        x = rng.normal(size=(ROWS, SIZE)) @ (Q * np.sqrt(spectrum)).T
        average = (1.0 - share) * average + share * x.T @ x / ROWS
        yield average.astype(np.float32)


def ratio(A, Q):
    """Return what is off the diagonal of ``Q^T A Q``, relative to the whole."""
    B = Q.T.astype(np.float64) @ A @ Q
    return np.linalg.norm(B - np.diag(np.diag(B))) / np.linalg.norm(B)


def inverse_error(A, Q, damping):
    """Return the relative error of the damped inverse in a basis."""
    A, Q = A.astype(np.float64), Q.astype(np.float64)
    shift = damping * np.linalg.eigvalsh(A)[-1]
    exact = np.linalg.inv(A + shift * np.eye(SIZE))
    inverse = (Q / (np.diag(Q.T @ A @ Q) + shift)) @ Q.T
    return np.linalg.norm(inverse - exact) / np.linalg.norm(exact)


def measured(power, share):
    """Return the columns of the table."""
    first, *later = averages(power, share)
    basis, _ = renewed_basis(None, first)
    ascending = np.linalg.eigh(first)[1]
    before, after, wrong, wrong_errors = [], [], [], []
    errors = {damping: [] for damping in DAMPINGS}
    for A in later:
        before.append(ratio(A, basis))
        basis, _ = renewed_basis(basis, A)
        after.append(ratio(A, basis))
        for damping, of_damping in errors.items():
            of_damping.append(inverse_error(A, basis, damping))
        ascending = np.linalg.qr(A @ ascending)[0]
        ascending = ascending[:, np.argsort(np.diag(ascending.T @ A @ ascending))]
        wrong.append(ratio(A, ascending))
        wrong_errors.append(inverse_error(A, ascending, 0.01))
    means = [np.mean(values[-LAST:]) for values in (before, after, wrong, wrong_errors)]
    largest = {damping: max(values) for damping, values in errors.items()}
    return means, largest


def rows():
    """Return the cells of a row for each stream."""
    table = []
    for name, power, share in STREAMS:
        (before, after, wrong, wrong_error), errors = measured(power, share)
        table.append(
            [
                f"$i^{{-{name}}}$, {100 * share:g}%",
                *(f"{x:.1e}".replace("e-0", "e-") for x in (before, after)),
                *(f"{100 * errors[damping]:.1f}%" for damping in DAMPINGS),
                f"{wrong:.1f}",
                f"{100 * wrong_error:.0f}%",
            ]
        )
    return table


def main():
    """Print the table."""
    print("stream; r before, after; errors at three dampings; ascending: r, error")
    for cells in rows():
        print("  ".join(f"{cell:>12}" for cell in cells))


if __name__ == "__main__":
    main()
