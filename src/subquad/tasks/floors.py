"""Floors: the main metric of models so simple that whoever trains one should know what they reach on the same data."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Floor(BaseModel):
    """What a simple model reaches on the split that quality is measured on."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(description="of the simple model, such as `unigram`")
    kind: Literal["trivial", "linear"] = Field(
        description="trivial: it does not look at its input, or copies it: a model that is no better has learned "
        "nothing. linear: it has no hidden layer, as a linear map of pixels or counts of neighbouring words."
    )
    value: float = Field(description="of the main metric, as people read it")
    how: str = Field(description="how it was computed, in one sentence")
