"""Models in Hugging Face's format under the real transformers: round trips, generate, losses, checkpointing."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="pip install 'subquad[hf]'")

import transformers as hf

from subquad.data.tokenizers.simple import CharacterTokenizer
from subquad.decode.beam import pad_rows
from subquad.decode.generate import Generator
from subquad.decode.options import SampleOptions
from subquad.decode.scoring import LanguageModelScorer, Scorer, Seq2SeqScorer
from subquad.interop.huggingface import (
    SubquadCache,
    SubquadConfig,
    SubquadForCausalLM,
    SubquadForImageClassification,
    SubquadForSeq2SeqLM,
)
from subquad.interop.huggingface.saving import wrap
from subquad.models import Model, build_model
from subquad.tasks.language_model import block_losses
from subquad.tasks.translation import pair_losses_by_row
from tests.decode.test_decoding import STACK, language_model, translator_model
from tests.models.cases import OPTIONS, able

PAD, EOS = 1, 2
VOCAB = 23
PROMPTS = [[EOS, 7, 9, 11, 4], [EOS, 5], [EOS, 8, 8, 12, 6, 10, 9, 4]]
SOURCES = [[7, 9, 11, EOS], [5, EOS], [8, 8, 12, 6, 10, 9, 4, EOS]]


def wrapped(model: Model) -> Any:
    numbers = {"pad_token_id": PAD, "eos_token_id": EOS}
    return wrap(model, **numbers, **({"decoder_start_token_id": EOS} if model.config.kind == "encoder-decoder" else {}))


def left_padded(rows: list[list[int]]) -> dict[str, Tensor]:
    longest = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[PAD] * (longest - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows]),
    }


def right_padded(rows: list[list[int]]) -> dict[str, Tensor]:
    tokens, padding = pad_rows(rows, PAD)
    return {"input_ids": tokens, "attention_mask": (~padding).long()}


def vision(mixer: str, **options: Any) -> Model:
    torch.manual_seed(0)
    encoder = STACK | {"mixer": {"name": mixer, **OPTIONS.get(mixer, {}), **options}}
    return build_model("vision", image_size=32, patch_size=4, dim=16, num_classes=3, encoder=encoder).eval()


class Hostile:
    """Unpickled, it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_folder_of_a_stranger_runs_nothing(tmp_path: Path) -> None:
    """Pickles are not read at all, and code in the folder is not imported."""
    folder, trace = tmp_path / "model", tmp_path / "trace"
    model = wrapped(language_model("lightconv"))
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "hostile.py").write_text(f"open({str(trace)!r}, 'w')\nclass Model: pass\n")
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModelForCausalLM": "hostile.Model"}}))
    assert type(SubquadForCausalLM.from_pretrained(folder)) is SubquadForCausalLM
    for content in ({**model.state_dict(), "hostile": Hostile(trace)}, dict(model.state_dict())):
        torch.save(content, folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink(missing_ok=True)
        with pytest.raises(OSError, match="safetensors"):
            SubquadForCausalLM.from_pretrained(folder)
        with pytest.raises(ValueError, match="would read a pickle"):
            SubquadForCausalLM.from_pretrained(folder, use_safetensors=False)
    model.save_pretrained(folder)
    for wrong in ({"kind": "os.system"}, {"decoder": {"mixer": "os:system"}}, {"dim": -1}):
        (folder / "config.json").write_text(json.dumps({**config, "subquad": {**config["subquad"], **wrong}}))
        with pytest.raises(ValueError, match=r"os|dim"):
            SubquadForCausalLM.from_pretrained(folder)
    assert not trace.exists()


# ---------------------------------------------------------------------- import, saving and loading


def test_the_core_does_without_transformers() -> None:
    code = (
        "import sys, subquad, subquad.mixers, subquad.models, subquad.train.trainer, subquad.decode.generate, "
        "subquad.interop.export.card, subquad.cli.main; assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("mixer", "options"),
    [
        *((name, {}) for name in able("encoder")),
        ("local", {"relative": "table", "dims": 2}),
        ("local", {"relative": "t5", "dims": 1}),
        ("eva", {"relative": "table", "dims": 2}),
    ],
)
def test_vision_round_trip(mixer: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = vision(mixer, **options)
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)  # some mechanisms draw whenever they compute
    expected = model(images).logits
    wrapped(model).save_pretrained(tmp_path)
    before = torch.get_rng_state()
    loaded = hf.AutoModelForImageClassification.from_pretrained(tmp_path)
    assert torch.equal(before, torch.get_rng_state())
    assert isinstance(loaded, SubquadForImageClassification)
    assert not loaded.training
    torch.manual_seed(2)
    assert torch.equal(loaded(images).logits, expected)


def test_language_model_round_trip(tmp_path: Path) -> None:
    model = language_model("performer")
    wrapped(model).save_pretrained(tmp_path)
    assert isinstance(hf.AutoConfig.from_pretrained(tmp_path), SubquadConfig)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, SubquadForCausalLM)
    assert (loaded.config.vocab_size, loaded.config.hidden_size) == (VOCAB, 16)
    tokens = torch.tensor(PROMPTS[2:])
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert torch.equal(loaded(tokens, return_dict=False)[0], model(tokens).logits)
    half = SubquadForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert half.generate(tokens, max_new_tokens=3).shape[1] <= tokens.shape[1] + 3
    card = (tmp_path / "README.md").read_text()
    assert "library_name: transformers" in card
    assert "performer" in card


