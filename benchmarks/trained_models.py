"""What is done with the curvature of a trained model, beside other libraries.

    python -m benchmarks.trained_models factors     # beside kronfluence and bergson
    python -m benchmarks.trained_models records     # a record of bergson's factors
    python -m benchmarks.trained_models cost        # time of `collect`
    python -m benchmarks.trained_models memory      # memory of `collect`
    python -m benchmarks.trained_models scores      # LDS on digits, beside kronfluence
    python -m benchmarks.trained_models characters  # LDS on GPT-2, beside kronfluence
    python -m benchmarks.trained_models classes     # memory of 1,000 classes
    python -m benchmarks.trained_models merging     # two halves of digits
    python -m benchmarks.trained_models rounding    # GPT-2 in 3 bits

Needs torch and scikit-learn; transformers, kronfluence and bergson for what is beside them.
bergson's package asks for torchvision and others that it does not import here:
``pip install --no-deps bergson``, and what an import then misses.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import kfac_core as kc
from benchmarks.memory import Resident
from kfac_core.influence import linear_datamodeling_score, retrained_losses
from kfac_core.linalg import rounded_weight
from kfac_core_shims.torch import Posterior, collect, influence, merge

TEXT = Path(__file__).parents[1] / "docs" / "mathematics.md"


def sequences(length: int = 32, count: int = 256) -> tuple[Any, int]:
    """Return sequences of a text's characters, and how many characters there are."""
    text = TEXT.read_text(encoding="utf-8")
    known = sorted(set(text))
    ids = torch.tensor([known.index(c) for c in text[: count * length]])
    return ids.reshape(-1, length), len(known)


