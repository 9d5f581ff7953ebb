"""A backend of laplace-torch: Kronecker factors by kfac_core.

``Laplace(..., backend=CoreGGN)`` takes the curvature of the likelihood: summed over labels,
or over labels drawn from the model with ``stochastic=True``; ``CoreEF`` takes the empirical
Fisher matrix.  laplace-torch keeps a weight and its bias as separate blocks, F[0] summed
over the data and F[1] a mean over it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from laplace.curvature import EFInterface, GGNInterface
from laplace.utils import Kron

from kfac_core_shims.torch import KFAC
from kfac_core_shims.torch.layer_factors import with_layer_factors


class _Kronecker:
    """The Kronecker factors of a model, of the loss's own mode."""

    fisher = "exact"

    def kron(
        self: Any,
        x: Any,
        y: torch.Tensor,
        N: int,
        *,
        mc_samples: int = 1,
        kfac_approx: Any = "expand",
        **_: Any,
    ) -> tuple[torch.Tensor, Kron]:
        """Return the loss of a batch, and its factors for a data set of N examples."""
        empirical = self.fisher == "empirical"
        done: list[tuple[torch.Tensor, torch.Tensor]] = []

        def passes() -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
            z = (
                self._model(self.model.forward_with_features(x)[1].detach())
                if (self.last_layer)
                else self.model(x)
            )
            done.append((z, self.lossfunc(z, y)))
            yield z, done[0][1] if empirical else None

        kfac = with_layer_factors(
            self._model,
            passes(),
            likelihood=self.lossfunc,
            fisher=self.fisher,
            samples=mc_samples if self.fisher == "gradients" else 1,
            sharing=kfac_approx,
        )
        [(z, loss)] = done
        # Curvature is in units of the likelihood, and the loss may be a multiple of it;
        # products of two gradients are of its square.
        multiple = kfac.criterion.row.multiple(z.shape[-1]) ** (2 if empirical else 1)
        if kfac.skipped:
            raise ValueError(
                f"Only linear and conv layers have factors: {kfac.skipped}"
            )
        kron = Kron(list(self._factors(kfac, len(y), N, multiple)))
        return self.factor * loss.detach(), self.factor * kron

    def _factors(
        self: Any, kfac: KFAC, M: int, N: int, multiple: float
    ) -> Iterator[list[torch.Tensor]]:
        """Yield ``[B, A]`` of each weight and ``[B]`` of each bias, in their order."""
        for name, module in self._model.named_modules():
            if name not in kfac.estimator.blocks:
                continue
            A, G, scale = kfac.factors(name)
            B = multiple * M * scale * G
            inputs = module.weight[0].numel()
            yield [B, A[:inputs, :inputs] * (M / N)]
            if module.bias is not None:
                yield [B]


class CoreGGN(_Kronecker, GGNInterface):
    """Gauss-Newton: summed over labels, or with ``stochastic=True`` over drawn ones."""

    @property
    def fisher(self) -> str:  # type: ignore[override]
        """Where the vectors come from that are backpropagated."""
        return "gradients" if self.stochastic else "exact"

    def full(
        self, x: Any, y: torch.Tensor, *, mc_samples: int = 1, **options: Any
    ) -> Any:
        """Return the loss and the whole matrix, by laplace-torch's own Jacobians."""
        self.num_samples = mc_samples
        return super().full(x, y, **options)


class CoreEF(_Kronecker, EFInterface):
    """Empirical Fisher: the gradients of the data's own labels."""

    fisher = "empirical"
