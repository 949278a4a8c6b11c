"""src/subquad/recipes/schema.json: a JSON Schema of recipes, by which they are checked before torch is imported.

python -m tools.recipe_schema
"""

import json
from collections.abc import Iterable
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from subquad.mixers import available, mixer_class
from subquad.mixers.registry import floors
from subquad.models import MODELS, PRESETS, ModelConfig
from subquad.models.presets import OTHER_NAMES
from subquad.recipes import schema as stored
from subquad.tasks import available_tasks, task_class
from subquad.train.recipe import Recipe

ORIGIN = "https://json-schema.org/draft/2020-12/schema"
FREE = ("title", "description", "default")
"""What is kept of a field whose values are rewritten before they are checked."""


def recipe_schema() -> str:
    """The schema with tables of what tasks, presets and mechanisms there are, as JSON."""
    tasks = {name: task_class(name).Data for name in available_tasks()}
    models = {kind: model.Config for kind, model in MODELS.items()}
    mixers = {name: mixer_class(name).Config for name in [*available(), *floors()]}
    classes: list[type[BaseModel]] = list(dict.fromkeys([Recipe, *tasks.values(), *models.values(), *mixers.values()]))
    references, content = models_json_schema([(one, "validation") for one in classes])
    named = {one: references[one, "validation"]["$ref"] for one in classes}
    definitions = content["$defs"]
    for one in classes_within([*models.values(), *mixers.values()]):
        definitions[one.__name__].pop("required", None)  # a preset, the data or the model may have it
    for one in classes_within(classes):
        definitions[one.__name__] = _lenient(one, definitions[one.__name__])
    by_task = [
        {"if": {"properties": {"task": {"const": name}}}, "then": {"properties": {"data": {"$ref": named[data]}}}}
        for name, data in tasks.items()
    ]
    tables = {
        stored.TASKS: {name: named[data] for name, data in tasks.items()},
        stored.KINDS: {name: list(task_class(name).model_kinds) for name in tasks},
        stored.MODELS: {kind: named[config] for kind, config in models.items()},
        stored.PRESETS: {name: data["kind"] for name, data in PRESETS.items()},
        stored.ALIASES: OTHER_NAMES,
        stored.MECHANISMS: {name: named[mixers[name]] for name in available()},
        stored.FLOORS: {name: named[mixers[name]] for name in floors()},
    }
    recipe = definitions.pop(Recipe.__name__)
    recipe["properties"]["data"] = {"type": "object", "description": recipe["properties"]["data"]["description"]}
    return json.dumps({"$schema": ORIGIN, **recipe, "allOf": by_task, **tables, "$defs": definitions}, indent=1) + "\n"


def classes_within(classes: Iterable[type[BaseModel]]) -> set[type[BaseModel]]:
    """These classes and those of their fields."""
    found: set[type[BaseModel]] = set()
    waiting: list[Any] = list(classes)
    while waiting:
        one = waiting.pop()
        if isinstance(one, type) and issubclass(one, BaseModel):
            if one not in found:
                found.add(one)
                waiting += [field.annotation for field in one.model_fields.values()]
        else:
            waiting += get_args(one)
    return found


def _lenient(options: type[BaseModel], schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without what does not hold for values that the class rewrites before it checks them.

    Models only add what a preset leaves open. Other classes also take plain values, such as the name of a file.
    """
    validators = options.__pydantic_decorators__
    if any(one.info.mode != "after" for one in validators.model_validators.values()) and not issubclass(
        options, ModelConfig
    ):
        schema = {
            key: value for key, value in schema.items() if key not in ("type", "required", "additionalProperties")
        }
    free = {field for one in validators.field_validators.values() for field in one.info.fields}
    properties = {
        name: {key: field[key] for key in FREE if key in field} if name in free else field
        for name, field in schema["properties"].items()
    }
    return {**schema, "properties": properties}


if __name__ == "__main__":
    stored.SCHEMA.write_text(recipe_schema())
    print(f"wrote {stored.SCHEMA.name}")
