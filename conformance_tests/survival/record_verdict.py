"""What may come of reading a record: one that can be checked, or an error."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kfac_core.errors import RecordError
from kfac_core_conformance.records import check_record, read_record

from .file_verdict import Reader

RECORDS = Path(__file__).parents[1] / "records"
LARGEST = 8_000
"""Bytes that a record which is mutated may have: small ones are read quickly."""


class RecordJudge(Reader):
    """Says what came of reading a record.

    Parameters
    ----------
    folder : path-like
        In which files are put to be read.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "mutated.safetensors")
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
        try:
            with self.reading(data, measured=measured):
                record = read_record(self.path)
        except RecordError:
            return "refused"
        if measured:
            with np.errstate(all="ignore"):
                assert len(check_record(record, backend="numpy")) == len(
                    record.document.checks
                )
        return "sound"
