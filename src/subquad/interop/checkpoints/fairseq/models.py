"""Whole models of fairseq and of its forks: translation and language models, in today's layout and that of 2019.

A fork's attention is recognised by its weights: efficient-attention's modules in place of self-attention, causal EVA in
a decoder, PrimalAttention's layers. Everything else is fairseq's own.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from subquad.interop.checkpoints import primal
from subquad.interop.checkpoints.efficient_attention import mixers as efficient_attention
from subquad.interop.checkpoints.fairseq import convolutions as fairseq
from subquad.interop.checkpoints.weight_map import (
    Imported,
    Slot,
    Slots,
    fill,
    linear_slots,
    moved,
    stacked_slots,
    under,
)
from subquad.mixers import Mixer, build
from subquad.models import Model
from subquad.models import model_from as build_model_from
from subquad.nn.stack import MixerChoice

PAD = 1
"""Number of the padding symbol in a fairseq dictionary."""
FIRST_POSITION = PAD + 1
"""The row of a learned table of positions that the first token gets."""

Config = Mapping[str, Any]
State = Mapping[str, Tensor]


def model_from(config: Config, state: State) -> Imported[Model]:
    """The model that computes what fairseq's does.

    config: the model's arguments under their own names (`vars(args)`, or `cfg["model"]`). state: its state dict.
    """
    state = in_current_layout(state)
    sides = ("encoder", "decoder") if any(name.startswith("encoder.") for name in state) else ("decoder",)
    options: dict[str, Any] = {"kind": "encoder-decoder" if len(sides) == 2 else "language-model"}
    slots: Slots = {}
    for side in sides:
        options[side], more = _stack(side, config, under(state, f"{side}."))
        slots |= moved(more, f"{side}.", f"{side}.")
    embedded, more = _embeddings(sides, config, state)
    head, head_slots = _head(len(sides) == 2, config, under(state, "decoder."))
    options |= {**embedded, "head": head, "dim": options["decoder"]["dim"]}
    return fill(build_model_from(options), state, slots | more | moved(head_slots, "decoder.", ""))


# ---------------------------------------------------------------------- layouts


def in_current_layout(state: State) -> dict[str, Tensor]:
    """The state with today's names, without bookkeeping and conv_bias, which no model uses and may hold anything.

    2019: norms of encoder layers in a list, q, k and v of attention packed, an output matrix under the name embed_out.
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
        elif name.endswith("adaptive_softmax.head.weight"):  # not tied: words and bands in one matrix
            words = tensor.shape[0] - sum(1 for n in state if re.search(r"adaptive_softmax\.tail\.\d+\.2\.weight$", n))
            current[f"{name}.words"], current[f"{name}.bands"] = tensor[:words], tensor[words:]
        else:
            current[name] = tensor
    return current


def current_name(name: str) -> str:
    """Today's name of a parameter."""
    name = re.sub(r"\blayer_norms\.(\d)\.", lambda found: f"layer_norm{int(found[1]) + 1}.", name)
    return re.sub(r"\bembed_out$", "output_projection.weight", name)


# ---------------------------------------------------------------------- stacks


