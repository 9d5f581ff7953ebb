r"""One step of Gauss-Newton in the space of samples, as integrations take it.

Conventions.  As `kfac_core.samples.search`.  On fixed points the damping is searched.  For
data that change, a step is SPRING's, and its damping and rate follow the residuals:

    lam = c rms(r) sqrt(tr K / R),   rate = rate_0 / (1 + k/2),

with k the number of times that an average of the batches' losses did not fall by a fiftieth
in twenty steps.  So the rate stays where all batches can be fitted at once, and falls as
1/t where noise is left.  For wave functions ``lam = 0.1 rate std(E) + 1e-4``, with E the
local energies.

References
----------
Goldshlager, Abrahamsen and Lin (2024), arXiv:2401.10190 (SPRING); Fan and Yuan (2005),
doi:10.1007/s00607-004-0083-1, for a damping in proportion to the residuals' norm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from kfac_core import constraints, errors
from kfac_core.array import Array, Check, Scalar
from kfac_core.array import namespaces as ns
from kfac_core.array.finite import positive_or_one
from kfac_core.integration.likelihoods import row_loss
from kfac_core.integration.schedules import Schedule, require_positive
from kfac_core.linalg.symmetric import SymmetricMatrix
from kfac_core.losses.loss import Loss
from kfac_core.samples.curvature import ACCURACY, damped_kernel, inner
from kfac_core.samples.iterative import NystromKernel
from kfac_core.samples.jacobian import Jacobian, Matrices, Parameters
from kfac_core.samples.search import Evaluation, search_step

RATE, MOMENTUM, FIRST_DAMPING = 0.3, 0.95, 1.0

# Times the change of log psi that a step asks for, which is the rate times the spread of
# local energies: where it is large, log psi is not linear over it.  Near an eigenstate
# there is no spread, and the noise of samples is left.
CENTERED_SHARE, CENTERED_LEAST = 0.1, 1e-4

DAMPING_SHARE = 0.003
"""c: from 0.001 to 0.01 it makes a factor of two in the loss of regressions."""

AVERAGING, FALL, PATIENCE = 0.9, 0.98, 20


@dataclass(frozen=True, kw_only=True)
class GaussNewtonOptions:
    """Options that `GaussNewton` has on every framework; make them with `of`.

    Attributes
    ----------
    minibatch : bool
        Whether residuals are of other data at each step.
    rate : Schedule
        Length of the steps on other data, before it falls.
    falls : bool
        Whether the rate falls where losses of batches do not.
    damping : float or None
        The first damping of a search, or that of all steps on other data; None for one
        that follows the residuals.
    momentum : float
        Momentum mu of SPRING.
    centered : bool
        Whether the mean over examples is taken off J and the residuals.
    likelihood : Loss or None
        None for least squares.
    """

    minibatch: bool
    rate: Schedule
    falls: bool
    damping: float | None
    momentum: float
    centered: bool
    likelihood: Loss | None

    @classmethod
    def of(
        cls,
        *,
        minibatch: bool | None,
        rate: Schedule | None,
        damping: float | None,
        momentum: float | None,
        centered: bool = False,
        likelihood: object = None,
        rate_name: str = "learning_rate",
    ) -> GaussNewtonOptions:
        """Return checked options, with defaults for those that are None.

        Raises
        ------
        ConventionError
            For options out of range, and for a rate or a momentum on fixed points.
        """
        if minibatch is None:
            minibatch = centered or rate is not None
        if not minibatch and (rate is not None or momentum or centered):
            raise errors.ConventionError(
                f"`{rate_name}`, `momentum` and `centered` are for mini-batches. Pass "
                "`minibatch=True`, or leave them out."
            )
        if centered and likelihood is not None:
            raise errors.ConventionError(
                "`centered` is for residuals. Leave it out, or leave `likelihood` out."
            )
        if not callable(rate):
            require_positive(rate_name, rate, optional=True)
        if damping is None and not minibatch:
            damping = FIRST_DAMPING
        if damping is not None:
            constraints.require_range("damping", damping, constraints.POSITIVE)
        momentum = MOMENTUM if momentum is None else momentum
        constraints.require_range("momentum", momentum, constraints.DECAY)
        if likelihood is not None:
            row = row_loss(likelihood)
            if row.mean_over_outputs:
                raise errors.ConventionError(
                    "Expected a likelihood that is a sum over outputs; scale the outputs."
                )
            likelihood = row.likelihood
        return cls(
            minibatch=minibatch,
            rate=RATE if rate is None else rate,
            falls=rate is None,
            damping=damping,
            momentum=momentum,
            centered=centered,
            likelihood=likelihood,
        )


class BatchProgress(NamedTuple):
    """How the losses of batches have fallen.

    Attributes
    ----------
    average, weight : float or array, 0-d
        A running average of the losses, times its weight.
    least : float or array, 0-d
        The average when it last fell.
    waited : float or array, 0-d
        Steps since.
    times : float or array, 0-d
        How often twenty steps passed without a fall.
    """

    average: Scalar
    weight: Scalar
    least: Scalar
    waited: Scalar
    times: Scalar

    @classmethod
    def start(cls, like: Array, /) -> BatchProgress:
        """Return the progress before the first step."""
        zero = ns.full_of(ns.own_namespace(like), 0.0, like)
        # Counts are floats, too, so that a traced loop carries arrays of one dtype.
        # The first average is below infinity: it counts as a fall.
        return cls(zero, zero, zero + float("inf"), zero, zero)

    def after(self, loss: Array, /) -> BatchProgress:
        """Return the progress after another batch's loss, 0-d."""
        xp = ns.own_namespace(loss)
        average = AVERAGING * self.average + (1 - AVERAGING) * loss
        weight = AVERAGING * self.weight + (1 - AVERAGING)
        # The first averages are too small by their weight, as the moments of Adam.
        mean = average / weight
        fell, zero = mean < FALL * self.least, 0.0 * loss
        waited = ns.where(fell, zero, self.waited + 1.0, xp=xp)
        late = waited >= PATIENCE
        least = ns.where(fell | late, mean, self.least, xp=xp)
        times = self.times + ns.where(late, zero + 1.0, zero, xp=xp)
        waited = ns.where(late, zero, waited, xp=xp)
        return BatchProgress(average, weight, least, waited, times)

    @property
    def share(self) -> Scalar:
        """What is left of the rate, 0-d."""
        # Harmonic: the rates still have an infinite sum, so no minimum is out of reach.
        return 1.0 / (1.0 + 0.5 * self.times)


