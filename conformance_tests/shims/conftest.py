"""Dtypes of the frameworks, for tests that compare with dense float64 matrices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def torch_float64() -> Iterator[None]:
    """New tensors are in float64, and random numbers are the same in every run."""
    import torch

    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def jax_float64() -> Iterator[None]:
    """JAX has float64."""
    import jax

    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)
