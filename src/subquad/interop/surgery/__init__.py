"""Mixers in the place of attention, in models of Hugging Face transformers and timm: `subquad.swap(model, "eva")`."""

from subquad.interop.surgery.report import Swapped
from subquad.interop.surgery.swap import swap

__all__ = ["Swapped", "swap"]
