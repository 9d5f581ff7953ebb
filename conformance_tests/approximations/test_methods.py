"""The comparison of methods: each of them learns, from the same budget, and says so."""

import importlib
import json
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


def test_every_method_that_was_asked_for_is_there(catalogue, problems):
    """The names of the table; only the chain of dense layers is not for convolutions."""
    assert set(catalogue) == set(NAMES)
    left_out = [
        m.name for m in catalogue.values() if not m.fits(problems["classifier"])
    ]
    assert left_out == ["block-tridiagonal"]


def sigmoid(s):
    return 1.0 / (1.0 + np.exp(-s))


def dense_network(weights, x):
    """Return the inputs of the layers, with their 1, and the logits."""
    inputs = []
    for W in weights:
        inputs.append(np.hstack([x, np.ones_like(x[:, :1])]))
        s = inputs[-1] @ W
        x = sigmoid(s)
    return inputs, s


def dense_kfac_step(weights, x, uniforms, damping, part_of_the_way):
    """Return the first step of K-FAC, written out for a network of two layers."""
    N = len(x)
    (a0, a1), logits = dense_network(weights, x)
    p = sigmoid(logits)

    def back(top):
        slope = a1[:, :-1] * (1 - a1[:, :-1])
        return [(top @ weights[1][:-1].T) * slope, top]

    gradients = [a.T @ g / N for a, g in zip((a0, a1), back(p - x), strict=True)]
    directions = []
    sampled = back(p - (uniforms < p))
    for a, g, V in zip((a0, a1), sampled, gradients, strict=True):
        A, G = a.T @ a / N, g.T @ g / N
        pi = np.sqrt(np.trace(A) / len(A) / (np.trace(G) / len(G)))
        A = A + pi * np.sqrt(damping) * np.eye(len(A))
        G = G + np.sqrt(damping) / pi * np.eye(len(G))
        directions.append(-np.linalg.solve(A, V) @ np.linalg.inv(G))
    # The change of the logits by a complex step, which has no rounding.
    moved = [W + 1e-20j * d for W, d in zip(weights, directions, strict=True)]
    change = dense_network(moved, x)[1].imag / 1e-20
    curvature = np.sum(p * (1 - p) * change**2) / N
    curvature += damping * sum(np.sum(d * d) for d in directions)
    slope = sum(np.sum(V * d) for V, d in zip(gradients, directions, strict=True))
    return [-part_of_the_way * slope / curvature * d for d in directions]


def test_the_first_step_of_kfac_is_that_of_a_few_dense_lines(part, problems, catalogue):
    """Gradient, sampled targets, damping, inverses and the quadratic model."""
    problem, (train_set, _) = problems["autoencoder"], problems["autoencoder"].data(0)
    start, batch = problem.start(0), train_set.chosen(np.arange(40))
    seen = part("seen").Seen(problem, start, batch, np.random.default_rng(5))
    setting = {"learning_rate": 0.7, "damping": 0.1}
    method, rule = catalogue["KFAC"].made(problem, setting)

    change = rule.change(seen, method, method.direction(seen))

    weights = [np.vstack([p["weight"], p["bias"]]) for p in start.values()]
    uniforms = np.random.default_rng(5).random((40, 64))
    case = weights, batch.inputs, uniforms
    expected = dense_kfac_step(*case, 0.1, 0.7)
    other = dense_kfac_step(*case, 0.2, 0.7)
    for layer, step, differs in zip(change.values(), expected, other, strict=True):
        got = np.vstack([layer["weight"], layer["bias"]])
        assert np.allclose(got, step, rtol=1e-9, atol=1e-12)
        assert not np.allclose(got, differs, rtol=1e-2)


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


def test_names_stand_for_what_they_say(problems, catalogue):
    """The approximation and the damping's rule of the methods that an estimator makes."""
    for name, kind, rule in (
        ("KFAC", "kronecker", "factored"),
        ("KFAC, no model", "kronecker", "factored"),
        ("EKFAC", "eigen", "exact"),
        ("KFOC", "kfoc", "factored"),
        ("TNT", "tnt", "factored"),
    ):
        method = catalogue[name]
        made, _ = method.made(problems["classifier"], method.settings()[0])
        blocks = made.estimator.blocks.values()
        assert {block.approximation.name for block in blocks} == {kind}
        assert made.estimator.network.damping_rule == rule


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
        def followed(self, name, new):
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

    before = 0.05 * (old[0].eigenvectors.T @ vectors[1] @ old[1].eigenvectors) ** 2
    L, R = (basis.eigenvectors for basis in method.bases["fc"])
    turn = np.kron(
        old[0].eigenvectors.T @ L, old[1].eigenvectors.T @ R
    )  # the change of coordinates of a matrix's entries
    carried = np.einsum("ij,i,ij->j", turn, before.ravel(), turn).reshape(7, 9)
    assert np.allclose(method.squares["fc"], carried, rtol=1e-9)
    assert not np.allclose(plain.squares["fc"], carried, rtol=1e-2)


