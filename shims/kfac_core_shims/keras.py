"""K-FAC for Keras 3 models, applied between the gradients and a Keras optimizer.

The model is run once more with its layers tapped: x is what a layer was called with, g
what comes back to its output before the activation, times ``sqrt(N / R)`` where it saw N
examples and the outputs (logits) have R rows: the curvature is of the mean over these.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import keras
from keras import layers, ops

import kfac_core as kc

__all__ = ["KFAC"]

TAPPED, REDUCTIONS = ("torch", "jax"), ("mean", "sum")
MODES: Any = {"sampled": "gradients", "exact": "exact", "empirical": "empirical"}
PRODUCTS = layers.Dense, layers.Conv1D, layers.Conv2D, layers.Conv3D
NORMALIZATIONS = layers.LayerNormalization, layers.BatchNormalization
WEIGHTS: dict[Any, dict[str, str]] = {
    **{kind: {"weight": "kernel", "bias": "bias"} for kind in PRODUCTS},
    **{kind: {"scale": "gamma", "shift": "beta"} for kind in NORMALIZATIONS},
    layers.Embedding: {"weight": "embeddings"},
}


class KFAC:
    """K-FAC for a built Keras model: natural gradients, on PyTorch or JAX.

    Parameters
    ----------
    model : keras.Model
        Built model.  Only layers of `WEIGHTS` have blocks; gradients of the others
        (``skipped``) are unchanged.
    likelihood : kfac_core.losses.Loss
        Likelihood of one row of outputs: ``Categorical()`` for cross-entropy.
    reduction : {"mean", "sum"}
        Reduction over the rows, in the loss whose gradients are given.  Keras's default is
        "mean".
    fisher : {"sampled", "exact", "empirical"}
        Whether labels are drawn from the model, all of its labels are used, or the
        targets of the data.
    update_every, refresh_every : int
        Steps between statistics, and between factorizations.
    **options : object
        Options of the attribute ``estimator``: `damping`, `decay`; a "factored"
        `damping_rule`.
    """

    def __init__(
        self,
        model: Any,
        *,
        likelihood: Any,
        reduction: Literal["mean", "sum"],
        fisher: Literal["sampled", "exact", "empirical"],
        update_every: int = 1,
        refresh_every: int = 1,
        **options: Any,
    ) -> None:
        library = keras.backend.backend()
        for value, among in (
            (library, TAPPED),
            (reduction, REDUCTIONS),
            (fisher, MODES),
        ):
            if value not in among:
                raise kc.ConventionError(f"Expected one of {[*among]}, got {value!r}.")
        self.model, self.likelihood, self.reduction = model, likelihood, reduction
        self.mode, self.steps, self.rows = MODES[fisher], 0, 0
        self.update_every, self.refresh_every = update_every, refresh_every
        self.sites: dict[str, tuple[Any, dict[str, Any]]] = {}
        self.skipped: dict[str, str] = {}
        blocks: dict[str, kc.Block] = {}
        for layer in model._flatten_layers(include_self=False):
            if (found := _block(layer)) is not None:
                # Numbered here: Keras's own names go on counting in the next model.
                name = f"{type(layer).__name__}_{len(blocks)}"
                blocks[name], self.sites[name] = found[0], (layer, found[1])
            elif any(v.trainable for v in layer._trainable_variables):
                self.skipped[layer.name] = type(layer).__name__
        if not blocks:
            raise kc.UnsupportedError("The model is not built, or has no such layer.")
        if library == "jax":
            from kfac_core_shims.jax import compiled

            # Each operation would else be a program of its own.
            options = {"execution": compiled, **options}
        options |= {
            "sources": kc.losses.source_reduction_of(self.mode),
            "reduction": "sum",
        }
        self.estimator = kc.Estimator(blocks, mode=self.mode, **options)

    @property
    def wants_statistics(self) -> bool:
        """Whether `observe` is due before the next `precondition`."""
        return self.steps % self.update_every == 0

    def observe(self, x: Any, y: Any = None, /, *, state: Any = None) -> None:
        """Accumulate a batch; `y` is for empirical Fisher, `state` for stateless use."""
        x = keras.tree.map_structure(ops.convert_to_tensor, x)
        groups = self.model.trainable_variables, self.model.non_trainable_variables
        state = state or [[ops.stop_gradient(v.value) for v in g] for g in groups]
        training = {"training": True} if self.model._call_has_training_arg else {}

        def run(zeros: Any) -> Any:
            uses: list[Any] = []

            def tap(name: str, inputs: Any, outputs: Any) -> Any:
                uses.append((name, inputs, outputs))
                return outputs + zeros[len(uses) - 1] if zeros else outputs

            taps = [(s[0], _taps(n, s[0], tap)) for n, s in self.sites.items()]
            with _shadowed(taps):
                outputs = self.model.stateless_call(*state, x, **training)[0]
            return outputs if zeros else uses

        uses = run(None)
        outputs, pull = _pullback(run, [ops.zeros_like(z) for *_, z in uses])
        spec = kc.losses.noise_spec(self.likelihood, outputs, mode=self.mode)
        # Of the step alone, so that a run that goes on draws what it would have drawn.
        noise = spec and kc.losses.draw_noise(spec, like=outputs, rng=self.steps)
        y = y if y is None else ops.convert_to_tensor(y)
        given = {"targets": y, "noise": noise}
        made = kc.losses.vectors(self.likelihood, outputs, mode=self.mode, **given)
        rows = int(ops.size(outputs)) // outputs.shape[-1]
        batches: dict[str, Any] = {}
        pulled = zip(*map(pull, made.vectors), strict=True)
        for (name, inputs, _), grads in zip(uses, pulled, strict=True):
            g = ops.stack(grads) * (inputs.shape[0] / rows) ** 0.5
            padded = getattr(self.sites[name][0], "mask_zero", False)
            # Padding that the layers above do not leave out is an id like others.
            mask = (inputs != 0) | ops.any(g != 0, axis=(0, -1)) if padded else None
            batches.setdefault(name, []).append(kc.Batch(inputs, g, mask, len(grads)))
        self.estimator.update({n: b if b[1:] else b[0] for n, b in batches.items()})
        self.rows = rows

    def precondition(self, gradients: Sequence[Any], /) -> list[Any]:
        """Return natural gradients, of ``model.trainable_variables``; counts a step."""
        place = {id(v): i for i, v in enumerate(self.model.trainable_variables)}
        if not all(g is None or bool(ops.all(ops.isfinite(g))) for g in gradients):
            raise kc.NotFiniteError("A gradient is not finite; nothing was changed.")
        if self.steps % self.refresh_every == 0:
            self.estimator.refresh()
        vector: dict[str, Any] = {}
        for name, (_, own) in self.sites.items():
            found = {p: gradients[place[id(v)]] for p, v in own.items()}
            unused = any(g is None for g in found.values())
            block = self.estimator.network.block_of(name)
            if not unused and self.estimator.state[block].operator is not None:
                vector[name] = found
        result, scale = list(gradients), self.rows if self.reduction == "sum" else 1
        for name, arrays in self.estimator.precondition(vector).items():
            for parameter, array in arrays.items():
                result[place[id(self.sites[name][1][parameter])]] = array / scale
        self.steps += 1
        return result

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Let ``model.fit`` give natural gradients to its optimizer in this context."""
        model, apply = self.model, self.model.optimizer.apply
        if model.jit_compile and not model.run_eagerly:
            raise kc.UnsupportedError("Compile the model with jit_compile=False.")

        def train_step(*given: Any, step: Any = model.train_step) -> Any:
            x, y, _ = keras.utils.unpack_x_y_sample_weight(given[-1])
            if self.wants_statistics:
                self.observe(x, y, state=given[0][:2] if given[1:] else None)
            return step(*given)

        own = {"apply": lambda g, v=None: apply(self.precondition(g), v)}
        with _shadowed([(model, {"train_step": train_step}), (model.optimizer, own)]):
            yield


