"""Converts translation and language models of fairseq and of its forks, in today's layout and in that of 2019.

The attention of a fork is recognised by its weights: modules of efficient-attention in place of self-attention, causal
EVA in a decoder, and layers of PrimalAttention. Everything else is the same as in fairseq.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from subquad.interop.checkpoints import primal
from subquad.interop.checkpoints.efficient_attention import mixers as efficient_attention
from subquad.interop.checkpoints.fairseq.convolutions import convert_conv_block
from subquad.interop.checkpoints.weight_map import (
    ConvertedModule,
    ParamRef,
    WeightMap,
    add_prefixes,
    load_weights,
    map_linear,
    map_stacked,
    strip_prefix,
)
from subquad.mixers import Mixer, build
from subquad.models import Model, build_from_config
from subquad.nn.stack import MixerChoice

PAD = 1
"""The id of the padding symbol in a dictionary of fairseq."""
FIRST_POSITION = PAD + 1
"""The row of the first token in a learned table of positions."""

Config = Mapping[str, Any]
State = Mapping[str, Tensor]


def convert_model(config: Config, state: State) -> ConvertedModule[Model]:
    """Returns a model that computes what fairseq's model computes.

    config: the model's arguments under their own names (`vars(args)`, or `cfg["model"]`). state: its state dict.
    """
    state = to_current_layout(state)
    sides = ("encoder", "decoder") if any(name.startswith("encoder.") for name in state) else ("decoder",)
    options: dict[str, Any] = {"kind": "encoder-decoder" if len(sides) == 2 else "language-model"}
    refs: WeightMap = {}
    for side in sides:
        options[side], more = _convert_stack(side, config, strip_prefix(state, f"{side}."))
        refs |= add_prefixes(more, f"{side}.", f"{side}.")
    embedded, more = _convert_embeddings(sides, config, state)
    head, head_refs = _convert_head(len(sides) == 2, config, strip_prefix(state, "decoder."))
    options |= {**embedded, "head": head, "dim": options["decoder"]["dim"]}
    return load_weights(build_from_config(options), state, refs | more | add_prefixes(head_refs, "decoder.", ""))


# ---------------------------------------------------------------------- layouts


def to_current_layout(state: State) -> dict[str, Tensor]:
    """Returns the state dict with today's names, without bookkeeping and without conv_bias, which no model uses.

    In 2019 the norms of encoder layers were a list, q, k and v of attention were one tensor, and the output matrix was
    called embed_out.
    """
    current = {}
    for name, tensor in state.items():
        if name.endswith(("version", "_float_tensor", "conv.conv_bias")):
            continue
        name = current_name(name)
        if name.endswith(("in_proj_weight", "in_proj_bias")):
            stem, _, kind = name.rpartition("in_proj_")
            for letter, part in zip("qkv", tensor.chunk(3), strict=True):
                current[f"{stem}{letter}_proj.{kind}"] = part
        elif name.endswith("adaptive_softmax.head.weight"):  # words and bands in one matrix, as they are not tied
            words = tensor.shape[0] - sum(1 for n in state if re.search(r"adaptive_softmax\.tail\.\d+\.2\.weight$", n))
            current[f"{name}.words"], current[f"{name}.bands"] = tensor[:words], tensor[words:]
        else:
            current[name] = tensor
    return current


def current_name(name: str) -> str:
    """Returns today's name of a parameter."""
    name = re.sub(r"\blayer_norms\.(\d)\.", lambda found: f"layer_norm{int(found[1]) + 1}.", name)
    return re.sub(r"\bembed_out$", "output_projection.weight", name)


# ---------------------------------------------------------------------- stacks


def _convert_stack(side: str, config: Config, state: State) -> tuple[dict[str, Any], WeightMap]:
    """Returns the options of an encoder or decoder, and the map of its weights."""
    layers = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("layers."))
    refs: WeightMap = {}
    mixers, crosses = [], []
    for number in range(layers):
        layer = strip_prefix(state, f"layers.{number}.")
        mixer, mixer_refs = _convert_mixer(side, number, config, layer)
        mixers.append(mixer)
        norm, ffn_norm = _norms(layer)
        layer_refs = mixer_refs | map_linear(norm, "mixer_norm") | map_linear(ffn_norm, "ffn_norm")
        layer_refs |= map_linear("fc1", "ffn.fc1") | map_linear("fc2", "ffn.fc2")
        if "encoder_attn.q_proj.weight" in layer:
            cross, cross_refs = _convert_softmax(side, config, strip_prefix(layer, "encoder_attn."), causal=False)
            crosses.append(cross)
            layer_refs |= add_prefixes(cross_refs, "encoder_attn.", "cross.")
            layer_refs |= map_linear("encoder_attn_layer_norm", "cross_norm")
        refs |= add_prefixes(layer_refs, f"layers.{number}.", f"blocks.{number}.")
    if "layer_norm.weight" in state:
        refs |= map_linear("layer_norm", "norm")
    first = strip_prefix(state, "layers.0.")
    conv = "linear1.weight" in first
    options = {
        "layers": layers,
        "dim": first["fc1.weight"].shape[1],
        "heads": config[f"{side}_attention_heads"],
        "ffn_dim": first["fc1.weight"].shape[0],
        "mixer": MixerChoice.of(mixers),
        "cross": MixerChoice.of(crosses) if crosses else None,
        "activation": config.get("activation_fn", "relu"),
        "norm": "pre" if config.get(f"{side}_normalize_before", False) else "post",
        "final_norm": "layer_norm.weight" in state,
        "dropout": config.get("dropout", 0.0),
        "input_dropout": config.get("input_dropout", 0.0) if conv else 0.0,
        "activation_dropout": config.get("activation_dropout", 0.0) or config.get("relu_dropout", 0.0),
        "layer_drop": config.get(f"{side}_layerdrop", 0.0),
    }
    return options, refs


