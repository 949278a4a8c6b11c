"""Keeps our streaming state where transformers keeps keys and values."""

from typing import NoReturn

import torch
from torch import Tensor
from transformers import Cache

from subquad.nn.stack import StackState


class SubquadCache(Cache):
    """state: the state of the blocks, None before the first token. seen: how many positions were read, with padding."""

    def __init__(self) -> None:
        super().__init__(layers=[])  # the layers of transformers stay empty
        self.state: StackState | None = None
        self.seen = 0

    def advance(self, state: StackState | None, positions: int) -> None:
        self.state, self.seen = state, self.seen + positions

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - all layers have read the same
        return self.seen

    def get_max_length(self, layer_idx: int | None = None) -> int:  # noqa: ARG002
        return -1  # there is no limit

    def reset(self) -> None:
        self.state, self.seen = None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.state is not None:
            self.state = self.state.reorder(beam_idx.to(torch.int64))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            rows = torch.arange(len(self.state.lengths), device=self.state.lengths.device)
            self.reorder_cache(rows.repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> NoReturn:  # noqa: ARG002
        raise ValueError("a streaming state cannot forget its last tokens; assisted decoding needs use_cache=False")

    @property
    def batch_size(self) -> int:
        return -1 if self.state is None else len(self.state.lengths)

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return self.state is not None

    @property
    def is_croppable(self) -> bool:
        return False


def choose_cache(cache: object, use_cache: bool | None) -> SubquadCache | None:
    """Returns the given cache, a new one, or None if the model reads the whole sequence and keeps nothing."""
    if cache is None:
        return SubquadCache() if use_cache else None
    if not isinstance(cache, SubquadCache):
        raise ValueError(f"past_key_values is a {type(cache).__name__}, but this model needs a SubquadCache")
    return cache
