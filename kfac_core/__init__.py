"""Kronecker-factored curvature, for every array library.

A framework feeds layer inputs and output gradients; this library gives back products of
the curvature with vectors.  A `Block` is a layer (`Dense`) and an approximation
(`Kronecker`); an `Estimator` holds the blocks of one network.  Arrays decide which
library computes, through the Python Array API; `kfac_core.selection` says which one
serves where no array is there to decide.
"""

from kfac_core.approximations.approximation import Approximation
from kfac_core.approximations.eigen import Eigen
from kfac_core.approximations.kfoc import KFOC
from kfac_core.approximations.kronecker import Kronecker
from kfac_core.approximations.scaled_identity import ScaledIdentity
from kfac_core.approximations.second_moment import Diagonal, Full
from kfac_core.approximations.series import Series
from kfac_core.approximations.tnt import TNT
from kfac_core.backend import Backend, backend_names, get_backend, register_backend
from kfac_core.background import BackgroundRefresh
from kfac_core.block import Block
from kfac_core.block_state import BlockState
from kfac_core.blocks.exact_kronecker import ExactKronecker
from kfac_core.blocks.flat import FlatOperator
from kfac_core.blocks.kronecker import FactoredKronecker
from kfac_core.blocks.operator import CurvatureOperator
from kfac_core.blocks.sparse_rows import SparseRows
from kfac_core.chain.operator import TridiagonalOperator
from kfac_core.chain.statistics import ChainStatistics
from kfac_core.chain.tridiagonal import BlockTridiagonal
from kfac_core.conventions import Conventions
from kfac_core.costs import BlockCosts, CostTable, Rates
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
from kfac_core.factors.average import Average, paper_decay
from kfac_core.factors.damped import DampedFactor, damped_factor
from kfac_core.factors.gradient_side import GradientFactors
from kfac_core.factors.statistics import Statistics
from kfac_core.layers.conv import Conv
from kfac_core.layers.dense import Dense
from kfac_core.layers.embedding import Embedding
from kfac_core.layers.example_gradients import GradientBatch
from kfac_core.layers.layer import Layer
from kfac_core.layers.parameters import Parameters
from kfac_core.layers.rows import Batch
from kfac_core.layers.scale_shift import ScaleShift
from kfac_core.layers.time import steps_of, unfold_time
from kfac_core.linalg.certified_root import InverseRoot
from kfac_core.linalg.gram import gram
from kfac_core.linalg.kronecker import kronecker_dense, kronecker_multiply
from kfac_core.linalg.kronecker_sum import KroneckerSum, kronecker_sum
from kfac_core.linalg.newton_roots import newton_inverse_root
from kfac_core.linalg.newton_schulz import WarmInverse, refreshed_inverse
from kfac_core.linalg.orthogonal_iteration import (
    OrderedBasis,
    off_diagonal_ratio,
    ordered_basis,
    refreshed_basis,
)
from kfac_core.linalg.patches import choose_patches
from kfac_core.linalg.roots import inverse_root
from kfac_core.precision import Precision
from kfac_core.report import BlockReport, FactorReport
from kfac_core.selection import (
    Selection,
    asarray,
    enable_float64,
    selected_backend,
    set_default_backend,
    to_numpy,
    use_backend,
)
from kfac_core.status import Status

__version__ = "0.1.0"

__all__ = [
    "Approximation",
    "Average",
    "BackgroundRefresh",
    "Backend",
    "BackendUnavailableError",
    "Batch",
    "Block",
    "BlockCosts",
    "BlockReport",
    "BlockState",
    "BlockTridiagonal",
    "ChainStatistics",
    "Conv",
    "ConventionError",
    "Conventions",
    "CostTable",
    "CurvatureOperator",
    "DampedFactor",
    "DampingError",
    "DecayError",
    "Dense",
    "Diagonal",
    "DtypeError",
    "Eigen",
    "Embedding",
    "Estimator",
    "ExactKronecker",
    "FactoredKronecker",
    "FactorReport",
    "FactorizationError",
    "FlatOperator",
    "Full",
    "GradientBatch",
    "GradientFactors",
    "IdRangeError",
    "InverseRoot",
    "KFACError",
    "KFOC",
    "Kronecker",
    "KroneckerSum",
    "Layer",
    "MixedArraysError",
    "NotFiniteError",
    "NotReadyError",
    "OrderedBasis",
    "Parameters",
    "Precision",
    "Rates",
    "RecordError",
    "ScaleShift",
    "ScaledIdentity",
    "Selection",
    "Series",
    "ShapeError",
    "SparseRows",
    "StateError",
    "Statistics",
    "Status",
    "TNT",
    "TridiagonalOperator",
    "UnknownBackendError",
    "UnknownBlockError",
    "UnsupportedError",
    "WarmInverse",
    "asarray",
    "backend_names",
    "enable_float64",
    "choose_patches",
    "damped_factor",
    "factored_shifts",
    "get_backend",
    "gram",
    "inverse_root",
    "kronecker_dense",
    "kronecker_multiply",
    "kronecker_sum",
    "levenberg_marquardt",
    "newton_inverse_root",
    "off_diagonal_ratio",
    "ordered_basis",
    "paper_decay",
    "refreshed_basis",
    "refreshed_inverse",
    "register_backend",
    "selected_backend",
    "set_default_backend",
    "steps_of",
    "to_numpy",
    "unfold_time",
    "use_backend",
]
