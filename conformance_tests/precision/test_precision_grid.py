"""A part of the grid of `conformance_tests.precision`, on every backend."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest

import kfac_core as kc

from ..builders.adapters import looks_at_values
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
def test_every_case_is_right_or_raises(backend, check):
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


def test_a_wrong_grid_fails(monkeypatch):
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


PRODUCTS: dict[str, tuple[float, ...]] = {
    "multiply": (),
    "multiply_inverse": (),
    "multiply_matpower": (-0.25,),
    "multiply_cholesky": (),
    "multiply_cholesky_inverse": (),
    "sample": (),
}


@pytest.mark.usefixtures("compiles_long")
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@pytest.mark.parametrize(
    "kind", [name for name, kind in grid.KINDS.items() if not kind.by_samples]
)
def test_no_product_takes_a_vector_that_is_not_finite(backend, kind, bad):
    """Every approximation, rule and product, one vector and several; else it shows."""
    vector = np.ones(grid.KINDS[kind].shape)
    vector[-1, 0] = bad
    tried = 0
    for rule in grid.KINDS[kind].rules:
        case = grid.Case(kind, rule, "float64", "raise", 20, 1.0, 0.1)
        with kc.use_backend(backend.name):
            operator = grid.operator_of(case, backend.name)
            one = kc.asarray(vector)
            many = kc.asarray(np.stack([vector.ravel(), np.ones(vector.size)], axis=1))
        products = {name: partial(getattr(operator, name), one) for name in PRODUCTS}
        products["@"] = partial(operator.__matmul__, many)
        for name, product in products.items():
            if name in operator.unsupported_products:
                continue
            tried += 1
            with np.errstate(all="ignore"):
                if looks_at_values(backend):
                    with pytest.raises(kc.NotFiniteError, match="the vector"):
                        product(*PRODUCTS.get(name, ()))
                    continue
                found = backend.to_numpy(product(*PRODUCTS.get(name, ())))
            assert not np.isfinite(found).all(), (rule, name)
    assert tried >= 2
