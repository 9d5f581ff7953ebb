"""Reading the graph of a model's outputs: which calls they depend on, and how.

A forward hook leaves each call in the node of the graph that made its output.  From the
outputs that are observed, the graph is walked down, and so finds exactly the calls that the
outputs depend on.  It also shows every other use of a weight: a weight that something else
than its modules has used is either read there too (a matrix product), or left alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

import kfac_core as kc
from kfac_core_shims.torch import private
from kfac_core_shims.torch.sites import Site

__all__ = ["Reached", "RecordedCall", "calls_below", "pull_back"]

_CAST, _TRANSPOSED = "ToCopyBackward0", ("TBackward0", "TransposeBackward0")
_SPLITS = "SplitBackward0", "SplitWithSizesBackward0"
_PRODUCTS = {"MmBackward0": (1, "self"), "AddmmBackward0": (2, "mat1")}


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
    """

    def __init__(self, block: str, inputs: Any, /, **options: Any) -> None:
        super().__init__(block, inputs, **options)
        self.version = _version(inputs)
        self.own_scale = self.grad_scale
        self.is_taken = False

    def again(self) -> RecordedCall:
        """Return the same call without output gradients, for those of another pass."""
        if self.inputs is None:
            raise kc.UnsupportedError(
                f"Outputs of several forward passes depend on one call of layer "
                f"{self.block!r}, whose rows were let go of after the first backward pass. "
                "Keep its graph (retain_graph=True), or add the losses and differentiate "
                "their sum."
            )
        found = RecordedCall(
            self.block,
            self.inputs,
            mask=self.mask,
            grad_shape=self.grad_shape,
            grad_scale=self.own_scale,
            transposed=self.transposed,
            examples=self.examples,
            bias=self.bias,
        )
        found.version = self.version
        return found

    def require_unchanged(self) -> None:
        """Raise `UnsupportedError` if the inputs were written to after the call.

        Autograd notices that only of what it has saved itself until the backward pass.
        """
        if self.inputs is not None and _version(self.inputs) != self.version:
            raise kc.UnsupportedError(
                f"The input of a call of layer {self.block!r} was written to before its "
                "statistics were taken: in place, as in `x += layer(x)`, or as a buffer "
                "that holds the next part of the batch. Write `x = x + layer(x)`, or call "
                "the model with a copy, x.clone()."
            )


def _version(x: Any) -> int:
    return 0 if x.is_inference() else int(x._version)


@dataclass(frozen=True)
class Reached:
    """A call that outputs depend on.

    Attributes
    ----------
    edge : GradientEdge
        Where the gradient of the call's output comes back.
    call : RecordedCall
        Its inputs.
    columns : slice or None
        Which features of that gradient are the block's; None for all.
    share : callable, optional
        Returns this process's examples of that gradient, where all have the same.
    """

    edge: Any
    call: RecordedCall
    columns: slice | None = None
    share: Callable[[Any], Any] | None = None

    def take(self, g: Any) -> Any:
        """Return the block's features of a gradient that came back."""
        if g is None:
            return None
        if self.share is not None:
            g = self.share(g)
        return g if self.columns is None else g[..., self.columns]


