"""Products with the inverses of many small blocks, as one stack.

For small matrices nearly all of the time goes into calls.  The inverses of operators of
one shape are copied into one array, and their products with as many vectors are two
calls.

Conventions.  As in `kfac_core.execution.stacking`: a stack is made of operators of one
shape, library, device and dtype; whatever else there is, is done one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kfac_core.array.backend import Array
from kfac_core.array.namespaces import device_of, own_namespace
from kfac_core.array.structure import structure
from kfac_core.execution.stacking import STACKED_UP_TO
from kfac_core.linalg.shifted import ShiftedMatrix
from kfac_core.operators.kronecker import FactoredKronecker
from kfac_core.operators.operator import CurvatureOperator

__all__ = ["InverseStack", "inverse_stacks"]


@structure(static=("names",))
class InverseStack:
    """The inverses of some operators of one shape, as arrays of their own.

    Attributes
    ----------
    input, output : array, shapes (Q, n, n) and (Q, m, m)
        ``(A + a I)^-1 / S`` and ``(G + b I)^-1`` of each, both triangles.
    names : tuple of str
        Of the Q blocks.
    """

    input: Array
    output: Array
    names: tuple[str, ...]

    def products(self, vectors: Mapping[str, Array], /) -> dict[str, Array]:
        """Return ``(A + a I)^-1 V (G + b I)^-1 / S`` of each, by block."""
        xp = own_namespace(self.input)
        V = xp.stack([vectors[name] for name in self.names])
        products = xp.matmul(xp.matmul(self.input, V), self.output)
        return dict(zip(self.names, xp.unstack(products), strict=True))

    def fits(self, vectors: Mapping[str, Array], /) -> bool:
        """Whether there is a vector for each, of the stack's shape, dtype and place."""
        shape = self.input.shape[-1], self.output.shape[-1]
        kind, dtype, device = type(self.input), self.input.dtype, device_of(self.input)
        for name in self.names:
            v = vectors.get(name)
            if v is None or type(v) is not kind or v.shape != shape or v.dtype != dtype:
                return False
            if device_of(v) != device:
                return False
        return True


def inverse_stacks(operators: Mapping[str, CurvatureOperator], /) -> list[InverseStack]:
    """Return the inverses of those operators that can be applied as stacks.

    Parameters
    ----------
    operators : mapping of str to CurvatureOperator
        By block, with the inverses that were prepared.

    Returns
    -------
    list of InverseStack
        Each of two operators or more.  To be made anew after a refresh.
    """
    groups: dict[Any, list[str]] = {}
    for name, operator in operators.items():
        made: Any = operator
        if _is_small_inverse(made):
            S = made.scale
            place = own_namespace(S).__name__, str(device_of(S)), S.dtype
            groups.setdefault((made.shape, place), []).append(name)
    return [
        _inverse_stack(operators, names) for names in groups.values() if len(names) > 1
    ]


def _is_small_inverse(operator: Any) -> bool:
    """Whether an operator is two small prepared inverses, in no groups."""
    return type(operator) is FactoredKronecker and all(
        type(side) is ShiftedMatrix
        and side.inverse is not None
        and not side.lead
        and side.size <= STACKED_UP_TO
        for side in (operator.input, operator.output)
    )


def _inverse_stack(
    operators: Mapping[str, CurvatureOperator], names: list[str]
) -> InverseStack:
    chosen: list[Any] = [operators[name] for name in names]
    xp = own_namespace(chosen[0].scale)
    A, G = (
        xp.stack([getattr(operator, side).inverse.matrix.full() for operator in chosen])
        for side in ("input", "output")
    )
    S = xp.stack([operator.scale for operator in chosen])[:, None, None]
    return InverseStack(A / S, G, tuple(names))
