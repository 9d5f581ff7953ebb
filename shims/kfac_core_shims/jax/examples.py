"""Which axis of a layer's rows the examples are.

Conventions.  A network sees N examples, and its loss is the mean over the R rows of its
outputs (N, or N T where the outputs were flattened).  Nothing else in a traced network
says which axis is whose: a layer on ``x.reshape(N * T, d)`` looks like one with N T
examples.  So the network is traced once more with twice as many examples: the axis that
becomes twice as long is theirs.  An input whose first axis is of length N by chance, such
as positions, is then left as it is.  Where a network cannot be traced so, the first axis
must be a multiple of N; if another axis is of length N too, it is not sure which is whose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

import kfac_core as kc
from kfac_core_shims.jax.finding import Arrangement, Layers, Meeting, Site, find
from kfac_core_shims.jax.program import (
    CALLS,
    Operand,
    Operation,
    Trace,
    forms,
    jaxprs_in,
    operations_of,
    traced,
)
from kfac_core_shims.jax.views import View

# Operations that may put rows in another order.
REORDERING = frozenset(
    {
        "concatenate",
        "dynamic_slice",
        "gather",
        "rev",
        "scan",
        "scatter",
        "scatter-add",
        "scatter_add",
        "slice",
        "sort",
    }
)


ELEMENTWISE = frozenset({"add", "add_any", "div", "mul", "sub"})
"""Operations of two arrays that may have axes of length one."""


@dataclass(frozen=True)
class ExampleAxis:
    """The axis of a site's examples.

    Attributes
    ----------
    row : int
        Which of the site's axes of rows.
    order : {"first", "last", None}
        Where that axis is longer than N: whether the examples are the slower or the
        faster part of it; None where that is not known.
    sure : bool
        False where another axis of rows may be theirs as well.
    ordered : bool
        False where the network may have its examples in another order in some layers: where
        it sorts, reverses or picks them, and where it takes this number of them only.
    """

    row: int
    order: Literal["first", "last"] | None
    sure: bool = True
    ordered: bool = True


@dataclass(frozen=True)
class Counts:
    """Numbers of examples of a batch and of rows of its outputs.

    Attributes
    ----------
    examples : int
        N.
    rows : int
        R, a multiple of N.
    axes : tuple of int or None
        For each leaf of the inputs, the axis of the examples.
    """

    examples: int
    rows: int
    axes: tuple[int | None, ...]


Where: TypeAlias = ExampleAxis | tuple[Meeting, ...] | None


def counts(
    inputs: Sequence[Any], outputs: Any, /, *, doubles: Callable[[Counts], bool]
) -> Counts:
    """Return N and R of a batch from the leaves of its inputs and outputs.

    Parameters
    ----------
    inputs : sequence of array
        Leaves of the network's inputs.
    outputs : pytree
        The network's outputs, or their shapes.
    doubles : callable
        Whether twice as many examples, on these axes, give twice as many rows.  It is
        asked only where lengths leave two readings.

    Returns
    -------
    Counts
        R is the length of the outputs' first axis.  N is the same if any input has an
        axis of this length, else that of the first input's first axis.

    Raises
    ------
    ConventionError
        If R is no multiple of N, or outputs have first axes of different lengths.
    """
    shapes = [jnp.shape(x) for x in inputs]
    lengths = {tuple(y.shape)[:1] for y in jax.tree.leaves(outputs)}
    if len(lengths) > 1:
        raise kc.ConventionError(
            "Expected all outputs to have the examples on the first axis, got axes of "
            f"lengths {sorted(length for (length,) in lengths - {()})}. Return other "
            "results by `has_aux`."
        )
    rows = next((length for (length,) in lengths - {()}), None)
    first = next((shape[0] for shape in shapes if shape), None)
    if rows is None:
        rows = first
    if rows is None:
        raise kc.ConventionError("Expected inputs or outputs with an axis of examples.")
    examples = rows if any(rows in shape for shape in shapes) else first
    if not examples or rows % examples:
        raise kc.ConventionError(
            f"The outputs have {rows} rows, and the inputs {examples} examples: expected "
            "the examples to be the first axis of inputs and outputs. Pass what is not a "
            "batch (masks, keys, tables) after the batch."
        )
    unmerged = Counts(examples, rows, _axes_of(examples, shapes))
    plain = examples == first or any(rows in shape[:1] for shape in shapes)
    if plain or not first or rows % first or doubles(unmerged):
        return unmerged
    # An axis of another meaning, such as features, happens to have this length.
    merged = Counts(first, rows, _axes_of(first, shapes))
    return merged if doubles(merged) else unmerged


def _axes_of(length: int, shapes: Sequence[tuple[int, ...]]) -> tuple[int | None, ...]:
    return tuple(_axis_of(length, shape) for shape in shapes)


def _axis_of(length: int, shape: tuple[int, ...]) -> int | None:
    if length in shape[:1]:
        return 0
    return shape.index(length) if shape.count(length) == 1 else None


def example_axes(
    function: Callable[..., Any],
    params: Any,
    inputs: Sequence[Any],
    /,
    *,
    trace: Trace,
    layers: Layers,
    outputs: Sequence[int],
    batch: Counts,
) -> list[Where]:
    """Return where each site's examples are, None where it has none.

    Parameters
    ----------
    function, params, inputs : callable, pytree, sequence of pytree
        The network, and arrays or their shapes and dtypes.
    trace, layers : Trace, Layers
        What was found with these inputs.
    outputs : sequence of int
        See `find`.
    batch : Counts
        Of the same inputs.

    Returns
    -------
    list of ExampleAxis, tuple of Meeting, or None
        For each site; where its outputs are the same for all examples, the places at which
        they become those of each.
    """
    sites = layers.sites
    for twice in traced_twice(function, params, inputs, batch):
        if not doubled(twice, outputs, batch):
            continue  # A fixed order of the batch, for example, has as many rows as before.
        other = find(twice, outputs).sites
        # A network that branches on the batch size has another program, and one example
        # may have.
        shaped = [
            [_Shaped.within(operation, of) for operation in operations_of(of.program)]
            for of in (trace, twice)
        ]
        operations = [[one.form() for one in of] for of in shaped]
        layers_of = [[(site.kind, site.parts) for site in of] for of in (sites, other)]
        if operations[0] == operations[1] and layers_of[0] == layers_of[1]:
            pairs = zip(*shaped, strict=True)
            ordered = not any(_moves_examples(*pair) for pair in pairs)
            places = [_by_doubling(site, trace, twice, batch, layers) for site in sites]
            return [
                replace(where, ordered=ordered)
                if isinstance(where, ExampleAxis)
                else where
                for where in places
            ]
    return [_by_length(site, trace, batch) for site in sites]


def traced_twice(
    function: Callable[..., Any], params: Any, inputs: Sequence[Any], batch: Counts
) -> Iterator[Trace]:
    """Yield traces with twice as many examples: in all inputs, then in all but one."""
    leaves, form = jax.tree.flatten(tuple(inputs))
    grown = [i for i, axis in enumerate(batch.axes) if axis is not None]
    shapes = forms(params)
    for other in (None, *(grown if len(grown) > 1 else ())):
        grown_leaves = [
            leaf if axis is None or i == other else _with_twice(leaf, axis)
            for i, (leaf, axis) in enumerate(zip(leaves, batch.axes, strict=True))
        ]
        try:
            yield traced(function, shapes, jax.tree.unflatten(form, grown_leaves))
        except Exception:  # the network's own, for a batch that it was not written for
            continue


def doubled(twice: Trace, outputs: Sequence[int], batch: Counts) -> bool:
    """Whether the outputs of a trace have twice the rows of a batch."""
    shapes = [twice.shape(twice.program.outputs[i]) for i in outputs]
    return {shape[:1] for shape in shapes} <= {(), (2 * batch.rows,)}


def _with_twice(leaf: Any, axis: int) -> Any:
    form = forms(leaf)
    shape = list(form.shape)
    shape[axis] *= 2
    return jax.ShapeDtypeStruct(tuple(shape), form.dtype, weak_type=form.weak_type)


def row_axes(site: Site) -> tuple[int, ...]:
    """Return the axes of rows of a site's outputs, as the network has them."""
    return (0,) if site.y is None else site.y.rows


