"""Whole stages in NumPy, on the memory of another library's arrays.

Conventions.  A library whose arrays lie in the host's memory may leave a stage to NumPy
where that is faster: a refresh of a small layer takes a hundred calls, and a call of NumPy
takes a third of the time of one of PyTorch.  The library's adapter decides.  Inputs are
passed as NumPy views, and results are returned from NumPy views: nothing is copied, and
no input is written to.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from kfac_core import constraints, stages
from kfac_core.array import Array, Namespace
from kfac_core.array import namespaces as ns
from kfac_core.array.backend import native_operation
from kfac_core.array.dispatch import dispatched
from kfac_core.array.structure import Known, Mapped, deferred, is_structure
from kfac_core.array.types import Tree
from kfac_core.block import Block, Vector
from kfac_core.factors.statistics import Statistics

LARGE = 10**8
"""Flops of products from which on a library is asked whether its own are faster."""


@dispatched
def host_computes(*, xp: Namespace, flops: int = 0, dtype: object = None) -> bool:
    """Whether stages are to be computed by NumPy at this moment, in this thread.

    Parameters
    ----------
    xp : namespace
        Array API namespace of the arrays.
    flops : int
        Flops of a block's large products of matrices; 0 for any other work.
    dtype : dtype, optional
        Dtype of these matrices.

    Returns
    -------
    bool
        False unless an adapter says otherwise.
    """
    return False


@dispatched
def host_view(x: Array, /, *, xp: Namespace) -> np.ndarray[Any, Any] | None:
    """Return a NumPy array on the memory of an array.

    Parameters
    ----------
    x : array
        Array.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    numpy.ndarray or None
        None for one that is traced, differentiated or on a device, and for a dtype that
        NumPy lacks.
    """
    return None


@dispatched
def from_host(x: np.ndarray[Any, Any], /, *, xp: Namespace) -> Array:
    """Return an array of a library on the memory of NumPy's.

    Parameters
    ----------
    x : numpy.ndarray
        Not to be written to afterwards.
    xp : namespace
        Array API namespace of the library.

    Returns
    -------
    array
        Array of the same shape and dtype.
    """
    return xp.asarray(x)


def from_views(
    vectors: dict[str, dict[str, Array]], /, *, like: Vector
) -> dict[str, dict[str, Array]]:
    """Return `HostViews` as vectors of the library of others; any others unchanged."""
    if type(vectors) is not stages.HostViews:
        return vectors
    xp = ns.own_namespace(_first_array(like))
    to_library = _native("from_host", from_host, xp)
    return {
        name: {key: to_library(x, xp=xp) for key, x in parts.items()}
        for name, parts in vectors.items()
    }


def viewed_on_host(value: Tree, /, *, xp: Namespace) -> Tree:
    """Return structures, dicts and tuples of arrays with NumPy's on the same memory.

    None where NumPy cannot access the memory of an array, as on a device; whether it is to
    compute, `host_computes` says.
    """
    try:
        return _mapped(_viewed_by(xp, {}))(value)
    except _ElsewhereError:
        return None


class Hosted(stages.Executor):
    """An executor that runs whole stages in NumPy, on the memory of the library's arrays.

    For small layers, where calls dominate the cost, this is faster than a library whose
    calls cost more.  Arrays in the host's memory are passed as views, without copies.
    Results are recognized at the next call, so that statistics and operators are viewed
    only once.

    Parameters
    ----------
    inner : Executor
        Executor that runs the tasks.
    """

    def __init__(self, inner: stages.Executor = stages.plain) -> None:
        constraints.require_range("inner", inner, stages.EXECUTOR)
        self._inner = inner
        # The last structure of each class of a block, and its view.
        self._views: dict[tuple[str, type[Any]], tuple[Any, Any]] = {}
        # The last operator of a block, and its product with views.
        self._bound: dict[str, tuple[Any, stages.Bound]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to make a copy, which starts with empty caches."""
        return type(self), (self._inner,)

    def __call__(
        self, stage: stages.Stage[stages.Result], tasks: stages.Tasks, /
    ) -> dict[str, stages.Result]:
        """Return the result of a stage for each task, by name."""
        if stage.bind is not None:
            return self._products_of_views(stage, tasks)
        xp = _namespace_of(tasks) if stage.on_host else None
        if xp is None or not _computes(xp):
            return self._inner(stage, tasks)
        # Inputs that a result passes through become the library's original arrays again.
        owners: Known = {}
        as_views = _mapped(_viewed_by(xp, owners))
        hosted: dict[str, stages.Task] = {}
        for name, (block, first, *others) in tasks.items():
            if stage.is_product and _is_large(stage, block, first, xp):
                continue
            known = self._views.get((name, type(first)))
            # By identity: the structure that the last call returned, with its views.
            recognized = known is not None and known[0] is first
            try:
                view = known[1] if known and recognized else as_views(first)
                hosted[name] = (block, view, *map(as_views, others))
            except _ElsewhereError:
                continue
            if stage.keeps_stacks and not recognized:
                self._views[name, type(first)] = first, view
        elsewhere = {name: task for name, task in tasks.items() if name not in hosted}
        results: dict[str, Any] = self._inner(stage, elsewhere) if elsewhere else {}
        if hosted:
            to_library = partial(_native("from_host", from_host, xp), xp=xp)
            returned = _mapped(to_library, owners)
            for name, result in self._inner(stage, hosted).items():
                if isinstance(result, Statistics):
                    results[name] = _statistics_of_library(result, to_library)
                else:
                    results[name] = returned(result)
                self._remember(name, results[name], result)
        return {name: results[name] for name in tasks}

    def _products_of_views(
        self, stage: stages.Stage[stages.Result], tasks: stages.Tasks
    ) -> dict[str, stages.Result]:
        """Return products with NumPy's vectors, by operators that are bound once."""
        bound: dict[str, stages.Task] = {}
        for name, (block, operator, *others) in tasks.items():
            known = self._bound.get(name)
            if known is None or known[0] is not operator:
                known = operator, self._bind(stage, name, block, operator)
                self._bound[name] = known
            bound[name] = block, known[1], *others
        # What is not finite is found, and told with its block.
        with np.errstate(all="ignore"):
            return self._inner(stage, bound)

    def _bind(
        self, stage: stages.Stage[Any], name: str, block: Block, operator: Any
    ) -> stages.Bound:
        """Return an operator's product, of NumPy's vectors."""
        assert stage.bind is not None
        xp = ns.own_namespace(operator.like)
        as_views = _mapped(_viewed_by(xp, {}))
        if not _is_large(stage, block, operator, xp):
            known = self._views.get((name, type(operator)))
            is_known = known is not None and known[0] is operator
            try:
                view = known[1] if known and is_known else as_views(operator)
                return stage.bind(block, view)
            except _ElsewhereError:
                pass
        product: stages.Bound = stage.bind(block, operator)

        def in_library(vector: Any) -> Any:
            # Anew, since what maps arrays keeps those that it has seen.
            to_library = _mapped(partial(_native("from_host", from_host, xp), xp=xp))
            return _mapped(_viewed_by(xp, {}))(product(to_library(vector)))

        return in_library

    def viewed(self, vectors: Vector, /) -> Vector:
        """Return `HostViews` of vectors where NumPy is to compute their products."""
        like = _first_array(vectors)
        if like is None or type(like) is np.ndarray:
            return vectors
        xp = ns.own_namespace(like)
        if not _computes(xp):
            return vectors
        view_of, views = _native("host_view", host_view, xp), stages.HostViews()
        for name, parts in vectors.items():
            arrays = views[name] = {}
            for key, x in parts.items():
                if (array := view_of(x, xp=xp)) is None:
                    return vectors
                arrays[key] = array
        return views

    def _remember(self, name: str, result: Tree, view: Tree) -> None:
        """Keep a structure that was returned with its view, in the place of the last."""
        if isinstance(result, tuple):
            for part, part_view in zip(result, view, strict=True):
                self._remember(name, part, part_view)
        elif is_structure(result):
            self._views[name, type(result)] = result, view


