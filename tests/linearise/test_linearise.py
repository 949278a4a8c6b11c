"""`subquad.linearise` and its command: a model, a mechanism and text in, a model and a report out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import subquad
from subquad.api import linearise_dry_run
from subquad.cli.main import run
from subquad.linearise.models import Source
from subquad.linearise.report import TITLES
from subquad.linearise.saving import save_model
from subquad.linearise.stages.batches import Batch
from subquad.linearise.stages.data import read_data
from subquad.linearise.stages.objective import logits_of
from subquad.testing import close
from tests.linearise.hosts import HOSTS, IMAGES, stages_for, transformers

SHORT: dict[str, Any] = {"transfer_updates": 2, "tune_updates": 2, "batch": 4, "length": 16, "valid_samples": 8}
SHORT |= {"lengths": ()}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {number} of a text about nothing\n" for number in range(200)))
    return path


def bytes_model(kind: str = "llama") -> Any:
    """A small language model that reads bytes."""
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    size |= {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0, "max_position_embeddings": 64}
    torch.manual_seed(0)
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**size))
    return transformers.BertForMaskedLM(transformers.BertConfig(**size))


def test_the_report_has_teacher_stages_and_controls_with_intervals(text: Path, tmp_path: Path) -> None:
    found = subquad.linearise(
        bytes_model(),
        "eva=window=4",
        text,
        tokenizer="bytes",
        out=tmp_path / "out",
        quiet=True,
        **SHORT | {"lengths": None},
    )
    stored = json.loads((tmp_path / "out/report.json").read_text())
    assert stored == json.loads(json.dumps(found.report))
    names = [row["name"] for row in stored["scores"]]
    assert names == ["teacher", "swapped", "transfer", "finetune", "scratch", "identity"]
    for row in stored["scores"]:
        loss = row["metrics"]["loss"]
        assert loss["low"] <= loss["value"] <= loss["high"]
        if row["name"] != "teacher":
            teacher = stored["scores"][0]["metrics"]["loss"]["value"]
            assert loss["minus_teacher"]["difference"] == pytest.approx(loss["value"] - teacher)
    assert found.score() == stored["scores"][3]["metrics"]["loss"]["value"]
    assert stored["layers"] == ["eva", "eva"]
    assert stored["tokens"] == 4 * 4 * 16
    assert [(row["length"], row["variant"], row["status"]) for row in stored["lengths"]] == [
        (length, variant, "done") for length in (8, 16) for variant in ("attention", "mixers")
    ]
    assert {row["position"] for row in stored["decoding"]} == {8, 16}
    assert all(row["tokens_per_second"] > 0 for row in stored["decoding"])
    shown = (tmp_path / "out/report.md").read_text()
    assert all(TITLES[name] in shown for name in names)


@pytest.mark.parametrize("options", [{}, {"keep": 1, "tune": "lora"}], ids=["all layers", "hybrid"])
@pytest.mark.parametrize("mixer", ["local=window=4", "eva=window=4", "performer", "lightconv=kernel_size=3"])
def test_the_saved_model_loads_and_generates_with_its_state(
    mixer: str, options: dict[str, Any], text: Path, tmp_path: Path
) -> None:
    """Tokens one by one, through the state, are those of reading the whole text every time."""
    found = subquad.linearise(
        bytes_model(),
        mixer,
        text,
        tokenizer="bytes",
        out=tmp_path / "out",
        quiet=True,
        controls=False,
        **SHORT,
        **options,
    )
    loaded = subquad.load_swapped(tmp_path / "out/model")
    prompt = torch.randint(256, (1, 9), generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded(prompt).logits, found.model(prompt).logits)
    length = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    streamed = loaded.generate(prompt, **length)
    whole = loaded.generate(prompt, use_cache=False, **length)
    assert torch.equal(streamed, whole)


@pytest.mark.parametrize("host", ["gpt2", "gemma", "llama classifier", "bert", "vit"])
def test_models_of_every_form_are_saved_with_what_they_learned(host: str, tmp_path: Path) -> None:
    stages = stages_for(host, tmp_path / "out", "softmax,performer")
    model: Any = stages.run()
    stages.layers.write_into_config()
    save_model(model, Source(model, host), tmp_path / "model")
    loaded = subquad.load_swapped(tmp_path / "model")
    batch = stages.valid.batch(range(3), 0)
    assert torch.equal(logits_of(loaded, batch), logits_of(model, batch))


def test_the_result_exports(tmp_path: Path) -> None:
    stages = stages_for("llama", tmp_path / "out", "eva=window=4", tune="none")
    model = stages.run()
    ids = stages.valid.batch(range(2), 0).inputs["input_ids"]
    exported = torch.export.export(model, (), {"input_ids": ids, "use_cache": False}, strict=False)
    assert close(
        exported.module()(input_ids=ids, use_cache=False).logits, logits_of(model, Batch({"input_ids": ids}, ids))
    )


@pytest.mark.nightly
@pytest.mark.parametrize("mixer", ["eva=window=4", "local=window=4", "performer", "lara=landmarks=4"])
@pytest.mark.parametrize("host", ["llama", "bert", "vit"])
def test_onnx_files_of_linearised_models_agree(host: str, mixer: str, tmp_path: Path) -> None:
    """At the sizes of the example, and at others."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    if host == "llama" and mixer.startswith("lara"):
        pytest.skip("LARA is bidirectional")
    stages = stages_for(host, tmp_path / "out", mixer, tune="none", transfer_updates=1)
    model = LogitsOf(stages.run()).eval()
    name, example = next(iter(stages.valid.batch(range(2), 0).inputs.items()))
    axes: dict[int, Any] = {0: torch.export.Dim("batch")}
    if example.dim() == 2:
        axes[1] = torch.export.Dim("time", max=32)
    model.name = name
    torch.onnx.export(model, (example,), tmp_path / "model.onnx", dynamo=True, dynamic_shapes=(axes,), verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    other = stages.valid.batch(range(3), 0).inputs[name]
    for inputs in (example, other[:, :11] if other.dim() == 2 else other):
        (found,) = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
        assert close(torch.from_numpy(found), model(inputs).detach())


class LogitsOf(torch.nn.Module):
    """A model with one input, whose only output are its logits."""

    name = "input_ids"

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return logits_of(self.model, Batch({self.name: inputs}, inputs))


def test_the_same_call_again_trains_nothing_and_other_options_are_refused(text: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = SHORT | {"tokenizer": "bytes", "out": tmp_path / "out", "quiet": True, "controls": False}
    first = subquad.linearise(bytes_model(), "local=window=4", text, **options)
    log = (tmp_path / "out/finetune/metrics.jsonl").read_text().count('"train"')
    again = subquad.linearise(bytes_model(), "local=window=4", text, **options)
    assert again.report["scores"] == first.report["scores"]
    assert (tmp_path / "out/finetune/metrics.jsonl").read_text().count('"train"') == log
    assert all(torch.equal(value, again.model.state_dict()[name]) for name, value in first.model.state_dict().items())
    with pytest.raises(ValueError, match=r"options.tune_lr differ"):
        subquad.linearise(bytes_model(), "local=window=4", text, tune_lr=1.0, **options)


@pytest.mark.parametrize("tune", ["all", "lora"])
def test_a_dry_run_measures_and_changes_nothing(text: Path, tune: str) -> None:
    model = bytes_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = linearise_dry_run(model, "performer", text, tokenizer="bytes", tune=tune, distill=1.0, **SHORT)
    assert [stage.name for stage in found.stages] == ["transfer", "finetune"]
    assert all(stage.seconds > 0 and stage.peak_bytes > 0 for stage in found.stages)
    assert found.seconds > 0
    assert found.parameters == sum(p.numel() for p in model.parameters())
    copies = 2 if tune == "all" else 1  # its own teacher is another copy where all weights change
    assert found.bytes == 4 * (copies * found.parameters + found.mixers)
    assert found.peak_bytes == found.bytes + max(stage.peak_bytes for stage in found.stages)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_the_command_reads_a_folder_and_writes_one(text: Path, tmp_path: Path, capsys: Any) -> None:
    bytes_model().save_pretrained(tmp_path / "teacher")
    words = ["linearise", str(tmp_path / "teacher"), "--mixer", "eva=window=4", "--data", str(text)]
    words += ["--transfer-updates", "2", "--tune-updates", "2", "--batch", "4", "--length", "16", "--keep", "1"]
    assert run([*words, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "transfer" in shown
    assert "memory: about" in shown
    assert run([*words, "--no-controls", "--lengths", "", "--out", str(tmp_path / "out")]) == 0
    assert "after fine-tuning" in capsys.readouterr().out
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert sorted(report["layers"]) == ["eva", "softmax"]
    assert (report["lengths"], report["decoding"]) == ([], [])
    assert report["layer_losses"].keys() == {"0", "1"}
    assert run(words) == 1
    assert "--out FOLDER" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["EMPTY", "--mixer", "eva"], "is no model of Hugging Face transformers"),
        (["TEACHER", "--mixer", "eav"], "did you mean 'eva'"),
        (["TEACHER", "--mixer", "eva=windw=4"], "did you mean 'window'"),
        (["TEACHER", "--mixer", "eva", "--length", "65"], "the model reads at most 64 tokens"),
        (["TEACHER", "--mixer", "eva=4"], "'4' is no option"),
    ],
)
def test_mistakes_are_one_line(words: list[str], said: str, text: Path, tmp_path: Path, capsys: Any) -> None:
    bytes_model().save_pretrained(tmp_path / "teacher")
    (tmp_path / "empty").mkdir()
    given = [str(tmp_path / word.lower()) if word.isupper() else word for word in words]
    options = ["--data", str(text), "--out", str(tmp_path / "out"), "--transfer-updates", "1"]
    options += [] if "--length" in words else ["--length", "16"]
    assert run(["linearise", *given, *options]) == 1
    shown = capsys.readouterr().err.strip().splitlines()[-1]
    assert said in shown


# ---------------------------------------------------------------------- data


def test_every_token_is_a_target_once_and_follows_its_input(text: Path) -> None:
    data = read_data(bytes_model(), [str(text)], length=16, tokenizer="bytes")
    raw = text.read_bytes()
    assert len(data.train) + len(data.valid) == (len(raw) - 1) // 16
    batch = data.train.batch([0, 3], 0)
    assert bytes(batch.inputs["input_ids"][1].tolist()) == raw[48:64]
    assert bytes(batch.targets[1].tolist()) == raw[49:65]
    last = data.valid.batch([len(data.valid) - 1], 0)
    assert bytes(last.targets[0].tolist()) in raw


def test_labelled_texts_have_the_models_own_classes(tmp_path: Path) -> None:
    table = tmp_path / "texts.tsv"
    table.write_text("".join(f"{'bad' if number % 3 else 'good'}\ttext {number}\n" for number in range(40)))
    model = HOSTS["bert classifier"]()
    model.config.vocab_size, model.config.label2id = 256, {"good": 2, "bad": 0}
    data = read_data(model, [str(table)], length=6, tokenizer="bytes")
    batch = data.train.batch([0, 1], 0)
    assert batch.targets.tolist() == [2, 0]
    assert bytes(batch.inputs["input_ids"][1].tolist()) == b"text 1"
    assert batch.inputs["attention_mask"].sum() == 12


def test_images_of_a_built_in_set(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**IMAGES | {"num_labels": 10}))
    options = SHORT | {"controls": False, "lengths": None}
    found = subquad.linearise(model, "lara=landmarks=4", "digits", out=tmp_path / "out", quiet=True, **options)
    assert list(found.report["scores"][0]["metrics"]) == ["accuracy", "loss"]
    assert found.report["unit"] == "images"
    assert [(row["length"], row["batch"]) for row in found.report["lengths"]] == [(17, 4), (17, 4)]
    assert found.report["decoding"] == []


def test_a_model_without_a_head_and_one_without_a_tokenizer_are_refused(text: Path) -> None:
    with pytest.raises(ValueError, match="BertModel has no loss to train with"):
        read_data(HOSTS["bert"]().bert, [str(text)], length=16, tokenizer="bytes")
    with pytest.raises(ValueError, match="has no tokenizer"):
        read_data(bytes_model(), [str(text)], length=16)
    with pytest.raises(ValueError, match="needs a tokenizer with a mask token"):
        read_data(bytes_model("bert"), [str(text)], length=16, tokenizer="bytes")
