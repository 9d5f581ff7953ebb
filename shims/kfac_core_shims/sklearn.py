"""Multilayer perceptrons trained by K-FAC, with the interface of scikit-learn.

`KFACClassifier` and `KFACRegressor` take the place of ``MLPClassifier`` and
``MLPRegressor``: the same networks, losses and attributes, trained by
`kfac_core_shims.numpy.KFAC` with the step of Martens and Grosse (2015): rate and momentum
minimize the exact quadratic model of a batch, and its damping follows the rule of
Levenberg and Marquardt, so that there is no learning rate to choose.

Conventions.  Activations ``a`` of n examples have a last column of ones, and a layer is one
matrix W of shape ``(in + 1, out)`` whose last row is the bias: ``z = a W``.  Sample weights
w are divided by their mean in the batch.  Rows of statistics are multiplied by ``sqrt(w)``,
so that an example of weight two counts as two examples.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from itertools import pairwise
from numbers import Integral, Real
from typing import Any, Literal, TypeAlias

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import accuracy_score, r2_score
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import LabelBinarizer
from sklearn.utils import check_random_state, gen_batches
from sklearn.utils.multiclass import type_of_target, unique_labels
from sklearn.utils.validation import (
    _check_sample_weight,
    check_is_fitted,
    column_or_1d,
    validate_data,
)

import kfac_core as kc
from kfac_core_shims.numpy import KFAC

__all__ = ["KFACClassifier", "KFACRegressor"]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

ACTIVATIONS: dict[str, Any] = {
    "identity": lambda z: z,
    "logistic": lambda z: 0.5 * (1.0 + np.tanh(0.5 * z)),
    "tanh": np.tanh,
    "relu": lambda z: np.maximum(z, 0),
}
# Of the activation's own value.
DERIVATIVES: dict[str, Any] = {
    "identity": np.ones_like,
    "logistic": lambda a: a * (1 - a),
    "tanh": lambda a: 1 - a * a,
    "relu": lambda a: (a > 0).astype(a.dtype),
}

_READ_AT_FIRST = (
    "hidden_layer_sizes",
    "activation",
    "early_stopping",
    "fisher",
    "damping",
    "decay",
    "update_every",
    "refresh_every",
)
"""Parameters that describe the network and its optimizer, which a run keeps."""


class _Network:
    """A multilayer perceptron: its matrices, and derivatives of its outputs."""

    def __init__(self, matrices: list[Array], activation: str) -> None:
        self.matrices, self.activation = matrices, activation

    def forward(self, X: Array) -> tuple[list[Array], Array]:
        """Return the inputs of each layer, with their column of ones, and the outputs."""
        inputs, z = [_with_ones(X)], X
        for i, W in enumerate(self.matrices):
            z = inputs[i] @ W
            if i < len(self.matrices) - 1:
                inputs.append(_with_ones(ACTIVATIONS[self.activation](z)))
        return inputs, z

    def backward(self, inputs: list[Array], g: Array) -> list[Array]:
        """Take vectors (..., n, outputs) back to the outputs z of each layer."""
        found = [g]
        for i in reversed(range(1, len(self.matrices))):
            slope = DERIVATIVES[self.activation](inputs[i][:, :-1])
            found.append((found[-1] @ self.matrices[i][:-1].T) * slope)
        return found[::-1]

    def output_change(self, inputs: list[Array], direction: list[Array]) -> Array:
        """Return ``J d``, the derivative of the outputs along a direction."""
        change = inputs[0] @ direction[0]
        for i in range(1, len(self.matrices)):
            change = change * DERIVATIVES[self.activation](inputs[i][:, :-1])
            change = change @ self.matrices[i][:-1] + inputs[i] @ direction[i]
        return change


class _Perceptron(BaseEstimator):  # type: ignore[misc]
    """What the classifier and the regressor have in common."""

    _likelihood: Any
    out_activation_: Any

    def __init__(
        self,
        hidden_layer_sizes: Any = (100,),
        activation: Literal["identity", "logistic", "tanh", "relu"] = "relu",
        *,
        alpha: float = 1e-4,
        batch_size: Any = "auto",
        max_iter: int = 200,
        shuffle: bool = True,
        random_state: Any = None,
        tol: float = 1e-4,
        verbose: bool = False,
        warm_start: bool = False,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 10,
        fisher: Literal["exact", "gradients"] = "exact",
        damping: float = 1e-3,
        decay: float = 0.95,
        update_every: int = 1,
        refresh_every: int = 10,
    ) -> None:
        self.hidden_layer_sizes = hidden_layer_sizes
        self.activation = activation
        self.alpha = alpha
        self.batch_size = batch_size
        self.max_iter = max_iter
        self.shuffle = shuffle
        self.random_state = random_state
        self.tol = tol
        self.verbose = verbose
        self.warm_start = warm_start
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.fisher = fisher
        self.damping = damping
        self.decay = decay
        self.update_every = update_every
        self.refresh_every = refresh_every

    @property
    def _matrices(self) -> list[Array]:
        """The arrays that the optimizer changes: a file may make copies of others."""
        return [held["weight"] for held in self._optimizer.parameters.values()]

    @property
    def coefs_(self) -> list[Array]:
        """Weight matrices of the layers, each of shape (inputs, outputs)."""
        return [W[:-1] for W in self._matrices]

    @property
    def intercepts_(self) -> list[Array]:
        """Biases of the layers."""
        return [W[-1] for W in self._matrices]

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Train the network.

        Parameters
        ----------
        X : array-like, shape (n_samples, n_features)
            Inputs.
        y : array-like, shape (n_samples,) or (n_samples, n_outputs)
            Targets.
        sample_weight : array-like, shape (n_samples,), optional
            Weights of the examples in the loss; all one by default.

        Returns
        -------
        self
            The fitted estimator.

        Raises
        ------
        ValueError
            For parameters out of range, and data that do not fit.
        """
        with self._restored_if_refused():
            return self._fit(X, y, sample_weight, incremental=False)

    @contextlib.contextmanager
    def _restored_if_refused(self) -> Iterator[None]:
        """Give all attributes back what they were, if an argument is refused."""
        held = dict(vars(self))
        try:
            yield
        except (TypeError, ValueError):
            self.__dict__.clear()
            self.__dict__.update(held)
            raise

    def _fit(self, X: Any, y: Any, sample_weight: Any, *, incremental: bool) -> Any:
        self._require_parameters()
        first = not hasattr(self, "_optimizer") or not (self.warm_start or incremental)
        if not first:
            self._require_unchanged()
        X, y = validate_data(
            self,
            X,
            y,
            multi_output=True,
            y_numeric=self._y_numeric,
            dtype=(np.float64, np.float32),
            reset=first,
        )
        if y.ndim == 2 and y.shape[1] == 1:
            y = column_or_1d(y, warn=True)
        targets = self._encoded(y, first, incremental).astype(X.dtype)
        if sample_weight is not None:
            sample_weight = _check_sample_weight(sample_weight, X, dtype=X.dtype)
            if (sample_weight < 0).any():
                raise ValueError("Expected `sample_weight` >= 0, got negative values.")
        if incremental and self.early_stopping:
            raise ValueError("partial_fit does not support early_stopping=True")
        # A state of its own: partial_fit goes on drawing where it was.
        if first or not incremental:
            self._random = check_random_state(self.random_state)
        if first:
            self._start(X, targets)
        elif targets.shape[1] != self.n_outputs_:
            raise ValueError(
                f"Expected y with {self.n_outputs_} outputs, as in the previous call to "
                f"fit, got {targets.shape[1]}."
            )
        self._train(X, targets, sample_weight, incremental=incremental)
        return self

    def _require_parameters(self) -> None:
        """Raise ValueError for parameters out of range."""
        for name, choices in (
            ("activation", tuple(ACTIVATIONS)),
            ("fisher", ("exact", "gradients")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"Expected `{name}` to be one of {choices}, got "
                    f"{getattr(self, name)!r}."
                )
        sizes = self._hidden_sizes()
        for name, valid, range_ in (
            ("alpha", _is_number(self.alpha) and self.alpha >= 0, "a number >= 0"),
            ("max_iter", _is_count(self.max_iter), "an integer >= 1"),
            ("tol", _is_number(self.tol) and self.tol >= 0, "a number >= 0"),
            (
                "n_iter_no_change",
                _is_number(self.n_iter_no_change) and self.n_iter_no_change >= 1,
                "a number >= 1",
            ),
            ("damping", _is_number(self.damping) and self.damping > 0, "a number > 0"),
            (
                "validation_fraction",
                _is_number(self.validation_fraction)
                and 0 < self.validation_fraction < 1,
                "a number between 0 and 1",
            ),
            (
                "hidden_layer_sizes",
                all(map(_is_count, sizes)),
                "an integer >= 1 or a sequence of these",
            ),
            (
                "batch_size",
                _is_count(self.batch_size)
                or (isinstance(self.batch_size, str) and self.batch_size == "auto"),
                "'auto' or an integer >= 1",
            ),
        ):
            if not valid:
                raise ValueError(
                    f"Expected `{name}` to be {range_}, got {getattr(self, name)!r}."
                )

    def _require_unchanged(self) -> None:
        """Raise ValueError for parameters that only the first call of a run reads."""
        started = self._started.items()
        changed = [n for n, value in started if repr(getattr(self, n)) != value]
        if changed:
            raise ValueError(
                f"{', '.join(changed)} changed since training began, and are read then. "
                "Fit a clone, or set warm_start=False."
            )

    def _hidden_sizes(self) -> list[int]:
        sizes = self.hidden_layer_sizes
        return [*sizes] if isinstance(sizes, Iterable) else [sizes]

    def _start(self, X: Array, targets: Array) -> None:
        """Draw the parameters, and begin the records of a run."""
        self.n_outputs_ = targets.shape[1]
        sizes = [X.shape[1], *self._hidden_sizes(), self.n_outputs_]
        self.n_layers_ = len(sizes)
        # Glorot and Bengio (2010), with the constants of MLPClassifier.
        factor = 2.0 if self.activation == "logistic" else 6.0
        matrices = []
        for n, m in pairwise(sizes):
            bound = (factor / (n + m)) ** 0.5
            drawn = self._random.uniform(-bound, bound, size=(n + 1, m))
            matrices.append(drawn.astype(X.dtype))
        self._started = {name: repr(getattr(self, name)) for name in _READ_AT_FIRST}
        self._optimizer = KFAC(
            {_name(i): {"weight": W} for i, W in enumerate(matrices)},
            likelihood=self._likelihood,
            fisher=self.fisher,
            damping=self.damping,
            decay=self.decay,
            update_every=self.update_every,
            refresh_every=self.refresh_every,
        )
        self.n_iter_ = self.t_ = 0
        self.loss_curve_: list[float] = []
        self.validation_scores_: list[float] | None = None
        self.best_loss_: float | None = np.inf
        self.best_validation_score_: float | None = None
        if self.early_stopping:
            self.validation_scores_, self.best_loss_ = [], None
            self.best_validation_score_ = -np.inf
        self._unimproved = 0

    def _train(
        self, X: Array, y: Array, weight: Array | None, *, incremental: bool
    ) -> None:
        """Make epochs until the loss or the score stops improving."""
        validation: Any = None
        if self.early_stopping:
            X, y, weight, validation = self._split(X, y, weight)
        best = [W.copy() for W in self._matrices]
        n = len(X)
        size = min(500, n) if self.batch_size == "auto" else min(self.batch_size, n)
        self.n_iter_ = 0
        for _ in range(1 if incremental else self.max_iter):
            order = self._random.permutation(n) if self.shuffle else np.arange(n)
            total = 0.0
            for part in gen_batches(n, size):
                rows = order[part]
                given = None if weight is None else weight[rows]
                total += len(rows) * self._step(X[rows], y[rows], given)
            self.n_iter_ += 1
            self.t_ += n
            self.loss_ = total / n
            self.loss_curve_.append(self.loss_)
            if self.verbose:
                print(f"Iteration {self.n_iter_}, loss = {self.loss_:.8f}")
            if self._improves(validation):
                best = [W.copy() for W in self._matrices]
            if incremental:
                break
            if self._unimproved > self.n_iter_no_change:
                break
        else:
            warnings.warn(
                f"Maximum iterations ({self.max_iter}) reached and the optimization "
                "hasn't converged yet.",
                ConvergenceWarning,
                stacklevel=4,
            )
        if self.early_stopping:
            for W, kept in zip(self._matrices, best, strict=True):
                W[...] = kept

    def _step(self, X: Array, y: Array, weight: Array | None) -> float:
        """Make a step on a batch; return the loss before it."""
        sum_of_weights = float(len(X) if weight is None else weight.sum())
        if sum_of_weights == 0:  # nothing counts
            return 0.0
        w = np.ones(len(X)) if weight is None else weight * (len(X) / sum_of_weights)
        w = w.astype(X.dtype)[:, None]
        root = np.sqrt(w)
        network = _Network(self._matrices, self.activation)
        optimizer, loss = self._optimizer, self._likelihood
        decay = self.alpha / sum_of_weights

        def objective(z: Array) -> float:
            fit = np.average(self._losses(z, y), weights=w[:, 0])
            squares = sum(float(np.vdot(W[:-1], W[:-1])) for W in self._matrices)
            return float(fit + 0.5 * decay * squares)

        inputs, z = network.forward(X)
        before = objective(z)
        g = loss.gradient(z, y) * (w / len(X))
        gradients = {}
        for i, back in enumerate(network.backward(inputs, g)):
            gradient = inputs[i].T @ back
            gradient[:-1] += decay * self._matrices[i][:-1]
            gradients[_name(i)] = {"weight": gradient}
        if optimizer.wants_statistics:
            vectors = optimizer.vectors(z) * root
            for i, back in enumerate(network.backward(inputs, vectors)):
                rows = inputs[i] if weight is None else inputs[i] * root
                optimizer.observe(_name(i), kc.Batch(rows, back, sources=len(back)))

        def curvature(directions: Any) -> Array:
            """Return ``d_i . F d_j`` of the batch, the term of `alpha` included."""
            found = [[d[name]["weight"] for name in gradients] for d in directions]
            changes = [
                loss.fisher_factor_transpose_multiply(
                    z, network.output_change(inputs, d) * root
                )
                for d in found
            ]
            C = kc.steps.curvature_of_outputs(changes, changes, examples=len(X))
            flat = np.stack(
                [np.concatenate([W[:-1].ravel() for W in d]) for d in found]
            )
            return np.asarray(C + decay * (flat @ flat.T))

        change = optimizer.step(gradients, curvature=curvature)
        after = objective(network.forward(X)[1])
        if after <= before:
            # Faster than the paper, whose runs have thousands of steps.
            optimizer.adapt_damping(before, after, factor=0.8)
            return before
        # More than the rule of Levenberg and Marquardt would: a run whose first steps are
        # all undone would end, for want of progress, with its initial parameters.
        damping: Any = optimizer.damping
        optimizer.damping = min(2.0 * damping, 1e8)
        for i, W in enumerate(self._matrices):
            W -= change[_name(i)]["weight"]
        return before

    def _split(self, X: Array, y: Array, weight: Array | None) -> Any:
        """Set examples aside for the validation score."""
        parts = [X, y] if weight is None else [X, y, weight]
        found = train_test_split(
            *parts,
            random_state=self._random,
            test_size=self.validation_fraction,
            stratify=self._strata(y),
        )
        if len(found[1]) < 2:
            raise ValueError(
                "The validation set is too small. Increase 'validation_fraction' or the "
                "size of your dataset."
            )
        if weight is None:
            return found[0], found[2], None, (found[1], found[3], None)
        return found[0], found[2], found[4], (found[1], found[3], found[5])

    def _improves(self, validation: Any) -> bool:
        """Count epochs without progress; return whether this one is the best."""
        if validation is None:
            assert self.best_loss_ is not None
            slow = self.loss_ > self.best_loss_ - self.tol
            better = self.loss_ < self.best_loss_
            self.best_loss_ = min(self.best_loss_, self.loss_)
        else:
            X, y, weight = validation
            score = self._validation_score(self._outputs(X), y, weight)
            assert self.best_validation_score_ is not None
            assert self.validation_scores_ is not None
            self.validation_scores_.append(score)
            slow = score < self.best_validation_score_ + self.tol
            better = score > self.best_validation_score_
            self.best_validation_score_ = max(score, self.best_validation_score_)
            if self.verbose:
                print(f"Validation score: {score:f}")
        self._unimproved = self._unimproved + 1 if slow else 0
        return better

    def _outputs(self, X: Array) -> Array:
        return _Network(self._matrices, self.activation).forward(X)[1]

    def _raw_predict(self, X: Any) -> Array:
        """Return the outputs of the last layer for data from outside."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=(np.float64, np.float32))
        return self._outputs(X.astype(self._matrices[0].dtype, copy=False))


class KFACClassifier(ClassifierMixin, _Perceptron):  # type: ignore[misc]
    r"""Multilayer perceptron classifier trained by K-FAC.

    Minimizes the cross-entropy of softmax outputs, or of one logistic output for two
    classes and for each of several labels, plus ``alpha / 2 |W|^2`` divided by the sum of
    the sample weights, as ``MLPClassifier``.  A step is

    .. math:: \delta = -\alpha_t\, (F + \lambda I)^{-1} \nabla h + \mu_t\, \delta_{t-1},

    where K-FAC's approximation of the inverse is used, and :math:`\alpha_t`,
    :math:`\mu_t` minimize the quadratic model with the exact Fisher matrix.

    Parameters
    ----------
    hidden_layer_sizes : int or sequence of int
        Widths of the hidden layers.
    activation : {"identity", "logistic", "tanh", "relu"}
        Activation of the hidden layers.
    alpha : float
        Strength of the penalty on the weights, not on the biases.
    batch_size : int or "auto"
        Examples of a step; ``"auto"`` is ``min(500, n_samples)``.  K-FAC gains from larger
        batches than Adam.
    max_iter : int
        Largest number of epochs.
    shuffle : bool
        Whether each epoch has a new order.
    random_state : int, RandomState or None
        Seed of the initial parameters, orders and splits.
    tol : float
        Least improvement of the loss, or of the validation score, that counts.
    verbose : bool
        Whether the loss of each epoch is printed.
    warm_start : bool
        Whether `fit` continues from the last solution, with its curvature; parameters of
        the network and of its optimizer may not change then.
    early_stopping : bool
        Whether a part of the data is set aside, and training ends when its score does not
        improve; the parameters of the best score are kept.
    validation_fraction : float
        Fraction of the data that is set aside.
    n_iter_no_change : int
        Number of epochs without improvement after which training ends.
    fisher : {"exact", "gradients"}
        Whether statistics sum over all labels, which is deterministic, or have one label
        drawn from the model for each example, which is cheaper where there are many
        classes.
    damping : float
        Initial damping, adapted at every step.
    decay : float
        Factor on the old statistics at each update.
    update_every, refresh_every : int
        Steps between statistics, and between factorizations.

    Attributes
    ----------
    classes_ : array
        Labels.
    loss_, best_loss_ : float
        Loss of the last epoch, and the least one (None with `early_stopping`).
    loss_curve_ : list of float
        Loss of each epoch.
    validation_scores_, best_validation_score_ : list of float, float
        Accuracy of each epoch with `early_stopping`; else None.
    coefs_, intercepts_ : list of array
        Weights of shape (inputs, outputs), and biases.
    n_iter_, n_layers_, n_outputs_, t_ : int
        Epochs of the last fit, layers, outputs, and training examples seen.
    n_features_in_, feature_names_in_
        As in scikit-learn.

    References
    ----------
    Martens and Grosse (2015), arXiv:1503.05671, sections 6 and 7.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> from kfac_core_shims.sklearn import KFACClassifier
    >>> X, y = load_digits(return_X_y=True)
    >>> model = KFACClassifier(random_state=0).fit(X[:1000] / 16, y[:1000])
    >>> bool(model.score(X[1000:] / 16, y[1000:]) > 0.9)
    True
    """

    _y_numeric = False

    @property
    def out_activation_(self) -> str:
        """Activation of the outputs: "softmax" or "logistic"."""
        multiclass = self._labels.y_type_ == "multiclass"
        return "softmax" if multiclass else "logistic"

    @property
    def _likelihood(self) -> Any:
        if self.out_activation_ == "softmax":
            return kc.losses.Categorical()
        return kc.losses.Bernoulli()

    def partial_fit(
        self, X: Any, y: Any, sample_weight: Any = None, classes: Any = None
    ) -> Any:
        """Make one epoch over the given data.

        Parameters
        ----------
        X, y, sample_weight : array-like
            As for `fit`.
        classes : array-like, optional
            All labels that there will be; required in the first call.

        Returns
        -------
        self
            The estimator.

        Raises
        ------
        ValueError
            As `fit`; for labels that are not among the classes; with `early_stopping`.
        """
        with self._restored_if_refused():
            self._take_classes(y, classes)
            return self._fit(X, y, sample_weight, incremental=True)

    def _take_classes(self, y: Any, classes: Any) -> None:
        """Take the classes of the first partial_fit, or compare with what they were."""
        if not hasattr(self, "classes_"):
            if classes is None:
                raise ValueError("classes must be passed on the first call.")
            several = type_of_target(y).startswith("multilabel")
            self._labels = LabelBinarizer().fit(y if several else classes)
            self.classes_ = self._labels.classes_
        elif classes is not None and not np.array_equal(
            self.classes_, unique_labels(classes)
        ):
            raise ValueError(
                f"`classes={classes!r}` is not the same as on last call to partial_fit, "
                f"was: {self.classes_!r}"
            )

    def predict(self, X: Any) -> Any:
        """Return the most probable labels.

        Parameters
        ----------
        X : array-like, shape (n_samples, n_features)
            Inputs.

        Returns
        -------
        array, shape (n_samples,) or (n_samples, n_labels)
            Labels; a sparse matrix where those of `fit` were one.
        """
        return self._decoded(self._raw_predict(X))

    def predict_proba(self, X: Any) -> Array:
        """Return the probability of each class.

        Parameters
        ----------
        X : array-like, shape (n_samples, n_features)
            Inputs.

        Returns
        -------
        array, shape (n_samples, n_classes)
            Columns are in the order of ``classes_``.
        """
        p = self._probabilities(self._raw_predict(X))
        return np.hstack([1 - p, p]) if p.shape[1] == 1 else p

    def predict_log_proba(self, X: Any) -> Array:
        """Return the logarithm of `predict_proba`.

        Parameters
        ----------
        X : array-like, shape (n_samples, n_features)
            Inputs.

        Returns
        -------
        array, shape (n_samples, n_classes)
            Columns are in the order of ``classes_``.
        """
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(self.predict_proba(X)))

    def _probabilities(self, z: Array) -> Array:
        if self.out_activation_ == "logistic":
            return np.asarray(ACTIVATIONS["logistic"](z))
        p = np.exp(z - z.max(axis=1, keepdims=True))
        return np.asarray(p / p.sum(axis=1, keepdims=True))

    def _decoded(self, z: Array) -> Any:
        """Return labels; a sparse matrix of several where the given ones were sparse."""
        p = self._probabilities(z)
        return self._labels.inverse_transform(p[:, 0] if p.shape[1] == 1 else p)

    def _encoded(self, y: Array, first: bool, incremental: bool) -> Array:
        if not hasattr(self, "classes_") or (first and not incremental):
            self._labels = LabelBinarizer().fit(y)
            self.classes_ = self._labels.classes_
        elif unknown := set(unique_labels(y)) - set(self.classes_):
            raise ValueError(
                f"`y` has classes not in `self.classes_`: {unknown}. "
                f"`self.classes_` has {self.classes_}."
            )
        return np.asarray(self._labels.transform(y))

    def _losses(self, z: Array, y: Array) -> Array:
        return np.asarray(-self._likelihood.log_probability(z, y))

    def _strata(self, y: Array) -> Array | None:
        return y if self._labels.y_type_ in ("binary", "multiclass") else None

    def _validation_score(self, z: Array, y: Array, weight: Array | None) -> float:
        labels = self._labels.inverse_transform(y[:, 0] if y.shape[1] == 1 else y)
        return float(accuracy_score(labels, self._decoded(z), sample_weight=weight))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags


class KFACRegressor(RegressorMixin, _Perceptron):  # type: ignore[misc]
    r"""Multilayer perceptron regressor trained by K-FAC.

    Minimizes half the squared error, summed over outputs, plus ``alpha / 2 |W|^2`` divided
    by the sum of the sample weights, as ``MLPRegressor``.  A step is

    .. math:: \delta = -\alpha_t\, (F + \lambda I)^{-1} \nabla h + \mu_t\, \delta_{t-1},

    where K-FAC's approximation of the inverse is used, and :math:`\alpha_t`,
    :math:`\mu_t` minimize the quadratic model with the exact Gauss-Newton matrix.

    Parameters
    ----------
    hidden_layer_sizes : int or sequence of int
        Widths of the hidden layers.
    activation : {"identity", "logistic", "tanh", "relu"}
        Activation of the hidden layers.
    alpha : float
        Strength of the penalty on the weights, not on the biases.
    batch_size : int or "auto"
        Examples of a step; ``"auto"`` is ``min(500, n_samples)``.  K-FAC gains from larger
        batches than Adam.
    max_iter : int
        Largest number of epochs.
    shuffle : bool
        Whether each epoch has a new order.
    random_state : int, RandomState or None
        Seed of the initial parameters, orders and splits.
    tol : float
        Least improvement of the loss, or of the validation score, that counts.
    verbose : bool
        Whether the loss of each epoch is printed.
    warm_start : bool
        Whether `fit` continues from the last solution, with its curvature; parameters of
        the network and of its optimizer may not change then.
    early_stopping : bool
        Whether a part of the data is set aside, and training ends when its score does not
        improve; the parameters of the best score are kept.
    validation_fraction : float
        Fraction of the data that is set aside.
    n_iter_no_change : int
        Number of epochs without improvement after which training ends.
    fisher : {"exact", "gradients"}
        Whether statistics have one vector for each output, which is deterministic, or a
        random one for all, which is cheaper where there are many outputs.
    damping : float
        Initial damping, adapted at every step.
    decay : float
        Factor on the old statistics at each update.
    update_every, refresh_every : int
        Steps between statistics, and between factorizations.

    Attributes
    ----------
    loss_, best_loss_ : float
        Loss of the last epoch, and the least one (None with `early_stopping`).
    loss_curve_ : list of float
        Loss of each epoch.
    validation_scores_, best_validation_score_ : list of float, float
        R^2 of each epoch with `early_stopping`; else None.
    coefs_, intercepts_ : list of array
        Weights of shape (inputs, outputs), and biases.
    out_activation_ : str
        ``"identity"``.
    n_iter_, n_layers_, n_outputs_, t_ : int
        Epochs of the last fit, layers, outputs, and training examples seen.
    n_features_in_, feature_names_in_
        As in scikit-learn.

    References
    ----------
    Martens and Grosse (2015), arXiv:1503.05671, sections 6 and 7.

    Examples
    --------
    >>> import numpy as np
    >>> from kfac_core_shims.sklearn import KFACRegressor
    >>> X = np.linspace(-1, 1, 200)[:, None]
    >>> model = KFACRegressor(random_state=0).fit(X, np.sin(3 * X[:, 0]))
    >>> bool(model.score(X, np.sin(3 * X[:, 0])) > 0.99)
    True
    """

    _y_numeric = True
    _likelihood = kc.losses.Gaussian(variance=1.0)
    out_activation_ = "identity"

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Make one epoch over the given data.

        Parameters
        ----------
        X, y, sample_weight : array-like
            As for `fit`.

        Returns
        -------
        self
            The estimator.

        Raises
        ------
        ValueError
            As `fit`; with `early_stopping`.
        """
        with self._restored_if_refused():
            return self._fit(X, y, sample_weight, incremental=True)

    def predict(self, X: Any) -> Array:
        """Return the outputs.

        Parameters
        ----------
        X : array-like, shape (n_samples, n_features)
            Inputs.

        Returns
        -------
        array, shape (n_samples,) or (n_samples, n_outputs)
            Predicted values.
        """
        z = self._raw_predict(X)
        return z[:, 0] if z.shape[1] == 1 else z

    def _encoded(self, y: Array, first: bool, incremental: bool) -> Array:
        return y[:, None] if y.ndim == 1 else y

    def _losses(self, z: Array, y: Array) -> Array:
        return np.asarray(0.5 * np.sum((z - y) ** 2, axis=1))

    def _strata(self, y: Array) -> Array | None:
        return None

    def _validation_score(self, z: Array, y: Array, weight: Array | None) -> float:
        return float(r2_score(y, z, sample_weight=weight))


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, Integral) and _is_number(value) and int(value) >= 1


def _with_ones(x: Array) -> Array:
    found = np.ones((len(x), x.shape[1] + 1), x.dtype)
    found[:, :-1] = x
    return found


def _name(layer: int) -> str:
    return f"layer{layer}"
