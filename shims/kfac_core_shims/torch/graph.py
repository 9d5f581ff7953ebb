"""Reading the graph of a model's outputs: which calls they depend on, and how.

A forward hook leaves each call in the node of the graph that made its output.  From the
outputs that are observed, the graph is walked down, and so finds exactly the calls that the
outputs depend on.  It also shows every other use of a weight: a weight that something else
than its modules has used is either read there too (a matrix product), or left alone.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

import kfac_core as kc
from kfac_core_shims.torch import private
from kfac_core_shims.torch.layers import read_lookup
from kfac_core_shims.torch.sites import Site

_SAME = "ToCopyBackward0", "AliasBackward0", "torch::autograd::Identity"
_VIEWS = *_SAME, "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"
_UNMOVED = *_VIEWS, "SqueezeBackward"
_TRANSPOSED = "TBackward0", "TransposeBackward0"
_SPLITS = "SplitBackward0", "SplitWithSizesBackward0"
_RESHAPED = *_VIEWS[len(_SAME) :], "CloneBackward0"

_PRODUCTS = {
    "MmBackward0": (0, "self", "mat2"),
    "AddmmBackward0": (1, "mat1", "mat2"),
}
"""The place of the first of two operands, and the names of both."""

_TAKEN = "SelectBackward0", "UnbindBackward0"

_STACKED_PRODUCTS = {
    "BmmBackward0": (0, "self", "mat2"),
    "GroupedMmBackward0": (0, "self", "mat2"),
}
"""Likewise for products with a stack of matrices, such as the weights of experts."""


class RecordedCall(kc.integration.LayerCall):
    """A call whose inputs lie in memory of the program, which may write to it again.

    Attributes
    ----------
    version : int
        How often PyTorch had seen that memory written to when the call was made.
    own_scale : float
        What the call itself multiplies output gradients by.
    is_taken : bool
        Whether it is of an observed pass.
    turned : bool
        Whether rows were multiplied by the transpose of the block's weight.  Then `inputs`
        are the block's output gradients, and what comes back are its inputs.
    example_of : torch.Tensor of int, or None
        The example that each row belongs to, -1 for none, where several calls have rows
        of one example.
    outputs : int
        Number of these examples.
    in_order : bool
        Whether row n is of example n, in each of these calls.
    row_scale : float
        What `scaled_by` has of the numbers of rows and examples.
    """

    def __init__(
        self, block: str, inputs: Any, /, *, turned: bool = False, **options: Any
    ) -> None:
        super().__init__(block, inputs, **options)
        self.version = private.version(inputs)
        self.own_scale = self.grad_scale
        self.is_taken = False
        self.turned = turned
        self.example_of: Any = None
        self.outputs = 0
        self.in_order = False
        self.row_scale = 1.0

    def again(self) -> RecordedCall:
        """Return the same call without output gradients, for those of another pass."""
        if self.inputs is None:
            raise kc.UnsupportedError(
                "Outputs of several forward passes depend on one call of layer "
                f"{self.block!r}, whose rows were released after the first backward "
                "pass. Keep its graph (retain_graph=True), or add the losses and "
                "differentiate their sum."
            )
        call = copy.copy(self)
        call.output_grads, call.is_taken = [], False
        call.grad_scale, call.scaled_by, call.row_scale = self.own_scale, 1.0, 1.0
        call.example_of, call.outputs, call.in_order = None, 0, False
        return call

    def require_unchanged(self) -> None:
        """Raise `UnsupportedError` if the inputs were written to after the call.

        Autograd notices that only of what it has saved itself until the backward pass.
        """
        if self.inputs is not None and private.version(self.inputs) != self.version:
            raise kc.UnsupportedError(
                f"The input of a call of layer {self.block!r} was written to before its "
                "statistics were taken: in place, as in `x += layer(x)`, or as a buffer "
                "that holds the next part of the batch. Write `x = x + layer(x)`, or call "
                "the model with a copy, x.clone()."
            )


@dataclass(frozen=True)
class Reached:
    """A call that outputs depend on.

    Attributes
    ----------
    edge : torch.autograd.graph.GradientEdge
        Where the gradient of the call's output comes back.
    call : RecordedCall
        Its inputs.
    columns : slice or None
        Which features of that gradient are the block's; None for all.
    share : callable, optional
        Returns this process's examples of that gradient, where all have the same.
    columns_are_rows : bool
        Whether that gradient has examples on its last axis.
    rows : int, slice or None
        Which of the first axis of that gradient are the block's; None for all.
    """

    edge: Any
    call: RecordedCall
    columns: slice | None = None
    share: Callable[[Any], Any] | None = None
    columns_are_rows: bool = False
    rows: int | slice | None = None

    def take(self, g: Any) -> Any:
        """Return the block's features of a gradient that came back."""
        if g is None:
            return None
        if self.share is not None:
            g = self.share(g)
        if self.rows is not None:
            g = g[self.rows]
        if self.columns_are_rows:
            g = g.mT
        return g if self.columns is None else g[..., self.columns]


