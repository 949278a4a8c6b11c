"""Runs a module on the emulated GPU: see the package."""

import atexit
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

REPORT = "SUBQUAD_EMULATED_GPU_REPORT"


class Emulated(subprocess.Popen):
    """Programs of Python that are started by one on the emulated GPU run on it too."""

    def __init__(self, args: Any, *rest: Any, **options: Any) -> None:
        words = [str(word) for word in args] if isinstance(args, list | tuple) else []
        if words[:1] == [sys.executable] and "-m" in words[:3]:
            place = words.index("-m") + 1
            args = [*words[:place], "tests.emulated_gpu", *words[place:]]
        super().__init__(args, *rest, **options)


def main() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.emulated_gpu import counts, cuda, device
    from tools import cuda_guard

    cuda_guard.load()
    device.start()
    cuda.start()
    subprocess.Popen = Emulated  # type: ignore[misc]
    if report := os.environ.pop(REPORT, None):
        recorder = counts.counted()
        found = recorder.__enter__()
        atexit.register(lambda: Path(report).write_text(found.report()))
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


main()
