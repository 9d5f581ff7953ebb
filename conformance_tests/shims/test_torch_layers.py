"""The modules that the PyTorch integration covers, each against a dense computation."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as fn  # noqa: E402

import kfac_core as kc  # noqa: E402
from kfac_core_shims.torch import register_layer  # noqa: E402
from kfac_core_shims.torch.layers import covered_modules  # noqa: E402

from .test_torch import (  # noqa: E402
    DAMPING,
    attached,
    close,
    dense_direction,
    doubles,
    factors_by_hand,
    flat,
    half_squares,
    jacobian,
    kfac_by_hand,
    seeded,
    step,
)

__all__ = ["seeded"]  # used by itself, in every test

PAGE = Path(__file__).parents[2] / "docs" / "quickstart_torch.md"


@pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not here")
def test_the_page_has_the_table_of_the_code():
    """Every covered module, in the order of the code, and no other."""
    page = PAGE.read_text(encoding="utf-8")
    table = page.split("| modules | layer | remark |\n| --- | --- | --- |\n")[1]
    rows = ["| " + " | ".join(row) + " |" for row in covered_modules()]
    assert table.split("\n\n")[0].splitlines() == rows


class Halves(nn.Module):
    """Calls a module of two inputs with the halves of one."""

    def __init__(self, module, at):
        super().__init__()
        self.inner, self.at = module, at

    def forward(self, x):
        return self.inner(x[:, : self.at], x[:, self.at :])


EXACT = {
    "circular": (
        nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular", stride=3),
        (3,),
    ),
    "reflect": (nn.Conv1d(2, 3, 3, padding=1, padding_mode="reflect", stride=4), (4,)),
    "replicate": (nn.Conv1d(2, 3, 4, padding=1, padding_mode="replicate"), (2,)),
    "transposed": (nn.ConvTranspose1d(2, 3, 2, padding=1), (2,)),
    "transposed 2d": (nn.ConvTranspose2d(2, 3, (3, 2), (2, 1), (2, 1)), (2, 2)),
    "transposed groups": (nn.ConvTranspose1d(4, 6, 3, 2, 2, groups=2), (2,)),
    "transposed, more": (nn.ConvTranspose1d(2, 3, 2, 2, 1, output_padding=1), (1,)),
    "transposed, dilated": (nn.ConvTranspose1d(2, 3, 2, 1, 2, dilation=3), (2,)),
    "unbatched linear": (nn.Linear(4, 3), None),
}


@pytest.mark.parametrize("kind", EXACT)
def test_a_layer_with_one_position_has_the_exact_fisher(kind):
    """With squared error and one position of output the block is ``J^T J / N``."""
    module, space = EXACT[kind]
    model = nn.Sequential(copy.deepcopy(module), nn.Flatten(0 if space is None else 1))
    model = model.double()
    if space is None:
        x = doubles(4)
        model.append(nn.Unflatten(0, (1, 3)))
    else:
        channels = module.in_channels
        space = (3, 3) if kind == "circular" else space
        x = doubles(6, channels, *space)
    y = doubles(*model(x).shape)
    names = [n for n, _ in model.named_parameters()]
    batch = x[None] if space is None else x
    J = jacobian(copy.deepcopy(model), batch, names) if space else None
    if J is None:
        parts = [jac.reshape(3, -1) for jac in _jacobians(model, x, names)]
        J = torch.cat(parts, -1)[None]

    before, after = step(model, attached(model), x, y, half_squares)

    close(flat(after, names), dense_direction(J, len(batch), flat(before, names)))


def _jacobians(model, x, names):
    parameters = dict(model.named_parameters())
    return torch.autograd.functional.jacobian(
        lambda *given: torch.func.functional_call(
            model, dict(zip(names, given, strict=True)), (x,)
        ),
        tuple(parameters[n].detach() for n in names),
    )


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_bilinear_layer_has_the_exact_fisher():
    model = Halves(nn.Bilinear(3, 2, 4), 3).double()
    x, y = doubles(12, 5), doubles(12, 4)
    names = ["inner.weight", "inner.bias"]
    J = jacobian(copy.deepcopy(model), x, names)

    before, after = step(model, attached(model), x, y, half_squares)

    close(flat(after, names), dense_direction(J, 12, flat(before, names)))


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_a_bag_of_embeddings_counts_its_ids(mode):
    """The diagonal of ``E[x x^T]``, x the counts of the ids, over k for a mean."""
    model = nn.Sequential(nn.EmbeddingBag(5, 3, mode=mode)).double()
    ids = torch.tensor([[0, 2], [2, 2], [4, 1], [0, 4]])
    counts = fn.one_hot(ids, 5).sum(1).double() / (2 if mode == "mean" else 1)
    A = (counts**2).mean(0)

    before, after = step(model, attached(model), ids, doubles(4, 3), half_squares)

    close(after["0.weight"], before["0.weight"] / (A[:, None] + DAMPING))


def test_bags_that_are_called_in_another_way_are_named():
    """Several bags in a row of ids."""
    model = nn.EmbeddingBag(5, 3, mode="sum").double()
    ids, starts = torch.tensor([0, 2, 2, 4]), torch.tensor([0, 1])
    both = nn.ModuleList([model, nn.Linear(3, 3).double()])
    both.forward = lambda: both[1](both[0](ids, starts))
    kfac = attached(both, output="auto")
    half_squares(both(), doubles(2, 3)).backward()
    with pytest.warns(UserWarning, match=r"0\.weight.*called with `offsets`"):
        kfac.step()
    assert [*kfac.skipped] == ["0.weight"]


@pytest.mark.parametrize("channels", [1, 3])
def test_prelu_has_a_scale_of_its_negative_part(channels):
    model = nn.Sequential(nn.PReLU(channels)).double()
    x, y = doubles(6, 3), doubles(6, 3)
    squares = (x.clamp(max=0) ** 2).mean(0)

    before, after = step(model, attached(model), x, y, half_squares)

    F = squares if channels == 3 else squares.sum()
    close(after["0.weight"], before["0.weight"] / (F + DAMPING))


@pytest.mark.parametrize("kind", ["instance", "layer", "rms"])
def test_a_norm_does_not_know_which_axis_is_the_batch(kind):
    """Time-first input: positions are examples of their own, so that no axis is trusted.

    InstanceNorm has examples first, by its definition.
    """
    norm = {"instance": nn.InstanceNorm1d(4, affine=True), "layer": nn.LayerNorm(4)}
    norm = norm.get(kind, nn.RMSNorm(4))
    if kind == "instance":
        model = nn.Sequential(norm, nn.Flatten(1)).double()
        x, y = doubles(5, 4, 3), doubles(5, 12)
        unit = fn.instance_norm(x)
        squares = (unit**2).sum(2).mean(0)
    else:
        model = nn.Sequential(norm).double()
        x, y = doubles(7, 5, 4), doubles(7, 5, 4)
        unit = fn.layer_norm(x, (4,)) if kind == "layer" else fn.rms_norm(x, (4,))
        squares = (unit**2).mean((0, 1))
    nn.init.normal_(norm.weight)

    before, after = step(model, attached(model), x, y, half_squares)
    swapped = copy.deepcopy(model)
    other = x if kind == "instance" else x.transpose(0, 1)
    target = y if kind == "instance" else y.transpose(0, 1)
    _, again = step(swapped, attached(swapped), other, target, half_squares)

    close(after["0.weight"], before["0.weight"] / (squares + DAMPING))
    close(again["0.weight"], after["0.weight"])


# Modules that read their weights themselves: K-FAC by hand of what each weight multiplies.


def by_hand(model, names, seen, outputs, before):
    """Return the direction of each weight and bias, from its inputs and its products."""
    found = {}
    for (weight, bias), (inputs, products) in zip(names, seen, strict=True):
        sources = [
            torch.autograd.grad(outputs[:, i].sum(), products, retain_graph=True)
            for i in range(outputs.shape[1])
        ]
        g = torch.stack([torch.cat([p.flatten(0, -2) for p in s]) for s in sources])
        x = torch.cat([v.flatten(0, -2) for v in inputs]).detach()
        V = torch.cat([before(weight), before(bias)[:, None]], 1)
        found[weight, bias] = kfac_by_hand(*factors_by_hand(x, g, len(outputs)), V)
    return found


class Attending(nn.Module):
    """Attention of a sequence to itself, or to its own other half, and one row out."""

    def __init__(self, cross):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.cross = cross

    def forward(self, x):
        q, k, v = self.inputs(x)
        return self.attention(q, k, v)[0].mean(1)

    def inputs(self, x):
        other = x.flip(2)
        return {"self": (x, x, x), "memory": (x, other, other)}.get(
            self.cross, (x, other, x * 2)
        )

    def products(self, x):
        """The same with the projections apart."""
        m, inputs = self.attention, self.inputs(x)
        projected = [
            fn.linear(z, w, b)
            for z, w, b in zip(
                inputs, m.in_proj_weight.chunk(3), m.in_proj_bias.chunk(3), strict=True
            )
        ]
        q, k, v = (p.unflatten(-1, (2, 2)).transpose(1, 2) for p in projected)
        mixed = torch.softmax(q @ k.transpose(-1, -2) / 2**0.5, -1) @ v
        joined = mixed.transpose(1, 2).flatten(-2)
        out = m.out_proj(joined)
        return [*zip(inputs, projected, strict=True), (joined, out)], out.mean(1)


@pytest.mark.parametrize("cross", ["self", "memory", "three"])
def test_attention_has_a_block_for_each_projection(cross):
    model = Attending(cross).double()
    x, y = doubles(6, 3, 4), doubles(6, 4)
    nn.init.normal_(model.attention.in_proj_bias)
    pairs, outputs = copy.deepcopy(model).products(x)
    kfac = attached(model)
    before, after = step(model, kfac, x, y, half_squares)

    def part(grads):
        weight, bias = (
            grads["attention.in_proj_weight"],
            grads["attention.in_proj_bias"],
        )
        found = {"out": (grads["attention.out_proj.weight"],)}
        found["out"] += (grads["attention.out_proj.bias"],)
        for i, name in enumerate("qkv"):
            rows = slice(4 * i, 4 * i + 4)
            found[name] = weight[rows], bias[rows]
        return found

    old, new = part(before), part(after)
    names = [((n, 0), (n, 1)) for n in ("q", "k", "v", "out")]
    seen = [([inputs], [product]) for inputs, product in pairs]
    expected = by_hand(model, names, seen, outputs, lambda key: old[key[0]][key[1]])

    for (weight, _), direction in expected.items():
        found = torch.cat([new[weight[0]][0], new[weight[0]][1][:, None]], 1)
        close(found, direction)
    assert kfac.skipped == {}


class Recurrent(nn.Module):
    """A recurrent module, or its cell, of which the last state goes out."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.inner = getattr(nn, kind)(2, 3)

    def forward(self, x):
        if not self.kind.endswith("Cell"):
            return self.inner(x)[0][-1]
        state = None
        for now in x:
            state = self.inner(now, state)
        return state[0] if isinstance(state, tuple) else state

    def products(self, x):
        """The same, step by step, with the products of both weights."""
        m = self.inner
        end = "" if self.kind.endswith("Cell") else "_l0"
        weights = [getattr(m, n + end) for n in ("weight_ih", "weight_hh")]
        biases = [getattr(m, n + end) for n in ("bias_ih", "bias_hh")]
        h = c = x.new_zeros(x.shape[1], 3)
        inputs, products = ([], []), ([], [])
        for now in x:
            for i, z in enumerate((now, h)):
                inputs[i].append(z)
                products[i].append(fn.linear(z, weights[i], biases[i]))
            a, b = products[0][-1], products[1][-1]
            if self.kind.startswith("LSTM"):
                i, f, g, o = (a + b).chunk(4, -1)
                c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
                h = torch.sigmoid(o) * torch.tanh(c)
            elif self.kind.startswith("GRU"):
                (r, z, n), (r2, z2, n2) = a.chunk(3, -1), b.chunk(3, -1)
                z = torch.sigmoid(z + z2)
                h = (1 - z) * torch.tanh(n + torch.sigmoid(r + r2) * n2) + z * h
            else:
                h = torch.tanh(a + b)
        return list(zip(inputs, products, strict=True)), h


