"""`subquad bench`: what the mechanisms cost by length."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from subquad.cli.bench_models import bench_preset, bench_recipe
from subquad.cli.options import AsJson, parse_integer, parse_mechanisms, parse_mixer_options, split_words
from subquad.cli.output import print_table
from subquad.progress import Progress

if TYPE_CHECKING:
    from subquad.compare.measure.bench import Row
    from subquad.compare.measure.lengths import Part

HEADERS = ["length", "mechanism", "inference ms", "x softmax", "training ms", "x softmax"]
HEADERS += ["inference MiB", "training MiB"]


def bench(
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME=VALUE", help="Changes to the recipe of --recipe, such as train.accumulate=4."),
    ] = None,
    mixers: Annotated[
        str,
        typer.Option(
            help="The mechanisms to measure, separated by commas. `linear` stands for all mechanisms of linear memory, "
            "and `all` for all."
        ),
    ] = "linear",
    lengths: Annotated[str, typer.Option(help="The lengths of sequences, separated by commas.")] = "256,1024,4096",
    dim: Annotated[int, typer.Option(help="The width of the model.")] = 256,
    heads: Annotated[int, typer.Option(help="The number of heads.")] = 4,
    batch: Annotated[int, typer.Option(help="The sequences of a batch, as many at every length.")] = 1,
    causal: Annotated[bool, typer.Option("--causal", help="Measure the causal forms.")] = False,
    repeats: Annotated[int, typer.Option(help="How often every time is measured; the table has the median.")] = 5,
    threads: Annotated[int | None, typer.Option(help="The number of CPU threads. By default torch chooses it.")] = None,
    device: Annotated[str, typer.Option(help="The device to measure on: cpu, cuda or cuda:1.")] = "cpu",
    dtype: Annotated[
        str | None,
        typer.Option(
            help="The precision: float32, bfloat16, float16 or float64. By default float32 on the CPU, and on a GPU "
            "bfloat16 (float16 if it has none), in which softmax attention has its fast kernel."
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="MIXER.OPTION=VALUE",
            help="Set an option of a mechanism, or of --preset's model, such as encoder.layers=2. May be repeated.",
        ),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(
            metavar="RECIPE",
            help="Measure real updates of this recipe instead, with each of --mixers in its model, and say what an "
            "epoch and the run cost. The word `recipe` stands for the recipe's own model.",
        ),
    ] = None,
    updates: Annotated[int, typer.Option(min=1, help="How many updates of a recipe are timed.")] = 20,
    preset: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Measure the whole model of this preset by length instead of one layer."),
    ] = None,
    part: Annotated[
        str, typer.Option(help="What of a preset is measured: full, or encoder for its first stack alone.")
    ] = "full",
    tokens: Annotated[int, typer.Option(min=1, help="The tokens of a preset's batch, at every length.")] = 16384,
    as_json: AsJson = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write every number to this file, as JSON; models also as FILE.csv."),
    ] = None,
) -> None:
    """Measure time and memory of mechanisms by length.

    All are compared with softmax attention. Inference is a forward pass without gradients, training is a forward and a
    backward pass in training mode. Memory is the peak of what a pass allocates besides its inputs and parameters. A
    mechanism whose output fails its check gets no time, and the exit code is 1.

    Examples:
    subquad bench
    subquad bench --mixers eva,local,performer --lengths 512,2048 --set eva.window=64 --out bench.json
    subquad bench --causal --device cuda --out result.json
    subquad bench --recipe small/speeches --mixers softmax,eva --updates 20 train.budget.max_tokens=1024
    subquad bench --preset linformer_translation_k128 --part encoder --lengths 256,1024,4096 --out lengths.csv
    """
    if out is not None and not out.absolute().parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}")
    if out is not None and out.is_dir():
        raise ValueError(f"--out {out}: this is a folder, and the name of a file is needed")
    if recipe is not None:
        from subquad.recipes.schema import check_recipe

        if set_:
            raise ValueError(f"--set {set_[0]}: with --recipe, changes stand alone: NAME=VALUE, as in `subquad train`")
        check_recipe(recipe, changes or [])
    elif changes:
        raise ValueError(f"{changes[0]}: changes are for a recipe, which --recipe names; --set is for mechanisms")
    import torch

    from subquad.allocator import set_up_command
    from subquad.compare.measure.bench import BenchPlan, bench_report, run_bench
    from subquad.compare.measure.timing import default_dtype

    kept = set_up_command()  # again: importing torch has used up what the first call put aside
    if threads is not None:
        if threads < 1:
            raise ValueError(f"--threads must be at least 1 (got {threads})")
        torch.set_num_threads(threads)
    if recipe is not None:
        chosen = split_words(mixers) if mixers != "linear" else ["recipe"]
        bench_recipe(recipe, changes or [], chosen, updates, out, as_json)
        return
    sizes = [parse_integer("--lengths", word) for word in split_words(lengths)]
    precision = dtype or default_dtype(torch.device(_check_device(device)))
    if preset is not None:
        from subquad.compare.measure.presets import PresetPlan
        from subquad.config import apply_change

        own: dict[str, Any] = {}
        for change in set_ or []:
            own = apply_change(own, change)
        model = PresetPlan(preset, sizes, _check_part(part), tokens, repeats, device, precision, own)
        bench_preset(model, out, as_json)
        return
    plan = BenchPlan(
        mixers=parse_mechanisms(mixers),
        lengths=sizes,
        dim=dim,
        heads=heads,
        batch=batch,
        causal=causal,
        repeats=repeats,
        device=device,
        dtype=precision,
        options=parse_mixer_options(set_ or []),
    )
    with Progress(plan.steps) as progress:
        rows = run_bench(plan, progress)
    report = bench_report(plan, rows)
    report["environment"]["allocator"] = "keeps freed memory" if kept else "system"
    text = json.dumps(report, indent=2)
    print(text) if as_json else show_rows(rows)
    if out is not None:
        from subquad.files import write_text

        write_text(out, f"{text}\n")
    failed = list(dict.fromkeys(row.mixer for row in rows if row.status == "failed"))
    if failed:
        where = "`reason` of their rows says why" if as_json else "see the reasons under the table"
        raise ValueError(f"no times for {', '.join(failed)}: {where}")


def show_rows(rows: list["Row"]) -> None:
    """Prints the table, and below it why some mechanisms have no numbers."""
    cells: list[list[str]] = []
    for row in rows:
        if cells and cells[-1][0] != str(row.length):
            cells.append([])
        numbers = [row.status] + [""] * 5 if row.status != "done" else _numbers(row)
        cells.append([str(row.length), row.mixer, *numbers])
    print_table(HEADERS, cells, numeric=(0, *range(2, 8)))
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row.reason:
            reasons.setdefault((row.mixer, row.status, row.reason), []).append(str(row.length))
    for (mixer, status, reason), lengths in reasons.items():
        print(f"{status}: {mixer} at {', '.join(lengths)}: {reason}")


def _numbers(row: "Row") -> list[str]:
    def scaled(value: float | None, unit: float, digits: int) -> str:
        return "" if value is None else f"{value / unit:.{digits}f}"

    return [
        scaled(row.inference_seconds, 1e-3, 2),
        scaled(row.inference_ratio, 1, 2),
        scaled(row.training_seconds, 1e-3, 2),
        scaled(row.training_ratio, 1, 2),
        scaled(row.inference_bytes, 2**20, 1),
        scaled(row.training_bytes, 2**20, 1),
    ]


def _check_part(name: str) -> "Part":
    from typing import get_args

    from subquad.compare.measure.lengths import Part
    from subquad.config import nearest

    if name not in get_args(Part):
        raise ValueError(f"--part {name}: choose {' or '.join(get_args(Part))}{nearest(name, get_args(Part))}")
    return cast("Part", name)


def _check_device(name: str) -> str:
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device: no device is called {name!r}; use cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {name}: measuring works on cpu and cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {name}: torch sees {torch.cuda.device_count()} CUDA devices here")
    return name
