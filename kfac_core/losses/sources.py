"""The vectors to backpropagate, of every estimation mode (`kfac_core.losses.modes`).

Conventions.  ``vectors`` has shape ``(M, N, ..., P)``: M sources, each a vector for every
row of the network's outputs.  The sum or mean over sources of their outer products
estimates the curvature of a loss that is a *sum* over the batch (``reduction="sum"``),
times the weight of the row.  Vectors are constants: nothing is differentiated through them.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Literal

from kfac_core import constraints, errors
from kfac_core.array import Array, Namespace, Scalar, replaced
from kfac_core.array import namespaces as ns
from kfac_core.array.backend import backend_of
from kfac_core.array.structure import structure
from kfac_core.conventions import SourceReduction
from kfac_core.losses import modes
from kfac_core.losses.joint import refuse_squared_weights
from kfac_core.losses.loss import Loss
from kfac_core.losses.outputs import is_uniform, wide_companion, wide_natural


@structure(static=("mode", "sources", "source_reduction"))
class SourceVectors:
    """Vectors to backpropagate, with the reduction of their outer products.

    Attributes
    ----------
    vectors : array, shape (M, N, ..., P)
        Vectors to pull back to the layers, one source after the other; for the last
        layer itself, ``Batch(output_grads=vectors, sources=M)``.
    mode : EstimationMode
        Mode of the vectors; `curvature_matrix` is the matrix that it estimates.
    sources : int
        Number of backpropagated vectors ``M``.
    source_reduction : {"sum", "mean"}
        The ``sources`` of the `Conventions` under which they are on scale.
    """

    vectors: Array
    mode: modes.EstimationMode
    sources: int
    source_reduction: SourceReduction


def vectors(
    loss: Loss,
    natural: Array,
    /,
    *,
    mode: modes.EstimationMode,
    targets: Array | None = None,
    noise: Array | None = None,
    weight: Scalar | Array = 1.0,
    positions: Literal["together", "separate"] = "together",
) -> SourceVectors:
    """Return the vectors that an estimation mode backpropagates.

    Parameters
    ----------
    loss : Loss
        Loss of the network.
    natural : array, shape (N, ..., P)
        The network's outputs; never differentiated through.
    mode : EstimationMode
        See the table of `kfac_core.losses.modes`.
    targets : array, optional
        The data's targets, as the loss says; read by ``"empirical"`` alone.
    noise : array, shape (M, ...), optional
        Noise in the form of `kfac_core.losses.modes.noise_spec`: its first axis is that of
        the samples.  Read by the sampled modes alone.  Noise that is to be uniform and
        lies outside of [0, 1] gives NaN, which the statistics refuse.
    weight : float or array
        The weight of the loss, >= 0: a number, a 0-d array, one number for each
        example, shape (N,), or for each row, shape (N, ...).  Rows of weight zero have
        vectors of zero, whatever else they hold.
    positions : {"together", "separate"}
        In the exact modes, whether a source has a vector at every row of an example, or at
        one: T positions of rows are then T times as many sources, T I of them, and exact
        for layers that mix positions, as attention does.

    Returns
    -------
    SourceVectors
        Vectors in the dtype of `natural`, or float32 where that is narrower.

    Raises
    ------
    ConventionError
        For an unknown mode or `positions`, ``positions="separate"`` with a mode
        that is not exact, missing targets or noise, or a weight that is
        negative or not finite.  (In arrays such a weight gives NaN, which the
        statistics refuse.)
    UnsupportedError
        For a Gauss-Newton mode of a loss that has no such matrix.
    ShapeError, DtypeError, MixedArraysError
        For invalid arrays; the message names the argument.

    Notes
    -----
    The exact modes make ``I N P`` numbers and need I backward passes; with T separate
    positions ``T^2 I N P``, and T I passes.  Several losses of
    one network are independent, and their curvatures add up: with sampled modes
    backpropagate one vector of each together, with exact modes one loss at a time.

    References
    ----------
    Martens, Sutskever and Swersky (2012), arXiv:1206.6464: curvature propagation.
    Kunstner, Balles and Hennig (2019), arXiv:1905.12558: what ``empirical`` is not.

    Examples
    --------
    >>> import numpy as np
    >>> from kfac_core.losses import Categorical, draw_noise, noise_spec, vectors
    >>> loss, logits = Categorical(), np.zeros((5, 3))
    >>> made = vectors(loss, logits, mode="exact")
    >>> made.vectors.shape, made.sources, made.source_reduction
    ((3, 5, 3), 3, 'sum')
    >>> spec = noise_spec(loss, logits, mode="gradients", samples=2)
    >>> noise = draw_noise(spec, like=logits, rng=0)
    >>> vectors(loss, logits, mode="gradients", noise=noise).source_reduction
    'mean'
    """
    constraints.require_range("loss", loss, constraints.implementation_of(Loss))
    if isinstance(weight, numbers.Real) or not hasattr(weight, "dtype"):
        constraints.require_range("weight", weight, constraints.NOT_NEGATIVE)
    reduction = modes.source_reduction_of(mode)
    constraints.require_one_of("positions", positions, ("together", "separate"))
    exact = mode in ("exact", "exact_GGN")
    if positions == "separate" and not exact:
        raise errors.ConventionError(
            f"positions='separate' is for the exact modes, got {mode!r}. The noise of the "
            "sampled modes is independent at every position already."
        )
    xp = ns.namespace_of(natural=natural)
    detach = backend_of(xp).detach
    natural, _ = wide_natural(detach(natural))
    # N is 0 on a process without rows of a batch.
    if natural.ndim < 2:
        raise errors.ShapeError(
            f"Expected `natural` to have shape (N, ..., P), got {tuple(natural.shape)}."
        )
    if mode == "empirical":
        v = _empirical(loss, natural, targets)
    elif exact:
        v = _exact(loss, natural, modes.curvature_matrix(mode), xp)
        if positions == "separate":
            v = _at_each_position(v, xp)
    else:
        v = _sampled(loss, natural, noise, mode)
    v = _weighted(v, weight, xp)
    return SourceVectors(detach(v), mode, int(v.shape[0]), reduction)


def with_random_signs(sources: SourceVectors, noise: Array, /) -> SourceVectors:
    """Multiply each row of each source by a random sign.

    Outer products of single rows stay as they are; products of two different rows have
    expectation zero.  So the square of a gradient that was summed over rows is an
    unbiased estimate of the sum of squares, in the exact modes too, at the price of
    noise.

    Parameters
    ----------
    sources : SourceVectors
        Vectors of any mode.
    noise : array, shape (M, N, ...)
        Uniform in [0, 1), of the shape of ``sources.vectors`` without its last axis;
        outside of [0, 1] it gives NaN.

    Returns
    -------
    SourceVectors
        New vectors.

    Raises
    ------
    ShapeError, DtypeError, MixedArraysError
        For invalid arrays; the message names the argument.
    """
    v = sources.vectors
    xp = ns.namespace_of(vectors=v, noise=noise)
    ns.require_matrix(noise, tuple(v.shape[:-1]), "noise")
    u = wide_companion(noise, v.shape[:-1], "noise", dtype=v.dtype, xp=xp)
    u = u[..., None]
    signed = xp.where(u < 0.5, v, -v)
    return replaced(sources, vectors=xp.where(is_uniform(u), signed, xp.nan))


def _empirical(loss: Loss, natural: Array, targets: Array | None) -> Array:
    if targets is None:
        raise errors.ConventionError("The mode 'empirical' needs `targets`, got None.")
    refuse_squared_weights(loss)
    gradient = loss.gradient(natural, targets)
    if gradient.ndim != natural.ndim:
        raise errors.ShapeError(
            "Expected `targets` to have a target for each row of `natural`, whose "
            f"shape is {tuple(natural.shape)}; got gradients of {tuple(gradient.shape)}."
        )
    return gradient[None, ...]


def _exact(
    loss: Loss, natural: Array, matrix: modes.CurvatureMatrix, xp: Namespace
) -> Array:
    """Return ``B e_i`` of every row, for each i."""
    *rows, inner = loss.inner_shape(natural)
    unit = xp.eye(inner, dtype=natural.dtype, device=ns.device_of(natural))
    unit = xp.reshape(unit, (inner, *(1 for _ in rows), inner))
    unit = xp.broadcast_to(unit, (inner, *rows, inner))
    return _factor(loss, matrix)(natural, unit)


def _at_each_position(v: Array, xp: Namespace) -> Array:
    """Return the vectors of one position of the rows at a time, (T M, N, ..., P)."""
    sources, N, *shared, P = v.shape
    T = math.prod(shared)
    flat = xp.reshape(v, (1, sources, N, T, P))
    eye = xp.eye(T, dtype=v.dtype, device=ns.device_of(v))
    # T times as many sources, each nonzero at one position: cross terms between
    # positions of an example are then absent.
    at_position = eye[:, None, None, :, None] > 0
    apart = xp.where(at_position, flat, xp.zeros_like(flat))
    return xp.reshape(apart, (T * sources, N, *shared, P))


def _sampled(
    loss: Loss, natural: Array, noise: Array | None, mode: modes.EstimationMode
) -> Array:
    if noise is None:
        raise errors.ConventionError(
            f"The mode {mode!r} needs `noise`, got None. `noise_spec` says of which "
            "distribution and shape, and `draw_noise` draws it."
        )
    xp = ns.namespace_of(natural=natural, noise=noise)
    spec = modes.noise_spec(loss, natural, mode=mode)
    shape = spec.shape[1:] if spec else ()
    constraints.require_shape("noise", noise, ("M", *shape))
    if mode == "gradients":
        return loss.sampled_gradient(natural, noise)
    u = wide_companion(noise, shape, "noise", dtype=natural.dtype, xp=xp)
    signs = xp.where(u < 0.5, xp.ones_like(u), -xp.ones_like(u))
    signs = xp.where(is_uniform(u), signs, xp.nan)
    return _factor(loss, modes.curvature_matrix(mode))(natural, signs)


def _factor(loss: Loss, matrix: modes.CurvatureMatrix) -> Callable[..., Array]:
    return loss.ggn_factor_multiply if matrix == "ggn" else loss.fisher_factor_multiply


def _weighted(v: Array, weight: Scalar | Array, xp: Namespace) -> Array:
    """Return the vectors times the root of the weight; zero where that is zero."""
    if isinstance(weight, numbers.Real):
        if weight == 0:
            return xp.zeros_like(v)
        # The root, as G is quadratic in v.
        return v if weight == 1 else v * math.sqrt(weight)
    ns.namespace_of(natural=v, weight=weight)
    rows = tuple(v.shape[1:-1])
    shape = tuple(weight.shape)
    if shape not in ((), rows[:1], rows):
        raise errors.ShapeError(
            f"Expected `weight` to be a number or of shape {rows[:1]}"
            f"{'' if len(rows) == 1 else f' or {rows}'}, got {shape}."
        )
    if shape:
        weight = xp.reshape(weight, (*shape, *(1 for _ in rows[len(shape) :]), 1))
    weight = ns.cast(xp, weight, v.dtype)
    # A traced weight cannot raise: an invalid one becomes NaN, which statistics reject.
    good = weight >= 0
    root = xp.where(good, xp.sqrt(xp.where(good, weight, 0.0)), xp.nan)
    # Replace padded rows instead of multiplying by 0, since they may hold NaN.
    return xp.where(weight == 0, xp.zeros_like(v), v) * root
