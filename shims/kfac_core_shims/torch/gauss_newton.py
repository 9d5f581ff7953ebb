"""Gauss-Newton in the space of samples, as an optimizer of least-squares problems.

Conventions.  The loss is ``1/2 sum_i (1/N_i) |r_i|^2`` over the terms i that the caller's
function of residuals returns, N_i the examples of a term.  A weighted term is multiplied by
the root of its weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

import kfac_core as kc
from kfac_core_shims.torch.jacobians import JacobianFinder

__all__ = ["GaussNewton"]

Residuals: TypeAlias = Any
"""A tensor of residuals of shape (N,) or (N, C), or a sequence of such terms."""

# Transtrum and Sethna (2012), sections 4 and 6: the damping falls faster than it rises, the
# second derivative is a difference over a tenth of the step, and a step whose acceleration
# is not short beside its velocity is taken for too long.
_LOWER, _RAISE = 5.0, 3.0
_PROBE = 0.1
_MOST_BENT = 0.75
_TRIALS = 20


class GaussNewton(torch.optim.Optimizer):  # type: ignore[misc]
    r"""Gauss-Newton with the exact curvature of the whole model, for least squares.

    .. math:: \theta \leftarrow \theta - d + \tfrac12 a, \qquad
        d = J^T (J J^T + N \lambda I)^{-1} r

    with J the Jacobian of the residuals r by all parameters, which is taken as the rows of
    the model's layers and never formed, and a the geodesic acceleration: the direction in
    which the second derivative of r along d bends the path.  There is no learning rate to
    choose: the damping adapts to whether a step lowers the loss.

    Parameters
    ----------
    model : torch.nn.Module
        The model; all parameters that require gradients are trained.
    lr : float, optional
        A fixed length of the steps, for residuals of other data at each step
        (mini-batches); the damping is then fixed, and nothing is accelerated.  A scheduler
        may change it.  By default each step is as long as the model of the loss says.
    damping : float
        The first damping, in units of ``J^T J / N``.
    momentum : float
        SPRING's momentum in [0, 1), for mini-batches.

    Raises
    ------
    kfac_core.ConventionError
        For options out of range.

    Notes
    -----
    A step costs a forward and a backward pass, ``R^2 (n + m)`` flops a layer and
    ``R^3 / 3`` for R residuals, and for each damping that is tried two forward passes and
    another ``R^3 / 3``.  It reads values of the loss, which synchronizes with the device.
    Memory: the rows, and ``2 R^2`` numbers.

    References
    ----------
    Transtrum and Sethna (2012), arXiv:1201.5885, for damping and acceleration; Müller and
    Zeinhofer (2025), arXiv:2505.12149; Goldshlager, Abrahamsen and Lin (2024),
    arXiv:2401.10190, for the momentum.

    Examples
    --------
    >>> import torch
    >>> from kfac_core_shims.torch import GaussNewton
    >>> _ = torch.manual_seed(0)
    >>> net = torch.nn.Sequential(
    ...     torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    ... )
    >>> x = torch.linspace(-1, 1, 50)[:, None]
    >>> y = torch.sin(3 * x)
    >>> optimizer = GaussNewton(net)
    >>> losses = [float(optimizer.step(lambda: net(x) - y)) for _ in range(30)]
    >>> losses[-1] < 1e-5 * losses[0]
    True
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        lr: float | None = None,
        damping: float = 1.0,
        momentum: float = 0.0,
    ) -> None:
        constraints = kc.constraints
        if lr is not None:
            constraints.require_range("lr", lr, constraints.POSITIVE)
        constraints.require_range("damping", damping, constraints.POSITIVE)
        constraints.require_range("momentum", momentum, constraints.DECAY)
        self._finder = JacobianFinder(model)
        options = {"lr": lr, "damping": damping, "momentum": momentum}
        super().__init__(self._finder.parameters, options)

    @property
    def damping(self) -> float:
        """The damping that the next step begins with."""
        return float(self.param_groups[0]["damping"])

    @property
    def formed(self) -> dict[str, str]:
        """Parameters whose derivatives the last step formed, R numbers each, and why."""
        return dict(self._finder.formed)

    def step(self, residuals: Callable[[], Residuals]) -> Any:
        """Take one step, and return the loss before it.

        Parameters
        ----------
        residuals : callable
            Returns the residuals of the model with its graph: a tensor of shape (N,) or
            (N, C), or a sequence of such terms of the loss.  It is called again for each
            trial, and must then return residuals of the same points.

        Returns
        -------
        torch.Tensor
            The loss ``1/2 sum_i (1/N_i) |r_i|^2``, 0-d.

        Raises
        ------
        kfac_core.ShapeError
            For residuals of another shape.
        kfac_core.NotFiniteError
            For residuals that are not finite.  Nothing was changed.
        """
        terms = self._evaluated(residuals, recorded=True)
        examples = sum(len(term) for term in terms)
        scales = [(examples / len(term)) ** 0.5 for term in terms]
        J = self._finder.jacobian(terms, scales)
        with torch.no_grad():
            r = _joined(terms, scales)
            loss = r.double().square().sum() / (2 * examples)
            if not bool(torch.isfinite(loss)):
                raise kc.NotFiniteError(
                    f"Expected finite residuals, got a loss of {float(loss)}. Nothing was "
                    "changed; begin with smaller weights, or look at the data."
                )
            K = kc.samples.sample_gram(J)
            if self.param_groups[0]["lr"] is None:
                path = _Path(self, residuals, scales)
                try:
                    self._search(path, J, K, r)
                except BaseException:
                    path.go(None)
                    raise
            else:
                self._one_step(J, K, r)
        return loss

    def _search(self, path: _Path, J: Any, K: Any, r: Any) -> None:
        """Go to a lower loss, and adapt the damping; stay where no damping lowers it."""
        [group] = self.param_groups
        loss = float(r.double().square().sum())
        damping = group["damping"]
        for _ in range(_TRIALS):
            step = self._accelerated(path, J, K, r, damping)
            if step is not None:
                path.go(step)
                reached = float(path.residuals().double().square().sum())
                if reached < loss:
                    group["damping"] = damping / _LOWER
                    return
            damping *= _RAISE
        path.go(None)
        group["damping"] = damping

    def _accelerated(
        self, path: _Path, J: Any, K: Any, r: Any, damping: float
    ) -> dict[Any, Any] | None:
        """Return ``d - a/2`` by parameter; None where the path bends too much."""
        try:
            F = kc.samples.damped_kernel(J, K, damping=damping)
        except kc.FactorizationError:
            return None
        w = F.solve_kernel(r)
        d = self._finder.directions(J.multiply_transposed(w))
        path.go({p: _PROBE * x for p, x in d.items()})
        # K w = r - N lam w, so that the first derivative along d costs no product.
        slope = r - (len(r) * damping) * w.to(r.dtype)
        bend = (2.0 / _PROBE) * ((path.residuals() - r) / _PROBE + slope)
        if not bool(torch.isfinite(bend).all()):
            return None
        a = self._finder.directions(J.multiply_transposed(F.solve_kernel(bend)))
        if _norm(a) > _MOST_BENT * _norm(d):
            return None
        return {p: x + 0.5 * a[p] for p, x in d.items()}

    def _one_step(self, J: Any, K: Any, r: Any) -> None:
        """Take one step of a fixed length, with momentum."""
        [group] = self.param_groups
        state = self.state
        last = None
        if all("direction" in state[p] for p in group["params"]):
            by_parameter = {p: state[p]["direction"] for p in group["params"]}
            last = self._finder.vectors(by_parameter, J)
        F = kc.samples.damped_kernel(J, K, damping=group["damping"])
        direction = F.direction(r, last=last, momentum=group["momentum"])
        for p, d in self._finder.directions(direction).items():
            state[p]["direction"] = d
            p.sub_(d, alpha=group["lr"])

    def _evaluated(self, residuals: Any, *, recorded: bool) -> list[Any]:
        """Return the terms of the loss as matrices (N, C), with their graphs."""
        self._finder.wants_statistics = recorded
        try:
            with torch.enable_grad():
                returned = residuals()
        finally:
            self._finder.wants_statistics = False
        terms = [returned] if isinstance(returned, torch.Tensor) else list(returned)
        for term in terms:
            if not isinstance(term, torch.Tensor) or term.ndim not in (1, 2):
                form = tuple(term.shape) if hasattr(term, "shape") else type(term)
                raise kc.ShapeError(
                    "Expected residuals of shape (N,) or (N, C), or a sequence of such, "
                    f"got {form}."
                )
        return [term if term.ndim == 2 else term[:, None] for term in terms]


class _Path:
    """The parameters where a step began, and the residuals where it tries to go."""

    def __init__(
        self, optimizer: GaussNewton, residuals: Any, scales: Sequence[float]
    ) -> None:
        self._optimizer, self._residuals, self._scales = optimizer, residuals, scales
        self._start = {
            p: p.detach().clone() for p in optimizer.param_groups[0]["params"]
        }

    def go(self, step: dict[Any, Any] | None) -> None:
        """Set the parameters to where a step leads; None leads nowhere."""
        for p, start in self._start.items():
            p.copy_(start if step is None else start - step[p])

    def residuals(self) -> Any:
        """Return the residuals there, joined and scaled."""
        terms = self._optimizer._evaluated(self._residuals, recorded=False)
        return _joined(terms, self._scales)


def _joined(terms: Sequence[Any], scales: Sequence[float]) -> Any:
    """Return the residuals of all terms, each times its scale."""
    return torch.cat([t.detach() * s for t, s in zip(terms, scales, strict=True)])


def _norm(vectors: dict[Any, Any]) -> float:
    total = sum(x.double().square().sum() for x in vectors.values())
    return math.sqrt(float(total))
