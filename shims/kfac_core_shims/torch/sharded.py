"""Parameters that are divided among processes: `fully_shard` and tensor-parallel layers.

Conventions.  p processes form a mesh of one dimension, and each ``DTensor`` has one
placement: ``Shard(d)``, of which rank r has the r-th of p slices along d, or ``Replicate``.
With `fully_shard` (FSDP2) a process has rows of its own, and layers are called with whole
weights.  With tensor parallelism all processes have the same rows, and layers are called
with ``DTensor``; each process then takes a part of the examples, of all features.

The owner of a block gets the slices of its gradient, multiplies, and sends the slices of
the direction.  No other process has the whole of either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed import tensor
from torch.distributed.fsdp import FSDPModule

import kfac_core as kc
from kfac_core_shims.torch.sites import Found, Site

__all__ = ["Division", "division_of"]

_DIVISIBLE = nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm

Arrays = dict[str, dict[str, Any]]
"""Tensors by block, and by parameter of its layer, in the layout of its module."""


class Division:
    """How the parameters of a model are divided among all processes.

    Parameters
    ----------
    communicator : Communicator
        Of the processes of the mesh, in its order.
    tensor_parallel : bool
        Whether layers are called with a part of their weights.
    directions_dtype : str or None
        As of `Distributed`.
    """

    def __init__(
        self,
        communicator: kc.distributed.Communicator,
        *,
        tensor_parallel: bool,
        directions_dtype: str | None,
    ) -> None:
        self.tensor_parallel = tensor_parallel
        self._wire: Any = None
        if directions_dtype is not None:
            self._wire = getattr(torch, directions_dtype)
        self._communicator = communicator
        self._agreement = kc.distributed.Agreement(communicator)
        self._sites: dict[str, Site] = {}

    @property
    def data_parts(self) -> int:
        """Number of processes with rows of their own."""
        return 1 if self.tensor_parallel else self._communicator.size

    def install(self, blocks: Found) -> None:
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
                "No layer of the model is covered whose parameters are divided. Reasons: "
                f"{'; '.join(sorted(set(blocks.reasons.values())))}."
            )
        self._sites = blocks.sites

    def _problem(self, site: Site, module: Any) -> str:
        if not self.tensor_parallel:
            # Neither its rows nor what computes it is in the graph of a part.
            whole = site.part.read is not None and not site.part.rows
            if not whole or hasattr(site, "originals"):
                return "fully_shard divides it, and it is read outside its module"
            return ""
        alone = not site.part.tied and [*site.part.parameters] != ["shift"]
        if isinstance(module, _DIVISIBLE) and type(site) is Site and alone:
            return ""
        return f"{type(module).__name__} is not covered beside tensor-parallel layers"

    def share(self, x: Any, /) -> Any:
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
        rank, size = self._communicator.rank, self._communicator.size
        if isinstance(x, tensor.DTensor):
            placement = x.placements[0]
            if placement.is_partial() or placement.is_shard(0):
                return x.redistribute(placements=[tensor.Shard(0)]).to_local()
            if placement.is_shard():
                return self._examples_of(x, int(placement.dim) % x.ndim)
            x = x.to_local()
        return _slice(x, 0, rank, size)

    def _examples_of(self, x: Any, axis: int) -> Any:
        """Return a part of the examples, of an array whose other axis is divided."""
        rank, size = self._communicator.rank, self._communicator.size
        local = x.to_local()
        messages = _Messages(local, size)
        shape = _shape(x.shape, 0, rank, size)
        for other in range(size):
            messages.put(other, _slice(local, 0, other, size))
            messages.expect(other, None, _shape(shape, axis, other, size))
        slices = messages.exchanged(self._communicator)
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
            slices[name] = {role: _own(p) for role, p in parameters.items()}
        return slices

    def common(self, gradients: Arrays, /) -> Arrays:
        """Return the gradients of parameters that are not divided."""
        whole: Arrays = {}
        for name, role, p in self._parameters(gradients):
            if _axis(p) is None:
                whole.setdefault(name, {})[role] = gradients[name][role]
        return whole

    def write(self, directions: Arrays) -> None:
        """Put slices of directions into the places of the gradients."""
        for name, slices in directions.items():
            for role, x in slices.items():
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
        learning_rate: float,
        bound: float | None,
    ) -> tuple[Arrays, Any]:
        """Return slices of the clipped directions, from those of the gradients.

        Collective: of each dtype every process sends its slices to the owners, and gets
        those of the directions.

        Parameters
        ----------
        estimator : kfac_core.Estimator
            With a `Distributed`.
        gradients : dict
            As from `gradients`.
        learning_rate : float
            Of the KL clip.
        bound : float or None
            Likewise; None for no clip.

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
            gradients_here = {name: self._as_layer(name, whole[name]) for name in owned}
            network, state = estimator.network, estimator.state
            products = network.apply("multiply_inverse", state, gradients_here)
            if products:
                size = float(kc.steps.inner_product(gradients_here, products))
        except Exception as raised:
            error = raised
        total = self._agreement.vote("direction", [size], error=error)
        clip = None
        if bound is not None:
            squared = torch.tensor(
                float(total[0]) * learning_rate**2, dtype=torch.float64
            )
            clip = kc.steps.trust_region_rate(squared, bound=bound, maximum=1.0)
        directions: Arrays = {}
        for name in owned:
            scale = 1.0 if clip is None else float(clip.scale)
            directions[name] = {
                role: x * scale
                for role, x in self._as_module(name, products[name]).items()
            }
        return self._scattered(directions, gradients, owners), clip

    def _as_layer(self, name: str, gradients: Mapping[str, Any]) -> dict[str, Any]:
        part = self._sites[name].part
        shapes = part.layer.parameter_shapes
        shaped = {}
        for role, x in gradients.items():
            x = part.to_layer(x) if role == "weight" else x
            shaped[role] = x.reshape(shapes[role])
        return shaped

    def _as_module(self, name: str, directions: Mapping[str, Any]) -> dict[str, Any]:
        site = self._sites[name]
        shaped = {}
        for role, x in directions.items():
            x = site.part.to_module(x) if role == "weight" else x
            shaped[role] = x.reshape(site.parameters[role].shape)
        return shaped

    def _gathered(self, gradients: Arrays, owners: Mapping[str, int]) -> Arrays:
        """Return whole gradients of this process's blocks, from everybody's slices."""
        rank, size = self._communicator.rank, self._communicator.size
        messages: dict[Any, _Messages] = {}
        for name, role, p in self._parameters(gradients):
            x, axis, owner = gradients[name][role], _axis(p), owners[name]
            sent = messages.setdefault(x.dtype, _Messages(x, size))
            if axis is None or owner == rank:
                continue
            sent.put(owner, x)
        for name, role, p in self._parameters(gradients):
            axis = _axis(p)
            if owners[name] == rank and axis is not None:
                for other in range(size):
                    if other != rank:
                        shape = _shape(p.shape, axis, other, size)
                        messages[p.dtype].expect(other, (name, role), shape)
        arrived = {d: m.exchanged(self._communicator) for d, m in messages.items()}
        whole: Arrays = {}
        for name, role, p in self._parameters(gradients):
            if owners[name] == rank:
                x, axis = gradients[name][role], _axis(p)
                if axis is not None:
                    of_ranks = arrived[p.dtype]
                    slices = [
                        x if r == rank else of_ranks[r, (name, role)]
                        for r in range(size)
                    ]
                    x = torch.cat(slices, dim=axis)
                whole.setdefault(name, {})[role] = x
        return whole

    def _scattered(
        self, directions: Arrays, like: Arrays, owners: Mapping[str, int]
    ) -> Arrays:
        """Return this process's slices of all directions, from their owners."""
        rank, size = self._communicator.rank, self._communicator.size
        messages: dict[Any, _Messages] = {}
        slices: Arrays = {name: {} for name in like}
        for name, role, p in self._parameters(like):
            axis, owner = _axis(p), owners[name]
            x = like[name][role]
            wire = self._wire_of(x)
            sent = messages.setdefault(wire, _Messages(x.to(wire), size))
            if owner != rank:
                sent.expect(owner, (name, role), tuple(x.shape))
                continue
            # Rounded here too, since other processes have the same of what is not divided.
            whole = directions[name][role].to(wire)
            for other in range(size):
                part = whole
                if axis is not None:
                    part = _slice(part, axis, other, size)
                if other == rank:
                    slices[name][role] = part.to(x.dtype)
                else:
                    sent.put(other, part)
        for exchanged in messages.values():
            for (_, (name, role)), x in exchanged.exchanged(self._communicator).items():
                slices[name][role] = x.to(like[name][role].dtype)
        return slices

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
        self._like = like
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
        flat = torch.cat(parts) if parts else self._like.new_zeros(0)
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
    model: Any,
    communicator: kc.distributed.Communicator | None,
    directions_dtype: str | None,
    /,
) -> Division:
    """Return how the parameters of a model are divided.

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
        By `fully_shard` where a module is one of its, else of tensor-parallel layers.

    Raises
    ------
    kfac_core.UnsupportedError
        For a mesh of several dimensions or of some of the processes, and for placements
        other than ``Shard`` and ``Replicate``.
    """
    ranks = [] if communicator is None else [*communicator.ranks]
    for name, p in model.named_parameters():
        if not isinstance(p, tensor.DTensor):
            continue
        if communicator is None or p.device_mesh.mesh.tolist() != ranks:
            raise kc.UnsupportedError(
                f"The parameter {name!r} is a DTensor over {p.device_mesh}: expected a "
                "mesh of one dimension with all processes of `communicator`, in their "
                "order. Combinations of fully_shard with other meshes are not supported."
            )
        if type(p.placements[0]) not in (tensor.Shard, tensor.Replicate):
            raise kc.UnsupportedError(
                f"The parameter {name!r} is a DTensor with the placement "
                f"{p.placements[0]}: expected Shard or Replicate."
            )
    assert communicator is not None
    fully_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    return Division(
        communicator,
        tensor_parallel=not fully_sharded,
        directions_dtype=directions_dtype,
    )


