"""SOAP: Adam in the eigenbasis of the network's Kronecker factors, for optax."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import kfac_core as kc
from kfac_core_shims.jax.mapped import averaged, require_named
from kfac_core_shims.jax.network import Network

_DEFAULTS = kc.integration.defaults
_DENSE = 3
"""The bases are renewed at each of so many first steps."""

Sides = dict[str, tuple[Any, Any]]


class SOAPState(NamedTuple):
    """Everything that changes from step to step, beside the parameters.

    Attributes
    ----------
    steps : array, 0-d int32
        Number of steps taken.
    share : array, 0-d
        Share of the rate, at most 1.
    momentum, second : pytree
        Average of directions, and Adam's second moments in the bases; both in the
        structure of the parameters.
    factors, bases : dict of str to tuple of array or None
        For the weight of each block those of its input and its output side, shape
        (c, b, b); None for a side without a basis.
    residual : dict of str to tuple of array or None
        How far each basis was from an eigenbasis when it was last renewed.
    """

    steps: Any
    share: Any
    momentum: Any
    second: Any
    factors: Sides
    bases: Sides
    residual: Sides


def soap(
    network: Network,
    learning_rate: kc.integration.Schedule = 2e-2,
    *,
    beta2: float = 0.9,
    weight_decay: float = 0.0,
    update_every: kc.integration.Interval = _DEFAULTS.SOAP_UPDATE_EVERY,
    gradient_bound: float | None = 1.5,
    gain: float | None = _DEFAULTS.SOAP_GAIN,
    eps: float = 1e-10,
    decay: float = 0.8,
    block: int = 1024,
    axis_name: Any = None,
) -> Any:
    r"""Return Adam in the eigenbasis of K-FAC's factors, as an optax transformation.

    With the eigenvectors :math:`Q_A` of :math:`A = \mathrm{E}[x x^T]` and :math:`Q_G` of
    :math:`G = \mathrm{E}[g g^T]` of a weight's rows, and its gradient V as a matrix
    (in, out), the update is :math:`-s \eta (\Delta + \lambda W)` with

    .. math:: D = f \, Q_A \, \frac{Q_A^T V Q_G}{\sqrt{v}} \, Q_G^T, \qquad
        M \leftarrow M + \frac{10}{10 + t} (D - M), \qquad
        \Delta = M + \frac{a}{10} (D - M)

    and the same without bases for all other parameters: biases, norms, and those of no
    block.  v are Adam's second moments in the bases, and f is ``sqrt(32 / n)`` for more
    than n = 32 inputs, or features of an embedding; for a see
    `kfac_core.roots.average_weights`.

    Parameters
    ----------
    network : Network
        Network to train; ``uncovered="keep"`` lets it have other parameters.
    learning_rate : float or callable of int
        Rate, or its schedule by the number of steps taken.
    beta2 : float
        Decay of the second moments.
    weight_decay : float
        Decoupled weight decay.
    update_every : int or callable of int
        Steps between new bases, after three at the first three steps; by default 10, and
        20 from step 60 on.
    gradient_bound : float, optional
        Multiple of the root of its second moment that a gradient's coordinate is bounded
        by, in vectors and weights with two bases, after five steps; None for no bound.
    gain : float, optional
        The share s of the rate follows the cosine of each direction and the average of
        those before, ``1 / s = 1 / s - gain * (cosine - excess)``, see
        `kfac_core.roots.adapted_share`; None for the whole rate.
    eps : float
        Added to the root of the second moment.
    decay : float
        Decay of the factors at each update.
    block : int
        Largest block of a basis; see `kfac_core.roots.side_blocks`.
    axis_name : hashable, optional
        Name of the axis that the step is mapped over by ``shard_map``: gradients are
        averaged and factors summed over it.

    Returns
    -------
    optax.GradientTransformationExtraArgs
        ``update(gradients, state, params, captured=captured)``, with what the network's
        ``vjp`` captured with these very gradients.  The rows are read on the steps that
        renew the bases only.

    Raises
    ------
    ConventionError, DecayError
        For an option out of range.

    References
    ----------
    Vyas et al. (2024), arXiv:2409.11321; George et al. (2018), arXiv:1806.03884; Ma and
    Yarats (2019), arXiv:1810.06801, for steps between a direction and an average.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from kfac_core_shims.jax import Network, soap
    >>> x, y = jax.random.normal(jax.random.key(0), (32, 4)), jnp.arange(32) % 3
    >>> params = {"W": jnp.zeros((4, 3)), "b": jnp.zeros(3)}
    >>> network = Network(lambda params, x: x @ params["W"] + params["b"], params, x)
    >>> optimizer = soap(network, 0.1)
    >>> state = optimizer.init(params)
    >>> @jax.jit
    ... def step(params, state):
    ...     logits, pull = network.vjp(params, x)
    ...     loss, cotangent = jax.value_and_grad(
    ...         lambda z: optax.softmax_cross_entropy_with_integer_labels(z, y).mean()
    ...     )(logits)
    ...     gradients, captured = pull(cotangent, reduction="mean")
    ...     updates, state = optimizer.update(gradients, state, params, captured=captured)
    ...     return optax.apply_updates(params, updates), state, loss
    >>> losses = []
    >>> for _ in range(20):
    ...     params, state, loss = step(params, state)
    ...     losses.append(float(loss))
    >>> losses[-1] < losses[0]
    True
    """
    import optax

    constraints = kc.constraints
    kc.integration.require_positive("learning_rate", learning_rate)
    for name, value in (("weight_decay", weight_decay), ("eps", eps)):
        constraints.require_range(name, value, constraints.NOT_NEGATIVE)
    constraints.require_range("beta2", beta2, constraints.DECAY)
    constraints.require_range("decay", decay, constraints.DECAY)
    kc.integration.interval_at("update_every", update_every, 0)
    positive_or_none = constraints.optional(constraints.POSITIVE)
    constraints.require_range("gradient_bound", gradient_bound, positive_or_none)
    constraints.require_range("gain", gain, positive_or_none)
    constraints.require_range("block", block, constraints.COUNT)
    basis = _Bases(network, block, decay, axis_name)

    def init(params: Any) -> SOAPState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        factors, bases, residual = basis.initial(params)
        share = jnp.ones(())
        return SOAPState(jnp.int32(0), share, zeros, zeros, factors, bases, residual)

    def update(
        updates: Any,
        state: SOAPState,
        params: Any = None,
        *,
        captured: kc.integration.Captured,
        **_: Any,
    ) -> tuple[Any, SOAPState]:
        require_named(axis_name, "soap")
        if weight_decay and params is None:
            raise kc.ArgumentError(
                "Expected the parameters, which `weight_decay` multiplies, got None: call "
                "update(updates, state, params, captured=captured)."
            )
        if axis_name is not None:
            updates = averaged(updates, axis_name)
        step = state.steps + 1
        due = (step <= _DENSE) | (
            step % kc.integration.value_at(update_every, step) == 0
        )
        # Before the moments of this step, which are then in the new bases.
        state = jax.lax.cond(
            due, lambda: basis.renewed(state, captured.batches), lambda: state
        )
        V = basis.rotated(updates, state.bases)
        dense = jax.tree.map(lambda x: x > 0, basis.dense(V))

        def total(function: Any, *trees: Any) -> Any:
            def of_leaves(is_dense: Any, *leaves: Any) -> Any:
                return function(*[jnp.where(is_dense, x, 0) for x in leaves])

            sums = jax.tree.map(of_leaves, dense, *trees)
            return sum(jax.tree.leaves(sums))

        jump: Any = 0.0
        if gradient_bound is not None:
            sizes = partial(kc.roots.squared_sizes, steps=state.steps, decay=beta2)
            jump = kc.roots.gradient_jump(total(sizes, V, state.second))

        def normalized(is_dense: Any, g: Any, v: Any) -> Any:
            bounded = kc.roots.bounded_gradient(
                g, v, steps=state.steps, decay=beta2, bound=gradient_bound
            )
            g = jnp.where(is_dense, bounded, g)
            grown = (v * (1 + (1 - beta2) * jump)).astype(v.dtype)
            v = jnp.where(is_dense, grown, v)
            return kc.roots.normalized_gradient(v, g, step=step, decay=beta2, eps=eps)

        moments = jax.tree.map(normalized, dense, V, state.second)
        second, quotient = jax.tree.transpose(
            jax.tree.structure(V), jax.tree.structure((0, 0)), moments
        )
        d = basis.directions(quotient, state.bases)
        factor = kc.roots.momentum_factor(jump)
        shortened = jax.tree.map(
            lambda is_dense, m: m * jnp.where(is_dense, factor, 1).astype(m.dtype),
            dense,
            state.momentum,
        )
        share = state.share
        if gain is not None:
            adapted = kc.roots.adapted_share(
                share,
                total(kc.roots.agreement, d, shortened),
                jump=jump,
                steps=state.steps,
                gain=gain,
            )
            share = adapted.astype(share.dtype)
        weight, own = kc.roots.average_weights(
            steps=state.steps.astype(share.dtype), share=share
        )
        momentum = jax.tree.map(
            lambda m, d: (m + weight * (d - m)).astype(m.dtype), shortened, d
        )
        d = jax.tree.map(lambda m, d: m + own * (d - m), momentum, d)
        if weight_decay:
            d = jax.tree.map(lambda x, p: x + weight_decay * p, d, params)
        rate = share * kc.integration.value_at(learning_rate, state.steps)
        d = jax.tree.map(lambda x, g: (-rate * x).astype(g.dtype), d, updates)
        state = state._replace(
            steps=step, share=share, momentum=momentum, second=second
        )
        return d, state

    return optax.GradientTransformationExtraArgs(init, update)


class _Bases:
    """The weights of a network that have bases, as matrices of its blocks."""

    def __init__(
        self, network: Network, block: int, decay: float, axis_name: Any
    ) -> None:
        self._leaves, self._wiring = network.leaves, copy.copy(network.wiring)
        self._decay, self._axis = decay, axis_name
        self.layers: dict[str, Any] = {}
        self._sides: dict[str, tuple[Any, Any]] = {}
        for name, known in network.blocks.items():
            layer: Any = known.layer
            kinds = ("dense", "conv", "embedding")
            # Each group of a convolution is a matrix by itself, which a common basis
            # would mix.
            if layer.kind not in kinds or layer.groups > 1:
                continue
            if layer.kind != "embedding":
                layer = dataclasses.replace(layer, bias=False)
            n, m = layer.matrix_shape
            sides = (
                kc.roots.side_blocks(n, m, block=block),
                kc.roots.side_blocks(m, n, block=block),
            )
            # Ids have no rotation: each is a direction of its own.
            if layer.kind == "embedding":
                sides = None, kc.roots.side_blocks(m, 1, block=block)
            if any(sides):
                self.layers[name], self._sides[name] = layer, sides
        # A mask may leave the bias to another transformation.
        self._wiring.slots = {
            name: {"weight": network.wiring.slots[name]["weight"]}
            for name in self.layers
        }

    def initial(self, params: Any) -> tuple[Sides, Sides, Sides]:
        """Return identities, as the factors and bases of before the first step."""
        vectors = self._leaves.vectors(params, self._wiring)
        bases: Sides = {}
        residual: Sides = {}
        for name, vector in vectors.items():
            sides = self._sides[name]
            dtype = jnp.promote_types(vector["weight"].dtype, jnp.float32)
            eyes = [
                None
                if s is None
                else jnp.tile(jnp.eye(s[1], dtype=dtype), (s[0], 1, 1))
                for s in sides
            ]
            bases[name] = (eyes[0], eyes[1])
            zeros = [None if s is None else jnp.zeros(s[0], dtype) for s in sides]
            residual[name] = (zeros[0], zeros[1])
        return bases, bases, residual

    def rotated(self, tree: Any, bases: Sides) -> Any:
        """Return a tree of gradients in the bases."""
        return self._mapped(tree, lambda name, V: kc.roots.in_basis(V, *bases[name]))

    def directions(self, tree: Any, bases: Sides) -> Any:
        """Return a tree in the bases as directions of the parameters."""

        def one(name: str, d: Any) -> Any:
            d = kc.roots.from_basis(d, *bases[name])
            layer = self.layers[name]
            n, m = layer.matrix_shape
            return d * kc.roots.width_factor(m if layer.kind == "embedding" else n)

        return self._mapped(tree, one)

    def dense(self, tree: Any) -> Any:
        """Return ones where gradients are rarely zero: vectors, weights with two bases."""
        vectors = jax.tree.map(lambda x: jnp.full_like(x, x.ndim < 2), tree)

        def one(name: str, x: Any) -> Any:
            # The rows of rare tokens are usually zero: an embedding has one basis.
            return jnp.full_like(x, None not in self._sides[name])

        return self._mapped(vectors, one)

    def renewed(self, state: SOAPState, batches: Any) -> SOAPState:
        """Return the state with new factors and bases, and moments in them."""
        factors, bases, residual = {}, {}, {}
        first_time = state.steps == 0
        for name in state.bases:
            new = [
                self._side(
                    gram, first_time, state.factors[name][i], state.bases[name][i]
                )
                for i, gram in enumerate(self._grams(name, batches))
            ]
            factors[name], bases[name], residual[name] = zip(*new, strict=True)
        old = state.bases

        def carried(name: str, v: Any) -> Any:
            left, right = zip(old[name], bases[name], strict=True)
            return kc.roots.carried_moments(v, left=left, right=right)

        return state._replace(
            second=self._mapped(state.second, carried),
            factors=factors,
            bases=bases,
            residual=residual,
        )

    def _side(self, gram: Any, first_time: Any, C: Any, Q: Any) -> Any:
        if C is None:
            return None, None, None
        gram = gram.astype(C.dtype)
        C = jnp.where(
            first_time,
            kc.roots.averaged_factor(None, gram, decay=self._decay),
            kc.roots.averaged_factor(C, gram, decay=self._decay),
        )
        Q, residual = jax.lax.cond(
            first_time,
            lambda: kc.roots.renewed_basis(None, C),
            lambda: kc.roots.renewed_basis(Q, C),
        )
        return C, Q, residual

    def _grams(self, name: str, batches: Any) -> list[Any]:
        """Return the diagonal blocks of the Gram matrices of both sides' rows."""
        layer = self.layers[name]
        grams: list[Any] = [None, None]
        uses = batches[name]
        for batch in uses if isinstance(uses, tuple) else (uses,):
            batch = dataclasses.replace(batch, bias=None)
            g = batch.output_grads
            if layer.kind == "embedding":
                x = None
                g = g.reshape(-1, g.shape[-1])
                if batch.mask is not None:
                    g = g * batch.mask.reshape(-1, 1)
            else:
                dtype = jnp.promote_types(g.dtype, jnp.float32)
                rows = layer.rows(batch)
                x, g = rows.shared_rows("expand", dtype, xp=jnp)
            for i, side in enumerate((x, g)):
                blocks = self._sides[name][i]
                if side is None or blocks is None:
                    continue
                gram = kc.roots.diagonal_blocks(side, blocks[0])
                grams[i] = gram if grams[i] is None else grams[i] + gram
        if self._axis is not None:
            grams = [None if x is None else jax.lax.psum(x, self._axis) for x in grams]
        return grams

    def _mapped(self, tree: Any, function: Any) -> Any:
        """Return a tree with a function of the name and the matrix of each weight."""
        changed = {}
        for name, vector in self._leaves.vectors(tree, self._wiring).items():
            V = self.layers[name].parameters_to_matrix(vector)
            weight = self.layers[name].matrix_to_parameters(function(name, V))["weight"]
            changed[name] = {"weight": weight.astype(V.dtype)}
        return self._leaves.replaced(tree, changed, self._wiring)
