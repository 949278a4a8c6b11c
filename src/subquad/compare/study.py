"""Several comparisons with one answer: a recipe at several lengths, or several recipes, each in a folder of its own.

    OUT/speeches-1024/      the comparison of one recipe at one length, like any other
    OUT/study.json          where its results are
    OUT/study.html          quality and cost by length, and a map of decisions

At every length the models are trained and scored anew, with as many tokens in an update as the recipe has at its own
length, so that quality and cost are known at the same lengths.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Self

from subquad.compare.comparison import EVERYTHING, TOKENS, Comparison, OnProgress, Shard
from subquad.compare.executors import build_executor
from subquad.compare.executors.base import Executor
from subquad.compare.measure.lengths import lengthen_mixer
from subquad.compare.report.result import Result
from subquad.compare.report.study import FILE, StudyPart, StudyResult, read_study, write_parts, write_study
from subquad.compare.settings import change_recipe
from subquad.compare.variants import applicable, parse_label
from subquad.config import merge_options
from subquad.mixers import available, mixer_class
from subquad.nn.stack import MixerChoice
from subquad.progress import Progress
from subquad.recipes import find_folder
from subquad.train.recipe import Changes, Recipe, read_recipe

EMBEDDINGS = ("source", "target", "embedding")
STACKS = ("encoder", "decoder")


def study(
    recipes: str | Path | Sequence[str | Path],
    mixers: Sequence[str] | Literal["all"],
    *,
    out: str | Path,
    quality_lengths: Sequence[int] = (),
    options: Mapping[str, Mapping[str, Any]] | None = None,
    executor: str | Executor = "local",
    executor_options: Mapping[str, Any] | None = None,
    title: str | None = None,
    quiet: bool = False,
    changes: Changes = (),
    **more: Any,
) -> dict[str, Result]:
    """Compares mechanisms in several recipes, or in one at several lengths, and returns the results by their titles.

    recipes: files or names, or a folder whose recipes are all meant; changes: to each of them, such as
    "train.updates=100". out: the folder of the study, which gets study.html beside a folder for each comparison; it
    goes on where it was interrupted. mixers, options, executor and `more` are those of `subquad.compare`, such as tune,
    seeds, or a section `train={"updates": 100}`; "all" stands for those that the model of a recipe can have.
    quality_lengths: at which samples are trained, scored and measured; none: at the recipe's own.

    >>> import subquad
    >>> small = {"train": {"updates": 2}, "data": {"options": {"valid": 8, "test": 8}}, "floors": False}
    >>> fast = {"seeds": 1, "rounds": [1], "lengths": [], "quiet": True}
    >>> results = subquad.study("small/associative_recall", ["softmax"], out="runs/recall", **small, **fast)
    >>> list(results)
    ['associative_recall']
    """
    engine = build_executor(executor, executor_options) if isinstance(executor, str) else executor
    paths = [recipes] if isinstance(recipes, str | Path) else recipes
    sections = {name: more.pop(name) for name in list(more) if name in Recipe.model_fields}
    read = {name: one for path in paths for name, one in read_recipes(path, [*changes, sections]).items()}
    labels = available() if mixers == "all" else mixers
    parts = plan_study(read, labels, quality_lengths, options, only_applicable=mixers == "all")
    planned = Study.create(parts, Path(out), **more)
    with Progress(stream=io.StringIO() if quiet else None) as progress:
        planned.run(progress.report, executor=engine)
    found = planned.write_report(title or Path(out).name)
    return {part.title: result for part, result in found.results(Path(out)).items()}


def read_recipes(given: str | Path, changes: Changes) -> dict[str, Recipe]:
    """The recipe of a file or a name, or all recipes of a folder, by name."""
    folder = find_folder(given)
    files = [Path(given)] if folder is None else sorted(folder.glob("*.yaml"))
    if not files:
        raise ValueError(f"the folder {given} holds no recipe, which is a file NAME.yaml")
    return {file.stem: read_recipe(file, changes) for file in files}


def recipe_at(recipe: Recipe, length: int) -> Recipe:
    """The recipe with samples of `length` tokens, as many tokens in an update, and tables that are long enough."""
    resolved, longer = recipe.model_data({}), dict[str, Any]()
    changes = recipe.task_class.at_length(recipe.data, resolved, recipe.train.budget, length)
    if recipe.task_class.sized_by_tokens:
        changes |= _token_budget(recipe, length)
    content = change_recipe(recipe.model_dump(mode="json"), changes)
    for name in EMBEDDINGS:
        if resolved.get(name, {}).get("positions") == "learned" and resolved[name].get("max_length", 0) < length:
            longer[name] = {"max_length": length}
    for name in STACKS:
        if (choice := resolved.get(name, {}).get("mixer")) is not None:
            longer[name] = {"mixer": lengthen_mixer(MixerChoice.model_validate(choice), length)}
    return Recipe.parse(f"{recipe.task} at {length}", {**content, "model": merge_options(content["model"], longer)})


def _token_budget(recipe: Recipe, length: int) -> dict[str, Any]:
    """The budget of batches with as many tokens as the recipe's have, in samples of `length` tokens."""
    batch, own = recipe.task_class.typical_batch(recipe.data, recipe.train.budget)
    tokens = recipe.train.budget.max_tokens or batch * (own or length)
    if tokens < length:
        raise ValueError(
            f"an update of this recipe has {tokens:,} tokens, and all lengths get as many: a sample of {length:,} does "
            f"not fit; set train.budget.max_tokens={length} or more"
        )
    return {"train.budget.max_tokens": tokens, "train.budget.max_sentences": None}


