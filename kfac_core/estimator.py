"""The estimator: the blocks of one network, and when a snapshot of them is taken.

The one object with state, over functions that have none.  Three nouns in time: the
*statistics* move with every `Estimator.update`; an *operator* is made from them at
`Estimator.refresh`, with the damping of that moment, and does not change afterwards; a
product such as `Estimator.precondition` uses the operators as they are.  So nothing is
half fresh and half stale, and a new damping takes effect at the next refresh.

A call that raises leaves every block as it was.  Results belong to nobody's gradient
graph: what is fed is detached first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

from kfac_core.approximations.eigen import Eigen, MomentStart
from kfac_core.array.backend import Array, backend_of
from kfac_core.array.namespaces import Scalar, own_namespace
from kfac_core.array.precision import Precision
from kfac_core.array.status import Check
from kfac_core.array.structure import replaced
from kfac_core.block import Block, Fed
from kfac_core.conventions import (
    Conventions,
    LossReduction,
    SourceReduction,
    require_one_of,
)
from kfac_core.damping import DampingRule, require_damping
from kfac_core.errors import (
    ConventionError,
    DampingError,
    KFACError,
    NotReadyError,
    UnknownBlockError,
    UnsupportedError,
)
from kfac_core.execution.background import BackgroundRefresh
from kfac_core.execution.batch_directions import direction_of_batch
from kfac_core.execution.block_state import BlockState
from kfac_core.execution.compiled import Compilation
from kfac_core.execution.costs import CostTable, Rates, block_costs, solving_of
from kfac_core.execution.estimator_state import dump_state, parse_state
from kfac_core.execution.products import (
    VECTOR_PRODUCTS,
    WORTH_THREADS,
    apply_product,
    product_flops,
    require_products,
    vector_of,
)
from kfac_core.execution.refreshing import (
    DampingScaling,
    Made,
    Refresh,
    RefreshSettings,
    require_ready,
)
from kfac_core.execution.stacked_inverses import InverseStack, inverse_stacks
from kfac_core.execution.stages import CompiledStages
from kfac_core.execution.threads import in_bundles
from kfac_core.execution.updating import UpdateSettings, updated_blocks
from kfac_core.factors.average import require_decay, require_weight
from kfac_core.factors.statistics import Statistics
from kfac_core.layers.feeding import detached, require_finite_rows
from kfac_core.linalg.shifted import Factorization
from kfac_core.losses.modes import EstimationMode
from kfac_core.operators.operator import CurvatureOperator
from kfac_core.report import BlockReport, report_of
from kfac_core.sharing.shared_factors import SharedFactors
from kfac_core.sharing.tied_weights import TiedWeights

__all__ = ["Estimator"]


class Estimator:
    """Keeps the curvature of a network, block by block.

    Parameters
    ----------
    blocks : mapping of str to Block
        The blocks by name.
    decay : float
        What old statistics are multiplied with at each update, in [0, 1].
    damping : float, 0-d array, or mapping of str to these
        Tikhonov damping, >= 0, of the whole network or of each block by name; a 0-d
        array is never looked at on the host.
    damping_rule : {"factored", "factored_unit_pi", "exact"}
        How the damping is applied; see `kfac_core.damping`.
    loss : {"sum", "mean", "mean_rows"}
        Over what the loss that was differentiated is summed or averaged; see
        `kfac_core.conventions`.
    sources : {"sum", "mean"}
        Whether outer products of several sources are summed or averaged.
    weight : float
        The weight of each update.
    debias : bool
        Whether running sums are divided by their weights.
    burn_in : int
        The number of first updates of a block that are averaged plainly (decay 1,
        weight 1).
    factorizations : tuple of {"inverse", "cholesky", "eigenbasis"}
        What a refresh prepares; other products prepare what they need when first
        asked for.  Which are listed changes when work is done, never a result.
    failure_budget : int
        How many refreshes in a row may fail for a block, which then keeps its previous
        operator, before the failure is raised.
    precision : Precision, optional
        The dtypes of storage, computing and applying.
    damping_scaling : {"none", "mean_eigenvalue"}
        Whether a block's damping is multiplied by the mean eigenvalue of its undamped
        matrix, ``tr F / dim F``, so that it is relative to the block's size.
    shared_factors : mapping of str to str, optional
        Factors that a block takes from another; see `kfac_core.sharing.shared_factors`.
    tied_weights : mapping of str to str, optional
        Names of further uses of a block's weight; see `kfac_core.sharing.tied_weights`.
    products : tuple of str
        Products that will be asked for; each block must support each of them.
    mode : str, optional
        The estimation mode that the output gradients come from, such as
        ``"gradients"``; written into the state and checked when one is loaded.
    refresh_threshold : float, optional
        Where given, a block of which no statistic has moved by more than this since its
        operator was made (and whose damping is the same number) keeps that operator at a
        refresh with ``check="raise"``; see `kfac_core.execution.movement`.  Looking
        waits for the device.
    parameter_statistics : bool
        Whether the mean gradient of each block's last batch is kept.
    max_patch_elements : int, optional
        How many numbers the patches of a convolution may hold at a time; a batch is
        read in chunks of examples then, with the same result.
    compiled : bool
        Whether update, refresh and precondition are compiled programs, where the
        library has a compiler (JAX): one for each set of blocks and shapes, whatever
        the damping and the decay.  An update then gives up the statistics that it was
        given, so that arrays of an earlier ``state(name)`` are gone; `compilation` says
        what was compiled, and how long it took.
    solving : {"inverse", "triangular", "cheaper"}
        Whether a factor with factored damping is inverted at a refresh, or factorized
        only and solved with at each step; or whichever costs less by `costs`.
    refresh_interval : float, optional
        The number of steps between refreshes that ``"cheaper"`` assumes.
    rates : Rates, optional
        How fast this machine is at what; see `kfac_core.execution.costs`.
    workers : int
        How many threads feed statistics, factorize at a refresh and apply products of
        more than some milliseconds; see `kfac_core.execution.threads`.  With more than one,
        the array library's own threads are shared out among them.

    Raises
    ------
    ConventionError, DampingError, DecayError, UnknownBlockError
        For options out of range.
    UnsupportedError
        For a block that cannot give one of `products`, with the reason.
    """

    def __init__(
        self,
        blocks: Mapping[str, Block],
        *,
        decay: float,
        damping: Scalar | Mapping[str, Scalar],
        damping_rule: DampingRule,
        loss: LossReduction,
        sources: SourceReduction = "sum",
        weight: float = 1.0,
        debias: bool = True,
        burn_in: int = 0,
        factorizations: tuple[Factorization, ...] = ("inverse",),
        failure_budget: int = 0,
        precision: Precision | None = None,
        damping_scaling: DampingScaling = "none",
        shared_factors: Mapping[str, str] | None = None,
        tied_weights: Mapping[str, str] | None = None,
        products: tuple[str, ...] = (),
        mode: EstimationMode | None = None,
        refresh_threshold: float | None = None,
        parameter_statistics: bool = False,
        max_patch_elements: int | None = None,
        compiled: bool = False,
        solving: Literal["inverse", "triangular", "cheaper"] = "inverse",
        refresh_interval: float | None = None,
        rates: Rates | None = None,
        workers: int = 1,
    ) -> None:
        require_decay(decay)
        require_weight(weight)
        require_one_of("damping_scaling", damping_scaling, get_args(DampingScaling))
        if mode is not None:
            require_one_of("mode", mode, get_args(EstimationMode))
        require_one_of("damping_rule", damping_rule, get_args(DampingRule))
        for factorization in factorizations:
            require_one_of("factorizations", factorization, get_args(Factorization))
        self.blocks = dict(blocks)
        require_products(self.blocks, products)
        self.shared_factors = SharedFactors(shared_factors or {}, self.blocks)
        self.tied_weights = TiedWeights(tied_weights or {}, self.blocks)
        self.damping_scaling = damping_scaling
        self.mode = mode
        self.parameter_statistics = parameter_statistics
        self.max_patch_elements = max_patch_elements
        self.conventions = Conventions(loss=loss, sources=sources)
        self.precision = precision or Precision()
        self.debias = debias
        self.burn_in = burn_in
        self.factorizations = factorizations
        self.failure_budget = failure_budget
        self.refresh_threshold = refresh_threshold
        self.damping_rule: DampingRule = damping_rule
        self._decay = decay
        self._weight = weight
        self._damping = self._checked_damping(damping)
        self._states = {name: BlockState() for name in self.blocks}
        if compiled and refresh_threshold is not None:
            raise UnsupportedError(
                "A compiled refresh looks at no value, and so cannot leave out blocks that "
                "did not move. Leave out `refresh_threshold` or `compiled=True`."
            )
        if workers < 1:
            raise ConventionError(
                f"Expected `workers` to be at least 1, got {workers}."
            )
        self.workers = workers
        self.refresh_interval = refresh_interval
        costs = {n: block_costs(b, rates or Rates()) for n, b in self.blocks.items()}
        self._costs = {name: cost for name, cost in costs.items() if cost is not None}
        factored = damping_rule != "exact"
        self._solving = {
            name: solving_of(cost if factored else None, solving, refresh_interval)
            for name, cost in costs.items()
        }
        self._stages = self._compiled_stages() if compiled else None
        self._inverse_stacks: list[InverseStack] | None = None

    @property
    def costs(self) -> CostTable:
        """What each block's stages cost, and how it is solved; ``print`` shows a table."""
        return CostTable(self._costs, self._solving, self.refresh_interval)

    @property
    def compilation(self) -> Compilation | None:
        """What was compiled so far; None without ``compiled=True``."""
        return None if self._stages is None else self._stages.compilation

    @property
    def damping(self) -> Scalar | dict[str, Scalar]:
        """The damping of the next refresh; assigning a bad one changes nothing."""
        return self._damping

    @damping.setter
    def damping(self, damping: Scalar | Mapping[str, Scalar]) -> None:
        self._damping = self._checked_damping(damping)

    @property
    def decay(self) -> float:
        """The decay of the next update; assigning a bad one changes nothing."""
        return self._decay

    @decay.setter
    def decay(self, decay: float) -> None:
        require_decay(decay)
        self._decay = decay

    def state(self, name: str, /) -> BlockState:
        """Return what is held for a block: statistics, operator and counts."""
        return self._states[self._known(name)]

    def report(self) -> dict[str, BlockReport]:
        """Return each block's condition, damping split, certificate and age.

        Returns
        -------
        dict of str to BlockReport
            Plain numbers; this waits for the device.
        """
        return {
            name: report_of(self.blocks[name], state)
            for name, state in self._states.items()
        }

    def mean_gradient(self, name: str, /) -> dict[str, Array]:
        """Return the mean gradient of a block's last batch, by parameter.

        The sum over examples and sources of the gradients of the summed loss, over N:
        first-order statistics that cost next to nothing beside the curvature.

        Parameters
        ----------
        name : str
            The block.

        Returns
        -------
        dict of str to array
            In the parameters' layout.

        Raises
        ------
        UnknownBlockError
            For a name that is no block.
        NotReadyError
            Before the first update, or without ``parameter_statistics``.
        """
        matrix = self.state(name).mean_gradient
        if matrix is None:
            raise NotReadyError(
                f"Block {name!r} has no mean gradient: make the estimator with "
                "parameter_statistics=True, and call `update`."
            )
        return self.blocks[name].matrix_to_parameters(matrix)

    def update(self, batches: Mapping[str, Fed], /, *, check: Check = "raise") -> None:
        """Feed the statistics of some or all blocks.

        Parameters
        ----------
        batches : mapping of str to Batch, GradientBatch or sequence of Batch
            What each block's layer saw; blocks that are left out stay as they are.  A
            sequence is several uses of one layer in each example (tied weights), whose
            rows are shared positions of one and the same weight; so are the batches of
            the names in `tied_weights`.
        check : {"raise", "status"}
            Whether rows that are not finite raise, for which the device is waited for
            once, or leave that block's statistics as they were and set
            ``state(name).statistics.status``.

        Raises
        ------
        UnknownBlockError
            For a name that is no block.
        ConventionError
            Where some uses of a tied weight are fed, and others not.
        ShapeError, DtypeError, MixedArraysError
            For arrays that do not fit, in either mode.
        NotFiniteError
            Naming the argument (``check="raise"``).

        Notes
        -----
        ``R (n^2 + M m^2)`` flops a block for R rows; twice that where the backend has
        no symmetric update.
        """
        grouped = self.tied_weights.grouped(batches)
        fed = {self._known(name): detached(batch) for name, batch in grouped.items()}
        self._states.update(self._updated(fed, check))

    def absorb(self, moments: Mapping[str, Statistics], /) -> None:
        """Feed the statistics of some or all blocks with batches that came in parts.

        To roundoff what one `update` with the whole batch would have done, whatever the
        sizes of the parts.

        Parameters
        ----------
        moments : mapping of str to Statistics
            As `kfac_core.Block.moments` makes them of a part, with this estimator's
            ``conventions`` and ``precision``, and `kfac_core.Block.merge` adds them up.
            (The N of a mean loss is then that of each part.)

        Raises
        ------
        UnknownBlockError
            For a name that is no block.
        """
        states: dict[str, BlockState] = {}
        for name, given in moments.items():
            block, state = self.blocks[self._known(name)], self._states[name]
            old = state.statistics
            if old is None:
                old = block.initial(given.any_weight, precision=self.precision)
            burning = state.updates < self.burn_in
            states[name] = dataclasses.replace(
                state,
                statistics=block.absorb(
                    old,
                    given,
                    decay=1.0 if burning else self._decay,
                    weight=1.0 if burning else self._weight,
                ),
                updates=state.updates + 1,
                age=state.age + 1,
                basis_age=None if state.basis_age is None else state.basis_age + 1,
                moments_missing=False,
                mean_gradient=None,
            )
        self._states.update(states)

    def rebase(
        self,
        names: Iterable[str] | None = None,
        /,
        *,
        moments: MomentStart,
        check: Check = "raise",
    ) -> None:
        """Take the bases of `Eigen` blocks anew, from their factors as they are now.

        To be called before the first `refresh` of such a block, and again on a schedule
        of its own: an eigendecomposition costs ten times what `refresh` does for them.
        An operator stays as it was until the next refresh.

        Parameters
        ----------
        names : iterable of str, optional
            The blocks; all with `Eigen` that have statistics where left out.
        moments : {"kronecker", "carried", "zero"}
            What the second moments are in the new bases; see
            `kfac_core.Eigen.rebased`.  After ``"zero"`` an update has to come before
            the next refresh.
        check : {"raise", "status"}
            Whether a failed eigendecomposition raises, for which the device is waited
            for, or leaves the block's bases as they were, with
            ``state(name).statistics.status`` set.

        Raises
        ------
        UnknownBlockError
            For a name that is no block.
        UnsupportedError
            For a block that has no bases.
        NotReadyError
            For a block without statistics.
        NotFiniteError, FactorizationError
            Where a factor has no certified basis; every block then keeps its bases.
        """
        everywhere = [
            n for n, b in self.blocks.items() if isinstance(b.approximation, Eigen)
        ]
        if names is None:
            chosen = [n for n in everywhere if self._states[n].statistics is not None]
        else:
            chosen = [self._known(name) for name in names]
        rebased: dict[str, BlockState] = {}
        for name in chosen:
            state, approximation = self._states[name], self.blocks[name].approximation
            if not isinstance(approximation, Eigen):
                raise UnsupportedError(
                    f"Block {name!r} ({approximation.name}) has no bases; only Eigen has."
                )
            if state.statistics is None:
                raise NotReadyError(
                    f"Block {name!r} has no statistics yet; call `update` first."
                )
            try:
                new = approximation.rebased(
                    state.statistics, moments=moments, check=check
                )
            except KFACError as error:
                raise type(error)(f"Block {name!r}: {error}") from None
            rebased[name] = dataclasses.replace(
                state, statistics=new, basis_age=0, moments_missing=moments == "zero"
            )
        self._states.update(rebased)

    def refresh(
        self, names: Iterable[str] | None = None, /, *, check: Check = "raise"
    ) -> None:
        """Make new operators, for some or all blocks, with the damping as it is now.

        Parameters
        ----------
        names : iterable of str, optional
            The blocks; all that have statistics where left out.
        check : {"raise", "status"}
            Whether a failed factorization climbs the ladder and then raises, for which
            the device is waited for a few times a block; or is left in the operator's
            ``status()``, where a block keeps its previous operator if it has one.

        Raises
        ------
        UnknownBlockError
            For a name that is no block.
        NotReadyError
            For a block without statistics, or with `Eigen` and no bases yet.
        DampingError
            For a damping that is negative or not finite.
        NotFiniteError, FactorizationError
            Where a block has no earlier operator, or its failures in a row exceed the
            budget; every block then keeps the operator it had.
        """
        refresh = self._refresh_of(names, check)
        stages = self._stages
        made = refresh.run() if stages is None else stages.refresh(refresh)
        self._install(refresh, made)

    def start_refresh(
        self, names: Iterable[str] | None = None, /, *, check: Check = "raise"
    ) -> BackgroundRefresh:
        """Start a refresh in a thread, while steps go on with the operators there are.

        With the statistics and dampings of this moment.  Array libraries compute outside
        Python's lock, so that a refresh takes place beside the caller's own work where
        there is a core (or a device) to spare.

        Parameters
        ----------
        names, check
            As for `refresh`.

        Returns
        -------
        BackgroundRefresh
            Whose ``install()`` puts the new operators in place.  Their ages count the
            updates since this call; what a failure means is as for `refresh`.

        Raises
        ------
        UnknownBlockError, NotReadyError
            As `refresh`.
        """
        refresh = self._refresh_of(names, check)
        if self._stages is not None:
            # The next update gives its statistics up.
            refresh = refresh.of_copies()
        return BackgroundRefresh(refresh, self._install)

    def operator(self, name: str, /) -> CurvatureOperator:
        """Return a block's operator as of its last refresh.

        Parameters
        ----------
        name : str
            The block.

        Returns
        -------
        CurvatureOperator
            Immutable.

        Raises
        ------
        UnknownBlockError
            For a name that is no block.
        NotReadyError
            Before the block's first refresh.
        """
        operator = self._states[self._known(name)].operator
        if operator is None:
            raise NotReadyError(
                f"Block {name!r} has no operator yet; call `update` and `refresh` first."
            )
        return operator

    def precondition(
        self, gradients: Mapping[str, Mapping[str, Any]], /
    ) -> dict[str, dict[str, Any]]:
        """Multiply gradients by the inverse of each block's damped curvature.

        Parameters
        ----------
        gradients : mapping of str to mapping of str to array
            For some or all blocks, the parameters' gradients in the layer's layout.

        Returns
        -------
        dict of str to dict of str to array
            New arrays of the same form, dtypes and devices.

        Raises
        ------
        UnknownBlockError, NotReadyError
            As `operator`.
        ShapeError, DtypeError, MixedArraysError
            For gradients that do not fit.

        Notes
        -----
        Two matrix products a block, ``2 n m (n + m)`` flops; never waits for a device.
        """
        if self._stages is not None:
            operators = {name: self.operator(name) for name in gradients}
            found = self._stages.precondition(operators, gradients)
        else:
            found = self._stacked_directions(gradients)
            others = {n: given for n, given in gradients.items() if n not in found}
            found = found | self.apply("multiply_inverse", others)
        return {name: found[name] for name in gradients}

    def precondition_batches(
        self, batches: Mapping[str, Fed], /
    ) -> dict[str, dict[str, Any]]:
        """Multiply the mean gradients of batches by the inverse of each damped block.

        What `precondition` gives for the mean gradient over the examples, without the
        gradient: for a batch of fewer rows than the layer is wide, the inverse acts on
        the rows.

        Parameters
        ----------
        batches : mapping of str to Batch, GradientBatch or sequence of Batch
            For some or all blocks, with the gradients of the loss that is minimized (not
            with sampled ones).

        Returns
        -------
        dict of str to dict of str to array
            By block and parameter, in the layer's layout.

        Raises
        ------
        UnknownBlockError, NotReadyError
            As `operator`.
        ShapeError, DtypeError, MixedArraysError
            For arrays that do not fit.

        Notes
        -----
        The smaller of ``2 R (n^2 + m^2 + n m)`` and ``2 n m (n + m + R)`` flops a block
        for R rows; never waits for a device.
        """
        grouped = self.tied_weights.grouped(batches)
        directions: dict[str, dict[str, Any]] = {}
        for name, batch in grouped.items():
            block, operator = self.blocks[self._known(name)], self.operator(name)
            try:
                direction = direction_of_batch(
                    block, operator, detached(batch), conventions=self.conventions
                )
            except KFACError as error:
                raise type(error)(f"Block {name!r}: {error}") from None
            directions[name] = block.matrix_to_parameters(direction)
        return directions

    def _stacked_directions(
        self, gradients: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        """Precondition the gradients of small blocks of equal shape as stacks."""
        if self._inverse_stacks is None:
            states = self._states.items()
            operators = {n: s.operator for n, s in states if s.operator is not None}
            self._inverse_stacks = inverse_stacks(operators)
        directions: dict[str, dict[str, Any]] = {}
        for stack in self._inverse_stacks:
            if not all(name in gradients for name in stack.names):
                continue
            vectors = {
                name: vector_of(self.blocks[name], gradients[name], name=name)
                for name in stack.names
            }
            if stack.fits(vectors):
                for name, product in stack.products(vectors).items():
                    block = self.blocks[name]
                    directions[name] = block.matrix_to_parameters(product)
        return directions

    def apply(
        self,
        product: str,
        vectors: Mapping[str, Mapping[str, Any]],
        /,
        *arguments: Any,
        **options: Any,
    ) -> dict[str, dict[str, Any]]:
        """Apply any product of `CurvatureOperator` to parameter-shaped vectors.

        Parameters
        ----------
        product : str
            The name of a function of `CurvatureOperator` that takes and returns a
            vector, such as ``"multiply_matpower"``.
        vectors : mapping of str to mapping of str to array
            For some or all blocks.  An embedding's weight may be `SparseRows`, and is
            that in the result then.
        *arguments, **options
            What the product takes besides the vector, such as an exponent.

        Returns
        -------
        dict of str to dict of str to array
            Of the same form.

        Raises
        ------
        ConventionError
            For an unknown product.
        KFACError
            As `precondition` and the product itself.
        """
        require_one_of("product", product, VECTOR_PRODUCTS)
        operators = {name: self.operator(self._known(name)) for name in vectors}

        def applied(names: list[str]) -> dict[str, Any]:
            return {
                name: apply_product(
                    *(self.blocks[name], operators[name], vectors[name]),
                    product=product,
                    arguments=arguments,
                    options=options,
                    name=name,
                )
                for name in names
            }

        def flops(name: str) -> int:
            return product_flops(self.blocks[name])

        workers, library = self.workers, None
        if workers > 1 and sum(map(flops, vectors)) < WORTH_THREADS:
            workers = 1
        if workers > 1:
            library = backend_of(own_namespace(next(iter(operators.values())).status()))
        found = in_bundles(
            applied, list(vectors), work=flops, workers=workers, library=library
        )
        # What was prepared for this call is kept for the next one.
        self._states.update(
            {
                name: dataclasses.replace(self._states[name], operator=operator)
                for name, (_, operator) in found.items()
                if operator is not operators[name]
            }
        )
        return {name: found[name][0] for name in vectors}

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the estimator holds, as plain dicts and arrays.

        Returns
        -------
        dict
            Copies: statistics and operators of every block, counts, conventions and
            settings; arrays stay of their library and device.
        """
        settings = {
            "damping": self._damping,
            "damping_rule": self.damping_rule,
            "decay": self._decay,
            "weight": self._weight,
            "burn_in": self.burn_in,
        }
        return dump_state(self.blocks, self._states, self._promises(), settings)

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Take over a state that `state_dict` made.

        Parameters
        ----------
        state : mapping
            Of an estimator with the same blocks and conventions.

        Raises
        ------
        StateError
            Where anything does not fit; nothing was changed then.
        """
        states, settings = parse_state(state, self.blocks, self._promises())
        self._states = {name: BlockState(**fields) for name, fields in states.items()}
        self._damping = settings["damping"]
        self.damping_rule = settings["damping_rule"]
        self._decay = settings["decay"]
        self._weight = settings["weight"]
        self.burn_in = settings["burn_in"]
        self._inverse_stacks = None
        if self._stages is not None:
            # The damping rule is part of the programs.
            self._stages = self._compiled_stages()

    def _promises(self) -> dict[str, Any]:
        """Return what a state must share with the estimator that it is loaded into."""
        return {
            "loss": self.conventions.loss,
            "sources": self.conventions.sources,
            "debias": self.debias,
            "mode": self.mode,
        }

    def _known(self, name: str) -> str:
        if name in self.tied_weights.uses:
            block = self.tied_weights.uses[name]
            raise UnknownBlockError(
                f"{name!r} is a further use of the weight of block {block!r}, whose "
                "gradient, summed over the uses, is to be given."
            )
        if name not in self.blocks:
            raise UnknownBlockError(
                f"Unknown block {name!r}; the blocks are "
                f"{', '.join(map(repr, self.blocks))}."
            )
        return name

    def _updated(self, fed: Mapping[str, Fed], check: Check) -> dict[str, BlockState]:
        """Return the states of some blocks after an update."""
        states = {name: self._states[name] for name in fed}
        burning = {n for n, state in states.items() if state.updates < self.burn_in}
        arguments = (
            {name: self._statistics(name, batch) for name, batch in fed.items()},
            dict(fed),
            {name: 1.0 if name in burning else self._decay for name in fed},
            {name: 1.0 if name in burning else self._weight for name in fed},
        )
        if self._stages is not None:
            statistics, gradients = self._stages.update(*arguments)
            # The old arrays are gone.  Where a status is set the new ones are equal.
            for name, new in statistics.items():
                if states[name].statistics is not None:
                    kept = replaced(new, status=new.status * 0)
                    self._states[name] = dataclasses.replace(
                        states[name], statistics=kept
                    )
        else:
            statistics, gradients = updated_blocks(
                self.blocks, *arguments, settings=self._update_settings(check)
            )
        if check == "raise":
            require_finite_rows({name: new.status for name, new in statistics.items()})
        return {
            name: state.updated(statistics[name], gradients.get(name))
            for name, state in states.items()
        }

    def _statistics(self, name: str, batch: Fed) -> Statistics:
        """Return a block's statistics, of nothing before its first batch."""
        statistics = self._states[name].statistics
        if statistics is not None:
            return statistics
        block = self.blocks[name]
        try:
            # Rows check what they are made of; their first part is enough.
            parts = block.row_parts(batch, max_patch_elements=self.max_patch_elements)
            return block.initial(next(iter(parts)).like, precision=self.precision)
        except KFACError as error:
            raise type(error)(f"Block {name!r}: {error}") from None

    def _refresh_of(self, names: Iterable[str] | None, check: Check) -> Refresh:
        """Return the refresh of some blocks as of now."""
        if names is None:
            chosen = [n for n, state in self._states.items() if state.statistics]
            if not chosen:
                raise NotReadyError("No block has statistics yet; call `update` first.")
        else:
            chosen = [self._known(name) for name in names]
        everything = {other: held.statistics for other, held in self._states.items()}
        statistics: dict[str, Statistics] = {}
        for name in chosen:
            own = self._states[name].statistics
            require_ready(name, self.blocks[name], self._states[name])
            assert own is not None
            statistics[name] = self.shared_factors.completed(name, own, everything)
        return Refresh(
            {name: self.blocks[name] for name in chosen},
            {name: self._states[name] for name in chosen},
            statistics,
            {name: self._damping_of(name) for name in chosen},
            self._refresh_settings(),
            check,
        )

    def _compiled_stages(self) -> CompiledStages:
        settings = self._update_settings("status"), self._refresh_settings()
        return CompiledStages(self.blocks, *settings)

    def _update_settings(self, check: Check) -> UpdateSettings:
        return UpdateSettings(
            conventions=self.conventions,
            skip={name: self.shared_factors.taken_by(name) for name in self.blocks},
            max_patch_elements=self.max_patch_elements,
            mean_gradients=self.parameter_statistics,
            workers=self.workers,
            check=check,
        )

    def _refresh_settings(self) -> RefreshSettings:
        return RefreshSettings(
            rule=self.damping_rule,
            debias=self.debias,
            factorizations=self.factorizations,
            precision=self.precision,
            damping_scaling=self.damping_scaling,
            threshold=self.refresh_threshold,
            solving=self._solving,
            workers=self.workers,
        )

    def _install(self, refresh: Refresh, made: dict[str, Made]) -> None:
        """Take over what a refresh made; all of it, or none where it has to raise."""
        new: dict[str, BlockState] = {}
        failed: KFACError | None = None
        for name, found in made.items():
            state = self._states[name]
            if found.error is not None:
                kept = dataclasses.replace(state, failures=state.failures + 1)
                self._states[name] = kept
                if state.operator is None or kept.failures > self.failure_budget:
                    failed = failed or found.error
            elif found.operator is not None:
                new[name] = dataclasses.replace(
                    state,
                    operator=found.operator,
                    age=state.updates - refresh.states[name].updates,
                    failures=0,
                    damping=found.damping,
                    marks=found.marks,
                )
        if failed is not None:
            raise failed
        self._states.update(new)
        self._inverse_stacks = None

    def _damping_of(self, name: str) -> Scalar:
        return self._damping[name] if isinstance(self._damping, dict) else self._damping

    def _checked_damping(
        self, damping: Scalar | Mapping[str, Scalar]
    ) -> Scalar | dict[str, Scalar]:
        if not isinstance(damping, Mapping):
            require_damping(damping)
            return damping
        for name, value in damping.items():
            require_damping(value, name=f"damping[{self._known(name)!r}]")
        missing = sorted(set(self.blocks) - set(damping))
        if missing:
            raise DampingError(
                f"Expected `damping` for every block, but {missing} have none."
            )
        return dict(damping)
