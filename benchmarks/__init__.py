"""Measurements. `python -m benchmarks.families --help` says what there is."""
