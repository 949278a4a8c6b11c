"""What a swap did to a model, and how it is undone."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from subquad.interop.patching.copy_weights import Carried
from subquad.interop.patching.host import SwappedAttention


@dataclass(frozen=True)
class Replaced:
    """A layer that was swapped. number: among the model's self-attention layers; path: where the layer stands."""

    number: int
    path: str
    kind: str
    carried: Carried
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Refused:
    """A layer that stays as it is."""

    path: str
    kind: str
    reason: str


class Change(NamedTuple):
    """An attribute that was set, and what it was."""

    owner: Any
    name: str
    before: Any
    after: Any


@dataclass
class Swapped:
    """What `swap` did; `print` shows it as a table."""

    mechanism: str
    replaced: list[Replaced]
    refused: list[Refused]
    changes: list[Change] = field(repr=False)
    undone: bool = False

    def undo(self) -> None:
        """Puts back what was replaced, with the weights of before the swap: training since then has not touched them.

        The rest of the model keeps what it has learned.
        """
        if self.undone:
            raise ValueError("this swap was undone already")
        for owner, name, _, after in self.changes:
            if getattr(owner, name) is not after:
                raise ValueError(f"{name} of {type(owner).__name__} was changed after the swap; undo that first")
        mixer = next(after.mixer for *_, after in self.changes if isinstance(after, SwappedAttention))
        for owner, name, before, _ in self.changes:
            if isinstance(before, nn.Module):  # while it was away the model may have been moved or set to evaluation
                before.train(mixer.training).to(next(mixer.parameters()))
            setattr(owner, name, before)
        self.undone = True

    def __str__(self) -> str:
        count = len(self.replaced)
        state = "undone" if self.undone else f"in the place of {count} attention layer{'s' if count > 1 else ''}"
        rows = [("layer", "place", "kept", "new", "dropped")]
        for layer in self.replaced:
            kept, new, dropped = layer.carried
            place = f"{layer.path} ({layer.kind})"
            rows.append((str(layer.number), place, _shown(kept), _shown(new), _shown(dropped)))
        notes = dict.fromkeys(f"note: {note}" for layer in self.replaced for note in layer.notes)
        refusals = [f"not replaced: {layer.path} ({layer.kind}): {layer.reason}" for layer in self.refused]
        return "\n".join([f"{self.mechanism} {state}", *_aligned(rows), *notes, *refusals])


def _shown(names: Sequence[str]) -> str:
    """A map by its name, such as q, where its weight is among the tensors."""
    shown = dict.fromkeys(
        name.removesuffix(".weight") if name.endswith(".weight") else name
        for name in names
        if not (name.endswith(".bias") and name.replace(".bias", ".weight") in names)
    )
    return " ".join(shown) or "-"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