def _block(layer: Any) -> tuple[kc.Block, dict[str, Any]] | None:
    """Return a layer's block and variables; None for one that is not known."""
    kind = type(layer)
    names = {p: getattr(layer, n, None) for p, n in WEIGHTS.get(kind, {}).items()}
    held = {p: variable for p, variable in names.items() if variable is not None}
    changed = getattr(layer, "lora_enabled", False) or layer.quantization_mode
    changed = changed or (kind in NORMALIZATIONS and layer.axis not in (-1, [-1]))
    if changed or not held or not all(v.trainable for v in held.values()):
        return None
    shape = (0, *next(iter(held.values())).shape)
    n, m = shape[-2:]
    if kind is layers.Embedding:
        made: Any = kc.Embedding(num_embeddings=n, features=m, weight_layout="io")
        return kc.Block(made, kc.Kronecker(input="diagonal")), held
    if kind in NORMALIZATIONS:
        shapes = {f"{p}_shape": None if v is None else (m,) for p, v in names.items()}
        return kc.Block(kc.ScaleShift(**shapes), kc.Diagonal()), held
    where: Any = {"bias": "bias" in held, "weight_layout": "io"}
    if kind is layers.Dense:
        made = kc.Dense(in_features=n, out_features=m, **where)
        return kc.Block(made, kc.Kronecker()), held
    where |= {"weight_layout": "spatial_io", "data_layout": layer.data_format}
    where |= {"strides": layer.strides, "dilation": layer.dilation_rate}
    causal = (((shape[1] - 1) * layer.dilation_rate[0], 0),)
    where["padding"] = causal if layer.padding == "causal" else layer.padding
    where |= {"in_channels": n * layer.groups, "kernel_size": shape[1:-2]}
    made = kc.Conv(out_channels=m, **where, groups=layer.groups)
    return kc.Block(made, kc.Kronecker()), held


