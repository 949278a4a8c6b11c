"""What a program or a notebook calls: train, evaluate and compare models, and use those that were trained.

    import subquad

    run = subquad.train("recipes/small/phrases.yaml", model={"encoder": {"mixer": "eva"}}, out="runs/eva")
    subquad.evaluate(run).metrics["bleu"].value
    run.translate("5 km")
    subquad.compare("recipes/small/phrases.yaml", ["softmax", "eva"])

`import subquad` offers these names and loads nothing heavy until one of them is used. The commands of `subquad` parse
their words, call the same functions, and show what they return.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, overload

from subquad.compare import Comparison, Result
from subquad.compare.comparison import LENGTHS, MAX_SECONDS, SEEDS, TOKENS
from subquad.compare.matching import Match
from subquad.compare.statistics.times import LOOKS
from subquad.data.tokenizers import Tokenizer
from subquad.decode.classify import ClassProbabilities, ImageClassifier
from subquad.decode.generate import Generator
from subquad.decode.options import DecodeOptions, SampleOptions
from subquad.decode.translate import Translator
from subquad.evaluate.report import EvaluationReport
from subquad.evaluate.significance import RESAMPLES
from subquad.models import LanguageModel, Model, Seq2Seq
from subquad.models.costs import estimate_costs
from subquad.progress import Progress
from subquad.tasks.image_classification import image_classifier
from subquad.train import checkpoint as stored
from subquad.train.profiler import Profile
from subquad.train.recipe import Recipe, read_recipe
from subquad.train.run import RECIPE, LoadedRun, find_checkpoint, load_trained, train_run
from subquad.train.trackers import local_run
from subquad.train.workflows import average_checkpoints, evaluate_to_file, profile_run

__all__ = [
    "DryRun",
    "Run",
    "average_checkpoints",
    "compare",
    "dry_run",
    "evaluate",
    "load_run",
    "profile",
    "train",
]

RecipeLike = str | Path | Mapping[str, Any] | Recipe
"""A recipe: the path of a YAML file, its content, or a recipe that was read."""


# ---------------------------------------------------------------------- training


def train(
    recipe: RecipeLike, *changes: str, out: str | Path | None = None, quiet: bool = False, **sections: Any
) -> "Run":
    """Trains a model by a recipe, or goes on with a run that was interrupted, and returns the run.

    recipe: the path of a YAML file, or its content as a mapping. changes: as on the command line, such as
    "train.updates=100". sections: changes to the recipe's sections, such as `train={"updates": 100}`. out: the run
    directory; by default it is runs/NAME for the recipe NAME.yaml, or the run whose own recipe is given. quiet: print
    no progress. Under torchrun all processes call it and share the batches of every update. An interruption (SIGINT or
    SIGTERM) finishes the update and saves it, and then raises KeyboardInterrupt.

    >>> import subquad
    >>> run = subquad.train("recipes/small/digits.yaml", train={"updates": 60}, out="runs/digits", quiet=True)
    >>> run.updates, sorted(run.metrics)
    (60, ['loss', 'top1', 'top5'])
    """
    read, folder, own = read_recipe(recipe, [*changes, sections]), run_folder(recipe, out), trained_run_of(recipe)
    note = None
    if own is not None and folder.resolve() != own.resolve() and not folder.exists():
        note = f"{folder} is a new run, with none of the weights of {own}; --out {own} goes on with those"
    train_run(read, folder, quiet=quiet, note=note)
    return Run(folder)


def run_folder(recipe: RecipeLike, out: str | Path | None = None) -> Path:
    """The run directory that `train` uses for a recipe."""
    if out is not None:
        return Path(out)
    if not isinstance(recipe, str | Path):
        raise ValueError("a recipe that is no file has no name: say where its run goes, with out=FOLDER")
    return trained_run_of(recipe) or Path("runs") / Path(recipe).stem


def trained_run_of(recipe: RecipeLike) -> Path | None:
    """The run whose own recipe this file is, if it has learned something."""
    if not isinstance(recipe, str | Path) or Path(recipe).name != RECIPE:
        return None
    folder = Path(recipe).parent
    return folder if stored.checkpoints(stored.checkpoint_folder(folder)) else None


def profile(recipe: RecipeLike, *changes: str, updates: int, out: str | Path | None = None, **sections: Any) -> Profile:
    """Measures where the time of some updates goes, and writes profile.json into the run directory; see `train`."""
    return profile_run(read_recipe(recipe, [*changes, sections]), run_folder(recipe, out), updates)


@dataclass(frozen=True)
class DryRun:
    """What a recipe would train. batch and length: a typical batch; a sample without tokens has the length None.

    data: what is wrong with each input by its name; None: it was found, and its first sample can be read.
    """

    task: str
    batch: int
    length: int | None
    parameters: int
    training_bytes: int
    model: dict[str, Any]
    data: dict[str, str | None]

    @property
    def problems(self) -> dict[str, str]:
        return {name: problem for name, problem in self.data.items() if problem is not None}


def dry_run(recipe: RecipeLike, *changes: str, **sections: Any) -> DryRun:
    """Checks a recipe and its data, and estimates the size and memory of its model without training anything.

    >>> import subquad
    >>> found = subquad.dry_run("recipes/small/digits.yaml")
    >>> found.parameters < 100_000, found.problems
    (True, {})
    """
    read = read_recipe(recipe, [*changes, sections])
    model = read.model_data(read.task_class.expected_model_config(read.data))
    batch, length = read.task_class.typical_batch(read.data, read.train.budget)
    cost = estimate_costs(model, batch, length or 1, streaming=False)
    data = {name: _find_problem(read, name, files) for name, files in read.data.input_files().items()}
    return DryRun(read.task, batch, length, cost.parameters, cost.training_bytes, model, data)


def _find_problem(recipe: Recipe, name: str, files: Sequence[str]) -> str | None:
    """Why an input cannot be read, if it cannot."""
    if missing := [file for file in files if not Path(file).exists()]:
        return f"missing: {', '.join(missing)}"
    try:
        recipe.data.check_first_sample(name)
    except ValueError as error:
        return str(error)
    return None


# ---------------------------------------------------------------------- trained runs


class Run:
    """A run directory, as `train` and `load_run` return it. Its model is loaded when it is first needed."""

    def __init__(self, folder: str | Path, checkpoint: str = "best", changes: Sequence[str] = ()) -> None:
        """See `load_run`."""
        self.folder = local_run(folder)
        self._checkpoint, self._changes = checkpoint, changes

    @cached_property
    def loaded(self) -> LoadedRun:
        """The run with the weights of its checkpoint."""
        return load_trained(self.folder, self._checkpoint, self._changes)

    @property
    def recipe(self) -> Recipe:
        return self.loaded.recipe

    @property
    def model(self) -> Model:
        """The model, in eval mode, on the GPU if there is one."""
        return self.loaded.model

    def tokenizer(self, side: str = "text") -> Tokenizer:
        """The tokenizer of a side: "source" and "target" in translation, otherwise "text"."""
        return self.loaded.tokenizer(side)

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the last validation; none if there was none yet."""
        saved = stored.checkpoints(stored.checkpoint_folder(self.folder))  # an interrupted training saves without them
        return next((metrics for path in saved if (metrics := stored.read_state(path).metrics)), {})

    @property
    def updates(self) -> int:
        """How many updates the run has been trained for."""
        return self._last_state.update

    @cached_property
    def _last_state(self) -> stored.TrainState:
        return stored.read_state(find_checkpoint(self.folder, read_recipe(self.folder / RECIPE), "last"))

    # ------------------------------------------------------------------ use

    def translator(self, *others: "Run", alignments: bool = False, **decode: Any) -> Translator:
        """Translates many lines. others: runs that form an ensemble with this one. decode: see `DecodeOptions`."""
        models = []
        for run in (self, *others):
            if not isinstance(run.model, Seq2Seq):
                raise ValueError(f"{run.folder} is a run of task {run.recipe.task}; only runs of translation translate")
            for side in ("source", "target"):
                if run.tokenizer(side).fingerprint() != self.tokenizer(side).fingerprint():
                    raise ValueError(f"{run.folder} and {self.folder} have different tokenizers: no ensemble of them")
            models.append(run.model)
        options = self._decode_options(decode)
        return Translator(models, self.tokenizer("source"), self.tokenizer("target"), options, alignments=alignments)

    @overload
    def translate(self, texts: str, **decode: Any) -> str: ...
    @overload
    def translate(self, texts: Sequence[str], **decode: Any) -> list[str]: ...
    def translate(self, texts: str | Sequence[str], **decode: Any) -> str | list[str]:
        """The translation of a text, or of each text of a list. decode: options of `DecodeOptions`, such as `beam`.

        >>> import subquad
        >>> run = subquad.load_run("runs/phrases")
        >>> german = run.translate(["5 km", "3 May"], beam=4)
        >>> len(german)
        2
        """
        given = [texts] if isinstance(texts, str) else texts
        found = [result.text for result in self.translator(**decode).translate(given)]
        return found[0] if isinstance(texts, str) else found

    def generator(self, *others: "Run", **decode: Any) -> Generator:
        """Continues many texts. others: runs that form an ensemble with this one. decode: see `DecodeOptions`."""
        models = []
        for run in (self, *others):
            if not isinstance(run.model, LanguageModel):
                raise ValueError(f"{run.folder} is a run of task {run.recipe.task}; only language models generate text")
            models.append(run.model)
        return Generator(models, self.tokenizer("text"), self._decode_options(decode))

    @overload
    def generate(self, prompts: str = "", tokens: int = 100, **options: Any) -> str: ...
    @overload
    def generate(self, prompts: Sequence[str], tokens: int = 100, **options: Any) -> list[str]: ...
    def generate(self, prompts: str | Sequence[str] = "", tokens: int = 100, **options: Any) -> str | list[str]:
        """A text that begins with the prompt, or one for each prompt of a list, with at most `tokens` more tokens.

        options: of `SampleOptions`, such as `temperature`.

        >>> import subquad
        >>> run = subquad.load_run("runs/speeches")
        >>> run.generate("My fellow", tokens=20, temperature=0.8, seed=1).startswith("My fellow")
        True
        """
        given = [prompts] if isinstance(prompts, str) else prompts
        found = self.generator().sample(given, tokens, SampleOptions.parse("sampling", options))
        return found[0].text if isinstance(prompts, str) else [one.text for one in found]

    def classifier(self) -> ImageClassifier:
        """Classifies many images."""
        return image_classifier(self.loaded)

    def classify(self, *files: str | Path) -> dict[str, ClassProbabilities]:
        """The most probable classes of images with their probabilities, by the name of the image.

        files: images, or files of numpy with one or several images.

        >>> import subquad
        >>> classes = subquad.load_run("runs/digits").classify("images.npy")
        >>> list(classes), len(classes["images.npy[0]"])
        (['images.npy[0]', 'images.npy[1]'], 5)
        """
        classifier = self.classifier()
        return {name: classes for file in files for name, classes in classifier.classify_file(str(file))}

    def _decode_options(self, given: Mapping[str, Any]) -> DecodeOptions:
        """The recipe's section `decode`, with the options that were given; those that are None were not."""
        changes = {name: value for name, value in given.items() if value is not None}
        if "nbest" in changes and "beam" not in changes:
            changes["beam"] = max(self.recipe.decode.beam, changes["nbest"])
        return DecodeOptions.parse("decoding", self.recipe.decode.model_dump() | changes)


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


