"""`KFACOptimizer`: an optimizer that needs no learning rate.

Each step minimizes the exact quadratic model of its batch along the natural gradient and
the last change of the parameters.  The damping follows how well that model predicted the
loss.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only

import kfac_core as kc
from kfac_core_shims.torch import options, parallel, private
from kfac_core_shims.torch.kfac import KFAC
from kfac_core_shims.torch.observation import Observation
from kfac_core_shims.torch.outputs import RandomState, pick
from kfac_core_shims.torch.saving import OfOneModel, as_bytes, of_bytes

_DEFAULTS = kc.integration.defaults

Vectors = list[Any]
"""One tensor for each trained parameter."""

_FORWARD_DERIVATIVES = threading.Lock()
"""PyTorch has one level of forward derivatives for all threads."""

ATTENTION = SDPBackend.MATH
"""The only attention kernel with forward derivatives."""


class KFACOptimizer(OfOneModel, torch.optim.Optimizer):  # type: ignore[misc]
    r"""K-FAC that chooses its learning rate, its momentum and its damping.

    Let g be the gradient of the batch's loss, F its exact Fisher matrix and
    :math:`\lambda` the damping.  A step changes the parameters by
    :math:`\delta = \sum_i c_i d_i`, where the coefficients minimize

    .. math:: M(\delta) = g \cdot \delta
        + \tfrac12 \, \delta \cdot (F + \lambda I) \, \delta

    and the directions are the natural gradient :math:`d_1 = -P g`, the gradient
    :math:`d_2` of the parameters that no block covers, if there are any, and the last
    change :math:`d_3`.  Their products with F are exact: one forward derivative of the
    model each.  The loss after the step is compared with M: every `adapt_every` steps the
    damping falls or rises by the Levenberg-Marquardt rule.  A step that made the batch's
    loss worse is taken back, and the damping rises fourfold.

    Parameters
    ----------
    model : torch.nn.Module
        Model whose outputs the loss reads.
    params : iterable, optional
        Parameters or parameter groups, as for other optimizers of PyTorch; those of the
        model by default.  Groups may differ in `weight_decay`.
    damping : float
        First damping, in units of the likelihood, as for `KFAC`.
    weight_decay : float
        Factor eta of the penalty ``eta/2 |theta|^2`` on the likelihood's mean negative
        log, a part of gradient and model.
    update_every, refresh_every : int or callable of int
        Steps between statistics, and between factorizations.
    **curvature
        Options of `KFAC`: ``likelihood``, ``reduction``, ``fisher``, ``decay``,
        ``approximations``, ``skip_layers``, ``output`` and so on; none about the length
        of steps.

    Other Parameters
    ----------------
    lr : float or torch.Tensor
        Factor on the step that the quadratic model chooses, for schedulers; the same in
        all groups.
    adapt_every : int
        Steps between adaptations of the damping.
    adapt_factor : float
        An adaptation multiplies or divides the damping by
        ``adapt_factor ** adapt_every``.
    min_damping, max_damping : float
        Bounds of the damping.
    damping_rule : {"factored", "factored_unit_pi", "exact"}
        See `kfac_core.Estimator`.
    owned_state : bool
        Whether a state has the curvature of only those blocks that this process owns, for
        ``torch.distributed.checkpoint``; by default that of all.

    Attributes
    ----------
    kfac : KFAC
        What computes the natural gradients.

    Raises
    ------
    kfac_core.ConventionError
        For an option that cannot be, with its name.
    kfac_core.UnsupportedError
        As `KFAC`, and for parameters that are divided among processes.

    Notes
    -----
    Beside the closure's passes, a step takes one forward derivative for each direction,
    and one more loss, for which the closure is called again with the same random numbers:
    it has to compute the same batch.  With small batches
    the minimum of M is that of the batch and not of the data; shorter steps are better
    then (``lr=0.3``).  Synchronizes with the device.

    On several processes losses and the model of M are summed over them, with `reduction`
    as for `KFAC`: all take the same step.  Each process calls `step`, also one whose batch
    has no rows.

    References
    ----------
    Martens and Grosse (2015), arXiv:1503.05671, sections 6.4, 6.5 and 7.

    Examples
    --------
    >>> import torch
    >>> from kfac_core_shims.torch import KFACOptimizer
    >>> model = torch.nn.Linear(4, 3)
    >>> optimizer = KFACOptimizer(model)
    >>> x, y = torch.randn(8, 4), torch.randint(3, (8,))
    >>> loss = optimizer.step(lambda: torch.nn.functional.cross_entropy(model(x), y))
    """

    def __init__(
        self,
        model: torch.nn.Module,
        params: Iterable[Any] | None = None,
        *,
        damping: float = _DEFAULTS.MODEL_DAMPING,
        weight_decay: float = 0.0,
        update_every: kc.integration.Interval = _DEFAULTS.MODEL_UPDATE_EVERY,
        refresh_every: kc.integration.Interval = _DEFAULTS.MODEL_REFRESH_EVERY,
        lr: float | torch.Tensor = 1.0,
        adapt_every: int = 5,
        adapt_factor: float = 0.95,
        min_damping: float = 1e-6,
        max_damping: float = 1e4,
        damping_rule: kc.damping.DampingRule = _DEFAULTS.MODEL_DAMPING_RULE,
        owned_state: bool = False,
        **curvature: Unpack[options.CurvatureOptions],
    ) -> None:
        options.require_made(model)
        if curvature.get("fisher") == "empirical":
            raise kc.ConventionError(
                "The quadratic model has the Fisher matrix of the outputs, and "
                "fisher='empirical' has none. Take 'gradients' or 'exact'."
            )
        if curvature.get("output", "auto") is None:
            raise kc.ConventionError(
                "KFACOptimizer runs the model again for its quadratic model, and needs "
                "`output` to pick the outputs; got None."
            )
        for name in ("kl_clip", "grad_scaler", "overlap"):
            if name in curvature:
                raise kc.ConventionError(
                    f"KFACOptimizer has no option `{name}`: the quadratic model decides "
                    "how long a step is. Leave it out, or use KFAC beside an optimizer."
                )
        constraints = kc.constraints
        constraints.require_options(
            locals(),
            lr=constraints.NOT_NEGATIVE_SCALAR,
            weight_decay=constraints.NOT_NEGATIVE,
            owned_state=constraints.FLAG,
        )
        constraints.require_range("lr", float(lr), constraints.NOT_NEGATIVE)
        self.rule = kc.integration.DampingRule(
            adapt_every, adapt_factor, min_damping, max_damping
        )
        self.damping, self._owned_state = damping, owned_state
        plain = parallel.inner(model)
        self._names = {id(p): n for n, p in plain.named_parameters()}
        super().__init__(
            plain.parameters() if params is None else params,
            {"lr": lr, "weight_decay": weight_decay},
        )
        self._metrics: dict[str, float] = {}
        curvature.setdefault("decay", _DEFAULTS.MODEL_DECAY)
        self.kfac = KFAC(
            model,
            damping=damping,
            damping_rule=damping_rule,
            kl_clip=None,
            update_every=update_every,
            refresh_every=refresh_every,
            **curvature,
        )
        if self.kfac.is_divided:
            self.kfac.remove()
            raise kc.UnsupportedError(
                "KFACOptimizer needs whole parameters, and those of the model are divided "
                "among processes. Use KFAC beside another optimizer, or "
                "DistributedDataParallel."
            )
        # The model is run again for its forward derivatives, on the same inputs.
        self.kfac.keep_arguments()

    def __repr__(self) -> str:
        return f"KFACOptimizer(damping={self._damping:.3g})\n{self.kfac!r}"

    @property
    def damping(self) -> float:
        """Damping of the next step; may be assigned."""
        return self._damping

    @damping.setter
    def damping(self, damping: float) -> None:
        self.rule.require_within(damping)
        self._damping = float(damping)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model, as every optimizer of PyTorch does.

        Raises
        ------
        kfac_core.ConventionError
            For a parameter of another model.
        """
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if id(p) not in self._names:
                self.param_groups.pop()
                raise kc.ConventionError(
                    "Expected `params` of the model: a tensor of shape "
                    f"{tuple(p.shape)} is none of its parameters."
                )

    @private.hooked
    def step(self, closure: Callable[[], Any] | None) -> torch.Tensor:
        """Compute the loss by `closure`, and change the parameters.

        Parameters
        ----------
        closure : callable
            Returns the loss of a batch, with its graph.  It may call ``backward`` itself,
            as closures of other optimizers do, and then return a number; gradients are
            cleared before it runs.

        Returns
        -------
        torch.Tensor
            Loss before the step, without the penalty of `weight_decay`.

        Raises
        ------
        kfac_core.NotFiniteError
            For a loss or a gradient that is not finite.  The parameters are unchanged.
        kfac_core.NotReadyError
            For a closure that does not differentiate a loss of the model's outputs.
        kfac_core.UnsupportedError
            For a model that has no forward derivatives.  Parameters, curvature and the
            number of steps are then unchanged and gradients cleared, as after an error in
            the second call of the closure, at the new parameters.
        """
        lr = self._rate()
        if closure is None:
            if lr:
                raise kc.ConventionError(
                    "Expected `closure`, which returns the loss: step(lambda: loss_of(x))."
                )
            # How torch.distributed.checkpoint has an optimizer make its state.
            for p, _ in self._with_gradients():
                self.state[p]["change"] = torch.zeros_like(p)
            return None
        device = next(self.kfac.model.parameters()).device
        with private.without_autocast(device) as within:
            return self._step(within(closure), lr)

    def _step(self, closure: Callable[[], Any], lr: float) -> torch.Tensor:
        """Take a step outside of autocast."""
        start = _Moment(self.kfac.model)
        loss, differentiates = self._differentiated(closure)
        self.kfac.balance()
        # The step forgets its passes; what the model was called with is needed after it.
        passes = [replace(o, calls=[]) for o in self.kfac.differentiated if o.replay]
        batch = self._batch(passes, loss, lr)
        trained = self._with_gradients()
        with self.kfac.undone_on_error(), self._cleared_on_error():
            with torch.no_grad():
                before = batch.loss + _penalty(trained)
                directions, model_step = self._minimum(trained, passes, batch)
                model_step = model_step.shortened(lr)
                before_step = [p.clone() for p, _ in trained]
                changes = _split(model_step.change()["parameters"]["all"], trained)
                for (p, _), change in zip(trained, changes, strict=True):
                    p.add_(change)
            try:
                after = self._repeated(closure, start, differentiates)
            except BaseException:
                start.restore()
                with torch.no_grad():
                    for (p, _), old in zip(trained, before_step, strict=True):
                        p.copy_(old)
                raise
        after = after / self.kfac.processes / batch.divisor + _penalty(trained)
        accepted = bool(kc.steps.is_accepted(before, after))
        with torch.no_grad():
            for (p, _), old, change in zip(trained, before_step, changes, strict=True):
                if not accepted:
                    p.copy_(old)
                self.state[p]["change"] = change if accepted else torch.zeros_like(p)
        adapted, ratio = self.rule.adapted(
            self._damping, before, after, predicted=float(model_step.predicted)
        )
        coefficients = map(float, model_step.coefficients)
        self._metrics = {
            "loss": batch.loss * batch.factor,
            "damping": self._damping,
            **dict(zip(directions, coefficients, strict=True)),
            "reduction_ratio": ratio,
            "accepted": float(accepted),
        }
        # A rejected step raises the damping at once, and does not wait for
        # `adapt_every`.
        if not accepted:
            self._damping = self.rule.raised(self._damping)
        elif self.kfac.steps % self.rule.every == 0:
            self._damping = float(adapted)
        return loss

    def metrics(self) -> dict[str, float]:
        """Return numbers of the last step for a logger.

        Returns
        -------
        dict of str to float
            ``loss`` before the step, as a mean over rows; ``damping``; the coefficients
            ``rate`` of the natural gradient, ``rate_of_others`` of the gradient of
            parameters that no block covers, and ``momentum`` of the last change, where
            there are such; ``reduction_ratio``, the change of the loss over its
            prediction; and ``accepted``, 1 or 0.  Empty before the first step.
        """
        return dict(self._metrics)

    def state_dict(self) -> dict[str, Any]:
        """Return the state needed to resume: that of the optimizer and of `kfac`.

        The curvature of a block is an entry of its first parameter, and the rest is in the
        first group, since ``torch.distributed.checkpoint`` passes on only groups and what
        belongs to one parameter.
        """
        state: dict[str, Any] = super().state_dict()
        # The entries of the optimizer itself would get the curvature too.
        states = {number: dict(entry) for number, entry in state["state"].items()}
        parameters = [p for group in self.param_groups for p in group["params"]]
        numbers = {id(p): number for number, p in enumerate(parameters)}
        curvature = self.kfac.state_dict(owned=self._owned_state)
        blocks = curvature["estimator"]["blocks"]
        for name in [*blocks]:
            of_block = [
                id(p) for p in self.kfac.sites[name].trained if id(p) in numbers
            ]
            if of_block:
                entry = states.setdefault(numbers[of_block[0]], {})
                entry.setdefault("curvature", {})[name] = as_bytes(blocks.pop(name))
        state["state"] = states
        common = {"damping": self._damping, "curvature": as_bytes(curvature)}
        state["param_groups"][0] |= common
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned, on any number of processes.

        Raises
        ------
        kfac_core.StateError, ValueError
            If it does not fit; nothing was changed then.
        """
        if not isinstance(state_dict, Mapping):
            raise kc.StateError(
                "Expected `state_dict` to be what `state_dict` returned, got a "
                f"{type(state_dict).__name__}."
            )
        groups: Any = state_dict.get("param_groups")
        first = dict(groups[0]) if groups else {}
        damping, common = (first.pop(key, None) for key in ("damping", "curvature"))
        if damping is None or common is None:
            raise kc.StateError(
                "Expected a state of KFACOptimizer, with 'damping' and 'curvature' in its "
                f"first group, got one with {sorted(map(str, first))}."
            )
        self.rule.require_within(damping)
        owned, device = self._owned_state, next(self.kfac.model.parameters()).device
        curvature = of_bytes(common, device)
        states = {number: dict(entry) for number, entry in state_dict["state"].items()}
        for entry in states.values():
            for name, block in entry.pop("curvature", {}).items():
                if not owned or name in self.kfac.estimator.owned_blocks:
                    curvature["estimator"]["blocks"][name] = of_bytes(block, device)
        before = self.kfac.state_dict(owned=owned)
        self.kfac.load_state_dict(curvature, owned=owned)
        try:
            super().load_state_dict(
                {"state": states, "param_groups": [first, *groups[1:]]}
            )
        except BaseException:
            self.kfac.load_state_dict(before, owned=owned)
            raise
        self._damping = float(damping)

    def _rate(self) -> float:
        """Return the factor on the step, which must be one number."""
        rates = {float(group["lr"]) for group in self.param_groups}
        if len(rates) != 1:
            raise kc.ConventionError(
                f"Expected one `lr` for all parameter groups, got {sorted(rates)}: one "
                "quadratic model chooses the step of them all. To train a part less, "
                "give its group a `weight_decay`, or leave it out of `params`."
            )
        return rates.pop()

    def _differentiated(self, closure: Callable[[], Any]) -> tuple[Any, bool]:
        """Return the loss, and whether `closure` itself called ``backward``."""
        self.kfac.discard()
        self._clear()
        with torch.enable_grad():
            loss = closure()
        differentiates = bool(self._with_gradients())
        if not differentiates:
            if not (isinstance(loss, torch.Tensor) and loss.requires_grad):
                raise kc.NotReadyError(
                    "Expected the closure to return a loss with its graph, or to call "
                    "backward; it did neither. Compute the loss within the closure, and "
                    "return it."
                )
            loss.backward()
        return _detached(loss), differentiates

    def _clear(self) -> None:
        self.zero_grad()
        for p in self.kfac.trained:  # Also of those that are in no group.
            p.grad = None

    @contextmanager
    def _cleared_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._clear()
            raise

    def _summed(
        self, what: str, numbers: Any, *, error: Exception | None = None
    ) -> list[float]:
        """Return sums over the processes; an error of one is raised on all."""
        communicator = self.kfac.communicator
        if communicator is None:
            if error is not None:
                raise error
            return [float(x) for x in numbers]
        agreement = kc.distributed.Agreement(communicator)
        total = agreement.vote(
            f"{what} of step {self.kfac.steps}", numbers, error=error
        )
        sums: list[float] = total.tolist()
        return sums

    def _batch(self, passes: Sequence[Observation], loss: Any, lr: float) -> _Batch:
        """Return the rows and the loss of some passes, of all processes."""
        count, rows, loss, of_loss = self._summed(
            f"loss for a learning rate of {lr:.6g}",
            [
                len(passes),
                sum(o.rows for o in passes),
                float(loss),
                sum(o.rows * o.loss_factor for o in passes),
            ],
        )
        if not count:
            self.kfac.discard()
            raise kc.NotReadyError(
                "The closure differentiated no loss of the model's outputs. Compute the "
                "loss from model(inputs) within the closure."
            )
        # Without a row that counts only the penalty is left.
        factor = divisor = of_loss / rows if rows else 1.0
        if self.kfac.reduction == "sum":
            divisor *= (rows or 1.0) / self.kfac.processes
        # Gradients are averages over processes, and so are losses here.
        return _Batch(rows, factor, divisor, loss / self.kfac.processes / divisor)

    def _minimum(
        self,
        trained: Sequence[tuple[Any, float]],
        passes: Sequence[Observation],
        batch: _Batch,
    ) -> tuple[dict[str, Vectors], kc.integration.QuadraticStep]:
        """Return the directions by name, and the minimum of the model on their span.

        Leaves the gradients of the likelihood's mean, and of the penalty, in ``.grad``.
        """
        gradient = [p.grad / batch.divisor + decay * p for p, decay in trained]
        for (p, _), g in zip(trained, gradient, strict=True):
            p.grad.copy_(g * batch.divisor)
        # The penalty's Hessian is its decay times I. K-FAC has one damping for all groups,
        # so that the largest decay counts.
        self.kfac.damping = self._damping + max(decay for _, decay in trained)
        self.kfac.step()
        directions = self._directions(trained, gradient)
        # Passes weigh as their loss factors, and these weights add up to this.
        examples = batch.rows * batch.factor
        return directions, self._model_step(
            trained, gradient, list(directions.values()), passes, examples
        )

    def _with_gradients(self) -> list[tuple[Any, float]]:
        """Return the parameters that have a gradient, each with its weight decay."""
        return [
            (p, float(group["weight_decay"]))
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        ]

    def _directions(
        self, trained: Sequence[tuple[Any, float]], gradient: Vectors
    ) -> dict[str, Vectors]:
        """Return the directions, by the names of their coefficients."""
        covered = self.kfac.preconditioned
        zero = torch.zeros_like
        directions = {
            "rate": [-p.grad if id(p) in covered else zero(p) for p, _ in trained]
        }
        if any(id(p) not in covered for p, _ in trained):
            directions["rate_of_others"] = [
                zero(g) if id(p) in covered else -g
                for (p, _), g in zip(trained, gradient, strict=True)
            ]
        # In the parameter's dtype, which may have changed since.
        changes = [self.state[p].get("change", zero(p)).to(p) for p, _ in trained]
        if any(bool(change.any()) for change in changes):
            directions["momentum"] = changes
        return directions

    def _model_step(
        self,
        trained: Sequence[tuple[Any, float]],
        gradient: Vectors,
        directions: list[Vectors],
        passes: Sequence[Observation],
        examples: float,
    ) -> kc.integration.QuadraticStep:
        """Minimize the quadratic model of the loss over `examples`, and its penalty."""
        error: Exception | None = None
        products = torch.zeros((len(directions), len(directions)), dtype=torch.float64)
        try:
            for observed in passes if examples else ():
                changes = [
                    self._output_change(observed, trained, direction)
                    for direction in directions
                ]
                of_pass = kc.steps.curvature_of_outputs(
                    changes, changes, examples=examples
                )
                products += of_pass.double().cpu()
        except kc.KFACError as raised:
            error = raised
        summed = self._summed("quadratic model", products.ravel().tolist(), error=error)
        curvature: Any = gradient[0].new_tensor(summed).reshape(products.shape)
        flat = [torch.cat([x.reshape(-1) for x in d]) for d in directions]
        if any(decay for _, decay in trained):
            root = torch.cat(
                [torch.full_like(p, decay).sqrt().reshape(-1) for p, decay in trained]
            )
            penalized = torch.stack([root * d for d in flat])
            curvature = curvature + penalized @ penalized.mT
        flat_gradient = torch.cat([g.reshape(-1) for g in gradient])
        return kc.integration.quadratic_step(
            {"parameters": {"all": flat_gradient}},
            [{"parameters": {"all": d}} for d in flat],
            curvature=curvature,
            damping=self._damping,
            damped=False,
        )

    def _output_change(
        self,
        observed: Observation,
        trained: Sequence[tuple[Any, float]],
        direction: Vectors,
    ) -> Any:
        """Return ``B^T J d`` of one pass, ``B B^T`` the Fisher matrix of outputs."""
        names = [self._names[id(p)] for p, _ in trained]
        theta = {n: p.detach() for n, (p, _) in zip(names, trained, strict=True)}
        along = dict(zip(names, direction, strict=True))
        # The running averages of normalizations see this batch once only.
        buffers = {n: b.clone() for n, b in self.kfac.model.named_buffers()}
        *inputs, random = observed.replay
        # What autocast has made of a parameter's inputs.
        own = {p.dtype for p in self.kfac.model.parameters()}
        narrow = {torch.float16, torch.bfloat16} - own
        arguments, keywords = tree_map_only(
            torch.Tensor, lambda x: x.float() if x.dtype in narrow else x, inputs
        )
        _load_forward_derivatives()
        now = RandomState(self.kfac.model)
        # Dropout has to draw the masks of the observed pass.
        random.restore()
        try:
            with (
                _FORWARD_DERIVATIVES,
                forward_ad.dual_level(),
                sdpa_kernel(ATTENTION),
                private.without_fused_kernels(),
            ):
                duals = {n: forward_ad.make_dual(theta[n], along[n]) for n in names}
                returned = functional_call(
                    self.kfac.model, {**duals, **buffers}, arguments, keywords
                )
                likelihood = self.kfac.criterion.row.likelihood
                z, change = forward_ad.unpack_dual(
                    pick(returned, self.kfac.output, likelihood)
                )
        except (NotImplementedError, RuntimeError) as error:
            raise kc.UnsupportedError(
                f"The model has no forward derivative: {error}. Replace the operation, or "
                "use KFAC beside another optimizer."
            ) from error
        finally:
            now.restore()
        # Under autocast outputs may be in half precision, where squares overflow.
        dtype = torch.promote_types(change.dtype, torch.float32)
        multiplied = likelihood.fisher_factor_transpose_multiply(
            z.to(dtype), change.to(dtype)
        )
        share = observed.loss_factor * observed.share
        if observed.weight is None:
            return multiplied * share**0.5
        weight = share * observed.weight.clamp(min=0)
        weight = weight.reshape(weight.shape + (1,) * (multiplied.ndim - weight.ndim))
        # Replaced and not multiplied: padding may hold anything.
        return torch.where(weight > 0, multiplied, 0.0) * weight.sqrt()

    def _repeated(
        self, closure: Callable[[], Any], start: _Moment, differentiates: bool
    ) -> float:
        """Return the loss of the same batch of all, and leave all else as it is."""
        end = _Moment(self.kfac.model)
        gradients = [(p, p.grad) for p in self.kfac.model.parameters()]
        start.restore()
        loss, error = 0.0, None
        try:
            self._clear()
            with torch.set_grad_enabled(differentiates):
                loss = float(_detached(closure()))
        except Exception as raised:
            # Others may wait in an exchange of gradients, where they do not vote.
            if differentiates:
                raise
            error = raised
        finally:
            end.restore()
            self.kfac.discard()
            for p, grad in gradients:
                p.grad = grad
        return self._summed("loss after the step", [loss], error=error)[0]


@dataclass(frozen=True)
class _Batch:
    """The rows of a step and its loss, of all processes.

    Attributes
    ----------
    rows : float
        R.
    factor : float
        What the loss of a row is of the likelihood's negative log.
    divisor : float
        What loss and gradients are divided by to be those of the likelihood's mean.
    loss : float
        The likelihood's mean negative log.
    """

    rows: float
    factor: float
    divisor: float
    loss: float


class _Moment:
    """The random numbers to come and a model's buffers, which a forward pass changes."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model, self._random = model, RandomState(model)
        self._buffers = [b.clone() for b in model.buffers()]

    def restore(self) -> None:
        """Restore both."""
        self._random.restore()
        with torch.no_grad():
            buffers = zip(self._model.buffers(), self._buffers, strict=True)
            for buffer, before in buffers:
                buffer.copy_(before)


