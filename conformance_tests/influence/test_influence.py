"""Influence scores against dense matrices, in any amount of memory and any storage."""

import re

import numpy as np
import pytest

import kfac_core as kc

from ..builders.memory import PeakMemory
from ..builders.one_block import learn
from ..builders.spectral_cases import EXAMPLES, KINDS, case_of, make_case
from ..builders.tolerances import assert_close, assert_differs

DAMPING = 0.2
PLENTY = 10**6


@pytest.fixture(params=KINDS)
def case(request, backend, dtype):
    """A block of each kind that has an eigenbasis."""
    return case_of(request, backend, dtype, request.param)


@pytest.fixture
def plain(backend):
    """A Kronecker product in float64."""
    return make_case(backend, "float64", "kronecker")


def influence_of(*cases, check="raise", **damping):
    """Return the influence of a network of some cases' blocks."""
    blocks = {str(i): case.block for i, case in enumerate(cases)}
    statistics = {str(i): case.statistics for i, case in enumerate(cases)}
    return kc.Influence.of_statistics(
        blocks, statistics, check=check, **(damping or {"damping": DAMPING})
    )


def precondition(
    influence, gradients, *, storage="float64", budget=PLENTY, loss="sum", **options
):
    return influence.precondition(
        gradients, reduction=loss, storage=storage, max_elements=budget, **options
    )


def scores(influence, queries, gradients, *, budget=PLENTY, loss="sum", **options):
    return influence.scores(
        queries, gradients, reduction=loss, max_elements=budget, **options
    )


def dense_of(case, damping=DAMPING):
    return np.linalg.inv(case.dense + damping * np.eye(len(case.dense)))


def queries_and_examples(case):
    """Return two sets of gradients as the library and as the reference have them."""
    fed = [case.batch(case.derivatives[k]) for k in (1, 0)]
    return *fed, case.jacobians[:, 1], case.jacobians[:, 0]


def test_scores_are_those_of_the_dense_inverse(case):
    """``<g_q, (F + lam I)^-1 g_n>``, from rows and from gradients alike."""
    queries, examples, G_q, G_n = queries_and_examples(case)
    stacks = [case.parameters(case.matrices(G)) for G in (G_q, G_n)]
    influence = influence_of(case)
    storage = case.dtype

    got = [
        scores(influence, precondition(influence, {"0": q}, storage=storage), {"0": n})
        for q, n in ((queries, examples), stacks, (queries, stacks[1]))
    ]

    expected = G_q @ dense_of(case) @ G_n.T
    for found in got:
        assert found.dtype == case.backend.dtype(case.dtype)
        assert_close(case.backend.to_numpy(found), expected, "inverse", case.dtype)


@pytest.mark.parametrize("budget", [PLENTY, 200])
def test_examples_without_the_bias_have_none_in_parts(backend, rng, budget):
    """Each part has its own examples' flags, of each use of a tied weight."""
    layer = kc.Dense(in_features=3, out_features=2, bias=True, weight_layout="io")
    block = kc.Block(layer, kc.Kronecker())
    x, g = rng.normal(size=(6, 3)), rng.normal(size=(6, 2))
    has = np.asarray([True, False, True, True, False, True])
    batch = kc.Batch(*map(backend.asarray, (x, g)), bias=backend.asarray(has))
    conventions = kc.Conventions(reduction="sum", sources="sum")
    statistics = kc.batch_moments(block, batch, conventions=conventions)
    influence = kc.Influence.of_statistics(
        {"0": block}, {"0": statistics}, damping=DAMPING
    )

    queries = precondition(influence, {"0": batch}, budget=budget)
    got = scores(influence, queries, {"0": batch}, budget=budget)

    x1 = np.column_stack([x, has])
    F = np.kron(x1.T @ x1, g.T @ g) / 36 + DAMPING * np.eye(8)
    D = np.einsum("ni,nj->nij", x1, g).reshape(6, 8)
    expected = D @ np.linalg.solve(F, D.T)
    assert_close(backend.to_numpy(got), expected, "inverse", "float64")
    alone = influence.self_scores({"0": batch}, reduction="sum", max_elements=budget)
    assert_close(backend.to_numpy(alone), np.diag(expected), "inverse", "float64")


def test_self_scores_are_the_diagonal(case):
    """``<g_n, (F + lam I)^-1 g_n>``, from rows and from gradients alike."""
    _, examples, _, G = queries_and_examples(case)
    stack = case.parameters(case.matrices(G))
    influence = influence_of(case)

    expected = np.einsum("np,pr,nr->n", G, dense_of(case), G)
    for given in (examples, stack):
        got = influence.self_scores({"0": given}, reduction="sum", max_elements=PLENTY)
        assert_close(case.backend.to_numpy(got), expected, "inverse", case.dtype)


