"""Coverage-guided fuzzing of the readers of files: ``python -m fuzzing checkpoint``."""
