"""What truncating a factor at every update loses, beside one truncation at the end.

The inputs of a layer are normal, with a covariance whose eigenvalues are i^-p in a random
basis.  `kfac_core.LowRankKronecker` keeps their decaying average at a bounded rank; the
part of the trace that it has lost is compared with the least that this rank can lose: that
of the exact average's largest eigenvalues.  Run it by

    python docs/examples/truncation.py
"""

import numpy as np

import kfac_core as kc

WIDTH, ROWS, UPDATES, DECAY = 512, 128, 60, 0.95
POWERS, RANKS = (1, 2), (16, 64, 128)


def stream(power, seed=0):
    """Return the batches of inputs, shape (UPDATES, ROWS, WIDTH)."""
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.normal(size=(WIDTH, WIDTH)))[0]
    deviations = np.arange(1.0, WIDTH + 1) ** (-power / 2)
    return rng.normal(size=(UPDATES, ROWS, WIDTH)) * deviations @ basis.T


def best_possible(batches, rank):
    """Return the part of the exact average's trace beyond its largest eigenvalues."""
    average = np.zeros((WIDTH, WIDTH))
    for x in batches:
        average = DECAY * average + x.T @ x / len(x)
    values = np.linalg.eigvalsh(average)[::-1]
    return values[rank:].sum() / values.sum()


def lost(batches, rank, rows_at_once):
    """Return the part of the trace that a truncation at every update has lost."""
    layer = kc.Dense(in_features=WIDTH, out_features=1, bias=False, weight_layout="io")
    approximation = kc.LowRankKronecker(
        input_rank=rank, output_rank=1, rows_at_once=rows_at_once
    )
    estimator = kc.Estimator(
        {"fc": kc.Block(layer, approximation)},
        reduction="sum",
        decay=DECAY,
        damping=1.0,
    )
    for x in batches:
        estimator.update({"fc": kc.Batch(x, np.ones((len(x), 1)))})
    estimator.refresh()
    total = sum(
        DECAY ** (len(batches) - 1 - t) * np.mean(np.sum(x**2, axis=1))
        for t, x in enumerate(batches)
    )
    weight = sum(DECAY**t for t in range(len(batches)))
    return float(estimator.operator("fc").truncated_traces[0]) * weight / total


def rows():
    """Return a row for each spectrum and rank: p, the rank, and three parts."""
    found = []
    for power in POWERS:
        batches = stream(power)
        found += [
            (
                power,
                rank,
                best_possible(batches, rank),
                lost(batches, rank, None),
                lost(batches, rank, rank),
            )
            for rank in RANKS
        ]
    return found


def main():
    """Print the table."""
    print(f"{'p':>3}{'rank':>6}{'best':>9}{'all rows':>10}{'rank rows':>11}")
    for power, rank, *parts in rows():
        best, every, some = (f"{100 * part:.2f}%" for part in parts)
        print(f"{power:3}{rank:6}{best:>9}{every:>10}{some:>11}")


if __name__ == "__main__":
    main()
