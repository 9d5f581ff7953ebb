"""Laplace's approximation for a small regression: evidence, and predictive bands.

A network with one hidden layer is fitted to a noisy curve with a gap, for several
precisions tau of the prior, the largest first, each from the mode of the one before.  The
modes are least-squares problems, solved by Levenberg and Marquardt's method until nothing
moves: the numbers below are those of the modes, and of no path to them.

K-FAC, EKFAC and the whole block of each layer give the log-marginal likelihood at each
tau, and the standard deviation of the prediction at the best one, beside the dense
Gauss-Newton matrix of the whole network, whose layers are not independent.  Run it by

    python docs/examples/laplace.py
    python docs/examples/laplace.py --output bands.png

Only NumPy computes; SciPy minimizes, and Matplotlib draws.
"""

import argparse

import numpy as np
from scipy.optimize import least_squares

import kfac_core as kc
from kfac_core.posterior import Posterior

NOISE = 0.01
NAMES = ("hidden", "output")
KINDS = {"K-FAC": kc.Kronecker(), "EKFAC": kc.EKFAC(), "whole blocks": kc.Full()}
WHOLE = "whole network"


def curve(x):
    """Return the curve that is to be learned."""
    return np.sin(2.0 * x) + 0.3 * x


def data(count, seed):
    """Return noisy values of the curve on both sides of a gap."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(0.5, 2.0, size=(count, 1)) * rng.choice(
        [-1.0, 1.0], size=(count, 1)
    )
    return x, curve(x) + np.sqrt(NOISE) * rng.normal(size=x.shape)


def forward(weights, x):
    """Return the inputs of both layers, and the prediction."""
    h = np.tanh(x @ weights[0][:-1] + weights[0][-1])
    return (x, h), h @ weights[1][:-1] + weights[1][-1]


def backward(weights, inputs, vectors):
    """Return vectors at the network's output, brought back to each layer's output."""
    h = inputs[1]
    return (vectors @ weights[1][:-1].T * (1.0 - h * h), vectors)


def start(hidden):
    """Return weights to start from: steps all over the data, of which none is used."""
    centers = np.linspace(-2.0, 2.0, hidden)
    return [np.stack([np.ones(hidden), -centers]), np.zeros((hidden + 1, 1))]


def fitted(weights, x, y, tau):
    """Return the mode of the posterior, from weights to start from."""
    shapes = [W.shape for W in weights]
    split = weights[0].size

    def unpacked(flat):
        return [flat[:split].reshape(shapes[0]), flat[split:].reshape(shapes[1])]

    def residuals(flat):
        errors = forward(unpacked(flat), x)[1] - y
        return np.concatenate([errors[:, 0] / np.sqrt(NOISE), np.sqrt(tau) * flat])

    def derivatives(flat):
        J = jacobian(unpacked(flat), x)
        return np.vstack([J / np.sqrt(NOISE), np.sqrt(tau) * np.eye(len(flat))])

    flat = np.concatenate([W.ravel() for W in weights])
    options = {"xtol": 1e-14, "ftol": 1e-14, "gtol": 1e-14, "max_nfev": 5000}
    solution = least_squares(residuals, flat, derivatives, method="lm", **options)
    return unpacked(solution.x)


def rows(weights, x):
    """Return each layer's inputs, and the output's derivatives as one source.

    They are the layers' rows of J, and at the same time those of the curvature of half
    the squared error, whose Hessian is 1.
    """
    inputs, f = forward(weights, x)
    grads = backward(weights, inputs, np.ones_like(f))
    return {
        name: kc.Batch(a, g[None, ...], sources=1)
        for name, a, g in zip(NAMES, inputs, grads, strict=True)
    }


def posterior_of(kind, weights, x, tau):
    """Return the posterior about trained weights, of one kind of curvature."""
    seen, blocks, statistics = rows(weights, x), {}, {}
    conventions = kc.Conventions(reduction="sum", sources="sum")
    for name, W in zip(NAMES, weights, strict=True):
        layer = kc.Dense(
            in_features=W.shape[0] - 1,
            out_features=W.shape[1],
            bias=True,
            weight_layout="io",
        )
        block = blocks[name] = kc.Block(layer, kind)
        moments = kc.batch_moments(block, seen[name], conventions=conventions)
        if isinstance(kind, kc.EKFAC):
            moments = kc.rebase_block(block, moments, "zero", "raise")
            moments = kc.update_block(
                block,
                moments,
                seen[name],
                kc.UpdateOptions(conventions=conventions, decay=0.0),
            )
        statistics[name] = moments
    # The curvature is that of half the squared error: the noise comes with N.
    return Posterior.of_statistics(
        blocks, statistics, examples=len(x) / NOISE, prior_precision=tau
    )


def evidence_of(posterior, weights, x, y):
    """Return the terms of the log-marginal likelihood."""
    residuals = y - forward(weights, x)[1]
    log_likelihood = -0.5 * np.sum(residuals**2 / NOISE + np.log(2.0 * np.pi * NOISE))
    parameters = {
        name: {"weight": W[:-1], "bias": W[-1]}
        for name, W in zip(NAMES, weights, strict=True)
    }
    return posterior.evidence(log_likelihood, parameters, prior_mean=0.0)


def dense_evidence(weights, x, y, tau):
    """Return the log-marginal likelihood with the whole network's dense matrix."""
    J, residuals = jacobian(weights, x), y - forward(weights, x)[1]
    flat = np.concatenate([W.ravel() for W in weights])
    log_likelihood = -0.5 * np.sum(residuals**2 / NOISE + np.log(2.0 * np.pi * NOISE))
    logdet = np.linalg.slogdet(np.eye(len(flat)) + J.T @ J / (NOISE * tau))[1]
    return float(log_likelihood - 0.5 * (tau * flat @ flat + logdet))


