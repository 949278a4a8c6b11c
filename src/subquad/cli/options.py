"""Arguments and options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN", help="The run directory, as `subquad train` or `subquad import` made it.")
]
RunFolders = Annotated[
    list[Path],
    typer.Argument(metavar="RUN", help="The run directory. Several runs are used together, as an ensemble."),
]
RecipeFile = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="A recipe, which is a YAML file. The folder recipes/ has examples.")
]
Checkpoint = Annotated[
    str,
    typer.Option(
        help="The checkpoint to use: best (by the validation metric), last, a name such as average, or a path."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Int8 = Annotated[
    bool, typer.Option("--int8", help="Use weights of 8 bits, which is faster for few lines and less exact.")
]
Compile = Annotated[
    bool, typer.Option("--compile", help="Compile the model with torch.compile, which pays off for long input.")
]
