"""EVA: attention in a window, with summaries of chunks standing in for everything else.

Equation, per head, with s = d^-1/2 and phi(w, t) = s w.t - s |t|^2 / 2:
    chunk c:  k~_c = K(mean of its keys), q~_c = Q(mean of its queries), omega_c = mu_c (+ N(0, 1) in training)
              beta_c = sum_{j in c} softmax_j(phi(omega_c, k_j)) v_j
    y_i = sum_j A_ij v_j + sum_c A_ic beta_c,   A_i = softmax of [s q_i.k_j + b(i, j), j in W(i) | s q_i.k~_c, all c]
Encoder variant: windows may overlap on both sides, and chunks overlap alike; mu = (q~ + k~) / 2.
Decoder variant: windows may reach one window back; mu = q~ + k~; causal: only chunks that ended before i's chunk count.

This is exact where the window w divides the length T and chunks do not overlap. Ragged ends are those of the original:
the sequence is filled up with empty cells to whole windows, P = ceil(T / w) w cells, and cut from its first cell on
into chunks of r cells. r is chunk_size (in the decoder variant by default the window) or max(1, floor(P / landmarks));
by default landmarks are 49, and r is at least min(8, P) on a sequence.
A remainder of less than r cells is a chunk of its own, or no chunk when chunks overlap. A chunk's mean is the sum over
its tokens, divided by the number of its cells up to P, plus 2 e when chunks reach e cells further on both sides: empty
cells count as zeros. A chunk without any token has k~_c = K(0) and beta_c = 0, and takes its weight A_ic like the
others.

On a grid all this holds along both axes, with r = chunk_size or max(1, floor(sqrt(P_H P_W / landmarks))), but for two
things: a mean counts as zeros only the cells with which overlapping chunks reach beyond all whole windows and chunks,
no other empty ones, and a chunk without any token does not exist.

Cost: O(T (w + M) C) time for M chunks, O(T (C + heads (w + M))) memory; a fixed chunk size r makes M = T / r.
Streaming keeps a window and one summary for each finished chunk: O(w + T / r) per token.

Citation: Zheng et al., "Efficient attention via control variates", ICLR 2023.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from subquad.config import Scale
from subquad.kernels import tracing
from subquad.kernels.chunk_values import chunk_means, chunk_values, gathered_chunk_values
from subquad.kernels.dispatch import implementation
from subquad.kernels.masking import keep
from subquad.kernels.precision import at_least_float32
from subquad.kernels.window_attention import Summaries, window_attention
from subquad.mixers import noise
from subquad.mixers.attention import HeadMap, init_small, init_xavier
from subquad.mixers.base import Capabilities
from subquad.mixers.chunks import ChunkCounts, chunk_length, cut, side_by_side, sums_of_tokens, whole_windows
from subquad.mixers.layout import Layout
from subquad.mixers.registry import register
from subquad.mixers.state import advanced, append_at, extend, keep_last, select_rows, with_room
from subquad.mixers.windows import WindowConfig, WindowMixer, WindowState, crop

DEFAULT_LANDMARKS, DEFAULT_LEAST_CHUNK = 49, 8


class EVAConfig(WindowConfig):
    landmarks: int | None = Field(
        None,
        ge=1,
        description=f"about how many chunks; default in the encoder variant without chunk_size: {DEFAULT_LANDMARKS}, "
        f"and in short sequences fewer, of {DEFAULT_LEAST_CHUNK} tokens each",
    )
    chunk_size: int | None = Field(
        None, ge=1, description="tokens per chunk (per side on a grid), must divide the window in the decoder variant, "
        "where it defaults to the window"
    )  # fmt: skip
    adaptive: Literal["norm", "linear", "none", "identity"] = Field(
        "norm",
        description="maps Q and K of chunk means: linear and layer norm, linear only, or K alone with mu = 0; "
        "identity: no maps, means as they are",
    )
    variant: Literal["encoder", "decoder"] | None = Field(
        None, description="which of the two equations; default: decoder when causal, else encoder"
    )
    attention_dropout: float = Field(0.0, ge=0.0, lt=1.0, description="dropout on the joint probabilities")

    def check(self) -> None:
        super().check()
        if self.landmarks and self.chunk_size:
            raise ValueError("give landmarks or chunk_size, not both")
        if self.causal and self.variant == "encoder":
            raise ValueError("the encoder variant looks both ways; causal needs variant='decoder'")
        if self.is_decoder and self.dims == 2:
            raise ValueError("the decoder variant reads sequences: dims=2 is not possible")
        if self.is_decoder and self.chunk_size and self.window % self.chunk_size:
            raise ValueError(
                f"chunk_size {self.chunk_size} must divide the window {self.window} in the decoder variant"
            )

    @property
    def is_decoder(self) -> bool:
        return self.causal or self.variant == "decoder"

    @property
    def look(self) -> tuple[int, int]:
        return (self.window if self.overlap else 0, 0) if self.is_decoder else super().look

    @property
    def chunking(self) -> tuple[int | None, int | None]:
        """Chunk size and number of landmarks, exactly one of them given."""
        if self.chunk_size or self.landmarks:
            return self.chunk_size, self.landmarks
        return (self.window, None) if self.is_decoder else (None, DEFAULT_LANDMARKS)

    @property
    def least_chunk(self) -> int:
        """Tokens that a chunk of a sequence has at least, if its size follows from a number of landmarks."""
        return DEFAULT_LEAST_CHUNK if self.landmarks is None else 1


@dataclass
class EVAState(WindowState):
    """q: queries of the unfinished chunk (batch, heads, r - 1, d), newest last; chunk_k, chunk_v: summaries
    (batch, heads, chunks, d), of which row b has lengths[b] // r; seen: the most tokens any row may have read; room:
    how many chunks at the end no row has finished, None: only the lengths tell."""

    q: Tensor
    chunk_k: Tensor
    chunk_v: Tensor
    seen: int
    room: int | None = 0

    @property
    def filled(self) -> int:
        return self.chunk_k.shape[2] - (self.room or 0)

    def chunks_after(self, tokens: int) -> int:
        """How many chunks are read after so many tokens more: all that a row may have finished then."""
        return self.filled if self.room is None else (self.seen + tokens) // (self.q.shape[2] + 1)

    def reorder(self, index: Tensor) -> Self:
        parts = {name: getattr(self, name).index_select(0, index) for name in ("lengths", "k", "v", "q")}
        chunk_k, chunk_v = (select_rows(part, index, self.filled) for part in (self.chunk_k, self.chunk_v))
        room = None if self.room is None else chunk_k.shape[2] - self.filled
        return replace(self, **parts, chunk_k=chunk_k, chunk_v=chunk_v, room=room)

    def reserve(self, tokens: int) -> Self:
        wanted = self.chunks_after(tokens) - self.filled + 1  # one for the summary of a chunk that is not finished
        if self.room is None:
            wanted = tokens // (self.q.shape[2] + 1) + 1
        elif self.room >= wanted:
            return self
        chunk_k, chunk_v = (with_room(part, self.filled, wanted) for part in (self.chunk_k, self.chunk_v))
        room = None if self.room is None else chunk_k.shape[2] - self.filled
        return replace(self, chunk_k=chunk_k, chunk_v=chunk_v, room=room)

    def with_fixed_size(self) -> Self:
        for part in (self.chunk_k, self.chunk_v):
            part[:, :, self.filled :] = 0  # what weights of 0 meet must be finite
        return replace(self, room=None)


@register("eva")
class EVA(WindowMixer[EVAConfig]):
    capabilities = Capabilities(causal=True, cross=False, grid=True, state="window + chunk summaries", averages=True)
    tuned: ClassVar = {"window": Scale(0.5, 2), "chunk_size": Scale(0.5, 2), "landmarks": Scale(0.5, 2)}
    state_type = EVAState
    reads_past_queries = True
    published: ClassVar = {
        "imagenet": {"window": 7, "landmarks": 49, "adaptive": "norm", "dims": 2, "relative": "table"},
        "wmt14": {"window": 16, "landmarks": 8, "adaptive": "linear", "relative": "t5", "overlap": True},
        "wikitext103": {
            "window": 128,
            "chunk_size": 8,
            "adaptive": "norm",
            "relative": "t5",
            "attention_dropout": 0.1,
        },
    }
    examples = (
        {"window": 4, "landmarks": 3},
        {"window": 4, "landmarks": 3, "overlap": True, "adaptive": "linear"},
        {"window": 6, "chunk_size": 3, "relative": "table"},
        {"window": 4, "chunk_size": 2, "relative": "t5", "overlap": True},
        {"window": 4, "variant": "decoder", "chunk_size": 4},
        {"window": 3, "landmarks": 2, "adaptive": "none"},
        {"window": 4, "chunk_size": 2, "rotary": True, "adaptive": "identity"},
    )

    def setup(self) -> None:
        super().setup()
        config = self.config
        self.k_map = self._map_of_means()
        self.q_map = None if config.adaptive == "none" else self._map_of_means()
        self.max_step = config.chunking[0]
        self.reset_parameters()

    def _map_of_means(self) -> nn.Module:
        config = self.config
        if config.adaptive == "identity":
            return nn.Identity()
        return HeadMap(config.head_width, norm=config.adaptive != "linear")

    @property
    def t5_heads_shared(self) -> bool:  # type: ignore[override]
        return self.config.is_decoder

    def reset_parameters(self) -> None:
        """Encoder: small normal weights. Decoder: Xavier, q, k, v and the adaptive maps with gain 1 / sqrt(2)."""
        for module in self.modules():
            if isinstance(module, nn.Linear) and self.config.is_decoder:
                init_xavier(module, 1.0 if module is self.out else 2**-0.5)
            else:
                init_small(module)

    def sees_grid(self, grid: tuple[int, int]) -> bool:
        return not self.config.is_decoder and super().sees_grid(grid)

    def keeps_linear_memory(self) -> bool:
        return self.config.chunking[0] is None  # chunks of a fixed size are T / r, and each is a key to every query

    def why_no_streaming(self) -> str | None:
        if self.config.causal and self.config.chunking[0] is None:
            return (
                "this eva was built with a number of chunks, whose size depends on the length to come; give chunk_size"
            )
        return super().why_no_streaming()

    def mix(self, x: Tensor, layout: Layout) -> tuple[Tensor, None]:
        config, shape = self.config, self.shape_of(x, layout)
        lengths = layout.lengths if tracing.may_branch_on_length() else layout.lengths_of(x)
        x, windows, mask = self.pad_to_windows(x, layout, shape, may_cut=self._chunks_lie_side_by_side(shape))
        flat = self.projections(x)
        # chunks are those of whole windows, also where the only window was cut
        cells = windows.shape if len(shape) == 2 else (max(windows.shape[0], config.window),)
        qkv, size = self.by_head(flat), self._chunk_size(cells, lengths)
        if size is None:
            summaries = self._cut_and_summarise(flat, cells, mask, layout.lengths)
        else:
            chunks = side_by_side(x, shape[0], cells[0], lengths, size, config.window, config.chunking[1])
            if implementation("chunk_values", qkv) == "gpu":  # where a pass over x takes longer than its products
                qkv, q_means, k_means = chunk_means(qkv, mask, size, chunks.sizes.squeeze(2))
            else:
                q_means, k_means = self._means(sums_of_tokens(x, size, chunks.sizes.shape[1]), chunks).unbind(0)
            chunk_k, omega = self._centre(q_means, k_means)
            qkv, values = chunk_values(qkv, omega, mask, size)
            seen = 0 if not config.causal else size if isinstance(size, int) else size[:, None]
            summaries = Summaries(chunk_k, values, chunks.mask, seen)
        dropout = config.attention_dropout if self.training else 0.0
        y = window_attention(qkv, windows, self.bias_values(windows), mask, summaries, dropout)
        return crop(self.project_out(y), windows.shape, shape), None

    def _chunks_lie_side_by_side(self, shape: tuple[int, ...]) -> bool:
        """Whether chunks are pieces of a sequence that share no token, and their means those of tokens."""
        config = self.config
        # what is turned by positions has means of its own, and so has what an adapter adds
        other_means = config.rotary or self.has_adapter
        return not (len(shape) == 2 or other_means or (config.overlap and not config.is_decoder))

    def _chunk_size(self, padded_shape: tuple[int, ...], lengths: Tensor | None) -> int | Tensor | None:
        """Tokens of a chunk, where chunks lie side by side: one number, or (batch,) one for each row."""
        config = self.config
        if not self._chunks_lie_side_by_side(padded_shape):
            return None
        size, landmarks = config.chunking
        if landmarks is None:
            return size
        if lengths is None:
            return chunk_length(padded_shape[0], landmarks, config.least_chunk)
        return chunk_length(whole_windows(lengths, config.window), landmarks, config.least_chunk)

    def _means(self, token_sums: Tensor, chunks: ChunkCounts) -> Tensor:
        """Mean queries and keys of chunks (2, batch, heads, chunks, d), from sums of tokens (batch, chunks, C).

        They are projections of mean tokens. Biases count as often as there are tokens.
        """
        rows = 2 * self.inner
        if not self.has_maps:
            sums = token_sums[..., :rows]
        else:
            sums = F.linear(token_sums, self.qkv.weight[:rows])
            if self.qkv.bias is not None:
                sums = sums + chunks.num_tokens * self.qkv.bias[:rows]
        return (sums / chunks.sizes).unflatten(-1, (2, self.config.heads, -1)).permute(2, 0, 3, 1, 4)

    def _cut_and_summarise(
        self, flat: Tensor, padded_shape: tuple[int, ...], mask: Tensor | None, lengths: Tensor | None
    ) -> Summaries:
        """Summaries of chunks that overlap, lie on a grid, or hold queries and keys that are turned by positions."""
        config, qkv = self.config, self.split_heads(flat)
        extension = 0 if config.is_decoder else self.look_back
        chunks = cut(qkv, padded_shape, mask, lengths, config.window, extension, *config.chunking, config.least_chunk)
        chunk_k, chunk_v = self._summarise(chunks.q, chunks.k, chunks.v, chunks.cells_mask, chunks.sizes)
        return Summaries(chunk_k, chunk_v, chunks.mask, chunks.length if config.causal else 0)

    def new_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> EVAState:
        assert self.max_step is not None
        heads, width = self.config.heads, self.config.head_width
        q = torch.zeros(batch, heads, self.max_step - 1, width, device=device, dtype=dtype)
        return EVAState(*self.new_window(batch, device, dtype), q, q[:, :, :0], q[:, :, :0], 0)

    def step(self, x: Tensor, new: Tensor | None, state: EVAState) -> tuple[Tensor, EVAState]:
        size = self.max_step
        assert size is not None
        time = x.shape[1]
        q, k, v = self.project(x, state.lengths)
        all_q = torch.cat([state.q, q], 2)
        all_k, all_v = torch.cat([state.k, k], 2), torch.cat([state.v, v], 2)
        # A chunk of x is no longer than a chunk of EVA, so a row finishes one chunk or none.
        begun = state.lengths % size
        ends = (advanced(begun, new, time) >= size)[:, None]
        at, count = state.lengths // size, state.chunks_after(time)
        chunk_k, chunk_v = state.chunk_k, state.chunk_v
        # a step of a state of fixed size may be recorded, and has to be the same for every token
        if state.room is None or _may_hold(ends) or count > state.filled:
            finished = self._summarise_last(all_q, all_k, all_v, begun, time)
            chunk_k, chunk_v = (
                append_at(old, one, at, ends, count) if state.room == 0 else extend(old, one, state.room, (at, ends))
                for old, one in zip((chunk_k, chunk_v), finished, strict=True)
            )
        local = self.stream_window(q, all_k, state.lengths)
        position = state.lengths[:, None] + torch.arange(time, device=x.device)
        before = torch.arange(count, device=x.device) < (position // size)[..., None]
        summary = self._chunk_logits(q, chunk_k[:, :, :count], before[:, None])
        local_probs, summary_probs = self._attend(local, summary, v.dtype)
        y = self.merge_heads(local_probs @ all_v + summary_probs @ chunk_v[:, :, :count])
        window = self.slide(state, all_k, all_v, new)
        last_q = keep_last(all_q, new, size - 1, dim=2)
        lengths = advanced(state.lengths, new, time)
        seen, room = (state.seen, None) if state.room is None else (state.seen + time, chunk_k.shape[2] - count)
        return y, EVAState(lengths, *window, last_q, chunk_k, chunk_v, seen, room)

    def _summarise_last(self, q: Tensor, k: Tensor, v: Tensor, begun: Tensor, time: int) -> tuple[Tensor, Tensor]:
        """Summary of each row's current chunk, meaningful where these `time` tokens complete it: (batch, heads, 1, d).

        q, k, v: old and new entries, newest last; begun: (batch,) tokens of the chunk among the old ones.
        """
        size = self.max_step
        assert size is not None

        def current(part: Tensor) -> Tensor:
            place = (part.shape[2] - time - begun)[:, None] + torch.arange(size, device=begun.device)
            place = place.clamp(max=part.shape[2] - 1)[:, None, :, None].expand(-1, part.shape[1], -1, part.shape[3])
            return part.gather(2, place).unsqueeze(2)

        mask = torch.ones((1, 1, 1, size), dtype=torch.bool, device=q.device)
        sizes = torch.full((1, 1, 1, 1), size, device=q.device)
        return self._summarise(current(q), current(k), current(v), mask, sizes)

    def _summarise(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """k~ and beta of chunks (batch, heads, chunks, cells, d), each (batch, heads, chunks, d)."""
        chunk_k, omega = self._centre(q.sum(-2) / sizes, k.sum(-2) / sizes)
        return chunk_k, gathered_chunk_values(k, v, omega, mask)

    def _centre(self, q_mean: Tensor, k_mean: Tensor) -> tuple[Tensor, Tensor]:
        """k~ and omega of chunks from their mean queries and keys, all (batch, heads, chunks, d)."""
        chunk_k = self.k_map(k_mean)
        total = torch.zeros_like(chunk_k) if self.q_map is None else chunk_k + self.q_map(q_mean)
        if self.training:  # mu is added to the noise in one pass
            share = 1.0 if self.config.is_decoder else 0.5
            return chunk_k, torch.add(noise.normal(total.shape, total), total, alpha=share)
        return chunk_k, total if self.config.is_decoder else total / 2

    def _chunk_logits(self, q: Tensor, chunk_k: Tensor, mask: Tensor) -> Tensor:
        """s q_i . k~_c for queries (batch, heads, N, d): (batch, heads, N, chunks)."""
        logits = at_least_float32((q * self.scale) @ chunk_k.transpose(-1, -2))
        return keep(logits, mask)

    def _attend(self, local: Tensor, summary: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """One softmax over window and chunk logits, split again."""
        joint = torch.cat([local, summary], -1).softmax(-1).to(dtype)
        joint = F.dropout(joint, self.config.attention_dropout, self.training)
        return list(joint.split([local.shape[-1], summary.shape[-1]], -1))


def _may_hold(condition: Tensor) -> bool:
    """Whether it holds anywhere; True where asking would break a graph or wait for a device."""
    if condition.device.type != "cpu" or not tracing.may_read_values(condition):
        return True
    return bool(condition.any())
