"""`KFAC` on several processes, each with a part of every batch, is `KFAC` on one with all.

The processes are virtual ranks; `conformance_tests.distributed.test_processes` has real
ones, with DistributedDataParallel.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as fn  # noqa: E402

import kfac_core as kc  # noqa: E402
from kfac_core.distributed import Distributed, run_ranks  # noqa: E402
from kfac_core_shims.torch import KFAC, KFACOptimizer  # noqa: E402

STEPS, RATE, N = 5, 0.1, 12
IGNORED = -100


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 3, 3),
        nn.Tanh(),
        nn.Flatten(),
        nn.LayerNorm(12),
        nn.Linear(12, 6),
        nn.Tanh(),
        nn.Linear(6, 4),
    ).double()


def data(step):
    rng = np.random.default_rng(step)
    x = torch.from_numpy(rng.normal(size=(N, 2, 6)))
    return x, torch.from_numpy(rng.integers(0, 4, size=N))


def rows_of(step, rank):
    """Return the rows of one of three ranks: unequal, and sometimes none."""
    cuts = [[0, 5, 5, N], [0, 1, 9, N], [0, 0, 3, N]][step % 3]
    return slice(cuts[rank], cuts[rank + 1])


def averaged(model, communicator):
    """Average gradients as DistributedDataParallel does."""
    for p in model.parameters():
        total = communicator.all_reduce(p.grad.reshape(-1)).wait()
        p.grad = total.reshape(p.shape) / communicator.size


def loss_of(z, y, reduction, total, processes, weight=None):
    """Return what one of several processes differentiates."""
    options = {"reduction": "sum", "ignore_index": IGNORED, "weight": weight}
    loss = fn.cross_entropy(z, y, **options)
    return loss if reduction == "sum" else loss * (processes / max(total, 1))


def trained(
    model,
    communicator,
    *,
    labels=lambda step, y: y,
    reduction="mean",
    weight=None,
    **options,
):
    """Return parameters, directions and metrics after some steps."""
    own = {} if "execution" in options else {"communicator": communicator}
    settings = {"likelihood": "categorical", "fisher": "exact", **own, **options}
    every = {"update_every": 1, "refresh_every": 2}
    kfac = KFAC(model, lr=0.1, reduction=reduction, **every, **settings)
    clips = []
    for step in range(STEPS):
        x, y = data(step)
        y = labels(step, y)
        total, processes = int((y != IGNORED).sum()), 1
        if weight is not None:
            total = float(weight[y].sum())
        if communicator is not None:
            processes = communicator.size
            own = rows_of(step, communicator.rank)
            x, y = x[own], y[own]
        model.zero_grad()
        loss_of(model(x), y, reduction, total, processes, weight).backward()
        if communicator is not None:
            averaged(model, communicator)
        kfac.step()
        clips.append(kfac.metrics().get("clip", 1.0))
        with torch.no_grad():
            for p in model.parameters():
                p -= RATE * p.grad
    return [p.detach() for p in model.parameters()], clips


def same(found, expected):
    for rank in found:
        for one, other in zip(rank[0], expected[0], strict=True):
            error = torch.linalg.norm(one - other) / torch.linalg.norm(other)
            assert error < 1e-10
        np.testing.assert_allclose(rank[1], expected[1], rtol=1e-10)


def assert_ranks_are_one(first, **options):
    """Compare three ranks with one process; return what this one ends with."""
    alone = trained(copy.deepcopy(first), None, **options)
    same(run_ranks(3, lambda c: trained(copy.deepcopy(first), c, **options)), alone)
    return alone


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_unequal_shards_are_one_batch(fisher, reduction):
    """Convolution, norm and linear layers; a rank has no rows in some steps."""
    first, options = network(), {"fisher": fisher, "reduction": reduction}

    _, clips = assert_ranks_are_one(first, **options)
    assert min(clips) < 0.9  # The KL clip acts.


def test_a_computed_weight_has_the_gradient_of_all_ranks():
    """Its own comes from the backward pass of one rank, and is averaged in the step."""
    first = network()
    first[4] = nn.utils.parametrizations.weight_norm(first[4])
    assert_ranks_are_one(first)


def of_shards(first, sizes, loss_of, communicator=None, **options):
    """Return the gradients after a step of the average of means over shards, or its error.

    On one process each shard is a pass of its own.
    """
    model, (x, y) = copy.deepcopy(first), data(0)
    alone = {} if communicator is None else {"communicator": communicator}
    kfac = KFAC(model, lr=0.1, fisher="exact", **options, **alone)
    shards = zip(
        x[: sum(sizes)].split(sizes), y[: sum(sizes)].split(sizes), strict=True
    )
    for rank, (a, b) in enumerate(shards):
        if communicator is None:
            (loss_of(model(a), b) / len(sizes)).backward()
        elif communicator.rank == rank:
            loss_of(model(a), b).backward()
    if communicator is not None:
        averaged(model, communicator)
    try:
        kfac.step()
    except kc.ConventionError as error:
        return str(error)
    return [p.grad for p in model.parameters()], [kfac.metrics()["clip"]]


def test_means_over_unequal_shards_give_rows_unequal_weights():
    """As the parts of one process do, where the gradient shows the weights."""
    what = network(), (3, 2, 5), fn.cross_entropy
    found = run_ranks(3, lambda c: of_shards(*what, c, likelihood="categorical"))
    same(found, of_shards(*what, likelihood="categorical"))


def test_means_over_unequal_shards_are_refused_where_nothing_shows_them():
    """The average of their means is not the mean over all rows; over equal shards it is."""

    def squares(z, y):
        return fn.mse_loss(z, fn.one_hot(y, 4).double())

    first, module = network(), nn.MSELoss()

    def taken(sizes, communicator=None):
        return of_shards(first, sizes, squares, communicator, likelihood=module)

    for said in run_ranks(3, lambda c: taken((3, 2, 5), c)):
        assert "Processes have unequal numbers of rows" in said
        assert "reduction='sum'" in said
    same(run_ranks(3, lambda c: taken((4, 4, 4), c)), taken((4, 4, 4)))


@pytest.mark.parametrize(
    ("reduction", "factor", "said"),
    [
        (None, lambda total: 1.0, "Expected a loss that is a mean"),
        (None, lambda total: 3.0 / total, "taken"),
        ("mean", lambda total: 1.0, "taken"),  # gradients may be divided later
        ("sum", lambda total: 1.0, "taken"),
        ("sum", lambda total: 3.0 / total, "Expected a loss that is a sum"),
    ],
)
def test_a_loss_of_the_other_reduction_is_refused_on_all_ranks(reduction, factor, said):
    """By its scale over the rows of all, at each step with statistics."""
    first = network()

    def on_a_rank(communicator):
        model = copy.deepcopy(first)
        options = {"communicator": communicator, "update_every": 1}
        kfac = KFAC(
            model, lr=0.1, likelihood="categorical", reduction=reduction, **options
        )
        found = []
        for step in range(4):
            model.zero_grad()
            x, y = data(step)
            rows = rows_of(step, communicator.rank)
            # The first two steps are as they should be.
            by = factor(N) if step > 1 else (1.0 if reduction == "sum" else 3.0 / N)
            loss = fn.cross_entropy(model(x[rows]), y[rows], reduction="sum") * by
            loss.backward()
            averaged(model, communicator)
            try:
                kfac.step()
            except kc.ConventionError as error:
                found.append(str(error).partition(" over")[0])
        return found or ["taken"]

    assert run_ranks(3, on_a_rank) == [[said] * (1 if said == "taken" else 2)] * 3


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_steps_of_the_optimizer_are_those_of_one_batch(reduction):
    """Loss, quadratic model and what is decided by them, with a decay and a rejection."""
    first = network()

    def trained(communicator):
        model = copy.deepcopy(first)
        own = {"communicator": communicator, "reduction": reduction, "fisher": "exact"}
        optimizer = KFACOptimizer(
            model, likelihood="categorical", weight_decay=1e-3, lr=2.2, **own
        )
        seen = []
        for step in range(2 * STEPS):
            x, y = data(step)
            total, processes = len(y), 1
            if communicator is not None:
                processes = communicator.size
                rows = rows_of(step, communicator.rank)
                x, y = x[rows], y[rows]

            def closure(x=x, y=y, total=total, processes=processes):
                optimizer.zero_grad()
                loss = loss_of(model(x), y, reduction, total, processes)
                loss.backward()
                if communicator is not None:
                    averaged(model, communicator)
                return loss

            optimizer.step(closure)
            seen.append([*optimizer.metrics().values()])
        return [p.detach() for p in model.parameters()], seen

    alone = trained(None)
    assert {row[-1] for row in alone[1]} == {0.0, 1.0}  # accepted, and taken back
    found = run_ranks(3, trained)
    for rank in found:
        for one, other in zip(rank[0], alone[0], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)
        for one, other in zip(rank[1], alone[1], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)


def test_a_step_without_a_row_that_counts_on_a_rank():
    """All labels of a rank are ignored: its examples count, its rows do not."""

    def labels(step, y):
        y = y.clone()
        y[rows_of(step, 2)] = IGNORED
        y[0] = IGNORED
        return y

    first = network()

    assert_ranks_are_one(first, labels=labels)


def test_eigenbases_and_operators_on_every_rank():
    """`Distributed` says how blocks are divided; bases are made again within the steps."""
    first = network()
    options = {
        "approximations": {nn.Linear: kc.EKFAC()},
        "bases_every": 4,
    }

    def on_a_rank(communicator):
        execution = Distributed(
            communicator=communicator, holders="all", like=torch.zeros(1).double()
        )
        return trained(
            copy.deepcopy(first), communicator, execution=execution, **options
        )

    alone = trained(copy.deepcopy(first), None, **options)
    same(run_ranks(3, on_a_rank), alone)


def test_directions_in_bfloat16_are_the_same_on_all_ranks():
    """Rounded as they were sent, also on the rank that computed them."""
    first = network()

    def on_a_rank(communicator):
        execution = Distributed(
            communicator=communicator,
            holders=1,
            like=torch.zeros(1).double(),
            directions_dtype="bfloat16",
        )
        model = copy.deepcopy(first)
        found = trained(model, communicator, execution=execution)
        clipped = [p.grad / found[1][-1] for p in model.parameters()]
        return *found, clipped

    alone = trained(copy.deepcopy(first), None)
    found = run_ranks(3, on_a_rank)

    for parameters, _, directions in found:
        for one, other in zip(parameters, found[0][0], strict=True):
            assert torch.equal(one, other)
        for one, other in zip(parameters, alone[0], strict=True):
            error = torch.linalg.norm(one - other) / torch.linalg.norm(other)
            assert 1e-6 < error < 1e-2
        for x in directions:
            # But for the factor of the clip, one of 8 bits.
            rounded = x.bfloat16().double()
            torch.testing.assert_close(x, rounded, rtol=1e-12, atol=0.0)


def test_each_rank_draws_labels_of_its_own():
    """Two ranks with the same rows: were the draws the same, so would be the factors."""
    first, (x, _) = network(), data(0)

    def on_a_rank(communicator):
        model = copy.deepcopy(first)
        kfac = KFAC(model, lr=0.1, likelihood="categorical", communicator=communicator)
        fn.cross_entropy(model(x), torch.zeros(N, dtype=torch.int64)).backward()
        (seen,) = kfac.differentiated
        return {call.block: call.output_grads[0] for call in seen.calls}

    one, other = run_ranks(2, on_a_rank)

    for block in one:
        assert one[block].shape == other[block].shape
        assert not torch.allclose(one[block], other[block])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_a_step_without_a_row_that_counts_on_any_rank(fisher, reduction):
    """As the first, and later: statistics stay as they are, on one process and on three."""

    def labels(step, y):
        return torch.full_like(y, IGNORED) if step in (0, 3) else y

    options = {"fisher": fisher, "reduction": reduction}
    assert_ranks_are_one(network(), labels=labels, **options)


def test_no_batch_on_any_rank_is_an_error_on_all():
    """And one that is not finite on one rank; nothing has changed then."""
    first, (x, y) = network(), data(0)

    def on_a_rank(communicator):
        model = copy.deepcopy(first)
        kfac = KFAC(model, lr=0.1, likelihood="categorical", communicator=communicator)
        said = []
        for bad in (None, 1):
            model.zero_grad()
            if bad is not None:
                loss = fn.cross_entropy(model(x[:3]), y[:3], reduction="sum")
                (loss / 3).backward()
            if communicator.rank == bad:
                model[6].weight.grad[0, 0] = torch.inf
            with pytest.raises(kc.KFACError) as error:
                kfac.step()
            said.append((type(error.value), kfac.steps))
        return said

    expected = [(kc.NotReadyError, 0), (kc.NotFiniteError, 0)]
    assert run_ranks(2, on_a_rank) == [expected, expected]


def test_unsupported_settings_raise(monkeypatch):
    """Processes that came later, and two wishes."""
    model, (x, y) = network(), data(0)
    kfac = KFAC(model, lr=0.1)
    own = KFAC(copy.deepcopy(model), lr=0.1, communicator="alone")
    alone = kc.distributed.connect("alone")
    with pytest.raises(kc.ConventionError, match="`communicator`"):
        KFAC(model, communicator=alone, execution=Distributed(communicator=alone))
    with pytest.raises(kc.UnsupportedError, match="Several processes divide"):
        KFAC(model, communicator=alone, execution=lambda function, tasks: {})
    fn.cross_entropy(model(x), y).backward()
    fn.cross_entropy(own.model(x), y).backward()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(kc.UnsupportedError, match="2 ranks"):
        kfac.step()
    own.step()


def refused(function):
    """Return what a step was refused with."""
    with pytest.raises(kc.KFACError) as error:
        function()
    return type(error.value), str(error.value)


def differentiated(first, communicator, *, averages=True, **options):
    """Return a KFAC whose rank has differentiated its rows, and their inputs."""
    model, (x, y), rows = copy.deepcopy(first), data(0), rows_of(0, communicator.rank)
    settings = {"lr": 0.1, "likelihood": "categorical", "communicator": communicator}
    kfac, x = KFAC(model, **settings | options), x[rows].clone()
    loss_of(model(x), y[rows], "mean", N, 3).backward()
    if averages:
        averaged(model, communicator)
    return kfac, x


def test_gradients_that_are_not_averages_are_refused_on_all_ranks():
    """As without DistributedDataParallel, or within its no_sync: no parameter changes."""
    first = network()

    def on_a_rank(communicator, *, averages):
        kfac, _ = differentiated(first, communicator, averages=averages)
        if averages:
            kfac.step()
            return kfac.steps
        return *refused(kfac.step), kfac.steps

    for kind, text, steps in run_ranks(3, lambda c: on_a_rank(c, averages=False)):
        assert kind is kc.ConventionError
        assert text.startswith("The gradients are not the same on all processes")
        assert "no_sync" in text
        assert steps == 0
    assert run_ranks(3, lambda c: on_a_rank(c, averages=True)) == [1] * 3


def test_ranks_with_different_clip_or_damping_raise():
    """Each would go its own way; also of the optimizer that is one itself."""
    first = network()

    def on_a_rank(communicator, name):
        options = {"lr": 0.01, name: 0.01 * (1 + communicator.rank)}
        return refused(differentiated(first, communicator, **options)[0].step)

    for name, said in (
        ("kl_clip", "kl_clip=0.01 "),
        ("lr", "learning rate of 0.01"),
        ("damping", "damping 0.01"),
    ):
        for kind, text in run_ranks(3, lambda c, name=name: on_a_rank(c, name)):
            assert kind is kc.distributed.ReplicaError
            assert said in text

    def of_the_optimizer(communicator):
        model, (x, y) = copy.deepcopy(first), data(0)
        options = {"communicator": communicator, "lr": 0.5 + communicator.rank}
        optimizer = KFACOptimizer(model, likelihood="categorical", **options)
        return refused(lambda: optimizer.step(lambda: fn.cross_entropy(model(x), y)))

    for kind, text in run_ranks(2, of_the_optimizer):
        assert kind is kc.distributed.ReplicaError
        assert "learning rate of 0.5" in text


class Experts(nn.Module):
    """The second expert gets the last rows of a batch, from the third step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList([nn.Linear(5, 6), nn.Linear(5, 6)])
        self.last = nn.Linear(6, 9)
        self.double()

    def forward(self, x, second):
        found = [e(x[second == k]) for k, e in enumerate(self.experts)]
        order = torch.argsort((second != 0).int(), stable=True)
        return self.last(torch.tanh(torch.cat(found)[torch.argsort(order)]))


