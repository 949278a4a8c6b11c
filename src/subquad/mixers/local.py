"""Local attention: softmax attention inside windows.

Equation:
    y_i = sum_{j in W(i)} softmax_j(q_i . k_j / sqrt(d) + b(i, j)) v_j
    W(i): the window of i, a block of w tokens or w x w cells, the first of which begins with the first token; with
    overlap also max(1, floor(w / 2)) tokens or cells on every side. What lies outside the sequence or grid is no key,
    and without b windows are no larger than a grid is long or wide.
    b: none, a learned table, or T5 buckets, by the places of i and j. Causal: the same windows with later keys masked.

Cost: O(T w C) time, O(T (C + heads w)) memory. Streaming keeps one window: O(w) per token.

Citation: the block-local attention of Parmar et al., "Image Transformer", ICML 2018, in the form of the
efficient-attention library.
"""

from typing import ClassVar

import torch
from torch import Tensor

from subquad.config import Scale
from subquad.kernels.window_attention import window_attention
from subquad.mixers.base import Capabilities
from subquad.mixers.layout import Layout
from subquad.mixers.registry import register
from subquad.mixers.state import advanced
from subquad.mixers.windows import WindowConfig, WindowMixer, WindowState, crop


class LocalConfig(WindowConfig):
    pass


@register("local")
class Local(WindowMixer[LocalConfig]):
    capabilities = Capabilities(causal=True, cross=False, grid=True, state="one window, O(1)", averages=True)
    tuned: ClassVar = {"window": Scale(0.5, 2)}
    state_type = WindowState
    published: ClassVar = {"imagenet": {"window": 7, "dims": 2, "relative": "table"}}
    examples = (
        {"window": 4},
        {"window": 5, "overlap": True},
        {"window": 4, "relative": "table", "overlap": True},
        {"window": 3, "relative": "t5"},
        {"window": 4, "rotary": True},
    )

    def setup(self) -> None:
        super().setup()
        self.max_step = self.period = self.config.window

    def window_on(self, shape: tuple[int, ...]) -> int:
        """Beyond a grid there is nothing to attend to: a larger window is the grid itself."""
        if len(shape) == 1 or self.bias is not None:
            return super().window_on(shape)
        return min(self.config.window, max(shape))

    def look_on(self, shape: tuple[int, ...]) -> tuple[int, int]:
        if len(shape) == 1 or self.bias is not None:
            return super().look_on(shape)
        return min(self.look_back, max(shape)), min(self.look_forward, max(shape))

    def mix(self, x: Tensor, layout: Layout) -> tuple[Tensor, None]:
        shape = self.shape_of(x, layout)
        x, windows, mask = self.pad_to_windows(x, layout, shape)
        qkv = self.by_head(self.projections(x))
        y = window_attention(qkv, windows, self.bias_values(windows), mask)
        return crop(self.project_out(y), windows.shape, shape), None

    def reads_from(self, start: int) -> int:
        return max(0, start // self.period * self.period - self.look_back)

    def new_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> WindowState:
        return WindowState(*self.new_window(batch, device, dtype))

    def step(self, x: Tensor, new: Tensor | None, state: WindowState) -> tuple[Tensor, WindowState]:
        q, k, v = self.project(x, state.lengths)
        k, v = torch.cat([state.k, k], 2), torch.cat([state.v, v], 2)
        y = self.stream_window(q, k, state.lengths).softmax(-1).to(v.dtype) @ v
        return self.merge_heads(y), WindowState(advanced(state.lengths, new, x.shape[1]), *self.slide(state, k, v, new))
