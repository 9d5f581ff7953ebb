"""Failures as flags that an array can hold.

A traced computation (one inside a function compiler or a vectorizing transform)
cannot raise.  Where a function is told ``check="status"`` it never reads a value:
it returns its result together with a 0-d integer array of these flags, zero where all
is well.  With ``check="raise"`` the same conditions are exceptions, which costs one
transfer from the device to the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntFlag
from typing import Literal

from kfac_core import errors

Check = Literal["raise", "status"]
"""Whether a failure raises, or sets a flag in the result."""


class Status(IntFlag):
    """Flags of failures; ``OK`` is zero, and flags can be combined.

    Examples
    --------
    >>> import kfac_core as kc
    >>> flags = kc.Status(0)
    >>> bool(flags), kc.Status.INACCURATE in flags
    (False, False)
    """

    OK = 0
    INPUTS_NOT_FINITE = 1
    """The layer's inputs hold NaN or infinity; the statistics were left as they were."""
    OUTPUT_GRADS_NOT_FINITE = 2
    """The output gradients hold NaN or infinity; likewise."""
    MATRIX_NOT_FINITE = 4
    """A matrix to be factorized holds NaN or infinity."""
    NOT_POSITIVE = 8
    """A damped matrix is not positive definite in working precision."""
    INACCURATE = 16
    """The factorization's residual is above the limit."""
    BAD_DAMPING = 32
    """A damping is negative or not finite."""
    BAD_DECAY = 64
    """A decay lies outside [0, 1], or a weight is negative or not finite."""
    IDS_OUT_OF_RANGE = 128
    """An id is negative, or not below the size of the vocabulary."""
    OVERFLOWED = 256
    """Sums of squares of finite rows are not finite; the statistics were left as they
    were."""


_ERRORS: dict[Status, type[errors.KFACError]] = {
    Status.NOT_POSITIVE: errors.FactorizationError,
    Status.INACCURATE: errors.FactorizationError,
    Status.BAD_DAMPING: errors.DampingError,
    Status.BAD_DECAY: errors.DecayError,
    Status.IDS_OUT_OF_RANGE: errors.IdRangeError,
}
"""The exception for each flag; `NotFiniteError` for all others."""

_REASONS: dict[Status, str] = {
    Status.BAD_DAMPING: "the damping is negative or not finite. Expected a finite number "
    ">= 0.",
    Status.BAD_DECAY: "expected `decay` in [0, 1] and `weight` > 0, both finite.",
}
"""Reasons that do not depend on where the flag is read."""


def raise_flagged(flags: int, name: str, reasons: Mapping[Status, str], /) -> None:
    """Raise the error of the first flag that is set; return where none is.

    Parameters
    ----------
    flags : int
        `Status` flags.
    name : str
        What they are of, at the head of the message.
    reasons : mapping of Status to str
        What each flag, or any of some flags, means here, and the next step.

    Raises
    ------
    NotFiniteError, DampingError, DecayError, IdRangeError, FactorizationError
        As the flags say.
    """
    every: dict[Status, str] = {**reasons, **_REASONS}
    for flag, reason in every.items():
        if flags & flag:
            raise _ERRORS.get(flag, errors.NotFiniteError)(f"{name}: {reason}")
