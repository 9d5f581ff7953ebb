"""
Autoencoder: KFAC beside Adam
=============================

A deep autoencoder learns scikit-learn's digits. Two lines in the loop make its
gradients natural gradients. Both methods train for the same CPU seconds on one thread,
with a rate that falls to zero.

.. image:: /gallery_pictures/autoencoder.png
   :alt: Training loss of Adam and KFAC against CPU seconds
"""

# sphinx_gallery_thumbnail_path = 'gallery_pictures/autoencoder.png'
import math
import time
from itertools import pairwise

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from kfac_core_shims.torch import KFAC

SECONDS = 8.0
torch.set_num_threads(1)
images = torch.tensor(load_digits().data, dtype=torch.float32) / 16


def network():
    torch.manual_seed(0)
    widths = [64, 256, 128, 32, 16, 32, 128, 256, 64]
    layers = []
    for n, m in pairwise(widths):
        layers += [nn.Linear(n, m), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


# %%
# A training loop as it is, and the two lines of K-FAC.


def train(use_kfac, rate):
    model, loss_function = network(), nn.MSELoss()
    if use_kfac:
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        kfac = KFAC(model, likelihood=loss_function, lr=optimizer)  # 1.
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    seconds, losses = [], []
    start = time.process_time()
    while (spent := time.process_time() - start) < SECONDS:
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 + math.cos(math.pi * spent / SECONDS)) / 2
        batch = images[torch.randint(len(images), (256,))]
        optimizer.zero_grad()
        loss = loss_function(model(batch), batch)
        loss.backward()
        if use_kfac:
            kfac.step()  # 2.
        optimizer.step()
        seconds.append(spent)
        losses.append(loss.item())
    return seconds, losses


# %%
# Adam has the rate that was best for it of 0.001, 0.003 and 0.01.

for name, use_kfac, rate in [("Adam", False, 0.003), ("KFAC", True, 0.1)]:
    seconds, losses = train(use_kfac, rate)
    plt.semilogy(seconds[::20], losses[::20], label=name)
    print(f"{name}: {losses[-1]:.2g} after {len(losses)} steps")
plt.xlabel("CPU seconds")
plt.ylabel("training loss of a batch")
plt.legend()
