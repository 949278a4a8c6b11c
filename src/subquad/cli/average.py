"""`subquad average`: the mean of the weights of several checkpoints of a run."""

from typing import Annotated

import typer

from subquad.cli.options import RunFolder, refuse_other_folders


def average(
    run: RunFolder,
    checkpoints: Annotated[
        list[str] | None,
        typer.Argument(metavar="CHECKPOINT", help="The checkpoints by name or path. Or give --epochs or --updates."),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Average the newest N checkpoints that were saved at the end of an epoch.")
    ] = None,
    updates: Annotated[int | None, typer.Option(min=1, help="Average the newest N checkpoints.")] = None,
    up_to: Annotated[
        int | None,
        typer.Option(min=0, help="With --epochs or --updates, leave out checkpoints after this epoch or update."),
    ] = None,
    name: Annotated[str, typer.Option(help="The name of the checkpoint to write.")] = "average",
) -> None:
    """Average the weights of several checkpoints of a run.

    The result is a checkpoint of the run, which other commands use with `--checkpoint average`. If the run keeps a
    moving average of the weights, that is what is averaged. A run keeps its newest two checkpoints and the best one;
    the section `checkpoints` of its recipe can ask for more.

    Examples:
    subquad average runs/phrases --updates 2
    subquad average runs/phrases best last --name mine
    subquad evaluate runs/phrases --checkpoint average
    """
    refuse_other_folders(run)
    from subquad.api import average_checkpoints

    path, averaged = average_checkpoints(run, checkpoints or [], epochs=epochs, updates=updates, up_to=up_to, name=name)
    print(f"{path}: the mean of {', '.join(averaged)}")
