"""RandAugment and mixup against those of timm, with the same strengths, signs and shares."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from subquad.data.images import mixup
from subquad.data.images.mixup import MixingOptions
from subquad.data.images.randaugment import MAX_STRENGTH, OPERATIONS, RandAugment, Random
from subquad.packages import require_torchvision
from tests.data.test_images import mix_batch

Image: Any = pytest.importorskip("PIL.Image")
require_torchvision()  # timm imports it, also where it was built for another torch
auto_augment: Any = pytest.importorskip("timm.data.auto_augment")
timm_mixup: Any = pytest.importorskip("timm.data.mixup")

FILL = [124.0, 116.0, 104.0]
SIDE = 40
WHOLE_PIXELS = 0.45 * SIDE
"""Ours moves images by whole pixels, and timm by parts of them: at these strengths both are the same."""
STRENGTHS = {
    name: [k / WHOLE_PIXELS for k in (0, 1, 9, 18)] if "translate" in name else [0.0, 0.1, 0.37, 0.9, 0.99]
    for name in OPERATIONS
}
THEIRS = dict(zip(OPERATIONS, auto_augment._RAND_INCREASING_TRANSFORMS, strict=True))


class Signed(Random):
    """Draws the given sign always."""

    def __init__(self, sign: int) -> None:
        super().__init__(torch.Generator())
        self.sign = sign

    def random_sign(self, value: float) -> float:
        return self.sign * value


def picture() -> Any:
    y, x = np.mgrid[0:SIDE, 0:SIDE]
    waves = [127 + 120 * np.sin(x / 9 + y / 13), 127 + 120 * np.cos(x / 7 - y / 11), (x * 3 + y * 2) % 256]
    return Image.fromarray(np.stack(waves, -1).clip(0, 255).astype(np.uint8))


def timm_operation(name: str, strength: float, sign: int, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    monkeypatch.setattr(auto_augment, "_randomly_negate", lambda value: sign * value)
    to_arguments = auto_augment.LEVEL_TO_ARG[THEIRS[name]]
    arguments = to_arguments(strength * MAX_STRENGTH, {}) if to_arguments is not None else ()
    apply = auto_augment.NAME_TO_OP[THEIRS[name]]
    return np.asarray(apply(picture(), *arguments, resample=Image.BICUBIC, fillcolor=tuple(map(int, FILL))))


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_gives_the_pixels_of_timm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sign is drawn at random, so it may stand for the other direction."""
    for strength in STRENGTHS[name]:
        ours = {sign: np.asarray(OPERATIONS[name](picture(), strength, Signed(sign), FILL)) for sign in (1, -1)}
        theirs = {sign: timm_operation(name, strength, sign, monkeypatch) for sign in (1, -1)}
        same = all(np.array_equal(ours[sign], theirs[sign]) for sign in (1, -1))
        opposite = all(np.array_equal(ours[sign], theirs[-sign]) for sign in (1, -1))
        assert same or opposite, f"{name} at {strength:g}"


def test_the_notation_means_what_it_means_to_timm() -> None:
    ours = RandAugment.parse("rand-m9-mstd0.5-inc1")
    theirs = auto_augment.rand_augment_transform("rand-m9-mstd0.5-inc1", {})
    assert theirs.num_layers == ours.operations
    assert [operation.name for operation in theirs.ops] == list(THEIRS.values())
    assert {operation.magnitude for operation in theirs.ops} == {ours.magnitude}
    assert {operation.magnitude_std for operation in theirs.ops} == {ours.deviation}
    assert {operation.prob for operation in theirs.ops} == {0.5}


