"""``F = E[D D^T]`` of the examples' gradients, by their Gram matrix: SENG.

Conventions.  With ``D = sum_s x g^T`` the gradient of one example (and source), one
update's statistic is ``1/N sum_mn D D^T``, as for `Full`; of it the rows of the K
gradients that weigh most are kept.  Damping is always exact, ``F + lam I``.  With K the
number of gradients in a batch and ``decay=0`` this is the block of that batch; with a
decay below 1, older batches stay as long as they weigh more than what came after.

References
----------
Yang, Xu, Wen, Chen and Xu (2020), "Sketchy Empirical Natural Gradient Methods for Deep
Learning", arXiv:2006.05924, for the solve by a Gram matrix of per-example gradients; its
sketches are not here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kfac_core.approximations.approximation import Approximation
from kfac_core.approximations.options import OperatorOptions, UpdateOptions
from kfac_core.array.backend import Array, Namespace
from kfac_core.array.namespaces import as_scalar, cast
from kfac_core.array.structure import map_structure
from kfac_core.errors import ShapeError
from kfac_core.factors.statistics import Statistics
from kfac_core.factors.window import WindowAverage, window_average
from kfac_core.layers.layer import Layer
from kfac_core.layers.rows import Rows
from kfac_core.operators.example_gram import (
    NO_TRIANGLE,
    ExampleGramOperator,
    example_gram_operator,
)

__all__ = ["ExampleGram"]


@dataclass(frozen=True, kw_only=True)
class ExampleGram(Approximation):
    """The block of the K gradients that weigh most: ``K S (in(+1) + out)`` numbers.

    Parameters
    ----------
    gradients : int
        K, counting each source of an example as one.
    positions : int
        S, the shared positions of an example; 1 where nothing is shared.

    Raises
    ------
    ShapeError
        For a number below 1.
    """

    gradients: int
    positions: int = 1

    name = "example_gram"
    unsupported_products = NO_TRIANGLE

    def __post_init__(self) -> None:
        for name in ("gradients", "positions"):
            if getattr(self, name) < 1:
                raise ShapeError(
                    f"Expected `{name}` to be at least 1, got {getattr(self, name)}."
                )

    def problem_with(self, layer: Layer, /) -> str | None:
        """Say why it does not go together with a layer; None where it does."""
        if layer.kind not in ("dense", "conv"):
            return "needs pairs of inputs and output gradients; take Full or Diagonal"
        if layer.groups > 1:
            return (
                "an example's gradient of groups is no single product; take Kronecker"
            )
        return None

    def rows(self, layer: Layer, batch: Any, /) -> Any:
        """Return what the layer saw as rows."""
        return layer.rows(batch)

    def initial(
        self, layer: Layer, /, *, dtype: Any, device: Any, xp: Namespace
    ) -> Statistics:
        """Return the statistics of nothing; see `Kronecker.initial`."""
        window = window_average(
            self.gradients,
            self.positions,
            layer.matrix_shape,
            dtype=dtype,
            device=device,
            xp=xp,
        )
        status = xp.zeros((), dtype=xp.int32, device=device)
        return Statistics({"block": window}, status)

    def updated(
        self, statistics: Statistics, rows: Any, layer: Layer, options: UpdateOptions, /
    ) -> Statistics:
        """Return the statistics after one update; see `Kronecker.updated`.

        Raises
        ------
        ShapeError
            For another number of positions than `positions`.

        Notes
        -----
        ``(K + M N) S^2 (n + m)`` flops, and a sort of ``K + M N`` numbers.
        """
        rows.require_all_positions()
        if rows.positions != self.positions:
            raise ShapeError(
                f"Expected {self.positions} shared positions an example, got "
                f"{rows.positions}. Write ExampleGram(positions={rows.positions})."
            )
        shares = options.shares(statistics, rows)
        xp = options.xp
        x, g = _gradient_rows(rows, statistics.dtype, xp)
        window = statistics.averages["block"]
        assert isinstance(window, WindowAverage)
        new = window.updated(
            x,
            g,
            decay=options.decay,
            scale=shares.examples * shares.outer_products,
            weight=shares.example_weight,
            xp=xp,
        )
        return Statistics({"block": new}, statistics.status)

    def operator(
        self, statistics: Statistics, layer: Layer, options: OperatorOptions, /
    ) -> ExampleGramOperator:
        """Return ``sum_k w_k D_k D_k^T + lam I`` as it is now.

        Raises
        ------
        NotFiniteError, DampingError, FactorizationError
            As `example_gram_operator` (``check="raise"``).
        """
        xp = options.namespace(statistics)
        compute, apply = options.dtypes(statistics.dtype, xp=xp)
        value = statistics.averages["block"].value(debias=options.debias)
        window = map_structure(lambda x: cast(xp, x, compute), value)
        return example_gram_operator(
            window.inputs,
            window.output_grads,
            weights=window.weights,
            damping=as_scalar(xp, options.damping, compute, "damping"),
            truncated_trace=window.truncated_trace,
            factorizations=options.factorizations,
            check=options.check,
            name=options.name,
            apply_dtype=apply,
        )


def _gradient_rows(rows: Rows, dtype: Any, xp: Namespace) -> tuple[Array, Array]:
    """Return x and g of each gradient, shapes (M N, S, n) and (M N, S, m)."""
    x, g = rows.full_inputs(dtype, xp=xp), cast(xp, rows.output_grads, dtype)
    M = rows.sources
    x = xp.reshape(xp.broadcast_to(x, (M, *x.shape)), (-1, *x.shape[1:]))
    return x, xp.reshape(g, (-1, *g.shape[2:]))
