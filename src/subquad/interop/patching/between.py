"""A mixer between the maps of an attention layer of Hugging Face transformers.

The layer keeps its class, its projections, norms and positions, its output map and the names of their weights. Where
it asks transformers for a function that attends, it gets `swapped_attention`, which calls the mixer with queries, keys
and values in heads. The mixer is the layer's submodule `subquad`, so its own weights have names such as
`model.layers.0.self_attn.subquad.mixer.k_map.linear.weight`.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from subquad.interop.patching.copy_weights import CopiedWeights
from subquad.interop.patching.host import ATTENTION_NAME, Host, Refusal, SwappedAttention, mask_to_padding
from subquad.interop.patching.undo import ABSENT, Change
from subquad.mixers import mixer_class
from subquad.mixers.attention import AttentionMixer
from subquad.mixers.windows import WindowMixer

BIAS = "bias.table"
OF_THE_LAYER = ("rotary", "qkv_bias", "head_dim", "out_projection", "out_bias", "dropout")
"""Options of mixers about what a layer that keeps its maps does itself."""


class AttentionBetween(SwappedAttention):
    """The mixer between a layer's maps: queries, keys and values -> mixed values, all (batch, heads, time, d)."""

    mixer: AttentionMixer[Any]

    def __init__(
        self, mixer: AttentionMixer[Any], has_distance_bias: bool = False, makes_bias_for: tuple[nn.Module, ...] = ()
    ) -> None:
        super().__init__(mixer)
        self.has_distance_bias = has_distance_bias
        """Whether the mixer has the biases that the layer would add to its logits, so that it need not compute them."""
        self.makes_bias_for = makes_bias_for
        self.kept: Any = None
        """The layer of a cache that this call of the layer continues with and adds to."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        batch, _, time, _ = q.shape
        if k.shape[2] != time:
            raise ValueError(f"a swapped layer mixes tokens of one sequence, but has {time} queries, {k.shape[2]} keys")
        kept, self.kept = self.kept, None
        given: dict[str, Any] = {
            "scale": scale,
            "padding": mask_to_padding(mask, batch, time, self.mixer.config.causal),
        }
        if kept is None:
            return self.mixer.mix_heads(q, k, v, **given).y
        state = kept.state_before(self.mixer, batch, q.device, q.dtype)
        mixed = self.mixer.mix_heads(q, k, v, **given, state=state)
        kept.keep(mixed.state, time)
        return mixed.y


def swapped_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The mixer of a layer as transformers calls functions that attend: -> (batch, time, heads, d), no weights."""
    between = getattr(module, "subquad", None)
    if between is None:
        raise ValueError(
            "this model was saved with swapped attention: load it with subquad.load_swapped or an Auto class"
        )
    if is_causal is not None and is_causal != between.mixer.config.causal:
        raise ValueError(f"a swapped layer with causal={not is_causal} was called with is_causal={is_causal}")
    return between(query, key, value, attention_mask, scaling).transpose(1, 2), None


def prepare_call(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Before a layer reads tokens, puts the state of its mixer where its cache would have keys and values.

    A layer that computes biases for all pairs of tokens gets an empty tensor in their place, unless it gets them from
    another layer.
    """
    cache = kwargs.get("past_key_values")
    layer.subquad.kept = None
    if cache is not None and layer.subquad.mixer.config.causal:
        from subquad.interop.patching.cache import state_layer

        layer.subquad.kept = kept = state_layer(cache, layer.layer_idx)
        kept.is_open = True
    if not layer.subquad.has_distance_bias or kwargs.get("position_bias") is not None:
        return None
    if not all(hasattr(other, "subquad") for other in layer.subquad.makes_bias_for):
        raise ValueError(
            "the first layer computes the biases of positions for the others: swap all layers of the encoder (and of "
            "the decoder), or leave out the first"
        )
    return args, kwargs | {"position_bias": torch.empty(0)}


def build_between(host: Host, name: str, options: dict[str, object]) -> AttentionMixer[Any] | None:
    """Builds a mixer without maps for the heads of a host; None if the mechanism has no queries, keys and values."""
    kind = mixer_class(name)
    if host.distance_bias is not None and not issubclass(kind, WindowMixer):
        raise Refusal(
            f"it has its positions in the logits, as learned biases of distances, and {name} has no place for them; "
            "mechanisms with windows have one: local, eva and scatterbrain"
        )
    if not issubclass(kind, AttentionMixer):
        return None
    own: dict[str, object] = {"relative": "table"} if host.distance_bias is not None else {}
    for option in (*OF_THE_LAYER, *own):
        if option in options:
            raise ValueError(f"{option} follows from the model, whose maps and positions stay; leave it out")
    if "attention_dropout" in kind.Config.model_fields:
        own["attention_dropout"] = host.attention_dropout
    width = host.heads * host.head_width
    mixer = kind(has_maps=False, dim=width, heads=host.heads, causal=host.causal, **own | options)
    if host.distance_bias is not None:
        assert isinstance(mixer, WindowMixer)
        _copy_bias(host.distance_bias, mixer)
    return mixer.to(host.tensors["q.weight"])


@torch.no_grad()
def _copy_bias(distance_bias: Callable[[Tensor], Tensor], mixer: WindowMixer[Any]) -> None:
    """Copies biases of distances to the table of places in a window. Each layer has its own copy."""
    table = mixer.get_parameter(BIAS)
    _, queries, keys = table.shape
    table.copy_(distance_bias(torch.arange(keys) - mixer.look_back - torch.arange(queries)[:, None]))


def weights_between(layer: nn.Module, host: Host, mixer: AttentionMixer[Any]) -> CopiedWeights:
    """All weights of the layer stay, and those of the mixer are new, except for biases that the host has."""
    new = [name for name in mixer.state_dict() if host.distance_bias is None or name != BIAS]
    return CopiedWeights(tuple(layer.state_dict()), tuple(new), ())


def plan_between(layer: Any, host: Host, mixer: AttentionMixer[Any]) -> list[Change]:
    """Returns the attributes to set so that the mixer works between the maps of the layer."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, swapped_attention)
    config = copy.copy(layer.config)  # the layer's own: the model's decides how other layers attend
    config._attn_implementation_internal = ATTENTION_NAME
    between = AttentionBetween(mixer, host.distance_bias is not None, host.makes_bias_for).train(layer.training)
    return [Change(layer, "subquad", ABSENT, between), Change(layer, "config", layer.config, config)]
