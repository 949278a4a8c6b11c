"""How work is cut: every cell once, within the limit, whole rows where they fit."""

import pytest
import torch

from subquad.kernels import tiles


@pytest.mark.parametrize("rows", [0, 1, 3, 7])
@pytest.mark.parametrize("columns", [1, 4, 9])
@pytest.mark.parametrize("elements", [1, 5, 100])
@pytest.mark.parametrize("most", [1, 12, 45, 10**6])
def test_pieces_cover_every_cell_once(rows: int, columns: int, elements: int, most: int) -> None:
    seen = torch.zeros(rows, columns, dtype=torch.int64)
    for piece in tiles.cut(rows, columns, elements, most):
        cells = seen[piece]
        assert cells.numel() * elements <= most or cells.numel() == 1
        assert cells.shape[0] == 1 or cells.shape[1] == columns
        cells += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize(("batch", "heads"), [(0, 3), (1, 1), (1, 8), (3, 2), (9, 4)])
def test_threads_get_parts_that_cover_every_head_once(
    threads: int, batch: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    seen = torch.zeros(batch, heads, dtype=torch.int64)
    parts = tiles.parts_by_thread(batch, heads)
    for part in parts:
        part.of_heads(seen).add_(1)
    assert (seen == 1).all()
    assert len(parts) <= max(1, 2 * threads + batch)


def test_a_tile_is_unpacked_to_where_it_was_packed_from() -> None:
    x = torch.randn(3, 10, 2, 4)
    copy = torch.zeros_like(x)
    for tile in tiles.tiles_of(x, tiles.TILE_ELEMENTS // 8):  # four positions of both heads
        tile.unpack(tile.pack(x), copy)
    assert torch.equal(copy, x)
