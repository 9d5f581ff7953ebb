"""The Gaussian posterior of one block's parameters, ``N(theta*, P^-1)``.

Conventions.  The precision is

    P = N F + tau I,

F the block's curvature averaged over examples, N the number of examples of the data set,
tau the precision of an isotropic Gaussian prior.  In the eigenbasis of F its eigenvalues
are ``N s + tau``: another tau, or another N, needs no new decomposition.

N is a scale and need not be a whole number: where F is the curvature of half the squared
error and the likelihood is Gaussian with variance sigma^2, it is ``N / sigma^2``; at a
temperature T it is ``N / T``.
"""

from __future__ import annotations

import math

from kfac_core import constraints, errors
from kfac_core.array import Array, Check, Scalar, Status, replaced
from kfac_core.array import namespaces as ns
from kfac_core.array.structure import structure
from kfac_core.operators.operator import CurvatureOperator
from kfac_core.operators.spectral import SpectralOperator

_PRECISION = constraints.POSITIVE_SCALAR._replace(error=errors.DampingError)


@structure(static=("name", "check"))
class BlockPosterior:
    """The posterior of one block; made by `block_posterior`.

    Attributes
    ----------
    curvature : SpectralOperator
        F in its eigenbasis.
    examples, prior_precision : array, 0-d
        Number of examples N and prior precision tau.
    name, check
        Name used in error messages, and whether failures raise.
    """

    curvature: SpectralOperator
    examples: Array
    prior_precision: Array
    name: str
    check: Check

    def with_prior(self, prior_precision: Scalar, /) -> BlockPosterior:
        """Return the posterior for another tau; the decomposition is reused."""
        constraints.require_range("prior_precision", prior_precision, _PRECISION)
        return self._with("prior_precision", prior_precision)

    def with_examples(self, examples: Scalar, /) -> BlockPosterior:
        """Return the posterior for another N; the decomposition is reused."""
        constraints.require_range("examples", examples, constraints.DAMPING)
        return self._with("examples", examples)

    def eigenvalues(self) -> Array:
        """Return ``N s + tau``, of the shape of the curvature's spectrum."""
        return self.examples * self.curvature.spectrum + self.prior_precision

    def multiply(self, vectors: Array, /) -> Array:
        """Return ``P v``, for vectors of shape (..., in(+1), out)."""
        return self._power(vectors, 1.0)

    def multiply_inverse(self, vectors: Array, /) -> Array:
        """Return ``P^-1 v``, the covariance times each vector."""
        return self._power(vectors, -1.0)

    def sample(self, noise: Array, /) -> Array:
        """Turn white noise Z into ``P^-1/2 Z``, whose covariance is ``P^-1``.

        The root is the symmetric one, which does not depend on the signs of
        eigenvectors: the same noise is the same sample in every library.

        Parameters
        ----------
        noise : array, shape (..., in(+1), out)
            Independent standard normal numbers.

        Returns
        -------
        array, of the same shape and dtype
            To be added to theta*.
        """
        return self._power(noise, -0.5)

    def logdet(self) -> Array:
        """Return ``log det P = sum log(N s + tau)``, 0-d."""
        xp = self.curvature.namespace
        return xp.sum(xp.log(self.eigenvalues()))

    def logdet_prior(self) -> Array:
        """Return ``log det tau I = dim log tau``, 0-d."""
        xp = self.curvature.namespace
        return self.curvature.dimension * xp.log(self.prior_precision)

    def scatter(self, deviation: Array, /) -> Array:
        """Return ``tau |theta* - mu|^2`` of the block, 0-d."""
        xp = self.curvature.namespace
        v = ns.cast(xp, deviation, self.curvature.dtype)
        return self.prior_precision * xp.sum(v * v)

    def status(self) -> Array:
        """Return the flags of the decomposition and of N and tau, 0-d int32."""
        xp, N, tau = self.curvature.namespace, self.examples, self.prior_precision
        good = xp.isfinite(N) & (N >= 0) & xp.isfinite(tau) & (tau > 0)
        return self.curvature.status() | ns.status_unless(xp, good, Status.BAD_DAMPING)

    def _with(self, key: str, value: Scalar) -> BlockPosterior:
        x = _entered(value, self.name, key, F=self.curvature, check=self.check)
        return replaced(self, **{key: x})

    def _power(self, vectors: Array, exponent: float) -> Array:
        # Prior and data share eigenvectors, since the prior is isotropic: every power
        # is diagonal there, for any prior precision without refactorizing.
        R = self.curvature.to_basis(vectors) * self.eigenvalues() ** exponent
        result = self.curvature.from_basis(R)
        return ns.cast(self.curvature.namespace, result, vectors.dtype)


def block_posterior(
    operator: CurvatureOperator,
    /,
    *,
    examples: Scalar,
    prior_precision: Scalar,
    check: Check = "raise",
    name: str = "block",
) -> BlockPosterior:
    """Make the posterior of one block, ``P = N F + tau I``.

    Parameters
    ----------
    operator : CurvatureOperator
        The curvature F, averaged over examples.  An operator's own damping is left out.
    examples : float or 0-d array
        Number of examples N of the data set, finite and >= 0.  For Gaussian noise of
        variance sigma^2 it is ``N / sigma^2``; at a temperature T it is ``N / T``.
    prior_precision : float or 0-d array
        tau, finite and positive.
    check : {"raise", "status"}
        Whether failures raise, which synchronizes with the device, or are in ``status()``.
    name : str
        Name of the block in error messages.

    Returns
    -------
    BlockPosterior
        Result in the dtype of the operator.

    Raises
    ------
    DampingError
        For N or tau out of range.
    UnsupportedError
        For an operator without an eigenbasis.
    NotFiniteError, FactorizationError
        If the eigendecomposition fails.

    References
    ----------
    Ritter, Botev and Barber (2018), "A Scalable Laplace Approximation for Neural
    Networks"; for the prior added exactly, in the eigenbases, Immer et al. (2021),
    arXiv:2104.04975.
    """
    constraints.require_range("examples", examples, constraints.DAMPING)
    constraints.require_range("prior_precision", prior_precision, _PRECISION)
    F: SpectralOperator = operator.spectral(check=check, name=name)
    N = _entered(examples, name, "examples", F=F, check=check)
    tau = _entered(prior_precision, name, "prior_precision", F=F, check=check)
    return BlockPosterior(F, N, tau, name, check)


def _entered(
    value: Scalar, name: str, key: str, /, *, F: SpectralOperator, check: Check
) -> Array:
    """Return N or tau as a 0-d array; checks the value if that may synchronize."""
    entered = ns.as_scalar(F.namespace, value, F.dtype, key)
    if isinstance(entered, float):
        good = math.isfinite(entered) and _in_range(entered, key)
    else:
        finite = F.namespace.isfinite(entered)
        # With "status" a traced number is not read; `status` flags it.
        good = check == "status" or bool(finite & _in_range(entered, key))
    if not good:
        bound = "> 0" if key == "prior_precision" else ">= 0"
        raise errors.DampingError(
            f"Block {name!r}: expected a finite `{key}` {bound}, got {float(entered)}."
        )
    return ns.full_of(F.namespace, entered, F.damping)


def _in_range(value: Scalar, key: str) -> Array | bool:
    return value > 0 if key == "prior_precision" else value >= 0