def _by_doubling(
    site: Site, trace: Trace, twice: Trace, batch: Counts, layers: Layers
) -> Where:
    place = site.operation.outputs[0]
    shape, other = trace.shape(place), twice.shape(place)
    grown = [
        row for row, axis in enumerate(row_axes(site)) if other[axis] != shape[axis]
    ]
    # Outputs that did not grow have no examples yet.
    if other == shape and site.kind == "dense" and not site.loops:
        return _meetings(place, trace, twice, batch, layers.consumers)
    if len(grown) != 1 or shape[row_axes(site)[grown[0]]] % batch.examples:
        return None
    row = grown[0]
    axis = row_axes(site)[row]
    if other[axis] != 2 * shape[axis]:
        return None
    order = _order(trace, twice, place, axis, batch.examples)
    return ExampleAxis(row, order)


def _meetings(
    place: int, trace: Trace, twice: Trace, batch: Counts, consumers: Any
) -> tuple[Meeting, ...] | None:
    """Return the places where outputs without examples meet values that have them.

    So lies the product of a weight with a tangent or a cotangent that is the same for all
    examples, as in ``vmap`` of ``grad`` or ``hessian``.
    """
    meetings: list[Meeting] = []
    waiting = [(place, View.of(-1, trace.shape(place)))]
    while waiting:
        here, view = waiting.pop()
        for operation, position in consumers.get(here, []):
            if len(operation.outputs) != 1:
                return None
            (result,) = operation.outputs
            old, new = trace.shape(here), trace.shape(result)
            grown = [i for i, n in enumerate(new) if twice.shape(result)[i] != n]
            moved = None
            if len(operation.inputs) == 1:
                moved = view.moved(operation.name, operation.params, old, new)
            if moved is not None and not grown:
                waiting.append((result, moved))
                continue
            if len(grown) != 1 or new[grown[0]] != batch.examples:
                return None
            (axis,) = grown
            if moved is not None:
                meetings.append(Meeting(result, None, axis, new, moved))
            # A scalar has no axis where the examples come in.
            elif operation.name in ELEMENTWISE and old[axis : axis + 1] == (1,):
                shape = (*old[:axis], batch.examples, *old[axis + 1 :])
                meetings.append(Meeting(result, position, axis, shape, view))
            else:
                return None
    return tuple(meetings)


