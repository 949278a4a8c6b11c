"""Options: typed, frozen, and refused by name when they are wrong; and changes to them."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Self, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from subquad.files import parse_yaml
from subquad.original_names import ATTENTION, PROGRAMS, VALUES, Flag, key

MOST_SHOWN = 200


def nearest(word: object, known: Iterable[object], option: str = "") -> str:
    """Returns the end of a sentence about an unknown word: `; did you mean 'x'?` if one is close, else a full stop.

    option: what the word is a value of; what an original program calls so is close whatever its spelling. A key of YAML
    may be any value.
    """
    names = [str(one) for one in known]
    if (ours := VALUES.get(option, {}).get(str(word))) in names:
        return f"; did you mean {ours!r}?"
    close = difflib.get_close_matches(str(word), names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else "."


def find_flag(name: str) -> tuple[str, Flag] | None:
    """Returns the program that has a flag, and what the flag is here. name: update_freq or --update-freq."""
    flag = f"--{key(name).replace('_', '-')}"
    return next(((program, flags[flag]) for program, flags in PROGRAMS.items() if flag in flags), None)


def _meaning_of(name: str, known: Iterable[str] = ()) -> str | None:
    """Returns what a name of an original program is here, as the end of a sentence about an unknown option.

    known: the options that there are. A flag of a mechanism counts if the mechanism has the option.
    """
    known = set(known)
    attention = ATTENTION.get(f"--{key(name).replace('_', '-')}")
    if attention is not None and known & set(re.findall(r"\w+", attention.fields)):
        return f"efficient-attention's {name} is {attention.fields} here"
    found = find_flag(name)
    if found is None:
        return None
    program, flag = found
    return f"{program}'s {name} is {flag.fields} here" if flag.fields else f"{program}'s {name}: {flag.reason}"


class Options(BaseModel):
    """The base of every config class. `parse` builds one, and turns every mistake into one line for the user."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def parse(cls, owner: str, options: Mapping[str, Any]) -> Self:
        """Builds the config; mistakes become one ValueError that names `owner` and the option."""
        for name in options:
            if name not in cls.model_fields:
                raise ValueError(unknown_option(owner, name, cls))
        try:
            return cls(**options)
        except ValidationError as error:
            raise ValueError(f"{owner}: " + "; ".join(_problem(cls, item) for item in error.errors())) from None

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.check()
        return self

    def check(self) -> None:
        """Raises ValueError for options that do not go together; subclasses extend it."""


@dataclass(frozen=True)
class Scale:
    """What tuning may try for a number: `low` to `high` times the value that a recipe has.

    Fractions are drawn evenly by their logarithm, whole numbers are the recipe's times powers of two.
    """

    low: float
    high: float


@dataclass(frozen=True)
class Choices:
    """What tuning may try for an option: each of these values, and the one that a recipe has."""

    values: tuple[Any, ...]


Tunable = Scale | Choices


def unknown_option(owner: str, name: str, options: type[BaseModel]) -> str:
    known, inside = options.model_fields, list(_places(name, options))
    hint = f"; did you mean {' or '.join(inside)}?" if inside else option_hint(name, known)
    return f"{owner} has no option {name!r}{hint} Options: {', '.join(known)}."


def option_hint(name: object, known: Iterable[str]) -> str:
    """Returns the end of a sentence about an unknown option: what an original program means by it, or the nearest."""
    known = list(known)
    meaning = _meaning_of(str(name), known)
    return nearest(name, known) if meaning is None else f"; {meaning}."


def unknown_mechanism(name: str, known: Sequence[str]) -> str:
    return (
        f"no mechanism is called {name!r}{nearest(name, known, 'mixer')} Mechanisms: {', '.join(known)}. "
        "One of another package needs that package installed, or its module named with --plugin."
    )


def unknown_mixer_option(pattern: str, option: str, known: Iterable[str]) -> str:
    return (
        f"mixer {pattern!r} has no option {option!r}{option_hint(option, known)} Options: {', '.join(sorted(known))}."
    )


