"""Describes mechanisms and presets as plain data, for `subquad info` and the generated docs."""

import dataclasses
import inspect
import re
import types
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from subquad.mixers import Mixer, mixer_class
from subquad.mixers.registry import documentation

TITLE = re.compile(r"(Equation|Cost|Citation)s?[:,] *")
LIMITS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def describe(name: str) -> dict[str, Any]:
    """Returns idea, capabilities, docstring sections (equation, cost, citation, ...) and options of a mechanism."""
    mixer = mixer_class(name)
    idea, sections = docstring(mixer)
    return {
        "name": name,
        "class": class_path(mixer),
        "idea": idea,
        "capabilities": capabilities(mixer),
        "sections": sections,
        "options": options_of(mixer),
        "published": {name: dict(options) for name, options in mixer.published.items()},
    }


def class_path(mixer: type[Mixer]) -> str:
    """Returns the path from which the class of a mechanism is imported."""
    own = mixer.__module__.startswith("subquad.mixers.")
    return f"{'subquad.mixers' if own else mixer.__module__}.{mixer.__qualname__}"


def describe_preset(name: str, batch: int, length: int) -> dict[str, Any]:
    """Returns architecture, parameters by part, costs at a batch size and length, and complete config of a preset."""
    import torch

    from subquad.models import build_model
    from subquad.models.costs import estimate_costs

    with torch.device("meta"):
        model = build_model(name)
    config = model.config.model_dump(mode="json")
    cost = estimate_costs(config, batch, length)
    counts = {part: sum(p.numel() for p in module.parameters()) for part, module in model.parts().items()}
    parts = [
        {"name": part, "parameters": counts[part], "architecture": architecture(module)}
        for part, module in model.parts().items()
    ]
    loose = model.parameter_count() - sum(counts.values())
    if loose:
        parts.append({"name": "positions, class token", "parameters": loose, "architecture": ""})
    return {
        "name": name,
        "kind": config["kind"],
        "parameters": model.parameter_count(),
        "parts": parts,
        "images": config["kind"] in ("vision", "pyramid"),
        "batch": batch,
        "length": length,
        "costs": {**dataclasses.asdict(cost), "flops_per_token": cost.flops_per_token},
        "config": config,
    }


def architecture(module: Any) -> str:
    """Describes a part of a model in one line."""
    from subquad.nn.embeddings import TokenEmbedding
    from subquad.nn.stack import Stack

    found = [part for part in module.modules() if isinstance(part, Stack)]
    if found:
        config = found[0].config
        cross = f", cross {config.cross.name}" if config.cross is not None else ""
        options = ", ".join(f"{key}={value}" for key, value in config.mixer.options.items())
        mixer = f"{config.mixer.name} ({options})" if options else config.mixer.name
        size = f"{config.layers} layers, width {config.dim}, {config.heads} heads, ffn_dim {config.ffn_dim}"
        return f"{size}, {config.norm}-norm, {mixer}{cross}"
    if isinstance(module, TokenEmbedding):
        shared = " (shared table)" if module.shared else ""
        return f"{module.vocab:,} tokens x {module.dim}, {module.config.positions} positions{shared}"
    return ""


def capabilities(mixer: type[Mixer]) -> dict[str, Any]:
    has = mixer.capabilities
    return {
        "bidirectional": has.bidirectional,
        "causal": has.causal,
        "cross": has.cross,
        "grid": has.grid,
        "state": has.state,
        "linear": has.linear,
        "averages": has.averages,
    }


def docstring(mixer: type[Mixer]) -> tuple[str, dict[str, str]]:
    """Returns the first paragraph of a mechanism's documentation and its sections "Equation", "Cost" and "Citation".

    A paragraph that begins with one of these titles starts a section; other paragraphs belong to the section before.
    """
    text = inspect.cleandoc(documentation(mixer))
    idea, *rest = re.split(r"\n[ ]*\n", text)
    sections: dict[str, str] = {}
    title = "Notes"
    for paragraph in rest:
        found = TITLE.match(paragraph)
        if found:
            title, paragraph = found[1], paragraph[found.end() :]
        sections[title] = "\n\n".join(filter(None, [sections.get(title), paragraph]))
    return " ".join(idea.split()), {key: inspect.cleandoc(value) for key, value in sections.items()}


def options_of(mixer: type[Mixer]) -> list[dict[str, Any]]:
    options = [option(key, info) for key, info in mixer.Config.model_fields.items()]
    for one in options:
        if one["name"] == "causal" and not mixer.capabilities.bidirectional:
            one["default"] = True
    return options


def option(name: str, field: FieldInfo) -> dict[str, Any]:
    return {
        "name": name,
        "type": type_name(field.annotation),
        "required": field.is_required(),
        "default": None if field.is_required() else field.get_default(call_default_factory=True),
        "limits": limits(field),
        "description": field.description or "",
    }


def default_text(described: dict[str, Any]) -> str:
    return "required" if described["required"] else repr(described["default"])


def type_name(annotation: Any) -> str:
    """Writes a type as in source code: `int | None`, `"a" | "b"`."""
    if get_origin(annotation) is Literal:
        return " | ".join(f'"{value}"' if isinstance(value, str) else repr(value) for value in get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return " | ".join(type_name(part) for part in get_args(annotation))
    if annotation is type(None):
        return "None"
    if get_origin(annotation) is not None:
        inner = ", ".join("..." if part is Ellipsis else type_name(part) for part in get_args(annotation))
        return f"{get_origin(annotation).__name__}[{inner}]"
    return getattr(annotation, "__name__", str(annotation))


def limits(field: FieldInfo) -> str:
    """Writes the numeric limits of an option: `>= 1`."""
    pairs = [(limit, key) for limit in field.metadata for key in LIMITS if hasattr(limit, key)]
    return ", ".join(f"{LIMITS[key]} {getattr(limit, key)}" for limit, key in pairs)


def _yes_or(value: bool, otherwise: str) -> str:
    return "yes" if value else otherwise


def table_row(described: dict[str, Any]) -> list[str]:
    """Returns a row of the table of mechanisms, whose columns are `TABLE_HEADERS`."""
    has = described["capabilities"]
    return [
        _yes_or(has["bidirectional"], "refuse"),
        _yes_or(has["causal"], "refuse"),
        _yes_or(has["cross"], "refuse"),
        _yes_or(has["grid"], "as sequence"),
        has["state"],
    ]


TABLE_HEADERS = ["bidirectional", "causal", "cross", "2-D grid", "streaming state"]
