"""Converts image classifiers in the layout of DeiT.

    checkpoint.pth      model (the state dict), args (the options of the command line), epoch, and optimizer
    classes.txt         the names of the classes in their order, one in each line; it is optional

These are evit and pvt of the efficient-attention library, and the ViTs of PrimalAttention and of DeiT itself.
"""

import re
from collections.abc import Mapping
from math import isqrt
from pathlib import Path
from typing import Any

from torch import Tensor

from subquad.config import merge_options
from subquad.data.images.inputs import Augmented
from subquad.data.images.transforms import AugmentOptions
from subquad.files import decode_utf8, read_bytes
from subquad.interop.checkpoints.run import ConvertedRun, TextFiles
from subquad.interop.checkpoints.safe_pickle import LayerNorm, PartialCall, to_plain_options
from subquad.interop.checkpoints.vision.models import convert_evit, convert_pyramid, convert_vit
from subquad.models import Model

SUPPORTED = "efficient-attention's evit_* and pvt_*, PrimalAttention's and DeiT's ViTs (DeiT's layout)"
HEAD_WIDTH = 64  # channels of a head in evit_*
DEIT_HEADS = {192: 3, 384: 6, 768: 12}
"""The number of heads of DeiT's models (tiny, small and base) by their widths."""
PYRAMID_HEADS, REDUCTIONS = (1, 2, 5, 8), (8, 4, 2, 1)
"""The heads of the stages of pvt_*, twice as many if the name ends in 2. The last stage has softmax attention."""
MIXING = {
    "mixup": "mixup",
    "cutmix": "cutmix",
    "mixup_prob": "probability",
    "mixup_switch_prob": "switch",
    "smoothing": "smoothing",
}
"""From DeiT's options of mixing images to ours."""
CLASSES = "classes.txt"
SMALL = 32  # DeiT does not resize images of this side or less

Args = Mapping[str, Any]
State = Mapping[str, Tensor]


def recognises(contents: Any) -> bool:
    """Whether this is an image classifier that reads patches."""
    state = contents.get("model") if isinstance(contents, Mapping) else None
    if not isinstance(state, Mapping) or "head.weight" not in state:
        return False
    return any(str(name).startswith(("patch_embed.", "patch_embed1.")) for name in state)


def convert(contents: Mapping[str, Any], folder: Path, texts: TextFiles) -> ConvertedRun:  # noqa: ARG001
    """Converts a checkpoint to a run of ours."""
    args = to_plain_options(contents.get("args") or {})
    state: State = contents["model"]
    name = str(args.get("model", "ViT"))
    origin, model, size = _convert_model(name, args, state)
    classes, notes = _class_names(folder / CLASSES, model.config.num_classes)
    small = size <= SMALL
    augment = AugmentOptions(size=size, crop="pad" if small else "resized", eval_crop=1.0 if small else 0.875)
    described = augment.model_dump(mode="json")
    epoch = int(contents.get("epoch", -1)) + 1
    train = {"epochs": max(1, epoch, int(args.get("epochs") or 0)), "aux_weight": float(args.get("eta") or 0.0)}
    recipe = merge_options({"data": {"augment": described}, "train": train}, _training_sections(args))
    constant = recipe.get("schedule", {}).get("kind", "constant") == "constant"
    rate = ", at a constant learning rate" if constant else ""
    return ConvertedRun(
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
            f"the state of the optimiser is not converted: training continues with a fresh one{rate}",
        ],
    )


def _training_sections(args: Args) -> dict[str, Any]:
    """Returns the sections for learning rate, weight decay, label smoothing, mixup and CutMix that the options give."""
    found: dict[str, Any] = {}
    if rate := float(args.get("lr") or 0.0):
        found["schedule"] = {"kind": "constant", "lr": rate} | _cosine_schedule(args, rate)
    if args.get("weight_decay") is not None and args.get("opt", "adamw") == "adamw":
        betas = list(args.get("opt_betas") or (0.9, 0.999))
        decay = {
            "weight_decay": float(args["weight_decay"]),
            "decay_vectors": False,
        }  # biases and norms have no weight decay
        found["optim"] = {"name": "adamw", "betas": betas, **decay}
    mixing = {ours: float(args[theirs]) for theirs, ours in MIXING.items() if args.get(theirs) is not None}
    if mixing.get("mixup") or mixing.get("cutmix"):
        found["data"] = {"mixing": {"mixup": 0.0, "cutmix": 0.0, "smoothing": 0.0} | mixing}
    elif "smoothing" in mixing:
        found["train"] = {"smoothing": mixing["smoothing"]}
    return found


