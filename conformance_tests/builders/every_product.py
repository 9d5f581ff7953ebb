"""Every product of a block's operator, made without looking at a value."""

from __future__ import annotations

from typing import Any

import kfac_core as kc

from .one_block import learn, operator_for

N, n, m = 12, 4, 3
EVERYTHING = ("inverse", "cholesky", "eigenbasis")
KINDS = {
    "full": kc.Kronecker(),
    "reduce": kc.Kronecker(sharing="reduce"),
    "diagonal": kc.Kronecker(input="diagonal", output="diagonal"),
    "half": kc.Kronecker(output="diagonal"),
}


def block(kind: str = "full") -> kc.Block:
    """Return a dense block of a kind."""
    layer = kc.Dense(in_features=n, out_features=m, bias=True, weight_layout="oi")
    return kc.Block(layer, KINDS[kind])


def every_product(kind: str, rule: str, batch: kc.Batch, V: Any) -> dict[str, Any]:
    """Return the products after one update, and the status of all."""
    own = block(kind)
    statistics = learn(own, batch, decay=0.9, check="status")
    op = operator_for(
        own,
        statistics,
        damping=0.1,
        rule=rule,
        factorizations=EVERYTHING,
        check="status",
    )
    return {
        "status": op.status() | statistics.status,
        "multiply": op.multiply(V),
        "undamped": op.multiply(V, damped=False),
        "inverse": op.multiply_inverse(V),
        "matpower": op.multiply_matpower(V, -0.25),
        "cholesky": op.multiply_cholesky(V),
        "cholesky, transposed": op.multiply_cholesky(V, transpose=True),
        "cholesky inverse": op.multiply_cholesky_inverse(V),
        "cholesky inverse, transposed": op.multiply_cholesky_inverse(V, transpose=True),
        "sample": op.sample(V),
        "trace": op.trace(),
        "logdet": op.logdet(),
        "eigenvalues": op.eigenvalues(),
        "dense": op.to_dense(),
    }
