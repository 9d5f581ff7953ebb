"""Layers as geometry: shapes, layouts, and batches of a framework as rows.

Here are the forms of rows that an approximation's `updated` is given; the layers
themselves are names of `kfac_core`.
"""

from kfac_core.layers.example_gradients import ExampleGradients
from kfac_core.layers.id_rows import IdRows
from kfac_core.layers.rows import PixelRows, Rows

__all__ = ["ExampleGradients", "IdRows", "PixelRows", "Rows"]
