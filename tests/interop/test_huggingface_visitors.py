"""Exported runs in the hands of somebody who has only installed subquad and transformers: pipelines, without an import
of ours, give what our own commands give."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

pytest.importorskip("transformers", reason="pip install 'subquad[hf]'")

import transformers as hf

import subquad
from subquad.cli.main import run as command
from subquad.data.tokenizers import TokenizerConfig, build_tokenizer
from subquad.interop.huggingface.tokenizer import convert_tokenizer
from subquad.interop.remote_code import STUB_FILE
from subquad.models import MaskedLanguageModel
from subquad.train.run import load_trained

LINES = ["the red house is old", "a cat sees the tree", "the old tree is red", "a house sees a cat"]
MIRRORED = [" ".join(reversed(line.split())) for line in LINES]
STACK: dict[str, Any] = {"layers": 1, "heads": 2, "ffn_dim": 16, "mixer": {"name": "local", "window": 4}}
COMMON: dict[str, Any] = {
    "optim": {"name": "adam"},
    "schedule": {"kind": "inverse-sqrt", "lr": 1e-2, "warmup_updates": 2},
    "train": {"updates": 10, "validate_every": 10, "budget": {"max_tokens": 256}},
}
PICTURE = np.random.default_rng(1).integers(0, 255, (20, 13, 3)).astype(np.uint8)
"""Neither as high nor as wide as the images of training."""
PROGRAM = """
import json, sys, torch
sys.modules["torchvision"] = sys.modules["PIL"] = None  # neither package installs them
import transformers as hf

trust = {"trust_remote_code": True}

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "subquad":
            raise ModuleNotFoundError(f"No module named {name!r}")

def error_of(folder="language-model", **options):
    try:
        hf.AutoModelForCausalLM.from_pretrained(folder, **options)
    except (ValueError, ImportError) as error:
        return str(error)

sys.meta_path.insert(0, Hidden())
missing = error_of(**trust)
del sys.meta_path[0]
found = {
    "errors": [error_of(), missing, error_of("swapped")],
    "language-model": hf.pipeline("text-generation", "language-model", **trust)(
        "the red", max_new_tokens=5, do_sample=False
    ),
    "masked-language-model": hf.pipeline("fill-mask", "masked-language-model", **trust)("the <mask> house"),
    "text-classification": hf.pipeline("text-classification", "text-classification", **trust)(["the red"], top_k=2)[0],
}
model = hf.AutoModelForSeq2SeqLM.from_pretrained("translation", **trust)
source = hf.AutoTokenizer.from_pretrained("translation", **trust)
target = hf.AutoTokenizer.from_pretrained("translation", subfolder="target", **trust)
tokens = model.generate(**source("the red house", return_tensors="pt"), num_beams=1)
swapped = hf.AutoModelForCausalLM.from_pretrained("swapped", **trust)
found["swapped"] = swapped.generate(torch.full((1, 4), 7), max_new_tokens=4, do_sample=False).tolist()
found["translation"] = target.batch_decode(tokens, skip_special_tokens=True)
assert "subquad" in sys.modules
found["config"] = hf.AutoConfig.from_pretrained("translation", **trust).model_type
model.save_pretrained("again")
json.dump(found, open("found.json", "w"))
"""
IMAGES = """
import json, sys
sys.modules["torchvision"] = None
import transformers as hf

