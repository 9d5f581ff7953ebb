"""Kronecker-factored curvature, for every array library.

A framework feeds layer inputs and output gradients; this library gives back products of
the curvature with vectors.  A `Block` is a layer (`Dense`) and an approximation
(`Kronecker`); an `Estimator` holds the blocks of one network.  Arrays decide which
library computes, through the Python Array API; `kfac_core.array.selection` says which one
serves where no array is there to decide.

A name is imported when it is first used, so that `import kfac_core` costs little more than
NumPy's own import, however much there is to choose from.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kfac_core.approximations.approximation import Approximation
    from kfac_core.approximations.eigen import Eigen
    from kfac_core.approximations.eva import Eva
    from kfac_core.approximations.example_gram import ExampleGram
    from kfac_core.approximations.kfoc import KFOC
    from kfac_core.approximations.kronecker import Kronecker
    from kfac_core.approximations.low_rank import LowRankKronecker
    from kfac_core.approximations.scaled_identity import ScaledIdentity
    from kfac_core.approximations.second_moment import Diagonal, Full
    from kfac_core.approximations.series import Series
    from kfac_core.approximations.tnt import TNT
    from kfac_core.approximations.tridiagonal import BlockTridiagonal
    from kfac_core.array.backend import (
        Backend,
        backend_names,
        get_backend,
        register_backend,
    )
    from kfac_core.array.precision import Precision
    from kfac_core.array.selection import (
        Selection,
        asarray,
        enable_float64,
        selected_backend,
        set_default_backend,
        to_numpy,
        use_backend,
    )
    from kfac_core.array.status import Status
    from kfac_core.array.structure import map_structure, replaced, structure
    from kfac_core.block import Block
    from kfac_core.checkpoint.reading import load_checkpoint, read_header
    from kfac_core.checkpoint.writing import save_checkpoint
    from kfac_core.conventions import Conventions
    from kfac_core.damping import factored_shifts, levenberg_marquardt
    from kfac_core.errors import (
        BackendUnavailableError,
        ConventionError,
        DampingError,
        DecayError,
        DtypeError,
        FactorizationError,
        IdRangeError,
        KFACError,
        MixedArraysError,
        NotFiniteError,
        NotReadyError,
        RecordError,
        ShapeError,
        StateError,
        UnknownBackendError,
        UnknownBlockError,
        UnsupportedError,
    )
    from kfac_core.estimator import Estimator
    from kfac_core.execution.background import BackgroundRefresh
    from kfac_core.execution.costs import BlockCosts, CostTable, Rates
    from kfac_core.factors.average import Average
    from kfac_core.factors.damped import DampedFactor, damped_factor
    from kfac_core.factors.statistics import Statistics
    from kfac_core.influence.damping import mean_eigenvalue_damping
    from kfac_core.influence.network import Influence
    from kfac_core.influence.queries import Queries
    from kfac_core.integration.framework_conv import framework_conv
    from kfac_core.integration.layer_calls import LayerCall, batches_of_calls
    from kfac_core.integration.natural_gradient import NaturalGradient
    from kfac_core.integration.wiring import (
        Captured,
        Recorder,
        Wiring,
        usual_approximation,
    )
    from kfac_core.layers.chain import Chain
    from kfac_core.layers.conv import Conv
    from kfac_core.layers.dense import Dense
    from kfac_core.layers.embedding import Embedding
    from kfac_core.layers.example_gradients import GradientBatch
    from kfac_core.layers.layer import Layer
    from kfac_core.layers.parameters import Parameters
    from kfac_core.layers.rows import Batch
    from kfac_core.layers.scale_shift import ScaleShift
    from kfac_core.layers.time import steps_of, unfold_time
    from kfac_core.linalg.gram import gram
    from kfac_core.linalg.kronecker import kronecker_dense, kronecker_multiply
    from kfac_core.linalg.patches import choose_patches
    from kfac_core.network import BlockState, Network, NetworkState
    from kfac_core.operators.dense import DenseOperator
    from kfac_core.operators.example_gram import (
        ExampleGramOperator,
    )
    from kfac_core.operators.kronecker import FactoredKronecker
    from kfac_core.operators.low_rank import LowRankOperator
    from kfac_core.operators.operator import CurvatureOperator
    from kfac_core.operators.sparse_rows import SparseRows
    from kfac_core.operators.spectral import SpectralOperator
    from kfac_core.operators.tridiagonal import TridiagonalOperator
    from kfac_core.options import Averaging, Execution, Refreshing, Sharing
    from kfac_core.posterior.block import BlockPosterior, block_posterior
    from kfac_core.posterior.evidence import Evidence
    from kfac_core.posterior.network import Posterior
    from kfac_core.posterior.spectra import spectral_blocks
    from kfac_core.report import BlockReport, FactorReport
    from kfac_core.roots.factor_root import FactorRoot, factor_root
    from kfac_core.roots.gradient_side import GradientFactors
    from kfac_core.roots.inverse_free import (
        ikfac_updated,
        precondition_by_roots,
    )
    from kfac_core.roots.orthogonal_iteration import (
        OrderedBasis,
        ordered_basis,
        refreshed_basis,
    )
    from kfac_core.roots.roots import InverseRoot, inverse_root

__version__ = "0.1.0"

__all__ = [
    "Approximation",
    "Average",
    "Backend",
    "BackendUnavailableError",
    "BackgroundRefresh",
    "Batch",
    "Block",
    "BlockCosts",
    "BlockPosterior",
    "BlockReport",
    "BlockState",
    "BlockTridiagonal",
    "Captured",
    "Chain",
    "Conv",
    "ConventionError",
    "Conventions",
    "CostTable",
    "CurvatureOperator",
    "DampedFactor",
    "DampingError",
    "DecayError",
    "Dense",
    "DenseOperator",
    "Diagonal",
    "DtypeError",
    "Eigen",
    "Embedding",
    "Estimator",
    "Eva",
    "Evidence",
    "ExampleGram",
    "ExampleGramOperator",
    "FactorReport",
    "FactorRoot",
    "FactoredKronecker",
    "FactorizationError",
    "Full",
    "GradientBatch",
    "GradientFactors",
    "IdRangeError",
    "Influence",
    "InverseRoot",
    "KFACError",
    "KFOC",
    "Kronecker",
    "Layer",
    "LayerCall",
    "LowRankKronecker",
    "LowRankOperator",
    "MixedArraysError",
    "NaturalGradient",
    "Sharing",
    "Refreshing",
    "Execution",
    "Averaging",
    "NetworkState",
    "Network",
    "NotFiniteError",
    "NotReadyError",
    "OrderedBasis",
    "Parameters",
    "Posterior",
    "Precision",
    "Queries",
    "Rates",
    "RecordError",
    "Recorder",
    "ScaleShift",
    "ScaledIdentity",
    "Selection",
    "Series",
    "ShapeError",
    "SparseRows",
    "SpectralOperator",
    "StateError",
    "Statistics",
    "Status",
    "TNT",
    "TridiagonalOperator",
    "UnknownBackendError",
    "UnknownBlockError",
    "UnsupportedError",
    "Wiring",
    "asarray",
    "backend_names",
    "batches_of_calls",
    "block_posterior",
    "choose_patches",
    "damped_factor",
    "enable_float64",
    "factor_root",
    "factored_shifts",
    "framework_conv",
    "get_backend",
    "gram",
    "ikfac_updated",
    "inverse_root",
    "kronecker_dense",
    "kronecker_multiply",
    "levenberg_marquardt",
    "load_checkpoint",
    "map_structure",
    "mean_eigenvalue_damping",
    "ordered_basis",
    "precondition_by_roots",
    "read_header",
    "refreshed_basis",
    "register_backend",
    "replaced",
    "save_checkpoint",
    "selected_backend",
    "set_default_backend",
    "spectral_blocks",
    "steps_of",
    "structure",
    "to_numpy",
    "unfold_time",
    "use_backend",
    "usual_approximation",
]

_HOMES = {
    "Approximation": "kfac_core.approximations.approximation",
    "Average": "kfac_core.factors.average",
    "Backend": "kfac_core.array.backend",
    "BackendUnavailableError": "kfac_core.errors",
    "BackgroundRefresh": "kfac_core.execution.background",
    "Batch": "kfac_core.layers.rows",
    "Block": "kfac_core.block",
    "BlockCosts": "kfac_core.execution.costs",
    "BlockPosterior": "kfac_core.posterior.block",
    "BlockReport": "kfac_core.report",
    "BlockState": "kfac_core.network",
    "BlockTridiagonal": "kfac_core.approximations.tridiagonal",
    "Captured": "kfac_core.integration.wiring",
    "Chain": "kfac_core.layers.chain",
    "Conv": "kfac_core.layers.conv",
    "ConventionError": "kfac_core.errors",
    "Conventions": "kfac_core.conventions",
    "CostTable": "kfac_core.execution.costs",
    "CurvatureOperator": "kfac_core.operators.operator",
    "DampedFactor": "kfac_core.factors.damped",
    "DampingError": "kfac_core.errors",
    "DecayError": "kfac_core.errors",
    "Dense": "kfac_core.layers.dense",
    "DenseOperator": "kfac_core.operators.dense",
    "Diagonal": "kfac_core.approximations.second_moment",
    "DtypeError": "kfac_core.errors",
    "Eigen": "kfac_core.approximations.eigen",
    "Embedding": "kfac_core.layers.embedding",
    "Estimator": "kfac_core.estimator",
    "Eva": "kfac_core.approximations.eva",
    "Evidence": "kfac_core.posterior.evidence",
    "ExampleGram": "kfac_core.approximations.example_gram",
    "ExampleGramOperator": "kfac_core.operators.example_gram",
    "FactorReport": "kfac_core.report",
    "FactorRoot": "kfac_core.roots.factor_root",
    "FactoredKronecker": "kfac_core.operators.kronecker",
    "FactorizationError": "kfac_core.errors",
    "Full": "kfac_core.approximations.second_moment",
    "GradientBatch": "kfac_core.layers.example_gradients",
    "GradientFactors": "kfac_core.roots.gradient_side",
    "IdRangeError": "kfac_core.errors",
    "Influence": "kfac_core.influence.network",
    "InverseRoot": "kfac_core.roots.roots",
    "KFACError": "kfac_core.errors",
    "KFOC": "kfac_core.approximations.kfoc",
    "Kronecker": "kfac_core.approximations.kronecker",
    "Layer": "kfac_core.layers.layer",
    "LayerCall": "kfac_core.integration.layer_calls",
    "LowRankKronecker": "kfac_core.approximations.low_rank",
    "LowRankOperator": "kfac_core.operators.low_rank",
    "MixedArraysError": "kfac_core.errors",
    "Network": "kfac_core.network",
    "NetworkState": "kfac_core.network",
    "Averaging": "kfac_core.options",
    "Execution": "kfac_core.options",
    "Refreshing": "kfac_core.options",
    "Sharing": "kfac_core.options",
    "NaturalGradient": "kfac_core.integration.natural_gradient",
    "NotFiniteError": "kfac_core.errors",
    "NotReadyError": "kfac_core.errors",
    "OrderedBasis": "kfac_core.roots.orthogonal_iteration",
    "Parameters": "kfac_core.layers.parameters",
    "Posterior": "kfac_core.posterior.network",
    "Precision": "kfac_core.array.precision",
    "Queries": "kfac_core.influence.queries",
    "Rates": "kfac_core.execution.costs",
    "RecordError": "kfac_core.errors",
    "Recorder": "kfac_core.integration.wiring",
    "ScaleShift": "kfac_core.layers.scale_shift",
    "ScaledIdentity": "kfac_core.approximations.scaled_identity",
    "Selection": "kfac_core.array.selection",
    "Series": "kfac_core.approximations.series",
    "ShapeError": "kfac_core.errors",
    "SparseRows": "kfac_core.operators.sparse_rows",
    "SpectralOperator": "kfac_core.operators.spectral",
    "StateError": "kfac_core.errors",
    "Statistics": "kfac_core.factors.statistics",
    "Status": "kfac_core.array.status",
    "TNT": "kfac_core.approximations.tnt",
    "TridiagonalOperator": "kfac_core.operators.tridiagonal",
    "UnknownBackendError": "kfac_core.errors",
    "UnknownBlockError": "kfac_core.errors",
    "UnsupportedError": "kfac_core.errors",
    "Wiring": "kfac_core.integration.wiring",
    "asarray": "kfac_core.array.selection",
    "backend_names": "kfac_core.array.backend",
    "batches_of_calls": "kfac_core.integration.layer_calls",
    "block_posterior": "kfac_core.posterior.block",
    "choose_patches": "kfac_core.linalg.patches",
    "damped_factor": "kfac_core.factors.damped",
    "enable_float64": "kfac_core.array.selection",
    "factor_root": "kfac_core.roots.factor_root",
    "factored_shifts": "kfac_core.damping",
    "framework_conv": "kfac_core.integration.framework_conv",
    "get_backend": "kfac_core.array.backend",
    "gram": "kfac_core.linalg.gram",
    "ikfac_updated": "kfac_core.roots.inverse_free",
    "inverse_root": "kfac_core.roots.roots",
    "kronecker_dense": "kfac_core.linalg.kronecker",
    "kronecker_multiply": "kfac_core.linalg.kronecker",
    "levenberg_marquardt": "kfac_core.damping",
    "load_checkpoint": "kfac_core.checkpoint.reading",
    "map_structure": "kfac_core.array.structure",
    "mean_eigenvalue_damping": "kfac_core.influence.damping",
    "ordered_basis": "kfac_core.roots.orthogonal_iteration",
    "precondition_by_roots": "kfac_core.roots.inverse_free",
    "read_header": "kfac_core.checkpoint.reading",
    "refreshed_basis": "kfac_core.roots.orthogonal_iteration",
    "register_backend": "kfac_core.array.backend",
    "replaced": "kfac_core.array.structure",
    "save_checkpoint": "kfac_core.checkpoint.writing",
    "selected_backend": "kfac_core.array.selection",
    "set_default_backend": "kfac_core.array.selection",
    "spectral_blocks": "kfac_core.posterior.spectra",
    "steps_of": "kfac_core.layers.time",
    "structure": "kfac_core.array.structure",
    "to_numpy": "kfac_core.array.selection",
    "unfold_time": "kfac_core.layers.time",
    "use_backend": "kfac_core.array.selection",
    "usual_approximation": "kfac_core.integration.wiring",
}
"""Where each public name is defined; a test holds it equal to the imports above."""

_PACKAGES = (
    *("approximations", "array", "factors", "layers", "linalg", "losses", "operators"),
    "steps",
)
"""The public packages with names of their own."""


def __getattr__(name: str) -> Any:
    """Import a public name, or package, at its first use."""
    if name in _HOMES:
        found = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in _PACKAGES:
        found = importlib.import_module(f"kfac_core.{name}")
    else:
        raise AttributeError(f"module 'kfac_core' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
