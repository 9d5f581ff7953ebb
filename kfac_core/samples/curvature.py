"""``F_damped = J^T J / N + lam I`` of a whole network, by the Gram matrix ``K = J J^T``.

Conventions.  As `kfac_core.samples.jacobian`.  N is the number of examples, so that F is
the Gauss-Newton matrix of ``1/(2N) sum_r r^2``.  With Woodbury's formula

    F_damped^-1 v         = (v - J^T (K + N lam I)^-1 J v) / lam,
    F_damped^-1 J^T r / N = J^T (K + N lam I)^-1 r,

the second of which does not cancel: it is the direction of Gauss-Newton.  Centered, J is
``C J`` and K is ``C K C``, with ``C = I - 1 1^T / N``.

References
----------
Chen and Heyl (2023), arXiv:2302.01941; Goldshlager, Abrahamsen and Lin (2024),
arXiv:2401.10190 (SPRING, centered); Müller and Zeinhofer (2025), arXiv:2505.12149.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kfac_core import errors
from kfac_core.array import Array, Check, Namespace, Scalar
from kfac_core.array import namespaces as ns
from kfac_core.array.finite import is_plain, known_true, truth_of
from kfac_core.array.structure import structure
from kfac_core.damping import require_damping
from kfac_core.linalg.factorizations import CholeskyFactor
from kfac_core.linalg.factorize import cholesky_factor
from kfac_core.linalg.symmetric import ScaledMatrix, SymmetricMatrix, multiply_symmetric
from kfac_core.linalg.triangular import solve_cholesky
from kfac_core.samples.gram import sample_gram
from kfac_core.samples.iterative import IterativeKernel, NystromKernel
from kfac_core.samples.jacobian import Jacobian, Matrices, Parameters

REMAINDER = 1e-6
"""Largest ``|F x - v| / |v|`` of a product with the inverse."""

ACCURACY = 1e-4
"""Of directions: their error is about the roundoff of K times its condition number."""


@structure()
class DirectKernel:
    """``K + shift I`` by its Cholesky factor, in whose memory K may stand.

    Attributes
    ----------
    cholesky : CholeskyFactor
        The factor L.
    shift : array, 0-d
        The shift ``N lam``.
    gram_trace : array, 0-d
        The trace of K.
    """

    cholesky: CholeskyFactor
    shift: Array
    gram_trace: Array

    def solve(self, right: Array, /) -> Array:
        """Return ``(K + shift I)^-1 r`` for r of shape (R, 1)."""
        xp = ns.own_namespace(right)
        return solve_cholesky(self.cholesky.lower, right, xp=xp)

    def trace(self) -> Array:
        """Return the trace of K, 0-d."""
        return self.gram_trace

    def logdet(self) -> Array:
        """Return ``log det (K + shift I)``, 0-d."""
        xp = ns.own_namespace(self.shift)
        return 2.0 * xp.sum(xp.log(xp.linalg.diagonal(self.cholesky.lower)))

    def status(self) -> Array:
        """Return the `Status` flags of the factorization, 0-d int32."""
        return self.cholesky.status


@structure(static=("centered",))
class SampleCurvature:
    r"""The damped Gauss-Newton matrix of a whole network, exact, by its Gram matrix.

    .. math:: F = \frac{1}{N} J^T J + \lambda I, \qquad K = J J^T .

    All layers stand in it with each other, where K-FAC has a block for each.  It is the
    better curvature where the number of rows R is at most some thousands, for any number
    of parameters.  Make one with `sample_curvature`.

    Attributes
    ----------
    jacobian : Jacobian
        Rows of the layers.
    kernel : DirectKernel or IterativeKernel
        The Cholesky factor of ``K + N lam I``, or what solves with it by iterations.
    damping : array, 0-d
        The damping lam, in the dtype of K.
    centered : bool
        Whether the mean over examples is taken off J.

    Notes
    -----
    Memory: the rows, and ``R^2`` numbers.

    Examples
    --------
    >>> import numpy as np
    >>> import kfac_core as kc
    >>> from kfac_core.samples import Jacobian, sample_curvature
    >>> layer = kc.Dense(in_features=2, out_features=1, bias=False, weight_layout="io")
    >>> x = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    >>> J = Jacobian.of({"fc": layer}, {"fc": kc.Batch(x, np.ones((3, 1)))})
    >>> F = sample_curvature(J, damping=1e-3)
    >>> r = np.array([1.0, 0.0, 1.0])
    >>> direction = F.direction(r)["fc"]["weight"][:, 0]
    >>> expected = np.linalg.solve(x.T @ x / 3 + 1e-3 * np.eye(2), x.T @ r / 3)
    >>> bool(np.allclose(direction, expected))
    True
    """

    jacobian: Jacobian
    kernel: DirectKernel | IterativeKernel
    damping: Array
    centered: bool = False

    def direction(
        self,
        residuals: Array,
        /,
        *,
        last: Parameters | None = None,
        momentum: Scalar = 0.0,
    ) -> dict[str, dict[str, Array]]:
        r"""Return the direction of Gauss-Newton, with SPRING's momentum.

        .. math:: d = \mu \varphi + J^T (K + N \lambda I)^{-1} (r - \mu J \varphi)

        with the last direction :math:`\varphi`: of all d, that which minimizes
        :math:`|J d - r|^2 / N + \lambda |d - \mu \varphi|^2`.

        Parameters
        ----------
        residuals : array, shape (N,) or (N, C)
            The residuals r: ``J^T r / N`` is the gradient of the loss.
        last : mapping of str to mapping of str to array, optional
            The last direction; None for none.
        momentum : float or 0-d array
            mu, in [0, 1).

        Returns
        -------
        dict of str to dict of str to array
            Parameter-shaped; subtract it, times a rate, from the parameters.

        Raises
        ------
        ShapeError, MixedArraysError
            For arrays that do not fit.

        Notes
        -----
        ``2 R^2`` flops, and two products with J.

        References
        ----------
        Goldshlager, Abrahamsen and Lin (2024), arXiv:2401.10190, equation 19.
        """
        J = self.jacobian
        phi = None if last is None else J.to_matrices(last)
        return J.to_parameters(self.direction_matrices(residuals, phi, momentum))

    def direction_matrices(
        self, residuals: Array, last: Matrices | None, momentum: Scalar, /
    ) -> dict[str, Array]:
        """Return `direction` as the layers' matrices, as which the last one comes, too."""
        target = residuals
        if last is not None:
            target = residuals - momentum * self.jacobian.multiply_matrices(last)
        w = self.solve_kernel(target)
        if self._in_dtype_of_rows(w, target):
            w = ns.cast(ns.own_namespace(w), w, self.jacobian.like.dtype)
        step = self._combined(w)
        if last is None:
            return step
        return _of_both(lambda d, phi: d + momentum * phi, step, last)

    def _in_dtype_of_rows(self, w: Array, target: Array) -> bool:
        """Whether the host knows that ``J^T w`` is accurate in the dtype of the rows.

        Its roundoff is at most that of ``|J| |w|``, and ``|J^T w|^2 = w^T K w``.
        """
        xp, kernel = ns.own_namespace(w), self.kernel
        if (
            self.centered
            or isinstance(kernel, IterativeKernel)
            or not is_plain(w, xp=xp)
        ):
            return False
        roundoff = ns.roundoff_of(self.jacobian.like.dtype, xp=xp)
        norm = inner(w, target - kernel.shift * w, xp=xp)
        bound = roundoff**2 * kernel.gram_trace * inner(w, w, xp=xp)
        return known_true(bound <= ACCURACY**2 * norm, xp=xp)

    def solve_kernel(self, c: Array, /) -> Array:
        """Return ``(K + N lam I)^-1 c``, centered on both sides where J is.

        Parameters
        ----------
        c : array, shape (N,) or (N, C)
            A vector in the space of samples.

        Returns
        -------
        array, shape (N,) or (N, C)
            In the dtype of K.
        """
        xp = ns.namespace_of(kernel=self.damping, coefficients=c)
        if tuple(c.shape) != self.jacobian.sample_shape:
            raise errors.ShapeError(
                f"Expected an array of shape {self.jacobian.sample_shape} in the space of "
                f"samples, got {tuple(c.shape)}."
            )
        # Of C K C + N lam I only N lam acts on a mean: without one, the solution has none
        # but for roundoff, which a small damping would magnify.
        centered = self._center(ns.cast(xp, c, self.damping.dtype))
        solved = self.kernel.solve(ns.reshaped(centered, (-1, 1), xp=xp))
        return self._center(ns.reshaped(solved, tuple(c.shape), xp=xp))

    def multiply(
        self, vectors: Parameters, /, *, damped: bool = True
    ) -> dict[str, dict[str, Array]]:
        """Return ``F_damped v``, or ``F v``; two products with J."""
        v = self.jacobian.to_matrices(vectors)
        damping = self.damping if damped else 0.0
        return self._narrowed(self._product(self._widened(v), damping), v)

    def multiply_inverse(self, vectors: Parameters, /) -> dict[str, dict[str, Array]]:
        """Return ``F_damped^-1 v``; prefer `direction` for a gradient ``J^T r / N``.

        The two vectors that Woodbury's formula subtracts are nearly equal where the damping
        is small and J has more rows than columns.  Products are in the dtype of K.

        Raises
        ------
        FactorizationError
            If ``|F_damped x - v| / |v|`` is above 1e-6 for the solution x, or x is beyond
            the range of its dtype.  A traced program gets NaN instead.
        """
        right = self.jacobian.to_matrices(vectors)
        wide = self._widened(right)
        x = self._woodbury(wide)
        # One refinement: what the subtraction cancelled is solved for again.
        left = _of_both(
            lambda v, image: v - image, wide, self._product(x, self.damping)
        )
        x = _of_both(lambda x, d: x + d, x, self._woodbury(left))
        left = _of_both(
            lambda v, image: v - image, wide, self._product(x, self.damping)
        )
        error = squared_norm(left) ** 0.5
        good = error <= REMAINDER * squared_norm(wide) ** 0.5
        xp = ns.own_namespace(self.damping)
        narrow = _of_both(lambda x, v: ns.cast(xp, x, v.dtype), x, right)
        for array in narrow.values():
            good = good & xp.all(xp.isfinite(array))
        if truth_of(good, xp=xp) is False:
            raise errors.FactorizationError(
                "The inverse of the damped matrix is too inaccurate for this vector: "
                f"|F x - v| is {float(error):.0e}, for a damping of "
                f"{float(self.damping):.0e}. Increase `damping`, or take direction() for "
                "residuals."
            )
        marked = {
            name: xp.where(good, x, xp.full_like(x, xp.nan))
            for name, x in narrow.items()
        }
        return self.jacobian.to_parameters(marked)

    def _widened(self, matrices: Matrices) -> dict[str, Array]:
        xp, dtype = ns.own_namespace(self.damping), self.damping.dtype
        return {name: ns.cast(xp, V, dtype) for name, V in matrices.items()}

    def _narrowed(
        self, matrices: Matrices, like: Matrices
    ) -> dict[str, dict[str, Array]]:
        """Return matrices in the dtypes of others, parameter-shaped."""
        xp = ns.own_namespace(self.damping)
        narrow = _of_both(lambda x, v: ns.cast(xp, x, v.dtype), matrices, like)
        return self.jacobian.to_parameters(narrow)

    def _woodbury(self, v: Matrices) -> dict[str, Array]:
        """Return ``(v - J^T (K + N lam I)^-1 J v) / lam`` in the dtype of K."""
        w = self.solve_kernel(self.jacobian.multiply_matrices(v))
        inner = self._combined(w, self.damping.dtype)
        return _of_both(lambda v, w: (v - w) / self.damping, v, inner)

    def _product(self, v: Matrices, damping: Scalar) -> dict[str, Array]:
        """Return ``F v`` plus a damping times v, in the dtype of K."""
        N = self.jacobian.examples
        along = self._center(self.jacobian.multiply_matrices(v)) / N
        product = self._combined(along, self.damping.dtype)
        return _of_both(lambda w, v: w + damping * v, product, v)

    def sample(
        self, parameter_noise: Parameters, sample_noise: Array, /
    ) -> dict[str, dict[str, Array]]:
        r"""Turn white noise into noise of covariance ``F_damped^-1`` (Matheron's rule).

        .. math:: \theta = z - J^T (K + N \lambda I)^{-1} (J z + \sqrt{N} \epsilon),
            \qquad z = \lambda^{-1/2} \zeta

        Parameters
        ----------
        parameter_noise : mapping of str to mapping of str to array
            Standard normal numbers zeta, parameter-shaped.
        sample_noise : array, shape (N,) or (N, C)
            Standard normal numbers epsilon.

        Returns
        -------
        dict of str to dict of str to array
            One sample, parameter-shaped.

        References
        ----------
        Wilson et al. (2021), arXiv:2011.04026, equation 8.
        """
        xp = ns.own_namespace(self.damping)
        deviation, J = xp.sqrt(self.damping), self.jacobian
        noise = J.to_matrices(parameter_noise)
        z = {name: V / deviation for name, V in self._widened(noise).items()}
        along = J.multiply_matrices(z)
        w = self.solve_kernel(along + float(J.examples) ** 0.5 * sample_noise)
        # Where the damping is small, z is large beside the difference.
        correction = self._combined(w, self.damping.dtype)
        return self._narrowed(_of_both(lambda x, w: x - w, z, correction), noise)

    def trace(self, *, damped: bool = True) -> Array:
        """Return the trace of F_damped, or of F, 0-d."""
        trace = self.kernel.trace() / self.jacobian.examples
        return trace + self.jacobian.parameters * self.damping if damped else trace

    def logdet(self) -> Array:
        """Return ``log det F_damped = log det (K/N + lam I) + (P - R) log lam``, 0-d."""
        xp, J = ns.own_namespace(self.damping), self.jacobian
        # F has the nonzero eigenvalues of K/N (Sylvester), and P - R further zeros.
        of_complement = (J.parameters - J.samples) * xp.log(self.damping)
        N = xp.full_like(self.damping, float(J.examples))
        return self.kernel.logdet() - J.samples * xp.log(N) + of_complement

    def diagonal(self, *, damped: bool = True) -> dict[str, dict[str, Array]]:
        """Return the diagonal of F_damped, or of F, parameter-shaped.

        Raises
        ------
        UnsupportedError
            For a centered J, whose rows are not those of its layers.
        """
        if self.centered:
            raise errors.UnsupportedError(
                "The diagonal of a centered Jacobian is not a sum over its rows; take "
                "centered=False."
            )
        N = self.jacobian.examples
        return {
            layer: {
                name: x / N + (self._lam(x) if damped else 0.0)
                for name, x in squares.items()
            }
            for layer, squares in self.jacobian.squares().items()
        }

    def residual(self, residuals: Array, solution: Array, /) -> Array:
        """Return ``|(K + N lam I) w - r| / |r|`` of a solution w, 0-d.

        Two products with J.
        """
        xp, dtype = ns.own_namespace(self.damping), self.damping.dtype
        r = self._center(ns.cast(xp, residuals, dtype))
        combined = self._combined(solution)
        along = self._center(self.jacobian.multiply_matrices(combined))
        shift = self.damping * self.jacobian.examples
        error = ns.cast(xp, along, dtype) + shift * solution - r
        size = xp.linalg.vector_norm(r)
        # Zero residuals have the solution zero: 0 / 1 and not 0 / 0.
        safe = xp.where(size > 0, size, xp.ones_like(size))
        return xp.linalg.vector_norm(error) / safe

    def status(self) -> Array:
        """Return the `Status` flags of the factorization, 0-d int32."""
        return self.kernel.status()

    def _combined(self, c: Array, dtype: object = None) -> dict[str, Array]:
        return self.jacobian.combine(self._center(c), dtype=dtype)

    def _center(self, c: Array) -> Array:
        """Return c less its mean over examples, where J is centered."""
        if not self.centered:
            return c
        xp = ns.own_namespace(c)
        return c - xp.mean(c, axis=0, keepdims=True)

    def _lam(self, like: Array) -> Array:
        """Return the damping in the dtype of a vector."""
        return ns.cast(ns.own_namespace(like), self.damping, like.dtype)


