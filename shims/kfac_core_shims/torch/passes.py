"""Which forward passes a step counts, and what came back through them.

The rule.  A step counts the forward passes of the model that ``backward()`` went through
since the last step, except for those whose gradients ``zero_grad`` has cleared, and those
with other parameters than the last of them.
`KFAC.discard` forgets them.  Outputs that are given to `KFAC.observe` count as soon as
anything is differentiated through them to the parameters, and nothing else counts in that
step.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

import kfac_core as kc
from kfac_core_shims.torch import graph, private, uses
from kfac_core_shims.torch.coverage import Coverage
from kfac_core_shims.torch.gradients import Gradients, drawing, is_drawn_through
from kfac_core_shims.torch.graph import Reached
from kfac_core_shims.torch.loss_checks import LossCheck
from kfac_core_shims.torch.observation import Observation
from kfac_core_shims.torch.weights import RowWeights, coarseness


class Pass:
    """One forward pass of the model, which a backward pass may reach.

    Parameters
    ----------
    recorder : PassRecorder
        Told of the backward pass.
    picked : torch.Tensor
        The outputs that the likelihood is of.
    returned : object
        What the model returned.
    replay : tuple or None
        As of `Observation`.
    """

    def __init__(
        self, recorder: PassRecorder, picked: Any, returned: Any, replay: Any
    ) -> None:
        self.recorder, self.is_plain = weakref.ref(recorder), picked is returned
        self.edge: Any = get_gradient_edge(picked)
        self.z = picked.detach()
        self.base: Any = None
        if type(returned) is torch.Tensor and not self.is_plain:
            self.base = returned.detach()
        self.version = private.version(self.z)
        self.is_derived = False
        self.replay = replay
        self.handle: Any = None
        self.observation: Observation | None = None
        self.task = -1
        self.is_watched = False

    def arrived(self, gradient: Any) -> None:
        """Take a gradient that reached one of the model's outputs."""
        recorder = self.recorder()
        # Vectors that K-FAC backpropagates itself come here too.
        if recorder is None or is_drawn_through(recorder.model):
            return
        if torch.is_grad_enabled():
            if self.edge is not None and not self.is_watched:
                self.is_watched = True
                recorder.watch_derivatives(self.edge.node)
            recorder.coverage.note(
                "a pass was differentiated with create_graph=True, as for a penalty or a "
                "residual, which does not count; call loss.backward() without it, and "
                "observe(residual) if the loss reads derivatives of the model"
            )
            return
        task = private.backward_pass()
        # It may have reached another output before.
        if task == self.task or not recorder.gradients.begin_pass():
            return
        self.task = task
        if self.observation is not None and not self.observation.is_forgotten:
            self.observation.note_further_part(gradient if self.is_plain else None)
        elif self.edge is None:
            return  # The graph was released.
        elif self.is_plain:
            self.finish(gradient)
        elif self.is_derived:
            # Tensors derived only by `output` receive no gradient, but that of a view is
            # part of its base's.
            self.finish(_gradient_of_view(self.z, self.base, gradient))
        else:
            # A loss inside the model may read what the outputs are a cast of.
            self.edge = graph.below_casts(self.edge)
            recorder.hold(self)
            self.handle = self.edge.node.register_prehook(self.reached)

    def reached(self, gradients: Any) -> None:
        """Take the gradients that reached the node of the picked tensor."""
        if not torch.is_grad_enabled() and self.edge is not None:
            self.finish(gradients[self.edge.output_nr], passing=gradients)

    @private.outside_compilers
    def finish(self, gradient: Any, passing: Any = None) -> None:
        """Observe the outputs, and release the graph unless it is kept.

        `passing` are the gradients that the outputs' own node is about to be called with.
        """
        recorder, edge, z, replay = self.recorder(), self.edge, self.z, self.replay
        if recorder is None or edge is None:
            return
        if private.is_graph_kept():
            recorder.hold(self)
            self._remove()
        else:
            self.drop()
        if private.version(z) != self.version:
            raise kc.UnsupportedError(
                "The model's outputs were modified in place after its forward pass, so "
                "they cannot be observed. Write y = y + x instead of y += x."
            )
        if gradient is not None:
            z = z.to(gradient.device, gradient.dtype)
        self.observation = recorder.observe_pass(edge, z, gradient, passing, replay)

    def drop(self) -> None:
        """Release the graph."""
        self._remove()
        self.edge = self.z = self.base = self.replay = None

    def _remove(self) -> None:
        if self.handle is not None:
            self.handle.remove()
        self.handle = None


