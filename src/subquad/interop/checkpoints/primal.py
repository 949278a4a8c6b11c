"""Attention modules of the five PrimalAttention programs: NLP, RL, CV, LRA and time series."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from subquad.interop.checkpoints.weight_map import Imported, Slot, fill, linear_slots, stacked_slots
from subquad.mixers import Mixer, build


def mixer_from(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Imported[Mixer]:
    """The mixer that computes what the original module, with its own option names, computes."""
    source = config["source"]
    for program, load in _PROGRAMS.items():
        if f"PrimalAttention_{program}" in source:
            return load(config, weights)
    raise ValueError(f"{source!r} is not a known PrimalAttention program; known: {', '.join(_PROGRAMS)}")


def language_mixer_from(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Imported[Mixer]:
    dim, bias = config["embed_dim"], config["bias"]
    mixer = build("primal", dim=dim, heads=config["num_heads"], rank=config["low_rank"], qk_bias=bias, causal=True)
    slots = stacked_slots(["q_proj", "k_proj"], "qk", dim, bias) | linear_slots("out_proj", "out", bias)
    return fill(mixer, weights, slots | _core_slots())


def _rl(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Imported[Mixer]:
    dim = config["dim"]
    mixer = build("primal", dim=dim, heads=config["heads"], rank=config["low_rank"], causal=True)
    slots = stacked_slots(["query_projection", "key_projection"], "qk", dim)
    return fill(mixer, weights, slots | linear_slots("out_projection", "out") | _core_slots())


def _cv(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Imported[Mixer]:
    mixer = build(
        "primal",
        dim=config["dim"],
        heads=config["num_heads"],
        rank=config["low_rank"],
        rank_multiple=config["rank_multi"],
        max_length=config["embed_len"],
        reduction="batch",
        qk_bias=config["qk_bias"],
    )
    slots = linear_slots("qk", "qk", config["qk_bias"]) | linear_slots("proj", "out")
    return fill(mixer, weights, slots | _core_slots(weights=("we", "wr")))


def _lra(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Imported[Mixer]:
    dim, rank, multiple = config["dim"], config["low_rank"], config["rank_multi"]
    mixer = build(
        "primal",
        dim=dim,
        heads=config["num_head"],
        rank=rank,
        rank_multiple=multiple,
        max_length=rank * multiple,  # this program samples so many positions even of shorter inputs
        reduction="batch",
        trace="weights" if config["trace_no_x"] else "data",
    )
    slots = stacked_slots(["W_q", "W_k"], "qk", dim) | linear_slots("ff", "out")
    return fill(mixer, weights, slots | _core_slots("attn."))


def _time_series(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Imported[Mixer]:
    dim = config["dim"]
    mixer = build(
        "primal",
        dim=dim,
        heads=config["heads"],
        rank=config["low_rank"],
        rank_multiple=config["rank_multi"],
        max_length=config["max_seq_len"],
    )
    slots = stacked_slots(["query_projection", "key_projection"], "qk", dim) | linear_slots("out_projection", "out")
    return fill(mixer, weights, slots | _core_slots("inner_attention."))


def _core_slots(inner: str = "", weights: tuple[str, str] = ("We", "Wr")) -> dict[str, Slot]:
    """What all programs have; `inner` is the prefix of the parts that some keep in a submodule."""
    core = {weights[0]: Slot("we"), weights[1]: Slot("wr"), f"{inner}Lambda": Slot("lam")}
    return core | linear_slots(f"{inner}concate_weight", "join")


_PROGRAMS = {"NLP": language_mixer_from, "RL": _rl, "CV": _cv, "LRA": _lra, "TimeSeries": _time_series}
