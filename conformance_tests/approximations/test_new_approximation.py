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
from kfac_core.execution.costs import block_costs
from kfac_core_conformance.dense import ggn_blocks
from kfac_core_conformance.examples import random_network, with_problem
from kfac_core_conformance.own import Own
from kfac_core_conformance.records.block import describe

from ..builders import conv_reference, reference
from ..builders.approximations import IDENTITY_GRADIENTS, identity_gradients
from ..builders.dense_functions import assert_functions_are
from ..builders.estimators import make_estimator
from ..builders.one_block import SUM, learn, operator_for
from ..builders.tolerances import assert_close, assert_differs

DAMPING = 0.3
EVERYTHING = ("inverse", "cholesky", "eigenbasis")
N, S, M, n, m = 6, 3, 2, 4, 3

if not IDENTITY_GRADIENTS.is_file():
    pytest.skip("the documentation is not here", allow_module_level=True)


IdentityGradients = identity_gradients().IdentityGradients


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


GEOMETRIES = {
    "plain": conv_reference.Geometry((2, 2), (1, 1), "valid", (1, 1)),
    "strided": conv_reference.Geometry((2, 3), (2, 1), "same", (1, 1)),
    "groups": conv_reference.Geometry((2, 2), (1, 1), "valid", (1, 1), 2),
}


@pytest.mark.parametrize("kind", GEOMETRIES)
@pytest.mark.parametrize("masked", [False, True])
def test_a_convolution_is_that_of_dense_sums(backend, dtype, rng, kind, masked):
    """Patches by loops; each group has a factor of its own."""
    geometry, channels, outputs = GEOMETRIES[kind], 2, 4
    groups = geometry.groups
    layer = kc.Conv(
        in_channels=channels,
        out_channels=outputs,
        kernel_size=geometry.kernel,
        strides=geometry.strides,
        padding=geometry.padding,
        groups=groups,
        bias=True,
        weight_layout="spatial_io",
        data_layout="channels_last",
    )
    out = conv_reference.output_size((4, 4), geometry)
    x, g = rng.normal(size=(N, 4, 4, channels)), rng.normal(size=(M, N, *out, outputs))
    mask = rng.random((N, *out)) < 0.6 if masked else None
    batch = batch_of(backend, dtype, x, g, mask)
    block = kc.Block(layer, IdentityGradients())

    statistics = learn(block, batch)
    operator = operator_for(
        block, statistics, damping=DAMPING, rule="exact", factorizations=EVERYTHING
    )
    chunked = learn(block, batch, max_patch_elements=100)

    rows, _ = conv_reference.group_rows(x, g, geometry)
    flat_mask = None if mask is None else mask.reshape(N, -1)
    A = [second_moment(part, mask=flat_mask) for part in rows]
    width, columns = len(A[0]), outputs // groups
    F = np.zeros((width, outputs, width, outputs))
    for q, part in enumerate(A):
        for j in range(q * columns, (q + 1) * columns):
            F[:, j, :, j] = part + DAMPING * np.eye(width)
    F = F.reshape(width * outputs, -1)
    undamped = F - DAMPING * np.eye(len(F))
    assert_functions_are(backend, dtype, operator, F, undamped, rng)
    again = operator_for(block, chunked, damping=DAMPING, rule="exact").to_dense()
    assert_close(backend.to_numpy(again), F, "product", dtype)


def test_neither_sources_nor_the_reduction_matter(backend, rng):
    """Output gradients enter nowhere; a row that must differ is Kronecker's."""
    x, g = rng.normal(size=(N, n)), rng.normal(size=(M, N, m))
    found, others = [], []
    for grads, reduction in ((g, "sum"), (7 * g[:1], "mean")):
        batch = batch_of(backend, "float64", x, grads)
        conventions = kc.Conventions(reduction=reduction, sources="sum")
        for results, approximation in (
            (found, IdentityGradients()),
            (others, kc.Kronecker()),
        ):
            block = kc.Block(dense_layer(), approximation)
            new = learn(block, batch, conventions=conventions)
            made = operator_for(block, new, damping=DAMPING, rule="exact")
            results.append(backend.to_numpy(made.to_dense(damped=False)))

    assert_close(found[0], found[1], "roundoff", "float64")
    assert_differs(others[0], others[1])
    assert_differs(found[0], others[0])


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
            damping_rule="factored",
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


def test_blocks_go_to_threads(backend, rng):
    """Blocks of different sizes on two workers, as dense."""
    blocks = {"a": block_of(inputs=n), "b": block_of(inputs=n + 1)}
    x = {"a": rng.normal(size=(N, n)), "b": rng.normal(size=(N, n + 1))}
    estimator = make_estimator(
        blocks,
        reduction="sum",
        decay=0.9,
        damping=DAMPING,
        damping_rule="exact",
        workers=2,
    )

    g = np.ones((1, N, m))
    estimator.update({k: batch_of(backend, "float64", x[k], g) for k in blocks})
    estimator.refresh()

    for name in blocks:
        got = backend.to_numpy(estimator.operator(name).to_dense())
        assert_close(got, damped(second_moment(x[name])), "product", "float64")


def test_costs_are_those_of_one_factor():
    """Written out for a layer of groups; half of what two factors of one size cost."""
    square = dense_layer(inputs=7, outputs=8)

    costs = block_costs(kc.Block(square, IdentityGradients()))
    both = block_costs(kc.Block(square, kc.Kronecker()))

    assert costs.sizes == (8,)
    assert costs.statistics_per_row == 8**2 / 0.85
    assert costs.refresh["triangular"] == pytest.approx(8**3 / 3 / 0.65)
    assert costs.refresh["inverse"] == pytest.approx(
        8**3 / 3 / 0.65 + 2 * 8**3 / 3 / 0.55
    )
    assert costs.precondition["inverse"] == 2 * 8**2 * 8 / 0.95
    assert both.precondition["inverse"] == 2 * costs.precondition["inverse"]
    assert both.refresh["inverse"] == pytest.approx(2 * costs.refresh["inverse"])


