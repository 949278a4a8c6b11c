"""Files that pages speak of and none of their commands makes: what other programs trained, and data from elsewhere.

Checkpoints are written in the layout of their program, from the weights of golden fixtures; data is as small as the
recipes that name it allow. All have the names that the pages use.
"""

import argparse
import gzip
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from subquad.packages import require_torchvision
from tests.docs.pages import ROOT, TORCH_HOME
from tests.interop.test_fairseq_hub import CHECKPOINTS, SOURCES, codes_for, place
from tests.interop.test_import_others import LIBRARY, LINFORMER, library_images, library_options, sample, write_crybot
from tests.interop.test_import_others import write_dictionary as write_words
from tests.interop.test_imported_data import binarised as write_binarised
from tests.tasks.test_masked_language_model import write_checkpoint

LINES = ["w1 w5 w2", "w3 w4", "w7 w2 w9 w4"]
"""Text of words that the checkpoints' dictionaries have."""
RARE_WORDS = 11_000
"""More than the adaptive tables of the small WikiText recipes begin their last band with."""


def write_files(folder: Path, text: str) -> None:
    """Writes what the text of a page names into the folder in which it is followed."""
    for word, (name, make) in ({name: (name, make) for name, make in MADE.items()} | READ).items():
        if word in text:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            make(path)


# ---------------------------------------------------------------------- checkpoints


def archive(path: Path) -> None:
    """The folder of a published model of fairseq: model.pt, dictionaries and codes."""
    place(path)


def binarised(path: Path) -> None:
    """Dictionaries and codes, as fairseq-preprocess leaves them in its folder."""
    path.mkdir()
    for name in ("dict.src.txt", "dict.tgt.txt"):
        shutil.copy(CHECKPOINTS / name, path)
    (path / "code").write_text(codes_for({word for line in SOURCES for word in line.split()}))


def save_with_namespaces(path: Path, contents: Callable[[type[argparse.Namespace]], dict[str, Any]]) -> None:
    """Saves contents made with efficient-attention's namespace; the library is gone when the file is read."""
    library = types.ModuleType("efficient_attention")
    kind = type("NestedNamespace", (argparse.Namespace,), {"__module__": library.__name__})
    library.NestedNamespace = kind  # type: ignore[attr-defined]
    sys.modules[library.__name__] = library
    try:
        torch.save(contents(kind), path)
    finally:
        del sys.modules[library.__name__]


def library_vit(path: Path) -> None:
    save_with_namespaces(path, lambda kind: library_images(sample(LIBRARY, "model_evit_*"), kind))


def library_language_model(path: Path) -> None:
    """With its dictionary in the folder in which commands run."""
    fixture = sample(LIBRARY, "fairseq_lm_*")
    state = fixture.under("state.")
    bands = [value for name, value in state.items() if "embed_tokens" in name and name.endswith("0.weight")]
    write_words(path.parents[1] / "dict.txt", sum(map(len, bands)))

    def contents(kind: type[argparse.Namespace]) -> dict[str, Any]:
        model = argparse.Namespace(**library_options(fixture.config, kind), arch="transformer_lm_wiki103")
        groups = {"task": {"_name": "language_modeling", "tokens_per_sample": 64}, "optimization": {"lr": [1.0]}}
        return {"args": None, "cfg": {"model": model, **groups}, "model": state}

    save_with_namespaces(path, contents)


def library_translator(path: Path) -> None:
    """With its dictionaries and codes in the folder in which commands run."""
    fixture, folder = sample(LIBRARY, "fairseq_mt_*"), path.parents[1]
    state = fixture.under("state.")
    for language, side in (("en", "encoder"), ("de", "decoder")):
        write_words(folder / f"dict.{language}.txt", len(state[f"{side}.embed_tokens.weight"]))
    (folder / "bpe.32000").write_text(codes_for({word for line in LINES for word in line.split()}))
    names = {"arch": "transformer_wmt_en_de", "task": "translation", "source_lang": "en", "target_lang": "de"}

    def contents(kind: type[argparse.Namespace]) -> dict[str, Any]:
        args = argparse.Namespace(**library_options(fixture.config, kind), **names, lr=[7e-4])
        return {"args": args, "model": state}

    save_with_namespaces(path, contents)


