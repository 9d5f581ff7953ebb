"""The vectors of every estimation mode, against enumerated Fisher matrices.

The references are the likelihoods of ``test_losses``: sums over every target, one row at
a time.  Sampled modes are held to the standard error that follows from the fourth
moments of their vectors, which are enumerated too.
"""

from __future__ import annotations

import functools
import itertools
from typing import get_args

import numpy as np
import pytest
import scipy.linalg

import kfac_core as kc
from kfac_core.losses import (
    Categorical,
    EstimationMode,
    NoiseSpec,
    draw_noise,
    drawn_vectors,
    noise_spec,
    vectors,
    with_random_signs,
)

from ..builders.one_block import learn, operator_for
from ..builders.tolerances import assert_close, assert_differs
from ..builders.tracing import compiler_of
from .test_losses import (
    CASES,
    every_case,
    every_natural_case,
    in_rows,
    leading_axes,
    rounded,
    targets_array,
)

MODES = get_args(EstimationMode)
SAMPLED = ("gradients", "curvature_prop", "curvature_prop_GGN")
every_mode = pytest.mark.parametrize("mode", MODES)
every_pair = pytest.mark.parametrize(
    ("case", "mode"),
    [
        pytest.param(case, mode, id=f"{case.name}-{mode}")
        for case, mode in itertools.product(CASES, MODES)
        if not (case.name == "GaussianLearnedVariance" and mode.endswith("GGN"))
    ],
)
CATEGORICAL = CASES[0]


def noise_for(case, natural, mode, *, samples=1, seed=3):
    """Return noise as a mode asks for it, which may be None."""
    spec = noise_spec(case.loss, natural, mode=mode, samples=samples)
    return None if spec is None else draw_noise(spec, like=natural, rng=seed)


def sources_of(
    backend, case, z, mode, dtype="float64", *, samples=2, seed=7, **options
):
    """Return a mode's vectors, with targets and noise made from the seed."""
    natural = backend.asarray(z, dtype)
    noise = noise_for(case, natural, mode, samples=samples, seed=seed)
    y = case.random_targets(np.random.default_rng(seed), z)
    targets = targets_array(backend, case, y, dtype)
    return vectors(
        case.loss, natural, mode=mode, noise=noise, targets=targets, **options
    )


def outer_products(backend, made):
    """Return the sum or mean over sources of v v^T, for every row."""
    v = backend.to_numpy(made.vectors)
    total = np.einsum("m...i,m...j->...ij", v, v)
    return total / made.sources if made.source_reduction == "mean" else total


def output_factor(backend, made, *, sources=None):
    """Return G as a block's statistics have it, from a layer with one input of 1."""
    *rows, width = made.vectors.shape[1:]
    layer = kc.Dense(in_features=1, out_features=width, bias=False, weight_layout="io")
    block = kc.Block(layer, kc.Kronecker())
    dtype = "float32" if made.vectors.dtype == backend.xp.float32 else "float64"
    inputs = backend.asarray(np.ones((*rows, 1)), dtype)
    statistics = learn(
        block,
        kc.Batch(inputs, made.vectors, sources=made.sources),
        block.initial(inputs),
        conventions=kc.Conventions(
            reduction="sum", sources=sources or made.source_reduction
        ),
    )
    operator = operator_for(
        block, statistics, damping=1.0, rule="exact", factorizations=()
    )
    return backend.to_numpy(operator.to_dense(damped=False))


def fourth_moments(case, z, mode):
    """Return E[v_i v_j] and the variance of v_i v_j for one row's vectors."""
    if mode == "gradients":
        pairs = [(p, case.gradient(z, y)) for p, y in case.targets(z)]
    else:
        B = _factor(case, z)
        every = itertools.product([-1.0, 1.0], repeat=B.shape[1])
        pairs = [(0.5 ** B.shape[1], B @ np.array(r)) for r in every]
    mean = sum(p * np.outer(v, v) for p, v in pairs)
    squares = sum(p * np.outer(v, v) ** 2 for p, v in pairs)
    return mean, np.maximum(squares - mean**2, 0.0)


