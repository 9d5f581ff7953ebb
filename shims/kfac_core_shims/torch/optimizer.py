"""`KFACOptimizer`: steps whose rate and momentum come from the exact quadratic model.

Conventions.  With the natural gradient ``D = -P g`` and the last step ``delta_0``, the step
is ``delta = alpha D + mu delta_0`` where alpha and mu minimize

    g . delta + 1/2 delta . (F + lam I) delta,

F the exact Fisher matrix of the batch: ``d_i . F d_j`` is computed from the changes
``J d_i`` of the outputs, one forward derivative of the model each.  Parameters without a
block go along their gradient, with a coefficient of their own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import kfac_core as kc
from kfac_core_shims.torch.kfac import KFAC
from kfac_core_shims.torch.layers import without_fused_kernels
from kfac_core_shims.torch.outputs import pick

__all__ = ["KFACOptimizer"]

_BLOCK = "model"
"""All parameters are one block of a vector of `kfac_core.steps`."""


class KFACOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    r"""K-FAC without a learning rate: rate, momentum and damping are found.

    A step minimizes the quadratic model of the loss along the natural gradient
    :math:`D = -P g` and the last step :math:`\delta_0`,

    .. math:: \delta = \alpha D + \mu \delta_0, \qquad
        (\alpha, \mu) = \arg\min \; g \cdot \delta +
        \tfrac12 \, \delta \cdot (F + (\lambda + \eta) I) \, \delta ,

    with F the exact Fisher matrix of the batch and :math:`\eta` the weight decay.  Every
    `adapt_every` steps the damping :math:`\lambda` is adapted by the Levenberg-Marquardt
    rule, from the loss before and after the step.

    Parameters
    ----------
    model : torch.nn.Module
        See `KFAC`.  It is run again for each step, with forward derivatives.
    damping : float
        Damping to begin with.
    kl_clip : float or None
        Bound on ``delta . F delta``, twice the Kullback-Leibler divergence of a step: a
        small batch says little of a long step.  None for no bound.
    adapt_every : int
        Steps between adaptations of the damping, which take one more call of the closure.
    adapt_decay : float
        Factor on the damping for each step since the last adaptation, in (0, 1].
    minimum_damping, maximum_damping : float
        Bounds of the damping.
    weight_decay : float
        Factor eta of the penalty ``eta / 2 |theta|^2``.
    **options
        Options of `KFAC`, but ``lr`` and ``output=None``.

    Attributes
    ----------
    kfac : KFAC
        What preconditions.

    Raises
    ------
    kfac_core.ConventionError, kfac_core.UnsupportedError
        As `KFAC`; and for ``fisher="empirical"``, which has no such model.

    Notes
    -----
    A step costs two or three forward derivatives more than one of `KFAC`.  The damping is
    adapted best where two calls of the closure give the same loss, without dropout.

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
    >>> def closure():
    ...     optimizer.zero_grad()
    ...     loss = torch.nn.functional.cross_entropy(model(x), y)
    ...     loss.backward()
    ...     return loss
    >>> loss = optimizer.step(closure)
    """

    def __init__(
        self,
        model: Any,
        *,
        damping: float = 0.1,
        kl_clip: float | None = 1e-2,
        adapt_every: int = 5,
        adapt_decay: float = 19 / 20,
        minimum_damping: float = 1e-6,
        maximum_damping: float = 1e3,
        weight_decay: float = 0.0,
        **options: Any,
    ) -> None:
        if "lr" in options:
            raise kc.ConventionError(
                "KFACOptimizer finds its rate, and takes no `lr`. For a rate of your own "
                "take KFAC and an optimizer of torch.optim."
            )
        kc.integration.require_positive("kl_clip", kl_clip, optional=True)
        if options.get("output", "auto") is None:
            raise kc.ConventionError(
                "KFACOptimizer runs the model again for its quadratic model, and needs "
                "`output` to pick the outputs; got None."
            )
        kc.integration.interval_at("adapt_every", adapt_every, 0)
        require_fisher(options.get("fisher", "gradients"))
        kc.levenberg_marquardt(
            damping,
            0.5,
            decay=adapt_decay,
            minimum=minimum_damping,
            maximum=maximum_damping,
        )
        if not weight_decay >= 0.0:
            raise kc.ConventionError(
                f"Expected `weight_decay` to be a number >= 0, got {weight_decay!r}."
            )
        self.kfac = KFAC(
            model, damping=damping + weight_decay, kl_clip=None, keep=True, **options
        )
        defaults = {
            "damping": float(damping),
            "kl_clip": kl_clip,
            "adapt_every": adapt_every,
            "adapt_decay": adapt_decay,
            "minimum_damping": minimum_damping,
            "maximum_damping": maximum_damping,
            "weight_decay": weight_decay,
            "steps": 0,
        }
        trained = [p for p in self.kfac.model.parameters() if p.requires_grad]
        super().__init__(trained, defaults)
        self._last: dict[str, float] = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the group of all trained parameters; there is one."""
        if self.param_groups:
            raise kc.UnsupportedError(
                "KFACOptimizer has one group, of all trained parameters of its model: the "
                "quadratic model is of them together."
            )
        super().add_param_group(param_group)

    def __deepcopy__(self, memo: Any) -> Any:
        self.kfac.__reduce__()

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step.

        Parameters
        ----------
        closure : callable, optional
            Zeroes the gradients, computes the loss, calls ``backward`` and returns the
            loss.  Without it the gradients are those of a backward pass before, and the
            damping stays.

        Returns
        -------
        torch.Tensor or None
            The loss before the step; None without a closure.

        Raises
        ------
        kfac_core.NotFiniteError
            For a loss or a gradient that is not finite; nothing has changed then.
        kfac_core.KFACError
            As `KFAC.step`.
        """
        group = self.param_groups[0]
        loss: Any = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            if not bool(torch.isfinite(loss)):
                self.kfac.discard()
                raise kc.NotFiniteError(
                    f"The loss is {float(loss.detach())}. Nothing was changed."
                )
        named = {
            n: p
            for n, p in self.kfac.model.named_parameters()
            if p.requires_grad and p.grad is not None
        }
        decay, damping = group["weight_decay"], group["damping"]
        gradient = {n: p.grad + decay * p for n, p in named.items()}
        directions, passes = self._directions(named, gradient)
        rows = sum(seen.rows for seen in passes)
        mean = 1.0 if self.kfac.reduction == "mean" else rows
        model = self._quadratic_model(
            gradient, directions, passes, mean=mean, damping=damping, decay=decay
        )
        found = model.minimize().coefficients
        if group["kl_clip"] is not None:
            # Of the mean loss, whatever the reduction of the one that is differentiated.
            size = found @ model.curvature @ found / mean
            found = (
                found
                * kc.steps.trust_region_rate(
                    size, bound=group["kl_clip"], maximum=1.0
                ).scale
            )
        change = kc.steps.linear_combination(found, _vectors(directions))[_BLOCK]
        penalty = _half_squares(named, decay)
        for name, p in named.items():
            p.add_(change[name])
            self.state[p]["step"] = change[name]
        group["steps"] += 1
        self._last = {
            f"coefficient_{i}": float(c) for i, c in enumerate(found.tolist())
        }
        if closure is not None and group["steps"] % group["adapt_every"] == 0:
            predicted = float(model.change(found, damped=False))
            before = float(loss.detach()) + penalty
            self._adapt(closure, named, before, predicted)
        return loss

    def metrics(self) -> dict[str, float]:
        """Return numbers of the last step for a logger.

        Returns
        -------
        dict of str to float
            ``steps``, ``damping``, ``coefficient_0`` (of the natural gradient) and so on;
            ``reduction_ratio`` after an adaptation.
        """
        group = self.param_groups[0]
        own = {"steps": float(group["steps"]), "damping": float(group["damping"])}
        return own | self._last

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, with that of `kfac`."""
        found: dict[str, Any] = super().state_dict()
        return found | {"kfac": self.kfac.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self.kfac.load_state_dict(state_dict.get("kfac", {}))
        own = {name: x for name, x in state_dict.items() if name != "kfac"}
        super().load_state_dict(own)

    def _directions(
        self, named: Mapping[str, Any], gradient: Mapping[str, Any]
    ) -> tuple[list[dict[str, Any]], list[Any]]:
        """Return the directions that a step is made of, and the passes of the batch."""
        raw = {n: p.grad for n, p in named.items()}
        for name, p in named.items():
            p.grad = gradient[name].clone()
        # The step forgets its passes; what the model was called with is needed after it.
        passes = [replace(seen, calls=[]) for seen in self.kfac.differentiated]
        try:
            self.kfac.step()
            natural = {n: p.grad for n, p in named.items()}
        finally:
            for name, p in named.items():
                p.grad = raw[name]
        covered = self.kfac.preconditioned
        zeros = {n: torch.zeros_like(p) for n, p in named.items()}
        parts = [
            {n: -natural[n] for n, p in named.items() if (id(p) in covered) is inside}
            for inside in (True, False)
        ]
        directions = [zeros | part for part in parts if part]
        last = {n: self.state[p]["step"] for n, p in named.items() if self.state[p]}
        if last:
            directions.append(zeros | last)
        return directions, passes

    def _quadratic_model(
        self,
        gradient: Mapping[str, Any],
        directions: Sequence[Mapping[str, Any]],
        passes: Sequence[Any],
        *,
        mean: float,
        damping: float,
        decay: float,
    ) -> Any:
        rows = sum(seen.rows for seen in passes)
        total: Any = 0.0
        for seen in passes:
            z, changes = self._changes(seen, directions)
            multiplied = [self._multiplied(seen, z, c) for c in changes]
            total = total + kc.steps.curvature_of_outputs(
                changes, multiplied, examples=rows
            )
        # The model is of the objective as it is differentiated, a mean or a sum.
        vectors = _vectors(directions)
        return kc.steps.quadratic_model(
            {_BLOCK: dict(gradient)},
            vectors,
            curvature=total * mean + kc.steps.l2_curvature(vectors, weight_decay=decay),
            damping=damping * mean,
        )

    def _changes(
        self, seen: Any, directions: Sequence[Mapping[str, Any]]
    ) -> tuple[Any, list[Any]]:
        """Return the outputs of a pass, and their change along each direction."""
        model, kfac = self.kfac.model, self.kfac
        arguments, options, random = seen.replay
        fixed = {n: p.detach() for n, p in model.named_parameters()}
        fixed |= {n: b.clone() for n, b in model.named_buffers()}
        found: list[Any] = []
        z: Any = None

        def outputs(moved: Mapping[str, Any]) -> Any:
            returned = torch.func.functional_call(
                model, {**fixed, **moved}, arguments, options
            )
            return pick(returned, kfac.output)

        with (
            warnings.catch_warnings(),
            torch.random.fork_rng(),
            sdpa_kernel(SDPBackend.MATH),
            without_fused_kernels(),
        ):
            # PyTorch's own, where it first loads its forward derivatives.
            warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
            for direction in directions:
                torch.random.set_rng_state(random)
                given = {n: fixed[n] for n in direction}
                tangent = {n: d.to(given[n].dtype) for n, d in direction.items()}
                z, change = torch.func.jvp(outputs, (given,), (tangent,))
                found.append(
                    change.to(torch.promote_types(change.dtype, torch.float32))
                )
        return z, found

    def _multiplied(self, seen: Any, z: Any, change: Any) -> Any:
        row = self.kfac.criterion.row
        product = row.likelihood.fisher_multiply(z, change)
        product = product * row.weight(z.shape[-1])
        if seen.weight is not None:
            on = (seen.weight > 0)[..., None]
            product = torch.where(on, product, 0.0) * seen.weight[..., None]
        return product

    def _adapt(
        self,
        closure: Callable[[], Any],
        named: Mapping[str, Any],
        before: float,
        predicted: float,
    ) -> None:
        """Adapt the damping, and take back a step after which the loss is not finite."""
        group = self.param_groups[0]
        with torch.enable_grad():
            after = float(closure().detach())
        self.kfac.discard()
        after += _half_squares(named, group["weight_decay"])
        ratio = float(kc.steps.reduction_ratio(before, after, predicted=predicted))
        group["damping"] = float(
            kc.levenberg_marquardt(
                group["damping"],
                ratio,
                decay=group["adapt_decay"] ** group["adapt_every"],
                minimum=group["minimum_damping"],
                maximum=group["maximum_damping"],
            )
        )
        self.kfac.damping = group["damping"] + group["weight_decay"]
        self._last["reduction_ratio"] = ratio
        if not torch.isfinite(torch.tensor(after)):
            for p in named.values():
                p.sub_(self.state[p].pop("step"))


def require_fisher(fisher: Any, /) -> None:
    """Raise `ConventionError` for a matrix that is not of the outputs alone."""
    if fisher == "empirical":
        raise kc.ConventionError(
            "The quadratic model is of the Fisher matrix of the outputs; "
            "fisher='empirical' has none. Take 'gradients' or 'exact'."
        )


def _vectors(
    directions: Sequence[Mapping[str, Any]],
) -> list[dict[str, dict[str, Any]]]:
    return [{_BLOCK: dict(direction)} for direction in directions]


def _half_squares(named: Mapping[str, Any], decay: float) -> float:
    if decay == 0.0:
        return 0.0
    return 0.5 * decay * sum(float((p * p).sum()) for p in named.values())
