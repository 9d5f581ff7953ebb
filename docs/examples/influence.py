"""Influence of training examples, against retraining without each of them.

A network with one hidden layer tells three digits apart.  It is trained to convergence,
then again without each training example in turn, and the change of each query's loss is
compared with what the influence scores predict: the mean over the queries of Spearman's
rank correlation over the examples.  Run it by

    python docs/examples/influence.py
    python docs/examples/influence.py --quick

Only NumPy computes; SciPy minimizes, and scikit-learn has the digits.
"""

import argparse

import numpy as np
from scipy.optimize import minimize
from scipy.stats import spearmanr
from sklearn.datasets import load_digits

import kfac_core as kc
from kfac_core.influence import Influence

DIGITS, HIDDEN, WEIGHT_DECAY = (3, 5, 8), 8, 1e-2
NAMES = ("hidden", "output")
SHAPES = ((17, HIDDEN), (HIDDEN + 1, len(DIGITS)))


def digits(count, queries, seed):
    """Return training examples and queries: 4 by 4 pixels and one-hot labels."""
    images, labels = load_digits(return_X_y=True)
    chosen = np.isin(labels, DIGITS)
    small = images[chosen].reshape(-1, 4, 2, 4, 2).mean(axis=(2, 4)).reshape(-1, 16)
    targets = (labels[chosen][:, None] == DIGITS).astype(float)
    order = np.random.default_rng(seed).permutation(len(small))[: count + queries]
    x, y = small[order] / 16.0, targets[order]
    return (x[:count], y[:count]), (x[count:], y[count:])


def forward(weights, x):
    """Return the inputs of both layers and the log-probabilities."""
    h = np.tanh(x @ weights[0][:-1] + weights[0][-1])
    z = h @ weights[1][:-1] + weights[1][-1]
    z = z - z.max(axis=1, keepdims=True)
    return (x, h), z - np.log(np.exp(z).sum(axis=1, keepdims=True))


def backward(weights, inputs, vectors):
    """Return vectors at the network's outputs, brought back to each layer's outputs."""
    h = inputs[1]
    return (vectors @ weights[1][:-1].T * (1.0 - h * h), vectors)


def losses(weights, x, y):
    """Return the cross-entropy of each example."""
    return -np.sum(y * forward(weights, x)[1], axis=1)


def trained(start, x, y, importance):
    """Minimize the weighted sum of losses and the weight decay; return the weights."""

    def objective(flat):
        weights = unpacked(flat)
        inputs, log_p = forward(weights, x)
        dz = (np.exp(log_p) - y) * importance[:, None]
        grads = [
            np.vstack([a.T @ g, g.sum(axis=0)])
            for a, g in zip(inputs, backward(weights, inputs, dz), strict=True)
        ]
        loss = -np.sum(importance * np.sum(y * log_p, axis=1))
        decay = 0.5 * WEIGHT_DECAY * flat @ flat
        return loss + decay, packed(grads) + WEIGHT_DECAY * flat

    options = {"maxiter": 10_000, "maxfun": 20_000, "gtol": 1e-9, "ftol": 1e-15}
    minimum = minimize(
        objective, packed(start), jac=True, method="L-BFGS-B", options=options
    )
    return unpacked(minimum.x)


def packed(weights):
    """Return all weights as one vector."""
    return np.concatenate([W.ravel() for W in weights])


def unpacked(flat):
    """Return one vector as weights."""
    first = SHAPES[0][0] * SHAPES[0][1]
    return [flat[:first].reshape(SHAPES[0]), flat[first:].reshape(SHAPES[1])]


def retrained_changes(weights, train, query):
    """Return how each query's loss changes without each example, (queries, examples)."""
    x, y = train
    before, changes = losses(weights, *query), []
    for n in range(len(x)):
        importance = np.full(len(x), 1.0 / len(x))
        importance[n] = 0.0
        without = trained(weights, x, y, importance)
        changes.append(losses(without, *query) - before)
    return np.stack(changes, axis=1)


def gradients(weights, x, y):
    """Return what each layer saw, with the gradients of each example's own loss."""
    inputs, log_p = forward(weights, x)
    grads = backward(weights, inputs, np.exp(log_p) - y)
    return {
        name: kc.Batch(a, g) for name, a, g in zip(NAMES, inputs, grads, strict=True)
    }


def gauss_newton_batches(weights, x):
    """Return what each layer saw, with a root of the loss's Hessian as sources."""
    inputs, log_p = forward(weights, x)
    p, C = np.exp(log_p), len(DIGITS)
    roots = np.stack([np.sqrt(p[:, c, None]) * (np.eye(C)[c] - p) for c in range(C)])
    grads = backward(weights, inputs, roots)
    return {
        name: kc.Batch(a, g, sources=C)
        for name, a, g in zip(NAMES, inputs, grads, strict=True)
    }