def looped_logits(parameters, image):
    """Return the classifier's logits of one image, pixel by pixel."""
    for name, stride in (("conv1", 1), ("conv2", 2)):
        W, b = parameters[name]["weight"], parameters[name]["bias"]
        size = image.shape[0] // stride
        # The smaller half of the zeros stands first.
        before = ((size - 1) * stride + 3 - image.shape[0]) // 2
        made = np.zeros((size, size, W.shape[-1]))
        for r, c, i, j in np.ndindex(size, size, 3, 3):
            y, x = r * stride + i - before, c * stride + j - before
            if 0 <= y < image.shape[0] and 0 <= x < image.shape[1]:
                made[r, c] += image[y, x] @ W[i, j]
        image = np.maximum(made + b, 0.0)
    return image.reshape(-1) @ parameters["fc"]["weight"] + parameters["fc"]["bias"]


@pytest.mark.parametrize("name", ["autoencoder", "classifier"])
def test_derivatives_are_those_of_the_loss(part, problems, name):
    """Gradient and forward derivative, against central differences."""
    problem, rng = problems[name], np.random.default_rng(3)
    # Random biases too: a unit of the classifier may not stand at its kink.
    start = moved(problem, problem.start(1), scale=0.1, along=random_like(problem, rng))
    batch = problem.data(0)[0].chosen(np.arange(20))
    seen = part("seen").Seen(problem, start, batch, rng)
    tangent, eps = random_like(problem, rng), 1e-6

    ahead, behind = (moved(problem, start, e, tangent) for e in (eps, -eps))

    loss = [part("problem").mean_loss(problem, p, batch) for p in (ahead, behind)]
    inner = sum(
        np.sum(seen.gradient[n][k] * tangent[n][k]) for n in start for k in start[n]
    )
    assert np.isclose((loss[0] - loss[1]) / (2 * eps), inner, rtol=1e-5)
    logits = [problem.forward(p, batch.inputs)[1] for p in (ahead, behind)]
    change = problem.jvp(start, seen.inputs, tangent)
    assert np.allclose(
        (logits[0] - logits[1]) / (2 * eps), change, rtol=1e-4, atol=1e-6
    )


def test_the_classifier_is_its_convolutions(problems):
    """The logits, against loops over pixels."""
    problem, rng = problems["classifier"], np.random.default_rng(4)
    parameters = random_like(problem, rng)
    images = problem.data(0)[0].inputs[:2]

    _, logits = problem.forward(parameters, images)

    expected = [looped_logits(parameters, image) for image in images]
    assert np.allclose(logits, expected, rtol=1e-12)


def random_like(problem, rng):
    """Return random numbers in the shape of a problem's parameters."""
    return {
        name: {k: rng.normal(size=v.shape) for k, v in arrays.items()}
        for name, arrays in problem.start(0).items()
    }


def moved(problem, start, scale, along):
    """Return parameters moved along a direction."""
    return {
        name: {k: v + scale * along[name][k] for k, v in arrays.items()}
        for name, arrays in start.items()
    }


def test_every_method_has_the_same_budget(catalogue):
    """Twelve different settings each, four learning rates times three values."""
    for method in catalogue.values():
        settings = [tuple(s.items()) for s in method.settings()]
        assert len(set(settings)) == 12
        assert len(method.learning_rates) == 4


def test_a_search_spends_the_budget_and_confirms_on_other_seeds(
    part, problems, catalogue
):
    """Each setting once on one seed, and the best of them on seeds not tuned on."""
    search, problem = part("search"), problems["autoencoder"]
    methods = [catalogue["SGD"], catalogue["Adam"]]

    found = search.search(problem, methods, steps=4)

    for method in methods:
        runs = found[method.name]
        assert [run.setting for run in runs.searched] == method.settings()
        assert {run.seed for run in runs.searched} == {search.TUNING_SEED}
        assert all(run.steps[-1] <= 4 for run in runs.searched)
        least = min(runs.searched, key=lambda run: run.least)
        assert [run.setting for run in runs.confirmed] == [least.setting] * 3
        seeds = {run.seed for run in runs.confirmed}
        assert len(seeds) == 3
        assert search.TUNING_SEED not in seeds


