"""A traced function as a list of operations, which can be read and run again.

Conventions.  Every value has a number, its *place*.  Calls that a parameter or a mark goes
into (``jit``, ``remat``) are written out, so that what they do is seen; loops (``scan``)
have their body as a list of its own.  Everything else is left as it is, with its own
derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from kfac_core_shims.jax.marks import mark
from kfac_core_shims.jax.views import Join, Source, View, joined, numbers_of, whole_axes

Operand: TypeAlias = Any
"""The place of a value, or a literal of JAX."""

CALLS = frozenset(
    {"closed_call", "checkpoint", "core_call", "jit", "pjit", "remat", "remat2"}
)
"""Calls that may be written out without a change of what is computed."""


@dataclass(eq=False)
class Operation:
    """One operation: what is done, to what, and where the results are."""

    primitive: Any
    params: Mapping[str, Any]
    inputs: tuple[Operand, ...]
    outputs: tuple[int, ...]
    body: Program | None = None

    @property
    def name(self) -> str:
        """Name of the operation, as JAX has it."""
        return str(self.primitive.name)


@dataclass(eq=False)
class Program:
    """A list of operations, from the places of its inputs to its outputs."""

    inputs: list[int]
    operations: list[Operation] = field(default_factory=list)
    outputs: list[Operand] = field(default_factory=list)


@dataclass(eq=False)
class Trace:
    """A traced function of parameters and inputs.

    Attributes
    ----------
    program : Program
        The operations; inputs are the leaves of the parameters, then of the inputs.
    avals : list
        Shape and dtype of each place.
    constants : dict of int to array
        Values of places that are given.
    views : dict of int to View
        Places that hold a parameter, moved but not changed.
    outputs : pytree
        Structure, shapes and dtypes of the function's result.
    """

    program: Program
    avals: list[Any]
    constants: dict[int, Any]
    views: dict[int, View]
    outputs: Any

    @property
    def signature(self) -> tuple[Any, ...]:
        """What is equal for traces whose places hold the same values."""
        shapes = [tuple(aval.shape) for aval in self.avals]
        operations = [
            (operation.name, operation.outputs)
            for operation in operations_of(self.program)
        ]
        return (*shapes, *operations)

    def shape(self, operand: Operand) -> tuple[int, ...]:
        """Return the shape of an operand."""
        aval = self.avals[operand] if isinstance(operand, int) else operand.aval
        return tuple(aval.shape)


def forms(tree: Any, /) -> Any:
    """Return shapes and dtypes of arrays and numbers, with which a trace is theirs."""
    return jax.tree.map(
        # A weakly typed array, as of `jnp.full`, is cast in other places of a program.
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type),
        jax.eval_shape(lambda tree: tree, tree),
    )


def traced(function: Callable[..., Any], params: Any, inputs: Sequence[Any]) -> Trace:
    """Return a function's trace for arrays, or for their shapes and dtypes."""
    closed, outputs = jax.make_jaxpr(function, return_shape=True)(params, *inputs)
    writer = _Writer()
    places = [writer.new(v.aval) for v in closed.jaxpr.invars]
    # The first places are those of the parameters, in the order of their leaves.
    for i, leaf in enumerate(jax.tree.leaves(params)):
        writer.views[places[i]] = View.of(i, jnp.shape(leaf))
    program = Program(places)
    program.outputs = writer.write(
        closed.jaxpr, closed.consts, places, program.operations
    )
    return Trace(program, writer.avals, writer.constants, writer.views, outputs)


