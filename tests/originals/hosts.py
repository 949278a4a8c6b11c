"""Fixtures of whole models that are only hosts of a mechanism: PrimalAttention's classifiers of long texts and of time
series, which we do not ship and put together here from our parts, and Linformer's RoBERTa.

The originals let padding leak into tokens; our mixers do not. So each host is run twice: as the original, where mixers
are told of no padding and the host masks what the original masks; and by our contract, where every part is told.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.interop.checkpoints import primal
from subquad.interop.checkpoints.fairseq import roberta
from subquad.interop.checkpoints.weight_map import (
    ConvertedModule,
    ParamRef,
    WeightMap,
    add_prefixes,
    load_weights,
    map_linear,
    map_stacked,
    strip_prefix,
)
from subquad.mixers import Mixer, build
from subquad.mixers.primal import Primal
from subquad.models import MaskedLanguageModel
from subquad.nn.block import BlockInputs
from subquad.nn.embeddings import EmbeddingConfig, TokenEmbedding
from subquad.nn.feedforward import ACTIVATIONS
from subquad.nn.positions import LearnedPositions, position_ids
from subquad.nn.stack import MixerChoice, Stack, StackConfig, StackOutput
from tests.originals.files import OUTPUT_TOLERANCE, Fixture, assert_close, assert_gradients

Config = Mapping[str, Any]
State = Mapping[str, Tensor]

# ---------------------------------------------------------------------- what the three kinds share


def stack_of(mixers: list[Mixer], **options: Any) -> Stack:
    size = {"layers": len(mixers), "dim": mixers[0].config.dim, "heads": mixers[0].config.heads}
    return Stack(StackConfig.model_validate({**size, "mixer": MixerChoice.of(mixers), **options}))


def block_refs(mixer: ConvertedModule[Mixer], inside: str, norms: tuple[str, str], maps: tuple[str, str]) -> WeightMap:
    """Where a layer of an original goes in a block. inside: the prefix of its attention."""
    refs = add_prefixes(mixer.weight_map, inside, "mixer.")
    for original, ours in zip((*norms, *maps), ("mixer_norm", "ffn_norm", "ffn.fc1", "ffn.fc2"), strict=True):
        refs |= map_linear(original, ours)
    return refs


def softmax_from(heads: int, names: tuple[str, str, str, str], weights: State) -> ConvertedModule[Mixer]:
    """Softmax attention with biases everywhere. names: of the maps to q, k and v, and of the output's."""
    *parts, out = names
    width, dim = weights[f"{parts[0]}.weight"].shape
    mixer = build("softmax", dim=dim, heads=heads, head_dim=width // heads)
    return load_weights(mixer, weights, map_stacked(parts, "qkv", width) | map_linear(out, "out"))


def check_gradients(fixture: Fixture, imported: ConvertedModule[Any], loss: Tensor) -> None:
    """All stored gradients."""
    imported.module.zero_grad()
    loss.backward()
    golden = fixture.under("grad_total.weights.")
    assert golden, "no gradients are stored"
    assert_gradients(imported, golden)


def check_contract(
    features: Callable[[Tensor, Tensor | None], StackOutput], given: Tensor, padding: Tensor, as_original: Tensor
) -> None:
    """With padding known everywhere, rows without any are the original's, and the others what they are alone."""
    with torch.no_grad():
        x = features(given, padding).x
        assert torch.isfinite(x).all()
        clean = ~padding.any(1)
        if clean.any():
            assert_close(x[clean], as_original[clean], OUTPUT_TOLERANCE, "features of rows without padding")
        for row, valid in enumerate(~padding):
            if valid.any():
                alone = features(given[row : row + 1, valid], None).x[0]
                assert_close(x[row, valid], alone, OUTPUT_TOLERANCE, f"row {row} with and without padding")


# ---------------------------------------------------------------------- PrimalAttention: Long Range Arena


class LongRangeHost(nn.Module):
    """Token and position embeddings, pre-norm blocks, classes of one text or of a pair."""

    def __init__(self, embedding: TokenEmbedding, stack: Stack, head: nn.Module) -> None:
        super().__init__()
        self.embedding, self.stack, self.head = embedding, stack, head

    def features(self, ids: Tensor, padding: Tensor | None) -> StackOutput:
        return self.stack(self.embedding(ids, padding), BlockInputs(padding))

    def features_as_original(self, ids: Tensor, padding: Tensor) -> StackOutput:
        """Padded tokens are embedded, sampled and counted like others; the last features there are zeros."""
        with masks_of_original(self.stack, padding):
            done = self.features(ids, None)
        return done._replace(x=done.x * padding.logical_not()[..., None])


@contextmanager
def masks_of_original(stack: Stack, padding: Tensor) -> Iterator[None]:
    """Primal attention: zeros in place of the joined heads of padded tokens. Softmax: their keys are not read."""
    there = padding.logical_not()[..., None]

    def zero_heads(_: nn.Module, given: tuple[Tensor]) -> Tensor:
        return given[0] * there

    def hide_keys(_: nn.Module, given: tuple[Tensor], options: dict[str, Any]) -> tuple[tuple[Tensor], dict[str, Any]]:
        return given, {**options, "context": given[0], "context_padding": padding}

    hooks = []
    for mixer in (module for module in stack.modules() if isinstance(module, Mixer)):
        if isinstance(mixer, Primal):
            hooks.append(mixer.out.register_forward_pre_hook(zero_heads))
        else:
            hooks.append(mixer.register_forward_pre_hook(hide_keys, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def long_range_host(config: Config, weights: State) -> ConvertedModule[LongRangeHost]:
    dim = config["transformer_dim"]
    found = (re.match(r"model\.(transformer_?\d*)\.", name) for name in weights)
    layers = sorted({match[1] for match in found if match}, key=lambda name: int(re.sub(r"\D", "", name) or 0))
    mixers, refs = [], map_linear("model.norm", "stack.norm")
    for number, layer in enumerate(layers):
        imported = long_range_mixer(config, strip_prefix(weights, f"model.{layer}.mha."))
        mixers.append(imported.module)
        places = block_refs(imported, "mha.", ("norm1", "norm2"), ("mlpblock.0", "mlpblock.3"))
        refs |= add_prefixes(places, f"model.{layer}.", f"stack.blocks.{number}.")
    tied = config["num_layers"] if layers == ["transformer"] else 1  # one block, used again and again
    stack = stack_of(mixers * tied, ffn_dim=config["transformer_hidden_dim"], activation="gelu", norm="pre")
    for number in range(1, len(stack.blocks)):
        if tied > 1:
            stack.blocks[number] = stack.blocks[0]

    embedded = EmbeddingConfig(positions="learned", max_length=config["max_seq_len"], scale=False, pad=None)
    refs |= {
        "model.embeddings.word_embeddings.weight": ParamRef("embedding.tokens.weight"),
        "model.embeddings.position_embeddings.weight": ParamRef("embedding.positions.table"),
    }
    inner, pooled = weights["seq_classifer.mlpblock.0.weight"].shape
    head = nn.Sequential(nn.Linear(pooled, inner), nn.ReLU(), nn.Linear(inner, config["num_classes"]))
    refs |= map_linear("seq_classifer.mlpblock.0", "head.0") | map_linear("seq_classifer.mlpblock.2", "head.2")
    embedding = TokenEmbedding(config["vocab_size"], dim, embedded)
    return load_weights(LongRangeHost(embedding, stack, head), weights, refs)


def long_range_mixer(config: Config, weights: State) -> ConvertedModule[Mixer]:
    if "We" in weights:
        return primal.convert_mixer({**config, "dim": config["transformer_dim"]}, weights)
    return softmax_from(config["num_head"], ("W_q", "W_k", "W_v", "ff"), weights)


def check_lra(fixture: Fixture) -> None:
    config, label = fixture.config, fixture["in.label"]
    imported = long_range_host(config, fixture.under("weights."))
    host = imported.module.eval()
    # Both texts of a pair are one batch: its mean of J is the mean of the two, as in the original.
    texts = ("_0", "_1") if "in.ids_0" in fixture else ("",)
    ids = torch.cat([fixture[f"in.ids{text}"] for text in texts])
    padding = torch.cat([fixture[f"in.mask{text}"] for text in texts]) == 0
    if config["pooling_mode"] == "CLS":  # the last symbol of the vocabulary in front, and the last token dropped
        ids = F.pad(ids, (1, -1), value=config["vocab_size"] - 1)
        padding = F.pad(padding, (1, -1), value=False)

    tokens, _, aux = host.features_as_original(ids, padding)
    assert aux is not None
    pooled = tokens[:, 0] if config["pooling_mode"] == "CLS" else tokens.mean(1)
    if len(texts) == 2:
        a, b = pooled.chunk(2)
        pooled = torch.cat([a, b, a * b, a - b], -1)
    logits = host.head(pooled)
    entropy, ksvd = F.cross_entropy(logits, label, reduction="none"), aux.mean()
    total = entropy + config["eta"] * ksvd
    if len(texts) == 1:
        assert_close(tokens, fixture["out.token"], OUTPUT_TOLERANCE, "tokens")
        assert_close(logits, fixture["out.logits"], OUTPUT_TOLERANCE, "logits")
    assert torch.equal((logits.argmax(-1) == label).float(), fixture["out.accu"]), "hits"
    assert_close(entropy, fixture["out.loss_ce"], OUTPUT_TOLERANCE, "cross-entropy")
    assert_close(ksvd.view(1), fixture["out.loss_ksvd"], OUTPUT_TOLERANCE, "regulariser")
    assert_close(total, fixture["out.loss_per_sample"], OUTPUT_TOLERANCE, "loss")
    check_gradients(fixture, imported, total.mean())
    check_contract(host.features, ids, padding, tokens)


# ---------------------------------------------------------------------- PrimalAttention: time series


class TimeSeriesHost(nn.Module):
    """Measurements mapped to the width of the model, learned positions, post-norm blocks, classes of all steps."""

    def __init__(self, config: Config, stack: Stack) -> None:
        super().__init__()
        dim, most = config["d_model"], config["max_len"]
        self.enter, self.positions = nn.Linear(config["feat_dim"], dim), LearnedPositions(dim, most)
        self.stack, self.head = stack, nn.Linear(dim * most, config["classes"])

    def features(self, series: Tensor, padding: Tensor | None) -> StackOutput:
        number = position_ids(padding, series.shape[1], None, series.device)
        scale = self.positions.table.shape[1] ** 0.5
        return self.stack(scale * self.enter(series) + self.positions(number), BlockInputs(padding))


def time_series_host(config: Config, weights: State) -> ConvertedModule[TimeSeriesHost]:
    mixers: list[Mixer] = []
    refs = {"pos_enc.pe": ParamRef("positions.table")} | map_linear("encoder.norm", "stack.norm")
    refs |= map_linear("project_inp", "enter") | map_linear("output_layer", "head")
    for number in range(sum(name.endswith(".norm1.weight") for name in weights)):  # one original ignores its option
        layer = f"encoder.attn_layers.{number}."
        imported = time_series_mixer(config, strip_prefix(weights, f"{layer}attention."))
        mixers.append(imported.module)
        places = block_refs(imported, "attention.", ("norm1", "norm2"), ("conv1", "conv2"))
        refs |= add_prefixes(places, layer, f"stack.blocks.{number}.")
    stack = stack_of(mixers, ffn_dim=config["d_ff"], activation=config["activation"], norm="post", final_norm=True)
    return load_weights(TimeSeriesHost(config, stack), weights, refs)


def time_series_mixer(config: Config, weights: State) -> ConvertedModule[Mixer]:
    if "We" in weights:
        return primal.convert_mixer({**config, "dim": config["d_model"], "max_seq_len": config["max_len"]}, weights)
    names = ("query_projection", "key_projection", "value_projection", "out_projection")
    return softmax_from(config["heads"], names, weights)


def check_time_series(fixture: Fixture) -> None:
    """The original tells no layer of the padding: features of padded steps are zeroed before the last map."""
    config, series, there = fixture.config, fixture["in.x"], fixture["in.padding_mask"].bool()
    imported = time_series_host(config, fixture.under("weights."))
    host = imported.module.eval()
    features, _, aux = host.features(series, None)
    assert aux is not None
    logits = host.head((ACTIVATIONS[config["activation"]](features) * there[..., None]).flatten(1))
    entropy, ksvd = F.cross_entropy(logits, fixture["in.label"].view(-1), reduction="none"), aux.mean(0)
    total = entropy + config["eta"] * ksvd
    assert_close(logits, fixture["out.logits"], OUTPUT_TOLERANCE, "logits")
    assert_close(entropy, fixture["out.loss_ce"], OUTPUT_TOLERANCE, "cross-entropy")
    assert_close(ksvd, fixture["out.loss_ksvd_per_sample"], OUTPUT_TOLERANCE, "regulariser")
    assert_close(total, fixture["out.loss_total"], OUTPUT_TOLERANCE, "loss")
    check_gradients(fixture, imported, total.mean())
    check_contract(host.features, series, ~there, features)


# ---------------------------------------------------------------------- Linformer: RoBERTa


def roberta_arguments(config: Config) -> dict[str, Any]:
    """The fixture's config under the names of the original's arguments."""
    compression = ("shared_kv_compressed", "shared_layer_kv_compressed", "freeze_compress")
    return {
        "encoder_attention_heads": config["heads"],
        "activation_fn": config["activation"].partition("(")[0],
        **{name: config[name] for name in compression if name in config},
    }


def check_roberta(fixture: Fixture) -> None:
    """The original zeroes embedded padding, and reads what later layers make of it as if it were tokens."""
    config, tokens = fixture.config, fixture["in.tokens"]
    imported = roberta.convert_model(roberta_arguments(config), fixture.under("weights."))
    model, padding = imported.module.eval(), tokens == config["pad"]
    assert isinstance(model, MaskedLanguageModel)
    states = [model.embedding(tokens, padding)]
    hooks = [block.register_forward_hook(lambda _, __, done: states.append(done[0])) for block in model.encoder.blocks]
    features = model.encoder(states[0], BlockInputs()).x
    for hook in hooks:
        hook.remove()
    logits = model.head(model.head_inputs(features))
    loss = F.cross_entropy(logits[~padding], tokens[~padding], reduction="sum")
    for number, state in enumerate(states):
        golden = fixture[f"out.inner_state.{number}"].transpose(0, 1)
        assert_close(state, golden, OUTPUT_TOLERANCE, f"state {number}")
    assert_close(features, fixture["out.features"], OUTPUT_TOLERANCE, "features")
    assert_close(logits, fixture["out.logits"], OUTPUT_TOLERANCE, "logits")
    assert_close(loss.view(1), fixture["out.loss_ce_sum_nonpad_selfpred"], OUTPUT_TOLERANCE, "loss")
    check_gradients(fixture, imported, loss)
    check_contract(model.features, tokens, padding, features)