@pytest.mark.parametrize(
    "kind", ["LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell"]
)
@pytest.mark.parametrize("width", [64, 32])
def test_a_recurrent_module_is_shared_over_time(kind, width):
    """Both weights with their biases; in float32 the fused kernels are not used."""
    dtype = {64: torch.float64, 32: torch.float32}[width]
    if width == 32 and kind.endswith("Cell"):
        pytest.skip("cells have no fused kernel")
    model = Recurrent(kind).double()
    x, y = doubles(4, 5, 2), doubles(5, 3)
    seen, outputs = copy.deepcopy(model).products(x)
    low = copy.deepcopy(model).to(dtype)
    kfac = attached(low)
    before, after = step(low, kfac, x.to(dtype), y.to(dtype), half_squares)

    end = "" if kind.endswith("Cell") else "_l0"
    names = [(f"inner.weight_{n}{end}", f"inner.bias_{n}{end}") for n in ("ih", "hh")]
    expected = by_hand(model, names, seen, outputs, lambda name: before[name].double())

    rtol = 1e-8 if dtype == torch.float64 else 2e-4
    for (weight, bias), direction in expected.items():
        found = torch.cat([after[weight], after[bias][:, None]], 1).double()
        torch.testing.assert_close(found, direction, rtol=rtol, atol=rtol)
    assert kfac.skipped == {}
    assert [*kfac.estimator.blocks] == [f"inner.{n}{end}" for n in ("ih", "hh")]


