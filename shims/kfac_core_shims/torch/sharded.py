"""Parameters that are divided among processes: `fully_shard` and tensor-parallel layers.

Conventions.  Each process has a *slice* of each ``DTensor``: the ends of a range along each
axis, which its coordinates in the tensor's mesh and the placements ``Shard`` and
``Replicate`` decide; several processes may have the same.  With `fully_shard` (FSDP2, or
HSDP on a mesh of two dimensions) a process has rows of its own, and layers are called with
whole weights.  With tensor parallelism processes have the same rows, and layers are called
with ``DTensor``; each process then takes a part of the examples, of all features.  Of a
mesh for both, the dimensions up to that of `fully_shard` are of processes with rows of
their own.

The owner of a block gets each slice of its gradient once, multiplies, and sends the slices
of the direction.  No other process has the whole of either.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed import tensor
from torch.distributed.fsdp import FSDPModule

import kfac_core as kc
from kfac_core_shims.torch.sites import ModelBlocks, Site

_DIVISIBLE = nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm

Arrays = dict[str, dict[str, Any]]
"""Tensors by block, and by parameter of its layer, in the layout of its module."""

Slice: TypeAlias = tuple[tuple[int, int], ...]
"""Start and stop along each axis."""

_HEAD = "head"
"""Key of what an owner says in its message beside directions."""


class Division:
    """How the parameters of a model are divided among all processes.

    Parameters
    ----------
    communicator : Communicator
        Of all processes.
    slices : dict of int to list of Slice
        By ``id`` of a parameter, the slice of each process.
    data_places : list of int
        Of each process, the number of its rows; of the same number are the same.
    fully_sharded : bool
        Whether `fully_shard` divides the model.
    directions_dtype : str or None
        As of `Distributed`.

    Attributes
    ----------
    data_parts : int
        Number of processes with rows of their own.
    data_place : int
        Number of this process's rows among these.
    copies : int
        Number of processes that have the same rows.
    """

    def __init__(
        self,
        communicator: kc.distributed.Communicator,
        *,
        slices: dict[int, list[Slice]],
        data_places: list[int],
        fully_sharded: bool,
        directions_dtype: str | None,
    ) -> None:
        self.data_parts = len(set(data_places))
        self.data_place = data_places[communicator.rank]
        self.copies = data_places.count(self.data_place)
        self.fully_sharded = fully_sharded
        self._wire: Any = None
        if directions_dtype is not None:
            self._wire = getattr(torch, directions_dtype)
        self._communicator, self._slices = communicator, slices
        self._agreement = kc.distributed.Agreement(communicator)
        self._sites: dict[str, Site] = {}
        self._same_rows = communicator
        if 1 < self.copies < communicator.size:
            groups = [
                [rank for rank, other in enumerate(data_places) if other == place]
                for place in sorted(set(data_places))
            ]
            self._same_rows = communicator.split(groups)

    @property
    def tensor_parallel(self) -> bool:
        """Whether layers are called with a part of their weights."""
        return self.copies > 1 or not self.fully_sharded

    def install(self, blocks: ModelBlocks) -> None:
        """Leave out the blocks of a model that cannot be divided, with the reason."""
        of_module = {
            name: module for module, names, _ in blocks.users for name in names
        }
        for name, site in list(blocks.sites.items()):
            reason = self._problem(site, of_module[name])
            if reason:
                del blocks.sites[name]
                for attribute in site.part.parameters.values():
                    blocks.reasons.setdefault(f"{name}.{attribute}", reason)
        blocks.users = [
            (module, [name for name in names if name in blocks.sites], around)
            for module, names, around in blocks.users
        ]
        if not blocks.sites:
            raise kc.UnsupportedError(
                "K-FAC covers no layer whose parameters are divided. Reasons: "
                f"{'; '.join(sorted(set(blocks.reasons.values())))}."
            )
        self._sites = blocks.sites

    def _problem(self, site: Site, module: torch.nn.Module) -> str:
        if self.fully_sharded:
            # Neither its rows nor what computes it is in the graph of a part.
            whole = site.part.read is not None and not site.part.rows
            if not whole or hasattr(site, "originals"):
                return "fully_shard divides it, and it is read outside its module"
        if not self.tensor_parallel:
            return ""
        alone = not site.part.tied and [*site.part.parameters] != ["shift"]
        if isinstance(module, _DIVISIBLE) and type(site) is Site and alone:
            return ""
        return f"{type(module).__name__} is not covered beside tensor-parallel layers"

    def share(self, x: Any, /) -> torch.Tensor:
        """Return this process's examples of an array that tensor-parallel layers read.

        Parameters
        ----------
        x : torch.Tensor or DTensor, shape (N, ...)
            Inputs of a layer or gradients of its output, in any placement; a plain tensor
            is the same on all processes.

        Returns
        -------
        torch.Tensor, shape (about N / p, ...)
            With all features.
        """
        rank, size = self._same_rows.rank, self._same_rows.size
        if isinstance(x, tensor.DTensor):
            placement = x.placements[0]
            # A partial sum takes one reduce-scatter; what lies by examples already is
            # not sent.
            if placement.is_partial() or placement.is_shard(0):
                return x.redistribute(placements=[tensor.Shard(0)]).to_local()
            if placement.is_shard():
                return self._examples_of(x, int(placement.dim) % x.ndim)
            x = x.to_local()
        return _examples(x, rank, size)

    def _examples_of(self, x: Any, axis: int) -> Any:
        """Return a part of the examples, of an array whose other axis is divided."""
        rank, size = self._same_rows.rank, self._same_rows.size
        local = x.to_local()
        messages = _Messages(local, size)
        start, stop = _bounds(x.shape[0], rank, size)
        for other in range(size):
            messages.put(other, _examples(local, other, size))
            first, last = _bounds(x.shape[axis], other, size)
            shape = [stop - start, *x.shape[1:]]
            shape[axis] = last - first
            messages.expect(other, None, tuple(shape))
        slices = messages.exchanged(self._same_rows)
        return torch.cat([slices[other, None] for other in range(size)], dim=axis)

    def are_nonzero(self, gradients: Iterable[Any], /) -> bool:
        """Return whether any gradient is not zero, on any process.  Collective."""
        nonzero = any(bool(_local(g).any()) for g in gradients)
        return bool(self._agreement.vote("gradients of earlier passes", [nonzero])[0])

    def gradients(self) -> Arrays:
        """Return this process's slices of the gradients, of blocks that have them all."""
        slices: Arrays = {}
        for name, site in self._sites.items():
            parameters = site.parameters
            if any(p.grad is None or not p.requires_grad for p in parameters.values()):
                continue
            slices[name] = {role: _grad_slice(p) for role, p in parameters.items()}
        return slices

    def common(self, gradients: Arrays, /) -> Arrays:
        """Return the gradients of parameters that are not divided."""
        whole: Arrays = {}
        for name, role, p in self._parameters(gradients):
            if len(set(self._slices[id(p)])) == 1:
                whole.setdefault(name, {})[role] = gradients[name][role]
        return whole

    def write(self, directions: Arrays, scale: float) -> None:
        """Put multiples of slices of directions into the places of the gradients."""
        for name, slices in directions.items():
            for role, unscaled in slices.items():
                x = unscaled if scale == 1.0 else unscaled * scale
                p = self._sites[name].parameters[role]
                if isinstance(p.grad, tensor.DTensor):
                    p.grad = tensor.DTensor.from_local(
                        x,
                        p.device_mesh,
                        p.placements,
                        run_check=False,
                        shape=p.shape,
                        stride=p.stride(),
                    )
                else:
                    p.grad.copy_(x)

    def directions(
        self,
        estimator: kc.Estimator,
        gradients: Arrays,
        /,
        *,
        clip_of: Callable[[float], Any] | None,
    ) -> tuple[Arrays, Any]:
        """Return slices of the directions before the clip, from those of the gradients.

        Collective: of each dtype every process sends its slices to the owners, and gets
        those of the directions, unscaled, with what each owner's part of the clip is.

        Parameters
        ----------
        estimator : kfac_core.Estimator
            With a `Distributed`.
        gradients : dict
            As from `gradients`.
        clip_of : callable or None
            Returns the KL clip of the product of gradients and directions; None for none.

        Returns
        -------
        directions : dict
            In the form of the gradients.
        clip : TrustRegion or None
            The factor.
        """
        owners = estimator.placement.owners
        rank = self._communicator.rank
        owned = [name for name in gradients if owners[name] == rank]
        error: Exception | None = None
        size, products = 0.0, {}
        whole = self._gathered(gradients, owners)
        try:
            gradients_here = {}
            for name in owned:
                site = self._sites[name]
                by_parameter = {site.parameters[r]: x for r, x in whole[name].items()}
                gradients_here[name] = site.in_layout(by_parameter)
            network, state = estimator.network, estimator.state
            products = network.apply("multiply_inverse", state, gradients_here)
            if products:
                size = float(kc.steps.inner_product(gradients_here, products))
        except Exception as raised:
            # Told with the directions, and then raised on all processes.
            error = raised
        wholes: Arrays = {}
        for name in owned if error is None else ():
            wholes[name] = self._as_module(name, products[name])
        directions, sizes, failed = self._scattered(
            wholes, gradients, owners, size, failed=error is not None
        )
        if failed:
            self._agreement.vote("direction", error=error)
        return directions, None if clip_of is None else clip_of(sum(sizes))

    def _as_module(self, name: str, directions: Mapping[str, Any]) -> dict[str, Any]:
        site = self._sites[name]
        shaped = {}
        for role, x in directions.items():
            x = site.part.to_module(x) if role == "weight" else x
            shaped[role] = x.reshape(site.parameters[role].shape)
        return shaped

    def _sources(self, p: Any, owner: int) -> dict[Slice, int]:
        """Return the process that sends each slice of a parameter to an owner."""
        slices = self._slices[id(p)]
        sources: dict[Slice, int] = {}
        # The owner sends itself nothing. Of other replicas the lowest rank sends.
        for rank in (owner, *range(self._communicator.size)):
            sources.setdefault(slices[rank], rank)
        return sources

    def _gathered(self, gradients: Arrays, owners: Mapping[str, int]) -> Arrays:
        """Return whole gradients of this process's blocks, from everybody's slices."""
        rank, size = self._communicator.rank, self._communicator.size
        messages: dict[Any, _Messages] = {}
        whole: Arrays = {}
        for name, role, p in self._parameters(gradients):
            x, owner = gradients[name][role], owners[name]
            sent = messages.setdefault(x.dtype, _Messages(x, size))
            sources = self._sources(p, owner)
            if owner == rank:
                whole.setdefault(name, {})[role] = x.new_empty(p.shape)
                for ends, source in sources.items():
                    if source == rank:
                        _view(whole[name][role], ends).copy_(x)
                    else:
                        sent.expect(source, (name, role), _shape(ends))
            # Of processes with the same slice one sends it.
            elif sources[self._slices[id(p)][rank]] == rank:
                sent.put(owner, x)
        for exchanged in messages.values():
            arrived = exchanged.exchanged(self._communicator)
            for (source, (name, role)), x in arrived.items():
                p = self._sites[name].parameters[role]
                _view(whole[name][role], self._slices[id(p)][source]).copy_(x)
        return whole

    def _scattered(
        self,
        directions: Arrays,
        like: Arrays,
        owners: Mapping[str, int],
        size: float,
        *,
        failed: bool,
    ) -> tuple[Arrays, list[float], bool]:
        """Return this process's slices of all directions, from their owners.

        With them come the sizes that all owners give, and whether one of these failed.
        """
        rank, processes = self._communicator.rank, self._communicator.size
        messages: dict[Any, _Messages] = {}
        slices: Arrays = {name: {} for name in like}
        for name, role, p in self._parameters(like):
            owner, x = owners[name], like[name][role]
            wire = self._wire_of(x)
            sent = messages.setdefault(wire, _Messages(x.to(wire), processes))
            if owner != rank:
                sent.expect(owner, (name, role), tuple(x.shape))
                continue
            # Rounded here too, since other processes have the same of what is not divided.
            whole = x.new_zeros(p.shape) if failed else directions[name][role]
            whole = whole.to(wire)
            for other, ends in enumerate(self._slices[id(p)]):
                part = _view(whole, ends)
                if other == rank:
                    slices[name][role] = part.to(x.dtype)
                else:
                    sent.put(other, part)
        if not messages:
            return {}, [], False
        # At the end of the first message two numbers of float64, as bits: sums of rounded
        # sizes would be another clip.
        head = torch.tensor([float(failed), size], dtype=torch.float64)
        wire, first = next(iter(messages.items()))
        bits = head.to(first.like.device).view(wire)
        for other in range(processes):
            first.put(other, bits)
            first.expect(other, _HEAD, tuple(bits.shape))
        heads: list[list[float]] = []
        for exchanged in messages.values():
            for (_, key), x in exchanged.exchanged(self._communicator).items():
                if key == _HEAD:
                    heads.append(x.clone().view(torch.float64).tolist())
                    continue
                name, role = key
                slices[name][role] = x.to(like[name][role].dtype)
        return slices, [own for _, own in heads], any(flag for flag, _ in heads)

    def _wire_of(self, x: Any) -> Any:
        """Return the dtype in which directions like a tensor are sent."""
        if self._wire is None or self._wire.itemsize >= x.dtype.itemsize:
            return x.dtype
        return self._wire

    def _parameters(self, gradients: Arrays) -> Iterable[tuple[str, str, Any]]:
        for name, roles in gradients.items():
            for role in roles:
                yield name, role, self._sites[name].parameters[role]


