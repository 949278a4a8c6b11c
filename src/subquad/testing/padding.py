"""Padding and company: a token gets the same output whatever stands beside its row and between its tokens."""

import torch

from subquad.mixers import MixerOutput
from subquad.testing.cases import Case, grid_options, reads_grids_row_by_row, sees_grids
from subquad.testing.inputs import GRIDS, LENGTHS, assert_close, padded_batch, paddings
from subquad.testing.selection import for_cases


class PaddingContract:
    """What holds for every case, in evaluation mode."""

    @for_cases()
    def test_padding_changes_nothing(self, case: Case) -> None:
        mixer = case.build()
        for time in LENGTHS:
            for kind, padding in paddings(time, case.seed + time).items():
                x = case.tokens(1, time)
                x[:, padding] = torch.nan  # what padded positions hold must not matter
                padded, alone = mixer(x, padding=padding[None]), mixer(x[:, ~padding])
                where = f"{kind}, {int((~padding).sum())} of {time} positions are tokens"
                assert_close(padded.y[:, ~padding], alone.y, where)
                assert (padded.y[:, padding] == 0).all(), f"{where}: outputs at padding are zeros"
                assert_same_regulariser(padded, alone, where)

    @for_cases()
    def test_company_in_the_batch_changes_nothing(self, case: Case) -> None:
        mixer = case.build()
        for time in LENGTHS:
            padding = padded_batch(time, case.seed + time)
            x = case.tokens(len(padding), time)
            plain, padded = mixer(x).y, mixer(x, padding=padding).y
            for row in range(len(padding)):
                one, where = slice(row, row + 1), f"row {row} of {len(padding)}, {time} positions"
                assert_close(plain[one], mixer(x[one]).y, f"{where}, no padding")
                assert_close(
                    padded[one], mixer(x[one], padding=padding[one]).y, f"{where}, {int(padding[row].sum())} padded"
                )

    @for_cases()
    def test_padded_rows_and_short_lengths_are_finite(self, case: Case) -> None:
        mixer = case.build()
        for time in (1, 2, 3, 7):
            x = case.tokens(2, time).requires_grad_()
            mixed = mixer(x, padding=torch.tensor([[True] * time, [False] * time]))
            mixed.y.sum().backward()
            assert mixed.y.shape == x.shape
            assert torch.isfinite(mixed.y).all(), f"{time} positions: outputs are finite"
            assert x.grad is not None
            assert torch.isfinite(x.grad).all(), f"{time} positions: gradients are finite"
            assert (x.grad[0] == 0).all(), f"{time} positions: nothing flows into padding"
        for name, parameter in mixer.named_parameters():
            assert parameter.grad is None or torch.isfinite(parameter.grad).all(), f"the gradient of {name} is finite"

    @for_cases()
    def test_empty_batches(self, case: Case) -> None:
        mixer, x = case.build(), case.tokens(0, 5).requires_grad_()
        for padding in (None, torch.zeros(0, 5, dtype=torch.bool)):
            mixed = mixer(x, padding=padding)
            assert mixed.y.shape == x.shape
            assert mixed.aux is None or mixed.aux.shape == (0,)
            mixed.y.sum().backward()

    # ------------------------------------------------------------------ grids

    @for_cases(sees_grids)
    def test_padded_cells_of_a_grid_contribute_nothing(self, case: Case) -> None:
        mixer = case.build(**(grid_options(case) or {}))
        for grid in GRIDS:
            cells = grid[0] * grid[1]
            x, padding = case.tokens(1, cells), torch.arange(cells)[None] > 0
            lone = mixer(x[:, :1], grid=(1, 1)).y
            assert_close(mixer(x, padding=padding, grid=grid).y[:, :1], lone, f"one token on a grid of {grid}")
            padding = padded_batch(cells, case.seed + cells)
            x = case.tokens(len(padding), cells)
            y = mixer(x, padding=padding, grid=grid).y
            other = torch.where(padding[..., None], torch.nan, x)
            assert torch.equal(y, mixer(other, padding=padding, grid=grid).y), f"{grid}: what padded cells hold matters"
            assert (y[padding] == 0).all(), f"{grid}: outputs at padded cells are zeros"
            for row in range(len(padding)):
                one, where = slice(row, row + 1), f"row {row} of {len(padding)} on a grid of {grid}"
                assert_close(y[one], mixer(x[one], padding=padding[one], grid=grid).y, where)

    @for_cases(reads_grids_row_by_row)
    def test_a_grid_that_is_not_seen_is_a_sequence(self, case: Case) -> None:
        mixer, x = case.build(), case.tokens(2, 12)
        assert torch.equal(mixer(x, grid=(3, 4)).y, mixer(x).y)


def assert_same_regulariser(padded: MixerOutput, alone: MixerOutput, where: str) -> None:
    assert (padded.aux is None) == (alone.aux is None), f"{where}: aux is there for every call or for none"
    if padded.aux is not None and alone.aux is not None:
        assert_close(padded.aux, alone.aux, f"aux, {where}")
