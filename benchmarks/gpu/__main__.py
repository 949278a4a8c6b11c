"""Prints what every mixer would take on a GPU, on paper, or writes docs/gpu.md: see `benchmarks/gpu/__init__.py`."""

import argparse
from pathlib import Path

from benchmarks.gpu.hardware import A100
from benchmarks.gpu.page import fill_page
from benchmarks.gpu.rows import LENGTHS, ROWS, Counted, count_row
from tools.markdown import markdown_table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").strip())
    parser.add_argument("--only", metavar="MECHANISM", help="count the mixers of one mechanism")
    parser.add_argument("--kernels", action="store_true", help="list the launches of each mixer, the longest first")
    parser.add_argument(
        "--write-docs", type=Path, metavar="FILE", help="fill the generated parts of docs/gpu.md instead"
    )
    options = parser.parse_args()
    if options.write_docs is not None:
        options.write_docs.write_text(fill_page(options.write_docs.read_text()))
        return
    rows = [row for row in ROWS if options.only in (None, row.mechanism)]
    counted = [[count_row(row, length) for length in LENGTHS] for row in rows]
    print(table(counted))
    if options.kernels:
        for one in (length[-1] for length in counted):
            print(f"\n{one.row.label}, {one.length} tokens\n{kernels(one)}")


def table(counted: list[list[Counted]]) -> str:
    headers = ["mixer", "launches", *(f"ms at {n}" for n in LENGTHS), *(f"GB at {n}" for n in LENGTHS)]
    rows = [
        [
            by_length[0].row.label,
            str(len(by_length[-1].kernels)),
            *(f"{one.milliseconds(A100):.2f}" for one in by_length),
            *(f"{one.gigabytes:.2f}" for one in by_length),
        ]
        for by_length in counted
    ]
    return markdown_table(headers, rows)


def kernels(counted: Counted) -> str:
    lines = []
    for kernel in sorted(counted.kernels, key=lambda kernel: -kernel.seconds(A100)):
        work = " + ".join(f"{flops / 1e9:.1f} GFLOP {kind}" for kind, flops in kernel.flops)
        time, moved = 1e6 * kernel.seconds(A100), kernel.bytes / 1e6
        lines.append(f"{time:7.0f} us  {kernel.phase:8}  {moved:7.1f} MB  {kernel.name}  {work}  {kernel.shapes}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