@pytest.mark.parametrize("kind", [kc.Kronecker, kc.EKFAC])
def test_a_layer_that_one_rank_uses_later(kind):
    """Between two refreshes it gets its first operator, and with EKFAC its bases, at once.

    The step after is that of one process with all rows.
    """
    rng = np.random.default_rng(3)
    x = torch.from_numpy(rng.normal(size=(STEPS, 32, 5)))
    y = torch.from_numpy(rng.integers(0, 9, size=(STEPS, 32)))
    first = Experts()

    def trained(communicator):
        model = copy.deepcopy(first)
        kfac = KFAC(
            model,
            lr=0.1,
            likelihood="categorical",
            fisher="exact",
            update_every=1,
            refresh_every=4,
            approximations={"dense": kind()},
            communicator=communicator,
        )
        for step in range(STEPS):
            second = torch.zeros(32, dtype=torch.int64)
            second[16:] = step > 1
            rows, size = slice(None), 1
            if communicator is not None:
                cuts = [0, 7, 16, 32]
                rank, size = communicator.rank, communicator.size
                rows = slice(cuts[rank], cuts[rank + 1])
            model.zero_grad()
            z = model(x[step, rows], second[rows])
            loss_of(z, y[step, rows], "mean", 32, size).backward()
            for p in model.parameters():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            if communicator is not None:
                averaged(model, communicator)
            if step < 2:
                # DistributedDataParallel finds what no process has used.
                model.experts[1].zero_grad()
            kfac.step()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0 if p.grad is None else RATE * p.grad
        return [p.detach() for p in model.parameters()], [kfac.metrics()["clip"]]

    same(run_ranks(3, trained), trained(None))


