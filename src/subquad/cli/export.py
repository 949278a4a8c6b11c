"""`subquad export`: a trained model as files for other programs."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from subquad.cli.options import Checkpoint


class Target(StrEnum):
    onnx = "onnx"
    torch = "torch"
    huggingface = "huggingface"


def export(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="The run directory, or the folder of a model that was linearised."),
    ],
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
    subquad export runs/eva/model --to onnx --out linearised-onnx
    """
    from subquad.train.run_folder import check_run_or_artifact, is_swapped_model

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists already; give a new folder, or remove it")
    is_swapped = is_swapped_model(run)
    if is_swapped and to is Target.huggingface:
        raise ValueError(f"{run} is a model of Hugging Face transformers already")
    if not is_swapped:
        check_run_or_artifact(str(run))
    from subquad.api import load_run
    from subquad.interop.export.check import TOLERANCE
    from subquad.interop.export.files import Form, export_run
    from subquad.interop.export.swapped import export_swapped

    form: Form = "onnx" if to is Target.onnx else "torch"
    if is_swapped:
        print(f"{out}: {', '.join(export_swapped(run, form, out))}; they agree with {run} to {TOLERANCE:g}")
        return
    loaded = load_run(run, checkpoint).loaded
    if to is Target.huggingface:
        from subquad.interop.huggingface import save_huggingface

        save_huggingface(loaded, out)
        print(f"{out}: update {loaded.update:,} of {run} for transformers")
        return
    files = export_run(loaded, form, out)
    print(f"{out}: {', '.join(files)}; they agree with update {loaded.update:,} of {run} to {TOLERANCE:g}")
