"""Linformer's checkpoints."""