def test_blocks_add_up(backend):
    """A network's score is the sum over its blocks, each with its own damping."""
    cases = [make_case(backend, "float64", kind) for kind in ("kronecker", "shared")]
    damping = {"0": 0.2, "1": 1.5}
    influence = influence_of(*cases, damping=damping)
    parts = [queries_and_examples(case) for case in cases]
    queries, examples = (
        {str(i): part[side] for i, part in enumerate(parts)} for side in (0, 1)
    )

    got = scores(influence, precondition(influence, queries), examples)

    expected = sum(
        G_q @ dense_of(case, lam) @ G_n.T
        for case, lam, (_, _, G_q, G_n) in zip(
            cases, damping.values(), parts, strict=True
        )
    )
    assert_close(backend.to_numpy(got), expected, "inverse", "float64")


@pytest.mark.parametrize("kind", ["kronecker", "shared"])
def test_every_budget_gives_the_same_scores(backend, kind):
    """The smallest budget that is enough, one in between and plenty; less is refused."""
    case = make_case(backend, "float64", kind)
    queries, examples, *_ = queries_and_examples(case)
    influence = influence_of(case)
    stored = precondition(influence, {"0": queries})
    expected = backend.to_numpy(scores(influence, stored, {"0": examples}))
    own = backend.to_numpy(
        influence.self_scores({"0": examples}, reduction="sum", max_elements=PLENTY)
    )

    with pytest.raises(kc.ShapeError, match="max_elements") as caught:
        scores(influence, stored, {"0": examples}, budget=1)
    least = int(re.search(r"at least (\d+)", str(caught.value))[1])

    for budget in (least, 3 * least):
        got = scores(influence, stored, {"0": examples}, budget=budget)
        assert_close(backend.to_numpy(got), expected, "roundoff", "float64")
    with pytest.raises(kc.ShapeError, match=f"at least {least},"):
        scores(influence, stored, {"0": examples}, budget=least - 1)
    # One query or example at a time takes a few matrices of the block's size.
    small = 7 * case.shape[0] * case.shape[1] + 60
    again = precondition(influence, {"0": queries}, budget=small)
    got = scores(influence, again, {"0": examples})
    assert_close(backend.to_numpy(got), expected, "roundoff", "float64")
    got = influence.self_scores({"0": examples}, reduction="sum", max_elements=small)
    assert_close(backend.to_numpy(got), own, "roundoff", "float64")


@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize("storage", ["float64", "float16"])
def test_the_budget_is_kept(requires_backend, rng, positions, storage):
    """NumPy's allocations beyond arguments and results stay within the budget."""
    requires_backend("numpy")
    shared = () if positions == 1 else (positions,)
    n, m, count = 40, 30, 300
    layer = kc.Dense(in_features=n, out_features=m, bias=True, weight_layout="io")
    block = kc.Block(layer, kc.Kronecker())
    batch = kc.Batch(
        rng.normal(size=(count, *shared, n)), rng.normal(size=(count, *shared, m))
    )
    statistics = learn(block, batch)
    influence = kc.Influence.of_statistics({"0": block}, {"0": statistics}, damping=0.5)
    asked = {"0": kc.Batch(batch.inputs[:30], batch.output_grads[:30])}
    queries = precondition(influence, asked, storage=storage)
    budget = 20_000
    whole = scores(influence, queries, {"0": batch})

    def peak_of(function):
        with PeakMemory() as memory:
            kept = function()
        return kept, memory.peak

    limited, peak = peak_of(
        lambda: scores(influence, queries, {"0": batch}, budget=budget)
    )
    stored, peak_stored = peak_of(
        lambda: precondition(influence, asked, storage=storage, budget=budget)
    )
    _, peak_own = peak_of(
        lambda: influence.self_scores(
            {"0": batch}, reduction="sum", max_elements=budget
        )
    )

    assert_close(limited, whole, "roundoff", "float64")
    # Parts of the result stand beside temporaries, and twice while they are joined;
    # Python's objects are small.
    overhead = 20_000
    for taken, result in (
        (peak, limited.nbytes),
        (peak_stored, stored.blocks["0"].values.nbytes),
        (peak_own, 0),
    ):
        assert taken < max(8 * budget, result) + result + overhead
    # The row that must differ: without a budget the same call takes far more.
    _, free = peak_of(lambda: scores(influence, queries, {"0": batch}))
    assert free > 2 * (8 * budget + 2 * limited.nbytes)