def _taps(name: str, layer: Any, tap: Any) -> dict[str, Any]:
    """Return the attributes with which a layer's call tells what it sees."""
    call = layer.call
    seen: list[Any] = []
    if type(layer) is layers.Embedding:
        return {"call": lambda x: tap(name, ops.cast(x, "int32"), call(x))}
    if type(layer) in NORMALIZATIONS:
        gamma, beta = layer.gamma, layer.beta

        def normalized(x: Any, **options: Any) -> Any:
            y = x = call(x, **options)
            y = y if gamma is None else y * ops.cast(gamma, x.dtype)
            return tap(name, x, y if beta is None else y + ops.cast(beta, x.dtype))

        plain = dict.fromkeys(("gamma", "beta", "scale", "center"))
        return {"call": normalized, **plain}

    def called(x: Any, **options: Any) -> Any:
        seen.append(x)
        return call(x, **options)

    act = layer.activation
    return {"call": called, "activation": lambda z: act(tap(name, seen.pop(), z))}


@contextlib.contextmanager
def _shadowed(changes: list[tuple[Any, dict[str, Any]]]) -> Iterator[None]:
    """Replace attributes of objects, past Keras's tracking of what is set."""
    held = [{k: vars(o)[k] for k in new if k in vars(o)} for o, new in changes]
    for thing, new in changes:
        vars(thing).update(new)
    try:
        yield
    finally:
        for (thing, new), old in zip(changes, held, strict=True):
            for name in new:
                del vars(thing)[name]
            vars(thing).update(old)


def _pullback(run: Any, zeros: list[Any]) -> tuple[Any, Any]:
    """Return ``run(zeros)``, and what takes its output gradient to those of `zeros`."""
    if keras.backend.backend() == "jax":
        import jax

        outputs, pulled = jax.vjp(run, zeros)
        return outputs, lambda vector: pulled(vector)[0]
    import torch

    outputs = run([zero.requires_grad_() for zero in zeros])
    # What a layer computes for nothing has the gradient zero, as on JAX.
    keep: Any = {"retain_graph": True, "materialize_grads": True}
    return outputs, lambda v: torch.autograd.grad(outputs, zeros, v, **keep)
