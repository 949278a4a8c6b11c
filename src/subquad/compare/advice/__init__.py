"""Advice before training: what mechanisms would cost at a length, and what to compare next."""
