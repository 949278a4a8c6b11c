"""The efficiency tables of the original programs, measured on this machine; every ratio is of times of one run.

    python -m benchmarks.tables --json docs/efficiency.json --write-docs docs/efficiency.md     all four
    python -m benchmarks.tables --only linformer --quick                one, at toy sizes: shows that it works

Parts: linformer (k = 32, 64, 128 against exact attention, the encoder alone and the whole model), primal (a language
model with 5 + 1 layers), attention (EVA, LARA, performer, local and softmax attention by length), convolution
(lightweight and dynamic convolutions by kernel size and length); studies.py has their models. Measuring is that of
`subquad compare`: mechanisms are checked, then watched for their peak of memory, then timed in interleaved rounds after
a warm-up, in a process that may die without the others. The exit code is 1 when a check failed; a mechanism that
refuses is reported, and is no error.
"""

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from benchmarks.measured import machine_facts, measuring_parser
from benchmarks.quiet import Watch
from benchmarks.runner import read_report
from benchmarks.studies import STUDIES, Study
from benchmarks.tables_page import HEADERS, NUMERIC, PART_NAMES, page, rows
from subquad import allocator
from subquad.cli.output import print_table
from subquad.compare.measure.base import Context
from subquad.compare.measure.cache import LOG, run_step, start_worker
from subquad.compare.measure.lengths import LengthPoint, Lengths
from subquad.compare.plan import Plan, open_plan
from subquad.compare.trials import Trials
from subquad.train.recipe import Recipe

LONGEST_PASS = 20.0
"""Seconds of a training pass, after which a model is not tried at longer lengths."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    report = read_report(options.json)
    failed = False if options.from_json else measure_all(options, report)
    if options.write_docs is not None:
        options.write_docs.write_text(page(report, STUDIES))
    return int(failed)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = measuring_parser(__doc__ or "", STUDIES, repeats=5)
    shortest = max(study.lengths[0] for study in STUDIES.values())
    parser.add_argument(
        "--longest",
        type=int,
        default=4096,
        help="length up to which is measured; batches have as many tokens (default 4096, at most 16384)",
    )
    parser.add_argument("--from-json", action="store_true", help="measure nothing; --write-docs from --json")
    options = parser.parse_args(arguments)
    if options.threads < 1 or options.repeats < 1:
        parser.error("--threads and --repeats must be at least 1")
    if options.longest < shortest:
        parser.error(f"--longest must be at least {shortest}")
    if options.from_json and (options.json is None or not options.json.exists()):
        parser.error("--from-json needs --json FILE, with results of an earlier run")
    for path in (options.json, options.write_docs):
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"there is no folder {path.parent}")
    return options


def measure_all(options: argparse.Namespace, report: dict[str, Any]) -> bool:
    """Puts the chosen studies into the report; returns whether something failed."""
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # of the process that measures
    torch.set_num_threads(options.threads)
    facts = machine_facts(allocator.choice() == "keep", options.quick)
    watch, failed = Watch(options), False
    for name in options.only or STUDIES:
        plan = STUDIES[name].plan(1 if options.quick else options.repeats, options.longest, options.quick)
        points = measure(name, STUDIES[name], plan)
        reason, quiet = watch.judge()
        found = described(name, plan, points, options) | {"environment": facts | quiet}
        show(name, found)
        failed = failed or reason is not None or any(point.status == "failed" for point in points)
        if reason is not None:
            print(f"{name} is not written: {reason}", file=sys.stderr, flush=True)
            continue
        report["parts"][name] = found
        report["parts"] = {known: report["parts"][known] for known in STUDIES if known in report["parts"]}
        if options.json is not None:  # after every study: a run that is interrupted keeps what it has
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    return failed


def measure(name: str, study: Study, plan: Plan) -> list[LengthPoint]:
    """All models of a study, part by part and length by length."""
    start = time.monotonic()

    def log_with(what: str) -> Callable[[str], None]:
        return lambda line: print(f"[{name}, {time.monotonic() - start:.0f} s] {what}: {line}", file=sys.stderr)

    lengths, points = Lengths(), list[LengthPoint]()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        open_plan(plan, folder)
        context = Context(folder, plan, Trials(folder, plan), study.baseline, LONGEST_PASS)
        with closing(start_worker(folder)) as worker:
            for step in lengths.steps(plan):
                if step.arguments["part"] in study.parts:
                    found = run_step(worker, lengths, context, step, log_with(step.title))
                    points += [point for point in found if isinstance(point, LengthPoint) and not point.control]
        if any(point.status == "failed" for point in points):
            print((folder / LOG).read_text(), file=sys.stderr)
    return points


def described(name: str, plan: Plan, points: Sequence[LengthPoint], options: argparse.Namespace) -> dict[str, Any]:
    """A study's numbers with everything that they depend on, ready for JSON."""
    command = ["python", "-m", "benchmarks.tables", "--only", name, "--threads", str(options.threads)]
    command += ["--quick"] if options.quick else ["--repeats", str(plan.looks[-1]), "--longest", str(options.longest)]
    return {
        "command": shlex.join(command),
        "tokens": plan.tokens,
        "repeats": plan.looks[-1],
        "models": models_of(plan),
        "points": [point.model_dump(mode="json") for point in points],
    }


def models_of(plan: Plan) -> dict[str, Any]:
    """By label: the section `model` of a recipe, and the whole config that it stands for."""
    return {
        variant.label: {
            "given": variant.model,
            "whole": Recipe.parse(variant.label, {**plan.recipe, "model": variant.model}).model_data({}),
        }
        for variant in plan.variants
    }


def show(name: str, found: dict[str, Any]) -> None:
    for part in dict.fromkeys(point["part"] for point in found["points"]):
        print(f"\n{name}, {PART_NAMES[part]}. Times and memory as multiples of those of {STUDIES[name].baseline}\n")
        print_table(HEADERS, rows(found, part, STUDIES[name].baseline), numeric=NUMERIC)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
