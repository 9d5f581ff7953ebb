"""`KFAC`: natural gradients between ``loss.backward()`` and ``optimizer.step()``."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args
from warnings import warn

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn.parameter import is_lazy

import kfac_core as kc
from kfac_core_shims.torch import coverage, graph, hooks, likelihoods, parallel, uses
from kfac_core_shims.torch.capturing import Observation
from kfac_core_shims.torch.finding import find_sites
from kfac_core_shims.torch.gradients import Gradients
from kfac_core_shims.torch.loss_checks import LossCheck, RowWeights
from kfac_core_shims.torch.outputs import (
    OutputHook,
    Pass,
    RandomHook,
    drawing,
    is_drawn_through,
)

__all__ = ["KFAC"]

_RESTING = 1e-30
"""In the place of a learning rate of zero, as at the start of a warmup: no step is long."""

_ASKED = "it was asked for"

_ESTIMATOR = "precision", "sharing", "refreshing", "averaging"
"""Options of `kfac_core.Estimator` that are passed on."""


class KFAC(kc.integration.NaturalGradient):
    r"""K-FAC for a PyTorch model: replaces gradients by natural gradients.

    Call `step` between ``loss.backward()`` and ``optimizer.step()``.  For a layer with
    inputs x, output gradients g and the gradient V of the mean loss, `step` writes

    .. math:: \nu \, (A + \alpha I)^{-1} \, V \, (G + \beta I)^{-1}, \qquad
        A = \mathrm{E}[x x^T], \; G = \mathrm{E}[g g^T]

    into ``.grad``, with the damping :math:`\lambda = \alpha \beta` and the factor
    :math:`\nu \le 1` of the KL clip.

    Parameters
    ----------
    model : torch.nn.Module
        Model on its device, or its ``DistributedDataParallel``, also after `fully_shard`
        or `parallelize_module` over all processes; if compiled, before its first call.
    likelihood : str, kfac_core.losses.Loss or torch.nn.Module, optional
        Likelihood of one row of outputs: ``"categorical"`` (cross-entropy of logits),
        ``"bernoulli"``, ``"gaussian"`` (half the squared error, summed over outputs), an
        object of `kfac_core.losses`, or the loss module itself: ``CrossEntropyLoss``,
        ``NLLLoss``, ``BCEWithLogitsLoss``, ``MSELoss``.  Where left out, ``"categorical"``,
        and the first backward pass is checked to be of a cross-entropy.
    reduction : {"mean", "sum"}, optional
        Reduction over the rows of outputs, in the loss that is differentiated; by default
        that of the loss module, or ``"mean"``.  A cross-entropy that is plainly of the
        other reduction is refused at the first backward pass; on several processes at
        each `step` with statistics.
    fisher : {"gradients", "exact", "empirical", ...}
        ``"gradients"`` draws labels from the model, ``"exact"`` sums over all of
        them, ``"empirical"`` uses the gradients of the caller's backward pass.
    samples : int
        Labels drawn for each row, with as many backward passes; of the sampled `fisher`.
    positions : {"signs", "separate", "together"}
        What ``fisher="exact"`` does with the rows of one example, such as tokens; see
        `kfac_core.losses.drawn_vectors`.
    lr : float, callable of int, or torch.optim.Optimizer
        Learning rate that the KL clip reckons with; of an optimizer, its current one.
    kl_clip : float or callable of int, optional
        Bound on ``lr^2 V . P V``, about twice the Kullback-Leibler divergence of a step;
        None for no bound.
    damping, decay : float or callable of int
        Damping, in units of the curvature of one row's loss; decay of the statistics at
        each update.
    damping_rule : {"factored", "factored_unit_pi", "exact"}
        See `kfac_core.Estimator`.
    update_every, refresh_every, bases_every : int or callable of int
        Steps between statistics, factorizations, and eigenbases of EKFAC.
    approximations : mapping, optional
        Approximations by name of a layer, class of a module, or kind of layer
        (``"dense"``, ``"conv"``, ``"embedding"``, ``"scale_shift"``); None leaves a layer
        alone.
    skip_layers : sequence of str
        Names or class names of modules to leave alone.
    output : str, int, callable or None
        Picks a tensor out of what the model returns: a key, a place, or a function.  By
        default a tensor itself, or ``logits``.  With None only `observe` counts.
    grad_scaler : torch.amp.GradScaler, optional
        Scaler of the loss.
    keep : bool
        Whether the arguments of the model's calls are kept until the step, for
        `KFACOptimizer`.
    communicator : kfac_core.distributed.Communicator or str, optional
        Processes that train one model on parts of each batch, or the name of their engine;
        ``"alone"`` for a model of this process's own.  By default all processes of
        ``torch.distributed``, if it is initialized.
    overlap : bool
        Whether statistics are taken, exchanged and factorized while the backward pass of
        the loss runs, in a thread.  For steps of one pass each; the result is the same.
    execution : kfac_core.Execution or kfac_core.distributed.Distributed, optional
        How blocks are computed; with `Distributed`, also by whom.
    **options
        Other options of `kfac_core.Estimator`: ``precision``, ``sharing``, ``averaging``,
        and ``refreshing``, by default ``Refreshing(keep_matrices=False)``.

    Attributes
    ----------
    estimator : kfac_core.Estimator
        What holds the statistics.
    skipped : dict of str to str
        Trained parameters that keep their gradients, with the reason.
    preconditioned : frozenset of int
        Parameters, by ``id``, whose gradients the last step replaced.
    random : RandomState or None
        With `keep`, the state of the random numbers before the model's last call.

    Raises
    ------
    kfac_core.ConventionError
        For an option that cannot be, with its name.
    kfac_core.UnsupportedError
        For a model without a covered layer, with parameters that are divided over a mesh of
        several dimensions, or on processes that nobody mentioned.
    kfac_core.distributed.ReplicaError
        If processes have different models or options.

    Notes
    -----
    A pass of the model counts if a backward pass goes through it before `step`.  Passes
    without gradients, and those that nobody differentiates, do not count.

    On p processes gradients are averages over processes, as ``DistributedDataParallel``
    leaves them.  With R the rows of all, a process differentiates the mean over its rows if
    all have as many; in general the sum over its rows times ``p / R``, or with
    ``reduction="sum"`` that sum itself.  Making the object, `step`, `report` and
    `state_dict` are collective: all processes call them, also one whose batch had no rows.

    References
    ----------
    Martens and Grosse (2015), arXiv:1503.05671.  The defaults were chosen on the classifier
    and the autoencoder of ``docs/examples/training/torch_deep.py``, and on GPT-2 of
    ``torch_models.py`` there.

    Examples
    --------
    >>> import torch
    >>> from kfac_core_shims.torch import KFAC
    >>> model = torch.nn.Linear(4, 3)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> kfac = KFAC(model)
    >>> x, y = torch.randn(8, 4), torch.randint(3, (8,))
    >>> torch.nn.functional.cross_entropy(model(x), y).backward()
    >>> kfac.step()
    >>> optimizer.step()
    """

    def __init__(
        self,
        model: Any,
        *,
        likelihood: Any = None,
        reduction: Literal["mean", "sum"] | None = None,
        fisher: kc.losses.EstimationMode = "gradients",
        samples: int = 1,
        positions: kc.losses.Positions = "signs",
        lr: kc.integration.Schedule | torch.optim.Optimizer = 0.1,
        kl_clip: kc.integration.Schedule | None = 1e-3,
        damping: kc.integration.Schedule = 3e-2,
        decay: kc.integration.Schedule = 0.95,
        damping_rule: kc.damping.DampingRule = "factored_unit_pi",
        update_every: kc.integration.Interval = 5,
        refresh_every: kc.integration.Interval = 25,
        bases_every: kc.integration.Interval = 100,
        approximations: Mapping[Any, Any] | None = None,
        skip_layers: Sequence[str] = (),
        output: Any = "auto",
        grad_scaler: Any = None,
        keep: bool = False,
        communicator: Any = None,
        overlap: bool = False,
        execution: Any = None,
        **options: Any,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise kc.ConventionError(
                f"Expected `model` to be a torch.nn.Module, got a {type(model).__name__}: "
                "KFAC(model), and not of its parameters."
            )
        _require_made(model)
        _require_known(options)
        if overlap and (keep or fisher == "empirical" or output is None):
            raise kc.ConventionError(
                "`overlap` takes statistics when the outputs' gradients come, which is too "
                "early for fisher='empirical', `observe` and KFACOptimizer. Leave it out."
            )
        self.overlap = overlap
        self.model = parallel.inner(model)
        execution, processes, self._division = parallel.execution_of(
            model,
            communicator,
            execution,
            interval=refresh_every if isinstance(refresh_every, int) else 10,
        )
        self._chose_processes = processes is not None or communicator is not None
        criterion = likelihoods.criterion_of(likelihood, reduction)
        modes = get_args(kc.losses.EstimationMode)
        if fisher not in modes:
            raise kc.ConventionError(
                f"Expected `fisher` to be one of {', '.join(map(repr, modes))}, got "
                f"{fisher!r}."
            )
        if grad_scaler is not None and not hasattr(grad_scaler, "get_scale"):
            raise kc.ConventionError(
                "Expected `grad_scaler` to be the torch.amp.GradScaler of the loop, got "
                f"{type(grad_scaler).__name__}."
            )
        sources = kc.losses.source_reduction_of(fisher)
        self.criterion, self.output, self.grad_scaler = criterion, output, grad_scaler
        found = find_sites(self.model, skip_layers=skip_layers)
        if self._division is not None:
            if keep:
                raise kc.UnsupportedError(
                    "The model's parameters are divided among processes (DTensor), for "
                    "which PyTorch has no forward derivatives, and KFACOptimizer takes one "
                    "in the direction of each step. Use KFAC beside another optimizer."
                )
            self._division.install(found)
        chosen = dict(approximations or {})
        coverage.require_known(chosen, found.sites)
        kept = {n: coverage.approximation_of(s, chosen) for n, s in found.sites.items()}
        alone = [name for name, kind in kept.items() if kind is None]
        self._sites = {n: s for n, s in found.sites.items() if n not in alone}
        blocks = {n: kc.Block(s.layer, kept[n]) for n, s in self._sites.items()}
        estimator = kc.Estimator(
            blocks,
            reduction="sum",
            damping=kc.integration.value_at(damping, 0),
            decay=kc.integration.value_at(decay, 0),
            damping_rule=damping_rule,
            sources=sources,
            mode=fisher,
            execution=execution,
            **{"refreshing": kc.Refreshing(keep_matrices=False), **options},
        )
        super().__init__(
            estimator,
            reduction=criterion.reduction,
            update_every=update_every,
            refresh_every=refresh_every,
            bases_every=bases_every,
            damping=damping if callable(damping) else None,
            decay=decay if callable(decay) else None,
            kl_clip=kl_clip,
            learning_rate=_rate_of(lr),
            communicator=processes,
        )
        self._collects = False
        self.samples, self.positions = samples, positions
        self.skipped: dict[str, str] = {}
        self._reasons, self._notes = dict(found.reasons), dict[str, None]()
        self._trained_at_first = {
            name for name, p in self.model.named_parameters() if p.requires_grad
        }
        self._observations: list[Observation] = []
        self._replaced: set[str] = set()
        self._untold = frozenset[str]()
        self._balanced = False
        self._gradients = Gradients(
            self.model, self._sites, self._replaced, self._division
        )
        self._passes: list[Pass] = []
        self._drawn, self._by_hand = 0, False
        self._loss = LossCheck(
            criterion,
            grad_scaler=grad_scaler,
            empirical=fisher == "empirical",
            processes=self._processes,
            alone=self.communicator is None,
        )
        self._keep = keep
        self.random: Any = None
        self.preconditioned: frozenset[int] = frozenset()
        self._places = self._where_they_are()
        self._count = len(self._sites)
        found.users = [
            (module, [n for n in names if n in self._sites], context)
            for module, names, context in found.users
        ]
        self._hooks = hooks.install(self, found)
        if self.is_divided:
            self._hooks += self._gradients.watch_arrival()
        if output is not None and not criterion.weighted:
            hook = OutputHook(self)
            self._hooks.append(self.model.register_forward_hook(hook, with_kwargs=True))
        if keep:
            before = RandomHook(self)
            self._hooks.append(self.model.register_forward_pre_hook(before))
        for name in alone:
            for own in self._names(found.sites[name]):
                self._reasons[own] = _ASKED
        self._name_others(self._sites)

    def __repr__(self) -> str:
        options = (
            f"fisher={self.estimator.mode!r}, damping={self.estimator.damping!r}, "
            f"kl_clip={self.kl_clip!r}, update_every={self.update_every!r}, "
            f"refresh_every={self.refresh_every!r}"
        )
        table = kc.integration.coverage_table(self.estimator.blocks, self.skipped)
        return f"KFAC({options}), {self.steps} steps\n{table}"

    def __reduce__(self) -> Any:
        raise kc.UnsupportedError(
            "A KFAC object belongs to its model and cannot be copied or pickled. Save "
            "kfac.state_dict(), make KFAC of the copy of the model, and load it there."
        )

    def __deepcopy__(self, memo: Any) -> Any:
        self.__reduce__()

    @property
    def damping(self) -> Any:
        """Damping of the next refresh; assigning a number or a schedule changes it."""
        return self.estimator.damping

    @damping.setter
    def damping(self, damping: Any) -> None:
        self.damping_schedule = damping if callable(damping) else None
        self.estimator.damping = kc.integration.value_at(damping, self.steps)

    @property
    def is_divided(self) -> bool:
        """Whether parameters are divided among processes."""
        return self._division is not None

    @property
    def trained(self) -> Iterator[Any]:
        """Parameters of the blocks that are trained now."""
        return self._gradients.trained

    @property
    def wants_outputs(self) -> bool:
        """Whether a forward pass now is to be observed."""
        return self.wants_statistics or self.reduction == "sum" or self._keep

    @property
    def share(self) -> Callable[[Any], Any] | None:
        """What returns this process's examples, where all have the same rows."""
        if self._division is None or not self._division.tensor_parallel:
            return None
        return self._division.share

    @property
    def differentiated(self) -> list[Observation]:
        """Observed passes since the last step that a backward pass went through.

        Those through which `torch.autograd.grad` went, as for a logger, count only where no
        pass added to ``.grad``.
        """
        seen = [o for o in self._observations if o.differentiated]
        if not self._collects:
            seen = [o for o in seen if not o.cleared]
        return [o for o in seen if o.accumulated] or seen

    @property
    def has_accumulated(self) -> bool:
        """Whether a backward pass since the last step has added to ``.grad``."""
        return any(o.accumulated for o in self._observations)

    def adds_to_gradients(self) -> bool | None:
        """Whether the backward pass that is running adds to ``.grad`` of any block.

        Earlier passes whose gradients are gone, as by ``zero_grad``, are not counted,
        unless the loop puts these back before the step.

        Returns
        -------
        bool or None
            False where it returns gradients (`torch.autograd.grad`), None where it comes to
            no block.
        """
        if is_drawn_through(self.model):
            return True if self.is_divided else None
        if self._gradients.are_of_this_pass():
            return True
        adds = self._gradients.are_to_come()
        if adds:
            if not self.has_accumulated:
                self._gradients.find_uncleared()
            elif not self._gradients.are_there():
                for observation in self._observations:
                    observation.cleared = observation.accumulated
                self._gradients.watch()
            if all(o.cleared or not o.accumulated for o in self._observations):
                self.give_up()
        return adds

    def _settle(self) -> None:
        """Count passes whose gradients were cleared, if the loop has put them back."""
        if self._gradients.are_of_later_passes():
            return
        if self.overlap and any(o.cleared for o in self._observations):
            raise kc.ConventionError(
                "The gradients are of several passes, and `overlap` is for steps of one. "
                "Make KFAC without `overlap`."
            )
        for observation in self._observations:
            observation.cleared = False

    @property
    def is_drawing(self) -> bool:
        """Whether the backward pass that is running is K-FAC's own, of no loss.

        Its vectors go through the hooks of the model's tensors and modules too.
        """
        return is_drawn_through(self.model)

    def observe(self, outputs: Any, /, weight: Any = None) -> None:
        """Record a forward pass by hand, before its loss is differentiated.

        For outputs that the model's own hook does not see as the loss reads them: of a
        part of a model, without padded rows, with weights, or of several heads as one.
        A step with outputs that were observed by hand counts nothing else.

        Parameters
        ----------
        outputs : torch.Tensor, shape (N, ..., P)
            Outputs with their graph: the rows that the loss and the likelihood read.
            Without a graph, as under ``no_grad``, nothing is recorded.
        weight : torch.Tensor, shape (N, ...), optional
            Weights of the rows in the loss ``sum_n w_n l_n``, or for a mean
            ``sum_n w_n l_n / sum_n w_n``; such as ``class_weights[labels]``.

        Raises
        ------
        kfac_core.ShapeError
            For outputs without an axis of rows, or weights of another shape.
        kfac_core.UnsupportedError
            For outputs of a pass that was observed already, or weights with
            ``fisher="empirical"``.
        kfac_core.ConventionError
            If the likelihood was left out, or weights are missing.
        """
        if len(shape := tuple(outputs.shape)) < 2:
            raise kc.ShapeError(f"Expected `outputs` of (N, ..., P), got {shape}.")
        if weight is None and self.criterion.weighted:
            raise kc.ConventionError(
                "The loss has class weights: pass those of the rows, "
                "observe(outputs, weight=loss.weight[labels])."
            )
        if self.overlap:
            raise kc.ConventionError(
                "Whether outputs that are observed by hand are differentiated is not known "
                "in time. Make KFAC without `overlap`."
            )
        if self.criterion.assumed:
            raise kc.ConventionError(
                "Say which `likelihood` the outputs have, KFAC(model, "
                "likelihood='categorical'), 'bernoulli' or 'gaussian': where outputs are "
                "observed by hand it cannot be checked."
            )
        if weight is not None and self.estimator.mode == "empirical":
            raise kc.UnsupportedError(
                "Rows with weights have empirical gradients that are weighted already, "
                "and squared. Take fisher='gradients' or 'exact'."
            )
        if weight is not None and tuple(weight.shape) != shape[:-1]:
            raise kc.ShapeError(
                f"Expected `weight` of shape {shape[:-1]}, one number for each row of "
                f"`outputs`, got {tuple(weight.shape)}."
            )
        observed = outputs.requires_grad and torch.is_grad_enabled()
        if not observed or not self.wants_outputs:
            return
        edge = get_gradient_edge(outputs)
        reached = self._reached(edge)
        if any(r.call in o.calls for o in self._observations for r in reached):
            raise kc.UnsupportedError(
                "These `outputs` depend on calls that were observed already. Observe all "
                "that is made in one forward pass as one tensor."
            )
        self._by_hand = True
        observation = self._record(edge, outputs.detach(), reached, weight)
        empirical = self.estimator.mode == "empirical"
        for r in reached:
            observation.watch(r, empirical=empirical)

    def step(self) -> None:
        """Replace ``.grad`` of parameters in a block by the natural gradient.

        With a gradient scaler, call ``scaler.unscale_(optimizer)`` before; where it found
        infinite gradients and will leave the optimizer's step out, this does nothing.

        Raises
        ------
        kfac_core.NotReadyError
            If statistics are due and no pass of the model was differentiated, on any
            process; if a gradient scaler has not unscaled the gradients; or if they are
            what the last step wrote, or were added to it.
        kfac_core.NotFiniteError
            If a gradient or a row is not finite.  Gradients and state are then unchanged.
        kfac_core.ConventionError
            If gradients are not the same on all processes, as without
            ``DistributedDataParallel``, or within its ``no_sync``.
        """
        if not self._chose_processes:
            parallel.require_one_process(
                "KFAC was made before they were. Make it after init_process_group"
            )
        try:
            if self._loss.is_overflow():
                return
            self._settle()
            self._tell()
            self._step(self.differentiated)
        finally:
            self.discard()

    def update(self, passes: Iterable[Any] | None = None, /) -> None:
        """Update the statistics, and take no step: gradients and counts stay as they are.

        For curvature that is not an optimizer's: posteriors, influence, a data set's
        factors.  With ``decay=1`` updates add up, and with ``estimator.refresh()`` after
        them ``estimator.operator(name)`` has the products.

        Parameters
        ----------
        passes : iterable, optional
            Outputs of forward passes, made one after the other, as by a generator; they
            are parts of one batch, of any sizes, with as many rows for each example; their
            graphs are let go of as they are read.  Each of several processes gives its own,
            in any number.  Nothing needs to be differentiated,
            except for ``fisher="empirical"``: there the loop differentiates each loss
            itself and gives None.  Where left out, the passes that were differentiated or
            observed by hand since the last step are the batch.

        Raises
        ------
        kfac_core.NotReadyError
            If no pass was observed, on any process.
        kfac_core.ConventionError
            For outputs with ``fisher="empirical"``.
        kfac_core.UnsupportedError
            With ``overlap``.
        kfac_core.NotFiniteError
            For a row that is not finite.  Nothing was changed then.

        Examples
        --------
        The Fisher matrix of a data set, summed over labels, in batches:

        >>> import torch
        >>> from kfac_core_shims.torch import KFAC
        >>> model = torch.nn.Linear(4, 3)
        >>> kfac = KFAC(model, likelihood="categorical", fisher="exact", decay=1.0)
        >>> batches = torch.randn(10, 4).split(4)
        >>> kfac.update(model(x) for x in batches)
        >>> kfac.estimator.refresh()
        >>> kfac.steps, kfac.estimator.operator("").vector_shape
        (0, (5, 3))
        """
        if self.overlap:
            raise kc.UnsupportedError(
                "With `overlap` a pass belongs to a step from the moment that it is "
                "differentiated. Make KFAC without `overlap`."
            )
        found: dict[str, kc.Statistics] | None = None
        shares: list[float] = []
        error: Exception | None = None
        if isinstance(passes, torch.Tensor):
            passes = [passes]
        self._collects = True
        try:
            for outputs in [None] if passes is None else passes:
                if outputs is not None:
                    self._observe_alone(outputs)
                self._tell()
                seen = self._observations if self._by_hand else self.differentiated
                self.balance()
                calls = self._calls_of(seen)
                rows = sum(o.rows for o in seen)
                shares += [rows / max(call.examples for call in calls)] if calls else []
                if rows or self.communicator is None:
                    with torch.no_grad():
                        found = self.moments(calls, rows=rows, before=found)
                self._forget()
            if shares and max(shares) > (1 + 1e-3) * min(shares):
                warn(
                    "Parts have unlike numbers of rows for each example, from "
                    f"{min(shares):.3g} to {max(shares):.3g}. Their statistics are "
                    "averaged over examples, and not over rows. Give parts of one length, "
                    "or observe them and call update() without `passes`.",
                    stacklevel=2,
                )
        except Exception as raised:
            error = raised
        finally:
            self._collects = False
            self._forget()
        if self._all_may_absorb(found, error):
            self.estimator.absorb(found or {})

    def _all_may_absorb(self, found: Any, error: Exception | None) -> bool:
        """Return whether any process found statistics; raise on all what one raised."""
        if self.communicator is None:
            if error is not None:
                raise error
            return found is not None
        agreement = kc.distributed.Agreement(self.communicator)
        own = [float(found is not None)]
        (count,) = agreement.vote("update without a step", own, error=error)
        if not count:
            raise kc.NotReadyError(
                "No process observed a row. Give the outputs of passes with rows, or "
                "differentiate a loss before."
            )
        return True

    def factors(self, name: str, /) -> tuple[Any, Any, Any]:
        """Return both factors of a layer's block, in PyTorch's order of its weight.

        Parameters
        ----------
        name : str
            Name of a linear layer, or of a convolution without groups.

        Returns
        -------
        input : torch.Tensor, shape (n, n)
            A, with rows in the order of ``weight.flatten(1)``, the bias last.
        output : torch.Tensor, shape (m, m)
            G.
        scale : torch.Tensor, 0-d
            S: the block of the mean over rows of outputs is ``S A (x) G``.

        Raises
        ------
        kfac_core.UnknownBlockError
            For a name that no block has.
        kfac_core.UnsupportedError
            For a block that is no product of two whole factors of one weight.
        kfac_core.NotReadyError
            Before the first update.
        """
        self.estimator.network.known(name)
        site, held = self._sites[name], self.estimator.state[name].statistics
        if held is None:
            raise kc.NotReadyError(
                f"Layer {name!r} has no statistics yet. Call `update`."
            )
        weight, layer = site.parameters.get("weight"), site.layer
        averages = held.averages
        sides = [s for s in ("input", "output") if s in averages]
        values = [averages[side].value(debias=True) for side in sides]
        whole = len(values) == 2 and all(hasattr(value, "full") for value in values)
        plain = layer.groups == 1 and not site.part.rows
        outputs = layer.matrix_shape[1]
        if weight is None or not (whole and plain) or weight.shape[0] != outputs:
            raise kc.UnsupportedError(
                f"Layer {name!r} is no product of two whole factors of one weight. Ask "
                "kfac.estimator.operator(name)."
            )
        A, G = (value.full() for value in values)
        # Which of PyTorch's inputs each row of the block's matrix is of.
        n = len(A) - ("bias" in site.parameters)
        places = torch.arange(n, dtype=A.dtype, device=A.device)
        places = places.expand(outputs, n).reshape(weight.shape)
        given = {"weight": site.part.to_layer(places)}
        given["weight"] = given["weight"].reshape(layer.parameter_shapes["weight"])
        if "bias" in site.parameters:
            given["bias"] = torch.full((outputs,), n, dtype=A.dtype, device=A.device)
        order = torch.argsort(layer.parameters_to_matrix(given)[:, 0])
        return A[order][:, order], G, averages["repeats"].value(debias=True)

    def _observe_alone(self, outputs: Any) -> None:
        """Observe outputs by hand, in the place of the model's own hook."""
        if self.estimator.mode == "empirical":
            raise kc.ConventionError(
                "fisher='empirical' takes the gradients of the loop's own loss: "
                "differentiate it, and give None in the place of the outputs."
            )
        for started in self._passes:
            started.drop()
        self._passes = []
        self.observe(outputs)

    @property
    def wants_statistics(self) -> bool:
        """Whether the next step needs calls with output gradients."""
        return self._collects or super().wants_statistics

    def discard(self) -> None:
        """Forget the passes since the last step, as for a batch that is left out.

        Not needed where the batch's loss was never differentiated: such passes do not
        count.
        """
        self._forget()
        self._drawn = 0
        self._notes.clear()
        self.give_up()

    def _forget(self) -> None:
        """Let go of the passes, and not of the count of random numbers."""
        for observation in self._observations:
            observation.clear()
        for started in self._passes:
            started.drop()
        for site in self._sites.values():
            site.forget()
        self._observations, self._passes = [], []
        self._by_hand = self._balanced = False
        self._loss.forget()
        self._gradients.forget()

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()

    def report(self) -> kc.report.Report:
        """Return each block's condition, residual, damping and age; prints as a table."""
        return self.estimator.report()

    def metrics(self) -> dict[str, float]:
        """Return numbers of the last step for a logger.

        Returns
        -------
        dict of str to float
            ``steps``; ``damping`` where it is one number; ``clip``, the factor of the KL
            clip, 1 where it did not clip; and ``kl``, half of ``lr^2 V . P V`` after it,
            at most half of `kl_clip`.  Synchronizes with the device.
        """
        found = {"steps": float(self.steps)}
        if not isinstance(self.estimator.damping, Mapping):
            found["damping"] = float(self.estimator.damping)
        if self.clip is not None:
            nu, size = float(self.clip.scale), float(self.clip.size)
            found |= {"clip": nu, "kl": 0.5 * nu * nu * size}
        return found

    def note(self, why: str, /) -> None:
        """Remember why a pass was not observed, for the error of a step without any."""
        self._notes[why] = None

    def expect(self, started: Pass, /) -> None:
        """Hold a pass whose gradient is on its way, until the step."""
        self._passes.append(started)

    def observe_pass(
        self,
        edge: Any,
        z: Any,
        gradient: Any,
        passing: Any = None,
        replay: Any = None,
        /,
        *,
        accumulates: bool = True,
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
        passing : tuple of torch.Tensor, optional
            Gradients of all outputs of the node of `edge`, if it is the next to be called.
        replay : tuple, optional
            What the model was called with, where it is kept.
        accumulates : bool
            Whether the backward pass adds to ``.grad``.

        Returns
        -------
        Observation or None
            What was observed, if anything.
        """
        if not self.wants_outputs or self._by_hand:
            return None
        given = edge, z, gradient, passing, replay
        if accumulates:
            return self._observed(*given, accumulates=True)
        before, found = len(self._observations), None
        with self._loss.only_returned():
            found = self._observed(*given, accumulates=False)
        if found is None:
            # If it raised, that is told if the pass counts.
            for observation in self._observations[before:]:
                self.withdraw(observation)
        return found

    def _observed(
        self,
        edge: Any,
        z: Any,
        gradient: Any,
        passing: Any,
        replay: Any,
        *,
        accumulates: bool,
    ) -> Observation | None:
        """Observe a pass, and raise or warn if its loss is not what was said."""
        if z.ndim < 2:
            what = (
                "Where each row is a number, say output=lambda z: z[:, None]; where all "
                "are one row, z[None]"
            )
            if not z.ndim:
                what = "A model that returns its loss is to return (loss, logits): output=1"
            raise kc.ShapeError(
                f"Expected outputs of (N, ..., P), got {tuple(z.shape)}. {what}; or call "
                "`observe`."
            )
        if hasattr(z, "placements"):
            raise kc.UnsupportedError(
                "The model's outputs are a DTensor. Say output=lambda y: y.full_tensor(), "
                "or make the last layer return a plain tensor."
            )
        if not z.numel():
            self.note("the outputs had no rows; leave such a batch out, without a step")
            if self._division is None:
                if self.overlap:
                    self._begin(None)
                return None
        reached = self._reached(edge)
        found = RowWeights()
        if z.numel():
            self._loss.require_likelihood(z, gradient)
            if gradient is not None:
                clips = self.kl_clip is not None
                found = self._loss.row_weights(z, gradient, clips=clips)
        observation = self._record(edge, z, reached, found.weight)
        observation.unread, observation.unlike = found.unread, found.unlike
        observation.scale, observation.coarse = found.scale, likelihoods.coarseness(z)
        observation.differentiated = observation.rows > 0 or self._processes > 1
        if not observation.rows:
            self.note(
                "the loss read no row of the outputs, as where all labels are ignored; "
                "leave such a batch out, without a step"
            )
        observation.accumulated = accumulates
        observation.replay = replay
        if self.estimator.mode == "empirical":
            self._loss.require_unscaled(z, gradient, observation.rows)
            for r in reached:
                if passing is not None and r.edge.node is edge.node:
                    observation.take(r, passing)
                observation.watch(r, empirical=True)
            return observation
        # What only returned gradients may come again.
        if accumulates and self.overlap:
            self._begin(observation)
        return observation

    def _tell(self) -> None:
        """Raise or warn of passes that only returned gradients, where these count."""
        seen = self.differentiated
        if self._by_hand or any(o.accumulated for o in seen):
            return
        self._loss.tell()
        if seen:
            self._loss.believe()

    def withdraw(self, observation: Observation, /) -> None:
        """Forget a pass that only returned gradients.

        Parameters
        ----------
        observation : Observation
            What was observed of it.
        """
        observation.withdrawn = True
        self._observations.remove(observation)
        for call in observation.calls:
            call.output_grads, call.is_taken = [], False
        self.give_up()

    def _begin(self, observation: Observation | None) -> None:
        """Take the statistics of the step, whose only pass is being differentiated.

        None is a pass without rows, of which other processes have some.
        """
        if self._begun is not None:
            raise kc.ConventionError(
                "This step was begun already: `overlap` is for steps of one pass, whose "
                "statistics are taken while it runs. Make KFAC without `overlap` to "
                "accumulate; kfac.discard() forgets a pass."
            )
        self._balanced = False
        self.balance()
        calls = [] if observation is None else observation.calls
        rows = 0.0 if observation is None else observation.rows
        device = next(self.model.parameters()).device.type
        with torch.no_grad(), torch.autocast(device, enabled=False):
            self.begin(calls, rows=rows)

    def _require_loss_of_all(self, seen: list[Observation]) -> None:
        """Raise on all processes unless their losses are parts of what `reduction` says.

        Collective.  Gradients are averages over processes: if each process averages over
        rows of its own, of unequal number, they are of another loss than the mean over all
        rows.
        """
        own = [(o.scale, o.rows) for o in seen if o.scale is not None and not o.unlike]
        values = [len(own), sum(c for c, _ in own), sum(c * c for c, _ in own)]
        values += [sum(rows for _, rows in own), len(own) > 0, self._loss.has_weights]
        assert self.communicator is not None
        agreement = kc.distributed.Agreement(self.communicator)
        count, total, squares, rows, ranks, weighted = agreement.vote(
            f"scales of the loss at step {self.steps}", values
        ).tolist()
        if not count or weighted:
            return  # Rows of one class have one weight, and those of another another.
        if count * squares > (1 + 1e-4) * total * total:
            raise kc.ConventionError(
                "The loss gives rows of one process another weight than those of another: "
                "each averages over rows of its own, which are not equally many. Of a "
                "process's mean take n p / R times, n of its rows, p processes and R rows "
                "of all; or see that all processes have equally many rows."
            )
        if self._processes > 1:
            # Of one pass, where several are accumulated.
            self._loss.require_reduction(
                total / count,
                round(rows * ranks / count),
                5e-2,
                clips=self.kl_clip is not None,
            )

    def balance(self) -> None:
        """Give the rows of each pass of the step the weight that the loss gives them.

        Passes may be means over rows of unequal number, or added with factors.  Empirical
        gradients have that weight, squared, where one is wanted.  Called again, it changes
        nothing.  With a communicator it is collective.
        """
        seen = self.differentiated
        if self.communicator is not None:
            self._balance_processes(self.communicator, seen)
            return
        scales = [o.scale for o in seen if o.scale]
        if not scales or len(scales) < len(seen):
            return
        if self.grad_scaler is not None:
            scales = [c / float(self.grad_scaler.get_scale()) for c in scales]
        rows = sum(o.rows for o in seen)
        total = sum(o.rows * c for o, c in zip(seen, scales, strict=True))
        empirical = self.estimator.mode == "empirical"
        for observation, scale in zip(seen, scales, strict=True):
            observation.scale = None
            weight = squares = scale * rows / total
            if empirical and self.reduction == "mean":
                # What is squared is R times the gradients, for a total of one.
                weight, squares = 1.0, 1.0 / (scale * rows * total)
            elif empirical:
                squares = rows / (scale * total)
            if max(abs(weight - 1), abs(squares - 1)) > observation.coarse:
                _weigh(observation, weight, squares)

    def _balance_processes(self, communicator: Any, seen: list[Observation]) -> None:
        """Do so where rows have weights, and those of other processes have others."""
        of_means = self.reduction == "mean" and self.estimator.mode != "empirical"
        told = of_means and likelihoods.has_row_scales(self.criterion.row)
        if not told or self._balanced or self._collects or not self.wants_outputs:
            return
        self._balanced = True
        read = [o for o in seen if o.rows]
        scales = [o.scale or 0.0 for o in read]
        weighted = self._loss.has_weights or any(o.unlike for o in read)
        values = [float(weighted), float(scales.count(0.0))]
        values += [sum(o.rows for o in read)]
        values += [sum(o.rows * c for o, c in zip(read, scales, strict=True))]
        agreement = kc.distributed.Agreement(communicator)
        ranks, untold, rows, total = agreement.vote(
            f"weights of the loss at step {self.steps}", values
        ).tolist()
        if ranks and not untold:
            for observation, scale in zip(read, scales, strict=True):
                weight = scale * rows / total
                _weigh(observation, weight, weight)

    def _calls_of(self, seen: list[Observation]) -> list[Any]:
        """Return the calls of passes, of the blocks whose every use in them is known."""
        untold = {name for o in seen for name in o.untold}
        found = [call for o in seen for call in o.checked_calls()]
        if not untold:
            return found
        for name in untold & {call.block for call in found}:
            (first, *_) = self._names(self._sites[name])
            self.note(f"of {name!r}, {self._reasons[first]} of another pass")
        return [call for call in found if call.block not in untold]

    def _reached(self, edge: Any) -> list[graph.Reached]:
        """Return the calls below outputs, and note why blocks have none."""
        self._untold = frozenset()
        if not self.wants_statistics:
            return []
        reached, reasons = graph.calls_below(
            edge.node,
            token=id(self),
            sites=self._sites,
            share=self.share,
            # With fully_shard all processes go back through all layers.
            keep_empty=self._division is not None,
        )
        for name, reason in reasons.items():
            for parameter in self._names(self._sites[name]):
                self._reasons[parameter] = reason
        self._untold = frozenset(reasons)
        if not reached:
            self.note(
                "the outputs depend on no recorded call of a covered layer: they were "
                "observed after the backward pass, computed by other weights, or by a "
                "model that was compiled and called before KFAC was made"
            )
        return [self._own(r) for r in reached]

    def _own(self, reached: graph.Reached) -> graph.Reached:
        """Return a call for one pass alone, where another's outputs depend on it too."""
        if not reached.call.is_taken or self._by_hand:
            return reached
        if self.estimator.mode == "empirical":
            raise kc.UnsupportedError(
                f"Outputs of several forward passes depend on one call of layer "
                f"{reached.call.block!r}, as on cached features or in a rollout, and its "
                "gradient does not tell them apart, as fisher='empirical' needs. Take "
                "fisher='gradients' or 'exact'; or call observe(outputs) with all of them."
            )
        return dataclasses.replace(reached, call=reached.call.again())

    def _record(
        self, edge: Any, z: Any, reached: list[graph.Reached], weight: Any
    ) -> Observation:
        """Return the calls of a pass with their gradients, if these are not the data's."""
        self._require_examples_first(z, reached)
        rows = z[..., 0].numel() if weight is None else float(weight.sum())
        self._drawn += z[..., 0].numel()
        calls = [r.call for r in reached]
        for call in calls:
            call.is_taken = True
        if self.share is not None and self.communicator is not None:
            # All processes have the same rows.
            rows = float(rows) / self.communicator.size
        observation = Observation(
            calls,
            float(rows),
            weight=weight,
            untold=self._untold,
            kfac=weakref.ref(self),
        )
        self._observations.append(observation)
        row = self.criterion.row
        mode = self.estimator.mode
        assert mode is not None
        share = row.weight(z.shape[-1])
        # As `batches_of_calls` will scale the gradients of a step's only pass.
        ahead = math.sqrt(len(z) / rows) if rows else 1.0
        for call in calls:
            call.row_scale = ahead
        if mode == "empirical":
            if self.reduction == "mean" and rows:
                ahead *= rows / self._processes
            scale = self._loss.scale_for_squares(z) * math.sqrt(share)
            for call in calls:
                call.grad_scale = call.own_scale * ahead / scale
                call.scaled_by = ahead
            blocks = self.estimator.network.blocks
            uses.find_examples(edge, reached, None, like=z, blocks=blocks)
        elif reached and (rows or self._processes > 1):
            # Rows that share a source must not add up: those of one example, and those of
            # examples that a batch norm or the loss mixes.  Signs of others do nothing.
            fewest = min(r.call.examples for r in reached)
            shared = self.positions == "signs" or z.ndim > 2 or fewest < len(z)
            # A seed of its own for each pass of each step on each process, and the same in
            # a resumed run.
            rank = 0
            if self.communicator is not None and self.share is None:
                rank = self.communicator.rank
            seed = (rank << 96) + (self.steps << 40) + self._drawn
            with torch.no_grad(), torch.autocast(z.device.type, enabled=False):
                made = kc.losses.drawn_vectors(
                    row.likelihood,
                    z,
                    mode=mode,
                    seed=seed,
                    shared=shared,
                    samples=self.samples,
                    positions=self.positions,
                )
                vectors = made.vectors
                if weight is not None or z.dtype.itemsize < 4:
                    ahead = 1.0
                for call in calls:
                    call.scaled_by = call.row_scale = ahead
                if share != 1.0 or ahead != 1.0:
                    vectors = vectors * (math.sqrt(share) * ahead)
                if weight is not None:
                    # Replaced and not multiplied: padding may hold anything.
                    on = (weight > 0)[..., None]
                    root = weight.clamp(min=0).sqrt()[..., None].to(vectors.dtype)
                    vectors = torch.where(on, vectors, 0.0) * root
                with drawing(self.model):
                    graph.pull_back(edge, reached, vectors, like=z)
                    uses.find_examples(
                        edge,
                        reached,
                        vectors,
                        like=z,
                        blocks=self.estimator.network.blocks,
                    )
        return observation

    def _step(self, seen: list[Observation]) -> None:
        for held, key, x in self._places:
            if held.get(key) is not x:
                self._find_replaced()
                break
        self._gradients.require_new()
        if self._division is not None:
            given = self._division.gradients()
        else:
            if self.communicator is not None:
                for site in self._sites.values():
                    site.average(self.communicator)
            of_sites = {
                name: site.gradients()
                for name, site in self._sites.items()
                if name not in self._replaced
            }
            given = {name: g for name, g in of_sites.items() if g is not None}
        if self.communicator is not None and self.wants_outputs:
            self._require_loss_of_all(seen)
        if seen and not given and self.communicator is None:
            raise kc.NotReadyError(
                "No parameter of a covered layer has a gradient, though the model's "
                "outputs were differentiated. Call kfac.step() after loss.backward() and "
                "before zero_grad()."
            )
        self.balance()
        refreshes = self.wants_refresh

        def calls() -> Iterator[Any]:
            # Read by what raises on all processes what is raised here.
            yield from self._calls_of(seen)

        device = next(self.model.parameters()).device.type
        with torch.no_grad(), torch.autocast(device, enabled=False):
            try:
                found = self.directions(given, calls(), rows=sum(o.rows for o in seen))
            except kc.NotReadyError as error:
                why = "; ".join(self._notes) or (
                    "no pass of the model was differentiated, its outputs were modified "
                    "in place, its parameters were replaced (as by torch.func), parts of "
                    "it were called and not itself (`model(x)`), or it was called, or "
                    "compiled and called, before KFAC was made"
                )
                first = "Call kfac.step() after loss.backward(). "
                if seen or self._notes:
                    first = ""
                error.args = (f"{first}{error.args[0]} What was seen: {why}.",)
                raise
            if self._division is not None:
                self._division.write(found)
            else:
                for name, direction in found.items():
                    self._sites[name].write(direction)
        own = [p for name in found for p in self._sites[name].trained]
        self.preconditioned = frozenset(map(id, own))
        self._gradients.note_written(own)
        fewer, self._count = len(found) < self._count, len(found)
        if refreshes or fewer:
            self._name_others(found)

    def _clipped(self, gradients: Any, rate: Any, bound: Any) -> Any:
        if self._division is None:
            return super()._clipped(gradients, rate, bound)
        return self._division.directions(
            self.estimator, gradients, learning_rate=rate, bound=bound
        )

    @property
    def _processes(self) -> int:
        """Number of processes that gradients are averages over."""
        if self._division is None:
            return super()._processes
        return self._division.data_parts

    def _common(self, gradients: Any) -> Any:
        return gradients if self._division is None else self._division.common(gradients)

    # Names of what is left alone.

    def _names(self, site: Any) -> list[str]:
        own = {id(p) for p in site.trained}
        return [n for n, p in self.model.named_parameters() if id(p) in own]

    def _where_they_are(self) -> list[tuple[Any, str, Any]]:
        """Return where the model holds the blocks' parameters: mapping, key, and what."""
        found: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        if self.is_divided:
            return []  # Each forward pass replaces them for a while.
        own = {id(p) for site in self._sites.values() for p in site.trained}
        for name, p in self.model.named_parameters():
            if id(p) not in own:
                continue
            module, (*path, last) = self.model, name.split(".")
            for key in path:
                inner = getattr(module, key)
                found[id(module), key] = module._modules, key, inner
                module = inner
            found[id(module), last] = module._parameters, last, p
        return list(found.values())

    def _find_replaced(self) -> None:
        """Find the blocks of parameters that the model no longer has, or not there."""
        now = dict(self.model.named_parameters())
        live = {id(p) for p in now.values()}
        for name, site in self._sites.items():
            there = site.is_in(site.module)
            if not there or not all(id(p) in live for p in site.trained):
                self._replaced.add(name)
        known = {id(p) for site in self._sites.values() for p in site.trained}
        moved = {id(p) for name in self._replaced for p in self._sites[name].trained}
        for name, p in now.items():
            if id(p) in moved:
                self._reasons[name] = (
                    "its module reads it in another way than when KFAC was made, as after "
                    "pruning or tying; make KFAC again"
                )
            elif id(p) not in known and name in self._trained_at_first:
                self._reasons[name] = (
                    "it was replaced after KFAC was made, as by a new module or by "
                    "load_state_dict(assign=True); make KFAC again, and the optimizer"
                )
        self._places = [(h, key, x) for h, key, x in self._places if h.get(key) is x]

    def _name_others(self, blocks: Iterable[str]) -> None:
        """Warn once of each trained parameter that is in none of these blocks."""
        known = {id(p) for n in blocks for p in self._sites[n].trained}
        with_site = {id(p) for s in self._sites.values() for p in s.trained}
        others: dict[str, str] = {}
        for name, p in self.model.named_parameters():
            trained = p.requires_grad and (p.grad is not None or self.steps == 0)
            if not trained or id(p) in known or name in self.skipped:
                continue
            default = "it was added after KFAC was made; make KFAC again"
            if id(p) in with_site:
                default = (
                    "it took no part in the observed outputs, or another parameter of its "
                    "block is frozen or has no gradient"
                )
            others[name] = self._reasons.get(name, default)
        self.skipped |= others
        unasked = [name for name, why in others.items() if why != _ASKED]
        if unasked:
            reasons = sorted({others[name] for name in unasked})
            warn(
                f"K-FAC leaves the gradients of {unasked} alone: {'; '.join(reasons)}.",
                stacklevel=4,
            )

    def _require_examples_first(self, z: Any, reached: list[graph.Reached]) -> None:
        """Refuse time-first inputs of approximations that sum over each example."""
        for r in reached:
            shape = r.call.examples, *r.call.inputs.shape[1:]
            block = self.estimator.network.blocks.get(r.call.block)
            if block is None or block.layer.kind not in ("dense", "embedding"):
                continue
            approximation = block.approximation
            if getattr(approximation, "sharing", None) == "expand" and isinstance(
                approximation, kc.Kronecker
            ):
                continue
            if len(shape) > 2 and shape[0] != len(z) == shape[1]:
                raise kc.UnsupportedError(
                    f"Layer {r.call.block!r} has inputs of shape {shape}, with examples on "
                    f"the second axis, but {type(approximation).__name__} sums over the "
                    "positions of each example along the first. Take batch_first=True, "
                    "or Kronecker()."
                )


def _weigh(observation: Observation, weight: float, squares: float) -> None:
    """Give the rows of a pass a weight, and what is squared of them another."""
    observation.rows *= weight
    observation.share *= weight
    for call in observation.calls:
        call.scaled_by /= math.sqrt(squares)


def _rate_of(lr: Any) -> Any:
    """Return the learning rate as a schedule."""
    if isinstance(lr, torch.optim.Optimizer):
        rates = lr.param_groups
        return lambda step: max(float(group["lr"]) for group in rates) or _RESTING
    number = isinstance(lr, int | float) and not isinstance(lr, bool)
    if not callable(lr) and not (number and 0.0 < lr < math.inf):
        raise kc.ConventionError(
            f"Expected `lr` to be the optimizer, a finite number > 0, or a callable of the "
            f"step that returns one; got {lr!r}."
        )
    return (lambda step: lr(step) or _RESTING) if callable(lr) else lr


def _require_made(model: Any) -> None:
    """Raise `UnsupportedError` for parameters that PyTorch has not made yet."""
    for name, p in model.named_parameters():
        if is_lazy(p) or p.is_meta:
            kind = "uninitialized" if is_lazy(p) else "on the meta device"
            raise kc.UnsupportedError(
                f"The parameter {name!r} is {kind}, and PyTorch will replace it. Make KFAC "
                "after to_empty, or after the first call of a model with lazy modules."
            )


def _require_known(options: Mapping[str, Any]) -> None:
    """Raise `TypeError` for options that neither `KFAC` nor its estimator has."""
    own = set(inspect.signature(KFAC).parameters) - {"model", "options"}
    known = own | set(_ESTIMATOR)
    for name in options:
        if name not in _ESTIMATOR:
            near = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean `{near[0]}`?" if near else ""
            raise TypeError(
                f"KFAC has no option `{name}`.{hint} There are "
                f"{', '.join(sorted(known))}."
            )