def calls_below(
    root: Any,
    /,
    *,
    token: int,
    sites: Mapping[str, Site],
    share: Callable[[Any], Any] | None = None,
    keep_empty: bool = False,
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

    Returns
    -------
    reached : list of Reached
        Calls of all blocks whose every use is known.
    reasons : dict of str to str
        Blocks with a use that is not, and what it is.
    """
    walk = _Walk(root, token)
    own = Counter(call.block for _, call in walk.recorded)
    whole: dict[str, list[Reached]] = {name: [] for name in own}
    for edge, call in walk.recorded:
        whole[call.block].append(Reached(edge, call, share=share))
    reached: list[Reached] = []
    reasons: dict[str, str] = {}
    for name, site in sites.items():
        uses = [0, *(walk.uses[id(site.read_as(role))] for role in site.parameters)]
        if max(uses) == 0 and name not in own:
            continue
        if site.part.rows or max(uses) > own[name]:
            found = walk.products_of(site)
            if isinstance(found, str):
                reasons[name] = found
            else:
                reached += found
        else:
            reached += whole[name]
    # Experts that got no token have nothing to say.
    return [r for r in reached if keep_empty or r.call.examples], reasons


class _Walk:
    """The part of a graph that is below a node."""

    def __init__(self, root: Any, token: int) -> None:
        self.recorded: list[tuple[GradientEdge, Any]] = []
        self.leaves: dict[int, Any] = {}
        self.seen: set[Any] = set()
        incoming: dict[Any, int] = defaultdict(int)
        readers: list[tuple[Any, int]] = []
        todo = [root]
        while todo:
            node = todo.pop()
            if node in self.seen:
                continue
            self.seen.add(node)
            for index, call in node.metadata.get(token, ()):
                self.recorded.append((GradientEdge(node, index), call))
            for below, _ in node.next_functions:
                if below is None:
                    continue
                incoming[below] += 1
                kind: Any = type(below)
                if not _is_leaf(kind):
                    todo.append(below)
                else:
                    variable = below.variable
                    readers.append((node, id(variable)))
                    self.leaves[id(variable)] = below
        self.uses: Counter[int] = Counter()
        for node, key in readers:
            # Autocast casts a weight once, and each of its uses reads the cast.
            cast = node.name() == _CAST
            self.uses[key] += max(1, incoming[node]) if cast else 1
        self._parents: dict[Any, list[tuple[Any, int, int]]] | None = None
        self._saved: dict[Any, Any] = {}

    @property
    def parents(self) -> dict[Any, list[tuple[Any, int, int]]]:
        """For each node those above it: ``(node, its argument, output that it reads)``."""
        if self._parents is None:
            self._parents = defaultdict(list)
            for node in self.seen:
                for place, (below, output) in enumerate(node.next_functions):
                    if below is not None:
                        self._parents[below].append((node, place, output))
        return self._parents

    def products_of(self, site: Site) -> list[Reached] | str:
        """Return the matrix products that read a weight, or what else reads it."""
        layer = site.layer
        if site.kind == "embedding" and layer.bag:
            return "it was called with `offsets`, 1-D ids or `per_sample_weights`"
        if site.kind == "embedding":
            return (
                "it is an embedding whose weight something else reads; to make logits, "
                "give nn.Linear this weight before KFAC is made"
            )
        if layer.kind != "dense" or "weight" not in site.parameters:
            return "its weight is used outside of its module's forward"
        reading: list[tuple[Any, slice | None]] = []
        for node, place, rows, flipped in self._consumers(site, "weight"):
            layout = "oi" if flipped else "io"
            slot, _ = _PRODUCTS.get(node.name(), (None, ""))
            if place != slot or layout != layer.weight_layout or not _is_plain(node):
                return f"its weight is read by {node.name()} in the graph"
            reading.append((node, rows))
        found: list[Reached] = []
        inputs = self._inputs_of([node for node, _ in reading])
        for (node, rows), x in zip(reading, inputs, strict=True):
            call = RecordedCall(site.name, x)
            found.append(Reached(GradientEdge(node, 0), call, rows))
        if "bias" in site.parameters:
            adding = [node for node, *_ in self._consumers(site, "bias")]
            nodes = [reached.edge.node for reached in found]
            if len(adding) != len(found):
                if any(node not in nodes for node in adding):
                    return f"its weight has {len(found)} uses, its bias {len(adding)}"
                for reached in found:
                    reached.call.bias = reached.edge.node in adding
        return found

    def _inputs_of(self, nodes: list[Any]) -> list[Any]:
        """Return the inputs that matrix products have saved, each read once."""

        def read() -> None:
            for node in nodes:
                if node not in self._saved:
                    _, name = _PRODUCTS[node.name()]
                    self._saved[node] = private.saved(node, name).detach()

        if private.backward_pass() < 0:
            read()
        elif any(node not in self._saved for node in nodes):
            # Checkpoints give what they recompute to one reader in each backward pass, and
            # that has to be the product itself.  In a thread there is none.
            with ThreadPoolExecutor(1) as thread:
                thread.submit(read).result()
        return [self._saved[node] for node in nodes]

    def _consumers(
        self, site: Site, role: str
    ) -> Iterator[tuple[Any, int, slice | None, bool]]:
        """Yield what reads a block's rows of a parameter.

        Each is ``(node, its argument, the block's rows among those read, transposed)``.
        """
        leaf = self.leaves.get(id(site.read_as(role)))
        size = site.parameters[role].shape[0]
        own = site.rows_of(role) or slice(0, size)
        todo: list[tuple[Any, int, int, bool, int | None]] = []
        if leaf is not None:
            todo.append((leaf, 0, size, False, None))
        while todo:
            node, start, stop, flipped, only = todo.pop()
            for parent, place, output in self.parents[node]:
                if only is not None and output != only:
                    continue
                name = parent.name()
                if name == _CAST:
                    todo.append((parent, start, stop, flipped, None))
                elif name in _TRANSPOSED or _swaps(parent, name):
                    todo.append((parent, start, stop, not flipped, None))
                elif (
                    name in _SPLITS
                    and not flipped
                    and private.saved(parent, "dim") == 0
                ):
                    for piece, (low, high) in enumerate(_pieces(parent, start, stop)):
                        if low < own.stop and own.start < high:
                            todo.append((parent, low, high, flipped, piece))
                else:
                    exact = (start, stop) == (own.start, own.stop)
                    rows = slice(own.start - start, own.stop - start)
                    yield parent, place, None if exact else rows, flipped


@cache
def _is_leaf(kind: Hashable) -> bool:
    """Whether nodes of a class accumulate the gradient of a tensor."""
    return hasattr(kind, "variable")


def _swaps(node: Any, name: str) -> bool:
    return name == "PermuteBackward0" and len(private.saved(node, "dims")) == 2


def _is_plain(node: Any) -> bool:
    """Whether a product is neither scaled nor added to a scaled matrix."""
    return bool(private.saved(node, "alpha", 1) == private.saved(node, "beta", 1) == 1)


def _pieces(node: Any, start: int, stop: int) -> Iterator[tuple[int, int]]:
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
    edges = [r.edge for r in reached]
    for v in vectors.to(like.dtype):
        try:
            found = torch.autograd.grad(
                [outputs], edges, [v], allow_unused=True, retain_graph=True
            )
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            raise kc.UnsupportedError(
                "A checkpoint with use_reentrant=True lies between the outputs and a "
                "covered layer, and nothing can be backpropagated through it but a loss. "
                "Take use_reentrant=False, or fisher='empirical'."
            ) from error
        for r, g in zip(reached, found, strict=True):
            r.call.add_source(r.take(g))
