"""`python -m subquad`: the command line, where its script is not on the path; `torchrun -m subquad` too."""

import sys

from subquad.cli.main import run

sys.exit(run())
