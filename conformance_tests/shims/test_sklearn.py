"""The scikit-learn estimators: scikit-learn's own checks, and optima found elsewhere."""

from __future__ import annotations

import copy
import io
import pickle
import unittest

import numpy as np
import pytest

pytest.importorskip("sklearn")

from scipy.sparse import csr_matrix
from sklearn.base import clone
from sklearn.datasets import load_digits, make_classification, make_regression
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.neural_network import MLPClassifier
from sklearn.utils.estimator_checks import estimator_checks_generator

from kfac_core_shims.sklearn import KFACClassifier, KFACRegressor, _Batch

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


def checks_of_scikit_learn():
    """Return its checks; it has one of them twice, so that each has a number."""
    found = []
    for own in (KFACClassifier(), KFACRegressor()):
        for k, (estimator, check) in enumerate(estimator_checks_generator(own)):
            whole = getattr(check, "func", check)
            name = f"{type(own).__name__}-{whole.__name__}-{k}"
            found.append(pytest.param(estimator, check, id=name))
    return found


@pytest.mark.parametrize(("estimator", "check"), checks_of_scikit_learn())
def test_conventions_of_scikit_learn(estimator, check):
    try:
        check(estimator)
    except unittest.SkipTest as reason:
        pytest.skip(str(reason))


