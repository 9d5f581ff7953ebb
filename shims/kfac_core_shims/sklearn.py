"""Multilayer perceptrons trained by K-FAC, with the interface of scikit-learn.

`KFACClassifier` and `KFACRegressor` are scikit-learn's ``MLPClassifier`` and
``MLPRegressor`` with another optimizer: network, epochs, stopping and checks of data are
scikit-learn's.  `kfac_core_shims.numpy.KFAC` takes the steps, each to the minimum of the
exact quadratic model of its batch, with a damping that follows the rule of Levenberg and
Marquardt, so that there is no learning rate to choose.

Conventions.  A layer is one matrix ``(in + 1, out)`` here, whose last row is the bias, and
its inputs end in a column of ones.  Sample weights w are divided by their mean in the
batch.  Rows of statistics are multiplied by ``sqrt(w)``, the column of ones included, so
that an example of weight two counts as two examples.

Of scikit-learn's private names it uses ``_fit``, ``_fit_stochastic``, ``_backprop``,
``_forward_pass``, ``_optimizer`` and ``DERIVATIVES``, as they are since 1.7.
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

from kfac_core_shims import require

require("sklearn", extra="sklearn")

import numpy as np
from scipy.sparse import issparse
from sklearn.base import BaseEstimator
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.neural_network._base import DERIVATIVES

import kfac_core as kc
from kfac_core_shims.numpy import KFAC

__all__ = ["KFACClassifier", "KFACRegressor"]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

LIKELIHOODS = {
    "softmax": kc.losses.Categorical(),
    "logistic": kc.losses.Bernoulli(),
    "identity": kc.losses.Gaussian(variance=1.0),
}
"""Likelihood of the outputs, by their activation."""


class _Batch:
    """A batch on its way through a network: the objective, and derivatives."""

    def __init__(
        self, model: Any, activations: list[Array], y: Array, weight: Array | None
    ) -> None:
        self.model, self.activations = model, activations
        self.likelihood = LIKELIHOODS[model.out_activation_]
        dtype = activations[-1].dtype
        self.y = y.astype(dtype)
        self.total = float(len(y) if weight is None else weight.sum())
        weights = np.ones(len(y)) if weight is None else weight * (len(y) / self.total)
        self.weights = weights.astype(dtype)[:, None]
        self.inputs = [_with_ones(a) for a in activations[:-1]]
        self.slopes = [np.ones_like(a) for a in activations[1:-1]]
        for a, slope in zip(activations[1:-1], self.slopes, strict=True):
            DERIVATIVES[model.activation](a, slope)
        self.z = self._logits()
        self.start = self._objective(self.z)
        """The objective before the step."""

    def _logits(self) -> Array:
        z: Array = self.activations[-2] @ self.model.coefs_[-1]
        z += self.model.intercepts_[-1]
        return z

    def objective(self) -> float:
        """Return the mean loss and its penalty, for the model's present parameters."""
        self.model._forward_pass(self.activations)
        return self._objective(self._logits())

    def _objective(self, z: Array) -> float:
        losses = -self.likelihood.log_probability(z, self.y)
        if self.model.out_activation_ == "identity":
            # Without the constant: half the squared error.
            losses = losses - 0.5 * np.log(2 * np.pi) * self.y.shape[1]
        squares = sum(float(np.vdot(W, W)) for W in self.model.coefs_)
        penalty = 0.5 * self.model.alpha / self.total * squares
        return float(np.average(losses, weights=self.weights[:, 0]) + penalty)

    def backward(self, vectors: Array) -> list[Array]:
        """Return what comes back to each layer from vectors ``(..., n, outputs)``."""
        output_grads = [vectors]
        layers = zip(self.model.coefs_[1:], self.slopes, strict=True)
        for W, slope in reversed(list(layers)):
            output_grads.append((output_grads[-1] @ W.T) * slope)
        return output_grads[::-1]

    def output_change(self, direction: list[Array]) -> Array:
        """Return ``J d``, the derivative of the outputs along a direction."""
        change = self.inputs[0] @ direction[0]
        for i, slope in enumerate(self.slopes, start=1):
            change = (change * slope) @ self.model.coefs_[i]
            change += self.inputs[i] @ direction[i]
        return change

    def curvature(self, directions: list[dict[str, dict[str, Array]]]) -> Array:
        """Return ``d_i . F d_j``, the term of the penalty included."""
        matrices = [[layer["weight"] for layer in d.values()] for d in directions]
        changes = [
            self.likelihood.fisher_factor_transpose_multiply(
                self.z, self.output_change(d) * np.sqrt(self.weights)
            )
            for d in matrices
        ]
        F = kc.steps.curvature_of_outputs(changes, changes, examples=len(self.y))
        flat = np.stack([np.concatenate([W[:-1].ravel() for W in d]) for d in matrices])
        return np.asarray(F + self.model.alpha / self.total * (flat @ flat.T))


