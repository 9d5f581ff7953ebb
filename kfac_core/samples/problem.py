"""What a function of residuals returns, as a problem of least squares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kfac_core import errors
from kfac_core.array import Array
from kfac_core.array import namespaces as ns
from kfac_core.layers.feeding import detached_array
from kfac_core.losses import Bernoulli, Categorical
from kfac_core.samples.gauss_newton import GaussNewtonOptions
from kfac_core.samples.likelihood import LikelihoodResiduals, likelihood_residuals


class ResidualProblem(NamedTuple):
    """The terms of a loss at some parameters.

    Attributes
    ----------
    terms : list of array, shapes (N, C)
        Residuals of each term; or outputs of a likelihood, or log psi.
    residuals : list of array, shapes (N, C)
        The r with ``J^T r`` the gradient; of least squares the terms themselves.
    root : LikelihoodResiduals or None
        Of a likelihood: J is the Jacobian of ``root.rows(term)``.
    targets : array, tuple of array or None
        Of a likelihood; a tuple of those of a `kfac_core.losses.Joint`.
    """

    terms: list[Array]
    residuals: list[Array]
    root: LikelihoodResiduals | None
    targets: Array | None = None


# Any: of what a user's function returned nothing is known before it is checked.
def residual_terms(options: GaussNewtonOptions, returned: Any, /) -> list[Array]:
    """Return the terms of a loss, or the outputs of a likelihood, as matrices (N, C).

    Parameters
    ----------
    options : GaussNewtonOptions
        Likelihood, and whether residuals are centered.
    returned : array, sequence of array, or pair of these
        Residuals; outputs and targets of a likelihood; or log psi and energies.

    Raises
    ------
    ShapeError, DtypeError
        For anything else.
    """
    if options.likelihood is None and not options.centered:
        return _as_matrices(returned)
    if options.centered:
        return _wave_function(returned)[:1]
    return _as_matrices(_pair(returned)[0])


def residual_problem(
    options: GaussNewtonOptions,
    returned: Any,
    root: LikelihoodResiduals | None = None,
    /,
) -> ResidualProblem:
    """Return terms and residuals, with graphs of derivatives where they have some.

    Parameters
    ----------
    options : GaussNewtonOptions
        Likelihood, and whether residuals are centered.
    returned : array, sequence of array, or pair of these
        See `residual_terms`.
    root : LikelihoodResiduals, optional
        Where the step began, for which J was formed: its root of the Fisher matrix stays.

    Raises
    ------
    ShapeError
        For another shape.
    DtypeError
        For complex numbers.
    """
    if options.centered:
        log_psi, energies = _wave_function(returned)
        return ResidualProblem([log_psi], [energies], None)
    terms = residual_terms(options, returned)
    if options.likelihood is None:
        return ResidualProblem(terms, terms, None)
    outputs = terms[0]
    targets = _in_dtype_of(outputs, _pair(returned)[1])
    xp = ns.own_namespace(outputs)
    weight = None
    if isinstance(options.likelihood, Categorical) and targets.ndim == 1:
        # The label of examples that do not count, in PyTorch's losses.
        counts = targets != -100
        targets = xp.where(counts, targets, 0)
        weight = ns.cast(xp, counts, outputs.dtype)
        weight = weight / xp.clip(xp.mean(weight), min=1 / max(1, len(targets)))
    here = likelihood_residuals(
        options.likelihood, detached_array(outputs), targets, weight=weight
    )
    here = here if root is None else here._replace(root=root.root)
    return ResidualProblem(terms, [here.residuals], here, targets)


def complex_parameter(name: str, dtype: object, /) -> errors.DtypeError:
    """Return the error for a complex parameter."""
    return errors.DtypeError(
        f"Expected real parameters, got {name} of {dtype}. Train its real and imaginary "
        "parts as two parameters, and keep constants apart from parameters."
    )


def not_finite(
    options: GaussNewtonOptions, problem: ResidualProblem, loss: float, /
) -> errors.KFACError:
    """Return the error for a loss that is not finite.

    Parameters
    ----------
    options : GaussNewtonOptions
        Likelihood.
    problem : ResidualProblem
        At the parameters of the loss.
    loss : float
        The loss.

    Returns
    -------
    ConventionError or NotFiniteError
        The former for targets that the likelihood does not have.
    """
    outputs, targets = problem.terms[0], problem.targets
    if targets is not None:
        xp = ns.own_namespace(outputs)
        unfit = xp.any(xp.isnan(problem.residuals[0]), axis=1)
        unfit = unfit & xp.all(xp.isfinite(outputs), axis=1)
        if bool(xp.any(unfit)):
            n = int(xp.argmax(xp.astype(unfit, xp.int32)))
            expected = "finite numbers"
            if isinstance(options.likelihood, Bernoulli):
                expected = "numbers from 0 to 1"
            elif isinstance(targets, tuple):
                expected = "those of the loss of each head"
            elif targets.ndim == 1:
                last = outputs.shape[1] - 1
                expected = f"labels from 0 to {last}, or -100 to be left out"
            heads = targets if isinstance(targets, tuple) else (targets,)
            found = " and ".join(f"{y[n, ...]}" for y in heads)
            return errors.ConventionError(
                f"Expected `targets` to be {expected}, got {found} of example "
                f"{n}. Nothing was changed; map the targets to this range."
            )
    return errors.NotFiniteError(
        f"Expected finite residuals, got a loss of {loss}. Nothing was changed; begin "
        "with smaller weights, or look at the data."
    )


def scales_of(terms: Sequence[int], samples: int, /) -> list[float]:
    """Return the root of R over the examples of each term.

    Then ``1/(2R) |r|^2`` of all rows is the sum of the terms' half means.

    Parameters
    ----------
    terms : sequence of int
        Examples of each term, on all processes; a term without any has no rows.
    samples : int
        R, the numbers of all terms.

    Raises
    ------
    ShapeError
        If there are none.
    """
    if not samples:
        raise errors.ShapeError(
            "Expected residuals of one example or more, got none: leave an empty batch out."
        )
    return [(samples / max(1, examples)) ** 0.5 for examples in terms]


def _pair(returned: Any) -> tuple[Any, Any]:
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise errors.ShapeError(
            "Expected outputs and targets of a likelihood, or log psi and energies, "
            f"got {type(returned).__name__}."
        )
    first, second = returned
    return first, second


def _in_dtype_of(outputs: Array, targets: Any) -> Any:
    """Return floating targets as rows in the dtype of outputs, and labels as they are."""
    if isinstance(targets, tuple | list):
        return tuple(_in_dtype_of(outputs, of_head) for of_head in targets)
    xp = ns.namespace_of(outputs=outputs, targets=targets)
    if not xp.isdtype(targets.dtype, "real floating"):
        return targets
    targets = ns.cast(xp, targets, outputs.dtype)
    return targets[:, None] if targets.ndim == 1 else targets


def _wave_function(returned: Any) -> list[Array]:
    """Return log psi and the local energies, shapes (N, 1)."""
    positions = None
    for name, x in zip(("log psi", "local energies"), _pair(returned), strict=True):
        form = tuple(x.shape) if hasattr(x, "shape") else type(x)
        N = form[0] if isinstance(form, tuple) and form else None
        if N is None or form not in ((N,), (N, 1)) or positions not in (None, N):
            raise errors.ShapeError(
                f"Expected {name} of shape ({positions or 'N'},), got {form}."
            )
        if ns.own_namespace(x).isdtype(x.dtype, "complex floating"):
            raise errors.DtypeError(
                f"Expected real {name}, got {x.dtype}: wave functions with a phase are "
                "not covered. Return log |psi|, and real energies."
            )
        positions = N
    return _as_matrices(list(_pair(returned)))


def _as_matrices(returned: Any) -> list[Array]:
    terms = []
    for term in returned if isinstance(returned, tuple | list) else [returned]:
        if getattr(term, "ndim", None) not in (1, 2):
            form = tuple(term.shape) if hasattr(term, "shape") else type(term)
            raise errors.ShapeError(
                "Expected residuals of shape (N,) or (N, C), or a sequence of such, "
                f"got {form}: return the residuals, and not their mean square."
            )
        xp = ns.own_namespace(term)
        if xp.isdtype(term.dtype, "complex floating"):
            raise errors.DtypeError(
                f"Expected real residuals or outputs, got {term.dtype}. Return the real "
                "and the imaginary parts as columns of their own."
            )
        # Half precision stays in the model.
        if xp.isdtype(term.dtype, "real floating"):
            term = ns.cast(xp, term, ns.wide_dtype(xp, term.dtype))
        terms.append(term if term.ndim == 2 else term[:, None])
    return terms