trust = {"trust_remote_code": True}
found = hf.pipeline("image-classification", "image-classification", **trust)("picture.png")
assert hf.AutoImageProcessor.from_pretrained("image-classification", **trust).size == {"height": 8, "width": 8}
json.dump([one["label"] for one in found], open("images.json", "w"))
"""


def write_data(folder: Path) -> dict[str, dict[str, Any]]:
    """Writes data of every task, and returns the sections `data` and `model` of the recipes."""
    (folder / "text.txt").write_text("".join(f"{line}\n" for line in LINES * 10))
    (folder / "pairs.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in zip(LINES, MIRRORED, strict=True)) * 10)
    (folder / "classes.tsv").write_text("".join(f"{'red' in line}\t{line}\n" for line in LINES * 5))
    labels = np.arange(40) % 3
    images = np.random.default_rng(0).integers(0, 80, (40, 3, 8, 8)) + 80 * labels[:, None, None, None]
    np.savez(folder / "images.npz", images=images.astype(np.uint8), labels=labels, classes=["dark", "grey", "light"])

    def splits(name: str) -> dict[str, str]:
        return dict.fromkeys(("train", "valid"), str(folder / name))

    blocks, pieces = {"blocks": {"tokens_per_sample": 32}}, {"tokenizer": {"kind": "bpe", "vocab_size": 280}}
    words: dict[str, Any] = {"tokenizer": {"kind": "words"}}
    encoder, decoder = {"encoder": STACK}, {"decoder": STACK}
    return {
        "language-model": {
            "data": {"splits": splits("text.txt"), **pieces, **blocks},
            "model": {"preset": "lm_small", "dim": 16, **decoder},
        },
        "masked-language-model": {
            "data": {"splits": splits("text.txt"), **words, **blocks},
            "model": {"preset": "masked_small", "dim": 16, **encoder},
        },
        "text-classification": {
            "data": {"splits": splits("classes.tsv"), **words},
            "model": {"preset": "text_small", "dim": 16, **encoder},
        },
        "image-classification": {
            "data": {"images": splits("images.npz")},
            "model": {"preset": "vision_small", "patch_size": 4, "dim": 16, **encoder},
        },
        "translation": {
            "data": {"splits": splits("pairs.tsv"), **words, "target_tokenizer": {"kind": "words"}},
            "model": {"preset": "translation_small", "dim": 16, **encoder, **decoder},
        },
    }


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a folder for every task, which `subquad export` wrote, and the runs in `runs`."""
    folder = tmp_path_factory.mktemp("exports")
    for task, sections in write_data(folder).items():
        (folder / f"{task}.yaml").write_text(yaml.safe_dump({"task": task, **sections, **COMMON}))
        run = str(folder / "runs" / task)
        assert command(["train", str(folder / f"{task}.yaml"), "--out", run]) == 0
        assert command(["export", run, "--to", "huggingface", "--out", str(folder / task)]) == 0
    pytest.importorskip("PIL.Image").fromarray(PICTURE).save(folder / "picture.png")
    return folder


@pytest.mark.nightly
def test_pipelines_without_an_import_of_ours(exports: Path) -> None:
    """Every exported task with texts works in a process that knows nothing of subquad, without Pillow, and gives what
    our own functions give; so does a swapped model.

    Without trust_remote_code the error names it, and without subquad it says what to install.
    """
    heads: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "eos_token_id": None}
    config = hf.LlamaConfig(vocab_size=20, hidden_size=16, intermediate_size=32, **heads)
    swapped = hf.LlamaForCausalLM(config).eval()
    subquad.swap(swapped, "eva", window=4)
    swapped.save_pretrained(exports / "swapped")
    visit(exports, PROGRAM)
    found = json.loads((exports / "found.json").read_text())
    assert found["config"] == "subquad"
    assert "trust_remote_code=True" in found["errors"][0]
    assert "pip install subquad" in found["errors"][1]
    assert "trust_remote_code=True" in found["errors"][2]
    tokens = swapped.generate(torch.full((1, 4), 7), max_new_tokens=4, do_sample=False)
    assert found["swapped"] == tokens.tolist()
    runs = {task: subquad.load_run(exports / "runs" / task) for task in write_data(exports)}
    text = runs["language-model"].generate("the red", tokens=5, temperature=0.0)
    assert found["language-model"][0]["generated_text"] == text
    ((classes,),) = [runs["text-classification"].classify("the red").values()]
    assert [one["label"] for one in found["text-classification"]] == [name for name, _ in classes]
    assert [one["score"] for one in found["text-classification"]] == pytest.approx([p for _, p in classes], abs=1e-5)
    assert found["translation"] == runs["translation"].translate(["the red house"], beam=1)
    assert (exports / "again" / STUB_FILE).read_text() == (exports / "translation" / STUB_FILE).read_text()
    assert {path.suffix for path in (exports / "again").iterdir()} == {".json", ".md", ".py", ".safetensors"}


@pytest.mark.nightly
def test_an_image_pipeline_without_an_import_of_ours(exports: Path) -> None:
    visit(exports, IMAGES)
    assert set(json.loads((exports / "images.json").read_text())) == {"dark", "grey", "light"}


