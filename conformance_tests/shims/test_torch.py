"""The PyTorch shim, against Fisher matrices made example by example with torch.func."""

from __future__ import annotations

import copy
import gc
import math
import weakref

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as fn  # noqa: E402

import kfac_core as kc  # noqa: E402
from kfac_core.losses import Categorical, SquaredError  # noqa: E402
from kfac_core_shims.torch import KFAC  # noqa: E402

DAMPING = 0.1
OPTIONS = {
    "damping": DAMPING,
    "decay": 0.9,
    "damping_rule": "exact",
    "kl_clip": None,
    "update_every": 1,
    "refresh_every": 1,
}


@pytest.fixture(autouse=True)
def seeded():
    """Models and data are the same in every run."""
    torch.manual_seed(0)


def doubles(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def attached(model, *, likelihood=None, fisher="exact", loss="mean", **options):
    likelihood = likelihood or SquaredError(scale=0.5)
    options = {**OPTIONS, **options}
    return KFAC(model, likelihood=likelihood, fisher=fisher, reduction=loss, **options)


def step(model, kfac, inputs, targets, loss_of):
    """One forward, observed, and one backward pass, and the step of the shim."""
    model.zero_grad()
    outputs = model(inputs)
    kfac.observe(outputs)
    loss_of(outputs, targets).backward()
    before = {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }
    kfac.step()
    after = {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }
    return before, after


def half_squares(outputs, targets):
    """Half the sum of squares, over the mean of the rows."""
    return 0.5 * ((outputs - targets) ** 2).sum(-1).mean()


def jacobian(model, inputs, names):
    """The outputs' derivatives, (N, everything that an example has, parameters)."""
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    chosen = {n: parameters[n] for n in names}

    def outputs_of(chosen, x):
        made = torch.func.functional_call(model, {**parameters, **chosen}, (x[None],))
        return made.reshape(-1)

    jac = torch.func.vmap(torch.func.jacrev(outputs_of), in_dims=(None, 0))
    found = jac(chosen, inputs)
    return torch.cat([found[n].flatten(2) for n in names], -1)


def dense_direction(J, rows, gradient, *, diagonal=False):
    """``(J^T J / rows + damping I)^-1 gradient``, for half of squares."""
    F = torch.einsum("nop,noq->pq", J, J) / rows
    if diagonal:
        # Of the squares of examples' gradients, for each output.
        F = torch.diag((J**2).sum((0, 1)) / rows)
    return torch.linalg.solve(F + DAMPING * torch.eye(len(F), dtype=F.dtype), gradient)


def flat(grads, names):
    return torch.cat([grads[n].flatten() for n in names])


def close(actual, expected, rtol=1e-8):
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-10)


# A block that is exact, by an identity: the whole Fisher matrix of the module is known.


