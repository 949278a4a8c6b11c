"""Converts models of fairseq's examples/linformer: a RoBERTa (a masked language model) with Linformer attention.

Two older layouts differ. Until 2021 the norm of the embedding had another name. The first release gave every layer a
matrix of its own even if it was told to share one, and trained the words of the head apart from the embedding. So the
weights decide what is shared.

Padding differs on purpose: the original ignores it after its first layer, so padded positions reach all others. Here
they reach nothing. A text without padding gets the original's logits.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from subquad.interop.checkpoints.fairseq.models import FIRST_POSITION, PAD
from subquad.interop.checkpoints.linformer.mixers import convert_mixer
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

ENCODER, HEAD = "encoder.sentence_encoder.", "encoder.lm_head."
NEVER_USED = re.compile(r"(\.version|compress_(k|v|layer)\.bias)$")

Config = Mapping[str, Any]
State = Mapping[str, Tensor]


def convert_model(config: Config, state: State) -> ConvertedModule[Model]:
    """Returns the converted model. config: the original's arguments under their own names. state: its state dict."""
    state = {name.replace(".emb_layer_norm.", ".layernorm_embedding."): value for name, value in state.items()}
    vocab, dim = state[f"{ENCODER}embed_tokens.weight"].shape
    encoder, refs = _convert_stack(config, strip_prefix(state, ENCODER))
    refs = add_prefixes(refs, ENCODER, "encoder.")
    positions = state[f"{ENCODER}embed_positions.weight"].shape[0] - FIRST_POSITION
    normed = f"{ENCODER}layernorm_embedding.weight" in state
    tied = torch.equal(state[f"{HEAD}weight"], state[f"{ENCODER}embed_tokens.weight"])
    options = {
        "kind": "masked-language-model",
        "vocab": vocab,
        "dim": dim,
        "embedding": {
            "positions": "learned",
            "max_length": positions,
            "scale": False,
            "norm": normed,
            "dropout": config.get("dropout", 0.0),
            "pad": PAD,
        },
        "encoder": encoder,
        "head_activation": encoder["activation"],
        "head": {"tied": tied, "bias": True},
    }
    refs |= {
        f"{ENCODER}embed_tokens.weight": ParamRef("embedding.tokens.weight"),
        f"{ENCODER}embed_positions.weight": ParamRef(
            "embedding.positions.table", source_rows=slice(FIRST_POSITION, None)
        ),
        f"{HEAD}weight": ParamRef("embedding.tokens.weight" if tied else "head.weight"),
        f"{HEAD}bias": ParamRef("head.bias"),
    }
    refs |= map_linear(f"{ENCODER}layernorm_embedding", "embedding.norm") if normed else {}
    refs |= map_linear(f"{HEAD}dense", "last") | map_linear(f"{HEAD}layer_norm", "last_norm")
    unused = [name for name in state if NEVER_USED.search(name)]
    return load_weights(build_from_config(options), state, refs, unused)


def _convert_stack(config: Config, state: State) -> tuple[dict[str, Any], WeightMap]:
    """Returns the options of the encoder, and the map of its weights. The first layer holds a shared matrix."""
    layers = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("layers."))
    matrices = [state[f"layers.{number}.self_attn.compress_k.weight"] for number in range(layers)]
    asks_to_share = bool(config.get("shared_layer_kv_compressed"))
    shared = asks_to_share and all(torch.equal(matrix, matrices[0]) for matrix in matrices)
    shared_values = asks_to_share or config.get("shared_kv_compressed", 0)
    sharing = {"shared_kv_compressed": shared_values, "shared_compress_layer": shared}
    mixers: list[Mixer] = []
    refs: WeightMap = {}
    for number in range(layers):
        converted = _convert_attention(config, strip_prefix(state, f"layers.{number}.self_attn."), sharing)
        mixers.append(converted.module)
        block = add_prefixes(converted.weight_map, "self_attn.", "mixer.")
        if f"layers.{number}.shared_compress_layer.weight" in state:  # the first release stores a second name
            block["shared_compress_layer.weight"] = ParamRef("mixer.compress_k")
        block |= map_linear("self_attn_layer_norm", "mixer_norm") | map_linear("final_layer_norm", "ffn_norm")
        block |= map_linear("fc1", "ffn.fc1") | map_linear("fc2", "ffn.fc2")
        refs |= add_prefixes(block, f"layers.{number}.", f"blocks.{number}.")
    owner = ParamRef("blocks.0.mixer.compress_k")
    if shared:
        refs |= {name: owner for name in refs if "compress_" in name}
    if "compress_layer.weight" in state:
        refs["compress_layer.weight"] = owner
    ffn_dim = state["layers.0.fc1.weight"].shape[0]
    return {
        "layers": layers,
        "heads": config["encoder_attention_heads"],
        "ffn_dim": ffn_dim,
        "mixer": MixerChoice.of(mixers),
        "activation": config.get("activation_fn", "gelu"),
        "norm": "post",
        "dropout": config.get("dropout", 0.0),
        "activation_dropout": config.get("activation_dropout", 0.0),
        "layer_drop": config.get("encoder_layerdrop", 0.0),
    }, refs


def _convert_attention(config: Config, state: State, sharing: Config) -> ConvertedModule[Mixer]:
    arguments = {
        "embed_dim": state["q_proj.weight"].shape[1],
        "num_heads": config["encoder_attention_heads"],
        "max_seq_len": state["compress_k.weight"].shape[1],
        **sharing,
        "freeze_compress": config.get("freeze_compress", 0),
        "dropout": config.get("dropout", 0.0),  # the original has no other for its attention
    }
    return convert_mixer(arguments, state)
