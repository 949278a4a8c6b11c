"""Order and streaming: the future is unknown, and a stream read in any chunks gives what one pass gives."""

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from subquad.mixers import Mixer, State
from subquad.testing.cases import Case, is_causal, streams
from subquad.testing.inputs import LENGTHS, assert_close, chunkings, padded_batch, with_and_without_gradients
from subquad.testing.selection import for_cases

ORDERS = ([1, 0, 2], [2], [0, 0, 2, 1, 2])
"""Rows of three that a beam search keeps: another order, one of them, and more than there were."""


def read_stream(
    mixer: Mixer, x: Tensor, chunks: Sequence[int], padding: Tensor | None = None, state: State | None = None
) -> tuple[Tensor, State]:
    """Outputs of x (batch, time, channels), read chunk by chunk, and the state after the last."""
    state = mixer.init_state(x.shape[0]) if state is None else state
    outputs, begin = [], 0
    for size in chunks:
        part = None if padding is None else padding[:, begin : begin + size]
        part = None if part is None or not part.any() else part  # chunks with and without padding follow each other
        mixed = mixer(x[:, begin : begin + size], padding=part, state=state)
        assert mixed.state is not None, "a call with a state returns the next one"
        outputs.append(mixed.y)
        state, begin = mixed.state, begin + size
    return torch.cat(outputs, 1), state


