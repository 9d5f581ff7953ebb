"""Coverage-guided fuzzing: ``python -m conformance_tests.fuzzing checkpoint``."""
