"""Recorded calls of a network's layers, to become batches.

For frameworks in which a layer may be called any number of times, and in which output
gradients come back one after the other.

Conventions.  The curvature is that of the mean over the R rows of the network's outputs.
A call has N examples, whatever axes were flattened into its first one: the output
gradients of a block whose calls saw N examples together are scaled by ``sqrt(N / R)``, so
that its block is right.  Several calls of one layer are further examples.  A call that
multiplied by the transpose of its block's weight, as logits by an embedding's, sees in the
place of x what came back to its outputs, and in the place of g its inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kfac_core import errors
from kfac_core.array import Array, Namespace, Scalar
from kfac_core.array import namespaces as ns
from kfac_core.layers.feeding import detached_array
from kfac_core.layers.rows import Batch


class LayerCall:
    """One call of a layer: its inputs, and the output gradients that came back to it.

    Parameters
    ----------
    block : str
        The name of the block that the layer's weight is of.
    inputs : array, shape (N, ...)
        See `kfac_core.Batch`.
    mask : array of bool, shape (N, ...), optional
        Likewise.
    grad_shape : tuple of int
        The shape that output gradients are brought into; empty where they have theirs.
    grad_scale : float
        What output gradients are multiplied by.
    transposed : bool
        Whether the layer multiplies by the transpose of the block's weight, whose input
        factor is diagonal.
    examples : int, optional
        N of the whole call, if other processes have a part of it.
    bias : bool or array of bool, shape (N, ...)
        Whether this call adds the layer's bias, if the layer has one; of each row.

    Attributes
    ----------
    output_grads : list of array
        Output gradients of one source each, in float32 or wider.
    scaled_by : float
        What output gradients were multiplied by ahead of `batches_of_calls`, which then
        need not copy them all: most often its own factor, of a step of one pass.
    """

    def __init__(
        self,
        block: str,
        inputs: Array,
        /,
        *,
        mask: Array | None = None,
        grad_shape: tuple[int, ...] = (),
        grad_scale: float = 1.0,
        transposed: bool = False,
        examples: int | None = None,
        bias: bool | Array = True,
    ) -> None:
        self.bias = bias
        self.block, self.inputs, self.mask = block, inputs, mask
        self.transposed = transposed
        self.examples = int(inputs.shape[0]) if examples is None else examples
        self.grad_shape, self.grad_scale = grad_shape, grad_scale
        self.output_grads: list[Array] = []
        self.scaled_by = 1.0

    @property
    def has_rows(self) -> bool:
        """Whether output gradients came back to it."""
        return bool(self.output_grads)

    @property
    def examples_here(self) -> int:
        """Number of examples that this process has."""
        return int(self.inputs.shape[0])

    def add_source(self, output_grad: Array | None, /) -> None:
        """Take the output gradient of a further source.

        Parameters
        ----------
        output_grad : array, shape (N, ...), or None
            Its gradient graph is left behind.  None, where a framework says that nothing
            came back, is passed over.
        """
        if output_grad is None:
            return
        xp = ns.own_namespace(output_grad)
        g = detached_array(output_grad)
        g = ns.cast(xp, g, ns.wide_dtype(xp, g.dtype))
        if self.grad_shape:
            g = xp.reshape(g, self.grad_shape)
        if self.grad_scale != 1.0:
            g = g * self.grad_scale
        self.output_grads.append(g)

    def clear(self) -> None:
        """Drop the arrays, which would live as long as the call."""
        self.inputs, self.mask = None, None
        self.output_grads = []

    def add_to_source(self, output_grad: Array | None, /) -> None:
        """Add a further part of the output gradient of a single source.

        Parameters
        ----------
        output_grad : array, shape (N, ...), or None
            As for `add_source`.  A loss that is differentiated in parts adds several.
        """
        self.add_source(output_grad)
        # Backward through one call may come in pieces; a gradient is linear, so they
        # add up to one source and are not two.
        if len(self.output_grads) > 1:
            first, second = self.output_grads
            self.output_grads = [first + second]


def batches_of_calls(
    calls: Iterable[LayerCall], /, *, rows: Scalar
) -> dict[str, Batch]:
    """Return one batch per block from its recorded calls.

    Parameters
    ----------
    calls : iterable of LayerCall
        Calls without sources are left out.  Calls of one block with fewer sources than
        others, as in exact estimation with heads of different sizes, get zeros.
    rows : float
        R, the rows of the network's outputs, or the sum of their weights.

    Returns
    -------
    dict of str to Batch
        For an estimator with ``reduction="sum"``; a single call's inputs are not copied.

    Raises
    ------
    UnsupportedError
        For calls of one block with unlike numbers of positions; see `batches_in_parts`.
    """
    first, *others = batches_in_parts(calls, rows=rows)
    for other in others:
        raise errors.UnsupportedError(
            f"Calls of layers {[*other]} have inputs of unlike shapes, as of sequences of "
            "several lengths, which do not fit one batch. Pad them to one length, or take "
            "the statistics of batches_in_parts."
        )
    return first


def batches_in_parts(
    calls: Iterable[LayerCall],
    /,
    *,
    rows: Scalar,
    scale: Scalar = 1.0,
    examples: Mapping[str, float] | None = None,
) -> list[dict[str, Batch]]:
    """Return batches per block as `batches_of_calls`, in parts of equal shapes.

    Sequences of several lengths, and images of several sizes, do not fit one batch.  The
    statistics of a block are `kfac_core.batch_moments` of its parts, merged.

    Parameters
    ----------
    calls, rows
        As of `batches_of_calls`.
    scale : float
        Further factor on the output gradients.
    examples : mapping of str to float, optional
        N of each block, where other processes have calls too; `rows` is then R of all of
        them.

    Returns
    -------
    list of dict of str to Batch
        At least one; the first has all blocks.
    """
    of_block: dict[str, list[LayerCall]] = {}
    for call in calls:
        if call.has_rows:
            of_block.setdefault(call.block, []).append(call)
    parts: list[dict[str, Batch]] = [{}]
    for name, uses in of_block.items():
        N: float = sum(use.examples_here for use in uses)
        if examples is not None:
            N = examples[name]
        xp = ns.own_namespace(uses[0].inputs)
        by_shape: dict[Any, list[tuple[LayerCall, Array, Array]]] = {}
        for use in uses:
            # G is divided by the block's N later; the root turns that into a mean over R.
            x, g = _pair(use, scale, (N / rows) ** 0.5, xp)
            by_shape.setdefault((x.shape[1:], g.shape[2:]), []).append((use, x, g))
        for place, part in enumerate(by_shape.values()):
            if place == len(parts):
                parts.append({})
            parts[place][name] = _batch(part, xp)
    return parts


def _batch(part: list[tuple[LayerCall, Array, Array]], xp: Namespace) -> Batch:
    """Return one batch of calls with their inputs and output gradients."""
    uses = [use for use, _, _ in part]
    most = max(g.shape[0] for _, _, g in part)
    return Batch(
        _joined([x for _, x, _ in part], xp),
        _joined([_padded(g, most, xp) for _, _, g in part], xp, axis=1),
        mask=_joined_masks(uses, xp),
        sources=int(most),
        bias=_joined_biases(uses, xp),
    )


def _pair(
    use: LayerCall, scale: Scalar, share: Scalar, xp: Namespace
) -> tuple[Array, Array]:
    """Return the inputs and output gradients that the block takes from a call.

    Backpropagated gradients are multiplied by `scale`, and the block's output gradients by
    `share`; the two are different arrays for a transposed layer.
    """
    g = _stacked(use.output_grads, xp)
    if not use.transposed:
        return use.inputs, _times(g, scale * share / use.scaled_by)
    g = _times(g, scale / use.scaled_by)
    # The factor of x is diagonal, so the squares of its entries may be summed over sources.
    x = g[0, ...] if g.shape[0] == 1 else xp.sqrt(xp.sum(g * g, axis=0))
    h = _times(ns.cast(xp, use.inputs, g.dtype)[None, ...], share)
    others = [xp.zeros_like(h)] * (g.shape[0] - 1)
    return x, _joined([h, *others], xp)


def _padded(g: Array, sources: int, xp: Namespace) -> Array:
    """Return output gradients with sources of zeros appended."""
    missing = sources - g.shape[0]
    return xp.concat([g, *[xp.zeros_like(g[:1, ...])] * missing]) if missing else g


def _times(x: Array, factor: Scalar) -> Array:
    known = isinstance(factor, int | float)
    return x if known and factor == 1 else x * factor


def _joined_masks(uses: list[LayerCall], xp: Namespace) -> Array | None:
    known = [use.mask for use in uses if use.mask is not None]
    if not known:
        return None
    shape, device = known[0].shape[1:], ns.device_of(known[0])
    masks = []
    for use in uses:
        mask = use.mask
        if mask is None:
            mask = xp.ones((len(use.inputs), *shape), dtype=xp.bool, device=device)
        masks.append(mask)
    return _joined(masks, xp)


def _joined_biases(uses: list[LayerCall], xp: Namespace) -> Array | None:
    if all(use.bias is True for use in uses):
        return None
    parts = []
    for use in uses:
        device, lead = ns.device_of(use.inputs), use.inputs.shape[:-1]
        bias = use.bias
        if isinstance(bias, bool):
            bias = xp.full(lead, bias, dtype=xp.bool, device=device)
        parts.append(bias)
    return _joined(parts, xp)


def _joined(arrays: list[Array], xp: Namespace, axis: int = 0) -> Array:
    return xp.concat(arrays, axis=axis) if arrays[1:] else arrays[0]


def _stacked(arrays: list[Array], xp: Namespace) -> Array:
    return xp.stack(arrays) if arrays[1:] else arrays[0][None, ...]