def _factor(case, z):
    """Return the documented factor B, whose signs decide what curvature_prop draws."""
    if case.name == "Categorical":
        p = np.exp(z) / np.sum(np.exp(z))
        return np.diag(np.sqrt(p)) - np.outer(p, np.sqrt(p))
    if case.name == "Joint":
        gaussian = np.diag(np.sqrt(np.diag(case.fisher(z))[3:]))
        return scipy.linalg.block_diag(_factor(CATEGORICAL, z[:3]), gaussian)
    return np.diag(np.sqrt(np.diag(case.fisher(z))))


@every_case
@leading_axes
def test_exact_is_the_enumerated_fisher(backend, dtype, rng, case, lead):
    """The sources of the exact mode sum to the Fisher matrix of every row."""
    z = rounded(case.natural(rng, *lead), dtype)

    made = sources_of(backend, case, z, "exact", dtype)

    assert made.vectors.shape == (made.sources, *z.shape)
    expected = in_rows(case.fisher, (z, 1))
    assert_close(outer_products(backend, made), expected, "product", dtype)


@every_natural_case
@leading_axes
def test_exact_ggn_works_and_is_the_hessian(backend, dtype, rng, case, lead):
    """TensorFlow's exact_GGN always raised; here it is the Hessian at any target."""
    z = rounded(case.natural(rng, *lead), dtype)
    y = case.random_targets(rng, z)

    made = sources_of(backend, case, z, "exact_GGN", dtype)

    expected = in_rows(case.hessian, (z, 1), (y, y.ndim - len(lead)))
    assert_close(outer_products(backend, made), expected, "inverse", dtype)


@every_case
@pytest.mark.parametrize("mode", ["gradients", "curvature_prop"])
def test_sampled_modes_converge_at_the_rate_of_a_mean(backend, rng, case, mode):
    """With M samples every entry's error is its standard error, which falls as M^-1/2.

    Over all entries the root mean square of error over standard error is 1 but for the
    luck of the seed; the bound is [0.7, 1.4], and five standard errors for any entry.
    """
    z = case.natural(rng, 12)
    moments = [fourth_moments(case, row, mode) for row in z]
    mean, variance = (np.array(m) for m in zip(*moments, strict=True))
    random = variance > 1e-12
    rms = {}

    for samples in (100, 10_000):
        made = sources_of(backend, case, z, mode, samples=samples, seed=11)
        errors = outer_products(backend, made) - mean
        scaled = errors[random] / np.sqrt(variance[random] / samples)
        rms[samples] = np.sqrt(np.mean(errors**2))
        assert 0.7 <= np.sqrt(np.mean(scaled**2)) <= 1.4
        assert np.max(np.abs(scaled)) <= 5.0
        assert np.max(np.abs(errors[~random]), initial=0.0) <= 1e-10

    assert_close(mean, in_rows(case.fisher, (z, 1)), "inverse", "float64")
    assert 6.0 <= rms[100] / rms[10_000] <= 16.0


@every_case
def test_empirical_is_the_gradient_at_the_data(backend, dtype, rng, case):
    """The empirical mode has one source, the gradient of each row's own loss."""
    z = rounded(case.natural(rng, 5), dtype)
    y = case.random_targets(rng, z)
    y = y if y.dtype.kind == "i" else rounded(y, dtype)

    made = vectors(
        case.loss,
        backend.asarray(z, dtype),
        mode="empirical",
        targets=targets_array(backend, case, y, dtype),
    )

    expected = in_rows(case.gradient, (z, 1), (y, y.ndim - 1))
    assert made.sources == 1
    assert_close(backend.to_numpy(made.vectors)[0], expected, "roundoff", dtype)


@every_pair
def test_statistics_of_every_mode_are_on_one_scale(backend, rng, case, mode):
    """A block's G is the mean over rows of the sum or mean of a mode's v v^T."""
    z = case.natural(rng, 6)

    made = sources_of(backend, case, z, mode, samples=4000)

    G = output_factor(backend, made)
    expected = np.mean(outer_products(backend, made), axis=0)
    assert_close(G, expected, "product", "float64")
    if mode != "empirical":
        F = np.mean(in_rows(case.fisher, (z, 1)), axis=0)
        limit = 1e-10 if mode.startswith("exact") else 0.06
        assert np.linalg.norm(G - F) <= limit * np.linalg.norm(F)


