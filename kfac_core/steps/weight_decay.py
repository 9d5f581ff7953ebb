"""Weight decay, in its two senses.

*As a term of the objective.*  The objective is the loss plus ``eta/2 |theta|^2``; its
gradient is ``grad + eta theta`` and its curvature ``F + eta I``.  Then eta belongs to
everything that is made of these: to the gradient that is preconditioned, to the
quadratic model, to the loss that a reduction ratio compares, and (the paper's
``lambda + eta``) to the damping of the preconditioner.

*Decoupled.*  The parameters shrink beside the step, ``delta - lr eta theta``, and no
curvature knows of it.

Which parameters decay is said by `only`, a function of the block's and the
parameter's names; by default all do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from kfac_core import constraints
from kfac_core.array import Array, Scalar
from kfac_core.array import namespaces as ns
from kfac_core.layers.feeding import detached_array
from kfac_core.steps.vectors import Vector, entered

Decayed: TypeAlias = Callable[[str, str], bool]
"""Takes the names of a block and of a parameter; says whether that decays."""


def add_l2(
    vector: Vector,
    parameters: Vector,
    /,
    *,
    weight_decay: Scalar,
    only: Decayed | None = None,
) -> dict[str, dict[str, Array]]:
    """Return ``vector + eta parameters``, on the parameters that decay.

    Turns the gradient of the loss at theta into that of the objective, and a product
    ``F d``, with d in the place of the parameters, into ``(F + eta I) d``.

    Parameters
    ----------
    vector : mapping of str to mapping of str to array
        The gradient at theta, or ``F d``.
    parameters : mapping of str to mapping of str to array
        Parameters ``theta``, or a direction d.
    weight_decay : float or 0-d array
        Coefficient ``eta``.
    only : callable, optional
        Whether a parameter, by the names of block and parameter, decays.

    Returns
    -------
    dict of str to dict of str to array
        New arrays, in the dtypes of `vector`.

    Raises
    ------
    ShapeError, DtypeError, MixedArraysError, UnsupportedError
        For vectors that do not go together, naming the array.
    """
    constraints.require_range("weight_decay", weight_decay, constraints.FINITE_SCALAR)
    xp, (v, theta) = entered(vector=vector, parameters=parameters)
    eta = detached_array(weight_decay)

    def added(block: str, name: str) -> Array:
        x, p = v[block][name], theta[block][name]
        dtype = ns.wide_dtype(xp, xp.result_type(x, p))
        c = ns.as_scalar(xp, eta, dtype, "weight_decay")
        return ns.cast(xp, ns.cast(xp, x, dtype) + c * ns.cast(xp, p, dtype), x.dtype)

    return {
        block: {
            name: added(block, name)
            if only is None or only(block, name)
            else xp.asarray(x, copy=True)  # results never alias arguments
            for name, x in arrays.items()
        }
        for block, arrays in v.items()
    }


def decay_decoupled(
    step: Vector,
    parameters: Vector,
    /,
    *,
    weight_decay: Scalar,
    learning_rate: Scalar,
    only: Decayed | None = None,
) -> dict[str, dict[str, Array]]:
    """Return ``delta - lr eta theta``, on the parameters that decay.

    Parameters
    ----------
    step : mapping of str to mapping of str to array
        delta, after preconditioning, momentum and clipping.
    parameters : mapping of str to mapping of str to array
        Parameters ``theta``.
    weight_decay : float or 0-d array
        Coefficient ``eta``.
    learning_rate : float or 0-d array
        lr; one, where the quadratic model chose the step's length.
    only : callable, optional
        Whether a parameter, by the names of block and parameter, decays.

    Returns
    -------
    dict of str to dict of str to array
        New arrays, in the dtypes of `step`.  A velocity should be kept without it.

    Raises
    ------
    ShapeError, DtypeError, MixedArraysError, UnsupportedError
        For vectors that do not go together, naming the array.

    References
    ----------
    Loshchilov and Hutter (2019), arXiv:1711.05101; the ``weight_decay_coeff`` of
    TensorFlow's K-FAC.
    """
    constraints.require_range("weight_decay", weight_decay, constraints.FINITE_SCALAR)
    constraints.require_range(
        "learning_rate", learning_rate, constraints.NOT_NEGATIVE_SCALAR
    )
    # Shrinking by eta lr is adding -eta lr theta.
    rate = -detached_array(weight_decay) * detached_array(learning_rate)
    return add_l2(step, parameters, weight_decay=rate, only=only)
