"""BLAS and LAPACK through SciPy, in the best plain order that was found.

What the machine's own kernels take, without anything around them.  Matrices are kept in
their lower triangle in Fortran order, so that nothing is copied on the way to a kernel.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import scipy
from scipy.linalg import blas, lapack

from benchmarks.libraries.library import AbsentError, Call, Events, Library
from benchmarks.workloads import DAMPING, DECAY, Workload, residuals

Matrix = Any

KINDS = ("inverse", "cholesky", "solve", "eigen")


def make(argument: str, /, *, device: str, threads: int) -> Library:
    """Return the adapter."""
    return _Lapack()


class _Lapack:
    events: Events | None = None
    _sums: list[tuple[Matrix, Matrix]]
    _weight: float

    def versions(self) -> dict[str, str]:
        config: Any = np.show_config(mode="dicts")
        found = config["Build Dependencies"]["blas"]
        built = f"{found['name']} {found['version']}"
        return {"numpy": np.__version__, "scipy": scipy.__version__, "blas": built}

    def prepare(self, workload: Workload, /) -> None:
        self._layers = workload.layers
        self._start()
        for index in range(workload.batches):
            pairs = zip(self._layers, workload.batch(index), strict=True)
            self._rows = [(_with_ones(x) if of.bias else x, g) for of, (x, g) in pairs]
            self._update()
        self._kept = self._sums, self._weight
        self._vectors = [workload.vector(i) for i in range(len(self._layers))]

    def stage(self, name: str, /) -> Call:
        self._sums, self._weight = self._kept
        if name == "statistics":
            self._start()
            return self._update
        if name == "cycle":
            self._start()
            return self._cycle
        if name == "cycle-triangular":
            self._start()
            return self._cycle_of_solves
        if name == "refresh-driver":
            return self._drivers()
        if name == "samples-direction":
            return self._direction
        kind = name.partition("-")[2]
        if kind not in KINDS:
            raise AbsentError("it is a loop over the layers already, without statuses")
        if name.startswith("refresh"):
            return lambda: self._refresh(kind)
        made = self._refresh("cholesky" if kind == "solve" else kind)
        return lambda: self._precondition(kind, made)

    def answer(self, stage: str, /) -> list[np.ndarray[Any, Any]]:
        result: list[np.ndarray[Any, Any]] = self.stage(stage)()
        return result

    def finish(self, result: Any, /) -> None:
        return

    def gemm(self, size: int, /) -> Call:
        a = np.random.default_rng(0).standard_normal((size, size), dtype=np.float32)
        b, out = a[::-1].copy(), np.empty_like(a)
        return lambda: np.matmul(a, b, out=out)

    def _start(self) -> None:
        """Begin with sums of nothing."""
        self._weight = 0.0
        self._sums = [
            (_zeros(layer.shape[0]), _zeros(layer.shape[1])) for layer in self._layers
        ]

    def _update(self) -> None:
        for sums, rows in zip(self._sums, self._rows, strict=True):
            for total, x in zip(sums, rows, strict=True):
                share = 1.0 / x.shape[0]
                blas.ssyrk(share, x.T, beta=DECAY, c=total, lower=1, overwrite_c=1)
        self._weight = DECAY * self._weight + 1.0

    def _refresh(self, kind: str) -> list[Any]:
        return [self._factorized(kind, *sums) for sums in self._sums]

    def _factorized(self, kind: str, A: Matrix, G: Matrix) -> Any:
        if kind == "eigen":
            return [
                lapack.ssyevd(M / self._weight, lower=1, overwrite_a=1) for M in (A, G)
            ]
        means = [np.trace(M) / (len(M) * self._weight) for M in (A, G)]
        pi = np.sqrt(means[0] / means[1])
        shifts = pi * np.sqrt(DAMPING), np.sqrt(DAMPING) / pi
        made = []
        for M, shift in zip((A, G), shifts, strict=True):
            L = M / self._weight
            L.reshape(-1, order="F")[:: len(L) + 1] += shift
            L, info = lapack.spotrf(L, lower=1, clean=0, overwrite_a=1)
            assert info == 0
            if kind == "inverse":
                L, info = lapack.spotri(L, lower=1, overwrite_c=1)
            made.append(L)
        return made

    def _precondition(self, kind: str, made: list[Any]) -> list[Matrix]:
        apply: Any = _by_inverses if kind == "inverse" else _by_solves
        if kind == "eigen":
            apply = _by_bases
        return [apply(*pair, V) for pair, V in zip(made, self._vectors, strict=True)]

    def _cycle(self) -> list[Matrix]:
        self._update()
        return self._precondition("inverse", self._refresh("inverse"))

    def _cycle_of_solves(self) -> list[Matrix]:
        self._update()
        return self._precondition("solve", self._refresh("cholesky"))

    def _direction(self) -> list[Matrix]:
        """Return ``J^T (K + R lam I)^-1 r`` in float64, K from Gram matrices of rows."""
        rows = [tuple(x.astype(np.float64) for x in pair) for pair in self._rows]
        R = len(rows[0][0])
        K = np.zeros((R, R), order="F")
        for x, g in rows:
            K += _gram(x) * _gram(g)
        K.reshape(-1, order="F")[:: R + 1] += R * DAMPING
        L, info = lapack.dpotrf(K, lower=1, clean=0, overwrite_a=1)
        assert info == 0
        c, info = lapack.dpotrs(L, residuals(R).astype(np.float64), lower=1)
        return [(x * c[:, None]).T @ g for x, g in rows]

    def _drivers(self) -> Call:
        """Return the eigendecompositions alone, each by the driver that is fastest."""
        chosen = []
        for sums in self._sums:
            for total in sums:
                M = total / self._weight
                drivers = (lapack.ssyevd, lapack.ssyevr)
                chosen.append((min(drivers, key=lambda of: _seconds(of, M)), M))
        return lambda: [driver(M, lower=1) for driver, M in chosen]


def _seconds(driver: Any, M: Matrix) -> float:
    """Return the CPU time of an eigendecomposition, the best of two."""
    taken = []
    for _ in range(2):
        start = time.process_time()
        driver(M, lower=1)
        taken.append(time.process_time() - start)
    return min(taken)


def _gram(x: Matrix) -> Matrix:
    return blas.dsyrk(1.0, x.T, trans=1, lower=1)


def _zeros(size: int) -> Matrix:
    return np.zeros((size, size), np.float32, order="F")


def _with_ones(x: Matrix) -> Matrix:
    return np.concatenate([x, np.ones_like(x[:, :1])], axis=1)


# V is in C order, so that its transpose is in Fortran order; U^T = G^-1 V^T A^-1.
def _by_inverses(A_inv: Matrix, G_inv: Matrix, V: Matrix) -> Matrix:
    half = blas.ssymm(1.0, G_inv, V.T, side=0, lower=1)
    return blas.ssymm(1.0, A_inv, half, side=1, lower=1).T


def _by_solves(L_A: Matrix, L_G: Matrix, V: Matrix) -> Matrix:
    half, info = lapack.spotrs(L_G, V.T, lower=1)
    assert info == 0
    half = blas.strsm(1.0, L_A, half, side=1, lower=1, trans_a=1, overwrite_b=1)
    return blas.strsm(1.0, L_A, half, side=1, lower=1, trans_a=0, overwrite_b=1).T


def _by_bases(A: Any, G: Any, V: Matrix) -> Matrix:
    (a, Q_A, _), (g, Q_G, _) = A, G
    in_basis = Q_A.T @ V @ Q_G
    in_basis /= np.maximum(a, 0)[:, None] * np.maximum(g, 0)[None, :] + np.float32(
        DAMPING
    )
    return Q_A @ in_basis @ Q_G.T
