"""Estimators in files: written by one backend, read by any other."""

from kfac_core.checkpoint.reading import (
    join_checkpoints,
    load_checkpoint,
    read_header,
)
from kfac_core.checkpoint.writing import save_checkpoint

__all__ = [
    "join_checkpoints",
    "load_checkpoint",
    "read_header",
    "save_checkpoint",
]
