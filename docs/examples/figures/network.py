"""Three small networks on scikit-learn's digits, and what one layer of each sees.

Each is trained for a while by gradient descent, since curvature at random weights is of
little interest.  The rates are small enough for the loss to fall at every step: above the
stability limit, 2 over the largest curvature, gradient descent amplifies roundoff, and
the numbers would depend on the order in which a processor adds.  The vectors that are
back-propagated are the columns of a square root of the softmax's Hessian, one source for
each class, so that nothing is sampled and the dense block below is the Gauss-Newton
matrix itself.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

import kfac_core as kc
from kfac_core.losses import Categorical, vectors

Array = np.ndarray[Any, Any]

CLASSES = 10
MINI_BATCH = 32


@dataclass(frozen=True)
class Seen:
    """One layer, and what it saw of one batch."""

    title: str
    layer: Any
    inputs: Array
    """Shape (N, ..., in)."""
    output_grads: Array
    """Shape (M, N, ..., out), one source for each class."""
    gradients: Array
    """The mean gradients of mini-batches, as the block's matrices, (batches, n, m)."""
    rows: Array
    """x with its 1, shape (N, S, n)."""

    @property
    def batch(self) -> kc.Batch:
        """What the library is fed."""
        return kc.Batch(self.inputs, self.output_grads, sources=CLASSES)

    def dense_block(self) -> Array:
        """The exact block, ``1/N sum_mn vec(D) vec(D)^T``, without the library."""
        N, S, _ = self.rows.shape
        g = self.output_grads.reshape(CLASSES, N, S, -1)
        D = np.einsum("nsi,mnso->mnio", self.rows, g).reshape(CLASSES * N, -1)
        return D.T @ D / N


