"""What the grid found: each case was silently wrong, and is right or refused now."""

from __future__ import annotations

import numpy as np
import pytest

import kfac_core as kc

from . import grid
from .grid import Case

FOUND = {
    "Sherman-Morrison divided by a shift alone": Case(
        "Kronecker(input='uncorrelated')", "factored", "float64", "raise", 4, 1.0, 1e-40
    ),
    "a pivot that is small beside the diagonal": Case(
        "Kronecker", "factored", "float32", "raise", 1, 1.0, 1e-14
    ),
    "the Cholesky factor of an exactly damped block": Case(
        "Kronecker", "exact", "float64", "status", 4, 1.0, 1e-40
    ),
    "a factor by QR of an ill-conditioned matrix": Case(
        "Full", "exact", "float64", "raise", 2, 1.0, 1e-40
    ),
    "the Cholesky factor of a series": Case(
        "Series('symmetric')", "factored", "float32", "raise", 1, 1.0, 1e-10
    ),
    "a chain of float32 moments computed in float64": Case(
        "BlockTridiagonal", "factored_unit_pi", "float32", "raise", 2, 1.0, 1e-14
    ),
}


@pytest.mark.usefixtures("compiles_long")
@pytest.mark.parametrize("name", FOUND)
def test_cases_found_by_the_grid(backend, name):
    """Compared with 120 digits."""
    with kc.use_backend(backend.name):
        result, told = grid.verdict(FOUND[name], backend.name)

    assert result in ("right", "refused"), told


def test_an_uncorrelated_convolution_is_right_at_any_damping(backend):
    """The homogeneous coordinate has no variance, and is not divided by the damping."""
    case = FOUND["Sherman-Morrison divided by a shift alone"]
    with kc.use_backend(backend.name):
        operator = grid.operator_of(case, backend.name)
        answer, shape = grid.answer_of(case, backend.name), operator.vector_shape
        images = [
            kc.to_numpy(operator.multiply_inverse(kc.asarray(v.reshape(shape))))
            for v in answer.vectors.astype(np.float64)
        ]

    errors = np.linalg.norm(
        np.stack(images).reshape(answer.inverse.shape) - answer.inverse
    )
    assert errors <= 1e-10 * answer.inverse_norm


@pytest.mark.usefixtures("compiles_long")
def test_a_traced_damping_that_a_dtype_cannot_hold_is_flagged(backend):
    """As a number it raises; as an array, 1e-40 in float32 is no damping."""
    case = Case(
        "Kronecker", "factored", "float64, applied in float32", "status", 4, 1, 1
    )
    with kc.use_backend(backend.name):
        operator = kc.operator_of(
            grid.KINDS["Kronecker"].block,
            grid.statistics_of(case, backend.name),
            kc.RefreshOptions(
                damping=kc.asarray(np.asarray(1e-40)),
                rule="factored",
                check="status",
                precision=kc.Precision(apply="float32"),
            ),
        )

    assert kc.Status.BAD_DAMPING in kc.Status(int(operator.status()))
