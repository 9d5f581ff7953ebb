"""Two lines, defaults, options by name, and what went wrong in silence, each tested."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as fn  # noqa: E402

import kfac_core as kc  # noqa: E402
from kfac_core_shims.torch import KFAC, SOAP, GaussNewton, KFACOptimizer  # noqa: E402

from .test_torch import (  # noqa: E402
    OPTIONS,
    Network,
    attached,
    close,
    doubles,
    half_squares,
    kfac_by_hand,
    seeded,
    step,
)

__all__ = ["seeded"]  # used by itself, in every test

CATEGORICAL = {"likelihood": "categorical", "fisher": "exact"}


def two_lines(model, kfac, x, y, loss_of):
    """One step with no line but `step`."""
    model.zero_grad()
    loss_of(model(x), y).backward()
    kfac.step()
    return {n: p.grad.clone() for n, p in model.named_parameters()}


def same(found, expected, rtol=1e-8):
    for name in expected:
        close(found[name], expected[name], rtol)


# The interface.


@dataclass
class Answer:
    """What models of other libraries return."""

    loss: Any
    logits: Any


class Returning(Network):
    """The same outputs in another wrapping; the loss may be computed inside."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x, y=None):
        z = super().forward(x)
        if self.how == "answer":
            return Answer(fn.cross_entropy(z, y), z)
        if self.how == "dict":
            return {"logits": z, "hidden": x}
        if self.how == "pair":
            return x.mean(), z
        return z.T


@pytest.mark.parametrize(
    ("how", "output"), [("pair", 3), ("dict", 0), ("dict", "z"), ("tensor", 0)]
)
def test_outputs_that_are_not_there_are_named(how, output):
    """A place in a tensor is an example, and no outputs."""
    kfac = attached(model := Returning(how), **CATEGORICAL, output=output)
    found = {
        "pair": "tuple of 2",
        "dict": r"dict with the keys \['logits', 'hidden'\]",
        "tensor": "a Tensor",
    }[how]
    with pytest.raises(kc.ConventionError, match=f"`output`.*{found}.*{output!r} gave"):
        model(torch.randn(6, 4))
    assert kfac.steps == 0


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_a_segmentation_with_classes_on_the_second_axis(fisher):
    """Pixels are rows, those of ignored labels none; nobody needs to say the likelihood."""
    model = nn.Sequential(nn.Conv2d(2, 4, 2), nn.Tanh(), nn.Conv2d(4, 3, 1)).double()
    x, y = doubles(2, 2, 4, 4), torch.randint(3, (2, 3, 3))
    y[0, 1] = -100
    twin = copy.deepcopy(model)
    kfac = KFAC(model, **OPTIONS, fisher=fisher, output=lambda z: z.movedim(1, -1))
    fn.cross_entropy(model(x), y).backward()
    kfac.step()
    by_hand = attached(twin, likelihood="categorical", fisher=fisher, output=None)
    z = twin(x)
    rows = z.movedim(1, -1)[y >= 0]
    by_hand.observe(rows)
    fn.cross_entropy(rows, y[y >= 0]).backward()
    by_hand.step()

    found = {n: p.grad for n, p in model.named_parameters()}
    same(found, {n: p.grad for n, p in twin.named_parameters()})


