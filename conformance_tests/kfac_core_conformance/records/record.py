"""Reading a record: the document, its tensors, and the blocks that they describe.

`read_record` returns only what is consistent: every tensor that the description names is
there, has the shape that follows from it, and holds finite values in their range.  Other
tensors are ignored.  Arrays stay in NumPy, in the file's dtypes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kfac_core.block import Block
from kfac_core.errors import RecordError
from kfac_core_conformance.records.approximations import Series
from kfac_core_conformance.records.block import BlockDescription
from kfac_core_conformance.records.checks import (
    LARGEST_TOLERANCE,
    Check,
    VectorCheck,
    answer_shape,
)
from kfac_core_conformance.records.container import Container, HostArray, open_container
from kfac_core_conformance.records.document import Document, parse_document
from kfac_core_conformance.records.layers import Embedding, Parameters, ScaleShift
from kfac_core_conformance.records.memory import (
    UpdateShapes,
    memory_limit_of,
    require_affordable,
)
from kfac_core_conformance.records.samples import RecordedSamples, read_samples
from kfac_core_conformance.records.text import one_line


@dataclass(frozen=True)
class Seen:
    """What one block saw in one update.

    Attributes
    ----------
    batch_size : int
        The number of examples, N.
    inputs, output_grads, mask : numpy.ndarray or None
        As in the file, the mask as booleans; None for a ``parameters`` layer.
    gradients : mapping of str to numpy.ndarray
        Of a ``parameters`` layer; else empty.
    """

    batch_size: int
    inputs: HostArray | None = None
    output_grads: HostArray | None = None
    mask: HostArray | None = None
    gradients: Mapping[str, HostArray] = field(default_factory=dict)


@dataclass(frozen=True)
class RecordedBlock:
    """A block, its description, and what it saw in each update."""

    description: BlockDescription
    block: Block
    updates: tuple[Seen, ...]

    @property
    def examples(self) -> int | None:
        """The number of examples of an update; None if updates differ."""
        sizes = {seen.batch_size for seen in self.updates}
        return sizes.pop() if len(sizes) == 1 else None


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
        For each check, the vector by parameter (empty if the check takes none), and the
        expected answer: by parameter, or under ``""`` if it is no vector.
    samples : RecordedSamples or None
        Gauss-Newton of all blocks together, if the document has it.
    """

    path: str
    document: Document
    blocks: Mapping[str, RecordedBlock]
    vectors: tuple[Mapping[str, HostArray], ...]
    answers: tuple[Mapping[str, HostArray], ...]
    samples: RecordedSamples | None = None


