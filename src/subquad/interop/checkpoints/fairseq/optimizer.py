"""Adam's moments of a fairseq checkpoint under the names of our parameters, so that training goes on with them."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from subquad.interop.checkpoints.fairseq.models import in_current_layout
from subquad.interop.checkpoints.weight_map import Imported, Slot, placed
from subquad.models import Model

BUFFERS = re.compile(r"(^|\.)(version|_float_tensor)$")
MOMENTS = ("exp_avg", "exp_avg_sq")


def moments_of(saved: Any, state: Mapping[str, Tensor], imported: Imported[Model]) -> dict[str, Tensor] | None:
    """What `optimizer_state` would give; None: the state is not of Adam, or not of these parameters one by one.

    saved: fairseq's last_optimizer_state, which numbers the parameters as the model lists them. state: the model's
    state dict as it was stored, in the same order; of names that share a tensor only the first is numbered.
    """
    by_number = saved.get("state") if isinstance(saved, Mapping) else None
    if not isinstance(by_number, Mapping) or not by_number:
        return None
    names = _numbered(state, imported)
    found: dict[str, dict[str, Tensor]] = {key: {} for key in MOMENTS}
    steps: dict[str, float] = {}
    for number, entry in by_number.items():
        if number not in range(len(names)) or not {*MOMENTS, "step"} <= entry.keys():
            return None
        name = names[number]
        if any(entry[key].shape != state[name].shape for key in MOMENTS):  # half precision: all in one row
            return None
        for key in MOMENTS:
            found[key][name] = entry[key].float()
        # maps that are rows of one of ours have all made the same number of steps
        steps |= {slot.name: float(entry["step"]) for slot in _slots(name, state, imported)}
    result = {f"step.{name}": torch.tensor(step) for name, step in steps.items()}
    for key, values in found.items():
        result |= {f"{key}.{name}": value for name, value in placed(imported, in_current_layout(values)).items()}
    return result


def _slots(name: str, state: Mapping[str, Tensor], imported: Imported[Model]) -> list[Slot]:
    """Where a stored tensor went; nowhere, if the model does not compute with it."""
    return [imported.slots[part] for part in in_current_layout({name: state[name]}) if part in imported.slots]


def _numbered(state: Mapping[str, Tensor], imported: Imported[Model]) -> list[str]:
    """Names of the parameters in fairseq's order."""
    names: list[str] = []
    seen: set[tuple[tuple[str, int | None], ...]] = set()
    for name in state:
        if BUFFERS.search(name):
            continue
        places = tuple((slot.name, slot.rows.start if slot.rows else None) for slot in _slots(name, state, imported))
        if not places or places not in seen:
            seen.add(places)
            names.append(name)
    return names