def _norms(layer: State) -> tuple[str, str]:
    """Returns the names of the norms of the mixer and of the feed-forward network."""
    for norm, ffn_norm in (
        ("layer_norm1", "layer_norm2"),
        ("conv_layer_norm", "final_layer_norm"),
        ("self_attn_layer_norm", "final_layer_norm"),
    ):
        if f"{norm}.weight" in layer:
            return norm, ffn_norm
    raise ValueError(
        f"this is not a layer of a fairseq model: it has no layer norm, only {', '.join(layer) or 'no weights'}"
    )


def _convert_mixer(side: str, number: int, config: Config, layer: State) -> tuple[Mixer, WeightMap]:
    """Returns the mixer of a layer, which is built to learn its options, and the map of its weights in the block."""
    causal = side == "decoder"
    attention = strip_prefix(layer, "self_attn.")
    heads = config[f"{side}_attention_heads"]
    if "linear1.weight" in layer:
        conv = {name: value for name, value in layer.items() if name.startswith(("linear1.", "linear2.", "conv."))}
        converted = convert_conv_block(_conv_config(side, number, config), conv)
        layer_refs = add_prefixes(converted.weight_map, "", "mixer.")
        return converted.module, layer_refs
    if "We" in attention:
        size = {"embed_dim": attention["We"].shape[0] * attention["We"].shape[1], "num_heads": heads}
        rank = attention["We"].shape[2]
        bias = "q_proj.bias" in attention
        converted = primal.convert_language_mixer({**size, "low_rank": rank, "bias": bias}, attention)
    elif "attn.qkv.weight" in attention:
        size = {"dim": attention["attn.qkv.weight"].shape[1], "num_heads": heads}
        named = {"attn_name": config.get(f"attn_name_{side}", "softmax"), **size}
        arguments = config.get(f"attn_args_{side}") or {}
        converted = efficient_attention.convert_mixer({**named, **arguments}, strip_prefix(attention, "attn."))
        return converted.module, add_prefixes(converted.weight_map, "self_attn.attn.", "mixer.")
    elif causal and config.get("attn_name_decoder", "softmax") == "causal_eva":
        named = {"attn_name": "causal_eva", "embed_dim": attention["q_proj.weight"].shape[1], "num_heads": heads}
        extra = {"attn_args": config["attn_args_decoder"], "dropout": config.get("attention_dropout", 0.0)}
        converted = efficient_attention.convert_mixer({**named, **extra}, attention)
    else:
        mixer, refs = _convert_softmax(side, config, attention, causal)
        return mixer, add_prefixes(refs, "self_attn.", "mixer.")
    return converted.module, add_prefixes(converted.weight_map, "self_attn.", "mixer.")


def _conv_config(side: str, number: int, config: Config) -> dict[str, Any]:
    kernels = config[f"{side}_kernel_size_list"]
    return {
        "conv_type": config[f"{side}_conv_type"],
        "kernel_size": kernels[number] if len(kernels) > 1 else kernels[0],
        "heads": config[f"{side}_attention_heads"],
        "causal": side == "decoder",
        "glu": config[f"{side}_glu"],
        "weight_softmax": config.get("weight_softmax", True),
        "conv_dim": config.get(f"{side}_conv_dim"),
        "weight_dropout": config.get("weight_dropout", 0.0),
    }


def _convert_softmax(side: str, config: Config, attention: State, causal: bool) -> tuple[Mixer, WeightMap]:
    width, dim = attention["q_proj.weight"].shape
    mixer = build(
        "softmax",
        dim=dim,
        heads=config[f"{side}_attention_heads"],
        causal=causal,
        qkv_bias="q_proj.bias" in attention,
        out_bias="out_proj.bias" in attention,
        attention_dropout=config.get("attention_dropout", 0.0),
    )
    refs = map_stacked(("q_proj", "k_proj", "v_proj"), "qkv", width, "q_proj.bias" in attention)
    return mixer, refs | map_linear("out_proj", "out", "out_proj.bias" in attention)


# ---------------------------------------------------------------------- embeddings and output


