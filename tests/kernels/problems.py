"""Problems for every operation, by name: what its implementations are compared on.

A problem is a function of float64 tensors, which are its inputs, and of nothing else that has a gradient. Masks, target
words and the like follow the inputs to their device. Sizes are odd and small; what an operation can do without (a mask,
a bias, summaries) is there in some problems and not in others.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.chunk_values import chunk_values
from subquad.kernels.conv import tap_conv, tap_conv_extended
from subquad.kernels.cross_entropy import linear_cross_entropy
from subquad.kernels.feature_attention import feature_attention
from subquad.kernels.gathered import gathered_attention, gathered_conv
from subquad.kernels.landmark_attention import OptWeights, landmark_attention
from subquad.kernels.linear import int8_linear, to_int8
from subquad.kernels.primal_scores import primal_scores
from subquad.kernels.scan import causal_sums
from subquad.kernels.tokens_at import tokens_at
from subquad.kernels.vocabulary import largest, log_sum_exp, normalised_largest
from subquad.kernels.window_attention import Summaries, Windows, window_attention

BATCH, HEADS, WIDTH = 2, 3, 5
LENGTHS = (1, 7, 67)


class Problem(NamedTuple):
    operation: str
    name: str
    inputs: list[Tensor]
    run: Callable[..., Tensor | tuple[Tensor, ...]]
    """From the inputs, in any precision, to the results."""
    differentiable: bool = True

    def __str__(self) -> str:
        return f"{self.operation}-{self.name}"


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def beside(x: Tensor, constant: Tensor | None) -> Tensor | None:
    """On the device of x."""
    return None if constant is None else constant.to(x.device)


def conv() -> list[Problem]:
    found = []
    for time in LENGTHS:
        for own in (False, True):
            for taps in (1, 4, 9):
                kind = f"{time} positions, {taps} {'own' if own else 'shared'} taps"
                x, sizes = drawn(BATCH, time, HEADS * WIDTH), (BATCH, time) if own else ()
                inputs = [x, drawn(*sizes, HEADS, taps)]
                before = taps // 2

                def plain(x: Tensor, taps: Tensor, before: int = before) -> Tensor:
                    return tap_conv(x, taps, before)

                def normalised(x: Tensor, taps: Tensor, before: int = before) -> Tensor:
                    return tap_conv(x, taps, before, softmax=True)

                found += [Problem("conv", kind, inputs, plain), Problem("conv", f"{kind}, softmax", inputs, normalised)]
        extended = [drawn(BATCH, time + 3, HEADS * WIDTH), drawn(HEADS, 4)]
        found.append(Problem("conv", f"{time} positions of a stream", extended, tap_conv_extended))
    return found


def scan() -> list[Problem]:
    found = []
    for time in (*LENGTHS, 150):
        log_scale = (drawn(BATCH, HEADS, time).abs() * 0.1).cumsum(-1)
        log_scale = (log_scale * 16).round() / 16  # the same number in every precision
        inputs = [
            drawn(BATCH, HEADS, time, 4).abs(),
            drawn(BATCH, HEADS, time, 4).abs(),
            drawn(BATCH, HEADS, time, WIDTH),
            F.pad(drawn(BATCH, HEADS, 4, WIDTH), (0, 1), value=0.5),
        ]

        def run(q: Tensor, k: Tensor, v: Tensor, before: Tensor, log_scale: Tensor = log_scale) -> tuple[Tensor, ...]:
            return causal_sums(q, k, v, log_scale.to(q), before, torch.zeros(BATCH, HEADS).to(q))

        found.append(Problem("scan", f"{time} positions", inputs, run))
    return found


def window_problems() -> list[Problem]:
    found = []
    shapes = {
        "one window": Windows((5,), 5),
        "windows": Windows((21,), 7),
        "windows of one": Windows((7,), 1, 2, 1),
        "looking around": Windows((35,), 5, 2, 3),
        "looking far back, causal": Windows((33,), 3, 7, 0, causal=True),
        "causal": Windows((15,), 5, causal=True),
    }
    for name, windows in shapes.items():
        (time,) = windows.shape
        mask = torch.rand(BATCH, time) < 0.7
        mask[:, :: windows.size] = True
        chunk = windows.size if windows.causal else 0
        number = time // chunk if chunk else 4
        exist = torch.rand(BATCH, number) < 0.7
        qkv, k, v = drawn(BATCH, time, 3, HEADS, WIDTH), *drawn(2, BATCH, HEADS, number, WIDTH)
        shared, own = drawn(1, windows.size, windows.keys), drawn(HEADS, windows.size, windows.keys)

        def plain(qkv: Tensor, windows: Windows = windows) -> Tensor:
            return window_attention(qkv, windows)

        def biased(qkv: Tensor, bias: Tensor, windows: Windows = windows, mask: Tensor = mask) -> Tensor:
            return window_attention(qkv, windows, bias, mask.to(qkv.device))

        def summarised(
            qkv: Tensor, k: Tensor, v: Tensor, windows: Windows = windows, mask: Tensor = mask, chunk: int = chunk
        ) -> Tensor:
            return window_attention(qkv, windows, None, mask.to(qkv.device), Summaries(k, v, None, chunk))

        def everything(
            qkv: Tensor,
            bias: Tensor,
            k: Tensor,
            v: Tensor,
            windows: Windows = windows,
            mask: Tensor = mask,
            exist: Tensor = exist,
            chunk: int = chunk,
        ) -> Tensor:
            summaries = Summaries(k, v, exist.to(qkv.device), chunk)
            return window_attention(qkv, windows, bias, mask.to(qkv.device), summaries)

        found += [
            Problem("window_attention", name, [qkv], plain),
            Problem("window_attention", f"{name}, shared bias, mask", [qkv, shared], biased),
            Problem("window_attention", f"{name}, own bias, mask", [qkv, own], biased),
            Problem("window_attention", f"{name}, mask, summaries", [qkv, k, v], summarised),
            Problem("window_attention", f"{name}, all options", [qkv, own, k, v], everything),
        ]
    return found


def chunk_problems() -> list[Problem]:
    found = []
    for chunks, cells in ((1, 1), (3, 7), (5, 1)):
        mask = torch.rand(BATCH, chunks * cells) < 0.6
        mask[0, :cells] = False  # an empty chunk
        inputs = [drawn(BATCH, chunks * cells, 3, HEADS, WIDTH), drawn(BATCH, HEADS, chunks, WIDTH)]

        def plain(qkv: Tensor, w: Tensor, size: int = cells) -> Tensor:
            return chunk_values(qkv, w, None, size)[1]

        def masked(qkv: Tensor, w: Tensor, mask: Tensor = mask, size: int = cells) -> Tensor:
            return chunk_values(qkv, w, mask.to(qkv.device), size)[1]

        def ragged(qkv: Tensor, w: Tensor, mask: Tensor = mask, size: int = cells) -> Tensor:
            sizes = torch.tensor([size, size + 1], device=qkv.device)
            return chunk_values(qkv, w, mask.to(qkv.device), sizes)[1]

        name = f"{chunks} chunks of {cells}"
        found += [
            Problem("chunk_values", name, inputs, plain),
            Problem("chunk_values", f"{name}, mask", inputs, masked),
            Problem("chunk_values", f"{name}, a size for each row", inputs, ragged),
        ]
    return found


def feature_problems() -> list[Problem]:
    found = []
    for time in LENGTHS:
        mask = torch.arange(time) < torch.randint(1, time + 1, (BATCH, 1))
        inputs = [drawn(BATCH, time, 3, HEADS, WIDTH), drawn(HEADS, 6, WIDTH)]
        for kept in (None, mask):
            for causal in (False, True):

                def run(qkv: Tensor, matrix: Tensor, mask: Tensor | None = kept, causal: bool = causal) -> Tensor:
                    return feature_attention(qkv, matrix, beside(qkv, mask), 1e-4, 1e-2, causal=causal)

                name = f"{time} positions{'' if kept is None else ', mask'}{', causal' if causal else ''}"
                found.append(Problem("feature_attention", name, inputs, run))
    return found


def landmark_problems() -> list[Problem]:
    found = []
    for time in LENGTHS:
        qkv, w, w_queries, directions = drawn(BATCH, time, 3, HEADS, WIDTH), *drawn(3, BATCH, HEADS, 4, WIDTH)
        shared, balance = drawn(BATCH, HEADS, 4, 1), torch.rand(BATCH, HEADS, 4, 1, dtype=torch.float64) * 0.3
        mask = torch.rand(BATCH, time) < 0.7
        mask[:, 0] = True
        for kept in (None, mask):

            def plain(qkv: Tensor, w: Tensor, w_queries: Tensor, b: Tensor, mask: Tensor | None = kept) -> Tensor:
                return landmark_attention(qkv, w, w_queries, b, None, beside(qkv, mask))

            def weighted(
                qkv: Tensor,
                w: Tensor,
                w_queries: Tensor,
                b: Tensor,
                directions: Tensor,
                balance: Tensor,
                mask: Tensor | None = kept,
            ) -> Tensor:
                mean_weights = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).to(qkv)
                weights = OptWeights(directions, balance, mean_weights, 1.5)
                return landmark_attention(qkv, w, w_queries, b, weights, beside(qkv, mask))

            name, inputs = f"{time} positions{'' if kept is None else ', mask'}", [qkv, w, w_queries, shared]
            found += [
                Problem("landmark_attention", name, inputs, plain),
                Problem("landmark_attention", f"{name}, query weights", [*inputs, directions, balance], weighted),
            ]
    return found


def word_problems() -> list[Problem]:
    found = []
    for count, vocab, smoothing in ((1, 11, 0.0), (7, 11, 0.1), (67, 11, 0.0), (5, 131, 0.1)):
        target = torch.randint(0, vocab, (count,)).masked_fill(torch.rand(count) < 0.3, 1)
        target[0] = 2

        def run(
            features: Tensor, weight: Tensor, *bias: Tensor, target: Tensor = target, smoothing: float = smoothing
        ) -> Tensor:
            words = bias[0] if bias else None
            asked = target.to(features.device)
            return linear_cross_entropy(features, weight, words, asked, pad=1, smoothing=smoothing)[0]

        inputs = [drawn(count, WIDTH), drawn(vocab, WIDTH)]
        name = f"{count} tokens of {vocab}, smoothing {smoothing}"
        found += [
            Problem("cross_entropy", name, inputs, run),
            Problem("cross_entropy", f"{name}, bias", [*inputs, drawn(vocab)], run),
        ]
    return found


def primal_problems() -> list[Problem]:
    found = []
    for time in LENGTHS:
        lengths = torch.randint(1, time + 1, (BATCH,))
        x = drawn(BATCH, time, 2, HEADS, WIDTH)
        shared, own = drawn(1, 2, HEADS, WIDTH, 4), drawn(BATCH, 2, HEADS, WIDTH, 4)
        for causal, kept in ((False, None), (False, lengths), (True, None), (True, lengths)):

            def run(
                qk: Tensor, weights: Tensor, kept: Tensor | None = kept, causal: bool = causal
            ) -> tuple[Tensor, Tensor]:
                wide = torch.promote_types(qk.dtype, torch.float32)
                return primal_scores(qk, weights.to(wide), beside(qk, kept), causal=causal)

            name = f"{time} positions{'' if kept is None else ', lengths'}{', causal' if causal else ''}"
            found.append(Problem("primal_scores", name, [x, shared if causal else own], run))
        positions = torch.arange(5).mul(time).div(5, rounding_mode="floor").expand(BATCH, -1)
        tokens = drawn(BATCH, time, WIDTH)

        def taken(x: Tensor, positions: Tensor = positions) -> tuple[Tensor, Tensor]:
            return tokens_at(x, positions.to(x.device))

        found.append(Problem("tokens_at", f"{time} positions", [tokens], taken))
    return found


def without_gradients() -> list[Problem]:
    values, scale = to_int8(drawn(11, 37))

    def linear(x: Tensor) -> Tensor:
        return int8_linear(x.float(), values, scale)

    rows = drawn(5, 131)
    return [
        Problem("linear", "int8", [drawn(3, 37)], linear, differentiable=False),
        Problem("vocabulary", "log_sum_exp", [rows], log_sum_exp, differentiable=False),
        Problem("vocabulary", "largest", [rows], lambda x: largest(x, 7)[0], differentiable=False),
        Problem("vocabulary", "both", [rows], lambda x: normalised_largest(x.clone(), 7, 3)[:2], differentiable=False),
        *gathered_problems(),
    ]


def gathered_problems() -> list[Problem]:
    found, places = [], 9
    for width in (WIDTH, 43):  # of a head: the innermost loops have 32, 8 and 1 channels
        for columns in (1, places):
            order, lengths = torch.randint(0, 4, (7, columns)), torch.randint(1, places + 1, (7,))

            def attend(q: Tensor, k: Tensor, v: Tensor, order: Tensor = order, lengths: Tensor = lengths) -> Tensor:
                return gathered_attention(q, k, v, order.to(q.device), lengths.to(q.device))

            def convolve(x: Tensor, taps: Tensor, order: Tensor = order[:, :3]) -> Tensor:
                return gathered_conv(x, taps, order.to(x.device), 4)

            name = f"{width} channels, {columns} columns"
            k, v = drawn(4, HEADS, places, width), drawn(4, HEADS, places, width)
            found.append(Problem("gathered", name, [drawn(7, HEADS, width), k, v], attend, differentiable=False))
            x = drawn(4, places, HEADS * width)
            for kind, taps in (("shared", drawn(HEADS, 3)), ("own", drawn(7, HEADS, 3))):
                found.append(Problem("gathered", f"{name}, {kind} taps", [x, taps], convolve, differentiable=False))
    return found


def every_problem() -> list[Problem]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        parts = (
            conv,
            scan,
            window_problems,
            chunk_problems,
            feature_problems,
            landmark_problems,
            word_problems,
            without_gradients,
            primal_problems,
        )
        return [problem for part in parts for problem in part()]
