"""Numbers of queries and examples to process at a time, for a memory budget.

Conventions.  The budget is a number of array elements that the temporaries of a call may
hold at a time.  Arguments, results (twice, while
their parts are joined) and the bases of the blocks come on top.  With P the number of a
block's parameters, q queries take ``2 q P``; an example of S rows takes twice its rows
and, by rows, ``2 q S min(n, m)`` for ``x^T P_q g``, else its gradient's P numbers twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kfac_core import errors
from kfac_core.array import Array
from kfac_core.array import namespaces as ns
from kfac_core.influence.example_gradients import LayerGradients
from kfac_core.layers.layer import Layer
from kfac_core.operators.spectral import SpectralOperator


class Chunks(NamedTuple):
    """Largest numbers of queries and examples to process at a time, and the method."""

    queries: int
    examples: int
    by_rows: bool


def score_chunks(
    gradients: LayerGradients, /, *, queries: int, max_elements: int
) -> Chunks:
    """Choose chunks for the inner products of queries and examples.

    Parameters
    ----------
    gradients : LayerGradients
        Gradients of the examples.
    queries : int
        Number of queries.
    max_elements : int
        The budget.

    Returns
    -------
    Chunks
        Chunks of at least one query and one example.

    Raises
    ------
    ShapeError
        If not even these fit, with the number that would do.

    Notes
    -----
    Where examples have several rows, and there are several queries, forming the
    gradients costs fewer flops: ``P (S + q)`` for each example and not ``P S q``.
    """
    size = _size(gradients.layer)
    q = max(1, min(queries, max_elements // (4 * size)))
    while True:
        # x^T P g of each row needs room for every pair of a query and a row.  Several
        # of both take the gradients of examples instead.
        by_rows = gradients.is_rows and (gradients.rows_each == 1 or q == 1)
        each = _rows(gradients) + (_bilinear(gradients, q) if by_rows else 2 * size)
        room = max_elements - 2 * q * size
        if room >= each:
            return Chunks(q, min(room // each, max(1, gradients.examples)), by_rows)
        if q == 1:
            raise _too_small(2 * size + each, max_elements, "one query and one example")
        # Fewer queries at a time leave room for more examples.
        q = q // 2


def example_chunk(
    gradients: LayerGradients, /, *, max_elements: int, matrices: int
) -> int:
    """Choose how many examples' gradients are transformed to a basis at a time.

    Parameters
    ----------
    gradients : LayerGradients
        Gradients of the examples.
    max_elements : int
        The budget.
    matrices : int
        Number of temporary matrices of P numbers for each example.

    Returns
    -------
    int
        At least one.

    Raises
    ------
    ShapeError
        If not even one fits.
    """
    size = _size(gradients.layer)
    each = 2 * _rows(gradients) + matrices * size
    # Room for the two matrices 1 / (s + lam) and s + lam.
    room = max_elements - 2 * size
    if each > room:
        raise _too_small(2 * size + each, max_elements, "one example")
    return min(room // each, max(1, gradients.examples))


def parts(count: int, step: int, /) -> Iterator[tuple[int, int]]:
    """Yield the bounds of successive parts of a range."""
    for start in range(0, count, step):
        yield start, min(start + step, count)


def joined(
    pieces: list[Array], shape: tuple[int, ...], F: SpectralOperator, /, *, axis: int
) -> Array:
    """Return arrays joined along an axis; zeros of a shape where there are none."""
    xp = F.namespace
    if not pieces:
        return xp.zeros(shape, dtype=F.dtype, device=ns.device_of(F.damping))
    return pieces[0] if len(pieces) == 1 else xp.concat(pieces, axis=axis)


def _size(layer: Layer) -> int:
    n, m = layer.matrix_shape
    return n * m


def _rows(gradients: LayerGradients) -> int:
    """Return the number of elements of an example's rows."""
    (n, m), layer = gradients.layer.matrix_shape, gradients.layer
    if not gradients.is_rows:
        return _size(layer)
    return 2 * gradients.rows_each * (layer.groups * n + m)


def _bilinear(gradients: LayerGradients, queries: int) -> int:
    """Return the elements of ``x^T P_q g`` for one example and all queries of a chunk."""
    n, m = gradients.layer.matrix_shape
    narrow = gradients.layer.groups * min(n, m // gradients.layer.groups)
    return queries * gradients.rows_each * (2 * narrow + 1)


def _too_small(needed: int, budget: int, what: str) -> errors.ShapeError:
    return errors.ShapeError(
        f"Expected `max_elements` of at least {needed}, for {what}, got {budget}."
    )
