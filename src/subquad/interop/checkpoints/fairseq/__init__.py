"""fairseq's checkpoints: convolutions and transformers that translate or model language."""
