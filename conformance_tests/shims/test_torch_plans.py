"""Steps of `GaussNewton` on graphs that change, each against SPRING by dense matrices."""

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import kfac_core as kc  # noqa: E402
from kfac_core_shims.torch import GaussNewton  # noqa: E402

from ..builders import torch_zoo  # noqa: E402
from ..builders.tolerances import assert_close  # noqa: E402
from ..builders.torch_residuals import laplacian  # noqa: E402

DAMPING, MOMENTUM, RATE, STEPS = 0.02, 0.6, 0.3, 7


class Net(nn.Module):
    """Three layers whose use a step decides about."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.c = nn.Linear(3, 2)
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(3, affine=False)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)) * self.scale)))


def plain(net, x, step):
    return net(x)[:, 0]


def two_outputs(net, x, step):
    return net(x)


def layers_in_another_order(net, x, step):
    first, second = (net.a, net.b) if step % 2 else (net.b, net.a)
    return net.c(torch.tanh(second(torch.tanh(first(x)))))[:, 1]


def derivative_in_turns(net, x, step):
    return laplacian(net, x) if step % 2 else net(x)[:, 0]


def skipped_layer(net, x, step):
    """In one step, as data may say: its bias and weight then have no derivative."""
    h = torch.tanh(net.a(x))
    return net.c(h if step == 4 else torch.tanh(net.b(h)))[:, 0]


def used_twice(net, x, step):
    h = torch.tanh(net.b(torch.tanh(net.a(x))))
    return net.c(torch.tanh(net.b(h)) if step == 4 else torch.tanh(torch.tanh(h)))[:, 0]


def decayed(net, x, step):
    return net(x)[:, 0] + (net.b.weight.square().sum() if step == 4 else 0.0)


def scaled(net, x, step):
    return (1.0 + step) * net(x)[:, 0] - step


def scaled_product(net, x, step):
    """A product with factors, which are attributes of one and the same node."""
    h, factor = torch.tanh(net.a(x)), 1 if step < 4 else 3
    y = torch.addmm(net.c.bias, torch.tanh(net.b(h)), net.c.weight.T, alpha=factor)
    return y[:, 0]


def scaled_bias(net, x, step):
    h, factor = torch.tanh(net.b(torch.tanh(net.a(x)))), 1 if step < 4 else 3
    return torch.addmm(net.c.bias, h, net.c.weight.T, beta=factor)[:, 0]


def another_axis(net, x, step):
    """A saved axis: over examples from some step on."""
    return net(x).softmax(dim=1 if step < 4 else 0)


def another_sum(net, x, step):
    y = net(x)
    return y.sum(1) if step < 4 else y.sum(0)


def another_output(net, x, step):
    return net(x)[:, 0 if step < 4 else 1]


def rolled(net, x, step):
    y = net(x)
    return y[:, 0] - y.roll(0 if step < 4 else 1, 0)[:, 1]


def mixing(step):
    """Whether a program mixes examples; not at the first step, nor at those of 2^k."""
    return step in (2, 4, 5)


def permuted_by_data(net, x, step):
    order = torch.arange(6)
    return net(x)[order.roll(1) if mixing(step) else order][:, 0]


def matrix_of_data(net, x, step):
    return ((2.0 if mixing(step) else 0.0) * torch.ones(6, 6).double() @ net(x))[:, 0]


def sum_with_weights_of_data(net, x, step):
    A = torch.eye(6).double() + (0.3 if mixing(step) else 0.0)
    return (A[..., None] * net(x)).sum(1)


def sum_of_a_square(net, x, step):
    """As many columns as examples, so that lengths of axes do not tell them apart."""
    A = torch.eye(6).double() + (0.3 if mixing(step) else 0.0)
    return (A * net(x)[:, :1].expand(6, 6).transpose(0, 1)).sum(1)


def rolled_by_weights_of_data(net, x, step):
    y = net(x)
    return (y + (1.0 if mixing(step) else 0.0) * y.roll(1, 0))[:, 0]


def softmax_by_weights_of_data(net, x, step):
    y = net(x)
    return y + (1.0 if mixing(step) else 0.0) * y.softmax(0)


def derivative_of_mixed_outputs(net, x, step):
    order = torch.arange(6)
    y = net(x)[order.roll(1) if mixing(step) else order]
    (slope,) = torch.autograd.grad(y[:, 0].sum(), x, create_graph=True)
    return slope[:, 0] + y[:, 1]


def dropout(net, x, step):
    net.train(step % 3 != 2)
    return net.c(net.drop(torch.tanh(net.b(torch.tanh(net.a(x))))))[:, 0]


def batch_norm(net, x, step):
    """Examples are mixed in training alone; statistics change as they are read."""
    net.train(step >= 4)
    net.norm.momentum = 0.0
    return net.c(net.norm(torch.tanh(net.b(net.a(x)))))[:, 0]


def buffer(net, x, step):
    net.scale = net.scale * (1.0 + 0.1 * step)
    return net(x)[:, 0]


def batches(net, x, step):
    return net(x[: 4 + step % 3])[:, 0]


def transposed_batch(net, x, step):
    """Features in the place of examples, from some step on."""
    x = x[:3] if step < 4 else x[:3].T
    return net(x)[:, 0]


def several_positions(net, x, step):
    y = net(torch.stack([x, 2 * x], 1)) if step % 2 else net(x)[:, None]
    return y.mean(1)


def terms(net, x, step):
    r = net(x)
    return [r[:, 0], 2 * net(x[:4])[:, 1]] if step == 4 else r[:, 0]


def clamped(net, x, step):
    return net(x).clamp(min=-0.1 * step)[:, 0]


def other_data(net, x, step):
    return net(x.detach() * (1 + step) - x.detach() ** 2)[:, 0]


def by_checkpoint(net, x, step):
    from torch.utils.checkpoint import checkpoint

    return checkpoint(net, x, use_reentrant=False)[:, 0] if step % 2 else net(x)[:, 0]


def parameter_replaced(net, x, step):
    """Numbers of a parameter replaced by the program, as an average of weights does."""
    if step == 4:
        with torch.no_grad():
            net.b.weight.copy_(torch.eye(3))
    return net(x)[:, 0]


PROGRAMS = [value for value in globals().values() if callable(value)]
PROGRAMS = [f for f in PROGRAMS if f.__module__ == __name__ and f not in (Net, mixing)]


def dense(residuals, net):
    """Return J and r of the scaled residuals, and the number of rows."""
    returned = residuals()
    parts = returned if isinstance(returned, list) else [returned]
    R = sum(part.numel() for part in parts)
    r = torch.cat([(part * (R / len(part)) ** 0.5).reshape(-1) for part in parts])
    parameters = list(net.parameters())
    rows = [torch_zoo.gradient_of(one, parameters) for one in r]
    return torch.stack(rows), r.detach()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_each_step_of_a_program_that_changes_is_the_dense_one(program):
    torch.manual_seed(0)
    net = Net().double()
    optimizer = GaussNewton(net, lr=RATE, damping=DAMPING, momentum=MOMENTUM)
    phi = torch.zeros(sum(p.numel() for p in net.parameters())).double()
    for step in range(STEPS):
        x = torch.randn(6, 3, dtype=torch.float64).requires_grad_()

        def residuals(step=step, x=x):
            torch.manual_seed(step)
            return program(net, x, step)

        scale = net.scale.clone()
        J, r = dense(residuals, net)
        net.scale = scale
        before = torch.cat([p.detach().reshape(-1) for p in net.parameters()])

        optimizer.step(residuals)

        K = J @ J.T + len(J) * DAMPING * torch.eye(len(J)).double()
        phi = MOMENTUM * phi + J.T @ torch.linalg.solve(K, r - MOMENTUM * (J @ phi))
        after = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
        assert_close(
            (before - after).numpy(), (RATE * phi).numpy(), "inverse", "float64"
        )


def test_a_parameter_that_is_frozen_or_replaced_between_steps_is_refused_or_followed():
    torch.manual_seed(0)
    net, x = Net().double(), torch.randn(6, 3, dtype=torch.float64)
    optimizer = GaussNewton(net, lr=RATE, damping=DAMPING, momentum=0.0)
    for _ in range(3):
        optimizer.step(lambda: net(x)[:, 0])

    kept, net.c.weight = net.c.weight, nn.Parameter(torch.ones(2, 3).double())
    before = kept.detach().clone()
    optimizer.step(
        lambda: F.linear(net.a(x), net.c.weight + 0 * kept)[:, 0] + kept.sum()
    )
    assert (kept != before).any()
    net.a.weight.requires_grad_(False)
    with pytest.raises(kc.UnsupportedError, match="frozen"):
        optimizer.step(lambda: net(x)[:, 0])


def test_plain_steps_follow_a_plan_and_record_no_calls():
    """So that the tests above compare what they are meant to."""
    torch.manual_seed(0)
    net, x = Net().double(), torch.randn(6, 3, dtype=torch.float64)
    optimizer = GaussNewton(net, lr=RATE)
    residuals = lambda: net(x)  # noqa: E731
    optimizer.step(residuals)

    assert optimizer._finder.is_planned
    assert not residuals().grad_fn.metadata
    optimizer.step(lambda: laplacian(net, x.clone().requires_grad_()))
    assert not optimizer._finder.is_planned
