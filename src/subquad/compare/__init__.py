"""Measured comparisons: time and memory by length, and the checks that stand before every number."""
