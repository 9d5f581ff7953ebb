"""Write records of the space of samples, by plain autograd of PyTorch in float64.

    python conformance_tests/builders/sample_records.py conformance_tests/records/samples

Nothing of kfac_core is imported: J has a row for each output, from a backward pass of its
own, and directions are dense solves in the space of parameters.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import nn

torch.set_default_dtype(torch.float64)


class Images(nn.Module):
    """A convolution, a normalization and a linear layer, with an embedding of a label."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 2)
        self.words = nn.Embedding(4, 3)
        self.norm = nn.LayerNorm(11)
        self.last = nn.Linear(11, 2, bias=False)

    def forward(self, images, ids):
        h = torch.tanh(self.conv(images)).flatten(1)
        return self.last(self.norm(torch.cat([h, self.words(ids)], 1)))


class Tokens(nn.Module):
    """Linear layers with shared positions, whose mean is the output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x))).mean(1)


def layer_of(module):
    """Return the description of a layer, and the names of its parameters there."""
    if isinstance(module, nn.Linear):
        layer = {
            "kind": "dense",
            "in_features": module.in_features,
            "out_features": module.out_features,
            "bias": module.bias is not None,
            "weight_layout": "oi",
        }
    elif isinstance(module, nn.Conv2d):
        layer = {
            "kind": "conv",
            "in_channels": module.in_channels,
            "out_channels": module.out_channels,
            "kernel_size": list(module.kernel_size),
            "padding": "valid",
            "bias": True,
            "weight_layout": "oi_spatial",
            "data_layout": "channels_first",
        }
    elif isinstance(module, nn.Embedding):
        layer = {
            "kind": "embedding",
            "num_embeddings": module.num_embeddings,
            "features": module.embedding_dim,
            "weight_layout": "io",
        }
    else:
        shape = list(module.normalized_shape)
        layer = {"kind": "scale_shift", "scale_shape": shape, "shift_shape": shape}
        return layer, {"weight": "scale", "bias": "shift"}
    return layer, {"weight": "weight", "bias": "bias"}


def write(path, network, data, *, damping, momentum, seed):
    """Write the record of a network's outputs, which are the residuals."""
    calls = {}

    def record(name):
        def hook(module, inputs, output):
            x = inputs[0]
            if isinstance(module, nn.LayerNorm):
                x = nn.functional.layer_norm(x, module.normalized_shape)
            calls[name] = x.detach(), output

        return hook

    modules = dict(network.named_children())
    for name, module in modules.items():
        module.register_forward_hook(record(name))
    r = network(*data)
    N, M = r.shape
    parameters = dict(network.named_parameters())
    rows = [
        torch.cat(
            [
                g.flatten()
                for g in torch.autograd.grad(
                    r[n, m], [*parameters.values()], retain_graph=True
                )
            ]
        )
        for n in range(N)
        for m in range(M)
    ]
    J, P = torch.stack(rows), sum(p.numel() for p in parameters.values())
    phi = torch.randn(P, generator=torch.Generator().manual_seed(seed))
    residuals = r.detach().flatten()
    right = J.T @ (residuals - momentum * J @ phi) / N
    d = torch.linalg.solve(J.T @ J / N + damping * torch.eye(P), right)
    vectors = {"expected.samples.direction": d + momentum * phi}
    if momentum:
        vectors["samples.last"] = phi
    tensors = {"samples.residuals": r.detach(), "expected.samples.gram": J @ J.T}
    blocks = {}
    for name, module in modules.items():
        layer, names = layer_of(module)
        blocks[name] = {"layer": layer, "approximation": {"name": "full"}}
        x, output = calls[name]
        sources = [
            torch.autograd.grad(r[:, m].sum(), output, retain_graph=True)[0]
            for m in range(M)
        ]
        tensors[f"update.0.{name}.inputs"] = x
        tensors[f"update.0.{name}.output_grads"] = torch.stack(sources)
        for prefix, vector in vectors.items():
            parts = dict(
                zip(
                    parameters,
                    vector.split([p.numel() for p in parameters.values()]),
                    strict=True,
                )
            )
            for key, p in module.named_parameters():
                tensors[f"{prefix}.{name}.{names[key]}"] = parts[
                    f"{name}.{key}"
                ].reshape(p.shape)
    document = {
        "format": "kfac_core.record",
        "version": 1,
        "producer": f"autograd of PyTorch {torch.__version__}, sample_records.py",
        "blocks": blocks,
        "updates": 1,
        "ema": {"decay": 0.0, "weight": 1.0, "debias": True},
        "checks": [],
        "samples": {"damping": damping, "momentum": momentum},
    }
    arrays = {k: np.ascontiguousarray(v.numpy()) for k, v in tensors.items()}
    save_file(arrays, path, metadata={"kfac_core_record": json.dumps(document)})


def main(folder: Path) -> None:
    """Write a record with fewer residuals than parameters, and one with more."""
    torch.manual_seed(0)
    few = torch.randn(5, 1, 3, 3), torch.tensor([0, 1, 3, 1, 2])
    write(
        folder / "autograd_images.safetensors",
        Images(),
        few,
        damping=1e-3,
        momentum=0.9,
        seed=1,
    )
    write(
        folder / "autograd_tokens.safetensors",
        Tokens(),
        (torch.randn(40, 4, 3),),
        damping=1e-2,
        momentum=0.0,
        seed=2,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
