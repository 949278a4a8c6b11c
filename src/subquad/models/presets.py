"""The named architectures of the papers, as data: `build_model("evit_tiny_p16", encoder={"mixer": "eva"})`.

Every preset is a complete config. Vocabulary sizes are those of the papers; in training they follow from the data.
Dropout rates are the defaults of the architectures, which recipes change.
"""

from collections.abc import Mapping
from typing import Any

from subquad.config import merge_options, unknown_preset
from subquad.models.base import MODELS, Model, build_from_config

Data = dict[str, Any]

ENCODER_KERNELS = [3, 7, 15, 31, 31, 31, 31]
DECODER_KERNELS = [3, 7, 15, 31, 31, 31]
WMT_VOCAB, WIKI103_VOCAB, GBW_VOCAB = 32768, 267744, 793_302
IWSLT_SOURCE, IWSLT_TARGET = 8848, 6632
BART_VOCAB = 50272
ROBERTA_VOCAB = 50265


def _translation(dim: int, ffn_dim: int, heads: int, dropout: float, attention_dropout: float, shared: bool) -> Data:
    """The transformer of fairseq: six encoder and six decoder layers, post-norm."""
    stack = {"layers": 6, "heads": heads, "ffn_dim": ffn_dim, "dropout": dropout}
    attention = {"name": "softmax", "attention_dropout": attention_dropout}
    return {
        "kind": "encoder-decoder",
        "source_vocab": WMT_VOCAB if shared else IWSLT_SOURCE,
        "target_vocab": WMT_VOCAB if shared else IWSLT_TARGET,
        "shared_embedding": shared,
        "dim": dim,
        "source": {"dropout": dropout},
        "target": {"dropout": dropout},
        "encoder": {**stack, "mixer": attention},
        "decoder": {**stack, "mixer": attention, "cross": attention},
        "head": {"tied": shared},
    }


def _conv_translation(
    size: tuple[int, int, int],
    dropout: float,
    attention: float,
    weight: float,
    input_dropout: float,
    glu: bool,
    shared: bool,
) -> Data:
    """lightconv and dynamicconv of fairseq, dynamic by default. size: dim, ffn_dim, heads."""
    data = _translation(*size, dropout, attention, shared)
    mixer = {"name": "dynamicconv", "glu": glu, "tap_dropout": weight}
    data["encoder"] |= {"layers": 7, "input_dropout": input_dropout, "mixer": {**mixer, "kernel_size": ENCODER_KERNELS}}
    data["decoder"] |= {"input_dropout": input_dropout, "mixer": {**mixer, "kernel_size": DECODER_KERNELS}}
    return data


def _language(vocab: int, mixer: Any, ffn_dim: int = 2048, heads: int = 8, **decoder: Any) -> Data:
    """The language model of fairseq: 512 wide, six layers, pre-norm."""
    stack = {"layers": 6, "heads": heads, "ffn_dim": ffn_dim, "norm": "pre", "dropout": 0.1, "mixer": mixer}
    return {
        "kind": "language-model",
        "vocab": vocab,
        "dim": 512,
        "embedding": {"dropout": 0.1},
        "decoder": stack | decoder,
    }


def _conv_language(ffn_dim: int, heads: int, attention: float) -> Data:
    mixer = {"name": "dynamicconv", "kernel_size": DECODER_KERNELS, "tap_dropout": attention}
    data = _language(GBW_VOCAB, mixer, ffn_dim, heads, final_norm=False)
    return data | {"head": {"tied": False}}


def _adaptive_language(layers: int, layer_drop: float) -> Data:
    """transformer_lm_wiki103 of fairseq: adaptive input and output, tied."""
    bands = {"cutoffs": [20000, 60000], "factor": 4}
    return {
        "kind": "language-model",
        "vocab": WIKI103_VOCAB,
        "dim": 1024,
        "embedding": {"dropout": 0.3, **bands},
        "decoder": {
            "layers": layers,
            "heads": 8,
            "ffn_dim": 4096,
            "norm": "pre",
            "final_norm": False,
            "dropout": 0.3,
            "activation_dropout": 0.1,
            "layer_drop": layer_drop,
            "mixer": {"name": "softmax", "attention_dropout": 0.1},
        },
        "head": {**bands, "tied": True, "tied_maps": True, "dropout": 0.2},
    }


def _linformer_translation(proj_k: int | None) -> Data:
    """crybot/linformer: no biases in attention and feed-forward networks, no output map; None: exact attention."""
    plain = {"name": "softmax", "qkv_bias": False, "out_projection": False}
    compressed = plain | {"name": "linformer", "proj_k": proj_k, "max_length": 256, "compress": "project-first"}
    read = plain if proj_k is None else compressed
    stack = {"layers": 6, "heads": 8, "ffn_dim": 2048, "ffn_bias": False}
    embedding = {"positions": "sin-cos", "scale": False}
    return {
        "kind": "encoder-decoder",
        "source_vocab": BART_VOCAB,
        "target_vocab": BART_VOCAB,
        "shared_embedding": True,
        "dim": 512,
        "source": embedding,
        "target": embedding,
        "encoder": {**stack, "mixer": read},
        "decoder": {**stack, "mixer": plain, "cross": read},
        "head": {"tied": False, "bias": True},
    }


def _linformer_roberta(dim: int, heads: int, layers: int) -> Data:
    """fairseq's examples/linformer: a RoBERTa with 512 positions, compressed to 128 keys and values."""
    mixer = {"name": "linformer", "proj_k": 128, "max_length": 512, "attention_dropout": 0.1}
    stack = {"layers": layers, "heads": heads, "ffn_dim": 4 * dim, "activation": "gelu", "dropout": 0.1, "mixer": mixer}
    embedding = {"positions": "learned", "max_length": 512, "scale": False, "norm": True, "dropout": 0.1}
    return {
        "kind": "masked-language-model",
        "vocab": ROBERTA_VOCAB,
        "dim": dim,
        "embedding": embedding,
        "encoder": stack,
    }


