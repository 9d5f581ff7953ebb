"""The rows of a layer with all positions of each example, whatever approximates it."""

from __future__ import annotations

from kfac_core import constraints, errors
from kfac_core.layers.chain import ChainRows
from kfac_core.layers.feeding import BatchLike
from kfac_core.layers.layer import AnyRows, Layer
from kfac_core.layers.rows import Rows, join_uses


def whole_rows(layer: Layer, batches: BatchLike, /) -> AnyRows:
    """Turn batches of a layer into rows that hold each example's gradient.

    Parameters
    ----------
    layer : Layer
        Layer of any kind that has inputs.
    batches : Batch, or sequence of Batch
        A sequence is several uses of the layer in each example.

    Returns
    -------
    Rows, IdRows or ExampleGradients
        Rows of N examples.

    Raises
    ------
    ShapeError, DtypeError, MixedArraysError
        For arrays of incompatible shape, dtype, library or device.
    UnsupportedError
        For several uses of a layer without rows x and g.
    """
    uses = list(batches) if isinstance(batches, list | tuple) else [batches]
    constraints.require_any("batch", uses)
    rows = [layer.rows(use) for use in uses]
    if len(rows) == 1 and not isinstance(rows[0], ChainRows):
        return rows[0]
    joined = [part for part in rows if isinstance(part, Rows)]
    if len(joined) < len(rows):
        raise errors.UnsupportedError(
            f"Several uses of a {layer.kind} layer cannot be joined; only those of a "
            "dense or conv layer can."
        )
    return join_uses(joined)
