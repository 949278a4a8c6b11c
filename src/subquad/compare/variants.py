"""Model variants: the recipe's model with one mechanism after the other in it, or with a pattern of several.

A mechanism replaces the recipe's own in every stack that it can be used in. In the others (such as a decoder, if it
cannot be causal) it is the baseline's mechanism that is used, so that the two models differ in nothing else. Where the
recipe names the same mechanism, its options there are kept, and the options that the comparison was given are put over
them. Cross-attention is not replaced, nor is the last stage of a pyramid, which has softmax attention in the originals.
What the comparison was told to change in the recipe of one mechanism (`settings`) comes last.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import Field

from subquad.compare.settings import change_recipe, read_settings, split_settings
from subquad.config import Options, nearest
from subquad.mixers import Mixer, mixer_class
from subquad.models import MODELS, Model
from subquad.nn.block import Block
from subquad.nn.stack import MixerChoice, Stack
from subquad.train.recipe import Recipe, read_recipe
from subquad.train.run import differences
from subquad.train.run_folder import RECIPE

RECIPE_MODEL = "recipe"
"""The name that stands for the recipe's model as it is."""
FLOOR_LABEL, FLOOR_MIXER = "no mixing", "identity"
"""The variant that is trained like the others and is a floor for them, none of the mechanisms."""
IRRELEVANT_FIELDS = ("model", "train.seed", "checkpoints", "track")
"""Fields in which the recipe of a finished run may differ from that of the comparison without being mentioned."""


class Variant(Options):
    """The model with one mechanism in it."""

    label: str = Field(description="what it is called everywhere")
    mixer: str = Field(description="the mechanism, or a pattern such as softmax*5,primal")
    options: dict[str, Any] = Field(default_factory=dict, description="given over its own defaults or the recipe's")
    settings: dict[str, Any] = Field(
        default_factory=dict, description="changes to the recipe, by dotted names such as schedule.lr"
    )
    model: dict[str, Any] = Field(description="the recipe's section `model` with it, and with the settings of `model`")
    widths: dict[str, int] = Field(
        default_factory=dict, description="of feed-forward networks in `model`, which match the baseline's parameters"
    )
    remarks: tuple[str, ...] = Field((), description="where it is not used, and why")
    trained: bool = Field(True, description="false: only finished runs of it are used")

    @property
    def changes(self) -> dict[str, Any]:
        """Everything in which its recipe differs from the comparison's, besides the mechanism."""
        return {**self.options, **self.settings, **self.widths}

    @property
    def slug(self) -> str:
        """The label as the name of a file."""
        return re.sub(r"[^\w.-]+", "-", self.label).strip("-")

    @property
    def is_floor(self) -> bool:
        """Whether it is there for the others to be compared with, as a model that mixes nothing is."""
        return self.mixer == FLOOR_MIXER


class FinishedRun(Options):
    """A run that is used as a trial instead of training one."""

    label: str = Field(description="the mechanism's")
    seed: int = Field(description="of its training")
    folder: str = Field(description="the run directory")


def build_variants(
    recipe: Recipe, mixers: Sequence[str], given: Mapping[str, Mapping[str, Any]], baseline: str
) -> list[Variant]:
    """The variants of names such as `eva` or `narrow=eva` and patterns such as `hybrid=softmax*5,primal`.

    The baseline comes first. given: options of mechanisms and changes to their recipes, by label; see `split_settings`.
    """
    pairs = [parse_label(word) for word in mixers]
    if baseline not in [label for label, _ in pairs]:
        pairs.insert(0, (baseline, baseline))
    pairs.sort(key=lambda pair: pair[0] != baseline)
    labels = [label for label, _ in pairs]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(f"{label} is there {labels.count(label)} times; give labels, such as narrow=eva,wide=eva")
    for label in given:
        if label not in labels:
            raise ValueError(f"an option of {label} is set, but nothing is called so{nearest(label, labels)}")
    (_, mixer), *others = pairs
    first = build_variant(recipe, baseline, mixer, given.get(baseline, {}), recipe.model)
    return [first, *(build_variant(recipe, *pair, given.get(pair[0], {}), first.model) for pair in others)]


