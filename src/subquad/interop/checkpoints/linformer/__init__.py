"""crybot/linformer: translation models. The official Linformer of fairseq's examples is read as fairseq's."""

from subquad.interop.checkpoints.linformer.convert import SUPPORTED, convert, recognises

__all__ = ["SUPPORTED", "convert", "recognises"]
