"""Old checkpoints in: one module per original program, each mapping its option and parameter names to ours."""
