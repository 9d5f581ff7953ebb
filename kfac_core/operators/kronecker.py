"""The Kronecker product with factored damping, ``S (A + a I) (x) (G + b I)``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

from kfac_core import constraints, errors
from kfac_core.array import Array, Check, Namespace, Scalar, finite, replaced
from kfac_core.array import namespaces as ns
from kfac_core.array.structure import structure
from kfac_core.damping import DampingRule, factored_shifts, require_damping
from kfac_core.factors.factor import Damped
from kfac_core.linalg.damped import DampedMatrix, damped_matrix
from kfac_core.linalg.diagonal import damped_diagonal
from kfac_core.linalg.factorizations import Factorization, Solving
from kfac_core.linalg.groups import dense_of_groups
from kfac_core.linalg.symmetric import SymmetricMatrix, for_matrices
from kfac_core.operators.operator import CurvatureOperator, log_sum, products_without
from kfac_core.operators.parts import Bases, eigenbasis_of, flagged_damping
from kfac_core.operators.spectral import SpectralOperator

_ASYMMETRY = 1e3
"""Largest difference of the two triangles of a given factor, in roundoffs."""


@structure()
class FactoredKronecker(CurvatureOperator):
    """The operator ``F_damped = S (A + a I) (x) (G + b I)``: K-FAC, factored damping.

    A is the input factor, on the left, G is the output factor, S is the number of
    shared positions; a and b are the shifts of `kfac_core.damping.factored_shifts`.  On a
    vector V of shape ``(in(+1), out)``

        F_damped v     =  S (A + a I) V (G + b I),
        F_damped^-1 v  =  (A + a I)^-1 V (G + b I)^-1 / S,

    and likewise for every power, and for the Cholesky factor ``S^1/2 L_A (x) L_G``.
    Each takes ``2 n m (n + m)`` flops.  If the factors are stacks, the block consists of
    independent groups, each with its own columns of V.

    Attributes
    ----------
    input, output : DampedMatrix, DampedDiagonal or DampedRankOne
        ``A + a I`` and ``G + b I``.
    scale : array, 0-d or one a group
        Scale ``S``.

    References
    ----------
    Martens and Grosse (2015), arXiv:1503.05671, section 4.2.

    Examples
    --------
    >>> import numpy as np
    >>> from kfac_core.operators import kronecker_operator
    >>> A, G = np.diag([4.0, 9.0]), np.diag([1.0, 2.0, 3.0])
    >>> operator = kronecker_operator(A, G, damping=0.0, rule="factored")
    >>> type(operator).__name__
    'FactoredKronecker'
    >>> inverse = np.outer([1 / 4, 1 / 9], [1, 1 / 2, 1 / 3])
    >>> bool(np.allclose(operator.multiply_inverse(np.ones((2, 3))), inverse))
    True
    """

    input: Damped
    output: Damped
    scale: Array

    @property
    def unsupported_products(self) -> Mapping[str, str]:
        """Products that need a factor, where only factorizations were kept."""
        return products_without(self.input, self.output)

    @property
    def vector_shape(self) -> tuple[int, int]:
        """The shape ``(in(+1), out)`` of the vectors."""
        groups = self.input.lead[0] if self.input.lead else 1
        return self.input.size, groups * self.output.size

    @property
    def stack_shape(self) -> tuple[int, ...]:
        """The shape ``(*lead, n, m)`` of one vector for each part of a stack."""
        return (*self.input.stack_shape, self.output.stack_shape[-1])

    @property
    def like(self) -> Array:
        """An array of the operator's library, device and dtype."""
        return self.scale

    @property
    def factorizations(self) -> frozenset[Factorization]:
        """Factorizations that have been prepared."""
        return self.input.factorizations & self.output.factorizations

    def prepared(
        self,
        *factorizations: Factorization,
        check: Check = "raise",
        name: str = "block",
    ) -> FactoredKronecker:
        """Return the operator with missing factorizations computed."""
        A = self.input.prepared(*factorizations, check=check, name=f"{name}/input")
        G = self.output.prepared(*factorizations, check=check, name=f"{name}/output")
        # At most steps all are prepared already; keep the object, and what is cached for
        # it.
        if A is self.input and G is self.output:
            return self
        return replaced(self, input=A, output=G)

    def solved_by(self, solving: Solving, /) -> FactoredKronecker:
        """Return the operator with another method of solving with its full factors."""
        sides = {"input": self.input, "output": self.output}
        for side, part in sides.items():
            if isinstance(part, DampedMatrix):
                sides[side] = replaced(part, solving=solving)
        return replaced(self, **sides)

    def spectral(
        self, *, check: Check = "raise", name: str = "block"
    ) -> SpectralOperator:
        """Return ``S A (x) G`` in its eigenbasis, without damping.

        About ``9 (n^3 + m^3)`` flops where the eigenbases were not prepared.
        """
        decomposed = self.prepared("eigenbasis", check=check, name=name)
        xp = ns.own_namespace(self.scale)
        bases = {side: eigenbasis_of(part) for side, part in decomposed.parts().items()}
        return SpectralOperator(
            bases["input"],
            bases["output"],
            self.spectrum_of(bases),
            # Undamped, whatever the rule: who asks adds lam to products of eigenvalues.
            xp.zeros_like(self.scale),
            decomposed.status(),
            self.vector_shape,
        )

    def spectrum_of(self, bases: Bases, /) -> Array:
        """Return ``S a g^T``, the eigenvalues without damping, of the factors' bases."""
        a = self.input.spectrum(bases["input"]).eigenvalues
        g = self.output.spectrum(bases["output"]).eigenvalues
        return self._scale() * a[..., :, None] * g[..., None, :]

    def trace(self, *, damped: bool = True) -> Array:
        """Return ``S tr(A + a I) tr(G + b I)``, or ``S tr(A) tr(G)``."""
        traces = self.input.trace(shifted=damped) * self.output.trace(shifted=damped)
        return ns.own_namespace(self.scale).sum(self.scale * traces)

    def _logdet(self) -> Array:
        """Return ``m log det(A + a I) + n log det(G + b I) + n m log S``."""
        xp = ns.own_namespace(self.scale)
        n, m = self.input.size, self.output.size
        logdets = m * self.input.logdet() + n * self.output.logdet()
        return xp.sum(logdets + n * m * xp.log(self.scale))

    def _undamped_logdet(self) -> Array:
        """Return ``m log det A + n log det G + n m log S``, of eigenvalues in float64."""
        decomposed = self.prepared("eigenbasis")
        xp = ns.own_namespace(self.scale)
        n, m = self.input.size, self.output.size
        total = n * m * xp.sum(xp.log(self.scale) + xp.zeros_like(self.output.shift))
        for part, times in ((decomposed.input, m), (decomposed.output, n)):
            spectrum = part.spectrum(eigenbasis_of(part))
            if ns.roundoff_of(spectrum.eigenvalues.dtype, xp=xp) > 2.0**-52:
                wide = part.in_wide_basis(name="block")
                spectrum = wide.spectrum(eigenbasis_of(wide))
            # Eigenvalues below their error count as zero.
            w = spectrum.eigenvalues
            w = xp.where(w > spectrum.error, w, xp.zeros_like(w))
            total = total + times * log_sum(w)
        return total

    def frobenius_norm(self, *, damped: bool = True) -> Array:
        """Return ``S |A + a I| |G + b I|``, or ``S |A| |G|``, 0-d, over all groups."""
        xp = ns.own_namespace(self.scale)
        norm = xp.linalg.vector_norm
        A = self.input.dense(shifted=damped)
        G = self.output.dense(shifted=damped)
        # |A (x) G| = |A| |G|, so the product is not formed.
        norms = norm(A, axis=(-2, -1)) * norm(G, axis=(-2, -1))
        return norm(xp.reshape(self.scale * norms, (-1,)))

    def eigenvalues(self, *, damped: bool = True) -> Array:
        """Return all products of the factors' eigenvalues, times S, ascending."""
        xp = ns.own_namespace(self.scale)
        a = self.input.eigenvalues(shifted=damped)
        g = self.output.eigenvalues(shifted=damped)
        products = self._scale() * a[..., :, None] * g[..., None, :]
        return xp.sort(xp.reshape(products, (-1,)))

    def to_dense(self, *, damped: bool = True) -> Array:
        """Return ``S kron(A + a I, G + b I)``, or ``S kron(A, G)``."""
        A = self.input.dense(shifted=damped)
        G = self.output.dense(shifted=damped)
        return dense_of_groups(self._scale() * A, G, xp=ns.own_namespace(A))

    def status(self) -> Array:
        """Return the flags of both factors."""
        return self.input.status() | self.output.status()

    def parts(self) -> dict[str, Any]:
        """Return the two damped factors."""
        return {"input": self.input, "output": self.output}

    def _multiply(self, V: Array, xp: Namespace, damped: bool) -> Array:
        left = self.input.multiply(V, shifted=damped)
        both = self.output.multiply(xp.matrix_transpose(left), shifted=damped)
        return self._scale() * xp.matrix_transpose(both)

    def _multiply_inverse(self, V: Array, xp: Namespace) -> Array:
        # In this order XLA does not copy a transpose before the first product.
        right = self.output.solve(ns.transposed(V, xp=xp))
        both = self.input.solve(ns.transposed(right, xp=xp), overwrite=True)
        # Without shared positions S is 1, which saves a pass over the vector.
        scale = finite.plain_number(self.scale, xp=xp)
        if scale is None and finite.known_true(self.scale == 1, xp=xp):
            scale = 1.0
        return both if scale == 1 else both / self._scale()

    def _power(self, V: Array, xp: Namespace, exponent: float) -> Array:
        left = self.input.power(V, exponent)
        both = self.output.power(xp.matrix_transpose(left), exponent)
        return self._scale() ** exponent * xp.matrix_transpose(both)

    def _lower_multiply(self, V: Array, xp: Namespace, transpose: bool) -> Array:
        """Return ``S^1/2 L_A V L_G^T``, or ``S^1/2 L_A^T V L_G``."""
        left = self.input.lower_multiply(V, transpose=transpose)
        # The Cholesky factor of a Kronecker product is the product of its factors'
        # ones.
        both = self.output.lower_multiply(
            xp.matrix_transpose(left), transpose=transpose
        )
        return xp.sqrt(self._scale()) * xp.matrix_transpose(both)

    def _lower_solve(self, V: Array, xp: Namespace, transpose: bool) -> Array:
        """Return ``L_A^-1 V L_G^-T / S^1/2``, or ``L_A^-T V L_G^-1 / S^1/2``."""
        left = self.input.lower_solve(V, transpose=transpose)
        both = self.output.lower_solve(xp.matrix_transpose(left), transpose=transpose)
        return xp.matrix_transpose(both) / xp.sqrt(self._scale())

    def _sample(self, Z: Array, xp: Namespace) -> Array:
        """Return ``L_A^-T Z L_G^-1 / S^1/2``.

        References
        ----------
        Ritter, Botev and Barber (2018), "A Scalable Laplace Approximation for Neural
        Networks", equation 9.
        """
        return self._lower_solve(Z, xp, True)

    def _scale(self) -> Array:
        """Return S with axes for the vectors' rows and columns."""
        return for_matrices(self.scale)

    def _dampings(self) -> dict[str, Array]:
        return {"input_damping": self.input.shift, "output_damping": self.output.shift}


