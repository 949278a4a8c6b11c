"""Checkpoints of image classifiers in DeiT's layout."""
