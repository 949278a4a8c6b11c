"""`subquad train`: a recipe, changes to it, a run directory."""

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from subquad.cli.options import split_words
from subquad.cli.output import is_rank_zero, print_table
from subquad.cli.recipes import FromCommand, read_command
from subquad.processes import exit_on_sigterm, interruptible

if TYPE_CHECKING:
    from subquad.api import RecipeLike
    from subquad.train.diagnostics.dry_run import DryRun
    from subquad.train.diagnostics.profiler import Profile

BETWEEN_UPDATES = "what the run directory has is kept, and the same command goes on from it"
VOCABULARIES = ("vocab", "source_vocab", "target_vocab")


def train(
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="RECIPE", help="A recipe: a YAML file, or a name of which `subquad recipes` lists all."),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME=VALUE",
            help="Changes to the recipe, such as model.encoder.mixer=eva train.updates=100. NAME:=VALUE replaces a "
            "whole section, as in 'data:={fairseq: data-bin/iwslt14}'.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The run directory. A run that is there goes on. By default it is runs/NAME, or the run of a recipe "
            "that is in a run directory."
        ),
    ] = None,
    from_: FromCommand = None,
    from_run: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Begin a new run with the weights, the tokenizers and the optimiser of this run, to fine-tune it. "
            "Without RECIPE the new run has the recipe of this one.",
        ),
    ] = None,
    reset: Annotated[
        str,
        typer.Option(
            metavar="PARTS",
            help="What begins anew with --from-run: optimizer (its moments), schedule (the count of updates and "
            "epochs), or both as in optimizer,schedule.",
        ),
    ] = "",
    checkpoint: Annotated[
        str, typer.Option(help="The checkpoint of --from-run: best, last, a name such as average, or a path.")
    ] = "best",
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check recipe and data, print the size and memory of the model, and stop."),
    ] = False,
    profile: Annotated[
        int | None,
        typer.Option(min=1, help="Measure where the time of this many updates goes, and write profile.json only."),
    ] = None,
) -> None:
    """Train a model, or go on with a run.

    Ctrl-C and SIGTERM finish the update, save a checkpoint and end the training, and the same command goes on from it;
    a second Ctrl-C ends it at once. Under torchrun the processes share the batches of every update, so that
    train.accumulate must be a multiple of their number.

    Examples:
    subquad train digits
    subquad train phrases model.encoder.mixer=eva --out runs/eva
    subquad train phrases train.updates=500 --dry-run
    subquad train phrases 'data.tokenizer:={kind: bpe, vocab_size: 400}' --out runs/bpe
    subquad train --from 'fairseq-train data-bin/iwslt14 -a lightconv_iwslt_de_en --max-update 50000 --max-tokens 4000'
    subquad train runs/eva/recipe.yaml --out runs/eva train.updates=4000
    subquad train --from-run runs/eva --reset optimizer,schedule model.encoder.dropout=0.3 --out runs/tuned
    torchrun --nproc-per-node=2 -m subquad train phrases train.accumulate=2 --out runs/two
    """
    chosen, given, out, start = _choose_recipe(recipe, changes or [], from_, out, _Start(from_run, reset, checkpoint))
    if isinstance(chosen, Path):
        from subquad.recipes.schema import check_recipe

        check_recipe(chosen, given)
    if dry_run:
        from subquad.train.diagnostics.dry_run import dry_run as try_out

        _show_dry_run(try_out(start.recipe if chosen is None else chosen, *given))
        return
    from subquad import api
    from subquad.progress import format_metrics

    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    with interruptible(sigterm=alone), nullcontext() if alone else exit_on_sigterm(BETWEEN_UPDATES):
        if profile is not None:
            if chosen is None:
                raise ValueError("--profile measures a recipe: name one, such as that of the run")
            found = api.profile(chosen, *given, updates=profile, out=out)
            if is_rank_zero():
                _show_profile(found, api.run_folder(chosen, out))
            return
        run = api.train(chosen, *given, out=out, from_run=start.run, reset=start.parts, checkpoint=start.checkpoint)
        if is_rank_zero():  # it reads checkpoints, and a signal must end that, too, as it ends everything before
            print(f"{run.folder}: {format_metrics(run.metrics)} after {run.updates:,} updates")


