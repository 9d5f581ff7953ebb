"""What all operators do alike: stacks of vectors, what they lack, what they say."""

import itertools

import numpy as np
import pytest

import kfac_core as kc

from ..builders.layers import conv_layer
from ..builders.one_block import learn, operator_for
from ..builders.tolerances import assert_close

N, IN, OUT, GROUPS = 8, 4, 6, 2
RULES = ["factored", "exact"]
PRODUCTS = {
    "multiply": {},
    "multiply_inverse": {},
    "multiply_cholesky": {},
    "multiply_cholesky_inverse": {"transpose": True},
    "sample": {},
}


def operator_of(backend, dtype, rng, approximation, *, groups=1, rule="exact"):
    """Return an operator with everything prepared, of a convolution of one pixel."""
    layer = conv_layer(IN * groups, OUT, (1,), groups=groups, bias=False)
    x, g = rng.normal(size=(N, 1, IN * groups)), rng.normal(size=(N, 1, OUT))
    batch = kc.Batch(backend.asarray(x, dtype), backend.asarray(g, dtype))
    block = kc.Block(layer, approximation)
    statistics = learn(block, batch)
    return operator_for(
        block,
        statistics,
        damping=0.5,
        rule=rule,
        factorizations=("inverse", "cholesky", "eigenbasis"),
    )


@pytest.mark.parametrize(
    ("approximation", "rule"),
    [*itertools.product([kc.Kronecker()], RULES), (kc.EKFAC(), "exact")],
    ids=str,
)
@pytest.mark.parametrize("product", PRODUCTS)
def test_a_vector_may_be_a_stack_of_the_operators_own(
    backend, dtype, rng, approximation, rule, product
):
    """A stack (Q, n, m) gives the stack of the parts of what (n, Q m) gives."""
    operator = operator_of(backend, dtype, rng, approximation, groups=GROUPS, rule=rule)
    V = rng.normal(size=(IN, OUT))
    columns = OUT // GROUPS
    parts = np.moveaxis(V.reshape(IN, GROUPS, columns), 1, 0)

    options = PRODUCTS[product]
    joined = getattr(operator, product)(backend.asarray(V, dtype), **options)
    stacked = getattr(operator, product)(backend.asarray(parts, dtype), **options)

    assert tuple(joined.shape) == (IN, OUT)
    assert tuple(stacked.shape) == (GROUPS, IN, columns)
    for q in range(GROUPS):
        own = backend.to_numpy(joined)[:, q * columns : (q + 1) * columns]
        assert_close(backend.to_numpy(stacked)[q], own, "identity", dtype)
    with pytest.raises(kc.ShapeError, match=r"shape \(4, 6\)"):
        operator.multiply(backend.asarray(np.ones((3, IN, 1, 1)), dtype))
