"""The rows of a layer in several terms of a loss, one after the other.

Conventions.  A term has N examples of C outputs each.  Its rows are those of N examples
with C sources; or, where inputs differ between the outputs of an example as in derivatives
of a network, those of ``N C`` examples of one source, one output after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kfac_core import errors
from kfac_core.array import Array, Namespace, replaced
from kfac_core.array import namespaces as ns
from kfac_core.layers.example_gradients import ExampleGradients
from kfac_core.layers.id_rows import IdRows
from kfac_core.layers.layer import AnyRows
from kfac_core.layers.rows import Rows


def joined_rows(
    parts: Sequence[AnyRows | None],
    forms: Sequence[tuple[int, int]],
    /,
    *,
    scales: Sequence[float],
) -> AnyRows:
    """Return a layer's rows of all terms, each times its scale.

    Parameters
    ----------
    parts : sequence of Rows, IdRows, ExampleGradients or None
        Rows of each term, of one kind; None for a term that does not use the layer.
    forms : sequence of tuple of int
        N and C of each term.
    scales : sequence of float
        Factors on the output gradients.

    Returns
    -------
    Rows, IdRows or ExampleGradients
        With as many positions as the term that has the most, and zeros in the others.  Of
        an example C outputs where that is so of all terms, else each output is an example.

    Raises
    ------
    UnsupportedError
        For bags of unequal numbers of ids.
    """
    shared = len({C for _, C in forms}) == 1 and all(
        rows is not None and rows.examples == N
        for rows, (N, _) in zip(parts, forms, strict=True)
    )
    counts = [N if shared else N * C for N, C in forms]
    terms: list[list[Array] | None] = []
    for rows, (N, C), scale in zip(parts, forms, scales, strict=True):
        if rows is None:
            terms.append(None)
            continue
        *inputs, g = _arrays(rows if shared else by_output(rows, N, C))
        terms.append([*inputs, g if scale == 1.0 else g * scale])
    first = next(rows for rows in parts if rows is not None)
    known = [arrays for arrays in terms if arrays is not None]
    is_bag = isinstance(first, IdRows) and first.bag
    if is_bag and len({arrays[0].shape[1] for arrays in known}) > 1:
        raise errors.UnsupportedError(
            "Bags of unequal numbers of ids cannot be joined."
        )
    xp = ns.own_namespace(first.like)
    joined = []
    for i, like in enumerate(known[0]):
        shapes = [arrays[i].shape for arrays in known]
        ends = [max(shape[axis] for shape in shapes) for axis in (-2, -1)]
        pieces = [
            _filled(None if of is None else of[i], N, ends, like, xp)
            for of, N in zip(terms, counts, strict=True)
        ]
        joined.append(xp.concat(pieces, axis=-3) if pieces[1:] else pieces[0])
    return _with_arrays(first, joined)


def by_output(rows: AnyRows, N: int, C: int, /) -> AnyRows:
    """Return rows with each output as an example, those of an example side by side."""
    if C == 1:
        return rows
    xp = ns.own_namespace(rows.like)

    def ordered(x: Array) -> Array:
        """From one output after the other, on the third axis from the end."""
        x = xp.reshape(x, (*x.shape[:-3], C, N, *x.shape[-2:]))
        x = ns.moved_axis(x, x.ndim - 4, x.ndim - 3, xp=xp)
        return xp.reshape(x, (*x.shape[:-4], N * C, *x.shape[-2:]))

    *inputs, g = _arrays(rows)
    if rows.examples == N:
        # Outputs of an example share its inputs, and have a source each.
        inputs = [xp.repeat(x, C, axis=x.ndim - 3) for x in inputs]
        g = xp.reshape(g, (*g.shape[:-4], 1, C * N, *g.shape[-2:]))
    else:
        inputs = [ordered(x) for x in inputs]
    return _with_arrays(rows, [*inputs, ordered(g)])


def _arrays(rows: Any) -> list[Array]:
    """Return the inputs (..., N, S, n), if any, and the gradients (..., M, N, S, m)."""
    if isinstance(rows, ExampleGradients):
        D, xp = rows.gradients, ns.own_namespace(rows.gradients)
        return [xp.reshape(D, (rows.sources, rows.examples, 1, D.shape[-1]))]
    if isinstance(rows, IdRows):
        return [rows.ids[:, :, None], rows.output_grads]
    xp = ns.own_namespace(rows.inputs)
    return [rows.full_inputs(rows.inputs.dtype, xp=xp), rows.output_grads]


def _with_arrays(rows: AnyRows, arrays: Sequence[Array]) -> AnyRows:
    """Return rows of the same kind with other arrays; undoes `_arrays`."""
    *inputs, g = arrays
    if isinstance(rows, ExampleGradients):
        M, N, _, p = g.shape
        D = ns.own_namespace(g).reshape(g, (M * N, p))
        return ExampleGradients(D, N, M)
    if isinstance(rows, IdRows):
        # Masked rows have gradients of zero.
        return replaced(rows, ids=inputs[0][:, :, 0], output_grads=g, mask=None)
    return Rows(inputs[0], g, None, homogeneous=False)


def _filled(
    x: Array | None, examples: int, ends: Sequence[int], like: Array, xp: Namespace
) -> Array:
    """Return an array with zeros up to some numbers of positions and features."""
    device = ns.device_of(like)
    if x is None:
        shape = (*like.shape[:-3], examples, *ends)
        return xp.zeros(shape, dtype=like.dtype, device=device)
    for axis, length in zip((-2, -1), ends, strict=True):
        if missing := length - x.shape[axis]:
            shape = tuple(
                missing if n == x.ndim + axis else k for n, k in enumerate(x.shape)
            )
            x = xp.concat([x, xp.zeros(shape, dtype=x.dtype, device=device)], axis=axis)
    return x
