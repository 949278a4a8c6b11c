"""Data sets of the hub through the real library, without a network: a local folder is a valid name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from subquad.cli.main import run as command
from subquad.data.images.sets import HubImages, ParquetImages, UnreadableImage, open_images
from subquad.data.text.prepare import TextDataConfig, prepare_text
from tests.data.test_sources import ENGLISH, GERMAN, read_pairs

datasets: Any = pytest.importorskip("datasets")
Image: Any = pytest.importorskip("PIL.Image")
PAIRS = list(zip(ENGLISH, GERMAN, strict=True))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library copies what it loads, into the user's home if nobody says otherwise."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()


def write_json(path: Path, pairs: list[tuple[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": 1, "translation": {"en": e, "de": d}}) + "\n" for e, d in pairs))


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    write_json(tmp_path / "pairs" / "train.jsonl", PAIRS)
    write_json(tmp_path / "pairs" / "test.jsonl", PAIRS[:1])
    return tmp_path / "pairs"


def hub(folder: Path, split: str = "train", **options: Any) -> dict[str, Any]:
    return {"files": [f"hub:{folder}"], "split": split, **options}


COLUMNS = ["translation.en", "translation.de"]


def test_translation(pairs: Path) -> None:
    assert list(read_pairs(hub(pairs, columns=COLUMNS))) == PAIRS
    assert list(read_pairs(hub(pairs, "test", columns=COLUMNS))) == PAIRS[:1]
    assert list(read_pairs(hub(pairs, "train[2:3]", columns=COLUMNS[::-1]))) == [PAIRS[2][::-1]]
    with pytest.raises(ValueError, match=r"sample 1: there is no column 'fr'\. It has en, de"):
        list(read_pairs(hub(pairs, columns=["translation.en", "translation.fr"])))


def test_parquet_with_configurations(tmp_path: Path) -> None:
    """A repository as the hub has them: its README says which files belong to which configuration and split."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    configs = []
    for name, texts in (("english", ENGLISH), ("german", GERMAN)):
        (tmp_path / "set" / name).mkdir(parents=True)
        parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "set" / name / "train.parquet")
        files = [{"split": "train", "path": f"{name}/train.parquet"}]
        configs.append({"config_name": name, "data_files": files})
    (tmp_path / "set" / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n")
    options = {"sample_kind": "text", "tokenizer": {"kind": "words"}}
    splits = {"train": hub(tmp_path / "set", subset="german", columns=["text"])}
    prepared = prepare_text(TextDataConfig.parse("data", {**options, "splits": splits}), tmp_path / "out")
    store, tokenizer = prepared.store("train", "text"), prepared.tokenizer("text")
    assert [tokenizer.decode(store[i]) for i in range(len(store))] == GERMAN


def test_a_changed_data_set_is_prepared_again(tmp_path: Path, pairs: Path) -> None:
    splits = {"train": hub(pairs, columns=COLUMNS), "test": hub(pairs, "test", columns=COLUMNS)}
    config = TextDataConfig.parse("data", {"splits": splits, "tokenizer": {"kind": "bytes"}})
    assert set(prepare_text(config, tmp_path / "out").changes.values()) == {"new"}
    assert set(prepare_text(config, tmp_path / "out").changes.values()) == {"reused"}
    write_json(pairs / "train.jsonl", [*PAIRS, ("bird", "Vogel")])
    assert prepare_text(config, tmp_path / "out").changes["train"] == "input changed"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "valid"}, r"cannot load its split valid: Unknown split .valid."),
        ({"subset": "fr"}, "cannot load its split train: .*'fr' not found"),
        ({"files": ["hub:./nowhere"]}, r"^hub:\./nowhere: the library datasets cannot load"),
    ],
)
def test_what_cannot_be_loaded_is_said(pairs: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        list(read_pairs({**hub(pairs), **options}))
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------- images


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """An image folder with the splits train and test: class numbers are the grey values, but for ten."""
    for split, count in (("train", 8), ("test", 2)):
        for number, name in enumerate(("cat", "dog")):
            (tmp_path / "images" / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = np.full((8, 8, 3), 100 * number + i, np.uint8)
                Image.fromarray(pixels).save(tmp_path / "images" / split / name / f"{i}.png")
    return tmp_path / "images"


def test_images(images: Path) -> None:
    found = open_images(f"hub:{images}@train")
    assert isinstance(found, HubImages)
    assert (len(found), found.classes) == (16, ["cat", "dog"])
    assert [(int(np.asarray(image)[0, 0, 0]), label) for image, label in found.take([0, 7, 8, 15])] == [
        (0, 0),
        (7, 0),
        (100, 1),
        (107, 1),
    ]
    (images / "train" / "cat" / "3.png").write_bytes(b"damaged")
    assert len(found.take(range(16))) == 15
    assert [Path(name).name for name in found.skipped] == ["3.png"]
    with pytest.raises(UnreadableImage, match=r"3\.png cannot be read"):
        open_images(f"hub:{images}@train")[3]
    with pytest.raises(ValueError, match=r"named with its split, such as .*@train"):
        open_images(f"hub:{images}")


def test_images_with_their_bytes_in_parquet(tmp_path: Path, images: Path) -> None:
    """What the library writes, for the hub and for others, is read by name and as files."""
    files = sorted((images / "test").rglob("*.png"))
    rows = {"image": [{"bytes": file.read_bytes(), "path": None} for file in files], "label": [0, 0, 1, 1]}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    folder = tmp_path / "set" / "data"
    folder.mkdir(parents=True)
    datasets.Dataset.from_dict(rows, features).to_parquet(folder / "test-00000-of-00001.parquet")
    named = open_images(f"hub:{tmp_path / 'set'}:default@test")
    unnamed = open_images(folder)
    assert isinstance(unnamed, ParquetImages)
    for found in (named, unnamed):
        assert found.classes == ["cat", "dog"]
        assert [int(np.asarray(image)[0, 0, 0]) for image, _ in found.take(range(4))] == [0, 1, 100, 101]


def test_training_on_images_of_the_hub(tmp_path: Path, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = {
        "task": "image-classification",
        "data": {"images": {"train": f"hub:{images}@train", "valid": f"hub:{images}@test"}, "augment": {"size": 8}},
        "model": {
            "preset": "vision_small",
            "patch_size": 4,
            "dim": 16,
            "encoder": {"layers": 1, "heads": 2, "ffn_dim": 16},
        },
        "schedule": {"kind": "constant", "lr": 1e-2},
        "train": {"updates": 2, "budget": {"max_sentences": 8}},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert command(["train", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "run")]) == 0
    assert "after 2 updates" in capsys.readouterr().out
