"""A block that is diagonal in a Kronecker product of two orthogonal bases.

Conventions.  A vector V of shape ``(in(+1), out)`` has the coordinates
``R = Q_A^T V Q_G`` and comes back as ``V = Q_A R Q_G^T``.  The spectrum s has the shape
of R, so that a function f of ``c F + lam I`` is f of ``c s + lam``, entry by entry: one
decomposition serves every lam and every c.

====================  =======================  ===========================  ===========
the block             R                        s                            Q_A, Q_G
====================  =======================  ===========================  ===========
``S A (x) G``         ``(n, m)``               ``S a g^T``                  both
EKFAC                 ``(n, m)``               the corrected E              both
a diagonal            ``(n, m)``               its entries                  neither
a full matrix         ``(n m, 1)``             its eigenvalues              the first
Q groups of columns   ``(Q, n, m)``            a stack                      stacks
====================  =======================  ===========================  ===========
"""

from __future__ import annotations

from typing import Any

from kfac_core import constraints, errors
from kfac_core.array import Array, Check, Namespace, Scalar, Status, replaced
from kfac_core.array import namespaces as ns
from kfac_core.array.finite import truth_of
from kfac_core.array.structure import in_dtype, structure
from kfac_core.linalg.certificate import positive_eigenvalues, probe
from kfac_core.linalg.damped import DampedMatrix, require_readable
from kfac_core.linalg.diagonal import DampedDiagonal
from kfac_core.linalg.factorizations import Eigendecomposition, Factorization
from kfac_core.linalg.groups import dense_of_blocks
from kfac_core.linalg.kronecker_cholesky import KroneckerCholesky, spectral_cholesky
from kfac_core.linalg.products import multiply_matrices
from kfac_core.operators.operator import CurvatureOperator, log_sum, raise_for
from kfac_core.operators.parts import accurate_bases, flagged_damping


