"""What transformers calls hidden states: what enters the first block of a stack, and what every block makes of it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from subquad.mixers.layout import Padding
from subquad.nn.block import BlockInputs
from subquad.nn.stack import Stack, StackOutput

HiddenStates = tuple[Tensor, ...]


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