def gpt(vocabulary: int, ids: Any, steps: int, seed: int = 0, width: int = 32) -> Any:
    """Return a GPT-2 of two layers, trained on batches of 16 sequences in their order."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=ids.shape[1],
        n_embd=width,
        n_layer=2,
        n_head=2,
        tie_word_embeddings=False,
        attn_implementation="eager",
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        rows = ids[torch.arange(16) + 16 * (step % (len(ids) // 16))]
        optimizer.zero_grad()
        (token_losses(model, rows).mean() / (ids.shape[1] - 1)).backward()
        optimizer.step()
    return model


def token_losses(model: Any, ids: Any) -> Any:
    """Return the loss of each sequence, summed over its tokens."""
    z = model(input_ids=ids).logits[:, :-1]
    return cross_entropy(z.transpose(1, 2), ids[:, 1:], reduction="none").sum(1)


def next_logits(model: Any, ids: Any) -> Any:
    """Return the logits whose next character is known."""
    return model(input_ids=ids).logits[:, :-1]


def with_linear_layers(model: Any) -> Any:
    """Return a copy whose Conv1D are linear layers of the same weights."""
    found = copy.deepcopy(model)
    for module in [*found.modules()]:
        for name, child in [*module.named_children()]:
            if type(child).__name__ == "Conv1D":
                linear = nn.Linear(*child.weight.shape)
                linear.weight.data = child.weight.data.T.clone()
                linear.bias.data = child.bias.data.clone()
                setattr(module, name, linear)
    return found


def kronfluence_of(
    model: Any,
    loss: Any,
    data: Any,
    folder: str,
    names: list[str],
    *,
    drawn_loss: Any = None,
) -> Any:
    """Return kronfluence's analyzer of a model, with EKFAC's factors.

    They are empirical unless `drawn_loss` is given: the losses of labels that it draws.
    """
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments
    from kronfluence.task import Task

    class Losses(Task):
        def compute_train_loss(
            self, batch: Any, model: Any, sample: bool = False
        ) -> Any:
            return (drawn_loss if sample else loss)(model, batch).sum()

        def compute_measurement(self, batch: Any, model: Any) -> Any:
            return loss(model, batch).sum()

        def get_influence_tracked_modules(self) -> list[str]:
            return names

    task = Losses()
    analyzer = Analyzer(
        "compared", prepare_model(model, task), task, cpu=True, output_dir=folder,
        disable_tqdm=True, log_level=50,
    )  # fmt: skip
    analyzer.fit_all_factors(
        "factors",
        data,
        per_device_batch_size=32,
        factor_args=FactorArguments(
            strategy="ekfac", use_empirical_fisher=drawn_loss is None
        ),
        overwrite_output_dir=True,
    )
    return analyzer


def factors() -> None:
    """Compare both factors and the moments with others', in float32."""
    ids, vocabulary = sequences()
    model = gpt(vocabulary, ids, steps=30)
    names = [n for n, m in model.named_modules() if type(m).__name__ == "Conv1D"]
    other = [n for n, m in model.named_modules() if isinstance(m, nn.Module) and n]
    skip = [n for n in other if n.endswith(("wte", "wpe", "lm_head"))]
    skip += [n for n in other if n.rpartition(".")[2].startswith("ln_")]
    found = collect(
        model, ids.split(32), fisher="empirical", loss=token_losses, skip_layers=skip
    )
    with tempfile.TemporaryDirectory() as folder:
        data = torch.utils.data.TensorDataset(ids)

        def loss(model: Any, batch: Any) -> Any:
            return token_losses(model, batch[0])

        analyzer = kronfluence_of(with_linear_layers(model), loss, data, folder, names)
        covariances = analyzer.load_covariance_matrices("factors")
        lambdas = analyzer.load_lambda_matrices("factors")
    positions = ids.shape[1]
    print(f"{len(names)} Conv1D with biases, {len(ids)} sequences of {positions}")
    worst = {"input factor": 0.0, "output factor": 0.0, "trace of the moments": 0.0}
    for name in names:
        A, G, E = _averages(found, name)
        for key, value, side in (
            ("input factor", A, "activation"),
            ("output factor", G, "gradient"),
        ):
            count = covariances[f"num_{side}_covariance_processed"][name]
            expected = covariances[f"{side}_covariance"][name] / count
            worst[key] = max(worst[key], _distance(value, expected))
        L = lambdas["lambda_matrix"][name] / lambdas["num_lambda_processed"][name]
        off = abs(float(E.sum() / L.sum()) - 1.0)
        worst["trace of the moments"] = max(worst["trace of the moments"], off)
    _print_worst("kronfluence", worst)
    try:
        _print_worst("bergson", _beside_bergson(model, ids, found, names))
    except ImportError:
        print("bergson is not installed")


def _beside_bergson(
    model: Any, ids: Any, found: Any, names: list[str]
) -> dict[str, float]:
    """Return the largest differences from bergson's factors, and from its moments.

    bergson takes the moments in our bases, so that they can be compared entry by entry.
    """
    from bergson.hessians.eigenvectors import LambdaCollector
    from bergson.hessians.kfac import CovarianceCollector

    bases = {name: found.statistics[name].bases for name in names}
    vectors = [
        {name: bases[name][side].eigenvectors for name in names}
        for side in ("input", "output")
    ]
    with tempfile.TemporaryDirectory() as folder:
        data = model, ids, names, folder
        sums = _bergson(CovarianceCollector, *data)
        moments = _bergson(LambdaCollector, *data, eigenvectors=tuple(vectors))
    worst = {"input factor": 0.0, "output factor": 0.0, "moments": 0.0}
    for name in names:
        count = sums.num_positions[name]
        expected = (
            sums.A_cov_dict[name] / count,
            sums.S_cov_dict[name] / count,
            moments.eigenvalue_corrections[name].mT / len(ids),
        )
        for key, ours, theirs in zip(
            worst, _averages(found, name), expected, strict=True
        ):
            worst[key] = max(worst[key], _distance(ours, theirs))
    return worst