def test_an_encoder_layer_is_covered_as_a_whole():
    """In training mode and in evaluation with gradients, where it has a fast path."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    model = nn.Sequential(layer, nn.Linear(4, 3)).double()
    x, y = doubles(2, 5, 4), doubles(2, 5, 3)
    for training in (True, False):
        own = copy.deepcopy(model).train(training)
        kfac = attached(own)
        before, after = step(own, kfac, x, y, half_squares)
        assert kfac.skipped == {}
        assert [n for n in before if torch.equal(before[n], after[n])] == []


def test_a_weight_that_the_model_multiplies_by_itself_counts():
    """``F.linear(h, layer.weight)`` beside the layer's own call: rows of both."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(3, 3, bias=False)

        def forward(self, x):
            return fn.linear(torch.tanh(self.one(x)), self.one.weight)

    model = Twice().double()
    x, y = doubles(6, 3), doubles(6, 3)
    first = fn.linear(x, model.one.weight)
    hidden = torch.tanh(first)
    outputs = fn.linear(hidden, model.one.weight)
    g = [
        torch.autograd.grad(outputs[:, i].sum(), (first, outputs), retain_graph=True)
        for i in range(3)
    ]
    rows_x = torch.cat([x, hidden]).detach()
    rows_g = torch.stack([torch.cat(source) for source in g])
    A = rows_x.T @ rows_x / 12 * 2
    G = torch.einsum("mni,mnj->ij", rows_g, rows_g) / 12

    before, after = step(model, attached(model), x, y, half_squares)

    close(after["one.weight"], kfac_by_hand(A, G, before["one.weight"]))


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
    # z = h W^T, so that each output v has the derivative h in row v of W.
    J = torch.einsum("nj,ov->novj", h, torch.eye(6).double()).reshape(9, 6, -1)

    before, after = step(model, attached(model), ids, y, half_squares)

    names = ["words.weight"]
    close(flat(after, names), dense_direction(J, 9, flat(before, names)))


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
@pytest.mark.parametrize("loss", ["mean", "sum"])
@pytest.mark.parametrize("padding", [None, 1])
def test_an_embedding_that_makes_logits_is_kfac_by_hand(fisher, loss, padding):
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


