"""Pages of the documentation as sessions: their blocks run in order, in a folder of their own, made short.

    python              runs; the blocks of a page share their names
    python title="..."  a file of the project, written and not run
    toml title="..."    a file of the project likewise
    yaml title="..."    a file, written; without a title it is a part of a recipe, which must be valid
    sh                  commands: subquad, python of a script, torchrun, make, docker, with one pipe or redirections;
                        what installs (pip, python3 -m venv, `.`, docker build) is held against the project's files
    text                not run: equations, output, commands of the programs that readers come from

A block after the line `<!-- nightly -->` takes long and runs with the nightly tests.
"""

import contextlib
import importlib.util
import io
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import yaml
from PIL import Image

from subquad.cli.main import run
from subquad.config import merge_options
from subquad.packages import require_torchvision
from subquad.recipes import names
from subquad.train.recipe import Recipe, read_recipe

ROOT = Path(__file__).parents[2]
TORCH_HOME = "torch-home"
"""The folder of that variable's name while a page is followed."""
FENCE = re.compile(r'^(<!-- nightly -->\n)?```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
LANGUAGES = {"math", "python", "yaml", "toml", "sh", "text", ""}
UPDATES = ["train.updates=2", "train.budget.max_tokens=512", "schedule.warmup_updates=1"]
DECODED = ["decode.beam=1", "decode.max_len_a=0", "decode.max_len_b=5"]
COSTS = ["--lengths", "16", "--tokens", "32", "--rounds", "1"]
FEW_PHRASES = [f"data.options.{split}={count}" for split, count in {"train": 200, "valid": 20, "test": 20}.items()]
FEW_PHRASES += ["data.tokenizer.vocab_size=300"]
SHORT = {  # the last value of an option counts
    "advise": ["--lengths", "8,16,24,32", "--dim", "16", "--heads", "2", "--rounds", "1"],
    "bench": ["--lengths", "16", "--dim", "16", "--heads", "2", "--repeats", "1"],
    "compare": [*UPDATES, *DECODED, *COSTS, "--seeds", "1", "--no-floors"],
    "demo": ["--updates", "51", "--seeds", "1"],
    "evaluate": [*DECODED, "--resamples", "10"],
    "generate": ["--tokens", "3"],
    "linearise": [
        *("--transfer-updates", "1", "--tune-updates", "1", "--batch", "2", "--length", "16", "--no-controls"),
    ],
    "train": UPDATES,
    "translate": ["--max-len-a", "0", "--max-len-b", "5"],
}
SCRIPTS = {
    "subquad.examples.compare_text": ["--mixers", "lightconv", "--updates", "2", "--seeds", "1"],
    "subquad.examples.own_model": ["--steps", "2"],
    "subquad.examples.swap_vit": ["--epochs", "1", "--tune-epochs", "1"],
    "benchmarks.tables": ["--quick", "--threads", "1"],
    "benchmarks.peer": ["--quick", "--threads", "1"],
    "benchmarks.reference": [],
}
TORTURE = ["--quick", "--kills", "1"]
NOT_OURS = {"lm_eval"}
"""Packages that the tests do not install: what needs one runs where it is there."""
WHOLE: dict[str, Any] = {  # a recipe that parts of recipes are put into
    "task": "translation",
    "data": {"embedded": "phrases"},
    "model": {"preset": "translation_small"},
    "schedule": {"kind": "inverse-sqrt", "lr": 1e-3, "warmup_updates": 1},
    "train": {"updates": 2},
}
SMALL: dict[str, dict[str, Any]] = {  # of runs that pages begin with, by task: what differs from the whole recipe
    "translation": {
        "data": {"embedded": "phrases", "options": {"train": 200, "valid": 20, "test": 20}},
        "train": {"budget": {"max_tokens": 512}},
    },
    "language-model": {
        "data": {
            "splits": {split: f"data/text/{split}.txt" for split in ("train", "valid", "test")},
            "blocks": {"tokens_per_sample": 32},
        },
        "model": {"preset": "lm_small"},
    },
}
STAND_INS = {"first": "translation", "softmax": "translation", "speeches": "language-model"}


@dataclass(frozen=True)
class Block:
    language: str
    title: str
    text: str
    nightly: bool


def blocks(page: Path) -> list[Block]:
    found = [Block(kind, title, text, bool(late)) for late, kind, title, text in FENCE.findall(page.read_text())]
    assert {block.language for block in found} <= LANGUAGES, f"{page}: a language that nobody runs"
    return found


def titled(page: Path, title: str) -> str:
    """The text of the block that is this file."""
    (text,) = [block.text for block in blocks(page) if block.title == title]
    return text


def commands(block: Block) -> list[list[str]]:
    """The lines of a shell block as words, continued lines joined, without comments."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@dataclass
class Session:
    """What a reader does who follows a page from top to bottom."""

    folder: Path
    runs: dict[str, Path]
    """Runs by task that stand in for those which take days, or were made on another page."""
    names: dict[str, Any] = field(default_factory=dict)
    images: set[str] = field(default_factory=set)
    """Tags of docker images that were built."""

    def follow(self, page: Path, nightly: bool) -> None:
        self.prepare(page.read_text())
        with contextlib.chdir(self.folder), patch.dict(os.environ, TORCH_HOME=str(self.folder / TORCH_HOME)):
            for block in blocks(page):
                if nightly or not block.nightly:
                    self.do(block)

    def prepare(self, text: str) -> None:
        """The files that pages speak of: recipes, scripts, a reader's data, runs of other pages, other programs'."""
        from tests.docs.files import write_files  # it reads golden fixtures, which a copy of the tests may lack

        if "from transformers" in text:
            require_torchvision()  # transformers imports it, also where it was built for another torch
        for name in ("benchmarks", "tools"):
            (self.folder / name).symlink_to(ROOT / name)
        write_data(self.folder)
        write_files(self.folder, text)
        for name, task in STAND_INS.items():
            if f"runs/{name}" in text and f"--out runs/{name}" not in text:
                shutil.copytree(self.runs[task], self.folder / "runs" / name)

    def do(self, block: Block) -> None:
        if block.title:
            (self.folder / block.title).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / block.title).write_text(block.text)
        elif block.language == "python" and not lacks(block.text):
            exec(compile(block.text, "block", "exec"), self.names)
        elif block.language == "yaml":
            Recipe.parse("part", with_part(yaml.safe_load(block.text)))
        elif block.language == "sh":
            for words in commands(block):
                self.line(words)

    def line(self, words: list[str]) -> None:
        given, target = "", None
        if ">" in words:
            words, target = words[: words.index(">")], Path(words[words.index(">") + 1])
        if "<" in words:
            words, given = words[: words.index("<")], Path(words[words.index("<") + 1]).read_text()
        if "|" in words:
            given, words = self.command(words[: words.index("|")]), words[words.index("|") + 1 :]
        said = self.command(words, given)
        if target is not None:
            target.write_text(said)

    def command(self, words: list[str], given: str = "") -> str:
        """Runs one command with this standard input; returns what it prints."""
        program, *rest = words
        if program == "echo":
            return " ".join(rest) + "\n"
        if program == "subquad":
            return self.subquad(rest, given)
        if program == "python":
            return in_process([*rest, *SCRIPTS[rest[1] if rest[0] == "-m" else rest[0]]])
        if program == "torchrun":
            return self.torchrun(rest)
        if program == "make":
            return make(*rest)
        if program == "docker":
            return self.docker(*rest)
        if program in ("python3", "."):
            assert ".venv" in rest[-1], f"nobody runs {shlex.join(words)} here"
            return ""
        if program == "pip":
            extras = re.search(r"\[(.*)\]", rest[-1])
            check_extras(extras[1] if extras else "")
            return ""
        raise AssertionError(f"nobody runs {shlex.join(words)} here")

    def subquad(self, words: list[str], given: str = "") -> str:
        if words[0] == "train" and "--dry-run" not in words:
            if is_large(words[1]):  # the recipe is checked, and a run of its task is there afterwards
                changes = [word for word in words[2:] if "=" in word]
                task = read_recipe(Path(words[1]), changes).task
                shutil.copytree(self.runs[task], words[words.index("--out") + 1], dirs_exist_ok=True)
                return call(["train", words[1], *changes, "--dry-run"], given)
            if words[1].endswith("/recipe.yaml"):  # a run that was imported: one update from where it stands
                stored = Path(words[1]).parent.glob("checkpoints/update-*")
                done = max(int(path.name.removeprefix("update-")) for path in stored)
                return call([*words, f"train.updates={done + 1}"], given)
        if words[0] == "doctor":  # test_doctor.py imports the packages of all extras, which takes its time
            with patch("subquad.packages.find_broken", return_value={}):
                return call(words, given)
        return call(shortened(words), given)

    def torchrun(self, words: list[str]) -> str:
        """Processes of one machine; where there are several, each is a torchrun of one process on this one."""
        place = words.index("subquad") + 1
        own, command = words[:place], words[place:]
        count = int(next(word for word in own if word.startswith("--nproc-per-node=")).partition("=")[2])
        if is_large(command[1]):
            assert read_recipe(Path(command[1]), []).train.accumulate % count == 0, "processes cannot share an update"
            return self.subquad(command)
        launch = ["-m", "torch.distributed.run"]
        if "--nnodes=2" not in own:
            return in_process([*launch, *own, *shortened(command)])
        own = [word.replace("FIRST:29500", f"localhost:{free_port()}").replace(f"={count}", "=1") for word in own]
        with ThreadPoolExecutor() as machines:
            both = [machines.submit(in_process, [*launch, *own, *shortened(command)]) for _ in range(2)]
        return "".join(one.result() for one in both)

    def docker(self, action: str, *words: str) -> str:
        """What is built is what the project has; what is run is run here."""
        if action == "build":
            options = dict(zip(words[::2], words[1::2], strict=False))
            assert (ROOT / options["--file"]).is_file()
            check_extras(options["--build-arg"].removeprefix("EXTRAS="))
            self.images.add(options["--tag"])
            return ""
        (image,) = self.images & set(words)
        inside = words[words.index(image) + 1 :]
        return self.subquad(list(inside))


def is_large(recipe: str) -> bool:
    """Whether a recipe trains for days, on data that is not here."""
    return recipe in names() and "/" not in recipe


def make(target: str, *variables: str) -> str:
    """What the target does has tests of its own, but for a torture that is chosen."""
    assert f"\n{target}:" in (ROOT / "Makefile").read_text(), f"there is no target {target}"
    if target == "torture" and variables:
        return in_process(["-m", "torture", *shlex.split(variables[0].removeprefix("ONLY=")), *TORTURE], ROOT)
    assert not variables, f"nobody looks at {variables} here"
    return ""


def check_extras(names: str) -> None:
    """names: extras of the package with commas between them."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(filter(None, names.split(","))) <= known.keys(), f"unknown extras in {names}"


def lacks(program: str) -> bool:
    """Whether it imports a package that is not installed, and need not be."""
    imported = set(re.findall(r"^(?:import|from) (\w+)", program, re.MULTILINE))
    return any(importlib.util.find_spec(name) is None for name in imported & NOT_OURS)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return one.getsockname()[1]


def shortened(words: list[str]) -> list[str]:
    """The same command with less to do."""
    if words[0] == "average":
        counts = {"--epochs", "--updates", "--up-to"}
        kept = [word for place, word in enumerate(words) if not {word, words[place - 1]} & counts]
        return [*kept, *(["--updates", "1"] if counts & set(words) else [])]
    if "--dry-run" in words:
        return words
    if words[0] in ("train", "compare") and {"phrases", "phrases.yaml"} & set(words):
        words = [*words, *FEW_PHRASES]
    if "cifar10_softmax" in words:  # of the few images that stand for the set
        words = [*words, "data.hold_out=20"]
    if "speeches_long" in words:  # blocks that fit into a short batch
        words = [*words, "data.blocks.tokens_per_sample=256"]
    if "--tune" in words:
        words = [*words, "--tune", "1"]
    if "--quality-lengths" in words:
        words = [*words, "--quality-lengths", "16,32"]
    if "--context-window" in words:  # less than a sample of the small runs has
        words = [*words, "--context-window", "16"]
    return [*words, *SHORT.get(words[0], [])]


def call(words: list[str], given: str = "") -> str:
    """Runs subquad in this process."""
    said, complaints, before = io.StringIO(), io.StringIO(), sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(given.encode()))
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complaints):
            code = run(words)
    finally:
        sys.stdin = before
    only_lacks_data = "--dry-run" in words and is_large(words[1]) and ": missing: " in complaints.getvalue()
    assert code == 0 or only_lacks_data, f"subquad {shlex.join(words)}: {complaints.getvalue()}"
    return said.getvalue()


