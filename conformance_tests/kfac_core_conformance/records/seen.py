"""The tensors of one update, converted to the conventions of the format."""

from __future__ import annotations

import math
from typing import Any

import array_api_compat
import numpy as np

from kfac_core.array import Array
from kfac_core.array.namespaces import cast, wide_dtype
from kfac_core.array.selection import to_numpy
from kfac_core.conventions import Conventions
from kfac_core.errors import RecordError
from kfac_core.layers.example_gradients import GradientBatch, require_known_rows
from kfac_core.layers.layer import Layer
from kfac_core.layers.rows import Batch
from kfac_core_conformance.records.container import HostArray


def tensors_of(
    batch: Batch | GradientBatch, layer: Layer, conventions: Conventions, /
) -> dict[str, HostArray]:
    """Return the tensors of one batch, with gradients scaled to those of the summed loss.

    Parameters
    ----------
    batch : Batch or GradientBatch
        An argument of `kfac_core.update_block`.
    layer : Layer
        The layer, which validates the batch.
    conventions : Conventions
        How the gradients are scaled.  They are multiplied by the square root of the
        factor that applies to their outer products.

    Returns
    -------
    dict of str to numpy.ndarray
        The tensors, by the last parts of their names.

    Raises
    ------
    ShapeError, DtypeError, MixedArraysError
        For arrays that do not fit the layer.
    ConventionError
        For gradients of a mean over rows that nobody can count.
    RecordError
        If a gradient batch has several backpropagated vectors.
    """
    rows: Any = layer.rows(batch)
    require_known_rows(rows, conventions.reduction)
    scale = conventions.outer_product_scale(
        examples=rows.examples, rows=_counted(batch, rows), sources=rows.sources
    )
    factor = math.sqrt(scale)
    if isinstance(batch, GradientBatch):
        return _gradients(batch, factor)
    grads = host_array(batch.output_grads) * factor
    tensors = {
        "inputs": host_array(batch.inputs),
        "output_grads": grads[None] if batch.sources is None else grads,
    }
    if batch.mask is not None:
        tensors["mask"] = to_numpy(batch.mask).astype(np.uint8)
    return tensors


def host_array(x: Array, /) -> HostArray:
    """Copy an array to the host; 16-bit floats as float32, since NumPy has no bfloat16."""
    if isinstance(x, int | float):
        return np.asarray(x, np.float64)
    xp = array_api_compat.array_namespace(x)
    if xp.isdtype(x.dtype, "real floating"):
        x = cast(xp, x, wide_dtype(xp, x.dtype))
    return to_numpy(x)


def _gradients(batch: GradientBatch, factor: float) -> dict[str, HostArray]:
    if (batch.sources or 1) > 1:
        raise RecordError(
            f"The format has one gradient for each parameter, got {batch.sources}. Write "
            "one record for each."
        )
    arrays = {}
    for name, gradient in batch.gradients.items():
        values = host_array(gradient) * factor
        arrays[f"grads.{name}"] = values if batch.sources is None else values[0]
    return {**arrays, "batch_size": np.asarray(batch.batch_size, np.int64)}


def _counted(batch: Batch | GradientBatch, rows: Any) -> float:
    """Return the number of rows that are not masked."""
    if isinstance(batch, GradientBatch):
        return float(batch.batch_size)
    if batch.mask is None:
        return float(rows.examples * rows.positions)
    return float(np.sum(to_numpy(batch.mask)))
