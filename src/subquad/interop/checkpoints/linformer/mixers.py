"""Converts attention modules of three Linformer programs: fairseq's examples/linformer, crybot/linformer, and LRA."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from subquad.interop.checkpoints.weight_map import ConvertedModule, ParamRef, load_weights, map_linear, map_stacked
from subquad.mixers import Mixer, build


def convert_mixer(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> ConvertedModule[Mixer]:
    """Returns the mixer that computes what the original module computes. config: its options under their own names."""
    if "q_proj.weight" in weights:
        return _official(config, weights)
    if "qkv_proj.weight" in weights:
        return _crybot(config, weights)
    if "W_q.weight" in weights:
        return _lra(config, weights)
    raise ValueError(f"these are not the weights of a known Linformer attention: {sorted(weights)}")


def _official(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> ConvertedModule[Mixer]:
    dim, heads = config["embed_dim"], config["num_heads"]
    refs = map_stacked(["q_proj", "k_proj", "v_proj"], "qkv", dim) | map_linear("out_proj", "out")
    if "max_seq_len" not in config:  # the original compresses only self-attention
        return load_weights(
            build("softmax", dim=dim, heads=heads), weights, refs, unused=("compress_k.", "compress_v.")
        )
    shared = bool(config["shared_kv_compressed"] or config["shared_compress_layer"])
    mixer = build(
        "linformer",
        dim=dim,
        heads=heads,
        proj_k=weights["compress_k.weight"].shape[0],
        max_length=config["max_seq_len"],
        share_kv=shared,
        share_layers=bool(config["shared_compress_layer"]),
        frozen=bool(config["freeze_compress"]),
        attention_dropout=config.get("dropout", 0.0),
    )
    refs["compress_k.weight"] = ParamRef("compress_k")
    if "compress_v.weight" in weights:  # if shared, it is a second name of the same matrix
        refs["compress_v.weight"] = ParamRef("compress_k" if shared else "compress_v")
    return load_weights(mixer, weights, refs, unused=("compress_k.bias", "compress_v.bias"))


def _crybot(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> ConvertedModule[Mixer]:
    dim, heads, width = config["dim"], config["heads"], config["inner_dim"]
    projects = width * heads != dim  # else the original stores an output map but never applies it
    options = {
        "dim": dim,
        "heads": heads,
        "head_dim": width,
        "qkv_bias": False,
        "out_projection": projects,
        "out_bias": False,
        "causal": config.get("causal", False),
    }
    refs = map_linear("qkv_proj", "qkv", bias=False)
    unused = ["E.weight", "F.weight"]
    if projects:
        refs |= map_linear("out_proj", "out", bias=False)
    else:
        unused.append("out_proj.weight")
    if config["cls"] == "MultiHeadAttention" or config.get("full", False):
        return load_weights(build("softmax", **options), weights, refs, unused)
    mixer = build(
        "linformer", **options, proj_k=config["k"], max_length=config["sequence_length"], compress="project-first"
    )
    refs |= {"E.weight": ParamRef("compress_k"), "F.weight": ParamRef("compress_v")}
    return load_weights(mixer, weights, refs, unused)


def _lra(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> ConvertedModule[Mixer]:
    dim, heads, width = config["transformer_dim"], config["num_head"], config["head_dim"]
    mixer = build(
        "linformer",
        dim=dim,
        heads=heads,
        head_dim=width,
        proj_k=config["linformer_k"],
        max_length=config["max_seq_len"],
        compress="project-first",
        share_kv=True,
        per_head=True,
    )
    refs = map_stacked(["W_q", "W_k", "W_v"], "qkv", heads * width) | map_linear("ff", "out")
    return load_weights(mixer, weights, refs | {"attn.E": ParamRef("compress_k")})
