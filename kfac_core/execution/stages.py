"""The three stages of an estimator as compiled programs.

Conventions.  Every program computes with ``check="status"``; where an estimator is to
raise it looks at the statuses afterwards, and a block whose factorization failed is done
again uncompiled, where the ladder is climbed.  Batches that name chosen rows are read
uncompiled, since which rows they are is part of a program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import array_api_compat

from kfac_core.array.backend import Array
from kfac_core.array.namespaces import Scalar
from kfac_core.block import Block, Fed
from kfac_core.execution.compiled import Compilation, Program, copied_from, distinct
from kfac_core.execution.products import apply_product
from kfac_core.execution.refreshing import Made, Refresh, RefreshSettings, unless_failed
from kfac_core.execution.updating import UpdateSettings, updated_blocks
from kfac_core.factors.statistics import Statistics
from kfac_core.operators.operator import CurvatureOperator

__all__ = ["CompiledStages"]


class CompiledStages:
    """Update, refresh and precondition of some blocks, each compiled at its first call.

    Parameters
    ----------
    blocks : mapping of str to Block
        The blocks by name.
    updating : UpdateSettings
        How statistics are fed.
    refreshing : RefreshSettings
        How operators are made.
    """

    def __init__(
        self,
        blocks: Mapping[str, Block],
        updating: UpdateSettings,
        refreshing: RefreshSettings,
    ) -> None:
        self.compilation = Compilation()
        self._blocks = blocks
        self._updating = dataclasses.replace(updating, check="status")
        self._refreshing = refreshing
        counted = self.compilation
        self._update = Program("update", self._updated, counted, donate=(0,))
        self._refresh = Program("refresh", self._operators, counted)
        self._precondition = Program("precondition", self._directions, counted)

    def update(
        self,
        statistics: Mapping[str, Statistics],
        batches: Mapping[str, Fed],
        decays: Mapping[str, Scalar],
        weights: Mapping[str, Scalar],
        /,
    ) -> tuple[dict[str, Statistics], dict[str, Array]]:
        """Return what `updated_blocks` does; gives up `statistics`."""
        chosen = [getattr(b, "chosen", None) is not None for b in batches.values()]
        if any(chosen) or not batches:
            return self._updated(statistics, batches, decays, weights)
        xp = next(iter(statistics.values())).namespace
        found: tuple[dict[str, Statistics], dict[str, Array]] = self._update(
            *(xp, distinct(dict(statistics), xp=xp), dict(batches)),
            *(dict(decays), dict(weights)),
        )
        return found

    def refresh(self, refresh: Refresh, /) -> dict[str, Made]:
        """Return what `Refresh.run` does."""
        statistics = dict(refresh.statistics)
        xp = next(iter(statistics.values())).namespace
        operators, dampings = self._refresh(xp, statistics, dict(refresh.dampings))
        operators = copied_from(operators, statistics, xp=xp)
        if refresh.check == "status":
            return {
                name: Made(
                    unless_failed(operator, refresh.states[name].operator),
                    dampings[name],
                )
                for name, operator in operators.items()
            }
        made: dict[str, Made] = {}
        failed: list[str] = []
        for name, operator in operators.items():
            if bool(operator.status() != 0):
                failed.append(name)
            made[name] = Made(operator, dampings[name])
        if failed:
            made |= refresh.of(failed).run()
        return made

    def precondition(
        self,
        operators: Mapping[str, CurvatureOperator],
        gradients: Mapping[str, Mapping[str, Any]],
        /,
    ) -> dict[str, dict[str, Any]]:
        """Return the inverse of each block times its gradients."""
        if not operators:
            return {}
        first: Any = next(iter(operators.values()))
        xp = array_api_compat.array_namespace(first.status())
        given = {name: dict(gradient) for name, gradient in gradients.items()}
        found: dict[str, dict[str, Any]] = self._precondition(
            xp, dict(operators), given
        )
        return found

    def _updated(
        self, *arguments: Any
    ) -> tuple[dict[str, Statistics], dict[str, Array]]:
        return updated_blocks(self._blocks, *arguments, settings=self._updating)

    def _operators(
        self, statistics: dict[str, Statistics], dampings: dict[str, Scalar]
    ) -> tuple[dict[str, CurvatureOperator], dict[str, Scalar]]:
        blocks = {name: self._blocks[name] for name in statistics}
        refresh = Refresh(blocks, {}, statistics, dampings, self._refreshing, "status")
        made = {name: refresh.operator(name) for name in blocks}
        return (
            {name: operator for name, (operator, _) in made.items()},
            {name: damping for name, (_, damping) in made.items()},
        )

    def _directions(
        self,
        operators: dict[str, CurvatureOperator],
        gradients: dict[str, dict[str, Any]],
    ) -> dict[str, dict[str, Any]]:
        return {
            name: apply_product(
                self._blocks[name],
                operators[name],
                gradient,
                product="multiply_inverse",
                arguments=(),
                options={},
                name=name,
            )[0]
            for name, gradient in gradients.items()
        }
