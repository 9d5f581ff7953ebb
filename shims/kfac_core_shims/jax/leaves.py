"""The leaves of a network's parameters: their names, and the parameters of layers.

Conventions.  A leaf is known by its path in the parameters.  A layer's parameter is a
leaf, a concatenation of leaves, one of the arrays that these are a stack of (where a
``scan`` runs over layers), or one of these with its axes in another order; each of them
has a place of its own in what the blocks are wired to.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import kfac_core as kc
from kfac_core_shims.jax.examples import Counts, ExampleAxis, row_axes
from kfac_core_shims.jax.finding import Layers, Part, Site
from kfac_core_shims.jax.program import Trace
from kfac_core_shims.jax.views import Join, Source, numbers_of


class Leaves:
    """Names of parameters, and the parts of them that blocks have.

    Parameters
    ----------
    params : pytree
        The parameters, or their shapes and dtypes.
    layers : Layers
        What is done with them.

    Attributes
    ----------
    shapes : dict of str to tuple of int
        Name and shape of each parameter of a block, in the order of places.
    places : list of pairs
        For each of these, its part of a leaf, and the turn of its loop or None.
    dtype : dtype
        Dtype of the first floating-point parameter; float32 where there is none.
    """

    def __init__(self, params: Any, layers: Layers) -> None:
        paths = jax.tree_util.tree_leaves_with_path(params)
        self.names = [leaf_name(path) for path, _ in paths]
        self.paths = [tuple(map(_word, _unboxed(path))) for path, _ in paths]
        self.leaf_shapes = [tuple(leaf.shape) for _, leaf in paths]
        self.trained = [
            i
            for i, (_, leaf) in enumerate(paths)
            if jnp.issubdtype(leaf.dtype, jnp.floating)
        ]
        dtypes = [paths[i][1].dtype for i in self.trained]
        self.dtype = dtypes[0] if dtypes else jnp.dtype(jnp.float32)
        self.obstacles = {leaf: list(why) for leaf, why in layers.obstacles.items()}
        self._parts: dict[int, Part] = {}
        for part in (part for site in layers.sites for part in site.parts.values()):
            for leaf in part.leaves:
                if self._parts.setdefault(leaf, part) != part:
                    self._obstruct(leaf, "layers that have it in different forms")
        self.places: list[tuple[Part, int | None]] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        for part in dict.fromkeys(
            self._parts.get(i, Part(i)) for i in range(len(self.names))
        ):
            source = part.leaf
            shape = (
                source.shape if isinstance(source, Join) else self.leaf_shapes[source]
            )
            inner = shape[1:] if part.sliced else shape
            if part.order is not None:
                inner = tuple(inner[axis] for axis in part.order)
            # A loop over a stack of weights is a block for each turn.
            for turn in range(shape[0]) if part.sliced else (None,):
                name = source_name(self.names, source, turn)
                self.shapes[name] = inner
                self.places.append((part, turn))
        self._place_of = {
            (part.leaf, turn): place for place, (part, turn) in enumerate(self.places)
        }
        self._block_names: dict[Any, str] = {}
        self._left_out: set[Any] = set()

    def _obstruct(self, leaf: int, what: str) -> None:
        self.obstacles.setdefault(leaf, []).append(what)

    # --------------------------------------------------------------- which sites count

    def use(
        self,
        sites: Sequence[Site],
        axes: Sequence[ExampleAxis | None],
        batch: Counts,
        trace: Trace,
    ) -> list[Site]:
        """Return the sites whose rows are those of examples and whose uses are all known.

        The others, and their parameters, are remembered with the reason.
        """
        for site, axis in zip(sites, axes, strict=True):
            if axis is not None:
                continue
            shape = trace.shape(site.operation.outputs[0])
            rows = [shape[i] for i in row_axes(site)] if site.y or shape else []
            what = (
                f"a layer with rows {rows}, none of which match the {batch.examples} "
                "examples"
            )
            if site.kind == "marked":
                raise kc.ConventionError(
                    f"Layer {site.name!r}: expected the examples on the first axis, got "
                    f"{what}. Pass x and y with the axis of the examples first."
                )
            for part in site.parts.values():
                for leaf in part.leaves:
                    self._obstruct(leaf, what)
        used = [*sites]
        # Until no other use has a parameter of one that is left out.
        while any(self._leaves_out(site) for site in used):
            used = [site for site in used if _key(site) not in self._left_out]
        self._name(used)
        return [site for site in used if _key(site) in self._block_names]

    def _leaves_out(self, site: Site) -> bool:
        """Leave a site out if a leaf of it has an obstacle, and all of its leaves then."""
        leaves = [leaf for part in site.parts.values() for leaf in part.leaves]
        bad = [leaf for leaf in leaves if leaf in self.obstacles]
        if bad:
            self._left_out.add(_key(site))
            for leaf in leaves:
                if leaf not in bad:
                    self._obstruct(leaf, f"a layer that has {self.names[bad[0]]} too")
        return bool(bad)

    def knows(self, site: Site, /) -> bool:
        """Whether a site is one of a block's; or raise if it was not there before."""
        key = _key(site)
        if key not in self._block_names and key not in self._left_out:
            names = [source_name(self.names, p.leaf) for p in site.parts.values()]
            raise kc.ConventionError(
                f"The parameters {names} are used in another way than when the network "
                "was created. Create a `Network` for each of the two functions."
            )
        return key in self._block_names

    def require_leaves(self, params: Any, /) -> None:
        """Raise for parameters that are more or fewer than when the network was made."""
        names = [
            leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)
        ]
        if len(names) != len(self.names):
            others = sorted(set(names) ^ set(self.names))
            raise kc.ConventionError(
                f"Expected the {len(self.names)} parameters that the network was "
                f"created with, got {len(names)}; only one of the two has "
                f"{', '.join(others[:6])}. Create a `Network` for the new ones."
            )

    def require_known(self, layers: Layers, /) -> None:
        """Raise if a parameter of a block is now also used outside of layers."""
        parts = (part for key in self._block_names for _, part in key[1])
        blocks = {leaf for part in parts for leaf in part.leaves}
        for leaf, why in layers.obstacles.items():
            if leaf in blocks:
                raise kc.ConventionError(
                    f"The parameter {self.names[leaf]} is used in another way than "
                    f"when the network was created: {why[0]}."
                )

    def _name(self, sites: Iterable[Site]) -> None:
        """Give each layer the name of its place in the parameters."""
        kinds: dict[Any, Site] = {}
        for site in sites:
            kinds.setdefault(_key(site), site)
        short = {key: site.name or self._module_of(site) for key, site in kinds.items()}
        names = list(short.values())
        for key, site in kinds.items():
            name = short[key]
            # A module may hold several layers; their leaves tell them apart.
            if site.name is None and names.count(name) > 1:
                leaf = next(iter(site.parts.values())).leaves[0]
                name = "/".join(self.paths[leaf])
                taken = name in self._block_names.values()
                if taken:
                    name += ".attend" if site.kind == "dense" else f".{site.kind}"
            self._block_names[key] = name

    def _module_of(self, site: Site) -> str:
        """Return the path of a layer's weight, without the last word."""
        path = self.paths[next(iter(site.parts.values())).leaves[0]]
        return "/".join(path[:-1] or path)

    # ------------------------------------------------------------------- to the blocks

    def uses(self, sites: Iterable[Site], /) -> list[Any]:
        """Return the uses of layers, as `kfac_core.integration.Wiring` has them."""
        uses: list[Any] = []
        for site in sites:
            name, layer = self._block_names[_key(site)], site.layer
            if not site.sliced:
                uses.append((name, layer, self._slots(site, None)))
                continue
            (length,) = (loop.length for loop in site.loops if loop.sliced)
            uses.extend(
                (f"{name}[{turn}]", layer, self._slots(site, turn))
                for turn in range(length)
            )
        return uses

    def _slots(self, site: Site, turn: int | None) -> dict[str, int]:
        return {
            role: self._place_of[part.leaf, turn] for role, part in site.parts.items()
        }

    def require_all(
        self, slots: Mapping[str, Mapping[str, int]], /, *, uncovered: str
    ) -> dict[str, str]:
        """Return the parameters of no block with the reasons, or raise for them.

        Parameters
        ----------
        slots : mapping of str to mapping of str to int
            The places of each block's parameters.
        uncovered : {"refuse", "keep"}
            Whether to raise.

        Raises
        ------
        UnsupportedError
            For a parameter of no block.
        """
        covered = {place for places in slots.values() for place in places.values()}
        missing: dict[str, str] = {}
        for place, (name, (part, _)) in enumerate(
            zip(self.shapes, self.places, strict=True)
        ):
            leaf = part.leaves[0]
            if place in covered or leaf not in self.trained:
                continue
            obstacles = [x for k, x in self.obstacles.items() if k in part.leaves]
            omitted = leaf in self._parts
            missing[name] = (
                "in a layer without an approximation" if omitted else "unused"
            )
            if obstacles:
                missing[name] = f"used in {obstacles[0][0]}"
        # The gradient of what the outputs do not depend on is zero without a block, too.
        used = {name: why for name, why in missing.items() if why != "unused"}
        if used and uncovered == "refuse":
            (name, why), *others = used.items()
            also = ", ".join(other for other, _ in others)
            raise kc.UnsupportedError(
                f"Expected the parameter {name} to be in one block, not in 0: it is {why}. "
                "Mark its layer by `tap`; or say uncovered='keep', and parameters of no "
                "block keep their gradients."
                f"{f' In none, too, are {also}.' if also else ''}"
            )
        return missing

    # ------------------------------------------------------------ gradients and vectors

    def vectors(
        self, gradients: Any, wiring: kc.integration.Wiring, /
    ) -> dict[str, dict[str, Any]]:
        """Return a tree of gradients as blocks have them, matched by path.

        Parameters
        ----------
        gradients : pytree
            Gradients of the parameters; of all, or as `optax.masked` passes them, of some.
        wiring : Wiring
            The blocks.

        Returns
        -------
        dict of str to dict of str to array
            Vectors of those blocks whose parameters are all there.

        Raises
        ------
        ConventionError
            For a leaf that is not a parameter, and for a block with only some of its
            parameters.
        ShapeError
            For a gradient of another shape than its parameter.
        """
        leaves = self._by_number(gradients)
        vectors: dict[str, dict[str, Any]] = {}
        for name, slots in wiring.slots.items():
            shapes = wiring.blocks[name].layer.parameter_shapes
            parts = {role: self.places[place] for role, place in slots.items()}
            numbers = [leaf for part, _ in parts.values() for leaf in part.leaves]
            missing = [self.names[leaf] for leaf in numbers if leaf not in leaves]
            # `optax.masked` leaves out whole layers.
            if len(missing) == len(numbers):
                continue
            if missing:
                raise kc.ConventionError(
                    f"Block {name!r}: the gradients have no {missing}, but the block's "
                    "other parameters. Mask or partition whole layers."
                )
            vectors[name] = {
                role: taken(leaves[part.leaf], part, turn).reshape(shapes[role])
                for role, (part, turn) in parts.items()
            }
        return vectors

    def replaced(
        self,
        gradients: Any,
        vectors: Mapping[str, Mapping[str, Any]],
        wiring: kc.integration.Wiring,
        /,
    ) -> Any:
        """Return the tree of gradients with the blocks' vectors in their places."""
        leaves = self._by_number(gradients)
        for name, parameters in vectors.items():
            for role, place in wiring.slots[name].items():
                part, turn = self.places[place]
                leaf = part.leaf
                leaves[leaf] = put(leaves[leaf], parameters[role], part, turn)
        return jax.tree.unflatten(jax.tree.structure(gradients), leaves.parted())

    def _by_number(self, gradients: Any) -> LeafArrays:
        leaves = LeafArrays()
        known = {name: i for i, name in enumerate(self.names)}
        for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
            name = leaf_name(path)
            if name not in known:
                raise kc.ConventionError(
                    f"Expected gradients in the structure of the parameters, got a leaf "
                    f"{name!r}; the parameters are {', '.join(self.names[:6])}"
                    f"{', ...' if len(self.names) > 6 else ''}."
                )
            shape = self.leaf_shapes[known[name]]
            if jnp.shape(leaf) != shape:
                raise kc.ShapeError(
                    f"Expected a gradient of shape {shape} for {name}, got "
                    f"{jnp.shape(leaf)}."
                )
            leaves[known[name]] = leaf
        return leaves


