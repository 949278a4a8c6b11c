"""Saves a linearised model as `subquad.load_swapped` reads it, with its tokenizer or image processor."""

from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

from subquad.linearise.models import Source
from subquad.train.checkpoint import separate


def save_model(model: nn.Module, source: Source, folder: Path) -> None:
    """Writes the folder. timm's models have no format of their own: their weights are written by name."""
    plain: Any = model
    if not hasattr(plain, "save_pretrained"):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(separate(plain.state_dict()), folder / "model.safetensors")
        return
    plain.save_pretrained(folder)
    for part in (source.tokenizer, source.processor):
        if hasattr(part, "save_pretrained"):
            part.save_pretrained(folder)
