"""Compilers of whole functions, and counts of how often a function is traced."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest

TORCH_COMPILES_SINCE = "2.13"
"""The first PyTorch whose compiler is known to take the library's functions whole."""


def compiler_of(
    library: str, *, torch_backend: str | Callable[..., Any] = "eager"
) -> Callable[..., Any]:
    """Return what compiles a function of an array library as one graph.

    PyTorch's functions are traced without code generation. The tracers of 2.7 and 2.9
    refuse what that of 2.13 takes (keys of dictionaries, proxies of mappings), so the test
    is skipped before it.
    """
    if library == "jax":
        return importlib.import_module("jax").jit
    torch = importlib.import_module("torch")
    if torch.__version__ < torch.torch_version.TorchVersion(TORCH_COMPILES_SINCE):
        pytest.skip(f"compiled by PyTorch {TORCH_COMPILES_SINCE} and later")
    torch._dynamo.reset()
    return functools.partial(torch.compile, fullgraph=True, backend=torch_backend)


class Traced:
    """A function that counts its calls: under ``jax.jit``, how often it is traced.

    The sizes of JAX's own caches are no such counts: what is least used leaves them.
    """

    def __init__(self, function: Callable[..., Any], /) -> None:
        functools.update_wrapper(self, function)
        self._function, self.traces = function, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.traces += 1
        return self._function(*args, **kwargs)


def compiled(backend: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function compiled, where else each slice would be compiled alone."""
    if backend.name != "jax":
        return function
    import jax

    jitted: Callable[..., Any] = jax.jit(function)
    return jitted
