"""The model of these examples: scikit-learn's digits, one hidden layer, by hand.

Weights have the shape (in + 1, out), the bias in the last row.  `KFAC_CORE_BACKEND`
chooses the array library.
"""

import array_api_compat
import numpy as np
from sklearn.datasets import load_digits

import kfac_core as kc


class Digits:
    """1797 images of 8 by 8 pixels, and a 64-32-10 network with tanh."""

    def __init__(self, *, hidden=32, batch_size=256, seed=0):
        images, labels = load_digits(return_X_y=True)
        rng = np.random.default_rng(seed)
        self.images = (images / 16.0).astype(np.float32)
        self.labels = np.eye(10, dtype=np.float32)[labels]
        self.batch_size = batch_size
        self.order = rng
        shapes = (65, hidden), (hidden + 1, 10)
        self.weights = [
            kc.asarray((rng.normal(size=s) / s[0] ** 0.5).astype(np.float32))
            for s in shapes
        ]

    def batch(self):
        """Return the images and one-hot labels of a random batch."""
        chosen = self.order.permutation(len(self.images))[: self.batch_size]
        return kc.asarray(self.images[chosen]), kc.asarray(self.labels[chosen])

    def all(self):
        """Return all images and labels."""
        return kc.asarray(self.images), kc.asarray(self.labels)


def loss_and_gradients(weights, images, labels):
    """Return the mean cross-entropy, and its gradient for each weight."""
    xp = array_api_compat.array_namespace(images)
    x = with_ones(images, xp)
    h = with_ones(xp.tanh(x @ weights[0]), xp)
    z = h @ weights[1]
    z = z - xp.max(z, axis=1, keepdims=True)
    log_p = z - xp.log(xp.sum(xp.exp(z), axis=1, keepdims=True))
    loss = -xp.sum(labels * log_p) / images.shape[0]
    dz = (xp.exp(log_p) - labels) / images.shape[0]
    dh = (dz @ weights[1].T)[:, :-1] * (1.0 - h[:, :-1] ** 2)
    return float(loss), [x.T @ dh, h.T @ dz]


def with_ones(rows, xp):
    """Return rows with a 1 appended to each."""
    return xp.concat([rows, xp.ones_like(rows[:, :1])], axis=1)