def sample_curvature(
    J: Jacobian,
    /,
    *,
    damping: Scalar,
    centered: bool = False,
    check: Check = "raise",
    dtype: object = None,
    max_elements: int | None = None,
) -> SampleCurvature:
    """Return ``J^T J / N + lam I`` with K formed and factorized.

    Parameters
    ----------
    J : Jacobian
        Rows of the network's layers.
    damping : float or 0-d array
        The damping lam, positive.
    centered : bool
        Whether J is less its mean over the examples, as for wave functions, where the rows
        are derivatives of log psi.
    check : {"raise", "status"}
        Whether a factorization that fails raises, which synchronizes with the device, or
        is flagged in ``status()``.
    dtype : dtype, optional
        Dtype of K and its factor: float64 where the device has it.
    max_elements : int, optional
        See `sample_gram`.

    Returns
    -------
    SampleCurvature
        An immutable snapshot.

    Raises
    ------
    DampingError
        For a damping that is negative, not finite, or so small beside K that directions
        would not be right to 1e-4 (``check="raise"``).
    NotFiniteError, FactorizationError
        If K cannot be factorized to the accuracy that is promised (``check="raise"``).

    Notes
    -----
    ``R^3 / 3`` flops beside those of `sample_gram`.
    """
    require_damping(damping)
    K = sample_gram(J, dtype=dtype, max_elements=max_elements)
    options: dict[str, Any] = {"damping": damping, "centered": centered, "check": check}
    return damped_kernel(J, K, **options, overwrite=True)


