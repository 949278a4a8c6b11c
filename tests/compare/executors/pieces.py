"""Pieces of work that are nothing but files: what other processes import to do them."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from subquad.compare.executors.base import Piece
from subquad.compare.subprocesses import Log

Kind = Literal["good", "lost", "lost again", "wrong", "slow"]


@dataclass(frozen=True)
class Toy(Piece):
    """Writes a file. lost: its process is killed at the first try, or at every try; wrong: it raises an error."""

    number: int
    kind: Kind = "good"

    @property
    def name(self) -> str:
        return f"toy {self.number}"

    def is_open(self, out: Path) -> bool:
        return not (out / f"{self.number}.done").exists()

    def log_file(self, out: Path) -> Path:
        return out / f"{self.number}.log"

    def tries(self, out: Path) -> int:
        return self.log_file(out).read_text().count("\n")

    def execute(self, out: Path, log: Log) -> None:
        with self.log_file(out).open("a") as file:
            file.write(f"process {os.getpid()}\n")
        log("at work")
        if self.kind == "lost again" or (self.kind == "lost" and self.tries(out) == 1):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "wrong":
            raise ValueError("its file is damaged")
        if self.kind == "slow":
            for _ in range(1200):
                time.sleep(0.1)
        (out / f"{self.number}.done").write_text(os.environ["OMP_NUM_THREADS"])
