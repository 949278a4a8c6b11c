"""Mixers in the place of attention, in models of Hugging Face transformers and timm: `subquad.swap(model, "eva")`."""

from subquad.interop.patching.report import Swapped
from subquad.interop.patching.swap import swap

__all__ = ["Swapped", "swap"]
