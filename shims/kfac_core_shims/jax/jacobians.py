"""The Jacobian of residuals by a tree of parameters, as rows of the layers in a trace.

Uses of a layer that the finder covers come as rows, of derivatives of the network too.  All
other parameters come as the derivatives themselves, so that the Jacobian is exact for any
program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

import kfac_core as kc
from kfac_core_shims.jax.finding import Part
from kfac_core_shims.jax.leaves import LeafArrays, leaf_name, put, source_name, taken
from kfac_core_shims.jax.network import Network
from kfac_core_shims.jax.program import forms

Slot: TypeAlias = tuple[Part, int | None]
"""The part of a leaf that a layer's parameter is, and the turn of its loop."""

MIXED = "the residuals mix examples, as batch norm in training does"
SEVERAL = "terms of the loss use it in several ways"

CHUNK = 64
"""Derivatives that are formed at a time."""


# Compiled functions take it and return it: one object, which is told apart by identity.
@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class Columns:
    """The places of a Jacobian's columns in the tree of parameters.

    Attributes
    ----------
    slots : dict of str to dict of str to Slot
        For each layer of the Jacobian, its parameters by role.
    formed : dict of str to str
        Leaves whose derivatives are formed, and why.
    """

    slots: dict[str, dict[str, Slot]]
    formed: dict[str, str]

    def tree(self, vectors: Any, params: Any, /) -> Any:
        """Return vectors of a Jacobian as a tree like `params`; zero elsewhere."""
        leaves, form = jax.tree.flatten(params)
        leaves = LeafArrays(enumerate(map(jnp.zeros_like, leaves)))
        for name, slots in self.slots.items():
            for role, (part, turn) in slots.items():
                vector = vectors[name][role]
                leaves[part.leaf] = put(leaves[part.leaf], vector, part, turn)
        return jax.tree.unflatten(form, leaves.parted())

    def vectors(self, tree: Any, J: kc.samples.Jacobian, /) -> dict[str, Any]:
        """Return a tree like the parameters as vectors of a Jacobian."""
        leaves = LeafArrays(enumerate(jax.tree.leaves(tree)))
        return {
            name: {
                role: taken(leaves[part.leaf], part, turn).reshape(
                    J.layers[name].layer.parameter_shapes[role]
                )
                for role, (part, turn) in slots.items()
            }
            for name, slots in self.slots.items()
        }


@dataclass(frozen=True)
class _Piece:
    """The rows of one layer in one term."""

    layer: Any
    slots: dict[str, Slot]
    rows: Any


