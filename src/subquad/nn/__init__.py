"""The parts of models: embeddings, feed-forward networks, the block, the stack of blocks, and output heads."""
