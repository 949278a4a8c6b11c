"""Checkpoints of the original programs: one folder for each program's format."""
