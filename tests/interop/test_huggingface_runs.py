"""Runs in Hugging Face's format: tokenizers, pipelines, the Trainer, and a hub that stands in for the real one."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import yaml

pytest.importorskip("transformers", reason="pip install 'subquad[hf]'")

import transformers as hf

from subquad.cli.main import run as command
from subquad.data.tokenizers import Tokenizer, TokenizerConfig, build_tokenizer
from subquad.data.tokenizers.simple import IdTokenizer
from subquad.decode.generate import Generator
from subquad.decode.options import SampleOptions
from subquad.decode.translate import Translator
from subquad.interop.huggingface import SubquadForCausalLM, SubquadTokenizer, save_huggingface
from subquad.interop.huggingface.tokenizer import FILE, convert_tokenizer
from subquad.models import LanguageModel, Seq2Seq
from subquad.tasks.image_classification import ImageClassificationTask
from subquad.tasks.text_classification import TextClassificationTask
from subquad.train.run import LoadedRun, load_trained

LINES = ["the red house is old", "a cat sees the tree", "the old tree is red", "a house sees a cat, Ünder </s> it"]
MIRRORED = [" ".join(reversed(line.split())) for line in LINES]
STACK: dict[str, Any] = {"layers": 1, "heads": 2, "ffn_dim": 16}
COMMON: dict[str, Any] = {
    "optim": {"name": "adam"},
    "schedule": {"kind": "inverse-sqrt", "lr": 1e-2, "warmup_updates": 2},
}


def trained(folder: Path, recipe: dict[str, Any]) -> LoadedRun:
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe | COMMON))
    assert command(["train", str(folder / "recipe.yaml"), "--out", str(folder / "run")]) == 0
    return load_trained(folder / "run")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedRun, Path]:
    """A language model of subwords, as a run and in Hugging Face's format."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text("".join(f"{line}\n" for line in LINES * 30))
    data = {
        "splits": {split: str(folder / "text.txt") for split in ("train", "valid")},
        "tokenizer": {"kind": "bpe", "vocab_size": 300},
        "blocks": {"tokens_per_sample": 32},
    }
    model = {"preset": "lm_small", "dim": 16, "decoder": {**STACK, "mixer": "lightconv"}}
    recipe = {"task": "language-model", "data": data, "model": model}
    run = trained(folder, recipe | {"train": {"updates": 30, "validate_every": 30, "budget": {"max_tokens": 512}}})
    assert command(["export", str(run.folder), "--to", "huggingface", "--out", str(folder / "exported")]) == 0
    return run, folder / "exported"


@pytest.fixture(scope="module")
def translation(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedRun, Path]:
    """A translator between words, whose sides have vocabularies of their own."""
    folder = tmp_path_factory.mktemp("translation")
    rows = "".join(f"{source}\t{target} now\n" for source, target in zip(LINES, MIRRORED, strict=True))
    (folder / "pairs.tsv").write_text(rows * 10)
    data = {
        "splits": {split: str(folder / "pairs.tsv") for split in ("train", "valid")},
        "tokenizer": {"kind": "words"},
        "target_tokenizer": {"kind": "words"},
    }
    model = {"preset": "translation_small", "dim": 16, "encoder": STACK, "decoder": {**STACK, "mixer": "lightconv"}}
    recipe = {"task": "translation", "data": data, "model": model, "decode": {"beam": 1, "max_len_b": 20}}
    run = trained(folder, recipe | {"train": {"updates": 60, "validate_every": 60, "budget": {"max_tokens": 256}}})
    save_huggingface(run, folder / "exported")
    return run, folder / "exported"


# ---------------------------------------------------------------------- tokenizers


def tokenizers() -> Iterator[tuple[str, Tokenizer]]:
    for kind in ("bpe", "unigram", "bytes", "characters", "words"):
        options = {"vocab_size": 300} if kind in ("bpe", "unigram") else {}
        yield kind, build_tokenizer(TokenizerConfig.parse("tokenizer", {"kind": kind, **options}), LINES)
    yield "ids", IdTokenizer(30, {"pad": 0, "eos": 1})