def _bergson(
    kind: Any, model: Any, ids: Any, names: list[str], folder: str, **options: Any
) -> Any:
    """Return one of bergson's collectors after the passes over all sequences."""
    from bergson.gradients import GradientProcessor

    collector = kind(
        model=model,
        target_modules=set(names),
        processor=GradientProcessor(include_bias=True),
        path=folder,
        dtype=torch.float32,
        **options,
    )
    for batch in ids.split(32):
        with collector.with_batch(torch.ones_like(batch, dtype=torch.bool)):
            token_losses(model, batch).sum().backward()
    model.zero_grad()
    return collector


def records(folder: str = "conformance_tests/records") -> None:
    """Write records of two `Conv1D` of a GPT-2, with bergson's factors in float32."""
    from bergson import __version__ as version
    from bergson.hessians.kfac import CovarianceCollector

    from kfac_core_conformance.records import RecordWriter

    ids, vocabulary = sequences(length=12, count=32)
    model = gpt(vocabulary, ids, steps=10, width=16)
    names = {
        "c_attn": "transformer.h.0.attn.c_attn",
        "c_proj": "transformer.h.1.mlp.c_proj",
    }
    rows: dict[str, Any] = {}

    def keep(name: str, inputs: Any, output: Any) -> None:
        output.register_hook(
            lambda g: rows.update({name: kc.Batch(inputs.detach(), g)})
        )

    hooks = [
        model.get_submodule(path).register_forward_hook(
            lambda module, args, output, name=name: keep(name, args[0], output)
        )
        for name, path in names.items()
    ]
    with tempfile.TemporaryDirectory() as place:
        sums = _bergson(CovarianceCollector, model, ids[:4], [*names.values()], place)
    for hook in hooks:
        hook.remove()
    blocks = {}
    for name, path in names.items():
        n, m = model.get_submodule(path).weight.shape
        layer = kc.Dense(in_features=n, out_features=m, bias=True, weight_layout="io")
        blocks[name] = kc.Block(layer, kc.Kronecker())
    writer = RecordWriter(
        blocks, decay=0.0, loss="sum", producer=f"bergson {version}",
        note="Conv1D of a GPT-2 of two layers, empirical; torch on a CPU in float32",
    )  # fmt: skip
    writer.update(rows)
    for name, path in names.items():
        count = sums.num_positions[path]
        for side, factor in (("input", sums.A_cov_dict), ("output", sums.S_cov_dict)):
            writer.check(
                name, "factor", factor=side, expected=factor[path] / count, rtol=1e-5
            )
    writer.save(Path(folder) / "bergson_gpt2_conv1d.safetensors")


def _averages(found: Any, name: str) -> tuple[Any, Any, Any]:
    """Return both factors and the moments of a layer."""
    averages = found.statistics[name].averages
    A, G, E = (averages[s].value(debias=True) for s in ("input", "output", "block"))
    return A.full(), G.full(), E


def _print_worst(library: str, worst: dict[str, float]) -> None:
    for key, value in worst.items():
        print(f"{key:24} relative difference from {library}'s {value:.1e}")


def in_jax(model: Any, data: Any) -> tuple[Any, Any, list[Any]]:
    """Return linear layers as a network of JAX, their parameters and the batches."""
    import jax

    from kfac_core_shims import jax as kj

    def apply(params: Any, x: Any) -> Any:
        for layer in params:
            x = x @ layer["w"] + layer["b"]
        return x

    params = [
        {"w": jax.numpy.asarray(layer.weight.detach().numpy().T),
         "b": jax.numpy.asarray(layer.bias.detach().numpy())}
        for layer in model
    ]  # fmt: skip
    batches = [jax.numpy.asarray(x.numpy()) for x in data]
    return kj.Network(apply, params, batches[0]), params, batches


