"""Shampoo: W <- W - a L^(-1/4) V R^(-1/4), with L and R sums of V V^T and V^T V.

Gupta, Koren and Singer (2018), arXiv:1802.09568, algorithm 1.  Run it by

    python docs/examples/shampoo.py
    KFAC_CORE_BACKEND=torch python docs/examples/shampoo.py
"""

from digits import Digits, loss_and_gradients

import kfac_core as kc

LEARNING_RATE, DAMPING, REFRESH = 0.1, 1e-3, 5


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

    after, _ = loss_and_gradients(weights, *task.all())
    print(f"all digits: {before:.4f} before, {after:.4f} after {steps} steps")
    return before, after


if __name__ == "__main__":
    train(steps=100)
