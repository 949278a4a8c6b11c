"""`subquad advise`: what mechanisms would cost at a length, before anything is trained."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from subquad.cli.options import parse_integer, parse_mechanisms, split_words
from subquad.cli.output import print_table
from subquad.progress import Progress

if TYPE_CHECKING:
    from subquad.compare.advice.advise import Advice, Prediction, Row


def advise(
    length: Annotated[int, typer.Option(help="The length of your sequences, in tokens.")],
    causal: Annotated[bool, typer.Option("--causal", help="Advise on causal layers, as language models have.")] = False,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Say what fits into this memory, such as 16G, with one sequence at a time."),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(metavar="RECIPE", help="Measure the whole model of this recipe instead of single layers."),
    ] = None,
    results: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Read quality from the result.json of a comparison or the study.json of a study, and costs, too, if "
            "it has them at four lengths or more: then nothing is measured. May be repeated.",
        ),
    ] = None,
    mixers: Annotated[
        str,
        typer.Option(
            help="The mechanisms to advise on, separated by commas. `linear` stands for all mechanisms of linear "
            "memory, and `all` for all."
        ),
    ] = "linear",
    lengths: Annotated[
        str | None,
        typer.Option(help="The lengths to measure, four or more. By default there are eight from 128 to 2,048."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is timed at each length.")] = 5,
    dim: Annotated[int, typer.Option(help="The width of single layers.")] = 256,
    heads: Annotated[int, typer.Option(help="The heads of single layers.")] = 4,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write everything to this file, too, as JSON.")
    ] = None,
) -> None:
    """Predict what mechanisms cost at a length, before training.

    A short measurement on this machine, of half a minute or so, fits time and memory of a training pass as a function
    of the length. The table has the predictions for one sequence, each with an interval of 95 %, and the length from
    which on a mechanism is faster than softmax attention. The command ends with the comparison to run next.

    Examples:
    subquad advise --length 8000 --causal --memory 16G
    subquad advise --length 4096 --recipe phrases --mixers lightconv,eva,local
    subquad advise --length 16000 --results runs/which/result.json --json advice.json
    """
    if json_file is not None and (json_file.is_dir() or not json_file.absolute().parent.is_dir()):
        raise ValueError(f"--json {json_file}: the name of a file in an existing folder is needed")
    if recipe is not None:
        from subquad.recipes.schema import check_recipe

        check_recipe(recipe)
    from subquad import api
    from subquad.allocator import set_up_command
    from subquad.compare.advice.advise import LENGTHS

    set_up_command()  # again: importing torch has used up what the first call put aside
    measured = LENGTHS if lengths is None else [parse_integer("--lengths", word) for word in split_words(lengths)]
    with Progress() as progress:

        def step(done: int, total: int, message: str) -> None:
            progress.total = total
            progress.update(message, done)

        advice = api.advise(
            length,
            causal=causal,
            memory=memory,
            recipe=recipe,
            mixers=parse_mechanisms(mixers),
            results=results or [],
            lengths=measured,
            rounds=rounds,
            dim=dim,
            heads=heads,
            on_step=step,
        )
    show_advice(advice)
    if json_file is not None:
        from subquad.files import write_json

        write_json(json_file, advice.model_dump(mode="json"))


def show_advice(advice: "Advice") -> None:
    """Prints the table, what was refused and why, the notes, and the command."""
    from subquad.compare.report.formatting import NOTHING

    headers = [
        "mechanism",
        f"training at {advice.length:,} tokens",
        "speed",
        "faster from",
        "memory",
        "fits",
        "quality",
    ]
    done = [row for row in advice.rows if row.status == "done"]
    cells = [_cells(row, advice.memory_bytes is not None) for row in done]
    kept = [i for i in range(len(headers)) if i == 0 or any(row[i] != NOTHING for row in cells)]
    print_table([headers[i] for i in kept], [[row[i] for i in kept] for row in cells], numeric=[1, 2, 3, 4])
    for row in advice.rows:
        if row.status == "refused":
            print(f"refused: {row.mechanism}: {row.reason}")
    print()
    for note in advice.notes:
        print(note)
    print(f"\nNext:\n  {advice.command}")


def _cells(row: "Row", asks_memory: bool) -> list[str]:
    from subquad.compare.report.formatting import NOTHING, format_bytes, format_quantity, format_ratio

    def span(found: "Prediction | None", show: Callable[[float], str]) -> str:
        if found is None:
            return NOTHING
        numbers = (found.value, found.low, found.high)
        value, low, high = ("∞" if number is None else show(number) for number in numbers)
        return f"{value} ({low} to {high})"

    def seconds(value: float) -> str:
        return format_quantity(1000 * value, "ms")

    fits = {True: "yes", False: "no", None: "perhaps"}[row.fits] if asks_memory else NOTHING
    return [
        row.mechanism,
        span(row.seconds, seconds),
        span(row.speed, format_ratio),
        _crossover(row.crossover),
        span(row.bytes, format_bytes),
        fits,
        row.quality or NOTHING,
    ]


def _crossover(found: "Prediction | None") -> str:
    """The length with its interval: "640 (510 to 820)", "always", "never"."""
    from subquad.compare.report.formatting import NOTHING, format_number

    def show(value: float | None) -> str:
        return "never" if value is None else "always" if value < 1 else format_number(value)

    if found is None:
        return NOTHING
    value, low, high = show(found.value), show(found.low), show(found.high)
    return value if value == low == high else f"{value} ({low} to {high})"
