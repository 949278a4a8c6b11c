"""Small models of every class for Hugging Face, with inputs of a padded batch, for the demands on all of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from subquad.interop.huggingface.saving import wrap
from subquad.models import Model, build_model
from subquad.testing import enlarge

PAD, EOS, VOCAB, SOURCE_VOCAB = 1, 2, 23, 19
STACK: dict[str, Any] = {"layers": 2, "heads": 2, "ffn_dim": 24, "mixer": {"name": "local", "window": 4}}
ROWS = [[EOS, 7, 9, 11, 4], [EOS, 5, 3], [EOS, 8, 8, 12, 6, 10, 9, 4]]
SPECIAL = {"pad_token_id": PAD, "eos_token_id": EOS}


@dataclass(frozen=True)
class Case:
    """auto: the Auto class that loads the model. build: the model, without its class for Hugging Face. inputs: of the
    forward pass, with labels. config: options of SubquadConfig."""

    auto: Any
    build: Callable[[], Model]
    inputs: Callable[[], dict[str, Tensor]]
    config: dict[str, Any]

    def model(self) -> Any:
        torch.manual_seed(0)
        model = self.build()
        enlarge(model)
        return wrap(model, **self.config)

    @property
    def reads_tokens(self) -> bool:
        return "input_ids" in self.inputs()


def padded(rows: list[list[int]], side: str = "left") -> dict[str, Tensor]:
    longest = max(map(len, rows))
    empty = [longest - len(row) for row in rows]
    left = side == "left"
    tokens = [[PAD] * n + row if left else row + [PAD] * n for n, row in zip(empty, rows, strict=True)]
    mask = [[0] * n + [1] * len(row) if left else [1] * len(row) + [0] * n for n, row in zip(empty, rows, strict=True)]
    return {"input_ids": torch.tensor(tokens), "attention_mask": torch.tensor(mask)}


def with_labels(side: str) -> dict[str, Tensor]:
    given = padded(ROWS, side)
    return {**given, "labels": given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)}


def pairs() -> dict[str, Tensor]:
    labels = torch.tensor([[4, 5, EOS, -100], [6, EOS, -100, -100], [7, 8, 9, EOS]])
    return {**padded([[*row[1:], EOS] for row in ROWS], "right"), "labels": labels}


def images() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"pixel_values": torch.randn(3, 3, 32, 32, generator=generator), "labels": torch.tensor([0, 1, 2])}


def language_model() -> Model:
    return build_model("language-model", dim=16, vocab=VOCAB, decoder=STACK)


def untied() -> Model:
    return build_model("language-model", dim=16, vocab=VOCAB, decoder=STACK, head={"tied": False})


def translator(shared: bool) -> Model:
    vocabularies = {"source_vocab": VOCAB if shared else SOURCE_VOCAB, "target_vocab": VOCAB}
    stacks = {"encoder": STACK, "decoder": STACK}
    return build_model("encoder-decoder", dim=16, **vocabularies, shared_embedding=shared, **stacks)


def pyramid() -> Model:
    stage = {**STACK, "dim": 16, "layers": 1, "ffn_conv": True}
    return build_model("pyramid", num_classes=3, stages=[stage, {**stage, "layers": 2, "mixer": "softmax"}])


def vision() -> Model:
    return build_model("vision", image_size=32, patch_size=4, dim=16, num_classes=3, encoder=STACK)


def classifier() -> Model:
    return build_model("text-classifier", dim=16, vocab=VOCAB, num_classes=3, encoder=STACK)


def masked() -> Model:
    return build_model("masked-language-model", dim=16, vocab=VOCAB, encoder=STACK)


def texts() -> dict[str, Tensor]:
    return {**padded(ROWS), "labels": torch.tensor([0, 1, 2])}


START = {**SPECIAL, "decoder_start_token_id": EOS}
CASES: dict[str, Case] = {
    "causal": Case(hf.AutoModelForCausalLM, language_model, lambda: with_labels("left"), SPECIAL),
    "causal, untied": Case(hf.AutoModelForCausalLM, untied, lambda: with_labels("right"), SPECIAL),
    "seq2seq": Case(hf.AutoModelForSeq2SeqLM, lambda: translator(False), pairs, START),
    "seq2seq, shared": Case(hf.AutoModelForSeq2SeqLM, lambda: translator(True), pairs, START),
    "masked": Case(hf.AutoModelForMaskedLM, masked, lambda: with_labels("right"), SPECIAL),
    "text classifier": Case(hf.AutoModelForSequenceClassification, classifier, texts, SPECIAL),
    "vision": Case(hf.AutoModelForImageClassification, vision, images, {}),
    "pyramid": Case(hf.AutoModelForImageClassification, pyramid, images, {}),
}
