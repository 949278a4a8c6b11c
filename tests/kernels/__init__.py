"""Tests of `subquad.kernels`, a file for each of its modules and operations."""