_WITHOUT_ARRAYS = (Exception, stages.ProductCall)
_mapped = partial(Mapped, passed=_WITHOUT_ARRAYS)


class _ElsewhereError(Exception):
    """An array whose memory NumPy cannot access."""


def _statistics_of_library(
    view: Statistics, function: Callable[[Any], Any]
) -> Statistics:
    """Return statistics with arrays of the library, made when they are first read.

    The next update recognizes them unread.
    """
    known = {"status": function(view.status)}
    return deferred(Statistics, known, partial(_mapped(function), view))


def _viewed_by(xp: Namespace, owners: Known) -> Callable[[Any], Any]:
    """Return a function that views an array and records the owner of each view."""
    view_of = _native("host_view", host_view, xp)

    def view(x: Array) -> Array:
        array: np.ndarray[Any, Any] | None = view_of(x, xp=xp)
        if array is None:
            raise _ElsewhereError
        owners[id(array)] = array, x
        return array

    return view


def _first_array(vectors: Vector) -> Array | None:
    return next((x for parts in vectors.values() for x in parts.values()), None)


def _computes(xp: Namespace) -> bool:
    computes = native_operation("host_computes", xp)
    return computes is not None and computes(xp=xp)


def _is_large(
    stage: stages.Stage[Any], block: Block, operator: Any, xp: Namespace
) -> bool:
    """Whether the library computes a block's products itself, perhaps on more threads."""
    flops = stage.work(block)
    dtype = operator.like.dtype
    return flops >= LARGE and not host_computes(xp=xp, flops=flops, dtype=dtype)


def _native(
    name: str, definition: Callable[..., Any], xp: Namespace
) -> Callable[..., Any]:
    """Return an operation without its dispatch, which would be repeated for each array."""
    dispatched: Any = definition
    return native_operation(name, xp) or dispatched.__wrapped__


def _namespace_of(tasks: stages.Tasks) -> Namespace | None:
    """Return the namespace of the statistics or the operator that the tasks begin with.

    None without any, and for NumPy's own arrays.
    """
    for _, first, *_ in tasks.values():
        if first is None:
            return None
        # A status is there before the sums of `deferred` statistics.
        like = first.status if isinstance(first, Statistics) else first.like
        return None if type(like) is np.ndarray else ns.own_namespace(like)
    return None
