"""The pieces of a comparison: locks, child processes, mechanisms in models, curves, lengths."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from subquad.cli.compare import parse_seeds, parse_shard
from subquad.compare.comparison import Shard
from subquad.compare.locks import try_lock
from subquad.compare.measure.approximation import measure_approximation, not_comparable_reason
from subquad.compare.measure.cache import length_steps, run_length, worker_of
from subquad.compare.measure.lengths import Shape, config_at, measure_length, parts_of, shape_at
from subquad.compare.plan import Plan, TrialName
from subquad.compare.report.schema import LengthPoint, Timing
from subquad.compare.run_summary import curve
from subquad.compare.subprocesses import Worker, run_module
from subquad.compare.variants import Variant, mixing_of, variant_of, variants_of
from subquad.files import write_json
from subquad.models import model_from
from subquad.train.recipe import Recipe

STACK = {"layers": 2, "heads": 2, "hidden": 16}
SCHEDULE = {"kind": "constant", "lr": 1e-3}


def recipe(model: dict[str, Any], task: str = "translation", **train: Any) -> Recipe:
    data = {"embedded": "digits" if task == "image-classification" else "phrases"}
    given = {"task": task, "data": data, "model": model, "schedule": SCHEDULE, "train": {"updates": 1, **train}}
    return Recipe.parse("recipe", given)


PAIRS = recipe({"preset": "translation_small", "dim": 16, "encoder": STACK, "decoder": {**STACK, "mixer": "lightconv"}})
PYRAMID = recipe(
    {"kind": "pyramid", "stages": [{**STACK, "dim": 16, "mixer": {"name": "eva", "window": 3}}, {**STACK, "dim": 16}]},
    "image-classification",
)
TEXT = {"preset": "lm_small", "dim": 16, "decoder": STACK, "embedding": {"positions": "learned", "max_length": 8}}


def planned(given: Recipe, words: list[str], **more: Any) -> Plan:
    variants = variants_of(given, words, {}, "softmax")
    options = {"seeds": (1, 2), "split": "test", "decided": {}, **more}
    return Plan(recipe=given.model_dump(mode="json"), variants=tuple(variants), **options)


# ---------------------------------------------------------------------- mechanisms in models


def names(given: Recipe, variant: Variant) -> dict[str, Any]:
    with torch.device("meta"):
        model = model_from(given.model_copy(update={"model": variant.model}).model_data({}))
    return {place: mixing["name"] for place, mixing in mixing_of(model).items()}


def test_a_mechanism_stands_wherever_it_can() -> None:
    softmax, eva, lara = variants_of(PAIRS, ["eva", "lara"], {"eva": {"window": 4}}, "softmax")
    assert names(PAIRS, softmax) == {"encoder": "softmax", "decoder": "softmax", "decoder.cross": "softmax"}
    assert names(PAIRS, eva) == {"encoder": "eva", "decoder": "eva", "decoder.cross": "softmax"}
    assert names(PAIRS, lara) == {"encoder": "lara", "decoder": "softmax", "decoder.cross": "softmax"}
    assert lara.remarks == ("lara cannot be causal: the decoder has softmax",)
    assert eva.remarks == ()
    assert eva.model["encoder"]["mixer"] == {"name": "eva", "window": 4}


def test_the_last_stage_of_a_pyramid_and_the_recipes_own_options_stay() -> None:
    eva, lara, softmax = variants_of(PYRAMID, ["lara", "eva", "softmax"], {"eva": {"landmarks": 5}}, "eva")
    assert eva.model["stages"][0]["mixer"] == {"name": "eva", "window": 3, "landmarks": 5}
    assert names(PYRAMID, lara) == {"stages.0": "lara", "stages.1": "softmax"}
    assert (lara.remarks, softmax.remarks) == (("lara: the last stage has softmax",), ())


def test_the_recipes_own_model_is_a_mechanism_too() -> None:
    _, own = variants_of(PAIRS, ["mine=recipe"], {}, "softmax")
    assert names(PAIRS, own) == {"encoder": "softmax", "decoder": "lightconv", "decoder.cross": "softmax"}
    with pytest.raises(ValueError, match="takes no options here"):
        variants_of(PAIRS, ["mine=recipe"], {"mine": {"window": 3}}, "softmax")


def test_what_can_stand_nowhere_is_refused() -> None:
    text = recipe(TEXT, "language-model")
    with pytest.raises(ValueError, match="lara can stand nowhere in this model"):
        variants_of(text, ["lara"], {}, "softmax")
    with pytest.raises(ValueError, match=r"eva: .*has no option 'windw'; did you mean 'window'"):
        variant_of(text, "eva", "eva", {"windw": 3}, text.model)


def test_labels_must_name_different_files() -> None:
    with pytest.raises(ValueError, match="'eva 1' and 'eva/1' would name the same files"):
        planned(PAIRS, ["eva 1=eva", "eva/1=eva"])


def test_trials_and_shares() -> None:
    plan = planned(PAIRS, ["eva"])
    assert plan.trials() == [TrialName(label, seed) for seed in (1, 2) for label in ("softmax", "eva")]
    shares = [Shard(number, 3).trials(plan.trials()) for number in (1, 2, 3)]
    assert sorted(trial for share in shares for trial in share) == sorted(plan.trials())
    assert plan.recipe_of(TrialName("eva", 2))["train"]["seed"] == 2
    keys = {plan.key_of(trial) for trial in plan.trials()}
    assert len(keys) == 4
    assert parse_seeds("3", 5) == (5, 6, 7)
    assert parse_seeds("7,", 1) == (7,)
    assert parse_seeds("4,2,4", 1) == (4, 2)
    assert parse_shard("2/3") == Shard(2, 3)


# ---------------------------------------------------------------------- locks and child processes


def test_a_lock_is_one_process_s_until_that_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "locks" / "eva-1"
    with try_lock(path) as first:
        with try_lock(path) as second:
            assert (first, second) == (True, False)
        assert path.exists()
        long_ago = path.stat().st_mtime - 1000
        os.utime(path, (long_ago, long_ago))
        with try_lock(path) as third:
            assert third
            with try_lock(path) as fourth:
                assert not fourth
            later = path.stat().st_mtime + 1000
            os.utime(path, (later, later))
            with try_lock(path) as fifth:
                assert fifth, "nobody touches it: the clock was set back after its owner was gone"
    assert list(path.parent.iterdir()) == []


DYING = """
import json, os, signal, sys
for line in sys.stdin:
    request = json.loads(line)
    print(json.dumps({"begin": request["step"]}), flush=True)
    if request["step"] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if request["step"] == "leave":
        sys.exit(3)
    print(json.dumps({"found": [request["step"], os.getpid()]}), flush=True)