def calls_below(
    root: Node,
    /,
    *,
    token: int,
    sites: Mapping[str, Site],
    share: Callable[[Any], Any] | None = None,
    keep_empty: bool = False,
    stop: Collection[Any] = (),
) -> tuple[list[Reached], dict[str, str]]:
    """Return the calls that outputs depend on, of weights with no other use.

    Parameters
    ----------
    root : torch.autograd.graph.Node
        Node that made the outputs.
    token : int
        Key of the calls in the nodes' metadata.
    sites : mapping of str to Site
        Blocks by name.
    share : callable, optional
        As of `Reached`.
    keep_empty : bool
        Whether calls without examples are returned too.
    stop : collection of torch.autograd.graph.Node
        Nodes at which the walk stops.

    Returns
    -------
    reached : list of Reached
        Calls of all blocks whose every use is known.
    reasons : dict of str to str
        Blocks with a use that is not, and what it is.
    """
    walk = Walk(root, token, stop)
    recorded: dict[str, list[Reached]] = {name: [] for name in sites}
    for edge, call in walk.recorded:
        recorded[call.block].append(Reached(edge, call, share=share))
    reached: list[Reached] = []
    reasons: dict[str, str] = {}
    for name, site in sites.items():
        calls = recorded[name]
        uses = max(walk.uses_of(site, role) for role in site.roles)
        # More reads of the weight than recorded calls: lookups, or products in the graph.
        if uses > len(calls):
            calls = calls + walk.lookups_of(site)
        if site.part.rows or uses > len(calls):
            products = walk.products_of(site)
            if isinstance(products, str):
                reasons[name] = products
            else:
                reached += products
        else:
            reached += calls
    # Experts that got no token have nothing to say.
    return [r for r in reached if keep_empty or r.call.examples], reasons


