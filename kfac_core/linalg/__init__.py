"""Linear algebra on arrays, which knows nothing of curvature.

Each operation is written once in the pure Array API standard; `dispatch` lets a
backend put a native one in its place.
"""
