"""curvlinops (PyTorch) behind the adapter of the conformance kit.

    kfac-core conformance --adapter docs/examples/adapters/curvlinops_adapter.py:Curvlinops

curvlinops takes a whole model and a data loader, and gives one operator over all
parameters.  What is translated:

* PyTorch's squared error has no 1/2 before it, and its mean is over outputs, too;
* with ``reduction="sum"`` the curvature is that of the sum over the data, and with
  ``"mean"`` that of the mean over all output positions, while the kit asks for the mean
  over examples of the sum over positions.

With k the ratio of the two, ``H = k F``, the damped inverse is ``k (H + k damping
I)^-1``, by the factored rule as well.
"""

from __future__ import annotations

import importlib.metadata

import numpy as np
import torch
from curvlinops import (
    EKFACLinearOperator,
    KFACInverseLinearOperator,
    KFACLinearOperator,
)

from kfac_core_conformance import Capabilities, NotOfferedError


class Curvlinops:
    name = "curvlinops"
    version = importlib.metadata.version("curvlinops-for-pytorch")
    capabilities = Capabilities(
        weight_layout="oi",
        bias_position="after",
        layers=("dense", "conv"),
        losses=("mse", "ce"),
        estimations=("ggn", "empirical"),
        approximations=("kronecker", "eigen"),
        sharing=("expand", "reduce"),
        reductions=("sum", "mean", "mean_rows"),
        dtypes=("float64", "float32"),
        damping_rules=("factored", "exact"),
        parts=True,
    )

    def blocks(self, problem):
        operator, k = operator_of(problem)
        total = sum(p.numel() for p in operator._params)
        dense = operator @ torch.eye(total, dtype=getattr(torch, problem.dtype))
        blocks, start = [], 0
        for layer in problem.network.layers:
            end = start + layer.matrix.size
            blocks.append(dense[start:end, start:end].numpy() / k)
            start = end
        return blocks

    def multiply(self, problem, vectors):
        operator, k = operator_of(problem)
        return applied(operator, problem, vectors, 1 / k)

    def multiply_inverse(self, problem, vectors, *, damping, rule):
        operator, k = operator_of(problem)
        inverse = KFACInverseLinearOperator(
            operator,
            damping=k * damping,
            use_exact_damping=rule == "exact",
            use_heuristic_damping=rule == "factored",
            # Its default of 1e-8 is damping that nobody asked for.
            min_damping=0.0,
        )
        return applied(inverse, problem, vectors, k)


class Model(torch.nn.Module):
    """The problem's network, which takes and gives features (channels) last."""

    def __init__(self, network):
        super().__init__()
        self.network = network
        self.layers = torch.nn.ModuleList()
        for layer in network.layers:
            sizes = (layer.in_features, layer.out_features)
            if layer.kind == "conv":
                module = torch.nn.Conv2d(*sizes, layer.kernel_size, bias=layer.bias)
            else:
                module = torch.nn.Linear(*sizes, bias=layer.bias)
            for name, values in layer.parameters(layer.matrix, "oi").items():
                setattr(module, name, torch.nn.Parameter(tensor(values)))
            self.layers.append(module)

    def forward(self, x):
        network = self.network
        for k, module in enumerate(self.layers):
            if isinstance(module, torch.nn.Conv2d):
                x = module(x.movedim(-1, 1)).movedim(1, -1)
            else:
                x = module(x)
            if network.activation == "tanh" and k + 1 < len(self.layers):
                x = torch.tanh(x)
            if k == network.reduce_after:
                axes = tuple(range(1, x.ndim - 1))
                x = x.mean(axes) if network.reduction == "mean" else x.sum(axes)
        return x


def operator_of(problem):
    """Return the operator, and how many times ours it is."""
    [data] = problem.updates
    N, S = len(data.inputs), problem.output_positions(data)
    if problem.reduction == "mean" and S > 1:
        raise NotOfferedError("no loss of PyTorch is a mean over examples alone")
    reduction = "sum" if problem.reduction == "sum" else "mean"
    if problem.loss == "mse":
        loss, k = torch.nn.MSELoss(reduction=reduction), 2.0
        if problem.estimation == "empirical":
            k = 4.0
        if reduction == "mean":
            # Once, for the empirical Fisher matrix too, of which one might expect the
            # square: the factor of the mean is outside of the outer products.
            k /= data.targets.shape[-1]
    else:
        loss, k = torch.nn.CrossEntropyLoss(reduction=reduction), 1.0
    k *= N if reduction == "sum" else 1 / S
    model = Model(problem.network)
    kind = {"kronecker": KFACLinearOperator, "eigen": EKFACLinearOperator}
    operator = kind[problem.approximation](
        model,
        loss,
        list(model.parameters()),
        [(tensor(x), targets(problem, t)) for x, t in problem.split(data)],
        check_deterministic=False,
        fisher_type={"ggn": "type-2", "empirical": "empirical"}[problem.estimation],
        kfac_approx=problem.sharing,
        separate_weight_and_bias=False,
    )
    return operator, k


def targets(problem, values):
    if problem.loss == "mse":
        return tensor(values)
    return torch.from_numpy(np.argmax(values, axis=-1))


def applied(operator, problem, vectors, scale):
    """Return an operator times a vector, layer by layer."""
    flat = [tensor(x) for parameters in vectors for x in parameters.values()]
    products = iter(operator @ flat)
    return [
        {name: scale * next(products).detach().numpy() for name in parameters}
        for parameters in vectors
    ]


def tensor(values):
    return torch.from_numpy(np.array(values))
