"""Image classification: from files to batches, mixed targets, and runs that resume bit by bit."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from subquad.cli.main import run
from subquad.data.images.arrays import ArrayImages
from subquad.data.images.inputs import Standardize
from subquad.data.images.mixup import MixingOptions
from subquad.data.images.transforms import AugmentOptions
from subquad.models import build_from_config, build_model
from subquad.tasks.image_classification import ImageClassificationTask, ImageData
from subquad.train.checkpoint import latest, load_checkpoint
from subquad.train.recipe import Recipe
from subquad.train.run import build_task

SMALL_AUGMENT = {"size": 8, "crop": "pad", "randaugment": None, "eval_crop": 1.0}
MODEL: dict[str, Any] = {
    "preset": "vision_small",
    "patch_size": 4,
    "dim": 16,
    "encoder": {"layers": 1, "heads": 2, "ffn_dim": 16, "dropout": 0.1},
}


def arrays(count: int, seed: int = 0, side: int = 8, channels: int = 3) -> dict[str, Any]:
    draws = np.random.default_rng(seed)
    labels = np.arange(count) % 4
    images = draws.integers(0, 200, (count, channels, side, side)) + 10 * labels[:, None, None, None]
    return {"images": images.astype(np.uint8), "labels": labels}


def image_set(count: int, **options: Any) -> ArrayImages:
    made = arrays(count, **options)
    return ArrayImages(made["images"], made["labels"], ["a", "b", "c", "d"], "made")


def recipe_data(data: dict[str, Any]) -> dict[str, Any]:
    return {
        "task": "image-classification",
        "data": data,
        "model": MODEL,
        "schedule": {"kind": "constant", "lr": 1e-3},
        "train": {"updates": 4, "budget": {"max_sentences": 8}, "validate_every": 2},
    }


def task_from(data: dict[str, Any], tmp_path: Path) -> ImageClassificationTask:
    task = build_task(Recipe.parse("recipe", recipe_data(data)), tmp_path)
    assert isinstance(task, ImageClassificationTask)
    return task


def test_plain_arrays_have_mean_0_and_deviation_1_without_vision_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchvision", "PIL", "PIL.Image"):
        monkeypatch.setitem(sys.modules, name, None)
    task = ImageClassificationTask({"train": image_set(40), "valid": image_set(8, seed=1)})
    images = task.model_inputs(task.samples("train", training=True).batch(np.arange(40)))["images"]
    torch.testing.assert_close(images.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(images.std((0, 2, 3)), torch.ones(3), atol=1e-3, rtol=0)
    # the other splits are measured by the training images
    valid = task.model_inputs(task.samples("valid", training=False).batch(np.arange(8)))["images"]
    pixels = torch.from_numpy(task.splits["valid"][3][0] / 255)
    assert isinstance(task.transform, Standardize)
    back = valid[3] * task.transform.std + task.transform.mean
    torch.testing.assert_close(back.double(), pixels, atol=1e-6, rtol=0)
    assert task.data_dependent_model_config() == {"num_classes": 4, "channels": 3, "image_size": 8}


def test_constant_channels_stay_finite() -> None:
    images = ArrayImages(np.full((4, 1, 8, 8), 7, np.uint8), np.arange(4), list("abcd"), "grey")
    task = ImageClassificationTask({"train": images})
    batch = task.model_inputs(task.samples("train", False).batch(np.arange(4)))
    assert torch.equal(batch["images"], torch.zeros(4, 1, 8, 8))


def test_evaluation_is_always_the_same_and_training_follows_its_seed() -> None:
    splits = {"train": image_set(16), "valid": image_set(8)}
    task = ImageClassificationTask(splits, augment=AugmentOptions(**SMALL_AUGMENT), mixing=MixingOptions())
    training, numbers = task.samples("train", training=True), np.arange(8)
    before = torch.get_rng_state()
    first, second = training.batch(numbers, 3), training.batch(numbers, 4)
    again = training.batch(numbers, 3)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["images"], second["images"])
    evaluation = task.samples("valid", training=False)
    shown, repeated = evaluation.batch(numbers), evaluation.batch(numbers)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(shown["images"], repeated["images"])
    assert "targets" not in shown


@pytest.mark.parametrize(("classes", "said"), [(5, {"top1"}), (6, {"top1", "top5"})])
def test_the_best_five_count_where_there_are_more(classes: int, said: set[str]) -> None:
    task = ImageClassificationTask({"train": image_set(8)})
    model = build_model("vision_small", patch_size=4, dim=16, channels=3, image_size=8, num_classes=classes)
    sums = task.loss(model, task.samples("train", training=True).batch(np.arange(8))).sums
    assert {name for name in sums if name.startswith("top")} == said


def test_mixed_targets_are_shares_that_the_loss_uses() -> None:
    task = ImageClassificationTask({"train": image_set(16)}, mixing=MixingOptions(smoothing=0.1))
    batch = task.samples("train", training=True).batch(np.arange(8))
    read = task.model_inputs(batch)
    torch.testing.assert_close(read["targets"].sum(1), torch.ones(8))
    assert torch.equal(read["labels"], read["targets"].argmax(1))
    logits = torch.randn(8, 4)
    found = task.loss(lambda _: (logits, None, None), batch)  # type: ignore[arg-type]
    expected = -(read["targets"] * logits.log_softmax(1)).sum()
    torch.testing.assert_close(found.total, expected)
    assert found.count == 8


def test_repeated_augmentation_shows_fewer_images_more_often() -> None:
    augment = AugmentOptions(**SMALL_AUGMENT, erase=0)
    task = ImageClassificationTask({"train": image_set(16)}, augment=augment, repeated=3)
    batch = task.samples("train", training=True).batch(np.array([5, 2, 8, 1, 3, 7]))
    assert batch["labels"].tolist() == [1, 1, 1, 2, 2, 2]
    assert not torch.equal(batch["images"][0], batch["images"][1])  # each with draws of its own
    assert task.samples("train", training=False).batch(np.array([5, 2, 8]))["labels"].tolist() == [1, 2, 0]


def test_files_are_joined_and_the_last_images_held_out(tmp_path: Path) -> None:
    for number in range(2):
        np.savez(tmp_path / f"{number}.npz", **arrays(20, seed=number))
    np.savez(tmp_path / "test.npz", **arrays(8, seed=5))
    files = [str(tmp_path / f"{number}.npz") for number in range(2)]
    task = task_from({"images": {"train": files, "test": str(tmp_path / "test.npz")}, "hold_out": 6}, tmp_path)
    assert {name: len(images) for name, images in task.splits.items()} == {"train": 34, "valid": 6, "test": 8}
    later = arrays(20, seed=1)
    for index in range(6):
        assert np.array_equal(task.splits["valid"][index][0], later["images"][14 + index])
    assert np.array_equal(task.splits["train"][33][0], later["images"][13])


def write_folders(root: Path, count: int, side: int = 12) -> None:
    image_module = pytest.importorskip("PIL.Image")
    draws = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (root / name).mkdir(parents=True)
        for number in range(count):
            pixels = draws.integers(0, 255, (side, side + number % 3, 3)).astype(np.uint8)
            image_module.fromarray(pixels).save(root / name / f"{number}.png")


def test_class_folders_hold_out_images_of_every_class_and_report_what_cannot_be_read(tmp_path: Path) -> None:
    write_folders(tmp_path / "train", 6)
    (tmp_path / "train" / "cat" / "1.png").write_bytes(b"no image")
    task = task_from({"images": {"train": str(tmp_path / "train")}, "hold_out": 4, "augment": SMALL_AUGMENT}, tmp_path)
    assert [label for _, label in task.splits["valid"].take(range(4))] == [0, 0, 1, 1]
    samples = task.samples("train", training=True)
    assert "unreadable" not in task.metrics({"nll": 1.0}, 1)
    with pytest.warns(UserWarning, match=r"left out: .*1\.png"):
        batch = samples.batch(np.arange(8))
    assert batch["images"].shape == (7, 3, 8, 8)
    assert len(batch["labels"]) == 7
    assert task.metrics({"nll": 1.0}, 1)["unreadable"] == 1
    nothing = samples.batch(np.array([0])[:0])
    assert nothing["images"].shape == (0, 3, 8, 8)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"images": {"train": "t"}}, "need a split `valid`, or hold_out"),
        ({"images": {"train": "t", "valid": "v"}, "hold_out": 5}, "has one already"),
        ({"images": {"valid": "v"}}, "need a split `train`"),
        ({"images": {"train": "t", "valid": "v"}, "embedded": "digits"}, "give one of embedded and images"),
        ({"images": {"train": "t", "valid": "v"}, "max_length": 5}, "data.max_length has no meaning for task image"),
        ({"images": {"train": "t", "valid": "v"}, "augment": {"sise": 5}}, "did you mean 'size'"),
        ({"images": {"train": "missing", "valid": "v"}}, "missing does not exist"),
    ],
)
def test_mistakes_are_one_clear_line(data: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        task_from(data, tmp_path)
    assert "\n" not in str(caught.value)


def test_images_that_need_a_size_say_so(tmp_path: Path) -> None:
    write_folders(tmp_path / "train", 3)
    with pytest.raises(ValueError, match=r"give data\.augment"):
        task_from({"images": {"train": str(tmp_path / "train")}, "hold_out": 2}, tmp_path)
    wide = ArrayImages(np.zeros((4, 1, 8, 6), np.uint8), np.arange(4), list("abcd"), "wide")
    with pytest.raises(ValueError, match="not square"):
        ImageClassificationTask({"train": wide}).data_dependent_model_config()
    np.savez(tmp_path / "made.npz", **arrays(4))
    with pytest.raises(ValueError, match="there are only 4 training images"):
        task_from({"images": {"train": str(tmp_path / "made.npz")}, "hold_out": 4}, tmp_path)


def test_mixing_does_not_smooth_twice() -> None:
    data = recipe_data({"embedded": "digits", "mixing": {}})
    with pytest.raises(ValueError, match=r"leave train\.smoothing out"):
        Recipe.parse("recipe", data | {"train": {"updates": 1, "smoothing": 0.1}})


def test_a_run_that_goes_on_is_the_uninterrupted_one(tmp_path: Path) -> None:
    np.savez(tmp_path / "train.npz", **arrays(36))
    images = {"train": str(tmp_path / "train.npz")}
    data = {"images": images, "hold_out": 4, "augment": SMALL_AUGMENT, "mixing": {}, "repeated": 2}
    recipe = tmp_path / "made.yaml"
    recipe.write_text(yaml.safe_dump(recipe_data(data)))
    assert run(["train", str(recipe), "--out", str(tmp_path / "whole"), "train.updates=6"]) == 0
    for updates in (2, 6):
        assert run(["train", str(recipe), "--out", str(tmp_path / "parts"), f"train.updates={updates}"]) == 0
    weights = []
    for name in ("whole", "parts"):
        path = latest(tmp_path / name / "checkpoints")
        assert path is not None
        weights.append(load_checkpoint(path).model)
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


@pytest.mark.parametrize("size", [8, 16])
def test_the_size_of_digits_is_known_before_they_are_read(size: int) -> None:
    """Plans and advice would count with the preset's images otherwise, which are larger."""
    data = Recipe.parse("recipe", recipe_data({"embedded": "digits", "options": {"size": size}})).data
    assert isinstance(data, ImageData)
    assert ImageClassificationTask.expected_model_config(data) == {"image_size": size, "channels": 1}


