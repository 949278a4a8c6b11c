"""The efficient-attention library: its options, weights and interface."""
