"""`Posterior`: Laplace's approximation of a trained model, from the model and its data."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

import kfac_core as kc
from kfac_core_shims.torch.collecting import Factors, collect, outputs_of
from kfac_core_shims.torch.finding import find_sites
from kfac_core_shims.torch.likelihoods import criterion_of
from kfac_core_shims.torch.scoring import covered_blocks, output_rows

__all__ = ["Posterior"]


class Posterior:
    r"""Laplace's approximation: the parameters are normal about their trained values.

    .. math:: P = N F + \tau I

    is the precision of each layer's parameters, with its curvature F averaged over the N
    examples and the precision tau of the prior.  Layers are independent.

    Parameters
    ----------
    model : torch.nn.Module
        Trained model, in the mode that it is used in (``model.eval()``).
    loader : iterable
        Batches ``(inputs, targets)``, or mappings with ``labels``.
    likelihood : str, kfac_core.losses.Loss or torch.nn.Module
        As of `KFAC`; of a Gaussian with a variance, ``kfac_core.losses.Gaussian``.
    prior_precision : float or mapping of str to float
        tau, of all layers or of each; the weight decay of the summed loss.
    last_layer : bool or str
        Whether the posterior is of the last layer alone; or the layer's name.
    factors : Factors, optional
        Curvature that was collected before.
    **options
        Of `collect`, such as ``fisher="exact"``, ``ekfac=False`` or ``path``.

    Attributes
    ----------
    factors : Factors
        The curvature.
    posterior : kfac_core.Posterior
        The posterior of the blocks.

    Raises
    ------
    KFACError
        As `collect`.

    Notes
    -----
    Normalizations and weights that embed and make logits too have no width.

    References
    ----------
    Ritter et al. (2018); Daxberger et al. (2021), arXiv:2106.14806.

    Examples
    --------
    >>> import torch
    >>> from kfac_core_shims.torch import Posterior
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 3)).eval()
    >>> data = [(torch.randn(10, 4), torch.randint(3, (10,)))]
    >>> posterior = Posterior(model, data, prior_precision=10.0)
    >>> posterior.variance(data[0]).shape
    torch.Size([10, 3])
    """

    def __init__(
        self,
        model: Any,
        loader: Iterable[Any],
        *,
        likelihood: Any = "categorical",
        prior_precision: float | Mapping[str, float] = 1.0,
        last_layer: bool | str = False,
        factors: Factors | None = None,
        **options: Any,
    ) -> None:
        self.model, self.loader = model, loader
        self.likelihood = criterion_of(likelihood, None).row.likelihood
        self.forward = options.get("forward") or outputs_of
        if factors is None:
            if last_layer:
                names = [*find_sites(model).sites]
                name = names[-1] if last_layer is True else last_layer
                only = {name: kc.Kronecker()}
                options["approximations"] = {**dict.fromkeys(names), **only}
            factors = collect(model, loader, likelihood=likelihood, **options)
        self.factors = factors
        blocks = covered_blocks(factors)
        self.posterior = kc.Posterior.of_statistics(
            blocks,
            {name: factors.statistics[name] for name in blocks},
            examples=factors.examples,
            prior_precision=prior_precision,
        )
        self._log_likelihood: Any = None

    def with_prior(self, prior_precision: float | Mapping[str, float], /) -> Posterior:
        """Return the posterior of another prior, without further decompositions."""
        other = copy.copy(self)
        other.posterior = self.posterior.with_prior(prior_precision)
        return other

    def log_marginal_likelihood(self) -> Any:
        """Return the approximate log-evidence of the data, 0-d.

        The first call goes through the data.
        """
        if self._log_likelihood is None:
            total = 0.0
            for batch in self.loader:
                mapping = isinstance(batch, Mapping)
                targets = batch["labels"] if mapping else batch[1]
                with torch.no_grad():
                    z = self._outputs(batch)
                targets = targets.to(z.device)
                total = total + self.likelihood.log_probability(z, targets).sum()
            self._log_likelihood = total
        values = self.factors.parameters()
        mode = {name: values[name] for name in self.posterior.blocks}
        terms = self.posterior.evidence(self._log_likelihood, mode, prior_mean=0.0)
        return terms.log_marginal_likelihood

    def variance(self, batch: Any, /, *, outputs_at_a_time: int = 64) -> Any:
        """Return the variance of each output of the linearized model, shape (N, C).

        Parameters
        ----------
        batch : tensor, sequence or mapping
            As of the loader.
        outputs_at_a_time : int
            Outputs that are differentiated together, with a forward pass for each group:
            memory is linear in their number and in C.

        Returns
        -------
        torch.Tensor, shape (N, C)
            Without observation noise.
        """
        parts = []
        start, count = 0, 1
        with output_rows(self.factors, self.posterior.blocks) as rows:
            while start < count:
                with torch.enable_grad():
                    z = self._outputs(batch)
                count, stop = z.shape[1], start + outputs_at_a_time
                J = rows(z[:, start:stop])
                parts.append(self.posterior.functional_variance(J))
                start = stop
        return torch.cat(parts, dim=1)

    def covariance(self, batch: Any, /) -> Any:
        """Return the covariance of the outputs of each example, shape (N, C, C)."""
        with output_rows(self.factors, self.posterior.blocks) as rows:
            with torch.enable_grad():
                z = self._outputs(batch)
            return self.posterior.functional_covariance(rows(z))

    def probabilities(self, batch: Any, /) -> Any:
        """Return predictive class probabilities, by the probit approximation, (N, C)."""
        with torch.no_grad():
            z = self._outputs(batch)
        kappa = 1.0 / torch.sqrt(1.0 + torch.pi / 8.0 * self.variance(batch))
        return torch.softmax(kappa.to(z.dtype) * z, dim=1)

    def samples(self, count: int, /, *, seed: int = 0) -> Iterator[dict[str, Any]]:
        """Yield parameters by name, for ``torch.func.functional_call(model, sample, x)``.

        Parameters
        ----------
        count : int
            Number of samples.
        seed : int
            Of the random numbers, which are drawn on the CPU.

        Yields
        ------
        dict of str to torch.Tensor
            All parameters of the model.
        """
        generator = torch.Generator().manual_seed(seed)
        values = self.factors.parameters()
        mean = {name: values[name] for name in self.posterior.blocks}
        for _ in range(count):
            noise = {
                name: {
                    # On the CPU in float64, so that devices and dtypes draw the same.
                    role: torch.randn(
                        x.shape, generator=generator, dtype=torch.float64
                    ).to(x)
                    for role, x in parts.items()
                }
                for name, parts in mean.items()
            }
            sample = self.posterior.sample(mean, noise)
            named = dict(self.factors.model.named_parameters())
            targets = {p: p.detach().clone() for p in named.values()}
            for name, parts in sample.items():
                self.factors.sites[name].place(parts, targets)
            yield {name: targets[p] for name, p in named.items()}

    def _outputs(self, batch: Any) -> Any:
        z = self.forward(self.model, batch)
        return z[0] if isinstance(z, tuple) else z
