"""The command line: what it prints, how fast it answers, and how it refuses."""

import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

import subquad
from subquad.cli import output
from subquad.cli.main import run
from subquad.mixers import MixerConfig, available, mixer_class
from subquad.models import PRESETS, build_from_config, build_model


def call(capsys, *words: str) -> tuple[int, str, str]:
    code = run(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_version(capsys) -> None:
    assert call(capsys, "--version") == (0, f"subquad {subquad.__version__}\n", "")


def test_the_package_is_a_program() -> None:
    done = subprocess.run([sys.executable, "-m", "subquad", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"subquad {subquad.__version__}\n"


@pytest.mark.parametrize(("typed", "offered"), [("subquad tr", "train translate"), ("subquad train --dr", "--dry-run")])
def test_the_shell_completes_commands_and_options(typed, offered) -> None:
    """As the script asks that `--install-completion` puts into bash."""
    asked = {"_SUBQUAD_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    command = [sys.executable, "-m", "subquad"]
    done = subprocess.run(command, env=os.environ | asked, capture_output=True, text=True, check=True)
    assert done.stdout.split() == offered.split()


@pytest.mark.parametrize("words", [[], ["--help"], ["info", "--help"], ["bench", "--help"]])
def test_help(capsys, words) -> None:
    code, out, err = call(capsys, *words)
    assert code == 0
    assert "Usage: subquad" in out
    assert not err


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_threads_of_a_program_sleep_unless_the_user_says_otherwise(given, expected, monkeypatch, capsys) -> None:
    before = dict(os.environ)
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    try:
        assert run(["--version"]) == 0
        assert os.environ.get("GOMP_SPINCOUNT") == given.get("GOMP_SPINCOUNT"), (
            "a call within a program leaves it alone"
        )
        monkeypatch.setattr(sys, "argv", ["subquad", "--version"])
        monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
        assert run() == 0
        assert os.environ.get("GOMP_SPINCOUNT") == expected
    finally:
        os.environ.pop("GOMP_SPINCOUNT", None)
        os.environ.update({name: value for name, value in before.items() if name == "GOMP_SPINCOUNT"})


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from subquad.cli.main import run; run(['--help']);"
        "print(sorted({'torch', 'numpy', 'pydantic', 'rich', 'yaml', 'numba'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")


def test_a_folder_that_is_no_run_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    commands = [
        "evaluate F",
        "translate F",
        "generate F",
        "classify F a.png",
        "average F",
        "export F --to onnx --out x",
    ]
    code = (
        "import sys; from subquad.cli.main import run;"
        f"print([run(words.replace('F', {str(tmp_path)!r}).split()) for words in {commands}], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == f"{[1] * len(commands)} False\n"
    assert done.stderr.count(f"{tmp_path} is no run: it holds no recipe.yaml") == len(commands)


@pytest.mark.nightly
def test_help_answers_within_300_ms() -> None:
    seconds = []
    for _ in range(10):  # the best of ten: other work on the machine is not the command's
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "subquad.cli.main", "--help"], capture_output=True, check=True)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.3


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "unused"),
    [
        ("info", "numba torch._dynamo sacrebleu tokenizers subquad.train subquad.compare"),
        ("doctor", "sacrebleu tokenizers transformers subquad.train subquad.compare"),
        ("train digits --dry-run", "numba sacrebleu transformers subquad.compare"),
    ],
)
def test_commands_import_what_they_use(words: str, unused: str) -> None:
    code = f"import sys; from subquad.cli.main import run; run({words.split()}); print(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = done.stdout.splitlines()[-1].split()
    assert "torch" in imported
    assert not set(unused.split()) & set(imported)


def test_info_lists_every_mechanism(capsys) -> None:
    code, out, _ = call(capsys, "info")
    assert code == 0
    for name in available():
        (line,) = [line for line in out.splitlines() if line.startswith(f"{name} ")]
        for option in set(mixer_class(name).Config.model_fields) - set(MixerConfig.model_fields):
            assert option in line


def test_info_json_lists_every_mechanism_and_preset(capsys) -> None:
    _, out, _ = call(capsys, "info", "--json")
    listed = json.loads(out)
    assert [item["name"] for item in listed["mechanisms"]] == available()
    assert listed["presets"] == list(PRESETS)


