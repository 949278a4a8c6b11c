"""Mechanisms without weights are attention implementations of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import subquad
from subquad.interop.patching.attention_interface import DEFAULTS
from subquad.mixers import mixer_class
from subquad.testing import close
from tests.interop.swap_hosts import (
    DECODER,
    DECODERS,
    ENCODER,
    ENCODERS,
    MODERNBERT,
    OTHER_WIDTHS,
    REFUSED,
    REPLACED,
    TRANSLATORS,
    tiny,
    tokens_and_mask,
    transformers,
)

HOSTS = DECODERS | OTHER_WIDTHS | ENCODERS | {"bart": TRANSLATORS["bart"]} | REPLACED
GENERATES = [*DECODERS, *OTHER_WIDTHS, "bart", "gpt2"]
READS_IMAGES = ("vit", "deit")
CAUSAL = [name for name in DEFAULTS if mixer_class(name).capabilities.causal]


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    subquad.register_attention()
    subquad.register_attention("subquad_local_4", "local", window=4)
    subquad.register_attention("subquad_local_overlap", "local", window=3, overlap=True)


@torch.no_grad()
def outputs(model: Any, host: str, side: str = "left") -> Tensor:
    if host in READS_IMAGES:
        return model(torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0)))[0]
    tokens, mask = tokens_and_mask(side)
    positions = {} if host in TRANSLATORS else {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    if host == "roberta":
        positions = {"position_ids": (mask.cumsum(1) + 1).clamp(min=1)}
    return model(tokens, attention_mask=mask, **positions)[0][mask.bool()]


def generate(model: Any, **options: Any) -> Any:
    tokens, mask = tokens_and_mask("right" if model.config.is_encoder_decoder else "left")
    settings = {"max_new_tokens": 9, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    return model.generate(tokens, attention_mask=mask, **settings | options)


@pytest.mark.parametrize("host", HOSTS)
def test_a_window_over_everything_is_the_attention_of_the_model(host: str) -> None:
    model = tiny(*HOSTS[host])
    before = outputs(model, host)
    written = generate(model, num_beams=2) if host in GENERATES else None
    model.set_attn_implementation("subquad_local")
    assert close(outputs(model, host), before)
    if written is not None:
        after = generate(model, num_beams=2)
        assert torch.equal(after.sequences, written.sequences)
        assert all(close(a, b) for a, b in zip(after.logits, written.logits, strict=True))
    model.set_attn_implementation("subquad_local_4")
    assert not close(outputs(model, host), before)


@pytest.mark.parametrize(
    ("host", "name"),
    [
        *(("qwen3", f"subquad_{name}") for name in (*CAUSAL, "local_4", "local_overlap")),
        *((host, "subquad_performer") for host in OTHER_WIDTHS),
    ],
)
def test_decoders_with_cache_and_padding(host: str, name: str) -> None:
    model = tiny(*HOSTS[host])
    model.set_attn_implementation(name)
    with torch.no_grad():
        for side in ("left", "right"):
            tokens, mask = tokens_and_mask(side)
            rows = [model(row[None, keep.bool()]).logits[0] for row, keep in zip(tokens, mask, strict=True)]
            assert close(outputs(model, host, side), torch.cat(rows))
    without = generate(model, use_cache=False)
    if name == "subquad_eva":
        with pytest.raises(ValueError, match=r"queries of earlier tokens.*subquad\.swap"):
            generate(model)
        return
    with_cache = generate(model)
    assert torch.equal(with_cache.sequences, without.sequences)
    assert all(close(a, b) for a, b in zip(with_cache.logits, without.logits, strict=True))


@pytest.mark.parametrize("name", DEFAULTS)
def test_encoders_with_padding(name: str) -> None:
    model = tiny("ModernBertModel", ENCODER | MODERNBERT | {"layer_types": ["full_attention", "sliding_attention"]})
    assert model.config.sliding_window < 128
    model.set_attn_implementation(f"subquad_{name}")
    with torch.no_grad():
        for side in ("left", "right"):
            tokens, mask = tokens_and_mask(side)
            rows = [model(row[None, keep.bool()])[0][0] for row, keep in zip(tokens, mask, strict=True)]
            assert close(outputs(model, "modernbert", side), torch.cat(rows))


def test_sliding_layers_attend_as_before() -> None:
    layers = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3}
    model = tiny("Gemma3ForCausalLM", DECODER | layers)
    before, written = outputs(model, "gemma3"), generate(model)
    model.set_attn_implementation("subquad_performer")
    assert close(outputs(model, "gemma3"), before)
    assert torch.equal(generate(model).sequences, written.sequences)


def test_from_pretrained_takes_the_name_and_every_process_computes_the_same(tmp_path: Path) -> None:
    tiny(*DECODERS["llama"]).save_pretrained(tmp_path)
    first, second = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="subquad_performer")
        for _ in range(2)
    )
    before = outputs(first, "llama")
    subquad.register_attention()  # as another process does: nothing of it is the first's
    torch.manual_seed(7)
    assert torch.equal(outputs(second, "llama"), before)
    loss = second.train()(tokens_and_mask()[0], labels=tokens_and_mask()[0]).loss
    loss.backward()
    assert all(parameter.grad is not None for parameter in second.parameters())


@pytest.mark.parametrize(
    ("name", "mixer", "options", "message"),
    [
        ("subquad_eva_maps", "eva", {}, "k_map.*subquad.swap"),
        ("subquad_table", "local", {"relative": "table"}, "bias.table.*subquad.swap"),
        ("subquad_linformer", "linformer", {}, "compress_k.*subquad.swap"),
        ("subquad_primal", "primal", {}, "needs weights.*subquad.swap"),
        ("subquad_lightconv", "lightconv", {}, "needs weights.*subquad.swap"),
        ("subquad_local", "locl", {}, "did you mean 'local'"),
        ("subquad_local", "local", {"rotary": True}, "rotary follows from the model"),
        ("sdpa", "local", {}, "choose another name"),
        (None, "local", {}, "needs a name"),
        ("subquad_x", None, {}, "which mechanism"),
    ],
)
def test_what_cannot_be_registered_is_refused(name: Any, mixer: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        subquad.register_attention(name, mixer, **options)


def test_what_a_mechanism_cannot_do_for_a_model_is_refused() -> None:
    tokens, _ = tokens_and_mask()
    llama = tiny(*DECODERS["llama"])
    llama.set_attn_implementation("subquad_lara")
    with pytest.raises(ValueError, match="lara cannot be causal"):
        llama(tokens)
    llama.set_attn_implementation("subquad_local")
    with pytest.raises(ValueError, match="a cache that grows"):
        generate(llama, cache_implementation="static")
    packed = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]).expand(2, -1)
    with pytest.raises(ValueError, match="only masks of padding and the causal order"):
        llama(tokens, position_ids=packed, use_cache=False)
    gemma = tiny(*REFUSED["gemma2, capped logits"])
    gemma.set_attn_implementation("subquad_local")
    with pytest.raises(ValueError, match="caps its logits"):
        gemma(tokens)
    doge = tiny("DogeForCausalLM", DECODER)
    doge.set_attn_implementation("subquad_local")
    with pytest.raises(ValueError, match="cannot be the attention of doge, which makes a mask of its own"):
        doge(tokens)
    t5 = tiny(*TRANSLATORS["t5"])
    t5.set_attn_implementation("subquad_local")
    with pytest.raises(ValueError, match="biases of positions"):
        t5(tokens, decoder_input_ids=tokens)
