"""Parameter-shaped arrays with leading axes, as matrices with leading axes.

Conventions.  A stack of parameters is a mapping of names to arrays of shape
``(*lead, *shape)``: Jacobians with axes of examples and outputs, gradients of many
examples, samples.  All parameters of a layer have the same ``lead``.  The matrices have
shape ``(*lead, in(+1), out)``, each as `Layer.parameters_to_matrix` makes it of one.

Every layer's map from parameters to its matrix is a permutation.  It is computed once,
from numbered parameters on the host, and applied to the whole stack.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from kfac_core import constraints
from kfac_core.array import Array
from kfac_core.array import namespaces as ns
from kfac_core.array.backend import backend_of
from kfac_core.layers.checks import require_parameters
from kfac_core.layers.layer import Layer


def stack_to_matrices(layer: Layer, stack: Mapping[str, Array], /) -> Array:
    """Turn a stack of parameters into a stack of the layer's matrices.

    Parameters
    ----------
    layer : Layer
        Layer whose layout is used.
    stack : mapping of str to array, shapes (*lead, *parameter shape)
        The layer's parameters by name; not modified.

    Returns
    -------
    array, shape (*lead, in(+1), out)
        In the order of the layer's matrix.

    Raises
    ------
    ShapeError
        For missing, unknown or misshapen parameters, or leading axes that differ.
    DtypeError, MixedArraysError
        For integers, and for arrays of several libraries or devices.

    Notes
    -----
    One gather, and as many integers as one matrix has numbers.
    """
    shapes = layer.parameter_shapes
    name, shape = next(iter(shapes.items()))
    axes = stack[name].ndim - len(shape) if name in stack else 0
    lead = tuple(stack[name].shape[:axes]) if axes > 0 else ()
    xp = require_parameters(stack, {n: (*lead, *s) for n, s in shapes.items()})
    if not lead:
        return layer.parameters_to_matrix(stack)
    flat = [xp.reshape(stack[name], (*lead, -1)) for name in shapes]
    joined = xp.concat(flat, axis=-1) if len(flat) > 1 else flat[0]
    # The layer permutes numbered parameters once; the same permutation then serves any
    # leading axes, which layers do not know.
    taken = xp.take(joined, _placed(_permutation(layer), joined), axis=-1)
    return xp.reshape(taken, (*lead, *layer.matrix_shape))


def matrices_to_stack(layer: Layer, matrices: Array, /) -> dict[str, Array]:
    """Turn a stack of the layer's matrices back into a stack of parameters.

    Parameters
    ----------
    layer : Layer
        Layer whose layout is used.
    matrices : array, shape (*lead, in(+1), out)
        Matrices from `stack_to_matrices`.

    Returns
    -------
    dict of str to array, shapes (*lead, *parameter shape)
        Arrays by name.

    Raises
    ------
    ShapeError
        For another shape.
    """
    xp, (n, m) = ns.own_namespace(matrices), layer.matrix_shape
    constraints.require_shape("matrices", matrices, (..., n, m))
    lead = tuple(matrices.shape[:-2])
    if not lead:
        return layer.matrix_to_parameters(matrices)
    flat = xp.reshape(matrices, (*lead, n * m))
    joined = xp.take(flat, _placed(np.argsort(_permutation(layer)), flat), axis=-1)
    stack, start = {}, 0
    for name, shape in layer.parameter_shapes.items():
        size = math.prod(shape)
        stack[name] = xp.reshape(joined[..., start : start + size], (*lead, *shape))
        start += size
    return stack


def _permutation(layer: Layer) -> np.ndarray[Any, Any]:
    """Return, for each place of the matrix, the number of its parameter."""
    numbered, start = {}, 0
    for name, shape in layer.parameter_shapes.items():
        size = math.prod(shape)
        # Float64, which layers accept, holds integers exactly up to 2^53.
        numbers = np.arange(start, start + size, dtype=np.float64)
        numbered[name] = np.reshape(numbers, shape)
        start += size
    order: np.ndarray[Any, Any] = layer.parameters_to_matrix(numbered)
    return np.reshape(order, (-1,)).astype(np.int64)


def _placed(index: np.ndarray[Any, Any], like: Array) -> Array:
    small = index.astype(np.int32 if index.size < 2**31 else np.int64)
    return backend_of(ns.own_namespace(like)).asarray(small, device=ns.device_of(like))
