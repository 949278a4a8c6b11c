"""`subquad average`: the mean of the weights of several checkpoints of a run."""

from typing import Annotated

import typer

from subquad.cli.options import RunFolder


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
        typer.Option(min=0, help="With --epochs or --updates, ignore what is newer than this."),
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
    from subquad.train import checkpoint as stored
    from subquad.train.recipe import read_recipe
    from subquad.train.run import RECIPE, check_run, find_checkpoint

    if sum(given is not None and given != [] for given in (checkpoints, epochs, updates)) != 1:
        raise ValueError("say which checkpoints to average, in one way: their names, --epochs N or --updates N")
    if up_to is not None and checkpoints:
        raise ValueError("--up-to goes with --epochs or --updates, not with names")
    if "/" in name or not name:
        raise ValueError(f"--name {name!r}: a name is needed, not a path; the result is RUN/checkpoints/NAME")
    check_run(run)
    folder = stored.checkpoint_folder(run)
    if checkpoints:
        recipe = read_recipe(run / RECIPE)
        chosen = [find_checkpoint(run, recipe, one) for one in checkpoints]
    else:
        chosen = stored.newest(folder, epochs or updates or 1, up_to=up_to, epoch_ends=epochs is not None)
    weights = stored.average(chosen, ema=stored.has_average(chosen[0]))
    latest = max((stored.read_state(path) for path in chosen), key=lambda state: state.update)
    state = stored.TrainState(latest.update, latest.epoch, extra={"average of": [path.name for path in chosen]})
    path = stored.save_weights(folder / name, weights, state)
    print(f"{path}: the mean of {', '.join(one.name for one in chosen)}")
