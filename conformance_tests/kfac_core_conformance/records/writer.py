"""Writing a record from any training step.

Three lines write one, with arrays of any supported library::

    writer.update({"fc1": Batch(inputs, output_grads)})
    writer.check("fc1", "multiply_inverse", vector=gradients, expected=preconditioned)
    writer.save("step.safetensors")

In the format, output gradients belong to the loss summed over the batch, and the outer
products of several backpropagated vectors are summed; the writer rescales gradients from
the conventions it is given.  Arrays are copied to the host immediately.
`RecordWriter.save` validates the file with `read_record` before it is put in place.
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
from kfac_core.array import Array
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

# Whoever writes a record could already compute with it.
_UNLIMITED = 2**63


class RecordWriter:
    """Collects the inputs and output gradients of layers, and an implementation's answers.

    Parameters
    ----------
    blocks : mapping of str to Block
        The blocks by name, of letters, digits, ``_`` and ``-``.
    decay, weight, debias : float, float, bool
        The moving average; see `kfac_core.Estimator`.
    loss, sources : str
        How the output gradients are scaled; see `Conventions`.
    damping, damping_rule : float and str, optional
        The default of all checks.
    producer, note : str
        Free text: library, version and commit; and remarks.

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
        self._conventions = Conventions(reduction=loss, sources=sources)
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
            **_without_none(damping=damping, damping_rule=damping_rule),
        }

    def update(self, batches: Mapping[str, Batch | GradientBatch], /) -> None:
        """Record one update of every block.

        Parameters
        ----------
        batches : mapping of str to Batch or GradientBatch
            One for each block: the format feeds every block in every update.

        Raises
        ------
        RecordError
            If a block is missing or unknown, or a gradient batch has several
            backpropagated vectors, which the format cannot express.
        ShapeError, DtypeError, MixedArraysError
            If arrays do not fit their layer.
        """
        if set(batches) != set(self._blocks):
            raise RecordError(
                f"Expected a batch for each of the blocks {sorted(self._blocks)}, got "
                f"{sorted(batches)}."
            )
        tensors: dict[str, HostArray] = {}
        for name, batch in batches.items():
            parts = tensors_of(batch, self._blocks[name].layer, self._conventions)
            prefix = f"update.{self._updates}.{name}."
            tensors.update({prefix + part: values for part, values in parts.items()})
        self._tensors.update(tensors)
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
        """Record a check of the state after the last update, with its answer.

        Parameters
        ----------
        block : str
            The name of the block.
        operation : str
            A check of the format, such as ``"multiply_inverse"``.
        vector : mapping of str to array, optional
            The vector, by parameter; for the operations that take one.
        expected : mapping of str to array, or array, optional
            The answer: by parameter, or one array.  By default `kfac_core` computes it
            in float64 when the record is saved.
        factor, exp, transpose, damped : optional
            The operation's own fields: the statistic asked for, the exponent, whether the
            Cholesky factor is transposed, whether the block is damped.
        damping, damping_rule : float and str, optional
            The damping of this check, if it differs from the record's.
        rtol, atol : float, optional
            The tolerances.  By default `rtol` is 1e-10 for an answer in float64 and 1e-4
            in float32, and `atol` is 0.  Together at most a tenth of the answer.

        Raises
        ------
        UnknownBlockError
            If there is no block of that name.
        RecordError
            If the operation is unknown, or `vector` or `expected` is no array.  Its
            fields are validated when the record is saved.
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
        fields = _without_none(
            factor=factor, exp=exp, transpose=transpose, damped=damped
        )
        overrides = _without_none(damping=damping, damping_rule=damping_rule)
        tolerances = _without_none(rtol=rtol, atol=atol)
        if vector is not None:
            check["vector"] = f"v{index}"
            self._put(f"vector.v{index}", vector)
        if expected is None:
            self._unanswered.add(index)
        else:
            self._put(f"expected.r{index}", expected)
        self._checks.append({**check, **fields, **overrides, **tolerances})

    def save(self, path: str | os.PathLike[str], /) -> None:
        """Write the record.

        Parameters
        ----------
        path : path-like
            The file, which is replaced atomically if it exists.

        Raises
        ------
        RecordError
            If the record is invalid; nothing is written then.
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
        arrays = {name: values}
        if isinstance(values, Mapping):
            arrays = {f"{name}.{parameter}": x for parameter, x in values.items()}
        for path, x in arrays.items():
            try:
                self._tensors[path] = host_array(x)
            except TypeError:
                option = name.partition(".")[0]
                raise RecordError(
                    f"Expected `{option}` to be an array, or arrays by parameter, got "
                    f"{shown(x)}."
                ) from None

    def _write(self, path: Path) -> None:
        document = {**self._document, "updates": self._updates, "checks": self._checks}
        # The package writes the buffer of an array, whatever its strides are.
        tensors = {k: np.ascontiguousarray(v) for k, v in self._tensors.items()}
        # `ascontiguousarray` makes a vector of length 1 from a scalar.
        shaped = {k: v.reshape(self._tensors[k].shape) for k, v in tensors.items()}
        metadata = {METADATA_KEY: json.dumps(document)}
        save_file(shaped, path, metadata=metadata)

    def _computed(self, draft: Path) -> dict[str, HostArray]:
        """Compute the answers that were left out."""
        place = Place(selected_backend("numpy"), "float64")
        tensors: dict[str, HostArray] = {}
        with open_container(draft) as container:
            record = assemble(
                str(draft), container, _UNLIMITED, unanswered=self._unanswered
            )
        for block, numbers in record.document.checks_by_block().items():
            recomputation = Recomputation(record, block, place)
            for index in (i for i in numbers if i in self._unanswered):
                name = f"expected.{record.document.checks[index].expected}"
                for part, values in recomputation.answer(index).items():
                    tensors[f"{name}.{part}" if part else name] = values
        return tensors


def _without_none(**fields: Any) -> dict[str, Any]:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}
