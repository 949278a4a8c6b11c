"""A run directory, opened for training or for use.

    recipe.yaml, environment.json   the recipe with all its defaults, and the machine
    inputs.json, tokenizers/        what turns raw inputs into the model's
    data/                           prepared tokens
    metrics.jsonl, checkpoints/     what was measured and learned
    imported.json                   where the run came from, if it was another program
    from_run.json                   the run whose weights it began with, if it did not begin with random ones

Training on an existing run resumes it. Its recipe must be the same, but for RESUMABLE_FIELDS. A run that came from
another program gets its data when training goes on. Using a run opens neither the training data nor its tokens.
"""

import fcntl
import io
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import yaml

from subquad.config import changed_names
from subquad.data.hub import HUB
from subquad.data.text.prepare import ReportProgress
from subquad.data.tokenizers import Tokenizer, load_tokenizer
from subquad.decode.options import DecodeOptions
from subquad.environment import environment
from subquad.evaluate.report import Evaluation, EvaluationReport, find_evaluation, read_task, write_evaluation
from subquad.evaluate.significance import RESAMPLES
from subquad.files import CHECKSUM, read_metadata, read_yaml, wrap_corrupt_data_errors, write_json, write_text
from subquad.models import Model, build_from_config
from subquad.models.storage import load_weights
from subquad.progress import Progress, TrainingProgress
from subquad.tasks.base import INPUTS, INPUTS_FORMAT, TOKENIZERS, DataConfig, EvaluationOptions, Task
from subquad.tasks.sample_shards import STEPS, SampleShards
from subquad.train.agreement import PATIENCE, share_files
from subquad.train.checkpoint import BestMetric, best, checkpoint_folder, checkpoints, load_weights_of, read_state
from subquad.train.distributed import ALONE, Workers, expected_workers, join, leave
from subquad.train.from_run import FROM_RUN, RunStart, check_tokens
from subquad.train.recipe import ENVIRONMENT, Recipe, describe_origins, read_recipe
from subquad.train.run_folder import RECIPE, check_run
from subquad.train.trackers import build_trackers
from subquad.train.trainer import EndsEarly, Trainer

DATA = "data"
IMPORTED, METRICS = "imported.json", "metrics.jsonl"
LOCK = ".lock"
RESUMABLE_FIELDS = (
    *("train.updates", "train.epochs", "train.minutes", "train.patience", "train.log_every"),
    *("train.data_workers", "train.checkpoint_activations", "train.sharded", "train.timeout"),
    *("checkpoints", "track", "decode"),
)
"""What may change when a run goes on: how long it trains, what is kept and shown, and what does not change a number."""
IMPORTED_FIELDS = ("data", "optim", "schedule", "train", "checkpoints", "track", "decode")
"""What else may change in a run that was imported, until it is trained here: all but the model and its task."""
USAGE_FIELDS = ("decode", "data")
"""Sections of a recipe that may be changed for a model that is trained already."""


# ---------------------------------------------------------------------- training


@contextmanager
def distributed_workers(timeout: timedelta = PATIENCE) -> Iterator[Workers]:
    """The processes that torchrun started, or this one alone. timeout: how long an exchange may take."""
    try:
        yield join(timeout)
    finally:
        leave()


@contextmanager
def opened_run(recipe: Recipe, folder: Path, start: RunStart | None = None) -> Iterator[tuple[Task, Workers]]:
    """The task of a run, whose directory no other training has, and the processes that share the training.

    One process writes the files, and the others read them once they see them. It joins the others when it has written
    them: preparing data may take hours, and an exchange between those that have joined has a timeout.
    """
    first = expected_workers().is_rank_zero
    with locked(folder) if first else nullcontext():
        task = _write_run(recipe, folder, start) if first else None
        with distributed_workers(timedelta(minutes=recipe.train.timeout)) as workers:
            share_files(folder, [DATA, INPUTS, TOKENIZERS, FROM_RUN], workers)
            yield task or build_task(recipe, folder / DATA), workers