def read_record(
    path: str | os.PathLike[str], /, *, memory_limit: int | None = None
) -> Record:
    """Read and validate a record.

    Parameters
    ----------
    path : path-like
        A ``.safetensors`` file.
    memory_limit : int, optional
        The largest array in bytes that checking the record may need.  The default is
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
        raise RecordError(f"{one_line(os.fspath(path))}: {error}") from None


def assemble(
    path: str,
    container: Container,
    memory_limit: int | None = None,
    *,
    unanswered: Collection[int] = (),
) -> Record:
    """Make a record of an open file; errors lack the file's name.

    Parameters
    ----------
    path : str
        For `Record.path`.
    container : Container
        The file.
    memory_limit : int, optional
        As for `read_record`.
    unanswered : collection of int
        The checks whose answers are not in the file yet; those answers are empty.

    Returns
    -------
    Record
        Consistent in itself.
    """
    document = parse_document(container.document)
    limit = memory_limit_of(container.size) if memory_limit is None else memory_limit
    blocks = {}
    for name, numbers in document.checks_by_block().items():
        checks = [document.checks[index] for index in numbers]
        reader = _BlockReader(name, document.blocks[name], container)
        blocks[name] = reader.read(document.updates, checks, limit)
    vectors, answers = [], []
    for index, check in enumerate(document.checks):
        block = blocks[check.block]
        vectors.append(_vector(check, block, container))
        answer = {} if index in unanswered else _answer(check, block, container)
        if answer:
            _require_tolerance(f"checks[{index}]", check, answer, vectors[-1])
        answers.append(answer)
    samples = None
    if document.samples is not None:
        samples = read_samples(document.samples, blocks, container, limit)
    return Record(path, document, blocks, tuple(vectors), tuple(answers), samples)


@dataclass(frozen=True)
class _BlockReader:
    """Reads what one block of a document saw."""

    name: str
    description: BlockDescription
    container: Container

    def read(self, updates: int, checks: Sequence[Check], limit: int) -> RecordedBlock:
        """Read all updates, shapes first, so that no tensor is read in vain."""
        # A missing tensor ends the reading at the first update that lacks it, however
        # many updates are claimed.
        count = min(updates, len(self.container.tensors) + 1)
        prefixes = [f"update.{u}.{self.name}." for u in range(count)]
        if isinstance(self.description.layer, Parameters):
            block = self._build({False}, {1})
            require_affordable(self.name, self.description, block, checks, [], limit)
            gradients = [self._gradients(prefix, block) for prefix in prefixes]
            return RecordedBlock(self.description, block, tuple(gradients))
        shapes = [self._shapes(prefix) for prefix in prefixes]
        ids = isinstance(self.description.layer, Embedding)
        block = self._build(
            {ids and Embedding.is_bag(s.inputs, s.grads) for s in shapes},
            {math.prod(s.lead[1:]) for s in shapes},
        )
        require_affordable(self.name, self.description, block, checks, shapes, limit)
        seen = [
            self._update(prefix, shape)
            for prefix, shape in zip(prefixes, shapes, strict=True)
        ]
        return RecordedBlock(self.description, block, tuple(seen))

    def _build(self, bags: set[bool], positions: set[int]) -> Block:
        """Make the block that all updates agree on."""
        if len(bags) > 1 or len(positions) > 1:
            raise RecordError(
                f"update.*.{self.name}.inputs: expected the same number of shared "
                f"positions in every update, got {', '.join(map(str, sorted(positions)))}"
            )
        try:
            return self.description.build(bag=bags.pop(), positions=positions.pop())
        except RecordError as error:
            raise RecordError(f"blocks.{self.name}: {error}") from None

    def _shapes(self, prefix: str) -> UpdateShapes:
        inputs = self.container.shape(f"{prefix}inputs", self._kind())
        grads = self.container.shape(f"{prefix}output_grads", "floating")
        try:
            lead = self.description.layer.leading_axes(inputs, grads)
        except RecordError as error:
            raise RecordError(f"{prefix}{error}") from None
        if isinstance(self.description.approximation, Series) and len(lead) != 2:
            raise RecordError(
                f"{prefix}inputs: a series needs exactly one shared axis, got "
                f"{len(lead) - 1}"
            )
        return UpdateShapes(inputs, grads, lead)

    def _kind(self) -> str:
        ids = isinstance(self.description.layer, Embedding)
        return "integer" if ids else "floating"

    def _update(self, prefix: str, shapes: UpdateShapes) -> Seen:
        layer = self.description.layer
        name = f"{prefix}inputs"
        x = self.container.load(name, self._kind(), shapes.inputs)
        if isinstance(layer, Embedding):
            count = layer.num_embeddings
            if not (np.all(x >= 0) and np.all(x < count)):
                raise RecordError(f"{name}: expected ids from 0 to {count - 1}")
            # The narrowest dtype that every library can index with.
            x = x.astype(np.int32 if count <= 2**31 else np.int64)
        g = self.container.load(f"{prefix}output_grads", "floating", shapes.grads)
        return Seen(shapes.lead[0], x, g, self._mask(f"{prefix}mask", shapes))

    def _mask(self, name: str, shapes: UpdateShapes) -> HostArray | None:
        if name not in self.container.tensors:
            return None
        if isinstance(self.description.layer, ScaleShift):
            return None
        if isinstance(self.description.approximation, Series):
            raise RecordError(f"{name}: a series takes no mask")
        flags = self.container.load(name, "mask", shapes.lead)
        if not np.all((flags == 0) | (flags == 1)):
            raise RecordError(f"{name}: expected 0 or 1 everywhere")
        mask: HostArray = flags != 0
        return mask

    def _gradients(self, prefix: str, block: Block) -> Seen:
        name = f"{prefix}batch_size"
        size = int(self.container.load(name, "integer", ()))
        if size < 1:
            raise RecordError(f"{name}: expected an integer >= 1, got {size}")
        gradients = {
            parameter: self.container.load(
                f"{prefix}grads.{parameter}", "floating", shape
            )
            for parameter, shape in block.layer.parameter_shapes.items()
        }
        return Seen(size, gradients=gradients)


def norm_of(answer: Mapping[str, HostArray], /) -> float:
    """Return the Frobenius norm of all parts together, without over- or underflow."""
    largest = max(float(np.max(np.abs(part))) for part in answer.values())
    if largest == 0.0 or not np.isfinite(largest):
        return largest
    parts = (part.astype(np.float64) / largest for part in answer.values())
    return largest * float(np.sqrt(sum(np.sum(part * part) for part in parts)))


def _vector(
    check: Check, recorded: RecordedBlock, container: Container
) -> dict[str, HostArray]:
    if not isinstance(check, VectorCheck):
        return {}
    return _parameters(f"vector.{check.vector}", "floating", recorded, container)


def _answer(
    check: Check, recorded: RecordedBlock, container: Container
) -> dict[str, HostArray]:
    name = f"expected.{check.expected}"
    if isinstance(check, VectorCheck):
        return _parameters(name, "answer", recorded, container)
    layer = recorded.block.layer
    shape = answer_shape(check, recorded.description, layer.matrix_shape, layer.groups)
    return {"": container.load(name, "answer", shape)}


def _require_tolerance(
    place: str,
    check: Check,
    expected: dict[str, HostArray],
    vector: dict[str, HostArray],
) -> None:
    """Refuse a tolerance with which an answer without a correct digit would agree."""
    scale = norm_of(expected)
    if not scale > 0:
        scale = norm_of(vector) if vector else 1.0
    rtol = 0.0 if check.rtol is None else check.rtol
    if not rtol <= LARGEST_TOLERANCE:
        raise RecordError(
            f"{place}.rtol: expected at most {LARGEST_TOLERANCE}, got {rtol}"
        )
    if not check.atol <= (LARGEST_TOLERANCE - rtol) * scale:
        raise RecordError(
            f"{place}.atol: expected at most {(LARGEST_TOLERANCE - rtol) * scale:.1e}, so "
            f"that with `rtol` it is {LARGEST_TOLERANCE} of the expected answer, got "
            f"{check.atol}"
        )


def _parameters(
    name: str, kind: str, recorded: RecordedBlock, container: Container
) -> dict[str, HostArray]:
    shapes = recorded.block.layer.parameter_shapes
    return {p: container.load(f"{name}.{p}", kind, s) for p, s in shapes.items()}
