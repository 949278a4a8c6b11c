"""The wheel in the hands of a user: a fresh environment, an empty folder far from the checkout, every path to other
programs by their own clients, without torchvision and beside one whose compiled part does not load."""

import json
import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

import subquad

ROOT = Path(__file__).parent.parent
BROKEN = {
    "torchvision/__init__.py": "raise RuntimeError('operator torchvision::nms does not exist')\n",
    "torchvision-0.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.1\n",
    "torchvision-0.1.dist-info/RECORD": "torchvision/__init__.py,,\n",
}
ABSENT = {"absent.pth": "import sys; sys.modules['torchvision'] = None\n"}
TEXT = "the red house is old\na cat sees the tree\n" * 30
RECIPE = {
    "task": "language-model",
    "data": {
        "splits": {"train": "text.txt", "valid": "text.txt"},
        "tokenizer": {"kind": "bytes"},
        "blocks": {"tokens_per_sample": 32},
    },
    "model": {"preset": "lm_small", "dim": 16, "decoder": {"layers": 1, "heads": 2, "ffn_dim": 16, "mixer": "eva"}},
    "optim": {"name": "adam"},
    "schedule": {"kind": "inverse-sqrt", "lr": 1e-2, "warmup_updates": 2},
    "train": {"updates": 4, "validate_every": 4, "budget": {"max_tokens": 256}},
}
VISITOR = """
import sys
import torch

sys.modules["PIL"] = sys.modules["accelerate"] = None  # a visitor has none of them
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

trust = {"trust_remote_code": True}
assert not any(name.startswith("subquad") for name in sys.modules)
written = pipeline("text-generation", "exported", **trust)("the red", max_new_tokens=5, do_sample=False)
print(written[0]["generated_text"])
"""
LORA = """
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("exported", trust_remote_code=True)
words = AutoTokenizer.from_pretrained("exported", trust_remote_code=True)
given = words("the red house", return_tensors="pt")
tuned = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
optimiser = torch.optim.SGD(tuned.parameters(), lr=1.0)
losses = []
for _ in range(3):
    loss = tuned(**given, labels=given["input_ids"]).loss
    losses.append(loss.item())
    loss.backward()
    optimiser.step()
    optimiser.zero_grad()
assert losses[-1] < losses[0], losses
tuned.eval()
with torch.no_grad():
    before = tuned(**given).logits
    after = tuned.merge_and_unload()(**given).logits
torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)
"""
SWAP = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import subquad

sizes = {"vocab_size": 260, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)).eval()
tokens = torch.arange(24).reshape(2, 12)
model.save_pretrained("plain")
before = model(tokens).logits
report = subquad.swap(model, "eva", window=4)
model.save_pretrained("swapped")
torch.save(model(tokens).logits, "logits.pt")
report.undo()
assert torch.equal(model(tokens).logits, before)
subquad.register_attention("subquad_whole", "local", window=12)
whole = LlamaForCausalLM.from_pretrained("plain", attn_implementation="subquad_whole")
torch.testing.assert_close(whole(tokens).logits, before)
"""
SWAPPED = """
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("swapped", trust_remote_code=True)
assert torch.equal(model(torch.arange(24).reshape(2, 12)).logits, torch.load("logits.pt"))
"""
ONNX = """
import numpy
import onnxruntime

tokens = numpy.arange(20).reshape(2, 10)
session = onnxruntime.InferenceSession("onnx/model.onnx")
(logits,) = session.run(None, {"tokens": tokens, "padding": numpy.zeros(tokens.shape, bool)})
assert logits.shape[:2] == (2, 10), logits.shape
"""
NOTEBOOK = """
import importlib.resources, json

text = importlib.resources.files("subquad").joinpath("examples/own_model.ipynb").read_text()
cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
source = "\\n".join("".join(cell["source"]) for cell in cells).replace('"eva", 200', '"eva", 2')
exec(compile(source, "own_model.ipynb", "exec"), {"__name__": "__main__"})
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src" / "subquad", folder / "src" / "subquad", ignore=ignored)
    flags = ["--no-build-isolation", "--no-deps", "--no-index", "--quiet", "--wheel-dir", str(folder / "out")]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *flags, str(folder)], check=True)
    (built,) = (folder / "out").iterdir()
    return built


class User(NamedTuple):
    """Somebody with an environment, whose programs are in one folder, who works in another."""

    programs: Path
    folder: Path

    def call(self, program: str, *words: str, code: int = 0) -> str:
        """Runs a program of the environment, and returns what it says. code: the exit code that it must have."""
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        variables |= {"OMP_NUM_THREADS": "1", "HF_HOME": str(self.folder / "cache"), "HF_HUB_OFFLINE": "1"}
        command = [str(self.programs / program), *words]
        done = subprocess.run(command, cwd=self.folder, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == code, f"{program} {' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr


def install(wheel: Path, folder: Path, files: dict[str, str]) -> User:
    """The environment has the wheel and files, and takes all else from the environment of the tests."""
    environment, elsewhere = folder / "environment", folder / "elsewhere"
    elsewhere.mkdir()
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    flags = ["--no-deps", "--no-index", "--ignore-installed", "--quiet"]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), "install", *flags, str(wheel)], check=True)
    (packages,) = (environment / "lib").glob("python*/site-packages")
    for name, text in files.items():
        (packages / name).parent.mkdir(exist_ok=True)
        (packages / name).write_text(text)
    (packages / "shared.pth").write_text("\n".join(site.getsitepackages()))  # read after the environment's own
    return User(python.parent, elsewhere)


