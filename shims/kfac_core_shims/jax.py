"""K-FAC for JAX: plain functions and Flax modules, a whole step inside one ``jax.jit``.

Conventions.  A network is a pure function ``(params, *inputs) -> outputs`` of a batch
whose first axis is that of the examples.  Its layers are found while it is traced: those
of Flax automatically, others if marked by `dense` or `tap`.  Zeros are added to their
outputs, and derivatives by these are the output gradients.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import kfac_core as kc

__all__ = ["KFAC", "Network", "compiled", "dense", "tap"]

_current: ContextVar[kc.integration.Recorder | None] = ContextVar(
    "_current", default=None
)


def tap(
    name: str, layer: Any, x: Any, y: Any, /, mask: Any = None, **given: Any
) -> Any:
    """Mark ``y`` as the outputs of ``layer`` for the batch ``x``, and return it.

    Parameters
    ----------
    name, layer : str, Layer
        Name of the block, and its geometry, such as `kfac_core.Conv`.
    x, y, mask : array, shape (N, ...)
        See `kfac_core.Batch`.
    **given : array
        Parameters of the layer by name, in any shape; must be leaves of ``params``.

    Raises
    ------
    ConventionError
        For arrays that are not leaves of ``params``.
    """
    here = _current.get()
    return here.met(name, layer, given, x=x, y=y, mask=mask) if here else y


def dense(name: str, x: Any, weight: Any, bias: Any = None, /, mask: Any = None) -> Any:
    """Return ``x @ weight + bias``, marked by `tap`; the weight has shape (in, out)."""
    y, given = x @ weight, {"weight": weight}
    if bias is not None:
        y, given["bias"] = y + bias, bias
    return tap(name, _dense(weight.shape, "bias" in given), x, y, mask, **given)


class Network:
    """A network function, the ``blocks`` found in it, and its derivatives.

    Parameters
    ----------
    function : callable
        ``(params, *inputs) -> outputs``, or ``-> (outputs, aux)`` with `has_aux`.
    params, *inputs : pytree
        Arrays, or their shapes and dtypes; the function is traced with them.
    approximation, rest
        As for `kfac_core.integration.Wiring`, which raises for unsupported layers.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        params: Any,
        /,
        *inputs: Any,
        approximation: Callable[[str, Any], Any] = kc.integration.usual_approximation,
        rest: Literal["refuse", "keep"] = "refuse",
        has_aux: bool = False,
    ) -> None:
        self._function, self._has_aux = function, has_aux
        paths = jax.tree_util.tree_leaves_with_path(params)
        leaves = {jax.tree_util.keystr(path): leaf.shape for path, leaf in paths}
        uses, _ = self._uses(params, inputs)
        self.wiring = kc.integration.Wiring(
            uses, leaves, approximation=approximation, rest=rest
        )
        self.blocks = self.wiring.blocks

    def vjp(self, params: Any, /, *inputs: Any) -> tuple[Any, Callable[..., Any]]:
        """Return the outputs (with `has_aux`, and aux), and what pulls vectors back.

        ``pull(cotangent, reduction="mean") -> (gradients, Captured)``, with the reduction
        of the loss whose derivative by the outputs the cotangent is; ``pull(made) ->
        Captured`` for `kfac_core.losses.SourceVectors`.
        """
        uses, shapes = self._uses(params, inputs)

        def run(params: Any, zeros: Any) -> Any:
            found, trace = self._run(params, inputs, zeros)
            outputs, aux = found if self._has_aux else (found, None)
            return outputs, (aux, [(x, mask) for x, mask, _ in trace.seen])

        zeros = [jnp.zeros(y.shape, y.dtype) for y in shapes]
        outputs, back, (aux, seen) = jax.vjp(run, params, zeros, has_aux=True)

        def pull(cotangent: Any, /, *, reduction: Any = None) -> Any:
            made = cotangent if isinstance(cotangent, kc.losses.SourceVectors) else None
            vectors = cotangent if made is None else made.vectors
            vectors = jax.tree.map(
                lambda v, y: jnp.asarray(v, y.dtype), vectors, outputs
            )
            gradients, grads = (back if made is None else jax.vmap(back))(vectors)
            captured = self.wiring.captured(
                uses, seen, grads, reduction=reduction, made=made
            )
            return (gradients, captured) if made is None else captured

        return ((outputs, aux) if self._has_aux else outputs), pull

    def _run(self, params: Any, inputs: Any, zeros: Any = None) -> tuple[Any, Any]:
        linen = sys.modules.get("flax.linen")
        recorder = kc.integration.Recorder(jax.tree.leaves(params), zeros)
        token = _current.set(recorder)
        try:
            with linen.intercept_methods(_flax) if linen else contextlib.nullcontext():
                return self._function(params, *inputs), recorder
        finally:
            _current.reset(token)

    def _uses(self, params: Any, inputs: Any) -> tuple[list[Any], list[Any]]:
        uses: list[Any] = []

        def run(params: Any, inputs: Any) -> Any:
            _, trace = self._run(params, inputs)
            uses.extend(trace.uses)
            return trace.seen

        return uses, [y for _, _, y in jax.eval_shape(run, params, inputs)]


