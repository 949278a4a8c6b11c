"""Whole models: streaming equals one pass, padding changes nothing, configs and weights rebuild them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from subquad.mixers import available, build, mixer_class
from subquad.mixers.attention import rotated
from subquad.models import LanguageModel, Model, Seq2Seq, build_from_config, build_model, load_model, save_model
from subquad.models.costs import estimate_costs
from subquad.models.storage import CONFIG, WEIGHTS, load_weights
from tests.models.cases import OPTIONS, able, inputs, run, tiny

STACK = {"layers": 2, "heads": 2, "ffn_dim": 24}
KINDS = ["transformer_lm", "transformer_lm_wiki103", "translation_small", "text_small", "vision_small", "pvt_v2_b3"]
PAD = 1


def language_model(mechanism: str, **embedding: Any) -> LanguageModel:
    torch.manual_seed(0)
    decoder = {**STACK, "norm": "pre", "mixer": {"name": mechanism, **OPTIONS.get(mechanism, {})}}
    if mechanism == "eva":  # a number of chunks depends on the final length
        decoder["mixer"] = {"name": "eva", "window": 4, "chunk_size": 2, "landmarks": None}
    model = build_model("language-model", vocab=40, dim=16, decoder=decoder, embedding=embedding).eval()
    assert isinstance(model, LanguageModel)
    return model


def translator(cross: str) -> Seq2Seq:
    torch.manual_seed(0)
    model = build_model(
        "encoder-decoder",
        source_vocab=40,
        target_vocab=40,
        dim=16,
        shared_embedding=True,
        encoder={**STACK, "mixer": "lightconv"},
        decoder={**STACK, "mixer": "softmax,dynamicconv", "cross": {"name": cross, **OPTIONS.get(cross, {})}},
    ).eval()
    assert isinstance(model, Seq2Seq)
    return model


def words(batch: int, time: int, seed: int = 0) -> Tensor:
    return torch.randint(2, 40, (batch, time), generator=torch.Generator().manual_seed(seed))


def close(ours: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(ours, other, atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------------- streaming


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "none", "rotary"])
@pytest.mark.parametrize("mechanism", able("decoder"))
def test_chunks_of_any_size_equal_one_pass(mechanism: str, positions: str) -> None:
    if positions == "rotary" and "rotary" not in mixer_class(mechanism).Config.model_fields:
        with pytest.raises(ValueError, match=f"mixer '{mechanism}' has no option 'rotary'"):
            language_model(mechanism, positions=positions)
        return
    model, tokens = language_model(mechanism, positions=positions), words(3, 19)
    whole = model(tokens).logits
    for sizes in ([1] * 19, [5, 1, 13], [18, 1]):
        state, parts = model.init_state(3), []
        for chunk in tokens.split(sizes, 1):
            part = model(chunk, state=state)
            assert part.state is not None
            state = part.state
            parts.append(part.logits)
        close(torch.cat(parts, 1), whole)
        assert state.lengths.tolist() == [19, 19, 19]


@pytest.mark.parametrize("mechanism", able("decoder"))
def test_ragged_prompts_and_reordering(mechanism: str) -> None:
    """Prompts of 3, 7 and 5 tokens in one padded batch, then one token each, the rows turned round and one repeated."""
    model, lengths, order = language_model(mechanism), [3, 7, 5], torch.tensor([2, 0, 1, 1])
    prompts, following = words(3, 7), words(4, 2, seed=1)
    padding = torch.arange(7) >= torch.tensor(lengths)[:, None]
    read = model(prompts.masked_fill(padding, PAD), padding=padding, state=model.init_state(3))
    assert read.state is not None
    assert read.state.lengths.tolist() == lengths
    state = read.state.reorder(order)
    for step in range(2):
        part = model(following[:, step : step + 1], state=state)
        assert part.state is not None
        state = part.state
        for row, origin in enumerate(order.tolist()):
            alone = torch.cat([prompts[origin, : lengths[origin]], following[row, : step + 1]])[None]
            close(part.logits[row, 0], model(alone).logits[0, -1])


@pytest.mark.parametrize("cross", able("cross"))
def test_decoding_equals_teacher_forcing(cross: str) -> None:
    model, source, target = translator(cross), words(2, 9), words(2, 6, seed=1)
    padding = torch.arange(9) >= torch.tensor([[9], [5]])
    whole = model(source, target, source_padding=padding).logits
    context, state = model.encode(source, padding).x, model.init_state(2)
    for step in range(6):
        given = {"context": context, "context_padding": padding} if step == 0 else {}
        part = model.decode(target[:, step : step + 1], **given, state=state)
        assert part.state is not None
        close(part.logits[:, 0], whole[:, step])
        state = part.state.reorder(torch.tensor([0, 1]))
    alone = model(source[1:, :5], target[1:]).logits
    close(whole[1:], alone)


@pytest.mark.parametrize("mechanism", [name for name in able("decoder") if name not in ("softmax", "eva")])
def test_the_state_of_a_linear_mechanism_does_not_grow(mechanism: str) -> None:
    model = language_model(mechanism)
    sizes = []
    for time in (16, 64):
        state = model(words(1, time), state=model.init_state(1)).state
        assert state is not None
        sizes.append(sum(tensor.numel() for tensor in state.tensors()))
    assert sizes[0] == sizes[1]


# ---------------------------------------------------------------------- padding


@pytest.mark.parametrize("pooling", ["mean", "first"])
@pytest.mark.parametrize("mechanism", able("encoder"))
def test_a_classifier_does_not_see_padding(mechanism: str, pooling: str) -> None:
    torch.manual_seed(0)
    encoder = {**STACK, "mixer": {"name": mechanism, **OPTIONS.get(mechanism, {})}}
    if mechanism == "ra":
        encoder["mixer"] = {"name": "ra", "proposal": "mean"}  # without draws
    model = build_model("text-classifier", vocab=40, num_classes=3, dim=16, encoder=encoder, pooling=pooling).eval()
    tokens, padding = words(2, 11), torch.zeros(2, 11, dtype=torch.bool)
    padding[0, :4] = True  # on the left
    padding[1, 6:] = True
    logits = model(tokens, padding=padding).logits
    for row in range(2):
        close(logits[row], model(tokens[row, ~padding[row]][None]).logits[0])


# ---------------------------------------------------------------------- configs and weights


@pytest.mark.parametrize("name", KINDS)
def test_saving_and_loading_is_exact(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = tiny(name).eval()
    save_model(model, tmp_path / "model")
    torch.manual_seed(1)
    again = load_model(tmp_path / "model")
    assert again.config == model.config
    weights = again.state_dict()
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert torch.equal(run(again).logits, run(model).logits)
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [CONFIG, WEIGHTS]


@pytest.mark.parametrize("name", KINDS)
def test_the_resolved_config_rebuilds_the_model(name: str) -> None:
    model = tiny(name)
    data = json.loads(json.dumps(model.config.model_dump(mode="json")))
    assert build_from_config(data).config == model.config


def test_weights_that_do_not_fit_are_named() -> None:
    model = tiny("lm_small")
    weights = dict(model.state_dict())
    moved = weights.pop("decoder.norm.weight")
    with pytest.raises(ValueError, match=r"missing: decoder\.norm\.weight; unknown: decoder\.nrom\.weight"):
        load_weights(model, weights | {"decoder.nrom.weight": moved})
    with pytest.raises(ValueError, match=r"decoder\.norm\.weight is \(3,\), expected \(16,\)"):
        load_weights(model, weights | {"decoder.norm.weight": torch.zeros(3)})


def test_damage_is_noticed(tmp_path: Path) -> None:
    save_model(tiny("lm_small"), tmp_path)
    content = bytearray((tmp_path / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (tmp_path / WEIGHTS).write_bytes(content)
    with pytest.raises(ValueError, match="checksum differs"):
        load_model(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(ValueError, match="is missing"):
        load_model(tmp_path)
    (tmp_path / CONFIG).write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        load_model(tmp_path)
    with pytest.raises(ValueError, match="holds no model"):
        load_model(tmp_path / "elsewhere")


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize("mechanism", [name for name in available() if name not in able("decoder")])
def test_what_cannot_be_causal_is_refused_in_a_decoder(mechanism: str) -> None:
    with pytest.raises(ValueError, match=rf"decoder: {mechanism} cannot be causal.*The causal mechanisms are softmax"):
        build_model("lm_small", decoder={"mixer": mechanism})


@pytest.mark.parametrize("mechanism", [name for name in available() if name not in able("cross")])
def test_what_cannot_read_a_context_is_refused_in_cross_attention(mechanism: str) -> None:
    expected = rf"decoder: {mechanism} cannot read a context.*mechanisms with cross-attention are softmax"
    with pytest.raises(ValueError, match=expected):
        build_model("translation_small", decoder={"cross": mechanism})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"decoder": {"layrs": 2}}, "decoder has no option 'layrs'; did you mean 'layers'"),
        ({"decoder": {"mixer": "softmx"}}, "no mechanism is called 'softmx'; did you mean 'softmax'"),
        ({"decoder": {"mixer": "softmax*3"}}, "has 3 layers; the stack has 2"),
        ({"decoder": {"mixer": "softmax**2"}}, "neither a mechanism nor mechanism"),
        ({"decoder": {"mixer": {"windw": 3}}}, "has no option 'windw'"),
        ({"decoder": {"mixer": {"name": "lightconv", "kernel_size": [3, 7, 9]}}}, "3 values; the stack has 2 layers"),
        ({"decoder": {"causal": False}}, "decoder.causal is False; this kind of model needs True"),
        ({"decoder": {"heads": 3}}, "3 heads do not divide 128 channels"),
        ({"vocab": 0}, "vocab: .*greater than or equal to 1"),
        ({"embedding": {"pad": 5000}}, "pad is 5000, but the vocabulary has only 4096 tokens"),
        ({"embedding": {"cutoffs": [9, 3]}}, "cutoffs must be positive and rise"),
        ({"embedding": {"cutoffs": [9]}}, "an adaptive embedding needs an adaptive head"),
        ({"head": {"cutoffs": [9]}}, "need an embedding with the same cutoffs"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        build_model("lm_small", **changes)


def test_other_refusals() -> None:
    with pytest.raises(ValueError, match="kind must be one of"):
        build_from_config({"kind": "langauge-model"})
    with pytest.raises(ValueError, match="one vocabulary"):
        build_model("translation_small", shared_embedding=True, source_vocab=10)
    vision = tiny("vision_small")
    with pytest.raises(ValueError, match="do not divide into patches"):
        vision(torch.zeros(1, 3, 15, 15))
    with pytest.raises(ValueError, match="positions for images of 16 x 16"):
        vision(torch.zeros(1, 3, 32, 32))
    learned = language_model("softmax", positions="learned", max_length=4)
    with pytest.raises(ValueError, match="longer than the 4 learned positions"):
        learned(words(1, 5))


# ---------------------------------------------------------------------- parts


def test_the_stack_passes_options_to_the_layers_that_know_them() -> None:
    mixer = {"name": "softmax,lightconv,lightconv", "kernel_size": [3, 5, 7], "attention_dropout": 0.1}
    model = build_model("lm_small", decoder={"layers": 3, "mixer": mixer})
    assert isinstance(model, LanguageModel)
    blocks: list[Any] = list(model.decoder.blocks)
    assert [block.mixer.name for block in blocks] == ["softmax", "lightconv", "lightconv"]
    assert blocks[0].mixer.config.attention_dropout == 0.1
    assert [block.mixer.config.kernel_size for block in blocks[1:]] == [5, 7]


def test_layer_drop_and_drop_path_act_in_training_only() -> None:
    torch.manual_seed(0)
    stack = {"layer_drop": 0.5, "drop_path": 0.5, "dropout": 0.0}
    model: Model = build_model("lm_small", vocab=40, decoder=stack)
    tokens = inputs(model)[0]
    assert len({model.train()(tokens).logits.sum().item() for _ in range(8)}) > 1
    model.eval()
    assert torch.equal(model(tokens).logits, model(tokens).logits)


def test_regularisers_are_averaged_over_the_layers_that_have_one() -> None:
    model = build_model("lm_small", vocab=40, decoder={"layers": 3, "mixer": "primal,softmax,primal", "dropout": 0.0})
    assert isinstance(model, LanguageModel)
    tokens = inputs(model)[0]
    single = model.features(tokens).aux
    assert single is not None
    assert single.shape == (2, 2)
    close(model(tokens).aux, single.mean(0))


def test_rotary_positions_tell_distances_and_nothing_else() -> None:
    q, k = torch.randn(2, 1, 6, 1, 8, dtype=torch.float64)
    at = torch.arange(6)[None]
    near, far = (rotated(q, at + shift) @ rotated(k, at + shift).transpose(-1, -2) for shift in (0, 100))
    torch.testing.assert_close(near, far, atol=1e-5, rtol=1e-5)  # angles are float32
    by_hand = torch.view_as_complex(torch.stack(q.chunk(2, -1), -1).contiguous())
    angle = at[0][:, None, None] * 10000.0 ** (-torch.arange(4) / 4)
    turned = by_hand * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(rotated(q, at), torch.cat([turned.real, turned.imag], -1), atol=1e-5, rtol=1e-5)


def test_rotary_is_refused_where_positions_have_no_meaning() -> None:
    with pytest.raises(ValueError, match="projected keys mix all positions"):
        build("linformer", dim=16, heads=2, rotary=True)
    with pytest.raises(ValueError, match="odd number"):
        build("softmax", dim=6, heads=2, rotary=True)
    with pytest.raises(ValueError, match="two sequences have no distance"):
        build("softmax", dim=16, heads=2, rotary=True)(torch.zeros(1, 2, 16), context=torch.zeros(1, 2, 16))


# ---------------------------------------------------------------------- costs


def test_costs_count_what_runs() -> None:
    """A model small enough to count by hand: one softmax layer, so products of known sizes."""
    dim, ffn_dim, vocab, time = 16, 24, 40, 8
    decoder = {"layers": 1, "heads": 2, "ffn_dim": ffn_dim}
    counted = estimate_costs({"kind": "language-model", "vocab": vocab, "dim": dim, "decoder": decoder}, 1, time)
    linear = 4 * dim * dim + 2 * dim * ffn_dim + dim * vocab
    assert counted.flops == 2 * time * linear + 2 * 2 * time * time * dim
    weights = 4 * build_model("language-model", vocab=vocab, dim=dim, decoder=decoder).parameter_count()
    assert counted.training_bytes == 4 * weights + counted.activation_bytes
    lengths_of_rows = 8
    assert counted.state_bytes == 2 * time * dim * 4 + lengths_of_rows
    assert counted.decoding_bytes == weights + counted.state_bytes


def test_costs_of_what_cannot_stream() -> None:
    decoder = {"layers": 1, "heads": 2, "mixer": {"name": "eva", "landmarks": 4, "window": 4}}
    counted = estimate_costs({"kind": "language-model", "vocab": 40, "dim": 16, "decoder": decoder}, 1, 16)
    assert counted.state_bytes is None
