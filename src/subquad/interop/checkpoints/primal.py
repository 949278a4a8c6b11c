"""PrimalAttention: converts the attention modules of its five programs (NLP, RL, CV, LRA and time series) to mixers.

Whole language models of it are read as fairseq's, and image classifiers as DeiT's. The other programs have tasks that
subquad does not have; their checkpoints are refused by name, so that nobody looks for an option that would read them.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from subquad.interop.checkpoints.run import TextFiles
from subquad.interop.checkpoints.weight_map import ConvertedModule, ParamRef, load_weights, map_linear, map_stacked
from subquad.mixers import Mixer, build


def convert_mixer(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> ConvertedModule[Mixer]:
    """Returns the mixer that computes what an original module computes.

    config: the module's options under their own names, and `source`, which names the program.
    """
    source = config["source"]
    for program, convert_module in _PROGRAMS.items():
        if f"PrimalAttention_{program}" in source:
            return convert_module(config, weights)
    raise ValueError(f"{source!r} is not a known PrimalAttention program; known: {', '.join(_PROGRAMS)}")


def convert_language_mixer(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> ConvertedModule[Mixer]:
    dim, bias = config["embed_dim"], config["bias"]
    mixer = build("primal", dim=dim, heads=config["num_heads"], rank=config["low_rank"], qk_bias=bias, causal=True)
    refs = map_stacked(["q_proj", "k_proj"], "qk", dim, bias) | map_linear("out_proj", "out", bias)
    return load_weights(mixer, weights, refs | _core_refs())


def _rl(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> ConvertedModule[Mixer]:
    dim = config["dim"]
    mixer = build("primal", dim=dim, heads=config["heads"], rank=config["low_rank"], causal=True)
    refs = map_stacked(["query_projection", "key_projection"], "qk", dim)
    return load_weights(mixer, weights, refs | map_linear("out_projection", "out") | _core_refs())


def _cv(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> ConvertedModule[Mixer]:
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
    refs = map_linear("qk", "qk", config["qk_bias"]) | map_linear("proj", "out")
    return load_weights(mixer, weights, refs | _core_refs(weights=("we", "wr")))


def _lra(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> ConvertedModule[Mixer]:
    dim, rank, multiple = config["dim"], config["low_rank"], config["rank_multi"]
    mixer = build(
        "primal",
        dim=dim,
        heads=config["num_head"],
        rank=rank,
        rank_multiple=multiple,
        max_length=rank * multiple,  # this program samples this many positions even of shorter inputs
        reduction="batch",
        trace="weights" if config["trace_no_x"] else "data",
    )
    refs = map_stacked(["W_q", "W_k"], "qk", dim) | map_linear("ff", "out")
    return load_weights(mixer, weights, refs | _core_refs("attn."))


def _time_series(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> ConvertedModule[Mixer]:
    dim = config["dim"]
    mixer = build(
        "primal",
        dim=dim,
        heads=config["heads"],
        rank=config["low_rank"],
        rank_multiple=config["rank_multi"],
        max_length=config["max_seq_len"],
    )
    refs = map_stacked(["query_projection", "key_projection"], "qk", dim) | map_linear("out_projection", "out")
    return load_weights(mixer, weights, refs | _core_refs("inner_attention."))


def _core_refs(inner: str = "", weights: tuple[str, str] = ("We", "Wr")) -> dict[str, ParamRef]:
    """Maps what all programs have. inner: the prefix of the parts that some programs keep in a submodule."""
    core = {weights[0]: ParamRef("we"), weights[1]: ParamRef("wr"), f"{inner}Lambda": ParamRef("lam")}
    return core | map_linear(f"{inner}concate_weight", "join")


_PROGRAMS = {"NLP": convert_language_mixer, "RL": _rl, "CV": _cv, "LRA": _lra, "TimeSeries": _time_series}


# ---------------------------------------------------------------------- checkpoints that are refused by name

SUPPORTED = "PrimalAttention's language models (as fairseq's) and image classifiers (as DeiT's)"
PRIORITY = 1  # the weights below tell for certain, also in files that look like those of another program
OTHER_TASKS = {
    "seq_classifer.mlpblock.0.weight": "the Long Range Arena (a text classifier), as in PrimalAttention_LRA",
    "project_inp.weight": "PrimalAttention_TimeSeries (a classifier of time series)",
    ".query_projection.weight": "PrimalAttention_RL (a decision transformer)",
}
"""The end of the name of a weight that only such models have, and what they are.

Time series come before decision transformers, because they have the weight of those too."""


def recognises(contents: Any) -> bool:
    """Whether this is a checkpoint of a PrimalAttention program whose task subquad does not have."""
    return _other_task(contents) is not None


def convert(contents: Any, folder: Path, texts: TextFiles) -> NoReturn:  # noqa: ARG001
    """Refuses the checkpoint, and says what can be done with it."""
    raise ValueError(
        f"this is a checkpoint of {_other_task(contents)}, a task that subquad does not have. {SUPPORTED} can be "
        f"imported, and {__name__}.convert_mixer makes mixers of its attention layers"
    )


def _other_task(contents: Any) -> str | None:
    names = list(_weight_names(contents))
    found = (what for ending, what in OTHER_TASKS.items() if any(name.endswith(ending) for name in names))
    return next(found, None)


def _weight_names(contents: Any) -> Iterator[str]:
    """Yields the names of weights at the top of a checkpoint, and in the mappings there."""
    if isinstance(contents, Mapping):
        for key, value in contents.items():
            yield str(key)
            if isinstance(value, Mapping):
                yield from map(str, value)