class KFAC:
    """K-FAC as an optax gradient transformation.

    Its state is a `kfac_core.NetworkState`; a whole step can be compiled by one
    ``jax.jit``.

    Parameters
    ----------
    network : Network
        Network to train.
    reduction : {"sum", "mean", "mean_rows"}
        Reduction of the loss of the output gradients: ``"sum"`` for vectors of
        `kfac_core.losses.vectors`, else as given to `Network.vjp`.
    damping : float or mapping of str to float
        Damping of the operators, unless a step gives another.
    refresh_every : int
        Number of updates between refreshes; the first update refreshes.
    rebase_every : int, optional
        Number of updates between recomputations of the bases, required for a network with
        `kfac_core.Eigen` (EKFAC) blocks.
    moments : {"kronecker", "carried"}
        How second moments start in new bases; see `kfac_core.Eigen.rebased`.
    **options : object
        Options of `kfac_core.Estimator`, such as `decay`, `damping_rule` or `sources`.

    Attributes
    ----------
    curvature : kfac_core.Network
        Network whose pure functions `update` calls.

    Raises
    ------
    ConventionError
        If `rebase_every` is missing, or there are no bases.
    """

    def __init__(
        self,
        network: Network,
        *,
        reduction: Literal["sum", "mean", "mean_rows"],
        damping: Any,
        refresh_every: int,
        rebase_every: int | None = None,
        moments: Literal["kronecker", "carried"] = "kronecker",
        **options: Any,
    ) -> None:
        made = {"reduction": reduction, "damping": damping, **options}
        self._made = functools.partial(kc.Estimator, network.blocks, **made)
        estimator = self._made()
        self._wiring, self.curvature = network.wiring, estimator.network
        self.damping, self.decay = estimator.damping, estimator.decay
        self.refresh_every, self.rebase_every = refresh_every, rebase_every
        self.moments = moments
        kinds = [block.approximation for block in network.blocks.values()]
        if any(kind.has_bases for kind in kinds) != (rebase_every is not None):
            raise kc.ConventionError(
                "Expected `rebase_every` for a network with Eigen blocks, and for no other."
            )

    def init(self, params: Any, /) -> kc.NetworkState:
        """Return the state before the first update.

        Directions are zero before the first refresh.
        """
        like = jax.tree.leaves(params)[0]
        return self.curvature.initial(like, damping=self.damping)

    def update(
        self,
        updates: Any,
        state: kc.NetworkState,
        params: Any = None,
        *,
        captured: kc.integration.Captured | None,
        damping: Any = None,
        **more: Any,
    ) -> tuple[Any, kc.NetworkState]:
        """Return the inverse curvature times gradients of the mean loss, and the state.

        Parameters
        ----------
        updates, state, params : pytree
            As optax has them.  A batch that a block flags changes ``status`` only.
        captured : Captured or None
            From `Network.vjp`; None for a step without statistics.
        damping : float, array, or mapping of str to these, optional
            Damping of a refresh in this step.
        **more
            Arguments of other transformations in a chain; ignored.

        Raises
        ------
        ConventionError
            For batches captured under other conventions.
        """
        if captured is not None:
            state = self._fed(
                state, captured, self.damping if damping is None else damping
            )
        leaves, form = jax.tree.flatten(updates)
        found = self.curvature.precondition(state, self._wiring.vectors(leaves))
        return jax.tree.unflatten(form, self._wiring.replaced(leaves, found)), state

    def _fed(
        self, state: kc.NetworkState, captured: kc.integration.Captured, damping: Any
    ) -> kc.NetworkState:
        """Return the state after an update, and what is due after it."""
        network = self.curvature
        promised = network.conventions
        same = captured.reduction == promised.reduction
        if not same or captured.sources not in (None, promised.sources):
            raise kc.ConventionError(
                f"Expected batches captured under {promised}, got "
                f"reduction={captured.reduction!r}, sources={captured.sources!r}. Say the "
                "same in both."
            )
        updates = next(iter(state.blocks.values())).updates
        state = network.update(
            state, captured.batches, decay=self.decay, check="status"
        )
        good = state.is_good()

        def kept(state: kc.NetworkState) -> kc.NetworkState:
            return state

        def rebased(state: kc.NetworkState) -> kc.NetworkState:
            return network.rebase(state, moments=self.moments, check="status")

        def refreshed(state: kc.NetworkState) -> kc.NetworkState:
            return network.refresh(state, damping=damping, check="status")

        if self.rebase_every is not None:
            due = good & (updates % self.rebase_every == 0)
            state = jax.lax.cond(due, rebased, kept, state)
        due = good & (updates % self.refresh_every == 0)
        made: kc.NetworkState = jax.lax.cond(due, refreshed, kept, state)
        return made

    def estimator(self, state: kc.NetworkState | None = None, /) -> kc.Estimator:
        """Return an estimator of the same options, which holds a state if one is given.

        For saving and loading a state, and for reports.

        Parameters
        ----------
        state : NetworkState, optional
            State whose arrays have values.  A block that was never refreshed is left out.
        """
        made = self._made()
        if state is not None:
            made.state = state.updated(
                {
                    name: kc.BlockState()
                    for name, held in state.blocks.items()
                    if not int(held.refreshes)
                }
            )
        return made

    def state(self, estimator: kc.Estimator, params: Any, /) -> kc.NetworkState:
        """Return the state that an estimator holds, such as one that was loaded.

        Parameters
        ----------
        estimator : kfac_core.Estimator
            Made by `estimator`.
        params : pytree
            See `init`.

        Returns
        -------
        NetworkState
            State to pass to `update`.

        Raises
        ------
        StateError
            If statistics or operators are of another form.
        """
        return self.curvature.in_form_of(estimator.state, self.init(params))

    def optax(self) -> Any:
        """Return the optax transformation, to be chained with a learning rate."""
        import optax

        return optax.GradientTransformationExtraArgs(self.init, self.update)


