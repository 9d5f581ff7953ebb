"""The losses, against likelihoods written down once more and enumerated.

The references work on one row.  Gradients are complex steps through a log-probability,
Hessians are fourth-order differences of those; expectations over targets are sums over
all of them, by Gauss-Hermite nodes where targets are continuous (exact up to degree 9).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.special
import scipy.stats

import kfac_core as kc
from kfac_core.losses import (
    Bernoulli,
    Categorical,
    Gaussian,
    GaussianLearnedVariance,
    Joint,
    SquaredError,
)

from ..builders.tolerances import assert_close, assert_differs

VARIANCE = 0.7
SCALE = 1.3


@dataclasses.dataclass(frozen=True)
class Case:
    """A loss, and the likelihood of one row that it must agree with."""

    loss: Any
    outputs: int
    log_probability: Callable[[np.ndarray, np.ndarray], Any]
    targets: Callable[[np.ndarray], list[tuple[float, np.ndarray]]]

    @property
    def name(self) -> str:
        """The loss's class."""
        return type(self.loss).__name__

    def gradient(self, z: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return the gradient of the negative log-probability by complex steps."""
        steps = z + 1e-30j * np.eye(len(z))
        return np.array(
            [-np.imag(self.log_probability(row, y)) / 1e-30 for row in steps]
        )

    def hessian(self, z: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return the Hessian of the negative log-probability."""
        h = 1e-3
        rows = []
        for e in h * np.eye(len(z)):
            near = self.gradient(z + e, y) - self.gradient(z - e, y)
            far = self.gradient(z + 2 * e, y) - self.gradient(z - 2 * e, y)
            rows.append((8 * near - far) / (12 * h))
        return np.array(rows)

    def fisher(self, z: np.ndarray) -> np.ndarray:
        """Return the Fisher matrix, a sum over all targets."""
        pairs = [(p, self.gradient(z, y)) for p, y in self.targets(z)]
        return sum(p * np.outer(g, g) for p, g in pairs)

    def natural(self, rng: np.random.Generator, *lead: int) -> np.ndarray:
        """Return random outputs."""
        return rng.normal(size=(*lead, self.outputs))

    def random_targets(
        self, rng: np.random.Generator, natural: np.ndarray
    ) -> np.ndarray:
        """Return some target for every row."""
        rows = [self.targets(z) for z in natural.reshape(-1, self.outputs)]
        chosen = np.array([row[rng.integers(len(row))][1] for row in rows])
        return chosen.reshape(*natural.shape[:-1], *chosen.shape[1:])


def _normal_targets(mean, deviation):
    nodes, weights = np.polynomial.hermite_e.hermegauss(5)
    weights = weights / weights.sum()
    return [
        (float(np.prod(weights[list(index)])), mean + deviation * nodes[list(index)])
        for index in itertools.product(range(5), repeat=len(mean))
    ]


def _normal(z, y, variance):
    return np.sum(-0.5 * (y - z) ** 2 / variance - 0.5 * np.log(2 * np.pi * variance))


def _bits(z):
    p = scipy.special.expit(z)
    every = itertools.product([0.0, 1.0], repeat=len(z))
    return [
        (float(np.prod(np.where(bits, p, 1 - p))), np.array(bits)) for bits in every
    ]


CASES = [
    Case(
        Categorical(),
        4,
        lambda z, y: z[int(y)] - np.log(np.sum(np.exp(z))),
        lambda z: [(p, np.array(c)) for c, p in enumerate(scipy.special.softmax(z))],
    ),
    Case(Bernoulli(), 3, lambda z, y: np.sum(y * z - np.log(1 + np.exp(z))), _bits),
    Case(
        Gaussian(variance=VARIANCE),
        3,
        lambda z, y: _normal(z, y, VARIANCE),
        lambda z: _normal_targets(z, np.sqrt(VARIANCE)),
    ),
    Case(
        GaussianLearnedVariance(),
        4,
        lambda z, y: _normal(z[:2], y, np.exp(z[2:])),
        lambda z: _normal_targets(z[:2], np.exp(z[2:] / 2)),
    ),
    Case(
        SquaredError(scale=SCALE),
        3,
        lambda z, y: -SCALE * np.sum((y - z) ** 2) - 1.5 * np.log(np.pi / SCALE),
        lambda z: _normal_targets(z, np.sqrt(0.5 / SCALE)),
    ),
    # Targets are a class and two numbers, as one vector; `targets_array` parts them.
    Case(
        Joint(losses=(Categorical(), Gaussian(variance=VARIANCE)), sizes=(3, 2)),
        5,
        lambda z, y: (
            z[int(y[0])]
            - np.log(np.sum(np.exp(z[:3])))
            + _normal(z[3:], y[1:], VARIANCE)
        ),
        lambda z: [
            (p * q, np.array([c, *y]))
            for c, p in enumerate(scipy.special.softmax(z[:3]))
            for q, y in _normal_targets(z[3:], np.sqrt(VARIANCE))
        ],
    ),
]
CONTINUOUS = CASES[2:5]

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
every_natural_case = pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.name != "GaussianLearnedVariance"],
    ids=lambda case: case.name,
)
leading_axes = pytest.mark.parametrize("lead", [(5,), (3, 2)], ids=str)


