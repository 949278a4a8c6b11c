"""What is looked at when a training goes wrong, or is slow: numbers that are not finite, and where the time goes."""
