"""Comparisons of mechanisms in one recipe: quality, and cost by length.

    plan            what will be computed; variants: the recipe's model with each mechanism in it
    trials          every mechanism is trained with every seed and evaluated, in processes of their own
    measure/        costs by length, decoding speed and distance from exact attention, measured side by side
    report/         the result: its statistics, conclusions, table, page and JSON file

`comparison` leads through these steps in this order.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from subquad.compare.comparison import LENGTHS, MAX_SECONDS, REPEATS, TOKENS, Comparison, OnProgress
from subquad.compare.report.schema import Result
from subquad.train.recipe import Recipe

__all__ = ["Comparison", "Result", "compare"]


def compare(
    recipe: Recipe,
    mixers: Sequence[str] = (),
    *,
    out: str | Path,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    runs: Sequence[str] = (),
    baseline: str = "softmax",
    seeds: int | Sequence[int] = 1,
    split: str | None = None,
    lengths: Sequence[int] = LENGTHS,
    tokens: int = TOKENS,
    repeats: int = REPEATS,
    max_seconds: float = MAX_SECONDS,
    retry: bool = False,
    title: str = "Comparison",
    command: str = "",
    on_progress: OnProgress = lambda *_: None,
) -> Result:
    """Trains, evaluates and measures mechanisms in the model of a recipe, and returns the result.

    The folder `out` keeps everything, and gets the result as result.json and report.html. The same call goes on where
    it was interrupted and computes nothing twice.

    mixers          names of mechanisms, or `label=name`; the name `recipe` stands for the recipe's own model
    options         options of the mechanisms by label, such as {"eva": {"window": 64}}
    runs            finished runs to use instead of training, as `folder` or `label=folder`
    baseline        the label of the mechanism that the others are compared with; it is added if it is not named
    seeds           how many, from the recipe's on, or which
    split           the data that quality is measured on; by default it is `test`, or `valid` if there is no `test`
    lengths         the lengths of sequences at which costs are measured, each with a batch of `tokens` tokens
    repeats         how often every time is measured
    max_seconds     a mechanism whose training pass took longer than this is not tried at longer lengths
    retry           try trials that failed once more
    title, command  what the page is called, and how it says that it was made
    on_progress     receives how many steps are done, of how many, and a message
    """
    comparison = Comparison.create(
        recipe,
        Path(out),
        mixers,
        options=options,
        runs=runs,
        baseline=baseline,
        seeds=seeds,
        split=split,
        lengths=lengths,
        tokens=tokens,
        repeats=repeats,
        max_seconds=max_seconds,
        retry=retry,
    )
    comparison.run(on_progress)
    return comparison.write_report(title, command)
