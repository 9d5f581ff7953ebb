"""Gauss-Newton of all blocks of a record together, in the space of samples.

The rows are those of the last update, M backpropagated vectors for each of N examples, an
example's side by side.  With J their derivatives by all parameters, the answers are

    expected.samples.gram = J J^T,   expected.samples.direction.BLOCK.PARAMETER = d,
    d = mu phi + J^T (J J^T + N lam I)^-1 (r - mu J phi),

for the residuals r, ``samples.residuals`` of shape (N, M), and the last direction phi,
``samples.last.BLOCK.PARAMETER``, which is there where mu is not 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from kfac_core.errors import RecordError
from kfac_core_conformance.records.container import Container, HostArray
from kfac_core_conformance.records.schema import Part

if TYPE_CHECKING:
    from kfac_core_conformance.records.record import RecordedBlock

Vectors = Mapping[str, Mapping[str, HostArray]]


class Samples(Part, frozen=True):
    """The field ``samples`` of a document."""

    damping: Annotated[float, msgspec.Meta(gt=0)]
    momentum: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0


@dataclass(frozen=True)
class RecordedSamples:
    """What a record has for `Samples`, and the answers.

    Attributes
    ----------
    description : Samples
        Damping and momentum.
    residuals, gram : numpy.ndarray, shapes (N, M) and (N M, N M)
        The residuals r, and ``J J^T``.
    last, direction : mapping of str to mapping of str to numpy.ndarray
        Vectors by block and parameter; `last` is empty without momentum.
    """

    description: Samples
    residuals: HostArray
    gram: HostArray
    last: Vectors
    direction: Vectors


def read_samples(
    description: Samples,
    blocks: Mapping[str, RecordedBlock],
    container: Container,
    limit: int,
    /,
) -> RecordedSamples:
    """Read the tensors of `Samples`; shapes follow from the blocks.

    Raises
    ------
    RecordError
        For blocks without rows or with other examples, and tensors that are missing or of
        another shape.
    """
    forms: dict[str, tuple[int, int]] = {}
    for name, recorded in blocks.items():
        seen: Any = recorded.updates[-1]
        if seen.output_grads is None:
            raise RecordError(f"samples: the block {name!r} has no rows")
        forms[name] = seen.batch_size, len(seen.output_grads)
    if len(set(forms.values())) > 1:
        raise RecordError(f"samples: expected the same rows in all blocks, got {forms}")
    N, M = next(iter(forms.values()))
    if limit < 8 * (N * M) ** 2:
        raise RecordError(f"samples: {N * M} rows need more memory than the limit")

    def vectors(name: str, kind: str) -> Vectors:
        return {
            block: {
                parameter: container.load(f"{name}.{block}.{parameter}", kind, shape)
                for parameter, shape in recorded.block.layer.parameter_shapes.items()
            }
            for block, recorded in blocks.items()
        }

    return RecordedSamples(
        description,
        container.load("samples.residuals", "floating", (N, M)),
        container.load("expected.samples.gram", "answer", (N * M, N * M)),
        vectors("samples.last", "floating") if description.momentum else {},
        vectors("expected.samples.direction", "answer"),
    )


def condition_of(samples: RecordedSamples, /) -> float:
    """Return the condition number of ``K + N lam I``."""
    shift = len(samples.residuals) * samples.description.damping
    return float(np.linalg.norm(samples.gram, 2)) / shift + math.sqrt(2.0)
