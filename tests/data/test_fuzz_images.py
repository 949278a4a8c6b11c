"""Images that nobody meant: damaged, of every kind and size, and files that promise more than memory."""

import gzip
import io
import struct
import zipfile
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from subquad.cli.main import run as command
from subquad.data import numpy_files as packed
from subquad.data.images.sets import UnreadableImage, decode_image, open_images
from subquad.data.images.transforms import AugmentOptions, EvalTransform, TrainTransform
from tests.cli.test_bad_input import classification
from tests.fuzzing import called, fuzzed, kept_promise

Image: Any = pytest.importorskip("PIL.Image")

FORMATS = ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM"]
MODES = {"PNG": ["1", "P", "RGBA", "I;16", "LA"], "JPEG": ["L", "RGB", "CMYK"], "TIFF": ["CMYK", "F"]}
OPTIONS = AugmentOptions(size=8, randaugment=None)


def picture(form: str, mode: str = "RGB", size: tuple[int, int] = (9, 7)) -> bytes:
    content = io.BytesIO()
    Image.new(mode, size, 1).save(content, form)
    return content.getvalue()


@fuzzed(60)
@given(
    form=st.sampled_from(FORMATS),
    begin=st.integers(0, 120),
    length=st.integers(0, 200),
    new=st.binary(max_size=8) | st.just(b"\xff" * 8),
)
def test_damaged_images(form: str, begin: int, length: int, new: bytes) -> None:
    """They are decoded to what they say they are, or are unreadable; no decoder's own error comes through."""
    whole = picture(form)
    content = whole[:begin] + new + whole[begin + length :]
    image = kept_promise(lambda: decode_image(content, "image"))
    if image is not None:
        assert image.mode == "RGB"