class _Steps:
    """K-FAC where scikit-learn has an optimizer: `_BaseKFAC` hands it each batch."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.batch: _Batch | None = None
        pairs = zip(model.coefs_, model.intercepts_, strict=True)
        self.kfac = KFAC(
            {f"layer{i}": {"weight": np.vstack(pair)} for i, pair in enumerate(pairs)},
            likelihood=LIKELIHOODS[model.out_activation_],
            fisher=model.fisher,
            damping=model.damping,
            damping_rule=kc.integration.defaults.MODEL_DAMPING_RULE,
            decay=model.decay,
            update_every=model.update_every,
            refresh_every=model.refresh_every,
            # Faster than the paper's 0.95, whose runs have thousands of steps.
            adapt_factor=0.8,
        )

    def update_params(self, params: list[Array], grads: list[Array]) -> None:
        """Change the parameters in place, as scikit-learn's optimizers do."""
        batch, self.batch = self.batch, None
        if batch is None:
            return
        n = len(params) // 2
        layers = self.kfac.parameters
        # Read again: early stopping and files put other arrays in their place.
        for layer, W, b in zip(layers.values(), params[:n], params[n:], strict=True):
            layer["weight"][:-1], layer["weight"][-1] = W, b
        gradients = {
            name: {"weight": np.vstack(pair)}
            for name, *pair in zip(layers, grads[:n], grads[n:], strict=True)
        }
        if self.kfac.wants_statistics:
            root = np.sqrt(batch.weights)
            vectors = self.kfac.vectors(batch.z) * root
            output_grads = batch.backward(vectors)
            for name, x, g in zip(layers, batch.inputs, output_grads, strict=True):
                self.kfac.observe(name, kc.Batch(x * root, g, sources=len(g)))

        def write() -> None:
            for layer, W, b in zip(
                layers.values(), params[:n], params[n:], strict=True
            ):
                W[...], b[...] = layer["weight"][:-1], layer["weight"][-1]

        # The first loss that is asked for is that before the step.
        known = [batch.start]

        def loss() -> float:
            if known:
                return known.pop()
            write()
            return batch.objective()

        self.kfac.step(gradients, curvature=batch.curvature, loss=loss)
        write()

    def iteration_ends(self, time_step: int) -> None:
        """Do nothing at the end of an epoch."""

    def trigger_stopping(self, message: str, verbose: bool) -> bool:
        """Let training end where it makes no progress."""
        if verbose:
            print(f"{message} Stopping.")
        return True


class _BaseKFAC(BaseEstimator):  # type: ignore[misc]
    """Parameters, and the place where scikit-learn's trainer meets K-FAC."""

    batch_size: Any

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
        damping: float = kc.integration.defaults.MODEL_DAMPING,
        decay: float = kc.integration.defaults.MODEL_DECAY,
        update_every: int = kc.integration.defaults.MODEL_UPDATE_EVERY,
        refresh_every: int = kc.integration.defaults.MODEL_REFRESH_EVERY,
    ) -> None:
        # scikit-learn reads the parameters of an estimator from its signature.
        super().__init__(
            hidden_layer_sizes=hidden_layer_sizes,
            activation=activation,
            alpha=alpha,
            batch_size=batch_size,
            max_iter=max_iter,
            shuffle=shuffle,
            random_state=random_state,
            tol=tol,
            verbose=verbose,
            warm_start=warm_start,
            early_stopping=early_stopping,
            validation_fraction=validation_fraction,
            n_iter_no_change=n_iter_no_change,
        )
        self.fisher = fisher
        self.damping = damping
        self.decay = decay
        self.update_every = update_every
        self.refresh_every = refresh_every

    @property
    def _optimizer(self) -> _Steps:
        return self._steps

    @_optimizer.setter
    def _optimizer(self, optimizer: Any) -> None:
        """Take the place of the optimizer that each call of ``fit`` begins with."""
        earlier = getattr(self, "_steps", None)
        self._steps = _Steps(self)
        if self.warm_start and earlier is not None:
            self._steps.kfac.load_state_dict(earlier.kfac.state_dict())

    def _fit(self, X: Any, y: Any, sample_weight: Any = None, **options: Any) -> Any:
        sizes = np.atleast_1d(self.hidden_layer_sizes).tolist()
        goes_on = self.warm_start or options["incremental"]
        if goes_on and hasattr(self, "coefs_"):
            fitted = [W.shape[1] for W in self.coefs_[:-1]]
            if sizes != fitted:
                raise ValueError(
                    f"`hidden_layer_sizes` changed from {fitted} to {sizes}. Fit a clone, "
                    "or set warm_start=False."
                )
        return super()._fit(X, y, sample_weight=sample_weight, **options)

    def _fit_stochastic(self, X: Any, *work: Any) -> None:
        requested: Any = self.batch_size
        if requested == "auto":
            n = X.shape[0]
            if self.early_stopping:
                n -= math.ceil(n * self.validation_fraction)
            # Adam's 200 is too few: at equal time the loss on digits is ten times as high.
            self.batch_size = max(1, min(500, n))
        try:
            super()._fit_stochastic(X, *work)
        finally:
            self.batch_size = requested

    def _backprop(
        self, X: Any, y: Array, sample_weight: Any, activations: Any, *work: Any
    ) -> Any:
        """Return loss and gradients, and hand the batch to the optimizer."""
        if issparse(X):
            dense: Any = X
            activations[0] = X = dense.toarray()
        if sample_weight is not None and (sample_weight < 0).any():
            raise ValueError("Expected `sample_weight` >= 0, got negative values.")
        # A batch of weight zero has no curvature, and scikit-learn goes on.
        if sample_weight is not None and not sample_weight.any():
            *_, coef_grads, intercept_grads = work
            return 0.0, coef_grads, intercept_grads
        _, *gradients = super()._backprop(X, y, sample_weight, activations, *work)
        batch = _Batch(self, list(activations), y, sample_weight)
        self._optimizer.batch = batch
        return batch.start, *gradients


class KFACClassifier(_BaseKFAC, MLPClassifier):  # type: ignore[misc]
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


class KFACRegressor(_BaseKFAC, MLPRegressor):  # type: ignore[misc]
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


def _with_ones(x: Array) -> Array:
    ones = np.ones((len(x), x.shape[1] + 1), x.dtype)
    ones[:, :-1] = x
    return ones