def in_rows(function, *arrays):
    """Apply a function of one row to all rows, given as (array, its row's ndim)."""
    (first, ndim), *_ = arrays
    lead = first.shape[: first.ndim - ndim]
    results = [function(*(a[index] for a, _ in arrays)) for index in np.ndindex(lead)]
    return np.array(results).reshape(*lead, *np.shape(results[0]))


def targets_array(backend, case, targets, dtype):
    """Bring targets to the backend: labels as integers, everything else as floats."""
    if case.name == "Joint":
        labels = backend.asarray(targets[..., 0].astype(np.int64))
        return labels, backend.asarray(targets[..., 1:], dtype)
    return backend.asarray(targets, None if case.name == "Categorical" else dtype)


def rounded(values, dtype):
    """Return the numbers that the backend will be given, in float64."""
    return np.asarray(values).astype(dtype).astype(np.float64)


def unit_vectors(backend, shape, dtype):
    """Return e_i for every row, with the axis of i in front."""
    units = np.eye(shape[-1]).reshape(
        shape[-1], *(1 for _ in shape[:-1]), shape[-1]
    ) * np.ones(shape)
    return backend.asarray(units, dtype)


def as_matrices(backend, product, natural, shape, dtype):
    """Return the matrix of a product for every row, from its columns."""
    columns = backend.to_numpy(product(natural, unit_vectors(backend, shape, dtype)))
    return np.moveaxis(columns, 0, -1)


@every_case
@leading_axes
@pytest.mark.parametrize("what", ["log_probability", "gradient"])
def test_values_and_gradients_are_those_of_the_likelihood(
    backend, dtype, rng, case, lead, what
):
    """Each row's log-probability is normalized; gradients agree with complex steps."""
    z = rounded(case.natural(rng, *lead), dtype)
    y = case.random_targets(rng, z)
    y = y if y.dtype.kind == "i" else rounded(y, dtype)

    got = getattr(case.loss, what)(
        backend.asarray(z, dtype), targets_array(backend, case, y, dtype)
    )

    expected = in_rows(getattr(case, what), (z, 1), (y, y.ndim - len(lead)))
    assert_close(backend.to_numpy(got), expected, "roundoff", dtype)


def test_references_are_those_of_scipy(rng):
    """The likelihoods that the tests compare with agree with SciPy's."""
    z, y = rng.normal(size=3), rng.normal(size=3)
    bits = np.array([0.0, 1.0, 1.0])

    categorical, bernoulli, gaussian, learned, squared, joint = CASES

    assert np.isclose(
        categorical.log_probability(z, np.array(1)), scipy.special.log_softmax(z)[1]
    )
    p = scipy.special.expit(z)
    expected = scipy.stats.bernoulli.logpmf(bits, p).sum()
    assert np.isclose(bernoulli.log_probability(z, bits), expected)
    expected = scipy.stats.norm.logpdf(y, z, np.sqrt(VARIANCE)).sum()
    assert np.isclose(gaussian.log_probability(z, y), expected)
    expected = scipy.stats.norm.logpdf(y, z, np.sqrt(0.5 / SCALE)).sum()
    assert np.isclose(squared.log_probability(z, y), expected)
    expected = scipy.stats.norm.logpdf(y[:2], z[:2], np.exp(0.5 * bits[:2])).sum()
    both = np.concatenate([z[:2], bits[:2]])
    assert np.isclose(learned.log_probability(both, y[:2]), expected)
    expected = scipy.special.log_softmax(z)[1]
    expected += scipy.stats.norm.logpdf(y[:2], bits[:2], np.sqrt(VARIANCE)).sum()
    both = np.concatenate([z, bits[:2]])
    assert np.isclose(joint.log_probability(both, np.array([1, *y[:2]])), expected)