@dataclass(eq=False)
class JacobianFinder:
    """Finds the rows of layers below the terms of a loss.

    Attributes
    ----------
    terms : callable
        ``(params, *data) -> [r, ...]``, arrays of shape (N, C).
    """

    terms: Callable[..., list[Any]]
    _networks: dict[Any, list[Network | str]] = field(default_factory=dict)

    def jacobian(
        self,
        params: Any,
        data: Sequence[Any],
        /,
        *,
        vectors: Sequence[Any],
        scales: Sequence[float],
        mixed: frozenset[int] = frozenset(),
    ) -> tuple[kc.samples.Jacobian, Columns, Any]:
        """Return the Jacobian of the terms, each times its scale.

        Parameters
        ----------
        params, data : pytree, sequence of pytree
            Arrays.
        vectors : sequence of array, shapes (C, N, C')
            What is pulled back from each term, for C rows of each example.
        scales : sequence of float
            Factors on the rows of each term.
        mixed : frozenset of int
            Leaves of layers that do not have rows of one example each.

        Returns
        -------
        J : Jacobian
            The terms one after the other, an example's outputs side by side: R rows in all,
            each an example of one output.
        columns : Columns
            Where the parameters of its layers are.
        unlike : array of bool
            For each leaf, whether ``J^T c`` by rows is not what a backward pass gives.
        """
        leaves = jax.tree.leaves(params)
        names = [leaf_name(p) for p, _ in jax.tree_util.tree_leaves_with_path(params)]
        reasons = dict.fromkeys(mixed, MIXED)
        pulls: list[Any] = []
        terms: list[dict[Any, _Piece]] = []
        for i, network in enumerate(self._networks_of(params, data)):
            if isinstance(network, str):
                reasons |= dict.fromkeys(_trained(leaves), network)
                continue
            _, pull = network.vjp(params, *data)
            pulls.append(pull)
            terms.append(_pieces(network, pull(_sources(vectors[i])), vectors[i]))
            reasons |= _missing(network, terms[-1])
        # A weight that several terms use is one layer of the Jacobian, with rows of
        # all.
        groups = _groups(terms, reasons)
        sizes = [v.shape[:2] for v in vectors]
        samples = sum(math.prod(size) for size in sizes)
        layers: dict[str, Any] = {}
        slots: dict[str, dict[str, Slot]] = {}
        for key, widest in groups.items():
            name = _name_of(widest, names)
            pieces = [term.get(key) for term in terms]
            joined = _joined(pieces, sizes, scales, widest)
            layers[name] = kc.samples.LayerJacobian(joined, widest.layer)
            slots[name] = widest.slots
        unlike = jnp.zeros(len(leaves), bool)
        if layers:
            by_rows = kc.samples.Jacobian(layers, (samples,))
            of_layers = Columns(slots, {})
            # At each step: data may say which examples a residual depends on.
            unlike = _unlike(by_rows, of_layers, pulls, vectors, scales, params)
        formed = [i for i in _trained(leaves) if i in reasons]
        for i, D in self._formed(params, data, formed, vectors, scales).items():
            shape, name = leaves[i].shape or (1,), f"{names[i]} (formed)"
            layer = kc.Parameters(shapes={"value": shape})
            formed_rows = {"value": D.reshape(samples, *shape)}
            of_leaf = kc.samples.Jacobian.of({name: layer}, {name: formed_rows})
            layers |= of_leaf.layers
            slots[name] = {"value": (Part(i), None)}
        if not layers:
            raise kc.ArgumentError("The residuals do not depend on any parameter.")
        J = kc.samples.Jacobian(layers, (samples,))
        return J, Columns(slots, {names[i]: reasons[i] for i in formed}), unlike

    def _networks_of(self, params: Any, data: Any) -> list[Network | str]:
        """Return the network of each term, or why its layers cannot be known."""
        arguments = forms((params, *data))
        leaves, structure = jax.tree.flatten(arguments)
        # Finding layers traces the residuals, so it is done once for each form of the
        # data.
        key = structure, tuple(leaves)
        if key not in self._networks:
            count = len(jax.eval_shape(self.terms, *arguments))
            self._networks[key] = [
                _network(self.terms, i, arguments) for i in range(count)
            ]
        return self._networks[key]

    def _formed(
        self,
        params: Any,
        data: Any,
        numbers: Sequence[int],
        vectors: Sequence[Any],
        scales: Sequence[float],
    ) -> dict[int, Any]:
        """Return derivatives of all rows by some leaves, shape (R, *shape)."""
        if not numbers:
            return {}
        leaves, form = jax.tree.flatten(params)

        def rows(chosen: Any) -> Any:
            whole = list(leaves)
            for i, leaf in zip(numbers, chosen, strict=True):
                whole[i] = leaf
            terms = self.terms(jax.tree.unflatten(form, whole), *data)
            return jnp.concatenate(
                [
                    scale * jnp.einsum("nk,cnk->nc", r, v).reshape(-1)
                    for r, v, scale in zip(terms, vectors, scales, strict=True)
                ]
            )

        chosen = [leaves[i] for i in numbers]
        # Whichever takes fewer passes: one for each number, or one for each row.
        values = _by_columns(rows, chosen) or _by_rows(rows, chosen)
        return dict(zip(numbers, values, strict=True))


def _by_rows(rows: Callable[[Any], Any], chosen: list[Any]) -> list[Any]:
    """Return the Jacobian by a backward pass for each row, some rows at a time."""
    # Some rows at a time: a single `vmap` would hold all R graphs at once.
    values, pull = jax.vjp(rows, chosen)
    eye = jnp.eye(values.size, dtype=values.dtype)
    derivatives: list[Any] = jax.lax.map(lambda c: pull(c)[0], eye, batch_size=CHUNK)
    return derivatives


