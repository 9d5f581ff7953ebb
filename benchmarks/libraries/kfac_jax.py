"""kfac-jax: its blocks, fed rows.

The blocks are those that its own tracer makes of a network of registered dense layers.
Each stage is one compiled function over all blocks, as in its optimizer, with the states
donated where they change.
"""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Any

import jax
import jax.numpy as jnp
import kfac_jax
import numpy as np
from kfac_jax._src.layers_and_loss_tags import LayerData
from kfac_jax._src.tracer import LayerVjpData

from benchmarks.libraries.library import AbsentError, Call, Events, Library
from benchmarks.workloads import DAMPING, DECAY, Workload


def make(argument: str, /, *, device: str, threads: int) -> Library:
    """Return the adapter; `argument` is how it inverts: ``"lu"`` or ``"cholesky"``."""
    kfac_jax.utils.set_use_cholesky_inversion(argument == "cholesky")
    return _KfacJax(jax.devices("gpu" if device == "cuda" else "cpu")[0])


class _KfacJax:
    events: Events | None = None

    def __init__(self, device: Any, /) -> None:
        self._device = device

    def versions(self) -> dict[str, str]:
        version = importlib.metadata.version("kfac-jax")
        return {"kfac-jax": version, "jax": str(jax.__version__)}

    def prepare(self, workload: Workload, /) -> None:
        self._layers = workload.layers
        self._blocks = _blocks(workload)
        self._update = jax.jit(
            functools.partial(_updated, self._blocks), donate_argnums=0
        )
        states = self._initial()
        for index in range(workload.batches):
            self._rows = jax.tree.map(self._array, list(workload.batch(index)))
            states = self._update(states, self._rows, DECAY)
        self._states = states
        self._gradients = [
            jax.tree.map(self._array, (V[:n], V[n]) if bias else (V,))
            for V, n, bias in (
                (workload.vector(i), layer.inputs, layer.bias)
                for i, layer in enumerate(self._layers)
            )
        ]

    def stage(self, name: str, /) -> Call:
        kind = name.partition("-")[2] or "inverse"
        if kind not in ("inverse", "eigen"):
            raise AbsentError("it inverts or decomposes all blocks, nothing else")
        if name == "statistics":
            return self._repeated_update(None)
        exact = kind == "eigen"
        refresh = jax.jit(functools.partial(_refreshed, self._blocks, exact))
        multiply = jax.jit(functools.partial(_multiplied, self._blocks, exact))
        if name == "cycle":
            return self._repeated_update(
                lambda states: multiply(refresh(states, DAMPING), self._gradients)
            )
        if name.startswith("refresh"):
            return lambda: refresh(self._states, DAMPING)
        states = refresh(self._states, DAMPING)
        return lambda: multiply(states, self._gradients)

    def answer(self, stage: str, /) -> list[np.ndarray[Any, Any]]:
        return [
            np.concatenate([np.atleast_2d(np.array(x)) for x in parameters])
            for parameters in self.stage(stage)()
        ]

    def finish(self, result: Any, /) -> None:
        jax.block_until_ready(result)

    def gemm(self, size: int, /) -> Call:
        raise AbsentError("it is JAX's")

    def _initial(self) -> list[Any]:
        return [
            block.init(
                jax.random.PRNGKey(0),
                exact_powers_to_cache=-1,
                approx_powers_to_cache=-1,
                cache_eigenvalues=False,
            )
            for block in self._blocks
        ]

    def _repeated_update(self, rest: Any) -> Call:
        held = [self._initial()]

        def call() -> Any:
            held[0] = self._update(held[0], self._rows, DECAY)
            return held[0] if rest is None else rest(held[0])

        return call

    def _array(self, values: Any) -> Any:
        return jax.device_put(jnp.array(values), self._device)


def _blocks(workload: Workload) -> tuple[Any, ...]:
    """Return one block a layer, by tracing a network that is never run."""

    def network(parameters: Any, inputs: Any) -> Any:
        total = 0.0
        for weights, x in zip(parameters, inputs, strict=True):
            y = x @ weights[0] + (weights[1] if len(weights) > 1 else 0.0)
            y = kfac_jax.register_dense(y, x, *weights)
            kfac_jax.register_squared_error_loss(y, jnp.zeros_like(y))
            total = total + jnp.sum(y)
        return total

    estimator = kfac_jax.BlockDiagonalCurvature(network, auto_register_tags=False)
    parameters, inputs = [], []
    for layer in workload.layers:
        weight = jnp.zeros((layer.inputs, layer.outputs))
        bias = (jnp.zeros(layer.outputs),) if layer.bias else ()
        parameters.append((weight, *bias))
        inputs.append(jnp.zeros((1, layer.inputs)))
    estimator.finalize((parameters, inputs))
    found: tuple[Any, ...] = tuple(estimator.blocks)
    return found


def _updated(blocks: Any, states: Any, rows: Any, decay: Any) -> list[Any]:
    return [
        block.update_curvature_matrix_estimate(
            state,
            estimation_data=_vjp_data(x, g),
            ema_old=decay,
            ema_new=1.0,
            identity_weight=0.0,
            batch_size=x.shape[0],
        )
        for block, state, (x, g) in zip(blocks, states, rows, strict=True)
    ]


def _vjp_data(x: Any, g: Any) -> Any:
    empty: tuple[Any, ...] = ()
    return LayerVjpData(
        primals=LayerData(inputs=(x,), outputs=empty, params=empty),
        tangents=LayerData(inputs=empty, outputs=(g,), params=empty),
    )


def _refreshed(blocks: Any, exact: bool, states: Any, damping: Any) -> list[Any]:
    power: dict[str, Any] = {"exact_powers": -1 if exact else None}
    power["approx_powers"] = None if exact else -1
    return [
        block.update_cache(state, identity_weight=damping, eigenvalues=False, **power)
        for block, state in zip(blocks, states, strict=True)
    ]


def _multiplied(blocks: Any, exact: bool, states: Any, gradients: Any) -> list[Any]:
    return [
        block.multiply_inverse(
            state,
            gradient,
            identity_weight=DAMPING,
            exact_power=exact,
            use_cached=True,
        )
        for block, state, gradient in zip(blocks, states, gradients, strict=True)
    ]
