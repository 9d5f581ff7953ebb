"""The tasks: a network, batches, a loss, and what is measured.

Data are shipped with scikit-learn or Python, or made.  A task is built for a seed, which
decides the network's first parameters and the order of the batches, and nothing else.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as fn

CONTEXT = 32


@dataclass(kw_only=True)
class Problem:
    """A network with its data.

    Attributes
    ----------
    network : torch.nn.Module
        What is trained.
    loss : callable
        ``loss(network, x, y)``, the mean loss of a batch.
    train, test : tuple of torch.Tensor
        Inputs and targets.
    likelihood : object
        What `KFAC` is told.
    metric : callable
        ``metric(network, x, y)`` of the test data: less is better.
    batch : int
        Examples of a batch.
    floor : float
        Least loss that any network can have on the training data.
    measured : int
        Training examples that the loss is measured on, the first ones.
    """

    network: Any
    loss: Callable[[Any, Any, Any], Any]
    train: tuple[Any, Any]
    test: tuple[Any, Any]
    likelihood: Any
    metric: Callable[[Any, Any, Any], Any]
    batch: int = 128
    floor: float = 0.0
    measured: int = 4096

    def batches(self, seed: int) -> Iterator[tuple[Any, Any]]:
        """Yield batches of the training data for ever, shuffled in each epoch."""
        generator = torch.Generator().manual_seed(seed)
        x, y = self.train
        while True:
            order = torch.randperm(len(x), generator=generator)
            for rows in order.split(min(self.batch, len(x))):
                if len(rows) == min(self.batch, len(x)):
                    yield x[rows], y[rows]

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float]:
        """Return the loss above the floor on all training data, and the test metric."""
        self.network.eval()
        x, y = (data[: self.measured] for data in self.train)
        y = y.double() if y.is_floating_point() else y

        def outputs(x: Any) -> Any:
            # In float32 the loss of an example below 6e-8 is zero.
            return self.network(x).double()

        loss = float(self.loss(outputs, x, y)) - self.floor
        metric = float(self.metric(self.network, *self.test))
        self.network.train()
        return loss, metric


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task of the suite.

    Attributes
    ----------
    title : str
        What the tables call it.
    kind : str
        "classifier", "recurrent", "transformer", "fit" or "equation": what a recipe is
        chosen by.
    build : callable
        ``build(width) -> Problem``, after the seed of PyTorch was set; the width of hidden
        layers, or of the first convolution, has a default.
    seconds : float
        CPU seconds of training.
    useful : float
        A loss, above the floor, that is good enough for most purposes.
    aside : bool
        Whether no default was chosen on it.
    full_batch : bool
        Whether L-BFGS on all training data is apt.
    one_output : bool
        Whether residuals are one for each example, so that their space is small.
    """

    title: str
    kind: str
    build: Callable[..., Problem]
    seconds: float = 1.0
    useful: float = 0.01
    aside: bool = False
    full_batch: bool = False
    one_output: bool = False


def _halves(x: Any, y: Any, test: int) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Shuffle and split into training and test data."""
    order = np.random.default_rng(0).permutation(len(x))
    x, y = torch.from_numpy(x[order]), torch.from_numpy(y[order])
    return (x[test:], y[test:]), (x[:test], y[:test])


def _digits() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return scikit-learn's digits, of shape (n, 8, 8), in [0, 1]."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    x = (x.reshape(-1, 8, 8) / 16.0).astype(np.float32)
    return _halves(x, y.astype(np.int64), 360)


def _dense(*widths: int, activation: type[nn.Module] = nn.Tanh) -> list[nn.Module]:
    """Return linear layers of these widths with an activation between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), activation()]
    return layers[:-1]


def _error(network: Any, x: Any, y: Any) -> Any:
    """Return the share of rows whose likeliest class is wrong."""
    return (network(x).argmax(-1) != y).float().mean()


def _cross_entropy(network: Any, x: Any, y: Any) -> Any:
    return fn.cross_entropy(network(x), y)


