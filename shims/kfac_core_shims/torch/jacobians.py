"""The Jacobian of residuals by a model's parameters, as rows of its layers.

Uses of a layer that the finder covers come as rows, of derivatives of the network too.  All
other parameters come as the derivatives themselves, so that the Jacobian is exact for any
program.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils.parametrize import is_parametrized

import kfac_core as kc
from kfac_core_shims.torch.finding import find_sites
from kfac_core_shims.torch.graph import calls_below, pull_back
from kfac_core_shims.torch.hooks import install
from kfac_core_shims.torch.layers import Part
from kfac_core_shims.torch.options import require_made
from kfac_core_shims.torch.plans import Plan, form_of, unit_vectors
from kfac_core_shims.torch.sites import ModelBlocks, Site
from kfac_core_shims.torch.uses import find_examples, joined


@functools.cache
def namespace() -> Any:
    """Return PyTorch's namespace."""
    return kc.array.namespaces.own_namespace(torch.empty(0))


@dataclass(eq=False)
class JacobianFinder:
    """Finds the rows of a model's layers below residuals.

    Attributes
    ----------
    model : torch.nn.Module
        The model, which hooks are set on.
    communicator : Communicator or None
        The processes that have layers of the same kind.
    formed : dict of str to str
        Parameters that came as formed derivatives the last time, and why.
    wants_statistics : bool
        Whether calls are recorded.
    is_planned : bool
        Whether the last graph was read by a plan, which needs no recorded calls.
    """

    model: Any
    communicator: Any = None
    formed: dict[str, str] = field(default_factory=dict)
    wants_statistics: bool = False
    share: None = None
    is_planned: bool = False
    _plans: dict[Any, Plan | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_made(self.model)
        named = dict(self.model.named_parameters())
        self._parameters = {name: p for name, p in named.items() if p.requires_grad}
        for name, p in self._parameters.items():
            if p.is_complex():
                raise kc.samples.complex_parameter(name, p.dtype)
        # The Jacobian by what a parametrization reads is not one of rows.
        modules = self.model.named_modules()
        computed = [name for name, m in modules if is_parametrized(m)]
        try:
            self._model_blocks = find_sites(self.model, skip_layers=computed)
        except kc.UnsupportedError:
            self._model_blocks = ModelBlocks()
        install(self, self._model_blocks)
        # What a plan reads: the layers, where there is nothing else to train.
        self._linear = dict(filter(_is_linear, self._model_blocks.sites.items()))
        read = [id(p) for site in self._linear.values() for p in site.trained]
        if {*read} != {*map(id, self.parameters)}:
            self._linear = {}
        self._layers = {name: site.layer for name, site in self._linear.items()}
        # Full blocks sum over all uses of a weight by one example.
        self._blocks = {
            name: kc.Block(site.layer, kc.Full())
            for name, site in self._model_blocks.sites.items()
        }

    @property
    def parameters(self) -> list[Any]:
        """The trained parameters of the model."""
        return list(self._parameters.values())

    def jacobian(
        self,
        residuals: Sequence[Any],
        scales: Sequence[float],
        /,
        *,
        on_host: bool = False,
    ) -> kc.samples.Jacobian:
        """Return the Jacobian of residuals, each term times its scale.

        Parameters
        ----------
        residuals : sequence of torch.Tensor, shapes (N, C)
            Terms of the loss, with their graphs, which stay.
        scales : sequence of float
            Factors on the rows of each term.
        on_host : bool
            Whether rows are to be NumPy arrays, in the same memory, where they can be.

        Returns
        -------
        Jacobian
            The terms one after the other, an example's outputs side by side: R rows in all,
            each an example of one output.
        """
        self.formed = {}
        planned = self._planned(residuals, scales, on_host)
        self.is_planned = planned is not None
        if planned is not None:
            return planned
        terms = [self._rows_of(r) for r in residuals]
        reasons: dict[str, str] = {}
        for _, missing in terms:
            reasons |= missing
        layers: dict[str, Any] = {}
        for name, site in self._model_blocks.sites.items():
            calls = [rows.get(name) for rows, _ in terms]
            if name in reasons or not any(calls):
                continue
            try:
                layers[name] = _joined(site.layer, calls, residuals, scales)
            except kc.UnsupportedError as error:
                reasons[name] = str(error)
        samples = sum(r.numel() for r in residuals)
        J = None
        self._leave(layers, reasons)
        if layers:
            J = _flat_jacobian(layers, samples, on_host)
            # At each step: data may say which examples a residual depends on.
            unlike = self._unlike_autograd(residuals, scales, J)
            why = "the residuals mix examples, as batch norm in training does"
            reasons |= dict.fromkeys(self._of_any_process(unlike, J), why)
        # Their derivatives are formed below, one backward pass for each residual.
        self._leave(layers, reasons)
        covered = {i for name in layers for i in _ids(self._model_blocks.sites[name])}
        uncovered = {n: p for n, p in self._parameters.items() if id(p) not in covered}
        if not uncovered:
            assert J is not None
            return J
        for name, derivative in self._formed(residuals, scales, uncovered).items():
            shape = tuple(self._parameters[name].shape) or (1,)
            layer = kc.Parameters(shapes={"value": shape})
            value = {"value": derivative.reshape(samples, *shape)}
            layers[f"{name} (formed)"] = _layer_jacobian(layer, value)
            sites = self._model_blocks.sites
            known = [n for n in reasons if id(self._parameters[name]) in _ids(sites[n])]
            why = reasons[known[0]] if known else "it is in no layer that is covered"
            self.formed[name] = why
        return _flat_jacobian(layers, samples, on_host)

    def _leave(self, layers: dict[str, Any], reasons: dict[str, str]) -> None:
        """Take layers out of the rows for reasons, and those with parameters in common.

        A parameter is then in the rows with all its parts, or with none and formed.
        """
        sites = self._model_blocks.sites
        formed = {i for name in reasons for i in _ids(sites[name])}
        while leaving := [name for name in layers if _ids(sites[name]) & formed]:
            for name in leaving:
                del layers[name]
                formed |= _ids(sites[name])
                reasons.setdefault(name, "its layer has a parameter that is formed")

    def _planned(
        self, residuals: Sequence[Any], scales: Sequence[float], on_host: bool
    ) -> kc.samples.Jacobian | None:
        """Return the Jacobian where a plan holds for the graph; None elsewhere."""
        r, scale = residuals[0], scales[0]
        known = self._linear and len(residuals) == 1 and self.communicator is None
        if not (known and r.numel() and r.dtype in (torch.float32, torch.float64)):
            return None
        nodes, form = form_of(r)
        key = r.shape, r.dtype, r.device, form
        plan = self._plans.get(key)
        rows = None if plan is None else plan.rows(r, nodes)
        if rows is None and (plan is not None or key not in self._plans):
            # The first graph of this form, or one with other parameters or attributes.
            plan = Plan.of(r, nodes, self._linear)
            rows = None if plan is None else plan.rows(r, nodes)
        # A program may build ever other graphs.
        if len(self._plans) > 64:
            self._plans.clear()
        self._plans[key] = None
        if plan is None or rows is None:
            return None
        rows = _on_host(rows) if on_host else rows
        J = kc.samples.Jacobian.of_rows(self._layers, rows, scale=scale)
        plan.steps += 1
        # True for powers of two: comparing costs a backward pass, which becomes rare.
        due = plan.steps & (plan.steps - 1) == 0
        if due and self._unlike_autograd(residuals, scales, J):
            return None
        self._plans[key] = plan
        return J

    def directions(self, direction: Any, /) -> list[Any]:
        """Return a direction for each of `parameters`, in the parameters' own layouts.

        Parameters
        ----------
        direction : dict of str to dict of str to torch.Tensor or numpy.ndarray
            By layer of the Jacobian.

        Returns
        -------
        list of torch.Tensor
            Views where layouts agree; zero where the residuals do not depend on a
            parameter.
        """
        by_parameter: dict[int, Any] = {}
        for name, parts in direction.items():
            site = self._model_blocks.sites.get(name)
            for role, x in parts.items():
                x = x if isinstance(x, torch.Tensor) else torch.from_numpy(x)
                if site is None:
                    p, rows = self._parameters[name.removesuffix(" (formed)")], None
                else:
                    p, rows = site.parameters[role], site.rows_of(role)
                    x = site.part.to_module(x) if role == "weight" else x
                if rows is not None:
                    if id(p) not in by_parameter:
                        by_parameter[id(p)] = torch.zeros_like(p)
                    target = by_parameter[id(p)][rows]
                    target.copy_(x.reshape(target.shape))
                    continue
                # Calls of PyTorch that change nothing take longer than asking.
                x = x if x.shape == p.shape else x.reshape(p.shape)
                by_parameter[id(p)] = x if x.dtype == p.dtype else x.to(p.dtype)
        return [
            by_parameter[id(p)] if id(p) in by_parameter else torch.zeros_like(p)
            for p in self._parameters.values()
        ]

    def vectors(
        self, directions: Any, J: kc.samples.Jacobian, /
    ) -> dict[str, dict[str, Any]]:
        """Return directions by parameter as vectors of a Jacobian; undoes `directions`."""
        vectors: dict[str, dict[str, Any]] = {}
        for name, jacobian in J.layers.items():
            site = self._model_blocks.sites.get(name)
            if site is not None:
                vectors[name] = site.in_layout(directions)
                continue
            p = self._parameters[name.removesuffix(" (formed)")]
            shape = jacobian.layer.parameter_shapes["value"]
            vectors[name] = {"value": directions[p].reshape(shape)}
        return vectors

    def _rows_of(self, r: Any) -> tuple[dict[str, Any], dict[str, str]]:
        """Return one term's calls by layer, and why layers have none."""
        sites = self._model_blocks.sites
        if not sites:
            return {}, {}
        outputs = get_gradient_edge(r)
        # Empty calls are kept: on several processes one may have no examples.
        reached, reasons = calls_below(
            outputs.node, token=id(self), sites=sites, keep_empty=True
        )
        why = "it is an embedding that also makes the outputs"
        reasons |= {name: why for name, site in sites.items() if site.part.tied}
        for name in {x.call.block for x in reached} & reasons.keys():
            reached = [x for x in reached if x.call.block != name]
        vectors = unit_vectors(r)
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

    def _of_any_process(self, names: list[str], J: kc.samples.Jacobian) -> list[str]:
        """Return the layers that any process names."""
        if self.communicator is None:
            return names
        marks = torch.tensor([float(name in names) for name in J.layers])
        marks = self.communicator.all_reduce(marks).wait()
        return [name for name, mark in zip(J.layers, marks, strict=True) if mark > 0]

    def _unlike_autograd(
        self,
        residuals: Sequence[Any],
        scales: Sequence[float],
        J: kc.samples.Jacobian,
    ) -> list[str]:
        """Return the layers of which ``J^T c`` by rows is not what autograd computes.

        Rows are found from the sum of the residuals, so that one that depends on several
        examples would count for the wrong ones; for an uneven c the two then differ.
        """
        first = residuals[0]
        # An uneven c: equal coefficients hide a residual that counts for another one.
        c = torch.arange(J.samples, dtype=first.dtype, device=first.device).cos()
        pieces = c.split([r.numel() for r in residuals])
        gradients = torch.autograd.grad(
            list(residuals),
            self.parameters,
            [
                piece.reshape(r.shape) * scale
                for piece, r, scale in zip(pieces, residuals, scales, strict=True)
            ],
            retain_graph=True,
            materialize_grads=True,
        )
        by_autograd = dict(zip(self.parameters, gradients, strict=True))
        expected = self.vectors(by_autograd, J)
        if not isinstance(J.like, torch.Tensor):
            c, expected = viewed((c, expected))
        names = {
            name
            for name, differs in kc.samples.unlike(J, c, expected).items()
            if any(differs.values())
        }
        # Parts of a parameter that are in no layer of J must have the derivative zero.
        sites = {name: self._model_blocks.sites[name] for name in J.layers}
        rest: dict[Any, Any] = {}
        for site in sites.values():
            for role, p in site.parameters.items():
                rows = site.rows_of(role)
                if rows is not None:
                    rest.setdefault(p, by_autograd[p].clone())[rows] = 0
        left = {id(p) for p, g in rest.items() if g.any()}
        return [n for n in J.layers if n in names or _ids(sites[n]) & left]

    def _formed(
        self,
        residuals: Sequence[Any],
        scales: Sequence[float],
        uncovered: dict[str, Any],
    ) -> dict[str, Any]:
        """Return derivatives of all residuals by parameters, shape (R, *shape)."""
        parts: dict[str, list[Any]] = {name: [] for name in uncovered}
        for r, scale in zip(residuals, scales, strict=True):
            eye = torch.eye(r.numel(), dtype=r.dtype, device=r.device) * scale
            gradients = [None] * len(uncovered)
            if r.numel():
                gradients = torch.autograd.grad(
                    r,
                    list(uncovered.values()),
                    eye.reshape(r.numel(), *r.shape),
                    retain_graph=True,
                    allow_unused=True,
                    is_grads_batched=True,
                )
            for (name, p), g in zip(uncovered.items(), gradients, strict=True):
                # A parameter that this term does not depend on still has R zero rows.
                if g is None:
                    g = p.new_zeros(r.numel(), *p.shape)
                parts[name].append(g.detach())
        return {name: torch.cat(values) for name, values in parts.items()}


def viewed(value: Any, /) -> Any:
    """Return arrays of NumPy on the same memory, in a structure; None if there are none."""
    return kc.execution.hosted.viewed_on_host(value, xp=namespace())


def _on_host(rows: Any) -> Any:
    """Return rows as NumPy's arrays on the same memory, where they can be."""
    try:
        return [(x.numpy(), [g.numpy() for g in grads]) for x, grads in rows]
    except (RuntimeError, TypeError):
        return rows  # They are on a device.


def _ids(site: Site) -> set[int]:
    """Return the ids of a block's parameters."""
    return {*map(id, site.parameters.values())}


def _is_linear(named: tuple[str, Any]) -> bool:
    """Whether a block is a whole module whose weight is one matrix."""
    site, part = named[1], named[1].part
    whole = site.kind == "dense" and not part.rows and part.to_layer is Part.to_layer
    return whole and all(p.ndim <= 2 for p in site.trained)


def _problem(calls: list[Any], r: Any) -> str | None:
    """Return why calls are not the rows of one example each; None if they are."""
    N, C = r.shape
    if len(calls) > 1:
        return "it is called several times by one example"
    form = calls[0].examples_here, len(calls[0].output_grads)
    if form not in ((N, C), (N * C, 1)):
        return "its rows are not those of the residuals' examples"
    return None


def _layer_jacobian(layer: Any, derivatives: Any) -> kc.samples.LayerJacobian:
    return kc.samples.Jacobian.of({"": layer}, {"": derivatives}).layers[""]


def _flat_jacobian(
    layers: dict[str, Any], samples: int, on_host: bool
) -> kc.samples.Jacobian:
    J = kc.samples.Jacobian(dict(layers), (samples,))
    return viewed(J) or J if on_host else J


def _joined(
    layer: Any, calls: Sequence[Any], residuals: Sequence[Any], scales: Sequence[float]
) -> kc.samples.LayerJacobian:
    """Return the rows of a layer of all terms, one after the other."""
    parts: list[Any] = []
    for of_term in calls:
        rows = None
        if of_term is not None:
            # With one row and one example nothing is scaled.
            alone = {of_term[0].block: 1.0}
            [batch] = kc.integration.batches_in_parts(of_term, rows=1.0, examples=alone)
            rows = _layer_jacobian(layer, batch[of_term[0].block]).rows
        parts.append(rows)
    forms = [tuple(r.shape) for r in residuals]
    rows = kc.samples.joined_rows(parts, forms, scales=scales)
    return kc.samples.LayerJacobian(rows, layer)