def cost() -> None:
    """Print the time of `collect`, beside passes and the bound of SYRK."""
    import jax

    from kfac_core_shims import jax as kj

    torch.manual_seed(0)
    width, layers, rows, batches = 512, 6, 2048, 8
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).eval()
    data = torch.randn(batches, rows, width)

    def passes() -> None:
        for x in data:
            model(x).square().sum().backward()

    network, params, inputs = in_jax(model, data)

    @jax.jit
    @jax.grad
    def gradient(params: Any, x: Any) -> Any:
        return (network.function(params, x) ** 2).sum()

    def passes_in_jax() -> None:
        for x in inputs:
            jax.block_until_ready(gradient(params, x))

    def collect_in_jax(ekfac: bool) -> None:
        likelihood = kc.losses.Gaussian(variance=1.0)
        kj.collect(network, params, inputs, likelihood=likelihood, ekfac=ekfac)

    x, Q = torch.randn(rows, width + 1), torch.randn(width + 1, width + 1)
    uses = layers * batches

    def products(a: Any, b: Any, count: int) -> None:
        for _ in range(count):
            torch.mm(a, b)

    def decompositions() -> None:
        for _ in range(2 * layers):
            torch.linalg.eigh(x.T @ x)

    gaussian: Any = {"likelihood": "gaussian"}
    parts = {
        "forward and backward passes": passes,
        # Half of it is SYRK's bound.
        "Gram matrices": functools.partial(products, x.T, x, 2 * uses),
        "eigendecompositions": decompositions,
        "rows in the bases": functools.partial(products, x, Q, 2 * uses),
        "moments": functools.partial(products, x.T, x, uses),
        "collect, factors": lambda: collect(model, data, ekfac=False, **gaussian),
        "collect, EKFAC": lambda: collect(model, data, **gaussian),
        "JAX: passes": passes_in_jax,
        "JAX: collect, factors": functools.partial(collect_in_jax, False),
        "JAX: collect, EKFAC": functools.partial(collect_in_jax, True),
    }
    for name, run in parts.items():
        seconds = []
        for _ in range(3):
            start = time.process_time()
            run()
            seconds.append(time.process_time() - start)
        print(f"{name:28} {min(seconds):6.2f} s of CPU time")


def memory() -> None:
    """Print the peak memory of `collect`, beside passes and the largest layer's numbers.

    Run it with the variables of `benchmarks.memory.MEMORY_ENVIRONMENT`, or it measures what
    the system's allocator keeps.
    """
    import jax

    from kfac_core_shims import jax as kj

    resident = Resident()
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")

    def peak_of(run: Any) -> int:
        before = resident.settled()
        resident.reset_peak()
        run()
        return resident.peak() - before

    def networks(widths: list[int], dtype: Any) -> tuple[Any, Any]:
        pairs = [*itertools.pairwise(widths)]
        layers = [nn.Linear(n, m, dtype=dtype) for n, m in pairs]
        model = nn.Sequential(*layers).eval()
        return model, [torch.randn(64, widths[0], dtype=dtype) for _ in range(3)]

    def differentiate(model: Any, data: Any) -> None:
        for x in data:
            torch.autograd.grad(model(x).square().sum(), model[0].bias)

    def written(model: Any, data: Any, ekfac: bool) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "factors.npz"
            options: Any = {"likelihood": "gaussian", "max_elements": 1}
            collect(model, data, path=path, ekfac=ekfac, **options)

    def runs_in_jax(model: Any, data: Any, ekfac: bool) -> tuple[Any, Any]:
        network, params, batches = in_jax(model, data)

        def gradient() -> None:
            def loss(b: Any, params: Any, x: Any) -> Any:
                first, *others = params
                return (network.function([{**first, "b": b}, *others], x) ** 2).sum()

            for x in batches:
                jax.block_until_ready(
                    jax.jit(jax.grad(loss))(params[0]["b"], params, x)
                )

        def run() -> None:
            with tempfile.TemporaryDirectory() as folder:
                kj.collect(
                    network, params, batches,
                    likelihood=kc.losses.Gaussian(variance=1.0), max_elements=1,
                    path=Path(folder) / "factors.npz", ekfac=ekfac,
                )  # fmt: skip

        return gradient, run

    kinds = [
        ("float32", torch.float32),
        ("float64", torch.float64),
        ("JAX", torch.float32),
    ]
    for (kind, dtype), ekfac in itertools.product(kinds, (False, True)):
        for widths in ([2048, 2048, 2048], [2048, 512, 2048]):
            model, data = networks(widths, dtype)
            first = functools.partial(differentiate, model, data)
            run = functools.partial(written, model, data, ekfac)
            if kind == "JAX":
                first, run = runs_in_jax(model, data, ekfac)
            for f in (first, run):
                f()  # What XLA, LAPACK, oneDNN and gloo keep after their first call.
            passes, peak = peak_of(first), peak_of(run)
            sizes = []
            for n, m in itertools.pairwise(widths):
                sides = (n + 1) ** 2 + m**2
                sizes.append(2 * sides + (n + 1) * m if ekfac else sides)
            name = "EKFAC" if ekfac else "K-FAC"
            print(
                f"{kind}, {name} of {widths}: {(peak - passes) / 2**20:.1f} MiB beyond "
                f"the {passes / 2**20:.1f} of passes, of the largest layer's numbers "
                f"{(peak - passes) / dtype.itemsize / max(sizes):.2f}"
            )


