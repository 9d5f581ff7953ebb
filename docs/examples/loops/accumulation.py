"""Gradient accumulation: the passes before a step are one batch.

Needs `pip install torch`.
"""

import torch
from problem import data, distance, network
from torch.nn.functional import cross_entropy

from kfac_core_shims.torch import KFAC


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
    apart = distance(whole, parts)
    print(f"loss {loss:.3g}; four parts and one are {apart:.1e} apart")
    assert apart < 1e-3


if __name__ == "__main__":
    main()
