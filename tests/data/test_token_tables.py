"""Columns of token ids: data sets that somebody tokenised before, as lists in a table or as arrays of a dump."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from subquad.cli.main import run as command
from subquad.data.text.prepare import TextDataConfig, prepare_text
from subquad.data.text.store import PreparedText

BOS, PAD, EOS = 0, 1, 2
SOURCE = [[BOS, 7, 8, EOS, PAD, PAD], [BOS, 9, EOS, PAD, PAD, PAD], [BOS, 5, 6, 7, 8, EOS]]
TARGET = [[BOS, 5, EOS, PAD], [BOS, 6, 7, EOS], [BOS, EOS, PAD, PAD]]
"""As a tokenizer of transformers pads them; the last target is empty."""
TOKENIZER = {"kind": "ids", "vocab_size": 16, "special_ids": {"bos": BOS, "pad": PAD, "eos": EOS}}


def prepared(source: dict[str, Any], folder: Path) -> PreparedText:
    return prepare_text(TextDataConfig.parse("data", {"splits": {"train": source}, "tokenizer": TOKENIZER}), folder)


def samples(found: PreparedText) -> list[list[list[int]]]:
    stores = [found.store("train", field) for field in ("source", "target")]
    return [[store[number].tolist() for store in stores] for number in range(len(stores[0]))]


EXPECTED = [[[7, 8], [5]], [[9], [6, 7]]]


def test_columns_of_token_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow: Any = pytest.importorskip("pyarrow")
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    datasets: Any = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()
    (tmp_path / "set").mkdir()
    table = pyarrow.table({"src": SOURCE, "tgt": TARGET, "src_masks": SOURCE})
    parquet.write_table(table, tmp_path / "set" / "train.parquet")
    columns = {"format": "ids", "columns": ["src", "tgt"]}
    sources: list[dict[str, Any]] = [
        {"files": [f"hub:{tmp_path / 'set'}"], "split": "train"},
        {"files": [str(tmp_path / "set/train.parquet")]},
    ]
    for number, source in enumerate(sources):
        found = prepared({**source, **columns}, tmp_path / f"out{number}")
        assert samples(found) == EXPECTED
        assert found.description["splits"]["train"]["skipped"]["empty"] == 1
    parquet.write_table(pyarrow.table({"src": SOURCE, "tgt": ["a", "b", "c"]}), tmp_path / "text.parquet")
    with pytest.raises(ValueError, match=r"text.parquet, row 1: column tgt: a list of token ids is needed, got a"):
        prepared({"files": [str(tmp_path / "text.parquet")], **columns}, tmp_path / "wrong")


def test_a_dump_of_crybots_program(tmp_path: Path) -> None:
    path = tmp_path / "wmt14-tokenized-256.npz"
    np.savez(path, src=np.array(SOURCE), tgt=np.array(TARGET), src_masks=np.ones((3, 6)), tgt_masks=np.ones((3, 4)))
    assert samples(prepared({"files": [str(path)], "columns": ["src", "tgt"]}, tmp_path / "out")) == EXPECTED
    with pytest.raises(ValueError, match="has no array 'source'"):
        prepared({"files": [str(path)], "columns": ["source", "tgt"]}, tmp_path / "none")
    with pytest.raises(ValueError, match=r"one file and 2 columns of token ids are needed \(source, target\)"):
        prepared({"files": [str(path)], "columns": ["src"]}, tmp_path / "none")
    np.savez(path, src=np.array(SOURCE) + 9, tgt=np.array(TARGET))
    with pytest.raises(ValueError, match=r"sample 1, number 2: 16 is outside the vocabulary of 16 tokens"):
        prepared({"files": [str(path)], "columns": ["src", "tgt"]}, tmp_path / "none")


def test_a_model_is_trained_on_a_dump(tmp_path: Path) -> None:
    path = tmp_path / "dump.npz"
    np.savez(path, src=np.array(SOURCE * 4), tgt=np.array(TARGET * 4))
    splits = "{" + ", ".join(f"{split}: {{files: [{path}], columns: [src, tgt]}}" for split in ("train", "valid")) + "}"
    (tmp_path / "my.yaml").write_text(
        f"task: translation\ndata: {{splits: {splits}, tokenizer: {TOKENIZER}}}\n"
        "model: {preset: translation_small, dim: 16, encoder: {layers: 1}, decoder: {layers: 1}}\n"
        "schedule: {kind: constant, lr: 1.0e-3}\ntrain: {updates: 2}\n"
    )
    assert command(["train", str(tmp_path / "my.yaml"), "--out", str(tmp_path / "run")]) == 0
