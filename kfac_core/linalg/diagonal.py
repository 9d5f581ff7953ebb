"""``M = diag(a) + shift I``: `kfac_core.linalg.damped` for a diagonal matrix.

Conventions as there.  The eigenbasis is the coordinate basis, and the eigenvalues are in
the order of the diagonal.  Every product costs ``n k``.
"""

from __future__ import annotations

from kfac_core.array import Array, Check, DType, Namespace, Scalar, Status, replaced
from kfac_core.array import namespaces as ns
from kfac_core.array.finite import truth_of
from kfac_core.array.status import raise_flagged
from kfac_core.array.structure import structure
from kfac_core.linalg.certificate import Spectrum
from kfac_core.linalg.factorizations import Factorization
from kfac_core.linalg.fallback import raise_invalid


@structure(static=("definite",))
class DampedDiagonal:
    """A diagonal matrix plus a multiple of the identity.

    Attributes
    ----------
    entries : array, shape (..., n)
        The diagonal a, nonnegative.
    shift : array, shape (...)
        Of the dtype of the entries.
    flags : array of int32, 0-d
        `Status` flags.
    definite : bool
        Whether M's diagonal has been checked to be positive; with ``check="status"`` the
        flags hold the result.
    """

    entries: Array
    shift: Array
    flags: Array
    definite: bool

    @property
    def size(self) -> int:
        """The number n of rows."""
        return int(self.entries.shape[-1])

    @property
    def stack_shape(self) -> tuple[int, ...]:
        """The shape ``(*lead, n)`` of a vector for each matrix of the stack."""
        return tuple(self.entries.shape)

    @property
    def lead(self) -> tuple[int, ...]:
        """The shape of the stack; empty for a single matrix."""
        return tuple(self.entries.shape[:-1])

    @property
    def dtype(self) -> DType:
        """The dtype of the arrays."""
        return self.entries.dtype

    @property
    def factorizations(self) -> frozenset[Factorization]:
        """Factorizations that have been prepared."""
        every: tuple[Factorization, ...] = ("inverse", "cholesky", "eigenbasis")
        return frozenset(every if self.definite else ("eigenbasis",))

    def prepared(
        self,
        *factorizations: Factorization,
        check: Check = "raise",
        name: str = "matrix",
    ) -> DampedDiagonal:
        """Return the matrix, checked to be definite where a factorization needs that.

        As `DampedMatrix.prepared`.
        """
        if self.definite or not factorizations:
            return self
        xp, flags = self._xp(), self.flags
        divides = "inverse" in factorizations or "cholesky" in factorizations
        if divides:
            positive = xp.all(self._entries(True) > 0)
            flags = flags | ns.status_unless(xp, positive, Status.NOT_POSITIVE)
        if check == "raise":
            _raise_for(Status(int(flags)), name)
        # An eigenbasis exists for any diagonal.
        return replaced(self, flags=flags, definite=True) if divides else self

    def in_wide_basis(self, *, name: str) -> DampedDiagonal:
        """Return itself; its eigenvalues are exact."""
        return self

    def spectrum(self, basis: object, /) -> Spectrum:
        """Return the diagonal, whose entries have no error relative to the largest."""
        return Spectrum(self.entries, self._xp().zeros_like(self.entries))

    def multiply(self, v: Array, /, *, shifted: bool) -> Array:
        """Return ``M v``, or ``diag(a) v``."""
        return self._entries(shifted)[..., None] * v

    def solve(self, v: Array, /, *, overwrite: bool = False) -> Array:
        """Return ``M^-1 v``."""
        return v / self._definite()[..., None]

    def power(self, v: Array, exponent: float, /) -> Array:
        """Return ``M^p v``."""
        if exponent < 0:
            return v * (self._definite() ** exponent)[..., None]
        return (self._entries(True) ** exponent)[..., None] * v

    def lower_multiply(self, v: Array, /, *, transpose: bool) -> Array:
        """Return ``L v``, which is ``L^T v``."""
        return self._xp().sqrt(self._definite())[..., None] * v

    def lower_solve(self, v: Array, /, *, transpose: bool) -> Array:
        """Return ``L^-1 v``, which is ``L^-T v``."""
        return v / self._xp().sqrt(self._definite())[..., None]

    def logdet(self) -> Array:
        """Return ``log det M``, shape (...)."""
        xp = self._xp()
        return xp.sum(xp.log(self._definite()), axis=-1)

    def trace(self, *, shifted: bool) -> Array:
        """Return the trace of M, or of diag(a), shape (...)."""
        return self._xp().sum(self._entries(shifted), axis=-1)

    def eigenvalues(self, *, shifted: bool) -> Array:
        """Return the eigenvalues in the order of the diagonal, shape (..., n)."""
        return self._entries(shifted)

    def eigenvectors(self) -> Array:
        """Return the identity, shape (n, n)."""
        xp = self._xp()
        return xp.eye(self.size, dtype=self.dtype, device=ns.device_of(self.shift))

    def dense(self, *, shifted: bool) -> Array:
        """Return M, or diag(a), shape (..., n, n)."""
        return self.eigenvectors() * self._entries(shifted)[..., None]

    def status(self) -> Array:
        """Return the flags, 0-d int32."""
        return self.flags

    def _entries(self, shifted: bool) -> Array:
        return self.entries + self.shift[..., None] if shifted else self.entries

    def _definite(self) -> Array:
        """Return M's diagonal, checked to be positive where the host can read it."""
        entries = self._entries(True)
        if not self.definite:
            positive = truth_of(self._xp().all(entries > 0), xp=self._xp())
            if positive is False:
                _raise_for(Status.NOT_POSITIVE, "matrix")
        return entries

    def _xp(self) -> Namespace:
        return ns.own_namespace(self.entries)


def damped_diagonal(
    entries: Array, shift: Scalar, /, *, apply_dtype: object = None
) -> DampedDiagonal:
    """Return ``diag(a) + shift I``; `DampedDiagonal.prepared` raises for its flags.

    Parameters
    ----------
    entries : array, shape (..., n)
        The diagonal a; negative entries count as zero.
    shift : float or array, shape (...)
        Finite and >= 0.
    apply_dtype : dtype, optional
        Dtype of the stored arrays.

    Returns
    -------
    DampedDiagonal
        An immutable snapshot; NaN and flagged if the entries or the shift are invalid.
    """
    xp = ns.own_namespace(entries)
    shift = ns.full_of(xp, shift, entries)
    good_shift = xp.all(xp.isfinite(shift) & (shift >= 0))
    finite = xp.all(xp.isfinite(entries))
    # A sum of squares is negative only by rounding, as after a merge.
    clipped = xp.where(entries < 0, xp.zeros_like(entries), entries)
    flags = ns.status_unless(xp, good_shift, Status.BAD_DAMPING) | ns.status_unless(
        xp, finite, Status.MATRIX_NOT_FINITE
    )
    clipped = xp.where(flags == 0, clipped, xp.full_like(clipped, xp.nan))
    if apply_dtype is not None:
        clipped = ns.cast(xp, clipped, apply_dtype)
        shift = ns.cast(xp, shift, apply_dtype)
    # Not known to be definite before `prepared`, so that a zero diagonal with no
    # damping raises where an inverse is asked for, and not before.
    return DampedDiagonal(clipped, shift, flags, definite=False)


def _raise_for(flags: Status, name: str) -> None:
    raise_invalid(flags, name)
    reason = "a diagonal factor has a zero on its diagonal. Increase `damping`."
    raise_flagged(flags, name, {Status.NOT_POSITIVE: reason})