def digits() -> tuple[Any, Any]:
    """Return scikit-learn's digits."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return torch.tensor(x / 16.0, dtype=torch.float32), torch.tensor(y)


def classifier(
    x: Any, y: Any, seed: int, start: Any = None, decay: float = 1e-3
) -> Any:
    """Return a classifier of digits, trained until it moves no more."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
    if start is not None:
        model.load_state_dict(start.state_dict())
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=100, line_search_fn="strong_wolfe"
    )

    def closure() -> Any:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss = loss + 0.5 * decay * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        return loss

    optimizer.step(closure)
    return model.eval()


def example_losses(model: Any, batch: Any) -> Any:
    """Return the loss of each example."""
    return cross_entropy(model(batch[0]), batch[1], reduction="none")


def drawn_losses(model: Any, batch: Any) -> Any:
    """Return the loss of each example of labels that are drawn from the model."""
    z = model(batch[0])
    drawn = torch.multinomial(torch.softmax(z.detach(), -1), 1)[:, 0]
    return cross_entropy(z, drawn, reduction="none")


def scores(subsets: int = 50) -> None:
    """Print LDS and CPU time of the scores of digits, beside kronfluence's."""
    x, y = digits()
    x, y, new_x, new_y = x[:400], y[:400], x[400:450], y[400:450]
    model = classifier(x, y, 0)
    train = [*zip(x.split(100), y.split(100), strict=True)]
    queries = [(new_x, new_y)]

    def retrain(indices: Any, seed: int) -> Any:
        part = classifier(x[indices], y[indices], seed)
        return example_losses(part, queries[0]).detach().numpy()

    masks, losses = retrained_losses(retrain, examples=len(x), subsets=subsets)
    _print_scores(
        masks,
        losses,
        {
            **_scored(model, example_losses, train, queries, {"damping": 1e-3}),
            **{
                f"kronfluence, {name}": functools.partial(
                    _kronfluence_scores,
                    model,
                    example_losses,
                    drawn,
                    (x, y),
                    (new_x, new_y),
                    ["0", "2"],
                )
                for name, drawn in (("drawn", drawn_losses), ("empirical", None))
            },
        },
    )


