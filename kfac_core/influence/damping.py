"""The damping of influence scores, given or from each block's mean eigenvalue.

Conventions.  A fraction of the mean eigenvalue is ``lam_b = fraction * tr F_b / dim F_b``,
for each block on its own, F_b without damping.  With EKFAC the mean is that of the
corrected eigenvalues E; Grosse et al. (2023) and kronfluence take a fraction of 0.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kfac_core import constraints
from kfac_core.array import Array, Scalar
from kfac_core.array import namespaces as ns
from kfac_core.damping import require_damping
from kfac_core.operators.spectral import SpectralOperator


def mean_eigenvalue_damping(
    blocks: Mapping[str, SpectralOperator], /, *, fraction: Scalar
) -> dict[str, Array]:
    """Return the damping of each block.

    Parameters
    ----------
    blocks : mapping of str to SpectralOperator
        Operators from `kfac_core.posterior.spectral_blocks`.
    fraction : float or 0-d array
        Fraction of the mean eigenvalue; finite and >= 0.

    Returns
    -------
    dict of str to 0-d array
        lam of each block, in its dtype.

    Raises
    ------
    DampingError
        For a fraction that is negative or not finite.

    References
    ----------
    Grosse et al. (2023), "Studying Large Language Model Generalization with Influence
    Functions", arXiv:2308.03296; kronfluence, ``factor/config.py``.
    """
    require_damping(fraction, name="fraction")
    # Spectra of layers differ by orders of magnitude, and one lam would suit none.
    return {
        name: ns.as_scalar(F.namespace, fraction, F.dtype, "fraction")
        * F.mean_eigenvalue()
        for name, F in blocks.items()
    }


def damping_by_block(
    blocks: Mapping[str, SpectralOperator], damping: Scalar | Mapping[str, Scalar], /
) -> dict[str, Array]:
    """Return one damping, or one of each block, as 0-d arrays.

    Parameters
    ----------
    blocks : mapping of str to SpectralOperator
        The blocks.
    damping : float, 0-d array, or mapping of str to these
        Damping ``lam``, finite and >= 0.

    Returns
    -------
    dict of str to 0-d array
        lam of each block, in its dtype.

    Raises
    ------
    DampingError
        For a number that is negative or not finite; values of arrays are not read.
    UnknownBlockError
        For a mapping with other names.
    """
    numbers: Any = damping
    if isinstance(damping, Mapping):
        constraints.require_names("damping", damping, blocks)
    else:
        numbers = dict.fromkeys(blocks, damping)
    dampings = {}
    for name, F in blocks.items():
        require_damping(numbers[name])
        value = ns.as_scalar(F.namespace, numbers[name], F.dtype, "damping")
        dampings[name] = ns.full_of(F.namespace, value, F.damping)
    return dampings
