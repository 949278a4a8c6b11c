"""Comparisons of mechanisms in one recipe: quality, and cost by length.

    plan            what will be computed; variants: the recipe's model with each mechanism in it
    trials          every mechanism is trained with every seed and evaluated, in processes of their own
    measure/        costs by length, decoding speed and swaps into the trained baseline, side by side
    report/         the result: its statistics, conclusions, table, page and JSON file

`comparison` leads through these steps in this order.
"""

from subquad.compare.comparison import Comparison
from subquad.compare.report.result import Result

__all__ = ["Comparison", "Result"]