def crybot(path: Path) -> None:
    torch.save(write_crybot(sample(LINFORMER, "crybot_*_encdec"), path.parent), path)


def official_linformer(path: Path) -> None:
    write_checkpoint(sample(LINFORMER, "official_roberta_*"), path)


def bert(path: Path) -> None:
    require_torchvision()  # transformers imports it, also where it was built for another torch
    from transformers import BertConfig, BertModel

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 6,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    BertModel(BertConfig(vocab_size=20, **sizes)).save_pretrained(path)


# ---------------------------------------------------------------------- data


def lines_of(path: Path) -> None:
    path.write_text("\n".join(LINES) + "\n")


def parallel_text(folder: Path) -> None:
    """Multi30k's files, with its names."""
    folder.mkdir()
    for split, count in {"train": 60, "val": 4, "test_2016_flickr": 4}.items():
        for language, words in {"en": "two dogs in the snow", "de": "zwei Hunde im Schnee"}.items():
            with gzip.open(folder / f"{split}.{language}.gz", "wt") as file:
                file.writelines(f"{words} {number}\n" for number in range(count))


def text_of_words(folder: Path) -> None:
    """WikiText's files."""
    folder.mkdir()
    for split in ("train", "valid", "test"):
        count = RARE_WORDS // 10 if split == "train" else 30
        with gzip.open(folder / f"{split}.txt.gz", "wt") as file:
            file.writelines(" ".join(f"word{10 * line + place}" for place in range(10)) + "\n" for line in range(count))


def novel(path: Path) -> None:
    path.write_text("".join(f"Sentence {number} of a long story, which goes on.\n" for number in range(200)))


def labelled(path: Path) -> None:
    path.write_text("".join(f"{'neg' if number % 2 else 'pos'}\ta film, {number} of 60\n" for number in range(60)))


def mosaics(folder: Path) -> None:
    """CIFAR-10's files, of 100 images each."""
    folder.mkdir()
    (folder / "classes.txt").write_text("\n".join(f"class{number}" for number in range(10)) + "\n")
    labels = np.arange(100, dtype=np.uint8) % 10
    pixels = np.kron(25 * labels.reshape(10, 10), np.ones((32, 32), np.uint8))
    for name in ("train_batch_1", "train_batch_2", "test"):
        labels.tofile(folder / f"{name}.labels.bin")
        Image.fromarray(pixels).convert("RGB").save(folder / f"{name}.webp", lossless=True)


# ---------------------------------------------------------------------- what is made of them

MADE: dict[str, Callable[[Path], object]] = {
    "crybot/checkpoint.pt": crybot,
    "data-bin/en_fr": binarised,
    "data-bin/new": write_binarised,
    "evit_tiny_p8/checkpoint.pth": library_vit,
    "linformer-roberta/checkpoint_best.pt": official_linformer,
    "newstest2014.tok.de": lines_of,
    "newstest2014.tok.en": lines_of,
    "novel.txt": novel,
    "path/of/subquad": lambda path: path.symlink_to(ROOT),
    "path/to/bert": bert,
    "reviews.tsv": labelled,
    "wiki.test.tokens": lines_of,
    "wikitext103-eva/checkpoint_last.pt": library_language_model,
    "wmt14-eva/checkpoint_best.pt": library_translator,
    "wmt16.en-de": archive,
}
"""By the name that a page has for it."""
READ: dict[str, tuple[str, Callable[[Path], object]]] = {
    "lightconv.glu.wmt17.zh-en": (f"{TORCH_HOME}/subquad/lightconv.glu.wmt17.zh-en", archive),
    "cifar10_": ("data/cifar10", mosaics),
    "multi30k_": ("data/multi30k", parallel_text),
    "wikitext2_": ("data/wikitext2", text_of_words),
}
"""By what reads it: its place, and what makes it."""