def test_an_input_factor_is_shared_with_its_kind_alone(backend, dtype, rng):
    """Two blocks of one input; Kronecker's factor is another by a factor of S."""
    x, batches, V, gradients = fed(backend, dtype, rng, "ab")
    batches["b"] = kc.Batch(batches["a"].inputs, batches["b"].output_grads, sources=1)
    sharing = kc.Sharing(factors={"b/input": "a/input"})
    network = network_of("ab", sharing=sharing)

    state = network.update(network.empty(), batches, decay=0.5)
    state = network.refresh(state, damping=DAMPING)
    result = network.precondition(state, gradients)["b"]

    A = second_moment(x["a"]) + DAMPING * np.eye(n + 1)
    assert_close(matrix(backend, result), np.linalg.solve(A, V["b"]), "inverse", dtype)
    assert float(backend.to_numpy(state["b"].statistics.like)) == 0
    blocks = {"a": kc.Block(dense_layer(), kc.Kronecker()), "b": block_of()}
    with pytest.raises(kc.ConventionError, match="different kinds"):
        kc.Network(blocks, conventions=SUM, sharing=sharing)
    with pytest.raises(kc.ConventionError, match="no output factor"):
        network_of("ab", sharing=kc.Sharing(factors={"b/output": "a/output"}))


def test_what_does_not_go_together_is_refused(backend, rng):
    """Layers, chosen positions, rows that are not finite, a bad damping."""
    embedding = kc.Embedding(num_embeddings=5, features=m, weight_layout="io")
    with pytest.raises(kc.UnsupportedError, match="second moment"):
        kc.Block(embedding, IdentityGradients())
    with pytest.raises(TypeError, match="abstract"):
        type("Half", (kc.Approximation,), {"name": "half"})()
    block = block_of()
    x, g = rng.normal(size=(N, n)), rng.normal(size=(1, N, m))
    for argument in ("inputs", "output_grads"):
        bad = {"inputs": x.copy(), "output_grads": g.copy()}
        bad[argument][..., 0] = np.inf
        batch = batch_of(backend, "float64", bad["inputs"], bad["output_grads"])
        with pytest.raises(kc.NotFiniteError, match=argument):
            learn(block, batch)
    statistics = block.initial(backend.asarray(x))
    with pytest.raises(kc.DampingError):
        operator_for(block, statistics, damping=-1.0, rule="exact")
    with pytest.raises(kc.FactorizationError, match="input"):
        operator_for(block, statistics, damping=0.0, rule="exact", name="layer")


def test_a_state_of_another_approximation_is_refused(backend, rng):
    """By its name, before anything of it is read."""
    _, batches, _, _ = fed(backend, "float64", rng, "a")
    own, other = (
        make_estimator({"a": block}, reduction="sum", damping=DAMPING)
        for block in (block_of(), kc.Block(dense_layer(), kc.Kronecker()))
    )
    own.update(batches)

    with pytest.raises(kc.StateError, match="identity_gradients"):
        other.load_state_dict(own.state_dict())


ONE_LAYER = {
    "dense": {"widths": (4, 3), "inputs": (5, 4), "options": {}},
    "no bias": {"widths": (4, 3), "inputs": (5, 4), "options": {"bias": False}},
    "shared": {"widths": (4, 3), "inputs": (5, 2, 4), "options": {}},
    "conv": {
        "widths": (2, 3),
        "inputs": (4, 4, 5, 2),
        "options": {"kernel_size": (2, 3)},
    },
}


@pytest.mark.parametrize("case", ONE_LAYER)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_kit_finds_it_exact_for_a_linear_layer(rng, case, reduction):
    """Squared error of one layer has G = I, so that A (x) I is its Gauss-Newton matrix."""
    made = ONE_LAYER[case]
    network = random_network(3, made["widths"], **made["options"])
    inputs = rng.normal(size=made["inputs"])
    problem = with_problem(network, inputs, "mse", reduction=reduction)
    own = Own("numpy", approximation=lambda problem: IdentityGradients())

    [block] = own.blocks(problem)

    assert_close(block, ggn_blocks(problem)[0], "product", "float64")


def test_the_kit_finds_a_deeper_network_different(rng):
    """The row that must differ: below another layer, G is no multiple of the identity."""
    network = random_network(3, (4, 3, 2))
    problem = with_problem(network, rng.normal(size=(5, 4)), "mse")
    own = Own("numpy", approximation=lambda problem: IdentityGradients())

    below, last = own.blocks(problem)

    expected = ggn_blocks(problem)
    assert_close(last, expected[1], "product", "float64")
    assert_differs(below, expected[0])


def test_the_record_format_refuses_it_by_name():
    """A record can be read by other libraries, which know the format's kinds alone."""
    with pytest.raises(kc.RecordError, match="identity_gradients"):
        describe(block_of())


def test_the_file_imports_public_names_alone():
    """From `kfac_core` and its documented packages, each name listed in ``__all__``."""
    tree = ast.parse(IDENTITY_GRADIENTS.read_text(encoding="utf-8"))
    groups = IDENTITY_GRADIENTS.parents[1] / "extensions" / "api_groups.py"
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
