"""What callers of transformers pass to a model, as our models take it: masks, tokens or their vectors, positions."""

import torch
from torch import Tensor

from subquad.interop.huggingface.cache import SubquadCache
from subquad.nn.positions import position_ids as count_positions


def mask_to_padding(mask: Tensor | None, time: int) -> Tensor | None:
    """Returns the padding (batch, time) of the last positions of an attention mask, or None if there is no padding."""
    if mask is None:
        return None
    if mask.ndim != 2:
        raise ValueError(f"attention_mask must be (batch, time), 1 for tokens and 0 for padding, got {mask.ndim} axes")
    padding = mask[:, -time:] == 0
    return padding if bool(padding.any()) else None


def tokens_or_vectors(ids: Tensor | None, vectors: Tensor | None, side: str = "") -> Tensor:
    """Returns the ids (batch, time) or, in their place, the vectors (batch, time, dim) of `inputs_embeds`.

    side: what the names of the two begin with, for messages.
    """
    names = f"{side}input_ids or {side}inputs_embeds"
    if (ids is None) == (vectors is None):
        raise ValueError(f"give {names}" if ids is None else f"give either {names}, not both")
    given = ids if ids is not None else vectors
    assert given is not None
    if vectors is not None and not (vectors.is_floating_point() and vectors.ndim == 3):
        raise ValueError(f"{side}inputs_embeds must be floats (batch, time, dim)")
    return given


def check_positions(
    given: Tensor | None, places: Tensor | None, padding: Tensor | None, cache: SubquadCache | None, tokens: Tensor
) -> None:
    """Refuses positions that are not those that the model counts by itself.

    given: `position_ids` (batch or 1, time); tokens count from 0 in each row, and padding does not count. places:
    `cache_position` (time,); it begins where the cache ends. Neither has to be given.
    """
    time = tokens.shape[1]
    if given is not None:
        start = cache.state.lengths if cache is not None and cache.state is not None else None
        expected = count_positions(padding, time, start, tokens.device)
        differ = given.to(tokens.device) != expected
        if bool((differ if padding is None else differ & ~padding).any()):
            raise ValueError(
                "position_ids differ from the positions of this model, which counts the tokens of each row that "
                "attention_mask does not hide; sequences that are packed into one row have to be rows of their own"
            )
    if places is not None:
        first = cache.seen if cache is not None else 0
        if not torch.equal(places.flatten().cpu(), torch.arange(first, first + time)):
            raise ValueError(f"cache_position must count from {first}: tokens are read in their order, each once")


def choose_cache(cache: object, use_cache: bool | None) -> SubquadCache | None:
    """Returns the given cache, a new one, or None if the model reads the whole sequence and keeps nothing."""
    if cache is None:
        return SubquadCache() if use_cache else None
    if not isinstance(cache, SubquadCache):
        raise ValueError(f"past_key_values is a {type(cache).__name__}, but this model needs a SubquadCache")
    return cache
