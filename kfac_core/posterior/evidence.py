"""The terms of Laplace's approximation of the log-marginal likelihood.

Conventions.  At the mode theta* of a posterior with the prior ``N(mu, P0^-1)``, P the
precision there and d the number of parameters,

    log p(D) = log p(D | theta*)  -  1/2 (theta* - mu)^T P0 (theta* - mu)
               + 1/2 log det P0  -  1/2 log det P.

The prior's ``-d/2 log 2 pi`` and the Gaussian integral's ``+d/2 log 2 pi`` cancel, so
that no constant is left out but those that the caller leaves out of the log-likelihood.
"""

from __future__ import annotations

from kfac_core.array import Array
from kfac_core.array.structure import structure


@structure()
class Evidence:
    """The four terms, each as it is named, without its factor of one half.

    Attributes
    ----------
    log_likelihood : array, 0-d
        ``log p(D | theta*)``, summed over the data, as the caller gave it.
    scatter : array, 0-d
        ``(theta* - mu)^T P0 (theta* - mu)``.
    logdet_prior : array, 0-d
        ``log det P0``.
    logdet_posterior : array, 0-d
        ``log det P``.

    References
    ----------
    MacKay (1992), "A Practical Bayesian Framework for Backpropagation Networks"; Immer
    et al. (2021), arXiv:2104.04975.

    Examples
    --------
    >>> import numpy as np
    >>> from kfac_core.posterior import Evidence
    >>> numbers = [np.asarray(x) for x in (-10.0, 2.0, 3.0, 5.0)]
    >>> terms = Evidence(*numbers)
    >>> float(terms.log_marginal_likelihood)
    -12.0
    """

    log_likelihood: Array
    scatter: Array
    logdet_prior: Array
    logdet_posterior: Array

    @property
    def log_marginal_likelihood(self) -> Array:
        """The approximation of ``log p(D)``, 0-d."""
        # -complexity / 2 is the log of the Occam factor; powers of 2 pi cancel.
        complexity = self.logdet_posterior - self.logdet_prior
        return self.log_likelihood - 0.5 * (self.scatter + complexity)
