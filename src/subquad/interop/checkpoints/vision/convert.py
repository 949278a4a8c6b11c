"""Checkpoints of image classifiers in DeiT's layout: evit and pvt of the efficient-attention library, and the ViTs of
PrimalAttention and of DeiT itself.

    checkpoint.pth      model (the state dict), args (the command line's options), epoch, and of training: optimizer
    classes.txt         beside it, where the user puts one: names of the classes in their order, one a line
"""

import re
from collections.abc import Mapping
from math import isqrt
from pathlib import Path
from typing import Any

from torch import Tensor

from subquad.data.images.inputs import Augmented
from subquad.data.images.transforms import AugmentOptions
from subquad.files import decode_utf8, read_bytes
from subquad.interop.checkpoints.run import ImportedRun, TextFiles
from subquad.interop.checkpoints.safe_pickle import options_of
from subquad.interop.checkpoints.vision import models as vision_models
from subquad.models import Model
from subquad.models.presets import merged

SUPPORTED = "efficient-attention's evit_* and pvt_*, PrimalAttention's and DeiT's ViTs (DeiT's layout)"
HEAD_WIDTH = 64  # of evit_*
DEIT_HEADS = {192: 3, 384: 6, 768: 12}
"""Of DeiT's models, tiny, small and base, by their widths."""
PYRAMID_HEADS, REDUCTIONS = (1, 2, 5, 8), (8, 4, 2, 1)
"""Heads of the stages of pvt_*, twice as many where the name ends in 2; the last stage has softmax attention."""
MIXING = {
    "mixup": "mixup",
    "cutmix": "cutmix",
    "mixup_prob": "probability",
    "mixup_switch_prob": "switch",
    "smoothing": "smoothing",
}
"""DeiT's options and ours, of mixing images."""
CLASSES = "classes.txt"
SMALL = 32  # DeiT resizes no image of this side or less

Args = Mapping[str, Any]
State = Mapping[str, Tensor]


def recognises(contents: Any) -> bool:
    """Whether a file holds an image classifier that reads patches."""
    state = contents.get("model") if isinstance(contents, Mapping) else None
    if not isinstance(state, Mapping) or "head.weight" not in state:
        return False
    return any(str(name).startswith(("patch_embed.", "patch_embed1.")) for name in state)


def convert(contents: Mapping[str, Any], folder: Path, texts: TextFiles) -> ImportedRun:  # noqa: ARG001
    """The checkpoint as a run of ours."""
    args = options_of(contents.get("args") or {})
    state: State = contents["model"]
    name = str(args.get("model", "ViT"))
    origin, model, size = _model(name, args, state)
    classes, notes = _classes(folder / CLASSES, model.config.classes)
    small = size <= SMALL
    augment = AugmentOptions(size=size, crop="pad" if small else "resized", eval_crop=1.0 if small else 0.875)
    described = augment.model_dump(mode="json")
    epoch = int(contents.get("epoch", -1)) + 1
    train = {"epochs": max(1, epoch, int(args.get("epochs") or 0)), "aux_weight": float(args.get("eta") or 0.0)}
    recipe = merged({"data": {"augment": described}, "train": train}, _training(args))
    constant = recipe.get("schedule", {}).get("kind", "constant") == "constant"
    rate = ", at a constant learning rate" if constant else ""
    return ImportedRun(
        origin=f"{origin}, {name}",
        task="image-classification",
        model=model,
        inputs={
            "classes": classes,
            "transform": {"kind": Augmented.kind, "options": described},
        },
        recipe=recipe,
        epoch=epoch,
        notes=[
            *notes,
            f"the optimiser's state is not taken: training goes on with a fresh one{rate}",
        ],
    )


def _training(args: Args) -> dict[str, Any]:
    """What DeiT's options say of the learning rate, weight decay, label smoothing, mixup and cutmix, where they do."""
    found: dict[str, Any] = {}
    if rate := float(args.get("lr") or 0.0):
        found["schedule"] = {"kind": "constant", "lr": rate} | _cosine(args, rate)
    if args.get("weight_decay") is not None and args.get("opt", "adamw") == "adamw":
        betas = list(args.get("opt_betas") or (0.9, 0.999))
        decay = {"weight_decay": float(args["weight_decay"]), "decay_vectors": False}  # biases and norms have none
        found["optim"] = {"name": "adamw", "betas": betas, **decay}
    mixing = {ours: float(args[theirs]) for theirs, ours in MIXING.items() if args.get(theirs) is not None}
    if mixing.get("mixup") or mixing.get("cutmix"):
        found["data"] = {"mixing": {"mixup": 0.0, "cutmix": 0.0, "smoothing": 0.0} | mixing}
    elif "smoothing" in mixing:
        found["train"] = {"smoothing": mixing["smoothing"]}
    return found


