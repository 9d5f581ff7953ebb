"""Equal small blocks as one stack: arrays with a leading axis, and one call for all.

For matrices of few rows, calls dominate the cost.  The arrays of equal blocks are copied
into arrays with one more axis, and the function of one block runs on those.  Which blocks
are equal is told by the block, by the form, shapes, dtypes and devices of its arrays, and
by the scalars among its arguments.

Pieces that a stack was taken apart into are recognized when they come back, so that
statistics and operators stay stacked from one step to the next.  A stack with a flagged
block is recomputed block by block, so that each block's result is the same as without
stacking, up to rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from operator import is_
from typing import Any

import numpy as np

from kfac_core import constraints, errors
from kfac_core.array import Array, map_structure, structure
from kfac_core.array import namespaces as ns
from kfac_core.array.types import Tree
from kfac_core.block import Block, Vector
from kfac_core.stages import EXECUTOR, Executor, Result, Stage, Task, Tasks, plain

STACKED_UP_TO = 128
"""The number of rows up to which blocks are stacked; from 256 on NumPy loses by it."""

FEWEST = 4
"""The number of equal blocks from which on a stack takes less time."""

Names = tuple[str, ...]


class Stacked(Executor):
    """An executor that runs equal small blocks as one stack.

    Arrays of equal blocks are copied into arrays with a leading axis, since calls dominate
    the cost of small matrices.  A stack with a flagged block is recomputed block by block.

    Parameters
    ----------
    inner : Executor
        Executor that runs the stacks, and blocks without an equal.
    fewest : int
        Number of equal blocks from which on they are stacked: fewer take longer as one.
    """

    def __init__(self, inner: Executor = plain, *, fewest: int = FEWEST) -> None:
        constraints.require_range("inner", inner, EXECUTOR)
        constraints.require_range("fewest", fewest, constraints.COUNT)
        self._inner, self._fewest = inner, fewest
        # Keep the objects with their ids, so that no id is reused while it is a key.
        self._kinds: dict[int, tuple[Any, int | None]] = {}
        self._blocks: list[Block] = []
        self._stacked_blocks: dict[tuple[Block, int], Block] = {}
        self._pieces: dict[int, tuple[Any, _Stack]] = {}
        self._last: dict[tuple[str, type[Any]], _Stack] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to make a copy, which starts with empty caches."""
        return partial(type(self), self._inner, fewest=self._fewest), ()

    def __call__(self, stage: Stage[Result], tasks: Tasks, /) -> dict[str, Result]:
        """Return the result of a stage for each task, by name."""
        if len(tasks) < 2:
            return self._inner(stage, tasks)
        results = self._together(stage, tasks)
        alone = {name: task for name, task in tasks.items() if name not in results}
        if alone:
            results |= self._inner(stage, alone)
        return {name: results[name] for name in tasks}

    def viewed(self, vectors: Vector, /) -> Vector:
        """Return vectors as the inner executor takes them."""
        return self._inner.viewed(vectors)

    def _together(self, stage: Stage[Result], tasks: Tasks) -> dict[str, Result]:
        """Return the results of equal tasks, if their stack has no flag."""
        kinds: dict[int, list[str]] = {}
        for name, task in tasks.items():
            known = self._kinds.get(id(task[0]))
            kind = self._kind(task[0]) if known is None else known[1]
            if kind is not None:
                kinds.setdefault(kind, []).append(name)
        groups: dict[Any, list[str]] = {}
        for kind, equal in kinds.items():
            names = [name for name in equal if stage.stacks(*tasks[name])]
            # Compare forms only if there are enough equal blocks.
            if len(names) < self._fewest:
                continue
            arguments = zip(*[tasks[name][1:] for name in names], strict=True)
            forms = [
                self._forms_of(values, place < stage.arrays)
                for place, values in enumerate(arguments)
            ]
            # Equal blocks with unequal data (another N, a mask, another dtype) make no
            # stack.
            for name, *form in zip(names, *forms, strict=False):
                groups.setdefault((kind, *form), []).append(name)
        members = {
            f"{names[0]} and {len(names) - 1} equal blocks": tuple(names)
            for names in groups.values()
            if len(names) >= self._fewest
        }
        if not members:
            return {}
        stacks = {
            label: self._stacked_task(stage, tasks, names)
            for label, names in members.items()
        }
        counts = {task[0]: len(members[label]) for label, task in stacks.items()}
        of_stacks = replace(
            stage,
            run=partial(_result_or_error, stage.run),
            # The inner executor balances threads by this.
            work=lambda block: counts[block] * stage.work(block),
        )
        results: dict[str, Any] = {}
        for label, result in self._inner(of_stacks, stacks).items():
            names_of = members[label]
            # Leave out a failed stack: its tasks run one by one, which names the block.
            if isinstance(result, errors.KFACError) or not stage.accepts(result):
                continue
            pieces = unstacked(result, len(names_of))
            self._remember(names_of, result, pieces)
            results.update(zip(names_of, pieces, strict=True))
        return results

    def _kind(self, block: Block) -> int | None:
        """Return a number common to equal blocks; None for a block that is not stacked."""
        kind = None
        small = max(block.layer.matrix_shape) <= STACKED_UP_TO
        if small and block.stacked(1) is not None:
            if block not in self._blocks:
                self._blocks.append(block)
            kind = self._blocks.index(block)
        self._kinds[id(block)] = block, kind
        return kind

    def _forms_of(self, values: tuple[Any, ...], has_arrays: bool) -> Iterable[Any]:
        """Return the key of one argument of each task, equal for tasks of one stack."""
        first = values[0]
        piece = self._pieces.get(id(first))
        # Usually a test of identity shows that all of them agree.
        if all(map(is_, values, itertools.repeat(first))) or (
            piece is not None and piece[1].is_of(values)
        ):
            return itertools.repeat(None)
        if has_arrays:
            return map(self._form, values)
        # Arguments that are not stacked must be equal numbers, or identical arrays.
        return [structure.form_of(value, id) for value in values]

    def _form(self, value: Tree) -> object:
        """Return the key of a stacked argument."""
        piece = self._pieces.get(id(value))
        if piece is None or piece[0] is not value:
            return structure.form_of(value, _array_form)
        stack = piece[1]
        if stack.form is None:
            stack.form = structure.form_of(value, _array_form)
        return stack.form

    def _stacked_task(self, stage: Stage[Any], tasks: Tasks, names: Names) -> Task:
        """Return the task of a stack: a block for many, and stacked arguments."""
        several = [tasks[name] for name in names]
        block, *arguments = several[0]
        for place in range(stage.arrays):
            values = tuple(task[1 + place] for task in several)
            keeps = place == 0 and stage.keeps_stacks
            arguments[place] = self._stack_of(names, values, keeps)
        key = block, len(names)
        if key not in self._stacked_blocks:
            self._stacked_blocks[key] = block.stacked(len(names))
        return (self._stacked_blocks[key], *arguments)

    def _stack_of(self, names: Names, values: tuple[Any, ...], keep: bool) -> Tree:
        """Return a stack of values: the one that they are pieces of, or a new one."""
        known = self._pieces.get(id(values[0]))
        if known is not None and known[1].is_of(values):
            return known[1].whole
        stack = stacked(values)
        if keep:
            self._remember(names, stack, list(values))
        return stack

    def _remember(self, names: Names, whole: Tree, pieces: list[Any]) -> None:
        """Cache a stack and its pieces, replacing the last ones of the same blocks."""
        if isinstance(whole, tuple):
            for place, part in enumerate(whole):
                self._remember(names, part, [piece[place] for piece in pieces])
        if not structure.is_structure(whole):
            return
        stack = _Stack(whole, pieces)
        for name, piece in zip(names, pieces, strict=True):
            last = self._last.get((name, type(whole)))
            if last is not None:
                self._forget(last)
            self._last[name, type(whole)] = stack
            self._pieces[id(piece)] = piece, stack

    def _forget(self, stack: _Stack) -> None:
        """Forget a stack if one of its blocks is now in another."""
        for piece in stack.pieces:
            self._pieces.pop(id(piece), None)
        stack.whole, stack.pieces = None, []


