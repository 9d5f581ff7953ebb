"""Reading a record: the document, its tensors, and the blocks that they describe.

`read_record` returns only what is consistent: every tensor that the description names is
there, has the shape that follows from it, and holds finite values in their range.  What
nothing names is ignored.  Arrays stay in NumPy, in the file's dtypes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from kfac_core.block import Block
from kfac_core.errors import RecordError
from kfac_core_conformance.records.container import Container, HostArray, open_container
from kfac_core_conformance.records.description import block_of
from kfac_core_conformance.records.document import (
    BlockDescription,
    CheckDescription,
    Document,
    parse_document,
)
from kfac_core_conformance.records.fields import one_line
from kfac_core_conformance.records.memory import memory_limit_of, require_affordable
from kfac_core_conformance.records.shapes import answer_shape, is_bag, leading_axes

__all__ = ["Record", "RecordedBlock", "Seen", "assemble", "read_record"]


@dataclass(frozen=True)
class Seen:
    """What one block saw in one update.

    Attributes
    ----------
    inputs, output_grads, mask : numpy.ndarray or None
        As in the file, the mask as booleans; None for a ``parameters`` layer.
    gradients : mapping of str to numpy.ndarray
        Of a ``parameters`` layer; else empty.
    batch_size : int
        N.
    """

    inputs: HostArray | None
    output_grads: HostArray | None
    mask: HostArray | None
    gradients: Mapping[str, HostArray]
    batch_size: int


@dataclass(frozen=True)
class RecordedBlock:
    """A block, its description, and what it saw in each update."""

    description: BlockDescription
    block: Block
    updates: tuple[Seen, ...]


@dataclass(frozen=True)
class Record:
    """A record that was read.

    Attributes
    ----------
    path : str
        Where it was read from.
    document : Document
        What it says.
    blocks : mapping of str to RecordedBlock
        By name.
    vectors, answers : tuple of mapping of str to numpy.ndarray
        For each check, the vector by parameter (empty where there is none), and the
        expected answer: by parameter, or under ``""`` where it is no vector.
    """

    path: str
    document: Document
    blocks: Mapping[str, RecordedBlock]
    vectors: tuple[Mapping[str, HostArray], ...]
    answers: tuple[Mapping[str, HostArray], ...]


def read_record(
    path: str | os.PathLike[str], /, *, memory_limit: int | None = None
) -> Record:
    """Read and validate a record.

    Parameters
    ----------
    path : path-like
        A ``.safetensors`` file.
    memory_limit : int, optional
        The largest array in bytes that checking the record may need; where left out,
        64 MiB and 64 times the size of the file.

    Returns
    -------
    Record
        Consistent in itself.

    Raises
    ------
    RecordError
        In one line, with the file's name and the reason.
    """
    try:
        with open_container(path) as container:
            return assemble(os.fspath(path), container, memory_limit)
    except RecordError as error:
        raise RecordError(f"{one_line(os.fspath(path))}: {error}") from error.__cause__


def assemble(
    path: str,
    container: Container,
    memory_limit: int | None = None,
    *,
    unanswered: Collection[int] = (),
) -> Record:
    """Make a record of an open file; `read_record` without the file's name.

    Parameters
    ----------
    path : str
        For `Record.path`.
    container : Container
        The file.
    memory_limit : int, optional
        As for `read_record`.
    unanswered : collection of int
        The checks whose expected answers are not there, for a record in the making.

    Returns
    -------
    Record
        Consistent in itself; of the unanswered checks the answers are empty.
    """
    document = parse_document(container.document)
    limit = memory_limit_of(container.size) if memory_limit is None else memory_limit
    blocks = {}
    for name, numbers in document.checks_by_block().items():
        checks = [document.checks[index] for index in numbers]
        description = document.blocks[name]
        blocks[name] = _read_block(
            name, description, checks, container, document.updates, limit
        )
    vectors = tuple(_vector(c, blocks[c.block], container) for c in document.checks)
    answers = tuple(
        _answer(check, blocks[check.block], container)
        if index not in unanswered
        else MappingProxyType({})
        for index, check in enumerate(document.checks)
    )
    return Record(path, document, MappingProxyType(blocks), vectors, answers)


def _read_block(
    name: str,
    description: BlockDescription,
    checks: list[CheckDescription],
    container: Container,
    updates: int,
    limit: int,
) -> RecordedBlock:
    # A missing tensor ends the reading at the first update that lacks it, however many
    # updates are claimed.
    count = min(updates, len(container.tensors) + 1)
    prefixes = [f"update.{u}.{name}." for u in range(count)]
    if description.layer == "parameters":
        block = _block(name, description, bag=False, positions=1)
        require_affordable(name, description, block, checks, [], limit)
        seen = [_read_gradients(prefix, block, container) for prefix in prefixes]
        return RecordedBlock(description, block, tuple(seen))
    found = [_update_shapes(prefix, description, container) for prefix in prefixes]
    bags = {is_bag(description, x, g) for x, g, _ in found}
    positions = {math.prod(lead[1:]) for _, _, lead in found}
    if len(bags) > 1 or len(positions) > 1:
        raise RecordError(
            f"update.*.{name}.inputs: expected the same number of shared positions in "
            f"every update, got {', '.join(map(str, sorted(positions)))}"
        )
    block = _block(name, description, bag=bags.pop(), positions=positions.pop())
    require_affordable(name, description, block, checks, found, limit)
    seen = [
        _read_update(prefix, description, container, *shapes)
        for prefix, shapes in zip(prefixes, found, strict=True)
    ]
    return RecordedBlock(description, block, tuple(seen))


def _block(
    name: str, description: BlockDescription, *, bag: bool, positions: int
) -> Block:
    try:
        return block_of(description, bag=bag, positions=positions)
    except RecordError as error:
        raise RecordError(f"blocks.{name}: {error}") from None


def _update_shapes(
    prefix: str, description: BlockDescription, container: Container
) -> tuple[Any, Any, Any]:
    """Return the shapes of inputs and output gradients, and ``(N, *shared)``."""
    ids = description.layer == "embedding"
    inputs = container.shape(f"{prefix}inputs", "integer" if ids else "floating")
    grads = container.shape(f"{prefix}output_grads", "floating")
    try:
        lead = leading_axes(description, inputs, grads)
    except RecordError as error:
        raise RecordError(f"{prefix}{error}") from None
    if description.approximation == "series" and len(lead) != 2:
        raise RecordError(
            f"{prefix}inputs: a series needs exactly one shared axis, got {len(lead) - 1}"
        )
    return inputs, grads, lead


def _read_update(
    prefix: str,
    description: BlockDescription,
    container: Container,
    inputs: tuple[int, ...],
    grads: tuple[int, ...],
    lead: tuple[int, ...],
) -> Seen:
    ids = description.layer == "embedding"
    x = container.load(f"{prefix}inputs", "integer" if ids else "floating", inputs)
    if ids:
        x = _ids(x, f"{prefix}inputs", description.layer_fields["num_embeddings"])
    g = container.load(f"{prefix}output_grads", "floating", grads)
    masked = f"{prefix}mask"
    mask = None
    if description.layer != "scale_shift" and masked in container.tensors:
        if description.approximation == "series":
            raise RecordError(f"{masked}: a series takes no mask")
        kept = container.load(masked, "mask", lead)
        if not np.all((kept == 0) | (kept == 1)):
            raise RecordError(f"{masked}: expected 0 or 1 everywhere")
        mask = kept != 0
    return Seen(x, g, mask, MappingProxyType({}), lead[0])


def _ids(values: HostArray, name: str, count: int) -> HostArray:
    """Return ids in the narrowest dtype that every library can index with."""
    if not (np.all(values >= 0) and np.all(values < count)):
        raise RecordError(f"{name}: expected ids from 0 to {count - 1}")
    return values.astype(np.int32 if count <= 2**31 else np.int64)


def _read_gradients(prefix: str, block: Block, container: Container) -> Seen:
    size = int(container.load(f"{prefix}batch_size", "integer", ()))
    if size < 1:
        raise RecordError(f"{prefix}batch_size: expected an integer >= 1, got {size}")
    gradients = {
        parameter: container.load(f"{prefix}grads.{parameter}", "floating", shape)
        for parameter, shape in block.layer.parameter_shapes.items()
    }
    return Seen(None, None, None, MappingProxyType(gradients), size)


def _vector(
    check: CheckDescription, recorded: RecordedBlock, container: Container
) -> Mapping[str, HostArray]:
    if "vector" not in check.fields:
        return MappingProxyType({})
    return _parameters(
        f"vector.{check.fields['vector']}", "floating", recorded, container
    )


def _answer(
    check: CheckDescription, recorded: RecordedBlock, container: Container
) -> Mapping[str, HostArray]:
    name = f"expected.{check.expected}"
    if "vector" in check.fields:
        return _parameters(name, "answer", recorded, container)
    layer = recorded.block.layer
    shape = answer_shape(check, recorded.description, layer.matrix_shape, layer.groups)
    return MappingProxyType({"": container.load(name, "answer", shape)})


def _parameters(
    name: str, kind: str, recorded: RecordedBlock, container: Container
) -> Mapping[str, HostArray]:
    shapes = recorded.block.layer.parameter_shapes
    return MappingProxyType(
        {p: container.load(f"{name}.{p}", kind, shape) for p, shape in shapes.items()}
    )
