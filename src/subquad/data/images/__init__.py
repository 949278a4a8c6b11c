"""Labelled images: where they are read from, and how they are transformed and mixed."""
