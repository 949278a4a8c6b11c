"""Decoding with the streaming state of any causal mechanism: beam search, greedy decoding and sampling."""
