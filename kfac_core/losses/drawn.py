"""The vectors of an estimation mode with the noise that they need, from a seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from kfac_core import constraints, errors
from kfac_core.array import Array
from kfac_core.array import namespaces as ns
from kfac_core.losses.loss import Loss
from kfac_core.losses.modes import EstimationMode, noise_spec
from kfac_core.losses.noise import NoiseSpec, draw_noise
from kfac_core.losses.sources import SourceVectors, vectors, with_random_signs

Positions = Literal["signs", "separate", "together"]
"""Treatment of rows that share an example by exact modes; see `drawn_vectors`."""


def drawn_vectors(
    loss: Loss,
    natural: Array,
    /,
    *,
    mode: EstimationMode,
    seed: int | Callable[[NoiseSpec], Array],
    shared: bool,
    samples: int = 1,
    positions: Positions = "signs",
) -> SourceVectors:
    """Return the vectors that a mode backpropagates, with its own noise.

    Parameters
    ----------
    loss : Loss
        Loss of the network.
    natural : array, shape (N, ..., P)
        The network's outputs; never differentiated through.
    mode : EstimationMode
        Any but ``"empirical"``, which needs the data's targets.
    seed : int or callable
        Seed of all random numbers: the same seed gives the same vectors.  Or
        ``spec -> noise``, which draws them, as a compiled program must.
    shared : bool
        Whether some layer has fewer examples than there are rows of outputs.
    samples : int
        How many vectors are drawn for each row, at least 1; of the sampled modes.
    positions : {"signs", "separate", "together"}
        What the exact modes do with rows that share an example, as tokens do, where the
        square of a sum of rows would hold their products too: give them random signs,
        which is right in expectation; one source for each of T rows, T times as many
        (``natural`` of shape ``(N, T, P)`` is to have them on axes of their own), which
        is exact where no layer mixes examples, and elsewhere right in expectation, by
        random signs of the examples; or nothing, which is exact where no layer mixes
        rows of an example, and what curvlinops does.

    Returns
    -------
    SourceVectors
        As `vectors`.

    Raises
    ------
    ConventionError, UnsupportedError, ShapeError, DtypeError
        See `vectors`.

    Notes
    -----
    Draws from a seed on the host; see `draw_noise`.

    Examples
    --------
    >>> import numpy as np
    >>> import kfac_core as kc
    >>> loss, outputs = kc.losses.Categorical(), np.zeros((8, 3))
    >>> drawn = kc.losses.drawn_vectors(
    ...     loss, outputs, mode="gradients", seed=0, shared=False
    ... )
    >>> [v.shape for v in drawn.vectors]
    [(8, 3)]
    """
    if isinstance(seed, type) or not callable(seed):
        constraints.require_range("seed", seed, constraints.WHOLE)
    constraints.require_flag("shared", shared)
    constraints.require_one_of("positions", positions, get_args(Positions))
    spec = noise_spec(loss, natural, mode=mode, samples=samples)
    if samples != 1 and spec is None:
        raise errors.ConventionError(
            f"The mode {mode!r} draws nothing, so `samples` must be 1; got {samples}."
        )
    if positions == "separate" and shared and natural.ndim == 2:
        raise errors.ConventionError(
            "positions='separate' needs outputs of shape (N, T, P), whose T rows belong to "
            f"one example; got {tuple(natural.shape)} from layers with fewer examples."
        )
    if spec is not None:
        noise = _drawn(spec, natural, seed)
        return vectors(loss, natural, mode=mode, noise=noise)
    separate = positions == "separate"
    several = separate and natural.ndim > 2
    exact = vectors(
        loss, natural, mode=mode, positions="separate" if several else "together"
    )
    if positions == "together" or not (shared or separate):
        return exact
    rows = tuple(exact.vectors.shape[:-1])
    # Each separate source holds one row of every example.
    drawn = (*rows[:2], *(1 for _ in rows[2:])) if separate else rows
    noise = _drawn(NoiseSpec("uniform", drawn), natural, seed)
    xp = ns.namespace_of(noise=noise)
    # Random signs have mean zero, so that cross terms of rows which share an example
    # vanish on average, and squares stay exact.
    return with_random_signs(exact, xp.broadcast_to(noise, rows))


def _drawn(
    spec: NoiseSpec, natural: Array, seed: int | Callable[[NoiseSpec], Array]
) -> Array:
    if callable(seed):
        return seed(spec)
    return draw_noise(spec, like=natural, rng=seed)