class LeafArrays(dict[Source, Any]):
    """The arrays of leaves by number, and of concatenations of them when asked for."""

    def __missing__(self, source: Source) -> Any:
        """Concatenate leaves."""
        if isinstance(source, int):
            raise KeyError(source)
        form = [*source.shape]
        form[source.axis] = -1
        pieces = [jnp.reshape(self[leaf], form) for leaf in source.sources]
        self[source] = jnp.concatenate(pieces, source.axis)
        return self[source]

    def parted(self) -> list[Any]:
        """Return the leaves, with the entries of the concatenations in their places."""
        for source in reversed([*self]):
            if isinstance(source, int):
                continue
            array, leaves = self.pop(source), [self[leaf] for leaf in source.sources]
            unit = array.size // array.shape[source.axis]
            *ends, _ = itertools.accumulate(leaf.size // unit for leaf in leaves)
            pieces = jnp.split(array, ends, source.axis)
            for number, old, x in zip(source.sources, leaves, pieces, strict=True):
                self[number] = x.reshape(old.shape).astype(old.dtype)
        return [*self.values()]


def _key(site: Site) -> Any:
    return (
        site.layer,
        tuple(sorted(site.parts.items(), key=lambda item: item[0])),
        site.name,
    )


def taken(leaf: Any, part: Part, turn: int | None) -> Any:
    """Return a layer's parameter from its leaf."""
    array = leaf if turn is None else leaf[turn]
    return array if part.order is None else jnp.transpose(array, part.order)


def put(leaf: Any, vector: Any, part: Part, turn: int | None) -> Any:
    """Return a leaf with a layer's vector in the place of its parameter."""
    shape = leaf.shape if turn is None else leaf.shape[1:]
    order = part.order
    if order is None:
        array = vector.reshape(shape)
    else:
        back = sorted(range(len(shape)), key=order.__getitem__)
        array = vector.reshape([shape[axis] for axis in order]).transpose(back)
    array = array.astype(leaf.dtype)
    return array if turn is None else leaf.at[turn].set(array)


def source_name(
    names: Sequence[str], source: Source, turn: int | None = None, /
) -> str:
    """Return the name of a leaf, a concatenation of leaves, or one turn of these."""
    name = " + ".join(names[leaf] for leaf in numbers_of(source))
    return name if turn is None else f"{name}[{turn}]"


def leaf_name(path: Any, /) -> str:
    """Return a leaf's path as JAX writes it."""
    name: str = jax.tree_util.keystr(_unboxed(path))
    return name


def _unboxed(path: Any) -> Any:
    """Return a path without the box of a leaf (partitioning, NNX), which may be missing.

    A box has its leaf as an attribute; in a dict, ``"value"`` is a name like others.
    """
    boxes = ("value", "raw_value")
    if len(path) > 1 and getattr(path[-1], "name", None) in boxes:
        return path[:-1]
    return path


def _word(key: Any) -> str:
    """Return a step of a path as a word."""
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
