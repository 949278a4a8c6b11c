"""What a program or a notebook calls: train, evaluate and compare models, and use those that were trained.

    import subquad

    run = subquad.train("phrases", model={"encoder": {"mixer": "eva"}}, out="runs/eva")
    subquad.evaluate(run).metrics["bleu"].value
    run.translate("5 km")
    subquad.compare("phrases", ["softmax", "eva"])

`import subquad` offers these names and loads nothing heavy until one of them is used. The commands of `subquad` parse
their words, call the same functions, and show what they return.
"""

import io
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from subquad.compare import Comparison, Result
from subquad.compare.advice.advise import advise
from subquad.compare.comparison import LENGTHS, MAX_SECONDS, SEEDS, TOKENS
from subquad.compare.executors import build_executor
from subquad.compare.executors.base import Executor
from subquad.compare.matching import Match
from subquad.compare.statistics.times import LOOKS
from subquad.compare.study import study
from subquad.evaluate.report import EvaluationReport, evaluation_path
from subquad.evaluate.significance import RESAMPLES
from subquad.linearise.linearise import linearise, linearise_dry_run
from subquad.progress import Progress, TrainingProgress
from subquad.run import Run
from subquad.tasks.base import EvaluationOptions
from subquad.train import checkpoint as stored
from subquad.train.diagnostics.dry_run import DryRun, dry_run
from subquad.train.diagnostics.profiler import Profile, profile_updates
from subquad.train.from_run import RunStart
from subquad.train.recipe import Changes, Recipe, read_recipe
from subquad.train.run import (
    check_has_data,
    evaluate_to_file,
    find_checkpoint,
    opened_run,
    train_run,
)
from subquad.train.run_folder import RECIPE, check_run
from subquad.train.trackers import local_run
from subquad.train.trainer import Trainer

__all__ = [
    "DryRun",
    "advise",
    "average_checkpoints",
    "compare",
    "dry_run",
    "evaluate",
    "linearise",
    "linearise_dry_run",
    "load_run",
    "profile",
    "study",
    "train",
]

RecipeLike = str | Path | Mapping[str, Any] | Recipe
"""A recipe: the path of a YAML file, the name of one that comes with subquad, its content, or one that was read."""


# ---------------------------------------------------------------------- training


def train(
    recipe: RecipeLike | None = None,
    *changes: str,
    out: str | Path | None = None,
    from_run: str | Path | None = None,
    reset: Sequence[str] = (),
    checkpoint: str = "best",
    quiet: bool = False,
    **sections: Any,
) -> Run:
    """Trains a model by a recipe, or goes on with a run that was interrupted, and returns the run.

    recipe: the path of a YAML file, the name of a recipe that comes with subquad, or its content as a mapping. changes:
    as on the command line, such as "train.updates=100". sections: changes to the recipe's sections, such as
    `train={"updates": 100}`. out: the run directory; by default it is runs/NAME for the recipe NAME, or the run whose
    own recipe is given. from_run: a run whose weights, tokenizers and optimiser a new run begins with, to fine-tune it;
    without a recipe it has that of the other run. reset: what begins anew, "optimizer" and "schedule" (the count of
    updates). checkpoint: which weights of from_run to take, see `load_run`. quiet: print no progress. Under torchrun
    all processes call it and share the batches of every update. An interruption (SIGINT or SIGTERM) finishes the update
    and saves it, and then raises KeyboardInterrupt.

    >>> import subquad
    >>> run = subquad.train("digits", train={"updates": 60}, out="runs/digits", quiet=True)
    >>> run.updates, sorted(run.metrics)
    (60, ['loss', 'top1', 'top5'])
    """
    if from_run is not None:
        return _train_from(Path(local_run(from_run)), checkpoint, reset, recipe, [*changes, sections], out, quiet)
    if recipe is None:
        raise ValueError("say what to train: a recipe, or from_run, a run to begin with")
    if reset or checkpoint != "best":
        raise ValueError("reset and checkpoint are about the run that a new one begins with: give from_run, too")
    folder, own = run_folder(recipe, out), trained_run_of(recipe)
    read = _read_for(folder, recipe, [*changes, sections])
    note = None
    if own is not None and folder.resolve() != own.resolve() and not folder.exists():
        note = f"{folder} is a new run, with none of the weights of {own}; --out {own} goes on with those"
    train_run(read, folder, quiet=quiet, note=note)
    return Run(folder)


