"""Scores of primal attention on the CPU: torch's own products, which are most of the work."""

from subquad.kernels.primal_scores.reference import primal_scores as primal_scores
