"""Arguments and options that several commands have."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN", help="The run directory, as `subquad train` or `subquad import` made it.")
]
RunFolders = Annotated[
    list[Path],
    typer.Argument(metavar="RUN", help="The run directory. Several runs are used together, as an ensemble."),
]
RecipeFile = Annotated[
    Path,
    typer.Argument(metavar="RECIPE", help="A recipe: a YAML file, or a name of which `subquad recipes` lists all."),
]
Checkpoint = Annotated[
    str,
    typer.Option(
        help="The checkpoint to use: best (by the validation metric), last, a name such as average, or a path."
    ),
]
RemoveBpe = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        help="Join pieces into words where the codes of a vocabulary are not there: subword_nmt (also without KIND) "
        "after @@, sentencepiece at ▁.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Int8 = Annotated[
    bool, typer.Option("--int8", help="Use weights of 8 bits, which is faster for few lines and less exact.")
]
Bfloat16 = Annotated[
    bool, typer.Option("--bfloat16", help="Use weights and states of 16 bits, which is faster on a GPU and less exact.")
]
Graphs = Annotated[bool, typer.Option("--graphs", help="Replay decoding steps as CUDA graphs, which needs a GPU.")]
Compile = Annotated[
    bool, typer.Option("--compile", help="Compile the model with torch.compile, which pays off for long input.")
]


# ---------------------------------------------------------------------- values of options


def refuse_other_folders(run: Path) -> None:
    """Refuses what is no run: commands call it before they import torch."""
    from subquad.train.run_folder import check_run_or_artifact

    check_run_or_artifact(str(run))


def weights_option(int8: bool, bfloat16: bool) -> str | None:
    """The option `weights` of decoding, None: that of the recipe."""
    if int8 and bfloat16:
        raise ValueError("give --int8 or --bfloat16, not both")
    return "int8" if int8 else "bfloat16" if bfloat16 else None


def split_words(text: str) -> list[str]:
    """ "a, b" -> ["a", "b"]."""
    return [word.strip() for word in text.split(",") if word.strip()]


def parse_integer(option: str, word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"{option}: {word!r} is not a whole number") from None


def parse_mechanisms(text: str) -> list[str]:
    """The words of the option --mixers; `linear` stands for all mechanisms of linear memory, `all` for all."""
    if text not in ("linear", "all"):
        return split_words(text)
    from subquad.mixers import available, mixer_class

    return [name for name in available() if text == "all" or mixer_class(name).capabilities.linear]


def parse_mixers(values: Sequence[str]) -> list[str]:
    """The words of an option --mixers that may be repeated: a value with a `*` is one pattern, the others are lists."""
    return [word for value in values for word in ([value.strip()] if "*" in value else parse_mechanisms(value))]


def parse_mixer_options(settings: Sequence[str]) -> dict[str, dict[str, Any]]:
    """["eva.window=64", "eva.schedule.lr=1e-3"] -> {"eva": {"window": 64, "schedule.lr": 1e-3}}; values are YAML."""
    from subquad.files import parse_yaml

    options: dict[str, dict[str, Any]] = {}
    for setting in settings:
        place, equals, value = setting.partition("=")
        mixer, dot, option = place.partition(".")
        if not (equals and dot and mixer and option):
            raise ValueError(f"--set {setting}: write MIXER.OPTION=VALUE, for example eva.window=64")
        try:
            options.setdefault(mixer, {})[option] = parse_yaml(value)
        except ValueError:
            raise ValueError(f"--set {setting}: cannot read the value {value!r}") from None
    return options
