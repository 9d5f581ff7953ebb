"""As many steps as a day has: no drift from float64, and no memory that grows."""

from __future__ import annotations

import gc
import itertools
import os
import threading
from pathlib import Path

import numpy as np
import pytest

import kfac_core as kc

from ..builders.estimators import make_estimator
from .size import FULL, report, sized

STEPS = sized(400, 100_000)
WIDTHS = (6, 5, 3)
DAMPING = 0.1
GROWTH = 4_000_000
"""Bytes by which the second half of a full run may end above its beginning."""

CASES = {
    # name: dtype, decay, bound of the relative error of a statistic after K steps.
    # A step rounds the decayed sum, its addition, and both again for the weight, and uses a
    # rounded decay twice: at most 6u of what there is, 6u / 0.05 = 120u in the long run.  A
    # product of 8 rows, in any order, adds 8 sqrt(7) u = 21u in the norm: below 160u.
    "float32, decay 0.95": ("float32", 0.95, lambda steps: 8 * 6e-8 / 0.05),
    # Without decay, rounding adds up like a random walk: sqrt(K), not K.
    "float32, plain mean": ("float32", 1.0, lambda steps: 6e-8 * 8 * steps**0.5),
    "float64, decay 0.95": ("float64", 0.95, lambda steps: 8 * 1.1e-16 / 0.05),
}


class Reference:
    """The same averages, in the longest floats there are, and nothing of the core."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.sums: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self.weight = np.longdouble(0)

    def update(self, fed: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
        decay = np.longdouble(self.decay)
        self.weight = decay * self.weight + 1
        for name, (x, g) in fed.items():
            wide = x.astype(np.longdouble), g.astype(np.longdouble)
            rows = np.concatenate([wide[0], np.ones((len(x), 1))], axis=1)
            new = rows.T @ rows / len(x), wide[1].T @ wide[1] / len(x)
            old = self.sums.get(name, (0 * new[0], 0 * new[1]))
            self.sums[name] = decay * old[0] + new[0], decay * old[1] + new[1]

    def factors(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        A, G = (np.asarray(C / self.weight, np.float64) for C in self.sums[name])
        return A, G


def resident() -> int:
    """Return the bytes of memory that the process holds, or 0 where it is not said."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 0
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def symmetric(average) -> np.ndarray:
    x = np.asarray(average.sum.array, np.float64) / float(average.weight)
    return np.tril(x) + np.tril(x, -1).T


def errors(estimator: kc.Estimator, reference: Reference) -> tuple[float, float]:
    """Return the relative errors of statistics, and of the inverse applied."""
    worst = inverse = 0.0
    rng = np.random.default_rng(1)
    for name in estimator.blocks:
        A, G = reference.factors(name)
        averages = estimator.state[name].statistics.averages
        for key, C in (("input", A), ("output", G)):
            got = symmetric(averages[key])
            worst = max(worst, np.linalg.norm(got - C) / np.linalg.norm(C))
        V = rng.normal(size=(len(A), len(G)))
        given = {"weight": V[:-1], "bias": V[-1]}
        found = estimator.precondition({name: given})[name]
        # The split of Martens and Grosse (2015), section 6.3, from the dense factors.
        pi = np.sqrt((np.trace(A) / len(A)) / (np.trace(G) / len(G)))
        root = np.sqrt(DAMPING)
        A_damped = A + pi * root * np.eye(len(A))
        G_damped = G + root / pi * np.eye(len(G))
        exact = np.linalg.solve(A_damped, np.linalg.solve(G_damped, V.T).T)
        got = np.concatenate([found["weight"], found["bias"][None]])
        inverse = max(inverse, np.linalg.norm(got - exact) / np.linalg.norm(exact))
    return float(worst), float(inverse)


@pytest.mark.parametrize("case", CASES)
def test_a_day_of_steps_leaves_no_drift(tmp_path, case):
    """Updates and refreshes, some beside the steps, and a file now and then."""
    dtype, decay, bound = CASES[case]
    layers = {
        f"fc{k}": kc.Dense(in_features=n, out_features=m, bias=True, weight_layout="io")
        for k, (n, m) in enumerate(itertools.pairwise(WIDTHS))
    }

    def made() -> kc.Estimator:
        return make_estimator(
            {name: kc.Block(layer, kc.Kronecker()) for name, layer in layers.items()},
            **{"decay": decay, "damping": DAMPING, "damping_rule": "factored"},
            **{"reduction": "sum", "workers": 2 if case.startswith("float64") else 1},
        )

    rng = np.random.default_rng(17)
    estimator, reference = made(), Reference(decay)
    path = tmp_path / "state.npz"
    half = worst = inverse = 0.0
    for step in range(1, STEPS + 1):
        fed = {
            name: (
                rng.normal(size=(8, layer.in_features)).astype(dtype),
                rng.normal(size=(8, layer.out_features)).astype(dtype),
            )
            for name, layer in layers.items()
        }
        reference.update(fed)
        estimator.update({name: kc.Batch(*arrays) for name, arrays in fed.items()})
        if step % 10:
            estimator.refresh()
        else:
            estimator.start_refresh().install()
        if step % (STEPS // 20) == 0:
            kc.save_checkpoint(path, estimator)
            estimator = made()
            kc.load_checkpoint(path, estimator, backend="numpy")
            found = errors(estimator, reference)
            worst, inverse = max(worst, found[0]), max(inverse, found[1])
            assert worst <= bound(step)
            # The condition of the damped factors of such data is below 30 each.
            assert inverse <= 30 * bound(step)
        if step == STEPS // 2:
            gc.collect()
            half = resident()
    gc.collect()
    grown = resident() - half

    assert estimator.state["fc0"].updates == STEPS
    assert threading.active_count() < 10
    if FULL:
        assert grown <= GROWTH
    report(
        f"\n{case}: {STEPS:,} steps; relative error {worst:.1e} of statistics (bound "
        f"{bound(STEPS):.1e}), {inverse:.1e} of the inverse; memory {grown / 1e3:+.0f} kB"
    )
