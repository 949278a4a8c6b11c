"""`subquad classify`: the likeliest classes of images."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def classify(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory of image classification.")],
    images: Annotated[
        list[str],
        typer.Argument(metavar="IMAGE", help="Image files, or npy and npz arrays of one or several images."),
    ],
    checkpoint: Annotated[str, typer.Option(help="best, last, the name of one (such as average), or a path.")] = "best",
) -> None:
    """Print the five likeliest classes of each image.

    A file that cannot be read is one line on stderr; the others are classified, and the exit code is 1.

    Examples:
    subquad classify runs/digits image.png
    subquad classify runs/digits images/*.png images.npz --checkpoint last
    """
    from subquad.train.classifying import Classifier
    from subquad.train.loaded import load_run

    classifier = Classifier(load_run(run, checkpoint))
    unreadable = 0
    for name in images:
        try:
            found = classifier.file(name)
        except ValueError as error:
            unreadable += 1
            print(f"subquad: {error}", file=sys.stderr)
            continue
        for image, classes in found:
            shown = ", ".join(f"{label} {100 * probability:.1f} %" for label, probability in classes)
            print(f"{image}: {shown}", flush=True)
    if unreadable:
        raise ValueError(f"{unreadable} of {len(images)} files could not be classified")