@structure(static=("matrix_shape", "definite"))
class SpectralOperator(CurvatureOperator):
    """The operator ``F_damped = (Q_A (x) Q_G) diag(s + lam) (Q_A (x) Q_G)^T``.

    With ``R = Q_A^T V Q_G``, the coordinates of a vector, every function f of the block
    is

        f(F_damped) v = Q_A [ R * f(s + lam) ] Q_G^T,

    in ``4 n m (n + m)`` flops.  The lower Cholesky factor alone, which depends on the
    order of the coordinates, has the form of `kfac_core.linalg.kronecker_cholesky`.

    Attributes
    ----------
    input, output : Eigendecomposition or None
        With the eigenvectors Q_A and Q_G, orthogonal; None for the coordinates.
    spectrum : array, shape ((Q,) n, m) or (n m, 1), or None
        Spectrum s; None if it has not been computed from the factors.
    damping : array, 0-d or one a group
        Damping ``lam``.
    flags : array of int32, 0-d
        `Status` flags.
    matrix_shape : tuple of int
        The shape ``(in(+1), out)`` of the vectors.
    factors : CurvatureOperator or None
        ``S A (x) G`` without damping, if the block is that product.  ``F v`` is then
        computed by the factors, in ``2 n m (n + m)`` flops and without the bases, so
        that the residual of the inverse measures the decompositions too.
    lower : KroneckerCholesky or None
        The Cholesky factor, if requested.
    definite : bool
        Whether ``s + lam`` has been checked to be positive, or, with
        ``check="status"``, reported on in the flags.

    References
    ----------
    George et al. (2018), arXiv:1806.03884, for the corrected spectrum of EKFAC.

    Examples
    --------
    >>> import numpy as np
    >>> from kfac_core.operators import spectral_operator
    >>> moments = np.asarray([[4.0, 1.0], [2.0, 3.0]])
    >>> bases = {"input": np.eye(2), "output": np.eye(2)}
    >>> operator = spectral_operator(moments, **bases, damping=1.0)
    >>> type(operator).__name__
    'SpectralOperator'
    >>> operator.multiply_inverse(np.ones((2, 2)))[0].tolist()
    [0.2, 0.5]
    """

    input: Eigendecomposition | None
    output: Eigendecomposition | None
    spectrum: Array | None
    damping: Array
    flags: Array
    matrix_shape: tuple[int, int]
    factors: CurvatureOperator | None = None
    lower: KroneckerCholesky | None = None
    definite: bool = False

    @property
    def vector_shape(self) -> tuple[int, int]:
        """The shape ``(in(+1), out)`` of the vectors."""
        return self.matrix_shape

    @property
    def stack_shape(self) -> tuple[int, ...]:
        """The shape ``(*lead, n, m)`` of one vector for each part of a stack."""
        inner = self.inner_shape
        if inner[-2] != self.matrix_shape[0]:  # a vector is one column
            return (*inner[:-2], *self.matrix_shape)
        return inner

    @property
    def inner_shape(self) -> tuple[int, ...]:
        """The shape of the coordinates R."""
        if self.spectrum is None:
            return self._product().stack_shape
        return tuple(self.spectrum.shape)

    @property
    def like(self) -> Array:
        """An array of the operator's library, device and dtype."""
        return self.damping

    @property
    def lead(self) -> tuple[int, ...]:
        """The shape of the stack of groups; empty for a single block."""
        return self.inner_shape[:-2]

    @property
    def dimension(self) -> int:
        """The number of the block's parameters."""
        return self.matrix_shape[0] * self.matrix_shape[1]

    @property
    def namespace(self) -> Namespace:
        """The namespace of the arrays."""
        return ns.own_namespace(self.damping)

    @property
    def is_kronecker(self) -> bool:
        """Whether the basis is ``Q_A (x) Q_G``, so that x and g are rotated apart."""
        return self.stack_shape == self.inner_shape

    @property
    def factorizations(self) -> frozenset[Factorization]:
        """Factorizations that have been prepared."""
        available: dict[Factorization, bool] = {
            "inverse": self.definite,
            "cholesky": self.lower is not None,
            "eigenbasis": self.spectrum is not None,
        }
        return frozenset(name for name, there in available.items() if there)

    def prepared(
        self,
        *factorizations: Factorization,
        check: Check = "raise",
        name: str = "block",
    ) -> SpectralOperator:
        """Return the operator with missing factorizations computed.

        Everything but ``F v`` needs the spectrum: about ``9 (n^3 + m^3)`` flops, where
        the block was made from factors.  ``"inverse"`` makes sure that ``s + lam`` is
        positive.
        """
        operator = self
        if factorizations and operator.spectrum is None:
            operator = operator._decomposed(check, name)
        if "inverse" in factorizations and not operator.definite:
            operator = operator._definite(check, name)
        if "cholesky" in factorizations and operator.lower is None:
            operator = operator._with_lower(check, name)
        return operator

    def spectral(
        self, *, check: Check = "raise", name: str = "block"
    ) -> SpectralOperator:
        """Return the decomposed operator, without the factors."""
        F = self.prepared("eigenbasis", check=check, name=name)
        return replaced(F, factors=None, lower=None)

    def to_basis(self, vectors: Array, /) -> Array:
        """Return the coordinates ``R = Q_A^T V Q_G`` of each vector.

        Parameters
        ----------
        vectors : array, shape (..., in(+1), out)
            Cast to the operator's dtype; leading axes stay in front.

        Returns
        -------
        array, shape (..., (Q,) n, m) or (..., n m, 1)
            The coordinates.

        Raises
        ------
        ShapeError, DtypeError, MixedArraysError
            For vectors of incompatible shape, dtype, library or device.

        Notes
        -----
        ``2 n m (n + m)`` flops for each.
        """
        xp = ns.namespace_of(vectors=vectors, block=self.damping)
        ns.require_floating(xp, vectors, "vectors")
        constraints.require_shape("vectors", vectors, (..., *self.vector_shape))
        return self._coordinates(self._split(ns.cast(xp, vectors, self.dtype), xp), xp)

    def from_basis(self, coordinates: Array, /) -> Array:
        """Return ``V = Q_A R Q_G^T`` for R from `to_basis`, in the block's dtype."""
        xp = self.namespace
        return self._joined(self._vectors(coordinates, xp), xp)

    def mean_eigenvalue(self) -> Array:
        """Return ``tr F / dim F``, 0-d: the mean of s."""
        return self.namespace.mean(self._values())

    def trace(self, *, damped: bool = True) -> Array:
        """Return ``sum (s + lam)``, or ``sum s``; from the factors' traces if possible."""
        # From the factors where there are any, since a clipped spectrum has another trace.
        if self.factors is None:
            trace = self.namespace.sum(self._values())
        else:
            trace = self.factors.trace(damped=False)
        return trace + self.dimension * self._one_damping() if damped else trace

    def _logdet(self) -> Array:
        """Return ``sum log(s + lam)``, 0-d."""
        xp = self.namespace
        return xp.sum(xp.log(self._ready("inverse")._damped()))

    def _undamped_logdet(self) -> Array:
        """Return ``sum log s``, from the factors if possible."""
        if self.factors is not None:
            return self.factors.logdet(damped=False)
        return log_sum(self._values())

    def frobenius_norm(self, *, damped: bool = True) -> Array:
        """Return the Frobenius norm, 0-d; of factors without decomposing them.

        ``|F + lam I|^2 = |F|^2 + 2 lam tr F + p lam^2``.
        """
        xp = self.namespace
        if self.factors is None:
            values = self._damped() if damped else self._values()
            return xp.linalg.vector_norm(values)
        norm = self.factors.frobenius_norm(damped=False)
        if not damped:
            return norm
        lam = self._one_damping()
        # |F + lam I|^2 = |F|^2 + 2 lam tr F + lam^2 dim F.
        mixed = 2.0 * lam * self.factors.trace(damped=False)
        return xp.sqrt(norm * norm + mixed + self.dimension * lam * lam)

    def eigenvalues(self, *, damped: bool = True) -> Array:
        """Return ``s + lam``, or s, ascending, shape (n m,)."""
        F = self._ready("eigenbasis")
        values = F._damped() if damped else F._values()
        return self.namespace.sort(self.namespace.reshape(values, (-1,)))

    def to_dense(self, *, damped: bool = True) -> Array:
        """Return ``F + lam I``, or F, as one matrix."""
        xp = self.namespace
        if self.factors is None:
            dense = self._dense()
        else:
            dense = self.factors.to_dense(damped=False)
        if not damped:
            return dense
        eye = xp.eye(self.dimension, dtype=self.dtype, device=ns.device_of(dense))
        return dense + self._one_damping() * eye

    def status(self) -> Array:
        """Return the flags of the block, its bases and L, 0-d int32."""
        xp, status = self.namespace, self.flags
        for basis in (self.input, self.output):
            if basis is not None:
                status = status | ns.any_status(basis.status, xp=xp)
        if self.lower is not None:
            status = status | ns.any_status(self.lower.status, xp=xp)
        return status

    def parts(self) -> dict[str, Any]:
        """Return the factors with their bases; the bases or the diagonal without them."""
        if self._is_diagonal():
            flat = self.namespace.reshape(self._values(), (-1,))
            diagonal = DampedDiagonal(
                flat, self._one_damping(), self.flags, self.definite
            )
            return {"block": diagonal}
        bases = {"input": self.input, "output": self.output}
        if self.factors is None:
            return {side: basis for side, basis in bases.items() if basis is not None}
        return {
            side: replaced(part, basis=bases[side])
            if isinstance(part, DampedMatrix)
            else part
            for side, part in self.factors.parts().items()
        }

    def _multiply(self, V: Array, xp: Namespace, damped: bool) -> Array:
        if self.factors is None:
            return self._in_eigenbasis(
                V, xp, self._damped() if damped else self._values()
            )
        # Two products instead of four, and without the roundoff of the bases.
        product = self.factors._multiply(V, xp, False)
        return product + self._lam() * V if damped else product

    def _multiply_inverse(self, V: Array, xp: Namespace) -> Array:
        F = self._ready("inverse")
        return F._vectors(F._coordinates(V, xp) / F._damped(), xp)

    def _power(self, V: Array, xp: Namespace, exponent: float) -> Array:
        F = self._ready("inverse" if exponent < 0 else "eigenbasis")
        return F._in_eigenbasis(V, xp, F._damped() ** exponent)

    def _sample(self, Z: Array, xp: Namespace) -> Array:
        """Return ``F_damped^-1/2 Z``, with the symmetric root."""
        return self._power(Z, xp, -0.5)

    def _lower_multiply(self, V: Array, xp: Namespace, transpose: bool) -> Array:
        # A block in the coordinate basis is diagonal, and so is its Cholesky factor.
        lower = self._triangle()
        if lower is None:
            return V * xp.sqrt(self._ready("inverse")._damped())
        return lower.multiply(V, transpose=transpose)

    def _lower_solve(self, V: Array, xp: Namespace, transpose: bool) -> Array:
        lower = self._triangle()
        if lower is None:
            return V / xp.sqrt(self._ready("inverse")._damped())
        return lower.solve(V, transpose=transpose)

    def _in_eigenbasis(self, V: Array, xp: Namespace, values: Array) -> Array:
        """Return ``Q_A [ (Q_A^T V Q_G) * values ] Q_G^T``."""
        return self._vectors(self._coordinates(V, xp) * values, xp)

    def _coordinates(self, V: Array, xp: Namespace) -> Array:
        """Return ``Q_A^T V Q_G``."""
        if self.input is not None:
            V = multiply_matrices(
                xp.matrix_transpose(self.input.eigenvectors), V, xp=xp
            )
        if self.output is None:
            return V
        return multiply_matrices(V, self.output.eigenvectors, xp=xp)

    def _vectors(self, R: Array, xp: Namespace) -> Array:
        """Return ``Q_A R Q_G^T``."""
        if self.input is not None:
            R = multiply_matrices(self.input.eigenvectors, R, xp=xp)
        if self.output is None:
            return R
        across = xp.matrix_transpose(self.output.eigenvectors)
        return multiply_matrices(R, across, xp=xp)

    def _values(self) -> Array:
        """Return s."""
        spectrum = self._ready("eigenbasis").spectrum
        assert spectrum is not None
        return spectrum

    def _damped(self) -> Array:
        """Return ``s + lam``; without the negative s where one is not positive."""
        return positive_eigenvalues(
            self._values(), self._lam(), axes=(-2, -1), xp=self.namespace
        )

    def _lam(self) -> Array:
        """Return lam with axes for the vectors' rows and columns."""
        return self.damping[..., None, None]

    def _one_damping(self) -> Array:
        """Return lam, 0-d, which is common to all groups."""
        # One damping is repeated for all groups of a layer.
        return self.damping if self.damping.ndim == 0 else self.damping[0]

    def _product(self) -> CurvatureOperator:
        assert self.factors is not None, "neither a spectrum nor factors"
        return self.factors

    def _ready(self, factorization: Factorization) -> SpectralOperator:
        """Return itself prepared for a product, where that can raise."""
        if self.spectrum is None:
            require_readable(self.damping, "eigenbasis")
            return self.prepared(factorization)
        if factorization == "eigenbasis" or self.definite:
            return self
        operator: SpectralOperator = self._prepared_if_readable(
            factorization, self.damping
        )
        return operator

    def _triangle(self) -> KroneckerCholesky | None:
        """Return L, computed where it can raise; None for a diagonal."""
        if self.lower is None and not self._is_diagonal():
            require_readable(self.damping, "cholesky")
            return self.prepared("cholesky").lower
        return self.lower

    def _is_diagonal(self) -> bool:
        return self.spectrum is not None and self.input is None and self.output is None

    def _decomposed(self, check: Check, name: str) -> SpectralOperator:
        """Return the operator with bases and spectrum, computed from the factors."""
        F = self._product().spectral(check=check, name=name)
        return replaced(self, input=F.input, output=F.output, spectrum=F.spectrum)

    def _definite(self, check: Check, name: str) -> SpectralOperator:
        """Return the operator, flagged if the smallest eigenvalue is not positive."""
        xp, operator = self.namespace, self
        damped = self._damped()
        # The smallest decides: eigenvalues of roundoff may be negative and exceed a
        # damping.
        positive = xp.min(damped) > 0
        # A product of two factors' eigenvalues may overflow where neither factor does.
        finite = xp.max(damped) != xp.inf
        flags = self.flags | ns.status_unless(xp, positive, Status.NOT_POSITIVE)
        flags = flags | ns.status_unless(xp, finite, Status.MATRIX_NOT_FINITE)
        if check == "raise":
            raise_for(flags, name)
        if self.factors is not None:
            operator, inaccurate = self._accurate(check, name)
            flags = flags | inaccurate
        return replaced(operator, flags=flags, definite=True)

    def _accurate(self, check: Check, name: str) -> tuple[SpectralOperator, Array]:
        """Return the operator with bases that determine the damped block, and flags."""
        factors: Any = self._product()
        bases, flags = accurate_bases(
            factors.parts(),
            {"input": self.input, "output": self.output},
            scale=factors.scale,
            damping=self.damping,
            check=check,
            name=name,
        )
        # The usual case: the damping covers the roundoff of the eigenvalues.
        if bases["input"] is self.input and bases["output"] is self.output:
            return self, flags
        spectrum = factors.spectrum_of(bases)
        accurate = replaced(
            self, input=bases["input"], output=bases["output"], spectrum=spectrum
        )
        return accurate, flags

    def _with_lower(self, check: Check, name: str) -> SpectralOperator:
        """Return the operator with its Cholesky factor; a diagonal one needs none."""
        # A Cholesky factor exists only of a definite block.
        F = self if self.definite else self._definite(check, name)
        if self._is_diagonal():
            return F
        if not self.is_kronecker:
            raise errors.UnsupportedError(
                "The eigenbasis of a full matrix has no structure to factorize. "
                "Factorize the operator that it was computed from."
            )
        n, m = self.inner_shape[-2:]
        Q_A, Q_G = self._basis_matrix(F.input, n), self._basis_matrix(F.output, m)
        lower = spectral_cholesky(Q_A, F._damped(), Q_G, check=check, name=name)
        return replaced(F, lower=lower)

    def _dense(self) -> Array:
        """Return F without damping, flattened row-major, from its spectrum."""
        xp = self.namespace
        n, m = self.inner_shape[-2:]
        Q_A, Q_G = self._basis_matrix(self.input, n), self._basis_matrix(self.output, m)
        Q = Q_A[..., :, None, :, None] * Q_G[..., None, :, None, :]
        Q = xp.reshape(Q, (*self.lead, n * m, n * m))
        spectrum = xp.reshape(self._values(), (*self.lead, 1, n * m))
        dense = xp.matmul(Q * spectrum, xp.matrix_transpose(Q))
        dense = 0.5 * (dense + xp.matrix_transpose(dense))
        return dense_of_blocks(dense, n=n, xp=xp)

    def _basis_matrix(self, basis: Eigendecomposition | None, size: int) -> Array:
        if basis is not None:
            return basis.eigenvectors
        eye = self.namespace.eye(
            size, dtype=self.dtype, device=ns.device_of(self.damping)
        )
        return self.namespace.broadcast_to(eye, (*self.lead, size, size))

    def _split(self, V: Array, xp: Namespace) -> Array:
        """Return vectors in the shape of the spectrum, leading axes in front."""
        if not self.lead:
            return xp.reshape(V, (*V.shape[:-2], *self.inner_shape))
        groups, n, m = self.inner_shape
        return ns.moved_axis(
            xp.reshape(V, (*V.shape[:-2], n, groups, m)), -2, -3, xp=xp
        )

    def _joined(self, V: Array, xp: Namespace) -> Array:
        """Return vectors in the shape of the block; undoes `_split`."""
        if not self.lead:
            return xp.reshape(V, (*V.shape[:-2], *self.vector_shape))
        moved = ns.moved_axis(V, -3, -2, xp=xp)
        return xp.reshape(moved, (*V.shape[:-3], *self.vector_shape))

    def _dampings(self) -> dict[str, Array]:
        return {"damping": self.damping}