@every_pair
def test_weights_scale_curvature_linearly_in_every_mode(
    backend, dtype, rng, case, mode
):
    """The curvature is w times that of weight one; TensorFlow's empirical was w^2."""
    z, w = case.natural(rng, 4, 2), rng.uniform(0.5, 3.0, size=(4, 2))
    one = outer_products(backend, sources_of(backend, case, z, mode, dtype))

    for weight, factors in (
        (2.5, np.full((4, 2), 2.5)),
        (np.float32(2.5), np.full((4, 2), 2.5)),
        (backend.asarray(2.5, dtype), np.full((4, 2), 2.5)),
        (backend.asarray(w[:, 0], dtype), np.stack([w[:, 0]] * 2, axis=1)),
        (backend.asarray(w, dtype), w),
    ):
        made = sources_of(backend, case, z, mode, dtype, weight=weight)
        got = outer_products(backend, made)
        assert_close(got, one * factors[..., None, None], "product", dtype)
        assert_differs(got, one * factors[..., None, None] ** 2)


@every_mode
@pytest.mark.parametrize("kind", ["float", "bool", "int64"])
def test_rows_of_weight_zero_have_zero_vectors(backend, dtype, rng, mode, kind):
    """Padding may hold NaN; weights may be a mask, of booleans or integers."""
    z = CATEGORICAL.natural(rng, 4)
    full = sources_of(backend, CATEGORICAL, z, mode, dtype)
    weight = backend.asarray([1, 0, 1, 0], dtype if kind == "float" else kind)
    natural = np.where(np.array([0, 1, 0, 1])[:, None] == 1, np.nan, z)
    natural = backend.asarray(natural, dtype)

    made = vectors(
        CATEGORICAL.loss,
        natural,
        mode=mode,
        noise=noise_for(CATEGORICAL, natural, mode, samples=2, seed=7),
        targets=backend.asarray(
            CATEGORICAL.random_targets(np.random.default_rng(7), z)
        ),
        weight=weight,
    )

    got, expected = backend.to_numpy(made.vectors), backend.to_numpy(full.vectors)
    assert np.all(got[:, 1::2] == 0)
    assert_close(got[:, ::2], expected[:, ::2], "exact", dtype)


def test_invalid_weights_raise_or_give_nan(backend, rng):
    """A bad number is refused; a bad number in an array gives NaN in its rows alone."""
    z = CATEGORICAL.natural(rng, 3)

    for weight in (-1.0, np.nan, np.inf):
        with pytest.raises(kc.ConventionError, match="`weight`"):
            sources_of(backend, CATEGORICAL, z, "exact", weight=weight)
    with pytest.raises(kc.ShapeError, match=r"`weight`.*\(3,\)"):
        sources_of(backend, CATEGORICAL, z, "exact", weight=backend.asarray(np.ones(4)))

    weight = backend.asarray([1.0, -1.0, 2.0])
    made = sources_of(backend, CATEGORICAL, z, "exact", weight=weight)
    bad = np.isnan(backend.to_numpy(made.vectors))
    assert bad.all(axis=(0, 2)).tolist() == [False, True, False]
    with pytest.raises(kc.NotFiniteError, match="`output_grads`"):
        output_factor(backend, made)


def test_exact_is_biased_where_summed_gradients_are_squared(backend, rng):
    """One index for all rows keeps cross terms; random signs take them away."""
    N, P, draws = 6, 3, 1000
    z = CATEGORICAL.natural(rng, N)
    J = rng.normal(size=(N, 4, P))
    F = in_rows(CATEGORICAL.fisher, (z, 1))
    expected = np.einsum("nip,nij,njp->p", J, F, J)

    def squared(made):
        summed = np.einsum("mni,nip->mp", backend.to_numpy(made.vectors), J)
        return np.sum(summed**2, axis=0)

    made = sources_of(backend, CATEGORICAL, z, "exact")
    noise = rng.uniform(size=(draws, *made.vectors.shape[:-1]))
    signed = [with_random_signs(made, backend.asarray(u)) for u in noise]

    assert_differs(squared(made), expected, by=0.1)
    samples = np.array([squared(one) for one in signed])
    errors = (samples.mean(axis=0) - expected) / (samples.std(axis=0) / draws**0.5)
    assert np.max(np.abs(errors)) <= 4.0


