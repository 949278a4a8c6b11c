"""The entry point of `subquad`: its commands, and how every error becomes one line."""

import functools
import gc
import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

import subquad
from subquad.cli.output import Command, Group, styled
from subquad.packages import PLUGINS, name_plugins, plugins
from subquad.processes import INTERRUPTED, InterruptionError, error_line, printable

SPINS = "1000"
"""So many turns of a loop, some ten microseconds, a thread waits awake for the next piece of work."""
LOCAL_RANK = re.compile(r"--local[-_]rank=\d+")
"""The word that `python -m torch.distributed.launch` gives to every process; the environment says the same."""

PluginOption = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        metavar="MODULE",
        help="Import this module, which registers mechanisms. It may be given several times. The mechanisms of "
        "installed packages need no such option.",
    ),
]


def takes_plugins(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the option `--plugin`. The modules are imported where mechanisms are first asked for."""

    @functools.wraps(command)
    def with_plugins(*arguments: Any, plugin: list[str] | None = None, **options: Any) -> None:
        before = plugins()
        name_plugins(*plugin or [])
        try:
            command(*arguments, **options)
        finally:
            os.environ[PLUGINS] = ",".join(before)

    signature = inspect.signature(command)
    added = inspect.Parameter("plugin", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=PluginOption)
    with_plugins.__signature__ = signature.replace(parameters=[*signature.parameters.values(), added])  # type: ignore
    with_plugins.__annotations__ = {**command.__annotations__, "plugin": PluginOption}
    return with_plugins


COMMANDS = (
    *(
        "train",
        "evaluate",
        "average",
        "translate",
        "generate",
        "classify",
        "import",
        "export",
        "linearise",
        "data",
        "recipes",
    ),
    *("info", "compare", "merge", "bench", "advise", "demo", "doctor"),
)
"""In the order of the help. Each is a function, or a group of commands, in a module of its own."""
WITHOUT_PLUGINS = ("import", "data", "recipes", "merge")


def build_app(names: Sequence[str] = COMMANDS) -> typer.Typer:
    """Returns the program with these commands. Only their modules are imported."""
    # Rich help would cost more than half of the time that `--help` may take.
    app = typer.Typer(cls=Group, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.callback()(options)
    for name in names:
        word = "import_" if name == "import" else name
        command = getattr(import_module(f"subquad.cli.{word}"), word)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name, cls=Command)(command if name in WITHOUT_PLUGINS else takes_plugins(command))
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"subquad {subquad.__version__}")
        raise typer.Exit()


def options(
    version: Annotated[  # noqa: ARG001
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[  # noqa: ARG001
        bool, typer.Option("--debug", help="Show the traceback of an error. It may stand anywhere in the command.")
    ] = False,
) -> None:
    """Train, compare and use sequence models whose cost grows less than the square of the length.

    `subquad COMMAND --help` explains a command. Colours are for terminals only, and NO_COLOR=1 turns them off.

    Examples:
    subquad doctor
    subquad demo
    subquad train phrases --out runs/phrases
    echo "5 km" | subquad translate runs/phrases
    """
    # Here every command passes, and a plain `--help` does not.
    from subquad.allocator import set_up_command

    set_up_command()


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; returns its exit code. Bad input is one line on stderr."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    if arguments is None:  # a program of its own, not a call within another
        warnings.formatwarning = _warning
        _let_threads_sleep()
    words = [word for word in words if word != "--debug" and not LOCAL_RANK.fullmatch(word)] or ["--help"]
    words = _with_kind_of_bpe(words)
    try:
        app = build_app(words[:1] if words[0] in COMMANDS else COMMANDS)
        code = typer.main.get_command(app).main(words, prog_name="subquad", standalone_mode=False)
        sys.stdout.flush()
    except InterruptionError as error:
        print(f"subquad: {error}", file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            raise
        label = styled("error:", sys.stderr, fg="red", bold=True)
        print(f"subquad: {label} {_one_line(error, words)}", file=sys.stderr)
        if arguments is None and "torch" not in sys.modules:
            gc.freeze()  # nothing was begun: at its end Python need not look for garbage, a tenth of a refusal's time
        return getattr(error, "exit_code", 1)
    if code == INTERRUPTED:
        print("subquad: interrupted", file=sys.stderr)
    return code or 0


def _let_threads_sleep() -> None:
    """Has threads that wait for work give up their core after some microseconds, in this process and its children.

    GNU's OpenMP, which torch's loops and ours share, reads this when it is loaded: torch must not be imported yet. By
    itself it waits for milliseconds in a loop. Where another process needs a core, the threads that work then wait for
    those that only wait, in every loop, and an update takes several times as long. Users' own settings are kept.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPINS


def _with_kind_of_bpe(words: Sequence[str]) -> list[str]:
    """Gives `--remove-bpe` its kind where it stands alone, as in fairseq's commands."""
    given: list[str] = []
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        given += [word, "subword_nmt"] if word == "--remove-bpe" and after.startswith("-") else [word]
    return given


def _warning(message: Warning | str, category: type[Warning], *_place: Any, **_line: Any) -> str:
    """A warning as one line: who reads it did not write the code that it came from."""
    kind = "" if category is UserWarning else f"{category.__name__}: "
    return f"subquad: {styled('warning:', sys.stderr, fg='yellow', bold=True)} {kind}{printable(str(message))}\n"


def _one_line(error: Exception, words: Sequence[str]) -> str:
    if hasattr(error, "format_message"):  # a word that the command line does not know
        return printable(" ".join(_usage(error, words).split()))
    return error_line(error)


def _usage(error: Any, words: Sequence[str]) -> str:
    meaning = _flag_meaning(str(getattr(error, "option_name", "")), words)
    text = error.message if meaning else error.format_message().replace("Value error, ", "")
    text, context = text.rstrip("."), getattr(error, "ctx", None)
    return f"{text}{meaning}; see `{context.command_path if context else 'subquad'} --help`"


def _flag_meaning(flag: str, words: Sequence[str]) -> str:
    """What a flag of an original program is here: `--lr 0.001` is schedule.lr=0.001."""
    from subquad.config import find_flag

    found = find_flag(flag) if flag.startswith("--") else None
    if found is None:
        return ""
    program, known = found
    place = next((number for number, word in enumerate(words) if word.partition("=")[0] == flag), len(words))
    _, equals, value = words[place].partition("=") if place < len(words) else ("", "", "")
    if not equals and place + 1 < len(words) and not words[place + 1].startswith("--"):
        value = words[place + 1]
    if not known.fields:
        return f"; {program}'s {flag}: {known.reason}"
    is_field = re.fullmatch(r"\w+(\.\w+)+", known.fields) is not None
    said = f"{known.fields}={value}" if is_field and value and not known.switch else known.fields
    return f"; {program}'s {flag} is {said} here"


if __name__ == "__main__":
    sys.exit(run())
