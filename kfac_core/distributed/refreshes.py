"""Operators and bases, which owners make and send to those who need them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kfac_core.approximations.options import RefreshOptions
from kfac_core.array import Array, replaced
from kfac_core.array import namespaces as ns
from kfac_core.distributed import agreement, reduction, remote, transport
from kfac_core.distributed.partition import Partition
from kfac_core.errors import KFACError
from kfac_core.factors.statistics import Statistics
from kfac_core.operators.operator import CurvatureOperator
from kfac_core.stages import Refreshed, Stage, Tasks


def refresh(
    partition: Partition, stage: Stage[Refreshed], tasks: Tasks, /
) -> dict[str, Refreshed]:
    """Return operators and dampings of blocks, which their owners compute."""
    names = list(tasks)
    local = {name: task[1] for name, task in tasks.items()}
    dampings = {task[2].damping for task in tasks.values()}
    # Traced dampings cannot be compared.
    dampings = {damping for damping in dampings if type(damping) is float}
    step = f"refresh {names} with {sorted(dampings)}"
    sums = reduction.sums_of_owned(partition, step, local)
    owned = {name: (tasks[name][0], sums[name], *tasks[name][2:]) for name in sums}
    refreshed, error = partition.attempt(stage, owned)
    like = local[names[0]].like
    operators = {n: r[0] for n, r in refreshed.items() if not isinstance(r, KFACError)}
    requested = [task[2] for task in tasks.values()]
    among_all = partition.placement.holders == partition.communicator.size
    follow = partition.communicator.votes.directions_follow
    # No vote where the next message tells of failures: without an operator in it all
    # ranks know, and a holder without one refuses the directions that follow.
    votes_first = not (among_all or follow) or any(
        type(options.damping) is not float or options.damping_scaling != "none"
        for options in requested
    )
    outcomes: dict[str, Any] = {}
    if votes_first:
        outcomes = _outcomes(partition, names, refreshed, error)
    elif not among_all:
        # Flags have to be known everywhere, as failures have.
        operators = {n: x for n, x in operators.items() if not int(x.status())}
    divided = [
        name
        for name in partition.placement.workers
        if name in tasks
        and not isinstance(outcomes.get(name), KFACError)
        and _inverts(tasks[name][2])
    ]
    rows = sent_rows(partition, divided, operators, like)
    if partition.placement.holders > 1:
        operators = partition.to_group(
            operators, like, dtype=partition.options.operators_dtype
        )
    if among_all and not votes_first and len(operators) < len(names):
        outcomes = _outcomes(partition, names, refreshed, error)
    results: dict[str, Any] = {}
    for name, options in zip(names, requested, strict=True):
        outcome = outcomes.get(name, (0, options.damping))
        if isinstance(outcome, KFACError):
            results[name] = outcome
            continue
        status, damping = outcome
        operator = operators.get(name)
        if operator is None:
            operator = partition.remote(name, like, status, name in divided, rows)
            operator = replaced(operator, has_failed=partition.holds(name))
        results[name] = operator, damping
    return results


def _outcomes(
    partition: Partition,
    names: Sequence[str],
    refreshed: Mapping[str, Any],
    error: Exception | None,
) -> dict[str, Any]:
    """Return each block's status and damping, or its error, on every rank."""
    failed = {n: r for n, r in refreshed.items() if isinstance(r, KFACError)}
    # Whether it failed, its status and its damping, of each block by its owner.
    ballot = np.zeros((len(names), 3))
    for i, name in enumerate(names):
        if name in failed:
            ballot[i, 0] = 1
        elif name in refreshed:
            operator, damping = refreshed[name]
            ballot[i, 1:] = int(operator.status()), float(damping)
    total = partition.agreement.vote("refreshed", ballot.reshape(-1), error=error)
    errors = _errors(partition, failed) if total[::3].any() else {}
    return {
        name: errors.get(name, (int(status), damping))
        for name, (_, status, damping) in zip(
            names, total.reshape(-1, 3).tolist(), strict=True
        )
    }


def _errors(
    partition: Partition, failed: Mapping[str, KFACError]
) -> dict[str, KFACError]:
    """Return the errors of all ranks' blocks, on every rank."""
    data = {name: agreement.error_as_data(error) for name, error in failed.items()}
    # An exception may not be picklable; its class, factor and message are enough.
    texts = partition.agreement.texts(json.dumps(data))
    errors: dict[str, KFACError] = {}
    for rank, text in zip(partition.communicator.ranks, texts, strict=True):
        for name, error in json.loads(text).items():
            errors[name] = failed.get(name) or agreement.error_from_data(error, rank)
    return errors


