"""The Jacobian of residuals by a model's parameters, as rows of its layers.

Uses of a layer that the finder covers come as rows, of derivatives of the network too.  All
other parameters come as the derivatives themselves, so that the Jacobian is exact for any
program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

import kfac_core as kc
from kfac_core_shims.torch.finding import find_sites
from kfac_core_shims.torch.graph import calls_below, pull_back
from kfac_core_shims.torch.hooks import install
from kfac_core_shims.torch.sites import Found, Site
from kfac_core_shims.torch.uses import find_examples, joined

__all__ = ["JacobianFinder"]


@dataclass(eq=False)
class JacobianFinder:
    """Finds the rows of a model's layers below residuals.

    Attributes
    ----------
    model : torch.nn.Module
        The model, which hooks are set on.
    formed : dict of str to str
        Parameters that came as formed derivatives the last time, and why.
    wants_statistics : bool
        Whether calls are recorded.
    """

    model: Any
    formed: dict[str, str] = field(default_factory=dict)
    wants_statistics: bool = False
    share: None = None

    def __post_init__(self) -> None:
        named = dict(self.model.named_parameters())
        self._parameters = {name: p for name, p in named.items() if p.requires_grad}
        try:
            self._found = find_sites(self.model)
        except kc.UnsupportedError:
            self._found = Found()
        install(self, self._found)
        # Full blocks sum over all uses of a weight by one example.
        self._blocks = {
            name: kc.Block(site.layer, kc.Full())
            for name, site in self._found.sites.items()
        }

    @property
    def parameters(self) -> list[Any]:
        """The trained parameters of the model."""
        return list(self._parameters.values())

    def jacobian(
        self, residuals: Sequence[Any], scales: Sequence[float], /
    ) -> kc.samples.Jacobian:
        """Return the Jacobian of residuals, each term times its scale.

        Parameters
        ----------
        residuals : sequence of torch.Tensor, shapes (N, C)
            Terms of the loss, with their graphs, which stay.
        scales : sequence of float
            Factors on the rows of each term.

        Returns
        -------
        Jacobian
            The terms' examples one after the other.
        """
        terms = [self._rows_of(r) for r in residuals]
        reasons: dict[str, str] = {}
        for _, missing in terms:
            reasons |= missing
        layers: dict[str, Any] = {}
        derivatives: dict[str, Any] = {}
        for name, site in self._found.sites.items():
            uses = [rows.get(name) for rows, _ in terms]
            if name in reasons or all(use is None for use in uses):
                continue
            batch = _joined_terms(uses, residuals, scales)
            if batch is None:
                reasons[name] = "its uses differ between the terms of the loss"
                continue
            layers[name], derivatives[name] = site.layer, batch
        for name in self._unlike_autograd(residuals, scales, layers, derivatives):
            reasons[name] = "the residuals mix examples, as batch norm in training does"
            del layers[name], derivatives[name]
        covered = {
            id(p)
            for name in layers
            for p in self._found.sites[name].parameters.values()
        }
        self.formed = {}
        rest = {n: p for n, p in self._parameters.items() if id(p) not in covered}
        formed = self._formed(residuals, scales, rest)
        for name, derivative in formed.items():
            shape = tuple(self._parameters[name].shape) or (1,)
            layers[f"{name} (formed)"] = kc.Parameters(shapes={"value": shape})
            derivatives[f"{name} (formed)"] = {
                "value": derivative.reshape(*derivative.shape[:2], *shape)
            }
            module, _, _ = name.rpartition(".")
            self.formed[name] = reasons.get(module, "it is in no layer that is covered")
        return kc.samples.Jacobian.of(layers, derivatives)

    def directions(self, direction: Any, /) -> dict[Any, Any]:
        """Return a direction by parameter, in the parameters' own layouts.

        Parameters
        ----------
        direction : dict of str to dict of str to torch.Tensor
            By layer of the Jacobian.

        Returns
        -------
        dict of torch.nn.Parameter to torch.Tensor
            Zero where the residuals do not depend on a parameter.
        """
        targets = {p: torch.zeros_like(p) for p in self._parameters.values()}
        for name, parts in direction.items():
            site = self._found.sites.get(name)
            if site is None:
                p = self._parameters[name.removesuffix(" (formed)")]
                targets[p] = parts["value"].reshape(p.shape).to(p.dtype)
            else:
                _place(site, parts, targets)
        return targets

    def vectors(
        self, directions: Any, J: kc.samples.Jacobian, /
    ) -> dict[str, dict[str, Any]]:
        """Return directions by parameter as vectors of a Jacobian; undoes `directions`."""
        vectors: dict[str, dict[str, Any]] = {}
        for name, jacobian in J.layers.items():
            site = self._found.sites.get(name)
            shapes = jacobian.layer.parameter_shapes
            if site is None:
                p = self._parameters[name.removesuffix(" (formed)")]
                vectors[name] = {"value": directions[p].reshape(shapes["value"])}
                continue
            vectors[name] = {}
            for role, shape in shapes.items():
                x, rows = directions[site.parameters[role]], site.rows_of(role)
                x = x if rows is None else x[rows]
                x = site.part.to_layer(x) if role == "weight" else x
                vectors[name][role] = x.reshape(shape)
        return vectors

    def _rows_of(self, r: Any) -> tuple[dict[str, Any], dict[str, str]]:
        """Return one term's calls by layer, and why layers have none."""
        sites = self._found.sites
        if not sites:
            return {}, {}
        outputs = get_gradient_edge(r)
        reached, reasons = calls_below(outputs.node, token=id(self), sites=sites)
        for name in {x.call.block for x in reached} & reasons.keys():
            reached = [x for x in reached if x.call.block != name]
        vectors = _unit_vectors(r)
        try:
            find_examples(outputs, reached, vectors, like=r, blocks=self._blocks)
        except kc.UnsupportedError as error:
            return {}, dict.fromkeys(sites, str(error))
        pull_back(outputs, reached, vectors, like=r)
        rows: dict[str, Any] = {}
        for call in joined([x.call for x in reached]):
            rows.setdefault(call.block, []).append(call)
        for name, calls in rows.items():
            problem = _problem(calls, r)
            if problem:
                reasons[name] = problem
        return {n: c for n, c in rows.items() if n not in reasons}, reasons

    def _unlike_autograd(
        self,
        residuals: Sequence[Any],
        scales: Sequence[float],
        layers: dict[str, Any],
        derivatives: dict[str, Any],
    ) -> list[str]:
        """Return the layers of which ``J^T c`` by rows is not what autograd computes.

        Rows are found from the sum of the residuals, so that one that depends on several
        examples would count for the wrong ones; for an uneven c the two then differ.
        """
        if not layers:
            return []
        count = sum(r.numel() for r in residuals)
        first = residuals[0]
        c = torch.arange(count, dtype=first.dtype, device=first.device).cos()
        pieces = c.split([r.numel() for r in residuals])
        vectors = [
            piece.reshape(r.shape) for piece, r in zip(pieces, residuals, strict=True)
        ]
        gradients = torch.autograd.grad(
            list(residuals),
            self.parameters,
            [v * scale for v, scale in zip(vectors, scales, strict=True)],
            retain_graph=True,
            materialize_grads=True,
        )
        by_autograd = dict(zip(self.parameters, gradients, strict=True))
        J = kc.samples.Jacobian.of(layers, derivatives)
        joined_vectors = torch.cat(vectors).reshape(J.sample_shape)
        by_rows = J.multiply_transposed(joined_vectors)
        expected = self.vectors(by_autograd, J)
        limit = torch.finfo(first.dtype).eps ** 0.5
        return [
            name
            for name, parts in by_rows.items()
            if any(_differ(x, expected[name][role], limit) for role, x in parts.items())
        ]

    def _formed(
        self, residuals: Sequence[Any], scales: Sequence[float], rest: dict[str, Any]
    ) -> dict[str, Any]:
        """Return derivatives of all residuals by parameters, shape (N, C, *shape)."""
        if not rest:
            return {}
        parts: dict[str, list[Any]] = {name: [] for name in rest}
        for r, scale in zip(residuals, scales, strict=True):
            eye = torch.eye(r.numel(), dtype=r.dtype, device=r.device) * scale
            gradients = torch.autograd.grad(
                r,
                list(rest.values()),
                eye.reshape(-1, *r.shape),
                retain_graph=True,
                allow_unused=True,
                is_grads_batched=True,
            )
            for (name, p), g in zip(rest.items(), gradients, strict=True):
                if g is None:
                    g = p.new_zeros(r.numel(), *p.shape)
                parts[name].append(g.detach().reshape(*r.shape, *p.shape))
        return {name: torch.cat(values) for name, values in parts.items()}