@pytest.mark.parametrize("size", [16, 32])
def test_enlarged_digits_are_read_pixel_by_pixel(size: int, tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="the embedded digits need the demo extra")
    given = recipe_data({"embedded": "digits", "options": {"size": size}})
    given["model"] = {**MODEL, "patch_size": 1, "encoder": {**MODEL["encoder"], "mixer": "lightconv"}}
    given["train"] = {"updates": 1, "budget": {"max_sentences": 4}}
    task = build_task(Recipe.parse("recipe", given), tmp_path)
    model = build_from_config(Recipe.parse("recipe", given).model_data(task.data_dependent_model_config()))
    assert model.native_length == size**2
    batch = task.samples("train", training=True).batch(np.arange(4))
    loss = task.loss(model, batch)
    loss.total.backward()
    assert loss.count == 4
    if size == 16:
        (tmp_path / "pixels.yaml").write_text(yaml.safe_dump(given))
        assert run(["train", str(tmp_path / "pixels.yaml"), "--out", str(tmp_path / "run")]) == 0
        assert run(["evaluate", str(tmp_path / "run"), "--resamples", "10"]) == 0


@pytest.mark.nightly
def test_pixels_are_compared_at_the_length_of_the_image(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="the embedded digits need the demo extra")
    given = recipe_data({"embedded": "digits", "options": {"size": 16}})
    given["model"] = {**MODEL, "patch_size": 1}
    (tmp_path / "pixels.yaml").write_text(yaml.safe_dump(given))
    words = ["--mixers", "softmax,lightconv", "--seeds", "1", "--lengths", "64", "--rounds", "2"]
    assert run(["compare", str(tmp_path / "pixels.yaml"), *words, "--out", str(tmp_path / "compared")]) == 0
    result = json.loads((tmp_path / "compared" / "result.json").read_text())
    assert result["task_lengths"] == [256]
    assert {point["length"] for point in result["measurements"]["lengths"]} == {64, 256}
