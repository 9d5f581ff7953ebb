"""Verification records: answers computed elsewhere, read, recomputed and written.

A record is one file that states a curvature problem completely: what the layers saw,
which approximation was asked for, and what an implementation answered.  `read_record`
reads one without trusting it, `check_record` recomputes its answers, and `RecordWriter`
writes one from a training step.  The packages that this needs are the extra ``records``.
"""

try:
    import msgspec as _msgspec  # noqa: F401
    import safetensors.numpy as _safetensors  # noqa: F401
except (Exception, SystemExit) as error:
    raise ImportError(
        f"records need the packages msgspec and safetensors ({error}); install them with "
        "pip install 'kfac-core[records]' (in a checkout: pip install '.[records]')"
    ) from error

from kfac_core_conformance.records.check import CheckDtype, Verdict, check_record
from kfac_core_conformance.records.record import Record, read_record
from kfac_core_conformance.records.writer import RecordWriter

__all__ = [
    "CheckDtype",
    "Record",
    "RecordWriter",
    "Verdict",
    "check_record",
    "read_record",
]
