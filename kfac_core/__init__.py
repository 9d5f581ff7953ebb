"""Kronecker-factored curvature, for every array library.

A framework feeds layer inputs and output gradients; this library gives back products of
the curvature with vectors.  A `Block` pairs a layer (`Dense`) with an approximation
(`Kronecker`); a `Network` is the description of all blocks, a `NetworkState` everything
that changes, and an `Estimator` holds both.  Arrays decide which library computes, through
the Python Array API; `kfac_core.array.selection` says which one serves where no array is
there to decide.

A name is imported when it is first used, so that `import kfac_core` costs little more than
NumPy's own import.  The names stand in ``__init__.pyi``, which type checkers read.
"""

import os
from typing import Any

import lazy_loader

__version__ = "0.1.0"

_load, __dir__, _loadable = lazy_loader.attach_stub(__name__, __file__)
_modules = {entry.name.removesuffix(".py") for entry in os.scandir(__path__[0])}
__all__ = [name for name in _loadable if name not in _modules]


def __getattr__(name: str) -> Any:
    """Import a public name, or a module, at its first use, and keep it."""
    attribute = globals()[name] = _load(name)
    return attribute
