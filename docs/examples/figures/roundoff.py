"""What an inverse is worth, by the precision and the way in which it was made.

``M = A + lam I`` with a matrix A of 96 rows whose eigenvalues fall from 1 to 1e-14 evenly
on a logarithmic scale, so that lam is about one over the condition number of M.  Errors
are relative, in the Frobenius norm, against inverses in extended precision:

* `inverted` rounds A to float32 and compares ways of inverting those numbers;
* `stored` compares with the inverse of A before it was rounded, which no way of inverting
  can bring back.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import kfac_core as kc
from kfac_core.linalg.fallback import fallback_of
from kfac_core.operators import kronecker_operator

from .network import Array

WAYS = (
    "float32 Cholesky",
    "float32 eigenbasis",
    "float64 Cholesky",
    "float64 eigenbasis",
    "kfac_core, float32",
)


@dataclass(frozen=True)
class Inverted:
    """One way of inverting one matrix."""

    way: str
    condition: float
    error: float | None
    """None where the factorization failed."""
    fallback: str | None
    """The fallback that was used, for the library's own."""
    residual: float | None
    """The library's residual check."""


def inverted(condition: float, *, size: int = 96) -> list[Inverted]:
    """Return every way at one condition number."""
    A = spectrum(size).astype(np.float32)
    lam = np.float32(1.0 / condition)
    best = extended_inverse(A, lam)
    ways: dict[str, Callable[[], Array]] = {
        "float32 Cholesky": lambda: by_cholesky(A, lam, np.float32),
        "float32 eigenbasis": lambda: by_eigenbasis(A, lam, np.float32),
        "float64 Cholesky": lambda: by_cholesky(A, lam, np.float64),
        "float64 eigenbasis": lambda: by_eigenbasis(A, lam, np.float64),
    }
    found = [
        Inverted(way, condition, error_of(make, best), None, None)
        for way, make in ways.items()
    ]
    try:
        factor = kronecker_operator(None, A, damping=float(lam)).parts()["output"]
    except kc.FactorizationError:
        return [*found, Inverted(WAYS[-1], condition, None, None, None)]
    X = factor.solve(np.eye(size, dtype=np.float32))
    inverse = factor.inverse
    error = error_of(lambda: X, best)
    residual = float(inverse.residual)
    found.append(
        Inverted(
            WAYS[-1], condition, error, fallback_of(inverse).name.lower(), residual
        )
    )
    return found


def stored(condition: float, *, size: int = 96) -> dict[str, float]:
    """Return the error of the library's inverse by dtype; NaN where it is refused."""
    lam = 1.0 / condition
    best = extended_inverse(spectrum(size), lam)
    errors = {}
    for name in ("float32", "float64"):
        A = spectrum(size).astype(name)
        try:
            factor = kronecker_operator(None, A, damping=lam).parts()["output"]
        except kc.FactorizationError:
            errors[name] = math.nan
            continue
        X = factor.solve(np.eye(size, dtype=name))
        errors[name] = relative_error(X, best)
    return errors


def spectrum(size: int) -> Array:
    """Return A in float64."""
    rng = np.random.default_rng(4)
    Q, _ = np.linalg.qr(rng.normal(size=(size, size)))
    A = (Q * np.logspace(0.0, -14.0, size)) @ Q.T
    return np.asarray((A + A.T) / 2)


def by_cholesky(A: Array, lam: Any, dtype: Any) -> Array:
    """Invert by POTRF and triangular solves, in one precision throughout."""
    from scipy.linalg import cho_factor, cho_solve

    eye = np.eye(len(A), dtype=dtype)
    factor = cho_factor(A.astype(dtype) + dtype(lam) * eye, lower=True)
    return np.asarray(cho_solve(factor, eye))


def by_eigenbasis(A: Array, lam: Any, dtype: Any) -> Array:
    """Invert by an eigendecomposition of A."""
    from scipy.linalg import eigh

    w, Q = eigh(A.astype(dtype), driver="evd")
    return np.asarray((Q / (w + dtype(lam))) @ Q.T)


def extended_inverse(A: Array, lam: Any) -> Array:
    """Invert in the widest floats there are, by Newton's iteration from float64."""
    M = A.astype(np.longdouble) + np.longdouble(lam) * np.eye(
        len(A), dtype=np.longdouble
    )
    X = by_eigenbasis(A, lam, np.float64).astype(np.longdouble)
    for _ in range(4):
        X = X + X @ (np.eye(len(A), dtype=np.longdouble) - M @ X)
    return X


def error_of(make: Callable[[], Array], best: Array) -> float | None:
    """Return the relative error; None where there is no such factorization."""
    try:
        X = make()
    except np.linalg.LinAlgError:
        return None
    return relative_error(X, best)


def relative_error(X: Array, best: Array) -> float:
    """Return ``|X - best| / |best|``."""
    difference = (X - best).astype(np.float64)
    return float(np.linalg.norm(difference) / np.linalg.norm(best.astype(np.float64)))
