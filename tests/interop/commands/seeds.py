"""The commands that the papers' own pages give, with the recipes here that they stand for."""

IWSLT = r"""
SAVE="save/dynamic_conv_iwslt"
mkdir -p $SAVE
CUDA_VISIBLE_DEVICES=0 fairseq-train data-bin/iwslt14.tokenized.de-en \
    --clip-norm 0 --optimizer adam --lr 0.0005 \
    --source-lang de --target-lang en --max-tokens 4000 \
    --log-interval 100 --stop-min-lr '1e-09' --weight-decay 0.0001 \
    --criterion label_smoothed_cross_entropy --label-smoothing 0.1 \
    --lr-scheduler inverse_sqrt \
    --ddp-backend=legacy_ddp \
    --max-update 50000 --warmup-updates 4000 --warmup-init-lr '1e-07' \
    --adam-betas '(0.9, 0.98)' --keep-last-epochs 10 \
    -a lightconv_iwslt_de_en --save-dir $SAVE \
    --dropout 0.3 --attention-dropout 0.1 --weight-dropout 0.1 \
    --encoder-glu 0 --decoder-glu 0"""
WMT16 = r"""
SAVE="save/dynamic_conv_wmt16en2de"
mkdir -p $SAVE
python -m torch.distributed.launch --nproc_per_node 8 $(which fairseq-train) \
    data-bin/wmt16_en_de_bpe32k --fp16 --log-interval 100 \
    --max-update 30000 --share-all-embeddings --optimizer adam \
    --adam-betas '(0.9, 0.98)' --clip-norm 0.0 --weight-decay 0.0 \
    --criterion label_smoothed_cross_entropy --label-smoothing 0.1 \
    --stop-min-lr 1e-09 --update-freq 16 --attention-dropout 0.1 \
    --ddp-backend=legacy_ddp --max-tokens 3584 \
    --lr-scheduler cosine --warmup-init-lr 1e-7 --warmup-updates 10000 \
    --lr 0.001 --min-lr 1e-7 --t-mult 1 --lr-period-updates 20000 \
    --arch lightconv_wmt_en_de_big --save-dir $SAVE \
    --dropout 0.3 --attention-dropout 0.1 --weight-dropout 0.1 \
    --encoder-glu 1 --decoder-glu 1"""
LIGHTWEIGHT = " --encoder-conv-type lightweight --decoder-conv-type lightweight"
EN_FR = WMT16.replace("wmt16_en_de_bpe32k", "wmt14_en_fr").replace("lightconv_wmt_en_de_big", "lightconv_wmt_en_fr_big")
EN_FR = EN_FR.replace("--dropout 0.3", "--dropout 0.1").replace(
    "--lr-period-updates 20000", "--lr-period-updates 70000"
)
PRIMAL_FLAGS = r"""--task language_modeling data-bin/wikitext-103 \
  --save-dir checkpoints/primal_eta01_rank30_wikitext-103 --arch transformer_lm \
  --share-decoder-input-output-embed --dropout 0.1 --optimizer adam \
  --adam-betas '(0.9, 0.98)' --weight-decay 0.01 --clip-norm 0.0 --lr 0.001 \
  --lr-scheduler inverse_sqrt --warmup-updates 6000 --warmup-init-lr 1e-07 \
  --tokens-per-sample 512 --sample-break-mode none --max-tokens 2048 \
  --update-freq 16 --max-update 150000"""
PRIMAL = f"python fairseq_cli/train.py {PRIMAL_FLAGS}"
PRIMAL_EFFICIENCY = f"python fairseq_cli/train_efficiency.py {PRIMAL_FLAGS}"

AVERAGE = r"""python scripts/average_checkpoints.py --inputs $SAVE \
    --num-epoch-checkpoints 10 --output "${SAVE}/checkpoint_last10_avg.pt" """
GENERATE = r"""fairseq-generate data-bin/iwslt14.tokenized.de-en \
    --path "${SAVE}/checkpoint_last10_avg.pt" --batch-size 128 \
    --beam 4 --remove-bpe --lenpen 1 --gen-subset test"""