def sent_rows(
    partition: Partition,
    names: Sequence[str],
    operators: Mapping[str, Any],
    like: Array,
) -> dict[str, remote.InverseRows]:
    """Send rows of inverses to the ranks that multiply with them; collective.

    Parameters
    ----------
    names : sequence of str
        Blocks with divided directions, in the order of their workers.
    operators : mapping of str to FactoredKronecker
        Operators of this rank's blocks.
    like : array
        Array in the dtype of the statistics.

    Returns
    -------
    dict of str to InverseRows
        This rank's share, of one block at most.
    """
    if not names:
        return {}
    rank, owners = partition.communicator.rank, partition.placement.owners
    xp = ns.own_namespace(like)
    dtype = partition.network.precision.dtypes(like.dtype, xp=xp)[1]
    # Only workers receive rows, each of one block: lengths are zero for most pairs.
    send, receive = [0] * partition.communicator.size, [0] * partition.communicator.size
    arrays: list[Array] = [xp.zeros((0,), dtype=dtype, device=ns.device_of(like))]
    for name in names:
        ranges = [*partition.placement.row_ranges[name].values()]
        if partition.owns(name):
            for rows in ranges:
                send[rows.rank] = rows.received
            if name not in operators:
                # A failure that the directions will tell of, which these are not for.
                total = sum(rows.received for rows in ranges)
                device = ns.device_of(like)
                arrays.append(xp.zeros((total,), dtype=dtype, device=device))
                continue
            for sent in remote.rows_of_inverses(operators[name], ranges):
                for x in (sent.rows, sent.other, sent.scale):
                    arrays.append(ns.cast(xp, xp.reshape(x, (-1,)), dtype))
        for rows in ranges:
            if rows.rank == rank:
                receive[owners[name]] = rows.received
    exchange = partition.communicator.all_to_all(xp.concat(arrays), send, receive)
    arrived, here = exchange.wait(), partition.rows_here
    if here is None or here.block not in names:
        return {}
    count = here.stop - here.start
    m = here.numbers // count
    # In the order in which the owner has sent them: rows, the other inverse, the scale.
    rows, other = arrived[: -m * m - 1], arrived[-m * m - 1 : -1]
    return {
        here.block: remote.InverseRows(
            xp.reshape(rows, (count, -1)), xp.reshape(other, (m, m)), arrived[-1]
        )
    }


def rebase(
    partition: Partition, stage: Stage[Statistics], tasks: Tasks, /
) -> dict[str, Statistics]:
    """Return statistics in new bases, which the blocks' owners compute."""
    names = list(tasks)
    local = {name: task[1] for name, task in tasks.items()}
    step = f"rebase {names} {sorted({task[2] for task in tasks.values()})}"
    sums = reduction.sums_of_owned(partition, step, local)
    owned = {name: (tasks[name][0], sums[name], *tasks[name][2:]) for name in sums}
    rebased, error = partition.attempt(stage, owned)
    if not local:
        return {}
    dtype = partition.options.operators_dtype
    news: dict[str, tuple[Any, ...]] = {}
    for name, new in rebased.items():
        if partition.owners_only:
            # Bases are sent while an update needs them.
            news[name] = {}, new.status, {}
            continue
        # Second moments have new bases; other averages are those that ranks have.
        before = sums[name].averages
        changed = {k: x for k, x in new.averages.items() if x is not before[k]}
        news[name] = new.bases, new.status, changed
    received = partition.to_all(news, local[names[0]].like, dtype=dtype)
    if len(received) < len(names):
        # All ranks see that the bases of an owner are missing, and learn why.
        partition.agreement.vote("rebased", error=error)
    statistics: dict[str, Statistics] = {}
    for name in names:
        bases, status, changed = received[name]
        if partition.owners_only:
            new = rebased.get(name, local[name])
            if dtype is not None:
                new = replaced(new, bases=transport.rounded(new.bases, dtype))
            statistics[name] = partition.owned_part(name, replaced(new, status=status))
            continue
        changed = partition.part_of(name, Statistics(changed, status)).averages
        averages = {**local[name].averages, **changed}
        statistics[name] = Statistics(averages, status, bases)
    return statistics


def prepare(
    partition: Partition, stage: Stage[CurvatureOperator], tasks: Tasks, /
) -> dict[str, CurvatureOperator]:
    """Return operators with further factorizations on the ranks that hold them."""
    local = {name: task for name, task in tasks.items() if partition.holds(name)}
    prepared, error = partition.attempt(stage, local)
    step = f"prepare {list(tasks)} {sorted({task[2] for task in tasks.values()})}"
    partition.agreement.vote(step, error=error)
    return {name: task[1] for name, task in tasks.items()} | prepared


def _inverts(options: RefreshOptions) -> bool:
    """Return whether a refresh gives `FactoredKronecker` operators with inverses."""
    return (
        options.rule != "exact"
        and options.solving == "inverse"
        and "inverse" in options.factorizations
    )
