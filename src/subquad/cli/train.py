"""`subquad train`: a recipe, changes to it, a run directory."""

import io
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subquad.cli.interrupts import terminated_as_interrupted
from subquad.cli.options import RecipeFile

if TYPE_CHECKING:
    from subquad.tasks.base import Task
    from subquad.train.distributed import Workers
    from subquad.train.loop import Trainer
    from subquad.train.recipe import Recipe


def train(
    recipe: RecipeFile,
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME=VALUE", help="Changes to the recipe, such as model.encoder.mixer=eva train.updates=100."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The run directory. A run that is there goes on. By default it is runs/NAME, or the run of a recipe "
            "that is in a run directory."
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check recipe and data, print the size and memory of the model, and stop."),
    ] = False,
    profile: Annotated[
        int | None,
        typer.Option(min=1, help="Measure where the time of this many updates goes, and write profile.json only."),
    ] = None,
) -> None:
    """Train a model, or go on with a run.

    Ctrl-C ends the training, and the same command goes on from the last checkpoint. Under torchrun the processes share
    the batches of every update, so that train.accumulate must be a multiple of their number.

    Examples:
    subquad train recipes/small/digits.yaml
    subquad train recipes/small/phrases.yaml model.encoder.mixer=eva --out runs/eva
    subquad train recipes/small/phrases.yaml train.updates=500 --dry-run
    subquad train runs/eva/recipe.yaml --out runs/eva train.updates=4000
    torchrun --nproc-per-node=2 -m subquad train recipes/small/phrases.yaml train.accumulate=2 --out runs/two
    """
    from subquad.train.recipe import read_recipe

    read = read_recipe(recipe, changes or [])
    own = _run_of(recipe)
    folder = out or own or Path("runs") / recipe.stem
    if dry_run:
        _describe(read)
        return
    from subquad.train.distributed import join, leave
    from subquad.train.run import locked

    workers = join()
    if workers.leads and own is not None and folder.resolve() != own.resolve() and not folder.exists():
        print(
            f"{folder} is a new run, with none of the weights of {own}; --out {own} goes on with those", file=sys.stderr
        )
    # a process that waits for others hears no signals: under torchrun, SIGTERM ends it as it stands
    ending = terminated_as_interrupted() if workers.world == 1 else nullcontext()
    try:
        with ending, locked(folder) if workers.leads else nullcontext():
            if profile is None:
                _train(read, folder, workers)
            else:
                _profile(read, folder, workers, profile)
    finally:
        leave()


def _run_of(recipe: Path) -> Path | None:
    """The run whose own recipe this is, if it is one that has learned something."""
    from subquad.train.checkpoint import checkpoint_folder, checkpoints
    from subquad.train.run import RECIPE

    return recipe.parent if recipe.name == RECIPE and checkpoints(checkpoint_folder(recipe.parent)) else None


def _task(recipe: "Recipe", folder: Path, workers: "Workers") -> "Task":
    """Opens the run and its data."""
    from subquad.train.run import open_run

    if not workers.leads:  # files are written by one; the others read them
        workers.wait()
        return recipe.build_task(folder / "data")
    open_run(recipe, folder)
    task = recipe.build_task(folder / "data")
    task.save_inputs(folder)
    workers.wait()
    return task


def _train(recipe: "Recipe", folder: Path, workers: "Workers") -> None:
    from subquad.train.log import Progress, build_trackers, shown_metrics
    from subquad.train.loop import Trainer

    task = _task(recipe, folder, workers)
    trackers = build_trackers(recipe.track, folder, recipe.model_dump(mode="json")) if workers.leads else []
    with Progress(stream=None if workers.leads else io.StringIO()) as progress:
        trainer = Trainer(recipe, task, folder, progress, trackers, workers)
        progress.note(f"{folder}: {trainer.model.parameter_count():,} parameters, {len(trainer.plan.sizes):,} samples")
        for line in _left_out(task, trainer):
            progress.note(line)
        metrics = trainer.fit()
    if workers.leads:
        print(f"{folder}: {shown_metrics(metrics)} after {trainer.update:,} updates")
    workers.wait()  # to those that are behind, a process that leaves looks like one that died


