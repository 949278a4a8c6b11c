"""Converts whole translation models of crybot/linformer, and its encoders alone."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

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

Config = Mapping[str, Any]
State = Mapping[str, Tensor]


def convert_model(config: Config, state: State) -> ConvertedModule[Model]:
    """Returns the converted model. state: its state dict.

    config: the original's YAML file, of which `model.n_heads` is used, and `pad`. The output map that the original
    stores in every attention module but never applies is left out.
    """
    encoder, encoder_refs = convert_stack(config, strip_prefix(state, "model.encoder."), ("attention", None))
    decoder, decoder_refs = convert_stack(
        config, strip_prefix(state, "model.decoder."), ("self_attention", "cross_attention")
    )
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
    refs = add_prefixes(encoder_refs, "model.encoder.", "encoder.") | add_prefixes(
        decoder_refs, "model.decoder.", "decoder."
    )
    refs |= {"model.embedding.weight": ParamRef("target.tokens.weight")} | map_linear("linear", "head")
    applied = {name: value for name, value in state.items() if name in refs or not name.endswith("out_proj.weight")}
    return load_weights(build_from_config(options), applied, refs)


def convert_stack(config: Config, state: State, names: tuple[str, str | None]) -> tuple[dict[str, Any], WeightMap]:
    """Returns the options of a stack and the map of its weights. names: of self-attention and cross-attention."""
    layers = 1 + max(int(name.split(".")[1]) for name in state)
    own, cross = names
    refs: WeightMap = {}
    mixers, crosses = [], []
    for number in range(layers):
        layer = strip_prefix(state, f"stacked.{number}.")
        mixer = _convert_attention(config, strip_prefix(layer, f"{own}."), causal=cross is not None)
        mixers.append(mixer.module)
        block = add_prefixes(mixer.weight_map, f"{own}.", "mixer.") | map_linear("norm1", "mixer_norm")
        if cross is not None:
            read = _convert_attention(config, strip_prefix(layer, f"{cross}."), causal=False)
            crosses.append(read.module)
            block |= add_prefixes(read.weight_map, f"{cross}.", "cross.") | map_linear("norm2", "cross_norm")
        block |= map_linear("norm2" if cross is None else "norm3", "ffn_norm")
        block |= map_linear("mlp.0", "ffn.fc1", bias=False) | map_linear("mlp.2", "ffn.fc2", bias=False)
        refs |= add_prefixes(block, f"stacked.{number}.", f"blocks.{number}.")
    options = {
        "layers": layers,
        "dim": state["stacked.0.mlp.0.weight"].shape[1],
        "heads": config["model"]["n_heads"],
        "ffn_dim": state["stacked.0.mlp.0.weight"].shape[0],
        "ffn_bias": False,
        "mixer": MixerChoice.of(mixers),
        "cross": MixerChoice.of(crosses) if crosses else None,
    }
    return options, refs


def _convert_attention(config: Config, state: State, causal: bool) -> ConvertedModule[Mixer]:
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
        proj_k, length = state["E.weight"].shape
        arguments |= {"k": proj_k, "sequence_length": length}
    return convert_mixer(arguments, state)
