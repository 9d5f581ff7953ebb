"""`influence`: how training examples, their tokens, and layers move the loss of queries."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import kfac_core as kc
from kfac_core_shims.torch import private
from kfac_core_shims.torch.collecting import (
    Factors,
    evaluated,
    example_losses,
    factors_from,
    outputs_of,
    require_order,
)
from kfac_core_shims.torch.kfac import KFAC
from kfac_core_shims.torch.likelihoods import criterion_of
from kfac_core_shims.torch.stacks import ParameterStacks

Losses = Callable[[Any, Any], Any]
"""``(model, batch) -> losses`` of the batch's examples, shape (N,)."""


@dataclass(frozen=True)
class Scores:
    """Influence of training examples on queries.

    Attributes
    ----------
    scores : torch.Tensor, shape (Q, N) or (Q, N, T), or dict of str to these
        The scores; of each token, or by layer, where these were asked for.
    residuals : torch.Tensor, shape (Q,), or None
        Relative residuals of the solved systems, of ``solver="cg"``.
    iterations : int
        Products with the Gauss-Newton matrix for each query.
    skipped : dict of str to str
        Parameters that the scores leave out, with the reason.
    """

    scores: Any
    residuals: Any
    iterations: int
    skipped: dict[str, str]


def influence(
    model: torch.nn.Module,
    loss: Losses,
    train: Iterable[Any],
    queries: Iterable[Any],
    *,
    factors: Factors | str | os.PathLike[str],
    damping: float | None = None,
    damping_fraction: float | None = None,
    solver: Literal["factors", "cg"] = "factors",
    likelihood: Any = "categorical",
    forward: Callable[[Any, Any], Any] | None = None,
    tolerance: float = 1e-6,
    max_iterations: int = 200,
    by_token: bool = False,
    by_layer: bool = False,
    rank: int | None = None,
    storage: Literal["float16", "float32", "float64"] | None = None,
    folder: str | os.PathLike[str] | None = None,
    max_elements: int = 2**27,
    progress: Callable[[int, int], None] | None = None,
) -> Scores:
    r"""Return the influence of training examples on the losses of queries.

    .. math:: \text{score}_{q,n} = g_q^T (F + \lambda I)^{-1} g_n

    with the gradients g of the examples' own losses and F averaged over the N training
    examples.  Without example n the loss of query q changes by about
    :math:`\text{score}_{q,n} / N`: a positive score helps the query.

    Parameters
    ----------
    model : torch.nn.Module
        The trained model, as it was given to `collect`.
    loss : callable
        ``(model, batch) -> losses`` of each example, shape (N,), of training examples and
        queries; a sequence's is the sum over its tokens.
    train, queries : iterable
        Batches, in the order of the scores (``shuffle=False``).
    factors : Factors or path-like
        From `collect`, EKFAC by default; or its file.
    damping : float, optional
        lambda of all layers.
    damping_fraction : float, optional
        lambda of each layer as a fraction of its mean eigenvalue; 0.1 if neither is given.
    solver : {"factors", "cg"}
        The inverse of the factors, or conjugate gradients on the exact Gauss-Newton matrix
        of the covered layers together, with the factors as preconditioner.
    likelihood, forward
        As of `collect`: what the Gauss-Newton matrix is of.
    tolerance, max_iterations : float, int
        When conjugate gradients stop, ``|g_q - (F + lambda I) u| <= tolerance |g_q|``, or
        give up.
    by_token : bool
        Whether each position of the training sequences has a score, summed over a layer's
        calls; they add up.
    by_layer : bool
        Whether each layer has a score, by its name; they add up.
    rank : int, optional
        Rank to which each query's matrix of a layer is reduced.
    storage : {"float16", "float32", "float64"}, optional
        Dtype in which queries are kept; that of the factors where left out.
    folder : path-like, optional
        Where they are kept on disk, and read as they are needed.
    max_elements : int
        Numbers in the temporaries of a product; see `kfac_core.influence`.
    progress : callable, optional
        Called with the batches of training examples that are done, and their number or 0.

    Returns
    -------
    Scores
        With the residuals of conjugate gradients.

    Raises
    ------
    kfac_core.ConventionError
        For two dampings; for `rank`, `storage` or `folder` with ``solver="cg"``; for a
        loader that shuffles, or is an iterator where it is read several times.
    kfac_core.UnsupportedError
        For a layer that sees other rows than those of the loss's examples, but not in the
        first training batch; by token for convolutions, for layers that see different
        numbers of tokens, and for several calls that do not show their rows' positions.

    Notes
    -----
    The model runs in evaluation mode.  Covered are linear layers, convolutions and
    embeddings of `factors`; normalizations and embeddings of positions, whose rows are not
    those of one example, are not.  By factors ``2 n m`` flops for each query, example
    and layer; each iteration of conjugate gradients goes through the training data.

    References
    ----------
    Koh and Liang (2017), arXiv:1703.04730; Grosse et al. (2023), arXiv:2308.03296.

    Examples
    --------
    >>> import torch
    >>> from kfac_core_shims.torch import collect, influence
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3)).eval()
    >>> data = [(torch.randn(10, 4), torch.randint(3, (10,)))]
    >>> def loss(model, batch):
    ...     z = model(batch[0])
    ...     return torch.nn.functional.cross_entropy(z, batch[1], reduction="none")
    >>> factors = collect(model, data)
    >>> influence(model, loss, data, data, factors=factors).scores.shape
    torch.Size([10, 10])
    """
    kc.constraints.require_one_of("solver", solver, ("factors", "cg"))
    if solver == "cg" and any(x is not None for x in (rank, storage, folder)):
        raise kc.ConventionError(
            "`rank`, `storage` and `folder` are of solver='factors': conjugate gradients "
            "keep all queries' solutions in memory, in the dtype of the factors."
        )
    if solver == "cg" and iter(train) is train:
        raise kc.ConventionError(
            "Conjugate gradients read `train` many times, and an iterator can be read "
            "once: give a list or a DataLoader."
        )
    require_order("queries", queries)
    _, queries = _with_first("queries", queries)
    taken, train = _taken(model, loss, train, factors, damping, damping_fraction)
    inverse = taken.inverse
    convolutions = [n for n, b in inverse.blocks.items() if b.layer.kind == "conv"]
    if by_token and convolutions:
        raise kc.UnsupportedError(
            f"Rows of convolutions are not tokens: {convolutions}. Leave them out, "
            "collect(..., skip_layers=[...]), or ask for scores of examples."
        )
    if storage is None:
        wide = all(F.dtype == torch.float64 for F in inverse.curvatures.values())
        storage = "float64" if wide else "float32"
    options: dict[str, Any] = {"reduction": "sum", "max_elements": max_elements}
    # Queries are preconditioned once, before the training data are read.
    residuals, iterations, stored = None, 0, []
    with taken.gradients() as gradients:
        if solver == "factors":
            for number, batch in enumerate(queries):
                preconditioned = inverse.precondition(
                    gradients(batch)[0], storage=storage, rank=rank, **options
                )
                stored.append(_on_disk(preconditioned, folder, number))
        else:
            g = _joined([taken.matrices(batch) for batch in queries])
            run = outputs_of if forward is None else forward
            product = taken.product(train, run, criterion_of(likelihood, None))
            u, residuals, iterations = _conjugate_gradients(
                product, inverse, g, tolerance, max_iterations
            )
            stored = [
                kc.influence.Queries(
                    {
                        n: kc.influence.queries.stored_queries(x, x.dtype)
                        for n, x in u.items()
                    }
                )
            ]
        pieces: dict[str, list[Any]] = {}
        # Scores of layers add up, since factors have no curvature between layers.
        names: list[tuple[str, ...]] = (
            [(name,) for name in inverse.blocks] if by_layer else [()]
        )
        total = len(train) if isinstance(train, Sized) else 0
        for done, batch in enumerate(train, 1):
            seen, N = gradients(batch, by_token)
            shape: tuple[int, ...] = (N, _tokens_of(seen, N)) if by_token else (N,)
            before = next(iter(pieces.values()))[0].shape if pieces else (0, *shape)
            if before[2:] != shape[1:]:
                raise kc.ShapeError(
                    f"Expected sequences of {before[2]} tokens as in the first batch of "
                    f"`train`, got {shape[-1]}. Pad all batches to one length."
                )
            for only in names:
                part = _restricted(inverse, only) if only else inverse
                of_part = {name: seen[name] for name in part.blocks}
                rows = [
                    part.scores(_restricted_queries(q, only), of_part, **options)
                    for q in stored
                ]
                columns = torch.cat(rows)
                columns = columns.reshape(len(columns), *shape)
                pieces.setdefault("".join(only), []).append(columns)
            if progress is not None:
                progress(done, total)
    scores: Any = {name: torch.cat(parts, dim=1) for name, parts in pieces.items()}
    return Scores(
        scores if by_layer else scores[""], residuals, iterations, taken.skipped
    )


