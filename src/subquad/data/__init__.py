"""From raw data to batches: sources, tokenizers, memory-mapped tokens, batches by token budget."""