@every_case
@leading_axes
def test_fisher_product_is_the_enumerated_fisher(backend, dtype, rng, case, lead):
    """The Fisher matrix is the expectation of g g^T over the model's targets."""
    z = rounded(case.natural(rng, *lead), dtype)
    natural = backend.asarray(z, dtype)

    got = as_matrices(backend, case.loss.fisher_multiply, natural, z.shape, dtype)

    expected = in_rows(case.fisher, (z, 1))
    assert_close(got, expected, "product", dtype)


@every_case
@leading_axes
def test_factor_times_its_transpose_is_the_fisher(backend, dtype, rng, case, lead):
    """B B^T is the Fisher matrix, and the transpose product is that of B."""
    z = rounded(case.natural(rng, *lead), dtype)
    natural = backend.asarray(z, dtype)
    inner = case.loss.inner_shape(natural)

    B = as_matrices(backend, case.loss.fisher_factor_multiply, natural, inner, dtype)
    B_T = as_matrices(
        backend, case.loss.fisher_factor_transpose_multiply, natural, z.shape, dtype
    )

    assert_close(np.swapaxes(B, -1, -2), B_T, "product", dtype)
    expected = in_rows(case.fisher, (z, 1))
    assert_close(B @ np.swapaxes(B, -1, -2), expected, "product", dtype)


@every_natural_case
def test_ggn_is_the_hessian_at_any_target(backend, dtype, rng, case):
    """For natural parameters the Hessian of each target's loss is the GGN's matrix."""
    z = rounded(case.natural(rng, 5), dtype)
    y = case.random_targets(rng, z)
    natural = backend.asarray(z, dtype)
    inner = case.loss.inner_shape(natural)

    H = as_matrices(backend, case.loss.ggn_multiply, natural, z.shape, dtype)
    B = as_matrices(backend, case.loss.ggn_factor_multiply, natural, inner, dtype)

    expected = in_rows(case.hessian, (z, 1), (y, y.ndim - 1))
    assert_close(H, expected, "inverse", dtype)
    assert_close(B @ np.swapaxes(B, -1, -2), expected, "inverse", dtype)


def test_learned_variance_has_no_ggn(backend, dtype, rng):
    """Its Hessian is indefinite and depends on the target, so the GGN is refused."""
    case = CASES[3]
    z = case.natural(rng, 2)
    natural = backend.asarray(z, dtype)
    H = [case.hessian(z[0], y) for _, y in case.targets(z[0])]

    for name in ("multiply", "factor_multiply"):
        with pytest.raises(kc.UnsupportedError, match="depends on the targets"):
            getattr(case.loss, f"ggn_{name}")(natural, natural)

    assert min(np.linalg.eigvalsh(h)[0] for h in H) < -0.1
    assert_differs(H[0], H[1])


@every_case
def test_sampled_gradient_is_the_gradient_at_the_sample(backend, rng, case):
    """The direct form of the gradient at sampled targets is that of its definition."""
    natural = backend.asarray(case.natural(rng, 4))
    noise = backend.asarray(rng.uniform(size=case.loss.noise_shape(natural)))

    direct = case.loss.sampled_gradient(natural, noise)
    at_sample = case.loss.gradient(natural, case.loss.sample(natural, noise))

    got, expected = backend.to_numpy(direct), backend.to_numpy(at_sample)
    assert_close(got, expected, "product", "float64")


