"""Products with vectors, which the holders of a block compute for the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kfac_core.array import Array
from kfac_core.array import namespaces as ns
from kfac_core.block import Block
from kfac_core.distributed import agreement, placement, remote
from kfac_core.distributed.exchange import SentDirections
from kfac_core.distributed.partition import Partition
from kfac_core.layers.feeding import detached_array
from kfac_core.stages import APPLY, Stage, Tasks


def product(
    partition: Partition, stage: Stage[dict[str, Array]], tasks: Tasks, /
) -> dict[str, dict[str, Array]]:
    """Return products of blocks' operators with vectors, on every rank."""
    # Every rank holds every operator: no message, and no vote, in a step.
    if partition.placement.holders == partition.communicator.size:
        return partition.inner(stage, tasks)
    vectors = {name: task[2] for name, task in tasks.items()}
    calls = sorted({task[3].product for task in tasks.values()})
    partition.agreement.meet(f"{calls} of {sorted(vectors)}")
    matrices: dict[str, Array] = {}
    ranges: dict[str, placement.RowRange] = {}
    if calls == ["multiply_inverse"]:
        for name, (block, operator, vector, _) in tasks.items():
            if partition.divides(name, operator):
                matrices[name] = _as_matrix(block, vector)
                # Rows of a direction are one task a rank, which messages treat like
                # a block.
                ranges |= partition.placement.row_ranges[name]
    for key, rows in ranges.items():
        of_rank = matrices[rows.block][..., rows.start : rows.stop, :]
        vectors[key] = {"rows": of_rank}
    computed: dict[str, Any] = {}
    error: Exception | None = None
    started = []
    for names in partition.placement.messages(tasks, partition.message_bytes, matrices):
        sent_here = names[partition.group_number]
        local = {n: tasks[n] for n in sent_here if n not in ranges}
        local_rows = {}
        for key in set(sent_here) & ranges.keys():
            name = ranges[key].block
            local_rows[key] = *tasks[name][:2], matrices[name], ranges[key]
        for run, run_tasks in ((stage, local), (_ROWS, local_rows)):
            if error is None:
                directions, error = partition.attempt(run, run_tasks)
                computed |= directions
        # Start each message before the next blocks are computed, so that both
        # overlap.
        started.append(
            SentDirections(
                *(partition.row, names, vectors, computed),
                failed=error is not None,
                dtype=partition.options.directions_dtype,
            )
        )
    arrived = [sent.wait() for sent in started]
    received = {name: x for directions, _ in arrived for name, x in directions.items()}
    # Only the ranks of this row know of the failure; each row votes alike.
    if any(failed for _, failed in arrived):
        agreement.Agreement(partition.row).vote("product", error=error)
    for name in matrices:
        parts = [received[key]["rows"] for key in partition.placement.row_ranges[name]]
        received[name] = _as_parameters(tasks[name][0], parts)
    if partition.options.directions_dtype is not None:
        # What this rank sent, rounded as the others have it.
        return {name: received[name] for name in tasks}
    return {name: computed.get(name) or received[name] for name in tasks}


def _rows_of_direction(
    block: Block,
    operator: remote.RemoteOperator,
    matrix: Array,
    rows: placement.RowRange,
    /,
    *,
    name: str,
) -> dict[str, Array]:
    """Return the rows of a direction that this rank computes."""
    return {"rows": operator.direction_rows(matrix, rows.start, rows.stop)}


_ROWS = Stage("rows", _rows_of_direction, 2, APPLY.work)


def _as_matrix(block: Block, vector: Mapping[str, Array]) -> Array:
    arrays = {key: detached_array(x) for key, x in vector.items()}
    return remote.larger_first(block.layer.parameters_to_matrix(arrays))


def _as_parameters(block: Block, parts: Sequence[Array]) -> dict[str, Array]:
    """Return a direction of the rows of its matrix, or of the transpose."""
    xp = ns.own_namespace(parts[0])
    matrix = xp.concat(parts, axis=-2)
    n, m = block.layer.matrix_shape
    if n < m:
        matrix = xp.matrix_transpose(matrix)
    return block.layer.matrix_to_parameters(matrix)
