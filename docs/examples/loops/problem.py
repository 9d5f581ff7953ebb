"""What the loops of this folder train: a small classifier on patterns."""

import torch
from torch import nn


def data(examples=256):
    """Return inputs of 16 numbers, and which quarter of them is the largest."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(examples, 16, generator=generator)
    return inputs, inputs.reshape(examples, 4, 4).sum(-1).argmax(-1)


def network():
    """Return the same network each time."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32),
        nn.Tanh(),
        nn.Linear(32, 32),
        nn.LayerNorm(32),
        nn.Tanh(),
        nn.Linear(32, 4),
    )


def same(first, second):
    """Return whether two models have the same parameters to the bit."""
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return all(torch.equal(p, q) for p, q in pairs)


def distance(first, second):
    """Return the relative distance of two models' parameters."""
    pairs = [*zip(first.parameters(), second.parameters(), strict=True)]
    apart = sum(float((p.detach() - q.detach()).square().sum()) for p, q in pairs)
    size = sum(float(p.detach().square().sum()) for p, _ in pairs)
    return (apart / size) ** 0.5
