"""Whole models of fairseq's examples/linformer: a RoBERTa that finds hidden words, with compressed attention.

Two older layouts differ: until 2021 the norm of the embedding had another name; the first release gave every layer a
matrix of its own even where it was told to share one, and trained the words of the head apart from the embedding. So
what is shared is read from the weights.

Padding differs on purpose: the original takes no notice of it after its first layer, so that its padded rows reach all
others. Here they reach nothing; a text without padding gets the original's logits.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from subquad.interop.checkpoints.fairseq.models import FIRST_POSITION, PAD
from subquad.interop.checkpoints.linformer import mixers as linformer
from subquad.interop.checkpoints.weight_map import Imported, Slot, Slots, fill, linear_slots, moved, under
from subquad.mixers import Mixer
from subquad.models import Model
from subquad.models import model_from as build_model_from
from subquad.nn.stack import MixerChoice

ENCODER, HEAD = "encoder.sentence_encoder.", "encoder.lm_head."
NEVER_USED = re.compile(r"(\.version|compress_(k|v|layer)\.bias)$")

Config = Mapping[str, Any]
State = Mapping[str, Tensor]


def model_from(config: Config, state: State) -> Imported[Model]:
    """config: the original's arguments under their own names; state: its state dict."""
    state = {name.replace(".emb_layer_norm.", ".layernorm_embedding."): value for name, value in state.items()}
    vocab, dim = state[f"{ENCODER}embed_tokens.weight"].shape
    encoder, slots = _stack(config, under(state, ENCODER))
    slots = moved(slots, ENCODER, "encoder.")
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
    slots |= {
        f"{ENCODER}embed_tokens.weight": Slot("embedding.tokens.weight"),
        f"{ENCODER}embed_positions.weight": Slot("embedding.positions.table", source=slice(FIRST_POSITION, None)),
        f"{HEAD}weight": Slot("embedding.tokens.weight" if tied else "head.weight"),
        f"{HEAD}bias": Slot("head.bias"),
    }
    slots |= linear_slots(f"{ENCODER}layernorm_embedding", "embedding.norm") if normed else {}
    slots |= linear_slots(f"{HEAD}dense", "last") | linear_slots(f"{HEAD}layer_norm", "last_norm")
    unused = [name for name in state if NEVER_USED.search(name)]
    return fill(build_model_from(options), state, slots, unused)


def _stack(config: Config, state: State) -> tuple[dict[str, Any], Slots]:
    """Options of the encoder, and where its blocks' weights go. Layers that share a matrix have it in the first."""
    layers = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("layers."))
    matrices = [state[f"layers.{number}.self_attn.compress_k.weight"] for number in range(layers)]
    asked = bool(config.get("shared_layer_kv_compressed"))
    shared = asked and all(torch.equal(matrix, matrices[0]) for matrix in matrices)
    of_values = asked or config.get("shared_kv_compressed", 0)
    sharing = {"shared_kv_compressed": of_values, "shared_compress_layer": shared}
    mixers: list[Mixer] = []
    slots: Slots = {}
    for number in range(layers):
        imported = _attention(config, under(state, f"layers.{number}.self_attn."), sharing)
        mixers.append(imported.module)
        block = moved(imported.slots, "self_attn.", "mixer.")
        if f"layers.{number}.shared_compress_layer.weight" in state:  # of the first release: a second name
            block["shared_compress_layer.weight"] = Slot("mixer.compress_k")
        block |= linear_slots("self_attn_layer_norm", "mixer_norm") | linear_slots("final_layer_norm", "ffn_norm")
        block |= linear_slots("fc1", "ffn.fc1") | linear_slots("fc2", "ffn.fc2")
        slots |= moved(block, f"layers.{number}.", f"blocks.{number}.")
    owner = Slot("blocks.0.mixer.compress_k")
    if shared:
        slots |= {name: owner for name in slots if "compress_" in name}
    if "compress_layer.weight" in state:
        slots["compress_layer.weight"] = owner
    hidden = state["layers.0.fc1.weight"].shape[0]
    return {
        "layers": layers,
        "heads": config["encoder_attention_heads"],
        "hidden": hidden,
        "mixer": MixerChoice.of(mixers),
        "activation": config.get("activation_fn", "gelu"),
        "norm": "post",
        "dropout": config.get("dropout", 0.0),
        "activation_dropout": config.get("activation_dropout", 0.0),
        "layer_drop": config.get("encoder_layerdrop", 0.0),
    }, slots


def _attention(config: Config, state: State, sharing: Config) -> Imported[Mixer]:
    arguments = {
        "embed_dim": state["q_proj.weight"].shape[1],
        "num_heads": config["encoder_attention_heads"],
        "max_seq_len": state["compress_k.weight"].shape[1],
        **sharing,
        "freeze_compress": config.get("freeze_compress", 0),
        "dropout": config.get("dropout", 0.0),  # the original has no other for its attention
    }
    return linformer.mixer_from(arguments, state)