def test_an_embedding_that_makes_logits_has_one_approximation():
    for wrong in (kc.Kronecker(), kc.Diagonal(), kc.Kronecker(output="diagonal")):
        with pytest.raises(kc.ConventionError, match="makes logits too"):
            attached(Tied(), approximations={"words": wrong})
    kfac = attached(Tied().double(), approximations={"logits.bias": None})
    assert [*kfac.skipped] == ["logits.bias"]


class Columns(nn.Module):
    """A linear layer of another library, with its weight as (in, out)."""

    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(4, 3))
        self.offset = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return x @ self.kernel + self.offset


class OnePlusNorm(nn.Module):
    """An RMS norm whose scale is one plus its weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return fn.rms_norm(x, (4,)) * (1 + self.weight)


def test_layers_of_other_libraries_are_registered():
    """By class or by name; a linear layer, and a norm with its scale in another form."""
    with pytest.raises(kc.UnsupportedError, match="Columns is not known"):
        attached(Columns())
    register_layer(
        Columns, "linear", weight="kernel", bias="offset", weight_layout="io"
    )
    register_layer(f"{OnePlusNorm.__module__}.OnePlus*", "norm")
    model, x, y = Columns().double(), doubles(8, 4), doubles(8, 3)
    names = ["kernel", "offset"]
    J = jacobian(copy.deepcopy(model), x, names)
    before, after = step(model, attached(model), x, y, half_squares)
    close(flat(after, names), dense_direction(J, 8, flat(before, names)))

    norm, y = nn.Sequential(OnePlusNorm()).double(), doubles(8, 4)
    before, after = step(norm, attached(norm), x, y, half_squares)
    squares = (fn.rms_norm(x, (4,)) ** 2).mean(0)
    close(after["0.weight"], before["0.weight"] / (squares + DAMPING))
    for bad in ({"weight_layout": "xy"}, {}):
        with pytest.raises(kc.ConventionError):
            register_layer(Columns, "linear" if bad else "lin", **bad)
    with pytest.raises(kc.ArgumentError, match="`kind`"):
        register_layer(3, "linear")


def test_an_expert_without_tokens_is_left_out():
    """Nothing is raised in the middle of a run, and the others go on."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

        def forward(self, x):
            to = (x[:, 0] > 0).long()
            out = torch.zeros_like(x)
            for i, expert in enumerate(self.experts):
                out = out.index_add(0, torch.where(to == i)[0], expert(x[to == i]))
            return out

    model = Experts().double()
    x, y = doubles(8, 3), doubles(8, 3)
    kfac = attached(model)
    with pytest.warns(UserWarning, match="experts.2"):
        before, after = step(model, kfac, x, y, half_squares)

    for i in (0, 1):
        rows = x[(x[:, 0] > 0) == bool(i)]
        ones = torch.cat([rows, torch.ones_like(rows[:, :1])], 1)
        F = torch.kron(ones.T @ ones / 8, torch.eye(3, dtype=x.dtype))
        V = torch.cat(
            [before[f"experts.{i}.weight"], before[f"experts.{i}.bias"][:, None]], 1
        )
        moved = torch.linalg.solve(
            F + DAMPING * torch.eye(12, dtype=x.dtype), V.T.reshape(-1)
        )
        close(after[f"experts.{i}.weight"], moved.reshape(4, 3).T[:, :3])


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
