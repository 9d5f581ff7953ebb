"""Kronecker factors of layers by the definition, in float64 and one row at a time."""

from __future__ import annotations

import torch
from torch.nn import functional as fn


def root_of_hessian(z):
    """Return B with ``B B^T`` the Hessian of one row's cross-entropy."""
    p = torch.softmax(z.detach(), 0)
    values, vectors = torch.linalg.eigh(torch.diag(p) - torch.outer(p, p))
    return vectors * values.clamp(min=0).sqrt()


def jacobians(model, x):
    """Return the derivatives of outputs by each parameter that is trained, (N, P, ...)."""
    params = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}

    def outputs(params, x):
        return torch.func.functional_call(model, params, (x[None],))[0]

    return torch.func.vmap(torch.func.jacrev(outputs), (None, 0))(params, x)


def softmax_hessians(z):
    """Return the Hessians of each row's cross-entropy, (N, P, P)."""
    p = torch.softmax(z.detach(), -1)
    return torch.diag_embed(p) - p[:, :, None] * p[:, None, :]


def by_hand(calls, z, weight=None, labels=None):
    """Return A and G of a linear layer with a bias, from the rows of its calls.

    `calls` are pairs of inputs and outputs; `z` are the outputs (N, P) of the network.
    With `labels` G is that of the loss's own gradients.
    """
    x = torch.cat([x.reshape(-1, x.shape[-1]) for x, _ in calls]).double().detach()
    x = torch.cat([x, torch.ones(len(x), 1)], 1)
    weight = torch.ones(len(z)) if weight is None else weight
    G = 0.0
    for n, row in enumerate(z):
        columns = root_of_hessian(row.double()).T
        if labels is not None:
            target = fn.one_hot(labels[n], z.shape[1])
            columns = (torch.softmax(row.double(), 0) - target).detach()[None]
        for column in columns:
            ys = [y for _, y in calls]
            gs = torch.autograd.grad(row, ys, column.to(z.dtype), retain_graph=True)
            for g in gs:
                g = g.reshape(-1, g.shape[-1]).double()
                G = G + weight[n] * g.T @ g
    return x.T @ x / len(x), G / weight.sum()


def dense(model, x, weight=None, labels=None):
    """Return A and G of both linear layers of a linear, tanh, linear network."""
    y = model[0](x)
    h = torch.tanh(y)
    z = model[2](h)
    return {
        "0": by_hand([(x, y)], z, weight, labels),
        "2": by_hand([(h, z)], z, weight, labels),
    }


def assert_factors(kfac, expected, rtol=1e-10):
    """Compare the factors of a KFAC with those by hand, by block."""
    for name, (A, G) in expected.items():
        found_A, found_G, scale = kfac.factors(name)
        torch.testing.assert_close(found_A.double(), A.detach(), rtol=rtol, atol=1e-10)
        torch.testing.assert_close(
            (scale * found_G).double(), G.detach(), rtol=rtol, atol=1e-10
        )