def _evit(dim: int, heads: int, patch_size: int) -> Data:
    """DeiT without a class token, as the efficient-attention library builds it."""
    encoder = {
        "layers": 12,
        "heads": heads,
        "ffn_dim": 4 * dim,
        "activation": "gelu",
        "norm": "pre",
        "norm_eps": 1e-6,
        "drop_path": 0.1,
        "mixer": "softmax",
    }
    return {"kind": "vision", "image_size": 224, "patch_size": patch_size, "dim": dim, "encoder": encoder}


def _pyramid(dims: list[int], depths: list[int], heads: list[int], ratios: list[int]) -> Data:
    """PVTv2. Recipes choose the mechanism of stages 1 to 3; the last has softmax attention."""
    common = {"activation": "gelu", "norm": "pre", "norm_eps": 1e-6, "ffn_conv": True, "mixer": "softmax"}
    stages = [
        {"dim": dim, "layers": depth, "heads": number, "ffn_dim": ratio * dim, **common}
        for dim, depth, number, ratio in zip(dims, depths, heads, ratios, strict=True)
    ]
    return {"kind": "pyramid", "stages": stages, "drop_path": 0.3}


EVIT_SIZES = {"tiny": (192, 3), "small": (384, 6), "base": (768, 12)}
SMALL_STACK = {"layers": 2, "heads": 4, "ffn_dim": 256, "dropout": 0.1, "norm": "pre", "mixer": "softmax"}

PRESETS: dict[str, Data] = {
    "transformer_iwslt_de_en": _translation(512, 1024, 4, 0.1, 0.0, shared=False),
    "transformer_wmt_en_de": _translation(512, 2048, 8, 0.1, 0.0, shared=True),
    "transformer_wmt_en_de_big": _translation(1024, 4096, 16, 0.3, 0.1, shared=True),
    "lightconv_iwslt_de_en": _conv_translation((512, 1024, 4), 0.1, 0.1, 0.1, 0.0, glu=False, shared=False),
    "lightconv_wmt_en_de": _conv_translation((512, 2048, 8), 0.1, 0.0, 0.0, 0.1, glu=True, shared=True),
    "lightconv_wmt_en_de_big": _conv_translation((1024, 4096, 16), 0.3, 0.1, 0.1, 0.1, glu=True, shared=True),
    "lightconv_wmt_en_fr_big": _conv_translation((1024, 4096, 16), 0.1, 0.1, 0.1, 0.1, glu=True, shared=True),
    "lightconv_wmt_zh_en_big": _conv_translation((1024, 4096, 16), 0.2, 0.2, 0.2, 0.1, glu=True, shared=True),
    "lightconv_lm": _conv_language(2048, 8, 0.0),
    "lightconv_lm_gbw": _conv_language(4096, 16, 0.1),
    "transformer_lm": _language(WIKI103_VOCAB, "softmax"),
    "transformer_lm_wiki103": _adaptive_language(16, 0.0),
    "transformer_lm_wiki103_32": _adaptive_language(32, 0.2),
    "primal_lm": _language(WIKI103_VOCAB, {"name": "softmax*5,primal", "rank": 30}),
    "vanilla_translation": _linformer_translation(None),
    **{f"linformer_translation_k{proj_k}": _linformer_translation(proj_k) for proj_k in (32, 64, 128)},
    "linformer_roberta_base": _linformer_roberta(768, 12, 12),
    "linformer_roberta_large": _linformer_roberta(1024, 16, 24),
    **{f"evit_{size}_p{pixels}": _evit(*EVIT_SIZES[size], pixels) for size in EVIT_SIZES for pixels in (8, 16)},
    "pvt_v2_b3": _pyramid([64, 128, 320, 512], [3, 4, 18, 3], [2, 4, 10, 16], [8, 8, 4, 4]),
    # small ones, for two cores and a few minutes
    "translation_small": {
        "kind": "encoder-decoder",
        "source_vocab": 4096,
        "target_vocab": 4096,
        "dim": 128,
        "encoder": SMALL_STACK,
        "decoder": SMALL_STACK,
    },
    "lm_small": {"kind": "language-model", "vocab": 4096, "dim": 128, "decoder": SMALL_STACK},
    "masked_small": {"kind": "masked-language-model", "vocab": 4096, "dim": 128, "encoder": SMALL_STACK},
    "text_small": {"kind": "text-classifier", "vocab": 4096, "num_classes": 2, "dim": 128, "encoder": SMALL_STACK},
    "vision_small": {
        "kind": "vision",
        "image_size": 32,
        "patch_size": 4,
        "num_classes": 10,
        "dim": 128,
        "encoder": SMALL_STACK | {"activation": "gelu"},
    },
}


OTHER_NAMES = {"pvt_medium2": "pvt_v2_b3"}
"""Names that the original programs have for presets, where they are others."""


def preset(name: str, changes: Mapping[str, Any] | None = None) -> Data:
    """Returns the config of a preset with changes. name: the preset's own, or that of an original program."""
    name = OTHER_NAMES.get(name, name) if isinstance(name, str) else name
    if not isinstance(name, str) or name not in PRESETS:
        raise ValueError(unknown_preset(name, list(PRESETS)))
    return merge_options(PRESETS[name], changes or {})


def build_model(name: str, **changes: Any) -> Model:
    """Builds the model of a preset or kind: `build_model("lm_small", vocab=100, decoder={"mixer": "eva"})`."""
    if name in MODELS:
        return build_from_config({"kind": name, **changes})
    return build_from_config(preset(name, changes))
