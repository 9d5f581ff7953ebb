"""Where a graph's layers stand, found once for all graphs of the same form.

Training builds the same graph at each step.  To find out which calls of layers residuals
depend on, and that nothing else reads their weights, takes as long as to go through a small
network; to see that a graph is the one that is known takes one loop.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from kfac_core_shims.torch import private
from kfac_core_shims.torch.sites import Site

_PRODUCTS = {"AddmmBackward0": "_saved_mat1", "MmBackward0": "_saved_self"}
"""The attribute that is a layer's inputs, of products with its weight on the right."""

_KINDS = re.compile(
    "(Abs|Add|Alias|Atan|Cat|Clamp|ClampMax|ClampMin|Clone|Cos|Cosh|Div|Elu|Erf|Exp|Expand"
    "|Expm1|Gelu|Hardsigmoid|Hardswish|Hardtanh|LeakyRelu|Log|Log1P|LogSigmoid"
    "|MaskedFill|Maximum|Mean|Minimum|Mish|Mul|NativeDropout|Neg|Permute|Pow|Reciprocal"
    "|Relu|ReshapeAlias|Rsqrt|Rsub|Select|Sigmoid|Silu|Sin|Sinh|Slice|Softplus|Split|Sqrt"
    "|Squeeze|Stack|Sub|Sum|Tan|Tanh|Threshold|ToCopy|Transpose|UnsafeView|Unsqueeze|View"
    "|Where)Backward[0-9]+"
)
"""Operations that move no number to another example while the first axis is the examples'.

An index or a product with a matrix may do so, at one step and not at the next.
"""

_VIEWS = re.compile("(ReshapeAlias|UnsafeView|View)Backward[0-9]+")
_PERMUTATIONS = re.compile("(Permute|Transpose)Backward[0-9]+")


def form_of(r: Any, /) -> tuple[list[Any], tuple[Any, ...]]:
    """Return the nodes of a graph in a fixed order, and their kinds and edges."""
    nodes, form = [r.grad_fn], [r.output_nr]
    places = {None: -1, r.grad_fn: 0}
    for node in nodes:
        form.append(type(node))
        for below, output in node.next_functions:
            place = places.get(below)
            if place is None:
                place = places[below] = len(nodes)
                nodes.append(below)
            form += place, output
    return nodes, tuple(form)


