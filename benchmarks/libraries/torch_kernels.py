"""PyTorch's own kernels, in the plainest order.

What PyTorch's calls take, without anything around them: it has no SYRK, SYMM or triangular
inverse of its own, so that this is ADDMM with the average in `beta`, ``cholesky_ex`` with
``cholesky_inverse``, and products of whole matrices.  On a GPU these are cuBLAS and
cuSOLVER, of which the argument ``"syrk"`` takes SYRK too, through CuPy.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch

from benchmarks.libraries.device import device_events
from benchmarks.libraries.library import AbsentError, Call, Library
from benchmarks.stages import basis_blocks
from benchmarks.workloads import DAMPING, DECAY, Workload

Matrix = Any

KINDS = ("inverse", "cholesky", "eigen")


def make(argument: str, /, *, device: str, threads: int) -> Library:
    """Return the adapter."""
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("PyTorch finds no GPU")
    torch.set_num_threads(threads)
    return _SyrkKernels(device) if argument == "syrk" else _TorchKernels(device)


class _TorchKernels:
    _sums: list[tuple[Matrix, Matrix]]
    _weight: float

    def __init__(self, device: str, /) -> None:
        self._device = device
        self.events = device_events("torch", device)

    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__}

    def prepare(self, workload: Workload, /) -> None:
        self._layers = workload.layers
        self._start()
        for index in range(workload.batches):
            self._rows = [
                (self._with_ones(x) if of.bias else self._tensor(x), self._tensor(g))
                for of, (x, g) in zip(self._layers, workload.batch(index), strict=True)
            ]
            self._update()
        self._kept = self._sums, self._weight
        self._vectors = [
            self._tensor(workload.vector(i)) for i in range(len(self._layers))
        ]

    def stage(self, name: str, /) -> Call:
        self._sums, self._weight = self._kept
        if name == "statistics":
            self._start()
            return self._update
        if name == "cycle":
            self._start()
            return self._cycle
        if name == "soap-steps":
            return self._soap()
        kind = name.partition("-")[2]
        if kind in ("solve", "triangular"):
            raise AbsentError("its triangular solves want transposed copies")
        if name == "refresh-driver":
            means = [M / self._weight for sums in self._sums for M in sums]
            return lambda: [torch.linalg.eigh(M) for M in means]
        if kind not in KINDS:
            raise AbsentError("it is a loop over the layers already, without statuses")
        if name.startswith("refresh"):
            return lambda: self._refresh(kind)
        made = self._refresh(kind)
        return lambda: self._precondition(kind, made)

    def answer(self, stage: str, /) -> list[np.ndarray[Any, Any]]:
        return [x.cpu().numpy() for x in self.stage(stage)()]

    def finish(self, result: Any, /) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()

    def gemm(self, size: int, /) -> Call:
        a = torch.rand((size, size), device=self._device)
        out = torch.empty_like(a)
        return lambda: torch.mm(a, a.mT, out=out)

    def _tensor(self, x: np.ndarray[Any, Any]) -> Matrix:
        return torch.from_numpy(np.ascontiguousarray(x)).to(self._device)

    def _with_ones(self, x: np.ndarray[Any, Any]) -> Matrix:
        return self._tensor(np.concatenate([x, np.ones_like(x[:, :1])], axis=1))

    def _start(self) -> None:
        self._weight = 0.0
        sizes = [layer.shape for layer in self._layers]
        self._sums = [
            (
                torch.zeros((n, n), device=self._device),
                torch.zeros((m, m), device=self._device),
            )
            for n, m in sizes
        ]

    def _update(self) -> None:
        for sums, rows in zip(self._sums, self._rows, strict=True):
            for total, x in zip(sums, rows, strict=True):
                total.addmm_(x.mT, x, beta=DECAY, alpha=1.0 / x.shape[0])
        self._weight = DECAY * self._weight + 1.0

    def _refresh(self, kind: str) -> list[Any]:
        return [self._factorized(kind, *sums) for sums in self._sums]

    def _factorized(self, kind: str, A: Matrix, G: Matrix) -> Any:
        if kind == "eigen":
            return [torch.linalg.eigh(M / self._weight) for M in (A, G)]
        means = [torch.trace(M) / (len(M) * self._weight) for M in (A, G)]
        pi = torch.sqrt(means[0] / means[1])
        shifts = pi * DAMPING**0.5, DAMPING**0.5 / pi
        made = []
        for M, shift in zip((A, G), shifts, strict=True):
            damped = M / self._weight
            damped.diagonal().add_(shift)
            L, _ = torch.linalg.cholesky_ex(damped)
            made.append(torch.cholesky_inverse(L) if kind == "inverse" else L)
        return made

    def _precondition(self, kind: str, made: list[Any]) -> list[Matrix]:
        apply: Any = _by_bases if kind == "eigen" else _by_inverses
        return [apply(*pair, V) for pair, V in zip(made, self._vectors, strict=True)]

    def _soap(self) -> Call:
        """Return ten steps of Adam in bases, of which one renews them by a QR step."""
        states = []
        for layer, (x, g) in zip(self._layers, self._rows, strict=True):
            rows = g, x[:, : layer.inputs]
            V = rows[0].mT @ rows[1]
            sides = [
                (
                    block.reshape(len(x), c, b).permute(1, 0, 2),
                    torch.eye(b, device=self._device).repeat(c, 1, 1),
                )
                for block, (c, b) in zip(rows, basis_blocks(layer)[::-1], strict=True)
            ]
            states.append((V, sides, torch.zeros_like(V), torch.zeros_like(V)))
        return lambda: [_soap_steps(*state) for state in states]

    def _cycle(self) -> list[Matrix]:
        self._update()
        return self._precondition("inverse", self._refresh("inverse"))


class _SyrkKernels(_TorchKernels):
    """The same with half of the flops in statistics, which keep their lower triangle."""

    def _update(self) -> None:
        syrk = importlib.import_module("cupy.cublas").syrk
        view = importlib.import_module("cupy").from_dlpack
        for sums, rows in zip(self._sums, self._rows, strict=True):
            for total, x in zip(sums, rows, strict=True):
                scale = {"alpha": 1.0 / x.shape[0], "beta": DECAY}
                syrk("T", view(x), out=view(total), lower=True, **scale)
        self._weight = DECAY * self._weight + 1.0


def _by_inverses(A_inv: Matrix, G_inv: Matrix, V: Matrix) -> Matrix:
    return A_inv @ V @ G_inv


def _by_bases(A: Any, G: Any, V: Matrix) -> Matrix:
    (a, Q_A), (g, Q_G) = A, G
    in_basis = Q_A.mT @ V @ Q_G
    in_basis /= a.clamp(min=0)[:, None] * g.clamp(min=0)[None, :] + DAMPING
    return Q_A @ in_basis @ Q_G.mT


def _rotated(V: Matrix, left: Matrix, right: Matrix) -> Matrix:
    """Return ``left^T V right`` for blocks of bases."""
    V = (left.mT @ V.view(len(left), -1, V.shape[1])).view(V.shape)
    by_block = V.view(len(V), len(right), -1).transpose(0, 1)
    return (by_block @ right).transpose(0, 1).reshape(V.shape)


def _soap_steps(V: Matrix, sides: Any, m: Matrix, v: Matrix) -> Matrix:
    """Return the last of ten steps; m and v are changed."""
    new = [torch.linalg.qr((X.mT @ X) @ Q).Q for X, Q in sides]
    changes = [Q.mT @ S for (_, Q), S in zip(sides, new, strict=True)]
    m.copy_(_rotated(m, *changes))
    v.copy_(_rotated(v, *(S * S for S in changes)))
    for _ in range(10):
        rotated = _rotated(V, *new)
        m.lerp_(rotated, 0.07)
        v.mul_(0.93).addcmul_(rotated, rotated, value=0.07)
        step = _rotated(m / (v.sqrt() + 1e-8), *(Q.mT for Q in new))
    return step
