"""The pure functions under ``torch.compile`` and ``torch.vmap``, and autograd's graph."""

from __future__ import annotations

import numpy as np
import pytest

import kfac_core as kc

from ..builders.programs import run_python
from ..builders.tolerances import assert_close
from ..builders.tracing import compiler_of

N, n, m = 12, 4, 3
BLOCK = kc.Block(
    kc.Dense(in_features=n, out_features=m, bias=True, weight_layout="oi"),
    kc.Kronecker(),
)
SUMMED = kc.Conventions(reduction="sum", sources="sum")
RULES = ["factored", "exact"]

# array-api-compat caches its look-ups with `functools.lru_cache`; PyTorch's tracer warns
# that it traces the function behind the cache, which is the same function.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"
)


@pytest.fixture
def torch(requires_backend):
    """PyTorch itself, with its tracer's caches empty."""
    requires_backend("torch", adapter=True)
    import torch

    torch._dynamo.reset()
    return torch


@pytest.fixture
def tensors(torch, rng):
    """Inputs, output gradients and a vector."""
    shapes = (N, n), (N, m), (n + 1, m)
    return tuple(torch.tensor(rng.normal(size=shape)) for shape in shapes)


def step(statistics, x, g, V, damping, decay, rule):
    """Return new statistics, some products and all flags, looking at no value."""
    statistics = kc.update_block(
        BLOCK,
        statistics,
        kc.Batch(x, g),
        kc.UpdateOptions(conventions=SUMMED, decay=decay, check="status"),
    )
    op = kc.operator_of(
        BLOCK,
        statistics,
        kc.RefreshOptions(
            damping=damping,
            rule=rule,
            factorizations=("inverse", "cholesky", "eigenbasis"),
            check="status",
        ),
    )
    products = {
        "multiply": op.multiply(V),
        "inverse": op.multiply_inverse(V),
        "matpower": op.multiply_matpower(V, -0.5),
        "cholesky": op.multiply_cholesky(V),
        "cholesky_inverse": op.multiply_cholesky_inverse(V, transpose=True),
        "sample": op.sample(V),
        "logdet": op.logdet(),
    }
    return statistics, products, statistics.status | op.status()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["number", "array"])
def test_a_compiled_step_is_the_step(torch, tensors, rule, kind):
    """Update, operator and products trace as one graph and give the same numbers."""
    x, g, V = tensors
    start = BLOCK.initial(x)
    made = float if kind == "number" else lambda v: torch.tensor(v, dtype=torch.float64)
    args = start, x, g, V, made(0.1), made(0.9)

    _, got, flags = compiler_of("torch")(lambda *a: step(*a, rule))(*args)

    _, expected, _ = step(*args, rule)
    assert int(flags) == kc.Status.OK
    for product, value in expected.items():
        assert_close(got[product], value, "inverse", "float64")


def test_looking_at_a_value_breaks_the_graph(torch, tensors):
    """The row that must fail: ``check="raise"`` looks at values and cannot be traced."""
    x, g, _ = tensors

    @compiler_of("torch")
    def update(x, g):
        return kc.update_block(
            BLOCK,
            BLOCK.initial(x),
            kc.Batch(x, g),
            kc.UpdateOptions(conventions=SUMMED, decay=0.9),
        ).status

    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        update(x, g)


COLD = """
import warnings
warnings.simplefilter("ignore")
import torch
import kfac_core as kc

block = kc.Block(
    kc.Dense(in_features=4, out_features=3, bias=True, weight_layout="oi"),
    kc.Kronecker(),
)

@torch.compile(fullgraph=True, backend="eager")
def first(x, g, V):
    conventions = kc.Conventions(reduction="sum", sources="sum")
    options = kc.UpdateOptions(conventions, 0.9, check="status")
    statistics = kc.update_block(block, block.initial(x), kc.Batch(x, g), options)
    options = kc.RefreshOptions(
        0.1, "{rule}", ("inverse", "cholesky", "eigenbasis"), "status"
    )
    op = kc.operator_of(block, statistics, options)
    return op.multiply_inverse(V), op.status() | statistics.status

torch.manual_seed(0)
u, status = first(torch.randn(12, 4), torch.randn(12, 3), torch.randn(5, 3))
print(bool(torch.all(torch.isfinite(u))), int(status))
"""


@pytest.mark.parametrize("rule", RULES)
def test_the_first_call_of_a_process_may_be_compiled(torch, rule):
    """A process whose first use of the library is inside ``torch.compile`` works."""
    compiler_of("torch")
    program = COLD.replace("{rule}", rule)

    done = run_python("-c", program, timeout=300)

    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "0"]


def estimator(rule="factored"):
    """Return an estimator of the one block."""
    return kc.Estimator(
        {"fc": BLOCK}, decay=0.9, damping=0.1, damping_rule=rule, reduction="sum"
    )