@pytest.mark.parametrize(("kind", "tokenizer"), [pytest.param(*pair, id=pair[0]) for pair in tokenizers()])
@pytest.mark.parametrize("side", ["before", "after"])
def test_tokenizers_give_the_numbers_of_training(kind: str, tokenizer: Tokenizer, side: Any, tmp_path: Path) -> None:
    convert_tokenizer(tokenizer, side).save_pretrained(tmp_path)
    loaded = hf.AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(loaded, SubquadTokenizer) == (kind not in ("bpe", "unigram"))
    assert (loaded.pad_token_id, loaded.eos_token_id) == (tokenizer.pad, tokenizer.eos)
    texts = ["7 8 29", "5"] if kind == "ids" else [*LINES, "unseen words: Größe 漢字"]
    for line in texts:
        ids = tokenizer.encode(line)
        assert loaded(line)["input_ids"] == ([tokenizer.eos, *ids] if side == "before" else [*ids, tokenizer.eos])
        assert loaded(line, add_special_tokens=False)["input_ids"] == ids
        if tokenizer.unk not in ids:
            assert loaded.decode(loaded(line)["input_ids"], skip_special_tokens=True) == tokenizer.decode(ids)
            if side == "before":
                kept = len(tokenizer.decode(ids[:2]))
                assert loaded.decode(ids[2:]) == tokenizer.decode(ids)[kept:]
    batch = loaded([texts[0], texts[-1]], padding=True, return_tensors="pt")
    assert set(batch) == {"input_ids", "attention_mask"}
    padded_first = bool((batch["attention_mask"][:, 0] == 0).any())
    assert padded_first == (side == "before")


def test_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    convert_tokenizer(dict(tokenizers())["words"], "after").save_pretrained(tmp_path)
    content = json.loads((tmp_path / FILE).read_text())
    words = base64.b64decode(content["files"]["dict.txt"]).replace(b"house", b"horse")
    content["files"]["dict.txt"] = base64.b64encode(words).decode()
    (tmp_path / FILE).write_text(json.dumps(content))
    with pytest.raises(ValueError, match="is damaged: its fingerprint differs"):
        SubquadTokenizer.from_pretrained(tmp_path)


# ---------------------------------------------------------------------- runs


def test_pipeline_of_text(text: tuple[LoadedRun, Path]) -> None:
    run, folder = text
    assert isinstance(run.model, LanguageModel)
    prompts = ["the red", "a cat sees the", "the"]
    pipe = hf.pipeline("text-generation", str(folder))
    found = pipe(prompts, max_new_tokens=12, do_sample=False, batch_size=3)
    ours = Generator([run.model], run.tokenizer("text")).sample(prompts, 12, SampleOptions(temperature=0.0))
    assert [one[0]["generated_text"] for one in found] == [one.text for one in ours]
    card = (folder / "README.md").read_text()
    assert "## Recipe" in card
    assert "pipeline_tag: text-generation" in card


def test_translation(translation: tuple[LoadedRun, Path]) -> None:
    run, folder = translation
    assert isinstance(run.model, Seq2Seq)
    model = hf.AutoModelForSeq2SeqLM.from_pretrained(folder)
    source = hf.AutoTokenizer.from_pretrained(folder)
    target = hf.AutoTokenizer.from_pretrained(folder, subfolder="target")
    assert model.generation_config.max_new_tokens == 21
    assert source.model_max_length > 10**6  # sinusoids have no end
    given = source(LINES, padding=True, return_tensors="pt")
    translator = Translator([run.model], run.tokenizer("source"), run.tokenizer("target"), run.recipe.decode)
    expected = [found.text for found in translator.translate(LINES)]
    assert target.batch_decode(model.generate(**given), skip_special_tokens=True) == expected
    assert any("now" in line.split() for line in expected)  # a word that only the target has
    several = model.generate(**given, num_beams=4, num_return_sequences=2)
    assert len(several) == 2 * len(LINES)


def test_exports_become_runs_again(
    text: tuple[LoadedRun, Path], translation: tuple[LoadedRun, Path], tmp_path: Path
) -> None:
    for name, (run, folder) in {"text": text, "translation": translation}.items():
        assert command(["import", str(folder), "--out", str(tmp_path / name)]) == 0
        again = load_trained(tmp_path / name)
        assert again.recipe.decode == run.recipe.decode
        for key, value in run.model.state_dict().items():
            assert torch.equal(again.model.state_dict()[key], value), key
        sides = ("text",) if name == "text" else ("source", "target")
        assert all(again.tokenizer(side).fingerprint() == run.tokenizer(side).fingerprint() for side in sides)
        data = again.recipe.data.model_dump()
        assert data["tokenizer"]["kind"] == "saved", "other data is read with the vocabulary of the model"


