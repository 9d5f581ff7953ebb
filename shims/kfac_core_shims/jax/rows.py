"""Inputs and output gradients of a layer, as the rows of a batch.

Conventions.  A network has its layers' arrays in its own order of axes: that of the
examples anywhere, merged with others or not, the turns of loops in front.  Here they
become ``(N, turns, rows..., features)``.  Where more than the examples lie on one axis and
it is not known how, each row stays an example of its own, and output gradients are scaled
by ``sqrt(rows / N)``: the block of K-FAC that expands shared positions is the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

import kfac_core as kc
from kfac_core_shims.jax.examples import Counts, ExampleAxis
from kfac_core_shims.jax.finding import Arrangement, Site


class Rows:
    """The arrays of one site in the order that its layer has.

    Parameters
    ----------
    site, axis, batch : Site, ExampleAxis, Counts
        The use of a layer, and where its examples are.
    dtype : dtype
        Dtype of the layer's outputs.

    Attributes
    ----------
    separate : int
        Number of turns of loops that are separate uses; 0 without any.
    """

    def __init__(
        self, site: Site, axis: ExampleAxis, batch: Counts, dtype: Any
    ) -> None:
        self.site, self.axis, self.batch, self.dtype = site, axis, batch, dtype
        self.kind = site.layer.kind
        lengths = [loop.length for loop in site.loops]
        sliced = [i for i, loop in enumerate(site.loops) if loop.sliced]
        shared = [i for i in range(len(lengths)) if i not in sliced]
        # A convolution's rows have no further axes: each turn is a use of its own.
        apart = self.kind == "conv"
        self._front = [*sliced, *shared] if apart else sliced
        self._shared = [] if apart else shared
        self.separate = math.prod(lengths[i] for i in self._front) if self._front else 0

    def inputs(self, x: Any, /) -> Any:
        """Return the inputs, shape ``((turns,) N, ..., features)``."""
        arrangement = self.site.x
        if arrangement is None or not arrangement.last:
            x = self._arranged(x, arrangement)
            if self.kind == "embedding" or jnp.issubdtype(x.dtype, jnp.floating):
                return x
            # Integers and booleans, which a product with a weight takes as they are.
            return x.astype(self.dtype)
        ids = self._arranged(x[..., 0], Arrangement(arrangement.rows, (), True))
        if not self.site.tied:
            return ids
        vocabulary, _ = self.site.layer.matrix_shape
        return jax.nn.one_hot(ids, vocabulary, dtype=self.dtype)

    def output_grads(self, g: Any, /, *, sources: bool, reduction: Any) -> Any:
        """Return the output gradients; an axis of sources stays in front of all."""

        def arranged(g: Any) -> Any:
            return self._arranged(g, self.site.y)

        factor = self._factor(g.shape[1:] if sources else g.shape, reduction)
        g = jax.vmap(arranged)(g) if sources else arranged(g)
        return g if factor == 1.0 else g * jnp.asarray(factor, g.dtype)

    def transposed(
        self, x: jax.Array, g: jax.Array, /, *, sources: bool, reduction: Any
    ) -> tuple[Any, Any]:
        """Return the inputs and output gradients of a tied output layer.

        Inputs are what comes back to the logits, in the unit of a summed loss, whatever
        the loss's is, so that they go with the one-hot rows of the embedding.

        Parameters
        ----------
        x, g : array
            From `inputs` and `output_grads`.
        sources, reduction
            See `output_grads`.
        """
        if reduction == "mean_rows":
            raise kc.ConventionError(
                "A weight that both embeds ids and makes logits needs to know the unit of "
                "the loss. Expected reduction='sum' or 'mean', got 'mean_rows'."
            )
        unit = float(self.batch.examples) if reduction == "mean" else 1.0
        if not sources:
            return g * unit, x.astype(g.dtype) / unit
        # Only squares of the inputs count, and they may be summed over the sources.
        others = jnp.zeros((len(g) - 1, *x.shape), g.dtype)
        h = jnp.concatenate([x.astype(g.dtype)[None], others])
        # The table's factor is diagonal: only squares of its inputs count.
        return jnp.sqrt(jnp.sum(g * g, axis=0)), h

    def mask(self, of_mark: jax.Array, x: Any, mask: Any, turned: set[int]) -> Any:
        """Return the mask of a mark, or the network's where the rows have its axes.

        Parameters
        ----------
        of_mark, x, mask : array
            The mark's mask, the inputs, and the network's mask.
        turned : set of int
            See `reversed_lengths`.
        """
        if of_mark is not None:
            return self._arranged(of_mark, None)
        if mask is None or self.kind not in ("dense", "embedding"):
            return None
        lead = 1 if self.separate else 0
        rows = x.shape[lead:] if self.kind == "embedding" else x.shape[lead:-1]
        if tuple(rows[: mask.ndim]) != tuple(mask.shape):
            if rows[0] == mask.size != len(mask):
                raise kc.ConventionError(
                    f"A layer has {rows[0]} rows on one axis, in an unknown order of "
                    f"the axes of `mask`, of shape {tuple(mask.shape)}. Keep the "
                    "examples as an axis of their own, or mark the layer with its mask."
                )
            return None
        if not self.axis.sure:
            raise kc.ConventionError(
                f"A layer has rows {[int(n) for n in rows]}, and several axes of "
                f"length {len(mask)} could be the examples of `mask`. Take another "
                "number of examples, or write the network for any number of them."
            )
        for length in mask.shape:
            if length in turned:
                raise kc.ConventionError(
                    f"A layer sees the axis of `mask` of length {length} reversed, as by "
                    "`jnp.flip`: the mask would count its padding. Reverse by "
                    "`jax.lax.scan(..., reverse=True)`, or mark the layer with its mask."
                )
        wide = mask.reshape(*mask.shape, *(1,) * (len(rows) - mask.ndim))
        return jnp.broadcast_to(wide, (*x.shape[:lead], *rows))

    def turns(
        self, x: Any, g: Any, mask: Any, /, *, sources: bool
    ) -> Iterator[tuple[Any, Any, Any]]:
        """Yield inputs, output gradients and mask of each use."""
        if not self.separate:
            yield x, g, mask
        for i in range(self.separate):
            rows_mask = None if mask is None else mask[i]
            yield x[i], g[:, i] if sources else g[i], rows_mask

    def _factor(self, shape: tuple[int, ...], reduction: Any) -> float:
        """Return the factor on output gradients.

        The curvature is that of the mean over the R rows of the network's outputs; a
        block is that of the mean over what it counts as examples.
        """
        row = (0,) if self.site.y is None else self.site.y.rows
        length = shape[len(self.site.loops) + row[self.axis.row]]
        counted = self.batch.examples if self._split(length) else length
        factor = math.sqrt(counted / self.batch.rows)
        # For a mean, the core takes its number of examples as the number of rows.
        return factor * self.batch.rows / counted if reduction == "mean" else factor

    def _split(self, length: int) -> bool:
        """Whether the examples on an axis of some length can be told apart."""
        known = self.axis.order is not None and self.kind != "conv"
        return known or length == self.batch.examples

    def _arranged(self, x: Any, arrangement: Arrangement | None) -> Any:
        loops = len(self.site.loops)
        if arrangement is None:
            arrangement = Arrangement((0,), tuple(range(1, x.ndim - loops)), True)
        rows = [loops + axis for axis in arrangement.rows]
        first = rows.pop(self.axis.row)
        features = [loops + axis for axis in arrangement.features]
        order = (*self._front, first, *self._shared, *rows, *features)
        x = jnp.transpose(x, order)
        if len(self._front) > 1:
            x = x.reshape(self.separate, *x.shape[len(self._front) :])
        rows_end = x.ndim - len(features)
        if not arrangement.keeps_axes:
            x = x.reshape(*x.shape[:rows_end], math.prod(x.shape[rows_end:]))
        if self.site.window:
            x = jnp.pad(x, [(0, 0)] * rows_end + self.site.window)
        return self._by_example(x, 1 if self.separate else 0)

    def _by_example(self, x: Any, at: int) -> Any:
        """Split an axis that holds more than the examples, where its order is known."""
        n, length = self.batch.examples, x.shape[at]
        if length == n or not self._split(length):
            return x
        k = length // n
        if self.axis.order == "first":
            return x.reshape(*x.shape[:at], n, k, *x.shape[at + 1 :])
        x = x.reshape(*x.shape[:at], k, n, *x.shape[at + 1 :])
        return jnp.moveaxis(x, at + 1, at)


def in_roles(
    uses: Sequence[kc.Batch], sites: Sequence[Site], /, *, mean: bool
) -> tuple[kc.Batch, ...]:
    """Return the uses of a weight, where some multiply by its transpose.

    Parameters
    ----------
    uses : tuple of Batch
        What each saw, as if it had a layer of its own.
    sites : sequence of Site
        The use of each batch.
    mean : bool
        Whether sources are averaged.

    Returns
    -------
    tuple of Batch
        Batches of one layer, for which each source of an example is an example: a
        transposed use has inputs that differ between sources.

    Notes
    -----
    The rows of transposed uses are ``(c g, h / c)``, with c such that the traces of the
    moments of x and of g have the same ratio in both roles: the trace of their Kronecker
    product is then between one half and the whole of the roles' sum.  The exact block does
    not depend on c.
    """
    rows = [_by_source(use, mean) for use in uses]
    if any(site.transposed for site in sites):
        scale = 1.0
        for transposed in (False, True):
            role = [
                use
                for use, site in zip(rows, sites, strict=True)
                if site.transposed == transposed
            ]
            x = sum(jnp.sum(use.inputs**2) for use in role)
            g = sum(jnp.sum(use.output_grads**2) for use in role)
            scale = scale * x / g
        c = jnp.where(jnp.isfinite(scale) & (scale > 0), scale, 1.0) ** 0.25
        rows = [
            replace(use, inputs=use.output_grads * c, output_grads=use.inputs / c)
            if site.transposed
            else use
            for use, site in zip(rows, sites, strict=True)
        ]
    batches = []
    for use, site in zip(rows, sites, strict=True):
        bias = None
        if "bias" in site.parts:
            bias = jnp.full(len(use.inputs), site.adds_bias)
        grads = use.output_grads if use.sources is None else use.output_grads[None]
        batches.append(replace(use, output_grads=grads, bias=bias))
    return tuple(batches)


def _by_source(use: kc.Batch, mean: bool) -> kc.Batch:
    """Return a batch with each source of an example as an example, and padding zero."""
    x, g, mask = use.inputs.astype(use.output_grads.dtype), use.output_grads, use.mask
    if use.sources is not None:
        # The mean over M times as many examples is to be that over N.
        g = g if mean else g * math.sqrt(use.sources)
        x = jnp.broadcast_to(x, (use.sources, *x.shape))
        x, g = x.reshape(-1, *x.shape[2:]), g.reshape(-1, *g.shape[2:])
    if mask is not None:
        repeats = len(x) // len(mask)
        mask = jnp.tile(mask, (repeats, *(1,) * (mask.ndim - 1)))
        x, g = (jnp.where(mask[..., None], rows, 0.0) for rows in (x, g))
    return kc.Batch(x, g, mask, None if use.sources is None else 1)


def joined_uses(uses: tuple[kc.Batch, ...], layer: Any, /) -> kc.Batch:
    """Return several uses of an embedding or a normalization as positions of one."""
    sources = uses[0].sources
    lead = 1 if sources is None else 2
    if layer.kind == "scale_shift":
        event = max(map(len, layer.parameter_shapes.values()))

        def positions(x: Any, lead: int) -> Any:
            return x.reshape(*x.shape[:lead], -1, *x.shape[x.ndim - event :])

        x = jnp.concatenate([positions(use.inputs, 1) for use in uses], axis=1)
        grads = [positions(use.output_grads, lead) for use in uses]
        return kc.Batch(x, jnp.concatenate(grads, axis=lead), None, sources)
    x = jnp.concatenate([u.inputs.reshape(len(u.inputs), -1) for u in uses], axis=1)
    grads = [
        u.output_grads.reshape(
            *u.output_grads.shape[:lead], -1, u.output_grads.shape[-1]
        )
        for u in uses
    ]
    masks = [use.mask for use in uses]
    mask = None
    if any(one is not None for one in masks):
        mask = jnp.concatenate(
            [
                jnp.ones((len(u.inputs), u.inputs[0].size), bool)
                if u.mask is None
                else u.mask.reshape(len(u.inputs), -1)
                for u in uses
            ],
            axis=1,
        )
    return kc.Batch(x, jnp.concatenate(grads, axis=lead), mask, sources)
