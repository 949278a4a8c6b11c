"""subquad: sequence mixing that costs less than the square of the length, behind one contract."""

__version__ = "0.1.0"
