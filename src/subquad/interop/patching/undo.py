"""The report of a swap, which can undo it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, NamedTuple

from torch import nn

from subquad.interop.patching.copy_weights import CopiedWeights
from subquad.interop.patching.host import SwappedAttention


@dataclass(frozen=True)
class ReplacedLayer:
    """A layer that was swapped. number: its place among the self-attention layers. path: its name in the model."""

    number: int
    path: str
    kind: str
    weights: CopiedWeights
    notes: tuple[str, ...]


@dataclass(frozen=True)
class RefusedLayer:
    """A layer that was not swapped, and why."""

    path: str
    kind: str
    reason: str


ABSENT = object()
"""The value before the swap of an attribute that there was not."""


class Change(NamedTuple):
    """An attribute that the swap set, with its values before and after."""

    owner: Any
    name: str
    before: Any
    after: Any


@dataclass
class SwapReport:
    """What `swap` did. `print` shows it as a table, and `undo` reverses it."""

    mechanism: str
    replaced: list[ReplacedLayer]
    refused: list[RefusedLayer]
    changes: list[Change] = field(repr=False)
    on_undo: list[Callable[[], None]] = field(repr=False)
    undone: bool = False

    def undo(self) -> None:
        """Restores the attention layers from before the swap; nothing else is changed.

        Maps that were copied to a mixer are again what they were. Maps that stayed in their layer, with the mixer
        between them, are what training has made of them since.
        """
        if self.undone:
            raise ValueError("this swap was undone already")
        for owner, name, _, after in self.changes:
            if getattr(owner, name) is not after:
                raise ValueError(f"{name} of {type(owner).__name__} was changed after the swap; undo that first")
        mixer = next(after.mixer for *_, after in self.changes if isinstance(after, SwappedAttention))
        for owner, name, before, _ in self.changes:
            if before is ABSENT:
                delattr(owner, name)
                continue
            if isinstance(before, nn.Module):  # the model may have been moved or set to evaluation meanwhile
                before.train(mixer.training)
                for like in islice(chain(mixer.parameters(), owner.parameters()), 1):
                    before.to(like)
            setattr(owner, name, before)
        for act in self.on_undo:
            act()
        self.undone = True

    def __str__(self) -> str:
        count = len(self.replaced)
        state = "was undone" if self.undone else f"replaces {count} attention layer{'s' if count > 1 else ''}"
        rows = [("layer", "place", "kept", "new", "dropped")]
        for layer in self.replaced:
            kept, new, dropped = layer.weights
            place = f"{layer.path} ({layer.kind})"
            rows.append((str(layer.number), place, _join_names(kept), _join_names(new), _join_names(dropped)))
        notes = dict.fromkeys(f"note: {note}" for layer in self.replaced for note in layer.notes)
        refusals = [f"not replaced: {layer.path} ({layer.kind}): {layer.reason}" for layer in self.refused]
        return "\n".join([f"{self.mechanism} {state}", *_align(rows), *notes, *refusals])


def _join_names(names: Sequence[str]) -> str:
    """Joins names of tensors. A linear map is shown by its name alone, such as q."""
    shown = dict.fromkeys(
        name.removesuffix(".weight") if name.endswith(".weight") else name
        for name in names
        if not (name.endswith(".bias") and name.replace(".bias", ".weight") in names)
    )
    return " ".join(shown) or "-"


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