@pytest.mark.parametrize("form", FORMATS)
def test_every_mode_and_size_becomes_an_input(form: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for mode in MODES.get(form, ["RGB"]):
        for size in ((1, 1), (1, 300), (1000, 1)):
            image = decode_image(picture(form, mode, size), "image")
            assert image.mode == "RGB"
            for found in (EvalTransform(OPTIONS)(image), TrainTransform(OPTIONS)(image, generator)[0]):
                assert found.shape == (3, 8, 8)
                assert found.dtype == np.uint8


def png_header(width: int, height: int) -> bytes:
    """A PNG that says it is large, and has no more than that."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    whole = struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head))
    data = b"IDAT" + zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + whole + struct.pack(">I", len(data) - 4) + data + struct.pack(">I", zlib.crc32(data))


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(("width", "height"), [(2**31 - 1, 2**31 - 1), (60_000, 60_000), (10_000, 9_000), (0, 5)])
def test_absurd_headers_are_refused(width: int, height: int) -> None:
    with pytest.raises(UnreadableImage, match="image"):
        decode_image(png_header(width, height), "image")


@fuzzed(40)
@given(data=st.data())
def test_arrays_of_any_kind(tmp_path: Path, data: st.DataObject) -> None:
    """As training data: every array and label of numpy is read or refused."""
    kinds = st.sampled_from(["u1", "i8", "f4", "f2", ">f4", "?", "c8", "U3", "M8[s]", "O", "f16", "u8", "V4"])
    shape = data.draw(st.lists(st.integers(0, 4), max_size=5))
    images = np.zeros(shape, data.draw(kinds))
    labels = np.arange(data.draw(st.integers(0, 5))).astype(data.draw(kinds))
    if labels.dtype.kind in "iu" and labels.size and data.draw(st.booleans()):
        labels[-1] = data.draw(st.sampled_from([0, 100, 255]))
    np.savez(tmp_path / "x.npz", images=images, labels=labels)
    np.save(tmp_path / "x.npy", images)
    np.save(tmp_path / "x.labels.npy", labels)
    for name in ("x.npz", "x.npy"):
        found = kept_promise(partial(open_images, tmp_path / name))
        if found is not None:
            assert found.take([0])[0][0].ndim == 3


@fuzzed(60)
@given(
    name=st.sampled_from(["x.npz", "x.npy"]),
    begin=st.integers(0, 600),
    length=st.integers(0, 40),
    new=st.binary(max_size=12) | st.sampled_from([b"(9999999999999, ", b"\xff" * 8, b"((((((((((", b"|O"]),
)
def test_damaged_arrays(tmp_path: Path, name: str, begin: int, length: int, new: bytes) -> None:
    np.savez(tmp_path / "x.npz", images=np.zeros((2, 4, 4), np.uint8), labels=np.array([0, 1]))
    np.save(tmp_path / "x.npy", np.zeros((2, 4, 4), np.uint8))
    np.save(tmp_path / "x.labels.npy", np.array([0, 1]))
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[:begin] + new + content[begin + length :])
    kept_promise(lambda: open_images(tmp_path / name))


def npy_of_zeros(count: int) -> bytes:
    content = io.BytesIO()
    np.save(content, np.zeros(count, np.uint8))
    return content.getvalue()


def test_bombs_of_arrays_are_refused(tmp_path: Path, monkeypatch) -> None:
    """A header, a zip file or a gzip file that promises far more than the file holds; nothing of it is unpacked."""
    monkeypatch.setattr(packed, "ALWAYS_ALLOWED", 1 << 16)
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as bomb:
        for name in ("images", "labels"):
            bomb.writestr(f"{name}.npy", npy_of_zeros(1 << 20))
    with pytest.raises(ValueError, match=r"x\.npz cannot be read as npz: its [\d,]+ bytes would become 2,097"):
        open_images(tmp_path / "x.npz")
    small = npy_of_zeros(64)
    (tmp_path / "x.npy").write_bytes(small.replace(b"(64,), ", b"(9" + b"9" * 11 + b",), ")[: len(small)])
    np.save(tmp_path / "x.labels.npy", np.array([0, 1]))
    with pytest.raises(ValueError, match="cannot be read as npy"):
        open_images(tmp_path / "x.npy")
    header = struct.pack(">HBBIII", 0, 8, 3, 1 << 12, 1 << 10, 1 << 10)
    (tmp_path / "t-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + bytes(100)))
    (tmp_path / "t-labels-idx1-ubyte.gz").write_bytes(gzip.compress(struct.pack(">HBBI", 0, 8, 1, 2) + b"\0\1"))
    with pytest.raises(ValueError, match=r"cannot be read as idx: its \d+ bytes would become 4,294,967,296"):
        open_images(tmp_path / "t-images-idx3-ubyte.gz")


def test_a_label_beyond_all_reason_makes_no_list_of_classes(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", images=np.zeros((2, 4, 4), np.uint8), labels=np.array([0, 2**62]))
    with pytest.raises(ValueError, match="label is 4611686018427387904, but there are 2 images"):
        open_images(tmp_path / "x.npz")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of small images that goes through the transforms."""
    folder = tmp_path_factory.mktemp("images")
    for split in ("train", "valid"):
        for name in ("cat", "dog"):
            (folder / split / name).mkdir(parents=True)
            (folder / split / name / "0.png").write_bytes(picture("PNG", size=(8, 8)))
    recipe = {**classification(folder), "schedule": {"kind": "constant", "lr": 1e-3}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert command(["train", str(folder / "recipe.yaml"), "--out", str(folder / "run")]) == 0
    return folder / "run"


def test_classify_says_a_line_for_each_file(run: Path, tmp_path: Path, capsys) -> None:
    """Readable ones of any shape have classes, the others a reason; a bad file does not end the command."""
    good = {"tiny.png": picture("PNG", size=(1, 1)), "line.png": picture("PNG", size=(3000, 1))}
    good |= {"print.jpg": picture("JPEG", "CMYK", (12, 5)), "arabic-مرحبا.png": picture("PNG", "P")}
    bad = {"half.png": picture("PNG")[:40], "large.png": png_header(60_000, 60_000), "empty.jpg": b"", "x.npz": b"PK"}
    for kind in ("O", "U2", "c8", ">i4", "M8[s]"):
        content = io.BytesIO()
        np.save(content, np.zeros((3, 8, 8), kind))
        bad[f"{kind[:2]}.npy"] = content.getvalue()
    for kind in (">f4", "f16", "f2"):
        content = io.BytesIO()
        np.save(content, np.zeros((3, 8, 8), kind))
        good[f"{kind[-2:]}.npy"] = content.getvalue()
    for name, value in (good | bad).items():
        (tmp_path / name).write_bytes(value)
    code, out, err = called(capsys, "classify", run, *(tmp_path / name for name in [*good, *bad]))
    assert code == 1
    assert [Path(line.split(": ")[0]).name for line in out.splitlines()] == list(good)
    said = [line for line in err.splitlines() if line.startswith("subquad: ") and "error" not in line]
    assert len(said) == len(bad)
