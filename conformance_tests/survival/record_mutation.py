"""Verification records that are forged: whole files that say something else."""

from __future__ import annotations

import random

from .container import RECORD, opened, sealed
from .file_mutation import changed


def forged(data: bytes, rng: random.Random, /) -> bytes:
    """Return a record with a few changes to its document and tensors."""
    container = opened(data, key=RECORD)
    changed(container, rng, part=None)
    return sealed(container, key=RECORD)
