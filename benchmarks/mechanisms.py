"""Speed and memory of the mechanisms against their targets, every comparison side by side in one run.

    python -m benchmarks.mechanisms                          all parts, as tables
    python -m benchmarks.mechanisms --only conv --quick      one part, at toy sizes: shows that it works, nothing else

Parts: conv (the two convolutions against other formulations), mechanisms (each against its own projections, and peak
memory), short (against softmax attention at short lengths), growth (from 1,024 to 65,536 tokens).
A time is printed only for a result that was checked. Times are medians of repeats that are interleaved over what is
compared, with the same threads and an allocator that keeps freed memory (SUBQUAD_ALLOCATOR=system: the system's own).
The exit code is 1 when a check failed; a target that is missed is reported, and is no error.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import convolutions, whole
from benchmarks.measured import QUICK, Effort, Result, machine_facts, measuring_parser
from benchmarks.page import described, filled, missed, numeric_columns, table
from benchmarks.plot import draw
from subquad.allocator import set_up_command
from subquad.cli.output import print_table

PARTS: dict[str, Callable[[Effort, Callable[[str], None]], Iterator[Result]]] = {
    "conv": convolutions.run,
    "mechanisms": whole.mechanisms,
    "short": whole.short,
    "growth": whole.growth,
}
TITLES = {**convolutions.TITLES, **whole.TITLES}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    report: dict[str, Any] = {"parts": {}}
    if options.json is not None and options.json.exists():  # parts that are not measured now keep their results
        report = json.loads(options.json.read_text())
    if options.from_json:
        write_documents(options, report)
        return 0
    torch.set_num_threads(options.threads)
    facts = machine_facts(set_up_command(), options.quick)
    failed = False
    for part in options.only or PARTS:
        results = measure(part, QUICK if options.quick else Effort(options.budget, options.repeats))
        report["parts"][part] = {"environment": facts, "results": results}
        report["parts"] = {name: report["parts"][name] for name in PARTS if name in report["parts"]}
        show(part, results)
        failed = failed or any(line["reason"] for line in results)
        if options.json is not None:  # after every part: a long run that is interrupted keeps what it has
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    write_documents(options, report)
    return int(failed)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = measuring_parser(__doc__ or "", PARTS, repeats=3, budget=4.0)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw time and memory by length as SVG")
    parser.add_argument("--from-json", action="store_true", help="measure nothing; --plot and --write-docs from --json")
    options = parser.parse_args(arguments)
    if options.from_json and (options.json is None or not options.json.exists()):
        parser.error("--from-json needs --json FILE, with results of an earlier run")
    if options.threads < 1 or options.repeats < 1:
        parser.error("--threads and --repeats must be at least 1")
    for path in (options.json, options.plot, options.write_docs):
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"there is no folder {path.parent}")
    return options


def measure(part: str, effort: Effort) -> list[dict[str, Any]]:
    start = time.monotonic()

    def say(message: str) -> None:
        print(f"[{part}, {time.monotonic() - start:.0f} s] {message}", file=sys.stderr, flush=True)

    lines = []
    for result in PARTS[part](effort, say):
        if effort.quick:
            result.target = None  # nothing is expected of toy sizes
        say(described(line := result.as_json()))
        lines.append(line)
    return json.loads(json.dumps(lines))  # a fresh report is the same as one read from a file


def show(part: str, results: Sequence[dict[str, Any]]) -> None:
    for name in dict.fromkeys(line["table"] for line in results):
        headers, rows = table([line for line in results if line["table"] == name])
        print(f"\n{name}. Score: {TITLES[name]}\n")
        print_table(headers, rows, numeric=numeric_columns(headers))
    short = missed(results)
    print(f"\n{part}: {len(short)} below target" + "".join(f"\n  {line}" for line in short), flush=True)


def write_documents(options: argparse.Namespace, report: dict[str, Any]) -> None:
    if options.plot is not None:
        plot = growth_plot(report)
        if plot is None:
            print(f"there are no results of part growth, so {options.plot} is left as it is", file=sys.stderr)
        else:
            options.plot.write_text(plot)
    if options.write_docs is not None:
        options.write_docs.write_text(filled(options.write_docs.read_text(), report, TITLES))


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
