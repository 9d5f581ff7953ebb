"""Residuals that hold derivatives of a network of PyTorch, in every way to take them.

Each is a function of a network of points (N, d) and of points that require gradients; it
returns residuals (N,) or (N, C).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import func


def gradient(u: Any, x: Any) -> Any:
    """Return the gradient of each example's output by its input, (N, d)."""
    return torch.autograd.grad(u.sum(), x, create_graph=True, materialize_grads=True)[0]


def laplacian_of(u: Any, x: Any) -> Any:
    """Return the sum of second derivatives of outputs, (N,)."""
    slope = gradient(u, x)
    return sum(gradient(slope[:, i], x)[:, i] for i in range(x.shape[1]))


def value(net: Any, x: Any) -> Any:
    return net(x)


def slopes(net: Any, x: Any) -> Any:
    return gradient(net(x)[:, 0], x).sum(1)


def forces(net: Any, x: Any) -> Any:
    return -gradient(net(x), x)


def laplacian(net: Any, x: Any) -> Any:
    return laplacian_of(net(x)[:, 0], x)


def biharmonic(net: Any, x: Any) -> Any:
    return laplacian_of(laplacian(net, x), x)


def length_of_slope(net: Any, x: Any) -> Any:
    return gradient(net(x)[:, 0], x).square().sum(1) - 1.0


def mixed_vector(net: Any, x: Any) -> Any:
    u = net(x)
    slope = gradient(u[:, 0], x)
    return torch.cat([slope, u[:, :1] * slope[:, :1]], dim=1)


def product(net: Any, x: Any) -> Any:
    u = net(x)[:, 0]
    return u * gradient(u, x)[:, 0] + u**2


def burgers(net: Any, x: Any) -> Any:
    u = net(x)[:, 0]
    return u * gradient(u, x)[:, 0] - 0.1 * laplacian_of(u, x)


def directional(net: Any, x: Any) -> Any:
    u, along = func.jvp(net, (x,), (torch.ones_like(x),))
    return u[:, 0] * along[:, 0]


def twice_directional(net: Any, x: Any) -> Any:
    def along(y: Any) -> Any:
        return func.jvp(net, (y,), (torch.ones_like(x),))[1]

    return func.jvp(along, (x,), (torch.ones_like(x),))[1][:, 0]


def pulled_back(net: Any, x: Any) -> Any:
    u, pull = func.vjp(net, x)
    return pull(torch.ones_like(u))[0].sum(1)


def by_hessian(net: Any, x: Any) -> Any:
    def one(point: Any) -> Any:
        return net(point[None])[0, 0]

    return func.vmap(func.hessian(one))(x).diagonal(dim1=1, dim2=2).sum(1)


def hessian_of_points(net: Any, x: Any) -> Any:
    """The network sees vectors, without an axis of examples."""
    H = func.vmap(func.hessian(lambda point: net(point)[0]))(x)
    return H.diagonal(dim1=1, dim2=2).sum(1)


def of_shifted_points(net: Any, x: Any) -> Any:
    return net(x + 0.1)[:, 0] - 2 * net(x)[:, 0] + net(x - 0.1)[:, 0]


def of_other_examples(net: Any, x: Any) -> Any:
    return net(x)[:, 0] - net(x.flip(0))[:, 0].mean()


def mean_over_points(net: Any, x: Any) -> Any:
    inner = x[:, None, :] + torch.linspace(0, 1, 3, dtype=x.dtype)[:, None]
    return net(inner).mean(dim=(1, 2))
