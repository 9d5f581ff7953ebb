"""Gauss-Newton in the space of samples, for functions of residuals.

Conventions.  The loss is ``1/2 sum_i (1/N_i) |r_i|^2`` over the terms i that the function
of residuals returns, N_i the examples of a term; or the mean over examples of a
likelihood's ``-log p``.  A weighted term is multiplied by the root of its weight.  Inside,
all residuals are one vector of R numbers, those of term i times ``sqrt(R / N_i)``, so that
the loss is ``|r|^2 / (2 R)``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import kfac_core as kc
from kfac_core_shims.jax.jacobians import Columns, JacobianFinder
from kfac_core_shims.jax.leaves import leaf_name


class GaussNewtonState(NamedTuple):
    """Everything that changes from step to step, beside the parameters.

    Attributes
    ----------
    damping : array, 0-d
        The damping that the next step begins with.
    last : pytree
        The last direction, like the parameters; None on fixed points.
    steps : array, 0-d int32
        Number of steps taken.
    progress : BatchProgress
        Of the losses of batches; None on fixed points.
    """

    damping: Any
    last: Any
    steps: Any
    progress: Any = None


class GaussNewtonProgress(NamedTuple):
    """What a step did.

    Attributes
    ----------
    loss, reached : array, 0-d
        The loss before the step, and after it; the latter is NaN for steps on other
        data, which do not evaluate it.
    damping : array, 0-d
        The damping that the next step begins with.
    trials : array, 0-d int32
        How many dampings were tried.
    accepted : array of bool, 0-d
        Whether the step was taken: false, and the parameters as they were, where no
        damping lowered the loss, for residuals that are not finite, and where `mixed`.
    mixed : array of bool
        For each leaf of the parameters, whether a comparison with a backward pass showed
        that the residuals mix examples, so that its derivatives must be formed; see
        `GaussNewton`.
    """

    loss: Any
    reached: Any
    damping: Any
    trials: Any
    accepted: Any
    mixed: Any


class _Linearized(NamedTuple):
    """A problem where a step begins, and what the step begins with.

    Attributes
    ----------
    J : Jacobian
        Of the terms, each times its scale.
    columns : Columns
        Where the parameters of its layers are.
    residuals : array, shape (R,)
        The r with ``J^T r`` the gradient.
    start : Evaluation
        The values and the loss.
    root : LikelihoodResiduals or None
        Of a likelihood.
    unlike : array of bool
        For each leaf, whether its rows are not the derivatives.
    good : array of bool, 0-d
        Whether the loss is finite, and all rows are the derivatives.
    step : dict of str to object
        Options of `gauss_newton_step`: last direction, damping, rate and progress.
    """

    J: Any
    columns: Columns
    residuals: Any
    start: kc.samples.Evaluation
    root: Any
    unlike: Any
    good: Any
    step: dict[str, Any]


class GaussNewton:
    r"""Gauss-Newton with the exact curvature of the whole network, for least squares.

    .. math:: \theta \leftarrow \theta - d + \tfrac12 a, \qquad
        d = J^T (J J^T + N \lambda I)^{-1} r

    with J the Jacobian of the residuals r by all parameters, which is taken as the rows of
    the network's layers and never formed, and a the geodesic acceleration: the direction
    in which the second derivative of r along d bends the path.  There is no learning rate
    to choose: the damping adapts to whether a step lowers the loss.

    Parameters
    ----------
    residuals : callable
        ``(params, *data)`` to the residuals: an array of shape (N,) or (N, C), or a
        sequence of such terms of the loss.  With a likelihood it returns
        ``(outputs, targets)``, outputs of shape (N,) or (N, C).  Layers are found as by
        `Network`, in derivatives of the network too; examples are told apart by `data`:
        pass all points as arguments, those of each term on the first axis.
    likelihood : {"categorical", "bernoulli", "gaussian"} or Loss, optional
        Of outputs and targets.
    minibatch : bool, optional
        Whether residuals are of other data at each step.  Steps are then SPRING's, with a
        damping that follows the residuals.  By default whether `learning_rate` is given,
        or `centered`.
    centered : bool
        Whether the network is a wave function: the function of residuals then returns log
        psi and the local energies, both of shape (N,), at positions drawn from psi^2; J
        and the energies are less their means.
    learning_rate : float or callable, optional
        Length of the steps on other data, or a function of the number of steps taken.  By
        default 0.3, divided by ``1 + k/2`` after k times that losses of batches did not
        fall any more.
    damping : float, optional
        In units of ``J^T J / N``.  The first damping, by default 1; or that of all steps
        on other data, by default ``0.003 rms(r) sqrt(tr(J J^T) / R)``; where `centered`
        ``0.1 rate std(E) + 1e-4``.
    momentum : float, optional
        SPRING's momentum in [0, 1), of steps on other data; by default 0.95.

    Attributes
    ----------
    formed : dict of str to str
        Parameters whose derivatives the last traced step formed, R numbers each, and why:
        those that no layer covers, and layers below residuals that mix examples.

    Raises
    ------
    kfac_core.ConventionError
        For options out of range, and for a rate or a momentum on fixed points.

    Notes
    -----
    On a CPU `step` leaves ``J J^T`` and its factorization to NumPy, which views the rows,
    in float64.  Elsewhere, and in `transition`, a step is one program, in float64 where
    ``jax_enable_x64`` is set, for float32 parameters too.  Without it dampings for which
    the residual check of the factorization fails are raised, so that the loss stops at
    some 1e-7 of the first, not at roundoff.

    Rows are compared with a backward pass at each step: where residuals mix examples, as
    batch norm does in training, rows of layers are not those of one example each.  `step`
    then compiles a program that forms these derivatives, and takes the step again.
    `transition`, inside of a program of yours, leaves the parameters as they are and says
    so in ``progress.mixed``: call `step` once before.

    A step costs a forward and a backward pass, ``R^2 (n + m)`` flops a layer and
    ``R^3 / 3`` for R residuals, and for each damping that is tried two forward passes and
    another ``R^3 / 3``.  Memory: the rows, and ``R^2`` numbers on a CPU; ``2 R^2`` on
    other devices and in `transition`.

    References
    ----------
    Transtrum and Sethna (2012), arXiv:1201.5885, for damping and acceleration; Müller and
    Zeinhofer (2025), arXiv:2505.12149; Goldshlager, Abrahamsen and Lin (2024),
    arXiv:2401.10190, for the momentum.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from kfac_core_shims.jax import GaussNewton
    >>> x = jnp.linspace(-1, 1, 20)[:, None]
    >>> keys = jax.random.split(jax.random.key(0))
    >>> params = {
    ...     "W": jax.random.normal(keys[0], (1, 8)),
    ...     "b": jnp.zeros(8),
    ...     "v": jax.random.normal(keys[1], (8, 1)) / 3,
    ... }
    >>> def residuals(params, x):
    ...     u = jnp.tanh(x @ params["W"] + params["b"]) @ params["v"]
    ...     return u - jnp.sin(3 * x)
    >>> optimizer = GaussNewton(residuals)
    >>> state = optimizer.init(params)
    >>> losses = []
    >>> for _ in range(10):
    ...     params, state, progress = optimizer.step(params, state, x)
    ...     losses.append(float(progress.loss))
    >>> losses[-1] < 0.01 * losses[0]
    True
    """

    def __init__(
        self,
        residuals: Callable[..., Any],
        /,
        *,
        likelihood: Any = None,
        minibatch: bool | None = None,
        centered: bool = False,
        learning_rate: kc.integration.Schedule | None = None,
        damping: float | None = None,
        momentum: float | None = None,
    ) -> None:
        constraints = kc.constraints
        constraints.require_options(locals(), residuals=constraints.FUNCTION)
        self.options = kc.samples.GaussNewtonOptions.of(
            minibatch=minibatch,
            rate=learning_rate,
            damping=damping,
            momentum=momentum,
            centered=centered,
            likelihood=likelihood,
        )
        self.residuals = residuals
        self.formed: dict[str, str] = {}
        self._finder = JacobianFinder(self._outputs)
        self._mixed: frozenset[int] = frozenset()

    def __repr__(self) -> str:
        lines = [f"GaussNewton({self.options})"]
        lines += [f"formed: {name}, since {why}" for name, why in self.formed.items()]
        return "\n".join(lines)

    def init(self, params: Any, /) -> GaussNewtonState:
        """Return the state before the first step.

        Parameters
        ----------
        params : pytree
            Arrays; those of floating-point numbers are trained.

        Returns
        -------
        GaussNewtonState
            State to pass to `step`.

        Raises
        ------
        kfac_core.DtypeError
            For complex arrays, which have no real Jacobian.
        """
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            if jnp.iscomplexobj(leaf):
                raise kc.samples.complex_parameter(leaf_name(path), leaf.dtype)
        wide = jnp.zeros((), jnp.result_type(float))
        if not self.options.minibatch:
            damping = jnp.full_like(wide, self.options.damping)
            return GaussNewtonState(damping, None, jnp.zeros((), jnp.int32))
        # A zero direction adds nothing, and keeps the form of the state from the start.
        last = jax.tree.map(jnp.zeros_like, params)
        progress = kc.samples.BatchProgress.start(wide)
        return GaussNewtonState(wide, last, jnp.zeros((), jnp.int32), progress)

    def step(
        self, params: Any, state: GaussNewtonState, /, *data: Any
    ) -> tuple[Any, GaussNewtonState, GaussNewtonProgress]:
        """Take a step, compiled; not for use inside of a program, see `transition`.

        Parameters
        ----------
        params : pytree
            Parameters.
        state : GaussNewtonState
            From `init` or a step before.
        *data : pytree
            What the residuals take beside the parameters.

        Returns
        -------
        params : pytree
            New parameters.
        state : GaussNewtonState
            New state.
        progress : GaussNewtonProgress
            What the step did.

        Raises
        ------
        kfac_core.ShapeError
            For residuals of another shape.
        kfac_core.NotFiniteError
            For residuals that are not finite.
        kfac_core.ConventionError
            For targets out of range: labels, or probabilities.
        """
        on_host = _in_memory_of_host((params, data))
        take = self._on_host if on_host else self._compiled
        # A second pass forms the derivatives of leaves whose rows mix examples.
        while True:
            new, next_state, progress = take(self._mixed, params, state, *data)
            if not math.isfinite(float(progress.loss)):
                problem = self._problem(*jax.tree.map(jnp.asarray, (params, data)))
                raise kc.samples.not_finite(self.options, problem, float(progress.loss))
            mixed = [i for i, flag in enumerate(progress.mixed.tolist()) if flag]
            if not mixed:
                return new, next_state, progress
            self._mixed = self._mixed.union(mixed)

    @functools.cached_property
    def _compiled(self) -> Any:
        return jax.jit(self._transition, static_argnums=0)

    @functools.cached_property
    def _parts(self) -> tuple[Any, Any, Any]:
        """What `_on_host` takes of a step, compiled."""
        linearized = jax.jit(self._linearized, static_argnums=0)
        return linearized, jax.jit(self._evaluated), jax.jit(self._after)

    def _on_host(
        self, mixed: frozenset[int], params: Any, state: GaussNewtonState, *data: Any
    ) -> tuple[Any, GaussNewtonState, GaussNewtonProgress]:
        """Take a step with K and its factor in NumPy, where both are one array.

        A program of JAX would hold K beside each factor, and compile for longer.
        """
        linearized, evaluated, after = self._parts
        here: _Linearized = linearized(mixed, params, state, *data)
        if not bool(here.good):
            loss = here.start.loss
            progress = (jnp.full_like(loss, jnp.nan), state.damping, 0, False)
            return params, state, GaussNewtonProgress(loss, *progress, here.unlike)

        def evaluate(step: Any) -> Any:
            return _viewed(evaluated(params, step, here.columns, here.root, *data))

        result = self._taken(_viewed(here), evaluate, overwrite=True)
        # Arguments that a program does not read take time, too.
        result = result._replace(matrices=None)
        here = here._replace(J=None, residuals=None, step={})
        taken: tuple[Any, Any, Any] = after(params, state, result, here)
        return taken

    def transition(
        self, params: Any, state: GaussNewtonState, /, *data: Any
    ) -> tuple[Any, GaussNewtonState, GaussNewtonProgress]:
        """Take a step: a pure function for programs of your own."""
        return self._transition(self._mixed, params, state, *data)

    def _transition(
        self, mixed: frozenset[int], params: Any, state: GaussNewtonState, *data: Any
    ) -> tuple[Any, GaussNewtonState, GaussNewtonProgress]:
        here = self._linearized(mixed, params, state, *data)

        def evaluate(step: Any) -> kc.samples.Evaluation:
            return self._evaluated(params, step, here.columns, here.root, *data)

        result = self._taken(here, evaluate, while_loop=jax.lax.while_loop)
        return self._after(params, state, result, here)

    def _taken(
        self, here: _Linearized, evaluate: Any, **how: Any
    ) -> kc.samples.GaussNewtonStep:
        return kc.samples.gauss_newton_step(
            here.J,
            kc.samples.sample_gram(here.J),
            here.residuals,
            evaluate,
            options=self.options,
            start=here.start,
            check="status",
            **here.step,
            **how,
        )

    def _linearized(
        self, mixed: frozenset[int], params: Any, state: GaussNewtonState, *data: Any
    ) -> _Linearized:
        params, data = jax.tree.map(jnp.asarray, (params, data))
        problem = self._problem(params, data)
        scales = _scales(problem.terms)
        vectors = _vectors(problem)
        J, columns, unlike = self._finder.jacobian(
            params, data, vectors=vectors, scales=scales, mixed=mixed
        )
        # The rows of a model in bfloat16, in which NumPy does not compute.
        J = jax.tree.map(
            lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, J
        )
        self.formed = columns.formed
        r = _joined(problem.residuals, scales)
        options = self.options
        loss = jnp.mean(r) if options.centered else self._loss(r, problem.root)
        # A traced step cannot raise: it leaves everything as it was, and `step` sees
        # why.
        good = jnp.isfinite(loss) & ~jnp.any(unlike)
        step: dict[str, Any] = {"damping": state.damping, "rate": 1.0}
        step["progress"] = state.progress
        if options.minibatch:
            step["last"] = J.to_matrices(columns.vectors(state.last, J))
            step["damping"] = options.damping
            step["rate"] = kc.integration.value_at(options.rate, state.steps)
        start = kc.samples.Evaluation(self._values(problem, scales), loss)
        return _Linearized(J, columns, r, start, problem.root, unlike, good, step)

    def _evaluated(
        self, params: Any, step: Any, columns: Columns, root: Any, *data: Any
    ) -> kc.samples.Evaluation:
        """Return the values and the loss after a step."""
        params, data = jax.tree.map(jnp.asarray, (params, data))
        moved = _moved(params, columns.tree(step, params))
        there = self._problem(moved, data, root)
        values = self._values(there, _scales(there.terms))
        return kc.samples.Evaluation(values, self._loss(values, there.root))

    def _after(
        self,
        params: Any,
        state: GaussNewtonState,
        result: Any,
        here: _Linearized,
    ) -> tuple[Any, GaussNewtonState, GaussNewtonProgress]:
        """Return parameters, state and progress after a search for a step."""
        minibatch = self.options.minibatch
        params = jax.tree.map(jnp.asarray, params)
        accepted = result.accepted & here.good
        direction = here.columns.tree(result.direction, params)
        new = GaussNewtonState(
            result.damping.astype(state.damping.dtype),
            direction if minibatch else None,
            state.steps + 1,
            result.progress,
        )
        # A search that lowered nothing changes its damping all the same.
        next_state = _where(accepted if minibatch else here.good, new, state)
        moved = _moved(params, direction, result.rate)
        params = _where(accepted, moved, params)
        # A step that is taken again counts once.
        count = jnp.where(jnp.any(here.unlike), state.steps, state.steps + 1)
        loss = here.start.loss
        reached = jnp.full_like(loss, jnp.nan) if minibatch else result.reached
        return (
            params,
            next_state._replace(steps=count),
            GaussNewtonProgress(
                loss,
                reached,
                next_state.damping,
                jnp.asarray(result.trials),
                accepted,
                here.unlike,
            ),
        )

    def _outputs(self, params: Any, *data: Any) -> list[Any]:
        returned = self.residuals(params, *data)
        return _counted(kc.samples.residual_terms(self.options, returned))

    def _problem(
        self, params: Any, data: Any, root: Any = None
    ) -> kc.samples.ResidualProblem:
        """Evaluate the residuals; with the root where the step began, if any."""
        returned = jax.tree.map(jnp.asarray, self.residuals(params, *data))
        problem = kc.samples.residual_problem(self.options, returned, root)
        terms, residuals = _counted(problem.terms), _counted(problem.residuals)
        return problem._replace(terms=terms, residuals=residuals)

    def _values(
        self, problem: kc.samples.ResidualProblem, scales: Sequence[float]
    ) -> Any:
        """Return what J is the Jacobian of, one vector."""
        terms = problem.terms
        if problem.root is not None:
            terms = [problem.root.rows(terms[0])]
        return _joined(terms, scales)

    def _loss(self, r: Any, root: Any) -> Any:
        """Return the loss in the widest dtype."""
        wide = jnp.result_type(float)
        if root is not None:
            return root.loss.astype(wide)
        r = r.astype(wide)
        return jnp.sum(r * r) / (2 * r.size)


def _counted(terms: list[Any]) -> list[Any]:
    """Return terms without those of no example, unless all are."""
    return [term for term in terms if len(term)] or terms


def _scales(terms: Sequence[Any]) -> list[float]:
    """Return the root of R over the examples of each term."""
    samples = sum(term.size for term in terms)
    return kc.samples.scales_of([len(term) for term in terms], samples)


def _vectors(problem: kc.samples.ResidualProblem) -> list[Any]:
    """Return what is pulled back for the rows of each term, shape (C, N, C)."""
    if problem.root is not None:
        return [jnp.moveaxis(problem.root.root, 2, 0)]
    vectors = []
    for term in problem.terms:
        N, C = term.shape
        eye = jnp.eye(C, dtype=term.dtype)
        vectors.append(jnp.broadcast_to(eye[:, None, :], (C, N, C)))
    return vectors


def _joined(parts: Sequence[Any], scales: Sequence[float]) -> Any:
    pairs = zip(parts, scales, strict=True)
    return jnp.concatenate([part.reshape(-1) * scale for part, scale in pairs])


def _moved(params: Any, step: Any, rate: Any = 1.0) -> Any:
    return jax.tree.map(lambda p, d: p - (rate * d).astype(p.dtype), params, step)


def _where(condition: Any, first: Any, second: Any) -> Any:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), first, second)


def _viewed(tree: Any) -> Any:
    """Return arrays of NumPy, on the same memory where it can read it."""

    def viewed(x: Any) -> Any:
        array = kc.execution.hosted.host_view(x, xp=jnp)
        return jax.device_get(x) if array is None else array

    return jax.tree.map(viewed, tree)


def _in_memory_of_host(tree: Any) -> bool:
    """Whether all arrays lie on one CPU, where NumPy can view what is computed of them."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    devices = {device for array in arrays for device in array.devices()}
    devices = devices or set(jax.devices()[:1])
    return len(devices) == 1 and devices.pop().platform == "cpu"