def self_influence(
    model: torch.nn.Module,
    loss: Losses,
    train: Iterable[Any],
    *,
    factors: Factors | str | os.PathLike[str],
    damping: float | None = None,
    damping_fraction: float | None = None,
    max_elements: int = 2**27,
) -> torch.Tensor:
    r"""Return the influence of each training example on its own loss.

    .. math:: \text{score}_n = g_n^T (F + \lambda I)^{-1} g_n \geq 0

    with the gradient g of an example's own loss, and F averaged over the N examples.  It
    is large for mislabeled and rare examples.

    Parameters
    ----------
    model, loss, train, factors, damping, damping_fraction, max_elements
        As of `influence`.

    Returns
    -------
    torch.Tensor, shape (N,)
        Scores, in the order of `train`.

    Raises
    ------
    kfac_core.ConventionError
        For two dampings, and for a loader that shuffles or has no batches.

    References
    ----------
    Koh and Liang (2017), arXiv:1703.04730; Grosse et al. (2023), arXiv:2308.03296.
    """
    taken, train = _taken(model, loss, train, factors, damping, damping_fraction)
    with taken.gradients() as gradients:
        parts = [
            taken.inverse.self_scores(
                gradients(batch)[0], reduction="sum", max_elements=max_elements
            )
            for batch in train
        ]
    return torch.cat(parts)