class GaussNewtonStep(NamedTuple):
    """What a step is to do.

    Attributes
    ----------
    direction : dict of str to dict of str to array
        Subtract it, times the rate, from the parameters.
    matrices : dict of str to array, or None
        The same as the layers' matrices, which the next step on other data takes as its
        last direction.
    progress : BatchProgress or None
        Of steps on other data.
    damping : array, 0-d
        The damping that the next search begins with, or that of this step.
    rate : array or float
        The length of the step; 1 where it was searched.
    reached : array or None, 0-d
        The loss after the step, where it was searched.
    accepted : array of bool, 0-d
        Whether to take the step.
    trials : array of int or int
        How many dampings were tried.
    residual : array or None, 0-d
        The relative residual of what solved with ``K + N lam I``.
    """

    direction: dict[str, dict[str, Array]]
    matrices: dict[str, Array] | None
    progress: BatchProgress | None
    damping: Array
    rate: Scalar
    reached: Array | None
    accepted: Array
    trials: Array | int
    residual: Array | None


def gauss_newton_step(
    J: Jacobian,
    K: SymmetricMatrix | NystromKernel,
    residuals: Array,
    evaluate: Callable[[Parameters], Evaluation],
    /,
    *,
    options: GaussNewtonOptions,
    start: Evaluation,
    damping: Scalar | None,
    rate: Scalar,
    last: Matrices | None = None,
    progress: BatchProgress | None = None,
    check: Check = "raise",
    while_loop: Callable[..., Any] | None = None,
    overwrite: bool = False,
) -> GaussNewtonStep:
    """Return one step, on fixed points or on other data.

    Parameters
    ----------
    J, K, residuals, evaluate, start, while_loop, overwrite
        See `search_step`.
    options : GaussNewtonOptions
        Which step.
    damping : float or array, or None
        The damping to try first, or that of a step on other data; None for one that
        follows the residuals.
    rate : float or array
        Length of a step on other data, before it falls.
    last : mapping of str to array, optional
        The last direction as the layers' matrices; see `Jacobian.to_matrices`.
    progress : BatchProgress, optional
        Of the steps before.
    check : {"raise", "status"}
        See `damped_kernel`; of steps on other data.

    Returns
    -------
    GaussNewtonStep
        The step, and what the next one begins with.
    """
    if not options.minibatch:
        assert damping is not None
        searched = search_step(
            J,
            K,
            residuals,
            evaluate,
            start=start,
            damping=damping,
            while_loop=while_loop,
            overwrite=overwrite,
        )
        return GaussNewtonStep(
            searched.step,
            None,
            None,
            searched.damping,
            1.0,
            searched.loss,
            searched.accepted,
            searched.trials,
            searched.residual,
        )
    xp = ns.own_namespace(K.array)
    r = ns.cast(xp, residuals, K.array.dtype)
    if options.centered:
        # For the size alone: `direction` takes the mean off by itself.
        r = r - xp.mean(r, axis=0, keepdims=True)
    size = inner(r, r, xp=xp) / J.samples
    progress = (BatchProgress.start(size) if progress is None else progress).after(size)
    if options.falls:
        rate = rate * progress.share
    if damping is None and options.centered:
        damping = CENTERED_SHARE * rate * size**0.5 + CENTERED_LEAST
    elif damping is None:
        trace = K.trace()
        follows = DAMPING_SHARE * (size * trace / J.samples) ** 0.5
        roundoff = ns.roundoff_of(K.array.dtype, xp=xp)
        least = 2.0 * roundoff / ACCURACY * trace / J.examples
        damping = xp.maximum(follows, least)
        # 1 for residuals that depend on nothing, which leave no step to damp.
        damping = positive_or_one(damping)
    F = damped_kernel(
        J,
        K,
        damping=damping,
        centered=options.centered,
        check=check,
        overwrite=overwrite,
    )
    matrices = F.direction_matrices(residuals, last, options.momentum)
    # Conjugate gradients have no factor, and report no residual here.
    factor = getattr(F.kernel, "cholesky", None)
    return GaussNewtonStep(
        J.to_parameters(matrices),
        matrices,
        progress,
        F.damping,
        rate,
        None,
        F.status() == 0,
        1,
        None if factor is None else factor.residual,
    )
