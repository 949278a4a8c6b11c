"""The equations of the docstrings, typed in: one sequence in float64, heads and positions in loops.

Every function takes a mixer, the tokens x (N, C) and their space, (T,) or (H, W), and returns y (N, C). Of the mixer it
uses options, parameters and small maps such as linear ones, never what mixes positions. Mechanisms with windows and
landmarks are in equations_windows.py.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Space = tuple[int, ...]
Equation = Callable[[Any, Tensor, Space], Tensor]
EQUATIONS: dict[str, Equation] = {}


def equation_of(name: str) -> Callable[[Equation], Equation]:
    def add(equation: Equation) -> Equation:
        EQUATIONS[name] = equation
        return equation

    return add


NOISE = 0.5
"""What tests draw in the place of every N(0, 1)."""


def noise_of(mixer: Any) -> float:
    return NOISE if mixer.training else 0.0


def random_matrix(mixer: Any, h: int) -> Tensor:
    """W (m, d) of head h: as built, as learned, or drawn anew while training."""
    matrix = mixer.projection.matrix[h]
    drawn = mixer.training and mixer.config.projection == "redrawn"
    return torch.full_like(matrix, NOISE) if drawn else matrix


# ---------------------------------------------------------------------- what mechanisms with heads share


def project(mixer: Any, x: Tensor, positions: Sequence[int] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of every head: (heads, N, d). positions: of the tokens, where these are not 0, 1, 2, ..."""
    q, k, v = (part.unflatten(-1, (mixer.config.heads, -1)) for part in mixer.qkv(x).chunk(3, -1))
    if mixer.config.rotary:
        positions = range(len(x)) if positions is None else positions
        q, k = rotate(q, positions), rotate(k, positions)
    return q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)


def rotate(t: Tensor, positions: Sequence[int]) -> Tensor:
    """Channels i and i + d/2 of position p turned by the angle p 10000^(-2i/d)."""
    turned, half = t.clone(), t.shape[-1] // 2
    for n, p in enumerate(positions):
        for i in range(half):
            angle = p * 10000 ** (-2 * i / t.shape[-1])
            a, b = t[n, :, i], t[n, :, i + half]
            turned[n, :, i] = a * math.cos(angle) - b * math.sin(angle)
            turned[n, :, i + half] = b * math.cos(angle) + a * math.sin(angle)
    return turned


def join_heads(mixer: Any, y: list[list[Tensor]]) -> Tensor:
    """From y[h][i] (d,) to what the output map makes of heads side by side: (N, C)."""
    return mixer.out(torch.stack([torch.cat([head[i] for head in y]) for i in range(len(y[0]))]))


def for_heads_and_positions(mixer: Any, x: Tensor, output: Callable[[int, int], Tensor]) -> Tensor:
    """The output map of output(h, i) (d,) for all heads h and positions i."""
    heads = range(mixer.config.heads)
    return join_heads(mixer, [[output(h, i) for i in range(len(x))] for h in heads])


def seen(mixer: Any, i: int, count: int) -> range:
    return range(i + 1) if mixer.config.causal else range(count)


# ---------------------------------------------------------------------- attention to all


@equation_of("softmax")
def softmax(mixer: Any, x: Tensor, _: Space) -> Tensor:
    q, k, v = project(mixer, x)
    d = q.shape[-1]

    def y(h: int, i: int) -> Tensor:
        js = list(seen(mixer, i, len(x)))
        return torch.stack([q[h, i] @ k[h, j] / math.sqrt(d) for j in js]).softmax(0) @ v[h, js]

    return for_heads_and_positions(mixer, x, y)


@equation_of("linformer")
def linformer(mixer: Any, x: Tensor, _: Space) -> Tensor:
    config, n = mixer.config, len(x)
    E = mixer.compress_k[..., :n]
    F_ = E if mixer.compress_v is None else mixer.compress_v[..., :n]
    if config.compress == "compress-first":
        K, V = project(mixer, E @ x)[1], project(mixer, F_ @ x)[2]
    else:
        K, V = E @ project(mixer, x)[1], F_ @ project(mixer, x)[2]
    q = project(mixer, x)[0]

    def y(h: int, i: int) -> Tensor:
        logits = torch.stack([q[h, i] @ K[h, s] / math.sqrt(q.shape[-1]) for s in range(config.proj_k)])
        return logits.softmax(0) @ V[h]

    return for_heads_and_positions(mixer, x, y)


