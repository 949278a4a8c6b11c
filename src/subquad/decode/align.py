"""Aligns target tokens with source tokens, by the softmax cross-attention of the last decoder layer."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from subquad.decode.beam import pad_rows
from subquad.mixers.softmax import Softmax
from subquad.models import Seq2Seq

Alignment = list[tuple[int, int]]
"""Pairs (source position, target position), counted from 0, without the end of the target."""


def check_alignments(model: Seq2Seq) -> None:
    """Raises ValueError if the cross-attention has no attention weights."""
    cross = model.decoder.blocks[-1].cross
    if not isinstance(cross, Softmax):
        raise ValueError(
            f"alignments need softmax cross-attention in the last decoder layer; this model has "
            f"{getattr(cross, 'name', 'nothing')} there"
        )


def align(model: Seq2Seq, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> list[Alignment]:
    """Aligns every target token with the source token of largest weight. Sources and targets end with eos."""
    pad, eos = model.config.target.pad or 0, targets[0][-1]
    device = next(model.parameters()).device
    source, source_padding = (t.to(device) for t in pad_rows(sources, pad))
    given = pad_rows([[eos, *target[:-1]] for target in targets], pad)[0].to(device)
    weights = cross_attention_weights(model, source, source_padding, given)
    chosen = weights.argmax(-1).tolist()
    return [[(chosen[row][t], t) for t in range(len(target) - 1)] for row, target in enumerate(targets)]


@torch.no_grad()
def cross_attention_weights(model: Seq2Seq, source: Tensor, source_padding: Tensor | None, target: Tensor) -> Tensor:
    """Returns the weights of the last layer, averaged over its heads: (batch, target time, source time)."""
    check_alignments(model)
    cross: Any = model.decoder.blocks[-1].cross
    read: list[Tensor] = []
    hook = cross.register_forward_pre_hook(lambda _, given: read.append(given[0]))
    try:
        context = model.encode(source, source_padding).x
        model.features(target, context, context_padding=source_padding)
    finally:
        hook.remove()
    (q,) = cross.project_part(read[0], 0, 1)
    # the decoder may have moved tokens to the front of their rows, so keys are projected again
    k, _ = cross.project_part(context, 1, 3)
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if source_padding is not None:
        scores = scores.masked_fill(source_padding[:, None, None], -float("inf"))
    return scores.softmax(-1).mean(1)
