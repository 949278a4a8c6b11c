"""Speed of other programs beside ours, in turns in one run; docs/peers.md has the commands for some of them.

    python -m benchmarks.peer                                  x-transformers, local-attention and performer-pytorch
    python -m benchmarks.peer --ours 'local(window=64, overlap=True)' \\
        --peer 'local-attention=local_attention.LocalMHA(dim=512, heads=8, window_size=64)'
    python -m benchmarks.peer --ours-command 'subquad train ... --out {folder}/run' \\
        --peer-command 'fairseq=fairseq-train ... --save-dir {folder}' --figure 'wps": "([0-9.]+)'

A peer is a module that the user has installed, by the dotted name and the keywords of its class, or a command. Modules
are trained forward and backward on the same random tokens, in this process: the same torch, threads and allocator. A
turn of commands runs each of them once, each in an empty {folder} of its own; its figure is the median of what the
regular expression finds in its output after --skip matches, or the seconds of the whole command without one.

Every turn has ours twice: the second is the control, whose ratio to the first should be 1. The score is how many times
as fast ours is: exp of the mean, over all turns, of the logarithm of the ratio in that turn, with Student's interval
from `low` to `high` as in `subquad compare`. The exit code is 1 when something failed.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from functools import partial

from benchmarks.measured import Effort, Result, interval, measuring_parser
from benchmarks.peer_commands import Figure, command_turns
from benchmarks.peer_modules import PYPI, Pair, Sizes, compare_pair
from benchmarks.runner import Part, run_parts
from subquad.compare.measure.checks import CheckFailedError
from subquad.compare.statistics.times import speed_ratio

MARKER = "make bench-peers"
TITLES = {
    "peer-modules": "how many times as fast as the peer ours is, forward and backward",
    "peer-commands": "how many times as fast as the peer ours is",
}


def modules(pairs: Sequence[Pair], sizes: Sizes, effort: Effort) -> Iterator[Result]:
    for pair in pairs:
        for time in sizes.lengths:
            yield compare_pair(pair, sizes, time, effort)


def commands(options: argparse.Namespace, effort: Effort) -> Iterator[Result]:
    """Ours, the control and all peers take turns."""
    figure = Figure(options.figure, options.our_figure or options.figure, options.skip, options.lower_is_better)
    peers = dict(named(text) for text in options.peer_command)
    try:
        turns = command_turns(options.ours_command, peers, figure, effort.least)
    except CheckFailedError as failure:
        for name in peers:
            yield Result("peer-commands", {"peer": name}, reason=str(failure))
        return
    control = speed_ratio(turns.seconds("control"), turns.seconds("ours"), 1)
    for name in peers:
        ratio = speed_ratio(turns.seconds("ours"), turns.seconds(name), len(peers))
        numbers = {"ours": turns.median("ours"), "peer": turns.median(name), **interval(ratio)}
        labels = {"peer": name, "figure": options.unit, "turns": ratio.rounds}
        yield Result("peer-commands", labels, numbers, ratio.ratio, control=control)


def named(text: str) -> tuple[str, str]:
    """NAME=REST."""
    name, equals, rest = text.partition("=")
    if not equals or not re.fullmatch(r"[\w+., -]+", name):
        raise argparse.ArgumentTypeError(f"{text!r} should be NAME=..., such as fairseq=fairseq-train")
    return name, rest


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    sizes = Sizes(32, 4, (24,), 48) if options.quick else Sizes(options.dim, options.heads, options.lengths)
    parts: dict[str, Part] = {}
    if options.peer:
        pairs = [Pair(*named(text), options.ours) for text in options.peer]
        parts["modules"] = partial(modules, pairs, sizes)
    if options.peer_command:
        parts["commands"] = partial(commands, options)
    if not parts:
        parts = {name: partial(modules, PYPI[name], sizes) for name in options.only or PYPI}
    return run_parts(options, parts, TITLES, MARKER)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = measuring_parser(__doc__ or "", PYPI, repeats=9, budget=10.0)
    add = parser.add_argument
    add("--ours", metavar="MIXER", help="a mechanism with its options, such as 'eva(window=64)'")
    add("--peer", action="append", metavar="NAME=CLASS", help="dotted name and keywords of a class; may be repeated")
    add("--dim", type=int, default=512, help="width of the tokens (default 512)")
    add("--heads", type=int, default=8, help="heads of our mechanism (default 8)")
    lengths = [128, 1024, 8192]
    add("--lengths", type=lambda text: [int(word) for word in text.split(",")], default=lengths, help="128,1024,8192")
    add("--ours-command", metavar="COMMAND", help="a command of ours; {folder} is an empty folder of its own")
    add("--peer-command", action="append", metavar="NAME=COMMAND", help="that of a peer; may be repeated")
    add("--figure", metavar="REGEX", help="finds figures in a command's output; its group is the number")
    add("--our-figure", metavar="REGEX", help="the same for our command, where it differs")
    add("--skip", type=int, default=0, help="figures of a run that are left out, while it warms up (default 0)")
    add("--lower-is-better", action="store_true", help="figures are times, not rates")
    add("--unit", default="", help="what figures are, for the table, such as tokens/s")
    options = parser.parse_args(arguments)
    if bool(options.ours) != bool(options.peer) or bool(options.ours_command) != bool(options.peer_command):
        parser.error("--ours and --peer belong together, and so do --ours-command and --peer-command")
    if options.our_figure and not options.figure:
        parser.error("--our-figure needs --figure")
    for text in [*(options.peer or []), *(options.peer_command or [])]:
        try:
            named(text)
        except argparse.ArgumentTypeError as wrong:
            parser.error(str(wrong))
    options.lower_is_better |= options.figure is None
    options.unit = options.unit or ("seconds" if options.figure is None else options.figure)
    return options


if __name__ == "__main__":
    sys.exit(main())