def arrays_in(value):
    """Walk over the tensors of a state or a result."""
    if isinstance(value, dict):
        for part in value.values():
            yield from arrays_in(part)
    elif hasattr(value, "requires_grad"):
        yield value


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("leaf", [True, False])
def test_statistics_hold_no_graph(torch, tensors, rule, leaf):
    """Tensors that require gradients leave no graph in statistics or operators."""
    x, g, _ = (t.clone().requires_grad_() for t in tensors)
    if not leaf:
        x, g = x * 2.0, g * 2.0
    kept = estimator(rule)

    kept.update({"fc": kc.Batch(x, g)})
    kept.refresh()
    kept.update({"fc": kc.Batch(x, g)})

    found = list(arrays_in(kept.state_dict()))
    assert len(found) > 5
    assert not any(t.requires_grad or t.grad_fn is not None for t in found)


def test_results_of_parameters_hold_no_graph(torch, tensors):
    """Vectors that require gradients are detached, as the estimator promises."""
    x, g, V = tensors
    kept = estimator()
    kept.update({"fc": kc.Batch(x, g)})
    kept.refresh()
    gradients = {"weight": V[:-1].T.clone(), "bias": V[-1].clone()}
    for gradient in gradients.values():
        gradient.requires_grad_()

    result = kept.precondition({"fc": gradients})

    assert not any(t.requires_grad for t in arrays_in(result))


def test_inputs_are_not_modified(torch, tensors):
    """Feeding and preconditioning modify neither values nor flags of what was given."""
    given = [t.clone().requires_grad_() for t in tensors[:2]]
    V = tensors[2].clone()
    copies = [t.detach().clone() for t in (*given, V)]
    kept = estimator()

    kept.update({"fc": kc.Batch(*given)})
    kept.refresh()
    kept.precondition({"fc": {"weight": V[:-1].T, "bias": V[-1]}})

    assert all(t.requires_grad for t in given)
    assert all(t.grad_fn is None for t in given)
    for t, copy in zip((*given, V), copies, strict=True):
        np.testing.assert_array_equal(t.detach(), copy)


# ---------------------------------------------------------------- a network's functions


NETWORKS = {
    "kronecker": ({"a": kc.Kronecker(), "b": kc.Kronecker()}, "factored"),
    "eigen": ({"a": kc.EKFAC()}, "exact"),
    "mixed": ({"a": kc.TNT(), "b": kc.Diagonal()}, "factored"),
}


def network_step(case):
    """Return a network and a whole step of it, which looks at no value."""
    kinds, rule = NETWORKS[case]
    blocks = {name: kc.Block(BLOCK.layer, kind) for name, kind in kinds.items()}
    network = kc.Network(blocks, conventions=SUMMED, damping_rule=rule)

    def step(state, x, g, V, damping, decay):
        batches = {name: kc.Batch(x, g) for name in blocks}
        state = network.update(state, batches, decay=decay, check="status")
        if case == "eigen":
            state = network.rebase(state, moments="kronecker", check="status")
        state = network.refresh(state, damping=damping, check="status")
        gradient = {"weight": V[:-1].T, "bias": V[-1]}
        found = network.precondition(state, dict.fromkeys(blocks, gradient))
        return state, found

    return network, step


@pytest.mark.parametrize("case", NETWORKS)
def test_a_compiled_step_of_a_network_is_the_step(torch, tensors, case):
    """One graph; another damping or decay makes no other, and a bad batch is flagged."""
    x, g, V = tensors
    network, step = network_step(case)
    graphs = []

    def counted(graph, _):
        graphs.append(1)
        return graph

    one = compiler_of("torch", torch_backend=counted)(step)
    coefficients = [torch.tensor(v, dtype=torch.float64) for v in (0.2, 0.9, 0.4, 0.5)]
    state = other = network.initial(x, damping=0.2)
    for i in range(4):
        j = 2 * (i % 2)
        state, found = one(state, (i + 1) * x, g, V, *coefficients[j : j + 2])
        other, expected = step(other, (i + 1) * x, g, V, *coefficients[j : j + 2])
        for name, vector in expected.items():
            assert_close(found[name]["weight"], vector["weight"], "inverse", "float64")

    # The first state may lie in memory in another order than those that follow.
    assert len(graphs) <= 2
    bad, _ = one(state, x * torch.nan, g, V, *coefficients[:2])
    assert not bool(bad.is_good())
    assert [int(held["a"].updates) for held in (state, bad)] == [4, 4]


@pytest.mark.parametrize("case", NETWORKS)
def test_vmap_of_a_network_is_a_loop(torch, tensors, case):
    """Update, refresh and product under ``torch.func.vmap``, over batches and dampings."""
    x, g, V = tensors
    network, step = network_step(case)
    start = network.initial(x, damping=0.2)
    xs, dampings = torch.stack([x, 2.0 * x]), torch.tensor([0.2, 0.5], dtype=x.dtype)

    def one(x, damping):
        return step(start, x, g, V, damping, 0.9)[1]

    got = torch.func.vmap(one)(xs, dampings)

    for i in range(2):
        for name, vector in one(xs[i], dampings[i]).items():
            assert_close(got[name]["weight"][i], vector["weight"], "inverse", "float64")
