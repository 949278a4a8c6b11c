"""The Python interface trains, evaluates, compares and uses models without a command line, and its examples hold."""

import contextlib
import doctest
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import subquad
from subquad import api, run
from subquad.cli.main import run as command
from subquad.compare import study
from subquad.train.diagnostics import dry_run
from tests.preloaded import afresh

pytestmark = pytest.mark.usefixtures("preloaded_programs")

ROOT = Path(__file__).parents[1]
STACK = {"layers": 1, "heads": 2, "ffn_dim": 32}
TRANSLATION = {
    "task": "translation",
    "data": {"embedded": "phrases", "options": {"train": 200, "valid": 20, "test": 20}, "tokenizer": {"kind": "bytes"}},
    "model": {"preset": "translation_small", "dim": 16, "encoder": STACK, "decoder": STACK},
    "schedule": {"kind": "constant", "lr": 1e-3},
    "train": {"updates": 2, "budget": {"max_tokens": 1024}},
    "decode": {"beam": 2, "max_len_b": 10},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recipes, a run of each kind of use, and two images of nothing."""
    made = tmp_path_factory.mktemp("api")
    with contextlib.chdir(made):
        subquad.train(TRANSLATION, out="runs/phrases", quiet=True)
        digits: Any = {
            "model": {"dim": 16, "encoder": STACK},
            "train": {"updates": 2},
            "schedule": {"warmup_updates": 1},
        }
        subquad.train("digits", out="runs/images", quiet=True, **digits)
        text = ["My fellow citizens, the year was good.\n" * 40] * 3
        for split, content in zip(("train", "valid", "test"), text, strict=True):
            Path(f"{split}.txt").write_text(content)
        data: dict[str, Any] = {"splits": {split: f"{split}.txt" for split in ("train", "valid", "test")}}
        data |= {"tokenizer": {"kind": "characters"}, "blocks": {"tokens_per_sample": 16}}
        language = TRANSLATION | {"task": "language-model", "data": data}
        subquad.train(language | {"model": {"preset": "lm_small", "dim": 16, "decoder": STACK}}, out="runs/speeches")
        np.save("images.npy", np.zeros((2, 1, 8, 8), np.float32))
    return made


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


# ---------------------------------------------------------------------- the names of the package


def test_importing_subquad_imports_nothing_heavy() -> None:
    code = "import sys, subquad; subquad.train, subquad.evaluate; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    with afresh():
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("name", subquad.__all__)
def test_every_name_is_there_and_explained(name: str) -> None:
    assert callable(getattr(subquad, name))
    assert name in dir(subquad)
    function = getattr(api, name) if hasattr(api, name) else getattr(subquad, name)
    assert inspect.getdoc(function)


@pytest.mark.parametrize("name", ["train", "evaluate", "compare"])
def test_a_folder_of_the_package_is_the_function_of_its_name(name: str) -> None:
    folder = getattr(subquad, name)
    assert inspect.signature(folder) == inspect.signature(getattr(api, name))
    assert Path(folder.__file__).name == "__init__.py"
    with pytest.raises((TypeError, ValueError), match=r"missing 1 required positional argument|say what to train"):
        folder()


def test_unknown_names_are_errors() -> None:
    with pytest.raises(AttributeError, match="module 'subquad' has no attribute 'trian'"):
        subquad.trian  # type: ignore[attr-defined]  # noqa: B018


# ---------------------------------------------------------------------- training


def test_changes_are_sections_or_words(tmp_path: Path, here: Path) -> None:
    sections = subquad.train(TRANSLATION, out=tmp_path / "a", quiet=True, train={"updates": 1}, optim={"name": "adamw"})
    words = subquad.train(TRANSLATION, "train.updates=1", "optim.name=adamw", out=tmp_path / "b", quiet=True)
    assert sections.recipe == words.recipe
    assert (sections.updates, sections.recipe.optim.name) == (1, "adamw")
    assert sections.metrics == words.metrics


def test_training_goes_on_with_a_run(tmp_path: Path, here: Path) -> None:
    first = subquad.train(TRANSLATION, out=tmp_path / "run", quiet=True)
    second = subquad.train(tmp_path / "run" / "recipe.yaml", quiet=True, train={"updates": 3})
    assert second.folder == first.folder
    assert second.updates == 3


def test_a_quiet_training_prints_nothing(tmp_path: Path, here: Path, capfd) -> None:
    subquad.train(TRANSLATION, out=tmp_path / "run", quiet=True)
    assert capfd.readouterr() == ("", "")
    subquad.train(TRANSLATION, out=tmp_path / "other")
    out, err = capfd.readouterr()
    assert not out
    assert "parameters" in err


def test_a_recipe_without_a_name_needs_a_folder() -> None:
    with pytest.raises(ValueError, match="out=FOLDER"):
        subquad.train(TRANSLATION)


def test_mistakes_are_refused_as_on_the_command_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'updates'"):
        subquad.train(TRANSLATION, out=tmp_path, train={"update": 3})


def test_a_dry_run_finds_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "train.en").write_text("a\n")
    splits = {"train": [str(tmp_path / "train.en"), str(tmp_path / "train.de")]}
    found = subquad.dry_run(TRANSLATION | {"data": {"splits": splits, "tokenizer": {"kind": "bytes"}}})
    assert found.problems == {"train": f"missing: {tmp_path / 'train.de'}"}
    assert (found.task, found.length) == ("translation", 64)
    assert found.training_bytes > 4 * found.parameters


# ---------------------------------------------------------------------- trained runs


def test_a_run_translates(here: Path) -> None:
    run = subquad.load_run("runs/phrases")
    both = run.translate(["5 km", "3 May"], beam=1)
    assert [run.translate(text, beam=1) for text in ("5 km", "3 May")] == both
    assert run.tokenizer("source").encode("a")
    with pytest.raises(ValueError, match="did you mean 'beam'"):
        run.translate("5 km", beem=1)
    with pytest.raises(ValueError, match="only language models generate text"):
        run.generate("5 km")


def test_an_ensemble_of_a_run_with_itself_translates_as_the_run(here: Path) -> None:
    run = subquad.load_run("runs/phrases", "last")
    alone, together = (run.translator(*others, nbest=2) for others in ((), (run,)))
    first, second = (next(iter(one.translate(["5 km"]))) for one in (alone, together))
    assert [one.tokens for one in first.candidates] == [one.tokens for one in second.candidates]


def test_a_run_generates(here: Path) -> None:
    run = subquad.load_run("runs/speeches")
    text = run.generate("My", tokens=5, seed=3)
    assert text.startswith("My")
    assert run.generate(["My", "the"], tokens=5, seed=3, temperature=0.0)[0].startswith("My")
    assert run.tokenizer().size == run.model.config.vocab
    with pytest.raises(ValueError, match="only runs of translation translate"):
        run.translate("My")


def test_a_run_classifies(here: Path) -> None:
    found = subquad.load_run("runs/images").classify("images.npy")
    assert list(found) == ["images.npy[0]", "images.npy[1]"]
    for classes in found.values():
        probabilities = [probability for _, probability in classes]
        assert len(classes) == 5
        assert probabilities == sorted(probabilities, reverse=True)


def test_a_folder_that_is_no_run_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no run"):
        subquad.load_run(tmp_path)


# ---------------------------------------------------------------------- evaluating


def test_evaluate_writes_and_returns_the_same(here: Path, tmp_path: Path) -> None:
    path = tmp_path / "evaluation.json"
    report = subquad.evaluate("runs/phrases", split="valid", out=path, quiet=True, resamples=10)
    assert report.path == path
    assert report.samples == 20
    stored = yaml.safe_load(path.read_text())
    assert stored["metrics"]["bleu"]["value"] == report.metrics["bleu"].value
    assert {"low", "high", "level", "resamples", "better", "signature"} <= stored["metrics"]["ppl"].keys()
    metric = report.metrics["ppl"]
    assert metric.low <= metric.value <= metric.high


def test_evaluate_takes_the_model_that_is_loaded(here: Path, tmp_path: Path) -> None:
    """A model that was changed after it was loaded is evaluated as it is."""
    run = subquad.load_run("runs/images", "last")
    before = subquad.evaluate(run, out=tmp_path / "a.json", quiet=True)
    for weights in run.model.parameters():
        weights.data.zero_()
    after = subquad.evaluate(run, out=tmp_path / "b.json", quiet=True)
    assert after.metrics["top1"].value != before.metrics["top1"].value


def test_evaluate_against_another_run(here: Path, tmp_path: Path) -> None:
    subquad.evaluate("runs/images", quiet=True)
    report = subquad.evaluate("runs/images", against="runs/images", out=tmp_path / "a.json", quiet=True, resamples=10)
    assert report.against is not None
    assert report.against.metrics["top1"].difference == 0
    with pytest.raises(ValueError, match="run of task"):
        subquad.evaluate("runs/phrases", against="runs/images", out=tmp_path / "b.json", quiet=True)


# ---------------------------------------------------------------------- the command line calls the same


def test_the_command_line_and_python_train_the_same(here: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(TRANSLATION))
    assert command(["train", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "words")]) == 0
    assert subquad.load_run(tmp_path / "words").metrics == subquad.load_run("runs/phrases").metrics


# ---------------------------------------------------------------------- examples


@pytest.mark.usefixtures("preloaded_programs")
def test_the_examples_of_the_docstrings_hold(here: Path, capfd) -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    found = [
        example
        for name, module in (("api", api), ("run", run), ("study", study), ("dry_run", dry_run))
        for example in finder.find(module, name)
        if example.examples
    ]
    functions = {f"api.{name}" for name in ("train", "evaluate", "compare", "load_run")}
    methods = {f"run.Run.{name}" for name in ("translate", "generate", "classify")}
    assert functions | methods | {"study.study", "dry_run.dry_run"} <= {one.name for one in found}
    order = ["api.train"]  # it makes the run that the others use
    for example in sorted(found, key=lambda one: (one.name not in order, one.name)):
        runner.run(example)
    assert runner.summarize(verbose=False).failed == 0, capfd.readouterr().out
