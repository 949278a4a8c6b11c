"""Token numbers in numpy's files: what is read of them, how models train on them, and what is refused."""

import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad.cli.main import run as command
from subquad.data.blocks import BlockOptions, Blocks
from subquad.data.text import arrays as token_arrays
from subquad.data.text import store
from subquad.data.text.prepare import TextDataConfig, prepare_text
from subquad.data.text.store import PreparedText
from subquad.data.tokenizers import TokenizerConfig, build_tokenizer, load_tokenizer
from subquad.data.tokenizers.simple import IdTokenizer

PAD, EOS, SIZE = 1, 2, 300
IDS = {"kind": "ids", "vocab_size": SIZE, "special_ids": {"pad": PAD, "eos": EOS}}


def save(path: Path, **arrays: Any) -> str:
    """One array into an .npy file, several into an .npz file."""
    np.savez(path, **arrays) if path.suffix == ".npz" else np.save(path, arrays["ids"])
    return str(path)


def prepare(folder: Path, files: str | Sequence[str], sample_kind: str = "text", **options: Any) -> PreparedText:
    given = {"sample_kind": sample_kind, "splits": {"train": files}, "tokenizer": IDS, **options}
    return prepare_text(TextDataConfig.parse("data", given), folder)


def rows(prepared: PreparedText, side: str = "text") -> list[list[int]]:
    found = prepared.store("train", side)
    return [found[i].tolist() for i in range(len(found))]


# ---------------------------------------------------------------------- what is read

SAMPLES = st.lists(st.lists(st.integers(3, SIZE - 1), max_size=6), min_size=1, max_size=12)


@settings(max_examples=25, deadline=None)
@given(
    samples=SAMPLES,
    kind=st.sampled_from(["lengths", "offsets"]),
    ends=st.lists(st.sampled_from([[], [EOS], [EOS, PAD, PAD], [PAD]]), min_size=12, max_size=12),
    dtype=st.sampled_from(["uint16", "int32", "int64", ">i4"]),
    chunk=st.integers(1, 20),
)
def test_npz_gives_back_its_samples(tmp_path_factory, samples, kind, ends, dtype, chunk) -> None:
    """Whatever the chunks, the type and what stands after a sample: padding and one eos are no part of it."""
    stored = [[*sample, *end] for sample, end in zip(samples, ends, strict=False)]
    if not any(stored):
        return
    lengths = np.array([len(sample) for sample in stored])
    place = {"lengths": lengths} if kind == "lengths" else {"offsets": np.append(0, np.cumsum(lengths))}
    folder = tmp_path_factory.mktemp("arrays")
    path = save(folder / "a.npz", ids=np.concatenate([np.array(s, dtype) for s in stored]).astype(dtype), **place)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_arrays, "CHUNK_TOKENS", chunk)
        assert rows(prepare(folder / "all", path)) == samples
        kept = [sample for sample in samples if 0 < len(sample) <= 4]
        if not kept:
            return
        prepared = prepare(folder / "some", path, keep_empty=False, max_length=4)
    assert rows(prepared) == kept
    split = prepared.description["splits"]["train"]
    assert split["read"] == len(samples)
    assert split["skipped"] == {
        "empty": sum(not sample for sample in samples),
        "over-long": sum(len(sample) > 4 for sample in samples),
    }


def test_tables_and_streams(tmp_path: Path) -> None:
    table = save(tmp_path / "table.npy", ids=np.array([[5, 6, EOS, PAD], [7, 8, 9, 10], [PAD] * 4], np.uint16))
    assert rows(prepare(tmp_path / "a", table)) == [[5, 6], [7, 8, 9, 10], []]
    stream = save(tmp_path / "stream.npy", ids=np.array([5, EOS, 6, 7, EOS], np.int64))
    assert rows(prepare(tmp_path / "b", stream)) == [[5, EOS, 6, 7]]
    fortran = save(tmp_path / "fortran.npy", ids=np.asfortranarray(np.arange(3, 15).reshape(4, 3)))
    assert rows(prepare(tmp_path / "c", fortran)) == np.arange(3, 15).reshape(4, 3).tolist()


def test_a_stream_gives_the_blocks_of_its_lines(tmp_path: Path) -> None:
    """A stream with eos after every document is the text that the same documents are, line by line."""
    documents = [list(range(3 + i, 20 + 3 * i)) for i in range(8)]
    stream = save(tmp_path / "s.npy", ids=np.array([n for words in documents for n in (*words, EOS)]))
    (tmp_path / "lines.txt").write_text("".join(" ".join(map(str, words)) + "\n" for words in documents))
    options = BlockOptions(tokens_per_sample=16)
    ours = Blocks(prepare(tmp_path / "a", stream).store("train", "text"), options, EOS)
    lines = Blocks(prepare(tmp_path / "b", str(tmp_path / "lines.txt")).store("train", "text"), options, EOS)
    assert len(ours) == len(lines)
    for number in range(len(ours)):
        assert np.array_equal(ours[number], lines[number])


