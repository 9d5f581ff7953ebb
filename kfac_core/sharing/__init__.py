"""Factors and weights that several layers have in common."""
