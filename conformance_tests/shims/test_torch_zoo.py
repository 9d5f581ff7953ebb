"""Programs that call layers in every way, against the dense Fisher blocks of autograd."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as fn  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import kfac_core as kc  # noqa: E402
from kfac_core_shims.torch import Part, Parts, register_layer  # noqa: E402

from ..builders import torch_zoo  # noqa: E402
from ..builders.torch_zoo import Program  # noqa: E402

CATEGORICAL = {"likelihood": "categorical"}
TOKENS = {"positions": "separate"}


pytestmark = pytest.mark.usefixtures("torch_float64")


def randn(*shape):
    return lambda: torch.randn(*shape)


def squares(make):
    """A loop of one pass, in which half of the squares is the loss."""

    def loop(model, kfac):
        z = model(make())
        rows = 0.5 * (z - torch.randn_like(z)).square().sum(-1)
        rows.mean().backward(retain_graph=True)
        return z

    return loop


def classes(make):
    """A loop of one pass with a cross-entropy over the last axis."""

    def loop(model, kfac):
        z = model(make())
        y = torch.randint(z.shape[-1], z.shape[:-1])
        cross_entropy(z.flatten(0, -2), y.flatten()).backward(retain_graph=True)
        return z

    return loop


class Calling(nn.Module):
    """A module of layers whose forward pass is a function."""

    def __init__(self, forward, **layers):
        super().__init__()
        self.function = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self.function(self, x)


def calling(forward, **layers):
    """Make such a module, with layers that are made anew each time."""
    return lambda: Calling(forward, **{name: make() for name, make in layers.items()})


def linear(inputs, outputs, **options):
    return lambda: nn.Linear(inputs, outputs, **options)


def last_state(m, x):
    return m.inner(x)[0][-1]


def cell_by_cell(m, x):
    state = None
    for now in x:
        state = m.inner(now, state)
    return state[0] if isinstance(state, tuple) else state


def attention(inputs):
    """Attention of a sequence, and the mean of its rows."""

    def forward(m, x):
        return m.attention(*inputs(x))[0].mean(1)

    return Program(
        model=calling(
            forward, attention=lambda: nn.MultiheadAttention(4, 2, batch_first=True)
        ),
        loop=squares(randn(6, 3, 4)),
        parts={f"attention.in_proj_{p}": 3 for p in ("weight", "bias")},
    )


def experts(m, x):
    """Each example goes to one of two experts; the third gets none."""
    to = (x[:, 0] > 0).long()
    out = torch.zeros_like(x)
    for i, expert in enumerate((m.first, m.second, m.third)):
        out = out.index_add(0, torch.where(to == i)[0], expert(x[to == i]))
    return out


class Stacked(nn.Module):
    """Experts whose weights are one tensor, each of which sees some of the rows."""

    def __init__(self, forward, biased=False, shape=(3, 4, 4)):
        super().__init__()
        self.function = forward
        self.weight = nn.Parameter(torch.randn(*shape) / 2)
        self.bias = nn.Parameter(torch.randn(shape[0], 4)) if biased else None

    def forward(self, x):
        """Call the function."""
        return self.function(self, x)


register_layer(Stacked, "experts", weight_layout="io")


def stacked(forward, *, biased=False, loop=None, **options):
    """A layer, a stack of experts, and a layer."""
    names = ["1.weight"] + ["1.bias"] * biased

    def model():
        return nn.Sequential(
            nn.Linear(4, 4), Stacked(forward, biased), nn.Tanh(), nn.Linear(4, 2)
        )

    return Program(
        model=model,
        loop=loop or squares(randn(9, 4)),
        parts=dict.fromkeys(names, 3),
        **options,
    )


def by_expert(product):
    """Each third of the rows goes to one expert."""

    def forward(m, x):
        thirds = x.unflatten(0, (3, -1))
        return torch.cat([product(m, x, e) for e, x in enumerate(thirds)])

    return forward


def taken_in_turn(m, x):
    parts = zip(x.unflatten(0, (3, -1)), m.weight, strict=True)
    return torch.cat([x @ w for x, w in parts])


def all_experts(product):
    return lambda m, x: product(m, x.unflatten(0, (3, -1))).flatten(0, 1)


def recurrent(kind, forward):
    return Program(
        model=calling(forward, inner=lambda: getattr(nn, kind)(2, 3)),
        loop=squares(randn(4, 5, 2)),
    )


def convolution(layer, *space, channels=2):
    return Program(
        model=lambda: nn.Sequential(layer(), nn.Flatten(1)),
        loop=squares(randn(6, channels, *space)),
    )


def unbatched(layer, *space):
    """Rows of the outputs are of one example, which the layer mixes."""
    model, loop = lambda: nn.Sequential(layer()), squares(randn(2, *space))
    return Program(model=model, loop=loop, options=TOKENS)


def around_rows(m, x):
    """Layers of the positions of one example, of which one is called twice."""
    h = m.rows(torch.tanh(m.rows(m.first(x).T)))
    return m.out(m.last(h.T).T)


def before_convolution(make, layer, **options):
    """A layer, and an unbatched convolution that mixes its rows, as many as it returns."""
    forward = calling(
        lambda m, x: m.last(m.first(x).T).T,
        first=layer,
        last=lambda: nn.Conv1d(3, 2, 3, padding=1),
    )
    options = {"options": TOKENS, **options}
    return Program(model=forward, loop=squares(make), **options)


def ids(forward, make, **options):
    """Rows of an embedding, which a function makes examples' features of."""
    model = calling(
        lambda m, x: m.head(forward(m, x)),
        ids=lambda: nn.Embedding(4, 3, **options),
        head=linear(3, 2),
    )
    full = {"approximations": {**torch_zoo.EXACT, "embedding": kc.Full()}}
    return Program(model=model, loop=squares(make), options=full)


