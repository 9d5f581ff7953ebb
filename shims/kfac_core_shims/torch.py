"""K-FAC for PyTorch models: `observe` the outputs, then `step` before the optimizer.

Conventions.  The rows are the elements of ``outputs[..., 0]``; see
`kfac_core.integration.batches_of_calls`.  A module's call is recorded in its own
node of the graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar
from warnings import warn
from weakref import ref

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

import kfac_core as kc

__all__ = ["KFAC"]


class KFAC(kc.integration.NaturalGradient):
    """K-FAC for a PyTorch model: replaces gradients by natural gradients.

    Call `observe` on the outputs in each forward pass, and `step` between
    ``loss.backward()`` and ``optimizer.step()``.

    Parameters
    ----------
    model : torch.nn.Module
        Model on its device; if compiled, before its first call.
    likelihood : kfac_core.losses.Loss
        Likelihood of one row of outputs: ``Categorical()`` for cross-entropy.
    reduction : {"mean", "sum"}
        Reduction over the rows of outputs, in the loss that is differentiated.
    fisher : kfac_core.losses.EstimationMode
        ``"gradients"`` draws labels from the model, ``"exact"`` sums over all of
        them, ``"empirical"`` uses the gradients of the caller's backward pass.
    update_every, refresh_every : int
        Steps between statistics, and between factorizations.
    **options
        Options of `kfac_core.Estimator`: ``damping``, ``decay``, ``damping_rule`` and so
        on.
    """

    approximations: ClassVar[dict[str, kc.Approximation]] = {
        **dict.fromkeys(("dense", "conv"), kc.Kronecker()),
        "embedding": kc.Kronecker(input="diagonal"),
        "scale_shift": kc.Diagonal(),
    }

    def __init__(
        self,
        model: Any,
        *,
        likelihood: kc.losses.Loss,
        reduction: Any,
        fisher: Any,
        update_every: int = 1,
        refresh_every: int = 1,
        **options: Any,
    ) -> None:
        every = {"update_every": update_every, "refresh_every": refresh_every}
        options |= {"sources": kc.losses.source_reduction_of(fisher), "mode": fisher}
        self.model, self.likelihood = getattr(model, "_orig_mod", model), likelihood
        self.skipped: list[str] = []
        self._sites: dict[str, _Site] = {}
        self._hooks = [*self._hooked()]
        kinds, sites = self.approximations, self._sites.items()
        blocks = {n: kc.Block(site.layer, kinds[site.layer.kind]) for n, site in sites}
        estimator = kc.Estimator(blocks, reduction="sum", **options)
        super().__init__(estimator, reduction=reduction, **every)
        self._rows, self._calls = 0, dict[kc.integration.LayerCall, None]()
        self._name_others(self._sites)

    def observe(self, outputs: Any, /) -> None:
        """Record a forward pass, before its loss is differentiated.

        Parameters
        ----------
        outputs : torch.Tensor, shape (N, ..., P)
            Outputs with their graph: the rows that the loss and the likelihood read.
        """
        if len(shape := tuple(outputs.shape)) < 2:
            raise kc.ShapeError(f"Expected `outputs` of (N, ..., P), got {shape}.")
        found = self._calls_below(outputs) if self.wants_statistics else []
        calls = dict.fromkeys(call for _, call in found)
        if self._calls.keys() & calls.keys():
            raise kc.UnsupportedError(
                "These `outputs` depend on calls that were observed already. Observe all "
                "that is made in one forward pass as one tensor."
            )
        self._rows += outputs[..., 0].numel()
        self._calls |= calls
        if self.estimator.mode == "empirical":
            for edge, call in found:
                edge.node.register_prehook(partial(_add, call, edge.output_nr))
        elif found:
            with torch.autocast(outputs.device.type, enabled=False):
                self._pull_back(outputs, *zip(*found, strict=True))

    def step(self) -> None:
        """Replace ``.grad`` of parameters in a block by the natural gradient.

        Raises `NotReadyError` if nothing was observed, and `NotFiniteError` if a gradient
        or a row is not finite; gradients and state are then unchanged.
        """
        calls, rows, refreshes, given = self._calls, self._rows, self.wants_refresh, {}
        self._rows, self._calls = 0, {}
        for name, site in self._sites.items():
            pairs, like = site.parameters.items(), site.layer.parameter_shapes
            if all(p.grad is not None and p.requires_grad for _, p in pairs):
                given[name] = {n: p.grad.reshape(like[n]) for n, p in pairs}
        device = next(self.model.parameters()).device.type
        with torch.no_grad(), torch.autocast(device, enabled=False):
            found = self.directions(given, calls, rows=rows)
            for name, direction in found.items():
                for key, p in self._sites[name].parameters.items():
                    p.grad.copy_(direction[key].reshape(p.shape))
        if refreshes:
            self._name_others(found)

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()

    def _hooked(self) -> Iterator[Any]:
        users: dict[int, list[Any]] = {}
        for m in self.model.modules():
            if isinstance(weight := getattr(m, "weight", None), nn.Parameter):
                kind = type(m).forward, m.extra_repr()
                users.setdefault(id(weight), []).append(kind)
        of_weight: dict[int, _Site] = {}
        for name, m in self.model.named_modules():
            key = id(getattr(m, "weight", None))
            if key not in of_weight and (site := _found(m, users.get(key, []))):
                site.name, site.key, site.kfac = name, key, ref(self)
                of_weight[key] = self._sites[name] = site
            if key in of_weight:
                yield m.register_forward_hook(of_weight[key], with_kwargs=True)

    def _name_others(self, blocks: Iterable[str]) -> None:
        """Warn once of each trained parameter that is in none of these blocks."""
        known = {id(p) for n in blocks for p in self._sites[n].parameters.values()}
        others = []
        for name, p in self.model.named_parameters():
            trained = p.requires_grad and (p.grad is not None or self.steps == 0)
            if trained and id(p) not in known and name not in self.skipped:
                others.append(name)
        self.skipped += others
        if others:
            warn(f"K-FAC leaves the gradients of {others} alone.", stacklevel=3)

    def _calls_below(self, outputs: Any) -> list[tuple[Any, kc.integration.LayerCall]]:
        """Return the calls in a graph, of weights that nothing but calls has used."""
        found, uses, seen, todo = [], Counter[int](), set(), [outputs.grad_fn]
        while todo:
            if (node := todo.pop()) and node not in seen:
                seen.add(node)
                calls = node.metadata.get(id(self), ())
                found += [(GradientEdge(node, index), call) for index, call in calls]
                below = [node for node, _ in node.next_functions]
                uses.update(id(getattr(node, "variable", None)) for node in below)
                todo += below
        own = Counter(call.block for _, call in found)
        whole = [n for n in own if uses[self._sites[n].key] <= own[n]]
        return [(edge, call) for edge, call in found if call.block in whole]

    def _pull_back(self, outputs: Any, edges: Any, calls: Any) -> None:
        z, mode = outputs.detach(), self.estimator.mode
        assert mode is not None
        # Where the rows of one example share a source, they must not add up.
        shared = min(len(call.inputs) for call in calls) < z[..., 0].numel()
        # A seed of its own for each part of each step, and the same in a resumed run.
        options = {"shared": shared, "seed": (self.steps << 40) + self._rows}
        made = kc.losses.drawn_vectors(self.likelihood, z, mode=mode, **options)
        pull = partial(torch.autograd.grad, allow_unused=True, retain_graph=True)
        for v in made.vectors.to(outputs.dtype):
            for call, g in zip(calls, pull(outputs, edges, v), strict=True):
                call.add_source(g)


def _add(call: kc.integration.LayerCall, index: int, grads: Any) -> None:
    # A pass that makes a graph, as for a penalty, is not the loss's own.
    if not torch.is_grad_enabled():
        call.add_to_source(grads[index])


@dataclass(eq=False)
class _Site:
    """Layer and parameters of a weight, and the hook of its modules; copies are inert."""

    layer: Any = None
    parameters: dict[str, Any] = field(default_factory=dict)
    padding: int | None = None
    plain: Any = None
    flat: tuple[int, ...] = ()
    key: int = 0
    name: str = ""
    kfac: Any = bool

    def __reduce__(self) -> Any:
        return _Site, ()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, m: Any, a: Any, k: Any, y: Any) -> None:
        """Record a call, in the graph node of its output."""
        if (kfac := self.kfac()) and y.requires_grad and kfac.wants_statistics:
            x = (*a, *k.values())[0].detach()
            mask = None if self.padding is None else x != self.padding
            if self.plain:
                self.plain.training = m.training
                for copied, buffer in zip(
                    self.plain.buffers(), m.buffers(), strict=True
                ):
                    copied.copy_(buffer)
                x = self.plain.forward(x).reshape(len(x), *self.flat)
            shape = self.flat and x.shape
            call = kc.integration.LayerCall(self.name, x, mask=mask, grad_shape=shape)
            edge = get_gradient_edge(y)
            edge.node.metadata.setdefault(id(kfac), []).append((edge.output_nr, call))


def _found(m: Any, users: list[Any]) -> _Site | None:
    """Return how a module is read; None for one, or for a tie of unlike ones, not known."""
    convs = nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward
    norms = nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d
    if len({*users}) != 1 or not m.weight.requires_grad:
        return None
    kind, weight, bias = users[0][0], m.weight, getattr(m, "bias", None)
    own = len(users) == 1 and isinstance(bias, nn.Parameter) and bias.requires_grad
    layer: Any
    plain, flat, out, n = None, (), *(*weight.shape, 0)[:2]
    if kind is nn.Linear.forward:
        layer = kc.Dense(in_features=n, out_features=out, bias=own, weight_layout="oi")
    elif kind in convs and m.padding_mode == "zeros":
        options: Any = {n: getattr(m, n) for n in ("padding", "dilation", "groups")}
        options |= {"strides": m.stride, "bias": own, "channels": "first"}
        layer = kc.integration.framework_conv(weight.shape, **options)
    elif kind is nn.Embedding.forward and not (m.sparse or m.scale_grad_by_freq):
        layer = kc.Embedding(num_embeddings=out, features=n, weight_layout="io")
    elif kind in [norm.forward for norm in norms]:
        shape = tuple(getattr(m, "normalized_shape", (len(weight), 1)))
        layer = kc.ScaleShift(scale_shape=shape, shift_shape=shape if own else None)
        flat = (-1, *shape) if hasattr(m, "normalized_shape") else (len(weight), -1)
        plain = deepcopy(m).requires_grad_(False)
        plain.reset_parameters()
    else:
        return None
    parameters = dict(zip(layer.parameter_shapes, (weight, bias), strict=False))
    return _Site(layer, parameters, getattr(m, "padding_idx", None), plain, flat)
