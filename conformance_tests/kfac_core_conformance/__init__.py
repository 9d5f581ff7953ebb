"""Checks that the author of a K-FAC implementation can run against it.

An `Adapter` connects the kit to a library: it receives a `Problem` in NumPy, a small
network with its data, and returns a dense block, or products of the block or its inverse
with vectors.  `identity_checks` compares the results with dense matrices computed by NumPy
alone, `record_checks` with the answers in verification records.

The checks use no operator of `kfac_core`; its own adapter, `kfac_core_conformance.own`, is
treated like any other.
"""

from kfac_core_conformance.adapter import (
    Adapter,
    AdapterError,
    Capabilities,
    NotOfferedError,
    load_adapter,
)
from kfac_core_conformance.check import Check, Outcome, run_check
from kfac_core_conformance.identities import identity_checks
from kfac_core_conformance.layer import LinearLayer
from kfac_core_conformance.network import Network
from kfac_core_conformance.problem import Data, Problem, Rows
from kfac_core_conformance.recorded import record_checks

__all__ = [
    "Adapter",
    "AdapterError",
    "Capabilities",
    "Check",
    "Data",
    "LinearLayer",
    "Network",
    "NotOfferedError",
    "Outcome",
    "Problem",
    "Rows",
    "identity_checks",
    "load_adapter",
    "record_checks",
    "run_check",
]