def test_bad_options_raise_in_the_constructor():
    class Plain(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x)

    model = Network()
    for options, name in (
        ({"fisher": "emprical"}, "`fisher` to be one of"),
        ({"output": 1.5}, "`output`"),
        ({"output": b"logits"}, "`output`"),
        ({"output": ["logits"]}, "`output`"),
        ({"bases_every": -1}, "bases_every"),
        ({"likelihood": nn.L1Loss()}, "likelihood"),
        ({"likelihood": kc.losses.Categorical}, "likelihood"),
        ({"likelihood": nn.MSELoss(), "reduction": "sum"}, "reduction"),
        ({"likelihood": nn.MSELoss(reduction="none")}, "reduction"),
        ({"likelihood": nn.BCEWithLogitsLoss(torch.ones(3))}, "weight"),
        ({"grad_scaler": 5}, "grad_scaler"),
        ({"lr": "0.1"}, "`lr`"),
        ({"skip_layers": ["three"]}, "skip_layers.*three"),
        ({"approximations": {"convolution": kc.Diagonal()}}, "approximations"),
        ({"approximations": {"dense": "diagonal"}}, "approximations"),
        ({"approximations": 3}, "approximations"),
        ({"skip_layers": 3}, "skip_layers"),
        ({"overlap": "yes"}, "overlap"),
    ):
        with pytest.raises(kc.KFACError, match=name):
            KFAC(model, **options)
    with pytest.raises(TypeError, match="dampning"):
        KFAC(model, dampning=0.1)
    with pytest.raises(kc.ConventionError, match="`model` to be a torch"):
        KFAC(model.parameters())
    with pytest.raises(
        kc.UnsupportedError, match=r"Plain overrides .* LayerNorm; `register_layer"
    ):
        KFAC(nn.Sequential(Plain(3)))
    with pytest.raises(kc.UnsupportedError, match="no parameters"):
        KFAC(nn.Tanh())


def test_what_has_no_block_and_what_has_no_rows_is_said():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)
            self.gate = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return self.used(x) * self.gate

    model = Model()
    with pytest.warns(UserWarning, match="a parameter of Model itself"):
        kfac = KFAC(model, lr=0.1)
    fn.cross_entropy(model(torch.randn(8, 3)), torch.randint(3, (8,))).backward()
    kfac.step()

    assert [*kfac.skipped] == ["gate"]
    lines = {line.split()[0]: line for line in str(kfac).splitlines()}
    assert lines["unused"].endswith("no rows yet")
    assert not lines["used"].endswith("no rows yet")


def test_approximations_by_name_class_and_kind():
    """The name comes first, then the class; None and `skip_layers` leave a layer alone."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.LayerNorm(3))
    kfac = KFAC(
        model,
        approximations={
            "1": kc.EKFAC(),
            nn.Linear: kc.Kronecker(output="diagonal"),
            "scale_shift": None,
        },
        lr=0.1,
        update_every=1,
    )
    found = {n: b.approximation.name for n, b in kfac.estimator.blocks.items()}
    assert found == {"0": "kronecker", "1": "ekfac"}
    assert kfac.estimator.blocks["0"].approximation.output == "diagonal"
    assert [*kfac.skipped] == ["2.weight", "2.bias"]
    other = KFAC(model, skip_layers=["0", "LayerNorm"])
    assert [*other.estimator.blocks] == ["1"]
    x, y = torch.randn(8, 3), torch.randint(3, (8,))
    for _ in range(3):
        two_lines(model, kfac, x, y, fn.cross_entropy)
    assert kfac.estimator.state["1"].basis_age == 2
    text = repr(kfac)
    assert "EKFAC(" in text
    assert "2.weight: it was asked for" in text


# What went wrong in silence.


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_a_scaled_loss_makes_no_difference(fisher):
    """With the scaler given; without it, empirical rows of a scaled loss are refused."""
    model, x, y = Network(), torch.randn(12, 4), torch.randint(0, 3, (12,))
    twin = copy.deepcopy(model)
    options = {"likelihood": "categorical", "fisher": fisher}
    expected = two_lines(twin, attached(twin, **options), x, y, fn.cross_entropy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    kfac = attached(model, **options, grad_scaler=scaler)
    scaler.scale(fn.cross_entropy(model(x), y)).backward()
    with pytest.raises(kc.NotReadyError, match="unscale_"):
        kfac.step()
    optimizer.zero_grad()
    scaler.scale(fn.cross_entropy(model(x), y)).backward()
    scaler.unscale_(optimizer)
    kfac.step()
    found = {n: p.grad.clone() for n, p in model.named_parameters()}
    same(found, expected, rtol=2e-4)
    scaler.step(optimizer)
    scaler.update()

    optimizer.zero_grad()
    scaler.scale(fn.cross_entropy(model(x) * float("inf"), y)).backward()
    scaler.unscale_(optimizer)
    if fisher == "exact":
        kfac.step()  # Left out, as the optimizer's own step will be.
        assert kfac.steps == 1
    other = attached(twin, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    scaler.scale(fn.cross_entropy(twin(x), y)).backward()
    if fisher == "empirical":
        with pytest.raises(kc.ConventionError, match="grad_scaler"):
            other.step()
    else:
        other.step()  # As linear as the scaler's own division, which comes after it.


@pytest.mark.filterwarnings("ignore:K-FAC leaves")
def test_a_cast_that_autocast_keeps_hides_no_use():
    """A weight cast once and read twice: both uses count, or the block is left alone."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(3, 3, bias=False)
            self.conv = nn.Conv1d(1, 1, 2, bias=False)

        def forward(self, x):
            h = self.conv(fn.pad(x[:, None], (0, 1)))
            h = h + fn.conv1d(fn.pad(x[:, None], (0, 2)), self.conv.weight, dilation=2)
            return fn.linear(torch.tanh(self.one(h[:, 0])), self.one.weight)

    model, x, y = Twice(), torch.randn(40, 3), torch.randn(40, 3)
    blocks = []
    for low in (False, True):
        own = copy.deepcopy(model)
        kfac = attached(own)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
            loss = half_squares(own(x).float(), y)
        loss.backward()
        kfac.step()
        assert [*kfac.skipped] == ["conv.weight"]
        blocks.append(kfac.estimator.operator("one").to_dense(damped=False))

    difference = torch.linalg.norm(blocks[1] - blocks[0])
    assert difference < 0.05 * torch.linalg.norm(blocks[0])


