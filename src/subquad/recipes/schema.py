"""The first check of a recipe, by `schema.json`: without torch, and without the classes that read recipes.

The file is a JSON Schema of recipes that `make docs` generates from those classes. Here it becomes classes of options
again, so that a mistake is refused in the words in which the real ones would refuse it. It knows names and types of
options, tasks, presets and mechanisms. What it does not know, such as the tasks and mechanisms of other packages and
what does not go together, is left to the real classes, which check everything once more.
"""

import functools
import json
import operator
import os
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, WrapValidator, create_model

from subquad.config import (
    Options,
    apply_change,
    unknown_mechanism,
    unknown_mixer_option,
    unknown_preset,
    unknown_task,
)
from subquad.files import read_yaml
from subquad.packages import PLUGINS
from subquad.recipes import FOLDER, find_recipe

SCHEMA = FOLDER / "schema.json"
TASKS, MODELS, PRESETS, MECHANISMS, FLOORS = "x-tasks", "x-models", "x-presets", "x-mechanisms", "x-floors"
KINDS, ALIASES = "x-kinds", "x-preset-aliases"
"""Tables of the schema: the options of the data of each task, of each kind of model, of each mechanism and of what
stands in the place of one; the kinds of model of each task, the kind of each preset, and other names of presets."""
MIXERS = "MixerChoice"
"""The class of what names mechanisms; its name says which classes exist, and so its options."""
LIMITS = {
    "minimum": "ge",
    "maximum": "le",
    "exclusiveMinimum": "gt",
    "exclusiveMaximum": "lt",
    "minItems": "min_length",
}
NAMES = re.compile(r"\s*([\w-]+)\s*(?:\*\s*\d+)?\s*")
PLAIN: dict[str, Any] = {"integer": int, "number": float, "string": str, "boolean": bool, "null": type(None)}

Schema = Mapping[str, Any]


def check_recipe(recipe: str | Path, changes: Sequence[str] = ()) -> None:
    """Raises a ValueError if a recipe, after changes such as "train.updates=100", is wrong by the schema.

    recipe: a path or a name, see `find_recipe`. That of a run is left to the real classes, which know where its
    mechanisms came from.
    """
    path = find_recipe(recipe)
    if (path.parent / "environment.json").exists():
        return
    content: Any = read_yaml(path, "recipe")
    for change in changes:
        content = apply_change(content, change)
    check_content(f"recipe {recipe}", content)


def check_content(owner: str, content: Mapping[str, Any]) -> None:
    """Raises a ValueError if the content of a recipe is wrong by the schema. owner: what the message calls it."""
    tasks, task = read_schema()[TASKS], content.get("task")
    if task is not None and (not isinstance(task, str) or task not in tasks):
        if not _has_plugins("tasks"):
            raise ValueError(unknown_task(owner, task, list(tasks)))
        return
    if task is not None:
        fields = {name: _definition(reference)["properties"] for name, reference in tasks.items()}
        check_data_options(owner, task, content.get("data"), fields)
    recipe_class(task, content).parse(owner, content)
    _check_model(owner, str(task), content["model"])


def check_data_options(owner: str, task: str, data: Any, fields: Mapping[str, Container[str]]) -> None:
    """Refuses options of the section `data` that other tasks have, by name. fields: the options of every task."""
    for name in data if isinstance(data, Mapping) else ():
        others = [other for other, known in fields.items() if name in known]
        if name not in fields[task] and others:
            raise ValueError(f"{owner}: data.{name} has no meaning for task {task}, but for {' and '.join(others)}")


def _check_model(owner: str, task: str, given: Mapping[str, Any]) -> None:
    """Checks the section `model`: the fields that stand there, as a preset may have the others."""
    schema, fields = read_schema(), dict(given)
    name = fields.pop("preset", None)
    name = schema[ALIASES].get(name, name) if isinstance(name, str) else name
    if name is not None and name not in schema[PRESETS]:
        raise ValueError(f"{owner}: {unknown_preset(name, list(schema[PRESETS]))}")
    kind = fields.get("kind", schema[PRESETS].get(name))
    if kind in schema[KINDS][task]:
        try:
            _build_class(schema[MODELS][kind]).parse("model", fields)
        except ValueError as error:
            raise ValueError(f"{owner}: {error}") from None


@functools.cache
def read_schema() -> dict[str, Any]:
    return json.loads(SCHEMA.read_text())


def _has_plugins(what: str) -> bool:
    """Whether other packages may have registered more names. what: "tasks" or "mixers", as their entry points say."""
    from importlib.metadata import entry_points

    return bool(os.environ.get(PLUGINS) or entry_points(group=f"subquad.{what}"))


# ---------------------------------------------------------------------- classes of the schema


class FreeOptions(Options):
    """The base of classes that rewrite what they are given, so that other names may be right."""

    model_config = ConfigDict(extra="allow")


