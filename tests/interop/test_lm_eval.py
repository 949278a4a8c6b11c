"""The adapter under the real lm-evaluation-harness, with tasks in local files."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

lm_eval = pytest.importorskip("lm_eval", reason="pip install 'subquad[lm-eval]'")

from subquad.cli.main import run as command  # noqa: E402
from subquad.interop.lm_eval import SubquadLM  # noqa: E402
from subquad.train.run import evaluate_run, load_trained  # noqa: E402

LINES = [
    f"the {thing} is {colour} and the {thing} is old"
    for thing in ("house", "cat", "tree")
    for colour in ("red", "blue")
]
TEXT = "\n".join(LINES)[:192]  # three samples of 64 bytes
RECIPE: dict[str, Any] = {
    "task": "language-model",
    "data": {"tokenizer": {"kind": "bytes"}, "blocks": {"tokens_per_sample": 64}},
    "model": {"preset": "lm_small", "dim": 16, "decoder": {"layers": 1, "heads": 2, "ffn_dim": 16}},
    "optim": {"name": "adam"},
    "schedule": {"kind": "inverse-sqrt", "lr": 1e-2, "warmup_updates": 2},
    "train": {"updates": 60, "validate_every": 60, "budget": {"max_tokens": 512}},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lm-eval")
    (folder / "text.txt").write_text("".join(f"{line}\n" for line in LINES * 20))
    (folder / "test.txt").write_text(TEXT + "\n")
    splits = {"train": str(folder / "text.txt"), "valid": str(folder / "text.txt"), "test": str(folder / "test.txt")}
    recipe = RECIPE | {"data": {**RECIPE["data"], "splits": splits}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert command(["train", str(folder / "recipe.yaml"), "--out", str(folder / "run")]) == 0
    return folder / "run"


def task(folder: Path, rows: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """A task of the harness on these rows."""
    path = folder / f"{options['task']}.json"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}}, "test_split": "test"}
    return {**data, **options}


def test_the_harness_runs_its_kinds_of_tasks(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    rolling = task(
        tmp_path,
        [{"text": TEXT}],
        task="rolling",
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[{"metric": "bits_per_byte"}],
    )
    choices = task(
        tmp_path,
        [{"start": "the house is", "ends": ["red and", "%%%%%%%"], "right": 0}],
        task="choices",
        output_type="multiple_choice",
        doc_to_text="{{start}}",
        doc_to_choice="{{ends}}",
        doc_to_target="{{right}}",
    )
    written = task(
        tmp_path,
        [{"start": "the cat", "end": "x"}, {"start": "the\ntree", "end": "x"}],
        task="written",
        output_type="generate_until",
        doc_to_text="{{start}}",
        doc_to_target="{{end}}",
        generation_kwargs={"until": ["e"], "max_gen_toks": 8},
        metric_list=[{"metric": "exact_match"}],
    )
    found = lm_eval.simple_evaluate(
        model="subquad",
        model_args={"run": str(run)},
        batch_size=2,
        tasks=[rolling, choices, written],
        bootstrap_iters=0,
    )
    results = found["results"]
    assert results["choices"]["acc,none"] == 1.0
    texts = [sample["resps"][0][0] for sample in found["samples"]["written"]]
    assert len(texts) == 2
    assert all("e" not in said and len(said) <= 8 for said in texts)
    # Whole samples are scored alike by both; ours also counts the end of the last line, in a sample of its own.
    trained = load_trained(run)
    ours = evaluate_run(trained, "test").measures["ppl"].statistics
    assert ours[:, 1].sum() == len(TEXT) + 1
    words = trained.tokenizer("text")
    with torch.no_grad():
        logits = trained.model(torch.tensor([words.encode(TEXT[-1])])).logits[0, 0]
    theirs = results["rolling"]["bits_per_byte,none"] * len(TEXT) * math.log(2)
    assert theirs - float(logits.log_softmax(-1)[words.eos]) == pytest.approx(ours[:, 0].sum(), rel=1e-5)


@pytest.mark.nightly
def test_the_command_line_of_the_harness(run: Path, tmp_path: Path) -> None:
    """Our model and the exported one have the same results in tasks of a folder, by the harness's own commands."""
    rolling = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
    choice = {"output_type": "multiple_choice", "doc_to_text": "{{start}}", "doc_to_choice": "{{ends}}"}
    rows: dict[str, list[dict[str, Any]]] = {
        "line": [{"text": line} for line in (*LINES, " ".join(LINES))],
        "colours": [
            {"start": "the house is", "ends": ["red and", "%%% %%%"], "right": 0},
            {"start": "the cat is", "ends": ["@@@@ @@@", "blue and"], "right": 1},
            {"start": "the tree is", "ends": ["blue and", "qqqq qqq"], "right": 0},
        ],
    }
    tasks: dict[str, dict[str, Any]] = {
        "line": {**rolling, "metric_list": [{"metric": "bits_per_byte"}]},
        "colours": {**choice, "doc_to_target": "{{right}}", "metric_list": [{"metric": "acc"}]},
    }
    for name, options in tasks.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(task(tmp_path, rows[name], task=name, **options)))
    assert command(["export", str(run), "--to", "huggingface", "--out", str(tmp_path / "exported")]) == 0
    exported = f"pretrained={tmp_path / 'exported'},trust_remote_code=True,max_length=64"
    found = {}
    for module, model, arguments in (
        ("subquad.interop.lm_eval", "subquad", f"run={run}"),
        ("lm_eval", "hf", exported),
    ):
        words = [
            "--model",
            model,
            "--model_args",
            arguments,
            "--tasks",
            "line,colours",
            "--include_path",
            str(tmp_path),
        ]
        words += ["--device", "cpu", "--output_path", str(tmp_path / model)]
        env = os.environ | {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run([sys.executable, "-m", module, *words], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (result,) = (tmp_path / model).rglob("results_*.json")
        found[model] = json.loads(result.read_text())["results"]
    ours, theirs = found["subquad"], found["hf"]
    assert ours["colours"]["acc,none"] == theirs["colours"]["acc,none"] == 1.0
    assert ours["line"]["bits_per_byte,none"] == pytest.approx(theirs["line"]["bits_per_byte,none"], rel=1e-4)


def test_a_context_is_cut_and_a_continuation_is_not(run: Path) -> None:
    model = SubquadLM(run)
    said = model.tok_encode("red")
    long, short = model.tok_encode("the cat is " * 30), model.tok_encode("the cat is " * 30)[-64 + 3 - 1 :]
    (cut,), (whole,) = (
        model._loglikelihood_tokens([(None, long, said)]),
        model._loglikelihood_tokens([(None, short, said)]),
    )
    assert cut[0] == pytest.approx(whole[0], abs=1e-5)
    with pytest.raises(ValueError, match="longer than the 64"):
        model._loglikelihood_tokens([(None, said, long)])


def test_other_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no run"):
        SubquadLM(tmp_path)