def clusters(classes, *, n=60, seed=0):
    """Return overlapping clusters of points and their labels."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, n)
    centers = rng.normal(size=(classes, 3))
    return centers[y] + rng.normal(size=(n, 3)), y


EXACTLY = {"hidden_layer_sizes": (), "tol": 0.0, "random_state": 0, "max_iter": 60}


@pytest.mark.parametrize("outputs", [1, 2])
def test_without_hidden_layers_it_is_ridge_regression(outputs):
    """With sample weights; the bias is not penalized."""
    rng = np.random.default_rng(1)
    X, w = rng.normal(size=(30, 4)), rng.uniform(0.1, 2.0, 30)
    Y = X @ rng.normal(size=(4, outputs)) + 3.0 + rng.normal(size=(30, outputs))
    y = Y[:, 0] if outputs == 1 else Y

    model = KFACRegressor(alpha=0.7, **EXACTLY).fit(X, y, sample_weight=w)

    expected = Ridge(alpha=0.7).fit(X, Y, sample_weight=w)
    weights = np.reshape(expected.coef_, (outputs, 4)).T
    np.testing.assert_allclose(model.coefs_[0], weights, rtol=1e-6)
    np.testing.assert_allclose(model.intercepts_[0], expected.intercept_, rtol=1e-6)
    residual = Y - X @ model.coefs_[0] - model.intercepts_[0]
    loss = 0.5 * np.sum(w[:, None] * residual**2) + 0.35 * np.sum(model.coefs_[0] ** 2)
    np.testing.assert_allclose(model.loss_, loss / w.sum(), rtol=1e-9)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("fisher", ["exact", "gradients"])
def test_without_hidden_layers_it_is_logistic_regression(classes, fisher):
    """With sample weights, of one logistic output or of a softmax."""
    X, y = clusters(classes)
    w = np.random.default_rng(2).uniform(0.1, 2.0, len(y))

    model = KFACClassifier(alpha=0.5, fisher=fisher, **EXACTLY)
    model.fit(X, y, sample_weight=w)

    reference = LogisticRegression(C=2.0, tol=1e-10, max_iter=1000)
    reference.fit(X, y, sample_weight=w)
    np.testing.assert_allclose(
        model.predict_proba(X), reference.predict_proba(X), atol=1e-5
    )
    np.testing.assert_allclose(
        np.exp(model.predict_log_proba(X)), model.predict_proba(X)
    )


def test_several_labels_are_as_many_logistic_regressions():
    X, _ = clusters(2)
    Y = (X @ np.random.default_rng(3).normal(size=(3, 2)) + X[:, :2] > 0).astype(int)

    model = KFACClassifier(alpha=0.5, **EXACTLY).fit(X, Y)

    for label in range(2):
        one = LogisticRegression(C=2.0, tol=1e-10).fit(X, Y[:, label])
        np.testing.assert_allclose(
            model.predict_proba(X)[:, label], one.predict_proba(X)[:, 1], atol=1e-5
        )
    assert np.array_equal(model.predict(X).shape, Y.shape)


@pytest.mark.parametrize("activation", ["identity", "logistic", "tanh", "relu"])
def test_derivatives_are_those_of_the_network_that_predicts(activation):
    """``J d`` and ``J^T v`` of a fitted network, by central differences of its outputs."""
    X, _ = clusters(3, n=7)
    y = np.random.default_rng(7).normal(size=(7, 2))
    model = KFACRegressor((5, 4), activation, max_iter=1, random_state=1).fit(X, y)
    activations = model._forward_pass([X, None, None, None])
    batch = _Batch(model, activations, y, None)
    rng = np.random.default_rng(8)
    start = [W.copy() for W in (*model.coefs_, *model.intercepts_)]
    change = [rng.normal(size=W.shape) for W in start]
    direction = [np.vstack(pair) for pair in zip(change[:3], change[3:], strict=True)]
    v = rng.normal(size=(3, 7, 2))

    derivative = batch.output_change(direction)
    back = batch.backward(v)

    np.testing.assert_allclose(batch.z, model.predict(X), rtol=1e-12)
    outputs = []
    for sign in (1, -1):
        parameters = (*model.coefs_, *model.intercepts_)
        for W, before, d in zip(parameters, start, change, strict=True):
            W[...] = before + sign * 1e-6 * d
        outputs.append(model.predict(X))
    difference = (outputs[0] - outputs[1]) / 2e-6
    np.testing.assert_allclose(derivative, difference, rtol=1e-6, atol=1e-7)
    pulled = sum(
        np.einsum("ni,mno,io->m", x, g, d)
        for x, g, d in zip(batch.inputs, back, direction, strict=True)
    )
    np.testing.assert_allclose(pulled, np.einsum("mno,no->m", v, derivative), rtol=1e-9)


def test_epochs_one_by_one_are_those_of_fit():
    """To the bit, through a pickle, and with labels that a first part lacks."""
    X, y = clusters(3)
    options = {"random_state": 5, "batch_size": 25, "tol": 0.0, "shuffle": False}
    whole = KFACClassifier(max_iter=4, **options).fit(X, y)
    parts = KFACClassifier(**options)
    for _ in range(4):
        parts.partial_fit(X, y, classes=[0, 1, 2])
        parts = pickle.loads(pickle.dumps(parts))

    for one, other in zip(whole.coefs_, parts.coefs_, strict=True):
        assert np.array_equal(one, other)
    assert whole.loss_curve_ == parts.loss_curve_
    first = KFACClassifier(**options)
    first.partial_fit(X[y < 2], y[y < 2], classes=[0, 1, 2])
    assert first.predict_proba(X).shape == (60, 3)
    with pytest.raises(ValueError, match="classes"):
        first.partial_fit(X, y + 1)


def test_a_warm_start_goes_on():
    X, y = clusters(3)
    model = KFACClassifier(warm_start=True, max_iter=3, random_state=0).fit(X, y)
    last = model.loss_
    model.fit(X, y)

    assert len(model.loss_curve_) == 6
    assert model.loss_curve_[3] < last
    for other in (y + 1, np.minimum(y, 1), np.maximum(y, 1)):
        with pytest.raises(ValueError, match="classes"):
            model.fit(X, other)


def _in_a_file_of_joblib(model):
    joblib = pytest.importorskip("joblib")
    file = io.BytesIO()
    joblib.dump(model, file)
    file.seek(0)
    return joblib.load(file)


@pytest.mark.parametrize(
    "copied",
    [_in_a_file_of_joblib, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))],
)
def test_a_copy_goes_on_training(copied):
    """What is trained is what predicts: joblib makes two arrays of one."""
    X, y = clusters(3)
    model = KFACClassifier((5,), random_state=0).partial_fit(X, y, classes=range(3))
    other = copied(model)
    before = [W.copy() for W in other.coefs_]
    for _ in range(3):
        model.partial_fit(X, y)
        other.partial_fit(X, y)

    for W, found, old in zip(model.coefs_, other.coefs_, before, strict=True):
        np.testing.assert_array_equal(W, found)
        assert not np.array_equal(found, old)


def test_early_stopping_keeps_the_best_parameters():
    """Of labels that are mostly noise, so that the validation score falls again."""
    rng = np.random.default_rng(6)
    X, y = rng.normal(size=(80, 5)), rng.integers(0, 2, 80)
    model = KFACClassifier(
        early_stopping=True, validation_fraction=0.3, random_state=0, max_iter=50
    )

    model.fit(X, y)

    scores = model.validation_scores_
    assert model.best_validation_score_ == max(scores)
    best = int(np.argmax(scores)) + 1
    assert best < model.n_iter_
    until = clone(model).set_params(max_iter=best).fit(X, y)
    for one, other in zip(model.coefs_, until.coefs_, strict=True):
        assert np.array_equal(one, other)
    assert model.best_loss_ is None
    assert len(scores) == model.n_iter_ < 50
    with pytest.raises(ValueError, match="early_stopping"):
        model.partial_fit(X, y)


def test_examples_of_weight_zero_are_as_if_absent():
    """In batches too, some of which have no weight at all."""
    X, y = clusters(2, n=40)
    w = np.repeat([1.0, 0.0], 20)
    options = {"shuffle": False, "batch_size": 20, "random_state": 0, "max_iter": 5}

    weighted = KFACClassifier(**options).fit(X, y, sample_weight=w)

    alone = KFACClassifier(**options).fit(X[:20], y[:20])
    np.testing.assert_allclose(
        weighted.predict_proba(X), alone.predict_proba(X), rtol=1e-9
    )


def test_a_few_epochs_go_further_than_those_of_adam():
    """On digits, after 8 epochs each; both losses are of the same objective."""
    X, y = load_digits(return_X_y=True)
    options = {"max_iter": 8, "random_state": 0}
    adam = MLPClassifier(**options).fit(X / 16, y)
    kfac = KFACClassifier(fisher="gradients", **options).fit(X / 16, y)

    assert kfac.loss_ < 0.2 * adam.loss_


def test_labels_in_a_sparse_matrix_are_predicted_in_one():
    """They came back as one object without a shape, which no score compares."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 3))
    y = (X > 0).astype(int)
    options = {"random_state": 0, "max_iter": 10}
    dense = KFACClassifier((4,), **options).fit(X, y)
    model = KFACClassifier((4,), **options).fit(X, csr_matrix(y))

    found = model.predict(X)

    assert found.shape == (60, 3)
    np.testing.assert_array_equal(found.toarray(), dense.predict(X))
    assert model.score(X, csr_matrix(y)) == dense.score(X, y) > 0.2


