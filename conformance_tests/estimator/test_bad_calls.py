"""Arguments that do not fit: each error is the library's, and names the argument."""

from __future__ import annotations

import numpy as np
import pytest

import kfac_core as kc
from kfac_core import linalg, losses, roots, steps
from kfac_core.approximations.series import Series

from ..builders import chain_reference
from ..builders.layers import conv_layer, dense_layer
from ..builders.one_block import SUM, learn, operator_for

RNG = np.random.default_rng(7)
DENSE = dense_layer(4, 3)
CONV = conv_layer(2, 2, (2,), padding="same")
NORM = kc.ScaleShift(scale_shape=(3,), shift_shape=None)
IMAGES, PIXELS = np.ones((2, 6, 2)), np.ones((2, 6, 2))
WEIGHT = np.ones((2, 2, 2))
VECTOR = {"fc": {"weight": np.ones((2, 2))}}
EYE = np.eye(8)
ONE, TWO = np.ones(()), np.ones(2)
OPERATOR = operator_for(
    kc.Block(DENSE, kc.Kronecker()),
    learn(
        kc.Block(DENSE, kc.Kronecker()),
        kc.Batch(RNG.normal(size=(6, 4)), RNG.normal(size=(6, 3))),
    ),
    damping=0.1,
)
FIRST = chain_reference.LAYERS["first"]
CHAIN = chain_reference.chain_of(chain_reference.LAYERS)
BATCHES = chain_reference.fed(
    type("Host", (), {"asarray": staticmethod(np.asarray)}),
    *chain_reference.draw(np.random.default_rng(3)),
)
OF_CHAIN = operator_for(CHAIN, learn(CHAIN, BATCHES), damping=0.2)


def noise(distribution="uniform", rng=0):
    return losses.draw_noise(
        losses.NoiseSpec(distribution, (2,)), like=np.zeros(1), rng=rng
    )


def series(**options):
    block = kc.Block(FIRST, Series(variant="symmetric", **options))
    n, m = FIRST.in_features, FIRST.out_features
    batch = kc.Batch(np.ones((4, 6, n)), np.ones((4, 6, m)))
    return kc.batch_moments(block, batch, conventions=SUM)


def side(gradient=None, *, decay=0.9, **options):
    factors, V = roots.GradientFactors(shape=(3, 4)), np.ones((3, 4))
    given = V if gradient is None else gradient
    return factors.updated(factors.initial(V), given, decay=decay, **options)


def rows(x=IMAGES, g=PIXELS, *, mask=None, **options):
    return CONV.rows(kc.Batch(x, g, mask, **options))


