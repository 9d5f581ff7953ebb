"""Gradient accumulation: the passes before a step are one batch.

Needs `pip install torch`.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

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


def train(parts, steps=20):
    """Train on batches of 64 in a number of parts, and return the network."""
    inputs, labels = data()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # Sums over all labels, so that both runs have the same curvature.
    kfac = KFAC(model, lr=optimizer, fisher="exact")
    for step in range(steps):
        rows = torch.arange(64) + 64 * (step % 4)
        optimizer.zero_grad()
        for part in rows.chunk(parts):
            loss = cross_entropy(model(inputs[part]), labels[part])
            (loss * len(part) / len(rows)).backward()
        kfac.step()
        optimizer.step()
    return model, float(loss.detach())


def main():
    """Compare four parts with one."""
    whole, loss = train(1)
    parts, _ = train(4)
    p, q = (parameters_to_vector(model.parameters()) for model in (whole, parts))
    apart = ((p - q).norm() / p.norm()).item()
    print(f"loss {loss:.3g}; four parts and one are {apart:.1e} apart")
    assert apart < 1e-3


if __name__ == "__main__":
    main()
