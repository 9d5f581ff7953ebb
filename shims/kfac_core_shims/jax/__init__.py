"""K-FAC for JAX: any network function, a whole step inside one ``jax.jit``.

Conventions.  A network is a pure function ``(params, *inputs) -> outputs`` of a batch;
the first axis of its outputs is that of the examples.  Its layers are found in what JAX
traces, whatever library it was written with, or marked by `dense` or `tap`.  Zeros are
added to their outputs, and derivatives by these are the output gradients.

In the order of reading: ``marks`` (what a user says), ``program`` and ``views`` (a trace as
a list of operations), ``finding`` (layers in it), ``examples`` (whose rows are whose),
``network`` (the blocks, and the capture), ``kfac`` (the optax transformation),
``optimizer`` (rate, momentum and damping from the quadratic model), and ``rotated_adam``
(SOAP: Adam in the eigenbasis of the factors).
"""

import kfac_core_shims

kfac_core_shims.require("jax", extra="jax")


from kfac_core_shims.jax.collecting import collect
from kfac_core_shims.jax.compiled import compiled
from kfac_core_shims.jax.gauss_newton import (
    GaussNewton,
    GaussNewtonProgress,
    GaussNewtonState,
)
from kfac_core_shims.jax.kfac import KFAC
from kfac_core_shims.jax.marks import dense, tap
from kfac_core_shims.jax.network import Network
from kfac_core_shims.jax.optimizer import (
    KFACOptimizer,
    OptimizerState,
    Progress,
)
from kfac_core_shims.jax.rotated_adam import SOAPState, soap

__all__ = [
    "KFAC",
    "KFACOptimizer",
    "GaussNewton",
    "GaussNewtonProgress",
    "GaussNewtonState",
    "Network",
    "OptimizerState",
    "Progress",
    "SOAPState",
    "collect",
    "compiled",
    "dense",
    "soap",
    "tap",
]
