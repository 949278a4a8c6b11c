"""What fairseq's checkpoints say about training, as recipes say it."""

import json

import pytest

from subquad.interop.checkpoints.fairseq.settings import recipe_sections
from subquad.train.schedules import Schedule, ScheduleConfig
from tests.interop.test_import import GOLDEN
from tests.originals.training import schedule_of


@pytest.mark.parametrize("kind", ["inverse_sqrt", "cosine"])
def test_schedules_are_fairseqs(kind) -> None:
    entries = json.loads((GOLDEN / "lr_schedules.json").read_text())[kind]
    assert entries
    for entry in entries:
        config = {**entry["config"], "lr_scheduler": kind, "max_epoch": 0}
        found = recipe_sections(config, 0)
        ours = Schedule(ScheduleConfig(**found.recipe["schedule"]), found.recipe["train"].get("updates"))
        golden = schedule_of(kind, entry["config"])
        assert [ours.learning_rate(update) for update in range(200)] == [
            golden.learning_rate(update) for update in range(200)
        ]


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"lr_scheduler": "fixed", "warmup_updates": 5}, "constant"),
        ({"lr_scheduler": "polynomial_decay", "total_num_update": "100", "end_learning_rate": 0.0}, "linear"),
        ({"lr_scheduler": "cosine", "max_lr": 0.5, "lr_period_updates": 20.0}, "cosine"),
    ],
)
def test_other_schedules(settings, kind) -> None:
    found = recipe_sections({"lr": [0.1], "optimizer": "nag", "momentum": 0.9, **settings}, 7)
    schedule = ScheduleConfig(**found.recipe["schedule"])
    assert (schedule.kind, schedule.lr) == (kind, settings.get("max_lr", 0.1))
    assert (found.recipe["optim"]["name"], found.notes) == ("nag", [])


def test_what_training_here_lacks_is_noted() -> None:
    found = recipe_sections({"lr": [0.25], "optimizer": "adafactor", "lr_scheduler": "triangular"}, 7)
    assert ScheduleConfig(**found.recipe["schedule"]).lr == 0.25
    assert any("'adafactor'" in note for note in found.notes)
    assert any("'triangular'" in note for note in found.notes)
