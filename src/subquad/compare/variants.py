"""Mechanisms in the place of others: what each makes of a recipe's model.

A mechanism replaces the recipe's in every stack where it can stand; elsewhere (in a decoder, where it cannot be causal)
the baseline's stands, so that the two differ in nothing else. Where the recipe names the same mechanism, its options
there stay; options of the command line are put over them. Cross-attention stays as it is, and so does the last stage of
a pyramid, which has softmax attention in the originals.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import Field

from subquad.config import Options, nearest
from subquad.mixers import Mixer, mixer_class
from subquad.models import MODELS, Model
from subquad.nn.block import Block
from subquad.nn.stack import MixerChoice, Stack
from subquad.train.recipe import Recipe, read_recipe
from subquad.train.run import RECIPE, differences

OWN = "recipe"
"""The word for the recipe's model as it is."""
FREE_OF_RUNS = ("model", "train.seed", "checkpoints", "track")
"""In what a finished run may differ from the recipe without a word."""


class Variant(Options):
    """A mechanism in its place."""

    label: str = Field(description="what it is called everywhere")
    mixer: str = Field(description="the mechanism")
    options: dict[str, Any] = Field(default_factory=dict, description="given over its own defaults or the recipe's")
    model: dict[str, Any] = Field(description="the recipe's section `model` with it")
    remarks: tuple[str, ...] = Field((), description="where it does not stand, and why")
    trained: bool = Field(True, description="false: there are finished runs of it, and no others are made")

    @property
    def slug(self) -> str:
        """Its label as a name of files."""
        return re.sub(r"[^\w.-]+", "-", self.label).strip("-")


class TakenRun(Options):
    """A run that was finished before the comparison began."""

    label: str = Field(description="the mechanism's")
    seed: int = Field(description="of its training")
    folder: str = Field(description="the run directory")


def variants_of(
    recipe: Recipe, words: Sequence[str], settings: Mapping[str, Mapping[str, Any]], baseline: str
) -> list[Variant]:
    """From words such as `eva` or `narrow=eva`; settings: options by label. The baseline comes first."""
    pairs = [(left, right or left) for left, _, right in (word.partition("=") for word in words)]
    if baseline not in [label for label, _ in pairs]:
        pairs.insert(0, (baseline, baseline))
    pairs.sort(key=lambda pair: pair[0] != baseline)
    labels = [label for label, _ in pairs]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(f"{label} is there {labels.count(label)} times; give labels, such as narrow=eva,wide=eva")
    for label in settings:
        if label not in labels:
            raise ValueError(f"an option of {label} is set, but nothing is called so{nearest(label, labels)}")
    (_, mixer), *others = pairs
    first = variant_of(recipe, baseline, mixer, settings.get(baseline, {}), recipe.model)
    return [first, *(variant_of(recipe, *pair, settings.get(pair[0], {}), first.model) for pair in others)]


def variant_of(
    recipe: Recipe, label: str, mixer: str, options: Mapping[str, Any], elsewhere: Mapping[str, Any]
) -> Variant:
    """The recipe's model with a mechanism; options that are wrong are refused by name.

    elsewhere: the section `model` whose mixers stand where this mechanism cannot.
    """
    if mixer == OWN:
        if options:
            raise ValueError(f"{label}: the recipe's own model takes no options here; change the recipe")
        return Variant(label=label, mixer=OWN, model=recipe.model)
    capabilities = mixer_class(mixer).capabilities
    resolved = recipe.model_data({})
    others = recipe.model_copy(update={"model": dict(elsewhere)}).model_data({})
    model, remarks, stands = dict(recipe.model), [], False
    for name, decided in MODELS[resolved["kind"]].Config.stacks.items():
        choice = _replaced(resolved[name], mixer, options)
        form = "causal" if decided.get("causal") else "bidirectional"
        if not getattr(capabilities, form):
            other = _choice(others[name])
            cannot = {"causal": "cannot be causal", "bidirectional": "is causal only"}[form]
            remarks.append(f"{label} {cannot}: the {name} has {other.name}")
            choice = other.model_dump()
        else:
            stands = True
        model[name] = {**model.get(name, {}), "mixer": choice}
    if "stages" in resolved:
        *first, last = resolved["stages"]
        model["stages"] = [*({**stage, "mixer": _replaced(stage, mixer, options)} for stage in first), last]
        if _choice(last).name != mixer:
            remarks.append(f"{label}: the last stage has {_choice(last).name}")
        stands = bool(first)
    if not stands:
        raise ValueError(f"{mixer} can stand nowhere in this model; leave it out ({'; '.join(remarks)})")
    Recipe.parse(label, {**recipe.model_dump(mode="json"), "model": model})
    return Variant(label=label, mixer=mixer, options=dict(options), model=model, remarks=tuple(remarks))


