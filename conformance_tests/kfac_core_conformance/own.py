"""The adapter of this library, ``kfac_core_conformance.own:Own``.

It computes with the selected backend and uses only public names of `kfac_core`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import kfac_core as kc
from kfac_core_conformance.adapter import Capabilities
from kfac_core_conformance.layer import HostArray, LinearLayer
from kfac_core_conformance.problem import Problem, Rows


class Own:
    """Blocks of `kfac_core`, recomputed for every question.

    Parameters
    ----------
    backend : str, optional
        ``name[:device]``; by default the selected backend.
    approximation : callable, optional
        Takes a `Problem` and returns the approximation of its blocks, in place of the
        one that the problem names: so is an approximation of one's own checked on the
        problems for which it is exact.
    """

    name = "kfac_core"
    version = kc.__version__
    capabilities = Capabilities(
        weight_layout="io",
        bias_position="last",
        layers=("dense", "conv"),
        losses=("mse", "ce"),
        estimations=("ggn", "empirical", "labels"),
        approximations=("kronecker", "eigen", "tnt", "full", "diagonal"),
        sharing=("expand", "reduce"),
        reductions=("sum", "mean", "mean_rows"),
        dtypes=("float64", "float32"),
        damping_rules=("factored", "factored_unit_pi", "exact"),
        moving_average=True,
        parts=True,
    )

    def __init__(
        self,
        backend: str | None = None,
        /,
        *,
        approximation: Callable[[Problem], kc.Approximation[Any]] | None = None,
    ) -> None:
        self._backend = backend
        self._approximation = approximation or _approximation
        kc.enable_float64(backend=backend)

    def blocks(self, problem: Problem, /) -> list[HostArray]:
        """Return each layer's dense block."""
        return [
            kc.to_numpy(
                kc.operator_of(
                    block,
                    statistics,
                    kc.RefreshOptions(damping=0.0, rule="exact", factorizations=()),
                ).to_dense(damped=False)
            )
            for block, statistics in self._updated(problem)
        ]

    def multiply(
        self, problem: Problem, vectors: Sequence[Mapping[str, Any]], /
    ) -> list[dict[str, HostArray]]:
        """Return each layer's block times a vector."""
        return [
            self._applied(
                block,
                parameters,
                kc.operator_of(
                    block,
                    statistics,
                    kc.RefreshOptions(damping=0.0, rule="exact", factorizations=()),
                ),
                inverse=False,
            )
            for (block, statistics), parameters in zip(
                self._updated(problem), vectors, strict=True
            )
        ]

    def multiply_inverse(
        self,
        problem: Problem,
        vectors: Sequence[Mapping[str, Any]],
        /,
        *,
        damping: float,
        rule: Any,
    ) -> list[dict[str, HostArray]]:
        """Return the damped inverse of each layer's block times a vector."""
        return [
            self._applied(
                block,
                parameters,
                kc.operator_of(
                    block, statistics, kc.RefreshOptions(damping=damping, rule=rule)
                ),
                inverse=True,
            )
            for (block, statistics), parameters in zip(
                self._updated(problem), vectors, strict=True
            )
        ]

    def _applied(
        self,
        block: kc.Block,
        parameters: Mapping[str, Any],
        operator: Any,
        *,
        inverse: bool,
    ) -> dict[str, HostArray]:
        arrays = {name: self._asarray(x) for name, x in parameters.items()}
        V = block.parameters_to_matrix(arrays)
        V = (
            operator.multiply_inverse(V)
            if inverse
            else operator.multiply(V, damped=False)
        )
        return {
            name: kc.to_numpy(x) for name, x in block.matrix_to_parameters(V).items()
        }

    def _updated(self, problem: Problem) -> list[tuple[kc.Block, kc.Statistics]]:
        """Return each layer's block with its statistics after all updates."""
        updated: list[tuple[kc.Block, kc.Statistics]] = []
        for layer in problem.network.layers:
            block = kc.Block(_layer(layer), self._approximation(problem))
            like = self._asarray(problem.updates[0].inputs)
            updated.append((block, block.initial(like)))
        for data in problem.updates:
            moments: list[kc.Statistics] = []
            for part in problem.split(data):
                for k, rows in enumerate(problem.rows(part)):
                    conventions = kc.Conventions(
                        reduction=problem.reduction, sources=rows.sources
                    )
                    block, _ = updated[k]
                    new = kc.batch_moments(
                        block, self._batch(rows), conventions=conventions
                    )
                    if len(moments) <= k:
                        moments.append(new)
                    else:
                        moments[k] = moments[k].merged(new)
            updated = [
                (block, kc.absorb_block(block, statistics, new, problem.decay))
                for (block, statistics), new in zip(updated, moments, strict=True)
            ]
        if any(block.approximation.has_bases for block, _ in updated):
            return self._corrected(problem, updated)
        return updated

    def _corrected(
        self, problem: Problem, updated: list[tuple[kc.Block, kc.Statistics]]
    ) -> list[tuple[kc.Block, kc.Statistics]]:
        """Recompute all second moments in the eigenbases of the last factors."""
        corrected = []
        for k, (block, statistics) in enumerate(updated):
            approximation: Any = block.approximation
            statistics = kc.rebase_block(block, statistics, "zero")
            for data in problem.updates:
                rows = problem.rows(data)[k]
                statistics = approximation.corrected(
                    statistics,
                    block.rows(self._batch(rows)),
                    conventions=kc.Conventions(
                        reduction=problem.reduction, sources=rows.sources
                    ),
                    decay=problem.decay,
                    weight=1.0,
                )
            corrected.append((block, statistics))
        return corrected

    def _batch(self, rows: Rows) -> kc.Batch:
        inputs, grads = map(self._asarray, rows[:2])
        return kc.Batch(inputs, grads, sources=len(rows.output_grads))

    def _asarray(self, x: Any) -> Any:
        return kc.asarray(x, backend=self._backend)


def _layer(layer: LinearLayer) -> kc.Layer:
    if layer.kernel_size is None:
        return kc.Dense(
            in_features=layer.in_features,
            out_features=layer.out_features,
            bias=layer.bias,
            weight_layout="io",
        )
    return kc.Conv(
        in_channels=layer.in_features,
        out_channels=layer.out_features,
        kernel_size=layer.kernel_size,
        padding="valid",
        bias=layer.bias,
        weight_layout="spatial_io",
        data_layout="channels_last",
    )


def _approximation(problem: Problem) -> kc.Approximation[Any]:
    approximations: dict[str, Any] = {
        "kronecker": lambda: kc.Kronecker(sharing=problem.sharing),
        "eigen": lambda: kc.EKFAC(sharing=problem.sharing),
        "tnt": kc.TNT,
        "full": kc.Full,
        "diagonal": kc.Diagonal,
    }
    approximation: kc.Approximation[Any] = approximations[problem.approximation]()
    return approximation