class PassRecorder:
    """The passes since the last step, with their output gradients.

    Parameters
    ----------
    kfac : KFAC
        Options, the schedule, and the blocks; held weakly.
    gradients : Gradients
        The ``.grad`` of the blocks' parameters.
    loss : LossCheck
        Looks at the gradients of outputs.
    coverage : Coverage
        Collects the reasons why passes were not observed.
    samples, positions
        As of `KFAC`.

    Attributes
    ----------
    random : RandomState or None
        Random numbers before the model's last call, where these are kept.
    observations : list of Observation
        Passes since the last step.
    derived : set of str
        Layers through which the loss read derivatives of the model.
    is_by_hand : bool
        Whether these were given to `KFAC.observe`.
    is_called : bool
        Whether the model was called since the last step.
    drawn : int
        Rows for which labels were drawn, in the seed of the next.
    """

    def __init__(
        self,
        kfac: Any,
        *,
        gradients: Gradients,
        loss: LossCheck,
        coverage: Coverage,
        samples: int,
        positions: kc.losses.Positions,
    ) -> None:
        self._kfac = weakref.ref(kfac)
        self.model, self.token = kfac.model, id(kfac)
        self.gradients, self.loss, self.coverage = gradients, loss, coverage
        self.mode: Any = kfac.estimator.mode
        self.samples, self.positions = samples, positions
        self.random: Any = None
        self.observations: list[Observation] = []
        self.derived: set[str] = set()
        self.is_by_hand = self.is_called = False
        self.drawn = 0
        self._with_graphs = weakref.WeakSet[Pass]()

    @property
    def kfac(self) -> Any:
        """The `KFAC` whose steps the passes are for."""
        kfac = self._kfac()
        assert kfac is not None, "hooks run while their owner lives"
        return kfac

    @property
    def counted(self) -> list[Observation]:
        """Observed passes that the next step counts."""
        return [o for o in self.observations if o.is_differentiated]

    @property
    def loss_factor(self) -> float | None:
        """Factor from the negative log-likelihood to the loss, in the first pass."""
        return self.observations[0].loss_factor if self.observations else None

    def hold(self, started: Pass, /) -> None:
        """Remember a pass that holds a graph, for `forget` to release."""
        self._with_graphs.add(started)

    def forget_cleared(self, *, changed: bool) -> None:
        """Forget passes whose gradients were cleared, or whose parameters `changed`."""
        if self.is_by_hand and not changed:
            return
        to_come = [o for o in self.observations if not o.is_differentiated]
        for observation in self.counted:
            observation.forget()
        self.observations, self.derived = to_come, set()
        self.kfac.give_up()

    def drop_passes(self) -> None:
        """Release the graphs of the model's own passes."""
        for started in [*self._with_graphs]:
            started.drop()
        self._with_graphs.clear()

    def watch_derivatives(self, root: Any, /) -> None:
        """Note the layers of outputs whose derivatives a loss will read.

        `root` is the node of the outputs, which are being differentiated with
        ``create_graph=True``.
        """
        recorded = graph.Walk(root, self.token).recorded
        blocks = {call.block for _, call in recorded}
        for edge, _ in recorded:
            came = partial(_came_with_graph, weakref.ref(self), blocks)
            edge.node.register_hook(came)

    def watch_tangents(self, outputs: Any, /) -> None:
        """Note all layers where a loss will read derivatives of outputs in forward mode."""
        came = partial(_came_with_graph, weakref.ref(self), self.kfac.sites)
        for tangent in private.tangents(outputs):
            _watch_derivative(weakref.ref(self), self.kfac.sites, tangent)
            # A reverse pass over it does not read the tangent itself.
            for root in filter(None, (x.grad_fn for x in private.levels(tangent))):
                for node in graph.Walk(root, self.token).nodes:
                    node.register_hook(came)

    def require_no_derivatives(self) -> None:
        """Raise if the loss read derivatives of outputs, and nothing was observed."""
        if self.derived and not self.is_by_hand:
            raise kc.UnsupportedError(
                "The loss reads derivatives of the model through the layers "
                f"{sorted(self.derived)}, and the model's outputs do not show these "
                "uses. Before loss.backward() call kfac.observe(residuals), if the "
                "loss consists of residuals with derivatives; or "
                "kfac.observe(outputs), if derivatives are in a penalty, which then "
                "has no curvature."
            )

    def forget(self) -> None:
        """Forget the passes, but not the count of random numbers."""
        for observation in self.observations:
            observation.clear()
        self.drop_passes()
        self.observations, self.derived = [], set()
        self.is_by_hand = self.is_called = False
        self.gradients.forget()

    def observe_by_hand(self, outputs: Any, weight: Any) -> None:
        """Record outputs before their loss is differentiated; see `KFAC.observe`."""
        edge = get_gradient_edge(outputs)
        reached, uncovered = self._reached(edge)
        if any(r.call in o.calls for o in self.observations for r in reached):
            raise kc.UnsupportedError(
                "These `outputs` depend on calls that were already observed. Observe "
                "all outputs of one forward pass as one tensor."
            )
        self.is_by_hand = True
        weights = RowWeights(weight=weight)
        observation = self._record(edge, outputs.detach(), reached, weights)
        observation.uncovered = uncovered
        # Without calls to watch, only the number of rows is needed.
        observation.is_differentiated = not self.kfac.wants_statistics
        self._watch(observation, reached)

    def observe_pass(
        self, edge: Any, z: torch.Tensor, gradient: Any, passing: Any, replay: Any
    ) -> Observation | None:
        """Observe a pass of the model whose loss is being differentiated.

        Parameters
        ----------
        edge : torch.autograd.graph.GradientEdge
            The outputs in the graph.
        z : torch.Tensor, shape (N, ..., P)
            The outputs.
        gradient : torch.Tensor or None
            What the loss sent back to them; None where the loss reads others.
        passing : tuple of torch.Tensor or None
            Gradients of all outputs of the node of `edge`, if it is the next to be called.
        replay : tuple or None
            As of `Observation`.

        Returns
        -------
        Observation or None
            What was observed, if anything.
        """
        kfac = self.kfac
        if not kfac.wants_outputs or self.is_by_hand:
            return None
        _require_rows(z)
        outputs, z, gradient = z, graph.whole(z), graph.whole(gradient)
        weights, counts = RowWeights(), bool(z.numel())
        if counts:
            weights = self.loss.look(z, gradient)
            # Other processes may have rows that count, where this one has none.
            counts = weights.unread is None or not bool(weights.unread.all())
            counts = counts or kfac.processes > 1
        reached: list[Reached] = []
        uncovered = frozenset[str]()
        # With fully_shard all processes go back through all layers.
        if counts or kfac.is_divided:
            reached, uncovered = self._reached(edge)
        observation = self._record(edge, outputs, reached, weights)
        observation.uncovered, observation.replay = uncovered, replay
        observation.is_unscaled = weights.scale is None and bool(observation.rows)
        observation.is_differentiated = True
        if self.mode == "empirical":
            for r in reached:
                if passing is not None and r.edge.node is edge.node:
                    r.call.add_to_source(r.take(passing[r.edge.output_nr]))
            self._watch(observation, reached)
        elif kfac.overlap:
            kfac.begin_with(observation)
        return observation

    def calls_of(
        self, passes: list[Observation], /, *, positions_of: int | None = None
    ) -> list[Any]:
        """Return the calls of passes, for blocks with all uses known."""
        self.require_no_derivatives()
        uncovered = {name for o in passes for name in o.uncovered}
        calls = [c for o in passes for c in o.checked_calls(positions_of=positions_of)]
        for name in uncovered & {call.block for call in calls}:
            self.coverage.note(
                f"of {name!r}, {self.coverage.reason(name)} of another pass"
            )
        return [call for call in calls if call.block not in uncovered]

    def _reached(self, edge: Any) -> tuple[list[Reached], frozenset[str]]:
        """Return the calls below outputs, and the blocks with uses that are not known."""
        kfac = self.kfac
        if not kfac.wants_statistics:
            return [], frozenset()
        reached, reasons = graph.calls_below(
            edge.node,
            token=self.token,
            sites=kfac.sites,
            share=kfac.share,
            keep_empty=kfac.is_divided,
        )
        for name, reason in reasons.items():
            self.coverage.explain(name, reason)
        if not reached:
            self.coverage.note(
                "the outputs depend on no recorded call of a covered layer: they were "
                "observed after the backward pass, or computed by other weights"
            )
        return [self._for_one_pass(r) for r in reached], frozenset(reasons)

    def _for_one_pass(self, reached: Reached) -> Reached:
        """Return a call for one pass alone, where another's outputs depend on it too."""
        if not reached.call.is_taken or self.is_by_hand:
            return reached
        if self.mode == "empirical":
            raise kc.UnsupportedError(
                f"Outputs of several forward passes depend on one call of layer "
                f"{reached.call.block!r}, as on cached features or in a rollout, and its "
                "gradient does not tell them apart, as fisher='empirical' needs. Take "
                "fisher='gradients' or 'exact'; or call observe(outputs) with all of them."
            )
        return dataclasses.replace(reached, call=reached.call.again())

    def _record(
        self, edge: Any, outputs: Any, reached: list[Reached], weights: RowWeights
    ) -> Observation:
        """Return the calls of a pass, with gradients if these are not those of the data."""
        kfac, calls, z = self.kfac, [r.call for r in reached], graph.whole(outputs)
        find_examples = partial(
            uses.find_examples,
            edge,
            reached,
            like=z,
            blocks=kfac.estimator.network.blocks,
            of_one=self._of_one_example(reached, z),
        )
        rows = float(z[..., 0].numel())
        if weights.weight is not None:
            rows = float(weights.weight.sum())
        rows /= kfac.copies
        self.drawn += z[..., 0].numel()
        for call in calls:
            call.is_taken = True
        # Of passes with several widths, the clip takes the largest, in any order.
        of_step = [kfac.outputs] if self.observations else []
        kfac.outputs = max([z.shape[-1], *of_step])
        loss_factor = kfac.criterion.row.multiple(z.shape[-1])
        observation = Observation(
            calls=calls,
            rows=rows,
            loss_factor=loss_factor,
            weight=weights.weight,
            scale=weights.scale,
            is_uniform=weights.is_uniform,
            largest=weights.largest,
            coarse=coarseness(z),
            unread=weights.unread,
        )
        self.observations.append(observation)
        # As `batches_of_calls` will scale the gradients of a step's only pass.
        ahead = math.sqrt(len(z) / rows) if rows else 1.0
        # The unit of the step is the loss of its first pass.
        root = math.sqrt(loss_factor / (self.loss_factor or loss_factor))
        for call in calls:
            call.row_scale = ahead
        if self.mode == "empirical":
            if kfac.reduction == "mean" and rows:
                ahead *= rows / kfac.processes
            # Gradients carry the factor itself, and products of two its square.
            scale = self.loss.scale_for_squares(z) * loss_factor / root
            for call in calls:
                call.grad_scale = call.own_scale * ahead / scale
                call.scaled_by = ahead
            find_examples(None)
        elif reached and (rows or kfac.processes > 1):
            if weights.weight is not None or z.dtype.itemsize < 4:
                ahead = 1.0
            for call in calls:
                call.scaled_by = call.row_scale = ahead
            vectors = self._vectors(z, reached)
            if root * ahead != 1.0:
                vectors = vectors * (root * ahead)
            if weights.weight is not None:
                # Replaced and not multiplied: padding may hold anything.
                weight = weights.weight[..., None]
                roots = weight.clamp(min=0).sqrt().to(vectors.dtype)
                vectors = torch.where(weight > 0, vectors, 0.0) * roots
            with drawing(self.model):
                graph.pull_back(edge, reached, vectors, like=outputs)
                find_examples(vectors)
        return observation

    def _of_one_example(self, reached: list[Reached], z: Any) -> set[Any]:
        """Return the calls whose rows are of the one example that convolutions take.

        The first axis of their inputs is not the examples', unless it is the outputs' own.
        """
        convolved = self._convolutions(reached)
        # Several calls of one convolution may be of one example each.
        if not convolved or any(c != [True] for c in convolved.values()):
            return set()
        below: set[Any] = set()
        for r in reached:
            if r.call.block in convolved and r.edge.node not in below:
                below |= graph.Walk(r.edge.node, self.token).nodes
        found = set()
        for r in reached:
            call, layer = r.call, self.kfac.sites[r.call.block].layer
            if call.examples == len(z) and r.edge.node not in below:
                continue
            found.add(call)
            scales = layer.kind == "scale_shift" and layer.scale_shape
            # A scale for each channel, over whose positions an example's gradient sums.
            if scales and scales[1:] == (1,) and call.examples > 1:
                call.inputs, call.examples = call.inputs[None], 1
                call.grad_shape = 1, *call.grad_shape
        return found

    def _convolutions(self, reached: list[Reached]) -> dict[str, list[bool]]:
        """Return whether each call of convolutions had no axis of examples."""
        convolved: dict[str, list[bool]] = {}
        for r in reached:
            if self.kfac.sites[r.call.block].kind == "conv":
                convolved.setdefault(r.call.block, []).append(bool(r.call.grad_shape))
        return convolved

    def _vectors(self, z: Any, reached: list[Reached]) -> Any:
        """Return the vectors that are backpropagated from outputs, one for each source."""
        kfac = self.kfac
        # Rows that share a source must not add up: those of one example, and those of
        # examples that a batch norm or the loss mixes.  Signs of others do nothing.
        examples = {r.call.examples for r in reached}
        shared = self.positions == "signs" or z.ndim > 2 or min(examples) < len(z)
        shape = z.shape
        alone = any(map(any, self._convolutions(reached).values()))
        if self.positions == "separate" and (alone or examples == {1}):
            # Of an input without an axis of examples, all rows are its one example's.
            z = z.reshape(1, -1, shape[-1])
        # One for each pass of each step on each process, and the same in a resumed run.
        seed = (kfac.data_place << 96) + (kfac.steps << 40) + self.drawn
        with torch.no_grad(), torch.autocast(z.device.type, enabled=False):
            drawn = kc.losses.drawn_vectors(
                kfac.criterion.row.likelihood,
                z,
                mode=self.mode,
                seed=seed,
                shared=shared,
                samples=self.samples,
                positions=self.positions,
            )
        return drawn.vectors.reshape(len(drawn.vectors), *shape)

    def _watch(self, observation: Observation, reached: list[Reached]) -> None:
        """Look at gradients as they come to the calls of a pass."""
        for r in reached:
            # A hook that refers to its own node would never be collected.
            call = dataclasses.replace(r, edge=None)
            came = partial(
                _came, weakref.ref(self), observation, call, r.edge.output_nr
            )
            observation.hooks.append(r.edge.node.register_prehook(came))


