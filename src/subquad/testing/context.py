"""Cross-attention: reading a context that is padded, cached and reordered."""

import pytest
import torch

from subquad.testing.cases import Case, reads_context
from subquad.testing.inputs import LENGTHS, assert_close, padded_batch, paddings
from subquad.testing.selection import for_cases


class ContextContract:
    @for_cases(reads_context)
    def test_padding_of_a_context_changes_nothing(self, case: Case) -> None:
        mixer, x = case.build(), case.tokens(1, 4)
        for time in LENGTHS:
            for kind, padding in paddings(time, case.seed + time).items():
                context = case.tokens(1, time, seed=1)
                context[:, padding] = torch.nan
                padded = mixer(x, context=context, context_padding=padding[None]).y
                where = f"a context with {kind}, {int((~padding).sum())} of {time} positions are tokens"
                assert_close(padded, mixer(x, context=context[:, ~padding]).y, where)

    @for_cases(reads_context)
    def test_company_of_a_context_changes_nothing(self, case: Case) -> None:
        """Neither other rows of the batch nor other positions of x matter, nor what padded ones of these hold."""
        mixer = case.build()
        for time in LENGTHS:
            context_padding = padded_batch(time, case.seed + time)
            batch = len(context_padding)
            x, context = case.tokens(batch, 5), case.tokens(batch, time, seed=1)
            padding = padded_batch(5, case.seed + time)
            x[padding] = torch.nan
            y = mixer(x, context=context, padding=padding, context_padding=context_padding).y
            assert torch.isfinite(y).all(), f"contexts of {time} positions, one of them padded wholly"
            assert (y[padding] == 0).all(), "outputs at padding are zeros"
            for row in range(batch):
                one, kept = slice(row, row + 1), ~padding[row]
                alone = (
                    mixer(x[one, kept], context=context[one], context_padding=context_padding[one]).y
                    if kept.any()
                    else y[one, kept]
                )
                assert_close(y[one, kept], alone, f"row {row} of {batch}, a context of {time} positions")

    @for_cases(reads_context)
    def test_a_context_is_read_once_and_kept(self, case: Case) -> None:
        """The first call brings the context, later ones the state alone, whose rows can be reordered."""
        mixer, x = case.build(), case.tokens(7, 6)
        for time in LENGTHS:
            context, padding = case.tokens(7, time, seed=1), padded_batch(time, case.seed + time)
            y = mixer(x, context=context, context_padding=padding).y
            first = mixer(x[:, :2], context=context, context_padding=padding, state=mixer.init_state(7))
            assert_close(first.y, y[:, :2], f"the first call, a context of {time} positions")
            assert first.state is not None
            order = torch.tensor([6, 2, 2, 0])
            state = first.state.reorder(order)
            for begin, end in ((2, 3), (3, 6)):
                mixed = mixer(x[order, begin:end], state=state)
                assert_close(mixed.y, y[order, begin:end], f"rows {order.tolist()} at positions {begin} to {end - 1}")
                assert mixed.state is not None
                state = mixed.state

    @for_cases(reads_context)
    def test_a_context_of_another_batch_is_refused(self, case: Case) -> None:
        mixer, x = case.build(), case.tokens(2, 5)
        with pytest.raises(ValueError, match=f"{case.name}: x has 2 rows, its context 3"):
            mixer(x, context=case.tokens(3, 5))
        state = mixer(x, context=x, state=mixer.init_state(2)).state
        with pytest.raises(ValueError, match=f"{case.name}: the state holds 2 rows, x has 3"):
            mixer(case.tokens(3, 1), state=state)

    @for_cases(reads_context)
    def test_empty_batches_with_a_context(self, case: Case) -> None:
        mixer, x = case.build(), case.tokens(0, 5)
        assert mixer(x, context=case.tokens(0, 3)).y.shape == x.shape
