"""The flags and words of the original programs, and what each is here.

`interop/commands` converts command lines by these tables, docs/migrating shows them, and messages about unknown options
and values suggest by them before they suggest by spelling.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Flag(NamedTuple):
    """A flag of an original program.

    fields: the fields of a recipe, or the options of a command here, that it sets; none: see `reason`. switch: whether
    it stands without a value. short: its short form. reason: why it has no counterpart, as the end of "because".
    """

    fields: str = ""
    switch: bool = False
    short: str = ""
    reason: str = ""


def key(flag: str) -> str:
    """The name under which a flag's value is kept: max_update for --max-update."""
    return flag.removeprefix("--").replace("-", "_")


ENGINE = "train.sharded chooses the engine of several processes"
SHOWN = "progress and metrics.jsonl are always there"
LOADED = "the data is mapped into memory, and data_workers build batches ahead"
SKIPPED = "samples above data.max_length are left out and counted in every split"
VALIDATED = "validation computes the loss; `subquad evaluate` computes BLEU"
SAVED = "checkpoints are saved at every validation, and `checkpoints` says which are kept"
UNUSED = "no architecture here has it"
LINFORMER_CONFIG = (
    "this is a config of crybot's program; `subquad recipes --from './run.sh src/train_my.py --config FILE.yaml'` "
    "makes a recipe of it"
)

