"""`subquad recipes`: those that come with subquad, and command lines of the original programs as recipes."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from subquad.cli.options import AsJson
from subquad.cli.output import print_table

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
    word: Annotated[
        str | None,
        typer.Argument(metavar="WORD", help="List the recipes that have this word in name, task, mechanism or data."),
    ] = None,
    copy: Annotated[
        str | None, typer.Option(metavar="NAME", help="Write this recipe to a file, to change it for your own data.")
    ] = None,
    from_: FromCommand = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The file to write. By default a copy is NAME.yaml, and a converted command is printed."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List, search and copy recipes, or convert an original command.

    Every recipe that is listed has a name which works in any folder: `subquad train NAME`. Those that follow a program
    or a paper need its data where the recipe says; those with an embedded set need nothing.

    With --from, nothing of the command is run. The recipe has the defaults of the original's architecture, then the
    flags, and each line names the flag that it came from. What has no counterpart is listed with the reason, and so are
    the commands to run here. Programs: fairseq-train, -generate, -interactive, -validate, -eval-lm and -preprocess,
    average_checkpoints.py, main.sh and main.py of efficient-attention, train.py and train_efficiency.py of
    PrimalAttention, and run.sh of crybot/linformer, whose config file is read.

    Examples:
    subquad recipes
    subquad recipes dynamicconv
    subquad recipes --copy phrases --out my.yaml
    subquad recipes --from 'fairseq-train data-bin/iwslt14 -a lightconv_iwslt_de_en --max-update 50000 --lr 0.0005'
    subquad recipes --from train.sh --out my.yaml
    """
    if sum(given is not None for given in (word, copy, from_)) > 1:
        raise ValueError("give a word to search for, --copy or --from, not several of them")
    if copy is not None:
        copy_recipe(copy, out)
    elif from_ is not None:
        convert(from_, out)
    else:
        list_recipes(word, as_json)


def list_recipes(word: str | None, as_json: bool) -> None:
    from subquad.recipes import search

    found = search(word)
    if as_json:
        print(json.dumps([vars(entry) for entry in found], indent=2))
        return
    if not found:
        raise ValueError(f"no recipe has the word {word!r}; `subquad recipes` lists all")
    rows = [
        [entry.name, entry.task, ", ".join(entry.mechanisms), entry.data, _size(entry.parameters), entry.origin]
        for entry in found
    ]
    print_table(["recipe", "task", "mechanisms", "data", "parameters", "from"], rows, numeric=[4])
    print("\n`subquad train NAME` trains one, `subquad recipes --copy NAME` writes it to a file.")


def _size(parameters: int) -> str:
    return f"{parameters / 1e6:,.1f} M" if parameters >= 1e6 else f"{parameters / 1e3:,.0f} k"


def copy_recipe(name: str, out: Path | None) -> None:
    from subquad.files import write_text
    from subquad.recipes import find_recipe

    source = find_recipe(name)
    target = out or Path(source.name)
    if target.exists():
        raise ValueError(f"{target} exists already; give another file with --out")
    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, source.read_text())
    print(f"{target}: written; `subquad train {target}` trains it")


def convert(command: str, out: Path | None) -> None:
    """Prints or writes the recipe of an original program's command line."""
    found = read_command(command)
    if out is None:
        print(found.to_text(), end="")
        return
    if found.recipe is None:
        raise ValueError(f"--out: this command of {found.original} trains nothing, so that there is no recipe to write")
    from subquad.files import write_text
    from subquad.interop.commands import RECIPE

    write_text(out, found.to_text().replace(RECIPE, str(out)))
    print("\n".join([f"{out}: written. To run it:", *(line.replace(RECIPE, str(out)) for line in found.commands)]))


def read_command(given: str) -> "Conversion":
    """Converts a command that is given as words, as a file, or on standard input."""
    import sys

    from subquad.interop.commands import convert_commands

    if given == "-":
        return convert_commands(sys.stdin.read())
    path = Path(given)
    try:
        is_file = path.is_file()
    except OSError:  # most commands are longer than the name of a file may be
        is_file = False
    return convert_commands(path.read_text(), path.parent) if is_file else convert_commands(given)
