"""What the examples train on: handwritten digits, and text that comes with Python.

Everything is a NumPy array; a program converts it once, at its start.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

VOCABULARY = "\n" + "".join(map(chr, range(32, 127)))
"""The line's end and the 95 characters of ASCII that can be seen."""


@dataclass(frozen=True)
class Data:
    """Images, shape (n, 8, 8), float32 in [0, 1], and labels, shape (n,), int64."""

    train_inputs: Array
    train_targets: Array
    test_inputs: Array
    test_targets: Array


@dataclass(frozen=True)
class Text:
    """Windows of characters, and the characters that follow each, shape (n, context).

    Ids are int64 in [0, len(vocabulary)); `train_targets` are `train_inputs` one
    character later.
    """

    train_inputs: Array
    train_targets: Array
    test_inputs: Array
    test_targets: Array
    vocabulary: str = VOCABULARY


def digits() -> Data:
    """Return scikit-learn's 1,797 digits, shuffled and split into 1,437 and 360."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8) / 16.0).astype(np.float32)
    labels = labels.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[:1437], order[1437:]
    return Data(images[train], labels[train], images[test], labels[test])


def text(context: int) -> Text:
    """Return windows of the help texts of Python's own `help()`.

    Their words differ a little from one release of Python to the next, their form does
    not: the alphabet is fixed, the last tenth of the text is the test, and windows do
    not overlap.
    """
    whole = "\n".join(topics[name] for name in sorted(topics))
    ids = np.full(128, VOCABULARY.index("?"), dtype=np.int64)
    ids[[ord(character) for character in VOCABULARY]] = np.arange(len(VOCABULARY))
    codes = np.frombuffer(whole.encode("ascii", "replace"), dtype=np.uint8)
    stream = ids[codes]
    cut = len(stream) * 9 // 10
    return Text(*windows(stream[:cut], context), *windows(stream[cut:], context))


def windows(stream: Array, context: int) -> tuple[Array, Array]:
    """Cut a stream of ids into windows, and those one character later."""
    count = (len(stream) - 1) // context
    shape = count, context
    return (
        stream[: count * context].reshape(shape),
        stream[1 : count * context + 1].reshape(shape),
    )


def batches(
    inputs: Array, targets: Array, *, size: int, seed: int
) -> Iterator[tuple[Array, Array]]:
    """Yield batches of one size without end, each pass in a new order of the seed's."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(inputs))
        for start in range(0, len(order) - size + 1, size):
            chosen = order[start : start + size]
            yield inputs[chosen], targets[chosen]
