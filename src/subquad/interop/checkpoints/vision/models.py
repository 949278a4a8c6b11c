"""Converts whole vision models: evit and PVT of the efficient-attention library, and the ViTs of PrimalAttention."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from subquad.interop.checkpoints import primal
from subquad.interop.checkpoints.efficient_attention import mixers as efficient_attention
from subquad.interop.checkpoints.weight_map import (
    ConvertedModule,
    ParamRef,
    WeightMap,
    add_prefixes,
    load_weights,
    map_linear,
    strip_prefix,
)
from subquad.mixers import Mixer
from subquad.models import Model, build_from_config
from subquad.nn.stack import MixerChoice

Config = Mapping[str, Any]
State = Mapping[str, Tensor]


def convert_evit(config: Config, state: State) -> ConvertedModule[Model]:
    """Converts an evit_* model. state: its state dict.

    config: embed_dim, num_heads, patch_size, input_size, num_classes, patchify_stem, use_glu, no_pos_emb,
    drop_path_rate, layernorm_eps, attn_name, attn_args.
    """
    state = without_bookkeeping(state)
    mixers, refs = _convert_blocks(
        state, "blocks.", partial(_convert_library_mixer, config, config["embed_dim"], prefix="attn.")
    )
    encoder = _stack_options(state, "blocks.0.", mixers) | {
        "dim": config["embed_dim"],
        "heads": config["num_heads"],
        "norm_eps": config.get("layernorm_eps", 1e-6),
        "activation": "geglu" if config.get("use_glu") else "gelu",
        "drop_path": config.get("drop_path_rate", 0.0),
    }
    if config.get("use_glu"):
        encoder["ffn_dim"] //= 2
    options = {
        "kind": "vision",
        "image_size": config["input_size"],
        "channels": config.get("in_chans", 3),
        "num_classes": state["head.weight"].shape[0],
        "patch_size": config["patch_size"],
        "stem": _STEMS[config.get("patchify_stem", "default")],
        "positions": not config.get("no_pos_emb", False),
        "dim": config["embed_dim"],
        "encoder": encoder,
    }
    refs = add_prefixes(refs, "", "encoder.") | map_linear("norm_before_pooling", "encoder.norm")
    refs |= map_linear("head", "head") | add_prefixes(
        _map_same_names(state, "patch_embed."), "patch_embed.", "patches."
    )
    if options["positions"]:
        refs["pos_embed"] = ParamRef("positions")
    return load_weights(build_from_config(options), state, refs)


_STEMS = {"default": "patch", "hmlp": "hmlp", "conv": "conv"}


def convert_pyramid(config: Config, state: State) -> ConvertedModule[Model]:
    """Converts a pvt_* model. state: its state dict.

    config: embed_dims, num_heads, depths, in_chans, drop_path_rate, sr_ratios, attn_name, attn_args. A stage whose
    entry of sr_ratios is 1 has softmax attention, whatever attn_name says.
    """
    state = without_bookkeeping(state)
    stages, refs = [], map_linear("head", "head")
    for number, (dim, heads) in enumerate(zip(config["embed_dims"], config["num_heads"], strict=True)):
        exact = config["sr_ratios"][number] == 1
        arguments = {"attn_name": "softmax"} if exact else config
        named = {**arguments, "num_heads": heads, "qkv_bias": config.get("qkv_bias", True)}
        prefix = f"block{number + 1}."
        mixers, more = _convert_blocks(
            state, prefix, partial(_convert_library_mixer, named, dim, prefix="attn.attn_fn.")
        )
        convolution = map_linear("mlp.dwconv.dwconv", "ffn.neighbours")
        for layer in range(len(mixers)):
            more |= add_prefixes(convolution, f"{prefix}{layer}.", f"blocks.{layer}.")
        options = _stack_options(state, f"{prefix}0.", mixers)
        options |= {"dim": dim, "heads": heads, "activation": "gelu", "ffn_conv": True}
        options["norm_eps"] = config.get("layernorm_eps_blocks", 1e-6)
        stages.append(options)
        refs |= add_prefixes(more, "", f"stages.{number}.") | map_linear(f"norm{number + 1}", f"stages.{number}.norm")
        embed = f"patch_embed{number + 1}."
        refs |= add_prefixes(_map_same_names(state, embed), embed, f"patches.{number}.")
    options = {
        "kind": "pyramid",
        "channels": config.get("in_chans", 3),
        "num_classes": state["head.weight"].shape[0],
        "stages": stages,
        "drop_path": config.get("drop_path_rate", 0.0),
    }
    return load_weights(build_from_config(options), state, refs)


def convert_vit(config: Config, state: State) -> ConvertedModule[Model]:
    """Converts a ViT with a class token. state: its state dict, with the names of timm.

    config: dim, heads, img, patch, ln_eps, rank_multi. Blocks that have the weights of primal attention get it; the
    others get softmax attention.
    """

    def convert_block(block: State) -> ConvertedModule[Mixer]:
        attention = strip_prefix(block, "attn.")
        if "we" not in attention:
            named = {"attn_name": "softmax", "num_heads": config["heads"], "qkv_bias": "qkv.bias" in attention}
            return _convert_library_mixer(named, config["dim"], block, prefix="attn.")
        rank = attention["we"].shape[2]
        length = state["pos_embed"].shape[1]
        named = {"source": "PrimalAttention_CV", "dim": config["dim"], "num_heads": config["heads"], "low_rank": rank}
        more = {"rank_multi": config["rank_multi"], "embed_len": length, "qk_bias": "qk.bias" in attention}
        return primal.convert_mixer({**named, **more}, attention)

    mixers, refs = _convert_blocks(state, "blocks.", convert_block)
    encoder = _stack_options(state, "blocks.0.", mixers)
    encoder |= {"dim": config["dim"], "heads": config["heads"], "activation": "gelu", "norm_eps": config["ln_eps"]}
    options = {
        "kind": "vision",
        "image_size": config["img"],
        "num_classes": state["head.weight"].shape[0],
        "patch_size": config["patch"],
        "class_token": True,
        "dim": config["dim"],
        "encoder": encoder,
    }
    refs = add_prefixes(refs, "", "encoder.") | map_linear("norm", "encoder.norm") | map_linear("head", "head")
    refs |= add_prefixes(_map_same_names(state, "patch_embed."), "patch_embed.", "patches.")
    refs |= {"pos_embed": ParamRef("positions"), "cls_token": ParamRef("class_token")}
    return load_weights(build_from_config(options), state, refs)


# ---------------------------------------------------------------------- parts


def without_bookkeeping(state: State) -> dict[str, Tensor]:
    """Returns the state dict without index tables, which follow from the window."""
    return {name: value for name, value in state.items() if not name.endswith("relative_position_index")}


def _convert_library_mixer(config: Config, dim: int, block: State, prefix: str) -> ConvertedModule[Mixer]:
    """Converts the mixer of a block whose attention, under `prefix`, is a module of the efficient-attention library."""
    named = {"attn_name": config["attn_name"], "dim": dim, "num_heads": config["num_heads"]}
    named["qkv_bias"] = config.get("qkv_bias", True)
    converted = efficient_attention.convert_mixer({**named, **config.get("attn_args", {})}, strip_prefix(block, prefix))
    return ConvertedModule(converted.module, add_prefixes(converted.weight_map, prefix.removeprefix("attn."), ""))


def _convert_blocks(
    state: State, prefix: str, convert_block: Callable[[State], ConvertedModule[Mixer]]
) -> tuple[list[Mixer], WeightMap]:
    """Converts the blocks under `prefix`. Returns their mixers, and the map of their weights in a stack."""
    layers = 1 + max(int(name.removeprefix(prefix).split(".")[0]) for name in state if name.startswith(prefix))
    refs: WeightMap = {}
    mixers = []
    for number in range(layers):
        converted = convert_block(strip_prefix(state, f"{prefix}{number}."))
        mixers.append(converted.module)
        block = add_prefixes(converted.weight_map, "attn.", "mixer.")
        block |= map_linear("norm1", "mixer_norm") | map_linear("norm2", "ffn_norm")
        block |= map_linear("mlp.fc1", "ffn.fc1") | map_linear("mlp.fc2", "ffn.fc2")
        refs |= add_prefixes(block, f"{prefix}{number}.", f"blocks.{number}.")
    return mixers, refs


def _stack_options(state: State, block: str, mixers: list[Mixer]) -> dict[str, Any]:
    ffn_dim = state[f"{block}mlp.fc1.weight"].shape[0]
    return {"layers": len(mixers), "ffn_dim": ffn_dim, "norm": "pre", "mixer": MixerChoice.of(mixers)}


def _map_same_names(state: State, prefix: str) -> WeightMap:
    """Maps a part that has the same names in both programs."""
    return {name: ParamRef(name) for name in strip_prefix(state, prefix)}
