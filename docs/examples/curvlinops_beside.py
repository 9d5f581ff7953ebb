"""The same K-FAC by curvlinops and by kfac_core, number by number.

    python -m pip install 'kfac-core[torch]' curvlinops-for-pytorch
    python docs/examples/curvlinops_beside.py

A small network with cross-entropy, its Gauss-Newton factors, and their inverse with
factored and with exact damping.  curvlinops runs the model itself; kfac_core is fed what
hooks on the layers saw.  Both say "mean": curvlinops by the loss, kfac_core by its block,
which is that of one example, averaged.
"""

import torch
from curvlinops import KFACInverseLinearOperator, KFACLinearOperator
from torch import nn

import kfac_core as kc
from kfac_core.losses import Categorical, vectors

DAMPING = 0.01


def main() -> dict[str, float]:
    """Print how far the two are apart, relative to curvlinops' answer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, labels = torch.randn(32, 6, dtype=torch.float64), torch.randint(3, (32,))
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    estimators = {rule: fed(model, layers, x, rule) for rule in ("factored", "exact")}

    other = KFACLinearOperator(
        model,
        nn.CrossEntropyLoss(reduction="mean"),
        list(model.parameters()),
        [(x, labels)],
        fisher_type="type-2",
        kfac_approx="expand",
        separate_weight_and_bias=False,  # one block a layer, the bias last
    )
    factored = {"use_heuristic_damping": True, "damping": DAMPING}
    exact = {"use_exact_damping": True, "damping": DAMPING}
    questions = {
        "multiply": (other, "exact", "multiply", {"damped": False}),
        "inverse, factored damping": (
            KFACInverseLinearOperator(other, **factored),
            "factored",
            "multiply_inverse",
            {},
        ),
        "inverse, exact damping": (
            KFACInverseLinearOperator(other, **exact),
            "exact",
            "multiply_inverse",
            {},
        ),
    }
    vector = [torch.randn_like(p) for p in model.parameters()]
    named = dict(zip([n for n, _ in model.named_parameters()], vector, strict=True))
    ours = {
        name: {"weight": named[f"{name}.weight"], "bias": named[f"{name}.bias"]}
        for name in layers
    }
    differences = {}
    for what, (operator, rule, product, options) in questions.items():
        expected = torch.cat([part.ravel() for part in operator @ vector])
        products = estimators[rule].apply(product, ours, **options)
        parts = [
            products[name][p].ravel() for name in layers for p in ("weight", "bias")
        ]
        error = torch.linalg.norm(torch.cat(parts) - expected)
        differences[what] = float(error / torch.linalg.norm(expected))
        print(f"{what:28}{differences[what]:.1e}")
    return differences


def fed(model, layers, x, rule):
    """Return an estimator that has seen one batch."""
    inputs, outputs, hooks = {}, {}, []
    for name, layer in layers.items():

        def remember(_module, args, output, name=name):
            inputs[name], outputs[name] = args[0], output

        hooks.append(layer.register_forward_hook(remember))
    logits = model(x)
    for hook in hooks:
        hook.remove()
    # One vector to propagate back for each class; together, the softmax's Hessian.
    sources = vectors(Categorical(), logits.detach(), mode="exact_GGN")
    grads = [
        torch.autograd.grad(logits, list(outputs.values()), v, retain_graph=True)
        for v in sources.vectors
    ]
    estimator = kc.Estimator(
        {
            name: kc.Block(
                kc.Dense(
                    in_features=layer.in_features,
                    out_features=layer.out_features,
                    bias=True,
                    weight_layout="oi",
                ),
                kc.Kronecker(),
            )
            for name, layer in layers.items()
        },
        decay=0.95,
        damping=DAMPING,
        damping_rule=rule,
        reduction="sum",
        sources=sources.source_reduction,
    )
    batches = {}
    for k, name in enumerate(layers):
        g = torch.stack([of_source[k] for of_source in grads])
        batches[name] = kc.Batch(inputs[name], g, sources=len(grads))
    estimator.update(batches)
    estimator.refresh()
    return estimator


if __name__ == "__main__":
    main()
