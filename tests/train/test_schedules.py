"""Learning rates: the originals' numbers, torch's own schedules, and what is refused."""

import json
from typing import Any

import pytest
import torch
from torch import nn

from subquad.train.schedules import Schedule, ScheduleConfig
from tests.originals.files import FOLDER
from tests.originals.training import check_schedules


def schedule(**options: Any) -> Schedule:
    return Schedule(ScheduleConfig.parse("schedule", options))


def test_fairseq_values() -> None:
    check_schedules(json.loads((FOLDER / "fairseq" / "lr_schedules.json").read_text()))


def test_constant_after_a_warmup() -> None:
    curve = schedule(kind="constant", lr=1.0, warmup_updates=4)
    assert [curve.learning_rate(u) for u in (0, 1, 2, 4, 1000)] == [0, 0.25, 0.5, 1, 1]


def test_linear_ends_at_the_minimum_and_stays_there() -> None:
    curve = schedule(kind="linear", lr=1.0, min_lr=0.2, warmup_init=0.0, warmup_updates=2, total=10)
    assert [curve.learning_rate(u) for u in (0, 1, 2)] == [0, 0.5, 1]
    assert curve.learning_rate(6) == pytest.approx(0.6)
    assert curve.learning_rate(10) == curve.learning_rate(99) == 0.2


@pytest.mark.parametrize(("warmup", "total"), [(8, 40), (2, 30), (0, 20)])
def test_onecycle_is_that_of_torch(warmup: int, total: int) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 3e-2, total_steps=total, pct_start=warmup / total, anneal_strategy="linear"
    )
    ours = schedule(kind="onecycle-linear", lr=3e-2, warmup_updates=warmup, total=total)
    for update in range(total):
        assert ours.learning_rate(update) == pytest.approx(theirs.get_last_lr()[0], rel=1e-9, abs=1e-12)
        optimizer.step()
        theirs.step()


def test_deit_cosine_by_epochs() -> None:
    """Ten epochs of warm-up from 1e-6, a cosine over 300 that counts them, ten more at the minimum."""
    options = {"lr": 1e-3, "min_lr": 1e-5, "warmup_init": 1e-6, "warmup_epochs": 10, "cooldown_epochs": 10}
    curve = schedule(kind="cosine-epochs", epochs=300, **options)
    assert curve.epochs == 310
    assert curve.learning_rate(0, 0) == curve.learning_rate(1000, 0) == 1e-6
    assert curve.learning_rate(0, 5) == pytest.approx(1e-6 + 5 * (1e-3 - 1e-6) / 10)
    assert curve.learning_rate(0, 150) == pytest.approx((1e-3 + 1e-5) / 2)
    assert curve.learning_rate(0, 300) == curve.learning_rate(0, 309) == pytest.approx(1e-5)
    assert curve.learning_rate(0, 9) > curve.learning_rate(0, 8) > curve.learning_rate(0, 299)
    config = ScheduleConfig.parse("schedule", {"kind": "cosine-epochs", **options})
    whole_run = Schedule(config, epochs=310)
    assert whole_run.learning_rate(0, 77) == curve.learning_rate(0, 77)


def test_crybot_warms_up_by_updates_and_falls_by_epochs() -> None:
    curve = schedule(kind="cosine-epochs", lr=1e-4, min_lr=1e-6, warmup_updates=4000, warmup_init=1e-7, epochs=10)
    assert curve.learning_rate(0, 0) == 1e-7
    assert curve.learning_rate(2000, 0) == pytest.approx((1e-4 + 1e-7) / 2)
    rates = [1e-4, 9.76e-5, 9.05e-5, 7.96e-5, 6.58e-5, 5.05e-5, 3.52e-5, 2.14e-5, 1.05e-5, 3.42e-6]
    for epoch, rate in enumerate(rates):
        assert curve.learning_rate(5000 + 100 * epoch, epoch) == pytest.approx(rate, rel=5e-3)  # three digits are given


def test_stop_lr_counts_after_the_warmup_only() -> None:
    curve = schedule(kind="inverse-sqrt", lr=1.0, warmup_updates=4, stop_lr=0.5)
    assert [curve.finished(u) for u in (0, 1, 4, 15, 16)] == [False, False, False, False, True]
    assert not schedule(kind="constant", lr=1.0).finished(10**6)


def test_a_resolved_config_is_accepted_again() -> None:
    config = ScheduleConfig.parse("schedule", {"kind": "cosine", "period": 100, "period_mult": 2})
    assert ScheduleConfig.parse("schedule", config.model_dump()) == config


def test_a_warmup_longer_than_the_run_is_said() -> None:
    config = ScheduleConfig.parse("schedule", {"kind": "inverse-sqrt", "lr": 3e-3, "warmup_updates": 4000})
    note = config.unfinished_warmup(1000, None)
    assert note is not None
    assert note.startswith("the warm-up of 4,000 updates is longer than the run of 1,000: the rate never reaches 0.003")
    assert config.unfinished_warmup(4000, None) is config.unfinished_warmup(None, 1) is None
    by_epochs = ScheduleConfig.parse("schedule", {"kind": "cosine-epochs", "epochs": 9, "warmup_epochs": 5})
    assert "5 epochs is longer than the run of 4" in (by_epochs.unfinished_warmup(None, 4) or "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "inverse-sqrt"}, "needs warmup_updates"),
        ({"kind": "constant", "period": 5}, "no period; of kind cosine"),
        ({"kind": "cosine", "min_lr": 2.0, "lr": 1.0, "period": 9}, "above lr"),
        ({"kind": "linear"}, "needs its length"),
        ({"kind": "cosine"}, "needs its length"),
        ({"kind": "cosine-epochs"}, "needs its length"),
        ({"kind": "cosine-epochs", "epochs": 9, "warmup_updates": 1, "warmup_epochs": 1}, "not both"),
        ({"kind": "linear", "total": 10, "warmup_updates": 10}, "below total"),
        ({"kind": "cosin"}, "kind"),
        ({"warmup": 3}, "did you mean 'warmup_"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule(**options)
