"""torch.compile: KFAC is created before the compiled model is first called.

Needs `pip install torch`, and a C++ compiler for the compiled run; elsewhere pass
``--backend eager``.
"""

import argparse

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


def train(backend, steps=20):
    """Train, compiled by a backend or not at all, and return the network."""
    inputs, labels = data()
    plain = network()
    model = plain if backend is None else torch.compile(plain, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kfac = KFAC(model, lr=optimizer, fisher="exact")
    for step in range(steps):
        rows = torch.arange(64) + 64 * (step % 4)
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs[rows]), labels[rows])
        loss.backward()
        kfac.step()
        optimizer.step()
    return plain, float(loss.detach())


def main():
    """Compare with a run that is not compiled."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="inductor")
    plain, loss = train(None)
    compiled, _ = train(parser.parse_args().backend)
    p, q = (parameters_to_vector(model.parameters()) for model in (plain, compiled))
    apart = ((p - q).norm() / p.norm()).item()
    print(f"loss {loss:.3g}; compiled and not are {apart:.1e} apart")
    assert apart < 1e-3


if __name__ == "__main__":
    main()
