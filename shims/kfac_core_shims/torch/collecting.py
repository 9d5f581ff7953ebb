"""`collect`: the curvature of a trained model over a data set."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_args

import torch

import kfac_core as kc
from kfac_core_shims.torch import parallel, private
from kfac_core_shims.torch.coverage import choose
from kfac_core_shims.torch.finding import find_sites
from kfac_core_shims.torch.kfac import KFAC
from kfac_core_shims.torch.likelihoods import criterion_of
from kfac_core_shims.torch.sites import Site

PARAMETERS = "parameters or buffers"
"""Where files note the digest of a model."""


@dataclass
class Factors:
    """Statistics of a model's layers over a data set; made by `collect` or `read_factors`.

    Attributes
    ----------
    model : torch.nn.Module
        The model.
    sites : dict of str to Site
        Parameters and geometry of each block.
    collected : kfac_core.integration.Collected
        Blocks, statistics and the number of examples N.
    skipped : dict of str to str
        Trained parameters without a block, with the reason.
    """

    model: Any
    sites: dict[str, Site]
    collected: kc.integration.Collected
    skipped: dict[str, str]

    @property
    def all_sites(self) -> dict[str, Site]:
        """All sites of the model, also those without statistics."""
        return find_sites(self.model).sites

    @property
    def examples(self) -> int:
        """N, of which the curvature is the mean."""
        return self.collected.examples

    @property
    def blocks(self) -> dict[str, kc.Block]:
        """The blocks by name."""
        return self.collected.blocks

    @property
    def statistics(self) -> dict[str, kc.Statistics]:
        """The statistics by name; read from the file when they are first asked for."""
        return self.collected.statistics

    def parameters(self) -> dict[str, dict[str, Any]]:
        """Return the parameters of each block, in the layers' layout."""
        return {name: site.values() for name, site in self.sites.items()}

    def __repr__(self) -> str:
        table = kc.integration.coverage_table(self.blocks, self.skipped)
        return f"Factors of {self.examples} examples\n{table}"