def test_a_run_ends_where_it_is_at_its_last_target(part, problems, catalogue):
    """And what is compared is when it was there first."""
    training, problem = part("training"), problems["autoencoder"]
    run = training.Run("x", {}, 0, [0, 2, 4], [0.0, 0.5, 0.9], [9.0, 3.0, 1.0])
    quicker = training.Run("x", {}, 0, [0, 2], [0.0, 0.5], [9.0, 0.5])

    assert run.reached(9.5) == (0, 0.0)
    assert run.reached(2.0) == (4, 0.9)
    assert run.reached(0.5) is None
    rank = part("search").rank
    assert rank(quicker, (3.0, 1.0)) < rank(run, (3.0, 1.0))
    assert rank(run, (3.0, 0.1)) < rank(quicker, (0.1, 0.1))

    easy = type(problem)(widths=(64, 6, 64))
    easy.batch_size, easy.targets = 100, (40.0, 30.0)
    method = catalogue["KFAC"]
    made = training.train(easy, method, setting_of(method), seed=0, steps=30)

    assert made.losses[-1] <= 30.0 < made.losses[-2]
    assert made.steps[-1] < 30


def test_a_run_that_fails_says_why(part, problems, catalogue):
    """A learning rate without measure ends in an error or a loss, not in an exception."""
    method = catalogue["KL-Shampoo"]
    setting = {"learning_rate": 1e200, "damping": 0.1}

    run = part("training").train(
        problems["classifier"], method, setting, seed=0, steps=12
    )

    assert run.failure is not None or not np.isfinite(run.losses[-1])
    assert run.steps[-1] < 12
    assert run.least == run.losses[0]


def test_the_command_prints_tables_and_writes_numbers_and_a_picture(
    part, tmp_path, capsys
):
    """A short run has a row a method; reading its numbers prints the same tables."""
    pytest.importorskip("matplotlib")
    main = part("command").main
    numbers, picture = tmp_path / "methods.json", tmp_path / "methods.png"
    chosen = ["--problem", "classifier", "--methods", "block-tridiagonal", "SGD"]

    code = main(["--quick", *chosen, "--json", str(numbers), "--figure", str(picture)])
    printed = capsys.readouterr().out
    again = main(["--read", str(numbers)])
    reread = capsys.readouterr().out

    assert code == again == 0
    assert reread == printed
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = [line for line in printed.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 2
    assert rows[2].startswith("| SGD | momentum | ")
    assert rows[3].startswith("| block-tridiagonal | dense layers only |")
    assert {row.count("|") for row in rows} == {12}
    result = json.loads(numbers.read_text())
    assert result["settings"]["tuning_seed"] not in result["settings"]["seeds"]
    assert set(result["problems"]) == {"classifier"}
    problem = result["problems"]["classifier"]
    assert len(problem["targets"]) == 2
    assert problem["left_out"] == ["block-tridiagonal"]
    assert set(problem["methods"]) == {"SGD"}
    method = problem["methods"]["SGD"]
    assert len(method["searched"]) == 2
    assert method["chosen"] in [run["setting"] for run in method["searched"]]
    assert len(method["steps_to"]) == len(method["seconds_to"]) == 2
    for run in method["confirmed"]:
        assert run["steps"][0] == 0
        assert len(run["steps"]) == len(run["seconds"]) == len(run["losses"])


def test_medians_and_marks(part, catalogue):
    """A median counts runs that never arrived, and an edge of a grid is marked."""
    report, table = part("report"), part("table")

    assert report.median([(4, 0.1), None, (8, 0.3)], 0) == 8
    assert report.median([(4, 0.1), None, None], 0) is None
    method = catalogue["Adam"]
    assert report.at_edge(method, {"learning_rate": 0.01, "beta2": 0.8}) == ["beta2"]
    assert table.edge({"at_edge": ["beta2"]}, "beta2") == "*"
    assert table.edge({"at_edge": ["beta2"]}, "learning_rate") == ""
