"""More than one process: communicators, reduction of statistics, ownership of blocks."""

from kfac_core.distributed.agreement import Agreement
from kfac_core.distributed.communicator import (
    Communicator,
    Handle,
    Traffic,
    communicator_names,
    connect,
    engine,
)
from kfac_core.distributed.executor import DistributedExecutor
from kfac_core.distributed.options import Distributed
from kfac_core.distributed.placement import (
    BlockLoad,
    Placement,
    block_loads,
    choose_placement,
    place,
)
from kfac_core.distributed.remote import RemoteOperator
from kfac_core.distributed.running import execution_for, running_processes
from kfac_core.distributed.traced import SummedOver
from kfac_core.distributed.virtual import run_ranks
from kfac_core.errors import (
    CommunicationError,
    CommunicationTimeoutError,
    ReplicaError,
)

__all__ = [
    "Agreement",
    "BlockLoad",
    "CommunicationError",
    "CommunicationTimeoutError",
    "Communicator",
    "Distributed",
    "DistributedExecutor",
    "Handle",
    "Placement",
    "RemoteOperator",
    "ReplicaError",
    "SummedOver",
    "Traffic",
    "block_loads",
    "choose_placement",
    "communicator_names",
    "connect",
    "engine",
    "execution_for",
    "place",
    "run_ranks",
    "running_processes",
]
