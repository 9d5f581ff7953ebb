"""Counts of how often a function is traced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["Traced"]


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
