"""What main.sh of efficient-attention gives to the programs that it starts, and the flags of its mechanisms and images.

docs/migrating/efficient-attention.md shows the tables of flags.
"""

from typing import Any

from subquad.interop.commands.flags import Flag

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
    "max_update": 300000,
    "save_interval_updates": 1000,
    "keep_interval_updates": 20,
    "keep_last_epochs": 1,
}
"""Translation: -d wmt."""
LANGUAGE: Data = {
    "task": "language_modeling",
    "arch": "transformer_lm_wiki103",
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
DECODING = "decode.beam=4 decode.lenpen=0.6 decode.max_len_a=1 decode.max_len_b=50"

TIMM = "timm's optimiser and schedule are always those of its DeiT recipe"
ATTENTION = {
    "--window-size": Flag("window"),
    "--overlap-window": Flag("overlap", switch=True),
    "--attn-2d": Flag("dims: 2", switch=True),
    "--use-rpe": Flag("relative: table", switch=True),
    "--use-t5-rpe": Flag("relative: t5", switch=True),
    "--num-landmarks": Flag("landmarks"),
    "--num-chunks": Flag("landmarks"),
    "--chunk-size": Flag("chunk_size"),
    "--causal": Flag("causal, which follows from the decoder", switch=True),
    "--adaptive-proj": Flag("adaptive"),
    "--proposal-gen": Flag("proposal, landmark_mixing"),
    "--pool-module-type": Flag("pool_proj"),
    "--mis-type": Flag("weights"),
    "--alpha-coeff": Flag("alpha"),
    "--use-antithetics": Flag("num_samples: antithetic", switch=True),
    "--use-multisample": Flag("num_samples: multi", switch=True),
    "--approx-attn-dim": Flag("features"),
    "--proj-method": Flag("feature_map"),
    "--cos-weighting": Flag("cosine", switch=True),
    "--sample-scheme": Flag("projection"),
    "--num-samples": Flag("proposal"),
    "--fp32": Flag(reason="logits and sums are in float32 anyway", switch=True),
}
"""The flags of mechanisms; those of language tasks begin with --encoder-attn- or --decoder-attn-."""
IMAGES = {
    "--attn-name": Flag("model.encoder.mixer.name"),
    "--model": Flag("model.preset"),
    "--data-path": Flag("data.images"),
    "--data-set": Flag("data.images"),
    "--output-dir": Flag("--out"),
    "--input-size": Flag("data.augment.size"),
    "--batch-size": Flag("train.budget.max_sentences"),
    "--epochs": Flag("train.epochs"),
    "--lr": Flag("schedule.lr"),
    "--min-lr": Flag("schedule.min_lr"),
    "--warmup-lr": Flag("schedule.warmup_init"),
    "--warmup-epochs": Flag("schedule.warmup_epochs"),
    "--weight-decay": Flag("optim.weight_decay"),
    "--clip-grad": Flag("optim.clip"),
    "--drop-path-rate": Flag("drop_path of model.encoder, or of a pyramid"),
    "--smoothing": Flag("data.mixing.smoothing"),
    "--mixup": Flag("data.mixing.mixup"),
    "--cutmix": Flag("data.mixing.cutmix"),
    "--mixup-switch-prob": Flag("data.mixing.switch"),
    "--aa": Flag("data.augment.randaugment"),
    "--reprob": Flag("data.augment.erase"),
    "--repeated-aug": Flag("data.repeated", switch=True),
    "--seed": Flag("train.seed"),
    "--num-workers": Flag("train.data_workers"),
    "--resume": Flag("--out, which goes on with a run"),
    "--dist-eval": Flag(reason="processes always share an evaluation", switch=True),
    "--opt": Flag(reason=TIMM),
    "--sched": Flag(reason=TIMM),
    "--eval": Flag(reason="`subquad evaluate RUN --split valid` does it", switch=True),
    "--pin-mem": Flag(reason="batches are pinned where there is a GPU", switch=True),
    "--color-jitter": Flag(reason="timm leaves it out beside RandAugment"),
}
"""main.py of the folder vit."""
