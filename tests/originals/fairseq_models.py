"""Fixtures of whole fairseq models and of its forks: logits, steps, gradients of the smoothed loss."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.interop.checkpoints.fairseq.models import PAD, convert_model, current_name
from subquad.interop.checkpoints.weight_map import ConvertedModule
from subquad.models import LanguageModel, Seq2Seq
from tests.originals.files import (
    OUTPUT_TOLERANCE,
    Fixture,
    assert_close,
    assert_gradients,
    assert_stream,
    load,
    padding_of,
)

LOG_PROBABILITY_TOLERANCE = 1e-4
SMOOTHING = 0.1


def check_translation(fixture: Fixture) -> None:
    """Logits on tokens; in a row whose padding leaked in the original, the row's own run without its padding."""
    imported = convert_model(fixture.config, fixture.under("state."))
    model = imported.module.eval()
    assert isinstance(model, Seq2Seq)
    source, target = fixture["src_tokens"], fixture["prev_output_tokens"]
    padding = padding_of(source)
    leaks = set(model.config.encoder.mixer.names(1)) - {"softmax", "lightconv", "dynamicconv", "local"}
    clean = torch.ones_like(source[:, 0], dtype=torch.bool) if padding is None or not leaks else ~padding.any(1)
    with torch.no_grad():
        context = model.encode(source, padding).x
        if "encoder_out_TBC" in fixture:
            check_context(context, fixture["encoder_out_TBC"].transpose(0, 1), padding, clean)
        elif "encoder_out" in fixture:
            check_context(context, fixture["encoder_out"], padding, clean)
        logits = model(source, target, source_padding=padding).logits
        counted = (target != PAD) & clean[:, None]
        if not cuts_filters(fixture.config, target.shape[1]):
            assert_close(logits[counted], fixture["logits"][counted], OUTPUT_TOLERANCE, "logits")
        if "logits_incremental" in fixture:
            assert_close(logits[counted], fixture["logits_incremental"][counted], OUTPUT_TOLERANCE, "logits by steps")
        check_decoding(model, source, padding, target, logits)
        for row in range(source.shape[0]):
            check_row_alone(model, source[row], target[row], logits[row])
    check_gradients(fixture, imported)


def check_context(context: Tensor, golden: Tensor, padding: Tensor | None, clean: Tensor) -> None:
    there = clean[:, None].expand(context.shape[:2])
    there = there if padding is None else there & ~padding
    assert_close(context[there], golden[there], OUTPUT_TOLERANCE, "the encoder's output")


def cuts_filters(config: dict[str, Any], time: int) -> bool:
    """Whether the original, in its newer form, cut causal filters that are longer than the target."""
    dynamic = config.get("decoder_conv_type") == "dynamic" and config.get("weight_softmax", True)
    return config.get("variant") == "main" and dynamic and max(config["decoder_kernel_size_list"]) > time


def check_decoding(model: Seq2Seq, source: Tensor, padding: Tensor | None, target: Tensor, logits: Tensor) -> None:
    """One token at a time, then in chunks of three, after a reordering of the batch."""
    order = torch.arange(source.shape[0] - 1, -1, -1)
    context = model.encode(source, padding).x
    for size in (1, 3):
        state = model.init_state(source.shape[0])
        parts = []
        for number, chunk in enumerate(target.split(size, 1)):
            given = context if number == 0 else None
            part = model.decode(chunk, given, context_padding=padding if number == 0 else None, state=state)
            assert part.state is not None
            state = part.state
            parts.append(part.logits)
        assert_close(torch.cat(parts, 1), logits, OUTPUT_TOLERANCE, f"logits in chunks of {size}")
    half = target.shape[1] // 2
    started = model.decode(target[:, :half], context, context_padding=padding, state=model.init_state(source.shape[0]))
    assert started.state is not None
    turned = model.decode(target[order, half:], state=started.state.reorder(order))
    assert_close(turned.logits, logits[order, half:], OUTPUT_TOLERANCE, "logits after reordering")


def check_row_alone(model: Seq2Seq, source: Tensor, target: Tensor, logits: Tensor) -> None:
    real = target != PAD
    alone = model(source[source != PAD][None], target[real][None]).logits[0]
    assert_close(logits[real], alone, OUTPUT_TOLERANCE, "a row with and without padding")


