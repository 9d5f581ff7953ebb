"""A driver of random sequences of calls: good ones, bad ones, and ones that fail inside.

``python -m conformance_tests.sequences --backend=torch --seconds=600 --seed=7``
"""