def _convert_embeddings(sides: tuple[str, ...], config: Config, state: State) -> tuple[dict[str, Any], WeightMap]:
    """Returns the options of the embeddings and vocabularies, and the map of their weights."""
    options: dict[str, Any] = {}
    refs: WeightMap = {}
    shared = len(sides) == 2 and bool(config.get("share_all_embeddings", False))
    for side in sides:
        name = "embedding" if len(sides) == 1 else {"encoder": "source", "decoder": "target"}[side]
        embedding, vocab, more = _convert_embedding(side, config, strip_prefix(state, f"{side}."))
        options |= {name: embedding, "vocab" if len(sides) == 1 else f"{name}_vocab": vocab}
        owner = "target" if shared else name
        for original, ref in more.items():
            ours = owner if ref.name.startswith("tokens.") else name
            refs |= add_prefixes({original: ref}, f"{side}.", f"{ours}.")
    return options | ({"shared_embedding": shared} if len(sides) == 2 else {}), refs


def _convert_embedding(side: str, config: Config, state: State) -> tuple[dict[str, Any], int, WeightMap]:
    options: dict[str, Any] = {
        "scale": not config.get("no_scale_embedding", False),
        "dropout": config.get("dropout", 0.0),
        "norm": "layernorm_embedding.weight" in state,
        "pad": PAD,
        "positions": "sinusoidal",
    }
    refs: WeightMap = {}
    if config.get("no_token_positional_embeddings", False):
        options["positions"] = "none"
    elif config.get(f"{side}_learned_pos", False):
        rows = state["embed_positions.weight"].shape[0] - FIRST_POSITION
        options |= {"positions": "learned", "max_length": rows}
        refs["embed_positions.weight"] = ParamRef("positions.table", source_rows=slice(FIRST_POSITION, None))
    if options["norm"]:
        refs |= map_linear("layernorm_embedding", "norm")
    if "embed_tokens.weight" in state:
        return options, state["embed_tokens.weight"].shape[0], refs | {"embed_tokens.weight": ParamRef("tokens.weight")}
    tables = [state[f"embed_tokens.embeddings.{band}.0.weight"] for band in range(_num_bands(state))]
    options |= {
        "cutoffs": _cutoffs(config["adaptive_input_cutoff"]),
        "factor": int(config.get("adaptive_input_factor", 4)),
    }
    for band in range(len(tables)):
        refs[f"embed_tokens.embeddings.{band}.0.weight"] = ParamRef(f"tokens.tables.{band}")
        refs[f"embed_tokens.embeddings.{band}.1.weight"] = ParamRef(f"tokens.maps.{band}")
    return options, sum(table.shape[0] for table in tables), refs


def _num_bands(state: State) -> int:
    found = [re.match(r"embed_tokens\.embeddings\.(\d+)\.0\.weight$", name) for name in state]
    return 1 + max(int(match[1]) for match in found if match)


def _cutoffs(given: Any) -> list[int]:
    return [int(part) for part in given.split(",")] if isinstance(given, str) else [int(part) for part in given]


def _convert_head(translates: bool, config: Config, state: State) -> tuple[dict[str, Any], WeightMap]:
    """Returns the options of the output, and the map of its weights. Tied weights are those of the embedding."""
    embedding = "target" if translates else "embedding"
    if any(name.startswith("adaptive_softmax.") for name in state):
        return _convert_adaptive_head(embedding, config)
    tied = bool(config.get("share_all_embeddings") or config.get("share_decoder_input_output_embed"))
    refs: WeightMap = {}
    if "output_projection.weight" in state:  # in 2019 tied weights were not stored
        refs["output_projection.weight"] = ParamRef(f"{embedding}.tokens.weight" if tied else "head.weight")
    bias = "output_projection.bias" in state
    if bias:
        refs["output_projection.bias"] = ParamRef("head.bias")
    return {"tied": tied, "bias": bias}, refs


def _convert_adaptive_head(embedding: str, config: Config) -> tuple[dict[str, Any], WeightMap]:
    tied = bool(config.get("tie_adaptive_weights", False))
    tied_maps = bool(config.get("tie_adaptive_proj", False))
    cutoffs = _cutoffs(config["adaptive_softmax_cutoff"])
    prefix = "adaptive_softmax"
    if tied:
        refs = {
            f"{prefix}.head.class_proj.weight": ParamRef("head.clusters"),
            f"{prefix}.head.word_proj.weight": ParamRef(f"{embedding}.tokens.tables.0"),
        }
    else:
        refs = {
            f"{prefix}.head.weight.bands": ParamRef("head.clusters"),
            f"{prefix}.head.weight.words": ParamRef("head.words.0"),
        }
    for band in range(len(cutoffs)):
        words = f"{embedding}.tokens.tables.{band + 1}" if tied else f"head.words.{band + 1}"
        narrow = f"{embedding}.tokens.maps.{band + 1}" if tied_maps else f"head.maps.{band}"
        refs |= {f"{prefix}.tail.{band}.2.weight": ParamRef(words), f"{prefix}.tail.{band}.0.weight": ParamRef(narrow)}
    options = {
        "tied": tied,
        "tied_maps": tied_maps,
        "cutoffs": cutoffs,
        "factor": int(config.get("adaptive_softmax_factor", 4)),
        "dropout": config.get("adaptive_softmax_dropout", 0.0),
    }
    return options, refs
