"""A small transformer on text, in PyTorch: K-FAC beside Adam."""

import torch
from data import VOCABULARY, text
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch_run import main

CONTEXT, WIDTH, HEADS = 32, 64, 4


class Layer(nn.Module):
    """Attention to what came before, and two linear layers, each beside its input."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        parts = self.attend(self.first(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Transformer(nn.Module):
    """Two layers; ids of shape (N, context) to logits of shape (N, context, V)."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(len(VOCABULARY), WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.Sequential(Layer(), Layer())
        self.last, self.logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(VOCABULARY))

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(CONTEXT).expand_as(ids))
        return self.logits(self.last(self.layers(x)))


OPTIONS = {
    "fisher": "gradients",
    "kl_clip": None,
    "damping": 1e-2,
    "damping_rule": "factored",
    "decay": 0.95,
    "update_every": 2,
    "refresh_every": 10,
}

if __name__ == "__main__":
    main(
        "A transformer on text",
        "torch_text.png",
        build=Transformer,
        data=text(CONTEXT),
        steps=500,
        size=32,
        options=OPTIONS,
    )