# ---------------------------------------------------------------------- evaluation


def evaluate(
    run: str | Path | Run,
    *changes: str,
    split: str = "test",
    checkpoint: str = "best",
    context_window: int = 0,
    against: str | Path | None = None,
    resamples: int = RESAMPLES,
    out: str | Path | None = None,
    quiet: bool = False,
) -> EvaluationReport:
    """Measures the quality of a run on a split of its data, with confidence intervals, and writes it to a JSON file.

    run: its folder, or a run that `train` or `load_run` returned, whose model is taken as it is. changes: to the
    recipe's sections decode and data, such as "decode.beam=4". checkpoint: see `load_run`. context_window: tokens of
    earlier text that a language model reads before those that count. against: a run that was evaluated on the same
    split, to test whether the two differ. resamples: of the bootstrap. out: the file; by default
    RUN/evaluation-SPLIT.json. Under torchrun the processes share the samples.

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
        Path(out) if out is not None else folder / f"evaluation-{split}.json",
        checkpoint=checkpoint,
        changes=changes,
        context_window=context_window,
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
    without mixing. title, command: what the page is called, and how it says that it was made.

    >>> import subquad
    >>> small = {"train": {"updates": 60}, "model": {"dim": 16}, "floors": False}
    >>> result = subquad.compare("recipes/small/digits.yaml", ["softmax"], seeds=1, lengths=[], quiet=True, **small)
    >>> [(trial.mechanism, trial.status) for trial in result.trials]
    [('softmax', 'done')]
    """
    name = Path(recipe).stem if isinstance(recipe, str | Path) else None
    if out is None and name is None:
        raise ValueError("a recipe that is no file has no name: say where the comparison goes, with out=FOLDER")
    comparison = Comparison.create(
        read_recipe(recipe, [sections]),
        Path(out) if out is not None else Path("runs") / f"compare-{name}",
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
    )
    with Progress(stream=io.StringIO() if quiet else None) as progress:
        comparison.run(progress.report)
    return comparison.write_report(title or name or "Comparison", command)
