"""Lower precision: half precision and autocast stay near float32, in one pass, in a stream and across a context."""

import pytest
import torch
from torch import Tensor

from subquad.testing.cases import Case, reads_context, streams
from subquad.testing.inputs import assert_near, chunkings, padded_batch
from subquad.testing.selection import for_cases
from subquad.testing.streaming import read_stream

TIME, STREAM = 29, 17
TOLERANCE = {torch.bfloat16: 0.05, torch.float16: 0.01}
"""Of the norm of the outputs."""
each_precision = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["bfloat16", "float16"])


class Lowered:
    """A mixer in float32 and the same in lower precision, by its dtype or by autocast.

    Its weights are of ordinary size: rounding the inputs of logits of 20 and more moves any softmax that far.
    """

    def __init__(self, case: Case, dtype: torch.dtype, autocast: bool) -> None:
        self.dtype, self.autocast, self.tolerance = dtype, autocast, TOLERANCE[dtype]
        self.exact = case.build()
        with torch.no_grad():
            for parameter in self.exact.parameters():
                parameter.mul_(0.5)
        self.mixer = self.exact
        if not autocast:
            self.mixer = case.build(dtype)
            self.mixer.load_state_dict(self.exact.state_dict())
            self.exact.load_state_dict(self.mixer.state_dict())  # both compute with the rounded weights

    def tokens(self, x: Tensor) -> Tensor:
        return x if self.autocast else x.to(self.dtype)

    def lower(self) -> torch.autocast:
        return torch.autocast("cpu", self.dtype, enabled=self.autocast)

    def check_pass(self, x: Tensor, padding: Tensor | None) -> None:
        with self.lower():
            y = self.mixer(self.tokens(x), padding=padding).y
        assert self.autocast or y.dtype == self.dtype, f"outputs are {y.dtype}, inputs {self.dtype}"
        exact = self.exact(self.tokens(x).float(), padding=padding).y
        assert_near(y, exact, "no padding" if padding is None else "with padding", self.tolerance)

    @torch.no_grad()
    def check_stream(self, x: Tensor, padding: Tensor | None, seed: int) -> None:
        x = self.tokens(x)
        expected, told = self.exact(x.float(), padding=padding).y, "no padding" if padding is None else "with padding"
        for how, chunks in chunkings(x.shape[1], seed).items():
            with self.lower():
                y, _ = read_stream(self.mixer, x, chunks, padding)
            assert_near(y, expected, f"{how}, {told}", self.tolerance)
        order = torch.tensor([5, 2, 2, 0])
        before, after = (None, None) if padding is None else (padding[:, :11], padding[order, 11:])
        state = self.mixer.init_state(x.shape[0])  # outside autocast
        with self.lower():
            _, state = read_stream(self.mixer, x[:, :11], [1, 4, 6], before, state)
            y, _ = read_stream(self.mixer, x[order, 11:], [1, x.shape[1] - 12], after, state.reorder(order))
        assert_near(y, expected[order, 11:], f"reordered after 11 tokens, {told}", self.tolerance)

    @torch.no_grad()
    def check_context(self, x: Tensor, context: Tensor, padding: Tensor) -> None:
        x, context, order = self.tokens(x), self.tokens(context), torch.tensor([5, 2, 2, 0])
        expected = self.exact(x.float(), context=context.float(), context_padding=padding).y
        mixer = self.mixer
        with self.lower():
            first = mixer(x[:, :1], context=context, context_padding=padding, state=mixer.init_state(x.shape[0]))
            assert first.state is not None
            later = mixer(x[order, 1:], state=first.state.reorder(order))
        assert_near(first.y, expected[:, :1], "the first call", self.tolerance)
        assert_near(later.y, expected[order, 1:], "a call with the state", self.tolerance)


class PrecisionContract:
    @for_cases()
    @each_precision
    def test_half_precision_stays_near_float32(self, case: Case, dtype: torch.dtype) -> None:
        lowered = Lowered(case, dtype, autocast=False)
        lowered.check_pass(case.tokens(2, TIME), None)
        lowered.check_pass(case.tokens(7, TIME), padded_batch(TIME, case.seed))

    @for_cases()
    @each_precision
    def test_autocast_stays_near_float32(self, case: Case, dtype: torch.dtype) -> None:
        lowered = Lowered(case, dtype, autocast=True)
        lowered.check_pass(case.tokens(2, TIME), None)
        lowered.check_pass(case.tokens(7, TIME), padded_batch(TIME, case.seed))

    @for_cases(streams)
    @each_precision
    def test_streaming_in_half_precision(self, case: Case, dtype: torch.dtype) -> None:
        lowered = Lowered(case, dtype, autocast=False)
        lowered.check_stream(case.tokens(7, STREAM), None, case.seed)
        lowered.check_stream(case.tokens(7, STREAM), padded_batch(STREAM, case.seed), case.seed)

    @for_cases(streams)
    @each_precision
    def test_streaming_under_autocast(self, case: Case, dtype: torch.dtype) -> None:
        lowered = Lowered(case, dtype, autocast=True)
        lowered.check_stream(case.tokens(7, STREAM), None, case.seed)
        lowered.check_stream(case.tokens(7, STREAM), padded_batch(STREAM, case.seed), case.seed)

    @for_cases(reads_context)
    @each_precision
    @pytest.mark.parametrize("autocast", [False, True], ids=["half", "autocast"])
    def test_cross_attention_in_lower_precision(self, case: Case, dtype: torch.dtype, autocast: bool) -> None:
        x, context = case.tokens(7, 5), case.tokens(7, TIME, seed=1)
        Lowered(case, dtype, autocast).check_context(x, context, padded_batch(TIME, case.seed))