def _train_from(
    run: Path,
    checkpoint: str,
    reset: Sequence[str],
    recipe: RecipeLike | None,
    changes: Changes,
    out: str | Path | None,
    quiet: bool,
) -> Run:
    """Trains a run that begins with the weights of another, or goes on with it."""
    if out is None:
        raise ValueError("a run that begins with another one has no name of its own: say where it goes, with --out")
    folder = Path(out)
    if folder.resolve() == run.resolve():
        raise ValueError(f"{run} cannot begin with itself: give another --out; without --from-run it goes on")
    check_run(run)
    before = read_recipe(run / RECIPE)
    check_has_data(read_recipe(run / RECIPE if recipe is None else recipe, changes), run, "train")
    start = RunStart(run, before, find_checkpoint(run, before, checkpoint), tuple(reset))
    train_run(start.recipe_of_new_run(recipe, changes), folder, quiet=quiet, start=start)
    return Run(folder)


def run_folder(recipe: RecipeLike, out: str | Path | None = None) -> Path:
    """The run directory that `train` uses for a recipe."""
    if out is not None:
        return Path(out)
    if not isinstance(recipe, str | Path):
        raise ValueError("a recipe that is no file has no name: say where its run goes, with out=FOLDER")
    return trained_run_of(recipe) or Path("runs") / Path(recipe).stem


def _read_for(folder: Path, recipe: RecipeLike, changes: Changes) -> Recipe:
    """A recipe for training in a folder. That of another run may be about tokenizers which only that run has."""
    read = read_recipe(recipe, changes)
    if not isinstance(recipe, str | Path) or Path(recipe).name != RECIPE:
        return read
    own = Path(recipe).parent
    return read if own.resolve() == folder.resolve() else read.model_copy(update={"data": read.data.in_run(own)})


def trained_run_of(recipe: RecipeLike) -> Path | None:
    """The run whose own recipe this file is, if it has learned something."""
    if not isinstance(recipe, str | Path) or Path(recipe).name != RECIPE:
        return None
    folder = Path(recipe).parent
    return folder if stored.checkpoints(stored.checkpoint_folder(folder)) else None


def profile(recipe: RecipeLike, *changes: str, updates: int, out: str | Path | None = None, **sections: Any) -> Profile:
    """Measures where the time of some updates goes, and writes it to profile.json of the run directory; see `train`.

    No weights are kept.
    """
    folder = run_folder(recipe, out)
    read = _read_for(folder, recipe, [*changes, sections])
    with opened_run(read, folder) as (task, workers):
        # what the updates log must not become a part of the run
        with tempfile.TemporaryDirectory() as scratch, TrainingProgress(stream=io.StringIO()) as progress:
            trainer = Trainer(read, task, Path(scratch), progress, [], workers)
            with closing(trainer.loader), closing(trainer.updates()) as steps:
                found = profile_updates(lambda: next(steps), trainer.phases, updates)
        if workers.is_rank_zero:
            found.write(folder)
        return found


# ---------------------------------------------------------------------- trained runs


def load_run(folder: str | Path, checkpoint: str = "best", changes: Sequence[str] = ()) -> Run:
    """A trained run, with its model loaded.

    folder: the run directory, or an artifact as wandb:ENTITY/PROJECT/NAME:VERSION. checkpoint: "best" by the
    validation metric, "last", the name of one such as "average", or a path. changes: to the recipe's sections decode
    and data, such as "decode.beam=4".

    >>> import subquad
    >>> run = subquad.load_run("runs/digits", checkpoint="last")
    >>> run.recipe.task, run.updates, type(run.model).__name__
    ('image-classification', 60, 'VisionTransformer')
    """
    run = Run(folder, checkpoint, changes)
    assert run.loaded  # mistakes show here, not when the run is first used
    return run


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


# ---------------------------------------------------------------------- evaluation


def evaluate(
    run: str | Path | Run,
    *changes: str,
    split: str = "test",
    checkpoint: str = "best",
    context_window: int = 0,
    first: int | None = None,
    against: str | Path | None = None,
    resamples: int = RESAMPLES,
    out: str | Path | None = None,
    quiet: bool = False,
) -> EvaluationReport:
    """Measures the quality of a run on a split of its data, with confidence intervals, and writes it to a JSON file.

    run: its folder, or a run that `train` or `load_run` returned, whose model is taken as it is. changes: to the
    recipe's sections decode and data, such as "decode.beam=4". checkpoint: see `load_run`. context_window: tokens of
    earlier text that a language model reads before those that count. first: evaluate so many samples only, from the
    first one on. against: a run that was evaluated on the same split in the same way, to test whether the two differ.
    resamples: of the bootstrap. out: the file; by default RUN/evaluation-SPLIT.json, where a window and a number of
    samples have names of their own, such as evaluation-test-context-256.json. Under torchrun the processes share the
    samples.

    >>> import subquad
    >>> report = subquad.evaluate("runs/digits", quiet=True)
    >>> report.samples, sorted(report.metrics)
    (250, ['top1', 'top5'])
    >>> report.metrics["top1"].low <= report.metrics["top1"].value
    True
    """
    if isinstance(run, Run) and (changes or checkpoint != "best"):
        raise ValueError("a loaded run has a checkpoint and options: give them to load_run, or give a folder")
    folder = run.folder if isinstance(run, Run) else local_run(run)
    return evaluate_to_file(
        run.loaded if isinstance(run, Run) else folder,
        split,
        Path(out) if out is not None else evaluation_path(folder, split, context_window, first),
        checkpoint=checkpoint,
        changes=changes,
        options=EvaluationOptions(context_window, first),
        against=Path(against) if against is not None else None,
        resamples=resamples,
        quiet=quiet,
    )


