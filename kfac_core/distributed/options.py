"""Options of an estimator whose blocks are divided among processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kfac_core import constraints, errors
from kfac_core.array import Array
from kfac_core.distributed.communicator import Communicator
from kfac_core.distributed.placement import divisors
from kfac_core.options import Execution

LossScale = Literal["shard", "batch", "ddp"]
"""What each process's output gradients are gradients of; see `Distributed`."""

MessageDtype = Literal["float32", "float64"]
"""Dtypes of messages with operators."""

DirectionDtype = Literal["bfloat16", "float32", "float64"]
"""Dtypes of messages with directions."""


@dataclass(frozen=True, kw_only=True)
class Distributed:
    """How an estimator divides its work among processes.

    ``Estimator(..., execution=Distributed(communicator=c))`` then gives, on every rank, the
    results of one process with the rows of all ranks.  Every rank makes the estimator with
    the same options and calls the same methods in the same order, with its own part of each
    batch; a rank without rows gives ``{}``.  `Estimator.precondition` takes the gradient of
    the whole batch, the same on all ranks.

    Parameters
    ----------
    communicator : Communicator
        Communicator of all ranks, such as from `kfac_core.distributed.connect`.
    holders : int or {"auto", "all"}
        How many ranks hold each operator, a divisor g of the number of ranks p.  With 1 a
        block's owner sends directions at every step: least memory.  With ``"all"`` every
        rank gets every operator at a refresh: least talk where refreshes are rare.
        ``"auto"`` weighs bytes against flops, for refreshes every `interval` steps; see
        `kfac_core.distributed.choose_placement`.
    interval : int
        Steps between refreshes, by which ``holders="auto"`` decides, and whether ranks
        without blocks compute directions of large ones; see
        `kfac_core.distributed.place`.
    reduce : {"refresh", "owner"}
        Where statistics are, and when they are added up.  With ``"refresh"`` every rank
        keeps those of its own rows, and they are added up at the owners at a refresh: least
        talk.  With ``"owner"`` the sums of each update go to the owners, which alone keep
        them, packed: least memory, about 1 / p of all statistics on each of p ranks.
    loss : {"shard", "batch", "ddp"}
        Loss whose gradients are given, if the estimator's reduction is a mean: the
        mean over this rank's rows; this rank's part of the mean over all rows; or p times
        that, so that the mean of gradients over ranks is the gradient of the whole batch.
        The last two cost one more exchange an update.
    operators_dtype : {"float32", "float64"}, optional
        Dtype in which operators and bases are sent, where it is narrower than their own.
    directions_dtype : {"bfloat16", "float32", "float64"}, optional
        Dtype in which directions and all products of `Estimator.apply` are sent;
        ``"bfloat16"`` for libraries that have it, with `torch.distributed`.
    bucket_bytes : int
        Size from which a message is sent among up to 8 ranks, while the rest of the sums is
        packed, or the rest of the directions computed.  Among more ranks it is larger in
        proportion, up to 256 MB.
    memory : int, optional
        How many numbers of statistics and operators an owner has room for.
    like : array, optional
        Array of the library, device and dtype of the batches.  Needed on a rank whose
        first update has no rows at all.
    execution : Execution
        How each rank runs its own blocks.

    Raises
    ------
    ConventionError
        For an option out of range.

    Notes
    -----
    For an n x n and an m x m factor ``n (n + 1) / 2 + m (m + 1) / 2`` numbers are sent at
    a refresh, to one rank.  An update keeps the sums of one batch beside the running sums
    until the ranks have agreed, and copies both once; with ``reduce="owner"`` it keeps
    those of one message, and sends as many numbers as a refresh otherwise does.

    The bases of EKFAC are on all ranks, or with ``reduce="owner"`` on the block's owner
    alone, which at each update sends its eigenvectors, ``n^2 + m^2`` numbers, to all ranks;
    these square the gradients of their rows in them, and free them after each message.

    Statistics are sent in the dtype that they are stored in, see `kfac_core.Precision`, so
    that eigenvalues below its roundoff are known as such.

    The rank that sends operators, bases or directions in a narrower dtype rounds its own
    copy too, so that all ranks have the same to the bit.  What is not sent is not rounded.
    The residual of a factor is that of its factorization, before it was sent.  States are
    gathered in full precision.
    """

    communicator: Communicator
    holders: int | Literal["auto", "all"] = "auto"
    interval: int = 10
    reduce: Literal["refresh", "owner"] = "refresh"
    loss: LossScale = "shard"
    operators_dtype: MessageDtype | None = None
    directions_dtype: DirectionDtype | None = None
    bucket_bytes: int = 25 * 2**20
    memory: int | None = None
    like: Array = None
    execution: Execution = field(default_factory=Execution)

    def __post_init__(self) -> None:
        constraints.require_options(
            self,
            communicator=constraints.implementation_of(Communicator),
            interval=constraints.COUNT,
            reduce=constraints.one_of("refresh", "owner"),
            loss=constraints.literal(LossScale),
            operators_dtype=constraints.optional(constraints.literal(MessageDtype)),
            directions_dtype=constraints.optional(constraints.literal(DirectionDtype)),
            bucket_bytes=constraints.COUNT,
            memory=constraints.optional(constraints.COUNT),
            execution=constraints.instance_of(Execution),
        )
        possible = divisors(self.communicator.size)
        if self.holders not in ("auto", "all", *possible):
            raise errors.ConventionError(
                "Expected `holders` to be 'auto', 'all' or one of "
                f"{possible}, the divisors of the number of ranks, got {self.holders!r}."
            )
