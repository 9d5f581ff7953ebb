"""
Classifier: SOAP in the place of AdamW
======================================

A convolutional network classifies scikit-learn's digits. ``SOAP`` takes the place of
``AdamW``: Adam, in the eigenbasis of K-FAC's factors.

.. image:: /gallery_pictures/classifier.png
   :alt: Training loss of AdamW and SOAP against CPU seconds
"""

# sphinx_gallery_thumbnail_path = 'gallery_pictures/classifier.png'
import time

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from kfac_core_shims.torch import SOAP

SECONDS = 6.0
torch.set_num_threads(1)
digits = load_digits()
images = torch.tensor(digits.images[:, None], dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
train_rows, test_rows = torch.randperm(len(images)).split([1437, 360])


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 10),
    )


# %%
# The loop is the same for both.


def train(model, optimizer):
    seconds, losses = [], []
    start = time.process_time()
    while (spent := time.process_time() - start) < SECONDS:
        rows = train_rows[torch.randint(len(train_rows), (128,))]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
        loss.backward()
        optimizer.step()
        seconds.append(spent)
        losses.append(loss.item())
    wrong = model(images[test_rows]).argmax(1) != labels[test_rows]
    return seconds, losses, wrong.float().mean()


for name in ("AdamW", "SOAP"):
    model = network()
    if name == "AdamW":
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    else:
        optimizer = SOAP(model)
    seconds, losses, error = train(model, optimizer)
    median = torch.tensor(losses).unfold(0, 11, 11).median(1).values
    plt.semilogy(seconds[5 : 11 * len(median) : 11], median, label=name)
    print(f"{name}: training loss {median[-1]:.1e}, test error {error:.1%}")
plt.xlabel("CPU seconds")
plt.ylim(bottom=1e-8)
plt.ylabel("training loss, median of 11 batches")
plt.legend()
