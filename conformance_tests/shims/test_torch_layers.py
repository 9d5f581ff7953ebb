"""The modules that the PyTorch integration covers, each against a dense computation."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as fn  # noqa: E402

import kfac_core as kc  # noqa: E402
from kfac_core_shims.torch import layers, register_layer  # noqa: E402

from .test_torch import (  # noqa: E402
    DAMPING,
    attached,
    close,
    doubles,
    half_squares,
    kfac_by_hand,
    seeded,
    step,
)

__all__ = ["seeded"]  # used by itself, in every test


class Tied(nn.Module):
    """Words to logits by one weight; what is between them is tanh."""

    def __init__(self, *, detached=False, padding=None, bias=True):
        super().__init__()
        self.words = nn.Embedding(6, 3, padding_idx=padding)
        self.logits = nn.Linear(3, 6, bias=bias)
        self.logits.weight = self.words.weight
        self.detached = detached

    def forward(self, ids):
        h = self.words(ids)
        return self.logits(torch.tanh(h.detach() if self.detached else h))


def test_logits_by_an_embedding_have_the_exact_fisher():
    """Where nothing reaches the embedding itself the block is ``J^T J / N``."""
    model = Tied(detached=True, bias=False).double()
    ids, y = torch.randint(6, (9,)), doubles(9, 6)
    h = torch.tanh(model.words(ids)).detach()

    before, after = step(model, attached(model), ids, y, half_squares)

    # z = h W^T, so that the Fisher matrix of W is ``I (x) h^T h / N``.
    damped = h.T @ h / 9 + DAMPING * torch.eye(3).double()
    expected = torch.linalg.solve(damped, before["words.weight"].T).T
    close(after["words.weight"], expected)


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("loss", ["mean", "sum"])
@pytest.mark.parametrize("padding", [None, 1])
def test_tied_logits_have_the_dense_directions(fisher, loss, padding):
    """Both uses of W are rows of one block, in which those of the logits change places."""
    model = Tied(padding=padding).double()
    ids, y = torch.tensor([[0, 2], [2, 1], [4, 1], [0, 5]]), torch.randint(6, (4, 2))
    rows, W = 8, model.words.weight.detach()
    h = torch.tanh(W[ids.reshape(-1)])
    z = h @ W.T + model.logits.bias.detach()
    p = torch.softmax(z, -1)
    # Columns of a square root of the Hessian, or the gradient of the data.
    if fisher == "exact":
        roots = torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None, :]
        vectors = roots.movedim(-1, 0)
    else:
        vectors = (p - fn.one_hot(y.reshape(-1), 6))[None]
    g = (vectors @ W) * (1 - h**2)
    x = fn.one_hot(ids.reshape(-1), 6).double()
    if padding is not None:
        counts = (ids.reshape(-1) != padding).double()
        x, g = x * counts[:, None], g * counts[:, None]
    seen = rows + int(x.sum())
    A = torch.diag((x.square().sum(0) + vectors.square().sum((0, 1))) / seen)
    G = (torch.einsum("mni,mnj->ij", g, g) + h.T @ h) / rows
    shift = vectors.square().sum((0, 1)) / rows

    def loss_of(outputs, targets):
        return fn.cross_entropy(
            outputs.flatten(0, 1), targets.flatten(), reduction=loss
        )

    options = {"likelihood": kc.losses.Categorical(), "fisher": fisher, "loss": loss}
    kfac = attached(model, **options)
    before, after = step(model, kfac, ids, y, loss_of)

    assert kfac.skipped == {}
    scale = rows if loss == "sum" else 1
    dense = torch.kron(A, G) + DAMPING * torch.eye(18).double()
    expected = torch.linalg.solve(dense, before["words.weight"].flatten() / scale)
    close(after["words.weight"].flatten(), expected)
    expected = before["logits.bias"] / scale / (shift + DAMPING)
    close(after["logits.bias"], expected)


class Scaled(nn.Embedding):
    """As of many language models."""

    def forward(self, ids):
        return 3 * super().forward(ids)


class Shifted(nn.Embedding):
    """As learned positions of many language models."""

    def forward(self, ids):
        return super().forward(ids + 2)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Outside(nn.Module):
    """What these overrides do, beside the layers; or by them."""

    def __init__(self, *, overriding, tied, padding):
        super().__init__()
        words, shifted, linear = nn.Embedding, nn.Embedding, nn.Linear
        if overriding:
            words, shifted, linear = Scaled, Shifted, Doubled
        self.words = words(6, 3, padding_idx=padding)
        self.positions, self.mix = shifted(5, 3), linear(3, 3)
        self.logits = nn.Linear(3, 6)
        if tied:
            self.logits.weight = self.words.weight
        self.overriding = overriding

    def forward(self, ids):
        positions = torch.arange(ids.shape[1])
        if self.overriding:
            h = self.mix(torch.tanh(self.words(ids) + self.positions(positions)))
            # Once more, without the module's own forward pass.
            again = fn.embedding(ids, self.words.weight, self.words.padding_idx)
        else:
            h = 3 * self.words(ids) + self.positions(positions + 2)
            h, again = 2 * self.mix(torch.tanh(h)), self.words(ids)
        return self.logits(h + again).flatten(0, 1)


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("padding", [None, 1])
@pytest.mark.parametrize("tied", [False, True])
def test_what_overrides_a_forward_is_the_layer_and_what_is_done_beside_it(
    tied, padding, fisher
):
    """Lookups and products are read in the graph, and so are those outside of modules."""
    ids, y = torch.tensor([[0, 2], [2, 1], [4, 1]]), torch.randint(6, (6,))
    found = []
    for overriding in (False, True):
        torch.manual_seed(0)
        model = Outside(overriding=overriding, tied=tied, padding=padding).double()
        kfac = attached(model, likelihood=kc.losses.Categorical(), fisher=fisher)
        found.append(step(model, kfac, ids, y, fn.cross_entropy))
        assert kfac.skipped == {}

    (before, plain), (_, overridden) = found
    for name in plain:
        close(overridden[name], plain[name])
        assert not torch.allclose(plain[name], before[name])


def test_what_else_a_subclass_holds_keeps_its_gradient():
    """As adapters that are written as a frozen linear layer with more parameters."""

    class Adapted(nn.Linear):
        def __init__(self):
            super().__init__(3, 3)
            self.down = nn.Parameter(torch.randn(3, 1))
            self.weight.requires_grad_(False)

        def forward(self, x):
            return super().forward(x) + x @ self.down @ self.down.T

    with pytest.warns(UserWarning, match="a parameter of Adapted itself"):
        kfac = attached(nn.Sequential(Adapted(), nn.Linear(3, 2)))
    assert kfac.skipped.keys() == {"0.down", "0.bias"}


def test_layers_of_other_libraries_are_registered_by_class_or_name():
    """`test_torch_zoo` trains those that are."""

    class Unknown(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x)

    with pytest.raises(
        kc.UnsupportedError, match="Unknown overrides the forward of LayerNorm"
    ):
        attached(Unknown(3))
    for how, options in (("linear", {"weight_layout": "xy"}), ("lin", {})):
        with pytest.raises(kc.ConventionError):
            register_layer(Unknown, how, **options)
    with pytest.raises(kc.ArgumentError, match="`kind`"):
        register_layer(3, "linear")


def test_a_registered_layer_may_have_no_rows_or_be_frozen_later():
    """Its first call with rows is checked, and there must be a gradient to compare."""

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    register_layer(Doubled, "linear")
    model = nn.Sequential(nn.Linear(3, 3), Doubled(3, 2))
    kfac = attached(model)
    model[1].weight.requires_grad_(False)
    model(torch.randn(4, 3))
    model[1].weight.requires_grad_(True)
    model(torch.randn(0, 3))
    with pytest.raises(kc.ConventionError, match="its output is not its argument"):
        model(torch.randn(4, 3))
    assert kfac.steps == 0


@pytest.mark.parametrize("kind", ["weight", "spectral", "orthogonal", "conv"])
def test_a_computed_weight_has_the_block_of_what_it_computes(kind):
    """``(dW/dtheta)^T (F_W + damping)^-1 dL/dW``, also after the gradients are scaled."""
    parametrizations = nn.utils.parametrizations
    made = {
        "weight": (nn.Linear(4, 3), parametrizations.weight_norm),
        "spectral": (nn.Linear(4, 3), parametrizations.spectral_norm),
        "orthogonal": (nn.Linear(4, 3), parametrizations.orthogonal),
        "conv": (nn.Conv1d(2, 3, 2), parametrizations.weight_norm),
    }
    layer, how = made[kind]
    model = nn.Sequential(how(layer.double()), nn.Flatten(1)).eval()
    x = doubles(8, 2, 2) if kind == "conv" else doubles(8, 4)
    y = doubles(8, 3)
    rows = torch.cat([x.flatten(1), torch.ones(8, 1, dtype=x.dtype)], 1)
    A = rows.T @ rows / 8
    W = model[0].weight
    V = torch.autograd.grad(half_squares(model(x), y), (model[0].bias,))[0]
    W = model[0].weight
    made = fn.linear(x.flatten(1), W.flatten(1), model[0].bias)
    V_weight = torch.autograd.grad(half_squares(made, y), W, retain_graph=True)[0]
    joint = torch.cat([V_weight.flatten(1), V[:, None]], 1)
    moved = kfac_by_hand(A, torch.eye(3, dtype=x.dtype), joint)
    originals = [*model[0].parametrizations["weight"].parameters()]
    expected = torch.autograd.grad(W, originals, moved[:, :-1].reshape(W.shape))

    kfac = attached(model)
    half_squares(model(x), y).backward()
    for p in model.parameters():
        p.grad *= 0.25
    kfac.step()

    assert kfac.skipped == {}
    close(model[0].bias.grad, 0.25 * moved[:, -1])
    for p, found in zip(originals, expected, strict=True):
        close(p.grad, 0.25 * found)
    own = copy.deepcopy(model)
    half_squares(own(x), y).backward()  # The hooks of a copy do nothing.
    kfac.remove()


PAGE = Path(__file__).parents[2] / "docs" / "reference_torch.md"


@pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not here")
def test_the_page_has_the_table_of_the_code():
    """Every covered module, in the order of the code, and no other."""
    page = PAGE.read_text(encoding="utf-8")
    table = page.split("| modules | layer | remark |\n| --- | --- | --- |\n")[1]
    names = [row.split(" | ")[0] for row in table.split("\n\n")[0].splitlines()]
    covered = [[f"`nn.{t.__name__}`" for t in kinds] for kinds, _ in layers._TORCH]
    covered += [[f"`{name}`"] for name, _ in layers._TRANSFORMERS]
    assert names == ["| " + ", ".join(kinds) for kinds in covered]