def dense_variance(weights, x, tau, grid):
    """Return the predictive variance with the whole network's dense matrix."""
    J, J_grid = jacobian(weights, x), jacobian(weights, grid)
    P = J.T @ J / NOISE + tau * np.eye(J.shape[1])
    return np.sum(J_grid * np.linalg.solve(P, J_grid.T).T, axis=1)


def jacobian(weights, x):
    """Return the derivatives of the prediction by all weights, (N, P)."""
    parts = []
    for batch in rows(weights, x).values():
        a = np.concatenate([batch.inputs, np.ones((len(x), 1))], axis=1)
        parts.append(
            (a[:, :, None] * batch.output_grads[0][:, None, :]).reshape(len(x), -1)
        )
    return np.concatenate(parts, axis=1)


def run(*, examples, hidden, taus, seed=0):
    """Return the evidence of each kind and tau, and bands at each kind's best tau."""
    x, y = data(examples, seed)
    weights, modes = start(hidden), {}
    for tau in sorted(taus, reverse=True):
        weights = modes[tau] = fitted(weights, x, y, tau)
    evidence = {kind: [] for kind in (*KINDS, WHOLE)}
    for tau in taus:
        weights = modes[tau]
        for name, kind in KINDS.items():
            posterior = posterior_of(kind, weights, x, tau)
            terms = evidence_of(posterior, weights, x, y)
            evidence[name].append(float(terms.log_marginal_likelihood))
        evidence[WHOLE].append(dense_evidence(weights, x, y, tau))
    grid = np.linspace(-4.0, 4.0, 161)[:, None]
    bands = {}
    for name, values in evidence.items():
        best = taus[int(np.argmax(values))]
        mode = modes[best]
        if name == WHOLE:
            variance = dense_variance(mode, x, best, grid)
        else:
            posterior = posterior_of(KINDS[name], mode, x, best)
            variance = posterior.functional_variance(rows(mode, grid))[:, 0]
        bands[name] = best, forward(mode, grid)[1][:, 0], np.sqrt(variance + NOISE)
    return (x, y), grid[:, 0], evidence, bands


def draw(path, points, grid, bands):
    """Write a picture of the bands."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.0, 3.2), layout="constrained")
    for i, (name, (tau, mean, deviation)) in enumerate(bands.items()):
        axes = figure.add_subplot(1, len(bands), i + 1)
        axes.fill_between(
            grid, mean - 2 * deviation, mean + 2 * deviation, color="C0", alpha=0.25
        )
        axes.plot(grid, mean, color="C0")
        axes.plot(grid, curve(grid), color="black", linewidth=0.8, linestyle="--")
        axes.plot(points[0][:, 0], points[1][:, 0], ".", color="black", markersize=4)
        axes.set(title=f"{name}, tau = {tau:g}", ylim=(-4.0, 4.0), xlabel="x")
    figure.savefig(path, dpi=120)


def main():
    """Print the evidence and the bands; write the picture where one is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", help="where to write a picture")
    path = parser.parse_args().output
    taus = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
    points, grid, evidence, bands = run(examples=60, hidden=16, taus=taus)
    print("log-marginal likelihood")
    print(f"{'tau':>14}" + "".join(f"{tau:9g}" for tau in taus))
    for name, values in evidence.items():
        print(f"{name:>14}" + "".join(f"{value:9.2f}" for value in values))
    print("\nstandard deviation of the prediction, at the best tau")
    places = (-4.0, -1.25, 0.0, 1.25, 4.0)
    print(f"{'x':>14}" + "".join(f"{place:9g}" for place in places) + f"{'tau':>9}")
    for name, (tau, _, deviation) in bands.items():
        deviations = np.interp(places, grid, deviation)
        print(f"{name:>14}" + "".join(f"{s:9.3f}" for s in deviations) + f"{tau:9g}")
    if path is not None:
        draw(path, points, grid, bands)
        print(f"\nwrote {path}")


if __name__ == "__main__":
    main()
