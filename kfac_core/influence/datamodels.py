"""The linear datamodeling score: how well sums of scores predict retraining on subsets.

Conventions.  A model is retrained on random subsets of the training examples; with the
losses of the queries afterwards, and minus the sum of each query's scores over the subset,
the score is Spearman's rank correlation over the subsets, averaged over the queries.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from kfac_core import constraints, errors

_RESAMPLES = 1000

Losses = Callable[[Any, int], Any]


@dataclass(frozen=True)
class DatamodelingScore:
    """The score, and how certain it is.

    Attributes
    ----------
    mean : float
        Mean over the queries.
    interval : tuple of float
        Of the mean, 95%, over resampled subsets.
    by_query : numpy.ndarray, shape (Q,)
        Rank correlation of each query.
    """

    mean: float
    interval: tuple[float, float]
    by_query: np.ndarray[Any, Any]


def retrained_losses(
    retrain: Losses,
    /,
    *,
    examples: int,
    subsets: int = 50,
    fraction: float = 0.5,
    seed: int = 0,
    path: str | os.PathLike[str] | None = None,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Retrain on random subsets, and return these and the queries' losses.

    Parameters
    ----------
    retrain : callable
        ``(indices, seed) -> losses`` of the queries, shape (Q,), after training on the
        examples of these indices.
    examples : int
        Number of training examples N.
    subsets : int
        Number of subsets.
    fraction : float
        Fraction of the examples that a subset has.
    seed : int
        Seed of the subsets, and of the first training; each has its own.
    path : path-like, optional
        Folder in which each training's losses are kept: a killed run goes on there.

    Returns
    -------
    subsets : numpy.ndarray of bool, shape (subsets, N)
        Which examples each has.
    losses : numpy.ndarray, shape (subsets, Q)
        The queries' losses after training on it.
    """
    rng = np.random.default_rng(seed)
    masks = np.zeros((subsets, examples), dtype=bool)
    for mask in masks:
        mask[rng.permutation(examples)[: round(fraction * examples)]] = True
    folder = None if path is None else Path(path)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    losses = []
    for number, mask in enumerate(masks):
        file = None if folder is None else folder / f"{seed}-{number}.npy"
        if file is not None and file.exists():
            losses.append(np.load(file))
            continue
        run = np.asarray(retrain(np.flatnonzero(mask), seed + number), np.float64)
        if file is not None:
            unfinished = file.with_suffix(".part.npy")
            np.save(unfinished, run)
            unfinished.replace(file)
        losses.append(run)
    return masks, np.asarray(losses)


def linear_datamodeling_score(
    scores: ArrayLike, subsets: ArrayLike, losses: ArrayLike, /, *, seed: int = 0
) -> DatamodelingScore:
    """Return how well scores predict the losses after retraining on subsets.

    Parameters
    ----------
    scores : array, shape (Q, N)
        Influence of each example on each query; positive if it helps.
    subsets : array of bool, shape (S, N)
        Which examples each training had.
    losses : array, shape (S, Q)
        Losses of the queries after each; from `retrained_losses`.
    seed : int
        Seed of the 1000 resamplings of the subsets that the interval is made of.

    Returns
    -------
    DatamodelingScore
        The mean over the queries, and its interval.

    Raises
    ------
    ShapeError
        For arrays that do not fit.

    References
    ----------
    Park et al. (2023), "TRAK: Attributing Model Behavior at Scale", arXiv:2303.14186.

    Examples
    --------
    >>> import numpy as np
    >>> from kfac_core.influence import linear_datamodeling_score
    >>> scores = np.array([[1.0, 2.0, 3.0]])
    >>> subsets = np.eye(3, dtype=bool)
    >>> losses = np.array([[0.3], [0.2], [0.1]])
    >>> linear_datamodeling_score(scores, subsets, losses).mean
    1.0
    """
    values, masks, actual = (
        np.asarray(x, np.float64) for x in (scores, subsets, losses)
    )
    (Q, N), S = values.shape, len(masks)
    constraints.require_shape("subsets", masks, (S, N))
    constraints.require_shape("losses", actual, (S, Q))
    if S < 3:
        raise errors.ShapeError(f"Expected at least 3 subsets, got {S}.")
    predicted = -masks @ values.T
    rng = np.random.default_rng(seed)
    # Bootstrap over the subsets, which are the independent runs.
    draws = rng.integers(S, size=(_RESAMPLES, S))
    means = [_correlations(predicted[d], actual[d]).mean() for d in draws]
    low, high = np.quantile(means, [0.025, 0.975])
    by_query = _correlations(predicted, actual)
    return DatamodelingScore(
        float(by_query.mean()), (float(low), float(high)), by_query
    )


def _correlations(
    first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Return Spearman's correlation of each column."""
    ranks = []
    for x in (first, second):
        below = np.sum(x[:, None] > x[None], axis=1)
        ties = np.sum(x[:, None] == x[None], axis=1)
        r = below + 0.5 * (ties - 1.0)
        ranks.append(r - r.mean(axis=0))
    a, b = ranks
    spread = np.sqrt(np.sum(a * a, axis=0) * np.sum(b * b, axis=0))
    product = np.sum(a * b, axis=0)
    correlations: np.ndarray[Any, Any] = np.zeros_like(spread)
    np.divide(product, spread, out=correlations, where=spread > 0)
    return correlations
