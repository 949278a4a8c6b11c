"""Replaces the attention of models of transformers, timm and torch by mixers: `subquad.swap(model, "eva")`."""

from subquad.interop.patching.attention_interface import register_attention
from subquad.interop.patching.saving import load_swapped
from subquad.interop.patching.swap import swap
from subquad.interop.patching.undo import SwapReport

__all__ = ["SwapReport", "load_swapped", "register_attention", "swap"]