class Walk:
    """The nodes of a graph below its `root`, and calls of layers; see `calls_below`."""

    def __init__(self, root: Node, token: int, stop: Collection[Any] = ()) -> None:
        self.recorded: list[tuple[GradientEdge, Any]] = []
        self._sources: dict[Any, list[tuple[Any, int]]] = defaultdict(list)
        self._above: dict[Any, list[tuple[Any, int, int]]] = defaultdict(list)
        self._saved: dict[Any, Any] = {}
        self._calls: set[Any] = set()
        self.nodes = seen = {root}
        todo = [root]
        while todo:
            node = todo.pop()
            if node.metadata:
                self._read_metadata(node, token)
            for place, (below, output) in enumerate(node.next_functions):
                if below is None:
                    continue
                self._above[below].append((node, place, output))
                if below in seen or below in stop:
                    continue
                seen.add(below)
                # Asked of the class: `variable` of a node is a call into C++.
                kind: Any = type(below)
                if _is_leaf(kind):
                    self._sources[id(below.variable)].append((below, 0))
                else:
                    todo.append(below)

    def _read_metadata(self, node: Node, token: int) -> None:
        for output, recorded in node.metadata.get(token, ()):
            if isinstance(recorded, RecordedCall):
                self._calls.add(node)
                self.recorded.append((GradientEdge(node, output), recorded))
            else:
                self._sources[recorded].append((node, output))

    def uses_of(self, site: Site, role: str) -> int:
        """Return how often a parameter is read, or what a parametrization made of it."""
        total, todo = 0, [*self._sources[site.key_of(role)]]
        for node, output in todo:
            for reader, _, of_output in self._above[node]:
                if of_output != output:
                    continue
                # The double backward of a product reads the weight through the view that
                # the product was made with, and autocast casts a weight once for all.
                is_view = len(reader.next_functions) == 1 and not _is_lookup(reader)
                if is_view and reader not in self._calls:
                    outputs = {above[2] for above in self._above[reader]}
                    todo += [(reader, above) for above in outputs]
                else:
                    total += 1
        return total

    def lookups_of(self, site: Site) -> list[Reached]:
        """Return lookups of rows of a weight that are no recorded calls."""
        nodes = []
        if site.kind == "embedding":
            for node, *_ in self._readers(site, "weight"):
                if _is_lookup(node) and node not in self._calls:
                    nodes.append(node)
        values = self._values_of([(node, "indices") for node in nodes])
        reached = []
        for node, ids in zip(nodes, values, strict=True):
            padding = private.signed(node, "padding_idx")
            reading = read_lookup(
                site.parameters["weight"],
                ids,
                padding=None if padding < 0 else padding,
                tied=site.part.tied,
            )
            call = RecordedCall(
                site.name,
                reading.inputs,
                mask=reading.mask,
                grad_shape=reading.grad_shape,
            )
            reached.append(Reached(GradientEdge(node, 0), call))
        return reached

    def products_of(self, site: Site) -> list[Reached] | str:
        """Return the matrix products that read a weight, or what else reads it.

        A weight may stand on either side of a product, and be transposed there: so it does
        in derivatives of the network.
        """
        layer = site.layer
        if site.kind == "embedding" and getattr(layer, "bag", False):
            return "it was called with `offsets`, 1-D ids or `per_sample_weights`"
        if site.kind == "embedding":
            readers = [node for node, *_ in self._readers(site, "weight")]
            kinds = {node.name() for node in readers if not _is_lookup(node)}
            return (
                "it is an embedding whose weight is also read elsewhere "
                f"({', '.join(sorted(kinds))}); to make logits, give nn.Linear this "
                "weight before KFAC is created"
            )
        if layer.kind != "dense" or "weight" not in site.roles:
            return (
                "its weight is used outside of its module's forward, or by a derivative "
                "of the model, of which only linear layers are covered"
            )
        if site.is_stacked:
            return self._products_of_stacked(site)
        readings: list[tuple[Any, int, slice | None, bool]] = []
        operands: list[tuple[Any, str]] = []
        for node, place, axes, rows in self._readers(site, "weight"):
            first, *names = _PRODUCTS.get(node.name(), (place + 1, "", ""))
            side = place - first
            if side < 0 or not _is_plain(node) or _is_of_parameters(node, first):
                return f"its weight is read by {node.name()} in the graph"
            upright = (axes[0] == 0) == (layer.weight_layout == "io")
            readings.append((node, side, rows, upright))
            operands.append((node, names[1 - side]))
        reached = []
        values = self._values_of(operands)
        for (node, side, rows, upright), x in zip(readings, values, strict=True):
            # Whether rows are multiplied by W of shape (in, out), or by its transpose.
            # x W reads the weight on the right; W^T x on the left, transposed.
            turned = upright == (side == 0)
            x = x.mT if side == 0 else x
            if turned and rows is not None:
                x, rows = x[:, rows], None
            call = RecordedCall(site.name, x, turned=turned)
            edge = GradientEdge(node, 0)
            reached.append(Reached(edge, call, rows, columns_are_rows=side == 0))
        return self._with_biases(site, reached)

    def _products_of_stacked(self, site: Site) -> list[Reached] | str:
        """Return the products with one matrix of a stack, or what else reads it.

        The matrix is taken out of the stack for a product of its own, or the product is
        of all matrices, each with rows of its own.
        """
        expert = site.part.rows["weight"].start
        upright_axes = (1, 2) if site.layer.weight_layout == "io" else (2, 1)
        readings: list[tuple[Any, int, bool, bool]] = []
        operands: list[tuple[Any, str]] = []
        for node, place, axes, _ in self._readers(site, "weight"):
            name, alone = node.name(), 0 not in axes
            products = _PRODUCTS if alone else _STACKED_PRODUCTS
            first, *names = products.get(name, (place + 1, "", ""))
            side, matrix = place - first, axes[-2:]
            fits = axes == matrix or axes == (0, *matrix)
            fits = fits and (side == 1 or name != "GroupedMmBackward0")
            if side < 0 or not fits or not _is_plain(node):
                return f"its weight is read by {name} in the graph"
            readings.append((node, side, matrix == upright_axes, alone))
            operands.append((node, names[1 - side]))
        reached = []
        values = self._values_of(operands)
        sizes = site.parameters["weight"].shape
        for (node, side, upright, alone), x in zip(readings, values, strict=True):
            rows: int | slice | None = None if alone else expert
            if node.name() == "GroupedMmBackward0":
                # Waits for a GPU: how many rows an expert has is known there alone.
                ends = [0, *private.saved(node, "offs").tolist()]
                if x.ndim != 2:
                    return "its weight is read by a grouped product of other shapes"
                rows = slice(ends[expert], ends[expert + 1])
            elif not alone and len(x) != sizes[0]:
                return "its weight is read by a product of other shapes in the graph"
            x = x if rows is None else x[rows]
            x = x.mT if side == 0 else x
            # As of one matrix: x W reads it on the right, W^T x on the left, transposed.
            turned = upright == (side == 0)
            features = sizes[upright_axes[turned]]
            if x.shape[-1] != features:
                return "its weight is read by a product of other shapes in the graph"
            call = RecordedCall(site.name, x, turned=turned)
            edge = GradientEdge(node, 0)
            reached.append(Reached(edge, call, columns_are_rows=side == 0, rows=rows))
        return self._with_biases(site, reached)

    def _with_biases(self, site: Site, reached: list[Reached]) -> list[Reached] | str:
        """Say of each product of a weight whether the bias is added to it."""
        if "bias" not in site.roles:
            return reached
        products = {r.edge.node for r in reached}
        adding = set()
        count = 0
        for node, place, *_ in self._readers(site, "bias"):
            count += 1
            above = self._above[node]
            if _gathers_rows_of(site, node, reached) and len(above) == 1:
                node, place, _ = above[0]
            if node.name() == "AddBackward0" and _is_plain(node):
                node = node.next_functions[1 - place][0]
                # Under `vmap` one vector is a matrix of one row, which is squeezed.
                while node is not None and node.name().startswith(_UNMOVED):
                    node = node.next_functions[0][0]
            adding.add(node)
        if len(adding) < count or not adding <= products:
            return f"its weight has {len(reached)} uses, its bias {count}"
        for r in reached:
            r.call.bias = r.edge.node in adding
        return reached

    def _values_of(self, operands: list[tuple[Any, str]]) -> list[Any]:
        """Return operands that matrix products have saved, each read once."""

        def read() -> None:
            for node, name in operands:
                if (node, name) not in self._saved:
                    self._saved[node, name] = private.saved(node, name).detach()

        if private.backward_pass() < 0:
            read()
        elif any(operand not in self._saved for operand in operands):
            # Checkpoints give what they recompute to one reader in each backward pass, and
            # that must be the product itself.  Another thread runs no backward pass.
            with ThreadPoolExecutor(1) as thread:
                thread.submit(read).result()
        return [self._saved[operand] for operand in operands]

    def _readers(
        self, site: Site, role: str
    ) -> Iterator[tuple[Any, int, tuple[int, ...], slice | None]]:
        """Yield what reads a block's part of a parameter, views of it left out.

        Each is ``(node, its argument, axes, rows)``: the axes of the parameter in their
        order there, without axis 0 where one of a stack was taken out; and the block's rows
        among those read, None for all.
        """
        shape, stacked = site.shape_of(role), site.is_stacked
        size = shape[0]
        block_rows = site.rows_of(role) or slice(0, size)
        axes: tuple[int | None, ...] = tuple(range(len(shape)))
        todo: list[tuple[Any, tuple[int | None, ...], int, int, int | None]] = [
            (node, axes, 0, size, output)
            for node, output in self._sources[site.key_of(role)]
        ]
        while todo:
            node, axes, start, stop, only = todo.pop()
            for reader, place, output in self._above[node]:
                if only is not None and output != only:
                    continue
                name, taken = reader.name(), None
                moved = _moved_axes(reader, name, axes, stacked=stacked)
                if stacked and name in _TAKEN:
                    d = private.signed(reader, "dim") % len(axes)
                    if axes[d] == 0:
                        moved = axes[:d] + axes[d + 1 :]
                        if name == "UnbindBackward0":
                            taken = block_rows.start
                        elif private.signed(reader, "index") % size != block_rows.start:
                            continue
                splits = name in _SPLITS and not stacked and axes[0] == 0
                if moved is not None:
                    todo.append((reader, moved, start, stop, taken))
                elif splits and private.saved(reader, "dim") == 0:
                    for piece, (low, high) in enumerate(_pieces(reader, start, stop)):
                        if low < block_rows.stop and block_rows.start < high:
                            todo.append((reader, axes, low, high, piece))
                else:
                    exact = (start, stop) == (block_rows.start, block_rows.stop)
                    rows = slice(block_rows.start - start, block_rows.stop - start)
                    known = tuple(a for a in axes if a is not None)
                    yield reader, place, known, None if exact else rows


