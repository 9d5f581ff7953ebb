"""Layers as geometry: shapes, layouts, and what a framework has at hand as rows."""