def _taken(
    model: torch.nn.Module,
    loss: Losses,
    train: Iterable[Any],
    factors: Factors | str | os.PathLike[str],
    damping: float | None,
    fraction: float | None,
) -> tuple[_Taken, Iterable[Any]]:
    """Return the gradients of examples, and the training data with its first batch."""
    require_order("train", train)
    factors = factors_from(model, factors)
    if damping is None and fraction is None:
        fraction = 0.1
    first, train = _with_first("train", train)
    blocks = scored_blocks(factors, lambda: example_losses(loss, model, first)[:, None])
    statistics = {name: factors.statistics[name] for name in blocks}
    with private.without_autocast(_device(factors)):
        inverse = kc.influence.Influence.of_statistics(
            blocks, statistics, damping=damping, damping_fraction=fraction
        )
    return _Taken(model, loss, factors, inverse), train


def _with_first(name: str, batches: Iterable[Any]) -> tuple[Any, Iterable[Any]]:
    """Return the first batch, and all batches with it."""
    first = next(iter(batches), None)
    if first is None:
        raise kc.ConventionError(f"Expected batches in `{name}`, got none.")
    if iter(batches) is batches:
        # The first batch was taken off an iterator.
        batches = itertools.chain([first], batches)
    return first, batches


@dataclass
class _Taken:
    """Gradients of examples, and products with their Gauss-Newton matrix."""

    model: Any
    loss: Losses
    factors: Factors
    inverse: kc.influence.Influence
    within: Callable[[Any], Any] = field(init=False)

    @property
    def skipped(self) -> dict[str, str]:
        """Parameters that the scores leave out."""
        return skipped_parameters(self.factors, self.inverse.blocks)

    @contextmanager
    def gradients(self) -> Iterator[Callable[..., tuple[dict[str, kc.Batch], int]]]:
        """Give a function of a batch, to the examples' gradients and their number.

        It returns each layer's rows, with each position as an example on request.
        """
        blocks, device = self.inverse.blocks, _device(self.factors)
        with (
            private.without_autocast(device) as self.within,
            output_rows(self.factors, blocks) as rows,
        ):

            def gradients(
                batch: Any, by_position: bool = False
            ) -> tuple[dict[str, kc.Batch], int]:
                losses = example_losses(self.within(self.loss), self.model, batch)
                by_layer = rows(losses[:, None], by_position)
                return {
                    name: replace(b, output_grads=b.output_grads[0], sources=None)
                    for name, b in by_layer.items()
                }, len(losses)

            yield gradients

    def matrices(self, batch: Any) -> dict[str, Any]:
        """Return the gradients of a batch's examples as matrices, by block."""
        losses = example_losses(self.within(self.loss), self.model, batch)
        rows = [
            torch.autograd.grad(
                x, self.stacks.parameters, retain_graph=True, allow_unused=True
            )
            for x in losses
        ]
        columns = zip(self.stacks.parameters, zip(*rows, strict=True), strict=True)
        gradients = [
            torch.stack([torch.zeros_like(p) if g is None else g for g in column])
            for p, column in columns
        ]
        return self._to_matrices(gradients)

    @cached_property
    def stacks(self) -> ParameterStacks:
        """Vectors by parameter and by block."""
        return ParameterStacks({n: self.factors.sites[n] for n in self.inverse.blocks})

    def _to_matrices(self, stacks: list[Any]) -> dict[str, Any]:
        curvature = next(iter(self.inverse.curvatures.values()))
        return self.stacks.matrices(stacks, dtype=curvature.dtype)

    def product(self, train: Iterable[Any], run: Any, criterion: Any) -> Any:
        """Return the product with the Gauss-Newton matrix, averaged over the examples."""
        likelihood = criterion.row.likelihood

        def product(matrices: Mapping[str, Any]) -> dict[str, Any]:
            V = [
                x.to(p.dtype)
                for p, x in zip(
                    self.stacks.parameters, self.stacks.stacks(matrices), strict=True
                )
            ]
            # J^T H J v by two passes: forward by the double trick, then backward.
            total, examples = [torch.zeros_like(v) for v in V], 0
            for batch in train:
                # Fused attention has no second derivative.
                with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
                    outputs = self.within(run)(self.model, batch)
                z, weight = outputs if isinstance(outputs, tuple) else (outputs, None)
                curved = []
                for forward_product in _forward_products(z, self.stacks.parameters, V):
                    v = likelihood.ggn_multiply(z.detach(), forward_product.to(z.dtype))
                    curved.append(v if weight is None else v * weight[..., None])
                parts = torch.autograd.grad(
                    z,
                    self.stacks.parameters,
                    torch.stack(curved),
                    is_grads_batched=True,
                    allow_unused=True,
                )
                for sums, part in zip(total, parts, strict=True):
                    if part is not None:
                        sums += part
                examples += len(z)
            return self._to_matrices([x / examples for x in total])

        return product