class _Messages:
    """What goes to each process and comes from it, of one dtype."""

    def __init__(self, like: Any, size: int) -> None:
        self.like = like
        self._sent: list[list[Any]] = [[] for _ in range(size)]
        self._expected: list[list[tuple[Any, tuple[int, ...]]]] = [
            [] for _ in range(size)
        ]

    def put(self, rank: int, x: Any) -> None:
        self._sent[rank].append(x.reshape(-1))

    def expect(self, rank: int, key: Any, shape: tuple[int, ...]) -> None:
        self._expected[rank].append((key, shape))

    def exchanged(self, communicator: Any) -> dict[tuple[int, Any], Any]:
        """Return what came, by rank and key."""
        parts = [x for sent in self._sent for x in sent]
        flat = torch.cat(parts) if parts else self.like.new_zeros(0)
        send = [sum(x.numel() for x in sent) for sent in self._sent]
        shapes = [[torch.Size(s) for _, s in expected] for expected in self._expected]
        receive = [sum(shape.numel() for shape in expected) for expected in shapes]
        arrived = communicator.all_to_all(flat, send, receive).wait()
        received, start = {}, 0
        for rank, expected in enumerate(self._expected):
            for key, shape in expected:
                stop = start + torch.Size(shape).numel()
                received[rank, key] = arrived[start:stop].reshape(shape)
                start = stop
        return received