@pytest.mark.parametrize("storage", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("size", [1.0, 1e7])
def test_narrow_storage_errs_as_stated(plain, storage, size):
    """The error is within ``u |P_q| |g_n|``, for gradients far outside float16 too."""
    queries, examples, G_q, G_n = queries_and_examples(plain)
    large = kc.array.replaced(queries, output_grads=queries.output_grads * size)
    influence, xp = influence_of(plain), plain.backend.xp

    stored = precondition(influence, {"0": large}, storage=storage)
    got = plain.backend.to_numpy(scores(influence, stored, {"0": examples}))

    kept = getattr(xp, storage, xp.float32)
    assert stored.dtypes == {"0": kept}
    roundoff = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(storage, 2.0**-24)
    P = size * G_q @ dense_of(plain)
    limit = np.linalg.norm(P, axis=1)[:, None] * np.linalg.norm(G_n, axis=1)
    error = np.abs(got - P @ G_n.T)
    assert np.all(error <= 1.01 * roundoff * limit)
    if kept != xp.float32:
        assert np.max(error / limit) > 1e-3 * roundoff


@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", [1e-9, 1.0, 1e9])
def test_narrow_storage_of_low_rank_has_no_range(plain, storage, size):
    """Both narrow matrices are rounded once, for gradients far outside float16 too."""
    queries, examples, G_q, G_n = queries_and_examples(plain)
    scaled = kc.array.replaced(queries, output_grads=queries.output_grads * size)
    rank = min(plain.block.layer.matrix_shape)
    influence = influence_of(plain)

    stored = precondition(influence, {"0": scaled}, storage=storage, rank=rank)
    got = plain.backend.to_numpy(scores(influence, stored, {"0": examples}))

    roundoff = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[storage]
    P = size * G_q @ dense_of(plain)
    limit = np.linalg.norm(P, axis=1)[:, None] * np.linalg.norm(G_n, axis=1)
    error = np.abs(got - P @ G_n.T)
    assert np.all(error <= 1.01 * (1.0 + rank**0.5) * roundoff * limit)


def test_sums_of_narrow_queries_are_wide(backend, dtype):
    """Scores are added in the block's dtype, whatever its queries are stored in."""
    case = make_case(backend, dtype, "kronecker")
    queries, examples, *_ = queries_and_examples(case)
    influence = influence_of(case)

    stored = precondition(influence, {"0": queries}, storage="float16")
    got = scores(influence, stored, {"0": examples})

    assert got.dtype == backend.dtype(dtype)
    assert stored.count == EXAMPLES


@pytest.mark.parametrize("kind", ["kronecker", "shared"])
def test_the_loss_may_be_a_mean(backend, kind):
    """Gradients of a mean over examples, or over kept rows, are scaled back."""
    case = make_case(backend, "float64", kind)
    queries, examples, *_ = queries_and_examples(case)
    keep = np.ones(case.inputs.shape[:-1], bool)
    keep.reshape(-1)[[1, 3]] = False
    examples = kc.array.replaced(examples, mask=backend.asarray(keep))
    influence = influence_of(case)
    stored = precondition(influence, {"0": queries})
    expected = backend.to_numpy(scores(influence, stored, {"0": examples}))

    for loss, divisor in (("mean", EXAMPLES), ("mean_rows", np.sum(keep))):
        g = examples.output_grads * (1.0 / float(divisor))
        mean = kc.array.replaced(examples, output_grads=g)
        # A budget that makes parts, which must not be taken for the batch.
        got = scores(influence, stored, {"0": mean}, loss=loss, budget=200)
        wrong = scores(influence, stored, {"0": mean})
        assert_close(backend.to_numpy(got), expected, "identity", "float64")
        assert_differs(backend.to_numpy(wrong), expected)


def test_several_uses_of_a_weight_are_one_gradient(plain):
    """A list of batches is the sum of what each gives."""
    one, other, G_q, G_n = queries_and_examples(plain)
    influence = influence_of(plain)
    stored = precondition(influence, {"0": other})

    got = scores(influence, stored, {"0": [one, other]})

    expected = G_n @ dense_of(plain) @ (G_q + G_n).T
    assert_close(plain.backend.to_numpy(got), expected, "inverse", "float64")


def test_the_damping_is_a_fraction_of_the_mean_eigenvalue(case):
    """``0.1 tr F / dim F`` of each block; with EKFAC, of the corrected eigenvalues."""
    curvatures = kc.posterior.spectral_blocks({"0": case.block}, {"0": case.statistics})

    found = kc.influence.mean_eigenvalue_damping(curvatures, fraction=0.1)
    influence = influence_of(case, damping_fraction=0.1)

    expected = 0.1 * np.trace(case.dense) / len(case.dense)
    got = case.backend.to_numpy(found["0"])
    assert_close(got, expected, "eigenvalues", case.dtype, condition=10)
    same = case.backend.to_numpy(influence.damping["0"])
    assert_close(same, got, "exact", case.dtype)


def test_a_block_that_saw_nothing_is_refused(plain):
    """Zero curvature and no damping has no inverse; a status says so instead."""
    block, nothing = plain.block, plain.batch(np.zeros((EXAMPLES, 3)))
    zero = learn(block, nothing)
    given = {"0": block}, {"0": zero}

    with pytest.raises(kc.FactorizationError, match="damping"):
        kc.Influence.of_statistics(*given, damping=0.0)
    with pytest.raises(kc.FactorizationError, match="damping"):
        kc.Influence.of_statistics(*given, damping_fraction=0.1)
    made = kc.Influence.of_statistics(*given, damping=0.0, check="status")
    assert int(made.status()) == int(kc.Status.NOT_POSITIVE)
    good = kc.Influence.of_statistics(*given, damping=0.1, check="status")
    assert int(good.status()) == 0


def test_gradients_that_are_not_finite_are_refused(plain):
    """NaN in a query or an example raises and names the block; or comes back."""
    queries, *_ = queries_and_examples(plain)
    influence = influence_of(plain)
    broken = np.array(plain.derivatives[0])
    broken[2, 1] = np.nan
    bad = {"0": plain.batch(broken)}
    stored = precondition(influence, {"0": queries})

    with pytest.raises(kc.NotFiniteError, match="'0': gradients of the queries"):
        precondition(influence, bad)
    with pytest.raises(kc.NotFiniteError, match="gradients of the examples"):
        scores(influence, stored, bad)
    with pytest.raises(kc.NotFiniteError, match="gradients of the examples"):
        influence.self_scores(bad, reduction="sum", max_elements=PLENTY)
    lenient = influence_of(plain, check="status")
    got = plain.backend.to_numpy(scores(lenient, stored, bad))
    assert np.all(np.isnan(got[:, 2]))
    assert np.all(np.isfinite(np.delete(got, 2, axis=1)))


def test_scores_can_be_traced(requires_backend):
    """Inside `jax.jit`, for rows and for gradients, with chunks of static sizes."""
    backend = requires_backend("jax", adapter=True)
    import jax

    plain = make_case(backend, "float64", "kronecker")
    queries, examples, G_q, G_n = queries_and_examples(plain)
    stack = plain.parameters(plain.matrices(G_n))
    influence = influence_of(plain, check="status")

    @jax.jit
    def traced(queries, examples, stack):
        stored = precondition(influence, {"0": queries}, storage="float32")
        by_rows = scores(influence, stored, {"0": examples})
        return by_rows, scores(influence, stored, {"0": stack})

    expected = G_q @ dense_of(plain) @ G_n.T
    for got in traced(queries, examples, stack):
        assert_close(backend.to_numpy(got), expected, "roundoff", "float32")


def test_invalid_arguments_raise(plain):
    """Options without a value, several sources, unequal examples, missing blocks."""
    queries, examples, *_ = queries_and_examples(plain)
    influence = influence_of(plain)
    stored = precondition(influence, {"0": queries})
    given = {"0": plain.block}, {"0": plain.statistics}
    short = {"0": plain.batch(plain.derivatives, sources=2)}
    stack = plain.parameters(plain.matrices(plain.jacobians[:, 0]))
    uneven = {"0": stack | {"bias": stack["bias"][:2, ...]}}
    # One input more than output gradients, which must not be passed over.
    longer = plain.backend.xp.concat([examples.inputs, examples.inputs[:1, ...]])

    with pytest.raises(kc.ConventionError, match="exactly one"):
        kc.Influence.of_statistics(*given)
    with pytest.raises(kc.ConventionError, match="exactly one"):
        kc.Influence.of_statistics(*given, damping=0.1, damping_fraction=0.1)
    with pytest.raises(kc.DampingError, match="fraction"):
        kc.Influence.of_statistics(*given, damping_fraction=-0.1)
    with pytest.raises(kc.DampingError, match="damping"):
        kc.Influence.of_statistics(*given, damping=np.inf)
    with pytest.raises(kc.ConventionError, match="storage"):
        precondition(influence, {"0": queries}, storage="int8")
    with pytest.raises(kc.UnsupportedError, match="one gradient"):
        scores(influence, stored, short)
    with pytest.raises(kc.ShapeError, match=r"to have shape \(\d, \.\.\.\)"):
        scores(influence, stored, uneven)
    with pytest.raises(kc.ShapeError, match=r"to have shape \(\d, \.\.\.\)"):
        scores(influence, stored, {"0": kc.array.replaced(examples, inputs=longer)})
    with pytest.raises(kc.UnknownBlockError, match="gradients"):
        scores(influence, stored, {"1": examples})
    with pytest.raises(kc.ConventionError, match="mean_rows"):
        scores(influence, stored, {"0": stack}, loss="mean_rows")
