"""`kfac_core` as a framework uses it: an `Estimator`, on NumPy, PyTorch, CuPy or JAX.

On JAX a stage is one program: ``jax.jit`` of a function of the network, the state donated.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np

import kfac_core as kc
from benchmarks.libraries.device import device_events
from benchmarks.libraries.library import AbsentError, Call, Library
from benchmarks.workloads import DAMPING, DECAY, Workload, residuals

SETTINGS: dict[str, dict[str, Any]] = {
    "inverse": {},
    "looped": {},
    "cholesky": {"refreshing": kc.Refreshing(solving="triangular")},
    "solve": {"refreshing": kc.Refreshing(solving="triangular")},
    "eigen": {"damping_rule": "exact"},
}
"""How the estimator of a stage is made, by the second word of its name."""

CYCLES: dict[str, dict[str, Any]] = {
    "cycle": {},
    "cycle-triangular": {"refreshing": kc.Refreshing(solving="triangular")},
    "cycle-status": {},
}


def make(argument: str, /, *, device: str, threads: int) -> Library:
    """Return the adapter for a backend of `kfac_core`."""
    if argument == "torch":
        torch = importlib.import_module("torch")
        torch.set_num_threads(threads)
    return _Core(argument, device, threads)


class _Core:
    def __init__(self, backend: str, device: str, threads: int, /) -> None:
        self._backend = backend
        # JAX and a GPU have schedules of their own.
        beside = device == "cpu" and backend != "jax"
        self._workers = threads if beside else 1
        places = {"torch": f"torch:{device}", "jax": "jax:cpu"}
        if backend == "jax" and device == "cuda":
            places = {"jax": "jax:gpu"}
        self._spec = places.get(backend, backend)
        self._xp = kc.array.selected_backend(self._spec).backend.namespace()
        self.events = device_events(backend, device)
        self._library = importlib.import_module(backend)
        # A matrix product is timed before there is a workload.
        self._blocks: dict[str, kc.Block] = {}

    def versions(self) -> dict[str, str]:
        versions = kc.array.get_backend(self._backend).versions()
        return {"kfac_core": kc.__version__, **versions}

    def prepare(self, workload: Workload, /) -> None:
        layout: Any = "oi" if self._backend == "torch" else "io"
        self._blocks = {
            f"layer{i}": kc.Block(
                kc.Dense(
                    in_features=layer.inputs,
                    out_features=layer.outputs,
                    bias=layer.bias,
                    weight_layout=layout,
                ),
                kc.Kronecker(),
            )
            for i, layer in enumerate(workload.layers)
        }
        self._timed = self._estimator = self._made()
        self._settings: dict[str, Any] = {}
        for index in range(workload.batches):
            arrays = [map(self._array, rows) for rows in workload.batch(index)]
            pairs = zip(self._blocks, arrays, strict=True)
            self._batch = {name: kc.Batch(*rows) for name, rows in pairs}
            self._estimator.update(self._batch)
        self._gradients = {
            name: self._parameters(name, workload.vector(i))
            for i, name in enumerate(self._blocks)
        }

    def stage(self, name: str, /) -> Call:
        kind = name.partition("-")[2]
        if kind == "looped" and self._backend == "jax":
            raise AbsentError("it would compile a program for each layer")
        batch = self._batch
        if name == "samples-direction":
            if self._backend == "jax":
                raise AbsentError("it is computed in float64, which is off")
            return self._direction
        if name == "soap-steps":
            return self._soap()
        if name == "statistics":
            self._timed = estimator = self._made()
            return lambda: estimator.update(batch)
        if name in CYCLES:
            check: Any = "status" if name == "cycle-status" else "raise"
            self._timed = estimator = self._made(**CYCLES[name])
            return lambda: self._cycle(estimator, check)
        if kind not in SETTINGS:
            raise AbsentError("it is the drivers' own")
        self._timed = estimator = self._set_to(SETTINGS[kind])
        if name == "refresh-looped":
            return self._refresh_looped
        if name.startswith("refresh"):
            return estimator.refresh
        estimator.refresh()
        if name == "precondition-looped":
            return self._precondition_looped
        return lambda: estimator.precondition(self._gradients)

    def answer(self, stage: str, /) -> list[np.ndarray[Any, Any]]:
        found = self.stage(stage)()
        return [
            kc.to_numpy(self._blocks[name].parameters_to_matrix(found[name]))
            for name in self._blocks
        ]

    def finish(self, result: Any, /) -> None:
        if self._spec == "torch:cuda":
            self._library.cuda.synchronize()
        elif self._backend == "cupy":
            self._library.cuda.get_current_stream().synchronize()
        elif self._backend == "jax":
            states = [self._timed.state[name] for name in self._blocks]
            held = [(state.statistics, state.operator) for state in states]
            self._library.block_until_ready((result, held))

    def gemm(self, size: int, /) -> Call:
        generator = np.random.default_rng(0)
        a, b = (
            self._array(generator.standard_normal((size, size), dtype=np.float32))
            for _ in range(2)
        )
        return lambda: self._xp.matmul(a, b)

    def _made(self, **settings: Any) -> Any:
        """Return an estimator without statistics; guards and residual checks are on."""
        chosen: dict[str, Any] = {"damping_rule": "factored", **settings}
        made = kc.Estimator(
            self._blocks,
            decay=DECAY,
            damping=DAMPING,
            reduction="sum",
            execution=kc.Execution(workers=self._workers),
            **chosen,
        )
        if self._backend != "jax":
            return made
        return _Programs(made.network, self._array(np.zeros(1, np.float32)))

    def _set_to(self, settings: dict[str, Any]) -> Any:
        """Return the estimator that holds the statistics, made with some settings."""
        if settings != self._settings:
            estimator = self._made(**settings)
            for name in self._blocks:
                statistics = self._estimator.state[name].statistics
                assert statistics is not None
                estimator.absorb({name: statistics})
            self._estimator, self._settings = estimator, settings
        return self._estimator

    def _cycle(self, estimator: Any, check: Any) -> Any:
        estimator.update(self._batch, check=check)
        estimator.refresh(check=check)
        return estimator.precondition(self._gradients)

    def _direction(self) -> Any:
        """Return a direction of Gauss-Newton, with a residual for each row."""
        layers = {name: block.layer for name, block in self._blocks.items()}
        J = kc.samples.Jacobian.of(layers, self._batch)
        r = self._array(residuals(J.examples))
        return kc.samples.sample_curvature(J, damping=DAMPING).direction(r)

    def _soap(self) -> Call:
        """Return ten steps of the optimizer, with rows on the last, which renews."""
        if self._backend != "torch":
            raise AbsentError("SOAP is an optimizer of frameworks")
        torch = self._library
        soap = importlib.import_module("kfac_core_shims.torch").SOAP
        batches = list(self._batch.values())
        model = torch.nn.Sequential()
        for block in self._blocks.values():
            of = block.layer
            linear = torch.nn.Linear(of.in_features, of.out_features, bias=of.bias)
            model.append(linear.to(batches[0].inputs.device))
        optimizer = soap(model)

        def take(pairs: Any, steps: int) -> None:
            optimizer.zero_grad()
            outputs = [layer(batch.inputs) for layer, batch in pairs]
            torch.autograd.backward(outputs, [b.output_grads for _, b in pairs])
            for _ in range(steps):
                optimizer.step()

        pairs = list(zip(model, batches, strict=True))
        for _ in range(9):
            take(pairs, 1)
        # The tenth step renews the bases, the nine after it use them.
        return lambda: take(pairs, 10)

    def _refresh_looped(self) -> None:
        for name in self._blocks:
            self._estimator.refresh([name])

    def _precondition_looped(self) -> Any:
        found: dict[str, Any] = {}
        for name, gradient in self._gradients.items():
            found |= self._estimator.precondition({name: gradient})
        return found

    def _parameters(self, name: str, vector: Any) -> dict[str, Any]:
        """Return a vector as the parameters that a framework would have, contiguous."""
        parameters = self._blocks[name].matrix_to_parameters(vector)
        return {k: self._array(np.ascontiguousarray(x)) for k, x in parameters.items()}

    def _array(self, values: Any) -> Any:
        return kc.asarray(values, backend=self._spec)


class _Programs:
    """A network's functions as programs of JAX, with the state that they write over."""

    def __init__(self, network: kc.Network, like: Any) -> None:
        jax = importlib.import_module("jax")
        shim = importlib.import_module("kfac_core_shims.jax.compiled")
        known = shim.compiler_options(jax.default_backend())
        program = functools.partial(jax.jit, compiler_options=known and dict(known))
        self._network = network
        self.state = network.initial(like, damping=DAMPING)
        self._update, self._refresh = (
            program(functools.partial(stage, check="status"), donate_argnums=0)
            for stage in (network.update, network.refresh)
        )
        self._precondition = program(network.precondition)

    def absorb(self, moments: dict[str, kc.Statistics], /) -> None:
        self.state = self._network.absorb(self.state, moments, decay=DECAY)

    def update(self, batch: Any, /, *, check: str = "raise") -> None:
        self.state = self._update(self.state, batch, decay=DECAY)
        self._look(check)

    def refresh(self, *, check: str = "raise") -> None:
        self.state = self._refresh(self.state, damping=DAMPING)
        self._look(check)

    def precondition(self, gradients: Any, /) -> Any:
        return self._precondition(self.state, gradients)

    def _look(self, check: str) -> None:
        """Raise for flags, as an estimator does; this synchronizes with the device."""
        if check == "raise" and not bool(self.state.is_good()):
            raise kc.KFACError("a stage was flagged")