def _classifier(network: Any, *, batch: int = 128, data: Any = None) -> Problem:
    train, test = data or _digits()
    return Problem(
        network=network,
        loss=_cross_entropy,
        train=train,
        test=test,
        likelihood=nn.CrossEntropyLoss(),
        metric=_error,
        batch=batch,
    )


def dense(width: int = 128) -> Problem:
    """Build three hidden layers of tanh."""
    return _classifier(nn.Sequential(nn.Flatten(), *_dense(64, *3 * (width,), 10)))


def convolutions(width: int = 16) -> Problem:
    """Build two convolutions and a linear layer."""
    network = nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * width, 10),
    )
    return _classifier(network)


class _Residual(nn.Module):
    """Two convolutions with batch norm, beside the identity."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Any) -> Any:
        """Add what the convolutions make of x to x."""
        return fn.relu(x + self.inner(x))


def residual(width: int = 16) -> Problem:
    """Build two residual blocks with batch norm."""
    network = nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv2d(1, width, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        _Residual(width),
        _Residual(width),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )
    return _classifier(network)


class _Attention(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        """Attend, then transform each position."""
        n, t, d = x.shape
        qkv = self.qkv(self.before(x)).view(n, t, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = fn.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, t, d))
        return x + self.down(fn.gelu(self.up(self.between(x))))


class _Transformer(nn.Module):
    """Blocks over embedded positions; a mean over them, or outputs at each."""

    def __init__(
        self, embed: Any, positions: int, width: int, outputs: int, *, causal: bool
    ) -> None:
        super().__init__()
        self.embed, self.causal = embed, causal
        self.embed_place = nn.Embedding(positions, width)
        self.blocks = nn.Sequential(
            *(_Attention(width, 4, causal=causal) for _ in range(2))
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs)

    def forward(self, x: Any) -> Any:
        """Return logits."""
        places = self.embed_place(torch.arange(x.shape[1]))
        h = self.norm(self.blocks(self.embed(x) + places))
        return self.head(h if self.causal else h.mean(1))


def encoder(width: int = 32) -> Problem:
    """Build a transformer encoder over the rows of a digit."""
    return _classifier(_Transformer(nn.Linear(8, width), 8, width, 10, causal=False))


def characters(width: int = 64) -> Problem:
    """Build a GPT over the characters of Python's help texts."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    alphabet = {c: i for i, c in enumerate("\n" + "".join(map(chr, range(32, 127))))}
    ids = np.array([alphabet.get(c, 1) for c in text[: 1 + CONTEXT * 3000]])
    train, test = _halves(
        ids[:-1].reshape(-1, CONTEXT), ids[1:].reshape(-1, CONTEXT), 300
    )
    embed = nn.Embedding(len(alphabet), width)
    network = _Transformer(embed, CONTEXT, width, len(alphabet), causal=True)

    def loss(network: Any, x: Any, y: Any) -> Any:
        return fn.cross_entropy(network(x).flatten(0, 1), y.flatten())

    return Problem(
        network=network,
        loss=loss,
        train=train,
        test=test,
        likelihood="categorical",
        metric=loss,
        batch=32,
        measured=500,
    )


def _autoencoder(likelihood: Any, width: int, *, logits: bool) -> Problem:
    (x, _), (x_test, _) = _digits()
    x, x_test = x.flatten(1), x_test.flatten(1)
    half = width, width // 2, width // 4
    widths = 64, *half, 8, *half[::-1], 64
    network = nn.Sequential(*_dense(*widths), *([] if logits else [nn.Sigmoid()]))

    def loss(network: Any, x: Any, y: Any) -> Any:
        return likelihood(network(x), y)

    floor = 0.0
    if logits:
        floor = float(fn.binary_cross_entropy(x, x))
    return Problem(
        network=network,
        loss=loss,
        train=(x, x),
        test=(x_test, x_test),
        likelihood=likelihood,
        metric=loss,
        floor=floor,
    )


def autoencoder(width: int = 128) -> Problem:
    """Build a deep autoencoder, with the mean squared error."""
    return _autoencoder(nn.MSELoss(), width, logits=False)


def autoencoder_logits(width: int = 128) -> Problem:
    """Build the same with the cross-entropy of pixels."""
    return _autoencoder(nn.BCEWithLogitsLoss(), width, logits=True)


