"""The rows of one batch in all layers of a chain, of one and the same examples."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.namespaces import cast, namespace_of
from kfac_core.array.structure import replaced
from kfac_core.errors import ShapeError, UnknownBlockError
from kfac_core.layers.dense import Dense
from kfac_core.layers.rows import Batch, Rows

__all__ = ["crossed_moments", "joined_rows"]


def joined_rows(
    layers: Mapping[str, Dense], batches: Mapping[str, Batch], /
) -> dict[str, tuple[Batch, Rows]]:
    """Return each layer's batch, with the mask of all layers together, and its rows.

    Parameters
    ----------
    layers : mapping of str to Dense
        The layers by name.
    batches : mapping of str to Batch
        Likewise; never modified.

    Returns
    -------
    dict of str to tuple of Batch and Rows
        An example that any mask leaves out is left out of all.

    Raises
    ------
    UnknownBlockError
        For other names than those of the layers.
    ShapeError
        For shared positions, or examples and sources that differ between layers.
    """
    if set(batches) != set(layers):
        raise UnknownBlockError(
            f"Expected `batches` of the layers {list(layers)}, got {sorted(batches)}."
        )
    rows = {name: layer.rows(batches[name]) for name, layer in layers.items()}
    xp = namespace_of(**{f"batches[{n!r}]": made.inputs for n, made in rows.items()})
    first = next(iter(rows))
    expected = rows[first].examples, rows[first].sources
    for name, made in rows.items():
        if made.positions != 1:
            raise ShapeError(
                f"Layer {name!r}: expected one row for each example, got "
                f"{made.positions} shared positions, which need not be those of the next "
                "layer. Where they are, fold them into the examples."
            )
        if (made.examples, made.sources) != expected:
            raise ShapeError(
                f"Layer {name!r}: expected the examples and sources of {first!r}, "
                f"{expected}, got {(made.examples, made.sources)}."
            )
    masks = [made.mask for made in rows.values() if made.mask is not None]
    if not masks:
        return {name: (batches[name], made) for name, made in rows.items()}
    mask = functools.reduce(xp.logical_and, masks)
    joined = {}
    for name, layer in layers.items():
        shape = tuple(batches[name].inputs.shape[:-1])
        batch = replaced(batches[name], mask=xp.reshape(mask, shape))
        joined[name] = batch, layer.rows(batch)
    return joined


def crossed_moments(
    rows: Rows, following: Rows, dtype: object, /, *, xp: Namespace
) -> tuple[Array, Array]:
    """Return the sums of ``x_i x_j^T`` and ``g_i g_j^T`` of two layers.

    Parameters
    ----------
    rows, following : Rows
        Of layers i and j, one row for each example.
    dtype : dtype
        Of the result.
    xp : namespace
        Of both.

    Returns
    -------
    inputs, output_grads : array, shapes (n_i, n_j) and (m_i, m_j)
        Sums over examples, and over sources.
    """
    x, y = (part.full_inputs(dtype, xp=xp)[:, 0, :] for part in (rows, following))
    g, h = (
        xp.reshape(part.output_grads, (-1, part.output_grads.shape[-1]))
        for part in (rows, following)
    )
    g, h = cast(xp, g, dtype), cast(xp, h, dtype)
    return (
        xp.matmul(xp.matrix_transpose(x), y),
        xp.matmul(xp.matrix_transpose(g), h),
    )