@every_mode
def test_random_signs_leave_outer_products_of_rows_alone(backend, dtype, rng, mode):
    """What a block's statistics are made of does not change."""
    made = sources_of(backend, CATEGORICAL, CATEGORICAL.natural(rng, 4, 2), mode, dtype)
    u = backend.asarray(rng.uniform(size=tuple(made.vectors.shape[:-1])), dtype)

    signed = with_random_signs(made, u)

    got, expected = outer_products(backend, signed), outer_products(backend, made)
    assert_close(got, expected, "exact", dtype)
    flipped = backend.to_numpy(signed.vectors) != backend.to_numpy(made.vectors)
    assert flipped.any()
    with pytest.raises(kc.ShapeError, match="`noise`"):
        with_random_signs(made, made.vectors)


@every_case
@every_mode
def test_noise_is_asked_for_by_distribution_and_shape(backend, case, mode):
    """Only sampled modes want noise, of the shape that they say."""
    natural = backend.asarray(np.zeros((5, 2, case.outputs)))

    spec = noise_spec(case.loss, natural, mode=mode, samples=3)

    if mode not in SAMPLED:
        assert spec is None
    elif mode == "gradients":
        discrete = case.name in ("Categorical", "Bernoulli", "Joint")
        # Two uniform numbers give a normal one, beside the one of a class.
        per_row = {
            "Categorical": (),
            "GaussianLearnedVariance": (2,),
            "Joint": (1 + 4,),
        }
        shape = (3, 5, 2, *per_row.get(case.name, (case.outputs,)))
        assert spec == NoiseSpec("uniform" if discrete else "normal", shape)
    else:
        assert spec == NoiseSpec("uniform", (3, 5, 2, case.outputs))


@pytest.mark.parametrize("distribution", ["uniform", "normal"])
def test_noise_is_the_callers_and_repeats_with_its_seed(backend, dtype, distribution):
    """A seed gives the same numbers anywhere; no global state is read or moved."""
    spec = NoiseSpec(distribution, (1000, 3))
    like = backend.asarray(np.zeros(1), dtype)
    before = np.random.get_state()[1].copy()

    first = draw_noise(spec, like=like, rng=5)
    generator = np.random.default_rng(5)
    second = draw_noise(spec, like=like, rng=generator)
    third = draw_noise(spec, like=like, rng=generator)

    host = np.random.default_rng(5)
    values = (
        host.random((1000, 3))
        if distribution == "uniform"
        else (host.standard_normal((1000, 3)))
    )
    assert first.dtype == like.dtype
    assert_close(backend.to_numpy(first), values, "roundoff", dtype)
    assert np.array_equal(backend.to_numpy(first), backend.to_numpy(second))
    assert_differs(backend.to_numpy(third), values)
    assert np.array_equal(before, np.random.get_state()[1])


@every_case
@pytest.mark.parametrize("mode", sorted(SAMPLED))
@pytest.mark.parametrize("wrong", [-1e-3, 1.001, np.nan])
def test_noise_that_is_not_uniform_gives_nan(backend, case, mode, wrong):
    """Of the row that it belongs to, and never a vector of a class that was not drawn."""
    natural = backend.asarray(np.zeros((5, case.outputs)))
    if mode.endswith("GGN") and case.name == "GaussianLearnedVariance":
        pytest.skip("no such matrix")
    spec = noise_spec(case.loss, natural, mode=mode)
    noise = np.full(spec.shape, 0.25)
    noise[:, 1] = wrong

    made = vectors(case.loss, natural, mode=mode, noise=backend.asarray(noise))

    rows = np.isnan(backend.to_numpy(made.vectors)).any(axis=(0, 2))
    lost = [1] if spec.distribution == "uniform" or np.isnan(wrong) else []
    assert np.flatnonzero(rows).tolist() == lost


