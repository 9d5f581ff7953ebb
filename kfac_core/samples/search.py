r"""Levenberg-Marquardt in the space of samples, with geodesic acceleration.

Conventions.  As `kfac_core.samples.curvature`.  A step s goes from theta to
``theta - s``, and is ``s = J^T c`` with c in the space of samples:

    c = w + w_a / 2,   (K + N lam I) w = r,   (K + N lam I) w_a = r'',

with r'' the second derivative of the residuals along ``d = J^T w``, by a difference over a
part h of d:

    r'' = 2/h ((r(theta - h d) - r(theta)) / h + J d),   J d = r - N lam w.

The damping lam is raised until the loss falls.  The next step begins with the damping that
succeeded, and with a lower one where none had to be raised.

References
----------
Transtrum and Sethna (2012), arXiv:1201.5885, sections 4 and 6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kfac_core.array import Array, Namespace, Scalar
from kfac_core.array import namespaces as ns
from kfac_core.array.finite import truth_of
from kfac_core.damping import require_damping
from kfac_core.linalg.certificate import RESIDUAL_LIMIT
from kfac_core.linalg.cholesky import restored_matrix
from kfac_core.linalg.symmetric import SymmetricMatrix
from kfac_core.samples.curvature import SampleCurvature, damped_kernel, squared_norm
from kfac_core.samples.iterative import IterativeKernel, NystromKernel
from kfac_core.samples.jacobian import Jacobian, Parameters

RAISE, LOWER = 3.0, 5.0
"""Factors on the damping after a trial that failed, and after a first one that succeeded.