def collect(
    model: torch.nn.Module,
    loader: Iterable[Any],
    *,
    likelihood: Any = "categorical",
    path: str | os.PathLike[str] | None = None,
    fisher: kc.losses.EstimationMode = "gradients",
    samples: int = 1,
    positions: kc.losses.Positions = "signs",
    forward: Callable[[Any, Any], Any] | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    ekfac: bool = True,
    approximations: Mapping[Any, Any] | None = None,
    skip_layers: Sequence[str] = (),
    max_elements: int | None = None,
    save_every: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    communicator: Any = None,
) -> Factors:
    r"""Collect the Kronecker-factored curvature of a model over a data set.

    The curvature of each layer is that of the negative log-likelihood of one example,
    summed over its rows of outputs (tokens), and averaged over the N examples.  By default
    it is EKFAC's,

    .. math:: F = (Q_A \otimes Q_G) \, \mathrm{diag}(E) \, (Q_A \otimes Q_G)^T .

    Parameters
    ----------
    model : torch.nn.Module
        Trained model of any floating dtype, which is run in evaluation mode; statistics are
        in float32 or wider.  Frozen parameters are left out.
    loader : iterable
        Batches: ``(inputs, ...)``, or mappings as of Hugging Face's tokenizers.  It is gone
        through twice for each part of layers (once without EKFAC), so give the same batches
        in the same order each time (``shuffle=False``).
    likelihood : str, kfac_core.losses.Loss or torch.nn.Module
        As of `KFAC`.
    path : path-like, optional
        Checkpoint to write.  If it exists, of this model and these options, nothing is
        computed; what a killed run left beside it is resumed, to the bit.  Data and
        functions are not compared.
    fisher : {"gradients", "exact", "empirical"}
        ``"gradients"`` draws labels from the model, ``"exact"`` sums over all of them, and
        ``"empirical"`` takes the gradients of `loss`.
    samples, positions
        As of `KFAC`.
    forward : callable, optional
        ``(model, batch) -> outputs`` or ``(outputs, weights of rows)``; by default
        `outputs_of`.
    loss : callable, optional
        ``(model, batch) -> losses`` of the examples, (N,), for ``fisher="empirical"``.
    ekfac : bool
        Whether the second moments in the bases of `kfac_core.Kronecker` factors are taken
        too, as of `kfac_core.EKFAC`, by going through the data once more.
    approximations, skip_layers
        As of `KFAC`.
    max_elements : int, optional
        Bound on the numbers in the statistics of the layers that are taken together; needs
        a `path`.  A layer with n inputs and m outputs has ``2 (n^2 + m^2) + n m``.
    save_every : int, optional
        Batches between saved states, of which a killed run is resumed; needs a `path`.
    progress : callable, optional
        Called with the number of batches done, and of those there are.
    communicator : kfac_core.distributed.Communicator or str, optional
        Processes, each with a loader of its own share; by default all of
        ``torch.distributed`` if it is initialized.  `path` is on a disk that all see.

    Returns
    -------
    Factors
        For `influence`, `kfac_core_shims.torch.Posterior`, `operator` and `merge`.

    Raises
    ------
    kfac_core.ConventionError
        For options that do not fit, such as several parts without a `path`; for a loader
        that gives other batches the second time.
    kfac_core.NotReadyError
        If a layer saw no example, or a process no batch.
    kfac_core.NotFiniteError
        For a row that is not finite.
    kfac_core.StateError
        For a file at `path` of other weights or options.

    Notes
    -----
    ``R (n^2 + m^2)`` flops for R rows of a layer, about ``9 (n^3 + m^3)`` for its bases,
    and ``2 R (n^2 + m^2 + n m)`` for its second moments; two forward and backward passes
    for each part of the layers.

    References
    ----------
    George et al. (2018), arXiv:1806.03884; Grosse et al. (2023), arXiv:2308.03296.

    Examples
    --------
    >>> import torch
    >>> from kfac_core_shims.torch import collect
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 3)).eval()
    >>> factors = collect(model, torch.randn(10, 4).split(4), likelihood="categorical")
    >>> factors.examples, sorted(factors.blocks)
    (10, ['0', '1'])
    """
    modes = get_args(kc.losses.EstimationMode)
    kc.constraints.require_one_of("fisher", fisher, modes)
    plain, mode = parallel.inner(model), fisher
    if fisher == "empirical":
        if loss is None:
            raise kc.ConventionError(
                "fisher='empirical' takes the gradients of each example's loss: give "
                "`loss`, (model, batch) -> losses of shape (N,)."
            )
        per_example = loss

        def forward(model: torch.nn.Module, batch: Any) -> Any:
            return example_losses(per_example, model, batch)[:, None]

        # The exact vector of half the square of one output is 1: the loss's own gradient.
        fisher, likelihood = "exact", "gaussian"
    run = outputs_of if forward is None else forward
    if save_every is not None:
        require_order("loader", loader)
    model_blocks = find_sites(plain, skip_layers=skip_layers)
    blocks = {}
    for name, kind in choose(plain, model_blocks, approximations or {}).items():
        site = model_blocks.sites[name]
        block = kc.Block(site.layer, kind)
        tied = site.part.tied
        blocks[name] = (
            kc.integration.with_moments(block) if ekfac and not tied else block
        )

    @contextmanager
    def capture(taken: Mapping[str, kc.Block]) -> Iterator[Any]:
        kfac = KFAC(
            plain,
            likelihood=likelihood,
            fisher=fisher,
            samples=samples,
            positions=positions,
            kl_clip=None,
            approximations={
                **dict.fromkeys(model_blocks.sites),
                **{name: block.approximation for name, block in taken.items()},
            },
            skip_layers=skip_layers,
            output=None,
            communicator="alone",
        )

        def passes(batch: Any, seed: int) -> tuple[Any, int]:
            with torch.enable_grad():
                outputs = within(run)(model, batch)
            outputs, weight = outputs if isinstance(outputs, tuple) else (outputs, None)
            return kfac.batches(outputs, weight, seed=seed), len(outputs)

        try:
            with evaluated(plain):
                yield passes
        finally:
            kfac.remove()

    origin = {}
    if path is not None:
        origin = {
            PARAMETERS: digest_of(plain),
            "likelihood": str(criterion_of(likelihood, None).row.likelihood),
            "fisher": mode,
            "samples": str(samples if mode == "gradients" else None),
            "positions": positions,
        }
    with private.without_autocast(next(plain.parameters()).device) as within:
        collected = kc.integration.collect_statistics(
            blocks,
            capture,
            loader,
            fisher=fisher,
            path=path,
            origin=origin,
            backend=_backend(plain),
            max_elements=max_elements,
            save_every=save_every,
            progress=progress,
            communicator=parallel.processes_of(communicator),
        )
    sites = {name: model_blocks.sites[name] for name in blocks}
    return Factors(plain, sites, collected, dict(model_blocks.reasons))