def test_rows_with_weights_count_as_much_on_every_rank():
    """Weights of classes, of which ranks have unlike parts: one row, one class, none."""

    def labels(step, y):
        return torch.where(torch.arange(N) < 5, 0, 2) if step == 3 else y

    weight = torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)
    options = {"labels": labels, "weight": weight, "likelihood": None}

    assert_ranks_are_one(network(), **options)


def test_statistics_without_steps_of_unequal_numbers_of_passes():
    """One rank gives several passes, one an empty pass, and one none; an error is all's."""
    first = network()

    def taken(communicator, passes):
        kfac = KFAC(
            copy.deepcopy(first),
            likelihood="categorical",
            fisher="exact",
            decay=1.0,
            communicator=communicator,
        )
        kfac.update(kfac.model(x) for x in passes)
        kfac.estimator.refresh()
        ones = {
            name: {
                k: torch.ones(s).double() for k, s in b.layer.parameter_shapes.items()
            }
            for name, b in kfac.estimator.blocks.items()
        }
        found = kfac.estimator.precondition(ones)
        return [x for own in found.values() for x in own.values()], []

    x, _ = data(0)
    own = [[x[:3], x[3:]], [x[:0]], []]
    same(run_ranks(3, lambda c: taken(c, own[c.rank])), taken(None, [x]))

    def bad(communicator):
        passes = [x, x[:2] / 0] if communicator.rank else [x[:0]]
        return refused(lambda: taken(communicator, passes))

    found = run_ranks(2, bad)
    assert [kind for kind, _ in found] == [kc.NotFiniteError] * 2
    assert found[0][1].startswith("Rank 1: ")
    nothing = run_ranks(2, lambda c: refused(lambda: taken(c, [x[:0]])))
    assert [kind for kind, _ in nothing] == [kc.NotReadyError] * 2


def test_a_rank_without_images():
    """Norms and slopes with one number a channel, of an empty batch."""
    torch.manual_seed(0)
    first = nn.Sequential(
        nn.GroupNorm(1, 2), nn.PReLU(2), nn.Flatten(), nn.Linear(12, 4)
    ).double()
    assert_ranks_are_one(first)


def test_an_input_that_one_rank_has_written_to_is_an_error_on_all():
    """No other waits for it, and nothing has changed."""
    first = network()

    def on_a_rank(communicator):
        kfac, x = differentiated(first, communicator)
        if communicator.rank == 2:
            x[0] = 0.0
        return *refused(kfac.step), kfac.steps

    found = run_ranks(3, on_a_rank)
    assert [(kind, steps) for kind, _, steps in found] == [(kc.UnsupportedError, 0)] * 3
    assert all("input of a call of layer '0'" in text for _, text, _ in found)
    assert found[0][1].startswith("Rank 2: ")