def _by_columns(rows: Callable[[Any], Any], chosen: list[Any]) -> list[Any] | None:
    """Return the Jacobian by a forward derivative for each number, if these are fewer.

    None also for a program that has no forward derivatives, as with `jax.custom_vjp`.
    """
    sizes = [leaf.size for leaf in chosen]
    if sum(sizes) >= jax.eval_shape(rows, chosen).size:
        return None
    flat, unravel = ravel_pytree(chosen)
    eye = jnp.eye(flat.size, dtype=flat.dtype)
    try:
        _, push = jax.linearize(lambda flat: rows(unravel(flat)), flat)
        columns = jax.lax.map(push, eye, batch_size=CHUNK)
    except TypeError:
        return None
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
    return [
        jnp.moveaxis(part.reshape(*leaf.shape, -1), -1, 0).astype(leaf.dtype)
        for part, leaf in zip(jnp.split(columns, ends), chosen, strict=True)
    ]


def _network(terms: Any, i: int, arguments: Any) -> Network | str:
    def term(params: Any, *data: Any) -> Any:
        return terms(params, *data)[i]

    try:
        return Network(term, *arguments, uncovered="keep")
    except kc.KFACError as error:
        return (
            f"{error} (Pass the points of every term of the loss as arguments of the "
            "residuals, with the examples on the first axis.)"
        )


def _trained(leaves: Sequence[Any]) -> list[int]:
    kinds = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]
    return [i for i, floating in enumerate(kinds) if floating]


def _sources(vectors: Any) -> kc.losses.SourceVectors:
    """Return vectors whose rows are not scaled by their number."""
    return kc.losses.SourceVectors(vectors, "exact", len(vectors), "mean")


def _pieces(network: Network, captured: Any, vectors: Any) -> dict[Any, _Piece]:
    """Return a term's layers whose rows are those of its examples."""
    C, N = vectors.shape[:2]
    pieces: dict[Any, _Piece] = {}
    for name, batches in captured.batches.items():
        layer = network.blocks[name].layer
        try:
            J = kc.samples.Jacobian.of({name: layer}, {name: batches})
        except kc.KFACError:
            continue
        rows = J.layers[name].rows
        # Rows of other numbers, such as those of embedded positions, are of no example.
        if (rows.examples, rows.sources) not in ((N, C), (N * C, 1)):
            continue
        slots = _slots(network, name)
        pieces[next(iter(slots.values()))] = _Piece(layer, slots, rows)
    return pieces


def _slots(network: Network, name: str) -> dict[str, Slot]:
    """Return where the parameters of a block lie in the tree."""
    slots = network.wiring.slots[name]
    return {role: network.leaves.places[place] for role, place in slots.items()}


def _missing(network: Network, pieces: Mapping[Any, _Piece]) -> dict[int, str]:
    """Return the leaves that a term depends on beside its pieces, and why."""
    places = dict(zip(network.leaves.shapes, network.leaves.places, strict=True))
    reasons = {
        leaf: f"it is {why}"
        for name, why in network.uncovered.items()
        for leaf in places[name][0].leaves
        if why != "unused"
    }
    covered = {slot for piece in pieces.values() for slot in piece.slots.values()}
    for name in network.blocks:
        for part, turn in _slots(network, name).values():
            if (part, turn) not in covered:
                why = "its rows are not those of the residuals' examples"
                reasons |= dict.fromkeys(part.leaves, why)
    return reasons


def _groups(
    terms: Sequence[Mapping[Any, _Piece]], reasons: dict[int, str]
) -> dict[Any, _Piece]:
    """Return each layer of any term in its widest form: with a bias, if any term has.

    Leaves that no layer can have are added to `reasons`.
    """
    groups: dict[Any, _Piece] = {}
    for key, piece in (item for term in terms for item in term.items()):
        # A term in derivatives of the network has no bias, the term of values has one.
        if key not in groups or len(piece.slots) > len(groups[key].slots):
            groups[key] = piece
    for key, piece in (item for term in terms for item in term.items()):
        if not _is_part(piece, groups[key]):
            for part, _ in piece.slots.values():
                reasons |= dict.fromkeys(part.leaves, SEVERAL)
    claims = [slot for piece in groups.values() for slot in piece.slots.values()]
    for part, turn in claims:
        same_leaf = {o for o, _ in claims if {*o.leaves} & {*part.leaves}}
        if len(same_leaf) > 1 or claims.count((part, turn)) > 1:
            reasons |= dict.fromkeys(part.leaves, SEVERAL)
    # A layer with a parameter that is formed is formed as a whole.
    while True:
        dropped = [
            key
            for key, piece in groups.items()
            if any({*reasons}.intersection(p.leaves) for p, _ in piece.slots.values())
        ]
        if not dropped:
            return groups
        for key in dropped:
            for part, _ in groups.pop(key).slots.values():
                why = "its layer has a parameter that is formed"
                reasons |= dict.fromkeys({*part.leaves} - {*reasons}, why)


