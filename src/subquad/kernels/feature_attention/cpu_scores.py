"""Scores of features on the CPU, from projections and back to their gradient: what both forms of attention begin and
end with."""

import torch
from torch import Tensor

from subquad.kernels.feature_attention import FeatureScores
from subquad.kernels.parallel import parallel_map
from subquad.kernels.tiles import Part, Tile, parts_by_thread, tiles_of


def feature_scores(qkv: Tensor, matrix: Tensor) -> FeatureScores:
    """y, c and the largest y. No gradient flows through these scores: the attention's goes to qkv and W at once."""
    return FeatureScores(*torch.ops.subquad.feature_scores(qkv.detach(), matrix.detach()))


@torch.library.custom_op("subquad::feature_scores", mutates_args=())
def _scores(qkv: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch, time, _, heads, width = qkv.shape
    y = qkv.new_empty(2, batch, heads, time, matrix.shape[1])
    c, log_scale = (qkv.new_empty(2, batch, heads, time) for _ in range(2))
    to_features = (matrix * width**-0.25).transpose(1, 2)

    def score(part: Part) -> None:
        own, own_features = part.of_tokens(qkv), to_features[part.heads]
        for tile in feature_tiles(own, matrix.shape[1]):
            for side in range(2):
                t = tile.pack(own[:, :, side])
                features = _per_row(own_features, t.shape[0] // own_features.shape[0])
                tile_y = torch.bmm(t, features, out=tile.of_positions(part.of_heads(y[side])))
                torch.amax(tile_y, -1, out=tile.of_positions(part.of_heads(log_scale[side])))
                torch.sum(t.square(), -1, out=tile.of_positions(part.of_heads(c[side])))

    list(parallel_map(score, parts_of(qkv)))
    return y, c.mul_(width**-0.5 / 2), log_scale


def parts_of(qkv: Tensor) -> list[Part]:
    return parts_by_thread(qkv.shape[0], qkv.shape[3])


def feature_tiles(x: Tensor, features: int) -> list[Tile]:
    """Tiles of x (batch, time, ..., heads, d)."""
    return tiles_of(x, max(x.shape[-1], features))


def _per_row(matrix: Tensor, rows: int) -> Tensor:
    """(heads, ...) once for each row of a tile: (rows * heads, ...)."""
    return matrix if rows == 1 else matrix.repeat(rows, 1, 1)


@_scores.register_fake
def _fake_scores(qkv: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch, time, _, heads, _ = qkv.shape
    y = qkv.new_empty(2, batch, heads, time, matrix.shape[1])
    return y, qkv.new_empty(2, batch, heads, time), qkv.new_empty(2, batch, heads, time)


def exponentials(scores: Tensor, shift: Tensor, tile: Tile, kept: Tensor | None) -> Tensor:
    """phi = exp(scores + shift) of a tile: (n, t, m); in `kept`, if there is one."""
    shifted = torch.add(tile.of_positions(scores), tile.of_positions(shift).unsqueeze(-1))
    return torch.exp(shifted, out=shifted if kept is None else tile.of_positions(kept))


class Inputs:
    """Queries, keys and W of a part, with room for their gradients."""

    def __init__(self, qkv: Tensor, matrix: Tensor, d_qkv: Tensor, learns: bool) -> None:
        self.qkv, self.d_qkv, self.scale = qkv, d_qkv, matrix.shape[-1] ** -0.25
        self.scaled = matrix * self.scale
        self.d_matrix = torch.zeros_like(matrix) if learns else matrix.new_empty(0)

    def add(self, d_y: Tensor, part: int, tile: Tile) -> None:
        """From the gradient of y - c (n, t, m) to that of queries (part 0) or keys (1), and of W."""
        t, target = tile.view(self.qkv[:, :, part]), tile.view(self.d_qkv[:, :, part])
        d_c = d_y.sum(-1).mul_(self.scale**2).view(*target.shape[:3], 1)
        d_t = torch.bmm(d_y, _per_row(self.scaled, target.shape[0]))
        torch.addcmul(d_t.view(target.shape), t, d_c, value=-1, out=target)
        if self.d_matrix.numel():
            by_row = torch.bmm(d_y.transpose(1, 2), tile.pack(self.qkv[:, :, part]))
            self.d_matrix.add_(by_row.view(-1, *self.scaled.shape).sum(0), alpha=self.scale)