def kronecker_operator(
    input: SymmetricMatrix | Array | None,
    output: SymmetricMatrix | Array,
    /,
    *,
    damping: Scalar,
    rule: DampingRule = "factored",
    scale: Scalar = 1.0,
    least_shift: float = 0.0,
    factorizations: tuple[Factorization, ...] = ("inverse",),
    check: Check = "raise",
    solving: Solving = "inverse",
    name: str = "block",
) -> FactoredKronecker | SpectralOperator:
    r"""Return the damped operator of two given factors, ``F = S A (x) G``.

    .. math:: F_\text{damped} = S \, (A + \alpha I) \otimes (G + \beta I)
        \quad\text{or}\quad S \, A \otimes G + \lambda I .

    Parameters
    ----------
    input : SymmetricMatrix, array of shape (n, n) or (n,), or None
        Input factor A, or its diagonal.  None for a block with a single factor,
        ``F = S G``, such as a bias alone; its vectors have the shape ``(1, m)``.
    output : SymmetricMatrix, or array of shape (m, m) or (m,)
        Output factor G.
    damping : float or 0-d array
        Damping ``lam``, finite and >= 0.
    rule : {"factored", "factored_unit_pi", "exact"}
        How it is applied; see `kfac_core.damping.factored_shifts`.  With one factor all
        are exact.
    scale : float or 0-d array
        S, positive.
    least_shift : float
        The least number that a factored rule adds to one of two factors.
    factorizations : tuple of {"inverse", "cholesky", "eigenbasis"}
        Factorizations to prepare now; the others are computed when needed.
    check : {"raise", "status"}
        Whether failures raise, or are reported in the operator's ``status()``; a factor
        that is not symmetric then counts as one that is not finite.
    solving : {"inverse", "triangular"}
        Whether a factored block is solved with inverses of its factors, or with their
        Cholesky factors.
    name : str
        Name of the block in error messages.

    Returns
    -------
    FactoredKronecker or SpectralOperator
        An immutable snapshot in the wider dtype of the two factors, or float32 where that
        is narrower.

    Raises
    ------
    ShapeError, DtypeError, MixedArraysError
        For factors of incompatible shape, dtype, library or device.
    ConventionError
        For an unknown option, a scale that is not positive, and a factor that is not
        symmetric.
    DampingError
        For a damping or a `least_shift` that is negative or not finite.
    NotFiniteError, FactorizationError
        If a factor, or the damped block, cannot be factorized (``check="raise"``).

    Notes
    -----
    ``n^3 + m^3`` flops for inverses, about ``9 (n^3 + m^3)`` for the exact rule.

    References
    ----------
    Martens and Grosse (2015), arXiv:1503.05671, section 6.3.

    Examples
    --------
    >>> import numpy as np
    >>> from kfac_core.operators import kronecker_operator
    >>> A, G = np.diag([1.0, 2.0]), np.diag([3.0, 4.0])
    >>> operator = kronecker_operator(A, G, damping=0.5, rule="exact")
    >>> operator.eigenvalues()
    array([3.5, 4.5, 6.5, 8.5])
    """
    require_damping(damping)
    require_damping(least_shift, name="least_shift")
    constraints.require_one_of("rule", rule, get_args(DampingRule))
    constraints.require_one_of("solving", solving, get_args(Solving))
    constraints.require_check(check)
    for factorization in factorizations:
        constraints.require_one_of(
            "factorizations", factorization, get_args(Factorization)
        )
    factors = (
        {"output": output} if input is None else {"input": input, "output": output}
    )
    arrays = {
        side: x.array if isinstance(x, SymmetricMatrix) else x
        for side, x in factors.items()
    }
    xp = ns.namespace_of(**arrays)
    dtype = ns.wide_dtype(xp, xp.result_type(*arrays.values()))
    values = {
        side: _entering_factor(x, side, dtype, check=check, xp=xp)
        for side, x in factors.items()
    }
    like = arrays["output"]
    S = ns.full_of(
        xp, ns.as_scalar(xp, scale, dtype, "scale"), ns.cast(xp, like, dtype)
    )
    if finite.truth_of(S > 0, xp=xp) is False:
        raise errors.ConventionError(
            f"Expected `scale` to be positive, got {float(S)}."
        )
    lam = ns.full_of(xp, ns.as_scalar(xp, damping, dtype, "damping"), S)
    exact = rule == "exact" and input is not None
    # The exact rule adds lam to products of eigenvalues, and not to the factors.
    shifts = [xp.zeros_like(lam)] * 2
    if not exact:
        shifts = factored_shifts(
            [_mean(value) for value in values.values()],
            lam,
            scale=S,
            unit_pi=rule == "factored_unit_pi",
            least=0.0 if input is None else least_shift,
            xp=xp,
        )
    parts: dict[str, Any] = {}
    for (side, value), shift in zip(values.items(), shifts, strict=True):
        is_matrix = isinstance(value, SymmetricMatrix)
        parts[side] = (damped_matrix if is_matrix else damped_diagonal)(value, shift)
    if input is None:
        parts["input"] = damped_diagonal(xp.ones_like(S)[None, ...], 0.0)
    operator = FactoredKronecker(parts["input"], parts["output"], S)
    if not exact:
        operator = operator.solved_by(solving)
        return operator.prepared(*factorizations, check=check, name=name)
    in_bases = operator
    if factorizations:
        in_bases = operator.prepared("eigenbasis", check=check, name=name)
    return exactly_damped(
        in_bases, operator, lam, factorizations=factorizations, check=check, name=name
    )


