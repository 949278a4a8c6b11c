"""`subquad recipes`: command lines of the original programs as recipes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from subquad.interop.commands import Conversion

FromCommand = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="COMMAND",
        help="A command line of fairseq, efficient-attention, PrimalAttention or crybot/linformer: the words "
        "themselves, a file that holds them, or - for standard input.",
    ),
]


def recipes(
    from_: FromCommand = None,
    out: Annotated[Path | None, typer.Option(help="The file to write. By default the recipe is printed.")] = None,
) -> None:
    """Turn a command line of an original program into a recipe.

    Nothing of the command is run. The recipe has the defaults of the original's architecture, then the flags, and each
    line names the flag that it came from. What has no counterpart is listed with the reason, and so are the commands to
    run here. Programs: fairseq-train, -generate, -interactive, -validate, -eval-lm and -preprocess,
    average_checkpoints.py, main.sh and main.py of efficient-attention, train.py and train_efficiency.py of
    PrimalAttention, and run.sh of crybot/linformer, whose config file is read.

    Examples:
    subquad recipes --from 'fairseq-train data-bin/iwslt14 -a lightconv_iwslt_de_en --max-update 50000 --lr 0.0005'
    subquad recipes --from train.sh --out my.yaml
    """
    if from_ is None:
        raise ValueError("say which command to convert, with --from; recipes that ship are in the folder recipes/")
    text = read_command(from_).to_text()
    if out is None:
        print(text, end="")
        return
    from subquad.files import write_text

    write_text(out, text.replace("RECIPE.yaml", str(out)))
    print(f"{out}: written")


def read_command(given: str) -> "Conversion":
    """Converts a command that is given as words, as a file, or on standard input."""
    import sys

    from subquad.interop.commands import convert_commands

    if given == "-":
        return convert_commands(sys.stdin.read())
    path = Path(given)
    if "\n" not in given and len(given) < 1024 and path.is_file():
        return convert_commands(path.read_text(), path.parent)
    return convert_commands(given)
