"""Plans: their trials, and what they refuse."""

import pytest

from subquad.cli.compare import parse_seeds, parse_shard
from subquad.compare.comparison import Shard
from subquad.compare.plan import TrialName
from tests.compare.plans import PAIRS, make_plan


def test_labels_must_name_different_files() -> None:
    with pytest.raises(ValueError, match="'eva 1' and 'eva/1' would name the same files"):
        make_plan(PAIRS, ["eva 1=eva", "eva/1=eva"])


def test_trials_and_shards() -> None:
    plan = make_plan(PAIRS, ["eva"])
    assert plan.trials() == [TrialName(label, seed) for seed in (1, 2) for label in ("softmax", "eva")]
    shards = [Shard(number, 3).trials(plan.trials()) for number in (1, 2, 3)]
    assert sorted(trial for shard in shards for trial in shard) == sorted(plan.trials())
    assert plan.trial_recipe(TrialName("eva", 2))["train"]["seed"] == 2
    keys = {plan.trial_key(trial) for trial in plan.trials()}
    assert len(keys) == 4
    assert parse_seeds("3") == 3
    assert parse_seeds("7,") == [7]
    assert parse_seeds("4,2") == [4, 2]
    assert parse_shard("2/3") == Shard(2, 3)