def with_examples(site: Site, meeting: Meeting, trace: Trace, /) -> Site | None:
    """Return a product without examples as a use with the outputs of a meeting."""
    x, y = site.x, site.y
    assert x is not None
    assert y is not None
    at: dict[int, int] = {}
    for place, pieces in enumerate(meeting.view.axes):
        for axis, stride, _ in pieces:
            if stride != 1 or len(pieces) > 1 or axis in at:
                return None
            at[axis] = place
    outputs = trace.shape(site.operation.outputs[0])
    if any(n > 1 and axis not in at for axis, n in enumerate(outputs)):
        return None
    repeated = [i for i in range(len(meeting.shape)) if i not in at.values()]
    units = [i for i in repeated if i != meeting.axis]
    if any(meeting.shape[i] > 1 for i in units):
        return None
    # Axes of length one are merged with the features.
    rows = [i for i, axis in enumerate(y.rows) if axis in at]
    single = [x.rows[i] for i in range(len(y.rows)) if i not in rows]
    return replace(
        site,
        meeting=meeting,
        x=Arrangement(
            (0, *(1 + x.rows[i] for i in rows)),
            tuple(1 + axis for axis in (*single, *x.features)),
        ),
        y=Arrangement(
            (meeting.axis, *(at[y.rows[i]] for i in rows)),
            (*units, *(at[axis] for axis in y.features if axis in at)),
        ),
    )


def _by_length(site: Site, trace: Trace, batch: Counts) -> ExampleAxis | None:
    shape = trace.shape(site.operation.outputs[0])
    rows = row_axes(site)
    if not rows or shape[rows[0]] % batch.examples:
        return None
    sure = [shape[axis] for axis in rows].count(batch.examples) < 2
    order: Any = "first" if shape[rows[0]] == batch.examples else None
    return ExampleAxis(0, order, sure, ordered=False)


def _order(
    trace: Trace, twice: Trace, place: int, axis: int, examples: int
) -> Literal["first", "last"] | None:
    """Return how other axes were merged with that of the examples, by walking back."""
    producers = {
        output: operation
        for operation in trace.program.operations
        for output in operation.outputs
    }
    length = trace.shape(place)[axis]
    if length == examples:
        return "first"
    for _ in range(len(producers)):
        operation = producers.get(place)
        if operation is None or _reorders(operation.name, operation.params):
            return None
        for x in operation.inputs:
            if not isinstance(x, int):
                continue
            old, new = trace.shape(x), twice.shape(x)
            grown = [i for i in range(len(old)) if new[i] == 2 * old[i]]
            if len(grown) != 1 or old == new:
                continue
            if old[grown[0]] == length:
                place, axis = x, grown[0]
                break
            if operation.name == "reshape" and old[grown[0]] == examples:
                return _within(old, grown[0], trace.shape(place), axis)
        else:
            return None
    return None


def _moves_examples(first: _Shaped, second: _Shaped) -> bool:
    """Whether an operation, or one within it, may put examples in another order.

    Parameters
    ----------
    first, second : _Shaped
        The operation, with some examples and with twice as many.
    """
    name, params = first.name, first.params
    indexed = name == "gather" or name.startswith("scatter")
    for old, new in zip(first.inputs, second.inputs, strict=True):
        grown = {axis for axis, n in enumerate(old) if new[axis] != n}
        if indexed:
            numbers = params["dimension_numbers"]
            looked_up = (
                "start_index_map"
                if name == "gather"
                else "scatter_dims_to_operand_dims"
            )
            moved = grown & set(getattr(numbers, looked_up))
        elif name in ("rev", "sort", "concatenate"):
            moved = grown & set(params.get("dimensions", (params.get("dimension"),)))
        elif name in ("slice", "dynamic_slice"):
            moved = {axis for axis in grown if first.output[axis] != old[axis]}
        else:
            break
        if moved:
            return True
        if indexed:
            break  # The other operands are indices, and what is put there.
    return any(
        _moves_examples(_Shaped.of(one), _Shaped.of(other))
        for jaxprs in zip(jaxprs_in(params), jaxprs_in(second.params), strict=True)
        for one, other in zip(*(jaxpr.eqns for jaxpr in jaxprs), strict=True)
    )