def test_a_stream_needs_no_memory_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "BUFFERED_TOKENS", 1 << 16)
    count = 1 << 22
    path = save(tmp_path / "s.npy", ids=(np.arange(count, dtype=np.int32) % (SIZE - 3) + 3))
    tracemalloc.start()
    prepared = prepare(tmp_path / "out", path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < count  # a quarter of the file
    tokens = prepared.store("train", "text")[0]
    assert np.array_equal(tokens, np.arange(count) % (SIZE - 3) + 3)


def test_padding_without_end_is_read_once(tmp_path: Path) -> None:
    """Going back token by token took minutes for a file of this size, and hours for a larger one."""
    path = save(tmp_path / "padded.npy", ids=np.full(20_000_000, PAD, np.uint8))
    begun = time.monotonic()
    assert rows(prepare(tmp_path / "out", path)) == [[]]
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize("name", ["lengths", "offsets"])
def test_places_that_overflow_are_refused(name: str, tmp_path: Path) -> None:
    """Their sum, and every difference, is what it should be modulo 2^64."""
    lengths = np.array([2**62] * 4 + [2])
    places = {"lengths": lengths, "offsets": np.append(0, np.cumsum(lengths))}
    path = save(tmp_path / "a.npz", ids=np.array([5, 6]), **{name: places[name]})
    with pytest.raises(ValueError, match="the samples have to cover all 2 ids, from 0 on, without going back"):
        prepare(tmp_path / "out", path)


def test_numbers_of_a_known_tokenizer(tmp_path: Path) -> None:
    """Whatever made the numbers, its tokenizer says how many there are and what they mean."""
    made = build_tokenizer(TokenizerConfig(kind="bpe", vocab_size=280), ["the cat sat on the mat"] * 3)
    made.save(tmp_path / "bpe")
    ids = made.encode_batch(["the cat", "sat on"])
    path = save(tmp_path / "a.npz", ids=np.concatenate(ids), lengths=np.array([len(each) for each in ids]))
    prepared = prepare(tmp_path / "out", path, tokenizer={"kind": "saved", "path": str(tmp_path / "bpe")})
    assert [prepared.tokenizer("text").decode(row) for row in rows(prepared)] == ["the cat", "sat on"]


def test_the_tokenizer_of_numbers(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(TokenizerConfig.parse("tokenizer", IDS))
    assert tokenizer.encode(" 5 299  0 ") == [5, 299, 0]
    assert tokenizer.decode([5, 299, EOS, PAD]) == "5 299"
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert isinstance(loaded, IdTokenizer)
    assert (loaded.pad, loaded.eos, loaded.unk, loaded.size) == (PAD, EOS, -1, SIZE)
    for wrong in ("300", "-1", "x", "²"):
        with pytest.raises(ValueError, match=f"'{wrong}' is no token id; the vocabulary has 0 to 299"):
            tokenizer.encode(f"5 {wrong}")


# ---------------------------------------------------------------------- training

STACK = {"layers": 1, "heads": 2, "ffn_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    "language-model": {"preset": "lm_small", "dim": 16, "decoder": STACK},
    "translation": {"preset": "translation_small", "dim": 16, "encoder": STACK, "decoder": STACK},
}


def recipe(folder: Path, task: str, train: list[str], valid: list[str]) -> str:
    data = {
        "task": task,
        "data": {"splits": {"train": train, "valid": valid}, "tokenizer": IDS},
        "model": MODELS[task],
        "schedule": {"kind": "constant", "lr": 1e-2},
        "train": {"updates": 3, "budget": {"max_tokens": 256}},
    }
    if task == "language-model":
        data["data"]["blocks"] = {"tokens_per_sample": 32}  # type: ignore[index]
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(data))
    return str(path)


@pytest.mark.parametrize("task", MODELS)
def test_training_on_arrays(task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = np.random.default_rng(0).integers(3, SIZE, (60, 8))
    sides = 2 if task == "translation" else 1
    train = [save(tmp_path / f"t{i}.npy", ids=ids) for i in range(sides)]
    valid = [save(tmp_path / f"v{i}.npz", ids=ids[:9].reshape(-1), lengths=np.full(9, 8)) for i in range(sides)]
    path = recipe(tmp_path, task, train, valid)
    assert command(["train", path, "--out", str(tmp_path / "run")]) == 0
    assert "after 3 updates" in capsys.readouterr().out
    assert command(["evaluate", str(tmp_path / "run"), "--split", "valid", "decode.max_len_b=8"]) == 0
    capsys.readouterr()
    ids[41, 5] = SIZE
    save(tmp_path / "t0.npy", ids=ids)
    assert command(["train", path, "--out", str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err.strip()
    assert error.endswith("t0.npy, sample 42, number 6: 300 is outside the vocabulary of 300 tokens")
    assert "\n" not in error


# ---------------------------------------------------------------------- refusals

GOOD = np.arange(3, 15)


@pytest.mark.parametrize(
    ("name", "arrays", "message"),
    [
        ("a.npy", {"ids": GOOD.astype(np.float32)}, "whole numbers, not float32"),
        ("a.npy", {"ids": GOOD.reshape(2, 2, 3)}, r"the shape is \(2, 2, 3\)"),
        ("a.npy", {"ids": GOOD[:0]}, "empty, there are no samples"),
        ("a.npy", {"ids": GOOD - 4}, "sample 1, number 1: -1 is outside"),
        ("a.npz", {"ids": GOOD}, "needs the arrays `ids` and either `lengths` or `offsets`"),
        ("a.npz", {"tokens": GOOD, "lengths": [12]}, "needs the arrays"),
        ("a.npz", {"ids": GOOD, "lengths": [5, 6]}, "cover all 12 ids"),
        ("a.npz", {"ids": GOOD, "lengths": [15, -3]}, "cover all 12 ids"),
        ("a.npz", {"ids": GOOD, "offsets": [0, 7, 5, 12]}, "cover all 12 ids"),
        ("a.npz", {"ids": GOOD, "offsets": [2, 12]}, "cover all 12 ids"),
        ("a.npz", {"ids": GOOD, "offsets": [0.0, 12.0]}, "offsets must be a row of whole numbers"),
    ],
)
def test_bad_arrays(tmp_path: Path, name: str, arrays: dict[str, Any], message: str) -> None:
    path = save(tmp_path / name, **{key: np.asarray(value) for key, value in arrays.items()})
    with pytest.raises(ValueError, match=message) as caught:
        prepare(tmp_path / "out", path)
    assert "\n" not in str(caught.value)
    assert path in str(caught.value)


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    for name in ("a.npy", "a.npz"):
        (tmp_path / name).write_bytes(b"\x93NUMPY no array")
        with pytest.raises(ValueError, match=rf"{name} cannot be read as an array of numpy"):
            prepare(tmp_path / "out", str(tmp_path / name))
    with pytest.raises(ValueError, match="no such file"):
        prepare(tmp_path / "out", str(tmp_path / "none.npy"))
    np.save(tmp_path / "pickled.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(ValueError, match="cannot be read"):
        prepare(tmp_path / "out", str(tmp_path / "pickled.npy"))


def test_parallel_arrays(tmp_path: Path) -> None:
    table = save(tmp_path / "t.npy", ids=GOOD.reshape(4, 3))
    other = save(tmp_path / "o.npy", ids=GOOD.reshape(3, 4))
    stream = save(tmp_path / "s.npy", ids=GOOD)
    assert rows(prepare(tmp_path / "out", [table, table], "pairs"), "target") == GOOD.reshape(4, 3).tolist()
    with pytest.raises(ValueError, match=r"same number of samples: .*t\.npy has 4, .*o\.npy has 3"):
        prepare(tmp_path / "out", [table, other], "pairs")
    with pytest.raises(ValueError, match=r"s\.npy is one long sample"):
        prepare(tmp_path / "out", [table, stream], "pairs")
    with pytest.raises(ValueError, match=r"2 files of token ids are needed \(source, target\); got .*t\.npy"):
        prepare(tmp_path / "out", [table], "pairs")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "bpe"}, "trained on text, but `train` holds token ids"),
        ({"kind": "ids", "vocab_size": 9}, "needs vocab_size and special_ids"),
        (
            {**IDS, "special_ids": {"pad": 1, "eos": 300}},
            r"special_ids\.eos is 300, but a vocabulary of 300",
        ),
        ({**IDS, "special_ids": {"pad": 1, "eos": 1}}, "must differ"),
        ({**IDS, "special_ids": {"pad": 1, "eos": 2, "boss": 3}}, "did you mean 'bos'"),
        ({**IDS, "min_count": 2}, "ids does not accept min_count"),
    ],
)
def test_wrong_tokenizers(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TextDataConfig.parse("data", {"sample_kind": "text", "splits": {"train": "a.npy"}, "tokenizer": options})