To lower a damping that has just been raised costs a failed trial in most of the steps.
"""

PROBE = 0.1
"""The part h of the step over which the second derivative is a difference."""

MOST_BENT = 0.75
"""A step counts as too long if its acceleration is this much of its velocity."""

TRIALS = 20
"""Dampings that are tried at most: 3^20 is ten decades."""


class Evaluation(NamedTuple):
    """The model and its loss for some parameters.

    Attributes
    ----------
    values : array, shape (N,) or (N, C)
        What J is the Jacobian of: the residuals; or, for the Hessian's root B of a
        likelihood, where the search began, ``B^T f`` of the outputs f.
    loss : array, 0-d
        The loss.
    """

    values: Array
    loss: Array


class SearchedStep(NamedTuple):
    """A step that lowers the loss, or none.

    Attributes
    ----------
    step : dict of str to dict of str to array
        Subtract it from the parameters; zero if no trial lowered the loss.
    damping : array, 0-d
        What the next search begins with.
    loss : array, 0-d
        The loss that was reached.
    accepted : array of bool, 0-d
        Whether a trial lowered the loss.
    trials : array of int32, 0-d
        How many dampings were tried.
    residual : array, 0-d
        The relative residual of what solved with ``K + N lam I`` in the last trial.
    """

    step: dict[str, dict[str, Array]]
    damping: Array
    loss: Array
    accepted: Array
    trials: Array
    residual: Array


class _Trials(NamedTuple):
    """A search after some trials, all of 0-d arrays but for the coefficients.

    Attributes
    ----------
    coefficients : array, shape of the residuals
        c of the step that lowered the loss; zero before.
    damping : array
        What to try next.
    loss : array
        The loss that was reached; the one at the start before.
    accepted : array of bool
        Whether the last trial lowered the loss.
    count : array of int32
        How many trials were made.
    residual : array
        The relative residual of the last solution w.
    """

    coefficients: Array
    damping: Array
    loss: Array
    accepted: Array
    count: Array
    residual: Array


def search_step(
    J: Jacobian,
    K: SymmetricMatrix | NystromKernel,
    residuals: Array,
    evaluate: Callable[[Parameters], Evaluation],
    /,
    *,
    start: Evaluation,
    damping: Scalar,
    while_loop: Callable[..., Any] | None = None,
    overwrite: bool = False,
) -> SearchedStep:
    """Search for a damping whose accelerated Gauss-Newton step lowers the loss.

    Parameters
    ----------
    J : Jacobian
        Rows of the network's layers.
    K : SymmetricMatrix or NystromKernel
        ``J J^T``, from `sample_gram` or `nystrom_kernel`.
    residuals : array, shape (N,) or (N, C)
        The residuals r: ``J^T r / N`` is the gradient of the loss.
    evaluate : callable
        Takes a step s, parameter-shaped, and returns the model at ``theta - s``.
    start : Evaluation
        The model at theta.
    damping : float or 0-d array
        The damping to try first, positive, in units of ``J^T J / N``.
    while_loop : callable, optional
        ``jax.lax.while_loop``, with which the search can be traced.  By default a loop of
        Python, which reads whether the loss fell.
    overwrite : bool
        Whether factors may stand in the memory of K, which is then not to be used again.

    Returns
    -------
    SearchedStep
        The step, and the damping that the next search begins with.

    Raises
    ------
    DampingError
        For a damping that is negative or not finite.

    Notes
    -----
    For each trial ``R^3 / 3`` flops and two evaluations.  No damping above
    ``tr K / (N sqrt(eps))`` is tried; where all below it fail, as at a minimum, the next
    search begins where this one began.  A damping too small for K to be
    factorized, or a solution whose residual is above one in a hundred, is a trial that
    failed.
    """
    require_damping(damping)
    xp = ns.own_namespace(K.array)
    r = ns.cast(xp, residuals, K.array.dtype)
    false = xp.zeros((), dtype=xp.bool, device=ns.device_of(r))
    lam = ns.full_of(xp, damping, K.array)
    # Above this a step changes the loss by less than the root of its roundoff.
    trace = K.trace()
    most = trace / (J.examples * ns.roundoff_of(trace.dtype, xp=xp) ** 0.5)
    most = xp.where(most > 0, most, lam)
    first = _Trials(
        coefficients=xp.zeros_like(r),
        damping=xp.where(lam > most, most, lam),
        loss=start.loss,
        accepted=false,
        count=xp.astype(false, xp.int32),
        residual=ns.full_of(xp, 0.0, K.array),
    )

    def unfinished(trials: _Trials) -> Array:
        return ~trials.accepted & (trials.count < TRIALS) & (trials.damping <= most)

    restored = K if overwrite and isinstance(K, SymmetricMatrix) else None
    diagonal = None if restored is None else 1.0 * restored.diagonal()

    def next_trial(trials: _Trials) -> _Trials:
        lam = trials.damping
        F = damped_kernel(J, K, damping=lam, check="status", overwrite=overwrite)
        after = _next_trial(trials, F, r, evaluate, start, xp)
        if restored is not None and truth_of(after.accepted, xp=xp) is not True:
            _restore(restored, diagonal, F, xp)
        return after

    loop = _python_loop if while_loop is None else while_loop
    last: _Trials = loop(unfinished, next_trial, first)
    # At a minimum no damping succeeds, and none is learned.
    learned = last.accepted | (last.damping <= most)
    return SearchedStep(
        step=J.multiply_transposed(last.coefficients),
        damping=xp.where(learned, last.damping, first.damping),
        loss=last.loss,
        accepted=last.accepted,
        trials=last.count,
        residual=last.residual,
    )


def _restore(
    K: SymmetricMatrix, diagonal: Array, F: SampleCurvature, xp: Namespace
) -> None:
    """Bring K back where the factor of a trial stands in its memory."""
    factor: Any = F.kernel
    if factor.cholesky.lower is K.array:
        restored_matrix(K, diagonal, xp=xp)


def _python_loop(
    condition: Callable[[_Trials], Array],
    body: Callable[[_Trials], _Trials],
    value: _Trials,
) -> _Trials:
    while bool(condition(value)):
        value = body(value)
    return value


def _next_trial(
    trials: _Trials,
    F: SampleCurvature,
    residuals: Array,
    evaluate: Callable[[Parameters], Evaluation],
    start: Evaluation,
    xp: Namespace,
) -> _Trials:
    """Return the search after another damping."""
    lam = trials.damping
    failed = trials._replace(damping=lam * RAISE, count=trials.count + 1)
    # Skip what is known to be in vain; where the flag is traced, it is selected below.
    if truth_of(F.status() == 0, xp=xp) is False:
        return failed
    w = F.solve_kernel(residuals)
    residual = _residual(F, residuals, w)
    c, straight = _accelerated(F, w, residuals, evaluate, start)
    straight = straight & (residual <= RESIDUAL_LIMIT)
    if truth_of(straight, xp=xp) is False:
        return failed._replace(residual=residual)
    reached = evaluate(F.jacobian.multiply_transposed(c)).loss
    accepted = (F.status() == 0) & straight & (reached < trials.loss)
    lowered = xp.where(trials.count == 0, lam / LOWER, lam)
    return _Trials(
        coefficients=xp.where(accepted, c, trials.coefficients),
        damping=xp.where(accepted, lowered, failed.damping),
        loss=xp.where(accepted, reached, trials.loss),
        accepted=accepted,
        count=failed.count,
        residual=residual,
    )


def _residual(F: SampleCurvature, residuals: Array, w: Array) -> Array:
    """Return the residual of a factorization, or of a solution by iterations."""
    if isinstance(F.kernel, IterativeKernel):
        return F.residual(residuals, w)
    return F.kernel.cholesky.residual


def _accelerated(
    F: SampleCurvature,
    w: Array,
    residuals: Array,
    evaluate: Callable[[Parameters], Evaluation],
    start: Evaluation,
) -> tuple[Array, Array]:
    """Return the coefficients c, and whether the path bends little enough."""
    J, N = F.jacobian, F.jacobian.examples
    xp = ns.own_namespace(w)
    d = J.combine(w)
    probe = {name: PROBE * x for name, x in d.items()}
    probed = evaluate(J.to_parameters(probe)).values
    change = ns.cast(xp, probed - start.values, w.dtype) / PROBE
    # r(theta - h d) = r - h J d + h^2/2 r_dd, and J d = K w = r - N lam w is known, so
    # the second derivative r_dd takes one evaluation and no product with J.
    bend = (2.0 / PROBE) * (change + residuals - (N * F.damping) * w)
    w_a = F.solve_kernel(bend)
    lengths = squared_norm(J.combine(w_a)), squared_norm(d)
    return w + 0.5 * w_a, lengths[0] <= MOST_BENT**2 * lengths[1]