def spectral_operator(
    spectrum: Array,
    /,
    *,
    damping: Scalar,
    vector_shape: tuple[int, int] | None = None,
    input: Eigendecomposition | Array | None = None,
    output: Eigendecomposition | Array | None = None,
    factorizations: tuple[Factorization, ...] = ("inverse",),
    check: Check = "raise",
    name: str = "block",
    dtype: object = None,
) -> SpectralOperator:
    """Make ``(Q_A (x) Q_G) diag(s + lam) (Q_A (x) Q_G)^T`` from its parts.

    That is EKFAC, from the squares of gradients in given bases; K-FAC with exact damping,
    from products of eigenvalues; and a diagonal block, without bases.

    Parameters
    ----------
    spectrum : array, shape ((Q,) n, m)
        s; negative entries count as zero.
    damping : float or array, 0-d
        Damping ``lam``, finite and >= 0.
    vector_shape : tuple of int, optional
        The shape ``(in(+1), out)`` of the vectors; by default the shape of the spectrum.
    input, output : array of shape (n, n) and (m, m), or Eigendecomposition, optional
        The eigenvectors Q_A and Q_G in their columns, orthogonal; the coordinate basis by
        default.
    factorizations : tuple of str
        Factorizations to prepare now.
    check : {"raise", "status"}
        Whether failures raise, or are reported in the operator's status.
    name : str
        Name of the block in error messages.
    dtype : dtype, optional
        Dtype of the arrays; by default the dtype of the spectrum, float32 at least.

    Returns
    -------
    SpectralOperator
        An immutable snapshot.

    Raises
    ------
    ShapeError, DtypeError, MixedArraysError
        For arrays of incompatible shape, dtype, library or device.
    ConventionError
        For bases that are not orthogonal to four digits (``check="raise"``).
    NotFiniteError, DampingError, FactorizationError
        For NaN or infinity in the block, an invalid damping, and a block that is not
        positive definite where it has to be (``check="raise"``).

    Examples
    --------
    EKFAC with the second moments of gradients in the eigenbases of two factors:

    >>> import numpy as np
    >>> from kfac_core.operators import spectral_operator
    >>> rng = np.random.default_rng(0)
    >>> x, g = rng.normal(size=(32, 3)), rng.normal(size=(32, 2))
    >>> (_, Q_A), (_, Q_G) = np.linalg.eigh(x.T @ x), np.linalg.eigh(g.T @ g)
    >>> squares = ((x @ Q_A) ** 2).T @ (g @ Q_G) ** 2 / len(x)
    >>> operator = spectral_operator(squares, input=Q_A, output=Q_G, damping=0.1)
    >>> operator.multiply_inverse(np.ones((3, 2))).shape
    (3, 2)
    """
    xp = ns.namespace_of(spectrum=spectrum)
    ns.require_floating(xp, spectrum, "spectrum")
    if dtype is None:
        dtype = ns.wide_dtype(xp, spectrum.dtype)
    if vector_shape is None:
        n, m = _matrix_shape(spectrum)
        vector_shape = n, m
    # Check the spectrum in the dtype in which it is used.
    spectrum = ns.cast(xp, spectrum, dtype)
    damping = ns.full_of(xp, ns.as_scalar(xp, damping, dtype, "damping"), spectrum)
    if input is not None and not isinstance(input, Eigendecomposition):
        input = _checked_basis(input, spectrum, -2, "input", check)
    if output is not None and not isinstance(output, Eigendecomposition):
        output = _checked_basis(output, spectrum, -1, "output", check)
    spectrum = xp.where(spectrum < 0, xp.zeros_like(spectrum), spectrum)
    input, output = in_dtype(input, dtype, xp), in_dtype(output, dtype, xp)
    finite = xp.all(xp.isfinite(spectrum))
    for basis in (input, output):
        if basis is not None:
            finite = finite & xp.all(xp.isfinite(basis.eigenvectors))
    damping, flags = flagged_damping(damping, xp=xp)
    flags = flags | ns.status_unless(xp, finite, Status.MATRIX_NOT_FINITE)
    definite = "inverse" in factorizations
    if definite:
        positive = xp.min(spectrum) + damping > 0
        flags = flags | ns.status_unless(xp, positive, Status.NOT_POSITIVE)
    if check == "raise":
        raise_for(flags, name)
    operator = SpectralOperator(
        input, output, spectrum, damping, flags, vector_shape, definite=definite
    )
    return operator.prepared(*factorizations, check=check, name=name)


