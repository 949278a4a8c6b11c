"""Linformer beyond what every mechanism is tested for: compression, its sharing, its limits."""

import copy

import pytest
import torch

from subquad.mixers import build
from subquad.mixers.linformer import Linformer, LinformerContext
from subquad.nn.block import BlockInputs
from subquad.nn.stack import MixerChoice, Stack, StackConfig
from tests.originals.files import assert_close

T = 7


def with_identity_compression(**options):
    """A linformer whose projected keys are those of the positions, and a softmax mixer with the same projections."""
    options = {"dim": 16, "heads": 4, **options}
    softmax = build("softmax", **options)
    with torch.no_grad():
        for parameter in softmax.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    pairs = []
    for extra in (
        {"compress": "compress-first"},
        {"compress": "compress-first", "share_kv": True},
        {"compress": "project-first"},
        {"compress": "project-first", "per_head": True},
    ):
        linformer = Linformer(proj_k=T, max_length=T, **options, **extra)
        missing = linformer.load_state_dict(softmax.state_dict(), strict=False)
        assert not missing.unexpected_keys
        for name in missing.missing_keys:
            linformer.get_parameter(name).data.copy_(torch.eye(T))
        pairs.append((linformer, softmax))
    return pairs


@pytest.mark.parametrize("options", [{}, {"head_dim": 3}, {"qkv_bias": False, "out_projection": False}])
def test_with_the_identity_it_is_softmax(options) -> None:
    x, context = torch.randn(2, T, 16), torch.randn(2, T, 16)
    for linformer, softmax in with_identity_compression(**options):
        assert_close(linformer(x).y, softmax(x).y, 1e-5, "self-attention")
        assert_close(linformer(x, context=context).y, softmax(x, context=context).y, 1e-5, "cross-attention")


def test_the_orders_differ_by_the_biases_only() -> None:
    x = torch.randn(2, T, 16)
    first = Linformer(dim=16, heads=4, proj_k=3, compress="compress-first")
    second = Linformer(dim=16, heads=4, proj_k=3, compress="project-first")
    second.load_state_dict(first.state_dict())
    assert_close(first(x).y, second(x).y, 1e-5, "with zero biases")
    torch.nn.init.ones_(first.qkv.bias)
    second.load_state_dict(first.state_dict())
    assert not torch.allclose(first(x).y, second(x).y, atol=1e-3)


def test_lengths_above_the_maximum_are_refused() -> None:
    mixer = Linformer(dim=16, heads=4, proj_k=3, max_length=T)
    mixer(torch.randn(1, T, 16))
    with pytest.raises(ValueError, match=r"linformer: length 8 is above the maximum of 7"):
        mixer(torch.randn(1, T + 1, 16))
    mixer(torch.randn(1, T + 1, 16), context=torch.randn(1, T, 16))
    with pytest.raises(ValueError, match=r"linformer: length 8 is above the maximum of 7"):
        mixer(torch.randn(1, T, 16), context=torch.randn(1, T + 1, 16))


def test_a_frozen_compression_is_not_trained() -> None:
    mixer = Linformer(dim=16, heads=4, frozen=True)
    mixer(torch.randn(1, T, 16)).y.sum().backward()
    untrained = {name for name, parameter in mixer.named_parameters() if parameter.grad is None}
    assert untrained == {"compress_k", "compress_v"}
    assert untrained <= set(mixer.state_dict())


@pytest.mark.parametrize("share_kv", [False, True])
def test_layers_share_their_compression(share_kv: bool) -> None:
    first, second = (Linformer(dim=16, heads=4, proj_k=3, share_kv=share_kv) for _ in range(2))
    second.share_compression(first)
    second.qkv.load_state_dict(first.qkv.state_dict())
    second.out.load_state_dict(first.out.state_dict())
    x = torch.randn(1, T, 16)
    assert torch.equal(second(x).y, first(x).y)
    second(x).y.square().sum().backward()
    assert first.compress_k.grad is not None
    assert first.compress_k.grad.abs().max() > 0
    layers = torch.nn.ModuleList([first, second])
    assert sum("compress" in name for name in layers.state_dict()) == (1 if share_kv else 2)


