"""The blocks of a network function, and its derivatives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

import kfac_core as kc
from kfac_core_shims.jax.compiled import compiler_options
from kfac_core_shims.jax.examples import (
    Counts,
    ExampleAxis,
    Where,
    counts,
    doubled,
    example_axes,
    reversed_lengths,
    row_axes,
    traced_twice,
    with_examples,
)
from kfac_core_shims.jax.finding import Layers, Site, find
from kfac_core_shims.jax.leaves import Leaves
from kfac_core_shims.jax.mapped import explicit_axes, gathered
from kfac_core_shims.jax.program import (
    Operation,
    Program,
    Trace,
    bound,
    carried_by,
    forms,
    run,
    traced,
)
from kfac_core_shims.jax.rows import Rows, in_roles, joined_uses


class Network:
    """A network function, the ``blocks`` found in it, and its derivatives.

    Layers are found from what the function does with its parameters, whatever library it
    was written with: products with a matrix, convolutions, embeddings, elementwise scales
    and shifts, also within ``jit``, ``remat``, ``scan`` and ``vmap``.  A weight that is
    used several times is one block.  `tap` marks a layer of another kind.

    Parameters
    ----------
    function : callable
        ``(params, *inputs) -> outputs``, or ``-> (outputs, aux)`` with `has_aux`.  The
        first axis of the outputs is that of the examples.
    params, *inputs : pytree
        Arrays, or their shapes and dtypes; the function is traced with them.
    approximation : callable
        ``(name, layer) -> Approximation``; None leaves that use of a layer out.
    uncovered : {"refuse", "keep"}
        Whether parameters of no block are an error, or keep their gradients.
    has_aux : bool
        Whether the function returns something beside its outputs.

    Attributes
    ----------
    blocks : dict of str to Block
        Blocks, named by the place of their weights in `params`.
    uncovered : dict of str to str
        Parameters of no block, and why they are in none.
    tied : set of str
        Blocks of a weight that both embeds ids and makes logits.
    outputs : int
        Outputs P of a row, the most of several.

    Raises
    ------
    UnsupportedError
        For a parameter of no block (``uncovered="refuse"``), or of two.
    ConventionError
        For a layer whose rows are not those of examples.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from kfac_core_shims.jax import Network
    >>> params = {"fc": {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}}
    >>> network = Network(
    ...     lambda params, x: x @ params["fc"]["w"] + params["fc"]["b"],
    ...     params,
    ...     jnp.ones((8, 4)),
    ... )
    >>> [*network.blocks]
    ['fc']
    """

    def __init__(
        self,
        function: Callable[..., Any],
        params: Any,
        /,
        *inputs: Any,
        approximation: Callable[[str, Any], Any] = kc.integration.usual_approximation,
        uncovered: Literal["refuse", "keep"] = "refuse",
        has_aux: bool = False,
    ) -> None:
        constraints = kc.constraints
        constraints.require_options(
            locals(),
            function=constraints.FUNCTION,
            approximation=constraints.FUNCTION,
            uncovered=constraints.one_of("refuse", "keep"),
            has_aux=constraints.FLAG,
        )
        self.function, self.has_aux = function, has_aux
        self.structure = jax.tree.structure(inputs)
        # By batch and shapes: finding the axes traces the network once more.
        self._axes: dict[Any, list[Where]] = {}
        layers, axes, trace, batch = self._layers(params, inputs)
        outputs = jax.tree.leaves(trace.outputs[0] if has_aux else trace.outputs)
        self.outputs = max((z.shape[-1] for z in outputs if z.ndim > 1), default=1)
        self.leaves = Leaves(forms(params), layers)
        used = self.leaves.use(layers.sites, axes, batch, trace)
        self.tied = {
            name for site in used if site.tied for name, *_ in self.leaves.uses([site])
        }

        def chosen(name: str, layer: kc.Layer) -> Any:
            if name not in self.tied:
                return approximation(name, layer)
            return _of_tied(name, layer, approximation)

        self.wiring = kc.integration.Wiring(
            self.leaves.uses(used),
            self.leaves.shapes,
            approximation=chosen,
        )
        self.blocks = self.wiring.blocks
        self.uncovered = self.leaves.require_all(self.wiring.slots, uncovered=uncovered)
        self._require_examples(layers, axes, trace, batch)

    def __repr__(self) -> str:
        table = kc.integration.coverage_table(self.blocks, self.uncovered)
        return f"Network(blocks={len(self.blocks)})\n{table}"

    def vjp(
        self, params: Any, /, *inputs: Any, mask: Any = None
    ) -> tuple[Any, Callable[..., Any]]:
        """Return the outputs (with `has_aux`, also aux), and a function that pulls back.

        Parameters
        ----------
        params, *inputs : pytree
            Arrays.
        mask : array of bool, shape (N, T), optional
            Which rows count in all dense layers and embeddings whose rows have these axes:
            False for the padding of sequences of unequal lengths.

        Returns
        -------
        outputs : pytree
            What the function returns.
        pull : callable
            ``pull(cotangent, reduction="mean") -> (gradients, Captured)``, with the
            reduction of the loss whose derivative by the outputs the cotangent is;
            ``pull(made) -> Captured`` for `kfac_core.losses.SourceVectors`.

        Raises
        ------
        ConventionError
            For more or fewer parameters than those that the network was made with; for a
            layer that now merges examples with other axes, where its approximation
            must tell them apart.  From ``pull``, for a mask that no layer's rows have the
            axes of, or one that merged or reversed them.
        UnsupportedError
            For parameters that are sharded over an explicit axis of a mesh.
        ArgumentError
            From ``pull``, for a cotangent that is not of the outputs' structure.

        Notes
        -----
        Inside a mapped axis (``pmap``, ``shard_map``) gradients are those of the local
        examples; ``KFAC(axis_name=...)`` averages them.
        """
        self.leaves.require_leaves(params)
        mask = gathered(mask)
        _require_replicated(params)
        params, inputs = jax.tree.map(jnp.asarray, (params, inputs))
        params = _as_varying(params, inputs)
        layers, axes, trace, batch = self._layers(params, inputs)
        self.leaves.require_known(layers)
        self._require_examples(layers, axes, trace, batch)
        sites = [
            (site, axis)
            for site, axis in zip(layers.sites, axes, strict=True)
            if self.leaves.knows(site) and axis is not None
        ]
        # The derivative by zeros that are added to an output is its output gradient.
        zeros = [_zeros(site, trace) for site, _ in sites]
        # Where an axis was reversed, a mask in the caller's order would count padding.
        turned: list[set[int]] = [
            set() if mask is None else reversed_lengths(trace, site.inputs)
            for site, _ in sites
        ]

        def function(params: Any, zeros: Any) -> Any:
            capture = _Capture(trace, [site for site, _ in sites])
            values = jax.tree.leaves((params, inputs))
            results = capture.run(trace.program, values, dict(enumerate(zeros)))
            result = jax.tree.unflatten(jax.tree.structure(trace.outputs), results)
            outputs, aux = result if self.has_aux else (result, None)
            return outputs, (aux, [capture.seen[i] for i in range(len(sites))])

        # The layers' inputs come out as aux, so that one forward pass does for both.
        outputs, back, (aux, seen) = jax.vjp(function, params, zeros, has_aux=True)

        def pull(cotangent: Any, /, *, reduction: Any = None) -> Any:
            sources = (
                cotangent if isinstance(cotangent, kc.losses.SourceVectors) else None
            )
            vectors = cotangent if sources is None else sources.vectors
            _require_structure(vectors, outputs)
            vectors = jax.tree.map(
                lambda v, y: _like_output(v, y, sources=sources is not None),
                vectors,
                outputs,
            )
            # Several vectors go back at once; the forward pass is not repeated.
            gradients, grads = (back if sources is None else jax.vmap(back))(vectors)
            inputs_seen, output_grads = gathered((seen, grads))
            captured = self._captured(
                sites,
                inputs_seen,
                output_grads,
                batch,
                mask,
                turned,
                sources,
                reduction,
            )
            return (gradients, captured) if sources is None else captured

        return ((outputs, aux) if self.has_aux else outputs), pull

    @functools.cached_property
    def compiled_batches(self) -> Any:
        """A compiled ``(params, inputs, noise, draw) -> batches`` of all blocks.

        ``draw(outputs, spec -> noise)`` returns the vectors to backpropagate.
        """

        def batches(params: Any, inputs: Any, noise: Any, draw: Any) -> Any:
            outputs, pull = self.vjp(params, *inputs)
            outputs = outputs[0] if self.has_aux else outputs
            return pull(draw(outputs, lambda spec: noise)).batches

        options = compiler_options(jax.default_backend())
        known = None if options is None else dict(options)
        return jax.jit(batches, static_argnums=3, compiler_options=known)

    def _layers(
        self, params: Any, inputs: Any
    ) -> tuple[Layers, list[ExampleAxis | None], Trace, Counts]:
        """Return the layers, and where the examples of each use are."""
        layers, trace, batch = self._traced_layers(params, inputs)
        sites: list[Site] = []
        axes: list[ExampleAxis | None] = []
        places = self._example_axes(params, inputs, layers, trace, batch)
        for site, where in zip(layers.sites, places, strict=True):
            if not isinstance(where, tuple):
                sites.append(site)
                axes.append(where)
                continue
            uses = [with_examples(site, meeting, trace) for meeting in where]
            met = [use for use in uses if use is not None]
            if len(met) < len(uses):
                sites.append(site)
                axes.append(None)
                continue
            sites.extend(met)
            axes.extend(ExampleAxis(0, "first") for _ in met)
        return replace(layers, sites=sites), axes, trace, batch

    def _traced_layers(self, params: Any, inputs: Any) -> tuple[Layers, Trace, Counts]:
        trace = traced(self.function, params, inputs)
        result = trace.outputs
        if self.has_aux and not (isinstance(result, tuple) and len(result) == 2):
            raise kc.ConventionError(
                "has_aux=True: expected a function that returns a pair (outputs, aux), "
                f"got {result!r}."
            )
        outputs = trace.outputs[0] if self.has_aux else trace.outputs
        places = range(len(jax.tree.leaves(outputs)))
        layers = find(trace, places)
        leaves = jax.tree.leaves(inputs)

        def doubles(batch: Counts) -> bool:
            return any(
                doubled(twice, places, batch)
                for twice in traced_twice(self.function, params, inputs, batch)
            )

        return layers, trace, counts(leaves, outputs, doubles=doubles)

    def _example_axes(
        self, params: Any, inputs: Any, layers: Layers, trace: Trace, batch: Counts
    ) -> list[Where]:
        """Return `example_axes`, cached by layers and the places of the trace."""
        key = (
            batch,
            trace.signature,
            *(
                (site.kind, tuple(site.parts.items()), site.x, site.y)
                for site in layers.sites
            ),
        )
        if key not in self._axes:
            outputs = trace.outputs[0] if self.has_aux else trace.outputs
            self._axes[key] = example_axes(
                self.function,
                params,
                inputs,
                trace=trace,
                layers=layers,
                outputs=range(len(jax.tree.leaves(outputs))),
                batch=batch,
            )
        return self._axes[key]

    def _captured(
        self,
        sites: Sequence[tuple[Site, ExampleAxis]],
        seen: Sequence[Any],
        grads: Sequence[Any],
        batch: Counts,
        mask: Any,
        turned: Sequence[set[int]],
        sources: Any,
        reduction: Any,
    ) -> kc.integration.Captured:
        """Return the batches of all blocks."""
        uses: list[Any] = []
        of_use: list[Site] = []
        pairs: list[Any] = []
        vectors: list[Any] = []
        declared = "sum" if sources is not None else reduction
        masked = mask is None
        for (site, axis), (x, own_mask), g, reverse in zip(
            sites, seen, grads, turned, strict=True
        ):
            rows = Rows(site, axis, batch, g.dtype)
            how: dict[str, Any] = {
                "sources": sources is not None,
                "reduction": declared,
            }
            x = rows.inputs(x)
            g = rows.output_grads(g, **how)
            from_mark = own_mask is not None
            own_mask = rows.mask(own_mask, x, mask, reverse)
            # A mask that no layer reads would be passed over.
            masked = masked or not (from_mark or own_mask is None)
            if site.tied and site.kind == "dense":
                x, g = rows.transposed(x, g, **how)
            # A loop over stacked weights has a block for each turn. The turns of any
            # other loop are further uses of one block.
            own_uses = self.leaves.uses([site])
            for turn, (x_turn, g_turn, mask_turn) in enumerate(
                rows.turns(x, g, own_mask, sources=sources is not None)
            ):
                uses.append(own_uses[turn * len(own_uses) // max(rows.separate, 1)])
                of_use.append(site)
                pairs.append((x_turn, mask_turn))
                vectors.append(g_turn)
        if not masked:
            raise kc.ConventionError(
                f"No layer's rows have the axes of `mask`, of shape {tuple(mask.shape)}: "
                f"expected (N, T), with the {batch.examples} examples first."
            )
        captured = self.wiring.captured(
            uses, pairs, vectors, reduction=reduction, source_vectors=sources
        )
        sites_of: dict[str | None, list[Site]] = {}
        for name, site in zip(self.wiring.names(uses), of_use, strict=True):
            sites_of.setdefault(name, []).append(site)
        averaged = sources is not None and sources.source_reduction == "mean"
        for name, batches in captured.batches.items():
            sites_here = sites_of[name]
            layer = self.blocks[name].layer
            if any(site.transposed or not site.adds_bias for site in sites_here):
                every = batches if isinstance(batches, tuple) else (batches,)
                captured.batches[name] = in_roles(every, sites_here, mean=averaged)
            elif isinstance(batches, tuple) and layer.kind in (
                "embedding",
                "scale_shift",
            ):
                captured.batches[name] = joined_uses(batches, layer)
        return captured

    def _require_examples(
        self,
        layers: Layers,
        axes: Sequence[ExampleAxis | None],
        trace: Trace,
        batch: Counts,
    ) -> None:
        """Refuse merged rows where an approximation must tell examples apart."""
        pairs = [
            (axis, site, use)
            for site, axis in zip(layers.sites, axes, strict=True)
            if axis is not None and self.leaves.knows(site)
            for use in self.leaves.uses([site])
        ]
        names = self.wiring.names([use for _, _, use in pairs])
        for (axis, site, _), name in zip(pairs, names, strict=True):
            if name is None:
                continue
            length = site.shape(trace)[row_axes(site)[axis.row]]
            known = axis.order is not None and site.layer.kind != "conv"
            is_known = axis.sure and (length == batch.examples or known)
            kind: Any = self.blocks[name].approximation
            expands = getattr(kind, "sharing", None) == "expand"
            if not axis.sure and not expands:
                raise kc.ConventionError(
                    f"Block {name!r}: several axes have the length {length}, so the "
                    f"axis of the {batch.examples} examples is ambiguous, and {kind!r} "
                    "needs it. Take another number of examples, or write the network "
                    "for any number of them."
                )
            if names.count(name) > 1 and not (axis.ordered or expands):
                raise kc.ConventionError(
                    f"Block {name!r}: the network may have its {batch.examples} examples "
                    f"in another order in each use of the block; {kind!r} needs to match "
                    "them. Do not sort, reverse or pick examples between uses, or take "
                    "Kronecker()."
                )
            if not (is_known or expands):
                raise kc.ConventionError(
                    f"Block {name!r}: its first axis has {length} rows for "
                    f"{batch.examples} examples, and the example of each row is "
                    f"unknown; {kind!r} needs it. Keep the examples as an axis of "
                    "their own, or take Kronecker(), with sharing='expand'."
                )


class _Capture:
    """Runs a network with zeros added to its layers' outputs, and keeps their inputs."""

    def __init__(self, trace: Trace, sites: Sequence[Site]) -> None:
        self.trace = trace
        self.seen: dict[int, Any] = {}
        self.at: dict[int, list[int]] = {}
        self.before: dict[int, list[tuple[int, int]]] = {}
        self.within: dict[int, list[int]] = {}
        self.sites = sites
        for i, site in enumerate(sites):
            meeting = site.meeting
            if meeting is None:
                self.at.setdefault(site.operation.outputs[0], []).append(i)
            elif meeting.position is None:
                self.at.setdefault(meeting.place, []).append(i)
            else:
                pair = i, meeting.position
                self.before.setdefault(meeting.place, []).append(pair)
            for loop in site.loops:
                self.within.setdefault(id(loop.operation), []).append(i)

    def run(
        self, program: Program, values: Sequence[Any], zeros: dict[int, Any]
    ) -> list[Any]:
        """Return a program's outputs; `seen` holds the inputs of the sites in it."""

        def after(operation: Operation, values: list[Any], read: Any) -> list[Any]:
            if id(operation) in self.within:
                return self._loop(operation, values, zeros)
            place = operation.outputs[0] if operation.outputs else -1
            # These outputs are the same for all examples until here, so that zeros are
            # added to the operand that is broadcast, and not to the result.
            for i, position in self.before.get(place, []):
                self.seen[i] = self._inputs(self.sites[i], None, read)
                values[position] = values[position] + zeros[i]
            results = bound(operation, values)
            for i in self.at.get(place, []):
                self.seen[i] = self._inputs(self.sites[i], results[0], read)
                results[0] = results[0] + zeros[i]
            return results

        return run(self.trace, program, values, after=after)

    def _inputs(self, site: Site, y: Any, read: Any) -> tuple[Any, Any]:
        """Return a site's inputs and mask; for a scale, its outputs with ones."""
        if site.kind == "scale_shift" and "scale" not in site.parts:
            return y, None
        x = read(site.inputs)
        if site.meeting is not None:
            examples = site.meeting.shape[site.meeting.axis]
            x = jnp.broadcast_to(x, (examples, *x.shape))
        if site.spread:
            x = jax.lax.pad(x, jnp.zeros((), x.dtype), site.spread)
        if site.chain:
            before = site.chain[0].outputs[0]
            x = jnp.broadcast_to(x, self.trace.shape(before))
            for operation in site.chain[1:]:
                operands = [
                    x if place == before else read(place) for place in operation.inputs
                ]
                (x,) = bound(operation, operands)
                before = operation.outputs[0]
        return x, None if site.mask is None else read(site.mask)

    def _loop(
        self, operation: Operation, values: list[Any], zeros: dict[int, Any]
    ) -> list[Any]:
        """Run a `scan` whose body's layers are captured in each turn."""
        params, inner = operation.params, self.within[id(operation)]
        first, last = carried_by(params)
        body = operation.body
        assert body is not None

        def turn(carry: Any, slices: Any) -> Any:
            xs, zeros_here = slices
            results = self.run(body, [*values[:first], *carry, *xs], zeros_here)
            # Handed to the scan, which stacks the inputs of all turns.
            seen = {i: self.seen.pop(i) for i in inner}
            carried = last - first
            return results[:carried], (results[carried:], seen)

        carry, (ys, seen) = jax.lax.scan(
            turn,
            values[first:last],
            (values[last:], {i: zeros[i] for i in inner}),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        self.seen.update(seen)
        return [*carry, *ys]


def _of_tied(name: str, layer: kc.Layer, approximation: Callable[..., Any]) -> Any:
    """Return the approximation of a weight that both embeds ids and makes logits."""
    vocabulary, features = layer.matrix_shape
    table = kc.Embedding(
        num_embeddings=vocabulary, features=features, weight_layout="io"
    )
    chosen, expected = approximation(name, table), kc.Kronecker(input="diagonal")
    if chosen is not None and chosen != expected:
        raise kc.ConventionError(
            f"Block {name!r}: its weight both embeds ids and makes logits; expected "
            f"{expected!r} or None from `approximation`, got {chosen!r}."
        )
    return chosen


def _require_structure(vectors: Any, outputs: Any) -> None:
    """Raise for vectors that are not one array for each array of outputs."""
    structure, expected = jax.tree.structure(vectors), jax.tree.structure(outputs)
    if structure != expected:
        raise kc.ArgumentError(
            f"Expected to pull back a tree like the outputs, {expected}, got {structure}. "
            "Vectors of a loss of one of several outputs are pulled back with "
            "`jnp.zeros_like` for the others."
        )


def _like_output(vector: Any, output: Any, *, sources: bool) -> Any:
    """Return a vector in the dtype of an output, and (N, 1) as (N,) for such outputs."""
    v = jnp.asarray(vector, output.dtype)
    if v.shape[sources:] == (*output.shape, 1):
        return v[..., 0]
    return v


def _require_replicated(params: Any) -> None:
    """Raise for parameters that are sharded over explicit axes of a mesh."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        axes = explicit_axes(leaf)
        if axes:
            raise kc.UnsupportedError(
                "Expected `params` that explicit axes of a mesh do not shard, got "
                f"{jax.tree_util.keystr(path)} over {sorted(axes)}. Say "
                "jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * "
                "len(names)), or step within `jax.shard_map` and say `axis_name`."
            )


def _zeros(site: Site, trace: Trace) -> Any:
    aval = trace.avals[site.operation.outputs[0]]
    lengths = tuple(loop.length for loop in site.loops)
    shape = lengths + site.shape(trace)
    zeros = jnp.zeros(shape, aval.dtype)
    return _cast_varying(zeros, _varying(aval))


def _varying(aval: Any) -> frozenset[Any]:
    """Return the mapped axes that a value varies over, where JAX checks that."""
    kind = getattr(aval, "manual_axis_type", None)
    # Before JAX 0.10 the axes were an attribute themselves.
    axes = getattr(aval, "vma", ()) if kind is None else kind.varying
    return frozenset(axes or ())


def _as_varying(params: Any, inputs: Any) -> Any:
    """Let parameters vary over the mapped axes of the inputs.

    Else their gradients, and those of zeros, are summed over the axes.
    """
    axes: frozenset[Any] = frozenset()
    for leaf in jax.tree.leaves(inputs):
        axes |= _varying(jax.typeof(leaf))
    return jax.tree.map(lambda x: _cast_varying(x, axes), params) if axes else params


def _cast_varying(x: Any, axes: frozenset[Any]) -> Any:
    missing = tuple(sorted(axes - _varying(jax.typeof(x))))
    return jax.lax.pcast(x, missing, to="varying") if missing else x