@pytest.fixture(scope="module")
def user(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> User:
    return install(wheel, tmp_path_factory.mktemp("user"), ABSENT)


def test_the_wheel_is_pure_python_and_complete(wheel: Path) -> None:
    source = wheel.parents[1] / "src" / "subquad"
    assert wheel.name == f"subquad-{subquad.__version__}-py3-none-any.whl"
    expected = {f"subquad/{path.relative_to(source).as_posix()}" for path in source.rglob("*") if path.is_file()}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert expected <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.nightly
def test_the_source_distribution_has_what_its_tests_need(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", ".*", "build", "dist", "site", "*.egg-info")
    shutil.copytree(ROOT, tmp_path / "checkout", ignore=ignored)
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=tmp_path / "checkout", check=True)
    (made,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(made) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("CHANGELOG.md", "docs", "tests", "tools", "src/subquad/recipes"):
        path = ROOT / name
        files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
        expected = {one.relative_to(ROOT).as_posix() for one in files if "__pycache__" not in one.parts}
        assert expected <= names, sorted(expected - names)[:5]


@pytest.mark.nightly
def test_recipes_and_help(user: User) -> None:
    where = user.call("python", "-c", "import subquad; print(subquad.__file__)")
    assert where.startswith(str(user.programs.parent))
    listed = user.call("subquad", "recipes")
    assert "wmt16_en_de_dynamicconv" in user.call("subquad", "recipes", "dynamicconv")
    commands = re.findall(r"^  (\w+)  +", user.call("subquad", "--help").partition("Commands:")[2], re.MULTILINE)
    for command in commands:  # what their examples name is there
        for name in re.findall(r"subquad train ([\w/]+) ", user.call("subquad", command, "--help")):
            assert Path(name).name in listed or name.startswith("runs"), name
    small = ["data.options={train: 200, valid: 20, test: 20}", "train.updates=2", "schedule.warmup_updates=1"]
    assert "after 2 updates" in user.call("subquad", "train", "phrases", *small)
    assert (user.folder / "runs/phrases/recipe.yaml").is_file()
    missing = user.call("subquad", "train", "wmt16_en_de_dynamicconv", "--dry-run", code=1)
    assert "this cannot be trained" in missing
    user.call("subquad", "recipes", "--copy", "digits")
    assert (user.folder / "digits.yaml").is_file()


@pytest.mark.nightly
def test_exported_models(user: User) -> None:
    """A visitor's pipeline, PEFT, lm-evaluation-harness and ONNX Runtime."""
    (user.folder / "text.txt").write_text(TEXT)
    (user.folder / "own.yaml").write_text(yaml.safe_dump(RECIPE))
    user.call("subquad", "train", "own.yaml", "--out", "run")
    user.call("subquad", "export", "run", "--to", "huggingface", "--out", "exported")
    user.call("subquad", "export", "run", "--to", "onnx", "--out", "onnx")
    assert "the red" in user.call("python", "-c", VISITOR)
    user.call("python", "-c", LORA)
    user.call("python", "-c", ONNX)
    pytest.importorskip("lm_eval", reason="pip install 'subquad[lm-eval]'")
    (user.folder / "rows.json").write_text('{"text": "the red house is old"}\n')
    task = {
        "task": "lines",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(user.folder / "rows.json")}},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    }
    (user.folder / "lines.yaml").write_text(yaml.safe_dump(task))
    words = ["--tasks", "lines", "--include_path", str(user.folder), "--device", "cpu"]
    ours = ["-m", "subquad.interop.lm_eval", "--model", "subquad", "--model_args", "run=run"]
    theirs = ["-m", "lm_eval", "--model", "hf"]
    theirs += ["--model_args", "pretrained=exported,trust_remote_code=True,max_length=32"]
    rows = [user.call("python", *chosen, *words) for chosen in (ours, theirs)]
    values = [re.findall(r"bits_per_byte\s*\|\W*([\d.]+)", row) for row in rows]
    assert values[0], rows[0]
    assert [float(value) for value in values[0]] == pytest.approx([float(value) for value in values[1]], rel=1e-3)


@pytest.mark.nightly
def test_models_of_transformers(user: User) -> None:
    """Swapped, undone, saved, loaded by somebody else; an attention implementation; the notebook of one's own model."""
    user.call("python", "-c", SWAP)
    user.call("python", "-c", SWAPPED)
    user.call("python", "-c", NOTEBOOK)
    assert "step 1: loss" in user.call("python", "-m", "subquad.examples.own_model", "eva", "--steps", "1")


@pytest.mark.nightly
def test_beside_a_broken_torchvision(wheel: Path, tmp_path: Path) -> None:
    """doctor tells it; what imports transformers after us works."""
    user = install(wheel, tmp_path, BROKEN)
    found = json.loads(user.call("subquad", "doctor", "--json"))
    (torchvision,) = [one for one in found["findings"] if one["name"] == "torchvision"]
    assert "operator torchvision::nms does not exist" in torchvision["text"]
    user.call("python", "-c", f"import subquad.interop.huggingface{SWAP}")
    (user.folder / "text.txt").write_text(TEXT)
    small = ["--length", "16", "--batch", "2", "--no-controls", "--dry-run"]
    user.call(
        "subquad", "linearise", "plain", "--mixer", "local=window=4", "--data", "text.txt", "--tune", "lora", *small
    )
    user.call("subquad", "train", "digits", "train.updates=2", "schedule.warmup_updates=1")
