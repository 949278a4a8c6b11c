"""Losses as sums over target tokens (or samples), and how many there were: the trainer divides once, over all
micro-batches and workers.

Words are smoothed as in fairseq, and their logits never exist as a whole (`kernels/cross_entropy`). Whoever makes a
batch says where its targets are (`target_entries`), because a GPU that was asked for their number would keep the pass
waiting. Classes are smoothed as in timm and torch, with smoothing / V for every class.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.kernels.cross_entropy import cross_entropy, linear_cross_entropy
from subquad.nn.heads import AdaptiveHead, WordHead, copy_without_waiting


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


def target_index(target: Tensor, pad: int) -> Tensor:
    """Where targets (...) are that count, as (n,) int64 into the flattened tensor."""
    return (target.flatten() != pad).nonzero().squeeze(1)


def target_entries(target: Tensor, pad: int) -> dict[str, Tensor]:
    """What a batch, still on the CPU, says about its targets: their `target_index` (n,), and `target_words` (n,).

    Those are the targets that count. They stay on the CPU, for `AdaptiveHead`.
    """
    index = target_index(target, pad)
    return {"target_index": index, "target_words": target.flatten()[index]}


def word_loss(
    head: WordHead | AdaptiveHead,
    features: Tensor,
    target: Tensor,
    *,
    pad: int = 1,
    smoothing: float = 0.0,
    index: Tensor | None = None,
    words: Tensor | None = None,
) -> LossOutput:
    """Loss of the target words (...) given what the head reads, features (..., dim), without whole logits.

    index, words: the `target_entries` of these targets, if the batch has them.
    """
    features, target = features.flatten(0, -2), target.flatten()
    if isinstance(head, AdaptiveHead) and index is None:
        index = target_index(target, pad)
    if index is not None and len(index) < len(target):
        features, target = features.index_select(0, index), target.index_select(0, index)
    if isinstance(head, AdaptiveHead):
        return _adaptive_loss(head, features, target, words, smoothing)
    total, nll = linear_cross_entropy(features, head.weight, head.bias, target, pad=pad, smoothing=smoothing)
    return LossOutput(total, {"nll": nll.detach()}, _count(target, pad) if index is None else len(index))


def _adaptive_loss(
    head: AdaptiveHead, features: Tensor, target: Tensor, words: Tensor | None, smoothing: float
) -> LossOutput:
    if smoothing:
        raise ValueError("an adaptive head has no label smoothing; set the loss's smoothing to 0")
    total = head.nll(features, target, words).sum() if len(target) else features.sum() * 0.0
    return LossOutput(total, {"nll": total.detach()}, len(target))


def _count(target: Tensor, pad: int) -> int:
    return len(target) if pad == -1 else int((target != pad).sum())  # -1: nothing is padding, nothing to wait for


def losses_by_row(
    head: WordHead | AdaptiveHead, features: Tensor, target: Tensor, *, pad: int = 1
) -> list[list[float]]:
    """[nll, number of targets] of every row: features (rows, time, dim), target (rows, time); nll is summed."""
    rows = zip(features, target, _on_cpu(head, target), strict=True)
    return _read([_sums(head, row, words, known, pad) for row, words, known in rows])


def _on_cpu(head: WordHead | AdaptiveHead, target: Tensor) -> Tensor:
    """The targets, from which an adaptive head finds its bands: a GPU is asked once, and not for each of them."""
    return target.cpu() if isinstance(head, AdaptiveHead) else target


def _sums(
    head: WordHead | AdaptiveHead, features: Tensor, target: Tensor, known: Tensor, pad: int
) -> tuple[Tensor, Tensor]:
    """The nll of target words (time,) and their number, both on the device. known: those of `_on_cpu`."""
    if isinstance(head, AdaptiveHead):
        entries = target_entries(known, pad)
        index = copy_without_waiting(entries["target_index"], features.device)
        nll = word_loss(head, features, target, pad=pad, index=index, words=entries["target_words"]).nll
    else:
        _, nll = linear_cross_entropy(features, head.weight, head.bias, target, pad=pad, smoothing=0.0)
    return nll.detach(), (target != pad).sum()


def _read(sums: Sequence[tuple[Tensor, Tensor]]) -> list[list[float]]:
    """The numbers of all pairs, for which a GPU is waited for once."""
    if not sums:
        return []
    nlls, counts = (torch.stack(column) for column in zip(*sums, strict=True))
    return torch.stack([nlls, counts.to(nlls.dtype)], 1).tolist()


def losses_by_position(
    head: WordHead | AdaptiveHead,
    features: Tensor,
    target: Tensor,
    buckets: Sequence[slice],
    rows: Sequence[tuple[int, int]],
    *,
    pad: int = 1,
) -> list[list[float]]:
    """[nll, number of targets] of every row, as `losses_by_row`, for one bucket of positions after the other.

    rows: for each row, the position of its first token, and how many tokens it begins with that are not scored.
    """
    found = [[0.0, 0.0] * len(buckets) for _ in rows]
    places, sums = [], []
    columns = zip(features, target, _on_cpu(head, target), rows, strict=True)
    for row, (x, words, known, (start, context)) in enumerate(columns):
        for number, bucket in enumerate(buckets):
            begin, end = max(bucket.start - start, context), max(bucket.stop - start, context)
            if begin < min(end, len(words)):  # something is scored here
                places.append((row, slice(2 * number, 2 * number + 2)))
                sums.append(_sums(head, x[begin:end], words[begin:end], known[begin:end], pad))
    for (row, place), numbers in zip(places, _read(sums), strict=True):
        found[row][place] = numbers
    return found


def logit_loss(logits: Tensor, target: Tensor, *, pad: int = 1, smoothing: float = 0.0) -> LossOutput:
    """The loss of `word_loss` from logits (..., vocab); one buffer holds probabilities, and then gradients."""
    target = target.flatten()
    total, nll = cross_entropy(logits.flatten(0, -2), target, pad=pad, smoothing=smoothing)
    return LossOutput(total, {"nll": nll.detach()}, _count(target, pad))


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