def compiled(function: Any, tasks: Any, /) -> dict[str, Any]:
    """Run a function of several blocks as one compiled program: an executor.

    Pass it as ``kfac_core.Estimator(..., execution=compiled)``.  If a result is flagged,
    the blocks are run one by one without the compiler, so that factorizations use the
    fallback chain, and errors name the block.

    Parameters
    ----------
    function : callable
        Takes a name, a block and arguments.
    tasks : mapping of str to tuple
        For each name, the block and its arguments.

    Returns
    -------
    dict of str to object
        Results of the function, by name.
    """
    raises = getattr(function, "check", "status") == "raise"
    traced = dataclasses.replace(function, check="status") if raises else function
    fixed = tuple(
        (name, tuple(part if isinstance(part, _FIXED) else None for part in task))
        for name, task in tasks.items()
    )
    given = {
        name: [None if isinstance(part, _FIXED) else part for part in task]
        for name, task in tasks.items()
    }
    # A part of another program is compiled as that is; JAX refuses options for it.
    inside = isinstance(jnp.zeros(()), jax.core.Tracer)
    options = None if inside else _compiler_options(jax.default_backend())
    try:
        hash(traced)
    except TypeError:  # a product with arguments that no program can be known by
        return _one_by_one(function, tasks)
    try:
        found = _program(options)(traced, fixed, given)
    except kc.NotReadyError:  # a product prepares what it needs, and may raise
        return _one_by_one(function, tasks)
    if raises and not all(map(function.accepts, found.values())):
        return _one_by_one(function, tasks)
    return {name: found[name] for name in tasks}


def _one_by_one(function: Any, tasks: Any) -> dict[str, Any]:
    return {name: function(name, *task) for name, task in tasks.items()}


_FIXED = (kc.Block, str, frozenset)
"""What is a part of a program among a block's arguments."""


