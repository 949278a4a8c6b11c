"""Landmark attention on a GPU: Triton kernels that walk over time, each reading queries, keys and values once.

Forward: `_summarise` reads what landmarks sum up, by spans of time, `_combine` adds the spans, and `_attend` makes y.
What has the length of the sequence, A, t, a and W, is never stored: only u and two normalisers are. Backward:
`_query_gradients` sums what landmarks get, and then, when that is known, makes the gradients of queries, and
`_key_gradients` those of keys and values. A span is as long as it may be while all multiprocessors have work.

No number is written by two programs, and sums over spans have a fixed order: equal inputs give equal bits. With
TRITON_INTERPRET=1 in the environment before triton is imported, the kernels run on CPU tensors.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from subquad.kernels import tracing
from subquad.kernels.landmark_attention import LARGE, OptWeights, gpu_gradients, gpu_kernels, reference
from subquad.kernels.triton_tools import dot_precision

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LACKS = (LARGE,)
PROGRAMS = 216
"""Programs that run at once: two for each of an A100's multiprocessors, whose registers hold no more."""
SMALLEST = 16
"""The smallest side that tl.dot takes."""


def landmark_attention(
    qkv: Tensor, w_keys: Tensor, w_queries: Tensor, shared: Tensor, opt: OptWeights | None, mask: Tensor | None
) -> Tensor:
    """y (batch, time, heads, d); see the public function."""
    given = (None, None, None, 0.0) if opt is None else opt
    directions, balance, mean_weights, alpha = given
    return _forward(qkv, w_keys, w_queries, shared, directions, balance, mean_weights, mask, alpha)[0]


# ---------------------------------------------------------------------- launches


