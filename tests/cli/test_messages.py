"""What a new user meets: mistakes answered with what went wrong, where and what to do; help that ends with examples."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml

from subquad.cli.main import build_app, run
from subquad.train.recipe import read_recipe

ROOT = Path(__file__).parents[2]
RECIPE = {
    "task": "language-model",
    "data": {
        "splits": {"train": "train.txt", "valid": "valid.txt"},
        "tokenizer": {"kind": "words"},
        "blocks": {"tokens_per_sample": 8},
    },
    "model": {"preset": "lm_small", "dim": 16, "decoder": {"layers": 1, "heads": 2, "ffn_dim": 16}},
    "schedule": {"kind": "constant", "lr": 1e-3},
    "train": {"updates": 1, "budget": {"max_tokens": 64}},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a user has it: texts, a recipe, a run, and what is none of these."""
    folder = tmp_path_factory.mktemp("place")
    for name in ("train.txt", "valid.txt", "input.txt"):
        (folder / name).write_text("the cat sat on the mat\na dog barks\n" * 6)
    splits = {split: [str(folder / f"{split}.txt")] for split in ("train", "valid")}
    recipe = {**RECIPE, "data": {**RECIPE["data"], "splits": splits}}  # type: ignore[dict-item]
    (folder / "my.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "typo.yaml").write_text(yaml.safe_dump({**recipe, "data": {"splits": {"trian": splits["train"]}}}))
    (folder / "folder.yaml").mkdir()
    (folder / "empty").mkdir()
    (folder / "pairs.json").write_text('{"format": 1, "task": "translation"}')
    assert run(["train", str(folder / "my.yaml"), "--out", str(folder / "run")]) == 0
    return folder


MISTAKES: list[tuple[str, tuple[str, ...]]] = [
    # the command line itself
    ("trian my.yaml", ("Did you mean 'train'?", "see `subquad --help`")),
    ("data", ("Missing command", "see `subquad data --help`")),
    ("data sttas run", ("Did you mean 'stats'?", "see `subquad data --help`")),
    ("train", ("say what to train: a recipe, --from-run and a run to begin with, or --from",)),
    ("train my.yaml --outt x", ("--outt", "--out", "see `subquad train --help`")),
    ("translate run --beam x", ("--beam", "integer", "see `subquad translate --help`")),
    ("generate run --tokens 0", ("--tokens", "greater than or equal to 1")),
    ("export run --to onx --out x", ("'onx' is not one of 'onnx', 'torch', 'huggingface'",)),
    ("doctor now", ("now", "see `subquad doctor --help`")),
    # recipes
    ("train my.yml", ("there is no recipe my.yml; did you mean 'my.yaml'?", "starts at the current folder")),
    ("train nope.yaml", ("there is no recipe nope.yaml. The path starts",)),
    ("train none/at_all.yaml", ("there is no recipe none/at_all.yaml. ", "starts at the current folder")),
    ("train folder.yaml", ("folder.yaml is a folder, and a recipe is a YAML file",)),
    ("train run", ("run is a folder", "that of a run is run/recipe.yaml")),
    ("compare nowhere.yaml --mixers eva", ("there is no recipe nowhere.yaml",)),
    ("train typo.yaml", ("splits need a split `train` (got trian)",)),
    ("train my.yaml train.updates", ("'train.updates' is not a change", "write NAME=VALUE, such as train.updates=100")),
    (
        "train my.yaml --lr 0.001",
        ("No such option: --lr; fairseq's --lr is schedule.lr=0.001 here; see",),
    ),
    ("train my.yaml --update-freq=4", ("fairseq's --update-freq is train.accumulate=4 here",)),
    ("train my.yaml --fp16", ("fairseq's --fp16 is train.precision here",)),
    ("train my.yaml --ddp-backend legacy_ddp", ("--ddp-backend: train.sharded chooses the engine",)),
    ("--local-rank=1 train nope.yaml", ("there is no recipe nope.yaml",)),
    ("train my.yaml zzzz=1", ("has no option 'zzzz'. Options: task, data,",)),
    ("train my.yaml task=language-modl", ("task:", "there is no 'language-modl'; did you mean 'language-model'?")),
    ("train my.yaml optim.name=admw", ("optim.name:", "did you mean 'adamw'?")),
    ("train my.yaml train.updates=abc", ("train.updates:", "(got 'abc')")),
    (
        "train my.yaml model.decoder.mixer.windw=3",
        ("mixer 'softmax' has no option 'windw'", "Options: attention_dropout, "),
    ),
    ("train my.yaml model.heads=7", ("model has no option 'heads'; did you mean decoder.heads? Options: kind,",)),
    ("train my.yaml data.vocab_size=9", ("did you mean tokenizer.vocab_size?",)),
    ("train my.yaml lr=1", ("has no option 'lr'; did you mean schedule.lr?",)),
    ("train my.yaml model.decoder.mixer=lara", ("lara cannot be causal", "The causal mechanisms are softmax,")),
    ("train my.yaml data.splits.train=[none.txt] --out new", ("none.txt: there is no such file",)),
    ("train my.yaml --out input.txt", ("input.txt: there is a file already where a folder is needed",)),
    ("train my.yaml model.dim=32 --out run", ("model.dim", "give another --out, or the same recipe")),
    # runs
    ("evaluate nowhere", ("nowhere is no run: there is none", "`subquad train RECIPE --out FOLDER` makes one")),
    ("evaluate empty", ("empty is no run: it holds no recipe.yaml",)),
    ("generate input.txt", ("input.txt is no run: it is a file",)),
    ("average nowhere --updates 2", ("nowhere is no run: there is none",)),
    ("average run --updates 2 --epochs 1", ("say which checkpoints to average, in one way",)),
    ("evaluate run", ("the data has no split 'test'. It has train, valid.",)),
    ("evaluate run --split valid --against nowhere", ("there is no run nowhere to compare with",)),
    (
        "evaluate run --split valid --against pairs.json",
        ("run is a run of task language-model, pairs.json of translation: the two cannot be compared",),
    ),
    ("generate run --checkpoint bst", ("run has no checkpoint 'bst'", "it has best, last, update-")),
    ("translate run", ("run is a run of task language-model", "only runs of translation translate")),
    ("translate run input.txt", ("text comes from standard input: subquad translate run < input.txt",)),
    ("classify run x.png", ("run was trained for language-model, not for classification",)),
    ("export run --to torch --out empty/../run", ("exists already; give a new folder",)),
    # data, mechanisms
    ("data prepare DATA", ("give files with --train, --valid and --test, or a --config",)),
    ("data prepare DATA --train none.txt --samples text", ("none.txt: there is no such file",)),
    ("data prepare DATA --train input.txt --tokenizer wrds", ("tokenizer.kind:", "did you mean 'words'?")),
    ("data prepare input.txt --train train.txt --samples text", ("where a folder is needed",)),
    ("data stats nowhere", ("nowhere holds no prepared data",)),
    ("data stats input.txt", ("input.txt/data.json: a part of this path is a file where a folder is needed",)),
    ("import nowhere.pt --out new", ("there is no file nowhere.pt",)),
    ("import input.txt --out new", ("input.txt is refused: torch.save did not write it. Nothing of it was run.",)),
    ("import my.yaml --out new", ("my.yaml", "torch.save did not write it")),
    ("bench --out empty", ("--out empty: this is a folder, and the name of a file is needed",)),
    ("info zzzz", ("no mechanism or preset is called 'zzzz'. `subquad info` lists them.",)),
    ("compare my.yaml", ("say what to compare: mechanisms",)),
    ("compare my.yaml --dry-run", ("say what to compare: mechanisms",)),
    ("compare my.yaml --mixers eva,softmax*1,eva", ("is a pattern of mechanisms; give it a label",)),
    ("compare my.yaml --mixers softmax,eva --seeds 0 --out new", ("give how many (3), or which (1,2,3)",)),
]


@pytest.mark.parametrize(("line", "parts"), MISTAKES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_mistake_is_answered_in_one_line(line, parts, place, capsys, monkeypatch) -> None:
    monkeypatch.chdir(place)
    assert run(shlex.split(line)) in (1, 2)
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("subquad: error: ")
    assert err.count("\n") == 1
    assert "defect" not in err
    assert "Errno" not in err
    for part in parts:
        assert part in err


def test_mistakes_leave_no_new_folder(place, monkeypatch) -> None:
    monkeypatch.chdir(place)
    assert run(["train", "my.yaml", "model.decoder.mixer=lara", "--out", "never"]) == 1
    assert not (place / "never").exists()


def test_each_unreadable_image_is_named(place, capsys, monkeypatch) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.chdir(place)
    small = ["train.updates=2", "schedule.warmup_updates=1", "model.encoder.layers=1"]
    assert run(["train", "digits", *small, "--out", "digits"]) == 0
    capsys.readouterr()
    assert run(["classify", "digits", "empty", "nowhere.png"]) == 1
    folder, missing, verdict = capsys.readouterr().err.splitlines()
    assert folder == "subquad: empty is a folder; give the images in it, such as empty/*.png"
    assert missing == "subquad: nowhere.png: there is no such file"
    assert verdict == "subquad: error: 2 of 2 files could not be classified"


def test_a_warning_is_one_line() -> None:
    code = (
        "import sys, warnings; from subquad.cli.main import run; sys.argv = ['subquad', '--version']; run();"
        "warnings.warn('the tracker fell silent')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "subquad: warning: the tracker fell silent\n"


def test_too_little_memory_says_what_needs_less(capsys, monkeypatch) -> None:
    monkeypatch.setattr("subquad.compare.measure.bench.run_bench", lambda *_: torch.empty(2**58))
    assert run(["bench"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("subquad: error: out of memory: smaller batches")


# ---------------------------------------------------------------------- help


def commands(group: Any = None, words: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command and group by the words that call it."""
    group = group or typer.main.get_command(build_app())
    yield " ".join(words), group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*words, name))


COMMANDS = dict(commands())


def example_lines(command: Any) -> list[str]:
    """Examples as a shell reads them: a backslash joins a line and the next."""
    return re.sub(r"\\\n\s*", "", command.examples).splitlines()


EXAMPLES = sorted({line for command in COMMANDS.values() for line in example_lines(command)})


@pytest.mark.parametrize("words", COMMANDS)
def test_help_ends_with_examples(words, capsys) -> None:
    assert run([*words.split(), "--help"]) == 0
    before, title, examples = capsys.readouterr().out.partition("\nExamples:\n")
    assert title
    assert "Options:" in before
    assert all(line.startswith("  ") for line in examples.splitlines())
    own = [line for line in example_lines(COMMANDS[words]) if f"subquad {words}".strip() in line]
    assert len(own) >= 1


def test_the_list_of_commands_shows_whole_sentences(capsys) -> None:
    run(["--help"])
    listed = capsys.readouterr().out.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert len(listed) == len([name for name in COMMANDS if name and " " not in name])
    assert all(line.endswith(".") and not line.endswith("...") for line in listed)


@pytest.mark.parametrize("words", COMMANDS)
def test_helps_are_whole_sentences(words) -> None:
    for parameter in COMMANDS[words].params:
        text = parameter.help or ""
        if parameter.name not in ("help", "install_completion", "show_completion"):
            assert text[:1].isupper(), f"{parameter.name}: {text}"
            assert text.endswith("."), f"{parameter.name}: {text}"
            assert len(text.split()) >= 3, f"{parameter.name}: {text}"
            assert not text.startswith(("Of ", "As ", "See ")), f"{parameter.name}: {text}"


@pytest.mark.parametrize("line", EXAMPLES)
def test_an_example_is_a_line_that_the_program_takes(line) -> None:
    """Options and arguments are read by the parser itself; recipes of the project with their changes as well."""
    words = shlex.split(line)
    words = words[words.index("subquad") + 1 :]
    words = words[: min((words.index(sign) for sign in ("<", ">") if sign in words), default=len(words))]
    command: Any = COMMANDS[""]
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    given = command.make_context(command.name, list(words)).params
    if given.get("from_run") is not None:  # all words are changes to the recipe of that run
        return
    if given.get("recipe") is not None and given["recipe"].parts[0] not in ("runs", "my.yaml"):
        read_recipe(given["recipe"], given.get("changes") or [])


@pytest.mark.parametrize(
    ("terminal", "no_color", "coloured"), [(True, "", True), (True, "1", False), (False, "", False)]
)
def test_colours_are_for_terminals(terminal, no_color, coloured, capsys, monkeypatch) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    run(["info", "--help"])
    run(["info", "evaa"])
    out, err = capsys.readouterr()
    assert out.startswith("\x1b[1mUsage:\x1b[0m subquad info" if coloured else "Usage: subquad info")
    assert ("\x1b" in err) == coloured
    assert ("\x1b" in out) == coloured
