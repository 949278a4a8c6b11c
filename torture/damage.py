"""What disks do to files: truncated, with a bit or a block changed, missing, exchanged. Nothing may be used in silence.

After each damage the files are opened as the commands open them. Either an error or a warning names what is damaged,
and what is used instead is an earlier checkpoint or made anew; or what was read is what was written, to the bit.
"""

import random
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.measured import Result
from subquad.data.text.prepare import TextDataConfig, prepare_text
from subquad.data.text.store import PreparedText, open_prepared
from subquad.train.checkpoint import CHECKSUMS, checkpoints, latest, load_checkpoint
from subquad.train.recipe import read_recipe
from subquad.train.run import build_task, load_trained
from torture.cases import Case, unequal
from torture.kills import outcome
from torture.processes import apart

TITLES = {"damage": "damages that were used in silence, or whose message does not say which file it is"}
BLOCK = 512
OF_FOLDERS = (CHECKSUMS, "kind.json", "tokenizer.json")
NAMED, SAME = "named", "same content"


@dataclass(frozen=True)
class Damage:
    """What was done to which file; other: the one that it was exchanged with."""

    kind: str
    path: Path
    other: Path | None = None

    def __str__(self) -> str:
        with_other = f" with {self.other.name}" if self.other is not None else ""
        return f"{self.path.name}: {self.kind}{with_other}"

    @property
    def paths(self) -> list[Path]:
        return [self.path] if self.other is None else [self.path, self.other]

    def is_named(self, said: str) -> bool:
        """By its name; checksums and parts of a tokenizer by their folder, parts of a token store by its name."""
        return any(_name_of(path) in said for path in self.paths)


def _name_of(path: Path) -> str:
    if path.name in OF_FOLDERS:
        return str(path.parent)
    return path.stem if "." in path.stem else path.name  # train.source.tokens, and no other file has two dots


def damage(draw: random.Random, files: list[Path]) -> Damage:
    """Damages one of the files, or exchanges two of them."""
    path = draw.choice(files)
    content = bytearray(path.read_bytes())
    kind = draw.choice(["truncated", "bit flipped", "bit flipped", "block zeroed", "missing", "exchanged"])
    if kind == "exchanged":
        other = draw.choice([file for file in files if file != path])
        path.write_bytes(other.read_bytes())
        other.write_bytes(content)
        return Damage(kind, path, other)
    if kind == "missing":
        path.unlink()
        return Damage(kind, path)
    if kind == "truncated":
        del content[draw.randrange(len(content)) :]
    elif kind == "bit flipped":
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    else:
        start = draw.randrange(len(content))
        content[start : start + BLOCK] = bytes(len(content[start : start + BLOCK]))
    path.write_bytes(content)
    return Damage(kind, path)


def repeated(original: Path, count: int, seed: int, check: Callable[[Path, random.Random], str]) -> dict[str, int]:
    """check(copy, draw) on `count` copies of a folder, by what it returned; copies are damaged by it and removed."""
    found: Counter[str] = Counter()
    for number in range(count):
        copy = original.with_name(f"{original.name}-{number}")
        shutil.copytree(original, copy)
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            try:
                found[check(copy, random.Random(f"{seed} {number}"))] += 1
            except Exception as error:
                found[f"WRONG: {type(error).__name__}: {error} (number {number})"] += 1
        shutil.rmtree(copy)
    return dict(found)


# ---------------------------------------------------------------------- checkpoints


def contents(path: Path) -> dict[str, torch.Tensor]:
    loaded = load_checkpoint(path)
    parts = {"model": loaded.model, "optimizer": loaded.optimizer, "rng": loaded.rng, "ema": loaded.ema or {}}
    state = torch.tensor(list(repr(loaded.state).encode()), dtype=torch.uint8)
    found = {f"{part} {name}": value for part, tensors in parts.items() for name, value in tensors.items()}
    return found | {"state": state}


def check_checkpoint(original: Path, copy: Path, draw: random.Random) -> str:
    """Resuming takes the newest checkpoint that is whole, which holds what was written."""
    newest, before = checkpoints(copy)[:2]
    files = [*newest.iterdir(), before / draw.choice([file.name for file in before.iterdir()])]
    done = damage(draw, sorted(files))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = latest(copy)
    said = " ".join(str(one.message) for one in caught)
    assert found is not None
    if (name := unequal(contents(found), contents(original / found.name))) is not None:
        return f"WRONG: {done}: {name} is used in silence"
    if found == newest:
        return SAME if any(path.parent == newest for path in done.paths) else "of an older one"
    return NAMED if done.is_named(said) else f"WRONG: {done}: not named by {said!r}"


