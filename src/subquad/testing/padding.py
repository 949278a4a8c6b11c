"""Padding and company: a token gets the same output whatever stands beside its row and between its tokens."""

import torch

from subquad.mixers import MixerOutput
from subquad.testing.cases import Case
from subquad.testing.inputs import LENGTHS, assert_close, padded_batch, paddings, with_and_without_gradients
from subquad.testing.selection import for_cases


class PaddingContract:
    """What holds for every case, in evaluation mode."""

    @for_cases()
    def test_padding_changes_nothing(self, case: Case) -> None:
        mixer = case.build()
        for time, mode in with_and_without_gradients(LENGTHS):
            for kind, padding in paddings(time, case.seed + time).items():
                x = case.tokens(1, time)
                x[:, padding] = torch.nan  # what padded positions hold must not matter
                with mode:
                    padded, alone = mixer(x, padding=padding[None]), mixer(x[:, ~padding])
                where = f"{kind}, {int((~padding).sum())} of {time} positions are tokens"
                assert_close(padded.y[:, ~padding], alone.y, where)
                assert (padded.y[:, padding] == 0).all(), f"{where}: outputs at padding are zeros"
                assert_same_regulariser(padded, alone, where)

    @for_cases()
    def test_company_in_the_batch_changes_nothing(self, case: Case) -> None:
        mixer = case.build()
        for time, mode in with_and_without_gradients(LENGTHS):
            padding = padded_batch(time, case.seed + time)
            x = case.tokens(len(padding), time)
            with mode:
                plain, padded = mixer(x).y, mixer(x, padding=padding).y
                for row in range(len(padding)):
                    one, where = slice(row, row + 1), f"row {row} of {len(padding)}, {time} positions"
                    assert_close(plain[one], mixer(x[one]).y, f"{where}, no padding")
                    assert_close(padded[one], mixer(x[one], padding=padding[one]).y, f"{where}, with padding")

    @for_cases()
    def test_padded_rows_and_short_lengths_are_finite(self, case: Case) -> None:
        mixer = case.build()
        for time in (1, 2, 3, 7):
            x = case.tokens(2, time).requires_grad_()
            mixed = mixer(x, padding=torch.tensor([[True] * time, [False] * time]))
            mixed.y.sum().backward()
            assert mixed.y.shape == x.shape
            assert torch.isfinite(mixed.y).all(), f"{time} positions: outputs are finite"
            if mixed.aux is not None:
                assert mixed.aux.shape == (2,), "aux has one number for each row"
                assert torch.isfinite(mixed.aux).all(), f"{time} positions: aux is finite"
            assert x.grad is not None
            assert torch.isfinite(x.grad).all(), f"{time} positions: gradients are finite"
            assert (x.grad[0] == 0).all(), f"{time} positions: nothing flows into padding"
        for name, parameter in mixer.named_parameters():
            assert parameter.grad is None or torch.isfinite(parameter.grad).all(), f"the gradient of {name} is finite"

    @for_cases()
    def test_equal_inputs_and_seeds_give_equal_bits(self, case: Case) -> None:
        mixer, x = case.build(), case.tokens(2, 13)
        assert torch.equal(mixer(x).y, mixer(x).y)
        mixer.train()
        results = []
        for _ in range(2):
            torch.manual_seed(0)
            results.append(mixer(x).y)
        assert torch.equal(*results), "draws of training come from torch's generator alone"

    @for_cases()
    def test_empty_batches(self, case: Case) -> None:
        mixer, x = case.build(), case.tokens(0, 5).requires_grad_()
        for padding in (None, torch.zeros(0, 5, dtype=torch.bool)):
            mixed = mixer(x, padding=padding)
            assert mixed.y.shape == x.shape
            assert mixed.aux is None or mixed.aux.shape == (0,)
            mixed.y.sum().backward()


def assert_same_regulariser(padded: MixerOutput, alone: MixerOutput, where: str) -> None:
    assert (padded.aux is None) == (alone.aux is None), f"{where}: aux is there for every call or for none"
    if padded.aux is not None and alone.aux is not None:
        assert_close(padded.aux, alone.aux, f"aux, {where}")
