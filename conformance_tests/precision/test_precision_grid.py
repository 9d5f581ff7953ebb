"""A part of the grid of `conformance_tests.precision`, on every backend."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import kfac_core as kc

from . import grid

PART: dict[str, Any] = {
    "precisions": ("float32", "float64"),
    "ranks": (2,),
    "scales": (1.0,),
    "dampings": (1e-40, 1e-6),
}


SMALL: dict[str, Any] = {
    "kinds": ("Full",),
    "precisions": ("float32",),
    "ranks": (2,),
    "scales": (1.0,),
    "dampings": (1e-40, 1.0),
}
"""What is tried on JAX, which compiles each operation for each shape."""


@pytest.mark.parametrize("check", ["raise", "status"])
def test_no_case_is_silently_wrong(backend, check):
    """Every approximation and rule: right to roundoff times condition, or refused."""
    found: Counter[str] = Counter()
    part = SMALL if backend.name == "jax" else PART
    with kc.use_backend(backend.name):
        for case in grid.cases(checks=(check,), **part):
            result, told = grid.verdict(case, backend.name)
            found[result] += 1
            assert result != "silently wrong", (case, told)
    assert found["right"] >= 0.5 * found.total()
    assert found["refused"] > 0


@pytest.mark.parametrize(
    ("stored", "damping"),
    [
        *(("float32", damping) for damping in (1e-5, 1e-6, 1e-8, 1e-10)),
        *(("float64", damping) for damping in (1e-14, 1e-16, 1e-40)),
    ],
)
@pytest.mark.parametrize(
    ("kind", "rule"),
    [("Kronecker", "exact"), ("Kronecker", "factored"), ("Full", "exact")],
)
def test_singular_factors_with_tiny_damping_are_right(
    backend, kind, rule, stored, damping
):
    """Two rows, factors of 5 and 3: what is only roundoff divides by the damping."""
    with kc.use_backend(backend.name):
        case = grid.Case(kind, rule, stored, "raise", 2, 1.0, damping)
        operator = grid.operator_of(case, backend.name)
        answer, dtype = grid.answer_of(case, backend.name), grid.vector_dtype(case)
        limits = grid.limits_of(case, answer)
        errors = dict(grid.errors_of(operator, answer, dtype, grid.KINDS[kind].shape))
        assert errors["multiply_inverse"](1.0) <= limits["multiply_inverse"]
        result, told = grid.verdict(case, backend.name)

    # A triangular factor of it may be refused where the inverse is right.
    assert result in ("right", "refused"), told


def test_a_grid_that_is_wrong_says_so(monkeypatch):
    """The verdict compares: an operator that is off by a tenth is silently wrong."""
    case = grid.Case("Kronecker", "exact", "float64", "raise", 20, 1.0, 1e-3)
    right = grid.operator_of(case, "numpy")

    class Off:
        def __getattr__(self, name):
            if name == "status":
                return right.status
            product = getattr(right, name)
            return lambda v, *arguments: 1.1 * product(v, *arguments)

    monkeypatch.setattr(grid, "operator_of", lambda case, name: Off())
    assert grid.verdict(case, "numpy")[0] == "silently wrong"
