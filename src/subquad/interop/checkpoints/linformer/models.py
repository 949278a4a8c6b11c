"""Whole translation models of crybot/linformer, and its encoders alone."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from subquad.interop.checkpoints.linformer import mixers as linformer
from subquad.interop.checkpoints.weight_map import Imported, Slot, Slots, fill, linear_slots, moved, under
from subquad.mixers import Mixer
from subquad.models import Model
from subquad.models import model_from as build_model_from
from subquad.nn.stack import MixerChoice

Config = Mapping[str, Any]
State = Mapping[str, Tensor]


def model_from(config: Config, state: State) -> Imported[Model]:
    """config: the original's YAML file, of which `model.n_heads` counts, and `pad`; state: its state dict.

    The output map that the original stores in every attention module and applies in none is left out.
    """
    encoder, encoder_slots = stack_from(config, under(state, "model.encoder."), ("attention", None))
    decoder, decoder_slots = stack_from(config, under(state, "model.decoder."), ("self_attention", "cross_attention"))
    vocab, dim = state["model.embedding.weight"].shape
    embedding = {"positions": "sin-cos", "scale": False, "pad": config.get("pad", 1)}
    options = {
        "kind": "encoder-decoder",
        "source_vocab": vocab,
        "target_vocab": vocab,
        "shared_embedding": True,
        "dim": dim,
        "source": embedding,
        "target": embedding,
        "encoder": encoder,
        "decoder": decoder,
        "head": {"tied": False, "bias": True},
    }
    slots = moved(encoder_slots, "model.encoder.", "encoder.") | moved(decoder_slots, "model.decoder.", "decoder.")
    slots |= {"model.embedding.weight": Slot("target.tokens.weight")} | linear_slots("linear", "head")
    applied = {name: value for name, value in state.items() if name in slots or not name.endswith("out_proj.weight")}
    return fill(build_model_from(options), applied, slots)


def stack_from(config: Config, state: State, names: tuple[str, str | None]) -> tuple[dict[str, Any], Slots]:
    """Options of a stack whose layers hold attention under these names (self, cross), and where its weights go."""
    layers = 1 + max(int(name.split(".")[1]) for name in state)
    own, cross = names
    slots: Slots = {}
    mixers, crosses = [], []
    for number in range(layers):
        layer = under(state, f"stacked.{number}.")
        mixer = _attention(config, under(layer, f"{own}."), causal=cross is not None)
        mixers.append(mixer.module)
        block = moved(mixer.slots, f"{own}.", "mixer.") | linear_slots("norm1", "mixer_norm")
        if cross is not None:
            read = _attention(config, under(layer, f"{cross}."), causal=False)
            crosses.append(read.module)
            block |= moved(read.slots, f"{cross}.", "cross.") | linear_slots("norm2", "cross_norm")
        block |= linear_slots("norm2" if cross is None else "norm3", "ffn_norm")
        block |= linear_slots("mlp.0", "ffn.fc1", bias=False) | linear_slots("mlp.2", "ffn.fc2", bias=False)
        slots |= moved(block, f"stacked.{number}.", f"blocks.{number}.")
    options = {
        "layers": layers,
        "dim": state["stacked.0.mlp.0.weight"].shape[1],
        "heads": config["model"]["n_heads"],
        "hidden": state["stacked.0.mlp.0.weight"].shape[0],
        "ffn_bias": False,
        "mixer": MixerChoice.of(mixers),
        "cross": MixerChoice.of(crosses) if crosses else None,
    }
    return options, slots


def _attention(config: Config, state: State, causal: bool) -> Imported[Mixer]:
    heads = config["model"]["n_heads"]
    width, dim = state["qkv_proj.weight"].shape
    arguments = {
        "cls": "LinformerAttention" if "E.weight" in state else "MultiHeadAttention",
        "dim": dim,
        "heads": heads,
        "inner_dim": width // (3 * heads),
        "causal": causal,
    }
    if "E.weight" in state:
        slots, length = state["E.weight"].shape
        arguments |= {"k": slots, "sequence_length": length}
    return linformer.mixer_from(arguments, state)
