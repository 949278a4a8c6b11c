"""What callers of transformers pass to a model, as our models take it, and the hidden states that they ask for."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from subquad.interop.huggingface.cache import SubquadCache
from subquad.mixers.layout import Padding
from subquad.nn.block import BlockInputs
from subquad.nn.positions import position_ids as count_positions
from subquad.nn.stack import Stack, StackOutput

HiddenStates = tuple[Tensor, ...]
"""What transformers calls so: what enters the first block of a stack, and what every block makes of it."""


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


# ---------------------------------------------------------------------- hidden states


@contextmanager
def record_hidden_states(model: nn.Module, wanted: bool) -> Iterator[Mapping[nn.Module, HiddenStates]]:
    """Yields the hidden states of each stack that is called while the context is open; nothing if they are not wanted.

    The states of a stack of n blocks are n + 1 tensors (batch, time, dim): its input, the outputs of its blocks but the
    last, and its output, after the final norm where there is one. A block that training leaves out repeats its input.
    """
    found: dict[nn.Module, HiddenStates] = {}
    hooks = []
    for stack in model.modules() if wanted else ():
        if isinstance(stack, Stack):
            outputs: dict[nn.Module, Tensor] = {}
            hooks += [block.register_forward_hook(_keep_output(outputs)) for block in stack.blocks]
            hooks.append(stack.register_forward_hook(_gather(outputs, found)))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _keep_output(outputs: dict[nn.Module, Tensor]) -> Any:
    def hook(block: nn.Module, given: Any, output: tuple[Any, ...]) -> None:  # noqa: ARG001
        outputs[block] = output[0]

    return hook


def _gather(outputs: dict[nn.Module, Tensor], found: dict[nn.Module, HiddenStates]) -> Any:
    def hook(stack: Stack, given: tuple[Tensor, BlockInputs, Any], output: StackOutput) -> None:
        x, inputs = given[:2]
        # blocks see the tokens of padded rows at the front, and others see them where they were
        rows = Padding.of(inputs.padding) if inputs.padding is not None and inputs.grid is None else None
        states = [x]
        for block in list(stack.blocks)[:-1]:
            after = outputs.get(block)
            states.append(states[-1] if after is None else after if rows is None else rows.from_front(after))
        found[stack] = (*states, output.x) if len(stack.blocks) else (output.x,)
        outputs.clear()

    return hook