def _device(factors: Factors) -> torch.device:
    return next(factors.model.parameters()).device


@contextmanager
def output_rows(
    factors: Factors, blocks: Mapping[str, kc.Block], /
) -> Iterator[Callable[..., dict[str, kc.Batch]]]:
    """Give a function of outputs (N, C), to the rows of their Jacobian by layer.

    Parameters
    ----------
    factors : Factors
        Of the model, which is in evaluation mode meanwhile.
    blocks : mapping of str to Block
        Blocks that the rows are of.

    Yields
    ------
    callable
        Returns a batch of each block, of the N examples and with C sources; on request, by
        a second argument, each position of the examples is an example.

    Raises
    ------
    kfac_core.UnsupportedError
        From the callable, for a layer that does not have N groups of rows, or whose
        positions are not known.
    """
    with _uses(factors, blocks) as uses_of:

        def rows(outputs: Any, by_position: bool = False) -> dict[str, kc.Batch]:
            uses = uses_of(outputs, by_position)
            for name in blocks:
                separated = by_position and len(uses[name]) == 1
                if not separated and not _is_by_example(uses[name], len(outputs)):
                    raise kc.UnsupportedError(
                        f"Layer {name!r} does not see one group of rows for each example: "
                        f"it is called {len(uses[name])} times, or merges examples. Leave "
                        f"it out, collect(..., skip_layers=[{name!r}])."
                    )
            return {name: uses[name][0] for name in blocks}

        yield rows


