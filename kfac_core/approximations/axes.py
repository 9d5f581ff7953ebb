"""Tensor-normal statistics of one array by its axes; see `kfac_core.approximations.tnt`."""

from __future__ import annotations

import math

from kfac_core.approximations.options import OperatorOptions
from kfac_core.array import Namespace, Place, Scalar
from kfac_core.array import namespaces as ns
from kfac_core.factors.full import FullFactor
from kfac_core.factors.shares import Shares
from kfac_core.factors.statistics import Statistics
from kfac_core.layers.example_gradients import ExampleGradients
from kfac_core.layers.layer import Layer
from kfac_core.linalg.damped import damped_matrix
from kfac_core.operators.many_kronecker import ManyKronecker
from kfac_core.operators.parts import flagged_damping


def initial_axes(layer: Layer, place: Place, /) -> Statistics:
    """Return zero statistics: one factor an axis.

    Parameters
    ----------
    layer : Layer
        Layer of one parameter.
    place : Place
        Library, device and dtype of the statistics.

    Returns
    -------
    Statistics
        With the averages ``"axis0"``, ``"axis1"``, ...
    """
    averages = {
        f"axis{i}": FullFactor().initial((n,), place)
        for i, n in enumerate(_shape(layer))
    }
    return Statistics(averages, place.flags())


def updated_axes(
    statistics: Statistics,
    rows: ExampleGradients,
    layer: Layer,
    shares: Shares,
    /,
    *,
    decay: Scalar,
    xp: Namespace,
) -> Statistics:
    """Return the statistics after one update with the gradients of a batch.

    Parameters
    ----------
    statistics : Statistics
        Statistics of the block; not modified.
    rows : ExampleGradients
        One vector a source.
    layer : Layer
        Layer of one parameter.
    shares : Shares
        Shares of the update.
    decay : float or 0-d array
        Factor on the old sums.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    Statistics
        New statistics.
    """
    V = xp.reshape(rows.vectors(statistics.dtype, xp=xp), (-1, *_shape(layer)))
    averages = {}
    for i, n in enumerate(_shape(layer)):
        # The mode-i unfolding of all gradients (Ren and Goldfarb 2021).
        unfolded = xp.reshape(ns.moved_axis(V, i + 1, -1, xp=xp), (-1, n))
        averages[f"axis{i}"] = FullFactor().updated(
            statistics.averages[f"axis{i}"],
            unfolded,
            decay,
            shares.scale * shares.outer_product_scale,
            shares.example_weight,
            xp=xp,
        )
    return Statistics(averages, statistics.status)


def axes_operator(statistics: Statistics, options: OperatorOptions, /) -> ManyKronecker:
    """Return ``F_1 (x) ... (x) F_k / (tr F_1)^(k-1)``, damped as the rule says.

    Parameters
    ----------
    statistics : Statistics
        Statistics of the block; not modified.
    options : OperatorOptions
        Damping and its rule, and how to compute.

    Returns
    -------
    ManyKronecker
        An immutable snapshot.
    """
    xp, compute, apply = options.xp, options.compute, options.apply
    values = {
        name: FullFactor().value(average, debias=options.debias, dtype=compute, xp=xp)
        for name, average in statistics.averages.items()
    }
    trace = next(iter(values.values())).trace()
    unit = xp.where(trace > 0, trace, xp.ones_like(trace))
    # All traces are equal, so k factors have k - 1 of them too many.
    S = unit ** (1.0 - len(values))
    lam = ns.full_of(xp, options.damping, S)
    means = [value.trace() / value.size for value in values.values()]
    shifts = options.shifts(means, S)
    factors = {
        name: damped_matrix(value, shift, apply_dtype=apply)
        for (name, value), shift in zip(values.items(), shifts, strict=True)
    }
    lam, flags = flagged_damping(ns.cast(xp, lam, apply), xp=xp)
    exact = options.rule == "exact"
    operator = ManyKronecker(factors, ns.cast(xp, S, apply), lam, flags, exact)
    return operator.prepared(
        *options.factorizations, check=options.check, name=options.name
    )


def _shape(layer: Layer) -> tuple[int, ...]:
    (shape,) = layer.parameter_shapes.values()
    return shape if math.prod(shape) and shape else (1,)
