"""Small models of every kind that is linearised, and data for them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from subquad.data.masking import Masking, MaskOptions
from subquad.linearise.options import LineariseOptions, parse_mixer
from subquad.linearise.stages.batches import Images, LabelledTexts, MaskedBlocks, TextBlocks
from subquad.linearise.stages.data import Data
from subquad.linearise.stages.pipeline import Stages
from subquad.packages import require_torchvision
from subquad.processes import StopRequest
from subquad.progress import Progress

transformers = pytest.importorskip("transformers")
require_torchvision()  # timm imports it, also where it was built for another torch
timm = pytest.importorskip("timm")

WORDS, LENGTH = 40, 16
ENCODER = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
ENCODER |= {"intermediate_size": 32, "max_position_embeddings": 32, "pad_token_id": 0}
DECODER = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
DECODER |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
LLAMA = ENCODER | {"num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0}
WIDE_HEADS = LLAMA | {"head_dim": 8}
"""Heads are wider than the model is for each of them, as in Gemma and Qwen3."""
IMAGES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
IMAGES |= {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 3}
TIMM = {"img_size": 8, "patch_size": 2, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 4, "num_classes": 3}


def _of(kind: str, settings: dict[str, Any]) -> Callable[[], Any]:
    model = getattr(transformers, kind)
    return lambda: _disturbed(lambda: model(model.config_class(**settings)))


def _disturbed(build: Callable[[], nn.Module]) -> Any:
    """The same model every time, with weights with which attention is far from uniform."""
    torch.manual_seed(1)
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


HOSTS: dict[str, Callable[[], Any]] = {
    "gpt2": _of("GPT2LMHeadModel", DECODER),
    "llama": _of("LlamaForCausalLM", LLAMA),
    "gemma": _of("GemmaForCausalLM", WIDE_HEADS),
    "llama classifier": _of("LlamaForSequenceClassification", LLAMA | {"num_labels": 3}),
    "bert": _of("BertForMaskedLM", ENCODER),
    "bert classifier": _of("BertForSequenceClassification", ENCODER | {"num_labels": 3}),
    "vit": _of("ViTForImageClassification", IMAGES),
    "timm vit": lambda: _disturbed(lambda: timm.create_model("vit_tiny_patch16_224", **TIMM)),
}


def data_for(host: str) -> Data:
    """Random samples: what is tested is how they are used."""
    rng = np.random.default_rng(0)
    if "classifier" in host:
        texts = [rng.integers(1, WORDS, rng.integers(3, LENGTH)).tolist() for _ in range(24)]
        labelled = LabelledTexts(texts, rng.integers(0, 3, 24).tolist(), 0)
        return Data("texts", labelled, labelled, "random texts")
    if "vit" in host:
        pixels = torch.from_numpy(rng.standard_normal((24, 1, 8, 8)).astype(np.float32))
        name = "x" if "timm" in host else "pixel_values"
        images = Images(pixels, torch.from_numpy(rng.integers(0, 3, 24)), name)
        return Data("images", images, images, "random images")
    tokens = rng.integers(1, WORDS, 24 * LENGTH + 1)
    if host == "bert":
        masked = MaskedBlocks(tokens, LENGTH, Masking(MaskOptions(), WORDS - 1, np.arange(1, WORDS - 1)))
        return Data("masked", masked, masked, "random text")
    blocks = TextBlocks(tokens, LENGTH)
    return Data("causal", blocks, blocks, "random text")


def stages_for(
    host: str, out: Path, mixer: str = "local=window=4", stop: StopRequest | None = None, **options: Any
) -> Stages:
    """The stages of a small model with a few updates each."""
    short = {"transfer_updates": 3, "tune_updates": 3, "batch": 4, "length": LENGTH, "save_every": 2}
    read = LineariseOptions.parse("linearise", {"mixer": parse_mixer(mixer), **short, **options})
    quiet = Progress(stream=(out.parent / "progress.txt").open("a"), live=False)
    return Stages(HOSTS[host](), data_for(host), read, out, stop if stop is not None else StopRequest(), quiet)
