"""Losses as sums over target tokens (or samples), and how many there were: the trainer divides once, over all
micro-batches and workers.

Label smoothing of words is fairseq's, over V words with e = smoothing / (V - 1):

    loss                      (1 - smoothing - e) * nll + e * sum_w -log p(w)
    gradient of the logits    p - e - (1 - smoothing - e) [w = target]

Padded targets are left out before anything is computed. A word head's logits are made in chunks of tokens, and each
chunk's gradients at once: (tokens, vocabulary) never exists as a whole, in neither pass.
Classes are smoothed as in timm and torch, with smoothing / V for every class.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from subquad.nn.heads import AdaptiveHead, WordHead

CHUNK_ELEMENTS = 1 << 21
"""Logits in a chunk: 8 MB, which stay in the cache between the passes over them."""
LEAST_ROWS = 128
"""Fewer rows make the matrix products slow."""


@dataclass(frozen=True)
class LossOutput:
    """What a batch costs.

    total: the sum to differentiate. sums: detached numbers that add up over batches, among them `nll`, the sum of
    -log p(target) without smoothing. count: targets.
    """

    total: Tensor
    sums: dict[str, Tensor]
    count: int

    @property
    def nll(self) -> Tensor:
        return self.sums["nll"]


def add_regularizer(loss: LossOutput, aux: Tensor | None, weight: float) -> LossOutput:
    """The loss and the mean of the mixers' regulariser (batch,), which counts `weight` for every target."""
    if aux is None:
        return loss
    regularizer = aux.float().mean()
    total = loss.total + weight * loss.count * regularizer if weight else loss.total
    return LossOutput(total, loss.sums | {"regulariser": regularizer.detach().double() * loss.count}, loss.count)


def word_loss(
    head: WordHead | AdaptiveHead, features: Tensor, target: Tensor, *, pad: int = 1, smoothing: float = 0.0
) -> LossOutput:
    """Loss of the target words (...) given what the head reads, features (..., dim), without whole logits."""
    features, target = _without_padding(features.flatten(0, -2), target.flatten(), pad)
    count = target.numel()
    if isinstance(head, AdaptiveHead):
        if smoothing:
            raise ValueError("an adaptive head has no label smoothing; set the loss's smoothing to 0")
        total = head.nll(features, target).sum() if count else features.sum() * 0.0
        return LossOutput(total, {"nll": total.detach()}, count)
    weight = head.weight if head.weight is not None else head.tied[0].weight
    dtype = _product_dtype(features)
    if dtype == torch.float16:  # its gradients need the loss's scale before they are rounded: not in the forward pass
        total, nll = _LogitLoss.apply(head(features), target, smoothing, torch.is_grad_enabled())
    else:
        total, nll = _LinearLoss.apply(features, weight, head.bias, target, smoothing, dtype, torch.is_grad_enabled())
    return LossOutput(total, {"nll": nll.detach()}, count)


def losses_by_row(
    head: WordHead | AdaptiveHead, features: Tensor, target: Tensor, *, pad: int = 1
) -> list[list[float]]:
    """[nll, number of targets] of every row: features (rows, time, dim), target (rows, time); nll is summed."""
    losses = [word_loss(head, row, words, pad=pad) for row, words in zip(features, target, strict=True)]
    return [[float(loss.nll), float(loss.count)] for loss in losses]


def losses_by_position(
    head: WordHead | AdaptiveHead, features: Tensor, target: Tensor, buckets: Sequence[slice], *, pad: int = 1
) -> list[list[float]]:
    """[nll, number of targets] of every row, as `losses_by_row`, for one bucket of positions after the other."""
    parts = [losses_by_row(head, features[:, places], target[:, places], pad=pad) for places in buckets]
    return [[number for pair in row for number in pair] for row in zip(*parts, strict=True)]


def logit_loss(logits: Tensor, target: Tensor, *, pad: int = 1, smoothing: float = 0.0) -> LossOutput:
    """The loss of `word_loss` from logits (..., vocab); one buffer holds probabilities, and then gradients."""
    logits, target = _without_padding(logits.flatten(0, -2), target.flatten(), pad)
    total, nll = _LogitLoss.apply(logits, target, smoothing, torch.is_grad_enabled())
    return LossOutput(total, {"nll": nll.detach()}, target.numel())


def class_loss(logits: Tensor, target: Tensor, *, smoothing: float = 0.0) -> LossOutput:
    """Loss of classes: logits (batch, classes); target (batch,) labels, or (batch, classes) shares after mixing.

    Mixed targets are smoothed where they are made (`soft_targets` of data/images/mixup.py), so `smoothing` is for
    labels only. nll of mixed targets is their cross-entropy.
    """
    logits = logits.float()
    if target.ndim == 1:
        total = F.cross_entropy(logits, target, reduction="sum", label_smoothing=smoothing)
        nll = total if smoothing == 0 else F.cross_entropy(logits.detach(), target, reduction="sum")
    else:
        assert target.shape == logits.shape, f"targets {tuple(target.shape)} of logits {tuple(logits.shape)}"
        assert smoothing == 0, "smooth mixed targets in soft_targets"
        total = nll = F.cross_entropy(logits, target.to(logits.dtype), reduction="sum")
    return LossOutput(total, {"nll": nll.detach()}, len(logits))


# ---------------------------------------------------------------------- how it is computed


