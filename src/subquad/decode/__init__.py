"""Decoding: beam search, greedy and sampling over the streaming states of any causal mechanism."""
