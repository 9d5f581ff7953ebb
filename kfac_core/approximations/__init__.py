"""Approximations as mathematics: which statistics are kept, which operator they make."""
