"""A mechanism is one file, in a package of its own or in the tree: the one that docs/guides/own-mechanism.md builds."""

import importlib.util
import json
import os
import re
import shutil
import site
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from subquad.mixers import registry
from tests.docs.pages import ROOT, blocks, titled
from tests.preloaded import afresh

pytestmark = pytest.mark.usefixtures("preloaded_programs")

GUIDE = ROOT / "docs/guides/own-mechanism.md"
MODULE = "gated-linear/gated_linear.py"
TINY = ["data.options.train=200", "data.options.valid=20", "data.options.test=20", "train.updates=2"]
TINY += ["train.budget.max_tokens=512", "schedule.warmup_updates=1", "data.tokenizer.vocab_size=300"]


def write_package(folder: Path) -> Path:
    """The files of the guide, where it says that they are."""
    for block in blocks(GUIDE):
        if block.title:
            path = folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
    return folder / "gated-linear"


def call(python: Path | str, *words: str, folder: Path, path: list[Path] | None = None, **options: str) -> str:
    """What a command says; it must succeed. path: beside the source of this checkout."""
    given = os.pathsep.join(map(str, path or [ROOT / "src"]))
    environment = os.environ | {"PYTHONPATH": given, "OMP_NUM_THREADS": "1"} | options
    done = subprocess.run(
        [str(python), *words], env=environment, capture_output=True, text=True, cwd=folder, check=False
    )
    assert done.returncode == 0, f"{' '.join(words)}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def passed(report: str) -> int:
    found = re.search(r"(\d+) passed", report)
    assert found is not None
    assert "failed" not in report
    return int(found[1])


# ---------------------------------------------------------------------- in a package of its own


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the guide's package in it; what subquad needs is taken from the tests' own."""
    folder = tmp_path_factory.mktemp("own")
    write_package(folder)
    python = folder / "environment/bin/python"
    call(sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", "environment", folder=folder)
    here = call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=folder).strip()
    ours = "".join(f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages())
    (Path(here) / "ours.pth").write_text(ours)  # a virtual environment's own packages are no system packages
    flags = ["--no-index", "--no-deps", "--no-build-isolation", "--quiet"]
    call(sys.executable, "-m", "pip", "--python", str(python), "install", *flags, "./gated-linear", folder=folder)
    shutil.rmtree(folder / "gated-linear/build", ignore_errors=True)
    (folder / "gated-linear/gated_linear.py").unlink()  # what is used below is what was installed
    return folder


@pytest.mark.nightly
def test_the_package_keeps_the_contract(installed: Path) -> None:
    """One line of the package's test file, in the fresh environment."""
    report = call(installed / "environment/bin/python", "-m", "pytest", "gated-linear", folder=installed)
    assert passed(report) > 60


COMMANDS = """
import json, sys
from subquad.cli.main import run
from tools.docs import mechanism_table

assert "| [gla](docs/mechanisms.md#gla) | Gated linear attention" in mechanism_table()
for words in json.loads(sys.argv[1]):
    assert run(words) == 0, words
"""


def test_commands_find_the_package(installed: Path) -> None:
    """A recipe of ours is trained with it, goes on and is evaluated, in the fresh environment."""
    recipe = "phrases"
    words = [
        ["info", "gla"],
        [
            "bench",
            "--mixers",
            "gla",
            "--causal",
            "--lengths",
            "16",
            "--dim",
            "16",
            "--heads",
            "2",
            "--out",
            "bench.json",
        ],
        ["train", recipe, "model.decoder.mixer=gla", *TINY, "--out", "run"],
        ["train", "run/recipe.yaml", "train.updates=3"],
        ["evaluate", "run", "decode.beam=1", "decode.max_len_a=0", "decode.max_len_b=5"],
    ]
    python = installed / "environment/bin/python"
    said = call(python, "-c", COMMANDS, json.dumps(words), folder=installed, path=[ROOT / "src", ROOT])
    assert "S_t = a_t S_{t-1} + k_t v_t^T" in said
    assert "after 2 updates" in said
    assert "after 3 updates" in said
    rows = json.loads((installed / "bench.json").read_text())["rows"]
    assert [(row["mixer"], row["status"]) for row in rows] == [("softmax", "done"), ("gla", "done")]
    stored = json.loads((installed / "run/environment.json").read_text())["mechanisms"]
    assert stored == {"gla": {"module": "gated_linear", "package": "gated-linear", "version": "0.1.0"}}


@pytest.mark.nightly
def test_the_package_is_compared_with_others(installed: Path) -> None:
    python, recipe = installed / "environment/bin/python", "phrases"
    words = ["compare", recipe, *TINY, "decode.beam=1", "--mixers", "lightconv,gla", "--baseline", "lightconv"]
    words += ["--lengths", "16", "--tokens", "32", "--rounds", "1", "--seeds", "1", "--out", "both"]
    assert "gla" in call(python, "-m", "subquad", *words, folder=installed)
    result = json.loads((installed / "both/result.json").read_text())
    (remark,) = [note for note in result["notes"] if "gla" in note]
    assert remark == "gla is causal only: the encoder has lightconv."


def test_a_module_needs_no_installation(tmp_path: Path) -> None:
    package = write_package(tmp_path)
    words = ["-m", "subquad", "info", "gla", "--plugin", "gated_linear"]
    assert "gated_linear.GatedLinearAttention(dim=256, heads=4)" in call(sys.executable, *words, folder=package)


# ---------------------------------------------------------------------- in the tree


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the package and its tests with one file more."""
    for name in ("src", "tests", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "golden"))
    (tmp_path / "src/subquad/mixers/gla.py").write_text(titled(GUIDE, MODULE))
    return tmp_path


def test_a_mechanism_in_the_tree_is_one_new_file(tree: Path) -> None:
    code = """
import pytest
from subquad.cli.main import run
from subquad.mixers import GatedLinearAttention, available
from tools.docs import mechanism_table, mechanisms_page

assert "gla" in available()
assert "| [gla](docs/mechanisms.md#gla) | Gated linear attention" in mechanism_table()
assert "## gla" in mechanisms_page()
assert run(["info", "gla"]) == 0
raise SystemExit(pytest.main(["tests/mixers/test_contract.py", "-k", "gla and chunk3", "-m", "not nightly"]))
"""
    with afresh():
        said = call(sys.executable, "-c", code, folder=tree, path=[tree / "src", tree])
    assert "Python: subquad.mixers.GatedLinearAttention(dim=256, heads=4)" in said
    assert passed(said) > 30


# ---------------------------------------------------------------------- its mathematics


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    spec = importlib.util.spec_from_file_location("gated_linear", write_package(tmp_path) / "gated_linear.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gated_linear", made)
    spec.loader.exec_module(made)
    return made


def test_its_equation_is_what_it_computes(module: ModuleType) -> None:
    mixer = module.GatedLinearAttention(dim=12, heads=3, chunk=4).double().eval()
    x = torch.randn(1, 11, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q, k, v = mixer.qkv(x[0]).view(11, 3, 3, 4).unbind(1)
    a = mixer.gate(x[0]).sigmoid()
    memory, outputs = torch.zeros(3, 4, 4, dtype=torch.float64), []
    for t in range(11):
        memory = a[t, :, None, None] * memory + k[t, :, :, None] * v[t, :, None, :]
        outputs.append(torch.einsum("hij,hi->hj", memory, q[t]) / 4**0.5)
    expected = mixer.out(torch.stack(outputs).flatten(1))
    torch.testing.assert_close(mixer(x).y[0], expected, rtol=1e-12, atol=1e-12)
