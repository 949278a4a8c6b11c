"""The parts that models are made of: embeddings, feed-forward maps, one block, one stack, output heads."""
