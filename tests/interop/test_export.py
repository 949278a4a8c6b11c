"""Exports: files agree with their models, run where there is no subquad, and are not left when they are wrong."""

import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import subquad
from subquad.cli.main import run as command
from subquad.decode.scoring import LanguageModelScorer, Seq2SeqScorer
from subquad.interop.export.card import CARD, shorten_paths
from subquad.interop.export.check import initial_state
from subquad.interop.export.files import FORMS, Form, export_graphs, write_export
from subquad.interop.export.step import decoding_graphs
from subquad.interop.export.usage import usage
from subquad.models import LanguageModel, Model, Seq2Seq, build_model
from subquad.testing import Case, enlarge, every_case, streams
from subquad.train.run import load_trained
from tests.cli.test_evaluate_commands import STACK, language, trained, translation
from tests.models.cases import OPTIONS, able

pytest.importorskip("onnxscript", reason="ONNX files need the export extra")
pytest.importorskip("onnxruntime", reason="ONNX files are checked in onnxruntime")

SMALL = {"layers": 1, "heads": 4, "ffn_dim": 24, "norm": "pre"}
CHUNKED = {"name": "eva", "window": 4, "chunk_size": 2}
STEPS = 20
"""Symbols that the programs of the cards read."""


def sized(kind: str, **options: Any) -> Model:
    torch.manual_seed(0)
    model = build_model(kind, **options)
    enlarge(model)
    return model.eval()


def classifier(mixer: dict[str, Any]) -> Model:
    stack = {**SMALL, "mixer": mixer}
    return sized("text-classifier", vocab=40, num_classes=3, dim=16, encoder=stack, pooling="first")


def language_model(mixer: dict[str, Any]) -> LanguageModel:
    model = sized("language-model", vocab=40, dim=16, decoder={**SMALL, "mixer": mixer})
    assert isinstance(model, LanguageModel)
    return model


def translator(cross: dict[str, Any], decoder: dict[str, Any] | str = "softmax") -> Model:
    stacks = {"encoder": SMALL, "decoder": {**SMALL, "mixer": decoder, "cross": cross}}
    return sized("encoder-decoder", source_vocab=40, target_vocab=30, dim=16, **stacks)


def vision(mixer: dict[str, Any]) -> Model:
    return sized("vision", image_size=20, patch_size=4, dim=16, num_classes=3, encoder={**SMALL, "mixer": mixer})


def pyramid(mixer: dict[str, Any]) -> Model:
    stage = {**SMALL, "dim": 16, "mixer": mixer, "ffn_conv": True}
    return sized("pyramid", num_classes=3, stages=[stage, {**stage, "mixer": "softmax"}])


def exported(model: Model, form: Form, out: Path) -> list[str]:
    """Checks the files against the model, as every export does."""
    parts = export_graphs(model, image_size=28)
    return write_export(parts, model, form, out, usage(form, parts))


def programs(folder: Path) -> list[str]:
    """Those of a card."""
    return re.findall(r"```python\n(.*?)```", (folder / CARD).read_text(), re.DOTALL)


def without_subquad(folder: Path, *more: str) -> list[str]:
    """What the programs of a card print in a process that cannot import subquad, nor what else is named."""
    hidden = [f"sys.modules[{name!r}] = None\n" for name in ("subquad", *more)]
    code = "".join(["import sys\n", *hidden, *programs(folder)])
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# ---------------------------------------------------------------------- every family


def masked_model(mixer: dict[str, Any]) -> Model:
    return sized("masked-language-model", vocab=40, dim=16, encoder={**SMALL, "mixer": mixer})


CLASSIFIERS: dict[str, tuple[Callable[[dict[str, Any]], Model], dict[str, Any]]] = {
    "text": (classifier, {"name": "linformer", "proj_k": 4, "max_length": 90}),
    "evit": (vision, {"name": "eva", "window": 2, "landmarks": 4}),
    "pvt": (pyramid, {"name": "local", "window": 4}),
}


def test_pyramids_agree(tmp_path: Path) -> None:
    build, mixer = CLASSIFIERS["pvt"]
    assert exported(build(mixer), "torch", tmp_path / "out") == ["model.pt2"]


@pytest.mark.parametrize(
    "family", ["evit", pytest.param("text", marks=pytest.mark.nightly), pytest.param("pvt", marks=pytest.mark.nightly)]
)
def test_classifiers_agree_in_onnxruntime(tmp_path: Path, family: str, recwarn) -> None:
    build, mixer = CLASSIFIERS[family]
    assert exported(build(mixer), "onnx", tmp_path / "out") == ["model.onnx"]
    assert not recwarn.list  # a user could do nothing about them
    (printed,) = without_subquad(tmp_path / "out", "torch")
    assert re.fullmatch(r"\[[0-2]\]", printed)


