"""Options that may change from step to step: numbers, or functions of the step.

Conventions.  A schedule is a number, which holds for all steps, or a callable of the
number of steps taken so far, 0 at the first.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from kfac_core import errors
from kfac_core.array import Scalar
from kfac_core.losses import Bernoulli, Categorical, Joint, Loss

Schedule: TypeAlias = Scalar | Callable[[int], Scalar]
"""A number or a 0-d array, or a callable ``step -> number`` of the steps taken so far."""

Interval: TypeAlias = int | Callable[[int], int]
"""A number of steps, at least 1, or a callable ``step -> number of steps``."""


@dataclass(frozen=True)
class Falling:
    r"""A schedule that falls with the steps, :math:`f / (1 + (t / \tau)^p)`.

    As a KL clip it shortens steps like :math:`t^{-p/2}`.  Steps of constant length jump
    out of narrow minima late in a run.

    Attributes
    ----------
    first : float
        Value f of the first step.
    after : float
        Steps tau after which the half is left.
    power : float
        Power p.

    Examples
    --------
    >>> from kfac_core.integration import Falling
    >>> clip = Falling(0.002)
    >>> clip(0), clip(100)
    (0.002, 0.001)
    """

    first: float
    after: float = 100.0
    power: float = 1.0

    def __call__(self, step: Scalar, /) -> Scalar:
        """Return the value after a number of steps."""
        return self.first / (1.0 + (step / self.after) ** self.power)


@dataclass(frozen=True)
class Widening:
    """An interval that is shorter at first, when curvature changes fast.

    Attributes
    ----------
    first, later : int
        Number of steps between two events, before and from the step `until` on.
    until : int
        The step.

    Examples
    --------
    >>> from kfac_core.integration import Widening
    >>> interval = Widening(20, 60, until=60)
    >>> [step for step in range(200) if step % interval(step) == 0]
    [0, 20, 40, 60, 120, 180]
    """

    first: int
    later: int
    until: int

    def __call__(self, step: Scalar, /) -> Scalar:
        """Return the interval after a number of steps, which may be traced."""
        return self.first + (self.later - self.first) * (step >= self.until)


def value_at(schedule: Schedule, step: int, /) -> Scalar:
    """Return what a schedule says at a step.

    Parameters
    ----------
    schedule : number, 0-d array, or callable of int
        The schedule; a number or an array is returned as it is.
    step : int
        Number of steps taken so far.

    Returns
    -------
    number or 0-d array
        The value; its range is the business of whoever uses it.
    """
    return schedule(step) if callable(schedule) else schedule


@dataclass(frozen=True)
class PerOutput:
    r"""A KL clip for each of a row's P outputs, :math:`\min(P, m) \, \kappa(t)`.

    P outputs of unit variance that each move by :math:`\delta` have a divergence of
    :math:`P \delta^2 / 2`, so that networks of few and of many outputs move each alike.
    With a categorical or Bernoulli likelihood, steps below the bound are lengthened; see
    ``lengthen`` of `kfac_core.steps.kl_clip`.

    Attributes
    ----------
    each : float or callable of int
        Bound :math:`\kappa` for one output.
    most : int
        Number m of outputs that count at most, for the many classes of a vocabulary.

    Examples
    --------
    >>> from kfac_core.integration import PerOutput
    >>> clip = PerOutput(0.0002)
    >>> clip(0, 10)
    0.002
    """

    each: Schedule
    most: int = 100

    def __call__(self, step: Scalar, /, outputs: Scalar = 1) -> Scalar:
        """Return the bound after a number of steps, for rows of so many outputs."""
        return value_at(self.each, step) * min(outputs, self.most)


def bound_at(clip: Schedule | None, step: Scalar, outputs: Scalar, /) -> Scalar | None:
    """Return the KL clip at a step, for rows of a number of outputs.

    Parameters
    ----------
    clip : number, 0-d array, callable of int, PerOutput or None
        The option; None is no bound.
    step : int
        Number of steps taken so far, which may be traced.
    outputs : float
        Outputs P of a row, which `PerOutput` reads.

    Returns
    -------
    number, 0-d array or None
        The bound.
    """
    if isinstance(clip, PerOutput):
        return clip(step, outputs)
    return value_at(clip, step)


def lengthens(clip: Schedule | None, likelihoods: Sequence[Loss], /) -> bool:
    """Return whether a KL clip also lengthens short steps.

    Parameters
    ----------
    clip : number, 0-d array, callable of int, PerOutput or None
        The option.
    likelihoods : sequence of kfac_core.losses.Loss
        Likelihood of each output; empty where none is known.

    Returns
    -------
    bool
        True for a `PerOutput` and categorical or Bernoulli likelihoods, whose curvature
        vanishes where the data are fitted.
    """
    vanish = [
        isinstance(head, Bernoulli | Categorical)
        for one in likelihoods
        for head in (one.losses if isinstance(one, Joint) else (one,))
    ]
    return isinstance(clip, PerOutput) and any(vanish) and all(vanish)


def interval_at(name: str, interval: Interval, step: int, /) -> int:
    """Return the number of steps between two events.

    Parameters
    ----------
    name : str
        Name of the option, for the message.
    interval : int or callable of int
        Number of steps, or a function of the steps taken so far.
    step : int
        Number of steps taken so far.

    Returns
    -------
    int
        At least 1.

    Raises
    ------
    ConventionError
        For anything but a whole number of steps >= 1.
    """
    value: Any = interval(step) if callable(interval) else interval
    # Hooks of each layer ask, and `isinstance` of an abstract class takes microseconds.
    if type(value) is int and value > 0:
        return value
    is_integer = isinstance(value, int | numbers.Integral) and not isinstance(
        value, bool
    )
    if not is_integer or operator.index(value) < 1:
        raise errors.ConventionError(
            f"Expected `{name}` to be a whole number of steps, at least 1, or a callable "
            f"that returns one; got {value!r}."
        )
    return operator.index(value)


def require_positive(
    name: str, schedule: Schedule, /, *, optional: bool = False
) -> None:
    """Raise `ConventionError` unless a schedule says a finite number > 0.

    Parameters
    ----------
    name : str
        Name of the option, for the message.
    schedule : number, 0-d array, or callable of int
        The schedule; the value of an array is not read.
    optional : bool
        Whether None is allowed.
    """
    value = value_at(schedule, 0)
    if value is None and optional:
        return
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    good = 0.0 < float(value) < math.inf if number else hasattr(value, "dtype")
    if not good:
        off = ", or None for none" if optional else ""
        raise errors.ConventionError(
            f"Expected `{name}` to be a finite number > 0{off}, or a callable of the step "
            f"that returns one; got {value!r}."
        )