@pytest.mark.parametrize("case", CONTINUOUS, ids=lambda case: case.name)
def test_sampled_gradient_is_not_rounded_by_a_large_mean(backend, case):
    """Noise that vanishes beside the mean is not lost from the gradient."""
    z = np.zeros((1, case.outputs))
    shape = case.loss.noise_shape(z)
    z[:, : shape[-1]] = 3e7
    natural = backend.asarray(z, "float32")
    noise = backend.asarray(np.full(shape, 0.5), "float32")

    got = backend.to_numpy(case.loss.sampled_gradient(natural, noise))
    rounded_away = case.loss.gradient(natural, case.loss.sample(natural, noise))

    small = backend.asarray(np.zeros_like(z), "float32")
    expected = backend.to_numpy(case.loss.sampled_gradient(small, noise))
    assert_close(got, expected, "roundoff", "float32")
    assert_differs(backend.to_numpy(rounded_away), expected)


@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.name)
def test_samples_of_a_grid_have_the_stated_frequencies(backend, dtype, rng, case):
    """Uniform noise on a grid of K points meets every probability to 1/K."""
    K = 2000
    z = case.natural(rng, 1)
    grid = (np.arange(K) + 0.5) / K
    shape = case.loss.noise_shape(z)
    noise = np.broadcast_to(grid.reshape(K, *(1 for _ in shape)), (K, *shape))

    got = backend.to_numpy(
        case.loss.sample(backend.asarray(z, dtype), backend.asarray(noise, dtype))
    )

    if case.name == "Categorical":
        frequencies = np.array([np.mean(got == c) for c in range(4)])
        expected = scipy.special.softmax(z[0])
    else:
        frequencies, expected = got.mean(axis=(0, 1)), scipy.special.expit(z[0])
    assert np.max(np.abs(frequencies - expected)) <= 1.01 / K


@pytest.mark.parametrize("case", CONTINUOUS, ids=lambda case: case.name)
def test_samples_are_mean_plus_deviation_times_noise(backend, dtype, rng, case):
    """Gaussian samples are an affine function of the noise."""
    z = rounded(case.natural(rng, 4), dtype)
    e = rng.normal(size=case.loss.noise_shape(z))
    D = e.shape[-1]
    deviation = {
        "Gaussian": np.sqrt(VARIANCE),
        "GaussianLearnedVariance": np.exp(0.5 * z[:, D:]),
        "SquaredError": np.sqrt(0.5 / SCALE),
    }[case.name]

    got = case.loss.sample(backend.asarray(z, dtype), backend.asarray(e, dtype))

    expected = z[:, :D] + deviation * e
    assert_close(backend.to_numpy(got), expected, "roundoff", dtype)


def test_excluded_classes_are_never_drawn(backend, dtype):
    """A logit of minus infinity has probability zero, at either end of the noise."""
    z = np.array([[-np.inf, 1.0, -np.inf, 2.0, -np.inf]] * 3)
    u = np.array([0.0, 0.5, np.nextafter(np.float32(1), np.float32(0))])
    natural = backend.asarray(z, dtype)

    labels = Categorical().sample(natural, backend.asarray(u, dtype))
    gradients = backend.to_numpy(Categorical().gradient(natural, labels))
    soft = backend.asarray([[0, 1.0, 0, 0, 0]] * 3, dtype)

    assert backend.to_numpy(labels).tolist() == [1, 3, 3]
    assert np.all(np.isfinite(gradients))
    assert np.all(gradients[:, ::2] == 0)
    log_p = backend.to_numpy(Categorical().log_probability(natural, soft))
    expected = np.full(3, -np.log(1 + np.e))
    assert_close(log_p, expected, "roundoff", dtype)


@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.name)
def test_extreme_logits_stay_finite(backend, dtype, case):
    """Logits of ten thousand give finite numbers everywhere."""
    z = np.array([[1e4, -1e4, 0.0, 3.0], [-1e4, -1e4, -1e4, 2e4]])
    natural = backend.asarray(z, dtype)
    v = backend.asarray(np.ones_like(z), dtype)
    noise = backend.asarray(np.full(case.loss.noise_shape(z), 0.5), dtype)
    targets = case.loss.sample(natural, noise)

    results = [
        case.loss.log_probability(natural, targets),
        case.loss.gradient(natural, targets),
        case.loss.fisher_multiply(natural, v),
        case.loss.fisher_factor_multiply(natural, v),
        case.loss.fisher_factor_transpose_multiply(natural, v),
    ]

    assert all(np.all(np.isfinite(backend.to_numpy(r))) for r in results)


