"""The comparison of methods: each of them learns, from the same budget, and says so."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

import kfac_core as kc

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
NAMES = (
    *("KFAC", "EKFAC", "KFOC", "TNT", "block-tridiagonal"),
    *("SOAP", "Shampoo", "KL-Shampoo", "Adam", "SGD"),
    *("KFAC, no model", "gradient, model", "SOAP, carried"),
)
# What a first step that helps is made with, where the middle of the grid is not it.
SETTINGS = {
    "Shampoo": {"learning_rate": 0.1, "damping": 1.0},
    "SOAP": {"learning_rate": 0.1, "epsilon": 1e-3},
}

pytestmark = pytest.mark.skipif(
    not (EXAMPLES / "methods").is_dir(), reason="the documentation is not here"
)


@pytest.fixture(scope="module")
def part():
    """A function that imports a module of the comparison, as running it would."""
    pytest.importorskip("sklearn")
    sys.path.insert(0, str(EXAMPLES))
    yield lambda name: importlib.import_module(f"methods.{name}")
    sys.path.remove(str(EXAMPLES))
    for name in [n for n in sys.modules if n.partition(".")[0] == "methods"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def problems(part):
    """The two problems, narrower."""
    made = {
        "autoencoder": part("autoencoder").Autoencoder(widths=(64, 6, 64)),
        "classifier": part("classifier").Classifier(channels=(2, 3)),
    }
    for problem in made.values():
        problem.batch_size = 100
    return made


@pytest.fixture(scope="module")
def catalogue(part):
    return {method.name: method for method in part("catalogue").METHODS}


def setting_of(method):
    """Return a setting from the middle of a grid."""
    middle = {
        "learning_rate": method.learning_rates[-2],
        method.option: method.values[1],
    }
    return SETTINGS.get(method.name, middle)


@pytest.mark.parametrize("problem", ["autoencoder", "classifier"])
@pytest.mark.parametrize("name", NAMES)
def test_a_method_learns(part, problems, catalogue, name, problem):
    """Eight steps take a good part of the loss away, and none of them fails."""
    method, where = catalogue[name], problems[problem]
    if not method.fits(where):
        pytest.skip(f"{name} is for dense layers only")

    run = part("training").train(where, method, setting_of(method), seed=0, steps=8)

    assert run.failure is None
    assert run.steps[-1] == 8
    assert run.losses[-1] < 0.95 * run.losses[0]
    assert np.all(np.diff(run.seconds) >= 0)


def test_the_directions_of_shampoo_are_those_of_a_few_dense_lines(part, problems):
    """``L^-1/4 V R^-1/4`` with the sums over two gradients; the first as ``U s W^T``."""
    method = part("shampoo").Shampoo(problems["autoencoder"], damping=0.01)
    rng = np.random.default_rng(7)
    gradients = [rng.normal(size=(7, 64)) for _ in range(2)]

    got = []
    for V in gradients:
        got.append(method.preconditioned("fc2", V))
        method.steps += 1

    U, s, W_t = np.linalg.svd(gradients[0], full_matrices=False)
    expected = (U * (s / (s**2 + 0.01) ** 0.5)) @ W_t
    assert np.allclose(got[0], expected, rtol=1e-9, atol=1e-12)
    L, R = (sum(M) for M in zip(*((V @ V.T, V.T @ V) for V in gradients), strict=True))
    roots = []
    for F in (L, R):
        w, Q = np.linalg.eigh(F + 0.01 * np.eye(len(F)))
        roots.append((Q * w**-0.25) @ Q.T)
    expected = roots[0] @ gradients[1] @ roots[1]
    assert np.allclose(got[1], expected, rtol=1e-8, atol=1e-11)


def test_the_first_direction_of_kl_shampoo_is_that_of_a_few_dense_lines(part, problems):
    """``S^-1/2 V T^-1/2``, S and T of one gradient whitened by multiples of I."""
    method = part("kl_shampoo").KLShampoo(problems["autoencoder"], damping=0.01)
    V = np.random.default_rng(9).normal(size=(7, 64))

    got = method.preconditioned("fc2", V)

    # Both multiples are of the root mean square of V, so that their product is its square.
    size = np.mean(V**2) ** 0.5
    roots = []
    for F in (V @ V.T / size / 64, V.T @ V / size / 7):
        w, Q = np.linalg.eigh(F + 0.01 * np.eye(len(F)))
        roots.append((Q * w**-0.5) @ Q.T)
    assert np.allclose(got, roots[0] @ V @ roots[1], rtol=1e-8, atol=1e-11)


def published_soap(gradients, *, epsilon, due):
    """Return the directions of SOAP's published code, for the gradients of one matrix.

    https://github.com/nikhilvyas/SOAP, `soap.py`: before each QR step columns and squares
    are sorted by the old basis's Rayleigh quotients.
    """
    L, R = (np.zeros((n, n)) for n in gradients[0].shape)
    mean = square = np.zeros_like(gradients[0])
    Q_L, Q_R, directions = None, None, []
    for step, V in enumerate(gradients):
        if Q_L is None:
            direction = np.zeros_like(V)
        else:
            mean = 0.9 * mean + 0.1 * V
            square = 0.95 * square + 0.05 * (Q_L.T @ V @ Q_R) ** 2
            m = Q_L.T @ mean @ Q_R / (1.0 - 0.9**step)
            v = square / (1.0 - 0.95**step)
            direction = Q_L @ (m / (np.sqrt(v) + epsilon)) @ Q_R.T
        directions.append(direction)
        L, R = 0.95 * L + 0.05 * V @ V.T, 0.95 * R + 0.05 * V.T @ V
        if Q_L is None:
            Q_L, Q_R = (np.linalg.eigh(F)[1][:, ::-1] for F in (L, R))
        elif due(step):
            by_row, by_column = (
                np.argsort(-np.diag(Q.T @ F @ Q)) for Q, F in ((Q_L, L), (Q_R, R))
            )
            square = square[by_row][:, by_column]
            Q_L = np.linalg.qr(L @ Q_L[:, by_row])[0]
            Q_R = np.linalg.qr(R @ Q_R[:, by_column])[0]
    return directions


class OneLayer:
    """A problem of one matrix."""

    def __init__(self, shape):
        n, m = shape
        layer = kc.Dense(in_features=n, out_features=m, bias=False, weight_layout="io")
        self.layers = {"fc": layer}


def directions_of(method, gradients):
    """Return the directions of a method of one matrix."""
    found = []
    for V in gradients:
        found.append(method.preconditioned("fc", V))
        method.steps += 1
    return np.stack(found)


def test_soap_is_that_of_the_published_code_for_20_steps(part):
    """Squares permuted with the columns; left behind, they are those of others."""
    rng = np.random.default_rng(8)
    gradients = [
        rng.normal(size=(6, 1)) * rng.normal(size=(6, 6)) for _ in range(20)
    ]  # rows of changing size, so that eigenvalues cross
    soap, is_due = part("soap"), part("curvature").is_due

    class LeftBehind(soap.SOAP):
        def followed(self, name, new, orders):
            return self.squares[name]

    expected = np.stack(published_soap(gradients, epsilon=1e-8, due=is_due))
    got, behind = (
        directions_of(kind(OneLayer((6, 6)), epsilon=1e-8), gradients)
        for kind in (soap.SOAP, LeftBehind)
    )

    assert np.linalg.norm(got - expected) <= 1e-9 * np.linalg.norm(expected)
    assert np.linalg.norm(behind - expected) >= 1e-2 * np.linalg.norm(expected)


def test_carried_squares_are_the_diagonal_in_the_new_bases(part):
    """``diag(Q^T (Q_old diag(v) Q_old^T) Q)`` with Q of both sides."""
    soap = part("soap")
    rng = np.random.default_rng(6)
    vectors = [rng.normal(size=(7, 9)) for _ in range(3)]
    method, plain = (
        kind(OneLayer((7, 9)), epsilon=1e-3) for kind in (soap.CarriedSOAP, soap.SOAP)
    )
    for each in (method, plain):
        directions_of(each, vectors[:1])
    old = method.bases["fc"]

    for each in (method, plain):
        directions_of(each, vectors[1:2])

    before = 0.05 * (old[0].T @ vectors[1] @ old[1]) ** 2
    L, R = method.bases["fc"]
    # The change of coordinates of a matrix's entries.
    turn = np.kron(old[0].T @ L, old[1].T @ R)
    carried = np.einsum("ij,i,ij->j", turn, before.ravel(), turn).reshape(7, 9)
    assert np.allclose(method.squares["fc"], carried, rtol=1e-9)
    assert not np.allclose(plain.squares["fc"], carried, rtol=1e-2)
