"""Whole models of fairseq's examples/linformer: a RoBERTa that finds hidden words, with compressed attention.

Padding differs on purpose: the original takes no notice of it after its first layer, so that its padded rows reach all
others. Here they reach nothing; a text without padding gets the original's logits.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from subquad.interop import linformer
from subquad.interop.fairseq_models import FIRST_POSITION, PAD
from subquad.interop.slots import Imported, Slot, Slots, fill, linear_slots, moved, under
from subquad.mixers import Mixer
from subquad.models import Model
from subquad.models import model_from as build_model_from
from subquad.nn.stack import MixerChoice

ENCODER, HEAD = "encoder.sentence_encoder.", "encoder.lm_head."
NEVER_USED = re.compile(r"(\.version|\.compress_(k|v|layer)\.bias)$")

Config = Mapping[str, Any]
State = Mapping[str, Tensor]


def model_from(config: Config, state: State) -> Imported[Model]:
    """config: the original's arguments under their own names; state: its state dict."""
    vocab, dim = state[f"{ENCODER}embed_tokens.weight"].shape
    encoder, slots = _stack(config, under(state, ENCODER))
    slots = moved(slots, ENCODER, "encoder.")
    positions = state[f"{ENCODER}embed_positions.weight"].shape[0] - FIRST_POSITION
    normed = f"{ENCODER}layernorm_embedding.weight" in state
    tied = not config.get("untie_weights_roberta", False)
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
    mixers: list[Mixer] = []
    slots: Slots = {}
    for number in range(layers):
        imported = _attention(config, under(state, f"layers.{number}.self_attn."))
        mixers.append(imported.module)
        block = moved(imported.slots, "self_attn.", "mixer.")
        block |= linear_slots("self_attn_layer_norm", "mixer_norm") | linear_slots("final_layer_norm", "ffn_norm")
        block |= linear_slots("fc1", "ffn.fc1") | linear_slots("fc2", "ffn.fc2")
        slots |= moved(block, f"layers.{number}.", f"blocks.{number}.")
    if config.get("shared_layer_kv_compressed"):
        owner = Slot("blocks.0.mixer.compress_k")
        slots |= {name: owner for name in slots if ".compress_" in name} | {"compress_layer.weight": owner}
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


def _attention(config: Config, state: State) -> Imported[Mixer]:
    arguments = {
        "embed_dim": state["q_proj.weight"].shape[1],
        "num_heads": config["encoder_attention_heads"],
        "max_seq_len": state["compress_k.weight"].shape[1],
        "shared_kv_compressed": config.get("shared_kv_compressed", 0),
        "shared_compress_layer": config.get("shared_layer_kv_compressed", 0),
        "freeze_compress": config.get("freeze_compress", 0),
        "dropout": config.get("dropout", 0.0),  # the original has no other for its attention
    }
    return linformer.mixer_from(arguments, state)
