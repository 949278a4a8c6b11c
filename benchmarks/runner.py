"""The run of a benchmark of several parts: measures, shows, and writes the JSON file and the page."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.measured import QUICK, Effort, Result, machine_facts
from benchmarks.page import described, filled, missed, numeric_columns, table
from benchmarks.quiet import Watch
from subquad.allocator import set_up_command
from subquad.cli.output import print_table
from subquad.compare.statistics.times import SpeedRatio

Part = Callable[[Effort], Iterator[Result]]


def run_parts(options: argparse.Namespace, parts: Mapping[str, Part], titles: Mapping[str, str], marker: str) -> int:
    """Measures the parts, and returns the exit code: 1 when a check failed, or when figures were not published.

    marker: the command that the page's markers name. Parts in options.json that are not measured now keep their
    results.
    """
    torch.set_num_threads(options.threads)
    facts = machine_facts(set_up_command(), options.quick)
    watch = Watch(options)
    report, failed = read_report(options.json), False
    for name, part in parts.items():
        lines = list(measure(name, part, QUICK if options.quick else Effort(options.budget, options.repeats)))
        show(name, lines, titles)
        reason, quiet = watch.judge([SpeedRatio(**line["control"]) for line in lines if line["control"]])
        failed = failed or reason is not None or any(line["reason"] for line in lines)
        if reason is not None:
            print(f"{name} is not written: {reason}", file=sys.stderr, flush=True)
            continue
        report["parts"][name] = {"environment": facts | quiet, "results": lines}
        if options.json is not None:  # after every part: a long run that is interrupted keeps what it has
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    write_page(options, report, titles, marker)
    return int(failed)


def read_report(file: Path | None) -> dict[str, Any]:
    return {"parts": {}} if file is None or not file.exists() else json.loads(file.read_text())


def measure(name: str, part: Part, effort: Effort) -> Iterator[dict[str, Any]]:
    """The results of a part as they are in the JSON file."""
    for result in part(effort):
        if effort.quick:
            result.target = None  # nothing is expected of toy sizes
        line = json.loads(json.dumps(result.as_json()))
        print(f"[{name}] {described(line)}", file=sys.stderr, flush=True)
        yield line


def show(part: str, lines: Sequence[dict[str, Any]], titles: Mapping[str, str]) -> None:
    for name in dict.fromkeys(line["table"] for line in lines):
        headers, rows = table([line for line in lines if line["table"] == name])
        print(f"\n{name}. Score: {titles[name]}\n")
        print_table(headers, rows, numeric=numeric_columns(headers))
    below = missed(lines)
    print(f"\n{part}: {len(below)} below target" + "".join(f"\n  {line}" for line in below), flush=True)


def write_page(options: argparse.Namespace, report: dict[str, Any], titles: Mapping[str, str], marker: str) -> None:
    if options.write_docs is not None:
        options.write_docs.write_text(filled(options.write_docs.read_text(), report, titles, marker))