def scored_blocks(
    factors: Factors, outputs: Callable[[], Any], /
) -> dict[str, kc.Block]:
    """Return the blocks whose rows belong to one example each.

    Parameters
    ----------
    factors : Factors
        Of the model.
    outputs : callable
        Runs the model for a batch, and returns outputs (N, C).

    Returns
    -------
    dict of str to Block
        The blocks whose rows in this batch are one group for each example, which
        changes with the outputs of that example alone; without normalizations and tied
        weights.
    """
    blocks = {
        name: block
        for name, block in factors.blocks.items()
        if block.layer.kind != "scale_shift" and not factors.sites[name].part.tied
    }
    with _uses(factors, blocks) as uses_of:
        z = outputs()
        uses, examples = uses_of(z), len(z)
        scored = [name for name in blocks if _is_by_example(uses[name], examples)]
        # Rows in another order, or gathered, may be as many as the examples, but do not
        # double with them.  Binary digits tell all numbers of examples apart.
        numbers = torch.arange(examples, device=z.device)
        for digit in range((examples - 1).bit_length()):
            factor = 1 + (numbers >> digit & 1)
            scaled = uses_of(outputs() * factor[:, None])
            scored = [
                name
                for name in scored
                if _are_multiples(scaled[name][0], uses[name][0], factor)
            ]
    # A layer that this batch does not reach may be reached by another.
    return {
        name: block
        for name, block in blocks.items()
        if not uses[name] or name in scored
    }


def _are_multiples(scaled: kc.Batch, batch: kc.Batch, factor: Any) -> bool:
    """Whether the output gradients of each example are multiples of those in a batch."""
    g, expected = (b.output_grads[0].flatten(1) for b in (scaled, batch))
    expected = expected * factor[:, None]
    # Far above the roundoff of any dtype, and below a factor of two.
    return bool(((g - expected).abs().amax(1) <= 0.1 * expected.abs().amax(1)).all())


def skipped_parameters(
    factors: Factors, blocks: Mapping[str, kc.Block], /
) -> dict[str, str]:
    """Return what is not in some of the blocks of `scored_blocks`, with the reason."""
    why = "its layer is a normalization, or tied, or has no rows of one example"
    others = factors.blocks.keys() - blocks.keys()
    return factors.skipped | dict.fromkeys(sorted(others), why)


@contextmanager
def _uses(
    factors: Factors, blocks: Mapping[str, kc.Block]
) -> Iterator[Callable[..., dict[str, list[kc.Batch]]]]:
    """Give a function of outputs (N, C), to the batches of each layer's uses."""
    kfac = KFAC(
        factors.model,
        # The exact vectors of half the squared error are the unit vectors.
        likelihood="gaussian",
        fisher="exact",
        positions="together",  # Without random signs, which a Jacobian does not have.
        kl_clip=None,
        approximations={
            # What sums over the rows of an example asks whose they are.
            **dict.fromkeys(factors.all_sites),
            **{n: kc.EKFAC(input=_side(b)) for n, b in blocks.items()},
        },
        output=None,
        communicator="alone",
    )

    def uses_of(outputs: Any, by_position: bool = False) -> dict[str, list[kc.Batch]]:
        parts = kfac.batches(
            outputs, positions_of=len(outputs) if by_position else None
        )
        return {name: [part[name] for part in parts if name in part] for name in blocks}

    try:
        with evaluated(factors.model):
            yield uses_of
    finally:
        kfac.remove()


def _is_by_example(uses: list[kc.Batch], examples: int) -> bool:
    return len(uses) == 1 and len(uses[0].inputs) == examples


def _forward_products(z: Any, parameters: list[Any], V: list[Any]) -> Any:
    """Return ``J v`` for each v, by differentiating ``J^T u`` by u."""
    # J^T u is linear in u, so its derivative by u along v is J v, whatever u is.
    u = torch.zeros_like(z, requires_grad=True)
    with torch.enable_grad():
        g = torch.autograd.grad(
            z, parameters, u, create_graph=True, materialize_grads=True
        )
        pairs = [(x, v) for x, v in zip(g, V, strict=True) if x.requires_grad]
    return torch.autograd.grad(
        [x for x, _ in pairs],
        u,
        [v for _, v in pairs],
        is_grads_batched=True,
        retain_graph=True,
    )[0]