def test_pipeline_of_images(tmp_path: Path) -> None:
    """A classifier of 8-bit images, which are given as arrays, as Pillow's images and as files."""
    image_module = pytest.importorskip("PIL.Image")
    generator = np.random.default_rng(0)
    labels = np.arange(40) % 3
    images = (generator.integers(0, 80, (40, 3, 8, 8)) + 80 * labels[:, None, None, None]).astype(np.uint8)
    np.savez(tmp_path / "images.npz", images=images, labels=labels, classes=["dark", "grey", "light"])
    splits = {split: str(tmp_path / "images.npz") for split in ("train", "valid")}
    model = {"preset": "vision_small", "patch_size": 4, "dim": 16, "encoder": {**STACK, "mixer": "lightconv"}}
    recipe = {"task": "image-classification", "data": {"images": splits}, "model": model, "train": {"updates": 20}}
    run = trained(tmp_path, recipe)
    save_huggingface(run, tmp_path / "exported")
    pipe = hf.pipeline("image-classification", str(tmp_path / "exported"))
    picture = image_module.fromarray(images[2].transpose(1, 2, 0))
    picture.save(tmp_path / "image.png")
    ((_, expected),) = ImageClassificationTask.classifier(run).classify_file(str(tmp_path / "image.png"))
    for given in (picture, str(tmp_path / "image.png"), images[2]):
        found = pipe(given)
        assert [one["label"] for one in found] == [name for name, _ in expected]
        np.testing.assert_allclose([one["score"] for one in found], [p for _, p in expected], atol=1e-6)
    assert command(["import", str(tmp_path / "exported"), "--out", str(tmp_path / "again")]) == 0
    again = ImageClassificationTask.classifier(load_trained(tmp_path / "again"))
    assert again.classify_file(str(tmp_path / "image.png"))[0][1] == expected
    processor = hf.AutoImageProcessor.from_pretrained(tmp_path / "exported")
    assert processor([picture, images[0]], return_tensors="pt")["pixel_values"].shape == (2, 3, 8, 8)


@pytest.mark.parametrize("kind", ["bytes", "words", "bpe"])
def test_pipeline_of_text_classification(kind: str, tmp_path: Path) -> None:
    """A classifier gives in transformers what `subquad classify` gives, alone and in a padded batch; it is trained on
    there, and its texts are cut where ours are."""
    rows = [("red" if "red" in line else "other", line) for line in LINES]
    (tmp_path / "all.tsv").write_text("".join(f"{label}\t{line}\n" for label, line in rows * 5))
    data = {
        "splits": {split: str(tmp_path / "all.tsv") for split in ("train", "valid")},
        "tokenizer": {"kind": kind, **({"vocab_size": 300} if kind == "bpe" else {})},
        "max_length": 12,
        "long_texts": "cut",
    }
    model = {"preset": "text_small", "dim": 16, "pooling": "first", "encoder": {**STACK, "mixer": "local"}}
    run = trained(tmp_path, {"task": "text-classification", "data": data, "model": model, "train": {"updates": 10}})
    save_huggingface(run, tmp_path / "exported")
    labeller = TextClassificationTask.classifier(run)
    pipe: Any = hf.pipeline("text-classification", str(tmp_path / "exported"), top_k=None)
    texts = [*LINES, "red " * 30]
    for found in (pipe(texts, truncation=True), pipe(texts, truncation=True, batch_size=4)):
        for ours, theirs in zip(labeller.classify(texts), found, strict=True):
            assert [one["label"] for one in theirs] == [name for name, _ in ours]
            assert [one["score"] for one in theirs] == pytest.approx([value for _, value in ours], abs=1e-5)
    loaded = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported")
    words = hf.AutoTokenizer.from_pretrained(tmp_path / "exported")
    batch = words(texts, truncation=True, padding=True, return_tensors="pt")
    labels = torch.tensor([loaded.config.label2id["red"]] * len(texts))
    output = loaded(**batch, labels=labels)
    torch.testing.assert_close(output.loss, torch.nn.functional.cross_entropy(output.logits, labels))
    output.loss.backward()
    assert all(parameter.grad is not None for parameter in loaded.parameters())


