"""Why an answer differs, where the commonest defects explain it.

Most wrong factors of K-FAC code are right up to a number: a mean over N examples where a
sum was meant, or the other way around, scales gradients by N and their second moments by
N^2.  Others are transposed.  A damped inverse is not proportional to a factor, so that one
number seldom explains it: `kfac_core_conformance.records.alternatives` tries others.
"""

from __future__ import annotations

import math
import sys

import numpy as np

from kfac_core_conformance.records.answers import Answer
from kfac_core_conformance.records.record import norm_of

CLOSE = 1e-4
"""How near an explained answer comes, relative to the expected one."""

COVARIANCE_CLOSE = 1e-3
"""How near ``ratio - 1`` comes to ``1/(N-1)``, relative to it."""


def diagnosis(
    got: Answer,
    expected: Answer,
    /,
    *,
    examples: int | None,
    factor: bool = False,
) -> str | None:
    """Explain a difference by one number, or by a transpose.

    Parameters
    ----------
    got : mapping of str to numpy.ndarray
        Answer of this library.
    expected : mapping of str to numpy.ndarray
        Answer in the record.
    examples : int, optional
        Number N of examples of an update, if all updates have the same.
    factor : bool
        Whether the answer is a factor, which may be a sample covariance.

    Returns
    -------
    str or None
        One sentence, or None if nothing explains the difference.
    """
    if norm_of(got) == 0.0 or norm_of(expected) == 0.0:
        return None
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return _explained(got, expected, examples, factor=factor)


def _explained(
    got: Answer, expected: Answer, examples: int | None, *, factor: bool
) -> str | None:
    ratio = _ratio(got, expected)
    if ratio is not None:
        # Any two scalars have a ratio, which may mean nothing.
        alone = sum(part.size for part in got.values()) == 1
        meaning = _meaning(ratio, examples, factor=factor)
        return None if alone and meaning is None else _sentence(ratio, meaning)
    if all(part.ndim == 2 and part.shape[0] == part.shape[1] for part in got.values()):
        transposed = {name: part.T for name, part in got.items()}
        if distance(transposed, expected, 1.0) < CLOSE:
            return "the record's answer is ours transposed: see `weight_layout`"
        return _of_bias(got, expected) if factor else None
    return None


def _of_bias(got: Answer, expected: Answer) -> str | None:
    """Explain a factor whose constant 1, for the bias, is elsewhere or is not 1."""
    rolled = {name: np.roll(part, (1, 1), (0, 1)) for name, part in got.items()}
    if distance(rolled, expected, 1.0) < CLOSE:
        return "the record's answer is ours with the bias first: the format has it last"
    if all(len(part) > 1 for part in got.values()):
        inner = {name: part[:-1, :-1] for name, part in got.items()}
        inside = {name: part[:-1, :-1] for name, part in expected.items()}
        if norm_of(inside) > 0.0 and distance(inner, inside, 1.0) < CLOSE:
            return (
                "only the last row and column differ, those of the bias: "
                "its input is 1 in every row"
            )
    return None


def _ratio(got: Answer, expected: Answer) -> float | None:
    """Return c where ``expected = c got``; None where no number does it."""
    # Unit vectors first: the squares of numbers of 1e200 are infinite.
    ours, theirs = norm_of(got), norm_of(expected)
    cosine = sum(
        float(np.sum((got[n] / ours) * (part / theirs))) for n, part in expected.items()
    )
    ratio = cosine * (theirs / ours)
    if not math.isfinite(ratio) or abs(ratio) < sys.float_info.min:
        return None
    return ratio if distance(got, expected, ratio) < CLOSE else None


def distance(got: Answer, expected: Answer, ratio: float, /) -> float:
    """Return ``|expected - ratio * got| / |expected|``.

    Parameters
    ----------
    got, expected : mapping of str to numpy.ndarray
        Answers with the same keys and shapes.
    ratio : float
        A number.

    Returns
    -------
    float
        In the Frobenius norm, all parameters together.
    """
    difference = {name: part - ratio * got[name] for name, part in expected.items()}
    return norm_of(difference) / norm_of(expected)


def _meaning(ratio: float, examples: int | None, *, factor: bool) -> str | None:
    """Return what a ratio is of the number of examples, in words."""
    if examples is None or examples < 2:
        return None
    for power, meaning in _MEANINGS.items():
        size = float(examples) ** power
        if abs(ratio - size) < CLOSE * size:
            return f"{meaning} for N = {examples} examples"
    # Close to 1, so that its distance from 1 is what is compared.
    if factor and abs((ratio - 1.0) * (examples - 1) - 1.0) < COVARIANCE_CLOSE:
        return f"N/(N-1), a sample covariance: divide by N, for N = {examples} examples"
    return None


def _sentence(ratio: float, meaning: str | None) -> str:
    number, inverse = f"{ratio:.4g}", 1.0 / ratio
    if abs(inverse - round(inverse)) < CLOSE * abs(inverse) and abs(inverse) > 1.5:
        number = f"{number} = 1/{round(inverse)}"
    sentence = f"the record's answer is {number} times ours"
    return sentence if meaning is None else f"{sentence}: {meaning}"


_MEANINGS = {
    1: "N, a sum where the format has a mean over examples",
    2: "N^2, output gradients that are N times too large",
    -1: "1/N, a mean over examples taken once too often",
    -2: "1/N^2, output gradients of a mean loss; multiply them by N",
}