def test_confident_rows_keep_their_relative_accuracy(backend):
    """The likeliest class's entries, 1 - p nearly 0, are right in float32 too."""
    z = np.array([[0.0, 18.0, -1.0, 0.5]])
    natural = backend.asarray(z, "float32")
    e = backend.asarray([[0.0, 1.0, 0.0, 0.0]], "float32")
    p = scipy.special.softmax(z[0])
    rest = p[0] + p[2] + p[3]
    loss = Categorical()

    gradient = backend.to_numpy(loss.gradient(natural, backend.asarray([1])))
    F_e = backend.to_numpy(loss.fisher_multiply(natural, e))
    B_e = backend.to_numpy(loss.fisher_factor_multiply(natural, e))
    B_T_e = backend.to_numpy(loss.fisher_factor_transpose_multiply(natural, e))

    assert np.isclose(gradient[0, 1], -rest, rtol=1e-5, atol=0)
    for got in (F_e, B_e, B_T_e):
        assert np.isclose(got[0, 1], rest, rtol=1e-5, atol=0)
    naive = np.float32(1) - np.float32(p[1])
    assert not np.isclose(naive, rest, rtol=1e-2, atol=0)


def test_labels_out_of_range_give_nan(backend, dtype, rng):
    """A label that is no class gives NaN in its row, and in no other."""
    natural = backend.asarray(rng.normal(size=(4, 3)), dtype)
    labels = backend.asarray([0, -100, 3, 2])

    gradient = backend.to_numpy(Categorical().gradient(natural, labels))
    log_p = backend.to_numpy(Categorical().log_probability(natural, labels))

    assert np.isnan(gradient).all(axis=1).tolist() == [False, True, True, False]
    assert np.isnan(gradient).any(axis=1).tolist() == [False, True, True, False]
    assert np.isnan(log_p).tolist() == [False, True, True, False]


def test_invalid_probabilities_give_nan(backend, dtype):
    """Labels of -1 and 1 belong to another loss; soft ones may be rounded."""
    natural = backend.asarray(np.zeros((5, 1)), dtype)
    targets = backend.asarray([[-1.0], [1.0], [0.25], [1.00001], [np.nan]], dtype)

    gradient = backend.to_numpy(Bernoulli().gradient(natural, targets))
    log_p = backend.to_numpy(Bernoulli().log_probability(natural, targets))

    assert np.isnan(gradient)[:, 0].tolist() == [True, False, False, False, True]
    assert np.isnan(log_p).tolist() == [True, False, False, False, True]


def test_narrow_labels_count_many_classes(backend, dtype, rng):
    """Labels of eight bits go together with three hundred classes."""
    z = rng.normal(size=(3, 300))
    natural = backend.asarray(z, dtype)
    labels = np.array([0, 7, 100])

    narrow = Categorical().gradient(natural, backend.asarray(labels, "int8"))
    wide = Categorical().gradient(natural, backend.asarray(labels))

    got, expected = backend.to_numpy(narrow), backend.to_numpy(wide)
    assert_close(got, expected, "exact", dtype)


def test_rows_of_probabilities_are_mixtures_of_labels(backend, dtype, rng):
    """A floating target t gives the average of the labels' results, weighted by t."""
    z = rng.normal(size=(5, 4))
    natural = backend.asarray(z, dtype)
    t = rng.dirichlet(np.ones(4), size=5)
    rows = backend.asarray(t, dtype)
    loss = Categorical()

    gradient = backend.to_numpy(loss.gradient(natural, rows))
    log_p = backend.to_numpy(loss.log_probability(natural, rows))

    labels = [backend.asarray(np.full(5, c)) for c in range(4)]
    g = [backend.to_numpy(loss.gradient(natural, y)) for y in labels]
    lp = [backend.to_numpy(loss.log_probability(natural, y)) for y in labels]
    expected = sum(t[:, c, None] * g[c] for c in range(4))
    assert_close(gradient, expected, "roundoff", dtype)
    expected = sum(t[:, c] * lp[c] for c in range(4))
    assert_close(log_p, expected, "roundoff", dtype)


