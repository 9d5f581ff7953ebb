"""K-FAC as an optax gradient transformation, whose state is one pytree."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, Unpack

import jax
import jax.numpy as jnp

import kfac_core as kc
from kfac_core_shims.jax import mapped
from kfac_core_shims.jax.compiled import traced_once
from kfac_core_shims.jax.network import Network

T = TypeVar("T")

_DEFAULTS = kc.integration.defaults


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
    damping : float, mapping of str to float, or callable of int
        Damping of the operators, unless a step gives another.  A callable, here and below,
        takes the number of steps so far, with or without `captured`.
    refresh_every : int
        Number of updates between refreshes, at least 1; the first update refreshes.
    kl_clip : float or callable of int, optional
        Bound on ``eta^2 G . P G``, about twice the Kullback-Leibler divergence between the
        model before and after a step; None for no bound.  See `kfac_core.steps.kl_clip`.
    learning_rate : float or callable of int
        What the direction will be multiplied by, eta; read by the KL clip alone.
    likelihood : {"categorical", "bernoulli", "gaussian"}, Loss or RowLoss, optional
        Likelihood of a row of outputs, read by the KL clip alone: it lengthens short steps
        of classifiers.

    Other Parameters
    ----------------
    damping_rule : {"factored", "factored_unit_pi", "exact"}
        See `kfac_core.Estimator`.
    decay : float
        Factor on the old statistics at each update, from 0 to 1.
    bases_every : int
        Number of updates between recomputations of the bases of `kfac_core.EKFAC`
        blocks.  Without such blocks it is not read.
    moments : {"kronecker", "carried"}
        How second moments start in new bases; see `kfac_core.EKFAC.rebased`.
    axis_name : hashable, optional
        Name of the axis (or names of the axes) that the step is mapped over by ``pmap`` or
        ``shard_map``: statistics are those of all devices' examples, and gradients are
        averaged over it.  Other axes of ``vmap`` are of independent runs, such as several
        seeds; an empty tuple says the same of those of ``pmap`` and ``shard_map``.
    sources, mode
        How several backpropagated vectors are combined, and the estimation mode; see
        `kfac_core.Estimator`.
    **options
        Further options of `kfac_core.Estimator`: ``averaging``, ``precision``,
        ``coupling``, and ``refreshing``, by default ``Refreshing(keep_matrices=False)``.

    Attributes
    ----------
    curvature : kfac_core.Network
        Network whose pure functions `update` calls.

    Raises
    ------
    ConventionError
        For an interval that is no whole number of updates >= 1, or a `kl_clip` or
        `learning_rate` that is not positive.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import kfac_core as kc
    >>> from kfac_core_shims.jax import KFAC, Network
    >>> x, y = jnp.ones((8, 4)), jnp.zeros((8, 3))
    >>> params = {"W": jnp.ones((4, 3))}
    >>> network = Network(lambda params, x: x @ params["W"], params, x)
    >>> kfac = KFAC(network, reduction="sum", sources="sum")
    >>> loss = kc.losses.Gaussian(variance=1.0)
    >>> state = kfac.init(params)
    >>> outputs, pull = network.vjp(params, x)
    >>> gradients, _ = pull(loss.gradient(outputs, y) / 8, reduction="mean")
    >>> captured = pull(kc.losses.vectors(loss, outputs, mode="exact"))
    >>> direction, state = kfac.update(gradients, state, captured=captured)
    >>> direction["W"].shape
    (4, 3)
    """

    def __init__(
        self,
        network: Network,
        *,
        reduction: Literal["sum", "mean", "mean_rows"],
        damping: kc.integration.Schedule
        | Mapping[str, kc.array.Scalar] = _DEFAULTS.DAMPING,
        refresh_every: int = 25,
        kl_clip: kc.integration.Schedule | None = _DEFAULTS.KL_CLIP,
        learning_rate: kc.integration.Schedule = _DEFAULTS.LEARNING_RATE,
        likelihood: str | kc.losses.Loss | kc.integration.RowLoss | None = None,
        damping_rule: kc.damping.DampingRule = _DEFAULTS.DAMPING_RULE,
        decay: float = _DEFAULTS.DECAY,
        bases_every: int = 100,
        moments: Literal["kronecker", "carried"] = "kronecker",
        axis_name: Any = None,
        sources: kc.conventions.SourceReduction = "sum",
        mode: kc.losses.EstimationMode | None = None,
        **options: Unpack[kc.integration.EstimatorOptions],
    ) -> None:
        kc.constraints.require_one_of("moments", moments, ("kronecker", "carried"))
        kc.integration.interval_at("refresh_every", refresh_every, 0)
        kc.integration.interval_at("bases_every", bases_every, 0)
        kc.integration.require_positive("kl_clip", kl_clip, optional=True)
        kc.integration.require_positive("learning_rate", learning_rate)
        # Called again by `estimator`, since states are kept elsewhere.
        self._new_estimator = functools.partial(
            kc.Estimator,
            network.blocks,
            reduction=reduction,
            damping=kc.integration.value_at(damping, 0),
            damping_rule=damping_rule,
            decay=decay,
            sources=sources,
            mode=mode,
            **({"refreshing": kc.Refreshing(keep_matrices=False)} | options),
        )
        estimator = self._new_estimator()
        self.network, self.curvature = network, estimator.network
        self.axis_name = axis_name
        self.damping = damping if callable(damping) else estimator.damping
        self.decay = estimator.decay
        self.refresh_every, self.bases_every = refresh_every, bases_every
        self.moments = moments
        self.kl_clip, self.learning_rate = kl_clip, learning_rate
        self.likelihoods: tuple[kc.losses.Loss, ...] = ()
        if likelihood is not None:
            self.likelihoods = (kc.integration.row_loss(likelihood).likelihood,)
        kinds = [block.approximation for block in network.blocks.values()]
        self._has_bases = any(kind.has_bases for kind in kinds)

    def init(self, params: Any, /) -> kc.NetworkState:
        """Return the state before the first update.

        Directions are zero before the first refresh.
        """
        return started(self._initial, params)

    def _initial(self, params: Any) -> kc.NetworkState:
        leaves = [jnp.result_type(x) for x in jax.tree.leaves(params)]
        floating = [x for x in leaves if jnp.issubdtype(x, jnp.floating)]
        # optax also asks for the state of a tree without parameters, for its structure.
        dtype = floating[0] if floating else self.network.leaves.dtype
        wide = jnp.promote_types(dtype, jnp.float32)
        # In the form that a step has it, for which the refresh is then traced already.
        damping = jax.tree.map(
            lambda x: jnp.asarray(x, wide), kc.integration.value_at(self.damping, 0)
        )
        like = jnp.zeros((), dtype)
        return self.curvature.initial(like, damping=damping, executor=traced_once)

    def update(
        self,
        updates: Any,
        state: kc.NetworkState,
        params: Any = None,
        *,
        captured: kc.integration.Captured | None,
        damping: kc.array.Scalar | Mapping[str, kc.array.Scalar] | None = None,
    ) -> tuple[Any, kc.NetworkState]:
        """Return the inverse curvature times gradients of the mean loss, and the state.

        Parameters
        ----------
        updates, state, params : pytree
            As optax has them.  Gradients are matched with parameters by their paths;
            blocks none of whose gradients are there are left out.  A batch that a block
            flags changes ``status`` only.
        captured : Captured or None
            From `Network.vjp`; None for a step without statistics.
        damping : float, array, or mapping of str to these, optional
            Damping of a refresh in this step.

        Returns
        -------
        updates : pytree
            In the structure of the gradients.
        state : NetworkState
            New state.  Where `captured` is None before the first refresh the direction is
            zero, and a compiled step flags it (``state.is_good()`` is false).

        Raises
        ------
        ConventionError
            For batches captured under other conventions; for gradients of another
            structure; inside an axis of ``pmap`` or ``shard_map`` that `axis_name` does not
            name, or one of ``vmap`` that only gradients were averaged over.
        DampingError
            For a damping that is out of range, or that a block has none of.
        NotReadyError
            Without `captured` before the first refresh, where values are read.
        """
        self._require_axes()
        if captured is None:
            state = _flagged_unless_ready(state)
        else:
            state = self._watched(state, updates, captured.batches)
            state = self.absorbed(state, captured, damping=damping)
        # After `_watched`, which looks at the gradients as the caller has them.
        if self.axis_name:
            updates = mapped.averaged(updates, self.axis_name)
        return self.preconditioned(updates, state), _after_step(state)

    def preconditioned(self, gradients: Any, state: kc.NetworkState, /) -> Any:
        """Return the inverse curvature times gradients, in the tree of the gradients."""
        leaves, wiring = self.network.leaves, self.network.wiring
        vectors = leaves.vectors(gradients, wiring)
        directions = self.curvature.precondition(state, vectors, executor=traced_once)
        if self.kl_clip is not None:
            steps = next(iter(state.blocks.values())).steps
            clip = kc.steps.kl_clip(
                vectors,
                directions,
                learning_rate=kc.integration.value_at(self.learning_rate, steps),
                bound=kc.integration.bound_at(
                    self.kl_clip, steps, self.network.outputs
                ),
                lengthen=kc.integration.lengthens(self.kl_clip, self.likelihoods),
                check="status",
            )
            directions = jax.tree.map(
                lambda x: x * clip.scale.astype(x.dtype), directions
            )
        return leaves.replaced(gradients, directions, wiring)

    def _require_axes(self) -> None:
        """Refuse a mapped axis whose devices would keep statistics of their own."""
        if self.axis_name != ():
            independent = ", or axis_name=() for independent runs"
            mapped.require_named(self.axis_name, "KFAC", unless=independent)
        inside, _ = mapped.mapped_axes()
        if {*mapped.names_of(self.axis_name)} - inside:
            raise kc.ConventionError(
                f"`axis_name` is {self.axis_name!r}, but this step is mapped over "
                f"{sorted(map(str, inside)) or 'no axis'}. Call it inside `pmap` or "
                "`shard_map`, or leave `axis_name` out."
            )

    def _watched(
        self, state: kc.NetworkState, gradients: Any, batches: Any
    ) -> kc.NetworkState:
        """Return the state, which raises if an axis of `vmap` averages gradients alone."""
        inside, named = mapped.mapped_axes()[0], mapped.names_of(self.axis_name)
        if self.axis_name == () or not inside - {*named}:
            return state
        name, block = next(iter(state.blocks.items()))
        count = mapped.watched(block.updates, gradients, batches, named)
        blocks = {**state.blocks, name: dataclasses.replace(block, updates=count)}
        return state.updated(blocks)

    def absorbed(
        self,
        state: kc.NetworkState,
        captured: kc.integration.Captured,
        /,
        *,
        damping: kc.array.Scalar | Mapping[str, kc.array.Scalar] | None = None,
    ) -> kc.NetworkState:
        """Return the state after an update, and after a refresh if it is due.

        Parameters
        ----------
        state, captured, damping
            See `update`.

        Returns
        -------
        NetworkState
            New state.
        """
        self._require_axes()
        # The counts before this update, so that the first one refreshes.
        first = next(iter(state.blocks.values()))
        updates = first.updates
        if damping is None:
            damping = kc.integration.value_at(self.damping, first.steps)
        network = self.curvature
        network.layers.require_damping(damping)
        promised = network.conventions
        same = captured.reduction == promised.reduction
        if not same or captured.sources not in (None, promised.sources):
            raise kc.ConventionError(
                f"Expected batches captured under {promised}, got "
                f"reduction={captured.reduction!r}, sources={captured.sources!r}. Say the "
                "same in both."
            )
        executor: kc.execution.Executor = traced_once
        if self.axis_name:
            executor = mapped.summed_over(self.axis_name, traced_once)
        state = network.update(
            state,
            captured.batches,
            decay=self.decay,
            check="status",
            executor=executor,
        )
        # A flagged batch leaves operators and bases as they were.
        good = state.is_good()

        def unchanged(state: kc.NetworkState) -> kc.NetworkState:
            return state

        def rebased(state: kc.NetworkState) -> kc.NetworkState:
            return network.rebase(state, moments=self.moments, check="status")

        def refreshed(state: kc.NetworkState) -> kc.NetworkState:
            return network.refresh(
                state, damping=damping, check="status", executor=traced_once
            )

        if self._has_bases:
            due = good & (updates % self.bases_every == 0)
            state = jax.lax.cond(due, rebased, unchanged, state)
        due = good & (updates % self.refresh_every == 0)
        new: kc.NetworkState = jax.lax.cond(due, refreshed, unchanged, state)
        return new

    def estimator(self, state: kc.NetworkState | None = None, /) -> kc.Estimator:
        """Return an estimator of the same options, which holds a state if one is given.

        For saving and loading a state, and for reports.

        Parameters
        ----------
        state : NetworkState, optional
            State whose arrays have values.  A block that was never refreshed is left out.
        """
        estimator = self._new_estimator()
        if state is not None:
            # Its operator is of zeros until then, in the form that a compiled step
            # needs.
            estimator.state = state.updated(
                {
                    name: kc.BlockState()
                    for name, block in state.blocks.items()
                    if not int(block.refreshes)
                }
            )
        return estimator

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
        return estimator.state.in_form_of(self.init(params))

    def optax(self) -> Any:
        """Return the optax transformation, to be chained with a learning rate.

        Its ``update`` takes `captured` and `damping` as `KFAC.update` does; what other
        transformations of a chain are given besides is passed over.
        """
        import optax

        def update(
            updates: Any,
            state: Any,
            params: Any = None,
            *,
            captured: Any,
            damping: Any = None,
            **of_others: Any,
        ) -> Any:
            # A chain passes everything on to everybody, so that a misspelled `damping`
            # would raise nowhere.
            for name in of_others:
                if meant := difflib.get_close_matches(name, ("captured", "damping"), 1):
                    raise kc.ConventionError(
                        f"Unknown argument {name!r} of `update`; did you mean "
                        f"{meant[0]!r}?"
                    )
            return self.update(
                updates, state, params, captured=captured, damping=damping
            )

        return optax.GradientTransformationExtraArgs(self.init, update)


