"""The entry point of `subquad`: its commands, and how every error becomes one line."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import subquad
from subquad.cli.average import average
from subquad.cli.bench import bench
from subquad.cli.classify import classify
from subquad.cli.compare import compare
from subquad.cli.data import data
from subquad.cli.demo import demo
from subquad.cli.docs import docs
from subquad.cli.doctor import doctor
from subquad.cli.evaluate import evaluate
from subquad.cli.generate import generate
from subquad.cli.info import info
from subquad.cli.train import train
from subquad.cli.translate import translate

INTERRUPTED = 130

# Rich help would cost more than half of the time that `--help` may take.
app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(train)
app.command()(evaluate)
app.command()(average)
app.command()(translate)
app.command()(generate)
app.command()(classify)
app.add_typer(data, name="data")
app.command()(info)
app.command()(compare)
app.command()(bench)
app.command()(demo)
app.command()(doctor)
app.command(hidden=True)(docs)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"subquad {subquad.__version__}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[  # noqa: ARG001
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[  # noqa: ARG001
        bool, typer.Option("--debug", help="Show the traceback of an error; may stand anywhere.")
    ] = False,
) -> None:
    """Sequence mixing that costs less than the square of the length."""
    # Here every command passes, and a plain `--help` does not.
    from subquad.allocator import set_up_command

    set_up_command()


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; returns its exit code. Bad input is one line on stderr."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"] or ["--help"]
    try:
        code = typer.main.get_command(app).main(words, prog_name="subquad", standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            raise
        print(f"subquad: error: {_one_line(error)}", file=sys.stderr)
        return getattr(error, "exit_code", 1)
    if code == INTERRUPTED:
        print("subquad: interrupted", file=sys.stderr)
    return code or 0


def _one_line(error: Exception) -> str:
    if hasattr(error, "format_message"):  # a word that the command line does not know
        text = error.format_message()
    elif isinstance(error, ValueError | OSError):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error} (this is a defect of subquad; --debug shows where)"
    return " ".join(text.split())


if __name__ == "__main__":
    sys.exit(run())