def exactly_damped(
    in_bases: FactoredKronecker,
    undamped: FactoredKronecker,
    damping: Array,
    /,
    *,
    factorizations: tuple[Factorization, ...],
    check: Check,
    name: str,
) -> SpectralOperator:
    """Return ``S A (x) G + lam I``, in the eigenbases of the factors if these are prepared.

    Parameters
    ----------
    in_bases, undamped : FactoredKronecker
        ``S A (x) G`` with shifts of zero: with its eigenbases if there are
        `factorizations` to prepare, and without any.
    damping : array, 0-d
        Damping ``lam``.
    factorizations : tuple of str
        Factorizations to prepare.
    check : {"raise", "status"}
        Whether failures raise, or are reported in the operator's status.
    name : str
        Name of the block in error messages.

    Returns
    -------
    SpectralOperator
        An immutable snapshot.

    Raises
    ------
    NotFiniteError, DampingError, FactorizationError
        As `SpectralOperator.prepared` (``check="raise"``).
    """
    lam, flags = flagged_damping(damping, xp=ns.own_namespace(damping))
    if not factorizations:
        shape = undamped.vector_shape
        return SpectralOperator(None, None, None, lam, flags, shape, undamped)
    basis = in_bases.spectral(check=check, name=name)
    spectral = replaced(basis, damping=lam, flags=basis.flags | flags, factors=undamped)
    return spectral.prepared(*factorizations, check=check, name=name)