def unknown_preset(name: object, known: Sequence[str]) -> str:
    return f"no preset is called {name!r}{nearest(name, known)} Presets: {', '.join(known)}."


def unknown_task(owner: str, name: object, known: Sequence[str]) -> str:
    return f"{owner}: task: there is no {name!r}{nearest(name, known, 'task')} Tasks: {', '.join(known)}."


def _places(wanted: str, options: type[BaseModel]) -> Iterator[str]:
    """Returns the places in the sections of a config that have an option of this name, such as `encoder.heads`."""
    for name, field in options.model_fields.items():
        either = get_origin(field.annotation) in (Union, UnionType)
        for part in get_args(field.annotation) if either else [field.annotation]:
            if isinstance(part, type) and issubclass(part, BaseModel):
                own = [wanted] if wanted in part.model_fields else []
                yield from (f"{name}.{place}" for place in [*own, *_places(wanted, part)])


def _problem(options: type[BaseModel], item: Any) -> str:
    """Returns an error of pydantic in our words."""
    place = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        *path, name = item["loc"]
        return unknown_option(".".join(map(str, path)), str(name), _model_at(options, path))
    message = item["msg"].removeprefix("Value error, ")
    if not place:
        return message
    if item["type"] == "value_error":
        return f"{place}: {message}"
    known = re.findall("'([^']*)'", item["ctx"]["expected"]) if item["type"] == "literal_error" else []
    option = place.rpartition(".")[2]
    return f"{place}: {message} (got {_shown(item['input'])})" + nearest(item["input"], known, option).removesuffix(".")


def _shown(value: Any) -> str:
    """Returns a value as one readable line, for a message."""
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def _model_at(options: type[BaseModel], path: Iterable[Any]) -> type[BaseModel]:
    """Returns the config class of the field that `path` leads to."""
    for name in path:
        annotation = options.model_fields[name].annotation if name in options.model_fields else None
        inner = [part for part in (annotation, *get_args(annotation)) if isinstance(part, type)]
        options = next((part for part in inner if issubclass(part, BaseModel)), options)
    return options


# ---------------------------------------------------------------------- changes


def merge_options(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merges `changes` into `base`, mapping by mapping. A mapping with a `name` (a mixer) replaces the old one."""
    result = dict(base)
    for name, value in changes.items():
        old = result.get(name)
        old = {"name": old} if isinstance(old, str) else old
        merges = isinstance(value, Mapping) and "name" not in value and isinstance(old, Mapping)
        result[name] = merge_options(old, value) if merges and old is not None else value
    return result


def changed_names(text: str) -> list[str]:
    """Returns ["a", "b"] for the change `a.b=c` or `a.b:=c`."""
    place, equals, _ = text.partition("=")
    names = place.strip().removesuffix(":").split(".")
    if not equals or not all(names):
        raise ValueError(
            f"{text!r} is not a change to the recipe; write NAME=VALUE, such as train.updates=100, or NAME:=VALUE to "
            "replace a whole section"
        )
    return names


def apply_change(data: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Returns a recipe with the change `a.b=c`, which is merged, or `a.b:=c`, which replaces; c is read as YAML."""
    names, (place, _, value) = changed_names(text), text.partition("=")
    try:
        change: Any = parse_yaml(value)
    except ValueError:
        cut = "; a shell splits at spaces: put the whole change into quotation marks" if text[-1] in ":," else ""
        raise ValueError(f"{text!r}: the value is not YAML{cut}") from None
    if place.rstrip().endswith(":"):
        return _replace(data, names, change)
    for name in reversed(names):
        change = {name: change}
    return merge_options(data, change)


def _replace(data: Mapping[str, Any], names: Sequence[str], value: Any) -> dict[str, Any]:
    first, *rest = names
    if not rest:
        return {**data, first: value}
    inner = data.get(first)
    return {**data, first: _replace(inner if isinstance(inner, Mapping) else {}, rest, value)}