@functools.cache
def _program(options: tuple[tuple[str, str], ...] | None) -> Any:
    """Return the loop over blocks as a program for each form of its arguments."""

    def run(function: Any, fixed: Any, given: Any) -> dict[str, Any]:
        if hasattr(function, "memo"):
            # What is remembered belongs to one trace.
            function = dataclasses.replace(function, memo={})
        tasks = {
            name: tuple(
                traced if own is None else own
                for own, traced in zip(parts, given[name], strict=True)
            )
            for name, parts in fixed
        }
        return _one_by_one(function, tasks)

    known = None if options is None else dict(options)
    return jax.jit(run, static_argnums=(0, 1), compiler_options=known)


@functools.cache
def _compiler_options(platform: str) -> tuple[tuple[str, str], ...] | None:
    """Return what the compiler is told, None where it does not know it.

    On the CPU to order operations so that little memory is in use at a time.  By default
    all blocks are begun at once, in fresh memory of a few times the factors' size, and
    the system's clearing of that takes a third of an update.
    """
    if platform != "cpu":
        return None
    options = (("xla_cpu_scheduler_type", "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"),)
    try:
        jax.jit(jnp.negative, compiler_options=dict(options))(1.0)
    except jax.errors.JaxRuntimeError:
        return None
    return options


def _dense(shape: Any, bias: bool, layout: Any = "io") -> kc.Layer:
    n, m = shape
    return kc.Dense(in_features=n, out_features=m, bias=bias, weight_layout=layout)


def _flax(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """Mark what a Flax layer did, where its geometry is known."""
    y, module, nn = call(*args, **kwargs), context.module, sys.modules["flax.linen"]
    norms = nn.LayerNorm | nn.RMSNorm | nn.GroupNorm | nn.InstanceNorm | nn.BatchNorm
    known = nn.Dense | nn.DenseGeneral | nn.Conv | nn.Embed | norms
    # A subclass may compute anything: only what is known exactly is marked.
    exact = type(module) in known.__args__
    own = module.variables.get("params") if exact else None
    if not own or context.method_name not in ("__call__", "attend"):
        return y
    x, shape = (*args, *kwargs.values())[0], y.shape
    layer: kc.Layer | None = None
    name, affine = "/".join(module.path) or type(module).__name__, "kernel" not in own
    roles = {"kernel": "weight", "embedding": "weight", "scale": "scale"}
    roles["bias"] = "shift" if affine else "bias"
    given = {roles[key]: leaf for key, leaf in own.items()}
    if context.method_name == "attend":
        name += ".attend"
        layer = _dense(given["weight"].shape[::-1], False, "oi")
    elif isinstance(module, norms):
        places = {getattr(module, key, -1) for key in ("axis", "feature_axes")}
        off = {key: False for key in ("use_scale", "use_bias") if hasattr(module, key)}
        rest = {key: held for key, held in module.variables.items() if key != "params"}
        bare = module.clone(parent=None, **off)
        x, _ = bare.apply(rest, *args, **kwargs, mutable=[*rest])
        shapes = {"scale_shape": None, "shift_shape": None}
        shapes |= {f"{role}_shape": leaf.shape for role, leaf in given.items()}
        layer = kc.ScaleShift(**shapes) if places == {-1} else None
    elif isinstance(module, nn.Embed):
        n, m = given["weight"].shape
        layer = kc.Embedding(num_embeddings=n, features=m, weight_layout="io")
    elif isinstance(module, nn.Conv):
        plain = np.all(np.equal(module.input_dilation or 1, 1)) and module.mask is None
        if plain and x.ndim == given["weight"].ndim:
            window = {key: getattr(module, key) for key in ("strides", "padding")}
            window |= {"dilation": module.kernel_dilation, "bias": module.use_bias}
            groups = module.feature_group_count
            layer = kc.integration.framework_conv(
                given["weight"].shape, groups=groups, **window
            )
    else:
        axes = sorted(a % x.ndim for a in np.atleast_1d(getattr(module, "axis", -1)))
        if axes == [*range(axes[0], x.ndim)] and not getattr(module, "batch_dims", ()):
            kernel = given["weight"].shape
            n, m = math.prod(kernel[: len(axes)]), math.prod(kernel[len(axes) :])
            x = x.reshape(*x.shape[: axes[0]], n)
            layer, y = _dense((n, m), "bias" in own), y.reshape(*x.shape[:-1], m)
    return y if layer is None else tap(name, layer, x, y, **given).reshape(shape)
