"""Models that people train, beside Adam: encoders, BERT, GPT-2, a residual network.

    python docs/examples/training/torch_models.py encoder gpt2 resnet [--seeds 2]

BERT and GPT-2 come from their configurations in transformers, and nothing is downloaded.
Both methods have a grid of five learning rates; K-FAC has the other defaults of `KFAC`.
``repr(kfac)`` is printed: every weight matrix is in a block.
"""

import argparse
import os

import torch
from curves import best, table
from data import VOCABULARY, Data, Text, digits, text
from torch import nn
from torch_run import GRIDS, train

from kfac_core_shims.torch import KFAC

CONTEXT, WIDTH, HEADS, LAYERS = 32, 32, 4, 2


class Encoder(nn.Module):
    """`nn.TransformerEncoder` on characters, each attending to those before it."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(len(VOCABULARY), WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.last, self.logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(VOCABULARY))
        later = torch.full((CONTEXT, CONTEXT), -torch.inf).triu(1)
        self.register_buffer("later", later)

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(CONTEXT).expand_as(ids))
        return self.logits(self.last(self.layers(x, mask=self.later)))


class Logits(nn.Module):
    """A model of transformers, of which the logits are returned."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids).logits


def gpt2():
    """Return GPT-2 with two layers, whose embedding makes the logits too."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return Logits(
        GPT2LMHeadModel(
            GPT2Config(
                vocab_size=len(VOCABULARY),
                n_positions=CONTEXT,
                n_embd=WIDTH,
                n_layer=LAYERS,
                n_head=HEADS,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                resid_pdrop=0.0,
                bos_token_id=0,
                eos_token_id=0,
            )
        )
    )


def bert():
    """Return BERT with two layers, whose embedding makes the logits too."""
    from transformers import BertConfig, BertForMaskedLM

    return Logits(
        BertForMaskedLM(
            BertConfig(
                vocab_size=len(VOCABULARY) + 1,
                hidden_size=WIDTH,
                num_hidden_layers=LAYERS,
                num_attention_heads=HEADS,
                intermediate_size=4 * WIDTH,
                max_position_embeddings=CONTEXT,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )
    )


def masked(data):
    """Return windows with a seventh of the characters hidden: only these are read.

    The labels of all others are -100, which the loss ignores.
    """
    generator = torch.Generator().manual_seed(0)
    parts = []
    for ids in data.train_inputs, data.test_inputs:
        hidden = torch.rand(ids.shape, generator=generator).numpy() < 1 / 7
        inputs, labels = ids.copy(), ids.copy()
        inputs[hidden], labels[~hidden] = len(VOCABULARY), -100
        parts += [inputs, labels]
    return Text(*parts)


class Residual(nn.Module):
    """Two convolutions with batch norms, beside their input."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.beside = nn.Identity()
        if inputs != outputs:
            self.beside = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        return torch.relu(self.path(x) + self.beside(x))


def resnet():
    """Return a residual network of nine layers for images of 8 by 8."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Residual(16, 16, 1),
        Residual(16, 32, 2),
        Residual(32, 32, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
        nn.Unflatten(1, (1, 10)),
    )


def by_rows(data):
    """Return digits whose labels have an axis of rows, as characters have."""
    return Data(
        data.train_inputs,
        data.train_targets[:, None],
        data.test_inputs,
        data.test_targets[:, None],
    )


PROBLEMS = {
    "encoder": (Encoder, lambda: text(CONTEXT)),
    "bert": (bert, lambda: masked(text(CONTEXT))),
    "gpt2": (gpt2, lambda: text(CONTEXT)),
    "resnet": (resnet, lambda: by_rows(digits())),
}
"""A model, and what it learns."""


def covered(build):
    """Return which weight has which block; every weight matrix has one."""
    kfac = KFAC(build())
    matrices = {n for n, p in kfac.model.named_parameters() if p.ndim > 1}
    left = matrices & set(kfac.skipped)
    assert not left, left
    return repr(kfac)


def compared(name, *, steps=100, seeds=1, grids=GRIDS):
    """Return the table of one problem."""
    build, data_of = PROBLEMS[name]
    problem = {"build": build, "data": data_of(), "steps": steps}
    problem |= {"size": 32, "options": {}, "read": 64}
    torch.set_num_threads(1)
    curves = []
    for method, rates in grids.items():
        runs = {rate: [train(method, rate, 0, **problem)] for rate in rates}
        rate = best(runs)
        runs[rate] += [train(method, rate, s, **problem) for s in range(1, seeds)]
        curves += runs[rate]
    return table(curves, loss=".2g", error=".2f")


def main():
    """Train the problems that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("problems", nargs="*", help=", ".join(PROBLEMS))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=1, help="runs of the best rates")
    parser.add_argument("--quick", action="store_true", help="10 steps, one rate each")
    given = parser.parse_args()
    unknown = set(given.problems) - set(PROBLEMS)
    if unknown:
        parser.error(f"there are {', '.join(PROBLEMS)}; got {', '.join(unknown)}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    options = {"steps": given.steps, "seeds": given.seeds}
    if given.quick:
        options = {"steps": 10, "grids": {m: r[2:3] for m, r in GRIDS.items()}}
    for name in given.problems or PROBLEMS:
        print(covered(PROBLEMS[name][0]))
        print(f"\n{name}, {options['steps']} steps:\n", flush=True)
        print(compared(name, **options), "\n", flush=True)


if __name__ == "__main__":
    main()
