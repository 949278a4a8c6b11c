"""`subquad export`: a trained model as files for other programs."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Target(StrEnum):
    onnx = "onnx"
    torch = "torch"
    huggingface = "huggingface"


def export(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run directory that `subquad train` or `subquad import` made.")
    ],
    to: Annotated[
        Target, typer.Option(help="onnx: for onnxruntime; torch: .pt2 of torch.export; huggingface: for transformers.")
    ],
    out: Annotated[Path, typer.Option(help="The folder to make.")],
    checkpoint: Annotated[str, typer.Option(help="best, last, the name of one (such as average), or a path.")] = "best",
) -> None:
    """Write a model for other programs, with a model card.

    ONNX and .pt2 files take any batch and length, and run without subquad. Models that write text become a step from
    token to token with its state as inputs and outputs. The files are held against the model before they get their
    names. A Hugging Face folder is loaded by transformers after `import subquad.interop.huggingface`.

    Examples:
    subquad export runs/digits --to onnx --out digits-onnx
    subquad export runs/phrases --to torch --out phrases-pt2 --checkpoint average
    subquad export runs/speeches --to huggingface --out speeches-hf
    """
    from subquad.train.artifacts import local_run
    from subquad.train.loaded import load_run

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is there already; give a new folder, or remove it")
    loaded = load_run(local_run(run), checkpoint)
    if to is Target.huggingface:
        from subquad.interop.huggingface import save_huggingface

        save_huggingface(loaded, out)
        print(f"{out}: update {loaded.update:,} of {run} for transformers")
        return
    from subquad.interop.export.check import TOLERANCE
    from subquad.interop.export.files import export_run

    files = export_run(loaded, "onnx" if to is Target.onnx else "torch", out)
    print(f"{out}: {', '.join(files)}; they agree with update {loaded.update:,} of {run} to {TOLERANCE:g}")
