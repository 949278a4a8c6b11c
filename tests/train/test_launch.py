"""The launcher that torch had before torchrun: it tells every process its number on the command line."""

import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from subquad.train import distributed
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


def test_a_process_claims_its_gpu_before_nccl_takes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two machines with two GPUs each, as torch would show them; NCCL itself needs real ones."""
    events: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", events.append)
    monkeypatch.setattr(distributed, "attempt_store", lambda rank, world: f"store of {rank} in {world}")
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *given, **named: events.append((given, named)))
    for name, value in {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    workers = distributed.join(timedelta(minutes=7))
    assert (workers.rank, workers.world) == (3, 4)
    number, (given, named) = events
    assert (number, given) == (1, ("nccl",))
    assert named == {
        "store": "store of 3 in 4",
        "rank": 3,
        "world_size": 4,
        "timeout": timedelta(minutes=7),
        "device_id": torch.device("cuda", 1),
    }
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match=r"process 2 of this machine has no GPU: .*--nproc-per-node=2"):
        distributed.join()
