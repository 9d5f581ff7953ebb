"""From an operation's definition to the native one, where the backend has it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from kfac_core.array.backend import (
    OPERATIONS,
    native_operation,
    operations_by_namespace,
)

__all__ = ["dispatched", "is_factorization_failure"]

P = ParamSpec("P")
R = TypeVar("R")

_SOURCE = """
def made(definition, native_operation, operations_by_namespace):
    def operation{signature}:
        known = operations_by_namespace.get(xp.__name__)
        native = native_operation({name!r}, xp) if known is None else known.get({name!r})
        if native is not None:
            result = native({arguments})
            if result is not NotImplemented:
                return result
        return definition({arguments})
    return operation
"""
"""An operation, which is asked for dozens of times in a step of a small layer.

Its parameters are written out, since packing and unpacking them takes as long as the rest.
What it calls is enclosed: compilers tell global names of one module apart by name alone.
"""


def dispatched(definition: Callable[P, R], /) -> Callable[P, R]:
    """Let a backend replace an operation by the native one of the same name.

    Parameters
    ----------
    definition : callable
        Function in the pure standard, with the namespace as the keyword ``xp``.  Its name
        is one of `kfac_core.array.backend.OPERATIONS`.  It stays reachable as
        ``__wrapped__``.

    Returns
    -------
    callable
        With the same signature.
    """
    name = definition.__name__
    if name not in OPERATIONS:
        raise ValueError(f"{name!r} is not among OPERATIONS: {', '.join(OPERATIONS)}")
    bare: list[inspect.Parameter] = []
    arguments: list[str] = []
    for own in inspect.signature(definition).parameters.values():
        bare.append(own.replace(annotation=own.empty, default=own.empty))
        named = own.kind == own.KEYWORD_ONLY
        arguments.append(f"{own.name}={own.name}" if named else own.name)
    source = _SOURCE.format(
        name=name, signature=inspect.Signature(bare), arguments=", ".join(arguments)
    )
    scope: dict[str, Any] = {"__name__": __name__}
    exec(source, scope)
    function: Any = definition
    operation = scope["made"](function, native_operation, operations_by_namespace)
    operation.__defaults__ = function.__defaults__
    operation.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(operation, function)
    return cast("Callable[P, R]", operation)


def is_factorization_failure(error: Exception, /) -> bool:
    """Whether an exception means that a matrix cannot be factorized.

    The standard names no exception, and the libraries' have no common base: NumPy's
    derives from ValueError, PyTorch's from RuntimeError.  Their names agree.
    """
    names = (cls.__name__.lstrip("_") for cls in type(error).__mro__)
    return "LinAlgError" in names
