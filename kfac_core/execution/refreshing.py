"""Making operators from the statistics of some blocks, at one moment.

Conventions.  A `Refresh` holds all that it needs, nothing of which changes afterwards:
the statistics are immutable, and so are the dampings of that moment.  It can be run
anywhere, in another thread too, and what comes of it is installed by the estimator.  The
age of an operator counts from the moment at which its statistics were taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import array_api_compat

from kfac_core.approximations.eigen import Eigen
from kfac_core.array.namespaces import Scalar
from kfac_core.array.precision import Precision
from kfac_core.array.status import Check
from kfac_core.array.structure import combinable, map_structure
from kfac_core.block import Block
from kfac_core.damping import DampingRule
from kfac_core.errors import (
    FactorizationError,
    KFACError,
    NotFiniteError,
    NotReadyError,
)
from kfac_core.execution.block_state import BlockState
from kfac_core.execution.movement import Marks, marks_of, movement
from kfac_core.execution.stacking import operators_of_blocks
from kfac_core.factors.statistics import Statistics
from kfac_core.linalg.shifted import Factorization, Solving
from kfac_core.operators.kronecker import FactoredKronecker
from kfac_core.operators.operator import CurvatureOperator

__all__ = [
    "DampingScaling",
    "Made",
    "Refresh",
    "RefreshSettings",
    "require_ready",
    "unless_failed",
]

DampingScaling = Literal["none", "mean_eigenvalue"]


@dataclass(frozen=True, kw_only=True)
class RefreshSettings:
    """How operators are made; `kfac_core.Estimator` documents the fields."""

    rule: DampingRule
    debias: bool
    factorizations: tuple[Factorization, ...]
    precision: Precision
    damping_scaling: DampingScaling
    threshold: float | None
    solving: Mapping[str, Solving]
    workers: int


@dataclass(frozen=True)
class Made:
    """What a refresh made of one block.

    Attributes
    ----------
    operator : CurvatureOperator or None
        None where the old one stays.
    damping : float, 0-d array or None
        What it was made with.
    marks : mapping of str to array, or None
        Of the statistics, where movement is looked at.
    error : KFACError or None
        Why there is none.
    """

    operator: CurvatureOperator | None = None
    damping: Scalar | None = None
    marks: Marks | None = None
    error: KFACError | None = None


@dataclass(frozen=True)
class Refresh:
    """One refresh of some blocks, to be run once.

    Attributes
    ----------
    blocks : mapping of str to Block
        The blocks that are refreshed, by name.
    states : mapping of str to BlockState
        What is held for each at that moment.
    statistics : mapping of str to Statistics
        Of each, with the factors of others in their places.
    dampings : mapping of str to float or 0-d array
        Of each.
    settings : RefreshSettings
        How.
    check : {"raise", "status"}
        Whether a failed factorization is an error, or a status.
    """

    blocks: Mapping[str, Block]
    states: Mapping[str, BlockState]
    statistics: Mapping[str, Statistics]
    dampings: Mapping[str, Scalar]
    settings: RefreshSettings
    check: Check
    memo: dict[Any, Any] = field(default_factory=dict)

    def run(self) -> dict[str, Made]:
        """Return what was made of each block; of none where it had not moved.

        Raises
        ------
        DampingError
            For a damping that is negative or not finite.
        """
        marks = {name: self._marks(name) for name in self.blocks}
        moved = {name for name in self.blocks if self._has_moved(name, marks[name])}
        together = [n for n in self.blocks if n in moved and self._is_plain(n)]
        found: dict[str, Any] = self._operators(together) if together else {}
        made: dict[str, Made] = {}
        for name in self.blocks:
            if name not in moved:
                made[name] = Made()
                continue
            damping = self.dampings[name]
            if name not in found:
                try:
                    found[name], damping = self.operator(name)
                except (FactorizationError, NotFiniteError) as error:
                    found[name] = error
            operator = found[name]
            if isinstance(operator, KFACError):
                made[name] = Made(error=operator)
                continue
            if self.check == "status":
                operator = unless_failed(operator, self.states[name].operator)
            made[name] = Made(operator, damping, marks[name])
        return made

    def _is_plain(self, name: str) -> bool:
        """Whether a block's operator is made as `Block.operator` makes it."""
        return self.check == "raise" and self.settings.damping_scaling == "none"

    def _operators(self, names: list[str]) -> dict[str, Any]:
        """Return operators or errors, of blocks of equal shape as one stack."""
        settings = self.settings
        found: dict[str, Any] = {}
        for way in get_args(Solving):
            chosen = [name for name in names if settings.solving[name] == way]
            wanted = settings.factorizations
            if way == "triangular":
                swapped = ("cholesky" if f == "inverse" else f for f in wanted)
                wanted = tuple(dict.fromkeys(swapped))
            made = operators_of_blocks(
                {name: self.blocks[name] for name in chosen},
                {name: self.statistics[name] for name in chosen},
                {name: self.dampings[name] for name in chosen},
                workers=settings.workers,
                rule=settings.rule,
                debias=settings.debias,
                factorizations=wanted,
                check=self.check,
                precision=settings.precision,
                memo=self.memo,
            )
            for name, operator in made.items():
                found[name] = operator
                if way == "triangular" and isinstance(operator, FactoredKronecker):
                    found[name] = operator.solved_by(way)
        return found

    def _marks(self, name: str) -> Marks | None:
        if self.settings.threshold is None or self.check != "raise":
            return None
        return marks_of(self.statistics[name], debias=self.settings.debias)

    def _has_moved(self, name: str, marks: Marks | None) -> bool:
        state, threshold = self.states[name], self.settings.threshold
        if marks is None or threshold is None or state.marks is None:
            return True
        if not _same(state.damping, self.dampings[name]):
            return True
        xp = self.statistics[name].namespace
        # One that is no number is no reason to keep an operator.
        return not float(movement(marks, state.marks, xp=xp)) <= threshold

    def of(self, names: Iterable[str], /) -> Refresh:
        """Return the refresh of some of the blocks."""
        return replace(self, blocks={name: self.blocks[name] for name in names})

    def of_copies(self) -> Refresh:
        """Return the same refresh, of copies of the statistics."""
        copies = {
            name: map_structure(
                lambda x, xp=held.namespace: xp.asarray(x, copy=True), held
            )
            for name, held in self.statistics.items()
        }
        return replace(self, statistics=copies)

    def operator(self, name: str, /) -> tuple[CurvatureOperator, Scalar]:
        """Return a block's operator, and the damping that it was made with."""
        settings, block = self.settings, self.blocks[name]
        statistics = self.statistics[name]
        common: dict[str, Any] = {
            "rule": settings.rule,
            "debias": settings.debias,
            "check": self.check,
            "precision": settings.precision,
            "name": name,
            "memo": self.memo,
        }
        damping = self.dampings[name]
        if settings.damping_scaling == "mean_eigenvalue":
            bare = block.operator(statistics, damping=0.0, factorizations=(), **common)
            n, m = bare.shape
            damping = damping * bare.trace(damped=False) / (n * m)
        wanted = settings.factorizations
        if settings.solving[name] == "inverse":
            operator = block.operator(
                statistics, damping=damping, factorizations=wanted, **common
            )
            return operator, damping
        bare = block.operator(statistics, damping=damping, factorizations=(), **common)
        assert isinstance(bare, FactoredKronecker)
        solving = bare.solved_by("triangular")
        return solving.prepared(*wanted, check=self.check, name=name), damping


def require_ready(name: str, block: Block, state: BlockState, /) -> None:
    """Raise `NotReadyError` where a block has nothing to make an operator from."""
    if state.statistics is None:
        raise NotReadyError(
            f"Block {name!r} has no statistics yet; call `update` first."
        )
    if isinstance(block.approximation, Eigen) and (
        state.basis_age is None or state.moments_missing
    ):
        raise NotReadyError(
            f"Block {name!r} has no moments in the bases of its factors yet; call "
            f"{'`rebase`' if state.basis_age is None else '`update`'} first."
        )


def _same(made_with: Scalar | None, damping: Scalar) -> bool:
    """Whether a damping is the number that an operator was made with; no array is."""
    return isinstance(made_with, float | int) and made_with == damping


def unless_failed(
    new: CurvatureOperator, old: CurvatureOperator | None
) -> CurvatureOperator:
    """Return the new operator, or the old one where the new one's status is not zero."""
    if old is None or not combinable(new, old):
        return new
    status = new.status()
    xp = array_api_compat.array_namespace(status)
    return map_structure(lambda a, b: xp.where(status == 0, a, b), new, old)
