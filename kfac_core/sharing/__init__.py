"""Factors and weights that several layers share."""
