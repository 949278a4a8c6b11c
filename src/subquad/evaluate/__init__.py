"""Metrics (BLEU, chrF, perplexity, accuracy), their confidence intervals, and paired tests of two systems."""
