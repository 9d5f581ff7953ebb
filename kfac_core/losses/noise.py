"""Random numbers, which are always arguments.

Conventions.  The Array API standard has no random numbers, and drawing them inside would
be neither reproducible nor traceable.  So sampling functions take *noise*:
an array of independent numbers, uniform in [0, 1) or standard normal, of a stated
shape.  Draw it with your library's own functions, from a key or a generator, or let
`draw_noise` draw it on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from kfac_core import constraints
from kfac_core.array import Array
from kfac_core.array import namespaces as ns
from kfac_core.array.backend import backend_of

NoiseDistribution = Literal["uniform", "normal"]


@dataclass(frozen=True)
class NoiseSpec:
    """Distribution and shape of random numbers.

    Attributes
    ----------
    distribution : {"uniform", "normal"}
        Uniform in [0, 1), or standard normal.
    shape : tuple of int
        Shape of the array; all its numbers are independent.
    """

    distribution: NoiseDistribution
    shape: tuple[int, ...]


def draw_noise(
    spec: NoiseSpec, /, *, like: Array, rng: np.random.Generator | int
) -> Array:
    """Draw noise on the host, and copy it to another array's device.

    Parameters
    ----------
    spec : NoiseSpec
        Distribution and shape.
    like : array
        Real floating.  Gives the library, the device, and the dtype (float32 where it
        is narrower).
    rng : numpy.random.Generator or int
        A generator, which is advanced, or the seed of a new one.

    Returns
    -------
    array
        Noise of shape ``spec.shape``.  The same seed gives the same numbers, up to
        rounding, in every library and dtype.

    Raises
    ------
    DtypeError
        For anything else than a generator or an integer, and for a `like` of integers.
    ConventionError
        For an unknown distribution.

    Notes
    -----
    Copies to the device.  Under a function compiler the numbers become constants of the
    program, the same in every call: draw outside, and give the noise as an argument.
    """
    kinds = np.random.Generator | int | np.integer
    constraints.require_kind("rng", rng, kinds, "a numpy.random.Generator or a seed")
    xp = ns.namespace_of(like=like)
    ns.require_floating(xp, like, "like")
    constraints.require_one_of(
        "spec.distribution", spec.distribution, get_args(NoiseDistribution)
    )
    generator = np.random.default_rng(rng)
    # Drawn on the host, so that one seed means the same noise on every library.
    is_double = ns.wide_dtype(xp, like.dtype) == xp.float64
    dtype = np.dtype(np.float64 if is_double else np.float32)
    if spec.distribution == "normal":
        values = np.asarray(generator.standard_normal(spec.shape)).astype(dtype)
    else:
        # A float64 just below 1 rounds to 1 in float32, which is outside of [0, 1).
        below_one = np.nextafter(dtype.type(1.0), dtype.type(0.0))
        values = np.asarray(generator.random(spec.shape)).astype(dtype)
        values = np.minimum(values, below_one)
    return backend_of(xp).asarray(values, device=ns.device_of(like))
