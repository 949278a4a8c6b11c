"""Attention transfer: mixers learn from the attention they replace, in one pass, and the teacher does not change."""

from typing import Any

import pytest
import torch
from torch import Tensor

from subquad.linearise.options import parse_mixer
from subquad.linearise.stages.batches import Batch
from subquad.linearise.stages.layers import AttentionLayers
from subquad.linearise.stages.objective import logits_of
from subquad.linearise.stages.transfer import AttentionTransfer, relative_error
from subquad.nn.stack import MixerChoice
from subquad.testing import close
from tests.linearise.hosts import HOSTS, data_for


def layers_of(model: Any, mixer: str) -> AttentionLayers:
    torch.manual_seed(3)
    return AttentionLayers(model, MixerChoice.model_validate(parse_mixer(mixer)))


def batch_for(host: str) -> Batch:
    return data_for(host).train.batch(range(4), 0)


@pytest.mark.parametrize("host", HOSTS)
def test_a_mixer_that_computes_the_attention_has_nothing_to_learn(host: str) -> None:
    model = HOSTS[host]()
    layers, batch = layers_of(model, "local=window=64"), batch_for(host)
    before = logits_of(model, batch).detach()
    errors = AttentionTransfer(model, layers).errors(data_for(host).valid, 4)
    assert errors.keys() == {0, 1}
    assert max(errors.values()) < 1e-10
    with torch.no_grad(), layers.replaced():
        assert close(logits_of(model, batch), before)
    assert torch.equal(logits_of(model, batch), before)


@pytest.mark.parametrize("host", HOSTS)
def test_gradients_are_those_of_the_teachers_activations_and_only_mixers_have_them(host: str) -> None:
    """Each layer's loss is computed again from what went into the attention and came out of it."""
    model = HOSTS[host]()
    model.requires_grad_(False)
    layers, batch = layers_of(model, "eva=window=4"), batch_for(host)
    AttentionTransfer(model, layers)(batch)
    mask = batch.inputs.get("attention_mask")
    for layer in layers.layers.values():
        found = {name: p.grad.clone() for name, p in layer.replacement.named_parameters() if p.grad is not None}
        assert found
        layer.replacement.zero_grad()
        seen: list[tuple[Any, Any, Any]] = []
        handle = layer.attention.register_forward_hook(
            lambda _, args, options, output, seen=seen: seen.append((args, options, output)), with_kwargs=True
        )
        with torch.no_grad():
            logits_of(model, batch)
        handle.remove()
        ((args, options, output),) = seen
        y = layer.replacement(*args, **options)
        target = layer.target(output)
        relative_error(y[0] if isinstance(y, tuple) else y, target, None if mask is None else mask.bool()).backward()
        for name, p in layer.replacement.named_parameters():
            if name in found:
                assert p.grad is not None
                assert close(found[name], p.grad)
    assert all(p.grad is None for p in model.parameters())


def test_transfer_brings_mixers_nearer_and_changes_no_bit_of_the_teacher() -> None:
    model = HOSTS["llama"]()
    batch = batch_for("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    logits = logits_of(model, batch).detach()
    layers = layers_of(model, "eva=window=4")
    learned = list(layers.replacements.parameters())
    optimizer = torch.optim.Adam(learned, 1e-2)
    transfer = AttentionTransfer(model, layers)
    model.requires_grad_(False)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        losses.append(transfer(batch)["transfer"])
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(logits_of(model, batch), logits)


def test_only_one_layers_activations_are_alive_at_a_time() -> None:
    """What the first layer saved for its backward pass is gone when the second layer begins."""
    model = HOSTS["gpt2"]()
    layers = layers_of(model, "local=window=4")
    transfer = AttentionTransfer(model, layers)
    alive: list[int] = []
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        saved.append(tensor)
        return len(saved) - 1

    def unpack(place: int) -> Tensor:
        alive.append(place)
        return saved[place]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        first = []
        handle = layers.layers[1].attention.register_forward_pre_hook(lambda *_: first.append((len(saved), len(alive))))
        transfer(batch_for("gpt2"))
        handle.remove()
    ((packed, unpacked),) = first
    assert packed > 0
    assert unpacked >= packed  # all that layer 0 kept was used before layer 1 began
    assert len(saved) > packed


def test_padding_counts_for_nothing() -> None:
    y, target = torch.randn(2, 5, 3), torch.randn(2, 5, 3)
    mask = torch.tensor([[True] * 5, [True, True, False, False, False]])
    whole = relative_error(y, target, mask)
    y[1, 2:] = 1e6
    assert torch.equal(relative_error(y, target, mask), whole)
    kept = torch.cat([y[0], y[1, :2]]), torch.cat([target[0], target[1, :2]])
    assert close(whole, (kept[0] - kept[1]).square().sum() / kept[1].square().sum())
