"""What is measured on the machine, for all mechanisms side by side: time, memory, decoding speed, approximation."""