@pytest.mark.parametrize("form", ["torch", pytest.param("onnx", marks=pytest.mark.nightly)])
def test_masked_language_models_agree(tmp_path: Path, form: Form) -> None:
    model = masked_model({"name": "linformer", "proj_k": 4, "max_length": 90, "share_kv": True, "share_layers": True})
    parts = export_graphs(model)
    write_export(parts, model, form, tmp_path / "out", usage(form, parts, 0, model.config.mask))
    (printed,) = without_subquad(tmp_path / "out")
    assert len(re.findall(r"\d+", printed)) == 4, "a word for each symbol of the program's text"
    assert "39 masks a word" in (tmp_path / "out" / CARD).read_text()


@pytest.fixture(scope="module")
def translations(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("translation")
    stacks = {
        "encoder": {**STACK, "mixer": {"name": "dynamicconv", "kernel_size": 3}},
        "decoder": {**STACK, "mixer": CHUNKED},
    }
    recipe = translation(folder)
    recipe["train"] |= {"epochs": 30}  # until it writes more than one word again and again
    run = trained(folder, recipe | {"model": recipe["model"] | stacks})
    assert command(["evaluate", str(run), "decode.max_len_b=5"]) == 0
    assert command(["export", str(run), "--to", "onnx", "--out", str(folder / "out")]) == 0
    return folder


def test_onnx_steps_write_what_greedy_decoding_writes(translations: Path) -> None:
    loaded = load_trained(translations / "run")
    end = loaded.tokenizer("target").eos
    assert isinstance(loaded.model, Seq2Seq)
    scorer = Seq2SeqScorer(loaded.model, torch.tensor([[4, 5, end]]), None)
    written = greedy(scorer, [end])
    assert len(set(written)) > 2
    assert without_subquad(translations / "out", "torch") == [str(written)]


def test_the_card_tells_recipe_data_metrics_and_environment(translations: Path) -> None:
    text = (translations / "out" / CARD).read_text()
    front = yaml.safe_load(text.split("---\n")[1])
    measured = json.loads((translations / "run/evaluation-test.json").read_text())["metrics"]
    (entry,) = front["model-index"]
    assert {m["name"]: m["value"] for m in entry["results"][0]["metrics"]}["bleu"] == measured["bleu"]["value"]
    assert front["pipeline_tag"] == "translation"
    assert {"subquad", "dynamicconv", "eva", "softmax"} == set(front["tags"])
    machine = json.loads((translations / "run/environment.json").read_text())
    for words in ("kind: bytes", "epochs: 30", f"| torch | {machine['torch']} |", "| test | bleu |", "text.0"):
        assert words in text
    assert str(translations) not in text


def test_the_hub_reads_the_card(translations: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    card = hub.ModelCard.load(translations / "out" / CARD)
    assert {"bleu", "chrf", "perplexity"} == {result.metric_type for result in card.data.eval_results}


def test_a_folder_is_complete(translations: Path) -> None:
    out = translations / "out"
    files = {path.name for path in out.iterdir()}
    assert files == {"encoder.onnx", "step.onnx", "export.json", "inputs.json", "tokenizers", CARD}
    parts = json.loads((out / "export.json").read_text())["parts"]
    names = {one["name"]: one for one in parts["step"]["inputs"]}
    assert names["state.0.chunk_k"]["shape"] == ["batch", 2, "chunks", 8]
    assert names["cross.0.k"]["shape"] == ["batch", 2, "source_time", 8]
    assert "start" not in names["cross.0.k"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("language")
    recipe = language(folder)
    recipe["train"] |= {"updates": 120, "validate_every": 120}
    stack = {**STACK, "mixer": {"name": "performer", "features": 8}}
    run = trained(folder, recipe | {"model": recipe["model"] | {"decoder": stack}})
    assert command(["export", str(run), "--to", "torch", "--out", str(folder / "out")]) == 0
    return folder


@pytest.mark.nightly
def test_pt2_steps_write_what_greedy_decoding_writes(texts: Path) -> None:
    loaded = load_trained(texts / "run")
    end = loaded.tokenizer("text").eos
    assert isinstance(loaded.model, LanguageModel)
    scorer = LanguageModelScorer(loaded.model, loaded.model.init_state(1))
    likeliest, written = loaded.model(torch.tensor([[end, 4, 5, 6]])).logits.argmax(-1), greedy(scorer, [end, 4, 5, 6])
    assert len(set(written[4:])) > 2
    assert without_subquad(texts / "out") == [str(likeliest), str(written)]


@pytest.mark.nightly
def test_a_text_ends_at_its_end(texts: Path, capsys, monkeypatch) -> None:
    """The token that the model writes first is taken for the end."""
    end = load_trained(texts / "run").tokenizer("text").eos
    program = programs(texts / "out")[-1]
    monkeypatch.chdir(texts / "out")
    capsys.readouterr()
    exec(program, {})
    first = json.loads(capsys.readouterr().out)[4]
    exec(program.replace(f"text[-1] == {end}:", f"text[-1] == {first}:"), {})
    assert json.loads(capsys.readouterr().out) == [end, 4, 5, 6, first]


HERE = str(Path(subquad.__file__).parent).encode()


def test_onnx_files_name_no_place_of_this_machine(translations: Path) -> None:
    for path in (translations / "out").glob("*.onnx"):
        assert HERE not in path.read_bytes()


@pytest.mark.nightly
def test_pt2_files_name_no_place_of_this_machine(texts: Path) -> None:
    for path in (texts / "out").glob("*.pt2"):
        with zipfile.ZipFile(path) as archive:
            assert not any(HERE in archive.read(name) for name in archive.namelist())


@pytest.mark.nightly
def test_a_hugging_face_folder(texts: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert command(["export", str(texts / "run"), "--to", "huggingface", "--out", str(tmp_path / "out")]) == 0
    assert {"config.json", "model.safetensors", CARD} <= {path.name for path in (tmp_path / "out").iterdir()}
    assert "library_name: transformers" in (tmp_path / "out" / CARD).read_text()


def greedy(scorer: Seq2SeqScorer | LanguageModelScorer, begun: list[int]) -> list[int]:
    """begun with the likeliest symbols after it, up to the end, which is the first of begun."""
    text = list(begun)
    with torch.inference_mode():
        for token in begun[:-1]:
            scorer.step(torch.tensor([token]))
        while len(text) <= STEPS:
            text.append(int(scorer.step(torch.tensor(text[-1:])).values.argmax(-1)))
            if text[-1] == begun[0]:
                break
    return text


# ---------------------------------------------------------------------- refusals


def test_a_wrong_file_is_not_left(tmp_path: Path) -> None:
    model = language_model({"name": "softmax"})
    parts = decoding_graphs(model)
    other = language_model({"name": "softmax"})
    with torch.no_grad():
        other.state_dict()["embedding.tokens.weight"][3].add_(0.01)  # the head's, too
    with pytest.raises(ValueError, match="step 1: logits differ from the model's by"):
        write_export(parts, other, "torch", tmp_path / "out", "")
    assert not list(tmp_path.iterdir())


def test_a_folder_in_use_is_refused(capsys, tmp_path: Path, translations: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert command(["export", str(translations / "run"), "--to", "onnx", "--out", str(tmp_path)]) == 1
    assert "exists already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_missing_package_is_named(capsys, monkeypatch, tmp_path: Path, translations: Path) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert command(["export", str(translations / "run"), "--to", "onnx", "--out", str(tmp_path / "out")]) == 1
    assert "pip install 'subquad[export]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_cannot_stream_is_refused_by_name() -> None:
    model = language_model({"name": "eva", "window": 4, "landmarks": 3})
    with pytest.raises(ValueError, match="eva was built with a number of chunks"):
        export_graphs(model)


def test_logits_are_nan_without_room_for_a_summary() -> None:
    model = language_model(CHUNKED)
    (step,) = decoding_graphs(model)
    state, finite = initial_state(step, 1, chunks=1), []
    for token in (4, 5, 6, 7, 8):
        with torch.no_grad():
            logits, *after = step.module(torch.tensor([token]), *state.values())
        state = dict(zip(state, after, strict=True))
        finite.append(bool(logits.isfinite().all()))
    assert finite == [True] * 4 + [False]  # the second summary, of tokens 3 and 4, is first needed by the fifth


def test_cards_show_no_absolute_path() -> None:
    assert shorten_paths({"files": ["/home/someone/a.txt", "b/c.txt"], "size": 3}) == {
        "files": ["a.txt", "b/c.txt"],
        "size": 3,
    }


# ---------------------------------------------------------------------- every mechanism


def options(case: Case) -> dict[str, Any]:
    return {"name": case.name, **dict(case.options)}


@pytest.mark.nightly
@pytest.mark.parametrize("case", [case for case in every_case() if not case.causal or streams(case)], ids=str)
def test_every_mechanism_in_models_of_text(tmp_path: Path, case: Case) -> None:
    model = language_model(options(case)) if case.causal else classifier(options(case))
    forms: list[Form] = list(FORMS) if case.is_first else ["onnx"]
    for form in forms:
        exported(model, form, tmp_path / form)


@pytest.mark.nightly
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", able("cross"))
def test_every_mechanism_that_reads_a_context(tmp_path: Path, name: str, form: Form) -> None:
    exported(translator({"name": name, **OPTIONS.get(name, {})}), form, tmp_path / "out")


@pytest.mark.nightly
@pytest.mark.parametrize("build", [vision, pyramid])
@pytest.mark.parametrize("name", able("encoder"))
def test_every_mechanism_in_models_of_images(tmp_path: Path, name: str, build: Any) -> None:
    drawn = {"proposal": "mean"} if name == "ra" else {}  # by default ra draws at random when it predicts, too
    exported(build({"name": name, **OPTIONS.get(name, {}), **drawn}), "onnx", tmp_path / "out")
