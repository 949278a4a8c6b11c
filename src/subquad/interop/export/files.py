"""Exports as files: `NAME.onnx` or `NAME.pt2` for each part of a model, and what their callers need beside them.

    export.json     inputs and outputs of every file: names, types, shapes, what a state begins with
    README.md       the model card, with a program that uses the files
    tokenizers/, inputs.json     as in the run: what turns text or images into the model's inputs

Files are written into a folder under a temporary name and checked there against the model. The folder gets its name
only if they compute the same.
"""

import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram

from subquad.data.images.inputs import Augmented
from subquad.files import write_json
from subquad.interop.export.card import CARD, model_card
from subquad.interop.export.check import Call, check_parts
from subquad.interop.export.graphs import Part, described, trace, whole_of_images, whole_of_text
from subquad.interop.export.step import decoding_parts
from subquad.interop.export.usage import usage
from subquad.models import (
    LanguageModel,
    MaskedLanguageModel,
    Model,
    Pyramid,
    Seq2Seq,
    TextClassifier,
    VisionTransformer,
)
from subquad.packages import require
from subquad.tasks.base import INPUTS, TOKENIZERS
from subquad.tasks.masked_language_model import beginning
from subquad.train.run import LoadedRun

Form = Literal["onnx", "torch"]
DESCRIPTION, FORMAT = "export.json", 1
LARGEST_FILE = 2**30
"""Bytes of weights that an ONNX file holds itself; more are in a file beside it, since protobuf ends at 2 GiB."""
TORCH_TO_ITSELF = r"`isinstance\(treespec, LeafSpec\)` is deprecated"
"""How a warning begins that torch's exporter gives about its own code: no user can act on it."""


def export_run(run: LoadedRun, form: Form, out: Path) -> list[str]:
    """Writes the model of a run into the folder `out`, which must be new or empty; names of the files with parts."""
    model = run.model.cpu().float().eval()
    parts = parts_of(model, _image_size(run.inputs.get("transform")))
    card = model_card(model, usage(form, parts, *_symbols(run)), run, library="onnx" if form == "onnx" else "torch")
    return write_export(parts, model, form, out, card, run.folder)


def _symbols(run: LoadedRun) -> tuple[int, int | None]:
    """What a text begins with, and what hides a word of it: see `usage`."""
    if isinstance(run.model, MaskedLanguageModel):
        return beginning(run.tokenizer("text")), run.model.config.mask
    sides = {Seq2Seq: "target", LanguageModel: "text"}
    return run.tokenizer(sides[type(run.model)]).eos if type(run.model) in sides else 0, None


def _image_size(transform: Mapping[str, Any] | None) -> int | None:
    """Side of the images that a transform, as a run describes it, makes; None without one: the model reads text."""
    if transform is None:
        return None
    return transform["options"]["size"] if transform["kind"] == Augmented.kind else transform["shape"][-1]


def parts_of(model: Model, image_size: int | None = None) -> list[Part]:
    """The graphs of a model. image_size: of a pyramid's images, which its config does not say."""
    if isinstance(model, Seq2Seq):
        return decoding_parts(model)
    if isinstance(model, LanguageModel):
        return [whole_of_text(model), *decoding_parts(model)]
    if isinstance(model, MaskedLanguageModel | TextClassifier):
        return [whole_of_text(model)]
    assert isinstance(model, VisionTransformer | Pyramid)
    side = model.config.image_size if isinstance(model, VisionTransformer) else image_size
    if side is None:
        raise ValueError("a pyramid takes images of any size, and an export those of one: give image_size")
    return [whole_of_images(model, side)]


def write_export(
    parts: Sequence[Part], model: Model, form: Form, out: Path, card: str, run: Path | None = None
) -> list[str]:
    """Writes and checks the parts of a model. card: the text of its card; run: whose tokenizers come along."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is there already; give a new folder, or remove it")
    suffix, save, open_, needed = FORMS[form]
    for package in needed:  # asked before the work is done
        require(package, f"exporting to {form}", "export")
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        files = {part.name: f"{part.name}.{suffix}" for part in parts}
        for part in parts:
            save(part, trace(part), temporary / files[part.name])
        check_parts(parts, {part.name: open_(part, temporary / files[part.name]) for part in parts}, model)
        content = {part.name: {"file": files[part.name], **described(part)} for part in parts}
        write_json(temporary / DESCRIPTION, {"format": FORMAT, "model": model.config.kind, "parts": content})
        (temporary / CARD).write_text(card, encoding="utf-8")
        if run is not None:
            _copy_inputs(run, temporary)
        temporary.replace(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # it is still there only if something went wrong
    return list(files.values())


def _copy_inputs(run: Path, out: Path) -> None:
    shutil.copy(run / INPUTS, out / INPUTS)
    if (run / TOKENIZERS).is_dir():
        shutil.copytree(run / TOKENIZERS, out / TOKENIZERS)


# ---------------------------------------------------------------------- forms


def save_torch(part: Part, program: ExportedProgram, path: Path) -> None:  # noqa: ARG001
    torch.export.save(program, path)


def open_torch(part: Part, path: Path) -> Call:
    graph = torch.export.load(path).module()

    def call(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with torch.no_grad():
            return dict(zip(part.outputs, graph(*(given[name] for name in part.inputs)), strict=True))

    return call


def save_onnx(part: Part, program: ExportedProgram, path: Path) -> None:
    weights = sum(value.numel() * value.element_size() for value in program.state_dict.values())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", TORCH_TO_ITSELF, FutureWarning)
        torch.onnx.export(
            program,
            (),
            path,
            input_names=list(part.inputs),
            output_names=list(part.outputs),
            dynamo=True,
            verbose=False,
            external_data=weights > LARGEST_FILE,
        )


def open_onnx(part: Part, path: Path) -> Call:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def call(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found: list[np.ndarray] = session.run(list(part.outputs), {name: given[name].numpy() for name in part.inputs})
        return dict(zip(part.outputs, map(torch.from_numpy, found), strict=True))

    return call


class Format(NamedTuple):
    suffix: str
    save: Callable[[Part, ExportedProgram, Path], None]
    open: Callable[[Part, Path], Call]
    needed: tuple[str, ...]


FORMS: dict[Form, Format] = {
    "torch": Format("pt2", save_torch, open_torch, ()),
    "onnx": Format("onnx", save_onnx, open_onnx, ("onnx", "onnxscript", "onnxruntime")),
}