def _stack(side: str, config: Config, state: State) -> tuple[dict[str, Any], Slots]:
    """Options of an encoder or decoder, and where its blocks' weights go."""
    layers = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("layers."))
    slots: Slots = {}
    mixers, crosses = [], []
    for number in range(layers):
        layer = under(state, f"layers.{number}.")
        mixer, mixer_slots = _mixer(side, number, config, layer)
        mixers.append(mixer)
        norm, ffn_norm = _norms(layer)
        layer_slots = mixer_slots | linear_slots(norm, "mixer_norm") | linear_slots(ffn_norm, "ffn_norm")
        layer_slots |= linear_slots("fc1", "ffn.fc1") | linear_slots("fc2", "ffn.fc2")
        if "encoder_attn.q_proj.weight" in layer:
            cross, cross_slots = _softmax(side, config, under(layer, "encoder_attn."), causal=False)
            crosses.append(cross)
            layer_slots |= moved(cross_slots, "encoder_attn.", "cross.")
            layer_slots |= linear_slots("encoder_attn_layer_norm", "cross_norm")
        slots |= moved(layer_slots, f"layers.{number}.", f"blocks.{number}.")
    if "layer_norm.weight" in state:
        slots |= linear_slots("layer_norm", "norm")
    first = under(state, "layers.0.")
    conv = "linear1.weight" in first
    options = {
        "layers": layers,
        "dim": first["fc1.weight"].shape[1],
        "heads": config[f"{side}_attention_heads"],
        "hidden": first["fc1.weight"].shape[0],
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
    return options, slots


def _norms(layer: State) -> tuple[str, str]:
    """Names of the norms of the mixer and of the feed-forward map."""
    for norm, ffn_norm in (
        ("layer_norm1", "layer_norm2"),
        ("conv_layer_norm", "final_layer_norm"),
        ("self_attn_layer_norm", "final_layer_norm"),
    ):
        if f"{norm}.weight" in layer:
            return norm, ffn_norm
    raise ValueError(f"not a layer of a fairseq model: no layer norm among {', '.join(layer) or 'no weights'}")


def _mixer(side: str, number: int, config: Config, layer: State) -> tuple[Mixer, Slots]:
    """The mixer of a layer, built to learn its options, and where the layer's weights go in the block."""
    causal = side == "decoder"
    attention = under(layer, "self_attn.")
    heads = config[f"{side}_attention_heads"]
    if "linear1.weight" in layer:
        conv = {name: value for name, value in layer.items() if name.startswith(("linear1.", "linear2.", "conv."))}
        imported = fairseq.conv_block_from(_conv_config(side, number, config), conv)
        layer_slots = moved(imported.slots, "", "mixer.")
        return imported.module, layer_slots
    if "We" in attention:
        size = {"embed_dim": attention["We"].shape[0] * attention["We"].shape[1], "num_heads": heads}
        rank = attention["We"].shape[2]
        bias = "q_proj.bias" in attention
        imported = primal.language_mixer_from({**size, "low_rank": rank, "bias": bias}, attention)
    elif "attn.qkv.weight" in attention:
        size = {"dim": attention["attn.qkv.weight"].shape[1], "num_heads": heads}
        named = {"attn_name": config.get(f"attn_name_{side}", "softmax"), **size}
        arguments = config.get(f"attn_args_{side}") or {}
        imported = efficient_attention.mixer_from({**named, **arguments}, under(attention, "attn."))
        return imported.module, moved(imported.slots, "self_attn.attn.", "mixer.")
    elif causal and config.get("attn_name_decoder", "softmax") == "causal_eva":
        named = {"attn_name": "causal_eva", "embed_dim": attention["q_proj.weight"].shape[1], "num_heads": heads}
        extra = {"attn_args": config["attn_args_decoder"], "dropout": config.get("attention_dropout", 0.0)}
        imported = efficient_attention.mixer_from({**named, **extra}, attention)
    else:
        mixer, slots = _softmax(side, config, attention, causal)
        return mixer, moved(slots, "self_attn.", "mixer.")
    return imported.module, moved(imported.slots, "self_attn.", "mixer.")


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


def _softmax(side: str, config: Config, attention: State, causal: bool) -> tuple[Mixer, Slots]:
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
    slots = stacked_slots(("q_proj", "k_proj", "v_proj"), "qkv", width, "q_proj.bias" in attention)
    return mixer, slots | linear_slots("out_proj", "out", "out_proj.bias" in attention)


# ---------------------------------------------------------------------- embeddings and output


def _embeddings(sides: tuple[str, ...], config: Config, state: State) -> tuple[dict[str, Any], Slots]:
    """Options of the embeddings and vocabularies, and where their weights go."""
    options: dict[str, Any] = {}
    slots: Slots = {}
    shared = len(sides) == 2 and bool(config.get("share_all_embeddings", False))
    for side in sides:
        name = "embedding" if len(sides) == 1 else {"encoder": "source", "decoder": "target"}[side]
        embedding, vocab, more = _embedding(side, config, under(state, f"{side}."))
        options |= {name: embedding, "vocab" if len(sides) == 1 else f"{name}_vocab": vocab}
        owner = "target" if shared else name
        for original, slot in more.items():
            ours = owner if slot.name.startswith("tokens.") else name
            slots |= moved({original: slot}, f"{side}.", f"{ours}.")
    return options | ({"shared_embedding": shared} if len(sides) == 2 else {}), slots


def _embedding(side: str, config: Config, state: State) -> tuple[dict[str, Any], int, Slots]:
    options: dict[str, Any] = {
        "scale": not config.get("no_scale_embedding", False),
        "dropout": config.get("dropout", 0.0),
        "norm": "layernorm_embedding.weight" in state,
        "pad": PAD,
        "positions": "sinusoidal",
    }
    slots: Slots = {}
    if config.get("no_token_positional_embeddings", False):
        options["positions"] = "none"
    elif config.get(f"{side}_learned_pos", False):
        rows = state["embed_positions.weight"].shape[0] - FIRST_POSITION
        options |= {"positions": "learned", "max_length": rows}
        slots["embed_positions.weight"] = Slot("positions.table", source=slice(FIRST_POSITION, None))
    if options["norm"]:
        slots |= linear_slots("layernorm_embedding", "norm")
    if "embed_tokens.weight" in state:
        return options, state["embed_tokens.weight"].shape[0], slots | {"embed_tokens.weight": Slot("tokens.weight")}
    tables = [state[f"embed_tokens.embeddings.{band}.0.weight"] for band in range(_bands(state))]
    options |= {
        "cutoffs": _cutoffs(config["adaptive_input_cutoff"]),
        "factor": int(config.get("adaptive_input_factor", 4)),
    }
    for band in range(len(tables)):
        slots[f"embed_tokens.embeddings.{band}.0.weight"] = Slot(f"tokens.tables.{band}")
        slots[f"embed_tokens.embeddings.{band}.1.weight"] = Slot(f"tokens.maps.{band}")
    return options, sum(table.shape[0] for table in tables), slots


def _bands(state: State) -> int:
    found = [re.match(r"embed_tokens\.embeddings\.(\d+)\.0\.weight$", name) for name in state]
    return 1 + max(int(match[1]) for match in found if match)


def _cutoffs(given: Any) -> list[int]:
    return [int(part) for part in given.split(",")] if isinstance(given, str) else [int(part) for part in given]


def _head(translates: bool, config: Config, state: State) -> tuple[dict[str, Any], Slots]:
    """Options of the output, and where its weights go. Tied ones are a second name of the embedding's."""
    embedding = "target" if translates else "embedding"
    if any(name.startswith("adaptive_softmax.") for name in state):
        return _adaptive_head(embedding, config)
    tied = bool(config.get("share_all_embeddings") or config.get("share_decoder_input_output_embed"))
    slots: Slots = {}
    if "output_projection.weight" in state:  # 2019 stored none where it is tied
        slots["output_projection.weight"] = Slot(f"{embedding}.tokens.weight" if tied else "head.weight")
    bias = "output_projection.bias" in state
    if bias:
        slots["output_projection.bias"] = Slot("head.bias")
    return {"tied": tied, "bias": bias}, slots


def _adaptive_head(embedding: str, config: Config) -> tuple[dict[str, Any], Slots]:
    tied = bool(config.get("tie_adaptive_weights", False))
    tied_maps = bool(config.get("tie_adaptive_proj", False))
    cutoffs = _cutoffs(config["adaptive_softmax_cutoff"])
    prefix = "adaptive_softmax"
    if tied:
        slots = {
            f"{prefix}.head.class_proj.weight": Slot("head.clusters"),
            f"{prefix}.head.word_proj.weight": Slot(f"{embedding}.tokens.tables.0"),
        }
    else:
        slots = {
            f"{prefix}.head.weight.bands": Slot("head.clusters"),
            f"{prefix}.head.weight.words": Slot("head.words.0"),
        }
    for band in range(len(cutoffs)):
        words = f"{embedding}.tokens.tables.{band + 1}" if tied else f"head.words.{band + 1}"
        narrow = f"{embedding}.tokens.maps.{band + 1}" if tied_maps else f"head.maps.{band}"
        slots |= {f"{prefix}.tail.{band}.2.weight": Slot(words), f"{prefix}.tail.{band}.0.weight": Slot(narrow)}
    options = {
        "tied": tied,
        "tied_maps": tied_maps,
        "cutoffs": cutoffs,
        "factor": int(config.get("adaptive_softmax_factor", 4)),
        "dropout": config.get("adaptive_softmax_dropout", 0.0),
    }
    return options, slots