@every_case
def test_half_precision_is_widened(backend, rng, case):
    """Outputs of 16 bits are computed with in float32, and give float32."""
    if not hasattr(backend.xp, "float16"):
        pytest.skip("this library has no float16")
    z = case.natural(rng, 3).astype("float16")
    v = rng.normal(size=z.shape).astype("float16")
    wide = backend.asarray(z, "float32"), backend.asarray(v, "float32")

    got = case.loss.fisher_multiply(backend.asarray(z), backend.asarray(v))

    expected = backend.to_numpy(case.loss.fisher_multiply(*wide))
    assert got.dtype == backend.xp.float32
    assert_close(backend.to_numpy(got), expected, "exact", "float32")


@pytest.mark.parametrize("kind", [float, bool])
def test_floating_labels_raise(backend, kind):
    """They were taken for rows of probabilities of another shape."""
    z = backend.asarray(np.zeros((4, 2)))
    labels = backend.asarray(np.array([0, 1, 1, 0]).astype(kind))
    for function in (Categorical().gradient, Categorical().log_probability):
        with pytest.raises(kc.DtypeError, match=r"`targets` to be integer labels"):
            function(z, labels)


def test_learned_variance_refuses_an_odd_number_of_outputs(backend):
    """Means and log-variances come in equal numbers."""
    with pytest.raises(kc.ShapeError, match="multiple of 2"):
        GaussianLearnedVariance().gradient(
            backend.asarray(np.zeros((4, 5))), backend.asarray(np.zeros((4, 2)))
        )


def weighted_heads():
    """Return a weighted joint loss, and for each head its case, size and weight."""
    heads = [(CASES[1], 2, 0.3), (CASES[3], 4, 2.0), (CASES[0], 3, 1.0)]
    cases, sizes, weights = zip(*heads, strict=True)
    losses = tuple(case.loss for case in cases)
    return Joint(losses=losses, sizes=sizes, weights=weights), heads


def test_weights_of_heads_are_those_of_their_terms(backend, dtype, rng):
    """Values and gradients have w, curvature has w, and what is drawn has its root."""
    loss, heads = weighted_heads()
    starts = [0, 2, 6]
    z = rounded(rng.normal(size=(5, 9)), dtype)
    of_heads = [z[:, i : i + n] for i, (_, n, _) in zip(starts, heads, strict=True)]
    y = [rng.integers(0, 2, (5, 2)) * 1.0, rng.normal(size=(5, 2))]
    y = [y[0], rounded(y[1], dtype), rng.integers(0, 3, 5)]
    natural = backend.asarray(z, dtype)
    targets = tuple(
        targets_array(backend, case, of_head, dtype)
        for (case, *_), of_head in zip(heads, y, strict=True)
    )

    def expected(name, *arrays):
        return [
            w * in_rows(getattr(case, name), (own, 1), *((a, a.ndim - 1) for a in rest))
            for (case, _, w), own, *rest in zip(heads, of_heads, *arrays, strict=True)
        ]

    got = backend.to_numpy(loss.log_probability(natural, targets))
    assert_close(got, sum(expected("log_probability", y)), "roundoff", dtype)
    got = backend.to_numpy(loss.gradient(natural, targets))
    assert_close(got, np.concatenate(expected("gradient", y), 1), "roundoff", dtype)

    F = np.array(
        [
            scipy.linalg.block_diag(*blocks)
            for blocks in zip(*expected("fisher"), strict=True)
        ]
    )
    got = as_matrices(backend, loss.fisher_multiply, natural, z.shape, dtype)
    assert_close(got, F, "product", dtype)
    v = kc.losses.vectors(loss, natural, mode="exact").vectors
    v = backend.to_numpy(v)
    assert_close(np.einsum("mni,mnj->nij", v, v), F, "product", dtype)
    drawn = kc.losses.drawn_vectors(
        loss, natural, mode="gradients", seed=0, shared=False, samples=40_000
    )
    v = backend.to_numpy(drawn.vectors).astype(float)
    got = np.einsum("mni,mnj->nij", v, v) / len(v)
    assert np.max(np.abs(got - F)) <= 0.05 * np.max(F)


