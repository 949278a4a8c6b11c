"""Text on its way from files to memory-mapped tokens."""