def kfac_scores(weights, train, query, *, eigenvalues_corrected, **damping):
    """Return the scores by K-FAC or by EKFAC, (queries, examples)."""
    batches = gauss_newton_batches(weights, train[0])
    conventions = kc.Conventions(reduction="sum", sources="sum")
    blocks, statistics = {}, {}
    for name, (n, m) in zip(NAMES, SHAPES, strict=True):
        layer = kc.Dense(
            in_features=n - 1, out_features=m, bias=True, weight_layout="io"
        )
        kind = kc.EKFAC() if eigenvalues_corrected else kc.Kronecker()
        block = blocks[name] = kc.Block(layer, kind)
        seen = kc.batch_moments(block, batches[name], conventions=conventions)
        if eigenvalues_corrected:
            # The bases of the factors, and then the second moments in them.
            rebased = kc.rebase_block(block, seen, "zero", "raise")
            seen = kc.update_block(
                block,
                rebased,
                batches[name],
                kc.UpdateOptions(conventions=conventions, decay=0.0),
            )
        statistics[name] = seen
    influence = Influence.of_statistics(blocks, statistics, **damping)
    queries = influence.precondition(
        gradients(weights, *query),
        reduction="sum",
        storage="float32",
        max_elements=10**6,
    )
    return influence.scores(
        queries, gradients(weights, *train), reduction="sum", max_elements=10**6
    )


def dense_scores(weights, train, query, *, whole):
    """Return the scores by the dense Gauss-Newton matrix, or by its diagonal blocks."""
    J = flat_gradients(gauss_newton_batches(weights, train[0]))
    F = np.einsum("cnp,cnr->pr", J, J) / len(train[0])
    if not whole:
        first = SHAPES[0][0] * SHAPES[0][1]
        F[:first, first:] = F[first:, :first] = 0.0
    damped = F + WEIGHT_DECAY * np.eye(len(F))
    g_q, g_n = (flat_gradients(gradients(weights, *part))[0] for part in (query, train))
    return g_q @ np.linalg.solve(damped, g_n.T)


def flat_gradients(batches):
    """Return each source's and example's gradient of all weights, (sources, N, P)."""
    parts = []
    for batch in batches.values():
        x = np.concatenate([batch.inputs, np.ones((len(batch.inputs), 1))], axis=1)
        g = np.reshape(batch.output_grads, (-1, len(x), batch.output_grads.shape[-1]))
        D = x[None, :, :, None] * g[:, :, None, :]
        parts.append(D.reshape(len(g), len(x), -1))
    return np.concatenate(parts, axis=-1)


def rank_correlation(predicted, actual):
    """Return the mean over the queries of Spearman's correlation over the examples."""
    pairs = zip(predicted, actual, strict=True)
    return float(np.mean([spearmanr(p, a).statistic for p, a in pairs]))


def correlations(*, examples, queries, seed=0):
    """Return each method's rank correlation with retraining, and `ratio`, by name."""
    train, query = digits(examples, queries, seed)
    rng = np.random.default_rng(seed)
    start = [rng.normal(size=shape) / shape[0] ** 0.5 for shape in SHAPES]
    importance = np.full(examples, 1.0 / examples)
    weights = trained(start, *train, importance)
    actual = retrained_changes(weights, train, query)

    case = weights, train, query
    g_q, g_n = (flat_gradients(gradients(weights, *part))[0] for part in (query, train))
    exact, relative = {"damping": WEIGHT_DECAY}, {"damping_fraction": 0.1}
    scores = {
        "Gauss-Newton, whole network": dense_scores(*case, whole=True),
        "Gauss-Newton, layer by layer": dense_scores(*case, whole=False),
        "EKFAC": kfac_scores(*case, eigenvalues_corrected=True, **exact),
        "K-FAC": kfac_scores(*case, eigenvalues_corrected=False, **exact),
        "EKFAC, 0.1 of the mean": kfac_scores(
            *case, eigenvalues_corrected=True, **relative
        ),
        "K-FAC, 0.1 of the mean": kfac_scores(
            *case, eigenvalues_corrected=False, **relative
        ),
        "gradients alone": g_q @ g_n.T,
    }
    return {
        # A score over N is the change that is predicted.
        name: (
            rank_correlation(predicted / examples, actual),
            ratio(predicted / examples, actual),
        )
        for name, predicted in scores.items()
    }


def ratio(predicted, actual):
    """Return the slope of the least-squares line through the origin."""
    return float(np.sum(predicted * actual) / np.sum(predicted * predicted))


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer examples")
    parser.add_argument("--seeds", type=int, default=1, help="how many runs to average")
    options = parser.parse_args()
    sizes = {"examples": 24, "queries": 10}
    if not options.quick:
        sizes = {"examples": 60, "queries": 40}
    runs = [correlations(**sizes, seed=seed) for seed in range(options.seeds)]
    print(
        f"{sizes['examples']} training examples, each left out once; "
        f"{sizes['queries']} queries; {options.seeds} seeds"
    )
    print(f"{'':30}{'rank correlation':>18}{'actual / predicted':>20}")
    for name in runs[0]:
        rho, slope = np.mean([run[name] for run in runs], axis=0)
        print(f"{name:30}{rho:18.3f}{slope:20.2f}")


if __name__ == "__main__":
    main()