def division_of(
    model: torch.nn.Module,
    communicator: kc.distributed.Communicator | None,
    directions_dtype: str | None,
    /,
) -> Division:
    """Return how the parameters of a model are divided.  Collective.

    Parameters
    ----------
    model : torch.nn.Module
        The model, with parameters that are ``DTensor``.
    communicator : Communicator or None
        The processes that train it.
    directions_dtype : str or None
        As of `Distributed`.

    Returns
    -------
    Division
        By `fully_shard` where a module is one of its, and by tensor-parallel layers.

    Raises
    ------
    kfac_core.UnsupportedError
        For a parameter of which some processes have no slice, and for placements other
        than ``Shard`` and ``Replicate``.
    """
    fully_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    named = dict(model.named_parameters())
    places = {_data_place(p, fully_sharded) for p in named.values()} - {None}
    slices = {name: _slice_of(name, p) for name, p in named.items()}
    if len(places) > 1:
        raise kc.UnsupportedError(
            "fully_shard divides some of the tensor-parallel layers, and not others. Call "
            "it for the whole model, after parallelize_module."
        )
    if communicator is None:
        raise kc.UnsupportedError(
            "The model's parameters are divided among processes, and "
            "communicator='alone' is only one of them. Leave `communicator` out, or "
            "pass that of all processes."
        )
    # A process knows its own place in the mesh, and not the slices of the others.
    said = json.dumps([*places, *slices.values()])
    of_ranks = [
        json.loads(text) for text in kc.distributed.Agreement(communicator).texts(said)
    ]
    of_parameters: dict[int, list[Slice]] = {}
    for k, (name, p) in enumerate(named.items()):
        ends = [tuple(map(tuple, of_rank[1 + k])) for of_rank in of_ranks]
        # Slices tile a parameter, so that their sizes add up to its own unless one is
        # missing.
        if sum(math.prod(_shape(piece)) for piece in set(ends)) != math.prod(p.shape):
            raise kc.UnsupportedError(
                f"The parameter {name!r} is a DTensor over {p.device_mesh}, and the "
                f"processes {list(communicator.ranks)} of `communicator` do not have all "
                "of it. Give the communicator of all processes of the mesh."
            )
        of_parameters[id(p)] = ends
    return Division(
        communicator,
        slices=of_parameters,
        data_places=[of_rank[0] for of_rank in of_ranks],
        fully_sharded=fully_sharded,
        directions_dtype=directions_dtype,
    )


