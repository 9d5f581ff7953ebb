"""The approximation that the documentation writes, ``F = A (x) I``.

What it shares with all others is in `test_contract.py`; here is what it meets besides.
Expected values are dense float64 matrices, whose A is summed up row by row.
"""

import ast
import importlib
import importlib.util
import sys

import numpy as np
import pytest

import kfac_core as kc
from kfac_core_conformance.records.block import describe

from ..builders import reference
from ..builders.approximations import EXAMPLES, example_module
from ..builders.estimators import make_estimator
from ..builders.one_block import SUM
from ..builders.tolerances import assert_close

DAMPING = 0.3
N, n, m = 6, 4, 3

if not EXAMPLES.is_dir():
    pytest.skip("the documentation is not here", allow_module_level=True)


IdentityGradients = example_module("identity_gradients").IdentityGradients


def dense_layer(*, bias=True, inputs=n, outputs=m):
    return kc.Dense(
        in_features=inputs, out_features=outputs, bias=bias, weight_layout="io"
    )


def block_of(**options):
    return kc.Block(dense_layer(**options), IdentityGradients())


def batch_of(backend, dtype, x, g, mask=None):
    return kc.Batch(
        backend.asarray(x, dtype),
        backend.asarray(g, dtype),
        None if mask is None else backend.asarray(mask),
        sources=len(g),
    )


def second_moment(x, *, bias=True, mask=None):
    """Return ``1/N sum_ns x x^T`` by loops over the rows that count."""
    nothing = np.zeros((1, *x.shape[:-1], 1))
    rows = reference.rows_of(x, nothing, bias=bias, mask=mask)
    A = np.zeros((x.shape[-1] + bias,) * 2)
    for example in rows:
        for row, _ in example:
            A += np.outer(row, row) / len(rows)
    return A


def damped(A, columns=m, damping=DAMPING):
    return np.kron(A + damping * np.eye(len(A)), np.eye(columns))


NAMES = ("a", "b", "c")


def network_of(names=NAMES, **options):
    return kc.Network({name: block_of() for name in names}, conventions=SUM, **options)


def fed(backend, dtype, rng, names=NAMES):
    """Return inputs, batches and gradients by name."""
    x = {name: rng.normal(size=(N, n)) for name in names}
    batches = {
        name: batch_of(backend, dtype, x[name], rng.normal(size=(1, N, m)))
        for name in names
    }
    V = {name: rng.normal(size=(n + 1, m)) for name in names}
    gradients = {
        name: {
            "weight": backend.asarray(v[:-1], dtype),
            "bias": backend.asarray(v[-1], dtype),
        }
        for name, v in V.items()
    }
    return x, batches, V, gradients


def matrix(backend, parameters):
    weight, bias = (backend.to_numpy(parameters[k]) for k in ("weight", "bias"))
    return np.concatenate([weight, bias[None]])


def test_an_estimator_serves_it(backend, dtype, rng):
    """Beside Kronecker: products, report and both ways of solving."""
    x, batches, V, gradients = fed(backend, dtype, rng)
    blocks = {name: block_of() for name in NAMES}
    blocks["c"] = kc.Block(dense_layer(), kc.Kronecker())
    for solving in ("inverse", "triangular"):
        estimator = make_estimator(
            blocks,
            reduction="sum",
            decay=0.9,
            damping=DAMPING,
            refreshing=kc.Refreshing(solving=solving),
        )
        estimator.update(batches)
        estimator.refresh()
        directions = estimator.precondition(gradients)

        for name in "ab":
            A = second_moment(x[name]) + DAMPING * np.eye(n + 1)
            got = matrix(backend, directions[name])
            assert_close(got, np.linalg.solve(A, V[name]), "inverse", dtype)
        held = estimator.operator("a").input
        assert (held.inverse is None) == (solving == "triangular")
        assert "inverse" in estimator.operator("a").factorizations
        report = estimator.report()
        assert report["a"].approximation == "identity_gradients"
        factor = report["a"].factors["input"]
        assert factor.size == n + 1
        assert factor.shift == pytest.approx(DAMPING)
        A = second_moment(x["a"]) + DAMPING * np.eye(n + 1)
        assert factor.condition > 0.9 * np.linalg.cond(A)
        assert factor.residual < 1e-3
        assert report["a"].residual < 1e-3
        assert "identity_gradients" in str(report)
    statistics = {name: estimator.state[name].statistics for name in "ab"}
    spectral = kc.posterior.spectral_blocks(
        {name: blocks[name] for name in "ab"}, statistics
    )
    for name in "ab":
        expected = np.kron(second_moment(x[name]), np.eye(m))
        got = backend.to_numpy(spectral[name].to_dense(damped=False))
        assert_close(got, expected, "power", dtype)


def test_an_input_factor_is_shared_with_its_kind_alone(backend, dtype, rng):
    """Two blocks of one input; Kronecker's factor is another by a factor of S."""
    x, batches, V, gradients = fed(backend, dtype, rng, "ab")
    batches["b"] = kc.Batch(batches["a"].inputs, batches["b"].output_grads, sources=1)
    coupling = kc.Coupling(factors={"b/input": "a/input"})
    network = network_of("ab", coupling=coupling)

    state = network.update(network.empty(), batches, decay=0.5)
    state = network.refresh(state, damping=DAMPING)
    result = network.precondition(state, gradients)["b"]

    A = second_moment(x["a"]) + DAMPING * np.eye(n + 1)
    assert_close(matrix(backend, result), np.linalg.solve(A, V["b"]), "inverse", dtype)
    assert float(backend.to_numpy(state["b"].statistics.like)) == 0
    blocks = {"a": kc.Block(dense_layer(), kc.Kronecker()), "b": block_of()}
    with pytest.raises(kc.ConventionError, match="different kinds"):
        kc.Network(blocks, conventions=SUM, coupling=coupling)
    with pytest.raises(kc.ConventionError, match="no output factor"):
        network_of("ab", coupling=kc.Coupling(factors={"b/output": "a/output"}))


def test_the_record_format_refuses_it_by_name():
    """A record can be read by other libraries, which know the format's kinds alone."""
    with pytest.raises(kc.RecordError, match="identity_gradients"):
        describe(block_of())


@pytest.mark.parametrize("name", ["identity_gradients", "kfoc"])
def test_the_file_imports_public_names_alone(name):
    """From `kfac_core` and its documented packages, each name listed in ``__all__``."""
    tree = ast.parse((EXAMPLES / f"{name}.py").read_text(encoding="utf-8"))
    groups = EXAMPLES.parent / "extensions" / "api_groups.py"
    public = groups.read_text(encoding="utf-8")
    used = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots = {alias.name for alias in node.names}
            assert all(r in sys.stdlib_module_names for r in roots - {"kfac_core"})
        if isinstance(node, ast.ImportFrom):
            if node.module.split(".")[0] in {*sys.stdlib_module_names, "__future__"}:
                continue
            package = importlib.import_module(node.module)
            assert f'"{node.module}"' in public
            assert {alias.name for alias in node.names} <= set(package.__all__)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "kc":
            used.add(node.attr)

    assert len(used) >= 5
    assert used <= set(kc.__all__)