def _differ(x: Any, y: Any, limit: float) -> bool:
    y = y.to(x.dtype)
    return bool((x - y).norm() > limit * (x.norm() + y.norm()))


def _place(site: Site, parts: Any, targets: dict[Any, Any]) -> None:
    for role, x in parts.items():
        p, rows = site.parameters[role], site.rows_of(role)
        target = targets[p] if rows is None else targets[p][rows]
        if role == "weight":
            x = site.part.to_module(x)
        target.copy_(x.reshape(target.shape))


def _unit_vectors(r: Any) -> Any:
    """Return the vectors that pick each output of all examples, shape (C, N, C)."""
    C = r.shape[1]
    eye = torch.eye(C, dtype=r.dtype, device=r.device)
    return eye[:, None, :].expand(C, len(r), C).contiguous()


def _problem(calls: list[Any], r: Any) -> str | None:
    """Return why calls are not the rows of one example each; None if they are."""
    C = r.shape[1]
    if any(call.transposed for call in calls):
        return "it is an embedding that also makes the outputs"
    if len(calls) > 1:
        return "it is called several times by one example"
    call = calls[0]
    if call.examples_here != len(r) or len(call.output_grads) != C:
        return "its rows are not those of the residuals' examples"
    return None


def _joined_terms(
    uses: Sequence[Any], residuals: Sequence[Any], scales: Sequence[float]
) -> kc.Batch | None:
    """Return one batch of all terms' examples, with as many positions as the most has."""
    known = [calls[0] for calls in uses if calls is not None]
    forms = {tuple(call.inputs.shape[1:]) for call in known}
    if len(known) == len(uses) and len(forms) == 1:
        xs = [call.inputs for call in known]
        gs = [
            torch.stack(c.output_grads) * s for c, s in zip(known, scales, strict=True)
        ]
        masks = [call.mask for call in known]
        biases = [call.bias for call in known]
        return kc.Batch(
            torch.cat(xs),
            torch.cat(gs, dim=1),
            mask=_cat_or_none(masks, xs),
            sources=len(gs[0]),
            bias=None if all(b is True for b in biases) else _cat_or_none(biases, xs),
        )
    if any(
        call.inputs.ndim > 3 or not call.inputs.is_floating_point() for call in known
    ):
        return None
    return _padded_terms(uses, residuals, scales)


