"""The attention layers of Hugging Face transformers: BERT, RoBERTa, ViT, DeiT and GPT-2.

They are recognised by the names of their classes, and read through their attributes, so transformers is not imported.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from subquad.interop.patching.host import (
    Adapter,
    Host,
    Refusal,
    SwappedAttention,
    linear_tensors,
    mask_to_padding,
    split_fused,
)
from subquad.mixers import Mixer


class TransformersAttention(SwappedAttention):
    """A mixer with the interface of transformers' attention. It returns no attention weights."""

    def __init__(self, mixer: Mixer, layer: int | None = None) -> None:
        """layer: the number of the layer in a cache."""
        super().__init__(mixer)
        self.layer = layer

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, past_key_values: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        batch, time = hidden_states.shape[:2]
        padding = mask_to_padding(attention_mask, batch, time, self.mixer.config.causal)
        if past_key_values is None:
            return self.mixer(hidden_states, padding=padding).y, None
        return self._continue(hidden_states, padding, past_key_values), None

    def _continue(self, x: Tensor, padding: Tensor | None, cache: Any) -> Tensor:
        """Continues after the tokens in the cache."""
        from subquad.interop.patching.cache import state_layer

        assert self.layer is not None
        kept = state_layer(cache, self.layer)
        mixed = self.mixer(x, padding=padding, state=kept.state_before(self.mixer, x.shape[0]))
        kept.keep(mixed.state, x.shape[1])
        return mixed.y


def bert(layer: Any, _: Sequence[nn.Module]) -> Host:
    """Describes BertAttention: `self` has q, k and v; `output` has the output map, dropout, residual sum and norm."""
    inner = layer.self
    tensors = linear_tensors("q", inner, "query") | linear_tensors("k", inner, "key")
    tensors |= linear_tensors("v", inner, "value") | linear_tensors("out", layer.output, "dense")
    if getattr(inner, "position_embedding_type", "absolute") != "absolute":
        raise Refusal(f"its {inner.position_embedding_type} positions enter the logits")
    return Host(
        dim=tensors["out.weight"].shape[0],
        heads=inner.num_attention_heads,
        head_width=inner.attention_head_size,
        tensors=tensors,
        wrap=partial(TransformersAttention, layer=inner.layer_idx),
        attention="self",
        to_identity=("output.dense",),
        causal=bool(inner.is_causal),
        attention_dropout=inner.dropout.p,
        config=inner.config,
    )


def vit(layer: Any, _: Sequence[nn.Module]) -> Host:
    """Describes ViTAttention, which is one module. Its tokens are no grid, because of the class token."""
    maps = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "o_proj"}
    tensors = {key: value for name, path in maps.items() for key, value in linear_tensors(name, layer, path).items()}
    return Host(
        dim=tensors["out.weight"].shape[0],
        heads=layer.num_attention_heads,
        head_width=layer.head_dim,
        tensors=tensors,
        wrap=TransformersAttention,
        attention_dropout=layer.attention_dropout,
    )


def gpt2(layer: Any, _: Sequence[nn.Module]) -> Host:
    """Describes GPT2Attention, which is causal, with one map for q, k and v. Weights are stored as (columns, rows)."""
    tensors = split_fused(_conv1d_tensors("qkv", layer.c_attn)) | _conv1d_tensors("out", layer.c_proj)
    scale = layer.scaling * layer.head_dim**0.5  # not 1 if the config scales logits by the number of the layer
    for name in ("q.weight", "q.bias"):
        tensors[name] = tensors[name] * scale
    return Host(
        dim=layer.embed_dim,
        heads=layer.num_heads,
        head_width=layer.head_dim,
        tensors=tensors,
        wrap=partial(TransformersAttention, layer=layer.layer_idx),
        causal=True,
        attention_dropout=layer.attn_dropout.p,
        dropout=layer.resid_dropout.p,
        config=layer.config,
    )


def _conv1d_tensors(name: str, found: Any) -> dict[str, Tensor]:
    if type(found).__name__ != "Conv1D":
        raise Refusal(f"its map {name} should be a Conv1D, but it is a {type(found).__name__}")
    return {f"{name}.weight": found.weight.detach().t(), f"{name}.bias": found.bias.detach()}


ADAPTERS: dict[str, Adapter] = {
    "transformers.models.bert.modeling_bert.BertAttention": bert,
    "transformers.models.roberta.modeling_roberta.RobertaAttention": bert,
    "transformers.models.vit.modeling_vit.ViTAttention": vit,
    "transformers.models.deit.modeling_deit.DeiTAttention": vit,
    "transformers.models.gpt2.modeling_gpt2.GPT2Attention": gpt2,
}