def options_at(mixers: Sequence[str], given: Mapping[str, Mapping[str, Any]], length: int) -> dict[str, dict[str, Any]]:
    """The options of mechanisms, with a max_length that is enough for those that have one too short."""
    options = {label: dict(own) for label, own in given.items()}
    for label, mixer in map(parse_label, mixers):
        name = mixer.partition(":")[0]
        field = mixer_class(name).Config.model_fields.get("max_length") if name in available() else None
        if field is not None and field.default is not None and field.default < length:
            options.setdefault(label, {}).setdefault("max_length", length)
    return options


@dataclass(frozen=True)
class PlannedPart:
    """What one comparison of a study compares; the arguments are those of `Comparison.create`."""

    part: StudyPart
    recipe: Recipe
    mixers: Sequence[str]
    options: Mapping[str, Mapping[str, Any]]


def plan_study(
    recipes: Mapping[str, Recipe],
    mixers: Sequence[str],
    quality_lengths: Sequence[int] = (),
    options: Mapping[str, Mapping[str, Any]] | None = None,
    only_applicable: bool = False,
) -> list[PlannedPart]:
    """Every recipe, by name, at every length, or at its own if there is none.

    only_applicable: leave out mechanisms that the model of a recipe cannot have.
    """
    planned = []
    for name, recipe in recipes.items():
        words = applicable(recipe, mixers) if only_applicable else mixers
        if not quality_lengths:
            planned.append(PlannedPart(StudyPart(recipe=name, folder=name), recipe, words, options or {}))
        for length in sorted(set(quality_lengths)):
            part = StudyPart(recipe=name, length=length, folder=f"{name}-{length}")
            given = options_at(words, options or {}, length)
            planned.append(PlannedPart(part, recipe_at(recipe, length), words, given))
    return planned


class Study:
    """The comparisons of a study, by recipe and length."""

    def __init__(self, out: Path, comparisons: Mapping[StudyPart, Comparison]) -> None:
        self.out, self.comparisons = out, dict(comparisons)

    @classmethod
    def create(cls, planned: Sequence[PlannedPart], out: Path, **more: Any) -> Self:
        """A new study, or an existing one that is continued; `more` are further arguments of `Comparison.create`.

        Everything is checked, and all data prepared, before anything is trained. Costs are measured at the lengths
        that are trained. A later call may add recipes and lengths; the page has those of all calls.
        """
        found = {}
        for one in planned:
            length = one.part.length
            costs = {} if length is None else {"lengths": [length], "tokens": max(length, TOKENS)}
            folder, choices = out / one.part.folder, {**more, **costs}
            found[one.part] = Comparison.create(one.recipe, folder, one.mixers, options=one.options, **choices)
        write_parts(out, found)
        return cls(out, found)

    @classmethod
    def open(cls, out: Path, baseline: str = "softmax", margin: str | float | None = None) -> Self:
        """An existing study as it is."""
        parts = read_study(out).parts
        return cls(out, {part: Comparison.open(out / part.folder, baseline, margin) for part in parts})

    @staticmethod
    def exists(out: Path) -> bool:
        """Whether a folder holds a study."""
        return (out / FILE).exists()

    def run(
        self,
        on_progress: OnProgress = lambda *_: None,
        shard: Shard = EVERYTHING,
        executor: Executor | None = None,
    ) -> None:
        """Computes everything that is not computed yet, one comparison after the other."""
        counts = [comparison.step_count(shard) for comparison in self.comparisons.values()]
        for number, (part, comparison) in enumerate(self.comparisons.items()):
            before = sum(counts[:number])

            def report(done: int, _: int, message: str, before: int = before, part: StudyPart = part) -> None:
                on_progress(before + done, sum(counts), f"{part.title}: {message}")

            comparison.run(report, shard, executor)

    def write_report(self, title: str, command: str = "") -> StudyResult:
        """The results of all comparisons, each with its own page, and the page of the study."""
        for part, comparison in self.comparisons.items():
            comparison.write_report(f"{title}: {part.title}", command)
        created = datetime.now(UTC).isoformat(timespec="seconds")
        study = StudyResult(title=title, created=created, command=command, parts=read_study(self.out).parts)
        write_study(study, self.out)
        return study
