"""Autocast: the model computes in bfloat16, and the curvature in float32.

Needs `pip install torch`.  On a GPU with float16 a gradient scaler is needed too:
``KFAC(model, grad_scaler=scaler)``, and ``scaler.unscale_(optimizer)`` before
``kfac.step()``.  The scaler of this program is the same without a GPU.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

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


def main(steps=40):
    """Train in bfloat16, with the loss scaled."""
    inputs, labels = data()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    kfac = KFAC(model, lr=optimizer, grad_scaler=scaler)
    for step in range(steps):
        rows = torch.arange(64) + 64 * (step % 4)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = cross_entropy(model(inputs[rows]), labels[rows])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        kfac.step()
        scaler.step(optimizer)
        scaler.update()
    dtypes = {p.grad.dtype for p in model.parameters()}
    print(f"loss {float(loss.detach()):.3g}, gradients {dtypes}")
    assert float(loss.detach()) < 0.2
    assert dtypes == {torch.float32}


if __name__ == "__main__":
    main()
