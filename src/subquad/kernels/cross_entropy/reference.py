"""The cross-entropy of words in plain torch: the definition, on every device and in every precision.

Padded targets are left out before anything is computed, which a CPU can see at once; another device is waited for.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

CPU_ELEMENTS = 1 << 21
"""Logits in a chunk on a CPU: 8 MB, which stay in the cache between the passes over them."""
GPU_ELEMENTS = 1 << 27
"""Logits in a chunk elsewhere: some hundreds of megabytes, so that launches are few and their products large."""
LEAST_ROWS = 128
"""Fewer rows make the matrix products slow."""
RowLosses = Callable[[Tensor, Tensor, float, bool], tuple[Tensor, Tensor, Tensor]]
"""From logits (n, V), targets, smoothing and whether to differentiate to what `_row_losses` returns."""


def chunk_rows(vocab: int, device: torch.device) -> int:
    """Tokens whose logits are made at a time."""
    return max(LEAST_ROWS, (CPU_ELEMENTS if device.type == "cpu" else GPU_ELEMENTS) // vocab)


def linear_cross_entropy(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    pad: int,
    smoothing: float,
    dtype: torch.dtype,
    row_losses: RowLosses | None = None,
) -> tuple[Tensor, Tensor]:
    """Sums of the loss and of nll; see the public function. dtype: that of the products.

    row_losses: what does the work of `_row_losses`, and may put the gradient where the logits are.
    """
    features, target = without_padding(features, target, pad)
    if dtype == torch.float16:  # its gradients need the loss's scale before they are rounded: not in the forward pass
        logits = F.linear(features, weight, bias)
        return _LogitLoss.apply(logits, target, smoothing, torch.is_grad_enabled())
    rule = row_losses or _row_losses
    return _LinearLoss.apply(features, weight, bias, target, smoothing, dtype, torch.is_grad_enabled(), rule)


def cross_entropy(logits: Tensor, target: Tensor, pad: int, smoothing: float) -> tuple[Tensor, Tensor]:
    """Sums of the loss and of nll; one buffer holds probabilities, and then gradients."""
    logits, target = without_padding(logits, target, pad)
    return _LogitLoss.apply(logits, target, smoothing, torch.is_grad_enabled())


def without_padding(rows: Tensor, target: Tensor, pad: int) -> tuple[Tensor, Tensor]:
    """rows (n, width) and targets (n,) that are no padding."""
    kept = (target != pad).nonzero().squeeze(1)
    if len(kept) == len(target):
        return rows, target
    return rows.index_select(0, kept), target.index_select(0, kept)


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
        row_losses: RowLosses,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        given = (features, weight, bias)
        gradients = [
            torch.zeros_like(value, dtype=wide) if differentiate and wanted and value is not None else None
            for wanted, value in zip(ctx.needs_input_grad[:3], given, strict=True)
        ]
        wanted = any(gradient is not None for gradient in gradients)
        narrow, words = features.to(dtype), weight.to(dtype)
        rows = chunk_rows(weight.shape[0], features.device)
        total = torch.zeros((), dtype=torch.float64, device=features.device)
        nll = torch.zeros_like(total)
        with torch.autocast(features.device.type, enabled=False):
            for start in range(0, len(target), rows):
                chunk = slice(start, start + rows)
                logits = F.linear(narrow[chunk], words).to(wide)
                if bias is not None:
                    logits += bias
                part, part_nll, upstream = row_losses(logits, target[chunk], smoothing, wanted)
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
        if scale.device.type != "cpu" or scale != 1:  # another device would be waited for
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(scale)
        typed = [None if g is None else g.to(dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True)]
        return (*typed, None, None, None, None, None)


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