def test_layers_of_a_stack_share_one_matrix() -> None:
    options = {"name": "linformer", "proj_k": 3, "max_length": T, "share_kv": True}
    own, shared = (
        Stack(
            StackConfig(dim=16, heads=4, layers=3, mixer=MixerChoice.model_validate(options | {"share_layers": share}))
        )
        for share in (False, True)
    )
    assert sum("compress" in name for name in own.state_dict()) == 3
    assert [name for name in shared.state_dict() if "compress" in name] == ["blocks.0.mixer.compress_k"]
    weights = shared.state_dict()
    alike = {name: weights.get(name, weights["blocks.0.mixer.compress_k"]) for name in own.state_dict()}
    own.load_state_dict(alike)
    x = torch.randn(2, T, 16)
    for stack in (shared, copy.deepcopy(shared)):
        assert torch.equal(stack(x, BlockInputs()).x, own(x, BlockInputs()).x)


def test_layers_that_share_nothing_lend_nothing() -> None:
    shares = [False, True, True]
    options = {"name": "linformer", "proj_k": 3, "max_length": T, "share_kv": True, "share_layers": shares}
    stack = Stack(StackConfig(dim=16, heads=4, layers=3, mixer=MixerChoice.model_validate(options)))
    owners = [name.split(".")[1] for name in stack.state_dict() if "compress" in name]
    assert owners == ["0", "1"]


def test_a_matrix_of_all_layers_serves_keys_and_values() -> None:
    with pytest.raises(ValueError, match="linformer: share_layers=True needs share_kv=True"):
        Linformer(dim=16, heads=4, share_layers=True)


@pytest.mark.parametrize("other", [{"proj_k": 4}, {"max_length": 9}, {"share_kv": True}])
def test_layers_of_other_shapes_cannot_share(other) -> None:
    mixer = Linformer(dim=16, heads=4, proj_k=3)
    with pytest.raises(ValueError, match="linformer: compression matrices can be shared"):
        mixer.share_compression(Linformer(**{"dim": 16, "heads": 4, "proj_k": 3, **other}))


def test_matrices_per_head_need_heads() -> None:
    with pytest.raises(ValueError, match="linformer: per_head=True needs compress='project-first'"):
        Linformer(dim=16, heads=4, per_head=True)


@pytest.mark.parametrize("options", [{}, {"compress": "project-first"}])
def test_a_cached_context_is_as_small_as_proj_k(options) -> None:
    mixer = Linformer(dim=16, heads=4, proj_k=3, **options)
    torch.nn.init.normal_(mixer.qkv.bias)
    x, context = torch.randn(2, 5, 16), torch.randn(2, 300, 16)
    padding = torch.arange(300) >= torch.tensor([[300], [17]])
    whole = mixer(x, context=context, context_padding=padding).y
    state, parts = mixer.init_state(2), list[torch.Tensor]()
    for token in x.split(1, dim=1):
        given = {"context": context, "context_padding": padding} if not parts else {}
        y, state, _ = mixer(token, state=state, **given)
        parts.append(y)
    assert_close(torch.cat(parts, 1), whole, 1e-5, "token by token")
    assert isinstance(state, LinformerContext)
    assert state.k.shape == state.v.shape == (2, 4, 3, 4)
    swapped = mixer(x.flip(0), state=state.reorder(torch.tensor([1, 0]))).y
    assert_close(swapped, whole.flip(0), 1e-5, "rows exchanged")


def test_it_does_not_stream_its_own_sequence() -> None:
    mixer = Linformer(dim=16, heads=4)
    with pytest.raises(ValueError, match="linformer streams only as cross-attention"):
        mixer(torch.randn(1, 1, 16), state=mixer.init_state(1))
