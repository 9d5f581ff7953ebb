"""What checking a record would allocate, before anything is allocated.

A small file can describe a large problem: one example with a million features has a
factor of a million squared.  The largest array that a block makes its checks build is
computed from the description, and refused beyond a limit that grows with the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from kfac_core.block import Block
from kfac_core.errors import RecordError
from kfac_core_conformance.records.document import BlockDescription, CheckDescription
from kfac_core_conformance.records.shapes import padded_sizes

__all__ = ["memory_limit_of", "require_affordable"]

_BYTES = 8
_FLOOR = 2**26
_FACTOR = 64


def memory_limit_of(file_size: int, /) -> int:
    """Return the largest array in bytes that a file of a size justifies."""
    return _FLOOR + _FACTOR * file_size


def require_affordable(
    name: str,
    description: BlockDescription,
    block: Block,
    checks: Sequence[CheckDescription],
    updates: Iterable[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]],
    limit: int,
    /,
) -> None:
    """Raise where a block would need a larger array than its file justifies.

    Parameters
    ----------
    name : str
        The block's.
    description : BlockDescription
        What it is.
    block : Block
        The block itself, for its sizes.
    checks : sequence of CheckDescription
        What is asked of it.
    updates : iterable of three shapes
        For each update those of the inputs, of the output gradients, and ``(N, *shared)``.
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
        *(size for shapes in updates for size in _rows(description, block, *shapes)),
    ]
    largest = _BYTES * max(sizes)
    if largest > limit:
        raise RecordError(
            f"blocks.{name}: checking it needs an array of {_mebibytes(largest)} MiB, "
            f"more than the {_mebibytes(limit)} MiB that this file justifies; give a "
            "larger memory limit where you trust it"
        )


def _statistics(description: BlockDescription, block: Block) -> Iterator[int]:
    """Yield the numbers of elements of a block's statistics."""
    n, m = block.layer.matrix_shape
    groups = block.layer.groups
    yield n * m
    if description.approximation == "full":
        yield (n * m) ** 2
    elif description.approximation != "diagonal":
        fields = description.approximation_fields
        yield groups * n if fields.get("input") == "diagonal" else groups * n * n
        yield m if fields.get("output") == "diagonal" else m * m // groups


def _products(
    description: BlockDescription, block: Block, checks: Sequence[CheckDescription]
) -> Iterator[int]:
    """Yield those of what checks build; an answer's own size stands in the file."""
    n, m = block.layer.matrix_shape
    if description.approximation not in ("kronecker", "tnt", "eigen"):
        return
    for check in checks:
        if "cholesky" not in check.op:
            continue
        if description.approximation == "eigen":
            yield (n * m) ** 2
        elif check.rule == "exact":
            yield n * m * max(n, m // block.layer.groups)


def _rows(
    description: BlockDescription,
    block: Block,
    inputs: tuple[int, ...],
    grads: tuple[int, ...],
    lead: tuple[int, ...],
) -> Iterator[int]:
    """Yield those of the rows of one update, and of each example's gradients."""
    n, m = block.layer.matrix_shape
    if description.layer == "conv":
        fields = description.layer_fields
        first = fields["data_layout"] == "channels_first"
        spatial = inputs[2:] if first else inputs[1:-1]
        yield (
            inputs[0] * fields["in_channels"] * math.prod(padded_sizes(fields, spatial))
        )
        yield math.prod(lead) * n * block.layer.groups
    ids = description.layer == "embedding"
    if ids:
        # Ids of one example are compared with each other.
        each = math.prod(inputs[1:])
        yield inputs[0] * each * each
        yield inputs[0] * each * (n if description.approximation == "full" else 1)
    if description.approximation in ("tnt", "eigen", "full") or (
        description.approximation == "diagonal" and math.prod(lead[1:]) > 1 and not ids
    ):
        yield grads[0] * lead[0] * n * m


def _mebibytes(size: int) -> str:
    return f"{math.ceil(size / 2**20):,}" if size < 2**70 else "more than 2**50"
