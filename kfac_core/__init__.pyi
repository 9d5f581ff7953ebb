"""The public names of `kfac_core`: what `__init__.py` loads, and type checkers read."""

from . import (
    approximations as approximations,
)
from . import (
    array as array,
)
from . import (
    checkpoint as checkpoint,
)
from . import (
    constraints as constraints,
)
from . import (
    damping as damping,
)
from . import (
    distributed as distributed,
)
from . import (
    errors as errors,
)
from . import (
    execution as execution,
)
from . import (
    factors as factors,
)
from . import (
    influence as influence,
)
from . import (
    integration as integration,
)
from . import (
    layers as layers,
)
from . import (
    linalg as linalg,
)
from . import (
    losses as losses,
)
from . import (
    operators as operators,
)
from . import (
    posterior as posterior,
)
from . import (
    report as report,
)
from . import (
    roots as roots,
)
from . import (
    samples as samples,
)
from . import (
    steps as steps,
)
from .approximations.approximation import Approximation as Approximation
from .approximations.ekfac import EKFAC as EKFAC
from .approximations.kronecker import Kronecker as Kronecker
from .approximations.options import (
    RefreshOptions as RefreshOptions,
)
from .approximations.options import (
    UpdateOptions as UpdateOptions,
)
from .approximations.scaled_identity import ScaledIdentity as ScaledIdentity
from .approximations.second_moment import (
    Diagonal as Diagonal,
)
from .approximations.second_moment import (
    Full as Full,
)
from .approximations.series import Series as Series
from .approximations.tnt import TNT as TNT
from .approximations.tridiagonal import BlockTridiagonal as BlockTridiagonal
from .array.backend import (
    backend_names as backend_names,
)
from .array.backend import (
    register_backend as register_backend,
)
from .array.precision import Precision as Precision
from .array.selection import (
    asarray as asarray,
)
from .array.selection import (
    enable_float64 as enable_float64,
)
from .array.selection import (
    to_numpy as to_numpy,
)
from .array.selection import (
    use_backend as use_backend,
)
from .array.status import Status as Status
from .array.structure import structure as structure
from .block import Block as Block
from .checkpoint.reading import (
    load_checkpoint as load_checkpoint,
)
from .checkpoint.reading import (
    read_header as read_header,
)
from .checkpoint.writing import save_checkpoint as save_checkpoint
from .conventions import Conventions as Conventions
from .damping import levenberg_marquardt as levenberg_marquardt
from .errors import (
    ArgumentError as ArgumentError,
)
from .errors import (
    BackendUnavailableError as BackendUnavailableError,
)
from .errors import (
    ConcurrentChangeError as ConcurrentChangeError,
)
from .errors import (
    ConventionError as ConventionError,
)
from .errors import (
    DampingError as DampingError,
)
from .errors import (
    DecayError as DecayError,
)
from .errors import (
    DtypeError as DtypeError,
)
from .errors import (
    FactorizationError as FactorizationError,
)
from .errors import (
    IdRangeError as IdRangeError,
)
from .errors import (
    KFACError as KFACError,
)
from .errors import (
    MixedArraysError as MixedArraysError,
)
from .errors import (
    NotFiniteError as NotFiniteError,
)
from .errors import (
    NotReadyError as NotReadyError,
)
from .errors import (
    RecordError as RecordError,
)
from .errors import (
    ShapeError as ShapeError,
)
from .errors import (
    StateError as StateError,
)
from .errors import (
    UnknownBackendError as UnknownBackendError,
)
from .errors import (
    UnknownBlockError as UnknownBlockError,
)
from .errors import (
    UnsupportedError as UnsupportedError,
)
from .estimator import Estimator as Estimator
from .factors.statistics import Statistics as Statistics
from .influence.network import Influence as Influence
from .layers.chain import Chain as Chain
from .layers.conv import Conv as Conv
from .layers.dense import Dense as Dense
from .layers.embedding import Embedding as Embedding
from .layers.example_gradients import GradientBatch as GradientBatch
from .layers.layer import Layer as Layer
from .layers.parameters import Parameters as Parameters
from .layers.rows import Batch as Batch
from .layers.scale_shift import ScaleShift as ScaleShift
from .linalg.gram import gram as gram
from .network import Network as Network
from .operators.operator import CurvatureOperator as CurvatureOperator
from .options import (
    Averaging as Averaging,
)
from .options import (
    Coupling as Coupling,
)
from .options import (
    Execution as Execution,
)
from .options import (
    Refreshing as Refreshing,
)
from .posterior.network import Posterior as Posterior

__version__: str
from .stages import (
    absorb_block as absorb_block,
)
from .stages import (
    batch_moments as batch_moments,
)
from .stages import (
    operator_of as operator_of,
)
from .stages import (
    rebase_block as rebase_block,
)
from .stages import (
    update_block as update_block,
)
from .state import (
    BlockState as BlockState,
)
from .state import (
    NetworkState as NetworkState,
)

__all__ = [
    "Approximation",
    "ArgumentError",
    "Averaging",
    "BackendUnavailableError",
    "Batch",
    "Block",
    "BlockState",
    "BlockTridiagonal",
    "Chain",
    "Conv",
    "ConcurrentChangeError",
    "ConventionError",
    "Conventions",
    "Coupling",
    "CurvatureOperator",
    "DampingError",
    "DecayError",
    "Dense",
    "Diagonal",
    "DtypeError",
    "EKFAC",
    "Embedding",
    "Estimator",
    "Execution",
    "FactorizationError",
    "Full",
    "GradientBatch",
    "IdRangeError",
    "Influence",
    "KFACError",
    "Kronecker",
    "Layer",
    "MixedArraysError",
    "Network",
    "NetworkState",
    "NotFiniteError",
    "NotReadyError",
    "Parameters",
    "Posterior",
    "Precision",
    "RecordError",
    "RefreshOptions",
    "Refreshing",
    "ScaleShift",
    "ScaledIdentity",
    "Series",
    "ShapeError",
    "StateError",
    "Statistics",
    "Status",
    "TNT",
    "UnknownBackendError",
    "UnknownBlockError",
    "UpdateOptions",
    "UnsupportedError",
    "absorb_block",
    "asarray",
    "batch_moments",
    "backend_names",
    "enable_float64",
    "gram",
    "levenberg_marquardt",
    "load_checkpoint",
    "read_header",
    "register_backend",
    "save_checkpoint",
    "structure",
    "to_numpy",
    "use_backend",
    "operator_of",
    "rebase_block",
    "update_block",
]