def images(size: int, count: int) -> tuple[Array, Array]:
    """Return digits of `size` by `size` pixels, and one-hot labels."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    chosen = np.random.default_rng(0).permutation(len(pixels))[:count]
    cut = 8 // size
    shape = count, size, cut, size, cut
    shrunk = (pixels[chosen] / 16.0).reshape(shape).mean(axis=(2, 4))
    return shrunk, np.eye(CLASSES)[labels[chosen]]


def softmax(z: Array) -> Array:
    """Return the probabilities of the classes."""
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def with_ones(x: Array) -> Array:
    """Append a 1 to each row."""
    return np.concatenate([x, np.ones_like(x[..., :1])], axis=-1)


def square_roots(logits: Array) -> Array:
    """Return the vectors to back-propagate, shape (classes, N, classes)."""
    found = vectors(Categorical(), logits, mode="exact_GGN")
    return np.asarray(found.vectors)


class Network:
    """A layer of weight W and tanh, whose outputs' mean a softmax classifies.

    W has the shape (in + 1, out), with the bias last; the classifier likewise.
    """

    def __init__(self, x: Array, labels: Array, *, hidden: int) -> None:
        rng = np.random.default_rng(1)
        self.x, self.labels = with_ones(x), labels
        n = self.x.shape[-1]
        self.W = rng.normal(size=(n, hidden)) / np.sqrt(n)
        self.head = rng.normal(size=(hidden + 1, CLASSES)) / np.sqrt(hidden)

    def forward(self) -> tuple[Array, Array, Array]:
        """Return the activations, their means over positions, and the logits."""
        a = np.tanh(self.x @ self.W)
        mean = with_ones(a.mean(axis=1))
        return a, mean, mean @ self.head

    def backward(self, v: Array) -> Array:
        """Return the output gradients of the layer, shape (..., N, S, hidden)."""
        a, _, _ = self.forward()
        back = v @ self.head[:-1].T / a.shape[1]
        return np.asarray(back[..., None, :] * (1.0 - a * a))

    def trained(self, *, steps: int, rate: float) -> "Network":
        """Take steps of gradient descent on the mean loss of all examples."""
        for _ in range(steps):
            _, mean, z = self.forward()
            v = (softmax(z) - self.labels) / len(z)
            step = np.einsum("nsi,nso->io", self.x, self.backward(v))
            self.head -= rate * mean.T @ v
            self.W -= rate * step
        return self

    def seen(self, title: str, layer: Any, inputs: Array, shape: Any) -> Seen:
        """Return what the layer saw; `shape` is that of the shared positions."""
        _, _, z = self.forward()
        g = self.backward(square_roots(z))
        g = g.reshape(*g.shape[:2], *shape, g.shape[-1])
        gradients = by_mini_batch(self.x, self.backward(softmax(z) - self.labels))
        return Seen(title, layer, inputs, g, gradients, self.x)


def by_mini_batch(rows: Array, output_grads: Array) -> Array:
    """Return the mean gradient of each mini-batch, shape (batches, n, m)."""
    x = rows.reshape(-1, MINI_BATCH, *rows.shape[1:])
    g = output_grads.reshape(-1, MINI_BATCH, *output_grads.shape[1:])
    return np.asarray(np.einsum("bnsi,bnso->bio", x, g) / MINI_BATCH)


def dense(*, count: int = 512, steps: int = 400) -> Seen:
    """The hidden layer of a 16-12-10 network on digits of 4 by 4 pixels."""
    x, labels = images(4, count)
    x = x.reshape(count, 16)
    network = Network(x[:, None], labels, hidden=12).trained(steps=steps, rate=0.5)
    layer = kc.Dense(in_features=16, out_features=12, bias=True, weight_layout="io")
    return network.seen("dense layer, 17 x 12", layer, x, ())


def convolution(*, count: int = 256, steps: int = 800) -> Seen:
    """A convolution of 3 x 3, from 4 channels to 6, under a mean over 16 positions."""
    x, labels = images(4, count)
    rng = np.random.default_rng(2)
    first = rng.normal(size=(9, 4)) / 3.0
    features = np.tanh(2.0 * patches(x[..., None]) @ first).reshape(count, 4, 4, 4)
    network = Network(patches(features), labels, hidden=6)
    network.trained(steps=steps, rate=0.5)
    layer = kc.Conv(
        in_channels=4,
        out_channels=6,
        kernel_size=(3, 3),
        padding="same",
        bias=True,
        weight_layout="spatial_io",
        data_layout="channels_last",
    )
    return network.seen("convolution, 37 x 6", layer, features, (4, 4))


def patches(x: Array) -> Array:
    """Return the patches of 3 by 3 with zeros around, kernel positions first."""
    _, height, width, _ = x.shape
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    parts = [
        padded[:, i : i + height, j : j + width] for i in range(3) for j in range(3)
    ]
    return np.concatenate(parts, axis=-1).reshape(len(x), height * width, -1)


def recurrent(*, count: int = 256, steps: int = 400, hidden: int = 8) -> Seen:
    """A tanh cell that reads digits of 8 by 8 pixels row by row, 8 steps."""
    x, labels = images(8, count)
    rng = np.random.default_rng(3)
    W = rng.normal(size=(8 + hidden + 1, hidden)) / 4.0
    head = rng.normal(size=(hidden + 1, CLASSES)) / np.sqrt(hidden)
    for _ in range(steps):
        rows, states = unrolled(x, W)
        last = with_ones(states[:, -1])
        v = (softmax(last @ head) - labels) / count
        g = through_time(v @ head[:-1].T, states, W)
        head -= 0.05 * last.T @ v
        W -= 0.05 * np.einsum("nsi,nso->io", rows, g)
    rows, states = unrolled(x, W)
    z = with_ones(states[:, -1]) @ head
    g = through_time(square_roots(z) @ head[:-1].T, states, W)
    v = softmax(z) - labels
    gradients = by_mini_batch(rows, through_time(v @ head[:-1].T, states, W))
    layer = kc.Dense(
        in_features=8 + hidden, out_features=hidden, bias=True, weight_layout="io"
    )
    title = f"recurrent layer, {8 + hidden + 1} x {hidden}, 8 steps"
    return Seen(title, layer, rows[..., :-1], g, gradients, rows)


def unrolled(x: Array, W: Array) -> tuple[Array, Array]:
    """Return what the cell saw at each step, and its states, both (N, T, ...)."""
    state = np.zeros((len(x), W.shape[1]))
    rows, states = [], []
    for step in range(x.shape[1]):
        rows.append(with_ones(np.concatenate([x[:, step], state], axis=-1)))
        state = np.tanh(rows[-1] @ W)
        states.append(state)
    return np.stack(rows, axis=1), np.stack(states, axis=1)


def through_time(back: Array, states: Array, W: Array) -> Array:
    """Return the output gradients of every step for vectors at the last state."""
    inner = W[-1 - W.shape[1] : -1]
    found = []
    for step in reversed(range(states.shape[1])):
        g = back * (1.0 - states[:, step] ** 2)
        found.append(g)
        back = g @ inner.T
    return np.stack(found[::-1], axis=-2)