def test_operations_are_chosen_as_often_as_by_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the 15 with probability 1/15, and applied with probability 1/2: two draws of 3000 images."""
    counts: dict[str, int] = dict.fromkeys(OPERATIONS, 0)

    def counting(name: str) -> Any:
        def apply(image: Any, strength: float, rng: Random, fill: list[float]) -> Any:
            counts[name] += 1
            return image

        return apply

    for name in OPERATIONS:
        monkeypatch.setitem(OPERATIONS, name, counting(name))
    augment, rng = RandAugment.parse("rand-m9-mstd0.5-inc1"), Random(torch.Generator().manual_seed(0))
    for _ in range(3000):
        augment(None, rng, FILL)
    random.seed(0)
    np.random.seed(0)
    theirs = auto_augment.rand_augment_transform("rand-m9-mstd0.5-inc1", {})
    applied = 0
    for operation in theirs.ops:
        monkeypatch.setattr(operation, "aug_fn", lambda image, *_, **__: image + 1)
        monkeypatch.setattr(operation, "level_fn", None)
    for _ in range(3000):
        applied += theirs(0)
    deviation = (6000 / 30 * (1 - 1 / 30)) ** 0.5
    assert all(abs(count - 200) < 5 * deviation for count in counts.values()), counts
    assert abs(applied - sum(counts.values())) < 5 * (2 * 6000 / 4) ** 0.5


# ---------------------------------------------------------------------- mixup and cutmix


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(6, 3, 10, 14, generator=draw), torch.randint(5, (6,), generator=draw)


def timm_batch(
    options: MixingOptions, seed: int, batch: tuple[torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """timm's mixed images and targets with the share and the centre that our seed draws, and timm's box."""
    images, labels = batch
    generator = torch.Generator().manual_seed(seed)
    choice = mixup._choose(options, generator)
    assert choice is not None
    use_cutmix, share = choice
    centre = [int(torch.randint(side, (), generator=generator)) for side in images.shape[-2:]]
    theirs = timm_mixup.Mixup(options.mixup, options.cutmix, label_smoothing=options.smoothing, num_classes=5)
    with monkeypatch.context() as patch:
        draws: Iterator[int] = iter([*centre, *centre])
        patch.setattr(np.random, "randint", lambda *_, **__: next(draws))
        patch.setattr(theirs, "_params_per_batch", lambda: (share, use_cutmix))
        box = tuple(int(edge) for edge in timm_mixup.rand_bbox(images.shape, share))
        mixed, targets = theirs(images.clone(), labels)
    return mixed, targets, box


def test_mixup_is_that_of_timm(batch: tuple[torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    options = MixingOptions(cutmix=0.0)
    for seed in range(20):
        mixed, targets = mix_batch(*batch, 5, options, torch.Generator().manual_seed(seed))
        expected, expected_targets, _ = timm_batch(options, seed, batch, monkeypatch)
        torch.testing.assert_close(mixed, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(targets, expected_targets, rtol=1e-6, atol=1e-6)


def test_cutmix_is_that_of_timm(batch: tuple[torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Boxes with even sides are the same. Those with odd sides are one row or column smaller than timm's."""
    options, equal = MixingOptions(mixup=0.0), 0
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        choice = mixup._choose(options, generator)
        assert choice is not None
        top, bottom, left, right = mixup._random_box(batch[0].shape[-2:], choice[1], generator)
        expected, expected_targets, box = timm_batch(options, seed, batch, monkeypatch)
        assert (top, left) == (box[0], box[2])
        assert 0 <= box[1] - bottom <= 1
        assert 0 <= box[3] - right <= 1
        if (top, bottom, left, right) == box:
            equal += 1
            mixed, targets = mix_batch(*batch, 5, options, torch.Generator().manual_seed(seed))
            torch.testing.assert_close(mixed, expected, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(targets, expected_targets, rtol=1e-6, atol=1e-6)
    assert equal > 10


def test_shares_are_drawn_as_by_timm() -> None:
    """Mean and deviation of the shares, and how often CutMix is chosen, of 4000 draws each."""
    options = MixingOptions()
    generator = torch.Generator().manual_seed(0)
    ours = [choice for _ in range(4000) if (choice := mixup._choose(options, generator)) is not None]
    np.random.seed(0)
    theirs_mixup = timm_mixup.Mixup(options.mixup, options.cutmix, prob=options.probability, switch_prob=options.switch)
    theirs = [theirs_mixup._params_per_batch() for _ in range(4000)]
    for cut in (True, False):
        own = np.array([share for use, share in ours if use == cut])
        other = np.array([share for share, use in theirs if use == cut])
        assert abs(len(own) - len(other)) < 5 * (2 * 4000 / 4) ** 0.5
        assert abs(own.mean() - other.mean()) < 5 * own.std() * (2 / len(own)) ** 0.5
        assert abs(own.std() - other.std()) < 0.02
