"""Mixers from modules of the efficient-attention library (LARA, EVA, causal EVA and their peers)."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from subquad.interop.checkpoints.weight_map import Imported, Slot, fill, linear_slots, stacked_slots
from subquad.mixers import Mixer, build

_ADAPTIVE = {"default": "norm", "qk": "norm", "no-ln": "linear", "none": "none"}
_SCHEME = {"default": "redrawn", "fixed": "fixed", "learnable": "learnable"}
_RA_PROPOSAL = {0: "mean", -1: "softmax"}
_MATRIX_FREE = ("dpfp", "mlp-fourier", "relu-only", "sigmoid-only")


def mixer_from(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> Imported[Mixer]:
    """Builds the mixer that computes what the library's module `config["attn_name"]` computes.

    config: the module's constructor arguments under their own names. state: its state dict.
    """
    planned = mixer_for(config)
    return fill(planned.module, state, planned.slots, unused=("relative_position_index",))


def mixer_for(config: Mapping[str, Any]) -> Imported[Mixer]:
    """The same mixer with fresh weights, and where those of the library's module would go."""
    name = config["attn_name"]
    if name == "causal_eva":
        return _decoder_eva(config)
    if name not in _OPTIONS:
        known = ", ".join([*_OPTIONS, "causal_eva"])
        raise ValueError(f"the efficient-attention library has no mechanism {name!r}; it has {known}")
    options, slots = _OPTIONS[name](config)
    mixer = build(
        name,
        dim=config["dim"],
        heads=config["num_heads"],
        qkv_bias=config.get("qkv_bias", True),
        dropout=config.get("proj_drop", 0.0),
        **options,
    )
    slots |= linear_slots("qkv", "qkv", config.get("qkv_bias", True)) | linear_slots("proj", "out")
    return Imported(mixer, slots)


def _choice(option: str, given: Any, choices: Mapping[str, str]) -> str:
    """Our word for one of the library's."""
    if given not in choices:
        raise ValueError(f"{option} must be one of {', '.join(choices)}, got {given!r}")
    return choices[given]


Translation = tuple[dict[str, Any], dict[str, Slot]]


def _softmax(config: Mapping[str, Any]) -> Translation:
    return {"attention_dropout": config.get("attn_drop", 0.0)}, {}


def _window(config: Mapping[str, Any]) -> Translation:
    options: dict[str, Any] = {
        "window": config.get("window_size", 2),
        "overlap": config.get("overlap_window", False),
        "dims": 2 if config.get("attn_2d") else 1,
    }
    slots = {}
    if config.get("use_rpe"):
        options["relative"] = "table"
        slots["local_relative_position_bias_table"] = Slot("bias.table")
    if config.get("use_t5_rpe"):
        options["relative"] = "t5"
        slots["rel_pos_bias.relative_attention_bias.weight"] = Slot("bias.weight")
    return options, slots


def _features(config: Mapping[str, Any]) -> Translation:
    scheme = config.get("sample_scheme", "default")
    options = {"features": config.get("approx_attn_dim", 64), "projection": _choice("sample_scheme", scheme, _SCHEME)}
    return options, {"eval_proj" if scheme == "default" else "random_proj": Slot("projection.matrix")}


def _performer(config: Mapping[str, Any]) -> Translation:
    options, slots = _features(config)
    method = config.get("proj_method", "favorp")
    options |= {"feature_map": method, "cosine": config.get("cos_weighting", False)}
    if method in _MATRIX_FREE:
        slots = {}
    if method == "mlp-fourier":
        slots["feature_proj.random_proj"] = Slot("feature_map.frequencies")
        slots |= linear_slots("feature_proj.phi.0", "feature_map.linear")
    return options, slots


def _scatterbrain(config: Mapping[str, Any]) -> Translation:
    if config.get("proj_method", "favorp") != "favorp":
        raise ValueError(f"scatterbrain works with favorp features only, not {config['proj_method']!r}")
    options, slots = _window(config)
    more_options, more_slots = _features(config)
    return options | more_options, slots | more_slots


def _ra(config: Mapping[str, Any]) -> Translation:
    return {"proposal": _RA_PROPOSAL.get(config.get("num_samples", 1), "sampled")}, {}


def _lara(config: Mapping[str, Any]) -> Translation:
    proposal = config.get("proposal_gen", "pool")
    draws = "antithetic" if config.get("use_antithetics") else "single"
    options = {
        "landmarks": config.get("num_landmarks", 49),
        "weights": config.get("mis_type", "mis-opt").removeprefix("mis-"),
        "alpha": config.get("alpha_coeff", 1.0),
        "draws": "multi" if config.get("use_multisample") else draws,
        "pool_map": config.get("pool_module_type", "light"),
        "mixing": "values" if proposal.endswith("-vmixed") else "keys" if proposal.endswith("mixed") else "none",
    }
    slots: dict[str, Slot] = {}
    if proposal.startswith("adaptive-1d"):
        options["proposal"], linear, norm = "adaptive", 0, 1
    elif proposal.startswith("pool"):
        options["proposal"], linear, norm = "pool", 2, 3
    elif proposal.startswith("no-param-pool"):
        options["proposal"] = "plain-pool"
        return options, slots
    else:
        raise ValueError(f"lara: unknown proposal_gen {proposal!r}")
    for side in ("q", "k"):
        slots |= linear_slots(f"{side}_bar_gen.{linear}", f"{side}_map.linear")
        slots |= linear_slots(f"{side}_bar_gen.{norm}", f"{side}_map.norm")
    return options, slots


def _eva(config: Mapping[str, Any]) -> Translation:
    options, slots = _window(config)
    adaptive = _choice("adaptive_proj", config.get("adaptive_proj", "default"), _ADAPTIVE)
    options |= {"landmarks": config.get("num_landmarks", 49), "adaptive": adaptive}
    return options, slots | _adaptive_slots(adaptive)


def _adaptive_slots(adaptive: str) -> dict[str, Slot]:
    slots: dict[str, Slot] = {}
    for side in ("k",) if adaptive == "none" else ("q", "k"):
        slots |= linear_slots(f"adaptive_mu_{side}.0", f"{side}_map.linear")
        if adaptive != "linear":
            slots |= linear_slots(f"adaptive_mu_{side}.1", f"{side}_map.norm")
    return slots


def _decoder_eva(config: Mapping[str, Any]) -> Imported[Mixer]:
    arguments, width, bias = config["attn_args"], config["embed_dim"], config.get("bias", True)
    options, slots = _window({"window_size": 4} | dict(arguments))
    adaptive = _choice("adaptive_proj", arguments["adaptive_proj"], _ADAPTIVE)
    chunk = arguments.get("chunk_size")
    mixer = build(
        "eva",
        dim=width,
        heads=config["num_heads"],
        form="decoder",
        causal=arguments.get("causal", False),
        qkv_bias=bias,
        adaptive=adaptive,
        chunk_size=chunk,
        landmarks=None if chunk else arguments.get("num_chunks"),
        attention_dropout=config.get("dropout", 0.0),
        **options,
    )
    slots |= stacked_slots(("q_proj", "k_proj", "v_proj"), "qkv", width, bias)
    slots |= linear_slots("out_proj", "out") | _adaptive_slots(adaptive)
    return Imported(mixer, slots)


_OPTIONS: dict[str, Callable[[Mapping[str, Any]], Translation]] = {
    "softmax": _softmax,
    "performer": _performer,
    "local": _window,
    "ra": _ra,
    "lara": _lara,
    "scatterbrain": _scatterbrain,
    "eva": _eva,
}
