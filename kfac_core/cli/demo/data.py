"""The digits: 1797 images of 8 by 8 pixels, which come inside scikit-learn.

Pixels are scaled from 0..16 to [0, 1].  The order of the images, the batches and the
uniform numbers for sampling are drawn by NumPy on the host from separate streams of one
seed, so that no method and no backend changes what another one sees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import kfac_core as kc
from kfac_core.array.backend import Array

__all__ = ["Digits", "batches", "load_digits", "pixel_entropy", "stream", "uniforms"]

N_HELD_OUT = 297

STREAMS = ("split", "parameters", "batches", "targets")


@dataclass(frozen=True)
class Digits:
    """The images on the host, ``(n, 64)`` in float64, in two parts.

    Attributes
    ----------
    train : numpy.ndarray
        The images that are trained on, 1500 of them.
    held_out : numpy.ndarray
        The images that are only reconstructed, 297 of them.
    """

    train: np.ndarray[Any, Any]
    held_out: np.ndarray[Any, Any]


def stream(seed: int, name: str, /) -> np.random.Generator:
    """Return the generator of one of the `STREAMS` of a seed, at its beginning."""
    return np.random.default_rng([STREAMS.index(name), seed])


def load_digits(seed: int, /) -> Digits:
    """Load the digits, and hold a random part of them out.

    Parameters
    ----------
    seed : int
        Decides which images are held out.

    Returns
    -------
    Digits
        1500 images for training and 297 others.

    Raises
    ------
    ImportError
        Where scikit-learn is not installed.
    """
    from sklearn import datasets

    images = np.asarray(datasets.load_digits().data, dtype=np.float64) / 16.0
    order = stream(seed, "split").permutation(len(images))
    return Digits(train=images[order[N_HELD_OUT:]], held_out=images[order[:N_HELD_OUT]])


def pixel_entropy(images: np.ndarray[Any, Any], /) -> float:
    """Return the least loss that any model of the pixels can have on some images.

    A gray pixel is no certain zero or one: the Bernoulli likelihood of a pixel ``t`` is
    highest at ``p = t``, where its negative logarithm is the entropy of ``t``.

    Parameters
    ----------
    images : numpy.ndarray
        ``(n, n_pixels)``, between zero and one.

    Returns
    -------
    float
        The mean over images of the entropies of their pixels, in nats.
    """
    gray = images[(images > 0.0) & (images < 1.0)]
    entropies = -gray * np.log(gray) - (1.0 - gray) * np.log(1.0 - gray)
    return float(np.sum(entropies)) / len(images)


def batches(
    seed: int, /, *, n_examples: int, batch_size: int, steps: int
) -> list[np.ndarray[Any, Any]]:
    """Draw the batches of a run: each pass over the images is in a new order.

    Parameters
    ----------
    seed : int
        Decides the orders.
    n_examples, batch_size, steps : int
        How many images there are, are in a batch, and how many batches are drawn.

    Returns
    -------
    list of numpy.ndarray
        The indices of the images in each batch.
    """
    rng = stream(seed, "batches")
    drawn: list[np.ndarray[Any, Any]] = []
    while len(drawn) < steps:
        order = rng.permutation(n_examples)
        drawn += [
            order[start : start + batch_size]
            for start in range(0, n_examples - batch_size + 1, batch_size)
        ]
    return drawn[:steps]


def uniforms(
    seed: int, /, *, dtype: str, backend: str | None
) -> Callable[[tuple[int, int]], Array]:
    """Return a function that draws uniform numbers on the host for a backend.

    Parameters
    ----------
    seed : int
        Decides the numbers.
    dtype : str
        The dtype they are given in.
    backend : str or None
        ``name[:device]``; None is the selected one.

    Returns
    -------
    callable
        Takes a shape, returns the next numbers.
    """
    rng = stream(seed, "targets")

    def draw(shape: tuple[int, int]) -> Array:
        return kc.asarray(rng.random(shape).astype(dtype), backend=backend)

    return draw
