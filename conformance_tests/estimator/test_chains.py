"""Layers that a network holds as one chain: fed, refreshed and preconditioned by layer."""

import itertools

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.array.structure import replaced

from ..builders import reference
from ..builders.chain_reference import (
    EDGES,
    LAYERS,
    NAMES,
    M,
    N,
    damped_moments,
    draw,
    fed,
    moments_of,
    parameters_of,
    placed,
    tridiagonal_matrix,
)
from ..builders.estimators import make_estimator
from ..builders.states import differences, frozen
from ..builders.tolerances import assert_close, assert_differs

DAMPING, DECAY = 0.2, 0.9
BLOCKS = {name: kc.Block(layer, kc.Kronecker()) for name, layer in LAYERS.items()}
OTHER = kc.Block(LAYERS["first"], kc.Kronecker())


def make(**options):
    """Return an estimator of a chain and of one block besides."""
    settings = {"reduction": "sum", "damping": DAMPING, "decay": DECAY}
    coupling = kc.Coupling(chains={"chain": NAMES})
    return make_estimator(
        {**BLOCKS, "other": OTHER}, **{"coupling": coupling} | settings | options
    )


def with_other(batches):
    """Return batches in which the block beside the chain saw what the first layer did."""
    return {**batches, "other": batches["first"]}


def gradients_of(backend, rng, dtype="float64"):
    """Return one long vector, and the layers' gradients that make it."""
    flat = rng.normal(size=EDGES[-1])
    return flat, placed(backend, parameters_of(flat), dtype)


def joined(backend, parameters):
    """Return the one long vector of the layers' parameters, on the host."""
    return np.concatenate(
        [
            backend.to_numpy(parameters[name][key]).ravel()
            for name, layer in LAYERS.items()
            for key in layer.parameter_shapes
        ]
    )


def matrix_of(batches, damping=DAMPING):
    """Return the dense damped F after updates with several batches."""
    shares = DECAY ** np.arange(len(batches))[::-1]
    found = [moments_of(*rows)[:2] for rows in batches]
    A, G = (
        {
            key: sum(w * part[side][key] for w, part in zip(shares, found, strict=True))
            / shares.sum()
            for key in found[0][side]
        }
        for side in (0, 1)
    )
    return tridiagonal_matrix(*damped_moments(A, G, 1.0, damping, "factored"), 1.0)


def test_a_step_is_the_dense_inverse(backend, dtype, rng):
    """A27 from batches by layer to gradients by layer; a block beside it is K-FAC's."""
    rows = [draw(rng) for _ in range(3)]
    v, gradients = gradients_of(backend, rng, dtype)
    estimator = make()
    alone = make_estimator(
        {"other": OTHER}, reduction="sum", damping=DAMPING, decay=DECAY
    )

    for xs, gs in rows:
        batches = with_other(fed(backend, xs, gs, dtype))
        estimator.update(batches)
        alone.update({"other": batches["other"]})
    estimator.refresh()
    alone.refresh()
    made = estimator.precondition(with_other(gradients))

    assert list(estimator.blocks) == ["other", "chain"]
    assert set(made) == {*NAMES, "other"}
    expected = np.linalg.solve(matrix_of(rows), v)
    assert_close(joined(backend, made), expected, "inverse", dtype)
    other, first = (backend.to_numpy(made[n]["weight"]) for n in ("other", "first"))
    assert_differs(other, first)
    kfac = alone.precondition({"other": gradients["first"]})
    for key, x in kfac["other"].items():
        assert np.array_equal(backend.to_numpy(made["other"][key]), backend.to_numpy(x))
    for name, own in gradients.items():
        for key, x in own.items():
            assert made[name][key].dtype == x.dtype
            assert tuple(made[name][key].shape) == tuple(x.shape)


@pytest.mark.parametrize("what", ["update", "precondition"])
def test_some_layers_of_a_chain_are_refused(backend, rng, what):
    """Named with those that are missing; nothing has changed then."""
    batches = fed(backend, *draw(rng))
    _, gradients = gradients_of(backend, rng)
    estimator = make()
    estimator.update(batches)
    estimator.refresh()
    before = frozen(estimator.state_dict())
    given = batches if what == "update" else gradients

    with pytest.raises(kc.ConventionError, match=r"`chain`.*missing \['second'\]"):
        getattr(estimator, what)({n: x for n, x in given.items() if n != "second"})

    assert differences(frozen(estimator.state_dict()), before) == []


