"""Weights of the passes of a step, beside one another and on all processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from kfac_core_shims.torch.loss_checks import LossCheck
from kfac_core_shims.torch.observation import Observation


def _is_one(x: float) -> bool:
    """Whether a scale is one: a sum and a mean are twofold apart, or more."""
    return abs(x - 1) <= 5e-2


def numbers_of(passes: Sequence[Observation], /) -> list[float]:
    """Return the rows of passes and their scales in the loss, to be added up."""
    read = [o for o in passes if o.rows]
    known = [(o.rows, o.scale) for o in read if o.scale]
    uniform = [(o.rows, o.scale) for o in read if o.scale and o.is_uniform]
    rows = sum(o.rows for o in read)
    return [
        rows,
        rows * rows,
        len(read) - len(known),
        sum(o.is_unscaled for o in read),
        sum(n * c for n, c in known),
        len(uniform),
        sum(_is_one(c) for _, c in uniform),
        sum(_is_one(n * c) for n, c in uniform),
        sum(c for _, c in uniform),
        sum(n * c * c for n, c in known),
        len(read),
        sum(o.coarse for o in read),
    ]


def require_scale(
    numbers: Sequence[float], /, *, loss: LossCheck, processes: int
) -> None:
    """Raise unless the loss has the expected scale, from the sums of `numbers_of`."""
    rows, squares, _, unscaled, _, count, sums, means, scales, *_ = numbers
    if processes * squares > (1 + 1e-9) * rows * rows and unscaled:
        loss.refuse_unequal_rows()
    if count:
        scale = scales / count
        # With one row per process, a sum and a mean have the same scale.
        is_mean = means == count or _is_one(scale * rows / processes)
        loss.require_reduction(scale, rows, is_sum=sums == count, is_mean=is_mean)


def have_weights(numbers: Sequence[float], /) -> bool:
    """Return whether passes have unlike scales, by `numbers_of` of all processes."""
    rows, _, unknown, _, total, *_, squares, passes, coarse = numbers
    if unknown or not total:
        return False
    # Relative variance of the scales, weighted by rows.
    variance = squares * rows / (total * total) - 1.0
    # No scale is farther from the mean than this.
    return bool(passes * variance > max((coarse / passes) ** 2, 1e-14 * passes))


def balance(
    passes: Sequence[Observation],
    /,
    *,
    loss: LossCheck,
    processes: int,
    clips: bool,
    vote: Callable[..., Any] | None = None,
) -> None:
    """Give the rows of each pass of a step the weight that the loss gives them.

    Passes may be means over unequal numbers of rows, or added with factors; a factor that
    all have in common changes nothing.  Empirical gradients have that weight, squared,
    where one is wanted.

    Parameters
    ----------
    passes : sequence of Observation
        Those of the step; their rows and calls are changed.
    loss : LossCheck
        Compares the scale of the loss with what was said.
    processes : int
        Number of processes that gradients are averages over.
    clips : bool
        Whether there is a KL clip, which takes gradients as they are.
    vote : callable, optional
        Returns sums over processes: ``vote(values, error=...)``.

    Raises
    ------
    kfac_core.ConventionError
        For a loss of the other reduction, or multiplied by a gradient scaler that was not
        passed; and for processes with unequal rows, where the gradient does not show what
        these count.  On all processes.
    """
    values = numbers_of(passes)
    error = loss.unscaled_error([o for o in passes if o.rows], processes, clips=clips)
    if vote is not None:
        values = vote(values, error=error).tolist()
    elif error is not None:
        raise error
    require_scale(values, loss=loss, processes=processes)
    rows, _, unknown, _, total, *_ = values
    if unknown or not total:
        return
    known = [(o, o.scale) for o in passes if o.rows and o.scale]
    of_means = loss.criterion.reduction == "mean"
    for observation, c in known:
        weight = root = c * rows / total
        if loss.empirical and of_means:
            # The rows are R/p times the gradients, for a total of p.
            weight, root = 1.0, processes**2 / (c * rows * total)
        elif loss.empirical:
            root = rows / (c * total)
        # Passes whose scales differ by roundoff have equal weights.
        if max(abs(weight - 1), abs(root - 1)) > observation.coarse:
            observation.rows *= weight
            observation.share *= weight
            for call in observation.calls:
                call.scaled_by /= math.sqrt(root)
