"""Keeps the streaming state of a swapped layer where transformers keeps keys and values, so that `generate` works."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, StaticLayer

from subquad.mixers import Mixer, State


class StateLayer(DynamicLayer):
    """A layer of a transformers cache that holds the state of a mixer in place of keys and values."""

    is_croppable = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.state: State | None = None
        self.seen = 0
        """The number of positions that were read, including padding, as masks and position ids count them."""
        self.is_open = False
        """Whether the swapped layer that the state belongs to is reading tokens now."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of the new tokens alone: a mixer knows the others by its state."""
        if not self.is_open:
            raise ValueError("this layer of the cache belongs to a swapped layer and holds no keys and values")
        return key_states, value_states

    def state_before(self, mixer: Mixer, batch: int, *like: Any) -> State | None:
        """The state to go on from. In training there is none, because it would have no gradient.

        like: device and dtype of a new state, where the mixer has no parameters to tell them.
        """
        if self.seen and (mixer.training or self.state is None):
            raise ValueError("a swapped layer keeps no cache in training: call model.eval(), or give use_cache=False")
        if mixer.training:
            return None
        return self.state if self.state is not None else mixer.init_state(batch, *like)

    def keep(self, state: State | None, tokens: int) -> None:
        """Keeps the state after so many tokens more."""
        self.state, self.seen, self.is_open = state, self.seen + tokens, False

    def get_seq_length(self) -> int:
        return self.seen

    def reset(self) -> None:
        self.state, self.seen = None, 0

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError(
                "the state of a swapped layer cannot forget its last tokens, which assisted decoding would need"
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.batch_select_indices(self._rows(self.state).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.state is not None:
            rows = self._rows(self.state)
            self.state = self.state.reorder(rows[indices.to(rows.device)])

    @staticmethod
    def _rows(state: State) -> Tensor:
        return torch.arange(len(state.lengths), device=state.lengths.device)


def state_layer(cache: Any, number: int) -> StateLayer:
    """Returns the cache layer of the swapped layer `number`, which replaces an empty layer for keys and values."""
    cache = getattr(cache, "self_attention_cache", cache)  # decoders with cross-attention have two caches
    while len(cache.layers) <= number:
        cache.layers.append(cache.layer_class_to_replicate())
    found = cache.layers[number]
    if isinstance(found, StaticLayer):
        raise ValueError("a swapped layer needs a cache that grows with the text; leave out cache_implementation")
    if not isinstance(found, StateLayer):
        if found.get_seq_length() > 0:
            raise ValueError(f"layer {number} of the cache was filled before the layer was swapped; use a fresh cache")
        cache.layers[number] = found = StateLayer()
    return found
