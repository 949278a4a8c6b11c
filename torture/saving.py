"""`python -m torture.saving FOLDER train ...` under torchrun: how much memory every process needs to save a checkpoint.

Each writes FOLDER/RANK.json: the megabytes that it held before its first save, and the most that it held during it.
"""

import json
import os
import sys
from pathlib import Path

from subquad.cli.main import run
from subquad.train.trainer import Trainer
from torture.processes import resident_bytes

MEGABYTE = 1e6


def main() -> int:
    folder, *words = sys.argv[1:]
    save = Trainer._save

    def measure(trainer: Trainer) -> None:
        before = resident_bytes(os.getpid())
        Path("/proc/self/clear_refs").write_text("5")  # lets the system count the largest size anew
        save(trainer)
        content = {"before": before / MEGABYTE, "most": _largest_size() / MEGABYTE}
        (Path(folder) / f"{trainer.workers.rank}.json").write_text(json.dumps(content))

    Trainer._save = measure  # type: ignore[method-assign]
    return run(words)


def _largest_size() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    sys.exit(main())