def _write_run(recipe: Recipe, folder: Path, start: RunStart | None) -> Task:
    if start is not None and checkpoints(checkpoint_folder(folder)):
        start.check_began(folder)
    if not open_run(recipe, folder) and start is not None:
        start.write(folder)
    task = build_task(recipe, folder / DATA)
    if (folder / IMPORTED).exists() or (folder / FROM_RUN).exists():
        check_tokens(task, folder)
    task.save_inputs(folder)
    return task


def train_run(
    recipe: Recipe,
    folder: Path,
    *,
    quiet: bool = False,
    note: str | None = None,
    ends_early: EndsEarly | None = None,
    start: RunStart | None = None,
) -> None:
    """Trains to the end of the recipe, in a new run directory or on from the last checkpoint of an existing one.

    quiet: print nothing. note: what to print first. ends_early: asked after every validation whether to end here.
    start: what a new run begins with; None: with random weights, or with what from_run.json says.
    """
    with opened_run(recipe, folder, start) as (task, workers):
        trackers = build_trackers(recipe.track, folder, recipe.model_dump(mode="json")) if workers.is_rank_zero else []
        stream = io.StringIO() if quiet or not workers.is_rank_zero else None
        with TrainingProgress(stream=stream) as progress:
            if note is not None:
                progress.note(note)
            trainer = Trainer(recipe, task, folder, progress, trackers, workers, ends_early, start)
            size = f"{trainer.model.parameter_count():,} parameters, {len(trainer.plan.sizes):,} samples"
            progress.note(f"{folder}: {size}")
            for split, note in task.notes().items():
                progress.note(f"{split}: {note}")
            if count := len(trainer.plan.skipped):
                progress.note(f"train: {count:,} samples are longer than train.budget.max_tokens and left out")
            try:
                trainer.fit()
            finally:
                trainer.loss.release()
        workers.barrier()  # to those that are behind, a process that leaves looks like one that died


def build_task(recipe: Recipe, cache: Path, report: ReportProgress | None = None) -> Task:
    """Opens the task of a recipe with its data.

    cache: where text that is not prepared yet is written as tokens, which is a folder of the run directory.
    """
    data = recipe.data.in_run(cache.parent)
    return recipe.task_class.open(data, cache, recipe.train.smoothing, recipe.train.aux_weight, report)


def open_run(recipe: Recipe, run: Path) -> bool:
    """Writes the recipe of a new run, or compares it with that of a trained run. Returns whether the run is trained."""
    data = recipe.model_dump(mode="json")
    path = run / RECIPE
    trained = bool(checkpoints(checkpoint_folder(run))) or (run / IMPORTED).exists()
    if not path.exists() or not trained:  # what failed before it had learned anything decides nothing
        run.mkdir(parents=True, exist_ok=True)
        if path.exists() and read_yaml(path, "recipe") != data:
            (run / FROM_RUN).unlink(missing_ok=True)  # what another recipe was to begin with
        write_json(run / ENVIRONMENT, environment(_device()) | describe_origins(recipe.model_data({})))
        write_text(path, yaml.safe_dump(data, sort_keys=False))
        return False
    before = read_yaml(path, "recipe")
    untouched = only_imported(run)
    if untouched:
        check_has_data(recipe, run, "train")
    free = IMPORTED_FIELDS if untouched else RESUMABLE_FIELDS
    changed = [key for key in differences(before, data) if not key.startswith(free)]
    if changed:
        raise ValueError(
            f"{run} holds a run of another recipe ({', '.join(changed)} differ); give another --out, or the same recipe"
        )
    if data != before:
        write_text(path, yaml.safe_dump(data, sort_keys=False))
    return True


def only_imported(run: Path) -> bool:
    """Whether a run was imported and not trained here, so that the data in its recipe may not exist."""
    return (run / IMPORTED).exists() and not (run / METRICS).exists()


