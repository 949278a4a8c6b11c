"""Writes exports: a file `NAME.onnx` or `NAME.pt2` for each graph of a model, and what their users need.

    export.json                  the inputs and outputs of every file: names, types, shapes, initial values of a state
    README.md                    the model card, with programs that use the files
    tokenizers/, inputs.json     as in the run: they turn text or images into the model's inputs

The files are written into a folder with a temporary name and compared with the model there. The folder gets its final
name only if they compute the same.
"""

import io
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
from subquad.files import new_folder, write_json
from subquad.interop.export.card import CARD, model_card
from subquad.interop.export.check import Call, check_graphs
from subquad.interop.export.graphs import ExportGraph, describe_graph, image_graph, text_graph, trace
from subquad.interop.export.step import decoding_graphs
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
MAX_ONNX_WEIGHTS = 2**30
"""The most bytes of weights inside an ONNX file. More are put into a file beside it, because protobuf ends at 2 GiB."""
EXPORTER_WARNING = r"`isinstance\(treespec, LeafSpec\)` is deprecated"
"""The beginning of a warning of torch's exporter about its own code, which no user can act on."""


def export_run(run: LoadedRun, form: Form, out: Path) -> list[str]:
    """Writes the model of a run into a folder, which must be new or empty. Returns the names of the graph files."""
    model = run.model.cpu().float().eval()
    graphs = export_graphs(model, _image_size(run.inputs.get("transform")))
    card = model_card(
        model, usage(form, graphs, *_special_ids(run)), run, library="onnx" if form == "onnx" else "torch"
    )
    return write_export(graphs, model, form, out, card, run.folder)


def _special_ids(run: LoadedRun) -> tuple[int, int | None]:
    """Returns the first token of a text, and the mask token if there is one (see `usage`)."""
    if isinstance(run.model, MaskedLanguageModel):
        return beginning(run.tokenizer("text")), run.model.config.mask
    sides = {Seq2Seq: "target", LanguageModel: "text", TextClassifier: "text"}
    return run.tokenizer(sides[type(run.model)]).eos if type(run.model) in sides else 0, None


def _image_size(transform: Mapping[str, Any] | None) -> int | None:
    """Returns the side of the images that a run's transform makes, or None if the model reads text."""
    if transform is None:
        return None
    return transform["options"]["size"] if transform["kind"] == Augmented.kind else transform["shape"][-1]


def export_graphs(model: Model, image_size: int | None = None) -> list[ExportGraph]:
    """Returns the graphs of a model. image_size: the side of the images, which a pyramid's config does not have."""
    if isinstance(model, Seq2Seq):
        return decoding_graphs(model)
    if isinstance(model, LanguageModel):
        return [text_graph(model), *decoding_graphs(model)]
    if isinstance(model, MaskedLanguageModel | TextClassifier):
        return [text_graph(model)]
    assert isinstance(model, VisionTransformer | Pyramid)
    side = model.config.image_size if isinstance(model, VisionTransformer) else image_size
    if side is None:
        raise ValueError("a pyramid can read images of any size, but an export has one size: give image_size")
    return [image_graph(model, side)]


def write_export(
    graphs: Sequence[ExportGraph], model: Model, form: Form, out: Path, card: str, run: Path | None = None
) -> list[str]:
    """Writes and checks the graphs of a model. card: the text of its card. run: the folder to copy tokenizers from."""

    def add(temporary: Path) -> None:
        (temporary / CARD).write_text(card, encoding="utf-8")
        if run is not None:
            copy_inputs(run, temporary)

    return write_graphs(graphs, form, out, model.config.kind, lambda calls: check_graphs(graphs, calls, model), add)


def write_graphs(
    graphs: Sequence[ExportGraph],
    form: Form,
    out: Path,
    kind: str,
    check: Callable[[Mapping[str, Call]], None],
    add: Callable[[Path], None],
) -> list[str]:
    """Writes graphs. kind: of the model. check: compares the files with it. add: writes the rest into the folder."""
    suffix, save, open_, needed = FORMS[form]
    for package in needed:  # checked before the work begins
        require(package, f"exporting to {form}", "export")
    with new_folder(out) as temporary:
        files = {graph.name: f"{graph.name}.{suffix}" for graph in graphs}
        for graph in graphs:
            save(graph, trace(graph), temporary / files[graph.name])
        check({graph.name: open_(graph, temporary / files[graph.name]) for graph in graphs})
        content = {graph.name: {"file": files[graph.name], **describe_graph(graph)} for graph in graphs}
        write_json(temporary / DESCRIPTION, {"format": FORMAT, "model": kind, "parts": content})
        add(temporary)
    return list(files.values())


def copy_inputs(run: Path, out: Path) -> None:
    """Copies what turns text or images into the inputs of a run's model."""
    shutil.copy(run / INPUTS, out / INPUTS)
    if (run / TOKENIZERS).is_dir():
        shutil.copytree(run / TOKENIZERS, out / TOKENIZERS)


# ---------------------------------------------------------------------- formats


def save_torch(graph: ExportGraph, program: ExportedProgram, path: Path) -> None:  # noqa: ARG001
    content = io.BytesIO()  # torch's writer of files aborts the process when the disk is full
    torch.export.save(program, content)
    path.write_bytes(content.getbuffer())


def open_torch(graph: ExportGraph, path: Path) -> Call:
    module = torch.export.load(path).module()

    def call(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with torch.no_grad():
            return dict(zip(graph.outputs, module(*(given[name] for name in graph.inputs)), strict=True))

    return call


def save_onnx(graph: ExportGraph, program: ExportedProgram, path: Path) -> None:
    weights = sum(value.numel() * value.element_size() for value in program.state_dict.values())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", EXPORTER_WARNING, FutureWarning)
        torch.onnx.export(
            program,
            (),
            path,
            input_names=list(graph.inputs),
            output_names=list(graph.outputs),
            dynamo=True,
            verbose=False,
            external_data=weights > MAX_ONNX_WEIGHTS,
        )


def open_onnx(graph: ExportGraph, path: Path) -> Call:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def call(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found: list[np.ndarray] = session.run(list(graph.outputs), {name: given[name].numpy() for name in graph.inputs})
        return dict(zip(graph.outputs, map(torch.from_numpy, found), strict=True))

    return call


class Format(NamedTuple):
    suffix: str
    save: Callable[[ExportGraph, ExportedProgram, Path], None]
    open: Callable[[ExportGraph, Path], Call]
    needed: tuple[str, ...]


FORMS: dict[Form, Format] = {
    "torch": Format("pt2", save_torch, open_torch, ()),
    "onnx": Format("onnx", save_onnx, open_onnx, ("onnx", "onnxscript", "onnxruntime")),
}