class _Stack:
    """A stack and the pieces that it was taken apart into."""

    def __init__(self, whole: Tree, pieces: list[Any]) -> None:
        self.whole, self.pieces = whole, pieces
        self.form: Any = None

    def is_of(self, values: tuple[Any, ...]) -> bool:
        """Whether some values are these pieces, in order."""
        return len(values) == len(self.pieces) and all(map(is_, values, self.pieces))


def _result_or_error(run: Callable[..., Any], *task: object, name: str) -> Tree:
    """Return the result of a stack; an error is its result, not raised."""
    try:
        return run(*task, name=name)
    except errors.KFACError as error:
        return error


def stacked(values: tuple[Any, ...], /) -> Tree:
    """Return structures of one form as one, whose arrays have a leading axis.

    Parameters
    ----------
    values : tuple of structure or dict
        Values of one structure; not modified.

    Returns
    -------
    structure or dict
        Python numbers are taken from the first value.
    """

    def joined(*parts: Array) -> Array:
        first = parts[0]
        if structure.is_plain(first):
            return first
        xp = ns.own_namespace(first)
        if first.ndim == 0:
            return xp.stack(parts)
        # NumPy's `stack` takes a third longer.
        return xp.reshape(xp.concat(parts), (len(parts), *first.shape))

    return map_structure(joined, *values)


def unstacked(value: Tree, length: int, /) -> list[Any]:
    """Return the pieces of a stack.

    Parameters
    ----------
    value : structure, dict, tuple, array or number
        Whose arrays have a leading axis of that length; others are in every result.
    length : int
        The number of values.

    Returns
    -------
    list
        `length` values of the form of `value`.
    """
    if structure.is_structure(value):
        return structure.split_structure(
            value, lambda part: unstacked(part, length), length
        )
    if isinstance(value, tuple):
        parts = [unstacked(part, length) for part in value]
        return list(zip(*parts, strict=True))
    if isinstance(value, dict):
        dicts: list[Any] = [{} for _ in range(length)]
        for name, part in value.items():
            for one, piece in zip(dicts, unstacked(part, length), strict=True):
                one[name] = piece
        return dicts
    if structure.is_plain(value) or value.ndim == 0 or value.shape[0] != length:
        return [value] * length
    parts = list(ns.own_namespace(value).unstack(value))
    if type(parts[0]) is not type(value):
        # NumPy unstacks a 1-d array into scalars.
        return [value[i, ...] for i in range(length)]
    return parts


def _array_form(x: Array) -> object:
    """Return the key of an array: its type, shape, dtype and device."""
    if type(x) is np.ndarray and x.dtype.isnative:
        return np.ndarray, x.shape, x.dtype, "cpu"
    if not ns.is_usable(x):
        # Not an array, or a sparse one: validated later, where the block's name is known.
        return object()
    # NumPy returns scalars for 0-d results, and a loaded state holds arrays.
    kind = np.ndarray if isinstance(x, np.generic) else type(x)
    return kind, x.shape, x.dtype, ns.device_of(x)