def check_gradients(fixture: Fixture, imported: ConvertedModule[Any]) -> None:
    """Gradients of the summed, smoothed loss, where a file beside the fixture holds them."""
    path = fixture.path.with_name(f"{fixture.path.stem}_grads.safetensors")
    if path.exists() and not cuts_filters(fixture.config, fixture["target"].shape[1]):
        golden = gradients_of(load(path))
        model, target = imported.module, fixture["target"]
        source = fixture["src_tokens"]
        logits = model(source, fixture["prev_output_tokens"], source_padding=padding_of(source)).logits
        losses = smoothed(logits, target)
        losses.backward()
        assert_gradients(imported, golden)


def gradients_of(fixture: Fixture) -> dict[str, Tensor]:
    """By today's names, whatever prefix the file gives them."""
    return {
        current_name(name.partition(".")[2] if name.startswith("grad") else name): value
        for name, value in fixture.tensors.items()
    }


def smoothed(logits: Tensor, target: Tensor) -> Tensor:
    log_p = logits.log_softmax(-1)
    counted = target != PAD
    nll = -log_p.gather(-1, target[..., None]).squeeze(-1)
    each = SMOOTHING / (logits.shape[-1] - 1)
    loss = (1 - SMOOTHING - each) * nll + each * -log_p.sum(-1)
    return loss[counted].sum()


def check_language_model(fixture: Fixture, config: dict[str, Any] | None = None, state: str = "state.") -> None:
    imported = convert_model(config or fixture.config, fixture.under(state))
    model = imported.module.eval()
    assert isinstance(model, LanguageModel)
    tokens = next(fixture[key] for key in ("src_tokens", "tokens", "in.tokens") if key in fixture)
    padding = padding_of(tokens)
    there = tokens != PAD
    with torch.no_grad():
        features = model.features(tokens, padding).x
        logits = model(tokens, padding=padding).logits
        assert_stream(model, tokens, padding, logits)
        if padding is not None:
            for row in range(tokens.shape[0]):
                alone = model(tokens[row, there[row]][None]).logits[0]
                assert_close(logits[row, there[row]], alone, OUTPUT_TOLERANCE, "a row with and without padding")
            # these mechanisms of the originals read padding that comes before a token
            if {"primal", "eva"} & set(model.config.decoder.mixer.names(model.config.decoder.layers)):
                there = there & (padding.int().diff(dim=1) >= 0).all(1, keepdim=True)
        for key in ("logits", "out.logits"):
            if key in fixture:
                assert_close(logits[there], fixture[key][there], OUTPUT_TOLERANCE, "logits")
        if "features" in fixture:
            assert_close(features[there], fixture["features"][there], OUTPUT_TOLERANCE, "features")
        if "out_incremental" in fixture:
            ours = logits if fixture["out_incremental"].shape == logits.shape else features
            assert_close(ours[there], fixture["out_incremental"][there], OUTPUT_TOLERANCE, "step by step")
        if "log_probs" in fixture:
            check_log_probabilities(model, logits.log_softmax(-1)[there], fixture, there)
        if "target" in fixture and "log_probs" in fixture:
            check_head(model, features[there], fixture["target"][there], fixture["log_probs"][there])


def check_log_probabilities(model: LanguageModel, ours: Tensor, fixture: Fixture, there: Tensor) -> None:
    """fairseq's adaptive softmax, asked for targets, leaves out the words of bands that hold no target: so do we."""
    golden = fixture["log_probs"][there]
    compared = torch.ones_like(golden, dtype=torch.bool)
    if "target" in fixture and model.config.head.cutoffs:
        band = torch.bucketize(torch.arange(golden.shape[-1]), torch.tensor(model.config.head.cutoffs), right=True)
        partial = (golden.exp().sum(-1) - 1).abs() > 1e-3
        own = band[fixture["target"][there]][:, None] == band
        compared = own | (band == 0) | ~partial[:, None]
    error = (ours - golden)[compared].abs().max().item()
    assert error <= LOG_PROBABILITY_TOLERANCE, f"log-probabilities differ by {error:.2e}"


def check_head(model: LanguageModel, features: Tensor, target: Tensor, log_probs: Tensor) -> None:
    """The loss of given words, which an adaptive head computes without the rest of the vocabulary."""
    nll = model.head.nll(features, target)
    golden = F.nll_loss(log_probs, target, reduction="none")
    error = (nll - golden).abs().max().item()
    assert error <= LOG_PROBABILITY_TOLERANCE, f"losses of targets differ by {error:.2e}"