def test_returned_logits_are_a_cast_of_those_that_the_loss_reads():
    """As accelerate casts what a model with a loss inside returns."""

    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(4, 3)

        def forward(self, x, y):
            z = self.out(x)
            return Answer(fn.cross_entropy(z, y), z.float())

    model, x, y = Cast().double(), doubles(10, 4), torch.randint(3, (10,))
    kfac = attached(model, **CATEGORICAL)
    answer = model(x, y)
    answer.loss.backward()
    gradient = torch.cat([p.grad.view(3, -1) for p in model.parameters()], 1)
    kfac.step()

    p = answer.logits.double().softmax(1)
    G = torch.diag(p.mean(0)) - p.T @ p / len(p)
    ones = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    found = torch.cat([p.grad.view(3, -1) for p in model.parameters()], 1)
    close(found, kfac_by_hand(ones.T @ ones / len(x), G, gradient), 1e-5)


@pytest.mark.parametrize("kind", ["bce", "mse", "mse sum", "gaussian"])
def test_losses_are_in_units_of_their_likelihood(kind):
    """``(F + damping)^-1 g / c``, whatever multiple c of it the loss is."""
    P, N = 3, 10
    model = nn.Linear(4, P).double()
    x = doubles(N, 4)
    y = torch.rand(N, P, dtype=torch.float64)
    loss = {
        "bce": nn.BCEWithLogitsLoss(),
        "mse": nn.MSELoss(),
        "mse sum": nn.MSELoss(reduction="sum"),
        "gaussian": half_squares,
    }[kind]
    likelihood = "gaussian" if kind == "gaussian" else loss
    kfac = attached(model, likelihood=likelihood, loss=None)
    p = torch.sigmoid(model(x)).detach()
    H = {"bce": torch.diag((p * (1 - p)).mean(0))}.get(
        kind, torch.eye(P, dtype=x.dtype)
    )
    c = {"bce": 1 / P, "mse": 2 / P, "mse sum": 2 * N, "gaussian": 1}[kind]
    ones = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    A = ones.T @ ones / N

    before, after = step(model, kfac, x, y, loss)

    V = torch.cat([before["weight"], before["bias"][:, None]], 1)
    V = V / c
    found = torch.cat([after["weight"], after["bias"][:, None]], 1)
    close(found, kfac_by_hand(A, H, V))