def test_trainer(text: tuple[LoadedRun, Path], tmp_path: Path) -> None:
    """Two updates of two batches each, with and without checkpointing: one mean over the targets of both, and what was
    trained is loaded again."""
    pytest.importorskip("accelerate")
    words = hf.AutoTokenizer.from_pretrained(text[1])
    samples = [{"input_ids": words(line)["input_ids"]} for line in LINES * 2]
    found = []
    for checkpointing in (False, True):
        model = SubquadForCausalLM.from_pretrained(text[1])
        options = hf.TrainingArguments(
            str(tmp_path / "trained"),
            max_steps=2,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            logging_steps=1,
            gradient_checkpointing=checkpointing,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
        )
        collate = hf.DataCollatorForLanguageModeling(words, mlm=False)
        trainer = hf.Trainer(model, options, train_dataset=samples, data_collator=collate, processing_class=words)
        trainer.train()
        found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        trainer.save_model()
    assert len(found[0]) == 2
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight, model.get_parameter(name)), name
    before = text[0].model.state_dict()
    assert not any(torch.equal(weight, before[name]) for name, weight in loaded.model.named_parameters())


def test_the_card_goes_along_and_says_that_the_model_was_resaved(text: tuple[LoadedRun, Path], tmp_path: Path) -> None:
    before = (text[1] / "README.md").read_text()
    SubquadForCausalLM.from_pretrained(text[1]).save_pretrained(tmp_path / "second")
    SubquadForCausalLM.from_pretrained(tmp_path / "second").save_pretrained(tmp_path / "third")
    for folder in ("second", "third"):
        card = (tmp_path / folder / "README.md").read_text()
        assert card.startswith(before)
        assert card.count("saved again") == 1
    with pytest.raises(ValueError, match="call push_to_hub"):
        SubquadForCausalLM.from_pretrained(text[1]).save_pretrained(tmp_path / "fourth", push_to_hub=True)


# ---------------------------------------------------------------------- the hub


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as an upload asks for. Keeps what it was given."""

    files: ClassVar[dict[str, bytes]] = {}

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        where = f"http://{self.headers['Host']}/me/model"
        if self.path.endswith("/repos/create"):
            self._answer({"url": where, "id": "me/model"})
        elif self.path.endswith("/validate-yaml"):
            self._answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            self._answer(
                {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
            )
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._answer({"commitUrl": f"{where}/commit/{'0' * 40}", "commitOid": "0" * 40})
        else:
            self._answer({}, 404)

    def do_GET(self) -> None:
        """A file of what was given, as `resolve` gives it."""
        _, _, name = self.path.partition("/resolve/main/")
        if name not in self.files:
            self._answer({"error": "Entry not found"}, 404)
            return
        self.send_response(200)
        tag = hashlib.sha256(self.files[name]).hexdigest()
        for key, value in {"ETag": tag, "X-Repo-Commit": "0" * 40, "Content-Length": len(self.files[name])}.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(self.files[name])

    def do_HEAD(self) -> None:
        self.do_GET()

    def _answer(self, content: dict[str, Any], status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        if status == 404:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: tests are quiet."""


@pytest.mark.nightly
def test_push_to_hub(text: tuple[LoadedRun, Path], tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    code = (
        "import sys; from subquad.interop.huggingface import SubquadForCausalLM; "
        "SubquadForCausalLM.from_pretrained(sys.argv[1]).push_to_hub('me/model', token='hf_none', tags=['mine']); "
        "SubquadForCausalLM.from_pretrained('me/model').save_pretrained(sys.argv[2])"
    )
    surroundings = {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
    }
    try:
        subprocess.run(
            [sys.executable, "-c", code, str(text[1]), str(tmp_path / "again")],
            env=os.environ | surroundings,
            check=True,
            timeout=300,
        )
    finally:
        server.shutdown()
    assert {"config.json", "model.safetensors", "generation_config.json", "README.md"} <= Hub.files.keys()
    (tmp_path / "fetched").mkdir()
    for name, content in Hub.files.items():
        (tmp_path / "fetched" / name).write_bytes(content)
    front, body = Hub.files["README.md"].decode().split("---\n", 2)[1:]
    assert yaml.safe_load(front)["tags"] == ["subquad", "lightconv", "mine"]
    assert body.startswith((text[1] / "README.md").read_text().split("---\n", 2)[2])
    assert "## Recipe" in body
    assert (tmp_path / "again" / "README.md").read_bytes() == Hub.files["README.md"]  # it was there, and came along
    loaded = SubquadForCausalLM.from_pretrained(tmp_path / "fetched")
    tokens = torch.tensor([[2, 7, 9]])
    assert torch.equal(loaded(tokens).logits, text[0].model(tokens).logits)
