"""Attention modules of the three Linformer programs: fairseq's examples/linformer, crybot/linformer, and LRA."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from subquad.interop.checkpoints.weight_map import Imported, Slot, fill, linear_slots, stacked_slots
from subquad.mixers import Mixer, build


def mixer_from(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Imported[Mixer]:
    """The mixer that computes what the original module, with its own option names, computes."""
    if "q_proj.weight" in weights:
        return _official(config, weights)
    if "qkv_proj.weight" in weights:
        return _crybot(config, weights)
    if "W_q.weight" in weights:
        return _lra(config, weights)
    raise ValueError(f"these are not the weights of a known Linformer attention: {sorted(weights)}")


def _official(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Imported[Mixer]:
    dim, heads = config["embed_dim"], config["num_heads"]
    slots = stacked_slots(["q_proj", "k_proj", "v_proj"], "qkv", dim) | linear_slots("out_proj", "out")
    if "max_seq_len" not in config:  # the original compresses self-attention only
        return fill(build("softmax", dim=dim, heads=heads), weights, slots, unused=("compress_k.", "compress_v."))
    shared = bool(config["shared_kv_compressed"] or config["shared_compress_layer"])
    mixer = build(
        "linformer",
        dim=dim,
        heads=heads,
        slots=weights["compress_k.weight"].shape[0],
        max_length=config["max_seq_len"],
        share_kv=shared,
        share_layers=bool(config["shared_compress_layer"]),
        frozen=bool(config["freeze_compress"]),
        attention_dropout=config.get("dropout", 0.0),
    )
    slots["compress_k.weight"] = Slot("compress_k")
    if "compress_v.weight" in weights:  # where shared, a second name of the same matrix
        slots["compress_v.weight"] = Slot("compress_k" if shared else "compress_v")
    return fill(mixer, weights, slots, unused=("compress_k.bias", "compress_v.bias"))


def _crybot(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Imported[Mixer]:
    dim, heads, width = config["dim"], config["heads"], config["inner_dim"]
    projects = width * heads != dim  # otherwise the original stores an output map and never applies it
    options = {
        "dim": dim,
        "heads": heads,
        "head_dim": width,
        "qkv_bias": False,
        "out_projection": projects,
        "out_bias": False,
        "causal": config.get("causal", False),
    }
    slots = linear_slots("qkv_proj", "qkv", bias=False)
    unused = ["E.weight", "F.weight"]
    if projects:
        slots |= linear_slots("out_proj", "out", bias=False)
    else:
        unused.append("out_proj.weight")
    if config["cls"] == "MultiHeadAttention" or config.get("full", False):
        return fill(build("softmax", **options), weights, slots, unused)
    mixer = build(
        "linformer", **options, slots=config["k"], max_length=config["sequence_length"], order="project-first"
    )
    slots |= {"E.weight": Slot("compress_k"), "F.weight": Slot("compress_v")}
    return fill(mixer, weights, slots, unused)


def _lra(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Imported[Mixer]:
    dim, heads, width = config["transformer_dim"], config["num_head"], config["head_dim"]
    mixer = build(
        "linformer",
        dim=dim,
        heads=heads,
        head_dim=width,
        slots=config["linformer_k"],
        max_length=config["max_seq_len"],
        order="project-first",
        share_kv=True,
        per_head=True,
    )
    slots = stacked_slots(["W_q", "W_k", "W_v"], "qkv", heads * width) | linear_slots("ff", "out")
    return fill(mixer, weights, slots | {"attn.E": Slot("compress_k")})