def started(initial: Callable[[Any], T], params: Any, /) -> T:
    """Return a first state, computed by one program, on the parameters' device.

    A state that is bound to a device, beside parameters that are not, would have the first
    step compiled twice: its results are bound.

    Parameters
    ----------
    initial : callable
        Returns the state for the parameters.
    params : pytree
        The parameters.

    Returns
    -------
    pytree
        The state.
    """
    leaves = jax.tree.leaves(params)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return initial(params)
    state: T = jax.jit(initial)(params)
    bound = {
        leaf.sharding
        for leaf in leaves
        if isinstance(leaf, jax.Array) and getattr(leaf, "committed", True)
    }
    # Of parameters on several devices the compiler decides where their state lies.
    devices = [sharding.device_set for sharding in bound]
    if len(devices) == 1 and len(devices[0]) == 1:
        state = jax.device_put(state, *devices[0])
    return state


def _after_step(state: kc.NetworkState) -> kc.NetworkState:
    """Return the state one step later, also where no batch was captured."""
    blocks = state.blocks.items()
    return state.updated(
        {n: dataclasses.replace(block, steps=block.steps + 1) for n, block in blocks}
    )


def _flagged_unless_ready(state: kc.NetworkState) -> kc.NetworkState:
    """Flag blocks that have no operator yet, or raise where values can be read."""
    blocks = {}
    for name, block in state.blocks.items():
        ready = block.refreshes > 0
        if not isinstance(ready, jax.core.Tracer) and not bool(ready):
            raise kc.NotReadyError(
                f"Block {name!r} has no operator yet: the first step needs `captured`."
            )
        flag = jnp.where(ready, 0, int(kc.Status.NOT_POSITIVE)).astype(jnp.int32)
        blocks[name] = dataclasses.replace(block, status=block.status | flag)
    return state.updated(blocks)