def test_shared_and_tied_embeddings_are_stored_once(tmp_path: Path) -> None:
    options = {"dim": 16, "source_vocab": VOCAB, "target_vocab": VOCAB, "shared_embedding": True}
    model = build_model("encoder-decoder", **options, encoder=STACK, decoder=STACK).eval()
    wrapped(model).save_pretrained(tmp_path)
    loaded = hf.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert isinstance(loaded, SubquadForSeq2SeqLM)
    assert loaded.num_parameters() == model.parameter_count()
    source, target = torch.tensor(SOURCES[2:]), torch.tensor([[EOS, 4, 5]])
    found = loaded(source, decoder_input_ids=target)
    assert torch.equal(found.logits, model(source, target).logits)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = wrapped(language_model())
    with pytest.raises(
        ValueError, match="SubquadForSeq2SeqLM holds models of kind encoder-decoder, not language-model"
    ):
        SubquadForSeq2SeqLM(model.config)
    with pytest.raises(ValueError, match="but this model needs a SubquadCache"):
        model(torch.tensor(PROMPTS[1:2]), past_key_values=hf.DynamicCache())
    with pytest.raises(ValueError, match="cannot forget"):
        SubquadCache().crop(1)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["subquad"]["decoder"]["layers"] = 3
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"has no weights for model\.decoder\.blocks\.2"):
        SubquadForCausalLM.from_pretrained(tmp_path)


# ---------------------------------------------------------------------- generate


def own_steps(scorer: Scorer, first: list[int], said: Tensor) -> list[Tensor]:
    """Logits of our own decoding after each token of `said` (rows, steps), whose steps follow `first`."""
    reads = torch.cat([torch.tensor(first)[:, None], said[:, :-1]], 1)
    return [scorer.step(column).values for column in reads.T]


def assert_same_until_the_end(found: list[Tensor], expected: list[Tensor], said: Tensor) -> None:
    """Logits of every step, of the rows that have not ended before it."""
    ended = torch.zeros(len(said), dtype=torch.bool)
    for step, (theirs, ours) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(theirs[~ended], ours[~ended], atol=1e-5, rtol=1e-5)
        ended |= said[:, step] == EOS


@pytest.mark.parametrize("mixer", able("decoder"))
def test_greedy_text_is_that_of_our_own_decoding(mixer: str) -> None:
    """Ragged prompts, padded on the left."""
    model = language_model(mixer)
    given = left_padded(PROMPTS)
    found = wrapped(model).generate(
        **given, max_new_tokens=9, return_dict_in_generate=True, output_logits=True, do_sample=False
    )
    said = found.sequences[:, given["input_ids"].shape[1] :]
    tokenizer = CharacterTokenizer([chr(97 + number) for number in range(VOCAB - 4)])
    ours = Generator([model], tokenizer).sample_after(PROMPTS, 9, SampleOptions(temperature=0.0))
    for row, continued in zip(said.tolist(), ours, strict=True):
        assert row[: len(continued.tokens)] == continued.tokens
        assert set(row[len(continued.tokens) :]) <= {PAD}
    with torch.inference_mode():
        read, padding = pad_rows([row[:-1] for row in PROMPTS], PAD)
        scorer = LanguageModelScorer.after(model, read, padding)
        assert_same_until_the_end(found.logits, own_steps(scorer, [row[-1] for row in PROMPTS], said), said)