@equation_of("ra")
def ra(mixer: Any, x: Tensor, _: Space) -> Tensor:
    q, k, v = project(mixer, x)
    d = q.shape[-1]

    def y(h: int, i: int) -> Tensor:
        pi = torch.stack([q[h, i] @ k_j / math.sqrt(d) for k_j in k[h]]).softmax(0)
        drawn = int(pi.argmin())  # in the place of a draw from pi
        mu = q[h, i] + {"sampled": k[h, drawn], "mean": k[h].mean(0), "softmax": pi @ k[h]}[mixer.config.proposal]
        omega = mu + noise_of(mixer)
        logits = torch.stack([(omega @ k_j - k_j @ k_j / 2) / math.sqrt(d) for k_j in k[h]])
        return logits.softmax(0) @ v[h]

    return for_heads_and_positions(mixer, x, y)


# ---------------------------------------------------------------------- features


@equation_of("performer")
def performer(mixer: Any, x: Tensor, _: Space) -> Tensor:
    config = mixer.config
    q, k, v = project(mixer, x)
    n = config.max_length or len(x)

    def y(h: int, i: int) -> Tensor:
        js = list(seen(mixer, i, len(x)))
        phi_q, phi_k = features(mixer, h, q[h], k[h], i, js)
        weight = phi_k @ phi_q
        if config.cosine:
            weight = weight * torch.tensor([math.cos(math.pi / 2 * (i - j) / n) for j in js])
        return weight @ v[h, js] / weight.sum().clamp(min=config.smallest_normaliser)

    return for_heads_and_positions(mixer, x, y)


