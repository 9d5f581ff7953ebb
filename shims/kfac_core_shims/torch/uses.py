"""Several uses of one weight by one example, as positions that the example shares.

A derivative of the network uses each weight several times: in the forward pass, and in each
derivative of it.  The derivative of an output by the weight is the sum over all of them.
Approximations that sum over the positions of each example therefore need to know which rows
of which use belong to which example.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

import kfac_core as kc
from kfac_core_shims.torch.graph import Reached, RecordedCall, gradients_at


def sums_over_positions(block: kc.Block, /) -> bool:
    """Whether a block sums gradients over the positions of each example."""
    approximation = block.approximation
    rows_apart = getattr(approximation, "sharing", None) == "expand"
    return not (rows_apart and isinstance(approximation, kc.Kronecker))


def find_examples(
    outputs: torch.autograd.graph.GradientEdge,
    reached: Iterable[Reached],
    vectors: torch.Tensor | None,
    /,
    *,
    like: torch.Tensor,
    blocks: Mapping[str, kc.Block],
    of_one: Collection[RecordedCall] = (),
) -> None:
    """Find the example of each row, of blocks that sum over several uses.

    Parameters
    ----------
    outputs : GradientEdge
        The outputs in the graph, which stays.
    reached : iterable of Reached
        Calls that they depend on.
    vectors : torch.Tensor, shape (M, N, ..., P), or None
        What was backpropagated; None for the gradients of the caller's loss.
    like : torch.Tensor, shape (N, ..., P)
        The outputs.
    blocks : mapping of str to Block
        All blocks.
    of_one : collection of RecordedCall
        Calls whose rows are of one example, as all outputs are.

    Raises
    ------
    kfac_core.UnsupportedError
        If rows belong to no single example, or that cannot be found.
    """
    of_block: dict[str, list[Reached]] = {}
    for r in reached:
        # Layers of a chain are no blocks of their own, and have one row an example.
        block = blocks.get(r.call.block)
        if block is None or block.layer.kind not in ("dense", "embedding"):
            continue
        if sums_over_positions(block):
            of_block.setdefault(r.call.block, []).append(r)
    whole = like
    for name, uses in of_block.items():
        several = any(r.call in of_one for r in uses)
        like = whole.reshape(1, -1, whole.shape[-1]) if several else whole
        N = len(like)
        derived = any(r.call.turned for r in uses)
        if len(uses) == 1 and not derived and uses[0].call.examples == N:
            continue
        indices = None
        is_bag = getattr(blocks[name].layer, "bag", False)
        if not is_bag and uses[0].share is None:
            indices = _examples_of(outputs, uses, vectors, like)
        if indices is not None:
            # Most often one array for all calls: asking synchronizes with the device.
            different = {id(index): index for index in indices}.values()
            in_order = all(_are_in_order(index, N) for index in different)
            # Rows of no example have no gradient, unless a mask leaves them out.
            in_order = in_order and all(r.call.mask is None for r in uses)
            for r, index in zip(uses, indices, strict=True):
                r.call.example_of, r.call.outputs = index, N
                r.call.in_order = in_order
        elif (
            derived
            or (is_bag and several)
            or (not is_bag and any(_is_time_first(r.call, N) for r in uses))
        ):
            raise kc.UnsupportedError(
                f"Layer {name!r} has several rows for each example, as from "
                "derivatives of the model or from sequences with time first, and "
                f"{type(blocks[name].approximation).__name__} sums over them. The "
                "example of each row is unknown, since outputs mix examples, or "
                "fisher='empirical'. Observe outputs with one row for each example, "
                "use batch_first=True, or take Kronecker()."
            )


def joined(
    calls: Iterable[RecordedCall], /, *, positions_of: int | None = None
) -> list[kc.integration.LayerCall]:
    """Return calls of which those that share examples are one.

    Parameters
    ----------
    calls : iterable of RecordedCall
        Calls of one pass, with their gradients.
    positions_of : int, optional
        Number of examples, where each position of these is an example of its own.

    Returns
    -------
    list of LayerCall
        Where what came back are inputs of the block, which then differ between
        backpropagated vectors, these are examples of their own.

    Raises
    ------
    kfac_core.UnsupportedError
        For rows whose positions are not known, with `positions_of`.
    """
    of_block: dict[str, list[RecordedCall]] = {}
    for call in calls:
        of_block.setdefault(call.block, []).append(call)
    separate: list[kc.integration.LayerCall] = []
    for uses in of_block.values():
        derived = any(call.turned for call in uses)
        uses = [call for call in uses if call.has_rows]
        if positions_of is not None and uses:
            uses = _separate_positions(uses, positions_of)
        if uses and uses[0].example_of is not None:
            separate.append(_one_call(uses, derived=derived))
        elif derived:
            separate += [_one_call([call], derived=True) for call in uses]
        else:
            separate += uses
    return separate


def _examples_of(
    outputs: Any, uses: list[Reached], vectors: Any, like: Any
) -> list[Any] | None:
    """Return the index of the example of each row of each call; None if not known."""
    N, device = len(like), like.device
    if N < 2:
        # Each row is of the only example, or of none.
        indices = [torch.full((_rows(r.call),), N - 1, device=device) for r in uses]
        return [_counted(*pair) for pair in zip(uses, indices, strict=True)]
    by_example = len(uses) >= N and vectors is not None
    if all(_has_row_each(r.call, N) for r in uses) and not by_example:
        # No gradient is needed to tell, unless each call may be of one example.
        numbers = torch.arange(N, device=device)
        return [_counted(r, numbers) for r in uses]
    if vectors is None:
        return None
    # What comes back to the rows of an example is multiplied by what its outputs are.
    scales = 1 + torch.arange(N, dtype=torch.float64, device=device) / N
    mixed = torch.tensordot(_coefficients(vectors), vectors, 1)
    scaled = mixed * scales.to(mixed.dtype).reshape(-1, *[1] * (mixed.ndim - 1))
    indices = []
    pairs = [gradients_at(outputs, uses, v) for v in (mixed, scaled)]
    for r, a, b in zip(uses, *pairs, strict=True):
        if a is None:
            indices.append(torch.full((_rows(r.call),), -1, device=device))
            continue
        a, b = (x.reshape(-1, x.shape[-1]).double() for x in (a, b))
        squares = (a * a).sum(-1)
        # Only roundoff comes back to some rows, such as those before a dead ReLU. They
        # belong to no example.
        unlike_zero = squares.sqrt() > 1e3 * torch.finfo(like.dtype).eps * a.abs().max()
        ratio = (a * b).sum(-1) / squares.where(unlike_zero, 1)
        index = ((ratio - 1) * N).round().long().clamp(0, N - 1)
        # A row that mixes examples has the factor of none.
        error = (b - scales[index, None] * a).norm(dim=-1)
        if bool((error > 0.1 / N * squares.sqrt())[unlike_zero].any()):
            return None
        indices.append(_counted(r, index.where(unlike_zero, -1)))
    return indices


def _counted(r: Reached, index: Any) -> Any:
    """Return the index of the example of each row, -1 for rows that do not count."""
    mask = r.call.mask
    return index if mask is None else index.where(mask.reshape(-1), -1)


def _has_row_each(call: RecordedCall, N: int) -> bool:
    """Whether there is one row for each example; ids may also be those of positions."""
    return _rows(call) == N and (call.inputs.is_floating_point() or call.examples == N)


def _are_in_order(index: Any, N: int) -> bool:
    """Whether row n is of example n, or of none."""
    if len(index) != N:
        return False
    numbers = torch.arange(N, device=index.device)
    return bool(((index == numbers) | (index < 0)).all())


def _is_time_first(call: RecordedCall, N: int) -> bool:
    lead = _lead(call)
    if len(lead) < 2 or lead[1] != N or call.examples == N:
        return False
    # Ids (1, N) may be those of positions, which all examples have.
    return call.inputs.is_floating_point() or call.examples > 1


def _coefficients(vectors: Any) -> Any:
    """Return numbers with which no vectors are likely to cancel each other."""
    M = len(vectors)
    return 1 + torch.arange(M, dtype=vectors.dtype, device=vectors.device).sin() / 2


def _lead(call: RecordedCall) -> Any:
    """Return the shape of the rows, which are ids or have features."""
    shape = call.inputs.shape
    return shape[:-1] if call.inputs.is_floating_point() else shape


def _rows(call: RecordedCall) -> int:
    return int(_lead(call).numel())


def _separate_positions(uses: list[RecordedCall], N: int) -> list[RecordedCall]:
    """Return calls in which each position of an example is an example of its own."""
    first = uses[0]
    shapes = [tuple(call.output_grads[0].shape) for call in uses]
    alone = len(uses) == 1 and first.example_of is None
    if alone and len(shapes[0]) == 3 and first.examples == N:
        call = copy.copy(first)
        call.inputs = first.inputs.flatten(0, 1)
        call.mask = None if first.mask is None else first.mask.flatten(0, 1)
        call.output_grads = [g.flatten(0, 1) for g in first.output_grads]
        return [call]
    positions = [_positions(c) for c in uses if c.example_of is not None]
    known = [x for x in positions if x is not None]
    if len(known) < len(uses) or len({T for _, T in known}) > 1:
        raise kc.UnsupportedError(
            f"Layer {first.block!r} has rows of {shapes}, which are not tokens, or whose "
            "positions are not known: scores by token are for sequences (N, T, "
            "features). Call the layer with all positions of the examples at once, or "
            f"leave it out, collect(..., skip_layers=[{first.block!r}])."
        )
    for call, (position, T) in zip(uses, known, strict=True):
        index = call.example_of
        call.example_of = (index * T + position).where(index >= 0, -1)
        call.outputs, call.in_order = call.outputs * T, False
    return uses


def _positions(call: RecordedCall) -> tuple[Any, int] | None:
    """Return each row's position and their number; None if these are not known.

    The rows of one example follow one another, or come with those of the others.
    """
    index, N = call.example_of, call.outputs
    lead, R = call.output_grads[0].shape[:-1], len(index)
    # Of one row for each example, as of a cell's calls, the position is not known.
    if len(lead) > 2 or not R or R % N or (len(lead) == 1 and R == N):
        return None
    rows, T = torch.arange(R, device=index.device), R // N
    readings = [
        (index.reshape(N, T), rows % T, (N, T)),
        (index.reshape(T, N).mT, rows // N, (T, N)),
    ]
    # Rows of no example have the index -1 and may be anywhere.
    positions = [
        position
        for grid, position, shape in readings
        if len(lead) == 1 or lead == shape
        if bool(((grid == grid.amax(1, keepdim=True)) | (grid < 0)).all())
    ]
    # Where most rows are masked both readings may fit.
    if len({tuple(x[index >= 0].tolist()) for x in positions}) != 1:
        return None
    return positions[0], T


def _one_call(uses: list[RecordedCall], *, derived: bool) -> kc.integration.LayerCall:
    """Return the calls as one, of (N, S, ...) where they share examples."""
    sources = max(len(call.output_grads) for call in uses)
    pairs = [_inputs_and_gradients(call, sources) for call in uses]
    inputs = [x if derived else x[:1] for x, _ in pairs]
    output_grads = [g for _, g in pairs]
    if all(call.in_order for call in uses):
        x, g, bias = _side_by_side(uses, inputs, output_grads)
        mask = None
    else:
        x, g, bias, mask = _by_example(uses, inputs, output_grads)
    x = x if x.is_floating_point() else x[..., 0]
    has_biases: Any = True if all(call.bias for call in uses) else bias
    call_of_all = kc.integration.LayerCall(uses[0].block, x, mask=mask, bias=has_biases)
    call_of_all.output_grads, call_of_all.scaled_by = [*g], uses[0].scaled_by
    return call_of_all


def _side_by_side(
    uses: list[RecordedCall], inputs: list[Any], output_grads: list[Any]
) -> tuple[Any, Any, Any]:
    """Return rows of calls that have one row for each example, a position for each call."""
    x = torch.stack(inputs, dim=2).flatten(0, 1)
    g = torch.stack(output_grads, dim=2)
    if len(inputs[0]) > 1:
        g = g.flatten(0, 1)[None]
    bias = torch.tensor([bool(call.bias) for call in uses], device=x.device)
    return x, g, bias.expand(x.shape[:2])


def _by_example(
    uses: list[RecordedCall], inputs: list[Any], output_grads: list[Any]
) -> tuple[Any, Any, Any, Any]:
    """Return rows of calls at the places of their examples, and which places are taken."""
    copies = len(inputs[0])
    examples, biases = [], []
    for call, x in zip(uses, inputs, strict=True):
        biases.append(torch.full((copies * _rows(call),), call.bias, device=x.device))
        if call.example_of is not None:
            shift = torch.arange(copies, device=x.device)[:, None] * call.outputs
            index = call.example_of
            examples.append((index + shift).where(index >= 0, -1).reshape(-1))
    x = torch.cat([part.reshape(-1, part.shape[-1]) for part in inputs])
    if copies > 1:
        g = torch.cat([part.reshape(-1, part.shape[-1]) for part in output_grads])[None]
    else:
        g = torch.cat(output_grads, dim=1)
    bias, mask = torch.cat(biases), None
    if examples:
        count = copies * uses[0].outputs
        slots, width = _slots(torch.cat(examples), count)
        x, bias = (_placed(part, slots, count, width) for part in (x, bias))
        g = torch.stack([_placed(part, slots, count, width) for part in g])
        if len(slots) < count * width or bool((slots < 0).any()):
            mask = _placed(
                torch.ones_like(slots, dtype=torch.bool), slots, count, width
            )
    return x, g, bias, mask


def _inputs_and_gradients(call: RecordedCall, sources: int) -> tuple[Any, Any]:
    """Return inputs and output gradients of the block, both of shape (M, rows, ...)."""
    came = torch.stack(call.output_grads)
    came = came.reshape(len(came), -1, came.shape[-1])
    if len(came) < sources:
        came = torch.cat([came, came.new_zeros(sources - len(came), *came.shape[1:])])
    if call.inputs.is_floating_point():
        saved = call.inputs.reshape(1, -1, call.inputs.shape[-1]).to(came.dtype)
    else:
        saved = call.inputs.reshape(1, -1, 1)
    saved = saved.expand(sources, -1, -1)
    if call.turned:
        return came / call.row_scale, saved * call.row_scale
    return saved, came


def _slots(example_of: Any, count: int) -> tuple[Any, int]:
    """Return each row's place among examples of equally many positions, and how many.

    Rows of no example, index -1, have no place.
    """
    counts = torch.bincount(example_of + 1, minlength=count + 1)
    order = torch.argsort(example_of, stable=True)
    starts = counts.cumsum(0) - counts
    positions = torch.empty_like(order)
    numbers = torch.arange(len(order), device=order.device)
    positions[order] = numbers - starts[example_of[order] + 1]
    width = max(1, int(counts[1:].max())) if count else 1
    return (example_of * width + positions).where(example_of >= 0, -1), width


def _placed(rows: Any, slots: Any, count: int, width: int) -> Any:
    placed = rows.new_zeros(count * width, *rows.shape[1:])
    placed[slots[slots >= 0]] = rows[slots >= 0]
    return placed.reshape(count, width, *rows.shape[1:])