def _entering_factor(
    x: SymmetricMatrix | Array,
    side: str,
    dtype: object,
    /,
    *,
    check: Check,
    xp: Namespace,
) -> SymmetricMatrix | Array:
    """Return a factor in a dtype, checked: a symmetric matrix, or a diagonal's entries."""
    array = x.array if isinstance(x, SymmetricMatrix) else x
    ns.require_floating(xp, array, side)
    square = array.ndim == 2 and array.shape[0] == array.shape[1]
    if not (square or array.ndim == 1) or array.shape[0] < 1:
        raise errors.ShapeError(
            f"Expected `{side}` to have shape (n, n), or (n,) for a diagonal, got "
            f"{tuple(array.shape)}."
        )
    array = ns.cast(xp, array, dtype)
    if array.ndim == 1:
        return array
    full_storage = not isinstance(x, SymmetricMatrix) or x.full_storage
    if full_storage:
        array = _symmetric(xp, array, side, check=check)
    return SymmetricMatrix(array, full_storage)


def _symmetric(xp: Namespace, x: Array, side: str, *, check: Check) -> Array:
    """Return a factor whose two triangles are equal up to roundoff.

    With any other this raises, or with ``check="status"`` returns NaN in its place.
    """
    # Relative to the largest entry, since a factor may have any scale.
    off = xp.max(xp.abs(x - xp.matrix_transpose(x)))
    limit = _ASYMMETRY * ns.roundoff_of(x.dtype, xp=xp) * xp.max(xp.abs(x))
    if check == "status":
        return xp.where(off > limit, math.nan * x, x)
    if finite.truth_of(off > limit, xp=xp):
        raise errors.ConventionError(
            f"Expected `{side}` to be symmetric; its triangles differ by up to "
            f"{float(off):.1e}. Pass (x + x.T) / 2 if that is what you mean."
        )
    return x


def _mean(value: SymmetricMatrix | Array) -> Array:
    """Return the mean eigenvalue of a matrix or of a diagonal."""
    if isinstance(value, SymmetricMatrix):
        return value.trace() / value.size
    xp = ns.own_namespace(value)
    return xp.mean(xp.where(value < 0, 0.0 * value, value))