def _gathers_rows_of(site: Site, node: Node, reached: list[Reached]) -> bool:
    """Whether a node gives the bias of an expert to its rows of a grouped product."""
    indices = private.saved(node, "indices", ())
    if node.name() != "IndexBackward0" or len(indices) != 1:
        return False
    places = (indices[0] == site.part.rows["bias"].start).nonzero()[:, 0].tolist()
    grouped = [r.rows for r in reached if isinstance(r.rows, slice)]
    return [[*range(rows.start, rows.stop)] for rows in grouped] == [places]


def _moved_axes(
    node: Node, name: str, axes: tuple[int | None, ...], *, stacked: bool
) -> tuple[int | None, ...] | None:
    """Return the axes of a view of a parameter, None among them for an axis of length 1.

    None for what is no view, and for other shapes of a matrix.  A view of a stack with
    other axes differs in its shape from what a product expects.
    """
    # `vmap` writes the product by a `beta` of one for `addmm`.
    is_times_one = name == "MulBackward1" and private.saved(node, "other") == 1
    if name in _SAME or is_times_one:
        return axes
    if stacked and name in _RESHAPED:
        return tuple(a for a in axes if a is not None)
    if stacked and name == "UnsqueezeBackward0":
        d = private.signed(node, "dim") % (len(axes) + 1)
        return *axes[:d], None, *axes[d:]
    if name == "PermuteBackward0":
        return tuple(axes[d % len(axes)] for d in private.signed(node, "dims"))
    if name in _TRANSPOSED:
        # A vector has one axis, and is its own transpose.
        ends = 0, len(axes) - 1
        if name == "TransposeBackward0":
            ends = private.signed(node, "dim0"), private.signed(node, "dim1")
        swapped = [*axes]
        first, second = ends
        swapped[first], swapped[second] = axes[second], axes[first]
        return tuple(swapped)
    return None


