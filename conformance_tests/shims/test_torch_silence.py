"""What a PyTorch program may do that K-FAC was not made for.

Never wrong in silence: a right number, an error, or a warning with a name.
"""

from __future__ import annotations

import copy
import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as fn  # noqa: E402

import kfac_core as kc  # noqa: E402
from kfac_core_shims.torch import KFAC  # noqa: E402

from ..builders.torch_rows import by_hand  # noqa: E402
from .test_torch import (  # noqa: E402
    DAMPING,
    Network,
    attached,
    close,
    doubles,
    half_squares,
    joined,
    kfac_by_hand,
    seeded,
    step,
)

__all__ = ["seeded"]  # used by itself, in every test


def test_a_parameter_frozen_or_freed_later_is_named():
    """Neither block can be preconditioned as it was made."""
    x, y = torch.randn(6, 4), torch.randn(6, 3)
    freed = Network()
    freed.one.requires_grad_(False)
    kfac = attached(freed, refresh_every=2)
    step(freed, kfac, x, y, half_squares)
    freed.one.requires_grad_(True)
    step(freed, kfac, x, y, half_squares)
    with pytest.warns(UserWarning, match=r"one\.weight.*one\.bias"):
        step(freed, kfac, x, y, half_squares)
    frozen = Network()
    other = attached(frozen)
    frozen.one.bias.requires_grad_(False)
    with pytest.warns(UserWarning, match=r"one\.weight"):
        step(frozen, other, x, y, half_squares)

    assert [*kfac.skipped] == ["one.weight", "one.bias"]
    assert [*other.skipped] == ["one.weight"]


def test_unobserved_forward_passes_are_freed():
    """In train mode and with gradients, as in a validation without ``no_grad``."""
    model = Network()
    kfac = attached(model)
    hidden = model.one(torch.randn(5, 4))
    calls = [weakref.ref(call) for _, call in hidden.grad_fn.metadata[id(kfac)]]
    gc.disable()
    try:
        del hidden
        assert len(calls) == 1
        assert [call() for call in calls] == [None]
    finally:
        gc.enable()


def test_a_missing_gradient_scaler_raises():
    """The KL clip would take scaled gradients for long steps, and training stand still."""
    x, y = torch.randn(64, 4), torch.randint(0, 3, (64,))

    def trained(*, passed, **options):
        torch.manual_seed(0)
        model = Network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=passed is not None)
        options |= {"grad_scaler": scaler} if passed else {}
        kfac = KFAC(model, lr=optimizer, **options)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = fn.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            if passed:
                scaler.unscale_(optimizer)
            kfac.step()
            scaler.step(optimizer)
            scaler.update()
        return model.one.weight.detach()

    close(trained(passed=True), trained(passed=None), rtol=2e-2)
    with pytest.raises(kc.ConventionError, match="`grad_scaler`"):
        trained(passed=False)
    with pytest.warns(UserWarning, match="`grad_scaler`"):
        trained(passed=False, reduction="mean")


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_samples_of_one_kfac_are_ignored_by_another(fisher):
    """A second `KFAC` of a model, as for a posterior beside training, makes no rows."""
    model = Network()
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))

    def stepped(*, with_another):
        own = copy.deepcopy(model)
        kfac = KFAC(own, damping=DAMPING, kl_clip=None, fisher=fisher, update_every=1)
        other = KFAC(own, likelihood="categorical") if with_another else None
        for _ in range(2):
            if other is not None:
                other.update(own(3 * x[:5]))
            own.zero_grad()
            fn.cross_entropy(own(x), y).backward()
            kfac.step()
        return own.one.weight.grad

    close(stepped(with_another=True), stepped(with_another=False), rtol=1e-6)


