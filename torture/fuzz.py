"""The fuzz tests with many more examples, other ones at every call.

    python -m torture.fuzz                    100 times the examples of the normal suite
    python -m torture.fuzz --factor 5         five times

pytest shows what failed, with the example that Hypothesis found; the exit code is pytest's.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FACTOR = 100


def main() -> int:
    text, _, details = (__doc__ or "").partition("\n\n")
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m torture.fuzz", description=text, epilog=details, formatter_class=form)
    parser.add_argument("--factor", type=int, default=FACTOR, help=f"how many times the examples (default {FACTOR})")
    parser.add_argument("tests", nargs="*", type=Path, help="files of fuzz tests (default: all)")
    options = parser.parse_args()
    tests = options.tests or sorted((ROOT / "tests").glob("test_fuzz_*.py"))
    environment = os.environ | {"SUBQUAD_FUZZ": str(options.factor), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *map(str, tests)], env=environment, cwd=ROOT, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