@cache
def _is_leaf(kind: Hashable) -> bool:
    """Whether nodes of a class accumulate the gradient of a tensor."""
    return hasattr(kind, "variable")


def _is_of_parameters(node: Node, first: int) -> bool:
    """Whether a product multiplies two parameters, and no examples."""
    leaves = []
    for below, _ in node.next_functions[first : first + 2]:
        while below is not None and below.name() in (*_VIEWS, *_TRANSPOSED):
            below = below.next_functions[0][0]
        leaves.append(getattr(below, "variable", None))
    return all(isinstance(leaf, torch.nn.Parameter) for leaf in leaves)


def _is_plain(node: Node) -> bool:
    """Whether a product is neither scaled nor added to a scaled matrix."""
    return bool(private.saved(node, "alpha", 1) == private.saved(node, "beta", 1) == 1)


def _is_lookup(node: Node) -> bool:
    """Whether a node takes rows of a weight, whose gradients add up to its own."""
    options = "scale_grad_by_freq", "sparse"
    return node.name() == "EmbeddingBackward0" and not any(
        private.saved(node, name) for name in options
    )


def _pieces(node: Node, start: int, stop: int) -> Iterator[tuple[int, int]]:
    if node.name() == "SplitBackward0":
        size = private.saved(node, "split_size")
        for low in range(start, stop, size):
            yield low, min(low + size, stop)
        return
    for size in private.saved(node, "split_sizes"):
        yield start, start + size
        start += size