def test_copies_of_a_model_and_removed_hooks_record_nothing(tmp_path):
    """A copy, a pickle, a model whose K-FAC is gone, and one that was given back."""
    model, x = Network(), torch.randn(5, 4)
    kfac = attached(model)
    torch.save(model, tmp_path / "model.pt")
    copies = [
        copy.deepcopy(model),
        torch.load(tmp_path / "model.pt", weights_only=False),
        torch.optim.swa_utils.AveragedModel(model),
    ]
    for other in copies:
        assert torch.equal(other(x), model(x))
        assert calls_of(other(x)) == 0
    assert calls_of(model(x)) == 2
    held = weakref.ref(kfac)
    other = attached(model)
    assert calls_of(model(x)) == 4
    other.remove()
    assert calls_of(model(x)) == 2
    del kfac
    gc.collect()
    assert held() is None
    assert calls_of(model(x)) == 0


def calls_of(outputs):
    """How many calls are remembered in a graph."""
    found, todo = 0, [outputs.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None:
            found += sum(map(len, node.metadata.values()))
            todo += [below for below, _ in node.next_functions]
    return found


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_weights_made_of_others_and_unlike_ties_are_named():
    """Old weight norm has no weight of its own; two strides make two layers of one."""
    normed = nn.utils.weight_norm(nn.Linear(3, 3))
    first, second = nn.Conv1d(1, 1, 2, bias=False), nn.Conv1d(1, 1, 2, bias=False)
    second.weight, second.dilation = first.weight, (2,)
    with pytest.warns(
        UserWarning, match=r"0\.bias.*0\.weight_g.*1\.weight.*computed from"
    ):
        kfac = attached(nn.Sequential(normed, first, second, nn.Linear(3, 3)))

    assert list(kfac.estimator.blocks) == ["3"]


# The order of steps, factors of a loss, and weights that only the loss has.


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_step_of_the_optimizer_before_that_of_kfac_is_refused(steps, fused):
    """Training would be that of plain gradients; also in steps without statistics."""
    model, x, y = Network(), torch.randn(12, 4), torch.randint(0, 3, (12,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    kfac = KFAC(model, lr=optimizer)
    for turn in range(steps):
        optimizer.zero_grad()
        fn.cross_entropy(model(x), y).backward()
        if turn + 1 < steps:
            kfac.step()
            optimizer.step()
    optimizer.step()
    with pytest.raises(kc.NotReadyError, match=r"changed since loss.backward\(\)"):
        kfac.step()
    assert kfac.steps == steps - 1
    optimizer.zero_grad()
    fn.cross_entropy(model(x), y).backward()
    kfac.step()
    assert kfac.steps == steps


@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop", "Adagrad", "NAdam"])
def test_the_rate_of_an_optimizer_that_divides_directions_is_refused(name):
    model = Network()
    optimizer = getattr(torch.optim, name)(model.parameters())
    with pytest.raises(kc.ConventionError, match=f"{name} divides.*SGD"):
        KFAC(model, lr=optimizer)


PARTS = {
    "half": (lambda z, y: 0.5 * fn.cross_entropy(z, y), 0.5),
    "twice": (lambda z, y: 2 * fn.cross_entropy(z, y), 2.0),
    "two means": (
        lambda z, y: fn.cross_entropy(z[:7], y[:7]) + fn.cross_entropy(z[7:], y[7:]),
        2.0,
    ),
    "undivided": (None, 2.0),
}


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", PARTS)
def test_a_factor_of_the_loss_is_one_of_the_gradient(kind, reduction, fisher):
    """And not of the curvature, whatever makes it: that is the likelihood's."""
    loss_of, factor = PARTS[kind]
    model, x, y = Network().double(), doubles(14, 4), torch.randint(0, 3, (14,))
    rows = 14 if reduction == "sum" else 1
    with torch.no_grad():
        h = torch.tanh(model.one(x))
        p = torch.softmax(model.two(h), -1)
        g = p - fn.one_hot(y, 3)
        G = (torch.diag(p.sum(0)) - p.T @ p) / 14
        G = g.T @ g / 14 if fisher == "empirical" else G
        ones = torch.cat([h, torch.ones(14, 1).double()], 1)
    kfac = attached(model, likelihood="categorical", loss=reduction, fisher=fisher)
    if loss_of is None:
        for part in (slice(0, 7), slice(7, 14)):
            (rows / 1 * fn.cross_entropy(model(x[part]), y[part])).backward()
    else:
        (rows * loss_of(model(x), y)).backward()
    gradient = joined({n: q.grad for n, q in model.named_parameters()}, "two") / rows
    close(gradient, factor * g.T @ ones / 14)
    kfac.step()

    found = joined({n: q.grad for n, q in model.named_parameters()}, "two")
    close(found, kfac_by_hand(ones.T @ ones / 14, G, gradient))


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("fisher", ["exact", "gradients"])
def test_class_weights_of_the_loss_module_are_those_of_the_rows(classes, fisher):
    """In a plain loop, with a module or the function; another loss is refused."""
    model = nn.Linear(4, classes).double()
    x, y = doubles(14, 4), torch.randint(0, classes, (14,))
    y[3] = -100
    weight = torch.tensor([0.5, 2.0, 3.0][:classes]).double()
    module = nn.CrossEntropyLoss(weight=weight)
    twin = copy.deepcopy(model)
    kfac = attached(model, likelihood=module, loss=None, fisher=fisher)
    fn.cross_entropy(model(x), y, weight=weight).backward()
    kfac.step()
    other = attached(twin, likelihood="categorical", fisher=fisher)
    z = twin(x)
    other.observe(z, weight=torch.where(y < 0, 0.0, weight[y.clamp(min=0)]))
    module(z, y).backward()
    other.step()
    close(model.weight.grad, twin.weight.grad)

    kfac.remove()
    soft = torch.softmax(doubles(14, classes), -1)
    for loss in (fn.cross_entropy, lambda z, y: module(z, soft)):
        wrong = attached(model, likelihood=module, loss=None)
        with pytest.raises(kc.ConventionError, match="weight=labels @ weight"):
            loss(model(x), y.clamp(min=0)).backward()
        wrong.remove()


def test_the_loss_of_clip_has_rows_of_both_directions():
    """Similarities and their transpose are 2N rows of outputs."""
    image, text = nn.Linear(5, 4).double(), nn.Linear(3, 4).double()
    model = nn.ModuleDict({"image": image, "text": text})
    a, b, pairs = doubles(6, 5), doubles(6, 3), torch.arange(6)

    def similarities():
        y = model["image"](a)
        return y, y @ model["text"](b).T

    def loss_of(z):
        return 0.5 * fn.cross_entropy(z, pairs) + 0.5 * fn.cross_entropy(z.T, pairs)

    y, z = similarities()
    (g,) = torch.autograd.grad(loss_of(z), y)
    empirical = 12 * g.T @ g
    y, z = similarities()
    _, exact = by_hand([(a, y)], torch.cat([z, z.T]))

    options = {"likelihood": "categorical", "output": None, "decay": 1.0}
    kfac = attached(model, fisher="empirical", **options)
    _, z = similarities()
    kfac.observe(torch.cat([z, z.T]))
    loss_of(z).backward()
    kfac.step()
    _, G, scale = kfac.factors("image")
    close(scale * G, empirical)
    kfac.remove()
    kfac = attached(model, fisher="exact", **options)
    for _ in range(300):
        _, z = similarities()
        kfac.observe(torch.cat([z, z.T]))
        kfac.update()
    _, G, scale = kfac.factors("image")
    # Rows of one example have random signs in common.
    assert float((scale * G - exact).norm()) < 0.1 * float(exact.norm())


def test_passes_of_a_warmup_without_steps_are_forgotten():
    """`KFAC` is there, and only the optimizer takes steps."""
    model, x, y = Network(), torch.randn(12, 4), torch.randint(0, 3, (12,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model, lr=optimizer)
    calls = []
    for _ in range(5):
        optimizer.zero_grad()
        fn.cross_entropy(model(x), y).backward()
        optimizer.step()
        calls += [weakref.ref(call) for o in kfac.differentiated for call in o.calls]
        assert len(kfac.differentiated) == 1
    assert sum(call() is not None for call in calls) == 2