def run(
    trace: Trace,
    program: Program,
    values: Sequence[Any],
    /,
    *,
    after: Callable[[Operation, list[Any], Callable[[Operand], Any]], list[Any]],
    outer: Mapping[int, Any] | None = None,
) -> list[Any]:
    """Run a program, and return its outputs.

    Parameters
    ----------
    trace, program : Trace, Program
        What to run: the trace's own program, or the body of one of its loops.
    values : sequence of array
        The program's inputs.
    after : callable
        Called with each operation, its results and a function that reads an operand;
        returns what takes the results' place.
    outer : mapping of int to array, optional
        Values that are known besides.

    Returns
    -------
    list of array
        Values of the program's outputs.
    """
    known: dict[int, Any] = dict(trace.constants if outer is None else outer)
    known.update(zip(program.inputs, values, strict=True))

    def read(operand: Operand) -> Any:
        return known[operand] if isinstance(operand, int) else operand.val

    for operation in program.operations:
        results = after(operation, [read(x) for x in operation.inputs], read)
        known.update(zip(operation.outputs, results, strict=True))
    return [read(x) for x in program.outputs]


def bound(operation: Operation, values: Sequence[Any]) -> list[Any]:
    """Return the results of an operation for the values of its inputs."""
    # A mark has been read, and is the identity.
    if operation.primitive is mark:
        return [values[0]]
    params = operation.primitive.get_bind_params(operation.params)
    # Before JAX 0.10, functions of a call were apart from its parameters.
    functions, params = params if isinstance(params, tuple) else ((), params)
    results = operation.primitive.bind(*functions, *values, **params)
    return list(results) if operation.primitive.multiple_results else [results]


def operations_of(program: Program, /) -> Iterator[Operation]:
    """Yield the operations of a program, and of the bodies of its loops."""
    for operation in program.operations:
        yield operation
        if operation.body is not None:
            yield from operations_of(operation.body)


class _Writer:
    """Writes jaxprs as operations, and follows the parameters."""

    def __init__(self) -> None:
        self.avals: list[Any] = []
        self.constants: dict[int, Any] = {}
        self.views: dict[int, View] = {}

    def new(self, aval: Any) -> int:
        """Return a new place."""
        self.avals.append(aval)
        return len(self.avals) - 1

    def write(
        self,
        jaxpr: Any,
        constants: Sequence[Any],
        inputs: Sequence[Operand],
        operations: list[Operation],
    ) -> list[Operand]:
        """Append a jaxpr's operations, and return its outputs."""
        places: dict[Any, Operand] = dict(zip(jaxpr.invars, inputs, strict=True))
        for variable, value in zip(jaxpr.constvars, constants, strict=True):
            places[variable] = self.new(variable.aval)
            self.constants[places[variable]] = value

        def place(atom: Any) -> Operand:
            return atom if isinstance(atom, jex.Literal) else places[atom]

        for equation in jaxpr.eqns:
            operands = tuple(place(atom) for atom in equation.invars)
            name, params = equation.primitive.name, equation.params
            inner = _inner(params) if name in CALLS or name == "scan" else None
            # Calls without a parameter or a mark keep their own derivative rules.
            opened = inner is not None and (
                any(x in self.views for x in operands if isinstance(x, int))
                or _has_marks(inner[0])
            )
            if opened and inner is not None and name in CALLS:
                results = self.write(*inner, operands, operations)
                places.update(zip(equation.outvars, results, strict=True))
                continue
            new = tuple(self.new(v.aval) for v in equation.outvars)
            places.update(zip(equation.outvars, new, strict=True))
            operation = Operation(equation.primitive, params, operands, new)
            if opened and inner is not None:
                operation.body = self._body(*inner, operation)
            self._follow(operation)
            operations.append(operation)
        return [place(atom) for atom in jaxpr.outvars]

    def _follow(self, operation: Operation) -> None:
        """Remember the result of an operation that only moves parameters."""
        if operation.name in ("concatenate", "stack"):
            self._join(operation)
        if len(operation.inputs) != 1 or not isinstance(operation.inputs[0], int):
            return
        (x,) = operation.inputs
        if x in self.views and len(operation.outputs) == 1:
            (y,) = operation.outputs
            shapes = tuple(self.avals[x].shape), tuple(self.avals[y].shape)
            view = self.views[x].moved(operation.name, operation.params, *shapes)
            if view is not None:
                self.views[y] = view

    def _join(self, operation: Operation) -> None:
        """Remember a concatenation, or a stack, of whole parameters as one."""
        places = [x for x in operation.inputs if isinstance(x, int) and x in self.views]
        views = [self.views[x] for x in places if is_whole(self.views[x], self.avals)]
        if len(views) < len(operation.inputs) or len({v.sliced for v in views}) > 1:
            return
        (y,), params, lead = operation.outputs, operation.params, views[0].sliced
        shape = tuple(self.avals[y].shape)
        # Of parameters that a loop runs over, the stacks are concatenated.
        stack = source_shape(views[0].source, self.avals)[:1] if lead else ()
        axis = int(params["axis" if operation.name == "stack" else "dimension"])
        join = Join(tuple(v.source for v in views), (*stack, *shape), axis + lead)
        # Each entry once: no parameter is repeated.
        sizes = {n: math.prod(self.avals[n].shape) for n in numbers_of(join)}
        if sum(sizes.values()) == math.prod(join.shape):
            self.views[y] = View.of(join, shape, sliced=lead)

    def _body(self, jaxpr: Any, constants: Any, operation: Operation) -> Program:
        """Write the body of a loop, which may read parameters and slices of them."""
        first, last = carried_by(operation.params)
        places = [self.new(v.aval) for v in jaxpr.invars]
        for i, (outside, inside) in enumerate(
            zip(operation.inputs, places, strict=True)
        ):
            view = self.views.get(outside) if isinstance(outside, int) else None
            # What a loop carries along changes from turn to turn: that is no parameter.
            if view is None or first <= i < last:
                continue
            # A `scan` reads constants whole, and one slice a turn of what it runs over.
            inner = view if i < first else view.first_axis_taken()
            if inner is not None:
                self.views[inside] = inner
        body = Program(places)
        body.outputs = self.write(jaxpr, constants, places, body.operations)
        return body


