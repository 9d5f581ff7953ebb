"""What every approximation promises, against its dense float64 matrix.

The cases are those of `builders.approximations`; what an approximation alone promises is in
a file of its own.
"""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.execution import Executor, plain
from kfac_core.execution.stacked import Stacked

from ..builders.approximations import CASES
from ..builders.dense_functions import assert_functions_are
from ..builders.estimators import make_estimator
from ..builders.one_block import SUM, learn, operator_for
from ..builders.tolerances import assert_close, assert_differs
from ..builders.tracing import Traced

DAMPING = 0.3
EVERYTHING = ("inverse", "cholesky", "eigenbasis")

every_case = pytest.mark.parametrize("name", CASES)
every_rule = pytest.mark.parametrize(
    ("name", "rule"), [(name, rule) for name in CASES for rule in CASES[name].rules]
)
in_networks = pytest.mark.parametrize(
    "name", [k for k, case in CASES.items() if case.of_a_network]
)


def learned(case, backend, dtype, rows, **options):
    """Return the statistics of one batch of the host."""
    batch = case.placed(backend, dtype, rows)
    return learn(case.block, batch, case.initial(backend, dtype), **options)


def expected_of(case, stats):
    """Return the dense damped matrix of statistics of the reference."""
    return case.dense(stats, DAMPING, "factored")


def assert_is(case, statistics, stats, backend, dtype):
    """Compare the damped matrix of statistics with that of the reference's."""
    got = backend.to_numpy(
        operator_for(case.block, statistics, damping=DAMPING).to_dense()
    )
    assert_close(
        got, expected_of(case, stats), "product", dtype, condition=case.condition
    )


@every_rule
def test_every_function_is_that_of_the_dense_matrix(backend, dtype, rng, name, rule):
    """Products, roots, samples and numbers, damped and not, of a masked batch."""
    case = CASES[name]
    rows = case.drawn(rng, True)
    statistics = learned(case, backend, dtype, rows)
    operator = operator_for(
        case.block, statistics, damping=DAMPING, rule=rule, factorizations=EVERYTHING
    )
    stats = case.moments(rows)
    assert_functions_are(
        backend,
        dtype,
        operator,
        case.dense(stats, DAMPING, rule),
        case.dense(stats, 0.0, rule),
        rng,
        refused=case.refused,
        condition=case.condition,
    )


@every_case
def test_a_mask_leaves_rows_out(backend, dtype, rng, name):
    """Whatever stands there; without the mask the block is another one."""
    case = CASES[name]
    rows = case.drawn(rng, True)

    statistics = learned(case, backend, dtype, rows.spoiled())

    stats = case.moments(rows)
    assert_is(case, statistics, stats, backend, dtype)
    whole = case.moments(type(rows)(rows.x, rows.g))
    assert_differs(expected_of(case, stats), expected_of(case, whole))


@every_case
@pytest.mark.parametrize("loss", ["sum", "mean"])
@pytest.mark.parametrize("sources", ["sum", "mean"])
def test_conventions_scale_the_block(backend, rng, name, loss, sources):
    """Gradients of a mean loss count N^2, and M sources are summed or averaged."""
    case = CASES[name]
    rows = case.drawn(rng, False)
    first, grads = (v[0] if isinstance(v, list) else v for v in (rows.x, rows.g))
    told = rows.scaled(1 / len(first) if loss == "mean" else 1.0)
    conventions = kc.Conventions(reduction=loss, sources=sources)

    statistics = learned(case, backend, "float64", told, conventions=conventions)

    meant = rows.scaled(1 / np.sqrt(len(grads)) if sources == "mean" else 1.0)
    assert_is(case, statistics, case.moments(meant), backend, "float64")


@every_case
def test_moments_of_parts_merge_into_those_of_the_whole(backend, dtype, rng, name):
    """Parts of unequal size, each with its mask, in two updates that decay."""
    case = CASES[name]
    batches = [case.drawn(rng, True) for _ in range(2)]
    merged = case.initial(backend, dtype)

    for rows in batches:
        parts = [
            kc.batch_moments(
                case.block,
                case.placed(backend, dtype, rows.part(examples)),
                conventions=SUM,
                statistics=merged,
            )
            for examples in (slice(0, 2), slice(2, 3), slice(3, None))
        ]
        together = parts[0].merged(parts[1]).merged(parts[2])
        merged = kc.absorb_block(case.block, merged, together, 0.75)

    stats = case.mean([case.moments(rows) for rows in batches], [0.75, 1.0])
    assert_is(case, merged, stats, backend, dtype)


@every_case
def test_updates_decay_and_have_weights(backend, dtype, rng, name):
    """A plain weighted mean of the moments of batches."""
    case = CASES[name]
    stats, total, statistics = None, 0.0, case.initial(backend, dtype)

    for decay, weight in ((0.9, 1.0), (0.5, 2.0), (0.8, 0.5)):
        rows = case.drawn(rng, False)
        batch = case.placed(backend, dtype, rows)
        statistics = learn(case.block, batch, statistics, decay=decay, weight=weight)
        new = case.moments(rows)
        shares = [decay * total, weight]
        stats = new if stats is None else case.mean([stats, new], shares)
        total = decay * total + weight

    assert_is(case, statistics, stats, backend, dtype)


