"""Scores of primal attention as Triton kernels.

A program takes the queries or the keys of one head, and a segment of chunks of CHUNK positions. Running sums go by
chunks: one kernel sums every chunk, `scan/chunks.py` carries the sums from chunk to chunk, and the next one adds them
to the running sums within the chunk. The gradient of x is a running sum from the end, and goes the same way.

Sums and norms run in float32, products with W in the precision of qk on tensor cores (`triton_tools.factors`).
Each number is written by one program: equal inputs give equal bits.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from subquad.kernels import tracing
from subquad.kernels.primal_scores import SMALLEST_NORM, reference
from subquad.kernels.primal_scores.gpu_kernels import project, score_gradients, sum_chunks
from subquad.kernels.scan.chunks import carry_future, carry_past
from subquad.kernels.triton_tools import dot_precision, factors

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LACKS = ("large tiles",)
CHUNK = 64
EXACT_CHUNK = 32  # where float32 is multiplied by ordinary instructions, which keep all factors in registers
BLOCKS = 8  # chunks of a segment where nothing is causal
SMALLEST = 16  # the smallest side that tl.dot takes


def primal_scores(qk: Tensor, weights: Tensor, lengths: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """Scores in the precision of qk, and mean squares; see the public function."""
    qk = qk if qk.stride(-1) == 1 else qk.contiguous()
    scores, squares, *_ = _forward(qk, weights.contiguous(), lengths, causal)
    return scores, squares


class Sizes:
    """The sizes of a problem, and the tiles that fit it."""

    def __init__(self, qk: Tensor, weights: Tensor, causal: bool) -> None:
        self.batch, self.time, _, self.heads, self.width = qk.shape
        self.rank, self.sides = weights.shape[-1], 2 * self.heads
        self.chunk = EXACT_CHUNK if qk.dtype == torch.float32 and dot_precision() == "ieee" else CHUNK
        blocks = 1 if causal else BLOCKS
        self.segments = triton.cdiv(self.time, blocks * self.chunk)
        self.grid = self.batch * self.segments, self.sides
        of_batch = 0 if weights.shape[0] == 1 else weights.stride(0)
        self.numbers = self.heads, self.time, self.width, self.rank, *qk.stride()[:4], of_batch
        self.constants = factors(qk.dtype) | {
            "BLOCKS": blocks,
            "CHUNK": self.chunk,
            "WIDTH": max(SMALLEST, triton.next_power_of_2(self.width)),
            "RANK": max(SMALLEST, triton.next_power_of_2(self.rank)),
            "SMALLEST_SQUARE": SMALLEST_NORM**2,
            "num_stages": 1,
        }

    def chunk_sums(self, like: Tensor) -> Tensor:
        """Of every chunk: (batch * 2 heads, chunks, d) in float32."""
        return like.new_empty(self.batch * self.sides, self.segments, self.width, dtype=torch.float32)


@torch.library.custom_op("subquad::primal_scores", mutates_args=())
def _forward(
    qk: Tensor, weights: Tensor, lengths: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores (batch, time, heads, 2 s), mean squares (batch, heads, s) and, if causal, what each chunk starts from
    (batch * 2 heads, chunks, d) and the log scales of that, zeros."""
    sizes = Sizes(qk, weights, causal)
    scores = qk.new_empty(sizes.batch, sizes.time, sizes.heads, 2 * sizes.rank)
    squares = weights.new_empty(sizes.batch, sizes.segments, 2, sizes.heads, sizes.rank)
    starts = reached = weights.new_empty(0)
    if not scores.numel():
        return scores, squares.sum((1, 2)), starts, reached.clone()
    with torch.cuda.device_of(qk):
        if causal:
            sums = sizes.chunk_sums(qk)
            sum_chunks[sizes.grid](qk, sums, *sizes.numbers[:3], *qk.stride()[:4], **_only(sizes, "CHUNK", "WIDTH"))
            (starts, _), reached = carry_past(sums, sums.new_zeros(sums.shape[:2]))
        project[sizes.grid](
            qk, weights, starts if causal else None, lengths, scores, squares, *sizes.numbers, **sizes.constants
        )
    number = sizes.time if lengths is None else lengths[:, None, None]
    return scores, squares.sum((1, 2)) / number, starts, reached if causal else reached.clone()


@torch.library.custom_op("subquad::primal_scores_backward", mutates_args=())
def _backward(
    grad: Tensor,
    grad_squares: Tensor,
    starts: Tensor,
    reached: Tensor,
    qk: Tensor,
    weights: Tensor,
    lengths: Tensor | None,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of qk and W."""
    sizes = Sizes(qk, weights, causal)
    d_qk = torch.empty_like(qk, memory_format=torch.contiguous_format)
    by_segment = sizes.batch, sizes.segments, *weights.shape[1:]
    d_weights = weights.new_empty(by_segment)
    if not d_qk.numel():
        return d_qk, torch.zeros_like(weights)
    given = qk, weights, starts if causal else None, lengths, grad.contiguous(), grad_squares.contiguous()
    with torch.cuda.device_of(qk):
        ends = None
        if causal:
            sums = sizes.chunk_sums(qk)
            score_gradients[sizes.grid](*given, None, None, sums, d_weights, *sizes.numbers, **sizes.constants)
            ends = carry_future(sums, reached).states
        score_gradients[sizes.grid](
            *given, ends, d_qk, None, None if causal else d_weights, *sizes.numbers, **sizes.constants
        )
    return d_qk, d_weights.sum((0, 1))[None] if weights.shape[0] == 1 else d_weights.sum(1)


def _only(sizes: Sizes, *names: str) -> dict[str, Any]:
    return {name: sizes.constants[name] for name in names}


# ---------------------------------------------------------------------- for torch.compile and autograd


@_forward.register_fake
def _(
    qk: Tensor,
    weights: Tensor,
    lengths: Tensor | None,  # noqa: ARG001
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, time, _, heads, width = qk.shape
    rank = weights.shape[-1]
    chunk = EXACT_CHUNK if qk.dtype == torch.float32 and dot_precision() == "ieee" else CHUNK
    chunks, pairs = (time + chunk - 1) // chunk, batch * 2 * heads
    return (
        qk.new_empty(batch, time, heads, 2 * rank),
        weights.new_empty(batch, heads, rank),
        weights.new_empty((pairs, chunks, width) if causal else (0,)),
        weights.new_empty((pairs, chunks + 1) if causal else (0,)),
    )


@_backward.register_fake
def _(grad: Tensor, *others: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    qk, weights = others[3], others[4]
    return torch.empty_like(qk, memory_format=torch.contiguous_format), weights.new_empty(weights.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    qk, weights, lengths, ctx.causal = inputs
    ctx.save_for_backward(*output[2:], qk, weights, lengths)


def _differentiate(ctx: Any, grad: Tensor, grad_squares: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    starts, reached, qk, weights, lengths = ctx.saved_tensors
    if tracing.differentiates_backward():

        def score(qk: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
            scores, squares = reference.primal_scores(qk, weights, lengths, ctx.causal)
            return scores.to(qk.dtype), squares

        return *tracing.gradients_of(score, (qk, weights), grad, grad_squares), None, None
    return *_backward(grad, grad_squares, starts, reached, qk, weights, lengths, ctx.causal), None, None


_forward.register_autograd(_differentiate, setup_context=_keep)
