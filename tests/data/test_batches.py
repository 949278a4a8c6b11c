"""Batches by token budget, the cursor, shards, collated tensors, and blocks of text."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from subquad.data.batches import (
    BatchPlan,
    Budget,
    Cursor,
    batches_by_tokens,
    collate_pairs,
    shard,
    split_batches,
    too_long,
)
from subquad.data.blocks import BlockOptions, Blocks, collate_blocks
from tests.originals.batching import check_batching, check_collate
from tests.originals.files import FOLDER

SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=120)
BUDGETS = st.builds(
    Budget,
    max_tokens=st.integers(60, 400),
    max_sentences=st.none() | st.integers(1, 30),
    multiple=st.integers(1, 9),
)
FAIRSEQ = FOLDER / "fairseq"


def flat(batches):
    return [int(sample) for batch in batches for sample in batch]


@pytest.mark.skipif(not (FAIRSEQ / "batching.json").exists(), reason="no fixture of batching in the golden folder")
def test_the_originals_batches_and_the_rest():
    check_batching(json.loads((FAIRSEQ / "batching.json").read_text()))


@pytest.mark.skipif(not (FAIRSEQ / "collate.json").exists(), reason="no fixture of collating in the golden folder")
def test_the_originals_tensors():
    check_collate(json.loads((FAIRSEQ / "collate.json").read_text()))


@given(SIZES, BUDGETS, st.integers(0, 2**40), st.integers(0, 1000), st.booleans())
def test_every_sample_is_in_one_batch_within_the_budget(sizes, budget, seed, epoch, shuffle):
    other = sizes[::-1]
    plan = BatchPlan(sizes, other, budget=budget, seed=seed, shuffle=shuffle)
    batches = plan.epoch(epoch)
    assert sorted(flat(batches)) == list(range(len(sizes)))
    for batch in batches:
        assert 1 <= len(batch) <= (budget.max_sentences or len(sizes))
        assert len(batch) * plan.sizes[batch].max() <= budget.max_tokens
    again = BatchPlan(sizes, other, budget=budget, seed=seed, shuffle=shuffle).epoch(epoch)
    assert flat(again) == flat(batches)


@given(SIZES, BUDGETS)
def test_batches_above_the_multiple_are_multiples(sizes, budget):
    batches = BatchPlan(sizes, budget=budget, shuffle=False).epoch(0)
    assert all(len(batch) <= budget.multiple or len(batch) % budget.multiple == 0 for batch in batches)


@given(SIZES, BUDGETS, st.integers(1, 7))
def test_shards_together_are_the_epoch(sizes, budget, world):
    batches = BatchPlan(sizes, budget=budget, seed=3).epoch(1)
    shards = [shard(batches, rank, world) for rank in range(world)]
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    steps = [batch for step in itertools.zip_longest(*shards) for batch in step if batch is not None]
    assert flat(steps) == flat(batches), "the ranks' steps follow the common order"


@given(SIZES, BUDGETS, st.data())
def test_the_cursor_resumes_anywhere(sizes, budget, data):
    plan = BatchPlan(sizes, budget=budget, seed=5)
    total = len(plan.epoch(2))
    used = data.draw(st.integers(0, total))
    cursor = Cursor(epoch=2).after(used, total)
    if used == total:
        assert cursor == Cursor(epoch=3, batch=0)
    else:
        assert flat(plan.epoch(2)[:used]) + flat(plan.rest(cursor)) == flat(plan.epoch(2))


def test_epochs_and_seeds_have_orders_of_their_own():
    sizes = np.random.default_rng(0).integers(3, 30, 500)
    budget = Budget(max_tokens=120)
    orders = {tuple(flat(BatchPlan(sizes, budget=budget, seed=seed).epoch(e))) for seed in (1, 2) for e in (0, 1)}
    assert len(orders) == 4
    with pytest.raises(ValueError, match="0 or more"):
        BatchPlan(sizes, budget=budget, seed=-1).epoch(0)


def test_batches_hold_similar_lengths():
    sizes = np.random.default_rng(0).integers(3, 60, 5000)
    plan = BatchPlan(sizes, budget=Budget(max_tokens=1000))
    batches = plan.epoch(0)
    padded = sum(len(batch) * int(sizes[batch].max()) for batch in batches)
    assert padded <= 1.05 * sizes.sum()


def test_long_samples_are_named_or_counted():
    sizes = [5, 200, 7, 300]
    plan = BatchPlan(sizes, budget=Budget(max_tokens=100))
    with pytest.raises(ValueError, match=r"sample 1 has 200 tokens.*max_tokens=100 \(2 such samples\).*skip_long"):
        plan.epoch(0)
    lenient = Budget(max_tokens=100, skip_long=True)
    plan = BatchPlan(sizes, budget=lenient)
    assert plan.skipped.tolist() == too_long(plan.sizes, lenient).tolist() == [1, 3]
    assert sorted(flat(plan.epoch(0))) == [0, 2]
    with pytest.raises(ValueError, match="every sample is longer"):
        BatchPlan([200], budget=lenient)


def test_mistakes_are_said_in_one_line():
    with pytest.raises(ValueError, match="needs a limit"):
        Budget.parse("batches", {"max_tokens": None})
    with pytest.raises(ValueError, match="did you mean 'max_tokens'"):
        Budget.parse("batches", {"max_token": 3})
    budget = Budget(max_tokens=50)
    with pytest.raises(ValueError, match="no samples"):
        BatchPlan([], budget=budget)
    with pytest.raises(ValueError, match="different numbers"):
        BatchPlan([1, 2], [1], budget=budget)
    with pytest.raises(ValueError, match="rank 2 is not one of 2"):
        shard([], 2, 2)
    with pytest.raises(ValueError, match="which has 1"):
        BatchPlan([4, 4], budget=budget).rest(Cursor(0, 9))
    with pytest.raises(ValueError, match="have changed"):
        Cursor(0, 1).after(3, 2)
    assert batches_by_tokens(np.empty(0, np.int64), np.empty(0, np.int64), budget) == []


def test_pairs_become_tensors():
    batch = collate_pairs([([7, 8, 9], [4]), ([5], [6, 7])], pad=1, eos=2)
    assert batch["source"].tolist() == [[7, 8, 9, 2], [5, 2, 1, 1]]
    assert batch["source_padding"].tolist() == [[False] * 4, [False, False, True, True]]
    assert batch["target_in"].tolist() == [[2, 4, 1], [2, 6, 7]]
    assert batch["target_out"].tolist() == [[4, 2, 1], [6, 7, 2]]


def test_a_rank_without_work_collates_nothing():
    empty = collate_pairs([], pad=1, eos=2)
    assert all(len(tensor) == 0 for tensor in empty.values())
    assert all(len(tensor) == 0 for tensor in collate_blocks([], pad=1).values())


class Lines:
    """A store in memory."""

    def __init__(self, lines):
        self.lines = [np.array(line, np.uint16) for line in lines]
        self.lengths = np.array([len(line) for line in lines], np.int64)

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        return self.lines[index]


EOS = 2
LINES = st.lists(st.lists(st.integers(4, 60), max_size=12), min_size=1, max_size=30)


@given(LINES, st.integers(1, 25), st.sampled_from(["none", "eos", "complete"]))
def test_every_token_is_a_target_once(lines, size, breaks):
    blocks = Blocks(Lines(lines), BlockOptions(tokens_per_sample=size, breaks=breaks), EOS)
    stream = [token for line in lines for token in [*line, EOS]]
    parts = [blocks[i] for i in range(len(blocks))]
    assert np.concatenate([targets for _, targets in parts]).tolist() == stream
    assert np.concatenate([inputs for inputs, _ in parts]).tolist() == [EOS, *stream[:-1]]
    assert blocks.sizes.tolist() == [len(targets) for _, targets in parts]
    assert blocks.total == len(stream)
    if breaks == "none":
        assert all(length == size for length in blocks.sizes[:-1])
    elif breaks == "eos":
        assert len(blocks) == len(lines)
    for _, targets in parts:
        if breaks == "complete":
            assert targets[-1] == EOS
            assert len(targets) <= size or targets.tolist().count(EOS) == 1
    batch = collate_blocks(parts, pad=1)
    assert batch["targets"][~batch["padding"]].tolist() == stream
    assert (batch["inputs"][batch["padding"]] == 1).all()


def test_complete_blocks_take_what_fits():
    lines = [[5] * 3, [6] * 2, [7] * 30, [8], [9]]
    blocks = Blocks(Lines(lines), BlockOptions(tokens_per_sample=7, breaks="complete"), EOS)
    assert blocks.sizes.tolist() == [7, 31, 4]


def test_windows_begin_where_the_evaluator_wants():
    blocks = Blocks(Lines([[10, 11], [12]]), BlockOptions(tokens_per_sample=2), EOS)
    inputs, targets = blocks.window(1, 5)
    assert inputs.tolist() == [10, 11, EOS, 12]
    assert targets.tolist() == [11, EOS, 12, EOS]
    with pytest.raises(ValueError, match="no lines"):
        Blocks(Lines([]), BlockOptions(), EOS)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_rank_has_as_many_batches_and_each_batch_counts_once(world: int) -> None:
    for count in range(1, 12):
        shares = [split_batches(range(count), rank, world) for rank in range(world)]
        assert len({len(batches) for batches, _ in shares}) == 1
        counted = [batch for batches, idle in shares for batch in (batches[:-1] if idle else batches)]
        assert sorted(counted) == list(range(count))
