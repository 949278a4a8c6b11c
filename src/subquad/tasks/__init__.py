"""Tasks: from a batch to a loss, and from a model to its validation metrics."""