class StreamingContract:
    @for_cases(is_causal)
    def test_the_future_never_reaches_the_past(self, case: Case) -> None:
        mixer = case.build()
        for time, mode in with_and_without_gradients(LENGTHS[1:]):
            x, padding = case.tokens(7, time), padded_batch(time, case.seed + time)
            with mode:
                plain, padded = mixer(x).y, mixer(x, padding=padding).y
                for cut in sorted({1, time // 2, time - 1}):
                    other = torch.cat([x[:, :cut], 3 * case.tokens(7, time - cut, seed=1)], 1)
                    where = f"outputs 0 to {cut - 1} of {time} change when later tokens do"
                    assert torch.equal(plain[:, :cut], mixer(other).y[:, :cut]), where
                    assert torch.equal(padded[:, :cut], mixer(other, padding=padding).y[:, :cut]), f"{where}, padded"

    @for_cases(streams)
    def test_a_prefix_has_the_outputs_of_the_whole(self, case: Case) -> None:
        """Nothing depends on the length to come."""
        mixer, x = case.build(), case.tokens(2, LENGTHS[-1])
        whole = mixer(x).y
        for time in LENGTHS[:-1]:
            assert_close(mixer(x[:, :time]).y, whole[:, :time], f"the first {time} of {LENGTHS[-1]} tokens alone")

    @for_cases(is_causal)
    def test_tokens_that_are_not_read_change_nothing(self, case: Case) -> None:
        """`reads_from` and `period` say from where on a sequence has to be read for its last outputs."""
        mixer, x = case.build(), case.tokens(2, LENGTHS[-1])
        whole = mixer(x).y
        for start in (0, 1, LENGTHS[-1] // 2, LENGTHS[-1] - 1):
            read = mixer.reads_from(start)
            assert 0 <= read <= start, f"outputs from {start} on cannot be computed from {read} on"
            begin = read - read % mixer.period
            assert_close(mixer(x[:, begin:]).y[:, start - begin :], whole[:, start:], f"outputs from {start} on")

    @for_cases(streams)
    def test_streaming_in_chunks_equals_one_pass(self, case: Case) -> None:
        mixer = case.build()
        for time in (1, 6, 33):
            x, padding = case.tokens(7, time), padded_batch(time, case.seed + time)
            plain, padded = mixer(x).y, mixer(x, padding=padding).y
            for (how, chunks), mode in with_and_without_gradients(chunkings(time, case.seed + time).items()):
                with mode:
                    y, state = read_stream(mixer, x, chunks)
                    assert_close(y, plain, f"{time} tokens {how}")
                    assert state.lengths.tolist() == [time] * 7, "a state counts the tokens it has read"
                    y, state = read_stream(mixer, x, chunks, padding)
                    assert_close(y, padded, f"{time} tokens {how}, with padding")
                    assert state.lengths.tolist() == (~padding).sum(1).tolist(), "padding does not advance a row"

    @for_cases(streams)
    def test_reordering_states_equals_reordering_inputs(self, case: Case) -> None:
        mixer = case.build()
        for before in (1, 6, 17):
            x, padding = case.tokens(3, before), padded_batch(before, case.seed + before)[1::2]
            for order, mode in with_and_without_gradients(ORDERS):
                index, back = torch.tensor(order), torch.arange(len(order)).flip(0)
                where = f"rows {order} of 3 after {before} positions"
                more = case.tokens(len(order), 9, seed=1)
                with mode:
                    _, state = read_stream(mixer, x, [before], padding)
                    _, straight = read_stream(mixer, x[index], [before], padding[index])
                    expected, _ = read_stream(mixer, more, [1, 5, 3], state=straight)
                    y, later = read_stream(mixer, more[:, :6], [1, 5], state=state.reorder(index))
                    assert_close(y, expected[:, :6], where)
                    y, _ = read_stream(mixer, more[back, 6:], [3], state=later.reorder(back))
                    assert_close(y[back], expected[:, 6:], f"{where}, and reordered again after 6 tokens more")
                    y, _ = read_stream(mixer, more[back], [1, 5, 3], state=state.reorder(index).reorder(back))
                    assert_close(y[back], expected, f"{where}, reordered twice at once")

    @for_cases(streams)
    def test_a_state_can_be_read_more_than_once(self, case: Case) -> None:
        """A call leaves the state that it was given as it was."""
        mixer, more = case.build(), case.tokens(3, 5, seed=1)
        _, state = read_stream(mixer, case.tokens(3, 7), [7])
        first, _ = read_stream(mixer, more, [1, 4], state=state)
        read_stream(mixer, -more, [5], state=state)
        second, _ = read_stream(mixer, more, [1, 4], state=state)
        assert torch.equal(first, second)

    @for_cases(streams)
    @torch.no_grad()
    def test_room_in_a_state_changes_nothing(self, case: Case) -> None:
        """A state into which calls write reads what one reads that is copied, as does one whose shapes stay."""
        mixer, index = case.build(), torch.tensor([2, 0, 0])
        for before, padded in ((7, False), (7, True), (0, False)):
            x, more = case.tokens(3, max(1, before)), case.tokens(3, 40, seed=1)
            padding = padded_batch(before, case.seed)[1::2] if padded else None
            state = read_stream(mixer, x, [before], padding)[1] if before else mixer.init_state(3)
            expected, last = read_stream(mixer, more[:, :3], [1, 2], state=state)
            expected = torch.cat([expected, read_stream(mixer, more[:, 3:], [1] * 37, state=last.reorder(index))[0]], 1)
            for fixed in (False, True):
                room = state.reserve(40).with_fixed_size() if fixed else state
                shapes, outputs = _shapes(room), list[Tensor]()
                for time in (1, 2, *[1] * 37):
                    room = room.reorder(index) if len(outputs) == 2 else room
                    begin = sum(y.shape[1] for y in outputs)
                    mixed = mixer(more[:, begin : begin + time], state=room if fixed else room.reserve(time))
                    assert mixed.state is not None
                    assert not fixed or _shapes(mixed.state) == shapes, "a state of fixed size keeps its shapes"
                    room = mixed.state
                    outputs.append(mixed.y)
                assert_close(torch.cat(outputs, 1), expected, f"fixed={fixed}, after {before} tokens")
            again = read_stream(mixer, more[:, :3], [1, 2], state=state)[0]
            assert torch.equal(again, expected[:, :3]), "the state that room was reserved for stays as it was"

    @for_cases(streams)
    def test_a_state_holds_plain_tensors_by_row(self, case: Case) -> None:
        mixer = case.build()
        _, state = read_stream(mixer, case.tokens(3, 7), [7])
        for field in fields(state):
            value = getattr(state, field.name)
            if isinstance(value, Tensor):
                assert value.shape[0] == 3, f"{field.name} has a row for every row of the batch"
            else:
                assert isinstance(value, bool | int | float | None), f"{field.name} is a {type(value).__name__}"


def _shapes(state: State) -> list[torch.Size]:
    return [value.shape for field in fields(state) if isinstance(value := getattr(state, field.name), Tensor)]
