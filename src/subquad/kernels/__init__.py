"""Fused operations: each has a reference in plain torch and faster implementations, chosen by `dispatch.py`."""
