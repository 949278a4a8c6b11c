"""Grids: neighbourhoods in two dimensions, in which a padded cell is as good as outside."""

import torch

from subquad.testing.cases import Case, averages_values, grid_options, reads_grids_row_by_row, sees_grids
from subquad.testing.inputs import GRIDS, assert_close, padded_batch
from subquad.testing.selection import for_cases


class GridContract:
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

    @for_cases(sees_grids)
    def test_company_on_a_grid_changes_nothing(self, case: Case) -> None:
        mixer = case.build(**(grid_options(case) or {}))
        for grid in GRIDS:
            padding = padded_batch(grid[0] * grid[1], case.seed + grid[0])
            x = case.tokens(*padding.shape)
            y = mixer(x, padding=padding, grid=grid).y
            assert torch.isfinite(y).all(), f"{grid}: outputs are finite, also of a grid that is padded wholly"
            assert mixer(x[:0], padding=padding[:0], grid=grid).y.shape == x[:0].shape, "a batch of no rows"
            for row in range(len(padding)):
                one, where = slice(row, row + 1), f"row {row} of {len(padding)} on a grid of {grid}"
                assert_close(y[one], mixer(x[one], padding=padding[one], grid=grid).y, where)

    @for_cases(averages_values)
    def test_equal_tokens_come_back_equal(self, case: Case) -> None:
        """An average of equal values is this value, however many there are."""
        mixer, x = case.build(), 0.3 * case.tokens(1, 1)
        few, many = mixer(x.expand(-1, 24, -1)).y, mixer(x.expand(-1, 48, -1)).y
        assert_close(few, few[:, :1].expand_as(few), "24 equal tokens", 1e-4)
        assert_close(many, few[:, :1].expand_as(many), "48 equal tokens, beside 24", 1e-4)

    @for_cases(sees_grids, averages_values)
    def test_equal_tokens_of_a_grid_come_back_equal(self, case: Case) -> None:
        """So a padded cell that had any weight would show."""
        mixer = case.build(**(grid_options(case) or {}))
        for grid in GRIDS:
            padding = padded_batch(grid[0] * grid[1], case.seed + grid[0])[:-1]
            x = (0.3 * case.tokens(1, 1)).expand(*padding.shape, -1)
            y, lone = mixer(x, padding=padding, grid=grid).y, mixer(x[:1, :1], grid=(1, 1)).y[0]
            for row, kept in enumerate(~padding):
                where = f"{int(kept.sum())} equal tokens on a grid of {grid}"
                assert_close(y[row, kept], lone.expand(int(kept.sum()), -1), where, 1e-4)

    @for_cases(reads_grids_row_by_row)
    def test_a_grid_that_is_not_seen_is_a_sequence(self, case: Case) -> None:
        mixer, x = case.build(), case.tokens(2, 12)
        assert torch.equal(mixer(x, grid=(3, 4)).y, mixer(x).y)
