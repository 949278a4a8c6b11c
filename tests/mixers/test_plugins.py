"""Mechanisms of other packages: found by entry points or `--plugin`, loaded when asked for, refused by name."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from subquad.cli.main import run
from subquad.mixers import available, build, load_plugin, mixer_class, registry
from subquad.models import build_model
from subquad.models.storage import load_model, save_model
from subquad.packages import PLUGINS, plugins

ROOT = Path(__file__).parent.parent.parent
RECIPE = """
task: language-model
data:
  splits: {train: TEXT, valid: TEXT, test: TEXT}
  tokenizer: {kind: characters}
  blocks: {tokens_per_sample: 16}
model: {preset: lm_small, decoder: {layers: 1}}
schedule: {kind: constant, lr: 1.0e-3}
train: {updates: 1, budget: {max_tokens: 64}}
"""

MODULE = '''"""Running sum: every token becomes the sum of those up to it, mapped.

Equation:
    y_t = W (x_1 + ... + x_t)
"""

from torch import nn

from subquad.mixers import Capabilities, Mixer, register

{register}
class RunningSum(Mixer):
    capabilities = Capabilities(causal=True, cross=False, grid=False, state="none", bidirectional=False)

    def setup(self):
        self.out = nn.Linear(self.config.dim, self.config.dim)

    def mix(self, x, layout):
        return self.out(x.cumsum(1)), None
'''
DECORATED = MODULE.format(register='@register("runningsum")')

Install = Callable[..., None]


@pytest.fixture(autouse=True)
def clean_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers, imports and installs is gone after it."""
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    monkeypatch.setattr(registry, "_IMPORTED", set())
    monkeypatch.delenv(PLUGINS, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    registry._entry_points.cache_clear()
    for module in set(sys.modules) - before:
        if module.startswith("outside"):
            del sys.modules[module]


@pytest.fixture
def install(tmp_path: Path) -> Install:
    """Installs a package of one module as pip would leave it: the module, and a folder of metadata."""

    def add(package: str, module: str, code: str, entry_points: dict[str, str]) -> None:
        folder = tmp_path / package
        metadata = folder / f"{package.replace('-', '_')}-1.5.dist-info"
        metadata.mkdir(parents=True)
        (folder / f"{module}.py").write_text(code)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.5\n")
        lines = [f"{name} = {value}" for name, value in entry_points.items()]
        (metadata / "entry_points.txt").write_text("\n".join([f"[{registry.GROUP}]", *lines]))
        sys.path.insert(0, str(folder))
        registry._entry_points.cache_clear()

    return add


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    """A recipe that trains for a moment."""
    text, file = tmp_path / "text.txt", tmp_path / "tiny.yaml"
    text.write_text("a few words and a few more\n" * 8)
    file.write_text(RECIPE.replace("TEXT", str(text)))
    return str(file)


# ---------------------------------------------------------------------- entry points


@pytest.mark.parametrize(
    ("code", "value"), [(DECORATED, "outside"), (DECORATED, "outside:RunningSum"), (MODULE, "outside:RunningSum")]
)
def test_a_mechanism_of_an_installed_package_is_loaded_when_asked_for(install: Install, code: str, value: str) -> None:
    install("outside-sums", "outside", code.format(register=""), {"runningsum": value})
    assert "runningsum" in available()
    build("softmax", dim=8)
    assert "outside" not in sys.modules
    assert build("runningsum", dim=8)(torch.ones(1, 3, 8)).y.shape == (1, 3, 8)
    assert mixer_class("runningsum").__module__ == "outside"


def test_it_stands_in_tables_and_recipes(install: Install, recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    from tools.docs import mechanism_table, mechanisms_page

    install("outside-sums", "outside", DECORATED, {"runningsum": "outside"})
    assert run(["info"]) == 0
    assert "runningsum" in capsys.readouterr().out
    assert "| [runningsum](docs/mechanisms.md#runningsum) | Running sum: every token" in mechanism_table()
    assert "y_t = W (x_1 + ... + x_t)" in mechanisms_page()
    assert run(["train", recipe, "model.decoder.mixer=runningsum", "--dry-run"]) == 0
    assert "parameters" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "entry_points", "message"),
    [
        ("import outside_missing", {"broken": "outside"}, "ModuleNotFoundError: No module named 'outside_missing'"),
        ("1 / 0", {"broken": "outside"}, "ZeroDivisionError: division by zero"),
        ("", {"broken": "outside_missing"}, "ModuleNotFoundError: No module named 'outside_missing'"),
        (DECORATED, {"broken": "outside:Nothing"}, "AttributeError: module 'outside' has no attribute 'Nothing'"),
        (DECORATED, {"broken": "outside"}, "outside registers no mechanism of this name"),
        (DECORATED, {"broken": "outside:RunningSum"}, "outside:RunningSum registers no mechanism of this name"),
    ],
)
def test_a_broken_package_is_one_line_that_names_it(
    install: Install, capsys: pytest.CaptureFixture[str], code: str, entry_points: dict[str, str], message: str
) -> None:
    install("outside-sums", "outside", code, entry_points)
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        build("broken", dim=8)
    expected = f"the mechanism 'broken' of the package outside-sums 1.5 cannot be loaded: {message}"
    assert str(refusal.value) == expected
    assert build("lara", dim=8).name == "lara", "the others work"
    with pytest.warns(UserWarning, match="the package outside-sums 1.5 cannot be loaded"):
        assert run(["info"]) == 0
    assert "softmax" in capsys.readouterr().out
    assert run(["bench", "--mixers", "broken", "--lengths", "8"]) == 1
    assert capsys.readouterr().err == f"subquad: error: {expected}\n"