TRAINING = {
    "--task": Flag("task"),
    "--arch": Flag("model.preset", short="-a"),
    "--source-lang": Flag("data.fairseq.languages", short="-s"),
    "--target-lang": Flag("data.fairseq.languages", short="-t"),
    "--max-source-positions": Flag("data.max_length"),
    "--max-target-positions": Flag("data.max_length"),
    "--tokens-per-sample": Flag("data.blocks.tokens_per_sample"),
    "--sample-break-mode": Flag("data.blocks.breaks"),
    "--mask-prob": Flag("data.masking.share"),
    "--leave-unmasked-prob": Flag("data.masking.kept"),
    "--random-token-prob": Flag("data.masking.random"),
    "--optimizer": Flag("optim.name"),
    "--adam-betas": Flag("optim.betas"),
    "--adam-eps": Flag("optim.eps"),
    "--momentum": Flag("optim.momentum"),
    "--weight-decay": Flag("optim.weight_decay"),
    "--clip-norm": Flag("optim.clip"),
    "--lr": Flag("schedule.lr"),
    "--lr-scheduler": Flag("schedule.kind"),
    "--warmup-updates": Flag("schedule.warmup_updates"),
    "--warmup-init-lr": Flag("schedule.warmup_init"),
    "--min-lr": Flag("schedule.min_lr"),
    "--max-lr": Flag("schedule.lr"),
    "--stop-min-lr": Flag("schedule.stop_lr"),
    "--lr-period-updates": Flag("schedule.period"),
    "--t-mult": Flag("schedule.period_mult"),
    "--lr-shrink": Flag("schedule.shrink"),
    "--total-num-update": Flag("schedule.total"),
    "--end-learning-rate": Flag("schedule.min_lr"),
    "--power": Flag("schedule.kind"),
    "--max-update": Flag("train.updates"),
    "--max-epoch": Flag("train.epochs"),
    "--max-tokens": Flag("train.budget.max_tokens"),
    "--batch-size": Flag("train.budget.max_sentences"),
    "--max-sentences": Flag("train.budget.max_sentences"),
    "--required-batch-size-multiple": Flag("train.budget.multiple"),
    "--update-freq": Flag("train.accumulate"),
    "--distributed-world-size": Flag("train.accumulate"),
    "--criterion": Flag("train.smoothing"),
    "--label-smoothing": Flag("train.smoothing"),
    "--seed": Flag("train.seed"),
    "--fp16": Flag("train.precision", switch=True),
    "--amp": Flag("train.precision", switch=True),
    "--bf16": Flag("train.precision", switch=True),
    "--memory-efficient-fp16": Flag("train.precision", switch=True),
    "--patience": Flag("train.patience"),
    "--validate-interval-updates": Flag("train.validate_every"),
    "--log-interval": Flag("train.log_every"),
    "--checkpoint-activations": Flag("train.checkpoint_activations", switch=True),
    "--keep-last-epochs": Flag("checkpoints.keep_epochs"),
    "--keep-interval-updates": Flag("checkpoints.keep_last"),
    "--keep-best-checkpoints": Flag("checkpoints.keep_best"),
    "--save-interval-updates": Flag("train.validate_every"),
    "--tensorboard-logdir": Flag("track.tensorboard"),
    "--wandb-project": Flag("track.wandb"),
    "--save-dir": Flag("--out"),
    "--restore-file": Flag("--from-run; the same command goes on with its own run"),
    "--finetune-from-model": Flag("--from-run with --reset optimizer,schedule"),
    "--reset-optimizer": Flag("--reset optimizer", switch=True),
    "--reset-lr-scheduler": Flag("--reset schedule, where the optimiser is reset, too", switch=True),
    "--reset-dataloader": Flag("--reset schedule, where the optimiser is reset, too", switch=True),
    "--reset-meters": Flag("--from-run: a new run has a best validation of its own", switch=True),
    "--num-workers": Flag("train.data_workers"),
    "--ddp-backend": Flag(reason=ENGINE),
    "--distributed-no-spawn": Flag(reason=ENGINE, switch=True),
    "--distributed-port": Flag(reason=ENGINE),
    "--distributed-init-method": Flag(reason=ENGINE),
    "--no-progress-bar": Flag(reason=SHOWN, switch=True),
    "--log-format": Flag(reason=SHOWN),
    "--log-file": Flag(reason=SHOWN),
    "--dataset-impl": Flag(reason=LOADED),
    "--skip-invalid-size-inputs-valid-test": Flag(reason=SKIPPED, switch=True),
    "--best-checkpoint-metric": Flag(reason="the best checkpoint is that of the task's main metric"),
    "--maximize-best-checkpoint-metric": Flag(reason="the task knows which values are better", switch=True),
    "--valid-subset": Flag(reason="validation reads the split `valid`; `subquad evaluate` takes --split"),
    "--eval-bleu": Flag(reason=VALIDATED, switch=True),
    "--eval-bleu-args": Flag(reason=VALIDATED),
    "--eval-bleu-detok": Flag(reason=VALIDATED),
    "--eval-bleu-remove-bpe": Flag(reason=VALIDATED, switch=True),
    "--eval-bleu-print-samples": Flag(reason=VALIDATED, switch=True),
    "--save-interval": Flag(reason=SAVED),
    "--no-epoch-checkpoints": Flag(reason=SAVED, switch=True),
    "--no-last-checkpoints": Flag(reason=SAVED, switch=True),
    "--no-save": Flag(reason=SAVED, switch=True),
    "--fp16-scale-window": Flag(reason="the scale of float16 follows the gradients"),
    "--fp16-init-scale": Flag(reason="the scale of float16 follows the gradients"),
    "--threshold-loss-scale": Flag(reason="the scale of float16 follows the gradients"),
    "--user-dir": Flag(reason="mechanisms of other packages are found by entry points, or by --plugin MODULE"),
}
"""What fairseq-train does besides the model."""

