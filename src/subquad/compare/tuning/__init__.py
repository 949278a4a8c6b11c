"""Tuning: every mechanism gets the same number of trials to find its settings, before any is compared."""