def check_has_data(recipe: Recipe, run: Path, split: str) -> None:
    """Refuses an imported run that was given no data: the files that its recipe names do not exist."""
    files = recipe.data.split_files(split)
    if files is None or not only_imported(run):
        return
    if any(file.startswith(HUB) or Path(file).exists() for file in files):
        return
    missing = f"there is no {files[0]}; " if files else ""
    raise ValueError(
        f'{missing}{run} was imported and has no data of its own: give it some, as in "{recipe.data.example(split)}"'
    )


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Keeps other trainers out of a run directory. The system releases the lock when this process ends or dies."""
    run.mkdir(parents=True, exist_ok=True)
    path = run / LOCK
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(handle, 20, 0).decode(errors="replace").strip() or "unknown"
            raise ValueError(f"process {owner} trains in {run}; wait until it ends, or give another --out") from None
        except OSError as error:  # some shared file systems have no locks
            reason = error.strerror
            warnings.warn(f"{run} cannot be locked ({reason}): let no other process train in it", stacklevel=3)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)


def differences(before: Any, now: Any, prefix: str = "") -> list[str]:
    """Returns the dotted names of the options in which two configs differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = dict.fromkeys([*before, *now])
        return [found for key in keys for found in differences(before.get(key), now.get(key), f"{prefix}{key}.")]
    return [] if before == now else [prefix.rstrip(".")]


# ---------------------------------------------------------------------- use


@dataclass(frozen=True)
class LoadedRun:
    """A run with the weights of one checkpoint in its model, which is in eval mode.

    update: how far the checkpoint was trained. inputs: the content of inputs.json. prepared_data: the folder in which
    training prepared the same data as the recipe names now; None if there is none.
    """

    folder: Path
    recipe: Recipe
    model: Model
    checkpoint: Path
    update: int
    inputs: dict[str, Any]
    prepared_data: Path | None = None

    def tokenizer(self, side: str) -> Tokenizer:
        """The tokenizer of `source`, `target` or `text`."""
        return load_tokenizer(self.folder / TOKENIZERS / side)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def data(self) -> DataConfig:
        return self.recipe.data

    @property
    def decode(self) -> DecodeOptions:
        return self.recipe.decode


def load_trained(folder: str | Path, checkpoint: str = "best", changes: Sequence[str] = ()) -> LoadedRun:
    """Loads the model of a run, on the GPU if there is one.

    checkpoint: `best` by the validation metric, `last`, the name of one (such as update-000001000 or average), or the
    path of one. Where the run keeps a moving average of the weights, that is used, as in validation. changes: to the
    recipe, for sections that a trained model leaves open, such as decode.beam=4.
    """
    folder = Path(folder)
    check_run(folder)
    for change in changes:
        names = changed_names(change)
        if names[0] not in USAGE_FIELDS and names != ["train", "data_workers"]:
            usage = f"options of {' and '.join(USAGE_FIELDS)}, and train.data_workers,"
            raise ValueError(f"{change}: the model is trained; only {usage} can change")
    recipe = read_recipe(folder / RECIPE, changes)
    if not (folder / INPUTS).is_file():
        raise ValueError(
            f"{folder} holds no {INPUTS}; `subquad train RECIPE --out {folder}` writes it without training"
        )
    inputs = read_metadata(folder / INPUTS, INPUTS_FORMAT, "inputs of a model", ["model", CHECKSUM])
    with wrap_corrupt_data_errors(f"the run {folder}"):
        path = find_checkpoint(folder, recipe, checkpoint)
        weights, state = load_weights_of(path), read_state(path)
        model = build_from_config(recipe.model_data(inputs["model"]))
        load_weights(model, weights)
    unchanged = not changes or recipe.data == read_recipe(folder / RECIPE).data
    prepared = folder / DATA if unchanged and (folder / DATA).exists() else None
    recipe = recipe.model_copy(update={"data": recipe.data.in_run(folder)})
    return LoadedRun(folder, recipe, model.to(_device()).eval(), path, state.update, inputs, prepared)