def test_names_that_collide_are_refused_by_name(install: Install) -> None:
    install("outside-eva", "outside_eva", MODULE.format(register=""), {"eva": "outside_eva:RunningSum"})
    with pytest.raises(ValueError, match=r"'eva', of the package outside-eva 1.5 and the module subquad.mixers.eva"):
        build("eva", dim=8)
    assert "outside_eva" not in sys.modules
    for package in ("outside-a", "outside-b"):
        module = package.replace("-", "_")
        install(package, module, MODULE.format(register=""), {"runningsum": f"{module}:RunningSum"})
    with pytest.raises(ValueError, match=r"'runningsum', of the package outside-b 1.5 and the package outside-a 1.5"):
        build("runningsum", dim=8)
    assert available().count("eva") == available().count("runningsum") == 1
    assert build("local", dim=8).name == "local", "the others work"


# ---------------------------------------------------------------------- --plugin


def test_a_module_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "outside.py").write_text(DECORATED)
    monkeypatch.chdir(tmp_path)
    assert run(["info", "runningsum"]) == 1
    assert "no mechanism or preset is called 'runningsum'" in capsys.readouterr().err
    assert run(["info", "runningsum", "--plugin", "outside"]) == 0
    assert "y_t = W (x_1 + ... + x_t)" in capsys.readouterr().out
    assert plugins() == [], "a command leaves nothing behind for the next"
    bench = ["bench", "--mixers", "runningsum", "--causal", "--lengths", "8", "--dim", "8", "--heads", "2", "--json"]
    assert run([*bench, "--repeats", "1", "--plugin=outside"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["mixer"]: row["status"] for row in rows} == {"softmax": "done", "runningsum": "done"}


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("outside_missing", "ModuleNotFoundError: No module named 'outside_missing'"),
        ("json", "it registers no mechanism; decorate a Mixer with @subquad.mixers.register"),
        ("outside", "two mechanisms are called 'eva': subquad.mixers.eva and outside"),
    ],
)
def test_plugins_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], module: str, message: str
) -> None:
    (tmp_path / "outside.py").write_text(MODULE.format(register='@register("eva")'))
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # the second command meets what the first has left
        assert run(["info", "softmax", "--plugin", module]) == 1
        assert capsys.readouterr().err == f"subquad: error: the plugin {module} cannot be used: {message}\n"


def test_children_know_the_plugins_of_their_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outside.py").write_text(DECORATED)
    monkeypatch.chdir(tmp_path)
    load_plugin("outside")
    code = "from subquad.mixers import available; print('runningsum' in available())"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


@pytest.mark.nightly
def test_a_comparison_trains_and_measures_a_plugin(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "outside.py").write_text(DECORATED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    words = ["compare", recipe, "--mixers", "softmax,runningsum", "--lengths", "16", "--tokens", "32"]
    assert run([*words, "--no-floors", "--rounds", "1", "--seeds", "1", "--plugin", "outside", "--out", "both"]) == 0
    result = json.loads((tmp_path / "both/result.json").read_text())
    assert {(trial["mechanism"], trial["status"]) for trial in result["trials"]} == {
        ("softmax", "done"),
        ("runningsum", "done"),
    }
    assert result["command"].endswith("--plugin outside")


# ---------------------------------------------------------------------- runs and models


def test_a_run_says_which_package_its_mechanisms_came_from(
    install: Install, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install("outside-sums", "outside", DECORATED, {"runningsum": "outside"})
    out = str(tmp_path / "run")
    train = ["train", recipe, "model.decoder.mixer=runningsum", "--out", out]
    assert run(train) == 0
    stored = json.loads((tmp_path / "run/environment.json").read_text())
    assert stored["mechanisms"] == {"runningsum": {"module": "outside", "package": "outside-sums", "version": "1.5"}}
    assert run(["train", f"{out}/recipe.yaml", "train.updates=2"]) == 0, "it goes on"
    capsys.readouterr()

    sys.path.remove(str(tmp_path / "outside-sums"))  # uninstalled
    registry._entry_points.cache_clear()
    del registry._REGISTRY["runningsum"], sys.modules["outside"]
    expected = (
        f"subquad: error: the run {out} needs the mechanism 'runningsum' of the package outside-sums 1.5, which is not "
        "here; install it if you trust it, or name its module with --plugin outside\n"
    )
    monkeypatch.chdir(tmp_path / "outside-sums")  # where the module could be imported from
    for words in (["evaluate", out], ["train", f"{out}/recipe.yaml", "train.updates=3"]):
        assert run(words) == 1
        assert capsys.readouterr().err == expected
        assert "outside" not in sys.modules, "a file that names a module does not import it"
    assert run(["evaluate", out, "--plugin", "outside"]) == 0


def test_runs_without_outside_mechanisms_say_nothing_of_them(recipe: str, tmp_path: Path) -> None:
    assert run(["train", recipe, "--out", str(tmp_path / "run")]) == 0
    assert "mechanisms" not in json.loads((tmp_path / "run/environment.json").read_text())


def test_a_saved_model_says_which_package_its_mechanisms_came_from(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("outside-sums", "outside", DECORATED, {"runningsum": "outside"})
    stack = {"layers": 2, "ffn_dim": 16, "heads": 2, "mixer": "softmax,runningsum"}
    save_model(build_model("language-model", dim=8, vocab=11, decoder=stack), tmp_path / "model")
    load_model(tmp_path / "model")
    sys.path.remove(str(tmp_path / "outside-sums"))
    registry._entry_points.cache_clear()
    del registry._REGISTRY["runningsum"]
    with pytest.raises(ValueError, match=r"the model in .* needs the mechanism 'runningsum' .* outside-sums 1.5"):
        load_model(tmp_path / "model")
