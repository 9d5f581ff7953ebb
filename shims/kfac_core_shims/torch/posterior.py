"""`Posterior`: Laplace's approximation of a trained model, from the model and its data."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Unpack

import torch
from torch.utils._pytree import tree_map_only

import kfac_core as kc
from kfac_core_shims.torch import private
from kfac_core_shims.torch.collecting import (
    Factors,
    collect,
    evaluated,
    factors_from,
    outputs_of,
)
from kfac_core_shims.torch.finding import find_sites
from kfac_core_shims.torch.likelihoods import criterion_of
from kfac_core_shims.torch.options import CollectOptions
from kfac_core_shims.torch.scoring import (
    output_rows,
    scored_blocks,
    skipped_parameters,
)


class Posterior:
    r"""Laplace's approximation: the parameters are normal about their trained values.

    .. math:: P = N F + \tau I

    is the precision of each layer's parameters, with its curvature F averaged over the N
    examples and the precision tau of the prior.  Layers are independent.

    Parameters
    ----------
    model : torch.nn.Module
        Trained model, which is run in evaluation mode.
    loader : list or DataLoader
        Batches ``(inputs, targets)``, or mappings with ``labels``.
    likelihood : str, kfac_core.losses.Loss or torch.nn.Module
        As of `KFAC`; of a Gaussian with a variance, ``kfac_core.losses.Gaussian``.
    prior_precision : float or mapping of str to float
        tau, of all layers or of each; the weight decay of the summed loss.
    last_layer : bool or str
        Whether the posterior is of the last layer alone; or the layer's name.
    factors : Factors or path-like, optional
        Curvature that was collected before, or its file.
    **options
        Of `collect`, such as ``fisher="exact"``, ``ekfac=False`` or ``path``.

    Attributes
    ----------
    factors : Factors
        The curvature.
    posterior : kfac_core.Posterior
        The posterior of the blocks.
    skipped : dict of str to str
        Parameters without a width, with the reason: normalizations, embeddings of
        positions, and weights that embed and make logits too.

    Raises
    ------
    KFACError
        As `collect`.
    kfac_core.ConventionError
        For a loader that can be read once.

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
        model: torch.nn.Module,
        loader: Iterable[Any],
        *,
        likelihood: Any = "categorical",
        prior_precision: float | Mapping[str, float] = 1.0,
        last_layer: bool | str = False,
        factors: Factors | str | os.PathLike[str] | None = None,
        **options: Unpack[CollectOptions],
    ) -> None:
        if iter(loader) is loader:
            raise kc.ConventionError(
                "A posterior reads `loader` several times, and an iterator can be read "
                "once: give a list or a DataLoader."
            )
        self.model, self.loader = model, loader
        self.likelihood = criterion_of(likelihood, None).row.likelihood
        self.forward = options.get("forward") or outputs_of
        if factors is None:
            if last_layer:
                sites = find_sites(model).sites
                name = [*sites][-1] if last_layer is True else last_layer
                kc.constraints.require_one_of("last_layer", name, tuple(sites))
                if sites[name].layer.kind != "dense" or sites[name].part.tied:
                    raise kc.UnsupportedError(
                        f"The last layer {name!r} is not a linear layer of its own weight. "
                        "Say last_layer=name of a linear layer, or last_layer=False."
                    )
                options["approximations"] = {
                    site: kc.Kronecker() if site == name else None for site in sites
                }
            factors = collect(model, loader, likelihood=likelihood, **options)
        self.factors = factors_from(model, factors)
        first = next(iter(loader))
        blocks = scored_blocks(
            self.factors, lambda: _flat(self._outputs(first)[0])[:, :1]
        )
        self.skipped = skipped_parameters(self.factors, blocks)
        with self._without_autocast():
            self.posterior = kc.Posterior.of_statistics(
                blocks,
                {name: self.factors.statistics[name] for name in blocks},
                examples=self.factors.examples,
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
                with torch.no_grad(), evaluated(self.factors.model):
                    z, weight = self._outputs(batch)
                # Several heads have a tuple of them.
                to_device = functools.partial(torch.Tensor.to, device=z.device)
                targets = tree_map_only(torch.Tensor, to_device, targets)
                log_p = self.likelihood.log_probability(z, targets)
                if weight is not None:
                    # Rows that do not count may have targets that are none.
                    log_p = torch.where(weight > 0, weight * log_p, 0.0)
                total = total + log_p.sum()
            self._log_likelihood = total
        values = self.factors.parameters()
        mode = {name: values[name] for name in self.posterior.blocks}
        with self._without_autocast():
            terms = self.posterior.evidence(self._log_likelihood, mode, prior_mean=0.0)
        return terms.log_marginal_likelihood

    def variance(self, batch: Any, /, *, outputs_at_a_time: int = 64) -> torch.Tensor:
        """Return the variance of each output of the linearized model, shape (N, ..., C).

        Parameters
        ----------
        batch : tensor, sequence or mapping
            As of the loader.
        outputs_at_a_time : int
            Outputs that are differentiated together, with a forward pass for each group:
            memory is linear in their number and in C.

        Returns
        -------
        torch.Tensor, shape (N, ..., C)
            Without observation noise.
        """
        parts = []
        start, count = 0, 1
        blocks = self.posterior.blocks
        with (
            self._without_autocast() as within,
            output_rows(self.factors, blocks) as rows,
        ):
            while start < count:
                with torch.enable_grad():
                    z, _ = within(self._outputs)(batch)
                    shape, z = z.shape, _flat(z)
                count, stop = z.shape[1], start + outputs_at_a_time
                J = rows(z[:, start:stop])
                parts.append(self.posterior.functional_variance(J))
                start = stop
        return torch.cat(parts, dim=1).reshape(shape)

    def covariance(self, batch: Any, /) -> Any:
        """Return the covariance of an example's C outputs of all rows, (N, C, C)."""
        blocks = self.posterior.blocks
        with (
            self._without_autocast() as within,
            output_rows(self.factors, blocks) as rows,
        ):
            with torch.enable_grad():
                z = _flat(within(self._outputs)(batch)[0])
            return self.posterior.functional_covariance(rows(z))

    def probabilities(self, batch: Any, /) -> Any:
        """Return probabilities by the probit approximation, shape (N, ..., C).

        Parameters
        ----------
        batch : tensor, sequence or mapping
            As of the loader.

        Returns
        -------
        torch.Tensor, shape (N, ..., C)
            Of the C classes of a categorical likelihood; of 1 for each of C outputs of a
            Bernoulli likelihood.

        Raises
        ------
        kfac_core.UnsupportedError
            For another likelihood.
        """
        likelihood = self.likelihood
        binary = isinstance(likelihood, kc.losses.Bernoulli)
        if not binary and not isinstance(likelihood, kc.losses.Categorical):
            raise kc.UnsupportedError(
                f"Probabilities are of classes, and the likelihood is {likelihood!r}: its "
                "outputs are the means, and `variance` is theirs."
            )
        with torch.no_grad(), evaluated(self.factors.model):
            z, _ = self._outputs(batch)
        kappa = 1.0 / torch.sqrt(1.0 + torch.pi / 8.0 * self.variance(batch))
        z = kappa.to(z.dtype) * z
        return torch.sigmoid(z) if binary else torch.softmax(z, dim=-1)

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
            with self._without_autocast():
                sample = self.posterior.sample(mean, noise)
            named = dict(self.factors.model.named_parameters())
            targets = {p: p.detach().clone() for p in named.values()}
            for name, parts in sample.items():
                self.factors.sites[name].place(parts, targets)
            yield {name: targets[p] for name, p in named.items()}

    def _without_autocast(self) -> AbstractContextManager[Callable[[Any], Any]]:
        return private.without_autocast(next(self.model.parameters()).device)

    def _outputs(self, batch: Any) -> tuple[Any, Any]:
        """Return outputs, and weights of their rows or None."""
        z = self.forward(self.model, batch)
        return z if isinstance(z, tuple) else (z, None)


def _flat(z: Any) -> Any:
    return z.reshape(len(z), -1)
