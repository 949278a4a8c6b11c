"""Whole vision models: evit and PVT of the efficient-attention library, and the ViTs of PrimalAttention."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from subquad.interop.checkpoints import primal
from subquad.interop.checkpoints.efficient_attention import mixers as efficient_attention
from subquad.interop.checkpoints.weight_map import Imported, Slot, Slots, fill, linear_slots, moved, under
from subquad.mixers import Mixer
from subquad.models import Model
from subquad.models import model_from as build_model_from
from subquad.nn.stack import MixerChoice

Config = Mapping[str, Any]
State = Mapping[str, Tensor]


def evit_from(config: Config, state: State) -> Imported[Model]:
    """config: embed_dim, num_heads, patch_size, input_size, num_classes, patchify_stem, use_glu, no_pos_emb,
    drop_path_rate, layernorm_eps, attn_name, attn_args; state: the model's state dict."""
    state = without_bookkeeping(state)
    mixers, slots = _blocks(state, "blocks.", partial(_library_mixer, config, config["embed_dim"], prefix="attn."))
    encoder = _stack_options(state, "blocks.0.", mixers) | {
        "dim": config["embed_dim"],
        "heads": config["num_heads"],
        "norm_eps": config.get("layernorm_eps", 1e-6),
        "activation": "geglu" if config.get("use_glu") else "gelu",
        "drop_path": config.get("drop_path_rate", 0.0),
    }
    if config.get("use_glu"):
        encoder["hidden"] //= 2
    options = {
        "kind": "vision",
        "image_size": config["input_size"],
        "channels": config.get("in_chans", 3),
        "classes": state["head.weight"].shape[0],
        "patch": config["patch_size"],
        "stem": _STEMS[config.get("patchify_stem", "default")],
        "positions": not config.get("no_pos_emb", False),
        "dim": config["embed_dim"],
        "encoder": encoder,
    }
    slots = moved(slots, "", "encoder.") | linear_slots("norm_before_pooling", "encoder.norm")
    slots |= linear_slots("head", "head") | moved(_same(state, "patch_embed."), "patch_embed.", "patches.")
    if options["positions"]:
        slots["pos_embed"] = Slot("positions")
    return fill(build_model_from(options), state, slots)


_STEMS = {"default": "patch", "hmlp": "hmlp", "conv": "conv"}


def pyramid_from(config: Config, state: State) -> Imported[Model]:
    """config: embed_dims, num_heads, depths, in_chans, drop_path_rate, attn_name, attn_args; state: the state dict.

    A stage whose sr_ratios entry is 1 has softmax attention, whatever attn_name says.
    """
    state = without_bookkeeping(state)
    stages, slots = [], linear_slots("head", "head")
    for number, (dim, heads) in enumerate(zip(config["embed_dims"], config["num_heads"], strict=True)):
        exact = config["sr_ratios"][number] == 1
        arguments = {"attn_name": "softmax"} if exact else config
        named = {**arguments, "num_heads": heads, "qkv_bias": config.get("qkv_bias", True)}
        prefix = f"block{number + 1}."
        mixers, more = _blocks(state, prefix, partial(_library_mixer, named, dim, prefix="attn.attn_fn."))
        convolution = linear_slots("mlp.dwconv.dwconv", "ffn.neighbours")
        for layer in range(len(mixers)):
            more |= moved(convolution, f"{prefix}{layer}.", f"blocks.{layer}.")
        options = _stack_options(state, f"{prefix}0.", mixers)
        options |= {"dim": dim, "heads": heads, "activation": "gelu", "ffn_conv": True}
        options["norm_eps"] = config.get("layernorm_eps_blocks", 1e-6)
        stages.append(options)
        slots |= moved(more, "", f"stages.{number}.") | linear_slots(f"norm{number + 1}", f"stages.{number}.norm")
        entrance = f"patch_embed{number + 1}."
        slots |= moved(_same(state, entrance), entrance, f"patches.{number}.")
    options = {
        "kind": "pyramid",
        "channels": config.get("in_chans", 3),
        "classes": state["head.weight"].shape[0],
        "stages": stages,
        "drop_path": config.get("drop_path_rate", 0.0),
    }
    return fill(build_model_from(options), state, slots)