IMAGES = "-p <dir-of-imagenet-data> -g 8 -d imagenet -e TRUE --dist-eval --num-workers 16"
ALWAYS = "--warmup-epochs 10 --seed 1"
LARA = "--attn-name lara --mis-type mis-opt --proposal-gen pool-mixed --alpha-coeff 2.0 --num-landmarks 49"
EVA = "--attn-name eva --num-landmarks 49 --adaptive-proj default --window-size 7 --attn-2d --use-rpe"
PYRAMID = "--drop-path-rate 0.3"
OTHERS = {
    "softmax": "--attn-name softmax",
    "performer": "--attn-name performer --proj-method favorp --approx-attn-dim 64",
    "local": "--attn-name local --window-size 7 --attn-2d --use-rpe",
}
WITHOUT_GPUS = {
    f"imagenet_evit_tiny_p8_{name}": "bash main.sh -m evit_tiny_p8 -d imagenet -e TRUE --dist-eval --num-workers 16 "
    f"--clip-grad 5.0 {ALWAYS} {flags}"
    for name, flags in OTHERS.items()
}
"""Commands that name neither GPUs nor a folder."""
IMAGE_COMMANDS = {
    **{
        f"imagenet_{size}_{name}": f"bash main.sh -m {size} {IMAGES} --clip-grad 5.0 {ALWAYS} {flags}"
        for size in ("evit_tiny_p8", "evit_tiny_p16", "evit_small_p16")
        for name, flags in {"lara": LARA, "eva": EVA, **OTHERS}.items()
    },
    "imagenet_pvt_v2_b3_lara": f"bash main.sh -m pvt_medium2 {IMAGES} --clip-grad 1.0 {PYRAMID} {ALWAYS} "
    f"{LARA} --pool-module-type dense --repeated-aug",
    "imagenet_pvt_v2_b3_eva": f"bash main.sh -m pvt_medium2 {IMAGES} --clip-grad 5.0 {PYRAMID} {ALWAYS} "
    f"{EVA} --repeated-aug",
}

VISIBLE = "CUDA_VISIBLE_DEVICES=0,1,2,3 bash main.sh -p <dir-of-your-bin-data>"
LANGUAGE_COMMANDS = {
    **{
        f"wmt14_en_de_lara_{count}": f"{VISIBLE} -d wmt -s lara_{count} -g 4 -e TRUE --attn-name-encoder lara "
        f"--encoder-attn-num-landmarks {count} --encoder-attn-proposal-gen adaptive-1d --encoder-attn-mis-type mis-opt"
        for count in (8, 16, 32)
    },
    **{
        f"wmt14_en_de_eva_{window}": f"{VISIBLE} -d wmt -s eva_{window}_8 -g 4 -e TRUE --attn-name-encoder eva "
        f"--encoder-attn-window-size {window} --encoder-attn-num-landmarks 8 --encoder-attn-adaptive-proj no-ln "
        "--encoder-attn-use-t5-rpe --encoder-attn-overlap-window"
        for window in (8, 16, 32)
    },
    **{
        f"wikitext103_causal_eva_{layers}": f"{VISIBLE} -m {layers}layers -d wikitext103 -s eva_128_8_{layers}layers "
        "-g 4 -e TRUE --attn-name-decoder causal_eva --decoder-attn-window-size 128 --decoder-attn-causal "
        "--decoder-attn-adaptive-proj qk --decoder-attn-chunk-size 8 --decoder-attn-use-t5-rpe"
        for layers in (16, 32)
    },
}
INFERENCE = {
    "wmt": "CUDA_VISIBLE_DEVICES=0 bash main.sh -i true -c ckpt/avg.pt -p <dir-of-your-bin-data> -d wmt -g 1",
    "wikitext103": "CUDA_VISIBLE_DEVICES=0 bash main.sh -i true -c ckpt/checkpoint_last.pt -p DATA -d wikitext103 -g 1",
}
LINFORMER = {
    "wmt14_linformer_k32": ("lin_k32_training", 32),
    "wmt14_linformer_k64": ("lin_k64_training", 64),
    "wmt14_linformer_vanilla": ("vanilla_training", None),
}
"""Recipes here, and the configs of crybot/linformer with their k."""

TRAININGS = {
    "iwslt14_de_en_dynamicconv": IWSLT,
    "iwslt14_de_en_lightconv": IWSLT + LIGHTWEIGHT,
    "wmt16_en_de_dynamicconv": WMT16,
    "wmt16_en_de_lightconv": WMT16 + LIGHTWEIGHT,
    "wmt14_en_fr_dynamicconv": EN_FR,
    "wmt14_en_fr_lightconv": EN_FR + LIGHTWEIGHT,
    "wikitext103_primal": PRIMAL,
    **IMAGE_COMMANDS,
    **LANGUAGE_COMMANDS,
}
"""Every command that trains, by the recipe that stands for it."""
