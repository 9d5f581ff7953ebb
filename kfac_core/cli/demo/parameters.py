"""Arithmetic on the parameters of a network.

Parameters, gradients and updates share one structure, a dictionary of layers that hold
dictionaries of arrays:

    {"fc1": {"weight": (n_in, n_out), "bias": (n_out,)}, "fc2": ...}

It is the structure that `kfac_core.Estimator.precondition` takes and gives back.
Nothing here changes an array in place: some libraries do not allow it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import array_api_compat
import numpy as np

import kfac_core as kc
from kfac_core.array.backend import Array

__all__ = [
    "Parameters",
    "map_parameters",
    "to_backend",
    "wait_for",
    "zeros_like",
]

Parameters: TypeAlias = dict[str, dict[str, Array]]


def map_parameters(function: Callable[..., Array], /, *trees: Parameters) -> Parameters:
    """Apply a function to the corresponding arrays of one or more structures.

    Parameters
    ----------
    function : callable
        Takes one array from each structure and returns one array.
    *trees : Parameters
        Structures with the same names.

    Returns
    -------
    dict
        The results, under the same names.
    """
    return {
        layer: {
            name: function(*(tree[layer][name] for tree in trees)) for name in arrays
        }
        for layer, arrays in trees[0].items()
    }


def zeros_like(tree: Parameters, /) -> Parameters:
    """Return a structure of zeros with the shapes and dtypes of another."""
    return map_parameters(lambda array: 0.0 * array, tree)


def to_backend(
    tree: Mapping[str, Mapping[str, np.ndarray[Any, Any]]],
    /,
    *,
    dtype: str,
    backend: str | None = None,
) -> Parameters:
    """Copy a structure of NumPy arrays to a backend, in a dtype.

    Parameters
    ----------
    tree : mapping
        Arrays on the host.
    dtype : str
        ``"float64"`` or ``"float32"``.
    backend : str, optional
        ``name[:device]`` instead of the selected one.

    Returns
    -------
    dict
        The same values on the backend.
    """
    return {
        layer: {
            name: kc.asarray(array.astype(dtype), backend=backend)
            for name, array in arrays.items()
        }
        for layer, arrays in tree.items()
    }


def wait_for(tree: Parameters, /) -> None:
    """Wait until a device that computes on its own has made the last array."""
    last = list(tree.values())[-1]["bias"]
    float(array_api_compat.array_namespace(last).sum(last))
