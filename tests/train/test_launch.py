"""The launcher that torch had before torchrun: it tells every process its number on the command line."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from subquad.train.metrics_log import read_metrics

pytest.importorskip("sklearn", reason="the embedded digits need the demo extra")
pytestmark = pytest.mark.usefixtures("preloaded_programs")

RECIPE = {
    "task": "image-classification",
    "data": {"embedded": "digits"},
    "model": {"preset": "vision_small", "patch_size": 4, "dim": 16, "encoder": {"layers": 1}},
    "schedule": {"kind": "constant", "lr": 1e-3},
    "train": {"updates": 2, "accumulate": 2, "log_every": 1},
}


def free_port() -> int:
    """A port for the processes to meet at; unlike torchrun --standalone this launcher finds none by itself."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_the_older_launcher_starts_processes_that_share_an_update(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(RECIPE))
    words = ["-m", "torch.distributed.launch", "--nproc-per-node=2", f"--master-port={free_port()}"]
    words += ["-m", "subquad", "train", str(tmp_path / "my.yaml"), "--out", str(tmp_path / "run")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("after 2 updates") == 1, "one process speaks"
    assert [record["update"] for record in read_metrics(tmp_path / "run/metrics.jsonl", "train")] == [1, 2]
