"""A process that is ended by SIGKILL in each stage of linearising: the same program goes on, to the same bits."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import subquad
from tests.linearise.hosts import LLAMA, transformers

pytestmark = pytest.mark.usefixtures("preloaded_programs")
PROGRAM = """
import json, os, signal, sys
from pathlib import Path

import subquad
import subquad.linearise.run
from subquad.linearise.stages.stage import Stage

given, out, place, update = json.loads(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
make_update, save = Stage.step, subquad.linearise.run.write_report


def step(self, batch, rate):
    found = make_update(self, batch, rate)
    if self.folder == out / place and self.update == update:
        os.kill(os.getpid(), signal.SIGKILL)
    return found


def write_report(folder, content):
    if place == "report":
        os.kill(os.getpid(), signal.SIGKILL)
    save(folder, content)


Stage.step, subquad.linearise.run.write_report = step, write_report
subquad.linearise(out=out, quiet=True, **given)
"""
UPDATES: dict[str, Any] = {"transfer_updates": 4, "tune_updates": 4, "save_every": 2, "lengths": ()}
TEXT: dict[str, Any] = {"batch": 2, "length": 16, "valid_samples": 4, "tokenizer": "bytes", "keep": 1, "distill": 1.0}
STAGES = ("transfer", "finetune", "controls/scratch/finetune", "controls/identity/finetune")
"""The folders of all stages; the identity has no weights to transfer."""
FORMS: dict[str, dict[str, Any]] = {
    "all weights": {"mixer": "eva=window=4"},
    "LoRA": {"mixer": "performer=projection=learnable", "tune": "lora"},
    "run": {"mixer": "local=window=2", "keep": 1},
}


def start(program: Path, given: dict[str, Any], out: Path, place: str, update: int) -> int:
    """Returns the exit code. place: the stage whose folder it is, or what is written, where the process ends."""
    command = [sys.executable, str(program), json.dumps(given), str(out), place, str(update)]
    return subprocess.run(command, check=False, timeout=300).returncode


def files_of_weights(out: Path) -> dict[str, bytes]:
    """The weights of the result, which is a model or a run."""
    return {
        path.relative_to(out).as_posix(): path.read_bytes()
        for kind in ("model", "run")
        for path in (out / kind).rglob("*.safetensors")
    }


@pytest.mark.nightly
@pytest.mark.parametrize("form", FORMS)
def test_a_killed_process_is_followed_by_one_that_ends_with_the_same_bits(form: str, tmp_path: Path) -> None:
    program, teacher, text = tmp_path / "program.py", tmp_path / "teacher", tmp_path / "text.txt"
    program.write_text(PROGRAM)
    text.write_text("".join(f"line {number} of a text about nothing\n" for number in range(100)))
    given = {"model": str(teacher), **UPDATES, **FORMS[form]}
    if form == "run":
        model = {"dim": 16, "encoder": {"mixer": "softmax", "layers": 2, "heads": 2, "ffn_dim": 16}}
        subquad.train(
            "digits", model=model, out=teacher, quiet=True, train={"updates": 2}, schedule={"warmup_updates": 1}
        )
    else:
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA | {"vocab_size": 256})).save_pretrained(teacher)
        given |= {**TEXT, "data": str(text)}
    assert start(program, given, tmp_path / "whole", "", 0) == 0
    for place, update in [*((stage, number) for stage in STAGES for number in (1, 3)), ("report", 0)]:
        assert start(program, given, tmp_path / "parts", place, update) == -signal.SIGKILL, (place, update)
    assert start(program, given, tmp_path / "parts", "", 0) == 0
    assert files_of_weights(tmp_path / "whole")
    assert files_of_weights(tmp_path / "parts") == files_of_weights(tmp_path / "whole")
    whole, parts = (json.loads((tmp_path / name / "report.json").read_text()) for name in ("whole", "parts"))
    assert parts == whole