def _is_part(piece: _Piece, widest: _Piece) -> bool:
    """Whether a layer is the widest one, or that without its bias, or its transpose."""
    if piece.slots == widest.slots and piece.layer == widest.layer:
        return type(piece.rows) is type(widest.rows)
    dense = isinstance(piece.layer, kc.Dense) and isinstance(widest.layer, kc.Dense)
    if not dense or not piece.slots.items() <= widest.slots.items():
        return False
    return not _is_transposed(piece, widest) or len(piece.slots) == 1


def _is_transposed(piece: _Piece, widest: _Piece) -> bool:
    """Whether a layer multiplies by the transpose of the widest one's weight."""
    # A weight with an axis of length one has one layout either way.
    ways = [
        (layer.in_features, layer.out_features, layer.weight_layout)
        for layer in (piece.layer, widest.layer)
        if isinstance(layer, kc.Dense)
    ]
    return len(set(ways)) > 1


def _name_of(piece: _Piece, names: Sequence[str]) -> str:
    """Return the name of a layer's first leaf; of a turn of a loop with its number."""
    part, turn = next(iter(piece.slots.values()))
    return source_name(names, part.leaf, turn)


def _joined(
    pieces: Sequence[_Piece | None],
    sizes: Sequence[tuple[int, int]],
    scales: Sequence[float],
    widest: _Piece,
) -> Any:
    """Return the rows of a layer of all terms, one after the other."""
    parts: list[Any] = []
    forms: list[tuple[int, int]] = []
    for piece, (C, N) in zip(pieces, sizes, strict=True):
        rows: Any = None if piece is None else piece.rows
        form = N, C
        if piece is not None and _is_transposed(piece, widest):
            rows, form = kc.samples.by_output(rows, N, C), (N * C, 1)
            # The derivative by the transpose is sum g x^T.
            x, g = rows.output_grads[0], rows.inputs[None]
            rows = kc.layers.Rows(x, g, None, homogeneous=False)
        parts.append(rows)
        forms.append(form)
    return kc.samples.joined_rows(parts, forms, scales=scales)


def _unlike(
    J: kc.samples.Jacobian,
    columns: Columns,
    pulls: Sequence[Any],
    vectors: Sequence[Any],
    scales: Sequence[float],
    params: Any,
) -> Any:
    """Return for each leaf whether ``J^T c`` by rows is not what `jax.vjp` computes.

    Rows are found from the sum of the residuals, so that one that depends on several
    examples would count for the wrong ones; for an uneven c the two then differ.
    """
    dtype = vectors[0].dtype
    c = jnp.cos(jnp.arange(J.samples, dtype=dtype))
    by_vjp: Any = None
    start = 0
    for pull, v, scale in zip(pulls, vectors, scales, strict=True):
        C, N = v.shape[:2]
        piece = c[start : start + C * N].reshape(N, C)
        start += C * N
        cotangent = scale * jnp.einsum("nc,cnk->nk", piece, v)
        gradient, _ = pull(cotangent, reduction="sum")
        add = gradient if by_vjp is None else jax.tree.map(jnp.add, by_vjp, gradient)
        by_vjp = add
    flags = jnp.zeros(len(jax.tree.leaves(params)), bool)
    expected = columns.vectors(by_vjp, J)
    for name, parts in kc.samples.unlike(J, c, expected).items():
        for role, differs in parts.items():
            leaves = jnp.asarray(columns.slots[name][role][0].leaves)
            flags = flags.at[leaves].set(flags[leaves] | differs)
    return flags
