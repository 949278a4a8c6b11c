"""Losses: fairseq's numbers, gradients in float64, chunks, padding, adaptive heads, mixed targets."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.data.images.mixup import soft_targets
from subquad.kernels.cross_entropy import reference
from subquad.nn.embeddings import EmbeddingConfig, TokenEmbedding
from subquad.nn.heads import HeadConfig, WordHead, build_head
from subquad.tasks.losses import class_loss, logit_loss, target_entries, word_loss
from tests.originals.files import FOLDER
from tests.originals.training import check_label_smoothing

VOCAB, DIM, PAD = 11, 6, 1


def features_and_targets(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    target = torch.randint(2, VOCAB, (3, 7))
    target[0, 5:] = target[2, 3:] = PAD
    return torch.randn(3, 7, DIM, dtype=dtype, requires_grad=True), target


def written_out(logits: Tensor, target: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """The definition, over tokens that are no padding."""
    logp = logits[target != PAD].double().log_softmax(-1)
    nll = -logp.gather(1, target[target != PAD][:, None]).sum()
    each = smoothing / (logits.shape[-1] - 1)
    return (1 - smoothing - each) * nll - each * logp.sum(), nll


def test_fairseq_values() -> None:
    check_label_smoothing(json.loads((FOLDER / "fairseq" / "criterion_label_smoothed.json").read_text()))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 1000])
def test_a_word_head_in_chunks(monkeypatch: pytest.MonkeyPatch, smoothing: float, bias: bool, rows: int) -> None:
    monkeypatch.setattr(reference, "LEAST_ROWS", rows)
    monkeypatch.setattr(reference, "CPU_ELEMENTS", 1)
    features, target = features_and_targets(torch.float64)
    head = WordHead(DIM, VOCAB, bias).double()
    if head.bias is not None:
        torch.nn.init.normal_(head.bias)
    expected, nll = written_out(head(features), target, smoothing)
    inputs = [features, *head.parameters()]
    gradients = torch.autograd.grad(3 * expected, inputs)
    loss = word_loss(head, features, target, pad=PAD, smoothing=smoothing)
    torch.testing.assert_close(loss.total, expected)
    torch.testing.assert_close(loss.nll, nll)
    assert loss.count == int((target != PAD).sum())
    for ours, theirs in zip(torch.autograd.grad(3 * loss.total, inputs), gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_tied_weights_get_the_gradient() -> None:
    features, target = features_and_targets()
    embedding = torch.nn.Embedding(VOCAB, DIM)
    head = WordHead(DIM, VOCAB, tied=embedding)
    word_loss(head, features, target, pad=PAD).total.backward()
    assert embedding.weight.grad is not None
    (expected,) = torch.autograd.grad(written_out(head(features), target, 0.0)[0], [embedding.weight])
    torch.testing.assert_close(embedding.weight.grad, expected)


def test_logits_of_any_size() -> None:
    """Large logits neither overflow nor lose the loss of an unlikely word."""
    logits = torch.tensor([[900.0, -900.0, 3.0, 0.0], [0.0, 0.0, 0.0, 80.0]], requires_grad=True)
    target = torch.tensor([2, 0])
    loss = logit_loss(logits, target, pad=PAD)
    torch.testing.assert_close(loss.total, torch.tensor(897.0 + 80.0))
    loss.total.backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, logits.detach().softmax(-1) - F.one_hot(target, 4))


def test_autocast_is_close_and_keeps_the_parameters_type() -> None:
    features, target = features_and_targets()
    head = WordHead(DIM, VOCAB)
    exact = word_loss(head, features, target, pad=PAD, smoothing=0.1)
    exact.total.backward()
    assert head.weight is not None
    assert head.weight.grad is not None
    expected = head.weight.grad.clone()
    head.weight.grad.zero_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = word_loss(head, features, target, pad=PAD, smoothing=0.1)
    loss.total.backward()
    assert loss.total.dtype == torch.float32
    assert head.weight.grad.dtype == torch.float32
    torch.testing.assert_close(loss.total, exact.total, rtol=2e-2, atol=0.0)
    torch.testing.assert_close(head.weight.grad, expected, rtol=5e-2, atol=5e-2)


def test_half_precision_logits_are_summed_in_single() -> None:
    features, target = features_and_targets()
    head = WordHead(DIM, VOCAB)
    with torch.autocast("cpu", torch.float16):
        loss = word_loss(head, features, target, pad=PAD, smoothing=0.1)
    expected, _ = written_out(head(features), target, 0.1)
    assert loss.total.dtype == torch.float32
    torch.testing.assert_close(loss.total.double(), expected, rtol=5e-3, atol=0.0)


@pytest.mark.parametrize("from_logits", [False, True])
def test_nothing_but_padding(from_logits: bool) -> None:
    features, target = features_and_targets()
    head = WordHead(DIM, VOCAB)
    target = torch.full_like(target, PAD)
    loss = logit_loss(head(features), target) if from_logits else word_loss(head, features, target)
    loss.total.backward()
    assert (loss.total.item(), loss.count) == (0, 0)
    assert features.grad is not None
    assert not features.grad.any()


def test_without_gradients() -> None:
    features, target = features_and_targets()
    head = WordHead(DIM, VOCAB)
    with torch.no_grad():
        loss = word_loss(head, features, target, pad=PAD, smoothing=0.1)
    assert not loss.total.requires_grad
    torch.testing.assert_close(loss.total.double(), written_out(head(features), target, 0.1)[0])


def test_an_adaptive_head() -> None:
    features, target = features_and_targets()
    embedding = TokenEmbedding(VOCAB, DIM, EmbeddingConfig())
    head = build_head(HeadConfig(tied=False, cutoffs=(4,), factor=2), DIM, VOCAB, embedding)
    loss = word_loss(head, features, target, pad=PAD)
    expected, _ = written_out(head(features), target, 0.0)  # an adaptive head gives log-probabilities
    torch.testing.assert_close(loss.total.double(), expected)
    entries = target_entries(target, PAD)
    index, words = entries["target_index"], entries["target_words"]
    assert torch.equal(word_loss(head, features, target, pad=PAD, index=index, words=words).total, loss.total)
    with pytest.raises(ValueError, match="no label smoothing"):
        word_loss(head, features, target, smoothing=0.1)


def test_classes() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(5, 4, requires_grad=True), torch.tensor([0, 3, 1, 1, 2])
    logp = logits.log_softmax(-1)
    nll = -logp.gather(1, labels[:, None]).sum()
    smoothed = class_loss(logits, labels, smoothing=0.1)
    torch.testing.assert_close(smoothed.total, 0.9 * nll - 0.1 * logp.mean(-1).sum())
    torch.testing.assert_close(smoothed.nll, nll.detach())
    soft = class_loss(logits, soft_targets(labels, 4, 0.1))
    torch.testing.assert_close(soft.total, smoothed.total)
    mixed = 0.3 * soft_targets(labels, 4) + 0.7 * soft_targets(labels.flip(0), 4)
    torch.testing.assert_close(class_loss(logits, mixed).total, -(mixed * logp).sum())
    assert smoothed.count == 5