def characters(subsets: int = 50, folder: str = "character_retrainings") -> None:
    """Print LDS and CPU time of the scores of sequences, beside kronfluence's.

    The retrained losses stay in a folder: what was stopped goes on there.
    """
    ids, vocabulary = sequences(count=288)
    ids, asked = ids[:256], ids[256:]

    def trained(rows: Any) -> Any:
        return gpt(vocabulary, rows, steps=20 * len(rows) // 16)

    def retrain(indices: Any, seed: int) -> Any:
        del seed  # One start and one order, so that only the examples differ.
        return token_losses(trained(ids[indices]), asked).detach().numpy()

    masks, losses = retrained_losses(
        retrain, examples=len(ids), subsets=subsets, path=folder
    )
    model = trained(ids)
    linear = with_linear_layers(model)
    names = [n for n, m in linear.named_modules() if isinstance(m, nn.Linear)]
    skip = [
        n for n, m in model.named_modules() if n not in names and not [*m.children()]
    ]

    def batch_losses(model: Any, batch: Any) -> Any:
        return token_losses(model, batch[0])

    def drawn(model: Any, batch: Any) -> Any:
        z = next_logits(model, batch[0])
        p = torch.softmax(z.detach(), -1)
        labels = torch.multinomial(p.flatten(0, 1), 1).reshape(z.shape[:2])
        return cross_entropy(z.transpose(1, 2), labels, reduction="none").sum(1)

    options = {"forward": next_logits, "skip_layers": skip}
    _print_scores(
        masks,
        losses,
        {
            **_scored(
                model, token_losses, ids.split(64), [asked],
                {"forward": next_logits, "tolerance": 3e-2, "max_iterations": 30},
                **options,
            ),
            "kronfluence": lambda: _kronfluence_scores(
                linear, batch_losses, drawn, (ids,), (asked,), names
            ),
        },
    )  # fmt: skip


def _scored(
    model: Any,
    loss: Any,
    train: Any,
    queries: Any,
    by_cg: dict[str, Any],
    **options: Any,
) -> dict[str, Any]:
    """Return functions that compute scores, by name."""

    def run(more: dict[str, Any], solving: dict[str, Any]) -> Any:
        found = collect(model, train, **options, **more)
        return influence(model, loss, train, queries, factors=found, **solving).scores

    cg = {"solver": "cg", "tolerance": 1e-3, **by_cg}
    return {
        "EKFAC": lambda: run({}, {}),
        "EKFAC, little damping": lambda: run({}, {"damping_fraction": 1e-5}),
        "EKFAC, exact labels": lambda: run({"fisher": "exact"}, {}),
        "K-FAC": lambda: run({"ekfac": False}, {}),
        "exact Gauss-Newton by CG": lambda: run({}, cg),
    }


def _print_scores(masks: Any, losses: Any, runs: dict[str, Any]) -> None:
    for name, run in runs.items():
        start = time.process_time()
        try:
            value = run()
        except ImportError:
            print(f"{name} is not installed")
            continue
        seconds = time.process_time() - start
        lds = linear_datamodeling_score(value, masks, losses)
        low, high = lds.interval
        print(
            f"{name:26} LDS {lds.mean:.3f} ({low:.3f} to {high:.3f})  {seconds:6.2f} s",
            flush=True,
        )


def _kronfluence_scores(
    model: Any, loss: Any, drawn: Any, train: Any, queries: Any, names: list[str]
) -> Any:
    data, asked = (torch.utils.data.TensorDataset(*part) for part in (train, queries))
    with tempfile.TemporaryDirectory() as folder:
        analyzer = kronfluence_of(
            copy.deepcopy(model), loss, data, folder, names, drawn_loss=drawn
        )
        analyzer.compute_pairwise_scores(
            "scores", "factors", asked, data, per_device_query_batch_size=len(asked),
            per_device_train_batch_size=64, overwrite_output_dir=True,
        )  # fmt: skip
        return analyzer.load_pairwise_scores("scores")["all_modules"]


def classes() -> None:
    """Print how much memory the variances of 1,000 classes take."""
    torch.manual_seed(0)
    for count in (250, 1000):
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, count)).eval()
        x = torch.randn(64, 64)
        posterior = Posterior(model, x.split(32), prior_precision=1.0, ekfac=False)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.process_time()
        variance = posterior.variance(x[:16])
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        P = sum(p.numel() for p in model.parameters())
        print(
            f"{count:5} classes: {tuple(variance.shape)} variances, {grown / 1024:.0f} MiB "
            f"more at the peak, {time.process_time() - start:.1f} s; a dense Jacobian has "
            f"{16 * count * P * 4 / 2**20:,.0f} MiB"
        )


