"""KL-Shampoo: W <- W - a S^(-1/2) V T^(-1/2), where S and T whiten each other.

S is an average of V T^-1 V^T / n and T one of V^T S^-1 V / m: the Kronecker product
nearest to the gradients' covariance in Kullback-Leibler divergence.  Lin et al. (2025),
arXiv:2509.03378.  Run it by

    python docs/examples/kl_shampoo.py
"""

import numpy as np
from digits import Digits, loss_and_gradients

import kfac_core as kc

LEARNING_RATE, DAMPING, DECAY, REFRESH = 0.02, 1e-3, 0.9, 2


def scaled_identities(V):
    """Return the roots of S and T that are multiples of I, for one gradient."""
    scale = np.mean(kc.to_numpy(V) ** 2) ** -0.25
    return [kc.asarray(scale * np.eye(n, dtype=np.float32)) for n in V.shape]


def train(steps):
    """Train for a number of steps; return the loss on all digits before and after."""
    task = Digits()
    weights = task.weights
    factors = [kc.roots.GradientFactors(shape=tuple(W.shape)) for W in weights]
    statistics = [f.initial(W) for f, W in zip(factors, weights, strict=True)]
    roots = [()] * len(weights)
    before, _ = loss_and_gradients(weights, *task.all())

    for step in range(steps):
        loss, gradients = loss_and_gradients(weights, *task.batch())
        for i, V in enumerate(gradients):
            if step == 0:
                roots[i] = scaled_identities(V)
            statistics[i] = factors[i].updated(
                statistics[i], V, decay=DECAY, roots=roots[i]
            )
            if step % REFRESH == 0:
                roots[i] = [
                    kc.roots.inverse_root(F, damping=DAMPING, degree=2).matrix.full()
                    for F in factors[i].values(statistics[i], debias=True)
                ]
            direction = kc.linalg.kronecker_multiply(roots[i], V)
            weights[i] = weights[i] - LEARNING_RATE * direction
        if step % 20 == 0:
            print(f"step {step:4d}  loss {loss:.4f}")

    after, _ = loss_and_gradients(weights, *task.all())
    print(f"all digits: {before:.4f} before, {after:.4f} after {steps} steps")
    return before, after


if __name__ == "__main__":
    train(steps=100)
