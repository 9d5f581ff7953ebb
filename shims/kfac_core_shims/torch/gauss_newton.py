"""Gauss-Newton in the space of samples, as an optimizer of least-squares problems.

Conventions.  The loss is ``1/2 sum_i (1/N_i) |r_i|^2`` over the terms i that the caller's
function of residuals returns, N_i the examples of a term; or the mean over examples of a
likelihood's ``-log p``.  A weighted term is multiplied by the root of its weight.  Inside,
all residuals are one vector of R numbers, those of term i times ``sqrt(R / N_i)``, so that
the loss is ``|r|^2 / (2 R)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

import kfac_core as kc
from kfac_core_shims.torch import parallel, private
from kfac_core_shims.torch.jacobians import JacobianFinder, namespace, viewed
from kfac_core_shims.torch.saving import OfOneModel, require_own_state

Residuals: TypeAlias = Any
"""A tensor of residuals of shape (N,) or (N, C), or a sequence of such terms; or outputs
and targets, with a likelihood."""


@dataclass(frozen=True, kw_only=True)
class GaussNewtonReport:
    """What the last step of `GaussNewton` did.

    Attributes
    ----------
    steps : int
        Steps taken by this object.
    loss, reached : float
        The loss before the step, and after it; the latter is NaN for steps on other
        data, which do not evaluate it.
    damping : float
        The damping that the next search begins with, or that of this step.
    rate : float
        The length of a step on other data, or 1.
    trials : int
        How many dampings were tried.
    accepted : bool
        Whether the step was taken.
    residual : float
        The relative residual of what solved with ``K + N lam I``; NaN for steps on other
        data by conjugate gradients.
    samples, parameters : int
        The rows R and the columns P of the Jacobian.
    formed : dict of str to str
        Parameters whose derivatives were formed, R numbers each, and why.
    other_points : bool
        Whether the loss is not what the step before reached, as with other data.
    """

    steps: int
    loss: float
    reached: float
    damping: float
    rate: float
    trials: int
    accepted: bool
    residual: float
    samples: int
    parameters: int
    formed: dict[str, str]
    other_points: bool

    def __str__(self) -> str:
        line = f"step {self.steps}: loss {self.loss:.3e}"
        if math.isnan(self.reached):
            line += f", rate {self.rate:.1e}"
        else:
            line += f" to {self.reached:.3e}, {self.trials} trials, "
            line += "accepted" if self.accepted else "no damping lowered the loss"
        lines = [
            f"{line}, damping {self.damping:.1e}",
            f"{self.samples} residuals, {self.parameters} parameters; solved with a "
            f"residual of {self.residual:.0e}",
        ]
        if self.other_points:
            lines.append(
                "the loss is not what the last step reached: points change, and each step "
                "is searched on its own; for mini-batches give minibatch=True"
            )
        lines += [f"formed: {name}, since {why}" for name, why in self.formed.items()]
        return "\n".join(lines)


_RANK = 200
"""Columns of the Nystrom approximation."""


class GaussNewton(OfOneModel, torch.optim.Optimizer):  # type: ignore[misc]
    r"""Gauss-Newton with the exact curvature of the whole model, for least squares.

    .. math:: \theta \leftarrow \theta - d + \tfrac12 a, \qquad
        d = J^T (J J^T + N \lambda I)^{-1} r

    with J the Jacobian of the residuals r by all parameters, which is taken as the rows of
    the model's layers and never formed, and a the geodesic acceleration: the direction in
    which the second derivative of r along d bends the path.  There is no learning rate to
    choose: the damping adapts to whether a step lowers the loss.

    Parameters
    ----------
    model : torch.nn.Module
        The model; all parameters that require gradients are trained.
    likelihood : {"categorical", "bernoulli", "gaussian"} or Loss, optional
        Of outputs and targets, which the function of `step` then returns.
    centered : bool
        Whether the model is a wave function: the function of `step` then returns log psi
        and the local energies, both of shape (N,), at positions drawn from psi^2; J and
        the energies are less their means.
    minibatch : bool, optional
        Say True where residuals are of other data at each step, as from a loader: without
        it each step is searched on its batch, which it fits too well.  Steps are then
        SPRING's, with a damping that follows the residuals.  By default whether `lr` is
        given, or `centered`.
    lr : float, optional
        Length of the steps on other data; a scheduler may change it.  By default 0.3,
        divided by ``1 + k/2`` after k times that losses of batches did not fall any more.
    damping : float, optional
        In units of ``J^T J / N``.  The first damping, by default 1; or that of all steps
        on other data, by default ``0.003 rms(r) sqrt(tr(J J^T) / R)``; where `centered`
        ``0.1 rate std(E) + 1e-4``.
    momentum : float, optional
        SPRING's momentum in [0, 1), of steps on other data; by default 0.95.
    direct_up_to : int
        The number R of residuals above which K is not formed, and systems are solved by
        conjugate gradients, with a Nystrom approximation of K as the preconditioner.
    communicator : Communicator or str, optional
        The processes whose examples are put together; by default all of
        ``torch.distributed``, and ``"alone"`` for none.

    Raises
    ------
    kfac_core.ConventionError
        For options out of range, and for a rate or a momentum on fixed points.
    kfac_core.DtypeError
        For complex parameters.

    Notes
    -----
    A step costs a forward and a backward pass, ``R^2 (n + m)`` flops a layer and
    ``R^3 / 3`` for R residuals, and for each damping that is tried two forward passes and
    another ``R^3 / 3``.  It reads values of the loss, which synchronizes with the device.
    Memory: the rows, and ``R^2`` numbers; ``2 R^2`` on a GPU.

    References
    ----------
    Transtrum and Sethna (2012), arXiv:1201.5885, for damping and acceleration; Müller and
    Zeinhofer (2025), arXiv:2505.12149; Goldshlager, Abrahamsen and Lin (2024),
    arXiv:2401.10190, for the momentum.

    Examples
    --------
    >>> import torch
    >>> from kfac_core_shims.torch import GaussNewton
    >>> _ = torch.manual_seed(0)
    >>> net = torch.nn.Sequential(
    ...     torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    ... )
    >>> x = torch.linspace(-1, 1, 50)[:, None]
    >>> y = torch.sin(3 * x)
    >>> optimizer = GaussNewton(net)
    >>> losses = [float(optimizer.step(lambda: net(x) - y)) for _ in range(30)]
    >>> losses[-1] < 1e-5 * losses[0]
    True
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        likelihood: Any = None,
        minibatch: bool | None = None,
        centered: bool = False,
        lr: float | None = None,
        damping: float | None = None,
        momentum: float | None = None,
        direct_up_to: int = 6000,
        communicator: kc.distributed.Communicator | str | None = None,
    ) -> None:
        self._options = kc.samples.GaussNewtonOptions.of(
            minibatch=minibatch,
            rate=lr,
            damping=damping,
            momentum=momentum,
            centered=centered,
            likelihood=likelihood,
            rate_name="lr",
        )
        kc.constraints.require_range("direct_up_to", direct_up_to, kc.constraints.COUNT)
        self._direct_up_to = direct_up_to
        self._processes = parallel.processes_of(communicator)
        self._finder = JacobianFinder(parallel.inner(model), self._processes)
        self._report: GaussNewtonReport | None = None
        # The last direction as matrices, and as the state has it.
        self._last: tuple[Any, list[Any], dict[str, Any]] | None = None
        options = {
            "lr": self._options.rate if self._options.minibatch else None,
            "damping": self._options.damping,
            "progress": None,
        }
        super().__init__(self._finder.parameters, options)

    def __repr__(self) -> str:
        [group] = self.param_groups
        text = ", ".join(f"{name}={group[name]!r}" for name in ("lr", "damping"))
        text = f"minibatch={self._options.minibatch}, {text}"
        last = "no steps yet" if self._report is None else str(self._report)
        return f"GaussNewton({text})\n{last}"

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned.

        Raises
        ------
        kfac_core.StateError
            For the state of another optimizer; nothing was changed then.
        """
        require_own_state(self, state_dict)
        super().load_state_dict(state_dict)

    def report(self) -> GaussNewtonReport:
        """Return what the last step did; prints as a few lines.

        Raises
        ------
        kfac_core.NotReadyError
            Before the first step.
        """
        if self._report is None:
            raise kc.NotReadyError("No step was taken yet: call step(residuals) first.")
        return self._report

    @property
    def damping(self) -> float | None:
        """The damping that the next step begins with; None where it follows residuals."""
        damping = self.param_groups[0]["damping"]
        return None if damping is None else float(damping)

    @property
    def formed(self) -> dict[str, str]:
        """Parameters whose derivatives the last step formed, R numbers each, and why."""
        return dict(self._finder.formed)

    @private.hooked
    def step(self, residuals: Callable[[], Residuals]) -> torch.Tensor:
        """Take one step, and return the loss before it.

        Parameters
        ----------
        residuals : callable
            Returns the residuals of the model with its graph: a tensor of shape (N,) or
            (N, C), or a sequence of such terms of the loss.  With a likelihood it returns
            ``(outputs, targets)``, outputs of shape (N,) or (N, C).  It is called again
            for each trial, and must then return those of the same points.

        Returns
        -------
        torch.Tensor
            The loss, 0-d: ``1/2 sum_i (1/N_i) |r_i|^2``, the mean of ``-log p``, or the
            mean of the local energies.

        Raises
        ------
        kfac_core.ShapeError, kfac_core.DtypeError
            For residuals of another shape, or complex ones.
        kfac_core.UnsupportedError
            For residuals without a graph, and parameters frozen since.
        kfac_core.NotFiniteError
            For residuals that are not finite.  Nothing was changed.
        kfac_core.ConventionError
            For targets out of range: labels, or probabilities.  Nothing was changed.
        """
        kc.constraints.require_range("residuals", residuals, kc.constraints.FUNCTION)
        device = self._finder.parameters[0].device
        with private.without_autocast(device) as within:
            return self._step(within(residuals))

    def _step(self, residuals: Callable[[], Residuals]) -> torch.Tensor:
        """Take a step outside of autocast."""
        if not all(p.requires_grad for p in self._finder.parameters):
            raise kc.UnsupportedError(
                "A parameter was frozen after GaussNewton was created. Create it "
                "again, with `damping=optimizer.damping`."
            )
        # A plan takes inputs from the graph; where the next one differs, it is read whole.
        self._finder.wants_statistics = not self._finder.is_planned
        try:
            problem = self._problem(residuals)
        finally:
            self._finder.wants_statistics = False
        samples, scales = self._scales(problem.terms)
        # NumPy's calls take a third of the time of PyTorch's.
        on_host = samples <= self._direct_up_to
        on_host = on_host and kc.execution.hosted.host_computes(xp=namespace())
        J = self._finder.jacobian(
            problem.terms, scales, on_host=on_host and self._processes is None
        )
        roundoff = torch.finfo(problem.terms[0].dtype).eps
        with torch.no_grad():
            if self._processes is not None:
                J = kc.samples.gathered_jacobian(J, self._processes)
                if on_host:
                    J = viewed(J) or J
            on_host = not isinstance(J.like, torch.Tensor)
            r = self._joined(problem.residuals, scales, on_host)
            values = r
            if problem.root is not None:
                values = self._joined(problem.terms, scales, on_host)
            loss = r.mean() if self._options.centered else self._loss(r, problem.root)
            loss_here = float(loss)
            if not math.isfinite(loss_here):
                raise kc.samples.not_finite(self._options, problem, loss_here)
            start, root = kc.samples.Evaluation(values, loss), problem.root
            # The graph, which holds the activations, is not needed beside K.
            del problem
            result = self._take(residuals, root, scales, J, r, start)
        last = self._report
        # NaN, which is unlike nothing here, where the last step did not evaluate it.
        before = float("nan") if last is None else last.reached
        limit = roundoff**0.5 * abs(before)
        self._report = GaussNewtonReport(
            steps=1 if last is None else last.steps + 1,
            loss=loss_here,
            reached=_float(result.reached),
            damping=float(result.damping),
            rate=float(result.rate),
            trials=int(result.trials),
            accepted=bool(result.accepted),
            residual=_float(result.residual),
            samples=samples,
            parameters=J.parameters,
            formed=self.formed,
            other_points=abs(loss_here - before) > limit,
        )
        loss = kc.array.namespaces.as_array(loss)
        return loss if isinstance(loss, torch.Tensor) else torch.from_numpy(loss)

    def _take(
        self,
        residuals: Any,
        root: Any,
        scales: Sequence[float],
        J: Any,
        r: Any,
        start: kc.samples.Evaluation,
    ) -> kc.samples.GaussNewtonStep:
        """Take the step, or stay where no damping lowers the loss."""
        [group] = self.param_groups
        parameters, state = group["params"], self.state
        minibatch = self._options.minibatch
        # A step on other data is not searched, and never goes back.
        theta = {} if minibatch else {p: p.detach().clone() for p in parameters}
        last = progress = None
        if minibatch and group["progress"] is not None:
            progress = kc.samples.BatchProgress(*group["progress"])

        on_host = not isinstance(J.like, torch.Tensor)

        def go(step: Any, rate: float = 1.0) -> list[Any]:
            for p, at_start in theta.items():
                p.copy_(at_start)
            directions = self._finder.directions(step)
            private.add_to_each(parameters, directions, alpha=-rate)
            return directions

        def evaluate(step: Any) -> kc.samples.Evaluation:
            go(step)
            problem = self._problem(residuals, root, is_trial=True)
            values = self._joined(problem.terms, scales, on_host)
            return kc.samples.Evaluation(values, self._loss(values, problem.root))

        if progress is not None:
            last = self._last_matrices(J, on_host)
        try:
            result = kc.samples.gauss_newton_step(
                J,
                self._kernel(J),
                r,
                evaluate,
                options=self._options,
                start=start,
                damping=group["damping"],
                rate=group["lr"] or 1.0,
                last=last,
                progress=progress,
                overwrite=True,
            )
        except BaseException:
            for p, at_start in theta.items():
                p.copy_(at_start)
            raise
        directions = go(result.direction, float(result.rate))
        if minibatch:
            assert result.progress is not None
            group["progress"] = tuple(map(float, result.progress))
            for p, direction in zip(parameters, directions, strict=True):
                state[p]["direction"] = direction
            assert result.matrices is not None
            self._last = _mark(directions, J), directions, result.matrices
        else:
            group["damping"] = float(result.damping)
        return result

    def _last_matrices(self, J: kc.samples.Jacobian, on_host: bool) -> dict[str, Any]:
        """Return the last direction as matrices of the layers of J."""
        parameters = self.param_groups[0]["params"]
        directions = [self.state[p]["direction"] for p in parameters]
        if self._last is not None and self._last[0] == _mark(directions, J):
            return self._last[2]
        by_parameter = dict(zip(parameters, directions, strict=True))
        vectors = self._finder.vectors(by_parameter, J)
        matrices = J.to_matrices(viewed(vectors) if on_host else vectors)
        # In the order in memory that a step leaves, so that resuming is bit-for-bit
        # reproducible.
        return {n: V.T.ravel().reshape(V.T.shape).T for n, V in matrices.items()}

    def _kernel(self, J: kc.samples.Jacobian) -> Any:
        """Return K, or an approximation where it is too large."""
        if J.samples <= self._direct_up_to:
            return kc.samples.sample_gram(J)
        # The same at each step, so that resuming is bit-for-bit reproducible.
        generator = torch.Generator().manual_seed(0)
        shape = J.samples, min(_RANK, J.samples)
        probes = torch.randn(shape, dtype=torch.float64, generator=generator)
        return kc.samples.nystrom_kernel(J, probes.to(J.like.device))

    def _problem(
        self, residuals: Any, root: Any = None, *, is_trial: bool = False
    ) -> kc.samples.ResidualProblem:
        """Evaluate the caller's function; with the root where the step began, if any."""
        if not torch.is_grad_enabled():
            with torch.enable_grad():
                return self._problem(residuals, root, is_trial=is_trial)
        here: Any = None
        returned: Any = None
        error: Exception | None = None
        try:
            returned = residuals()
            here = kc.samples.residual_problem(self._options, returned, root)
            _require_tensors(here, with_graphs=not is_trial)
        except Exception as raised:
            if self._processes is None:
                raise
            error = raised
        if self._processes is not None:
            agreement = kc.distributed.Agreement(self._processes)
            agreement.vote("residuals of a step", error=error)
        if here.root is not None:
            if self._processes is not None:
                here = self._shared(self._processes, here, returned[1], root)
            terms = [here.root.rows(term) for term in here.terms]
            here = here._replace(terms=terms)
        problem: kc.samples.ResidualProblem = here
        return problem

    def _shared(self, processes: Any, here: Any, labels: Any, root: Any) -> Any:
        """Return a problem whose examples count as those of all processes do."""
        if not isinstance(self._options.likelihood, kc.losses.Categorical):
            return here
        # Labels of -100 do not count, and the weights here have the mean 1.
        counted, examples = float((labels != -100).sum()), labels.numel()
        here_and_all = torch.tensor([counted, examples], dtype=torch.float64)
        total = processes.all_reduce(here_and_all.clone()).wait()
        share = counted / max(examples, 1) * float(total[1] / total[0].clamp(min=1.0))
        B = share**0.5 * here.root.root if root is None else root.root
        return here._replace(
            residuals=[share**0.5 * r for r in here.residuals],
            root=here.root._replace(root=B, loss=share * here.root.loss),
        )

    def _scales(self, terms: Sequence[Any]) -> tuple[int, list[float]]:
        """Return R, and the root of R over the examples of each term."""
        counts = [term.shape[0] for term in terms]
        counts.append(sum([term.numel() for term in terms]))
        if self._processes is not None:
            of_process = torch.tensor(counts, dtype=torch.float64)
            counts = self._processes.all_reduce(of_process).wait().tolist()
        *examples, samples = counts
        return int(samples), kc.samples.scales_of(examples, samples)

    def _joined(
        self, parts: Sequence[Any], scales: Sequence[float], on_host: bool
    ) -> Any:
        """Return numbers of all terms and processes, each times its scale."""
        parts = [part.detach() for part in parts]
        if on_host and self._processes is None:
            parts = [part.numpy() for part in parts]
        pieces = [
            part.reshape(-1) if scale == 1.0 else part.reshape(-1) * scale
            for part, scale in zip(parts, scales, strict=True)
        ]
        joined = pieces[0]
        if len(pieces) > 1:
            joined = kc.array.namespaces.own_namespace(joined).concat(pieces)
        if self._processes is None:
            return joined
        joined = kc.samples.gathered(joined, self._processes)
        return viewed(joined) if on_host else joined

    def _loss(self, r: Any, of_likelihood: Any) -> Any:
        """Return the loss in float64, of all processes."""
        if of_likelihood is None:
            xp = kc.array.namespaces.own_namespace(r)
            r = kc.array.namespaces.cast(xp, r, xp.float64)
            return r @ r / (2 * len(r))
        nats, examples = of_likelihood.loss.double(), len(of_likelihood.root)
        if self._processes is not None:
            # The mean over no examples is NaN.
            total = nats * examples if examples else torch.zeros_like(nats)
            sums = torch.stack([total, nats.new_tensor(float(examples))])
            total, count = self._processes.all_reduce(sums).wait()
            nats = total / count
        return nats if isinstance(r, torch.Tensor) else viewed(nats)


def _require_tensors(problem: kc.samples.ResidualProblem, *, with_graphs: bool) -> None:
    for array in [*problem.terms, *problem.residuals]:
        if not isinstance(array, torch.Tensor):
            raise kc.ShapeError(
                f"Expected tensors from `residuals`, got {type(array)}: "
                "return them with their graphs, and not as arrays."
            )
    for i, term in enumerate(problem.terms):
        if with_graphs and not term.requires_grad:
            raise kc.UnsupportedError(
                f"Term {i} of the loss does not depend on the model's parameters. "
                "Leave it out; or compute it with a graph, not in torch.no_grad()."
            )


def _mark(directions: list[Any], J: kc.samples.Jacobian) -> object:
    """Return what differs for other tensors, written ones, and other layers of J."""
    versions = [(id(d), private.version(d)) for d in directions]
    return versions, [*J.layers], type(J.like)


def _float(x: Any) -> float:
    return float("nan") if x is None else float(x)
