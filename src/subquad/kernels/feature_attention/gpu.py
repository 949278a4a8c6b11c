"""Linear attention through exponential features as Triton kernels.

Features are never in memory. One kernel sums the keys of every chunk of positions, relative to the chunk's largest y;
`scan/chunks.py` carries these sums from chunk to chunk, or adds them up for all; a last one reads the sums with the
queries and, if causal, forms the pairs within the chunk. The gradients go the same way with the sums over queries, and
compute the features anew: kept are the projections, y, the sums that chunks start from, and four numbers per query.

Sums run in float32. Products are taken in the precision of qkv on tensor cores (`triton_tools.factors`). The constant
eps adds sums over values, which have no scale. Each number is written by one program: equal inputs give equal bits.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from subquad.kernels import tracing
from subquad.kernels.feature_attention import Constant, reference
from subquad.kernels.feature_attention.gpu_gradients import key_gradients, query_gradients, sum_queries
from subquad.kernels.feature_attention.gpu_kernels import read_sums, sum_keys
from subquad.kernels.scan.chunks import carry_future, carry_past
from subquad.kernels.triton_tools import dot_precision, factors

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LACKS = ("wide heads",)
CHUNK = 64
EXACT_CHUNK = 32  # where float32 is multiplied by ordinary instructions, which keep all factors in registers
BLOCKS = 8  # chunks that a program sums where nothing is causal
MOST_FEATURES_READ = 32
SMALLEST = 16  # the smallest side that tl.dot takes


def feature_attention(
    qkv: Tensor, matrix: Tensor, mask: Tensor | None, eps: float, least: float, causal: bool, constant: Constant
) -> Tensor:
    """y (batch, time, heads, d) in the precision of qkv; see the public function. M is a constant by itself."""
    del constant
    qkv = qkv if qkv.stride(-1) == 1 else qkv.contiguous()
    return _forward(qkv, matrix.contiguous(), mask, eps, least, causal)[0]


class Sums(NamedTuple):
    """What queries read, of every chunk if causal, else of all keys: states (.., m * d); vectors (.., m + d + 1), the
    sums of features and of values and the number of keys; reached: log scales at the chunks' edges, or of all."""

    states: Tensor
    vectors: Tensor
    reached: Tensor


class Sizes:
    """The sizes of a problem, and the tiles that fit it."""

    def __init__(self, qkv: Tensor, features: int, causal: bool) -> None:
        self.batch, self.time, _, self.heads, self.width = qkv.shape
        self.features, self.causal, self.dtype = features, causal, qkv.dtype
        self.pairs = self.batch * self.heads
        self.chunk = _chunk(qkv.dtype)
        self.blocks = 1 if causal else BLOCKS
        self.segments = triton.cdiv(self.time, self.chunk * self.blocks)
        tile = min(self.chunk, max(SMALLEST, triton.next_power_of_2(features)))
        self.tiles = triton.cdiv(features, tile)
        self.numbers = self.heads, self.time, features, self.width
        self.scales = self.width**-0.25, math.log(features) / 2
        self.constants = factors(qkv.dtype) | {
            "CHUNK": self.chunk,
            "FEATURES": tile,
            "WIDTH": max(SMALLEST, triton.next_power_of_2(self.width)),
            "num_warps": 8 if self.chunk == EXACT_CHUNK else 4,
            "num_stages": 1,
        }
        # kernels that go over all features themselves have more at once to keep in registers
        self.reading_constants = self.constants | {"FEATURES": min(tile, MOST_FEATURES_READ)}
        self.state_dtype = _state_dtype(qkv.dtype)

    @property
    def chunks(self) -> int:
        return triton.cdiv(self.time, self.chunk)

    def room(self, like: Tensor, entries: int) -> Tensor:
        """Sums of every segment: (pairs, segments, entries) in float32."""
        return like.new_empty(self.pairs, self.segments, entries, dtype=torch.float32)


