"""Activation checkpointing: layers run again on the way back, and count once.

Needs `pip install torch`.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector
from torch.utils.checkpoint import checkpoint_sequential

from kfac_core_shims.torch import KFAC


def data():
    """Return inputs of 16 numbers, and which quarter of them has the largest sum."""
    torch.manual_seed(0)
    inputs = torch.randn(256, 16)
    return inputs, inputs.reshape(256, 4, 4).sum(-1).argmax(-1)


def network():
    """Return the same network each time."""
    torch.manual_seed(0)
    layers = nn.Linear(16, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 4)
    return nn.Sequential(*layers)


class Checkpointed(nn.Module):
    """A network in two segments, whose activations are not kept."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        # With use_reentrant=True the layers are not seen, and a warning names them.
        return checkpoint_sequential(self.inner, 2, x, use_reentrant=False)


def train(model, steps=20):
    """Train, and return the last loss."""
    inputs, labels = data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kfac = KFAC(model, lr=optimizer)
    for step in range(steps):
        rows = torch.arange(64) + 64 * (step % 4)
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs[rows]), labels[rows])
        loss.backward()
        kfac.step()
        optimizer.step()
    return float(loss.detach())


def main():
    """Compare with the network as it is."""
    plain, segmented = network(), Checkpointed(network())
    loss = train(plain)
    train(segmented)
    p, q = (parameters_to_vector(model.parameters()) for model in (plain, segmented))
    apart = ((p - q).norm() / p.norm()).item()
    print(f"loss {loss:.3g}; with and without checkpoints are {apart:.1e} apart")
    assert apart < 1e-5


if __name__ == "__main__":
    main()