def _cosine_schedule(args: Args, rate: float) -> dict[str, Any]:
    """Returns the options of DeiT's default schedule, a cosine by epochs, or nothing for another schedule."""
    if args.get("sched") != "cosine" or not args.get("epochs"):
        return {}
    warmup = int(args.get("warmup_epochs") or 0)
    start = {"warmup_epochs": warmup, "warmup_init": float(args.get("warmup_lr") or 0.0)} if warmup else {}
    lowest = min(rate, float(args.get("min_lr") or 0.0))
    return {"kind": "cosine-epochs", "min_lr": lowest, "epochs": int(args["epochs"]), **start}


def _class_names(path: Path, count: int) -> tuple[list[str], list[str]]:
    """Returns the names of the classes, which no checkpoint contains, and notes about them."""
    if not path.is_file():
        note = f"classes are called 0 to {count - 1}; put a {CLASSES} beside the checkpoint to give them names"
        return [str(number) for number in range(count)], [note]
    names = decode_utf8(read_bytes(path), str(path)).split("\n")
    names = [name.strip() for name in names if name.strip()]
    if len(names) != count or len(set(names)) != count:
        raise ValueError(f"{path} has {len(set(names))} names, but the model has {count} classes")
    return names, []


def _convert_model(name: str, args: Args, state: State) -> tuple[str, Model, int]:
    """Returns the program, the model, and the side of its images."""
    size = int(args.get("input_size") or 224)
    if "patch_embed1.proj.weight" in state:
        return (
            "efficient-attention",
            convert_pyramid(pyramid_options(name, args, state), state).module,
            size,
        )
    if "cls_token" in state:
        config = class_token_options(name, args, state)
        origin = "PrimalAttention" if _primal_weight(state) is not None else "DeiT"
        return origin, convert_vit(config, state).module, config["img"]
    return "efficient-attention", convert_evit(evit_options(name, args, state, size), state).module, size


def _library_options(name: str, args: Args) -> dict[str, Any]:
    """Returns the options that both kinds of models of the library have."""
    if "attn_name" not in args:
        raise ValueError(f"{name}: args have no attn_name, so it is not known what its attention computes")
    return {
        "attn_name": args["attn_name"],
        "attn_args": args.get("attn_args") or {},
        **_norm_options(name, args.get("norm_layer")),
        "drop_path_rate": float(args.get("drop_path_rate", args.get("drop_path")) or 0.0),
    }


def _norm_options(name: str, layer: Any) -> dict[str, float]:
    """Returns the eps of norms. layer: the option norm_layer, which main.py sets to partial(LayerNorm, eps=1e-6)."""
    if layer is None:
        return {}
    if not isinstance(layer, PartialCall) or layer.function is not LayerNorm or layer.keywords.keys() - {"eps"}:
        raise ValueError(f"{name}: args.norm_layer is no LayerNorm with an eps alone, which is what is supported")
    eps = float(layer.keywords.get("eps", 1e-5))
    return {"layernorm_eps": eps, "layernorm_eps_blocks": eps}


def evit_options(name: str, args: Args, state: State, size: int) -> dict[str, Any]:
    """Returns the options of evit_*. The name decides the size of patches, whatever the option says."""
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
    """Returns the options of a ViT with a class token.

    They follow from the weights, except the number of positions that primal attention samples and the number of heads
    of softmax attention.
    """
    dim, patch = state["head.weight"].shape[1], state["patch_embed.proj.weight"].shape[-1]
    primal = _primal_weight(state)
    heads = primal.shape[0] if primal is not None else args.get("num_heads") or DEIT_HEADS.get(dim)
    if heads is None:
        widths = ", ".join(map(str, DEIT_HEADS))
        raise ValueError(
            f"{name} is {dim} wide, and its number of heads is not known: args have no num_heads, and without that "
            f"only DeiT's widths ({widths}) are supported"
        )
    return {
        "dim": dim,
        "heads": int(heads),
        "img": isqrt(state["pos_embed"].shape[1] - 1) * patch,
        "patch": patch,
        "ln_eps": 1e-6,
        "rank_multi": int(args.get("rank_multi") or 10),
    }


def _primal_weight(state: State) -> Tensor | None:
    """Returns the first weight of primal attention, (heads, ...), or None if all attention is softmax."""
    return next((value for name, value in state.items() if name.endswith(".attn.we")), None)