def primal_vit_from(config: Config, state: State) -> Imported[Model]:
    """config: dim, heads, img, patch, ln_eps, rank_multi; state: names of timm, with primal attention in the blocks
    whose weights say so."""

    def mixer_of(block: State) -> Imported[Mixer]:
        attention = under(block, "attn.")
        if "we" not in attention:
            named = {"attn_name": "softmax", "num_heads": config["heads"], "qkv_bias": "qkv.bias" in attention}
            return _library_mixer(named, config["dim"], block, prefix="attn.")
        rank = attention["we"].shape[2]
        length = state["pos_embed"].shape[1]
        named = {"source": "PrimalAttention_CV", "dim": config["dim"], "num_heads": config["heads"], "low_rank": rank}
        more = {"rank_multi": config["rank_multi"], "embed_len": length, "qk_bias": "qk.bias" in attention}
        return primal.mixer_from({**named, **more}, attention)

    mixers, slots = _blocks(state, "blocks.", mixer_of)
    encoder = _stack_options(state, "blocks.0.", mixers)
    encoder |= {"dim": config["dim"], "heads": config["heads"], "activation": "gelu", "norm_eps": config["ln_eps"]}
    options = {
        "kind": "vision",
        "image_size": config["img"],
        "classes": state["head.weight"].shape[0],
        "patch": config["patch"],
        "class_token": True,
        "dim": config["dim"],
        "encoder": encoder,
    }
    slots = moved(slots, "", "encoder.") | linear_slots("norm", "encoder.norm") | linear_slots("head", "head")
    slots |= moved(_same(state, "patch_embed."), "patch_embed.", "patches.")
    slots |= {"pos_embed": Slot("positions"), "cls_token": Slot("class_token")}
    return fill(build_model_from(options), state, slots)


# ---------------------------------------------------------------------- parts


def without_bookkeeping(state: State) -> dict[str, Tensor]:
    """The state without index tables, which follow from the window."""
    return {name: value for name, value in state.items() if not name.endswith("relative_position_index")}


def _library_mixer(config: Config, dim: int, block: State, prefix: str) -> Imported[Mixer]:
    """The mixer of a block whose attention, under `prefix`, is a module of the efficient-attention library."""
    named = {"attn_name": config["attn_name"], "dim": dim, "num_heads": config["num_heads"]}
    named["qkv_bias"] = config.get("qkv_bias", True)
    imported = efficient_attention.mixer_from({**named, **config.get("attn_args", {})}, under(block, prefix))
    return Imported(imported.module, moved(imported.slots, prefix.removeprefix("attn."), ""))


def _blocks(state: State, prefix: str, mixer_of: Callable[[State], Imported[Mixer]]) -> tuple[list[Mixer], Slots]:
    """The mixers of the blocks under `prefix`, and where the blocks' weights go in a stack."""
    layers = 1 + max(int(name.removeprefix(prefix).split(".")[0]) for name in state if name.startswith(prefix))
    slots: Slots = {}
    mixers = []
    for number in range(layers):
        imported = mixer_of(under(state, f"{prefix}{number}."))
        mixers.append(imported.module)
        block = moved(imported.slots, "attn.", "mixer.")
        block |= linear_slots("norm1", "mixer_norm") | linear_slots("norm2", "ffn_norm")
        block |= linear_slots("mlp.fc1", "ffn.fc1") | linear_slots("mlp.fc2", "ffn.fc2")
        slots |= moved(block, f"{prefix}{number}.", f"blocks.{number}.")
    return mixers, slots


def _stack_options(state: State, block: str, mixers: list[Mixer]) -> dict[str, Any]:
    hidden = state[f"{block}mlp.fc1.weight"].shape[0]
    return {"layers": len(mixers), "hidden": hidden, "norm": "pre", "mixer": MixerChoice.of(mixers)}


def _same(state: State, prefix: str) -> Slots:
    """Slots of a part that has the same names here and there."""
    return {name: Slot(name) for name in under(state, prefix)}
