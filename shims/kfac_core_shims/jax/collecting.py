"""`collect`: the curvature of a trained function over a data set."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import kfac_core as kc
from kfac_core_shims.jax.network import Network


def collect(
    network: Network,
    params: Any,
    loader: Iterable[Any],
    *,
    likelihood: kc.losses.Loss,
    path: str | os.PathLike[str] | None = None,
    fisher: kc.losses.EstimationMode = "gradients",
    samples: int = 1,
    positions: kc.losses.Positions = "signs",
    ekfac: bool = True,
    max_elements: int | None = None,
    save_every: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    communicator: kc.distributed.Communicator | None = None,
) -> kc.integration.Collected:
    """Collect the curvature of a network over a data set.

    Parameters
    ----------
    network : Network
        Its blocks say which statistics are taken.
    params : pytree
        Trained parameters.
    loader : iterable
        Batches, each a tuple of the function's inputs without labels, or its only input;
        gone through once, or twice for each part with EKFAC, the same each time.
    likelihood : kfac_core.losses.Loss
        Likelihood of one row of outputs.
    path, max_elements, save_every, progress, communicator
        As of `kfac_core.integration.collect_statistics`.
    fisher : {"gradients", "exact"}
        Whether labels are drawn from the model, or summed over.
    samples : int
        Labels drawn for each row.
    positions : {"signs", "separate", "together"}
        See `kfac_core.losses.drawn_vectors`.
    ekfac : bool
        Whether the second moments in the bases of `kfac_core.Kronecker` factors are taken
        too, as of `kfac_core.EKFAC`, by going through the data once more.

    Returns
    -------
    kfac_core.integration.Collected
        Blocks, statistics and the number of examples, for
        ``kfac_core.influence.Influence`` and ``kfac_core.Posterior``.

    Raises
    ------
    ConventionError
        For a batch that is not the function's inputs.
    KFACError
        As `kfac_core.integration.collect_statistics`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import kfac_core as kc
    >>> from kfac_core_shims.jax import Network, collect
    >>> x, params = jnp.ones((8, 4)), {"W": jnp.ones((4, 3))}
    >>> network = Network(lambda params, x: x @ params["W"], params, x)
    >>> factors = collect(network, params, [x, x], likelihood=kc.losses.Categorical())
    >>> factors.examples
    16
    """
    kc.constraints.require_one_of("fisher", fisher, ("gradients", "exact"))
    params = jax.device_put(params)
    platforms = {d.platform for x in jax.tree.leaves(params) for d in x.devices()}
    # On the CPU sums are NumPy's: SYRK and LAPACK work in their memory, where a compiled
    # program has new arrays for what it returns and for what it computes in between.
    on_host = platforms == {"cpu"}
    draw = _Vectors(likelihood, fisher, samples, positions)
    run = jax.jit(network.function)

    @contextmanager
    def capture(blocks: Mapping[str, kc.Block]) -> Iterator[Any]:
        def passes(batch: Any, seed: int) -> tuple[Any, int]:
            inputs = _inputs_of(network, params, batch)
            outputs = run.eval_shape(params, *inputs)
            outputs = outputs[0] if network.has_aux else outputs
            spec, noise = _noise_spec(draw, outputs), None
            if spec is not None:
                like = jnp.zeros((), outputs.dtype)
                noise = kc.losses.draw_noise(spec, like=like, rng=seed)
            batches = network.compiled_batches(params, inputs, noise, draw)
            return [_viewed(batches) if on_host else batches], outputs.shape[0]

        yield passes

    blocks = {
        name: kc.integration.with_moments(block)
        if ekfac and name not in network.tied
        else block
        for name, block in network.blocks.items()
    }
    origin = {}
    if path is not None:
        origin = {
            "params": kc.integration.digest_of_arrays(_arrays(params)),
            "likelihood": str(likelihood),
            "samples": str(samples if fisher == "gradients" else None),
            "positions": positions,
        }
    collected = kc.integration.collect_statistics(
        blocks,
        capture,
        loader,
        fisher=fisher,
        path=path,
        origin=origin,
        backend="numpy" if on_host else "jax",
        max_elements=max_elements,
        save_every=save_every,
        progress=progress,
        communicator=communicator,
    )
    collected.backend = "jax"
    if on_host and path is None:
        blocks_now = collected.estimator.state.blocks
        for name, state in blocks_now.items():
            blocks_now[name] = jax.tree.map(_in_jax, state)
    return collected


@dataclass(frozen=True, eq=False)
class _Vectors:
    """The vectors to backpropagate; equal ones are one compiled program."""

    likelihood: kc.losses.Loss
    fisher: kc.losses.EstimationMode
    samples: int
    positions: kc.losses.Positions

    def _value(self) -> Any:
        # A likelihood of one's own need not have a hash, and may change between calls.
        losses = (self.likelihood, *getattr(self.likelihood, "losses", ()))
        if all(type(x).__module__.startswith("kfac_core.losses.") for x in losses):
            return self.likelihood, self.fisher, self.samples, self.positions
        return id(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Vectors) and self._value() == other._value()

    def __hash__(self) -> int:
        return hash(self._value())

    def __call__(self, outputs: Any, noise: Any) -> kc.losses.SourceVectors:
        return kc.losses.drawn_vectors(
            self.likelihood,
            outputs,
            mode=self.fisher,
            seed=noise,
            shared=self.positions == "signs" or outputs.ndim > 2,
            samples=self.samples,
            positions=self.positions,
        )


@functools.lru_cache(maxsize=8)
def _noise_spec(draw: _Vectors, outputs: jax.ShapeDtypeStruct) -> Any:
    """Return the noise that vectors need; None if they need none."""
    specs = []

    def noise(spec: kc.losses.NoiseSpec) -> Any:
        specs.append(spec)
        return jnp.zeros(spec.shape)

    jax.eval_shape(functools.partial(draw, noise=noise), outputs)
    return next(iter(specs), None)


def _viewed(batches: Any) -> Any:
    """Return arrays on the CPU as NumPy's, on the same memory; narrow floats as float32."""

    def viewed(x: Any) -> Any:
        narrow = x.dtype in (jnp.bfloat16, jnp.float16)
        return (x.astype(jnp.float32) if narrow else x).__array__()

    return jax.tree.map(viewed, batches)


def _arrays(params: Any) -> Iterator[tuple[str, Any]]:
    """Yield parameters with their paths; of those on several hosts what is on this one."""
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        here = x if x.is_fully_addressable else x.addressable_data(0)
        yield jax.tree_util.keystr(path), here.__array__()


def _in_jax(x: Any) -> Any:
    return jnp.asarray(x) if hasattr(x, "dtype") else x


def _inputs_of(network: Network, params: Any, batch: Any) -> tuple[Any, ...]:
    """Return a batch as the inputs of the function; raise where it is not."""
    several = isinstance(batch, tuple)
    inputs = batch if several else (batch,)
    try:
        inspect.signature(network.function).bind(params, *inputs)
        fits = several or jax.tree.structure(inputs) == network.structure
    except TypeError:
        fits = False
    if not fits:
        raise kc.ConventionError(
            "Expected batches that are tuples of the function's inputs after the "
            f"parameters, got {jax.tree.structure(batch)}. Leave labels out: "
            "[(x,) for x, y in loader]."
        )
    return inputs
