"""
A differential equation by Gauss-Newton
=======================================

A network solves Poisson's equation on the unit square, with derivatives as everybody
writes them. ``GaussNewton`` takes the residuals, and has no learning rate.

.. image:: /gallery_pictures/pinn.png
   :alt: Relative error against CPU seconds, and the error of the solution
"""

# sphinx_gallery_thumbnail_path = 'gallery_pictures/pinn.png'
import math
import time

import matplotlib.pyplot as plt
import torch
from torch import nn

from kfac_core_shims.torch import GaussNewton

SECONDS = 8.0
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
net = nn.Sequential(
    nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
)
inside = torch.rand(400, 2, requires_grad=True)
edge = torch.rand(100, 2)
edge[torch.arange(100), torch.arange(100) % 2] = (torch.arange(100) // 2 % 2).double()


def solution(x):
    return torch.sin(math.pi * x).prod(1)


# %%
# The residuals of the equation inside, and of zero on the boundary, which weighs more.


def residuals():
    [first] = torch.autograd.grad(net(inside).sum(), inside, create_graph=True)
    laplacian = sum(
        torch.autograd.grad(first[:, i].sum(), inside, create_graph=True)[0][:, i]
        for i in range(2)
    )
    force = 2 * math.pi**2 * solution(inside.detach())
    return [laplacian + force, 10 * net(edge)[:, 0]]


gauss_newton = GaussNewton(net)
print(gauss_newton)
line = torch.linspace(0, 1, 60)
grid = torch.cartesian_prod(line, line)
seconds, errors = [], []
start = time.process_time()
while (spent := time.process_time() - start) < SECONDS:
    gauss_newton.step(residuals)
    with torch.no_grad():
        difference = net(grid)[:, 0] - solution(grid)
    seconds.append(spent)
    errors.append((difference.norm() / solution(grid).norm()).item())
print(f"relative error {errors[-1]:.1e} after {len(errors)} steps")

# %%
# The error falls by orders of magnitude, since every step is exact in the whole network.

figure, (top, bottom) = plt.subplots(2, 1, figsize=(5.5, 7), layout="constrained")
top.semilogy(seconds, errors)
top.set(xlabel="CPU seconds", ylabel="relative error")
image = bottom.pcolormesh(line, line, difference.reshape(60, 60).T, cmap="RdBu_r")
bottom.set(title="error of the solution", aspect="equal")
figure.colorbar(image)
