"""Converts the state of Adam in a fairseq checkpoint, so that training continues with it."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from subquad.interop.checkpoints.fairseq.models import to_current_layout
from subquad.interop.checkpoints.weight_map import ConvertedModule, ParamRef, map_tensors
from subquad.models import Model

BUFFERS = re.compile(r"(^|\.)(version|_float_tensor)$")
MOMENTS = ("exp_avg", "exp_avg_sq")


def convert_optimizer_state(
    saved: Any, state: Mapping[str, Tensor], converted: ConvertedModule[Model]
) -> dict[str, Tensor] | None:
    """Returns the state of Adam as `optimizer_state` would give it, or None.

    None means that the state does not belong to Adam, or does not have one entry for each parameter. saved: fairseq's
    last_optimizer_state, which numbers the parameters in the order of the model. state: the model's state dict as it
    was stored, in the same order; of names that share a tensor only the first has a number.
    """
    by_number = saved.get("state") if isinstance(saved, Mapping) else None
    if not isinstance(by_number, Mapping) or not by_number:
        return None
    names = _parameter_names(state, converted)
    found: dict[str, dict[str, Tensor]] = {key: {} for key in MOMENTS}
    steps: dict[str, float] = {}
    for number, entry in by_number.items():
        if number not in range(len(names)) or not {*MOMENTS, "step"} <= entry.keys():
            return None
        name = names[number]
        if any(entry[key].shape != state[name].shape for key in MOMENTS):
            return None  # half precision stores all moments in one row
        for key in MOMENTS:
            found[key][name] = entry[key].float()
        # linear maps that became rows of one parameter have all made the same number of steps
        steps |= {ref.name: float(entry["step"]) for ref in _refs(name, state, converted)}
    result = {f"step.{name}": torch.tensor(step) for name, step in steps.items()}
    for key, values in found.items():
        result |= {f"{key}.{name}": value for name, value in map_tensors(converted, to_current_layout(values)).items()}
    return result


def _refs(name: str, state: Mapping[str, Tensor], converted: ConvertedModule[Model]) -> list[ParamRef]:
    """Returns where a stored tensor went. The list is empty if the model does not compute with it."""
    return [
        converted.weight_map[part] for part in to_current_layout({name: state[name]}) if part in converted.weight_map
    ]


def _parameter_names(state: Mapping[str, Tensor], converted: ConvertedModule[Model]) -> list[str]:
    """Returns the names of the parameters in the order of fairseq."""
    names: list[str] = []
    seen: set[tuple[tuple[str, int | None], ...]] = set()
    for name in state:
        if BUFFERS.search(name):
            continue
        places = tuple(ref.place for ref in _refs(name, state, converted))
        if not places or places not in seen:
            seen.add(places)
            names.append(name)
    return names
