"""benchmarks/peer.py: peers run beside ours, in turns; their figures are found, and what fails has no figure."""

import importlib
import json
import shlex
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import peer, peer_commands, peer_modules, quiet
from benchmarks.measured import QUICK
from subquad.compare.measure.checks import CheckFailedError
from subquad.mixers import build

ROOT = Path(__file__).parents[2]
SIZES = peer_modules.Sizes(32, 4, (24,), 48)
LAYER = "torch.nn.TransformerEncoderLayer(d_model=32, nhead=4, dim_feedforward=32, batch_first=True)"


def python(code: str) -> str:
    return shlex.join([sys.executable, "-c", code])


def results(file: Path) -> list[dict]:
    return [line for part in json.loads(file.read_text())["parts"].values() for line in part["results"]]


# ---------------------------------------------------------------------- commands


def test_commands_take_turns_with_ours_and_a_control(tmp_path, capsys) -> None:
    """The peer says that it is three times slower than ours, in other words than ours."""
    log = tmp_path / "log"
    note = f"import sys; open({str(log)!r}, 'a').write(sys.argv[1] + chr(10)); print(sys.argv[2])"
    words = [
        "--ours-command",
        f"{python(note)} ours 'rate 30'",
        "--figure",
        r"wps (\d+)",
        "--our-figure",
        r"rate (\d+)",
    ]
    words += [
        "--peer-command",
        f"slow={python(note)} slow 'wps 10'",
        "--repeats",
        "2",
        "--json",
        str(tmp_path / "r.json"),
    ]
    assert peer.main([*words, "--unit", "tokens/s", "--quick"]) == 0
    (line,) = results(tmp_path / "r.json")
    assert line["labels"] == {"peer": "slow", "figure": "tokens/s", "turns": 1}
    assert line["numbers"] == {"ours": 30, "peer": 10}
    assert line["score"] == pytest.approx(3)
    assert line["control"]["ratio"] == pytest.approx(1)
    runs = log.read_text().split()
    assert len(runs) == 6  # a turn to warm up and one that counts, of three commands
    for turn in (runs[:3], runs[3:]):
        assert sorted(turn) == ["ours", "ours", "slow"]
    assert "3.00" in capsys.readouterr().out


@pytest.mark.parametrize(("lower", "seconds"), [(True, [2.0, 4.0]), (False, [0.5, 0.25])])
def test_figures_are_times_or_rates(lower, seconds) -> None:
    turns = peer_commands.Turns({"ours": [2.0, 4.0]}, lower)
    assert turns.seconds("ours") == seconds
    assert turns.median("ours") == 3


def test_the_figure_of_a_run_is_the_median_after_the_warm_up() -> None:
    figure = peer_commands.Figure(r"([\d,.]+)/s", None, 1, False)
    assert figure.of(figure.peer, "1/s\n1,000.5/s 900/s 2000/s", 9.0) == 1000.5
    assert figure.of(figure.ours, "anything", 9.0) == 9.0
    with pytest.raises(CheckFailedError, match="no figure after 1; it ends with: 7/s"):
        figure.of(figure.peer, "7/s\n", 9.0)


def test_every_run_has_an_empty_folder(tmp_path) -> None:
    code = "import os, sys; print(os.listdir(sys.argv[1])); open(sys.argv[1] + '/left', 'w')"
    for _ in range(2):
        assert peer_commands.run(f"{python(code)} {{folder}}")[0] == "[]\n"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (python("print('no such option'); raise SystemExit(3)"), "code 3, and with: no such option"),
        ("no-such-program --help", "no-such-program: No such file"),
        (python("print('fast')"), "no figure"),
    ],
)
def test_a_command_that_fails_has_no_figure(command, message, tmp_path) -> None:
    words = ["--ours-command", python("print(1)"), "--peer-command", f"other={command}", "--figure", r"(\d)\n"]
    assert peer.main([*words, "--quick", "--json", str(tmp_path / "r.json")]) == 1
    (line,) = results(tmp_path / "r.json")
    assert line["reason"].startswith("other: ")
    assert message in line["reason"]


# ---------------------------------------------------------------------- modules


def test_any_installed_module_is_a_peer(tmp_path, capsys) -> None:
    words = ["--ours", "softmax()", "--peer", f"torch={LAYER}", "--quick", "--json", str(tmp_path / "r.json")]
    assert peer.main(words) == 0
    (line,) = results(tmp_path / "r.json")
    assert line["labels"] == {"peer": "torch", "T": 24, "batch": 2}
    assert line["score"] > 0
    assert line["control"]["ratio"] > 0
    assert {"ours ms", "peer ms", "ours MB", "peer MB"} <= line["numbers"].keys()
    assert "peer-modules. Score: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no_such_package.Attention(dim=32)", "no_such_package"),
        ("torch.nn.NoSuchClass(dim=32)", "NoSuchClass"),
        ("torch.nn.Linear(width=32)", "width"),
        ("torch.nn.Linear(in_features=32, out_features=8)", "shape"),
        ("__import__('os').getcwd()", "should be a dotted name"),
        ("torch.nn.Linear(32, 32)", "should be a dotted name"),
        ("torch.nn.Linear(in_features=int('32'))", "should be a dotted name"),
    ],
)
def test_a_module_that_does_not_work_has_no_figure(text, message) -> None:
    result = peer_modules.compare_pair(peer_modules.Pair("other", text, "softmax()"), SIZES, 24, QUICK)
    assert result.verdict == "no figure"
    assert message in (result.reason or "")
    assert not result.numbers


def test_both_modules_are_trained_on_the_same_tokens() -> None:
    x = torch.randn(2, 5, 32)
    module, mixer = nn.Linear(32, 32), build("softmax", dim=32, heads=4)
    y, gradient = peer_modules.training(module, x)()
    assert torch.equal(y, module(x))
    assert torch.allclose(gradient, module.weight.sum(0).expand_as(x))
    y, _ = peer_modules.training(mixer, x)()
    assert torch.equal(y, mixer(x).y)


@pytest.mark.parametrize("package", list(peer_modules.PYPI))
def test_packages_that_are_installed_work(package) -> None:
    for pair in peer_modules.PYPI[package]:
        name, keywords = peer_modules.parse_call(pair.peer.format(dim=32, heads=4, dim_head=8))
        assert keywords["dim"] == 32
        peer_modules.build_ours(pair.ours, SIZES)
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            result = peer_modules.compare_pair(pair, SIZES, 24, QUICK)
            assert result.reason is None
            assert 0.9 < result.numbers["parameters, peer / ours"] < 1.1


# ---------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--peer", "a=b.C()"], "--ours and --peer belong together"),
        (["--ours-command", "ls"], "--ours-command and --peer-command"),
        (["--ours", "softmax()", "--peer", "b.C()"], "should be NAME=..."),
        (["--only", "fairseq"], "invalid choice"),
        (["--our-figure", "x"], "needs --figure"),
    ],
)
def test_bad_options_are_refused(words, message, capsys) -> None:
    with pytest.raises(SystemExit) as refusal:
        peer.main(words)
    assert refusal.value.code == 2
    assert message in capsys.readouterr().err


def test_peers_are_not_published_from_a_busy_machine(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(quiet.os, "getloadavg", lambda: (1.0, 0.0, 0.0))
    with pytest.raises(SystemExit, match="busy"):
        peer.main(["--write-docs", str(tmp_path / "page.md")])