def test_random_signs_take_uniform_noise(backend):
    """Other noise gives NaN."""
    natural = backend.asarray(np.zeros((2, 3)))
    made = vectors(kc.losses.Categorical(), natural, mode="exact")
    noise = np.full((3, 2), 0.75)
    noise[:, 1] = -0.5

    signed = backend.to_numpy(with_random_signs(made, backend.asarray(noise)).vectors)

    assert np.array_equal(signed[:, 0, :], -backend.to_numpy(made.vectors)[:, 0, :])
    assert np.isnan(signed[:, 1, :]).all()


def test_uniform_noise_stays_below_one_in_float32(backend):
    """A float64 just below one would be rounded to one, which is out of range."""

    class Highest(np.random.Generator):
        def random(self, *args, **options):
            return np.full(args[0], np.nextafter(1.0, 0.0))

    like = backend.asarray(np.zeros(1), "float32")
    generator = Highest(np.random.PCG64(0))

    noise = draw_noise(NoiseSpec("uniform", (3,)), like=like, rng=generator)

    assert np.all(backend.to_numpy(noise) < 1)


def test_missing_arguments_are_named(backend, rng):
    """Missing or misshapen arguments are errors that name them."""
    loss, z = Categorical(), rng.normal(size=(4, 3))
    natural = backend.asarray(z)

    with pytest.raises(kc.ConventionError, match="`mode`"):
        vectors(loss, natural, mode="fisher")
    with pytest.raises(kc.ConventionError, match="`mode`"):
        noise_spec(loss, natural, mode="fisher")
    with pytest.raises(kc.ConventionError, match="'empirical' needs `targets`"):
        vectors(loss, natural, mode="empirical")
    for mode in SAMPLED:
        with pytest.raises(kc.ConventionError, match=f"'{mode}' needs `noise`"):
            vectors(loss, natural, mode=mode)
        # The axis of samples is missing; one sample has it too.
        spec = noise_spec(loss, natural, mode=mode)
        noise = backend.asarray(np.full(spec.shape[1:], 0.5))
        with pytest.raises(kc.ShapeError, match=r"`noise`.*\(M, 4"):
            vectors(loss, natural, mode=mode, noise=noise)
    labels = backend.asarray(np.zeros((2, 4), int))
    with pytest.raises(kc.ShapeError, match="`targets`"):
        vectors(loss, natural, mode="empirical", targets=labels)
    with pytest.raises(kc.ShapeError, match="`natural`"):
        vectors(loss, natural[0, :], mode="exact")
    with pytest.raises(kc.ShapeError, match="`samples`"):
        noise_spec(loss, natural, mode="gradients", samples=0)


@pytest.mark.parametrize("mode", ["curvature_prop_GGN", "exact_GGN"])
def test_ggn_modes_are_refused_for_a_learned_variance(backend, rng, mode):
    """The error says why, and which modes there are instead."""
    with pytest.raises(kc.UnsupportedError, match="'exact'"):
        sources_of(backend, CASES[3], CASES[3].natural(rng, 3), mode)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("library", ["jax", "torch"])
@every_pair
def test_vectors_are_the_same_in_compiled_programs(
    requires_backend, rng, library, case, mode
):
    """With noise given, every mode is a pure function, and one graph."""
    backend = requires_backend(library, adapter=True)
    if library == "torch" and case is not CATEGORICAL:
        pytest.skip("PyTorch compiles for long")
    z = case.natural(rng, 4)
    natural = backend.asarray(z)
    noise = noise_for(case, natural, mode, samples=3)
    y = targets_array(backend, case, case.random_targets(rng, z), "float64")
    weight = backend.asarray([1.0, 0.0, 2.0, 0.5])

    def made(natural, noise, targets, weight):
        options = {"mode": mode, "noise": noise, "targets": targets, "weight": weight}
        return vectors(case.loss, natural, **options)

    got = compiler_of(library)(made)(natural, noise, y, weight)

    expected = made(natural, noise, y, weight)
    assert (got.mode, got.sources) == (expected.mode, expected.sources)
    got, expected = backend.to_numpy(got.vectors), backend.to_numpy(expected.vectors)
    assert_close(got, expected, "roundoff", "float64")


