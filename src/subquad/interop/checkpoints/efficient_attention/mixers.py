"""Converts attention modules of the efficient-attention library (LARA, EVA, causal EVA and others) to mixers."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from subquad.config import nearest
from subquad.interop.checkpoints.weight_map import (
    ConvertedModule,
    ParamRef,
    WeightMap,
    load_weights,
    map_linear,
    map_stacked,
)
from subquad.mixers import Mixer, build
from subquad.original_names import VALUES

_ADAPTIVE, _SCHEME, _MIS_TYPES = VALUES["adaptive"], VALUES["projection"], VALUES["weights"]
_POOL_MODULES = {"light": "light", "dense": "dense"}
_RA_PROPOSAL = {0: "mean", -1: "softmax"}
_MATRIX_FREE = ("dpfp", "mlp-fourier", "relu-only", "sigmoid-only")


def convert_mixer(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> ConvertedModule[Mixer]:
    """Returns the mixer that computes what the library's module `config["attn_name"]` computes.

    config: the module's constructor arguments under their own names. state: its state dict.
    """
    fresh = build_mixer(config)
    return load_weights(fresh.module, state, fresh.weight_map, unused=("relative_position_index",))


def build_mixer(config: Mapping[str, Any]) -> ConvertedModule[Mixer]:
    """Returns the same mixer with fresh weights, and the map that says where the library's weights would go."""
    name = config["attn_name"]
    if name == "causal_eva":
        return _build_causal_eva(config)
    if name not in _MECHANISMS:
        known = ", ".join([*_MECHANISMS, "causal_eva"])
        raise ValueError(f"the efficient-attention library has no mechanism {name!r}; it has {known}")
    options, refs = _MECHANISMS[name](config)
    mixer = build(
        name,
        dim=config["dim"],
        heads=config["num_heads"],
        qkv_bias=config.get("qkv_bias", True),
        dropout=config.get("proj_drop", 0.0),
        **options,
    )
    refs |= map_linear("qkv", "qkv", config.get("qkv_bias", True)) | map_linear("proj", "out")
    return ConvertedModule(mixer, refs)


def _translate(option: str, given: Any, choices: Mapping[str, str]) -> str:
    """Returns our word for one of the library's."""
    if given not in choices:
        flag = f"--{option.replace('_', '-')}"
        raise ValueError(
            f"{option} ({flag}) must be one of {', '.join(choices)}, got {given!r}{nearest(given, choices)}"
        )
    return choices[given]


OptionsAndMap = tuple[dict[str, Any], WeightMap]
"""The options of a mixer, and the map of the weights that only this mechanism has."""


def _softmax(config: Mapping[str, Any]) -> OptionsAndMap:
    return {"attention_dropout": config.get("attn_drop", 0.0)}, {}


def _window(config: Mapping[str, Any]) -> OptionsAndMap:
    options: dict[str, Any] = {
        "window": config.get("window_size", 2),
        "overlap": config.get("overlap_window", False),
        "dims": 2 if config.get("attn_2d") else 1,
    }
    refs = {}
    if config.get("use_rpe"):
        options["relative"] = "table"
        refs["local_relative_position_bias_table"] = ParamRef("bias.table")
    if config.get("use_t5_rpe"):
        options["relative"] = "t5"
        refs["rel_pos_bias.relative_attention_bias.weight"] = ParamRef("bias.weight")
    return options, refs


def _features(config: Mapping[str, Any]) -> OptionsAndMap:
    scheme = config.get("sample_scheme", "default")
    options = {
        "features": config.get("approx_attn_dim", 64),
        "projection": _translate("sample_scheme", scheme, _SCHEME),
    }
    return options, {"eval_proj" if scheme == "default" else "random_proj": ParamRef("projection.matrix")}


def _performer(config: Mapping[str, Any]) -> OptionsAndMap:
    options, refs = _features(config)
    method = config.get("proj_method", "favorp")
    options |= {"feature_map": method, "cosine": config.get("cos_weighting", False)}
    if method in _MATRIX_FREE:
        refs = {}
    if method == "mlp-fourier":
        refs["feature_proj.random_proj"] = ParamRef("feature_map.frequencies")
        refs |= map_linear("feature_proj.phi.0", "feature_map.linear")
    return options, refs