def read_factors(model: torch.nn.Module, path: str | os.PathLike[str], /) -> Factors:
    """Return the factors that `collect` wrote to a file, for the same model.

    Parameters
    ----------
    model : torch.nn.Module
        Model whose layers have the names and shapes of the file.
    path : path-like
        The file.

    Returns
    -------
    Factors
        Its arrays are read to the model's device when they are first asked for.

    Raises
    ------
    kfac_core.StateError
        For a file that `collect` did not write, or of another model.
    """
    plain = parallel.inner(model)
    model_blocks = find_sites(plain)
    layers = {name: site.layer for name, site in model_blocks.sites.items()}
    collected = kc.integration.Collected.read(layers, path, backend=_backend(plain))
    sites = {name: model_blocks.sites[name] for name in collected.blocks}
    return Factors(plain, sites, collected, dict(model_blocks.reasons))


def factors_from(model: Any, factors: Factors | str | os.PathLike[str], /) -> Factors:
    """Return factors, which are read if their file is given."""
    return factors if isinstance(factors, Factors) else read_factors(model, factors)


def outputs_of(model: torch.nn.Module, batch: Any, /) -> torch.Tensor:
    """Return the outputs of a model for a batch, which goes to the model's device.

    Parameters
    ----------
    model : torch.nn.Module
        The model.
    batch : tensor, sequence or mapping of tensors
        Inputs; the first of a sequence; a mapping without ``labels`` by name.

    Returns
    -------
    torch.Tensor
        What the model returns, or its ``logits``.

    Raises
    ------
    kfac_core.ConventionError
        For rows that do not count: labels of -100, or padding of sequences whose outputs
        are by position; and for several outputs.
    """
    device = next(model.parameters()).device
    mask, labels = None, None
    if isinstance(batch, Mapping):
        inputs = {k: x.to(device) for k, x in batch.items() if k != "labels"}
        outputs = model(**inputs)
        mask, labels = batch.get("attention_mask"), batch.get("labels")
    else:
        several = isinstance(batch, list | tuple)
        outputs = model((batch[0] if several else batch).to(device))
        labels = batch[1] if several and len(batch) > 1 else None
    outputs = getattr(outputs, "logits", outputs)
    if not isinstance(outputs, torch.Tensor):
        raise kc.ConventionError(
            f"Expected a model that returns a tensor, got a {type(outputs).__name__}. Say "
            "which outputs the likelihood is of by `forward`, such as (model, batch) -> "
            "torch.cat(model(batch[0]), -1) for heads side by side."
        )
    ignored = isinstance(labels, torch.Tensor) and bool((labels == -100).any())
    padded = mask is not None and outputs.shape[:-1] == mask.shape and not mask.all()
    if ignored or padded:
        why = "labels are -100" if ignored else "positions are padding"
        raise kc.ConventionError(
            f"Some {why}, so that some rows of the outputs do not count. Say which do by "
            "`forward`, (model, batch) -> (outputs, weights of their rows)."
        )
    return outputs


def example_losses(
    loss: Callable[[Any, Any], Any], model: torch.nn.Module, batch: Any, /
) -> torch.Tensor:
    """Return ``loss(model, batch)``, the loss of each example, of shape (N,)."""
    with torch.enable_grad():
        losses = loss(model, batch)
    if losses.ndim != 1:
        raise kc.ShapeError(
            "Expected `loss` to return the losses of the examples, shape (N,), got "
            f"{tuple(losses.shape)}. Sum over tokens, not over examples."
        )
    return losses


@contextmanager
def evaluated(model: torch.nn.Module, /) -> Iterator[None]:
    """Run a model in evaluation mode, and put back the mode of each module."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def require_order(name: str, loader: Any, /) -> None:
    """Raise for a loader that shuffles, where the order of its examples counts."""
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, torch.utils.data.RandomSampler):
        raise kc.ConventionError(
            f"Expected a `{name}` that gives its examples in one order, got a DataLoader "
            "that shuffles. Say shuffle=False."
        )


def digest_of(model: torch.nn.Module, /) -> str:
    """Return a digest of what the outputs of a model depend on."""
    return kc.integration.digest_of_arrays(_arrays(model))


def _arrays(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what the outputs of a model depend on, as bytes on the host."""
    for name, x in model.state_dict().items():
        if isinstance(x, torch.Tensor):
            # A shard is a part of what all processes have.
            whole = x.full_tensor() if hasattr(x, "full_tensor") else x
            flat = whole.detach().cpu().resolve_conj().contiguous().flatten()
            shape = tuple(whole.shape)
            yield f"{name} {x.dtype} {shape}", flat.view(torch.uint8).numpy()


def _backend(model: torch.nn.Module) -> str:
    return f"torch:{next(model.parameters()).device}"