@pytest.mark.parametrize("loss", ["mean", "sum"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_has_the_exact_fisher(loss, bias):
    """With squared error the block of one linear layer is ``X^T X / N (x) I``."""
    model = nn.Linear(4, 3, bias=bias).double()
    x, y = doubles(8, 4), doubles(8, 3)
    names = [n for n, _ in model.named_parameters()]
    J = jacobian(copy.deepcopy(model), x, names)

    def loss_of(outputs, targets):
        return half_squares(outputs, targets) * (8 if loss == "sum" else 1)

    before, after = step(model, attached(model, loss=loss), x, y, loss_of)

    gradient = flat(before, names) / (8 if loss == "sum" else 1)
    close(flat(after, names), dense_direction(J, 8, gradient))


@pytest.mark.parametrize("kind", ["conv1", "conv2", "conv3", "padding", "groups"])
def test_a_convolution_is_the_matrix_of_its_patches(kind):
    """One position of output: nothing is shared, and the block is exact."""
    model, shape = {
        "conv1": (nn.Conv1d(2, 3, 4), (2, 4)),
        "conv2": (nn.Conv2d(2, 3, (2, 3)), (2, 2, 3)),
        "conv3": (nn.Conv3d(1, 2, 2), (1, 2, 2, 2)),
        "padding": (nn.Conv2d(2, 3, 3, padding=1, stride=3), (2, 2, 2)),
        "groups": (nn.Conv1d(4, 6, 3, groups=2, dilation=2), (4, 5)),
    }[kind]
    model = nn.Sequential(model, nn.Flatten()).double()
    x = doubles(6, *shape)
    y = doubles(*model(x).shape)
    names = ["0.weight", "0.bias"]
    J = jacobian(copy.deepcopy(model), x, names)

    before, after = step(model, attached(model), x, y, half_squares)

    close(flat(after, names), dense_direction(J, 6, flat(before, names)))


def test_an_embedding_has_the_exact_fisher():
    """Ids are one-hot rows, and A is diagonal; the padding's row has no curvature."""
    model = nn.Sequential(nn.Embedding(5, 3, padding_idx=1)).double()
    x, y = torch.tensor([0, 2, 2, 4, 1, 0]), doubles(6, 3)
    x_known = torch.nn.functional.one_hot(x, 5).double() * (x != 1)[:, None]
    A = x_known.T @ x_known / 6

    before, after = step(model, attached(model), x, y, half_squares)

    expected = before["0.weight"] / (torch.diag(A)[:, None] + DAMPING)
    close(after["0.weight"], expected)


@pytest.mark.parametrize("kind", ["layer", "rms", "group", "batch", "batch2"])
def test_a_norm_has_the_diagonal_of_the_fisher(kind):
    """Scale and shift: the mean square of each example's own gradient, source by source."""
    norm, shape = {
        "layer": (nn.LayerNorm(6), (6,)),
        "rms": (nn.RMSNorm(6), (6,)),
        "group": (nn.GroupNorm(2, 6), (6, 2)),
        "batch": (nn.BatchNorm1d(6), (6,)),
        "batch2": (nn.BatchNorm2d(6), (6, 2, 1)),
    }[kind]
    model = nn.Sequential(norm, nn.Flatten()).double()
    nn.init.zeros_(norm.weight)  # so that nothing can be read off the outputs
    x = doubles(5, *shape)
    y = doubles(5, math.prod(shape))
    unit = copy.deepcopy(norm).requires_grad_(False)
    nn.init.ones_(unit.weight)
    seen = unit(x).flatten(2) if x.ndim > 2 else unit(x)[..., None]

    before, after = step(model, attached(model), x, y, half_squares)

    # Each output has one scale and one shift; a channel's outputs are separate sources.
    squares = (seen**2).sum((0, 2)) / 5
    close(after["0.weight"], before["0.weight"] / (squares + DAMPING))
    if "0.bias" in after:
        count = float(seen.shape[2])
        close(after["0.bias"], before["0.bias"] / (count + DAMPING))


# K-FAC by hand, from gradients of every example taken with torch.func.


def factors_by_hand(x, g, rows):
    """Return L/R A and G of all rows of x, with a one, and of all sources of g."""
    x = x.reshape(-1, x.shape[-1])
    x = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    g = g.reshape(-1, len(x), g.shape[-1])
    A = x.T @ x / len(x)
    G = torch.einsum("mni,mnj->ij", g, g) / len(x)
    return A * len(x) / rows, G


def kfac_by_hand(A, G, gradient):
    """``(A (x) G + damping I)^-1`` of a weight with its bias as last column, densely."""
    V = gradient.T.reshape(-1)
    dense = torch.kron(A, G) + DAMPING * torch.eye(len(V), dtype=V.dtype)
    return torch.linalg.solve(dense, V).reshape(gradient.T.shape).T


def joined(grads, name):
    return torch.cat([grads[f"{name}.weight"], grads[f"{name}.bias"][:, None]], 1)


class Network(nn.Module):
    """Two layers whose derivatives are simple: tanh between."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


def test_sampled_labels_are_right_in_expectation():
    """The mean of the sampled G over many draws is the exact G, within five errors."""
    model = Network().double()
    x = doubles(256, 4)

    def block(fisher, repeats):
        own = copy.deepcopy(model)
        options = {"fisher": fisher, "decay": 1.0, "refresh_every": repeats}
        kfac = attached(own, likelihood=Categorical(), **options)
        for _ in range(repeats):
            own.zero_grad()
            own(x).sum().backward()
            kfac.step()
        kfac.estimator.refresh()
        return kfac.estimator.operator("two").to_dense(damped=False)

    exact, sampled = block("exact", 1), block("gradients", 50)

    # 12,800 draws: the relative error of a mean of squares is about 0.01.
    error = torch.linalg.norm(sampled - exact) / torch.linalg.norm(exact)
    assert 0 < error < 0.05


# One weight in several places.


class Cell(nn.Module):
    """A recurrent cell written with Linear, called at every time step."""

    def __init__(self):
        super().__init__()
        self.both, self.last = nn.Linear(2 + 3, 3), nn.Linear(3, 2)

    def forward(self, x):
        h = x.new_zeros(len(x), 3)
        for t in range(x.shape[1]):
            h = torch.tanh(self.both(torch.cat([x[:, t], h], -1)))
        return self.last(h)


def test_a_cell_is_shared_over_time():
    """Uses at T steps: T N rows, with the sum over steps as the block."""
    model = Cell().double()
    x, y = doubles(5, 4, 2), doubles(5, 2)
    seen, states = [], []
    h = torch.zeros(5, 3, dtype=torch.float64)
    for t in range(4):
        seen.append(torch.cat([x[:, t], h], -1))
        z = model.both(seen[-1])
        states.append(z)
        h = torch.tanh(z)
    outputs = model.last(h)
    g = [
        torch.autograd.grad(outputs[:, i].sum(), states, retain_graph=True)
        for i in (0, 1)
    ]
    rows_x = torch.cat(seen).detach()
    rows_g = torch.stack([torch.cat(source) for source in g])

    before, after = step(model, attached(model), x, y, half_squares)

    expected = kfac_by_hand(*factors_by_hand(rows_x, rows_g, 5), joined(before, "both"))
    close(joined(after, "both"), expected)


def test_one_parameter_in_two_modules_has_one_block():
    """The rows of both modules; their own biases keep their gradients, and are listed."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    model[2].weight = model[0].weight
    x, y = doubles(6, 3), doubles(6, 3)
    with torch.no_grad():
        h = torch.tanh(model[0](x))
        eye = torch.eye(3, dtype=torch.float64)[:, None].expand(3, 6, 3)
        first = (eye @ model[2].weight) * (1 - h**2)
    rows_x = torch.cat([x, h])
    rows_g = torch.cat([first, eye], 1)
    A = rows_x.T @ rows_x / 12 * 2
    G = torch.einsum("mni,mnj->ij", rows_g, rows_g) / 12

    with pytest.warns(UserWarning, match="0.bias"):
        kfac = attached(model)
    before, after = step(model, kfac, x, y, half_squares)

    close(after["0.weight"], kfac_by_hand(A, G, before["0.weight"]))
    assert [*kfac.skipped] == ["0.bias", "2.bias"]
    assert torch.equal(after["2.bias"], before["2.bias"])


# What is done in a training loop.


def test_a_resumed_run_is_the_same_to_the_bit(tmp_path):
    """Through torch.save with weights only: sampled labels and schedules go on."""
    x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))

    def steps(model, kfac, count):
        for _ in range(count):
            step(model, kfac, x, y, fn.cross_entropy)
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad

    def fresh():
        options = {"fisher": "gradients", "update_every": 2, "refresh_every": 3}
        model = Network()
        return model, attached(model, likelihood=Categorical(), **options)

    model, kfac = fresh()
    steps(model, kfac, 4)
    torch.save([model.state_dict(), kfac.state_dict()], tmp_path / "run.pt")
    steps(model, kfac, 5)
    other, resumed = fresh()
    weights, state = torch.load(tmp_path / "run.pt", weights_only=True)
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    steps(other, resumed, 5)

    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
    with pytest.raises(kc.StateError):
        resumed.load_state_dict({"steps": 3, "estimator": {}})
    with pytest.raises(kc.StateError):
        resumed.load_state_dict({})
    assert resumed.steps == 9


