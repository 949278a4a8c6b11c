"""Where the tensors of an original program live in one of our mixers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from subquad.mixers import Mixer


@dataclass(frozen=True)
class Slot:
    """Rows of one of our parameters or buffers that hold an original's tensor (all rows when None)."""

    name: str
    rows: slice | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """The part of our tensor (or of its gradient) that the slot names."""
        return tensor if self.rows is None else tensor[self.rows]


@dataclass(frozen=True)
class Imported:
    """A mixer with an original's weights, and where each of them went."""

    mixer: Mixer
    slots: Mapping[str, Slot]


def fill(mixer: Mixer, state: Mapping[str, Tensor], slots: Mapping[str, Slot], unused: Iterable[str] = ()) -> Imported:
    """Copies an original's `state` into `mixer`.

    slots: original name -> where it goes. unused: names (or prefixes ending in ".") that the original stores but does
    not compute with. Every stored name must be known, every slot stored, every number of values right.
    """
    skipped = tuple(unused)
    unknown = [
        n for n in state if n not in slots and not any(n == s or (s.endswith(".") and n.startswith(s)) for s in skipped)
    ]
    missing = [n for n in slots if n not in state]
    if unknown or missing:
        lists = f"unknown: {unknown or 'none'}; missing: {missing or 'none'}"
        raise ValueError(f"{mixer.name}: the weights do not fit the config; {lists}")
    ours = dict(mixer.named_parameters()) | dict(mixer.named_buffers())
    with torch.no_grad():
        for name, slot in slots.items():
            target = slot.of(ours[slot.name])
            if target.numel() != state[name].numel():
                raise ValueError(f"{mixer.name}: {name} is {tuple(state[name].shape)}, expected {tuple(target.shape)}")
            target.copy_(state[name].reshape(target.shape))
    return Imported(mixer, slots)


def linear_slots(original: str, ours: str, bias: bool = True) -> dict[str, Slot]:
    """Slots of one linear map or norm: weight, and bias where it has one."""
    parts = ("weight", "bias") if bias else ("weight",)
    return {f"{original}.{part}": Slot(f"{ours}.{part}") for part in parts}


def stacked_slots(originals: Iterable[str], ours: str, width: int, bias: bool = True) -> dict[str, Slot]:
    """Slots of several maps of the original that are stacked in the rows of one of ours, `width` rows each."""
    slots = {}
    for number, original in enumerate(originals):
        rows = slice(number * width, (number + 1) * width)
        for part in ("weight", "bias") if bias else ("weight",):
            slots[f"{original}.{part}"] = Slot(f"{ours}.{part}", rows)
    return slots