def test_layers_of_a_chain_have_no_own_operator(backend, rng):
    """Refreshes, dampings, operators and moments go by the chain's name."""
    batches = fed(backend, *draw(rng))
    estimator = make()
    estimator.update(with_other(batches))
    estimator.refresh(["chain"])

    assert estimator.state["chain"].operator.vector_shape == (EDGES[-1], 1)
    assert estimator.state["other"].operator is None
    for call in (
        lambda: estimator.refresh(["first"]),
        lambda: estimator.operator("second"),
        lambda: make(damping=dict.fromkeys([*NAMES, "other"], 0.1)),
        lambda: estimator.absorb({"third": estimator.state["other"].statistics}),
    ):
        with pytest.raises(kc.UnknownBlockError, match="layer of the chain 'chain'"):
            call()
    with pytest.raises(kc.UnknownBlockError, match="by the names of its layers"):
        estimator.update({"chain": batches})
    each = make(damping={"chain": 0.5, "other": 0.1})
    each.update(with_other(batches))
    each.refresh()
    assert float(each.state["chain"].damping) == 0.5


def test_rows_that_are_not_finite_change_nothing(backend, rng):
    """One bad layer leaves the chain, and every other block, as it was."""
    xs, gs = draw(rng)
    estimator = make()
    estimator.update(with_other(fed(backend, xs, gs)))
    estimator.refresh()
    before = frozen(estimator.state_dict())
    gs[1][0, 3] = np.inf
    bad = with_other(fed(backend, xs, gs))

    with pytest.raises(kc.NotFiniteError, match=r"'chain'.*`output_grads`"):
        estimator.update(bad)
    assert differences(frozen(estimator.state_dict()), before) == []
    with np.errstate(all="ignore"):
        estimator.update(bad, check="status")
    assert int(estimator.state["chain"].status) == kc.Status.OUTPUT_GRADS_NOT_FINITE
    estimator.state = estimator.state.updated(
        {
            name: replaced(
                held, updates=1, age=0, status=estimator.state["other"].status
            )
            for name, held in estimator.state.blocks.items()
        }
    )
    kept = frozen(estimator.state_dict())
    assert [path for path in differences(kept, before) if "status" not in path] == []


def test_a_chain_is_reported_as_one_block(backend, rng):
    """The report has the chain as one block, with the factors of its layers."""
    rows = [draw(rng)]
    estimator = make()
    estimator.update(fed(backend, *rows[0]))
    estimator.refresh()

    report = estimator.report()["chain"]

    assert report.layer == "chain"
    assert report.approximation == "block_tridiagonal"
    assert list(report.factors) == [
        f"{n}/{s}" for n in NAMES for s in ("input", "output")
    ]
    F = matrix_of(rows)
    true = np.linalg.norm(F, 1) * np.linalg.norm(np.linalg.inv(F), 1)
    assert true / 4 < report.condition <= true * 1.001
    assert report.residual < 1e-12
    assert "block_tridiagonal" in repr(estimator)
    assert "TridiagonalOperator" in repr(estimator.operator("chain"))


def test_invalid_chains_raise(backend):
    """Names, layers, approximations and options are refused where they are written."""
    layer = LAYERS["first"]
    diagonal = kc.Block(layer, kc.Kronecker(input="diagonal"))
    blocks = {**BLOCKS, "diagonal": diagonal}
    cases = [
        (kc.ConventionError, "name of a block", {"first": NAMES}, {}),
        (
            kc.UnknownBlockError,
            "Unknown block 'fourth'",
            {"c": ("first", "fourth")},
            {},
        ),
        (kc.ConventionError, "named twice", {"c": ("first", "first")}, {}),
        (kc.ConventionError, "named twice", {"c": NAMES, "d": NAMES}, {}),
        (kc.ConventionError, "at least two", {"c": ("first",)}, {}),
        (kc.UnsupportedError, r"Kronecker\(\)", {"c": ("first", "diagonal")}, {}),
        (
            kc.UnsupportedError,
            "damping_scaling",
            {"c": NAMES},
            {"refreshing": kc.Refreshing(damping_scaling="mean_eigenvalue")},
        ),
    ]
    for error, message, chains, options in cases:
        with pytest.raises(error, match=message):
            kc.Estimator(
                blocks, reduction="sum", coupling=kc.Coupling(chains=chains), **options
            )
    for others in (
        {"weights": {"use": "first"}},
        {"factors": {"second/input": "first/input"}},
    ):
        with pytest.raises(kc.UnknownBlockError, match="Unknown block"):
            kc.Estimator(
                blocks,
                reduction="sum",
                coupling=kc.Coupling(chains={"c": NAMES}, **others),
            )