class StackOptions(Options):
    """The base of classes with fields that choose mechanisms, which are checked as `nn.stack` does."""

    def check(self) -> None:
        for field in type(self).model_fields:
            if field in self.model_fields_set and field in ("mixer", "cross"):
                check_mixer(getattr(self, field))


def check_mixer(given: Any) -> None:
    """Refuses mechanisms that do not exist, and options that none of them has or whose type is wrong."""
    options = {"name": given} if isinstance(given, str) else given
    if not isinstance(options, Mapping) or not isinstance(name := options.get("name"), str):
        return
    schema, found = read_schema(), [NAMES.fullmatch(part) for part in name.split(",")]
    names = dict.fromkeys(part[1] for part in found if part is not None)
    references = schema[MECHANISMS] | schema[FLOORS]
    unknown = [one for one in names if one not in references]
    if None in found or (unknown and _has_plugins("mixers")):
        return
    if unknown:
        raise ValueError(unknown_mechanism(unknown[0], list(schema[MECHANISMS])))
    classes = {one: _build_class(references[one]) for one in names}
    known = {option for one in classes.values() for option in one.model_fields}
    for option in options:
        if option != "name" and option not in known:
            raise ValueError(unknown_mixer_option(name, option, known))
    for one, options_class in classes.items():
        for layer in _by_layer({option: options[option] for option in options if option in options_class.model_fields}):
            options_class.parse(one, layer)


def _by_layer(options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the options of each layer that a list of values tells from others."""
    lists = {option: value for option, value in options.items() if isinstance(value, list) and value}
    for layer in range(max(map(len, lists.values()), default=1)):
        yield {**options, **{option: value[min(layer, len(value) - 1)] for option, value in lists.items()}}


def recipe_class(task: str | None, content: Mapping[str, Any]) -> type[Options]:
    """Returns the class of recipes; a task decides about the section `data`.

    Sections that the content leaves out are built only where a key is unknown, which may be an option of theirs.
    """
    schema = read_schema()
    sections = dict(schema["properties"])
    if content.keys() <= sections.keys():
        sections = {name: value if name in content else {} for name, value in sections.items()}
    if task is not None:
        sections["data"] = {"$ref": schema[TASKS][task]}
    return _class_of("Recipe", {**schema, "properties": sections})


def _definition(reference: str) -> dict[str, Any]:
    """Returns what stands under "#/$defs/NAME"."""
    return read_schema()["$defs"][reference.rpartition("/")[2]]


@functools.cache
def _build_class(reference: str) -> type[Options]:
    schema = _definition(reference)
    return _class_of(schema["title"], schema)


def _class_of(title: str, schema: Schema) -> type[Options]:
    fields: dict[str, Any] = {}
    for name, value in schema["properties"].items():
        limits = {LIMITS[key]: value[key] for key in LIMITS if key in value and "prefixItems" not in value}
        needed = name in schema.get("required", ())
        fields[name] = (_type_of(value), Field(**limits) if needed else Field(None, **limits))
    stack = any(_refers_to(value, MIXERS) for value in schema["properties"].values())
    base = StackOptions if stack else Options if schema.get("additionalProperties") is False else FreeOptions
    return create_model(title, __base__=base, **fields)


def _refers_to(schema: Schema, name: str) -> bool:
    return any(part.get("$ref", "").endswith(f"/{name}") for part in (schema, *schema.get("anyOf", ())))


def _type_of(schema: Schema) -> Any:
    """Returns the type that a schema was generated from."""
    if "anyOf" in schema:
        return functools.reduce(operator.or_, map(_with_limits, schema["anyOf"]))
    if "$ref" in schema:
        return Any if _refers_to(schema, MIXERS) else _section(schema["$ref"])
    if "enum" in schema or "const" in schema:
        return Literal[tuple(schema.get("enum", [schema.get("const")]))]
    if schema.get("type") == "array":
        return _array(schema)
    if schema.get("type") == "object":
        inner = schema.get("additionalProperties", True)
        return dict[str, Any if inner is True else _with_limits(inner)]  # type: ignore[misc]
    return PLAIN.get(schema.get("type", ""), Any)


def _array(schema: Schema) -> Any:
    parts = schema.get("prefixItems")
    return tuple[tuple(map(_with_limits, parts))] if parts else tuple[_with_limits(schema["items"]), ...]  # type: ignore[misc]


def _with_limits(schema: Schema) -> Any:
    limits = {LIMITS[key]: schema[key] for key in LIMITS if key in schema and "prefixItems" not in schema}
    return Annotated[_type_of(schema), Field(**limits)] if limits else _type_of(schema)


def _section(reference: str) -> Any:
    """Returns the class of a section. Where a plain value may stand for one, only mappings are looked into."""
    options = _build_class(reference)
    if _definition(reference).get("type") == "object":
        return options
    return Annotated[options, WrapValidator(lambda given, check: check(given) if isinstance(given, dict) else given)]
