"""What may come of reading a record: one that can be checked, or an error."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np

from kfac_core.errors import RecordError
from kfac_core_conformance.records import check_record, read_record

from .file_verdict import SLACK, TIMES

RECORDS = Path(__file__).parents[1] / "records"
LARGEST = 8_000
"""Bytes that a record which is mutated may have: small ones are read quickly."""


class RecordJudge:
    """Reads records and says what came of it.

    Parameters
    ----------
    folder : path-like
        In which files are put to be read.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "mutated.safetensors"
        self.peak = 0
        paths = sorted(RECORDS.glob("*.safetensors"))
        small = [path for path in paths if path.stat().st_size <= LARGEST]
        self.seeds = {path.stem: path.read_bytes() for path in small}
        assert len(self.seeds) >= 10

    def verdict(self, data: bytes, /, *, measured: bool = True) -> str:
        """Read a record, and raise `AssertionError` for whatever must not be.

        Parameters
        ----------
        data : bytes
            The file.
        measured : bool
            Whether memory is measured, and a record that was read is also checked.

        Returns
        -------
        str
            ``"refused"`` or ``"sound"``.
        """
        self.path.write_bytes(data)
        if measured:
            tracemalloc.start()
        try:
            record = read_record(self.path)
        except RecordError:
            return "refused"
        finally:
            if measured:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                self.peak = max(self.peak, peak)
                assert peak <= SLACK + TIMES * len(data), (peak, len(data))
        if measured:
            with np.errstate(all="ignore"):
                assert len(check_record(record, backend="numpy")) == len(
                    record.document.checks
                )
        return "sound"