def _padded_terms(
    uses: Sequence[Any], residuals: Sequence[Any], scales: Sequence[float]
) -> kc.Batch:
    """Return the terms' rows side by side, positions that a term lacks masked."""
    known = [calls[0] for calls in uses if calls is not None]
    widest = max(_positions(call) for call in known)
    xs, gs, masks, biases = [], [], [], []
    for calls, r, scale in zip(uses, residuals, scales, strict=True):
        N, C = r.shape
        call = None if calls is None else calls[0]
        like = known[0] if call is None else call
        S = 0 if call is None else _positions(call)
        x = like.inputs.new_zeros(N, widest, like.inputs.shape[-1])
        m = like.output_grads[0].shape[-1]
        g = like.output_grads[0].new_zeros(C, N, widest, m)
        mask = torch.zeros(N, widest, dtype=torch.bool, device=x.device)
        bias = torch.zeros_like(mask)
        if call is not None:
            x[:, :S] = call.inputs.reshape(N, S, -1)
            g[:, :, :S] = torch.stack(call.output_grads).reshape(C, N, S, m) * scale
            mask[:, :S] = True if call.mask is None else call.mask.reshape(N, S)
            has_bias = call.bias
            bias[:, :S] = True if has_bias is True else has_bias.reshape(N, S)
        xs.append(x)
        gs.append(g)
        masks.append(mask)
        biases.append(bias)
    bias = torch.cat(biases)
    every_bias = all(call.bias is True for call in known)
    return kc.Batch(
        torch.cat(xs),
        torch.cat(gs, dim=1),
        mask=torch.cat(masks),
        sources=len(gs[0]),
        bias=None if every_bias else bias,
    )


def _positions(call: Any) -> int:
    return 1 if call.inputs.ndim == 2 else int(call.inputs.shape[1])


def _cat_or_none(parts: Sequence[Any], xs: Sequence[Any]) -> Any:
    """Return arrays of booleans one after the other; None where all are None."""
    if all(part is None for part in parts):
        return None
    filled = [
        torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
        if part is None or part is True
        else part
        for part, x in zip(parts, xs, strict=True)
    ]
    return torch.cat(filled)