def _data_place(p: Any, fully_sharded: bool) -> int | None:
    """Return the number of this process's rows; None where a parameter does not say."""
    if not isinstance(p, tensor.DTensor):
        return None
    place = 0
    if fully_sharded:
        mesh = p.device_mesh
        for k, placement in enumerate(p.placements):
            place = place * mesh.size(k) + mesh.get_coordinate()[k]
            # This dimension is the one that fully_shard divides; those after it are
            # tensor-parallel.
            if hasattr(placement, "dim"):
                break
    return place


def _slice_of(name: str, p: Any) -> Slice:
    """Return this process's slice of a parameter."""
    ends = [(0, int(n)) for n in p.shape]
    if not isinstance(p, tensor.DTensor):
        return tuple(ends)
    for placement in p.placements:
        if not (hasattr(placement, "dim") or placement.is_replicate()):
            raise kc.UnsupportedError(
                f"The parameter {name!r} is a DTensor with the placement {placement}: "
                "expected Shard or Replicate."
            )
    # What fully_shard divides beside tensor parallelism was divided by that before.
    order = sorted(
        range(len(p.placements)),
        key=lambda k: hasattr(p.placements[k], "split_factor"),
    )
    for k in order:
        if hasattr(p.placements[k], "dim"):
            axis = p.placements[k].dim % p.ndim
            start, stop = ends[axis]
            coordinate, size = p.device_mesh.get_coordinate()[k], p.device_mesh.size(k)
            first, last = _bounds(stop - start, coordinate, size)
            ends[axis] = start + first, start + last
    if _shape(ends) != tuple(p.to_local().shape):
        raise kc.UnsupportedError(
            f"The parameter {name!r} is a DTensor with the placements {p.placements} and "
            f"a slice of shape {tuple(p.to_local().shape)} on this process: expected "
            f"{_shape(ends)}, that of even slices."
        )
    return tuple(ends)


def _local(g: Any) -> Any:
    """Return this process's part of a gradient."""
    return g.to_local() if isinstance(g, tensor.DTensor) else g


def _grad_slice(p: Any) -> Any:
    """Return this process's slice of a gradient, divided as its parameter is."""
    g = p.grad
    if isinstance(g, tensor.DTensor) and g.placements != p.placements:
        g = g.redistribute(placements=p.placements)
    return _local(g)


def _bounds(n: int, rank: int, size: int) -> tuple[int, int]:
    """Return the ends of a rank's slice of an axis, as ``Shard`` divides it."""
    longest = -(-n // size)
    return min(rank * longest, n), min((rank + 1) * longest, n)


def _examples(x: Any, rank: int, size: int) -> Any:
    start, stop = _bounds(x.shape[0], rank, size)
    return x[start:stop]


def _view(x: Any, ends: Slice) -> Any:
    """Return a slice of a tensor."""
    return x[tuple(slice(start, stop) for start, stop in ends)]


def _shape(ends: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in ends)
