"""What a comparison will compute, as data: comparison.json in its folder.

A later call may add mechanisms, seeds and lengths; what is there already does not change.
"""

from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from subquad.compare.matching import Match
from subquad.compare.statistics.times import LOOKS
from subquad.compare.variants import FinishedRun, Variant, variant_recipe
from subquad.config import Options
from subquad.files import digest, read_metadata, write_json
from subquad.tasks import Task, task_class
from subquad.train.recipe import Recipe
from subquad.train.run import differences

FILE, FORMAT = "comparison.json", "subquad-comparison-plan-1"


class TrialName(NamedTuple):
    """One training: of which mechanism, and with which seed."""

    label: str
    seed: int

    def __str__(self) -> str:
        return f"{self.label}, seed {self.seed}"


class Plan(Options):
    """Everything that the numbers depend on, besides the machine."""

    format: str = Field(FORMAT, description="of this file")
    recipe: dict[str, Any] = Field(description="the complete recipe")
    data_dependent_model_config: dict[str, Any] = Field(description="options of the model that follow from the data")
    variants: tuple[Variant, ...] = Field(description="the mechanisms, each in its place in the model")
    match: Match = Field("none", description="what the widths of the models make equal to the baseline's")
    seeds: tuple[int, ...] = Field(description="of the trainings")
    split: str = Field(description="on which quality is measured")
    lengths: tuple[int, ...] = Field((), description="at which costs are measured")
    tokens: int = Field(16384, ge=1, description="of a batch at every length")
    looks: tuple[int, ...] = Field(LOOKS, description="rounds of times after which they are looked at")
    task_lengths: tuple[int, ...] = Field((), description="median and 95th percentile of the task's own samples")
    runs: tuple[FinishedRun, ...] = Field((), description="finished runs that are used as trials")
    tune: int = Field(0, ge=0, description="trials that each mechanism gets to be tuned with; 0: none is tuned")
    tuned: tuple[Variant, ...] = Field((), description="the mechanisms with the settings that tuning chose")
    floors: bool = Field(False, description="whether simple models of the data are computed to compare with")

    def check(self) -> None:
        slugs: dict[str, str] = {}
        for label in self.labels:
            other = slugs.setdefault(self.variant(label).slug.lower(), label)
            if other != label:
                raise ValueError(f"the labels {other!r} and {label!r} would name the same files")
        if not 1 <= len(self.looks) <= len(LOOKS) or min(self.looks) < 1:
            raise ValueError("times are looked at one to three times, after 1 round or more, such as 9,18,36")
        if self.lengths and min(self.lengths) < 1:
            raise ValueError(f"lengths must be at least 1 (got {min(self.lengths)})")
        if too_long := [length for length in self.lengths if length > self.tokens]:
            raise ValueError(f"a batch of {self.tokens} tokens holds no sequence of {too_long[0]}; raise the tokens")

    @property
    def labels(self) -> list[str]:
        return [variant.label for variant in self.variants]

    @property
    def task(self) -> type[Task]:
        return task_class(self.recipe["task"])

    def variant(self, label: str) -> Variant:
        """A mechanism, with the settings that tuning chose as soon as it has."""
        return next(variant for variant in (*self.tuned, *self.variants) if variant.label == label)

    @property
    def untuned(self) -> list[Variant]:
        """The mechanisms that are still to be tuned, a model without mixing among them: it is trained like the rest."""
        known = {variant.label for variant in self.tuned}
        return [one for one in self.variants if self.tune and one.trained and one.label not in known]

    def variant_recipe(self, label: str) -> Recipe:
        """The recipe with a mechanism in its model, and with what is set for this mechanism."""
        return Recipe.parse(label, variant_recipe(self.recipe, self.variant(label)))

    def trials(self) -> list[TrialName]:
        """All trainings, seed by seed, so that the mechanisms can be compared as early as possible."""
        own = [TrialName(variant.label, seed) for seed in self.seeds for variant in self.variants if variant.trained]
        return list(dict.fromkeys([*own, *(TrialName(run.label, run.seed) for run in self.runs)]))

    def finished_run(self, trial: TrialName) -> Path | None:
        """The folder of the finished run that is used as this trial, if there is one."""
        return next((Path(run.folder) for run in self.runs if (run.label, run.seed) == trial), None)

    def trial_recipe(self, trial: TrialName) -> dict[str, Any]:
        """The complete recipe of a trial."""
        recipe = variant_recipe(self.recipe, self.variant(trial.label))
        return {**recipe, "train": {**recipe["train"], "seed": trial.seed}}

    def trial_key(self, trial: TrialName) -> str:
        """A checksum of what the numbers of a trial depend on."""
        run = self.finished_run(trial)
        return digest([self.trial_recipe(trial), self.split, None if run is None else str(run)])


def open_plan(plan: Plan, out: Path) -> Plan:
    """Writes the plan of a new comparison, or adds to that of an existing one; what differs is refused by name."""
    before = read_plan(out) if (out / FILE).exists() else None
    plan = plan if before is None else _extend(before, plan, out)
    out.mkdir(parents=True, exist_ok=True)
    if plan != before:
        write_plan(plan, out)
    return plan


def write_plan(plan: Plan, out: Path) -> None:
    write_json(out / FILE, plan.model_dump(mode="json"))


def read_plan(out: Path) -> Plan:
    return Plan.parse(str(out / FILE), read_metadata(out / FILE, FORMAT, "comparison"))


def _extend(before: Plan, now: Plan, out: Path) -> Plan:
    old, new = (plan.model_dump(mode="json") for plan in (before, now))
    fixed = ("recipe", "data_dependent_model_config", "match", "split", "tokens", "looks", "task_lengths", "tune")
    changed = [name for part in fixed for name in differences(old[part], new[part], f"{part}.")]
    variants = {variant["label"]: variant for variant in old["variants"]}
    for variant in new["variants"]:
        changed += differences(variants.get(variant["label"], variant), variant, f"{variant['label']}.")
    runs = {(run.label, run.seed): run for run in before.runs}
    changed += [run.folder for run in now.runs if runs.get((run.label, run.seed), run) != run]
    if changed:
        raise ValueError(f"{out} holds another comparison ({', '.join(changed)} differ); give another --out")
    added = [variant for variant in now.variants if variant.label not in variants]
    return before.model_copy(
        update={
            "variants": (*before.variants, *added),
            "seeds": tuple(dict.fromkeys([*before.seeds, *now.seeds])),
            "lengths": tuple(sorted({*before.lengths, *now.lengths})),
            "floors": before.floors or now.floors,
            "runs": tuple({**runs, **{(run.label, run.seed): run for run in now.runs}}.values()),
        }
    )
