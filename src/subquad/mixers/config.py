"""Options of a mixer: typed, frozen, and refused by name when they are wrong."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator


def nearest(word: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the closest known word, or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


class MixerConfig(BaseModel):
    """Options that every mechanism has. A mechanism adds its own in a subclass beside its module."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dim: int = Field(ge=1, description="model width C; inputs and outputs are (batch, time, C)")
    heads: int = Field(8, ge=1, description="number of heads, each C / heads wide")
    causal: bool = Field(False, description="position t sees only positions up to t")
    dropout: float = Field(0.0, ge=0.0, lt=1.0, description="dropout on the output")

    @classmethod
    def parse(cls, mechanism: str, options: Mapping[str, Any]) -> Self:
        """Builds the config; every mistake becomes one ValueError that names the mechanism and the option."""
        for key in options:
            if key not in cls.model_fields:
                known = ", ".join(cls.model_fields)
                raise ValueError(f"{mechanism} has no option {key!r}{nearest(key, cls.model_fields)} Options: {known}.")
        try:
            return cls(**options)
        except ValidationError as error:
            problems = []
            for item in error.errors():
                place = ".".join(str(part) for part in item["loc"])
                message = item["msg"].removeprefix("Value error, ")
                problems.append(f"{place}: {message} (got {item['input']!r})" if place else message)
            raise ValueError(f"{mechanism}: " + "; ".join(problems)) from None

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.check()
        return self

    def check(self) -> None:
        """Raises ValueError for options that do not go together; subclasses extend it."""
        self.check_heads(self.dim)

    def check_heads(self, channels: int) -> None:
        if channels % self.heads:
            near = max(n for n in range(1, min(self.heads, channels) + 1) if channels % n == 0)
            raise ValueError(f"{self.heads} heads do not divide {channels} channels; {near} heads would")
