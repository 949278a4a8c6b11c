"""`subquad bench`: what the mechanisms cost by length."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from subquad.cli.output import print_table, progress

if TYPE_CHECKING:
    from subquad.compare.measure.bench import Row

HEADERS = ["length", "mechanism", "forward ms", "x softmax", "train ms", "x softmax", "forward MiB", "train MiB"]


def bench(
    mixers: Annotated[
        str,
        typer.Option(help="Mechanisms, separated by commas, or linear (those of linear memory), or all."),
    ] = "linear",
    lengths: Annotated[str, typer.Option(help="Sequence lengths, separated by commas.")] = "256,1024,4096",
    dim: Annotated[int, typer.Option(help="Model width.")] = 256,
    heads: Annotated[int, typer.Option(help="Number of heads.")] = 4,
    batch: Annotated[int, typer.Option(help="Sequences per batch, the same at every length.")] = 1,
    causal: Annotated[bool, typer.Option("--causal", help="Measure the causal forms.")] = False,
    repeats: Annotated[int, typer.Option(help="Timed repeats; the table shows their median.")] = 5,
    threads: Annotated[int | None, typer.Option(help="CPU threads; default: as torch chooses.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="MIXER.OPTION=VALUE", help="Option of a mechanism; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="The JSON file to write every number to.")] = None,
) -> None:
    """Measure time and memory of mechanisms by length.

    All are held against softmax attention. forward: inference, without gradients. train: forward and backward in
    training mode. Memory is what a pass adds to its inputs and parameters at its worst moment. A mechanism whose output
    fails its check gets no time, and the exit code is 1.

    Examples:
    subquad bench
    subquad bench --mixers eva,local,performer --lengths 512,2048 --set eva.window=64 --out bench.json
    subquad bench --causal --dtype bfloat16 --device cuda
    """
    if out is not None and not out.absolute().parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}")
    if out is not None and out.is_dir():
        raise ValueError(f"--out {out}: this is a folder, and the name of a file is needed")
    import torch

    from subquad.allocator import set_up_command
    from subquad.compare.measure.bench import Plan, report, run

    kept = set_up_command()  # again: importing torch has used up what the first call put aside
    if threads is not None:
        if threads < 1:
            raise ValueError(f"--threads must be at least 1 (got {threads})")
        torch.set_num_threads(threads)
    plan = Plan(
        mixers=mechanisms(mixers),
        lengths=[integer("--lengths", word) for word in words_of(lengths)],
        dim=dim,
        heads=heads,
        batch=batch,
        causal=causal,
        repeats=repeats,
        device=_usable_device(device),
        dtype=dtype,
        options=parse_settings(set_ or []),
    )
    with progress(plan.steps) as step:
        rows = run(plan, step)
    written = report(plan, rows)
    written["environment"]["allocator"] = "keeps freed memory" if kept else "system"
    text = json.dumps(written, indent=2)
    print(text) if as_json else show(rows)
    if out is not None:
        out.write_text(f"{text}\n")
    failed = list(dict.fromkeys(row.mixer for row in rows if row.status == "failed"))
    if failed:
        where = "`reason` of their rows says why" if as_json else "see the reasons under the table"
        raise ValueError(f"no times for {', '.join(failed)}: {where}")


def show(rows: list["Row"]) -> None:
    """The table, and below it why some mechanisms have no numbers."""
    cells: list[list[str]] = []
    for row in rows:
        if cells and cells[-1][0] != str(row.length):
            cells.append([])
        numbers = [row.status] + [""] * 5 if row.status != "ok" else _numbers(row)
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
        scaled(row.forward_seconds, 1e-3, 2),
        scaled(row.forward_ratio, 1, 2),
        scaled(row.training_seconds, 1e-3, 2),
        scaled(row.training_ratio, 1, 2),
        scaled(row.forward_peak_bytes, 2**20, 1),
        scaled(row.training_peak_bytes, 2**20, 1),
    ]


def parse_settings(settings: list[str]) -> dict[str, dict[str, Any]]:
    """["eva.window=64"] -> {"eva": {"window": 64}}; values are read as YAML scalars."""
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


def mechanisms(text: str) -> list[str]:
    from subquad.mixers import available, mixer_class

    if text == "linear":
        return [name for name in available() if mixer_class(name).capabilities.linear]
    return available() if text == "all" else words_of(text)


def words_of(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def integer(option: str, word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"{option}: {word!r} is not a whole number") from None


def _usable_device(name: str) -> str:
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
