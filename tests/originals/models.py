"""Fixtures of whole models that are not fairseq's: vision models, primal language models, crybot's translation."""

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.interop.checkpoints.fairseq import models as fairseq_models
from subquad.interop.checkpoints.linformer import models as linformer_models
from subquad.interop.checkpoints.vision import models as vision_models
from subquad.interop.checkpoints.weight_map import ConvertedModule, load_weights, strip_prefix
from subquad.models import LanguageModel, Seq2Seq
from subquad.nn.block import BlockInputs
from subquad.nn.embeddings import EmbeddingConfig, TokenEmbedding
from subquad.nn.stack import Stack, StackConfig
from tests.originals.fairseq_models import check_language_model
from tests.originals.files import (
    GRADIENT_TOLERANCE,
    OUTPUT_TOLERANCE,
    Fixture,
    assert_close,
    assert_gradients,
    padding_of,
)


def check_library_vision(fixture: Fixture) -> None:
    """evit and PVT: logits, and the gradient of the image."""
    importers = {
        "EfficientTransformer": vision_models.convert_evit,
        "PyramidVisionTransformerV2": vision_models.convert_pyramid,
    }
    imported = importers[fixture.config["model"]](fixture.config, fixture.under("state."))
    model = imported.module.eval()
    images = fixture["input"].clone().requires_grad_()
    logits = model(images).logits
    assert_close(logits, fixture["logits"], OUTPUT_TOLERANCE, "logits")
    logits.backward(fixture["grad_output"])
    assert images.grad is not None
    assert_close(images.grad, fixture["grad_input"], GRADIENT_TOLERANCE, "gradient of the image")
    assert_gradients(imported, fixture.under("grad_state."))
    if "n_params" in fixture.meta:
        assert model.parameter_count() == int(fixture.meta["n_params"])


def check_primal_vision(fixture: Fixture) -> None:
    """Logits, losses and the gradients of cross-entropy + eta * regulariser."""
    imported = vision_models.convert_vit(fixture.config, fixture.under("weights."))
    images = fixture["in.x"].clone().requires_grad_()
    logits, _, aux = imported.module.eval()(images)
    assert_close(logits, fixture["out.logits"], OUTPUT_TOLERANCE, "logits")
    assert aux is not None
    regulariser, loss = aux.mean(), F.cross_entropy(logits, fixture["in.label"])
    assert_close(loss[None], fixture["out.loss_ce"], OUTPUT_TOLERANCE, "cross-entropy")
    assert_close(regulariser[None], fixture["out.loss_ksvd"], OUTPUT_TOLERANCE, "regulariser")
    (loss + fixture.config["eta"] * regulariser).backward()
    assert_total_gradients(imported, fixture)
    assert images.grad is not None
    assert_close(images.grad, fixture["grad_total.in.x"], GRADIENT_TOLERANCE, "gradient of the image")


def assert_total_gradients(imported: ConvertedModule[Any], fixture: Fixture) -> None:
    assert_gradients(imported, fixture.under("grad_total.weights."))


def check_primal_language_model(fixture: Fixture) -> None:
    """A fairseq model with primal attention in some layers; its loss is nll + 0.1 * regulariser."""
    config = fixture.config
    as_fairseq = {
        "decoder_attention_heads": config["heads"],
        "decoder_normalize_before": config["normalize_before"],
        "share_decoder_input_output_embed": config["share_input_output"],
        "activation_fn": config["activation"],
    }
    check_language_model(fixture, as_fairseq, "weights.")
    imported = fairseq_models.convert_model(as_fairseq, fixture.under("weights."))
    model = imported.module.eval()
    assert isinstance(model, LanguageModel)
    tokens, target = fixture["in.tokens"], fixture["in.target"]
    padded = padding_of(tokens)
    if padded is not None:  # the original's regulariser counts padded positions
        return
    logits, _, aux = model(tokens)
    assert aux is not None
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
    assert_close(loss[None], fixture["out.loss_nll_sum"], OUTPUT_TOLERANCE, "nll")
    assert_close(aux.mean()[None], fixture["out.loss_ksvd"], OUTPUT_TOLERANCE, "regulariser")
    (loss + config["eta"] * aux.mean()).backward()
    assert_total_gradients(imported, fixture)