CALLS = {
    # name: (the call, what the message says)
    "gamma": (lambda: steps.gamma_candidates(-1.0, factor=0.5), "`gamma`"),
    "predicted": (
        lambda: steps.reduction_ratio(1.0, 2.0, predicted="x"),
        "`predicted`",
    ),
    "loss after": (
        lambda: steps.reduction_ratio(1.0, TWO, predicted=-1.0),
        "`loss_aft",
    ),
    "two losses": (lambda: steps.is_accepted(TWO, 1.0), "`loss_before`"),
    "a loss of text": (lambda: steps.is_accepted(1.0, "less"), "`loss_after`"),
    "two conditions": (lambda: steps.select(TWO > 0, VECTOR, VECTOR), "`accepted`"),
    "a condition of 1": (lambda: steps.select(1, VECTOR, VECTOR), "`accepted`"),
    "a count": (lambda: steps.select(ONE > 0, {"n": 1}, {"n": 2}), "a int"),
    "coefficients": (
        lambda: steps.linear_combination([1.0], [VECTOR] * 2),
        "number of vectors and coefficients",
    ),
    "coefficients' shape": (
        lambda: steps.linear_combination(np.ones(3), [VECTOR] * 2),
        "number of vectors and coefficients",
    ),
    "no vectors": (lambda: steps.linear_combination([], []), "at least one"),
    "empty vectors": (lambda: steps.inner_product({}, {}), "at least one of"),
    "distribution": (lambda: noise("gaussian"), "'gaussian'"),
    "generator": (lambda: noise(rng=np.random.RandomState(0)), "`rng`"),
    "a root of a rectangle": (
        lambda: roots.inverse_root(np.ones((2, 3)), damping=0.1, degree=2),
        r"`matrix`.*\(2, 3\)",
    ),
    "dampings of a root": (
        lambda: roots.inverse_root(EYE, damping=TWO, degree=2),
        "damping",
    ),
    "a gradient's shape": (lambda: side(EYE), r"gradient.*\(3, 4\).*\(8, 8\)"),
    "samples": (lambda: side(samples=2), r"gradient.*\(2, 3, 4\)"),
    "one root": (lambda: side(roots=[EYE]), "roots"),
    "equal roots": (lambda: side(roots=[np.eye(3)] * 2), r"roots\[1\].*\(4, 4\)"),
    "a decay": (lambda: side(decay=1.5), "decay"),
    "a factor's axes": (lambda: linalg.kronecker_dense([EYE, TWO]), r"factors\[1\]"),
    "longer sequences": (lambda: series(steps=4), "at most 4 steps"),
    "no steps": (lambda: Series(variant="symmetric"), "`steps`"),
    "no time": (lambda: kc.Block(NORM, Series(variant="infinite")), "time steps"),
    "nothing kept": (
        lambda: kc.Refreshing(keep_matrices=False, factorizations=()),
        "keep_matrices=True",
    ),
    "patches' mask": (lambda: rows(mask=np.ones((2, 6), int)), "`mask`"),
    "patches' mask's shape": (lambda: rows(mask=np.ones(2) > 0), "`mask`"),
    "pixels": (lambda: rows(IMAGES.astype(int)), "`inputs`"),
    "pixels of gradients": (lambda: rows(g=PIXELS[:, :5]), "`output_grads`"),
    "channels": (lambda: rows(IMAGES[..., :1]), "`inputs`"),
    "an image alone": (lambda: rows(IMAGES[0], PIXELS[0]), "`inputs`"),
    "weights of rows": (lambda: kc.gram(EYE, weights=TWO), "`weights`"),
    "a mask of rows": (lambda: kc.gram(EYE, mask=TWO > 0), "`mask`"),
    "rows of a gram": (lambda: kc.gram(ONE), "`rows`"),
    "a product's shape": (lambda: linalg.kronecker_multiply([EYE], TWO), "`v"),
    "no bias": (lambda: CONV.parameters_to_matrix({"weight": WEIGHT}), "'bias'"),
    "a matrix": (lambda: CONV.matrix_to_parameters(EYE), "`matrix`"),
    "a vector's shape": (lambda: OPERATOR.multiply_inverse(EYE), "`vector`"),
    "a vector's dtype": (lambda: OPERATOR.multiply(np.ones((5, 3), int)), "`vector`"),
    "noise's shape": (lambda: OPERATOR.sample(EYE), "`noise`"),
    "some of a chain": (lambda: learn(CHAIN, {"first": BATCHES["first"]}), "'third'"),
    "several uses in a chain": (
        lambda: learn(CHAIN, BATCHES | {"second": [BATCHES["second"]] * 2}),
        r"'second'.*one `Batch`",
    ),
    "exact damping of a chain": (
        lambda: operator_for(CHAIN, learn(CHAIN, BATCHES), damping=0.2, rule="exact"),
        "no exact damping",
    ),
    "a chain's powers": (
        lambda: OF_CHAIN.multiply_matpower(np.ones(OF_CHAIN.vector_shape), 0.5),
        "share no eigenvectors",
    ),
    "a chain undamped": (lambda: OF_CHAIN.trace(damped=False), "without damping"),
    "a chain's eigenvalues": (OF_CHAIN.eigenvalues, "no eigenvalues"),
    "a short chain": (lambda: chain_reference.chain_of({"d": FIRST}), "at least two"),
    "a chain of a convolution": (
        lambda: chain_reference.chain_of({"d": FIRST, "c": CONV}),
        "'c' is conv",
    ),
    "a chain of K-FAC": (lambda: kc.Block(CHAIN.layer, kc.Kronecker()), "chain"),
    "no neighbors": (lambda: kc.Block(FIRST, kc.BlockTridiagonal()), "no neighbors"),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_argument_that_does_not_fit_is_named(name):
    call, match = CALLS[name]
    with pytest.raises(kc.KFACError, match=match):
        call()
