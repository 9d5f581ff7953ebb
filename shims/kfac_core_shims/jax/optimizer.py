"""K-FAC as an optimizer: rate, momentum and damping from the exact quadratic model.

Conventions.  The objective is ``h = mean of -log p(y | z) + l2/2 |theta|^2``, the mean over
the rows of the network's outputs z.  A step is ``delta = alpha D + mu delta_0``, with
``D = -P grad`` the preconditioned gradient and ``delta_0`` the step before; alpha and mu
minimize

    M(delta) = grad . delta + 1/2 delta . (F + (l2 + lam) I) delta,

where F is the exact Fisher matrix of the batch.  Only its products with D and ``delta_0``
are needed: one ``jax.jvp`` each.  The damping lam follows how well M predicts
the change of h.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, Unpack

import jax
import jax.numpy as jnp

import kfac_core as kc
from kfac_core_shims.jax.kfac import KFAC, started
from kfac_core_shims.jax.mapped import averaged
from kfac_core_shims.jax.network import Network

_DEFAULTS = kc.integration.defaults

Likelihood: TypeAlias = str | kc.losses.Loss | kc.integration.RowLoss


class OptimizerState(NamedTuple):
    """Everything that changes from step to step, beside the parameters.

    Attributes
    ----------
    curvature : NetworkState
        Statistics and operators.
    last : pytree
        The step before, ``delta_0``.
    damping : array, 0-d
        lam.
    steps : array, 0-d int32
        Number of steps taken.
    """

    curvature: kc.NetworkState
    last: Any
    damping: Any
    steps: Any


class Progress(NamedTuple):
    """What a step did.

    Attributes
    ----------
    loss : array, 0-d
        Objective before the step.  It has the constants of the log-likelihood: for a
        Gaussian ``1/2 log(2 pi) = 0.919`` for each output.
    learning_rate, momentum : array, 0-d
        alpha and mu.
    damping : array, 0-d
        lam of this step.
    reduction_ratio : array, 0-d
        Change of the objective over the predicted one; NaN where it was not computed.
    is_good : array of bool, 0-d
        Whether the step was taken: false where loss, gradient or rows were not finite, or
        a factorization failed; parameters are then as they were.
    aux : object
        What the network returned beside its outputs; None without.
    """

    loss: Any
    learning_rate: Any
    momentum: Any
    damping: Any
    reduction_ratio: Any
    is_good: Any
    aux: Any = None


class KFACOptimizer:
    r"""K-FAC that chooses its rate, its momentum and its damping.

    Parameters
    ----------
    function, params, *inputs, approximation, uncovered, has_aux
        See `Network`; the function returns one array of outputs, shape (N, ..., P).
    likelihood : {"categorical", "bernoulli", "gaussian"}, Loss or RowLoss
        Likelihood of one row of outputs; see `kfac_core.integration.row_loss`.  Outputs of
        shape (N,) have rows of one number.
    damping : float
        lam of the first steps.
    l2 : float
        Coefficient of ``1/2 |theta|^2`` beside the likelihood's mean negative log.
    update_every, refresh_every : int
        Steps between statistics, and updates between factorizations.
    learning_rate, momentum : float or callable of array, optional
        alpha and mu; None to take the minimum of the quadratic model.  A callable takes
        the number of steps taken so far.

    Other Parameters
    ----------------
    fisher : {"gradients", "exact", "empirical", ...}
        Output gradients in the factors: of one drawn label, of all labels, or of the
        labels of the data.
    damping_rule : {"factored", "factored_unit_pi", "exact"}
        See `kfac_core.Estimator`.
    adapt_every : int, optional
        Steps between adaptations of the damping to the reduction ratio, which cost a
        forward pass each; None for a damping that stays.
    adapt_factor : float
        Factor by which the damping falls or rises for one step, ``19/20``; an adaptation
        takes it to the power of `adapt_every`.
    min_damping, max_damping : float
        Bounds of the damping.
    bases_every : int
        Updates between the eigenbases of `kfac_core.EKFAC` blocks.
    kl_clip : float or callable of int, optional
        Bound on ``alpha^2 grad . P grad``, where the learning rate is given.
    decay : float
        Factor on the old statistics at each update.
    axis_name : hashable, optional
        See `KFAC`; `transition` is then to be called inside the mapped axis.
    **options
        Further options of `kfac_core.Estimator`: ``averaging``, ``precision``,
        ``coupling``, and ``refreshing``, by default ``Refreshing(keep_matrices=False)``.

    Attributes
    ----------
    network : Network
        The function, with the layers that were found.

    Raises
    ------
    ConventionError
        For options out of range.
    UnsupportedError
        For a parameter that is in no layer, unless ``uncovered="keep"``.

    References
    ----------
    Martens and Grosse (2015), arXiv:1503.05671, sections 6 and 7.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from kfac_core_shims.jax import KFACOptimizer
    >>> x, y = jax.random.normal(jax.random.key(0), (32, 4)), jnp.arange(32) % 3
    >>> params = {"W": jnp.zeros((4, 3))}
    >>> optimizer = KFACOptimizer(
    ...     lambda params, x: x @ params["W"], params, x, likelihood="categorical"
    ... )
    >>> state = optimizer.init(params)
    >>> params, state, progress = optimizer.step(params, state, x, y, jax.random.key(1))
    >>> round(float(progress.loss), 2)
    1.1
    """

    def __init__(
        self,
        function: Callable[..., Any],
        params: Any,
        /,
        *inputs: Any,
        likelihood: Likelihood,
        approximation: Callable[[str, Any], Any] = kc.integration.usual_approximation,
        uncovered: Literal["refuse", "keep"] = "refuse",
        has_aux: bool = False,
        damping: float = _DEFAULTS.MODEL_DAMPING,
        l2: float = 0.0,
        update_every: int = _DEFAULTS.MODEL_UPDATE_EVERY,
        refresh_every: int = _DEFAULTS.MODEL_REFRESH_EVERY
        // _DEFAULTS.MODEL_UPDATE_EVERY,
        learning_rate: kc.integration.Schedule | None = None,
        momentum: kc.integration.Schedule | None = None,
        fisher: kc.losses.EstimationMode = "gradients",
        damping_rule: kc.damping.DampingRule = _DEFAULTS.MODEL_DAMPING_RULE,
        adapt_every: int | None = 5,
        adapt_factor: float = 0.95,
        min_damping: float = 1e-6,
        max_damping: float = 1e4,
        bases_every: int = 100,
        kl_clip: kc.integration.Schedule | None = _DEFAULTS.KL_CLIP,
        decay: float = _DEFAULTS.MODEL_DECAY,
        axis_name: Any = None,
        **options: Unpack[kc.integration.EstimatorOptions],
    ) -> None:
        kc.integration.require_estimation(fisher=fisher, likelihood=likelihood)
        constraints = kc.constraints
        momentum_at_start = None if callable(momentum) else momentum
        constraints.require_range(
            "momentum",
            momentum_at_start,
            constraints.optional(constraints.DECAY_SCALAR),
        )
        constraints.require_range("l2", l2, constraints.NOT_NEGATIVE)
        kc.integration.interval_at("update_every", update_every, 0)
        for name, schedule in (("learning_rate", learning_rate), ("kl_clip", kl_clip)):
            if not callable(schedule):
                kc.integration.require_positive(name, schedule, optional=True)
        self.network = Network(
            function,
            params,
            *inputs,
            approximation=approximation,
            uncovered=uncovered,
            has_aux=has_aux,
        )
        self.row_loss = kc.integration.row_loss(likelihood)
        self.loss = self.row_loss.likelihood
        self.fisher, self.axis_name = fisher, axis_name
        self.learning_rate, self.momentum = learning_rate, momentum
        self.kl_clip = kl_clip
        self.adapt_every = adapt_every
        self.rule = kc.integration.DampingRule(
            1 if adapt_every is None else adapt_every,
            adapt_factor,
            min_damping,
            max_damping,
        )
        self.l2, self.update_every = l2, update_every
        self.kfac = KFAC(
            self.network,
            reduction="sum",
            sources=kc.losses.source_reduction_of(fisher),
            mode=fisher,
            damping=damping,
            damping_rule=damping_rule,
            decay=decay,
            refresh_every=refresh_every,
            bases_every=bases_every,
            axis_name=axis_name,
            kl_clip=None,
            **options,
        )
        self.step = jax.jit(self.transition, donate_argnums=(0, 1))
        """`transition`, compiled; parameters and state are donated, and not to be used
        again."""

    def __repr__(self) -> str:
        """Show some options, and each block of the network on a line."""
        text = (
            f"fisher={self.fisher!r}, damping={self.kfac.damping}, "
            f"update_every={self.update_every}, refresh_every={self.kfac.refresh_every}"
        )
        return f"KFACOptimizer({text})\n{self.network!r}"

    def init(self, params: Any, /) -> OptimizerState:
        """Return the state before the first step.

        Parameters
        ----------
        params : pytree
            Floating-point arrays, none of them twice.

        Returns
        -------
        OptimizerState
            State to pass to `step`.

        Raises
        ------
        DtypeError
            For a parameter of integers.
        """
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
                raise kc.DtypeError(
                    "Expected `params` of floating-point arrays, got "
                    f"{jnp.result_type(leaf)} at {jax.tree_util.keystr(path)}. Pass what "
                    "is not trained as an input of the network."
                )
        return started(self._initial, params)

    def _initial(self, params: Any) -> OptimizerState:
        curvature = self.kfac.init(params)
        statistics = next(iter(curvature.blocks.values())).statistics
        assert statistics is not None
        return OptimizerState(
            curvature,
            jax.tree.map(jnp.zeros_like, params),
            jnp.asarray(self.kfac.damping, statistics.dtype),
            jnp.zeros((), jnp.int32),
        )

    def transition(
        self, params: Any, state: OptimizerState, inputs: Any, targets: Any, key: Any
    ) -> tuple[Any, OptimizerState, Progress]:
        """Take a step: a pure function, which `step` compiles.

        Parameters
        ----------
        params : pytree
            Parameters.
        state : OptimizerState
            From `init` or a step before.
        inputs : pytree or tuple of pytree
            The network's input; a plain tuple, not a named one, is several of them.
        targets : array
            What the likelihood is of, such as labels.
        key : key
            For what is drawn: labels in ``fisher="gradients"``, and random signs of rows
            in ``"exact"``, which is right in expectation where layers mix these.

        Returns
        -------
        params, state, progress : pytree, OptimizerState, Progress
            New parameters and state, and what was done.
        """
        # A named tuple is one input, as other pytrees are.
        inputs = inputs if type(inputs) is tuple else (inputs,)
        result, pull = self.network.vjp(params, *inputs)
        outputs, aux = result if self.network.has_aux else (result, None)
        z = self._as_rows(outputs)
        if outputs.ndim < z.ndim and targets.ndim == outputs.ndim:
            targets = targets[:, None]
        before = self._objective(params, z, targets)
        cotangent = self.loss.gradient(z, targets) / _rows(z)
        # The rows of this pull are not read, and XLA does not compute them.
        gradients, _ = pull(cotangent, reduction="mean")
        gradients = jax.tree.map(
            lambda g, p: g + self.l2 * p if self.l2 else g, gradients, params
        )
        gradients = self._averaged(gradients)
        direction, curvature = self._direction(
            params, state, gradients, lambda: self._captured(pull, z, targets, key)
        )
        model_step = self._model_step(params, state, inputs, z, gradients, direction)
        rate, *others = model_step.coefficients
        momentum = others[0] if others else jnp.zeros_like(rate)
        predicted = model_step.predicted
        good = curvature.is_good() & jnp.isfinite(before) & jnp.isfinite(predicted)

        def step(d: Any, last: Any) -> Any:
            change = rate.astype(d.dtype) * d + momentum.astype(d.dtype) * last
            return jnp.where(good, change, last)

        last = jax.tree.map(step, direction, state.last)
        # A step that is not taken leaves the one before, times 0.
        params = jax.tree.map(lambda p, d: p + good.astype(d.dtype) * d, params, last)
        damping, ratio = self._adapted(
            state,
            lambda: self._objective_at(params, inputs, targets),
            before,
            predicted,
        )
        loss = before * self.row_loss.multiple(z.shape[-1])
        progress = Progress(loss, rate, momentum, state.damping, ratio, good, aux)
        damping = jnp.where(good, damping, state.damping)
        return (
            params,
            OptimizerState(curvature, last, damping, state.steps + 1),
            progress,
        )

    # -------------------------------------------------------------------- the objective

    def _as_rows(self, z: Any) -> Any:
        """Return outputs as (N, ..., P); outputs of shape (N,) have P = 1."""
        if not hasattr(z, "ndim"):
            raise kc.ArgumentError(
                f"Expected a network that returns one array of outputs, got a "
                f"{type(z).__name__}. Say has_aux=True for (outputs, aux); return heads "
                "side by side on the last axis, with likelihood=kfac_core.losses.Joint."
            )
        single = z.ndim == 1 and not isinstance(self.loss, kc.losses.Categorical)
        if z.ndim < 2 and not single:
            raise kc.ShapeError(
                f"Expected outputs of shape (N, ..., P), got {tuple(z.shape)}. The "
                "function returns the network's outputs, and `likelihood` says the loss."
            )
        return z[:, None] if single else z

    def _objective(self, params: Any, z: Any, targets: Any) -> Any:
        loss = -self.loss.log_probability(z, targets).sum() / _rows(z)
        if self.l2:
            squares = sum(jnp.sum(p * p) for p in jax.tree.leaves(params))
            loss = loss + 0.5 * self.l2 * squares
        return self._averaged(loss)

    def _objective_at(self, params: Any, inputs: Any, targets: Any) -> Any:
        return self._objective(params, self._outputs(params, inputs), targets)

    def _outputs(self, params: Any, inputs: Any) -> Any:
        result = self.network.function(params, *inputs)
        return self._as_rows(result[0] if self.network.has_aux else result)

    def _averaged(self, tree: Any) -> Any:
        return averaged(tree, self.axis_name) if self.axis_name else tree

    # -------------------------------------------------------------------- the direction

    def _captured(self, pull: Any, z: Any, targets: Any, key: Any) -> Any:
        """Return the rows of each block, for the mean over all rows of the outputs."""
        loss, mode = self.loss, self.fisher
        if mode == "empirical":
            drawn = kc.losses.vectors(loss, z, mode=mode, targets=targets)
        else:

            def noise(spec: kc.losses.NoiseSpec) -> Any:
                return getattr(jax.random, spec.distribution)(key, spec.shape)

            # Rows that a layer mixes, of one example or of several, must not add up.
            drawn = kc.losses.drawn_vectors(loss, z, mode=mode, seed=noise, shared=True)
        root = math.sqrt(len(z) / _rows(z))
        return pull(dataclasses.replace(drawn, vectors=root * drawn.vectors))

    def _direction(
        self, params: Any, state: OptimizerState, gradients: Any, capture: Any
    ) -> tuple[Any, kc.NetworkState]:
        damping = state.damping + self.l2

        def updated(curvature: kc.NetworkState) -> kc.NetworkState:
            return self.kfac.absorbed(curvature, capture(), damping=damping)

        curvature = state.curvature
        if self.update_every == 1:
            curvature = updated(curvature)
        else:
            due = state.steps % self.update_every == 0
            curvature = jax.lax.cond(due, updated, lambda state: state, curvature)
        preconditioned = self.kfac.preconditioned(gradients, curvature)
        return jax.tree.map(jnp.negative, preconditioned), curvature

    # ------------------------------------------------------------------------ the model

    def _model_step(
        self,
        params: Any,
        state: OptimizerState,
        inputs: Any,
        z: Any,
        gradients: Any,
        direction: Any,
    ) -> kc.integration.QuadraticStep:
        """Minimize the quadratic model on the span of D and the step before."""
        value_at = kc.integration.value_at
        directions = [direction]
        rate = value_at(self.learning_rate, state.steps)
        if rate is not None and self.kl_clip is not None:
            clip = kc.steps.kl_clip(
                _vector(gradients),
                jax.tree.map(jnp.negative, _vector(direction)),
                learning_rate=rate,
                bound=kc.integration.bound_at(self.kl_clip, state.steps, z.shape[-1]),
                check="status",
            )
            rate = rate * clip.scale
        # None is free, for the quadratic model to choose.
        fixed = [rate]
        if self.momentum is None or callable(self.momentum) or self.momentum:
            directions.append(state.last)
            fixed.append(value_at(self.momentum, state.steps))
        outputs = functools.partial(self._outputs, inputs=inputs)
        # Linearized once, so that XLA sees one linear function for both directions.
        _, change = jax.linearize(outputs, params)
        changes = [change(d) for d in directions]
        multiplied = [self.loss.fisher_multiply(z, dz) for dz in changes]
        F = kc.steps.curvature_of_outputs(changes, multiplied, examples=_rows(z))
        return kc.integration.quadratic_step(
            _vector(gradients),
            [_vector(d) for d in directions],
            curvature=self._averaged(F),
            damping=state.damping + self.l2,
            fixed=fixed,
            check="status",
        )

    def _adapted(
        self, state: OptimizerState, after: Any, before: Any, predicted: Any
    ) -> tuple[Any, Any]:
        """Return the next damping, and the reduction ratio where it is due."""

        def adapted() -> tuple[Any, Any]:
            damping, ratio = self.rule.adapted(
                state.damping, before, after(), predicted=predicted
            )
            return damping, jnp.asarray(ratio).astype(state.damping.dtype)

        def unchanged() -> tuple[Any, Any]:
            return state.damping, jnp.full_like(state.damping, jnp.nan)

        if self.adapt_every is None:
            return unchanged()
        due = (state.steps + 1) % self.adapt_every == 0
        damping, ratio = jax.lax.cond(due, adapted, unchanged)
        return damping, ratio


def _rows(z: Any) -> int:
    """Return the number of rows of outputs (N, ..., P)."""
    return int(z.size) // int(z.shape[-1])


def _vector(tree: Any) -> dict[str, dict[str, Any]]:
    """Return a pytree as a vector of `kfac_core.steps`."""
    return {"": {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(tree))}}