def applicable(recipe: Recipe, mixers: Sequence[str]) -> list[str]:
    """Those of the mechanisms that can be used somewhere in the recipe's model: a bidirectional one in no decoder."""
    resolved = recipe.model_data({})
    stacks = MODELS[resolved["kind"]].Config.stacks.values()
    forms = {"causal" if stack.get("causal") else "bidirectional" for stack in stacks} or {"bidirectional"}

    def is_applicable(mixer: str) -> bool:
        capabilities = mixer_class(mixer.partition(":")[0]).capabilities
        return any(getattr(capabilities, form) for form in forms)

    return [word for word in mixers if "*" in word or "=" in word or is_applicable(word)]


def parse_label(word: str) -> tuple[str, str]:
    """`narrow=eva` -> narrow, eva. A pattern is no name for files and tables, so it needs a label."""
    label, _, mixer = word.partition("=")
    if "," in label or "*" in label:
        example = "--mixers 'hybrid=softmax*5,primal'"
        raise ValueError(f"{word!r} is a pattern of mechanisms; give it a label and a --mixers of its own: {example}")
    return label, mixer or label


def build_variant(
    recipe: Recipe, label: str, mixer: str, given: Mapping[str, Any], elsewhere: Mapping[str, Any]
) -> Variant:
    """The recipe's model with a mechanism or a pattern; options and settings that are wrong are refused by name.

    elsewhere: the section `model` whose mixers are used where this mechanism cannot be.
    """
    mixer, published = _published(mixer)
    options, settings = split_settings(label, {**published, **given})
    if mixer != RECIPE_MODEL:
        model, remarks = _replace_mixers(recipe, label, MixerChoice(name=mixer, **options), elsewhere, not published)
    elif options:
        raise ValueError(f"{label}: the recipe's own model takes no options here; change the recipe")
    else:
        model, remarks = recipe.model, []
    content = {**recipe.model_dump(mode="json"), "model": model}
    changed = Recipe.parse(label, change_recipe(content, settings)).model_dump(mode="json")
    settings = read_settings(changed, settings)
    return Variant(
        label=label, mixer=mixer, options=options, settings=settings, model=changed["model"], remarks=tuple(remarks)
    )


def _published(word: str) -> tuple[str, Mapping[str, Any]]:
    """`eva:imagenet` -> eva and the options that it was published with; `eva` -> eva and none."""
    name, colon, chosen = word.partition(":")
    if not colon:
        return word, {}
    known = mixer_class(name).published
    if chosen not in known:
        there = f"{name}:{f', {name}:'.join(known)} are" if known else "none is"
        raise ValueError(f"{word}: {there} known as published options of {name}{nearest(chosen, known)}")
    return name, known[chosen]


def variant_recipe(recipe: Mapping[str, Any], variant: Variant) -> dict[str, Any]:
    """The content of a complete recipe with a mechanism in its model, and with what is set for this mechanism."""
    return change_recipe({**recipe, "model": variant.model}, variant.settings)


def _replace_mixers(
    recipe: Recipe, label: str, mixer: MixerChoice, elsewhere: Mapping[str, Any], keep_options: bool
) -> tuple[dict[str, Any], list[str]]:
    """The section `model` with a mechanism wherever it can be used, and remarks on where it cannot.

    keep_options: whether options that the recipe itself has for the mechanism are kept below those of `mixer`.
    """

    def replaced(stack: Mapping[str, Any]) -> dict[str, Any]:
        own = _mixer_choice(stack)
        keeps = keep_options and (own.name == mixer.name or own.name in mixer.mechanisms)
        return {"name": mixer.name, **(own.options if keeps else {}), **mixer.options}

    capabilities = [mixer_class(name).capabilities for name in mixer.mechanisms]
    resolved = recipe.model_data({})
    others = recipe.model_copy(update={"model": dict(elsewhere)}).model_data({})
    model, remarks, is_used = dict(recipe.model), list[str](), False
    for name, decided in MODELS[resolved["kind"]].Config.stacks.items():
        choice = replaced(resolved[name])
        form = "causal" if decided.get("causal") else "bidirectional"
        if not all(getattr(each, form) for each in capabilities):
            other = _mixer_choice(others[name])
            cannot = {"causal": "cannot be causal", "bidirectional": "is causal only"}[form]
            remarks.append(f"{label} {cannot}: the {name} has {other.name}")
            choice = other.model_dump()
        else:
            is_used = True
        model[name] = {**model.get(name, {}), "mixer": choice}
    if "stages" in resolved:
        *first, last = resolved["stages"]
        model["stages"] = [*({**stage, "mixer": replaced(stage)} for stage in first), last]
        if _mixer_choice(last).name != mixer.name:
            remarks.append(f"{label}: the last stage has {_mixer_choice(last).name}")
        is_used = bool(first)
    if not is_used:
        raise ValueError(f"{mixer.name} can be used nowhere in this model; leave it out ({'; '.join(remarks)})")
    return model, remarks


