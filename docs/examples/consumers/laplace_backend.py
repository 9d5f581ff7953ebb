"""A backend of laplace-torch: Kronecker factors by kfac_core.

    python -m pip install 'kfac-core[torch]' laplace-torch
    python docs/examples/consumers/laplace_backend.py

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

import kfac_core as kc
from kfac_core_shims.torch import KFAC

__all__ = ["CoreEF", "CoreGGN"]


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
        kind = kc.Kronecker(sharing=kfac_approx)
        kfac = KFAC(
            self._model,
            likelihood=self.lossfunc,
            fisher=self.fisher,
            samples=mc_samples if self.fisher == "gradients" else 1,
            approximations={
                **dict.fromkeys(("dense", "conv"), kind),
                **dict.fromkeys(("embedding", "scale_shift")),
            },
            decay=1.0,
            communicator="alone",
        )
        losses: list[torch.Tensor] = []

        def passes() -> Iterator[torch.Tensor | None]:
            z = (
                self._model(self.model.forward_with_features(x)[1].detach())
                if (self.last_layer)
                else self.model(x)
            )
            losses.append(self.lossfunc(z, y))
            if self.fisher != "empirical":
                yield z
                return
            torch.autograd.grad(losses[0], self.params)
            yield None

        kfac.update(passes())
        kfac.remove()
        if kfac.skipped:
            raise ValueError(
                f"Only linear and conv layers have factors: {kfac.skipped}"
            )
        kron = Kron(list(self._factors(kfac, len(y), N)))
        return self.factor * losses[0].detach(), self.factor * kron

    def _factors(self: Any, kfac: KFAC, M: int, N: int) -> Iterator[list[torch.Tensor]]:
        """Yield ``[B, A]`` of each weight and ``[B]`` of each bias, in their order."""
        for name, module in self._model.named_modules():
            if name not in kfac.estimator.blocks:
                continue
            A, G, scale = kfac.factors(name)
            B = M * scale * G
            inputs = module.weight[0].numel()
            yield [B, A[:inputs, :inputs] * (M / N)]
            if module.bias is not None:
                yield [B]


class CoreGGN(_Kronecker, GGNInterface):
    """Gauss-Newton: summed over labels, or with ``stochastic=True`` over drawn ones."""

    @property
    def fisher(self) -> str:
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


def main() -> dict[str, float]:
    """Fit a posterior with this backend, and print its evidence and a prediction."""
    from laplace import Laplace

    torch.manual_seed(0)
    x = torch.linspace(-2.0, 2.0, 60, dtype=torch.float64)[:, None]
    y = torch.sin(2.0 * x) + 0.1 * torch.randn_like(x)
    model = torch.nn.Sequential(
        torch.nn.Linear(1, 12), torch.nn.Tanh(), torch.nn.Linear(12, 1)
    ).double()
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=200, line_search_fn="strong_wolfe"
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    data = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, y), batch_size=25
    )
    posterior = Laplace(
        model,
        "regression",
        subset_of_weights="all",
        hessian_structure="kron",
        sigma_noise=0.1,
        backend=CoreGGN,
    )
    posterior.fit(data)
    new = torch.tensor([[0.0], [3.0]], dtype=torch.float64)
    deviation = posterior(new)[1].squeeze().sqrt()
    found = {
        "log-marginal likelihood": float(posterior.log_marginal_likelihood()),
        "deviation at 0": float(deviation[0]),
        "deviation at 3": float(deviation[1]),
    }
    for name, value in found.items():
        print(f"{name:25} {value:.2f}")
    return found


if __name__ == "__main__":
    main()
