"""Linformer: attention to a fixed number of projected keys and values, each a learned mixture of all positions.

Equation:
    E, F (k, N): the first N columns of two learned k x max_length matrices
    compress-first:   K = Linear_k(E x),   V = Linear_v(F x)          the biases enter once per key
    project-first:    K = E Linear_k(x),   V = F Linear_v(x)          the biases are mixed like the tokens
    y_i = sum_s softmax_s(q_i . K_s / sqrt(d)) V_s                    per head, s over the k keys

Cost: O(T k C) time, O(T k) memory. The length is limited to max_length. A key mixes all positions, so the mechanism
cannot be causal; cross-attention keeps k compressed keys and values of its context, whatever its length.

Citation: Wang et al., "Linformer: self-attention with linear complexity", 2020. Compress-first is the authors' code,
project-first their equation; the two differ in the biases only.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from subquad.config import Scale
from subquad.kernels.precision import cast_once
from subquad.mixers.attention import init_xavier
from subquad.mixers.base import Capabilities
from subquad.mixers.layout import Layout
from subquad.mixers.registry import register
from subquad.mixers.softmax import SoftmaxConfig, SoftmaxHeads
from subquad.mixers.state import CrossState


class LinformerConfig(SoftmaxConfig):
    proj_k: int = Field(64, ge=1, description="number k of keys and values after the compression")
    max_length: int = Field(512, ge=1, description="longest sequence (or context); shorter ones use the first columns")
    compress: Literal["compress-first", "project-first"] = Field(
        "compress-first",
        description="compress the tokens and project the result, or project the tokens and compress the result",
    )
    share_kv: bool = Field(False, description="one matrix compresses both keys and values")
    per_head: bool = Field(False, description="a matrix for each head; needs compress='project-first'")
    share_layers: bool = Field(False, description="one matrix compresses in all layers of a stack; needs share_kv=True")
    frozen: bool = Field(False, description="the compression stays as it was initialised")

    def check(self) -> None:
        super().check()
        if self.per_head and self.compress != "project-first":
            raise ValueError("per_head=True needs compress='project-first': before the projection there are no heads")
        if self.share_layers and not self.share_kv:
            raise ValueError("share_layers=True needs share_kv=True: one matrix serves keys and values of all layers")
        if self.rotary:
            raise ValueError("rotary=True is not possible: projected keys mix all positions, so a key has none")


@dataclass
class LinformerContext(CrossState):
    """k, v: (batch, heads, proj_k, d), compressed; their size does not depend on the length of the context."""

    k: Tensor
    v: Tensor


@register("linformer")
class Linformer(SoftmaxHeads[LinformerConfig]):
    capabilities = Capabilities(causal=False, cross=True, grid=False, state="none (cross: projected context)")
    tuned: ClassVar = {"proj_k": Scale(0.5, 2)}
    context_type = LinformerContext
    examples = (
        {},
        {"proj_k": 5, "share_kv": True, "frozen": True},
        {"proj_k": 6, "compress": "project-first", "head_dim": 3, "qkv_bias": False, "out_bias": False},
        {"proj_k": 4, "compress": "project-first", "per_head": True, "share_kv": True},
        {"proj_k": 3, "compress": "project-first", "qkv_bias": False, "out_projection": False},
    )

    compress_v: nn.Parameter | None

    def setup(self) -> None:
        super().setup()
        config = self.config
        self.owner: list[Linformer] = []  # in a list: the layer whose matrices these are registers them, we do not
        heads = (config.heads,) if config.per_head else ()
        shape = (*heads, config.proj_k, config.max_length)
        self.compress_k = nn.Parameter(torch.empty(shape), requires_grad=not config.frozen)
        if config.share_kv:
            self.register_parameter("compress_v", None)
        else:
            self.compress_v = nn.Parameter(torch.empty(shape), requires_grad=not config.frozen)
        self._init_weights()

    def _init_weights(self) -> None:
        for part in self.qkv.weight.split(self.inner) if self.has_maps else ():
            nn.init.xavier_uniform_(part, gain=2**-0.5)
        if isinstance(self.out, nn.Linear):
            init_xavier(self.out)
        for matrix in self._compressions():
            if self.config.per_head:
                nn.init.normal_(matrix, std=0.02)
            else:
                nn.init.xavier_uniform_(matrix, gain=2**-0.5)

    def share_within_stack(self, first: "Linformer") -> None:
        if self.config.share_layers:
            self.share_compression(first)

    @property
    def borrows_weights(self) -> bool:
        return bool(self.owner)

    def share_compression(self, other: "Linformer") -> None:
        """Uses the compression matrices of `other` from now on: its parameters, trained by both layers."""
        ours, theirs = ([tuple(matrix.shape) for matrix in layer._compressions()] for layer in (self, other))
        if ours != theirs:
            raise ValueError(
                f"{self.name}: compression matrices can be shared between layers of the same proj_k, max_length, "
                f"per_head and share_kv only (this layer has {ours}, the other {theirs})"
            )
        del self.compress_k, self.compress_v
        self.owner = [other]

    def mix(self, x: Tensor, layout: Layout) -> tuple[Tensor, None]:
        x = cast_once(x)
        return self.attend_context(x, self.encode_context(x, layout)), None

    def encode_context(self, context: Tensor, layout: Layout) -> LinformerContext:
        time, most = context.shape[1], self.config.max_length
        if time > most:
            raise ValueError(
                f"{self.name}: length {time} is above the maximum of {most}; build it with max_length={time} or more"
            )
        # copied columns, not a slice: a slice is contiguous at max_length only, and compiled graphs specialise on that
        first = torch.arange(time, device=context.device)
        of_keys, *rest = (matrix.index_select(-1, first) for matrix in self._compressions())
        of_values = rest[0] if rest else of_keys
        if self.config.compress == "project-first":
            k, v = self.project_part(context, 1, 3)
            if layout.padding is not None:  # padded positions are zeros, but their projections are the biases
                padding = layout.padding[:, None, :, None]
                k, v = k.masked_fill(padding, 0), v.masked_fill(padding, 0)
            k, v = of_keys @ k, of_values @ v
        elif self.config.share_kv:
            k, v = self.project_part(of_keys @ context, 1, 3)
        else:
            (k,) = self.project_part(of_keys @ context, 1, 2)
            (v,) = self.project_part(of_values @ context, 2, 3)
        return LinformerContext(layout.lengths_of(context), k, v)

    def attend_context(self, x: Tensor, memory: LinformerContext) -> Tensor:
        (q,) = self.project_part(x, 0, 1)
        return self.merge_heads(self.attend(q, memory.k, memory.v))

    def why_no_streaming(self) -> str:
        return f"{self.name} streams only as cross-attention: over its own sequence every key mixes all positions"

    def _compressions(self) -> list[nn.Parameter]:
        owner = self.owner[0] if self.owner else self
        return [owner.compress_k] if owner.compress_v is None else [owner.compress_k, owner.compress_v]
