"""Image classifiers in the layout of DeiT: efficient-attention's evit and pvt, PrimalAttention's and DeiT's ViTs."""

from subquad.interop.checkpoints.vision.convert import SUPPORTED, convert, recognises

__all__ = ["SUPPORTED", "convert", "recognises"]