def _axis(p: Any) -> int | None:
    """Return the axis along which a parameter is divided; None if it is not."""
    if not isinstance(p, tensor.DTensor) or not p.placements[0].is_shard():
        return None
    axis: int = p.placements[0].dim
    return axis % int(p.ndim)


def _local(g: Any) -> Any:
    """Return this process's part of a gradient."""
    return g.to_local() if isinstance(g, tensor.DTensor) else g


def _own(p: Any) -> Any:
    """Return this process's slice of a gradient, divided as its parameter is."""
    g = p.grad
    if isinstance(g, tensor.DTensor) and g.placements != p.placements:
        g = g.redistribute(placements=p.placements)
    return _local(g)


def _bounds(n: int, rank: int, size: int) -> tuple[int, int]:
    """Return the ends of a rank's slice of an axis, as ``Shard`` divides it."""
    longest = -(-n // size)
    return min(rank * longest, n), min((rank + 1) * longest, n)


def _slice(x: Any, axis: int, rank: int, size: int) -> Any:
    start, stop = _bounds(x.shape[axis], rank, size)
    return x.narrow(axis, start, stop - start)


def _shape(shape: Any, axis: int, rank: int, size: int) -> tuple[int, ...]:
    start, stop = _bounds(shape[axis], rank, size)
    return (*shape[:axis], stop - start, *shape[axis + 1 :])