def matrices(case, rng, names):
    """Return a matrix of each block, and a function to place it as parameters."""
    return {name: rng.normal(size=case.layer.matrix_shape) for name in names}


def parameters_of(case, backend, dtype, V):
    placed = {}
    for name, matrix in V.items():
        arrays = case.layer.matrix_to_parameters(matrix)
        placed[name] = {k: backend.asarray(a, dtype) for k, a in arrays.items()}
    return placed


def assert_preconditioned(case, backend, dtype, result, rows, V):
    """Compare what a network made of gradients with the solutions of dense systems."""
    for name, matrix in V.items():
        F = expected_of(case, case.moments(rows[name]))
        solved = np.linalg.solve(F, matrix.ravel()).reshape(matrix.shape)
        expected = case.layer.matrix_to_parameters(solved)
        for key, array in result[name].items():
            assert_close(backend.to_numpy(array), expected[key], "inverse", dtype)


class Counting(Executor):
    """The plain executor, which notes how many tasks it was given."""

    def __init__(self):
        self.counts = []

    def __call__(self, stage, tasks):
        self.counts.append(len(tasks))
        return plain(stage, tasks)


@in_networks
def test_equal_blocks_in_one_stack_are_as_one_by_one(backend, dtype, rng, name):
    """Update, refresh and product in one task each, for what stacks."""
    case, names, counting = CASES[name], "abc", Counting()
    rows = {key: case.drawn(rng, False) for key in names}
    batches = {key: case.placed(backend, dtype, r) for key, r in rows.items()}
    network = kc.Network(dict.fromkeys(names, case.block), conventions=SUM)
    V = matrices(case, rng, names)
    gradients = parameters_of(case, backend, dtype, V)

    for executor in (plain, Stacked(counting, fewest=2)):
        state = network.update(network.empty(), batches, decay=0.9, executor=executor)
        state = network.refresh(state, damping=DAMPING, executor=executor)
        result = network.precondition(state, gradients, executor=executor)
        assert_preconditioned(case, backend, dtype, result, rows, V)

    stacks = case.approximation.stacks
    assert counting.counts == ([1, 1, 1] if stacks else [3, 3, 3])


@in_networks
def test_a_state_and_a_file_are_read_back(backend, dtype, rng, tmp_path, name):
    """Another estimator goes on bit by bit with what was written."""
    case = CASES[name]
    rows = {"a": case.drawn(rng, True)}
    V = matrices(case, rng, "a")
    gradients = parameters_of(case, backend, dtype, V)
    first, second, third = (
        make_estimator({"a": case.block}, reduction="sum", decay=0.9, damping=DAMPING)
        for _ in range(3)
    )
    first.update({"a": case.placed(backend, dtype, rows["a"])})
    first.refresh()
    kc.save_checkpoint(tmp_path / "state.npz", first)

    second.load_state_dict(first.state_dict())
    kc.load_checkpoint(tmp_path / "state.npz", third, backend=backend.selection)

    written = first.precondition(gradients)
    assert_preconditioned(case, backend, dtype, written, rows, V)
    for other in (second, third):
        read = other.precondition(gradients)["a"]
        for key, array in written["a"].items():
            got, expected = (backend.to_numpy(x) for x in (read[key], array))
            assert np.array_equal(got, expected)


@every_case
def test_one_program_of_jax_updates_and_solves(requires_backend, rng, name):
    """Update, refresh and product in one program, traced once for two batches."""
    backend = requires_backend("jax", adapter=True)
    import jax

    case = CASES[name]

    @Traced
    def step(statistics, batch, v, decay, damping):
        statistics = learn(case.block, batch, statistics, decay=decay, check="status")
        operator = operator_for(case.block, statistics, damping=damping, check="status")
        solved = operator.multiply_inverse(v)
        return statistics, solved, operator.status() | statistics.status

    compiled = jax.jit(step)
    both = [case.drawn(rng, False) for _ in range(2)]
    batches = [case.placed(backend, "float64", rows) for rows in both]
    statistics = case.initial(backend, "float64")
    V = rng.normal(size=case.layer.matrix_shape)
    for batch in batches:
        statistics, solved, status = compiled(
            statistics, batch, backend.asarray(V), 0.5, DAMPING
        )

    first, second = (case.moments(rows) for rows in both)
    stats = case.mean([first, second], [0.5, 1.0])
    expected = np.linalg.solve(expected_of(case, stats), V.ravel())
    assert step.traces == 1
    assert int(status) == kc.Status.OK
    assert_close(backend.to_numpy(solved).ravel(), expected, "inverse", "float64")