class _Start(NamedTuple):
    """The options --from-run, --reset and --checkpoint."""

    run: Path | None
    reset: str
    checkpoint: str

    @property
    def recipe(self) -> Path:
        assert self.run is not None
        return self.run / "recipe.yaml"

    @property
    def parts(self) -> list[str]:
        return split_words(self.reset)


def _choose_recipe(
    recipe: Path | None, changes: list[str], command: str | None, out: Path | None, start: _Start
) -> "tuple[RecipeLike | None, list[str], Path | None, _Start]":
    """The recipe that is named, or that of a command of an original program; with --from all words are changes.

    With --from-run there need be none.
    """
    if command is None:
        if recipe is None and start.run is None:
            raise ValueError(
                "say what to train: a recipe, --from-run and a run to begin with, or --from and a command line of an "
                "original program"
            )
        if start.run is not None and recipe is not None and "=" in str(recipe) and not recipe.exists():
            return None, [str(recipe), *changes], out, start
        return recipe, changes, out, start
    converted = read_command(command)
    if converted.recipe is None:
        raise ValueError(
            f"--from: this command of {converted.original} trains nothing; `subquad recipes --from` shows it"
        )
    for line in [*converted.notes, *(f"{words}: {why}" for words, why in converted.unsupported.items())]:
        print(f"note: {line}", file=sys.stderr)
    if start.run is None and converted.start is not None:
        start = _Start(*converted.start)
    words = [*([] if recipe is None else [str(recipe)]), *changes]
    return converted.recipe, words, out or Path(converted.run), start


def _show_profile(profile: "Profile", folder: Path) -> None:
    from subquad.train.diagnostics.profiler import PROFILE

    phases = [
        [name, f"{1000 * profile.phases[name] / profile.updates:,.1f}", f"{100 * share:.1f} %"]
        for name, share in profile.shares.items()
    ]
    print_table([f"phase of {profile.updates} updates", "ms an update", "share"], phases, numeric=(1, 2))
    print(f"in the model (forward, backward, optimiser): {100 * profile.model_share:.1f} % of the time\n")
    operators = [
        [each.name, f"{each.calls:,.0f}", f"{each.milliseconds:,.1f}", f"{100 * each.share:.1f} %"]
        for each in profile.operators
    ]
    print_table(["operator", "calls an update", "ms an update", "share"], operators, numeric=(1, 2, 3))
    print(f"written to {folder / PROFILE}")


def _show_dry_run(found: "DryRun") -> None:
    """What would be trained; ValueError at the end if its data cannot be read."""
    sizes = dict.fromkeys(size for name in VOCABULARIES if (size := found.model.get(name)) is not None)
    vocabulary = " and ".join(f"{size:,}" for size in sizes)
    given = f" with a vocabulary of {vocabulary}" if sizes else ""
    if (classes := found.model.get("num_classes")) is not None:
        given += f" with {classes:,} classes"
    if given and not found.counted:
        given += "; the data may give another"
    rows = [
        ["task", found.task],
        ["batch", f"{found.batch} images" if found.length is None else f"{found.batch} x {found.length} tokens"],
        ["parameters", f"{found.parameters:,}{given}"],
        ["training memory", f"{found.training_bytes / 1e6:,.0f} MB"],
        *([f"data: {name}", problem or "found"] for name, problem in found.data.items()),
    ]
    print_table(["", ""], rows)
    if found.problems:
        wrong = "; ".join(f"{name}: {why}" for name, why in found.problems.items())
        raise ValueError(f"this cannot be trained: {wrong}")
