"""
A wave function by SPRING
=========================

A network learns the ground state of a particle in an anharmonic trap, by variational
Monte Carlo. The natural gradient is exact, in the space of samples.

.. image:: /gallery_pictures/wave_function.png
   :alt: Energy against steps, and the density beside that of a fine grid
"""

# sphinx_gallery_thumbnail_path = 'gallery_pictures/wave_function.png'
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

from kfac_core_shims.torch import GaussNewton

STEPS = 300
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
net = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 1))


def log_psi(x):
    return net(x)[:, 0] - 0.3 * x[:, 0] ** 2


def potential(x):
    return 0.5 * x**2 + 0.25 * x**4


# %%
# The reference: the lowest eigenvalue of the Hamiltonian on a fine grid.

grid = np.linspace(-5, 5, 800)
spacing = grid[1] - grid[0]
kinetic = np.diag(np.full(800, 1 / spacing**2))
kinetic -= np.diag(np.full(799, 0.5 / spacing**2), 1)
kinetic -= np.diag(np.full(799, 0.5 / spacing**2), -1)
values, vectors = np.linalg.eigh(kinetic + np.diag(potential(grid)))

# %%
# Walkers follow the density; a step takes log psi and the local energies.

optimizer = GaussNewton(net, centered=True, lr=0.3)
x = torch.randn(512, 1)
energies = []
for _ in range(STEPS):
    for _ in range(10):
        trial = x + torch.randn_like(x)
        accepted = torch.rand(512).log() < 2 * (log_psi(trial) - log_psi(x))
        x = torch.where(accepted[:, None], trial, x).detach().requires_grad_()
    (slope,) = torch.autograd.grad(log_psi(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(slope.sum(), x)
    local = (potential(x) - 0.5 * (second + slope**2))[:, 0].detach()
    energies.append(float(optimizer.step(lambda: (log_psi(x), local))))
print(f"energy {np.mean(energies[-20:]):.4f}, on the grid {values[0]:.4f}")

# %%

figure, (top, bottom) = plt.subplots(2, 1, figsize=(5.5, 7), layout="constrained")
top.plot(energies, label="mean local energy")
top.axhline(values[0], color="black", linewidth=0.8, label="grid")
top.set(xlabel="step", ylabel="energy", ylim=(values[0] - 0.05, values[0] + 0.5))
top.legend()
with torch.no_grad():
    density = torch.exp(2 * log_psi(torch.tensor(grid)[:, None])).numpy()
bottom.plot(grid, density / density.sum() / spacing, label="network")
bottom.plot(grid, vectors[:, 0] ** 2 / spacing, "k--", linewidth=0.8, label="grid")
bottom.set(xlabel="x", ylabel="density", xlim=(-3, 3))
bottom.legend()