def visit(folder: Path, program: str) -> None:
    env = os.environ | {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr


def test_fill_mask(exports: Path) -> None:
    """The pipeline hides a word as training does; texts that spell the mask twice have two answers."""
    run = load_trained(exports / "runs" / "masked-language-model")
    assert isinstance(run.model, MaskedLanguageModel)
    words, mask = run.tokenizer("text"), run.model.config.mask
    ids = [words.bos, *words.encode("the"), mask, *words.encode("house"), words.eos]
    with torch.no_grad():
        probs = run.model(torch.tensor([ids])).logits[0, 2].softmax(-1)
    pipe: Any = hf.pipeline("fill-mask", str(exports / "masked-language-model"))
    assert pipe.tokenizer("the <mask> house")["input_ids"] == ids
    found = pipe("the <mask> house", top_k=3)
    assert [one["token"] for one in found] == probs.topk(3).indices.tolist()
    assert [one["score"] for one in found] == pytest.approx(probs.topk(3).values.tolist(), abs=1e-6)
    assert found[0]["token_str"] == words.decode([found[0]["token"]])
    assert len(pipe("<mask> red <mask>")) == 2
    together = pipe(["the <mask> house", "a cat sees the <mask> tree now"], batch_size=2, top_k=3)
    assert [one["score"] for one in together[0]] == pytest.approx([one["score"] for one in found], abs=1e-5)


@pytest.mark.parametrize("kind", ["bytes", "bpe", "unigram", "characters"])
def test_masks_of_other_tokenizers(kind: str, tmp_path: Path) -> None:
    """The mask is the number after all of a tokenizer's, and what is around it is read as in training."""
    options = {"vocab_size": 300} if kind in ("bpe", "unigram") else {}
    words = build_tokenizer(TokenizerConfig.parse("tokenizer", {"kind": kind, **options}), LINES)
    convert_tokenizer(words, "around").save_pretrained(tmp_path)
    loaded = hf.AutoTokenizer.from_pretrained(tmp_path)
    assert (loaded.mask_token_id, len(loaded)) == (words.size, words.size + 1)
    assert loaded("the cat")["input_ids"] == [words.bos, *words.encode("the cat"), words.eos]
    first, *rest = loaded("the<mask>")["input_ids"]
    assert (first, rest) == (words.bos, [*words.encode("the"), words.size, words.eos])
    assert loaded.decode([*words.encode("the cat"), words.eos], skip_special_tokens=True) == "the cat"


@pytest.mark.nightly
def test_a_masked_language_model_is_trained_on(exports: Path, tmp_path: Path) -> None:
    """With the collator that masks words; the export becomes a run again."""
    pytest.importorskip("accelerate")
    folder = exports / "masked-language-model"
    words, model = hf.AutoTokenizer.from_pretrained(folder), hf.AutoModelForMaskedLM.from_pretrained(folder)
    samples = [{"input_ids": words(line)["input_ids"]} for line in LINES]
    options = hf.TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, report_to=[], save_strategy="no")
    collate = hf.DataCollatorForLanguageModeling(words, mlm_probability=0.5)
    done = hf.Trainer(model, options, train_dataset=samples, data_collator=collate).train()
    assert np.isfinite(done.training_loss)
    assert command(["import", str(folder), "--out", str(tmp_path / "again")]) == 0
    before = load_trained(exports / "runs" / "masked-language-model").model.state_dict()
    after = load_trained(tmp_path / "again").model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_image_processors_resize(exports: Path) -> None:
    """Images of any size become those of training, from files, arrays and tensors alike, unless do_resize is False."""
    pipe: Any = hf.pipeline("image-classification", str(exports / "image-classification"))
    assert {one["label"] for one in pipe(str(exports / "picture.png"))} == {"dark", "grey", "light"}
    processor = hf.AutoImageProcessor.from_pretrained(exports / "image-classification")
    picture = pytest.importorskip("PIL.Image").open(exports / "picture.png")
    wanted = torch.nn.functional.interpolate(
        torch.from_numpy(PICTURE.transpose(2, 0, 1)).float()[None], (8, 8), mode="bicubic", antialias=True
    )
    mean, std = (torch.tensor(values)[:, None, None] for values in (processor.image_mean, processor.image_std))
    expected = (wanted.round().clamp(0, 255) / 255 - mean) / std
    for given in (picture, PICTURE, torch.from_numpy(PICTURE), [picture]):
        torch.testing.assert_close(processor(given, return_tensors="pt")["pixel_values"], expected)
    flat = np.full((5, 30, 3), 77, np.uint8)
    small = processor(flat, return_tensors="pt")["pixel_values"]
    assert torch.equal(small, processor(np.full((8, 8, 3), 77, np.uint8), return_tensors="pt")["pixel_values"])
    assert processor([picture, flat], return_tensors="pt")["pixel_values"].shape == (2, 3, 8, 8)
    with pytest.raises(ValueError, match="this model reads"):
        processor(picture, do_resize=False)
