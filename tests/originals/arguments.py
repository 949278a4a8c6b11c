"""The efficient-attention library's arguments: every flag of every mechanism, and what its constructors default to."""

import argparse
import inspect
from typing import Any

from subquad.interop.checkpoints.efficient_attention.api import (
    ARGUMENTS,
    Attention,
    TimeFirstAttention,
    add_attn_specific_args,
)

SIZE = {"dim": 8, "num_heads": 2}


def check_arguments(content: dict[str, Any]) -> None:
    assert set(content) == set(ARGUMENTS)
    for name, table in content.items():
        parser = argparse.ArgumentParser(add_help=False)
        assert add_attn_specific_args(parser, name) is parser
        assert [described(action) for action in parser._actions] == table["cli"], name
        defaults: dict[str, Any] = {}
        for part in table["constructor"]:
            defaults |= part["params"]
        check_constructor(name, defaults)


def described(action: argparse.Action) -> dict[str, Any]:
    assert action.choices is None
    assert action.nargs in (None, 0)
    return {
        "flag": " ".join(action.option_strings),
        "dest": action.dest,
        "default": action.default,
        "type": getattr(action.type, "__name__", None),
        "action": "store_true" if isinstance(action, argparse._StoreTrueAction) else "store",
    }


def check_constructor(name: str, defaults: dict[str, Any]) -> None:
    """Arguments without a default are null in the table."""
    if name == "causal_eva":
        parameters = inspect.signature(TimeFirstAttention).parameters.values()
        ours = {entry.name: None if entry.default is entry.empty else entry.default for entry in parameters}
        assert ours == defaults
        return
    assert defaults.keys() >= SIZE.keys()
    written_out = Attention(name, **(defaults | SIZE))
    assert written_out.mixer.config == Attention(name, **SIZE).mixer.config, name
