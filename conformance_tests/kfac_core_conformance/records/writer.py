"""Writing a record from any training step.

Three lines in the step dump one, whatever the library of the arrays::

    writer.update({"fc1": Batch(inputs, output_grads)})
    writer.check("fc1", "multiply_inverse", vector=gradients, expected=preconditioned)
    writer.save("step.safetensors")

Conventions.  The format's output gradients belong to the loss summed over the batch, and
its sources are summed: what a framework gives is scaled to that, as its `Conventions`
say.  Arrays are copied to the host when they are given.  `RecordWriter.save` reads what it
is about to write with the reader that everybody uses, so that no file is written that
this library would refuse.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

import kfac_core
from kfac_core.array.backend import Array
from kfac_core.array.selection import selected_backend
from kfac_core.block import Block
from kfac_core.conventions import Conventions, LossReduction, SourceReduction
from kfac_core.damping import DampingRule
from kfac_core.errors import RecordError, UnknownBlockError
from kfac_core.layers.example_gradients import GradientBatch
from kfac_core.layers.rows import Batch
from kfac_core_conformance.records.answers import Place, Recomputation
from kfac_core_conformance.records.block import describe
from kfac_core_conformance.records.checks import CHECKS
from kfac_core_conformance.records.container import (
    METADATA_KEY,
    HostArray,
    open_container,
)
from kfac_core_conformance.records.document import FORMAT, VERSION
from kfac_core_conformance.records.record import assemble, read_record
from kfac_core_conformance.records.seen import host_array, tensors_of
from kfac_core_conformance.records.text import shown

__all__ = ["RecordWriter"]

# Whoever writes a record has computed with it already.
_UNLIMITED = 2**63


class RecordWriter:
    """Collects what layers saw and what an implementation answered.

    Parameters
    ----------
    blocks : mapping of str to Block
        The blocks by name, of letters, digits, ``_`` and ``-``.
    decay, weight, debias : float, float, bool
        The moving average, as `Estimator` has it.
    loss, sources : str
        How the output gradients are scaled; see `Conventions`.
    damping, damping_rule : float and str, optional
        Those of every check that does not say its own.
    producer, note : str
        Free text: library, version and commit; and anything else.

    Raises
    ------
    RecordError
        For a block that the format cannot describe.
    ConventionError
        For an unknown `loss` or `sources`.
    """

    def __init__(
        self,
        blocks: Mapping[str, Block],
        *,
        decay: float,
        loss: LossReduction,
        sources: SourceReduction = "sum",
        weight: float = 1.0,
        debias: bool = True,
        damping: float | None = None,
        damping_rule: DampingRule | None = None,
        producer: str = "",
        note: str = "",
    ) -> None:
        self._blocks = dict(blocks)
        self._conventions = Conventions(loss=loss, sources=sources)
        self._updates = 0
        self._checks: list[dict[str, Any]] = []
        self._unanswered: set[int] = set()
        self._tensors: dict[str, HostArray] = {}
        self._document: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "producer": producer or f"kfac_core {kfac_core.__version__}",
            "note": note,
            "blocks": {name: describe(block) for name, block in self._blocks.items()},
            "ema": {"decay": decay, "weight": weight, "debias": debias},
            **_given(damping=damping, damping_rule=damping_rule),
        }

    def update(self, batches: Mapping[str, Batch | GradientBatch], /) -> None:
        """Record what every block saw in one update.

        Parameters
        ----------
        batches : mapping of str to Batch or GradientBatch
            One for each block: the format feeds every block in every update.

        Raises
        ------
        RecordError
            Where a block is missing or unknown, or gradients have several sources,
            which the format cannot state.
        ShapeError, DtypeError, MixedArraysError
            For arrays that do not fit their layer.
        """
        if set(batches) != set(self._blocks):
            raise RecordError(
                f"Expected what each of the blocks {sorted(self._blocks)} saw, got "
                f"{sorted(batches)}."
            )
        found: dict[str, HostArray] = {}
        for name, batch in batches.items():
            parts = tensors_of(batch, self._blocks[name].layer, self._conventions)
            prefix = f"update.{self._updates}.{name}."
            found.update({prefix + part: values for part, values in parts.items()})
        self._tensors.update(found)
        self._updates += 1

    def check(
        self,
        block: str,
        operation: str,
        /,
        *,
        vector: Mapping[str, Array] | None = None,
        expected: Mapping[str, Array] | Array | None = None,
        factor: str | None = None,
        exp: float | None = None,
        transpose: bool | None = None,
        damped: bool | None = None,
        damping: float | None = None,
        damping_rule: DampingRule | None = None,
        rtol: float | None = None,
        atol: float | None = None,
    ) -> None:
        """Record a question about the state after the last update, and its answer.

        Parameters
        ----------
        block : str
            The block asked.
        operation : str
            A check of the format, such as ``"multiply_inverse"``.
        vector : mapping of str to array, optional
            The vector, by parameter; for the operations that take one.
        expected : mapping of str to array, or array, optional
            The answer: by parameter, or one array.  Where it is left out, this library
            computes it in float64 when the record is saved.
        factor, exp, transpose, damped : optional
            The operation's own fields, as the format has them.
        damping, damping_rule : float and str, optional
            Those of this check, where they are not those of the whole record.
        rtol, atol : float, optional
            The tolerance; the format's default where left out.

        Raises
        ------
        UnknownBlockError
            For a name that is no block.
        RecordError
            For an unknown operation.  Whether its fields are right is found out when
            the record is saved.
        """
        if block not in self._blocks:
            raise UnknownBlockError(
                f"Unknown block {block!r}; the blocks are {sorted(self._blocks)}."
            )
        if operation not in CHECKS:
            raise RecordError(
                f"Unknown check {shown(operation)}; expected one of "
                f"{', '.join(CHECKS)}."
            )
        index = len(self._checks)
        check = {"block": block, "op": operation, "expected": f"r{index}"}
        own = _given(factor=factor, exp=exp, transpose=transpose, damped=damped)
        overrides = _given(damping=damping, damping_rule=damping_rule)
        tolerances = _given(rtol=rtol, atol=atol)
        if vector is not None:
            check["vector"] = f"v{index}"
            self._put(f"vector.v{index}", vector)
        if expected is None:
            self._unanswered.add(index)
        else:
            self._put(f"expected.r{index}", expected)
        self._checks.append({**check, **own, **overrides, **tolerances})

    def save(self, path: str | os.PathLike[str], /) -> None:
        """Write the record.

        Parameters
        ----------
        path : path-like
            Where to; a file that is there is replaced, and only by a whole one.

        Raises
        ------
        RecordError
            Where the record would not be read back; nothing is written then.
        """
        target = Path(path)
        with tempfile.TemporaryDirectory(
            dir=target.parent, prefix=".record-"
        ) as folder:
            draft = Path(folder) / target.name
            self._write(draft)
            if self._unanswered:
                self._tensors.update(self._computed(draft))
                self._unanswered.clear()
                self._write(draft)
            read_record(draft, memory_limit=_UNLIMITED)
            draft.replace(target)

    def _put(self, name: str, values: Mapping[str, Array] | Array) -> None:
        if isinstance(values, Mapping):
            for parameter, part in values.items():
                self._tensors[f"{name}.{parameter}"] = host_array(part)
        else:
            self._tensors[name] = host_array(values)

    def _write(self, path: Path) -> None:
        document = {**self._document, "updates": self._updates, "checks": self._checks}
        # The package writes the buffer of an array, whatever its strides are.
        tensors = {k: np.ascontiguousarray(v) for k, v in self._tensors.items()}
        # That function makes a vector of length 1 from a scalar.
        shaped = {k: v.reshape(self._tensors[k].shape) for k, v in tensors.items()}
        metadata = {METADATA_KEY: json.dumps(document)}
        save_file(shaped, path, metadata=metadata)

    def _computed(self, draft: Path) -> dict[str, HostArray]:
        """Return the answers that nobody gave, as this library has them."""
        place = Place(selected_backend("numpy"), "float64")
        tensors: dict[str, HostArray] = {}
        with open_container(draft) as container:
            record = assemble(
                str(draft), container, _UNLIMITED, unanswered=self._unanswered
            )
        for block, numbers in record.document.checks_by_block().items():
            made = Recomputation(record, block, place)
            for index in (i for i in numbers if i in self._unanswered):
                name = f"expected.{record.document.checks[index].expected}"
                for part, values in made.answer(index).items():
                    tensors[f"{name}.{part}" if part else name] = values
        return tensors


def _given(**fields: Any) -> dict[str, Any]:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}
