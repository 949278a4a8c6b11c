"""The block that all models consist of: a mixer, cross-attention if there is a context, and a feed-forward network.

    pre-norm:  x <- x + f(norm(x))          post-norm:  x <- norm(x + f(x))          for each of these three f in turn

Dropout applies to the output of f. In training, drop path sets it to zero for whole samples at random.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from subquad.kernels.dropout import dropout
from subquad.mixers import Mixer, MixerOutput, State
from subquad.mixers.layout import Padding, padding_tensor
from subquad.nn.feedforward import FeedForward


class BlockInputs(NamedTuple):
    """What a block receives besides x. It is the same for every block of a stack.

    padding (batch, time) and context_padding (batch, time') are bool tensors, True = ignore. A stack turns
    them into `Padding` once, for all of its blocks.
    """

    padding: Tensor | Padding | None = None
    context: Tensor | None = None
    context_padding: Tensor | Padding | None = None
    grid: tuple[int, int] | None = None


@dataclass
class BlockState:
    """The streaming state of a block: that of its mixer and that of its cross-attention."""

    mixer: State
    cross: State | None

    def reorder(self, index: Tensor, contexts: Tensor | None = None) -> Self:
        """Returns the state of the rows `index` and of the contexts `contexts`; see `StackState.reorder`."""
        cross = self.cross
        if cross is not None and contexts is not None:
            cross = cross.reorder(contexts)
        elif cross is not None and cross.lengths.shape == self.mixer.lengths.shape:
            cross = cross.reorder(index)
        return type(self)(self.mixer.reorder(index), cross)

    def reserve(self, tokens: int) -> Self:
        """Returns the state with room for so many tokens; see `State.reserve`."""
        return type(self)(self.mixer.reserve(tokens), self.cross)

    def with_fixed_size(self) -> Self:
        """Returns the state with shapes that stay; see `State.with_fixed_size`."""
        return type(self)(self.mixer.with_fixed_size(), self.cross)


class Block(nn.Module):
    """Maps x (batch, time, dim) to a tensor of the same shape."""

    def __init__(
        self,
        mixer: Mixer,
        cross: Mixer | None,
        ffn: FeedForward,
        *,
        pre_norm: bool,
        norm_eps: float = 1e-5,
        dropout: float = 0.0,
        input_dropout: float = 0.0,
        drop_path: float = 0.0,
    ) -> None:
        """input_dropout: the dropout rate of the mixer's input."""
        super().__init__()
        if cross is not None and (reason := cross.why_no_cross()) is not None:
            raise ValueError(reason)
        dim = mixer.config.dim
        self.pre_norm, self.dropout, self.input_dropout, self.drop_path = pre_norm, dropout, input_dropout, drop_path
        self.mixer_norm, self.mixer = nn.LayerNorm(dim, eps=norm_eps), mixer
        self.cross_norm = nn.LayerNorm(dim, eps=norm_eps) if cross is not None else None
        self.cross = cross
        self.ffn_norm, self.ffn = nn.LayerNorm(dim, eps=norm_eps), ffn

    def init_state(self, batch: int, device: torch.device | None, dtype: torch.dtype | None) -> BlockState:
        cross = self.cross.init_state(batch, device, dtype) if self.cross is not None else None
        return BlockState(self.mixer.init_state(batch, device, dtype), cross)

    def forward(
        self, x: Tensor, inputs: BlockInputs, state: BlockState | None = None
    ) -> tuple[Tensor, BlockState | None, Tensor | None]:
        """Returns x, the state for the next call if a state was given, and the mixer's regulariser (batch,) or None."""
        given = dropout(self._normalise_input(self.mixer_norm, x), self.input_dropout, self.training)
        mixed = self.mixer(
            given, padding=inputs.padding, grid=inputs.grid, state=state.mixer if state is not None else None
        )
        x = self._add_residual(self.mixer_norm, x, mixed.y)
        read = None
        if self.cross is not None:
            assert self.cross_norm is not None
            read = self._cross_attend(
                self._normalise_input(self.cross_norm, x), inputs, state.cross if state is not None else None
            )
            x = self._add_residual(self.cross_norm, x, read.y)
        x = self._add_residual(self.ffn_norm, x, self.ffn(self._normalise_input(self.ffn_norm, x), inputs.grid))
        if state is None:
            return x, None, mixed.aux
        return x, BlockState(mixed.state, read.state if read is not None else None), mixed.aux

    def _cross_attend(self, x: Tensor, inputs: BlockInputs, memory: State | None) -> MixerOutput:
        """Applies cross-attention. Rows that share a stored context are adjacent, and attend to it as one long row."""
        assert self.cross is not None
        shape, padding = x.shape, padding_tensor(inputs.padding)
        if memory is not None and inputs.context is None:
            x = x.reshape(memory.lengths.shape[0], -1, shape[2])
            padding = padding.reshape(x.shape[:2]) if padding is not None else None
        read: MixerOutput = self.cross(
            x, context=inputs.context, padding=padding, context_padding=inputs.context_padding, state=memory
        )
        return read._replace(y=read.y.view(shape))

    def _normalise_input(self, norm: nn.Module, x: Tensor) -> Tensor:
        return norm(x) if self.pre_norm else x

    def _add_residual(self, norm: nn.Module, x: Tensor, change: Tensor) -> Tensor:
        change = dropout(change, self.dropout, self.training)
        if self.training and self.drop_path:
            kept = torch.rand(x.shape[0], 1, 1, device=x.device) >= self.drop_path
            change = change * kept / (1 - self.drop_path)
        return x + change if self.pre_norm else norm(x + change)