def damped_kernel(
    J: Jacobian,
    K: SymmetricMatrix | NystromKernel,
    /,
    *,
    damping: Scalar,
    centered: bool = False,
    check: Check = "raise",
    overwrite: bool = False,
) -> SampleCurvature:
    """Return the curvature of a Gram matrix that is known, for another damping.

    Parameters
    ----------
    J : Jacobian
        Rows of the network's layers.
    K : SymmetricMatrix or NystromKernel
        What `sample_gram` returns; or `nystrom_kernel`, for conjugate gradients.
    damping, centered, check
        See `sample_curvature`.
    overwrite : bool
        Whether the memory of K may become the factor's; K is then not to be used again.

    Returns
    -------
    SampleCurvature
        An immutable snapshot.
    """
    xp = ns.own_namespace(K.array)
    lam = ns.full_of(xp, damping, K.array)
    if centered:
        K = _centered_kernel(K, J, overwrite, xp)
        overwrite = True
    # A solution errs by the roundoff times |K| / shift, and tr K is at least |K|.
    trace = K.trace()
    least = ns.roundoff_of(K.array.dtype, xp=xp) / ACCURACY * trace
    shift = lam * J.examples
    too_small = truth_of(shift < least, xp=xp) if check == "raise" else None
    if too_small:
        raise errors.DampingError(
            f"Expected a damping of at least {float(least) / J.examples:.1e} for K in "
            f"{K.array.dtype}, so that directions are right to {ACCURACY:.0e}, got "
            f"{float(lam):.1e}. Raise it; check='status' takes any."
        )
    if isinstance(K, NystromKernel):
        kernel = IterativeKernel(J, K, lam * J.examples)
        return SampleCurvature(J, kernel, lam)
    # What storing K rounds off is far below a shift that was compared with its trace.
    roundoff = 0.0 if too_small is False else ns.roundoff_of(K.array.dtype, xp=xp)
    problem = ScaledMatrix(K, ns.full_of(xp, 1.0, K.array), shift, roundoff)
    factor = cholesky_factor(problem, check=check, name="K", in_place=overwrite)
    return SampleCurvature(J, DirectKernel(factor, shift, trace), lam, centered)


