"""Attention layers of Hugging Face transformers that keep their maps when their attention is swapped.

These are the layers with rotary positions, grouped queries or norms of queries and keys, which no mixer has: Llama and
the decoders that are written like it, and ModernBERT; those with biases of distances, T5; and those with plain maps,
DistilBERT and BART.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from subquad.interop.patching.host import Adapter, Host, Refusal, linear_tensors, split_fused
from subquad.interop.patching.transformers_hosts import TransformersAttention

DECODERS = {
    "llama": "LlamaAttention",
    "mistral": "MistralAttention",
    "qwen2": "Qwen2Attention",
    "qwen3": "Qwen3Attention",
    "gemma": "GemmaAttention",
    "gemma2": "Gemma2Attention",
    "gemma3": "Gemma3Attention",
    "olmo2": "Olmo2Attention",
    "smollm3": "SmolLM3Attention",
    "granite": "GraniteAttention",
}
"""Modules of transformers.models with attention that is written like Llama's, and its class."""


def decoder(layer: Any, _: Sequence[nn.Module]) -> Host:
    """Describes LlamaAttention and those written like it: one map each for q, k and v; k and v may have fewer heads."""
    softcap = getattr(layer, "attn_logit_softcapping", None)
    if softcap is not None:
        raise Refusal(
            f"its logits are capped at {softcap}, which no mixer does; load the model with attn_logit_softcapping=None"
        )
    _refuse_window(layer, getattr(layer, "sliding_window", getattr(layer.config, "sliding_window", None)))
    return _describe(layer, _maps(layer, "q_proj", "k_proj", "v_proj", "o_proj"), layer.attention_dropout)


def modernbert(layer: Any, _: Sequence[nn.Module]) -> Host:
    """Describes ModernBertAttention: one map for q, k and v. Its layers with windows are local already, and stay."""
    _refuse_window(layer, layer.sliding_window)
    tensors = split_fused(linear_tensors("qkv", layer, "Wqkv")) | linear_tensors("out", layer, "Wo")
    return _describe(layer, tensors, layer.attention_dropout)


def distilbert(layer: Any, _: Sequence[nn.Module]) -> Host:
    return _describe(layer, _maps(layer, "q_lin", "k_lin", "v_lin", "out_lin"), layer.dropout.p)


def bart(layer: Any, _: Sequence[nn.Module]) -> Host:
    """Describes the self-attention of BART's encoder, and of its decoder, which is causal."""
    return _describe(layer, _maps(layer, "q_proj", "k_proj", "v_proj", "out_proj"), layer.dropout)


def t5(layer: Any, parents: Sequence[nn.Module]) -> Host:
    """Describes T5Attention. The first layer of a stack has the biases of distances that all add to their logits."""
    stack: Any = next(module for module in reversed(parents) if hasattr(module, "block"))
    layers = tuple(block.layer[0].SelfAttention for block in stack.block)
    first = layers[0]

    def distance_bias(distance: Tensor) -> Tensor:
        sizes = {
            "num_buckets": first.relative_attention_num_buckets,
            "max_distance": first.relative_attention_max_distance,
        }
        buckets = first._relative_position_bucket(distance, bidirectional=not first.is_decoder, **sizes)
        weight = first.relative_attention_bias.weight
        return weight[buckets.to(weight.device)].permute(2, 0, 1)

    host = _describe(layer, _maps(layer, "q", "k", "v", "o"), layer.dropout, width=layer.key_value_proj_dim)
    return replace(host, distance_bias=distance_bias, makes_bias_for=layers if layer is first else ())


def _maps(layer: Any, *paths: str) -> dict[str, Tensor]:
    found = (linear_tensors(name, layer, path) for name, path in zip(("q", "k", "v", "out"), paths, strict=True))
    return {key: tensor for tensors in found for key, tensor in tensors.items()}


def _refuse_window(layer: Any, window: int | None) -> None:
    if window is not None:
        reason = f"it attends within a sliding window of {window} tokens already, which costs no square of the length"
        if layer.is_causal:
            reason += "; a model that is loaded with sliding_window=None has none, if all its layers are alike"
        raise Refusal(reason)


def _describe(layer: Any, tensors: dict[str, Tensor], dropout: float, width: int | None = None) -> Host:
    """Describes a layer by its maps. Where several queries share a key and value, each gets a copy of its own."""
    width = width or getattr(layer, "head_dim", None) or layer.attention_head_size
    for name in [name for name in tensors if name[0] in "kv"]:
        groups = len(tensors["q.weight"]) // len(tensors[name])
        if groups > 1:
            tensors[name] = tensors[name].unflatten(0, (-1, width)).repeat_interleave(groups, 0).flatten(0, 1)
    return Host(
        dim=tensors["out.weight"].shape[0],
        heads=len(tensors["q.weight"]) // width,
        head_width=width,
        tensors=tensors,
        wrap=partial(TransformersAttention, layer=getattr(layer, "layer_idx", None)),
        causal=layer.is_causal,
        attention_dropout=dropout,
        config=layer.config,
        keeps_maps=True,
    )


ADAPTERS: dict[str, Adapter] = {
    **{f"transformers.models.{module}.modeling_{module}.{kind}": decoder for module, kind in DECODERS.items()},
    "transformers.models.modernbert.modeling_modernbert.ModernBertAttention": modernbert,
    "transformers.models.distilbert.modeling_distilbert.DistilBertSelfAttention": distilbert,
    "transformers.models.bart.modeling_bart.BartAttention": bart,
    "transformers.models.t5.modeling_t5.T5Attention": t5,
}

SWIN = "Swin attends within windows of a few patches already, with a learned bias for each pair of places in them"
REFUSED = {
    "transformers.models.swin.modeling_swin.SwinAttention": SWIN,
    "timm.models.swin_transformer.WindowAttention": SWIN,
}
"""Attention layers that are known and never swapped, with the reason."""