@dataclass(frozen=True)
class Launches:
    """What the launches of one call share: how work is cut, and the arguments of all kernels."""

    qkv: Tensor
    landmarks: int
    mask: Tensor | None

    @property
    def pairs(self) -> int:
        return self.qkv.shape[0] * self.qkv.shape[3]

    @property
    def tile(self) -> int:
        """Positions that a program works on at a time: as many as its registers hold gradients of."""
        landmarks, width = self.padded
        return 32 if self.qkv.element_size() == 2 and landmarks * width <= 64 * 64 else 16

    @property
    def padded(self) -> tuple[int, int]:
        """c and d as powers of two."""
        sizes = self.landmarks, self.qkv.shape[-1]
        rows, columns = (max(SMALLEST, triton.next_power_of_2(size)) for size in sizes)
        return rows, columns

    @property
    def warps(self) -> int:
        """Of a program: enough for its matrices to fit their registers. float32 needs more of them."""
        landmarks, width = self.padded
        return max(4, landmarks * width // (1024 if self.qkv.element_size() == 2 else 512))

    @property
    def forward_stages(self) -> int:
        """Loads of the next tile begin before this one is done where registers are left for that: not for gradients."""
        return 2 if self.qkv.element_size() == 2 else 1

    @property
    def span(self) -> int:
        tiles = triton.cdiv(self.qkv.shape[1], self.tile)
        return triton.cdiv(tiles, max(1, min(tiles, PROGRAMS // max(1, self.pairs)))) * self.tile

    @property
    def splits(self) -> int:
        return triton.cdiv(self.qkv.shape[1], self.span)

    @property
    def sizes(self) -> dict[str, Any]:
        _, time, _, heads, width = self.qkv.shape
        return {"time": time, "span": self.span, "heads": heads, "count": self.landmarks, "width": width}

    @property
    def strides(self) -> dict[str, int]:
        row, time, part, head, _ = self.qkv.stride()
        return {"qkv_row": row, "qkv_time": time, "qkv_part": part, "qkv_head": head}

    @property
    def constants(self) -> dict[str, Any]:
        landmarks, width = self.padded
        constants = {"HAS_MASK": self.mask is not None, "TIME": self.tile, "LANDMARKS": landmarks, "WIDTH": width}
        return constants | {"PRECISION": dot_precision(), "num_warps": self.warps, "num_stages": 1}

    def partial(self, *shape: int) -> Tensor:
        """Room for what every span of every head sums up."""
        return self.qkv.new_empty(self.pairs, self.splits, *shape, dtype=torch.float32)


def _landmarks(name: str, x: Tensor | None) -> dict[str, Any]:
    """The arguments of a kernel for x (batch, heads, c, d), which may be a view."""
    x = x if x is None or x.stride(-1) == 1 else x.contiguous()
    row, head, landmark = (0, 0, 0) if x is None else x.stride()[:3]
    return {name: x, f"{name}_row": row, f"{name}_head": head, f"{name}_landmark": landmark}


def _plain(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _query_arguments(inputs: tuple[Any, ...], scale: float, launches: Launches) -> dict[str, Any]:
    """Of the kernels that make W: the inputs of the operation as they take them."""
    _, _, w_queries, shared, directions, balance, mean_weights, _, alpha = inputs
    strides = {name: stride for name, stride in launches.strides.items() if name != "qkv_part"}
    return {
        **_landmarks("w", w_queries),
        **_landmarks("f", directions),
        "shared": _plain(shared),
        "balance": _plain(balance),
        "mean_weights": _plain(mean_weights),
        "mean_row": 0 if mean_weights is None or mean_weights.shape[0] == 1 else launches.landmarks,
        "mask": launches.mask,
        "scale": scale,
        "alpha": alpha,
        "WEIGHTED": directions is not None,
        **launches.sizes,
        **strides,
        **launches.constants,
    }


def _over_spans(partial: Tensor, dim: int) -> Tensor:
    return partial.squeeze(dim) if partial.shape[dim] == 1 else partial.sum(dim)


def _begin(qkv: Tensor, w_keys: Tensor, mask: Tensor | None) -> Launches:
    if qkv.stride(-1) != 1:
        qkv = qkv.contiguous()
    return Launches(qkv, w_keys.shape[2], None if mask is None else mask.contiguous().view(torch.uint8))


# ---------------------------------------------------------------------- operations


@torch.library.custom_op("subquad::landmark_attention_triton", mutates_args=())
def _forward(
    qkv: Tensor,
    w_keys: Tensor,
    w_queries: Tensor,
    shared: Tensor,
    directions: Tensor | None,
    balance: Tensor | None,
    mean_weights: Tensor | None,
    mask: Tensor | None,
    alpha: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, u (batch, heads, c, d), and LSE_j l_c and LSE_i s f_c.q_i (batch, heads, 2, c)."""
    launches, scale = _begin(qkv, w_keys, mask), qkv.shape[-1] ** -0.5
    y, u, log_sums = _fake_forward(qkv, w_keys)
    if not y.numel():
        return y, u.zero_(), log_sums.zero_()
    sums, statistics = launches.partial(*w_keys.shape[2:]), launches.partial(4, launches.landmarks)
    inputs = (qkv, w_keys, w_queries, shared, directions, balance, mean_weights, mask, alpha)
    grid, weighted = (launches.pairs, launches.splits), directions is not None
    with torch.cuda.device_of(qkv):
        gpu_kernels.summarise[grid](
            launches.qkv, mask=launches.mask, sums=sums, statistics=statistics, scale=scale, WEIGHTED=weighted,
            **_landmarks("w", w_keys), **_landmarks("f", directions), **launches.sizes, **launches.strides,
            **launches.constants | {"num_stages": launches.forward_stages},
        )  # fmt: skip
        landmarks, width = launches.padded
        gpu_kernels.combine[(launches.pairs,)](
            sums, statistics, u, log_sums, launches.splits, *w_keys.shape[2:],
            WEIGHTED=weighted, LANDMARKS=landmarks, WIDTH=width,
        )  # fmt: skip
        arguments = _query_arguments(inputs, scale, launches) | {"num_stages": launches.forward_stages}
        gpu_kernels.attend[grid](launches.qkv, u=u, log_sums=log_sums, y=y, **arguments)
    return y, u, log_sums


@torch.library.custom_op("subquad::landmark_attention_triton_backward", mutates_args=())
def _backward(
    grad: Tensor,
    u: Tensor,
    log_sums: Tensor,
    qkv: Tensor,
    w_keys: Tensor,
    w_queries: Tensor,
    shared: Tensor,
    directions: Tensor | None,
    balance: Tensor | None,
    mean_weights: Tensor | None,
    mask: Tensor | None,
    alpha: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of qkv; of u and w' (batch, heads, 2, c, d); of b, beta and one more (batch, heads, 3, c); of w and f.

    The last are (1 or 2, batch, heads, c, d).
    """
    launches, scale = _begin(qkv, w_keys, mask), qkv.shape[-1] ** -0.5
    inputs = (qkv, w_keys, w_queries, shared, directions, balance, mean_weights, mask, alpha)
    grid, small = (launches.pairs, launches.splits), w_keys.shape[2:]
    of_queries, vectors = launches.partial(2, *small), launches.partial(3, launches.landmarks)
    late = qkv.new_empty(1 if directions is None else 2, *grid, *small, dtype=torch.float32)
    d_qkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    if d_qkv.numel():
        queries = _query_arguments(inputs, scale, launches)
        queries |= {"grad": grad.contiguous(), "u": u, "log_sums": log_sums}
        with torch.cuda.device_of(qkv):
            gpu_gradients.query_gradients[grid](
                launches.qkv, means=None, d_qkv=None, matrices=of_queries, vectors=vectors, SUMS=True, **queries
            )
            matrices, sums = _over_spans(of_queries, 1), _over_spans(vectors, 1)
            gpu_gradients.query_gradients[grid](
                launches.qkv, means=sums[:, 2], d_qkv=d_qkv, matrices=late[-1], vectors=None, SUMS=False, **queries
            )
            gpu_gradients.key_gradients[grid](
                launches.qkv, u=u, d_u=matrices, d_shared=sums, log_sums=log_sums, mask=launches.mask, d_qkv=d_qkv,
                d_w=late[0], scale=scale, **_landmarks("w", w_keys), **launches.sizes, **launches.strides,
                **launches.constants,
            )  # fmt: skip
    else:
        matrices, sums = of_queries.sum(1), vectors.sum(1)
    of_heads = w_keys.shape[:2]
    return (
        d_qkv,
        matrices.unflatten(0, of_heads),
        sums.unflatten(0, of_heads),
        _over_spans(late, 2).unflatten(1, of_heads),
    )


# ---------------------------------------------------------------------- for torch


@_forward.register_fake
def _fake_forward(qkv: Tensor, w_keys: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, landmarks, width = w_keys.shape
    y = qkv.new_empty(batch, qkv.shape[1], heads, width)
    u, log_sums = (
        qkv.new_empty(batch, heads, *shape, dtype=torch.float32) for shape in ((landmarks, width), (2, landmarks))
    )
    return y, u, log_sums


@_backward.register_fake
def _(grad: Tensor, u: Tensor, log_sums: Tensor, qkv: Tensor, w_keys: Tensor, *others: Any) -> tuple[Tensor, ...]:  # noqa: ARG001
    *leading, landmarks, width = w_keys.shape
    number = 1 if others[2] is None else 2
    shapes = (*leading, 2, landmarks, width), (*leading, 3, landmarks), (number, *leading, landmarks, width)
    d_qkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    return d_qkv, *(qkv.new_empty(shape, dtype=torch.float32) for shape in shapes)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.alpha = inputs
    ctx.save_for_backward(*output[1:], *tensors)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:  # nothing depends on y
        return (None,) * 9
    u, log_sums, *inputs = ctx.saved_tensors
    if tracing.differentiates_backward():

        def attend(qkv: Tensor, w_keys: Tensor, w_queries: Tensor, shared: Tensor, *given: Any) -> Tensor:
            opt = None if given[0] is None else OptWeights(given[0], given[1], inputs[6], ctx.alpha)
            return reference.landmark_attention(qkv, w_keys, w_queries, shared, opt, inputs[7])

        return *tracing.gradients_of(attend, inputs[:6], grad), *(None,) * 3
    d_qkv, matrices, vectors, late = _backward(grad, u, log_sums, *inputs, ctx.alpha)
    d_shared, d_balance, _ = vectors[..., None].unbind(2)
    found = d_qkv, late[0], matrices[:, :, 1], d_shared, late[-1], d_balance
    present = (None if x is None else one.to(x.dtype) for x, one in zip(inputs[:6], found, strict=True))
    return (*present, *(None,) * 3)


_forward.register_autograd(_differentiate, setup_context=_remember)
