"""`SOAP`: Adam in the eigenbasis of K-FAC's factors, as an optimizer of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any
from warnings import warn

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.optim.adamw import adamw

import kfac_core as kc
from kfac_core_shims.torch import parallel, private
from kfac_core_shims.torch.saving import require_own_state
from kfac_core_shims.torch.soap_rows import RowRecorder
from kfac_core_shims.torch.soap_stacks import (
    Moments,
    Side,
    Stack,
    Vectors,
    Weight,
    real,
)

_DEFAULTS = kc.integration.defaults
_DENSE = 3
"""The bases are renewed at each of so many first steps."""


class SOAP(torch.optim.Optimizer):  # type: ignore[misc]
    r"""Adam in the eigenbasis of K-FAC's factors: a drop-in for AdamW.

    For a weight W with inputs x, output gradients g and the gradient V, with the
    eigenvectors :math:`Q_A` of :math:`A = \mathrm{E}[x x^T]` and :math:`Q_G` of
    :math:`G = \mathrm{E}[g g^T]`,

    .. math:: D = f \, Q_G \, \frac{Q_G^T V Q_A}{\sqrt{v}} \, Q_A^T, \qquad
        M \leftarrow M + \frac{10}{10 + t} (D - M), \qquad
        W \leftarrow (1 - s \eta \lambda) W
        - s \eta \left(M + \frac{a}{10} (D - M)\right)

    with Adam's second moments v in the basis, a factor f of ``sqrt(32 / n)`` for more than
    n = 32 inputs, and the average M of directions over the last tenth of the t steps so
    far; see `kfac_core.roots.average_weights`.

    The share :math:`s \le 1` of the rate follows the cosine of each direction and the
    average of those before, and falls where the gradient is larger than usual:
    ``1 / s = 1 / s - gain * (cosine - excess)``, between ``sqrt(1 + t / 400)``, where
    ``a = 1``, and ``sqrt(25 + t / 20)``.

    Parameters
    ----------
    model : torch.nn.Module, or iterable
        Model, also its ``DistributedDataParallel`` or what ``torch.compile`` returned; or
        parameters, or parameter groups as of any optimizer of PyTorch.
    lr : float
        Learning rate eta of the first step, as for Adam.
    beta2 : float
        Decay of the second moments.
    weight_decay : float
        Decoupled weight decay, as of AdamW.
    update_every : int or callable of int
        Steps between new bases, after three at the first three steps; by default 10, and
        20 from step 60 on.
    gradient_bound : float, optional
        Multiple of the root of its second moment that a gradient's coordinate is bounded
        by, in vectors and weights with two bases, after five steps; None for no bound.
    gain : float, optional
        Change of the share's reciprocal for a cosine of one; None for the whole rate.  See
        `kfac_core.roots.adapted_share`.
    rows_of : torch.nn.Module, optional
        Model whose rows are used, where `model` is its parameters in groups.
    eps : float
        Added to the root of the second moment.
    decay : float
        Decay of the factors at each update.
    block : int
        Largest block of a basis.  A side that is longer than this, or than the other side
        and 128, has a basis of equal diagonal blocks.
    max_rows : int
        Rows of one call, at most, that a factor is taken of.
    process_group : torch.distributed.ProcessGroup, optional
        Processes over which factors are averaged; by default those of the
        ``DistributedDataParallel``, or all of ``torch.distributed``.

    Attributes
    ----------
    factors : dict of str to str
        For each parameter with a basis, where its factors come from: ``"rows"`` of a
        layer, or the ``"gradient"``.

    Raises
    ------
    kfac_core.ConventionError
        For an option out of range.
    kfac_core.UnsupportedError
        For parameters that are divided among processes (DTensor).

    Notes
    -----
    Everything that has no rows and at least two axes takes the factors of its own
    gradient, ``V V^T`` and ``V^T V``, averaged at each step as SOAP is published; biases,
    norms and all other vectors are updated likewise, without a basis.  All axes but the
    first of an array without a layer count as inputs.  Rows are those of backward passes
    since `zero_grad`; their scale does not matter, so that a gradient scaler or a sum in
    the place of a mean changes nothing.

    A step costs four products more than AdamW's, ``4 n m (n + m)`` flops for an n x m
    weight, and every `update_every` steps two Gram matrices of the rows and a QR
    decomposition of each side.  The state is AdamW's and ``2 (n^2 + m^2)`` numbers.

    References
    ----------
    Vyas et al. (2024), "SOAP", arXiv:2409.11321, for Adam in an eigenbasis; George et al.
    (2018), arXiv:1806.03884, for second moments in the eigenbasis of K-FAC's factors;
    Ma and Yarats (2019), arXiv:1810.06801, for steps between a direction and an average.

    Examples
    --------
    >>> import torch
    >>> from kfac_core_shims.torch import SOAP
    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(256, 8)
    >>> y = (x[:, :4] * x[:, 4:]).sum(1, keepdim=True)
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
    ... )
    >>> optimizer = SOAP(model)
    >>> for _ in range(300):
    ...     loss = torch.nn.functional.mse_loss(model(x), y)
    ...     optimizer.zero_grad()
    ...     loss.backward()
    ...     optimizer.step()
    >>> bool(loss < 0.05)
    True
    """

    def __init__(
        self,
        model: torch.nn.Module | Iterable[Any],
        lr: float = 2e-2,
        *,
        beta2: float = 0.9,
        weight_decay: float = 0.0,
        update_every: kc.integration.Interval = _DEFAULTS.SOAP_UPDATE_EVERY,
        gradient_bound: float | None = 1.5,
        gain: float | None = _DEFAULTS.SOAP_GAIN,
        rows_of: torch.nn.Module | None = None,
        eps: float = 1e-10,
        decay: float = 0.8,
        block: int = 1024,
        max_rows: int = 4096,
        process_group: Any = None,
    ) -> None:
        require = kc.constraints.require_range
        kc.integration.interval_at("update_every", update_every, 0)
        positive_or_none = kc.constraints.optional(kc.constraints.POSITIVE)
        require("gradient_bound", gradient_bound, positive_or_none)
        require("gain", gain, positive_or_none)
        require("decay", decay, kc.constraints.DECAY)
        require("block", block, kc.constraints.COUNT)
        require("max_rows", max_rows, kc.constraints.COUNT)
        parameters: Any = model
        if isinstance(model, torch.nn.Module):
            if rows_of is not None:
                raise kc.ConventionError(
                    "`rows_of` is for parameters in groups, and a model was passed. Leave "
                    "it out, or pass the groups."
                )
            parameters, rows_of = model.parameters(), model
        self._options: dict[str, Any] = {
            "update_every": update_every,
            "gradient_bound": gradient_bound,
            "gain": gain,
            "decay": decay,
            "block": block,
            "max_rows": max_rows,
        }
        self._model, self._process_group = rows_of, process_group
        defaults = {
            "lr": lr,
            "beta2": beta2,
            "eps": eps,
            "weight_decay": weight_decay,
            "steps": 0,
            "share": 1.0,
        }
        self._begin()
        super().__init__(parameters, defaults)
        self._record_next()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with its own ``lr``, ``beta2`` or ``weight_decay``."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        constraints = kc.constraints
        for name in ("lr", "eps", "weight_decay"):
            if not isinstance(group[name], torch.Tensor):
                constraints.require_range(name, group[name], constraints.NOT_NEGATIVE)
        constraints.require_range("beta2", group["beta2"], constraints.DECAY)
        for name in ("steps", "share"):
            group[name] = self.param_groups[0][name]
        for p in group["params"]:
            if hasattr(p, "placements"):
                raise kc.UnsupportedError(
                    "A parameter is divided among processes (DTensor); SOAP needs whole "
                    "ones. Use DistributedDataParallel."
                )
        self._key: Any = None

    @property
    def factors(self) -> dict[str, str]:
        """Source of the factors of each parameter with a basis, by its name."""
        sources: dict[str, str] = {}
        for name, sides in self._sides_by_name():
            of_rows = all(side.layer is not None for side in sides)
            sources[name] = "rows" if of_rows else "gradient"
        return sources

    def residuals(self) -> dict[str, float]:
        """Return how far each parameter's bases were from eigenbases when last renewed.

        Returns
        -------
        dict of str to float
            Largest of ``|Q^T C Q|`` off the diagonal relative to the whole, of all blocks.
        """
        residuals: dict[str, float] = {}
        for name, sides in self._sides_by_name():
            values = [s.residual.max() for s in sides if s.residual is not None]
            if values:
                residuals[name] = max(float(value) for value in values)
        return residuals

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and the rows that came with them."""
        self._recorder_clear()
        super().zero_grad(set_to_none)

    @private.hooked
    @private.outside_compilers
    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, with the gradients in ``.grad``.

        Parameters
        ----------
        closure : callable, optional
            Computes the loss and its gradients.

        Returns
        -------
        object
            What `closure` returned.
        """
        device = next(p.device for g in self.param_groups for p in g["params"])
        loss = None
        with private.without_autocast(device) as within:
            if closure is not None:
                with torch.enable_grad():
                    loss = within(closure)()
            self._take_step()
        return loss

    def _take_step(self) -> None:
        """Take one step with the gradients that there are."""
        self._arrange()
        for group, stacks in zip(self.param_groups, self._stacks, strict=True):
            for stack in stacks:
                stack.average(decay=group["beta2"])
        if self._is_due(self.param_groups[0]["steps"] + 1):
            self._renew()
        grads = [[m.gradients() for m in moments] for moments in self._moments]
        jump = self._jump(grads)
        directions = [
            self._directions(group, moments, gradients, jump)
            for group, moments, gradients in zip(
                self.param_groups, self._moments, grads, strict=True
            )
        ]
        self._adapt(directions, jump)
        for group, moments, steps in zip(
            self.param_groups, self._moments, directions, strict=True
        ):
            if moments:
                self._move(group, moments, steps)
            group["steps"] += 1
        self._record_next()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, in the dtypes that it has.

        Parameters
        ----------
        state_dict : dict
            Of `state_dict`.

        Raises
        ------
        kfac_core.StateError
            For the state of another optimizer; nothing was changed then.
        """
        require_own_state(self, state_dict)
        super().load_state_dict(state_dict)
        # PyTorch casts to the parameters' dtype, which may be narrower.
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        loaded = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(saved, loaded, strict=True):
            for name, x in state_dict["state"].get(i, {}).items():
                if isinstance(x, torch.Tensor):
                    self.state[p][name] = x.to(p.device)
        self._record_next()

    def __getstate__(self) -> dict[str, Any]:
        fields = ("_options", "_model", "_process_group")
        return {**super().__getstate__(), **{name: vars(self)[name] for name in fields}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_options" in state:
            self._begin()
            self._record_next()
        self._key = None

    def _begin(self) -> None:
        """Make what no state holds: hooks, and stacks."""
        self._weights: dict[Any, list[Weight]] = {}
        self._key = None
        self._stacks: list[list[Stack]] = []
        self._moments: list[list[Moments]] = []
        self._warned = False
        self._recorder: RowRecorder | None = None
        if self._model is not None:
            self._recorder = RowRecorder(
                self._model,
                parallel.inner(self._model),
                largest=self._options["max_rows"],
            )
            for site in self._recorder.sites.values():
                for w in self._weights_of(site.parameters["weight"]):
                    for side in w.sides.values():
                        key = str(side.layer), side.is_input
                        self._recorder.counts[key] = side.count

    def _is_due(self, step: int) -> bool:
        every = kc.integration.interval_at(
            "update_every", self._options["update_every"], step
        )
        return step <= _DENSE or step % every == 0

    def _record_next(self) -> None:
        """Record the rows of the next step if it renews the bases."""
        if self._recorder is None:
            return
        self._recorder.clear()
        due = self._is_due(self.param_groups[0]["steps"] + 1)
        if due and not self._recorder.wants_statistics:
            self._recorder.install()
        elif not due:
            self._recorder.remove()

    def _recorder_clear(self) -> None:
        if self._recorder is not None:
            self._recorder.clear()

    def _sides_by_name(self) -> Iterator[tuple[str, list[Side]]]:
        """Yield the name of each parameter with a basis, and all sides that have one."""
        names: dict[int, str] = {}
        if self._model is not None:
            plain = parallel.inner(self._model)
            names = {id(p): name for name, p in plain.named_parameters()}
        for p in (p for group in self.param_groups for p in group["params"]):
            sides = [side for w in self._weights_of(p) for side in w.sides.values()]
            if sides:
                yield names.get(id(p), str(tuple(p.shape))), sides

    def _weights_of(self, p: Any) -> list[Weight]:
        """Return a parameter as matrices with bases; none for a vector."""
        if p not in self._weights:
            self._weights[p] = self._described(p)
        return self._weights[p]

    def _described(self, p: Any) -> list[Weight]:
        if p.ndim < 2 or p.is_complex():
            return []
        sites = [] if self._recorder is None else self._recorder.sites.values()
        weights = []
        for site in sites:
            if site.parameters["weight"] is not p or site.is_stacked:
                continue
            rows = site.part.rows.get("weight")
            shape = p.shape if rows is None else p[rows].shape
            sides = {}
            inputs_first = False
            if site.kind == "embedding":
                # Of an embedding only the features are rotated: ids would be mixed.
                sides["right"] = self._side(shape[1], 1, site.name)
            else:
                inputs_first = getattr(site.layer, "weight_layout", "oi") == "io"
                n, m = shape[0], shape[1:].numel()
                for side, a, b in (("left", n, m), ("right", m, n)):
                    is_input = (side == "left") == inputs_first
                    sides[side] = self._side(a, b, site.name, is_input=is_input)
            weight = _weight(p, shape, sides, inputs_first=inputs_first)
            if rows is not None:
                weight.part, weight.rows = f"{site.name}.", rows
            weights.append(weight)
        if len(weights) == 1:
            weights[0].part = ""
        if not weights:
            n, m = p.shape[0], p.shape[1:].numel()
            sides = {"left": self._side(n, m), "right": self._side(m, n)}
            weights = [_weight(p, p.shape, sides)]
        return weights if all(w.sides for w in weights) else []

    def _side(
        self, n: int, other: int, layer: str | None = None, *, is_input: bool = False
    ) -> Side | None:
        blocks = kc.roots.side_blocks(n, other, block=self._options["block"])
        if blocks is None:
            return None
        count, size = blocks
        return Side(count=count, size=size, layer=layer, is_input=is_input)

    def _arrange(self) -> None:
        """Stack the weights that have gradients, and join the other parameters."""
        present = [
            [p for p in group["params"] if p.grad is not None]
            for group in self.param_groups
        ]
        key = [[id(p) for p in ps] for ps in present]
        if key != self._key:
            self._stacks = [self._stacked(ps) for ps in present]
            vectors = [[p for p in ps if not self._weights_of(p)] for ps in present]
            self._moments = [
                _joined([*self._vectors(ps), *stacks])
                for ps, stacks in zip(vectors, self._stacks, strict=True)
            ]
            self._key = key

    def _stacked(self, parameters: list[Any]) -> list[Stack]:
        alike: dict[Any, list[tuple[Weight, Any]]] = {}
        for p in parameters:
            if p.grad.is_sparse:
                raise kc.UnsupportedError(
                    f"A parameter of shape {tuple(p.shape)} has a sparse gradient. Use "
                    "sparse=False in its embedding."
                )
            state = self.state[p]
            weights = self._weights_of(p)
            dtype = _wide(p)
            for w in weights:
                if f"{w.part}step" not in state:
                    zero = torch.zeros(w.shape, dtype=dtype, device=p.device)
                    state[f"{w.part}step"] = zero.new_zeros((), dtype=torch.float32)
                    state[f"{w.part}momentum"] = zero
                    state[f"{w.part}exp_avg_sq"] = zero.clone()
                blocks = tuple(
                    (
                        *(name, side.count, side.size, side.layer is None),
                        f"{w.part}{name}_basis" in state,
                    )
                    for name, side in w.sides.items()
                )
                steps = float(state[f"{w.part}step"])
                form = (w.shape, w.inputs, blocks, dtype, p.device, steps)
                alike.setdefault(form, []).append((w, state))
        return [Stack(*zip(*pairs, strict=True)) for pairs in alike.values()]

    def _vectors(self, parameters: list[Any]) -> list[Vectors]:
        alike: dict[Any, list[tuple[Any, Any]]] = {}
        for p in parameters:
            state = self.state[p]
            if "step" not in state:
                zero = torch.zeros_like(real(p), dtype=_wide(real(p)))
                state["step"] = zero.new_zeros((), dtype=torch.float32)
                state["momentum"], state["exp_avg_sq"] = zero, zero.clone()
            x = state["exp_avg_sq"]
            form = (x.dtype, x.device, p.ndim < 2, float(state["step"]))
            alike.setdefault(form, []).append((p, state))
        return [Vectors(*zip(*pairs, strict=True)) for pairs in alike.values()]

    def _jump(self, grads: list[list[Any]]) -> Any:
        """Return how far the size of these gradients is above what is usual."""
        if self._options["gradient_bound"] is None:
            return 0.0
        sizes = [
            kc.roots.squared_sizes(V, m.exp_avg_sq, steps=m.taken, decay=group["beta2"])
            for group, moments, gradients in zip(
                self.param_groups, self._moments, grads, strict=True
            )
            for m, V in zip(moments, gradients, strict=True)
            if m.is_dense
        ]
        jump = kc.roots.gradient_jump(_total(sizes, 2))
        return jump if isinstance(jump, torch.Tensor) else float(jump)

    def _directions(
        self, group: dict[str, Any], moments: list[Moments], grads: list[Any], jump: Any
    ) -> list[Any]:
        """Return the negative directions of a group, and update its second moments.

        Where the loss jumps, its momentum is shortened.
        """
        if not moments:
            return []
        decay = group["beta2"]
        for i, m in enumerate(moments):
            if m.is_dense:
                grads[i] = kc.roots.bounded_gradient(
                    grads[i],
                    m.exp_avg_sq,
                    steps=m.taken,
                    decay=decay,
                    bound=self._options["gradient_bound"],
                )
                if isinstance(jump, torch.Tensor) or jump > 0:
                    m.exp_avg_sq.mul_(1 + (1 - decay) * jump)
                    m.momentum.mul_(kc.roots.momentum_factor(jump))
        negative = [torch.zeros_like(V) for V in grads]
        # `kfac_core.roots.normalized_gradient`, in one kernel: without a decay, the first
        # moment is the gradient, which it may overwrite.
        adamw(
            negative,
            grads,
            grads,
            [m.exp_avg_sq for m in moments],
            [],
            [m.step for m in moments],
            fused=all(x.device.type in ("cpu", "cuda") for x in negative),
            amsgrad=False,
            beta1=0.0,
            beta2=decay,
            lr=1.0,
            weight_decay=0.0,
            eps=group["eps"],
            maximize=False,
        )
        return [m.directions(d) for m, d in zip(moments, negative, strict=True)]

    def _adapt(self, directions: list[list[Any]], jump: Any) -> None:
        """Set the share of all rates."""
        gain, first = self._options["gain"], self.param_groups[0]
        if gain is None:
            return
        sums = [
            kc.roots.agreement(d, m.momentum)
            for moments, steps in zip(self._moments, directions, strict=True)
            for m, d in zip(moments, steps, strict=True)
            if m.is_dense
        ]
        share = kc.roots.adapted_share(
            first["share"], _total(sums, 3), jump=jump, steps=first["steps"], gain=gain
        )
        for group in self.param_groups:
            group["share"] = share if isinstance(share, torch.Tensor) else float(share)

    def _move(
        self, group: dict[str, Any], moments: list[Moments], directions: list[Any]
    ) -> None:
        """Average the directions of a group, and update its parameters."""
        rate = group["share"] * group["lr"]
        if isinstance(rate, torch.Tensor):
            # In CUDA's program of all parameters, a rate on the device is float32.
            rate = rate.float()
        if group["weight_decay"] != 0:
            targets = [x for m in moments for x in m.targets]
            private.multiply_each(targets, 1 - rate * group["weight_decay"])
        for m, d in zip(moments, directions, strict=True):
            # The kernel has counted this step.
            weight, own = (
                x.to(d) if isinstance(x, torch.Tensor) else x
                for x in kc.roots.average_weights(
                    steps=m.taken - 1, share=group["share"]
                )
            )
            m.momentum.lerp_(d, weight)
            step = torch.lerp(m.momentum, d, own).mul_(rate)
            private.add_to_each(m.targets, m.pieces(step))

    def _renew(self) -> None:
        """Average the factors with the rows of this step, and renew the bases."""
        stacks = [stack for group in self._stacks for stack in group]
        sides = [
            (w, state, name, side)
            for stack in stacks
            for w, state in zip(stack.weights, stack.states, strict=True)
            for name, side in w.sides.items()
        ]
        grams = self._grams([(w, name, side) for w, _, name, side in sides])
        # Sides with one Gram matrix and one factor so far have one factor ever after.
        slots: dict[Any, tuple[Any, list[tuple[Any, str, Side]]]] = {}
        for (w, state, name, side), gram in zip(sides, grams, strict=True):
            place = f"{w.part}{name}"
            key: Any = id(side)
            if gram is not None:
                key = id(gram), id(state.get(f"{place}_factor"))
            slots.setdefault(key, (gram, []))[1].append((state, place, side))
        alike: dict[Any, list[Any]] = {}
        for gram, members in slots.values():
            state, place, side = members[0]
            like = state[f"{place}_factor"] if gram is None else gram
            is_first = f"{place}_basis" not in state
            form = (side.size, like.dtype, like.device, gram is None, is_first)
            alike.setdefault(form, []).append((gram, members))
        for (*_, is_gradients, is_first), entries in alike.items():
            states = [members[0] for _, members in entries]
            C: Any = None
            before: Any = None
            if not is_first:
                before = torch.cat([s[f"{place}_basis"] for s, place, _ in states])
            if is_gradients or not is_first:
                C = torch.cat([s[f"{place}_factor"] for s, place, _ in states])
            if not is_gradients:
                gram = torch.cat([gram for gram, _ in entries])
                C = kc.roots.averaged_factor(C, gram, decay=self._options["decay"])
            Q, residual = kc.roots.renewed_basis(before, C)
            start = 0
            for _, members in entries:
                part = slice(start, start + members[0][2].count)
                start = part.stop
                factor, basis = C[part], Q[part]
                for state, place, side in members:
                    if not is_gradients:
                        state[f"{place}_factor"] = factor
                    state[f"{place}_basis"] = basis
                    side.residual = residual[part]
        for stack in stacks:
            stack.carry()
        # Weights that had no bases may now be stacked with others.
        if any(is_first for *_, is_first in alike):
            self._key = None
            self._arrange()

    def _grams(self, sides: list[tuple[Weight, str, Side]]) -> list[Any]:
        """Return the blocks of each side's Gram matrix, the same object for equal rows.

        None for sides whose factors are those of the gradients at each step.
        """
        recorded: Any = {} if self._recorder is None else self._recorder.grams
        known = [recorded.get((side.layer, side.is_input)) for _, _, side in sides]
        first: dict[int, int] = {}
        keys = self._agreed(
            [
                i if x is None else first.setdefault(id(x), i)
                for i, x in enumerate(known)
            ]
        )
        of_rows: dict[int, Any] = {}
        counts: list[int] = []
        for (w, _, side), key, gram in zip(sides, keys, known, strict=True):
            if side.layer is None or key in of_rows:
                continue
            counts.append(gram is not None)
            if gram is None:
                p = w.parameter
                blocks = (side.count, side.size, side.size)
                gram = torch.zeros(blocks, dtype=_wide(p), device=p.device)
            of_rows[key] = gram
        missing = self._summed(of_rows, counts)
        grams = []
        for (w, name, side), key in zip(sides, keys, strict=True):
            gram = None
            if side.layer is not None:
                gram = of_rows[key]
                if key in missing:
                    gram = _gradient_gram(w, name, side)
            grams.append(gram)
        if missing:
            self._warn_of_missing(
                sorted(
                    {
                        side.layer
                        for (_, _, side), key in zip(sides, keys, strict=True)
                        if side.layer is not None and key in missing
                    }
                ),
                is_all=len(missing) == len(of_rows),
            )
        return grams

    def _agreed(self, keys: list[int]) -> list[int]:
        """Return for each side the first with the same rows, on all processes."""
        group = self._group()
        if group is None or not keys:
            return keys
        # A process that uses one of two layers sees no rows that they share.
        device = next(p.device for g in self.param_groups for p in g["params"])
        # The smallest is the negative of the largest negative: one reduction does for
        # both.
        ends = torch.tensor([keys, [-key for key in keys]], device=device)
        distributed.all_reduce(ends, op=distributed.ReduceOp.MAX, group=group)
        largest, smallest = ends.tolist()
        pairs = zip(largest, smallest, strict=True)
        return [a if a == -b else i for i, (a, b) in enumerate(pairs)]

    def _summed(self, grams: dict[Any, Any], counts: list[int]) -> set[Any]:
        """Add Gram matrices up over processes; return which are of no rows anywhere."""
        group = self._group()
        if group is not None and grams:
            like = next(iter(grams.values()))
            flat = [gram.reshape(-1).to(like) for gram in grams.values()]
            total = torch.cat([*flat, like.new_tensor(counts)])
            distributed.all_reduce(total, group=group)
            *parts, numbers = total.split([*(len(x) for x in flat), len(counts)])
            for (key, gram), part in zip([*grams.items()], parts, strict=True):
                grams[key] = part.reshape(gram.shape).to(gram)
            counts = [int(n) for n in numbers.tolist()]
        return {key for key, n in zip(grams, counts, strict=True) if not n}

    def _group(self) -> Any:
        """Return the processes that have parts of each batch; None for one process."""
        if not (distributed.is_available() and distributed.is_initialized()):
            return None
        group = self._process_group
        model = private.unwrapped(self._model)
        if group is None and isinstance(model, DistributedDataParallel):
            group = model.process_group
        group = distributed.group.WORLD if group is None else group
        return group if distributed.get_world_size(group) > 1 else None

    def _warn_of_missing(self, layers: list[str], *, is_all: bool) -> None:
        if self._warned:
            return
        self._warned = True
        why = (
            "Other layers' rows came: the weights of these are read without calling their "
            "modules, as by linear(x, layer.weight)."
        )
        if is_all:
            why = (
                "No rows came at all, as where the model is called before zero_grad(), or "
                "by a compiled function. For a compiled model pass the result of "
                "torch.compile: SOAP(compiled)."
            )
        warn(
            f"SOAP saw no rows of the layers {layers}, which have gradients, and uses the "
            f"factors of the gradients there. {why}",
            stacklevel=8,
        )


def _joined(parts: list[Stack | Vectors]) -> list[Moments]:
    """Return the moments of parts, of one dtype, device and number of steps each."""
    alike: dict[Any, list[Stack | Vectors]] = {}
    for part in parts:
        state, prefix = part.slots[0]
        x = state[f"{prefix}exp_avg_sq"]
        form = (x.dtype, x.device, part.is_dense, float(state[f"{prefix}step"]))
        alike.setdefault(form, []).append(part)
    return [Moments(members) for members in alike.values()]


def _total(sums: list[Any], count: int) -> Any:
    """Return the sum of vectors of a length, as NumPy's if they are on a CPU."""
    total = torch.zeros(count)
    if sums:
        total = torch.stack([x.to(sums[0]) for x in sums]).sum(0)
    # Reading a number synchronizes a GPU; on a CPU it saves operations.
    return total.numpy() if total.is_cpu else total


def _weight(
    p: Any, shape: Any, sides: dict[str, Side | None], *, inputs_first: bool = False
) -> Weight:
    n, m = shape[0], shape[1:].numel()
    return Weight(
        parameter=p,
        shape=(n, m),
        inputs=n if inputs_first else m,
        sides={name: side for name, side in sides.items() if side is not None},
    )


def _gradient_gram(w: Weight, name: str, side: Side) -> Any:
    """Return the blocks of ``V V^T`` or ``V^T V``."""
    V = w.slice(w.parameter.grad).reshape(w.shape)
    V = V.to(_wide(V))
    rows = V if name == "right" else V.mT
    return kc.roots.diagonal_blocks(rows, side.count)


def _wide(x: Any) -> Any:
    return torch.promote_types(x.dtype, torch.float32)