def _scatterbrain(config: Mapping[str, Any]) -> OptionsAndMap:
    if config.get("proj_method", "favorp") != "favorp":
        raise ValueError(f"scatterbrain works with favorp features only, not {config['proj_method']!r}")
    options, refs = _window(config)
    more_options, more_refs = _features(config)
    return options | more_options, refs | more_refs


def _ra(config: Mapping[str, Any]) -> OptionsAndMap:
    return {"proposal": _RA_PROPOSAL.get(config.get("num_samples", 1), "sampled")}, {}


def _lara(config: Mapping[str, Any]) -> OptionsAndMap:
    proposal = config.get("proposal_gen", "pool")
    samples = "antithetic" if config.get("use_antithetics") else "single"
    mixing = "values" if proposal.endswith("-vmixed") else "keys" if proposal.endswith("mixed") else "none"
    options = {
        "landmarks": config.get("num_landmarks", 49),
        "weights": _translate("mis_type", config.get("mis_type", "mis-opt"), _MIS_TYPES),
        "alpha": config.get("alpha_coeff", 1.0),
        "num_samples": "multi" if config.get("use_multisample") else samples,
        "pool_proj": _translate("pool_module_type", config.get("pool_module_type", "light"), _POOL_MODULES),
        "landmark_mixing": mixing,
    }
    refs: WeightMap = {}
    if proposal.startswith("adaptive-1d"):
        options["proposal"], linear, norm = "adaptive", 0, 1
    elif proposal.startswith("pool"):
        options["proposal"], linear, norm = "pool", 2, 3
    elif proposal.startswith("no-param-pool"):
        options["proposal"] = "plain-pool"
        return options, refs
    else:
        known = "pool, no-param-pool and adaptive-1d, each also with -mixed and -vmixed"
        raise ValueError(f"proposal_gen (--proposal-gen) must be one of {known}, got {proposal!r}")
    for side in ("q", "k"):
        refs |= map_linear(f"{side}_bar_gen.{linear}", f"{side}_map.linear")
        refs |= map_linear(f"{side}_bar_gen.{norm}", f"{side}_map.norm")
    return options, refs


def _eva(config: Mapping[str, Any]) -> OptionsAndMap:
    options, refs = _window(config)
    adaptive = _translate("adaptive_proj", config.get("adaptive_proj", "default"), _ADAPTIVE)
    options |= {"landmarks": config.get("num_landmarks", 49), "adaptive": adaptive}
    return options, refs | _adaptive_refs(adaptive)


def _adaptive_refs(adaptive: str) -> WeightMap:
    refs: WeightMap = {}
    for side in ("k",) if adaptive == "none" else ("q", "k"):
        refs |= map_linear(f"adaptive_mu_{side}.0", f"{side}_map.linear")
        if adaptive != "linear":
            refs |= map_linear(f"adaptive_mu_{side}.1", f"{side}_map.norm")
    return refs


def _build_causal_eva(config: Mapping[str, Any]) -> ConvertedModule[Mixer]:
    arguments, width, bias = config["attn_args"], config["embed_dim"], config.get("bias", True)
    options, refs = _window({"window_size": 4} | dict(arguments))
    adaptive = _translate("adaptive_proj", arguments["adaptive_proj"], _ADAPTIVE)
    chunk = arguments.get("chunk_size")
    mixer = build(
        "eva",
        dim=width,
        heads=config["num_heads"],
        variant="decoder",
        causal=arguments.get("causal", False),
        qkv_bias=bias,
        adaptive=adaptive,
        chunk_size=chunk,
        landmarks=None if chunk else arguments.get("num_chunks"),
        attention_dropout=config.get("dropout", 0.0),
        **options,
    )
    refs |= map_stacked(("q_proj", "k_proj", "v_proj"), "qkv", width, bias)
    refs |= map_linear("out_proj", "out") | _adaptive_refs(adaptive)
    return ConvertedModule(mixer, refs)


_MECHANISMS: dict[str, Callable[[Mapping[str, Any]], OptionsAndMap]] = {
    "softmax": _softmax,
    "performer": _performer,
    "local": _window,
    "ra": _ra,
    "lara": _lara,
    "scatterbrain": _scatterbrain,
    "eva": _eva,
}
