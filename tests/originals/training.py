"""Fixtures in JSON about training: what fairseq's schedules, Adam, criterion and averaging computed."""

import math
import re
import tempfile
from typing import Any

import pytest
import torch
from torch import nn

from subquad.nn.heads import WordHead
from subquad.tasks.losses import LossOutput, logit_loss, word_loss
from subquad.train.checkpoint import Checkpoint, TrainState, average, newest, save_checkpoint
from subquad.train.optim import OptimConfig, build_optimizer, clip_gradients, set_learning_rate
from subquad.train.schedules import Schedule, ScheduleConfig
from tests.originals.files import GRADIENT_TOLERANCE, OUTPUT_TOLERANCE, assert_close

SCHEDULE_KINDS = {"inverse_sqrt": "inverse-sqrt", "cosine": "cosine"}


def schedule_of(name: str, config: dict[str, Any]) -> Schedule:
    """Our schedule of fairseq's options; a negative or missing value there is one that is not given."""
    (rate,) = config["lr"]
    options: dict[str, Any] = {"kind": SCHEDULE_KINDS[name], "lr": rate, "warmup_updates": config["warmup_updates"]}
    renamed = {"warmup_init_lr": "warmup_init", "min_lr": "min_lr", "t_mult": "period_mult"}
    renamed |= {"lr_period_updates": "period", "lr_shrink": "shrink"}
    options |= {ours: config[theirs] for theirs, ours in renamed.items() if config.get(theirs, -1) >= 0}
    return Schedule(ScheduleConfig.parse("schedule", options), total=config.get("max_update"))


def check_schedules(content: dict[str, Any]) -> None:
    """Every value of every schedule. "init" is the rate before the trainer asks for any: the start of a warm-up."""
    kinds = [key for key in content if key != "note"]
    assert kinds
    for kind in kinds:
        assert kind in SCHEDULE_KINDS, f"no check understands schedules of kind {kind!r}"
        for entry in content[kind]:
            schedule = schedule_of(kind, entry["config"])
            for update, value in entry["values"]:
                ours = schedule.warmup_init if update == "init" else schedule.learning_rate(update)
                assert ours == pytest.approx(value, rel=1e-12, abs=1e-18), (kind, entry["config"], update)


def check_adam(content: dict[str, Any]) -> None:
    """Update by update, with the clipping of each."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.tensor(content["p0"]))
    options = {"name": "adam", **{key: content[key] for key in ("betas", "eps", "weight_decay")}}
    optimizer = build_optimizer(OptimConfig.parse("optim", options), model)
    set_learning_rate(optimizer, content["lr"])
    assert content["steps"]
    for number, step in enumerate(content["steps"], 1):
        model.weight.grad = torch.tensor(step["grad"])
        norm = clip_gradients(model.parameters(), step["clip_norm"])
        assert norm.item() == pytest.approx(step["gnorm"], rel=1e-6)
        optimizer.step()
        assert_close(model.weight, torch.tensor(step["param"]), 1e-6, f"parameters after update {number}")


def check_label_smoothing(content: dict[str, Any]) -> None:
    """Sums, gradients and the logged figures, from logits and through a word head whose features are the logits."""
    target, pad = torch.tensor(content["target"]), content["pad"]
    for result in content["results"]:
        logits = torch.tensor(content["logits"], requires_grad=True)
        _check_criterion(logit_loss(logits, target, pad=pad, smoothing=result["eps"]), logits, result)
        head = WordHead(logits.shape[-1], logits.shape[-1])
        assert head.weight is not None
        nn.init.eye_(head.weight)
        features = torch.tensor(content["logits"], requires_grad=True)
        _check_criterion(word_loss(head, features, target, pad=pad, smoothing=result["eps"]), features, result)


def _check_criterion(loss: LossOutput, logits: torch.Tensor, result: dict[str, Any]) -> None:
    loss.total.backward()
    assert logits.grad is not None
    assert_close(logits.grad, torch.tensor(result["grad_logits"]), GRADIENT_TOLERANCE, "gradient of the logits")
    assert loss.count == result["ntokens"]
    ours = [loss.total.item(), loss.nll.item()]
    ours += [value / loss.count / math.log(2) for value in ours]
    ours.append(math.exp(loss.nll.item() / loss.count))
    keys = ("loss_sum", "nll_sum", "logged_loss_base2", "logged_nll_base2", "ppl")
    for key, value in zip(keys, ours, strict=True):
        assert value == pytest.approx(result[key], rel=OUTPUT_TOLERANCE), key


def check_average(content: dict[str, Any]) -> None:
    """The newest checkpoints of a folder, and the mean of their weights."""
    kinds = {"w": torch.float32, "h": torch.float16, "n": torch.int64}
    with tempfile.TemporaryDirectory() as folder:
        for epoch, weights in enumerate(content["checkpoints"], 1):
            model = {name: torch.tensor(value, dtype=kinds.get(name)) for name, value in weights.items()}
            state = TrainState(update=10 * epoch, epoch=epoch, epoch_end=True)
            save_checkpoint(folder, Checkpoint(model, {}, state, {}))

        def numbered(names: list[str]) -> list[str]:
            return [f"update-{10 * int(name.removeprefix('checkpoint').removesuffix('.pt')):09d}" for name in names]

        count = content["num_epoch_checkpoints"]
        chosen = newest(folder, count, epoch_ends=True)
        assert [path.name for path in chosen] == numbered(content["files"])
        for key, files in content.items():
            if bounds := re.fullmatch(r"upper_bound_(\d+)_n(\d+)", key):
                bounded = newest(folder, int(bounds[2]), epoch_ends=True, up_to=int(bounds[1]))
                assert [path.name for path in bounded] == numbered(files), key
        ours = average(chosen)
        assert ours.keys() == content["averaged"].keys()
        for name, value in content["averaged"].items():
            assert str(ours[name].dtype) == content["avg_dtypes"][name]
            assert_close(ours[name], torch.tensor(value, dtype=ours[name].dtype), 1e-7, name)
        with pytest.raises(ValueError, match="fewer than the"):
            newest(folder, len(content["checkpoints"]) + 1, epoch_ends=True)