# Going back.


def pull_back(
    outputs: GradientEdge, reached: list[Reached], vectors: Any, /, *, like: Any
) -> None:
    """Backpropagate vectors from the outputs to the calls.

    Parameters
    ----------
    outputs : GradientEdge
        The outputs in the graph, which stays.
    reached : list of Reached
        Calls that they depend on.
    vectors : torch.Tensor, shape (M, N, ..., P)
        One vector for each source.
    like : torch.Tensor
        The outputs, whose dtype the vectors take.
    """
    vectors = vectors if vectors.dtype == like.dtype else vectors.to(like.dtype)
    for v in vectors.unbind():
        if hasattr(like, "placements"):
            v = _divided_as(v, like)
        for r, g in zip(reached, gradients_at(outputs, reached, v), strict=True):
            r.call.add_source(g)


def below_casts(edge: GradientEdge, /) -> GradientEdge:
    """Return where a tensor is before its casts and moves to other devices."""
    while edge.node.name() == "ToCopyBackward0":
        edge = GradientEdge(*edge.node.next_functions[0])
    return edge


def whole(x: Any, /) -> Any:
    """Return the whole of a tensor that is divided among processes; others as they are."""
    return x.full_tensor() if hasattr(x, "placements") else x


def _divided_as(x: Any, like: Any) -> Any:
    """Return a tensor that all processes have as a ``DTensor``, divided like another."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    whole = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=like.placements)


def gradients_at(outputs: GradientEdge, reached: list[Reached], v: Any, /) -> list[Any]:
    """Return what comes back to calls of one vector at the outputs; None for nothing."""
    edges = [r.edge for r in reached]
    if not edges:
        return []
    try:
        gradients = private.backpropagated(outputs, edges, v)
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        raise kc.UnsupportedError(
            "A checkpoint with use_reentrant=True lies between the outputs and a "
            "covered layer, and nothing can be backpropagated through it but a loss. "
            "Take use_reentrant=False, or fisher='empirical'."
        ) from error
    return [r.take(g) for r, g in zip(reached, gradients, strict=True)]
