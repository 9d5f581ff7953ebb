"""SOAP: Adam in the eigenbasis of Shampoo's factors, which follows them by QR steps.

Vyas et al. (2024), arXiv:2409.11321, algorithm 3.  The momentum is kept in the weight's
own coordinates, the squares in the basis, whose columns they are permuted with.  Run it by

    python docs/examples/soap.py
    KFAC_CORE_BACKEND=jax python docs/examples/soap.py
"""

from array_api_compat import array_namespace
from digits import Digits, loss_and_gradients

from kfac_core.roots.gradient_side import GradientFactors
from kfac_core.roots.orthogonal_iteration import ordered_basis, refreshed_basis

LEARNING_RATE, BETA, BETA2, EPSILON, REFRESH = 0.02, 0.9, 0.95, 1e-8, 5


def train(steps):
    """Train for a number of steps; return the loss on all digits before and after."""
    task = Digits()
    weights = task.weights
    factors = [GradientFactors(shape=tuple(W.shape)) for W in weights]
    statistics = [f.initial(W) for f, W in zip(factors, weights, strict=True)]
    momentum, squares = [0 * W for W in weights], [0 * W for W in weights]
    bases = [()] * len(weights)
    before, _ = loss_and_gradients(weights, *task.all())

    for step in range(steps):
        loss, gradients = loss_and_gradients(weights, *task.batch())
        for i, V in enumerate(gradients):
            statistics[i] = factors[i].updated(statistics[i], V, decay=BETA2)
            values = factors[i].values(statistics[i], debias=True)
            if step == 0:
                bases[i] = [ordered_basis(F) for F in values]
            elif step % REFRESH == 0:
                pairs = zip(bases[i], values, strict=True)
                bases[i] = [refreshed_basis(basis, F) for basis, F in pairs]
                rows, columns = (basis.order for basis in bases[i])
                xp = array_namespace(squares[i])
                kept = xp.take(squares[i], rows, axis=0)
                squares[i] = xp.take(kept, columns, axis=1)
            left, right = (basis.eigenvectors for basis in bases[i])
            momentum[i] = BETA * momentum[i] + (1 - BETA) * V
            squares[i] = BETA2 * squares[i] + (1 - BETA2) * (left.T @ V @ right) ** 2
            m = left.T @ momentum[i] @ right / (1 - BETA ** (step + 1))
            v = squares[i] / (1 - BETA2 ** (step + 1))
            direction = left @ (m / (v**0.5 + EPSILON)) @ right.T
            weights[i] = weights[i] - LEARNING_RATE * direction
        if step % 20 == 0:
            print(f"step {step:4d}  loss {loss:.4f}")

    after, _ = loss_and_gradients(weights, *task.all())
    print(f"all digits: {before:.4f} before, {after:.4f} after {steps} steps")
    return before, after


if __name__ == "__main__":
    train(steps=100)