def _centered_kernel(
    K: SymmetricMatrix | NystromKernel, J: Jacobian, overwrite: bool, xp: Namespace
) -> SymmetricMatrix:
    """Return ``C K C``, with the mean over examples taken off rows and columns."""
    if isinstance(K, NystromKernel):
        raise errors.UnsupportedError(
            "Iterations do not solve with a centered K. Compute K itself, by "
            "sample_gram."
        )
    N, C, like = J.examples, J.outputs, K.array
    eye = xp.eye(C, dtype=like.dtype, device=ns.device_of(like))
    ones = xp.reshape(xp.broadcast_to(eye, (N, C, C)), (N * C, C))
    means = multiply_symmetric(K, ones / N, xp=xp)
    means = xp.reshape(means, (N, C, 1, C))
    entries = like if overwrite else xp.asarray(like, copy=True)
    entries = xp.reshape(entries, (N, C, N, C))
    entries -= means
    entries -= xp.permute_dims(means, (2, 3, 0, 1))
    entries += xp.mean(means, axis=0, keepdims=True)
    return SymmetricMatrix(xp.reshape(entries, (N * C, N * C)), full_storage=False)


def _of_both(
    function: Callable[[Array, Array], Array], first: Matrices, second: Matrices
) -> dict[str, Array]:
    """Return a function of two vectors in the space of parameters, entry by entry."""
    return {name: function(x, second[name]) for name, x in first.items()}


def inner(x: Array, y: Array, /, *, xp: Namespace) -> Array:
    """Return the inner product in the space of samples, 0-d."""
    # A sum takes NumPy as long as three products of vectors.
    return x @ y if type(x) is np.ndarray and x.ndim == 1 else ns.summed(x * y, xp=xp)


def squared_norm(matrices: Matrices) -> Scalar:
    """Return the squared norm of a vector in the space of parameters, 0-d."""
    total: Any = 0.0
    for x in matrices.values():
        xp = ns.own_namespace(x)
        wide = ns.cast(xp, x, ns.wide_dtype(xp, x.dtype))
        total = total + xp.sum(wide * wide)
    return total
