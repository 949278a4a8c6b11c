"""CPU time of short commands beside what they import: medians of rounds in turns, in an empty folder.

python -m benchmarks.startup [--rounds 7]
"""

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile

SUBQUAD = ["-m", "subquad"]
PROGRAMS = {
    "import pydantic, typer, yaml": ["-c", "import pydantic, typer, yaml"],
    "import torch": ["-c", "import torch"],
    "subquad --help": [*SUBQUAD, "--help"],
    "a wrong recipe": [*SUBQUAD, "train", "digits", "model.encoder.mixer=evo"],
    "subquad info": [*SUBQUAD, "info"],
    "subquad train --dry-run": [*SUBQUAD, "train", "own_text", "--dry-run"],
    "subquad doctor": [*SUBQUAD, "doctor"],
}


def cpu_seconds(words: list[str], folder: str) -> float:
    """CPU seconds of a program of Python and of its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    seconds: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):  # the first only fills caches
            for name, words in PROGRAMS.items():
                taken = cpu_seconds(words, folder)
                if number:
                    seconds[name].append(taken)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    first, torch = list(medians.values())[:2]
    for name, median in medians.items():
        print(f"{name:30} {median:6.2f} s  {median / first:5.1f} times the first  {median / torch:5.2f} times torch")


if __name__ == "__main__":
    main()
