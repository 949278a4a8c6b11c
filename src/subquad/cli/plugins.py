"""`--plugin MODULE`, which every command that builds models has: mechanisms of modules that are not installed."""

import functools
import inspect
import os
from collections.abc import Callable
from typing import Annotated, Any

import typer

from subquad.packages import PLUGINS, name_plugins, plugins

Option = Annotated[
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
    added = inspect.Parameter("plugin", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Option)
    with_plugins.__signature__ = signature.replace(parameters=[*signature.parameters.values(), added])  # type: ignore
    with_plugins.__annotations__ = {**command.__annotations__, "plugin": Option}
    return with_plugins
