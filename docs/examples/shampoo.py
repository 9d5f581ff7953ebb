"""Shampoo: W <- W - a L^(-1/4) V R^(-1/4), with L and R sums of V V^T and V^T V.

Gupta, Koren and Singer (2018), arXiv:1802.09568, algorithm 1.  Run it by

    python docs/examples/shampoo.py
    KFAC_CORE_BACKEND=torch python docs/examples/shampoo.py
"""

import array_api_compat
import numpy as np
from sklearn.datasets import load_digits

import kfac_core as kc

LEARNING_RATE, DAMPING, REFRESH = 0.1, 1e-3, 5


def load(seed=0):
    """Return images, one-hot labels and weights (in + 1, out), biases last."""
    images, labels = load_digits(return_X_y=True)
    rng = np.random.default_rng(seed)
    weights = [rng.normal(size=(n, m)) / n**0.5 for n, m in ((65, 32), (33, 10))]
    arrays = images / 16, np.eye(10)[labels], *weights
    images, labels, *weights = (kc.asarray(a.astype(np.float32)) for a in arrays)
    return images, labels, weights


def loss_and_gradients(weights, images, labels):
    """Return the mean cross-entropy of a tanh network, and its gradient for each weight."""
    xp = array_api_compat.array_namespace(images)
    one = xp.ones_like(images[:, :1])
    x = xp.concat([images, one], axis=1)
    h = xp.concat([xp.tanh(x @ weights[0]), one], axis=1)
    z = h @ weights[1]
    z = z - xp.max(z, axis=1, keepdims=True)
    log_p = z - xp.log(xp.sum(xp.exp(z), axis=1, keepdims=True))
    dz = (xp.exp(log_p) - labels) / images.shape[0]
    dh = (dz @ weights[1].T)[:, :-1] * (1 - h[:, :-1] ** 2)
    return -float(xp.sum(labels * log_p)) / images.shape[0], [x.T @ dh, h.T @ dz]


def train(steps):
    """Train for a number of steps; return the loss on all digits before and after."""
    images, labels, weights = load()
    rows = np.random.default_rng(1)
    factors = [kc.roots.GradientFactors(shape=tuple(W.shape)) for W in weights]
    statistics = [f.initial(W) for f, W in zip(factors, weights, strict=True)]
    roots = [()] * len(weights)
    before, _ = loss_and_gradients(weights, images, labels)

    for step in range(steps):
        start = 256 * int(rows.integers(7))
        batch = slice(start, start + 256)
        loss, gradients = loss_and_gradients(
            weights, images[batch, :], labels[batch, :]
        )
        for i, V in enumerate(gradients):
            statistics[i] = factors[i].updated(statistics[i], V, decay=1.0)
            if step % REFRESH == 0:
                roots[i] = [
                    kc.roots.inverse_root(F, damping=DAMPING, degree=4).matrix.full()
                    for F in factors[i].values(statistics[i], debias=False)
                ]
            direction = kc.linalg.kronecker_multiply(roots[i], V)
            weights[i] = weights[i] - LEARNING_RATE * direction
        if step % 20 == 0:
            print(f"step {step:4d}  loss {loss:.4f}")

    after, _ = loss_and_gradients(weights, images, labels)
    print(f"all digits: {before:.4f} before, {after:.4f} after {steps} steps")
    return before, after


if __name__ == "__main__":
    train(steps=100)
