"""Tests of stacks and what they are made of."""
