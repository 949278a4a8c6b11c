"""Where the tensors of an original program live in one of our modules."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

ModuleType = TypeVar("ModuleType", bound=nn.Module)


@dataclass(frozen=True)
class Slot:
    """Rows of one of our parameters or buffers that hold an original's tensor, or some of its rows (None: all)."""

    name: str
    rows: slice | None = None
    source: slice | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """The part of our tensor (or of its gradient) that the slot names."""
        return tensor if self.rows is None else tensor[self.rows]

    def taken(self, original: Tensor) -> Tensor:
        """The part of the original's tensor that the slot takes."""
        return original if self.source is None else original[self.source]


Slots = dict[str, Slot]
"""Original name -> where it goes."""


@dataclass(frozen=True)
class Imported(Generic[ModuleType]):
    """A mixer or model with an original's weights, and where each of them went."""

    module: ModuleType
    slots: Mapping[str, Slot]


def fill(
    module: ModuleType, state: Mapping[str, Tensor], slots: Mapping[str, Slot], unused: Iterable[str] = ()
) -> Imported[ModuleType]:
    """Copies an original's `state` into a mixer or model.

    unused: names (or prefixes ending in ".") that the original stores but does not compute with. Every stored name must
    be known, every slot stored, every number of values right, and every parameter of ours filled. Names that share a
    place, as tied weights do, must have the same values.
    """
    owner = getattr(module, "name", type(module).__name__)
    skipped = tuple(unused)
    unknown = [
        n for n in state if n not in slots and not any(n == s or (s.endswith(".") and n.startswith(s)) for s in skipped)
    ]
    missing = [n for n in slots if n not in state]
    if unknown or missing:
        lists = f"unknown: {unknown or 'none'}; missing: {missing or 'none'}"
        raise ValueError(f"{owner}: the weights do not fit the config; {lists}")
    ours = dict(module.named_parameters()) | dict(module.named_buffers())
    empty = [n for n, _ in module.named_parameters() if n not in {slot.name for slot in slots.values()}]
    if empty:
        raise ValueError(f"{owner}: the weights do not fit the config; nothing is stored for {empty}")
    owners: dict[tuple[str, int | None], str] = {}
    with torch.no_grad():
        for name, slot in slots.items():
            target, given = slot.of(ours[slot.name]), slot.taken(state[name])
            if target.numel() != given.numel():
                raise ValueError(f"{owner}: {name} is {tuple(given.shape)}, expected {tuple(target.shape)}")
            given = given.reshape(target.shape)
            first = owners.setdefault((slot.name, slot.rows.start if slot.rows else None), name)
            if first != name and not torch.equal(target, given.to(target)):
                raise ValueError(f"{owner}: the weights do not fit the config; {first} and {name} are tied, but differ")
            target.copy_(given)
    return Imported(module, slots)


def placed(imported: Imported[ModuleType], originals: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What an original keeps for each of its tensors (such as moments), as tensors for ours, by name.

    Names of the original may be missing: ours that get nothing are left out, rows that get nothing are 0.
    """
    ours = dict(imported.module.named_parameters())
    result: dict[str, Tensor] = {}
    for name, original in originals.items():
        slot = imported.slots[name]
        if slot.name not in result:
            result[slot.name] = torch.zeros_like(ours[slot.name])
        target = slot.of(result[slot.name])
        target.copy_(slot.taken(original).reshape(target.shape))
    return result


def linear_slots(original: str, ours: str, bias: bool = True) -> Slots:
    """Slots of one linear map or norm: weight, and bias where it has one."""
    parts = ("weight", "bias") if bias else ("weight",)
    return {f"{original}.{part}": Slot(f"{ours}.{part}") for part in parts}


def stacked_slots(originals: Iterable[str], ours: str, width: int, bias: bool = True) -> Slots:
    """Slots of several maps of the original that are stacked in the rows of one of ours, `width` rows each."""
    slots = {}
    for number, original in enumerate(originals):
        rows = slice(number * width, (number + 1) * width)
        for part in ("weight", "bias") if bias else ("weight",):
            slots[f"{original}.{part}"] = Slot(f"{ours}.{part}", rows)
    return slots


def moved(slots: Mapping[str, Slot], original: str, ours: str) -> Slots:
    """The slots of a part, seen from the whole: both sides get a prefix."""
    return {original + name: replace(slot, name=ours + slot.name) for name, slot in slots.items()}


def under(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Tensors whose names start with `prefix`, without it."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
