"""Costs by length: models that are long enough, every kind of model, and what gets no time."""

from pathlib import Path

import pytest
import torch

from subquad.compare.measure.base import Context
from subquad.compare.measure.cache import run_step, start_worker
from subquad.compare.measure.lengths import (
    LengthPoint,
    Lengths,
    ModelPasses,
    Shape,
    Timing,
    config_for_shape,
    measure_length,
    parts_of,
    shape_at,
)
from subquad.compare.measure.timing import default_dtype
from subquad.compare.trials import Trials
from subquad.files import write_json
from subquad.models import build_from_config
from tests.compare.plans import PAIRS, PYRAMID, STACK, TEXT, make_plan, recipe


def test_models_are_long_enough_for_every_length() -> None:
    text = recipe({**TEXT, "decoder": {**STACK, "layer_drop": 0.5}}, "language-model")
    config = config_for_shape(make_plan(text, [], lengths=(16, 64)), "softmax", Shape(4, 16))
    assert (config["embedding"]["max_length"], config["decoder"]["layer_drop"]) == (64, 0.0)
    plan = make_plan(PAIRS, ["linformer"], lengths=(16, 1024))
    assert config_for_shape(plan, "linformer", Shape(4, 16))["encoder"]["mixer"]["max_length"] == 1024
    images = recipe({"preset": "vision_small", "dim": 16, "encoder": STACK}, "image-classification")
    plan = make_plan(images, [], lengths=(16, 60), tokens=128)
    assert shape_at(plan, 60) == Shape(2, 49)
    assert config_for_shape(plan, "softmax", shape_at(plan, 60))["image_size"] == 28
    assert [step.name for step in Lengths().steps(plan)] == [
        f"lengths-{part}-{length}" for part in ("encoder", "full") for length in (16, 49)
    ]
    assert parts_of(make_plan(PYRAMID, [])) == ["full"]


@pytest.mark.parametrize("task", ["pairs", "text", "pyramid"])
def test_every_kind_of_model_is_measured(task: str) -> None:
    given = {"pairs": PAIRS, "text": recipe({**TEXT, "vocab": 50}, "language-model"), "pyramid": PYRAMID}[task]
    words = {"pairs": ["lara"], "text": ["primal"], "pyramid": ["performer"]}[task]
    plan = make_plan(given, words, lengths=(64,), tokens=128, looks=(2,))
    begun: list[str] = []
    for part in parts_of(plan):
        points = measure_length(plan, part, 64, plan.labels, "softmax", begun.append)
        assert [(point.mechanism, point.status, point.reason) for point in points] == [
            (label, "done", None) for label in ("softmax", words[0], "softmax")
        ]
        assert [point.control for point in points] == [False, False, True], "the baseline is timed twice"
        assert all(point.training is not None and len(point.training.rounds) == 2 for point in points)
    assert begun[:4] == ["softmax", words[0], "softmax", "all, side by side"]


def test_passes_run_in_the_precision_of_the_device() -> None:
    assert default_dtype(torch.device("cpu")) == "float32"
    plan = make_plan(PAIRS, ["performer"], lengths=(16,), tokens=32)
    torch.manual_seed(0)
    model = build_from_config(config_for_shape(plan, "performer", Shape(2, 16))).eval()
    whole = ModelPasses(model, plan.task, "full", Shape(2, 16))
    half = ModelPasses(model, plan.task, "full", Shape(2, 16), torch.bfloat16)
    seen: list[torch.dtype] = []
    layer = next(module for module in model.modules() if isinstance(module, torch.nn.Linear))
    layer.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    exact, rounded = whole.inference()["loss"], half.inference()["loss"]
    assert seen[0] == torch.float32
    assert seen[-1] == torch.bfloat16
    assert rounded.item() == pytest.approx(exact.item(), rel=2e-2)
    assert half.check() == {}, "also the check runs in that precision"
    assert torch.bfloat16 in seen[len(seen) // 2 :]


@pytest.mark.parametrize(("supported", "dtype"), [(True, "bfloat16"), (False, "float16")])
def test_gpus_are_measured_in_half_precision(supported: bool, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: supported)
    assert default_dtype(torch.device("cuda")) == dtype


def test_a_mechanism_that_is_refused_or_wrong_gets_no_time() -> None:
    plan = make_plan(PAIRS, ["performer"], lengths=(16,), tokens=32, looks=(1,))
    wrong = plan.variants[1].model_copy(update={"model": {**PAIRS.model, "encoder": {**STACK, "mixer": "nothing"}}})
    plan = plan.model_copy(update={"variants": (plan.variants[0], wrong)})
    sound, refused, _ = measure_length(plan, "full", 16, plan.labels, "softmax", lambda _: None)
    assert sound.training is not None
    assert (refused.status, refused.training) == ("refused", None)
    assert "no mechanism is called 'nothing'" in str(refused.reason)


def test_too_slow_at_one_length_is_not_tried_at_the_next(tmp_path: Path) -> None:
    plan = make_plan(PAIRS, [], lengths=(16, 32), tokens=32)
    slow = LengthPoint(mechanism="softmax", part="full", length=16, batch=2, training=Timing.of([1.5]))
    (tmp_path / "measurements").mkdir()
    stored = {"format": "subquad-measurement-1", "points": [slow.model_dump(mode="json")]}
    write_json(tmp_path / "measurements" / "lengths-full-16.json", stored)
    context = Context(tmp_path, plan, Trials(tmp_path, plan), "softmax", max_seconds=1.0)
    step = next(step for step in Lengths().steps(plan) if step.arguments == {"part": "full", "length": 32})
    worker = start_worker(tmp_path)
    (point,) = run_step(worker, Lengths(), context, step, lambda _: None)
    assert worker.process is None, "nothing was measured"
    assert point.status == "refused"
    assert point.reason == "over the time limit: a training pass took 1.5 s at 16 tokens, the limit is 1 s"
