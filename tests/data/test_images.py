"""Labelled images from files, and what is done to them in training."""

import gzip
import struct

import numpy as np
import pytest
import torch

from subquad.data.images.inputs import Augmented, erase_boxes, stack_erasures
from subquad.data.images.mixup import MixingOptions, draw_mixing, mix_images, mix_targets, soft_targets
from subquad.data.images.randaugment import OPERATIONS, RandAugment, Random
from subquad.data.images.sets import ArrayImages, FolderImages, UnreadableImage, decode_image, open_images
from subquad.data.images.transforms import AugmentOptions, EvalTransform, TrainTransform, crop_box, draw_erasure

Image = pytest.importorskip("PIL.Image")
RNG = np.random.default_rng(0)


def picture(height=20, width=30):
    return Image.fromarray(RNG.integers(0, 255, (height, width, 3), np.uint8))


@pytest.fixture
def folder(tmp_path):
    """Two classes with three images each."""
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(3):
            picture().save(tmp_path / name / f"{number}.png")
    return tmp_path


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_class_folders(folder):
    images = open_images(folder)
    assert (len(images), images.classes) == (6, ["cat", "dog"])
    assert [images[i][1] for i in range(6)] == [0, 0, 0, 1, 1, 1]
    assert images[0][0].size == (30, 20)
    assert open_images(folder, classes=["dog", "cat"])[0][1] == 0


