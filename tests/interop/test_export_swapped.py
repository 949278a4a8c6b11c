"""Swapped models of transformers as files: whole passes and steps, which `export_swapped` holds against the model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import subquad
from subquad.cli.main import run
from subquad.interop.export import swapped
from subquad.interop.export.check import check_graph
from subquad.interop.export.files import Form
from tests.linearise.hosts import HOSTS

CASES: list[tuple[str, str, dict[str, Any], Form]] = [
    ("llama", "eva", {"window": 4, "layers": [0]}, "onnx"),
    ("llama", "local", {"window": 4}, "onnx"),
    ("llama", "performer", {}, "onnx"),
    ("gpt2", "eva", {"window": 4}, "torch"),
    ("bert", "lara", {"landmarks": 4}, "onnx"),
    ("bert classifier", "local", {"window": 4}, "torch"),
    ("vit", "performer", {}, "onnx"),
]


def save(host: str, mixer: str, options: dict[str, Any], folder: Path) -> Any:
    model = HOSTS[host]()
    subquad.swap(model, mixer, **options)
    model.save_pretrained(folder)
    return model


def test_the_command_exports_a_hybrid_with_its_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One layer has keys and values of all tokens, the other a state of constant size."""
    model = save("gpt2", "lightconv", {"kernel_size": 3, "layers": [1]}, tmp_path / "model")
    assert run(["export", str(tmp_path / "model"), "--to", "torch", "--out", str(tmp_path / "out")]) == 0
    assert "model.pt2, step.pt2; they agree" in capsys.readouterr().out
    parts = json.loads((tmp_path / "out/export.json").read_text())["parts"]
    shapes = {one["name"]: one["shape"] for one in parts["step"]["inputs"]}
    assert shapes["state.0.keys"] == ["batch", 4, "past", 4]
    assert all("past" not in shape for name, shape in shapes.items() if name.startswith("state.1"))
    step = torch.export.load(tmp_path / "out/step.pt2").module()
    tokens = torch.randint(1, 40, (3, 9), generator=torch.Generator().manual_seed(0))
    sizes = {"batch": 3, "past": 0}
    state = [
        torch.full([sizes.get(axis, axis) for axis in one["shape"]], one["start"], dtype=getattr(torch, one["dtype"]))
        for one in parts["step"]["inputs"]
        if "start" in one
    ]
    for token, wanted in zip(tokens.unbind(1), model(tokens).logits.unbind(1), strict=True):
        logits, *state = step(token, *state)
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
    assert run(["export", str(tmp_path / "model"), "--to", "huggingface", "--out", str(tmp_path / "other")]) == 1
    assert "is a model of Hugging Face transformers already" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.parametrize(("host", "mixer", "options", "form"), CASES)
def test_files_agree_with_the_model(host: str, mixer: str, options: dict[str, Any], form: Form, tmp_path: Path) -> None:
    for package in ("onnxscript", "onnxruntime") if form == "onnx" else ():
        pytest.importorskip(package)
    model = save(host, mixer, options, tmp_path / "model")
    files = swapped.export_swapped(tmp_path / "model", form, tmp_path / "out")
    assert [Path(name).stem for name in files] == (["model", "step"] if model.can_generate() else ["model"])
    for program in (tmp_path / "out/README.md").read_text().split("```python\n")[1:]:
        assert "import subquad" not in program


def test_a_file_that_computes_something_else_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("vit", "performer", {}, tmp_path / "model")
    forward = swapped.SwappedLogits.forward

    def other(self: Any, *given: torch.Tensor) -> tuple[torch.Tensor]:
        (logits,) = forward(self, *given)
        return (logits + (1 if torch.compiler.is_exporting() else 0),)

    monkeypatch.setattr(swapped.SwappedLogits, "forward", other)
    with pytest.raises(ValueError, match="differ from the model's by"):
        swapped.export_swapped(tmp_path / "model", "torch", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("at_padding", [True, False])
def test_only_what_stands_at_padding_may_differ(at_padding: bool) -> None:
    """There attention that stays has no key to look at, and every framework returns something else."""
    model = HOSTS["gpt2"]()
    subquad.swap(model, "local", window=4, layers=[0])
    (graph, _) = swapped.swapped_graphs(model)

    def call(given: Any) -> dict[str, torch.Tensor]:
        (logits,) = graph.module(*given.values())
        return {"logits": logits + (given["padding"] == at_padding)[..., None]}

    if at_padding:
        check_graph(graph, call, 40, at_padding=False)
    with pytest.raises(ValueError, match="differ from the model's by 1"):
        check_graph(graph, call, 40, at_padding=at_padding)
