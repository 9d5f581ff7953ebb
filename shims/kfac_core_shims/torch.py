"""K-FAC for PyTorch models: `observe` the outputs, then `step` before the optimizer.

Conventions.  The curvature is that of the likelihood's mean over the R rows of the outputs
(``outputs[..., 0]`` has an element a row).  The g of a layer that saw N examples are scaled
by ``sqrt(N / R)``: its block is right whichever axes are flattened into the batch, and
several calls of a module are further examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar
from warnings import warn

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

import kfac_core as kc

__all__ = ["KFAC"]


class KFAC:
    """Turns a model's gradients into natural gradients, by hooks on its modules.

    Parameters
    ----------
    model : torch.nn.Module
        On its device; a compiled one too, before its first call.
    likelihood : kfac_core.losses.Loss
        Of one row of outputs: ``Categorical()`` for cross-entropy.
    loss : {"mean", "sum"}
        Over the rows of outputs, in the loss that is differentiated.
    fisher : kfac_core.losses.EstimationMode
        ``"gradients"`` draws labels from the model, ``"exact"`` takes all of them,
        ``"empirical"`` reads the caller's own backward pass.
    update_every, refresh_every : int
        Steps between statistics, and between factorizations.
    **options
        Of `kfac_core.Estimator`: ``damping``, ``decay``, ``damping_rule`` and so on.
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
        loss: Any,
        fisher: Any,
        update_every: int = 1,
        refresh_every: int = 1,
        **options: Any,
    ) -> None:
        sources = kc.losses.source_reduction_of(fisher)
        self.loss = kc.Conventions(loss=loss, sources=sources).loss
        self.likelihood, self.mode, self.steps = likelihood, fisher, 0
        self.update_every, self.refresh_every = update_every, refresh_every
        self.model = getattr(model, "_orig_mod", model)
        self._sites: dict[str, _Site] = {}
        self._attach()
        self._forget()
        sites, kinds = self._sites.items(), self.approximations
        blocks = {n: kc.Block(site.layer, kinds[site.layer.kind]) for n, site in sites}
        options |= {"loss": "sum", "sources": sources, "mode": fisher}
        self.estimator = kc.Estimator(blocks, **options)

    def observe(self, outputs: Any, /) -> None:
        """Take the statistics of a forward pass, before its loss is differentiated.

        Parameters
        ----------
        outputs : torch.Tensor, shape (N, ..., P)
            What the likelihood is of, with its graph: the rows that the loss reads.
        """
        calls, self._pending[:] = self._pending[:], []
        self._rows += outputs[..., 0].numel()
        self._observed += [use for _, use in calls]
        if self.mode == "empirical":
            for edge, use in calls:
                edge.node.register_prehook(partial(use.add_at, edge.output_nr))
        elif calls:
            with torch.autocast(outputs.device.type, enabled=False):
                self._pull_back(outputs, *zip(*calls, strict=True))

    def step(self) -> None:
        """Replace ``.grad`` by the natural gradient, where there is a block for it.

        `NotReadyError` where nothing was observed, `NotFiniteError` where a gradient or
        a row is not finite; nothing has changed then.
        """
        observed, rows = [use for use in self._observed if use.grads], self._rows
        self._forget()
        if not rows:
            raise kc.NotReadyError("Call `observe(outputs)` before the backward pass.")
        over = rows if self.loss == "sum" else 1
        scale = rows / over if self.mode == "empirical" else 1.0
        grads, batches = {}, {}
        for name, site in self._sites.items():
            pairs, like = site.parameters.items(), site.layer.parameter_shapes
            if all(p.grad is not None and p.requires_grad for _, p in pairs):
                grads[name] = {n: p.grad.reshape(like[n]) / over for n, p in pairs}
                if not all(g.isfinite().all() for g in grads[name].values()):
                    raise kc.NotFiniteError(f"The gradient of {name!r} is not finite.")
            if uses := [use for use in observed if use.site is site]:
                batches[name] = site.batch(uses, scale * rows**-0.5)
        device = next(self.model.parameters()).device.type
        with torch.no_grad(), torch.autocast(device, enabled=False):
            self.estimator.update(batches)
            if self.steps % self.refresh_every == 0:
                self.estimator.refresh()
            ready = {n: g for n, g in grads.items() if self.estimator.state(n).operator}
            for name, direction in self.estimator.precondition(ready).items():
                for key, p in self._sites[name].parameters.items():
                    p.grad.copy_(direction[key].reshape(p.shape))
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        """Return what a run needs to go on, for ``torch.save``, between two steps."""
        return {"steps": self.steps, "estimator": self.estimator.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Take over a state; `StateError`, and no change, where it does not fit."""
        if type(state.get("steps")) is not int:
            raise kc.StateError(f"Expected a number of `steps` in {[*state]}.")
        self.estimator.load_state_dict(state.get("estimator", {}))
        self.steps = state["steps"]

    def _attach(self) -> None:
        users: dict[int, list[Any]] = {}
        for m in self.model.modules():
            users.setdefault(id(getattr(m, "weight", m)), []).append(type(m).forward)
        of_weight: dict[int, _Site] = {}
        for name, m in self.model.named_modules():
            key = id(getattr(m, "weight", m))
            if site := _found(m, users[key]):
                if key not in of_weight:
                    of_weight[key] = self._sites[name] = site
                hook = partial(self._record, of_weight[key], site.plain)
                m.register_forward_hook(hook, with_kwargs=True)
        taken = {id(p) for s in self._sites.values() for p in s.parameters.values()}
        named = self.model.named_parameters()
        self.skipped = [n for n, p in named if p.requires_grad and id(p) not in taken]
        if self.skipped:
            warn(f"K-FAC leaves the gradients of {self.skipped} alone.", stacklevel=3)

    def _forget(self) -> None:
        self._rows, self._pending, self._observed = 0, list[Any](), list[_Use]()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _record(self, site: _Site, plain: Any, m: Any, a: Any, k: Any, y: Any) -> None:
        if m.training and y.requires_grad and self.steps % self.update_every == 0:
            x = (*a, *k.values())[0].detach()
            if plain is not None:
                x = plain(x).reshape(len(x), *site.flat)
            self._pending.append((get_gradient_edge(y), _Use(site, x)))

    def _pull_back(self, outputs: Any, edges: Any, uses: Any) -> None:
        loss, z, losses = self.likelihood, outputs.detach(), kc.losses
        # A seed of its own for each part of each step, and the same in a resumed run.
        draw = partial(losses.draw_noise, like=z, rng=(self.steps << 40) + self._rows)
        spec = losses.noise_spec(loss, z, mode=self.mode)
        noise = None if spec is None else draw(spec)
        made = losses.vectors(loss, z, mode=self.mode, noise=noise)
        if spec is None and min(len(use.x) for use in uses) < z[..., 0].numel():
            # The rows of one example share a source here, and must not add up.
            spec = losses.NoiseSpec("uniform", tuple(made.vectors.shape[:-1]))
            made = losses.with_random_signs(made, draw(spec))
        pull = partial(torch.autograd.grad, allow_unused=True, retain_graph=True)
        for v in made.vectors.to(outputs.dtype):
            for use, g in zip(uses, pull(outputs, edges, v), strict=True):
                use.add(g)


@dataclass(eq=False)
class _Site:
    """A weight: its layer and parameters; a norm without them, and how x is flattened."""

    layer: Any
    parameters: dict[str, Any]
    padding: int | None
    plain: Any
    flat: tuple[int, ...]

    def batch(self, uses: list[_Use], scale: float) -> kc.Batch:
        x = torch.cat([use.x for use in uses])
        g = torch.cat([torch.stack(use.grads) for use in uses], 1)
        mask = None if self.padding is None else x != self.padding
        return kc.Batch(x, g * scale * len(x) ** 0.5, mask=mask, sources=len(g))


@dataclass(eq=False)
class _Use:
    """One call of a module: x, and the output gradients that came back to it."""

    site: _Site
    x: Any
    grads: list[Any] = field(default_factory=list)

    def add(self, g: Any) -> None:
        if g is not None:
            g = g.detach().to(torch.promote_types(g.dtype, torch.float32))
            self.grads.append(g.reshape(self.x.shape) if self.site.flat else g)

    def add_at(self, index: int, grads: Any) -> None:
        self.add(grads[index])
        self.grads = self.grads and [sum(self.grads)]


def _found(m: Any, users: list[Any]) -> _Site | None:
    """Return how a module is read; None for one, or for a tie of kinds, not known."""
    convs = nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward
    norms = nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d
    kind, weight = users[0] if len({*users}) == 1 else None, getattr(m, "weight", None)
    if not isinstance(weight, nn.Parameter) or not weight.requires_grad:
        return None
    bias: Any = getattr(m, "bias", None)
    own = len(users) == 1 and isinstance(bias, nn.Parameter) and bias.requires_grad
    layer: Any = None
    plain, flat, out, n = None, (), *(*weight.shape, 0)[:2]
    if kind is nn.Linear.forward:
        layer = kc.Dense(in_features=n, out_features=out, bias=own, weight_layout="oi")
    elif kind in convs and m.padding_mode == "zeros":
        pads = m.padding if isinstance(m.padding, str) else [(p, p) for p in m.padding]
        names = "in_channels", "out_channels", "kernel_size", "dilation", "groups"
        options: Any = {n: getattr(m, n) for n in names}
        options |= {"strides": m.stride, "padding": pads, "weight_layout": "oi_spatial"}
        layer = kc.Conv(**options, bias=own, data_layout="channels_first")
    elif kind is nn.Embedding.forward and not (m.sparse or m.scale_grad_by_freq):
        layer = kc.Embedding(num_embeddings=out, features=n, weight_layout="io")
    elif kind in [norm.forward for norm in norms]:
        shape = tuple(getattr(m, "normalized_shape", (len(weight), 1)))
        layer = kc.ScaleShift(scale_shape=shape, shift_shape=shape if own else None)
        flat = (-1, *shape) if hasattr(m, "normalized_shape") else (len(weight), -1)
        plain = deepcopy(m).train().requires_grad_(False)
        plain.reset_parameters()
    if layer is None:
        return None
    parameters = dict(zip(layer.parameter_shapes, (weight, bias), strict=False))
    return _Site(layer, parameters, getattr(m, "padding_idx", None), plain, flat)
