"""The block-tridiagonal inverse.  Martens and Grosse (2015), section 4.3."""

import kfac_core as kc
from methods.curvature import Estimated


def tridiagonal(problem, *, damping):
    """A chain of dense layers, each conditioned on the next one."""
    chains = {"network": tuple(problem.layers)}
    coupling = kc.Coupling(chains=chains)
    return Estimated(problem, kc.Kronecker(), damping=damping, coupling=coupling)
