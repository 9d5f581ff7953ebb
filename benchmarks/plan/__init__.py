"""Forecasts of a step on many processes: its time, its calls and its bytes."""
