"""Equations of mechanisms with windows, chunks and landmarks, on sequences and on grids. See equations.py."""

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from tests.mixers.equations import (
    Space,
    equation_of,
    for_heads_and_positions,
    join_heads,
    noise_of,
    project,
    random_matrix,
)

Cell = tuple[int, ...]


def cells_of(space: Space) -> list[Cell]:
    """(0,), (1,), ... of a sequence, or (0, 0), (0, 1), ... of a grid: row by row."""
    return list(itertools.product(*(range(size) for size in space)))


def side_of(mixer: Any, space: Space) -> int:
    """w; local's windows are no larger than a grid, unless their biases have a size of their own."""
    w = mixer.config.window
    return min(w, max(space)) if mixer.name == "local" and len(space) == 2 and mixer.bias is None else w


def whole_windows(mixer: Any, space: Space) -> Space:
    """The space, filled up to whole windows."""
    w = side_of(mixer, space)
    return tuple(math.ceil(size / w) * w for size in space)


def positions(mixer: Any, space: Space) -> list[int]:
    """Of the cells of a space, counted row by row in whole windows."""
    number = {cell: n for n, cell in enumerate(cells_of(whole_windows(mixer, space)))}
    return [number[cell] for cell in cells_of(space)]


def window(mixer: Any, space: Space, i: Cell, reach: tuple[int, int]) -> list[tuple[int, int]]:
    """W(i): numbers of the cells, each with its place among the cells that the window of i could reach."""
    w = side_of(mixer, space)
    low = [at // w * w - reach[0] for at in i]
    found = []
    for number, j in enumerate(cells_of(space)):
        column = [at - first for at, first in zip(j, low, strict=True)]
        side = reach[0] + w + reach[1]
        later = mixer.config.causal and j > i
        if all(0 <= place < side for place in column) and not later:
            found.append((number, sum(place * side**axis for axis, place in enumerate(reversed(column)))))
    return found


def window_logits(
    mixer: Any, space: Space, q: Tensor, k: Tensor, h: int, i: int, reach: tuple[int, int]
) -> tuple[Tensor, list[int]]:
    """s q_i.k_j + b(i, j) for j in W(i), and these j."""
    w, cell = side_of(mixer, space), cells_of(space)[i]
    row = sum((at % w) * w**axis for axis, at in enumerate(reversed(cell)))
    logits, js = [], []
    for j, column in window(mixer, space, cell, reach):
        logit = q[h, i] @ k[h, j] / math.sqrt(q.shape[-1])
        if mixer.bias is not None:
            table = mixer.bias()
            logit = logit + table[min(h, len(table) - 1), row, column]
        logits.append(logit)
        js.append(j)
    return torch.stack(logits), js


def half_window(mixer: Any) -> int:
    return max(1, mixer.config.window // 2) if mixer.config.overlap else 0


@equation_of("local")
def local(mixer: Any, x: Tensor, space: Space) -> Tensor:
    q, k, v = project(mixer, x, positions(mixer, space))
    half = half_window(mixer)

    def y(h: int, i: int) -> Tensor:
        logits, js = window_logits(mixer, space, q, k, h, i, (half, half))
        return logits.softmax(0) @ v[h, js]

    return for_heads_and_positions(mixer, x, y)


# ---------------------------------------------------------------------- scatterbrain


@equation_of("scatterbrain")
def scatterbrain(mixer: Any, x: Tensor, space: Space) -> Tensor:
    q, k, v = project(mixer, x, positions(mixer, space))
    d, m, half = q.shape[-1], mixer.config.features, half_window(mixer)

    def y(h: int, i: int) -> Tensor:
        W = random_matrix(mixer, h)

        def a(t: Tensor) -> Tensor:
            return W @ t * d**-0.25 - t @ t * d**-0.5 / 2 - math.log(m) / 2

        near, js = window_logits(mixer, space, q, k, h, i, (half, half))
        log_k = torch.stack([a(k_j) for k_j in k[h]])
        top = log_k.amax(0)
        everything, inside = log_k.exp().sum(0), log_k[js].exp().sum(0)
        Z = torch.log(everything - inside + 1e-5 * everything)
        sums = log_k.exp().T @ v[h] - log_k[js].exp().T @ v[h, js]
        values = sums / torch.maximum(everything - inside, 1e-3 * top.exp())[:, None]
        A = torch.cat([near, a(q[h, i]) + Z]).softmax(0)
        return A[: len(js)] @ v[h, js] + A[len(js) :] @ values

    return for_heads_and_positions(mixer, x, y)


# ---------------------------------------------------------------------- eva


@equation_of("eva")
def eva(mixer: Any, x: Tensor, space: Space) -> Tensor:
    config = mixer.config
    decoder = config.causal or config.variant == "decoder"
    q, k, v = project(mixer, x, positions(mixer, space))
    half = half_window(mixer)
    reach = (config.window if config.overlap else 0, 0) if decoder else (half, half)
    r, members, divisors = chunks(mixer, space, 0 if decoder else half, decoder)
    y: list[list[Tensor]] = []
    for h in range(config.heads):
        summaries = [
            summarise(mixer, q[h], k[h], v[h], js, size, decoder) for js, size in zip(members, divisors, strict=True)
        ]
        y.append([])
        for i in range(len(x)):
            near, js = window_logits(mixer, space, q, k, h, i, reach)
            visible = [one for c, one in enumerate(summaries) if not config.causal or c < i // r]
            far = [q[h, i] @ key / math.sqrt(q.shape[-1]) for key, _ in visible]
            A = torch.cat([near, torch.stack(far)] if far else [near]).softmax(0)
            y[h].append(
                A[: len(js)] @ v[h, js]
                + sum((A[len(js) + c] * value for c, (_, value) in enumerate(visible)), torch.zeros(()))
            )
    return join_heads(mixer, y)


def chunks(mixer: Any, space: Space, extension: int, decoder: bool) -> tuple[int, list[list[int]], list[int]]:
    """Their size, the numbers of the tokens of each, and what the means of each divide by."""
    config, number = mixer.config, {cell: n for n, cell in enumerate(cells_of(space))}
    whole = whole_windows(mixer, space)
    r = config.chunk_size
    if r is None and decoder and config.landmarks is None:
        r = config.window
    if r is None:
        r = max(1, math.floor((math.prod(whole) // (config.landmarks or 49)) ** (1 / len(space)) + 1e-9))
        if config.landmarks is None and len(space) == 1:
            r = max(r, min(8, whole[0]))
    counts = [max(1, size // r) if extension else math.ceil(size / r) for size in whole]
    members, divisors = [], []
    for c in cells_of(tuple(counts)):
        inside = list(itertools.product(*(range(at * r - extension, at * r + r + extension) for at in c)))
        js = [number[cell] for cell in inside if cell in number]
        if len(space) == 1:  # cells up to whole windows count, and so do those that overlap the ends
            members.append(js)
            divisors.append(min(r, whole[0] - c[0] * r) + 2 * extension)
        elif js:  # cells beyond the border of whole windows and chunks count, others that are no tokens do not
            edge = [max(size, count * r) for size, count in zip(whole, counts, strict=True)]
            beyond = [cell for cell in inside if not all(0 <= at < size for at, size in zip(cell, edge, strict=True))]
            members.append(js)
            divisors.append(len(js) + len(beyond))
    return r, members, divisors


def summarise(
    mixer: Any, q: Tensor, k: Tensor, v: Tensor, js: list[int], size: int, decoder: bool
) -> tuple[Tensor, Tensor]:
    """k~ and beta of one chunk of one head."""
    s = q.shape[-1] ** -0.5
    key = mixer.k_map(k[js].sum(0) / size)
    omega = torch.zeros_like(key)
    if mixer.q_map is not None:
        omega = mixer.q_map(q[js].sum(0) / size) + key
        omega = omega if decoder else omega / 2
    omega = omega + noise_of(mixer)
    if not js:
        return key, torch.zeros_like(key)
    return key, torch.stack([s * omega @ k[j] - s * k[j] @ k[j] / 2 for j in js]).softmax(0) @ v[js]


# ---------------------------------------------------------------------- lara


@equation_of("lara")
def lara(mixer: Any, x: Tensor, space: Space) -> Tensor:
    config = mixer.config
    q, k, v = project(mixer, x)
    s = q.shape[-1] ** -0.5
    if config.proposal == "adaptive":
        space = (len(x),)
    q_bar, k_bar = landmarks(mixer, q, k, v, space)
    numbers = range(q_bar.shape[1])

    def phi(w: Tensor, t: Tensor) -> Tensor:
        return s * w @ t - s * t @ t / 2

    y: list[list[Tensor]] = []
    for h in range(config.heads):
        mu = q_bar[h] + k_bar[h]
        omega = mu + noise_of(mixer)
        D = torch.stack([torch.stack([phi(omega[c], mu[other]) for other in numbers]) for c in numbers])
        log_k = torch.stack([torch.stack([phi(omega[c], k_j) for k_j in k[h]]) for c in numbers])
        values = torch.stack([log_k[c].softmax(0) @ v[h] for c in numbers])
        t = torch.stack([(s * q[h] @ q_bar[h, c]).softmax(0) for c in numbers])
        y.append([])
        for i in range(len(x)):
            log_weight = []
            for c in numbers:
                log_alpha, log_p = torch.zeros(()), D[c].logsumexp(0)
                if config.weights == "biased":
                    log_alpha = s * mu[c] @ q[h, i]
                if config.weights == "opt":
                    alpha = (D[c, c] - D[c].logsumexp(0)).exp() + config.alpha * (t[c, i] - t[:, i].mean())
                    log_alpha, log_p = max(alpha, torch.tensor(1e-8)).log(), D[c, c]
                log_weight.append(log_alpha + phi(omega[c], q[h, i]) + log_k[c].logsumexp(0) - log_p)
            y[h].append(torch.stack(log_weight).softmax(0) @ values)
    return join_heads(mixer, y)


def landmarks(mixer: Any, q: Tensor, k: Tensor, v: Tensor, space: Space) -> tuple[Tensor, Tensor]:
    """q~, k~: (heads, landmarks, d)."""
    config = mixer.config
    if config.proposal == "adaptive":
        q, k = mixer.q_map(q), mixer.k_map(k)
    by_length = min(49, max(16, space[0] // 8))
    if len(space) == 1:
        groups = segments(space[0], config.landmarks or by_length)
    else:
        groups = pools(space, math.isqrt(config.landmarks or 49))
    q_bar, k_bar, v_bar = (torch.stack([t[:, group].mean(1) for group in groups], 1) for t in (q, k, v))
    if len(space) == 1:
        return q_bar, k_bar
    if config.proposal == "pool":
        if config.pool_proj == "light":
            q_bar, k_bar = mixer.q_map(q_bar), mixer.k_map(k_bar)
        else:
            q_bar, k_bar = (
                mapped(bar.transpose(0, 1).flatten(1)).unflatten(-1, (config.heads, -1)).transpose(0, 1)
                for mapped, bar in ((mixer.q_map, q_bar), (mixer.k_map, k_bar))
            )
    if config.landmark_mixing != "none":
        logits = q.shape[-1] ** -0.5 * k_bar @ k_bar.transpose(1, 2)
        if config.landmark_mixing == "values":
            logits = logits + (v_bar.norm(dim=-1) + 1e-4).log()[:, None]
        k_bar = logits.softmax(-1) @ k_bar
    return q_bar, k_bar


def segments(time: int, count: int) -> list[list[int]]:
    """With a = floor(T / M), the first (a + 1) M - T segments have a tokens, the others a + 1; empty ones are none."""
    a = time // count
    sizes = [a] * ((a + 1) * count - time) + [a + 1] * (time - a * count)
    ends = list(itertools.accumulate(sizes))
    return [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True) if size]


def pools(space: Space, side: int) -> list[list[int]]:
    """side x side cells of a grid, each from floor(i H / side) to ceil((i + 1) H / side), and likewise in columns."""
    number = {cell: n for n, cell in enumerate(cells_of(space))}
    found = []
    for at in cells_of((side, side)):
        spans = [range(i * size // side, -(-(i + 1) * size // side)) for i, size in zip(at, space, strict=True)]
        found.append([number[cell] for cell in itertools.product(*spans)])
    return found
