"""Small recipes of every kind of model, and plans of comparisons of them."""

from typing import Any

from subquad.compare.plan import Plan
from subquad.compare.variants import build_variants
from subquad.train.recipe import Recipe

STACK = {"layers": 2, "heads": 2, "ffn_dim": 16}
SCHEDULE = {"kind": "constant", "lr": 1e-3}


def recipe(model: dict[str, Any], task: str = "translation", **train: Any) -> Recipe:
    data = {"embedded": "digits" if task == "image-classification" else "phrases"}
    given = {"task": task, "data": data, "model": model, "schedule": SCHEDULE, "train": {"updates": 1, **train}}
    return Recipe.parse("recipe", given)


PAIRS = recipe({"preset": "translation_small", "dim": 16, "encoder": STACK, "decoder": {**STACK, "mixer": "lightconv"}})
PYRAMID = recipe(
    {"kind": "pyramid", "stages": [{**STACK, "dim": 16, "mixer": {"name": "eva", "window": 3}}, {**STACK, "dim": 16}]},
    "image-classification",
)
TEXT = {"preset": "lm_small", "dim": 16, "decoder": STACK, "embedding": {"positions": "learned", "max_length": 8}}


def make_plan(given: Recipe, mixers: list[str], settings: dict[str, dict[str, Any]] | None = None, **more: Any) -> Plan:
    variants = build_variants(given, mixers, settings or {}, "softmax")
    options = {"seeds": (1, 2), "split": "test", "data_dependent_model_config": {}, **more}
    return Plan(recipe=given.model_dump(mode="json"), variants=tuple(variants), **options)
