"""`KFAC`: natural gradients between ``loss.backward()`` and ``optimizer.step()``."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Unpack

import torch

import kfac_core as kc
from kfac_core_shims.torch import coverage, likelihoods, options, parallel, private
from kfac_core_shims.torch.curvature import Curvature
from kfac_core_shims.torch.finding import find_sites
from kfac_core_shims.torch.observation import Observation
from kfac_core_shims.torch.saving import OfOneModel

_DEFAULTS = kc.integration.defaults

_OUTPUT = kc.constraints.either(
    kc.constraints.either(kc.constraints.FUNCTION, kc.constraints.TEXT),
    kc.constraints.instance_of(int),
)


class KFAC(OfOneModel, Curvature):
    r"""K-FAC for a PyTorch model: replaces gradients by natural gradients.

    Call `step` between ``loss.backward()`` and ``optimizer.step()``.  For a layer with
    inputs x, output gradients g and the gradient V of the likelihood's mean negative log
    (half the squared error summed over outputs; nats), `step` writes

    .. math:: \nu \, (A + \alpha I)^{-1} \, V \, (G + \beta I)^{-1}, \qquad
        A = \mathrm{E}[x x^T], \; G = \mathrm{E}[g g^T]

    into ``.grad``, with the damping :math:`\lambda = \alpha \beta` and the factor
    :math:`\nu` of the KL clip.

    Parameters
    ----------
    model : torch.nn.Module
        Model on its device, or its ``DistributedDataParallel``, also after `fully_shard`
        or `parallelize_module` over all processes, and compiled or not.
    likelihood : str, kfac_core.losses.Loss or torch.nn.Module, optional
        Likelihood of one row of outputs: ``"categorical"`` (cross-entropy of logits),
        ``"bernoulli"``, ``"gaussian"`` (half the squared error, summed over outputs), an
        object of `kfac_core.losses`, or the loss module itself: ``CrossEntropyLoss``,
        ``NLLLoss``, ``BCEWithLogitsLoss``, ``MSELoss``.  Where left out, ``"categorical"``,
        and the first backward pass is checked to be of a cross-entropy.
    lr : torch.optim.SGD, float, or callable of int
        Learning rate for the KL clip; of an optimizer, its current one.
        Needed unless ``kl_clip=None``.
    damping : float or callable of int
        Damping, in units of the likelihood's curvature of one row, whatever the loss
        averages over.
    update_every, refresh_every : int or callable of int
        Steps between statistics, and between factorizations.
    approximations : mapping, optional
        Approximations by name of a layer, class of a module, or kind of layer
        (``"dense"``, ``"conv"``, ``"embedding"``, ``"scale_shift"``); None leaves a layer
        alone.

    Other Parameters
    ----------------
    reduction : {"mean", "sum"}, optional
        Reduction over the rows of outputs, in the loss that is differentiated; by default
        that of the loss module, or ``"mean"``.  A cross-entropy that is plainly of the
        other reduction is refused; a factor that you multiply the loss with multiplies
        the gradient alone, and where the KL clip binds not even the step.
    fisher : {"gradients", "exact", "empirical", ...}
        ``"gradients"`` draws labels from the model, ``"exact"`` sums over all of
        them, ``"empirical"`` uses the gradients of the caller's backward pass.
    samples : int
        Labels drawn for each row, with as many backward passes; of the sampled `fisher`.
    positions : {"signs", "separate", "together"}
        What ``fisher="exact"`` does with the rows of one example, such as tokens; see
        `kfac_core.losses.drawn_vectors`.
    kl_clip : float or callable of int, optional
        Bound on ``lr^2 V . P V``, about twice the Kullback-Leibler divergence of a step,
        which `kfac_core.integration.PerOutput` gives for each output, and then lengthens
        short steps of classifiers; None for no bound.
    decay : float or callable of int
        Decay of the statistics at each update.
    damping_rule : {"factored", "factored_unit_pi", "exact"}
        See `kfac_core.Estimator`.
    bases_every : int or callable of int
        Steps between eigenbases of EKFAC.
    refresh_lag : int
        Steps that a refresh takes in the background, while directions use the operators
        before it; `metrics` has their age.  With 0 it is a part of its step.
    skip_layers : sequence of str
        Names or class names of modules to leave alone.
    output : str, int, callable or None
        Picks a tensor out of what the model returns: a key, a place, or a function.  By
        default a tensor itself, or ``logits``; of a `kfac_core.losses.Joint` a tuple of its
        heads.  With None only `observe` counts.
    grad_scaler : torch.amp.GradScaler, optional
        Scaler of the loss.
    communicator : kfac_core.distributed.Communicator or str, optional
        Processes that train one model on parts of each batch, or the name of their engine;
        ``"alone"`` for a model of this process's own.  By default all processes of
        ``torch.distributed``, if it is initialized.
    overlap : bool
        Whether statistics are taken, exchanged and factorized while the backward pass of
        the loss runs, in a thread.  For steps of one pass each; the result is the same.
    execution : kfac_core.Execution or kfac_core.distributed.Distributed, optional
        How blocks are computed; with `Distributed`, also by whom.
    **estimator_options
        Other options of `kfac_core.Estimator`: ``averaging``, ``precision``, ``coupling``,
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
        For a model without a covered layer, with parameters of which some processes have no
        slice, or on processes that nobody mentioned.
    kfac_core.distributed.ReplicaError
        If processes have different models or options.

    Notes
    -----
    A step counts the forward passes of the model that ``backward()`` went through since
    the last step, except for those whose gradients ``zero_grad`` has cleared, and those
    with other parameters than the last of them.  `discard` forgets them.  Outputs that are
    given to `observe` count in their place, however they are differentiated.

    On p processes gradients are averages over processes, as ``DistributedDataParallel``
    leaves them.  With R the rows of all, a process differentiates the mean over its rows if
    all have as many; in general the sum over its rows times ``p / R``, or with
    ``reduction="sum"`` that sum itself.  Making the object, `step`, `report` and
    `state_dict` are collective: all processes call them, also one whose batch had no rows.

    References
    ----------
    Martens and Grosse (2015), arXiv:1503.05671.  The defaults were chosen on the suite of
    ``benchmarks/tasks``.

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
        model: torch.nn.Module,
        *,
        likelihood: options.Likelihood = None,
        lr: kc.integration.Schedule | torch.optim.Optimizer | None = None,
        damping: kc.integration.Schedule = _DEFAULTS.DAMPING,
        update_every: kc.integration.Interval = _DEFAULTS.UPDATE_EVERY,
        refresh_every: kc.integration.Interval = _DEFAULTS.REFRESH_EVERY,
        approximations: options.Approximations | None = None,
        reduction: Literal["mean", "sum"] | None = None,
        fisher: kc.losses.EstimationMode = "gradients",
        samples: int = 1,
        positions: kc.losses.Positions = "signs",
        kl_clip: kc.integration.Schedule | None = _DEFAULTS.KL_CLIP,
        decay: kc.integration.Schedule = _DEFAULTS.DECAY,
        damping_rule: kc.damping.DampingRule = _DEFAULTS.DAMPING_RULE,
        bases_every: kc.integration.Interval = 100,
        refresh_lag: int = 0,
        skip_layers: Sequence[str] = (),
        output: options.Output = "auto",
        grad_scaler: torch.amp.GradScaler | None = None,
        communicator: kc.distributed.Communicator | str | None = None,
        overlap: bool = False,
        execution: kc.Execution | kc.distributed.Distributed | None = None,
        **estimator_options: Unpack[kc.integration.EstimatorOptions],
    ) -> None:
        options.require_made(model)
        kc.integration.require_estimation(
            fisher=fisher, samples=samples, positions=positions, likelihood=likelihood
        )
        constraints = kc.constraints
        constraints.require_options(
            locals(),
            approximations=constraints.optional(constraints.instance_of(Mapping)),
            skip_layers=constraints.NAMES,
            overlap=constraints.FLAG,
            output=constraints.optional(_OUTPUT),
        )
        options.require_sensible(fisher, grad_scaler, overlap=overlap, output=output)
        plain = parallel.inner(model)
        execution, processes, division = parallel.execution_of(
            model,
            communicator,
            execution,
            # Planned for the many steps after the first ones.
            interval=kc.integration.interval_at("refresh_every", refresh_every, 1000),
        )
        model_blocks = find_sites(plain, skip_layers=skip_layers)
        # What cannot be divided has no block, so that nothing is chosen for it below.
        if division is not None:
            division.install(model_blocks)
        chosen = coverage.choose(plain, model_blocks, dict(approximations or {}))
        estimator = kc.Estimator(
            {
                n: kc.Block(model_blocks.sites[n].layer, kind)
                for n, kind in chosen.items()
            },
            # Rows are always those of a sum over rows; the reduction of the user's loss
            # divides gradients alone.
            reduction="sum",
            damping_rule=damping_rule,
            sources=kc.losses.source_reduction_of(fisher),
            mode=fisher,
            execution=execution,
            **({"refreshing": kc.Refreshing(keep_matrices=False)} | estimator_options),
        )
        super().__init__(
            estimator,
            model=plain,
            sites={name: model_blocks.sites[name] for name in chosen},
            model_blocks=model_blocks,
            division=division,
            criterion=likelihoods.criterion_of(likelihood, reduction),
            grad_scaler=grad_scaler,
            samples=samples,
            positions=positions,
            output=output,
            overlap=overlap,
            update_every=update_every,
            refresh_every=refresh_every,
            bases_every=bases_every,
            refresh_lag=refresh_lag,
            damping=damping,
            decay=decay,
            kl_clip=kl_clip,
            # Nothing reads this default: a step with a KL clip and without `lr` raises.
            learning_rate=1.0 if lr is None else options.rate_of(lr),
            communicator=processes,
        )
        self._has_rate = lr is not None
        self._chose_processes = processes is not None or communicator is not None
        self.preconditioned: frozenset[int] = frozenset()

    def __repr__(self) -> str:
        text = (
            f"fisher={self.estimator.mode!r}, damping={self.estimator.damping!r}, "
            f"kl_clip={self.kl_clip!r}, update_every={self.update_every!r}, "
            f"refresh_every={self.refresh_every!r}"
        )
        state = self.estimator.state
        counts = {n: b.updates for n, b in state.blocks.items()}
        table = kc.integration.coverage_table(
            self.estimator.blocks,
            self.skipped,
            # A share holds the counts of its own blocks only.
            updates=counts if state.share is None else None,
        )
        return f"KFAC({text}), {self.steps} steps\n{table}"

    @private.outside_compilers
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
                "KFAC was created before they were. Create it after init_process_group"
            )
        try:
            if not self._loss.is_overflow():
                self._step(self._passes.counted)
        # Also after an error: passes of a failed step must not count in the next.
        finally:
            self.discard()

    def _step(self, passes: list[Observation]) -> None:
        if self.kl_clip is not None and not self._has_rate:
            raise kc.ConventionError(
                "The KL clip needs the learning rate: KFAC(model, lr=optimizer) reads the "
                "current one of torch.optim.SGD. Without a clip say kl_clip=None."
            )
        # Before the other checks, which leave out blocks of replaced parameters.
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

        if self.overlap:
            self._passes.require_no_derivatives()

        def calls() -> Iterator[Any]:
            # Lazy, so that an error here is raised on every process.
            yield from self._passes.calls_of(passes)

        with self._exact():
            try:
                directions = self._unclipped(
                    gradients,
                    calls(),
                    rows=sum(o.rows for o in passes) if passes else None,
                    loss_factor=self._passes.loss_factor,
                )
            except kc.NotReadyError as error:
                message = self._coverage.nothing_seen(
                    str(error),
                    seen=bool(passes),
                    came=self._gradients.came,
                    called=self._passes.is_called,
                    by_hand=self.output is None,
                )
                error.args = (message,)
                raise
            if self._division is not None:
                self._division.write(directions, self._nu)
            else:
                nu = self._nu
                for name, direction in directions.items():
                    self.sites[name].write(direction, nu)
        # Not all sites: a layer that took no part in this batch keeps its plain
        # gradient.
        replaced = [p for name in directions for p in self.sites[name].trained]
        self.preconditioned = frozenset(map(id, replaced))
        self._gradients.note_written(replaced)
        # There is none before the first batch with a row that counts.
        if directions:
            self._coverage.warn_of_others(directions, refreshed=refreshes)

    def _block_gradients(self) -> dict[str, dict[str, Any]]:
        """Return the gradients by block, in the layers' layout."""
        if self._division is not None:
            slices: dict[str, dict[str, Any]] = self._division.gradients()
            return slices
        if self.communicator is not None:
            # DistributedDataParallel averages each `.grad`. The gradient of a weight
            # that a parametrization computes is in none.
            for site in self.sites.values():
                site.average(self.communicator)
        of_sites = {
            name: site.gradients()
            for name, site in self.sites.items()
            if name not in self._coverage.replaced
        }
        return {name: g for name, g in of_sites.items() if g is not None}

    def report(self) -> kc.report.Report:
        """Return each block's condition, residual, damping and age; prints as a table."""
        return self.estimator.report()

    def metrics(self) -> dict[str, float]:
        """Return numbers of the last step for a logger.

        Returns
        -------
        dict of str to float
            ``steps``; ``operator_age``, the steps since those whose statistics the next
            step's operators are of, unless it refreshes them; ``damping`` where it is one
            number; ``clip``, the factor of the KL clip, 1 where it left the step; and
            ``kl``, half of ``lr^2 V . P V`` after it, at most half of `kl_clip`.
            Synchronizes with the device.
        """
        numbers = {"steps": float(self.steps), "operator_age": float(self.operator_age)}
        if not isinstance(self.estimator.damping, Mapping):
            numbers["damping"] = float(self.estimator.damping)
        if self.clip is not None:
            nu, size = float(self.clip.scale), float(self.clip.size)
            numbers |= {"clip": nu, "kl": 0.5 * nu * nu * size}
        return numbers

    def _clipped(self, gradients: Any, rate: Any, bound: Any) -> Any:
        if self._division is None:
            return super()._clipped(gradients, rate, bound)
        clip_of = functools.partial(self._clip_of, rate=rate, bound=bound)
        return self._division.directions(
            self.estimator, gradients, clip_of=None if bound is None else clip_of
        )