"""


def test_a_worker_that_died_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dying.py").write_text(DYING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker, steps = Worker("dying", [], tmp_path / "log.txt"), list[str]()
    first, again = (worker.ask({"step": "work"}, steps.append) for _ in range(2))
    assert first.found == again.found, "the same process"
    died = worker.ask({"step": "die"}, steps.append)
    assert (died.found, died.error, died.last) == (None, "ended by SIGKILL (out of memory?)", "die")
    left = worker.ask({"step": "leave"}, steps.append)
    assert left.error is not None
    assert left.error.startswith("ended with code 3")
    assert worker.ask({"step": "work"}, steps.append).found[1] != first.found[1]
    assert steps == ["work", "work", "die", "leave", "work"]
    worker.close()


def test_why_a_child_failed_is_its_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing.py").write_text("import sys\nprint('on the way')\nsys.exit('subquad: error: it is so')")
    (tmp_path / "stopped.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    heard: list[str] = []
    ended = run_module("failing", [], tmp_path / "log.txt", heard.append)
    assert (ended.code, ended.reason) == (1, "it is so")
    assert heard[0] == "on the way"
    assert (tmp_path / "log.txt").read_text().splitlines() == heard
    assert ended.peak_bytes is not None
    assert ended.peak_bytes > 1 << 20
    with pytest.raises(KeyboardInterrupt):
        run_module("stopped", [], tmp_path / "log.txt", heard.append)


# ---------------------------------------------------------------------- curves


def test_the_time_of_an_interruption_does_not_count() -> None:
    def record(event: str, update: int, time: float, **values: Any) -> dict[str, Any]:
        return {"event": event, "update": update, "time": time, **values}

    records = [
        record("train", 5, 105.0, loss=3.0),
        record("valid", 10, 110.0, loss=2.0, ppl=7.4),
        record("resumed", 10, 500.0),
        record("train", 15, 506.0, loss=1.5),
        record("valid", 20, 512.0, loss=1.0, ppl="inf"),
    ]
    points = curve(records, "language-model", 30.0)
    assert [(p.update, p.seconds, p.loss, p.value) for p in points] == [(10, 18.0, 2.0, 7.4), (20, 30.0, 1.0, None)]
    assert [p.seconds for p in curve(records, "language-model", None)] == [None, None]


# ---------------------------------------------------------------------- lengths


def test_models_are_long_enough_for_every_length() -> None:
    text = recipe({**TEXT, "decoder": {**STACK, "layer_drop": 0.5}}, "language-model")
    config = config_at(planned(text, [], lengths=(16, 64)), "softmax", Shape(4, 16))
    assert (config["embedding"]["max_length"], config["decoder"]["layer_drop"]) == (64, 0.0)
    plan = planned(PAIRS, ["linformer"], lengths=(16, 1024))
    assert config_at(plan, "linformer", Shape(4, 16))["encoder"]["mixer"]["max_length"] == 1024
    images = recipe({"preset": "vision_small", "dim": 16, "encoder": STACK}, "image-classification")
    plan = planned(images, [], lengths=(16, 60), tokens=128)
    assert shape_at(plan, 60) == Shape(2, 49)
    assert config_at(plan, "softmax", shape_at(plan, 60))["image_size"] == 28
    assert length_steps(plan) == [(part, length) for part in ("encoder", "full") for length in (16, 49)]
    assert parts_of(planned(PYRAMID, [])) == ["full"]


@pytest.mark.parametrize("task", ["pairs", "text", "pyramid"])
def test_every_kind_of_model_is_measured(task: str) -> None:
    given = {"pairs": PAIRS, "text": recipe({**TEXT, "vocab": 50}, "language-model"), "pyramid": PYRAMID}[task]
    words = {"pairs": ["lara"], "text": ["primal"], "pyramid": ["performer"]}[task]
    plan = planned(given, words, lengths=(64,), tokens=128, repeats=2)
    begun: list[str] = []
    for part in parts_of(plan):
        points = measure_length(plan, part, 64, plan.labels, begun.append)
        assert [(point.mechanism, point.status, point.reason) for point in points] == [
            (label, "done", None) for label in ("softmax", words[0])
        ]
        assert all(point.training is not None and point.training.repeats == 2 for point in points)
    assert begun[:3] == ["softmax", words[0], "all, side by side"]


def test_a_mechanism_that_is_refused_or_wrong_gets_no_time() -> None:
    plan = planned(PAIRS, ["performer"], lengths=(16,), tokens=32, repeats=1)
    wrong = plan.variants[1].model_copy(update={"model": {**PAIRS.model, "encoder": {**STACK, "mixer": "nothing"}}})
    plan = plan.model_copy(update={"variants": (plan.variants[0], wrong)})
    sound, refused = measure_length(plan, "full", 16, plan.labels, lambda _: None)
    assert sound.training is not None
    assert (refused.status, refused.training) == ("refused", None)
    assert "no mechanism is called 'nothing'" in str(refused.reason)


def test_too_slow_at_one_length_is_not_tried_at_the_next(tmp_path: Path) -> None:
    plan = planned(PAIRS, [], lengths=(16, 32), tokens=32)
    slow = LengthPoint(mechanism="softmax", part="full", length=16, batch=2, training=Timing.of([1.5]))
    (tmp_path / "lengths").mkdir()
    stored = {"format": "subquad-measurement-1", "points": [slow.model_dump(mode="json")]}
    write_json(tmp_path / "lengths" / "full-16.json", stored)
    worker = worker_of(tmp_path)
    (point,) = run_length(worker, tmp_path, plan, ("full", 32), 1.0, lambda _: None)
    assert worker.child is None, "nothing was measured"
    assert point.status == "refused"
    assert point.reason == "over the time limit: a training pass took 1.5 s at 16 tokens, the limit is 1 s"


def test_a_window_over_everything_is_exact_attention() -> None:
    plan = planned(PAIRS, ["local", "lightconv"], lengths=(16,), tokens=32, repeats=1)
    points = measure_approximation(plan, None, lambda _: None)
    assert [(p.mechanism, p.option, p.source, p.length) for p in points] == [
        ("local", f"window={window}", "random", 16) for window in (4, 16)
    ]
    assert points[0].error > 0.1
    assert points[1].error < 1e-5
    assert "window=16" in points[1].setting["mixer"]


def test_which_mechanisms_approximate_softmax_attention() -> None:
    assert not_comparable_reason("softmax") == "it is exact"
    assert {
        name: not_comparable_reason(name) is None for name in ("eva", "lara", "ra", "linformer", "primal", "lightconv")
    } == {
        "eva": True,
        "lara": True,
        "ra": True,
        "linformer": True,
        "primal": False,
        "lightconv": False,
    }
