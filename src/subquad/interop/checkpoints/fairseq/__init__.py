"""fairseq: convolutions and transformers that translate or model language, and its example of the Linformer."""

from subquad.interop.checkpoints.fairseq.convert import SUPPORTED, convert, recognises

__all__ = ["SUPPORTED", "convert", "recognises"]