def _without_padding(rows: Tensor, target: Tensor, pad: int) -> tuple[Tensor, Tensor]:
    """rows (n, width) and targets (n,) that are no padding."""
    assert rows.shape[0] == target.shape[0], f"{rows.shape[0]} rows of {target.shape[0]} targets"
    kept = (target != pad).nonzero().squeeze(1)
    if len(kept) == len(target):
        return rows, target
    return rows.index_select(0, kept), target.index_select(0, kept)


def _product_dtype(features: Tensor) -> torch.dtype:
    """The dtype that a linear map would compute in: under autocast it is that of autocast."""
    device = features.device.type
    if torch.is_autocast_enabled(device) and features.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return features.dtype


def _row_losses(logits: Tensor, target: Tensor, smoothing: float, differentiate: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of the loss and of nll over rows of logits (n, V), in float32 or 64; gradient of the loss, (n, V).

    log sum exp = max x - log max p: the softmax's exponentials are enough, and max p >= 1 / V has a good logarithm.
    """
    vocab = logits.shape[1]
    if not len(target):  # rows without words: a batch of padding
        nothing = torch.zeros((), dtype=torch.float64, device=logits.device)
        return nothing, nothing.clone(), torch.zeros_like(logits)
    each = smoothing / max(1, vocab - 1)
    probabilities = logits.softmax(-1)
    normaliser = logits.amax(-1) - probabilities.amax(-1).log()
    chosen = target[:, None]
    nll = (normaliser - logits.gather(1, chosen).squeeze(1)).sum(dtype=torch.float64)
    total = nll.clone()  # autograd must see two tensors
    if smoothing:
        everything = (vocab * normaliser - logits.sum(-1)).sum(dtype=torch.float64)
        total = (1 - smoothing - each) * nll + each * everything
    if differentiate:
        if smoothing:
            probabilities.sub_(each)
        share = probabilities.new_full((len(target), 1), smoothing + each - 1)
        probabilities.scatter_add_(1, chosen, share)
    return total, nll, probabilities


class _LogitLoss(torch.autograd.Function):
    """Sum of the loss over logits (n, V). Saves the gradient, which the backward pass scales in place."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, smoothing: float, differentiate: bool
    ) -> tuple[Tensor, Tensor]:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        total, nll, gradient = _row_losses(wide, target, smoothing, differentiate)
        ctx.gradient, ctx.dtype = gradient, logits.dtype
        nll = nll.to(wide.dtype)
        ctx.mark_non_differentiable(nll)
        return total.to(wide.dtype), nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        assert ctx.gradient is not None, "the backward pass used its buffer up: it runs once"
        gradient, ctx.gradient = ctx.gradient, None
        return gradient.mul_(scale).to(ctx.dtype), None, None, None


class _LinearLoss(torch.autograd.Function):
    """Sum of the loss of logits = features weight^T + bias, without the logits.

    features (n, C), weight (V, C), bias (V,) or None. The forward pass already makes the three gradients, chunk by
    chunk, if `differentiate` (validation has no use for them); the backward pass scales them. Products run in `dtype`,
    sums and the softmax in float32 (or 64).
    """

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        smoothing: float,
        dtype: torch.dtype,
        differentiate: bool,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        given = (features, weight, bias)
        gradients = [
            torch.zeros_like(value, dtype=wide) if differentiate and wanted and value is not None else None
            for wanted, value in zip(ctx.needs_input_grad[:3], given, strict=True)
        ]
        wanted = any(gradient is not None for gradient in gradients)
        narrow, words = features.to(dtype), weight.to(dtype)
        rows = max(LEAST_ROWS, CHUNK_ELEMENTS // weight.shape[0])
        total = torch.zeros((), dtype=torch.float64, device=features.device)
        nll = torch.zeros_like(total)
        with torch.autocast(features.device.type, enabled=False):
            for start in range(0, len(target), rows):
                chunk = slice(start, start + rows)
                logits = F.linear(narrow[chunk], words).to(wide)
                if bias is not None:
                    logits += bias
                part, part_nll, upstream = _row_losses(logits, target[chunk], smoothing, wanted)
                total += part
                nll += part_nll
                del logits
                _add_products(gradients, upstream, narrow, words, chunk)
        ctx.gradients = gradients
        ctx.dtypes = [None if value is None else value.dtype for value in given]
        nll = nll.to(wide)
        ctx.mark_non_differentiable(nll)
        return total.to(wide), nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.gradients is not None, "the backward pass used its buffers up: it runs once"
        gradients, ctx.gradients = ctx.gradients, None
        if scale != 1:
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(scale)
        typed = [None if g is None else g.to(dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True)]
        return (*typed, None, None, None, None)


def _add_products(
    gradients: list[Tensor | None], upstream: Tensor, narrow: Tensor, words: Tensor, chunk: slice
) -> None:
    """Adds a chunk's part to the gradients of features, weight and bias, given that of its logits, (rows, V)."""
    of_features, of_weight, of_bias = gradients
    if of_bias is not None:
        of_bias += upstream.sum(0)
    upstream = upstream.to(words.dtype)
    if of_features is not None:
        if of_features.dtype == words.dtype:
            torch.mm(upstream, words, out=of_features[chunk])
        else:
            of_features[chunk] = upstream @ words
    if of_weight is not None:
        if of_weight.dtype == words.dtype:
            of_weight.addmm_(upstream.T, narrow[chunk])
        else:
            of_weight += upstream.T @ narrow[chunk]