@pytest.mark.parametrize(("seed", "n"), [(0, 200), (2, 100)])
def test_steps_that_are_undone_end_no_run(seed, n):
    """The damping rose so slowly that twelve epochs left the initial parameters.

    The reference is the loss without inputs, the entropy of the labels' frequencies.
    """
    X, y = make_classification(n, 8, n_informative=5, n_classes=3, random_state=seed)
    frequencies = np.bincount(y) / n
    entropy = -np.sum(frequencies * np.log(frequencies))

    model = KFACClassifier((8,), random_state=0).fit(X, y)

    assert model.loss_curve_[0] > entropy
    assert model.loss_ < 0.5 * entropy


@pytest.mark.parametrize("activation", ["identity", "relu"])
@pytest.mark.parametrize("seed", [1, 2])
def test_targets_of_a_large_scale_are_learned(activation, seed):
    """The linear function without noise; the run ended where it had begun, R^2 -0.005."""
    X, Y = make_regression(n_samples=200, n_targets=5, random_state=11)

    model = KFACRegressor(50, activation, random_state=seed).fit(X, Y)

    assert model.score(X, Y) > 0.999
    assert model.loss_curve_[-1] < 1e-3 * model.loss_curve_[0]


@pytest.mark.parametrize("kind", [KFACClassifier, KFACRegressor])
def test_sparse_inputs_are_those_of_dense_ones(kind):
    X, y = clusters(2)
    X = np.where(X > 0, X, 0.0)
    options = {"random_state": 0, "max_iter": 5, "batch_size": 25}
    dense, sparse = kind(**options).fit(X, y), kind(**options).fit(csr_matrix(X), y)

    for one, other in zip(dense.coefs_, sparse.coefs_, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9)
    np.testing.assert_allclose(dense.predict(X), sparse.predict(csr_matrix(X)))