def in_process(words: list[str], folder: Path | None = None) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=False)
    assert done.returncode == 0, f"{shlex.join(words)}: {done.stderr}"
    return done.stdout


def with_part(part: dict[str, Any]) -> dict[str, Any]:
    """A whole recipe with this part of one, of the task that it names; data is taken as it is."""
    whole = merge_options(WHOLE, SMALL.get(part.get("task", ""), {}))
    return merge_options(whole, part) | {"data": part.get("data", WHOLE["data"])}


def write_data(folder: Path) -> None:
    """A reader's own files: parallel text, plain text, texts and images in class folders, one image, lines."""
    (folder / "data/text").mkdir(parents=True)
    units, languages = ("km", "kg", "days", "May"), {"en": "the {} {}", "de": "die {} {}"}
    for split, count in {"train": 60, "valid": 8, "test": 8}.items():
        for language, pattern in languages.items():
            lines = [pattern.format(number, units[number % len(units)]) for number in range(count)]
            (folder / f"data/{split}.{language}").write_text("\n".join(lines) + "\n")
        (folder / f"data/text/{split}.txt").write_text("My fellow citizens, the year was good.\n" * count)
        for label in ("pos", "neg"):
            reviews = folder / "data/reviews" / split / label
            reviews.mkdir(parents=True)
            for number in range(4):
                (reviews / f"{number}.txt").write_text(f"a {label} film, {number} of 4\n")
        for place, name in enumerate(("cat", "dog")):
            images = folder / "data/images" / split / name
            images.mkdir(parents=True)
            for number in range(3):
                Image.fromarray(np.full((32, 32, 3), 80 * place + 20 * number, np.uint8)).save(images / f"{number}.png")
    (folder / "data/my.txt").write_text("My fellow citizens, the year was good.\n" * 60)
    (folder / "input.txt").write_text("the 5 km\nthe 3 May\n")
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(folder / "image.png")
    golden = ROOT / "tests/golden/fairseq/ckpt"
    (folder / "checkpoints").mkdir()
    shutil.copy(golden / "main_dynamic_glu.pt", folder / "checkpoints/checkpoint_best.pt")
    for name in ("dict.src.txt", "dict.tgt.txt"):
        shutil.copy(golden / name, folder / "checkpoints")


def small_runs(folder: Path) -> dict[str, Path]:
    """A run of each task of text, with an average of its checkpoints."""
    write_data(folder)
    made = {task: folder / task for task in SMALL}
    with contextlib.chdir(folder):
        for task, out in made.items():
            content = with_part({"task": task, **SMALL[task]})
            content["data"] |= {"tokenizer": {"kind": "bpe", "vocab_size": 300}}
            Path("small.yaml").write_text(yaml.safe_dump(content))
            call(["train", "small.yaml", "--out", str(out)])
            call(["average", str(out), "--updates", "1"])
    return made
