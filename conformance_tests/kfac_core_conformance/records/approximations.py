"""The approximations of a record.

A struct has the name and the fields of the class of `kfac_core` that it describes.
"""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias, get_args

from kfac_core_conformance.records.schema import Part


class Approximation(Part, tag_field="name", frozen=True):
    """An approximation of a block."""

    factors: ClassVar[tuple[str, ...]] = ("block",)
    """The statistics that a ``factor`` check may ask for."""


class Kronecker(Approximation, tag="kronecker", frozen=True):
    """``A (x) G``; without `input`, diagonal for an embedding and else full."""

    factors = ("input", "output")

    input: Literal["full", "diagonal", "uncorrelated"] | None = None
    output: Literal["full", "diagonal"] = "full"
    sharing: Literal["expand", "reduce"] = "expand"


class Diagonal(Approximation, tag="diagonal", frozen=True):
    """The diagonal of the block."""


class Full(Approximation, tag="full", frozen=True):
    """The whole block."""


class TNT(Approximation, tag="tnt", frozen=True):
    """``A (x) G / tr A`` of the second moments of examples' gradients."""

    factors = ("input", "output")


class EKFAC(Approximation, tag="eigen", frozen=True):
    """Second moments in the eigenbases of the Kronecker factors (EKFAC)."""

    factors = ("input", "output", "block")

    sharing: Literal["expand", "reduce"] = "expand"


class Series(Approximation, tag="series", frozen=True):
    """A correction for temporal correlation, of lag one."""

    factors = ("input", "output", "lagged_input", "lagged_output")

    variant: Literal["independent", "symmetric", "infinite"]


AnyApproximation: TypeAlias = Kronecker | Diagonal | Full | TNT | EKFAC | Series

APPROXIMATIONS: dict[str, type[Approximation]] = {
    approximation.tag(): approximation for approximation in get_args(AnyApproximation)
}
"""The struct of each approximation, by name."""