def some_ids(*shape):
    return lambda: torch.randint(0, 3, shape)


def one_by_one(m, x):
    """Examples in turn, each of as many positions as there are examples."""
    rows = [m.rows(torch.tanh(m.first(example)).T) for example in x]
    return m.out(torch.stack([torch.tanh(row).mean(0) for row in rows]))


def layers(forward, loop=None, **options):
    """Two linear layers, of which a function says how they are called."""
    model = calling(forward, one=linear(3, 3), two=linear(3, 2))
    return Program(model=model, loop=loop or squares(randn(7, 3)), **options)


def normalization(layer, *shape, flat=False):
    """A norm, of which each position counts as an example, or all those of an example."""
    return Program(
        model=lambda: nn.Sequential(layer(), *[nn.Flatten(1)] * flat),
        loop=squares(randn(*shape)),
        diagonal=["0.weight", "0.bias"],
    )


def one_slope(make, *above):
    """One slope of all features, over which an example's gradient sums."""
    return Program(
        model=lambda: nn.Sequential(nn.PReLU(), *[layer() for layer in above]),
        loop=squares(make),
        diagonal=["0.weight"],
    )


class Columns(nn.Module):
    """A linear layer of another library, with its weight as (in, out)."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return x @ self.weight + self.bias


class Scaled(Columns):
    """A linear layer that multiplies its input first."""

    def forward(self, x):
        return 2.0 * x @ self.weight + self.bias


class LowRank(nn.Module):
    """A product of two matrices, of which only the graph shows what is between them."""

    def __init__(self):
        super().__init__()
        self.weight_down = nn.Parameter(torch.randn(4, 2))
        self.weight_up = nn.Parameter(torch.randn(2, 3))
        self.bias_up = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return x @ self.weight_down @ self.weight_up + self.bias_up


def low_rank(module, owns):
    (n, r), m = module.weight_down.shape, module.weight_up.shape[1]
    down = kc.Dense(in_features=n, out_features=r, bias=False, weight_layout="io")
    up = kc.Dense(in_features=r, out_features=m, bias=True, weight_layout="io")
    return Parts(
        of={
            "down": Part(layer=down, parameters={"weight": "weight_down"}),
            "up": Part(layer=up, parameters={"weight": "weight_up", "bias": "bias_up"}),
        }
    )


class OnePlusNorm(nn.Module):
    """An RMS norm whose scale is one plus its weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return fn.rms_norm(x, (4,)) * (1 + self.weight)


