"""Pure functions as scalar functions of one array, to be differentiated.

Each takes an array of the shape of its point and returns a number.  Their derivatives by
PyTorch and JAX are compared with central differences of the same function on NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import array_api_compat
import numpy as np

import kfac_core as kc
from kfac_core import linalg, roots, steps

from ..builders.layers import dense_layer

N, n, m = 7, 3, 2
RNG = np.random.default_rng(5)
X, G, V = RNG.normal(size=(N, n)), RNG.normal(size=(N, m)), RNG.normal(size=(n, m))
SYMMETRIC = X.T @ X / N
LAYER = dense_layer(n, m, bias=False)
STATUS: Any = {"check": "status"}


@dataclass(frozen=True)
class Differentiated:
    """A function and where it is differentiated.

    Attributes
    ----------
    function : callable
        Takes an array; returns a 0-d array.
    point : array
        Of float64.
    """

    function: Callable[[Any], Any]
    point: np.ndarray


def _like(array: np.ndarray, like: Any) -> Any:
    """Return a constant in the library of an array."""
    return array_api_compat.array_namespace(like).asarray(array)


def _pairing(found: Any) -> Any:
    """Return the inner product with fixed numbers."""
    xp = array_api_compat.array_namespace(found)
    weights = np.cos(np.arange(1.0, 1.0 + np.prod(found.shape)))
    return xp.sum(found * xp.reshape(xp.asarray(weights), found.shape))


def _network(approximation: Any, rule: Any) -> kc.Network:
    summed = kc.Conventions(reduction="sum", sources="sum")
    blocks = {"fc": kc.Block(LAYER, approximation)}
    return kc.Network(blocks, conventions=summed, damping_rule=rule)


def _direction(network: kc.Network, x: Any, g: Any, v: Any, damping: Any) -> Any:
    """Return what `update`, `refresh` and `precondition` make of one batch."""
    state = network.initial(x, damping=damping)
    state = network.update(state, {"fc": kc.Batch(x, g)}, decay=0.0, **STATUS)
    state = network.refresh(state, damping=damping, **STATUS)
    return network.precondition(state, {"fc": {"weight": v}})["fc"]["weight"]


def _of_rows(approximation: Any, rule: Any) -> Differentiated:
    network = _network(approximation, rule)

    def function(x: Any) -> Any:
        g, v = _like(G, x), _like(V, x)
        return _pairing(_direction(network, x, g, v, 0.3))

    return Differentiated(function, X)


def _of_damping(approximation: Any, rule: Any) -> Differentiated:
    network = _network(approximation, rule)

    def function(damping: Any) -> Any:
        x, g, v = (_like(array, damping) for array in (X, G, V))
        return _pairing(_direction(network, x, g, v, damping[0]))

    return Differentiated(function, np.array([0.3]))


def _of_gradients() -> Differentiated:
    network = _network(kc.Kronecker(), "factored")

    def function(v: Any) -> Any:
        x, g = _like(X, v), _like(G, v)
        return _pairing(_direction(network, x, g, v, 0.3))

    return Differentiated(function, V)


def _evidence(damping: Any) -> Any:
    """Return the log-determinant of a damped block."""
    block = kc.Block(LAYER, kc.Kronecker())
    x, g = _like(X, damping), _like(G, damping)
    summed = kc.Conventions(reduction="sum", sources="sum")
    statistics = kc.update_block(
        block,
        block.initial(x),
        kc.Batch(x, g),
        kc.UpdateOptions(conventions=summed, decay=0.0, **STATUS),
    )
    operator = kc.operator_of(
        block,
        statistics,
        kc.RefreshOptions(
            damping=damping[0],
            rule="exact",
            factorizations=("inverse", "eigenbasis"),
            **STATUS,
        ),
    )
    return operator.logdet()


def _symmetrized(A: Any) -> Any:
    return 0.5 * (A + array_api_compat.array_namespace(A).matrix_transpose(A))


def _shifted(factorization: Any, product: str) -> Callable[[Any], Any]:
    def function(A: Any) -> Any:
        matrix = linalg.SymmetricMatrix(_symmetrized(A), full_storage=True)
        made = linalg.damped_matrix(matrix, 0.2).prepared(factorization, **STATUS)
        v = _like(V, A)
        if product == "solve":
            return _pairing(made.solve(v))
        if product == "power":
            return _pairing(made.power(v, -0.5))
        return _pairing(made.lower_solve(v, transpose=False))

    return function


def _inverse_root(A: Any) -> Any:
    made = roots.inverse_root(_symmetrized(A), damping=0.2, degree=4, **STATUS)
    return _pairing(made.matrix.full())


def _followed(A: Any) -> Any:
    """Return a preconditioned vector in a basis after one QR step."""
    xp, A = array_api_compat.array_namespace(A), _symmetrized(A)
    Q, _ = roots.renewed_basis(None, _like(SYMMETRIC, A))
    Q, _ = roots.renewed_basis(Q, A)
    w = xp.sum(Q * (A @ Q), axis=0)
    return _pairing(Q @ ((w + 0.2) ** -0.5 * (Q.T @ _like(V, A)).T).T)


def _quadratic_model(v: Any) -> Any:
    xp = array_api_compat.array_namespace(v)
    gradient = {"fc": {"weight": _like(V, v)}}
    directions = [{"fc": {"weight": v}}, {"fc": {"weight": xp.flip(v, axis=0)}}]
    products = xp.asarray([[2.0, 0.3], [0.3, 1.5]])
    model = steps.quadratic_model(gradient, directions, curvature=products, damping=0.1)
    return _pairing(model.minimize(**STATUS).coefficients)


def _kl_clip(v: Any) -> Any:
    gradient = {"fc": {"weight": _like(V, v)}}
    made = steps.kl_clip(
        gradient, {"fc": {"weight": v}}, learning_rate=1.0, bound=1e-2, **STATUS
    )
    return made.scale


def _vectors(v: Any) -> Any:
    first, second = {"fc": {"weight": v}}, {"fc": {"weight": _like(V, v)}}
    mixed = steps.linear_combination([2.0, -0.5], [first, second])
    return steps.inner_product(mixed, first)


def _kronecker(A: Any) -> Any:
    left, right = A[:, :], _like(SYMMETRIC[:m, :m], A)
    return _pairing(linalg.kronecker_multiply([left, right], _like(V, A)))


KRONECKER, EXACT = kc.Kronecker(), "exact"

FUNCTIONS = {
    "precondition, by the vector": _of_gradients(),
    "update and refresh, by the rows": _of_rows(KRONECKER, "factored"),
    "update and refresh, by the rows; exact": _of_rows(KRONECKER, EXACT),
    "update and refresh, by the rows; Full": _of_rows(kc.Full(), EXACT),
    "update and refresh, by the rows; Diagonal": _of_rows(kc.Diagonal(), EXACT),
    "refresh, by the damping": _of_damping(KRONECKER, "factored"),
    "refresh, by the damping; exact": _of_damping(KRONECKER, EXACT),
    "logdet, by the damping": Differentiated(_evidence, np.array([0.3])),
    "damped_matrix, inverse": Differentiated(_shifted("inverse", "solve"), SYMMETRIC),
    "damped_matrix, Cholesky": Differentiated(_shifted("cholesky", "lower"), SYMMETRIC),
    "damped_matrix, power": Differentiated(_shifted("eigenbasis", "power"), SYMMETRIC),
    "inverse_root": Differentiated(_inverse_root, SYMMETRIC),
    "renewed_basis": Differentiated(_followed, SYMMETRIC + 0.1 * np.eye(n)[::-1]),
    "kronecker_multiply": Differentiated(_kronecker, SYMMETRIC),
    "quadratic_model": Differentiated(_quadratic_model, 0.3 * V[::-1].copy()),
    "kl_clip": Differentiated(_kl_clip, V + 0.1),
    "inner_product, linear_combination": Differentiated(_vectors, V + 0.1),
}
"""By what is differentiated."""

REPEATED = {"damped_matrix, power": 2.0 * np.eye(n), "inverse_root": 2.0 * np.eye(n)}
"""Points with equal eigenvalues, where eigenvectors have no derivative."""


def differences(case: Differentiated) -> np.ndarray:
    """Return the gradient by central differences on NumPy."""
    point, step = case.point, 1e-5
    found = np.zeros(point.size)
    for k, unit in enumerate(np.eye(point.size)):
        move = step * unit.reshape(point.shape)
        above, below = (float(case.function(point + sign * move)) for sign in (1, -1))
        found[k] = (above - below) / (2 * step)
    return found.reshape(point.shape)
