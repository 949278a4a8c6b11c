"""Checkpoints of programs whose attention is here, but whose task is not: named, so that nobody looks for an option."""

from collections.abc import Iterator, Mapping
from typing import Any

HOSTS = {
    "seq_classifer.mlpblock.0.weight": (
        "the Long Range Arena (a classifier of texts), as in PrimalAttention_LRA",
        "PrimalAttention's language models and image classifiers",
        "subquad.interop.checkpoints.primal",
    ),
    "project_inp.weight": (
        "PrimalAttention_TimeSeries (a classifier of measurements)",
        "PrimalAttention's language models and image classifiers",
        "subquad.interop.checkpoints.primal",
    ),
    ".query_projection.weight": (
        "PrimalAttention_RL (a decision transformer)",
        "PrimalAttention's language models and image classifiers",
        "subquad.interop.checkpoints.primal",
    ),
}
"""End of the name of a weight that only such models have: what they are, what is supported, what reads the attention.

Time series have the weight of decision transformers too, so they come first."""


def refusal(contents: Any) -> str | None:
    """Why a checkpoint cannot be a run, if it is one of these."""
    names = list(_names(contents))
    for ending, (what, supported, module) in HOSTS.items():
        if any(name.endswith(ending) for name in names):
            return (
                f"this is a checkpoint of {what}, a task that subquad does not have; of the programs around it "
                f"{supported} can be imported, and {module}.mixer_from makes mixers of its attention layers"
            )
    return None


def _names(contents: Any) -> Iterator[str]:
    """Names of weights: at the top, or in one of the mappings there."""
    if isinstance(contents, Mapping):
        for key, value in contents.items():
            yield str(key)
            if isinstance(value, Mapping):
                yield from map(str, value)