def _choice(stack: Mapping[str, Any]) -> MixerChoice:
    return MixerChoice.model_validate(stack.get("mixer", "softmax"))


def _replaced(stack: Mapping[str, Any], mixer: str, options: Mapping[str, Any]) -> dict[str, Any]:
    own = _choice(stack)
    return {"name": mixer, **(own.options if own.name == mixer else {}), **options}


# ---------------------------------------------------------------------- finished runs


def with_runs(
    recipe: Recipe, variants: Sequence[Variant], given: Sequence[str]
) -> tuple[list[Variant], list[TakenRun]]:
    """The variants and those of finished runs, which are given as `FOLDER` or `LABEL=FOLDER`; and the runs."""
    known = {variant.label: variant for variant in variants}
    runs: dict[tuple[str, int], TakenRun] = {}
    for word in given:
        label, _, folder = word.rpartition("=")
        theirs = read_recipe(Path(folder) / RECIPE)
        label = label or _mixer_name(theirs)
        changed = _changes(recipe, theirs, folder)
        if label not in known:
            remarks = (f"{label} is a finished run, whose recipe differs in {', '.join(changed)}",) if changed else ()
            mixer = _mixer_name(theirs)
            known[label] = Variant(label=label, mixer=mixer, model=theirs.model, remarks=remarks, trained=False)
        else:
            ours = recipe.model_copy(update={"model": known[label].model}).model_data({})
            if changed := [*changed, *differences(ours, theirs.model_data({}), "model.")]:
                raise ValueError(
                    f"{folder} is not what {label} would be ({', '.join(changed)} differ): give it a label of its own, "
                    f"such as own={folder}"
                )
        run = TakenRun(label=label, seed=theirs.train.seed, folder=folder)
        if (other := runs.setdefault((label, run.seed), run)) != run:
            raise ValueError(f"{other.folder} and {folder} are both {label} with seed {run.seed}")
    return list(known.values()), list(runs.values())


def _changes(recipe: Recipe, theirs: Recipe, folder: str) -> list[str]:
    """Where a run's recipe differs, besides the model; other data is refused."""
    every = differences(recipe.model_dump(mode="json"), theirs.model_dump(mode="json"))
    changed = [key for key in every if not key.startswith(FREE_OF_RUNS)]
    if wrong := [key for key in changed if key.partition(".")[0] in ("task", "data")]:
        raise ValueError(f"{folder} learned something else than the recipe says: {', '.join(wrong)} differ")
    return changed


def _mixer_name(recipe: Recipe) -> str:
    """The mechanisms of the recipe's stacks in a word."""
    resolved = recipe.model_data({})
    stacks = [resolved[name] for name in MODELS[resolved["kind"]].Config.stacks] or resolved["stages"][:-1]
    return "+".join(dict.fromkeys(_choice(stack).name for stack in stacks))


# ---------------------------------------------------------------------- what a model holds


def mixing_of(model: Model) -> dict[str, Any]:
    """The mechanisms of every stack of a model with all their options, read from the mixers themselves."""
    found = {}
    for name, stack in model.named_modules():
        if isinstance(stack, Stack):
            blocks = [cast(Block, block) for block in stack.blocks]
            found[name] = _described([block.mixer for block in blocks])
            if crosses := [block.cross for block in blocks if block.cross is not None]:
                found[f"{name}.cross"] = _described(crosses)
    return found


def _described(mixers: Sequence[Mixer]) -> dict[str, Any]:
    """Options that differ between layers are lists."""
    dumps = [{"name": mixer.name, **mixer.config.model_dump(mode="json")} for mixer in mixers]
    columns = {key: [dump.get(key) for dump in dumps] for key in dict.fromkeys(key for dump in dumps for key in dump)}
    return {key: values[0] if all(v == values[0] for v in values) else values for key, values in columns.items()}
