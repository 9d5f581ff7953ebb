"""Views of arrays through transposes, reshapes and the like, axis by axis.

Conventions.  A parameter is often transposed, reshaped, cast or broadcast before a layer
uses it, and so is a layer's output before its bias is added.  A `View` follows that, axis
by axis.  A *piece* ``(axis, stride, size)`` is a part of one axis of the first array: all
of it is ``(axis, 1, size)``.  An axis of the view is a row-major product of pieces; an
axis of length one, or along which the array was repeated, has none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

Piece: TypeAlias = tuple[int, int, int]
Source: TypeAlias = "int | Join"
"""An array by its number, or the concatenation of several."""

SAME = frozenset(
    {
        "convert_element_type",
        "copy",
        "copy_p",
        "name",
        "optimization_barrier",
        "pbroadcast",
        "pcast",
        "pvary",
        "sharding_constraint",
    }
)
"""Operations that move nothing."""


@dataclass(frozen=True)
class Join:
    """The concatenation of several arrays, each reshaped before.

    Attributes
    ----------
    sources : tuple of Source
        The arrays.
    shape : tuple of int
        Shape of the concatenation.
    axis : int
        Its axis.
    """

    sources: tuple[Source, ...]
    shape: tuple[int, ...]
    axis: int


@dataclass(frozen=True)
class View:
    """Which axes of an array, such as a parameter, lie where in another.

    Attributes
    ----------
    source : Source
        The array.
    axes : tuple of tuple of Piece
        For each axis of the view, what it is of the array.
    sliced : bool
        Whether it is a view of one of the arrays ``source[0], source[1], ...``, over
        which a loop runs.
    window : tuple of pairs of int
        Axes with only some successive entries in view, each with its first entry.
    """

    source: Source
    axes: tuple[tuple[Piece, ...], ...]
    sliced: bool = False
    window: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(source: Source, shape: Sequence[int], /, *, sliced: bool = False) -> View:
        """Return the view of a whole array."""
        return View(source, whole_axes(shape), sliced)

    def first_axis_taken(self) -> View | None:
        """Return the view of one turn of a loop over the first axis."""
        if self.sliced or self.window or not self.axes or len(self.axes[0]) != 1:
            return None
        ((axis, stride, _),) = self.axes[0]
        if axis != 0 or stride != 1:
            return None
        if any(piece[0] == 0 for pieces in self.axes[1:] for piece in pieces):
            return None
        # Without the first axis the others move up by one.
        axes = tuple(
            tuple((axis - 1, stride, size) for axis, stride, size in pieces)
            for pieces in self.axes[1:]
        )
        return View(self.source, axes, sliced=True)

    def moved(
        self, operation: str, params: Any, shape: Sequence[int], new: Sequence[int]
    ) -> View | None:
        """Return the view after an operation, None if that computes something.

        Parameters
        ----------
        operation, params : str, mapping
            Name and parameters of an operation of one operand, as JAX has them.
        shape, new : tuple of int
            Shapes of its operand and of its result.

        Returns
        -------
        View or None
            View of the same array.
        """
        axes: tuple[tuple[Piece, ...], ...] | None = None
        if operation == "slice":
            return self._cut(params, shape)
        if operation in SAME:
            axes = self.axes
        elif operation == "transpose":
            axes = tuple(self.axes[i] for i in params["permutation"])
        elif operation == "squeeze":
            gone = params["dimensions"]
            axes = tuple(a for i, a in enumerate(self.axes) if i not in gone)
        elif operation in ("broadcast_in_dim", "expand_dims"):
            places = [int(i) for i in params.get("broadcast_dimensions", ())]
            if operation == "expand_dims":
                places = [i for i in range(len(new)) if i not in params["dimensions"]]
            axes = tuple(
                self.axes[places.index(i)] if i in places else ()
                for i in range(len(new))
            )
        elif operation == "reshape" and params.get("dimensions") is None:
            # After a reshape repeated entries could not be told from others.
            repeated = any(
                n > 1 and not a for n, a in zip(shape, self.axes, strict=True)
            )
            axes = None if repeated else _regrouped(joined(self.axes), new)
        return None if axes is None else replace(self, axes=axes)

    def _cut(self, params: Any, shape: Sequence[int]) -> View | None:
        """Return the view of some successive entries along each axis."""
        window = dict(self.window)
        axes: list[tuple[Piece, ...]] = []
        bounds = zip(params["start_indices"], params["limit_indices"], strict=True)
        for pieces, length, (start, stop) in zip(self.axes, shape, bounds, strict=True):
            if pieces and stop - start < length:
                (axis, stride, _), *inner = pieces
                # Successive entries of a product of pieces are no range of one axis.
                if inner or stride != 1 or params["strides"]:
                    return None
                window[axis] = window.get(axis, 0) + start
                pieces = ((axis, 1, stop - start),)
            axes.append(pieces)
        return replace(self, axes=tuple(axes), window=tuple(window.items()))


def numbers_of(source: Source, /) -> tuple[int, ...]:
    """Return the numbers of the arrays that a source consists of."""
    if isinstance(source, int):
        return (source,)
    return tuple(n for part in source.sources for n in numbers_of(part))


def whole_axes(shape: Sequence[int], /) -> tuple[tuple[Piece, ...], ...]:
    """Return the axes of an array as it is."""
    return tuple(((i, 1, n),) if n > 1 else () for i, n in enumerate(shape))


def joined(axes: Iterable[Iterable[Piece]], /) -> list[Piece]:
    """Return the pieces of some axes in row-major order, adjacent parts put together."""
    merged: list[Piece] = []
    for axis, stride, size in (piece for pieces in axes for piece in pieces):
        if merged:
            before, outer, count = merged[-1]
            # A step of the outer piece is as long as all of the inner one: they are
            # adjacent.
            if before == axis and outer == stride * size:
                merged[-1] = (axis, stride, count * size)
                continue
        merged.append((axis, stride, size))
    return merged


def _regrouped(
    pieces: list[Piece], shape: Sequence[int]
) -> tuple[tuple[Piece, ...], ...] | None:
    """Return the axes of a reshaped array, None where a piece would be cut unevenly."""
    left = list(pieces)
    axes: list[tuple[Piece, ...]] = []
    for length in shape:
        pieces_here: list[Piece] = []
        while math.prod(size for *_, size in pieces_here) < length:
            axis, stride, size = left.pop(0)
            need, uneven = divmod(length, math.prod(n for *_, n in pieces_here))
            if uneven:
                return None
            # Split the piece: its outer part belongs to this axis.
            if size > need:
                inner, uneven = divmod(size, need)
                if uneven:
                    return None
                left.insert(0, (axis, stride, inner))
                stride, size = stride * inner, need
            pieces_here.append((axis, stride, size))
        if math.prod(size for *_, size in pieces_here) != length:
            return None
        axes.append(tuple(pieces_here))
    return tuple(axes)
