"""Llama and the decoders that are written like it keep their maps, and a mixer works between them."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import subquad
from subquad.mixers import available, mixer_class
from subquad.testing import close
from tests.interop.swap_hosts import DECODER, DECODERS, LENGTH, mixers, tiny, tokens_and_mask

CAUSAL = [name for name in available() if mixer_class(name).capabilities.causal]
SMALL: dict[str, dict[str, Any]] = {"eva": {"window": 4, "chunk_size": 2}, "local": {"window": 4}}


def llama() -> Any:
    return tiny(*DECODERS["llama"])


@torch.no_grad()
def logits(model: Any, side: str = "left") -> Tensor:
    """Logits of the tokens; those of padded positions mean nothing."""
    tokens, mask = tokens_and_mask(side)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return model(tokens, attention_mask=mask, position_ids=positions).logits[mask.bool()]


def generate(model: Any, **options: Any) -> Any:
    tokens, mask = tokens_and_mask()
    settings = {"max_new_tokens": 9, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    return model.generate(tokens, attention_mask=mask, **settings | options)


@pytest.mark.parametrize("host", DECODERS)
def test_a_window_over_everything_changes_nothing_and_undo_restores_every_bit(host: str) -> None:
    model = tiny(*DECODERS[host])
    names = list(model.state_dict())
    before, written = logits(model), generate(model, num_beams=3)
    swapped = subquad.swap(model, "local", window=64)
    assert [layer.number for layer in swapped.replaced] == [0, 1]
    assert not swapped.refused
    assert not any(layer.weights.new or layer.weights.dropped for layer in swapped.replaced)
    assert [mixer.name for mixer in mixers(model)] == ["local", "local"]
    assert list(model.state_dict()) == names
    assert close(logits(model), before)
    after = generate(model, num_beams=3)
    assert torch.equal(after.sequences, written.sequences)
    assert all(close(a, b) for a, b in zip(after.logits, written.logits, strict=True))
    swapped.undo()
    assert torch.equal(logits(model), before)
    assert not mixers(model)
    assert list(model.state_dict()) == names
    assert torch.equal(generate(model, num_beams=3).sequences, written.sequences)


@pytest.mark.parametrize("mechanism", CAUSAL)
def test_cache_and_padding_change_nothing(mechanism: str) -> None:
    model = llama()
    subquad.swap(model, mechanism, **SMALL.get(mechanism, {}))
    with_cache, without = generate(model), generate(model, use_cache=False)
    assert torch.equal(with_cache.sequences, without.sequences)
    assert all(close(a, b) for a, b in zip(with_cache.logits, without.logits, strict=True))
    with torch.no_grad():
        for side in ("left", "right"):
            tokens, mask = tokens_and_mask(side)
            rows = [model(row[None, keep.bool()]).logits[0] for row, keep in zip(tokens, mask, strict=True)]
            assert close(logits(model, side), torch.cat(rows))


def test_the_cache_holds_a_state_that_does_not_grow() -> None:
    model = llama()
    tokens, _ = tokens_and_mask()
    swapped = subquad.swap(model, "local", window=4)
    cache = model(tokens).past_key_values
    sizes = [layer.state.k.shape for layer in cache.layers]
    cache = model(tokens, past_key_values=cache).past_key_values
    assert [layer.state.k.shape for layer in cache.layers] == sizes
    assert cache.get_seq_length() == 2 * LENGTH
    swapped.undo()
    with pytest.raises(ValueError, match="belongs to a swapped layer"):
        model(tokens, past_key_values=cache)


def test_maps_and_mixers_train_and_the_maps_keep_their_names() -> None:
    model = llama().train()
    names = set(model.state_dict())
    swapped = subquad.swap(model, "eva", window=4, chunk_size=2)
    new = set(model.state_dict()) - names
    assert "model.layers.1.self_attn.subquad.mixer.k_map.linear.weight" in new
    assert swapped.replaced[0].weights.kept == tuple(f"{part}_proj.weight" for part in "qkvo")
    tokens, mask = tokens_and_mask()
    torch.manual_seed(0)
    model(tokens, attention_mask=mask, labels=tokens).loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None for gradient in gradients)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(again.eval()), logits(model.eval()))
        assert len(mixers(again)) == 2
    model.zero_grad()
    model.train().gradient_checkpointing_enable()
    torch.manual_seed(0)
    model(tokens, attention_mask=mask, labels=tokens, use_cache=False).loss.backward()
    assert all(
        close(parameter.grad, gradient) for parameter, gradient in zip(model.parameters(), gradients, strict=True)
    )


def test_mechanisms_without_queries_replace_the_whole_layer() -> None:
    model = llama()
    before = logits(model)
    swapped = subquad.swap(model, "lightconv", kernel_size=3)
    assert "positions and norms inside the layer are gone" in str(swapped)
    v = model.model.layers[0].self_attn.mixer.in_proj.weight[:32]
    swapped.undo()
    kept = model.model.layers[0].self_attn.v_proj.weight.unflatten(0, (2, 8))
    assert torch.equal(v, kept.repeat_interleave(2, 0).flatten(0, 1))
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("MistralForCausalLM", {"sliding_window": 4}, "a sliding window of 4 tokens already"),
        ("Gemma2ForCausalLM", {"layer_types": ["full_attention"] * 2}, "capped at 50.0"),
    ],
)
def test_layers_with_windows_or_capped_logits_stay(kind: str, settings: dict[str, Any], reason: str) -> None:
    model = tiny(kind, DECODER | settings)
    with pytest.raises(ValueError, match=reason):
        subquad.swap(model, "local")
    model = tiny("Gemma3ForCausalLM", DECODER | {"layer_types": ["sliding_attention", "full_attention"]})
    swapped = subquad.swap(model, "performer")
    assert [layer.number for layer in swapped.replaced] == [1]
    assert "sliding window" in swapped.refused[0].reason
    with_cache, without = generate(model), generate(model, use_cache=False)
    assert all(close(a, b) for a, b in zip(with_cache.logits, without.logits, strict=True))


@pytest.mark.parametrize(
    ("mechanism", "options", "message"),
    [("lara", {}, "lara cannot be causal"), ("local", {"rotary": True}, "rotary follows from the model")],
)
def test_what_a_decoder_cannot_have_is_refused(mechanism: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        subquad.swap(llama(), mechanism, **options)


def test_packed_sequences_static_caches_and_another_direction_are_refused() -> None:
    model = llama()
    subquad.swap(model, "local", window=4)
    tokens, _ = tokens_and_mask()
    packed = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]).expand(2, -1)
    with pytest.raises(ValueError, match="only masks of padding and the causal order"):
        model(tokens, position_ids=packed, use_cache=False)
    with pytest.raises(ValueError, match="is_causal=False"):
        model(tokens, is_causal=False)
    with pytest.raises(ValueError, match="a cache that grows"):
        generate(model, cache_implementation="static")