def _fit(
    network: Any, x: Any, y: Any, *, batch: int = 128, likelihood: Any = None
) -> Problem:
    likelihood = likelihood or nn.MSELoss()

    def loss(network: Any, x: Any, y: Any) -> Any:
        return likelihood(network(x), y)

    train, test = _halves(x.astype(np.float32), y.astype(np.float32), len(x) // 4)
    return Problem(
        network=network,
        loss=loss,
        train=train,
        test=test,
        likelihood=likelihood,
        metric=loss,
        batch=batch,
    )


def regression(width: int = 64) -> Problem:
    """Build a smooth function of six numbers."""
    x = np.random.default_rng(1).uniform(-1, 1, (2000, 6))
    y = (
        np.sin(3 * x[:, 0] * x[:, 1])
        + x[:, 2] ** 2 * x[:, 3]
        + np.cos(2 * x[:, 4:].sum(1))
    )
    return _fit(nn.Sequential(*_dense(6, width, width, 1)), x, y[:, None])


def multilabel(width: int = 128) -> Problem:
    """Build twelve labels of an example, each there or not."""
    from sklearn.datasets import make_multilabel_classification

    x, y = make_multilabel_classification(
        1600, 40, n_classes=12, n_labels=4, random_state=0
    )
    network = nn.Sequential(*_dense(40, width, width, 12, activation=nn.ReLU))
    return _fit(network, x / 4.0, y, likelihood=nn.BCEWithLogitsLoss())


class _Jets(nn.Module):
    """Residuals of Poisson's equation at points inside, and of the values on the edge.

    Layers compute the value of each unit, its first derivatives and its Laplacian with
    one weight; the bias, which acts on the value alone, is a column of it.
    """

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(i + 1, o, bias=False) for i, o in itertools.pairwise(widths)
        )

    def jet(self, x: Any) -> Any:
        """Return u, its gradient and its Laplacian, shape (n, d + 2)."""
        n, d = x.shape
        jet, one = x.new_zeros(n, d + 2, d), x.new_zeros(n, d + 2, 1)
        jet[:, 0], jet[:, 1:-1], one[:, 0] = x, torch.eye(d).to(x), 1.0
        for i, layer in enumerate(self.layers):
            if i:
                u = torch.tanh(jet[:, :1])
                slope, first = 1.0 - u * u, jet[:, 1:-1]
                bent = jet[:, -1:] - 2.0 * u * first.square().sum(1, keepdim=True)
                jet = torch.cat([u, slope * first, slope * bent], 1)
            jet = layer(torch.cat([jet, one], -1))
        return jet[..., 0]

    def forward(self, points: Any) -> Any:
        """Return residuals, shape (n, 1); the last column says what is on the edge."""
        x, edge = points[:, :-1], points[:, -1]
        jet, wanted = self.jet(x), torch.sin(math.pi * x).prod(1)
        inside = (jet[:, -1] / (2 * math.pi**2) + wanted) * (1 - edge)
        return (inside + edge * (jet[:, 0] - wanted) * 2)[:, None]


def poisson(width: int = 48) -> Problem:
    """Build Poisson's equation on the unit square, at fixed points."""
    rng = np.random.default_rng(2)
    points = np.c_[rng.uniform(size=(1200, 2)), np.zeros(1200)]
    edge = rng.integers(4, size=300)
    points[:300, 2] = 1.0
    points[np.arange(300), edge % 2] = edge // 2
    problem = _fit(_Jets(2, width, width, 1), points, np.zeros((1200, 1)), batch=900)

    def relative_error(network: Any, x: Any, y: Any) -> Any:
        wanted = torch.sin(math.pi * x[:, :2]).prod(1)
        return (network.jet(x[:, :2])[:, 0] - wanted).norm() / wanted.norm()

    problem.metric = relative_error
    return problem


