"""Measurements of what a run costs: `python -m benchmarks`."""
