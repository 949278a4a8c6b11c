"""What main.sh of efficient-attention gives to the programs that it starts."""

from typing import Any

Data = dict[str, Any]

TRANSLATION: Data = {
    "arch": "transformer_wmt_en_de",
    "share_all_embeddings": True,
    "optimizer": "adam",
    "adam_betas": "(0.9, 0.98)",
    "clip_norm": 5.0,
    "lr_scheduler": "inverse_sqrt",
    "warmup_init_lr": 1e-7,
    "warmup_updates": 6000,
    "lr": 0.0007,
    "stop_min_lr": 1e-9,
    "dropout": 0.1,
    "activation_dropout": 0.1,
    "seed": 2,
    "criterion": "label_smoothed_cross_entropy",
    "label_smoothing": 0.1,
    "max_tokens": 4096,
    "amp": True,
    "log_interval": 200,
    "max_update": 300000,
    "save_interval_updates": 1000,
    "keep_interval_updates": 20,
    "keep_last_epochs": 1,
}
"""Translation: -d wmt."""
LANGUAGE: Data = {
    "task": "language_modeling",
    "arch": "transformer_lm_wiki103",
    "log_interval": 50,
    "max_update": 286000,
    "lr": 1.0,
    "t_mult": 2,
    "lr_period_updates": 270000,
    "lr_scheduler": "cosine",
    "lr_shrink": 0.75,
    "warmup_updates": 16000,
    "warmup_init_lr": 1e-7,
    "stop_min_lr": 1e-9,
    "optimizer": "nag",
    "min_lr": 0.0001,
    "clip_norm": 0.1,
    "criterion": "adaptive_loss",
    "max_tokens": 9216,
    "tokens_per_sample": 512,
    "seed": 1,
    "sample_break_mode": "none",
    "keep_last_epochs": 2,
}
"""Language modelling: -d wikitext103."""
DATASETS = {"wmt": (TRANSLATION, "wmt16-en-de"), "wikitext103": (LANGUAGE, "wikitext-103")}
CONTEXT_WINDOWS = (0, 256, 480)
DICTIONARIES = {
    "wmt": {"--dict-source": "dict.en.txt", "--dict-target": "dict.de.txt"},
    "wikitext103": {"--dict-source": "dict.txt"},
}
DECODING = "decode.beam=4 decode.lenpen=0.6 decode.max_len_a=1 decode.max_len_b=50 decode.remove_bpe=subword_nmt"