def features(mixer: Any, h: int, q: Tensor, k: Tensor, i: int, js: list[int]) -> tuple[Tensor, Tensor]:
    """phi(q_i) (m,) and phi(k_j) of the keys that it sees (len(js), m), relative to what keeps them finite."""
    name, m, d = mixer.config.feature_map, mixer.config.features, q.shape[-1]
    if name in ("favorp", "relu", "fourier"):
        W = random_matrix(mixer, h)
        q, k = q * d**-0.25, k * d**-0.25
    if name == "favorp":
        phi_q = m**-0.5 * torch.exp(W @ q[i] - q[i] @ q[i] / 2 - (W @ q[i]).max()) + 1e-4
        M = max((W @ k[j]).max() for j in js)
        return phi_q, torch.stack([m**-0.5 * torch.exp(W @ k[j] - k[j] @ k[j] / 2 - M) + 1e-4 for j in js])
    if name == "fourier":
        queries = js  # those it is measured against: all when it looks both ways, those so far when causal

        def phi(t: Tensor, among: list[Tensor]) -> Tensor:
            c, most = t @ t / 2, max(other @ other / 2 for other in among)
            return torch.exp(c - most) * m**-0.5 * torch.cat([(W @ t).sin(), (W @ t).cos()])

        keys = [k[j] for j in js]
        return phi(q[i], [q[j] for j in queries]), torch.stack([phi(key, keys) for key in keys])
    simple: dict[str, Callable[[Tensor], Tensor]] = {
        "relu": lambda t: (m**-0.5 * W @ t).relu() + 1e-3,
        "dpfp": lambda t: dpfp(t, m // d // 2),
        "mlp-fourier": lambda t: mlp_fourier(mixer.feature_map, h, t),
        "relu-only": lambda t: t.relu() + 0.1,
        "sigmoid-only": lambda t: t.sigmoid() + 0.1,
    }
    return simple[name](q[i]), torch.stack([simple[name](k[j]) for j in js])


def dpfp(t: Tensor, nu: int) -> Tensor:
    z = torch.cat([t.relu(), (-t).relu()])
    return torch.cat([z * z.roll(shift) for shift in range(1, nu + 1)])


def mlp_fourier(feature_map: Any, h: int, t: Tensor) -> Tensor:
    R = feature_map.frequencies[h]
    return feature_map.linear(len(t) ** -0.5 * torch.cat([(R @ t).cos(), (R @ t).sin()])).relu()


# ---------------------------------------------------------------------- primal


@equation_of("primal")
def primal(mixer: Any, x: Tensor, _: Space) -> Tensor:
    return primal_scores(mixer, x)[0]


def primal_scores(mixer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """y and J."""
    config, n = mixer.config, len(x)
    H, s = config.heads, config.rank
    q, k = (part.unflatten(-1, (H, -1)).transpose(0, 1) for part in mixer.qk(x).chunk(2, -1))
    We, Wr = mixer.we, mixer.wr
    if config.causal:
        q, k = (torch.stack([part[:, : t + 1].sum(1) for t in range(n)], 1) for part in (q, k))
        We_, Wr_ = We, Wr
    else:
        L = min(config.max_length, s * config.rank_multiple)
        samples = torch.linspace(0, n - 1, L, dtype=torch.int64)
        X = x.unflatten(-1, (H, -1)).transpose(0, 1)
        We_, Wr_ = (torch.stack([X[h, samples].T @ weight[h] for h in range(H)]) for weight in (We, Wr))

    def phi(u: Tensor) -> Tensor:
        return u / max(u.norm(), 1e-12)

    e = torch.stack([torch.stack([phi(q[h, t]) @ We_[h] for t in range(n)]) for h in range(H)])
    r = torch.stack([torch.stack([phi(k[h, t]) @ Wr_[h] for t in range(n)]) for h in range(H)])
    heads = [[mixer.join(torch.cat([e[h, t], r[h, t]])) for t in range(n)] for h in range(H)]
    traced = (We_, Wr_) if config.trace == "data" else (We, Wr)
    J = (
        sum((mixer.lam[h] * part[h, t]).square().sum() for h in range(H) for t in range(n) for part in (e, r))
        / (2 * H * n)
        - sum((traced[0][h].T @ traced[1][h]).trace() for h in range(H)) / H
    )
    return join_heads(mixer, heads), J


# ---------------------------------------------------------------------- convolutions


@equation_of("lightconv")
def lightconv(mixer: Any, x: Tensor, _: Space) -> Tensor:
    def taps(h: int, t: int, u: Tensor) -> Tensor:
        return mixer.filters[h].softmax(0) if mixer.config.tap_softmax else mixer.filters[h]

    return short_conv(mixer, x, taps)


@equation_of("dynamicconv")
def dynamicconv(mixer: Any, x: Tensor, _: Space) -> Tensor:
    config, K = mixer.config, mixer.config.kernel_size

    def taps(h: int, t: int, u: Tensor) -> Tensor:
        logits = mixer.tap_map(u[t])[h * K : (h + 1) * K]
        if config.renormalise:
            inside = torch.tensor([0 <= t - before(mixer) + tap < len(u) for tap in range(K)])
            logits = logits.masked_fill(~inside, -math.inf)
        return logits.softmax(0) if config.tap_softmax else logits

    return short_conv(mixer, x, taps)


def before(mixer: Any) -> int:
    K = mixer.config.kernel_size
    return K - 1 if mixer.config.causal else (K - 1) // 2


def short_conv(mixer: Any, x: Tensor, taps: Callable[[int, int, Tensor], Tensor]) -> Tensor:
    """c_t = sum_k taps_k u_{t-P+k}, head by head; u is zero outside the sequence."""
    config = mixer.config
    u = x if not config.projected else F.glu(mixer.in_proj(x)) if config.glu else mixer.in_proj(x)
    c = torch.zeros_like(u)
    width = u.shape[1] // config.heads
    for h in range(config.heads):
        channels = slice(h * width, (h + 1) * width)
        for t in range(len(u)):
            for tap, weight in enumerate(taps(h, t, u)):
                place = t - before(mixer) + tap
                if 0 <= place < len(u):
                    c[t, channels] += weight * u[place, channels]
    if config.conv_bias:
        c = c + mixer.conv_bias
    return mixer.out_proj(c) if config.projected else c