@every_mode
def test_vectors_carry_no_gradient_graph(requires_backend, rng, mode):
    """PyTorch differentiates through none of them; the outputs keep their graph."""
    backend = requires_backend("torch", adapter=True)
    z = CATEGORICAL.natural(rng, 3)
    natural = backend.asarray(z).requires_grad_()

    made = vectors(
        CATEGORICAL.loss,
        natural,
        mode=mode,
        noise=noise_for(CATEGORICAL, natural, mode),
        targets=backend.asarray([0, 1, 2]),
    )

    assert not made.vectors.requires_grad
    assert natural.requires_grad


@pytest.mark.parametrize("mode", ["exact", "exact_GGN"])
def test_a_source_for_each_position_is_the_fisher_of_what_mixes_positions(
    backend, dtype, rng, mode
):
    """``T x P`` columns: pulled back through a map of all tokens, J^T F J without bias."""
    N, T, P, width = 2, 3, 2, 4
    z = rng.normal(size=(N, T, P))
    made = vectors(
        Categorical(), backend.asarray(z, dtype), mode=mode, positions="separate"
    )
    assert (made.sources, made.source_reduction) == (T * P, "sum")
    v = backend.to_numpy(made.vectors)
    assert v.shape == (T * P, N, T, P)
    J = rng.normal(size=(N, T * P, width))
    for n in range(N):
        F = np.zeros((T * P, T * P))
        for t in range(T):
            p = np.exp(z[n, t]) / np.exp(z[n, t]).sum()
            F[t * P : (t + 1) * P, t * P : (t + 1) * P] = np.diag(p) - np.outer(p, p)
        pulled = v[:, n].reshape(T * P, -1) @ J[n]
        assert_close(pulled.T @ pulled, J[n].T @ F @ J[n], "gram", dtype)
    together = backend.to_numpy(
        vectors(Categorical(), backend.asarray(z, dtype), mode=mode).vectors
    )
    pulled = together[:, 0].reshape(P, -1) @ J[0]
    expected = v[:, 0].reshape(T * P, -1) @ J[0]
    assert_differs(pulled.T @ pulled, expected.T @ expected)


def test_separate_positions_are_of_exact_modes_and_draws_of_sampled_ones(backend, rng):
    """The messages say why, and what the outputs must look like."""
    loss, z = Categorical(), backend.asarray(rng.normal(size=(2, 3, 2)))
    with pytest.raises(kc.ConventionError, match="exact modes"):
        vectors(loss, z, mode="gradients", positions="separate")
    with pytest.raises(kc.ConventionError, match="`positions`"):
        vectors(loss, z, mode="exact", positions="apart")
    options = {"seed": 3, "shared": True}
    drawn = drawn_vectors(loss, z, mode="gradients", samples=4, **options)
    assert drawn.sources == 4
    assert not np.allclose(*backend.to_numpy(drawn.vectors)[:2])
    options["seed"] = functools.partial(draw_noise, like=z, rng=3)
    again = drawn_vectors(loss, z, mode="gradients", samples=4, **options)
    same = backend.to_numpy(again.vectors) == backend.to_numpy(drawn.vectors)
    assert same.all()
    apart = drawn_vectors(loss, z, mode="exact", positions="separate", **options)
    assert apart.sources == 6
    # Each source has one row of each example, with a sign of its own.
    alone = backend.to_numpy(
        vectors(loss, z, mode="exact", positions="separate").vectors
    )
    found = backend.to_numpy(apart.vectors)
    assert_close(np.abs(found), np.abs(alone), "identity", "float64")
    products = (found * alone).sum((2, 3))
    assert len({*np.sign(products[:, 0] * products[:, 1])} - {0.0}) == 2
    plain = drawn_vectors(loss, z, mode="exact", positions="together", **options)
    expected = backend.to_numpy(vectors(loss, z, mode="exact").vectors)
    assert_close(backend.to_numpy(plain.vectors), expected, "identity", "float64")
    with pytest.raises(kc.ConventionError, match="`samples` must be 1"):
        drawn_vectors(loss, z, mode="exact", samples=2, **options)
    with pytest.raises(kc.ConventionError, match=r"\(N, T, P\)"):
        drawn_vectors(loss, z[0, ...], mode="exact", positions="separate", **options)