register_layer(Columns, "linear", weight_layout="io")
register_layer(Scaled, "linear", weight_layout="io")
register_layer(LowRank, low_rank)
register_layer(f"{OnePlusNorm.__module__}.OnePlus*", "norm")


def compiled(backend, *, before):
    """A compiled model; of its class another may have been compiled and called before."""

    def loop(model, kfac):
        return squares(randn(7, 3))(torch.compile(model, backend=backend), kfac)

    def make():
        torch._dynamo.reset()
        module = calling(twice, one=linear(3, 3), two=linear(3, 2))
        if before:
            torch.compile(module(), backend=backend)(torch.randn(7, 3)).sum().backward()
        return module()

    return Program(model=make, loop=loop)


def twice(m, x):
    return m.two(torch.tanh(m.one(torch.tanh(m.one(x)))))


def by_itself(m, x):
    h = torch.tanh(fn.linear(torch.tanh(m.one(x)), m.one.weight))
    return m.two(h + x @ m.one.weight)


def by_transposes(m, x):
    return m.two(torch.tanh(torch.addmm(m.one.bias.t(), x, m.one.weight.t())))


def in_checkpoint(m, x):
    inner = lambda x: fn.linear(torch.tanh(m.one(x)), m.one.weight)  # noqa: E731
    return m.two(checkpoint(inner, x, use_reentrant=False))


def time_first(m, x):
    return m.two(torch.tanh(m.one(x)).mean(0))


def flattened(m, x):
    h = torch.tanh(m.one(x.flatten(0, 1))).unflatten(0, x.shape[:2])
    return m.two(h.sum(1))