class _Shaped(NamedTuple):
    """An operation with the shapes of its operands and of its first result."""

    name: str
    params: Mapping[str, Any]
    inputs: tuple[tuple[int, ...], ...]
    output: tuple[int, ...]

    @staticmethod
    def of(equation: Any) -> _Shaped:
        """Return the shapes of an equation of JAX."""
        shapes = [tuple(x.aval.shape) for x in (*equation.invars, *equation.outvars)]
        inputs = tuple(shapes[: len(equation.invars)])
        output = shapes[len(inputs)] if equation.outvars else ()
        return _Shaped(str(equation.primitive.name), equation.params, inputs, output)

    @staticmethod
    def within(operation: Operation, trace: Trace) -> _Shaped:
        """Return the shapes of an operation of a trace."""
        inputs = tuple(trace.shape(x) for x in operation.inputs)
        output = trace.shape(operation.outputs[0]) if operation.outputs else ()
        params = {} if operation.body is not None else operation.params
        return _Shaped(operation.name, params, inputs, output)

    def form(self) -> tuple[Any, ...]:
        """Return what is the same for any number of examples: names, numbers of axes."""
        inner = [
            _Shaped.of(equation).form()
            for jaxpr in jaxprs_in(self.params)
            for equation in jaxpr.eqns
        ]
        return self.name, [*map(len, self.inputs)], len(self.output), inner


def _reorders(name: str, params: Mapping[str, Any]) -> bool:
    """Whether an operation, or one of a call that is left as it is, may reorder rows."""
    return name in REORDERING or any(
        _reorders(equation.primitive.name, equation.params)
        for jaxpr in jaxprs_in(params)
        for equation in jaxpr.eqns
    )


def _within(
    old: tuple[int, ...], at: int, new: tuple[int, ...], axis: int
) -> Literal["first", "last"] | None:
    """Return whether an axis is the slower or the faster part of a merged one."""
    before = 1
    for length in old[:at]:
        before *= length
    start = 1
    for length in new[:axis]:
        start *= length
    if before == start:
        return "first"
    return "last" if before * old[at] == start * new[axis] else None


def reversed_lengths(trace: Trace, place: Operand, /) -> set[int]:
    """Return the lengths of axes that are reversed between a batch and a value.

    Parameters
    ----------
    trace : Trace
        Trace of a network.
    place : Operand
        The value, such as the inputs of a layer.

    Returns
    -------
    set of int
        What is reversed twice on a way is in order again.
    """
    producers: dict[int, Any] = {}
    outside: dict[int, Operand] = {}
    for operation in operations_of(trace.program):
        producers.update(dict.fromkeys(operation.outputs, operation))
        if operation.body is not None:
            outside.update(zip(operation.body.inputs, operation.inputs, strict=True))
    batch = {place for place in trace.program.inputs if place not in trace.views}
    lengths: set[int] = set()
    waiting: list[tuple[Operand, frozenset[int]]] = [(place, frozenset())]
    seen: set[Any] = set()
    while waiting:
        place, turned = waiting.pop()
        if not isinstance(place, int) or (place, turned) in seen:
            continue
        seen.add((place, turned))
        if place in batch:
            lengths |= turned
        elif place in outside:
            waiting.append((outside[place], turned))
        elif place in producers:
            operation = producers[place]
            shapes = [trace.shape(x) for x in operation.inputs]
            for length in _reversals(operation.name, operation.params, shapes):
                # Reversed twice is in order again.
                turned = turned ^ {length}
            waiting.extend((x, turned) for x in operation.inputs)
    return lengths


def _reversals(
    name: str, params: Mapping[str, Any], shapes: Sequence[tuple[int, ...]]
) -> Iterator[int]:
    """Yield the length of each axis that an operation, or a call, reverses."""
    if name == "rev":
        yield from (shapes[0][axis] for axis in params["dimensions"])
    elif name in CALLS:
        for jaxpr in jaxprs_in(params):
            for equation in jaxpr.eqns:
                inner = [tuple(x.aval.shape) for x in equation.invars]
                yield from _reversals(equation.primitive.name, equation.params, inner)
