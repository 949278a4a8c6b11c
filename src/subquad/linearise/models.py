"""Loads the model that is linearised, with what turns its inputs into tensors, and builds it anew for the control."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from subquad.linearise.stages.data import BYTES, kind_of
from subquad.packages import require_transformers


@dataclass(frozen=True)
class Source:
    """A model with its tokenizer or image processor. name: for people and reports."""

    model: nn.Module
    name: str
    tokenizer: Any = None
    processor: Any = None


def load_source(given: str | Path | nn.Module, tokenizer: Any = None, processor: Any = None) -> Source:
    """Loads a folder or a name of the Hugging Face hub, on the GPU if there is one, or takes a model that is loaded.

    tokenizer: of transformers, its folder, or "bytes"; by default the folder's own, or the bytes of a text where it has
    none. processor: of images, by default the folder's own.
    """
    if isinstance(given, nn.Module):
        if isinstance(tokenizer, str) and tokenizer != BYTES:
            tokenizer = _auto("AutoTokenizer", tokenizer)
        return Source(given, type(given).__name__, tokenizer, processor)
    transformers = require_transformers("linearising a model of Hugging Face")
    place = str(given)
    try:
        config = transformers.AutoConfig.from_pretrained(place)
    except (OSError, ValueError) as error:
        raise ValueError(f"{place} is no model of Hugging Face transformers: {str(error).splitlines()[0]}") from None
    kinds = [getattr(transformers, name, None) for name in config.architectures or []]
    if not kinds or kinds[0] is None:
        raise ValueError(f"the config of {place} names no class of transformers in `architectures`")
    model = kinds[0].from_pretrained(place).to("cuda" if torch.cuda.is_available() else "cpu")
    if kind_of(model) == "images":
        return Source(model, place, None, processor or _auto("AutoImageProcessor", place))
    if isinstance(tokenizer, str) and tokenizer != BYTES:
        tokenizer = _auto("AutoTokenizer", tokenizer)
    return Source(model, place, tokenizer or _auto("AutoTokenizer", place) or BYTES, None)


def _auto(kind: str, place: str) -> Any:
    """What a folder has of this kind; None if it has nothing."""
    try:
        return getattr(require_transformers("its tokenizer or image processor"), kind).from_pretrained(place)
    except (OSError, ValueError, KeyError):
        return None


def build_untrained(model: Any) -> nn.Module | None:
    """Returns a model of the same architecture with random weights; None if the model does not say how to build one."""
    if hasattr(model, "config") and hasattr(type(model), "from_pretrained"):
        config = copy.deepcopy(model.config)
        untrained: nn.Module = type(model)(config)
        return untrained
    if hasattr(model, "init_weights"):  # timm's
        untrained = copy.deepcopy(model)
        for module in untrained.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()  # type: ignore[operator]
        untrained.init_weights()  # type: ignore[operator]
        return untrained
    return None
