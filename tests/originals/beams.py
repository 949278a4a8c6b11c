"""Fixtures of fairseq's beam search: n-best lists of a stored model under several settings."""

import json
from pathlib import Path
from typing import Any

import torch

from subquad.decode.align import cross_attention_weights
from subquad.decode.beam import SearchRequest, SpecialTokens, beam_search
from subquad.decode.hypotheses import Hypothesis
from subquad.decode.options import DecodeOptions
from subquad.decode.scoring import Seq2SeqScorer
from subquad.interop.checkpoints.fairseq.models import convert_model
from subquad.models import Seq2Seq
from tests.originals.files import OUTPUT_TOLERANCE, assert_close, load, padding_of

SCORE_TOLERANCE = 1e-4
NAMES = {
    "beam_size": "beam",
    "len_penalty": "lenpen",
    "max_len_a": "max_len_a",
    "max_len_b": "max_len_b",
    "min_len": "min_len",
    "unk_penalty": "unk_penalty",
    "temperature": "temperature",
}
"""The original's names and ours."""
APART = {"normalize_scores", "no_repeat_ngram_size"}


def options_of(args: dict[str, Any]) -> DecodeOptions:
    unknown = args.keys() - NAMES.keys() - APART
    assert not unknown, f"no check understands the settings {unknown}"
    options = {ours: args[theirs] for theirs, ours in NAMES.items() if theirs in args}
    if not args.get("normalize_scores", True):
        options["lenpen"] = 0.0
    # The original's block of repeated n-grams compares with a buffer longer than any n-gram: it never blocks one.
    return DecodeOptions(nbest=args["beam_size"], **options)


def check_beams(path: Path) -> None:
    content = json.loads(path.read_text())
    fixture = load(path.with_name(content["model_file"]))
    model = convert_model(fixture.config, fixture.under("state.")).module.eval()
    assert isinstance(model, Seq2Seq)
    source, symbols = fixture["src_tokens"], SpecialTokens(content["pad"], content["eos"], content["unk"])
    padding = padding_of(source)
    assert content["settings"], "a fixture without settings"
    with torch.no_grad():
        for setting in content["settings"]:
            options = options_of(setting["args"])
            # The original's limit of length is that of the longest source in the batch.
            limit = int(options.max_len_a * source.shape[1] + options.max_len_b)
            request = SearchRequest(torch.full((len(source),), symbols.eos), torch.full((len(source),), limit))
            found = beam_search(Seq2SeqScorer(model, source, padding), request, options, symbols)
            assert len(found) == len(setting["hypos"])
            for ours, theirs in zip(found, setting["hypos"], strict=True):
                compare(ours, theirs)
        if "attn_last_layer" in fixture:
            target = fixture["prev_output_tokens"]
            there = target != symbols.pad
            weights = cross_attention_weights(model, source, padding, target)
            assert_close(weights[there], fixture["attn_last_layer"][there], OUTPUT_TOLERANCE, "attention to the source")


def compare(ours: list[Hypothesis], theirs: list[dict[str, Any]]) -> None:
    assert [found.tokens for found in ours] == [found["tokens"] for found in theirs]
    for found, golden in zip(ours, theirs, strict=True):
        assert abs(found.score - golden["score"]) < SCORE_TOLERANCE
        for one, stored in zip(found.log_probabilities, golden["positional_scores"], strict=True):
            assert abs(one - stored) < SCORE_TOLERANCE
