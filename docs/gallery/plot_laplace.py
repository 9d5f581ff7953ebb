"""
How sure is the network? A Laplace posterior
============================================

A network is fitted to a curve with a gap. The curvature of the trained model says how
far its predictions could move, and the evidence compares priors.

.. image:: /gallery_pictures/laplace.png
   :alt: A fitted curve, and a band that is wide in the gap of the data
"""

# sphinx_gallery_thumbnail_path = 'gallery_pictures/laplace.png'
import matplotlib.pyplot as plt
import torch
from torch import nn

import kfac_core as kc
from kfac_core_shims.torch import GaussNewton, Posterior

STEPS = 30
NOISE = 0.01
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
side = torch.tensor([-1.0, 1.0])[torch.randint(2, (60, 1))]
x = (0.5 + 1.5 * torch.rand(60, 1)) * side
y = torch.sin(2 * x) + 0.3 * x + NOISE**0.5 * torch.randn(60, 1)
model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

# %%
# The mode: the data's residuals, and a prior of precision 1. Each term is half the mean of
# its squares, so that the weights' term has the root of their number over that of the data.

gauss_newton = GaussNewton(model)


def residuals():
    weights = torch.cat([p.flatten() for p in model.parameters()])
    return [(model(x) - y) / NOISE**0.5, weights * (len(weights) / len(x)) ** 0.5]


for _ in range(STEPS):
    gauss_newton.step(residuals)

# %%
# The posterior, for several precisions of the prior; its parts are computed once.

posterior = Posterior(
    model,
    [(x, y)],
    likelihood=kc.losses.Gaussian(variance=NOISE),
    fisher="exact",
    ekfac=False,
)
evidence = {
    tau: float(posterior.with_prior(tau).log_marginal_likelihood())
    for tau in (0.1, 0.3, 1.0, 3.0, 10.0)
}
best = max(evidence, key=evidence.get)
for tau, value in evidence.items():
    print(f"prior precision {tau:g}: log-evidence {value:.1f}")

# %%
# The band is narrow where there are data.

grid = torch.linspace(-4, 4, 200)[:, None]
variance = posterior.with_prior(best).variance((grid, grid))[:, 0].detach()
mean = model(grid)[:, 0].detach()
band = 2 * (variance + NOISE).sqrt()
plt.fill_between(grid[:, 0], mean - band, mean + band, alpha=0.3)
plt.plot(grid[:, 0], mean)
plt.plot(x[:, 0], y[:, 0], "k.")
plt.ylim(-4, 4)
plt.xlabel("x")
plt.title(f"prior precision {best:g}")
