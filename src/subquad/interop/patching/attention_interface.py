"""Mechanisms without weights as attention implementations of transformers 5.

    subquad.register_attention()
    model = AutoModel.from_pretrained("answerdotai/ModernBERT-base", attn_implementation="subquad_local")
    subquad.register_attention("subquad_local_128", "local", window=128)

Every model works that asks transformers' AttentionInterface for its attention. Rotary positions and shared keys are the
model's. A function of attention has no place for weights: a mechanism that learns some needs `subquad.swap`. Neither
has it a place for states, so a model that generates keeps all keys and values in its cache, which grows, and recomputes
what a mechanism needs of them; `swap` keeps the mechanism's state instead. Cross-attention, and layers with sliding
windows, attend as they do without subquad.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.interop.patching.host import mask_to_padding
from subquad.kernels import tracing
from subquad.mixers import mixer_class
from subquad.mixers.attention import AttentionMixer
from subquad.packages import require_transformers

PREFIX = "subquad_"
DEFAULTS: dict[str, dict[str, Any]] = {
    "local": {},
    "performer": {},
    "eva": {"adaptive": "identity"},
    "lara": {"proposal": "plain-pool"},
    "scatterbrain": {},
}
"""The options with which mechanisms have no weights, for those that `register_attention()` names after them."""
OF_THE_MODEL = ("dim", "heads", "head_dim", "causal", "rotary", "qkv_bias", "out_projection", "out_bias", "dropout")
MORE_THAN_HEADS = {
    "softcap": "caps its logits",
    "s_aux": "has a learned logit that takes weight from all tokens",
    "position_bias": "adds biases of positions to its logits",
}
"""Arguments of attention functions for what no mechanism here does, and what that is."""
MORE_THAN_MASKS = {
    "index_topk": "chooses the keys of each query by an index of its own",
    "keep_window_size": "makes a mask of its own from the tokens",
}
"""Entries of configs of models that do more with a mask before they attend, and what that is."""
SEED = 0
"""Of random features, so that a model computes the same in every process."""


def register_attention(name: str | None = None, mixer: str | None = None, **options: Any) -> list[str]:
    """Registers a mechanism as the attention implementation `name` of transformers, and returns the name.

    options: those of the mechanism. Without arguments: all mechanisms of `DEFAULTS`, as subquad_local,
    subquad_performer and so on.
    """
    transformers = require_transformers("an attention implementation")
    if name is None:
        if mixer is not None or options:
            raise ValueError("a mechanism with options needs a name, such as 'subquad_local_128'")
        return [register_attention(PREFIX + each, each, **own)[0] for each, own in DEFAULTS.items()]
    if mixer is None:
        raise ValueError(f"which mechanism is {name}? register_attention({name!r}, 'local', window=128) would be local")
    known = transformers.AttentionInterface._global_mapping.get(name)
    if name == "eager" or not (known is None or isinstance(known, InterfaceAttention)):
        raise ValueError(f"{name!r} is an attention implementation of transformers; choose another name")
    transformers.AttentionInterface.register(name, InterfaceAttention(name, mixer, options))
    transformers.AttentionMaskInterface.register(name, hand_over_padding)
    return [name]


class InterfaceAttention:
    """A mechanism as transformers calls functions of attention. Layers of the same heads share one mixer."""

    def __init__(self, name: str, mixer: str, options: dict[str, Any]) -> None:
        self.name, self.options = name, options
        self.kind = _without_weights(mixer, options)
        self.mixers: dict[tuple[Any, ...], AttentionMixer[Any]] = {}

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        **extra: Any,
    ) -> tuple[Tensor, None]:
        """query (batch, heads, time, d), key and value (batch, heads or fewer, time', d) -> (batch, time, heads, d).

        Values may be of another width than queries and keys, which the result then has.
        """
        for argument, what in MORE_THAN_HEADS.items():
            if extra.get(argument) is not None:
                raise ValueError(f"{self.name} cannot be the attention of {type(module).__name__}, which {what}")
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        if sliding_window is not None or _reads_context(module, query, key, causal):
            return _attend_exactly(module, query, key, value, attention_mask, scaling, dropout, is_causal)
        batch, heads, time, width = query.shape
        out_width, scaling = value.shape[3], width**-0.5 if scaling is None else scaling
        if out_width != width:  # zeros change no logit and no mixture of values
            width = max(width, out_width)
            query, key, value = (F.pad(part, (0, width - part.shape[3])) for part in (query, key, value))
        mixer = self._mixer(heads, width, causal, dropout, query.device).train(module.training)
        keys = key.shape[2]
        padding = mask_to_padding(attention_mask, batch, keys, causal)
        if keys > time:
            if mixer.reads_past_queries:
                raise ValueError(
                    f"{mixer.name} reads queries of earlier tokens, which a cache of keys and values does not have; "
                    "generate with use_cache=False, or use subquad.swap, which keeps what it needs"
                )
            key, value, padding = _drop_unread(mixer, keys - time, key, value, padding)
            query = F.pad(query, (0, 0, key.shape[2] - time, 0))
        y = mixer.mix_heads(query, key, value, scale=scaling, padding=padding).y
        return y[:, :, -time:, :out_width].transpose(1, 2), None

    def _mixer(self, heads: int, width: int, causal: bool, dropout: float, device: torch.device) -> AttentionMixer[Any]:
        own = {"attention_dropout": dropout} if "attention_dropout" in self.kind.Config.model_fields else {}
        key = (heads, width, causal, device, *own.values())
        if key not in self.mixers:
            sizes = {"dim": heads * width, "heads": heads, "causal": causal}
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(SEED)
                mixer = self.kind(has_maps=False, **sizes, **own | self.options)
            self.mixers[key] = mixer.to(device)
        return self.mixers[key]


def _without_weights(name: str, options: dict[str, Any]) -> type[AttentionMixer[Any]]:
    """The class of a mechanism that needs no weights with these options; others are refused."""
    kind = mixer_class(name)
    instead = "a function of attention has none; subquad.swap gives a model the weights of a mechanism"
    if not issubclass(kind, AttentionMixer):
        raise ValueError(f"{name} does not mix values by queries and keys alone: it needs weights, and {instead}")
    for option in OF_THE_MODEL:
        if option in options:
            raise ValueError(f"{option} follows from the model whose attention this is; leave it out")
    causal = not kind.capabilities.bidirectional
    mixer = kind(has_maps=False, dim=8, heads=2, causal=causal, **options)
    weights = [path for path, _ in mixer.named_parameters()]
    if weights:
        raise ValueError(f"{name} with these options has weights ({', '.join(weights)}), and {instead}")
    return kind


# ---------------------------------------------------------------------- masks


def hand_over_padding(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    config: Any = None,
    **options: Any,
) -> Tensor | None:
    """The mask that transformers makes for a model: (batch, keys) bool, True at tokens, None when all are.

    A mask that says more than causal order and padding, such as a sliding window, is (batch, 1, queries, keys).
    """
    from transformers import masking_utils

    for entry, what in MORE_THAN_MASKS.items():
        if getattr(config, entry, None) is not None:
            raise ValueError(f"subquad's mechanisms cannot be the attention of {config.model_type}, which {what}")
    plain = (masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function)
    if mask_function not in plain:
        sizes = {"q_offset": q_offset, "kv_offset": kv_offset, "mask_function": mask_function}
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return masking_utils.sdpa_mask(
            batch_size, q_length, kv_length, attention_mask=attention_mask, **sizes | options
        )
    causal = mask_function is masking_utils.causal_mask_function
    if causal and (isinstance(q_offset, Tensor) or kv_offset + kv_length != q_offset + q_length):
        raise ValueError("subquad's attention needs a cache that grows with the text, such as DynamicCache")
    mask = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if mask is None or (mask.device.type == "cpu" and tracing.may_read_values(mask) and bool(mask.all())):
        return None
    return mask[:, -kv_length:]


def _reads_context(module: Any, query: Tensor, key: Tensor, causal: bool) -> bool:
    """Whether keys are those of another sequence."""
    if causal:
        return False
    in_decoder = getattr(module, "is_decoder", False) or getattr(module, "is_cross_attention", False)
    return in_decoder or "Cross" in type(module).__name__ or query.shape[2] != key.shape[2]


def _attend_exactly(module: nn.Module, *given: Any) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    query, key, value, mask, scaling, dropout, is_causal = given
    if mask is not None and mask.dim() == 2:
        mask = mask[:, None, None, :]
    return sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, is_causal)


def _drop_unread(
    mixer: AttentionMixer[Any], past: int, key: Tensor, value: Tensor, padding: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Leaves out keys and values before the first that the tokens after `past` positions read.

    Rows begin at different positions if they are padded: what a row does not read becomes padding, which moves no
    window, because a row then begins where a window of its does.
    """
    if mixer.reads_from(past) == 0:
        return key, value, padding
    if padding is None:
        start = mixer.reads_from(past) // mixer.period * mixer.period
        return key[:, :, start:], value[:, :, start:], None
    if padding.device.type != "cpu" or not tracing.may_read_values(padding):
        return key, value, padding  # to ask would be to wait
    tokens = padding.logical_not()
    first = [mixer.reads_from(before) // mixer.period * mixer.period for before in tokens[:, :past].sum(1).tolist()]
    unread = tokens.cumsum(1) <= torch.tensor(first)[:, None]
    padding = padding | unread
    start = min(past, int(padding.logical_not().int().argmax(1).min()))
    return key[:, :, start:], value[:, :, start:], padding[:, start:]
