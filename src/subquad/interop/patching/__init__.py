"""Replaces the attention of models of Hugging Face transformers and timm by mixers: `subquad.swap(model, "eva")`."""

from subquad.interop.patching.swap import swap
from subquad.interop.patching.undo import SwapReport

__all__ = ["SwapReport", "swap"]