def _left_out(task: "Task", trainer: "Trainer") -> Iterator[str]:
    """What of the data is not used, in lines; images tell when they are read."""
    for split, reasons in task.skipped().items():
        yield f"{split}: samples skipped: {reasons}"
    if count := len(trainer.plan.skipped):
        yield f"train: {count:,} samples are longer than train.budget.max_tokens and left out"


def _profile(recipe: "Recipe", folder: Path, workers: "Workers", updates: int) -> None:
    from subquad.cli.output import print_table
    from subquad.train.log import Progress
    from subquad.train.loop import Trainer
    from subquad.train.profiler import PROFILE, profile_updates

    task = _task(recipe, folder, workers)
    # what the updates log must not become a part of the run
    with tempfile.TemporaryDirectory() as scratch, Progress(stream=io.StringIO()) as progress:
        trainer = Trainer(recipe, task, Path(scratch), progress, [], workers)
        with closing(trainer.updates()) as steps:
            found = profile_updates(lambda: next(steps), trainer.phases, updates)
    if not workers.leads:
        return
    found.write(folder)
    phases = [
        [name, f"{1000 * found.phases[name] / updates:,.1f}", f"{100 * share:.1f} %"]
        for name, share in found.shares.items()
    ]
    print_table([f"phase of {updates} updates", "ms an update", "share"], phases, numeric=(1, 2))
    print(f"in the model (forward, backward, optimiser): {100 * found.model_share:.1f} % of the time\n")
    operators = [
        [each.name, f"{each.calls:,.0f}", f"{each.milliseconds:,.1f}", f"{100 * each.share:.1f} %"]
        for each in found.operators
    ]
    print_table(["operator", "calls an update", "ms an update", "share"], operators, numeric=(1, 2, 3))
    print(f"written to {folder / PROFILE}")


def _describe(recipe: "Recipe") -> None:
    """What would be trained; ValueError at the end if its data cannot be read."""
    from subquad.cli.output import print_table
    from subquad.models.costs import costs

    data = recipe.model_data(recipe.task_class.expected_model_config(recipe.data))
    batch, length = recipe.task_class.typical_batch(recipe.data, recipe.train.budget)
    cost = costs(data, batch, length or 1, streaming=False)
    rows = [
        ["task", recipe.task],
        ["batch", f"{batch} images" if length is None else f"{batch} x {length} tokens"],
        ["parameters", f"{cost.parameters:,}{_given_vocabulary(data)}"],
        ["training memory", f"{cost.training_bytes / 1e6:,.0f} MB"],
    ]
    wrong = {}
    for name, files in recipe.data.input_files().items():
        missing = [file for file in files if not Path(file).exists()]
        problem = f"missing: {', '.join(missing)}" if missing else _unreadable(recipe, name)
        rows.append([f"data: {name}", problem or "found"])
        if problem:
            wrong[name] = problem
    print_table(["", ""], rows)
    if wrong:
        raise ValueError(f"this cannot be trained: {'; '.join(f'{name}: {why}' for name, why in wrong.items())}")


def _given_vocabulary(model: dict[str, Any]) -> str:
    sizes = dict.fromkeys(model[name] for name in ("vocab", "source_vocab", "target_vocab") if name in model)
    shown = " and ".join(f"{size:,}" for size in sizes)
    return f" with a vocabulary of {shown}; the data may give another" if sizes else ""


def _unreadable(recipe: "Recipe", split: str) -> str | None:
    """Why the first sample of a split cannot be read, if it cannot."""
    try:
        recipe.data.check_first_sample(split)
    except ValueError as error:
        return str(error)
    return None