def merging() -> None:
    """Print the loss and accuracy of merged models, and of the mean and Fisher's."""
    x, y = digits()
    x, y, test_x, test_y = x[:1400], y[:1400], x[1400:], y[1400:]
    rows: dict[str, list[tuple[float, float]]] = {}
    for seed in range(3):
        order = torch.randperm(1400, generator=torch.Generator().manual_seed(seed))
        start = classifier(x[order[:50]], y[order[:50]], seed)
        halves = [y[order] < 5, y[order] >= 5]
        models = []
        for half in halves:
            own = order[half]
            # A tenth of the other half's labels too, or there is nothing to merge into.
            own = torch.cat([own, order[~half][:30]])
            models.append((own, classifier(x[own], y[own], seed, start)))
        parts = {
            "EKFAC": {},
            "diagonal Fisher": {"approximations": {"dense": kc.Diagonal()}},
        }
        candidates = {"first": models[0][1], "second": models[1][1]}
        for name, options in parts.items():
            found = [
                collect(m, x[own].split(200), fisher="exact", **options)
                for own, m in models
            ]
            merged = copy.deepcopy(start)
            result = merge([m for _, m in models], found, damping_fraction=1e-3)
            merged.load_state_dict(result.parameters)
            candidates[name] = merged
        mean = copy.deepcopy(start)
        states = [m.state_dict() for _, m in models]
        mean.load_state_dict({k: (states[0][k] + states[1][k]) / 2 for k in states[0]})
        candidates["mean"] = mean
        for name, model in candidates.items():
            z = model(test_x)
            accuracy = float((z.argmax(1) == test_y).float().mean())
            rows.setdefault(name, []).append(
                (float(cross_entropy(z, test_y)), accuracy)
            )
    for name, values in rows.items():
        losses = " ".join(f"{loss:.3f}" for loss, _ in values)
        accuracies = " ".join(f"{accuracy:.3f}" for _, accuracy in values)
        print(f"{name:16} test loss {losses}   accuracy {accuracies}")


def rounding(bits: int = 3) -> None:
    """Print the divergence of a GPT-2 of rounded weights from the original."""
    ids, vocabulary = sequences()
    for seed in range(3):
        model = gpt(vocabulary, ids, steps=100, seed=seed)
        log_p = torch.log_softmax(next_logits(model, ids), -1).detach()
        names = [n for n, m in model.named_modules() if type(m).__name__ == "Conv1D"]
        found = collect(
            model, ids.split(32), forward=next_logits, ekfac=False, samples=4
        )
        line = []
        for sides in ((), ("input",), ("input", "output")):
            rounded = copy.deepcopy(model)
            for name in names:
                averages = found.statistics[name].averages
                layer = rounded.get_submodule(name)
                n = len(layer.weight)
                factors = {
                    f"{side}_factor": averages[side].value(debias=True).full()
                    for side in sides
                }
                if "input" in sides:
                    factors["input_factor"] = factors["input_factor"][:n, :n]
                weight = rounded_weight(layer.weight.detach(), bits=bits, **factors)
                layer.weight.data = weight
            log_q = torch.log_softmax(next_logits(rounded, ids), -1).detach()
            line.append(float((log_p.exp() * (log_p - log_q)).sum(-1).mean()))
        none, one, two = line
        print(
            f"seed {seed}: divergence {none:.4f} nearest, {one:.4f} one-sided, {two:.4f} "
            f"two-sided ({1 - two / one:.0%} less)"
        )


def _distance(got: Any, expected: Any) -> float:
    return float((got - expected).norm() / expected.norm())


def main() -> None:
    """Run what was asked for."""
    programs = (factors, records, cost, memory, scores, characters, classes, merging)
    programs = (*programs, rounding)
    runs = {f.__name__: f for f in programs}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=runs)
    torch.set_num_threads(1)
    np.set_printoptions(precision=3)
    runs[parser.parse_args().what]()


if __name__ == "__main__":
    main()
