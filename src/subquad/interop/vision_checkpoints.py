"""Checkpoints of image classifiers in DeiT's layout: evit and pvt of the efficient-attention library, and the ViTs of
PrimalAttention.

    checkpoint.pth      model (the state dict), args (the command line's options), epoch, and of training: optimizer
    classes.txt         beside it, where the user puts one: names of the classes in their order, one a line
"""

import re
from collections.abc import Mapping
from math import isqrt
from pathlib import Path
from typing import Any

from torch import Tensor

from subquad.data.augment import AugmentOptions
from subquad.data.tokenizer_base import decoded_text, file_bytes
from subquad.interop import vision_models
from subquad.interop.imported import Imported, TextFiles
from subquad.interop.pickles import options_of
from subquad.models import Model
from subquad.tasks.classification import Augmented

SUPPORTED = "efficient-attention's evit_* and pvt_*, PrimalAttention's and DeiT's ViTs (DeiT's layout)"
HEAD_WIDTH = 64  # of DeiT's models, whose names say how wide they are
PYRAMID_HEADS, REDUCTIONS = (1, 2, 5, 8), (8, 4, 2, 1)
"""Heads of the stages of pvt_*, twice as many where the name ends in 2; the last stage has softmax attention."""
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


def convert(contents: Mapping[str, Any], folder: Path, texts: TextFiles) -> Imported:  # noqa: ARG001
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
    return Imported(
        origin=f"{origin}, {name}",
        task="image-classification",
        model=model,
        inputs={
            "classes": classes,
            "transform": {"kind": Augmented.kind, "options": described},
        },
        recipe={"data": {"augment": described}, "train": train},
        epoch=epoch,
        notes=[
            *notes,
            "no state of the optimiser: training goes on with a fresh one, at a constant learning rate",
        ],
    )


def _classes(path: Path, count: int) -> tuple[list[str], list[str]]:
    """Names of the classes, and what the user should know of them: no checkpoint holds any."""
    if not path.is_file():
        note = f"classes are called 0 to {count - 1}: with a {CLASSES} beside the checkpoint they have its names"
        return [str(number) for number in range(count)], [note]
    names = decoded_text(file_bytes(path), str(path)).split("\n")
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
        config = class_token_options(args, state)
        return "PrimalAttention", vision_models.primal_vit_from(config, state).module, config["img"]
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


def class_token_options(args: Args, state: State) -> dict[str, Any]:
    """Options of a ViT with a class token: its weights say all but how many positions primal attention samples."""
    dim, patch = state["head.weight"].shape[1], state["patch_embed.proj.weight"].shape[-1]
    primal = next((value for name, value in state.items() if name.endswith(".attn.we")), None)
    return {
        "dim": dim,
        "heads": dim // HEAD_WIDTH if primal is None else primal.shape[0],
        "img": isqrt(state["pos_embed"].shape[1] - 1) * patch,
        "patch": patch,
        "ln_eps": 1e-6,
        "rank_multi": int(args.get("rank_multi") or 10),
    }
