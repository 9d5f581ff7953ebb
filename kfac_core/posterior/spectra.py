"""The blocks of a network in their eigenbases, from their statistics.

Conventions.  Curvature without damping, averaged over examples: what multiplies it (the
number of examples) and what is added to it (a prior precision, a damping) belongs to
whoever uses it, and changes without a new decomposition.
"""

from __future__ import annotations

from collections.abc import Mapping

from kfac_core import constraints, errors
from kfac_core.approximations.options import RefreshOptions
from kfac_core.array import Check
from kfac_core.array.precision import Precision
from kfac_core.block import Block
from kfac_core.factors.statistics import Statistics
from kfac_core.operators.spectral import SpectralOperator
from kfac_core.stages import operator_of

_FULL_PRECISION = Precision()


def spectral_blocks(
    blocks: Mapping[str, Block],
    statistics: Mapping[str, Statistics],
    /,
    *,
    debias: bool = True,
    precision: Precision = _FULL_PRECISION,
    check: Check = "raise",
) -> dict[str, SpectralOperator]:
    """Decompose the curvature of each block from its current statistics.

    Parameters
    ----------
    blocks : mapping of str to Block
        With the approximations Kronecker, EKFAC, Diagonal, Full, or any other whose
        operator has `kfac_core.CurvatureOperator.spectral`.
    statistics : mapping of str to Statistics
        Statistics of the same blocks; not modified.
    debias : bool
        Whether running sums are divided by their weights.
    precision : Precision
        Dtypes of computing and applying.
    check : {"raise", "status"}
        Whether failures raise, or are reported in each block's ``status()``.

    Returns
    -------
    dict of str to SpectralOperator
        Operators by name of the block.

    Raises
    ------
    UnknownBlockError
        If the two mappings have different names.
    UnsupportedError
        For a block without such a basis.
    NotFiniteError, FactorizationError
        If an eigendecomposition fails (``check="raise"``).

    Notes
    -----
    About ``9 (n^3 + m^3)`` flops a block, ``9 (n m)^3`` for `Full`.  A block of `EKFAC`
    is taken in the bases that its statistics hold: those are the coordinates until its
    first rebase.
    """
    for name, mapping in (("blocks", blocks), ("statistics", statistics)):
        constraints.require_kind(name, mapping, Mapping, "a mapping by block")
    constraints.require_flag("debias", debias)
    constraints.require_kind("precision", precision, Precision, "a Precision")
    constraints.require_check(check)
    constraints.require_names("statistics", statistics, blocks)
    spectra = {}
    for name, block in blocks.items():
        try:
            # Prepare no factorization: without damping, a block of low rank has none.
            options = RefreshOptions(
                damping=0.0,
                rule="exact",
                debias=debias,
                factorizations=(),
                check=check,
                precision=precision,
            )
            operator = operator_of(block, statistics[name], options, name=name)
            spectra[name] = operator.spectral(check=check, name=name)
        except errors.UnsupportedError as error:
            raise errors.UnsupportedError(
                f"Block {name!r}: expected an approximation with an eigenbasis, as "
                f"Kronecker, EKFAC, Diagonal and Full have. {error}"
            ) from None
    return spectra