# Crashes and costs.


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("by_hand", [False, True])
def test_kept_losses_do_not_keep_rows(fisher, by_hand):
    """The calls in the graph of an undetached loss are emptied by the step."""
    model = Network()
    kfac = attached(model, likelihood="categorical", fisher=fisher)
    outputs = model(torch.randn(5, 4))
    if by_hand:
        kfac.observe(outputs)
    loss = fn.cross_entropy(outputs, torch.zeros(5, dtype=torch.int64))
    loss.backward()
    kfac.step()
    calls, todo = [], [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None:
            calls += [call for _, call in node.metadata.get(id(kfac), ())]
            todo += [below for below, _ in node.next_functions]

    assert len(calls) == 2
    assert all(call.inputs is None and call.output_grads == [] for call in calls)


def test_a_step_without_statistics_needs_no_observation():
    """And leaves nothing in the graph."""
    model, x, y = Network(), torch.randn(6, 4), torch.randint(0, 3, (6,))
    kfac = attached(model, **CATEGORICAL, update_every=2, output=None)
    with pytest.raises(kc.NotReadyError):
        two_lines(model, kfac, x, y, fn.cross_entropy)
    step(model, kfac, x, y, fn.cross_entropy)
    two_lines(model, kfac, x, y, fn.cross_entropy)
    with pytest.raises(kc.NotReadyError):
        two_lines(model, kfac, x, y, fn.cross_entropy)
    assert kfac.steps == 2


def test_divided_parameters_are_those_of_one_process(tmp_path):
    """DTensor, as FSDP2 and tensor parallelism make them; here of one rank."""
    distributed = torch.distributed
    if not distributed.is_available():
        pytest.skip("this PyTorch has no torch.distributed")
    from torch.distributed import tensor
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_module, init_device_mesh

    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        line, square = (init_device_mesh("cpu", shape) for shape in ((1,), (1, 1)))
        first, x = nn.Linear(4, 3), torch.randn(6, 4)
        found = []
        for mesh in (None, "fully_shard", line, square):
            model = copy.deepcopy(first)
            if mesh == "fully_shard":
                fully_shard(model)
            elif mesh is not None:
                distribute_module(model, mesh)
            kfac = KFAC(
                model,
                lr=0.1,
                likelihood="categorical",
                fisher="exact",
                output=lambda z: z.full_tensor() if hasattr(z, "full_tensor") else z,
            )
            is_parallel = mesh in (line, square)
            inputs = tensor.DTensor.from_local(x, mesh) if is_parallel else x
            z = model(inputs)
            z = z.full_tensor() if hasattr(z, "full_tensor") else z
            fn.cross_entropy(z, torch.arange(6) % 3).backward()
            kfac.step()
            g = model.weight.grad
            found.append(g.full_tensor() if hasattr(g, "full_tensor") else g)
        for other in found[1:]:
            torch.testing.assert_close(other, found[0])
        partial = nn.Linear(4, 3)
        partial.weight = nn.Parameter(
            tensor.DTensor.from_local(torch.ones(3, 4), line, [tensor.Partial()])
        )
        with pytest.raises(kc.UnsupportedError, match="expected Shard or Replicate"):
            KFAC(partial)
        with pytest.raises(kc.UnsupportedError, match="KFACOptimizer"):
            KFACOptimizer(fully_shard(nn.Linear(4, 3)))
    finally:
        distributed.destroy_process_group()


def test_the_factor_of_a_large_side_is_diagonal():
    """The logits of a large vocabulary; chosen approximations are as they were chosen."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 9000, bias=False))
    sides = KFAC(model).estimator.blocks
    assert sides["0"].approximation == kc.Kronecker()
    assert sides["1"].approximation == kc.Kronecker(output="diagonal")
    chosen = KFAC(
        model, approximations={"1": kc.ScaledIdentity(scale=1.0)}
    ).estimator.blocks
    assert chosen["1"].approximation == kc.ScaledIdentity(scale=1.0)


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.filterwarnings("ignore")
def test_two_lines_with_a_compiled_model(fisher):
    """The same directions, also of a model compiled and called before `KFAC`."""
    torch._dynamo.reset()
    model, x, y = Network().double(), doubles(9, 4), torch.randint(0, 3, (9,))
    plain = copy.deepcopy(model)
    options = {"likelihood": "categorical", "fisher": fisher}
    expected = two_lines(plain, attached(plain, **options), x, y, fn.cross_entropy)
    compiled = torch.compile(model, backend="eager")
    kfac = attached(compiled, **options)
    fn.cross_entropy(compiled(x), y).backward()
    kfac.step()
    same({n: p.grad for n, p in model.named_parameters()}, expected)

    late = copy.deepcopy(plain)
    late.zero_grad()
    called = torch.compile(late, backend="aot_eager")
    called(x)
    kfac = attached(called, **options)
    fn.cross_entropy(called(x), y).backward()
    kfac.step()
    same({n: p.grad for n, p in late.named_parameters()}, expected)


@pytest.mark.parametrize("make", [SOAP, KFAC])
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_function_of_a_whole_step_compiles_the_model_alone(make):
    """And not the linear algebra, whose hundreds of graphs took minutes."""
    torch._dynamo.reset()
    model, x, y = Network(), torch.randn(9, 4), torch.randint(0, 3, (9,))
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    kfac = make(model, lr=0.1)

    @torch.compile(backend=backend)
    def step():
        model.zero_grad()
        fn.cross_entropy(model(x), y).backward()
        kfac.step()

    step()
    # Hooks break the graph at layers.
    assert len(graphs) < 12


def test_a_tied_weight_that_is_read_elsewhere_keeps_its_gradient():
    """Two modules share it, and a product outside of them reads it too."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Embedding(7, 4), nn.Linear(4, 4)
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = self.one.weight

        def forward(self, ids):
            h = self.two(self.one(ids))
            return self.head(h) + h.sin() @ self.one.weight.mT

    model, ids = Tied(), torch.randint(7, (9,))
    kfac = KFAC(model, lr=0.1)
    fn.cross_entropy(model(ids), ids).backward()
    gradient = model.one.weight.grad.clone()
    with pytest.warns(UserWarning, match="weight is also read elsewhere") as warned:
        kfac.step()
    assert warned[0].filename == __file__
    assert torch.equal(model.one.weight.grad, gradient)


@pytest.mark.parametrize("make", [GaussNewton, KFAC, KFACOptimizer])
@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_copies_are_refused(make, copied):
    """They would belong to the model of the original."""
    options = {} if make is GaussNewton else {"likelihood": "categorical"}
    if make is KFAC:
        options["lr"] = 0.1
    with pytest.raises(kc.UnsupportedError, match=f"{make.__name__} belongs to its"):
        copied(make(Network(), **options))


def test_overlap_changes_no_bit():
    """Statistics are taken while the backward pass runs; a batch may be left out."""
    first = Network().double()
    batches = [(doubles(14, 4), torch.randint(0, 3, (14,))) for _ in range(5)]

    def run(overlap):
        model = copy.deepcopy(first)
        options = {"update_every": 1, "refresh_every": 2, "lr": 0.1}
        options["approximations"] = {"one": kc.EKFAC()}
        kfac = KFAC(model, likelihood="categorical", overlap=overlap, **options)
        found = []
        for i, (x, y) in enumerate(batches):
            if i == 2:
                before = kfac.estimator.state
                fn.cross_entropy(model(x), y).backward()
                taken = kfac.estimator.state is not before
                kfac.discard()
                assert taken == overlap
                assert kfac.estimator.state is before
            found.append(two_lines(model, kfac, x, y, fn.cross_entropy))
        return found

    plain, found = run(False), run(True)

    for one, other in zip(found, plain, strict=True):
        for name, x in one.items():
            assert torch.equal(x, other[name])
    with pytest.raises(kc.ConventionError, match="overlap"):
        KFAC(Network(), fisher="empirical", overlap=True)
