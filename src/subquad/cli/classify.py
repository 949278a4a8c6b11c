"""`subquad classify`: the likeliest classes of images."""

import sys
from typing import Annotated

import typer

from subquad.cli.options import Checkpoint, RunFolder


def classify(
    run: RunFolder,
    images: Annotated[
        list[str],
        typer.Argument(metavar="IMAGE", help="An image, or a file of numpy (npy, npz) with one or several images."),
    ],
    checkpoint: Checkpoint = "best",
) -> None:
    """Print the five most probable classes of each image.

    A file that cannot be read is reported in one line on stderr. The others are classified, and the exit code is 1.

    Examples:
    subquad classify runs/digits image.png
    subquad classify runs/digits images/*.png images.npz --checkpoint last
    """
    from subquad.api import load_run

    classifier = load_run(run, checkpoint).classifier()
    unreadable = 0
    for name in images:
        try:
            found = classifier.classify_file(name)
        except ValueError as error:
            unreadable += 1
            print(f"subquad: {error}", file=sys.stderr)
            continue
        for image, classes in found:
            shown = ", ".join(f"{label} {100 * probability:.1f} %" for label, probability in classes)
            print(f"{image}: {shown}", flush=True)
    if unreadable:
        raise ValueError(f"{unreadable} of {len(images)} files could not be classified")
