"""What checking a record would allocate, before anything is allocated.

A small file can describe a large problem: one example with a million features has a
factor with a million rows and columns.  The largest array that the checks of a block
need is computed from the description, and refused beyond a limit that grows with the
file's size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kfac_core.block import Block
from kfac_core.errors import RecordError
from kfac_core_conformance.records.block import BlockDescription
from kfac_core_conformance.records.checks import (
    Check,
    MultiplyCholesky,
    MultiplyCholeskyInverse,
)
from kfac_core_conformance.records.layers import Conv, Embedding
from kfac_core_conformance.records.schema import Shape

_BYTES = 8
_FLOOR = 2**26
_FACTOR = 64


class UpdateShapes(NamedTuple):
    """The shapes of one update: inputs, output gradients, and ``(N, *shared)``."""

    inputs: Shape
    grads: Shape
    lead: Shape


def memory_limit_of(file_size: int, /) -> int:
    """Return the largest array in bytes that a file of a size justifies."""
    return _FLOOR + _FACTOR * file_size


def require_affordable(
    name: str,
    description: BlockDescription,
    block: Block,
    checks: Sequence[Check],
    updates: Iterable[UpdateShapes],
    limit: int,
    /,
) -> None:
    """Raise if a block would need a larger array than its file justifies.

    Parameters
    ----------
    name : str
        The block's name.
    description : BlockDescription
        The block as the document describes it.
    block : Block
        The block itself, for its sizes.
    checks : sequence of Check
        The checks of the block.
    updates : iterable of UpdateShapes
        The shapes of each update.
    limit : int
        In bytes.

    Raises
    ------
    RecordError
        With both sizes.
    """
    sizes = [
        *_statistics(description, block),
        *_products(description, block, checks),
        *(size for shapes in updates for size in _rows(description, block, shapes)),
    ]
    largest = _BYTES * max(sizes)
    if largest > limit:
        raise RecordError(
            f"blocks.{name}: checking it needs an array of {_mebibytes(largest)} MiB, "
            f"more than the {_mebibytes(limit)} MiB that this file justifies; pass a "
            "larger memory limit if you trust it"
        )


def _statistics(description: BlockDescription, block: Block) -> Iterator[int]:
    """Yield the numbers of elements of a block's statistics."""
    n, m = block.layer.matrix_shape
    groups = block.layer.groups
    name = description.approximation.tag()
    yield n * m
    if name == "full":
        yield (n * m) ** 2
    elif name != "diagonal":
        yield groups * (n if description.is_diagonal("input") else n * n)
        yield m if description.is_diagonal("output") else m * m // groups


def _products(
    description: BlockDescription, block: Block, checks: Sequence[Check]
) -> Iterator[int]:
    """Yield those of what checks build; the size of an answer is that in the file."""
    n, m = block.layer.matrix_shape
    name = description.approximation.tag()
    if name not in ("kronecker", "tnt", "eigen"):
        return
    for check in checks:
        if not isinstance(check, MultiplyCholesky | MultiplyCholeskyInverse):
            continue
        if name == "eigen":
            yield (n * m) ** 2
        elif check.damping_rule == "exact":
            yield n * m * max(n, m // block.layer.groups)


def _rows(
    description: BlockDescription, block: Block, shapes: UpdateShapes
) -> Iterator[int]:
    """Yield those of the rows of one update, and of each example's gradients."""
    n, m = block.layer.matrix_shape
    inputs, grads, lead = shapes
    layer, name = description.layer, description.approximation.tag()
    if isinstance(layer, Conv):
        padded = math.prod(layer.padded(layer.spatial(inputs)))
        yield inputs[0] * layer.in_channels * padded
        yield math.prod(lead) * n * block.layer.groups
    ids = isinstance(layer, Embedding)
    if ids:
        # Ids of one example are compared with each other.
        each = math.prod(inputs[1:])
        yield inputs[0] * each * each
        yield inputs[0] * each * (n if name == "full" else 1)
    shared = math.prod(lead[1:]) > 1
    if name in ("tnt", "eigen", "full") or (name == "diagonal" and shared and not ids):
        yield grads[0] * lead[0] * n * m


def _mebibytes(size: int) -> str:
    return f"{math.ceil(size / 2**20):,}" if size < 2**70 else "more than 2**50"
