"""`python -m torture.dying RANK SECONDS train ...`: one of several processes that torchrun started dies, once.

It does so SECONDS after the run has its first checkpoint; started again, it lives.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from subquad.cli.main import run
from subquad.train.checkpoint import checkpoints


def die_after(folder: Path, seconds: float) -> None:
    while not checkpoints(folder):
        time.sleep(0.01)
    time.sleep(seconds)
    os.write(1, b"died here\n")
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    rank, seconds, *words = sys.argv[1:]
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first and os.environ["RANK"] == rank:
        folder = Path(words[-1]) / "checkpoints"
        threading.Thread(target=die_after, args=(folder, float(seconds)), daemon=True).start()
    return run(words)


if __name__ == "__main__":
    sys.exit(main())
