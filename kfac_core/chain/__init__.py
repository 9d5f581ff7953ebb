"""Curvature between layers: a chain of layers, whose inverse is block-tridiagonal."""
