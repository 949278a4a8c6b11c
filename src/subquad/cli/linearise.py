"""`subquad linearise`: a pretrained model, a mechanism in place of its attention, and data to learn from."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subquad.cli.options import parse_integer, split_words
from subquad.cli.output import print_table
from subquad.processes import interruptible

if TYPE_CHECKING:
    from subquad.linearise.estimate import Estimate


class Tune(StrEnum):
    all = "all"
    lora = "lora"
    none = "none"


def linearise(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="The folder of a model of transformers, or its name on the hub; or the directory of a run.",
        ),
    ],
    mixer: Annotated[
        str,
        typer.Option(
            help="The mechanism that takes the place of attention, with its options as in eva=window=64,landmarks=8, "
            "or a pattern of layers such as eva*3,softmax, in which softmax stands for attention that stays."
        ),
    ],
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="A text file, a table or folder of labelled texts, a folder of images, or the name of a built-in set. "
            "Give the option several times for several text files. A run has data of its own."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The folder for the model, its report and checkpoints. What was begun there goes on."),
    ] = None,
    valid: Annotated[
        list[str] | None,
        typer.Option(help="The data that is evaluated on. By default a part of --data is held out for this."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="The folder of a tokenizer, or bytes. By default the model's own is used, or bytes."),
    ] = None,
    keep: Annotated[
        int, typer.Option(min=0, help="Let this many layers keep attention: those whose replacement costs most.")
    ] = 0,
    transfer_updates: Annotated[
        int, typer.Option(min=0, help="The number of updates in which mixers learn to reproduce attention.")
    ] = 200,
    transfer_lr: Annotated[float, typer.Option(help="The highest learning rate of attention transfer.")] = 1e-3,
    tune: Annotated[
        Tune, typer.Option(help="Fine-tune all weights, the mixers and LoRA's matrices (needs PEFT), or nothing.")
    ] = Tune.all,
    tune_updates: Annotated[int, typer.Option(min=0, help="The number of updates of fine-tuning.")] = 400,
    tune_lr: Annotated[float, typer.Option(help="The highest learning rate of fine-tuning.")] = 5e-4,
    rank: Annotated[int, typer.Option(min=1, help="The rank of LoRA's matrices.")] = 8,
    distill: Annotated[
        float, typer.Option(min=0, help="Add the divergence from the teacher's predictions to the loss, times this.")
    ] = 0.0,
    batch: Annotated[int, typer.Option(min=1, help="The number of samples of an update.")] = 8,
    length: Annotated[int, typer.Option(min=2, help="The number of tokens of a piece of text.")] = 1024,
    seed: Annotated[int, typer.Option(min=0, help="The seed of new weights and of the order of the data.")] = 1,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Measure speed and memory at these lengths before and after, and decoding after so many tokens. "
            "By default these are the length of the samples and half of it; '' measures nothing.",
        ),
    ] = None,
    controls: Annotated[
        bool,
        typer.Option(
            "--controls/--no-controls",
            help="Also train the same model from scratch with as many updates, and one without any mixing, to compare.",
        ),
    ] = True,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Measure one update of each stage, print the memory and time of all, and stop."),
    ] = False,
) -> None:
    """Make a pretrained model sub-quadratic.

    Mixers take the place of attention and learn to reproduce its output; then the model is fine-tuned. FOLDER/model is
    loaded by `subquad.load_swapped` or, after `import subquad.interop.huggingface`, by transformers' Auto classes;
    FOLDER/report.md compares it with what it was. Ctrl-C saves, and the same command goes on.

    Examples:
    subquad linearise gpt2 --mixer eva=window=64 --data train.txt --out runs/eva
    subquad linearise bert-base-uncased --mixer local --data train.txt --tune lora --distill 1 --out runs/local
    subquad linearise gpt2 --mixer performer --keep 2 --data train.txt --lengths 1024,4096 --out runs/hybrid
    subquad linearise gpt2 --mixer 'eva*11,softmax' --data train.txt --dry-run
    subquad linearise runs/softmax --mixer local --out runs/local
    """
    from subquad import api

    options: dict[str, Any] = {
        "valid": valid or (),
        "tokenizer": tokenizer,
        "keep": keep,
        "transfer_updates": transfer_updates,
        "transfer_lr": transfer_lr,
        "tune": tune.value,
        "tune_updates": tune_updates,
        "tune_lr": tune_lr,
        "rank": rank,
        "distill": distill,
        "batch": batch,
        "length": length,
        "seed": seed,
        "lengths": None if lengths is None else tuple(parse_integer("--lengths", one) for one in split_words(lengths)),
        "controls": controls,
    }
    if dry_run:
        _show(api.linearise_dry_run(model, mixer, data or (), **options))
        return
    if out is None:
        raise ValueError("say where the model goes, with --out FOLDER")
    with interruptible():
        found = api.linearise(model, mixer, data or (), out=out, **options)
    print((found.folder / "report.md").read_text(encoding="utf-8"))
    if (found.folder / "model").exists():
        print(f"{found.folder / 'model'}: the model, for subquad.load_swapped and transformers' Auto classes")
    elif (found.folder / "run").exists():
        print(f"{found.folder / 'run'}: the model, as a run")


def _show(found: "Estimate") -> None:
    from subquad.compare.report.formatting import format_bytes, format_count
    from subquad.progress import format_duration

    print(f"{format_count(found.parameters)} parameters, {format_count(found.mixers)} in {', '.join(found.layers)}")
    rows = [
        [
            stage.name,
            f"{stage.updates:,}",
            format_count(stage.trained),
            f"{stage.seconds:.2f} s",
            format_bytes(stage.peak_bytes),
        ]
        for stage in found.stages
    ]
    print_table(["stage", "updates", "trained", "an update", "its memory"], rows, numeric=(1, 2, 3, 4))
    what = "with controls" if found.controls else "without controls"
    print(f"about {format_duration(found.seconds)} for all updates {what}, on this machine as busy as it is now")
    print(f"memory: about {format_bytes(found.peak_bytes)}, {format_bytes(found.bytes)} of it for the weights")
