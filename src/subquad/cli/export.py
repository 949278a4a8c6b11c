"""`subquad export`: a trained model as files for other programs."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from subquad.cli.options import Checkpoint, RunFolder


class Target(StrEnum):
    onnx = "onnx"
    torch = "torch"
    huggingface = "huggingface"


def export(
    run: RunFolder,
    to: Annotated[
        Target,
        typer.Option(help="The format: onnx for onnxruntime, torch for torch.export, huggingface for transformers."),
    ],
    out: Annotated[Path, typer.Option(help="The folder to write, which must be new or empty.")],
    checkpoint: Checkpoint = "best",
) -> None:
    """Write a model as files for other programs, with a model card.

    ONNX and .pt2 files accept any batch size and length, and run without subquad. A model that writes text is exported
    as one decoding step, whose state is among its inputs and outputs. The files are checked against the model before
    they get their names. transformers loads a Hugging Face folder after `import subquad.interop.huggingface`, or with
    `trust_remote_code=True`.

    Examples:
    subquad export runs/digits --to onnx --out digits-onnx
    subquad export runs/phrases --to torch --out phrases-pt2 --checkpoint average
    subquad export runs/speeches --to huggingface --out speeches-hf
    """
    from subquad.api import load_run

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists already; give a new folder, or remove it")
    loaded = load_run(run, checkpoint).loaded
    if to is Target.huggingface:
        from subquad.interop.huggingface import save_huggingface

        save_huggingface(loaded, out)
        print(f"{out}: update {loaded.update:,} of {run} for transformers")
        return
    from subquad.interop.export.check import TOLERANCE
    from subquad.interop.export.files import export_run

    files = export_run(loaded, "onnx" if to is Target.onnx else "torch", out)
    print(f"{out}: {', '.join(files)}; they agree with update {loaded.update:,} of {run} to {TOLERANCE:g}")