MODEL = {
    "--dropout": Flag("dropout of model.encoder, model.decoder, model.source, model.target or model.embedding"),
    "--attention-dropout": Flag("attention_dropout of softmax mixers and of model.decoder.cross"),
    "--activation-dropout": Flag("activation_dropout of model.encoder and model.decoder"),
    "--relu-dropout": Flag("activation_dropout of model.encoder and model.decoder"),
    "--input-dropout": Flag("input_dropout of model.encoder and model.decoder"),
    "--weight-dropout": Flag("tap_dropout of the mixers of model.encoder and model.decoder"),
    "--encoder-layers": Flag("model.encoder.layers"),
    "--decoder-layers": Flag("model.decoder.layers"),
    "--encoder-embed-dim": Flag("model.dim"),
    "--decoder-embed-dim": Flag("model.dim"),
    "--encoder-ffn-embed-dim": Flag("model.encoder.ffn_dim"),
    "--decoder-ffn-embed-dim": Flag("model.decoder.ffn_dim"),
    "--encoder-attention-heads": Flag("model.encoder.heads"),
    "--decoder-attention-heads": Flag("model.decoder.heads"),
    "--encoder-normalize-before": Flag("model.encoder.norm: pre", switch=True),
    "--decoder-normalize-before": Flag("model.decoder.norm: pre", switch=True),
    "--encoder-learned-pos": Flag("model.source.positions: learned", switch=True),
    "--decoder-learned-pos": Flag("model.target.positions: learned", switch=True),
    "--no-token-positional-embeddings": Flag("positions: none of the embeddings", switch=True),
    "--layernorm-embedding": Flag("norm of the embeddings", switch=True),
    "--no-scale-embedding": Flag("scale: false of the embeddings", switch=True),
    "--encoder-layerdrop": Flag("model.encoder.layer_drop"),
    "--decoder-layerdrop": Flag("model.decoder.layer_drop"),
    "--activation-fn": Flag("activation of model.encoder and model.decoder"),
    "--encoder-conv-type": Flag("model.encoder.mixer.name"),
    "--decoder-conv-type": Flag("model.decoder.mixer.name"),
    "--encoder-kernel-size-list": Flag("model.encoder.mixer.kernel_size"),
    "--decoder-kernel-size-list": Flag("model.decoder.mixer.kernel_size"),
    "--encoder-glu": Flag("model.encoder.mixer.glu"),
    "--decoder-glu": Flag("model.decoder.mixer.glu"),
    "--share-all-embeddings": Flag("model.shared_embedding and model.head.tied", switch=True),
    "--share-decoder-input-output-embed": Flag("model.head.tied", switch=True),
    "--compressed": Flag("model.encoder.mixer.proj_k"),
    "--shared-kv-compressed": Flag("model.encoder.mixer.share_kv"),
    "--shared-layer-kv-compressed": Flag("model.encoder.mixer.share_layers"),
    "--freeze-compress": Flag("model.encoder.mixer.frozen"),
    "--adaptive-input": Flag(reason="transformer_lm_wiki103 has it, other architectures do not", switch=True),
    "--adaptive-softmax-cutoff": Flag(reason="set model.embedding.cutoffs and model.head.cutoffs"),
    "--left-pad-source": Flag(reason="padding changes nothing at the words"),
    "--quant-noise-pq": Flag(reason=UNUSED),
}
"""The model of fairseq-train."""

GENERATION = {
    "--path": Flag("RUN of the command, and --checkpoint"),
    "--gen-subset": Flag("--split"),
    "--valid-subset": Flag("--split"),
    "--batch-size": Flag("decode.batch_sentences"),
    "--max-sentences": Flag("decode.batch_sentences"),
    "--max-tokens": Flag("decode.batch_tokens"),
    "--beam": Flag("decode.beam"),
    "--nbest": Flag("decode.nbest"),
    "--lenpen": Flag("decode.lenpen"),
    "--unkpen": Flag("decode.unk_penalty"),
    "--max-len-a": Flag("decode.max_len_a"),
    "--max-len-b": Flag("decode.max_len_b"),
    "--min-len": Flag("decode.min_len"),
    "--no-repeat-ngram-size": Flag("decode.no_repeat_ngram"),
    "--temperature": Flag("decode.temperature"),
    "--source-lang": Flag("data.fairseq.languages", short="-s"),
    "--target-lang": Flag("data.fairseq.languages", short="-t"),
    "--context-window": Flag("--context-window"),
    "--tokens-per-sample": Flag("data.blocks.tokens_per_sample"),
    "--input": Flag("standard input"),
    "--remove-bpe": Flag("decode.remove_bpe"),
    "--post-process": Flag("decode.remove_bpe"),
    "--bpe": Flag("the tokenizer's codes"),
    "--bpe-codes": Flag("--codes of `subquad import`"),
    "--tokenizer": Flag("--moses of `subquad import`"),
    "--print-alignment": Flag("--alignments of `subquad translate`", switch=True),
    "--sampling": Flag("`subquad generate`", switch=True),
    "--quiet": Flag(reason="`subquad evaluate` prints scores only", switch=True),
    "--score-reference": Flag(reason="`subquad evaluate` reports the perplexity of references", switch=True),
    "--fp16": Flag(reason="the run's own precision is used", switch=True),
    "--task": Flag(reason="the run knows its task"),
    "--buffer-size": Flag(reason="lines are translated as they come, in batches"),
    "--skip-invalid-size-inputs-valid-test": Flag(reason="every sentence is translated", switch=True),
    "--sacrebleu": Flag(reason="BLEU is sacrebleu's, beside the tokenised one", switch=True),
    "--num-workers": Flag(reason=LOADED),
    "--dataset-impl": Flag(reason=LOADED),
    "--log-format": Flag(reason=SHOWN),
}
"""fairseq-generate, fairseq-interactive, fairseq-validate and fairseq-eval-lm."""

