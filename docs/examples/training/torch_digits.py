"""A convolutional classifier of handwritten digits in PyTorch: K-FAC beside Adam."""

from data import digits
from torch import nn
from torch_run import main


def build():
    """Return a network with two convolutions, one batch norm and two linear layers."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


OPTIONS = {
    "fisher": "gradients",
    "kl_clip": None,
    "damping": 0.1,
    "damping_rule": "factored",
    "decay": 0.95,
    "update_every": 2,
    "refresh_every": 10,
}

PROBLEM = {
    "build": build,
    "data": digits(),
    "steps": 150,
    "size": 128,
    "options": OPTIONS,
}

if __name__ == "__main__":
    main("A convolutional classifier on digits", "torch_digits.png", **PROBLEM)
