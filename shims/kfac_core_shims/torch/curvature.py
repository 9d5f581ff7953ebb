"""`Curvature`: statistics of the passes of a PyTorch model, which `KFAC` steps by."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from warnings import warn

import torch

import kfac_core as kc
from kfac_core_shims.torch import hooks, private
from kfac_core_shims.torch.balance import (
    balance,
    have_weights,
    numbers_of,
    require_scale,
)
from kfac_core_shims.torch.coverage import Coverage
from kfac_core_shims.torch.factors import factors_of
from kfac_core_shims.torch.gradients import Gradients, is_drawn_through
from kfac_core_shims.torch.likelihoods import Criterion
from kfac_core_shims.torch.loss_checks import LossCheck
from kfac_core_shims.torch.observation import Observation
from kfac_core_shims.torch.outputs import OutputHook, RandomHook, rows_of
from kfac_core_shims.torch.passes import PassRecorder
from kfac_core_shims.torch.sites import ModelBlocks, Site


class Curvature(kc.integration.NaturalGradient):
    """Statistics of the passes of a model, without the steps.

    Parameters
    ----------
    estimator : kfac_core.Estimator
        With a block for each site.
    model : torch.nn.Module
        The model, without wrappers.
    sites : dict of str to Site
        The blocks that have an approximation.
    model_blocks : ModelBlocks
        All of its blocks, and the modules that use them.
    division : Division or None
        How parameters are divided among processes.
    criterion : Criterion
        Likelihood and reduction.
    grad_scaler, samples, positions, output, overlap
        As of `KFAC`.
    **schedule
        Other options of `kfac_core.integration.NaturalGradient`.
    """

    def __init__(
        self,
        estimator: kc.Estimator,
        /,
        *,
        model: torch.nn.Module,
        sites: dict[str, Site],
        model_blocks: ModelBlocks,
        division: Any,
        criterion: Criterion,
        grad_scaler: Any,
        samples: int,
        positions: kc.losses.Positions,
        output: Any,
        overlap: bool,
        **schedule: Any,
    ) -> None:
        # Compared between processes by what follows.
        self.model, self.criterion = model, criterion
        self.likelihoods = (criterion.row.likelihood,)
        self.output, self.overlap = output, overlap
        self._division, self._keeps_arguments = division, False
        super().__init__(estimator, reduction=criterion.reduction, **schedule)
        self.sites = sites
        self._collects = self._is_balanced = False
        self._coverage = Coverage(
            model, self.sites, model_blocks.reasons, watches=division is None
        )
        self._gradients = Gradients(
            model, self.sites, self._coverage.replaced, division
        )
        self._loss = LossCheck(
            criterion,
            grad_scaler=grad_scaler,
            empirical=estimator.mode == "empirical",
        )
        self._passes = PassRecorder(
            self,
            gradients=self._gradients,
            loss=self._loss,
            coverage=self._coverage,
            samples=samples,
            positions=positions,
        )
        self._hooks = hooks.install(self, model_blocks)
        self._hooks += self._gradients.watch(self._passes.forget_cleared)
        if output is not None:
            hook = OutputHook(self._passes)
            self._hooks.append(model.register_forward_hook(hook, with_kwargs=True))
        self._coverage.warn_of_others(self.sites, refreshed=True, steps=0)

    def keep_arguments(self) -> None:
        """Keep the arguments of the model's calls until the step, to call it again."""
        self._keeps_arguments = True
        hook = RandomHook(self._passes)
        self._hooks.append(self.model.register_forward_pre_hook(hook))

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
        return self.wants_statistics or self.reduction == "sum" or self._keeps_arguments

    @property
    def share(self) -> Callable[[Any], Any] | None:
        """Function that returns this process's examples, if all have the same rows."""
        if self._division is None or not self._division.tensor_parallel:
            return None
        share: Callable[[Any], Any] = self._division.share
        return share

    @property
    def copies(self) -> int:
        """Number of processes that have the same rows."""
        return 1 if self._division is None else self._division.copies

    @property
    def data_place(self) -> int:
        """Number of this process's rows among those of all processes."""
        if self._division is not None:
            return int(self._division.data_place)
        return 0 if self.communicator is None else self.communicator.rank

    @property
    def processes(self) -> int:
        """Number of processes that gradients are averages over."""
        return self._processes

    @property
    def _processes(self) -> int:
        if self._division is None:
            return super()._processes
        return int(self._division.data_parts)

    def observe(self, outputs: torch.Tensor, /, weight: Any = None) -> None:
        """Record a forward pass by hand, before its loss is differentiated.

        For outputs that the model's own hook does not see as the loss reads them: of a
        part of a model, without padded rows, with weights, or of several heads as one;
        and for gradients that do not come by ``backward()``.  A step with outputs that
        were observed by hand counts nothing else.  All rows have the one `likelihood`,
        which is not compared with the loss.  Heads of different likelihoods are side by
        side in one row, ``torch.cat([logits, values], -1)``, of a `kfac_core.losses.Joint`.

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
                "in time. Create KFAC without `overlap`."
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
            graphs are released as they are read.  Each of several processes gives its own,
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
                "differentiated. Create KFAC without `overlap`."
            )
        statistics: dict[str, kc.Statistics] | None = None
        error: Exception | None = None
        if isinstance(passes, torch.Tensor):
            passes = [passes]
        self._collects = True
        try:
            statistics = self._statistics_of([None] if passes is None else passes)
        # Kept for the vote: a process that raised alone would leave the others waiting.
        except Exception as raised:
            error = raised
        finally:
            self._collects = False
            self._forget()
        count = float(statistics is not None)
        if self.communicator is not None:
            agreement = kc.distributed.Agreement(self.communicator)
            count = agreement.vote("update without a step", [count], error=error)[0]
        elif error is not None:
            raise error
        if not count:
            raise kc.NotReadyError(
                "No process observed a row. Give the outputs of passes with rows, or "
                "differentiate a loss before."
            )
        self.estimator.absorb(statistics or {})

    def batches(
        self,
        outputs: Any,
        /,
        weight: Any = None,
        *,
        seed: int = 0,
        positions_of: int | None = None,
    ) -> list[dict[str, kc.Batch]]:
        """Return what the layers saw in a pass, and what came back from its outputs.

        Nothing is scaled by numbers of rows or examples, and no state changes.

        Parameters
        ----------
        outputs, weight
            As of `observe`.
        seed : int
            Of the labels that are drawn.
        positions_of : int, optional
            Number of sequences, where each of their positions is an example of its own.

        Returns
        -------
        list of dict of str to Batch
            Of the summed loss, in parts of equal shapes.
        """
        self._collects = True
        # The number of rows drawn before is a part of the seed.
        self._passes.drawn = seed
        try:
            self.observe(outputs, weight)
            calls = self._passes.calls_of(
                self._passes.observations, positions_of=positions_of
            )
            # With one row and one example for each block nothing is scaled.
            alone = {call.block: 1.0 for call in calls}
            return kc.integration.batches_in_parts(calls, rows=1.0, examples=alone)
        finally:
            self._collects = False
            self._forget()

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
            if calls and rows:
                # Averages over examples are averages over rows only where all parts
                # have equally many rows an example.
                shares.append(rows / max(call.examples for call in calls))
            # What has no graph was not observed, and is refused.
            if rows or (self.communicator is None and not parts):
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

        With a communicator it is collective.

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
            For a block that is not a product of two full factors of one weight.
        kfac_core.NotReadyError
            Before the first update.
        """
        self.estimator.network.layers.known(name)
        return factors_of(self.sites[name], self.estimator.gathered()[name].statistics)

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

    def begin_with(self, observation: Observation) -> None:
        """Take the statistics of the step, whose only pass is being differentiated."""
        if self._begun is not None:
            raise kc.ConventionError(
                "This step has already begun: with `overlap` a step has one pass, "
                "whose statistics are taken while it runs. Create KFAC without "
                "`overlap` to accumulate; kfac.discard() forgets a pass."
            )
        self._is_balanced = False
        if not self._agrees_at_once:
            self.balance()
        with self._exact():
            self.begin(
                observation.calls,
                rows=observation.rows,
                loss_factor=observation.loss_factor,
            )

    @contextmanager
    def _exact(self) -> Iterator[None]:
        """Compute without graphs, and within autocast without half precision."""
        device = next(iter(self.sites.values())).trained[0].device
        with torch.no_grad(), private.without_autocast(device):
            yield

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
        """Forget the passes, but not the count of random numbers."""
        self._passes.forget()
        for site in self.sites.values():
            site.forget()
        self._is_balanced = False

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()

    def _common(self, gradients: Any) -> Any:
        return gradients if self._division is None else self._division.common(gradients)

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
        # A likelihood without a `__repr__` shows its address, which differs.
        likelihood = re.sub(" at 0x[0-9a-f]+", "", repr(self.criterion.row))
        settings = {"`likelihood`": likelihood, "`overlap`": str(self.overlap)}
        return super()._compared() | settings
