"""Checks that a K-FAC author can run against a library of their own.

An `Adapter` stands between the kit and a library: it is handed a `Problem` in NumPy, a
small network with its data, and answers with a dense block, or with products of the
block and of its inverse.  `identity_checks` compares these with dense matrices that NumPy
computes for itself, `record_checks` with the answers in verification records.

Nothing here imports an operator of this library; `kfac_core_conformance.own` is its own
adapter, and is treated like any other.
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
