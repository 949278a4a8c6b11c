"""Modules of other packages beside our mixers, in training: forward and backward on the same tokens."""

import ast
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measured import Effort, Result, interval, milliseconds, summary
from benchmarks.whole import check_training, tokens
from subquad.compare.measure.checks import CheckFailedError, check_tensor
from subquad.compare.measure.timing import Work, interleaved_seconds, peak_bytes
from subquad.compare.statistics.times import speed_ratio
from subquad.mixers import Mixer, build

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Sizes:
    """Shorter sequences come in larger batches, of as many tokens."""

    dim: int = 512
    heads: int = 8
    lengths: tuple[int, ...] = (128, 1024, 8192)
    tokens: int = 8192


@dataclass(frozen=True)
class Pair:
    """peer: dotted name and keywords of a class whose module takes (batch, time, dim); ours: a mixer and options."""

    label: str
    peer: str
    ours: str


WIDTH = "dim={dim}, heads={heads}, dim_head={dim_head}"
"""Keywords of all three packages, filled in for the sizes that are measured."""
PYPI: dict[str, list[Pair]] = {
    "x-transformers": [
        Pair("x-transformers, attention", f"x_transformers.Attention({WIDTH}, flash=True)", "softmax()"),
        Pair(
            "x-transformers, causal attention",
            f"x_transformers.Attention({WIDTH}, flash=True, causal=True)",
            "softmax(causal=True)",
        ),
    ],
    # windows of 64 tokens, each of which attends to 128, in both packages
    "local-attention": [
        Pair(
            "local-attention",
            f"local_attention.LocalMHA({WIDTH}, window_size=64, look_backward=1, look_forward=0, "
            "exact_windowsize=False, use_rotary_pos_emb=False)",
            "local(window=64, overlap=True)",
        )
    ],
    "performer-pytorch": [
        Pair(
            "performer-pytorch", f"performer_pytorch.SelfAttention({WIDTH}, nb_features=64)", "performer(features=64)"
        ),
        Pair(
            "performer-pytorch, causal",
            f"performer_pytorch.SelfAttention({WIDTH}, nb_features=64, causal=True)",
            "performer(features=64, causal=True)",
        ),
    ],
}


def compare_pair(pair: Pair, sizes: Sizes, time: int, effort: Effort) -> Result:
    labels: dict[str, Any] = {"peer": pair.label, "T": time, "batch": max(1, sizes.tokens // time)}
    x = tokens(labels["batch"], time, sizes.dim)
    try:
        ours, control, peer = (build_ours(pair.ours, sizes), build_ours(pair.ours, sizes), build_peer(pair.peer, sizes))
        check_training(ours, x)
        work = {"ours": training(ours, x), "control": training(control, x), "peer": training(peer, x)}
        peaks = {name: peak_bytes(checked(work[name], x), CPU) / 1e6 for name in ("ours", "peer")}
    except (CheckFailedError, ImportError, AttributeError, TypeError, ValueError, RuntimeError) as failure:
        return Result("peer-modules", labels, reason=str(failure))
    one_round = sum(sum(kept) for kept in interleaved_seconds(work, [1]).values())
    rounds = max(effort.least, min(effort.most, int(effort.budget / one_round)))
    seconds = interleaved_seconds(work, [rounds], warmup=0)
    medians = summary(seconds)
    ratio, own = speed_ratio(seconds["ours"], seconds["peer"], 1), speed_ratio(seconds["control"], seconds["ours"], 1)
    numbers = {"parameters, peer / ours": count(peer) / count(ours)}
    numbers |= {f"{name} MB": peak for name, peak in peaks.items()}
    numbers |= milliseconds({name: medians[name] for name in peaks}) | interval(ratio)
    return Result("peer-modules", labels, numbers, ratio.ratio, seconds=medians, control=own)


def build_ours(text: str, sizes: Sizes) -> Mixer:
    name, keywords = parse_call(text)
    torch.manual_seed(0)
    return build(name, **{"dim": sizes.dim, "heads": sizes.heads, **keywords}).train()


def build_peer(text: str, sizes: Sizes) -> nn.Module:
    widths = {"dim": sizes.dim, "heads": sizes.heads, "dim_head": sizes.dim // sizes.heads}
    name, keywords = parse_call(text.format(**widths))
    torch.manual_seed(0)
    return pkgutil.resolve_name(name)(**keywords).train()


def parse_call(text: str) -> tuple[str, dict[str, Any]]:
    """Dotted name and keywords of a call, whose values are literals: nothing is evaluated."""
    wrong = f"{text!r} should be a dotted name with keywords, such as package.Class(dim=512, causal=True)"
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not re.fullmatch(r"[\w.]+", ast.unparse(call.func)):
            raise ValueError(wrong)
        keywords = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError):
        raise ValueError(wrong) from None
    return ast.unparse(call.func), keywords


def training(module: nn.Module, x: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    """Forward and backward with a gradient of ones: returns the output and the gradient of the input."""
    x = x.detach().requires_grad_()
    learned = [x, *(parameter for parameter in module.parameters() if parameter.requires_grad)]
    upstream = torch.ones_like(x)

    def work() -> tuple[Tensor, Tensor]:
        y = module(x)
        y = y if isinstance(y, Tensor) else y[0]
        return y.detach(), torch.autograd.grad(y, learned, upstream, allow_unused=True)[0]

    return work


def checked(work: Callable[[], tuple[Tensor, Tensor]], x: Tensor) -> Work:
    """The same work, whose results have to be finite and of the shape of x."""

    def checked_work() -> None:
        for name, value in zip(("output", "gradient of the input"), work(), strict=True):
            check_tensor(name, value, x.shape)

    return checked_work


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