def add_floor(recipe: Recipe, variants: Sequence[Variant]) -> list[Variant]:
    """The variants, of which the first is the baseline, and one without mixing, unless it is there already."""
    if any(variant.is_floor for variant in variants):
        return list(variants)
    return [*variants, build_variant(recipe, FLOOR_LABEL, FLOOR_MIXER, {}, variants[0].model)]


def _mixer_choice(stack: Mapping[str, Any]) -> MixerChoice:
    return MixerChoice.model_validate(stack.get("mixer", "softmax"))


# ---------------------------------------------------------------------- finished runs


def add_finished_runs(
    recipe: Recipe, variants: Sequence[Variant], given: Sequence[str]
) -> tuple[list[Variant], list[FinishedRun]]:
    """The variants together with those of finished runs, given as `FOLDER` or `LABEL=FOLDER`; and the runs."""
    known = {variant.label: variant for variant in variants}
    runs: dict[tuple[str, int], FinishedRun] = {}
    for word in given:
        label, _, folder = word.rpartition("=")
        theirs = read_recipe(Path(folder) / RECIPE)
        label = label or _mixer_name(theirs)
        content = recipe.model_dump(mode="json")
        ours = Recipe.parse(label, variant_recipe(content, known[label]) if label in known else content)
        changed = _changed_fields(ours, theirs, folder)
        if label not in known:
            remarks = (f"{label} is a finished run, whose recipe differs in {', '.join(changed)}",) if changed else ()
            mixer = _mixer_name(theirs)
            known[label] = Variant(label=label, mixer=mixer, model=theirs.model, remarks=remarks, trained=False)
        else:
            if changed := [*changed, *differences(ours.model_data({}), theirs.model_data({}), "model.")]:
                raise ValueError(
                    f"{folder} is not what {label} would be ({', '.join(changed)} differ): give it a label of its own, "
                    f"such as own={folder}"
                )
        run = FinishedRun(label=label, seed=theirs.train.seed, folder=folder)
        if (other := runs.setdefault((label, run.seed), run)) != run:
            raise ValueError(f"{other.folder} and {folder} are both {label} with seed {run.seed}")
    return list(known.values()), list(runs.values())


def _changed_fields(recipe: Recipe, theirs: Recipe, folder: str) -> list[str]:
    """The fields in which a run's recipe differs, besides the model; other data is refused."""
    every = differences(recipe.model_dump(mode="json"), theirs.model_dump(mode="json"))
    changed = [key for key in every if not key.startswith(IRRELEVANT_FIELDS)]
    if wrong := [key for key in changed if key.partition(".")[0] in ("task", "data")]:
        raise ValueError(f"{folder} learned something else than the recipe says: {', '.join(wrong)} differ")
    return changed


def _mixer_name(recipe: Recipe) -> str:
    """The mechanisms of the recipe's stacks as one name, such as `eva` or `eva+softmax`."""
    resolved = recipe.model_data({})
    stacks = [resolved[name] for name in MODELS[resolved["kind"]].Config.stacks] or resolved["stages"][:-1]
    return "+".join(dict.fromkeys(_mixer_choice(stack).name for stack in stacks))


# ---------------------------------------------------------------------- the mixers of a model


def mixer_options(model: Model) -> dict[str, Any]:
    """The mechanisms of every stack of a model with all their options, read from the mixers themselves."""
    found = {}
    for name, stack in model.named_modules():
        if isinstance(stack, Stack):
            blocks = [cast(Block, block) for block in stack.blocks]
            found[name] = _merge_layers([block.mixer for block in blocks])
            if crosses := [block.cross for block in blocks if block.cross is not None]:
                found[f"{name}.cross"] = _merge_layers(crosses)
    return found


def _merge_layers(mixers: Sequence[Mixer]) -> dict[str, Any]:
    """The options of all layers; those that differ between layers are lists."""
    dumps = [{"name": mixer.name, **mixer.config.model_dump(mode="json")} for mixer in mixers]
    columns = {key: [dump.get(key) for dump in dumps] for key in dict.fromkeys(key for dump in dumps for key in dump)}
    return {key: values[0] if all(v == values[0] for v in values) else values for key, values in columns.items()}