def _cosine(args: Args, rate: float) -> dict[str, Any]:
    """The curve by epochs that DeiT follows unless it is told another."""
    if args.get("sched") != "cosine" or not args.get("epochs"):
        return {}
    warmup = int(args.get("warmup_epochs") or 0)
    start = {"warmup_epochs": warmup, "warmup_init": float(args.get("warmup_lr") or 0.0)} if warmup else {}
    lowest = min(rate, float(args.get("min_lr") or 0.0))
    return {"kind": "cosine-epochs", "min_lr": lowest, "epochs": int(args["epochs"]), **start}


def _classes(path: Path, count: int) -> tuple[list[str], list[str]]:
    """Names of the classes, and what the user should know of them: no checkpoint holds any."""
    if not path.is_file():
        note = f"classes are called 0 to {count - 1}: with a {CLASSES} beside the checkpoint they have its names"
        return [str(number) for number in range(count)], [note]
    names = decode_utf8(read_bytes(path), str(path)).split("\n")
    names = [name.strip() for name in names if name.strip()]
    if len(names) != count or len(set(names)) != count:
        raise ValueError(f"{path} has {len(set(names))} names; the model has {count} classes")
    return names, []


def _model(name: str, args: Args, state: State) -> tuple[str, Model, int]:
    """Program, model, and the side of its images."""
    size = int(args.get("input_size") or 224)
    if "patch_embed1.proj.weight" in state:
        return "efficient-attention", vision_models.pyramid_from(pyramid_options(name, args, state), state).module, size
    if "cls_token" in state:
        config = class_token_options(name, args, state)
        origin = "PrimalAttention" if _primal(state) is not None else "DeiT"
        return origin, vision_models.primal_vit_from(config, state).module, config["img"]
    return "efficient-attention", vision_models.evit_from(evit_options(name, args, state, size), state).module, size


def _library_options(name: str, args: Args) -> dict[str, Any]:
    """What both kinds of the library's models are told."""
    if "attn_name" not in args:
        raise ValueError(f"{name}: args do not say attn_name, so nobody knows what its attention computes")
    return {
        "attn_name": args["attn_name"],
        "attn_args": args.get("attn_args") or {},
        "drop_path_rate": float(args.get("drop_path_rate", args.get("drop_path")) or 0.0),
    }


def evit_options(name: str, args: Args, state: State, size: int) -> dict[str, Any]:
    """Options of evit_*: the name says how large patches are, whatever the option says."""
    named = re.search(r"_p(\d+)$", name)
    dim = state["head.weight"].shape[1]
    return _library_options(name, args) | {
        "embed_dim": dim,
        "num_heads": args.get("num_heads") or dim // HEAD_WIDTH,
        "patch_size": int(named[1]) if named else int(args.get("patch_size") or 16),
        "input_size": size,
        "patchify_stem": args.get("patchify_stem") or "default",
        "use_glu": bool(args.get("use_glu")),
        "no_pos_emb": "pos_embed" not in state,
        "qkv_bias": "blocks.0.attn.qkv.bias" in state,
    }


def pyramid_options(name: str, args: Args, state: State) -> dict[str, Any]:
    heads = [number * (2 if name.endswith("2") else 1) for number in PYRAMID_HEADS]
    return _library_options(name, args) | {
        "embed_dims": [state[f"patch_embed{stage}.proj.weight"].shape[0] for stage in range(1, 5)],
        "num_heads": args.get("num_heads") or heads,
        "sr_ratios": REDUCTIONS,
        "qkv_bias": "block1.0.attn.attn_fn.qkv.bias" in state,
    }


def class_token_options(name: str, args: Args, state: State) -> dict[str, Any]:
    """Options of a ViT with a class token: its weights say all but how many positions primal attention samples, and
    how many heads softmax attention has."""
    dim, patch = state["head.weight"].shape[1], state["patch_embed.proj.weight"].shape[-1]
    primal = _primal(state)
    heads = primal.shape[0] if primal is not None else args.get("num_heads") or DEIT_HEADS.get(dim)
    if heads is None:
        widths = ", ".join(map(str, DEIT_HEADS))
        raise ValueError(
            f"{name} is {dim} wide, and nobody knows how many heads it has: args do not say num_heads, and without "
            f"that only DeiT's widths ({widths}) are supported"
        )
    return {
        "dim": dim,
        "heads": int(heads),
        "img": isqrt(state["pos_embed"].shape[1] - 1) * patch,
        "patch": patch,
        "ln_eps": 1e-6,
        "rank_multi": int(args.get("rank_multi") or 10),
    }


def _primal(state: State) -> Tensor | None:
    """The first weight that only primal attention has, (heads, ...); None: all attention is softmax."""
    return next((value for name, value in state.items() if name.endswith(".attn.we")), None)