def test_unreadable_images_are_skipped_or_raised(folder):
    whole = (folder / "cat" / "0.png").read_bytes()
    (folder / "cat" / "0.png").write_bytes(whole[: len(whole) // 2])
    (folder / "dog" / "1.png").write_bytes(b"no image at all")
    (folder / "dog" / "notes.txt").write_text("ignored")
    images = open_images(folder)
    taken = images.take(range(6))
    assert len(taken) == 4
    assert sorted(images.skipped) == [str(folder / "cat" / "0.png"), str(folder / "dog" / "1.png")]
    assert isinstance(images, FolderImages)
    assert images.ignored == 1
    with pytest.raises(UnreadableImage, match=r"0\.png cannot be read"):
        open_images(folder)[0]


def test_missing_classes_are_said(folder):
    (folder / "owl").mkdir()
    with pytest.raises(ValueError, match="no image of 1 of the 3 classes: owl"):
        open_images(folder)
    with pytest.raises(ValueError, match="none of the classes: owl"):
        open_images(folder, classes=["cat", "dog"])
    with pytest.raises(ValueError, match="no folder for 1 of the classes: bird"):
        open_images(folder, classes=["bird", "cat", "dog", "owl"])
    with pytest.raises(ValueError, match="no class folders"):
        open_images(folder / "owl")
    with pytest.raises(ValueError, match="does not exist"):
        open_images(folder / "nothing")


def test_large_images_and_strange_formats_are_refused(tmp_path):
    picture(100, 100).save(tmp_path / "big.png")
    with pytest.raises(UnreadableImage, match="100×100 pixels are more than 5000"):
        decode_image(tmp_path / "big.png", "big.png", max_pixels=5000)
    (tmp_path / "fake.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n")
    with pytest.raises(UnreadableImage, match="cannot be read"):
        decode_image(tmp_path / "fake.png", "fake.png")


def test_arrays(tmp_path):
    pixels, labels = RNG.integers(0, 255, (6, 8, 8, 3), np.uint8), np.array([0, 1, 2, 0, 1, 2])
    np.savez(tmp_path / "a.npz", images=pixels, labels=labels, classes=np.array(["x", "y", "z"]))
    images = open_images(tmp_path / "a.npz")
    assert (len(images), images.classes) == (6, ["x", "y", "z"])
    assert np.array_equal(images[4][0], pixels[4].transpose(2, 0, 1))
    np.save(tmp_path / "b.npy", pixels[..., 0])
    with pytest.raises(ValueError, match="has no labels"):
        open_images(tmp_path / "b.npy")
    np.save(tmp_path / "b.labels.npy", labels)
    images = open_images(tmp_path / "b.npy")
    assert images[1][0].shape == (1, 8, 8)
    assert isinstance(images, ArrayImages)
    np.savez(tmp_path / "g.npz", images=pixels[:, :, :4], labels=labels)
    assert open_images(tmp_path / "g.npz")[0][0].shape == (3, 8, 4)
    np.savez(tmp_path / "h.npz", images=pixels[:, :3], labels=labels)
    with pytest.raises(ValueError, match="which number counts the channels"):
        open_images(tmp_path / "h.npz")
    (tmp_path / "c.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:300])
    with pytest.raises(ValueError, match="cannot be read as npz"):
        open_images(tmp_path / "c.npz")
    np.savez(tmp_path / "d.npz", images=pixels)
    with pytest.raises(ValueError, match="needs one of"):
        open_images(tmp_path / "d.npz")
    np.savez(tmp_path / "e.npz", images=pixels, labels=labels, classes=np.array(["x", "y"]))
    with pytest.raises(ValueError, match="outside the 2 classes"):
        open_images(tmp_path / "e.npz")
    np.savez(tmp_path / "f.npz", images=pixels, labels=labels[:5])
    with pytest.raises(ValueError, match="6 images, but labels"):
        open_images(tmp_path / "f.npz")


def test_objects_in_arrays_are_not_unpickled(tmp_path):
    np.savez(tmp_path / "a.npz", images=np.array([{}], object), labels=np.zeros(1, int))
    with pytest.raises(ValueError, match="cannot be read as npz"):
        open_images(tmp_path / "a.npz")


def test_idx_and_mosaics(tmp_path):
    pixels, labels = RNG.integers(0, 255, (6, 4, 4), np.uint8), np.array([0, 1, 0, 1, 0, 1], np.uint8)
    packed = struct.pack(">HBBIII", 0, 8, 3, 6, 4, 4) + pixels.tobytes()
    (tmp_path / "t-images-idx3-ubyte.gz").write_bytes(gzip.compress(packed))
    (tmp_path / "t-labels-idx1-ubyte.gz").write_bytes(
        gzip.compress(struct.pack(">HBBI", 0, 8, 1, 6) + labels.tobytes())
    )
    images = open_images(tmp_path / "t-images-idx3-ubyte.gz")
    assert np.array_equal(images[5][0], pixels[5][None])
    (tmp_path / "t-images-idx3-ubyte.gz").write_bytes(gzip.compress(packed)[:40])
    with pytest.raises(ValueError, match="cannot be read as idx"):
        open_images(tmp_path / "t-images-idx3-ubyte.gz")
    tiles = RNG.integers(0, 255, (6, 4, 4, 3), np.uint8)
    Image.fromarray(tiles.reshape(2, 3, 4, 4, 3).transpose(0, 2, 1, 3, 4).reshape(8, 12, 3)).save(tmp_path / "m.png")
    labels.tofile(tmp_path / "m.labels.bin")
    (tmp_path / "classes.txt").write_text("even\nodd\n")
    images = open_images(tmp_path / "m.png")
    assert (len(images), images.classes) == (6, ["even", "odd"])
    for number in range(6):
        assert np.array_equal(images[number][0], tiles[number].transpose(2, 0, 1))
    labels[:5].tofile(tmp_path / "m.labels.bin")
    with pytest.raises(ValueError, match="does not divide into 5"):
        open_images(tmp_path / "m.png")


def test_parquet(folder):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    content = [path.read_bytes() for path in sorted(folder.rglob("*.png"))]
    content[2] = content[2][:50]
    table = pyarrow.table({"image": [{"bytes": part, "path": None} for part in content], "label": [0, 0, 0, 1, 1, 1]})
    table = table.replace_schema_metadata({"huggingface": '{"info": {"features": {"label": {"names": ["a", "b"]}}}}'})
    parquet.write_table(table, folder / "train.parquet")
    for path in (folder / "train.parquet", folder):
        images = open_images(path)
        assert (len(images), images.classes) == (6, ["a", "b"])
        assert len(images.take(range(6))) == 5
        assert list(images.skipped) == [f"{folder / 'train.parquet'} row 2"]


def mix_batch(images, labels, num_classes, options, generator):
    """Mixed images and targets, as the image task makes them."""
    drawn = draw_mixing(images.shape[-2:], options, generator)
    targets = soft_targets(labels, num_classes, options.smoothing)
    return mix_images(images, drawn), mix_targets(targets, drawn)


def test_mixup_shares_images_and_targets():
    images, labels = torch.rand(5, 3, 8, 8), torch.tensor([0, 1, 2, 3, 0])
    options = MixingOptions(cutmix=0, smoothing=0)
    mixed, targets = mix_batch(images, labels, 4, options, generator())
    share = targets[1, 1].item()
    assert 0 < share < 1
    torch.testing.assert_close(mixed, share * images + (1 - share) * images.flip(0))
    torch.testing.assert_close(targets.sum(1), torch.ones(5))
    assert targets[1, 3].item() == pytest.approx(1 - share)
    again = mix_batch(images, labels, 4, options, generator())
    assert again[0].equal(mixed)


def test_cutmix_shares_by_area():
    images, labels = torch.stack([torch.zeros(3, 16, 16), torch.ones(3, 16, 16)]), torch.tensor([0, 1])
    for seed in range(20):
        mixed, targets = mix_batch(images, labels, 2, MixingOptions(mixup=0, smoothing=0), generator(seed))
        assert mixed[0].mean().item() == pytest.approx(targets[0, 1].item(), abs=1e-6)
    assert images[0].max() == 0, "the inputs are left alone"


def test_mixing_can_be_off():
    images, labels = torch.rand(2, 3, 4, 4), torch.tensor([0, 1])
    for options in (MixingOptions(mixup=0, cutmix=0), MixingOptions(probability=0)):
        mixed, targets = mix_batch(images, labels, 4, options, generator())
        assert mixed.equal(images)
        torch.testing.assert_close(targets, soft_targets(labels, 4, 0.1))
    torch.testing.assert_close(soft_targets(labels, 4, 0.1)[0], torch.tensor([0.925, 0.025, 0.025, 0.025]))


def test_training_transforms_follow_the_generator():
    transform = TrainTransform(AugmentOptions(size=16, jitter=0.3, erase=0.5))
    image, state = picture(), torch.random.get_rng_state()
    seen = [transform(image, generator(seed)) for seed in range(30)]
    assert all(pixels.shape == (3, 16, 16) and pixels.dtype == np.uint8 for pixels, _ in seen)
    assert len({pixels.tobytes() for pixels, _ in seen}) == 30
    assert 5 < sum(erasure is not None for _, erasure in seen) < 25
    for seed, (pixels, erasure) in enumerate(seen):
        again, erased_again = transform(image, generator(seed))
        assert np.array_equal(again, pixels)
        assert (erasure is None) == (erased_again is None)
        if erasure is not None and erased_again is not None:
            assert erasure.box == erased_again.box
            assert erasure.noise.equal(erased_again.noise)
    assert torch.random.get_rng_state().equal(state), "torch's own generator is left alone"


def test_evaluation_shows_the_centre():
    pixels = np.zeros((256, 300, 3), np.uint8)
    pixels[100:156, 120:180] = 255
    shown = EvalTransform(AugmentOptions())(Image.fromarray(pixels))
    assert shown.shape == (3, 224, 224)
    assert shown.sum() == 255 * 3 * 56 * 60
    part = pixels[96:104, 116:124].transpose(2, 0, 1)
    assert np.array_equal(EvalTransform(AugmentOptions(size=8, eval_crop=1.0))(part), part)
    assert EvalTransform(AugmentOptions(size=64))(picture(20, 37)).shape == (3, 64, 64)


def test_pixels_are_normalised_by_channel():
    """Bytes as parts of 255, and numbers as they are."""
    transform = Augmented(AugmentOptions(size=4, mean=(0.25, 0.5), std=(0.5, 2.0)))
    pixels = torch.arange(32, dtype=torch.uint8).view(2, 4, 4)
    expected = torch.stack([(pixels[0] / 255 - 0.25) / 0.5, (pixels[1] / 255 - 0.5) / 2])
    assert transform.normalise(pixels).equal(expected)
    assert transform.normalise(pixels[None].float() / 255)[0].equal(expected)
    assert pixels.equal(torch.arange(32, dtype=torch.uint8).view(2, 4, 4)), "the batch is left alone"


def test_small_and_float_images():
    options = {"size": 8, "crop": "pad", "mean": (0.3,), "std": (0.4,)}
    digit = RNG.random((1, 8, 8), np.float32)
    transform = TrainTransform(AugmentOptions(**options, randaugment=None, erase=0))
    pixels, erasure = transform(digit, generator())
    assert (pixels.shape, pixels.dtype, erasure) == ((1, 8, 8), np.float32, None)
    with pytest.raises(ValueError, match="need 8-bit images"):
        TrainTransform(AugmentOptions(**options))(digit, generator())
    byte, _ = TrainTransform(AugmentOptions(**options))((255 * digit).astype(np.uint8), generator())
    assert (byte.shape, byte.dtype) == ((1, 8, 8), np.uint8)
    with pytest.raises(ValueError, match="1 channels, but mean and std are for 3"):
        TrainTransform(AugmentOptions(size=8, crop="none", randaugment=None))(digit, generator())


def test_every_operation_of_randaugment_changes_the_image():
    image = Image.fromarray(RNG.integers(60, 180, (24, 24, 3), np.uint8))
    for name, operation in OPERATIONS.items():
        changed = operation(image, 0.9, Random(generator(1)), [124, 116, 104])
        assert changed.size == image.size, name
        assert np.asarray(changed).tolist() != np.asarray(image).tolist(), name
    assert RandAugment.parse("rand-m9-mstd0.5-inc1") == RandAugment(9.0, 0.5, 2)
    for wrong in ("rand-m9", "rand-m11-inc1", "augmix-m3", "rand-m9-q2-inc1"):
        with pytest.raises(ValueError, match=r"write it like rand-m9-mstd0\.5-inc1"):
            RandAugment.parse(wrong)


def test_crops_stay_inside():
    chance = Random(generator())
    for height, width in ((20, 30), (1, 50), (50, 1), (3, 3)):
        for _ in range(50):
            top, left, high, wide = crop_box((height, width), (0.08, 1.0), (3 / 4, 4 / 3), chance)
            assert 0 <= top <= top + high <= height
            assert 0 <= left <= left + wide <= width
            assert high * wide > 0


def test_boxes_of_a_batch_become_noise():
    """Each image its own box and noise, the others untouched; the reference writes them one by one."""
    erasures = [draw_erasure((3, 32, 24), generator(seed)) if seed % 3 else None for seed in range(20)]
    images = torch.randn(20, 3, 32, 24, generator=generator())
    expected = images.clone()
    for image, erasure in zip(expected, erasures, strict=True):
        if erasure is not None:
            top, bottom, left, right = erasure.box
            assert 0 <= top < bottom <= 32
            assert 0 <= left < right <= 24
            assert 0.01 < (bottom - top) * (right - left) / (32 * 24) < 0.4
            image[:, top:bottom, left:right] = erasure.noise
    assert erase_boxes(images.clone(), stack_erasures(erasures)).equal(expected)
    assert erase_boxes(images, stack_erasures([None] * 20)) is images