AVERAGING = {
    "--inputs": Flag("RUN of `subquad average`, or names of checkpoints"),
    "--output": Flag("--name"),
    "--num-epoch-checkpoints": Flag("--epochs"),
    "--num-update-checkpoints": Flag("--updates"),
    "--checkpoint-upper-bound": Flag("--up-to"),
}
"""scripts/average_checkpoints.py."""

PREPARATION = {
    "--source-lang": Flag("data.splits", short="-s"),
    "--target-lang": Flag("data.splits", short="-t"),
    "--trainpref": Flag("data.splits.train"),
    "--validpref": Flag("data.splits.valid"),
    "--testpref": Flag("data.splits.test"),
    "--destdir": Flag("data.fairseq.path, where the folder exists already"),
    "--joined-dictionary": Flag("no data.target_tokenizer", switch=True),
    "--only-source": Flag("task: language-model", switch=True),
    "--srcdict": Flag("data.tokenizer.dictionary"),
    "--tgtdict": Flag("data.target_tokenizer.dictionary"),
    "--nwordssrc": Flag("data.tokenizer.vocab_size"),
    "--nwordstgt": Flag("data.target_tokenizer.vocab_size"),
    "--thresholdsrc": Flag("data.tokenizer.min_count"),
    "--thresholdtgt": Flag("data.target_tokenizer.min_count"),
    "--padding-factor": Flag("data.tokenizer.multiple"),
    "--workers": Flag(reason="text is prepared in batches by the tokenizer's own threads"),
    "--bpe": Flag(reason="data.tokenizer says how text is split"),
}
"""fairseq-preprocess."""

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

CONFIGS = {
    "training": Flag(reason=LINFORMER_CONFIG),
    "dataset": Flag(reason=LINFORMER_CONFIG),
    "learning_rate": Flag("schedule.lr"),
    "lr_scheduler": Flag("schedule"),
    "warmup_steps": Flag("schedule.warmup_updates"),
    "cosine_tmax": Flag("schedule.epochs"),
    "n_layers": Flag("layers of model.encoder and model.decoder"),
    "n_heads": Flag("heads of model.encoder and model.decoder"),
    "mlp_dim": Flag("ffn_dim of model.encoder and model.decoder"),
    "k": Flag("proj_k of a linformer mixer"),
}
"""The names in the configs of crybot/linformer."""

VALUES: dict[str, dict[str, str]] = {
    "task": {"language_modeling": "language-model", "masked_lm": "masked-language-model"},
    "mixer": {"causal_eva": "eva", "lightweight": "lightconv", "dynamic": "dynamicconv", "rfa": "performer"},
    "adaptive": {"default": "norm", "qk": "norm", "no-ln": "linear", "none": "none"},
    "projection": {"default": "redrawn", "fixed": "fixed", "learnable": "learnable"},
    "weights": {"mis-opt": "opt", "mis-bh": "bh", "mis-biased": "biased"},
    "proposal": {"adaptive-1d": "adaptive", "pool-mixed": "pool", "no-param-pool": "plain-pool"},
    "kind": {"inverse_sqrt": "inverse-sqrt", "polynomial_decay": "linear", "fixed": "constant"},
    "precision": {"fp16": "float16", "amp": "float16", "bf16": "bfloat16", "fp32": "float32"},
}
"""The originals' values of options, by the name of the option here."""

PROGRAMS: dict[str, Mapping[str, Flag]] = {
    "fairseq": {**GENERATION, **MODEL, **TRAINING},
    "efficient-attention": IMAGES,
    "crybot/linformer": {f"--{name.replace('_', '-')}": flag for name, flag in CONFIGS.items()},
}
"""The flags of each program; one that several have is the first one's."""
