"""Modules of Hugging Face's transformers and of peft, against dense computations.

The session `loops` of nox installs both.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as fn  # noqa: E402

import kfac_core as kc  # noqa: E402
from kfac_core_shims.torch import KFAC  # noqa: E402

from ..builders import torch_zoo  # noqa: E402
from .test_torch import (  # noqa: E402
    DAMPING,
    OPTIONS,
    attached,
    close,
    doubles,
    half_squares,
    kfac_by_hand,
    seeded,
    step,
)

__all__ = ["seeded"]  # used by itself, in every test

SMALL = {
    "vocab_size": 11,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 6,
}


def transformers():
    return pytest.importorskip("transformers", reason="transformers is not installed")


def peft():
    return pytest.importorskip("peft", reason="peft is not installed")


def factors_by_hand(x, g, rows):
    """Return L/R A and G of all rows of x, with a one, and of all sources of g."""
    x = x.reshape(-1, x.shape[-1])
    x = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    g = g.reshape(-1, len(x), g.shape[-1])
    return x.T @ x / rows, torch.einsum("mni,mnj->ij", g, g) / len(x)


def test_conv1d_has_the_exact_fisher():
    """A linear layer with its weight as (in, out)."""
    transformers()
    from transformers.pytorch_utils import Conv1D

    model, x, y = Conv1D(3, 4).double(), doubles(8, 4), doubles(8, 3)
    kfac = torch_zoo.attached(model)
    outputs = model(x)
    half_squares(outputs, y).backward(retain_graph=True)
    assert torch_zoo.check_step(model, kfac, outputs) == set()


@pytest.mark.parametrize("name", ["LlamaRMSNorm", "T5LayerNorm"])
def test_norms_have_the_diagonal_of_the_fisher(name):
    transformers()
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    norm = {"LlamaRMSNorm": LlamaRMSNorm, "T5LayerNorm": T5LayerNorm}[name](4)
    # Both compute in float32, whatever they are given.
    model, x, y = nn.Sequential(norm), torch.randn(8, 4), torch.randn(8, 4)
    nn.init.normal_(norm.weight)
    wide = x.double()
    unit = wide / (wide.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
    squares = unit.square().mean(0)

    before, after = step(model, attached(model), x, y, half_squares)

    expected = before["0.weight"].double() / (squares + DAMPING)
    torch.testing.assert_close(
        after["0.weight"].double(), expected, rtol=1e-5, atol=1e-7
    )


def small_models():
    """Return a model of each kind, and what its loss is computed from."""
    found = transformers()
    gpt = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 6, "vocab_size": 11}
    gpt |= {"bos_token_id": 0, "eos_token_id": 0, "attn_pdrop": 0.0}
    gpt |= {"embd_pdrop": 0.0, "resid_pdrop": 0.0}
    dry = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    ids = torch.randint(11, (3, 6))
    words = {"input_ids": ids, "labels": ids}
    return {
        "gpt2": (found.GPT2LMHeadModel(found.GPT2Config(**gpt)), words),
        "bert": (found.BertForMaskedLM(found.BertConfig(**SMALL, **dry)), words),
        "llama": (
            found.LlamaForCausalLM(
                found.LlamaConfig(**SMALL, num_key_value_heads=2, eos_token_id=0)
            ),
            words,
        ),
        "t5": (
            found.T5ForConditionalGeneration(
                found.T5Config(
                    **{"vocab_size": 11, "d_model": 8, "d_kv": 4, "d_ff": 12},
                    **{"num_layers": 1, "num_heads": 2, "dropout_rate": 0.0},
                    decoder_start_token_id=0,
                    pad_token_id=0,
                )
            ),
            words,
        ),
    }


@pytest.mark.filterwarnings("ignore")
def test_code_compiled_for_another_model_does_not_hide_calls():
    """The first model has no hooks, and its decorated functions are compiled one by one."""
    torch._dynamo.reset()
    models = [small_models()["gpt2"] for _ in range(2)]
    (first, words), (model, _) = models
    torch.compile(first, backend="eager")(**words).loss.backward()
    compiled = torch.compile(model, backend="eager")
    kfac = KFAC(compiled, lr=0.1)
    compiled(**words).loss.backward()
    kfac.step()
    assert kfac.preconditioned == {id(p) for p in model.parameters()}


@pytest.mark.parametrize("kind", ["gpt2", "bert", "llama", "t5"])
def test_whole_models_are_covered(kind):
    """Two lines, every parameter in a block, and a step that lowers the loss."""
    model, batch = small_models()[kind]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model, lr=optimizer)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        kfac.step()
        optimizer.step()
        losses.append(float(loss.detach()))

    assert kfac.skipped == {}
    assert kfac.preconditioned == {id(p) for p in model.parameters()}
    assert losses[-1] < losses[0] - 0.05


def test_gpt2_has_the_dense_directions():
    """The tied weight, whose logits read all rows but the last of each example.

    Both uses of W are rows of one block: of the embedding with its output gradients, and
    of the logits with their gradients in the place of x, and their inputs in that of g.
    """
    model, batch = small_models()["gpt2"]
    model = model.double().eval()
    ids = batch["input_ids"]
    kfac = KFAC(model, **(OPTIONS | {"fisher": "empirical", "kl_clip": None}))
    seen = {}

    def keep(name):
        def hook(module, arguments, y):
            y.retain_grad()
            seen[name] = arguments[0].detach(), y

        return hook

    model.transformer.wte.register_forward_hook(keep("words"))
    model.lm_head.register_forward_hook(keep("logits"))
    model.transformer.h[0].mlp.c_fc.register_forward_hook(keep("fc"))
    model(**batch).loss.backward()
    before = {n: p.grad.clone() for n, p in model.named_parameters()}
    kfac.step()

    rows = 15  # The last of six tokens has no next one.
    W = "transformer.wte.weight"
    h, z = seen["logits"]
    delta, h = rows * z.grad.reshape(-1, 11), h.reshape(-1, 8)
    _, e = seen["words"]
    g = rows * e.grad.reshape(-1, 8)
    counts = fn.one_hot(ids.reshape(-1), 11).double().sum(0)
    A = torch.diag((counts + delta.square().sum(0)) / 36)
    G = (g.T @ g + h.T @ h) / rows
    dense = torch.kron(A, G) + DAMPING * torch.eye(88).double()
    expected = torch.linalg.solve(dense, before[W].flatten()).reshape(11, 8)
    close(model.transformer.wte.weight.grad, expected)

    x, y = seen["fc"]
    A, G = factors_by_hand(x, rows * y.grad[None], rows)
    name = "transformer.h.0.mlp.c_fc"
    V = torch.cat([before[f"{name}.weight"], before[f"{name}.bias"][None]]).T
    expected = kfac_by_hand(A, G, V).T[:-1]
    close(model.transformer.h[0].mlp.c_fc.weight.grad, expected)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
def test_modules_to_save_are_those_of_the_base_model():
    """peft trains a copy of the classifier; the original is frozen and has no block."""
    found, of = transformers(), peft()
    base = found.BertForSequenceClassification(
        found.BertConfig(**SMALL, num_labels=3, hidden_dropout_prob=0.0)
    )
    chosen = of.LoraConfig(
        r=2, target_modules=["query"], modules_to_save=["classifier"]
    )
    model = of.get_peft_model(base, chosen).double().eval()
    kfac = KFAC(model, **(OPTIONS | {"fisher": "empirical"}))
    classifier = model.base_model.model.classifier.modules_to_save["default"]
    seen = {}

    def keep(module, arguments, y):
        y.retain_grad()
        seen["x"], seen["y"] = arguments[0].detach(), y

    classifier.register_forward_hook(keep)
    ids, labels = torch.randint(11, (5, 6)), torch.randint(3, (5,))
    model(input_ids=ids, labels=labels).loss.backward()
    V = torch.cat([classifier.weight.grad, classifier.bias.grad[:, None]], 1).clone()
    kfac.step()

    assert kfac.skipped == {}
    assert sorted(name.rsplit(".", 2)[-2] for name in kfac.estimator.blocks) == [
        "lora_A",
        "lora_B",
        "modules_to_save",
    ]
    A, G = factors_by_hand(seen["x"], 5 * seen["y"].grad[None], 5)
    after = torch.cat([classifier.weight.grad, classifier.bias.grad[:, None]], 1)
    close(after, kfac_by_hand(A, G, V))
    assert kc.Kronecker() in [
        block.approximation for block in kfac.estimator.blocks.values()
    ]