class _Recurrent(nn.Module):
    """An LSTM over the rows of an image, and a linear layer of its last state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(8, width, batch_first=True), nn.Linear(width, 10)

    def forward(self, x: Any) -> Any:
        """Return logits."""
        return self.head(self.cell(x)[0][:, -1])


def recurrent(width: int = 48) -> Problem:
    """Build an LSTM that reads a digit row by row."""
    return _classifier(_Recurrent(width))


def cancer(width: int = 64) -> Problem:
    """Build a small table of measurements, two classes, small batches."""
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    x = ((x - x.mean(0)) / x.std(0)).astype(np.float32)
    data = _halves(x, y.astype(np.int64), 120)
    network = nn.Sequential(*_dense(30, width, width, 2, activation=nn.ReLU))
    return _classifier(network, batch=32, data=data)


def wide(width: int = 256) -> Problem:
    """Build a wide network of ReLU with layer normalization."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs in (64, width, width):
        layers += [nn.Linear(inputs, width), nn.LayerNorm(width), nn.ReLU()]
    return _classifier(nn.Sequential(*layers, nn.Linear(width, 10)), batch=256)


def teacher(width: int = 128) -> Problem:
    """Build a network that is fitted to another one, of ReLU."""
    generator = torch.Generator().manual_seed(3)
    other = nn.Sequential(*_dense(20, 40, 40, 5, activation=nn.ReLU))
    with torch.no_grad():
        for p in other.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / p.shape[-1] ** 0.5)
        x = torch.randn(3000, 20, generator=generator)
        y = other(x)
    network = nn.Sequential(*_dense(20, width, width, 5, activation=nn.ReLU))
    return _fit(network, x.numpy(), y.numpy())


def denoising(width: int = 12) -> Problem:
    """Build a convolutional autoencoder of noisy digits."""
    (x, _), _ = _digits()
    noisy = x + 0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(4))
    network = nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv2d(1, width, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(8 * width, 64),
    )
    return _fit(network, noisy.numpy(), x.flatten(1).numpy())


TASKS: dict[str, Task] = {
    "dense": Task(title="digits, dense", kind="classifier", build=dense),
    "convolutions": Task(
        title="digits, convolutions", kind="classifier", build=convolutions, seconds=1.5
    ),
    "residual": Task(
        title="digits, residual, batch norm",
        kind="classifier",
        build=residual,
        seconds=2.5,
    ),
    "recurrent": Task(
        title="digits, LSTM", kind="recurrent", build=recurrent, seconds=1.5
    ),
    "encoder": Task(
        title="digits, transformer encoder",
        kind="transformer",
        build=encoder,
        seconds=2.0,
        useful=0.03,
    ),
    "characters": Task(
        title="characters, GPT",
        kind="transformer",
        build=characters,
        seconds=4.0,
        useful=2.5,
    ),
    "autoencoder": Task(
        title="autoencoder, MSELoss", kind="fit", build=autoencoder, full_batch=True
    ),
    "autoencoder-logits": Task(
        title="autoencoder, BCEWithLogitsLoss",
        kind="fit",
        build=autoencoder_logits,
        useful=0.05,
        full_batch=True,
    ),
    "regression": Task(
        title="regression of six numbers",
        kind="fit",
        build=regression,
        full_batch=True,
        one_output=True,
    ),
    "multilabel": Task(
        title="twelve labels", kind="classifier", build=multilabel, useful=0.05
    ),
    "poisson": Task(
        title="Poisson's equation",
        kind="equation",
        build=poisson,
        seconds=3.0,
        useful=1e-4,
        full_batch=True,
        one_output=True,
    ),
    "cancer": Task(
        title="breast cancer, batches of 32",
        kind="classifier",
        build=cancer,
        seconds=0.7,
    ),
    "wide": Task(
        title="digits, ReLU and layer norm",
        kind="classifier",
        build=wide,
        seconds=2.0,
        aside=True,
    ),
    "teacher": Task(
        title="teacher and student",
        kind="fit",
        build=teacher,
        aside=True,
        full_batch=True,
    ),
    "denoising": Task(
        title="denoising, convolutions",
        kind="fit",
        build=denoising,
        seconds=1.5,
        aside=True,
        full_batch=True,
    ),
}
"""Tasks by name; those set aside last."""
