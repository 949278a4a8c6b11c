"""Speed and memory of the mechanisms against their targets, every comparison side by side in one run.

    python -m benchmarks.mechanisms                          all parts, as tables
    python -m benchmarks.mechanisms --only conv --quick      one part, at toy sizes: shows that it works, nothing else

Parts: conv (the two convolutions against other formulations), unfolded (memory of their layers and models beside one of
these), mechanisms (each against its own projections, and peak memory), originals (some against the formulations of the
programs that they come from), short (against softmax attention at short lengths), growth (from 1,024 to 65,536 tokens),
step (training steps of the Multi30k recipes as a share of the machine's peak).
A time is printed only for a result that was checked. Times are medians of repeats that are interleaved over what is
compared, with the same threads and an allocator that keeps freed memory (SUBQUAD_ALLOCATOR=system: the system's own).
The exit code is 1 when a check failed; a target that is missed is reported, and is no error.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import convolution_memory, convolutions, originals, training_step, whole
from benchmarks.measured import Effort, Result, measuring_parser
from benchmarks.plot import draw
from benchmarks.runner import Part, read_report, run_parts, write_page

PARTS: dict[str, Callable[[Effort, Callable[[str], None]], Iterator[Result]]] = {
    "conv": convolutions.run,
    "unfolded": convolution_memory.memory,
    "mechanisms": whole.mechanisms,
    "originals": originals.originals,
    "short": whole.short,
    "growth": whole.growth,
    "step": training_step.training_step,
}
TITLES = {
    **convolutions.TITLES,
    **convolution_memory.TITLES,
    **whole.TITLES,
    **originals.TITLES,
    **training_step.TITLES,
}
MARKER = "make bench"


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.from_json:
        write_page(options, read_report(options.json), TITLES, MARKER)
        code = 0
    else:
        parts: dict[str, Part] = {name: partial(PARTS[name], say=sayer(name)) for name in options.only or PARTS}
        code = run_parts(options, parts, TITLES, MARKER)
    write_plot(options)
    return code


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = measuring_parser(__doc__ or "", PARTS, repeats=3, budget=4.0)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw time and memory by length as SVG")
    parser.add_argument("--from-json", action="store_true", help="measure nothing; --plot and --write-docs from --json")
    options = parser.parse_args(arguments)
    if options.from_json and (options.json is None or not options.json.exists()):
        parser.error("--from-json needs --json FILE, with results of an earlier run")
    if options.plot is not None and options.json is None:
        parser.error("--plot draws what is in --json FILE")
    if options.threads < 1 or options.repeats < 1:
        parser.error("--threads and --repeats must be at least 1")
    for path in (options.json, options.plot, options.write_docs):
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"there is no folder {path.parent}")
    return options


def sayer(part: str) -> Callable[[str], None]:
    """A function that prints messages of a part's progress, with the seconds since its first one."""
    start: list[float] = []

    def say(message: str) -> None:
        start.append(time.monotonic())
        print(f"[{part}, {start[-1] - start[0]:.0f} s] {message}", file=sys.stderr, flush=True)

    return say


def write_plot(options: argparse.Namespace) -> None:
    if options.plot is None:
        return
    plot = growth_plot(read_report(options.json))
    if plot is None:
        print(f"there are no results of part growth, so {options.plot} is left as it is", file=sys.stderr)
    else:
        options.plot.write_text(plot)


def growth_plot(report: dict[str, Any]) -> str | None:
    """Time and memory by length; None when they were not measured."""
    results = report["parts"].get("growth", {}).get("results", [])
    panels = []
    for name, title in (("growth-time", "milliseconds, forward and backward"), ("growth-memory", "peak memory, MB")):
        lines = [line for line in results if line["table"] == name and line["reason"] is None]
        curves = {
            line["labels"]["mechanism"]: {int(length): value for length, value in line["numbers"].items()}
            for line in lines
        }
        panels.append((title, curves))
    return draw(panels) if all(curves for _, curves in panels) else None


if __name__ == "__main__":
    sys.exit(main())
