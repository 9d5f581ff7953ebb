"""
Which training images matter?
=============================

A classifier of digits is trained with some labels that are wrong. The influence of each
example on its own loss finds them, from the curvature of the trained model alone.

.. image:: /gallery_pictures/influence.png
   :alt: Wrong labels found against images looked at, and the images with the highest scores
"""

# sphinx_gallery_thumbnail_path = 'gallery_pictures/influence.png'
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from kfac_core_shims.torch import collect, self_influence

STEPS = 300
WRONG = 60
torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.data[:1000], dtype=torch.float32) / 16
labels = torch.tensor(digits.target[:1000])
wrong = torch.randperm(len(labels))[:WRONG]
labels[wrong] = (labels[wrong] + torch.randint(1, 10, (WRONG,))) % 10

# %%
# Any training will do.

model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-3)
for _ in range(STEPS):
    rows = torch.randint(len(images), (128,))
    optimizer.zero_grad()
    cross_entropy(model(images[rows]), labels[rows]).backward()
    optimizer.step()


# %%
# The curvature once, and the score of each example.


def loss(model, batch):
    return cross_entropy(model(batch[0]), batch[1], reduction="none")


train = [*zip(images.split(100), labels.split(100), strict=True)]
factors = collect(model, train, likelihood="categorical")
scores = self_influence(model, loss, train, factors=factors)
order = scores.argsort(descending=True)
is_wrong = torch.isin(order, wrong)
print(f"{int(is_wrong[:WRONG].sum())} of {WRONG} wrong labels in the first {WRONG}")

# %%
# Looking at the images in this order finds the wrong labels first.

figure = plt.figure(figsize=(5.5, 7), layout="constrained")
grid = figure.add_gridspec(4, 4)
axes = figure.add_subplot(grid[:2, :])
axes.plot(is_wrong.cumsum(0), label="by influence")
axes.plot([0, len(order)], [0, WRONG], label="in any order")
axes.set(xlabel="images looked at", ylabel="wrong labels found")
axes.legend()
for place, row in enumerate(order[:8]):
    axes = figure.add_subplot(grid[2 + place // 4, place % 4])
    axes.imshow(images[row].reshape(8, 8), cmap="gray_r")
    axes.set(title=f"label {labels[row]}", xticks=[], yticks=[])