_ORTHOGONAL = 1e-4
"""Largest error of ``Q Q^T z = z`` for a given basis and a fixed probe z."""


def _matrix_shape(spectrum: Array) -> tuple[int, int]:
    constraints.require_shape("spectrum", spectrum, ("n", "m"))
    n, m = spectrum.shape
    return int(n), int(m)


def _checked_basis(
    Q: Array, spectrum: Array, axis: int, side: str, check: Check
) -> Eigendecomposition:
    """Return given eigenvectors as an eigendecomposition, or raise."""
    xp = ns.namespace_of(**{side: Q, "spectrum": spectrum})
    ns.require_floating(xp, Q, side)
    size = int(spectrum.shape[axis])
    ns.require_matrix(Q, (size, size), side)
    Q = ns.cast(xp, Q, spectrum.dtype)
    nothing = xp.zeros_like(spectrum[..., 0, 0])
    none = xp.astype(nothing, xp.int32)
    # One vector finds a basis that was passed transposed or scaled, in O(n^2).
    z = probe(size, dtype=Q.dtype, device=ns.device_of(Q), xp=xp)
    back = xp.matmul(Q, xp.matmul(xp.matrix_transpose(Q), z))
    residual = xp.linalg.vector_norm(back - z) / xp.linalg.vector_norm(z)
    orthogonal = residual <= _ORTHOGONAL
    if check == "raise" and truth_of(orthogonal, xp=xp) is False:
        raise errors.ConventionError(
            f"Expected `{side}` to be orthogonal, with eigenvectors in its columns; "
            f"Q Q^T z differs from z by {float(residual):.1e} of it."
        )
    status = none | ns.status_unless(xp, orthogonal, Status.INACCURATE)
    zeros = xp.zeros((size,), dtype=Q.dtype, device=ns.device_of(Q))
    return Eigendecomposition(zeros, Q, zeros, status, residual, nothing, none)