def _detached(loss: Any) -> Any:
    """Return a loss without its graph, as a tensor of no dimension."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss.detach()
    if isinstance(loss, float | int):
        return torch.tensor(float(loss), dtype=torch.float64)
    kind = type(loss).__name__
    if isinstance(loss, torch.Tensor):
        kind = f"tensor of shape {tuple(loss.shape)}"
    raise kc.ArgumentError(
        f"Expected the closure to return the loss, a tensor of one number, got a {kind}. "
        "It is compared with the loss after the step: end the closure with `return loss`."
    )


@functools.cache
def _load_forward_derivatives() -> None:
    """Let PyTorch import its forward derivatives, without its own warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with forward_ad.dual_level():
            forward_ad.make_dual(torch.zeros(()), torch.zeros(()))


def _split(flat: Any, trained: Sequence[tuple[Any, float]]) -> Vectors:
    """Return views of a flat vector in the shapes of the parameters."""
    parts = torch.split(flat, [p.numel() for p, _ in trained])
    return [part.view_as(p) for part, (p, _) in zip(parts, trained, strict=True)]


def _penalty(trained: Sequence[tuple[Any, float]]) -> float:
    """Return ``sum eta/2 |theta|^2``."""
    return sum(0.5 * decay * float(p.detach().square().sum()) for p, decay in trained)