def compare(
    recipe: RecipeLike,
    mixers: Sequence[str] = (),
    *,
    out: str | Path | None = None,
    quiet: bool = False,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    runs: Sequence[str] = (),
    baseline: str = "softmax",
    seeds: int | Sequence[int] = SEEDS,
    match: Match = "parameters",
    split: str | None = None,
    lengths: Sequence[int] = LENGTHS,
    tokens: int = TOKENS,
    rounds: Sequence[int] = LOOKS,
    margin: str | float | None = None,
    max_seconds: float = MAX_SECONDS,
    retry: bool = False,
    floors: bool = True,
    tune: int = 0,
    executor: str | Executor = "local",
    executor_options: Mapping[str, Any] | None = None,
    title: str | None = None,
    command: str = "",
    **sections: Any,
) -> Result:
    """Compares mechanisms in the model of a recipe: quality, and cost by length. Goes on where it was interrupted.

    recipe, sections: as for `train`. out: the folder of the comparison, by default runs/compare-NAME for the recipe
    NAME.yaml; it gets result.json and report.html, a page that opens offline. mixers: names of mechanisms,
    "label=name", or patterns of layers such as "hybrid=softmax*5,primal". options: what is set for one mechanism, by
    label: its options, and changes to the sections model, optim, schedule and train of its recipe, such as
    {"eva": {"window": 64, "schedule": {"lr": 1e-3}}}. runs: finished runs to take instead of training, as "folder" or
    "label=folder". baseline: what the others are compared with. seeds: how many, or which. match: "parameters" makes
    feed-forward networks as wide as it takes to have as many parameters as the baseline, "none" leaves their widths.
    split: what quality is measured on. lengths: at which costs are measured besides the task's own, with batches of
    `tokens` tokens; a mechanism whose pass took longer than `max_seconds` is not tried at longer ones. rounds: after
    how many rounds times are looked at. margin: a difference in quality that makes no practical difference, such as 0.5
    or "2%". retry: try trainings that failed once more. floors: compare with simple models of the data and a model
    without mixing. tune: how many trials each mechanism gets to find its settings with, before the best ones are
    trained with all seeds. executor: where trainings run, "local", "ray" or "slurm", or an executor of your own;
    executor_options: such as {"cpus": 2, "gpus": 1}. title, command: what the page is called, and how it says that it
    was made.

    >>> import subquad
    >>> small = {"train": {"updates": 60}, "model": {"dim": 16}, "floors": False}
    >>> result = subquad.compare("digits", ["softmax"], seeds=1, lengths=[], quiet=True, **small)
    >>> [(trial.mechanism, trial.status) for trial in result.trials]
    [('softmax', 'done')]
    """
    if "quality_lengths" in sections:
        raise ValueError("several lengths are several comparisons: subquad.study(..., quality_lengths=[256, 1024])")
    name = Path(recipe).stem if isinstance(recipe, str | Path) else None
    if out is None and name is None:
        raise ValueError("a recipe that is no file has no name: say where the comparison goes, with out=FOLDER")
    engine = build_executor(executor, executor_options) if isinstance(executor, str) else executor
    folder = Path(out) if out is not None else Path("runs") / f"compare-{name}"
    comparison = Comparison.create(
        _read_for(folder, recipe, [sections]),
        folder,
        mixers,
        options=options,
        runs=runs,
        baseline=baseline,
        seeds=seeds,
        match=match,
        split=split,
        lengths=lengths,
        tokens=tokens,
        rounds=rounds,
        margin=margin,
        max_seconds=max_seconds,
        retry=retry,
        floors=floors,
        tune=tune,
    )
    with Progress(stream=io.StringIO() if quiet else None) as progress:
        comparison.run(progress.report, executor=engine)
    return comparison.write_report(title or name or "Comparison", command)
