"""Rows and blocks of linear layers, for the programs that call the estimator themselves."""

from __future__ import annotations

import functools

import torch

import kfac_core as kc


class Recorded:
    """The inputs and output gradients of a model's linear layers, by hooks."""

    def __init__(self, model):
        self.layers = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear)
        }
        self.batches = {}
        for name, module in self.layers.items():
            module.register_forward_hook(functools.partial(self.forward, name))

    def forward(self, name, module, inputs, output):
        x = inputs[0].detach()
        output.register_hook(
            lambda g: self.batches.__setitem__(name, kc.Batch(x, g.detach()))
        )

    def taken(self):
        """Return the batches of the last backward pass, and forget them."""
        batches, self.batches = self.batches, {}
        return batches


def blocks_of(recorded):
    """Return a block of K-FAC for each linear layer."""
    return {
        name: kc.Block(
            kc.Dense(
                in_features=layer.in_features,
                out_features=layer.out_features,
                bias=True,
                weight_layout="oi",
            ),
            kc.Kronecker(),
        )
        for name, layer in recorded.layers.items()
    }
