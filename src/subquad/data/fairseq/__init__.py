"""Data folders that fairseq-preprocess wrote."""