def _conjugate_gradients(
    product: Any,
    inverse: kc.influence.Influence,
    b: dict[str, Any],
    tolerance: float,
    max_iterations: int,
) -> tuple[dict[str, Any], Any, int]:
    """Solve ``(F + lam I) u = b`` for all queries at once; return relative residuals too.

    The residual that is returned is computed from the solution, not by the recurrence.
    """

    def damped(V: dict[str, Any]) -> dict[str, Any]:
        F = product(V)
        return {n: F[n] + inverse.damping[n] * V[n] for n in V}

    def dot(V: dict[str, Any], W: dict[str, Any]) -> Any:
        return sum((V[n] * W[n]).sum(dim=(1, 2)) for n in V)

    def plus(V: dict[str, Any], c: Any, W: dict[str, Any]) -> dict[str, Any]:
        return {n: V[n] + c[:, None, None] * W[n] for n in V}

    size = dot(b, b).sqrt()
    size = torch.where(size > 0, size, 1.0)
    u = {n: torch.zeros_like(x) for n, x in b.items()}
    r, iterations = b, 0
    z = inverse.multiply_inverse(r)
    p, rz = z, dot(r, z)
    while iterations < max_iterations and bool(
        (dot(r, r).sqrt() > tolerance * size).any()
    ):
        image = damped(p)
        curvature = dot(p, image)
        # Queries that are solved exactly stay as they are.
        alpha = torch.where(
            curvature > 0, rz / torch.where(curvature > 0, curvature, 1.0), 0.0
        )
        u, r = plus(u, alpha, p), plus(r, -alpha, image)
        z = inverse.multiply_inverse(r)
        new = dot(r, z)
        p = plus(z, torch.where(rz > 0, new / torch.where(rz > 0, rz, 1.0), 0.0), p)
        rz = new
        iterations += 1
    left = plus(b, -torch.ones_like(size), damped(u))
    return u, dot(left, left).sqrt() / size, iterations


def _side(block: kc.Block) -> Any:
    return "diagonal" if block.layer.kind == "embedding" else "full"


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _tokens_of(seen: Mapping[str, kc.Batch], examples: int) -> int:
    """Return how many positions of each example are examples of their own."""
    counts = {name: len(batch.output_grads) for name, batch in seen.items()}
    if len({*counts.values()}) > 1:
        tokens = {name: count // examples for name, count in counts.items()}
        raise kc.UnsupportedError(
            f"Layers have other numbers of tokens: {tokens}. Leave out those without the "
            "tokens that you ask for, collect(..., skip_layers=[...])."
        )
    return next(iter(counts.values())) // max(1, examples)


def _restricted(
    inverse: kc.influence.Influence, names: tuple[str, ...]
) -> kc.influence.Influence:
    return kc.influence.Influence(
        {n: inverse.blocks[n] for n in names},
        {n: inverse.curvatures[n] for n in names},
        {n: inverse.damping[n] for n in names},
    )


def _restricted_queries(
    queries: kc.influence.Queries, names: tuple[str, ...]
) -> kc.influence.Queries:
    return (
        kc.influence.Queries({n: queries.blocks[n] for n in names})
        if names
        else queries
    )


def _on_disk(
    queries: kc.influence.Queries, folder: Any, number: int
) -> kc.influence.Queries:
    """Return queries whose arrays lie in files, which are mapped into memory."""
    if folder is None:
        return queries
    Path(folder).mkdir(parents=True, exist_ok=True)

    def mapped(x: Any, place: str) -> Any:
        path = Path(folder) / f"{number}.{place}.npy"
        np.save(path, x.cpu().numpy())
        # Copy-on-write: PyTorch has no arrays that are only read.
        return torch.from_numpy(np.load(path, mmap_mode="c"))

    blocks = {}
    for place, (name, block) in enumerate(queries.blocks.items()):
        arrays = {k: x for k, x in vars(block).items() if x is not None and x.ndim > 1}
        files = {k: mapped(x, f"{place}.{k}") for k, x in arrays.items()}
        blocks[name] = replace(block, **files)
    return kc.influence.Queries(blocks)