def _came(
    recorder: Callable[[], PassRecorder | None],
    observation: Observation,
    reached: Reached,
    index: int,
    gradients: Any,
) -> None:
    """Note that a pass is differentiated, and take an empirical gradient."""
    passes, call = recorder(), reached.call
    # A pass that makes a graph, as for a penalty, is not the loss's own.
    if torch.is_grad_enabled() or passes is None:
        return
    adds = passes.gradients.begin_pass()
    if adds is None:
        return
    observation.is_differentiated = True
    if adds and passes.mode == "empirical" and call.inputs is not None:
        call.add_to_source(reached.take(gradients[index]))


def _came_with_graph(
    recorder: Callable[[], PassRecorder | None],
    blocks: Iterable[str],
    results: Any,
    gradients: Any,
) -> None:
    """Watch the input gradients of a layer that are part of a graph themselves."""
    if torch.is_grad_enabled():
        for g in results:
            _watch_derivative(recorder, blocks, g)


def _watch_derivative(
    recorder: Callable[[], PassRecorder | None], blocks: Iterable[str], x: Any
) -> None:
    if x is not None and (base := private.levels(x)[-1]).requires_grad:
        base.register_hook(partial(_read, recorder, blocks))


def _read(
    recorder: Callable[[], PassRecorder | None], blocks: Iterable[str], gradient: Any
) -> None:
    """Note that a loss reads a derivative, or watch the derivative of it."""
    passes = recorder()
    if torch.is_grad_enabled():
        _watch_derivative(recorder, blocks, gradient)
    elif passes is not None and passes.gradients.begin_pass():
        passes.derived.update(blocks)


def _require_rows(z: Any) -> None:
    """Refuse outputs that are not rows of numbers."""
    if z.ndim < 2:
        what = (
            "Where each row is a number, say output=lambda z: z[:, None]; where all are "
            "one row, z[None]"
        )
        if not z.ndim:
            what = "A model that returns its loss is to return (loss, logits): output=1"
        raise kc.ShapeError(
            f"Expected outputs of (N, ..., P), got {tuple(z.shape)}. {what}; or call "
            "`observe`."
        )


def _gradient_of_view(z: Any, base: Any, gradient: Any) -> Any:
    """Return the gradient of a view of the outputs, None for anything else."""
    if base is None or gradient.shape != base.shape:
        return None
    shared = z.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    if not shared or z.dtype != base.dtype or z.numel() > base.numel():
        return None
    laid = torch.empty_strided(
        base.shape, base.stride(), dtype=gradient.dtype, device=gradient.device
    ).copy_(gradient)
    offset = z.storage_offset() - base.storage_offset()
    return laid.as_strided(z.shape, z.stride(), offset)
