"""Derivatives through pure functions: right, constant or NaN as the page says."""

from __future__ import annotations

import numpy as np
import pytest

from . import derivatives
from .derivatives import FUNCTIONS, REPEATED

# PyTorch tells once a process how it copies a tensor that has a gradient.
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.asarray. unspecified requires_grad"
)

CONSTANT = (
    *("precondition, by the vector", "quadratic_model", "kl_clip"),
    "inner_product, linear_combination",
    *(name for name in FUNCTIONS if "by the rows" in name),
)
"""What PyTorch detaches on entering."""

BRIEF = ("kronecker_multiply", "inverse_root", "inner_product, linear_combination")
"""What JAX compiles in seconds."""


def gradient(backend, function, point):
    """Return the derivative by reverse mode; None of a constant."""
    if backend.name == "torch":
        array = backend.asarray(point).requires_grad_(True)
        found = function(array)
        if not found.requires_grad:
            return None
        found.backward()
        return array.grad.numpy()
    import jax

    return np.asarray(jax.grad(function)(backend.asarray(point)))


@pytest.fixture
def differentiating(backend):
    """A backend that differentiates."""
    if backend.name not in ("torch", "jax"):
        pytest.skip("no derivatives")
    return backend


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_derivative_is_that_of_central_differences(differentiating, request, name):
    """Or PyTorch says that there is none, since what is observed is detached."""
    backend, case = differentiating, FUNCTIONS[name]
    if backend.name == "jax" and name not in BRIEF:
        request.getfixturevalue("compiles_long")

    constant = backend.name == "torch" and name in CONSTANT
    if constant:
        # Its adapter detaches; the definitions know no graphs.
        request.getfixturevalue("requires_backend")("torch", adapter=True)

    found = gradient(backend, case.function, case.point)

    if constant:
        assert found is None
        return
    expected = derivatives.differences(case)
    assert np.linalg.norm(found - expected) <= 1e-7 * np.linalg.norm(expected)


@pytest.mark.parametrize("name", REPEATED)
def test_equal_eigenvalues_have_no_derivative(differentiating, name):
    """NaN in every entry, never a number that is wrong."""
    found = gradient(differentiating, FUNCTIONS[name].function, REPEATED[name])

    assert np.all(np.isnan(found))


def test_a_solve_has_a_derivative_at_equal_eigenvalues(differentiating, request):
    """It is made by Cholesky."""
    if differentiating.name == "jax":
        request.getfixturevalue("compiles_long")
    case = FUNCTIONS["damped_matrix, inverse"]
    twice = derivatives.Differentiated(case.function, REPEATED["inverse_root"])

    found = gradient(differentiating, twice.function, twice.point)

    expected = derivatives.differences(twice)
    assert np.linalg.norm(found - expected) <= 1e-7 * np.linalg.norm(expected)