def check_crybot(fixture: Fixture) -> None:
    if fixture.config["model"].get("encoder_only"):
        check_crybot_encoder(fixture)
        return
    imported = linformer_models.convert_model(fixture.config, fixture.under("weights."))
    model = imported.module.eval()
    assert isinstance(model, Seq2Seq)
    source, padding = fixture["in.src"], fixture["in.src_mask"] == 0
    target, there = fixture["in.tgt"], fixture["in.tgt_mask"] != 0
    context = model.encode(source, padding).x
    assert_close(context[~padding], fixture["out.enc_out"][~padding], OUTPUT_TOLERANCE, "the encoder's output")
    given, wanted, counted = target[:, :-1], target[:, 1:], there[:, 1:]
    read = there[:, :-1]
    log_probs = model(source, given, source_padding=padding, target_padding=~read).logits.log_softmax(-1)
    assert_close(log_probs[read], fixture["out.log_probs"][read], OUTPUT_TOLERANCE, "log-probabilities")
    loss = F.nll_loss(log_probs[counted], wanted[counted])
    assert_close(loss[None], fixture["out.nll_mean"], OUTPUT_TOLERANCE, "loss")
    loss.backward()
    assert_total_gradients(imported, fixture)
    with torch.no_grad():
        assert torch.equal(greedy(model, source, padding, fixture), fixture["out.generated"])


def greedy(model: Seq2Seq, source: Tensor, padding: Tensor, fixture: Fixture) -> Tensor:
    """Best token at each step, over the streaming state; after a row's end it is padded."""
    config, steps = fixture.config, fixture["out.generated"].shape[1]
    state, context = model.init_state(source.shape[0]), model.encode(source, padding).x
    token = torch.full_like(source[:, :1], config["bos"])
    ended = torch.zeros_like(token, dtype=torch.bool)
    words = []
    for _ in range(steps):
        step = model.decode(token, context, context_padding=padding, state=state)
        assert step.state is not None
        state, best = step.state, step.logits.argmax(-1)
        words.append(torch.where(ended, config["pad"], best))
        ended = ended | (best == config["eos"])
        token = best
    return torch.cat(words, 1)


def check_crybot_encoder(fixture: Fixture) -> None:
    """An encoder on its own: its features, and what its output map makes of them where it has one."""
    weights = fixture.under("weights.")
    prefix = next(name.partition("stacked.")[0] for name in weights if "stacked." in name)
    layers = {name: value for name, value in strip_prefix(weights, prefix).items() if name.startswith("stacked.")}
    options, refs = linformer_models.convert_stack(fixture.config, layers, ("attention", None))
    applied = {name: value for name, value in layers.items() if name in refs}
    stack = load_weights(Stack(StackConfig.parse("encoder", options)), applied, refs).module.eval()
    table = next(value for name, value in weights.items() if name.endswith("embedding.weight"))
    embedding = TokenEmbedding(
        table.shape[0], table.shape[1], EmbeddingConfig(positions="sin-cos", scale=False, pad=None)
    )
    source = next(fixture[key] for key in fixture.tensors if re.fullmatch(r"in\.(src|x|tokens)", key))
    mask = next((fixture[key] for key in fixture.tensors if key.startswith("in.") and "mask" in key), None)
    padding = None if mask is None else mask == 0
    there = torch.ones_like(source, dtype=torch.bool) if padding is None else ~padding
    outputs = {key: value for key, value in fixture.under("out.").items() if value.dim() == 3}
    assert outputs, "a fixture without outputs"
    with torch.no_grad():
        embedding.load_state_dict({"tokens.weight": table})
        x = stack(embedding(source, padding), BlockInputs(padding)).x
        for key, golden in outputs.items():
            ours = x
            if golden.shape[-1] != x.shape[-1]:
                ours = F.linear(x, weights["linear.weight"], weights.get("linear.bias"))
                ours = ours.log_softmax(-1) if "prob" in key else ours
            assert_close(ours[there], golden[there], OUTPUT_TOLERANCE, key)