@torch.library.custom_op("subquad::linear_attention", mutates_args=())
def _forward(
    qkv: Tensor, matrix: Tensor, mask: Tensor | None, eps: float, least: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y (batch, time, heads, d), statistics (3 or 4, pairs, time) in float32, and `Sums`."""
    sizes = Sizes(qkv, matrix.shape[1], causal)
    y = qkv.new_empty(qkv.shape[:2] + qkv.shape[3:])
    statistics = qkv.new_empty(3 + causal, sizes.pairs, sizes.time, dtype=torch.float32)
    sums = _sum_keys(qkv, matrix, mask, sizes)
    if y.numel():
        with torch.cuda.device_of(qkv):
            read_sums[(sizes.pairs * sizes.chunks,)](
                qkv, matrix, _bytes(mask), *sums, y, statistics, sizes.pairs, *sizes.numbers, *qkv.stride()[:4],
                *sizes.scales, eps, least, CAUSAL=causal, **sizes.reading_constants,
            )  # fmt: skip
    return y, statistics, *sums


def _sum_keys(qkv: Tensor, matrix: Tensor, mask: Tensor | None, sizes: Sizes) -> Sums:
    sums = sizes.room(qkv, sizes.features * sizes.width)
    vectors = sizes.room(qkv, sizes.features + sizes.width + 1)
    own = qkv.new_empty(sizes.pairs, sizes.segments, dtype=torch.float32)
    if sums.numel():
        with torch.cuda.device_of(qkv):
            sum_keys[sizes.pairs * sizes.segments, sizes.tiles](
                qkv, matrix, _bytes(mask), sums, vectors, own, *sizes.numbers, *qkv.stride()[:4], *sizes.scales,
                BLOCKS=sizes.blocks, ONE_TILE=sizes.tiles == 1, **sizes.constants,
            )  # fmt: skip
    states, reached = carry_past(sums, own, dtype=sizes.state_dtype)
    vector_states, _ = carry_past(vectors, own, scaled=sizes.features)
    if sizes.causal:
        return Sums(states.states, vector_states.states, reached)
    return Sums(states.last, vector_states.last, reached[:, -1].contiguous())


@torch.library.custom_op("subquad::linear_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    y: Tensor,
    statistics: Tensor,
    states: Tensor,
    vectors: Tensor,
    reached: Tensor,
    qkv: Tensor,
    matrix: Tensor,
    mask: Tensor | None,
    eps: float,
    least: float,
    causal: bool,
    learns: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of qkv, and of W where that learns (else empty)."""
    sizes = Sizes(qkv, matrix.shape[1], causal)
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    sums, d_vectors = (sizes.room(qkv, n) for n in (sizes.features * sizes.width, sizes.features + sizes.width))
    d_qkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    slopes = torch.empty_like(statistics[0])
    by_chunk = (2, sizes.batch, sizes.heads, sizes.chunks, *matrix.shape[1:])
    d_matrix = matrix.new_empty(by_chunk, dtype=torch.float32) if learns else None
    if not y.numel():
        return d_qkv, torch.zeros_like(matrix) if learns else matrix.new_empty(0)
    of_grad, settings = grad.stride()[:3], (*sizes.scales, eps, least)
    with torch.cuda.device_of(qkv):
        sum_queries[sizes.pairs * sizes.segments, sizes.tiles](
            qkv, matrix, grad, y, statistics, reached, slopes, sums, d_vectors, sizes.pairs, *sizes.numbers,
            *qkv.stride()[:2], qkv.stride(3), *of_grad, *settings,
            CAUSAL=causal, BLOCKS=sizes.blocks, **sizes.constants,
        )  # fmt: skip
        if causal:
            d_states = carry_future(sums, reached, dtype=sizes.state_dtype).states
            d_vectors = carry_future(d_vectors, reached, scaled=sizes.features).states
        else:
            d_states, d_vectors = sums.sum(1), d_vectors.sum(1)
        kernels = (query_gradients, states, vectors), (key_gradients, d_states, d_vectors)
        for side, (kernel, own_states, own_vectors) in enumerate(kernels):
            kernel[(sizes.pairs * sizes.chunks,)](
                qkv, matrix, _bytes(mask), grad, statistics, slopes, reached, own_states, own_vectors, d_qkv,
                None if d_matrix is None else d_matrix[side], sizes.pairs, *sizes.numbers, *qkv.stride()[:4],
                *of_grad, *settings, CAUSAL=causal, **sizes.reading_constants,
            )  # fmt: skip
    return d_qkv, d_matrix.sum((0, 1, 3)).to(matrix.dtype) if d_matrix is not None else matrix.new_empty(0)


def _chunk(dtype: torch.dtype) -> int:
    return EXACT_CHUNK if dtype == torch.float32 and dot_precision() == "ieee" else CHUNK


def _state_dtype(dtype: torch.dtype) -> torch.dtype:
    """What products read is kept as they take it."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def _bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.contiguous().view(torch.uint8)


# ---------------------------------------------------------------------- for torch.compile and autograd


@_forward.register_fake
def _(
    qkv: Tensor,
    matrix: Tensor,
    mask: Tensor | None,  # noqa: ARG001
    eps: float,  # noqa: ARG001
    least: float,  # noqa: ARG001
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, time, _, heads, width = qkv.shape
    features, pairs, wide = matrix.shape[1], batch * heads, torch.float32
    chunks = (time + _chunk(qkv.dtype) - 1) // _chunk(qkv.dtype)
    of_chunks = (pairs, chunks) if causal else (pairs,)
    state_dtype = _state_dtype(qkv.dtype) if causal else wide
    return (
        qkv.new_empty(batch, time, heads, width),
        qkv.new_empty(3 + causal, pairs, time, dtype=wide),
        qkv.new_empty(*of_chunks, features * width, dtype=state_dtype),
        qkv.new_empty(*of_chunks, features + width + 1, dtype=wide),
        qkv.new_empty((pairs, chunks + 1) if causal else (pairs,), dtype=wide),
    )


@_backward.register_fake
def _(grad: Tensor, *others: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    qkv, matrix, learns = others[5], others[6], others[-1]
    d_matrix = torch.empty_like(matrix, memory_format=torch.contiguous_format) if learns else matrix.new_empty(0)
    return torch.empty_like(qkv, memory_format=torch.contiguous_format), d_matrix


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    qkv, matrix, mask, ctx.eps, ctx.least, ctx.causal = inputs
    ctx.save_for_backward(*output, qkv, matrix, mask)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:  # nothing depends on y
        return (None,) * 6
    *saved, qkv, matrix, mask = ctx.saved_tensors
    settings = ctx.eps, ctx.least, ctx.causal
    if tracing.differentiates_backward():

        def attend(qkv: Tensor, matrix: Tensor) -> Tensor:
            return reference.feature_attention(qkv, matrix, mask, *settings, Tensor.detach).to(qkv.dtype)

        return *tracing.gradients_of(attend, (qkv, matrix), grad), *(None,) * 4
    learns = ctx.needs_input_grad[1]
    d_qkv, d_matrix = _backward(grad, *saved, qkv, matrix, mask, *settings, learns)
    return d_qkv, d_matrix if learns else None, *(None,) * 4


_forward.register_autograd(_differentiate, setup_context=_keep)
