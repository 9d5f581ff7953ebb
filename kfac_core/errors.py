"""The exceptions of the library.

Each class also subclasses the matching builtin, so that ``except ValueError`` and
``except numpy.linalg.LinAlgError`` work.  A message names the argument in backticks, shows
the given and the expected value, and suggests the next step.
"""

from __future__ import annotations

import numpy as np

__all__ = [
    "ArgumentError",
    "BackendUnavailableError",
    "CommunicationError",
    "CommunicationTimeoutError",
    "ConcurrentChangeError",
    "ConventionError",
    "DampingError",
    "DecayError",
    "DtypeError",
    "FactorizationError",
    "IdRangeError",
    "KFACError",
    "MixedArraysError",
    "NotFiniteError",
    "NotReadyError",
    "RecordError",
    "ReplicaError",
    "ShapeError",
    "StateError",
    "UnknownBackendError",
    "UnknownBlockError",
    "UnsupportedError",
]


class KFACError(Exception):
    """The base of every exception that this library raises on purpose."""


class ArgumentError(KFACError, TypeError):
    """An argument is of the wrong type."""


class ShapeError(KFACError, ValueError):
    """An array has the wrong shape."""


class DtypeError(KFACError, TypeError):
    """An array has a dtype that cannot be computed with."""


class MixedArraysError(KFACError, TypeError):
    """Arrays of two libraries, or of two devices, were given together."""


class NotFiniteError(KFACError, ValueError):
    """An array holds NaN or infinity.

    Examples
    --------
    >>> import numpy as np
    >>> import kfac_core as kc
    >>> layer = kc.Dense(in_features=2, out_features=1, bias=False, weight_layout="io")
    >>> estimator = kc.Estimator(
    ...     {"fc": kc.Block(layer, kc.Kronecker())}, reduction="sum", damping=0.1
    ... )
    >>> try:
    ...     estimator.update({"fc": kc.Batch(np.full((4, 2), np.nan), np.ones((4, 1)))})
    ... except kc.NotFiniteError as error:
    ...     print(str(error)[:30])
    Block 'fc': `inputs` of this b
    """


class DampingError(KFACError, ValueError):
    """A damping is negative or not finite.

    Examples
    --------
    >>> import kfac_core as kc
    >>> layer = kc.Dense(in_features=2, out_features=1, bias=False, weight_layout="io")
    >>> blocks = {"fc": kc.Block(layer, kc.Kronecker())}
    >>> try:
    ...     kc.Estimator(blocks, reduction="sum", damping=-1)
    ... except kc.DampingError as error:
    ...     print(type(error).__name__)
    DampingError
    """


class DecayError(KFACError, ValueError):
    """A decay lies outside [0, 1], or the weight of an update is negative."""


class ConventionError(KFACError, ValueError):
    """An option has a value that names no known convention."""


class IdRangeError(KFACError, IndexError):
    """An id of an embedding is outside of its vocabulary."""


class UnknownBlockError(KFACError, KeyError):
    """A name is not that of a block of the estimator."""

    def __str__(self) -> str:
        """Return the message itself; ``KeyError`` would show its ``repr``."""
        return str(self.args[0]) if self.args else ""


class UnknownBackendError(KFACError, ValueError):
    """A name is not that of a registered or importable backend."""


class BackendUnavailableError(KFACError, ImportError):
    """A backend is known, but its library or its device cannot be used here."""


class UnsupportedError(KFACError, NotImplementedError):
    """A layer and an approximation, or an operator and a product, do not go together."""


class NotReadyError(KFACError, RuntimeError):
    """Something was requested before its prerequisites exist.

    Examples
    --------
    >>> import kfac_core as kc
    >>> layer = kc.Dense(in_features=2, out_features=1, bias=False, weight_layout="io")
    >>> estimator = kc.Estimator(
    ...     {"fc": kc.Block(layer, kc.Kronecker())}, reduction="sum", damping=0.1
    ... )
    >>> try:
    ...     estimator.operator("fc")
    ... except kc.NotReadyError:
    ...     print("call update and refresh first")
    call update and refresh first
    """


class ConcurrentChangeError(KFACError, RuntimeError):
    """An estimator was changed by a second thread while one was changing it."""


class StateError(KFACError, ValueError):
    """A saved state does not fit the estimator that it is loaded into."""


class RecordError(KFACError, ValueError):
    """A verification record is damaged, contradictory or of an unknown kind."""


class CommunicationError(KFACError, RuntimeError):
    """Processes cannot exchange arrays, or another process failed."""


class CommunicationTimeoutError(KFACError, TimeoutError):
    """Another process did not take part in an exchange in time."""


class ReplicaError(KFACError, RuntimeError):
    """Processes hold different values of something that must be equal on all."""


class FactorizationError(KFACError, np.linalg.LinAlgError):
    """A matrix could not be factorized by any fallback.

    Parameters
    ----------
    reason : str
        The failure, and the next step.
    factor : str, optional
        The name of the factor, such as ``"fc1/input"``.

    Examples
    --------
    >>> import numpy as np
    >>> import kfac_core as kc
    >>> layer = kc.Dense(in_features=2, out_features=1, bias=False, weight_layout="io")
    >>> estimator = kc.Estimator(
    ...     {"fc": kc.Block(layer, kc.Kronecker())}, reduction="sum", damping=0.0
    ... )
    >>> estimator.update({"fc": kc.Batch(np.ones((4, 2)), np.ones((4, 1)))})
    >>> try:
    ...     estimator.refresh()
    ... except kc.FactorizationError:
    ...     print("a singular factor needs damping")
    a singular factor needs damping
    """

    def __init__(self, reason: str, *, factor: str | None = None) -> None:
        self.reason = reason
        self.factor = factor
        super().__init__(f"{factor}: {reason}" if factor else reason)