class Plan:
    """The products with layers' weights in the graphs of one form; made by `of`.

    Attributes
    ----------
    steps : int
        How often it was followed.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._products: list[tuple[int, str, bool]] = []
        self._one: Any = None
        self._leaves: list[tuple[int, Any]] = []
        # What else a graph must agree in.
        self._attributes: list[tuple[int, str, Any]] = []

    @classmethod
    def of(
        cls, r: Any, nodes: Sequence[Any], sites: Mapping[str, Site], /
    ) -> Plan | None:
        """Return the plan of a graph in which one product reads each layer's parameters.

        Parameters
        ----------
        r : torch.Tensor, shape (N, C)
            Residuals.
        nodes : sequence of torch.autograd.graph.Node
            The graph; see `form_of`.
        sites : mapping of str to Site
            Linear layers by name, whose parameters are all that are trained.

        Returns
        -------
        Plan or None
            None for any other graph: those of derivatives, and those in which numbers
            could move to another example.
        """
        plan, products = cls(), {}
        reads = Counter(below for node in nodes for below, _ in node.next_functions)
        names = {_key(*site.parameters.values()): name for name, site in sites.items()}
        for place, node in enumerate(nodes):
            kind = node.name()
            if kind not in _PRODUCTS:
                if not (_is_leaf(node) or _keeps_examples(node, r.shape[0])):
                    return None
                plan._attributes += [
                    (place, *pair) for pair in private.numbers_of(node)
                ]
                continue
            *biases, _, weight = [below for below, _ in node.next_functions]
            read, transposed = [*biases, weight], False
            if weight is not None and weight.name() == "TBackward0":
                weight, transposed = weight.next_functions[0][0], True
                read.append(weight)
            parameters = [_variable(below) for below in (weight, *biases)]
            name = names.get(_key(*parameters))
            if name is None or any(reads[below] != 1 for below in read):
                return None
            if transposed != (sites[name].layer.weight_layout == "oi"):
                return None
            products[name] = place, _PRODUCTS[kind], bool(biases)
            leaves = map(nodes.index, (weight, *biases))
            plan._leaves += zip(leaves, parameters, strict=True)
            factors = ("_saved_alpha", "_saved_beta") if biases else ()
            plan._attributes += [(place, factor, 1) for factor in factors]
        plan._products = [products[name] for name in sites if name in products]
        return plan if len(products) == len(sites) else None

    def rows(
        self, r: Any, nodes: Sequence[Any], /
    ) -> list[tuple[Any, list[Any]]] | None:
        """Return each layer's inputs, with the 1 of a bias, and gradients of each output.

        Parameters
        ----------
        r : torch.Tensor, shape (N, C)
            Residuals.
        nodes : sequence of torch.autograd.graph.Node
            Their graph, whose form is that of the plan's.

        Returns
        -------
        list of tuple of torch.Tensor and list of torch.Tensor, or None
            Shapes (N, n) and (N, m).  None where parameters or attributes are others, or
            where a product has not one row for each example.
        """
        for place, p in self._leaves:
            if nodes[place].variable is not p:
                return None
        for place, name, value in self._attributes:
            if getattr(nodes[place], name) != value:
                return None
        N, dtype = r.shape[0], r.dtype
        if self._one is None:
            self._one = r.new_ones(N, 1)
        inputs, edges = [], []
        for place, name, has_bias in self._products:
            x = getattr(nodes[place], name)
            if type(x) is not torch.Tensor or x.dtype is not dtype or x.shape[0] != N:
                return None
            x = x.detach()
            inputs.append(torch.cat([x, self._one], 1) if has_bias else x)
            edges.append(GradientEdge(nodes[place], 0))
        output = GradientEdge(r.grad_fn, r.output_nr)
        by_output = [
            private.backpropagated(output, edges, v) for v in unit_vectors(r).unbind()
        ]
        if any(g is None for gradients in by_output for g in gradients):
            return None
        return [(x, g) for x, *g in zip(inputs, *by_output, strict=True)]


def unit_vectors(r: Any) -> Any:
    """Return the vectors that pick each output of all examples, shape (C, N, C)."""
    N, C = r.shape
    if C == 1:
        return r.new_ones(1, N, 1)
    vectors = r.new_zeros(C, N, C)
    vectors.diagonal(dim1=0, dim2=2).fill_(1.0)
    return vectors


def _is_leaf(node: Any) -> bool:
    """Whether a node is that of a leaf, or of one's transpose."""
    if node.name() == "TBackward0":
        node = node.next_functions[0][0]
    return _variable(node) is not None


def _keeps_examples(node: Any, N: int) -> bool:
    """Whether the first axis is certainly that of the N examples, before and after a node.

    Told by the lengths of axes; whatever the data are, no number of one example is then
    added to another one's.
    """
    kind = node.name()
    below = [edge for edge in node.next_functions if edge[0] is not None]
    shapes = private.shapes_of(node)
    shapes += [
        private.shapes_of(source)[output]
        for source, output in below
        if not _is_leaf(source)
    ]
    if not _KINDS.fullmatch(kind) or any(shape[:1] != (N,) for shape in shapes):
        return False
    one_rank = len({len(shape) for shape in shapes}) == 1
    if _VIEWS.fullmatch(kind) or (one_rank and not _PERMUTATIONS.fullmatch(kind)):
        return True
    # Another axis as long could be the examples' one.
    return not any(N in shape[1:] for shape in shapes)


def _variable(node: Any) -> Any:
    """Return the tensor whose gradient a node accumulates; None for other nodes."""
    return getattr(node, "variable", None)


def _key(*parameters: Any) -> tuple[int, ...]:
    return tuple(map(id, parameters))
