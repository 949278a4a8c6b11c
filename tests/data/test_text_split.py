"""Dividing one file: nothing is lost, nothing is in two splits, and texts keep their order."""

import csv
import gzip
from pathlib import Path

import pytest

from subquad.data.text.split import SPLITS, split_file


def lines_of(folder: Path, kind: str = "txt") -> dict[str, list[str]]:
    return {split: (folder / f"{split}.{kind}").read_text().splitlines() for split in SPLITS}


def test_a_text_is_cut_in_its_order(tmp_path: Path) -> None:
    lines = [f"line {number}" for number in range(101)]
    (tmp_path / "novel.txt").write_text("\n".join(lines))
    counts = split_file(tmp_path / "novel.txt", tmp_path / "out", 0.1)
    found = lines_of(tmp_path / "out")
    assert [line for split in SPLITS for line in found[split]] == lines
    assert counts == {"train": 81, "valid": 10, "test": 10} == {name: len(each) for name, each in found.items()}


def test_rows_of_a_table_are_shuffled_and_whole(tmp_path: Path) -> None:
    rows = [[f"{number % 2}", f'text "{number}",\nin two lines'] for number in range(50)]
    with (tmp_path / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["label", "text"], *rows])
    split_file(tmp_path / "table.csv", tmp_path / "out", 0.2, shuffle=True, header=True)
    found = {}
    for split in SPLITS:
        with (tmp_path / "out" / f"{split}.csv").open(newline="") as file:
            header, *found[split] = csv.reader(file)
        assert header == ["label", "text"]
    assert sorted(row for each in found.values() for row in each) == sorted(rows)
    assert {name: len(each) for name, each in found.items()} == {"train": 30, "valid": 10, "test": 10}
    assert found["test"] != rows[-10:]


def test_packed_files_are_read(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as file:
        file.writelines(f'{{"text": "{number}"}}\n' for number in range(40))
    assert split_file(tmp_path / "rows.jsonl.gz", tmp_path / "out")["test"] == 2
    assert len(lines_of(tmp_path / "out", "jsonl")["train"]) == 36


def test_nothing_is_written_over_and_too_little_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("one\ntwo\nthree\n")
    with pytest.raises(ValueError, match="3 records: too few to hold out 5%"):
        split_file(tmp_path / "short.txt", tmp_path / "out")
    with pytest.raises(ValueError, match="leave none for training"):
        split_file(tmp_path / "short.txt", tmp_path / "out", 0.5)
    split_file(tmp_path / "short.txt", tmp_path / "other", 0.4)
    with pytest.raises(ValueError, match="exists already"):
        split_file(tmp_path / "short.txt", tmp_path / "other", 0.4)
