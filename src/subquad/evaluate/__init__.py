"""Measures of quality: BLEU and chrF, perplexity, accuracy; how sure they are, and whether two systems differ."""