def test_normal_noise_of_a_head_is_drawn_from_two_uniform_numbers(backend, dtype):
    """Box and Muller: a Rayleigh quantile of the one, times a cosine of the other."""
    loss = Joint(losses=(Gaussian(variance=VARIANCE),), sizes=(2,))
    u = (np.arange(40) + 0.5).reshape(10, 4) / 40
    u[0, 0], u[1, 0] = 0.0, 1.0

    (got,) = loss.sample(
        backend.asarray(np.ones((10, 2)), dtype), backend.asarray(u, dtype)
    )

    got = backend.to_numpy(got)
    radius = scipy.stats.rayleigh.ppf(u[:, :2])
    e = radius * np.cos(2 * np.pi * u[:, 2:])
    finite = np.isfinite(radius)
    expected = (1 + np.sqrt(VARIANCE) * e)[finite]
    assert_close(got[finite], expected, "roundoff", dtype)
    # What was rounded to 1 is a number below.
    assert np.all(np.isfinite(got))


def test_heads_that_do_not_fit_are_refused(backend):
    """Their numbers, outputs and targets; and squares of their weights."""
    losses = Categorical(), Gaussian(variance=1.0)
    for options in (
        {"losses": losses, "sizes": (3,)},
        {"losses": losses, "sizes": (3, 1), "weights": (1.0,)},
        {"losses": (), "sizes": ()},
        {"losses": losses, "sizes": (3, 1), "weights": (1.0, 0.0)},
    ):
        with pytest.raises(kc.ConventionError, match=r"`(losses|weights)`"):
            Joint(**options)
    with pytest.raises(kc.ShapeError, match="`sizes`"):
        Joint(losses=losses, sizes=(3, 0))
    loss = Joint(losses=losses, sizes=(3, 1), weights=(1.0, 0.5))
    natural, y = backend.asarray(np.zeros((4, 4))), backend.asarray(np.zeros(4, int))
    with pytest.raises(kc.ShapeError, match=r"`natural`.*4\).*\(4, 5\)"):
        loss.fisher_multiply(*[backend.asarray(np.zeros((4, 5)))] * 2)
    for targets in (y, (y,)):
        with pytest.raises(kc.ShapeError, match="`targets` to be a tuple of 2"):
            loss.gradient(natural, targets)
    targets = y, backend.asarray(np.zeros((4, 1)))
    outer = Joint(losses=(loss, Bernoulli()), sizes=(4, 2))
    more = backend.asarray(np.zeros((4, 6)))
    for one, z, of_heads in (
        (loss, natural, targets),
        (outer, more, (targets, more[:, 4:])),
    ):
        with pytest.raises(kc.UnsupportedError, match="'empirical' would square"):
            kc.losses.vectors(one, z, mode="empirical", targets=of_heads)
    assert outer.gradient(more, (targets, more[:, 4:])).shape == (4, 6)


@every_case
def test_errors_name_the_argument(backend, rng, case):
    """What does not fit is an error with the argument's name and shape."""
    loss, z = case.loss, case.natural(rng, 4)
    natural = backend.asarray(z)
    y = targets_array(backend, case, case.random_targets(rng, z), "float64")
    wrong = backend.asarray(np.zeros((4, case.outputs + 1)))
    wrong_targets = (y[0], wrong) if case.name == "Joint" else wrong

    with pytest.raises(kc.DtypeError, match=r"`natural`.*floating"):
        loss.gradient(backend.asarray(np.zeros((4, 4), int)), y)
    with pytest.raises(kc.DtypeError, match=r"`natural`.*array"):
        loss.gradient(z.tolist(), y)
    with pytest.raises(kc.ShapeError, match="`natural`"):
        loss.gradient(backend.asarray(1.0), y)
    with pytest.raises(kc.ShapeError, match=r"`targets`.*\(4, "):
        loss.gradient(natural, wrong_targets)
    with pytest.raises(kc.ShapeError, match="`noise`"):
        loss.sample(natural, wrong)
    for product in ("multiply", "factor_multiply", "factor_transpose_multiply"):
        with pytest.raises(kc.ShapeError, match=r"`v`.*\(4, "):
            getattr(loss, f"fisher_{product}")(natural, wrong)
        with pytest.raises(kc.DtypeError, match="`v`"):
            getattr(loss, f"fisher_{product}")(natural, backend.asarray(z.astype(int)))
