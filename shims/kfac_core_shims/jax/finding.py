"""The layers of a traced network, found from what is done with its parameters.

Conventions.  A `Site` is one use of a layer: the operation whose outputs the layer's are,
where its inputs lie, which leaves of the parameters it has, and how inputs and outputs
are arranged as rows.  Found are products with a matrix (dense layers, projections of
attention), convolutions, looked-up rows (embeddings), and elementwise scales and shifts
(normalizations), each with the bias that is added to it; marked layers; and all of these
in the body of a ``scan``.  Every other use of a parameter is an *obstacle*: it is
remembered with the parameter, which then has no block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import kfac_core as kc
from kfac_core_shims.jax.marks import Label, mark
from kfac_core_shims.jax.program import (
    Operand,
    Operation,
    Program,
    Trace,
    carried_by,
    is_whole,
    source_shape,
)
from kfac_core_shims.jax.views import (
    Piece,
    Source,
    View,
    joined,
    numbers_of,
    whole_axes,
)

Consumer: TypeAlias = tuple[Operation, int]
"""An operation, and which of its operands a value is."""


@dataclass(frozen=True)
class Part:
    """The leaf that a layer's parameter is, or is a slice or a transpose of.

    Attributes
    ----------
    leaf : Source
        The leaf by its number, or a concatenation of leaves.
    sliced : bool
        Whether a loop runs over the leaf's first axis.
    order : tuple of int or None
        Permutation of the axes, where the layer's order is another.
    """

    leaf: Source
    sliced: bool = False
    order: tuple[int, ...] | None = None

    @property
    def leaves(self) -> tuple[int, ...]:
        """Numbers of the leaves."""
        return numbers_of(self.leaf)


@dataclass(frozen=True)
class Arrangement:
    """Which axes of an array are rows, and which are features, in the layer's order.

    The features are merged to one axis unless it `keeps_axes`; `last` is a unit axis at
    the end that is dropped.
    """

    rows: tuple[int, ...]
    features: tuple[int, ...]
    keeps_axes: bool = False
    last: bool = False


@dataclass(frozen=True, eq=False)
class Loop:
    """A ``scan`` that a layer lies in; whether its parameters change from turn to turn."""

    operation: Operation
    length: int
    sliced: bool


@dataclass(frozen=True)
class Meeting:
    """The place where a value without an axis of examples meets one that has it.

    Attributes
    ----------
    place : int
        Result of the operation.
    position : int or None
        Which of its operands the value is; None where it is the result.
    axis : int
        Axis of the examples.
    shape : tuple of int
        Shape of the value with that axis.
    view : View
        The layer's outputs in the value.
    """

    place: int
    position: int | None
    axis: int
    shape: tuple[int, ...]
    view: View


@dataclass(eq=False)
class Site:
    """One use of a layer.

    Attributes
    ----------
    kind : str
        ``"marked"``, or the layer's kind.
    parts : dict of str to Part
        The layer's parameters.
    operation : Operation
        Whose first output the layer's outputs are.
    inputs : Operand
        Where the layer's inputs are.
    mask : Operand or None
        Where a mark has a mask.
    x, y : Arrangement or None
        How inputs and outputs are rows; None where they are as the layer has them.
    make : callable
        ``(roles) -> Layer`` for the roles of its parameters.
    chain : list of Operation
        The operations from `inputs` to the outputs of a scale.
    loops : tuple of Loop
        Loops that it lies in, from the outside.
    name : str or None
        A mark's name.
    tied : bool
        Whether its weight both embeds ids and makes logits; the layer is then that of
        one-hot rows, and a dense use has inputs and output gradients in each other's
        place.
    meeting : Meeting or None
        Where outputs that are the same for all examples become those of each.
    window : list of pairs of int
        For each axis of a shift, how many entries before and after are not added; empty
        where all are.
    transposed : bool
        Whether it multiplies by the transpose of its layer's weight.
    adds_bias : bool
        False where the layer has a bias that this use does not add.
    spread : list of tuple of int
        For each axis of the inputs of a transposed convolution, or of one with negative
        padding, how many zeros the layer has before, after and between them; empty where
        there are none.
    """

    kind: str
    parts: dict[str, Part]
    operation: Operation
    inputs: Operand
    make: Callable[[Collection[str]], kc.Layer]
    mask: Operand | None = None
    x: Arrangement | None = None
    y: Arrangement | None = None
    chain: list[Operation] = field(default_factory=list)
    loops: tuple[Loop, ...] = ()
    name: str | None = None
    tied: bool = False
    meeting: Meeting | None = None
    window: list[tuple[int, int]] = field(default_factory=list)
    transposed: bool = False
    adds_bias: bool = True
    spread: list[tuple[int, int, int]] = field(default_factory=list)

    def shape(self, trace: Trace, /) -> tuple[int, ...]:
        """Return the shape of what zeros are added to."""
        if self.meeting is not None:
            return self.meeting.shape
        return trace.shape(self.operation.outputs[0])

    @property
    def layer(self) -> kc.Layer:
        """The layer's geometry."""
        return self.make(self.parts)

    @property
    def sliced(self) -> bool:
        """Whether it is a layer of its own in each turn of a loop."""
        return any(loop.sliced for loop in self.loops)


