"""Factors that one block takes from another: tied inputs, computed once.

Conventions.  ``{"attention.k/input": "attention.q/input"}`` says that the input factor
of block ``attention.k`` (the taker) is the one of ``attention.q`` (the giver).  The taker
does not compute it; its operator reads the giver's, whose value and eigenbasis are computed
once a refresh.  Each block has its own damped inverses, since its damping split differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kfac_core import constraints, errors
from kfac_core.array import replaced
from kfac_core.block import Block
from kfac_core.factors.statistics import Statistics
from kfac_core.linalg.damped import DampedMatrix
from kfac_core.linalg.factorizations import Eigendecomposition
from kfac_core.operators.kronecker import FactoredKronecker
from kfac_core.operators.operator import CurvatureOperator
from kfac_core.operators.spectral import SpectralOperator
from kfac_core.stages import Task, Tasks


class SharedFactors:
    """The factors that blocks take from other blocks.

    Parameters
    ----------
    shared : mapping of str to str
        Takers to givers, each ``"block/side"`` with side ``input`` or ``output``.
    blocks : mapping of str to Block
        The blocks of the estimator.

    Raises
    ------
    UnknownBlockError
        For an unknown block name.
    ConventionError
        For an unknown side, factors of different kinds or sizes, a giver that is
        itself a taker, or a block without such a factor.
    """

    def __init__(self, shared: Mapping[str, str], blocks: Mapping[str, Block]) -> None:
        self.pairs: dict[tuple[str, str], tuple[str, str]] = {}
        for taker, giver in shared.items():
            one, other = _parse(taker, blocks), _parse(giver, blocks)
            if _kind_and_size(one, blocks) != _kind_and_size(other, blocks):
                raise errors.ConventionError(
                    f"`Coupling.factors`: {taker!r} and {giver!r} are factors of different "
                    f"kinds or sizes: {_kind_and_size(one, blocks)} and "
                    f"{_kind_and_size(other, blocks)}."
                )
            self.pairs[one] = other
        # A taker computes no factor that it could give on.
        chained = set(self.pairs) & set(self.pairs.values())
        if chained:
            raise errors.ConventionError(
                f"`Coupling.factors`: {sorted(chained)} both take and give a factor. Let "
                "all takers name the one block that computes it."
            )

    def taken_by(self, name: str, /) -> frozenset[str]:
        """Return the sides that a block takes from others."""
        return frozenset(side for block, side in self.pairs if block == name)

    def completed(self, name: str, states: Mapping[str, Any], /) -> Statistics:
        """Return a block's statistics with the factors of others in their places.

        Parameters
        ----------
        name : str
            The taker, which has statistics.
        states : mapping of str to BlockState
            States of all blocks.

        Returns
        -------
        Statistics
            Unchanged if the block takes no factor, or the giver has no statistics yet.
        """
        statistics: Statistics = states[name].statistics
        averages = dict(statistics.averages)
        for side in self.taken_by(name):
            giver, other_side = self.pairs[name, side]
            shared = states[giver].statistics
            if shared is not None:
                averages[side] = shared.averages[other_side]
        # By reference: givers and takers see one running sum, which only the giver
        # updates.
        return Statistics(averages, statistics.status, statistics.bases)

    def refreshed(
        self,
        tasks: Tasks,
        run: Callable[[Tasks], dict[str, Any]],
        /,
    ) -> dict[str, Any]:
        """Return the operators of a refresh, in which takers of factors get their bases.

        Parameters
        ----------
        tasks : mapping of str to tuple
            Block, statistics and options of each refresh.
        run : callable
            Returns the results of tasks.

        Returns
        -------
        dict of str to tuple or KFACError
            Results in the order of the tasks.
        """
        takers = [
            name
            for name, (_, _, options) in tasks.items()
            if options.rule == "exact" or "eigenbasis" in options.factorizations
            if self.taken_by(name)
        ]
        # Givers first: their eigenbases are then reused, and not computed again.
        results = run({n: task for n, task in tasks.items() if n not in takers})
        second: dict[str, Task] = {}
        for name in takers:
            block, statistics, options = tasks[name]
            bases = self.bases(name, results)
            second[name] = block, replaced(statistics, bases=bases), options
        results |= run(second) if second else {}
        return {name: results[name] for name in tasks}

    def bases(
        self, name: str, refreshed: Mapping[str, Any], /
    ) -> dict[str, Eigendecomposition]:
        """Return the bases of the factors that a block takes, by its sides.

        Parameters
        ----------
        name : str
            The taker.
        refreshed : mapping of str to tuple or KFACError
            Operators of this refresh with their dampings, for blocks that give factors.

        Returns
        -------
        dict of str to Eigendecomposition
            Bases that the givers' operators hold.
        """
        bases: dict[str, Eigendecomposition] = {}
        for side in self.taken_by(name):
            giver, other_side = self.pairs[name, side]
            result = refreshed.get(giver)
            basis = _basis(result[0], other_side) if isinstance(result, tuple) else None
            if basis is not None:
                bases[side] = basis
        return bases


def _basis(operator: CurvatureOperator, side: str) -> Eigendecomposition | None:
    """Return the basis of a factor, if an operator holds one."""
    if isinstance(operator, SpectralOperator):
        return operator.input if side == "input" else operator.output
    if isinstance(operator, FactoredKronecker):
        part = operator.input if side == "input" else operator.output
        return part.basis if isinstance(part, DampedMatrix) else None
    return None


def _parse(text: str, blocks: Mapping[str, Block]) -> tuple[str, str]:
    name, _, side = text.rpartition("/")
    if side not in ("input", "output"):
        raise errors.ConventionError(
            f"`Coupling.factors`: expected 'block/input' or 'block/output', got {text!r}."
        )
    if name not in blocks:
        raise constraints.unknown_block(name, blocks, option="Coupling.factors")
    if side not in blocks[name].approximation.factor_kinds:
        raise errors.ConventionError(
            f"`Coupling.factors`: block {name!r} ({blocks[name].approximation.name}) has "
            f"no {side} factor that could be shared."
        )
    return name, side


def _kind_and_size(
    factor: tuple[str, str], blocks: Mapping[str, Block]
) -> tuple[str, int, int]:
    name, side = factor
    layer, approximation = blocks[name].layer, blocks[name].approximation
    n, m = layer.matrix_shape
    size = n if side == "input" else m // layer.groups
    return approximation.factor_kinds[side], size, layer.groups
