"""Converts lightweight and dynamic convolutions of fairseq to mixers."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from subquad.interop.checkpoints.weight_map import ConvertedModule, ParamRef, load_weights, map_linear
from subquad.mixers import Mixer, build

_MECHANISM = {"lightweight": "lightconv", "dynamic": "dynamicconv"}


def convert_conv_block(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> ConvertedModule[Mixer]:
    """Converts the convolution part of a fairseq layer: linear1, conv and linear2.

    config: conv_type ("lightweight" | "dynamic"), kernel_size, heads, causal; optional glu (True), weight_softmax
    (True), conv_dim, dropout, weight_dropout, and bias, conv_bias and renorm_padding as in `convert_conv`.
    state: linear1.*, linear2.* and conv.weight | conv.weight_linear.*. Newer versions of fairseq store an uninitialised
    conv.conv_bias even if the model does not use it. It is ignored unless the config has conv_bias.
    """
    if "linear1.weight" not in state:
        raise ValueError(f"a fairseq conv block has linear1.weight; these weights have {', '.join(state) or 'nothing'}")
    dim = state["linear1.weight"].shape[1]
    options = _conv_options(config, state, "conv.")
    mixer = build(
        options.pop("mechanism"),
        dim=dim,
        glu=config.get("glu", True),
        conv_dim=config.get("conv_dim"),
        dropout=config.get("dropout", 0.0),
        **options,
    )
    refs = map_linear("linear1", "in_proj") | map_linear("linear2", "out_proj") | _conv_refs(mixer, "conv.")
    return load_weights(mixer, state, refs, unused=("conv.conv_bias",))


def convert_conv(case: Mapping[str, Any], params: Mapping[str, Tensor]) -> ConvertedModule[Mixer]:
    """Converts a convolution module alone: LightweightConv*, DynamicConv1dTBC or DynamicConv_scripatable.

    case: kernel_size, num_heads, input_size, kind ("causal" | "centred"); optional cls, padding_l, weight_softmax
    (True), weight_dropout, bias (of the output for lightweight, of the predicted taps for dynamic ones), conv_bias,
    renorm_padding. Other keys are ignored.
    params: weight, bias | weight_linear.*, conv_bias.
    """
    dynamic = str(case["cls"]).startswith("Dynamic") if "cls" in case else "weight_linear.weight" in params
    config = dict(case) | {
        "conv_type": "dynamic" if dynamic else "lightweight",
        "heads": case["num_heads"],
        "causal": _is_causal(case),
    }
    options = _conv_options(config, params, "")
    mixer = build(options.pop("mechanism"), dim=case["input_size"], projected=False, glu=False, **options)
    if dynamic and params["weight_linear.weight"].shape[1] != case["input_size"]:
        # the taps are predicted from a query of another width; use the mixer through `convolve(u, layout, query)`
        query_width = params["weight_linear.weight"].shape[1]
        mixer.tap_map = nn.Linear(query_width, options["heads"] * options["kernel_size"], bias=options["tap_bias"])
    return load_weights(mixer, params, _conv_refs(mixer, ""), unused=("conv_bias",))


def _is_causal(case: Mapping[str, Any]) -> bool:
    if case["kind"] not in ("causal", "centred"):
        raise ValueError(f"kind must be 'causal' or 'centred', got {case['kind']!r}")
    causal = case["kind"] == "causal"
    taps = case["kernel_size"]
    before = taps - 1 if causal else (taps - 1) // 2
    if case.get("padding_l", before) != before:
        raise ValueError(f"a {case['kind']} kernel of {taps} has padding_l {before}, got {case['padding_l']}")
    return causal


def _conv_options(config: Mapping[str, Any], state: Mapping[str, Tensor], prefix: str) -> dict[str, Any]:
    """Returns the mechanism and the options of the convolution. A stored `bias` is used unless the config denies it."""
    kind = config["conv_type"]
    if kind not in _MECHANISM:
        raise ValueError(f"conv_type must be one of {', '.join(_MECHANISM)}, got {kind!r}")
    softmax = config.get("weight_softmax", True)
    options = {
        "mechanism": _MECHANISM[kind],
        "kernel_size": config["kernel_size"],
        "heads": config["heads"],
        "causal": config["causal"],
        "tap_softmax": softmax,
        "tap_dropout": config.get("weight_dropout", 0.0),
    }
    if kind == "lightweight":
        return options | {"conv_bias": config.get("bias", f"{prefix}bias" in state)}
    return options | {
        "tap_bias": config.get("bias", f"{prefix}weight_linear.bias" in state),
        "conv_bias": config.get("conv_bias", False),
        # the original renormalises inside its softmax, so the option does nothing without one
        "renormalise": softmax and config.get("renorm_padding", False),
    }


def _conv_refs(mixer: Mixer, prefix: str) -> dict[str, ParamRef]:
    """Maps the parameters of the convolution, whose names are `prefix` and the name in fairseq."""
    bias = mixer.config.conv_bias
    if mixer.name == "lightconv":
        return {f"{prefix}weight": ParamRef("filters")} | ({f"{prefix}bias": ParamRef("conv_bias")} if bias else {})
    refs = map_linear(f"{prefix}weight_linear", "tap_map", bias=mixer.config.tap_bias)
    return refs | ({f"{prefix}conv_bias": ParamRef("conv_bias")} if bias else {})