@dataclass(eq=False)
class Layers:
    """The layers of a network, and what else is done with its parameters.

    Attributes
    ----------
    sites : list of Site
        Uses of layers, in the order of the computation.
    obstacles : dict of int to list of str
        For a leaf, the uses of it that belong to no layer.
    consumers : dict of int to list of Consumer
        For each place, the live operations that use it.
    """

    sites: list[Site]
    obstacles: dict[int, list[str]]
    consumers: dict[int, list[Consumer]]


Channels: TypeAlias = Literal["first", "last"]


def find(trace: Trace, outputs: Sequence[int], /) -> Layers:
    """Return the layers of a traced network.

    Parameters
    ----------
    trace : Trace
        Trace of the network.
    outputs : sequence of int
        Which of the program's outputs the loss is a function of.

    Returns
    -------
    Layers
        Sites and obstacles.
    """
    return _Finder(trace, outputs).layers()


class _Finder:
    def __init__(self, trace: Trace, outputs: Sequence[int]) -> None:
        self.trace = trace
        self.consumers: dict[int, list[Consumer]] = {}
        self.live: list[tuple[Program, list[Operation], tuple[Loop, ...]]] = []
        self.sites: list[Site] = []
        self.obstacles: dict[int, list[str]] = {}
        self.taken: set[tuple[int, int]] = set()
        self._enter(trace.program, [trace.program.outputs[i] for i in outputs], ())

    def layers(self) -> Layers:
        """Read all live operations: products first, since a bias belongs to them."""
        for _, operations, loops in self.live:
            for operation in operations:
                if operation.primitive is mark:
                    self._add(self._marked(operation), loops)
        # In this order: a bias must not be taken for a shift.
        for reader in (self._product, self._scaled, self._shifted):
            for _, operations, loops in self.live:
                for operation in operations:
                    self._read(operation, loops, reader)
        for _, operations, _ in self.live:
            for operation in operations:
                self._leave(operation)
        order = {
            id(operation): i
            for i, operation in enumerate(
                operation for _, ops, _ in self.live for operation in ops
            )
        }
        self._tie()
        self.sites.sort(key=lambda site: order[id(site.operation)])
        return Layers(self.sites, self.obstacles, self.consumers)

    def _tie(self) -> None:
        """Make one layer of all uses of a weight, whichever way they multiply by it.

        The gradient of a weight W of shape (n, m) is the sum of ``x g^T`` over its uses.
        A use ``h W^T``, as in derivatives of a layer by its inputs, has as x what comes
        back to its outputs, and as g its inputs.  The weight of an embedding, of shape
        (V, d), multiplies one-hot rows.
        """
        uses: dict[Part, list[Site]] = {}
        for site in self.sites:
            if (
                site.kind in ("embedding", "dense")
                and site.parts["weight"].order is None
            ):
                uses.setdefault(site.parts["weight"], []).append(site)
        for part, sites in uses.items():
            products = [site for site in sites if site.kind == "dense"]
            layers: list[Any] = [site.layer for site in products]
            if len(products) == len(sites):
                self._join(products, layers)
            elif {layer.weight_layout for layer in layers} == {"oi"}:
                shape = self._source_shape(View(part.leaf, (), part.sliced))
                self._tie_to_table(sites, shape)

    def _join(self, sites: list[Site], layers: list[Any]) -> None:
        """Give all products with a weight the layer of the first that has a bias."""
        with_bias = [i for i, site in enumerate(sites) if "bias" in site.parts]
        first = with_bias[0] if with_bias else 0
        make, parts = sites[first].make, sites[first].parts
        # A weight with an axis of length one has one layout either way.
        ways = [(x.in_features, x.out_features, x.weight_layout) for x in layers]
        for site, way in zip(sites, ways, strict=True):
            site.transposed = way != ways[first]
            bias = site.parts.get("bias")
            site.adds_bias = bias is not None or "bias" not in parts
            if bias is not None and (site.transposed or bias != parts["bias"]):
                self._make_shift(site)
                site.adds_bias = False
            site.make, site.parts = make, dict(parts)

    def _tie_to_table(self, sites: list[Site], shape: tuple[int, ...]) -> None:
        """Turn products with an embedding's weight, as for logits, into uses of it."""
        for site in sites:
            if "bias" in site.parts:
                self._make_shift(site)
            site.tied, site.make = True, partial(_dense_layer, shape[0], shape[1], "io")

    def _make_shift(self, site: Site) -> None:
        """Add the bias of a product as a separate layer."""
        arrangement = site.y
        assert arrangement is not None
        shape = self.trace.shape(site.operation.outputs[0])
        length = math.prod(shape[axis] for axis in arrangement.features)
        shift = Site(
            "scale_shift",
            {"shift": site.parts.pop("bias")},
            site.operation,
            site.operation.outputs[0],
            partial(_elementwise_layer, (length,)),
            loops=site.loops,
        )
        shift.x = shift.y = replace(
            arrangement, keeps_axes=len(arrangement.features) == 1
        )
        self.sites.append(shift)

    # ------------------------------------------------------------ what is used at all

    def _enter(
        self, program: Program, outputs: Sequence[Operand], loops: tuple[Loop, ...]
    ) -> None:
        """Find the operations that some outputs depend on; marks end a layer."""
        needed = {x for x in outputs if isinstance(x, int)}
        views = self.trace.views
        for place in needed:
            if place in views:
                what = "an output of the network, or of a loop"
                self._obstruct(views[place].source, what)
        live: list[Operation] = []
        # Backwards: only what the outputs depend on is a use.
        for operation in reversed(program.operations):
            if not needed.intersection(operation.outputs):
                continue
            live.append(operation)
            used = operation.inputs
            # What lies between the inputs and outputs of a mark is the mark's.
            if operation.primitive is mark:
                used = used[1 : 2 + operation.params["label"].masked]
            needed.update(x for x in used if isinstance(x, int))
        live.reverse()
        self.live.append((program, live, loops))
        for operation in live:
            for position, x in enumerate(operation.inputs):
                if isinstance(x, int):
                    self.consumers.setdefault(x, []).append((operation, position))
            if operation.body is not None:
                self._enter_loop(operation, loops)
        for x in outputs:
            if isinstance(x, int):
                # An output is a use: nothing is added to a value that leaves.
                self.consumers.setdefault(x, []).append((_END, 0))

    def _enter_loop(self, operation: Operation, loops: tuple[Loop, ...]) -> None:
        body = operation.body
        assert body is not None
        for position, (outside, inside) in enumerate(
            zip(operation.inputs, body.inputs, strict=True)
        ):
            view = self.trace.views.get(outside) if isinstance(outside, int) else None
            if view is not None:
                self.taken.add((id(operation), position))
                if inside not in self.trace.views:
                    what = "what a `scan` carries along or runs over"
                    self._obstruct(view.source, what)
        loop = Loop(operation, int(operation.params["length"]), False)
        self._enter(body, body.outputs, (*loops, loop))

    def _obstruct(self, source: Source, what: str) -> None:
        for leaf in numbers_of(source):
            self.obstacles.setdefault(leaf, []).append(what)

    def _leave(self, operation: Operation) -> None:
        """Note the uses of parameters that no layer explains."""
        views = self.trace.views
        for position, x in enumerate(operation.inputs):
            if not isinstance(x, int) or x not in views:
                continue
            moved = len(operation.outputs) == 1 and operation.outputs[0] in views
            if not moved and (id(operation), position) not in self.taken:
                shape = self.trace.shape(x)
                what = f"`{operation.name}` with it, as an array of {shape}"
                self._obstruct(views[x].source, what)

    # ------------------------------------------------------------------ kinds of layers

    def _read(
        self, operation: Operation, loops: tuple[Loop, ...], reader: Callable[..., Any]
    ) -> None:
        views = self.trace.views
        for position, x in enumerate(operation.inputs):
            if not isinstance(x, int) or x not in views:
                continue
            if (id(operation), position) in self.taken:
                continue
            site = reader(operation, position, views[x])
            if site is not None:
                self.taken.add((id(operation), position))
                self._add(site, loops)

    def _add(self, site: Site, loops: tuple[Loop, ...]) -> None:
        if self._placed(site, loops):
            self.sites.append(site)
            return
        for part in site.parts.values():
            why = "layers that a `scan` runs over, and others that not"
            self._obstruct(part.leaf, why)

    def _placed(self, site: Site, loops: tuple[Loop, ...]) -> bool:
        """Put a site into its loops; all of its parameters change in the same one."""
        sliced = {part.sliced for part in site.parts.values()}
        if len(sliced) > 1:
            return False
        if sliced == {False}:
            site.loops = loops
            return True
        # The loop that runs over the leaves.
        leaves = {leaf for part in site.parts.values() for leaf in part.leaves}
        for depth, loop in enumerate(loops):
            body = loop.operation.body
            assert body is not None
            _, first = carried_by(loop.operation.params)
            views = (self.trace.views.get(place) for place in body.inputs[first:])
            if leaves <= {n for view in views if view for n in numbers_of(view.source)}:
                site.loops = (
                    *loops[:depth],
                    replace(loop, sliced=True),
                    *loops[depth + 1 :],
                )
                return True
        return False

    def _marked(self, operation: Operation) -> Site:
        label: Label = operation.params["label"]
        first = 2 + label.masked
        parts: dict[str, Part] = {}
        views = self.trace.views
        parameters = operation.inputs[first:]
        for position, (role, x) in enumerate(zip(label.roles, parameters, strict=True)):
            self.taken.add((id(operation), first + position))
            view = views.get(x) if isinstance(x, int) else None
            if view is None or not self._whole(view):
                raise kc.ConventionError(
                    f"Layer {label.name!r}: expected `{role}` to be a leaf of the "
                    "parameters itself; only casts, axes of length one and `jit`, "
                    "`remat`, `scan` or `vmap` may come in between."
                )
            parts[role] = Part(view.source, view.sliced)
        self._require_only_within(operation, label, parts)
        x = operation.inputs[1]
        mask = operation.inputs[2] if label.masked else None
        return Site(
            "marked",
            parts,
            operation,
            x,
            lambda roles: label.layer,
            mask=mask,
            name=label.name,
        )

    def _whole(self, view: View) -> bool:
        return is_whole(view, self.trace.avals)

    def _source_shape(self, view: View) -> tuple[int, ...]:
        return source_shape(view.source, self.trace.avals)[view.sliced :]

    def _require_only_within(
        self, operation: Operation, label: Label, parts: dict[str, Part]
    ) -> None:
        """Refuse a mark whose layer is also used without the mark."""
        producers = {
            place: producer
            for _, operations, _ in self.live
            for producer in operations
            for place in producer.outputs
        }
        outside = set(operation.inputs[1 : 2 + label.masked])
        waiting, leaves = [operation.inputs[0]], {p.leaf for p in parts.values()}
        seen: set[Any] = set()
        while waiting:
            x = waiting.pop()
            if not isinstance(x, int) or x in outside or x in seen:
                continue
            seen.add(x)
            producer = producers.get(x)
            # Only what is used beside the mark was found to be live.
            if producer is None or producer.primitive is mark:
                continue
            for operand in producer.inputs:
                view = (
                    self.trace.views.get(operand) if isinstance(operand, int) else None
                )
                if view is not None and view.source in leaves:
                    raise kc.ConventionError(
                        f"Layer {label.name!r}: its outputs are also used before the "
                        "mark, and would be counted twice. Continue with the value "
                        "that `tap` returned."
                    )
                waiting.append(operand)

    def _product(self, operation: Operation, position: int, view: View) -> Site | None:
        readers = {
            "dot_general": self._dense,
            "conv_general_dilated": self._conv,
            "gather": self._embedding,
        }
        reader = readers.get(operation.name)
        return None if reader is None else reader(operation, position, view)

    def _dense(self, operation: Operation, position: int, view: View) -> Site | None:
        contracted, batched = operation.params["dimension_numbers"]
        x = operation.inputs[1 - position]
        parameter = isinstance(x, int) and x in self.trace.views
        # A batched product has many matrices, and two parameters have no rows.
        if batched[0] or not contracted[0] or parameter:
            return None
        mine, other = contracted[position], contracted[1 - position]
        free = [i for i in range(len(view.axes)) if i not in mine]
        first = joined(view.axes[i] for i in mine)
        last = joined(view.axes[i] for i in free)
        part = self._matrix(view, first, last)
        if part is None:
            return None
        order, layout = part
        n = math.prod(self.trace.shape(operation.inputs[position])[i] for i in mine)
        m = math.prod(self.trace.shape(operation.inputs[position])[i] for i in free)
        rows = [i for i in range(len(self.trace.shape(x))) if i not in other]
        # `dot_general` puts the free axes of its first operand before those of the
        # second.
        shift = 0 if position == 1 else len(free)
        wide = len(rows) if position == 1 else 0
        parts = {"weight": Part(view.source, view.sliced, order)}
        features = tuple(range(wide, wide + len(free)))
        make = partial(_dense_layer, n, m, layout)
        site = Site("dense", parts, operation, x, make)
        site.x = Arrangement(tuple(rows), tuple(other))
        site.y = Arrangement(tuple(range(shift, shift + len(rows))), features)
        self._add_bias(site, features)
        return site

    def _matrix(
        self, view: View, first: list[Piece], last: list[Piece]
    ) -> tuple[tuple[int, ...] | None, Any] | None:
        """Return the permutation of axes that makes a weight a matrix, and its layout."""
        shape = self._source_shape(view)
        whole = joined(whole_axes(shape))
        if joined([first, last]) == whole:
            return None, "io"
        if joined([last, first]) == whole:
            return None, "oi"
        # Neither layout as it lies: a permutation of whole axes makes it one.
        order = [axis for axis, *_ in (*first, *last)]
        if sorted([*first, *last]) != whole:
            return None
        units = [i for i in range(len(shape)) if i not in order]
        return (*units, *order), "io"

    def _conv(self, operation: Operation, position: int, view: View) -> Site | None:
        params = operation.params
        numbers = params["dimension_numbers"]
        d = len(params["window_strides"])
        if params["batch_group_count"] != 1 or position != 1:
            return None
        shape = self.trace.shape(operation.inputs[1])
        if len(shape) != d + 2 or list(view.axes) != list(whole_axes(shape)):
            return None
        first, last = (0, 1, *range(2, d + 2)), (0, d + 1, *range(1, d + 1))
        # Examples first, then channels either before or after space, as
        # `kfac_core.Conv` has them.
        orders: dict[Any, Channels] = {first: "first", last: "last"}
        data = orders.get(tuple(numbers.lhs_spec))
        kernel = {
            (0, 1, *range(2, d + 2)): "first",
            (d + 1, d, *range(d)): "last",
        }.get(tuple(numbers.rhs_spec))
        if (
            data is None
            or data != kernel
            or tuple(numbers.out_spec) != tuple(numbers.lhs_spec)
        ):
            return None

        # A transposed convolution is one of inputs with zeros between and around them; a
        # negative padding takes rows of the inputs away.
        spread: list[tuple[int, int, int]] = []
        padding = params["padding"]
        if any(n != 1 for n in params["lhs_dilation"]) or any(
            n < 0 for ends in padding for n in ends
        ):
            inner = [
                (before, after, n - 1)
                for (before, after), n in zip(
                    padding, params["lhs_dilation"], strict=True
                )
            ]
            outer = [(0, 0, 0)]
            channels_first = [*outer, *outer, *inner]
            channels_last = [*outer, *inner, *outer]
            spread = channels_first if data == "first" else channels_last
            padding = 0

        make = partial(_conv_layer, shape, params, padding, data)
        parts = {"weight": Part(view.source, view.sliced)}
        site = Site("conv", parts, operation, operation.inputs[0], make, spread=spread)
        self._add_bias(site, (1 if data == "first" else d + 1,))
        return site

    def _embedding(
        self, operation: Operation, position: int, view: View
    ) -> Site | None:
        numbers = operation.params["dimension_numbers"]
        shape = self.trace.shape(operation.inputs[0])
        y = self.trace.shape(operation.outputs[0])
        # A lookup gathers whole rows along the first axis. Other gathers take entries,
        # whose derivative is not that of a table.
        rows = len(y) - 1
        taken = (
            position == 0
            and len(shape) == 2
            and tuple(numbers.offset_dims) == (rows,)
            and tuple(numbers.collapsed_slice_dims) == (0,)
            and tuple(numbers.start_index_map) == (0,)
            and tuple(operation.params["slice_sizes"]) == (1, shape[1])
        )
        if not taken:
            return None
        part = self._matrix(view, joined(view.axes[:1]), joined(view.axes[1:]))
        if part is None:
            return None
        order, layout = part
        parts = {"weight": Part(view.source, view.sliced, order)}
        layer = kc.Embedding(
            num_embeddings=shape[0], features=shape[1], weight_layout=layout
        )
        site = Site(
            "embedding", parts, operation, operation.inputs[1], lambda roles: layer
        )
        site.x = Arrangement(tuple(range(rows)), (), last=True)
        site.y = Arrangement(tuple(range(rows)), (rows,))
        return site

    def _add_bias(self, site: Site, channels: tuple[int, ...]) -> None:
        """Find the bias that is added to a layer's outputs along their channels."""
        place = site.operation.outputs[0]
        y = View.of(-1, self.trace.shape(place))
        wanted = joined(y.axes[i] for i in channels)
        _, place, here = self._way(place, y)
        addition = self._addition(place)
        if addition is None:
            return
        operation, position, bias = addition
        along = [i for i, pieces in enumerate(bias.axes) if pieces]
        same = joined(here.axes[i] for i in along) == wanted
        if same and bias.sliced == site.parts["weight"].sliced:
            self.taken.add((id(operation), position))
            site.parts["bias"] = Part(bias.source, bias.sliced)

    def _way(
        self, place: int, view: View, factors: bool = False
    ) -> tuple[list[Operation], int, View]:
        """Follow a value that is used once, through moves, and through factors if asked.

        Returns
        -------
        tuple of list of Operation, int and View
            The operations on the way, where it ends, and the view there.
        """
        way: list[Operation] = []
        while True:
            uses = self.consumers.get(place, [])
            if len(uses) != 1 or len(uses[0][0].outputs) != 1:
                return way, place, view
            operation, position = uses[0]
            old, new = self.trace.shape(place), self.trace.shape(operation.outputs[0])
            moved = None
            if len(operation.inputs) == 1:
                moved = view.moved(operation.name, operation.params, old, new)
            elif factors and self._is_factor(operation, position):
                # Axes of length one may be repeated; those of the view have their length.
                moved = view if len(old) == len(new) else None
            if moved is None or moved.window:
                return way, place, view
            way.append(operation)
            place, view = operation.outputs[0], moved

    def _addition(self, place: int) -> tuple[Operation, int, View] | None:
        """Return the only use of a value, if a parameter is added: how, and its view."""
        uses = self.consumers.get(place, [])
        if len(uses) != 1 or uses[0][0].name not in ("add", "add_any"):
            return None
        operation, position = uses[0]
        other = operation.inputs[1 - position]
        added = self.trace.views.get(other) if isinstance(other, int) else None
        shape = self.trace.shape(place)
        whole = added is not None and self._whole(added)
        if not whole or self.trace.shape(operation.outputs[0]) != shape:
            return None
        assert added is not None
        return (
            (operation, 1 - position, added) if len(added.axes) == len(shape) else None
        )

    def _is_factor(self, operation: Operation, position: int) -> bool:
        """Whether an operation multiplies one operand by something without parameters."""
        other = operation.inputs[1 - position]
        plain = not (isinstance(other, int) and other in self.trace.views)
        return plain and (
            operation.name == "mul" or (operation.name == "div" and position == 0)
        )

    def _scaled(self, operation: Operation, position: int, view: View) -> Site | None:
        """Find an elementwise scale, and the shift that is added to what it scales."""
        if operation.name != "mul" or not self._whole(view):
            return None
        x = operation.inputs[1 - position]
        axes = len(self.trace.shape(operation.outputs[0]))
        # A number has no axes that could be followed.
        if not isinstance(x, int) or x in self.trace.views or len(view.axes) != axes:
            return None
        parts = {"scale": Part(view.source, view.sliced)}
        way, place, here = self._way(operation.outputs[0], view, factors=True)
        chain = [operation, *way]
        last, addition = chain[-1], self._addition(place)
        if addition is not None and self._whole(here):
            added, position, shift = addition
            alike = [bool(pieces) for pieces in shift.axes] == [
                bool(pieces) for pieces in here.axes
            ]
            if alike and shift.sliced == view.sliced:
                self.taken.add((id(added), position))
                parts["shift"] = Part(shift.source, shift.sliced)
                last = added
        return self._elementwise(parts, last, x, here, chain)

    def _shifted(self, operation: Operation, position: int, view: View) -> Site | None:
        """Find a shift that is added to something, such as codes of positions."""
        if operation.name not in ("add", "add_any"):
            return None
        x = operation.inputs[1 - position]
        if not isinstance(x, int) or x in self.trace.views:
            return None
        window = self._window(view)
        if not (self._whole(view) or window):
            return None
        parts = {"shift": Part(view.source, view.sliced)}
        y = operation.outputs[0]
        site = self._elementwise(parts, operation, y, view, [])
        if site is None or not window:
            return site
        lengths = tuple(n for n in self._source_shape(view) if n > 1)
        site.window, site.make = window, partial(_elementwise_layer, lengths)
        return site

    def _window(self, view: View) -> list[tuple[int, int]]:
        """Return how many entries a view leaves out before and after, along each axis.

        Empty where it views all entries, or not every axis in its order.
        """
        starts = dict(view.window)
        shape = self._source_shape(view)
        pieces = [piece for axes in view.axes for piece in axes]
        long_axes = [axis for axis, n in enumerate(shape) if n > 1]
        if not starts or [(a, s) for a, s, _ in pieces] != [(a, 1) for a in long_axes]:
            return []
        return [
            (starts.get(axis, 0), shape[axis] - starts.get(axis, 0) - size)
            for axis, _, size in pieces
        ]

    def _elementwise(
        self,
        parts: dict[str, Part],
        operation: Operation,
        x: Operand,
        view: View,
        chain: list[Operation],
    ) -> Site | None:
        shape = self.trace.shape(operation.outputs[0])
        if len(view.axes) != len(shape):
            return None
        features = tuple(i for i, pieces in enumerate(view.axes) if pieces)
        rows = tuple(i for i in range(len(shape)) if i not in features)
        make = partial(_elementwise_layer, tuple(shape[i] for i in features))
        site = Site("scale_shift", parts, operation, x, make, chain=chain)
        site.x = site.y = Arrangement(rows, features, keeps_axes=True)
        return site


def _dense_layer(n: int, m: int, layout: Any, roles: Collection[str]) -> kc.Layer:
    return kc.Dense(
        in_features=n, out_features=m, bias="bias" in roles, weight_layout=layout
    )


def _elementwise_layer(lengths: tuple[int, ...], roles: Collection[str]) -> kc.Layer:
    """Return the layer of a scale, a shift, or both, of these lengths."""
    return kc.ScaleShift(
        scale_shape=lengths if "scale" in roles else None,
        shift_shape=lengths if "shift" in roles else None,
    )


def _conv_layer(
    shape: Sequence[int],
    params: Mapping[str, Any],
    padding: Any,
    channels: Channels,
    roles: Collection[str],
) -> kc.Layer:
    layer = kc.integration.framework_conv(
        shape,
        strides=params["window_strides"],
        padding=padding,
        dilation=params["rhs_dilation"],
        groups=params["feature_group_count"],
        bias="bias" in roles,
        channels=channels,
    )
    assert layer is not None
    return layer


_END = Operation(mark, {"label": Label("", kc.Dense, (), False)}, (), ())  # type: ignore[arg-type]
"""Stands for the end of a program among what uses a value."""
