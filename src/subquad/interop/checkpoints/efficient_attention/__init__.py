"""The efficient-attention library: its modules as mixers, and its interface for code that was written for it."""

from subquad.interop.checkpoints.efficient_attention.api import AttentionFactory, NestedNamespace

__all__ = ["AttentionFactory", "NestedNamespace"]
