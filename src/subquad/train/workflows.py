"""Training, profiling and evaluating a run from beginning to end: its folder, its data, its progress and its files.

`subquad.api` and the trials of a comparison call these functions, in one process or under torchrun.
"""

import io
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from pathlib import Path

from subquad.environment import environment
from subquad.evaluate.report import EvaluationReport, find_evaluation, read_task, write_evaluation
from subquad.evaluate.significance import RESAMPLES
from subquad.progress import Progress, TrainingProgress
from subquad.tasks.sample_shards import STEPS
from subquad.train import checkpoint as stored
from subquad.train.profiler import Profile, profile_updates
from subquad.train.recipe import Recipe, read_recipe
from subquad.train.run import (
    RECIPE,
    LoadedRun,
    check_run,
    distributed_workers,
    evaluate_run,
    find_checkpoint,
    load_trained,
    locked,
    open_task,
)
from subquad.train.trainer import Trainer


def profile_run(recipe: Recipe, folder: Path, updates: int) -> Profile:
    """Measures where the time of some updates goes, and writes it to profile.json. No weights are kept."""
    with distributed_workers() as workers, locked(folder) if workers.is_rank_zero else nullcontext():
        task = open_task(recipe, folder, workers)
        # what the updates log must not become a part of the run
        with tempfile.TemporaryDirectory() as scratch, TrainingProgress(stream=io.StringIO()) as progress:
            trainer = Trainer(recipe, task, Path(scratch), progress, [], workers)
            with closing(trainer.updates()) as steps:
                profile = profile_updates(lambda: next(steps), trainer.phases, updates)
        if workers.is_rank_zero:
            profile.write(folder)
        return profile


def evaluate_to_file(
    run: Path | LoadedRun,
    split: str,
    path: Path,
    *,
    checkpoint: str = "best",
    changes: Sequence[str] = (),
    context_window: int = 0,
    against: Path | None = None,
    resamples: int = RESAMPLES,
    quiet: bool = False,
) -> EvaluationReport:
    """Evaluates a run on a split and writes the result to `path`, with the statistics of every sample beside it.

    run: its folder, of which a checkpoint is loaded, or a run that is loaded already. against: a run that was evaluated
    on the same split, to test whether the two differ.
    """
    if path.suffix != ".json":
        raise ValueError(f"{path}: the name of a JSON file is needed, such as {path}.json")
    other = find_evaluation(against, split) if against is not None else None
    with distributed_workers() as workers:
        loaded = run if isinstance(run, LoadedRun) else load_trained(run, checkpoint, changes)
        task = loaded.recipe.task_class
        if other is not None and (theirs := read_task(other)) != task.name:
            runs = f"{loaded.folder} is a run of task {task.name}, {other} of {theirs}"
            raise ValueError(f"{runs}: the two cannot be compared")
        start = time.monotonic()
        silent = io.StringIO() if quiet or not workers.is_rank_zero else None
        with Progress(STEPS * task.evaluation_passes, stream=silent) as progress:
            found = evaluate_run(loaded, split, context_window=context_window, workers=workers, report=progress)
        report = EvaluationReport(
            path=path,
            task=task.name,
            split=split,
            samples=found.samples,
            lost=found.lost,
            metrics=found.estimates(resamples),
            data=found.data,
            settings=found.settings,
            counts=found.counts,
            run=str(loaded.folder),
            checkpoint=loaded.checkpoint.name,
            update=loaded.update,
            seconds=round(time.monotonic() - start, 3),
            environment=environment(loaded.device),
            against=found.differences(other, resamples) if other is not None else None,
        )
        if workers.is_rank_zero:
            write_evaluation(found, report)
    return report


def average_checkpoints(
    run: Path,
    checkpoints: Sequence[str] = (),
    *,
    epochs: int | None = None,
    updates: int | None = None,
    up_to: int | None = None,
    name: str = "average",
) -> tuple[Path, list[str]]:
    """Writes the mean of the weights of several checkpoints as a checkpoint of the run; its folder and what is in it.

    checkpoints: by name or path. epochs, updates: instead of them, the newest so many that were saved at the end of an
    epoch, or in all, none of them after the epoch or update `up_to`.
    """
    if sum(bool(given) for given in (checkpoints, epochs, updates)) != 1:
        raise ValueError("say which checkpoints to average, in one way: by their names, or how many epochs or updates")
    if up_to is not None and checkpoints:
        raise ValueError("a last epoch or update goes with a number of epochs or updates, not with names")
    if "/" in name or not name:
        raise ValueError(f"{name!r} is a path, where the name of the result is needed: it will be RUN/checkpoints/NAME")
    check_run(run)
    folder = stored.checkpoint_folder(run)
    if checkpoints:
        recipe = read_recipe(run / RECIPE)
        chosen = [find_checkpoint(run, recipe, one) for one in checkpoints]
    else:
        chosen = stored.newest(folder, epochs or updates or 1, up_to=up_to, epoch_ends=epochs is not None)
    weights = stored.average(chosen, ema=stored.has_average(chosen[0]))
    latest = max((stored.read_state(path) for path in chosen), key=lambda state: state.update)
    names = [path.name for path in chosen]
    state = stored.TrainState(latest.update, latest.epoch, extra={"average of": names})
    return stored.save_weights(folder / name, weights, state), names