def test_a_network_of_a_chain_is_compiled(requires_backend, rng):
    """Update, refresh and products in one program; a bad batch leaves all as it was."""
    requires_backend("jax", adapter=True)
    import jax

    renamed = dict(zip(["c", "a", "b"], LAYERS.values(), strict=True))
    network, same = (
        kc.Network(
            {name: kc.Block(layer, kc.Kronecker()) for name, layer in renamed.items()},
            conventions=kc.Conventions(reduction="sum", sources="sum"),
            coupling=kc.Coupling(chains={"chain": names}),
        )
        for names in (tuple(renamed), list(renamed))
    )
    assert network == same
    assert hash(network) == hash(same)
    xs, gs = draw(rng)
    v = rng.normal(size=EDGES[-1])

    def renamed_of(parts):
        return dict(zip(renamed, parts.values(), strict=True))

    batches = {
        name: kc.Batch(jax.numpy.asarray(x), jax.numpy.asarray(g), sources=M)
        for name, x, g in zip(renamed, xs, gs, strict=True)
    }
    gradients = jax.tree.map(jax.numpy.asarray, renamed_of(parameters_of(v)))

    @jax.jit
    def step(state, batches, gradients):
        state = network.update(state, batches, decay=DECAY, check="status")
        state = network.refresh(state, damping=DAMPING, check="status")
        return state, network.precondition(state, gradients)

    start = network.initial(batches["c"].inputs, damping=DAMPING)
    state, made = step(start, batches, gradients)
    bad = batches | {
        "a": kc.Batch(
            batches["a"].inputs * np.nan, batches["a"].output_grads, sources=M
        )
    }
    after, again = step(state, bad, gradients)

    F = matrix_of([(xs, gs)])
    found = [
        made[name][key]
        for name, layer in renamed.items()
        for key in layer.parameter_shapes
    ]
    got = np.concatenate([np.asarray(x).ravel() for x in found])
    assert_close(got, np.linalg.solve(F, v), "inverse", "float64")
    assert bool(state.is_good())
    assert not bool(after.is_good())
    assert int(after["chain"].updates) == 1
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(again), strict=True):
        assert np.array_equal(one, other)


def test_a_model_of_pytorch_is_one_chain(requires_backend, rng):
    """Two linear layers in a row are exact (B4), but for the damping of their factors."""
    requires_backend("torch", adapter=True)
    import torch

    from kfac_core_shims.torch import KFAC

    layers = [torch.nn.Linear(4, 3, bias=False), torch.nn.Linear(3, 2, bias=False)]
    model = torch.nn.Sequential(*layers).double()
    x, y = (torch.as_tensor(rng.normal(size=(N, width))) for width in (4, 2))
    kfac = KFAC(
        model,
        likelihood=kc.losses.SquaredError(scale=0.5),
        reduction="mean",
        fisher="exact",
        damping=DAMPING,
        kl_clip=None,
        coupling=kc.Coupling(chains={"model": ("0", "1")}),
        damping_rule="factored",
    )

    outputs = model(x)
    (0.5 * ((outputs - y) ** 2).sum(-1).mean()).backward()
    before = np.concatenate([p.grad.numpy().ravel() for p in model.parameters()])
    kfac.step()
    after = np.concatenate([p.grad.numpy().ravel() for p in model.parameters()])

    # Weights lie as (out, in): J of the outputs, and F with the damped blocks in it.
    first, second = (layer.weight.detach().numpy() for layer in layers)
    inputs = [x.numpy(), x.numpy() @ first.T]
    pulled = [second.T, np.eye(2)]
    J = np.concatenate(
        [
            np.einsum("ic,nj->ncij", g, a).reshape(N, 2, -1)
            for g, a in zip(pulled, inputs, strict=True)
        ],
        axis=-1,
    )
    F = np.einsum("nci,ncj->ij", J, J) / N
    edges = np.cumsum([0, first.size, second.size])
    for a, g, (start, stop) in zip(
        inputs, pulled, itertools.pairwise(edges), strict=True
    ):
        A, G = a.T @ a / N, g @ g.T
        damped = reference.damped_block(G, A, 1.0, damping=DAMPING, rule="factored")
        F[start:stop, start:stop] = damped
    assert_close(after, np.linalg.solve(F, before), "inverse", "float64")


def test_failures_are_counted_and_the_operator_is_kept(backend, rng):
    """The failure budget is the chain's; past it the error says which layer."""
    xs, gs = draw(rng, examples=2)
    estimator = make(failure_budget=1)
    estimator.update(fed(backend, xs, gs))
    estimator.refresh()
    held = estimator.state["chain"].operator
    estimator.damping = 0.0

    estimator.refresh()

    assert estimator.state["chain"].operator is held
    assert estimator.state["chain"].failures == 1
    with pytest.raises(kc.FactorizationError, match=r"(first|second|third)/"):
        estimator.refresh()
    fresh = make(damping=0.0)
    fresh.update(fed(backend, xs, gs))
    fresh.refresh(check="status")
    assert int(fresh.state["chain"].status) != kc.Status.OK
