"""
A small GPT with SOAP
=====================

A transformer of two layers learns to write Python from a module of the standard
library, character by character.

.. image:: /gallery_pictures/gpt.png
   :alt: Training loss of AdamW and SOAP against CPU seconds
"""

# sphinx_gallery_thumbnail_path = 'gallery_pictures/gpt.png'
import argparse
import math
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

from kfac_core_shims.torch import SOAP

SECONDS = 25.0
CONTEXT, WIDTH = 64, 64
torch.set_num_threads(1)
text = Path(argparse.__file__).read_text(encoding="utf-8")
letters = sorted(set(text))
codes = torch.tensor([letters.index(letter) for letter in text])


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(len(letters), WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, len(letters))

    def forward(self, x):
        h = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.layers(h, mask=mask, is_causal=True))


# %%
# Both methods have a cosine to zero over the same CPU seconds.


def train(model, optimizer, rate):
    seconds, losses = [], []
    start = time.process_time()
    while (spent := time.process_time() - start) < SECONDS:
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 + math.cos(math.pi * spent / SECONDS)) / 2
        first = torch.randint(len(codes) - CONTEXT - 1, (32, 1))
        window = codes[first + torch.arange(CONTEXT + 1)]
        optimizer.zero_grad()
        logits = model(window[:, :-1])
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), window[:, 1:].flatten()
        )
        loss.backward()
        optimizer.step()
        seconds.append(spent)
        losses.append(loss.item())
    return seconds, losses


for name, rate in [("AdamW", 3e-3), ("SOAP", 1e-2)]:
    torch.manual_seed(0)
    model = GPT()
    if name == "AdamW":
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    else:
        optimizer = SOAP(model, lr=rate)
    seconds, losses = train(model, optimizer, rate)
    plt.plot(seconds, losses, label=name)
    print(f"{name}: {sum(losses[-10:]) / 10:.3f} nats a character")
plt.xlabel("CPU seconds")
plt.ylabel("training loss of a batch")
plt.ylim(top=3)
plt.legend()

# %%
# What the network writes.

line = codes[:CONTEXT][None]
for _ in range(120):
    drawn = model(line[:, -CONTEXT:])[:, -1].softmax(1).multinomial(1)
    line = torch.cat([line, drawn], dim=1)
print("".join(letters[code] for code in line[0, CONTEXT:]))
