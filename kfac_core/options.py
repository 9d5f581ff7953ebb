"""Less common options of a network, in groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kfac_core import constraints, errors
from kfac_core.approximations.options import DampingScaling, RefreshOptions
from kfac_core.array.precision import Precision
from kfac_core.damping import DampingRule
from kfac_core.linalg.factorizations import Factorization, Solving

RANGES = {
    "debias": constraints.FLAG,
    "burn_in": constraints.WHOLE,
    "weight": constraints.WEIGHT,
    "factorizations": constraints.tuple_of(constraints.literal(Factorization)),
    "keep_matrices": constraints.FLAG,
    "damping_scaling": constraints.literal(DampingScaling),
    "least_shift": constraints.NOT_NEGATIVE,
    "failure_budget": constraints.WHOLE,
    "solving": constraints.literal(Solving),
    "factors": constraints.mapping_to(constraints.TEXT),
    "weights": constraints.mapping_to(constraints.TEXT),
    "chains": constraints.mapping_to(constraints.NAMES),
    "workers": constraints.COUNT,
    "max_patch_elements": constraints.optional(constraints.COUNT),
    "rule": constraints.literal(DampingRule),
    "check": constraints.CHECK,
    "precision": constraints.optional(constraints.instance_of(Precision)),
}
"""The constraint of each option of a network or of a stage."""


class _Options:
    """A group of options, each of which is in its range."""

    def __post_init__(self) -> None:
        ranges = {name: RANGES[name] for name in vars(self)}
        constraints.require_options(self, **ranges)


@dataclass(frozen=True, kw_only=True)
class Averaging(_Options):
    """How running averages of statistics are formed.

    One update is ``sum <- decay * sum + weight * C``, with C of one batch.

    Parameters
    ----------
    debias : bool
        Whether running sums are divided by their weights, so that the first update gives
        C for any decay.
    burn_in : int
        Number of first updates of a block that are averaged with equal weights (decay 1,
        weight 1).
    weight : float
        The weight of each update, positive.

    Raises
    ------
    ConventionError
        For a negative `burn_in`, or a value of another kind.
    DecayError
        For a weight that is not positive.

    Examples
    --------
    >>> import kfac_core as kc
    >>> kc.Averaging(debias=False).debias
    False
    """

    debias: bool = True
    burn_in: int = 0
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Refreshing(_Options):
    """The results of a refresh, and its handling of failures.

    Parameters
    ----------
    factorizations : tuple of {"inverse", "cholesky", "eigenbasis"}
        Factorizations that a refresh prepares.  Other products compute theirs at their
        first call.
    keep_matrices : bool
        Whether operators of `Kronecker` blocks with factored damping, and of `Full` blocks,
        keep the matrices that were factorized.  Without them they take half of the
        memory, and have only the products of the factorizations that were prepared;
        others raise `UnsupportedError` or `NotReadyError`.
    damping_scaling : {"none", "mean_eigenvalue"}
        Whether a block's damping is multiplied by the mean eigenvalue of its undamped
        matrix, ``tr F / dim F``, so that it is relative to the block's size.
    least_shift : float
        The least number that a factored rule adds to a factor; see
        `kfac_core.damping.factored_shifts`.  With it the damping of a block is larger than
        what was given, where its factors' mean eigenvalues are far apart.
    failure_budget : int
        Number of consecutive refreshes that may fail for a block, which then keeps its
        previous operator, before the failure is raised.
    solving : {"inverse", "triangular"}
        Whether a factor with factored damping is inverted at a refresh, or only factorized
        and used in triangular solves at each step.  These cost a third at a refresh, and
        about 1.5 times as much at a step.

    Raises
    ------
    ConventionError
        For an unknown name, or a number out of range; for ``keep_matrices=False`` where
        no factorization is prepared, or an eigenbasis, whose powers need the matrix.

    Examples
    --------
    Keep the previous operator when a factorization fails, twice in a row at most:

    >>> import kfac_core as kc
    >>> refreshing = kc.Refreshing(failure_budget=2)
    """

    factorizations: tuple[Factorization, ...] = ("inverse",)
    keep_matrices: bool = True
    damping_scaling: DampingScaling = "none"
    least_shift: float = 0.0
    failure_budget: int = 0
    solving: Solving = "inverse"

    def __post_init__(self) -> None:
        super().__post_init__()
        factorizations = self.factorizations
        if not self.keep_matrices and (
            not factorizations or "eigenbasis" in factorizations
        ):
            raise errors.ConventionError(
                "Expected `factorizations` of 'inverse', 'cholesky' or both with "
                f"keep_matrices=False, got {factorizations!r}. Take keep_matrices=True: an "
                "operator without factorizations has nothing else, and powers in an "
                "eigenbasis need the matrix."
            )

    def options(
        self, *, rule: DampingRule, debias: bool, precision: Precision
    ) -> RefreshOptions:
        """Return the options of a stage, whose damping is set at each refresh."""
        return RefreshOptions(
            damping=math.nan,
            rule=rule,
            factorizations=self.factorizations,
            debias=debias,
            damping_scaling=self.damping_scaling,
            least_shift=self.least_shift,
            keep_matrices=self.keep_matrices,
            solving=self.solving,
            precision=precision,
        )


@dataclass(frozen=True, kw_only=True)
class Coupling(_Options):
    """How blocks are coupled: shared factors, shared weights, chains of layers.

    Parameters
    ----------
    factors : mapping of str to str
        Factors that a block shares with another: ``{"k/input": "q/input"}`` says that the
        input factor of block ``k`` is that of block ``q``, which is computed once.
    weights : mapping of str to str
        Names of further uses of a block's weight: ``{"decoder.1": "decoder.0"}``.
    chains : mapping of str to sequence of str
        Consecutive dense layers, from the first to the last, whose curvature with each
        other is kept too: ``{"encoder": ("fc1", "fc2", "fc3")}``.  Their blocks, each of
        ``Kronecker()``, become one block ``encoder`` of `BlockTridiagonal`, and batches and
        gradients are given by layer.

    Raises
    ------
    ConventionError
        For anything but mappings of names.

    Examples
    --------
    Three projections of an attention layer read the same inputs, and keep one input factor:

    >>> import kfac_core as kc
    >>> coupling = kc.Coupling(factors={"k/input": "q/input", "v/input": "q/input"})
    >>> layer = kc.Dense(in_features=8, out_features=8, bias=True, weight_layout="io")
    >>> network = kc.Network(
    ...     {name: kc.Block(layer, kc.Kronecker()) for name in "qkv"},
    ...     conventions=kc.Conventions(reduction="sum", sources="sum"),
    ...     coupling=coupling,
    ... )
    """

    factors: Mapping[str, str] = field(default_factory=dict)
    weights: Mapping[str, str] = field(default_factory=dict)
    chains: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        # Make lists tuples, so that networks with the same chains compare equal.
        chains = {
            name: tuple(layers) if isinstance(layers, list) else layers
            for name, layers in self.chains.items()
        }
        object.__setattr__(self, "chains", chains)

    def __hash__(self) -> int:
        # Chains are left out, as values of a mapping may be any sequence; equal hashes
        # of unequal options are only slower.
        return hash((frozenset(self.factors.items()), frozenset(self.weights.items())))


@dataclass(frozen=True, kw_only=True)
class Execution(_Options):
    """How the loops over blocks are run; the results are the same to rounding.

    Parameters
    ----------
    workers : int
        Number of threads for updates, factorizations, and products of more than some
        milliseconds.  With more than one, the array library's own threads
        are divided among them.
    max_patch_elements : int, optional
        Bound on the number of elements of a convolution's patches.  Larger batches are
        processed in chunks of examples.

    Raises
    ------
    ConventionError
        If a number is not an integer of at least 1.

    Examples
    --------
    >>> import kfac_core as kc
    >>> execution = kc.Execution(workers=2)
    """

    workers: int = 1
    max_patch_elements: int | None = None
