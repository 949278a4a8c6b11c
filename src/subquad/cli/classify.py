"""`subquad classify`: the likeliest classes of images or texts."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from subquad.cli.lines import LineReader, warn_of_lines
from subquad.cli.options import Checkpoint, RunFolder, refuse_other_folders

if TYPE_CHECKING:
    from subquad.decode.classify import ClassProbabilities, TextLabeller

LINES = 256
"""Texts of standard input that are classified together."""


def classify(
    run: RunFolder,
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE",
            help="An image, a file of numpy (npy, npz) with one or several images, or a file with one text.",
        ),
    ] = None,
    checkpoint: Checkpoint = "best",
) -> None:
    """Print the five most probable classes of each image or text.

    A classifier of texts reads files with one text each, or without files a text from every line of standard input, and
    answers it with a line. A file that cannot be read is reported in one line on stderr. The others are classified, and
    the exit code is 1.

    Examples:
    subquad classify runs/digits image.png
    subquad classify runs/digits images/*.png images.npz --checkpoint last
    subquad classify runs/reviews < reviews.txt
    subquad classify runs/reviews review.txt
    """
    refuse_other_folders(run)
    from subquad.api import load_run
    from subquad.decode.classify import TextLabeller

    classifier = load_run(run, checkpoint).classifier()
    if not files:
        if not isinstance(classifier, TextLabeller):
            raise ValueError(f"{run} classifies images: give files of images, as in `subquad classify {run} image.png`")
        _classify_lines(classifier)
        return
    unreadable = 0
    for name in files:
        try:
            found = classifier.classify_file(name)
        except ValueError as error:
            unreadable += 1
            print(f"subquad: {error}", file=sys.stderr)
            continue
        for title, classes in found:
            print(f"{title}: {_shown(classes)}", flush=True)
    if unreadable:
        raise ValueError(f"{unreadable} of {len(files)} files could not be classified")


def _classify_lines(classifier: "TextLabeller") -> None:
    reader = LineReader(sys.stdin.buffer)
    for window in reader.windows(LINES):
        for classes in classifier.classify(window):
            print(_shown(classes))
        sys.stdout.flush()
    warn_of_lines(reader.replaced, "were not UTF-8: what could not be read was replaced")
    if classifier.max_tokens is not None:
        warn_of_lines(
            classifier.truncated, f"were cut at {classifier.max_tokens:,} tokens, the most that are read of a text"
        )


def _shown(classes: "ClassProbabilities") -> str:
    return ", ".join(f"{label} {100 * probability:.1f} %" for label, probability in classes)