def _device() -> torch.device:
    """Where runs are trained and used."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def find_checkpoint(folder: Path, recipe: Recipe, name: str) -> Path:
    """Returns the folder of a checkpoint, which is `best`, `last`, the name of one in the run, or a path."""
    within = checkpoint_folder(folder)
    every = checkpoints(within)
    if not every and name in ("best", "last"):
        raise ValueError(f"{folder} has no checkpoint yet; `subquad train {folder / RECIPE} --out {folder}` goes on")
    if name == "last":
        return every[0]
    if name == "best":
        task = recipe.task_class
        if found := best(within, BestMetric(task.metric, task.better)):
            return found[0]
        if len(every) == 1:  # an imported one: it was validated elsewhere
            return every[0]
        raise ValueError(f"no checkpoint of {folder} has been validated; take --checkpoint last")
    for path in (within / name, Path(name)):
        if path.is_dir():
            return path
    known = sorted(path.name for path in within.iterdir() if not path.name.startswith(".")) if within.is_dir() else []
    raise ValueError(f"{folder} has no checkpoint {name!r}; it has best, last, {', '.join(known) or 'nothing'}")


def evaluate_run(
    run: LoadedRun,
    split: str,
    *,
    options: EvaluationOptions | None = None,
    workers: Workers = ALONE,
    report: Callable[[str], None] | None = None,
) -> Evaluation:
    """Evaluates a run on a split. The workers share the samples, and all of them get the same result.

    report: gets a message several times in each pass over the samples.
    """
    options = replace(options or EvaluationOptions(), data_workers=run.recipe.train.data_workers)
    task = run.recipe.task_class
    if options.context_window and not task.reads_context:
        raise ValueError(f"a context window is for language models; this run's task is {task.name}")
    check_has_data(run.recipe, run.folder, split)
    shards = SampleShards(workers.rank, workers.world, workers.all_gather, report or (lambda _: None))
    with torch.inference_mode():
        return task.evaluate(run, split, shards, options)


def evaluate_to_file(
    run: Path | LoadedRun,
    split: str,
    path: Path,
    *,
    checkpoint: str = "best",
    changes: Sequence[str] = (),
    options: EvaluationOptions | None = None,
    against: Path | None = None,
    resamples: int = RESAMPLES,
    quiet: bool = False,
) -> EvaluationReport:
    """Evaluates a run on a split and writes the result to `path`, with the statistics of every sample beside it.

    run: its folder, of which a checkpoint is loaded, or a run that is loaded already. against: a run that was evaluated
    on the same split with the same options, to test whether the two differ.
    """
    options = options or EvaluationOptions()
    if path.suffix != ".json":
        raise ValueError(f"{path}: the name of a JSON file is needed, such as {path}.json")
    other = None
    if against is not None:
        other = find_evaluation(against, split, options.context_window, options.first)
    with distributed_workers() as workers:
        loaded = run if isinstance(run, LoadedRun) else load_trained(run, checkpoint, changes)
        chosen = sorted(set(workers.all_gather(loaded.checkpoint.name)))
        if len(chosen) > 1:  # a machine may see an older list of them
            raise ValueError(
                f"the processes see different checkpoints ({', '.join(chosen)}); name the one to use "
                "(--checkpoint NAME), or wait a minute until all machines see the same"
            )
        task = loaded.recipe.task_class
        if other is not None and (theirs := read_task(other)) != task.name:
            runs = f"{loaded.folder} is a run of task {task.name}, {other} of {theirs}"
            raise ValueError(f"{runs}: the two cannot be compared")
        start = time.monotonic()
        silent = io.StringIO() if quiet or not workers.is_rank_zero else None
        with Progress(STEPS * task.evaluation_passes, stream=silent) as progress:
            found = evaluate_run(loaded, split, options=options, workers=workers, report=progress)
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
            loss_by_position=found.loss_by_position,
        )
        if workers.is_rank_zero:
            write_evaluation(found, report)
    return report
