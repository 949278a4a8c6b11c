"""Tokens at chosen positions on the CPU: torch's own, since a cast is little there beside a product."""

from subquad.kernels.tokens_at.reference import tokens_at as tokens_at
