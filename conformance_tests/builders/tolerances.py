"""One table of tolerances, by operation and dtype, and the comparisons that use it.

Conventions.  An error is relative in the Frobenius norm: ``|got - expected| <=
rtol * |expected| + atol``.  The problems in the tests have condition numbers up to about
1e4; where a test's own condition number is larger it passes ``condition`` and the bound
is scaled by it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

TOLERANCES: dict[str, dict[str, float]] = {
    # operation: {dtype: relative tolerance}
    "exact": {"float64": 0.0, "float32": 0.0},
    "roundoff": {"float64": 1e-13, "float32": 1e-5},
    "gram": {"float64": 1e-13, "float32": 1e-5},
    "product": {"float64": 1e-12, "float32": 1e-5},
    "inverse": {"float64": 1e-10, "float32": 2e-3},
    "power": {"float64": 1e-10, "float32": 2e-2},
    "cholesky": {"float64": 1e-11, "float32": 1e-3},
    "logdet": {"float64": 1e-11, "float32": 1e-3},
    "eigenvalues": {"float64": 1e-12, "float32": 1e-5},
    "identity": {"float64": 1e-12, "float32": 1e-4},
    # Twenty optimizer steps amplify roundoff.
    "trajectory": {"float64": 1e-8, "float32": 1e-2},
}

CERTIFICATE_FACTOR = 10.0
"""How far a residual on one probe vector may be from the norm that it estimates.

A sum over few dominating eigendirections has the spread of a chi-squared variable with
as many degrees of freedom; in each direction it is a factor of 3, with a margin.
"""


def tolerance(operation: str, dtype: str, *, condition: float = 1.0) -> float:
    """Return the relative tolerance of an operation in a dtype."""
    return TOLERANCES[operation][dtype] * max(1.0, condition)


def relative_error(got: Any, expected: Any) -> float:
    """Return ``|got - expected| / |expected|``, infinite where `got` is not finite."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape, f"shape {got.shape}, expected {expected.shape}"
    if not np.all(np.isfinite(got)):
        return np.inf
    scale = np.linalg.norm(expected)
    return float(np.linalg.norm(got - expected) / (scale if scale > 0 else 1.0))


def assert_close(
    got: Any, expected: Any, operation: str, dtype: str, *, condition: float = 1.0
) -> None:
    """Compare host arrays; say the error and the tolerance where they differ."""
    error = relative_error(got, expected)
    limit = tolerance(operation, dtype, condition=condition)
    assert error <= limit, (
        f"{operation} in {dtype}: error {error:.2e}, limit {limit:.2e}"
    )


def assert_differs(got: Any, expected: Any, by: float = 1e-3) -> None:
    """Assert that two results are far apart: the row that must differ."""
    error = relative_error(got, expected)
    assert error > by, (
        f"the two agree to {error:.2e}, but must differ by more than {by}"
    )