def source_shape(source: Source, avals: Sequence[Any], /) -> tuple[int, ...]:
    """Return the shape of a parameter, or of a concatenation of parameters."""
    # The first places are those of the parameters.
    return source.shape if isinstance(source, Join) else tuple(avals[source].shape)


def is_whole(view: View, avals: Sequence[Any], /) -> bool:
    """Whether a view is the parameter itself, but for axes of length one."""
    shape = source_shape(view.source, avals)[view.sliced :]
    return joined(view.axes) == joined(whole_axes(shape))


def carried_by(params: Mapping[str, Any], /) -> tuple[int, int]:
    """Return where the operands that a `scan` carries along begin and end."""
    if "ft_in" in params:  # From JAX 0.11 on.
        constants, carried = map(len, params["ft_in"].unpack()[:2])
    else:
        constants, carried = params["num_consts"], params["num_carry"]
    return constants, constants + carried


def _inner(params: Mapping[str, Any]) -> tuple[Any, Sequence[Any]] | None:
    """Return the jaxpr of a call and its constants."""
    jaxpr = params.get("jaxpr", params.get("call_jaxpr"))
    if isinstance(jaxpr, jex.ClosedJaxpr):
        return jaxpr.jaxpr, jaxpr.consts
    return None if jaxpr is None else (jaxpr, ())


def _has_marks(jaxpr: Any) -> bool:
    """Whether a jaxpr holds a mark at any depth."""
    for equation in jaxpr.eqns:
        if equation.primitive is mark:
            return True
        if any(_has_marks(inner) for inner in jaxprs_in(equation.params)):
            return True
    return False


def jaxprs_in(params: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the jaxprs among the parameters of an operation, as those of branches."""
    for value in params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if isinstance(part, jex.ClosedJaxpr):
                yield part.jaxpr
            elif isinstance(part, jex.Jaxpr):
                yield part