# ---------------------------------------------------------------------- token files and tokenizers


def prepared_content(prepared: PreparedText) -> dict[str, Any]:
    stores = {f"{split} {side}": prepared.store(split, side) for split in prepared.splits for side in prepared.fields}
    arrays = {name: (store.tokens.tobytes(), store.index.tobytes()) for name, store in stores.items()}
    return arrays | {side: prepared.tokenizer(side).fingerprint() for side in prepared.fields}


def check_tokens(config: TextDataConfig, expected: dict[str, Any], copy: Path, draw: random.Random) -> str:
    """As `data.folder` an error names the damage; as the cache of a run what is damaged is made anew."""
    files = sorted(path for path in copy.rglob("*") if path.is_file() and path.suffix not in (".csv", ".txt"))
    done = damage(draw, files)
    try:
        opened = open_prepared(copy)
        opened.verify()
        silent, said = prepared_content(opened) == expected, ""
    except ValueError as error:
        silent, said = True, str(error)
    if not silent:
        return f"WRONG: {done}: used in silence"
    if prepared_content(prepare_text(config, copy, workers=1)) != expected:
        return f"WRONG: {done}: the cache was not made anew"
    if not said:
        return SAME
    return NAMED if done.is_named(said) else f"WRONG: {done}: not named by {said!r}"


# ---------------------------------------------------------------------- a trained run


def check_run(expected: dict[str, dict[str, Any]], copy: Path, draw: random.Random) -> str:
    """Using a model: any of its checkpoints, its tokenizers and what else its inputs need.

    expected: the content by the name that is asked for. Another checkpoint than that one is never used.
    """
    chosen = draw.choice(checkpoints(copy / "checkpoints"))
    files = [*(copy / "tokenizers").rglob("*"), copy / "inputs.json", *chosen.iterdir()]
    done = damage(draw, sorted(file for file in files if file.is_file()))
    name = draw.choice(sorted(expected))
    try:
        found = run_content(copy, name)
    except ValueError as error:
        return NAMED if done.is_named(str(error)) else f"WRONG: {done}: not named by {error}"
    return SAME if same_run(found, expected[name]) else f"WRONG: {done}: {name} is used in silence"


def run_content(run: Path, checkpoint: str) -> dict[str, Any]:
    loaded = load_trained(run, checkpoint)
    prints = {side: loaded.tokenizer(side).fingerprint() for side in ("source", "target")}
    return {"weights": dict(loaded.model.state_dict()), "update": loaded.update, "inputs": loaded.inputs, **prints}


def same_run(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    rest = [{name: value for name, value in one.items() if name != "weights"} for one in (found, expected)]
    return rest[0] == rest[1] and unequal(found["weights"], expected["weights"]) is None


# ---------------------------------------------------------------------- the part


def damages(folder: Path, count: int, seed: int) -> Iterator[Result]:
    """Two fifths in checkpoints, two in token files and tokenizers, one in what using a model reads."""
    case = Case(folder / "damage", "phrases")
    case.train_reference()
    run = case.reference

    def of_checkpoints() -> dict[str, int]:
        original = run / "checkpoints"
        return repeated(original, 2 * count // 5, seed, lambda *given: check_checkpoint(original, *given))

    def of_tokens() -> dict[str, int]:
        data = build_task(read_recipe(case.recipe), run / "data").data  # type: ignore[attr-defined]
        config = TextDataConfig.parse("data", tokens_config(run))
        expected = prepared_content(data)
        return repeated(run / "data", 2 * count // 5, seed, lambda *given: check_tokens(config, expected, *given))

    def of_runs() -> dict[str, int]:
        expected = {name: run_content(run, name) for name in ("best", "last")}
        return repeated(run, count - 2 * (2 * count // 5), seed, lambda *given: check_run(expected, *given))

    for what, work in (
        ("checkpoints, resumed", of_checkpoints),
        ("token files and tokenizers, trained on", of_tokens),
        ("a run, used", of_runs),
    ):
        found = apart(work)
        wrong = [name for name in found if name.startswith("WRONG")]
        right = {name: number for name, number in found.items() if name not in wrong}
        yield outcome("damage", {"files": what}, {"damages": sum(found.values()), **right}, wrong)


def tokens_config(run: Path) -> dict[str, Any]:
    """How the run's tokens were made: from the files of the embedded set beside them."""
    splits = {split: str(run / "data" / f"{split}.csv") for split in ("train", "valid", "test")}
    return {"sample_kind": "pairs", "splits": splits, "tokenizer": {"kind": "bpe", "vocab_size": 300}}