class Sharing(nn.Module):
    """Two layers with one weight; each has a bias of its own."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


def by_the_embedding(m, ids):
    return fn.linear(torch.tanh(m.mix(m.ids(ids))), m.ids.weight)


def scaled_output(m, x):
    """Call a layer with a hook that multiplies what it returns."""
    handle = m.one.register_forward_hook(lambda module, inputs, y: 3 * y)
    y = torch.tanh(m.one(x))
    handle.remove()
    return m.two(y)


def by_name(m, x):
    h = m.spread(output_size=[10], input=x[:, None])[:, 0]
    return m.pair(input2=x.repeat(1, 5)[:, :10], input1=h)


def attending(m, x):
    h = torch.tanh(m.one(x))
    return m.two(torch.softmax(h @ h.mT, -1) @ h)


def first_reentrant(m, x):
    h = checkpoint(m.one, x.requires_grad_(), use_reentrant=True)
    return m.two(torch.tanh(h))


def tanh_reentrant(m, x):
    return m.two(checkpoint(torch.tanh, m.one(x), use_reentrant=True))


def observed(make):
    """A loop that says itself which outputs the loss reads."""

    def loop(model, kfac):
        z = model(make())
        kfac.observe(z)
        (0.5 * z.square().sum(-1).mean()).backward(retain_graph=True)
        return z

    return loop


def zero_scale(norm):
    """A norm whose outputs are zero: inputs are normalized for the statistics."""
    nn.init.zeros_(norm.weight)
    return norm


def frozen_later(model, kfac):
    """A batch norm that uses running statistics since `KFAC` was made."""
    model.eval()
    model[0].running_mean.normal_()
    model[0].running_var.uniform_(0.5, 2.0)
    return squares(randn(5, 4))(model, kfac)


PROGRAMS = {
    "linear": Program(
        model=lambda: nn.Sequential(nn.Linear(4, 3)), loop=squares(randn(8, 4))
    ),
    "no bias": Program(
        model=lambda: nn.Sequential(nn.Linear(4, 3, bias=False)),
        loop=squares(randn(8, 4)),
    ),
    "1d": convolution(lambda: nn.Conv1d(2, 3, 4), 4),
    "2d": convolution(lambda: nn.Conv2d(2, 3, (2, 3)), 2, 3),
    "3d": convolution(lambda: nn.Conv3d(1, 2, 2), 2, 2, 2, channels=1),
    "zeros": convolution(lambda: nn.Conv2d(2, 3, 3, padding=1, stride=3), 2, 2),
    "groups": convolution(
        lambda: nn.Conv1d(4, 6, 3, groups=2, dilation=2), 5, channels=4
    ),
    "circular": convolution(
        lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular", stride=3), 3, 3
    ),
    "reflect": convolution(
        lambda: nn.Conv1d(2, 3, 3, padding=1, padding_mode="reflect", stride=4), 4
    ),
    "replicate": convolution(
        lambda: nn.Conv1d(2, 3, 4, padding=1, padding_mode="replicate"), 2
    ),
    "several positions": convolution(lambda: nn.Conv2d(2, 3, 2, dilation=2), 4, 5),
    "transposed": convolution(lambda: nn.ConvTranspose1d(2, 3, 2, padding=1), 2),
    "transposed 2d": convolution(
        lambda: nn.ConvTranspose2d(2, 3, (3, 2), (2, 1), (2, 1)), 2, 2
    ),
    "transposed groups": convolution(
        lambda: nn.ConvTranspose1d(4, 6, 3, 2, 2, groups=2), 2, channels=4
    ),
    "transposed, more": convolution(
        lambda: nn.ConvTranspose1d(2, 3, 2, 2, 1, output_padding=1), 1
    ),
    "transposed, dilated": convolution(
        lambda: nn.ConvTranspose1d(2, 3, 2, 1, 2, dilation=3), 2
    ),
    "unbatched": Program(
        model=lambda: nn.Sequential(nn.Linear(4, 3), nn.Unflatten(0, (1, 3))),
        loop=squares(randn(4)),
    ),
    "unbatched convolution": unbatched(lambda: nn.Conv2d(2, 3, 2, padding=1), 3, 2),
    "unbatched, transposed": unbatched(lambda: nn.ConvTranspose1d(2, 3, 2, 2), 4),
    "unbatched, then a norm": Program(
        model=lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.LayerNorm(3)),
        loop=squares(randn(2, 3, 4)),
        diagonal=["1.weight", "1.bias"],
        options=TOKENS,
    ),
    "unbatched, between rows": Program(
        model=calling(
            around_rows,
            first=lambda: nn.Conv1d(2, 3, 2),
            rows=linear(3, 3),
            last=lambda: nn.Conv1d(3, 3, 2),
            out=linear(3, 2),
        ),
        loop=squares(randn(2, 6)),
        options=TOKENS,
    ),
    "unbatched, after rows": before_convolution(randn(6, 3), linear(3, 3)),
    "unbatched, after ids": before_convolution(
        some_ids(6), lambda: nn.Embedding(4, 3), diagonal=["first.weight"]
    ),
    "unbatched, after a bag": before_convolution(
        some_ids(6, 2),
        lambda: nn.EmbeddingBag(4, 3, mode="sum"),
        raises=(kc.UnsupportedError, "several rows for each example"),
    ),
    "unbatched, after a slope": before_convolution(
        randn(6, 3), nn.PReLU, diagonal=["first.weight"]
    ),
    "unbatched, after slopes": before_convolution(
        randn(6, 3), lambda: nn.PReLU(3), diagonal=["first.weight"]
    ),
    "unbatched, between convolutions": Program(
        model=lambda: nn.Sequential(
            nn.Conv2d(2, 3, 2), nn.PReLU(), nn.Conv2d(3, 2, 2), nn.Flatten(1)
        ),
        loop=squares(randn(2, 4, 5)),
        diagonal=["1.weight"],
        options=TOKENS,
    ),
    "unbatched, in a loop": Program(
        model=calling(
            one_by_one,
            first=lambda: nn.Conv1d(2, 3, 2),
            rows=linear(3, 3),
            out=linear(3, 2),
        ),
        loop=squares(randn(4, 2, 5)),
    ),
    "unbatched, 3d": unbatched(lambda: nn.Conv3d(2, 2, (2, 1, 2)), 3, 1, 2),
    "bilinear": Program(
        model=calling(
            lambda m, x: m.inner(x[:, :3], x[:, 3:]), inner=lambda: nn.Bilinear(3, 2, 4)
        ),
        loop=squares(randn(12, 5)),
    ),
    "low rank": Program(
        model=lambda: nn.Sequential(LowRank(), nn.Tanh(), nn.Linear(3, 2)),
        loop=squares(randn(8, 4)),
    ),
    "embedding": Program(
        model=lambda: nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2)),
        loop=squares(lambda: torch.tensor([0, 2, 2, 4])),
        diagonal=["0.weight"],
    ),
    "padding of an embedding": Program(
        model=lambda: nn.Sequential(nn.Embedding(5, 3, padding_idx=1)),
        loop=squares(lambda: torch.tensor([0, 2, 2, 4, 1, 0])),
        diagonal=["0.weight"],
    ),
    "ids of one example": ids(lambda m, x: m.ids(x).mean(0)[None], some_ids(6)),
    "ids, time first": ids(lambda m, x: m.ids(x).mean(0), some_ids(6, 4)),
    "ids, some of them padding": ids(
        lambda m, x: m.ids(x).mean(0), some_ids(6, 4), padding_idx=1
    ),
    "ids, flattened": ids(
        lambda m, x: m.ids(x.flatten()).unflatten(0, (4, 6)).mean(1), some_ids(4, 6)
    ),
    "ids, in a loop": ids(
        lambda m, x: torch.stack([m.ids(one).mean(0) for one in x]), some_ids(4, 3)
    ),
    "ids, called twice": ids(
        lambda m, x: m.ids(x[:, 0]) * m.ids(x[:, 1]), some_ids(6, 2)
    ),
    "ids, called twice with padding": ids(
        lambda m, x: m.ids(x[:, 0]) * (1 + m.ids(x[:, 1])),
        some_ids(6, 2),
        padding_idx=1,
    ),
    "bag, sum": Program(
        model=lambda: nn.Sequential(nn.EmbeddingBag(5, 3, mode="sum")),
        loop=squares(lambda: torch.tensor([[0, 2], [2, 2], [4, 1], [0, 4]])),
        diagonal=["0.weight"],
    ),
    "bag, mean": Program(
        model=lambda: nn.Sequential(nn.EmbeddingBag(5, 3, mode="mean")),
        loop=squares(lambda: torch.tensor([[0, 2], [2, 2], [4, 1], [0, 4]])),
        diagonal=["0.weight"],
    ),
    "bag, called in another way": Program(
        model=calling(
            lambda m, ids: m.two(m.bag(ids, torch.tensor([0, 1]))),
            bag=lambda: nn.EmbeddingBag(5, 3, mode="sum"),
            two=linear(3, 3),
        ),
        loop=squares(lambda: torch.tensor([0, 2, 2, 4])),
        skipped=["bag.weight"],
    ),
    "one slope": one_slope(randn(6, 3), linear(3, 2)),
    "one slope, several axes": one_slope(randn(6, 3, 2), nn.Flatten, linear(6, 2)),
    "one slope, one example": one_slope(
        randn(3), linear(3, 2), lambda: nn.Unflatten(0, (1, 2))
    ),
    "a slope for each channel": normalization(lambda: nn.PReLU(3), 6, 3),
    "layer norm": normalization(lambda: zero_scale(nn.LayerNorm(4)), 7, 4),
    "layer norm, time first": normalization(lambda: nn.LayerNorm(4), 7, 5, 4),
    "rms norm": normalization(lambda: nn.RMSNorm(4), 7, 4),
    "rms norm, time first": normalization(lambda: nn.RMSNorm(4), 7, 5, 4),
    "norm of another library": normalization(OnePlusNorm, 7, 4),
    "group norm": normalization(lambda: nn.GroupNorm(2, 6), 5, 6, 2, flat=True),
    "batch norm": normalization(lambda: zero_scale(nn.BatchNorm1d(6)), 5, 6),
    "batch norm 2d": normalization(lambda: nn.BatchNorm2d(6), 5, 6, 2, 1, flat=True),
    "running statistics": Program(
        model=lambda: nn.Sequential(nn.BatchNorm1d(4)),
        loop=frozen_later,
        diagonal=["0.weight", "0.bias"],
    ),
    "instance norm": normalization(
        lambda: nn.InstanceNorm1d(4, affine=True), 5, 4, 3, flat=True
    ),
    "attention to itself": attention(lambda x: (x, x, x)),
    "attention to a memory": attention(lambda x: (x, x.flip(2), x.flip(2))),
    "attention of three": attention(lambda x: (x, x.flip(2), x * 2)),
    "encoder": Program(
        model=calling(
            lambda m, x: m.head(m.layer(x).mean(1)),
            layer=lambda: nn.TransformerEncoderLayer(
                4, 2, 8, dropout=0.0, batch_first=True
            ),
            head=linear(4, 2),
        ),
        loop=squares(randn(3, 4, 4)),
        options={"skip_layers": ["LayerNorm"]},
        parts={f"layer.self_attn.in_proj_{p}": 3 for p in ("weight", "bias")},
        skipped=[f"layer.norm{i}.{p}" for i in (1, 2) for p in ("weight", "bias")],
    ),
    "stacked, indexed": stacked(by_expert(lambda m, x, e: x @ m.weight[e])),
    "stacked, indexed from the end": stacked(
        by_expert(lambda m, x, e: x @ m.weight[e - 3])
    ),
    "stacked, with biases": stacked(
        by_expert(lambda m, x, e: x @ m.weight[e] + m.bias[e]), biased=True
    ),
    "stacked, linear": stacked(
        by_expert(lambda m, x, e: fn.linear(x, m.weight[e].T, m.bias[e])), biased=True
    ),
    "stacked, in turn": stacked(taken_in_turn),
    "stacked, bmm": stacked(all_experts(lambda m, x: torch.bmm(x, m.weight))),
    "stacked, bmm with biases": stacked(
        all_experts(lambda m, x: torch.bmm(x, m.weight) + m.bias[:, None]), biased=True
    ),
    "stacked, from the left": stacked(
        all_experts(lambda m, x: torch.bmm(m.weight.mT, x.mT).mT)
    ),
    "stacked, einsum": stacked(
        all_experts(lambda m, x: torch.einsum("eti,eio->eto", x, m.weight))
    ),
    "stacked, einsum of the expert in the middle": stacked(
        lambda m, x: torch.einsum(
            "tei,eio->teo", x.unflatten(0, (-1, 3)), m.weight
        ).flatten(0, 1)
    ),
    "stacked, all rows to all experts": stacked(
        lambda m, x: torch.einsum("ti,eio->teo", x, m.weight).sum(1),
        skipped=["1.weight"],
    ),
    "stacked, gathered": stacked(
        lambda m, x: torch.bmm(x[:, None], m.weight[torch.arange(9) % 3])[:, 0],
        skipped=["1.weight"],
    ),
    "stacked, weights transposed as they are": stacked(
        all_experts(lambda m, x: torch.bmm(x, m.weight.mT))
    ),
    **{kind: recurrent(kind, last_state) for kind in ("LSTM", "GRU", "RNN")},
    **{
        kind: recurrent(kind, cell_by_cell)
        for kind in ("LSTMCell", "GRUCell", "RNNCell")
    },
    "a layer called twice": layers(twice),
    "a weight multiplied by the model itself": layers(by_itself),
    "a matrix and a vector transposed": layers(by_transposes),
    "within a checkpoint": layers(in_checkpoint),
    "within a reentrant checkpoint": layers(
        first_reentrant,
        observed(randn(7, 3)),
        options={"output": None},
        skipped=["one.weight", "one.bias"],
    ),
    "a reentrant checkpoint between layers": layers(
        tanh_reentrant, raises=(kc.UnsupportedError, "use_reentrant=False")
    ),
    "one weight in two modules": Program(
        model=Sharing, loop=squares(randn(6, 3)), skipped=["one.bias", "two.bias"]
    ),
    "an embedding that something else reads": Program(
        model=calling(
            by_the_embedding, ids=lambda: nn.Embedding(4, 3), mix=linear(3, 3)
        ),
        loop=classes(lambda: torch.randint(0, 4, (9,))),
        options=CATEGORICAL,
        skipped=["ids.weight"],
    ),
    "a hook that scales an output": layers(scaled_output),
    "arguments by name": Program(
        model=calling(
            by_name,
            spread=lambda: nn.ConvTranspose1d(1, 1, 3, stride=2),
            pair=lambda: nn.Bilinear(10, 10, 2, bias=False),
        ),
        loop=squares(randn(6, 4)),
    ),
    "tokens that read each other": layers(
        attending, squares(randn(5, 4, 3)), options=TOKENS
    ),
    "time first": layers(time_first, squares(randn(4, 6, 3))),
    "flattened tokens": layers(flattened, squares(randn(6, 4, 3))),
    "tokens": layers(twice, squares(randn(5, 3, 3)), options=TOKENS),
    "tokens of classes": layers(
        twice, classes(randn(5, 3, 3)), options={**CATEGORICAL, **TOKENS}
    ),
    "classes": layers(twice, classes(randn(7, 3)), options=CATEGORICAL),
    "a layer of another library": Program(
        model=lambda: nn.Sequential(Columns(), nn.Tanh(), Columns()),
        loop=squares(randn(8, 3)),
    ),
    "a layer registered as what it is not": Program(
        model=lambda: nn.Sequential(Columns(), nn.Tanh(), Scaled()),
        loop=squares(randn(8, 3)),
        raises=(kc.ConventionError, "its output is not its argument times `weight`"),
    ),
    "a registered layer within a checkpoint": Program(
        model=calling(
            lambda m, x: checkpoint(m.one, x, use_reentrant=False), one=Columns
        ),
        loop=squares(randn(8, 3)),
    ),
    "an expert without tokens": Program(
        model=calling(
            experts, first=linear(3, 3), second=linear(3, 3), third=linear(3, 3)
        ),
        loop=squares(randn(8, 3)),
        skipped=["third.weight", "third.bias"],
    ),
    "compiled": compiled("aot_eager", before=False),
    "compiled after another of its class": compiled("aot_eager", before=True),
    "interpreted by the compiler": compiled("eager", before=True),
    "weights that multiply each other": layers(
        lambda m, x: x @ (m.two.weight @ m.one.weight).T,
        skipped=["one.weight", "one.bias", "two.weight", "two.bias"],
        raises=(kc.NotReadyError, "no recorded call"),
    ),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_has_the_dense_directions(name):
    """Each block's direction after one step of the loop, or what it raises."""
    torch_zoo.run(PROGRAMS[name])


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_fused_kernels_of_float32_are_not_used(kind):
    """They would leave no matrix products in the graph."""
    torch.set_default_dtype(torch.float32)
    torch_zoo.run(PROGRAMS[kind], rtol=1e-3)
