"""`KFAC`: natural gradients between ``loss.backward()`` and ``optimizer.step()``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal
from warnings import warn

import torch

import kfac_core as kc
from kfac_core_shims.torch import coverage, hooks, likelihoods, options, parallel
from kfac_core_shims.torch.factors import factors_of
from kfac_core_shims.torch.finding import find_sites
from kfac_core_shims.torch.gradients import Gradients, is_drawn_through
from kfac_core_shims.torch.loss_checks import LossCheck
from kfac_core_shims.torch.outputs import OutputHook, RandomHook, rows_of
from kfac_core_shims.torch.passes import Observation, PassRecorder
from kfac_core_shims.torch.weights import (
    balance,
    have_weights,
    numbers_of,
    require_scale,
)

__all__ = ["KFAC"]


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
        other reduction is refused; any other factor of a loss is one of the gradient, and
        not of the curvature.
    fisher : {"gradients", "exact", "empirical", ...}
        ``"gradients"`` draws labels from the model, ``"exact"`` sums over all of
        them, ``"empirical"`` uses the gradients of the caller's backward pass.
    samples : int
        Labels drawn for each row, with as many backward passes; of the sampled `fisher`.
    positions : {"signs", "separate", "together"}
        What ``fisher="exact"`` does with the rows of one example, such as tokens; see
        `kfac_core.losses.drawn_vectors`.
    lr : torch.optim.SGD, float, or callable of int
        Learning rate that the KL clip reckons with; of an optimizer, its current one.
        Needed unless ``kl_clip=None``.
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
    sites : dict of str to Site
        Blocks by name, with the modules and parameters that they are of.
    criterion : Criterion
        Likelihood and reduction.

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
    A step counts the forward passes of the model that ``backward()`` went through since
    the last step, except for those whose gradients ``zero_grad`` has cleared.  `discard`
    forgets them.  Outputs that are given to `observe` count in their place, however they
    are differentiated.

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
    >>> kfac = KFAC(model, lr=optimizer)
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
        lr: kc.integration.Schedule | torch.optim.Optimizer | None = None,
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
        **estimator_options: Any,
    ) -> None:
        options.require_made(model)
        options.require_known(estimator_options, inspect.signature(KFAC).parameters)
        options.require_sensible(
            fisher, grad_scaler, overlap=overlap, keep=keep, output=output
        )
        self.output, self.overlap = output, overlap
        self.model = parallel.inner(model)
        execution, processes, self._division = parallel.execution_of(
            model,
            communicator,
            execution,
            interval=refresh_every if isinstance(refresh_every, int) else 10,
        )
        self._chose_processes = processes is not None or communicator is not None
        self.criterion = likelihoods.criterion_of(likelihood, reduction)
        found = find_sites(self.model, skip_layers=skip_layers)
        if self._division is not None:
            if keep:
                raise kc.UnsupportedError(
                    "The model's parameters are divided among processes (DTensor), for "
                    "which PyTorch has no forward derivatives, and KFACOptimizer takes one "
                    "in the direction of each step. Use KFAC beside another optimizer."
                )
            self._division.install(found)
        chosen = coverage.choose(self.model, found, dict(approximations or {}))
        self.sites = {name: found.sites[name] for name in chosen}
        estimator = kc.Estimator(
            {n: kc.Block(site.layer, chosen[n]) for n, site in self.sites.items()},
            reduction="sum",
            damping=kc.integration.value_at(damping, 0),
            decay=kc.integration.value_at(decay, 0),
            damping_rule=damping_rule,
            sources=kc.losses.source_reduction_of(fisher),
            mode=fisher,
            execution=execution,
            **{"refreshing": kc.Refreshing(keep_matrices=False), **estimator_options},
        )
        super().__init__(
            estimator,
            reduction=self.criterion.reduction,
            update_every=update_every,
            refresh_every=refresh_every,
            bases_every=bases_every,
            damping=damping if callable(damping) else None,
            decay=decay if callable(decay) else None,
            kl_clip=kl_clip,
            learning_rate=1.0 if lr is None else options.rate_of(lr),
            communicator=processes,
        )
        self._has_rate, self._keep, self._collects = lr is not None, keep, False
        self._is_balanced = False
        self.preconditioned: frozenset[int] = frozenset()
        self._coverage = coverage.Coverage(
            self.model, self.sites, found.reasons, watches=self._division is None
        )
        self._gradients = Gradients(
            self.model, self.sites, self._coverage.replaced, self._division
        )
        self._loss = LossCheck(
            self.criterion, grad_scaler=grad_scaler, empirical=fisher == "empirical"
        )
        self._passes = PassRecorder(
            self,
            gradients=self._gradients,
            loss=self._loss,
            coverage=self._coverage,
            samples=samples,
            positions=positions,
        )
        self._hooks = hooks.install(self, found)
        self._hooks += self._gradients.watch(self._passes.forget_cleared)
        if output is not None:
            hook = OutputHook(self._passes)
            self._hooks.append(self.model.register_forward_hook(hook, with_kwargs=True))
        if keep:
            before = RandomHook(self._passes)
            self._hooks.append(self.model.register_forward_pre_hook(before))
        self._coverage.warn_of_others(self.sites, refreshed=True, steps=0)

    def __repr__(self) -> str:
        text = (
            f"fisher={self.estimator.mode!r}, damping={self.estimator.damping!r}, "
            f"kl_clip={self.kl_clip!r}, update_every={self.update_every!r}, "
            f"refresh_every={self.refresh_every!r}"
        )
        table = kc.integration.coverage_table(self.estimator.blocks, self.skipped)
        return f"KFAC({text}), {self.steps} steps\n{table}"

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
    def skipped(self) -> dict[str, str]:
        """Trained parameters that keep their gradients, with the reason."""
        return self._coverage.skipped

    @property
    def trained(self) -> Iterator[Any]:
        """Parameters of the blocks that are trained now."""
        return self._gradients.trained

    @property
    def differentiated(self) -> list[Observation]:
        """Forward passes that the next step counts."""
        return self._passes.counted

    @property
    def is_divided(self) -> bool:
        """Whether parameters are divided among processes."""
        return self._division is not None

    @property
    def is_drawing(self) -> bool:
        """Whether the backward pass that is running is K-FAC's own, of no loss.

        Its vectors go through the hooks of the model's tensors and modules too.
        """
        return is_drawn_through(self.model)

    @property
    def wants_statistics(self) -> bool:
        """Whether the next step needs calls with output gradients."""
        return self._collects or super().wants_statistics

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
    def processes(self) -> int:
        """Number of processes that gradients are averages over."""
        return self._processes

    @property
    def _processes(self) -> int:
        if self._division is None:
            return super()._processes
        return self._division.data_parts

    def observe(self, outputs: Any, /, weight: Any = None) -> None:
        """Record a forward pass by hand, before its loss is differentiated.

        For outputs that the model's own hook does not see as the loss reads them: of a
        part of a model, without padded rows, with weights, or of several heads as one;
        and for gradients that do not come by ``backward()``.  A step with outputs that
        were observed by hand counts nothing else.

        Parameters
        ----------
        outputs : torch.Tensor, shape (N, ..., P), or (N,) but for classes
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
        outputs = rows_of(outputs, self.criterion.row.likelihood)
        if len(shape := tuple(outputs.shape)) < 2:
            raise kc.ShapeError(f"Expected `outputs` of (N, ..., P), got {shape}.")
        if weight is None and self.criterion.class_weights is not None:
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
        if outputs.requires_grad and torch.is_grad_enabled() and self.wants_outputs:
            self._passes.observe_by_hand(outputs, weight)

    def step(self) -> None:
        """Replace ``.grad`` of parameters in a block by the natural gradient.

        With a gradient scaler, call ``scaler.unscale_(optimizer)`` before; where it found
        infinite gradients and will leave the optimizer's step out, this does nothing.

        Raises
        ------
        kfac_core.NotReadyError
            If statistics are due and no pass of the model was differentiated, on any
            process; if a gradient scaler has not unscaled the gradients; if they are
            what the last step wrote, or were added to it; or if the parameters have
            changed since ``backward()``.
        kfac_core.NotFiniteError
            If a gradient or a row is not finite.  Gradients and state are then unchanged.
        kfac_core.ConventionError
            If gradients are not the same on all processes, as without
            ``DistributedDataParallel``, or within its ``no_sync``; or if the loss is not
            of the likelihood or the reduction that was said.
        """
        if not self._chose_processes:
            parallel.require_one_process(
                "KFAC was made before they were. Make it after init_process_group"
            )
        try:
            if not self._loss.is_overflow():
                self._step(self._passes.counted)
        finally:
            self.discard()

    def _step(self, passes: list[Observation]) -> None:
        if self.kl_clip is not None and not self._has_rate:
            raise kc.ConventionError(
                "The KL clip needs the learning rate: KFAC(model, lr=optimizer) reads the "
                "current one of torch.optim.SGD. Without a clip say kl_clip=None."
            )
        self._coverage.find_replaced()
        self._gradients.require_new()
        gradients = self._block_gradients()
        if not self._agrees_at_once:
            self.balance()
        if passes and not gradients and self.communicator is None:
            raise kc.NotReadyError(
                "No parameter of a covered layer has a gradient, though the model's "
                "outputs were differentiated. Call kfac.step() after loss.backward() and "
                "before zero_grad()."
            )
        refreshes = self.wants_refresh

        def calls() -> Iterator[Any]:
            # Lazy, so that an error here is raised on every process.
            yield from self._passes.calls_of(passes)

        device = next(self.model.parameters()).device.type
        with torch.no_grad(), torch.autocast(device, enabled=False):
            try:
                directions = self.directions(
                    gradients, calls(), rows=sum(o.rows for o in passes)
                )
            except kc.NotReadyError as error:
                message = self._coverage.nothing_seen(
                    str(error),
                    seen=bool(passes),
                    came=self._gradients.came,
                    called=self._passes.is_called,
                )
                error.args = (message,)
                raise
            if self._division is not None:
                self._division.write(directions)
            else:
                for name, direction in directions.items():
                    self.sites[name].write(direction)
        replaced = [p for name in directions for p in self.sites[name].trained]
        self.preconditioned = frozenset(map(id, replaced))
        self._gradients.note_written(replaced)
        self._coverage.warn_of_others(directions, refreshed=refreshes)

    def _block_gradients(self) -> dict[str, dict[str, Any]]:
        """Return the gradients by block, in the layers' layout."""
        if self._division is not None:
            return self._division.gradients()
        if self.communicator is not None:
            for site in self.sites.values():
                site.average(self.communicator)
        of_sites = {
            name: site.gradients()
            for name, site in self.sites.items()
            if name not in self._coverage.replaced
        }
        return {name: g for name, g in of_sites.items() if g is not None}

    def balance(self) -> None:
        """Give the rows of each pass of the step the weight that the loss gives them.

        Once a step.  With a communicator it is collective.
        """
        if self._is_balanced or not self.wants_outputs:
            return
        self._is_balanced = True
        vote = None
        if self.communicator is not None:
            if self._collects:
                return  # Processes have passes of their own number.
            agreement = kc.distributed.Agreement(self.communicator)

            def vote(values: Any, error: Exception | None) -> Any:
                what = f"rows and scales of the loss at step {self.steps}"
                return agreement.vote(what, values, error=error)

        balance(
            self._passes.counted,
            loss=self._loss,
            processes=self.processes,
            clips=self.kl_clip is not None,
            vote=vote,
        )

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
            itself and gives None.  Where left out, the passes that a step would count, or
            that were observed by hand, are the batch.

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
        statistics: dict[str, kc.Statistics] | None = None
        error: Exception | None = None
        if isinstance(passes, torch.Tensor):
            passes = [passes]
        self._collects = True
        try:
            statistics = self._statistics_of([None] if passes is None else passes)
        except Exception as raised:
            error = raised
        finally:
            self._collects = False
            self._forget()
        if self.communicator is not None:
            agreement = kc.distributed.Agreement(self.communicator)
            count = [float(statistics is not None)]
            if not agreement.vote("update without a step", count, error=error)[0]:
                raise kc.NotReadyError(
                    "No process observed a row. Give the outputs of passes with rows, or "
                    "differentiate a loss before."
                )
        elif error is not None:
            raise error
        self.estimator.absorb(statistics or {})

    def _statistics_of(self, passes: Iterable[Any]) -> dict[str, kc.Statistics] | None:
        """Return the statistics of a batch in parts; None without rows, of a process."""
        statistics: dict[str, kc.Statistics] | None = None
        shares: list[float] = []
        for outputs in passes:
            if outputs is not None:
                if self.estimator.mode == "empirical":
                    raise kc.ConventionError(
                        "fisher='empirical' takes the gradients of the loop's own loss: "
                        "differentiate it, and give None in the place of the outputs."
                    )
                self.observe(outputs)
            parts = self._passes.counted
            if self._passes.is_by_hand:
                parts = self._passes.observations
            self.balance()
            calls = self._passes.calls_of(parts)
            rows = sum(o.rows for o in parts)
            if calls:
                shares.append(rows / max(call.examples for call in calls))
            if rows or self.communicator is None:
                with torch.no_grad():
                    statistics = self.moments(calls, rows=rows, before=statistics)
            self._forget()
        if shares and max(shares) > (1 + 1e-3) * min(shares):
            warn(
                "Parts have unlike numbers of rows for each example, from "
                f"{min(shares):.3g} to {max(shares):.3g}. Their statistics are "
                "averaged over examples, and not over rows. Give parts of one length, "
                "or observe them and call update() without `passes`.",
                stacklevel=3,
            )
        return statistics

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
        return factors_of(self.sites[name], self.estimator.state[name].statistics)

    def begin_with(self, observation: Observation | None) -> None:
        """Take the statistics of the step, whose only pass is being differentiated.

        None is a pass without rows, of which other processes have some.
        """
        if self._begun is not None:
            raise kc.ConventionError(
                "This step was begun already: `overlap` is for steps of one pass, whose "
                "statistics are taken while it runs. Make KFAC without `overlap` to "
                "accumulate; kfac.discard() forgets a pass."
            )
        self._is_balanced = False
        if not self._agrees_at_once:
            self.balance()
        calls = [] if observation is None else observation.calls
        rows = 0.0 if observation is None else observation.rows
        device = next(self.model.parameters()).device.type
        with torch.no_grad(), torch.autocast(device, enabled=False):
            self.begin(calls, rows=rows)

    def discard(self) -> None:
        """Forget the passes since the last step, as for a batch that is left out.

        Not needed where the batch's loss was never differentiated, or its gradients are
        cleared: such passes do not count.
        """
        self._forget()
        self._passes.drawn = 0
        self._coverage.forget()
        self.give_up()

    def _forget(self) -> None:
        """Let go of the passes, and not of the count of random numbers."""
        self._passes.forget()
        for site in self.sites.values():
            site.forget()
        self._is_balanced = False

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
        numbers = {"steps": float(self.steps)}
        if not isinstance(self.estimator.damping, Mapping):
            numbers["damping"] = float(self.estimator.damping)
        if self.clip is not None:
            nu, size = float(self.clip.scale), float(self.clip.size)
            numbers |= {"clip": nu, "kl": 0.5 * nu * nu * size}
        return numbers

    def _clipped(self, gradients: Any, rate: Any, bound: Any) -> Any:
        if self._division is None:
            return super()._clipped(gradients, rate, bound)
        return self._division.directions(
            self.estimator, gradients, learning_rate=rate, bound=bound
        )

    def _further_numbers(self) -> list[float]:
        passes = self._passes.counted
        read = [o for o in passes if o.rows]
        clips = self.kl_clip is not None
        error = self._loss.unscaled_error(read, self.processes, clips=clips)
        if error is not None:
            raise error
        return numbers_of(passes)

    def _has_weights(self, total: Any) -> bool:
        require_scale(total, loss=self._loss, processes=self.processes)
        return have_weights(total)

    def _weighted_rows(self, rows: Any) -> Any:
        if not self.wants_outputs or self._is_balanced:
            return rows
        self.balance()
        return sum(o.rows for o in self._passes.counted)

    def _compared(self) -> dict[str, str]:
        # Of a likelihood without a `__repr__` the address differs.
        likelihood = re.sub(" at 0x[0-9a-f]+", "", repr(self.criterion.row))
        own = {"`likelihood`": likelihood, "`overlap`": str(self.overlap)}
        return super()._compared() | own

    def _common(self, gradients: Any) -> Any:
        return gradients if self._division is None else self._division.common(gradients)