@pytest.mark.parametrize("mixer", able("decoder"))
def test_greedy_translation_is_that_of_our_own_decoding(mixer: str) -> None:
    model = translator_model(mixer)
    given = right_padded(SOURCES)
    found = wrapped(model).generate(
        **given, max_new_tokens=9, return_dict_in_generate=True, output_logits=True, do_sample=False
    )
    said = found.sequences[:, 1:]
    with torch.inference_mode():
        scorer = Seq2SeqScorer(model, given["input_ids"], given["attention_mask"] == 0)
        expected = own_steps(scorer, [EOS] * len(SOURCES), said)
    assert_same_until_the_end(found.logits, expected, said)
    for row, tokens in enumerate(said.tolist()):
        for step, token in enumerate(tokens[: tokens.index(EOS) + 1 if EOS in tokens else None]):
            scores = expected[step][row].clone()
            scores[PAD] = -torch.inf
            assert int(scores.argmax()) == token


SEARCHES: dict[str, dict[str, Any]] = {
    "beam": {"num_beams": 4, "num_return_sequences": 3, "early_stopping": True},
    "sampling": {"do_sample": True, "top_k": 8, "temperature": 1.3, "num_return_sequences": 2},
    "beam sampling": {"do_sample": True, "num_beams": 3, "num_return_sequences": 2},
}


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("side", ["text", "translation"])
def test_searches_find_the_same_with_and_without_a_state(side: str, search: str) -> None:
    """Hypotheses that are kept, dropped and repeated take their state along."""
    model = wrapped(language_model("lightconv") if side == "text" else translator_model("performer"))
    given = left_padded(PROMPTS) if side == "text" else right_padded(SOURCES)
    found = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        found.append(model.generate(**given, max_new_tokens=8, use_cache=use_cache, **SEARCHES[search]))
    assert torch.equal(*found)
    assert len({tuple(row) for row in found[0].tolist()}) > len(PROMPTS)


def test_a_text_goes_on_from_its_cache() -> None:
    model, prompts = wrapped(language_model("softmax")), torch.tensor(PROMPTS[2:])
    whole = model.generate(prompts, max_new_tokens=8, do_sample=False)
    first = model.generate(prompts, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    assert first.past_key_values.get_seq_length() == first.sequences.shape[1] - 1
    assert torch.equal(model.generate(first.sequences, past_key_values=first.past_key_values, max_new_tokens=4), whole)


def test_a_mechanism_that_cannot_stream_generates_without_a_state() -> None:
    torch.manual_seed(0)
    decoder = STACK | {"mixer": {"name": "eva", "window": 4, "landmarks": 4}}
    model = build_model("language-model", dim=16, vocab=VOCAB, decoder=decoder).eval()
    held = wrapped(model)
    assert not held.streams
    tokens = torch.tensor(PROMPTS[2:])
    found = held.generate(tokens, max_new_tokens=4, do_sample=False)
    for _ in range(found.shape[1] - tokens.shape[1]):
        logits = model(tokens).logits[:, -1]
        logits[:, PAD] = -torch.inf
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], 1)
    assert torch.equal(found, tokens)


# ---------------------------------------------------------------------- training


def test_losses_are_those_of_our_tasks() -> None:
    text, translator = language_model("softmax"), translator_model("softmax")
    given = right_padded(PROMPTS)
    labels = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
    batch = {"inputs": given["input_ids"][:, :-1], "targets": given["input_ids"][:, 1:]}
    batch |= dict.fromkeys(("start", "context"), torch.zeros(len(labels), dtype=torch.int64))
    nll, count = torch.tensor(block_losses(text, batch, [slice(0, labels.shape[1])], PAD)).sum(0)
    torch.testing.assert_close(wrapped(text)(**given, labels=labels).loss, nll / count)
    shared = wrapped(text)(**given, labels=labels, num_items_in_batch=100).loss
    torch.testing.assert_close(shared, nll / 100)

    source = right_padded(SOURCES)
    targets = right_padded([[4, 5, EOS], [6, EOS], [7, 8, 9, EOS]])["input_ids"]
    pairs = {
        "source": source["input_ids"],
        "source_padding": source["attention_mask"] == 0,
        "target_in": torch.tensor([[EOS, 4, 5, EOS], [EOS, 6, EOS, PAD], [EOS, 7, 8, 9]]),
        "target_out": targets,
    }
    nll, count = torch.tensor(pair_losses_by_row(translator, pairs, PAD)).sum(0)
    found = wrapped(translator)(**source, labels=targets.masked_fill(targets == PAD, -100)).loss
    torch.testing.assert_close(found, nll / count)


def test_the_regulariser_counts_as_in_training() -> None:
    model = vision("primal")
    images, labels = torch.randn(2, 3, 32, 32), torch.tensor([0, 2])
    held = wrap(model, aux_weight=0.5)
    plain = torch.nn.functional.cross_entropy(held(images).logits, labels)
    aux = held.model(images).aux
    torch.testing.assert_close(held(images, labels=labels).loss, plain + 0.5 * aux.mean())
