"""Curvature operators: immutable snapshots that multiply vectors."""
