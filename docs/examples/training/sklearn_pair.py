"""scikit-learn's perceptrons by Adam and by K-FAC, in about the same time.

Needs `pip install -e '.[sklearn,demo]'`.  Digits, with `MLPClassifier` and
`KFACClassifier`, and Friedman's first regression problem, with `MLPRegressor` and
`KFACRegressor`.  All have one hidden layer of 100 units and the same penalty.  Their
`EPOCHS` took about the same CPU time on one core; they are fixed, so that losses depend on
no clock.
Adam has the best of five learning rates, by the least training loss (`curves.best`),
measured with a seed of its own; K-FAC has its defaults.
"""

import argparse
import time
import warnings

import numpy as np
from curves import Curve, best, plot, table
from data import digits
from sklearn.datasets import make_friedman1
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import mean_squared_error
from sklearn.neural_network import MLPClassifier, MLPRegressor

from kfac_core_shims.sklearn import KFACClassifier, KFACRegressor

RATES = (0.0003, 0.001, 0.003, 0.01, 0.03)
EPOCHS = {
    "digits": {"K-FAC": 70, "Adam": 440},
    "regression": {"K-FAC": 100, "Adam": 380},
}


def problem(name):
    """Return the data, the two kinds of estimators, and the loss of one."""
    if name == "digits":
        images = digits()
        data = (
            images.train_inputs.reshape(-1, 64).astype(np.float64),
            images.train_targets,
            images.test_inputs.reshape(-1, 64).astype(np.float64),
            images.test_targets,
        )

        def entropy(model, X, y):
            p = model.predict_proba(X)[np.arange(len(y)), y]
            return float(-np.log(np.maximum(p, 1e-30)).mean())

        return data, {"Adam": MLPClassifier, "K-FAC": KFACClassifier}, entropy
    X, y = make_friedman1(3000, noise=0.1, random_state=0)
    X = (X - X.mean(axis=0)) / X.std(axis=0)
    y = (y - y.mean()) / y.std()
    data = X[:2000], y[:2000], X[2000:], y[2000:]

    def half_squares(model, X, y):
        return 0.5 * mean_squared_error(y, model.predict(X))

    return data, {"Adam": MLPRegressor, "K-FAC": KFACRegressor}, half_squares


def train(name, method, rate, *, epochs, seed):
    """Return the curve of one run; its steps are epochs."""
    (X, y, X_test, y_test), kinds, loss = problem(name)
    # With a number, `partial_fit` would take the batches of the first epoch each time.
    rng = np.random.RandomState(seed)
    if method == "Adam":
        curve = Curve(f"Adam ({rate:g})")
        model = kinds[method](learning_rate_init=rate, random_state=rng)
    else:
        curve = Curve("K-FAC")
        model = kinds[method](random_state=rng)
    labels = {"classes": np.arange(10)} if name == "digits" else {}
    spent, measured = 0.0, 1.0
    for epoch in range(1, epochs + 1):
        start = time.process_time()
        model.partial_fit(X, y, **labels)
        spent += time.process_time() - start
        if epoch >= measured or epoch == epochs:
            curve.add(epoch, spent, loss(model, X, y))
            measured = 1.02 * epoch
    curve.test = 1.0 - model.score(X_test, y_test)
    return curve


def runs(name, *, part=1.0, seeds=3):
    """Return the curves of K-FAC, and of Adam at its best learning rate."""
    epochs = {method: max(1, int(part * n)) for method, n in EPOCHS[name].items()}
    tried = {
        rate: [train(name, "Adam", rate, epochs=epochs["Adam"], seed=100)]
        for rate in RATES
    }
    rate = best(tried)
    return [
        train(name, method, rate, epochs=epochs[method], seed=seed)
        for method in ("K-FAC", "Adam")
        for seed in range(seeds)
    ]


def markdown(name, curves):
    """Return the table of a problem; its steps are epochs."""
    # Of 360 test images one is 0.003, and which are mistaken hangs on the last digits.
    test, error = {
        "digits": ("test error", ".2f"),
        "regression": ("1 − R² of the test", ".4f"),
    }[name]
    markdown = table(curves, test=test, loss=".1e", error=error)
    return markdown.replace("steps", "epochs").replace("method", name, 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a tenth of the epochs")
    parser.add_argument("--output", default="sklearn_{}.png")
    options = parser.parse_args()
    warnings.simplefilter("ignore", ConvergenceWarning)
    for name in EPOCHS:
        part = 0.1 if options.quick else 1.0
        curves = runs(name, part=part, seeds=options.seeds)
        print(f"{markdown(name, curves)}\n")
        plot(
            curves,
            options.output.format(name),
            title=f"scikit-learn, {name}",
            steps="epochs",
        )


if __name__ == "__main__":
    main()