def test_autocast_gives_nearly_the_same_direction():
    """Rows in bfloat16, statistics and products in float32."""
    model = Network()
    x, y = torch.randn(64, 4), torch.randint(0, 3, (64,))

    def direction(enabled):
        own = copy.deepcopy(model)
        kfac = attached(own, likelihood=Categorical(), fisher="exact")
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            outputs = own(x)
            kfac.observe(outputs)
            loss = fn.cross_entropy(outputs, y)
            assert outputs.dtype == (torch.bfloat16 if enabled else torch.float32)
            loss.backward()
            kfac.step()
        factor = kfac.estimator.operator("two").to_dense(damped=False)
        assert factor.dtype == torch.float32
        return own.two.weight.grad, factor

    (low, low_factor), (full, full_factor) = direction(True), direction(False)

    torch.testing.assert_close(low_factor, full_factor, rtol=0.05, atol=0.005)
    assert torch.linalg.norm(low - full) < 0.05 * torch.linalg.norm(full)


# What is left alone.


def test_nan_raises_and_changes_nothing():
    """Neither in rows nor in gradients; the next good batch goes on as if it was not."""
    model = Network().double()
    kfac, x, y = attached(model), doubles(6, 4), doubles(6, 3)
    step(model, kfac, x, y, half_squares)
    before = copy.deepcopy(kfac.state_dict())
    bad = x.clone()
    bad[2, 1] = math.nan

    with pytest.raises(kc.NotFiniteError):
        step(model, kfac, bad, y, half_squares)
    model.zero_grad()
    outputs = model(bad)
    kfac.observe(outputs)
    (outputs.nan_to_num() * 0).sum().backward()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(kc.NotFiniteError):
        kfac.step()

    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    after = kfac.state_dict()
    assert after["steps"] == before["steps"] == 1
    assert same(after, before)


def same(one, other):
    """Whether two states are equal, to the bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[n], other[n]) for n in one)
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return one == other


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_no_graph_is_held_after_a_step(fisher):
    """What a graph saved is freed with it, without the garbage collector."""
    model = Network()
    kfac = attached(model, fisher=fisher)

    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.kept = Token()
            tokens.append(weakref.ref(ctx.kept))
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g

    class Token:
        pass

    tokens = []
    gc.disable()
    try:
        outputs = Kept.apply(model(torch.randn(5, 4)))
        kfac.observe(outputs)
        half_squares(outputs, torch.randn(5, 3)).backward()
        kfac.step()
        del outputs
        assert [token() for token in tokens] == [None]
    finally:
        gc.enable()
