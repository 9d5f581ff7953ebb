"""What a step counts: a zoo of loops around one model, against one dense oracle.

Each program differentiates a loss of `network` on eight rows, and may do other things
before, between and after.  The step's factors are those of these rows by the definition,
in float64 and row by row, or the step ends with an error that has a name.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as fn  # noqa: E402

import kfac_core as kc  # noqa: E402
from kfac_core_shims.torch import KFAC  # noqa: E402

from ..builders.torch_rows import assert_factors, dense  # noqa: E402

EACH_STEP = {"kl_clip": None, "update_every": 1, "refresh_every": 1}
IGNORED = -100
SUM = {"reduction": "sum"}
CATEGORICAL = {"likelihood": "categorical"}
BY_HAND = {"likelihood": "categorical", "output": None}
HALVES = slice(0, 4), slice(4, 8)
PARTS = slice(0, 3), slice(3, 8)


pytestmark = pytest.mark.usefixtures("torch_float64")


class Network(nn.Sequential):
    """Two linear layers, with outputs in a structure."""

    def __init__(self, packed=lambda z: z):
        super().__init__(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))
        self.packed = packed

    def forward(self, x):
        return self.packed(super().forward(x))


class Checkpointed(Network):
    """The same with activations that are computed again in the backward pass."""

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(
            super().forward, x, use_reentrant=False
        )


# Programs.


@dataclass(frozen=True)
class Program:
    """A loop on a model, its KFAC, and rows; it may return weights of the rows.

    Of other than class labels there is no empirical oracle.
    """

    loop: Callable[..., Any]
    options: dict[str, Any] = field(default_factory=dict)
    model: Callable[[], Any] = Network
    fishers: tuple[str, ...] = ("exact", "empirical")


EXACT = ("exact",)


def train(model, x, y, factor=1.0, **options):
    (factor * fn.cross_entropy(model(x), y, **options)).backward()


def logged(loss, model):
    return torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)


def parts(model, kfac, x, y):
    for rows in PARTS:
        train(model, x[rows], y[rows], 1 / 8, reduction="sum")


def parts_by_hand(model, kfac, x, y):
    for rows in PARTS:
        z = model(x[rows])
        kfac.observe(z)
        (fn.cross_entropy(z, y[rows], reduction="sum") / 8).backward()


def flattened(model, kfac, x, y):
    z = model(x.reshape(4, 2, 5))
    kfac.observe(z.flatten(0, 1))
    fn.cross_entropy(z.flatten(0, 1), y).backward()


def of_the_rows_that_count(model, kfac, x, y):
    y = y.clone()
    y[2:5] = IGNORED
    z = model(x)
    kfac.observe(z[y >= 0])
    fn.cross_entropy(z, y).backward()
    return (y >= 0).double()


def ignored(model, kfac, x, y):
    y = y.clone()
    y[2:5] = IGNORED
    train(model, x, y)
    return (y >= 0).double()


def class_weights(model, kfac, x, y):
    by_class = torch.tensor([0.5, 2.0, 3.0, 1.0])
    train(model, x, y, weight=by_class)
    return by_class[y]


def row_weights(model, kfac, x, y):
    weight = torch.rand(8) + 0.1
    each = fn.cross_entropy(model(x), y, reduction="none")
    ((weight * each).sum() / weight.sum()).backward()
    return weight


def unequal_means(model, kfac, x, y):
    for rows, factor in zip(PARTS, (0.5, 0.1), strict=True):
        train(model, x[rows], y[rows], factor)
    return torch.tensor([0.5 / 3] * 3 + [0.1 / 5] * 5)


def factors_of_sums(model, kfac, x, y):
    for rows, factor in zip(PARTS, (0.5, 0.1), strict=True):
        train(model, x[rows], y[rows], factor, reduction="sum")
    return torch.tensor([0.5] * 3 + [0.1] * 5)


def parts_of_a_sum(model, kfac, x, y):
    for rows in PARTS:
        train(model, x[rows], y[rows], reduction="sum")


def summed_row_weights(model, kfac, x, y):
    weight = torch.rand(8) + 0.1
    (weight * fn.cross_entropy(model(x), y, reduction="none")).sum().backward()
    return weight


def single_rows(model, kfac, x, y):
    factors = torch.linspace(0.5, 1.5, 8)
    for n, factor in enumerate(factors):
        train(model, x[n : n + 1], y[n : n + 1], factor)
    return factors


def weights_by_hand(model, kfac, x, y):
    weight = torch.rand(8) + 0.1
    z = model(x)
    kfac.observe(z, weight=weight)
    each = fn.cross_entropy(z, y, reduction="none")
    ((weight * each).sum() / weight.sum()).backward()
    return weight


def loss_in_two_backward_passes(model, kfac, x, y):
    for rows in HALVES:
        loss = fn.cross_entropy(model(x[rows]), y[rows], reduction="sum") / 8
        (0.25 * loss).backward(retain_graph=True)
        (0.75 * loss).backward()


def scaled_in_place(model, kfac, x, y):
    loss = fn.cross_entropy(model(x)["logits"], y)
    loss *= 2
    loss /= 2
    loss.backward()


def validation(model, kfac, x, y):
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with context():
            fn.cross_entropy(model(3 * x), y)
    train(model, x, y)


def validation_by_hand(model, kfac, x, y):
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with context():
            kfac.observe(model(3 * x))
    z = model(x)
    kfac.observe(z)
    fn.cross_entropy(z, y).backward()


def attack(model, kfac, x, y):
    inputs = (x + 0.1).requires_grad_()
    for column in model(inputs).T:
        torch.autograd.grad(column.sum(), inputs, retain_graph=True)
    torch.autograd.grad(fn.cross_entropy(model(inputs), y), inputs)
    train(model, x, y)


def with_slope(model, x):
    """Return the outputs, and the derivative by the inputs with a graph of its own."""
    inputs = x.clone().requires_grad_()
    z = model(inputs)
    return z, torch.autograd.grad(z.sum(), inputs, create_graph=True)[0]


def slope_not_read(model, kfac, x, y):
    z, _ = with_slope(model, x)
    fn.cross_entropy(z, y).backward()


def penalty_by_hand(model, kfac, x, y):
    z, slope = with_slope(model, x)
    kfac.observe(z)
    (fn.cross_entropy(z, y) + slope.square().sum()).backward()


def logged_before(model, kfac, x, y):
    logged(fn.cross_entropy(model(3 * x), y), model)
    loss = fn.cross_entropy(model(x), y)
    logged(loss, model)
    logged(2 * loss, model)
    loss.backward()


def logged_after(model, kfac, x, y):
    loss = fn.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    logged(loss, model)


def logged_by_hand(model, kfac, x, y):
    z = model(x)
    kfac.observe(z)
    loss = fn.cross_entropy(z, y)
    logged(loss, model)
    loss.backward()


def logged_layer(model, kfac, x, y):
    loss = fn.cross_entropy(model(x), y)
    torch.autograd.grad(loss, model[2].weight, retain_graph=True)
    loss.backward()


def logged_outputs(model, kfac, x, y):
    z = model(x)
    logged(z[:, 1].sum(), model)
    logged(z[0].logsumexp(0) - z[0, 0], model)
    fn.cross_entropy(z, y).backward()


def product_with_the_hessian(model, kfac, x, y):
    z = model(x)
    parameters = [*model.parameters()]
    gs = torch.autograd.grad(fn.cross_entropy(z, y), parameters, create_graph=True)
    logged(sum((g * p).sum() for g, p in zip(gs, parameters, strict=True)), model)
    fn.cross_entropy(z, y).backward()


def assigned(model, kfac, x, y):
    z = model(x)
    kfac.observe(z)
    loss = fn.cross_entropy(z, y)
    pairs = zip(logged(0.25 * loss, model), logged(0.75 * loss, model), strict=True)
    for p, (first, second) in zip(model.parameters(), pairs, strict=True):
        p.grad = first + second


def left_out(model, kfac, x, y):
    for clears in (True, False):
        train(model, 3 * x, y)
        model.zero_grad(set_to_none=clears)
    for rows in HALVES:
        train(model, x[rows], y[rows], 0.5)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)


def left_out_in_its_own_graph(model, kfac, x, y):
    loss = fn.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()


def discarded(model, kfac, x, y):
    train(model, 3 * x, y)
    kfac.discard()
    model.zero_grad()
    train(model, x, y)


def discarded_by_hand(model, kfac, x, y):
    z = model(3 * x)
    kfac.observe(z)
    fn.cross_entropy(z, y).backward()
    kfac.discard()
    model.zero_grad()
    parts_by_hand(model, kfac, x, y)


def warmup_by_hand(model, kfac, x, y):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for scale in (3, 2):
        optimizer.zero_grad()
        z = model(scale * x)
        kfac.observe(z)
        fn.cross_entropy(z, y).backward()
        optimizer.step()
    optimizer.zero_grad()
    parts_by_hand(model, kfac, x, y)


def put_back(model, kfac, x, y):
    total = [torch.zeros_like(p) for p in model.parameters()]
    for rows in HALVES:
        model.zero_grad()
        z = model(x[rows])
        kfac.observe(z)
        (fn.cross_entropy(z, y[rows]) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        total = [t + p.grad for t, p in zip(total, model.parameters(), strict=True)]
    for p, t in zip(model.parameters(), total, strict=True):
        p.grad = t


def discriminator(model, kfac, x, y):
    made = torch.randn(5, 5, requires_grad=True)  # As a generator made it.
    train(model, 3 * made, y[:5])
    model.zero_grad()
    train(model, x, y)


def perturbed(model, kfac, x, y):
    train(model, x, y)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(p.grad)
    model.zero_grad()
    train(model, x, y)


def beside(model, kfac, x, y):
    z, aside = model(x), nn.functional.linear(x, torch.randn(1, 5))
    kfac.observe(z)
    (fn.cross_entropy(z, y) + model(2 * x).square().mean() + aside.mean()).backward()


def teacher_of_itself(model, kfac, x, y):
    fn.cross_entropy(model(x), torch.softmax(model(x).detach(), 1)).backward()


def smoothed(model, kfac, x, y):
    train(model, x, y, label_smoothing=0.2)


def mixed(model, kfac, x, y):
    z = model(x)
    (0.3 * fn.cross_entropy(z, y) + 0.7 * fn.cross_entropy(z, y.flip(0))).backward()


def with_temperature(model, kfac, x, y):
    fn.cross_entropy(model(x) / 2, y).backward()


PROGRAMS = {
    "plain": Program(lambda model, kfac, x, y: train(model, x, y)),
    "parts": Program(parts),
    "parts by hand": Program(parts_by_hand, CATEGORICAL),
    "parts, checkpointed": Program(parts, model=Checkpointed),
    "by hand, checkpointed": Program(parts_by_hand, BY_HAND, Checkpointed),
    "flattened tokens": Program(flattened, BY_HAND),
    "rows that count": Program(of_the_rows_that_count, BY_HAND),
    "ignored labels": Program(ignored),
    "class weights": Program(class_weights, fishers=EXACT),
    "row weights": Program(row_weights, fishers=EXACT),
    "weights by hand": Program(weights_by_hand, BY_HAND, fishers=EXACT),
    "unequal means": Program(unequal_means),
    "factors of sums": Program(factors_of_sums, SUM),
    "row weights, sum": Program(summed_row_weights, SUM, fishers=EXACT),
    "a sum": Program(lambda m, k, x, y: train(m, x, y, reduction="sum"), SUM),
    "parts of a sum": Program(parts_of_a_sum, SUM),
    "single rows": Program(single_rows),
    "two backward passes": Program(loss_in_two_backward_passes),
    "scaled in place": Program(
        scaled_in_place, model=lambda: Network(lambda z: {"logits": z, "more": 2 * z})
    ),
    "validation": Program(validation),
    "validation by hand": Program(validation_by_hand, CATEGORICAL),
    "attack": Program(attack),
    "slope not read": Program(slope_not_read),
    "penalty by hand": Program(penalty_by_hand, CATEGORICAL, fishers=EXACT),
    "logged before": Program(logged_before),
    "logged before, view": Program(logged_before, {"output": lambda z: z[:, :]}),
    "logged after": Program(logged_after),
    "logged by hand": Program(logged_by_hand, BY_HAND),
    "logged layer": Program(logged_layer),
    "logged outputs": Program(logged_outputs),
    "product with the Hessian": Program(product_with_the_hessian),
    "assigned": Program(assigned, BY_HAND, fishers=EXACT),
    "left out": Program(left_out),
    "left out, same graph": Program(left_out_in_its_own_graph),
    "discarded": Program(discarded),
    "discarded by hand": Program(discarded_by_hand, BY_HAND),
    "warmup by hand": Program(warmup_by_hand, BY_HAND),
    "put back": Program(put_back, BY_HAND),
    "discriminator": Program(discriminator),
    "perturbed": Program(perturbed),
    "beside": Program(beside, BY_HAND, fishers=EXACT),
    "teacher of itself": Program(teacher_of_itself, fishers=EXACT),
    "smoothed labels": Program(smoothed, fishers=EXACT),
    "mixed labels": Program(mixed, fishers=EXACT),
}
CASES = [(name, fisher) for name, p in PROGRAMS.items() for fisher in p.fishers]


@pytest.mark.parametrize(("name", "fisher"), CASES)
def test_a_program_has_the_factors_of_its_rows(name, fisher):
    program = PROGRAMS[name]
    model, x, y = program.model(), torch.randn(8, 5), torch.randint(0, 4, (8,))
    kfac = KFAC(model, fisher=fisher, **EACH_STEP, **program.options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weight = program.loop(model, kfac, x, y)
    labels = y if fisher == "empirical" else None
    expected = dense(model, x, weight, labels)
    kfac.step()

    assert kfac.steps == 1
    assert_factors(kfac, expected, rtol=1e-8)


def test_output_may_apply_a_temperature():
    model, x, y = Network(), torch.randn(8, 5), torch.randint(0, 4, (8,))
    options = {"likelihood": "categorical", "output": lambda z: z / 2}
    kfac = KFAC(model, fisher="exact", **EACH_STEP, **options)
    with_temperature(model, kfac, x, y)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin[2].parameters():
            p.div_(2)
    expected = dense(twin, x)
    kfac.step()
    _, G, scale = kfac.factors("0")
    torch.testing.assert_close(scale * G, expected["0"][1])


@dataclass
class Answer:
    """What models of other libraries return."""

    logits: Any
    hidden: Any = None


@dataclass(slots=True)
class Slots:
    """Outputs in a class without a dictionary."""

    outputs: Any


PICKED = {
    "attribute": (Answer, lambda found: found.logits, "auto"),
    "key": (lambda z: {"logits": z, "hidden": 2 * z}, lambda f: f["logits"], "auto"),
    "said key": (lambda z: {"a": z, "logits": 1}, lambda f: f["a"], "a"),
    "place": (lambda z: (z.mean(), z), lambda f: f[1], 1),
    "function": (lambda z: z.T, lambda f: f.T, lambda z: z.T),
    "dicts": (lambda z: {"a": {"b": z}}, lambda f: f["a"]["b"], ...),
    "tuples": (lambda z: ((None, z), 0), lambda f: f[0][1], ...),
    "lists": (lambda z: [Slots([z])], lambda f: f[0].outputs[0], ...),
    "slots": (Slots, lambda f: f.outputs, ...),
}


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("name", PICKED)
def test_output_selects_outputs_of_a_model(name, fisher):
    """By name, place or function, and found at any depth."""
    pack, unpack, output = PICKED[name]
    model, x, y = Network(pack), torch.randn(8, 5), torch.randint(0, 4, (8,))
    options = {"output": unpack if output is ... else output, **CATEGORICAL}
    kfac = KFAC(model, fisher=fisher, **EACH_STEP, **options)
    fn.cross_entropy(unpack(model(x)), y).backward()
    kfac.step()
    assert_factors(kfac, dense(model, x, labels=y if fisher == "empirical" else None))


NOTHING = {
    "ignored labels": lambda model, x: fn.cross_entropy(
        model(x), torch.full((8,), IGNORED), reduction="sum"
    ),
    "no active example": lambda model, x: fn.relu(model(x) - 1e3).sum(),
    "no rows": lambda model, x: model(x[:0]).sum(),
}


@pytest.mark.parametrize("options", [{}, SUM, {"overlap": True}], ids=str)
@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("name", NOTHING)
def test_a_batch_in_which_no_row_counts_leaves_the_factors(name, fisher, options):
    """Its step is that of its gradient, here of a penalty; also as the first batch."""
    if fisher == "empirical" and "overlap" in options:
        pytest.skip("an empirical pass ends after the step has begun")
    model, x, y = Network(), torch.randn(8, 5), torch.randint(0, 4, (8,))
    settings = {"damping": 0.1, "damping_rule": "exact", **CATEGORICAL, **EACH_STEP}
    kfac = KFAC(model, fisher=fisher, **settings | options | {"update_every": 4})
    reduction = options.get("reduction", "mean")

    def step_of(loss):
        model.zero_grad()
        loss.backward()
        # As added to `.grad` itself, also where the loss has begun the step.
        (0.5 * sum(p.square().sum() for p in model.parameters())).backward()
        kfac.step()
        layers = model[0], model[2]
        return [torch.cat([m.weight.grad, m.bias.grad[:, None]], 1) for m in layers]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = step_of(NOTHING[name](model, x))
    values = [torch.cat([m.weight, m.bias[:, None]], 1) for m in (model[0], model[2])]
    torch.testing.assert_close(plain, values)
    kfac.load_state_dict(kfac.state_dict())
    step_of(fn.cross_entropy(model(x), y, reduction=reduction))
    expected = dense(model, x, labels=y if fisher == "empirical" else None)
    assert_factors(kfac, expected)
    for _ in range(3):
        directions = step_of(NOTHING[name](model, x))
    assert_factors(kfac, expected)
    for (A, G), V, P in zip(expected.values(), values, directions, strict=True):
        F = torch.kron(G, A) + 0.1 * torch.eye(V.numel())
        solved = torch.linalg.solve(F, V.reshape(-1)).view_as(V)
        torch.testing.assert_close(P, solved.detach(), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_a_part_in_which_no_row_counts_is_none(fisher):
    """Among the parts of a step, and of an update without one."""
    model, x, y = Network(), torch.randn(8, 5), torch.randint(0, 4, (8,))
    expected = dense(model, x, labels=y if fisher == "empirical" else None)

    def parts():
        for loss in (*NOTHING.values(), None, NOTHING["no active example"]):
            if loss is None:
                train(model, x, y)
            else:
                loss(model, x).backward()
            yield

    for updates in (False, True):
        kfac = KFAC(model, fisher=fisher, **CATEGORICAL, **EACH_STEP)
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if updates and fisher == "empirical":
                kfac.update(parts())
            else:
                [*parts()]
                kfac.update() if updates else kfac.step()
        assert_factors(kfac, expected)
        kfac.remove()


# Programs that end with an error.


def penalty(model, kfac, x, y):
    z, slope = with_slope(model, x)
    (fn.cross_entropy(z, y) + slope.square().sum()).backward()
    kfac.step()


def penalty_elsewhere(model, kfac, x, y):
    fn.cross_entropy(model(x), y).backward()
    with_slope(model, 2 * x)[1].square().sum().backward()
    kfac.step()


def penalty_on_gradients(model, kfac, x, y):
    loss = fn.cross_entropy(model(x), y)
    gradients = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
    (loss + sum(g.square().sum() for g in gradients)).backward()
    kfac.step()


def of_each_row(model, kfac, x, y):
    fn.cross_entropy(torch.vmap(model)(x), y).backward()
    kfac.step()


def graph_of_gradients(model, kfac, x, y):
    gs = torch.autograd.grad(
        fn.cross_entropy(model(x), y), [*model.parameters()], create_graph=True
    )
    for p, g in zip(model.parameters(), gs, strict=True):
        p.grad = g.detach()
    kfac.step()


def after_zero_grad(model, kfac, x, y):
    train(model, x, y)
    model.zero_grad()
    kfac.step()


def without_backward(model, kfac, x, y):
    model(x)
    kfac.step()


def parts_of_the_model(model, kfac, x, y):
    fn.cross_entropy(model[2](model[1](model[0](x))), y).backward()
    kfac.step()


def parts_that_read_other_rows(model, kfac, x, y):
    z = model(x)
    for rows in HALVES:
        loss = fn.cross_entropy(z[rows], y[rows], reduction="sum") / 8
        loss.backward(retain_graph=True)
    kfac.step()


def squares(model, kfac, x, y):
    model(x).square().mean().backward()


def second_axis(model, kfac, x, y):
    fn.cross_entropy(model(x).T, y[:4]).backward()


def assigned_unseen(model, kfac, x, y):
    for p, g in zip(
        model.parameters(), logged(model(x).square().sum(), model), strict=True
    ):
        p.grad = g
    kfac.step()


def summed(model, kfac, x, y):
    train(model, x, y, reduction="sum")
    kfac.step()


def averaged(model, kfac, x, y):
    train(model, x, y)
    kfac.step()


def scaled(model, kfac, x, y):
    train(model, x, y, 2.0**16)
    kfac.step()


def stepped_twice(model, kfac, x, y):
    train(model, x, y)
    kfac.step()
    kfac.step()


def written_to(model, kfac, x, y):
    for rows in HALVES:
        x[:4] = x[rows]
        train(model, x[:4], y[rows], 0.5)
    kfac.step()


def modified_outputs(model, kfac, x, y):
    z = model(x)
    z += 1.0
    fn.cross_entropy(z, y).backward()
    kfac.step()


def modified_after_the_loss(model, kfac, x, y):
    z = model(x)
    loss = fn.cross_entropy(z, y)
    z += 1.0
    loss.backward()


def observed_twice(model, kfac, x, y):
    z = model(x)
    kfac.observe(z)
    kfac.observe(z[:, :2])


def observed_too_late(model, kfac, x, y):
    z = model(x)
    fn.cross_entropy(z, y).backward()
    kfac.observe(z)
    kfac.step()


DERIVATIVES = r"\['0', '2'\].*observe\(residuals\).*observe\(outputs\)"
NOT_READY, CONVENTION = kc.NotReadyError, kc.ConventionError
UNSUPPORTED = kc.UnsupportedError
LATE = {**BY_HAND, "fisher": "empirical"}
REFUSED = {
    "penalty": (penalty, {}, UNSUPPORTED, DERIVATIVES),
    "penalty elsewhere": (penalty_elsewhere, {}, UNSUPPORTED, DERIVATIVES),
    "penalty on gradients": (penalty_on_gradients, {}, UNSUPPORTED, DERIVATIVES),
    "vmap": (of_each_row, {}, NOT_READY, "torch.vmap called it"),
    "graph of gradients": (graph_of_gradients, {}, NOT_READY, "create_graph=True"),
    "after zero_grad": (after_zero_grad, {}, NOT_READY, "before zero_grad"),
    "no backward": (without_backward, {}, NOT_READY, r"^Call kfac.step\(\) after"),
    "no pass": (lambda m, k, x, y: k.step(), {}, NOT_READY, r"^Call kfac.step\(\) af"),
    "parts of the model": (parts_of_the_model, {}, NOT_READY, "not called itself"),
    "not observed": (averaged, BY_HAND, NOT_READY, "output=None"),
    "other rows": (parts_that_read_other_rows, {}, UNSUPPORTED, "first did not"),
    "squares": (squares, {}, CONVENTION, "likelihood=nn.MSELoss"),
    "classes on the second axis": (second_axis, {}, CONVENTION, "movedim"),
    "assigned, not observed": (assigned_unseen, {}, NOT_READY, "given to observe"),
    "assigned, empirical": (
        lambda m, k, x, y: (assigned(m, k, x, y), k.step()),
        LATE,
        NOT_READY,
        "no output gradient",
    ),
    "a sum": (summed, {}, CONVENTION, "reduction='sum'"),
    "a mean": (averaged, {"reduction": "sum"}, CONVENTION, "reduction='mean'"),
    "a mean, not the module's": (
        averaged,
        {"likelihood": nn.CrossEntropyLoss(reduction="sum")},
        CONVENTION,
        "reduction='mean'",
    ),
    "scaled": (scaled, {"kl_clip": 1e-3, "lr": 0.1}, CONVENTION, "`grad_scaler`"),
    "scaled, empirical": (scaled, LATE | {"output": "auto"}, CONVENTION, "`grad_sc"),
    "weights, empirical": (
        row_weights,
        {"fisher": "empirical"},
        UNSUPPORTED,
        "square them",
    ),
    "two steps": (stepped_twice, {}, NOT_READY, "what the last step wrote"),
    "written to": (written_to, {}, UNSUPPORTED, "written to"),
    "outputs modified": (modified_outputs, {}, NOT_READY, "in place"),
    "outputs modified later": (modified_after_the_loss, {}, UNSUPPORTED, "in place"),
    "observed twice": (observed_twice, BY_HAND, UNSUPPORTED, "one tensor"),
    "observed too late": (observed_too_late, LATE, NOT_READY, "before each backward"),
    "observed, not said": (
        lambda m, k, x, y: k.observe(m(x)),
        {},
        CONVENTION,
        "Say which `likelihood`",
    ),
    "no weights": (
        validation_by_hand,
        {"likelihood": nn.CrossEntropyLoss(weight=torch.ones(4))},
        CONVENTION,
        r"weight=loss.weight\[labels\]",
    ),
    "weights by hand, empirical": (weights_by_hand, LATE, UNSUPPORTED, "squared"),
    "weights of another shape": (
        lambda m, k, x, y: k.observe(m(x), weight=torch.ones(3)),
        BY_HAND,
        kc.ShapeError,
        "weight",
    ),
    "no clip's rate": (averaged, {"kl_clip": 1e-3}, CONVENTION, "lr=optimizer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_program_ends_with_an_error_that_has_a_name(name):
    """Nothing was changed then, and the next good batch goes on as if it was not."""
    loop, options, error, message = REFUSED[name]
    model, x, y = Network(), torch.randn(8, 5), torch.randint(0, 4, (8,))
    kfac = KFAC(model, **{"fisher": "exact"} | EACH_STEP | options)
    with pytest.raises(error, match=message):
        loop(model, kfac, x, y)
    assert kfac.steps == (name == "two steps")


def test_an_explicit_mean_accepts_a_summed_loss():
    model, x, y = Network(), torch.randn(8, 5), torch.randint(0, 4, (8,))
    kfac = KFAC(model, fisher="exact", reduction="mean", **EACH_STEP)
    summed(model, kfac, x, y)
    assert kfac.steps == 1