@pytest.mark.parametrize("name", ["lm_small", "lightconv_iwslt_de_en", "evit_tiny_p16", "pvt_v2_b3", "text_small"])
def test_info_explains_a_preset(capsys, name) -> None:
    described = json.loads(call(capsys, "info", name, "--length", "64", "--batch", "2", "--json")[1])
    with torch.device("meta"):
        model = build_model(name)
    assert described["parameters"] == model.parameter_count()
    assert sum(part["parameters"] for part in described["parts"]) == model.parameter_count()
    assert build_from_config(described["config"]).config == model.config
    code, out, _ = call(capsys, "info", name, "--length", "64", "--batch", "2")
    assert code == 0
    assert f"{model.parameter_count():,}" in out
    assert f"{described['costs']['flops_per_token'] / 1e6:,.1f} M" in out


@pytest.mark.parametrize("name", available())
def test_info_explains_a_mechanism(capsys, name) -> None:
    code, out, _ = call(capsys, "info", name)
    assert code == 0
    for title in ("Equation:", "Cost:", "Citation:", "Options:"):
        assert f"\n{title}\n" in out
    described = json.loads(call(capsys, "info", name, "--json")[1])
    assert list(described["sections"]) == ["Equation", "Cost", "Citation"]
    assert all(described["sections"].values())
    fields = mixer_class(name).Config.model_fields
    assert [option["name"] for option in described["options"]] == list(fields)
    for option in described["options"]:
        assert option["description"], f"{name}.{option['name']} has no description"
        if not option["required"]:
            form = {} if mixer_class(name).capabilities.bidirectional else {"causal": True}
            assert option["default"] == form.get(option["name"], fields[option["name"]].default)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["info", "evaa"], "did you mean 'eva'"),
        (["nonsense"], "nonsense"),
        (["bench", "--nonsense"], "--nonsense"),
        (["bench", "--dim", "x"], "--dim"),
        (["bench", "--lengths", "8,x"], "'x' is not a whole number"),
        (["bench", "--lengths", "0"], "at least 1"),
        (["bench", "--lengths", ","], "at least 1"),
        (["bench", "--batch", "0"], "batch must be at least 1"),
        (["bench", "--threads", "0"], "at least 1"),
        (["bench", "--dim", "10", "--heads", "4"], "heads do not divide"),
        (["bench", "--mixers", "locall"], "did you mean 'local'"),
        (["bench", "--dtype", "int8"], "float32"),
        (["bench", "--device", "nonsense"], "nonsense"),
        (["bench", "--device", "cuda:99"], "CUDA devices"),
        (["bench", "--set", "window=3"], "MIXER.OPTION=VALUE"),
        (["bench", "--set", "local.windw=3"], "did you mean 'window'"),
        (["bench", "--set", "local.window=0"], "window"),
        (["bench", "--set", "local.window=[1"], "cannot read"),
        (["bench", "--mixers", "local", "--set", "eva.window=3"], "eva is not among"),
        (["bench", "--mixers", "lara", "--causal", "--set", "lara.nonsense=3"], "nonsense"),
        (["bench", "--out", "no/such/folder/x.json"], "no folder"),
        (["info", "eva", "--length", "512"], "are for presets; `subquad bench --mixers eva --lengths 256,1024`"),
        (["info", "--batch", "2"], "`subquad bench --mixers NAME --lengths"),
    ],
)
def test_bad_input_is_one_line(capsys, words, message) -> None:
    code, out, err = call(capsys, *words)
    assert code in (1, 2)
    assert not out
    assert err.count("\n") == 1
    assert err.startswith("subquad: error: ")
    assert message in err


@pytest.mark.parametrize("words", [["--debug", "info", "evaa"], ["info", "evaa", "--debug"]])
def test_debug_shows_the_traceback(words) -> None:
    with pytest.raises(ValueError, match="evaa"):
        run(words)


def test_interrupt(capsys, monkeypatch) -> None:
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("subquad.compare.measure.bench.run_bench", interrupted)
    code, _, err = call(capsys, "bench")
    assert code == 130
    assert "Traceback" not in err


def test_a_defect_is_one_line_too(capsys, monkeypatch) -> None:
    def broken(*_):
        raise KeyError("x")

    monkeypatch.setattr("subquad.compare.measure.bench.run_bench", broken)
    code, _, err = call(capsys, "bench")
    assert code == 1
    assert "KeyError" in err
    assert "Traceback" not in err


def test_closed_pipe_is_quiet() -> None:
    command = f"{sys.executable} -m subquad.cli.main info --json | head -c 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("{", "")


def test_plain_table(capsys) -> None:
    output.print_table(["name", "n"], [["a", "10"], [], ["bb", "9"]], numeric=[1])
    assert capsys.readouterr().out == "name   n\n----  --\na     10\n\nbb     9\n"


def test_table_on_a_terminal(capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    output.print_table(["name", "n"], [["[a]", "10"], [], ["bb", "9"]], numeric=[1])
    assert "[a]" in capsys.readouterr().out
