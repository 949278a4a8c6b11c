"""From images to tokens: (batch, channels, H, W) -> (batch, h w, dim), and the grid (h, w)."""

from typing import Literal

from torch import Tensor, nn

Stem = Literal["patch", "hmlp", "conv"]


class PatchEmbedding(nn.Module):
    """Patches of an image as tokens. `patch`: side of a patch, by which both sides of the image must be divisible."""

    def __init__(self, channels: int, dim: int, patch: int, stem: Stem = "patch") -> None:
        super().__init__()
        self.patch = patch
        if stem != "patch" and patch not in (8, 16):
            raise ValueError(f"stem {stem!r} is for patches of 8 or 16 pixels, not {patch}; stem 'patch' takes any")
        builders = {"patch": _plain, "hmlp": _hmlp, "conv": _convolutional}
        self.proj = builders[stem](channels, dim, patch)

    def forward(self, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        height, width = images.shape[-2:]
        if height % self.patch or width % self.patch:
            raise ValueError(f"images of {height} x {width} pixels do not divide into patches of {self.patch}")
        x = self.proj(images)
        return x.flatten(2).transpose(1, 2), (x.shape[2], x.shape[3])


def _plain(channels: int, dim: int, patch: int) -> nn.Module:
    return nn.Conv2d(channels, dim, patch, stride=patch)


def _hmlp(channels: int, dim: int, patch: int) -> nn.Sequential:
    """Three steps without overlap, each a map of small patches: no pixel is seen by two tokens."""
    narrow, first = dim // 4, patch // 4
    return nn.Sequential(
        nn.Conv2d(channels, narrow, first, stride=first),
        nn.GroupNorm(1, narrow),
        nn.GELU(),
        nn.Conv2d(narrow, narrow, 2, stride=2),
        nn.GroupNorm(1, narrow),
        nn.GELU(),
        nn.Conv2d(narrow, dim, 2, stride=2),
        nn.GroupNorm(1, dim),
    )


def _convolutional(channels: int, dim: int, patch: int) -> nn.Sequential:
    """Three 3 x 3 convolutions of stride 2, then patches of what remains."""
    narrow, rest = dim // 4, patch // 8
    parts: list[nn.Module] = []
    for before, after in ((channels, narrow), (narrow, narrow), (narrow, dim)):
        parts += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GroupNorm(1, after), nn.ReLU()]
    return nn.Sequential(*parts, nn.Conv2d(dim, dim, rest, stride=rest))


class OverlappingPatches(nn.Module):
    """Patches that overlap, as tokens, with a layer norm: the entrance of a pyramid's stage."""

    def __init__(self, channels: int, dim: int, size: int, stride: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, dim, size, stride=stride, padding=size // 2)
        self.norm = nn.LayerNorm(dim)

    def forward(self, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        x = self.proj(images)
        return self.norm(x.flatten(2).transpose(1, 2)), (x.shape[2], x.shape[3])
